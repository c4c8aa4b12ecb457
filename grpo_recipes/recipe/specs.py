"""Nested mappings of a recipe as dataclasses, and the type check that all keys share, TRL's keys included.

A new key of ours is a field of `recipe.Recipe`. Its type is a `Literal`, a simple type, or a `Spec` of this module.
"""

from __future__ import annotations

import math
import re
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
from grpo_rewards.files import UnreadableFile, expanded, read_text
from grpo_rewards.math.decimals import Decimal
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
"""Mode of transformers' `generate`: each prompt once and without finished rows where this is exact, or as in TRL."""

DatasetName = Literal[
    "gsm8k",
    "math",
    "multiple_choice",
    "classification",
    "extraction",
    "rlaif",
    "arithmetic",
    "products",
    "secret_number",
    "programs",
    "scored",
]
SYSTEM_PROMPT_NAMES = ("reasoning", "think", "boxed", "program", "minimind", "none")

# Files of recorded responses.
_ONE_TABLE = re.compile(r"\.(?:jsonl|json|csv|tsv)(?:\.gz|\.zst)?\Z|\.parquet\Z")

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
    """Raise `UserError` if `value` is outside the range of its key. None stands for the default."""
    if value is not None and value not in allowed:
        raise UserError(f"`{key}`", f"it is {value}{reason}", f"set a number {allowed}")


def check_setting(config: TrainingConfig, key: str, allowed: Sequence[Any], reason: str) -> None:
    """Raise `UserError` unless `key` of `config` has one of the `allowed` values. `reason` follows the value."""
    value = getattr(config, key)
    if value not in allowed:
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
        return asdict(self, dict_factory=_without_none)


def _without_none(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if value is not None}


@dataclass(frozen=True)
class SourceSpec(Spec):
    """One table of a mixture, with the keys and the meaning of TRL's `DatasetConfig`.

    Attributes:
        path: anything that `dataset.path` may be, except a list.
        name: configuration on the hub.
        data_dir: argument of `datasets.load_dataset`.
        data_files: files inside `path`, or of the format that `path` names (`json`, `csv`, `parquet`).
        split: split, or slices of it.
        columns: list of the columns to keep, or mapping from new to old names, which keeps the other columns.
        delimiter: character between the cells of a CSV file. Default: a comma, or a tab in a .tsv file.
        encoding: Python's name of the encoding of a text file. Default: UTF-8.
        decimal: decimal mark of the cells of a CSV file that are numbers. Default: a point.
        fraction: share of this source in the mixture, relative to the other fractions. Every source gives its first
            rows, as many as the shortest source allows. All sources have a fraction, or none has.
    """

    KEY = "dataset.path"

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, Any] | None = None
    split: str = "train"
    columns: list[str] | dict[str, Any] | None = None
    delimiter: str | None = None
    encoding: str | None = None
    decimal: Decimal | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fraction is not None and self.fraction not in SHARE:  # a mixture has several sources: name this one
            problem = f"that of {self.path} is {self.fraction}"
            raise UserError("`dataset.path.fraction`", problem, f"set a number {SHARE}")
        _check_columns(self.columns)
        _check_notation(self)


def _check_columns(columns: list[str] | dict[str, Any] | None) -> None:
    names = [*columns, *columns.values()] if isinstance(columns, dict) else columns or []
    for name in names:
        # Arrow cuts a name at a NUL, and can't encode half of a surrogate pair.
        if not isinstance(name, str) or not name or re.search("[\0\ud800-\udfff]", name):
            problem = f"{name!r} is not the name of a column"
            raise UserError("`dataset.columns`", problem, "write as in `question: problem`")


_NOTATION = ("delimiter", "encoding", "decimal")  # keys that describe a text file


