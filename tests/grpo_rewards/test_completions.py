"""Both of TRL's completion shapes, and the groups of a batch."""

from array import array

import pytest

from grpo_rewards import gsm8k_correctness, math_correctness, tag_count, tag_presence, tag_structure, well_formed
from grpo_rewards.built import BuiltReward
from grpo_rewards.completions import (
    completion_text,
    fenced_blocks,
    group_slices,
    listed_scores,
    needed_column,
    outside_thinking,
    prompt_groups,
)
from grpo_rewards.composed import SumReward
from grpo_rewards.length import GroupLength
from grpo_rewards.math.correctness import GSM8KCorrectness

ASSISTANT = {"role": "assistant"}
TEXTS = [
    ("plain", "plain"), ([{**ASSISTANT, "content": "chat"}], "chat"), ([{"content": "no role"}], "no role"),
    ([{**ASSISTANT, "content": "first"}, {"role": "tool", "content": "t"}], "first"),
    ([{**ASSISTANT, "content": None}, {"role": "tool", "content": "t"}, {**ASSISTANT, "content": "last"}], "last"),
    ([{**ASSISTANT, "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"text": "b"}]}], "ab"),
    ([{**ASSISTANT, "content": None}], ""), ([{"role": "user", "content": "u"}], ""), ([], ""), (None, ""), (3, ""),
    ([{**ASSISTANT, "content": "first"}, "loose"], "first"), (({"content": "tuple"},), "tuple"),
    ([{"content": ["loose", {"text": "a"}, {"text": 3}, {"text": "b"}]}], "ab"), ([{"content": {"text": "m"}}], ""),
]  # fmt: skip


def test_a_completion_gives_its_text():
    for completion, text in TEXTS:
        assert completion_text(completion) == text, completion


def test_group_slices_cover_the_batch_in_order():
    assert group_slices(6, 3) == [slice(0, 3), slice(3, 6)]
    assert group_slices(0, 4) == []
    with pytest.raises(ValueError, match="num_generations"):
        group_slices(7, 3)


def test_a_column_that_a_reward_names_is_found_or_named():
    reward = GSM8KCorrectness(gold_column="gold")
    assert needed_column(reward, "gold_column", {"answer": ["1"], "gold": ["2"]}, ["a"]) == ["2"]
    assert needed_column(reward, "gold_column", {"gold": []}, []) == []
    with pytest.raises(ValueError, match="`gold`.*gold_column.*a, b"):
        needed_column(reward, "gold_column", {"a": ["1"], "b": ["2"]}, ["a"])
    with pytest.raises(ValueError, match="`gold`.*none"):
        needed_column(reward, "gold_column", {}, ["a"])
    with pytest.raises(ValueError, match="2 in `completions`, 1 in `gold`"):
        needed_column(reward, "gold_column", {"gold": ["1"]}, ["a", "b"])


def test_the_closed_fences_of_a_text():
    for text, blocks in (
        ("```python\nx\n```", [("python", "x\n")]), ("a\n``` Python title\nx\n\ny\n```\nb", [("python", "x\n\ny\n")]),
        ("```\n```", [("", "")]), ("```\nx\n```\n````\n```\n````", [("", "x\n"), ("", "```\n")]), ("````\nx\n```", []),
        ("```\nx\n````", [("", "x\n")]), ("```\nx\n```python\ny\n```", [("", "x\n```python\ny\n")]),
        ("  ```js\n  x\n    y\n z\n  ```", [("js", "x\n  y\nz\n")]), ("    ```\nx\n    ```", []),
        ("``` a `b`\nx\n```", []), ("```\nx", []),
    ):  # fmt: skip
        assert fenced_blocks(text) == blocks


def test_groups_hold_one_prompt_each():
    assert prompt_groups("r", ["p", "p", "q", "q"], 2) == [slice(0, 2), slice(2, 4)]
    assert prompt_groups("r", ["p", "p", "p", "p"], 2) == [slice(0, 2), slice(2, 4)]
    with pytest.raises(ValueError, match="`r`.* 2 to 3 .* 2 "):
        prompt_groups("r", ["p", "p", "p", "q"], 2)
    for size in (None, 0):
        with pytest.raises(ValueError, match="`r`.*num_generations"):
            prompt_groups("r", ["p"], size)
    with pytest.raises(ValueError, match="3 .* 2"):
        prompt_groups("r", ["p"] * 3, 2)


BARE = [
    (gsm8k_correctness, {"completions": ["<answer>18</answer>"], "answer": "18"}, "`answer`"),
    (gsm8k_correctness, {"completions": ["<answer>18</answer>"], "answer": 18}, "`answer`"),
    (gsm8k_correctness, {"completions": "<answer>18</answer>", "answer": ["18"]}, "`completions`"),
    (gsm8k_correctness, {"completions": ["a", "b"], "answer": ["18"]}, "2 in `completions`, 1 in `answer`"),
    (GSM8KCorrectness(gold_column="gold"), {"completions": ["a"], "gold": "18"}, "`gold`"),
    (math_correctness, {"completions": ["18"], "answer": "18"}, "`math_correctness`: `answer`"),
    *((reward, {"completions": "<answer>18</answer>"}, f"`{reward.name}`: `completions`")
      for reward in (tag_structure, tag_count, tag_presence, well_formed)),
    (GroupLength(num_generations=1), {"prompts": ["p"], "completions": "18", "answer": ["18"]}, "`completions`"),
    (GroupLength(num_generations=1), {"prompts": "p", "completions": ["18"], "answer": ["18"]}, "`prompts`"),
    (SumReward((BuiltReward(tag_count, 1.0, "tag_count"),), name="total"), {"completions": "18"},
     "`total`: `completions`"),
    (SumReward((BuiltReward(lambda **columns: [1.0] * 3, 1.0, "three"),)), {"completions": ["18"]},
     "`three`.* 1 in `completions`, 3 in `scores`"),
]  # fmt: skip


def test_a_bare_string_and_a_short_column_are_refused():
    for reward, call, figures in BARE:
        with pytest.raises(ValueError, match=figures):
            reward(**call)
    assert gsm8k_correctness(completions=("<answer>18</answer>",), answer=array("l", [18])) == [2.0]


def test_a_reward_returns_one_score_for_each_completion():
    for returned, shown in (
        (None, "None"), (0.0, "float"), ("ab", "str"), (b"ab", "bytes"), ({1: 1.0, 2: 1.0}, "dict"),
        ({1.0, 2.0}, "set"), ([], "0"), ([1.0], "1"), ([1.0] * 3, "3"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"`r`.* {shown}.* 2 "):
            listed_scores("r", returned, 2)
    assert listed_scores("r", (1.0, None), 2) == [1.0, None]
    assert listed_scores("r", array("d", [0.5, 2.0]), 2) == [0.5, 2.0]
    assert listed_scores("r", (score for score in (1.0, "x")), 2) == [1.0, "x"]  # the entries are not checked


def test_the_thinking_is_removed():
    for text, prefilled, outside in (
        ("<t>a</t>b", False, "b"), ("<t>a</t>b<t>c", False, "b"), ("<t>a</t>b<t>c</t>d", False, "d"),
        ("ab", False, "ab"), ("</t>b", False, "b"), ("</t>b", True, "b"), ("<t>a", True, ""), ("a<t>b", False, "a"),
        ("a</t>b", True, "b"), ("ab", True, ""), ("a</t>b<t>c", True, "b"),
    ):  # fmt: skip
        assert outside_thinking(text, "t", prefilled) == outside, text
    assert (outside_thinking("a<think>b"), outside_thinking("a")) == ("a", "a")
