"""Declarations of every reward: ours have one base class, and plain functions get the same interface."""

from __future__ import annotations

import functools
import inspect
import math
import re
import types
from dataclasses import fields
from typing import Any

import pytest

from grpo_rewards.registry import REGISTERED, build_rewards, resolve
from grpo_rewards.reward import (
    BaseReward,
    FunctionReward,
    Scored,
    callable_name,
    check_count,
    check_less,
    checked_number,
    checked_positive,
    checked_tags,
)

ARGUMENTS: dict[str, dict[str, Any]] = {
    "judge": {"base_url": "http://127.0.0.1:9/v1", "model": "m"},
    "reward_model": {"model": "nowhere"},
    "json_schema": {"schema": {"type": "object"}},
}


def built(reward: str, **kwargs: Any) -> BaseReward:
    spec = {"name": reward, "kwargs": {**ARGUMENTS.get(reward, {}), **kwargs}}
    return build_rewards([spec], num_generations=2)[0].declared


@pytest.mark.parametrize("name", REGISTERED)
def test_every_registered_reward_is_an_instance_of_the_base_class(name: str) -> None:
    pytest.importorskip("torch") if name == "reward_model" else None
    reward = built(name)
    assert isinstance(reward, BaseReward)
    assert reward.__name__ == name
    assert reward.kind == resolve(name).kind
    assert not reward.consulted or name == "group_length"


def plain(completions: list[Any], **columns: Any) -> list[float]:
    return [1.0 for _ in completions]


def declaring(completions: list[Any], solution: list[str], **columns: Any) -> list[float | None]:
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


@pytest.mark.parametrize(
    "name", ["gsm8k_correctness", "string_match", "choice_correctness", "well_formed", "tag_count"]
)
def test_rewards_with_the_same_condition_are_equal_with_unit_pay(name: str) -> None:
    names = {field.name for field in fields(built(name))}
    paid = {key: 7.0 for key in ("pay", "pay_exact", "pay_equal") if key in names}
    one, other = built(name), built(name, name="mine", **paid)
    assert one != other
    assert one.with_unit_pay() == other.with_unit_pay() is not None
    assert built(name, tags=["a", "b"]).with_unit_pay() != one.with_unit_pay()
    assert built(name, tags=["a", "b"]).with_tags(("think", "answer")).with_unit_pay() == one.with_unit_pay()


def test_a_reward_without_a_positive_score_has_no_unit_pay() -> None:
    assert built("gsm8k_correctness", pay_exact=0.0).with_unit_pay() is None
    assert built("well_formed", pay=-1.0).with_unit_pay() is None


def test_a_function_has_a_unit_pay_if_it_declares_a_positive_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = build_rewards([f"{__name__}.declaring"])[0].declared
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


@pytest.mark.parametrize("name", WITH_PAYS)
def test_every_amount_must_be_a_number_and_its_default_is_that_of_the_table(name: str) -> None:
    amounts = [field.name for field in fields(built(name)) if field.name.startswith("pay")]
    assert amounts
    for amount in amounts:
        with pytest.raises(ValueError, match=f"{amount} must be a finite number.*, not 'much'"):
            built(name, **{amount: "much"})
        assert getattr(built(name, **{amount: str(getattr(built(name), amount))}), amount) == getattr(
            built(name), amount
        )
    table = re.findall(r"(-?[\d.]+) \(`(pay\w*)`\)", inspect.getdoc(resolve(name)) or "")
    assert table
    assert {amount: getattr(built(name), amount) for _, amount in table} == {key: float(pay) for pay, key in table}
    tags = 4 if name in ("tag_count", "tag_presence") else 1  # each of four tags is paid
    assert built(name).highest_pay == tags * max(float(getattr(built(name), amount)) for amount in amounts)


@pytest.mark.parametrize("name", sorted({*WITH_PAYS} - {"repetition"}))
def test_two_different_tags_are_asked_for(name: str) -> None:
    assert (built(name).tags, built(name).prefilled) == (("think", "answer"), None)
    for tags in (["a", "a"], ["a"], ["a", "b", "c"], "ab", ["a", "b c"], ["a", 3], None):
        with pytest.raises(ValueError, match=r"tags must be two different tag names such as \[think, answer\], not "):
            built(name, tags=tags)
    with pytest.raises(ValueError, match="prefilled must be null or the first tag, 'think', not 'answer'"):
        built(name, prefilled="answer")


def test_the_names_of_tags_are_words_with_dots_and_hyphens() -> None:
    assert checked_tags(["a.b-c", "1"], "a.b-c") == ("a.b-c", "1")
    for bad in ("", "-a", ".a", "a\n", "a>", "é b", 3, None):
        with pytest.raises(ValueError, match="tags must be two different"):
            checked_tags([bad, "x"])


