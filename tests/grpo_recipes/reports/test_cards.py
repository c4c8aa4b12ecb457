"""Cards of completions: which rows are shown, and how their texts are divided and shortened."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from grpo_recipes.reports import cards
from grpo_recipes.reports.cards import Piece
from grpo_recipes.reports.run import PARTS
from grpo_recipes.reports.transcript import Part
from tests.support.logged_runs import logged

TAGS = ("think", "answer")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("plain", [("plain", "")]),
        (
            "a <think>b</think> c <answer>4</answer>",
            [
                *(("a ", ""), ("<think>", "tag"), ("b", "reasoning"), ("</think>", "tag"), (" c ", "")),
                *(("<answer>", "tag"), ("4", "answer"), ("</answer>", "tag")),
            ],
        ),
        ("<b>x</b><answer>4", [("<b>x</b>", ""), ("<answer>", "tag"), ("4", "answer")]),
        ("<think><answer>4", [("<think>", "tag"), ("<answer>", "tag"), ("4", "answer")]),
        ("</think>4", [("</think>", "tag"), ("4", "")]),
    ],
)
def test_a_text_is_divided_at_the_tags_of_its_recipe(text: str, expected: list[tuple[str, str]]) -> None:
    found = cards.pieces(text, TAGS)
    assert found == [Piece(*pair) for pair in expected]
    assert "".join(piece.text for piece in found) == text


def test_a_long_text_keeps_500_characters_of_its_beginning_and_300_of_its_end() -> None:
    assert cards.shortened("x" * 800) == "x" * 800
    shown = cards.shortened("a" * 500 + "b" * 1200 + "c" * 300)
    assert shown == "a" * 500 + "\n… 1,200 characters …\n" + "c" * 300


@pytest.mark.parametrize(
    ("rewards", "tags"),
    [
        (None, TAGS),
        (["well_formed"], TAGS),
        ([{"name": "x", "kwargs": {"tags": ["a", "b"]}}, {"name": "y", "kwargs": {"tags": ["c", "d"]}}], ("a", "b")),
        ([{"name": "x"}, {"name": "y", "kwargs": {"tags": ("c", "d")}}], ("c", "d")),
        ([{"name": "x", "kwargs": {"tags": ["a"]}}], TAGS),
        ([{"name": "x", "kwargs": {"tags": "ab"}}], TAGS),
        ([{"name": "x", "kwargs": ["tags"]}], TAGS),
    ],
)
def test_tags_are_those_of_the_first_reward_that_has_some(rewards: Any, tags: tuple[str, str]) -> None:
    assert cards.tags_of(SimpleNamespace(recipe={"rewards": rewards})) == tags


def test_the_rows_shown_are_the_medians_and_extremes_of_a_run() -> None:
    """Steps 1 to 4. The last quarter is step 4, and the median of step 3 is halfway."""
    totals = {1: [0, 1, 5], 2: [2, 2, 9], 3: [1, 3, 4], 4: [7, 6, 8]}
    rows = pd.DataFrame(
        [
            {"step": step, "prompt": f"p{step}", "completion": f"{step}-{place}", "total": float(total)}
            for step, row in totals.items()
            for place, total in enumerate(row)
        ]
    )
    chosen = {title: rows.loc[index, "completion"] for title, _, index in cards._chosen(rows)}
    # The highest advantage over its group is that of 9 beside 2 and 2. 7 is taken when the worst is chosen.
    assert chosen == {
        **{"First": "1-1", "Middle": "3-1", "Last": "4-0", "Best": "4-2", "Worst": "4-1", "Most surprising": "2-2"}
    }
    again = pd.concat([rows, rows.assign(total=None)], ignore_index=True)
    assert {title: again.loc[index, "completion"] for title, _, index in cards._chosen(again)} == chosen
    assert cards._chosen(rows.assign(total=None)) == []
    assert len(cards._chosen(rows.head(2))) == 2
    # A reward that scored no completion leaves its column empty. The order of the rows decides only between equals.
    unscored = rows.assign(**{"pay/other": None}).iloc[::-1]
    assert {title: rows.loc[index, "completion"] for title, _, index in cards._chosen(unscored)} == chosen


def chosen_totals(*logged: tuple[int, str, list[float]]) -> dict[str, tuple[int, float]]:
    """Return step and total of each chosen row, from steps and prompts with the totals of their completions."""
    rows = pd.DataFrame(
        [
            {"step": step, "prompt": prompt, "completion": f"{step} {prompt} {place}", "total": total}
            for step, prompt, totals in logged
            for place, total in enumerate(totals)
        ]
    )
    return {title: (rows.loc[index, "step"], rows.loc[index, "total"]) for title, _, index in cards._chosen(rows)}


def test_the_best_and_the_worst_are_of_the_last_quarter_of_the_steps() -> None:
    """The last quarter of eight steps is steps 7 and 8. Step 6 has the lowest and the highest reward."""
    totals = {6: [0.0, 50.0, 99.0], 7: [2.0, 50.0, 97.0], 8: [40.0, 50.0, 60.0]}
    chosen = chosen_totals(*[(step, "p", totals.get(step, [49.0, 50.0, 51.0])) for step in range(1, 9)])
    assert (chosen["Best"], chosen["Worst"]) == ((7, 97.0), (7, 2.0))


def test_the_first_card_has_the_median_reward_and_not_the_mean() -> None:
    assert chosen_totals((1, "p", [0.0, 1.0, 2.0, 5.0, 17.0]))["First"] == (1, 2.0)


def test_the_most_surprising_completion_has_the_highest_advantage_as_training_computes_it() -> None:
    """An advantage is the distance from the mean of its group over the group's deviation and 0.0001.

    One high reward of four is 1.5 deviations above the mean, and one of two is 0.7. A group is a prompt of a step.
    """
    rest = (3, "p", [9.0] * 5)
    small, large = [0.0, 0.0, 0.0, 0.01], [0.0, 10.0]
    assert chosen_totals((1, "p", small), (1, "q", large), rest)["Most surprising"] == (1, 0.01)
    assert chosen_totals((1, "p", small), (2, "p", large), rest)["Most surprising"] == (1, 0.01)
    # The constant in the divisor exceeds the deviation of 0.00005.
    assert chosen_totals((1, "p", [0.0] * 3 + [1e-4]), rest)["Most surprising"] == (1, 1e-4)


def test_the_first_of_completions_with_equal_rewards_is_shown() -> None:
    rows = pd.DataFrame({"step": 1, "prompt": "p", "completion": range(60), "total": [0.0, 1.0] * 30})
    assert [index for _, _, index in cards._chosen(rows)] == [0, 1, 2, 3, 4, 5]


def test_a_text_that_answers_two_prompts_is_two_completions() -> None:
    rows = pd.DataFrame({"step": 1, "prompt": ["p", "q", "q"], "completion": "4", "total": [0.0, 1.0, 1.0]})
    assert [index for _, _, index in cards._chosen(rows)] == [0, 1]


def card(**row: Any) -> cards.Card:
    """Return the card of a row of a run with two correctness rewards and another one."""
    kinds = {"right": "correctness", "also": "correctness", "style": "format", "unlogged": "format"}
    run = logged({}, rewards=[{"name": name, "kind": kind} for name, kind in kinds.items()])
    values = {"step": 7, "question": "2 + 2", "completion": "<answer>4</answer>", "total": 1.5, PARTS: []}
    scores = {"right": 1.0, "also": 0.5, "style": -0.25}
    return cards._card(run, "Best", "a reason", pd.Series({**values, **scores, **row}, dtype=object), TAGS)


def test_a_card_shows_the_scores_and_the_verdict_of_its_row() -> None:
    shown = card(gold="4", verdict="exact", advantage=1.5)
    assert (shown.title, shown.why, shown.step, shown.prompt) == ("Best", "a reason", 7, "2 + 2")
    assert shown.pieces == [Piece("<answer>", "tag"), Piece("4", "answer"), Piece("</answer>", "tag")]
    assert (shown.characters, shown.gold, shown.verdict, shown.is_right) == (18, "4", "exact", True)
    assert shown.pays == [("right", "1"), ("also", "0.5"), ("style", "-0.25")]
    assert (shown.total, shown.advantage, shown.said, shown.turns) == ("1.5", "+1.50", [], 0)


def test_a_completion_is_right_if_every_correctness_reward_that_scored_it_pays() -> None:
    nan = float("nan")
    assert card(also=0.0).is_right is False
    assert card(right=0.0, also=0.0).is_right is False
    assert card(style=0.0).is_right is True
    assert card(also=nan).is_right is True
    run = logged({}, rewards=[{"name": "right", "kind": "correctness", "passes_at": 0.9}])
    for score, is_right in ((0.5, False), (0.8999999761581421, True)):
        row = pd.Series(
            {"step": 7, "question": "", "completion": "", "total": 1.5, PARTS: [], "right": score}, dtype=object
        )
        assert cards._card(run, "Best", "", row, TAGS).is_right is is_right
    unscored = card(right=nan, also=nan, style=1.0)
    assert unscored.is_right is None
    assert unscored.pays == [("right", "–"), ("also", "–"), ("style", "1")]


@pytest.mark.parametrize(
    ("advantage", "shown"),
    [(-0.4949, "-0.49"), (0.0, "+0.00"), (float("nan"), ""), (None, ""), ("much", "")],
)
def test_an_advantage_has_two_decimals_and_is_left_out_if_it_is_no_number(advantage: Any, shown: str) -> None:
    assert card(advantage=advantage).advantage == shown


def test_a_gold_or_a_verdict_that_is_no_text_is_left_out() -> None:
    assert (card().gold, card().verdict) == ("", "")
    assert (card(gold=4, verdict=None).gold, card(gold=4, verdict=None).verdict) == ("", "")


def test_a_card_of_a_transcript_counts_its_turns_and_all_their_characters() -> None:
    parts = [
        Part("call", 1, "12345", "add"),
        Part("result", 1, "1234567", "add"),
        Part("text", 2, "<answer>4</answer>"),
    ]
    shown = card(**{PARTS: parts})
    assert (shown.turns, shown.characters) == (2, 5 + 7 + 18)
    assert [(one.kind, one.label) for one in shown.said] == [
        ("call", "Turn 1 calls add"),
        ("result", "Result of add, not trained on"),
        ("text", "Turn 2"),
    ]
    assert [piece.kind for piece in shown.said[2].pieces] == ["tag", "answer", "tag"]


def test_a_long_transcript_shows_its_first_8_and_its_last_4_parts() -> None:
    parts = [Part("text", number, f"{number}" * 900) for number in range(1, 10)] * 2
    shown = cards.said(parts, TAGS)
    assert [one.label for one in shown] == [
        *(f"Turn {n}" for n in range(1, 9)),
        "Left out",
        *map("Turn {}".format, "6789"),
    ]
    assert shown[0].pieces == [Piece("1" * 500 + "\n… 100 characters …\n" + "1" * 300)]


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        ("2 + 2", "2 + 2"),
        ('[{"role": "user", "content": "first"}, {"role": "user", "content": "2 + 2"}]', "2 + 2"),
        ("3", "3"),
        ('"text"', '"text"'),
        ('{"content": "x"}', '{"content": "x"}'),
        ('[{"content": "x"}, 1]', '[{"content": "x"}, 1]'),
        ("[" * 100_000, "[" * 100_000),
    ],
    ids=lambda text: text[:20],
)
def test_a_prompt_that_is_no_conversation_is_shown_as_it_is(prompt: str, question: str) -> None:
    assert cards._question(prompt) == question


def test_changes_of_verdicts_are_counted_and_shown_up_to_four_of_each() -> None:
    conversation = json.dumps([{"role": "user", "content": "first"}, {"role": "user", "content": "2 + 2"}])
    pairs = pd.DataFrame(
        [
            {
                "prompt": conversation if n == 0 else f"p{n}",
                "gold": n,
                "completion": f"b{n}",
                "completion_after": f"a{n}",
            }
            | {"strict": 6 <= n < 9, "strict_after": n < 6 or n == 9}
            for n in range(12)
        ]
    )
    sentence, shown = cards.changes(pairs, TAGS)
    assert sentence == "7 of 12 problems gained, 3 lost"
    assert [(one.kind, one.gold) for one in shown] == [
        *(
            ("gained", "0"),
            ("gained", "1"),
            ("gained", "2"),
            ("gained", "3"),
            ("lost", "6"),
            ("lost", "7"),
            ("lost", "8"),
        )
    ]
    assert [one.prompt for one in shown[:2]] == ["2 + 2", "p1"]
    assert (shown[0].before, shown[0].after) == ([Piece("b0")], [Piece("a0")])
    assert cards.changes(None, TAGS) == ("", [])


def test_the_row_that_stopped_a_run_is_the_first_card() -> None:
    row = {"completion": "<answer>4</answer>", "reward": "mine", "step": None, "prompt": "2 + 2"}
    run = SimpleNamespace(
        fault={"row": row}, rows=pd.DataFrame({"total": [], "prompt": [], "completion": []}), recipe={}
    )
    (card,) = cards.cards(run)
    assert (card.title, card.why, card.step) == ("Stopped the run", "mine could not score it", 0)
    assert (card.prompt, card.characters, card.turns) == ("2 + 2", 18, 0)
    assert [piece.kind for piece in card.pieces] == ["tag", "answer", "tag"]
    run.fault = {"reason": "no row"}
    assert cards.cards(run) == []
