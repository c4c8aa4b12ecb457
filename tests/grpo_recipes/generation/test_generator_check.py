"""The generation check: each fault that other trainers had is planted and named, and healthy runs raise no alarm."""

from __future__ import annotations

import logging
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.helpers import rescale_adapter_scale
from transformers import GenerationMixin
from transformers.generation import LogitsProcessorList

from grpo_recipes.generation import generator_check as generation_check
from grpo_recipes.generation.agreement import (
    BFLOAT16,
    EARLIER,
    NO_AUTOCAST,
    OFF,
    OTHER_WEIGHTS,
    REFERENCE,
    TWICE,
    UNPADDED,
    UNPROCESSED,
    Conclusion,
    Evidence,
    Fit,
    conclude,
)
from grpo_recipes.generation.hypotheses import Processing, Scorer, hypotheses
from grpo_recipes.generation.sampling_settings import ProcessorComparison
from grpo_recipes.process.faults import NotThePolicy
from tests.support import launching, tiny
from tests.support.architectures import adapter, trainer
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


# ---- planted faults: each stops the run within two steps, with its name

OFF_, TWICE_, EARLIER_, REFERENCE_ = (OTHER_WEIGHTS[name] for name in ("off", "twice", "earlier", "reference"))
STALE = "they agreed before"
PLANTED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    # the fault of the engine, the run, at which step it stops, what it names
    "TRL 1.16, LoRA and a server, continued adapter": ("off", CONTINUED, 0, OFF_),
    "TRL 1.16, LoRA and a server, new adapter": ("off", NEW, 1, OFF_),
    "unsloth 8701, adapter ignored": ("off", {**CONTINUED, "vllm_importance_sampling_correction": False}, 0, OFF_),
    "verl 7495, adapter never delivered": ("start", NEW, 1, OFF_),
    "verl 7495, continued adapter": ("start", CONTINUED, 1, EARLIER_),
    "TRL 5312, weights reloaded after sleep, LoRA": ("disk", NEW, 1, OFF_),
    "TRL 5312, full model and a reference": ("disk", {"beta": 0.04}, 1, REFERENCE_),
    "TRL 5312, full model": ("disk", {}, 1, STALE),
    "ms-swift 8233, adapter applied twice": ("twice", CONTINUED, 0, TWICE_),
    "ms-swift 8233, new adapter": ("twice", NEW, 1, TWICE_),
    "an update late, LoRA": ("ago", CONTINUED, 1, EARLIER_),
    "an update late, full model": ("ago", {}, 1, STALE),
}
QUICK = ("TRL 1.16, LoRA and a server, new adapter", "TRL 5312, full model")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in PLANTED])
def test_a_planted_fault_is_named_within_two_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    fault, changes, step, cause = PLANTED[name]
    serve(monkeypatch, fault)
    run = trainer(tmp_path, **SETTINGS, **changes)
    with pytest.raises(NotThePolicy) as caught:
        run.train()
    assert run.state.global_step == step
    assert f"at step {step} " in str(caught.value)
    assert cause in str(caught.value)
    others = [sentence for sentence in OTHER_WEIGHTS.values() if sentence != cause and sentence in str(caught.value)]
    # After one update a new adapter as it was a step ago is the adapter switched off.
    assert others == ([EARLIER_] if cause == OFF_ and changes is NEW else [])


