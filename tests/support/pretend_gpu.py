"""A pretend GPU: tensors with CPU data that claim `cuda:0`, for tests of device discipline on machines without a GPU.

    with PretendGPU() as gpu:
        model.to("cuda")
        ...
    gpu.synchronisations, gpu.uploads

It shows where a tensor of the CPU meets a tensor of the GPU, how often the host would wait for the device, and how
often data would be copied to it. Numbers are those of the CPU, so results can be compared with a run outside the block.

It cannot show speed, memory, the rounding and the random numbers of CUDA's kernels, errors that a kernel raises, or
anything that overlaps in time. Autocast is that of the CPU, which keeps fewer operators in float32 than CUDA's. Triton
has no driver for it, so TRL's head runs without Triton's kernels, also in a build of torch for CUDA.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from accelerate import accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda:0")

MEMORY = 80 * 2**30
"""Bytes of memory that the pretend GPU reports."""

VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "detach",
    "alias", "split", "split_with_sizes", "unbind", "as_strided", "_reshape_alias", "diagonal", "unfold", "lift_fresh",
    "is_same_size", "sym_size", "new_empty", "empty", "empty_like", "empty_strided", "new_empty_strided", "resize_",
    "set_", "squeeze_", "unsqueeze_", "t_", "detach_",
}  # fmt: skip
"""Operators that compute nothing: views and allocations."""

WAITING = {
    "_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "bincount",
}  # fmt: skip
"""Operators whose result, or the shape of it, the host has to wait for."""

INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operators that take their indices from the CPU as well. CUDA uploads them, and the host waits for a boolean mask."""

WITHOUT_CPU_NUMBERS = {"cat", "stack", "_fused_adamw_"}
"""Operators that also refuse a tensor of the CPU that holds one number."""

FACTORIES_FROM_DATA = {"tensor", "as_tensor", "asarray"}


class MixedDevices(RuntimeError):
    """An operator got tensors of the CPU and of the GPU."""


class PretendTensor(torch.Tensor):
    """A tensor on the pretend GPU.

    In C++ its device is the CPU, because autograd of a CPU build refuses `cuda`. Only Python sees `cuda:0`.
    """

    host: Tensor
    """The data."""

    @staticmethod
    def __new__(cls, host: Tensor, requires_grad: bool = False) -> PretendTensor:
        """Wrap the data of `host`."""
        tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=host.device,
            requires_grad=requires_grad,
        )
        tensor.host = host
        return tensor  # type: ignore[no-any-return]

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def get_device(self) -> int:
        """Return the number of the GPU."""
        return 0

    def data_ptr(self) -> int:
        """Return the address of the data."""
        return self.host.data_ptr()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PretendTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on the data, and count it."""
        assert PretendGPU.current is not None, "a tensor of the pretend GPU is used outside of its block"
        return PretendGPU.current.operate(func, args, kwargs or {})


class Autocast(torch.autocast):
    """Autocast of the pretend GPU, whose tensors are those of the CPU in C++. That of another device does nothing."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(_host_of(device_type), *args, **kwargs)
        self._is_of_gpu = _is_gpu(device_type)

    def __enter__(self) -> Any:
        return super().__enter__() if self._is_of_gpu else self

    def __exit__(self, *error: Any) -> Any:
        return super().__exit__(*error) if self._is_of_gpu else False


