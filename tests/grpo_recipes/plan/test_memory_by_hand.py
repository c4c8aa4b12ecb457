"""Bytes of a micro-batch, added up by hand from the tensors that each moment of it holds.

The sizes are such that one moment outweighs the others. `test_memory_meter.py` measures what is added up here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from grpo_recipes.plan.layers import LayerBytes, Measured, Precision, RowSizes
from grpo_recipes.plan.memory import MemoryPlan, ModelShape, Sharding, sharing_prompts
from grpo_recipes.training.layout_check import COMPARED_ROWS, EXTRA_PADDING
from grpo_recipes.training.packing import Layout
from tests.grpo_recipes.plan.test_memory import TINY

LAYERS, HIDDEN, INNER, QUERY, KEY, HEAD = 3, 10, 20, 12, 4, 330
ROWS, TOKENS, PROMPT = 6, 7, 4
ALL = ROWS * TOKENS
WEIGHTS = 7_000
TILE = 32_768  # logits of a token that TRL's head computes at once
IDS = 64  # bytes of a token's IDs, masks, labels and log-probabilities

SHAPE = ModelShape(WEIGHTS, WEIGHTS, 500, LAYERS, HIDDEN, INNER, KEY, QUERY, HEAD, False)
BF16 = replace(
    TINY,
    shape=SHAPE,
    layout=Sharding(),
    rows=ROWS,
    tokens=TOKENS,
    prompt_tokens=PROMPT,
    mixed_precision=False,
    gradient_checkpointing=False,
    full_reference=False,
    gather_for_generation=False,
    gpu_memory=None,
)
"""Full fine-tuning in bfloat16 throughout, with the gradients of an earlier micro-batch."""
AUTOCAST = replace(BF16, dtype_bytes=4, mixed_precision=True)
FLOAT32 = replace(BF16, dtype_bytes=4)
ADAPTER = replace(BF16, shape=replace(SHAPE, trained=84))

BATCH = ALL * (TOKENS + IDS)
"""The mask of attention has a byte for each pair of tokens of a row."""
STREAM = ALL * HIDDEN
"""Numbers of one tensor of hidden states."""

# The tensors that a layer keeps for each token in bfloat16. A norm keeps its float32 input and the 16-bit factor of its
# weight. One tensor is the input of queries, keys and values, another that of gate and up projection. Four tensors lie
# inside the feed-forward layer. Attention keeps query, key, value (repeated for each head) and output, a float32 number
# for each head of 64, and a bias of the scores.
SCORES = ALL * TOKENS * 2
ATTENTION_16 = ALL * QUERY * (4 * 2 + 4 / 64) + SCORES
KEPT_16 = STREAM * (2 * (4 + 2) + 2 * 2) + ALL * INNER * 4 * 2 + ATTENTION_16
# Float32 keeps the same tensors, each of 4 bytes.
KEPT_32 = STREAM * (2 * (4 + 4) + 2 * 4) + ALL * INNER * 4 * 4 + ALL * QUERY * (4 * 4 + 4 / 64) + 2 * SCORES
# Autocast keeps the residual stream and the factors in float32, and casts the input of each of five projections.
KEPT_AUTOCAST = STREAM * (2 * (4 + 4) + 5 * 2) + ALL * INNER * 4 * 2 + ATTENTION_16
CASTS = 2 * (WEIGHTS - HEAD)  # 16-bit copies of the float32 weights, in all layers
# Each of seven adapters keeps its dropped input and a byte of the mask. Their matrices are RANK wide.
RANK = 84 / LAYERS / (7 * HIDDEN + 2 * (QUERY + KEY) + 3 * INNER)
KEPT_ADAPTER = (
    STREAM * (2 * 4 + 5 * (2 + 1)) + ALL * QUERY * (2 + 1) + ALL * INNER * (4 * 2 + 1) + ALL * 7 * RANK * 2
) + ATTENTION_16
# Behind the last layer: the float32 input of the last norm and a float32 gradient, and four tensors of the stream.
HEAD_16 = ALL * TILE * 2 + STREAM * (4 + 4 + 4 * 2)
HEAD_32 = ALL * TILE * 4 + STREAM * (4 + 4 + 4 * 4)
# By autocast, copies of the weights of a tile, and a 16-bit tile.
HEAD_AUTOCAST = ALL * TILE * 2 + STREAM * (4 + 4 + 4 * 4) + 2 * HEAD
# The reference's hidden states and two float32 tiles, and the completions' tokens of both models.
HEAD_FULL_KL = ALL * TILE * 8 + STREAM * (4 + 4 + 4 * 2 + 3 * 2 + 8)


def wide(run: MemoryPlan) -> MemoryPlan:
    """Return the estimate for a feed-forward layer that outweighs a tile of the head."""
    return replace(run, shape=replace(run.shape, intermediate=10**6))


def kept_wide(kept: float, each: float) -> float:
    """Return the bytes that a layer keeps with that feed-forward layer, `each` for each of its numbers."""
    return kept + ALL * (10**6 - INNER) * each


def with_zero2(run: MemoryPlan) -> MemoryPlan:
    return replace(run, layout=Sharding(8, 1, "zero2"))


SIZES = ("parameters", "trained")
CHECKPOINTED: dict[str, Any] = {"gradient_checkpointing": True}
ALONE: dict[str, Any] = {"accumulates": False}

AT_THE_HEAD = {
    "bfloat16": (BF16, LAYERS * KEPT_16 + HEAD_16 + HEAD * (4 + 2)),
    "float32": (FLOAT32, LAYERS * KEPT_32 + HEAD_32 + HEAD * 4),
    "autocast": (AUTOCAST, LAYERS * KEPT_AUTOCAST + CASTS + HEAD_AUTOCAST + HEAD * 4),
    "adapter": (ADAPTER, LAYERS * KEPT_ADAPTER + HEAD_16),
    "full KL": (replace(BF16, full_kl=True), LAYERS * KEPT_16 + HEAD_FULL_KL + HEAD * (4 + 2)),
    "full KL in float32": (
        replace(FLOAT32, full_kl=True),
        LAYERS * KEPT_32 + ALL * TILE * 8 + STREAM * (4 + 4 + 4 * 4 + 3 * 4 + 8) + HEAD * (4 + 4),
    ),
    "checkpointed": (replace(BF16, **CHECKPOINTED), LAYERS * STREAM * 2 + HEAD_16 + HEAD * (4 + 2)),
    # The casts of all layers stay until the end of the forward pass, and outweigh the gradient of the head.
    "checkpointed autocast": (replace(AUTOCAST, **CHECKPOINTED), LAYERS * STREAM * 4 + HEAD_AUTOCAST + CASTS),
    # Gradients that do not exist yet are counted among the states.
    "one micro-batch": (replace(BF16, **ALONE), LAYERS * KEPT_16 + HEAD_16 + HEAD * (4 + 2) - 2 * WEIGHTS),
    "one micro-batch of an adapter": (replace(ADAPTER, **ALONE), LAYERS * KEPT_ADAPTER + HEAD_16 - 4 * 84),
    "one micro-batch under ZeRO-2": (
        with_zero2(replace(BF16, **ALONE)),
        LAYERS * KEPT_16 + HEAD_16 + HEAD * (4 + 2),
    ),
    # A tile's weights and those of the one before it are copied, not the whole head.
    "large head under autocast": (
        replace(AUTOCAST, shape=replace(SHAPE, head=10**6, **dict.fromkeys(SIZES, WEIGHTS - HEAD + 10**6))),
        LAYERS * KEPT_AUTOCAST
        + CASTS
        + ALL * TILE * 2
        + STREAM * (4 + 4 + 4 * 4)
        + 2 * (2 * TILE * HIDDEN)
        + 4 * 10**6,
    ),
    "norms of heads": (
        replace(BF16, shape=replace(SHAPE, norms_heads=True)),
        LAYERS * (KEPT_16 + ALL * (QUERY + KEY) * (4 + 2 + 4 / 64)) + HEAD_16 + HEAD * (4 + 2),
    ),
}
IN_A_LAYER = {
    # Four numbers of the hidden size, and the gradients of two tensors inside the feed-forward layer.
    "bfloat16": (
        wide(BF16),
        LAYERS * kept_wide(KEPT_16, 4 * 2) + STREAM * 4 + ALL * 10**6 * 2 * 2 + 2 * HEAD,
    ),
    "checkpointed": (
        replace(wide(BF16), **CHECKPOINTED),
        LAYERS * STREAM * 2 + kept_wide(KEPT_16, 4 * 2) + STREAM * 4 + ALL * 10**6 * 2 * 2 + 2 * HEAD,
    ),
    # A float32 adapter on 16-bit weights: dropout has a float32 input and output, and so have their gradients.
    "adapter": (
        wide(replace(ADAPTER, shape=replace(ADAPTER.shape, trained=0))),
        LAYERS * (kept_wide(KEPT_ADAPTER, 4 * 2 + 1) - ALL * 7 * RANK * 2) + STREAM * 11 + ALL * 10**6 * 5 * 2,
    ),
    "adapter in bfloat16": (
        with_zero2(wide(replace(ADAPTER, shape=replace(ADAPTER.shape, trained=0)))),
        LAYERS * (kept_wide(KEPT_ADAPTER, 4 * 2 + 1) - ALL * 7 * RANK * 2) + STREAM * 11 + ALL * 10**6 * 2,
    ),
    "quantized": (
        replace(wide(replace(ADAPTER, shape=replace(ADAPTER.shape, trained=0))), quantised_bytes=0.5),
        LAYERS * (kept_wide(KEPT_ADAPTER, 4 * 2 + 1) - ALL * 7 * RANK * 2)
        + (STREAM * 11 + ALL * 10**6 * 2 + 2 * HIDDEN * 10**6),  # one dequantized matrix
    ),
}


@pytest.mark.parametrize("name", AT_THE_HEAD)
def test_what_a_micro_batch_holds_at_the_head(name: str) -> None:
    run, expected = AT_THE_HEAD[name]
    assert run.parts()["activations"] == pytest.approx(expected + BATCH, abs=0.5)


@pytest.mark.parametrize("name", IN_A_LAYER)
def test_what_a_micro_batch_holds_in_the_last_layer(name: str) -> None:
    run, expected = IN_A_LAYER[name]
    assert run.parts()["activations"] == pytest.approx(expected + BATCH, abs=0.5)


def test_a_tile_of_the_head_has_at_most_4096_tokens() -> None:
    many = replace(BF16, rows=100 * ROWS)
    head = 4_096 * TILE * 2 + 100 * STREAM * (4 + 4 + 4 * 2) + HEAD * (4 + 2)
    assert many.parts()["activations"] == pytest.approx(100 * (LAYERS * KEPT_16 + BATCH) + head, abs=0.5)


def test_the_end_of_a_micro_batch_outweighs_its_start_if_all_gradients_are_new() -> None:
    """At the end every gradient exists, and only the first layer's tensors are left."""
    many = replace(BF16, shape=replace(SHAPE, parameters=10**8, trained=10**8), **ALONE)
    layer = KEPT_16 + STREAM * 4 + ALL * INNER * 2 * 2
    assert many.parts()["activations"] == pytest.approx(layer + BATCH, abs=0.5)
    assert replace(many, accumulates=True).parts()["activations"] > HEAD_16
    assert with_zero2(many).parts()["activations"] > HEAD_16, "a rank's share of the gradients is a part of its own"