def _check_notation(spec: SourceSpec | DatasetSpec) -> None:
    """Raise `UserError` unless the delimiter is one ASCII character and Python knows the encoding."""
    delimiter, encoding = spec.delimiter, spec.encoding
    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n\0'):
        fix = 'set one ASCII character, as in `delimiter: ";"`, or `delimiter: "\\t"` for a tab'
        raise UserError(f"`{spec.KEY}.delimiter`", f"it is {delimiter!r}", fix)
    if encoding is not None:
        try:
            "".encode(encoding)
        except (LookupError, ValueError) as error:
            problem = f"Python does not know {encoding!r}"
            raise UserError(f"`{spec.KEY}.encoding`", problem, "set for example cp1252 or utf-16") from error


@dataclass(frozen=True)
class PassRateSpec(Spec):
    """Training rows that an evaluation solved neither too often nor too rarely.

    Attributes:
        evaluation: folder that `grpo-recipes evaluate MODEL --split train --samples N` has written.
        keep: smallest and largest share of right samples of the rows that are kept.
    """

    KEY = "dataset.pass_rate"

    evaluation: str
    keep: list[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.keep) != 2 or not 0 <= self.keep[0] <= self.keep[1] <= 1:
            fix = "give the smallest and the largest share, as in [0.1, 0.9]"
            raise UserError("`dataset.pass_rate.keep`", f"it is {self.keep}", fix)


