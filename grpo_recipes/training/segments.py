"""A model call whose rows run in segments: each prompt once, and the completions in buckets of similar length.

Two layouts need it (`buckets.py` builds the segments). In the shared layout the distinct prompts are a segment of their
own, the prefixes, and completions run behind a cache of the prefixes' keys, values and recurrent states, through which
autograd differentiates. In the trimmed layout a segment is a bucket of rows of similar length, without any cache.

The cache of transformers lives for a whole forward. Layers write to it in place, gradient checkpointing drops it or
writes to it twice, and FSDP2 refuses a layer that is called twice. So all segments go through a decoder layer in one
call of the module (`_together`), with a cache that lives inside that call. Masks, positions and everything else that
the layers get is made by the model: its backbone runs once per segment, with a `_StandIn` in the place of each layer.
Each of these passes waits inside its last stand-in until the layers have run. Then it goes on with the real hidden
states.

Running all prefixes, and then all completions, in two forwards would need no stand-ins. But the cache of all layers
would be alive at once, and neither gradient checkpointing nor FSDP2 could be used.

Shapes: H hidden size, and rows and columns of a segment.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from grpo_recipes.generation.models import base_model, cache_argument, lists_of_layers
from grpo_recipes.generation.verified import FastWay

COUNTS_FROM_0 = frozenset({"bamba"})
"""Model types whose positions begin at 0 behind a cache too, unless they are given."""

DELTA_RULE_CHUNK = 32
"""Number of columns of a chunk of the gated delta rule on a CPU, half of transformers' default.

transformers pads each row to whole chunks, and most rows of a segment are about as long as a chunk.
"""


class NotSegmented(RuntimeError):
    """A model whose layers can't run segments together."""


@dataclass(frozen=True)
class Segment:
    """Rows that run together."""

    input_ids: Tensor
    """(rows, columns)."""
    attention_mask: Tensor
    """(rows, columns), behind prefixes (rows, columns of the prefixes + columns)."""
    owners: Tensor | None = None
    """Index of the prefix that each row continues, (rows,), or None for rows that continue none."""


class Segments:
    """Segments of a model call, passed through the model as the keyword argument `segments`.

    Not a dataclass, because FSDP2 in 16-bit precision rebuilds the dataclasses among the arguments of a module.

    Args:
        buckets: segments with labels.
        positions: position of each label in the concatenated rows of all buckets, (labels,).
        prefixes: prefixes that the buckets continue, or None.
    """

    def __init__(self, buckets: Sequence[Segment], positions: Tensor, prefixes: Segment | None = None) -> None:
        self.buckets, self.positions, self.prefixes = buckets, positions, prefixes

    def in_order(self) -> list[Segment]:
        """Return the segments in the order in which they run."""
        return [*([self.prefixes] if self.prefixes is not None else []), *self.buckets]


@dataclass(frozen=True)
class _LayerCall:
    """Arguments that the backbone passes to one decoder layer."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def takes(self, cache: Cache) -> bool:
        """Return True if the cache is among the arguments."""
        return any(value is cache for value in (*self.args, *self.kwargs.values()))

    def run(self, forward: Callable[..., Any], hidden: Tensor, given: Cache | None, cache: Cache | None) -> Tensor:
        """Return the layer's hidden states for `hidden`, with `cache` in the place of the backbone's `given`."""

        def real(value: Any) -> Any:
            return cache if given is not None and value is given else value

        args, kwargs = map(real, self.args), {name: real(value) for name, value in self.kwargs.items()}
        output = forward(hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output


class _StandIn(nn.Module):
    """Stand-in for a decoder layer that records its arguments and returns its hidden states, or those of `result`.

    Args:
        layer: decoder layer, whose attributes the backbone may read.
        calls: list to which the arguments are appended.
        size: length of the tuple that the layer returns, or 0 for a tensor.
        result: function that returns the hidden states behind this layer, or None for the hidden states as they are.
    """

    def __init__(
        self, layer: nn.Module, calls: list[_LayerCall], size: int, result: Callable[[], Tensor] | None
    ) -> None:
        super().__init__()
        # Past `nn.Module.__setattr__`, which would register the layer as a submodule.
        self.__dict__.update(layer=layer, calls=calls, size=size, result=result)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Record the arguments."""
        own = self.__dict__
        if args:
            hidden, *rest = args
        else:
            hidden, rest = kwargs.pop("hidden_states"), []
        if own["calls"] and hidden is not own["calls"][-1].hidden:
            # It would compute with the hidden states of the embedding, and its result would be lost.
            raise NotSegmented("the model computes between its layers")
        own["calls"].append(_LayerCall(hidden, tuple(rest), kwargs))
        if own["result"] is not None:
            hidden = own["result"]()
        return (hidden, *[None] * (own["size"] - 1)) if own["size"] else hidden


