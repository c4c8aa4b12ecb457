"""Decisions of group decoding on calls, caches and rows written by hand."""

from __future__ import annotations

import functools
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
from grpo_recipes.generation.groups import Batch, Turn, decode_step, decoding, reason_to_decline
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


NO_END = "no maximum length, or no end-of-sequence token, is set"
HOLES = "the attention mask has holes, or padding on the right"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"settings": {"num_beams": 2}}, "the generation mode is beam_search"),
        ({"settings": {"do_sample": True}}, ""),
        ({"model": {"is_encoder_decoder": True}}, "the model has an encoder"),
        ({"model": {"text": object()}}, "the model is multimodal"),
        ({"model": {"sub_configs": {"text_config": 1, "vision_config": 2}}}, "the model is multimodal"),
        ({"model": {"sub_configs": {"text_config": 1}}}, ""),
        (
            {"model": {"rope_parameters": {"rope_type": "longrope"}}},
            "a rotary table of type longrope depends on the longest row of the batch",
        ),
        (
            {"token_type_ids": torch.zeros(1), "z": 1, "none": None, "pixels": 1, "audio": 0, "y": 1, "x": 1},
            "the model takes audio, pixels, token_type_ids, x, y, z",
        ),
        ({"logits_to_keep": 1, "position_ids": torch.zeros(1)}, ""),
        ({"settings": {"return_dict_in_generate": True}}, "return_dict_in_generate asks for more than tokens"),
        ({"settings": {"prefill_chunk_size": 0}}, "prefill_chunk_size asks for prompts in chunks"),
        ({"use_cache": False}, "use_cache is false"),
        ({"use_cache": None}, "use_cache is false"),
        ({"past_key_values": None}, "the cache is a NoneType, not an empty DynamicCache on the model's device"),
        ({"past_key_values": cache(1)}, "the cache is a DynamicCache, not an empty DynamicCache on the model's device"),
        (
            {"past_key_values": DynamicCache()},
            "the cache is a DynamicCache, not an empty DynamicCache on the model's device",
        ),
        (
            {"past_key_values": offloading()},
            "the cache is a DynamicCache, not an empty DynamicCache on the model's device",
        ),
        ({"past_key_values": of_static_layers()}, "the cache has layers of OwnLayer"),
        ({"past_key_values": None, "cache_params": cache()}, ""),
        ({"past_key_values": None, "cache": cache()}, ""),
        (
            {"past_key_values": None, "cache": DynamicCache()},
            "the cache is a DynamicCache, not an empty DynamicCache on the model's device",
        ),
        ({"criteria": [END]}, NO_END),
        ({"criteria": [LENGTH]}, NO_END),
        ({"criteria": [LENGTH, Until(3)]}, NO_END),
        ({"criteria": [END, LENGTH, Until(3)]}, ""),
        ({"model": {"index_topk": 9}}, ""),
        (
            {"model": {"index_topk": 8}},
            "attention keeps the 8 highest scores (index_topk), and padding decides between equal ones",
        ),
        ({"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 1], [0, 1, 1]])}, ""),
        ({"attention_mask": torch.tensor([[1, 1, 1], [0, 1, 0]])}, HOLES),
        ({"attention_mask": torch.tensor([[1, 0, 0], [1, 1, 1]])}, HOLES),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1]])}, HOLES),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, HOLES),
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
    assert reason_to_decline(policy, criteria, requested, **given) == reason


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


def test_a_step_asks_for_the_logits_of_the_last_token_in_float32() -> None:
    asked: list[dict[str, Any]] = []

    class Policy:
        def prepare_inputs_for_generation(self, tokens: Tensor, **given: Any) -> dict[str, Any]:
            asked.append(given)
            return {"tokens": tokens}

        def __call__(self, **given: Any) -> Any:
            asked.append(given)
            return SimpleNamespace(logits=torch.arange(24.0).reshape(2, 3, 4).bfloat16())

    policy: Any = Policy()
    tokens = torch.tensor([[5, 6, 7], [8, 9, 9]])
    logits = decode_step(policy, tokens, position_ids="positions")
    assert logits.dtype == torch.float32
    assert logits.tolist() == [[8, 9, 10, 11], [20, 21, 22, 23]]
    assert asked[0] == {"next_sequence_length": 3, "use_cache": True, "position_ids": "positions"}
    assert asked[1] == {"tokens": tokens, "return_dict": True}


