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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from transformers import TrainerCallback, TrainerState, TrainingArguments

CHUNK = 2**25
"""Number of elements that are updated at once. Temporaries take 9 bytes for each."""

_LOW = "low_bits"
"""Key of the dropped bits in the state of a parameter."""

SAMPLE = 4096
"""Number of sampled weights: a share of 5 % is then known to 0.4 percentage points from one step."""
TENSORS = 64
"""Number of draws of a parameter. Reading one more tensor costs more time than reading more places of a tensor."""

CHANGED, EXPECTED = "updates/changed", "updates/expected"


class AdamWBF16(torch.optim.Optimizer):
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019), in float32, for bfloat16 or float32 weights.

    The step is that of torch's fused kernel on float32 numbers, to the bit. The state takes 10 bytes per bfloat16
    weight: `exp_avg` and `exp_avg_sq` in float32, and `low_bits`, 16 bits under the dtype bfloat16, which distributed
    checkpoints can gather with every backend. Float32 weights take the same step without `low_bits`. With DTensors
    (FSDP2), each rank updates its own shard.

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
            parts: list[_ParameterRows] = []
            for param in group["params"]:
                if param.grad is not None:
                    parts += self._parts(param)
            for bucket in _buckets(parts):
                _update(bucket, group)
        return loss

    def _parts(self, param: Tensor) -> list[_ParameterRows]:
        """Return the parts of a parameter, of at most `CHUNK` elements if its rows allow it, for their next step."""
        state = self.state[param]
        if not state:
            # Float32 whatever the weights are, and a tensor on the CPU, as torch's own optimizers keep them in
            # checkpoints.
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
            if param.dtype == torch.bfloat16:
                state[_LOW] = torch.zeros_like(param)
        state["step"] += 1
        # A scalar parameter has no rows to split.
        tensors = [param, param.grad, *(state[name] for name in ("exp_avg", "exp_avg_sq", _LOW) if name in state)]
        local = [torch.atleast_1d(_local(tensor)) for tensor in tensors]
        rows = max(1, CHUNK // max(1, local[0][:1].numel()))
        # On a CPU, torch's kernel rounds the elements after the last full vector of a tensor differently. A multiple of
        # 16 rows ends with a full vector.
        rows -= rows % 16 if rows > 16 else 0
        parts = zip(*(tensor.split(rows) for tensor in local), strict=True)
        return [_ParameterRows(float(state["step"]), *part) for part in parts]

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
    betas = args.adam_beta1, args.adam_beta2
    return AdamWBF16, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}


class _ParameterRows(NamedTuple):
    """Rows of a parameter, or all of it, with the same rows of its state. All tensors are views of one shape."""

    step: float
    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    low_bits: Tensor | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """Properties that are equal among parts that take a step together."""
        return self.step, self.weight.dtype, self.weight.device


def _buckets(parts: Iterable[_ParameterRows]) -> Iterator[list[_ParameterRows]]:
    """Return an iterator over lists of parts that take a step together, of at most `CHUNK` elements if possible."""
    bucket: list[_ParameterRows] = []
    size = 0
    for part in parts:
        if bucket and (part.kind != bucket[0].kind or size + part.weight.numel() > CHUNK):
            yield bucket
            bucket, size = [], 0
        bucket.append(part)
        size += part.weight.numel()
    if bucket:
        yield bucket


def _update(bucket: list[_ParameterRows], group: dict[str, Any]) -> None:
    """Make one step of torch's fused AdamW on the float32 numbers of a bucket, in place."""
    weights, grads = [part.weight for part in bucket], [part.grad for part in bucket]
    low_bits = [part.low_bits for part in bucket if part.low_bits is not None]
    flat, float32 = merge(weights, low_bits) if low_bits else (None, weights)
    # The function counts a step itself, in tensors on the device.
    before = torch.full((len(bucket),), bucket[0].step - 1, device=weights[0].device)
    adamw(
        float32,
        _copied(grads, torch.float32)[1] if low_bits else grads,
        [part.exp_avg for part in bucket],
        [part.exp_avg_sq for part in bucket],
        [],
        list(before.unbind()),
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )
    if flat is not None:
        split_into(flat, weights, low_bits)


