"""The generation check: planted faults stop a run with their name, excuses are announced, and healthy runs go on."""

from __future__ import annotations

import logging
import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft.helpers import rescale_adapter_scale
from transformers import GenerationMixin

from grpo_recipes.generation import generator_check as generation_check
from grpo_recipes.generation.agreement import (
    BFLOAT16,
    EARLIER,
    EXCUSES,
    NO_AUTOCAST,
    OFF,
    OTHER_WEIGHTS,
    TWICE,
    UNEXPLAINED,
    UNPADDED,
    UNPROCESSED,
    Evidence,
)
from grpo_recipes.generation.hypotheses import Processing
from grpo_recipes.process.faults import NotThePolicy
from tests.support import launching
from tests.support.architectures import adapter, tiny, trainer
from tests.support.engine import SETTINGS, serve
from tests.support.grids import only
from tests.support.recorded import model

CONTINUED = {"peft_config": adapter()}
"""Arguments of a trainer whose adapter changes log-probabilities from the start."""
NEW = {"peft_config": adapter(init_lora_weights=True)}
"""Arguments of a trainer whose adapter adds nothing before the first update."""
MEAN = "sampling/sampling_logp_difference/mean"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """Return the sentences that the check has logged."""
    caplog.set_level(logging.INFO)
    name = "grpo_recipes.generation.generator_check"
    return lambda: [record.getMessage().removeprefix("[RANK 0] ") for record in caplog.records if record.name == name]


def loud(factor: float = 40) -> Any:
    """Return a model with log-probabilities so far apart that 16 bits move them by more than the tolerance."""
    policy = model()
    with torch.no_grad():
        policy.get_output_embeddings().weight.mul_(factor)
    return policy


# ---- causes that stop a run

OFF_, TWICE_, EARLIER_ = (OTHER_WEIGHTS[name] for name in (OFF, TWICE, EARLIER))
STALE = "no hypothesis"
NO_CORRECTION = {**CONTINUED, "vllm_importance_sampling_correction": False}
PLANTED: dict[str, tuple[str, dict[str, Any], Any, int, str]] = {
    # the fault of the engine, the run, the engine's dtype, at which step the run stops, what it names
    "TRL 1.16, LoRA and a server, continued adapter": ("off", CONTINUED, None, 0, OFF_),
    "TRL 1.16, LoRA and a server, new adapter": ("off", NEW, None, 1, OFF_),
    "unsloth 8701, adapter ignored": ("off", NO_CORRECTION, None, 0, OFF_),
    "verl 7495, adapter never delivered": ("start", NEW, None, 1, OFF_),
    "verl 7495, continued adapter": ("start", CONTINUED, None, 1, EARLIER_),
    "TRL 5312, weights reloaded after sleep, LoRA": ("disk", NEW, None, 1, OFF_),
    "TRL 5312, full model and a reference": ("disk", {"beta": 0.04}, None, 1, STALE),
    "TRL 5312, full model": ("disk", {}, None, 1, STALE),
    "ms-swift 8233, adapter applied twice": ("twice", CONTINUED, None, 0, TWICE_),
    "ms-swift 8233, new adapter": ("twice", NEW, None, 1, TWICE_),
    "an update late, LoRA": ("ago", CONTINUED, None, 1, EARLIER_),
    "an update late, full model": ("ago", {}, None, 1, STALE),
    "a 16-bit engine, adapter ignored": ("off", CONTINUED, torch.bfloat16, 0, OFF_),
    "a 16-bit engine, adapter applied twice": ("twice", CONTINUED, torch.bfloat16, 0, TWICE_),
    # The policy's own log-probabilities in bfloat16 differ as much, which is not an excuse.
    "16 bits move log-probabilities by nats": ("", {"policy": 1e6}, torch.bfloat16, 0, "no hypothesis"),
}
QUICK = ["an update late, LoRA", "TRL 5312, full model"]
QUICK += ["a 16-bit engine, adapter applied twice", "16 bits move log-probabilities by nats"]
SLOW = ["TRL 1.16, LoRA and a server, new adapter", "verl 7495, continued adapter", "ms-swift 8233, new adapter"]
SHORT = {"max_completion_length": 8, "max_steps": 2}


