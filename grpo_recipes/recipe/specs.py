"""What a recipe's keys may hold: dataclasses for our mappings, and the type check that all keys share, TRL's too.

A new key of ours is a field of `recipe.Recipe`, whose type is a `Literal`, a plain type, or a `Spec` defined here.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, Self, cast

from grpo_recipes.recipe.losses import LOSS_TYPES
from grpo_rewards.errors import UserError, did_you_mean
from grpo_rewards.files import UnreadableFile, read_text
from grpo_rewards.redaction import HIDDEN, is_secret, redacted

KLEstimator = Literal["sampled", "full"]
"""How `beta` weighs the distance from the reference: TRL's estimate from sampled tokens, or the sum over the vocabulary."""

AdvantageRule = Literal["max_rl"]
"""Name of a rule for advantages that TRL's options cannot express. `training/advantages.py` computes them."""

GenerationMode = Literal["auto", "off"]
"""Whether transformers' `generate` runs each prompt of a batch once and drops finished rows, where that is exact."""

DatasetName = Literal["gsm8k", "math", "multiple_choice", "rlaif", "arithmetic", "scored"]
SYSTEM_PROMPT_NAMES = ("reasoning", "think", "boxed", "minimind", "none")

RECORDED_REWARD = "recorded_reward"
"""The column in which rewards find what was recorded for a response."""


class RecipeError(UserError):
    """Error about a recipe, whose message already names its file or its source."""


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
    RENAMED: ClassVar[Mapping[str, str]] = {}
    """Replacement of each key that is no longer read, for the message that refuses the key."""

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
            if key in cls.RENAMED:
                raise SpecError(f"`{cls.KEY}.{key}` is gone: write `{cls.RENAMED[key]}`")
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
class SourceSpec(Spec):
    """One table of a mixture, under the keys of TRL's `DatasetConfig`, with its meanings.

    Attributes:
        path: what `dataset.path` may be.
        name: the hub configuration.
        data_dir: handed to `datasets.load_dataset`, as is `data_files`.
        data_files: files inside `path`, or of the format that `path` names (`json`, `csv`, `parquet`).
        split: the split, or slices of it.
        columns: which columns to take, as a list; or new names for columns, as a mapping from new to old, which keeps
            the others as they are.
        fraction: this source's share of the mixture, relative to the other fractions: of every source the first rows,
            as many as leave none short. All sources have one, or none.
    """

    KEY = "dataset.path"

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, Any] | None = None
    split: str = "train"
    columns: list[str] | dict[str, Any] | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise SpecError(
                f"`dataset.path`: the `fraction` of {self.path} is {self.fraction}: set it above 0, at most 1"
            )
        _check_columns(self.columns)


def _check_columns(columns: Any) -> None:
    names = [*columns, *columns.values()] if isinstance(columns, dict) else columns or []
    for name in names:
        if not isinstance(name, str) or not name:
            raise SpecError(
                f"`dataset.columns` has {name!r} where the name of a column belongs: write `question: problem`"
            )


@dataclass(frozen=True)
class PassRateSpec(Spec):
    """The training rows that an evaluation solved neither too often nor too rarely.

    Attributes:
        evaluation: the folder of an evaluation of the training split, `grpo-recipes evaluate --split train --samples N`.
        keep: the smallest and the largest share of right samples of a row that is kept.
    """

    KEY = "dataset.pass_rate"

    evaluation: str
    keep: list[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.keep) != 2 or not 0 <= self.keep[0] <= self.keep[1] <= 1:
            raise SpecError(
                f"`dataset.pass_rate.keep` is {self.keep}: give the smallest and the largest share, as in [0.1, 0.9]"
            )