@pytest.mark.parametrize(
    ("run", "gradients"),
    [
        (replace(FLOAT32, **ALONE), 2),  # the head's, and the sum; the states count the embedding's
        (FLOAT32, 3),  # the embedding's of this micro-batch, too
        (with_zero2(FLOAT32), 3),
    ],
    ids=["one micro-batch", "several", "ZeRO-2"],
)
def test_the_gradients_of_a_tied_head_are_added_to_the_embeddings(run: MemoryPlan, gradients: int) -> None:
    tied = replace(run, shape=replace(SHAPE, parameters=10**8, trained=10**8, head=10**8 - WEIGHTS, ties_head=True))
    assert tied.parts()["activations"] == gradients * 4 * (10**8 - WEIGHTS) + BATCH


@pytest.mark.parametrize(
    ("layout", "mixed", "weights"),
    [
        (Sharding(), False, 10**7),
        (Sharding(8, 1), False, 10**7),
        (Sharding(8, 1, "fsdp2"), False, 10**7 / 8),
        (Sharding(8, 1, "fsdp2"), True, 0),  # keeps float32 weights
        (Sharding(8, 1, "zero2"), False, 0),  # DeepSpeed has optimizers of its own
    ],
)
def test_adamw_bf16_computes_a_ranks_own_weights(layout: Sharding, mixed: bool, weights: float) -> None:
    """Each weight of a step takes two float32 numbers and a byte."""
    small = replace(SHAPE, parameters=10**7, trained=10**7, layers=1, head=0)
    run = replace(BF16, shape=small, layout=layout, mixed_precision=mixed, rows=1, tokens=1, prompt_tokens=0)
    least = run.parts()["activations"]
    assert least < 10**6
    assert replace(run, optim="adamw_bf16").parts()["activations"] == max(9 * weights, least)


