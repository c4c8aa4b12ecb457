"""Per-token log-probabilities in the cheapest layout that is exact for the model: packed, trimmed, or as TRL pads them.

A wrong attention mask gives wrong log-probabilities without any error, so a model is packed only after its configuration
has been inspected, its first micro-batch agrees with TRL's own computation, and a few short rows agree in their gradients
too, whatever has been learnt (`layout_check`). See docs/efficiency.md.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from trl import GRPOConfig
from trl.models.utils import disable_gradient_checkpointing

from grpo_recipes.generation.agreement import REPEATED, disagreement, gradient_disagreement
from grpo_recipes.generation.models import (
    base_model,
    eval_no_grad,
    has_dropout,
    in_float32,
    is_float32,
    rotary_of_the_longest,
    scaled_by_position,
)
from grpo_recipes.generation.rows import PerToken, Rows
from grpo_recipes.process.messages import Announcer
from grpo_recipes.process.ranks import on_any_rank
from grpo_recipes.training import layout_check as check
from grpo_recipes.training.packing import ATTENTION, Layout, PackedRow, order, pack, register_attention

EXTRA_PADDING = 8
"""Columns of padding added on either side for the check, so that a model whose result depends on padding is noticed even
where the first micro-batch has none."""

MAX_PACKED_SHARE = 0.95
"""Pack only where the packed row has at most this share of the tokens of trimmed rows; a rectangle is quicker per token."""

_ELSEWHERE = "on another rank"

_DOUBTS = {
    Layout.TRIMMED: "what this model computes depends on padding",
    Layout.PACKED: "packed rows give something else",
}

logger = get_logger(__name__)


@dataclass(frozen=True)
class ModelCall:
    """One model call: the layout chosen for it and what that layout computes."""

    layout: Layout
    rows: Rows
    """The rows asked for."""
    trimmed: Rows
    index: Tensor
    """The rows, of those asked for, that `trimmed` holds."""

    @property
    def tokens(self) -> int:
        """Tokens that run through the model, padding included."""
        if self.layout is Layout.PACKED:
            return self.rows.packed_tokens()
        return (self.rows if self.layout is Layout.PADDED else self.trimmed).input_ids.numel()


@dataclass
class LogProbs:
    """Per-token log-probabilities and entropies in TRL's (B, T) layout, computed in the cheapest layout that is exact.

    `plain` is TRL's own computation, (model, rows, compute_entropy) -> (log-probabilities, entropies), each (B, T), zero
    where there is no label.
    """

    accelerator: Accelerator
    args: GRPOConfig
    plain: Callable[[nn.Module, Rows, bool], PerToken]
    wanted: Layout
    """The most preferred layout that the user allows."""
    router_loss: bool = False
    plain_because: str = ""
    """Why TRL's rows must stay as they are, if they must: something else reads them in the forward."""
    _layouts: WeakKeyDictionary[nn.Module, Layout] = field(default_factory=WeakKeyDictionary)
    _checked: WeakKeyDictionary[nn.Module, set[tuple[str, ...]]] = field(default_factory=WeakKeyDictionary)
    """The active adapters under which the layout was found to be exact."""
    _bare: WeakKeyDictionary[nn.Module, ReferenceType[nn.Module]] = field(default_factory=WeakKeyDictionary)
    _announcer: Announcer = field(default_factory=lambda: Announcer(logger.warning))

    def __call__(self, model: nn.Module, rows: Rows, batch_size: int | None, compute_entropy: bool) -> PerToken:
        """Log-probabilities and entropies of `rows`, in ceil(B / batch_size) model calls on every rank."""
        size = len(rows.input_ids)
        chunk = batch_size or size
        layout = self.layout(model, rows, chunk)
        in_place = layout is Layout.PADDED or size <= chunk
        sequence = torch.arange(size, device=rows.input_ids.device) if in_place else order(rows, layout)
        calls = [self.model_call(model, rows.select(index), layout) for index in sequence.split(chunk)]
        log_probs, entropies = zip(*(self._run(call, model, compute_entropy) for call in calls), strict=True)
        back = sequence.argsort()
        return torch.cat(log_probs)[back], torch.cat(entropies)[back] if compute_entropy else None

    def layout(self, model: nn.Module, rows: Rows, chunk: int) -> Layout:
        """The layout that this model is run in, chosen on the first `chunk` rows it meets, for all ranks alike.

        Under other adapters, a reference's for one, it is another function, and is checked anew: one layout serves all.
        """
        bare = self.bare(model)
        state, checked = check.adapter_state(bare), self._checked.setdefault(bare, set())
        if state not in checked:
            found = self._choose_layout(model, bare, rows.select(slice(chunk)))
            if found is None:  # no row has a label to compare: run these plainly, and choose on the next rows
                return Layout.PADDED
            checked.add(state)
            self._layouts[bare] = found
        return self._layouts[bare]

    def bare(self, model: nn.Module) -> nn.Module:
        """The model inside accelerate's wrappers, looked for once: that takes 0.7 ms, many times a step."""
        known = self._bare.get(model)
        found = known() if known is not None else None
        if found is None:
            found = self.accelerator.unwrap_model(model)
            self._bare[model] = ref(found)
        return found

    def model_call(self, model: nn.Module, rows: Rows, layout: Layout) -> ModelCall:
        """The model call for `rows` in `layout`; trimmed rather than packed where that is impossible or saves little."""
        trimmed, index = rows.trimmed()
        if layout is Layout.PACKED and not (
            self._fits(self.bare(model), trimmed).all()
            and rows.packed_tokens() <= MAX_PACKED_SHARE * trimmed.input_ids.numel()
        ):
            layout = Layout.TRIMMED
        return ModelCall(layout, rows, trimmed, index)

    def _run(self, call: ModelCall, model: nn.Module, compute_entropy: bool) -> PerToken:
        if call.layout is Layout.PACKED:
            return self._run_packed(model, pack(call.rows), call.rows, compute_entropy)
        if call.layout is Layout.PADDED:
            return self.plain(model, call.rows, compute_entropy)
        log_probs, entropies = self.plain(model, call.trimmed, compute_entropy)
        return _scatter_rows(log_probs, call), _scatter_rows(entropies, call) if entropies is not None else None

    def _run_packed(self, model: nn.Module, packed: PackedRow, rows: Rows, compute_entropy: bool) -> PerToken:
        with self.accelerator.autocast():
            outputs = model(
                input_ids=packed.input_ids,
                position_ids=packed.position_ids,
                attention_mask=torch.ones_like(packed.input_ids),
                shift_labels=packed.labels,
                fused_lm_head=True,
                group_spans=packed.group_spans,
            )
        layers = text_config(self.bare(model)).num_hidden_layers
        attended = packed.group_spans.attended
        if attended != layers:
            raise SpansIgnored(f"{attended} of its {layers} layers keep the completions of a packed row apart")
        shape = (len(rows.input_ids), rows.logits_to_keep)

        def scatter(values: Tensor) -> Tensor:
            """(1, N), one value for each position of the row, to (B, T), zero where there is no label."""
            target = (packed.rows, packed.columns)
            return values.new_zeros(shape).index_put(target, values[0, packed.positions])

        return scatter(outputs.log_probs), scatter(outputs.entropy) if compute_entropy else None

    def _choose_layout(self, model: nn.Module, bare: nn.Module, rows: Rows) -> Layout | None:
        """Inspect the model, then compare the layout with TRL's plain rows; None if no rank has a label."""
        wanted = self._layouts.get(bare, self.wanted)
        found, reason = self._allowed(bare)
        found = min(found, wanted)
        if found is not Layout.PADDED:
            if not self._any_rank(bool(rows.completion_mask.any())):
                return None
            with eval_no_grad(bare), disable_gradient_checkpointing(bare, self.args.gradient_checkpointing_kwargs):
                found, doubt = self._verify(model, bare, rows, found)
                if found is not Layout.PADDED:
                    found, late = self._try_out(model, bare, rows, found)
                    doubt = late or doubt
            reason = doubt or reason
        if found is not Layout.PACKED:
            stock_attention(bare)
        if found < wanted:
            self.say_once(f"micro-batches are {found.name.lower()}, not {wanted.name.lower()}: {reason}")
        return found

    def _allowed(self, model: nn.Module) -> tuple[Layout, str]:
        """The most preferred layout that settings and model allow, and why it isn't the one wanted."""
        if self.args.pad_to_multiple_of is not None:
            return Layout.PADDED, "pad_to_multiple_of asks for the shapes that TRL makes"
        if self.plain_because:
            return Layout.PADDED, self.plain_because
        if self.args.neftune_noise_alpha is not None:
            return Layout.PADDED, "neftune_noise_alpha adds noise by the width of the rows, padding included"
        if reason := follows_the_width(text_config(model)):
            return Layout.PADDED, reason
        if getattr(getattr(model, "active_peft_config", None), "velora_config", None) is not None:
            return Layout.PADDED, "the adapter's gradient is compressed by an average over whole micro-batches (VeLoRA)"
        if self.wanted is not Layout.PACKED:
            return self.wanted, ""
        unsupported_because = unsupported(model)
        if self.router_loss:
            unsupported_because = "a packed row would count a prompt once in the router loss"
        elif self.args.torch_compile:
            unsupported_because = "torch.compile would compile each packed shape anew"
        return (Layout.TRIMMED, unsupported_because) if unsupported_because else (Layout.PACKED, "")

    def _verify(self, model: nn.Module, bare: nn.Module, rows: Rows, wanted: Layout) -> tuple[Layout, str]:
        """The best layout up to `wanted` that agrees with TRL's rows on every rank, and why it isn't `wanted`.

        Under ZeRO-3 and FSDP a model call is a collective, so the ranks decide each stage together, whatever their rows are.
        """
        wide = _widened(rows, bare)
        if self._any_rank(wide is rows and _learns_positions(base_model(bare))):
            return (
                Layout.PADDED,
                "its positions are learnt, and the rows leave no room to check whether padding matters",
            )
        expected = self.plain(model, wide, False)[0][:, : rows.logits_to_keep]
        got, _ = self._run(ModelCall(Layout.TRIMMED, rows, *rows.trimmed()), model, False)
        doubt = self._disagreement(got, expected, rows, bare)
        if self._any_rank(bool(doubt)):
            return Layout.PADDED, f"the log-probabilities of this model depend on padding ({doubt or _ELSEWHERE})"
        if wanted is not Layout.PACKED:
            return Layout.TRIMMED, ""
        packable = self._packable(bare, rows)
        if not self._any_rank(len(packable) > 0):
            return Layout.TRIMMED, "no row of the first micro-batch can be packed"
        packing_attention(bare)
        doubt = self._doubt_of_packing(model, bare, rows, packable, expected)
        if self._any_rank(bool(doubt)):
            return Layout.TRIMMED, doubt or f"packed rows give other log-probabilities ({_ELSEWHERE})"
        return Layout.PACKED, ""

    def _packable(self, bare: nn.Module, rows: Rows) -> Tensor:
        """The rows that can be packed and have a label."""
        return (self._fits(bare, rows) & rows.completion_mask.any(1)).nonzero().flatten()

    def _try_out(self, model: nn.Module, bare: nn.Module, rows: Rows, found: Layout) -> tuple[Layout, str]:
        """The best layout up to `found` on a few short rows, in log-probabilities and gradients, and why it isn't `found`.

        Tensors that hold one value are perturbed for it: a new adapter adds nothing, and agrees in every layout. As far as
        memory allows it is done in float32, where a difference is a mistake and no rounding.
        """
        sharded, device = check.is_sharded(bare), self.accelerator.device
        if sharded:  # a model call is a collective of all ranks, and gradients lie in parts
            widen = False
            self.say_once("under ZeRO-3 and FSDP layouts are compared by their log-probabilities, not by gradients")
        else:
            widen = not self._any_rank(not check.fits_in_float32(bare, device))
            if not widen:
                self.say_once("layouts are compared in 16 bit: the weights are quantised, or have no room in float32")
        whole = widen or self._has_whole_precision(bare)
        packable = self._packable(bare, rows) if found is Layout.PACKED else rows.completion_mask.any(1).nonzero()
        few = check.sample(rows, packable.flatten())
        wide = _widened(few, bare)
        target = model if sharded else bare

        def computed(call: ModelCall) -> tuple[Tensor, check.Gradients]:
            with torch.set_grad_enabled(bool(parameters)):
                log_probs = self._run(call, target, False)[0][:, : few.logits_to_keep]
                return log_probs.detach(), check.gradients(log_probs, parameters)

        def doubt_of(got: tuple[Tensor, check.Gradients], expected: tuple[Tensor, check.Gradients]) -> str:
            doubt = self._disagreement(got[0], expected[0], few, bare, whole)
            return (
                f"log-probabilities {doubt}" if doubt else gradient_disagreement(got[1], expected[1], is_float32=whole)
            )

        def best(up_to: Layout, expected: tuple[Tensor, check.Gradients]) -> tuple[Layout, str]:
            for layout in (Layout.TRIMMED, Layout.PACKED)[:up_to]:
                doubt = doubt_of(computed(ModelCall(layout, few, *few.trimmed())), expected)
                if self._any_rank(bool(doubt)):
                    return Layout(layout - 1), f"{_DOUBTS[layout]} once it has trained ({doubt or _ELSEWHERE})"
            return up_to, ""

        plain = ModelCall(Layout.PADDED, wide, wide, torch.arange(len(wide.input_ids)))
        with in_float32(bare, self.accelerator) if widen else nullcontext(), check.perturbed(bare):
            parameters = [] if sharded else check.compared(bare)
            with check.in_training(bare, device):
                before = check.random_state(device)
                expected, again = computed(plain), computed(plain)
                drew, gap = not torch.equal(before, check.random_state(device)), (again[0] - expected[0]).abs().max()
                noise = bool(gap > (REPEATED if whole else 0.0 if drew else math.inf))
                if not self._any_rank(noise or bool(doubt_of(again, expected))):
                    return best(found, expected)
            # Random numbers can't be compared: without them, and never in a packed row, whose prompt would share them.
            most, doubt = best(min(found, Layout.TRIMMED), computed(plain))
        noisy = "in training the model draws random numbers, which a packed prompt would share"
        return most, doubt or (noisy if found is Layout.PACKED else "")

    def _doubt_of_packing(
        self, model: nn.Module, bare: nn.Module, rows: Rows, packable: Tensor, expected: Tensor
    ) -> str:
        """How the `packable` of the rows differ from `expected`, (B, T), when packed; empty within the tolerance."""
        if len(packable):
            index = _with_a_shared_prompt(rows, packable)
            some = rows.select(index)
        else:  # nothing to compare on this rank, but it must make the call that the others make
            index = packable.new_zeros(1)
            some = rows.select(index).unlabelled()
        try:
            got, _ = self._run_packed(model, pack(some), some, False)
        except SpansIgnored as error:  # raised after the call, so that ranks stay in step
            return str(error)
        doubt = self._disagreement(got, expected[index], some, bare)
        return doubt and f"packed rows give other log-probabilities ({doubt})"

    def _any_rank(self, flag: bool) -> bool:
        return on_any_rank(flag, self.accelerator.device)

    def _has_whole_precision(self, model: nn.Module) -> bool:
        return is_float32(model) and self.accelerator.mixed_precision == "no"

    def _disagreement(
        self, got: Tensor, expected: Tensor, rows: Rows, model: nn.Module, whole: bool | None = None
    ) -> str:
        """By how much two computations differ where there are labels, as a phrase; empty within the tolerance.

        Without `whole`, the precision is the model's own, and the rows are those of the first micro-batch.
        """
        gap = (got - expected).abs()[rows.completion_mask.bool()].float()
        if not gap.numel():
            return ""
        where = "a few short rows" if whole is not None else "the first micro-batch"
        whole = self._has_whole_precision(model) if whole is None else whole
        return disagreement(float(gap.mean()), float(gap.max()), is_float32=whole, where=where)

    def _fits(self, model: nn.Module, rows: Rows) -> Tensor:
        """Which rows can be packed, (B,): their masks have no holes and they lie inside the model's attention window."""
        mask = rows.completion_mask
        whole = ~(mask[:, 1:] > mask[:, :-1]).any(1)  # a 1 behind a 0 ends a hole
        if not whole.all():
            self.say_once("rows whose completion mask has holes are not packed")
        window = attention_window(text_config(model))
        if window is None:
            return whole
        inside = rows.attention_mask.sum(1) <= window
        if not inside.all():
            self.say_once(f"rows of more than {window} tokens, the model's attention window, are not packed")
        return whole & inside

    def say_once(self, sentence: str) -> None:
        """Log that a cheaper layout is not used, once, on the main process."""
        self._announcer.once(sentence, sentence)


