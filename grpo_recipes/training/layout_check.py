"""Verification of a layout for a model, before the layout is used.

A wrong attention mask changes log-probabilities without any error. So a layout is used only after three checks:

1. Nothing in the settings, the configuration and the modules of the model rules it out.
2. A few rows of the first micro-batch agree with TRL's own computation on rows with additional padding.
3. A few short rows agree in log-probabilities and gradients, in training mode, with an adapter that has an effect.

The third check is needed because a new adapter adds nothing, and new norms have one weight in every channel: on them
the rows of the first micro-batch agree in every layout, and prove nothing about later steps. So every trainable tensor
that holds one value is perturbed during the check. 16-bit weights are replaced by float32 copies where memory allows,
because a difference is then a mistake and not rounding.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from trl.models.utils import disable_gradient_checkpointing

from grpo_recipes.generation.agreement import REPEATED, disagreement, gradient_disagreement
from grpo_recipes.generation.models import (
    base_model,
    computes_in_float32,
    describe_dropout,
    eval_no_grad,
    in_float32,
    in_mode,
    kept_scores,
    rotary_of_the_longest,
    scaled_by_position,
    tensors_16bit,
    unfit_adapter,
)
from grpo_recipes.generation.rows import HostRows, PerToken, Rows, on_device
from grpo_recipes.generation.verified import FastWay
from grpo_recipes.process.messages import Announcer
from grpo_recipes.process.ranks import on_any_rank
from grpo_recipes.training.adapters import gathered
from grpo_recipes.training.packed_attention import AttentionSwitch
from grpo_recipes.training.packing import Layout, ModelCall, SpansIgnored
from grpo_recipes.training.segments import NotSegmented, SegmentedModels

if TYPE_CHECKING:
    from grpo_recipes.generation.models import FilledConfig

EXTRA_PADDING = 8
"""Columns of padding that the checks add on either side. The first micro-batch may have no padding of its own."""

COMPARED_ROWS = 4
"""Largest number of rows of the first micro-batch that are compared: two completions of each of two prompts."""

SAMPLE_TOKENS = 32
"""Number of tokens that the short rows keep of a prompt, and of a completion."""

CHUNK = 64
"""Number of tokens of a chunk in layers that scan a row, where the configuration does not state one."""

NOISE_AROUND_ZERO, NOISE_RELATIVE = 0.05, 0.1
"""Standard deviation of the perturbation of a tensor of zeros, and its share of any other value."""

LONGEST_SAMPLE = 1024
"""Largest number of tokens of a prompt, and of a completion, that are compared to leave a window or a chunk."""

COMPARED_WEIGHTS = 2**26
"""Number of weights whose gradients are compared, those of the smallest tensors. Every layer has some of them."""

VERIFIED_UNDER_SHARDING = frozenset({"gpt_oss", "granitemoehybrid", "lfm2", "mamba2", "qwen3_5_text"})
"""Model types that train to TRL's weights on two ranks with shared prompts, under ZeRO-3 and FSDP2
(`test_segments_distributed.py`)."""

ZERO3, FSDP1, FSDP2 = "zero3", "fsdp1", "fsdp2"
"""Ways in which the weights are split over ranks."""

Gradients = Sequence[Tensor | None]
"""Gradient of each compared parameter, None where the result does not depend on the parameter."""

Results = tuple[Tensor, Gradients]
"""Log-probabilities, (B, T), and gradients of a model call."""

Choice = tuple[Layout, str]
"""A layout, and the reason for which no more preferred layout was chosen, or ""."""

logger = get_logger(__name__)


@dataclass(frozen=True)
class _Trial:
    """Rows on which layouts are compared, and the way in which a layout is computed on them."""

    rows: Rows
    padded: ModelCall
    """Call of TRL's layout with additional padding."""
    model: nn.Module
    """Model that is called."""
    bare: nn.Module
    """The model inside accelerate's wrappers."""
    is_float32: bool
    where: str
    """Name of the rows in a message."""
    when: str = ""
    """Condition under which the results hold, for a message."""
    parameters: Sequence[nn.Parameter] = ()
    """Parameters whose gradients are compared."""
    in_columns: bool = True
    """True if the shared layout may keep TRL's columns where rows can't be trimmed."""


