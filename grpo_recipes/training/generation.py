"""Generation for a trainer, by whichever generator it has, in the context and with the check that this generator needs.

With transformers' `generate`, groups are decoded if that is exact, which the first batch decides. Keys and values are
kept between the turns of a generation batch if that is exact, which the first turn that uses them decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from trl.chat_template_utils import parse_response

from grpo_recipes.generation.generator_check import GenerationCheck, unfit_layout
from grpo_recipes.generation.groups import STOCK_LOOP, Turn, decoding
from grpo_recipes.generation.kept_cache import KeptCache, memory_limit
from grpo_recipes.generation.models import base_model, has_dropout, unfit
from grpo_recipes.generation.sampling_settings import PublishedSettings
from grpo_recipes.generation.stop_strings import Ends, StopStrings
from grpo_recipes.generation.verified import FastWay
from grpo_recipes.process.messages import Announcer
from grpo_recipes.recipe.specs import GenerationMode
from grpo_recipes.training.trl_patches import continuous_batching, refuse_cast, send_settings

if TYPE_CHECKING:
    from grpo_recipes.generation.models import TRLTrainer

CompletionIds = list[list[int]]
TRLTurn = Callable[[], tuple[CompletionIds, Any]]
"""TRL's own generation of one turn: completions, and log-probabilities if vLLM generates."""
LoggedDifference = tuple[float, float] | None
"""Mean and largest difference from the policy's log-probabilities, or None if it is not logged."""

DROPOUT = "they are sampled with dropout"
OTHER_LOOP = "`generate` is the model's own, or its tokens and forwards do not go together"

logger = get_logger(__name__)


