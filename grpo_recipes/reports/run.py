"""The files of a run, read for diagnosis and reports: `Run.read(folder)`. Nothing here imports torch.

`run.json` may be missing, because a run of TRL alone has none. The log comes from `_log.jsonl` or the newest
`trainer_state.json`, completions from `completions/*.parquet`, evaluations from `evaluations/*/evaluation.json`.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from grpo_recipes.evaluation.estimates import Estimate, mean_share
from grpo_recipes.process.faults import FAULT_FILES
from grpo_recipes.reports.transcript import transcript
from grpo_recipes.runs import completions, files
from grpo_recipes.runs.checkpoints import numbered, step_in_name
from grpo_recipes.runs.lock import is_held
from grpo_recipes.runs.record import read_record
from grpo_rewards.completions import completion_text
from grpo_rewards.errors import one_line
from grpo_rewards.files import UnreadableFile, open_ordinary, relative_to
from grpo_rewards.redaction import redacted
from grpo_rewards.registry import REGISTERED, TRL_REWARDS, resolve
from grpo_rewards.reward import is_passing

STATE = "trainer_state.json"
STATE_BYTES = 1 << 28
"""Largest `trainer_state.json` that is read, because all of it is in memory at once: about 200,000 steps."""

MAX_STEPS = 1000
"""Largest number of steps whose completions are read."""

PARTS = "parts of the completion"
"""Column of transcripts. No reward has a name with spaces."""

Item = TypeVar("Item")
_ENTRY: files.Shape = {"step": files.STEP}


class NothingLogged(files.RunError):
    """Error for a folder without a log, or with an empty one."""


class OutOfTime(Exception):
    """Raised when a run is too large to be read before the deadline that the caller has set."""


@dataclass
class Log:
    """Numbers that a run logged. NaN, infinities and values that are no numbers are dropped.

    Attributes:
        metrics: Steps and values of each metric, in order of appearance.
        last_step: Highest step of an entry, or 0 if there is none.
        max_steps: Planned number of steps, or 0 if it is unknown.
        has_ended: True if a `_log.jsonl` says that its last launch has ended.
        not_finite: Steps at which a metric was NaN or infinite.
    """

    metrics: dict[str, tuple[array[int], array[float]]] = field(default_factory=dict)
    last_step: int = 0
    max_steps: int = 0
    has_ended: bool = False
    not_finite: dict[str, array[int]] = field(default_factory=dict)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add an entry of a file."""
        step = entry["step"]
        self.last_step = max(self.last_step, step)
        for key, value in entry.items():
            # The column exists even if it stays empty, so that metrics keep their order of appearance.
            steps, values = self.metrics.setdefault(key, (array("q"), array("d")))
            if not files.NUMBER.holds(value):
                continue
            if math.isfinite(value):
                steps.append(step)
                values.append(value)
            else:
                self.not_finite.setdefault(key, array("q")).append(step)


def read_log(folder: Path) -> Log:
    """Return the log of the run in `folder`.

    `_log.jsonl` takes little memory, because each line becomes numbers before the next one is read. It is used unless
    a later checkpoint is in the folder. Otherwise the newest `trainer_state.json` is read.

    Raises:
        RunError: There is no log, or its files are damaged.
    """
    live = _read_live(folder / files.LIVE)
    saved = [checkpoint for checkpoint in numbered(folder) if (checkpoint / STATE).exists()]
    newest = max(saved, key=step_in_name, default=None)
    if live is not None and (newest is None or step_in_name(newest) <= live.last_step):
        if not live.last_step:
            raise NothingLogged(folder, "the run has logged nothing yet", "ask again after its first step")
        return live
    logs = [] if live is None else [live]
    for place in (folder if live is None else None, newest):
        if place is not None:
            with suppress(FileNotFoundError):  # rotation may just have removed the checkpoint
                logs.append(_read_state(place / STATE))
    if not logs:
        raise NothingLogged(folder, f"no `{STATE}` here or in a checkpoint", "name the `output_dir` of a run")
    return max(logs, key=lambda log: log.last_step)


def _read_state(path: Path) -> Log:
    """Return the log in a `trainer_state.json`. Raises FileNotFoundError or `RunError`."""
    state = files.read_object(path, {"log_history": [_ENTRY]}, most=STATE_BYTES)
    log = Log()
    for entry in state["log_history"]:
        log.add(entry)
    if files.STEP.holds(state.get("max_steps")):
        log.max_steps = state["max_steps"]
    return log


