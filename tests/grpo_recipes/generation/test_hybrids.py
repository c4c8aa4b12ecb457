"""Group decoding of models with recurrent or convolution states: transformers' tokens, and faults that change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_recipes.generation.groups import Turn
from grpo_recipes.generation.kept_cache import KeptCache
from grpo_recipes.generation.kv_cache import StateBuffer
from tests.support.architectures import assert_same, batch, generated, lengths, moved_no_states
from tests.support.grids import only
from tests.tools.models import build

MOST_TRAINED = (
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "kimi_linear", "olmo_hybrid", "granitemoehybrid", "falcon_h1",
    "nemotron_h", "mamba2", "zamba2", "lfm2", "lfm2_moe",
)  # fmt: skip
OTHERS = (
    "bailing_hybrid", "bamba", "falcon_mamba", "gemma3n_text", "gpt_oss", "inkling2_text", "inkling_text", "jamba",
    "lfm3", "mamba", "zamba", "zaya",
)  # fmt: skip

PROMPTS: dict[str, tuple[tuple[int, ...], int]] = {
    "several lengths": ((3, 11, 1, 7), 4),
    "one token": ((1, 1), 3),
    "one prompt": ((5,), 4),
    "no groups": ((9, 2, 30, 4, 4, 6), 1),
    "longer than a chunk": ((70, 3), 2),  # the delta rule has chunks of 64 tokens
}
"""Lengths of the prompts, and the number of completions of each."""


# ---- the same tokens


def test_the_same_tokens_while_rows_finish_one_by_one() -> None:
    """Compare a type whose layers have both states and keys."""
    tokens = assert_same(build("falcon_h1").eval())
    assert len(set(lengths(tokens, 11))) > 3


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MOST_TRAINED + OTHERS)
def test_the_same_tokens_for_any_prompts(model_type: str) -> None:
    policy = build(model_type).eval()
    for prompts in PROMPTS.values():
        assert_same(policy, batch(*prompts), max_new_tokens=12)
    assert_same(policy, do_sample=False, max_new_tokens=12)


def test_each_prompt_runs_once_and_a_finished_row_no_more() -> None:
    policy, seen, columns = build("qwen3_5_text").eval(), [], []
    policy.model.register_forward_pre_hook(
        lambda _, args, given: seen.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    policy.register_forward_hook(lambda _, args, out: columns.append(out.past_key_values.get_seq_length()))
    inputs = batch()
    ends = lengths(generated(policy, Turn(), inputs), 11)
    assert seen[0] == (4, 11)
    assert sum(rows for rows, _ in seen[1:]) == sum(length - 1 for length in ends)
    last = [row for row in range(16) if ends[row] == max(ends)]
    assert columns[-1] == int(inputs["attention_mask"][last].sum(1).max()) + max(ends) - 1


@pytest.mark.parametrize("model_type", only(["mamba2"], ["mamba2", "qwen3_5_text"]))
def test_a_rank_that_has_finished_runs_along_under_zero3(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has a completion that is three tokens longer, and each forward is a collective."""
    policy, forwards, waits = build(model_type).eval(), [], []
    policy.register_forward_pre_hook(lambda *_: forwards.append(1))
    expected = generated(policy, Turn())
    alone = len(forwards)

    def has_unfinished(finished: bool, *_: Any) -> bool:
        if finished:
            waits.append(1)
        return not finished or len(waits) <= 3

    monkeypatch.setattr(policy, "_has_unfinished_sequences", has_unfinished)
    assert generated(policy, Turn(together=True)).tolist() == expected.tolist()
    assert len(forwards) - alone == alone + 3


# ---- kept keys and values


def test_states_are_not_kept_between_turns() -> None:
    policy, kept = build("qwen3_5_text").eval(), KeptCache(lambda *_: True, 10**9)
    turn = Turn(kept=kept)
    generated(policy, turn, max_new_tokens=3)
    assert "states" in turn.not_kept
    assert kept.size == 0


# ---- planted faults

Init = Callable[[Any, Any, Tensor, int], None]


def of_the_next_prompt(self: Any, layer: Any, rows: Tensor, room: int, init: Init = StateBuffer.__init__) -> None:
    """Give rows the states of another prompt."""
    init(self, layer, (rows + 1) % (rows.max() + 1), room)


def of_the_first_rows(self: Any, layer: Any, rows: Tensor, room: int, init: Init = StateBuffer.__init__) -> None:
    """Let a row begin with the states that have its own number, as if they were not repeated."""
    init(self, layer, torch.arange(len(rows)) % (rows.max() + 1), room)


def shared_in_place(self: Any, layer: Any, rows: Tensor, room: int, init: Init = StateBuffer.__init__) -> None:
    """Let all rows be views of one state, which each of them writes to. torch raises then."""
    init(self, layer, rows, room)
    for states in (self.conv_states, self.recurrent_states):
        for number, state in states.items():
            states[number] = None if state is None else state[:1].expand_as(state)


FAULTS = {
    "the states of another prompt": ("__init__", of_the_next_prompt),
    "states that are not repeated": ("__init__", of_the_first_rows),
    "states that are shared in place": ("__init__", shared_in_place),
    "the states of a row that has finished": ("keep_states", moved_no_states),
}


@pytest.mark.slow
def test_a_fault_changes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above notices each of them."""
    policy = build("qwen3_5_text").eval()
    for fault in FAULTS.values():
        with monkeypatch.context() as patch:
            patch.setattr(StateBuffer, *fault)
            with pytest.raises((AssertionError, RuntimeError)):
                assert_same(policy)
