"""Rows in TRL's layout, and the sums of evidence, on values written by hand."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_recipes.generation.agreement import (
    BFLOAT16,
    EARLIER,
    NO_AUTOCAST,
    OFF,
    TWICE,
    UNEXPLAINED,
    UNPADDED,
    Conclusion,
    Evidence,
    Fit,
    conclude,
    differences,
    disagreement,
    gradient_disagreement,
)
from grpo_recipes.generation.rows import Rows

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


def test_labels_are_removed_with_all_but_the_last_prompt_token() -> None:
    removed = ROWS.host.without_labels(np.array([True, False, False, True]))
    assert removed.mask.astype(int).tolist() == [
        [0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0],
    ]  # fmt: skip
    assert ROWS.host.mask[0, 0], "a copy"


def test_rows_are_selected_with_their_copy_on_the_host() -> None:
    for index in (slice(1, 4, 2), np.array([1, 3])):
        rows = Rows(ROWS.input_ids, ROWS.attention_mask, 3)
        for has_host in (False, True):
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
    unlabelled, index = ROWS.select(np.array([2, 2])).trimmed()
    assert (index.tolist(), unlabelled.input_ids.tolist()) == ([0], [[7, 0]])


# ---- evidence


def test_evidence_is_summed_over_tokens() -> None:
    gaps, moved = torch.tensor([0.5, -1.0, 0.0]), torch.tensor([0.5, 0.0, 0.25])
    found = Evidence.of(gaps, {OFF: moved, TWICE: gaps})
    assert found == Evidence(3, 1.5, 1.0, 1.25, {OFF: Fit(1.0625, 0.75), TWICE: Fit(0.0, 1.5)})
    assert (found.mean, found.share(OFF), found.share(TWICE)) == (0.5, 1 - 1.0625 / 1.25, 1.0)
    none = Evidence.of(torch.zeros(0), {OFF: torch.zeros(0)})
    assert (none.mean, none.largest, none.share(OFF)) == (0.0, 0.0, -math.inf)
    assert found + none == Evidence(3, 1.5, 1.0, 1.25, {OFF: Fit(1.0625, 0.75)}), (
        "a hypothesis that one lacks is dropped"
    )


@pytest.mark.parametrize(
    ("mean", "largest", "is_float32", "figures"),
    [
        (1.0, 1e-4, True, []),
        (0.0, 1.1e-4, True, ["1.1e-04", "1e-04"]),
        (5e-2, 9.0, False, []),
        (6e-2, 0.0, False, ["6.0e-02", "5e-02"]),
        (math.nan, math.nan, False, ["nan"]),
    ],
)
def test_a_difference_is_measured_by_its_precision(
    mean: float, largest: float, is_float32: bool, figures: list[str]
) -> None:
    found = disagreement(mean, largest, is_float32=is_float32, where="a row")
    assert bool(found) == bool(figures)
    assert all(figure in found for figure in figures)


def size(got: list[Any], expected: list[Any], *, is_float32: bool) -> str:
    """Return by how much two gradients differ, of their size, or "" within the tolerance."""
    found = re.search(r"\d\S*|not finite|^$", gradient_disagreement(got, expected, is_float32=is_float32))
    return found[0] if found else ""


def test_a_gradient_is_compared_with_the_largest_entry_of_its_tensor() -> None:
    """A tensor that is zero but for rounding is compared with a thousandth of the largest entry of all."""

    def found(*pairs: tuple[float, float]) -> str:
        got, expected = ([torch.tensor([0.0, value]) for value in side] for side in zip(*pairs, strict=True))
        return size(got, expected, is_float32=True)

    assert found((101.0, 100.0)) == "", "exactly 1e-2"
    assert found((98.0, 100.0)) == "2.0e-02"
    assert found((1.0, 1.0), (0.105, 0.1)) == "5.0e-02"
    assert found((1.0, 1.0), (1e-6, 1e-9)) == ""
    assert found((100.0, 100.0), (5e-3, 1e-6)) == "5.0e-02"
    assert found((-1.0, 1.0)) == found((1.0, -1.0)) == "2.0e+00"
    assert size([torch.zeros(0), None], [None, torch.zeros(0)], is_float32=True) == ""
    assert size([torch.ones(1), None], [None, torch.zeros(1)], is_float32=True)  # not ""


def test_16_bit_gradients_are_compared_by_the_norm_over_all_tensors() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])
    assert size([2 * one, 2 * other], [one, other], is_float32=False) == "1.0e+00"
    assert size([torch.tensor([6.0])], [torch.tensor([5.0])], is_float32=False) == "", "exactly 0.2"
    large = torch.tensor([300.0], dtype=torch.float16)  # its square is more than float16 holds
    assert size([large * 2], [large], is_float32=False) == "1.0e+00"
    assert size([one, None], [one, torch.zeros(1)], is_float32=False) == "", "no gradient counts as zeros"
    infinite = torch.tensor([1.0, math.nan])
    for got, expected in (([one, infinite], [one, one]), ([one, one], [one, infinite])):
        for is_float32 in (True, False):
            assert size(got, expected, is_float32=is_float32) == "not finite"


def test_recorded_log_probabilities_are_compared_with_a_forward_of_each_row() -> None:
    """Odds of 1 : 2 : 3 behind every token. The temperature of a half squares them."""
    seen: list[tuple[list[list[int]], bool, int]] = []

    def policy(input_ids: torch.Tensor, use_cache: bool, logits_to_keep: int) -> Any:
        seen.append((input_ids.tolist(), use_cache, logits_to_keep))
        logits = torch.full((1, logits_to_keep, 3), 99.0)
        logits[0, :-1] = torch.tensor([1.0, 2.0, 3.0]).log()
        return SimpleNamespace(logits=logits)

    recorded = torch.tensor([[math.log(4 / 14) + 1, math.log(9 / 14), 7.0], [math.log(1 / 14) - 2, 7.0, 7.0]])
    model: Any = policy
    found = differences(model, [[1], [2, 2]], [[1, 2], [0]], recorded, 0.5)
    torch.testing.assert_close(found, torch.tensor([1.0, 0.0, 2.0]))
    assert seen == [([[1, 1, 2]], False, 3), ([[2, 2, 0]], False, 2)]

    def every(input_ids: torch.Tensor, **_: Any) -> Any:
        """Return logits of all tokens in 16 bits, as a model that knows no `logits_to_keep`."""
        logits = torch.tensor([[5.0, 5.0, 5.0], [1.0, 2.0, 3.0], [9.0, 8.0, 7.0]], device=input_ids.device)
        return SimpleNamespace(logits=logits.bfloat16()[None])

    of_all: Any = every
    odds = torch.tensor([1.0, 2.0, 3.0]).log_softmax(-1)
    found = differences(of_all, [[1, 2]], [[0]], odds[None, :1], 1.0)
    torch.testing.assert_close(found, torch.zeros(1), atol=1e-6, rtol=0)


RIGHT, WRONG, NOTHING = Conclusion(), Conclusion(True), Conclusion(False, (UNEXPLAINED,))


def wrong(*names: str, share: float = 0.75) -> Conclusion:
    return Conclusion(True, names, share)


def excused(name: str, share: float = 0.75) -> Conclusion:
    return Conclusion(False, (name,), share)


@pytest.mark.parametrize(
    ("mean", "is_float32", "baseline", "shares", "conclusion"),
    [
        # Within the tolerance nothing is concluded, whatever fits.
        (0.04, False, None, {OFF: 1.0, NO_AUTOCAST: 1.0}, RIGHT),
        # Other weights that explain half of the difference, and those that are alike.
        (1e-3, True, None, {OFF: 0.5}, wrong(OFF, share=0.5)),
        (1e-3, True, None, {OFF: 0.4999}, NOTHING),
        (0.1, False, None, {OFF: 0.5, TWICE: 0.75}, wrong(TWICE)),
        (0.1, False, None, {OFF: 0.75, EARLIER: 0.745}, wrong(OFF, EARLIER)),
        (0.1, False, None, {OFF: 0.735, EARLIER: 0.75}, wrong(EARLIER)),
        # Another computation of the same weights that explains as much, and autocast before all else.
        (0.1, False, None, {OFF: 0.75, UNPADDED: 0.75}, excused(UNPADDED)),
        (0.1, False, None, {TWICE: 0.9, NO_AUTOCAST: 0.75}, excused(NO_AUTOCAST)),
        (0.1, False, None, {TWICE: 0.75, NO_AUTOCAST: 0.4}, wrong(TWICE)),
        # Nothing explains it: the ceiling, and a multiple of the baseline.
        (0.5, True, None, {}, NOTHING),
        (0.51, True, None, {}, WRONG),
        (0.019, True, 1e-3, {}, NOTHING),
        (0.0205, True, 1e-3, {}, WRONG),
        (1e-3, True, 0.0, {}, WRONG),
        (0.099, False, 0.02, {}, NOTHING),
        (0.105, False, 0.02, {}, WRONG),
        (0.04, False, 1e-3, {}, RIGHT),
        (math.nan, True, None, {OFF: math.nan}, WRONG),
    ],
)
def test_conclusions_from_a_thousand_tokens(
    mean: float, is_float32: bool, baseline: float | None, shares: dict[str, float], conclusion: Conclusion
) -> None:
    square = 1000 * mean**2
    fits = {name: Fit((1 - share) * square, 1.0) for name, share in shares.items()}
    found = conclude(Evidence(1000, 1000 * mean, 2 * mean, square, fits), is_float32=is_float32, baseline=baseline)
    assert (found.is_wrong, found.names) == (conclusion.is_wrong, conclusion.names)
    assert found.explained == pytest.approx(conclusion.explained)


@pytest.mark.parametrize(
    ("mean", "moved", "conclusion"),
    [(0.375, 0.125, BFLOAT16), (0.375, 0.12, ""), (0.5, 0.25, BFLOAT16), (0.51, 0.51, "")],
)
def test_a_generator_in_bfloat16_differs_by_at_most_three_times_what_bfloat16_moves(
    mean: float, moved: float, conclusion: str
) -> None:
    """No dtype explains a difference beyond the ceiling, even if bfloat16 moves the policy as far."""
    found = Evidence(1000, 1000 * mean, 9.0, 1000.0, {BFLOAT16: Fit(2000.0, 1000 * moved)})
    assert conclude(found, is_float32=True, baseline=1e-3) == (Conclusion(False, (BFLOAT16,)) if conclusion else WRONG)


def test_noise_is_never_named() -> None:
    """1,000 draws of independent noise on tokens that a hypothesis moves, at any ratio of noise to movement."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        noise = torch.randn(64, generator=generator) * 0.1
        scale = 10 ** (4 * torch.rand(1, generator=generator) - 2)
        moved = torch.randn(64, generator=generator) * 0.1 * scale
        assert conclude(Evidence.of(noise, {OFF: moved}), is_float32=False, baseline=None) == NOTHING
