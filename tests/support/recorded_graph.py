"""Capture and replay of operators on a CPU, as a CUDA graph does it on a GPU: tests of what a graph would compute.

A replay runs the recorded operators again on the same tensors. As with a graph, Python does not run, so a number, a
shape or a branch is that of the capture. A captured operator whose result the host waits for is an error.

It cannot show that each kernel of a GPU can be captured, nor that the memory of a graph is kept apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph(TorchDispatchMode):
    """Operators that ran inside the block, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record it."""
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        if not func.is_view:  # a view shows what is written to its base
            self.operators.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Run the operators again, each with the tensors of the capture, and write to those that it returned."""
        for func, args, kwargs, result in self.operators:
            again = func(*args, **kwargs)
            for to, of in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(to, Tensor):
                    to.copy_(of)


def recorded_graph(step: Callable[[], None], _: torch.device | None = None) -> Callable[[], None]:
    """Stand in for `captured.cuda_graph`."""
    graph = RecordedGraph()
    with graph:
        step()
    # A capture runs no kernel, and the recording has: the first replay is done.
    pending = [lambda: None]

    def replay() -> None:
        """Replay the step."""
        (pending.pop() if pending else graph.replay)()

    return replay
