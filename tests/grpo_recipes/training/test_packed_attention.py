"""Attention of a packed row through SDPA, and mixed precision."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from grpo_recipes.training import packed_attention
from grpo_recipes.training.packed_attention import ATTENTION, AttentionSwitch, GroupSpans
from grpo_recipes.training.packing import Layout
from tests.support.layouts import RAGGED, attention, flat, layout_of, logged, one_by_one, scored, trainer_on
from tests.support.recorded import model


def test_a_layer_that_attends_twice_is_not_packed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """DiffLlama calls the attention function twice per layer, so the number of layers counted does not match."""
    trainer = trainer_on(model(transformers.DiffLlamaConfig), tmp_path)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.SHARED
    assert "4 of its 2" in logged(caplog)[0]


def test_float32_weights_pack_under_bfloat16_autocast(tmp_path: Path) -> None:
    """Two layouts differ by more than the float32 tolerance and by less than the 16-bit tolerance."""
    trainer = trainer_on(model(), tmp_path, bf16=True)
    got = scored(trainer, flat(RAGGED))[0]
    assert layout_of(trainer) is Layout.PACKED
    expected = one_by_one(trainer.model.eval(), flat(RAGGED))[0]
    assert 1e-4 < (got - expected).abs().max() < 0.1


def test_suffixes_longer_and_shorter_than_their_prefix() -> None:
    """Outputs and gradients are those of each completion as its own sequence, with and without a mask."""
    groups, at = [], 0
    for context, lengths in ((6, (2, 6, 9, 3)), (1, (1, 4, 1)), (0, (2, 3)), (9, (9, 1))):
        prefix, at = (at, at + context), at + context
        suffixes = []
        for length in lengths:
            suffixes.append((at, at + length))
            at += length
        groups.append((prefix, suffixes))
    torch.manual_seed(0)
    query = torch.randn(1, 4, at, 8, requires_grad=True)
    key, value = (torch.randn(1, 2, at, 8, requires_grad=True) for _ in range(2))
    weights = torch.randn(at, 4, 8)
    got, _ = packed_attention.packed_attention(
        torch.nn.Module(), query, key, value, None, group_spans=GroupSpans(groups)
    )
    expected = attention(groups, query, key, value)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    gradients = [torch.autograd.grad((x * weights).sum(), (query, key, value)) for x in (got, expected)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=0)


def test_a_layer_that_adds_to_its_scores_is_not_counted() -> None:
    """The addition would be lost. `LogProbs` then rejects the row."""
    added: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"sliding_window": 4, "softcap": None}, True),
        ({"attention_mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)}, True),
        ({"attention_mask": torch.zeros(1, 1, 5, 5)}, False),
        ({"softcap": 0.0}, False),
        ({"dropout": 0.5}, False),
    ]
    for name in ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices"):
        added.append(({name: 1.0}, False))
    for given, counts in added:
        states, spans = torch.randn(1, 2, 5, 4), GroupSpans([((0, 2), [(2, 5)])])
        arguments = {"attention_mask": None, **given}
        packed_attention.packed_attention(torch.nn.Module(), states, states, states, group_spans=spans, **arguments)
        assert (given, spans.attended) == (given, int(counts))


def test_other_rows_have_stock_attention() -> None:
    states, layer = torch.randn(1, 2, 5, 4), torch.nn.Module()
    layer.is_causal = True
    torch.manual_seed(0)
    plain, *others = (
        packed_attention.packed_attention(layer, states, states, states, None, **options)[0]
        for options in ({}, {"dropout": 0.5}, {"scaling": 0.1})
    )
    assert all(not torch.equal(other, plain) for other in others)


def test_the_users_implementation_is_replaced_where_it_takes_no_float32() -> None:
    for users, inside in (("sdpa", "sdpa"), ("eager", "eager"), ("flash_attention_2", "eager")):
        policy, switch = model(), AttentionSwitch()
        policy.config._attn_implementation = users
        for _ in range(2):
            switch.pack(policy)
        assert policy.config._attn_implementation == ATTENTION
        with suppress(RuntimeError), switch.in_float32(policy):
            assert policy.config._attn_implementation == inside
            switch.pack(policy)
            raise RuntimeError
        assert policy.config._attn_implementation == users
    copied = model()
    copied.config._attn_implementation = ATTENTION  # the model was copied while it was packed
    AttentionSwitch().restore(copied)
    assert copied.config._attn_implementation == "sdpa"


def test_autocast_gives_query_keys_and_values_one_dtype() -> None:
    """A float32 query, from the rotary embedding, beside bfloat16 values fits no kernel of 16 bits."""
    seen: list[tuple[torch.dtype, ...]] = []

    def kernel(spans: GroupSpans, *states: Any) -> None:
        seen.append(tuple(tensor.dtype for tensor in states[:3]))

    states = torch.randn(1, 2, 5, 4)
    given: Any = (torch.nn.Module(), states, states, states.bfloat16(), None)
    for enabled in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            values = given if enabled else (*given[:3], states, None)
            packed_attention.packed_attention(*values, group_spans=GroupSpans([((0, 2), [(2, 5)])], kernel))
    assert seen == [(torch.bfloat16,) * 3, (torch.float32,) * 3]