# ---- Rows that share prompts

SHARED = sharing_prompts(replace(BF16, rows=6, tokens=400, prompt_tokens=300), 1, 3, accumulation=2)
"""Two prompts of 300 tokens, each with three completions of 100."""
COMPUTED = 2 * 299 + 6 * 100


@pytest.mark.parametrize(("size", "key_value"), [(2, KEY), (4, QUERY)])
def test_what_a_packed_row_holds(size: int, key_value: int) -> None:
    """Queries and outputs are kept for each completion, keys and values repeated for each head in float32 only."""
    run = replace(SHARED, dtype_bytes=size)
    assert run.computed() == COMPUTED
    elements = QUERY * (2 * size + 4 / 64) + 2 * key_value * size
    attention = 6 * 399 * elements + COMPUTED * QUERY * size  # outputs are also kept as one row
    layer = COMPUTED * (HIDDEN * (2 * (4 + size) + 2 * size) + INNER * 4 * size) + attention
    head = COMPUTED * (TILE * size + HIDDEN * (8 + 4 * size)) + HEAD * (6 if size == 2 else 4)
    assert run._micro_batch() == pytest.approx(LAYERS * layer + head + 6 * 400 * IDS, abs=0.5)


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        (Layout.PACKED, COMPUTED / 0.95),
        (Layout.SHARED, COMPUTED + 512),
        (Layout.SHARED_PADDED, COMPUTED + 2 * 512),
    ],
)
def test_the_longest_rows_that_are_preferred_to_shared_prompts(layout: Layout, most: float) -> None:
    """Packing must save 5 % of the tokens. A segment must save more tokens than a launch costs."""
    rows = replace(SHARED, rows_as=layout)._simpler_rows()
    assert (rows.tokens, rows.prompts, rows.rows_as) == (math.ceil(most / 6), None, Layout.TRIMMED)
    assert rows.tokens - rows.prompt_tokens == 100
    short = replace(SHARED, rows_as=layout, rows=6, tokens=130, prompt_tokens=30, prompts=6)._simpler_rows()
    assert (short.tokens, short.prompt_tokens) == (130, 30), "no row is longer than the longest"
    of_tools = replace(SHARED, prompts=1, tokens=1300, prompt_tokens=1290)._simpler_rows()
    assert of_tools.prompt_tokens == of_tools.tokens - 10
    assert replace(SHARED, tokens=5, prompt_tokens=2, prompts=1, rows=60)._simpler_rows().prompt_tokens == 1