@dataclass(frozen=True)
class LayoutRules:
    """Settings of a run that decide, with a model, which layouts may be tried.

    The rules read a model's configuration and modules, and no weight: `plan` asks them before the model is loaded.
    """

    args: Any
    """`GRPOConfig`, or an object with its attributes."""
    router_loss: bool = False
    """True if the loss has the auxiliary loss of a mixture of experts."""
    padded_because: str = ""
    """Reason for which rows must stay padded, because something else reads them in the forward, or ""."""

    def allowed(self, bare: nn.Module, wanted: Layout, sharding: str) -> Choice:
        """Return the most preferred layout up to `wanted` that settings and model allow.

        Args:
            bare: the model inside accelerate's wrappers.
            wanted: most preferred layout allowed.
            sharding: way in which the weights are split over ranks, as `sharding_of` returns it.
        """
        reason = self._padded(bare)
        if reason:
            return Layout.PADDED, reason
        if scale := scaled_by_position(text_config(bare)):
            reason = f"attention is scaled by a token's place in the row, padding included ({scale})"
            allowed = wanted >= Layout.SHARED or wanted is Layout.SHARED_PADDED
            if not allowed or self.unshared(bare) or sharding:
                return Layout.PADDED, reason
            return Layout.SHARED_PADDED, reason
        reason = ""
        if wanted is Layout.PACKED:
            reason = self.unshared(bare) or unsupported(bare)
            if not reason:
                return wanted, ""
        if wanted in (Layout.SHARED, Layout.SHARED_PADDED, Layout.PACKED):
            unshared = self.unshared(bare) or unsupported_under_sharding(bare, sharding)
            if not unshared:
                return min(wanted, Layout.SHARED), reason
            return (Layout.PADDED if wanted is Layout.SHARED_PADDED else Layout.TRIMMED), reason or unshared
        return wanted, ""

    def unshared(self, bare: nn.Module) -> str:
        """Return why completions must not share a prompt, in any layout, or "" if nothing forbids it."""
        if self.router_loss:
            return "a shared prompt would count once in the router loss"
        if self.args.torch_compile:
            return "torch.compile would compile again for each shape of a micro-batch"
        return unshareable(bare)

    def _padded(self, bare: nn.Module) -> str:
        """Return why rows must keep TRL's width, or "" if nothing requires it."""
        if self.args.pad_to_multiple_of is not None:
            return "pad_to_multiple_of asks for the shapes that TRL makes"
        if self.padded_because:
            return self.padded_because
        if self.args.neftune_noise_alpha is not None:
            return "neftune_noise_alpha adds noise by the width of the rows, padding included"
        if getattr(getattr(bare, "active_peft_config", None), "velora_config", None) is not None:
            return "the adapter's gradient is compressed by an average over whole micro-batches (VeLoRA)"
        return depends_on_width(text_config(bare))


