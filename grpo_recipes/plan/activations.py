"""Memory of a micro-batch, measured on tensors without data.

The model runs forward and backward on shapes alone, and the bytes of its tensors are counted from their creation to
their release. Only the first decoder layer of each kind runs. The others take and release as many bytes as that layer
did, so that the time hardly depends on the number of layers.

Kernels are transformers' own in PyTorch. Optional kernel packages (flash-linear-attention, causal-conv1d, mamba-ssm)
need less memory. Attention by SDPA and TRL's head are counted as a GPU computes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils import logging
from trl.kernels import chunked_divergence, chunked_logprob

from grpo_recipes.generation.models import base_model, method_replaced
from grpo_recipes.training import packed_attention
from grpo_recipes.training.layout_check import text_config
from grpo_recipes.training.packed_attention import AttentionSwitch, GroupSpans
from grpo_recipes.training.packing import Layout
from grpo_recipes.training.segments import Segment, SegmentedModel, Segments, lists_of_layers

_BLOCK = 512  # bytes of CUDA's smallest allocation
_DTYPES = {2: torch.bfloat16, 4: torch.float32}


class NotMeasured(RuntimeError):
    """A model that can't run on tensors without data."""


@dataclass(frozen=True)
class MicroBatch:
    """Micro-batch of a run.

    Attributes:
        rows: Number of completions.
        prompt: Tokens of a prompt.
        completion: Tokens of a completion.
        prompts: Number of distinct prompts, of which a layout that shares prompts runs each once.
        layout: Layout of the rows.
        weight_bytes: Bytes of a frozen weight, or of every weight in full fine-tuning.
        trained_bytes: Bytes of a trained weight.
        autocast: True if matrix products are computed in 16 bits by autocast.
        checkpointing: True if the layers are computed again in the backward pass.
        makes_gradients: True if all gradients are new and stay. Otherwise they are added to those of an earlier
            micro-batch, or leave the GPU one by one.
        full_kl: True if the KL term is that over the vocabulary.
        trains: False for a forward pass without gradients.
        caches: True if the forward pass fills a cache.
    """

    rows: int
    prompt: int
    completion: int
    prompts: int
    layout: Layout
    weight_bytes: int
    trained_bytes: int
    autocast: bool
    checkpointing: bool
    makes_gradients: bool = False
    full_kl: bool = False
    trains: bool = True
    caches: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens that run through the model, padding included."""
        if not self.layout.shares_prompts:
            return self.rows * (self.prompt + self.completion)
        # The last token of a prompt is computed once per completion, in place of the completion's own last token.
        return self.prompts * (self.prompt - 1) + self.rows * self.completion


@dataclass
class Activations:
    """Activations of a model, which are measured when they are asked for.

    Args:
        model: The model on the meta device, with or without an adapter. Its decoder layers are replaced.
    """

    model: nn.Module
    _layers: list[_Layer] | None = None
    _found: dict[MicroBatch, int] = field(default_factory=dict)
    _cached: dict[MicroBatch, int] = field(default_factory=dict)

    def measure(self, batch: MicroBatch) -> int:
        """Return the most bytes that a micro-batch holds, its new gradients included.

        Raises:
            NotMeasured: The model can't run on tensors without data.
        """
        if batch not in self._found:
            try:
                if self._layers is None:
                    self._layers = _replaced_layers(self.model)
                with FakeTensorMode(allow_non_fake_inputs=True), gpu_kernels(), _quiet():
                    run = _Run(self.model, self._layers, batch)
                    self._found[batch], self._cached[batch] = run.peak(), run.cached
            except Exception as error:  # the code of a model may need values, and raises any class then
                raise NotMeasured(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        return self._found[batch]

    def cache(self, batch: MicroBatch) -> int:
        """Return the bytes of the cache that a forward pass without gradients fills. Raise as `measure` does."""
        caching = replace(batch, caches=True)
        self.measure(caching)
        return self._cached[caching]


class _Meter(TorchDispatchMode):
    """Dispatch mode that counts the bytes of the storages created inside its block, except those of `known`."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count its results."""
        if func is torch.ops.prim.device.default:  # more calls than all others together
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // _BLOCK) * _BLOCK
        if key not in self._known:
            self._known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