@pytest.mark.parametrize("name", only(QUICK, PLANTED, SLOW))
def test_a_planted_fault_is_named_within_two_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, changes, dtype, step, cause = PLANTED[name]
    serve(monkeypatch, fault, dtype)
    if "policy" in changes:
        changes = {"policy": loud(changes["policy"])}
    run = trainer(tmp_path, **{**SETTINGS, **({} if "policy" in changes else SHORT), **changes})
    with pytest.raises(NotThePolicy) as caught:
        run.train()
    assert run.state.global_step == step
    assert f"step {step} " in str(caught.value)
    assert cause in str(caught.value)
    others = [sentence for sentence in OTHER_WEIGHTS.values() if sentence != cause and sentence in str(caught.value)]
    # After one update a new adapter as it was a step ago is the adapter switched off.
    assert others == ([EARLIER_] if cause == OFF_ and changes is NEW else [])


LOOPS: dict[str, tuple[str, int, dict[str, Any], tuple[int, ...]]] = {
    # application of the adapter in `generate`, from which step on, the run, at which step it may stop
    "groups": ("off", 0, CONTINUED, (0,)),
    "stock loop": ("off", 0, {**CONTINUED, "generation": "off"}, (0,)),
    "stock loop, from step 5": ("twice", 5, {**CONTINUED, "generation": "off", "max_steps": 7}, (5,)),
    # An adapter of a few steps: 16 bits may hide it for one more.
    "autocast": ("twice", 9, {**NEW, "generation": "off", "max_steps": 12, "bf16": True}, (9, 10)),
}