def test_the_activations_of_shared_prompts_are_those_of_the_largest_alternative() -> None:
    run = replace(SHARED, rows=60, prompts=20)
    packed, simpler, check = run._micro_batch(), run._simpler_rows()._micro_batch(), run._layout_check()
    assert check < packed < simpler == run.parts()["activations"]
    long = replace(SHARED, prompts=1, rows=COMPARED_ROWS, tokens=2000, prompt_tokens=1900)
    assert long.parts()["activations"] == long._layout_check() > long._simpler_rows()._micro_batch()
    shared = replace(run, rows_as=Layout.SHARED, tokens=302, shape=replace(SHAPE, query=10_000))
    assert shared.parts()["activations"] == shared._micro_batch() > shared._simpler_rows()._micro_batch()


PADDED = 400 + 2 * EXTRA_PADDING
CHECKED = COMPARED_ROWS * PADDED
CHECKED_BATCH = CHECKED * (PADDED + IDS)


@pytest.mark.parametrize(
    ("run", "layer", "other"),
    [
        # Four tensors of the stream, and three of the feed-forward layer. Gradients do not exist yet.
        (BF16, HIDDEN * 4 * 2 + 10**6 * 3 * 2, -2 * WEIGHTS),
        (FLOAT32, HIDDEN * 4 * 4 + 10**6 * 3 * 4, -4 * WEIGHTS),
        (with_zero2(BF16), HIDDEN * 4 * 2 + 10**6 * 3 * 2, 0),
        (AUTOCAST, HIDDEN * 4 * 4 + 10**6 * 3 * 2, 2 * (WEIGHTS - HEAD) - 4 * WEIGHTS),
        # An adapter's input and its product lie beside the layer's own. Autocast casts the weights of one layer.
        (ADAPTER, HIDDEN * (4 * 2 + 6) + 10**6 * 4 * 2, -4 * 84),
        (
            replace(AUTOCAST, shape=ADAPTER.shape),
            HIDDEN * (4 * 4 + 6) + 10**6 * 4 * 2,
            2 * (WEIGHTS - HEAD) / LAYERS - 4 * 84,
        ),
    ],
    ids=["bfloat16", "float32", "ZeRO-2", "autocast", "adapter", "adapter and autocast"],
)
def test_what_the_check_of_the_layout_holds_in_a_layer(run: MemoryPlan, layer: float, other: float) -> None:
    """A few rows run forward in TRL's layout, with columns of padding, before the first gradient."""
    shared = replace(wide(run), rows=6, tokens=400, prompt_tokens=300, prompts=2)
    assert shared._layout_check() == pytest.approx(CHECKED * layer + CHECKED_BATCH + other, abs=0.5)
    assert replace(shared, rows=600)._layout_check() == shared._layout_check()
    fewer = replace(shared, rows=COMPARED_ROWS - 1)._layout_check()
    assert fewer == pytest.approx((CHECKED * layer + CHECKED_BATCH) * (1 - 1 / COMPARED_ROWS) + other, abs=0.5)


