"""What a recipe's keys may hold: dataclasses for our mappings, and the type check that all keys share, TRL's too.

A new key of ours is a field of `recipe.Recipe`, whose type is a `Literal`, a plain type, or a `Spec` defined here.
"""

from __future__ import annotations

import typing
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, Self, cast

from grpo_rewards.errors import UserError, did_you_mean
from grpo_rewards.redaction import HIDDEN, is_secret, redacted

KLEstimator = Literal["sampled", "full"]
"""How `beta` weighs the distance from the reference: TRL's estimate from sampled tokens, or the sum over the vocabulary."""

GenerationMode = Literal["auto", "off"]
"""Whether transformers' `generate` runs each prompt of a batch once and drops finished rows, where that is exact."""

DatasetName = Literal["gsm8k", "rlaif", "arithmetic", "scored"]
PromptStyle = Literal["reasoning", "think", "minimind", "none"]

RECORDED_REWARD = "recorded_reward"
"""The column in which rewards find what was recorded for a response."""


_OFF = {"pack": False, "trim": False, "skip_zero_advantage": False}


class SpecError(UserError):
    """A value that a key of a recipe can't have."""


@dataclass(frozen=True)
class Spec:
    """A key of a recipe that holds a mapping; its fields are the mapping's keys.

    Building one checks the type of every field. Raises `SpecError`.
    """

    KEY: ClassVar[str]
    WORDS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Plain values that stand for a mapping. Without any, a plain string is the value of the first field."""

    def __post_init__(self) -> None:
        for name, hint in self.hints().items():
            object.__setattr__(self, name, typed(f"{self.KEY}.{name}", getattr(self, name), hint))

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """The mapping's keys, with the type of each."""
        return hints(cast(Any, cls))  # mypy takes a dataclass for unhashable

    @classmethod
    def parse(cls, raw: Any) -> Self:
        """Read what a recipe says: a mapping, or a plain value that stands for one. Raises `SpecError`."""
        if isinstance(raw, cls):
            return raw
        mapping = cls.expand(raw)
        for key in mapping:
            if key not in cls.hints():
                nearest = did_you_mean(str(key), cls.hints(), otherwise=f": choose from {', '.join(cls.hints())}")
                raise SpecError(f"unknown key `{cls.KEY}.{key}`{nearest}")
        for field in fields(cls):
            if field.default is MISSING and field.name not in mapping:
                raise SpecError(f"`{cls.KEY}.{field.name}` is missing: {choices_text(cls.hints()[field.name])}")
        return cls(**mapping)

    @classmethod
    def expand(cls, raw: Any) -> Mapping[str, Any]:
        """`raw` as a mapping, its keys not checked yet. Raises `SpecError` for what stands for none."""
        if isinstance(raw, Mapping):
            return raw
        raw = _off(raw, cls.WORDS)
        if isinstance(raw, str) and raw in cls.WORDS:
            return cls.WORDS[raw]
        names = ", ".join(cls.hints())
        if cls.WORDS:
            words = ", ".join(cls.WORDS)
            raise SpecError(f"`{cls.KEY}` must be {words}, or a mapping of {names}, not {redacted(raw)!r}")
        if not isinstance(raw, str):
            raise SpecError(f"`{cls.KEY}` must be a name or a mapping of {names}, not {redacted(raw)!r}")
        return {next(iter(cls.hints())): raw}

    def as_dict(self) -> dict[str, Any]:
        """The mapping as a recipe writes it, what is None left out."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class DatasetSpec(Spec):
    """Which rows to read and how to phrase them as prompts.

    Attributes:
        name: which reader: `gsm8k`, `rlaif`, `arithmetic` or `scored`.
        path: a hub id, a `save_to_disk` folder, or a `.jsonl` file; `gsm8k` reads `openai/gsm8k` when absent.
        config: the hub configuration; `main` for `openai/gsm8k`.
        split: the split to train on. Slices such as `train[:5%]` work for every kind of path; a file or folder
            that holds a single split is sliced under any name.
        eval_split: the split to evaluate on, used when evaluation is on.
        eval_path: where the held-out rows lie, if not under `path`; needed for JSONL, which holds one split.
        prompt_style: a system prompt of `data.PROMPT_STYLES`, for rows that do not bring their own.
        prompt_format: `conversational` (messages, rendered by the model's chat template) or `text` (the stripped contents
            joined with newlines). The prompts of `scored` are text as recorded; other datasets are conversational by
            default.
        max_prompt_tokens: the longest prompt in tokens, as rendered; None for no limit. See `data.limit_prompts`.
        overlong_prompts: what becomes of a longer one: `drop` it, or `cut_left` its earlier turns, then the question.
        size: problems in each split of `arithmetic`; 2,000 when absent.
        seed: which `arithmetic` problems are drawn.
    """

    KEY = "dataset"
    FOREIGN: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "arithmetic": ("path", "eval_path", "config"),
        "scored": ("config", "size", "seed", "prompt_style"),
    }
    """The keys that a dataset does not use; of those not named here, the keys of `arithmetic`."""

    name: DatasetName
    path: str | None = None
    config: str | None = None
    split: str = "train"
    eval_split: str | None = None
    eval_path: str | None = None
    prompt_style: PromptStyle = "reasoning"
    prompt_format: Literal["conversational", "text"] | None = None
    max_prompt_tokens: int | None = None
    overlong_prompts: Literal["drop", "cut_left"] = "drop"
    size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("max_prompt_tokens", "size"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise SpecError(f"`dataset.{key}` is {value}: set it to at least 1, or leave the key out")
        if self.name == "rlaif" and self.path is None:
            raise SpecError("`dataset.path` is missing: name the .jsonl file, folder or hub id that `rlaif` is to read")
        defaults = {field.name: field.default for field in fields(self)}
        for key in self.FOREIGN.get(self.name, ("size", "seed")):
            if getattr(self, key) != defaults[key]:
                raise SpecError(f"`dataset.{key}`: the dataset `{self.name}` does not use it: remove the key")
        if self.name == "scored" and (self.path is None or not self.path.endswith(".jsonl")):
            raise SpecError(f"`dataset.path`: `scored` reads a .jsonl file, not {self.path!r}: name the file")
        if self.name == "scored" and self.prompt_format == "conversational":
            raise SpecError("`dataset.prompt_format`: recorded prompts are text as they stand: remove the key")
        if self.prompt_format is None:
            object.__setattr__(self, "prompt_format", "text" if self.name == "scored" else "conversational")


@dataclass(frozen=True)
class ReferenceSpec(Spec):
    """What the KL term ties the policy to: a `name`, or an `adapter` in a folder, on the hub, or of the model's by name."""

    KEY = "reference"

    name: Literal["initial", "base"] | None = None
    """`initial` if neither this nor `adapter` is given."""
    adapter: str | None = None
    reset_optimizer_on_sync: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None and self.adapter is not None:
            raise SpecError(
                "`reference` has both `name` and `adapter`: keep one, as in `--reference '{adapter: FOLDER}'`"
            )
        if self.adapter == "":
            raise SpecError("`reference.adapter` is empty: name a folder or a hub id")
        if self.adapter is None and self.name is None:
            object.__setattr__(self, "name", "initial")

    def check_refresh(self, config: Any) -> None:
        """Raise `SpecError` where the refresh keys of `config` (attributes of `GRPOConfig`) do not fit this reference."""
        if not config.sync_ref_model:
            if self.reset_optimizer_on_sync:
                raise SpecError(
                    "`reference.reset_optimizer_on_sync` has no effect without `sync_ref_model: true`: set it, or remove "
                    "the key"
                )
            return
        if not config.beta:
            raise SpecError(
                "`sync_ref_model` refreshes a reference, and `beta: 0` has none: set `beta` above 0, or remove "
                "`sync_ref_model`"
            )
        if self.name == "base":
            raise SpecError(
                "`reference: base` is the adapter switched off and can't be refreshed: use `reference: initial`, which starts "
                "as the base for a new adapter"
            )
        if config.ref_model_sync_steps < 1:
            raise SpecError(f"`ref_model_sync_steps` is {config.ref_model_sync_steps}: set it to 1 or more")
        if not 0 < config.ref_model_mixup_alpha <= 1:
            raise SpecError(
                f"`ref_model_mixup_alpha` is {config.ref_model_mixup_alpha}: set it above 0, and to 1 for a hard refresh"
            )