@dataclass(frozen=True)
class DatasetSpec(Spec):
    """Which rows to read and how to phrase them as prompts.

    Attributes:
        name: a preset, for tables of a known form: `gsm8k`, `math`, `multiple_choice`, `rlaif`, `arithmetic`, `scored`.
        path: a hub id, a `save_to_disk` folder, a JSONL, JSON, CSV or Parquet file, a glob of such files, or a list of
            sources (`SourceSpec`); a preset with a home on the hub reads that when absent.
        config: the hub configuration.
        split: the split to train on. Slices such as `train[:5%]` work for every kind of path; a file or folder
            that holds a single split is sliced under any name.
        eval_split: the split to evaluate on, used when evaluation is on.
        eval_share: the share of the rows to evaluate on instead, chosen by a hash of what makes a row's prompt.
        eval_path: where the held-out rows lie, if not under `path`: all that `path` may be.
        columns: new names for columns, as a mapping from new to old (`{question: problem, answer: solution}`), or a
            list of those to take.
        system_prompt: a name of `prompts.SYSTEM_PROMPTS`, or the text itself, or `{file: prompt.txt}`, for prompts
            that do not bring their own; the preset's when absent, and none without a preset.
        prompt_template: the user's message as a jinja2 template over the row's columns.
        prompt_format: `conversational` (messages, rendered by the model's chat template) or `text` (the stripped contents
            joined with newlines). A column `prompt` stays what it is when absent; other prompts are conversational.
        max_prompt_tokens: the longest prompt in tokens, as rendered; None for no limit. See `prompts.limit_prompts`.
        overlong_prompts: what becomes of a longer one: `drop` it, or `cut_left` its earlier turns, then the question.
        pass_rate: which training rows to keep by how often an evaluation solved them (`PassRateSpec`); all when absent.
        size: problems in each split of `arithmetic`; 2,000 when absent.
        seed: which `arithmetic` problems are drawn.
    """

    KEY = "dataset"
    FOREIGN: ClassVar[Mapping[str | None, tuple[str, ...]]] = {
        "arithmetic": ("path", "eval_path", "config", "columns"),
        "scored": ("config", "size", "seed", "pass_rate", "system_prompt", "prompt_template", "eval_share"),
    }
    """The keys that a dataset does not use; of those not named here, the keys of `arithmetic`."""

    SYSTEM_PROMPTS: ClassVar[Mapping[DatasetName, str]] = {
        **dict.fromkeys(("gsm8k", "multiple_choice", "rlaif", "arithmetic"), "reasoning"),
        "math": "boxed",
    }
    """The system prompt of each preset unless the recipe names another."""

    name: DatasetName | None = None
    path: str | list[Any] | None = None
    config: str | None = None
    split: str = "train"
    eval_split: str | None = None
    eval_share: float | None = None
    eval_path: str | list[Any] | None = None
    columns: list[str] | dict[str, Any] | None = None
    system_prompt: str | dict[str, Any] | None = None
    prompt_template: str | None = None
    prompt_format: Literal["conversational", "text"] | None = None
    max_prompt_tokens: int | None = None
    overlong_prompts: Literal["drop", "cut_left"] = "drop"
    pass_rate: PassRateSpec | None = None
    size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("max_prompt_tokens", "size"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise SpecError(f"`dataset.{key}` is {value}: set it to at least 1, or leave the key out")
        if self.path is None and self.name in (None, "rlaif", "multiple_choice", "scored"):
            what = f"that `{self.name}` is to read" if self.name else "to read, or a preset with `dataset.name`"
            raise SpecError(f"`dataset.path` is missing: name the file, folder or hub id {what}")
        self._check_foreign()
        _check_columns(self.columns)
        self._check_held_out()
        for key in ("path", "eval_path"):
            self._parse_sources(key)
        default = self.SYSTEM_PROMPTS.get(self.name) if self.name else None
        object.__setattr__(self, "system_prompt", _prompt_text(self.system_prompt) or default)
        if self.name is not None and self.prompt_format is None:
            object.__setattr__(self, "prompt_format", "text" if self.name == "scored" else "conversational")

    def _check_foreign(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for key in self.FOREIGN.get(self.name, ("size", "seed")):
            if getattr(self, key) != defaults[key]:
                raise SpecError(f"`dataset.{key}`: the dataset `{self.name or 'path'}` does not use it: remove the key")
        if self.name == "scored" and not str(self.path).endswith((".jsonl", ".json", ".csv", ".parquet")):
            raise SpecError(f"`dataset.path`: `scored` reads a file, not {self.path!r}: name a .jsonl file")
        if self.name == "scored" and self.prompt_format == "conversational":
            raise SpecError("`dataset.prompt_format`: recorded prompts are text as they stand: remove the key")

    def _check_held_out(self) -> None:
        if self.eval_share is None:
            return
        if not 0 < self.eval_share < 1:
            raise SpecError(f"`dataset.eval_share` is {self.eval_share}: set it above 0 and below 1, as in 0.1")
        for key in ("eval_split", "eval_path"):
            if getattr(self, key) is not None:
                raise SpecError(f"`dataset` has both `eval_share` and `{key}`: keep the one that says what is held out")

    def _parse_sources(self, key: str) -> None:
        """Read the list of a mixture; its sources bring their own splits and hub configurations."""
        entries = getattr(self, key)
        if not isinstance(entries, list):
            return
        if not entries:
            raise SpecError(f"`dataset.{key}` is an empty list: name at least one source")
        sources = [SourceSpec.parse(entry) for entry in entries]
        taken = [source.fraction for source in sources]
        if None in taken and any(fraction is not None for fraction in taken):
            raise SpecError(f"`dataset.{key}`: give every source a `fraction`, or none of them")
        for unused in ("config",) if key == "eval_path" else ("config", "eval_split"):
            if getattr(self, unused) is not None:
                raise SpecError(
                    f"`dataset.{unused}` does not go with a list of sources: write `name` and `split` in each"
                )
        if key == "path" and self.split != "train":
            raise SpecError("`dataset.split` does not go with a list of sources: write `split` in each")
        if key == "eval_path" and self.eval_split is not None:
            raise SpecError("`dataset.eval_split` does not go with a list of sources: write `split` in each")
        object.__setattr__(self, key, sources)

    def as_dict(self) -> dict[str, Any]:
        """The mapping as a recipe writes it, the sources of a mixture as mappings too."""
        written = super().as_dict()
        for key in ("path", "eval_path"):
            if isinstance(sources := getattr(self, key), list):
                written[key] = [source.as_dict() for source in sources]
        return written

    @classmethod
    def expand(cls, raw: Any) -> Mapping[str, Any]:
        """`raw` as a mapping: a plain string is the name of a preset."""
        names = typing.get_args(DatasetName)
        if isinstance(raw, str) and raw not in names:
            nearest = did_you_mean(raw, names, otherwise=f": choose {' or '.join(names)}, or write `{{path: {raw}}}`")
            raise SpecError(f"`dataset.name` can't be `{raw}`{nearest}")
        return super().expand(raw)


def _prompt_text(given: Any) -> str | None:
    """The name or the text of a system prompt, read from its file if it is `{file: ...}`. Raises `SpecError`."""
    if given is None:
        return None
    place = ""
    if isinstance(given, Mapping):
        if set(given) != {"file"} or not isinstance(given["file"], str):
            raise SpecError(f"`dataset.system_prompt` must be a name, the text, or {{file: prompt.txt}}, not {given!r}")
        place = f" (read from {given['file']})"
        try:
            given = read_text(Path(given["file"]).expanduser()).removeprefix("\ufeff")
        except (OSError, RuntimeError, UnreadableFile) as error:  # RuntimeError: the home of an unknown user
            reason = error.problem if isinstance(error, UnreadableFile) else getattr(error, "strerror", None) or error
            raise SpecError(
                f"`dataset.system_prompt`: {place[12:-1]} can't be read ({reason}): correct the path"
            ) from error
    text = given.strip()
    if not text:
        raise SpecError(f"`dataset.system_prompt`{place} is empty: write `none` for no system prompt")
    # A lone word is taken for a name, so that a misspelt one does not become the prompt.
    if re.fullmatch(r"[A-Za-z0-9_-]+", text) and (place or text not in SYSTEM_PROMPT_NAMES):
        names = " or ".join(SYSTEM_PROMPT_NAMES)
        nearest = did_you_mean(text, SYSTEM_PROMPT_NAMES, otherwise=f": choose {names}, or write a text")
        raise SpecError(f"`dataset.system_prompt`{place} can't be the one word `{text}`{nearest}")
    return text


@dataclass(frozen=True)
class ReferenceSpec(Spec):
    """What the KL term ties the policy to: a `name`, or an `adapter` in a folder, on the hub, or of the model's by name."""

    KEY = "reference"

    name: Literal["initial", "base"] | None = None
    """`initial` if neither this nor `adapter` is given."""
    adapter: str | None = None
    """A folder with an adapter, a hub id, or the name of an adapter of the model's."""
    reset_optimizer_on_sync: bool = False
    """Whether the optimiser starts afresh when `sync_ref_model` refreshes the reference."""

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
    """Layout of the training passes, without padding and zero-advantage rows wherever the gradient stays the same."""

    KEY = "micro_batching"
    WORDS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"auto": {}, "off": {"layout": "padded"}}
    RENAMED: ClassVar[Mapping[str, str]] = {
        "pack": "layout: packed` or `layout: trimmed",
        "trim": "layout: trimmed` or `layout: padded",
    }

    layout: Literal["packed", "trimmed", "padded"] = "packed"
    """`packed` computes the prompt of a group once, in one row without padding; `trimmed` cuts each micro-batch to its
    own longest prompt and completion; `padded` is TRL's own layout, which skips no row."""
    skip_zero_advantage: bool = True
    """Skip rows that cannot contribute to the gradient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout == "padded":
            object.__setattr__(self, "skip_zero_advantage", False)


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


@dataclass(frozen=True)
class SamplingSpec(Spec):
    """Which prompts of a generation are generated: fewer of those whose last groups had no variance."""

    KEY = "sampling"
    WORDS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"informative": {}}

    informative: Literal["biased", "unbiased"] = "biased"
    """`biased` counts a prompt that is left out as a group without variance; `unbiased` divides the advantages of the others
    by their probabilities, so that the expected gradient is that of the whole generation."""
    exploration: float = 0.5
    """The probability with which a prompt is generated after one group without variance; its square after two in a row, ..."""
    floor: float = 0.1
    """The smallest probability, so that no prompt is left out for ever."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("exploration", "floor"):
            if not 0 < getattr(self, key) <= 1:
                raise SpecError(f"`sampling.{key}` is {getattr(self, key)}: set it above 0, at most 1")

    @property
    def is_unbiased(self) -> bool:
        """Whether the advantages are weighed by the inverse of their probabilities."""
        return self.informative == "unbiased"

    def check(self, config: Any, *, router_loss: bool = False) -> None:
        """Raise `SpecError` where the weights can't keep the objective of `config` (attributes of `GRPOConfig`)."""
        if not self.is_unbiased:
            return
        key = "`sampling: {informative: unbiased}`"
        allowed = [name for name, loss in LOSS_TYPES.items() if loss.is_sum_over_rows]
        mistakes = {
            f"{key} needs a loss whose divisor does not depend on which prompts are drawn, and that of `loss_type: "
            f"{config.loss_type}` counts their tokens: choose {' or '.join(allowed)}": config.loss_type not in allowed,
            f"{key} weighs advantages, which the KL term of `beta` does not have: set `beta: 0`": config.beta != 0,
            f"{key} needs advantages that do not depend on the other prompts: set `scale_rewards: group` or `none`": (
                str(config.scale_rewards).lower() == "batch"
            ),
            f"{key}: `multi_objective_aggregation: normalize_then_sum` divides by a deviation over all prompts drawn: set "
            "`sum_then_normalize`": config.multi_objective_aggregation == "normalize_then_sum",
            f"{key}: `top_entropy_quantile` is a threshold over all prompts drawn: set it to 1": (
                config.top_entropy_quantile < 1
            ),
            f"{key} weighs advantages, which an entropy bonus does not have: remove `entropy_coef` and "
            "`use_adaptive_entropy`": bool(config.entropy_coef or config.use_adaptive_entropy),
            f"{key} weighs advantages, which the router's loss does not have: set `router_aux_loss_coef: 0`": router_loss,
        }
        for sentence, is_made in mistakes.items():
            if is_made:
                raise SpecError(sentence)


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