def test_what_the_check_of_the_layout_holds_in_attention_and_at_the_head() -> None:
    """Queries, keys and values for each head, the output, and the bias of the scores; or a tile of the head."""
    attention = (10**6 * (4 * 2 + 2) + 2 * 2 * KEY + PADDED * 2 + HIDDEN * 4 * 2) * CHECKED
    run = replace(BF16, shape=replace(SHAPE, query=10**6), rows=4, tokens=400, prompt_tokens=300, prompts=2)
    assert run._layout_check() == pytest.approx(attention + CHECKED_BATCH - 2 * WEIGHTS, abs=0.5)
    autocast = replace(AUTOCAST, shape=replace(SHAPE, query=10**6), rows=4, tokens=400, prompt_tokens=300, prompts=2)
    attention = (10**6 * (4 * 2 + 4) + 2 * 4 * KEY + PADDED * 2 + HIDDEN * 4 * 4) * CHECKED
    casts = 2 * (WEIGHTS - HEAD)
    assert autocast._layout_check() == pytest.approx(attention + CHECKED_BATCH + casts - 4 * WEIGHTS, abs=0.5)
    head = CHECKED * (TILE * 2 + HIDDEN * (8 + 4 * 2))
    assert replace(run, shape=SHAPE)._layout_check() == pytest.approx(head + CHECKED_BATCH - 2 * WEIGHTS, abs=0.5)


# ---- Decoder layers that are measured


MIB = 2**20


