"""What a run left in its folder, read back: `Run.read(folder)`. Nothing here imports torch.

Read are `run.json` (absent for a run of TRL alone, which can be read too), `trainer_state.json` (the newest: the folder's, or
that of its last checkpoint while a run is under way), `completions/*.parquet` (`eval_*` from evaluations during training) and
`evaluations/*/evaluation.json`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_recipes.results.estimates import Estimate, mean_share
from grpo_recipes.runs.files import (
    CONVERSATIONS,
    EVALUATION,
    EVALUATIONS,
    INTEGERS,
    NUMBER,
    NUMBERS,
    TRAINER_STATE,
    RunError,
    read_object,
    read_table,
)
from grpo_recipes.runs.record import read_record
from grpo_rewards.completions import completion_text
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
        differences = [after - before for before, after in zip(self.values, self.values[1:], strict=False)]
        noise = math.sqrt(_mean([(value - _mean(differences)) ** 2 for value in differences]) / 2)
        margin = max(3 * noise * math.sqrt(2 / self.quarter), 0.05 * max(abs(value) for value in self.values), 1e-9)
        change = self.end - self.start
        return 0 if abs(change) <= margin else int(math.copysign(1, change))


@dataclass(frozen=True)
class RunReward:
    """A reward of a run: its name in the logs, its weight, and what it pays for (`other` where it does not say)."""

    name: str
    weight: float = 1.0
    kind: str = "other"
    parts: tuple[RunReward, ...] = ()
    """The rewards that a `sum` adds."""

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> RunReward:
        """The reward that an entry of `run.json` describes."""
        parts = tuple(map(cls.from_dict, entry.get("parts", ())))
        return cls(entry["name"], entry.get("weight", 1.0), entry.get("kind", "other"), parts)


@dataclass(frozen=True)
class Run:
    """A run's files. `record` is `run.json` ({} without one), `history` the trainer's log entries in order."""

    folder: Path
    record: Mapping[str, Any]
    history: list[Mapping[str, Any]]
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read a run's folder. Raises `RunError` if it holds no `trainer_state.json`, or a file is damaged.

        Completions are read at their first use, and raise it then.
        """
        state = _newest_state(folder)
        evaluations = {
            path.parent.name: read_object(path, EVALUATION)
            for path in sorted(folder.glob(f"{EVALUATIONS}/*/evaluation.json"))
        }
        return cls(folder, read_record(folder) or {}, state["log_history"], evaluations)

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
        points = [
            (int(entry["step"]), float(entry[key]))
            for entry in self.history
            if NUMBER.holds(entry.get(key)) and math.isfinite(entry[key])
        ]
        return Series([step for step, _ in points], [value for _, value in points])

    def logged(self, prefix: str) -> list[str]:
        """The keys that were logged and start with `prefix`, in order of appearance."""
        return list(dict.fromkeys(key for entry in self.history for key in entry if key.startswith(prefix)))

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

    def reward_mean(self, reward: RunReward) -> Series:
        """A reward's mean over the completions it scored, before its weight."""
        return self.series(f"rewards/{reward.name}/mean")

    def parts(self) -> Iterator[tuple[RunReward, Series]]:
        """Each reward with its mean, and in place of a `sum` or a `gate` its parts where they were logged."""
        for reward in self.rewards:
            parts = [replace(part, name=f"{reward.name}/{part.name}") for part in reward.parts]
            logged = [part for part in parts if len(self.series(f"rewards/{part.name}"))]
            yield from ((part, self.series(f"rewards/{part.name}")) for part in logged)
            if not logged:
                yield reward, self.reward_mean(reward)

    @cached_property
    def completions(self) -> pd.DataFrame:
        """The logged completions: TRL's columns, with `prompt` and `completion` as text, and two more.

        `question` is the prompt's last message; `total` the weighted sum of the rewards, NaN where none scored the row.
        TRL logs the last generation before each logging step.
        """
        files = self._completion_files("completions_")
        if not files:
            return pd.DataFrame({"step": [], "prompt": [], "completion": [], "advantage": [], "total": []})
        table = pd.concat([self._read_completions(file) for file in files], ignore_index=True)
        table["question"] = [last_message(prompt) for prompt in table["prompt"]]
        table["prompt"] = [prompt_text(prompt) for prompt in table["prompt"]]
        table["completion"] = [completion_text(_listed(completion)) for completion in table["completion"]]
        paid = [reward for reward in self.rewards if reward.name in table.columns]
        weighted = [table[reward.name].astype(float) * reward.weight for reward in paid]
        table["total"] = pd.concat(weighted, axis=1).sum(axis=1, min_count=1) if weighted else math.nan
        return table

    def held_out_accuracy(self) -> list[tuple[int, Estimate]]:
        """For each evaluation during training, its step and the share of completions that a correctness reward paid.

        The interval is clustered by problem. Empty if no correctness reward stands in the recipe outside a sum.
        """
        judges = [reward.name for reward in self.rewards if reward.kind == "correctness"]
        accuracy = []
        for file in self._completion_files("eval_completions_"):
            table = self._read_completions(file)
            paid = table[[name for name in judges if name in table.columns]]
            if paid.empty:
                continue
            right = (paid > 0).any(axis=1)
            shares = right.groupby(table["prompt"].map(prompt_text)).mean()
            accuracy.append((int(table["step"].iloc[0]), mean_share(shares.tolist())))
        return accuracy

    def _read_completions(self, file: Path) -> pd.DataFrame:
        columns = {"step": INTEGERS, "prompt": CONVERSATIONS, "completion": CONVERSATIONS}
        return read_table(file, columns | {f"{reward.name}?": NUMBERS for reward in self.rewards})

    def _completion_files(self, prefix: str) -> list[Path]:
        return sorted((self.folder / "completions").glob(f"{prefix}*.parquet"))


def _kind_by_name(name: str) -> str:
    """The kind of one of our rewards or TRL's, by the name that it logs under."""
    if name in REGISTERED:
        return getattr(resolve(name), "kind", "other")
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


def _newest_state(folder: Path) -> dict[str, Any]:
    """The `trainer_state.json` of the highest step, of the folder or a checkpoint. A damaged one is skipped."""
    if not folder.is_dir():
        raise RunError(f"{folder}: there is no such folder; name the `output_dir` of a run")
    states, damaged = [], None
    for path in (folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")):
        try:
            states.append(read_object(path, TRAINER_STATE))
        except FileNotFoundError:  # none in the folder itself, or a checkpoint that has just been deleted
            continue
        except RunError as error:
            damaged = error
    if states:
        return max(states, key=lambda state: state.get("global_step", 0))
    raise damaged or RunError(
        f"{folder}: no `trainer_state.json` here or in a checkpoint; name the `output_dir` of a run"
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
