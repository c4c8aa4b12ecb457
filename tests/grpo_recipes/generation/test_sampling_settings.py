"""The processors of `generate` compared with those of the user's settings: differences are found and named."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList, TopPLogitsWarper
from transformers.generation import (
    MinPLogitsWarper,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
)

from grpo_recipes.generation import sampling_settings
from grpo_recipes.generation.groups import Turn, decoding
from grpo_recipes.generation.sampling_settings import ProcessorComparison
from tests.support.architectures import SAMPLED, SETTINGS, batch, config, tiny
from tests.support.grids import only

LOOPS = pytest.mark.parametrize("grouped", [True, False], ids=["groups", "stock"])
ROWS = [0, 5, 15]
OWN: dict[str, dict[str, Any]] = {
    **SETTINGS,
    "ends": {**SAMPLED, "forced_eos_token_id": 1, "min_length": 14, "begin_suppress_tokens": [5]},
    "prompt": {**SAMPLED, "encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2},
    "greedy, penalty": {"do_sample": False, "repetition_penalty": 1.3},
}
"""Settings of the user, by name."""


def compared(
    policy: Any, given: GenerationConfig, asked: GenerationConfig, grouped: bool, temperature: float = 1.0
) -> tuple[ProcessorComparison, torch.Tensor, list[list[int]]]:
    """Generate with `given` where the settings are `asked`. Return the comparison, its numbers and the completions."""
    inputs, comparison = batch(), ProcessorComparison(asked, temperature, ROWS)
    turn = Turn(grouped=grouped, temperature=temperature, comparison=comparison)
    torch.manual_seed(0)
    with torch.no_grad(), decoding(policy, turn):
        tokens = policy.generate(**inputs, generation_config=given)
    assert not turn.declined
    assert turn.log_probs is None
    assert not policy._forward_hooks
    assert "_get_logits_processor" not in vars(policy)
    ends = set(given.eos_token_id)
    completions = [until_end(row, ends) for row in tokens[:, inputs["input_ids"].shape[1] :].tolist()]
    return comparison, comparison.measured(completions), completions


def until_end(ids: list[int], ends: set[int]) -> list[int]:
    """Return a completion up to the token that ends it."""
    return ids[: next((n + 1 for n, token in enumerate(ids) if token in ends), len(ids))]


@pytest.mark.one_case_in(4)
@LOOPS
@pytest.mark.parametrize("how", only([name for name in OWN if name != "watermark"], OWN))
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)],
    ids=["float32", "bfloat16"],
)
def test_the_settings_own_processors_change_nothing(how: str, dtype: torch.dtype, grouped: bool) -> None:
    policy, given = tiny("Qwen2Config").to(dtype), config(**OWN[how])
    comparison, found, completions = compared(policy, given, given, grouped)
    assert comparison.difference == comparison.other_mode == ""
    assert found.shape == (2, sum(len(completions[row]) for row in ROWS))
    assert found[0].max() < 1e-6
    assert (found[1].max() > 0) == bool(comparison.filters())


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    # arguments of `generate` beside the settings, and the processor that is named
    "sequence_bias": ({"sequence_bias": [[[5], 50.0]]}, "SequenceBiasLogitsProcessor"),
    "suppress_tokens": ({"suppress_tokens": [9]}, "SuppressTokensLogitsProcessor"),
    "min_p": ({"min_p": 0.05}, "MinPLogitsWarper(min_p=0.05)"),
    "top_k": ({"top_k": 10}, "TopKLogitsWarper(top_k=10)"),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 1}, "NoRepeatNGramLogitsProcessor"),
    "min_new_tokens": ({"min_new_tokens": 3}, "MinNewTokensLengthLogitsProcessor"),
    "temperature": ({"temperature": 0.5}, "TemperatureLogitsWarper(temperature=0.5)"),
    "do_sample": ({"do_sample": False}, ""),
}


@pytest.mark.one_case_in(4)
@LOOPS
@pytest.mark.parametrize("name", only(["sequence_bias", "min_p", "do_sample"], OTHERS))
@pytest.mark.parametrize("asked", ["sampled", "repetition penalty"])
def test_a_processor_that_the_settings_do_not_name_is_found(name: str, asked: str, grouped: bool) -> None:
    more, named = OTHERS[name]
    comparison, found, _ = compared(
        tiny("Qwen2Config"), config(**{**SETTINGS[asked], **more}), config(**SETTINGS[asked]), grouped
    )
    assert found[0].max() > 1e-3
    assert named in comparison.difference
    assert "RepetitionPenalty" not in comparison.difference


@LOOPS
def test_a_filter_of_the_settings_that_does_not_reach_generate_is_found(grouped: bool) -> None:
    settings = config(**SETTINGS["filters"])
    comparison, found, _ = compared(tiny("Qwen2Config"), config(temperature=0.7), settings, grouped)
    assert found[0].max() > 1e-2
    assert comparison.difference.startswith("`generate` applies nothing where the settings give TopKLogitsWarper")


@LOOPS
def test_a_processor_of_the_models_own_is_found(grouped: bool) -> None:
    policy = tiny("Qwen2Config")

    class Own(type(policy)):  # type: ignore[misc]
        def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
            return LogitsProcessorList(
                [*super()._get_logits_processor(*args, **kwargs), SuppressTokensLogitsProcessor([7])]
            )

    policy.__class__ = Own
    comparison, found, _ = compared(policy, config(), config(), grouped)
    assert "SuppressTokensLogitsProcessor" in comparison.difference
    assert found[0].max() > 1e-4


@LOOPS
def test_a_processor_that_computes_something_else_is_found(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists of processors are alike, and the numbers differ."""
    settings = config(top_p=0.9)
    policy, comparison = tiny("Qwen2Config"), ProcessorComparison(settings, 1.0, ROWS)
    stock = GenerationMixin._get_logits_processor
    turn = Turn(grouped=grouped, comparison=comparison)

    def sharpened(self: Any, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        found = stock(self, *args, **kwargs)
        for processor in found:
            processor.__class__ = type("TopPLogitsWarper", (Sharp,), {})
        return found

    policy._get_logits_processor = sharpened.__get__(policy)
    with torch.no_grad(), decoding(policy, turn):
        tokens = policy.generate(**batch(), generation_config=settings)
    assert comparison.difference == ""
    assert comparison.measured(tokens[:, 11:].tolist())[0].mean() > 5e-2
    assert vars(policy)["_get_logits_processor"].__func__ is sharpened


class Sharp(TopPLogitsWarper):
    """Processor that makes another distribution than its attributes describe."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return super().__call__(input_ids, scores) * 3


def test_finished_rows_are_not_compared_in_the_stock_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_settings, "LOOK_FOR_ENDS", 2)
    sizes: list[int] = []
    stock = ProcessorComparison.compare
    monkeypatch.setattr(
        ProcessorComparison, "compare", lambda self, rows, *rest: sizes.append(len(rows)) or stock(self, rows, *rest)
    )
    settings = config()
    _, found, completions = compared(tiny("Qwen2Config"), settings, settings, False)
    lengths = sorted(len(completions[row]) for row in ROWS)
    assert lengths[0] < lengths[-1]
    assert found.shape[1] == sum(lengths)
    assert sum(lengths) <= sum(sizes) <= sum(lengths) + len(ROWS)


def test_beam_search_is_another_generation_mode() -> None:
    policy, settings = tiny("Qwen2Config"), config()
    comparison = ProcessorComparison(settings, 1.0, ROWS)
    with torch.no_grad(), decoding(policy, Turn(comparison=comparison)):
        policy.generate(**batch(), generation_config=config(num_beams=2))
    assert comparison.other_mode == "the generation mode is beam_sample, not sample"


def test_the_settings_that_the_loss_does_not_apply_are_named() -> None:
    policy = tiny("Qwen2Config")
    for more, temperature, names in (
        ({}, 1.0, []),
        ({"temperature": 0.7}, 0.7, []),
        ({"temperature": 0.7}, 1.0, ["temperature 0.7"]),
        ({"do_sample": False, "top_k": 12}, 1.0, ["do_sample False"]),
        ({"min_p": 0.02, "top_k": 12, "top_p": 1.0}, 1.0, ["min_p 0.02", "top_k 12"]),
        ({"min_p": 0.02, "typical_p": 0.9}, 1.0, ["min_p 0.02", "typical_p 0.9"]),
        ({"repetition_penalty": 1.2, "min_new_tokens": 3}, 1.0, ["min_new_tokens 3", "repetition_penalty 1.2"]),
    ):
        given = config(**more)
        comparison, found, _ = compared(policy, given, given, True, temperature)
        assert sorted(comparison.filters()) == names
        assert (found[1].max() > 0) == bool(names)


@LOOPS
def test_the_shift_is_the_sampled_tokens_own(grouped: bool) -> None:
    """Greedy decoding picks each token with certainty, so the shift equals its log-probability."""
    policy, settings = tiny("Qwen2Config"), config(do_sample=False)
    comparison, found, completions = compared(policy, settings, settings, grouped, 0.7)
    inputs, expected = batch(), []
    for row in ROWS:
        prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist()
        ids = torch.tensor([prompt + completions[row]])
        with torch.no_grad():
            log_probs = (policy(ids).logits[0, len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
        expected.append(-log_probs.gather(1, ids[0, len(prompt) :, None])[:, 0])
    assert comparison.difference == ""
    torch.testing.assert_close(found[1], torch.cat(expected), atol=1e-5, rtol=0)


# ---- calls by hand


class Own(LogitsProcessor):
    """Processor with a setting, a tensor, and attributes that no setting decides."""

    def __init__(self) -> None:
        self.size, self.ids = 3, torch.tensor([[1, 2]])
        self._state, self.policy = 4, torch.nn.Linear(1, 1)


def test_a_processor_is_described_by_its_settings() -> None:
    processors = [TopKLogitsWarper(5), SequenceBiasLogitsProcessor([[[5], 50.0]]), MinPLogitsWarper(0.1), Own()]
    assert sampling_settings._described(LogitsProcessorList(processors)) == [
        "TopKLogitsWarper(top_k=5)",
        "SequenceBiasLogitsProcessor(sequence_bias={(5,): 50.0})",
        "MinPLogitsWarper(min_p=0.1)",
        "Own(size=3, ids=[[1, 2]])",
    ]


@pytest.mark.parametrize(
    ("found", "expected", "phrase"),
    [
        ([], [], ""),
        (["A", "B"], ["A", "B"], ""),
        (["A", "B"], ["B", "A"], "`generate` applies the processors of the settings in another order"),
        (["A", "B"], ["A"], "`generate` applies B where the settings give nothing"),
        (["A"], ["B", "A", "C"], "`generate` applies nothing where the settings give B, C"),
        (["x" * 80], ["y" * 81], f"`generate` applies {'x' * 80} where the settings give {'y' * 77}..."),
        (["x" * 81], ["A"], f"`generate` applies {'x' * 77}... where the settings give A"),
    ],
)
def test_processors_that_differ_are_named(found: list[str], expected: list[str], phrase: str) -> None:
    assert sampling_settings._difference(found, expected) == phrase


def begun(monkeypatch: pytest.MonkeyPatch, settings: GenerationConfig, **inputs: Any) -> tuple[Any, list[Any]]:
    """Begin to compare rows 0 and 2 of a call on 4 prompts of 3 tokens. Return the arguments of each build, too."""
    seen: list[Any] = []

    def build(policy: Any, **given: Any) -> LogitsProcessorList:
        seen.append({"policy": policy, **given})
        return LogitsProcessorList()

    monkeypatch.setattr(GenerationMixin, "_get_logits_processor", build)
    comparison = ProcessorComparison(settings, 0.5, [0, 2])
    call: Any = GenerationConfig(do_sample=True, max_length=17)
    call._eos_token_tensor, call._pad_token_tensor = torch.tensor([1, 2]), torch.tensor(0)
    kwargs = {"attention_mask": torch.arange(12).reshape(4, 3) + 100}
    given = {"encoder_input_ids": torch.arange(12).reshape(4, 3), "device": "a device", "model_kwargs": kwargs}
    found = LogitsProcessorList()
    assert comparison.start("a model", found, call, {"input_ids_seq_length": 3, **given, **inputs}) is found
    return comparison, seen


def test_the_processors_of_a_row_are_built_from_the_call_and_its_own_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = GenerationConfig(do_sample=True, min_new_tokens=4)
    comparison, seen = begun(monkeypatch, settings)
    assert comparison.filters() == [], "none is built"
    every = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert [call["encoder_input_ids"].tolist() for call in seen] == [[every[0]], [every[2]], every, every]
    for call in seen:
        assert torch.equal(call["model_kwargs"].pop("attention_mask"), call["encoder_input_ids"] + 100)
        assert (call["policy"], call["device"], call["input_ids_seq_length"]) == ("a model", "a device", 3)
        assert list(call["logits_processor"]) == []
        assert call["generation_config"].max_length == 17
        assert call["generation_config"]._eos_token_tensor.tolist() == [1, 2]
    assert [call["generation_config"].min_length for call in seen] == [7, 7, 7, None]
    assert (settings.min_length, settings.max_length) == (None, None), "the user's own are left as they are"
    beams, _ = begun(monkeypatch, GenerationConfig(do_sample=False, num_beams=2))
    assert beams.other_mode == "the generation mode is sample, not beam_search"
    _, seen = begun(monkeypatch, GenerationConfig(do_sample=True, min_new_tokens=0), model_kwargs={})
    assert {call["model_kwargs"]["attention_mask"] for call in seen} == {None}
    assert [call["generation_config"].min_length for call in seen] == [3, 3, 3, None]


def test_finished_rows_are_looked_for_every_32_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 0 and 2 have ended, by an end token and by padding. A prompt may hold both."""
    comparison, _ = begun(monkeypatch, GenerationConfig(do_sample=True))

    def after(tokens: int, rows: list[int]) -> list[int]:
        ids = torch.full((4, 3 + tokens), 9)
        ids[:, 0], ids[:, 1] = 0, 1
        ids[0, 4], ids[2, -1] = 2, 0
        return comparison.unfinished(rows, ids)

    every = [0, 1, 2, 3]
    assert [after(tokens, every) for tokens in (31, 33, 63)] == [every] * 3
    assert [after(tokens, every) for tokens in (32, 64)] == [[1, 3]] * 2
    assert after(32, [2, 3]) == [3]
    assert after(32, []) == []
    comparison._call[1]._pad_token_tensor = None
    assert after(32, every) == [1, 2, 3]


def test_distance_and_shift_of_hand_computed_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odds of 4 : 1 : 1 become 2 : 1 : 1 in row 0, and row 2 keeps 1 : 2 : 1. The loss divides logits by a half."""
    comparison, _ = begun(monkeypatch, GenerationConfig(do_sample=True))
    comparison._filters = True
    logits = torch.tensor([[4.0, 1.0, 1.0], [1.0, 2.0, 1.0]]).log()
    scores = torch.tensor([[2.0, 1.0, 1.0], [1.0, 2.0, 1.0]]).log()
    comparison.compare([0, 2], torch.zeros(2, 3), logits, scores, torch.tensor([0, 2]))
    comparison.compare([2], torch.zeros(1, 4), logits[1:], scores[1:], torch.tensor([1]))
    # Two thirds became a half. Squared, the odds are 16 : 1 : 1 and 1 : 4 : 1.
    shifts = [math.log((16 / 18) / (1 / 2)), math.log((1 / 4) / (1 / 6)), math.log((4 / 6) / (1 / 2))]
    found = comparison.measured([[7], [7], [7, 7], [7]])
    torch.testing.assert_close(found, torch.tensor([[1 / 6, 0.0, 0.0], shifts]))
    assert comparison.measured([[7], [7], [7], [7]]).shape == (2, 2), "tokens behind the end are left out"
    assert comparison.measured([[], [], [], []]).shape == (2, 0)


def test_a_greedy_choice_is_compared_as_a_certain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison, _ = begun(monkeypatch, GenerationConfig(do_sample=False))
    comparison._samples = False
    logits = torch.tensor([[4.0, 1.0, 1.0], [1.0, 2.0, 1.0]]).log()
    scores = torch.tensor([[1.0, 3.0, 2.0], [1.0, 2.0, 1.0]]).log()
    comparison.compare([0, 2], torch.zeros(2, 3), logits, scores, torch.tensor([1, 1]))
    found = comparison.measured([[7], [], [7]])
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.0], [math.log(18), math.log(6 / 4)]]))
