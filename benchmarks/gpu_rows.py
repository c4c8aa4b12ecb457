"""Parts that the sections of benchmarks/gpu.py share: device, sizes, models, and rows with a time limit each."""

from __future__ import annotations

import gc
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config
from workloads import EOS, PAD, VOCABULARY, Batch

SHAPES: dict[str, dict[str, int]] = {
    "0.5B": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2},
    "1.5B": {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2},
    "7B": {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4},
    "check": {"vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
              "num_attention_heads": 8, "num_key_value_heads": 2},
    "tiny": {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
"""Configurations of Qwen2.5, without weights. The head sizes are 64, 128, 128, 64 and 8."""

DENSE_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312, "L40S": 362, "L4": 121, "4090": 165}
"""Peak of dense bfloat16 by the name of a GPU, from NVIDIA's data sheets, in 1e12 operations per second."""

Row = dict[str, Any]


class Measurement(NamedTuple):
    """A row that is not measured yet."""

    head: Row
    """Cells that are known before."""
    measure: Callable[[], Row]
    """Function that returns the other cells."""


Section = Callable[["Bench"], Iterator[Measurement]]


class NotRun(Exception):
    """Reason why a row is not measured."""


class OutOfTime(BaseException):
    """The time limit of a row. Not an `Exception`, because libraries catch these."""


@dataclass(frozen=True)
class Bench:
    """Device, sizes and time limits of the measurements."""

    device: str
    tiny: bool
    steps: int
    policy: Path | None
    ends: float
    """End of the allowed time, on the monotonic clock."""
    row_seconds: float
    """Largest number of seconds of a row."""

    @property
    def shapes(self) -> list[str]:
        """Names of the models that are timed."""
        return ["tiny"] if self.tiny else ["0.5B", "1.5B"]

    @property
    def check_shape(self) -> str:
        """Name of the model whose results are compared."""
        return "tiny" if self.tiny else "check"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the timed models."""
        return torch.float32 if self.tiny else torch.bfloat16

    def model(self, shape: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Return a model of a shape with random weights, always the same."""
        torch.manual_seed(0)
        config = Qwen2Config(
            **SHAPES[shape], max_position_embeddings=2048, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None
        )
        # Drawn on the device in seconds, and in float32, so that models of two dtypes differ by rounding only.
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(config, **({"dtype": self.dtype} if shape == "7B" else {}))
        return model.to(dtype or self.dtype)

    def batch(self, workload: str, seed: int) -> Batch:
        """Return a step's batch, with few short completions for tiny sizes."""
        batch = Batch.draw(workload, seed)
        if self.tiny:
            batch.completions[:] = [[[*row[:5], EOS] for row in group] for group in batch.completions]
            batch.prompts[:] = [prompt[:12] for prompt in batch.prompts]
        return batch

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def result_of(self, row: Measurement) -> Row:
        """Measure a row, and return all of its cells.

        Returns:
            The row. If it was not measured, `result` says why. If it failed, `traceback` does.
        """
        seconds = min(self.row_seconds, self.ends - time.monotonic())
        started = time.perf_counter()
        try:
            if seconds <= 0:
                raise NotRun("no time is left")
            with time_limit(seconds):
                cells = row.measure()
            return {**row.head, **cells, "took, s": f"{time.perf_counter() - started:.1f}"}
        except (NotRun, OutOfTime, torch.OutOfMemoryError, ModuleNotFoundError) as reason:
            return {**row.head, "result": f"not run: {' '.join(str(reason).split())[:160]}"}
        except Exception:  # a row that fails must not prevent the later ones
            return {**row.head, "result": "FAILED", "traceback": traceback.format_exc()}
        finally:
            release()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the block after `seconds`, at the next line of Python."""

    def expire(*_: Any) -> None:
        raise OutOfTime(f"a row may take {seconds:.3g} s")

    handler = signal.signal(signal.SIGALRM, expire)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def release() -> None:
    """Release the GPU's memory between rows."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
