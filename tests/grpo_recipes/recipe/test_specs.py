"""Mappings of a recipe, parsed on their own, and the types of keys."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from grpo_recipes.recipe.specs import (
    MicroBatching,
    OfflineSpec,
    Range,
    ReferenceSpec,
    SamplingSpec,
    ToolLimits,
    check_number,
    typed,
)
from grpo_rewards.redaction import HIDDEN
from tests.support.errors import refused

INF, NAN = float("inf"), float("nan")


def test_a_reference_has_a_name_or_an_adapter() -> None:
    assert ReferenceSpec.parse("base") == ReferenceSpec(name="base")
    assert ReferenceSpec.parse({}).as_dict() == {"name": "initial", "reset_optimizer_on_sync": False}
    assert ReferenceSpec.parse({"adapter": "a"}).as_dict() == {"adapter": "a", "reset_optimizer_on_sync": False}
    for name in ("initial", "base"):
        with refused("`reference`", "`name` and `adapter`"):
            ReferenceSpec.parse({"name": name, "adapter": ""})
    with refused("`reference.name`", "`base`"):
        ReferenceSpec.parse("bsae")


def test_a_refresh_mixes_a_reference_that_the_loss_reads() -> None:
    keys = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 4, "ref_model_mixup_alpha": 0.5}

    def check(reference: ReferenceSpec, **changes: Any) -> None:
        reference.check_refresh(SimpleNamespace(**{**keys, **changes}))

    check(ReferenceSpec())
    check(ReferenceSpec(reset_optimizer_on_sync=True))
    check(ReferenceSpec(name="base"), sync_ref_model=False, beta=0.0)
    for key, value in (("beta", 0.0), ("ref_model_sync_steps", 0), *(("ref_model_mixup_alpha", n) for n in (1.5, 0.0))):
        with refused(f"`{key}`", value):
            check(ReferenceSpec(), **{key: value})
    with refused("`reference`", "`base`"):
        check(ReferenceSpec(name="base"))
    with refused("`sync_ref_model`", "`reference.reset_optimizer_on_sync`"):
        check(ReferenceSpec(reset_optimizer_on_sync=True), sync_ref_model=False)


def test_words_stand_for_mappings() -> None:
    assert MicroBatching.parse(False) == MicroBatching.parse("off") == MicroBatching(layout="padded")
    assert MicroBatching.parse("auto") == MicroBatching.parse({}) == MicroBatching("packed", True)
    assert not MicroBatching("padded", True).skip_zero_advantage, "TRL's layout skips no row"
    assert MicroBatching("trimmed", False).as_dict() == {"layout": "trimmed", "skip_zero_advantage": False}
    assert [OfflineSpec.parse(word).compares_whole_batch for word in ("group", "batch")] == [False, True]
    assert OfflineSpec.parse({}).baseline == "group"
    assert SamplingSpec.parse({}) == SamplingSpec("biased", 0.5, 0.1) == SamplingSpec.parse("informative")
    assert SamplingSpec.parse({"informative": "unbiased"}).is_unbiased
    assert not SamplingSpec.parse("informative").is_unbiased
    for given, place, figure in (
        ("of", "`micro_batching`", "auto, off"),
        (True, "`micro_batching`", "True"),
        ({"layout": "of"}, "`micro_batching.layout`", "packed"),
        ({"rows": 1}, "`micro_batching.rows`", "layout, skip_zero_advantage"),
    ):
        with refused(place, figure):
            MicroBatching.parse(given)


def test_tool_limits_have_defaults_and_take_numbers_as_yaml_writes_them() -> None:
    assert ToolLimits.parse({}) == ToolLimits(seconds=30.0, result_tokens=512, failures=0.5)
    assert ToolLimits.parse({"seconds": "2.5", "result_tokens": 64.0}) == ToolLimits(2.5, 64)
    assert ToolLimits.parse({"failures": 0}).failures == 0.0
    assert ToolLimits.parse({"seconds": 0.5}).seconds == 0.5


def test_a_value_out_of_the_range_of_its_field_is_named() -> None:
    for kind, given, key, figure in (
        (ToolLimits, {"seconds": 0}, "tool_limits.seconds", "86,400"),
        (ToolLimits, {"seconds": INF}, "tool_limits.seconds", "inf"),
        (ToolLimits, {"result_tokens": 0}, "tool_limits.result_tokens", 0),
        (ToolLimits, {"failures": 50}, "tool_limits.failures", 50.0),
        (ToolLimits, {"second": 3}, "tool_limits.second", "`seconds`"),
        (ToolLimits, [30], "tool_limits", "[30]"),
        (SamplingSpec, {"exploration": 0}, "sampling.exploration", 0.0),
        (SamplingSpec, {"floor": 1.5}, "sampling.floor", 1.5),
    ):
        with refused(f"`{key}`", figure):
            kind.parse(given)


@pytest.mark.parametrize(
    ("key", "sums", "others"),
    [
        ("loss_type", ("grpo", "sapo", "luspo", "dr_grpo"), ("bnpo", "dapo", "cispo", "vespo")),
        ("beta", (0.0,), (0.01,)),
        ("scale_rewards", ("group", "none"), ("batch",)),
        ("multi_objective_aggregation", ("sum_then_normalize",), ("normalize_then_sum",)),
        ("top_entropy_quantile", (1.0,), (0.5,)),
        ("entropy_coef", (0.0,), (0.01,)),
        ("use_adaptive_entropy", (False,), (True,)),
        ("router_aux_loss_coef", (0.0,), (0.01,)),
    ],
)
def test_unbiased_sampling_needs_independent_advantages(key: str, sums: Any, others: Any) -> None:
    """A loss that divides by the tokens or the rows of others is no sum of advantages."""
    independent = {
        **{"loss_type": "grpo", "beta": 0.0, "scale_rewards": "group", "entropy_coef": 0.0},
        **{"multi_objective_aggregation": "sum_then_normalize", "top_entropy_quantile": 1.0},
        **{"use_adaptive_entropy": False, "router_aux_loss_coef": 0.0},
    }
    unbiased = SamplingSpec("unbiased")
    for value in sums:
        unbiased.check(SimpleNamespace(**{**independent, key: value}), router_loss=True)
    for value in others:
        config = SimpleNamespace(**{**independent, key: value})
        with refused(f"`{key}`", value):
            unbiased.check(config, router_loss=True)
        SamplingSpec("biased").check(config, router_loss=True)
    unbiased.check(SimpleNamespace(**{**independent, "router_aux_loss_coef": 0.01}), router_loss=False)


# Types and ranges


def test_a_value_becomes_the_type_of_its_key_if_nothing_is_lost() -> None:
    for hint, given, expected in (
        (int | None, None, None),
        (int, 8.0, 8),
        (int, "8", 8),
        (float, -3, -3.0),
        (float, "5e-6", 5e-6),
        (bool, "TRUE", True),
        (str, 8, "8"),
        (str, True, "true"),
        (str, Path("a/b"), "a/b"),
        (str | None, "", ""),
        (int | str, "3", "3"),  # a type that the value has comes before one that it can become
        (list[str], "a", ["a"]),
        (list[str], ["a", 1], ["a", "1"]),
        (list[int], ["1", 2.0], [1, 2]),
        (list, [1, "a"], [1, "a"]),
        (Literal["1", "2"], "2", "2"),
        (Literal["on", "off"], False, "off"),
    ):
        found = typed("key", given, hint)
        assert (found, type(found)) == (expected, type(expected)), hint
    # `no` is a strategy, which YAML reads as false.
    assert (typed("eval_strategy", False, str), typed("run_name", False, str)) == ("no", "false")
    assert typed("eval_strategy", True, str) == "true"


def test_a_value_of_another_type_is_named() -> None:
    for hint, given, figure in (
        (int, 8.5, "8.5"),
        (int, True, "True"),
        (int, INF, "inf"),
        (int, None, "None"),
        (float, "much", "'much'"),
        (bool, "yes", "'yes'"),
        (bool, 1, "1"),
        (list[int], ["x"], "['x']"),
        (dict[str, Any] | None, 3, "3"),
        (Literal["on", "off"], "of", "`off`"),
        (str, None, "None"),
    ):
        with refused("`key`", figure):
            typed("key", given, hint)


def test_a_secret_is_not_shown_in_an_error() -> None:
    for value in (["hf_0123456789abcdefghij"], "a secret of one's own"):
        with refused("`hub_token`", HIDDEN) as caught:
            typed("hub_token", value, bool)
        assert str(value) not in str(caught.value)
    with refused("`wandb`", "'name': 'x'") as caught:
        typed("wandb", {"api_key": "0123456789abcdef", "name": "x"}, bool)
    assert "0123456789abcdef" not in str(caught.value)


def test_a_range_holds_its_ends_unless_its_words_exclude_them() -> None:
    for allowed, inside, outside, words in (
        (Range(0), [0, 1e9], [-1e-9, -1, INF, -INF, NAN], "0"),
        (Range(0, above=True), [1e-30, 1], [0, -1, INF, NAN], "above 0"),
        (Range(0, 1, above=True), [1e-9, 1], [0, 1.0001, NAN], "above 0 and at most 1"),
        (Range(0, 1, below=True), [0, 0.999], [1, -0.1], "0 and below 1"),
        (Range(0, or_=-1), [-1, 0, 50], [-2, -0.5], "0, or -1"),
        (Range(1, 65535), [1, 65535], [0, 65536], "65,535"),
        (Range(1, or_=0), [0, 1], [-1, 0.5], "1, or 0"),
    ):
        for value in (None, *inside):
            check_number("key", value, allowed)
        for value in outside:
            with refused("`key`", value, words):
                check_number("key", value, allowed)