# ---- Decoder layers


@dataclass(frozen=True)
class _LayerBytes:
    """Bytes of a decoder layer.

    Attributes:
        forward: Most bytes in the forward pass, without the layer's input.
        kept: Bytes kept for the backward pass, with the input if it is needed there.
        backward: Most bytes in the backward pass with those that are kept, without the gradients of the outputs.
        casts: Bytes of 16-bit copies of weights, which autocast keeps until the end of the forward pass.
        outputs: Shapes and dtypes of the hidden states behind the layer.
    """

    forward: int
    kept: int
    backward: int
    casts: int
    outputs: Sequence[tuple[torch.Size, torch.dtype]]


class _Kind:
    """Decoder layers of the same shapes.

    Args:
        layer: The first of these layers.
        number: Its position among the layers.
    """

    def __init__(self, layer: nn.Module, number: int) -> None:
        self.layer, self.number = layer, number
        self.size: int | None = None
        """Length of the tuple that a layer returns, 0 for a tensor, or None if none has run."""
        self.found: dict[Any, _LayerBytes] = {}

    def returned(self, states: Sequence[Tensor]) -> Any:
        """Return hidden states in the form of a layer's result."""
        return (states[0], *[None] * (self.size - 1)) if self.size else states[0]


class _Layer(nn.Module):
    """Stand-in for a decoder layer, which takes and releases the bytes of the layer.

    Args:
        kind: Kind of the layer.
    """

    def __init__(self, kind: _Kind) -> None:
        super().__init__()
        # Past `nn.Module.__setattr__`, which would register the layer as a submodule.
        self.__dict__.update(kind=kind, run=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["kind"].layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return hidden states without values."""
        kind, run = self.__dict__["kind"], self.__dict__["run"]
        if run is None:
            return super().__call__(*args, **kwargs)
        states = _hidden(args) or [kwargs["hidden_states"]]
        key = (states[0].dtype, torch.is_grad_enabled())
        if key not in kind.found:
            kind.found[key] = run.measured(self, states, args, kwargs)
        outputs = run.emulated(kind, kind.found[key], states)
        # A layer that gets all segments of a micro-batch (`segments.py`) returns the hidden states of each.
        return outputs if "forward" in vars(self) else kind.returned(outputs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer. Outside of a measurement, the layers behind the first of a kind pass their input on."""
        kind = self.__dict__["kind"]
        if self.__dict__["run"] is None and kind.size is not None:
            return kind.returned(_hidden(args) or [kwargs["hidden_states"]])
        output = kind.layer(*args, **kwargs)
        kind.size = len(output) if isinstance(output, tuple) else 0
        return output


class _Emulated(torch.autograd.Function):
    """Function that takes and releases the bytes of a decoder layer."""

    @staticmethod
    def forward(ctx: Any, run: _Run, kind: _Kind, sizes: _LayerBytes, *states: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.kind, ctx.sizes, ctx.kept = run, kind, sizes, None
        if run.batch.checkpointing:
            ctx.save_for_backward(*states)
        ctx.shapes = [(state.shape, state.dtype) for state in states]
        _bytes(max(sizes.forward, sizes.kept))
        if run.batch.checkpointing:
            run.held.append(_bytes(sizes.casts))
        else:
            ctx.kept = _bytes(sizes.kept)
        return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in sizes.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        run, sizes = ctx.run, ctx.sizes
        if ctx.kept is None:  # the layer is computed again
            _bytes(max(sizes.forward, sizes.backward))
        else:
            _bytes(sizes.backward - sizes.kept)
        ctx.kept = None
        if run.batch.makes_gradients:
            run.gradients.append(_bytes(_trained_bytes(ctx.kind.layer)))
        return (None, None, None, *[torch.empty(shape, dtype=dtype) for shape, dtype in ctx.shapes])


def _replaced_layers(model: nn.Module) -> list[_Layer]:
    """Replace the decoder layers of a model by stand-ins, and return these."""
    config = text_config(model)
    names = getattr(config, "layer_types", None)
    made = []
    for module, name in lists_of_layers(cast(nn.Module, base_model(model).base_model), config.num_hidden_layers):
        kinds: dict[Any, _Kind] = {}
        stand_ins = []
        for number, layer in enumerate(cast(nn.ModuleList, module._modules[name])):
            shapes = tuple((path, weight.shape) for path, weight in layer.named_parameters())
            key = (type(layer), names[number] if names else "", shapes)
            stand_ins.append(_Layer(kinds.setdefault(key, _Kind(layer, number))))
        module._modules[name] = nn.ModuleList(stand_ins)
        made += stand_ins
    return made


def _kinds(layers: Sequence[_Layer]) -> list[_Kind]:
    return list({id(layer.__dict__["kind"]): layer.__dict__["kind"] for layer in layers}.values())


def _modules(model: nn.Module, layers: Sequence[_Layer]) -> nn.ModuleList:
    """Return a model with the decoder layers that its stand-ins hide."""
    return nn.ModuleList([model, *(kind.layer for kind in _kinds(layers))])


# ---- Micro-batches


class _Run:
    """Forward and backward pass of a micro-batch.

    Args:
        model: Model without data.
        layers: Stand-ins for its decoder layers.
        batch: Sizes of the micro-batch.
    """

    def __init__(self, model: nn.Module, layers: Sequence[_Layer], batch: MicroBatch) -> None:
        self.batch = batch
        self.held: list[Tensor] = []
        """Copies of weights, which autocast keeps until the end of the forward pass."""
        self.gradients: list[Tensor] = []
        self.cached = 0
        """Bytes that the layers keep without gradients: those of a cache, or of 16-bit copies of weights."""
        self._model, self._base, self._layers = model, base_model(model), layers
        self._anchor = nn.Parameter(torch.zeros(()))

    def peak(self) -> int:
        """Return the most bytes that are held at once."""
        batch, modules = self.batch, _modules(self._model, self._layers)
        modules.train(batch.trains)
        _pretend(modules, batch.weight_bytes, batch.trained_bytes)
        for kind in _kinds(self._layers):
            kind.found.clear()
        for parameter in modules.parameters():
            if parameter.requires_grad and batch.trains and not batch.makes_gradients:
                parameter.grad = torch.empty_like(parameter)
        targets = torch.zeros(batch.rows * batch.completion, dtype=torch.long)
        given, backbone = self._inputs()
        known = [*modules.parameters(), *modules.buffers(), *given, targets, self._anchor]
        known += [parameter.grad for parameter in modules.parameters() if parameter.grad is not None]
        self._meter = _Meter(known)
        for layer in self._layers:
            layer.__dict__["run"] = self
        embeddings = self._base.get_input_embeddings().register_forward_hook(self._with_gradient)
        try:
            with self._meter, torch.set_grad_enabled(batch.trains):
                loss = self._loss(backbone, targets)
                self.held.clear()
                if batch.trains:
                    loss.backward()
        finally:
            embeddings.remove()
            AttentionSwitch().restore(self._model)
            for layer in self._layers:
                layer.__dict__["run"] = None
        return self._meter.peak

    def _loss(self, backbone: Callable[[], Tensor], targets: Tensor) -> Tensor:
        """Return a loss of the log-probabilities of `targets`, (completion tokens,), by TRL's head."""
        head, reference = self._base.get_output_embeddings(), None
        with torch.autocast("cpu", torch.bfloat16, enabled=self.batch.autocast):
            if self.batch.full_kl:
                with torch.no_grad():
                    reference = backbone()[:, :-1][targets, targets]
                self.held.clear()
            hidden = backbone()
            # The values of these indices do not matter. A boolean mask, as TRL has it, needs data.
            scored = hidden[:, :-1][targets, targets]
            chunk = chunked_divergence.VOCAB_CHUNK_SIZE
            given = (scored, head.weight, head.bias, targets, 1.0, chunk, None, 1.0, ("entropy",))
            loss = chunked_logprob.ChunkedLogProbFunction.apply(*given)[0].square().sum()
            if reference is not None:
                both = (scored, head.weight, head.bias, reference, head.weight, head.bias)
                loss = loss + chunked_divergence.ChunkedDivergenceFunction.apply(*both, 1.0, 1.0)[0].sum()
        return loss

    def _inputs(self) -> tuple[list[Tensor], Callable[[], Tensor]]:
        """Return the inputs of the micro-batch, and a function that returns the last hidden states."""
        batch, backbone = self.batch, cast(Any, self._base.base_model)
        if batch.layout is Layout.PACKED:
            AttentionSwitch().pack(self._model)
            ids = torch.zeros(1, batch.tokens, dtype=torch.long)
            # transformers drops a mask of ones, which it cannot see without data, and leaves one of four dimensions.
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
            # One call of SDPA for each completion keeps more than a kernel for all.
            rest = {"attention_mask": mask, "position_ids": ids, "group_spans": GroupSpans(_groups(batch), None, True)}
            return [ids, mask], lambda: backbone(input_ids=ids, use_cache=False, **rest).last_hidden_state
        if not batch.layout.shares_prompts:
            ids = torch.zeros(batch.rows, batch.prompt + batch.completion, dtype=torch.long)
            mask = torch.ones_like(ids)
            return [ids, mask], lambda: backbone(ids, attention_mask=mask, use_cache=batch.caches).last_hidden_state
        segmented = SegmentedModel(self._model)
        short = torch.zeros(2, 8, dtype=torch.long)
        with torch.no_grad(), segmented.observed():
            backbone(short, attention_mask=torch.ones_like(short), use_cache=False)
        before = torch.zeros(batch.prompts, batch.prompt - 1, dtype=torch.long)
        ids = torch.zeros(batch.rows, batch.completion, dtype=torch.long)
        mask = torch.ones(batch.rows, batch.prompt - 1 + batch.completion, dtype=torch.long)
        owners = torch.zeros(batch.rows, dtype=torch.long)
        places = torch.zeros(ids.numel(), dtype=torch.long)
        segments = Segments([Segment(ids, mask, owners)], places, Segment(before, torch.ones_like(before)))

        def call() -> Tensor:
            with segmented.taking_segments():
                return cast(Tensor, backbone(segments=segments).last_hidden_state)

        return [before, ids, mask, owners, places], call

    def _with_gradient(self, module: nn.Module, given: Any, output: Tensor) -> Tensor:
        """Return embeddings with a gradient. Layers whose input has none would keep less than those behind them."""
        return output + self._anchor if torch.is_grad_enabled() and not output.requires_grad else output

    def measured(self, layer: _Layer, states: Sequence[Tensor], args: Any, kwargs: dict[str, Any]) -> _LayerBytes:
        """Return the bytes of a decoder layer, which runs forward and backward here on copies of its inputs."""
        meter, before, peak = self._meter, self._meter.live, self._meter.peak
        given_bytes = sum(state.nbytes for state in states)

        def call() -> list[Tensor]:
            # The copies are no leaves, which the graph would hold whether or not the layer needs them.
            copies = {id(state): torch.empty_like(state) + self._anchor for state in states}
            meter.peak = meter.live
            given = [copies.get(id(value), value) for value in args]
            named = {name: copies.get(id(value), value) for name, value in kwargs.items()}
            return _hidden(layer.forward(*given, **named))

        outputs = call()
        held = sum(output.nbytes for output in outputs)
        forward, kept, backward = meter.peak - before - given_bytes, meter.live - before - held, 0
        if torch.is_grad_enabled():
            gradients = [torch.empty_like(output) for output in outputs]
            meter.peak = meter.live
            torch.autograd.backward(outputs, gradients)
            backward = meter.peak - before - 2 * held
            del gradients
            if self.batch.makes_gradients:
                layer.__dict__["kind"].layer.zero_grad()
        shapes = [(output.shape, output.dtype) for output in outputs]
        del outputs
        casts = meter.live - before
        torch.clear_autocast_cache()
        meter.peak = peak
        return _LayerBytes(forward, kept, max(backward, kept), casts, shapes)

    def emulated(self, kind: _Kind, sizes: _LayerBytes, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the hidden states behind a decoder layer."""
        if torch.is_grad_enabled():
            return cast("tuple[Tensor, ...]", _Emulated.apply(self, kind, sizes, *states))
        _bytes(sizes.forward)
        self.held.append(_bytes(sizes.kept))
        self.cached += sizes.kept
        return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in sizes.outputs)


def _bytes(size: int) -> Tensor:
    return torch.empty(max(size, 0), dtype=torch.uint8)


def _trained_bytes(layer: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in layer.parameters() if parameter.requires_grad)


def _hidden(values: Any) -> list[Tensor]:
    """Return the hidden states among the inputs or outputs of a layer."""
    leaves = values if isinstance(values, (tuple, list)) else [values]
    return [value for value in leaves if isinstance(value, Tensor) and value.ndim == 3]


def _groups(batch: MicroBatch) -> list[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Return the spans of a packed row."""
    groups, end = [], 0
    for number in range(batch.prompts):
        prefix = (end, end + batch.prompt - 1)
        end, suffixes = prefix[1], []
        # Groups may be cut, so the rows are spread over the prompts.
        for _ in range(number, batch.rows, batch.prompts):
            suffixes.append((end, end + batch.completion))
            end += batch.completion
        groups.append((prefix, suffixes))
    return groups


def _pretend(modules: nn.Module, weight_bytes: int, trained_bytes: int) -> None:
    """Let the tensors of modules claim to lie on the CPU, where autocast and autograd take them."""
    made: dict[int, nn.Parameter] = {}
    for module in modules.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:  # tied weights are one tensor
                    size = trained_bytes if parameter.requires_grad else weight_bytes
                    empty = torch.empty(parameter.shape, dtype=_DTYPES[size])
                    made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


# ---- Kernels of a GPU


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what transformers logs about kernels that are missing on this machine."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Replace the kernels that take another amount of memory on a CPU."""
    replaced: list[tuple[Any, str, Any]] = [
        (nn.functional, "scaled_dot_product_attention", _attention),
        (nn.functional, "dropout", _dropout),
        (packed_attention, "scaled_dot_product_attention", _attention),
        (packed_attention, "is_on_gpu", lambda tensor: True),
        *[(chunked_logprob, name, _nothing) for name in ("_forward_tile", "_backward_tile", "_addmm_fp32")],
        *[(chunked_divergence, name, _nothing) for name in ("_stats_tile", "_backward_tile", "_addmm_fp32")],
        (chunked_divergence, "_project", _project),
    ]
    if grouped := getattr(nn.functional, "grouped_mm", None):  # torch 2.8 has none
        replaced.append((nn.functional, "grouped_mm", partial(_grouped_mm, grouped)))
    with ExitStack() as stack:
        for owner, name, replacement in replaced:
            stack.enter_context(method_replaced(owner, name, replacement))
        yield


def _nothing(*_: Any, **__: Any) -> None:
    """Stand for a kernel that allocates nothing: its results are written into tensors that exist."""


def _project(
    tile: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, start: int, end: int, dtype: torch.dtype
) -> None:
    """Project to a float32 tile as CUDA does, with a copy of the weights in the compute precision only."""
    weight[start:end].to(dtype)


def _grouped_mm(stock: Callable[..., Tensor], tensor: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    """Multiply the tokens of experts. torch knows the shape of the result without data in bfloat16 only."""
    if tensor.dtype == torch.bfloat16:
        return stock(tensor, weight, offs=offs)
    return cast(Tensor, torch.ops.transformers.grouped_mm_fallback(tensor, weight, offs=offs))


def _dropout(tensor: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop numbers by CUDA's kernel, which keeps a mask of one byte per number."""
    return torch.native_dropout(tensor, p, training)[0] if training and p else tensor


def _attention(
    *tensors: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, **rest: Any
) -> Tensor:
    """Compute attention by the memory-efficient kernel, which gets a bias of the scores, or without mask by flash."""
    query, key, value = tensors
    scale = rest.get("scale")
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.bfloat16) for tensor in tensors)
    if attn_mask is None and query.dtype != torch.float32:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return cast(Tensor, flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0])
    bias = None
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype)
        if attn_mask.dtype == torch.bool:
            bias = bias.masked_fill_(~attn_mask, -torch.inf)
        bias = bias.expand(-1, query.shape[1], -1, -1)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    gradient = torch.is_grad_enabled()
    return cast(Tensor, efficient(query, key, value, bias, gradient, dropout_p, is_causal, scale=scale)[0])