class Layers:
    """Three decoder layers with given bytes, which record what was asked for."""

    def __init__(
        self, backward: tuple[int, int, int], forward: int = 1, between: int = STREAM * 2, casts: int = 0
    ) -> None:
        self.training = Measured(
            [LayerBytes(kept * MIB, forward * MIB, most * MIB) for kept, most in zip((1, 3, 7), backward, strict=True)],
            *(11, between),
        )
        checks = [LayerBytes(casts * size, forward * casts, 0) for size in (5, 6, 7)]
        self.check = Measured(checks, 50, 4 * (TOKENS + 2 * EXTRA_PADDING) * HIDDEN * 2)
        self.asked: list[tuple[Precision, RowSizes, bool]] = []

    def measure(self, precision: Precision, sizes: RowSizes, *, trains: bool = True) -> Measured:
        self.asked.append((precision, sizes, trains))
        return self.training if trains else self.check


LAST, FIRST, NONE = Layers((70, 5, 90)), Layers((90, 5, 70)), Layers((0, 0, 0))
SCORED = ROWS * (TOKENS - PROMPT)
HEAD_OF_SCORED = SCORED * TILE * 2 + STREAM * (4 + 4 + 4 * 2)
BESIDE = 11 + ALL * IDS
"""Bytes that all layers read, the mask among them, and those of IDs."""
BETWEEN = STREAM * 2
TRAINED = 2 * WEIGHTS
TIED = replace(SHAPE, ties_head=True)

MEASURED: dict[str, tuple[MemoryPlan, Layers, float]] = {
    # The layers before this one keep their tensors, and the gradients of its output and of the head exist.
    "last layer": (BF16, LAST, (1 + 3 + 90) * MIB + BETWEEN + 2 * HEAD),
    "first layer": (BF16, FIRST, 90 * MIB + BETWEEN + 2 * HEAD),
    # Each layer keeps its input. The one that needs most in either pass is computed again.
    "checkpointed": (
        replace(BF16, **CHECKPOINTED),
        Layers((10, 5, 20), forward=100),
        2 * BETWEEN + 100 * MIB + 2 * BETWEEN + 2 * HEAD,
    ),
    "head": (BF16, NONE, (1 + 3 + 7) * MIB + HEAD_OF_SCORED + HEAD * (4 + 2)),
    "head of an adapter": (ADAPTER, NONE, (1 + 3 + 7) * MIB + HEAD_OF_SCORED),
    "head, checkpointed": (
        replace(BF16, **CHECKPOINTED),
        Layers((0, 0, 0), casts=1000),
        3 * BETWEEN + HEAD_OF_SCORED + 18_000,
    ),
    # Some models pass on float32 hidden states whatever their weights are: so is the tile, and weights are copied.
    "float32 states": (
        BF16,
        Layers((0, 0, 0), between=STREAM * 4),
        (1 + 3 + 7) * MIB + SCORED * TILE * 4 + STREAM * (4 + 4 + 4 * 4) + HEAD * 4 + HEAD * (4 + 2),
    ),
    "float32 states, ZeRO-2": (
        with_zero2(AUTOCAST),
        Layers((0, 0, 0), between=STREAM * 4),
        (1 + 3 + 7) * MIB + SCORED * TILE * 4 + STREAM * (4 + 4 + 4 * 4) + HEAD * 4 + HEAD * (4 + 2),
    ),
    "float32 states, autocast": (
        AUTOCAST,
        Layers((0, 0, 0), between=STREAM * 4),
        (1 + 3 + 7) * MIB + SCORED * TILE * 2 + STREAM * (4 + 4 + 4 * 4) + HEAD * 2 + HEAD * 4,
    ),
    # Without earlier gradients, those of the embedding and of the layers before do not exist yet.
    "new gradients": (
        replace(BF16, **ALONE),
        LAST,
        94 * MIB + BETWEEN + 2 * HEAD - 2 * HEAD - (TRAINED - 2 * 2 * HEAD) * 2 / 3,
    ),
    "new gradients, first layer": (replace(BF16, **ALONE), FIRST, 90 * MIB + BETWEEN + 2 * HEAD - 2 * HEAD),
    "new gradients, tied head": (
        replace(BF16, **ALONE, shape=TIED),
        LAST,
        94 * MIB + BETWEEN - (TRAINED - 2 * HEAD) * 2 / 3,
    ),
    "new gradients, head": (
        replace(BF16, **ALONE),
        NONE,
        11 * MIB + HEAD_OF_SCORED + HEAD * (4 + 2) - TRAINED,
    ),
    "new gradients, none in the layers": (
        replace(BF16, **ALONE, shape=replace(SHAPE, **dict.fromkeys(SIZES, 2 * HEAD))),
        LAST,
        94 * MIB + BETWEEN + 2 * HEAD - 2 * HEAD,
    ),
    "new gradients of an adapter": (replace(ADAPTER, **ALONE), LAST, 94 * MIB + BETWEEN - 4 * 84 * 2 / 3),
    "new gradients, ZeRO-2": (with_zero2(replace(BF16, **ALONE)), LAST, 94 * MIB + BETWEEN + 2 * HEAD),
    "quantized": (replace(ADAPTER, quantised_bytes=0.5), LAST, 94 * MIB + BETWEEN + 2 * HIDDEN * INNER),
    "tied head": (
        replace(FLOAT32, shape=replace(TIED, parameters=10**8, trained=10**8, head=10**8 - WEIGHTS)),
        NONE,
        3 * 4 * (10**8 - WEIGHTS),
    ),
}


