"""Cards of completions: which rows are shown, and how their texts are divided and shortened."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from grpo_recipes.reports import cards
from grpo_recipes.reports.cards import Piece

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
    assert (card.prompt, card.characters) == ("2 + 2", 18)
    assert [piece.kind for piece in card.pieces] == ["tag", "answer", "tag"]
    run.fault = {"reason": "no row"}
    assert cards.cards(run) == []
