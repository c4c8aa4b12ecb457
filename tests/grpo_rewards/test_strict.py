"""The strict YAML reader: as PyYAML, except for keys that are given twice."""

import pytest
import yaml

from grpo_rewards.strict import DuplicateKey, load_yaml


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb: {c: 2, d: [a, {a: 3}]}\n",
        "base: &base {a: 1, b: 2}\nother: {<<: *base, a: 3}\n",
        # A merged mapping that merges itself, and overrides what it merges.
        "x: &x {a: 1}\ny: &y {<<: *x, a: 2}\nz: {<<: *y, a: 3}\n",
        "- {a: 1}\n- {a: 2}\n",
        "[1, 2]: pair\n",
        "",
    ],
)
def test_load_yaml_equals_pyyaml_without_duplicate_keys(text: str) -> None:
    if text.startswith("[1"):  # no mapping can have a list as its key
        with pytest.raises(yaml.YAMLError):
            load_yaml(text)
    else:
        assert load_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", "`a` is given twice, in line 1 and in line 3: keep one"),
        ("a:\n  b: 1\n  'b': 1\n", "`b` is given twice, in line 2 and in line 3"),
        ("- - c: {d: 1,\n      d: 2}\n", "`d` is given twice, in line 1 and in line 2"),
        ("&x {a: 1, <<: {b: 1}, a: 2}", "`a` is given twice, in line 1 and in line 1"),
    ],
)
def test_a_key_given_twice_is_named_with_both_lines(text: str, says: str) -> None:
    with pytest.raises(DuplicateKey, match=says):
        load_yaml(text)
    yaml.safe_load(text)  # PyYAML silently keeps the last


def test_python_objects_are_not_built() -> None:
    with pytest.raises(yaml.YAMLError):
        load_yaml("!!python/object:os.system {}")