def test_a_call_without_a_mask_has_no_padding() -> None:
    settings: Any = GenerationConfig(do_sample=False)
    settings._pad_token_tensor = torch.tensor(0)
    criteria = StoppingCriteriaList([LENGTH])
    ids = torch.tensor([[5, 6, 7], [8, 9, 9]])
    call = Batch(Turn(), tiny("LlamaConfig"), ids, LogitsProcessorList(), criteria, settings, past_key_values=cache())
    assert (call.mask, call.starts, call.first) == (None, [0, 0], 0)
    assert call.ids.tolist() == [[5, 6, 7, *[0] * 6], [8, 9, 9, *[0] * 6]]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        given = (LogitsProcessorList(), criteria, settings)
        recorded = Batch(Turn(record_every=1), call.model, ids, *given, past_key_values=cache()).log_probs
    finally:
        torch.set_default_dtype(before)
    assert (recorded.dtype, recorded.shape) == (torch.float32, (2, 6))


@pytest.mark.parametrize(
    ("starts", "generating", "first", "spare"),
    [
        ([2, 5, 1], [0, 1], 0, 2),
        ([2, 5, 1], [0, 1], 2, None),
        ([2, 5, 1], [1], 2, 3),
        ([2, 3, 0], [1, 0], 1, 1),
        ([2, 3, 0], [2, 1, 0], 0, None),
    ],
)
def test_the_padding_of_all_rows_that_still_generate_is_cut(
    starts: list[int], generating: list[int], first: int, spare: int | None
) -> None:
    cut: list[int] = []
    values = {"starts": starts, "generating": generating, "first": first, "buffers": [SimpleNamespace(cut=cut.append)]}
    call: Any = SimpleNamespace(positions=torch.zeros(1), **values)
    Batch.cut_padding(call)
    assert cut == ([] if spare is None else [spare])
    assert call.first == first + (spare or 0)
    call.positions, call.first = None, first
    Batch.cut_padding(call)
    assert call.first == first, "the model counts its cache"


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


def test_the_prompts_are_prepared_as_in_transformers_own_loop() -> None:
    def prepared(turn: Turn | None) -> list[tuple[bool, int]]:
        policy: Any = tiny("LlamaConfig")
        seen: list[tuple[bool, int]] = []
        stock = policy.prepare_inputs_for_generation

        @functools.wraps(stock)
        def prepare(ids: Tensor, **given: Any) -> Any:
            seen.append((given.get("is_first_iteration", False), given["attention_mask"].shape[1]))
            return stock(ids, **given)

        policy.prepare_inputs_for_generation = prepare
        generated(policy, turn, eos_token_id=10_000, max_new_tokens=3)
        return seen

    ours, stock = prepared(Turn()), prepared(None)
    assert ours[0] == stock[0] == (True, 11)
    assert [first for first, _ in ours] == [first for first, _ in stock] == [True, False, False]


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


@pytest.mark.parametrize(("prompts", "masked"), [((5, 5), False), ((3, 11), True)])
def test_a_step_has_a_mask_only_beside_padding(
    prompts: tuple[int, ...], masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask of ones would slow attention."""
    seen: list[bool] = []

    def step(policy: Any, tokens: Tensor, **inputs: Any) -> Tensor:
        seen.append(inputs["attention_mask"] is not None)
        assert inputs["position_ids"].shape == tokens.shape
        return decode_step(policy, tokens, **inputs)

    monkeypatch.setattr(groups, "decode_step", step)
    generated(tiny("LlamaConfig"), Turn(), batch(prompts), eos_token_id=10_000, max_new_tokens=4)
    assert seen[1:] == [masked] * 3


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