class SegmentedModels:
    """The `SegmentedModel` of each model."""

    def __init__(self) -> None:
        self._models: WeakKeyDictionary[nn.Module, SegmentedModel] = WeakKeyDictionary()

    def of(self, model: nn.Module) -> SegmentedModel:
        """Return the `SegmentedModel` of a model inside accelerate's wrappers."""
        if model not in self._models:
            self._models[model] = SegmentedModel(model)
        return self._models[model]


class SegmentedModel:
    """Causal language model whose backbone takes the keyword argument `segments`, inside `taking_segments`.

    Args:
        model: the model, inside accelerate's wrappers, with or without an adapter.
    """

    def __init__(self, model: nn.Module) -> None:
        base = base_model(model)
        self._backbone = cast(PreTrainedModel, base.base_model)
        self._config = base.config.get_text_config(decoder=True)
        self._cache_name = cache_argument(self._backbone)
        self._has_delta_rule = any(_has_delta_rule(module) for module in self._backbone.modules())
        self._place: tuple[nn.Module, str] | None = None
        """Module that holds the decoder layers, and the name of their list."""
        self._sizes: list[int] = []
        """Length of the tuple that each decoder layer returns, or 0 for a tensor."""
        # Nothing is logged here: the sentence about the layout has the reason.
        self.buckets = FastWay()
        """Rows in buckets, compared with rows that run together."""
        self.shared = FastWay()
        """Shared prompts of rows that do not fit into a packed row, of a model that is packed."""

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Find the decoder layers, and the form of what they return, in a forward inside this block."""
        length = getattr(self._config, "num_hidden_layers", None)
        candidates = lists_of_layers(self._backbone, length)
        returned: dict[int, list[int]] = {}
        handles = []
        for number, (module, name) in enumerate(candidates):
            returned[number] = []
            for layer in cast(nn.ModuleList, module._modules[name]):
                handles.append(layer.register_forward_hook(partial(_record_size, returned[number])))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for number, place in enumerate(candidates):
            # A model may hold other lists of this length, of which a text runs none (the layers of an image encoder).
            if len(returned[number]) == length:
                self._place, self._sizes = place, returned[number]
                return

    @contextmanager
    def taking_segments(self) -> Iterator[None]:
        """Let the backbone take `segments` inside this block, and return the hidden states of all labels."""
        if self._place is None:
            raise NotSegmented("the model has no list of decoder layers that run once each, in order")
        forward = self._backbone.forward

        def segmented(*_: Any, segments: Segments, **kwargs: Any) -> BaseModelOutputWithPast:
            for name in ("input_ids", "attention_mask", "use_cache", self._cache_name):
                kwargs.pop(name, None)
            if self._has_delta_rule and segments.positions.device.type == "cpu":
                kwargs["chunk_size"] = DELTA_RULE_CHUNK
            states = _SegmentedCall(self, partial(forward, **kwargs), segments).hidden_states()
            if segments.prefixes is not None:
                prefixes, *states = states
                if hasattr(next(self._backbone.parameters()), "ds_id"):  # ZeRO-3
                    # No label reads the prefixes, so here they get a gradient of 0. DeepSpeed gathers the weights of a
                    # module when a gradient of its output arrives. The mixer of a last recurrent layer would get only
                    # the gradients of its states, and find its weights released after the completions.
                    states.append(prefixes)
            joined = torch.cat([state.flatten(0, 1) for state in states])
            return BaseModelOutputWithPast(last_hidden_state=joined.index_select(0, segments.positions)[None])

        was_set = "forward" in vars(self._backbone)
        self._backbone.forward = segmented
        try:
            yield
        finally:
            if was_set:
                self._backbone.forward = forward
            else:
                del self._backbone.forward

    @property
    def layers(self) -> list[nn.Module]:
        """Decoder layers."""
        assert self._place is not None
        module, name = self._place
        return list(cast(nn.ModuleList, module._modules[name]))

    @contextmanager
    def replaced_layers(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Let the backbone run other layers inside this block, and leave checkpointing and the cache to them."""
        assert self._place is not None
        module, name = self._place
        before = module._modules[name]
        module._modules[name] = nn.ModuleList(layers)
        try:
            # Some backbones that checkpoint pass no cache to their layers.
            with _switched_off(_checkpointing(self._backbone, module)):
                yield
        finally:
            module._modules[name] = before


