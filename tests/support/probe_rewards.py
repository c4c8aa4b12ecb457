"""Rewards whose value differs between the completions of an untrained policy, that raise, or that press Ctrl-C."""

import os
import signal

from transformers import TrainerState

from grpo_rewards.completions import completion_text


def distinct_characters(completions: list, **columns: object) -> list[float]:
    """Return the number of distinct characters of each completion."""
    return [float(len(set(completion_text(completion)))) for completion in completions]


def broken(completions: list, **columns: object) -> list[float]:
    """Raise, as a reward with a bug does."""
    raise KeyError("gold")


BROKEN: list[str] = []


def broken_later(prompts: list, completions: list, trainer_state: TrainerState, **columns: object) -> list[float]:
    """Raise for the first prompt of the second step, and return the lengths of the completions otherwise."""
    if trainer_state.global_step == 1 and not BROKEN:
        BROKEN.append(str(prompts[0]))
    if any(str(prompt) in BROKEN for prompt in prompts):
        raise ValueError("no answer")
    return [float(len(completion_text(completion))) for completion in completions]


def interrupted_once(completions: list, trainer_state: TrainerState, **columns: object) -> list[float]:
    """Ctrl-C while the second step's completions are scored."""
    if trainer_state.global_step == 1:
        os.kill(os.getpid(), signal.SIGINT)
    return distinct_characters(completions, **columns)


def interrupted_twice(completions: list, trainer_state: TrainerState, **columns: object) -> list[float]:
    """Ctrl-C twice."""
    if trainer_state.global_step == 1:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    return distinct_characters(completions, **columns)
