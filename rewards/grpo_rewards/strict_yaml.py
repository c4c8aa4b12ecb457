"""YAML as recipes and reward specs are read: safe, and a key that is given twice is an error instead of lost."""

from __future__ import annotations

from typing import Any

import yaml

from grpo_rewards.errors import UserError


class DuplicateKey(UserError, yaml.YAMLError):
    """A mapping gives one key twice; the message names the key and both lines."""


class _Loader(yaml.SafeLoader):
    """Refuses equal keys, of which PyYAML keeps the last without a word. Keys that `<<` merges in may be overridden."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line, written = key.start_mark.line + 1, (key.tag, key.value)
            if written in lines:
                raise DuplicateKey(
                    f"`{key.value}` is given twice, in line {lines[written]} and in line {line}: keep one"
                )
            lines[written] = line
        return node


def load(text: str) -> Any:
    """What a YAML text stands for. Raises `DuplicateKey`, or another `yaml.YAMLError` for what is not YAML."""
    return yaml.load(text, Loader=_Loader)
