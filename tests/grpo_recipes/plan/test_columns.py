"""Roles of a table's columns, from small tables written by hand."""

from __future__ import annotations

from typing import Any

import datasets
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
        (["2024-01-02", "2024-01-02", "2024-02-03"], True),
        (["2024-01-02 10:30", "2.1.2024", "1/2/24"], True),
        (["2024-01-02", "soon", "later"], False),
        (["https://a.org/x", "http://b.org"], True),
        (["https://a.org/x", "see b.org for more"], False),
        (["a1", 2.5, "c3"], False),
        ([], True),
        ([None, ""], True),
        (["north"] * 3, True),
        (["north"] * 2, False),
        (["north", None, "north"], True),
        ([1, "x"], False),
        ([1, 3, 2], False),
        (["a1 b", "c2 d"], False),  # several words
        (["0", "a1", "b2"], False),
        (["a1", "apple", "b2"], False),
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
    assert column("x", TEXTS[0]).is_text  # a table of one row
    assert column("x", "one two three", "four five six").is_text
    assert not column("x", "a b c", "d e f", "a b c", "d e f").is_text  # half of them recur


NINE_TEXTS = [f"This is the text number {n}" for n in range(9)]
NINE_CHATS = [[{"role": "user", "content": text}] for text in NINE_TEXTS]


def test_nine_of_ten_values_make_a_form() -> None:
    assert column("x", *NINE_TEXTS, 5, None).is_text
    assert not column("x", *NINE_TEXTS, 5, 6).is_text
    assert column("x", *NINE_CHATS, "text").is_messages
    assert not column("x", *NINE_CHATS, "text", "text").is_messages
    for name, why in (("prompt", "complete prompts"), ("task", "by its name")):
        assert columns.find_question([column(name, *NINE_TEXTS, 5)])[1] == why
        with pytest.raises(UserError, match="looks like a question"):
            columns.find_question([column(name, *NINE_TEXTS, 5, 6)])
    choices = [["yes", "no"]] * 9
    assert columns.find_choices([column("x", *choices, "text")])
    assert not columns.find_choices([column("x", *choices, "text", "text")])
    texts = column("figures", *["1|2"] * 10)
    assert columns.are_choices_weak(texts, column("gold", *range(9), "b"))
    assert not columns.are_choices_weak(texts, column("gold", *range(8), "b", "c"))


@pytest.mark.parametrize(
    ("turns", "is_conversation"),
    [
        ([{"role": "user", "content": "a"}], True),
        ([{"role": "user", "content": "a", "name": "Ann"}], True),
        ([{"from": "human", "value": "a"}, {"role": "user", "content": "a"}], True),
        ([{"role": "user"}], False),
        ([{"content": "a"}], False),
        ([{"from": "human"}], False),
        ([{"value": "a"}], False),
        ([{"role": "user", "content": "a"}, "text"], False),
        ([["role", "content"]], False),
        ([], False),
        ({"role": "user", "content": "a"}, False),
        ("text", False),
    ],
    ids=str,
)
def test_a_conversation_is_a_list_of_turns_with_a_role_and_text(turns: Any, is_conversation: bool) -> None:
    assert column("x", turns).is_messages is is_conversation


def test_a_question_by_its_name_may_be_short_but_not_a_single_word() -> None:
    assert columns.find_question([column("task", "2 + 2", "3 + 4"), column("n", 1, 2)])[1] == "by its name"
    assert columns.find_question([column("task", "run home", "sit down"), column("n", 1, 2)])[1] == "by its name"
    with pytest.raises(UserError, match="none of the columns 'task' looks like a question"):
        columns.find_question([column("task", *TEXTS, 1, 2)])  # not all of them are text
    with pytest.raises(UserError, match="none of the columns 'task', 'n' looks like a question"):
        columns.find_question([column("task", "add", "subtract"), column("n", 1, 2)])


def test_complete_prompts_come_before_conversations_and_these_before_questions() -> None:
    turns = [[{"role": "user", "content": text}] for text in TEXTS]
    prompt, chat, question = column("prompt", *turns), column("chat", *turns), column("question", *TEXTS)
    assert columns.find_question([question, chat, prompt]) == (prompt, "complete prompts")
    assert columns.find_question([question, chat]) == (chat, "conversations")
    assert columns.find_question([question, chat, column("more", *turns)]) == (question, "by its name")
    assert columns.find_question([question, column("prompt", 1, 2, 3)]) == (question, "by its name")


def test_the_only_text_is_the_question_whatever_its_name_is() -> None:
    answer = column("answer", *TEXTS)
    assert columns.find_question([answer, column("n", 1, 2, 4)]) == (answer, "the only text")


