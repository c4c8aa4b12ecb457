"""Decimal marks: golds and answers with a decimal comma, and the note about golds that may have one."""

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_rewards import gsm8k_correctness
from grpo_rewards.cli import main
from grpo_rewards.math.correctness import GSM8KCorrectness, MathCorrectness
from grpo_rewards.math.decimals import decimal_marks, decimal_of, with_point
from grpo_rewards.math.golds import read_golds
from grpo_rewards.math.numbers import parse_number

COMMA = GSM8KCorrectness(decimal="comma")


def scores(reward, gold, *answers):
    return reward(completions=[f"<answer>{answer}</answer>" for answer in answers], answer=[gold] * len(answers))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 4), st.sampled_from(["", " €", " EUR", " kg"]))
def test_a_number_written_with_a_decimal_comma_keeps_its_value(units, places, unit):
    value = Fraction(units, 10**places)
    english = f"{units / 10**places:,.{places}f}"
    german = english.translate(str.maketrans(",.", ".,"))
    assert parse_number(with_point(german + unit)) == value
    answers = (german, german.replace(".", ""), german.replace(".", " "))
    assert scores(MathCorrectness(decimal="comma"), german + unit, *answers) == [1.0, 1.0, 1.0]


def test_golds_and_answers_are_read_in_the_same_format():
    table = [
        ("1.200 €", "1200", 1.5), ("1.200 €", "1.2", 0.0), ("1.200 €", "1,2", 0.0), ("1.200", "1.200,00 EUR", 1.5),
        ("6.403,64 €", "6403,64", 1.5), ("6.403,64 €", "6403.64", 1.5), ("6.403,64 €", "6,403.64", 1.5),
        ("6.403,64 €", "640364", 0.0), ("0,5", "1/2", 1.5), ("0,125", "0.125", 1.5), ("1,5", "1{,}5", 1.5),
        ("2,5", "**2,50**", 1.5), ("1.234.567", "1234567", 1.5), ("1,5", "15", 0.0), ("1,5", "1, 5", 0.0),
        ("1\\,200{,}50", "1200,5", 1.5), ("1{.}200{,}50", "1200,5", 1.5), ("1200,5", "1\\,200,50", 1.5),
        ("1'200,50", "1200,5", 1.5), ("1.200,50", "1\u202f200,50", 1.5), ("-1.200,50", "\u22121200,5", 1.5),
        ("-1.200,50", "1.200,50", 0.0), ("12,5 %", "0,125", 0.0), ("12,5 \\%", "12,5", 1.5), ("1,5; 2,5", "1,5", 0.0),
        ("12,34,567", "1234567", 0.0), ("1,2,3", "123", 0.0), ("1.2.2024", "122024", 0.0), ("(1;5)", "1,5", 0.0),
        ("-3,25", "-3,25 Grad", 1.5), ("18", "18,0", 1.5), ("18", "18,19", 0.0),
    ]  # fmt: skip
    assert [row for row in table if scores(COMMA, *row[:2]) != [row[2]]] == []


def test_a_gold_that_is_a_number_has_a_point_whatever_the_mark_of_the_text():
    assert scores(COMMA, 1.234, "1,234", "1.234", "1234") == [1.5, 2.0, 0.0]
    assert scores(COMMA, 1.2345, "1,2345", "1.2345") == [1.5, 2.0]


def test_a_formula_may_hold_a_decimal_comma():
    reward = MathCorrectness(decimal="comma", deadline=20)
    assert reward(completions=["\\boxed{2,5x}", "\\boxed{25x}"], answer=["\\frac{5}{2}x"] * 2) == [1.0, 0.0]


def test_a_pair_or_an_interval_is_no_number():
    reward = MathCorrectness(decimal="comma")
    for gold in ("(1,2)", "[1,2]", "]1,2[", "[-1,2)", "\\{1,2\\}", "\\left(1,2\\right)", "$(1,2)$"):
        assert decimal_of(gold) is None
        (read,) = read_golds(gold, "comma")
        assert read.number is None
        stated = [f"\\boxed{{{answer}}}" for answer in ("1,2", "1.2", "-1,2", gold)]
        assert reward(completions=stated, answer=[gold] * 4) == [0.0, 0.0, 0.0, 1.0], gold


