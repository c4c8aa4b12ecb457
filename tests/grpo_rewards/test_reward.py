"""Declarations of every reward: ours have one base class, and plain functions get the same interface."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import fields
from typing import Any

import pytest

from grpo_rewards.registry import REGISTERED, build_rewards, resolve
from grpo_rewards.reward import (
    BaseReward,
    Scored,
    check_count,
    checked_number,
    checked_positive,
    checked_tags,
    is_passing,
    reaches,
)

ARGUMENTS: dict[str, dict[str, Any]] = {
    "judge": {"base_url": "http://127.0.0.1:9/v1", "model": "m"},
    "reward_model": {"model": "nowhere"},
    "json_schema": {"schema": {"type": "object"}},
}


def built(reward: str, **kwargs: Any) -> BaseReward:
    spec = {"name": reward, "kwargs": {**ARGUMENTS.get(reward, {}), **kwargs}}
    return build_rewards([spec], num_generations=2)[0].declared


def plain(completions: list[Any], **columns: Any) -> list[float]:
    return [1.0 for _ in completions]


def declaring(prompts: list, completions: list[Any], solution: list[str], **columns: Any) -> list[float | None]:
    return [None if gold == "?" else 0.5 for gold in solution]


declaring.kind, declaring.highest_pay, declaring.columns_read = "correctness", 0.5, ("solution",)


def test_the_attributes_of_a_function_are_its_declarations() -> None:
    bare, declared = (build_rewards([f"{__name__}.{name}"])[0] for name in ("plain", "declaring"))
    assert (bare.kind, bare.highest_pay, bare.declared.columns_read) == ("other", None, ())
    assert (declared.kind, declared.highest_pay, declared.declared.columns_read) == ("correctness", 0.5, ("solution",))
    assert declared.declared.validate(2, {"solution": ["?", "7"]}) == [False, True]
    assert declared.declared.passed([0.5, 0.25, None]) == [True, False, False]
    assert bare.declared.passed([1.0]) == [False]  # its maximum is not known


def test_a_row_is_valid_if_its_gold_can_be_read() -> None:
    assert built("gsm8k_correctness").validate(2, {"answer": ["#### 7", ""]}) == [True, False]
    choices = built("choice_correctness")
    assert choices.optional_columns == ("choices",)
    assert choices.validate(2, {"answer": ["B", "B"], "choices": [["x", "y"], ["x"]]}) == [True, False]


def test_a_function_has_a_unit_pay_if_it_declares_a_positive_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = build_rewards([f"{__name__}.declaring"])[0].declared
    assert built("gsm8k_correctness", pay_exact=0.0).with_unit_pay() is None
    assert built("well_formed", pay=-1.0).with_unit_pay() is None
    assert declared.with_unit_pay() is declared
    assert build_rewards([f"{__name__}.plain"])[0].declared.with_unit_pay() is None
    monkeypatch.setattr(declaring, "highest_pay", 0.0)
    assert build_rewards([f"{__name__}.declaring"])[0].declared.with_unit_pay() is None


def test_other_tags_are_read_with_the_first_one_prefilled() -> None:
    assert built("well_formed", tags=["a", "b"]).with_tags(("c", "d")).tags == ("c", "d")
    moved = built("well_formed", tags=["a", "b"], prefilled="a").with_tags(("c", "d"))
    assert (moved.tags, moved.prefilled) == (("c", "d"), "c")
    assert built("well_formed").with_tags(("c", "d")).prefilled is None


WITH_PAYS = sorted(set(REGISTERED) - {"group_length", "reward_model"})


class Logging(BaseReward):
    """A reward with a column, a metric and reasons."""

    name, prefix = "mine", "p/"

    def _scored(self, prompts: Any, completions: Any, columns: Any) -> Scored:
        scores = [float(len(text)) for text in completions]
        return Scored(scores, {"seen": list(completions)}, {"mean": 2.0}, ["why"] * len(scores))


def test_what_a_reward_logs_bears_its_prefix_and_its_name() -> None:
    logged: dict[str, Any] = {}
    loggers = dict.fromkeys(("log_extra", "log_metric", "log_reason"), logged.__setitem__)
    assert Logging()(completions=["ab"], **loggers) == [2.0]
    assert logged == {"p/seen": ["ab"], "rewards/mine/mean": 2.0, "reason": ["why"]}
    logged.clear()
    assert Logging()(completions=[], **loggers) == []
    assert logged == {"p/seen": [], "reason": []}  # no batch, no metric
    assert Logging()(completions=["a", "b"]) == [1.0, 1.0]


def test_every_registered_reward_is_an_instance_of_the_base_class() -> None:
    for name in REGISTERED:
        pytest.importorskip("torch") if name == "reward_model" else None
        reward = built(name)
        assert isinstance(reward, BaseReward)
        assert (reward.__name__, reward.kind) == (name, resolve(name).kind)
        assert not reward.consulted or name == "group_length"


def test_every_amount_must_be_a_number_and_its_default_is_that_of_the_table() -> None:
    for name in WITH_PAYS:
        defaults = built(name)
        amounts = [field.name for field in fields(defaults) if field.name.startswith("pay")]
        assert amounts
        for amount in amounts:
            with pytest.raises(ValueError, match=f"{amount}.*'much'"):
                built(name, **{amount: "much"})
            pay = getattr(defaults, amount)
            assert getattr(built(name, **{amount: str(pay)}), amount) == pay
        table = re.findall(r"(-?[\d.]+) \(`(pay\w*)`\)", inspect.getdoc(resolve(name)) or "")
        assert table
        assert {amount: getattr(defaults, amount) for _, amount in table} == {key: float(pay) for pay, key in table}
        tags = 4 if name in ("tag_count", "tag_presence") else 1  # each of four tags is paid
        assert defaults.highest_pay == tags * max(float(getattr(defaults, amount)) for amount in amounts)


def test_rewards_with_the_same_condition_are_equal_with_unit_pay() -> None:
    for name in ("gsm8k_correctness", "string_match", "choice_correctness", "well_formed", "tag_count"):
        names = {field.name for field in fields(built(name))}
        paid = {key: 7.0 for key in ("pay", "pay_exact", "pay_equal") if key in names}
        one, other = built(name), built(name, name="mine", **paid)
        assert one != other
        assert one.with_unit_pay() == other.with_unit_pay() is not None
        assert built(name, tags=["a", "b"]).with_unit_pay() != one.with_unit_pay()
        assert built(name, tags=["a", "b"]).with_tags(("think", "answer")).with_unit_pay() == one.with_unit_pay()


def test_two_different_tags_are_asked_for() -> None:
    for name in sorted({*WITH_PAYS} - {"repetition"}):
        assert (built(name).tags, built(name).prefilled) == (("think", "answer"), None)
        with pytest.raises(ValueError, match="tags"):
            built(name, tags=["a", "a"])
        with pytest.raises(ValueError, match="prefilled.*'answer'"):
            built(name, prefilled="answer")
    assert checked_tags(["a.b-c", "1"], "a.b-c") == ("a.b-c", "1")
    for tags in (["a"], ["a", "b", "c"], "ab", ["a", "b c"], ["a", 3], None):
        with pytest.raises(ValueError, match="tags"):
            checked_tags(tags)
    for bad in ("", "-a", ".a", "a\n", "a>", "é b", 3, None):
        with pytest.raises(ValueError, match="tags"):
            checked_tags([bad, "x"])


def test_a_number_lies_within_its_bounds_or_is_named() -> None:
    for value, least, most in (("5e-1", -math.inf, math.inf), (0, 0.0, 1.0), (1, 0.0, 1.0), (-7.5, -math.inf, 0.0)):
        assert checked_number(value, "k", least, most) == float(value)
    for bad, least, most in (
        (-0.1, 0.0, 1.0), (1.5, 0.0, 1.0), (1, -math.inf, 0.0), (True, -math.inf, math.inf), ("inf", 0.0, math.inf),
        (None, -math.inf, math.inf), ("one", -math.inf, math.inf), ([1], -math.inf, math.inf),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^k .*{re.escape(repr(bad))}"):
            checked_number(bad, "k", least, most)
    for count in (1, 2, 10**9):
        check_count(count, "k")
    for bad in (0, -1, 1.0, True, "1", None):
        with pytest.raises(ValueError, match=f"^k .*{bad!r}"):
            check_count(bad, "k")
    for count in (0, 3):
        check_count(count, "k", least=0, most=3)
    for bad in (-1, 4):
        with pytest.raises(ValueError, match=f"^k .*0.*3.*{bad}"):
            check_count(bad, "k", least=0, most=3)
    assert checked_positive("0.5", "k") == 0.5
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"^k .*{bad}"):
            checked_positive(bad, "k")
    built("judge", lowest=1.0, highest=1.5)
    with pytest.raises(ValueError, match=r"lowest.*highest.*1\.5"):
        built("judge", lowest=1.5, highest=1.5)


def test_a_score_passes_up_to_the_rounding_of_float32() -> None:
    third = 0.3333333432674408  # 1/3 in float32
    assert [reaches(score, 1.0) for score in (1.0, 1 - 5e-7, 1.5, 1 - 2e-6)] == [True, True, True, False]
    assert (reaches(third, 1 / 3), reaches(-1 - 5e-7, -1.0)) == (True, True)
    assert [is_passing(score, None) for score in (0.0, 1e-9, -1.0)] == [False, True, False]
    assert [is_passing(score, 0.5) for score in (0.5, 0.4)] == [True, False]