@pytest.mark.parametrize("fault", ["off", pytest.param("twice", marks=pytest.mark.slow)])
def test_a_16_bit_engine_hides_no_fault(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    serve(monkeypatch, fault, torch.bfloat16)
    run = trainer(tmp_path, **SETTINGS, **CONTINUED)
    with pytest.raises(NotThePolicy, match=OTHER_WEIGHTS[fault]):
        run.train()
    assert run.state.global_step == 0


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("generation", ["auto", "off"])
def test_generate_without_the_adapter_stops_the_run(
    generation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = GenerationMixin.generate
    run = trainer(tmp_path, generation=generation, **CONTINUED)

    def without(self: Any, *args: Any, **kwargs: Any) -> Any:
        with run.model.disable_adapter():
            return stock(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", without)
    with pytest.raises(NotThePolicy, match=OFF_):
        run.train()
    assert run.state.global_step == 0


def loud(factor: float = 40) -> Any:
    """Return a model with log-probabilities so far apart that 16 bits move them by more than the tolerance."""
    policy = model()
    with torch.no_grad():
        policy.get_output_embeddings().weight.mul_(factor)
    return policy


def test_an_engine_that_16_bits_move_by_nats_stops_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy's own log-probabilities in bfloat16 differ as much, which is no excuse."""
    serve(monkeypatch, "", torch.bfloat16)
    run = trainer(tmp_path, policy=loud(1e6), **SETTINGS)
    with pytest.raises(
        NotThePolicy, match=r"at step 0 .* differ by ([1-9]|\d\d)(\.\d+)? on average, and no hypothesis"
    ):
        run.train()
    assert run._generation_check.baseline is None


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["auto", "off"])
def test_a_new_adapter_under_autocast_is_healthy(generation: str, tmp_path: Path, said: Any) -> None:
    """PEFT's `generate` runs without autocast: the loss rounds away a part of the adapter that `generate` keeps."""
    run = trainer(tmp_path, policy=loud(), bf16=True, generation=generation, max_steps=20, learning_rate=1e-3, **NEW)
    run.train()
    (sentence,) = [sentence for sentence in said() if "autocast" in sentence]
    assert sentence.startswith(
        "tokens are sampled from the policy without autocast, and the loss computes it with autocast"
    )
    assert sentence.endswith("`bf16: false` makes them alike")
    assert run._generation.is_verified or generation == "off"
    differences = [entry[MEAN] for entry in run.state.log_history if MEAN in entry]
    assert len(differences) == 20
    assert max(differences[1:]) < 1e-4  # float32 on both sides


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "steps"), [(None, 8), pytest.param(torch.bfloat16, 60, marks=pytest.mark.slow)])
def test_an_engine_with_the_adapter_merged_under_autocast_is_healthy(
    dtype: Any, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, "merged", dtype)
    run = trainer(tmp_path, policy=loud(), bf16=True, max_steps=steps, learning_rate=1e-3, **SETTINGS, **NEW)
    run.train()
    assert run.state.global_step == steps
    assert not run._generation_check.scorer.autocast


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["off", "twice"])
def test_autocast_hides_no_fault(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = GenerationMixin.generate
    run = trainer(tmp_path, policy=loud(), bf16=True, generation="off", max_steps=12, **NEW)

    def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
        wrong = run.model.disable_adapter() if fault == "off" else rescale_adapter_scale(run.model, 2)
        with wrong if run.state.global_step >= 9 else nullcontext():
            return stock(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", faulty)
    with pytest.raises(NotThePolicy, match=OTHER_WEIGHTS[fault]):
        run.train()
    assert run.state.global_step in (9, 10)  # an adapter of a few steps: 16 bits may hide it for one more


@pytest.mark.slow
def test_an_adapter_applied_twice_from_step_10_stops_the_run_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = GenerationMixin.generate
    run = trainer(tmp_path, generation="off", max_steps=20, **CONTINUED)

    def twice(self: Any, *args: Any, **kwargs: Any) -> Any:
        if run.state.global_step < 10:
            return stock(self, *args, **kwargs)
        with rescale_adapter_scale(run.model, 2):
            return stock(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", twice)
    with pytest.raises(NotThePolicy, match=TWICE_):
        run.train()
    assert run.state.global_step == 10


@pytest.mark.slow
def test_the_check_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    serve(monkeypatch, "off")
    run = trainer(tmp_path, generation_check=False, max_steps=2, **SETTINGS, **CONTINUED)
    run.train()
    assert run.state.global_step == 2
    assert said() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["ddp_cpu", pytest.param("zero3_cpu", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("fault", "begin", "cause"),
    [
        ("adapter", "the generator of rank 1 is not the policy: at step 0", OFF_),
        (
            "bias",
            "tokens are not drawn by rank 1 from the policy's distribution",
            "applies SequenceBiasLogitsProcessor",
        ),
    ],
)
def test_all_ranks_stop_if_one_generator_is_wrong(
    fault: str, begin: str, cause: str, layout: str, tmp_path: Path, extensions: str
) -> None:
    module = "tests.support.train_one_rank_wrong"
    launching.launch_module(layout, module, str(tmp_path), fault, TORCH_EXTENSIONS_DIR=extensions)
    first, second = [(tmp_path / f"said-{rank}.txt").read_text() for rank in (0, 1)]
    assert first == second
    assert first.startswith(begin)
    assert cause in first


# ---- tokens drawn from another distribution than the settings make of the policy's


def reach(patch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Pass these fields to `generate` with those of the settings, as if published settings were not put aside."""
    stock = GenerationMixin._prepare_generation_config

    def filled(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared, rest = stock(self, *args, **kwargs)
        prepared.update(**fields)
        return prepared, rest

    patch.setattr(GenerationMixin, "_prepare_generation_config", filled)


UNNAMED: dict[str, tuple[dict[str, Any], str]] = {
    "sequence_bias": ({"sequence_bias": [[[5], 50.0]]}, "`generate` applies SequenceBiasLogitsProcessor"),
    "suppress_tokens": ({"suppress_tokens": [7, 9]}, "`generate` applies SuppressTokensLogitsProcessor"),
    "min_p": ({"min_p": 0.1}, "`generate` applies MinPLogitsWarper(min_p=0.1) where the settings give nothing"),
    "top_k": ({"top_k": 20}, "`generate` applies TopKLogitsWarper(top_k=20) where the settings give nothing"),
    "num_beams": ({"num_beams": 2}, "the generation mode is beam_sample, not sample"),
    "do_sample": ({"do_sample": False}, "the generation mode is greedy_search, not sample"),
}
LOOPS = pytest.mark.parametrize("generation", ["auto", "off"])
ONE_LOOP = pytest.mark.parametrize("generation", only(["auto"], ["auto", "off"]))


@pytest.mark.one_case_in(3)
@ONE_LOOP
@pytest.mark.parametrize("name", UNNAMED)
def test_a_setting_that_the_user_does_not_name_stops_the_run(
    name: str, generation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    fields, cause = UNNAMED[name]
    run = trainer(tmp_path, generation=generation)
    reach(monkeypatch, **fields)
    with pytest.raises(NotThePolicy) as caught:
        run.train()
    assert run.state.global_step == 0
    sentence = str(caught.value)
    assert sentence.startswith(
        "tokens are not drawn from the policy's distribution under the settings of this run: at step 0 "
    )
    assert cause in sentence
    assert sentence.endswith(
        "look for a `generate` or logits processors that the model brings, or set `generation_check: false`"
    )


@ONE_LOOP
def test_a_published_filter_is_distinguished_from_the_users_own(
    generation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path, policy=model().bfloat16(), generation=generation, top_k=12, repetition_penalty=1.2)
    reach(monkeypatch, min_p=0.2)
    with pytest.raises(NotThePolicy, match=r"applies MinPLogitsWarper\(min_p=0.2\) where the settings give nothing"):
        run.train()


@ONE_LOOP
def test_a_processor_that_comes_later_stops_the_run_there(
    generation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path, generation=generation)
    original = run._generate_and_score_completions

    def later(inputs: Any) -> Any:
        if run.state.global_step == 2:
            reach(monkeypatch, suppress_tokens=[7, 9])
        return original(inputs)

    run._generate_and_score_completions = later
    with pytest.raises(NotThePolicy, match="at step 2 `generate` applies SuppressTokensLogitsProcessor"):
        run.train()


@pytest.mark.slow
def test_processors_are_compared_under_dropout_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    run = trainer(tmp_path, peft_config=adapter(lora_dropout=0.5))
    run.train()
    assert run.state.global_step == 3
    reach(monkeypatch, sequence_bias=[[[5], 50.0]])
    stopped = trainer(tmp_path, peft_config=adapter(lora_dropout=0.5))
    with pytest.raises(NotThePolicy, match="applies SequenceBiasLogitsProcessor"):
        stopped.train()


def test_a_processor_without_effect_is_announced_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    reach(monkeypatch, renormalize_logits=True)
    run = trainer(tmp_path)
    run.train()
    assert run.state.global_step == 3
    assert said() == [
        "`generate` applies LogitNormalization() where the settings give nothing: "
        "so far that has changed no probability"
    ]


def test_without_the_check_processors_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reach(monkeypatch, suppress_tokens=[7, 9])
    run = trainer(tmp_path, generation_check=False, max_steps=1)
    run.train()
    assert run.state.global_step == 1


OWN: dict[str, tuple[dict[str, Any], str]] = {
    "top_k and a penalty": (
        {"top_k": 12, "repetition_penalty": 1.2, "temperature": 0.8},
        "top_k 12, repetition_penalty 1.2",
    ),
    "min_p and top_p": ({"min_p": 0.05, "top_p": 0.9}, "top_p 0.9, min_p 0.05"),
    "generation_kwargs": (
        {"generation_kwargs": {"no_repeat_ngram_size": 2, "min_new_tokens": 3}},
        "min_new_tokens 3, no_repeat_ngram_size 2",
    ),
    "greedy": ({"generation_kwargs": {"do_sample": False}}, "do_sample False"),
    "a bias": ({"generation_kwargs": {"sequence_bias": [[[5], 2.0]]}}, "sequence_bias [[[5], 2.0]]"),
    "dropout": ({"peft_config": adapter(lora_dropout=0.5), "top_k": 12}, "top_k 12"),
}


@pytest.mark.one_case_in(2)
@ONE_LOOP
@pytest.mark.parametrize("name", only(["top_k and a penalty", "a bias"], OWN))
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)],
    ids=["float32", "bfloat16"],
)
def test_the_users_own_filters_are_announced_once(
    name: str, dtype: torch.dtype, generation: str, tmp_path: Path, said: Any
) -> None:
    changes, filters = OWN[name]
    run = trainer(tmp_path, policy=model().to(dtype), generation=generation, **changes)
    run.train()
    assert run.state.global_step == 3
    (sentence,) = [sentence for sentence in said() if "sampled after" in sentence]
    assert sentence.startswith(
        f"completions are sampled after {filters}, and the loss takes log-probabilities before: "
    )
    shift = float(sentence.split("differ by ")[1].split(" on average")[0])
    assert 0.01 < shift < 5
    assert [other for other in said() if other != sentence and "dropout" not in other] == []


@ONE_LOOP
def test_rows_that_a_stop_string_ends_are_compared_up_to_there(
    generation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    seen: list[tuple[int, int]] = []
    stock = ProcessorComparison.measured

    def counted(self: ProcessorComparison, completions: Any) -> Any:
        found = stock(self, completions)
        seen.append((found.shape[1], len(completions[0])))
        return found

    monkeypatch.setattr(ProcessorComparison, "measured", counted)
    stop = {"stop": list("abcdefghijklmnopqrst")}
    words = {"policy": tiny.policy(), "tokenizer": tiny.byte_tokenizer()}
    run = trainer(tmp_path, generation=generation, generation_kwargs=stop, top_k=200, **words)
    run.train()
    assert len(seen) == 3
    assert all(compared == length for compared, length in seen)
    assert min(length for _, length in seen) < 24
    (sentence,) = said()
    assert "sampled after top_k 200," in sentence


@ONE_LOOP
def test_a_run_without_filters_announces_nothing(generation: str, tmp_path: Path, said: Any) -> None:
    run = trainer(tmp_path, generation=generation, temperature=0.8, max_steps=2)
    run.train()
    assert said() == []


def test_filters_of_an_engine_are_announced_without_the_correction_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    serve(monkeypatch)
    run = trainer(tmp_path, top_k=12, max_steps=2, **SETTINGS, vllm_importance_sampling_correction=False)
    run.train()
    (sentence,) = said()
    assert sentence.startswith("completions are sampled after top_k 12, and the loss takes log-probabilities before")


def test_the_users_own_beams_are_announced_once(tmp_path: Path, said: Any) -> None:
    run = trainer(tmp_path, generation_kwargs={"num_beams": 2})
    run.train()
    assert run.state.global_step == 3
    assert [sentence for sentence in said() if "plain sampling" in sentence] == [
        "completions are generated by beam_sample, and the loss takes the log-probabilities of plain sampling: the "
        "difference for the sampled tokens is not known"
    ]


def test_processors_are_not_compared_under_guidance(tmp_path: Path, said: Any) -> None:
    run = trainer(tmp_path, generation="off", max_steps=2, generation_kwargs={"guidance_scale": 1.5})
    run.train()
    assert run.state.global_step == 2
    assert said()[0].startswith(
        "completions are sampled with guidance_scale 1.5, and the loss takes log-probabilities without"
    )
    assert "`guidance_scale` runs the model once more" in said()[0]


def test_a_generate_of_the_models_own_is_not_compared(tmp_path: Path, said: Any) -> None:
    policy = model()
    policy.generate = policy.generate
    run = trainer(tmp_path, policy=policy, max_steps=2)
    run.train()
    assert run.state.global_step == 2
    first, second = said()
    assert first.endswith(
        "is not checked: `generate` is the model's own, or its tokens and forwards do not go together"
    )
    assert second.startswith("the logits processors of `generate` are not checked: `generate` is the model's own")


def test_a_loop_that_draws_without_processors_is_announced_as_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    stock = GenerationMixin._sample

    def without(self: Any, *args: Any, logits_processor: Any, **kwargs: Any) -> Any:
        return stock(self, *args, logits_processor=LogitsProcessorList(), **kwargs)

    monkeypatch.setattr(GenerationMixin, "_sample", without)
    run = trainer(tmp_path, generation="off", max_steps=2)
    run.train()
    (sentence,) = said()
    assert sentence.startswith("the logits processors of `generate` are not checked: ")


def test_processors_are_compared_on_the_batches_that_are_due(tmp_path: Path) -> None:
    check = trainer(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=1)._generation_check
    assert check.processor_comparison(4).rows == [0]
    assert check.processor_comparison(32).rows == [0, 16]
    check.trainer.state.global_step = 1
    assert check.processor_comparison(4) is not None  # one of the first batches of a launch
    check.batches = generation_check.FIRST
    assert check.processor_comparison(4) is None
    check.trainer.state.global_step = 4
    assert check.processor_comparison(4) is not None


# ---- healthy runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        pytest.param({**NEW, "top_p": 0.9, "top_k": 12}, torch.bfloat16, marks=pytest.mark.slow),
        ({**CONTINUED, "temperature": 0.7}, None),
        pytest.param({"min_p": 0.05, "repetition_penalty": 1.3}, None, marks=pytest.mark.slow),
        pytest.param({"beta": 0.04}, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_a_healthy_engine(
    changes: dict[str, Any], dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    serve(monkeypatch, "", dtype)
    run = trainer(tmp_path, **SETTINGS, **changes)
    run.train()
    assert run.state.global_step == 3
    sentences = [sentence for sentence in said() if "can't tell" not in sentence and "is the policy" not in sentence]
    assert len([s for s in sentences if "computes in 16 bits and the policy in 32" in s]) == (dtype is not None)
    processed = [s for s in sentences if "huggingface/trl#6789" in s]
    assert len(processed) == bool(Processing.of(run.args)[0])
    assert len(sentences) == len(processed) + (dtype is not None)


LONG = {"learning_rate": 2e-3, "num_generations": 4, "logging_steps": 50}
HEALTHY: dict[str, tuple[int, dict[str, Any], Any, bool]] = {
    # steps, the run, the engine's dtype, whether the policy is in bfloat16
    "new adapter, bfloat16 engine": (200, {**SETTINGS, **NEW}, torch.bfloat16, False),
    "adapter, top_p and top_k, bfloat16 engine": (
        200,
        {**SETTINGS, **CONTINUED, "top_p": 0.9, "top_k": 12},
        torch.bfloat16,
        False,
    ),
    "full, min_p, penalty": (100, {**SETTINGS, "min_p": 0.05, "repetition_penalty": 1.2}, None, False),
    "full and a reference, both bfloat16": (150, {**SETTINGS, "beta": 0.04, "temperature": 0.8}, None, True),
    "group decoding, bfloat16": (100, {}, None, True),
    "group decoding, adapter": (100, {**NEW, "top_p": 0.9}, None, False),
    "new adapter, autocast": (100, {**NEW, "bf16": True}, None, False),
    "stock loop, adapter": (100, {**CONTINUED, "generation": "off"}, None, False),
    "full, bfloat16 engine, small batch": (
        50,
        {**SETTINGS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_completion_length": 6},
        torch.bfloat16,
        False,
    ),
}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_thousand_healthy_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    """1,100 steps over all rows of the table: none is stopped, and every logged sentence is true."""
    steps, changes, dtype, half = HEALTHY[name]
    serve(monkeypatch, "", dtype)
    run = trainer(tmp_path, policy=model().bfloat16() if half else model(), max_steps=steps, **{**LONG, **changes})
    run.train()
    assert run.state.global_step == steps
    known = ("can't tell yet", "is the policy", "computes in 16 bits and the policy in 32", "huggingface/trl#6789")
    known = (*known, "without autocast") if "bf16" in changes else known
    known = (*known, "are sampled after top_p 0.9") if changes.get("top_p") and "use_vllm" not in changes else known
    assert [sentence for sentence in said() if not any(part in sentence for part in known)] == []


def test_unprocessed_log_probabilities_of_a_server_are_the_policys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    """The check expects log-probabilities of a truncated distribution, and the server returns untruncated ones."""
    serve(monkeypatch)
    run = trainer(tmp_path, max_steps=1, **SETTINGS)
    run._generation_check.scorer.processing = Processing(top_p=0.5)
    run.train()
    assert run._generation_check.scorer.processing is None


@pytest.mark.slow
def test_a_new_adapter_is_reported_once_the_check_can_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    serve(monkeypatch)
    run = trainer(tmp_path, **SETTINGS, **NEW)
    run.train()
    assert said() == ["step 1: the generator is the policy"]


@pytest.mark.slow
def test_an_adapter_that_stays_unclear_is_named_after_some_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    serve(monkeypatch)
    monkeypatch.setattr("grpo_recipes.generation.generator_check.UNCLEAR_STEPS", 2)
    run = trainer(tmp_path, **{**SETTINGS, **NEW, "learning_rate": 0.0, "max_steps": 4})
    run.train()
    (sentence,) = said()
    assert sentence.startswith(f"step 2: can't tell yet whether the generator is the policy or {OFF_} or {TWICE_}")


@pytest.mark.slow
def test_scoring_an_earlier_adapter_leaves_the_adapter_unchanged(tmp_path: Path) -> None:
    run = trainer(tmp_path, **CONTINUED)
    run.train()
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    trains = [parameter.requires_grad for parameter in run.model.parameters()]
    check = run._generation_check
    with check.adapters.earlier():
        moved = [name for name, value in run.model.state_dict().items() if not torch.equal(value, before[name])]
    assert moved
    assert all("lora_" in name for name in moved)
    run.model.train()
    run._generate_single_turn([[5, 6], [7]], None, {}, 1)
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    assert [parameter.requires_grad for parameter in run.model.parameters()] == trains


@pytest.mark.slow
def test_dropout_and_continuous_batching_are_not_compared(tmp_path: Path, said: Any) -> None:
    dropping = trainer(tmp_path, peft_config=adapter(lora_dropout=0.5), max_steps=1)
    dropping.train()
    batching = trainer(tmp_path, use_transformers_continuous_batching=True, max_steps=1)
    batching.train()
    first, second = said()
    assert "is not checked: they are sampled with dropout" in first
    assert "is not checked: the generator gives no log-probabilities" in second


def test_a_small_batch_is_compared_at_the_same_steps_after_a_resume(tmp_path: Path) -> None:
    check = trainer(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=1)._generation_check
    due = []
    for step in range(9):
        check.trainer.state.global_step = step
        due.append(check.is_due(4))
    assert due == [True, False, False, False, True, False, False, False, True]
    assert check.is_due(64)
    check.trainer.num_iterations = 2  # a generation serves two steps
    due = []
    for step in range(0, 18, 2):
        check.trainer.state.global_step = step
        due.append(check.is_due(4))
    assert due == [True, False, False, False, True, False, False, False, True]
    watched = {rows: list(range(0, rows, generation_check.compare_every(rows))) for rows in (1, 16, 33, 64)}
    assert watched == {1: [0], 16: [0], 33: [0, 17], 64: [0, 32]}


# ---- conclusions


def evidence(**others: Fit) -> Evidence:
    """Return evidence of a thousand tokens whose log-probabilities differ by 0.1."""
    return Evidence(1000, 100.0, 0.2, 10.0, others)


@pytest.mark.parametrize(("is_float32", "limit"), [(True, 20.0), (False, 5.0)])
def test_the_multiple_of_the_baseline_that_stops_a_run(is_float32: bool, limit: float) -> None:
    found = evidence()
    assert conclude(found, is_float32=is_float32, baseline=found.mean / (1.02 * limit)).is_wrong
    assert not conclude(found, is_float32=is_float32, baseline=found.mean / (0.98 * limit)).is_wrong
    gross = Evidence(1000, 510.0, 2.0, 300.0)
    assert conclude(gross, is_float32=is_float32, baseline=None).is_wrong
    assert not conclude(Evidence(1000, 490.0, 2.0, 300.0), is_float32=is_float32, baseline=None).is_wrong


@pytest.mark.parametrize(
    ("found", "baseline", "wrong", "names"),
    [
        (Evidence(1000, 0.01, 9e-5, 1e-6), None, False, ()),
        (evidence(), None, False, ()),  # nothing explains it, and there is no baseline yet
        (evidence(), 0.001, True, ()),
        (evidence(), 0.09, False, ()),
        (evidence(off=Fit(10.0, 0.1, 100.0)), None, True, (OFF,)),
        (evidence(off=Fit(10.0, 6.0, 100.0)), None, False, ()),
        (evidence(off=Fit(10.0, 4.0, 9.0), twice=Fit(10.0, 1.0, 9.0)), None, True, (TWICE,)),
        (evidence(off=Fit(10.0, 1.0, 9.0), earlier=Fit(10.0, 1.0, 9.0)), None, True, (OFF, EARLIER)),
        (evidence(bfloat16=Fit(4.0, 12.0, 40.0)), None, False, (BFLOAT16,)),
        (evidence(bfloat16=Fit(0.4, 10.0, 4.0)), 1e-6, True, ()),
        (evidence(off=Fit(10.0, 0.1, 1.0), bfloat16=Fit(4.0, 12.0, 90.0)), None, True, (OFF,)),
        (evidence(unprocessed=Fit(10.0, 0.1, 1.0)), None, False, (UNPROCESSED,)),
        (evidence(unpadded=Fit(10.0, 0.1, 1.0), off=Fit(9.0, 8.0, 1.0)), None, False, (UNPADDED,)),
    ],
)
def test_conclusions_in_float32(found: Evidence, baseline: Any, wrong: bool, names: tuple[str, ...]) -> None:
    conclusion = conclude(found, is_float32=True, baseline=baseline)
    assert (conclusion.is_wrong, conclusion.names) == (wrong, names)


@pytest.mark.parametrize(("mean", "wrong"), [(0.49, False), (0.51, True), (3.0, True)])
def test_no_dtype_explains_a_large_difference(mean: float, wrong: bool) -> None:
    """A policy that bfloat16 moves as far as the generator: the first batch would become the baseline."""
    found = Evidence(1000, 1000 * mean, 9.0, 1000.0, {BFLOAT16: Fit(1000.0, 2000.0, 1000 * mean)})
    assert conclude(found, is_float32=True, baseline=None).is_wrong == wrong
    # The same with a 16-bit policy, and with a baseline that no dtype explains either.
    for baseline in (None, 0.45):
        for is_float32 in (False, True):
            unexplained = Evidence(1000, 1000 * mean, 9.0, 1000.0)
            assert conclude(unexplained, is_float32=is_float32, baseline=baseline).is_wrong == wrong


def test_three_nats_on_the_first_batch_stop_the_run_and_are_no_baseline(tmp_path: Path) -> None:
    check = trainer(tmp_path)._generation_check
    with pytest.raises(NotThePolicy, match=r"differ by 3 on average, and no hypothesis"):
        check._judge([Evidence(1000, 3000.0, 9.0, 1e4, {BFLOAT16: Fit(1e4, 2e4, 3000.0)})])
    assert check.baseline is None
    # A difference below the ceiling may become the baseline, and two times as much is still beyond the ceiling.
    check._judge([off(1000, 0.45, 0.0)])
    assert check._is_unusual(off(1000, 0.6, 0.0))
    with pytest.raises(NotThePolicy, match=r"differ by 0\.6 on average"):
        check._judge([off(1000, 0.6, 0.0)])


@pytest.mark.parametrize("baseline", [None, 0.01])
def test_a_difference_that_is_no_number_is_never_the_policy(baseline: float | None) -> None:
    nan = float("nan")
    found = Evidence(1000, nan, nan, nan, {BFLOAT16: Fit(nan, nan, nan), OFF: Fit(nan, nan, nan)})
    for is_float32 in (False, True):
        assert conclude(found, is_float32=is_float32, baseline=baseline).is_wrong


def test_16_bit_differences_below_the_tolerance_stop_nothing() -> None:
    small = Evidence(1000, 20.0, 0.2, 1.0, {OFF: Fit(1.0, 0.1, 20.0)})
    conclusion = conclude(small, is_float32=False, baseline=None)
    assert (conclusion.is_wrong, conclusion.names, conclusion.unclear) == (False, (OFF,), (OFF,))
    rounding = Evidence(1000, 20.0, 0.2, 1.0, {UNPADDED: Fit(1.0, 0.1, 20.0)})
    assert conclude(rounding, is_float32=False, baseline=None).names == ()


@pytest.mark.parametrize(
    ("found", "is_float32", "conclusion"),
    [
        # Within the tolerance: in float32 at once, in 16 bits after another computation repeated the rounding.
        (Evidence(100, 1e-3, 5e-5, 1e-8, {OFF: Fit(1e-9, 2e-8, 1.0)}), True, Conclusion()),
        (Evidence(100, 1.0, 0.1, 1.0, {UNPADDED: Fit(1.0, 0.1, 1.0)}), False, Conclusion()),
        # Beyond it: by autocast, by another computation, by other weights, by the dtype, and by nothing.
        (
            Evidence(100, 9.0, 0.1, 1.0, {NO_AUTOCAST: Fit(1.0, 0.25, 1.0)}),
            True,
            Conclusion(False, (NO_AUTOCAST,), (), 0.75),
        ),
        (Evidence(100, 9.0, 0.1, 1.0, {UNPADDED: Fit(1.0, 0.25, 1.0)}), True, Conclusion(False, (UNPADDED,), (), 0.75)),
        (Evidence(100, 9.0, 0.1, 1.0, {TWICE: Fit(1.0, 0.25, 1.0)}), True, Conclusion(True, (TWICE,), (), 0.75)),
        (Evidence(100, 9.0, 0.1, 1.0, {BFLOAT16: Fit(1.0, 2.0, 3.0)}), True, Conclusion(False, (BFLOAT16,))),
        (Evidence(100, 9.0, 0.1, 1.0, {BFLOAT16: Fit(1.0, 2.0, 2.9)}), True, Conclusion()),
        (Evidence(100, 60.0, 0.9, 1.0), True, Conclusion(True)),
    ],
)
def test_hypotheses_that_are_not_excluded_accompany_every_conclusion(
    found: Evidence, is_float32: bool, conclusion: Conclusion
) -> None:
    """A hypothesis is excluded beyond 4 times the policy's squared distance. Another computation is no doubt."""
    limit = 4 * found.square
    fits = {**found.fits, EARLIER: Fit(1e9, limit * 1.01, 1.0), REFERENCE: Fit(1e9, limit, 1.0)}
    doubted = [name for name in fits if name in (OFF, TWICE, REFERENCE)]
    expected = replace(conclusion, unclear=tuple(doubted))
    assert conclude(replace(found, fits=fits), is_float32=is_float32, baseline=None) == expected


def test_noise_is_never_named() -> None:
    """1,000 draws of independent noise on tokens that a hypothesis moves, at any ratio of noise to movement."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        noise = torch.randn(64, generator=generator) * 0.1
        scale = 10 ** (4 * torch.rand(1, generator=generator) - 2)
        moved = torch.randn(64, generator=generator) * 0.1 * scale
        square, left = noise.square().sum().item(), (noise - moved).square().sum().item()
        other = Fit(moved.square().sum().item(), left, moved.abs().sum().item())
        found = Evidence(64, noise.abs().sum().item(), noise.abs().max().item(), square, {OFF: other})
        assert conclude(found, is_float32=False, baseline=None).names == ()


# ---- when hypotheses are computed, and how the evidence of several batches is added


def off(tokens: int, size: float, explained: float, *names: str) -> Evidence:
    """Return evidence of tokens that differ by `size`, of which each hypothesis in `names` explains a share."""
    square = tokens * size**2
    other = Fit(square, (1 - explained) * square, tokens * size)
    return Evidence(tokens, tokens * size, size, square, dict.fromkeys(names, other))


def test_the_batches_on_which_hypotheses_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first four, every sixteenth compared one, and those of an unusual difference. All ranks enter the log."""
    check = trainer(tmp_path)._generation_check
    prompts, recorded = [[5]] * 64, {row: torch.zeros(1) for row in range(64)}
    ordinary, explored = [off(10, 1e-6, 0.0), off(30, 2e-6, 0.0)], []
    unusual = [off(10, 1e-6, 0.0), off(30, 2e-4, 0.0)]
    monkeypatch.setattr(check, "_rows", lambda prompts, completions, recorded: (len(recorded), None))
    monkeypatch.setattr(check, "_measure", lambda rows, picked: unusual if batch == 21 else ordinary)
    monkeypatch.setattr(check, "_explore", lambda rows, picked: explored.append((batch, rows)) or ordinary)
    for batch in range(1, 49):
        mean, largest = check(prompts, [[7]] * 64, recorded)
        assert (mean, largest) == pytest.approx((6.01e-3 / 40, 2e-4) if batch == 21 else (1.75e-6, 2e-6))
    assert explored == [(number, 8) for number in (1, 2, 3, 4, 16, 21, 32, 48)]


def test_few_16_bit_tokens_wait_for_more_with_the_same_hypotheses(tmp_path: Path) -> None:
    check = trainer(tmp_path)._generation_check
    check.is_16bit = True
    check._judge([off(40, 0.2, 0.9, OFF)])
    check._judge(
        [off(40, 0.2, 0.9, OFF, EARLIER)]
    )  # there is an earlier adapter now, and 40 tokens alone do not suffice
    with pytest.raises(NotThePolicy, match=f"{OFF_} or {EARLIER_}"):
        check._judge([off(40, 0.2, 0.9, OFF, EARLIER)])


def test_an_adapter_that_rounding_removes_is_announced_once(tmp_path: Path, said: Any) -> None:
    check = trainer(tmp_path)._generation_check
    check.is_16bit = True
    for _ in range(2):
        check._judge([off(100, 0.02, 0.9, OFF)])
    (sentence,) = [sentence for sentence in said() if "nearer to those of" in sentence]
    assert f"nearer to those of {OFF_} than to the policy's" in sentence


def test_only_the_compared_rows_are_recorded_after_the_first_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = trainer(tmp_path), []
    monkeypatch.setattr(type(run._generation_check), "__call__", lambda self, *given: seen.append(sorted(given[2])))
    run._generation.is_verified = True
    run.model.train()
    for run._generation_check.batches in (generation_check.FIRST - 1, generation_check.FIRST):
        run._generate_single_turn([[5, 6]] * 32, None, {}, 4)
    assert seen == [list(range(32)), [0, 16]]


def test_group_decoding_is_verified_on_the_longest_completions_and_on_others() -> None:
    draw = random.Random(0)
    for count in [*range(1, 40), 64, 512]:
        lengths, rows = [draw.randint(1, 9) for _ in range(count)], list(range(0, 3 * count, 3))
        few = generation_check.verified_rows(lengths, rows)
        assert few == sorted(set(few) & set(rows))
        assert min(count, 9) <= len(few) <= 16
        assert len(few) == len(generation_check.verified_rows([1] * count, rows))  # the same on every rank
        assert sorted(lengths)[-8:] == sorted(sorted(lengths[row // 3] for row in few)[-8:])


def test_a_large_first_batch_is_verified_on_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a batch in TRL's layout would take longer than a step."""
    run, scored, score = trainer(tmp_path), [], Scorer.__call__

    def counted(self: Scorer, model: Any, rows: Any, size: int) -> Any:
        scored.append(len(rows.input_ids))
        return score(self, model, rows, size)

    monkeypatch.setattr(Scorer, "__call__", counted)
    run.model.train()
    run._generate_single_turn([[5, 6]] * 64, None, {}, 4)
    assert run._generation.is_verified
    assert scored[0] == max(scored) == 16


# ---- how tokens are scored


def test_the_settings_by_which_an_engine_changes_logits() -> None:
    plain = SimpleNamespace(
        generation_kwargs=None,
        repetition_penalty=1.0,
        min_p=None,
        top_k=-1,
        top_p=1.0,
        vllm_structured_outputs_regex=None,
    )
    assert Processing.of(plain) == (Processing(), "")
    assert not Processing()
    assert str(Processing(0.7, 0.05, 12, 0.9)) == "repetition_penalty 0.7, min_p 0.05, top_k 12, top_p 0.9"


@pytest.mark.parametrize(
    "processing",
    [Processing(), Processing(top_k=5), Processing(top_p=0.8), Processing(1.4, 0.05, 12, 0.9), Processing(0.7)],
    ids=str,
)
def test_processed_scores_are_those_of_generate(processing: Processing) -> None:
    policy = model().eval()
    ids, torch_seed = torch.tensor([[5, 9, 7, 5]]), 3
    torch.manual_seed(torch_seed)
    # vLLM filters by min_p first, transformers last: with both kinds the sets of tokens may differ.
    vllm_like = processing if not (processing.min_p and processing.top_p < 1) else Processing(1.4, 0.0, 12, 0.9)
    made = policy.generate(
        input_ids=ids,
        do_sample=True,
        temperature=0.8,
        max_new_tokens=12,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
        **vars(vllm_like),
    )
    tokens = made.sequences[0]
    scores = torch.stack(made.scores, 1)[0].float().log_softmax(-1)
    expected = scores.gather(1, tokens[4:, None])[:, 0]
    with torch.no_grad():
        logits = policy(tokens[None]).logits[0, 3:-1].float()
    torch.testing.assert_close(vllm_like.log_probs(logits, tokens, 0.8), expected, atol=1e-5, rtol=0)


def test_keys_that_may_change_scores_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    known = trainer(tmp_path, generation_kwargs={"seed": 5, "top_p": 0.9}, **SETTINGS)
    assert known._generation_check.scorer.processing == Processing(top_p=0.9)
    assert known._generation_check.reason == ""
    unknown = trainer(tmp_path, generation_kwargs={"logit_bias": {5: 1.0}}, **SETTINGS)
    assert "logit_bias may change the scores" in unknown._generation_check.reason


def test_the_hypotheses_of_a_full_model_and_of_an_adapter(tmp_path: Path) -> None:
    full = trainer(tmp_path, beta=0.04)._generation_check
    lora = trainer(tmp_path, **CONTINUED)._generation_check
    assert isinstance(lora.policy, PeftModel)
    named = [list(hypotheses(c.trainer, c.adapters, c.scorer, True)) for c in (full, lora)]
    assert named == [["reference", "bfloat16", "unpadded"], ["off", "twice", "bfloat16", "unpadded"]]
    assert generation_check.COMPARED == 2
