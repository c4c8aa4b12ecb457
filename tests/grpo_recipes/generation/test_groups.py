"""Group decoding compared with transformers' own loop: the same tokens, less work, and the reasons to decline."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationMixin,
    LogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
    cache_utils,
)

from grpo_recipes.generation import groups, kv_cache
from grpo_recipes.generation.groups import Turn, decoding
from grpo_recipes.generation.sampling import BLOCK, Uniforms, draw
from tests.support import device
from tests.support.architectures import (
    ARCHITECTURES,
    ENDS,
    SETTINGS,
    assert_same,
    batch,
    config,
    generated,
    lengths,
    tiny,
)
from tests.support.grids import only
from tests.tools.models import build

# ---- the same tokens

GRID = list(product(ARCHITECTURES, SETTINGS))
COVER = [pair for index, pair in enumerate(GRID) if index % len(SETTINGS) == index // len(SETTINGS) % len(SETTINGS)]
"""Pairs of which each architecture and each setting is in at least one."""


@pytest.mark.gpu
@pytest.mark.parametrize(("architecture", "setting"), COVER[::3])
def test_the_same_tokens(architecture: str, setting: str) -> None:
    if setting == "watermark" and device.NAME == "pretend":
        pytest.skip("torch has no generator for a pretend GPU")
    assert_same(tiny(architecture), **SETTINGS[setting])


def test_rows_end_at_many_lengths_in_these_tests() -> None:
    assert len(set(lengths(generated(tiny("LlamaConfig"), None, max_new_tokens=8), 11))) > 4


@pytest.mark.parametrize("architecture", only([], ARCHITECTURES, list(ARCHITECTURES)[::2]))
def test_the_same_tokens_with_any_setting(architecture: str) -> None:
    policy = tiny(architecture)
    for setting in SETTINGS.values():
        assert_same(policy, **setting)


def test_buffers_that_grow_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "ROOM", 2)
    for architecture in ("MistralConfig", "Gemma3TextConfig"):
        assert_same(tiny(architecture), max_new_tokens=9)


def test_the_same_tokens_if_all_rows_end_at_once() -> None:
    policy = tiny("LlamaConfig")
    assert assert_same(policy, max_new_tokens=1).shape == (16, 12)
    assert assert_same(policy, eos_token_id=list(range(40))).shape == (16, 12)


def test_the_same_tokens_of_other_prompts() -> None:
    policy = tiny("LlamaConfig")
    inputs = batch((1, 9, 1, 9))
    assert_same(policy, inputs, max_new_tokens=8)
    del inputs["attention_mask"]  # generate makes one of where there is padding
    assert_same(policy, inputs, max_new_tokens=8)
    wide = {name: nn.functional.pad(value, (5, 0)) for name, value in batch().items()}
    assert_same(policy, wide, max_new_tokens=8)  # padding that no row needs
    assert assert_same(policy, batch(group=1), num_return_sequences=4, max_new_tokens=8).shape[0] == 16


def test_a_model_that_counts_its_cache_for_positions() -> None:
    """Its padding is not cut: a column less would be a position less."""
    policy = build("bart").eval()
    assert "position_ids" not in inspect.signature(policy.forward).parameters
    tokens = assert_same(policy, batch((9, 2, 30, 4, 4, 6), 1), seed=6)
    ends = lengths(tokens, 30)
    assert ends[2] < max(ends), "the longest prompt's row finishes before another"


def test_an_end_token_that_pads() -> None:
    """Rows with equal IDs and different prompts, because the end-of-sequence token is also the padding."""
    inputs = {
        "input_ids": torch.tensor([[1, 1, 5, 6], [1, 1, 5, 6]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]),
    }
    assert_same(tiny("LlamaConfig"), inputs, pad_token_id=1, max_new_tokens=8)
    assert_same(tiny("LlamaConfig"), pad_token_id=1, max_new_tokens=8)


class AcrossRows(LogitsProcessor):
    """Processor that looks at all rows, and needs all of them."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert len(input_ids) == len(scores) == 16
        return scores + 3.0 * nn.functional.one_hot(input_ids[:, -1].roll(1), scores.shape[1])


def test_a_processor_that_looks_across_rows() -> None:
    assert_same(tiny("LlamaConfig"), logits_processor=[AcrossRows()], max_new_tokens=8)


