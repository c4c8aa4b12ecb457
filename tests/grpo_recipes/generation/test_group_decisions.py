"""Decisions of group decoding on calls, caches and rows written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LlamaConfig, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.generation import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria
from transformers.generation import logits_process as processors

from grpo_recipes.generation import groups
from grpo_recipes.generation.groups import Batch, Turn, decoding, reason_to_decline
from tests.support.architectures import batch, config, generated, lengths, tiny


def cache(used: int = 0, layers: int = 2) -> DynamicCache:
    """Return a cache of a model of two layers, of which the first `used` have seen a token."""
    found = DynamicCache(config=LlamaConfig(num_hidden_layers=layers))
    for index in range(used):
        found.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), index)
    return found


def offloading() -> DynamicCache:
    found = cache()
    found.offloading = True
    return found


def of_static_layers() -> DynamicCache:
    found = cache()
    found.layers[1] = DynamicSlidingWindowLayer(4)
    found.layers[0] = type("OwnLayer", (DynamicLayer,), {})()
    return found


END, LENGTH = EosTokenCriteria(1), MaxLengthCriteria(9)


class Until(StoppingCriteria):
    """Criterion that ends all rows at a number of columns, and counts its calls."""

    def __init__(self, columns: int) -> None:
        self.columns, self.calls = columns, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.columns)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"settings": {"num_beams": 2}}, "beam_search"),
        ({"settings": {"do_sample": True}}, ""),
        ({"model": {"is_encoder_decoder": True}}, "encoder"),
        ({"model": {"text": object()}}, "multimodal"),
        ({"model": {"sub_configs": {"text_config": 1, "vision_config": 2}}}, "multimodal"),
        ({"model": {"sub_configs": {"text_config": 1}}}, ""),
        ({"model": {"rope_parameters": {"rope_type": "longrope"}}}, "longrope"),
        ({"token_type_ids": torch.zeros(1), "none": None, "pixels": 1}, "takes pixels, token_type_ids"),
        ({"logits_to_keep": 1, "position_ids": torch.zeros(1)}, ""),
        ({"settings": {"prefill_chunk_size": 0}}, "prefill_chunk_size"),
        ({"use_cache": None}, "use_cache"),
        ({"past_key_values": None}, "NoneType"),
        ({"past_key_values": cache(1)}, "not an empty DynamicCache"),
        ({"past_key_values": DynamicCache()}, "not an empty DynamicCache"),
        ({"past_key_values": offloading()}, "not an empty DynamicCache"),
        ({"past_key_values": of_static_layers()}, "layers of OwnLayer"),
        ({"past_key_values": None, "cache_params": cache()}, ""),
        ({"past_key_values": None, "cache": cache()}, ""),
        ({"past_key_values": None, "cache": DynamicCache()}, "not an empty DynamicCache"),
        ({"criteria": [END]}, "no maximum length"),
        ({"criteria": [LENGTH, Until(3)]}, "no end-of-sequence token"),
        ({"criteria": [END, LENGTH, Until(3)]}, ""),
        ({"model": {"index_topk": 9}}, ""),
        ({"model": {"index_topk": 8}}, "8 highest scores (index_topk)"),
        ({"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 1], [0, 1, 1]])}, ""),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1]])}, "holes"),
        ({"attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}, "padding on the right"),
    ],
)
def test_calls_that_are_left_to_transformers_own_loop(changes: dict[str, Any], reason: str) -> None:
    own = {"is_encoder_decoder": False, "sub_configs": {}, **changes.get("model", {})}
    settings = SimpleNamespace(**own)
    settings.get_text_config = lambda: own.get("text", settings)
    policy: Any = SimpleNamespace(config=settings)
    given = {"use_cache": True, "past_key_values": cache(), "logits_processor": LogitsProcessorList()}
    given |= {name: value for name, value in changes.items() if name not in ("model", "settings", "criteria")}
    criteria = StoppingCriteriaList(changes.get("criteria", [END, LENGTH]))
    requested = GenerationConfig(**changes.get("settings", {}))
    found = reason_to_decline(policy, criteria, requested, **given)
    assert reason in found
    assert bool(found) == bool(reason)


def layer(columns: int) -> DynamicLayer:
    """Return a layer that holds keys and values of some tokens."""
    found = DynamicLayer()
    found.update(torch.zeros(1, 1, columns, 1), torch.zeros(1, 1, columns, 1))
    return found


def linear(is_used: bool) -> LinearAttentionLayer:
    found = LinearAttentionLayer()
    found.has_previous_state = {0: is_used}
    return found


OUTSIDE = "the model keeps its recurrent states outside of its cache"
OWN_COLUMNS = "the model adds columns of its own to the cache"


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([], "the model runs without a cache"),
        ([DynamicLayer(), DummyLayer()], "the model runs without a cache"),
        ([layer(4), layer(4)], ""),
        ([layer(4), DynamicLayer(), DummyLayer()], ""),  # a layer that uses another's keys and values
        ([layer(4), layer(5)], OWN_COLUMNS),
        ([layer(3), layer(4)], OWN_COLUMNS),
        ([linear(True)], ""),
        ([linear(True), layer(4)], ""),
        ([linear(True), layer(6)], OWN_COLUMNS),
        ([linear(False), layer(4)], OUTSIDE),
        ([linear(True), linear(False)], OUTSIDE),
    ],
)
def test_a_prompt_leaves_all_that_tokens_depend_on_in_the_cache(layers: list[Any], reason: str) -> None:
    call: Any = SimpleNamespace(cache=SimpleNamespace(layers=layers), width=4)
    assert Batch.reason_in_the_cache(call) == reason


def test_a_processor_that_holds_the_prompts_of_all_rows_needs_all_rows() -> None:
    penalty = processors.RepetitionPenaltyLogitsProcessor
    for processor, is_row_wise in (
        (penalty(1.5), True),
        (penalty(1.5, prompt_ignore_length=3), True),
        (penalty(1.5, prompt_ignore_length=torch.tensor([3, 4])), False),
        (processors.PrefixConstrainedLogitsProcessor(lambda *_: [1], 1), False),
        (type("Own", (processors.TopKLogitsWarper,), {})(3), False),
    ):
        assert groups._is_row_wise(processor) is is_row_wise


# ---- calls of `generate`


def test_processors_of_each_row_alone_run_on_the_generating_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    stock = processors.TopKLogitsWarper.__call__

    def counted(self: Any, ids: Tensor, scores: Tensor) -> Tensor:
        sizes.append(len(scores))
        return stock(self, ids, scores)

    monkeypatch.setattr(processors.TopKLogitsWarper, "__call__", counted)
    tokens = generated(tiny("LlamaConfig"), Turn(), top_k=20)
    ends = lengths(tokens, 11)
    assert sizes == [sum(end > token for end in ends) for token in range(max(ends))]
    assert sizes[0] > sizes[-1]


def test_a_call_without_token_ids_is_not_recorded() -> None:
    class Stock:
        def generate(self, **kwargs: Any) -> dict[str, Any]:
            return kwargs

    policy: Any = Stock()
    turn = Turn(grouped=False, record_every=1)
    with decoding(policy, turn):
        assert policy.generate(inputs_embeds="embeddings") == {"inputs_embeds": "embeddings"}
    assert turn.log_probs is None


def test_ranks_that_have_finished_go_on_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank needs three tokens more, and under ZeRO-3 each forward is a collective."""
    policy, more = tiny("Gemma3TextConfig"), [True, True, True, False]
    expected = generated(policy, Turn())
    asked: list[tuple[bool, bool]] = []

    def unfinished(is_finished: bool, together: bool, device: Any) -> bool:
        asked.append((is_finished, together))
        return more.pop(0) if is_finished else True

    monkeypatch.setattr(policy, "_has_unfinished_sequences", unfinished)
    seen: list[Any] = []
    policy.register_forward_pre_hook(
        lambda _, args, given: seen.append((tuple(given["input_ids"].shape), given["past_key_values"])),
        with_kwargs=True,
    )
    assert torch.equal(generated(policy, Turn(together=True)), expected)
    assert asked == [(False, True)] * (max(lengths(expected, 11)) - 1) + [(True, True)] * 4
    assert [shape for shape, _ in seen[-3:]] == [(1, 1)] * 3
    own, *empty = [kept for _, kept in seen[-4:]]
    assert own not in empty
    assert all(any(isinstance(one, DynamicSlidingWindowLayer) for one in kept.layers) for kept in empty)


