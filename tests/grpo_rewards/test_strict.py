"""Strict readers: YAML as PyYAML reads it but for keys given twice, JSON up to each bound, and patterns of RE2."""

import pytest
import yaml

from grpo_rewards.strict import DuplicateKey, PatternError, linear_capture, linear_search, load_yaml, parse_json
from tests.support.errors import refused


def test_python_objects_are_not_built() -> None:
    with pytest.raises(yaml.YAMLError):
        load_yaml("!!python/object:os.system {}")


def test_a_pattern_captures_one_group_of_a_whole_text() -> None:
    pytest.importorskip("re2")
    capture = linear_capture("a(b*)c")
    assert [capture(text) for text in ("abbc", "ac", "abcd", "xabc", "\ud800")] == ["bb", "", None, None, None]
    for pattern, groups in (("abc", 0), ("(a)(b)", 2)):
        with refused(pattern, groups, by=PatternError):
            linear_capture(pattern)
    search = linear_search("b+")
    assert [search(text) for text in ("abc", "ac", "", "b\ud800")] == [True, False, False, False]


def test_yaml_is_read_as_pyyaml_reads_it_but_for_keys_given_twice() -> None:
    for text in (
        "a: 1\nb: {c: 2, d: [a, {a: 3}]}\n", "base: &base {a: 1, b: 2}\nother: {<<: *base, a: 3}\n",
        # A merged mapping that merges itself, and overrides what it merges.
        "x: &x {a: 1}\ny: &y {<<: *x, a: 2}\nz: {<<: *y, a: 3}\n", "- {a: 1}\n- {a: 2}\n", "",
    ):  # fmt: skip
        assert load_yaml(text) == yaml.safe_load(text)
    with pytest.raises(yaml.YAMLError):
        load_yaml("[1, 2]: pair\n")  # no mapping can have a list as its key
    for text, key, first, second in (
        ("a: 1\nb: 2\na: 3\n", "a", 1, 3), ("a:\n  b: 1\n  'b': 1\n", "b", 2, 3),
        ("- - c: {d: 1,\n      d: 2}\n", "d", 1, 2), ("&x {a: 1, <<: {b: 1}, a: 2}", "a", 1, 1),
    ):  # fmt: skip
        with refused(f"`{key}`", f"line {first}", f"line {second}", by=DuplicateKey):
            load_yaml(text)
        yaml.safe_load(text)  # PyYAML silently keeps the last


def test_json_is_read_up_to_each_bound() -> None:
    for inside, value, outside in (
        ("1".ljust(100_000), 1, "1".ljust(100_001)), ("[" * 32 + "]" * 32, None, "[" * 33 + "]" * 33),
        ("1" * 300, int("1" * 300), "1" * 301), ("0." + "1" * 298, 1 / 9, "0." + "1" * 299), ("1e308", 1e308, "1e309"),
        ("1e-308", 1e-308, "1e-400"), ("0.0e-400", 0.0, "-0.01e-400"),
        ('{"a": 1, "b": {"a": 2}}', {"a": 1, "b": {"a": 2}}, '{"a": 1, "a": 1}'), ('"NaN"', "NaN", "NaN"),
        ("1", 1, "-Infinity"), ('"\ud800"', "\ud800", '"\ud800'),
    ):  # fmt: skip
        read = parse_json(inside)
        assert value is None or read == value
        with pytest.raises(ValueError, match=r"\w"):
            parse_json(outside)
    assert parse_json("[[1]]", max_depth=2) == [[1]]
    with pytest.raises(ValueError, match="1"):
        parse_json("[[1]]", max_depth=1)
