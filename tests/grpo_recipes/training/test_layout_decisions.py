"""Decisions of the layout check, from doubts that are given, and the rows and models that it compares."""

from __future__ import annotations

import math
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn

from grpo_recipes.generation.rows import Rows
from grpo_recipes.training import layout_check
from grpo_recipes.training.layout_check import FSDP1, FSDP2, ZERO3, LayoutCheck, LayoutRules
from grpo_recipes.training.packed_attention import AttentionSwitch
from grpo_recipes.training.packing import Layout, ModelCall, SpansIgnored
from grpo_recipes.training.segments import NotSegmented
from tests.grpo_recipes.training.test_packing import padded
from tests.support.recorded import model

PADDED, SHARED_PADDED, TRIMMED, SHARED, PACKED = Layout
DEVICE = torch.device("cpu")
ROWS = padded([[5, 6, 7], [5, 6, 7], [8], [8]], [[1, 2], [3], [4], [9, 9]])


@pytest.fixture(scope="module")
def llama() -> Any:
    return model()


# ---- check 1: settings and models


def settings(**changes: Any) -> Any:
    values = {"pad_to_multiple_of": None, "neftune_noise_alpha": None, "torch_compile": False}
    return SimpleNamespace(**{**values, **changes})


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return what is found about the model, by the name of the function, all "" at first."""
    found = dict.fromkeys(["scaled_by_position", "unsupported", "unshareable", "unsupported_under_sharding"], "")
    for name in found:
        monkeypatch.setattr(layout_check, name, lambda *_, name=name: found[name])
    return found


@pytest.mark.parametrize(
    ("about", "wanted", "layout", "reason"),
    [
        ({}, PACKED, PACKED, ""),
        ({}, SHARED, SHARED, ""),
        ({}, TRIMMED, TRIMMED, ""),
        ({}, PADDED, PADDED, ""),
        ({}, SHARED_PADDED, SHARED_PADDED, ""),
        ({"unsupported": "why"}, PACKED, SHARED, "why"),
        ({"unsupported": "why"}, SHARED, SHARED, ""),
        ({"unshareable": "no"}, PACKED, TRIMMED, "no"),
        ({"unshareable": "no", "unsupported": "why"}, PACKED, TRIMMED, "no"),
        ({"unshareable": "no"}, SHARED, TRIMMED, "no"),
        ({"unshareable": "no"}, SHARED_PADDED, PADDED, "no"),
        ({"unshareable": "no"}, TRIMMED, TRIMMED, ""),
        ({"unsupported_under_sharding": "split"}, PACKED, PACKED, ""),
        ({"unsupported_under_sharding": "split"}, SHARED, TRIMMED, "split"),
        ({"unsupported_under_sharding": "split", "unsupported": "why"}, PACKED, TRIMMED, "why"),
        *[
            ({"scaled_by_position": "beta"}, wanted, layout, "attention is scaled by a token's place in the row, "
             "padding included (beta)")
            for wanted, layout in [(PACKED, SHARED_PADDED), (SHARED, SHARED_PADDED), (SHARED_PADDED, SHARED_PADDED),
                                   (TRIMMED, PADDED)]
        ],
        ({"scaled_by_position": "beta", "unshareable": "no"}, PACKED, PADDED, "attention is scaled by a token's place "
         "in the row, padding included (beta)"),
    ],
)  # fmt: skip
def test_what_a_model_allows(
    llama: Any, facts: dict[str, str], about: dict[str, str], wanted: Layout, layout: Layout, reason: str
) -> None:
    facts.update(about)
    assert LayoutRules(settings()).allowed(llama, wanted, "") == (layout, reason)


def test_settings_that_keep_rows_padded_or_unshared(llama: Any, facts: dict[str, str]) -> None:
    def allowed(rules: LayoutRules, sharding: str = "", wanted: Layout = PACKED) -> Any:
        return rules.allowed(llama, wanted, sharding)

    multiple = "pad_to_multiple_of asks for the shapes that TRL makes"
    assert allowed(LayoutRules(settings(pad_to_multiple_of=8))) == (PADDED, multiple)
    assert allowed(LayoutRules(settings(), padded_because="full KL")) == (PADDED, "full KL")
    noise = "neftune_noise_alpha adds noise by the width of the rows, padding included"
    assert allowed(LayoutRules(settings(neftune_noise_alpha=0.0))) == (PADDED, noise)
    router = (TRIMMED, "a shared prompt would count once in the router loss")
    assert allowed(LayoutRules(settings(), router_loss=True)) == router
    compiled = (TRIMMED, "torch.compile would compile again for each shape of a micro-batch")
    assert allowed(LayoutRules(settings(torch_compile=True))) == compiled
    facts["scaled_by_position"] = "beta"
    assert allowed(LayoutRules(settings()), sharding=ZERO3)[0] is PADDED
    assert allowed(LayoutRules(settings(), router_loss=True))[0] is PADDED


# ---- what the checks decide


class Segmented:
    """Stand-in that records whether buckets and shared prompts agree."""

    def __init__(self) -> None:
        self.agrees: list[bool] = []
        self.shared: list[bool] = []

    def of(self, bare: Any) -> Any:
        return self

    def record(self, *, agrees: bool) -> None:
        self.agrees.append(agrees)

    def record_shared(self, *, agrees: bool) -> None:
        self.shared.append(agrees)

    def observed(self) -> Any:
        return layout_check.nullcontext()


def check(**changes: Any) -> tuple[Any, list[str]]:
    said: list[str] = []
    accelerator: Any = SimpleNamespace(device=DEVICE, mixed_precision="no")
    args: Any = SimpleNamespace(
        gradient_checkpointing=False, gradient_checkpointing_kwargs=None, max_completion_length=9
    )
    found: Any = LayoutCheck(
        accelerator, args, lambda *_: (torch.zeros(0), None), AttentionSwitch(), Segmented(), LayoutRules(settings()),
        layout_check.Announcer(said.append),
    )  # fmt: skip
    for name, value in changes.items():
        setattr(found, name, value)
    return found, said


def trial(rows: Rows = ROWS, **changes: Any) -> Any:
    values: dict[str, Any] = {
        **{"rows": rows, "padded": ModelCall(rows, PADDED), "model": nn.Linear(1, 1), "bare": model()},
        **{"is_float32": True, "where": "some rows"},
    }
    return layout_check._Trial(**{**values, **changes})


EXPECTED: Any = (torch.zeros(4, 2), ())


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize(
    ("doubtful", "most", "layout", "reason", "agrees"),
    [
        ([], PACKED, PACKED, "", []),
        ([], SHARED, SHARED, "", [True]),
        ([], TRIMMED, TRIMMED, "", [True]),
        ([PACKED], PACKED, SHARED, "packed rows give other results later (packed)", [True]),
        (
            [PACKED, SHARED], PACKED, TRIMMED,
            "packed rows give other results later (packed); shared prompts give other results later (shared)", [True],
        ),
        ([SHARED], SHARED, TRIMMED, "shared prompts give other results later (shared)", [True]),
        (["buckets"], TRIMMED, TRIMMED, "", [False]),
        ([SHARED, "buckets"], SHARED, TRIMMED, "shared prompts give other results later (shared)", [False]),
        ([TRIMMED], PACKED, SHARED_PADDED, "the results of this model depend on padding later (trimmed)", [True]),
        (
            [TRIMMED, SHARED_PADDED], PACKED, PADDED,
            "the results of this model depend on padding later (trimmed)", [False],
        ),
        ([], SHARED_PADDED, SHARED_PADDED, "", [True]),
        ([SHARED_PADDED], SHARED_PADDED, PADDED, "", [False]),
    ],
)  # fmt: skip
def test_the_layout_is_the_most_preferred_without_a_doubt(
    doubtful: list[Any], most: Layout, layout: Layout, reason: str, agrees: list[bool]
) -> None:
    called: list[ModelCall] = []

    def doubt(trial: Any, call: ModelCall, expected: Any) -> str:
        called.append(call)
        name: Any = "buckets" if call.layout is TRIMMED and call.launches == 0 else call.layout
        return (name if isinstance(name, str) else name.name.lower()) if name in doubtful else ""

    found, _ = check(_doubt=doubt, _compute=lambda trial, call: EXPECTED)
    assert found._best(trial(when=" later"), most, EXPECTED) == (layout, reason)
    assert found.segmented.agrees == agrees
    for call in called:
        if layout_check._has_segments(call):
            assert call.launches == 0, "in many buckets"
        assert len(call.rows.input_ids) == 4


def test_rows_in_trls_columns_are_not_tried_where_they_may_not_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = check(_doubt=lambda *_: "", _compute=lambda *_: EXPECTED)
    assert found._in_columns(trial(in_columns=False), "why") == (PADDED, "why")
    assert found._in_columns(trial(), "why") == (SHARED_PADDED, "why")
    monkeypatch.setattr(layout_check, "sharding_of", lambda model: ZERO3)
    assert found._in_columns(trial(), "why") == (PADDED, "why")
    assert found._best(trial(), TRIMMED, EXPECTED) == (TRIMMED, "")
    assert found.segmented.agrees == [True, True], "buckets of a split model are not compared"


def test_padding_is_added_on_the_right_of_columns_as_far_as_there_are_positions(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths, config = [], SimpleNamespace()
    monkeypatch.setattr(layout_check, "text_config", lambda model: config)

    def observed(trial: Any, call: ModelCall) -> Any:
        widths.append((call.rows.input_ids.shape[1], call.rows.logits_to_keep))
        return EXPECTED

    found, _ = check(_doubt=lambda *_: "", _observed=observed)
    for positions in (None, 100, 13, 12, 5, 3):
        config.max_position_embeddings = positions
        found._in_columns(trial(bare=llama), "")
    assert widths == [(13, 10), (13, 10), (13, 10), (12, 9), (5, 2), (5, 2)]
    padded_calls = []
    for positions in (None, 21, 20, 14, 13, 12, 5, 3):
        config.max_position_embeddings = positions
        rows = layout_check._padded_call(ROWS, llama).rows
        padded_calls.append((rows.input_ids.shape[1], rows.logits_to_keep))
    assert padded_calls == [(21, 10), (21, 10), (20, 9), (14, 3), (13, 2), (12, 2), (5, 2), (5, 2)]


@pytest.mark.parametrize(
    ("first", "short", "layout", "reason"),
    [
        ({PACKED: (PACKED, "")}, {PACKED: (PACKED, "")}, PACKED, ""),
        ({PACKED: (PADDED, "a")}, {}, PADDED, "a"),
        ({PACKED: (TRIMMED, "a")}, {TRIMMED: (TRIMMED, "")}, TRIMMED, "a"),
        ({PACKED: (PACKED, "")}, {PACKED: (TRIMMED, "b")}, TRIMMED, "b"),
        ({PACKED: (SHARED, "a")}, {SHARED: (PADDED, "b")}, PADDED, "b"),
        # A layout that only the short rows found is compared on the first rows, too.
        (
            {PACKED: (PACKED, ""), SHARED: (SHARED, "")},
            {PACKED: (SHARED, "b"), SHARED: (SHARED, "")}, SHARED, "b",
        ),
        ({PACKED: (PACKED, ""), SHARED: (TRIMMED, "c")}, {PACKED: (SHARED, "b"), TRIMMED: (TRIMMED, "")}, TRIMMED, "b"),
        ({PACKED: (PACKED, ""), SHARED: (PADDED, "c")}, {PACKED: (SHARED, "b")}, PADDED, "b"),
    ],
)  # fmt: skip
def test_both_comparisons_must_agree_on_a_layout(
    first: dict[Layout, Any], short: dict[Layout, Any], layout: Layout, reason: str
) -> None:
    found, _ = check(
        _compare_first_rows=lambda model, bare, rows, most, in_columns: first[most],
        _compare_short_rows=lambda model, bare, rows, most, in_columns: short[most],
    )
    assert found._verified(None, None, ROWS, PACKED, True) == (layout, reason)


def test_the_choice_is_announced_once_with_its_reason(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def verified(model: Any, bare: Any, rows: Any, most: Layout, in_columns: bool) -> Any:
        seen.append((most, in_columns))
        return (most, "") if most is not SHARED or agrees else (TRIMMED, "x")

    found, said = check(_verified=verified)
    agrees = True
    assert found.choose(llama, llama, ROWS, PACKED) is PACKED
    assert seen == [(PACKED, True)]
    unlabelled = ROWS.unlabelled()
    assert found.choose(llama, llama, unlabelled, PACKED) is None
    partly = padded([[5], [5]], [[1], []])
    assert found.choose(llama, llama, partly, PACKED) is PACKED
    assert seen.pop() == (PACKED, True)
    monkeypatch.setattr(layout_check, "attention_window", lambda config: 9)
    assert found.choose(llama, llama, ROWS, PACKED, in_columns=False) is PACKED
    agrees = False
    assert found.choose(llama, llama, ROWS, PACKED, in_columns=False) is PACKED
    assert seen[1:] == [(PACKED, False), (SHARED, False)] * 2
    assert found.segmented.shared == [True, False]
    assert said == []
    for _ in range(2):
        assert found.choose(llama, llama, ROWS, SHARED) is TRIMMED
    assert said == ["micro-batches are trimmed, not shared: x"]
    found.rules = LayoutRules(settings(pad_to_multiple_of=8))
    assert found.choose(llama, llama, unlabelled, PACKED) is PADDED
    assert said[1:] == ["micro-batches are padded, not packed: pad_to_multiple_of asks for the shapes that TRL makes"]


class Comparison:
    """Stand-ins for the model calls of a check, with what it compared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.trials: list[tuple[Any, Layout]] = []
        self.in_columns: list[str] = []
        self.doubt = changes.pop("doubt", "")
        self.random = changes.pop("random", False)
        sharded, fits = changes.pop("sharded", False), changes.pop("fits_float32", True)
        monkeypatch.setattr(layout_check, "is_sharded", lambda bare: sharded)
        monkeypatch.setattr(layout_check, "fits_in_float32", lambda bare, device: fits)
        self.check, self.said = check(
            _best=self.best, _compute=lambda trial, call: EXPECTED, _observed=lambda trial, call: EXPECTED,
            _is_random=lambda trial, expected: self.random, _widened=lambda bare: layout_check.nullcontext(),
            _in_columns=lambda trial, doubt: (SHARED_PADDED, self.in_columns.append(doubt) or doubt), **changes,
        )  # fmt: skip

    def best(self, trial: Any, most: Layout, expected: Any) -> tuple[Layout, str]:
        self.trials.append((trial, most))
        return most, self.doubt

    @property
    def trial(self) -> Any:
        ((found, _),) = self.trials
        return found