@dataclass(frozen=True)
class DatasetSpec(Spec):
    """Rows to read, and how they become prompts.

    Attributes:
        name: preset for tables of a known form: `gsm8k`, `math`, `multiple_choice`, `classification`, `extraction`,
            `rlaif`, `arithmetic`, `products` (of three-digit numbers), `secret_number` (to guess), `programs`,
            `scored`.
        path: hub id, `save_to_disk` folder, JSONL, JSON, CSV or Parquet file, glob of such files, or list of sources
            (`SourceSpec`). A preset with a home on the hub needs no path.
        config: configuration on the hub.
        split: split to train on. Slices such as `train[:5%]` work for every kind of path. A file or folder with a
            single split is read under any name.
        eval_split: split to evaluate on, if evaluation is on.
        eval_share: share of the rows to hold out for evaluation, selected by a hash of the content of each prompt.
        eval_path: path of the held-out rows, if it is not `path`. It may be anything that `path` may be.
        columns: mapping from new to old names of columns (`{question: problem, answer: solution}`), or list of the
            columns to keep.
        delimiter: character between the cells of a CSV file. Default: a comma, or a tab in a .tsv file.
        encoding: Python's name of the encoding of a text file. Default: UTF-8.
        decimal: decimal mark of the cells of a CSV file that are numbers. With `comma`, the cells of a column become
            numbers if all of them are written as `1.200` or `6403,64`. Default: a point.
        system_prompt: name in `prompts.SYSTEM_PROMPTS`, text, or `{file: prompt.txt}`, for prompts that do not bring
            their own. Default: the preset's, or none without a preset.
        prompt_template: jinja2 template over the row's columns for the user's message.
        prompt_format: `conversational` (messages, rendered by the model's chat template) or `text` (contents joined
            with newlines). Default: a column `prompt` keeps its form, and other prompts are conversational.
        max_prompt_tokens: largest length of a prompt in tokens, as rendered. Default: no limit. See
            `prompts.limit_prompts`.
        overlong_prompts: treatment of longer prompts. `drop` removes the prompt, and `cut_left` removes its earlier
            turns, then the beginning of the question.
        pass_rate: training rows to keep by the share of right samples in an evaluation (`PassRateSpec`). Default: all
            rows.
        labels: labels of `classification`, which the prompt names. Upper and lower case are not distinguished.
        drop_missing: true to leave out the rows that have no prompt or no gold. Default: such a row is an error, or is
            named if the reward alone needs the gold.
        size: number of problems in each split of `arithmetic`, `products` or `secret_number`. Default: 2,000.
        seed: random seed of these problems.
    """

    KEY = "dataset"
    NUMBERS: ClassVar[Mapping[str, Range]] = {
        "max_prompt_tokens": COUNT,
        "size": COUNT,
        "eval_share": Range(0, 1, above=True, below=True),
    }
    FOREIGN: ClassVar[Mapping[str | None, tuple[str, ...]]] = {
        **dict.fromkeys(
            ("arithmetic", "products", "secret_number"),
            ("path", "eval_path", "config", "columns", "labels", "drop_missing", *_NOTATION),
        ),
        "programs": ("path", "eval_path", "config", "columns", "size", "seed", "labels", "drop_missing", *_NOTATION),
        "scored": (
            *("config", "size", "seed", "pass_rate", "system_prompt", "prompt_template", "eval_share"),
            *("labels", "drop_missing"),
        ),
        "classification": ("size", "seed"),
    }
    """Keys that a dataset does not use. All datasets that are not listed do not use `size`, `seed` and `labels`."""

    WITHOUT_PATH: ClassVar[tuple[DatasetName, ...]] = (
        *("gsm8k", "math"),
        *("arithmetic", "products", "secret_number", "programs"),
    )
    """Presets that need no path: those with a home on the hub, and those whose rows this project makes."""

    SYSTEM_PROMPTS: ClassVar[Mapping[DatasetName, str]] = {
        **dict.fromkeys(("gsm8k", "multiple_choice", "classification", "rlaif", "arithmetic"), "reasoning"),
        **dict.fromkeys(("math", "products"), "boxed"),
        "programs": "program",
    }
    """Default system prompt of each preset."""

    name: DatasetName | None = None
    path: str | list[Any] | None = None
    config: str | None = None
    split: str = "train"
    eval_split: str | None = None
    eval_share: float | None = None
    eval_path: str | list[Any] | None = None
    columns: list[str] | dict[str, Any] | None = None
    delimiter: str | None = None
    encoding: str | None = None
    decimal: Decimal | None = None
    system_prompt: str | dict[str, Any] | None = None
    prompt_template: str | None = None
    prompt_format: Literal["conversational", "text"] | None = None
    max_prompt_tokens: int | None = None
    overlong_prompts: Literal["drop", "cut_left"] = "drop"
    pass_rate: PassRateSpec | None = None
    labels: list[str] | None = None
    drop_missing: bool = False
    size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is None and self.name not in self.WITHOUT_PATH:
            what = f"that `{self.name}` is to read" if self.name else "to read, or a preset with `dataset.name`"
            raise UserError("`dataset.path`", "it is missing", f"name the file, folder or hub id {what}")
        unread = self.FOREIGN.get(self.name, ("size", "seed", "labels"))
        self._check_unset(unread, f"the dataset `{self.name or 'path'}`")
        for key in ("path", "eval_path"):
            if getattr(self, key) == "":
                raise UserError(f"`dataset.{key}`", "it is empty", "name a file, a folder or a hub id")
        if self.name == "classification" and len(set(self.labels or [])) < 2:
            fix = "give two or more, as in `[negative, positive]`"
            raise UserError("`dataset.labels`", "it must name the labels of `classification`", fix)
        if self.eval_share is not None:
            self._check_unset(("eval_split", "eval_path"), "`dataset.eval_share`")
        if self.name == "scored" and not _ONE_TABLE.search(str(self.path)):
            raise UserError("`dataset.path`", f"`scored` reads a file, not {self.path!r}", "name a .jsonl file")
        if self.name == "scored" and self.prompt_format == "conversational":
            raise UserError("`dataset.prompt_format`", "recorded prompts are text as they stand", "remove the key")
        _check_columns(self.columns)
        _check_notation(self)
        for key in ("path", "eval_path"):
            if isinstance(getattr(self, key), list):
                object.__setattr__(self, key, self._sources(key))
        default = self.SYSTEM_PROMPTS.get(self.name) if self.name else None
        object.__setattr__(self, "system_prompt", _prompt_text(self.system_prompt) or default)
        if self.name is not None and self.prompt_format is None:
            object.__setattr__(self, "prompt_format", "text" if self.name == "scored" else "conversational")

    def _check_unset(self, keys: Sequence[str], beside: str) -> None:
        """Raise `UserError` if one of `keys` is not its default, as it would have no effect with `beside`."""
        for field in fields(self):
            if field.name in keys and getattr(self, field.name) != field.default:
                raise UserError(f"`dataset.{field.name}`", f"it does not go with {beside}", "remove it")

    def _sources(self, key: str) -> list[SourceSpec]:
        """Return the sources of a mixture. They have their own splits and configurations, so ours are refused."""
        sources = [SourceSpec.parse(entry) for entry in getattr(self, key)]
        if not sources:
            raise UserError(f"`dataset.{key}`", "it is an empty list", "name at least one source")
        without = [source for source in sources if source.fraction is None]
        if without and len(without) < len(sources):
            problem = f"{len(without)} of {len(sources)} sources have no `fraction`"
            raise UserError(f"`dataset.{key}`", problem, "give every source one, or none of them")
        own = ["config", "eval_split"]
        if key == "path":
            own += ["split", *_NOTATION]
        self._check_unset(own, "a list of sources, each of which has keys of its own")
        return sources

    @classmethod
    def expand(cls, raw: Any) -> Mapping[str, Any]:
        """Return the mapping that `raw` is or stands for. A string is the name of a preset."""
        names = typing.get_args(DatasetName)
        if isinstance(raw, str) and raw not in names:
            nearest = did_you_mean(raw, names, otherwise=f"choose {' or '.join(names)}, or write `{{path: {raw}}}`")
            raise UserError("`dataset.name`", f"it can't be `{raw}`", nearest)
        return super().expand(raw)


