"""Both of TRL's completion shapes, and the groups of a batch."""

from array import array

import pytest

from grpo_rewards import gsm8k_correctness, math_correctness, tag_count, tag_presence, tag_structure, well_formed
from grpo_rewards.completions import (
    completion_text,
    fenced_blocks,
    group_slices,
    listed_scores,
    needed_column,
    outside_thinking,
    prompt_groups,
)
from grpo_rewards.length import GroupLength
from grpo_rewards.math.correctness import GSM8KCorrectness
from grpo_rewards.registry import BuiltReward, SumReward


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        ([{"role": "assistant", "content": "chat"}], "chat"),
        ([{"content": "no role"}], "no role"),
        ([{"role": "assistant", "content": "first"}, {"role": "tool", "content": "t"}], "first"),
        (
            [{"role": "assistant", "content": None}, {"role": "tool", "content": "t"},
             {"role": "assistant", "content": "last"}],
            "last",
        ),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"},
                                            {"type": "text", "text": "b"}]}], "ab"),
        ([{"role": "assistant", "content": None}], ""),
        ([{"role": "user", "content": "u"}], ""),
        ([{"role": "assistant", "content": "first"}, "loose"], "first"),
        ([{"content": ["loose", {"text": "a"}, {"text": 3}, {"text": "b"}]}], "ab"),
        ([{"content": ({"text": "a"},)}], "a"),
        (({"content": "tuple"},), "tuple"),
        ([{"content": {"text": "mapping"}}], ""),
        ([], ""),
        (None, ""),
        (3, ""),
    ],
)  # fmt: skip
def test_a_completion_gives_its_text(completion, text):
    assert completion_text(completion) == text


def test_group_slices_cover_the_batch_in_order():
    assert group_slices(6, 3) == [slice(0, 3), slice(3, 6)]
    assert group_slices(0, 4) == []
    with pytest.raises(ValueError, match="num_generations"):
        group_slices(7, 3)


BARE = [
    (gsm8k_correctness, {"completions": ["<answer>18</answer>"], "answer": "18"}, "`answer` must be a list"),
    (gsm8k_correctness, {"completions": ["<answer>18</answer>"], "answer": 18}, "`answer` must be a list"),
    (gsm8k_correctness, {"completions": "<answer>18</answer>", "answer": ["18"]}, "`completions` must be a list"),
    (gsm8k_correctness, {"completions": ["a", "b"], "answer": ["18"]}, "2 in `completions`, 1 in `answer`"),
    (GSM8KCorrectness(gold_column="gold"), {"completions": ["a"], "gold": "18"}, "`gold` must be a list"),
    (math_correctness, {"completions": ["18"], "answer": "18"}, "`math_correctness`: `answer` must be a list"),
    *(
        (reward, {"completions": "<answer>18</answer>"}, f"`{reward.name}`: `completions` must be a list")
        for reward in (tag_structure, tag_count, tag_presence, well_formed)
    ),
    (
        GroupLength(num_generations=1),
        {"prompts": ["p"], "completions": "18", "answer": ["18"]},
        "`completions` must be",
    ),
    (GroupLength(num_generations=1), {"prompts": "p", "completions": ["18"], "answer": ["18"]}, "`prompts` must be"),
    (
        SumReward((BuiltReward(tag_count, 1.0, "tag_count"),), name="total"),
        {"completions": "18"},
        "`total`: `completions` must be a list",
    ),
    (
        SumReward((BuiltReward(lambda **columns: [1.0] * 3, 1.0, "three"),)),
        {"completions": ["18"]},
        "`three`.* 1 in `completions`, 3 in `scores`",
    ),
]


@pytest.mark.parametrize(("reward", "call", "message"), BARE, ids=[str(row[2]) for row in BARE])
def test_a_bare_string_and_a_short_column_are_refused(reward, call, message):
    with pytest.raises(ValueError, match=message):
        reward(**call)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (None, "None, not a list of"),
        (0.0, "a float, not a list of"),
        ("ab", "a str, not a list of"),
        (b"ab", "a bytes, not a list of"),
        ({1: 1.0, 2: 1.0}, "a dict, not a list of"),
        ({1.0, 2.0}, "a set, not a list of"),
        ([], "0"),
        ([1.0], "1"),
        ([1.0] * 3, "3"),
    ],
)
def test_a_reward_returns_one_score_for_each_completion(returned, problem):
    message = f"^reward `r` returned {problem} scores for 2 completions: it must return one for each, None where it has"
    with pytest.raises(ValueError, match=message):
        listed_scores("r", returned, 2)


