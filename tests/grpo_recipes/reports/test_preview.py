"""Findings of a preview, from samples written by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from grpo_recipes.reports.preview import Preview
from grpo_recipes.reports.transcript import TurnPart
from grpo_rewards.registry import BuiltReward, build_rewards
from grpo_rewards.terminal import rendered

CORRECT, FORMAT = "gsm8k_correctness", "well_formed"
REWARDS = build_rewards([CORRECT, {"name": FORMAT, "weight": 0.5}])
NAN = float("nan")

Scores = tuple[float, float]


def preview_of(
    *groups: Sequence[Scores], rewards: Sequence[BuiltReward] = REWARDS, texts: Sequence[str] = (), **changed: Any
) -> Preview:
    """Return a preview of completions of 10 tokens with two scores each. Texts differ unless some are given."""
    rows = []
    for number, group in enumerate(groups):
        for place, scores in enumerate(group):
            pays = dict(zip((CORRECT, FORMAT), scores, strict=True))
            row = {"prompt": number, "prompt_tokens": 5, "text": texts[place] if texts else f"text {place}"}
            row |= {"turns": (), "tokens": 10, "cut": False, "said": {CORRECT: {"gold": "2"}}}
            rows.append({**row, **{f"pay/{name}": score for name, score in pays.items()}})
    table = pd.DataFrame(rows)
    weighted = table[[f"pay/{one.name}" for one in rewards]] * [one.weight for one in rewards]
    table["total"] = weighted.sum(axis=1, min_count=1)
    prompts = [f"prompt {number}" for number in range(len(groups))]
    given = {"by_reward": False, "seconds_per_completion": 0.5, **changed}
    return Preview("mine.yaml", "a model", rewards=rewards, prompts=prompts, rows=table, **given)


def cut(preview: Preview, count: int) -> Preview:
    return replace(preview, rows=preview.rows.assign(cut=[place < count for place in range(len(preview.rows))]))


def with_pays(**declared: Any) -> list[BuiltReward]:
    return [replace(REWARDS[0], **declared), replace(REWARDS[1], weight=0)]


MIXED: list[Scores] = [(2.0, 1.0), (0.0, 1.0), (2.0, 1.0), (0.0, 0.0)]
SOLVED: list[Scores] = [(2.0, 1.0)] * 4
FAILED: list[Scores] = [(0.0, 1.0)] * 4
NEVER: list[Scores] = [(score, 0.0) for score in (2.0, 0.0, 2.0, 0.0)]
FINE = "gradient"
NO_MAXIMUM = [replace(REWARDS[0], highest_pay=None, passes_at=None), replace(REWARDS[1], weight=0)]


@pytest.mark.parametrize(
    ("preview", "expected"),
    [
        (preview_of(MIXED, MIXED, SOLVED), [f"{FINE}|2 of 3"]),
        (preview_of(MIXED, SOLVED), [FINE]),  # half of the groups
        (preview_of(SOLVED, MIXED, SOLVED), ["too easy|2 of 3"]),
        (preview_of(FAILED, MIXED, FAILED), ["too hard|2 of 3"]),
        (preview_of(FAILED, FAILED), [f"`{CORRECT}`|8", "too hard"]),
        (preview_of(SOLVED, FAILED), ["too hard|2 of 2"]),  # as many are easy
        # A floor of float32's 0.01, and a threshold of 0.9 that float32 rounds.
        (preview_of(*[[(0.009999999776482582, 1.0)] * 4] * 2, rewards=with_pays(highest_pay=1.0)), ["too hard"]),
        (
            preview_of(*[[(0.8999999761581421, 1.0)] * 4] * 2, rewards=with_pays(highest_pay=1.0, passes_at=0.9)),
            ["too easy"],
        ),
        (preview_of(SOLVED, SOLVED, rewards=NO_MAXIMUM), ["`rewards`|2 of 2"]),
        (preview_of(SOLVED, rewards=with_pays(highest_pay=1.0)), ["`gsm8k_correctness`|`highest_pay`", "too easy"]),
        (preview_of([(NAN, 1.0), *MIXED[1:]]), [FINE]),
        (preview_of([(NAN, score) for score in (1, 0, 1, 0)]), [f"`{CORRECT}`|`dataset.columns`|4"]),
        (preview_of(NEVER), [f"`{FORMAT}`|`dataset.system_prompt`"]),
        (preview_of(NEVER, rewards=[REWARDS[0], replace(REWARDS[1], weight=0)]), [FINE]),
        (preview_of([(-1.0, 1.0), (1.0, 0.0)]), [FINE]),  # a right answer, beside one from which a point is taken
        (preview_of([(-1.0, 1.0), (0.0, 0.0)]), [f"`{CORRECT}`|2"]),
        (cut(preview_of(MIXED), 1), [FINE]),
        (cut(preview_of(MIXED), 2), ["2 of 4|`max_completion_length`"]),
    ],
)
def test_what_follows_from_a_sample(preview: Preview, expected: list[str]) -> None:
    found = preview.findings()
    for sentence, figures in zip(found, expected, strict=True):
        assert [figure for figure in figures.split("|") if figure not in sentence] == [], sentence


def test_a_suggestion_names_the_key_to_change() -> None:
    (sentence,) = preview_of([(0.0, form) for form in (0, 1, 0, 1)], texts=["so #### 1"] * 3 + ["#### 2"]).findings()
    assert "`extract: hashes` finds one in 4 of 4" in sentence
    assert "`dataset.pass_rate`" in preview_of(SOLVED).findings()[0]
    never = preview_of(NEVER)
    assert "`tag_presence`" in never.findings()[0]
    never.rows["pay/tag_presence"] = 0.5  # the recipe pays the parts already
    assert "`tag_presence`" not in never.findings()[0]


def test_a_group_is_flat_by_its_total_or_by_every_reward() -> None:
    """Half a point of format makes up for half a point of correctness, but not where each reward is normalized."""
    group = [(0.5, 0.0), (0.0, 1.0), (0.5, 0.0), (0.0, 1.0)]
    assert preview_of(group).is_flat.sum() == 1
    assert preview_of(group, by_reward=True).is_flat.sum() == 0
    assert preview_of([(NAN, NAN), *SOLVED]).is_flat.tolist() == [True]


def test_json_has_every_completion() -> None:
    found = json.loads(json.dumps(preview_of(*[MIXED] * 4, [*SOLVED[:3], (NAN, 1.0)]).as_dict()))
    assert found["prompts"] == [f"prompt {number}" for number in range(5)]
    assert len(found["completions"]) == 20
    last = {"prompt": 4, "text": "text 3", f"pay/{CORRECT}": None, f"pay/{FORMAT}": 1.0, "total": 0.5}
    assert found["completions"][19] == {**found["completions"][0], **last}
    assert "5 of 5" in found["findings"][0]


def test_the_terminal_shows_examples_and_numbers() -> None:
    said = rendered(preview_of(*[MIXED] * 4, [*SOLVED[:3], (NAN, 1.0)]).describe())
    lines = [" ".join(line.split()) for line in said.splitlines()]
    first = lines[lines.index("| prompt 0") : lines.index("| prompt 1")]
    rewards = [line.rpartition("reward ")[2] for line in first if line.startswith("completion")]
    assert rewards == ["2.5", "0.5", "0"]
    assert f"{CORRECT} 2: gold `2`" in first
    assert f"{CORRECT} 1 1.158 55% 1 of 20 4 of 5 groups" in lines
    text = " ".join(lines)
    for figure in ("0 of 5", "0% to 52%", "0 of 20", "0.5 s"):
        assert figure in text, figure


def test_a_text_is_shortened_and_cannot_control_the_terminal() -> None:
    said = rendered(preview_of(MIXED, texts=["\x1b[2J\u202ehidden", *[f"begin {'x' * 9000} end"] * 3]).describe())
    assert "\\x1b[2J" in said
    assert all(letter.isprintable() or letter == "\n" for letter in said)
    assert "begin x" in said
    assert "x end" in said
    assert len(said) < 10_000


def test_a_completion_of_turns_is_printed_turn_by_turn() -> None:
    turns = tuple(TurnPart("call", number, f"{number} + 1", "add") for number in range(1, 15))
    preview = preview_of(MIXED[:1])
    preview.rows["turns"] = [turns]
    said = rendered(preview.describe())
    assert said.count("calls add") == 12
    assert "  | … 2 parts …" in said
    assert "text 0" not in said, "the last message is one of the turns"