WRAPPER = nn.Identity()


def fitting(*fits: bool) -> Any:
    return lambda bare, host: np.array(fits)


@pytest.mark.parametrize(
    ("wanted", "fits", "rows", "in_columns"),
    [
        (PACKED, (True,) * 4, [0, 1, 2, 3], True),
        (PACKED, (False, False, True, True), [2, 3], True),
        (PACKED, (False,) * 4, [0, 1, 2, 3], True),
        (SHARED, (False, False, True, True), [0, 1, 2, 3], True),
        (TRIMMED, (True,) * 4, [0, 1, 2, 3], False),
    ],
)
def test_the_first_rows_are_those_that_the_layout_may_hold(
    llama: Any, monkeypatch: pytest.MonkeyPatch, wanted: Layout, fits: Any, rows: list[int], in_columns: bool
) -> None:
    found = Comparison(monkeypatch, fits=fitting(*fits))
    assert found.check._compare_first_rows(WRAPPER, llama, ROWS, wanted, True) == (wanted, "")
    trial = found.trial
    assert trial.rows.input_ids.tolist() == ROWS.input_ids[rows].tolist()
    assert trial.padded.rows.input_ids.shape[1] == ROWS.input_ids.shape[1] + 16
    assert (trial.model, trial.bare, trial.parameters, trial.in_columns) == (WRAPPER, llama, (), in_columns)
    assert (trial.where, trial.when, trial.is_float32) == ("the first micro-batch", "", True)


