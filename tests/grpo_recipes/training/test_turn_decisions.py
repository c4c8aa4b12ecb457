"""The check of turns and the tool loop on a stand-in for the trainer: what they compare and what they say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from grpo_recipes.process.faults import NotThePolicy
from grpo_recipes.training import tool_turns, turn_check
from grpo_recipes.training.tool_turns import ToolTurns, positions
from grpo_recipes.training.turn_check import TurnCheck


def check(*, enabled: bool = True, stop: Any = None, **changes: Any) -> TurnCheck:
    values: dict[str, Any] = {
        **{"tools": [print], "rollout_func": None, "model": nn.Linear(1, 1), "eos_token_ids": [2]},
        **{"args": SimpleNamespace(generation_kwargs=None), "state": SimpleNamespace(global_step=7)},
    }
    return TurnCheck(SimpleNamespace(**{**values, **changes}), stop, enabled)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the faults of the ranks before this one."""
    before: list[Any] = []
    monkeypatch.setattr(turn_check, "gather", lambda ours: [*before, ours])
    return before


def message(work: Any) -> str:
    with pytest.raises(NotThePolicy) as caught:
        work()
    return str(caught.value)


END = "; set `generation_check: false` to go on anyway"


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, True),
        ({"enabled": False}, False),
        ({"tools": []}, False),
        ({"tools": None}, False),
        ({"tools": None, "rollout_func": print}, True),
        ({"tools": None, "rollout_func": type("NoResponses", (list,), {"__call__": print})()}, True),
        ({"enabled": False, "rollout_func": print}, False),
    ],
    ids=str,
)
def test_turns_are_recorded_where_there_may_be_several(changes: dict[str, Any], needed: bool) -> None:
    found = check(**changes)
    assert found.is_needed is needed
    found.record([[1]], [[2]], None)  # before the first batch
    found.start([])
    assert (found._turns is not None) is needed
    found.record([[1]], [[2]], None)


def batch(*rows: tuple[list[int], list[int], list[int]]) -> dict[str, torch.Tensor]:
    """Return a micro-batch of (prompt, completion, mask of tool tokens), padded by one token on each side."""
    table: dict[str, list[list[int]]] = {name: [] for name in
             ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")}  # fmt: skip
    for prompt, ids, mask in rows:
        table["prompt_ids"].append([0, *prompt])
        table["prompt_mask"].append([0] + [1] * len(prompt))
        table["completion_ids"].append([*ids, 0])
        table["completion_mask"].append([1] * len(ids) + [0])
        table["tool_mask"].append([*mask, 1])
    return {name: torch.tensor(values) for name, values in table.items()}


def test_micro_batches_hold_the_rows_that_were_proven() -> None:
    proven = {((5, 6), (1, 2)): {(1, 0), (1, 1)}, ((7, 8), (3, 4)): {(1, 1)}}
    begin = "a completion at step 7 is trained on otherwise than it was generated: "

    def checked(*batches: Any, enabled: bool = True) -> None:
        found = check(enabled=enabled)
        found._proven = dict(proven)
        found.check_micro_batches(batches)
        assert found._proven == ({} if enabled else proven)

    fine = batch(([5, 6], [1, 2], [1, 0]), ([7, 8], [3, 4], [1, 1]))
    checked(fine, batch(([5, 6], [1, 2], [1, 1])), batch(([9, 9], [9, 9], [0, 0])))  # the last has no label
    other_tokens = batch(([5, 6], [1, 2], [1, 0]), ([7, 8], [3, 9], [1, 1]))
    assert message(lambda: checked(fine, other_tokens)) == (
        f"{begin}row 1 of micro-batch 1 has tokens that no completion of the generation batch has{END}"
    )
    other_mask = batch(([5, 6], [1, 2], [0, 1]))
    assert message(lambda: checked(other_mask, other_tokens)) == (
        f"{begin}row 0 of micro-batch 0 has another mask of tool tokens{END}"
    )
    fine.pop("tool_mask")
    assert message(lambda: checked(fine)) == f"{begin}micro-batch 0 has no mask of tool tokens{END}"
    checked(other_tokens, enabled=False)
    check().check_micro_batches([other_tokens])  # nothing was proven, as after a resume


def test_a_turn_ends_with_an_end_token_or_a_stop_string_or_as_the_settings_say() -> None:
    stop = SimpleNamespace(end=lambda ids: ids[-1] == 9)
    assert [check()._ends(ids) for ids in ([1, 2], [2, 1], [], [9])] == [True, False, False, False]
    assert [check(stop=stop)._ends(ids) for ids in ([1, 9], [9, 1], [])] == [True, False, False]
    for key in ("max_new_tokens", "max_tokens", "max_length", "max_time", "stop_token_ids", "eos_token_id"):
        assert check(args=SimpleNamespace(generation_kwargs={key: 1}))._ends([1])
    assert not check(args=SimpleNamespace(generation_kwargs={"seed": 1}))._ends([1])


# ---- the tool loop's trainer


def server(context: int, mode: str = "server", **changes: Any) -> Any:
    info = {"model_config": {"max_model_len": context}}
    engine = SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=context)))
    vllm = SimpleNamespace(vllm_client=SimpleNamespace(get_server_info=lambda: info), llm=engine)
    values = {"use_vllm": True, "vllm_mode": mode, "vllm_generation": vllm, "max_completion_length": 100}
    return SimpleNamespace(**{**values, **changes})


def test_the_tokens_that_a_generator_can_read() -> None:
    assert positions(server(1000)) == 901, "each turn asks for `max_completion_length` tokens"
    assert positions(server(1000, "colocate")) == 1000
    for config, read in (
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": None}, float("inf")),
        ({}, float("inf")),
    ):
        local = server(1000, use_vllm=False, model=SimpleNamespace(config=SimpleNamespace(**config)))
        assert positions(local) == read


def turns(trainer: Any) -> tuple[ToolTurns, list[str]]:
    found = object.__new__(ToolTurns)
    said: list[str] = []
    found.trainer, found._announcer = trainer, tool_turns.Announcer(said.append)
    return found, said


def test_a_server_whose_context_is_too_small_for_all_turns_is_announced_once() -> None:
    found, said = turns(server(1000))
    found._warn_of_short_context(50, 151)
    assert said == []
    found._warn_of_short_context(50, 150)
    found._warn_of_short_context(60, 150)
    assert said == [
        "the vLLM server's context is too small for all turns of a prompt of 50 tokens, and completions that call "
        "tools may end early: start the server with a `--max-model-len` of at least the prompt and twice "
        "`max_completion_length`, 250"
    ]
    local, said = turns(server(1000, "colocate"))
    local._warn_of_short_context(50, 1)
    assert said == []
