"""Memory of a micro-batch, measured on tensors without data.

The model runs forward and backward on shapes alone, and the bytes of its tensors are counted from their creation to
their release. Two decoder layers of each kind run, and then three. Each further layer is taken to add as much as the
third one did, so that the time does not depend on the number of layers.

Kernels are transformers' own in PyTorch. Optional kernel packages (flash-linear-attention, causal-conv1d, mamba-ssm)
need less memory. Attention by SDPA and TRL's head are counted as a GPU computes them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trl.kernels import chunked_divergence, chunked_logprob

from grpo_recipes.generation.models import base_model, lists_of_layers, method_replaced
from grpo_recipes.training import packed_attention
from grpo_recipes.training.layout_rules import text_config
from grpo_recipes.training.packed_attention import AttentionSwitch, GroupSpans
from grpo_recipes.training.packing import Layout
from grpo_recipes.training.segments import Segment, SegmentedModel, Segments

_BLOCK = 512  # bytes of CUDA's smallest allocation
_DTYPES = {2: torch.bfloat16, 4: torch.float32}


class NotMeasured(RuntimeError):
    """Error for a model that can't run on tensors without data."""


@dataclass(frozen=True)
class MicroBatchShape:
    """Micro-batch of a run.

    Attributes:
        rows: Number of completions.
        prompt: Tokens of a prompt.
        completion: Tokens of a completion.
        weight_bytes: Bytes of a frozen weight, or of every weight in full fine-tuning.
        trained_bytes: Bytes of a trained weight.
        autocast: True if matrix products are computed in 16 bits by autocast.
        checkpointing: True if the layers are computed again in the backward pass.
        prompts: Number of distinct prompts, of which a layout that shares prompts runs each once.
        layout: Layout of the rows.
        makes_gradients: True if all gradients are new and stay. Otherwise they are added to those of an earlier
            micro-batch, or leave the GPU one by one.
        full_kl: True if the KL term is that over the vocabulary.
        trains: False for a forward pass without gradients, which fills a cache.
    """

    rows: int
    prompt: int
    completion: int
    weight_bytes: int
    trained_bytes: int
    autocast: bool
    checkpointing: bool
    prompts: int = 1
    layout: Layout = Layout.PADDED
    makes_gradients: bool = False
    full_kl: bool = False
    trains: bool = True

    @property
    def tokens(self) -> int:
        """Number of tokens that run through the model, padding included."""
        if not self.layout.shares_prompts:
            return self.rows * (self.prompt + self.completion)
        # The last token of a prompt is computed once per completion, in place of the completion's own last token.
        return self.prompts * (self.prompt - 1) + self.rows * self.completion

    def forward(self, rows: int, prompt: int, completion: int) -> MicroBatchShape:
        """Return padded rows of this run that go forward without gradients."""
        padded = replace(self, rows=rows, prompt=prompt, completion=completion, prompts=1, layout=Layout.PADDED)
        return replace(padded, makes_gradients=False, full_kl=False, trains=False)


class Measured(NamedTuple):
    """Bytes of a micro-batch.

    Attributes:
        forward: Most bytes in the forward pass.
        backward: Most bytes in the backward pass, new gradients included, or 0 without one.
        cache: Bytes of the cache that is filled without gradients, or of what is kept for the backward pass.
    """

    forward: int
    backward: int
    cache: int

    @property
    def peak(self) -> int:
        """Most bytes that are held at once."""
        return max(self.forward, self.backward)


