"""Texts of errors on one line, and the names that a misspelt one may mean."""

from __future__ import annotations

import pickle
from pathlib import Path

from grpo_rewards.errors import UserError, did_you_mean, one_line, shortened
from grpo_rewards.files import UnreadableFile


def test_line_breaks_and_runs_of_spaces_become_one_space() -> None:
    assert one_line(" a\n  b\t\u2028c\r\nd ") == "a b c d"
    assert one_line(KeyError("x")) == "'x'"
    assert one_line("") == ""


def test_an_error_has_parts_of_which_one_sentence_is_made() -> None:
    error = UnreadableFile(Path("a.json"), "it has 7 bytes", "cut it")
    assert (error.place, error.problem, error.fix) == ("a.json", "it has 7 bytes", "cut it")
    assert str(error) == "a.json: it has 7 bytes: cut it"
    outer = error.within(Path("folder"))
    assert (type(outer), outer.place, outer.problem, outer.fix) == (
        UnreadableFile, "folder: a.json", error.problem, error.fix,
    )  # fmt: skip
    again = pickle.loads(pickle.dumps(outer))
    assert (type(again), str(again), again.place) == (UnreadableFile, str(outer), outer.place)
    assert str(UserError("`a`", "no", did_you_mean("tags", ["tag"]))) == "`a`: no: did you mean `tag`?"


def test_a_long_text_is_cut_to_its_limit() -> None:
    assert (shortened("x" * 40), shortened("x" * 41)) == ("x" * 40, "x" * 37 + "...")
    assert (shortened("abcdef", 5), shortened("abcde", 5)) == ("ab...", "abcde")


MEANT: list[tuple[str, list[str], str | None]] = [
    # Likeness is 2 * equal characters / all characters: 6/10 is enough, 6/11 is not, and the first of equals counts.
    ("abcxx", ["abcyy"], "abcyy"), ("abcxx", ["abcyyy"], None), ("abcx", ["abcy", "abcz"], "abcy"),
    ("abcx", ["abyy", "abcz"], "abcz"), ("a-b-c-d", ["a_b_c_d"], "a_b_c_d"), ("--a", ["a"], "a"), ("a", ["--a"], "--a"),
    ("ABCD", ["abcd"], "abcd"), ("", ["abc"], None), ("abc", [], None),
    # A name that begins with the word, up to an underscore, or a word with a name of at least four characters.
    ("ab", ["ab_of_a_very_long_name"], "ab_of_a_very_long_name"), ("ab", ["about_a_very_long_name"], None),
    ("ab", ["ab_of_a_very_long_name", "ab"], "ab"), ("beta_of_a_very_long_name", ["beta"], "beta"),
    ("eps_of_a_very_long_name", ["eps"], None),
    # Likeness beyond 0.9 counts for more than a beginning: 20/21.
    ("model_names", ["model", "model_name"], "model_name"),
]  # fmt: skip


def test_the_name_that_is_meant_is_the_most_similar_one() -> None:
    for word, known, meant in MEANT:
        assert did_you_mean(word, known, "?") == (f"did you mean `{meant}`?" if meant else "?")
        assert did_you_mean(word, known) == (f"did you mean `{meant}`?" if meant else "")
