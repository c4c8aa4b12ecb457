"""Training on recorded, already scored responses: no generation, the same loss.

The data are triples (prompt, response, reward). TRL's rollout hook returns the recorded responses in place of generated
ones, and `recorded_reward` returns their recorded rewards. The advantage, the clipped ratio and the KL term are TRL's
own. A recipe:

    dataset: {name: scored, path: triples.jsonl}
    offline: {baseline: group}
    rewards: [grpo_recipes.training.offline.recorded_reward]

The baseline `group` compares a response with the other responses to the same prompt, so each prompt needs
`num_generations` responses. The baseline `batch` compares a response with all responses of the generation batch, for
one response per prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl.trainer.utils import RepeatSampler

from grpo_recipes.recipe.specs import RECORDED_REWARD, OfflineSpec
from grpo_rewards.errors import UserError

if TYPE_CHECKING:
    from grpo_recipes.generation.models import TRLTrainer


def recorded_reward(completions: Sequence[Any], recorded_reward: Sequence[float], **columns: Any) -> list[float]:
    """Return the reward recorded for each completion, which `RecordedRollout` provides in the column of this name."""
    return list(recorded_reward)


@dataclass(frozen=True)
class _Response:
    """A recorded response."""

    ids: list[int]
    """Token IDs, the last of which is the end-of-sequence token."""
    reward: float
    log_probs: list[float] | None
    """Log-probability of each token under the policy that wrote the response, or None if the file has none."""


class RecordedRollout:
    """Recorded responses in the form of TRL's `rollout_func`, a function of prompts to token IDs.

    A prompt that occurs n times in a generation batch gets n different responses: all of them if it has exactly n,
    otherwise a random sample.

    Args:
        dataset: columns of the dataset `scored`.
        tokenizer: tokenizer of the policy.
        spec: recipe key `offline`.
        max_completion_length: largest number of tokens of a response, end of sequence included.

    Raises:
        UserError: a response is too long, its log-probabilities do not match its tokens, or the tokenizer has no
            end-of-sequence token.
    """

    def __init__(
        self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, spec: OfflineSpec, max_completion_length: int
    ) -> None:
        if tokenizer.eos_token_id is None:
            problem = "recorded responses end in the end-of-sequence token, and it has none"
            raise UserError("tokenizer", problem, "set its `eos_token`")
        self.spec = spec
        self.has_log_probs = "logprobs" in dataset.column_names
        self._responses: dict[str, list[_Response]] = {}
        for row in dataset:
            # Tokenized apart from the prompt: joined text could merge the last token of the prompt with the first one
            # of the response, and generated tokens never merge with the prompt. The end of sequence is appended because
            # a recorded response is a finished one.
            encoded = tokenizer(list(row["responses"]), add_special_tokens=False)["input_ids"]
            log_probs = row["logprobs"] if self.has_log_probs else [None] * len(encoded)
            responses = self._responses.setdefault(row["prompt"], [])
            for ids, reward, recorded in zip(encoded, row["rewards"], log_probs, strict=True):
                responses.append(_Response([*ids, tokenizer.eos_token_id], reward, recorded))
        self._check_lengths(max_completion_length)

    def __call__(self, prompts: list[str], trainer: TRLTrainer) -> dict[str, Any]:
        """Return the token IDs of `prompts` and of one response to each, as TRL's `rollout_func` does."""
        chosen: list[_Response] = []
        for prompt, copies in groupby(prompts):
            responses, count = self._responses[prompt], len(list(copies))
            if count == len(responses):
                chosen += responses
            else:
                # torch's global generator, because checkpoints store its state: a resumed run draws the same responses.
                chosen += [responses[place] for place in torch.randperm(len(responses))[:count].tolist()]
        return {
            "prompt_ids": trainer.processing_class(text=prompts)["input_ids"],
            "completion_ids": [response.ids for response in chosen],
            "logprobs": [response.log_probs for response in chosen] if self.has_log_probs else None,
            RECORDED_REWARD: [response.reward for response in chosen],
        }

    def _check_lengths(self, limit: int) -> None:
        responses = [response for group in self._responses.values() for response in group]
        longest = max(len(response.ids) for response in responses)
        # TRL would not cut a response of a rollout: it would train on more tokens than the recipe allows.
        if longest > limit:
            overlong = sum(len(response.ids) > limit for response in responses)
            problem = f"it is {limit}, and {overlong} of {len(responses)} recorded responses are longer"
            raise UserError("`max_completion_length`", problem, f"set it to {longest}, or leave them out")
        for response in responses:
            if response.log_probs is not None and len(response.log_probs) != len(response.ids):
                problem = (
                    f"a recorded response has {len(response.log_probs)} of them and {len(response.ids)} tokens, the "
                    "end of sequence included"
                )
                raise UserError("`logprobs`", problem, "record them with this tokenizer, or leave them out")


def with_baseline(sampler: RepeatSampler, rollout: object) -> RepeatSampler:
    """Return TRL's sampler, which with the batch baseline yields each prompt once and not `num_generations` times."""
    if isinstance(rollout, RecordedRollout) and rollout.spec.compares_whole_batch:
        # `num_generations` is then the full generation batch (see `recipe.grpo_config`), so TRL's group is the batch.
        sampler.batch_size *= sampler.mini_repeat_count
        sampler.mini_repeat_count = 1
    return sampler


def with_recorded_log_probs(inputs: dict[str, Any], rollout: object) -> dict[str, Any]:
    """Return a micro-batch whose importance ratio is policy / behaviour policy if the file has log-probabilities."""
    if isinstance(rollout, RecordedRollout) and rollout.has_log_probs:
        # Without vLLM, TRL 1.16 ignores a rollout's log-probabilities, and the ratio would be 1.
        return {**inputs, "old_per_token_logps": inputs["sampling_per_token_logps"]}
    return inputs
