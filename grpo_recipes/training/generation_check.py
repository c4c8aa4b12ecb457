"""Group decoding in a trainer: chosen where it is exact, verified on the first batch, watched from then on.

A mistake in the cache would give completions of another distribution without any error. So the log-probabilities under
which tokens were picked are held against a plain forward of the policy: those of all rows of the first batch, which
decides, and of `WATCHED` rows of each batch, which is logged under TRL's names for the same difference with vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import Tensor, nn
from trl import GRPOConfig
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad

from grpo_recipes.decoding.check import disagreement, has_whole_precision
from grpo_recipes.decoding.groups import Turn, decoding
from grpo_recipes.decoding.models import base_model, unfit
from grpo_recipes.decoding.stop_strings import Ends, StopStrings
from grpo_recipes.training.log_probs import PerToken, eval_no_grad
from grpo_recipes.training.packing import Rows

WATCHED = 2
"""Rows of a batch whose log-probabilities are logged: always those at the same places, as after a restart."""

Completions = list[list[int]]

logger = get_logger(__name__)


class Generation:
    """How a trainer's model generates: by groups if `asked` is "auto", unless `stock_because` says why not."""

    def __init__(
        self,
        accelerator: Accelerator,
        args: GRPOConfig,
        plain: Callable[[nn.Module, Rows, bool], PerToken],
        temperature: float,
        stop: StopStrings | None,
        asked: Literal["auto", "off"],
        stock_because: str,
        together: bool,
    ) -> None:
        self.accelerator, self.args, self.plain, self.temperature = accelerator, args, plain, temperature
        self.stop, self.asked, self.stock_because, self.together = stop, asked, stock_because, together
        self.same_stream = False
        """See `Turn.same_stream`."""
        self.is_verified = False
        """Whether the first batch has passed."""
        self._said: set[str] = set()

    def __call__(
        self, generate: Callable[[], Completions], model: nn.Module, prompts: Sequence[Sequence[int]]
    ) -> tuple[Completions, tuple[float, float] | None]:
        """TRL's `generate()`, and how far its log-probabilities are from a plain forward's, (mean, largest) over all ranks.

        Without the latter where transformers' own loop ran.
        """
        policy = self.accelerator.unwrap_model(model)
        reason = self.stock_because or unfit(policy)
        watched = max(len(prompts) // WATCHED, 1)
        turn = None
        if self.asked == "auto" and not reason:
            every = watched if self.is_verified else 1
            turn = Turn(every, self.temperature, self.same_stream, self.together)
        ends = [] if self.stop is None else [Ends(self.stop)]
        with decoding(base_model(policy), turn, ends):
            completions = generate()
        for end in ends:
            completions = end.cut(completions)
        if turn is None or turn.declined:
            if self.asked == "auto":
                self._say(turn.declined if turn is not None else reason)
            return completions, None
        assert turn.log_probs is not None
        noted = dict(zip(turn.scored(len(prompts)), turn.log_probs, strict=True))
        if not self.is_verified:
            mean, largest = self._difference(model, policy, prompts, completions, noted)
            if doubt := self._doubt(policy, mean.max(), largest.max()):
                self.stock_because = (
                    f"group decoding picks tokens under other log-probabilities than the policy's ({doubt})"
                )
                return self(generate, model, prompts)
            self.is_verified = True
        few = {row: noted[row] for row in range(0, len(prompts), watched)}
        mean, largest = self._difference(model, policy, prompts, completions, few)
        return completions, (mean.mean().item(), largest.max().item())

    def _difference(
        self,
        model: nn.Module,
        policy: nn.Module,
        prompts: Sequence[Sequence[int]],
        completions: Completions,
        noted: Mapping[int, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Of each rank, the mean and the largest difference over the tokens of the `noted` rows, (ranks,) each."""
        index = list(noted)
        rows = padded([prompts[row] for row in index], [completions[row] for row in index], self.accelerator.device)
        size = self.args.per_device_train_batch_size if policy.training else self.args.per_device_eval_batch_size
        chunks = torch.arange(len(index)).split(size)  # equally many on all ranks: under ZeRO-3 each is a collective
        with eval_no_grad(policy), disable_gradient_checkpointing(policy, self.args.gradient_checkpointing_kwargs):
            expected = torch.cat([self.plain(model, rows.select(chunk), False)[0] for chunk in chunks])
        picked = torch.stack(list(noted.values()))[:, : rows.logits_to_keep].to(expected.device)
        gap = (picked - expected).abs()[rows.completion_mask.bool()].float()
        by_rank = self.accelerator.gather(torch.stack([gap.mean(), gap.max()])[None])
        return by_rank[:, 0], by_rank[:, 1]

    def _doubt(self, policy: nn.Module, mean: Tensor, largest: Tensor) -> str:
        """By how much the first batch differs, as a phrase; empty within the tolerance that packed rows have too."""
        whole = has_whole_precision(policy) and self.accelerator.mixed_precision == "no"
        return disagreement(mean, largest, whole_precision=whole, where="the first batch")

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            logger.warning(f"completions are generated by transformers' own loop: {reason}")


def unfit_layout(trainer: Any) -> str:
    """Why the ranks of a run don't decode groups; empty if nothing speaks against it."""
    if trainer.is_fsdp_enabled:
        return "FSDP shards the weights"
    if trainer._dist.is_zero3 and not trainer.args.ds3_gather_for_generation:
        return "ZeRO-3 shards the weights, with ds3_gather_for_generation: false"
    if trainer.tools and trainer.accelerator.num_processes > 1:
        return "ranks take different numbers of turns with tools, and the check of each turn is a collective"
    return ""


def padded(prompts: Sequence[Sequence[int]], completions: Completions, device: torch.device) -> Rows:
    """Token lists in TRL's layout."""

    def side(rows: Sequence[Sequence[int]], padding_side: str) -> tuple[Tensor, Tensor]:
        ids = [torch.tensor(list(row)) for row in rows]
        masks = [torch.ones_like(row) for row in ids]
        return pad(ids, 0, padding_side), pad(masks, 0, padding_side)

    left, right = side(prompts, "left"), side(completions, "right")
    ids, mask = (torch.cat(pair, 1).to(device) for pair in zip(left, right, strict=True))
    return Rows(ids, mask, right[0].shape[1])
