"""Declarations of every reward: ours have one base class, and plain functions get the same interface."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from grpo_rewards.registry import REGISTERED, build_rewards, resolve
from grpo_rewards.reward import BaseReward

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