def merge(weights: list[Tensor], low_bits: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return float32 numbers with bfloat16 weights as the rounded upper 16 bits, and `low_bits` as the signed rest.

    Returns:
        All numbers, (elements,), and views of them with the shapes of the weights.
    """
    flat, views = _copied(weights, torch.float32)
    rest, _ = _copied([bits.view(torch.int16) for bits in low_bits], torch.int32)
    # A zero with negative bits is no float32. It exists only if something else has set the weight to 0.
    rest.mul_(flat != 0)
    flat.view(torch.int32).add_(rest)
    return flat, views


def split_into(flat: Tensor, weights: list[Tensor], low_bits: list[Tensor]) -> None:
    """Write float32 numbers, (elements,), into weights and `low_bits`, inverse to `merge`.

    A weight is the nearest bfloat16, halfway away from 0. The numbers are overwritten. Infinity becomes NaN.
    """
    bits, sizes = flat.view(torch.int32), [weight.numel() for weight in weights]
    # The lower half, read as a signed number, is what the nearest upper half leaves.
    halves = [part.view(weight.shape) for part, weight in zip(bits.split(sizes), weights, strict=True)]
    torch._foreach_copy_([low.view(torch.int16) for low in low_bits], halves)
    # Halfway between two bfloat16 numbers, a conversion would choose the even one. The last bit makes it the larger.
    bits.bitwise_or_(1)
    torch._foreach_copy_(weights, [part.view(torch.float32) for part in halves])


def _copied(tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Return copies of tensors in one buffer, (elements,), and views of them with the shapes of the tensors."""
    sizes = [tensor.numel() for tensor in tensors]
    flat = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
    views = [part.view(tensor.shape) for part, tensor in zip(flat.split(sizes), tensors, strict=True)]
    torch._foreach_copy_(views, tensors)
    return flat, views


@dataclass(frozen=True)
class WeightSample:
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
        self.sample: list[WeightSample] = []
        self.before = torch.empty(0)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Draw the sample. A second training of the same trainer may have another optimizer."""
        groups = kwargs["optimizer"].param_groups
        self.sample = draw_sample(chain.from_iterable(group["params"] for group in groups))

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
        # |update| / spacing, with spacing = 2^(exponent - significant bits), and eps = 2^(1 - significant bits).
        bits = [torch.full_like(part.places, 1 - int(math.log2(torch.finfo(part.dtype).eps))) for part in self.sample]
        expected = torch.ldexp(update, torch.cat(bits) - torch.frexp(self.before).exponent).clamp(max=1)
        # frexp gives 0 the exponent 0, the spacing of a weight of 1. In truth any update moves a weight of 0.
        expected = torch.where(self.before == 0, 1.0, expected)
        expected = torch.where(moves, expected, 0.0)
        counts = torch.stack([moves, changed & moves, expected]).sum(dim=1).tolist()
        if counts[0]:
            self.metrics[CHANGED].append(counts[1] / counts[0])
            self.metrics[EXPECTED].append(counts[2] / counts[0])


def draw_sample(parameters: Iterable[Tensor]) -> list[WeightSample]:
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
        sample.append(WeightSample(trained[index], places, trained[index].dtype))
    return sample


def stored_values(sample: list[WeightSample]) -> Tensor:
    """Return the present values of the sampled weights, (`SAMPLE`,), float32."""
    return torch.cat([part.take(part.parameter.detach()) for part in sample]) if sample else torch.empty(0)


def _adamw_update(sample: list[WeightSample], before: Tensor, optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Return |update| of AdamW's last step for the sampled weights, or None for an optimizer without AdamW's moments.

    Call it after the step: moments, step count and learning rate are then those that the step used.
    """
    updates = []
    settings = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    values = before.split([len(part.places) for part in sample])
    corrections: dict[int, tuple[float, float]] = {}
    for part, value in zip(sample, values, strict=True):
        group, state = settings[id(part.parameter)], optimizer.state.get(part.parameter, {})
        if part.parameter.grad is None:  # the step left it as it is, whatever its moments of earlier steps
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


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that FSDP2 shards, and any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)
