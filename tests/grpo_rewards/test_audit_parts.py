"""Parts of an audit on their own: what each wrong completion says, the layouts, the questions, and the report."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from grpo_rewards.audit import run
from grpo_rewards.audit.audit import (
    Audit,
    Auditor,
    Kind,
    Lazy,
    Paid,
    Setting,
    Total,
    Verdict,
    paid_share,
    subjects,
)
from grpo_rewards.audit.calls import GROUP, Caller, Failure, missing_columns
from grpo_rewards.audit.contract import Broken, contract
from grpo_rewards.audit.layouts import Layout, layouts_for, source_texts
from grpo_rewards.audit.questions import prompt_text, question_of
from grpo_rewards.audit.report import _parts as report_parts
from grpo_rewards.audit.report import print_audit
from grpo_rewards.audit.run import audit_rows
from grpo_rewards.audit.wrong_completions import THOUGHT, Case, shuffled, wrong_completions
from grpo_rewards.errors import UserError
from grpo_rewards.registry import build_rewards
from grpo_rewards.terminal import Cell, Table

BRACKETS = Layout("brackets", "[{answer}]")


def question(gold, number=1, **columns):
    return question_of(number, {"answer": gold, **columns}, "answer", None)


def case(gold, others=(), way="answer", layout=BRACKETS, words=(), **columns):
    asked = question(gold, **columns)
    return Case(asked, layout, asked.answers()[way], way, list(others), list(words))


def values(kind, *arguments, **options):
    """Return what stands in the brackets of the completions of one kind."""
    texts = wrong_completions(case(*arguments, **options), kind)
    assert all(text.startswith("[") and text.endswith("]") for text in texts)
    return [text[1:-1] for text in texts]


CITIES = {"choices": ["Paris", "Rome", "Oslo"]}


@pytest.mark.parametrize(
    ("kind", "gold", "expected"),
    [
        ("off by one", "18", ["19", "17"]),
        ("off by one", "-2.5", ["-1.5", "-3.5"]),
        ("off by one", "0", ["1", "-1"]),
        ("off by less than one", "0", ["0.4", "-0.4", "0.9"]),
        ("off by one", "1/3", ["4/3", "-2/3"]),
        ("off by one", "Rome", []),
        ("off by less than one", "18", ["18.4", "17.6", "18.9"]),
        ("off by less than one", "0.05", ["0.45", "-0.35", "0.95"]),
        ("ten times, or a tenth", "18", ["180", "18000", "1.8"]),
        ("ten times, or a tenth", "-0.5", ["-5", "-500", "-0.05"]),
        ("ten times, or a tenth", "0", []),
        ("negated", "18", ["-18"]),
        ("negated", "-2.5", ["2.5"]),
        ("negated", "0", []),
        ("rounded", "1365", ["1360", "1400"]),
        ("rounded", "2.75", ["3", "0"]),
        ("rounded", "Rome", []),
        ("inside a longer value", "18", ["187", "718", "3184", "0.181"]),
        ("inside a longer value", "-18", ["-187", "-718", "-3184", "-0.181"]),
        ("inside a longer value", "Rome", ["Romeuzz", "unRome", "Rome and everything else", "neither Rome nor"]),
        ("inside a longer value", "x^2+1", ["x^2+1+1", "1+x^2+1", "x^2+1-7"]),
        ("inside a longer value", "x<2", []),
        ("cut short", "123", ["12", "23", "1", "3"]),
        ("cut short", "Rome", ["Rom", "ome", "R", "e"]),
        ("cut short", "7", []),
        ("cut short", "x^2+1", []),
        ("digits or letters in another order", "123", ["321", "231", "213"]),
        ("digits or letters in another order", "1123", ["3211", "1231", "1213"]),
        ("digits or letters in another order", "7", []),
        ("digits apart", "1365", ["1 3 6 5", "1, 3, 6, 5", "1.365"]),
        ("digits apart", "7", []),
        ("digits apart", "Rome", []),
        ("one part changed", "18", ["19"]),
        ("one part changed", "139", ["130"]),
        ("one part changed", "2.5", ["2.6"]),
        ("one part changed", "x^2+1", ["x^2+2", "x^2-1"]),
        ("one part changed", "New York City", ["New York else", "other York City"]),
        ("one part changed", {"a": 1, "b": "x"},
         ['{"a": "something else", "b": "x"}', '{"b": "x"}', '{"a": 1, "b": "something else"}', '{"a": 1}']),
    ],
)  # fmt: skip
def test_a_wrong_value_is_changed_in_the_way_that_its_kind_names(kind, gold, expected):
    assert values(kind, gold) == expected


@pytest.mark.parametrize(
    ("kind", "way", "expected"),
    [
        ("another option", "letter", ["A", "C"]),
        ("another option", "text", ["Paris", "Oslo"]),
        ("one part changed", "text", ["Paris", "Oslo"]),
        ("inside a longer value", "letter", ["BUZZ", "XYB", "buzz", "BB"]),
        ("inside a longer value", "text", ["Romeuzz", "unRome", "Rome and everything else", "neither Rome nor"]),
        ("cut short", "letter", []),
        ("cut short", "text", ["Rom", "ome", "R", "e"]),
        ("letter and text that disagree", "letter", ["B) Paris", "A) Rome", "B) Oslo", "C) Rome"]),
    ],
)
def test_a_wrong_choice_is_made_of_the_choices(kind, way, expected):
    assert values(kind, "B", way=way, **CITIES) == expected


def test_a_wrong_program_does_nothing_or_defines_something_else():
    solved = question_of(1, {"tests": "t", "code": "def f():\n    return 1"}, "tests", "code")
    changed = wrong_completions(Case(solved, BRACKETS, solved.gold, "answer", []), "one part changed")
    assert changed == ["[pass]", "[def other():\n    return None]"]


def test_every_option_is_listed_in_each_order_and_as_a_sentence():
    found = wrong_completions(case("B", way="letter", **CITIES), "every option")
    assert found == ["[A, C, B]", "[B, C, A]", "[A, B, C]", "A or C or B"]
    assert wrong_completions(case("18"), "every option") == []


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gold of another row", ["[7]", "[42]", "[5]"]),
        ("either-or", ["[18 or 7]", "[7 or 18]", "[7 and 18]", "[18, 7]", "The answer is either 7 or 18."]),
        ("several answers, the last wrong", ["[18]\n[7]", "[7]\n[18]\n[7]"]),
        ("gold before a wrong answer", ["18\n[7]", "It might be 18.\n[7]"]),
        (
            "every gold in a list",
            ["[7, 42, 5, 3, 18]", "7\n42\n5\n3\n18", "[18, 7, 42, 5, 3]", "18\n7\n42\n5\n3", "[15, 16, 17, 18]",
             "15\n16\n17\n18", "[18, 19, 20, 21]", "18\n19\n20\n21"],
        ),
        (
            "gold in the thinking only",
            ["<think>\nThe answer is 18.\n</think>", "<think>\n[18]\n</think>",
             "<think>\nThe answer is 18.\n18\n</think>\n[7]"],
        ),
        ("unclosed tag", ["<think>\n[18]"]),
        (
            "denied",
            ["[not 18]", "[18 is wrong]", "[18? No]", "[definitely not 18]", "The answer is not 18.",
             "I don't know, but it can't be 18"],
        ),
        ("retracted", ["[18. Wait, no: 7]", "[18, no, 7]", "First it looked like 18, but that is wrong.\n[7]"]),
        ("prompt copied", ["How many?", "[How many?]"]),
        ("thinking without an answer", [f"<think>\n{THOUGHT}\n</think>", f"<think>\n{THOUGHT}", THOUGHT]),
        (
            "format without an answer",
            ["[]", "[ ]", "[...]", "[your answer]", "<think>\n\n</think>\n<answer>\n\n</answer>",
             "<think></think><answer></answer> \\boxed{} ####"],
        ),
        ("gold under another key", []),
    ],
)  # fmt: skip
def test_a_completion_that_states_no_single_value_has_the_fault_of_its_kind(kind, expected):
    assert wrong_completions(case("18", ["7", "42", "5", "3"], question="How many?"), kind) == expected


@pytest.mark.parametrize(
    ("kind", "tried"),
    [
        ("empty", ["", " ", "\n\n\t"]),
        ("refusal", ["Sorry, this can't be answered.", "unknown", "No answer is possible."]),
        ("one character", [".", "?", "-", "x", "0"]),
        ("NaN and infinity", ["nan", "NaN", "inf", "-inf", "Infinity", "1e999", "None", "null", "undefined", "True"]),
        ("wildcards and open brackets",
         [".*", ".+", "*", "%", "?", "|", "(", "[", "\\", "\\d+", "{", "}", "$", "<", "/"]),
        (
            "JSON without the answer",
            ["{}", "[]", "null", "true", '{"answer": null}', '{"answer": ""}', '{"answer": [[]]}', '{"a": {"b": []}}',
             '{"score": 1, "correct": true}', '{"answer": {"value": "7"}}', '{"answer":', "[" * 50, '"',
             '{"answer": "7"}'],
        ),
    ],
)  # fmt: skip
def test_every_text_without_the_gold_is_tried_alone_and_in_the_place_of_the_answer(kind, tried):
    found = wrong_completions(case("18", ["7"]), kind)
    assert [text for text in found if not text.startswith(("[", "```")) or text in tried] == tried
    assert kind == "empty" or {f"[{text}]" for text in tried} <= set(found)
    assert len(found) == len(tried) * {"empty": 1, "JSON without the answer": 3}.get(kind, 2)


def test_a_mark_that_shows_nothing_is_tried_alone_too():
    found = wrong_completions(case("12", ["7"]), "control and bidirectional characters")
    assert found == [
        "[\u202e21\u202c]", "[\u206721\u2069]", "[7\x00]", "[\x1b[2J7]", "[7\x08]", "[7\u200b]",
        "[\u200b]", "\u200b", "[\ufeff]", "\ufeff", "[\x00]", "\x00", "[\ud800]",
    ]  # fmt: skip
    # Mirrored digits that read the same are the gold.
    assert "[\u202e11\u202c]" not in wrong_completions(case("11", ["7"]), "control and bidirectional characters")


def test_a_wrong_answer_is_padded_to_three_lengths():
    found = wrong_completions(case("18", ["7"]), "padded with words")
    sentence = "The weather stayed pleasant during the whole journey along the river. "
    # This layout has no thinking, so that the padded thinking is the same at each length.
    assert [text.count(sentence) for text in found] == [4, 0, 4, 20, 20, 100, 100]
    assert [text.startswith("[7]") for text in found] == [False, True, True, False, True, False, True]
    thinking = Layout("thinking", "[{answer}]", "<t>{thinking}</t>", "t")
    found = wrong_completions(case("18", ["7"], layout=thinking), "padded with words")
    assert [text.count(sentence) for text in found if text.endswith("[7]")] == [4, 20, 100]


def test_programs_and_words_of_code_are_tried_unless_they_are_the_gold():
    for gold, is_tried in (("18", True), ("gold", False)):
        found = wrong_completions(case(gold, ["7"]), "code")
        assert [text in found for text in ("[gold]", "```python\ngold\n```", "gold")] == [is_tried] * 3
        assert {"[assert True]", "```python\nprint('correct')\n```", "lambda *a: True"} <= set(found)


def test_zero_is_listed_among_numbers_like_any_other():
    found = wrong_completions(case("0", ["7"]), "every gold in a list")
    assert {"[-3, -2, -1, 0]", "[0, 1, 2, 3]"} <= set(found)


def test_at_most_forty_golds_are_listed_and_the_right_one_in_either_place():
    others = [f"w{n}" for n in range(50)]
    first, _, second, *_ = wrong_completions(case("Rome", ["Rome", *others]), "every gold in a list")
    assert first == f"[{', '.join([*others[:40], 'Rome'])}]"
    assert second == f"[{', '.join(['Rome', *others[:40]])}]"


@pytest.mark.parametrize(
    ("kind", "gold", "expected"),
    [
        ("rounded", "0", []),
        ("rounded", "0.4", ["0"]),
        ("digits apart", "18", ["1 8", "1, 8", "1.8"]),
        ("digits apart", "-18", ["1 8", "1, 8", "1.8"]),
        ("cut short", "18", ["1", "8"]),
        ("digits or letters in another order", "ab", ["ba"]),
        ("digits or letters in another order", "ba", ["ab"]),
        (
            "one part changed",
            "Agent 7 of London",
            ["Agent 8 of London", "Agent 7 of else", "other 7 of London"],
        ),
    ],
)
def test_the_shortest_values_are_changed_too(kind, gold, expected):
    assert values(kind, gold) == expected


def test_keys_are_written_without_escapes():
    keyed = Layout("JSON", '{"answer": "{answer}"}')
    found = wrong_completions(case("né", ["à"], layout=keyed), "gold under another key")
    assert found[:2] == ['{"answer": "à", "draft": "né"}', '{"draft": "né", "answer": "à"}']
    assert values("one part changed", {"é": "à"}) == ['{"é": "something else"}', "{}"]


def test_layouts_decide_where_a_wrong_completion_puts_the_gold():
    tags = Layout("tags", "<a>{answer}</a>", "<why>{thinking}</why>", "why")
    assert wrong_completions(case("18", ["7"], layout=tags), "unclosed tag") == [
        "<why>\n<a>18</a>",
        f"<why>{THOUGHT}</why><a>18",
    ]
    bare = Layout("bare", "\n{answer}\n")
    assert wrong_completions(case("18", ["7"], layout=bare), "gold before a wrong answer") == []
    assert wrong_completions(case("18", ["7"], layout=Layout("f", "${answer}$")), "retracted") == [
        "$18. Wait, no: 7$",
        "$18, no, 7$",
    ]
    keyed = Layout("JSON", '{"answer": {number}}')
    assert wrong_completions(case("18", ["7"], layout=keyed), "gold under another key") == [
        '{"answer": 7, "draft": "18"}',
        '{"draft": "18", "answer": 7}',
        '{"answer": 7, "rejected": "18"}',
        '{"rejected": "18", "answer": 7}',
    ]


def test_a_completion_that_may_state_the_gold_is_dropped():
    """A `0` for the gold 0, a list of the golds of equal rows, or an order to the grader that mentions the number."""
    assert "0" not in wrong_completions(case("0"), "one character")
    assert "x" not in wrong_completions(case("x"), "one character")
    assert "Score: 10/10" not in wrong_completions(case("10"), "instructions to the grader")
    assert len(wrong_completions(case("18"), "instructions to the grader")) == 14
    assert wrong_completions(case("unknown"), "refusal") == [
        "Sorry, this can't be answered.", "[Sorry, this can't be answered.]",
        "No answer is possible.", "[No answer is possible.]",
    ]  # fmt: skip
    assert wrong_completions(case("nan"), "NaN and infinity")[:2] == ["[inf]", "inf"]
    assert wrong_completions(case("18", ["18"]), "every gold in a list") == []


def test_json_without_the_answer_holds_the_answer_of_another_row_at_most():
    found = wrong_completions(case("18", ["né"]), "JSON without the answer")
    assert found[:3] == ["{}", "```json\n{}\n```", "[{}]"]
    assert '{"answer": {"value": "né"}}' in found
    assert found[-3:] == ['{"answer": "né"}', '```json\n{"answer": "né"}\n```', '[{"answer": "né"}]']
    assert not any("score" in text for text in wrong_completions(case("1"), "JSON without the answer"))


def test_keywords_hold_those_of_the_reward_and_not_the_gold():
    words = ["hypotenuse", "two words", "<tag>", "3"]
    text, thought, *_ = wrong_completions(case("18", ["7"], words=words), "keywords repeated")
    assert text.count("hypotenuse two words") == 8
    assert "<tag>" not in text
    assert thought == "[7]"
    assert all("summary" not in one for one in wrong_completions(case("summary", ["7"]), "keywords repeated"))
    asked = case("18", ["7"], question="Why?")
    assert wrong_completions(asked, "keywords repeated")[-1] == "\n".join(["Why?"] * 5)
    assert wrong_completions(case("18", question="Is it 18?"), "keywords repeated")[-1] != "\n".join(["Is it 18?"] * 5)
    assert wrong_completions(case("18", words=["<own>", "no tag"]), "marks of every format")[0].endswith("```<own>")


@pytest.mark.parametrize(
    ("gold", "others", "other"),
    [("18", ["7", "8"], "7"), ("18", [], "19"), ("New York", [], "New else"), ({}, [], "something else")],
)
def test_the_answer_of_another_row_stands_for_a_wrong_one(gold, others, other):
    assert case(gold, others).other == other


def test_different_values_are_shuffled_by_the_seed():
    found = shuffled(["a", "b", "a", "c", "d", "e"], 3)
    assert sorted(found) == ["a", "b", "c", "d", "e"]
    assert found == shuffled(["a", "b", "a", "c", "d", "e"], 3)
    assert len({tuple(shuffled("abcde", seed)) for seed in range(9)}) > 4


# Layouts


@pytest.mark.parametrize(
    ("slot", "answer", "placed", "closing", "unclosed"),
    [
        ("<a>{answer}</a>", "7", "<a>7</a>", "</a>", "<a>7"),
        ("\\boxed{{answer}}", "7", "\\boxed{7}", "}", "\\boxed{7"),
        ("```\n{answer}\n```", "7", "```\n7\n```", "```", "```\n7"),
        ("The answer is {answer}.", "7", "The answer is 7.", "", "The answer is 7."),
        ("\n{answer} \n", "7", "\n7 \n", "", "\n7"),
        ('{"a": {number}}', "7", '{"a": 7}', "", '{"a": 7}'),
        ('{"a": {number}}', "-0.5", '{"a": -0.5}', "", '{"a": -0.5}'),
        ('{"a": {number}}', "007", '{"a": "007"}', "", '{"a": "007"}'),
        ('{"a": {number}}', "1,000", '{"a": "1,000"}', "", '{"a": "1,000"}'),
        ('{"a": {value}}', "7", '{"a": "7"}', "", '{"a": "7"}'),
        ('{"a": {value}}', 'é"', '{"a": "é\\""}', "", '{"a": "é\\""}'),
    ],
)
def test_an_answer_is_put_in_its_place(slot, answer, placed, closing, unclosed):
    layout = Layout("l", slot)
    assert layout.render(answer) == layout.place(answer) == placed
    assert (layout.closing, layout.unclosed(answer)) == (closing, unclosed)


def test_each_answer_has_a_place_of_its_own_after_one_thinking():
    layout = Layout("l", "({answer})", "<t>{thinking}</t>\n")
    assert layout.render("1", "2", thinking="so") == "<t>so</t>\n(1)\n(2)"
    assert layout.render("1") == f"<t>{THOUGHT}</t>\n(1)"


def names(layouts):
    return [layout.name for layout in layouts]


def reads_own_tags(completions, **columns):
    """Pay nothing. The <no> tag of a docstring is no constant of the code."""
    pattern = "<scratchpad>.*</scratchpad><final>(.*)</final>"
    keys = ("content", "role", "x", "total_cost", "9lives", "answer", "abcdefghijklmnopqrstuvwxyz_abc",
            "abcdefghijklmnopqrstuvwxyz_abcd", "two words", pattern)  # fmt: skip
    return [0.0 for _ in keys]


def test_tags_and_keys_of_a_reward_are_tried_with_the_usual_layouts():
    found = layouts_for([reads_own_tags], [])
    own = [layout for layout in found if layout.name.startswith("tags scratchpad")]
    assert [(one.slot, one.opening) for one in own[:2]] == [
        ("<final>\n{answer}\n</final>", "<scratchpad>\n{thinking}\n</scratchpad>\n"),
        ("<final>{answer}</final>", "<scratchpad>{thinking}</scratchpad>"),
    ]
    assert names(found)[:2] == names(own)[:2]
    assert {layout.thinking_tag for layout in found} == {"scratchpad"}
    assert "tags" in names(found)
    assert "tags reasoning, answer, one line" in names(found)
    keys = [layout.slot for layout in found if layout.name.startswith("JSON key")]
    assert keys[:2] == ['{"total_cost": {number}}', '{"abcdefghijklmnopqrstuvwxyz_abc": {number}}']
    assert len(keys) <= 6
    assert '{"abcdefghijklmnopqrstuvwxyz_abcd": {number}}' not in keys
    assert "no" not in "".join(names(found)).split()


def test_declared_tags_are_tried_alone_and_a_given_layout_replaces_all():
    found = layouts_for([], [("why", "out")])
    assert names(found)[:3] == ["tags why, out", "tags why, out, one line", "boxed in tags"]
    assert found[2].slot == "<out>\n\\boxed{{answer}}\n</out>"
    assert not [name for name in names(found) if name.startswith(("tags think", "tags reasoning", "JSON key"))]
    assert names(found)[-2:] == ["after thinking", "bare"]
    assert (found[-2].opening, found[-1].opening) == ("<why>\n{thinking}\n</why>\n", "")
    assert layouts_for([reads_own_tags], [], "<x>{answer}</x>") == [Layout("given", "<x>{answer}</x>")]


def test_the_texts_of_a_function_come_before_those_of_its_module():
    found = source_texts(reads_own_tags)
    assert found[0] == "<scratchpad>.*</scratchpad><final>(.*)</final>"
    assert not any("docstring" in text for text in found)
    assert len(found) == len(set(found)) == 40
    assert max(map(len, found)) <= 80
    assert source_texts(len) == []
    assert source_texts(layouts_for) == [], "our rewards declare what they read"


# Questions


@pytest.mark.parametrize(
    ("columns", "answers", "options"),
    [
        ({"answer": "18"}, {"answer": "18"}, {"answer": []}),
        (
            {"answer": "B", **CITIES}, {"letter": "B", "text": "Rome"},
            {"letter": ["A", "C"], "text": ["Paris", "Oslo"], "gold": ["A", "C"]},
        ),
        (
            {"answer": 1, **CITIES}, {"letter": "B", "text": "Rome", "gold": "1"},
            {"letter": ["A", "C"], "text": ["Paris", "Oslo"], "gold": ["0", "2"]},
        ),
        ({"answer": "C"}, {"letter": "C"}, {"letter": ["A", "B", "D", "E"], "text": ["A", "B", "D", "E"]}),
    ],
)  # fmt: skip
def test_a_choice_can_be_stated_in_each_way_that_its_row_allows(columns, answers, options):
    asked = question_of(1, columns, "answer", None)
    assert asked.answers() == answers
    assert {way: asked.options(way) for way in options} == options


@pytest.mark.parametrize(
    ("gold", "golds", "form"),
    [
        ("18", ("18",), "number"),
        (18, ("18",), "number"),
        (2.0, ("2",), "number"),
        (True, ("True",), "text"),
        ("x^2", ("x^2",), "formula"),
        ("f(x)", ("f(x)",), "formula"),
        ("Rome", ("Rome",), "text"),
        ("area formula x^2", ("area formula x^2",), "text"),
        ('{"a": 1}', ('{"a": 1}',), "object"),
        ("{a}", ("{a}",), "text"),
        (["Rome", None, "Roma"], ("Rome", "Roma"), "text"),
        ({"b": "é"}, ('{"b": "é"}',), "object"),
        ("=" + "a" * 199, ("=" + "a" * 199,), "formula"),
        ("=" + "a" * 200, ("=" + "a" * 200,), "text"),
    ],
)
def test_a_gold_has_a_text_and_a_form(gold, golds, form):
    asked = question(gold)
    assert (asked.golds, asked.form) == (golds, form)


def test_the_gold_of_a_choice_is_right_with_spaces_around_it():
    asked = question("1", **CITIES)
    assert [asked.is_right(text) for text in ("1", " 1 ", "B", " b ", "Rome", "2", "A", "Oslo")] == [True] * 5 + [
        False
    ] * 3
    assert question(" C ").label == "C"
    assert question([{"a": "é"}]).golds == ('{"a": "é"}',)


def test_an_equal_formula_is_right():
    pytest.importorskip("math_verify")
    asked = question("x^2+1")
    assert [asked.is_right(text) for text in ("1+x^2", "x^2 + 1", "x^2-1", "x^2")] == [True, True, False, False]


def test_a_gold_that_is_no_choice_of_its_row_is_a_text():
    asked = question("Berlin", **CITIES)
    assert (asked.form, asked.choices, asked.options("text")) == ("text", None, [])


def test_a_row_without_a_gold_is_no_question_and_a_solution_is_a_program():
    assert question(None) is question("") is question([]) is None
    solved = question_of(3, {"answer": "tests", "code": "x = 1", "text": "later", "problem": "Do."}, "answer", "code")
    assert (solved.number, solved.golds, solved.form, solved.prompt) == (3, ("x = 1",), "program", "Do.")
    assert question_of(3, {"answer": "tests", "code": None}, "answer", "code") is None


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("Why?", "Why?"),
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}], "Why?"),
        ([], ""),
        (["Why?"], ""),
        (7, ""),
    ],
)
def test_the_text_of_a_prompt_is_its_last_message(prompt, text):
    assert prompt_text(prompt) == text


@pytest.mark.parametrize(
    ("gold", "text", "mentions"),
    [
        ("18", "It is 1,018 or 18.", True),
        ("18", "It is 1,018 or 180.", False),
        ("18", "eighteen hundred", False),
        ("Rome", "rome!", True),
        ("Rome", "Rome or not", False),
        ("-2", "below -2.0 degrees", True),
    ],
)
def test_a_text_mentions_the_gold(gold, text, mentions):
    assert question(gold).mentions_gold(text) == mentions


# Calls


def named(function, **spec):
    return build_rewards([{"name": f"{__name__}.{function.__name__}", **spec}], num_generations=4)[0]


def fails_on_x(prompts, completions, answer, **columns):
    if any("x" in text for text in completions):
        raise ValueError("an x")
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def takes_few(prompts, completions, needed, spare=1, *, answer):
    return [1.0] * len(completions)


async def waits(completions, **columns):
    await asyncio.sleep(0)
    return tuple(float(len(text)) for text in completions)


def test_each_completion_is_scored_once_and_a_failure_stays_with_its_own():
    caller = Caller(named(fails_on_x), ["answer"])
    first, second = question("7"), question("8", number=2)
    items = [(first, "7"), (first, "x"), (second, "7"), (second, "8"), (first, "7")]
    assert caller.scores(items) == [1.0, Failure("raises", "ValueError: an x"), 0.0, 1.0, 1.0]
    assert [text for (_, text), _ in caller.known()] == ["7", "x", "7", "8"]
    assert caller.scores([(second, "8")]) == [1.0]
    assert len(caller.known()) == 4


def test_a_call_has_the_columns_and_what_a_trainer_adds():
    caller = Caller(named(fails_on_x), ["answer", "unit"], "messages", ("answer", "gold"), {1: "seven"})
    batch = caller.batch([(question("7", unit="m", question="Why?"), "so it is")])
    assert (batch["answer"], batch["gold"], batch["unit"]) == (["seven"], ["seven"], ["m"])
    assert batch["prompts"] == [[{"role": "user", "content": "Why?"}]]
    assert batch["completions"] == [[{"role": "assistant", "content": "so it is"}]]
    assert batch["completion_ids"] == [[0, 1, 2]]
    assert vars(batch["trainer_state"]) == {"global_step": 0, "max_steps": 1, "epoch": 0.0}
    assert batch["log_extra"]("a", 1) is batch["log_metric"]("a", 1) is None
    own = [{"role": "system", "content": "s"}, {"role": "user", "content": "Why?"}]
    assert caller.batch([(question("7", prompt=own), "")])["prompts"] == [own]
    assert Caller(named(fails_on_x), ["answer"]).batch([(question("7", prompt=own), "")])["prompts"] == ["Why?"]
    few = Caller(named(takes_few), ["answer", "needed", "unit"])
    assert few.batch([(question("7"), "")]).keys() == {"prompts", "completions", "needed", "answer"}


def test_a_reward_may_be_a_coroutine_that_returns_a_tuple():
    caller = Caller(named(waits), ["answer"])
    assert caller.scores([(question("7"), "abc"), (question("7"), "")]) == [3.0, 0.0]
    assert 0 < caller.seconds < 5
    assert (caller.printed, caller.returned, caller.takes) == ("", "", None)


def test_the_columns_that_a_reward_needs_are_those_without_a_default():
    reward = named(takes_few)
    assert missing_columns(reward, ["answer"]) == ["needed"]
    assert missing_columns(reward, []) == ["needed", "answer"]
    assert missing_columns(reward, ["needed", "answer"]) == []


CALLS = []


def records_calls(completions, **columns):
    CALLS.append(list(completions))
    return [float(len(text)) for text in completions]


class Grouped:
    """Reward that compares the completions of a group, as it declares."""

    needs_whole_groups = True
    __name__ = "grouped"

    def __call__(self, completions, **columns):
        return records_calls(completions)


grouped = Grouped()


@pytest.mark.parametrize(
    ("name", "count", "sizes"),
    [("records_calls", 128, [128]), ("records_calls", 300, [128, 128, 44]), ("grouped", 40, [128, 32])],
)
def test_a_call_holds_at_most_128_completions_and_whole_groups(name, count, sizes):
    CALLS.clear()
    (reward,) = build_rewards([f"{__name__}.{name}"], num_generations=4)
    items = [(question("7", number), "x" * (number % 3)) for number in range(count)]
    assert Caller(reward, ["answer"]).scores(items) == [float(number % 3) for number in range(count)]
    assert [len(texts) for texts in CALLS] == sizes
    if name == "grouped":
        assert CALLS[0][:9] == [""] * 4 + ["x"] * 4 + ["xx"]


def fails_in_company(completions, **columns):
    if len(completions) > 1:
        raise SystemExit
    return [1.0]


def prints_twice(completions, **columns):
    print(f"{len(completions)} texts")
    return {"": "1.5", "a": ["1.5"], "b": [True], "c": [float("inf")], "d": [[1]], "e": [None]}[completions[0]]


def test_a_failure_that_no_completion_causes_alone_is_one_of_the_whole_batch():
    caller = Caller(named(fails_in_company), ["answer"])
    failure = Failure("raises", "SystemExit: (no message)")
    assert caller.fresh([(question("7"), "a"), (question("7"), "b")]) == [failure, failure]
    assert caller.fresh([(question("7"), "a")]) == [1.0]


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("a", Failure("finite", "returned '1.5'")),
        ("b", 1.0),
        ("c", Failure("finite", "returned inf")),
        ("d", Failure("finite", "returned [1]")),
        ("e", None),
    ],
)
def test_a_score_is_a_finite_number_or_none(text, outcome):
    assert Caller(named(prints_twice), ["answer"]).scores([(question("7"), text)]) == [outcome]


def test_the_first_print_and_the_type_of_what_is_no_list_are_kept():
    caller = Caller(named(prints_twice), ["answer"])
    caller.scores([(question("7"), "b")])
    assert (caller.printed, caller.returned) == ("1 texts\n", "")
    failure = caller.call(caller.batch([(question("7"), ""), (question("7"), "b")]), 2)
    assert failure.check == "count"
    assert (caller.printed, caller.returned) == ("1 texts\n", "str")


def takes_all_of_a_trainer(prompts, completions, completion_ids, trainer_state, log_extra, log_metric):
    return [1.0] * len(completions)


def fails_at_length(completions, **columns):
    raise ValueError("x" * 200)


def test_what_a_trainer_adds_is_no_missing_column():
    assert missing_columns(named(takes_all_of_a_trainer), []) == []
    caller = Caller(named(takes_all_of_a_trainer), ["answer"])
    assert caller.passed() == ["answer", "prompts", "completions", "completion_ids", "trainer_state", "log_extra",
                               "log_metric"]  # fmt: skip
    assert caller.scores([(question("7"), "x")]) == [1.0]


def test_the_reason_of_a_failure_is_cut_to_160_characters():
    (failure,) = Caller(named(fails_at_length), ["answer"]).scores([(question("7"), "x")])
    assert failure == Failure("raises", f"ValueError: {'x' * 145}...")
    assert len(failure.reason) == 160


def odd_signature(**columns):
    return [1.0] * len(columns["completions"])


odd_signature.__signature__ = 3  # `inspect` refuses it with a TypeError


@pytest.mark.parametrize("name", ["builtins.max", f"{__name__}.odd_signature"])
def test_a_reward_without_a_signature_may_take_any_column(name):
    (reward,) = build_rewards([name])
    assert Caller(reward, ["answer"]).takes is None
    assert missing_columns(reward, []) == []


def test_a_reward_of_groups_is_built_with_the_size_of_the_groups_of_an_audit():
    auditor, _ = run._auditor(["group_length"], [(1, {"answer": "7"}), (2, {"answer": "8"})], "f")
    assert [reward.function.num_generations for reward in auditor.rewards] == [GROUP]


# The contract


class FakeCaller:
    """Caller whose scores a function gives, in place of a reward."""

    takes, printed, returned, seconds, group = None, "", "", 0.0, 1
    reward = SimpleNamespace(name="r")

    def __init__(self, score=lambda texts: [float(len(text)) for text in texts], **attributes):
        self.score, self.outcomes = score, {}
        vars(self).update(attributes)

    def known(self):
        return [((question("7", number=number), text), one) for (number, text), one in self.outcomes.items()]

    def passed(self):
        return ["answer", "prompts"]

    def batch(self, items):
        return {"completions": [text for _, text in items], "log_extra": print}

    def call(self, batch, count):
        return self.score(batch["completions"])


ITEMS = [(question("7"), "a"), (question("7"), "bb")]


def broken(**attributes):
    return [
        (one.check, one.reason, one.is_serious, one.example) for one in contract(FakeCaller(**attributes), ITEMS)[0]
    ]


def test_a_reward_that_keeps_its_contract_breaks_none_of_twelve_checks():
    assert contract(FakeCaller(), ITEMS) == ([], 12)


def test_a_broken_contract_has_a_reason_and_a_fix():
    assert broken(takes=frozenset({"answer"})) == [
        ("columns", "takes no `prompts`, and a trainer passes it: add `**columns` to its parameters", True, None)
    ]
    assert broken(printed="hello\nthere") == [("prints", "prints (hello there): use `log_extra`", False, None)]
    assert broken(seconds=0.0499) == []
    assert broken(seconds=0.05) == [
        ("slow", "takes 0.05 s per completion, during which the trainer waits", False, None)
    ]
    assert broken(returned="ndarray") == [
        ("list", "returns a ndarray: a list is what every trainer takes", False, None)
    ]
    assert [broken(returned=kind) for kind in ("NoneType", "str", "float", "int", "dict")] == [[]] * 5


def test_what_else_a_score_depends_on_is_named_with_both_scores():
    calls = []

    def counted(texts):
        calls.append(1)
        return [float(len(calls) > 1)] * len(texts)

    assert broken(score=counted) == [
        ("deterministic", "gives the same completion another score (0, then 1): remove randomness and state", True, "a")
    ]
    assert broken(score=lambda texts: [float(len(texts))] * len(texts)) == [
        ("other rows", "gives a completion another score without the other rows (2, then 1): score each completion by "
         "itself, or declare `needs_whole_groups`", True, "a")
    ]  # fmt: skip
    assert broken(score=lambda texts: [float(texts[0] == "a") if len(texts) > 1 else 1.0 for _ in texts]) == [
        ("order", "gives a completion another score in another order of the rows (1, then 0): score each completion by "
         "itself", True, "a")
    ]  # fmt: skip
    assert broken(score=lambda texts: [1.0 + 1e-7 * (texts[0] == "a") for _ in texts]) == [], "a rounding error"


def test_a_changed_argument_is_named():
    def empties(texts):
        found = [1.0] * len(texts)
        texts.clear()
        return found

    assert (
        "arguments",
        "changes its argument `completions`, which the next reward reads: change a copy",
        True,
        None,
    ) in (broken(score=empties))


def test_failures_are_counted_with_the_shortest_completion():
    raises, odd = Failure("raises", "E: no"), Failure("finite", "returned nan")
    outcomes = {(1, "longer"): raises, (1, "x"): raises, (1, "fine"): 1.0, (1, "lost"): None, (2, "all"): None,
                (3, "y"): odd}  # fmt: skip
    assert broken(outcomes=outcomes) == [
        ("raises", "raises for 2 of 6 completions (E: no): a completion may be any text: pay it as a wrong one", True,
         "x"),
        ("none", "returns None for a wrong completion of a question that it can score for 1 of 6 completions: pay it "
         "as a wrong one, because None drops the completion instead", True, "lost"),
        ("finite", "returns scores that are no finite numbers for 1 of 6 completions (returned nan): return a finite "
         "number, or None for a row that can't be scored", True, "y"),
    ]  # fmt: skip


class LoggingCaller(FakeCaller):
    """Caller of a reward that changes all that a trainer lends it for that."""

    def batch(self, items):
        state = SimpleNamespace(seen=0)
        return {"completions": [text for _, text in items], "log_extra": [], "log_metric": [], "trainer_state": state}

    def call(self, batch, count):
        batch["log_extra"].append(1)
        batch["log_metric"].append(1)
        batch["trainer_state"].seen += 1
        return [1.0] * count


def test_a_reward_may_log_and_use_the_state_of_the_trainer():
    assert contract(LoggingCaller(), ITEMS) == ([], 12)


def test_a_reward_with_another_score_each_time_breaks_one_check():
    calls = []

    def random(texts):
        calls.append(1)
        return [float(len(calls))] * len(texts)

    assert [check for check, *_ in broken(score=random)] == ["deterministic"]


def test_a_score_that_is_none_at_times_is_shown():
    calls = []

    def forgets(texts):
        calls.append(1)
        return [None if len(calls) == 2 else 0.5] * len(texts)

    assert broken(score=forgets)[0][1] == (
        "gives the same completion another score (0.5, then None): remove randomness and state"
    )
    assert broken(score=lambda texts: [1.0 + 2e-6 * (texts[0] == "a") for _ in texts]) != [], "no rounding error"


def test_a_reward_that_fails_for_several_rows_is_not_compared_with_itself():
    failure = Failure("raises", "E: no")
    assert broken(score=lambda texts: failure) == []
    assert broken(score=lambda texts: [1.0] if len(texts) == 1 else failure) == []
    assert broken(score=lambda texts: failure if texts[0] != "a" else [1.0] * len(texts)) == []


def test_a_reward_of_groups_is_called_with_whole_groups_and_the_first_eight_are_scored_alone():
    sizes = []

    def counted(texts):
        sizes.append(len(texts))
        return [1.0] * len(texts)

    items = [(question("7", number), str(number)) for number in range(10)]
    assert contract(FakeCaller(counted, group=3), items) == ([], 12)
    assert sizes.count(3) == 8
    assert set(sizes) == {3, 30}


# The verdict


@pytest.mark.parametrize(
    ("pay", "right", "wrong", "share"),
    [(1, 2, 0, 0.5), (-1, 2, 0, -0.5), (-2, 0, -4, 0.5), (-4, 0, -4, 0), (1, 0, 0, 1), (0, 0, 0, 0), (-1, -1, 0, 0)],
)
def test_the_share_of_a_wrong_completion(pay, right, wrong, share):
    assert paid_share(pay, right, wrong) == share


def test_the_rewards_that_are_judged_are_those_of_correctness_or_of_no_kind():
    other = {"name": f"{__name__}.fails_on_x", "alias": "own", "weight": 2}
    built = build_rewards(["gsm8k_correctness", "well_formed", other], num_generations=4)
    judged, ignored, is_judged = subjects(built)
    assert [(one.name, [weight for _, weight in one.parts]) for one in judged] == [("gsm8k_correctness", [1.0])]
    assert (ignored, is_judged) == ({"well_formed": "is of kind format", "own": "declares no kind"}, True)
    more = {"name": f"{__name__}.waits", "weight": 0.5}
    judged, ignored, is_judged = subjects(build_rewards(["well_formed", other, more], num_generations=4))
    assert [(one.name, [weight for _, weight in one.parts]) for one in judged] == [("sum of own, waits", [2.0, 0.5])]
    assert (ignored, is_judged) == ({"well_formed": "is of kind format"}, True)
    judged, ignored, is_judged = subjects(build_rewards(["well_formed"], num_generations=4))
    assert ([one.name for one in judged], ignored, is_judged) == (
        ["well_formed"],
        {"well_formed": "is of kind format"},
        False,
    )


def test_a_reward_that_calls_a_model_is_not_audited():
    judge = {"name": "judge", "kwargs": {"base_url": "http://localhost/v1", "model": "m", "num_generations": 4}}
    with pytest.raises(UserError, match="reward `judge` calls a model, and an audit would call it thousands of times"):
        subjects(build_rewards([judge], num_generations=4))


def pays_words(prompts, completions, answer, **columns):
    """Pay 2 for the gold alone, 1 for a text with the gold in it, and None for the row of the gold `skip`."""
    scores = []
    for text, gold in zip(completions, answer, strict=True):
        scores.append(None if gold == "skip" else 2.0 if text == gold else float(gold in text))
    return scores


def test_a_verdict_counts_what_a_reward_pays():
    rewards = build_rewards([f"{__name__}.pays_words"], num_generations=4)
    golds = ["red", "red", "blue", "skip"]
    asked = [question(gold, number) for number, gold in enumerate(golds, 1)]
    auditor = Auditor(rewards, asked, asked, ["answer"], template="{answer}")
    (subject,), _, _ = subjects(rewards)
    setting = auditor.setting_of(subject)
    assert (setting.shape, setting.reduces_golds, setting.way, setting.right, setting.wrong) == (
        "text", False, "answer", 1.5, 0.0,
    )  # fmt: skip
    verdict = auditor.verdict(subject, setting)
    assert (verdict.rows, verdict.unpaid, verdict.total) == (3, [], None)
    kinds = {kind.name: kind for kind in verdict.kinds}
    denied = kinds["denied"]
    assert (denied.tried, denied.paid, denied.best) == (18, 18, Paid(1, "not red", 1.0, 2.0, 0.5))
    assert kinds["empty"].paid == 0
    assert verdict.lazy == Lazy("red", 4 / 6, 4)
    (constant,) = [one.best for one in verdict.kinds if one.name == "gold of another row"]
    assert constant.share == 0


def test_what_is_found_is_a_paid_wrong_answer_of_a_judged_reward_or_a_serious_fault():
    setting = Setting("text", False, "answer", [BRACKETS], 1.0, 0.0)

    def audit(*kinds, unpaid=(), rows=2, faults=(), is_judged=True):
        verdict = Verdict("r", setting, rows, [Kind(*kind) for kind in kinds], list(unpaid))
        return Audit(2, 0, [verdict], list(faults), 12, {}, is_judged)

    assert [audit(("a", 3, paid)).found for paid in (0, 1)] == [False, True]
    assert not audit(("a", 3, 1), is_judged=False).found
    assert [audit(unpaid=numbers).found for numbers in ([], [1], [1, 2])] == [False, False, True]
    assert audit(unpaid=[1], rows=1).found
    assert not audit(unpaid=[1, 2], is_judged=False).found
    assert not audit(rows=0).found
    serious, harmless = Broken("r", "raises", "x"), Broken("r", "slow", "x", False)
    assert [audit(faults=[fault], is_judged=False).found for fault in (serious, harmless)] == [True, False]
    assert audit(("a", 3, 1), ("b", 0, 0), ("c", 1, 0)).kinds == 2


def test_a_kind_may_be_set_in_the_spec_or_declared_as_other():
    own = f"{__name__}.fails_on_x"
    formed = {"name": own, "kind": "format", "alias": "formed"}
    judged, ignored, is_judged = subjects(build_rewards([own, formed, "repetition"]))
    assert [one.name for one in judged] == ["fails_on_x"]
    assert (ignored, is_judged) == ({"formed": "is of kind format", "repetition": "is of kind other"}, True)
    (alone,), ignored, is_judged = subjects(build_rewards([formed]))
    assert (alone.name, ignored, is_judged) == ("formed", {"formed": "is of kind format"}, False)


def auditor_of(rewards, golds, template="{answer}", **columns):
    built = build_rewards([f"{__name__}.{name}" for name in rewards])
    asked = [question(gold, number, **columns) for number, gold in enumerate(golds, 1)]
    auditor = Auditor(built, asked, asked, ["answer"], template=template)
    (subject,), _, _ = subjects(built)
    return auditor, subject


def pays_messages(completions, answer, **columns):
    return [float(isinstance(text, list) and text[-1]["content"] == gold)
            for text, gold in zip(completions, answer, strict=True)]  # fmt: skip


def pays_either(completions, answer, **columns):
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(text == gold) for text, gold in zip(texts, answer, strict=True)]


def pays_short_golds(completions, answer, **columns):
    return [float(text == gold and len(gold) < 5) for text, gold in zip(completions, answer, strict=True)]


def pays_nothing(completions, **columns):
    return [0.0] * len(completions)


def pays_all(completions, **columns):
    return [1.0] * len(completions)


def punishes(completions, answer, **columns):
    return [-1.0 - (text != gold) for text, gold in zip(completions, answer, strict=True)]


def pays_by_tag(completions, answer, **columns):
    """Pay 3 in a box, 2 in a tag and 2 in a sentence."""
    forms = {"\\boxed{%s}": 3.0, "<answer>%s</answer>": 2.0, "The answer is %s.": 2.0}
    return [max((pay for form, pay in forms.items() if form % gold in text), default=0.0)
            for text, gold in zip(completions, answer, strict=True)]  # fmt: skip


CHAT = [{"role": "user", "content": "How many?"}]


@pytest.mark.parametrize(
    ("reward", "golds", "columns", "setting"),
    [
        ("pays_messages", ["7", "8"], {}, ("messages", False, 1.0, 0.0)),
        ("pays_either", ["7", "8"], {}, ("text", False, 1.0, 0.0)),
        ("pays_either", ["7", "8"], {"prompt": CHAT}, ("messages", False, 1.0, 0.0)),
        ("pays_short_golds", ["Seven.\n#### 7", "Eight.\n#### 8"], {}, ("text", True, 1.0, 0.0)),
        ("pays_short_golds", ["Seven.\n#### 7", "Eight.\n#### 8"], {"prompt": CHAT}, ("text", True, 1.0, 0.0)),
        ("pays_nothing", ["7", "8"], {}, ("text", False, 0.0, 0.0)),
        ("pays_all", ["7", "8"], {"prompt": CHAT}, ("messages", False, 1.0, 1.0)),
        ("punishes", ["7", "8"], {}, ("text", False, -1.0, -2.0)),
    ],
)
def test_a_reward_is_called_in_the_first_way_in_which_it_tells_right_from_wrong(reward, golds, columns, setting):
    auditor, subject = auditor_of([reward], golds, **columns)
    found = auditor.setting_of(subject)
    assert (found.shape, found.reduces_golds, found.right, found.wrong) == setting
    assert [layout.name for layout in found.layouts] == ["given"] or len(found.layouts) == 1


def test_the_layouts_that_pay_best_are_kept():
    auditor, subject = auditor_of(["pays_by_tag"], ["7", "8", "9"], template=None)
    found = auditor.setting_of(subject)
    assert found.right == 3.0
    assert {"\\boxed" in layout.render("7") for layout in found.layouts} == {True}
    (blind, subject) = auditor_of(["pays_all"], ["7", "8", "9"], template=None)
    assert len(blind.setting_of(subject).layouts) == 1, "no layout tells a right answer from a wrong one"


def test_a_reward_that_pays_no_right_answer_more_than_a_wrong_one_is_named_by_its_rows():
    auditor, subject = auditor_of(["pays_nothing"], ["7", "8"])
    verdict = auditor.verdict(subject, auditor.setting_of(subject))
    assert (verdict.rows, verdict.unpaid, verdict.lazy) == (2, [1, 2], None)
    auditor, subject = auditor_of(["pays_short_golds"], ["7", "Copenhagen", "9"])
    verdict = auditor.verdict(subject, auditor.setting_of(subject))
    assert (verdict.rows, verdict.unpaid) == (3, [2])
    assert verdict.lazy == Lazy("7", pytest.approx(1 / 2), 3)


def fails(completions, answer, **columns):
    if "8" in answer:
        raise ValueError("no\n8")
    return [1.0] * len(completions)


def test_a_reward_that_raises_for_every_right_answer_is_not_audited():
    auditor, subject = auditor_of(["fails"], ["8", "8"])
    with pytest.raises(UserError, match="^reward `fails` raises for every right answer: ValueError: no 8$"):
        auditor.setting_of(subject)
    auditor, subject = auditor_of(["fails"], ["8", "7"])
    assert auditor.setting_of(subject).right == 0.5


def test_a_question_is_asked_in_the_best_layout_and_in_another_that_pays_as_well():
    auditor, _ = auditor_of(["pays_all"], ["7", "8", "9"])
    layouts = [Layout(name, f"{name}: {{answer}}", "<t>{thinking}</t>", "t") for name in "ABC"]
    setting = Setting("text", False, "answer", layouts, 1.0, 0.0)
    cases = list(auditor._cases(auditor.questions, setting))
    assert [(case.question.number, case.layout.name) for case in cases] == [
        (1, "A"), (2, "A"), (2, "B"), (3, "A"), (3, "C"),
    ]  # fmt: skip
    assert [(case.right, sorted(case.others)) for case in cases[:2]] == [("7", ["8", "9"]), ("8", ["7", "9"])]
    items = [text for _, text in auditor._right_items(setting)]
    assert len(items) == len(set(items)) == 10
    assert [text[-1] == case.right for text, case in zip(items[::2], cases, strict=True)] == [True] * 5
    assert [text[-1] != case.right for text, case in zip(items[1::2], cases, strict=True)] == [True] * 5


def test_equal_golds_are_no_wrong_answers():
    auditor, _ = auditor_of(["pays_all"], ["7", "7.0", "8"])
    setting = Setting("text", False, "answer", [BRACKETS], 1.0, 0.0)
    assert [case.others for case in auditor._cases(auditor.questions, setting)][:2] == [["8"], ["8"]]


def test_all_rewards_together_pay_a_weighted_sum():
    built = build_rewards(
        [{"name": f"{__name__}.pays_either", "kind": "correctness", "weight": 2},
         {"name": f"{__name__}.pays_all", "kind": "format", "weight": 0.5}]
    )  # fmt: skip
    asked = [question(gold, number) for number, gold in enumerate(["7", "8"], 1)]
    audit = Auditor(built, asked, asked, ["answer"], template="{answer}").audit(unreadable=3)
    assert (audit.rows, audit.unreadable, audit.checks, audit.is_judged) == (2, 3, 12, True)
    assert audit.ignored == {"pays_all": "is of kind format"}
    (verdict,) = audit.verdicts
    assert (verdict.name, verdict.setting.right, verdict.setting.wrong) == ("pays_either", 1.0, 0.0)
    assert (verdict.total.right, verdict.total.wrong, verdict.total.kind) == (2.5, 0.5, "empty")
    assert not audit.found
    assert audit.broken == []
    assert Auditor(built, asked, asked, ["answer"]).audit().unreadable == 0


def test_a_reward_that_gives_no_score_gives_the_sum_none():
    auditor, _ = auditor_of(["pays_words"], ["skip", "7"])
    built = build_rewards([f"{__name__}.pays_words", f"{__name__}.pays_all"])
    (subject,), _, _ = subjects(built)
    setting = Setting("text", False, "answer", [Layout("given", "{answer}")], 1.0, 0.0)
    items = [(one, text) for one in auditor.questions for text in ("7", "x7")]
    assert auditor.scores(subject, setting, items) == [None, None, 3.0, 2.0]
    failing = build_rewards([f"{__name__}.fails", f"{__name__}.pays_all"])
    (subject,), _, _ = subjects(failing)
    auditor, _ = auditor_of(["pays_all"], ["8"])
    assert auditor.scores(subject, setting, [(auditor.questions[0], "x")]) == [Failure("raises", "ValueError: no 8")]


def test_the_columns_of_a_call_are_those_of_any_row_in_order():
    rows = [{"answer": "7", "z": 1, "prompts": "p"}, {"answer": "8", "b": 2, "completions": "c"}]
    asked = [question_of(number, row, "answer", None) for number, row in enumerate(rows, 1)]
    auditor = Auditor(build_rewards([f"{__name__}.pays_all"]), asked, asked, ["answer"])
    assert auditor.columns == ["answer", "b", "z"]


# From rows to questions


class RecordedAuditor:
    """Auditor that returns what it was made of."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def audit(self, unreadable):
        return *self.arguments, unreadable