@pytest.mark.parametrize(
    ("in_columns", "router_loss", "expected"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_rows_in_trls_columns_need_shared_prompts(
    llama: Any, monkeypatch: pytest.MonkeyPatch, in_columns: bool, router_loss: bool, expected: bool
) -> None:
    for name in ("_compare_first_rows", "_compare_short_rows"):
        found = Comparison(monkeypatch, rules=LayoutRules(settings(), router_loss=router_loss))
        getattr(found.check, name)(WRAPPER, llama, ROWS, SHARED, in_columns)
        assert found.trial.in_columns is expected


def test_learned_positions_without_room_for_padding_are_a_doubt(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"learned": True, "room": False}
    monkeypatch.setattr(layout_check, "_learns_positions", lambda base: facts["learned"])
    monkeypatch.setattr(
        layout_check,
        "_padded_call",
        lambda rows, bare: ModelCall(rows.widen(1, 1) if facts["room"] else rows, PADDED),
    )
    found = Comparison(monkeypatch)
    doubt = "its positions are learned, and the rows leave no room to check whether padding matters"
    assert found.check._compare_first_rows(WRAPPER, llama, ROWS, PACKED, True) == (SHARED_PADDED, doubt)
    assert found.trials == []
    for learned in (True, False):
        facts.update(learned=learned, room=learned)
        assert found.check._compare_first_rows(WRAPPER, llama, ROWS, PACKED, True) == (PACKED, "")


def test_short_rows_are_compared_with_gradients_in_training_mode(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Comparison(monkeypatch)
    llama.eval()
    modes: list[bool] = []
    found.check._compute = lambda trial, call: modes.append(llama.training) or EXPECTED
    for layout, edges in ((SHARED, True), (SHARED_PADDED, True), (TRIMMED, False), (PACKED, False)):
        assert found.check._compare_short_rows(WRAPPER, llama, ROWS, layout, True) == (layout, "")
        trial, most = found.trials.pop()
        assert most is layout
        assert (len(trial.rows.input_ids) > 4) is edges, "lengths at which a cache may be wrong"
        assert (trial.model is llama, trial.bare is llama) == (True, True), "without wrappers"
        assert [id(one) for one in trial.parameters] == [id(one) for one in layout_check.compared(llama)]
        assert (trial.where, trial.when, trial.is_float32) == ("a few short rows", " once it has trained", True)
        assert trial.in_columns is (layout is not TRIMMED)
    assert modes == [True] * 4
    assert not llama.training
    assert found.said == []
    found.check.fits = fitting(False, False, True, True)
    found.check._compare_short_rows(WRAPPER, llama, ROWS, PACKED, True)
    assert found.trials.pop()[0].rows.host.prompts()[0].tolist() == [8], "rows that do not fit are left out"


def test_split_or_16_bit_weights_are_compared_with_a_line(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    split = Comparison(monkeypatch, sharded=True)
    split.check._compare_short_rows(WRAPPER, llama, ROWS, SHARED, True)
    assert (split.trial.model, split.trial.parameters) == (WRAPPER, [])
    assert split.trial.is_float32, "as the model computes"
    assert split.said == ["under ZeRO-3 and FSDP layouts are compared by their log-probabilities, not by gradients"]
    half = Comparison(monkeypatch, fits_float32=False, _computes_in_float32=lambda bare: False)
    half.check._compare_short_rows(WRAPPER, llama, ROWS, SHARED, True)
    assert not half.trial.is_float32
    assert half.said == [
        "layouts are compared in 16-bit precision: the weights are quantized, or have no room in float32"
    ]
    wide = Comparison(monkeypatch, _computes_in_float32=lambda bare: False)
    wide.check._compare_short_rows(WRAPPER, llama, ROWS, SHARED, True)
    assert wide.trial.is_float32


SHARED_NUMBERS = "in training the model draws random numbers, which a shared prompt would share"


@pytest.mark.parametrize(
    ("found", "doubt", "layout", "said"),
    [
        (PACKED, "", TRIMMED, SHARED_NUMBERS),
        (SHARED, "", TRIMMED, SHARED_NUMBERS),
        (SHARED, "padding matters", TRIMMED, "padding matters"),
        (TRIMMED, "", TRIMMED, ""),
        (SHARED_PADDED, "", PADDED, SHARED_NUMBERS),
    ],
)
def test_a_model_that_draws_numbers_in_training_shares_no_prompt(
    llama: Any, monkeypatch: pytest.MonkeyPatch, found: Layout, doubt: str, layout: Layout, said: str
) -> None:
    compared = Comparison(monkeypatch, random=True, doubt=doubt)
    assert compared.check._compare_short_rows(WRAPPER, llama, ROWS, found, True) == (layout, said)
    assert [most for _, most in compared.trials] == ([] if found is SHARED_PADDED else [TRIMMED])


@pytest.mark.parametrize(
    ("again", "is_float32", "draws", "is_random"),
    [
        (0.0, True, False, False),
        (0.0, True, True, False),
        (1e-3, True, False, True),
        (1e-9, True, False, False),
        (1e-3, False, True, True),
        (1e-3, False, False, False),
        (0.0, False, True, False),
        (9.0, False, False, True),
    ],
)
def test_a_model_is_random_if_it_draws_numbers_or_differs_from_itself(
    again: float, is_float32: bool, draws: bool, is_random: bool
) -> None:
    """Two 16-bit results may differ by rounding alone."""

    def compute(trial: Any, call: ModelCall) -> Any:
        assert trial.parameters == ()
        assert call is compared.padded
        if draws:
            torch.rand(1)
        found = EXPECTED[0].clone()
        found[0, 0] -= again
        return found, ()

    compared = trial(is_float32=is_float32, parameters=(nn.Parameter(torch.ones(1)),))
    assert check(_compute=compute)[0]._is_random(compared, (EXPECTED[0], ())) is is_random


@pytest.mark.parametrize(
    ("dtype", "autocast", "is_float32"),
    [
        (torch.float32, "no", True),
        (torch.float32, "bf16", False),
        (torch.bfloat16, "no", False),
        (torch.bfloat16, "bf16", False),
    ],
)
def test_a_model_computes_in_float32_if_neither_weights_nor_autocast_are_of_16_bits(
    dtype: torch.dtype, autocast: str, is_float32: bool
) -> None:
    found, _ = check()
    found.accelerator.mixed_precision = autocast
    assert found._computes_in_float32(model().to(dtype)) is is_float32


def test_rows_longer_than_the_kept_scores_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = check()
    policy = model()
    assert not found.exceeds_kept_scores(policy, 10**9)
    policy.config.index_topk = 40
    assert not found.exceeds_kept_scores(policy, 40)
    assert said == []
    assert found.exceeds_kept_scores(policy, 41)
    assert said == [
        "micro-batches of rows of more than 40 tokens are padded: attention keeps the `index_topk` highest scores, and "
        "padding decides between equal ones"
    ]


def test_rows_with_holes_or_beyond_the_window_are_not_packed(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = check()
    window = 4
    monkeypatch.setattr(layout_check, "attention_window", lambda config: window)
    rows = padded([[5], [5, 6], [5]], [[1, 2, 3], [1, 2, 3], [1, 2]])
    assert found.fits(llama, rows.host).tolist() == [True, False, True]
    assert said == ["rows of more than 4 tokens, the model's attention window, are not packed"]
    window = 5
    assert found.fits(llama, rows.host).tolist() == [True, True, True]
    holes = Rows(rows.input_ids, rows.attention_mask.clone(), 3)
    holes.attention_mask[0, 3] = 0  # the second of three tokens
    holes.attention_mask[2, 2] = 0  # the first of two
    assert found.fits(llama, holes.host).tolist() == [False, True, False]
    assert said[1:] == ["rows whose completion mask has holes are not packed"]


@pytest.mark.parametrize(
    ("error", "layout", "launches", "doubt"),
    [
        (None, PACKED, math.inf, ""),
        (SpansIgnored("spans"), PACKED, math.inf, "spans"),
        (NotSegmented("cache"), SHARED, 0.0, "cache"),
        (KeyError("k\nmore"), SHARED, 0.0, r"KeyError: 'k\nmore'"),
        (ValueError("first\nsecond"), SHARED_PADDED, 0.0, "ValueError: first"),
        (ValueError("first"), TRIMMED, 0.0, "ValueError: first"),
    ],
)
def test_failures_behind_a_cache_are_doubts(error: Any, layout: Layout, launches: float, doubt: str) -> None:
    def compute(trial: Any, call: ModelCall) -> Any:
        if error is not None:
            raise error
        return EXPECTED

    found, _ = check(_compute=compute)
    assert found._doubt(trial(), ModelCall(ROWS, layout, launches), EXPECTED) == doubt


@pytest.mark.parametrize(
    ("error", "layout"),
    [(ValueError("x"), PACKED), (ValueError("x"), TRIMMED), (torch.OutOfMemoryError("x"), SHARED)],
)
def test_other_failures_end_the_run(error: Exception, layout: Layout) -> None:
    def compute(trial: Any, call: ModelCall) -> Any:
        raise error

    found, _ = check(_compute=compute)
    with pytest.raises(type(error)):
        found._doubt(trial(), ModelCall(ROWS, layout), EXPECTED)


def test_a_doubt_of_another_rank_is_a_doubt_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = check(_compute=lambda *_: EXPECTED)
    monkeypatch.setattr(layout_check, "on_any_rank", lambda flag, device: True)
    assert found._doubt(trial(), ModelCall(ROWS, PACKED), EXPECTED) == "on another rank"


def test_log_probabilities_are_compared_on_labels_and_then_gradients() -> None:
    mask = ROWS.completion_mask.bool()
    off = torch.full((4, 2), 9.0).masked_fill(mask, 5e-5)
    both = (torch.ones(2), torch.ones(2) * 2)
    assert layout_check._difference(trial(), ROWS, (off, both[:1]), (torch.zeros(4, 2), both[:1])) == ""
    gradients = layout_check._difference(trial(), ROWS, (off, both[:1]), (torch.zeros(4, 2), both[1:]))
    assert gradients.startswith("gradients by 5.0e-01 of their size")
    off[0, 0] = 3e-4
    for one, other in ((off, torch.zeros(4, 2)), (torch.zeros(4, 2), off)):
        found = layout_check._difference(trial(), ROWS, (one, ()), (other, ()))
        assert found == "log-probabilities by 3.0e-04 on some rows, 1e-04 allowed"
    coarse = torch.zeros(4, 2)
    coarse[0, 0] = 0.2  # one of six tokens with a label
    half = (coarse, ()), (torch.zeros(4, 2), ())
    assert layout_check._difference(trial(is_float32=False), ROWS, *half) == "", "the mean counts"
    coarse[0, 0] = 0.4
    assert "log-probabilities by 6.7e-02" in layout_check._difference(trial(is_float32=False), ROWS, *half)
    assert layout_check._difference(trial(is_float32=False), ROWS, (off, ()), (torch.zeros(4, 2), ())) == ""
    none = layout_check._difference(trial(), ROWS.unlabelled(), (off, ()), (torch.zeros(4, 2), ()))
    assert none == ""


def test_packed_rows_are_compared_on_rows_that_fit_and_share_a_prompt(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    window = None
    monkeypatch.setattr(layout_check, "attention_window", lambda config: window)

    def doubt(trial: Any, call: ModelCall, expected: Any) -> str:
        seen.append((call.rows.input_ids.tolist(), call.layout, expected[0].tolist()))
        return "x"

    found, _ = check(_doubt=doubt)
    log_probs = torch.arange(8.0).reshape(4, 2)
    assert found._doubt_of_packed(trial(bare=llama, when=" now"), (log_probs, ())) == (
        "packed rows give other results now (x)"
    )
    assert seen[-1] == (ROWS.input_ids.tolist(), PACKED, log_probs.tolist())
    some = padded([[5], [5], [6]], [[1], [2], []])
    found._doubt_of_packed(trial(some, bare=llama), (log_probs, ()))
    assert seen.pop()[0] == some.input_ids[:2].tolist(), "a row without a label shows nothing"
    window = 3  # only the rows of the short prompt
    found._doubt_of_packed(trial(bare=llama), (log_probs, ()))
    assert seen[-1][0] == ROWS.input_ids[2:].tolist()
    window = 2  # one row, taken twice
    found._doubt_of_packed(trial(bare=llama), (log_probs, ()))
    assert seen[-1][0] == ROWS.input_ids[[2, 2]].tolist()
    assert seen[-1][2] == [[4.0, 5.0]] * 2
    window = 1
    assert found._doubt_of_packed(trial(bare=llama), (log_probs, ())) == (
        "no row of the first micro-batch can be packed"
    )
    assert len(seen) == 3


# ---- rows to compare


def test_a_row_is_taken_twice_only_if_no_prompt_is_shared() -> None:
    rows = padded([[5], [6], [5], [7]], [[1], [1, 2], [1], [1, 2, 3]])
    for index, expected in (([0, 2], [0, 2]), ([0, 1, 3], [0, 1, 3, 3]), ([1, 0], [1, 0, 1]), ([3], [3, 3])):
        assert layout_check._with_a_shared_prompt(rows, np.array(index)).tolist() == expected


def test_the_sample_prefers_prompts_with_several_completions_and_then_more_tokens() -> None:
    prompts = [[5] * 9, [6], [6], [7, 7], [7, 7], [8], [8]]
    rows = padded(prompts, [[1] * 9, [1], [1], [1, 2], [1], [1, 2, 3, 4, 5], [1]])
    few = layout_check.sample(rows, np.arange(7))
    assert [prompt.tolist() for prompt in few.host.prompts()] == [[8], [8], [7, 7], [7, 7]]
    assert [tokens.tolist() for tokens in few.host.completions()] == [[1, 2, 3, 4, 5], [1], [1, 2], [1]]
    assert (few.input_ids.shape[1], few.logits_to_keep) == (18, 9)
    alone = layout_check.sample(rows, np.array([0, 2]), longest=3)
    assert [prompt.tolist() for prompt in alone.host.prompts()] == [[5, 5, 5]] * 2 + [[6]] * 2
    assert alone.logits_to_keep == 3
    none = layout_check.sample(rows, np.arange(0))
    assert none.input_ids.tolist() == rows.input_ids[:1].tolist()
    assert not none.completion_mask.any()
    assert layout_check.sample(rows, np.arange(7), longest=99).input_ids.shape == few.input_ids.shape


def lists(rows: Rows) -> list[tuple[list[int], list[int]]]:
    return [(p.tolist(), c.tolist()) for p, c in zip(rows.host.prompts(), rows.host.completions(), strict=True)]


def test_short_rows_have_the_lengths_at_which_a_cache_may_be_wrong() -> None:
    own = [([5, 6, 7], [1, 2]), ([5, 6, 7], [3]), ([8], [4]), ([8], [9, 9])]
    edges = [([7], [1, 2]), ([5, 6, 7], [1])]
    assert lists(layout_check.with_edges(ROWS, 2, 3)) == [*own, *edges]
    long = layout_check.with_edges(ROWS, 5, 4)
    assert lists(long) == [*own, *edges, ([5, 6, 7, 5, 6], [1, 2, 1, 2]), ([5, 6, 7, 5, 6], [1, 2])]
    assert (long.input_ids.shape, long.logits_to_keep) == ((8, 9), 4)
    assert lists(layout_check.with_edges(ROWS, 5, 1))[-2:] == [([5, 6, 7, 5, 6], [1]), ([5, 6, 7, 5, 6], [1])]
    filled = Rows(torch.where(ROWS.attention_mask.bool(), ROWS.input_ids, 15), ROWS.attention_mask, 2)
    wide = layout_check.with_edges(filled, 5, 4)
    assert set(wide.input_ids[wide.attention_mask == 0].tolist()) == {15}, "some models find padding by its ID"
    whole = padded([[5, 6]] * 2, [[1, 2], [3, 4]])
    assert set(
        layout_check.with_edges(whole, 1, 1)
        .input_ids[layout_check.with_edges(whole, 1, 1).attention_mask == 0]
        .tolist()
    ) == {2}
    assert layout_check.with_edges(ROWS.unlabelled(), 5, 4).input_ids.shape == ROWS.input_ids.shape


@pytest.mark.parametrize(
    ("config", "lengths"),
    [
        ({}, (1, 1)),
        ({"layer_types": ["full_attention", "sliding_attention", "chunked_attention"]}, (1, 1)),
        ({"layer_types": ["linear_attention"]}, (72, 72)),  # a chunk of 64, and 8
        ({"layer_types": ["linear_attention"], "mamba_chunk_size": 256}, (264, 264)),
        ({"layer_types": ["mamba"], "chunk_size": 16}, (72, 72)),
        ({"layer_types": ["mamba"], "chunk_size": 4096}, (1032, 1032)),
        ({"sliding_window": 11}, (19, 1)),  # the longest row has 3 + 9 tokens
        ({"sliding_window": 12}, (1, 1)),
        ({"attention_chunk_size": 5}, (13, 1)),
        ({"sliding_window": 11, "layer_types": ["full_attention"]}, (1, 1)),
        ({"sliding_window": 11, "layer_types": ["sliding_attention", "conv"]}, (72, 72)),
        ({"layer_types": ["conv"], "max_position_embeddings": 159}, (71, 71)),
        ({"layer_types": ["conv"], "max_position_embeddings": 160}, (72, 72)),
        ({"layer_types": ["conv"], "index_topk": 40}, (12, 12)),
    ],
    ids=str,
)
def test_the_lengths_that_leave_windows_and_chunks(
    config: dict[str, Any], lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_check, "text_config", lambda bare: SimpleNamespace(**config))
    assert check()[0]._sample_lengths(nn.Linear(1, 1), ROWS) == lengths


# ---- models


def test_how_weights_are_split_is_read_from_modules_and_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, zero3, fsdp1, fsdp2 = (nn.Sequential(nn.Linear(1, 1)) for _ in range(4))
    assert layout_check.sharding_of(plain) == layout_check.sharding_of(nn.Module()) == ""
    zero3[0].weight.ds_id = 3  # type: ignore[assignment]
    assert layout_check.sharding_of(zero3) == ZERO3
    fsdp1[0]._fsdp_wrapped_module = nn.Linear(1, 1)
    assert layout_check.sharding_of(fsdp1) == FSDP1
    fsdp2.append(type("Split", (nn.Linear, layout_check.FSDPModule), {"__new__": object.__new__})(1, 1))
    assert layout_check.sharding_of(fsdp2) == FSDP2
    assert [layout_check.is_sharded(one) for one in (plain, zero3, fsdp1, fsdp2)] == [False, True, True, True]
    monkeypatch.setattr(layout_check, "DTensor", nn.Parameter)  # FSDP2 may leave its module and ignore some weights
    assert layout_check.sharding_of(plain) == FSDP2


def test_models_whose_gradients_were_not_verified_where_weights_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, sharding, reason in (
        ("new", "", ""),
        ("lfm2", FSDP1, "shared prompts were verified under FSDP2, and not under FSDP1"),
        ("lfm2", FSDP2, ""),
        ("lfm2", ZERO3, ""),
        ("new", ZERO3, "the gradients of new behind a shared prompt were not verified under ZeRO-3 and FSDP"),
    ):
        monkeypatch.setattr(layout_check, "text_config", lambda model, kind=kind: SimpleNamespace(model_type=kind))
        assert layout_check.unsupported_under_sharding(nn.Linear(1, 1), sharding) == reason


def forwards(*names: str) -> Any:
    """Return a backbone whose forward takes arguments of these names."""
    source = f"lambda {', '.join(names)}: None"
    return SimpleNamespace(forward=eval(source))


FITTING: dict[str, Any] = {
    "base_model": forwards("position_ids", "**kwargs"),
    "_can_set_attn_implementation": lambda: True,
    "_supports_sdpa": True,
}


@pytest.mark.parametrize(
    ("changes", "config", "reason"),
    [
        ({}, {}, ""),
        ({}, {"layer_types": ["full_attention", "sliding_attention"]}, ""),
        ({}, {"layer_types": None}, ""),
        ({}, {"layer_types": ["mamba", "full_attention", "conv"]}, "the model has layers of conv, mamba"),
        (
            {"_can_set_attn_implementation": lambda: False}, {},
            "the attention of SimpleNamespace does not go through transformers' AttentionInterface",
        ),
        ({"_supports_sdpa": False}, {}, "the attention of SimpleNamespace is not that of SDPA"),
        *[
            ({"base_model": forwards(*names)}, {},
             "the forward of SimpleNamespace takes no position_ids or no further arguments")
            for names in (["position_ids"], ["**kwargs"], [])
        ],
    ],
)  # fmt: skip
def test_models_that_are_not_packed(
    changes: dict[str, Any], config: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_text = SimpleNamespace(**config)
    base = SimpleNamespace(config=of_text, **{**FITTING, **changes})
    monkeypatch.setattr(layout_check, "base_model", lambda model: base)
    monkeypatch.setattr(layout_check, "text_config", lambda model: of_text)
    assert layout_check.unsupported(nn.Identity()) == reason
    base.config = SimpleNamespace()
    assert layout_check.unsupported(nn.Identity()) == "the model is multimodal"


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({}, None),
        ({"sliding_window": 8}, 8),
        ({"sliding_window": 8, "layer_types": None}, 8),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, 8),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 8, "layer_types": []}, None),
    ],
)
def test_the_window_of_a_models_attention(config: dict[str, Any], window: int | None) -> None:
    assert layout_check.attention_window(SimpleNamespace(**config)) == window


def test_a_second_table_of_embeddings_is_one_of_positions() -> None:
    class Policy(nn.Module):
        def __init__(self, *tables: nn.Module) -> None:
            super().__init__()
            self.tables = nn.ModuleList(tables)

        def get_input_embeddings(self) -> nn.Module:
            return self.tables[0]

    tokens = nn.Embedding(3, 2)
    assert not layout_check._learns_positions(Policy(tokens, nn.Linear(2, 2)))
    assert layout_check._learns_positions(Policy(tokens, nn.Embedding(3, 2)))


def test_weights_fit_in_float32_with_a_quarter_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    half = nn.Linear(10, 10).bfloat16()  # 110 weights, of 440 bytes in float32
    monkeypatch.setattr(layout_check, "base_model", lambda model: model)
    memory = SimpleNamespace(available=550)
    monkeypatch.setattr(layout_check.psutil, "virtual_memory", lambda: memory)
    assert layout_check.fits_in_float32(half, DEVICE)
    memory.available = 549
    assert not layout_check.fits_in_float32(half, DEVICE)
    assert layout_check.fits_in_float32(nn.Linear(10, 10), DEVICE), "it is in float32 already"
    memory.available = 10**9
    half.is_quantized = True
    assert not layout_check.fits_in_float32(half, DEVICE)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 400)
    half.is_quantized = False
    for allocated, fits in ((150, True), (151, False)):
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device, allocated=allocated: allocated)
        assert layout_check.fits_in_float32(half, torch.device("cuda")) is fits