def test_names_in_messages_are_those_of_the_first_three_texts() -> None:
    texts = [column(name, *TEXTS) for name in "abcd"]
    with pytest.raises(UserError, match="^the columns 'a' and 'b' and 'c' could each be the question"):
        columns.find_question(texts)


def test_columns_with_known_names_are_in_the_order_of_these_names() -> None:
    table = [column("label", 1), column("x", 1), column(" Final Answer ", 1), column("answer", 1)]
    found = columns.known_first(table, columns.ANSWERS)
    assert [one.name for one in found] == ["answer", " Final Answer ", "label"]


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
        (["C", "A", "B"], "ABC"),
        (["选项", "A", "B"], "AB"),
    ],
)
def test_single_choices_follow_each_other(names: list[str], labels: str | None) -> None:
    found = columns.find_single_choices([column(name, "yes", "no") for name in names])
    assert ["".join(one.by_label) for one in found][:1] == ([] if labels is None else [labels])
    assert not columns.find_single_choices([column(name, "yes", ["no"]) for name in names])


def test_a_column_without_values_is_no_choice() -> None:
    a, b, c = column("A", "yes", "up"), column("B", "no", None), column("C", None, None)
    (group,) = columns.find_single_choices([a, b, c])
    assert group.by_label == {"A": a, "B": b}
    assert group.parts == (a, b)
    assert group.name == "A, B"
    assert group.values == [{"A": "yes", "B": "no"}, None]


def test_choices_are_lists_of_two_and_more_or_texts_with_labels() -> None:
    lists = [
        *(["up", "down"], '["up", "down"]', "up|down", {"text": ["up", "down"], "label": ["A", "B"]}),
    ]
    for value in lists:
        assert columns.find_choices([column("x", value)]), value
    for other in (["up"], "up", {"A": "up", "B": "down"}, {"text": "up"}, {"label": "up"}, 3, NINE_CHATS[0] * 2):
        assert not columns.find_choices([column("x", other)]), other
    assert columns.is_gold(["up", "down"], "down")
    assert columns.is_gold(["up", "down"], 1)
    for given, gold in ((["up", "down"], "left"), (["up", "down"], None), (None, "A"), ("up", "A"), (3, "A")):
        assert columns.is_gold(given, gold) is False


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        (["b", "a", "B", "b", "a", "a"], ["a", "b"]),  # the most frequent spelling
        (["a", "b", "a"], None),  # fewer than two of each
        (["a", "a", "a", "a"], None),  # one label
        (["a", "b", "a", "b", None], ["a", "b"]),
        (["a", "b", "a", ["b"]], None),
        (["a", "b", "a", "b", ["b"]], None),
        (["x" * 61, "b"] * 3, None),
        (["x" * 60, "b"] * 3, ["b", "x" * 60]),
        ([f"l{n:02}" for n in range(50)] * 2, [f"l{n:02}" for n in range(50)]),
        ([f"l{n:02}" for n in range(51)] * 2, None),
        (["one two three four five", "b"] * 2, ["b", "one two three four five"]),
        (["one two three four five six", "b"] * 2, None),
        (["B", "a"] * 2, ["a", "B"]),
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
    assert not columns.are_labels(column("x", *[10, 20] * 20))
    assert columns.are_labels(column("x", *[-1, 0, 5] * 10))
    assert columns.are_labels(column("x", *["yes", "no"] * 2))
    assert not columns.are_labels(column("x", "yes", "no"))


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
        ('{"inputs": ["1"], "outputs": ["2"]}', True),
        ({"inputs": ["1"], "outputs": ["2"]}, True),
        ({"inputs": ["1"]}, False),
        ("\n\nMETADATA = {}\n\ndef check(candidate):\n    assert candidate(1) == 2\n", True),
        ("def check(value, name): ...", False),
        ('  [{"input": "1", "output": "2"}] ', True),
        ('[{"output": "1"}]', False),
        ([{"input": "1", "output": "2"}], True),
        ([{"output": "1"}], False),
        ([3], False),
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
    assert columns.is_short("word " * 5)
    assert not columns.is_short("word " * 6)
    assert columns.is_short({"text": ["a b"], "answer_start": [3]})
    assert [columns.is_short(one) for one in ("", [], ["a", "b"], ["a", ""], None, 3)] == [
        *(False, False, True, False, False, True)
    ]
    assert [columns.has_marks(one) for one in ("(1,2)", "2024-01-02", "1, 2", "12", ["a", "1,2"], ["a"], 1.2)] == [
        *(True, True, True, False, True, False, False)
    ]
    assert not columns.is_object({"text": ["a"], "answer_start": [0]})
    assert columns.is_object('{"a": 1}')
    assert [columns.is_object(one) for one in ({"text": "a"}, {}, "text", ["a"], None)] == [
        *(True, False, False, False, False)
    ]
    assert [columns.is_number(one) for one in ("0", "0,0", "", "(1,2)")] == [True, True, False, False]
    assert [columns.is_short(one) for one in ({"text": ["a"]}, {"answer_start": [3]}, "a b c d e", "a b c d e f")] == [
        *(False, False, True, False)
    ]
    assert columns.is_short({"text": ["a b"], "answer_start": [3], "id": "x"})
    worked = ("So it is\n#### 7", "#### ", "So it is 7", 7, None)
    assert [columns.is_worked(one) for one in worked] == [True, False, False, False, False]
    boxed = ("So \\boxed{7}", "\\boxed{}", "So it is 7", 7, None)
    assert [columns.is_boxed(one) for one in boxed] == [True, False, False, False, False]