def test_an_audit_takes_a_sample_of_the_rows_in_their_order(monkeypatch):
    monkeypatch.setattr(run, "Auditor", RecordedAuditor)
    rows = [(number, {"answer": str(number), "key": "" if number % 10 == 0 else "7"}) for number in range(1, 41)]
    _, asked, pool, columns, layout, seed, unreadable = audit_rows(["gsm8k_correctness"], rows, "f", seed=1)
    numbers = [question.number for question in asked]
    assert (len(numbers), len(set(numbers)), numbers) == (24, 24, sorted(numbers))
    assert numbers != list(range(1, 25))
    assert (len(pool), columns, layout, seed, unreadable) == (40, ["answer"], None, 1, 0)
    _, other, *_ = audit_rows(["gsm8k_correctness"], rows, "f")
    assert [question.number for question in other] != numbers
    options = {"gold_column": "key", "layout": "{answer}", "most": 3}
    _, asked, pool, columns, layout, seed, unreadable = audit_rows(["gsm8k_correctness"], rows, "f", **options)
    assert (len(asked), len(pool), columns, layout) == (3, 36, ["key", "answer"], "{answer}")
    assert (seed, unreadable, {question.gold for question in asked}) == (0, 4, {"7"})


def reads_solution(completions, solution, **columns):
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("reward", "columns", "gold"),
    [
        ("gsm8k_correctness", ["answer", "solution"], "answer"),
        ("unit_tests", ["answer", "tests"], "tests"),
        ("reads_solution", ["answer", "solution"], "solution"),
        ("reads_solution", ["answer", "x"], "answer"),
        ("builtins.max", ["answer", "x"], "answer"),
        ("odd_signature", ["answer", "x"], "answer"),
    ],
)
def test_the_gold_is_in_a_column_that_a_reward_reads_or_in_a_usual_one(reward, columns, gold):
    name = f"{__name__}.{reward}" if reward in globals() else reward
    assert run._gold_column(build_rewards([name]), columns, "f") == gold
    with pytest.raises(UserError) as caught:
        run._gold_column(build_rewards([name]), ["x", "y"], "f")
    assert str(caught.value) == ("f has no column with the gold, such as `answer`: name it by --gold_column (`x`, `y`)")