class SpansIgnored(RuntimeError):
    """An attention layer did not go through `packed_attention`, or added a float mask."""


def _with_a_shared_prompt(rows: Rows, index: Tensor) -> Tensor:
    """`index`, with the row of the longest completion twice if no two of its rows share a prompt.

    A prompt with one completion is packed as the plain row that it is, and comparing those proves nothing.
    """
    some = rows.select(index)
    if len(set(some.prompt_numbers())) < len(index):
        return index
    return torch.cat([index, index[some.completion_mask.sum(1).argmax()][None]])


def _scatter_rows(values: Tensor, call: ModelCall) -> Tensor:
    """Results of trimmed rows, (rows, width), in the layout of all rows, (B, T), zero where nothing was computed."""
    wide = pad(values, (0, call.rows.logits_to_keep - values.size(1)))
    return wide.new_zeros(len(call.rows.input_ids), wide.size(1)).index_copy(0, call.index, wide)


def _widened(rows: Rows, model: nn.Module) -> Rows:
    """The rows with `EXTRA_PADDING` on either side, as far as the model has positions for it."""
    longest = getattr(text_config(model), "max_position_embeddings", None) or math.inf
    left = int(max(0, min(EXTRA_PADDING, longest - rows.input_ids.size(1))))
    right = int(max(0, min(EXTRA_PADDING, longest - rows.input_ids.size(1) - left)))
    return rows.widen(left, right) if left else rows


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model."""
    return base_model(model).config.get_text_config()


def packing_attention(model: nn.Module) -> None:
    """Let the model's attention keep the completions of a packed row apart."""
    register_attention()
    base_model(model).set_attn_implementation(ATTENTION)


