"""Reasons of scores: what a reward logs for each completion, and the line that shows it."""

from __future__ import annotations

from typing import Any

from grpo_rewards.built import BuiltReward
from grpo_rewards.explain import Reasons, score_line
from grpo_rewards.registry import build_rewards
from tests.support.errors import refused


def logs(prompts: Any, completions: list[str], log_extra: Any = None, **columns: Any) -> list[float]:
    log_extra("seen", [text.upper() for text in completions])
    return [1.0] * len(completions)


def silent(prompts: list[str], completions: list[str], unit: str, answer: list[str]) -> list[float]:
    return [1.0] * len(completions)


def built(name: str) -> BuiltReward:
    (reward,) = build_rewards([name if "." not in name else f"{__name__}{name}"])
    return reward


def test_what_a_reward_logs_is_kept_for_each_row_of_the_last_call() -> None:
    reasons = Reasons(built(".logs"))
    explained = reasons.explained()
    for texts in (["a", "b"], ["c"]):
        reasons.begin(len(texts))
        assert explained.function(prompts=None, completions=texts, log_extra=print) == [1.0] * len(texts)
        assert reasons.rows == [{"seen": text.upper()} for text in texts]
    reasons.log("more", [3])
    assert reasons.rows == [{"seen": "C", "more": 3}]
    assert Reasons(built(".silent")).loggers() == {}
    assert set(Reasons(built("tag_count")).loggers()) == {"log_extra", "log_reason"}


def test_a_column_with_another_number_of_values_is_named() -> None:
    reasons = Reasons(built(".logs"))
    reasons.begin(2)
    for count in (0, 1, 3):
        with refused("reward `logs`", count, "`seen`", 2):
            reasons.log("seen", ["x"] * count)
    assert reasons.rows == [{}, {}]


LINES = [
    (1.0, {}, "r 1: "), (None, {"r/verdict": "no gold"}, "r no score: verdict `no gold`"),
    (0.123456789, {"gold": None, "share": 0.333333333, "count": 3},
     "r 0.123457: gold none, share 0.333333, count `3`"),
    (0.0, {"empty": "", "zero": 0.0, "list": []}, "r 0: zero 0, list `[]`"),
    (-1.0, {"text": "a\x1b\nb", "r/r/x": "y"}, "r -1: text `a\\x1b\\nb`, r/x `y`"),
]  # fmt: skip


def test_the_line_of_a_score_has_its_reasons() -> None:
    for score, logged, line in LINES:
        assert score_line("r", score, logged).startswith(line)


def test_a_long_reason_is_cut() -> None:
    shown = score_line("r", 1.0, {"text": "x" * 10_000})
    assert shown.endswith("...`")
    assert len(shown) < 1000