def test_a_solution_is_read_where_a_reward_and_the_file_have_one():
    rewards = build_rewards(["gsm8k_correctness", "unit_tests"])
    assert run._solution_column(rewards, ["tests", "solution"]) == "solution"
    assert run._solution_column(rewards, ["tests"]) is None
    assert run._solution_column(rewards[:1], ["solution"]) is None
    with pytest.raises(UserError, match=r"^f: no gold in `solution` can be read: name the column by --gold_column$"):
        audit_rows(["unit_tests"], [(1, {"tests": "assert f() == 1", "solution": None})], "f")


# The report

SETTING = Setting("text", True, "answer", [BRACKETS, BRACKETS], 1.0, 0.25)
PAID = Paid(4, "a " * 60, 1.0, 1.0, 12.0)


def audited(unpaid=(1, 2, 3, 4, 5, 6), **changes):
    kinds = [Kind("tried in vain", 3, 0, Paid(1, "no", 0.0, 1.0, 0.0)), Kind("paid", 2, 1, PAID),
             Kind("a little", 2, 0, Paid(2, "", 0.1, 1.0, 0.1)), Kind("not tried")]  # fmt: skip
    verdict = Verdict("mine", SETTING, 9, kinds, [*unpaid], Lazy("42", 0.755, 9), Total(2.0, 1.5, "paid", "x"))
    broken = [Broken("mine", "prints", "prints (x)", False, "shown"), Broken("mine", "raises", "raises")]
    found = {"rows": 9, "unreadable": 2, "verdicts": [verdict], "broken": broken, "checks": 12, "ignored": {}}
    return Audit(**{**found, "is_judged": True, **changes})