def test_adapters_and_compiled_models_that_share_no_prompt() -> None:
    targets: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(model(), LoraConfig(**targets))
    assert layout_check.unshareable(adapted) == ""
    assert layout_check.adapter_state(adapted) == ("default",)
    with adapted.disable_adapter():
        assert layout_check.adapter_state(adapted) == ()
    assert layout_check.adapter_state(model()) == ()
    prompt = get_peft_model(model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert layout_check.unshareable(prompt) == "the adapter puts virtual tokens before the prompt"
    assert layout_check.adapter_state(prompt) == ("default",)
    invoked = get_peft_model(model(), LoraConfig(**targets, alora_invocation_tokens=[7]))
    assert "invocation tokens" in layout_check.unshareable(invoked)
    dropping = get_peft_model(model(), LoraConfig(**targets, lora_dropout=0.1))
    assert "the model has dropout" in layout_check.unshareable(dropping)
    compiled = model()
    compiled.model.layers[1].compile()
    assert "the model is compiled" in layout_check.unshareable(compiled)
    assert not layout_check.is_compiled(adapted)
    assert layout_check.is_compiled(nn.Sequential(nn.Linear(1, 1), torch.compile(nn.Linear(1, 1))))


# ---- the state of a model during the check


def test_tensors_of_one_value_get_noise_by_their_size() -> None:
    policy = nn.Module()
    for name, values in (
        ("zeros", torch.zeros(4000)),
        ("twos", torch.full((4000,), -2.0)),
        ("others", torch.arange(70.0)),
        ("single", torch.zeros(1)),
    ):
        policy.register_parameter(name, nn.Parameter(values.clone()))
    late = torch.zeros(70)
    late[69] = 1.0
    policy.register_parameter("late", nn.Parameter(late.clone()))
    policy.register_parameter("frozen", nn.Parameter(torch.zeros(4), requires_grad=False))
    policy.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    state = torch.get_rng_state()
    with layout_check.perturbed(policy):
        first = policy.zeros.detach().clone()
        assert first.std().item() == pytest.approx(0.05, rel=0.05)
        assert (policy.twos + 2).std().item() == pytest.approx(0.2, rel=0.05)
        assert policy.twos.mean().item() == pytest.approx(-2.0, abs=0.02)
        assert torch.equal(policy.others, torch.arange(70.0))
        assert policy.single.any()
        assert torch.equal(policy.late, late)
        assert not policy.frozen.any()
    assert not policy.zeros.any()
    assert not policy.single.any()
    assert (policy.twos == -2).all()
    assert torch.equal(torch.get_rng_state(), state)
    with layout_check.perturbed(policy):
        assert torch.equal(policy.zeros, first), "every rank holds the same weights"
    policy.zeros.ds_id = 1  # type: ignore[attr-defined]
    with layout_check.perturbed(policy):
        assert not policy.zeros.any(), "gathering each weight of a full model would take longer than a step"


def test_the_smallest_tensors_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_check, "COMPARED_WEIGHTS", 5)
    policy = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (3, 9, 2, 4, 1)])
    policy[2].requires_grad_(False)
    assert [p.numel() for p in layout_check.compared(policy)] == [1, 3]
    monkeypatch.setattr(layout_check, "COMPARED_WEIGHTS", 7)
    assert [p.numel() for p in layout_check.compared(policy)] == [1, 3, 4]
    monkeypatch.setattr(layout_check, "COMPARED_WEIGHTS", 0)
    assert [p.numel() for p in layout_check.compared(policy)] == [1], "at least one"
    assert layout_check.compared(nn.Module()) == []


