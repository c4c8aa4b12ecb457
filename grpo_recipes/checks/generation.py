"""What a recipe may ask of generation beyond plain numbers: strings that end a completion, options that would be lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from grpo_rewards.errors import UserError

NOT_IN_CONTINUOUS_BATCHING = {
    "encoder_repetition_penalty": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "repetition_penalty": 1.0,
}
"""Options that transformers 5.23 drops with a warning, and the value with which nothing is lost."""


def check(config: Any) -> None:
    """Raise `UserError` for stop strings that are none, and for options that continuous batching would silently leave out.

    `config` has the attributes of `GRPOConfig`.
    """
    given = _mapping(config.generation_kwargs)
    stop = stop_strings(given)
    if not config.use_transformers_continuous_batching:
        return
    asked = {"repetition_penalty": config.repetition_penalty, **given}
    lost = [name for name, neutral in NOT_IN_CONTINUOUS_BATCHING.items() if asked.get(name) not in (None, neutral)]
    if lost := lost + ["stop"] * bool(stop):
        raise UserError(
            f"`use_transformers_continuous_batching` leaves out {', '.join(lost)}: set it to false, or drop the option"
        )


def stop_strings(generation_kwargs: Mapping[str, Any] | str | None) -> tuple[str, ...]:
    """The strings that end a completion, which TRL's `generation_kwargs` name under `stop`, as vLLM spells it.

    Raises `UserError` for what is no string or list of them, and for transformers' own key, which TRL can't serve.
    """
    asked = _mapping(generation_kwargs)
    if asked.get("stop_strings") is not None:
        raise UserError("`generation_kwargs.stop_strings`: write `stop` instead, which vLLM understands as well")
    stop = asked.get("stop")
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(text, str) and text for text in strings):
        raise UserError(f"`generation_kwargs.stop` must be a string or a list of strings, not {stop!r}")
    return tuple(strings)


def _mapping(generation_kwargs: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    """`generation_kwargs` as `GRPOConfig` reads them: a mapping, or one written as JSON."""
    given: Any = generation_kwargs or {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise UserError(f"`generation_kwargs` is not JSON ({error}): write a mapping") from error
    if not isinstance(given, Mapping):
        raise UserError(f"`generation_kwargs` must be a mapping, not {given!r}")
    return given
