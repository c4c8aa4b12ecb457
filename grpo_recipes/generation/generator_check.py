"""Is the generator the policy? The log-probabilities under which tokens were sampled, held against the policy's.

Weights that never reach an engine, an adapter that is applied twice, a cache with a mistake: all of them sample from another
distribution without any error, and the run goes on and learns little. What every generator gives is the log-probability of
each token that it sampled. Those of a few rows of each batch are compared with a plain forward of the policy; where they
differ by more than the dtypes explain, and on the first batches of a launch, also with those of what else may have
generated (`alternatives`). The logits processors that come after are compared with those of the user's settings
(`ProcessorComparison`). See docs/generation-check.md.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers.generation import GenerationMode
from trl.trainer.utils import pad

from grpo_recipes.generation.agreement import disagreement, has_whole_precision
from grpo_recipes.generation.alternatives import (
    HALF,
    PROCESSED_TOKENS,
    RAW,
    READINGS,
    UNPADDED,
    WEIGHTS,
    WHOLE,
    Adapters,
    Processing,
    Scorer,
    alternatives,
)
from grpo_recipes.generation.processed import ProcessorComparison
from grpo_recipes.generation.verdict import ENOUGH, EXPLAINED, Alternative, Evidence, Verdict, judge
from grpo_recipes.process.faults import NotThePolicy
from grpo_recipes.training.log_probs import PerToken
from grpo_recipes.training.packing import Rows

WATCHED = 2
"""Rows of a batch that are compared: always those at the same places, as after a restart. One of a small batch."""
ROWS_PER_WATCHED = 16
"""A forward of one row for so many rows that are generated and trained on is under 2 % of a step."""

FIRST = 4
"""Batches of a launch on which the alternatives are computed in any case, on `EXPLORED` rows."""
EXPLORED = 8
EVERY = 16
"""From then on they are computed every so many comparisons, and where the difference is unusual."""

UNUSUAL = 2.0
"""How many times the usual difference makes the alternatives worth computing."""

UNCHECKED = "the logits processors of `generate` are not checked"
"""Beginning of a sentence that goes on with the reason."""

Completions = Sequence[Sequence[int]]

logger = get_logger(__name__)


class GenerationCheck:
    """Compares what generated with the policy of `trainer`, a `GRPOTrainer`; raises `NotThePolicy` where it is not.

    Args:
        trainer: the trainer.
        plain: its log-probabilities as TRL computes them.
        asked: whether the user wants the check; without it only group decoding is verified, on its first batch.
    """

    def __init__(self, trainer: Any, plain: Callable[[nn.Module, Rows, bool], PerToken], asked: bool) -> None:
        self.trainer, self.asked = trainer, asked
        self.accelerator, self.args = trainer.accelerator, trainer.args
        processing, reason = Processing.of(self.args) if trainer.use_vllm else (None, "")
        self.policy = self.accelerator.unwrap_model(trainer.model)
        self.scorer = Scorer(trainer, self.policy, plain, processing or None)
        self.reason = reason or ("prompts may hold images" if trainer._is_vlm else unfit_layout(trainer))
        """Why nothing is compared; empty if something is."""
        sharded = trainer._dist.is_zero3 or trainer.is_fsdp_enabled
        self.adapters = Adapters(self.policy, sharded)
        own_loops = not trainer.use_vllm and not trainer.use_transformers_continuous_batching
        self.settings = copy.deepcopy(trainer.generation_config) if own_loops else None
        """All that the user's settings say of generation; None if the processors of `generate` are out of sight."""
        self.batches = 0
        """Batches of this launch that were compared."""
        self.usual: Evidence | None = None
        """All that was found to be the policy's."""
        self.dtype_known = not trainer.use_vllm
        """Whether the generator's dtype is: an engine has one of its own."""
        self.half = False
        """Whether the generator turned out to compute in 16 bits where the policy has 32."""
        self.unclear: tuple[str, ...] | None = None
        """The alternatives that could not be told from the policy when they were computed last; None if they never were."""
        self._pending: list[Evidence] | None = None
        self._said: set[str] = set()

    # What is noted and compared, the same on every rank

    def score_every(self, rows: int) -> int:
        """Of how many rows one is to be noted; 0 if none is."""
        if not self.asked or self.reason:
            return 0
        return 1 if self.batches < FIRST else watched_every(rows)

    def is_due(self, rows: int) -> bool:
        """Whether a batch of so many rows is one of those that are compared and logged, as after a restart."""
        interval = -(-ROWS_PER_WATCHED // rows)  # of a small batch a row is much: not every one is compared
        made = self.trainer.state.global_step * self.args.gradient_accumulation_steps
        return made // (self.args.steps_per_generation * self.trainer.num_iterations) % interval == 0

    def comparison(self, rows: int) -> ProcessorComparison | None:
        """Return the comparison of the processors of `generate` for a batch of so many rows; None if none is due."""
        if not self.asked or self.reason or self.settings is None:
            return None
        if (scale := self.settings.guidance_scale) not in (None, 1):
            self._say(
                f"completions are sampled with guidance_scale {scale}, and the loss takes log-probabilities without; "
                f"{UNCHECKED}: `guidance_scale` runs the model once more",
                once="unseen",
            )
            return None
        mode = self.settings.get_generation_mode()
        if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
            self._say(
                f"completions are generated by {mode.value}, and the loss takes the log-probabilities of plain sampling: by how "
                "much those of the sampled tokens differ is not known",
                once="mode",
            )
        if not self.is_due(rows) and self.batches >= FIRST:
            return None
        return ProcessorComparison(self.settings, self.trainer.temperature, range(0, rows, watched_every(rows)))

    @property
    def whole(self) -> bool:
        """Whether both sides compute in float32, as far as is known."""
        mixed = self.accelerator.mixed_precision != "no" and self.scorer.autocast
        whole = has_whole_precision(self.policy) and not mixed and not self.half
        return whole and (self.accelerator.device.type == "cpu" or torch.get_float32_matmul_precision() == "highest")

    # The comparisons

    def doubt(self, prompts: Completions, completions: Completions, noted: Mapping[int, Tensor]) -> str:
        """By how much the noted rows differ from the policy's, as a phrase; empty within the tolerance that packed rows have.

        A model whose log-probabilities depend on padding is compared without any, from then on, and one that is sampled without
        autocast without it.
        """
        while True:
            found = self._measure(*self._rows(prompts, completions, noted))
            mean, largest = (torch.tensor(max(getattr(rank, key) for rank in found)) for key in ("mean", "largest"))
            reason = disagreement(mean, largest, whole_precision=self.whole, where="the first batch")
            if not reason:
                return ""
            found = self._explore(*self._rows(prompts, completions, noted), only=READINGS)
            shares = {name: min(rank.share(name) for rank in found if rank.tokens) for name in found[0].others}
            best = max(shares, key=shares.__getitem__, default=None)
            if best is None or shares[best] < EXPLAINED:
                return reason
            self._read(best, found)

    def __call__(
        self,
        prompts: Completions,
        completions: Completions,
        noted: Mapping[int, Tensor] | None,
        reason: str = "the generator gives no log-probabilities",
    ) -> tuple[float, float] | None:
        """How far the generator is from the policy, (mean, largest) over all ranks; None where this batch is not logged.

        `noted` are the log-probabilities of the completions of some rows, the same ones on every rank; None if there are none,
        for a `reason`. Raises `NotThePolicy`.
        """
        if not self.asked:
            return None
        if self.reason or noted is None:
            self._say(f"whether completions are the policy's is not checked: {self.reason or reason}", once="unchecked")
            return None
        self.adapters.keep(self.trainer.state.global_step)
        due, first = self.is_due(len(prompts)), self.batches < FIRST
        if not due and not first:
            return None
        self.batches += 1
        few = {row: noted[row] for row in range(0, len(prompts), watched_every(len(prompts)))}
        found = self._measure(*self._rows(prompts, completions, few))
        tokens = sum(rank.tokens for rank in found)
        difference = sum(rank.total for rank in found) / max(tokens, 1.0), max(rank.largest for rank in found)
        if first or self.batches % EVERY == 0 or any(map(self._is_unusual, found)):
            rows = list(noted)[:: max(len(noted) // EXPLORED, 1)][:EXPLORED]
            more = self._explore(*self._rows(prompts, completions, {row: noted[row] for row in rows}))
            self._judge(more)
        return difference if due else None

    def of_vllm(
        self, prompts: Completions, completions: Completions, log_probs: Sequence[Sequence[float | None]]
    ) -> tuple[float, float] | None:
        """The same of vLLM's `log_probs`, token by token; None where TRL logs the difference itself."""
        every = self.score_every(len(prompts))
        rows = range(0, len(prompts), every) if every else ()
        noted = {row: torch.tensor([math.nan if x is None else x for x in log_probs[row]]) for row in rows}
        difference = self(prompts, completions, noted)
        return None if self.trainer.vllm_importance_sampling_correction else difference

    def compare_processors(self, completions: Completions, comparison: ProcessorComparison | None) -> None:
        """Stop the run if tokens are drawn from another distribution than the user's settings make of the policy's.

        The filters of the settings, which the loss does not take, are announced once. Raises `NotThePolicy`.
        """
        if comparison is None:
            return
        distances, shifts = comparison.measured(completions).double().cpu()
        largest = distances.max().item() if len(distances) else 0.0
        ours = [len(distances), distances.sum().item(), largest, shifts.sum().item()]
        ours += [bool(comparison.difference), bool(comparison.other_mode)]
        ranks = self.accelerator.gather(torch.tensor([ours], device=self.accelerator.device)).tolist()
        for number, (count, total, most, _, other_processors, other_mode) in enumerate(ranks):
            mean = total / max(count, 1.0)
            if other_mode or not _is_asked_for(mean, most, bool(other_processors)):
                causes = gather_object([comparison.other_mode or comparison.difference])
                where = f" by rank {number}" if len(ranks) > 1 else ""
                raise NotThePolicy(self._sentence_of_processors(where, causes[number], mean, most))
        tokens = sum(rank[0] for rank in ranks)
        if not tokens:
            self._say(f"{UNCHECKED}: `generate` is the model's own, or draws tokens without them", once="unseen")
            return
        if comparison.difference:
            self._say(f"{comparison.difference}: so far that has changed no probability", once="processors")
        if "filters" not in self._said and (filters := comparison.filters()):
            self._say_filters(", ".join(filters), sum(rank[3] for rank in ranks) / tokens)

    def _say_filters(self, filters: str, shift: float) -> None:
        self._say(
            f"completions are sampled after {filters}, and the loss takes log-probabilities before: those of the sampled tokens "
            f"differ by {shift:.2g} on average at step {self.trainer.state.global_step}",
            once="filters",
        )

    def _sentence_of_processors(self, where: str, cause: str, mean: float, largest: float) -> str:
        moved = f" ({mean:.2%} of the probability moved on average, at most {largest:.2%})" if largest else ""
        return (
            f"tokens are not drawn{where} from the policy's distribution under the settings of this run: at step "
            f"{self.trainer.state.global_step} {cause or '`generate` makes other scores of the logits than the settings'}"
            f"{moved}; look for a `generate` or logits processors that the model brings, or set `generation_check: false`"
        )

    def _is_unusual(self, rank: Evidence) -> bool:
        if self.usual is None:
            return rank.differs(self.whole)
        return rank.mean > UNUSUAL * self.usual.mean and (rank.differs(self.whole) or not self.whole)

    def _judge(self, ranks: list[Evidence]) -> None:
        """Say what the evidence of all ranks comes to. Raises `NotThePolicy`."""
        if not self.whole:  # a few odd tokens decide: wait for more
            if self._pending is not None and self._pending[0].others.keys() == ranks[0].others.keys():
                ranks = [before + now for before, now in zip(self._pending, ranks, strict=True)]
            self._pending = ranks if min(rank.tokens for rank in ranks) < ENOUGH else None
            if self._pending is not None:
                return
        usual = None if self.usual is None else self.usual.mean
        verdicts = [judge(rank, whole=self.whole, usual=usual) for rank in ranks]
        for number, (rank, verdict) in enumerate(zip(ranks, verdicts, strict=True)):
            if verdict.wrong:
                raise NotThePolicy(self._sentence(number if len(ranks) > 1 else None, rank, verdict))
        names = {name for verdict in verdicts for name in verdict.names}
        if HALF in names and not self.half:
            self.half = True
            worst = max(ranks, key=lambda rank: rank.mean)
            self._say(
                f"the generator computes in 16 bits and the policy in 32: their log-probabilities differ by {worst.mean:.1e} in "
                f"the mean, and the policy's in bfloat16 by {worst.others[HALF].total / worst.tokens:.1e}",
                once="half",
            )
        for name in names & set(READINGS):
            self._read(name, ranks)
        if names.isdisjoint(READINGS):
            self._settle(ranks, verdicts)

    def _settle(self, ranks: list[Evidence], verdicts: list[Verdict]) -> None:
        """Take what was seen for usual, and say which alternatives it has excluded."""
        self.dtype_known = True
        for rank in ranks:
            new = Evidence(rank.tokens, rank.total, rank.largest, rank.square)
            self.usual = new if self.usual is None else self.usual + new
        worst = max(ranks, key=lambda rank: rank.mean)
        nearer = [name for verdict in verdicts for name in verdict.names if name in WEIGHTS]
        if nearer:
            self._say(
                f"the generator's log-probabilities are nearer to those of {WEIGHTS[nearer[0]]} than to the policy's, by no more "
                "than 16 bits explain: an adapter loses its smallest updates where it is merged into 16-bit weights",
                once="nearer",
            )
        elif worst.differs(self.whole):
            self._say(
                f"the generator's log-probabilities differ from the policy's by {worst.mean:.1e} on average, more than their "
                "dtypes explain, and nothing that can be computed here explains it",
                once="unexplained",
            )
        self._say_truncation(worst)
        unclear = tuple(dict.fromkeys(name for verdict in verdicts for name in verdict.unclear))
        if unclear and self.unclear is None:
            said = " or ".join(WEIGHTS[name] for name in unclear)
            logger.info(
                f"can't tell yet whether the generator is the policy or {said}: their log-probabilities are alike"
            )
        elif not unclear and self.unclear:
            logger.info(f"step {self.trainer.state.global_step}: the generator is the policy")
        self.unclear = unclear

    def _say_truncation(self, rank: Evidence) -> None:
        """Say what truncated sampling does to TRL's importance sampling correction (huggingface/trl#6789)."""
        if self.scorer.processing is None:
            return
        cut = rank.others[RAW].total / max(rank.tokens, 1.0)
        if not self.trainer.vllm_importance_sampling_correction:
            self._say_filters(str(self.scorer.processing), cut)
            return
        self._say(
            f"vLLM's log-probabilities are of the distribution after {self.scorer.processing}, those of the loss before: "
            "`vllm_importance_sampling_correction` takes that for a difference of policies (huggingface/trl#6789), at step "
            f"{self.trainer.state.global_step} {cut:.2g} a token on average; leave these keys out, or set it to false",
            once="truncation",
        )

    def _sentence(self, rank: int | None, evidence: Evidence, verdict: Verdict) -> str:
        where = "" if rank is None else f" of rank {rank}"
        if verdict.names:
            what = " or ".join(WEIGHTS[name] for name in verdict.names)
            alike = ", which are alike so far" if len(verdict.names) > 1 else ""
            cause = f"they are those of {what}{alike} ({verdict.explained:.0%} of the difference)"
        elif self.usual is not None:
            cause = (
                f"nothing that can be computed here explains it; they agreed before (to {self.usual.mean:.1e}), as with weights "
                "of an earlier step that were not replaced"
            )
        else:
            cause = "nothing that can be computed here explains it"
        return (
            f"the generator{where} is not the policy: at step {self.trainer.state.global_step} the log-probabilities of its "
            f"tokens differ by {evidence.mean:.2g} on average, and {cause}; `generation_check: false` goes on all the same"
        )

    def _read(self, name: str, ranks: Sequence[Evidence]) -> None:
        """Score from now on in another way, in which the generator is the policy."""
        if name == UNPADDED:
            self.scorer.padded = False
            self._say(
                "the policy's log-probabilities depend on padding: the loss, which pads prompts as TRL does, does not score "
                "tokens as they were sampled",
                once="padding",
            )
        elif name == WHOLE:
            # What was usual, and what the dtype may be, was learnt through the noise of autocast.
            self.scorer.autocast, self.usual, self.dtype_known = False, None, not self.trainer.use_vllm
            self._say(
                "tokens are sampled from what the policy is without autocast, rather than from what the loss computes under it: "
                f"log-probabilities differ by {max(rank.mean for rank in ranks):.1e} on average; "
                f"`{self.accelerator.mixed_precision}: false` makes them alike",
                once="whole",
            )
        else:
            self.scorer.processing = None

    def _say(self, sentence: str, once: str) -> None:
        """Warn, but only once of each matter."""
        if once not in self._said:
            self._said.add(once)
            logger.warning(sentence)

    # Their arithmetic

    def _rows(self, prompts: Completions, completions: Completions, noted: Mapping[int, Tensor]) -> tuple[Rows, Tensor]:
        """The noted rows in TRL's layout, and their log-probabilities, (B, T), NaN where there is none."""
        index = list(noted)
        longest = PROCESSED_TOKENS if self.scorer.processing is not None else None
        cut = [list(completions[row])[:longest] for row in index]
        rows = padded([prompts[row] for row in index], cut, self.accelerator.device)
        picked = torch.full(rows.completion_mask.shape, math.nan, device=rows.input_ids.device)
        for place, (row, ids) in enumerate(zip(index, cut, strict=True)):
            count = min(len(ids), len(noted[row]))
            picked[place, :count] = noted[row][:count].to(picked)
        return rows, picked

    def _size(self) -> int:
        training = self.trainer.model.training
        return self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size

    def _measure(self, rows: Rows, picked: Tensor) -> list[Evidence]:
        """The evidence of each rank, without alternatives."""
        expected = self.scorer(self.trainer.model, rows, self._size())
        return self._gathered([_sums(rows, picked, expected)], ())

    def _explore(self, rows: Rows, picked: Tensor, only: Sequence[str] = ()) -> list[Evidence]:
        """The evidence of each rank, with every alternative that can be computed, or `only` some."""
        expected = self.scorer(self.trainer.model, rows, self._size())
        sums, names = [_sums(rows, picked, expected)], []
        half = not self.dtype_known
        for name, (context, model, scorer) in alternatives(self.trainer, self.adapters, self.scorer, half).items():
            if only and name not in only:
                continue
            with context:
                other = scorer(model, rows, self._size())
            names.append(name)
            sums.append(_sums_of_other(rows, picked, expected, other))
        return self._gathered(sums, names)

    def _gathered(self, sums: list[Tensor], names: Sequence[str]) -> list[Evidence]:
        ours = torch.cat(sums).to(self.accelerator.device)
        table = self.accelerator.gather(ours[None]).double().cpu().reshape(-1, len(ours)).tolist()
        found = []
        for tokens, total, largest, square, *rest in table:
            others = {name: Alternative(*rest[3 * n : 3 * n + 3]) for n, name in enumerate(names)}
            found.append(Evidence(tokens, total, largest, square, others))
        return found


def watched_every(rows: int) -> int:
    """Of how many rows of a batch one is compared and logged."""
    count = WATCHED if rows >= WATCHED * ROWS_PER_WATCHED else 1
    return -(-rows // count)


def _labelled(rows: Rows, picked: Tensor) -> Tensor:
    """Which tokens have a log-probability to compare, (B, T): vLLM gives NaN for some."""
    return rows.completion_mask.bool() & picked.isfinite()


def _sums(rows: Rows, picked: Tensor, expected: Tensor) -> Tensor:
    """What makes an `Evidence`, (4,). `picked` is in float32, and so is what differs from it: not every device has float64."""
    gap = (picked - expected)[_labelled(rows, picked)]
    count = torch.tensor(float(gap.numel()), device=gap.device)
    largest = gap.abs().max() if gap.numel() else count
    return torch.stack([count, gap.abs().sum(), largest, gap.square().sum()])


def _sums_of_other(rows: Rows, picked: Tensor, expected: Tensor, other: Tensor) -> Tensor:
    """What makes an `Alternative`, (3,)."""
    labelled = _labelled(rows, picked)
    apart = (other - expected)[labelled].float()
    left = (picked - other)[labelled]
    return torch.stack([apart.square().sum(), left.square().sum(), apart.abs().sum()])


def _is_asked_for(mean: float, largest: float, other_processors: bool) -> bool:
    """Return True if the distances between two distributions are within the tolerance.

    The settings' own processors compute the same of the same logits, but a kernel that rounds by the size of its batch
    may keep one token more or less at the edge of `top_p`. Other processors have no such excuse.
    """
    sizes = torch.tensor(mean), torch.tensor(largest)
    return not disagreement(*sizes, whole_precision=other_processors, where="the tokens that are compared")


def unfit_layout(trainer: Any) -> str:
    """Why the ranks of a run neither decode groups nor compare what generated; empty if nothing speaks against it."""
    if trainer.is_fsdp_enabled:
        return "FSDP shards the weights"
    if trainer.tools and trainer.accelerator.num_processes > 1:
        return "ranks take different numbers of turns with tools, and the check of each turn is a collective"
    return ""


def padded(prompts: Completions, completions: Completions, device: torch.device) -> Rows:
    """Token lists in TRL's layout."""

    def side(rows: Completions, padding_side: str) -> tuple[Tensor, Tensor]:
        ids = [torch.tensor(list(row), dtype=torch.long) for row in rows]
        masks = [torch.ones_like(row) for row in ids]
        return pad(ids, 0, padding_side), pad(masks, 0, padding_side)

    left, right = side(prompts, "left"), side(completions, "right")
    ids, mask = (torch.cat(pair, 1).to(device) for pair in zip(left, right, strict=True))
    return Rows(ids, mask, right[0].shape[1])
