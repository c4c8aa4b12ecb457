"""Nested mappings of a recipe as dataclasses, and the type check that all keys share, TRL's keys included.

A new key of ours is a field of `recipe.Recipe`. Its type is a `Literal`, a simple type, or a `Spec`. The
`Spec` of the key `dataset` is in `dataset.py`, and the others are here.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from grpo_recipes.recipe.losses import LOSS_TYPES
from grpo_rewards.errors import UserError, did_you_mean
from grpo_rewards.redaction import HIDDEN, is_secret, redacted

if TYPE_CHECKING:
    from types import SimpleNamespace

    from trl import GRPOConfig

    # TRL's training arguments, or the values of a recipe under the same names (`Recipe.config`).
    TrainingConfig: typing.TypeAlias = GRPOConfig | SimpleNamespace

KLEstimator = Literal["sampled", "full"]
"""Estimator of the KL divergence in the loss: TRL's on the sampled tokens, or the sum over the vocabulary."""

AdvantageRule = Literal["max_rl"]
"""Name of a rule for advantages that TRL's options cannot express. `training/advantages.py` computes them."""

GenerationMode = Literal["auto", "off"]
"""Mode of transformers' `generate`. `auto` computes a prompt once and drops finished rows where this is exact."""

RECORDED_REWARD = "recorded_reward"
"""Column with the recorded reward of each response, which reward functions read."""


class RecipeError(UserError):
    """Error about a recipe, whose message already names its file or its source."""


@dataclass(frozen=True)
class Range:
    """Interval of finite numbers, with one optional number outside it."""

    low: int
    high: int | None = None
    above: bool = False
    """True if `low` itself is excluded."""
    below: bool = False
    """True if `high` itself is excluded."""
    or_: int | None = None
    """Number outside the interval that is allowed too."""

    def __contains__(self, value: float) -> bool:
        """Return True if a key may have `value`."""
        if value == self.or_:
            return True
        is_high_enough = value > self.low if self.above else value >= self.low
        is_low_enough = self.high is None or (value < self.high if self.below else value <= self.high)
        return math.isfinite(value) and is_high_enough and is_low_enough

    def __str__(self) -> str:
        """Return the words that follow "set a number", as in `above 0 and at most 1`."""
        text = f"above {self.low:,}" if self.above else f"of at least {self.low:,}"
        if self.high is not None:
            text += f" and {'below' if self.below else 'at most'} {self.high:,}"
        if self.or_ is not None:
            text += f", or {self.or_}"
        return text


POSITIVE = Range(0, above=True)
NOT_NEGATIVE = Range(0)
SHARE = Range(0, 1, above=True)
COUNT = Range(1)


def check_number(key: str, value: float | None, allowed: Range, reason: str = "") -> None:
    """Raise `UserError` if `value` is outside the range of its key.

    Args:
        key: key, for the message.
        value: value, or None for the default, which is valid.
        allowed: range of the key.
        reason: clause that follows the value in the message.
    """
    if value is not None and value not in allowed:
        raise UserError(f"`{key}`", f"it is {value}{reason}", f"set a number {allowed}")


def check_setting(config: TrainingConfig, key: str, allowed: Sequence[Any], reason: str) -> None:
    """Raise `UserError` unless a key has an allowed value.

    Args:
        config: configuration with the key.
        key: name of the key.
        allowed: values that the key may have.
        reason: clause that follows the value in the message.
    """
    if (value := getattr(config, key)) not in allowed:
        raise UserError(f"`{key}`", f"`{value}` {reason}", f"set `{key}` to {' or '.join(map(str, allowed))}")


