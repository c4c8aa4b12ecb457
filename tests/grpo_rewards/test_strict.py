"""Strict readers: YAML as PyYAML reads it but for keys given twice, JSON up to each bound, and patterns of RE2."""

import pytest
import yaml

from grpo_rewards.strict import DuplicateKey, PatternError, linear_capture, linear_search, load_yaml, parse_json


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


@pytest.mark.parametrize(
    ("inside", "value", "outside", "says"),
    [
        ("1".ljust(100_000), 1, "1".ljust(100_001), "longer than 100000 characters"),
        ("[" * 32 + "]" * 32, None, "[" * 33 + "]" * 33, "nested deeper than 32"),
        ("1" * 300, int("1" * 300), "1" * 301, "a number of more than 300 characters"),
        ("0." + "1" * 298, 1 / 9, "0." + "1" * 299, "a number of more than 300 characters"),
        ("1e308", 1e308, "1e309", "a number beyond the range of double precision"),
        ("1e-308", 1e-308, "1e-400", "a number beyond the range of double precision"),
        ("0.0e-400", 0.0, "-0.01e-400", "a number beyond the range of double precision"),
        ('{"a": 1, "b": {"a": 2}}', {"a": 1, "b": {"a": 2}}, '{"a": 1, "a": 1}', "a key occurs twice"),
        ('"NaN"', "NaN", "NaN", "NaN is not JSON"), ("1", 1, "-Infinity", "-Infinity is not JSON"),
        ('"\ud800"', "\ud800", '"\ud800', "Unterminated string"),
    ],
)  # fmt: skip
def test_json_is_read_up_to_each_bound(inside: str, value: object, outside: str, says: str) -> None:
    read = parse_json(inside)
    assert value is None or read == value
    with pytest.raises(ValueError, match=says):
        parse_json(outside)


def test_a_smaller_depth_may_be_asked_for() -> None:
    assert parse_json("[[1]]", max_depth=2) == [[1]]
    with pytest.raises(ValueError, match="nested deeper than 1"):
        parse_json("[[1]]", max_depth=1)


def test_a_pattern_captures_one_group_of_a_whole_text() -> None:
    pytest.importorskip("re2")
    capture = linear_capture("a(b*)c")
    assert [capture(text) for text in ("abbc", "ac", "abcd", "xabc", "\ud800")] == ["bb", "", None, None, None]
    for pattern, groups in (("abc", 0), ("(a)(b)", 2)):
        with pytest.raises(PatternError, match=f"must have exactly one group, and has {groups}"):
            linear_capture(pattern)
    search = linear_search("b+")
    assert [search(text) for text in ("abc", "ac", "", "b\ud800")] == [True, False, False, False]