class PretendGPU(TorchFunctionMode):
    """The device, as a context, with the counts of everything that ran on it inside the block."""

    current: PretendGPU | None = None

    capability = (9, 0)
    """Compute capability that the device reports."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: Counter[str] = Counter()
        """Number of waits of the host by the kind of wait and the line of code that waits."""
        self.reset()
        self._patches = ExitStack()
        self._depth = 0

    def reset(self) -> None:
        """Set all counts to 0."""
        self.uploads = 0
        self.sites.clear()

    @property
    def synchronisations(self) -> int:
        """Number of times that the host waited for the device."""
        return sum(self.sites.values())

    # ---- The block

    def __enter__(self) -> PretendGPU:
        """Enter the block. The backward pass, which leaves the mode, enters it again."""
        self._depth += 1
        if self._depth == 1:
            PretendGPU.current = self
            self._replace_cuda()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave the block, and restore everything that was replaced."""
        super().__exit__(*error)
        self._depth -= 1
        if not self._depth:
            PretendGPU.current = None
            self._patches.close()

    def _replace_cuda(self) -> None:
        """Replace what would start CUDA: memory and random state of the device, and autocast."""
        engine = torch.autograd.graph._engine_run_backward  # type: ignore[attr-defined]

        def backward(*args: Any, **kwargs: Any) -> Any:
            with self:
                return engine(*args, **kwargs)

        # `Module.to` would otherwise write into parameters of another class.
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        self._patches.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        replacements = {
            "get_device_properties": lambda *_: SimpleNamespace(
                total_memory=MEMORY, major=self.capability[0], minor=self.capability[1]
            ),
            "get_device_capability": lambda *_: self.capability,
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": lambda state, *_: torch.set_rng_state(state),
            "mem_get_info": lambda *_: (MEMORY, MEMORY),
            "memory_reserved": lambda *_: 0,
            "memory_allocated": lambda *_: 0,
            "synchronize": lambda *_: None,
        }
        for name, replacement in replacements.items():
            self._patches.enter_context(patch(f"torch.cuda.{name}", replacement))
        self._patches.enter_context(patch("trl.kernels.chunked_logprob._TRITON_AVAILABLE", False))
        for name in ("gather", "reduce"):
            self._patches.enter_context(
                patch(f"accelerate.accelerator.{name}", _collective(getattr(accelerator, name)))
            )
        enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
        self._patches.enter_context(patch("torch.autocast", Autocast))
        self._patches.enter_context(patch("torch.is_autocast_enabled", lambda device="cuda": enabled(_host_of(device))))
        self._patches.enter_context(patch("torch.get_autocast_dtype", lambda device: dtype_of(_host_of(device))))
        self._patches.enter_context(patch("torch.autograd._engine_run_backward", backward))
        self._patches.enter_context(patch("torch._tensor.torch.autograd._engine_run_backward", backward))

    def adopt(self, trainer: Any) -> None:
        """Move a trainer and accelerate's state, which all trainers share, to the device."""
        for state in (PartialState._shared_state, AcceleratorState._shared_state, trainer.accelerator.state.__dict__):
            if "device" in state:
                self._patches.enter_context(patch.dict(state, device=DEVICE))
        trainer.args.__dict__["_setup_devices"] = DEVICE
        trainer.model.to("cuda")
        if getattr(trainer, "ref_model", None) is not None:
            trainer.ref_model.to("cuda")

    # ---- Operators

    def operate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on the data of its arguments.

        Raises:
            MixedDevices: an argument lies on the CPU, and is no number.
        """
        name = func.overloadpacket.__name__
        self._count(name, args, kwargs)
        self._check_devices(func, name, args, kwargs)
        host_args, host_kwargs = tree_map(_data, args), tree_map(_data, kwargs)
        result = CUDA_ONLY.get(str(func), func)(*host_args, **host_kwargs)
        if not func._schema.returns:  # an operator that writes into lists
            return None
        if isinstance(kwargs.get("out"), PretendTensor):
            return kwargs["out"]
        if name not in VIEWS and _is_in_place(func):
            return args[0]
        return tree_map(_wrapped, result)

    def _count(self, name: str, args: Any, kwargs: Any) -> None:
        if name in WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.wait(name)
        if name in INDEXING:
            indices = [index for index in args[1] if index is not None]
            masks = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
            fills = name != "index" and not isinstance(args[2], PretendTensor)  # with a number: `masked_fill`
            if masks and not fills:
                self.wait("boolean index")
            for index in indices:
                if not isinstance(index, PretendTensor):
                    self.upload("index of the CPU")

    def _check_devices(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        if name == "copy_":  # the one operator between devices
            target, source = args[:2]
            if not isinstance(target, PretendTensor):
                self.wait("copy_ to the CPU")
            elif not isinstance(source, PretendTensor):
                self.upload(name, source, non_blocking=kwargs.get("non_blocking", len(args) > 2 and args[2]))
            return
        checked = [args[0], *args[2:]] if name in INDEXING else [*args, kwargs]
        tensors = [leaf for leaf in tree_leaves(checked) if isinstance(leaf, Tensor)]
        # An operator takes a number of the CPU, but writes to none.
        takes_numbers = name not in WITHOUT_CPU_NUMBERS
        written = args[0] if _is_in_place(func) else None
        on_cpu = [tensor for tensor in tensors if not isinstance(tensor, PretendTensor)]
        if name == "cat" and torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
            # The gradient of a split, in C++, fills in zeros where there is none. In C++ the device is the CPU.
            on_cpu = [tensor for tensor in on_cpu if tensor.any()]
        if any(tensor.ndim or not takes_numbers or tensor is written for tensor in on_cpu):
            raise MixedDevices(f"{func} got tensors of the CPU and of the GPU at {_site()}")

    def upload(self, kind: str, source: Tensor | None = None, *, non_blocking: bool = False) -> None:
        """Count a copy to the device, for which the host waits unless it is asynchronous and its memory pinned."""
        self.uploads += 1
        if not (non_blocking and getattr(source, "is_pinned_memory", False)):
            self.wait(f"copy to the device ({kind})")

    def wait(self, kind: str) -> None:
        """Count a wait of the host."""
        self.sites[f"{kind} at {_site()}"] += 1

    # ---- Functions that name a device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function without letting torch's argument parser, which would start CUDA, see the device."""
        kwargs = dict(kwargs or {})
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if isinstance(first, Tensor):
            if name in ("to", "cuda", "cpu", "type_as"):
                return self._move(name, first, args[1:], kwargs)
            if name == "pin_memory":
                pinned = first.clone()
                pinned.is_pinned_memory = True
                return pinned
        if isinstance(first, PretendTensor):
            if name in ("numpy", "__array__"):
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
            if name == "tolist":
                self.wait("tolist")
                return first.host.tolist()
            if name == "new_tensor":
                self.upload(name)
                return PretendTensor(func(first.host, *args[1:], **kwargs))
            if name == "scaled_dot_product_attention" and kwargs.pop("enable_gqa", False):
                heads = first.shape[-3] // args[1].shape[-3]
                args = (first, *(_EqualHeads.apply(states, heads) for states in args[1:3]), *args[3:])
        device = kwargs.get("device")
        if _is_gpu(device):
            if name in FACTORIES_FROM_DATA:
                self.upload(name)
            kwargs["device"] = "cpu"
            return tree_map(_wrapped, func(*args, **kwargs))
        if (
            device is not None
            and isinstance(first, PretendTensor)
            and (name.startswith("new_") or name.endswith("_like"))
        ):
            return func(first.host, *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _move(self, name: str, tensor: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Convert a tensor as `to`, `cuda`, `cpu` and `type_as` do."""
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        for argument in [DEVICE] if name == "cuda" else ["cpu"] if name == "cpu" else args[:2]:
            if isinstance(argument, Tensor):
                device, dtype = argument.device, argument.dtype
            elif isinstance(argument, torch.dtype):
                dtype = argument
            elif argument is not None and not isinstance(argument, bool):
                device = argument
        on_gpu = isinstance(tensor, PretendTensor)
        wanted, source = on_gpu if device is None else _is_gpu(device), tensor
        if dtype is not None and dtype != tensor.dtype:
            tensor = torch._C._TensorBase.to(tensor, dtype)
        elif kwargs.get("copy"):
            tensor = tensor.clone()
        if wanted == on_gpu:
            return tensor
        if wanted:
            self.upload(name, source, non_blocking=kwargs.get("non_blocking", False))
        else:
            self.wait("copy to the CPU")
        moved: Tensor = _Move.apply(tensor) if tensor.requires_grad else _moved(tensor)  # type: ignore[no-untyped-call]
        return moved


class _Move(torch.autograd.Function):
    """Copy to the other device, whose gradient is a copy back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _moved(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return _moved(gradient)


class _EqualHeads(torch.autograd.Function):
    """Keys or values with as many heads as the query, without a launch. The kernels of a GPU read grouped heads.

    Torch 2.8 has no such kernel for a CPU. SDPA would make a mask, whose device in C++ is the CPU.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, heads: int) -> Tensor:
        ctx.heads = heads
        return PretendTensor(_data(states).repeat_interleave(heads, dim=-3))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        by_token = _data(gradient).transpose(-3, -2)  # contiguous, as the kernels of a GPU return it
        return PretendTensor(by_token.unflatten(-2, (-1, ctx.heads)).sum(-2).transpose(-3, -2)), None


def _moved(tensor: Tensor) -> Tensor:
    """Return a copy on the other device."""
    if isinstance(tensor, PretendTensor):
        return tensor.host.clone()
    return PretendTensor(tensor.detach().clone())


def _data(value: Any) -> Any:
    return value.host if isinstance(value, PretendTensor) else value


def _wrapped(value: Any) -> Any:
    return PretendTensor(value) if isinstance(value, Tensor) and not isinstance(value, PretendTensor) else value


def _is_in_place(func: Any) -> bool:
    """Return True if an operator writes into its first argument."""
    alias = func._schema.arguments[0].alias_info if func._schema.arguments else None
    return alias is not None and alias.is_write


def _is_gpu(device: Any) -> bool:
    if device is None or isinstance(device, bool):
        return False
    return isinstance(device, int) or torch.device(device).type == "cuda"


def _collective(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective of accelerate that takes tensors of the GPU only, as NCCL does, also with one process."""

    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, Tensor) and not isinstance(leaf, PretendTensor) for leaf in tree_leaves(tensors)):
            raise MixedDevices(f"{function.__name__} of all processes got a tensor of the CPU at {_site()}")
        return function(tensors, *args, **kwargs)

    return checked


def _host_of(device_type: str) -> str:
    """Return the type of the device that holds the data of tensors on a device of the given type."""
    return "cpu" if device_type == "cuda" else device_type


def _mm_to(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    return first.to(dtype) @ second.to(dtype)


def _mm_into(first: Tensor, second: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(first.to(dtype) @ second.to(dtype))


def _addmm_into(
    added: Tensor, first: Tensor, second: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    return out.copy_(beta * added + alpha * (first.to(dtype) @ second.to(dtype)))


def _histc(values: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Tensor:
    return torch.histc(values.float(), bins, low, high).to(values.dtype)


CUDA_ONLY = {
    "aten.histc.default": _histc,
    "aten.mm.dtype": _mm_to,
    "aten.bmm.dtype": _mm_to,
    "aten.mm.dtype_out": _mm_into,
    "aten.addmm.dtype_out": _addmm_into,
}
"""Emulations of operators for what only CUDA takes: 16-bit matrices with a float32 product, and whole numbers."""


def _site() -> str:
    """Return the innermost line outside torch and this file, as path:line."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        if path != __file__ and "/torch/" not in path and not path.startswith("<"):
            break
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno}"