def test_buffers_have_room_for_the_completions_and_no_more() -> None:
    policy, shapes = tiny("LlamaConfig"), set()
    policy.register_forward_hook(
        lambda _, args, out: shapes.update(
            tuple(one.shape) for kept in out.past_key_values.layers for one in getattr(kept, "buffers", ())
        )
    )
    generated(policy, Turn(), eos_token_id=10_000)
    assert shapes == {(16, 2, 11 + 24, 8)}


@pytest.mark.parametrize("grouped", [True, False])
def test_prompts_may_be_given_by_position_and_criteria_of_the_caller_count(grouped: bool) -> None:
    policy, inputs, turn = tiny("LlamaConfig"), batch((5, 5)), Turn(grouped=grouped, record_every=1)
    own, added = Until(8), Until(99)
    with torch.no_grad(), decoding(policy, turn, [added]):
        tokens = policy.generate(inputs["input_ids"], config(eos_token_id=10_000), stopping_criteria=[own])
    assert tokens.shape == (8, 8)
    with torch.no_grad():
        expected = (
            policy(tokens, use_cache=False).logits[:, 4:-1].log_softmax(-1).gather(2, tokens[:, 5:, None])[..., 0]
        )
    assert turn.log_probs is not None
    torch.testing.assert_close(turn.log_probs, expected, atol=1e-5, rtol=0)  # at temperature 1, unless one is given
    assert turn.declined == ""
    assert own.calls == added.calls > 0
