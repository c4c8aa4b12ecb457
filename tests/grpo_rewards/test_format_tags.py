"""The format rewards: the exact rules of their sources, and `well_formed`."""

import itertools
import re

import pytest

from grpo_rewards import tag_count, tag_presence, tag_structure, well_formed
from grpo_rewards.format_tags import TagCount, TagPresence, TagStructure, WellFormed

CANONICAL = "<think>\na\n</think>\n<answer>\n18\n</answer>"
# name: (completion, structure, count, presence, well-formed)
TABLE = {
    "canonical": (CANONICAL, 0.5, 1, 0.8, 1),
    "CRLF": (CANONICAL.replace("\n", "\r\n"), 0, 1, 0.8, 1),
    "leading space": (" " + CANONICAL, 0, 1, 0.8, 1),
    "text after closing": (CANONICAL + "\nDone.", 0, 1, 0.8, 0),
    "whole document twice": (CANONICAL + "\n" + CANONICAL, 0.5, 0, 0.8, 0),
    "repeated answer": (CANONICAL + "\n<answer>\n18\n</answer>", 0.5, 0.5, 0.8, 0),
    "answer inside think": (
        "<think>\n<answer>\n1\n</answer>\n</think>\n<answer>\n18\n</answer>", 0.5, 0.5, 0.8, 0),
    "answer before think": ("<answer>\n18\n</answer>\n<think>\na\n</think>", 0, 1, 0.8, 0),
    "swapped tags": ("</answer></think><answer><think>", 0, 1, 0.8, 0),
    "one line break, for two": ("<think>\n</think>\n<answer>\n18\n</answer>", 0, 1, 0.8, 0),
    "empty bodies": ("<think>\n\n</think>\n<answer>\n\n</answer>", 0.5, 1, 0.8, 0),
    "pre-filled": ("a\n</think>\n<answer>\n18\n</answer>", 0, 0.75, 0.6, 0),
    "truncated": (CANONICAL[:-9], 0, 0.75, 0.6, 0),
    "text between": ("<think>\na\n</think>\nso\n<answer>\n18\n</answer>", 0, 1, 0.8, 0),
    "empty": ("", 0, 0, 0, 0),
}  # fmt: skip


def test_a_completion_earns_the_pay_of_the_table():
    rewards = (tag_structure, tag_count, tag_presence, well_formed)
    for name, (text, *expected) in TABLE.items():
        for completion in (text, [{"role": "assistant", "content": text}]):
            scores = [reward(prompts=["p"], completions=[completion], answer=["18"])[0] for reward in rewards]
            assert scores == pytest.approx(expected), name


def test_prefilled_pays_a_pre_filled_completion_in_full():
    for reward in [TagStructure, TagCount, TagPresence, WellFormed]:
        full = reward()(completions=[CANONICAL])
        assert reward(prefilled="think")(completions=[CANONICAL.removeprefix("<think>\n")]) == full
        assert reward(tags=["reasoning", "answer"])(completions=[CANONICAL.replace("think", "reasoning")]) == full


def test_structure_equals_the_sources_two_patterns():
    # The two regular expressions of the MiniMind notebook, on every short sequence of the pieces that matter.
    patterns = [
        re.compile(rf"^<think>\n.*?\n</think>\n{gap}<answer>\n.*?\n</answer>$", re.DOTALL) for gap in ("", "\n")
    ]
    pieces = ["<think>", "</think>", "<answer>", "</answer>", "\n", "a"]
    core = ["<think>\n", "\n</think>\n", "\n", "<answer>\n", "\n</answer>", "a", "\n</think>\n<answer>\n"]
    texts = {"".join(c) for n in range(6) for c in itertools.product(core, repeat=n)}
    texts |= {"".join(c) for n in range(5) for c in itertools.product(pieces, repeat=n)}
    matched = 0
    for text in texts | {CANONICAL + "\n", CANONICAL + "\n\n", CANONICAL.replace(">\n<a", ">\n\n<a")}:
        expected = any(pattern.match(text) for pattern in patterns)
        matched += expected
        assert tag_structure(completions=[text]) == [0.5 if expected else 0.0], text
    assert matched > 10


def test_a_bad_argument_names_its_key():
    for key, value in (
        ("tags", ["think", "<answer>"]),
        ("pay", float("nan")),
        ("pay", "much"),
        ("prefilled", "reasoning"),
    ):
        with pytest.raises(ValueError, match=key):
            WellFormed(**{key: value})