class Activations:
    """Activations of a model, which are measured when they are asked for.

    Args:
        model: The model on the meta device, with or without an adapter.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self._base = model, base_model(model)
        config = text_config(model)
        lists = lists_of_layers(cast(nn.Module, self._base.base_model), config.num_hidden_layers)
        self._lists = [(module, name, cast(nn.ModuleList, module._modules[name])) for module, name in lists]
        names, kinds = getattr(config, "layer_types", None), dict[Any, list[nn.Module]]()
        for _, _, layers in self._lists:
            for number, layer in enumerate(layers):
                shapes = tuple((path, weight.shape) for path, weight in layer.named_parameters())
                kinds.setdefault((type(layer), names[number] if names else "", shapes), []).append(layer)
        self._kinds = list(kinds.values())
        self._found: dict[MicroBatchShape, Measured] = {}

    def measure(self, batch: MicroBatchShape) -> Measured:
        """Return the bytes of a micro-batch.

        Raises:
            NotMeasured: The model can't run on tensors without data.
        """
        if batch not in self._found:
            logging.disable(logging.WARNING)  # transformers warns of kernels that are missing on this machine
            try:
                with FakeTensorMode(allow_non_fake_inputs=True), gpu_kernels():
                    self._found[batch] = self._measured(batch)
            except Exception as error:  # the code of a model may need values, and raises any class then
                raise NotMeasured(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
            finally:
                logging.disable(logging.NOTSET)
        return self._found[batch]

    def _measured(self, batch: MicroBatchShape) -> Measured:
        """Return the bytes of a micro-batch in all layers, from those in two and in three layers of each kind."""
        first = [layer for layers in self._kinds for layer in layers[:2]]
        least = self._run(batch, first)
        forward, backward, cache = least
        for layers in self._kinds:
            if len(layers) > 2:
                more = self._run(batch, [*first, layers[2]])
                others, kept = len(layers) - 2, more.forward - least.forward
                forward += others * kept
                # The peak may be at the start of the backward pass, or at its end, where gradients take the place of
                # what was kept. With few layers it may be at the other one.
                gradients = sum(parameter.nbytes for parameter in layers[2].parameters() if parameter.requires_grad)
                new = max(gradients, kept) if batch.makes_gradients else 0
                backward += others * max(more.backward - least.backward, new)
                cache += others * (more.cache - least.cache)
        return Measured(forward, backward, cache)

    def _run(self, batch: MicroBatchShape, layers: Sequence[nn.Module]) -> Measured:
        """Return the bytes of a micro-batch that runs through `layers` only."""
        with self._skipping(layers):
            self.model.train(batch.trains)
            _pretend(self.model, batch.weight_bytes, batch.trained_bytes)
            if batch.checkpointing:
                options = {"use_reentrant": False, "preserve_rng_state": False}
                cast(Any, self._base).activation_checkpointing_enable(options)
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            if batch.trains and not batch.makes_gradients:
                for parameter in trained:
                    parameter.grad = torch.empty_like(parameter)
            targets = torch.zeros(batch.rows * batch.completion, dtype=torch.long)
            given, backbone = self._inputs(batch)
            known = [*self.model.parameters(), *self.model.buffers(), *given, targets]
            meter = _Meter([*known, *(parameter.grad for parameter in trained if parameter.grad is not None)])
            try:
                with meter, torch.set_grad_enabled(batch.trains):
                    loss, cache = self._loss(batch, backbone, targets, meter)
                    forward, meter.peak = meter.peak, 0
                    if batch.trains:
                        loss.backward()
                    return Measured(forward, meter.peak, cache)
            finally:
                AttentionSwitch().restore(self.model)

    @contextmanager
    def _skipping(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Skip all other decoder layers inside this block."""
        returned: list[int] = []
        handles = []
        for module, name, all_layers in self._lists:
            handles.append(all_layers[0].register_forward_hook(partial(_note_form, returned)))
            kept = [layer if layer in layers else _Skipped(layer, returned) for layer in all_layers]
            module._modules[name] = nn.ModuleList(kept)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module, name, all_layers in self._lists:
                module._modules[name] = all_layers

    def _loss(
        self, batch: MicroBatchShape, backbone: Callable[[], Any], targets: Tensor, meter: _Meter
    ) -> tuple[Tensor, int]:
        """Return a loss of the log-probabilities of `targets`, (completion tokens,), by TRL's head, and the cache."""
        head, reference = self._base.get_output_embeddings(), None
        with torch.autocast("cpu", torch.bfloat16, enabled=batch.autocast):
            if batch.full_kl:
                with torch.no_grad():
                    reference = backbone().last_hidden_state[:, :-1][targets, targets]
            output = backbone()
            hidden = output.last_hidden_state
            cache = meter.live - hidden.nbytes
            # The values of these indices do not matter. A boolean mask, as TRL has it, needs data.
            scored = hidden[:, :-1][targets, targets]
            del output
            chunk = chunked_divergence.VOCAB_CHUNK_SIZE
            given = (scored, head.weight, head.bias, targets, 1.0, chunk, None, 1.0, ("entropy",))
            loss = chunked_logprob.ChunkedLogProbFunction.apply(*given)[0].square().sum()
            if reference is not None:
                both = (scored, head.weight, head.bias, reference, head.weight, head.bias)
                loss = loss + chunked_divergence.ChunkedDivergenceFunction.apply(*both, 1.0, 1.0)[0].sum()
        return loss, cache

    def _inputs(self, batch: MicroBatchShape) -> tuple[list[Tensor], Callable[[], Any]]:
        """Return the inputs of a micro-batch, and a function that returns the output of the backbone."""
        backbone = cast(Any, self._base.base_model)
        if batch.layout is Layout.PACKED:
            AttentionSwitch().pack(self.model)
            ids = torch.zeros(1, batch.tokens, dtype=torch.long)
            # transformers drops a mask of ones, which it cannot see without data, and leaves one of four dimensions.
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
            # One call of SDPA for each completion keeps more than a kernel for all.
            rest = {"attention_mask": mask, "position_ids": ids, "group_spans": GroupSpans(_groups(batch), None, True)}
            return [ids, mask], partial(backbone, input_ids=ids, use_cache=False, **rest)
        if not batch.layout.shares_prompts:
            ids = torch.zeros(batch.rows, batch.prompt + batch.completion, dtype=torch.long)
            mask = torch.ones_like(ids)
            return [ids, mask], partial(backbone, ids, attention_mask=mask, use_cache=not batch.trains)
        segmented = SegmentedModel(self.model)
        short = torch.zeros(2, 8, dtype=torch.long)
        with torch.no_grad(), segmented.observed():
            backbone(short, attention_mask=torch.ones_like(short), use_cache=False)
        before = torch.zeros(batch.prompts, batch.prompt - 1, dtype=torch.long)
        ids = torch.zeros(batch.rows, batch.completion, dtype=torch.long)
        mask = torch.ones(batch.rows, batch.prompt - 1 + batch.completion, dtype=torch.long)
        owners = torch.zeros(batch.rows, dtype=torch.long)
        places = torch.zeros(ids.numel(), dtype=torch.long)
        segments = Segments([Segment(ids, mask, owners)], places, Segment(before, torch.ones_like(before)))

        def call() -> Any:
            with segmented.taking_segments():
                return backbone(segments=segments)

        return [before, ids, mask, owners, places], call


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


class _Skipped(nn.Module):
    """Stand-in for a decoder layer, which returns its input.

    Args:
        layer: The layer, whose attributes the backbone may read.
        returned: Length of the tuple that a layer returns, or 0 for a tensor, in a list that the first layer fills.
    """

    def __init__(self, layer: nn.Module, returned: Sequence[int]) -> None:
        super().__init__()
        # Past `nn.Module.__setattr__`, which would register the layer as a submodule.
        self.__dict__.update(layer=layer, returned=returned)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states. A layer that gets all segments (`segments.py`) returns those of each."""
        return args if "forward" in vars(self) else super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states in the form of a layer's result."""
        hidden, size = args[0] if args else kwargs["hidden_states"], self.__dict__["returned"][0]
        return (hidden, *[None] * (size - 1)) if size else hidden


def _note_form(returned: list[int], module: nn.Module, given: Any, output: Any) -> None:
    """Append the length of the tuple that a layer returns, or 0 for a tensor."""
    returned.append(len(output) if isinstance(output, tuple) else 0)


def _groups(batch: MicroBatchShape) -> list[tuple[tuple[int, int], list[tuple[int, int]]]]:
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
