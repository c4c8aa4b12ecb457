"""Sampling for groups: each distinct prompt runs once, and a finished row costs nothing more.

    with decoding(model, Turn()):
        tokens = model.generate(input_ids=..., attention_mask=..., generation_config=...)

`generate` stays transformers' own: it merges the configuration and builds logits processors, stopping criteria and cache.
Only its loop is another, handed in through the public argument `custom_generate`. The tokens are those of the stock loop;
where that is not certain, this one declines before the first forward, and `generate` starts again without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import LogitsProcessorList
from transformers.generation import logits_process as processors
from transformers.generation.configuration_utils import GenerationMode

from grpo_recipes.generation.kv_cache import LAYERS, ROOM, Buffer
from grpo_recipes.generation.models import rotary_of_the_longest
from grpo_recipes.generation.processed import ProcessorComparison, each_built
from grpo_recipes.generation.recorder import Noted
from grpo_recipes.generation.sampling import drawn

ROW_WISE = {
    processors.EpsilonLogitsWarper, processors.EtaLogitsWarper, processors.ExponentialDecayLengthPenalty,
    processors.ForcedEOSTokenLogitsProcessor, processors.InfNanRemoveLogitsProcessor, processors.LogitNormalization,
    processors.MinLengthLogitsProcessor, processors.MinNewTokensLengthLogitsProcessor, processors.MinPLogitsWarper,
    processors.NoBadWordsLogitsProcessor, processors.NoRepeatNGramLogitsProcessor,
    processors.RepetitionPenaltyLogitsProcessor, processors.SequenceBiasLogitsProcessor,
    processors.SuppressTokensAtBeginLogitsProcessor, processors.SuppressTokensLogitsProcessor,
    processors.TemperatureLogitsWarper, processors.TopHLogitsWarper, processors.TopKLogitsWarper,
    processors.TopPLogitsWarper, processors.TypicalLogitsWarper,
}  # fmt: skip
"""Processors whose result for a row depends on that row alone: they are called on the rows that are left."""

CARRIED = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
"""The model inputs that this loop knows how to carry from token to token."""

DROPPED = {"assistant_model", "custom_generate", "streamer", "synced_gpus", "tokenizer"}
"""Arguments of `generate` that transformers hands on to no loop but its own."""


class Declined(Exception):
    """The reason why a call of `generate` is left to transformers' own loop."""


@dataclass
class Turn:
    """What a call of `generate` is asked for beyond its arguments, and what it notes."""

    same_stream: ClassVar[bool] = False
    """True in the exactness mode of the tests: the random numbers of finished rows are drawn too, as in the stock loop."""
    grouped: bool = True
    """Whether groups are decoded at all; otherwise transformers' own loop runs, and its log-probabilities are noted."""
    record_every: int = 0
    """Note the log-probabilities of the tokens of every so many rows, the first among them; 0 for none."""
    temperature: float = 1.0
    """What divides the logits in those log-probabilities. No other processor enters them, as none enters the loss."""
    together: bool = False
    """Run as many forwards as the rank with the longest completion: under ZeRO-3 each of them is a collective."""
    comparison: ProcessorComparison | None = None
    """Comparison of the processors with those of the user's settings; None if nothing is compared."""
    declined: str = ""
    """Why transformers' own loop ran; empty where this one did."""
    log_probs: Tensor | None = None
    """The noted log-probabilities, (scored rows, tokens), without meaning after a row's end. None if there are none."""

    def recorded_rows(self, size: int) -> list[int]:
        """Which of `size` rows are scored."""
        return list(range(0, size, self.record_every)) if self.record_every else []

    def decode(self, model: PreTrainedModel, input_ids: Tensor, **given: Any) -> Tensor:
        """The loop, as `generate` takes it in `custom_generate`. Raises `Declined`."""
        if reason := why_not(model, **given):
            raise Declined(reason)
        return Batch(self, model, input_ids, **given).run()

    def note(self, model: PreTrainedModel, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Transformers' own `generate`, with its log-probabilities noted."""
        prompts = kwargs.get("input_ids", args[0] if args else None)
        if not (self.record_every or self.comparison is not None) or not isinstance(prompts, Tensor):
            return stock(*args, **kwargs)
        noted = Noted(self.recorded_rows(len(prompts)), self.temperature, self.comparison)
        criteria = StoppingCriteriaList([*(kwargs.pop("stopping_criteria", None) or ()), noted])
        with noted.reading(model):
            output = stock(*args, stopping_criteria=criteria, **kwargs)
        self.log_probs = noted.log_probs if self.record_every else None
        return output


@contextmanager
def decoding(model: PreTrainedModel, turn: Turn | None, stopping: Sequence[StoppingCriteria] = ()) -> Iterator[None]:
    """While it lasts, `model.generate` does what `turn` asks (with None, as ever) and has the criteria of `stopping` too."""
    stock, own = model.generate, "generate" in vars(model)

    def generate(*args: Any, **kwargs: Any) -> Any:
        if stopping:
            kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), *stopping])
        if turn is None:
            return stock(*args, **kwargs)
        if turn.grouped:
            try:
                if own:
                    raise Declined("the model brings a `generate` of its own")
                if given := {name for name in DROPPED if kwargs.get(name) is not None}:
                    raise Declined(f"`generate` was called with {', '.join(sorted(given))}")
                with nullcontext() if turn.comparison is None else each_built(model, turn.comparison.start):
                    return stock(*args, custom_generate=turn.decode, **kwargs)
            except Declined as reason:
                turn.declined = str(reason)
        return stock(*args, **kwargs) if own else turn.note(model, stock, *args, **kwargs)

    model.generate = generate
    try:
        yield
    finally:
        if own:
            model.generate = stock
        else:
            del model.generate


