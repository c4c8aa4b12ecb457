"""Training on recorded, already scored responses: no generation, the same loss.

The data are triples (prompt, response, reward). Recorded responses take the place of what the policy would have generated:
TRL's rollout hook returns them, `recorded_reward` pays what was recorded for them, and the advantage, the clipped ratio and
the KL term are TRL's own. A recipe says

    dataset: {name: scored, path: triples.jsonl}
    offline: {baseline: group}
    rewards: [grpo_recipes.training.offline.recorded_reward]

`group` compares a response with the others to the same prompt, and so needs `num_generations` of them for each prompt.
`batch` compares it with all responses of the generation batch, whatever their prompts: for one response a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from datasets import Dataset
from trl.trainer.utils import RepeatSampler

from grpo_recipes.recipe.specs import RECORDED_REWARD, OfflineSpec
from grpo_rewards.errors import UserError


class OfflineError(UserError):
    """Recorded responses that can't be trained on as asked, in one sentence that names the key and the fix."""


def recorded_reward(completions: Sequence[Any], recorded_reward: Sequence[float], **columns: Any) -> list[float]:
    """Pay each completion the reward recorded for it, which `RecordedRollout` hands over in the column of this name."""
    return list(recorded_reward)


@dataclass(frozen=True)
class _Response:
    """A recorded response: its token ids, ending in the end-of-sequence token, its reward, and its log-probabilities."""

    ids: list[int]
    reward: float
    log_probs: list[float] | None


class RecordedRollout:
    """Recorded responses in the form of TRL's `rollout_func`, which sees prompts and returns token ids.

    A prompt that comes n times gets n different responses of its own: all of them if there are exactly n, otherwise a draw
    with torch's global generator, whose state a checkpoint keeps. A prompt and its response are tokenised separately, and
    the end-of-sequence token is appended, since a recorded response is a finished one.

    Args:
        dataset: the columns of the dataset `scored`.
        tokenizer: the policy's.
        spec: the recipe's `offline` key.
        max_completion_length: the longest response in tokens, end of sequence included.

    Raises:
        OfflineError: a response is too long, its log-probabilities do not match its tokens, or the tokenizer has no
            end-of-sequence token.
    """

    def __init__(self, dataset: Dataset, tokenizer: Any, spec: OfflineSpec, max_completion_length: int) -> None:
        if tokenizer.eos_token_id is None:
            raise OfflineError("recorded responses end in the end-of-sequence token, and this tokenizer has none")
        self.spec = spec
        self.has_log_probs = "logprobs" in dataset.column_names
        self._responses: dict[str, list[_Response]] = {}
        for row in dataset:
            log_probs = row["logprobs"] if self.has_log_probs else [None] * len(row["responses"])
            columns = (_token_ids(row["responses"], tokenizer), row["rewards"], log_probs)
            self._responses.setdefault(row["prompt"], []).extend(map(_Response, *columns))
        self._check_lengths(max_completion_length)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """The token ids of `prompts` and of a response to each, in order, as TRL's `rollout_func` returns them."""
        chosen = [response for prompt, copies in groupby(prompts) for response in self._draw(prompt, len(list(copies)))]
        return {
            "prompt_ids": trainer.processing_class(text=prompts)["input_ids"],
            "completion_ids": [response.ids for response in chosen],
            "logprobs": [response.log_probs for response in chosen] if self.has_log_probs else None,
            RECORDED_REWARD: [response.reward for response in chosen],
        }

    def _draw(self, prompt: str, count: int) -> list[_Response]:
        responses = self._responses[prompt]
        if count == len(responses):
            return responses
        return [responses[place] for place in torch.randperm(len(responses))[:count].tolist()]

    def _check_lengths(self, limit: int) -> None:
        responses = [response for group in self._responses.values() for response in group]
        longest = max(len(response.ids) for response in responses)
        if longest > limit:
            overlong = sum(len(response.ids) > limit for response in responses)
            raise OfflineError(
                f"`max_completion_length` is {limit}, and {overlong} of {len(responses)} recorded responses are longer: set it "
                f"to {longest}, or leave them out"
            )
        for response in responses:
            if response.log_probs is not None and len(response.log_probs) != len(response.ids):
                raise OfflineError(
                    f"`logprobs`: a recorded response has {len(response.log_probs)} of them and {len(response.ids)} tokens, "
                    "the end of sequence included: record them with this tokenizer, or leave them out"
                )


def with_baseline(sampler: RepeatSampler, rollout: Any) -> RepeatSampler:
    """TRL's sampler; with the batch baseline it gives each prompt once, not `num_generations` times.

    `num_generations` is then the whole generation batch (see `checks.grpo_config`), so that TRL's group is the batch.
    """
    if isinstance(rollout, RecordedRollout) and rollout.spec.compares_whole_batch:
        sampler.batch_size *= sampler.mini_repeat_count
        sampler.mini_repeat_count = 1
    return sampler


def with_recorded_log_probs(inputs: dict[str, Any], rollout: Any) -> dict[str, Any]:
    """A micro-batch whose importance ratio is taken over the recorded log-probabilities, where the file has them.

    They are the behaviour policy's, so that the ratio is policy / behaviour, clipped as usual. TRL 1.16 ignores a rollout's
    log-probabilities without vLLM.
    """
    if isinstance(rollout, RecordedRollout) and rollout.has_log_probs:
        return {**inputs, "old_per_token_logps": inputs["sampling_per_token_logps"]}
    return inputs


def _token_ids(responses: Sequence[str], tokenizer: Any) -> list[list[int]]:
    return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(list(responses), add_special_tokens=False)["input_ids"]]