class Generation:
    """Generation of one turn for a trainer.

    Args:
        trainer: the trainer.
        check: the comparison of what generated with the policy.
        stop: strings that end a completion, or None.
        mode: "auto" to decode groups unless something prevents it, or "off".
    """

    def __init__(
        self, trainer: TRLTrainer, check: GenerationCheck, stop: StopStrings | None, mode: GenerationMode
    ) -> None:
        self.trainer, self.check, self.stop, self.mode = trainer, check, stop, mode
        self.published = PublishedSettings(logger.warning)
        """Settings of the policy's generation_config, which are put aside while it generates."""
        announcer = Announcer(logger.warning)
        # Both have the same doubt on every rank: a rank alone must not change its number of forwards.
        self.groups = FastWay(announcer.once, STOCK_LOOP)
        """Group decoding."""
        self.reuse = FastWay(announcer.once, "keys and values are not kept between turns: {}")
        """Reuse of keys and values in the next turn of a completion."""
        self._kept: KeptCache | None = None
        if trainer.use_vllm:
            send_settings(trainer, self.published)
        if trainer.use_transformers_continuous_batching:
            refuse_cast(trainer.model, trainer.args)

    def __call__(self, turn: TRLTurn, prompts: Sequence[Sequence[int]]) -> tuple[CompletionIds, Any, LoggedDifference]:
        """Generate one turn and compare it with the policy.

        Returns:
            Completions, TRL's log-probabilities of them or None, and the difference from the policy.

        Raises:
            NotThePolicy: something else than the policy generated the completions.
        """
        trainer = self.trainer
        if trainer.use_vllm:
            # An engine has no dropout, and its processors act before its log-probabilities.
            completions, log_probs = turn()
            return completions, log_probs, self.check.of_vllm(prompts, completions, log_probs)
        # Looked up once: accelerate reads DeepSpeed's metadata from disk each time.
        policy = trainer.accelerator.unwrap_model(trainer.model)
        if trainer.use_transformers_continuous_batching:
            published = self.published.aside(policy, trainer.generation_config)
            config, limit = trainer.continuous_batching_config, trainer.max_completion_length
            with published, continuous_batching(config, policy, prompts, limit):
                completions, _ = turn()
            # TRL discards the log-probabilities of `generate_batch`: the check announces that nothing is compared.
            return completions, None, self.check(prompts, completions, None)
        # No other computation repeats a dropout mask, so these completions have nothing to be compared with.
        drops = trainer.model.training and has_dropout(base_model(policy))
        completions, recorded = self._generate(turn, policy, prompts, drops)
        difference = self.check(prompts, completions, recorded, DROPOUT if drops else OTHER_LOOP)
        self.check.check_processors()
        return completions, None, difference

    @contextmanager
    def one_batch(self) -> Iterator[None]:
        """Keep keys and values between the turns that are generated inside this block."""
        if not self.reuse.doubt and (self.trainer.tools or self.trainer.rollout_func is not None):
            self._kept = KeptCache(self._may_go_on, memory_limit(self.trainer.accelerator.device))
        try:
            yield
        finally:
            self._kept = None  # the weights change next, and training needs the memory

    def _may_go_on(self, prompt: list[int], completion: list[int]) -> bool:
        """Return True if another turn may follow a completion."""
        if self.trainer.rollout_func is not None:
            return True
        return bool(parse_response(self.trainer._tokenizer, completion, prefix=prompt).get("tool_calls"))

    def _on_any_rank(self, *values: bool) -> list[bool]:
        """Return for each of `values` whether it is true on any rank."""
        accelerator = self.trainer.accelerator
        gathered: Tensor = accelerator.gather(torch.tensor([values], device=accelerator.device))
        found: list[bool] = gathered.any(0).tolist()
        return found

    def _generate(
        self, turn: TRLTurn, policy: nn.Module, prompts: Sequence[Sequence[int]], drops: bool
    ) -> tuple[CompletionIds, Mapping[int, Tensor] | None]:
        """Return completions of transformers' `generate`, and recorded log-probabilities of some rows, by row.

        If the first batch of groups differs from the policy, transformers' own loop generates it again. If the first
        turn with kept keys and values differs, it is generated again without them.
        """
        if self.reuse.doubt:
            self._kept = None
        reason = self.groups.doubt or unfit_for_groups(self.trainer) or unfit(policy)
        grouped = self.mode != "off" and not reason
        # All rows of the first batch of groups, and of the first turn that may use kept keys and values, are recorded,
        # also without the check: they decide whether this stays.
        kept = self._kept if grouped else None
        may_reuse = False
        if kept is not None and not self.reuse.is_verified:
            (may_reuse,) = self._on_any_rank(kept.holds_start_of(prompts))
        is_first = grouped and not self.groups.is_verified
        every = 1 if may_reuse or is_first else self.check.record_every(len(prompts))
        request = Turn(
            grouped=grouped,
            record_every=0 if drops else every,
            temperature=self.trainer.temperature,
            together=self.trainer._dist.is_zero3,
            kept=kept,
        )
        completions = self._run(turn, policy, request)
        recorded, is_grouped, is_reused = None, False, False
        if request.record_every:
            # The prompts of one rank alone may prevent groups, and what follows is a collective.
            is_lost, is_grouped, is_reused = self._on_any_rank(
                request.log_probs is None, grouped and not request.declined, request.reused
            )
            if request.log_probs is not None and not is_lost:
                recorded = dict(zip(request.recorded_rows(len(prompts)), request.log_probs, strict=True))
        if self.mode != "off" and (reason or request.declined):
            self.groups.skip(reason or request.declined)
        doubt = ""
        # Each of these ways records the rows that it generates.
        compare = partial(self.check.verify, prompts, completions, recorded or {})
        if is_first and is_grouped:
            doubt = self.groups.check(partial(compare, "group decoding picks tokens", "the first batch"))
        elif may_reuse and is_reused:
            doubt = self.reuse.check(partial(compare, "tokens are picked", "the first turn that uses them"))
        if doubt:
            # Nothing has been trained on these tokens yet, so they can be thrown away.
            return self._generate(turn, policy, prompts, drops)
        if kept is not None and request.not_kept:  # a property of the model: the same on every rank
            self.reuse.record(request.not_kept)
        return completions, recorded

    def _run(self, turn: TRLTurn, policy: nn.Module, request: Turn) -> CompletionIds:
        """Return the completions of TRL's call of `generate`, cut at their stop strings."""
        ends = [] if self.stop is None else [Ends(self.stop)]
        published = self.published.aside(policy, self.trainer.generation_config)
        model = base_model(policy)
        with published, self.check.watching_processors(model), decoding(model, request, ends):
            completions, _ = turn()
        # TRL reads a completion up to its first end token, and would keep the padding behind a stop string.
        for end in ends:
            completions = end.cut(completions)
        return completions


def unfit_for_groups(trainer: TRLTrainer) -> str:
    """Return why the ranks of a run do not decode groups, or "" if nothing prevents it."""
    if trainer._dist.is_zero3 and not trainer.args.ds3_gather_for_generation:
        return "ZeRO-3 shards the weights, with ds3_gather_for_generation: false"
    return unfit_layout(trainer)
