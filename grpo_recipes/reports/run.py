"""What a run left in its folder, read back: `Run.read(folder)`. Nothing here imports torch.

Read are `run.json` (absent for a run of TRL alone, which can be read too), `trainer_state.json` (the newest: the folder's, or
that of its last checkpoint) and what a run under way has logged since (`_log.jsonl`), `completions/*.parquet`
(`runs/completions.py`) and `evaluations/*/evaluation.json`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from grpo_recipes.evaluation.estimates import Estimate, mean_share
from grpo_recipes.reports.history import Log, add_live, first_step, read_log, read_step
from grpo_recipes.runs import completions, files
from grpo_recipes.runs.branches import branch_of, last_launch
from grpo_recipes.runs.files import LIVE
from grpo_recipes.runs.lock import is_held
from grpo_recipes.runs.record import read_record
from grpo_rewards.completions import completion_text
from grpo_rewards.redaction import redacted
from grpo_rewards.registry import REGISTERED, TRL_REWARDS, resolve


@dataclass(frozen=True)
class Series:
    """A metric over a run: what was logged at which optimiser step, NaN and missing values left out."""

    steps: list[int]
    values: list[float]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def quarter(self) -> int:
        """How many points make a quarter of the series; at least one."""
        return max(1, len(self) // 4)

    @property
    def start(self) -> float:
        """The mean of the first quarter of the points."""
        return _mean(self.values[: self.quarter])

    @property
    def end(self) -> float:
        """The mean of the last quarter of the points."""
        return _mean(self.values[-self.quarter :])

    @property
    def mean(self) -> float:
        """The mean of all points."""
        return _mean(self.values)

    @property
    def has_trend(self) -> bool:
        """Whether there are enough points, four, to tell a trend."""
        return len(self) >= 4

    @property
    def trend(self) -> int:
        """1 if the series rises, -1 if it falls, 0 if it does neither or has fewer than four points.

        The last quarter must differ from the first by 5 % of the largest value and by three standard errors, where the noise
        of a point is taken from the differences of neighbours (von Neumann's estimate, blind to a slow drift).
        """
        if not self.has_trend:
            return 0
        with np.errstate(over="ignore", invalid="ignore"):  # numbers near the largest: the margin is then infinite
            noise = float(np.std(np.diff(self.values))) / math.sqrt(2)
        margin = max(3 * noise * math.sqrt(2 / self.quarter), 0.05 * max(abs(value) for value in self.values), 1e-9)
        change = self.end - self.start
        return int(math.copysign(1, change)) if abs(change) > margin else 0


@dataclass(frozen=True)
class RunReward:
    """A reward of a run: its name in the logs, its weight, and what it pays for (`other` where it does not say)."""

    name: str
    weight: float = 1.0
    kind: str = "other"
    parts: tuple[RunReward, ...] = ()
    """The rewards that a `sum` adds."""
    highest_pay: float | None = None
    """The most that it pays a completion, without the weight; None if it does not say."""

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> RunReward:
        """The reward that an entry of `run.json` describes."""
        parts = tuple(map(cls.from_dict, entry.get("parts", ())))
        return cls(entry["name"], entry.get("weight", 1.0), entry.get("kind", "other"), parts, entry.get("highest_pay"))


class OutOfTime(files.RunError):
    """A run has more to read than there was time for."""


@dataclass(frozen=True)
class Run:
    """A run's files. `record` is `run.json` ({} without one), `log` what the trainer logged.

    Whatever reads on after `deadline` (of `time.monotonic`) raises `OutOfTime`.
    """

    folder: Path
    record: Mapping[str, Any]
    log: Log
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    deadline: float = math.inf
    is_running: bool = False
    """Whether a launch was writing to the folder when it was read."""

    @classmethod
    def read(cls, folder: Path, within: float = math.inf) -> Run:
        """Read a run's folder. Raises `RunError` if it holds no `trainer_state.json`, or a file is damaged.

        Completions are read at their first use, and raise it then. `within` so many seconds from now everything must be
        read; what is not raises `OutOfTime`.
        """
        if not folder.is_dir():
            raise files.RunError(f"{folder}: there is no such folder; name the `output_dir` of a run")
        run = cls.read_evaluations(folder, within)
        is_running = is_held(folder)
        return replace(run, log=_newest_log(folder, run.check_time, is_running=is_running), is_running=is_running)

    @classmethod
    def read_evaluations(cls, folder: Path, within: float = math.inf) -> Run:
        """The same without the log, which takes seconds to read once it is long."""
        evaluations = {
            path.parent.name: files.read_object(path, files.EVALUATION)
            for path in sorted(folder.glob(f"{files.EVALUATIONS}/*/evaluation.json"))
        }
        return cls(folder, redacted(read_record(folder) or {}), Log(), evaluations, time.monotonic() + within)

    def check_time(self) -> None:
        """Raise `OutOfTime` after the deadline."""
        if time.monotonic() > self.deadline:
            raise OutOfTime(f"{self.folder} is too large to be read in the time that there was")

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe as resolved, or {}."""
        return self.record.get("recipe", {})

    @property
    def config(self) -> Mapping[str, Any]:
        """Every plain value of TRL's configuration, its defaults included, or {}."""
        return self.record.get("config", {})

    def series(self, key: str) -> Series:
        """What was logged under a key; empty if nothing was."""
        self.check_time()
        steps, values = self.log.metrics.get(key, ((), ()))
        return Series(list(steps), list(values))

    def logged(self, prefix: str) -> list[str]:
        """The keys that were logged and start with `prefix`, in order of appearance."""
        return [key for key in self.log.metrics if key.startswith(prefix)]

    @property
    def knows_weights(self) -> bool:
        """Whether the run says how its rewards are weighted, as one of TRL alone does not."""
        return "rewards" in self.record

    @cached_property
    def rewards(self) -> list[RunReward]:
        """The rewards that were paid, from `run.json`, or from the keys of the log with weight 1."""
        if self.knows_weights:
            return [RunReward.from_dict(entry) for entry in self.record["rewards"]]
        keys = [key for key in self.logged("rewards/") if key.endswith("/mean")]
        names = [key.removeprefix("rewards/").removesuffix("/mean") for key in keys]
        return [RunReward(name, kind=_kind_by_name(name)) for name in names]

    def parts(self) -> Iterator[tuple[RunReward, Series]]:
        """Each reward with its mean, and in place of one made of others its parts where they were logged."""
        for reward in self.rewards:
            parts = [replace(part, name=f"{reward.name}/{part.name}") for part in reward.parts]
            means = [(part, self.series(f"rewards/{part.name}")) for part in parts]
            logged = [(part, mean) for part, mean in means if len(mean)]
            yield from logged
            if not logged:
                yield reward, self.series(f"rewards/{reward.name}/mean")

    @cached_property
    def completion_files(self) -> Sampled:
        """The logged completions. TRL logs the last generation before each logging step."""
        return self._sampled(completions.TRAINING)

    @cached_property
    def rows(self) -> pd.DataFrame:
        """What the logged completions were paid, without their texts: a row for each, in order.

        Columns: `file` and `row`, where it stands; `step`; `prompt` and `completion`, equal where the texts are equal and
        otherwise without meaning; `total`, the weighted sum of the rewards, NaN where none scored the row; `pay/NAME`, what
        each reward paid, NaN where it did not.
        """
        parts = [
            pd.DataFrame(
                {
                    "file": number,
                    "row": range(start, start + len(batch)),
                    "step": batch["step"].astype("int64"),
                    "prompt": [hash(text) for text in batch["prompt"]],
                    "completion": [hash(text) for text in batch["completion"]],
                    "total": batch["total"].astype(float),
                    **{
                        f"pay/{reward.name}": batch[reward.name].astype(float)
                        for reward in self.rewards
                        if reward.name in batch.columns
                    },
                }
            )
            for number, source in enumerate(self.completion_files.kept)
            for start, batch in self._completions(source)
        ]
        if not parts:
            return pd.DataFrame({name: [] for name in ("file", "row", "step", "prompt", "completion", "total")})
        # Compacted files whose columns differ may hold every other step.
        return pd.concat(parts).sort_values("step", kind="stable", ignore_index=True)

    def texts(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The completions at some of `rows`, in the same order, with their texts.

        Columns: `prompt` and `completion` as text, `question`, which is the prompt's last message, the rewards, `total`, and
        `advantage`, `gold` and `verdict` as far as the file has them.
        """
        found: dict[tuple[int, int], pd.Series] = {}
        for number, places in rows.groupby("file")["row"]:
            wanted = set(places)
            for start, batch in self._completions(
                self.completion_files.kept[int(number)], ("advantage", "gold", "verdict")
            ):
                here = [place for place in wanted if start <= place < start + len(batch)]
                found |= {(int(number), place): batch.iloc[place - start] for place in here}
                if max(wanted) < start + len(batch):
                    break
        order = zip(rows["file"].astype(int), rows["row"].astype(int), strict=True)
        return pd.DataFrame([found[place] for place in order])

    def _completions(self, source: completions.Source, more: Iterable[str] = ()) -> Iterator[tuple[int, pd.DataFrame]]:
        """The completions of a file, some at a time, with the columns `more` if it has them, and the number of the first."""
        columns: dict[str, files.Kind] = {
            "step": files.INTEGERS,
            "prompt": files.CONVERSATIONS,
            "completion": files.CONVERSATIONS,
        }
        columns |= {f"{name}?": files.ANYTHING for name in more}
        start = 0
        columns |= {f"{reward.name}?": files.NUMBERS for reward in self.rewards}
        for batch in completions.read_batches(source, columns):
            self.check_time()
            batch["question"] = [last_message(prompt) for prompt in batch["prompt"]]
            batch["prompt"] = [prompt_text(prompt) for prompt in batch["prompt"]]
            batch["completion"] = [completion_text(_listed(completion)) for completion in batch["completion"]]
            paid = [reward for reward in self.rewards if reward.name in batch.columns]
            weighted = [batch[reward.name].astype(float) * reward.weight for reward in paid]
            batch["total"] = pd.concat(weighted, axis=1).sum(axis=1, min_count=1) if weighted else math.nan
            yield start, batch
            start += len(batch)

    def held_out_accuracy(self) -> list[tuple[int, Estimate]]:
        """For each evaluation during training, its step and the share of completions that a correctness reward paid.

        The interval is clustered by problem. Empty if no correctness reward stands in the recipe outside a sum.
        """
        judges = [reward.name for reward in self.rewards if reward.kind == "correctness"]
        columns = {"step": files.INTEGERS, "prompt": files.CONVERSATIONS} | {
            f"{name}?": files.NUMBERS for name in judges
        }
        shares: dict[int, dict[str, list[float]]] = {}
        for source in self._sampled(completions.EVALUATION).kept:
            for batch in completions.read_batches(source, columns):
                self.check_time()
                paid = batch[[name for name in judges if name in batch.columns]]
                if paid.empty:
                    continue
                for step, prompt, right in zip(batch["step"], batch["prompt"], (paid > 0).any(axis=1), strict=True):
                    shares.setdefault(int(step), {}).setdefault(prompt_text(prompt), []).append(float(right))
        return [(step, mean_share([_mean(right) for right in shares[step].values()])) for step in sorted(shares)]

    def _sampled(self, kind: str) -> Sampled:
        logged = completions.logged(self.folder / completions.FOLDER, kind)
        self.check_time()
        return Sampled.of(logged)


@dataclass(frozen=True)
class Sampled:
    """Logged steps of one kind, and where those are that are read: at most `MOST`, evenly spread, the last among them."""

    MOST: ClassVar[int] = 1000

    kept: list[completions.Source]
    read: int
    count: int

    @classmethod
    def of(cls, steps: list[completions.Logged]) -> Sampled:
        """All of the steps, or as many as may be read."""
        read = steps
        if len(steps) > cls.MOST:
            last = len(steps) - 1
            read = [steps[number * last // (cls.MOST - 1)] for number in range(cls.MOST)]
        return cls(completions.sources(read), len(read), len(steps))


def _kind_by_name(name: str) -> str:
    """The kind of one of our rewards or TRL's, by the name that it logs under."""
    if name in REGISTERED:
        return resolve(name).kind
    return TRL_REWARDS[name][0] if name in TRL_REWARDS else "other"


def prompt_text(prompt: Any) -> str:
    """A logged prompt as text: the contents of its messages, or the text itself."""
    prompt = _listed(prompt)
    if isinstance(prompt, list):
        return "\n".join(str(message.get("content") or "") for message in prompt)
    return str(prompt)


def last_message(prompt: Any) -> str:
    """The last message of a logged prompt, or the text itself: the prompt without its system prompt."""
    prompt = _listed(prompt)
    return prompt_text(prompt[-1:] if isinstance(prompt, list) else prompt)


def _listed(value: Any) -> Any:
    """A conversation as a list: parquet gives arrays of messages."""
    return value if isinstance(value, str) else list(value)


def _newest_log(folder: Path, tick: Callable[[], None], *, is_running: bool) -> Log:
    """The log of the newest `trainer_state.json`, and what a run under way, or one that was killed, has logged since."""
    log = Log()
    try:
        log = _saved_log(folder, tick)
    except NothingSaved:
        if not add_live(log, folder / LIVE, tick):
            raise
        if not log.last_step:
            found = "has logged nothing yet: ask again after its first step" if is_running else "logged nothing"
            raise files.RunError(f"{folder}: the run {found}") from None
        return log
    add_live(log, folder / LIVE, tick)
    return log


class NothingSaved(files.RunError):
    """A folder has no `trainer_state.json`."""


def _saved_log(folder: Path, tick: Callable[[], None]) -> Log:
    """Return the log of the highest step that the last launch descends from. A damaged `trainer_state.json` is skipped.

    A checkpoint that an earlier launch saved after the place where the last one went on is of an abandoned branch. So
    is the folder's own file then: a launch writes it at its end, when it removes `_log.jsonl`, so it is older than that
    one.
    """
    states: list[tuple[int, Path]] = []
    damaged: files.RunError | None = None
    last = last_launch(folder)
    began = first_step(folder / LIVE)
    for path in (folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")):
        try:
            step = read_step(path)
        except FileNotFoundError:  # none in the folder itself, or a checkpoint that has just been deleted
            continue
        except files.RunError as error:
            damaged = error
            continue
        is_own = path.parent == folder
        if (began is None or step <= began) if is_own else last.holds(branch_of(path.parent), step):
            states.append((step, path))
    for _, path in sorted(states, key=lambda state: state[0], reverse=True):
        try:
            return read_log(path, tick)
        except FileNotFoundError:
            continue
        except OutOfTime:
            raise
        except files.RunError as error:
            damaged = error
    raise damaged or NothingSaved(
        f"{folder}: no `trainer_state.json` here or in a checkpoint; name the `output_dir` of a run"
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