def report(capsys, **changes):
    print_audit(audited(**changes))
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_the_report_has_the_figures_of_an_audit(capsys):
    lines = " ".join(report(capsys))
    for words in (
        "the right answer earns 1 and another one 0.25 (layout: brackets, brackets; completions are text)",
        "golds were reduced to their final answers",
        "the right answer earns no more than a wrong one in 6 of 9 rows (1, 2, 3, 4, 5, …): if the reward reads",
        "wrong completion paid 50% at most example",
        f"paid 1 of 2 999% row 4: {'a ' * 17}a … {'a ' * 17}a",
        "a little 0 of 2 10% row 2: ''",
        "1 of 3 kinds of wrong completions earn nothing",
        "all rewards together pay 2 for right answers and at most 1.5 for a wrong completion (paid): x",
        "the same completion in all 9 rows earns at most 76% of what right answers earn: 42",
        "mine prints (x) for shown mine raises",
        "1 kinds are paid, 1 contract checks fail: 9 rows, 3 kinds of wrong completions, 12 contract checks; 2 rows "
        "without a gold of the usual form were left out",
    ):
        assert words in lines, words
    assert "tried in vain" not in lines


@pytest.mark.parametrize(
    ("unpaid", "told"),
    [([2], "1 of 9 rows (2):"), ([1, 2, 3, 4, 5], "5 of 9 rows (1, 2, 3, 4, 5):"), (range(1, 10), "4, 5, …):")],
)
def test_a_report_names_up_to_five_rows(unpaid, told, capsys):
    lines = report(capsys, unpaid=unpaid)
    assert any(line.startswith("the right answer earns no more") and told in line for line in lines)
    assert not any("earns no more" in line for line in report(capsys, unpaid=()))