@pytest.mark.parametrize("name", only(["groups"], LOOPS))
def test_generate_with_another_adapter_stops_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, begin, changes, steps = LOOPS[name]
    stock = GenerationMixin.generate
    run = trainer(tmp_path, policy=loud() if "bf16" in changes else None, **changes)

    def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
        wrong = run.model.disable_adapter() if fault == "off" else rescale_adapter_scale(run.model, 2)
        with wrong if run.state.global_step >= begin else nullcontext():
            return stock(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", faulty)
    with pytest.raises(NotThePolicy, match=OTHER_WEIGHTS[fault]):
        run.train()
    assert run.state.global_step in steps


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["ddp_cpu", pytest.param("zero3_cpu", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("fault", "cause"), [("adapter", OFF_), ("bias", "SequenceBiasLogitsProcessor")])
def test_all_ranks_stop_if_one_generator_is_wrong(
    fault: str, cause: str, layout: str, tmp_path: Path, extensions: str
) -> None:
    module = "tests.support.train_one_rank_wrong"
    launching.launch_module(layout, module, str(tmp_path), fault, TORCH_EXTENSIONS_DIR=extensions)
    first, second = [(tmp_path / f"said-{rank}.txt").read_text() for rank in (0, 1)]
    assert first == second
    for figure in ("rank 1", "step 0 ", cause):
        assert figure in first


def test_the_check_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    serve(monkeypatch, "off")
    run = trainer(tmp_path, generation_check=False, max_steps=1, max_completion_length=4, **SETTINGS, **CONTINUED)
    run.train()
    assert run.state.global_step == 1
    assert said() == []


# ---- causes that excuse a difference

SAMPLED_WITH = "completions are sampled"

AUTOCAST = {**NEW, "bf16": True, "max_steps": 8, "learning_rate": 1e-3}
EXCUSED: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    # the excuse, what is odd about the engine, its dtype, the run
    "16-bit engine": (BFLOAT16, "", torch.bfloat16, {**SETTINGS, "beta": 0.04}),
    "16-bit engine, adapter and filters": (BFLOAT16, "", torch.bfloat16, {**SETTINGS, **NEW, "top_p": 0.9}),
    "before truncation": (UNPROCESSED, "raw", None, {**SETTINGS, "top_k": 5}),
    "padding": (UNPADDED, "", None, {"policy": "GPT2Config"}),
    # PEFT's `generate` runs without autocast: the loss rounds away a part of the adapter that `generate` keeps.
    "autocast, groups": (NO_AUTOCAST, "", None, AUTOCAST),
    "autocast, engine with the adapter merged": (NO_AUTOCAST, "merged", None, {**AUTOCAST, **SETTINGS}),
}


@pytest.mark.parametrize("name", only(["16-bit engine", "padding"], EXCUSED))
def test_an_excuse_is_announced_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    excuse, oddity, dtype, changes = EXCUSED[name]
    serve(monkeypatch, oddity, dtype)
    policy = tiny(changes["policy"]) if "policy" in changes else loud() if "bf16" in changes else model()
    run = trainer(tmp_path, **{**(SHORT if "bf16" not in changes else {}), **changes, "policy": policy})
    run.train()
    assert run.state.global_step == run.args.max_steps
    # The loud policy moves a merged adapter's rounding beyond 1e-4 on some token.
    found = [sentence for sentence in said() if not sentence.startswith(EXCUSES[UNEXPLAINED])]
    if {"top_p", "top_k"} & changes.keys():
        found = [sentence for sentence in found if not sentence.startswith(SAMPLED_WITH)]
    assert len(found) == 1
    assert found[0].startswith(EXCUSES[excuse])
    if excuse == NO_AUTOCAST and "use_vllm" not in changes:
        assert run._generation.groups.is_verified
        differences = [entry[MEAN] for entry in run.state.log_history if MEAN in entry]
        assert len(differences) == 8
        assert differences[-1] < 1e-4  # float32 on both sides


# ---- healthy runs

LONG = {"learning_rate": 2e-3, "num_generations": 4, "logging_steps": 50}
SMALL = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_completion_length": 6}
FILTERS = {"top_p": 0.9, "top_k": 12}
HEALTHY: dict[str, tuple[int, dict[str, Any], Any, bool]] = {
    # steps, the run, the engine's dtype, whether the policy is in bfloat16
    "new adapter, bfloat16 engine": (200, {**SETTINGS, **NEW}, torch.bfloat16, False),
    "adapter, filters, bfloat16 engine": (200, {**SETTINGS, **CONTINUED, **FILTERS}, torch.bfloat16, False),
    "full, min_p, penalty": (100, {**SETTINGS, "min_p": 0.05, "repetition_penalty": 1.2}, None, False),
    "full and a reference, both bfloat16": (150, {**SETTINGS, "beta": 0.04, "temperature": 0.8}, None, True),
    "group decoding, bfloat16": (100, {}, None, True),
    "group decoding, adapter": (100, {**NEW, "top_p": 0.9}, None, False),
    "new adapter, autocast": (100, {**NEW, "bf16": True}, None, False),
    "stock loop, adapter": (100, {**CONTINUED, "generation": "off"}, None, False),
    "full, bfloat16 engine, small batch": (50, {**SETTINGS, **SMALL}, torch.bfloat16, False),
}  # fmt: skip


def announced_by_healthy_run(name: str, steps: int, folder: Path, patch: pytest.MonkeyPatch) -> set[str]:
    """Train a run of the table, and return the beginnings of the sentences that are true of it."""
    _, changes, dtype, half = HEALTHY[name]
    serve(patch, "", dtype)
    run = trainer(folder, policy=model().bfloat16() if half else model(), **{**LONG, **changes, "max_steps": steps})
    run.train()
    assert run.state.global_step == steps
    filters = {"top_p", "top_k", "min_p", "repetition_penalty"} & changes.keys()
    return ({SAMPLED_WITH} if filters else set()) | ({EXCUSES[BFLOAT16]} if dtype else set())


@pytest.mark.parametrize(
    "name", only(["group decoding, adapter"], HEALTHY, ["adapter, filters, bfloat16 engine", "new adapter, autocast"])
)
def test_a_healthy_run_announces_what_is_true(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    true = announced_by_healthy_run(name, 2, tmp_path, monkeypatch)
    found = said()
    assert len(found) == len(true)
    assert all(any(part in sentence for sentence in found) for part in true)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_thousand_healthy_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    """1,100 steps over all rows of the table: none is stopped, and every logged sentence is true."""
    true = announced_by_healthy_run(name, HEALTHY[name][0], tmp_path, monkeypatch)
    true |= {EXCUSES[NO_AUTOCAST]} if "bf16" in HEALTHY[name][1] else set()
    assert [sentence for sentence in said() if not any(part in sentence for part in true)] == []


# ---- which batches and rows are compared


def test_the_step_alone_decides_which_batches_are_logged(tmp_path: Path) -> None:
    """A resumed run logs what an uninterrupted one does."""
    check = trainer(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=1)._generation_check
    for rows, iterations, due in ((16, 1, range(8)), (15, 1, range(0, 8, 2)), (5, 1, (0, 4)), (8, 2, (0, 1, 4, 5))):
        check.trainer.num_iterations = iterations
        found = []
        for step in range(8):
            check.trainer.state.global_step = step
            if check.is_due(rows):
                found.append(step)
        assert found == list(due)


def test_few_rows_are_recorded_after_the_first_batches(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    check, rows = run._generation_check, 32
    assert check.record_every(rows) == 1
    for batches in range(generation_check.FIRST + 1):
        recorded = {row: torch.zeros(0) for row in range(0, rows, check.record_every(rows))}
        check([[5]] * rows, [[7]] * rows, recorded)
        assert check.batches == batches + 1
    assert sorted(recorded) == [0, 16]
    assert [generation_check.compare_every(rows) for rows in (1, 16, 33, 64)] == [1, 16, 17, 32]


def test_group_decoding_is_verified_on_the_longest_completions_and_on_others() -> None:
    draw = random.Random(0)
    for count in [*range(1, 40), 64, 512]:
        lengths, rows = [draw.randint(1, 9) for _ in range(count)], list(range(0, 3 * count, 3))
        few = generation_check.verified_rows(lengths, rows)
        assert few == sorted(set(few) & set(rows))
        assert min(count, 9) <= len(few) <= 16
        assert len(few) == len(generation_check.verified_rows([1] * count, rows))  # the same on every rank
        assert sorted(lengths)[-8:] == sorted(sorted(lengths[row // 3] for row in few)[-8:])


def test_few_16_bit_tokens_wait_for_more(tmp_path: Path) -> None:
    """Fewer than 64 tokens of a rank are not judged, and agreement ends the wait."""
    check = trainer(tmp_path)._generation_check
    check.is_16bit = True
    few, agreed = Evidence(40, 24.0, 0.6, 14.4), Evidence(40, 0.4, 0.01, 0.004)
    check._judge([few])
    check._accept([agreed])
    check._judge([few])
    with pytest.raises(NotThePolicy, match=r"0\.6"):
        check._judge([few])


def test_scoring_an_earlier_adapter_leaves_the_adapter_unchanged(tmp_path: Path) -> None:
    run = trainer(tmp_path, **CONTINUED, max_completion_length=2, gradient_accumulation_steps=1)
    run.train()
    assert run._generation_check.adapters.kept.keys() == {1, 2}, "the last two of three steps"
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    trains = [parameter.requires_grad for parameter in run.model.parameters()]
    with run._generation_check.adapters.earlier():
        moved = [name for name, value in run.model.state_dict().items() if not torch.equal(value, before[name])]
    assert moved
    assert all("lora_" in name for name in moved)
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    assert [parameter.requires_grad for parameter in run.model.parameters()] == trains


# ---- what is not compared


UNCOMPARED: dict[str, dict[str, Any]] = {
    # a word of the reason, and the run
    "dropout": {"peft_config": adapter(lora_dropout=0.5)},
    "`generate`": {},
    "tokens and forwards": {"generation_kwargs": {"num_beams": 2}},
    "logit_bias": {"generation_kwargs": {"logit_bias": {5: 1.0}}, **SETTINGS},
}


@pytest.mark.parametrize("reason", only(["dropout", "`generate`", "logit_bias"], UNCOMPARED))
def test_what_cannot_be_compared_is_announced(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    serve(monkeypatch)
    policy = model()
    if reason == "`generate`":
        policy.generate = policy.generate
    trainer(tmp_path, policy=policy, max_steps=1, max_completion_length=4, **UNCOMPARED[reason]).train()
    (sentence,) = [one for one in said() if "whether" in one]
    assert reason in sentence


# ---- processors of `generate`


def reach(patch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Pass these fields to `generate` with those of the settings, as if published settings were not put aside."""
    stock = GenerationMixin._prepare_generation_config

    def filled(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared, rest = stock(self, *args, **kwargs)
        prepared.update(**fields)
        return prepared, rest

    patch.setattr(GenerationMixin, "_prepare_generation_config", filled)


UNNAMED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # keys that reach `generate`, the run, the cause
    "sequence_bias": ({"sequence_bias": [[[5], 50.0]]}, {}, "SequenceBiasLogitsProcessor"),
    "stock loop": ({"suppress_tokens": [7]}, {"generation": "off"}, "SuppressTokensLogitsProcessor"),
    "do_sample": ({"do_sample": False}, {}, "greedy_search"),
    "dropout": ({"min_p": 0.2}, {"peft_config": adapter(lora_dropout=0.5)}, "MinPLogitsWarper(min_p=0.2)"),
}


@pytest.mark.parametrize("name", only(["sequence_bias"], UNNAMED))
def test_a_setting_that_the_user_does_not_name_stops_the_run_at_the_step_that_it_reaches(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, changes, cause = UNNAMED[name]
    run = trainer(tmp_path, **SHORT, **changes)
    original = run._generate_and_score_completions

    def later(inputs: Any) -> Any:
        if run.state.global_step == 1:
            reach(monkeypatch, **fields)
        return original(inputs)

    run._generate_and_score_completions = later
    with pytest.raises(NotThePolicy) as caught:
        run.train()
    assert "step 1 " in str(caught.value)
    assert cause in str(caught.value)
    assert run.state.global_step == 1


def test_the_users_own_filters_are_announced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    serve(monkeypatch)
    trainer(tmp_path, top_k=12, **SHORT, **SETTINGS).train()
    (sentence,) = [one for one in said() if one.startswith(SAMPLED_WITH)]
    assert "top_k 12" in sentence


# ---- filters of an engine


def settings(**changes: Any) -> Any:
    values = {"generation_kwargs": None, "repetition_penalty": 1.0, "min_p": None, "top_k": 0, "top_p": 1.0}
    return SimpleNamespace(**{**values, "vllm_structured_outputs_regex": None, **changes})


HARMLESS = {"temperature": 2, "seed": 1, "stop": "x", "max_tokens": 3}


@pytest.mark.parametrize(
    ("changes", "processing", "unknown"),
    [
        ({"repetition_penalty": 1.2, "min_p": 0.1, "top_k": 7, "top_p": 0.8}, Processing(1.2, 0.1, 7, 0.8), ""),
        ({"top_k": 7, "generation_kwargs": {"top_k": -1, "top_p": 0.5}}, Processing(top_p=0.5), ""),
        ({"generation_kwargs": HARMLESS}, Processing(), ""),
        ({"generation_kwargs": {"logit_bias": {}, "bad_words": []}}, Processing(), "bad_words, logit_bias"),
        ({"vllm_structured_outputs_regex": "a+"}, Processing(), "vllm_structured_outputs_regex"),
    ],
)
def test_settings_of_an_engine_are_read_and_unknown_ones_named(
    changes: dict[str, Any], processing: Processing, unknown: str
) -> None:
    found, reason = Processing.of(settings(**changes))
    assert found == processing
    assert bool(found) == (processing != Processing())
    assert reason.startswith(unknown)
    assert bool(reason) == bool(unknown)


@pytest.mark.parametrize(
    "processing",
    [Processing(), Processing(top_k=5), Processing(top_p=0.8), Processing(1.4, 0.0, 12, 0.9), Processing(0.7, 0.1)],
    ids=str,
)
def test_processed_scores_are_those_of_generate(processing: Processing) -> None:
    policy = model().eval()
    torch.manual_seed(3)
    how = {"temperature": 0.8, "max_new_tokens": 8, "eos_token_id": None, **vars(processing)}
    outputs = {"return_dict_in_generate": True, "output_scores": True}
    made = policy.generate(input_ids=torch.tensor([[5, 9, 7, 5]]), do_sample=True, **how, **outputs)
    tokens = made.sequences[0]
    scores = torch.stack(made.scores, 1)[0].float().log_softmax(-1)
    expected = scores.gather(1, tokens[4:, None])[:, 0]
    with torch.no_grad():
        logits = policy(tokens[None]).logits[0, 3:-1].float()
    torch.testing.assert_close(processing.log_probs(logits, tokens, 0.8), expected, atol=1e-5, rtol=0)


def test_a_sampled_token_that_rounding_moves_outside_a_filter_keeps_its_probability() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    found = Processing(top_k=1).log_probs(logits, torch.tensor([0, 1]), 1.0)
    torch.testing.assert_close(found, torch.tensor([0.3 / 0.8]).log())