def _prompt_text(given: str | dict[str, Any] | None) -> str | None:
    """Return the name or the text of a system prompt, read from its file for `{file: ...}`."""
    if given is None:
        return None
    place, file = "`dataset.system_prompt`", None
    if isinstance(given, Mapping):
        file = given.get("file")
        if set(given) != {"file"} or not isinstance(file, str):
            raise UserError(place, f"it can't be {given!r}", "write a name, the text, or {file: prompt.txt}")
        place += f": {file}"
        try:
            given = read_text(expanded(file)).removeprefix("\ufeff")
        except (OSError, UnreadableFile) as error:
            reason = error.problem if isinstance(error, UnreadableFile) else error.strerror
            raise UserError(place, f"it can't be read ({reason})", "correct the path") from error
    text = given.strip()
    if not text:
        raise UserError(place, "it is empty", "write `none` for no system prompt")
    # A single word is taken for a name. Otherwise a misspelt name would silently become the prompt.
    if re.fullmatch(r"[A-Za-z0-9_-]+", text) and (file or text not in SYSTEM_PROMPT_NAMES):
        names = " or ".join(SYSTEM_PROMPT_NAMES)
        nearest = did_you_mean(text, SYSTEM_PROMPT_NAMES, otherwise=f"choose {names}, or write a text")
        raise UserError(place, f"it can't be the one word `{text}`", nearest)
    return text


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
            reason = "gives `reference.reset_optimizer_on_sync` no effect"
            check_setting(config, "sync_ref_model", (True,), reason)
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
    """Probability that a prompt is generated after one zero-variance group; its nth power after n groups in a row."""
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
    shown = HIDDEN if is_secret(key, value) else repr(redacted(value))
    raise UserError(f"`{key}`", f"it can't be {shown}", f"write {_type_name(options)}")


def not_a_choice(key: str, value: Any, choices: Sequence[str]) -> UserError:
    """Return the error for a value that is none of the words that `key` may have."""
    nearest = did_you_mean(str(value), choices, otherwise=f"choose {' or '.join(choices)}")
    return UserError(f"`{key}`", f"it can't be `{value}`", nearest)


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)


def _as_is(value: Any, option: Any) -> Any:
    """Return a value that already is of type `option`. An integer is a float, and a boolean is no integer."""
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


def _type_name(options: Sequence[Any]) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", dict: "a mapping", list: "a list"}
    kinds = [typing.get_origin(option) or option for option in options if option is not type(None)]
    return " or ".join(dict.fromkeys(names.get(kind, "text") for kind in kinds))
