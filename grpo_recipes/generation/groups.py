"""Group decoding: each distinct prompt runs once, and a finished row costs nothing more.

    with decoding(model, Turn()):
        tokens = model.generate(input_ids=..., attention_mask=..., generation_config=...)

`generate` stays transformers' own: it merges the configuration and builds logits processors, stopping criteria and
cache. Only its loop is replaced, through the public argument `custom_generate`. The tokens are those of the stock loop.
If that is not certain, this loop declines, before the first forward if it can, and `generate` starts again without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import LongTensor, Tensor
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer
from transformers.generation import LogitsProcessorList
from transformers.generation import logits_process as processors
from transformers.generation.configuration_utils import GenerationMode

from grpo_recipes.generation.kept_cache import KeptCache, Prefix, aligned, split_by_width
from grpo_recipes.generation.kv_cache import LAYERS, ROOM, Buffer, FullBuffer, StateBuffer, is_supported, is_unused
from grpo_recipes.generation.models import CACHES, kept_scores, method_replaced, rotary_of_the_longest
from grpo_recipes.generation.recorder import Recorder
from grpo_recipes.generation.rows import on_device
from grpo_recipes.generation.sampling import Uniforms, draw
from grpo_rewards.attention import without_cudnn_attention

if TYPE_CHECKING:
    from grpo_recipes.generation.models import CausalLM

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
"""Processors whose result for a row depends on that row alone: they run on the rows that are still generating."""

CARRIED = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", *CACHES}
"""Model inputs that this loop can carry from token to token."""


class Declined(Exception):
    """Reason why a call of `generate` is left to transformers' own loop."""


@dataclass
class Turn:
    """Request for one call of `generate` beyond its arguments, and what was recorded of it."""

    same_stream: ClassVar[bool] = False
    """True in the exactness mode of the tests: random numbers are drawn for finished rows too, as in the stock loop."""
    grouped: bool = True
    """True to decode groups. False to let transformers' own loop run, and record its log-probabilities."""
    record_every: int = 0
    """Interval of the rows whose log-probabilities are recorded, the first row among them, or 0 for none."""
    temperature: float = 1.0
    """Divisor of the logits in these log-probabilities. No other processor enters them, as none enters the loss."""
    together: bool = False
    """True to run as many forwards as the rank with the longest completion: under ZeRO-3 each is a collective."""
    kept: KeptCache | None = None
    """Keys and values of earlier turns, or None to keep none."""
    reused: bool = False
    """True if kept keys and values were used."""
    not_kept: str = ""
    """Reason why the keys and values of this turn are not kept, or ""."""
    declined: str = ""
    """Reason why transformers' own loop ran, or ""."""
    log_probs: Tensor | None = None
    """Recorded log-probabilities (recorded rows, tokens), without meaning after a row's end, or None."""

    def recorded_rows(self, size: int) -> list[int]:
        """Return the indices of the rows, out of `size`, whose log-probabilities are recorded."""
        return list(range(0, size, self.record_every)) if self.record_every else []

    def decode(self, model: CausalLM, input_ids: Tensor, **given: Any) -> Tensor:
        """Run the loop, as `generate` calls its `custom_generate`.

        Raises:
            Declined: the tokens might not be those of the stock loop.
        """
        if reason := reason_to_decline(model, **given):
            raise Declined(reason)
        return Batch(self, model, input_ids, **given).run()

    def record(self, model: CausalLM, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run transformers' own `generate`, and record its log-probabilities."""
        prompts = kwargs.get("input_ids", args[0] if args else None)
        if not self.record_every or not isinstance(prompts, Tensor):
            return stock(*args, **kwargs)
        recorder = Recorder(self.recorded_rows(len(prompts)), self.temperature)
        criteria = StoppingCriteriaList([*(kwargs.pop("stopping_criteria", None) or ()), recorder])
        with recorder.reading(model):
            output = stock(*args, stopping_criteria=criteria, **kwargs)
        self.log_probs = recorder.log_probs
        return output


@contextmanager
def decoding(model: CausalLM, turn: Turn | None, stopping: Sequence[StoppingCriteria] = ()) -> Iterator[None]:
    """Let `model.generate` inside this block do what `turn` requests, with the criteria of `stopping` added.

    Without a turn, `generate` is transformers' own, with these criteria.
    """
    stock: Callable[..., Any] = model.generate
    own = "generate" in vars(model)

    def generate(*args: Any, **kwargs: Any) -> Any:
        if stopping:
            kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), *stopping])
        if turn is None:
            return stock(*args, **kwargs)
        if turn.grouped:
            try:
                if own:
                    raise Declined("the model brings a `generate` of its own")
                return stock(*args, custom_generate=turn.decode, **kwargs)
            except Declined as reason:
                turn.declined = str(reason)
        # A `generate` of the model's own need not run one forward per token, nor accept a criterion.
        return stock(*args, **kwargs) if own else turn.record(model, stock, *args, **kwargs)

    with method_replaced(model, "generate", generate), without_cudnn_attention():  # each token has shapes of its own
        yield


