"""Decisions and messages of the generation check, from evidence written by hand."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from grpo_recipes.generation import generator_check
from grpo_recipes.generation.agreement import (
    BFLOAT16,
    EARLIER,
    NO_AUTOCAST,
    OFF,
    TWICE,
    UNPADDED,
    UNPROCESSED,
    Evidence,
    Fit,
)
from grpo_recipes.generation.generator_check import GenerationCheck, compare_every, unfit_layout, verified_rows
from grpo_recipes.generation.hypotheses import Processing
from grpo_recipes.generation.rows import Rows
from grpo_recipes.process.faults import NotThePolicy
from tests.support.recorded import model

OFF_ = "the model with its adapter switched off"
TWICE_ = "the model with its adapter applied twice"


def check(*, enabled: bool = True, ranks: int = 1, **changes: Any) -> tuple[GenerationCheck, list[str]]:
    """Return a check on a trainer of a float32 policy, and the list of sentences that it logs."""
    accelerator = SimpleNamespace(
        unwrap_model=lambda policy: policy,
        mixed_precision="no",
        device=torch.device("cpu"),
        num_processes=ranks,
        gather=lambda tensor: torch.cat([tensor, *([tensor * 2] * (ranks - 1))]),
    )
    values: dict[str, Any] = {
        **{"accelerator": accelerator, "model": model(), "use_vllm": False, "_is_vlm": False, "temperature": 1.0},
        **{"is_fsdp_enabled": False, "use_transformers_continuous_batching": False, "rollout_func": None},
        **{"num_iterations": 1, "vllm_importance_sampling_correction": False},
        "_dist": SimpleNamespace(is_zero3=False),
        "state": SimpleNamespace(global_step=3),
        "generation_config": GenerationConfig(do_sample=True, top_k=0),
        "args": SimpleNamespace(
            **{"gradient_accumulation_steps": 1, "steps_per_generation": 1, "generation_kwargs": None},
            **{"repetition_penalty": 1.0, "min_p": None, "top_k": 0, "top_p": 1.0, "per_device_train_batch_size": 2},
            **{"per_device_eval_batch_size": 5, "vllm_structured_outputs_regex": None},
        ),
    }
    trainer: Any = SimpleNamespace(**{**values, **changes})
    found = GenerationCheck(trainer, lambda *_: None, enabled)
    said: list[str] = []
    found._announcer._warn = said.append
    return found, said


def evidence(mean: float, tokens: int = 1000, explained: float = 0.0, *names: str) -> Evidence:
    """Return evidence of tokens that differ by `mean` each, of which each hypothesis in `names` explains a share."""
    square = tokens * mean**2
    fit = Fit(square, (1 - explained) * square, tokens * mean)
    return Evidence(tokens, tokens * mean, mean, square, dict.fromkeys(names, fit))


@pytest.fixture(autouse=True)
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the sentences at level INFO."""
    found: list[str] = []
    monkeypatch.setattr(generator_check.logger, "info", found.append)
    return found


# ---- what is recorded and compared


def test_one_row_in_so_many_is_compared() -> None:
    assert [compare_every(rows) for rows in (1, 2, 31, 32, 33, 34, 512)] == [1, 2, 31, 16, 17, 17, 256]
    found, _ = check()
    assert found.record_every(32) == 1, "all rows of the first batches"
    found.batches = 3
    assert found.record_every(32) == 1
    found.batches = 4
    assert found.record_every(32) == 16
    assert check(enabled=False)[0].record_every(32) == 0
    assert check(is_fsdp_enabled=True)[0].record_every(32) == 0


