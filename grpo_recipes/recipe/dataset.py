"""Key `dataset` of a recipe: rows to read, from one source or a mixture of several, and how they become prompts."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from grpo_recipes.recipe.specs import COUNT, SHARE, Range, Spec
from grpo_rewards.errors import UserError, did_you_mean
from grpo_rewards.files import UnreadableFile, expanded, read_text
from grpo_rewards.math.decimals import Decimal

TableName = Literal["gsm8k", "math", "multiple_choice", "classification", "extraction", "rlaif"]
MadeName = Literal["arithmetic", "products", "secret_number"]
DatasetName = Literal[TableName, MadeName, "programs", "scored"]

MADE_PROBLEMS: tuple[MadeName, ...] = typing.get_args(MadeName)
"""Datasets of problems that this project makes (`data/arithmetic.py`)."""

SYSTEM_PROMPTS: Mapping[str, str | None] = {
    # "GRPO from scratch": SYSTEM_PROMPT, stripped as its build_prompt does.
    "reasoning": "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>",
    # "Full-vocabulary KL": format_dataset.
    "think": (
        "Solve the math problem step-by-step, providing reasoning in <think> tags "
        "and the final answer in <answer> tags."
    ),
    # Qwen2.5-Math's system prompt.
    "boxed": "Please reason step by step, and put your final answer within \\boxed{}.",
    "program": "Answer with one Python program in a Markdown fence (```python).",
    # MiniMind: the system turn of its training prompts.
    "minimind": "你是 MiniMind，是一个有用的人工智能助手。",
    "none": None,
}
"""System prompts by name, among them those of the source documents. `none` sends the question alone."""

_PART = Range(0, 1, above=True, below=True)  # share that is neither none nor all

# Files of recorded responses.
_ONE_TABLE = re.compile(r"\.(?:jsonl|json|csv|tsv)(?:\.gz|\.zst)?\Z|\.parquet\Z")

_NOTATION = ("delimiter", "encoding", "decimal")  # keys that describe a text file
_OF_A_TABLE = ("path", "eval_path", "config", "columns", "drop_missing", *_NOTATION)
_OF_FEW = ("size", "seed", "labels")  # keys that most datasets do not use


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
        system_prompt: name in `SYSTEM_PROMPTS`, text, or `{file: prompt.txt}`, for prompts that do not bring
            their own. Default: the preset's, or none without a preset.
        prompt_template: jinja2 template over the row's columns for the user's message.
        prompt_format: `conversational` (messages, rendered by the model's chat template) or `text` (contents joined
            with newlines). Default: a column `prompt` keeps its form, and other prompts are conversational.
        max_prompt_tokens: largest length of a prompt in tokens, as rendered. Default: no limit. See
            `rendering.limit_prompts`.
        overlong_prompts: treatment of longer prompts. `drop` removes the prompt, and `cut_left` removes its earlier
            turns, then the beginning of the question.
        pass_rate: training rows to keep by the share of right samples in an evaluation (`PassRateSpec`). Default: all
            rows.
        labels: labels of `classification`, which the prompt names. Upper and lower case are not distinguished.
        drop_missing: true to drop the rows that have no prompt or no gold. Default: a row without a prompt is an error,
            and so is a row without a gold that the preset reads. If only a reward reads the golds, the rows without one
            are listed.
        size: number of problems in each split of `arithmetic`, `products` or `secret_number`. Default: 2,000.
        seed: random seed of these problems.
    """

    KEY = "dataset"
    NUMBERS: ClassVar[Mapping[str, Range]] = {"max_prompt_tokens": COUNT, "size": COUNT, "eval_share": _PART}
    FOREIGN: ClassVar[Mapping[str | None, tuple[str, ...]]] = {
        **dict.fromkeys(MADE_PROBLEMS, (*_OF_A_TABLE, "labels")),
        "programs": (*_OF_A_TABLE, *_OF_FEW),
        "scored": (*_OF_FEW, "config", "pass_rate", "system_prompt", "prompt_template", "eval_share", "drop_missing"),
        "classification": ("size", "seed"),
    }
    """Keys that a dataset does not use. All datasets that are not listed do not use `size`, `seed` and `labels`."""

    WITHOUT_PATH: ClassVar[tuple[DatasetName, ...]] = ("gsm8k", "math", "programs", *MADE_PROBLEMS)
    """Presets that need no path: those with a home on the hub, and those whose rows this project makes."""

    DEFAULT_SYSTEM_PROMPTS: ClassVar[Mapping[DatasetName, str]] = {
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
        self._check_unset(self.FOREIGN.get(self.name, _OF_FEW), f"the dataset `{self.name or 'path'}`")
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
        default = self.DEFAULT_SYSTEM_PROMPTS.get(self.name) if self.name else None
        object.__setattr__(self, "system_prompt", _prompt_text(self.system_prompt) or default)
        if self.name is not None and self.prompt_format is None:
            object.__setattr__(self, "prompt_format", "text" if self.name == "scored" else "conversational")

    def _check_unset(self, keys: Sequence[str], beside: str) -> None:
        """Raise `UserError` if one of `keys` is not its default, because it would have no effect with `beside`."""
        for field in fields(self):
            if field.name in keys and getattr(self, field.name) != field.default:
                raise UserError(f"`dataset.{field.name}`", f"it does not go with {beside}", "remove it")

    def _sources(self, key: str) -> list[SourceSpec]:
        """Return the sources of a mixture. They have their own splits and configurations, so ours are refused."""
        if not (sources := [SourceSpec.parse(entry) for entry in getattr(self, key)]):
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
    if not (text := given.strip()):
        raise UserError(place, "it is empty", "write `none` for no system prompt")
    # A single word is taken for a name. Otherwise a misspelt name would silently become the prompt.
    if re.fullmatch(r"[A-Za-z0-9_-]+", text) and (file or text not in SYSTEM_PROMPTS):
        names = " or ".join(SYSTEM_PROMPTS)
        nearest = did_you_mean(text, SYSTEM_PROMPTS, otherwise=f"choose {names}, or write a text")
        raise UserError(place, f"it can't be the one word `{text}`", nearest)
    return text
