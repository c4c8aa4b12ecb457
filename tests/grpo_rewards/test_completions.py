"""Both of TRL's completion shapes, and the groups of a batch."""

import pytest

from grpo_rewards.completions import completion_text, group_slices


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
        ([], ""),
        (None, ""),
        (3, ""),
    ],
)  # fmt: skip
def test_completion_text(completion, text):
    assert completion_text(completion) == text


def test_group_slices_cover_the_batch_in_order():
    assert group_slices(6, 3) == [slice(0, 3), slice(3, 6)]
    assert group_slices(0, 4) == []
    with pytest.raises(ValueError, match="num_generations"):
        group_slices(7, 3)
