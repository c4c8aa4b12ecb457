"""Log-probabilities recorded in transformers' own loop, compared with forwards of each row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_recipes.generation.agreement import differences
from grpo_recipes.generation.groups import Turn, decoding
from grpo_recipes.generation.recorder import Recorder
from tests.support.architectures import ENDS, SETTINGS, batch, config, tiny


@pytest.mark.parametrize(
    ("architecture", "how"),
    [
        ("Qwen2Config", "filters"),
        ("Qwen2Config", "greedy"),
        ("GPT2Config", "repetition penalty"),
        ("LlamaConfig", "lengths"),
    ],
)
def test_recorded_log_probs_are_those_that_stock_generate_sampled_with(architecture: str, how: str) -> None:
    policy, inputs = tiny(architecture), batch()
    turn = Turn(grouped=False, record_every=3, temperature=0.7)
    settings = config(**SETTINGS[how])
    torch.manual_seed(0)
    with torch.no_grad():
        expected = policy.generate(**inputs, generation_config=settings)
    torch.manual_seed(0)
    with torch.no_grad(), decoding(policy, turn):
        tokens = policy.generate(**inputs, generation_config=settings)
    assert torch.equal(tokens, expected)
    rows, width = turn.recorded_rows(len(tokens)), inputs["input_ids"].shape[1]
    assert rows == [0, 3, 6, 9, 12, 15]
    assert turn.log_probs is not None
    assert turn.log_probs.shape == (len(rows), tokens.shape[1] - width)
    prompts = [inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist() for row in rows]
    completions = [until_end(tokens[row, width:].tolist()) for row in rows]
    assert how == "greedy" or len(set(map(len, completions))) > 1
    assert differences(policy, prompts, completions, turn.log_probs, 0.7).max() < 1e-4


@pytest.mark.parametrize("changes", [{"num_beams": 2, "do_sample": False}, {"guidance_scale": 1.5}], ids=str)
def test_nothing_is_recorded_where_tokens_and_forwards_do_not_go_together(changes: dict[str, Any]) -> None:
    policy, inputs = tiny("LlamaConfig"), batch()
    turn = Turn(grouped=False, record_every=1)
    with torch.no_grad(), decoding(policy, turn):
        policy.generate(**inputs, generation_config=config(max_new_tokens=4, **changes))
    assert turn.log_probs is None
    assert not policy._forward_hooks


def test_forwards_behind_the_last_token_lose_nothing() -> None:
    """A rank that has ended repeats forwards under ZeRO-3 until all have."""
    policy, ids = tiny("LlamaConfig"), torch.tensor([[3, 4], [5, 6]])
    recorder = Recorder([0, 1], 1.0)
    with torch.no_grad(), recorder.reading(policy):
        drawn = policy(ids).logits[:, -1].argmax(-1, keepdim=True)
        recorder(torch.cat([ids, drawn], 1), None)
        policy(ids)
        policy(ids)
    assert recorder.log_probs is not None
    assert recorder.log_probs.shape == (2, 1)


def until_end(ids: list[Any]) -> list[Any]:
    """Return a completion up to the token that ends it."""
    return ids[: next((n + 1 for n, token in enumerate(ids) if token in ENDS), len(ids))]