def _read_live(path: Path) -> Log | None:
    """Return the contents of a `_log.jsonl`, or None if there is no such file. Raises `RunError` if it is damaged.

    An incomplete last line is skipped: a launch is still writing it, or was killed.
    """
    log, number = Log(), 1
    try:
        with open_ordinary(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                entry = json.loads(line.decode(errors="replace"))
                if problem := files.mismatch(entry, _ENTRY, f"line {number}"):
                    raise files.RunError(path, problem, files.RESTORE)
                if files.STEP.holds(entry.get("max_steps")):
                    log.max_steps = entry["max_steps"]
                elif entry.get("ended") is True:
                    log.has_ended = True
                else:
                    log.add(entry)
    except FileNotFoundError:
        return None
    except files.RunError:
        raise
    except UnreadableFile as error:
        raise files.RunError(error.place, error.problem, files.RESTORE) from error
    except (ValueError, RecursionError, OSError) as error:
        problem = f"line {number} can't be read as JSON ({one_line(error)})"
        raise files.RunError(path, problem, files.RESTORE) from error
    return log


@dataclass(frozen=True)
class Series:
    """Values of a metric and the optimizer steps at which they were logged."""

    steps: list[int]
    values: list[float]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def quarter(self) -> int:
        """Number of points in a quarter of the series, at least 1."""
        return max(1, len(self) // 4)

    @property
    def start(self) -> float:
        """Mean of the first quarter of the points."""
        return _mean(self.values[: self.quarter])

    @property
    def end(self) -> float:
        """Mean of the last quarter of the points."""
        return _mean(self.values[-self.quarter :])

    @property
    def quarters(self) -> str:
        """Clause with the steps of which `start` and `end` are the means."""
        size = self.quarter
        if size == 1:
            return f"steps {self.steps[0]:,} and {self.steps[-1]:,}"
        first, last = self.steps[:size], self.steps[-size:]
        return f"means of steps {first[0]:,}–{first[-1]:,} and {last[0]:,}–{last[-1]:,}"

    @property
    def mean(self) -> float:
        """Mean of all points."""
        return _mean(self.values)

    @property
    def last_step(self) -> int:
        """Step of the last point, or 0 if there is none."""
        return self.steps[-1] if self.steps else 0

    @property
    def ends(self) -> dict[str, float]:
        """`start` and `end` by name."""
        return {"start": self.start, "end": self.end}

    def change(self, digits: int = 2) -> str:
        """Return a clause with `start` and `end`."""
        return f"from {self.start:.{digits}f} to {self.end:.{digits}f}"

    def after(self, step: int) -> Series:
        """Return the points after a step."""
        first = sum(logged_at <= step for logged_at in self.steps)
        return Series(self.steps[first:], self.values[first:])

    def first_step(self, is_reached: Callable[[float], bool]) -> int:
        """Return the step of the first value for which `is_reached` is True."""
        return next(step for step, value in zip(self.steps, self.values, strict=True) if is_reached(value))

    @property
    def has_trend(self) -> bool:
        """True if there are at least four points, which a trend needs."""
        return len(self) >= 4

    @property
    def trend(self) -> int:
        """1 if the series rises, -1 if it falls, 0 if it does neither or has fewer than four points.

        The last quarter must differ from the first by 5 % of the largest value and by three standard errors, or up to
        six if there are few points. The noise of a point is estimated from the differences of neighbours (von Neumann),
        which a slow drift hardly changes.
        """
        if not self.has_trend:
            return 0
        change = self.end - self.start
        return int(math.copysign(1, change)) if abs(change) > self.margin else 0

    @property
    def margin(self) -> float:
        """Change from the first to the last quarter above which a series of four points or more has a trend."""
        with np.errstate(over="ignore", invalid="ignore"):  # near the largest float the margin becomes infinite
            noise = float(np.std(np.diff(self.values))) / math.sqrt(2)
        # Few points may lie close together by chance, as with Student's t: 6 standard errors at 4 points, 3.2 at 40.
        errors = 3 * (1 + 3 / max(1, len(self) - 1))
        return max(errors * noise * math.sqrt(2 / self.quarter), 0.05 * max(abs(value) for value in self.values), 1e-9)

    @property
    def smoothed(self) -> Series:
        """Running median over five points, fewer at both ends, in which a single high point does not show."""
        values = []
        for place in range(len(self)):
            values.append(median_low(self.values[max(0, place - 2) : place + 3]))
        return Series(self.steps, values)


@dataclass(frozen=True)
class RunReward:
    """A reward of a run."""

    name: str
    """Name in the logs."""
    weight: float = 1.0
    kind: str = "other"
    parts: tuple[RunReward, ...] = ()
    """Rewards that a `sum` adds."""
    highest_pay: float | None = None
    """Highest value for one completion, without the weight, or None if it is unknown."""
    passes_at: float | None = None
    """Smallest value of a completion that passes, or None if it is unknown."""

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> RunReward:
        """Return the reward that an entry of `run.json` describes."""
        parts = tuple(map(cls.from_dict, entry.get("parts", ())))
        highest_pay, passes_at = entry.get("highest_pay"), entry.get("passes_at")
        return cls(entry["name"], entry.get("weight", 1.0), entry.get("kind", "other"), parts, highest_pay, passes_at)


@dataclass(frozen=True)
class Run:
    """Files of a run. After `deadline`, reading more completions raises `OutOfTime`."""

    folder: Path
    record: Mapping[str, Any]
    """Contents of `run.json`, or {} if there is none."""
    log: Log
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    deadline: float = math.inf
    """Time of `time.monotonic` until which completions may be read."""
    is_running: bool = False
    """True if a launch was writing to the folder when it was read."""

    @classmethod
    def read(cls, folder: Path, within: float = math.inf) -> Run:
        """Read the folder of a run. Completions are read at their first use.

        Args:
            folder: `output_dir` of the run.
            within: Seconds from now after which reading completions raises `OutOfTime`.

        Raises:
            RunError: The folder holds neither a log nor the cause of a failure, or a file is damaged.
        """
        if not folder.is_dir():
            problem = f"there is no such folder{relative_to(folder)}"
            raise files.RunError(folder, problem, "name the `output_dir` of a run")
        run = replace(cls.read_evaluations(folder, within), is_running=is_held(folder))
        try:
            return replace(run, log=read_log(folder))
        except NothingLogged:
            if run.fault is None:
                raise
            return run  # the run failed in its first step, and its cause can be shown

    @classmethod
    def read_evaluations(cls, folder: Path, within: float = math.inf) -> Run:
        """Read the folder of a run like `read`, but without the log, which takes seconds if it is long."""
        evaluations = {}
        for path in sorted(folder.glob(f"{files.EVALUATIONS}/*/evaluation.json")):
            evaluations[path.parent.name] = files.read_object(path, files.EVALUATION)
        return cls(folder, redacted(read_record(folder) or {}), Log(), evaluations, time.monotonic() + within)

    def check_time(self) -> None:
        """Raise `OutOfTime` if the deadline is over."""
        if time.monotonic() > self.deadline:
            raise OutOfTime(f"{self.folder} is too large to be read before the deadline")

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Resolved recipe, or {}."""
        return self.record.get("recipe", {})

    @property
    def config(self) -> Mapping[str, Any]:
        """Plain values of TRL's configuration, defaults included, or {}."""
        return self.record.get("config", {})

    @cached_property
    def fault(self) -> Mapping[str, Any] | None:
        """Contents of the file in which the rank that failed first wrote the cause, or None.

        A run that reached its last step has none: the file is then that of an earlier launch with more ranks.
        """
        if self.is_running or 0 < self.log.max_steps <= self.log.last_step:
            return None
        found = []
        for path in sorted(self.folder.glob(FAULT_FILES)):
            found.append(redacted(files.read_object(path, files.FAULT)))
        return min(found, key=lambda fault: fault["time"], default=None)

    def series(self, key: str) -> Series:
        """Return the values logged under a key, or an empty series."""
        steps, values = self.log.metrics.get(key, ((), ()))
        return Series(list(steps), list(values))

    def logged(self, prefix: str) -> list[str]:
        """Return the logged keys that start with `prefix`, in order of appearance."""
        return [key for key in self.log.metrics if key.startswith(prefix)]

    @cached_property
    def rewards(self) -> list[RunReward]:
        """Rewards of the run, from `run.json`, or else from the keys of the log with weight 1."""
        if "rewards" in self.record:
            return [RunReward.from_dict(entry) for entry in self.record["rewards"]]
        keys = [key for key in self.logged("rewards/") if key.endswith("/mean")]
        kinds = {name: kind for name, (kind, *_) in TRL_REWARDS.items()}
        kinds |= {name: resolve(name).kind for name in REGISTERED}
        names = [key.removeprefix("rewards/").removesuffix("/mean") for key in keys]
        return [RunReward(name, kind=kinds.get(name, "other")) for name in names]

    def parts(self) -> Iterator[tuple[RunReward, Series]]:
        """Yield each reward with its mean. A `sum` is replaced by its parts if their means were logged."""
        for reward in self.rewards:
            parts = []
            for part in reward.parts:
                name = f"{reward.name}/{part.name}"
                if len(mean := self.series(f"rewards/{name}")):
                    parts.append((replace(part, name=name), mean))
            yield from parts or [(reward, self.series(f"rewards/{reward.name}/mean"))]

    @cached_property
    def completion_files(self) -> Sampled:
        """Files of the logged completions. TRL logs the last generation before each logging step."""
        return self._sampled(completions.TRAINING)

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Table of the logged completions without their texts, one row each, in order of steps.

        Columns: `file` and `row`, the place of the completion; `step`; `prompt` and `completion`, hashes of the texts;
        `characters`, the length of completion and prompt; `calls`, the number of calls of tools; `total`, the weighted
        sum of the rewards; `pay/NAME`, the value of each reward. A missing value is NaN.
        """
        names = ("file", "row", "step", "prompt", "completion", "characters", "calls", "total")
        tables = [pd.DataFrame({name: [] for name in names})]
        for number, path in enumerate(self.completion_files.kept):
            for start, batch in self._completions(path):
                lengths, calls, hashes = [], [], []
                for text, parts, question in zip(batch["completion"], batch[PARTS], batch["question"], strict=True):
                    hashes.append(hash((text, *parts)))  # completions with one last message may differ in their calls
                    written = sum(len(part.text) + len(part.label) for part in parts) if parts else len(text)
                    lengths.append(written + len(question))
                    calls.append(sum(part.kind == "call" for part in parts))
                prompts = [hash(text) for text in batch["prompt"]]
                places = (number, range(start, start + len(batch)), batch["step"].astype("int64"))
                columns = (*places, prompts, hashes, lengths, calls, batch["total"].astype(float))
                table = pd.DataFrame(dict(zip(names, columns, strict=True)))
                for reward in self.rewards:
                    if reward.name in batch.columns:
                        table[f"pay/{reward.name}"] = batch[reward.name].astype(float)
                tables.append(table)
        return pd.concat(tables[1:] or tables, ignore_index=True)

    def texts(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return the completions at some of `rows`, in the same order, with their texts.

        Columns: `prompt` and `completion` as text; `question`, the last message of the prompt; `PARTS`, the transcript
        of a completion with several messages; the rewards; `total`; and `advantage`, `gold` and `verdict` if the file
        has them. The text of a completion is its last assistant message.
        """
        batches = list(self.batches(rows))
        if not batches:
            return pd.DataFrame()
        places = pd.MultiIndex.from_frame(rows[["file", "row"]].astype("int64"))
        return pd.concat(batches).loc[places].reset_index(drop=True)

    def batches(self, rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
        """Yield the completions at some of `rows` as `texts` returns them, in order of files, a batch at a time.

        The index of a batch has the place of each completion: `file` and `row`.
        """
        for number, places in rows.groupby("file")["row"]:
            path = self.completion_files.kept[int(number)]
            for start, batch in self._completions(path, ("advantage", "gold", "verdict")):
                end = start + len(batch)
                wanted = places[(places >= start) & (places < end)].astype("int64").tolist()
                if wanted:
                    places_here = pd.MultiIndex.from_product([[int(number)], wanted], names=["file", "row"])
                    yield batch.iloc[[place - start for place in wanted]].set_axis(places_here)
                if places.max() < end:
                    break

    def _completions(self, path: Path, more: Iterable[str] = ()) -> Iterator[tuple[int, pd.DataFrame]]:
        """Yield the completions of a file in batches, each with the number of its first row.

        The columns `more` are read if the file has them.
        """
        columns: dict[str, files.Condition] = {"step": files.INTEGERS}
        columns |= {"prompt": files.CONVERSATIONS, "completion": files.CONVERSATIONS}
        columns |= {f"{name}?": files.ANYTHING for name in more}
        columns |= {f"{reward.name}?": files.NUMBERS for reward in self.rewards}
        start = 0
        for batch in files.read_batches(path, columns):
            self.check_time()
            batch["question"] = [last_message(prompt) for prompt in batch["prompt"]]
            batch["prompt"] = [prompt_text(prompt) for prompt in batch["prompt"]]
            conversations = [_listed(completion) for completion in batch["completion"]]
            batch[PARTS] = [transcript(conversation) for conversation in conversations]
            batch["completion"] = [completion_text(conversation) for conversation in conversations]
            weights = pd.Series({one.name: one.weight for one in self.rewards if one.name in batch}, dtype=float)
            batch["total"] = (batch[weights.index].astype(float) * weights).sum(axis=1, min_count=1)
            yield start, batch
            start += len(batch)

    def strict_accuracy(self) -> list[tuple[int, Estimate]]:
        """Return the strict accuracy before and after training, as far as it was measured, each with its step."""
        shares = []
        for label, step in ((files.BEFORE, 0), (files.AFTER, self.log.last_step)):
            if "strict" in (evaluation := self.evaluations.get(label, {})):
                shares.append((step, Estimate.from_dict(evaluation["strict"])))
        return shares

    def held_out_accuracy(self) -> list[tuple[int, Estimate]]:
        """Return the accuracy of each evaluation during training, with its step.

        The accuracy is the share of completions that pass a correctness reward (`is_passing`), among those that one can
        score. Its interval is clustered by prompt. The list is empty if the recipe has no correctness reward outside a
        `sum`.
        """
        judges = {reward.name: reward for reward in self.rewards if reward.kind == "correctness"}
        columns: dict[str, files.Condition] = {"step": files.INTEGERS, "prompt": files.CONVERSATIONS}
        columns |= {f"{name}?": files.NUMBERS for name in judges}
        tables = []
        for path in self._sampled(completions.EVALUATION).kept:
            for batch in files.read_batches(path, columns):
                scores = batch[[name for name in judges if name in batch]]
                if scores.empty:
                    continue
                right = scores.apply(lambda column: is_passing(column, judges[column.name].passes_at)).any(axis=1)
                table = batch[["step"]].assign(right=right.astype(float), prompt=batch["prompt"].map(prompt_text))
                tables.append(table[scores.notna().any(axis=1)])
        steps = pd.concat(tables).groupby("step") if tables else ()
        return [
            (int(step), mean_share(rows["right"].tolist(), clusters=rows["prompt"].tolist())) for step, rows in steps
        ]

    def _sampled(self, kind: str) -> Sampled:
        """Return all logged steps, or `MAX_STEPS` of them, evenly spread, the last included."""
        logged = completions.logged(self.folder / completions.FOLDER, kind)
        return Sampled([one.path for one in spread(logged, MAX_STEPS)], len(logged))


@dataclass(frozen=True)
class Sampled:
    """Logged steps of one kind of completions, of which at most `MAX_STEPS` are read."""

    kept: list[Path]
    """Files of the steps that are read."""
    count: int
    """Number of steps that were logged."""


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return at most `count` items, evenly spread, the first and the last included if there is room for two."""
    last = len(items) - 1
    if last < count:
        return list(items)
    return [items[number * last // max(1, count - 1)] for number in range(count)]


def prompt_text(prompt: Any) -> str:
    """Return a logged prompt as text: the contents of its messages, or the text itself."""
    prompt = _listed(prompt)
    if isinstance(prompt, list):
        return "\n".join(_content(message) for message in prompt)
    return str(prompt)


def last_message(prompt: Any) -> str:
    """Return the last message of a logged prompt, or the text itself. A system prompt is thus left out."""
    prompt = _listed(prompt)
    return prompt_text(prompt[-1:] if isinstance(prompt, list) else prompt)


def _listed(value: Any) -> Any:
    """Return a conversation as a list of messages, because parquet gives arrays: of messages, and of content blocks."""
    if isinstance(value, str):
        return value
    messages = []
    for message in value:
        content = message.get("content")
        messages.append({**message, "content": content.tolist()} if isinstance(content, np.ndarray) else message)
    return messages


def _content(message: Mapping[str, Any]) -> str:
    """Return the text of a message, or the texts of its content blocks."""
    content = message.get("content")
    return completion_text([{"content": content}]) if isinstance(content, list) else str(content or "")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