@pytest.mark.parametrize("name", MEASURED)
def test_what_a_micro_batch_of_measured_layers_holds(name: str) -> None:
    run, layers, expected = MEASURED[name]
    given: Any = layers
    assert replace(run, layers=given).parts()["activations"] == pytest.approx(expected + BESIDE, abs=0.5)


@pytest.mark.parametrize(
    ("run", "precision"),
    [
        (BF16, Precision(2, 2, False)),
        (FLOAT32, Precision(4, 4, False)),
        (AUTOCAST, Precision(4, 4, True)),
        (ADAPTER, Precision(2, 4, False)),
        (replace(ADAPTER, mixed_precision=True), Precision(2, 4, True)),
        (replace(ADAPTER, quantised_bytes=0.5), Precision(2, 2, False)),
        (with_zero2(AUTOCAST), Precision(2, 2, False)),  # DeepSpeed casts the weights
        (replace(AUTOCAST, layout=Sharding(8, 1, "fsdp2")), Precision(2, 2, False)),
    ],
)
def test_layers_are_measured_in_the_precision_and_the_rows_of_the_run(run: MemoryPlan, precision: Precision) -> None:
    layers: Any = Layers((1, 1, 1))
    replace(run, layers=layers)._micro_batch()
    replace(run, layers=layers, prompts=2)._micro_batch()
    replace(run, layers=layers)._layout_check()
    own, shared = RowSizes(ROWS, 0, TOKENS), RowSizes(ROWS, PROMPT, TOKENS - PROMPT, 2)
    check = RowSizes(COMPARED_ROWS, 0, TOKENS + 2 * EXTRA_PADDING)
    assert layers.asked == [(precision, own, True), (precision, shared, True), (precision, check, False)]


@pytest.mark.parametrize(
    ("run", "gradients"),
    [(BF16, TRAINED), (ADAPTER, 4 * 84), (with_zero2(BF16), 0)],
    ids=["full", "adapter", "ZeRO-2"],
)
def test_what_the_check_of_the_layout_holds_in_measured_layers(run: MemoryPlan, gradients: int) -> None:
    """Casts of earlier layers stay. No gradient exists yet."""
    tokens = COMPARED_ROWS * (TOKENS + 2 * EXTRA_PADDING)
    beside, between = 50 + tokens * IDS - gradients, tokens * HIDDEN * 2
    layers: Any = Layers((1, 1, 1), forward=100, casts=MIB)
    shared = replace(run, layers=layers, prompts=2)
    assert shared._layout_check() == (5 + 6 + 100) * MIB + between + beside
    layers = Layers((1, 1, 1), forward=1, casts=MIB)
    head = COMPARED_ROWS * (TOKENS - PROMPT) * TILE * 2 + tokens * HIDDEN * (4 + 4 + 4 * 2)
    assert replace(shared, layers=layers)._layout_check() == (5 + 6 + 7) * MIB + head + beside