@dataclass(frozen=True)
class Spec:
    """Key of a recipe that holds a mapping. The fields are the keys of the mapping.

    The constructor checks the type of every field, and raises `UserError`.
    """

    KEY: ClassVar[str]
    WORDS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Words that stand for a mapping. If there are none, a string is the value of the first field."""
    NUMBERS: ClassVar[Mapping[str, Range]] = {}
    """Numbers that a field may have, if its type is not the only limit."""

    def __post_init__(self) -> None:
        for name, hint in self.hints().items():
            value = typed(f"{self.KEY}.{name}", getattr(self, name), hint)
            if name in self.NUMBERS:
                check_number(f"{self.KEY}.{name}", value, self.NUMBERS[name])
            object.__setattr__(self, name, value)

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """Return the keys of the mapping with their types."""
        return hints(cast(Any, cls))  # mypy takes a dataclass for unhashable

    @classmethod
    def parse(cls, raw: Any) -> Self:
        """Return the spec of a mapping, or of a word that stands for one. Raise `UserError` for anything else."""
        if isinstance(raw, cls):
            return raw
        mapping = cls.expand(raw)
        for key in mapping:
            if key not in cls.hints():
                nearest = did_you_mean(str(key), cls.hints(), otherwise=f"choose from {', '.join(cls.hints())}")
                raise UserError(f"`{cls.KEY}.{key}`", "unknown key", nearest)
        for field in fields(cls):
            if field.default is MISSING and field.name not in mapping:
                raise UserError(f"`{cls.KEY}.{field.name}`", "it is missing", "give it")
        return cls(**mapping)

    @classmethod
    def expand(cls, raw: Any) -> Mapping[str, Any]:
        """Return the mapping that `raw` is or stands for, with unchecked keys. Raise `UserError` for anything else."""
        if isinstance(raw, Mapping):
            return raw
        word = "off" if raw is False else raw  # YAML reads `off` as false
        if isinstance(word, str) and word in cls.WORDS:
            return cls.WORDS[word]
        if isinstance(raw, str) and not cls.WORDS:
            return {next(iter(cls.hints())): raw}
        allowed = ", ".join(cls.WORDS) or "a name"
        fix = f"write {allowed}, or a mapping of {', '.join(cls.hints())}"
        raise UserError(f"`{cls.KEY}`", f"it can't be {redacted(raw)!r}", fix)

    def as_dict(self) -> dict[str, Any]:
        """Return the mapping as a recipe writes it, without the keys that are None."""
        return asdict(self, dict_factory=lambda pairs: {key: value for key, value in pairs if value is not None})


@dataclass(frozen=True)
class ReferenceSpec(Spec):
    """Reference policy of the KL term: a `name`, or an `adapter`."""

    KEY = "reference"

    name: Literal["initial", "base"] | None = None
    """`initial` (the policy before training) or `base` (the model without adapter). Default: `initial` without an
    `adapter`."""
    adapter: str | None = None
    """Folder of an adapter, hub id, or name of an adapter that the model has."""
    reset_optimizer_on_sync: bool = False
    """True to reset the optimizer's state when `sync_ref_model` refreshes the reference."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None and self.adapter is not None:
            fix = "keep one, as in `--reference '{adapter: FOLDER}'`"
            raise UserError("`reference`", "it has both `name` and `adapter`", fix)
        if self.adapter is None and self.name is None:
            object.__setattr__(self, "name", "initial")

    def check_refresh(self, config: TrainingConfig) -> None:
        """Raise `UserError` if the refresh keys of `config` do not fit this reference."""
        if self.reset_optimizer_on_sync:
            check_setting(config, "sync_ref_model", (True,), "gives `reference.reset_optimizer_on_sync` no effect")
        if not config.sync_ref_model:
            return
        check_number("beta", config.beta, POSITIVE, ", which needs no reference for `sync_ref_model` to refresh")
        if self.name == "base":
            fix = "use `reference: initial`, which equals the base for a new adapter"
            raise UserError("`reference`", "`base` is the model without adapter and can't be refreshed", fix)
        check_number("ref_model_sync_steps", config.ref_model_sync_steps, COUNT)
        check_number("ref_model_mixup_alpha", config.ref_model_mixup_alpha, SHARE)