def why_not(
    model: PreTrainedModel, stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig, **inputs: Any
) -> str:
    """Why transformers' own loop has to generate, as a phrase; empty if nothing speaks against this one."""
    config, mode, mask = generation_config, generation_config.get_generation_mode(), inputs.get("attention_mask")
    cache: Any = inputs.get("past_key_values")
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        return f"the generation mode is {mode.value}"
    if model.config.is_encoder_decoder:
        return "the model has an encoder"
    if model.config.get_text_config() is not model.config:
        return "the model is multimodal"
    if rotary := rotary_of_the_longest(model.config):
        return f"a rotary table of type {rotary} depends on the longest row of the batch"
    if unknown := sorted(name for name in inputs.keys() - CARRIED - {"logits_processor"} if inputs[name] is not None):
        return f"the model takes {', '.join(unknown)}"
    if config.return_dict_in_generate:
        return "return_dict_in_generate asks for more than tokens"
    if config.prefill_chunk_size is not None:
        return "prefill_chunk_size asks for prompts in chunks"
    if not inputs.get("use_cache"):
        return "use_cache is false"
    if type(cache) is not DynamicCache or cache.get_seq_length() or cache.offloading or not cache.layers:
        return f"the cache is a {type(cache).__name__}, not an empty DynamicCache on the model's device"
    if odd := {type(layer).__name__ for layer in cache.layers if type(layer) not in LAYERS}:
        return f"the cache has layers of {', '.join(sorted(odd))}"
    if stopping_criteria.max_length is None or not any(hasattr(item, "eos_token_id") for item in stopping_criteria):
        return "no maximum length, or no end-of-sequence token, is set"
    if mask is not None and (mask[:, 1:] < mask[:, :-1]).any():
        return "the attention mask has holes, or padding on the right"
    return ""


def decode_step(model: PreTrainedModel, tokens: Tensor, cache: DynamicCache, **inputs: Any) -> Tensor:
    """Run `tokens` (rows, length) on top of `cache`; the logits of the last of them, (rows, vocabulary), in float32."""
    prepared = model.prepare_inputs_for_generation(
        tokens, next_sequence_length=tokens.shape[1], past_key_values=cache, use_cache=True, **inputs
    )
    return model(**prepared, return_dict=True).logits[:, -1].float()