def test_golds_that_are_positions_and_texts_are_uncertain() -> None:
    choices = column("choices", ["1", "2", "3"], ["4", "2", "6"], ["7", "8", "9"])
    assert columns.golds_among(choices, column("gold", 1, 2, None)) == 2
    assert not columns.are_positions_certain(choices, column("gold", 1, 2, 2))
    words = column("choices", ["red", "blue"], ["red", "green"], ["1", "2"])
    assert columns.are_positions_certain(words, column("gold", 0, 1, 1))
    assert columns.are_positions_certain(choices, column("gold", "1", "2", "2")), "text names no position"
    half = column("choices", ["1", "2"], ["1", "2"], ["up", "down"], ["up", "down"])
    assert not columns.are_positions_certain(half, column("gold", 1, 1, 0, 1))
    assert columns.are_positions_certain(half, column("gold", 0, 1, 0, 1))
    numbered = column("choices", *[{"text": ["2", "1"], "label": ["1", "2"]}] * 3)
    assert columns.are_positions_certain(numbered, column("gold", 1, 2, 2)), "a number is a label"


def test_a_value_inside_objects_is_read_by_its_path_and_last_turns_by_their_role() -> None:
    rows = {"a": [{"b": 1}, None, {"c": 2}]}
    assert column("a.b").read(rows) == [1, None, None]
    assert column("a.b").is_within(column("a"))
    assert not column("a").is_within(column("a.b"))
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    turns += [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    found = columns.last_turns(column("chat", turns, turns))
    assert found is not None
    assert found.values == ["4", "4"]
    assert found.name == "chat, last turn"
    assert found.read({"chat": [turns, turns[:1], None, []]}) == ["4", None, None, None]
    assert columns.last_turns(column("chat", turns[:1], turns)) is None
    assert columns.last_turns(column("chat", "text", "text")) is None
    assert columns.last_turns(column("chat", turns, "text")) is None
    silent = columns.last_turns(column("chat", [*turns[:3], {"role": "assistant", "content": ""}], turns))
    assert silent is not None
    assert silent.values == ["", "4"]
    with pytest.raises(UserError, match=r"has 'chat', 'chat\.role'"):
        columns.find([column("chat"), column("chat.role")], "role", "--answer")


class Head:
    """Rows of a table whose column of JSON may hold any values."""

    column_names = ("a",)

    def __init__(self, *values: Any) -> None:
        self.rows = {"a": list(values)}

    def __getitem__(self, part: slice) -> dict[str, list[Any]]:
        return self.rows


def test_objects_may_have_different_keys() -> None:
    head: Any = Head(None, {"x": 1}, {}, {"y": 2})
    assert {one.name: one.values for one in columns.columns_of(head)} == {
        **{"a": [None, {"x": 1}, {}, {"y": 2}], "a.x": [None, 1, None, None], "a.y": [None, None, None, 2]}
    }
    for other in ("", "text", 0, []):
        mixed: Any = Head({"x": 1}, other)
        assert [one.name for one in columns.columns_of(mixed)] == ["a"]


def test_keys_of_objects_are_columns_to_a_depth_of_four() -> None:
    deep = {"b": {"c": {"d": {"e": {"f": 1}}}}}
    table = datasets.Dataset.from_list([{"a": None, "x": ""}, {"a": deep, "x": "text"}])
    found = columns.columns_of(table)
    assert [one.name for one in found] == ["a", "a.b", "a.b.c", "a.b.c.d", "a.b.c.d.e", "x"]
    assert [one.read(table[:]) for one in found] == [one.values for one in found]
    assert found[-2].values == [None, {"f": 1}]


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