def test_gradients_are_those_of_a_fixed_combination_of_all_log_probabilities() -> None:
    weight, unused = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(1))
    (first, none) = layout_check.gradients(weight * 2, [weight, unused])
    assert none is None
    assert first is not None
    assert len(first.unique()) == 6, "each token has a weight of its own, so that errors don't cancel"
    (again,) = layout_check.gradients((weight * 2) + 0, [weight])
    assert torch.equal(first, again)  # type: ignore[arg-type]
    (doubled,) = layout_check.gradients(weight * 4, [weight])
    torch.testing.assert_close(doubled, 2 * first)
    assert weight.grad is None
    (reentrant, _) = layout_check.gradients(weight * 2, [weight, unused], reentrant=True)
    assert torch.equal(reentrant, first)  # type: ignore[arg-type]
    assert layout_check.gradients((weight * 2).detach(), [weight]) == [None]
    assert layout_check.gradients(weight * 2, []) == []


def test_modes_buffers_random_numbers_and_gradients_are_restored() -> None:
    policy = nn.BatchNorm1d(2).eval()
    before, state = policy.running_mean.clone(), torch.get_rng_state()  # type: ignore[union-attr]
    with suppress(RuntimeError), layout_check.in_training(policy, DEVICE):
        assert policy.training
        policy(torch.rand(4, 2))
        assert not torch.equal(policy.running_mean, before)
        raise RuntimeError
    assert torch.equal(policy.running_mean, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not policy.training
    policy.weight.grad = gradient = torch.ones(2)
    with layout_check.without_gradients(policy):
        assert policy.weight.grad is None
        policy.weight.grad = torch.zeros(2)
    assert policy.weight.grad is gradient
    assert policy.bias.grad is None


def test_reentrant_checkpointing_leaves_the_gradients_of_the_run() -> None:
    """Reentrant checkpointing writes into `grad` of every parameter: it can't compute the gradients of some alone."""
    weight = nn.Parameter(torch.ones(4, 3))

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def gradient_checkpointing_enable(self, options: Any) -> None: ...

        def gradient_checkpointing_disable(self) -> None: ...

    gradients = []
    for reentrant in (True, False):
        found, _ = check(run=lambda call, model, compute_entropy: (weight * 2, None))
        found.args.gradient_checkpointing = True
        found.args.gradient_checkpointing_kwargs = {"use_reentrant": reentrant}
        weight.grad = before = torch.full((4, 3), 5.0)
        gradients += found._compute(trial(bare=Bare(), parameters=[weight]), ModelCall(ROWS, SHARED))[1]
        assert weight.grad is before
        assert (before == 5).all()
    assert torch.equal(*gradients)
    assert gradients[0].any()


@pytest.mark.parametrize(
    ("layout", "launches", "segments"),
    [(SHARED, math.inf, True), (SHARED_PADDED, math.inf, True), (TRIMMED, math.inf, False), (TRIMMED, 512.0, True),
     (PACKED, 0.0, False), (PADDED, 0.0, False)],
)  # fmt: skip
def test_rows_run_in_segments(layout: Layout, launches: float, segments: bool) -> None:
    assert layout_check._has_segments(ModelCall(ROWS, layout, launches)) is segments


@pytest.mark.parametrize(
    ("kwargs", "parameters", "layout", "expected"),
    [
        ({"use_reentrant": False}, True, SHARED, ["enable", "run", "disable"]),
        (None, True, SHARED, ["enable", "run", "disable"]),
        (None, False, SHARED, ["run"]),
        (None, True, PACKED, ["run"]),
    ],
)
def test_checkpointing_runs_the_cache_of_prompts_again(
    kwargs: Any, parameters: bool, layout: Layout, expected: list[str]
) -> None:
    events: list[str] = []
    weight = nn.Parameter(torch.ones(4, 3))

    class Bare(nn.Module):
        def gradient_checkpointing_enable(self, options: Any) -> None:
            assert options == kwargs
            events.append("enable")

        def gradient_checkpointing_disable(self) -> None:
            events.append("disable")

    def run(call: ModelCall, model: Any, compute_entropy: bool) -> tuple[Tensor, None]:
        events.append("run")
        assert torch.is_grad_enabled() is parameters
        assert not compute_entropy, "it would cost a second pass over the logits"
        return weight * 2, None

    found, _ = check(run=run)
    found.args.gradient_checkpointing, found.args.gradient_checkpointing_kwargs = True, kwargs
    given = [weight] if parameters else []
    log_probs, gradients = found._compute(trial(bare=Bare(), parameters=given), ModelCall(ROWS, layout))
    assert events == expected
    assert log_probs.tolist() == [[2.0, 2.0]] * 4
    assert not log_probs.requires_grad
    assert len(gradients) == len(given)
