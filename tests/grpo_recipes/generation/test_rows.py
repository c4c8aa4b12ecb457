"""Rows in TRL's layout, and the sums of evidence, on values written by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_recipes.generation import agreement
from grpo_recipes.generation.agreement import (
    BFLOAT16,
    NO_AUTOCAST,
    OFF,
    UNPADDED,
    Conclusion,
    Evidence,
    Fit,
    _best_fits,
    conclude,
    differences,
    disagreement,
    gradient_disagreement,
)
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
    unlabelled, index = ROWS.select(np.array([2, 2])).trimmed()
    assert (index.tolist(), unlabelled.input_ids.tolist()) == ([0], [[7, 0]])
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


def test_the_hypotheses_that_explain_most_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def best(**residuals: float) -> tuple[tuple[str, ...], float]:
        fits = {name: Fit(1.0, residual, 1.0) for name, residual in residuals.items()}
        return _best_fits(Evidence(100, 10.0, 1.0, 1.0, fits))

    assert best(off=0.25, twice=0.5) == (("off",), 0.75)
    assert best(off=0.25, twice=0.255) == (("off", "twice"), 0.75)
    assert best(off=0.265, twice=0.25) == (("twice",), 0.75)
    assert best(bfloat16=0.0, off=0.5) == (("off",), 0.5)
    assert best(bfloat16=0.0) == ((), -math.inf)
    monkeypatch.setattr(agreement, "TIE", 0.25)
    assert best(off=0.25, twice=0.5) == (("off", "twice"), 0.75), "at the largest distance"


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


def test_a_gradient_is_compared_with_the_largest_entry_of_its_tensor() -> None:
    """A tensor that is zero but for rounding is compared with a thousandth of the largest entry of all."""

    def found(*pairs: tuple[float, float]) -> str:
        got, expected = ([torch.tensor([0.0, value]) for value in side] for side in zip(*pairs, strict=True))
        phrase = gradient_disagreement(got, expected, is_float32=True)
        return phrase.removeprefix("gradients by ").partition(" ")[0]

    assert found((101.0, 100.0)) == "", "exactly 1e-2"
    assert found((98.0, 100.0)) == "2.0e-02"
    assert found((1.0, 1.0), (0.105, 0.1)) == "5.0e-02"
    assert found((1.0, 1.0), (1e-6, 1e-9)) == ""
    assert found((100.0, 100.0), (5e-4, 1e-6)) == ""
    assert found((100.0, 100.0), (5e-3, 1e-6)) == "5.0e-02"
    assert found((1e-3, 0.0)) == "1.0e+27", "nothing else has a size"
    assert found((-1.0, 1.0)) == found((1.0, -1.0)) == "2.0e+00"
    empty = torch.zeros(0)
    phrase = gradient_disagreement([empty, torch.tensor([2e-6])], [empty, torch.tensor([1e-6])], is_float32=True)
    assert phrase.startswith("gradients by 1.0e+00 "), "a tensor without entries has no size"


def test_16_bit_gradients_are_compared_by_the_norm_over_all_tensors() -> None:
    def found(got: list[Any], expected: list[Any]) -> str:
        phrase = gradient_disagreement(got, expected, is_float32=False)
        return phrase.removeprefix("gradients by ").partition(" ")[0]

    one, other = torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])
    assert found([one, other], [2 * one, 2 * other]) == "5.0e-01"
    assert found([2 * one, 2 * other], [one, other]) == "1.0e+00"
    assert found([torch.tensor([6.0])], [torch.tensor([5.0])]) == "", "exactly 0.2"
    assert found([torch.tensor([0.2])], [torch.tensor([0.1])]) == "1.0e+00"
    large = torch.tensor([300.0], dtype=torch.float16)  # its square is more than float16 holds
    assert found([large * 2], [large]) == "1.0e+00"
    assert found([large], [None]) == "3.0e+32", "no gradient counts as zeros"
    infinite = torch.tensor([1.0, math.nan])
    for got, expected in (([one, infinite], [one, one]), ([one, one], [one, infinite])):
        assert gradient_disagreement(got, expected, is_float32=False) == "gradients that are not finite"
    with pytest.raises(ValueError, match="argument"):
        gradient_disagreement([one], [one, one], is_float32=True)


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
    with pytest.raises(ValueError, match="argument"):
        differences(model, [[1]], [[1]], recorded, 0.5)

    def every(input_ids: torch.Tensor, **_: Any) -> Any:
        """Return logits of all tokens in 16 bits, as a model that knows no `logits_to_keep`."""
        logits = torch.tensor([[5.0, 5.0, 5.0], [1.0, 2.0, 3.0], [9.0, 8.0, 7.0]], device=input_ids.device)
        return SimpleNamespace(logits=logits.bfloat16()[None])

    of_all: Any = every
    odds = torch.tensor([1.0, 2.0, 3.0]).log_softmax(-1)
    found = differences(of_all, [[1, 2]], [[0]], odds[None, :1], 1.0)
    torch.testing.assert_close(found, torch.zeros(1), atol=1e-6, rtol=0)
    found = differences(of_all, [[1, 2]], [[0]], odds[None, :1].to("meta"), 1.0)
    assert found.device.type == "meta", "the tokens are on the device of the log-probabilities"


def conclusion(
    mean: float, is_float32: bool = True, baseline: float | None = None, bfloat16: float | None = None
) -> Conclusion:
    """Return the conclusion from 1,000 tokens that differ by `mean`, and from the size of what bfloat16 moves."""
    fits = {} if bfloat16 is None else {BFLOAT16: Fit(1.0, 9.0, 1000 * bfloat16)}
    found = Evidence(1000, 1000 * mean, 2 * mean, 1000 * mean**2, fits)
    return conclude(found, is_float32=is_float32, baseline=baseline)


@pytest.mark.parametrize(
    ("mean", "is_float32", "baseline", "is_wrong"),
    [
        (0.5, True, None, False),
        (0.51, True, None, True),
        (0.5, False, None, False),
        (0.019, True, 1e-3, False),
        (0.0205, True, 1e-3, True),
        (0.099, False, 0.02, False),
        (0.105, False, 0.02, True),
        (9e-5, True, 1e-6, False),  # within the tolerance on average, and not on every token
        (0.04, False, 1e-3, False),
        (0.45, True, 0.2, False),
        (1e-3, True, 0.0, True),  # it has agreed to the bit
        (0.51, True, 0.2, True),  # the ceiling
        (math.nan, True, None, True),
        (math.nan, False, 0.2, True),
    ],
)
def test_what_nothing_explains_is_judged_by_the_baseline(
    mean: float, is_float32: bool, baseline: float | None, is_wrong: bool
) -> None:
    assert conclusion(mean, is_float32, baseline) == Conclusion(is_wrong)
    assert conclusion(mean, is_float32, baseline).explained == 0


def test_a_generator_in_bfloat16_differs_by_at_most_three_times_what_bfloat16_moves() -> None:
    is_bfloat16 = Conclusion(False, (BFLOAT16,))
    assert conclusion(0.25, bfloat16=0.25) == is_bfloat16
    assert conclusion(0.375, bfloat16=0.125) == is_bfloat16
    assert conclusion(0.375, bfloat16=0.12) == Conclusion(False)
    assert conclusion(0.375, baseline=1e-3, bfloat16=0.12) == Conclusion(True)
    assert conclusion(0.5, baseline=1e-3, bfloat16=0.25) == is_bfloat16
    assert conclusion(0.51, baseline=1e-3, bfloat16=0.25) == Conclusion(True), "no dtype moves a policy that far"


@pytest.mark.parametrize(
    ("mean", "share", "names"),
    [
        (1e-5, 0.985, ()),  # within the tolerance rounding may fit by chance
        (1e-5, 0.9921875, (NO_AUTOCAST,)),
        (1e-3, 0.5, (NO_AUTOCAST,)),
        (1e-3, 0.499, ()),
    ],
)
def test_autocast_explains_a_difference_before_all_else(mean: float, share: float, names: tuple[str, ...]) -> None:
    square = 1024 * mean**2
    fits = {OFF: Fit(1.0, 0.0, 1.0), NO_AUTOCAST: Fit(1.0, (1 - share) * square, 1.0)}
    found = conclude(Evidence(1024, 1024 * mean, mean, square, fits), is_float32=True, baseline=None)
    assert (found.names == (NO_AUTOCAST,)) is bool(names)
    assert found.unclear == (OFF,)
    if names:
        assert (found.is_wrong, found.explained) == (False, pytest.approx(share))
    else:
        assert found.is_wrong is (mean > 1e-4), "then it is the adapter that is off"


def test_a_hypothesis_is_excluded_where_the_policy_is_four_times_closer() -> None:
    def unclear(residual: float, square: float = 1.0) -> tuple[str, ...]:
        fits = {OFF: Fit(1.0, residual, 1.0), UNPADDED: Fit(1.0, 0.0, 1.0)}
        return conclude(Evidence(100, 1e-9, 1e-9, square, fits), is_float32=True, baseline=None).unclear

    assert [unclear(residual) for residual in (3.9, 4.0, 4.5)] == [(OFF,), (OFF,), ()]
    assert [unclear(residual, 0.0) for residual in (3.9e-12, 4.1e-12)] == [(OFF,), ()], "agreement to the bit"


@pytest.mark.parametrize(
    ("is_float32", "mean", "expected"),
    [
        (True, 1e-3, Conclusion(True, (OFF,), (OFF,), 0.5)),
        (True, 1e-5, Conclusion(unclear=(OFF,))),
        (False, 1e-3, Conclusion(False, (OFF,), (OFF,), 0.5)),
        (False, 0.0625, Conclusion(True, (OFF,), (OFF,), 0.5)),
    ],
)
def test_other_weights_that_explain_half_of_a_difference_are_named(
    is_float32: bool, mean: float, expected: Conclusion
) -> None:
    def concluded(*names: str, share: float = 0.5) -> Conclusion:
        square = 1024 * mean**2
        fits = {name: Fit(1.0, (1 - share) * square, 1.0) for name in names}
        return conclude(Evidence(1024, 1024 * mean, mean, square, fits), is_float32=is_float32, baseline=None)

    assert concluded(OFF) == expected
    computed = concluded(OFF, UNPADDED)
    if expected.is_wrong:
        assert computed == Conclusion(False, (UNPADDED,), (OFF,), 0.5), "the weights are the policy's"
    else:
        assert computed == Conclusion(unclear=(OFF,)), "rounding may repeat another computation"
    assert concluded(OFF, share=0.499).names == ()