@dataclass(frozen=True)
class MicroBatching(Spec):
    """How padding and rows without a gradient are left out of the training passes. Each is done only where it is exact."""

    KEY = "micro_batching"
    WORDS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"auto": {}, "off": _OFF}

    pack: bool = True
    """Compute the prompt of a group once, in one row without padding."""
    trim: bool = True
    """Cut each micro-batch to its own longest prompt and completion."""
    skip_zero_advantage: bool = True
    """Leave out rows that cannot contribute to the gradient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.trim and (self.pack or self.skip_zero_advantage):
            raise SpecError("`micro_batching`: without `trim` nothing else is done: write `micro_batching: off`")


@dataclass(frozen=True)
class OfflineSpec(Spec):
    """Recorded, scored responses in place of generated ones."""

    KEY = "offline"

    baseline: Literal["group", "batch"] = "group"
    """What the reward of a response is compared with."""

    @property
    def compares_whole_batch(self) -> bool:
        """Whether a response is compared with the whole generation batch, one response a prompt."""
        return self.baseline == "batch"


@cache
def hints(config_class: type) -> dict[str, Any]:
    """The type of every field that a dataclass is built from."""
    types = typing.get_type_hints(config_class)
    return {field.name: types[field.name] for field in fields(config_class) if field.init}


def spec_of(hint: Any) -> type[Spec] | None:
    """The `Spec` that a key of this type holds, if it does."""
    return next((option for option in _options(hint) if isinstance(option, type) and issubclass(option, Spec)), None)


def typed(key: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint` asks, converted where YAML's guess loses nothing. Raises `SpecError`, naming `key`."""
    options = _options(hint)
    spec = spec_of(hint)
    if spec is not None and not (value is None and type(None) in options):
        return spec.parse(value)
    if isinstance(value, bool) and bool not in options and str in options:
        return _word(key, value)
    choices = _choices(hint)
    value = _off(value, choices)
    for convert in (_as_is, _converted):
        for option in options:
            try:
                return convert(value, option)
            except (TypeError, ValueError):
                continue
    if choices:
        raise not_a_choice(key, value, choices)
    shown = HIDDEN if is_secret(key, value) else repr(redacted(value))
    raise SpecError(f"`{key}` must be {_type_name(options)}, not {shown}")


