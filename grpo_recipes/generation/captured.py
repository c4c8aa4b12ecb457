"""Decoding steps that a GPU replays, instead of launching each of their kernels again for every token.

At small batches a GPU finishes the kernels of a decoding step sooner than Python launches them. A captured step is one
launch. It needs tensors whose shapes and addresses stay the same:

- keys and values have a fixed number of columns, in transformers' `StaticLayer`,
- finished rows leave in a few sizes (64, 48, 32, 16, 8 of 64 rows), and a step is captured once per size,
- the device decides which rows have finished, and the host asks once per `READ_EVERY` tokens.

Tokens are those of `groups.py`: random numbers belong to rows and positions.

The capture itself has never run on a GPU. The tests replay recorded operators on a CPU instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import LongTensor, Tensor
from transformers.cache_utils import DummyLayer, StaticLayer
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.generation import logits_process as processors

from grpo_recipes.generation.groups import Batch, Turn, decode_step
from grpo_recipes.generation.kv_cache import Buffer, HybridBuffer, StateBuffer
from grpo_recipes.generation.rows import on_device
from grpo_recipes.generation.sampling import BLOCK, draw

if TYPE_CHECKING:
    from grpo_recipes.generation.models import CausalLM

READ_EVERY = 8
"""Number of tokens after which the host asks which rows have finished."""

SMALLEST = 8
"""Smallest number of rows for which a step is captured again."""

ON_THE_DEVICE = {
    processors.EpsilonLogitsWarper, processors.InfNanRemoveLogitsProcessor, processors.LogitNormalization,
    processors.MinPLogitsWarper, processors.TemperatureLogitsWarper, processors.TopKLogitsWarper,
    processors.TopPLogitsWarper, processors.TypicalLogitsWarper,
}  # fmt: skip
"""Processors that read nothing but logits, and make no tensors on the host."""

MASKED = {"eager", "sdpa"}
"""Implementations of attention that take a mask, which hides the columns that are still empty."""

Step = Callable[[], None]


def cuda_graph(step: Step, device: torch.device) -> Step:
    """Capture a step in a CUDA graph of a device, and return what replays it. The step has run before, but not now."""
    with torch.cuda.device(device):  # the process may use another one
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # A stream of this device: torch would take the one of its first capture, on whatever device that was.
            # Calls of other threads, such as a data loader that pins memory, do not spoil the capture.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                step()
        except BaseException:
            torch.cuda.set_stream(stream)  # torch stays on the stream of a capture that ends with an error
            raise
    return graph.replay


@dataclass
class CapturedTurn(Turn):
    """Request for one call of `generate` whose decoding steps are captured."""

    captured: bool = False
    """True if steps were captured."""
    not_captured: str = ""
    """Reason why each step was launched kernel by kernel, or ""."""
    failed: bool = False
    """True if a capture ended with an error."""

    def batch(self, model: CausalLM, input_ids: Tensor, **given: Any) -> Batch:
        """Return the loop of one call of `generate`."""
        return CapturedBatch(self, model, input_ids, **given)


class CapturedBatch(Batch):
    """One call of `generate` whose decoding steps are captured after the first token."""

    turn: CapturedTurn

    def go_on(self, going: bool) -> None:
        """Append tokens to the generating rows until all have finished. `going` is False if they have already."""
        self.turn.not_captured = self.reason_not_to_capture()
        if not going or self.turn.not_captured:
            super().go_on(going)
            return
        self.cut_padding()
        self.fix_cache()
        self.fix_rows()
        sizes, first = bucket_sizes(len(self.generating)), self.end
        while self.end < self.ids.shape[1]:
            self.append_tokens(min(READ_EVERY, self.ids.shape[1] - self.end))
            rows_going = self.going.tolist()  # waits for the device
            if not any(rows_going):
                break
            size = min(size for size in sizes if size >= sum(rows_going))
            if size < len(rows_going):
                self.drop(rows_going, size)
        self.end = first + int(self.used)

    def reason_not_to_capture(self) -> str:
        """Return why steps can't be captured, as a phrase, or ""."""
        if self.turn.together:
            return "the weights are sharded by ZeRO-3"
        if self.turn.same_stream:  # the exactness mode of the tests
            return "random numbers are drawn for all rows and tokens"
        if self.turn.comparison is not None:
            return "this batch compares what processors do on the host"
        if self.turn.kept is not None:
            return "keys and values are kept between the turns of a tool loop"
        steps = [item for item in self.processors if type(item) not in ON_THE_DEVICE]
        steps += [item for item in self.criteria if type(item) not in (EosTokenCriteria, MaxLengthCriteria)]
        if steps:
            return f"{', '.join(sorted({type(item).__name__ for item in steps}))} may need the host"
        if any(isinstance(layer, HybridBuffer) for layer in self.cache.layers):
            return "the model has layers with recurrent states beside keys and values"
        if not all(isinstance(layer, (Buffer, StateBuffer, DummyLayer)) for layer in self.cache.layers):
            return "the model has layers without keys and values of their own"
        if (attention := self.model.config._attn_implementation) not in MASKED:
            return f"attention of the implementation {attention} takes no mask"
        return ""

    def fix_cache(self) -> None:
        """Copy keys and values to layers with a column for each token that may follow.

        States stay where they are: each has its size from the start, and models write to it in place.
        """
        columns, filled = self.ids.shape[1] - self.first, self.end - 1 - self.first  # the last token has not run
        self.fixed: list[StaticLayer] = []
        for index, layer in enumerate(self.cache.layers):
            if not isinstance(layer, Buffer):
                continue
            fixed = StaticLayer(columns)
            fixed.lazy_initialization(layer.keys, layer.values)
            assert fixed.keys is not None
            assert fixed.values is not None
            start = filled - layer.keys.shape[2]  # above 0 if a window has left the first columns behind
            fixed.keys[:, :, start:filled] = layer.keys
            fixed.values[:, :, start:filled] = layer.values
            fixed.cumulative_length.fill_(filled)
            self.fixed.append(fixed)
            self.cache.layers[index] = fixed
        self.buffers.clear()

    def fix_rows(self) -> None:
        """Make the tensors that a step reads and writes: what it changes, it changes in place."""
        device = self.ids.device
        self.going = torch.ones_like(self.index, dtype=torch.bool)
        """True for rows that have not finished, (rows,)."""
        self.column = torch.tensor([self.end], device=device)  # as an index, a tensor without a dimension is waited for
        """Column of the next token, (1,)."""
        self.used = torch.tensor(0, device=device)
        """Number of tokens that any row needed, ()."""
        self.last = self.ids[self.index, self.end - 1 : self.end]
        """Last token of each row, (rows, 1)."""
        ends = [item.eos_token_id for item in self.criteria if isinstance(item, EosTokenCriteria)]
        self.ends = torch.cat(ends).to(device)
        self.place()

    def place(self) -> None:
        """Make the tensors that follow from which rows there are, and let the next step be captured anew."""
        padded = any(self.starts[row] > self.first for row in self.generating)
        self.seen = self.mask[self.index, self.first :] if padded else None
        self.next_positions = None
        if self.positions is not None:
            self.next_positions = self.positions[self.index, -1:] + (self.end - self.width)
        self.replay: Step | None = None
        self.is_warm = False

    def append_tokens(self, count: int) -> None:
        """Append `count` tokens to each row: padding to those that have finished."""
        for _ in range(count):
            if self.uniforms is not None:
                self.uniforms.show(self.end - self.width)
            self.advance()
            self.end += 1

    def advance(self) -> None:
        """Run a step: the first of its size as it is, which loads libraries, and the others captured."""
        if not self.is_warm:
            self.step()
            self.is_warm = True
            return
        if self.replay is None:
            self.replay = self.captured_step()
        self.replay()

    def captured_step(self) -> Step:
        """Return the replay of a captured step, or the step itself if it can't be captured."""
        if self.turn.not_captured:
            return self.step
        try:
            replay = cuda_graph(self.step, self.ids.device)
        except RuntimeError as error:  # a kernel that waits for the host, or memory that is not there
            self.turn.failed = True
            # torch ends a failed capture with an error of its own, after the one that made it fail.
            self.turn.not_captured = f"the capture failed ({str(error.__context__ or error).splitlines()[0]})"
            return self.step
        self.turn.captured = True
        return replay

    def step(self) -> None:
        """Append a token to each row. Everything that changes is a tensor, and nothing waits for the device."""
        logits = decode_step(
            self.model,
            self.last,
            attention_mask=self.seen,
            position_ids=self.next_positions,
            **{self.cache_name: self.cache},
            **self.keep,
        )
        places, token = self.recorded_places, self.column - self.width
        log_probs = (logits[places] / self.turn.temperature).log_softmax(-1) if len(places) else None
        scores = self.processors(cast(LongTensor, self.last), logits)
        chosen = self.pick_fixed(scores, token)
        if log_probs is not None:
            self.log_probs[self.recorded_rows, token] = log_probs.gather(1, chosen[places][:, None])[:, 0]
        chosen = torch.where(self.going, chosen, self.padding)
        self.ids[self.index, self.column] = chosen
        self.used += self.going.any()
        self.going &= ~(chosen[:, None] == self.ends).any(1)
        self.last.copy_(chosen[:, None])
        self.column += 1
        if self.next_positions is not None:
            self.next_positions += 1

    def pick_fixed(self, scores: Tensor, token: Tensor) -> Tensor:
        """Return one token of each row, (rows,), for the token with the number `token`, (1,)."""
        if self.uniforms is None:
            return scores.argmax(-1)
        numbers = self.uniforms.block.index_select(0, token % BLOCK)[0]
        return draw(scores.softmax(-1), numbers[self.index])

    def drop(self, going: list[bool], size: int) -> None:
        """Keep `size` rows: those in `going`, and finished ones in the places that are left."""
        holes = [place for place in range(size) if not going[place]]
        movers = [place for place in range(size, len(going)) if going[place]]
        kept = list(range(size))
        for hole, mover in zip(holes, movers, strict=False):
            kept[hole] = mover
        self.generating = [self.generating[place] for place in kept]
        self.index = on_device(torch.tensor(self.generating), self.index.device)
        order = on_device(torch.tensor(kept), self.index.device)
        self.going, self.last = self.going[order], self.last[order]
        for states in self.states:
            states.keep_states(holes[: len(movers)], movers, size)
        for layer in self.fixed:
            assert layer.keys is not None
            assert layer.values is not None
            for hole, mover in zip(holes, movers, strict=False):
                layer.keys[hole], layer.values[hole] = layer.keys[mover], layer.values[mover]
            layer.keys, layer.values = layer.keys[:size], layer.values[:size]
        self.find_recorded()
        self.place()


def bucket_sizes(rows: int) -> list[int]:
    """Return the numbers of rows that a step is captured for, beginning with `rows`."""
    sizes, share = [rows * 3 // 4], rows // 2
    while share >= SMALLEST:
        sizes.append(share)
        share //= 2
    return [rows, *(size for size in sizes if size >= SMALLEST)]