@pytest.mark.gpu
def test_the_same_tokens_in_bfloat16() -> None:
    assert_same(tiny("LlamaConfig").bfloat16(), do_sample=False, max_new_tokens=8)


# ---- the random stream of users


def completions_of(policy: PreTrainedModel, prompt: list[int], longest: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Return every completion of at most `longest` tokens with its probability, from plain forwards."""
    tokens = policy.config.vocab_size
    with torch.no_grad():
        stack = [((), 1.0)]
        while stack:
            text, probability = stack.pop()
            if text and (text[-1] in ENDS or len(text) == longest):
                yield text, probability
                continue
            following = policy(torch.tensor([[*prompt, *text]]), use_cache=False).logits[0, -1].softmax(-1).tolist()
            stack += [((*text, token), probability * following[token]) for token in range(tokens)]


def test_the_random_stream_of_users_samples_the_policy() -> None:
    """Chi-square test of complete completions, many of which end early, with their exact probabilities."""
    policy, prompts, group = tiny("LlamaConfig", vocab_size=7), [[5], [4, 6, 5]], 2000
    rows = [row for row in prompts for _ in range(group)]
    inputs = {
        "input_ids": torch.tensor([[0] * (3 - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (3 - len(row)) + [1] * len(row) for row in rows]),
    }
    tokens = generated(policy, Turn(), inputs, max_new_tokens=3)
    assert tokens.tolist() != generated(policy, None, inputs, max_new_tokens=3).tolist(), "its own stream"
    ends = lengths(tokens, 3)
    for number, prompt in enumerate(prompts):
        span = range(number * group, (number + 1) * group)
        counts = Counter(tuple(tokens[row, 3 : 3 + ends[row]].tolist()) for row in span)
        statistic, cells, rest = 0.0, 0, group
        for text, probability in completions_of(policy, prompt, 3):
            if (expected := probability * group) >= 5:
                statistic += (counts[text] - expected) ** 2 / expected
                cells, rest = cells + 1, rest - expected
        assert cells > 15
        assert rest < 0.4 * group
        assert statistic < cells + 4 * (2 * cells) ** 0.5, "four standard deviations of a chi-square"


def test_a_token_without_probability_is_never_drawn() -> None:
    """Such tokens stand between, before and behind the others. Rows are drawn by their own probabilities."""
    rows = torch.tensor([[0.0, 0.2, 0.0, 0.8, 0.0], [0.5, 0.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0, 1.0]])
    uniforms = torch.rand(60_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = draw(rows.repeat(20_000, 1), uniforms).reshape(-1, 3)
    for row, column in zip(rows, tokens.T, strict=True):
        shares = column.bincount(minlength=5) / len(column)
        torch.testing.assert_close(shares, row, atol=0.02, rtol=0)
        assert not shares[row == 0].any()


@pytest.mark.parametrize(
    ("row", "uniform", "token"),
    [
        ([0.0, 0.1, 0.7, 0.2, 0.0], 0.0, 3),
        ([0.0, 0.1, 0.7, 0.2, 0.0], 1 - 2**-53, 1),
        # The sum of these probabilities, as a number of float64, is larger than it is.
        ([0.0, 1 - 2**-24, 100 * 2**-60, 0.0], 0.0, 2),
        # A probability below the smallest counts as 0.
        ([0.0, 4 * 2**-60, 2**-60], 0.0, 2),
        ([0.0, 4 * 2**-60, 0.75 * 2**-60], 0.0, 1),
    ],
)
def test_extreme_numbers_draw_possible_tokens(row: list[float], uniform: float, token: int) -> None:
    assert draw(torch.tensor([row]), torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_a_call_takes_one_number_of_the_global_generator_and_keeps_all_bits_of_its_own() -> None:
    for seed in (0, 1):
        torch.manual_seed(seed)
        uniforms = Uniforms(3, torch.device("cpu"))
        after, found = torch.rand(1), []
        for token in range(2 * BLOCK):
            uniforms.show(token)
            found.append(uniforms.of(token).clone())
        torch.manual_seed(seed)
        own = torch.Generator().manual_seed(int(torch.randint(2**63 - 1, ())))
        assert torch.equal(after, torch.rand(1))
        blocks = [torch.rand(BLOCK, 3, dtype=torch.float64, generator=own) for _ in range(2)]
        assert torch.equal(torch.stack(found), torch.cat(blocks))


# ---- less work


def test_each_prompt_runs_once_and_a_finished_row_no_more() -> None:
    policy, inputs = tiny("LlamaConfig"), batch()
    seen: list[tuple[int, ...]] = []
    columns: list[int] = []
    policy.model.register_forward_pre_hook(
        lambda _, args, given: seen.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    policy.register_forward_hook(lambda _, args, out: columns.append(out.past_key_values.layers[0].keys.shape[2]))
    ends = lengths(generated(policy, Turn(), inputs, seed=10), 11)  # one in which the longest prompt's rows end early
    assert seen[0] == (4, 11)
    assert sum(rows for rows, _ in seen[1:]) == sum(length - 1 for length in ends)
    # The longest prompt's rows leave, and the padding of the others with them.
    last = [row for row in range(16) if ends[row] == max(ends)]
    prompt = int(inputs["attention_mask"][last].sum(1).max())
    assert columns[-1] == prompt + max(ends) - 1
    assert prompt < 11


# ---- recorded log-probabilities


@pytest.mark.parametrize(("every", "rows"), [(1, range(16)), (5, [0, 5, 10, 15])])
def test_the_log_probabilities_of_the_sampled_tokens(every: int, rows: Any) -> None:
    policy, inputs = tiny("LlamaConfig"), batch()
    turn = Turn(record_every=every, temperature=0.7)
    tokens = generated(policy, turn, inputs, temperature=0.7, top_k=5, repetition_penalty=1.5, max_new_tokens=12)
    assert turn.log_probs is not None
    assert len(turn.log_probs) == len(rows)
    for recorded, row, length in zip(turn.log_probs, rows, [lengths(tokens, 11)[row] for row in rows], strict=True):
        text = tokens[row][: 11 + length][inputs["attention_mask"][row].argmax() :]
        with torch.no_grad():
            expected = (policy(text[None], use_cache=False).logits[0, -length - 1 : -1] / 0.7).log_softmax(-1)
        expected = expected.gather(1, text[-length:, None])[:, 0]
        torch.testing.assert_close(recorded[:length], expected, atol=1e-5, rtol=0)
        assert not recorded[length:].any()


class Until(StoppingCriteria):
    """Criterion that ends all rows at a number of columns, and counts its calls."""

    def __init__(self, columns: int) -> None:
        self.columns, self.calls = columns, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.columns)


def test_prompts_may_be_given_by_position_and_criteria_of_the_caller_count() -> None:
    for grouped in (True, False):
        policy, inputs, turn = tiny("LlamaConfig"), batch((5, 5)), Turn(grouped=grouped, record_every=1)
        own, added = Until(8), Until(99)
        with torch.no_grad(), decoding(policy, turn, [added]):
            tokens = policy.generate(inputs["input_ids"], config(eos_token_id=10_000), stopping_criteria=[own])
        assert tokens.shape == (8, 8)
        with torch.no_grad():
            logits = policy(tokens, use_cache=False).logits[:, 4:-1]
        expected = logits.log_softmax(-1).gather(2, tokens[:, 5:, None])[..., 0]
        assert turn.log_probs is not None
        torch.testing.assert_close(turn.log_probs, expected, atol=1e-5, rtol=0)  # at temperature 1, unless given
        assert turn.declined == ""
        assert own.calls == added.calls > 0


# ---- calls left to transformers' own loop

DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
INDEXED = {
    "layer_types": ["indexed_attention"] * 2, "first_k_dense_replace": 2, "q_lora_rank": 8, "kv_lora_rank": 8,
    "num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 8,
    "index_head_dim": 8, "index_n_heads": 4, "index_topk": 16,
}  # fmt: skip
DECLINED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # a word of the reason: the model, and the call
    "beam_search": ("LlamaConfig", {}, {"num_beams": 2, "do_sample": False}),
    "prefill_chunk_size": ("LlamaConfig", {}, {"prefill_chunk_size": 4}),
    "StaticCache": ("LlamaConfig", {}, {"cache_implementation": "static"}),
    "use_cache": ("LlamaConfig", {}, {"use_cache": False}),
    "end-of-sequence": ("LlamaConfig", {"eos_token_id": None}, {"eos_token_id": None}),
    "dynamic": ("LlamaConfig", DYNAMIC, {}),
    "DynamicIndexedLayer": ("DeepseekV32Config", INDEXED, {}),
    "encoder": ("T5Config", {}, {"decoder_start_token_id": 0}),
}


@pytest.mark.parametrize("reason", only(DECLINED.keys() - {"DynamicIndexedLayer"}, DECLINED))
def test_transformers_own_loop_generates(reason: str) -> None:
    architecture, changes, how = DECLINED[reason]
    how = {"max_new_tokens": 4, **how}
    if architecture == "T5Config":
        settings = transformers.T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
        policy = transformers.T5ForConditionalGeneration(settings).eval()
    else:
        policy = tiny(architecture, **changes)
    forwards: list[int] = []
    handle = policy.register_forward_pre_hook(lambda *_: forwards.append(1))
    expected, alone = generated(policy, None, **how), len(forwards)
    turn = Turn(record_every=1)
    got = generated(policy, turn, **how)
    handle.remove()
    assert reason in turn.declined
    assert len(forwards) == 2 * alone, "declined before the prefill"
    assert got.tolist() == expected.tolist()


def test_rows_that_stay_below_the_scores_that_attention_keeps_are_decoded_in_groups() -> None:
    assert_same(tiny("DogeConfig", keep_window_size=11 + 5), max_new_tokens=5)
    turn = Turn()
    generated(tiny("DogeConfig", keep_window_size=11 + 4), turn, max_new_tokens=5)
    assert "keep_window_size" in turn.declined


def test_inputs_that_the_loop_can_not_carry_are_declined() -> None:
    inputs = batch()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    holes, right = mask.clone(), mask.clone()
    holes[:, 5], right[3, -1] = 0, 0
    used = DynamicCache(config=tiny("LlamaConfig").config)
    used.update(torch.zeros(16, 2, 1, 8), torch.zeros(16, 2, 1, 8), 0)
    for architecture, changes, reason in (
        ("GPT2Config", {"token_type_ids": torch.ones_like(ids)}, "token_type_ids"),
        ("LlamaConfig", {"attention_mask": holes}, "holes"),
        ("LlamaConfig", {"attention_mask": right}, "right"),
        ("LlamaConfig", {"past_key_values": used}, "DynamicCache"),
    ):
        turn = Turn()
        with suppress(RuntimeError, ValueError, IndexError):  # another call has used the cache
            generated(tiny(architecture), turn, {**inputs, **changes}, max_new_tokens=2)
        assert reason in turn.declined


OWN_WAYS = {"openai-gpt": "without a cache", "cpmant": "columns", "git": "multimodal", "recurrent_gemma": "states"}


@pytest.mark.parametrize("model_type", only(["openai-gpt", "recurrent_gemma", "git"], OWN_WAYS))
def test_models_with_caches_of_their_own_are_declined(model_type: str) -> None:
    policy, turn = build(model_type).eval(), Turn()
    expected = generated(policy, None, max_new_tokens=4)
    assert generated(policy, turn, max_new_tokens=4).tolist() == expected.tolist()
    assert OWN_WAYS[model_type] in turn.declined


def test_a_model_with_its_own_generate_is_declined() -> None:
    policy, turn = tiny("LlamaConfig"), Turn()
    policy.generate = lambda **_: "its own"
    with decoding(policy, turn):
        assert policy.generate(**batch()) == "its own"
    assert "`generate`" in turn.declined
    assert policy.generate() == "its own"


def test_decoding_leaves_the_model_unchanged() -> None:
    policy = tiny("LlamaConfig")
    before = dict(vars(policy))
    with pytest.raises(ZeroDivisionError), decoding(policy, Turn()):
        1 / 0  # noqa: B018
    assert vars(policy) == before


# ---- contracts


def test_contract_with_transformers_on_custom_loops() -> None:
    """`generate` calls a custom loop as it calls `_sample`, and takes the layers of its cache from these classes."""
    stock = inspect.signature(GenerationMixin._sample).parameters
    loop = inspect.signature(groups.GroupLoop).parameters
    named = {name for name, parameter in loop.items() if parameter.kind is not parameter.VAR_KEYWORD}
    assert named - {"turn", "model"} <= set(stock)
    assert set(stock) - named == {"self", "model_kwargs", "synced_gpus", "streamer"}
    # The files of some models add layers of their own when they are imported.
    every = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING.values()
    layers = {layer for layer in every if layer.__module__ == cache_utils.__name__}
    assert layers - {*kv_cache.LAYERS, cache_utils.DummyLayer} == {cache_utils.DynamicIndexedLayer}
    assert hasattr(GenerationMixin, "_optimize_model_for_decode")
