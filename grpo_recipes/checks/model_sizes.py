"""Check of the sizes in a model's config.json, before transformers builds a configuration or a model with them.

transformers compares types and no magnitudes. With ten million layers it builds modules for hours, even without
storage.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.runs.files import RunError, read_object
from grpo_recipes.runs.weights import ADAPTER_CONFIG, weight_files
from grpo_rewards.errors import UserError, shortened

CONFIG = "config.json"


@dataclass(frozen=True)
class Allowed:
    """Integers from 1 to `most` that a size may have.

    Attributes:
        most: Several times the largest value of a published model.
        optional: True if null or 0 is allowed, which stands for "none" or for a value that follows from others.
        per_layer: True if a list with one value per layer is allowed.
    """

    most: int
    optional: bool = False
    per_layer: bool = False

    def holds(self, value: Any) -> bool:
        """Return True if a size of a language model may have `value`."""
        if isinstance(value, list):
            return self.per_layer and len(value) <= LAYERS and all(self._holds_number(item) for item in value)
        return self.optional if value is None else self._holds_number(value)

    def _holds_number(self, value: Any) -> bool:
        return type(value) is int and (0 if self.optional else 1) <= value <= self.most

    def is_within(self, value: Any) -> bool:
        """Return True unless `value` is or holds a number above `most`, for parts that use a key in another sense."""
        numbers = value if isinstance(value, list) else [value]
        return len(numbers) <= LAYERS and not any(isinstance(one, (int, float)) and one > self.most for one in numbers)


LAYERS = 1024

SIZES: Mapping[str, Allowed] = {
    "vocab_size": Allowed(2**22),
    "hidden_size": Allowed(2**17),
    "num_hidden_layers": Allowed(LAYERS),
    "num_attention_heads": Allowed(2**12, per_layer=True),
    "num_key_value_heads": Allowed(2**12, optional=True, per_layer=True),
    "head_dim": Allowed(2**13, optional=True),
    "intermediate_size": Allowed(2**20, optional=True, per_layer=True),
    "moe_intermediate_size": Allowed(2**20, optional=True, per_layer=True),
    "num_experts": Allowed(2**16, optional=True),
    "num_local_experts": Allowed(2**16, optional=True),
    "n_routed_experts": Allowed(2**16, optional=True),
    "max_position_embeddings": Allowed(2**27, optional=True),
}
"""Allowed sizes by their names in transformers. The `attribute_map` of an architecture holds its own names."""

TEXT_CONFIGS = ("text_config", "decoder")
"""Keys of the language model in the configuration of a model that also reads images or speech."""

# A byte holds 2 weights of 4 bits, and 8 weights of 1 bit.
_WEIGHTS_PER_BYTE = 8


def check_model_sizes(name: str, revision: str = "main", *, local_only: bool = True) -> None:
    """Raise `UserError` if the configuration of a model has an impossible size, or one too large for its weights.

    Args:
        name: Path of a model's folder or of its config.json, or its name on the hub. Where there is no configuration,
            as in the folder of an adapter, nothing is checked.
        revision: Version on the hub.
        local_only: True to look only into the hub's cache.
    """
    path = _config_file(name, revision, local_only=local_only)
    if path is None:  # loading the model reports what is missing
        return
    config = read_object(path, {}, "copy or download it again")
    for part in _parts(config):
        for key, allowed in part.sizes():
            value = part.values[key]
            if not (allowed.holds(value) if part.is_language_model else allowed.is_within(value)):
                raise UserError(
                    f"{path}: `{part.prefix}{key}` is {shortened(json.dumps(value))}, and a size of a model is a whole "
                    f"number from 1 to {allowed.most:,}: correct it, or copy or download the file again"
                )
    # An adapter's folder may hold a copy of its base's config.json, and only the adapter's weights.
    if path != Path(name) and not (path.parent / ADAPTER_CONFIG).exists():
        _check_against_weights(path, config)


def largest_position(name: str, revision: str = "main") -> int | None:
    """Return `max_position_embeddings` of a model that `check_model_sizes` accepts, or None if no file here says."""
    path = _config_file(name, revision, local_only=True)
    if path is None:
        return None
    sizes = [part.size("max_position_embeddings") for part in _parts(read_object(path, {}))]
    return max(sizes) or None


@dataclass(frozen=True)
class _Part:
    """Object in a configuration.

    Attributes:
        values: Content of the object.
        prefix: Keys that lead to the object, each followed by a dot.
        is_language_model: True if every size must be possible. In other parts a size must only not be too large.
    """

    values: Mapping[str, Any]
    prefix: str
    is_language_model: bool

    def sizes(self) -> Iterator[tuple[str, Allowed]]:
        """Yield the key of each size in this part, as the part names it, with the allowed values."""
        own_names = _own_names(self.values.get("model_type"))
        for name, allowed in SIZES.items():
            for key in {name, own_names.get(name, name)}:
                if key in self.values:
                    yield key, allowed

    def size(self, name: str) -> int:
        """Return a size by its name in transformers: the largest of several layers, or 0 if there is none."""
        own_names = _own_names(self.values.get("model_type"))
        value = self.values.get(name, self.values.get(own_names.get(name, name)))
        return max(value, default=0) if isinstance(value, list) else value or 0


def _parts(config: Mapping[str, Any]) -> Iterator[_Part]:
    """Yield a configuration and the objects in it, two levels deep. At least one of them is a language model."""
    has_text_config = any(isinstance(config.get(key), dict) for key in TEXT_CONFIGS)
    yield _Part(config, "", not has_text_config)
    for key, values in config.items():
        if isinstance(values, dict):
            yield _Part(values, f"{key}.", key in TEXT_CONFIGS)
            for inner_key, inner in values.items():
                if isinstance(inner, dict):
                    yield _Part(inner, f"{key}.{inner_key}.", inner_key in TEXT_CONFIGS)


def _own_names(model_type: Any) -> Mapping[str, str]:
    """Return an architecture's own names for its keys, or {} if transformers does not know the architecture."""
    from transformers import CONFIG_MAPPING  # takes seconds

    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return {}
    return getattr(CONFIG_MAPPING[model_type], "attribute_map", {})


def _config_file(name: str, revision: str, *, local_only: bool) -> Path | None:
    """Return the path of a model's configuration, or None if there is none."""
    if Path(name).exists():
        path = Path(name) / CONFIG if Path(name).is_dir() else Path(name)
        return path if path.exists() else None
    from transformers.utils import cached_file  # takes seconds

    with contextlib.suppress(OSError, ValueError):
        found = cached_file(name, CONFIG, revision=revision, local_files_only=local_only)
        return None if found is None else Path(found)
    return None


def _check_against_weights(path: Path, config: Mapping[str, Any]) -> None:
    """Raise `UserError` if one matrix would have more weights than all the files beside the configuration can hold."""
    try:
        held = sum(file.stat().st_size for file in weight_files(path.parent)) * _WEIGHTS_PER_BYTE
    except (RunError, OSError):  # loading the weights reports what is wrong
        return
    part = next(part for part in _parts(config) if part.is_language_model)
    hidden = part.size("hidden_size")
    # Each layer has at least a norm, and each expert a row of its router.
    rows_of = (
        "vocab_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
    )
    matrices = {name: part.size(name) for name in rows_of}
    matrices["head_dim"] = part.size("head_dim") * part.size("num_attention_heads")
    for name, rows in matrices.items():
        if rows * hidden > held:
            raise UserError(
                f"{path}: `{part.prefix}hidden_size` {hidden:,} and `{name}` {part.size(name):,} are more than the "
                "weights beside it can hold: correct them, or copy or download the folder again"
            )