def reason_to_decline(
    model: CausalLM, stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig, **inputs: Any
) -> str:
    """Return why transformers' own loop has to generate, as a phrase, or "" if this loop may."""
    config, mode, mask = generation_config, generation_config.get_generation_mode(), inputs.get("attention_mask")
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        return f"the generation mode is {mode.value}"
    if model.config.is_encoder_decoder:
        return "the model has an encoder"
    if model.config.get_text_config() is not model.config or any("vision" in part for part in model.config.sub_configs):
        return "the model is multimodal"
    if rotary := rotary_of_the_longest(model.config):
        return f"a rotary table of type {rotary} depends on the longest row of the batch"
    if unknown := sorted(name for name in inputs.keys() - CARRIED - {"logits_processor"} if inputs[name] is not None):
        return f"the model takes {', '.join(unknown)}"
    if config.prefill_chunk_size is not None:
        return "prefill_chunk_size asks for prompts in chunks"
    if not inputs.get("use_cache"):
        return "use_cache is false"
    if reason := _unfit_cache(inputs.get(_cache_name(inputs))):
        return reason
    if stopping_criteria.max_length is None or not any(hasattr(item, "eos_token_id") for item in stopping_criteria):
        return "no maximum length, or no end-of-sequence token, is set"
    setting, number = kept_scores(model.config)
    if stopping_criteria.max_length > number:
        return f"attention keeps the {number} highest scores ({setting}), and padding decides between equal ones"
    if mask is not None and (mask[:, 1:] < mask[:, :-1]).any():
        return "the attention mask has holes, or padding on the right"
    return ""


def _cache_name(inputs: Mapping[str, Any]) -> str:
    """Return the name of the cache among a model's inputs."""
    return next((name for name in CACHES if inputs.get(name) is not None), CACHES[-1])


def _unfit_cache(cache: Any) -> str:
    """Return why a cache cannot lose rows in place, as a phrase, or "" if it can."""
    if type(cache) is not DynamicCache or cache.offloading or not cache.layers or not all(map(is_unused, cache.layers)):
        return f"the cache is a {type(cache).__name__}, not an empty DynamicCache on the model's device"
    if odd := {type(layer).__name__ for layer in cache.layers if not is_supported(layer)}:
        return f"the cache has layers of {', '.join(sorted(odd))}"
    return ""


def decode_step(model: CausalLM, tokens: Tensor, **inputs: Any) -> Tensor:
    """Run `tokens` (rows, length) on top of a cache. Return the last logits (rows, vocabulary) in float32.

    Args:
        model: the model.
        tokens: token IDs.
        inputs: other inputs of the model, the cache among them.
    """
    # Transformers annotates token IDs as `LongTensor`, which no operation of torch is declared to return.
    prepared = model.prepare_inputs_for_generation(
        cast(LongTensor, tokens), next_sequence_length=tokens.shape[1], use_cache=True, **inputs
    )
    return model(**prepared, return_dict=True).logits[:, -1].float()