class _SegmentedCall:
    """One model call.

    Args:
        model: model that runs the segments.
        forward: forward of the backbone, without the arguments of a segment.
        segments: segments of the call.
    """

    def __init__(self, model: SegmentedModel, forward: Callable[..., Any], segments: Segments) -> None:
        self._model, self._forward, self._segments = model, forward, segments.in_order()
        self._layers = model.layers
        config, prefixes = model._config, segments.prefixes
        self._caches: list[Cache | None] = [None] * len(self._segments)
        """Cache that the backbone gets in each pass. It only makes masks and positions, and no layer sees it."""
        if prefixes is not None:
            # One each, because some backbones write positions to their cache.
            behind = [_cache_of_length(config, *prefixes.input_ids.shape) for _ in segments.buckets]
            self._caches = [DynamicCache(config=config), *behind]
        self._calls: list[list[_LayerCall]] = [[] for _ in self._segments]
        self._states: list[Tensor] = []
        """Hidden states behind the last layer, of each segment."""
        self._outputs: dict[int, Tensor] = {}

    def hidden_states(self) -> list[Tensor]:
        """Return the last hidden states of each segment, (rows, columns, H)."""
        self._pass(0)
        return [self._outputs[number] for number in range(len(self._segments))]

    def _pass(self, number: int) -> None:
        """Run the backbone on a segment, and all following segments and the layers inside its last layer."""
        stand_ins = []
        for place, layer in enumerate(self._layers):
            result = partial(self._result, number) if place + 1 == len(self._layers) else None
            stand_ins.append(_StandIn(layer, self._calls[number], self._model._sizes[place], result))
        segment, cache = self._segments[number], self._caches[number]
        given: dict[str, Any] = {self._model._cache_name: cache} if cache is not None else {}
        if segment.owners is not None:
            assert cache is not None
            self._continue_positions(cache, segment.owners)
            if self._model._config.model_type in COUNTS_FROM_0:
                before = cache.get_seq_length()
                columns = segment.input_ids.size(1)
                given["position_ids"] = torch.arange(before, before + columns, device=segment.input_ids.device)[None]
        with self._model.replaced_layers(stand_ins):
            output = self._forward(
                input_ids=segment.input_ids,
                attention_mask=segment.attention_mask,
                use_cache=cache is not None,
                **given,
            )
        self._outputs[number] = output[0]

    def _continue_positions(self, cache: Cache, owners: Tensor) -> None:
        """Copy the positions of the prefixes, which some backbones keep in their cache, for the rows of `owners`."""
        written = self._caches[0]
        assert written is not None
        for ours, theirs in zip(cache.layers, written.layers, strict=True):
            positions = getattr(theirs, "indexer_position_ids", None)
            if positions is not None:  # (position dimensions, prefixes, columns)
                vars(ours)["indexer_position_ids"] = positions.index_select(1, owners)

    def _result(self, number: int) -> Tensor:
        """Return the hidden states of a segment behind the last layer."""
        if number + 1 < len(self._segments):
            self._pass(number + 1)
        else:
            for calls, cache in zip(self._calls, self._caches, strict=True):
                if len(calls) != len(self._layers):
                    raise NotSegmented("the model does not run each of its layers once")
                if cache is not None and not any(call.takes(cache) for call in calls):
                    raise NotSegmented("the layers get no cache")
            self._states = [calls[0].hidden for calls in self._calls]
            for place, layer in enumerate(self._layers):
                self._states = self._together(layer, [calls[place] for calls in self._calls])
        return self._states[number]

    def _together(self, layer: nn.Module, calls: list[_LayerCall]) -> list[Tensor]:
        """Run a decoder layer on all segments, in one call of the module."""
        # Without transformers' checkpointing, which would drop the cache.
        forward = partial(inspect.unwrap(type(layer).forward), layer)
        checkpoints = _checkpointing(*layer.modules())
        numbers = {getattr(part, "layer_idx", None) for part in layer.modules()}
        count = len(self._layers)
        # Layers of the cache that this decoder layer reads and writes, or all of them where it does not name any.
        indices = [number for number in numbers if isinstance(number, int) and number < count] or list(range(count))
        # Not `self`, which holds the last hidden states: checkpointing keeps this function in their graph, and the
        # graph would never be freed, because no backward pass reaches the prompts' part of the last layer.
        caches, segments = self._caches, self._segments

        def run(*states: Tensor) -> tuple[Tensor, ...]:
            # Checkpointing calls this function again in the backward pass, so it changes nothing outside of itself.
            prefixes: Cache | None = None
            found = []
            with _switched_off(checkpoints):
                for call, state, given, segment in zip(calls, states, caches, segments, strict=True):
                    cache = None
                    if given is not None:
                        # The prefixes come first, and fill the cache that they begin without.
                        before = given if prefixes is None else prefixes
                        cache = _continuing(given, before, indices, segment.owners)
                        prefixes = cache if prefixes is None else prefixes
                    found.append(call.run(forward, state, given, cache))
            return tuple(found)

        def checkpointed(*states: Tensor) -> Any:
            if checkpoints and layer.training:
                return checkpoints[0]._gradient_checkpointing_func(run, *states)
            return run(*states)

        layer.forward = checkpointed
        try:
            return list(layer(*self._states))
        finally:
            del layer.forward