def test_a_long_completion_is_cut_in_its_middle(capsys):
    for text, shown in (("x" * 70, "x" * 70), ("y" * 35 + "z" * 36, f"{'y' * 35} … {'z' * 35}"), (" \n", "' \\n'")):
        assert f"mine raises for {shown}" in " ".join(
            report(capsys, broken=[Broken("mine", "raises", "raises", True, text)])
        )


def test_a_report_shows_an_empty_example_and_what_was_ignored(capsys):
    assert "mine raises for ''" in " ".join(report(capsys, broken=[Broken("mine", "raises", "raises", True, "")]))
    lines = report(capsys, ignored={"x": "is of kind format"})
    assert "x was not judged: it is of kind format" in lines
    assert not any(line.startswith("no reward judges") for line in lines)


def test_what_is_serious_stands_out_in_a_report():
    styles = {part.text: part.style for part in report_parts(audited()) if isinstance(part, Cell)}
    assert (styles["mine raises"], styles["mine prints (x)"], styles["mine"]) == ("bad", "dim", "head")
    (table,) = (part for part in report_parts(audited()) if isinstance(part, Table))
    assert table.numbers == {1, 2}
    assert [(row[0].text, row[0].style) for row in table.rows] == [("paid", "bad"), ("a little", "")]
    for unpaid, style in ((range(1, 10), "bad"), ([1], "")):
        (cell,) = (
            part for part in report_parts(audited(unpaid=unpaid)) if isinstance(part, Cell) and "no more" in part.text
        )
        assert cell.style == style


