"""Memory of the decoder layers of a model in training, measured on tensors without data.

The formulas of `memory.py` describe layers like Llama's. Linear attention, convolutions, experts and attention without
SDPA keep other tensors, which differ by family. So one layer of each kind runs forward and backward here on the rows of
a micro-batch, and the bytes of its tensors are counted from their creation to their release. No weight is loaded, and
no number is computed. The other layers of a kind are skipped, so that the time hardly depends on the number of layers.

Kernels are transformers' own in PyTorch. Optional kernel packages (flash-linear-attention, causal-conv1d, mamba-ssm)
need less memory. Attention by SDPA is counted as a GPU computes it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_recipes.generation.models import base_model, method_replaced
from grpo_recipes.training.layout_check import text_config
from grpo_recipes.training.segments import Segment, SegmentedModel, Segments, lists_of_layers

_BLOCK = 512  # bytes of CUDA's smallest allocation


class NotMeasured(RuntimeError):
    """A model whose layers can't run on tensors without data."""


@dataclass(frozen=True)
class Precision:
    """Bytes of numbers in training: of a frozen or full weight, of a trained weight, and True under autocast."""

    weight: int
    trained: int
    autocast: bool


@dataclass(frozen=True)
class RowSizes:
    """Sizes of the rows of a micro-batch.

    Attributes:
        rows: Number of completions.
        prompt: Tokens of a prompt.
        completion: Tokens of a completion.
        prompts: Number of distinct prompts that share a cache, or None for rows with their own prompts.
    """

    rows: int
    prompt: int
    completion: int
    prompts: int | None = None


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one decoder layer.

    Attributes:
        kept: Bytes that the layer keeps for its backward pass, its input included if the layer needs it there. Without
            gradients, bytes of the copies of weights that autocast keeps.
        forward: Most bytes that it holds in the forward pass, without its input.
        backward: Most bytes that it holds in the backward pass, those that it has kept included.
    """

    kept: int
    forward: int
    backward: int


@dataclass(frozen=True)
class Measured:
    """Bytes of a backbone in training.

    Attributes:
        layers: Bytes of each decoder layer, in order.
        shared: Bytes of masks and tables of positions, which all layers read.
        between: Bytes of the hidden states between two layers. Some models keep them in float32.
    """

    layers: Sequence[LayerBytes]
    shared: int
    between: int


@dataclass
class MeasuredLayers:
    """Decoder layers of a model, measured when they are asked for.

    Args:
        model: The model on the meta device, with or without an adapter. It is copied.
    """

    model: nn.Module
    _found: dict[tuple[Precision, RowSizes, bool], Measured] = field(default_factory=dict)

    def measure(self, precision: Precision, sizes: RowSizes, *, trains: bool = True) -> Measured:
        """Return the bytes of the decoder layers.

        Args:
            precision: Precision of the training.
            sizes: Rows of the micro-batch.
            trains: False for a forward pass without gradients.

        Raises:
            NotMeasured: The model can't run on tensors without data.
        """
        key = (precision, sizes, trains)
        if key not in self._found:
            try:
                model = copy.deepcopy(self.model)
                with FakeTensorMode(allow_non_fake_inputs=True), _gpu_kernels():
                    _pretend(model, precision)
                    self._found[key] = _Run(model, precision, sizes, trains).measured()
            except Exception as error:  # the code of a model may need values, and raises any class then
                raise NotMeasured(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        return self._found[key]


def _pretend(model: nn.Module, precision: Precision) -> None:
    """Let the tensors of a model on the meta device claim to lie on the CPU, where autocast and autograd take them."""
    kinds = {2: torch.bfloat16, 4: torch.float32}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:  # tied weights are one tensor
                    size = precision.trained if parameter.requires_grad else precision.weight
                    empty = torch.empty(parameter.shape, dtype=kinds[size])
                    made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


class _Skipped(nn.Module):
    """Stand-in for a decoder layer like an earlier one, which returns its input in the form of that layer's output."""

    def __init__(self, layer: nn.Module, forms: list[int]) -> None:
        super().__init__()
        # Past `nn.Module.__setattr__`, which would register the layer as a submodule.
        self.__dict__.update(skipped=layer, forms=forms)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["skipped"], name)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Return the hidden states."""
        size = self.__dict__["forms"][-1] if self.__dict__["forms"] else 0
        return (hidden_states, *[None] * (size - 1)) if size else hidden_states


class _Bytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of the storages created inside its block."""

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

    def restart(self) -> None:
        """Forget the peak."""
        self.peak = self.live

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