def test_numbers_in_brackets_keep_their_decimal_comma():
    assert with_point("(1,5; 2,5) and (1,5 €)") == "(1.5; 2.5) and (1.5 €)"
    assert with_point("\\frac{1,5}{2}") == "\\frac{1.5}{2}"


def test_without_the_key_a_point_is_read():
    assert scores(gsm8k_correctness, "1.200 €", "1.2", "1200") == [1.5, 0.0]
    assert scores(gsm8k_correctness, "1,200", "1200", "1.2") == [1.5, 0.0]
    with pytest.raises(ValueError, match="decimal.*point.*comma.*dot"):
        GSM8KCorrectness(decimal="dot")


def test_the_mark_of_a_text_is_named():
    table = [
        ("1.200", "ambiguous"), ("1,200", "ambiguous"), ("0.125", "point"), ("0,125", "comma"), ("1234.567", "point"),
        ("1.200 €", "ambiguous"), ("6.403,64", "comma"), ("6,403.64", "point"), ("1.234.567", "comma"),
        ("1,234,567", "point"), ("12", None), ("1,2,3", None), ("1,5 or 2,5", None), ("x", None), ("1.2.2024", None),
        ("$1{,}5$", "comma"), ("1{,}200", "ambiguous"), ("1\\,200.5", "point"), ("1.234.56", None), ("1,234,56", None),
        ("1,234.5.6", None), ("1,2.5", None), ("0.200", "point"), ("1234,567", "comma"), ("1.2345", "point"),
        ("(1,2,x)", None), ("x(1,2", "comma"),
    ]  # fmt: skip
    assert [(text, decimal_of(text)) for text, mark in table if decimal_of(text) != mark] == []


def test_golds_that_may_be_misread_are_named():
    table = [
        (["3", "6.403,64", "12,5", "1.200"], None, ("2 golds", "row 2: `6.403,64`", "1 is", "row 4: `1.200`", "comma")),
        (["3", "6.403,64"], "point", ("1 gold", "row 2: `6.403,64`", "comma")),
        (["1.200", "2.500"], None, ("2 are", "row 1: `1.200`", "point or comma")),
        (["2.5", "3"], "comma", ("1 gold", "point")),
        (["1.200", "2.500"], "point", ()), (["1.200", "2.500"], "comma", ()), (["1.200", "2.5"], None, ()),
        (["1,200", "3"], None, ()), (["3", "4"], None, ()),
    ]  # fmt: skip
    for golds, decimal, figures in table:
        note = GSM8KCorrectness(decimal=decimal).gold_note((f"row {row}", gold) for row, gold in enumerate(golds, 1))
        assert bool(note) == bool(figures), golds
        assert [figure for figure in figures if figure not in note] == [], note
        assert not figures or note.endswith(figures[-1]), note
    assert decimal_marks(enumerate(["2.5", "1.200"], 1)).certain == "point"


def test_the_marks_of_a_column_are_counted():
    marks = decimal_marks([("a", "1.200"), ("b", "1,200"), ("c", "2,5"), ("d", "3,5"), ("e", "1.5"), ("f", "x")])
    assert (marks.comma, marks.point, marks.ambiguous, marks.with_ambiguous_point) == (2, 1, 2, 1)
    assert (marks.first_comma, marks.first_ambiguous, marks.certain) == (("c", "2,5"), ("a", "1.200"), None)
    assert decimal_marks([("a", "1,200")]).certain == "point"
    assert decimal_marks([("a", "1.200")]).certain is None
    assert decimal_marks([("a", "1.200"), ("b", "2,5")]).certain == "comma"


def test_check_prints_the_note(tmp_path, capsys):
    table = tmp_path / "golds.jsonl"
    table.write_text("".join(json.dumps({"answer": gold}) + "\n" for gold in ("6.403,64 €", "1.200 €")))
    main(["check", str(table)])
    printed = capsys.readouterr().out
    assert "row 1: `6.403,64 €`" in printed
    assert "row 2: `1.200 €`" in printed
    assert main(["check", str(table), "--reward", "{name: gsm8k_correctness, kwargs: {decimal: comma}}"]) == 0
    assert "decimal" not in capsys.readouterr().out
