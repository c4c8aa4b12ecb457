"""Training arguments that keep their secrets to themselves: what is saved or sent to a tracker holds placeholders.

transformers pickles its arguments into `training_args.bin` with each save, and gives them to every tracker as
configuration. The attributes keep their true values, which training needs: the URL of a vLLM server, the hub's token.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers import TrainingArguments

from grpo_rewards.redaction import HIDDEN, is_secret, redacted


def hide_secrets(args: TrainingArguments) -> None:
    """Make `args` hide its secrets when it is pickled, copied or turned into a dictionary. Its attributes stay as they
    are.

    The object stays the same one, as a script may go on to set its attributes; its class becomes a subclass of its own.
    A file pickled from it names the class that it had before, and is loaded without this package.
    """
    original: Any = type(args)
    if not issubclass(original, _HidesSecrets):
        args.__class__ = _hiding(original)


class _HidesSecrets(TrainingArguments):
    """The methods by which transformers, torch and trackers take arguments as a whole."""

    def to_dict(self) -> dict[str, Any]:
        return redacted(super().to_dict())

    def __reduce_ex__(self, protocol: Any) -> Any:
        original = type(self).__bases__[1]
        shown: Any = object.__new__(original)
        vars(shown).update(without_secrets(vars(self)))
        return shown.__reduce_ex__(0)  # later protocols refuse to name another class than the object's


@cache
def _hiding(original: Any) -> Any:
    """Return a subclass of `original`, of the same name, whose instances hide their secrets."""
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original.__name__, (_HidesSecrets, original), names)


def without_secrets(value: Any) -> Any:
    """Return `value` with a placeholder for each secret in it, of the same type; `value` itself if it holds none.

    Unlike `redacted`, it keeps tuples and enumerations, and looks into DeepSpeed's configuration, which may name
    trackers.
    """
    if isinstance(value, (HfDeepSpeedConfig, DeepSpeedPlugin)):
        inside = without_secrets(vars(value))
        if inside is vars(value):
            return value
        duplicate = object.__new__(type(value))
        vars(duplicate).update(inside)
        return duplicate
    if isinstance(value, Mapping):
        entries = {
            without_secrets(key): HIDDEN if is_secret(key, inner) else without_secrets(inner)
            for key, inner in value.items()
        }
        return entries if any(entries.get(key, HIDDEN) is not inner for key, inner in value.items()) else value
    if type(value) in (list, tuple):
        items = [without_secrets(item) for item in value]
        return type(value)(items) if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return redacted(value) if type(value) is str else value
