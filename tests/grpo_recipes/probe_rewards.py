"""A reward that an untrained policy earns differently from one completion to the next."""

from grpo_rewards.completions import completion_text


def distinct_characters(completions: list, **columns: object) -> list[float]:
    """The number of distinct characters of each completion."""
    return [float(len(set(completion_text(completion)))) for completion in completions]


def broken(completions: list, **columns: object) -> list[float]:
    """A reward with a bug in it."""
    raise KeyError("gold")