def _checkpointing(*modules: nn.Module) -> list[Any]:
    """Return the modules that use gradient checkpointing."""
    return [module for module in modules if getattr(module, "gradient_checkpointing", False)]


@contextmanager
def _switched_off(checkpoints: Sequence[Any]) -> Iterator[None]:
    """Let none of the modules use gradient checkpointing inside this block."""
    for part in checkpoints:
        part.gradient_checkpointing = False
    try:
        yield
    finally:
        for part in checkpoints:
            part.gradient_checkpointing = True


def _has_delta_rule(module: nn.Module) -> bool:
    """Return True if a module hands its keyword arguments to a gated delta rule that takes a `chunk_size`."""
    rule = getattr(sys.modules[type(module).__module__], "torch_chunk_gated_delta_rule", None)
    return rule is not None and "chunk_size" in inspect.signature(rule).parameters


def _record_size(sizes: list[int], module: nn.Module, args: Any, output: Any) -> None:
    """Append the length of the tuple that a module returns, or 0 for a tensor."""
    sizes.append(len(output) if isinstance(output, tuple) else 0)


# ---- Caches


def _cache_of_length(config: Any, rows: int, columns: int) -> DynamicCache:
    """Return a cache that says it holds `columns` tokens, and holds none."""
    cache = DynamicCache(config=config)
    # Without data: a layer that read these keys would fail, and not compute with them.
    nothing = torch.empty(rows, 1, columns, 1, device="meta")
    for layer in cache.layers:
        if isinstance(layer, CacheLayerMixin):
            layer.update(nothing, nothing)
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
    return cache


def _continuing(given: Cache, before: Cache, indices: Sequence[int], owners: Tensor | None) -> Cache:
    """Return a cache that a decoder layer may write to, behind the tokens that another cache holds.

    Args:
        given: cache that the backbone got, which stands for all other layers.
        before: empty cache, or the cache that the decoder layer has filled with the prefixes.
        indices: indices of the layers that the decoder layer writes to.
        owners: index of the prefix of each row, (rows,), or None for the prefixes themselves.
    """
    cache = copy.copy(given)
    cache.layers = list(given.layers)
    for index in indices:
        layer: Any = copy.copy(before.layers[index])
        for name, value in vars(layer).items():
            if isinstance(value, dict):  # states by their number
                setattr(layer, name, dict(value))
        if owners is not None:
            layer.reorder_cache(owners)
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                _keep_unchanged(layer)
        cache.layers[index] = layer
    return cache


def _keep_unchanged(layer: Any) -> None:
    """Let the layer return what it would hold after an update, and hold what it did before."""
    # transformers copies the new state into the tensor of the old one, which autograd has saved for the backward pass.

    # Not the layer: a function that holds it would keep its tensors alive until Python's garbage collector runs.
    before = layer.conv_states

    def update_conv_state(states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        return torch.cat([before[state_idx], states], dim=-1)

    def update_recurrent_state(states: Tensor, *_: Any, **__: Any) -> Tensor:
        return states

    layer.update_conv_state, layer.update_recurrent_state = update_conv_state, update_recurrent_state