def test_scores_may_come_in_any_sequence():
    assert listed_scores("r", (1.0, None), 2) == [1.0, None]
    assert listed_scores("r", array("d", [0.5, 2.0]), 2) == [0.5, 2.0]
    assert listed_scores("r", (score for score in (1.0, "x")), 2) == [1.0, "x"]  # the entries are not checked


def test_a_column_that_a_reward_names_is_found_or_named():
    reward = GSM8KCorrectness(gold_column="gold")
    assert needed_column(reward, "gold_column", {"answer": ["1"], "gold": ["2"]}, ["a"]) == ["2"]
    assert needed_column(reward, "gold_column", {"gold": []}, []) == []
    with pytest.raises(
        ValueError, match=r"needs the dataset column `gold` \(its kwarg gold_column\); the batch has a, b$"
    ):
        needed_column(reward, "gold_column", {"a": ["1"], "b": ["2"]}, ["a"])
    with pytest.raises(ValueError, match="the batch has none$"):
        needed_column(reward, "gold_column", {}, ["a"])
    with pytest.raises(ValueError, match="2 in `completions`, 1 in `gold`"):
        needed_column(reward, "gold_column", {"gold": ["1"]}, ["a", "b"])


def test_any_kind_of_list_is_accepted():
    assert gsm8k_correctness(completions=("<answer>18</answer>",), answer=array("l", [18])) == [2.0]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("```python\nx\n```", [("python", "x\n")]),
        ("a\n``` Python title\nx\n\ny\n```\nb", [("python", "x\n\ny\n")]),
        ("```\n```", [("", "")]),
        ("```\nx\n```\n````\n```\n````", [("", "x\n"), ("", "```\n")]),
        ("````\nx\n```", []),
        ("```\nx\n````", [("", "x\n")]),
        ("```\nx\n```python\ny\n```", [("", "x\n```python\ny\n")]),
        ("  ```js\n  x\n    y\n z\n  ```", [("js", "x\n  y\nz\n")]),
        ("    ```\nx\n    ```", []),
        ("``` a `b`\nx\n```", []),
        ("```\nx", []),
    ],
)
def test_the_closed_fences_of_a_text(text, blocks):
    assert fenced_blocks(text) == blocks


@pytest.mark.parametrize(
    ("text", "prefilled", "outside"),
    [
        ("<t>a</t>b", False, "b"), ("<t>a</t>b<t>c", False, "b"), ("<t>a</t>b<t>c</t>d", False, "d"),
        ("ab", False, "ab"),
        ("</t>b", False, "b"), ("</t>b", True, "b"), ("<t>a", True, ""),
        ("a<t>b", False, "a"), ("a</t>b", True, "b"), ("ab", True, ""), ("a</t>b<t>c", True, "b"),
    ],
)  # fmt: skip
def test_the_thinking_is_removed(text, prefilled, outside):
    assert outside_thinking(text, "t", prefilled) == outside


def test_without_a_tag_the_thinking_is_that_of_think_and_the_completion_opens_it():
    assert outside_thinking("a<think>b") == "a"
    assert outside_thinking("a") == "a"


def test_groups_hold_one_prompt_each():
    assert prompt_groups("r", ["p", "p", "q", "q"], 2) == [slice(0, 2), slice(2, 4)]
    assert prompt_groups("r", ["p", "p", "p", "p"], 2) == [slice(0, 2), slice(2, 4)]
    with pytest.raises(ValueError, match="reward `r`: rows 2 to 3 hold different prompts, so groups are not 2 "):
        prompt_groups("r", ["p", "p", "p", "q"], 2)
    with pytest.raises(ValueError, match="reward `r` needs num_generations"):
        prompt_groups("r", ["p"], None)
    with pytest.raises(ValueError, match="reward `r` needs num_generations"):
        prompt_groups("r", ["p"], 0)
    with pytest.raises(ValueError, match="3 completions are not a whole number of groups of 2"):
        prompt_groups("r", ["p"] * 3, 2)
