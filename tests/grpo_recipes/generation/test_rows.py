"""Rows in TRL's layout, and the sums of evidence, on values written by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from grpo_recipes.generation.agreement import Evidence, Fit, _best_fits, disagreement, gradient_disagreement
from grpo_recipes.generation.rows import Rows, on_device

PROMPTS = [[5, 6, 7], [8], [5, 6, 7], [8, 9]]
COMPLETIONS = [[1, 2], [3], [], [4, 4, 4]]
ROWS = Rows.of_tokens(PROMPTS, COMPLETIONS, torch.device("cpu"))


def test_tokens_are_padded_to_the_prompts_left_and_the_completions_right() -> None:
    assert ROWS.input_ids.tolist() == [
        [5, 6, 7, 1, 2, 0], [0, 0, 8, 3, 0, 0], [5, 6, 7, 0, 0, 0], [0, 8, 9, 4, 4, 4],
    ]  # fmt: skip
    assert ROWS.attention_mask.tolist() == [
        [1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1],
    ]  # fmt: skip
    assert ROWS.logits_to_keep == 3
    assert ROWS.completion_mask.tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert ROWS.unlabelled().attention_mask.tolist() == [[1, 1, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0],
                                                         [0, 1, 1, 0, 0, 0]]  # fmt: skip


def test_rows_on_the_host_say_what_each_row_holds() -> None:
    host = ROWS.host
    assert host.mask.dtype == bool
    assert [prompt.tolist() for prompt in host.prompts()] == PROMPTS
    assert [completion.tolist() for completion in host.completions()] == COMPLETIONS
    assert host.labels.tolist() == [2, 1, 0, 3]
    assert host.prompt_numbers() == [0, 1, 0, 3]
    assert host.groups() == {0: [0, 2], 1: [1], 3: [3]}
    # Prefixes of 2, 0 and 1 tokens, and a token for each of 6 labels. The third row has none.
    assert host.packed_tokens() == 2 + 0 + 1 + 6
    assert host.select(np.array([2])).packed_tokens() == 1
    assert host.extent() == (0, 3)
    assert host.select(np.array([1, 3])).extent() == (1, 3)
    assert host.select(np.array([1])).extent() == (2, 1)
    assert host.select(np.array([2])).extent() == (0, 1)
    index, left, width = host.trimmed()
    assert (index.tolist(), left, width) == ([0, 1, 3], 0, 3)
    index, left, width = host.select(np.array([1, 1])).trimmed()
    assert (index.tolist(), left, width) == ([0, 1], 2, 1)
    index, left, width = host.select(np.array([2, 2])).trimmed()
    assert (index.tolist(), left, width) == ([0], 2, 1)


def test_labels_are_removed_with_all_but_the_last_prompt_token() -> None:
    removed = ROWS.host.without_labels(np.array([True, False, False, True]))
    assert removed.mask.astype(int).tolist() == [
        [0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0],
    ]  # fmt: skip
    assert ROWS.host.mask[0, 0], "a copy"


@pytest.mark.parametrize("index", [slice(1, 4, 2), np.array([1, 3])])
def test_rows_are_selected_with_their_copy_on_the_host(index: slice | np.ndarray) -> None:
    for rows in (ROWS, Rows(ROWS.input_ids, ROWS.attention_mask, 3)):
        has_host = "host" in vars(rows)
        found = rows.select(index, 1, 2)
        assert found.input_ids.tolist() == [[0, 8, 3, 0], [8, 9, 4, 4]]
        assert found.attention_mask.tolist() == [[0, 1, 1, 0], [1, 1, 1, 1]]
        assert found.logits_to_keep == 2
        assert ("host" in vars(found)) is has_host
        assert found.host.ids.tolist() == found.input_ids.tolist()
        assert rows.select(index).logits_to_keep == 3
        _ = rows.host


def test_rows_are_widened_and_trimmed() -> None:
    wide = ROWS.widen(2, 1)
    assert (wide.input_ids.shape, wide.logits_to_keep) == ((4, 9), 4)
    assert torch.equal(wide.input_ids[:, 2:-1], ROWS.input_ids)
    assert not wide.attention_mask[:, [0, 1, -1]].any()
    assert torch.equal(wide.attention_mask[:, 2:-1], ROWS.attention_mask)
    whole = Rows.of_tokens([[5, 6]], [[7, 9]], torch.device("cpu")).widen(1, 1)
    assert whole.input_ids.tolist() == [[9, 5, 6, 7, 9, 9]], "an ID that the vocabulary has"
    trimmed, index = wide.trimmed()
    assert index.tolist() == [0, 1, 3]
    assert torch.equal(trimmed.input_ids, ROWS.input_ids[[0, 1, 3]])
    assert trimmed.logits_to_keep == 3
    same, index = ROWS.select(np.array([0, 3])).trimmed()
    assert (index.tolist(), same.input_ids.tolist()) == ([0, 1], ROWS.input_ids[[0, 3]].tolist())
    assert on_device(np.array([3, 1]), torch.device("cpu")).tolist() == [3, 1]


# ---- evidence


def test_evidence_of_two_sets_of_tokens_is_added() -> None:
    one = Evidence(10, 2.0, 0.5, 1.0, {"off": Fit(1.0, 2.0, 3.0), "twice": Fit(1.0, 1.0, 1.0)})
    other = Evidence(30, 6.0, 0.25, 2.0, {"off": Fit(10.0, 20.0, 30.0)})
    assert one + other == Evidence(40, 8.0, 0.5, 3.0, {"off": Fit(11.0, 22.0, 33.0)})
    assert (other + one).largest == 0.5
    assert (one.mean, Evidence(0, 0.0, 0.0, 0.0).mean) == (0.2, 0.0)
    assert Evidence(0.5, 0.25, 0.0, 0.0).mean == 0.25
    assert one.share("twice") == 0.0
    assert Evidence(1, 1.0, 1.0, 4.0, {"off": Fit(4.0, 1.0, 1.0)}).share("off") == 0.75
    assert Evidence(0, 0.0, 0.0, 0.0, {"off": Fit(0.0, 0.0, 0.0)}).share("off") == -math.inf


def test_the_hypotheses_that_explain_most_are_named_together() -> None:
    def best(**residuals: float) -> tuple[tuple[str, ...], float]:
        fits = {name: Fit(1.0, residual, 1.0) for name, residual in residuals.items()}
        return _best_fits(Evidence(100, 10.0, 1.0, 1.0, fits))

    assert best(off=0.25, twice=0.5) == (("off",), 0.75)
    assert best(off=0.25, twice=0.255) == (("off", "twice"), 0.75)
    assert best(off=0.265, twice=0.25) == (("twice",), 0.75)
    assert best(bfloat16=0.0, off=0.5) == (("off",), 0.5)
    assert best(bfloat16=0.0) == ((), -math.inf)


@pytest.mark.parametrize(
    ("mean", "largest", "is_float32", "phrase"),
    [
        (1.0, 1e-4, True, ""),
        (0.0, 1.1e-4, True, "by 1.1e-04 on a row, 1e-04 allowed"),
        (5e-2, 9.0, False, ""),
        (6e-2, 0.0, False, "by 6.0e-02 on a row, 5e-02 allowed"),
        (math.nan, math.nan, False, "by nan on a row, 5e-02 allowed"),
    ],
)
def test_a_difference_is_measured_by_its_precision(mean: float, largest: float, is_float32: bool, phrase: str) -> None:
    assert disagreement(mean, largest, is_float32=is_float32, where="a row") == phrase


def test_gradients_differ_relative_to_their_size() -> None:
    got, expected = [torch.tensor([1.0, 2.0]), None], [torch.tensor([1.0, 2.03]), torch.tensor([0.0])]
    assert gradient_disagreement(got, expected, is_float32=True) == (
        "gradients by 1.5e-02 of their size on a few short rows, 1e-02 allowed"
    )
    assert gradient_disagreement(got, expected, is_float32=False) == ""
    far = [torch.tensor([1.0, 3.0]), None]
    # 0.97 of the root of 1 + 2.03 squared.
    assert gradient_disagreement(far, expected, is_float32=False).startswith("gradients by 4.3e-01 of their size")
    infinite = [torch.tensor([math.inf, 2.0]), None]
    assert gradient_disagreement(infinite, expected, is_float32=True) == "gradients that are not finite"
    assert gradient_disagreement([torch.zeros(0)], [torch.zeros(0)], is_float32=True) == ""
    assert gradient_disagreement([torch.zeros(2)], [torch.zeros(2)], is_float32=False) == ""
