"""Mappings of a recipe, parsed on their own."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_recipes.recipe.specs import ToolLimits
from grpo_rewards.errors import UserError


def test_tool_limits_have_defaults_and_take_numbers_as_yaml_writes_them() -> None:
    assert ToolLimits.parse({}) == ToolLimits(seconds=30.0, result_tokens=512, failures=0.5)
    assert ToolLimits.parse({"seconds": "2.5", "result_tokens": 64.0}) == ToolLimits(2.5, 64)
    assert ToolLimits.parse({"failures": 0}).failures == 0.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seconds": 0}, "`tool_limits.seconds` is 0.0: set a number above 0 and at most 86,400"),
        ({"seconds": float("inf")}, "`tool_limits.seconds` is inf"),
        ({"seconds": True}, "`tool_limits.seconds` must be a number, not True"),
        ({"result_tokens": 0}, "`tool_limits.result_tokens` is 0: set a number of at least 1"),
        ({"failures": 50}, "`tool_limits.failures` is 50.0: set a number of at least 0 and at most 1"),
        ({"timeout": 3}, "unknown key `tool_limits.timeout`"),
        ({"second": 3}, "unknown key `tool_limits.second`: did you mean `seconds`?"),
        ([30], "`tool_limits` must be a name, or a mapping of seconds, result_tokens, failures, not [30]"),
    ],
)
def test_tool_limits_out_of_range_are_named(given: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        ToolLimits.parse(given)
    assert str(caught.value).startswith(message)