def test_the_json_of_a_report_holds_every_figure(capsys):
    print_audit(audited(), as_json=True)
    text = capsys.readouterr().out
    found = json.loads(text)
    assert text == json.dumps(found, indent=2) + "\n"
    (mine,) = (found["rewards"][name] for name in ("mine",))
    assert mine["lazy"] == {"completion": "42", "share": 0.755, "rows": 9}
    assert mine["total"] == {"right": 2.0, "wrong": 1.5, "kind": "paid", "completion": "x"}
    assert (mine["rows"], mine["unpaid_rows"], mine["right"], mine["other"]) == (9, [1, 2, 3, 4, 5, 6], 1.0, 0.25)
    assert {name: (kind["tried"], kind["paid"]) for name, kind in mine["kinds"].items()} == {
        "tried in vain": (3, 0), "paid": (2, 1), "a little": (2, 0),
    }  # fmt: skip
    assert mine["kinds"]["paid"]["best"]["row"] == 4
    assert [broken["check"] for broken in found["broken"]] == ["prints", "raises"]
    assert (found["rows"], found["unreadable"], found["kinds"], found["checks"]) == (9, 2, 3, 12)
    assert (found["found"], found["is_judged"], found["not_judged"]) == (True, True, {})
    bare = Verdict("bare", SETTING, 9, [Kind("unscored", 1)])
    print_audit(audited(verdicts=[bare]), as_json=True)
    bare = json.loads(capsys.readouterr().out)["rewards"]["bare"]
    assert (bare["lazy"], bare["total"], bare["kinds"]["unscored"]["best"]) == (None, None, None)


def test_the_last_line_of_a_report_tells_what_was_judged(capsys):
    checked = "9 rows, 0 kinds of wrong completions, 12 contract checks"
    empty = {"verdicts": [], "broken": [], "unreadable": 0}
    assert report(capsys, **empty)[-1] == f"nothing found: {checked}"
    ignored = {"x": "is of kind format"}
    *_, told, why, _, last = report(capsys, **empty, ignored=ignored, is_judged=False)
    assert (told, last) == ("x was not judged: it is of kind format", f"not judged: {checked}")
    assert why.startswith("no reward judges correctness, so nothing above is a finding")


def test_a_missing_column_is_named_with_those_that_exist():
    with pytest.raises(UserError) as caught:
        audit_rows([f"{__name__}.takes_few"], [(1, {"answer": "7"})], "rows.jsonl")
    assert str(caught.value) == (
        "rows.jsonl has no column `needed`, which reward `takes_few` needs: it has `answer`, `answer`. Rename a "
        "column, or name the one with the gold by --gold_column"
    )
