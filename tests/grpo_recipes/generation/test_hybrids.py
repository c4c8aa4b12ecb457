"""Group decoding of models with recurrent or convolution states: transformers' tokens."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_recipes.generation.groups import Turn
from grpo_recipes.generation.kept_cache import KeptCache
from tests.support.architectures import assert_same, batch, generated, lengths
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