@dataclass(frozen=True)
class MicroBatching(Spec):
    """Layout of the micro-batches, without padding and zero-advantage rows wherever the gradient stays the same."""

    KEY = "micro_batching"
    WORDS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"auto": {}, "off": {"layout": "padded"}}

    layout: Literal["packed", "shared", "trimmed", "padded"] = "packed"
    """`packed` computes the prompt of a group once, in one row without padding. `shared` computes it once too, for any
    model with a cache, with completions padded in buckets of similar length. `trimmed` cuts rows in such buckets to
    their own longest prompt and completion. `padded` is TRL's own layout, which skips no row."""
    skip_zero_advantage: bool = True
    """True to skip zero-advantage rows, which do not contribute to the gradient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout == "padded":
            object.__setattr__(self, "skip_zero_advantage", False)


@dataclass(frozen=True)
class OfflineSpec(Spec):
    """Recorded, scored responses in place of generated completions."""

    KEY = "offline"

    baseline: Literal["group", "batch"] = "group"
    """Completions with which the reward of a response is compared: its `group`, or the generation `batch`."""

    @property
    def compares_whole_batch(self) -> bool:
        """True if a response is compared with the generation batch, which has one response per prompt."""
        return self.baseline == "batch"


@dataclass(frozen=True)
class SamplingSpec(Spec):
    """Sampling of prompts: prompts whose last groups had zero variance are generated less often."""

    KEY = "sampling"
    WORDS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"informative": {}}
    NUMBERS: ClassVar[Mapping[str, Range]] = {"exploration": SHARE, "floor": SHARE}

    informative: Literal["biased", "unbiased"] = "biased"
    """`biased` counts a skipped prompt as a zero-variance group. `unbiased` divides the advantages of the other prompts
    by their probabilities, so that the expected gradient equals the gradient with all prompts."""
    exploration: float = 0.5
    """Probability p that a prompt is generated after one zero-variance group. After n of them in a row it is p^n."""
    floor: float = 0.1
    """Smallest probability, so that every prompt is generated again at some time."""

    @property
    def is_unbiased(self) -> bool:
        """True if the advantages are divided by the probabilities of their prompts."""
        return self.informative == "unbiased"

    def check(self, config: TrainingConfig, *, router_loss: bool = False) -> None:
        """Raise `UserError` if the sampling would change the expected gradient of `config`."""
        if not self.is_unbiased:
            return
        allowed: dict[str, Sequence[Any]] = {
            "loss_type": [name for name, loss in LOSS_TYPES.items() if loss.is_sum_over_rows],
            "beta": (0,),
            "scale_rewards": ("group", "none"),
            "multi_objective_aggregation": ("sum_then_normalize",),
            "top_entropy_quantile": (1,),
            "entropy_coef": (0,),
            "use_adaptive_entropy": (False,),
        }
        if router_loss:
            allowed["router_aux_loss_coef"] = (0,)
        reason = (
            "does not go with `sampling: {informative: unbiased}`, which needs a loss that is a sum of advantages, "
            "each independent of the other prompts drawn"
        )
        for key, values in allowed.items():
            check_setting(config, key, values, reason)


@dataclass(frozen=True)
class ToolLimits(Spec):
    """Limits on the calls of tools and of the methods of an environment."""

    KEY = "tool_limits"
    NUMBERS: ClassVar[Mapping[str, Range]] = {
        "seconds": Range(0, 24 * 60 * 60, above=True),
        "result_tokens": COUNT,
        "failures": Range(0, 1),
    }

    seconds: float = 30.0
    """Time limit of one call in seconds."""
    result_tokens: int = 512
    """Largest length of the result of one call in tokens. A longer result is cut."""
    failures: float = 0.5
    """Share of the last 200 calls that may fail. Above it, the run stops."""


# Types of keys


@cache
def hints(config_class: type) -> dict[str, Any]:
    """Return the type of every field that the constructor of a dataclass takes."""
    types = typing.get_type_hints(config_class)
    return {field.name: types[field.name] for field in fields(config_class) if field.init}


def spec_of(hint: Any) -> type[Spec] | None:
    """Return the `Spec` that a key of type `hint` holds, or None if the key holds no mapping of ours."""
    return next((option for option in _options(hint) if isinstance(option, type) and issubclass(option, Spec)), None)


def typed(key: str, value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint`, converted if this loses nothing. Raise a `UserError` that names `key`."""
    options = _options(hint)
    if value is None and type(None) in options:
        return None
    if (spec := spec_of(hint)) is not None:
        return spec.parse(value)
    if isinstance(value, bool) and bool not in options and str in options:
        # YAML reads `no` as false, and `eval_strategy: no` is meant.
        return "no" if key.endswith("_strategy") and not value else str(value).lower()
    choices = [word for option in options if typing.get_origin(option) is Literal for word in typing.get_args(option)]
    if value is False and "off" in choices:  # YAML reads `off` as false
        value = "off"
    for convert in (_as_is, _converted):
        for option in options:
            with suppress(TypeError, ValueError):
                return convert(value, option)
    if choices:
        raise not_a_choice(key, value, choices)
    names = {int: "a whole number", float: "a number", bool: "true or false", dict: "a mapping", list: "a list"}
    kinds = [typing.get_origin(option) or option for option in options if option is not type(None)]
    wanted = " or ".join(dict.fromkeys(names.get(kind, "text") for kind in kinds))
    shown = HIDDEN if is_secret(key, value) else repr(redacted(value))
    raise UserError(f"`{key}`", f"it can't be {shown}", f"write {wanted}")


def not_a_choice(key: str, value: Any, choices: Sequence[str]) -> UserError:
    """Return the error for a value that is none of the words that `key` may have."""
    nearest = did_you_mean(str(value), choices, otherwise=f"choose {' or '.join(choices)}")
    return UserError(f"`{key}`", f"it can't be `{value}`", nearest)


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)


def _as_is(value: Any, option: Any) -> Any:
    """Return a value that already is of type `option`. An integer is a float, and a boolean is not an integer."""
    if option is Any:
        return value
    if option is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    kind = typing.get_origin(option) or option
    if kind is list and isinstance(value, list):
        (element,) = typing.get_args(option) or (Any,)
        return [_converted(entry, element) for entry in value]
    if kind is Literal and value in typing.get_args(option):
        return value
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise TypeError


def _converted(value: Any, option: Any) -> Any:
    """Return a value as type `option` if YAML's guess loses nothing ("5e-6", 8.0, or a number as a name)."""
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