@dataclass
class LayoutCheck:
    """Choice of the layout of a model. All ranks choose the same layout, whatever their rows are.

    Under ZeRO-3 and FSDP a model call is a collective, so the ranks take each decision together.
    """

    accelerator: Accelerator
    args: FilledConfig
    run: Callable[[ModelCall, nn.Module, bool], PerToken]
    """Function of a model call, a model and `compute_entropy` to log-probabilities and entropies, each (B, T)."""
    attention: AttentionSwitch
    segmented: SegmentedModels
    rules: LayoutRules
    announcer: Announcer = field(default_factory=lambda: Announcer(logger.warning))

    def choose(
        self, model: nn.Module, bare: nn.Module, rows: Rows, wanted: Layout, *, in_columns: bool = True
    ) -> Layout | None:
        """Return the most preferred exact layout up to `wanted`, or None if no rank has a label to compare.

        Args:
            model: model that training calls.
            bare: the model inside accelerate's wrappers.
            rows: first rows that the model computes.
            wanted: most preferred layout allowed.
            in_columns: False if the layout must not be `SHARED_PADDED`, because other adapters use trimmed rows.
        """
        layout, reason = self.rules.allowed(bare, wanted, sharding_of(bare))  # check 1
        if layout is not Layout.PADDED:
            if not self._any_rank(bool(rows.host.labels.any())):
                return None
            # TRL's annotation leaves out models with an adapter.
            policy, kwargs = cast(PreTrainedModel, bare), self.args.gradient_checkpointing_kwargs
            with eval_no_grad(bare), disable_gradient_checkpointing(policy, kwargs):
                layout, doubt = self._verified(model, bare, rows, layout, in_columns)
                windowed = attention_window(text_config(bare)) is not None
                if layout is Layout.PACKED and windowed and not is_sharded(bare):
                    # Rows that leave the window can't be packed, but may share their prompts.
                    _, doubt_of_shared = self._verified(model, bare, rows, Layout.SHARED, in_columns=False)
                    self.segmented.of(bare).shared.record(doubt_of_shared)
            reason = doubt or reason
        self.attention.restore(bare)
        if layout < wanted:
            self._warn_once(f"micro-batches are {layout.described}, not {wanted.described}: {reason}")
        return layout

    def _verified(self, model: nn.Module, bare: nn.Module, rows: Rows, most: Layout, in_columns: bool) -> Choice:
        """Return the most preferred layout up to `most` that passes the checks 2 and 3."""
        reason = ""
        while True:
            found, doubt = self._compare_first_rows(model, bare, rows, most, in_columns)
            reason = reason or doubt
            if found is Layout.PADDED:
                return found, reason
            layout, doubt = self._compare_short_rows(model, bare, rows, found, in_columns)
            reason = doubt or reason
            # Check 3 has compared trimmed rows in any case, and check 2 as well.
            if layout in (found, Layout.PADDED, Layout.TRIMMED):
                return layout, reason
            most = layout

    def exceeds_kept_scores(self, model: nn.Module, width: int) -> bool:
        """Return True if attention keeps fewer scores than the rows of any rank have columns, which are TRL's."""
        name, number = kept_scores(text_config(model))
        if math.isinf(number) or not self._any_rank(width > number):
            return False
        self._warn_once(
            f"micro-batches of rows of more than {number:,} tokens are padded: attention keeps the `{name}` highest "
            "scores, and padding decides between equal ones"
        )
        return True

    def fits(self, model: nn.Module, rows: HostRows) -> np.ndarray:
        """Return which rows can be packed, (B,) bool: those without mask holes, inside the attention window."""
        mask = rows.completion_mask
        fits = np.logical_not(np.any(mask[:, 1:] > mask[:, :-1], axis=1))  # True after False ends a hole
        if not fits.all():
            self._warn_once("rows whose completion mask has holes are not packed")
        window = attention_window(text_config(model))
        if window is not None:
            # The spans know no window, so in longer rows a token would attend to keys outside of it.
            inside = rows.mask.sum(1) <= window
            if not inside.all():
                self._warn_once(f"rows of more than {window} tokens, the model's attention window, are not packed")
            fits = fits & inside
        return fits

    # ---- Check 2: the first micro-batch

    def _compare_first_rows(
        self, model: nn.Module, bare: nn.Module, rows: Rows, wanted: Layout, in_columns: bool
    ) -> Choice:
        """Return the most preferred layout up to `wanted` that agrees with padded rows on every rank.

        Four rows at their full lengths are compared: in TRL's layout, a large micro-batch may have no room in memory.
        """
        usable = rows.host.labels > 0
        if wanted is Layout.PACKED and (fits := usable & self.fits(bare, rows.host)).any():
            usable = fits
        rows = sample(rows, np.flatnonzero(usable))
        padded = _padded_call(rows, bare)
        trial = _Trial(
            rows,
            padded,
            model,
            bare,
            self._computes_in_float32(bare),
            "the first micro-batch",
            in_columns=in_columns and wanted is not Layout.TRIMMED and not self.rules.unshared(bare),
        )
        # Positions from the attention mask hide a dependence on padding, a table of positions does not: without room
        # for padding, agreement says nothing about such a model.
        if self._any_rank(padded.rows is rows and _learns_positions(base_model(bare))):
            doubt = "its positions are learned, and the rows leave no room to check whether padding matters"
            return self._in_columns(trial, doubt)
        return self._best(trial, wanted, self._observed(trial, padded))

    # ---- Check 3: a few short rows, in training mode, with gradients

    def _compare_short_rows(
        self, model: nn.Module, bare: nn.Module, rows: Rows, found: Layout, in_columns: bool
    ) -> Choice:
        """Return the most preferred layout up to `found` that agrees with padded rows on a few short rows."""
        sharded, device = is_sharded(bare), self.accelerator.device
        widen = False
        if sharded:
            self._warn_once("under ZeRO-3 and FSDP layouts are compared by their log-probabilities, not by gradients")
        else:
            widen = not self._any_rank(not fits_in_float32(bare, device))
            if not widen:
                self._warn_once(
                    "layouts are compared in 16-bit precision: the weights are quantized, or have no room in float32"
                )
        usable = rows.host.labels > 0
        if found is Layout.PACKED:
            usable &= self.fits(bare, rows.host)
        short = sample(rows, np.flatnonzero(usable), SAMPLE_TOKENS)
        if found in (Layout.SHARED, Layout.SHARED_PADDED):
            short = with_edges(short, *self._sample_lengths(bare, rows))
        full_precision = widen or self._computes_in_float32(bare)
        with self._widened(bare) if widen else nullcontext(), perturbed(bare):
            # A sharded model must be called through the wrappers that gather its weights, and no rank has its full
            # gradient. Any other is called without wrappers, because DDP's would wait for a backward pass.
            called, parameters = (model, []) if sharded else (bare, compared(bare))
            padded = _padded_call(short, bare)
            trial = _Trial(
                short,
                padded,
                called,
                bare,
                full_precision,
                "a few short rows",
                " once it has trained",
                parameters,
                in_columns and found is not Layout.TRIMMED and not self.rules.unshared(bare),
            )
            with in_training(bare, device):
                expected = self._compute(trial, trial.padded)
                if not self._any_rank(self._is_random(trial, expected)):
                    return self._best(trial, found, expected)
            # Results with random numbers cannot be compared, so the comparison is repeated in evaluation mode. No
            # prompt of such a model is shared: its completions would share the random numbers of the prompt.
            if found is Layout.SHARED_PADDED:
                return Layout.PADDED, "in training the model draws random numbers, which a shared prompt would share"
            layout, doubt = self._best(trial, Layout.TRIMMED, self._compute(trial, trial.padded))
        if not doubt and found.shares_prompts:
            doubt = "in training the model draws random numbers, which a shared prompt would share"
        return layout, doubt

    def _sample_lengths(self, bare: nn.Module, rows: Rows) -> tuple[int, int]:
        """Return the numbers of tokens of a prompt and a completion that leave the windows and chunks of a model."""
        config = text_config(bare)
        prompt = completion = 1
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - {"full_attention", "sliding_attention", "chunked_attention"}:
            chunks = [getattr(config, name, None) for name in ("chunk_size", "mamba_chunk_size")]
            chunk = max([CHUNK, *(size for size in chunks if isinstance(size, int))])
            prompt = completion = min(chunk, LONGEST_SAMPLE) + EXTRA_PADDING
        widest = rows.input_ids.size(1) - rows.logits_to_keep + (self.args.max_completion_length or 0)
        window = attention_window(config) or getattr(config, "attention_chunk_size", None)
        if window is not None and window < widest:
            prompt = max(prompt, min(window, LONGEST_SAMPLE) + EXTRA_PADDING)
        positions = getattr(config, "max_position_embeddings", None) or math.inf
        room = min(positions, kept_scores(config)[1]) - 2 * EXTRA_PADDING
        if prompt + completion > room:
            prompt = completion = max(int(room // 2), 0)
        return prompt, completion

    def _is_random(self, trial: _Trial, expected: Results) -> bool:
        """Return True if a second computation of the padded rows differs from `expected`."""
        before = random_state(self.accelerator.device)
        again, _ = self._compute(replace(trial, parameters=()), trial.padded)
        gap = (again - expected[0]).abs().max()
        if trial.is_float32:
            noisy = bool(gap > REPEATED)
        else:  # two 16-bit results may differ by rounding, unless random numbers were drawn
            noisy = bool(gap > 0) and not torch.equal(before, random_state(self.accelerator.device))
        return noisy or bool(_difference(trial, trial.rows, (again, expected[1]), expected))

    def _best(self, trial: _Trial, most: Layout, expected: Results) -> Choice:
        """Return the most preferred layout up to `most` whose results agree with `expected` on every rank."""
        if most is Layout.SHARED_PADDED:
            return self._in_columns(trial, "")
        doubt = self._doubt(trial, ModelCall(trial.rows, Layout.TRIMMED), expected)
        if doubt:
            return self._in_columns(trial, f"the results of this model depend on padding{trial.when} ({doubt})")
        doubts = []
        if most is Layout.PACKED:
            doubt = self._doubt_of_packed(trial, expected)
            if not doubt:
                return Layout.PACKED, ""
            doubts.append(doubt)
            refused = unsupported_under_sharding(trial.bare, sharding_of(trial.bare))
            most = Layout.TRIMMED if refused else Layout.SHARED
        layout = most
        if most is Layout.SHARED:
            doubt = self._doubt_of_segments(trial, Layout.SHARED, expected)
            if doubt:
                doubts.append(f"shared prompts give other results{trial.when} ({doubt})")
                layout = Layout.TRIMMED
        if layout is Layout.TRIMMED and not is_sharded(trial.bare):
            doubt = self._doubt_of_segments(trial, Layout.TRIMMED, expected)
        self.segmented.of(trial.bare).buckets.record(doubt)
        return layout, "; ".join(doubts)

    def _in_columns(self, trial: _Trial, reason: str) -> Choice:
        """Return the shared layout in TRL's columns if it agrees with TRL's rows on every rank, else the padded one."""
        if not trial.in_columns or is_sharded(trial.bare):
            return Layout.PADDED, reason
        # Padding on the right only: on the left it would change the positions. This model's positions count it.
        longest = getattr(text_config(trial.bare), "max_position_embeddings", None) or math.inf
        right = int(max(0, min(EXTRA_PADDING, longest - trial.rows.input_ids.size(1))))
        expected = self._observed(trial, ModelCall(trial.rows.widen(0, right), Layout.PADDED))
        doubt = self._doubt_of_segments(trial, Layout.SHARED_PADDED, expected)
        self.segmented.of(trial.bare).buckets.record(doubt)
        return (Layout.PADDED if doubt else Layout.SHARED_PADDED), reason

    def _doubt_of_packed(self, trial: _Trial, expected: Results) -> str:
        """Return why packed rows can't be used, or "" if their results agree with `expected` on every rank."""
        rows = trial.rows
        index = np.flatnonzero(self.fits(trial.bare, rows.host) & (rows.host.labels > 0))
        if not self._any_rank(len(index) > 0):
            return "no row of the first micro-batch can be packed"
        if len(index):
            index = _with_a_shared_prompt(rows, index)
            some = rows.select(index)
        else:  # this rank has nothing to compare, but must make the call that the others make
            index = np.zeros(1, dtype=np.int64)
            some = rows.select(index).unlabelled()
        log_probs = expected[0][on_device(index, expected[0].device)]
        doubt = self._doubt(trial, ModelCall(some, Layout.PACKED), (log_probs, expected[1]))
        return f"packed rows give other results{trial.when} ({doubt})" if doubt else ""

    def _doubt_of_segments(self, trial: _Trial, layout: Layout, expected: Results) -> str:
        """Return how rows in many buckets differ from `expected` on any rank, or "" within the tolerances."""
        some, log_probs = trial.rows, expected[0]
        index = np.flatnonzero(some.host.labels)
        if len(index):  # a rank without a label makes the call of the others
            index = _with_a_shared_prompt(some, index)
            some, log_probs = some.select(index), log_probs[on_device(index, log_probs.device)]
        launches = math.inf if is_sharded(trial.bare) else 0.0
        return self._doubt(trial, ModelCall(some, layout, launches), (log_probs, expected[1]))

    def _doubt(self, trial: _Trial, call: ModelCall, expected: Results) -> str:
        """Return how the results of a call differ from `expected` on any rank, or "" within the tolerances."""
        return FastWay(device=self.accelerator.device).check(
            lambda: _difference(trial, call.rows, self._compute(trial, call), expected),
            refusals=(SpansIgnored, NotSegmented),  # raised outside of a layer, so the ranks are still in step
            # Behind a cache that it was not written for, the code of a model may fail in any way.
            failures=(Exception,) if _has_segments(call) else (),
        )

    def _observed(self, trial: _Trial, call: ModelCall) -> Results:
        """Compute a call of TRL's layout, and learn from it how the model runs its decoder layers."""
        with self.segmented.of(trial.bare).observed():
            return self._compute(trial, call)

    def _compute(self, trial: _Trial, call: ModelCall) -> Results:
        """Return the log-probabilities, (B, T), and gradients of a model call."""
        # Checkpointing runs a layer, and with it the cache of its prompts, a second time.
        checkpoints = self.args.gradient_checkpointing and bool(trial.parameters) and _has_segments(call)
        options = self.args.gradient_checkpointing_kwargs
        policy = cast(PreTrainedModel, trial.bare)
        reentrant = checkpoints and bool((options or {}).get("use_reentrant", False))
        own = without_gradients(trial.bare) if reentrant else nullcontext()
        with torch.set_grad_enabled(bool(trial.parameters)), own:
            if checkpoints:
                policy.gradient_checkpointing_enable(options)
            try:
                log_probs = self.run(call, trial.model, False)[0][:, : trial.rows.logits_to_keep]
                return log_probs.detach(), gradients(log_probs, trial.parameters, reentrant=reentrant)
            finally:
                if checkpoints:
                    policy.gradient_checkpointing_disable()

    @contextmanager
    def _widened(self, bare: nn.Module) -> Iterator[None]:
        """Run a model in float32 inside this block."""
        with in_float32(bare, self.accelerator), self.attention.in_float32(bare):
            yield

    # ---- What the checks share

    def _computes_in_float32(self, bare: nn.Module) -> bool:
        return self.accelerator.mixed_precision == "no" and computes_in_float32(bare, self.accelerator.device)

    def _any_rank(self, flag: bool) -> bool:
        return on_any_rank(flag, self.accelerator.device)

    def _warn_once(self, sentence: str) -> None:
        self.announcer.once(sentence)


def _has_segments(call: ModelCall) -> bool:
    """Return True if the rows of a call may run in several segments."""
    return call.layout in (Layout.SHARED, Layout.SHARED_PADDED) or (
        call.layout is Layout.TRIMMED and call.launches < math.inf
    )


def _difference(trial: _Trial, rows: Rows, got: Results, expected: Results) -> str:
    """Return how two results for `rows` differ, or "" within the tolerances."""
    gap = (got[0] - expected[0]).abs()[rows.completion_mask.bool()].float()
    if gap.numel():
        mean, largest = float(gap.mean()), float(gap.max())
        doubt = disagreement(mean, largest, is_float32=trial.is_float32, where=trial.where)
        if doubt:
            return f"log-probabilities {doubt}"
    return gradient_disagreement(got[1], expected[1], is_float32=trial.is_float32)


# ---- Rows to compare


def sample(rows: Rows, index: np.ndarray, longest: int | None = None) -> Rows:
    """Return two completions of each of two prompts, cut to `longest` tokens on either side if it is given.

    The prompts are those of the rows at `index` that have several completions and most tokens. A single completion is
    taken twice, so that its prompt is shared too. Without an index, the result is one row without labels.
    """
    prompt = rows.input_ids.size(1) - rows.logits_to_keep
    left = 0 if longest is None else max(prompt - longest, 0)
    width = rows.logits_to_keep if longest is None else min(rows.logits_to_keep, longest)
    if not len(index):
        return rows.select(slice(1), left, width).unlabelled()
    some = rows.host.select(index, left, width)
    lengths = some.mask.sum(1)

    def preference(group: list[int]) -> tuple[bool, int]:
        return len(group) > 1, int(lengths[group].sum())

    groups = sorted(some.groups().values(), key=preference, reverse=True)
    chosen: list[int] = []
    for group in groups[:2]:
        chosen += (group * 2)[:2]
    return rows.select(index[chosen], left, width)


def with_edges(rows: Rows, prompt: int, completion: int) -> Rows:
    """Return rows with the tokens of a few rows in them, in the lengths at which a cache may be wrong.

    Args:
        rows: rows as `sample` returns them, of which the first two share a prompt.
        prompt: number of tokens of the longest prompt.
        completion: number of tokens of the longest completion.

    Returns:
        The rows of `sample`, a prompt of one token, a completion of one token, and if they are shorter than the longest
        lengths, the first prompt repeated up to its length, with completions of that length and of half of it.
    """
    host = rows.host
    if not host.labels.all():
        return rows  # this rank has no label to compare
    prompts, completions = host.prompts(), host.completions()
    long = np.resize(prompts[0], prompt)
    made = [
        *zip(prompts, completions, strict=True),
        (prompts[0][-1:], completions[0]),
        (prompts[0], completions[0][:1]),
    ]
    if prompt + completion > len(prompts[0]) + len(completions[0]):
        made += [(long, np.resize(completions[0], size)) for size in (completion, max(completion // 2, 1))]
    # The padding of these rows, where they have any: some models find it by its ID.
    padding = int(host.ids[~host.mask][0]) if not host.mask.all() else int(host.ids[0, -1])
    before = max(host.prompt_mask.shape[1], *(len(tokens) for tokens, _ in made))
    after = max(len(tokens) for _, tokens in made)
    ids = np.full((len(made), before + after), padding, dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, (left, right) in enumerate(made):
        for tokens, columns in (left, slice(before - len(left), before)), (right, slice(before, before + len(right))):
            ids[row, columns], mask[row, columns] = tokens, 1
    device = rows.input_ids.device
    return Rows(on_device(ids, device), on_device(mask, device), after)


def _with_a_shared_prompt(rows: Rows, index: np.ndarray) -> np.ndarray:
    """Return `index`, with the row of the longest completion twice if no two of its rows share a prompt.

    A prompt with one completion is packed as an ordinary row, and a comparison of ordinary rows proves nothing.
    """
    some = rows.host.select(index)
    if len(some.groups()) < len(index):
        return index
    return np.append(index, index[some.labels.argmax()])


def _padded_call(rows: Rows, model: nn.Module) -> ModelCall:
    """Return the call of TRL's layout with `EXTRA_PADDING` on either side, as far as the model has positions for it."""
    longest = getattr(text_config(model), "max_position_embeddings", None) or math.inf
    left = int(max(0, min(EXTRA_PADDING, longest - rows.input_ids.size(1))))
    right = int(max(0, min(EXTRA_PADDING, longest - rows.input_ids.size(1) - left)))
    wide = rows.widen(left, right) if left else rows
    return ModelCall(wide, Layout.PADDED)


# ---- Inspection of a model


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the language model."""
    return base_model(model).config.get_text_config()


def depends_on_width(config: Any) -> str:
    """Return why a model's results depend on the width of the rows, or "" if its configuration does not show it."""
    if rotary := rotary_of_the_longest(config):
        return f"a rotary table of type {rotary} depends on the longest row, padding included"
    return ""


def attention_window(config: Any) -> int | None:
    """Return the sliding window of a model's attention in tokens, or None if no layer has one."""
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or "sliding_attention" in kinds
    return getattr(config, "sliding_window", None) if slides else None


def unshareable(model: nn.Module) -> str:
    """Return why the completions of a prompt must not share it, or "" if nothing in the model forbids it."""
    base = base_model(model)
    if is_compiled(model):
        return "the model is compiled, and would be compiled again for each shape of a micro-batch"
    if reason := unfit_adapter(model):
        return reason
    if dropout := describe_dropout(base):
        return f"{dropout}, and a shared prompt would share one mask among its completions"
    return ""


def unsupported_under_sharding(model: nn.Module, sharding: str) -> str:
    """Return why a model's prompts are not shared through a cache, or "" if they may be.

    Args:
        model: the model inside accelerate's wrappers.
        sharding: way in which the weights are split over ranks, as `sharding_of` returns it.
    """
    # Only log-probabilities are compared there. A kernel that drops the gradient of a state would pass.
    kind = text_config(model).model_type
    if not sharding:
        return ""
    if sharding == FSDP1:
        return "shared prompts were verified under FSDP2, and not under FSDP1"
    if kind not in VERIFIED_UNDER_SHARDING:
        return f"the gradients of {kind} behind a shared prompt were not verified under ZeRO-3 and FSDP"
    return ""


def unsupported(model: nn.Module) -> str:
    """Return why this model cannot be packed, or "" if its configuration and modules show no reason."""
    base, config = base_model(model), text_config(model)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    parameters = inspect.signature(base.base_model.forward).parameters
    # These cases can pass the comparisons by chance, or fail inside the model, so they are ruled out first.
    if config is not base.config:
        return "the model is multimodal"
    if kinds:
        return f"the model has layers of {', '.join(sorted(kinds))}"
    if not base._can_set_attn_implementation():
        return f"the attention of {type(base).__name__} does not go through transformers' AttentionInterface"
    if not base._supports_sdpa:
        return f"the attention of {type(base).__name__} is not that of SDPA"
    if "position_ids" not in parameters or "kwargs" not in parameters:
        return f"the forward of {type(base.base_model).__name__} takes no position_ids or no further arguments"
    return ""


def _learns_positions(model: PreTrainedModel) -> bool:
    """Return True if the model has an embedding table other than that of its tokens."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return any(table is not model.get_input_embeddings() for table in tables)


def is_compiled(model: nn.Module) -> bool:
    """Return True if a model or a part of it was compiled, by `torch.compile` or in place by `compile()`."""
    return any(
        isinstance(module, OptimizedModule) or module._compiled_call_impl is not None for module in model.modules()
    )


def adapter_state(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the adapters that act in a model now, none if they are switched off."""
    if not isinstance(model, PeftModel):
        return ()
    # `active_adapters` still lists the adapters inside `disable_adapter()`: only the layers know.
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            return () if module.disable_adapters else tuple(model.active_adapters)
    return tuple(model.active_adapters)


def sharding_of(model: nn.Module) -> str:
    """Return how the weights are split over ranks, `ZERO3`, `FSDP1` or `FSDP2`, or "" if each rank holds all of them.

    A call of a model whose weights are split is a collective.
    """
    # FSDP1 wraps modules, and FSDP2 can ignore single parameters.
    if any(hasattr(module, "_fsdp_wrapped_module") for module in model.modules()):
        return FSDP1
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return FSDP2
    for parameter in model.parameters():
        if hasattr(parameter, "ds_id"):
            return ZERO3
        if isinstance(parameter, DTensor):
            return FSDP2
    return ""


def is_sharded(model: nn.Module) -> bool:
    """Return True if each rank holds only a part of the weights (ZeRO-3, FSDP)."""
    return bool(sharding_of(model))


# ---- State of a model during the third check


@contextmanager
def perturbed(model: nn.Module) -> Iterator[None]:
    """Add noise to each trainable tensor that holds one value, and restore its bits afterwards."""
    saved: list[tuple[nn.Parameter, Tensor]] = []
    # A fixed generator of its own: all ranks must hold the same weights, and the run's random state must not change.
    generator = torch.Generator().manual_seed(0)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(hasattr(parameter, "ds_id") for parameter in parameters) and not isinstance(model, PeftModel):
        parameters = []  # gathering each weight of a full model would take longer than a step
    try:
        for parameter in parameters:
            with gathered([parameter], write=True):
                values = _local(parameter)
                if not _holds_one_value(values):
                    continue
                saved.append((parameter, values.clone()))
                value = abs(float(values.flatten()[0]))
                size = NOISE_RELATIVE * value if value else NOISE_AROUND_ZERO
                values.add_((size * torch.randn(values.shape, generator=generator)).to(values))
        yield
    finally:
        # Copied back, and not subtracted: subtraction would leave rounding errors.
        for parameter, before in saved:
            with gathered([parameter], write=True):
                _local(parameter).copy_(before)


def _local(parameter: nn.Parameter) -> Tensor:
    """Return this rank's values of a parameter, outside autograd."""
    return parameter.to_local().data if isinstance(parameter, DTensor) else parameter.data


def _holds_one_value(values: Tensor) -> bool:
    if not values.numel() or not values.is_floating_point():
        return False
    first = values.flatten()[:1]
    # The first entries of most tensors already differ, and then the others are not read.
    return bool((values.flatten()[:64] == first).all()) and bool((values == first).all())


def fits_in_float32(model: nn.Module, device: torch.device) -> bool:
    """Return True if there is memory for float32 copies of the 16-bit weights, and a quarter more for short rows."""
    if getattr(base_model(model), "is_quantized", False):
        return False
    needed = 4 * sum(tensor.numel() for tensor in tensors_16bit(model))
    if not needed:
        return True
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        # torch's cache counts as used, although it can be given out again.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = psutil.virtual_memory().available
    return needed * 1.25 <= free


@contextmanager
def in_training(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model into training mode, and restore modes, buffers and the random state afterwards."""
    # Some models change buffers in training mode, such as the load statistics of a router.
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with in_mode(model, training=True), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for buffer, values in buffers:
            if not torch.equal(buffer, values):
                buffer.copy_(values)


def random_state(device: torch.device) -> Tensor:
    """Return the state of the generator that a model on `device` draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def compared(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters whose gradients are compared, the smallest first, if possible at least one."""
    trainable = sorted((parameter for parameter in model.parameters() if parameter.requires_grad), key=Tensor.numel)
    found, weights = trainable[:1], 0
    for parameter in trainable[1:]:
        weights += parameter.numel()
        if weights > COMPARED_WEIGHTS:
            break
        found.append(parameter)
    return found


def gradients(log_probs: Tensor, parameters: Sequence[nn.Parameter], *, reentrant: bool = False) -> Gradients:
    """Return the gradients of a fixed random combination of `log_probs`, (B, T).

    Args:
        log_probs: (B, T).
        parameters: parameters whose gradients are returned.
        reentrant: True if `log_probs` was computed with reentrant checkpointing, which computes all gradients or none.
    """
    if not parameters or not log_probs.requires_grad:
        return [None] * len(parameters)
    # Random weights, because errors of single tokens could cancel in the gradient of a sum.
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(log_probs.shape, generator=generator).to(log_probs)
    total = (log_probs * weights).sum()
    if not reentrant:
        return torch.autograd.grad(total, parameters, allow_unused=True)
    total.backward()
    return [parameter.grad for parameter in parameters]


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Take the gradients from a model's parameters inside this block, and give them back afterwards."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