@dataclass
class _Marks:
    """Counts of the meter at the borders of one measured layer."""

    before: int
    inputs: list[tuple[weakref.ref[Any], int]]
    """Storages of the inputs, and their bytes."""
    outputs: int = 0
    kept: int = 0
    forward: int = 0
    backward: int = 0
    waiting: int = 0
    """Number of inputs whose gradients are missing."""


class _Run:
    """Forward and backward pass of a backbone of which only the first layer of each kind computes.

    Args:
        model: Model without data, which is changed.
        precision: Precision of the training.
        sizes: Rows of the micro-batch.
        trains: False for a forward pass without gradients.
    """

    def __init__(self, model: nn.Module, precision: Precision, sizes: RowSizes, trains: bool) -> None:
        self._model, self._precision, self._sizes, self._trains = model, precision, sizes, trains
        self._backbone = base_model(model).base_model
        self._kinds: list[int] = []
        """Kind of each layer, as the index of the first layer of this kind."""
        self._marks: dict[int, _Marks] = {}
        self._open: _Marks | None = None
        """Layer in whose backward pass the peak is counted."""
        self._meter: _Bytes | None = None
        self._shared: int
        self._prefixes: list[Tensor] = []
        """Hidden states of the prompts behind the last measured layer."""

    def measured(self) -> Measured:
        """Return the bytes of the backbone."""
        self._model.train(self._trains)
        anchor = nn.Parameter(torch.zeros(()))
        # With a frozen base the first layer's input has no gradient. It would keep less than the layers it stands for.
        base_model(self._model).get_input_embeddings().register_forward_hook(partial(_add, anchor))
        config = text_config(self._model)
        lists = lists_of_layers(cast(nn.Module, self._backbone), config.num_hidden_layers)
        for module, name in lists:
            self._shorten(module, name, getattr(config, "layer_types", None))
        segmented = SegmentedModel(self._model)
        if self._sizes.prompts is not None:
            with torch.no_grad(), segmented.observed():
                self._call(**_rows(2, 8))
        given, call = self._inputs(segmented)
        for parameter in self._model.parameters():
            # An earlier micro-batch has left its gradients, to which those of this one are added.
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        known = [*self._model.parameters(), *self._model.buffers(), *given, anchor]
        known += [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        self._meter = _Bytes(known)
        with self._meter, torch.set_grad_enabled(self._trains):
            with torch.autocast("cpu", torch.bfloat16, enabled=self._precision.autocast):
                output = call()
            if self._trains:
                for marks in self._marks.values():
                    # An input that is still alive is needed in the backward pass.
                    marks.kept += sum(size for storage, size in marks.inputs if storage() is not None)
                # The following layers, which are skipped, would also give the prompts' hidden states a gradient.
                roots = [output, *self._prefixes]
                torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
            self._close()
        found = {kind: LayerBytes(marks.kept, marks.forward, marks.backward) for kind, marks in self._marks.items()}
        # The first layer may get 16-bit embeddings, and return float32.
        between = max(max(sum(size for _, size in marks.inputs), marks.outputs) for marks in self._marks.values())
        return Measured([found[kind] for kind in self._kinds], self._shared, between)

    def _call(self, **given: Any) -> Any:
        return cast(Callable[..., Any], self._backbone)(use_cache=False, **given).last_hidden_state

    def _inputs(self, segmented: SegmentedModel) -> tuple[list[Tensor], Callable[[], Tensor]]:
        """Return the inputs of a micro-batch, and a function that calls the backbone with them."""
        sizes = self._sizes
        if sizes.prompts is None:
            rows = _rows(sizes.rows, sizes.prompt + sizes.completion)
            return list(rows.values()), partial(self._call, **rows)
        before = _rows(sizes.prompts, sizes.prompt - 1)
        rows = _rows(sizes.rows, sizes.completion)
        mask = torch.ones(sizes.rows, sizes.prompt - 1 + sizes.completion, dtype=torch.long)
        owners = torch.zeros(sizes.rows, dtype=torch.long)
        places = torch.zeros(sizes.rows * sizes.completion, dtype=torch.long)
        bucket = Segment(rows["input_ids"], mask, owners)
        segments = Segments([bucket], places, Segment(before["input_ids"], before["attention_mask"]))

        def call() -> Tensor:
            with segmented.taking_segments():
                return cast(Callable[..., Any], self._backbone)(segments=segments).last_hidden_state

        return [*before.values(), *rows.values(), mask, owners, places], call

    def _shorten(self, module: nn.Module, name: str, layer_types: Sequence[str] | None) -> None:
        """Replace each layer that is like an earlier one, and measure the others."""
        layers = list(cast(nn.ModuleList, module._modules[name]))
        first: dict[Any, int] = {}
        forms: dict[int, list[int]] = {}
        self._kinds = []
        for number, layer in enumerate(layers):
            shapes = tuple((path, weight.shape) for path, weight in layer.named_parameters())
            kind = first.setdefault((type(layer), layer_types[number] if layer_types else "", shapes), number)
            self._kinds.append(kind)
            if kind != number:
                layers[number] = _Skipped(layer, forms[kind])
                continue
            forms[number] = []
            layer.register_forward_pre_hook(partial(self._enter, number), with_kwargs=True)
            layer.register_forward_hook(partial(self._leave, number, forms[number]))
        module._modules[name] = nn.ModuleList(layers)

    def _enter(self, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._meter is None:
            return
        states = _hidden(args) or [kwargs["hidden_states"]]
        storages = [state.untyped_storage() for state in states]
        inputs = [(weakref.ref(storage), storage.nbytes()) for storage in storages]
        marks = _Marks(self._meter.live, inputs)
        if not self._marks:
            self._shared = self._meter.live - sum(size for _, size in inputs)
        self._marks[number] = marks
        if self._trains:
            given = [state for state in states if state.requires_grad]
            marks.waiting = len(given)
            for state in given:
                state.register_hook(partial(self._left_backward, marks))
        self._meter.restart()

    def _leave(self, number: int, forms: list[int], layer: nn.Module, args: Any, output: Any) -> None:
        outputs = _hidden(output)
        forms.append(len(output) if isinstance(output, tuple) and len(outputs) < len(output) else 0)
        if self._meter is None:
            return
        marks, meter = self._marks[number], self._meter
        marks.outputs = sum(state.untyped_storage().nbytes() for state in outputs)
        marks.forward, marks.kept = meter.peak - marks.before, meter.live - marks.before - marks.outputs
        if self._trains:
            self._prefixes = outputs[:-1]
            for state in outputs:
                if state.requires_grad:
                    state.register_hook(partial(self._entered_backward, marks))
        meter.restart()

    def _entered_backward(self, marks: _Marks, gradient: Tensor) -> None:
        """Begin to count the peak of a layer when the gradient of its output exists."""
        assert self._meter is not None
        if self._open is not marks and not marks.backward:
            self._close()
            self._open = marks
            # The tensors that the layer keeps count as its own. The gradient of its output does not.
            marks.backward = 1
            marks.before = self._meter.live - marks.kept
            self._meter.restart()

    def _left_backward(self, marks: _Marks, gradient: Tensor) -> None:
        """End the count of a layer with the gradient of its last input."""
        marks.waiting -= 1
        if not marks.waiting and self._open is marks:
            self._close()

    def _close(self) -> None:
        if self._open is not None and self._meter is not None:
            self._open.backward = self._meter.peak - self._open.before
            self._open = None


def _add(anchor: Tensor, module: nn.Module, given: Any, output: Tensor) -> Tensor:
    """Return embeddings with a gradient. Making them a leaf would keep them for the whole backward pass."""
    return output if output.requires_grad or not torch.is_grad_enabled() else output + anchor


def _rows(rows: int, tokens: int) -> dict[str, Tensor]:
    """Return the IDs and the mask of rows without padding."""
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _hidden(values: Any) -> list[Tensor]:
    """Return the hidden states among the inputs or outputs of a layer."""
    leaves = values if isinstance(values, (tuple, list)) else [values]
    return [value for value in leaves if isinstance(value, Tensor) and value.ndim == 3]


@contextmanager
def _gpu_kernels() -> Iterator[None]:
    """Replace the kernels that take another amount of memory on a CPU."""
    with ExitStack() as stack:
        stack.enter_context(method_replaced(nn.functional, "scaled_dot_product_attention", _attention))
        stack.enter_context(method_replaced(nn.functional, "dropout", _dropout))
        if grouped := getattr(nn.functional, "grouped_mm", None):  # torch 2.8 has none
            stack.enter_context(method_replaced(nn.functional, "grouped_mm", partial(_grouped_mm, grouped)))
        yield


def _grouped_mm(stock: Callable[..., Tensor], tensor: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    """Multiply the tokens of experts. torch knows the shape of the result without data in bfloat16 only."""
    if tensor.dtype == torch.bfloat16:
        return stock(tensor, weight, offs=offs)
    return cast(Tensor, torch.ops.transformers.grouped_mm_fallback(tensor, weight, offs=offs))


def _dropout(tensor: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop numbers by CUDA's kernel, which keeps a mask of one byte per number."""
    return torch.native_dropout(tensor, p, training)[0] if training and p else tensor


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention by the memory-efficient kernel, which gets a bias of the scores, or without mask by flash."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
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