@pytest.mark.parametrize(
    ("rows", "accumulation", "steps", "iterations", "due"),
    [
        (16, 1, 1, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (15, 1, 1, 1, [0, 2, 4, 6]),
        (8, 1, 1, 1, [0, 2, 4, 6]),
        (5, 1, 1, 1, [0, 4]),
        (8, 2, 1, 1, [0, 1, 2, 3, 4, 5, 6, 7]),  # two generation batches per step, of which the first of a step is due
        (8, 2, 4, 1, [0, 1, 4, 5]),  # one in two steps
        (8, 1, 1, 2, [0, 1, 4, 5]),
    ],
)
def test_the_steps_at_which_a_batch_is_due(
    rows: int, accumulation: int, steps: int, iterations: int, due: list[int]
) -> None:
    found, _ = check(num_iterations=iterations)
    found.args.gradient_accumulation_steps, found.args.steps_per_generation = accumulation, steps
    seen = []
    for step in range(8):
        found.trainer.state.global_step = step
        if found.is_due(rows):
            seen.append(step)
    assert seen == due


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"is_fsdp_enabled": True}, "FSDP shards the weights"),
        ({"rollout_func": print}, ""),
        (
            {"rollout_func": print, "ranks": 2},
            "ranks may take different numbers of turns in a `rollout_func`, and the check of each is a collective",
        ),
        ({"ranks": 2}, ""),
        ({"_is_vlm": True}, "prompts may hold images"),
    ],
    ids=str,
)
def test_reasons_to_compare_nothing(changes: dict[str, Any], reason: str) -> None:
    found, said = check(**changes)
    assert found.reason == reason
    if not changes.get("_is_vlm"):
        assert unfit_layout(found.trainer) == reason
    assert found([], [], None) is None
    begin = "whether completions are the policy's is not checked: "
    assert said == [begin + (reason or "the generator gives no log-probabilities")]
    off, silent = check(enabled=False, **changes)
    assert off([], [], None) is None
    assert silent == []


def test_an_engine_has_a_dtype_and_processors_of_its_own() -> None:
    own, _ = check()
    assert (own.is_dtype_known, own.scorer.processing, own.settings is not None) == (True, None, True)
    assert own.settings is not own.trainer.generation_config
    engine, _ = check(use_vllm=True)
    assert (engine.is_dtype_known, engine.settings, engine.scorer.processing) == (False, None, None)
    engine.trainer.args.top_k = 5
    filtered, _ = check(use_vllm=True, args=engine.trainer.args)
    assert filtered.scorer.processing == Processing(top_k=5)
    engine.trainer.args.generation_kwargs = {"logit_bias": {}}
    assert check(use_vllm=True, args=engine.trainer.args)[0].reason == "logit_bias may change the scores of tokens"
    assert check(args=engine.trainer.args)[0].reason == ""
    assert check(use_transformers_continuous_batching=True)[0].settings is None


