"""Is the generator the policy? Comparison of the log-probabilities that tokens were sampled with, and the policy's.

Weights that never reach an engine, an adapter that is applied twice and a cache with a mistake have one effect: tokens
are sampled from another distribution without any error. The run goes on and learns little. Every generator gives the
log-probability of each token that it samples. For a few rows of each batch these are compared with a forward of the
policy. If they differ by more than the dtypes explain, they are also compared with hypotheses about what else may have
generated (`hypotheses.py`, `agreement.py`). Logits processors act after these log-probabilities, so they are compared
with those of the user's settings (`ProcessorCheck`). See docs/generation-check.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from trl.models import unwrap_model_for_generation

from grpo_recipes.generation.agreement import (
    BFLOAT16,
    EXCUSES,
    MIN_TOKENS,
    NO_AUTOCAST,
    OTHER_COMPUTATIONS,
    OTHER_WEIGHTS,
    UNPADDED,
    UNPROCESSED,
    Conclusion,
    Evidence,
    conclude,
    differences,
    disagreement,
)
from grpo_recipes.generation.hypotheses import PROCESSED_TOKENS, Adapters, Processing, Scorer, hypotheses
from grpo_recipes.generation.models import base_model, computes_in_float32, describe_nonfinite, eval_no_grad
from grpo_recipes.generation.rows import PerToken, Rows
from grpo_recipes.generation.sampling_settings import ProcessorCheck
from grpo_recipes.process.faults import NotFinite, NotThePolicy
from grpo_recipes.process.messages import Announcer
from grpo_recipes.process.ranks import gather
from grpo_rewards.attention import without_cudnn_attention

if TYPE_CHECKING:
    from grpo_recipes.generation.models import CausalLM, TRLTrainer

COMPARED = 2
"""Number of rows of a large batch that are compared. Their places are fixed, so that a resumed run logs the same."""
ROWS_PER_COMPARED = 16
"""Number of rows of a batch for each compared row. The forward of one row is then under 2 % of a step."""

VERIFIED = 16
"""Number of rows of a rank on which group decoding and its reuse of keys and values are verified.