def has_packing_attention(model: nn.Module) -> bool:
    """Whether the model's attention keeps the completions of a packed row apart."""
    return text_config(model)._attn_implementation == ATTENTION


def stock_attention(model: nn.Module) -> None:
    """Give the model stock SDPA back if it has ours."""
    if has_packing_attention(model):
        base_model(model).set_attn_implementation("sdpa")


def follows_the_width(config: Any) -> str:
    """Why the results of a model with this configuration follow the width of the rows; empty if nothing in it says so."""
    if rotary := rotary_of_the_longest(config):
        return f"a rotary table of type {rotary} depends on the longest row, padding included"
    if scale := scaled_by_position(config):
        return f"attention is scaled by a token's place in the row, padding included ({scale})"
    if getattr(config, "index_topk", None):
        return "attention keeps the index_topk highest scores, and padding decides between equal ones"
    return ""


def attention_window(config: Any) -> int | None:
    """The sliding window of a model's attention in tokens, None without one."""
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or "sliding_attention" in kinds
    return getattr(config, "sliding_window", None) if slides else None


def unsupported(model: nn.Module) -> str | None:
    """Why this model can't be packed, as far as its configuration and modules tell; None if they raise no objection."""
    base, config = base_model(model), text_config(model)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    parameters = inspect.signature(base.base_model.forward).parameters
    if config is not base.config:
        return "the model is multimodal"
    if kinds:
        return f"the model has layers of {', '.join(sorted(kinds))}"
    if not base._can_set_attn_implementation():
        return f"the attention of {type(base).__name__} does not go through transformers' AttentionInterface"
    if config._attn_implementation not in ("sdpa", ATTENTION):
        return f"its attention implementation is {config._attn_implementation}, not sdpa"
    if "position_ids" not in parameters or "kwargs" not in parameters:
        return f"the forward of {type(base.base_model).__name__} takes no position_ids or no further arguments"
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        return "the adapter puts virtual tokens before the prompt"
    if getattr(getattr(model, "active_peft_config", None), "alora_invocation_tokens", None):
        return "the adapter acts from its invocation tokens to the end of a row (aLoRA)"
    if has_dropout(base):
        return "the model has dropout, and a packed prompt would share one mask among its completions"
    return None


def _learns_positions(model: PreTrainedModel) -> bool:
    """Whether the model has an embedding table other than that of its tokens."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return any(table is not model.get_input_embeddings() for table in tables)
