"""AdamW for bfloat16 weights whose updates survive rounding, and a measure of how many updates do.

`AdamWBF16` keeps the 16 bits that bfloat16 drops beside each weight. A bfloat16 weight and its 16 bits are together the
float32 number that AdamW updates, as in Split-SGD (Kalamkar et al. 2019, arXiv:1905.12322, section 5). The moments are
float32: in bfloat16 a second moment cannot decay at beta2 = 0.999, because a thousandth is less than half a unit in its
last place.

`UpdateSample` logs, for any optimizer, the share of the trained weights whose stored value a step changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerState, TrainingArguments

CHUNK = 2**22
"""Number of elements of a parameter that are updated at once. Temporaries take a few times 4 bytes of this number."""

SAMPLE = 4096
"""Number of sampled weights: a share of 5 % is then known to 0.4 percentage points from one step."""
TENSORS = 64
"""Number of draws of a parameter. Reading one more tensor costs more time than reading more places of a tensor."""

CHANGED, EXPECTED = "updates/changed", "updates/expected"


class AdamWBF16(torch.optim.Optimizer):
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019), in float32, for bfloat16 or float32 weights.

    The state takes 10 bytes per bfloat16 weight: `exp_avg` and `exp_avg_sq` in float32, and `low_bits` in int16.
    Float32 weights take the same step without `low_bits`. With DTensors (FSDP2), each rank updates its own shard.

    Raises:
        TypeError: a parameter has another dtype.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, or raise `TypeError` for a dtype other than bfloat16 and float32."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.dtype not in (torch.bfloat16, torch.float32):
                raise TypeError(f"adamw_bf16 trains bfloat16 and float32 parameters, not {param.dtype}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and return the loss of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            # Float32 whatever the weights are, and a tensor on the CPU, as torch's own optimizers keep them in
            # checkpoints.
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
            if param.dtype == torch.bfloat16:
                state["low_bits"] = torch.zeros_like(param, dtype=torch.int16)
        state["step"] += 1
        step = float(state["step"])
        tensors = [param, param.grad, state["exp_avg"], state["exp_avg_sq"]]
        if "low_bits" not in state:
            for weight, grad, mean, square in _chunks(tensors):
                _adamw(weight, grad, mean, square, group, step)
            return
        for weight, grad, mean, square, low_bits in _chunks([*tensors, state["low_bits"]]):
            float32 = merge(weight, low_bits)
            _adamw(float32, grad, mean, square, group, step)
            split_into(float32, weight, low_bits)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state with the dtypes that it was saved with."""
        super().load_state_dict(state_dict)
        # torch has cast the moments and the bits to the dtype of the weights. In bfloat16 both would lose their values,
        # and a resumed run would differ from an uninterrupted one without any error.
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, param in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if name != "step":
                    self.state[param][name] = value.to(param.device)


def adamw_bf16(args: TrainingArguments) -> tuple[type[AdamWBF16], dict[str, Any]]:
    """Return the value of transformers' `optimizer_cls_and_kwargs`. Parameter groups bring their own weight decay."""
    return AdamWBF16, {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }


def merge(weight: Tensor, low_bits: Tensor) -> Tensor:
    """Return float32 numbers with bfloat16 weights as the rounded upper 16 bits, and `low_bits` (int16) as the rest."""
    # A zero with negative bits is no float32 of the same sign. It exists only if something else has set the weight to
    # 0.
    low_bits = low_bits.masked_fill((weight == 0) & (low_bits < 0), 0)
    high = weight.view(torch.int16).to(torch.int32) << 16
    return high.add_(low_bits).view(torch.float32)


def split_into(float32: Tensor, weight: Tensor, low_bits: Tensor) -> None:
    """Write float32 numbers into bfloat16 weights (nearest, halfway away from 0) and `low_bits`, inverse to `merge`."""
    # One NaN for all: the addition below would overflow the bits of the largest NaN, and leave a number in its place.
    bits = float32.masked_fill(float32.isnan(), math.nan).view(torch.int32)
    high = (bits + 0x8000) >> 16
    weight.copy_(high.to(torch.int16).view(torch.bfloat16))
    low_bits.copy_(bits - (high << 16))


def _adamw(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, group: dict[str, Any], step: float
) -> None:
    """Make one step of `torch.optim.AdamW` on float32 numbers, in place.

    The operations and their order are torch's. Any other order rounds differently, and could not be compared bit by
    bit.
    """
    beta1, beta2 = group["betas"]
    grad = grad.to(torch.float32)
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
    weight.addcdiv_(exp_avg, denominator, value=-group["lr"] / (1 - beta1**step))