def not_a_choice(key: str, value: Any, choices: typing.Sequence[str]) -> SpecError:
    """The error for a value that is none of the words that `key` may have."""
    nearest = did_you_mean(str(value), choices, otherwise=f": choose {' or '.join(choices)}")
    return SpecError(f"`{key}` can't be `{value}`{nearest}")


def choices_text(hint: Any) -> str:
    """What to do about a missing key: choose a word, or give it."""
    return f"choose {' or '.join(_choices(hint))}" if _choices(hint) else "give it"


def _choices(hint: Any) -> list[str]:
    """The words of a `Literal`."""
    literals = [option for option in _options(hint) if typing.get_origin(option) is Literal]
    return [word for option in literals for word in typing.get_args(option)]


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union; else the type alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)


def _word(key: str, value: bool) -> str:
    """The word behind a boolean where text is asked for: YAML reads `no` as false, and `eval_strategy: no` is meant."""
    return "no" if key.endswith("_strategy") and not value else str(value).lower()


def _off(value: Any, words: Collection[str]) -> Any:
    """`value`, but `off` for false where that is one of the words: YAML reads `off` as false."""
    return "off" if value is False and "off" in words else value


def _as_is(value: Any, option: Any) -> Any:
    """`value` if it is of type `option` already (an integer is a float, a boolean is no integer), or raise TypeError."""
    if option is Any or (value is None and option in (None, type(None))):
        return value
    if option is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(option) is list:
        (element,) = typing.get_args(option)
        return [_converted(entry, element) for entry in _as_is(value, list)]
    kind = typing.get_origin(option) or option
    if kind is Literal and value in typing.get_args(option):
        return value
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise TypeError


def _converted(value: Any, option: Any) -> Any:
    """`value` turned into `option` where YAML's own guess loses nothing ("5e-6", 8.0, a number as a name), or raise."""
    if option is str and isinstance(value, (int, float, Path)):  # a trainer's caller may give a folder as a path
        return str(value)
    if option is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if option in (int, float) and isinstance(value, str):
        return option(value)
    if option is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if typing.get_origin(option) is list and isinstance(value, (str, int, float)):
        return _as_is([value], option)
    return _as_is(value, option)


def _type_name(options: typing.Sequence[Any]) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}
    kinds = [typing.get_origin(option) or option for option in options if option is not type(None)]
    return " or ".join(dict.fromkeys(names.get(kind, "a list" if kind is list else "text") for kind in kinds))
