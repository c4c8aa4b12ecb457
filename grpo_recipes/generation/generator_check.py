"""Is the generator the policy? Comparison of the log-probabilities that tokens were sampled with, and the policy's.

Weights that never reach an engine, an adapter that is applied twice, a cache with a mistake: each samples from another
distribution without any error, and the run goes on and learns little. Every generator gives the log-probability of each
token that it samples. For a few rows of each batch these are compared with a forward of the policy. If they differ by
more than the dtypes explain, and on the first batches of a launch, they are also compared with hypotheses about what
else may have generated (`hypotheses.py`, `agreement.py`). Logits processors act after these log-probabilities, so they
are compared with those of the user's settings (`ProcessorComparison`). See docs/generation-check.md.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers.generation import GenerationMode

from grpo_recipes.generation.agreement import (
    BFLOAT16,
    CEILING,
    EXPLAINED,
    MIN_TOKENS,
    NO_AUTOCAST,
    OTHER_COMPUTATIONS,
    OTHER_WEIGHTS,
    UNPADDED,
    UNPROCESSED,
    UNUSUAL,
    Conclusion,
    Evidence,
    Fit,
    conclude,
    disagreement,
)
from grpo_recipes.generation.hypotheses import PROCESSED_TOKENS, Adapters, Processing, Scorer, hypotheses
from grpo_recipes.generation.models import computes_in_float32, describe_nonfinite
from grpo_recipes.generation.rows import PerToken, Rows
from grpo_recipes.generation.sampling_settings import ProcessorComparison
from grpo_recipes.process.faults import NotFinite, NotThePolicy
from grpo_recipes.process.messages import Announcer

if TYPE_CHECKING:
    from grpo_recipes.generation.models import TRLTrainer

COMPARED = 2
"""Number of rows of a large batch that are compared, always at the same places, so that a resumed run logs the same."""
ROWS_PER_COMPARED = 16
"""Number of rows of a batch for each compared row: with it a forward of one row is under 2 % of a step."""

VERIFIED = 16
"""Number of rows on which group decoding is verified: half with the longest completions, half anywhere in the batch."""

FIRST = 4
"""Number of batches at the start of a launch on which hypotheses are computed in any case, on `EXPLORED` rows."""
EXPLORED = 8
EVERY = 16
"""Interval, in compared batches, at which hypotheses are computed from then on even if nothing is unusual."""

UNCLEAR_STEPS = 20
"""Optimizer steps after which the log names hypotheses that cannot be told from the policy."""
UNCHECKED = "the logits processors of `generate` are not checked"
"""Beginning of a sentence that ends with the reason."""

Completions = Sequence[Sequence[int]]

logger = get_logger(__name__)


class GenerationCheck:
    """Comparison of what generated with the policy of a trainer. Raises `NotThePolicy` if it is another distribution.

    Args:
        trainer: the trainer.
        trl_log_probs: TRL's own computation of log-probabilities, as in `Scorer`.
        enabled: False if only group decoding is verified, on its first batch.
    """

    def __init__(
        self, trainer: TRLTrainer, trl_log_probs: Callable[[nn.Module, Rows, bool], PerToken], enabled: bool
    ) -> None:
        self.trainer, self.enabled = trainer, enabled
        self.accelerator, self.args = trainer.accelerator, trainer.args
        processing, reason = Processing.of(self.args) if trainer.use_vllm else (None, "")
        self.policy = self.accelerator.unwrap_model(trainer.model)
        self.scorer = Scorer(trainer, self.policy, trl_log_probs, processing or None)
        # Rows that are scored here hold token IDs only.
        self._reason = reason or ("prompts may hold images" if trainer._is_vlm else "")
        self.adapters = Adapters(self.policy, trainer._dist.is_zero3 or trainer.is_fsdp_enabled)
        own_loops = not trainer.use_vllm and not trainer.use_transformers_continuous_batching
        # A copy: transformers and a model's class may fill the trainer's own configuration later.
        self.settings = copy.deepcopy(trainer.generation_config) if own_loops else None
        """Generation settings of the user, or None if the processors of `generate` cannot be observed."""
        self.batches = 0
        """Number of batches of this launch that were compared."""
        self.baseline: Evidence | None = None
        """Sum of all evidence that was found to be the policy's, or None before the first."""
        self.is_dtype_known = not trainer.use_vllm
        """True if the generator's dtype is known: an engine has its own."""
        self.is_16bit = False
        """True if the generator turned out to compute in 16 bits while the policy is float32."""
        self.unclear: tuple[str, ...] | None = None
        """Hypotheses that the last computation could not tell from the policy, or None before the first computation."""
        self._logged_unclear = False
        self._pending: list[Evidence] | None = None
        self._announcer = Announcer(logger.warning)

    @property
    def reason(self) -> str:
        """Reason why nothing is compared, or ""."""
        # A script may set `rollout_func` on a trainer that was made without one.
        return self._reason or unfit_layout(self.trainer)

    # ---- what is recorded and compared: the same on every rank, because each comparison is a collective

    def record_every(self, rows: int) -> int:
        """Return n if one row in every n has its log-probabilities recorded, or 0 if none has."""
        if not self.enabled or self.reason:
            return 0
        # On the first batches hypotheses are computed on more rows than are compared.
        return 1 if self.batches < FIRST else compare_every(rows)

    def is_due(self, rows: int) -> bool:
        """Return True if a batch of `rows` rows is compared and logged. It is the same after a resume."""
        # One row is a large share of a small batch, so small batches are compared less often.
        interval = math.ceil(ROWS_PER_COMPARED / rows)
        micro_batches = self.trainer.state.global_step * self.args.gradient_accumulation_steps
        return micro_batches // (self.args.steps_per_generation * self.trainer.num_iterations) % interval == 0

    def processor_comparison(self, rows: int) -> ProcessorComparison | None:
        """Return the comparison of `generate`'s processors for a batch of `rows` rows, or None if none is due."""
        if not self.enabled or self.reason or self.settings is None:
            return None
        if (scale := self.settings.guidance_scale) not in (None, 1):
            self._announcer.once(
                "unseen",
                f"completions are sampled with guidance_scale {scale}, and the loss takes log-probabilities without; "
                f"{UNCHECKED}: `guidance_scale` runs the model once more",
            )
            return None
        mode = self.settings.get_generation_mode()
        if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
            self._announcer.once(
                "mode",
                f"completions are generated by {mode.value}, and the loss takes the log-probabilities of plain "
                "sampling: the difference for the sampled tokens is not known",
            )
        if not self.is_due(rows) and self.batches >= FIRST:
            return None
        return ProcessorComparison(self.settings, self.trainer.temperature, range(0, rows, compare_every(rows)))

    @property
    def is_float32(self) -> bool:
        """True if generator and policy both compute in float32, as far as is known."""
        mixed = self.accelerator.mixed_precision != "no" and self.scorer.autocast
        return not mixed and not self.is_16bit and computes_in_float32(self.policy, self.accelerator.device)

    # ---- the comparisons

    def verify(
        self,
        prompts: Completions,
        completions: Completions,
        recorded: Mapping[int, Tensor],
        where: str = "the first batch",
    ) -> str:
        """Return by how much `VERIFIED` recorded rows differ from the policy, as a phrase, or "" within the tolerance.

        If another computation with the same weights explains the difference, the policy is scored by that computation
        from then on: without padding, or without autocast.
        """
        few = {row: recorded[row] for row in verified_rows([len(completions[row]) for row in recorded], list(recorded))}
        while True:
            found = self._measure(*self._rows(prompts, completions, few))
            mean, largest = max(rank.mean for rank in found), max(rank.largest for rank in found)
            difference = disagreement(mean, largest, is_float32=self.is_float32, where=where)
            if not difference:
                return ""
            found = self._explore(*self._rows(prompts, completions, few), only=OTHER_COMPUTATIONS)
            shares = {name: min(rank.share(name) for rank in found if rank.tokens) for name in found[0].fits}
            best = max(shares, key=shares.__getitem__, default=None)
            if best is None or shares[best] < EXPLAINED:
                return difference
            self._score_by(best, found)

    def __call__(
        self,
        prompts: Completions,
        completions: Completions,
        recorded: Mapping[int, Tensor] | None,
        reason: str = "the generator gives no log-probabilities",
    ) -> tuple[float, float] | None:
        """Compare the generator of a batch with the policy.

        Args:
            prompts: token IDs of this rank's prompts.
            completions: token IDs of this rank's completions.
            recorded: log-probabilities (T,) of the completions of some rows, the same rows on every rank, or None.
            reason: why there are no log-probabilities.

        Returns:
            Mean and largest difference over all ranks, or None if this batch is not logged.

        Raises:
            NotThePolicy: something else than the policy generated the tokens.
        """
        if not self.enabled:
            return None
        if self.reason or recorded is None:
            self._announcer.once(
                "unchecked", f"whether completions are the policy's is not checked: {self.reason or reason}"
            )
            return None
        # At every step, also of batches that are not compared: a hypothesis needs the step before.
        self.adapters.keep(self.trainer.state.global_step)
        is_due, is_first = self.is_due(len(prompts)), self.batches < FIRST
        # A launch may bring another engine or other packages, so its first batches are compared though not logged.
        if not is_due and not is_first:
            return None
        self.batches += 1
        few = {row: recorded[row] for row in range(0, len(prompts), compare_every(len(prompts)))}
        found = self._measure(*self._rows(prompts, completions, few))
        tokens = sum(rank.tokens for rank in found)
        difference = sum(rank.total for rank in found) / max(tokens, 1.0), max(rank.largest for rank in found)
        if is_first or self.batches % EVERY == 0 or any(map(self._is_unusual, found)):
            # At equal distances, so that they belong to different prompts.
            rows = list(recorded)[:: max(len(recorded) // EXPLORED, 1)][:EXPLORED]
            more = self._explore(*self._rows(prompts, completions, {row: recorded[row] for row in rows}))
            self._judge(more)
        return difference if is_due else None

    def of_vllm(
        self, prompts: Completions, completions: Completions, log_probs: Sequence[Sequence[float | None]]
    ) -> tuple[float, float] | None:
        """Compare vLLM's `log_probs`, one per token. Return the same as `__call__`, or None if TRL logs it."""
        every = self.record_every(len(prompts))
        rows = range(0, len(prompts), every) if every else ()
        recorded = {}
        for row in rows:
            recorded[row] = torch.from_numpy(np.array(log_probs[row], dtype=np.float32))  # None becomes NaN
        difference = self(prompts, completions, recorded)
        # For its correction TRL logs the same difference, of all rows.
        return None if self.trainer.vllm_importance_sampling_correction else difference

    def compare_processors(self, completions: Completions, comparison: ProcessorComparison | None) -> None:
        """Stop the run if tokens are drawn from another distribution than the user's settings make of the policy's.

        Filters of the settings, which the loss does not apply, are announced once.

        Raises:
            NotThePolicy: `generate` applies other processors, or another generation mode.
            NotFinite: the policy computes NaN.
        """
        if comparison is None:
            return
        distances, shifts = comparison.measured(completions).cpu()
        largest = distances.max().item() if len(distances) else 0.0
        ours = [len(distances), distances.sum().item(), largest, shifts.sum().item()]
        ours += [bool(comparison.difference), bool(comparison.other_mode)]
        ranks = self.accelerator.gather(torch.tensor([ours], device=self.accelerator.device)).tolist()
        for number, (count, total, most, _, other_processors, other_mode) in enumerate(ranks):
            mean = total / max(count, 1.0)
            # The settings' own processors compute the same of the same logits, but a kernel that rounds by the size of
            # its batch may keep one token more or less at the edge of `top_p`: the mean decides, as between 16-bit
            # kernels. Other processors have no such excuse.
            differs = disagreement(mean, most, is_float32=bool(other_processors), where="the compared tokens")
            if math.isnan(mean):
                raise self._not_finite()
            if other_mode or differs:
                # Every rank raises, so this second collective is one of all ranks too.
                causes = gather_object([comparison.other_mode or comparison.difference])
                where = f" by rank {number}" if len(ranks) > 1 else ""
                raise NotThePolicy(self._wrong_processors(where, causes[number], mean, most))
        tokens = sum(rank[0] for rank in ranks)
        if not tokens:
            self._announcer.once("unseen", f"{UNCHECKED}: `generate` is the model's own, or draws tokens without them")
            return
        if comparison.difference:
            self._announcer.once("processors", f"{comparison.difference}: so far that has changed no probability")
        # To name the filters builds the processors once per setting, so it is not done again.
        if "filters" not in self._announcer.keys and (filters := comparison.filters()):
            self._say_filters(", ".join(filters), sum(rank[3] for rank in ranks) / tokens)

    def _is_unusual(self, rank: Evidence) -> bool:
        if self.baseline is None:
            return rank.differs(self.is_float32)
        # A comparison with NaN is False, so a difference that is not a number is unusual.
        is_usual = rank.mean <= min(UNUSUAL * self.baseline.mean, CEILING)
        # Within its tolerance a float32 difference needs no explanation. A 16-bit tolerance is wide enough to hide one.
        return not is_usual and (rank.differs(self.is_float32) or not self.is_float32)

    def _judge(self, ranks: list[Evidence]) -> None:
        """Act on the evidence of all ranks, one after the other: each may have an engine of its own.

        Raises:
            NotThePolicy: the generator of a rank is not the policy.
            NotFinite: the policy of a rank computes NaN.
        """
        if any(math.isnan(rank.mean) for rank in ranks):
            raise self._not_finite()
        if not self.is_float32:
            # A few rounding outliers decide a small sample: wait for more tokens, as long as the hypotheses are the
            # same.
            if self._pending is not None and self._pending[0].fits.keys() == ranks[0].fits.keys():
                ranks = [before + now for before, now in zip(self._pending, ranks, strict=True)]
            self._pending = ranks if min(rank.tokens for rank in ranks) < MIN_TOKENS else None
            if self._pending is not None:
                return
        baseline = None if self.baseline is None else self.baseline.mean
        conclusions = [conclude(rank, is_float32=self.is_float32, baseline=baseline) for rank in ranks]
        for number, (rank, conclusion) in enumerate(zip(ranks, conclusions, strict=True)):
            if conclusion.is_wrong:
                raise NotThePolicy(self._wrong_generator(number if len(ranks) > 1 else None, rank, conclusion))
        names = {name for conclusion in conclusions for name in conclusion.names}
        if BFLOAT16 in names:
            self.is_16bit = True
            worst = max(ranks, key=lambda rank: rank.mean)
            self._announcer.once(
                "16 bits",
                "the generator computes in 16 bits and the policy in 32: their log-probabilities differ by "
                f"{worst.mean:.1e} on average, and the policy's own in bfloat16 by "
                f"{worst.fits[BFLOAT16].total / worst.tokens:.1e}",
            )
        for name in names & set(OTHER_COMPUTATIONS):
            self._score_by(name, ranks)
        if names.isdisjoint(OTHER_COMPUTATIONS):
            self._accept(ranks, conclusions)

    def _accept(self, ranks: list[Evidence], conclusions: list[Conclusion]) -> None:
        """Add the evidence to the baseline, and log what it excludes and what it leaves open."""
        self.is_dtype_known = True
        for rank in ranks:
            # Without fits: the hypotheses that can be computed differ from batch to batch.
            new = Evidence(rank.tokens, rank.total, rank.largest, rank.square)
            self.baseline = new if self.baseline is None else self.baseline + new
        worst = max(ranks, key=lambda rank: rank.mean)
        nearer = [name for conclusion in conclusions for name in conclusion.names if name in OTHER_WEIGHTS]
        if nearer:
            self._announcer.once(
                "nearer",
                f"the generator's log-probabilities are nearer to those of {OTHER_WEIGHTS[nearer[0]]} than to the "
                "policy's, within the tolerance of 16 bits: an adapter loses its smallest updates if it is merged into "
                "16-bit weights",
            )
        elif worst.differs(self.is_float32):
            self._announcer.once(
                "unexplained",
                f"the generator's log-probabilities differ from the policy's by {worst.mean:.1e} on average, more than "
                "their dtypes explain, and no hypothesis that can be computed here explains it",
            )
        self._say_truncation(worst)
        self._log_unclear(conclusions)

    def _log_unclear(self, conclusions: list[Conclusion]) -> None:
        """Log if hypotheses still cannot be told from the policy after some steps, and the first time that they can."""
        unclear = tuple(dict.fromkeys(name for conclusion in conclusions for name in conclusion.unclear))
        step = self.trainer.state.global_step
        if unclear and step >= UNCLEAR_STEPS and not self._logged_unclear:
            # Not before: until its first updates, every new adapter adds too little to be told from none.
            names = " or ".join(OTHER_WEIGHTS[name] for name in unclear)
            logger.info(
                f"step {step}: can't tell yet whether the generator is the policy or {names}: their log-probabilities "
                "are alike"
            )
            self._logged_unclear = True
        elif not unclear and self.unclear:
            logger.info(f"step {step}: the generator is the policy")
        self.unclear = unclear

    def _score_by(self, name: str, ranks: Sequence[Evidence]) -> None:
        """Score the policy from now on by another computation, in which the generator is the policy."""
        if name == UNPADDED:
            self.scorer.padded = False
            self._announcer.once(
                "padding",
                "the policy's log-probabilities depend on padding: the loss, which pads prompts as TRL does, does not "
                "score tokens as they were sampled",
            )
        elif name == NO_AUTOCAST:
            self.scorer.autocast = False
            # Reset the baseline and the engine's dtype: both were estimated while autocast added noise.
            self.baseline, self.is_dtype_known = None, not self.trainer.use_vllm
            self._announcer.once(
                "autocast",
                "tokens are sampled from the policy without autocast, and the loss computes it with autocast: "
                f"log-probabilities differ by {max(rank.mean for rank in ranks):.1e} on average; "
                f"`{self.accelerator.mixed_precision}: false` makes them alike",
            )
        else:
            self.scorer.processing = None

    # ---- messages

    def _say_filters(self, filters: str, shift: float) -> None:
        self._announcer.once(
            "filters",
            f"completions are sampled after {filters}, and the loss takes log-probabilities before: those of the "
            f"sampled tokens differ by {shift:.2g} on average at step {self.trainer.state.global_step}",
        )

    def _say_truncation(self, rank: Evidence) -> None:
        """Log the effect of truncated sampling on TRL's importance sampling correction (huggingface/trl#6789)."""
        if self.scorer.processing is None:
            return
        shift = rank.fits[UNPROCESSED].total / max(rank.tokens, 1.0)
        if not self.trainer.vllm_importance_sampling_correction:
            self._say_filters(str(self.scorer.processing), shift)
            return
        self._announcer.once(
            "truncation",
            f"vLLM's log-probabilities are of the distribution after {self.scorer.processing}, those of the loss "
            "before: `vllm_importance_sampling_correction` takes that for a difference of policies "
            f"(huggingface/trl#6789), at step {self.trainer.state.global_step} {shift:.2g} a token on average; leave "
            "these keys out, or set it to false",
        )

    def _not_finite(self) -> NotFinite:
        """Return the error of a policy that computes NaN. Collective."""
        clause = describe_nonfinite(self.policy) or "its weights are finite, and may be too large"
        return NotFinite(
            f"step {self.trainer.state.global_step + 1}: the policy's log-probabilities are NaN, and {clause}: lower "
            "`learning_rate`, or compute in a wider dtype"
        )

    def _wrong_processors(self, where: str, cause: str, mean: float, largest: float) -> str:
        cause = cause or "`generate` makes other scores of the logits than the settings"
        moved = f" ({mean:.2%} of the probability moved on average, at most {largest:.2%})" if largest else ""
        return (
            f"tokens are not drawn{where} from the policy's distribution under the settings of this run: at step "
            f"{self.trainer.state.global_step} {cause}{moved}; look for a `generate` or logits processors that the "
            "model brings, or set `generation_check: false`"
        )

    def _wrong_generator(self, rank: int | None, evidence: Evidence, conclusion: Conclusion) -> str:
        where = "" if rank is None else f" of rank {rank}"
        cause = "no hypothesis that can be computed here explains it"
        if conclusion.names:
            weights = " or ".join(OTHER_WEIGHTS[name] for name in conclusion.names)
            alike = ", which are alike so far" if len(conclusion.names) > 1 else ""
            cause = f"they are those of {weights}{alike} ({conclusion.explained:.0%} of the difference)"
        elif self.baseline is not None:
            cause += (
                f"; they agreed before (to {self.baseline.mean:.1e}), as with weights of an earlier step that were not "
                "replaced"
            )
        return (
            f"the generator{where} is not the policy: at step {self.trainer.state.global_step} the log-probabilities "
            f"of its tokens differ by {evidence.mean:.2g} on average, and {cause}; set `generation_check: false` to go "
            "on anyway"
        )

    # ---- arithmetic

    def _rows(
        self, prompts: Completions, completions: Completions, recorded: Mapping[int, Tensor]
    ) -> tuple[Rows, Tensor]:
        """Return the recorded rows in TRL's layout and their log-probabilities (B, T), NaN where there is none."""
        # Each processed token takes the logits of the whole vocabulary, so long rows are cut.
        longest = PROCESSED_TOKENS if self.scorer.processing is not None else None
        cut = [list(completions[row])[:longest] for row in recorded]
        rows = Rows.of_tokens([prompts[row] for row in recorded], cut, self.accelerator.device)
        log_probs = torch.full(rows.completion_mask.shape, math.nan, device=rows.input_ids.device)
        for place, (values, ids) in enumerate(zip(recorded.values(), cut, strict=True)):
            count = min(len(ids), len(values))
            log_probs[place, :count] = values[:count].to(log_probs)
        return rows, log_probs

    def _size(self) -> int:
        """Return the number of rows of a forward, as in the loss."""
        training = self.trainer.model.training
        return self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size

    def _measure(self, rows: Rows, log_probs: Tensor) -> list[Evidence]:
        """Return the evidence of each rank, without hypotheses."""
        return self._explore(rows, log_probs, only=())

    def _explore(self, rows: Rows, log_probs: Tensor, only: Sequence[str] | None = None) -> list[Evidence]:
        """Return the evidence of each rank, with every hypothesis that can be computed, or with those in `only`."""
        expected = self.scorer(self.trainer.model, rows, self._size())
        sums, names = [_sums(rows, log_probs, expected)], []
        with_bfloat16 = not self.is_dtype_known
        # Every rank computes the same hypotheses in the same order: under ZeRO-3 each forward is a collective.
        for name, hypothesis in hypotheses(self.trainer, self.adapters, self.scorer, with_bfloat16).items():
            if only is not None and name not in only:
                continue
            with hypothesis.context:
                other = hypothesis.scorer(hypothesis.model, rows, self._size())
            names.append(name)
            sums.append(_sums_of_fit(rows, log_probs, expected, other))
        return self._gather(sums, names)

    def _gather(self, sums: list[Tensor], names: Sequence[str]) -> list[Evidence]:
        """Return the evidence of each rank, the same list on every rank, so that all of them stop together."""
        ours = torch.cat(sums).to(self.accelerator.device)
        table = self.accelerator.gather(ours[None]).cpu().reshape(-1, len(ours)).tolist()
        found = []
        for tokens, total, largest, square, *rest in table:
            fits = {name: Fit(*rest[3 * n : 3 * n + 3]) for n, name in enumerate(names)}
            found.append(Evidence(tokens, total, largest, square, fits))
        return found


def compare_every(rows: int) -> int:
    """Return n if one row in every n of a batch of `rows` rows is compared and logged."""
    count = COMPARED if rows >= COMPARED * ROWS_PER_COMPARED else 1
    return math.ceil(rows / count)


def verified_rows(lengths: Sequence[int], rows: Sequence[int]) -> list[int]:
    """Return up to `VERIFIED` of `rows`, in their order: equally many on every rank.

    The longest completions are decoded behind every row that finishes before, and others stand for the rest of a batch.

    Args:
        lengths: number of tokens of each row's completion.
        rows: rows of a batch.
    """
    by_length = sorted(range(len(rows)), key=lambda place: -lengths[place])
    longest, rest = by_length[: VERIFIED // 2], sorted(by_length[VERIFIED // 2 :])
    spread = rest[:: max(-(-len(rest) // (VERIFIED - VERIFIED // 2)), 1)]
    return [rows[place] for place in sorted([*longest, *spread])]


def unfit_layout(trainer: TRLTrainer) -> str:
    """Return why the ranks of a run neither decode groups nor compare what generated, or "" if nothing prevents it."""
    if trainer.is_fsdp_enabled:
        return "FSDP shards the weights"
    # The ranks of our own tool loop take equally many turns.
    if trainer.rollout_func is not None and trainer.accelerator.num_processes > 1:
        return "ranks may take different numbers of turns in a `rollout_func`, and the check of each is a collective"
    return ""


def _comparable(rows: Rows, log_probs: Tensor) -> Tensor:
    """Return a mask (B, T) of the tokens that have a log-probability to compare: vLLM gives NaN for some."""
    return rows.completion_mask.bool() & log_probs.isfinite()


def _sums(rows: Rows, log_probs: Tensor, expected: Tensor) -> Tensor:
    """Return the sums of an `Evidence`, (4,)."""
    # float32 throughout: not every device has float64.
    gap = (log_probs - expected)[_comparable(rows, log_probs)]
    count = torch.tensor(float(gap.numel()), device=gap.device)
    largest = gap.abs().max() if gap.numel() else count
    return torch.stack([count, gap.abs().sum(), largest, gap.square().sum()])


def _sums_of_fit(rows: Rows, log_probs: Tensor, expected: Tensor, other: Tensor) -> Tensor:
    """Return the sums of a `Fit`, (3,)."""
    mask = _comparable(rows, log_probs)
    moved = (other - expected)[mask].float()
    residual = (log_probs - other)[mask]
    return torch.stack([moved.square().sum(), residual.square().sum(), moved.abs().sum()])