Half of them have the longest completions of the batch. The others are spread over it (`verified_rows`).
"""

FIRST = 4
"""Number of batches at the start of a launch that are compared even if `is_due` returns False, on `EXPLORED` rows."""
EXPLORED = 8
"""Number of rows that are compared at the start of a launch. One row alone would not show what padding changes."""

TokenRows = Sequence[Sequence[int]]

logger = get_logger(__name__)


class GenerationCheck:
    """Comparison of a trainer's generator with its policy. It raises `NotThePolicy` if their distributions differ.

    Args:
        trainer: the trainer.
        trl_log_probs: TRL's own computation of log-probabilities, as in `Scorer`.
        enabled: False if only fast ways of generating are verified (`verify`).
    """

    def __init__(
        self, trainer: TRLTrainer, trl_log_probs: Callable[[nn.Module, Rows, bool], PerToken], enabled: bool
    ) -> None:
        self.trainer, self.enabled = trainer, enabled
        self.accelerator, self.args = trainer.accelerator, trainer.args
        processing, reason = Processing.of(self.args) if trainer.use_vllm else (None, "")
        policy = self.accelerator.unwrap_model(trainer.model)
        self.scorer = Scorer(trainer, policy, trl_log_probs, processing or None)
        # Rows that are scored here hold token IDs only.
        self._reason = reason or ("prompts may hold images" if trainer._is_vlm else "")
        self.adapters = Adapters(policy, trainer._dist.is_zero3 or trainer.is_fsdp_enabled)
        self.processors: ProcessorCheck | None = None
        """Check of the processors of `generate`, or None if they cannot be observed."""
        if enabled and not trainer.use_vllm and not trainer.use_transformers_continuous_batching:
            self.processors = ProcessorCheck(trainer.generation_config, trainer.temperature)
        self.batches = 0
        """Number of batches of this launch that were compared."""
        self.baseline: Evidence | None = None
        """Sum of all evidence that was found to be the policy's, or None before the first."""
        self.is_16bit = False
        """True if the generator turned out to compute in 16 bits while the policy is float32."""
        self._pending: list[Evidence] | None = None
        """Evidence of each rank on 16-bit tokens that were too few to be judged, or None."""
        self._announcer = Announcer(logger.warning)

    @property
    def reason(self) -> str:
        """Reason why nothing is compared, or ""."""
        # A script may set `rollout_func` on a trainer that was made without one.
        return self._reason or unfit_layout(self.trainer)

    # ---- what is recorded and compared. The same on every rank, because each comparison is a collective

    def record_every(self, rows: int) -> int:
        """Return n if one row in every n has its log-probabilities recorded, or 0 if none has."""
        if not self.enabled or self.reason:
            return 0
        return 1 if self.batches < FIRST else compare_every(rows)

    def is_due(self, rows: int) -> bool:
        """Return True if a batch of `rows` rows is compared and logged. It is the same after a resume."""
        # One row is a large share of a small batch, so small batches are compared less often.
        interval = math.ceil(ROWS_PER_COMPARED / rows)
        micro_batches = self.trainer.state.global_step * self.args.gradient_accumulation_steps
        return micro_batches // (self.args.steps_per_generation * self.trainer.num_iterations) % interval == 0

    @property
    def is_float32(self) -> bool:
        """True if generator and policy both compute in float32, as far as is known."""
        mixed = self.accelerator.mixed_precision != "no" and self.scorer.autocast
        return not mixed and not self.is_16bit and computes_in_float32(self.scorer.policy, self.accelerator.device)

    # ---- the comparisons

    def verify(
        self, prompts: TokenRows, completions: TokenRows, recorded: Mapping[int, Tensor], what: str, where: str
    ) -> str:
        """Compare `VERIFIED` recorded rows with the policy. Collective, with the same result on every rank.

        The policy is run as `generate` runs it: each row alone, in the base model, whose forward accelerate does not
        wrap in autocast if there is an adapter.

        Args:
            prompts: token IDs of this rank's prompts.
            completions: token IDs of this rank's completions.
            recorded: log-probabilities (T,) of the completions of some rows.
            what: clause on how the tokens were generated.
            where: name of the rows.

        Returns:
            A clause on the largest difference of any rank, or "" within the tolerance.
        """
        rows = verified_rows([len(completions[row]) for row in recorded], list(recorded))
        policy = base_model(self.scorer.policy)
        with self._whole_policy(), eval_no_grad(policy), without_cudnn_attention():  # each row has a shape of its own
            gaps = differences(
                policy,
                [prompts[row] for row in rows],
                [completions[row] for row in rows],
                [recorded[row] for row in rows],
                self.trainer.temperature,
            )
        ranks = gather((gaps.mean().item(), gaps.max().item()))
        mean, largest = max(mean for mean, _ in ranks), max(largest for _, largest in ranks)
        difference = disagreement(mean, largest, is_float32=self.is_float32, where=where)
        return f"{what} under other log-probabilities than the policy's ({difference})" if difference else ""

    def _whole_policy(self) -> AbstractContextManager[Any]:
        """Gather the weights that ZeRO-3 shards, as TRL does for `generate`. Collective."""
        if not self.trainer._dist.is_zero3:
            return nullcontext()
        kwargs = self.args.gradient_checkpointing_kwargs
        return unwrap_model_for_generation(
            self.trainer.model_wrapped, self.accelerator, gradient_checkpointing_kwargs=kwargs
        )

    def __call__(
        self,
        prompts: TokenRows,
        completions: TokenRows,
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
            NotFinite: the policy computes NaN.
        """
        if not self.enabled:
            return None
        if self.reason or recorded is None:
            sentence = f"whether completions are the policy's is not checked: {self.reason or reason}"
            self._announcer.once(sentence, "unchecked")
            return None
        # At every step, also of batches that are not compared: a hypothesis needs the step before.
        self.adapters.keep(self.trainer.state.global_step)
        is_due, is_first = self.is_due(len(prompts)), self.batches < FIRST
        # A launch may bring another engine or other packages, so its first batches are compared though not logged.
        if not is_due and not is_first:
            return None
        self.batches += 1
        few = {row: recorded[row] for row in range(0, len(prompts), compare_every(len(prompts)))}
        ranks = self._evidence(prompts, completions, few)
        tokens = sum(rank.tokens for rank in ranks)
        difference = sum(rank.total for rank in ranks) / max(tokens, 1), max(rank.largest for rank in ranks)
        # At equal distances, so that they belong to different prompts.
        rows = list(recorded)[:: max(len(recorded) // EXPLORED, 1)][:EXPLORED]
        more = {row: recorded[row] for row in rows}
        if is_first:
            ranks = self._evidence(prompts, completions, more)
        if any(rank.differs(self.is_float32) for rank in ranks):
            self._judge(self._evidence(prompts, completions, more, explore=True))
        else:
            self._accept(ranks)
        return difference if is_due else None

    def of_vllm(
        self, prompts: TokenRows, completions: TokenRows, log_probs: Sequence[Sequence[float | None]]
    ) -> tuple[float, float] | None:
        """Compare vLLM's `log_probs`, one per token. Return the same as `__call__`, or None if TRL logs it."""
        every = self.record_every(len(prompts))
        rows = range(0, len(prompts), every) if every else ()
        recorded = {}
        for row in rows:
            recorded[row] = torch.from_numpy(np.array(log_probs[row], dtype=np.float32))  # None becomes NaN
        if self.enabled and self.scorer.processing is not None:
            self._announcer.once(
                f"completions are sampled with {self.scorer.processing}, and the loss takes log-probabilities without: "
                "`vllm_importance_sampling_correction` takes that for a difference of policies (huggingface/trl#6789)",
                "filters",
            )
        difference = self(prompts, completions, recorded)
        # For its correction TRL logs the same difference, of all rows.
        return None if self.trainer.vllm_importance_sampling_correction else difference

    def watching_processors(self, model: CausalLM) -> AbstractContextManager[Any]:
        """Return a context in which the processors that `generate` builds are compared with the user's settings."""
        return nullcontext() if self.processors is None else self.processors.watching(model)

    def check_processors(self) -> None:
        """Stop the run if `generate` applied other processors, or another mode, than the user's settings name.

        Filters of the settings, which the loss does not apply, are announced once.

        Raises:
            NotThePolicy: tokens are drawn from another distribution.
        """
        if self.processors is None or self.reason:
            return
        for number, difference in enumerate(ranks := gather(self.processors.difference)):
            if difference:
                where = f" by rank {number}" if len(ranks) > 1 else ""
                raise NotThePolicy(
                    f"tokens are not drawn{where} from the policy's distribution under the settings of this run: at "
                    f"step {self.trainer.state.global_step} {difference}; look for a `generate` or logits processors "
                    "that the model brings, or set `generation_check: false`"
                )
        if self.processors.difference is None:
            self._announcer.once("the logits processors of `generate` are not checked: `generate` is the model's own")
        if self.processors.filters:
            filters = ", ".join(self.processors.filters)
            sentence = f"completions are sampled with {filters}, and the loss takes log-probabilities without"
            self._announcer.once(sentence, "filters")

    # ---- conclusions

    def _judge(self, ranks: list[Evidence]) -> None:
        """Act on the evidence of all ranks, one after the other: each may have an engine of its own.

        Raises:
            NotThePolicy: the generator of a rank is not the policy.
            NotFinite: the policy of a rank computes NaN.
        """
        if any(math.isnan(rank.mean) for rank in ranks):
            clause = describe_nonfinite(self.scorer.policy) or "its weights are finite, and may be too large"
            raise NotFinite(
                f"step {self.trainer.state.global_step + 1}: the policy's log-probabilities are NaN, and {clause}: "
                "lower `learning_rate`, or compute in a wider dtype"
            )
        if not self.is_float32:
            # A few rounding outliers decide a small sample: wait for more tokens.
            if self._pending is not None:
                ranks = [before + now for before, now in zip(self._pending, ranks, strict=True)]
            self._pending = ranks if min(rank.tokens for rank in ranks) < MIN_TOKENS else None
            if self._pending is not None:
                return
        baseline = None if self.baseline is None else self.baseline.mean
        conclusions = [conclude(rank, is_float32=self.is_float32, baseline=baseline) for rank in ranks]
        for number, (rank, conclusion) in enumerate(zip(ranks, conclusions, strict=True)):
            if conclusion.is_wrong:
                raise NotThePolicy(
                    self._wrong_generator(f" of rank {number}" if len(ranks) > 1 else "", rank, conclusion)
                )
        names = {name for conclusion in conclusions for name in conclusion.names}
        mean = max(rank.mean for rank in ranks)
        for name in names:
            self._announcer.once(f"{EXCUSES[name]}; log-probabilities differ by {mean:.1e} on average", name)
        self.is_16bit = self.is_16bit or BFLOAT16 in names
        # The policy is scored from now on as the generator computes it.
        if UNPADDED in names:
            self.scorer.padded = False
        if UNPROCESSED in names:
            self.scorer.processing = None
        if NO_AUTOCAST in names:
            self.scorer.autocast = False
        if names.isdisjoint(OTHER_COMPUTATIONS):
            self._accept(ranks)
        else:
            self.baseline = None  # it was estimated with another computation

    def _accept(self, ranks: list[Evidence]) -> None:
        """Add the evidence of all ranks to the baseline."""
        self._pending = None
        for rank in ranks:
            self.baseline = rank if self.baseline is None else self.baseline + rank

    def _wrong_generator(self, where: str, evidence: Evidence, conclusion: Conclusion) -> str:
        """Return the message of a generator that is not the policy."""
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

    def _evidence(
        self, prompts: TokenRows, completions: TokenRows, recorded: Mapping[int, Tensor], explore: bool = False
    ) -> list[Evidence]:
        """Return the evidence of each rank, the same list on every rank, so that all of them stop together.

        Args:
            prompts: token IDs of this rank's prompts.
            completions: token IDs of this rank's completions.
            recorded: log-probabilities (T,) of the completions of some rows.
            explore: True to compute every hypothesis too.
        """
        # Each processed token takes the logits of the whole vocabulary, so long rows are cut.
        longest = PROCESSED_TOKENS if self.scorer.processing is not None else None
        cut = [list(completions[row])[:longest] for row in recorded]
        rows = Rows.of_tokens([prompts[row] for row in recorded], cut, self.accelerator.device)
        log_probs = torch.full(rows.completion_mask.shape, math.nan, device=rows.input_ids.device)
        for place, (values, ids) in enumerate(zip(recorded.values(), cut, strict=True)):
            count = min(len(ids), len(values))
            log_probs[place, :count] = values[:count].to(log_probs)
        expected = self.scorer(rows)
        # vLLM gives NaN for some tokens. A NaN of the policy must stay, also if the generator has the same.
        is_comparable = rows.completion_mask.bool() & (log_probs.isfinite() | expected.isnan())
        moved = {}
        if explore:
            # An engine has a dtype of its own, which is known once it has agreed.
            with_bfloat16 = self.trainer.use_vllm and self.baseline is None
            # Every rank computes the same hypotheses in the same order: under ZeRO-3 each forward is a collective.
            for name, (context, scorer) in hypotheses(self.trainer, self.adapters, self.scorer, with_bfloat16).items():
                with context:
                    moved[name] = (scorer(rows) - expected)[is_comparable]
        return gather(Evidence.of((log_probs - expected)[is_comparable], moved))


def compare_every(rows: int) -> int:
    """Return n if one row in every n of a batch of `rows` rows is compared and logged."""
    count = COMPARED if rows >= COMPARED * ROWS_PER_COMPARED else 1
    return math.ceil(rows / count)


def verified_rows(lengths: Sequence[int], rows: Sequence[int]) -> list[int]:
    """Return up to `VERIFIED` of `rows` in their order, equally many on every rank.

    Half are the rows of the longest completions, which are decoded while all others finish and leave the batch. The
    other half is spread over the remaining rows.

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