class Batch:
    """One call of `generate`.

    Token IDs keep all rows, as stopping criteria expect them. Logits and cache have only generating rows.
    """

    def __init__(
        self,
        turn: Turn,
        model: CausalLM,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> None:
        self.turn, self.model, self.processors, self.criteria = turn, model, logits_processor, stopping_criteria
        self.cache_name = _cache_name(inputs)
        self.samples, self.cache = generation_config.do_sample, inputs[self.cache_name]
        self.keep = {name: inputs[name] for name in ("logits_to_keep",) if name in inputs}
        self.size, self.width = input_ids.shape  # rows, and columns of the prompts
        # `reason_to_decline` has checked the first, and `generate` has filled in the second.
        assert stopping_criteria.max_length is not None
        assert generation_config._pad_token_tensor is not None
        self.padding = generation_config._pad_token_tensor
        room = stopping_criteria.max_length - self.width
        self.ids = torch.cat([input_ids, self.padding.expand(self.size, room)], 1)
        self.end = self.width  # number of columns with tokens in them; padding follows
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        self.mask: Any = None if mask is None else torch.cat([mask, mask.new_ones(self.size, room)], 1)
        self.starts = [0] * self.size if mask is None else (self.width - mask.sum(1)).tolist()  # padding of each row
        self.first = 0  # number of columns that were cut from the cache
        self.positions = None if positions is None else positions.expand(self.size, -1)
        # Row of the batch that each row of logits and cache belongs to. Out of order once a row has finished.
        self.generating = list(range(self.size))
        self.index = torch.arange(self.size, device=input_ids.device)  # `generating` on the device
        self.row_wise = all(map(_is_row_wise, logits_processor))
        self.recorded = {row: place for place, row in enumerate(turn.recorded_rows(self.size))}
        self.log_probs = torch.zeros(len(self.recorded), room, dtype=torch.float32, device=input_ids.device)
        self.find_recorded()
        self.uniforms: Uniforms | None = None

    def run(self) -> Tensor:
        """Return prompts and completions of all rows, (rows, columns), padded on the right after a row's end.

        Raises:
            Declined: the model keeps something outside of its cache.
        """
        logits = self.prefill()
        if self.samples and not self.turn.same_stream:
            # Not earlier: where the prompts decide to decline, the stock loop must find the generator untouched.
            self.uniforms = Uniforms(self.size, self.ids.device)
        with self.model._optimize_model_for_decode():
            self.go_on(self.append(self.choose(logits)))
        if self.recorded:
            self.turn.log_probs = self.log_probs[:, : self.end - self.width]
        return self.ids[:, : self.end]

    def go_on(self, going: bool) -> None:
        """Append tokens to the generating rows until all have finished. `going` is False if they have already."""
        while self.model._has_unfinished_sequences(not going, self.turn.together, self.ids.device):
            if going:
                self.cut_padding()
                going = self.append(self.choose(self.decode()))
            else:  # other ranks go on, and a forward is a collective
                empty = DynamicCache(config=self.model.config)
                decode_step(self.model, self.ids[:1, -1:], **{self.cache_name: empty})

    def prefill(self) -> Tensor:
        """Run the new tokens of each distinct prompt, and give every row a copy of its keys, values and logits."""
        prompts = self.ids[:, : self.width]
        # The mask is part of the key: pad and end may be the same token, and then the IDs do not show what is padding.
        keys = prompts if self.mask is None else torch.cat([prompts, self.mask[:, : self.width]], 1)
        host_keys = keys.cpu().numpy()
        numbers: dict[bytes, int] = {}  # number of each distinct prompt
        copied = [numbers.setdefault(key.tobytes(), len(numbers)) for key in host_keys]
        distinct = [copied.index(number) for number in range(len(numbers))]  # first row of each prompt
        kept = self.take_kept({row: host_keys[row, self.starts[row] : self.width].tolist() for row in distinct})
        # Each forward is a collective under ZeRO-3, and ranks may keep different rows.
        rectangles = [distinct] if self.turn.together or not kept else split_by_width(self.new_tokens(distinct, kept))
        caches = [self.cache, *(DynamicCache() for _ in rectangles[1:])]  # nothing is kept of layers of other kinds
        pairs = zip(rectangles, caches, strict=True)
        logits = torch.cat([self.run_prompts(rectangle, kept, cache) for rectangle, cache in pairs])
        order = [row for rectangle in rectangles for row in rectangle]
        rows = on_device(torch.tensor([order.index(distinct[number]) for number in copied]), logits.device)
        if reason := self.reason_in_the_cache():
            raise Declined(reason)
        for index, layer in enumerate(self.cache.layers):
            if not is_unused(layer):  # a layer that uses another's keys and values has none
                for cache in caches[1:]:
                    layer.keys = torch.cat([layer.keys, cache.layers[index].keys])
                    layer.values = torch.cat([layer.values, cache.layers[index].values])
                room = min(self.ids.shape[1] - self.width, ROOM)
                self.cache.layers[index] = LAYERS[type(layer)](layer, rows, room)
        self.buffers = [layer for layer in self.cache.layers if isinstance(layer, Buffer)]
        self.states = [layer for layer in self.cache.layers if isinstance(layer, StateBuffer)]
        self.turn.not_kept = self.reason_not_to_keep()
        return logits[rows]

    def reason_in_the_cache(self) -> str:
        """Return why the cache, after the prompts have run, is not all that tokens depend on, as a phrase, or ""."""
        # Only a forward shows these.
        used = [layer for layer in self.cache.layers if not is_unused(layer)]
        if not used:
            return "the model runs without a cache"
        if any(isinstance(layer, LinearAttentionLayer) and is_unused(layer) for layer in self.cache.layers):
            # Recurrent Gemma's are attributes of its modules. Their rows could be neither repeated nor dropped.
            return "the model keeps its recurrent states outside of its cache"
        if any(isinstance(layer, CacheLayerMixin) and layer.get_seq_length() != self.width for layer in used):
            return "the model adds columns of its own to the cache"  # CPM-Ant does
        return ""

    def take_kept(self, prompts: dict[int, list[int]]) -> dict[int, Prefix]:
        """Return the kept prefixes of prompts without padding, by row."""
        return {} if self.turn.kept is None else self.turn.kept.take(prompts)

    def new_tokens(self, rows: list[int], kept: Mapping[int, Prefix]) -> dict[int, int]:
        """Return the number of tokens of each prompt that have to run, by row."""
        new = {}
        for row in rows:
            new[row] = self.width - self.starts[row] - (kept[row].tokens if row in kept else 0)
        return new

    def run_prompts(self, rows: list[int], kept: dict[int, Prefix], cache: DynamicCache) -> Tensor:
        """Run the new tokens of the prompts of `rows`, and fill `cache`. Return the last logits (rows, vocabulary)."""
        # Rows with fewer new tokens than the others run some of their kept tokens again.
        columns = self.width - max(self.new_tokens(rows, kept).values())
        if kept.keys().isdisjoint(rows):
            columns = 0  # padding of all rows
        if columns:
            self.fill(cache, columns, rows, kept)
        index = on_device(torch.tensor(rows), self.ids.device)
        return decode_step(
            self.model,
            self.ids[index, columns : self.width],
            attention_mask=None if self.mask is None else self.mask[index, : self.width],
            position_ids=None if self.positions is None else self.positions[index, columns:],
            is_first_iteration=True,
            **{self.cache_name: cache},
            **self.keep,
        )

    def fill(self, cache: DynamicCache, columns: int, rows: list[int], kept: dict[int, Prefix]) -> None:
        """Move kept keys and values of `rows` to the first columns of an empty cache."""
        prefixes = [kept.pop(row, None) for row in rows]  # freed before the forward
        found = aligned(prefixes, [self.starts[row] for row in rows], columns)
        for index, (keys, values) in enumerate(found):
            cache.update(keys, values, index)
        self.turn.reused = True

    def choose(self, logits: Tensor) -> Tensor:
        """Return the next token of each row that is still generating, (rows,), and record its log-probability."""
        recorded = self.recorded_places
        # Before the processors, which may write to the logits.
        log_probs = (logits[recorded] / self.turn.temperature).log_softmax(-1) if len(recorded) else None
        tokens = self.pick(self.process(logits))
        if log_probs is not None:
            chosen = log_probs.gather(1, tokens[recorded][:, None])[:, 0]
            self.log_probs[self.recorded_rows, self.end - self.width] = chosen
        return tokens

    def find_recorded(self) -> None:
        """Find the recorded rows among the generating ones, and their places, on the device."""
        found = [(place, self.recorded[row]) for place, row in enumerate(self.generating) if row in self.recorded]
        # Copied to the device when a row finishes, and not for each token.
        pairs = on_device(torch.tensor(found, dtype=torch.long).reshape(-1, 2), self.ids.device)
        self.recorded_places, self.recorded_rows = pairs.unbind(1)

    def process(self, logits: Tensor) -> Tensor:
        """Return the scores that transformers' processors make of the logits, (rows, vocabulary)."""
        if self.row_wise or len(self.generating) == self.size:
            return self.processors(cast(LongTensor, self.ids[self.index, : self.end]), logits)
        # A processor that may look beyond its row gets all rows, as in the stock loop.
        wide = logits.new_zeros(self.size, logits.shape[1]).index_copy(0, self.index, logits)
        return self.processors(cast(LongTensor, self.ids[:, : self.end]), wide)[self.index]

    def pick(self, scores: Tensor) -> Tensor:
        """Return one token of each row, (rows,), as the stock loop picks it."""
        if not self.samples:
            return scores.argmax(-1)
        if self.uniforms is not None:
            token = self.end - self.width
            self.uniforms.show(token)
            return draw(scores.softmax(-1), self.uniforms.of(token)[self.index])
        noise = torch.empty(self.size, scores.shape[1], device=scores.device).exponential_(1)  # as multinomial does
        return (scores.softmax(-1) / noise[self.index]).argmax(-1)

    def append(self, tokens: Tensor) -> bool:
        """Append a token to each generating row, and remove finished rows. Return True if any row goes on."""
        self.ids[self.index, self.end] = tokens
        self.end += 1
        ended = self.criteria(self.ids[:, : self.end], None)[self.index]
        going = (~ended).tolist()  # waits for the device, as the stock loop does here
        if self.turn.kept is not None and not self.turn.not_kept:
            self.keep_finished(going, self.turn.kept)
        if any(going) and not all(going):
            self.remove_finished(going)
        return any(going)

    def keep_finished(self, going: list[bool], kept: KeptCache) -> None:
        """Keep the keys and values of the finished rows that a later turn may begin with."""
        if all(going):
            return
        host_ids = self.ids[:, : self.end].cpu()  # one wait for all rows that have finished
        for place, row in enumerate(self.generating):
            if going[place]:
                continue
            tokens, length = host_ids[row, self.starts[row] :].tolist(), self.width - self.starts[row]
            if not kept.may_go_on(tokens[:length], tokens[length:]):
                continue
            padding = self.starts[row] - self.first
            layers = [(layer.keys[place, :, padding:], layer.values[place, :, padding:]) for layer in self.buffers]
            kept.keep(tokens[:-1], layers)  # the last token has not run

    def reason_not_to_keep(self) -> str:
        """Return why the keys and values of a finished row are not those of a prefix, as a phrase, or ""."""
        if self.states:
            return "the model has recurrent or convolution states, which cannot return to an earlier token"
        if self.positions is None:
            return "the model is not given the positions of its tokens"
        if not all(type(layer) is FullBuffer for layer in self.cache.layers):
            return "the model has layers with a sliding window, or layers without keys and values of their own"
        return ""

    def remove_finished(self, going: list[bool]) -> None:
        """Remove finished rows. The last rows move to their places, so that little is copied."""
        count = sum(going)
        holes = [place for place in range(count) if not going[place]]
        movers = [place for place in range(count, len(going)) if going[place]]
        for hole, mover in zip(holes, movers, strict=True):
            self.generating[hole] = self.generating[mover]
        del self.generating[count:]
        self.index = on_device(torch.tensor(self.generating), self.index.device)
        self.find_recorded()
        for layer in self.buffers:
            layer.keep(holes, movers, count)
        for states in self.states:
            states.keep_states(holes, movers, count)

    def cut_padding(self) -> None:
        """Cut the columns that are padding in every generating row."""
        if self.positions is None:  # the model may count its cache to find the position of a token, as BART does
            return
        spare = min(self.starts[row] for row in self.generating) - self.first
        if spare > 0:
            self.first += spare
            for layer in self.buffers:
                layer.cut(spare)

    def decode(self) -> Tensor:
        """Return the logits after the last token of each generating row, (rows, vocabulary)."""
        mask, positions = None, None
        # A mask of ones changes nothing, and attention without a mask is quicker.
        if any(self.starts[row] > self.first for row in self.generating):
            mask = self.mask[self.index, self.first : self.end]
        if self.positions is not None:  # a row's own positions do not count padding
            positions = self.positions[self.index, -1:] + (self.end - self.width)
        return decode_step(
            self.model,
            self.ids[self.index, self.end - 1 : self.end],
            attention_mask=mask,
            position_ids=positions,
            **{self.cache_name: self.cache},
            **self.keep,
        )


def _is_row_wise(processor: Any) -> bool:
    """Return True if the processor's result for a row depends on that row alone."""
    # A tensor of prompt lengths holds one entry for each row of the whole batch.
    holds_rows = isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)
    return type(processor) in ROW_WISE and not holds_rows
