"""Roles of a table's columns, from small tables written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_recipes.plan import columns
from grpo_recipes.plan.columns import Column
from grpo_rewards.errors import UserError

TEXTS = ["How many figs are left?", "Who ate the last of them?", "What did Ann buy on Monday?"]
OTHERS = ["Ann had five of them.", "It was Bob, as always.", "She bought a new hat."]

QUESTIONS = """
question problem instruction query task input text statement article document body content sentence review question_text
Frage Aufgabe pregunta problema enunciado domanda pergunta exercice énoncé enonce вопрос 问题 題目 题目 質問 질문
"""
ANSWERS = """
answer solution final_answer expected_answer ground_truth gold target reference_answer answers label answer_key
answerkey correct correct_answer output response result summary solution_text Antwort Lösung loesung Ergebnis richtig
respuesta solución solucion resultado réponse reponse résultat risposta resposta ответ 答案 解答 回答 정답
"""
ABOUT_ROWS = """
id idx index nr no uid uuid url source split date year level difficulty meta metadata info extra subject topic type lang
language author Stufe Jahr Datum Quelle nivel fecha
"""
LABELS = "label labels class category sentiment intent Klasse Kategorie categoría 标签"
CHOICES = "choices options choice option opciones Optionen alternatives Antworten 选项 candidates"


def column(name: str, *values: Any) -> Column:
    return Column(tuple(name.split(".")), list(values))


@pytest.mark.parametrize("name", QUESTIONS.split())
def test_a_question_in_any_common_language_is_found_by_its_name(name: str) -> None:
    others = [column("notes", *OTHERS), column(name, *TEXTS), column("explanation", *OTHERS)]
    assert columns.find_question(others) == (others[1], "by its name")
    with pytest.raises(UserError, match="could each be the question"):
        columns.find_question([others[0], others[2]])


@pytest.mark.parametrize("name", ANSWERS.split())
def test_a_column_named_as_an_answer_is_not_the_question(name: str) -> None:
    found, why = columns.find_question([column(name, *OTHERS), column("what", *TEXTS)])
    assert (found.name, why) == ("what", "the only text")


@pytest.mark.parametrize("name", ABOUT_ROWS.split())
def test_a_column_about_its_rows_is_known_by_its_name(name: str) -> None:
    values = ["north", "south", "north", "east"]
    assert column(name, *values).is_about_rows
    assert not column("side", *values).is_about_rows


@pytest.mark.parametrize("name", LABELS.split())
def test_numbers_are_labels_if_the_name_says_so(name: str) -> None:
    values = [17, 42, 17, 42, 17]
    assert columns.are_labels(column(name, *values))
    assert not columns.are_labels(column("total", *values))


@pytest.mark.parametrize("name", CHOICES.split())
def test_text_with_bars_is_a_list_of_choices_if_the_name_says_so(name: str) -> None:
    texts, gold = ["1|2|3", "4|5|6"], column("gold", 2, 5)
    assert not columns.are_choices_weak(column(name, *texts), gold)
    assert columns.are_choices_weak(column("figures", *texts), gold)
    assert not columns.are_choices_weak(column("figures", *texts), column("gold", "b", "c"))
    assert not columns.are_choices_weak(column("figures", ["1", "2"], ["4", "5"]), gold)


@pytest.mark.parametrize(
    ("values", "about_rows"),
    [
        (["a1", "b2", "c3"], True),  # identifiers
        (["a1", "b2", "a1"], False),  # not all different
        (["apple", "pear", "fig"], False),
        (["1", "2.5", "-7"], False),  # numbers
        ([1, 2, 3], True),  # a counter
        ([10, 20, 30], True),
        ([1, 2], False),
        ([1, 2, 4], False),
        ([5, 5, 5], True),  # a constant
        ([5, 5], False),
        (["2024-01-02", "2024-01-03", "2024-02-03"], True),
        (["2024-01-02", "soon", "later"], False),
        (["https://a.org/x", "http://b.org"], True),
        (["https://a.org/x", "see b.org for more"], False),
        (["a1", 2.5, "c3"], False),
        ([], True),
        ([None, ""], True),
    ],
    ids=str,
)
def test_values_that_answer_nothing_are_about_the_row(values: list[Any], about_rows: bool) -> None:
    assert column("side", *values).is_about_rows is about_rows


def test_the_words_of_a_text_are_counted_in_scripts_with_and_without_spaces() -> None:
    assert column("x", "one two three", "four").words == 2
    assert column("x", "小明有五个").words == 0.5 * 5 + 1
    assert column("x").words == 0
    assert column("x", *TEXTS).is_text
    assert not column("x", "two words", "some others").is_text
    assert not column("x", *TEXTS[:1] * 4).is_text  # one text in all rows
    assert column("x", *TEXTS, TEXTS[0]).is_text
    assert not column("x", 1, 2, 3).is_text


def test_a_question_by_its_name_may_be_short_but_not_a_single_word() -> None:
    assert columns.find_question([column("task", "2 + 2", "3 + 4"), column("n", 1, 2)])[1] == "by its name"
    with pytest.raises(UserError, match="none of the columns 'task', 'n' looks like a question"):
        columns.find_question([column("task", "add", "subtract"), column("n", 1, 2)])


def test_complete_prompts_come_before_conversations_and_these_before_questions() -> None:
    turns = [[{"role": "user", "content": text}] for text in TEXTS]
    prompt, chat, question = column("prompt", *turns), column("chat", *turns), column("question", *TEXTS)
    assert columns.find_question([question, chat, prompt]) == (prompt, "complete prompts")
    assert columns.find_question([question, chat]) == (chat, "conversations")
    assert columns.find_question([question, chat, column("more", *turns)]) == (question, "by its name")
    assert columns.find_question([question, column("prompt", 1, 2, 3)]) == (question, "by its name")


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["A", "B", "C"], "ABC"),
        (["option_a", "option_b"], "AB"),
        (["choice1", "choice2", "choice3"], "123"),
        (["opt0", "opt1"], "01"),
        (["A"], None),
        (["B", "C"], None),
        (["A", "C"], None),
        (["choice2", "choice3"], None),
        (["x_a", "y_b"], None),
        (["A", "B", "1", "2"], "AB"),
    ],
)
def test_single_choices_follow_each_other(names: list[str], labels: str | None) -> None:
    found = columns.find_single_choices([column(name, "yes", "no") for name in names])
    assert ["".join(one.by_label) for one in found][:1] == ([] if labels is None else [labels])
    assert not columns.find_single_choices([column(name, "yes", ["no"]) for name in names])


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        (["b", "a", "B", "b", "a", "a"], ["a", "b"]),  # the most frequent spelling
        (["a", "b", "a"], None),  # fewer than two of each
        (["a", "a", "a", "a"], None),  # one label
        (["a", "b", "a", "b", None], ["a", "b"]),
        (["a", "b", "a", ["b"]], None),
        (["x" * 61, "b"] * 3, None),
        (["x" * 60, "b"] * 3, ["b", "x" * 60]),
        ([f"l{n:02}" for n in range(50)] * 2, [f"l{n:02}" for n in range(50)]),
        ([f"l{n:02}" for n in range(51)] * 2, None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_labels_are_few_short_and_recur(values: list[Any], labels: list[str] | None) -> None:
    assert columns.labels_of(column("x", *values)) == labels


def test_digits_are_labels_if_they_recur_often() -> None:
    assert columns.are_labels(column("x", *[0, 1] * 10))
    assert not columns.are_labels(column("x", *[0, 1] * 9))
    assert not columns.are_labels(column("x", *[0, 7] * 20))
    assert not columns.are_labels(column("x", *["yes", "1"] * 2))


@pytest.mark.parametrize(
    ("value", "is_tests"),
    [
        ("assert f(1) == 2", True),
        ('  ["assert f(1) == 2"]', True),
        ("we assert that", False),
        ("assertion", False),
        ('[{"input": "1", "output": "2"}]', True),
        ('[{"input": "1"}]', False),
        ('{"input": "1", "output": "2"}', False),
        (["assert f(1) == 2", " assert g()"], True),
        (["assert f(1) == 2", "f()"], False),
        ([{"input": "1", "output": "2", "more": 3}], True),
        ([{"input": "1"}], False),
        ([], False),
        (3, False),
    ],
    ids=str,
)
def test_tests_of_programs_are_recognized(value: Any, is_tests: bool) -> None:
    assert columns.is_assertions(value) is is_tests


def test_forms_of_single_answers() -> None:
    assert [columns.is_number(one) for one in (True, 1, 1.5, "1,5", "1.5", "x", None)] == [
        *(False, True, True, True, True, False, False)
    ]
    assert columns.is_short("word " * columns.SHORT_WORDS)
    assert not columns.is_short("word " * (columns.SHORT_WORDS + 1))
    assert columns.is_short({"text": ["a b"], "answer_start": [3]})
    assert [columns.is_short(one) for one in ("", [], ["a", "b"], ["a", ""], None, 3)] == [
        *(False, False, True, False, False, True)
    ]
    assert [columns.has_marks(one) for one in ("(1,2)", "2024-01-02", "1, 2", "12", ["a", "1,2"], ["a"], 1.2)] == [
        *(True, True, True, False, True, False, False)
    ]
    assert not columns.is_object({"text": ["a"], "answer_start": [0]})
    assert columns.is_object('{"a": 1}')


def test_golds_that_are_positions_and_texts_are_uncertain() -> None:
    choices = column("choices", ["1", "2", "3"], ["4", "2", "6"], ["7", "8", "9"])
    assert columns.golds_among(choices, column("gold", 1, 2, None)) == 2
    assert not columns.are_positions_certain(choices, column("gold", 1, 2, 2))
    words = column("choices", ["red", "blue"], ["red", "green"], ["up", "down"])
    assert columns.are_positions_certain(words, column("gold", 0, 1, 1))


def test_a_value_inside_objects_is_read_by_its_path_and_last_turns_by_their_role() -> None:
    rows = {"a": [{"b": 1}, None, {"c": 2}]}
    assert column("a.b").read(rows) == [1, None, None]
    assert column("a.b").is_within(column("a"))
    assert not column("a").is_within(column("a.b"))
    turns = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    found = columns.last_turns(column("chat", turns, turns))
    assert found is not None
    assert found.values == ["4", "4"]
    assert found.name == "chat, last turn"
    assert found.read({"chat": [turns, turns[:1], None]}) == ["4", None, None]
    assert columns.last_turns(column("chat", turns[:1], turns)) is None
    assert columns.last_turns(column("chat", "text", "text")) is None


def test_conversations_bring_system_prompts_if_one_begins_so() -> None:
    user = [{"role": "user", "content": "2 + 2"}]
    system = [{"role": "system", "content": "Be brief."}, *user]
    assert not columns.brings_system_prompts(column("prompt", user, user))
    assert columns.brings_system_prompts(column("prompt", user, system))
    assert not columns.brings_system_prompts(column("prompt", [*user, *system]))
    assert columns.brings_system_prompts(column("prompt", user, "text"))


def test_a_column_that_an_option_names_must_exist() -> None:
    table = [column("a", 1), column("b.c", 2)]
    assert columns.find(table, "b.c", "--answer") is table[1]
    with pytest.raises(UserError, match="--answer names the column 'c', and the table has 'a', 'b.c'"):
        columns.find(table, "c", "--answer")
