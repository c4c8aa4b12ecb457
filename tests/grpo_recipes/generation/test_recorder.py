"""Log-probabilities recorded in transformers' own loop, compared with forwards of each row alone."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, ClassVar

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
    torch.manual_seed(0)
    with torch.no_grad():
        expected = policy.generate(**inputs, generation_config=config(**SETTINGS[how]))
    torch.manual_seed(0)
    with torch.no_grad(), decoding(policy, turn):
        tokens = policy.generate(**inputs, generation_config=config(**SETTINGS[how]))
    assert torch.equal(tokens, expected)
    rows, width = turn.recorded_rows(len(tokens)), inputs["input_ids"].shape[1]
    assert rows == [0, 3, 6, 9, 12, 15]
    assert turn.log_probs is not None
    assert turn.log_probs.shape == (len(rows), tokens.shape[1] - width)
    prompts = [inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist() for row in rows]
    completions = [until_end(tokens[row, width:].tolist()) for row in rows]
    assert how == "greedy" or len(set(map(len, completions))) > 1
    assert differences(policy, prompts, completions, turn.log_probs, 0.7).max() < 1e-4


def test_nothing_is_recorded_under_beam_search() -> None:
    policy, inputs = tiny("LlamaConfig"), batch()
    turn = Turn(record_every=1)
    with torch.no_grad(), decoding(policy, turn):
        policy.generate(**inputs, generation_config=config(num_beams=2, do_sample=False))
    assert turn.declined
    assert turn.log_probs is None
    assert not policy._forward_hooks


def until_end(ids: list[Any]) -> list[Any]:
    """Return a completion up to the token that ends it."""
    return ids[: next((n + 1 for n, token in enumerate(ids) if token in ENDS), len(ids))]


# ---- calls by hand


def forward(recorder: Recorder, logits: torch.Tensor) -> None:
    recorder._read_forward(None, None, SimpleNamespace(logits=logits[:, None].expand(-1, 2, -1)))


def test_the_logarithms_of_hand_computed_probabilities() -> None:
    """Two tokens at temperature 2, from bfloat16: odds of e to one in the second row, and of one to one elsewhere."""
    recorder = Recorder([2, 1], 2.0)
    assert recorder.log_probs is None
    elsewhere = torch.zeros(3, 2, dtype=torch.long, device="meta")
    assert Recorder([0], 1.0)(elsewhere, None).device.type == "meta"
    logits = torch.zeros(3, 2, dtype=torch.bfloat16)
    logits[1, 1] = 2.0
    ids = torch.tensor([[0, 0, 1], [0, 0, 1], [0, 0, 1]])
    for token in (1, 0):
        forward(recorder, logits)
        ids = torch.cat([ids, torch.full((3, 1), token)], 1)
        assert recorder(ids, None).tolist() == [False] * 3
    half, odds = math.log(0.5), math.log(1 + math.e)
    torch.testing.assert_close(recorder.log_probs, torch.tensor([[half, half], [1 - odds, -odds]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("rows", "width", "is_lost"),
    [(3, 5, False), (4, 5, True), (2, 5, True), (None, 5, True), (3, 4, True), (3, 6, True)],
    ids=["one token each", "beams", "fewer rows", "no forward", "no token", "two tokens"],
)
def test_tokens_without_a_forward_of_their_own_are_not_recorded(rows: int | None, width: int, is_lost: bool) -> None:
    recorder = Recorder([0], 1.0)
    forward(recorder, torch.zeros(3, 2))
    recorder(torch.zeros(3, 4, dtype=torch.long), None)
    if rows is not None:
        forward(recorder, torch.zeros(rows, 2))
    recorder(torch.zeros(3, width, dtype=torch.long), None)
    assert (recorder.log_probs is None) == is_lost
    if not is_lost:
        assert recorder.log_probs.shape == (1, 2)
    forward(recorder, torch.zeros(3, 2))
    recorder(torch.zeros(3, width + 1, dtype=torch.long), None)
    assert (recorder.log_probs is None) == is_lost, "what is lost stays lost"


def test_a_comparison_gets_the_logits_before_and_after_the_processors() -> None:
    seen: list[Any] = []

    class Comparison:
        rows: ClassVar[list[int]] = [1, 2]

        def compare(self, *given: Any) -> None:
            seen.append([one.tolist() if isinstance(one, torch.Tensor) else one for one in given])

        def unfinished(self, rows: list[int], ids: torch.Tensor) -> list[int]:
            return rows[1:]

    recorder = Recorder([0], 1.0, Comparison())  # type: ignore[arg-type]
    logits = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    ids = torch.tensor([[7, 0], [8, 1], [9, 0]])
    forward(recorder, logits)
    recorder._read_before(logits)
    forward(recorder, logits + 9)  # guidance runs the model again
    recorder._read_after(logits * 2)
    recorder(ids, None)
    assert seen == [[[1, 2], [[8], [9]], [[2.0, 3.0], [4.0, 5.0]], [[4.0, 6.0], [8.0, 10.0]], [1, 0]]]
    torch.testing.assert_close(recorder.log_probs[:, 0], logits[0].log_softmax(-1)[:1])
    forward(recorder, logits)
    recorder(torch.cat([ids, ids[:, -1:]], 1), None)
    assert len(seen) == 1, "a loop of the model's own may skip the processors"
    forward(recorder, logits)
    recorder._read_before(logits)
    recorder._read_after(logits)
    recorder(torch.cat([ids, ids[:, -1:], ids[:, -1:]], 1), None)
    assert [call[0] for call in seen] == [[1, 2], [2]]
    forward(recorder, logits)
    recorder._read_before(logits)
    recorder._read_after(logits)
    recorder(torch.cat([ids, ids[:, -1:], ids[:, -1:], ids[:, -1:]], 1), None)
    assert len(seen) == 2, "all compared rows have finished"