def _chunks(tensors: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Return an iterator over chunks of rows of this rank's part of tensors of one shape. Chunks are views."""
    # A scalar parameter has no rows to split.
    local = [torch.atleast_1d(_local(tensor)) for tensor in tensors]
    rows = max(1, CHUNK // max(1, local[0][:1].numel()))
    return zip(*(tensor.split(rows) for tensor in local), strict=True)


@dataclass(frozen=True)
class Sampled:
    """A trained parameter and the places where its values are sampled."""

    parameter: Tensor
    places: Tensor
    """Flat indices into this rank's part of the parameter, (n,), int64."""
    dtype: torch.dtype
    """Dtype of the parameter when the sample was drawn. A later cast is a loss that the metrics should show."""

    def take(self, tensor: Tensor) -> Tensor:
        """Return the sampled entries of a tensor of the parameter's shape, (n,), float32."""
        return torch.take(_local(tensor), self.places).float()


class UpdateSample(TrainerCallback):
    """Callback that logs the share of sampled weights that a step changed, and the share expected without rounding.

    `updates/changed` is the share whose stored value differs, among the weights that the optimizer was to move.
    `updates/expected` is the mean over the same weights of min(1, |update| / spacing of the dtype at the weight), where
    the update is AdamW's, computed from its own moments. If the part that is rounded off is kept for later steps, this
    many weights change. For an optimizer without these moments, only `updates/changed` is logged, over all sampled
    weights. Each rank samples its own shard and waits for no other.
    """

    def __init__(self, metrics: MutableMapping[str, list[float]]) -> None:
        self.metrics = metrics
        self.sample: list[Sampled] = []
        self.before = torch.empty(0)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Draw the sample. A second training of the same trainer may have another optimizer."""
        self.sample = draw_sample(
            parameter for group in kwargs["optimizer"].param_groups for parameter in group["params"]
        )

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Store the values before the step."""
        # At the beginning of the step, and not just before the update: generation may cast the weights in place.
        self.before = stored_values(self.sample)

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Compare the values after the update, and log the shares."""
        optimizer = kwargs["optimizer"]
        # accelerate sets this where a gradient scaler found infinities: the weights did not change, and nothing was
        # lost.
        if not self.sample or getattr(optimizer, "step_was_skipped", False):
            return
        changed = stored_values(self.sample) != self.before
        update = _adamw_update(self.sample, self.before, optimizer)
        if update is None:
            self.metrics[CHANGED].append(float(changed.float().mean()))
            return
        moves = update > 0
        # |update| / spacing, with spacing = 2^(exponent - significant bits).
        exponent = torch.frexp(self.before).exponent
        bits = torch.cat([torch.full_like(part.places, _significant_bits(part.dtype)) for part in self.sample])
        expected = torch.ldexp(update, bits - exponent).clamp(max=1)
        # frexp gives 0 the exponent 0, the spacing of a weight of 1. In truth any update moves a weight of 0.
        expected = torch.where(self.before == 0, 1.0, expected)
        counts = torch.stack([moves.sum(), (changed & moves).sum(), (expected * moves).sum()]).tolist()
        if counts[0]:
            self.metrics[CHANGED].append(counts[1] / counts[0])
            self.metrics[EXPECTED].append(counts[2] / counts[0])


def draw_sample(parameters: Iterable[Tensor]) -> list[Sampled]:
    """Return a sample of `SAMPLE` weights of this rank's part of the parameters, the same one in every run.

    `TENSORS` parameters are drawn with probabilities proportional to their sizes, and equally many places in each, so
    every weight has the same probability.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad and _local(parameter).numel()]
    if not trained:
        return []
    ends = torch.tensor([_local(parameter).numel() for parameter in trained]).cumsum(0)
    # A generator of its own: draws from the global one would change what the run samples.
    generator = torch.Generator().manual_seed(0)
    # Parameters before places: sampling all places independently would read most of the tensors of a model.
    drawn = torch.searchsorted(ends, torch.randint(int(ends[-1]), (TENSORS,), generator=generator), right=True)
    sample = []
    for index, times in zip(*(tensor.tolist() for tensor in drawn.unique(return_counts=True)), strict=True):
        local = _local(trained[index])
        places = torch.randint(local.numel(), (times * SAMPLE // TENSORS,), generator=generator).to(local.device)
        sample.append(Sampled(trained[index], places, trained[index].dtype))
    return sample


def stored_values(sample: list[Sampled]) -> Tensor:
    """Return the present values of the sampled weights, (`SAMPLE`,), float32."""
    return torch.cat([part.take(part.parameter.detach()) for part in sample]) if sample else torch.empty(0)


def _adamw_update(sample: list[Sampled], before: Tensor, optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Return |update| of AdamW's last step for the sampled weights, or None for an optimizer without AdamW's moments.

    Call it after the step: moments, step count and learning rate are then those that the step used.
    """
    updates = []
    settings = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    values = before.split([len(part.places) for part in sample])
    corrections: dict[int, tuple[float, float]] = {}
    for part, value in zip(sample, values, strict=True):
        group, state = settings[id(part.parameter)], optimizer.state.get(part.parameter, {})
        if not state and part.parameter.grad is None:
            updates.append(torch.zeros_like(value))
            continue
        if not {"exp_avg", "exp_avg_sq", "step"} <= state.keys() or "betas" not in group:
            return None
        # All parameters of a group have made the same number of steps. On a GPU, reading it waits for the device.
        if id(group) not in corrections:
            step = float(state["step"])
            corrections[id(group)] = (1 - group["betas"][0] ** step, 1 - group["betas"][1] ** step)
        first, second = corrections[id(group)]
        mean, square = part.take(state["exp_avg"]) / first, part.take(state["exp_avg_sq"]) / second
        decayed = value * group.get("weight_decay", 0.0)
        # A weight that never had a gradient (the embedding of an unused token) is no measure, even if weight decay
        # moves it.
        updates.append(group["lr"] * (mean / (square.sqrt() + group["eps"]) + decayed).abs() * (mean != 0))
    return torch.cat(updates)


def _significant_bits(dtype: torch.dtype) -> int:
    """Return the number of significant bits: 24 for float32, 8 for bfloat16."""
    return 2 - math.frexp(torch.finfo(dtype).eps)[1]


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that FSDP2 shards, and any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)