@pytest.mark.parametrize(
    ("value", "least", "most", "message"),
    [
        ("5e-1", -math.inf, math.inf, None), (0, 0.0, 1.0, None), (1, 0.0, 1.0, None), (-7.5, -math.inf, 0.0, None),
        (-0.1, 0.0, 1.0, "k must be a finite number from 0 to 1, not -0.1"),
        (1.5, 0.0, 1.0, "k must be a finite number from 0 to 1, not 1.5"),
        (1, -math.inf, 0.0, "k must be a finite number from -inf to 0, not 1"),
        (True, -math.inf, math.inf, "k must be a finite number, not True"),
        ("inf", -math.inf, math.inf, "k must be a finite number, not 'inf'"),
        (None, -math.inf, math.inf, "k must be a finite number, not None"),
        ("one", -math.inf, math.inf, "k must be a finite number, not 'one'"),
        ([1], -math.inf, math.inf, "k must be a finite number, not [1]"),
    ],
)  # fmt: skip
def test_a_number_lies_within_its_bounds_or_is_named(
    value: Any, least: float, most: float, message: str | None
) -> None:
    if message is None:
        assert checked_number(value, "k", least, most) == float(value)
        return
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        checked_number(value, "k", least, most)


def test_a_count_is_a_whole_number_within_its_bounds() -> None:
    for value in (1, 2, 10**9):
        check_count(value, "k")
    for value in (0, -1, 1.0, True, "1", None):
        with pytest.raises(ValueError, match=f"^k must be a whole number of at least 1, not {value!r}$"):
            check_count(value, "k")
    for value in (0, 3):
        check_count(value, "k", least=0, most=3)
    for value in (-1, 4):
        with pytest.raises(ValueError, match=f"^k must be a whole number of at least 0 and at most 3, not {value}$"):
            check_count(value, "k", least=0, most=3)


def test_a_positive_number_and_an_order_are_strict() -> None:
    assert checked_positive("0.5", "k") == 0.5
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"^k must be a positive number, not {value}$"):
            checked_positive(value, "k")
    check_less(types.SimpleNamespace(low=1.0, high=1.5), "low", "high")
    with pytest.raises(ValueError, match=r"^low must be less than high, 1\.5, not 1\.5$"):
        check_less(types.SimpleNamespace(low=1.5, high=1.5), "low", "high")


def test_a_callable_is_called_by_its_own_name_or_its_class() -> None:
    class Callable:
        def __call__(self) -> None: ...

    bound = functools.partial(functools.partial(plain), [])
    assert list(map(callable_name, (plain, bound, Callable(), len))) == ["plain", "plain", "Callable", "len"]


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


class Collected(dict[str, Any]):
    """Logger that is false until it has been called."""

    __call__ = dict.__setitem__


def test_loggers_that_hold_nothing_yet_are_called() -> None:
    extra, metrics, reasons = Collected(), Collected(), Collected()
    build_rewards(["repetition"])[0].function(completions=["a"], log_metric=metrics, log_reason=reasons)
    assert metrics == {"rewards/repetition/repeated": 0.0}
    assert reasons == {"reason": ["fewer than 3 words"]}
    reasons.clear()
    build_rewards(["gsm8k_correctness"])[0].function(
        completions=["7"], answer=["7"], log_extra=extra, log_reason=reasons
    )
    assert extra["gold"] == ["7"]
    assert reasons == {}, "its columns say why"


def test_a_reward_declares_nothing_unless_it_says_so() -> None:
    reward = Logging()
    assert (reward.kind, reward.needs_whole_groups, reward.highest_pay, reward.gold_column) == (
        "other",
        False,
        None,
        None,
    )
    assert (reward.columns_read, reward.optional_columns, reward.consulted, reward.solution_column) == (
        (),
        (),
        (),
        None,
    )
    assert (reward.model_source, reward.model_revision, reward.prepare()) == (None, None, None)
    assert (reward.looks_at, reward.gold_note([]), reward.unparsed_note([])) == ("where it looks", None, None)
    assert reward.with_unit_pay() is None
    assert reward.with_tags(("a", "b")) is reward
    assert reward.passed([None, 1.0]) == [False, False]
    assert reward.__name__ == "mine"


def test_an_attribute_of_another_form_declares_nothing() -> None:
    def odd(completions: list[Any], **columns: Any) -> list[float]:
        return [0.5] * len(completions)

    vars(odd).update(kind="lovely", highest_pay=9.0, needs_whole_groups=1)
    reward = FunctionReward(odd, odd)
    assert (reward.declared_kind, reward.kind, reward.highest_pay) == (None, "other", None)
    assert reward.needs_whole_groups is False
    assert (reward.gold_column, reward.declared_columns, reward.columns_read) == (None, None, ())
    assert reward(completions=["a", "b"], answer=[1, 2]) == [0.5, 0.5]
    assert reward(["a"]) == [0.5]