class Batch:
    """One call of `generate`. Tokens keep all rows, as criteria see them; logits and cache have only those that go on."""

    def __init__(
        self,
        turn: Turn,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> None:
        self.turn, self.model, self.processors, self.criteria = turn, model, logits_processor, stopping_criteria
        self.samples, self.cache = generation_config.do_sample, inputs["past_key_values"]
        self.keep = {name: inputs[name] for name in ("logits_to_keep",) if name in inputs}
        self.size, self.width = input_ids.shape  # of the prompts
        room = stopping_criteria.max_length - self.width
        self.ids = torch.cat([input_ids, generation_config._pad_token_tensor.expand(self.size, room)], 1)
        self.end = self.width  # columns with tokens in them; to their right is padding
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        self.mask: Any = None if mask is None else torch.cat([mask, mask.new_ones(self.size, room)], 1)
        self.starts = [0] * self.size if mask is None else (self.width - mask.sum(1)).tolist()  # of padding, by row
        self.first = 0  # columns that have been cut: the cache knows nothing of them any more
        self.positions = None if positions is None else positions.expand(self.size, -1)
        self.live = list(range(self.size))  # which row each row of logits and cache is; out of order once one has left
        self.index = torch.arange(self.size, device=input_ids.device)  # the same, where the rows are
        self.unfinished = torch.ones(self.size, dtype=torch.bool, device=input_ids.device)
        self.row_wise = all(
            type(processor) in ROW_WISE and not isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)
            for processor in logits_processor
        )
        self.scored = {row: place for place, row in enumerate(turn.recorded_rows(self.size))}
        self.log_probs = torch.zeros(len(self.scored), room, dtype=torch.float32, device=input_ids.device)
        self.compared = set() if turn.comparison is None else set(turn.comparison.rows)

    def run(self) -> Tensor:
        """Prompts and completions of all rows, (rows, columns), padded on the right after a row's end."""
        logits = self.prefill()
        with self.model._optimize_model_for_decode():
            going = self.append(self.choose(logits))
            while self.model._has_unfinished_sequences(not going, self.turn.together, self.ids.device):
                if going:
                    self.cut_padding()
                    going = self.append(self.choose(self.decode()))
                else:  # other ranks go on
                    decode_step(self.model, self.ids[:1, -1:], DynamicCache(config=self.model.config))
        if self.scored:
            self.turn.log_probs = self.log_probs[:, : self.end - self.width]
        return self.ids[:, : self.end]

    def prefill(self) -> Tensor:
        """Run each distinct prompt once, and give every row a copy of its keys, values and logits."""
        prompts = self.ids[:, : self.width]
        # Padding is told from a prompt's own tokens by the mask: pad and end may be the same token.
        keys = prompts if self.mask is None else torch.cat([prompts, self.mask[:, : self.width]], 1)
        seen: dict[bytes, int] = {}
        number = [seen.setdefault(key.tobytes(), len(seen)) for key in keys.cpu().numpy()]
        first = [number.index(distinct) for distinct in range(len(seen))]
        logits = decode_step(
            self.model,
            prompts[first],
            self.cache,
            attention_mask=None if self.mask is None else self.mask[first, : self.width],
            position_ids=None if self.positions is None else self.positions[first],
            is_first_iteration=True,
            **self.keep,
        )
        rows = torch.tensor(number, device=logits.device)
        for index, layer in enumerate(self.cache.layers):
            if layer.is_initialized:  # a layer that uses another's keys and values has none
                room = min(self.ids.shape[1] - self.width, ROOM)
                self.cache.layers[index] = LAYERS[type(layer)](layer, rows, room)
        self.buffers = [layer for layer in self.cache.layers if isinstance(layer, Buffer)]
        return logits[rows]

    def choose(self, logits: Tensor) -> Tensor:
        """The next token of each row that is left, (rows,)."""
        places = [place for place, row in enumerate(self.live) if row in self.scored]
        # Before the processors, which may write to the logits.
        log_probs = (logits[places] / self.turn.temperature).log_softmax(-1) if places else None
        compared = [place for place, row in enumerate(self.live) if row in self.compared]
        before = logits[compared]
        scores = self.process(logits)
        tokens = self.pick(scores)
        if self.turn.comparison is not None and compared:
            rows = [self.live[place] for place in compared]
            self.turn.comparison.compare(rows, self.ids[rows, : self.end], before, scores[compared], tokens[compared])
        if log_probs is not None:
            rows = [self.scored[self.live[place]] for place in places]
            self.log_probs[rows, self.end - self.width] = log_probs.gather(1, tokens[places, None])[:, 0]
        return tokens

    def process(self, logits: Tensor) -> Tensor:
        """The scores that transformers' processors make of the logits, on all rows if one may look beyond its row."""
        if self.row_wise or len(self.live) == self.size:
            return self.processors(self.ids[self.index, : self.end], logits)
        wide = logits.new_zeros(self.size, logits.shape[1]).index_copy(0, self.index, logits)
        return self.processors(self.ids[:, : self.end], wide)[self.index]

    def pick(self, scores: Tensor) -> Tensor:
        """One token of each row, as the stock loop picks it."""
        if not self.samples:
            return scores.argmax(-1)
        if not self.turn.same_stream:
            return drawn(scores.softmax(-1))
        noise = torch.empty(self.size, scores.shape[1], device=scores.device).exponential_(1)  # as multinomial does
        return (scores.softmax(-1) / noise[self.index]).argmax(-1)

    def append(self, tokens: Tensor) -> bool:
        """Append a token to each row that is left, and let go of those that it finishes; whether any goes on."""
        self.ids[self.index, self.end] = tokens
        self.end += 1
        self.unfinished &= ~self.criteria(self.ids[:, : self.end], None)
        going = self.unfinished[self.index].tolist()  # waits for the device, as the stock loop does here
        if any(going) and not all(going):
            self.leave(going)
        return any(going)

    def leave(self, going: list[bool]) -> None:
        """Take finished rows out of the batch. The last rows move to their places, so that little is copied."""
        count = sum(going)
        holes = [place for place in range(count) if not going[place]]
        movers = [place for place in range(count, len(going)) if going[place]]
        for hole, mover in zip(holes, movers, strict=True):
            self.live[hole] = self.live[mover]
        del self.live[count:]
        self.index = torch.tensor(self.live, device=self.index.device)
        for layer in self.buffers:
            layer.keep(holes, movers, count)

    def cut_padding(self) -> None:
        """Cut the columns that are padding in every row that is left."""
        spare = min(self.starts[row] for row in self.live) - self.first
        if spare > 0:
            self.first += spare
            for layer in self.buffers:
                layer.cut(spare)

    def decode(self) -> Tensor:
        """Logits after the last token of each row that is left, (rows, vocabulary)."""
        mask, positions = None, None
        if any(self.starts[row] > self.first for row in self.live):
            mask = self.mask[self.index, self.first : self.end]
        if self.positions is not None:  # a row's own: they count no padding
            positions = self.positions[self.index, -1:] + (self.end - self.width)
        return decode_step(
            self.model,
            self.ids[self.index, self.end - 1 : self.end],
            self.cache,
            attention_mask=mask,
            position_ids=positions,
            **self.keep,
        )