def test_adapters_of_sharded_weights_are_not_kept() -> None:
    """Their shards would have to be gathered at every step."""
    policy = get_peft_model(model(), LoraConfig(r=1, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    zero3 = SimpleNamespace(is_zero3=True)
    for changes, is_kept in (({}, True), ({"_dist": zero3}, False), ({"is_fsdp_enabled": True}, False)):
        adapters = check(model=policy, **changes)[0].adapters
        for step in range(2):
            adapters.keep(step)
        assert adapters.has_earlier is is_kept


def test_float32_is_the_precision_of_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = check()
    assert found.is_float32
    found.accelerator.mixed_precision = "bf16"
    assert not found.is_float32
    found.scorer.autocast = False
    assert found.is_float32
    found.accelerator.device = torch.device("cuda")
    assert found.is_float32
    with monkeypatch.context() as patch:
        patch.setattr(generator_check, "computes_in_float32", lambda model, device: device.type == "cpu")  # TF32
        assert not found.is_float32
    found.accelerator.device = torch.device("cpu")
    assert found.is_float32
    found.is_16bit = True
    assert not found.is_float32
    assert not check(model=model().bfloat16())[0].is_float32


def test_the_rows_on_which_group_decoding_is_verified() -> None:
    """Eight with the longest completions, and eight at equal distances among the others."""
    lengths = [1] * 40
    longest = [3, 8, 11, 17, 20, 29, 33, 39]
    for place in longest:
        lengths[place] = 9
    others = [place for place in range(40) if place not in longest]
    assert verified_rows(lengths, range(40)) == sorted([*longest, *others[::4]])
    assert verified_rows(lengths[:16], range(16)) == list(range(16))
    assert verified_rows([5, 6, 7], [10, 20, 30]) == [10, 20, 30]


@pytest.mark.parametrize("size", [16, 17, 24, 33, 44, 100])
def test_no_more_than_16_rows_are_verified_whatever_their_lengths(size: int) -> None:
    lengths = torch.randperm(size, generator=torch.Generator().manual_seed(size)).tolist()
    found = verified_rows(lengths, range(size))
    assert found == sorted(set(found))
    assert len(found) <= 16
    longest = {place for place in range(size) if lengths[place] >= size - 8}
    assert longest <= set(found)
    others = [place for place in range(size) if place not in longest]
    places = [others.index(place) for place in found if place not in longest]
    assert places == list(range(0, len(others), math.ceil(len(others) / 8))), "at equal distances among the others"


def test_the_rows_that_are_compared_and_those_that_hypotheses_are_computed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = check()
    asked: list[list[int]] = []
    difference = evidence(1e-6)
    monkeypatch.setattr(found, "_rows", lambda prompts, completions, recorded: (asked.append(list(recorded)), None))
    monkeypatch.setattr(found, "_measure", lambda *_: [difference])
    monkeypatch.setattr(found, "_explore", lambda *_: [difference])
    recorded = {row: torch.zeros(1) for row in range(34)}
    assert found.batches == 0
    found([[1]] * 34, [[2]] * 34, recorded)
    assert found.batches == 1
    assert asked == [[0, 17], [0, 4, 8, 12, 16, 20, 24, 28]]
    asked.clear()
    few = {row: torch.zeros(1) for row in (0, 2, 4)}
    found([[1]] * 5, [[2]] * 5, {**few, 1: few[0], 3: few[0]})
    assert asked == [[0], [0, 2, 4, 1, 3]]
    found.trainer.state.global_step = 1
    found.batches = 4
    assert found([[1]] * 5, [[2]] * 5, few) is None, "not due"
    assert found.batches == 4
    found.batches = 3
    assert found([[1]] * 5, [[2]] * 5, few) is None, "compared, as one of the first, and not logged"
    assert found.batches == 4
    found.trainer.state.global_step, found.batches = 4, 15
    assert found([[1]] * 5, [[2]] * 5, few) == (1e-6, 1e-6)
    assert asked[-2:] == [[0], [0, 2, 4]], "every sixteenth"
    asked.clear()
    assert found([[1]] * 5, [[2]] * 5, few) == (1e-6, 1e-6)
    assert asked == [[0]]


def called(found: GenerationCheck, monkeypatch: pytest.MonkeyPatch, *ranks: Evidence, **state: int) -> tuple[Any, bool]:
    """Compare a batch of 16 rows with these measurements. Return what is logged, and True if hypotheses follow."""
    explored: list[Any] = []
    found.batches = state.get("batches", 6)
    found.trainer.state.global_step = state.get("step", 0)
    monkeypatch.setattr(found, "_rows", lambda *_: ((), ()))
    monkeypatch.setattr(found, "_measure", lambda *_: list(ranks))
    monkeypatch.setattr(found, "_explore", lambda *_: explored.append(1) or list(ranks))
    rows = [[1]] * state.get("rows", 16)
    return found(rows, rows, {0: torch.zeros(1)}), bool(explored)


def test_the_logged_difference_is_of_the_tokens_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = check()
    ranks = Evidence(30, 3e-3, 8e-4, 1e-6), Evidence(10, 2e-3, 9e-4, 1e-6), Evidence(0, 0.0, 0.0, 0.0)
    monkeypatch.setattr(found, "_judge", lambda ranks: None)
    assert called(found, monkeypatch, *ranks)[0] == (pytest.approx(5e-3 / 40), 9e-4)
    assert called(found, monkeypatch, Evidence(1, 0.25, 0.25, 0.0625))[0] == (0.25, 0.25)
    assert called(found, monkeypatch, Evidence(0, 0.0, 0.0, 0.0))[0] == (0.0, 0.0)


def test_hypotheses_are_computed_where_one_rank_differs_from_what_is_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = check()
    monkeypatch.setattr(found, "_judge", lambda ranks: None)
    found.baseline = evidence(1e-4)
    usual, unusual = evidence(1e-4), evidence(9e-4)
    assert [called(found, monkeypatch, *ranks)[1] for ranks in ((usual, usual), (usual, unusual))] == [False, True]
    assert called(found, monkeypatch, usual, batches=3)[1], "one of the first batches"
    assert called(found, monkeypatch, usual, batches=15)[1], "the sixteenth"


def test_adapters_are_kept_at_steps_that_are_not_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hypothesis needs the step before."""
    found, _ = check()
    steps: list[int] = []
    monkeypatch.setattr(found.adapters, "keep", steps.append)
    assert called(found, monkeypatch, evidence(1e-6), step=1, rows=8) == (None, False)
    assert called(found, monkeypatch, evidence(1e-6), step=2, rows=8)[0] is not None
    assert steps == [1, 2]


def test_processors_are_compared_where_the_settings_can_be_observed() -> None:
    found, said = check()
    comparison = found.processor_comparison(34)
    assert comparison is not None
    assert (comparison.settings, comparison.rows) == (found.settings, [0, 17])
    assert comparison.loss_settings.temperature == 1.0
    for none in (check(enabled=False), check(is_fsdp_enabled=True), check(use_vllm=True)):
        assert none[0].processor_comparison(34) is None
    found.trainer.state.global_step = 1
    assert found.processor_comparison(5) is not None, "one of the first batches"
    found.batches = 4
    assert found.processor_comparison(5) is None
    assert found.processor_comparison(34) is not None
    assert said == []
    beams, said = check(generation_config=GenerationConfig(num_beams=2))
    assert beams.processor_comparison(34) is not None
    assert said == [
        "completions are generated by beam_search, and the loss takes the log-probabilities of plain sampling: the "
        "difference for the sampled tokens is not known"
    ]
    greedy, said = check(generation_config=GenerationConfig(do_sample=False, guidance_scale=1))
    assert greedy.processor_comparison(34) is not None
    assert said == []
    guided, said = check(generation_config=GenerationConfig(do_sample=True, guidance_scale=1.5))
    assert guided.processor_comparison(34) is None
    assert said == [
        "completions are sampled with guidance_scale 1.5, and the loss takes log-probabilities without; the logits "
        "processors of `generate` are not checked: `guidance_scale` runs the model once more"
    ]


# ---- sums


def test_sums_leave_out_padding_and_tokens_without_a_log_probability() -> None:
    nan, found = float("nan"), check()[0]
    rows = Rows.of_tokens([[5], [6]], [[1, 2, 3], [4]], torch.device("cpu"))
    recorded = torch.tensor([[-1.0, nan, -2.0], [-3.0, -9.0, -9.0]])
    expected = torch.tensor([[-1.5, -1.0, -1.0], [-3.0, 0.0, 0.0]])
    other = torch.tensor([[-1.25, 7.0, -2.0], [-5.0, 3.0, 3.0]])
    sums = generator_check._sums(rows, recorded, expected)
    assert sums.tolist() == [3.0, 1.5, 1.0, 1.25]
    fit = generator_check._sums_of_fit(rows, recorded, expected, other)
    assert fit.tolist() == [0.0625 + 1 + 4, 0.0625 + 0 + 4, 0.25 + 1 + 2]
    ones = Rows.of_tokens([[5]], [[1] * 301], torch.device("cpu"))
    zeros = torch.zeros(1, 301, dtype=torch.bfloat16)
    of_16_bits = generator_check._sums_of_fit(ones, torch.zeros(1, 301), zeros, zeros + 1)
    assert of_16_bits.tolist() == [301.0] * 3, "in float32, whatever the policy computes in"
    none = generator_check._sums(rows, torch.full((2, 3), -math.inf), expected)
    assert none.tolist() == [0.0] * 4
    two, _ = check(ranks=2)
    assert two._gather([sums, fit, fit + 1], ["off", "twice"]) == [
        Evidence(3, 1.5, 1.0, 1.25, {"off": Fit(5.0625, 4.0625, 3.25), "twice": Fit(6.0625, 5.0625, 4.25)}),
        Evidence(6, 3.0, 2.0, 2.5, {"off": Fit(10.125, 8.125, 6.5), "twice": Fit(12.125, 10.125, 8.5)}),
    ]
    found.trainer.model.train()
    assert found._size() == 2
    found.trainer.model.eval()
    assert found._size() == 5


def test_only_the_requested_hypotheses_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a forward. To measure the policy alone takes none."""
    found, _ = check()
    rows = Rows.of_tokens([[5]], [[1, 2]], torch.device("cpu"))
    zeros, recorded = torch.zeros(1, 2), torch.tensor([[-1.0, -2.0]])
    computed: list[str] = []

    def hypothesis(name: str) -> Any:
        def scorer(*_: Any) -> torch.Tensor:
            computed.append(name)
            return zeros

        return SimpleNamespace(context=nullcontext(), scorer=scorer, model=None)

    named = {name: hypothesis(name) for name in (OFF, TWICE, UNPADDED)}
    found.scorer = lambda *_: zeros  # type: ignore[assignment]
    monkeypatch.setattr(generator_check, "hypotheses", lambda *_: named)
    sums, fit = (2.0, 3.0, 2.0, 5.0), Fit(0.0, 5.0, 0.0)
    for only, names in ((None, [OFF, TWICE, UNPADDED]), ((), []), ((UNPADDED, OFF), [OFF, UNPADDED])):
        assert found._explore(rows, recorded, only) == [Evidence(*sums, dict.fromkeys(names, fit))]
        assert computed == names
        computed.clear()
    assert found._measure(rows, recorded) == [Evidence(*sums)]
    assert computed == []


def test_recorded_rows_become_a_batch_and_long_rows_are_cut_where_each_token_costs_a_vocabulary() -> None:
    found, _ = check()
    prompts, completions = [[5], [6, 6], [7]], [[1] * 300, [2, 3], [4]]
    recorded = {0: torch.arange(300.0), 1: torch.tensor([0.5, 1.5, 9.0])}
    rows, log_probs = found._rows(prompts, completions, recorded)
    assert log_probs.shape == (2, 300)
    assert log_probs[1, :2].tolist() == [0.5, 1.5]
    assert log_probs[1, 2:].isnan().all()
    assert torch.equal(log_probs[0], recorded[0])
    assert rows.logits_to_keep == 300
    found.scorer.processing = Processing(top_k=2)
    rows, log_probs = found._rows(prompts, completions, recorded)
    assert rows.logits_to_keep == 256
    assert torch.equal(log_probs[0], recorded[0][:256])


# ---- what is unusual, and what is concluded


def test_a_difference_is_unusual_above_twice_the_usual_one() -> None:
    found, _ = check()
    assert not found._is_unusual(evidence(0.9e-4))
    assert found._is_unusual(evidence(1.1e-4))
    found.baseline = evidence(1e-5)
    assert not found._is_unusual(evidence(9e-5)), "within the tolerance of float32"
    found.baseline = evidence(0.125)
    assert not found._is_unusual(evidence(0.25))
    assert found._is_unusual(evidence(0.2501))
    assert found._is_unusual(evidence(float("nan")))
    found.is_16bit = True
    found.baseline = evidence(0.01)
    assert found._is_unusual(evidence(0.021)), "a tolerance of 16 bits hides a fault"
    assert not found._is_unusual(evidence(0.02))
    found.baseline = evidence(0.4)
    assert found._is_unusual(evidence(0.51))


def wrong(found: GenerationCheck, *ranks: Evidence) -> str:
    with pytest.raises(NotThePolicy) as caught:
        found._judge(list(ranks))
    return str(caught.value)


END = "; set `generation_check: false` to go on anyway"


def test_messages_of_a_wrong_generator() -> None:
    begin = " is not the policy: at step 3 the log-probabilities of its tokens differ by 0.1 on average, and "
    off = evidence(0.1, 1000, 0.9, OFF)
    assert wrong(check()[0], off) == f"the generator{begin}they are those of {OFF_} (90% of the difference){END}"
    both = evidence(0.1, 1000, 0.9, OFF, TWICE)
    alike = f"they are those of {OFF_} or {TWICE_}, which are alike so far (90% of the difference)"
    fine = evidence(1e-6)
    assert wrong(check()[0], fine, both) == f"the generator of rank 1{begin}{alike}{END}"
    assert wrong(check()[0], both, fine) == f"the generator of rank 0{begin}{alike}{END}"
    unexplained = "no hypothesis that can be computed here explains it"
    gross = wrong(check()[0], evidence(0.6))
    assert gross == f"the generator{begin.replace('0.1', '0.6')}{unexplained}{END}"
    known, _ = check()
    known._judge([evidence(2e-3)])
    earlier = "; they agreed before (to 2.0e-03), as with weights of an earlier step that were not replaced"
    assert wrong(known, evidence(0.1)) == f"the generator{begin}{unexplained}{earlier}{END}"


def test_accepted_evidence_is_added_to_the_baseline_without_its_fits() -> None:
    found, said = check(use_vllm=True)
    found._judge([evidence(1e-5, 1000, 0.0, OFF), evidence(3e-5, 500)])
    assert found.baseline == Evidence(1500, pytest.approx(0.025), 3e-5, pytest.approx(1000 * 1e-10 + 500 * 9e-10))
    assert found.is_dtype_known
    found._judge([evidence(1e-5, 500)])
    assert found.baseline is not None
    assert (found.baseline.tokens, found.baseline.fits) == (2000, {})
    assert said == []
    found._judge([evidence(0.9e-4, 100), evidence(3e-4, 100)])
    found._judge([evidence(4e-4, 100)])
    assert said == [
        "the generator's log-probabilities differ from the policy's by 3.0e-04 on average, more than their dtypes "
        "explain, and no hypothesis that can be computed here explains it"
    ]


def test_a_generator_of_16_bits_is_announced_and_judged_by_its_own_tolerance() -> None:
    found, said = check(use_vllm=True)
    tokens = 1000
    rounding = Evidence(tokens, tokens * 0.02, 0.2, 1.0, {BFLOAT16: Fit(1.0, 2.0, tokens * 0.01)})
    found._judge([evidence(0.001, 1000), rounding])
    assert found.is_16bit
    assert said == [
        "the generator computes in 16 bits and the policy in 32: their log-probabilities differ by 2.0e-02 on average, "
        "and the policy's own in bfloat16 by 1.0e-02"
    ]
    assert not found.is_float32
    found._judge([rounding])
    assert len(said) == 1


def test_few_16_bit_tokens_wait_for_more_of_every_rank() -> None:
    found, _ = check()
    found.is_16bit = True
    found._judge([evidence(0.01, 63), evidence(0.01, 500)])
    assert found.baseline is None
    found._judge([evidence(0.01, 1), evidence(0.01, 1)])
    assert found.baseline is not None
    assert found.baseline.tokens == 565
    assert found._pending is None
    found._judge([evidence(0.01, 64), evidence(0.01, 64)])
    assert found.baseline.tokens == 565 + 128
    found._judge([evidence(0.01, 63)])
    found._judge([evidence(0.01, 63, 0.0, OFF)])  # other hypotheses: the earlier tokens are dropped
    assert found.baseline.tokens == 565 + 128
    float32, _ = check()
    float32._judge([evidence(1e-6, 1)])
    assert float32.baseline is not None


# ---- other computations of the same weights


def test_another_computation_that_explains_the_difference_becomes_the_check_s_own() -> None:
    found, said = check()
    found._judge([evidence(0.1, 1000, 0.9, UNPADDED)])
    assert not found.scorer.padded
    assert found.baseline is None
    assert said == [
        "the policy's log-probabilities depend on padding: the loss, which pads prompts as TRL does, does not score "
        "tokens as they were sampled"
    ]
    engine, said = check(use_vllm=True)
    engine.baseline, engine.is_dtype_known = evidence(0.1), True
    engine.accelerator.mixed_precision = "bf16"
    engine._judge([evidence(0.01, 1000), evidence(0.1, 1000, 0.9, NO_AUTOCAST)])
    assert not engine.scorer.autocast
    assert (engine.baseline, engine.is_dtype_known) == (None, False)
    assert said == [
        "tokens are sampled from the policy without autocast, and the loss computes it with autocast: "
        "log-probabilities differ by 1.0e-01 on average; `bf16: false` makes them alike"
    ]
    own, _ = check()
    own._score_by(NO_AUTOCAST, [evidence(0.1)])
    assert own.is_dtype_known
    own.scorer.processing = Processing(top_k=2)
    own._score_by(UNPROCESSED, [])
    assert own.scorer.processing is None
    assert own.scorer.padded


@pytest.mark.parametrize("tokens", [1, 10])
@pytest.mark.parametrize(("correction", "key"), [(True, "truncation"), (False, "filters")])
def test_truncated_sampling_is_announced_with_its_size(correction: bool, key: str, tokens: int) -> None:
    found, said = check(use_vllm=True, vllm_importance_sampling_correction=correction)
    found._say_truncation(evidence(1e-6, 10))
    assert said == []
    found.scorer.processing = Processing(top_k=5)
    for size in (0.25, 0.5):
        found._judge([Evidence(tokens, 1e-6 * tokens, 1e-6, 1e-11, {UNPROCESSED: Fit(1.0, 1.0, tokens * size)})])
    assert found._announcer.keys == {key}
    assert said == [
        "vLLM's log-probabilities are of the distribution after top_k 5, those of the loss before: "
        "`vllm_importance_sampling_correction` takes that for a difference of policies (huggingface/trl#6789), at step "
        "3 0.25 a token on average; leave these keys out, or set it to false"
        if correction
        else "completions are sampled after top_k 5, and the loss takes log-probabilities before: those of the sampled "
        "tokens differ by 0.25 on average at step 3"
    ]


def test_weights_nearer_than_the_policy_s_are_named_within_the_tolerance() -> None:
    found, said = check()
    found.is_16bit = True
    found._judge([evidence(0.01), evidence(0.01, 1000, 0.9, EARLIER)])
    assert said == [
        "the generator's log-probabilities are nearer to those of the model with its adapter as it was a step ago than "
        "to the policy's, within the tolerance of 16 bits: an adapter loses its smallest updates if it is merged into "
        "16-bit weights"
    ]


def test_hypotheses_that_stay_unclear_are_logged_once_and_their_end_too(logged: list[str]) -> None:
    found, _ = check()
    alike, told_apart = evidence(1e-5, 1000, 0.5, OFF, TWICE), Evidence(1000, 0.01, 1e-5, 1e-7, {OFF: Fit(1, 1, 1)})

    def judged(step: int, one: Evidence) -> list[str]:
        logged.clear()
        found.trainer.state.global_step = step
        found._judge([one, one])
        return list(logged)

    unclear = (
        f": can't tell yet whether the generator is the policy or {OFF_} or {TWICE_}: their log-probabilities are alike"
    )
    assert judged(1, told_apart) == [], "nothing was unclear before"
    assert judged(19, alike) == []
    assert judged(20, alike) == [f"step 20{unclear}"]
    assert judged(21, alike) == []
    assert judged(22, told_apart) == ["step 22: the generator is the policy"]
    assert judged(23, told_apart) == []
    assert found.unclear == ()
    found, _ = check()
    assert judged(30, told_apart) == [], "clear from the beginning"


# ---- processors


class Compared:
    """Comparison of processors with given distances and shifts of each token."""

    def __init__(
        self, *distances: float, difference: str = "", other_mode: str = "", named: tuple[str, ...] = ()
    ) -> None:
        self.difference, self.other_mode, self.named = difference, other_mode, list(named)
        self.table, self.asked = torch.tensor([distances, [0.5] * len(distances)]), 0

    def measured(self, completions: Any) -> torch.Tensor:
        return self.table

    def filters(self) -> list[str]:
        self.asked += 1
        return self.named


def compared(comparison: Any, ranks: int = 1) -> list[str]:
    found, said = check(ranks=ranks)
    for _ in range(2):
        found.compare_processors([], comparison)
    return said


def test_processors_of_the_settings_may_round_and_others_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(None) == []
    assert compared(Compared(0.0, 0.0)) == []
    assert compared(Compared(0.04, 0.06)) == [], "the same processors: their mean decides"
    other = "`generate` applies A where the settings give nothing"
    assert compared(Compared(1e-5, 0.9e-4, difference=other)) == [f"{other}: so far that has changed no probability"]
    assert compared(Compared()) == [
        "the logits processors of `generate` are not checked: `generate` is the model's own, or draws tokens without "
        "them"
    ]
    assert compared(Compared(difference="another list")) == compared(Compared()), "nothing was compared"
    filtered = Compared(0.0, 0.0, named=("top_k 5", "top_p 0.9"))
    assert compared(filtered) == [
        "completions are sampled after top_k 5, top_p 0.9, and the loss takes log-probabilities before: those of the "
        "sampled tokens differ by 0.5 on average at step 3"
    ]
    assert compared(filtered, ranks=2) == compared(filtered)
    assert filtered.asked == 3, "once for each check: the processors are built once per setting"
    monkeypatch.setattr(generator_check, "gather_object", lambda ours: ours * 2)
    end = "; look for a `generate` or logits processors that the model brings, or set `generation_check: false`"
    begin = "tokens are not drawn{} from the policy's distribution under the settings of this run: at step 3 "

    def stopped(comparison: Any, ranks: int = 1) -> str:
        with pytest.raises(NotThePolicy) as caught:
            compared(comparison, ranks)
        return str(caught.value)

    assert stopped(Compared(0.05, 0.07)) == (
        begin.format("") + "`generate` makes other scores of the logits than the settings (6.00% of the probability "
        "moved on average, at most 7.00%)" + end
    )
    assert stopped(Compared(0.06)).endswith(f"(6.00% of the probability moved on average, at most 6.00%){end}")
    assert stopped(Compared(0.0, 2e-4, difference=other)) == (
        begin.format("") + f"{other} (0.01% of the probability moved on average, at most 0.02%)" + end
    )
    mode = "the generation mode is beam_search, not sample"
    assert stopped(Compared(other_mode=mode, difference=other)) == begin.format("") + mode + end
    # The sums of the other rank are twice as large.
    assert stopped(Compared(0.0, 0.9e-4, difference=other), ranks=2) == (
        begin.format(" by rank 1") + f"{other} (0.00% of the probability moved on average, at most 0.02%)" + end
    )


# ---- verification of group decoding, and engines


def test_verification_scores_the_policy_as_the_generator_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def verified(measured: list[list[Evidence]], explored: list[Evidence]) -> tuple[str, GenerationCheck, list[Any]]:
        found, _ = check()
        asked: list[Any] = []
        monkeypatch.setattr(found, "_rows", lambda prompts, completions, few: (sorted(few), None))
        monkeypatch.setattr(found, "_measure", lambda rows, recorded: measured.pop(0))

        def explore(rows: Any, recorded: Any, only: Any) -> list[Evidence]:
            asked.append((rows, only))
            return explored

        monkeypatch.setattr(found, "_explore", explore)
        recorded = {row: torch.zeros(1) for row in (0, 2)}
        return found.verify([[1]] * 3, [[1]] * 3, recorded), found, asked

    fine, off = evidence(1e-5), evidence(3e-4)
    assert verified([[fine, fine]], [])[::2] == ("", [])
    text = "by 3.0e-04 on the first batch, 1e-04 allowed"
    difference, found, asked = verified([[fine, off]], [fine, off])
    assert difference == text
    assert asked == [([0, 2], (UNPROCESSED, UNPADDED, NO_AUTOCAST))]
    assert found.scorer.padded
    explained = evidence(3e-4, 1000, 0.9, UNPADDED)
    difference, found, _ = verified([[off, off], [fine, fine]], [explained, explained])
    assert (difference, found.scorer.padded) == ("", False)
    partly = evidence(3e-4, 1000, 0.4, UNPADDED)
    difference, found, _ = verified([[off, off]], [explained, partly])
    assert (difference, found.scorer.padded) == (text, True), "it must explain the difference on every rank"
    half = evidence(3e-4, 1024, 0.5, UNPADDED)
    assert half.share(UNPADDED) == 0.5
    assert verified([[off], [fine]], [half])[0] == "", "half of it is enough"
    one, other = evidence(3e-4, 1000, 0.6, UNPADDED), evidence(3e-4, 1000, 0.9, NO_AUTOCAST)
    both = Evidence(1000, one.total, one.largest, one.square, {**one.fits, **other.fits})
    _, found, _ = verified([[off], [fine]], [both])
    assert (found.scorer.padded, found.scorer.autocast) == (True, False), "the computation that explains most"
    none = Evidence(0, 0.0, 0.0, 0.0, {UNPADDED: Fit(0.0, 0.0, 0.0)})
    difference, found, _ = verified([[off, none], [fine, none]], [explained, none])
    assert (difference, found.scorer.padded) == ("", False), "a rank without tokens says nothing"


@pytest.mark.parametrize(
    ("is_16bit", "difference"),
    [
        (False, "by 3.0e-01 on the first turn, 1e-04 allowed"),  # the largest of all ranks
        (True, "by 6.0e-02 on the first turn, 5e-02 allowed"),  # the largest mean
    ],
)
def test_verification_judges_the_worst_rank(is_16bit: bool, difference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = check()
    found.is_16bit = is_16bit
    ranks = [Evidence(100, 6.0, 0.2, 1.0), Evidence(100, 2.0, 0.3, 1.0)]
    monkeypatch.setattr(found, "_rows", lambda *_: ((), ()))
    monkeypatch.setattr(found, "_explore", lambda *_, only: ranks)
    assert found.verify([[1]], [[1]], {0: torch.zeros(1)}, where="the first turn") == difference
    ranks = [Evidence(100, 0.4, 9e-5 if not is_16bit else 0.3, 1.0)] * 2
    assert found.verify([[1]], [[1]], {0: torch.zeros(1)}) == ""


def test_log_probabilities_of_an_engine_are_compared_on_the_recorded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def called(self: Any, prompts: Any, completions: Any, recorded: Any) -> tuple[float, float]:
        seen.append(recorded)
        assert (prompts[0], completions[0]) == ([1], [1, 2])
        return 1.0, 2.0

    monkeypatch.setattr(GenerationCheck, "__call__", called)
    found, _ = check(use_vllm=True)
    found.batches = 4
    log_probs = [[-1.0, None]] * 34
    assert found.of_vllm([[1]] * 34, [[1, 2]] * 34, log_probs) == (1.0, 2.0)
    assert sorted(seen[0]) == [0, 17]
    assert seen[0][17][0] == -1.0
    assert seen[0][17][1].isnan()
    found.trainer.vllm_importance_sampling_correction = True
    assert found.of_vllm([[1]] * 34, [[1, 2]] * 34, log_probs) is None, "TRL logs the same"
    off, _ = check(use_vllm=True, enabled=False)
    off.of_vllm([[1]] * 2, [[1, 2]] * 2, log_probs[:2])
    assert seen[-1] == {}
