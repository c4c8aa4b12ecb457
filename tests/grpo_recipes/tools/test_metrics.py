"""Metrics of tools: counts of hand-made rows, of a scripted run, and names that no tracker refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_recipes import GRPOTrainer
from grpo_recipes.tools.loop import Ending, Row, RowTools
from grpo_recipes.tools.metrics import UNKNOWN, Counts, counts_of, metrics
from grpo_recipes.tools.run import Result
from tests.support.tool_rollouts import ADD, BROKEN, UNFIT, play, tool_trainer
from tests.support.tool_rollouts import UNKNOWN as UNKNOWN_CALL

FAULT: dict[str, Any] = {"fault": "OSError: no"}
REFUSED: dict[str, Any] = {"mistake": "no", "made": False}


def row(results: list[Result], ending: Ending = "answered", tools: tuple[str, ...] = ("add", "find")) -> Row:
    """Return an ended row with a turn for each result, three tokens of the policy per turn and two of each result."""
    calls = [{"role": "assistant", "tool_calls": [{"function": {"name": result.name}}]} for result in results]
    messages: list[dict[str, Any]] = []
    for call in calls:
        messages += [call, {"role": "tool", "content": ""}]
    messages.append({"role": "assistant", "content": ""})
    mask = [1, 1, 1, 0, 0] * len(results) + [1] * 3
    functions = dict.fromkeys(tools, len)
    return Row(
        [1], [1] * len(mask), messages, RowTools(functions), None, mask, [[result] for result in results], ending
    )


def test_a_tool_has_a_safe_name_in_every_metric() -> None:
    """A slash would look like a further level in a tracker."""
    tools = ("a/b", "größe", "v1.2", "<lambda>")
    found = metrics([counts_of([row([Result(name, "", seconds=1.0) for name in tools], tools=tools)])])
    names = {name.removeprefix("tools/").rpartition("/")[0] for name in found if name.endswith("/calls")}
    assert names == {"a_b", "größe", "v1.2", "_lambda_", UNKNOWN}


def test_metrics_are_means_over_the_rows_of_all_ranks() -> None:
    first = [
        row([Result("add", "3", seconds=2.0), Result("find", "", seconds=1.0, **FAULT)]),
        row([Result("add", "", **REFUSED), Result("invented", "", **REFUSED)], "iterations"),
        row([], "no room"),
    ]
    second = [row([Result("add", "4", seconds=4.0, **FAULT)], "full"), row([], "full", tools=("find",))]
    assert metrics([counts_of(first), counts_of(second)]) == {
        "tools/turns": 2.0,
        "tools/rows_with_calls": 0.6,
        "tools/rows_at_limit": 0.2,
        "tools/rows_out_of_budget": 0.6,
        "tools/mistakes": 0.4,
        "tools/tokens_share": 10 / 40,
        "tools/unknown/calls": 0.2,
        "tools/add/calls": 0.75,
        "tools/add/failures": 1 / 3,
        "tools/add/mistakes": 1 / 3,
        "tools/add/seconds": 3.0,
        "tools/find/calls": 0.2,
        "tools/find/failures": 1.0,
        "tools/find/mistakes": 0.0,
        "tools/find/seconds": 1.0,
    }


def test_a_batch_without_calls_has_no_means_over_calls() -> None:
    found = metrics([counts_of([row([])]), Counts()])
    assert found["tools/add/calls"] == found["tools/unknown/calls"] == found["tools/tokens_share"] == 0
    assert not [name for name in found if name.endswith(("failures", "mistakes", "seconds"))]
    assert metrics([Counts()])["tools/turns"] == 0, "a rank may have no row"


def test_names_that_the_policy_invents_make_no_metrics() -> None:
    invented = [Result(f"name{number}", "", **REFUSED) for number in range(1000)]
    found = metrics([counts_of([row(invented)])])
    assert found["tools/unknown/calls"] == 1000
    assert {name.split("/")[1] for name in found if name.count("/") == 2} == {UNKNOWN, "add", "find"}


def test_a_trainer_logs_the_metrics_beside_trls(tmp_path: Path) -> None:
    script = [[[ADD, BROKEN], [UNKNOWN_CALL], [UNFIT + ADD], []]] * 2
    made = tool_trainer(GRPOTrainer, tmp_path, script)
    logged = {name: value for name, (value,) in play(made).items()}
    assert logged["tools/call_frequency"] == pytest.approx(5 / 4)
    assert logged["tools/failure_frequency"] == pytest.approx(3 / 5)
    assert logged["tools/turns"] == pytest.approx((3 + 2 + 2 + 1) / 4)
    assert logged["tools/add/mistakes"] == pytest.approx(1 / 3)
    assert logged["tools/broken/failures"] == 1
    assert logged["tools/unknown/calls"] == 0.25
    masks = [mask for values in made.loops for mask in values[0]]
    share = 1 - sum(map(sum, masks)) / sum(map(len, masks))
    assert logged["tools/tokens_share"] == pytest.approx(share)
