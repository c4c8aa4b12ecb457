"""Hypotheses about what generated: which are computed, what each runs, and how tokens are scored."""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn

from grpo_recipes.generation.hypotheses import Adapters, Processing, Scorer, hypotheses
from grpo_recipes.generation.rows import Rows
from tests.support.recorded import model

# ---- settings by which an engine changes logits


def settings(**changes: Any) -> Any:
    values = {
        **{"generation_kwargs": None, "repetition_penalty": 1.0, "min_p": None, "top_k": 0, "top_p": 1.0},
        "vllm_structured_outputs_regex": None,
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "processing", "reason"),
    [
        ({"repetition_penalty": 1.2, "min_p": 0.1, "top_k": 7, "top_p": 0.8}, Processing(1.2, 0.1, 7, 0.8), ""),
        ({"top_k": None}, Processing(), ""),
        ({"top_k": 7, "generation_kwargs": {"top_k": -1, "top_p": 0.5}}, Processing(top_p=0.5), ""),
        (
            {"generation_kwargs": {"temperature": 2, "seed": 1, "stop": "x", "n": 1, "max_tokens": 3, "detokenize": 1,
                                   "include_stop_str_in_output": True, "min_tokens_to_keep": 1}},
            *(Processing(), ""),
        ),
        (
            {"generation_kwargs": {"logit_bias": {}, "bad_words": []}},
            *(Processing(), "bad_words, logit_bias may change the scores of tokens"),
        ),
        (
            {"generation_kwargs": {"logit_bias": {}}, "vllm_structured_outputs_regex": "a+"},
            *(Processing(), "logit_bias, vllm_structured_outputs_regex may change the scores of tokens"),
        ),
        (
            {"generation_kwargs": dict.fromkeys(["f", "c", "e", "b", "a", "d"], 1)},
            *(Processing(), "a, b, c, d, e, f may change the scores of tokens"),
        ),
        (
            {"vllm_structured_outputs_regex": ""},
            *(Processing(), "vllm_structured_outputs_regex may change the scores of tokens"),
        ),
    ],
)  # fmt: skip
def test_settings_are_read_and_unknown_ones_named(changes: dict[str, Any], processing: Processing, reason: str) -> None:
    found = Processing.of(settings(**changes))
    assert found == (processing, reason)
    assert bool(found[0]) is (processing != Processing())


PROBABILITIES = torch.tensor([0.5, 0.25, 0.15, 0.1])


@pytest.mark.parametrize(
    ("processing", "kept"),
    [
        (Processing(), [0, 1, 2, 3]),
        (Processing(min_p=0.25), [0, 1, 2]),  # at least a quarter of the likeliest
        (Processing(top_k=1), [0]),
        (Processing(top_k=2), [0, 1]),
        (Processing(top_p=0.7), [0, 1]),  # the fewest that reach 0.7
        (Processing(top_k=2, top_p=0.6), [0]),  # the first of those two has two thirds
    ],
    ids=str,
)
def test_a_filter_divides_the_probability_among_the_tokens_that_it_keeps(
    processing: Processing, kept: list[int]
) -> None:
    """A sampled token that rounding moves just outside a filter is kept, too."""
    logits = PROBABILITIES.log()[None]
    for token in range(4):
        ids = torch.tensor([3, 2, token])
        total = sum(PROBABILITIES[n].item() for n in {*kept, token})
        expected = math.log(PROBABILITIES[token].item() / total)
        assert processing.log_probs(logits, ids, 1.0).item() == pytest.approx(expected, abs=1e-6)
    halved = PROBABILITIES.square() / PROBABILITIES.square().sum()
    cold = Processing().log_probs(logits, torch.tensor([0, 1]), 0.5)
    assert cold.item() == pytest.approx(halved[1].log().item(), abs=1e-6)


def test_a_repetition_penalty_counts_the_tokens_before_each_one() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5]]).repeat(3, 1)
    found = Processing(repetition_penalty=2.0).log_probs(logits, torch.tensor([0, 1, 2, 1]), 1.0)
    # Token 0 is in the prompt. Token 1 counts from the second place on, and token 2 from the third.
    changed = torch.tensor([[1.0, -1.0, 0.5], [1.0, -2.0, 0.5], [1.0, -2.0, 0.25]])
    expected = changed.log_softmax(-1)[torch.arange(3), torch.tensor([1, 2, 1])]
    torch.testing.assert_close(found, expected)


# ---- scoring

ROWS = Rows.of_tokens([[5], [6, 7, 8], [9, 9]], [[1, 2, 3], [4], [1, 2]], torch.device("cpu"))
PLACES = [(0, [2, 3, 4], [0, 1, 2]), (1, [3], [0]), (2, [3, 4], [0, 1])]


class Policy(nn.Module):
    """Model whose logits depend on the place among the tokens of a row, and which records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.calls: list[tuple[int, ...]] = []
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, input_ids: Any, attention_mask: Any, logits_to_keep: int, use_cache: bool) -> Any:
        assert use_cache is False
        self.calls.append((*input_ids.shape, logits_to_keep))
        places = attention_mask.cumsum(1)[..., None] * attention_mask[..., None]
        logits = (places * torch.arange(16.0) / 8)[:, -logits_to_keep:]
        return SimpleNamespace(logits=logits)


def scorer(policy: nn.Module, processing: Processing | None = None, **changes: Any) -> tuple[Scorer, list[Any]]:
    scored: list[Any] = []

    def trl_log_probs(model: Any, rows: Rows, compute_entropy: bool) -> Any:
        scored.append((len(rows.input_ids), rows.input_ids.shape[1], rows.logits_to_keep, compute_entropy))
        assert not model.training
        assert not torch.is_grad_enabled()
        return rows.input_ids[:, -rows.logits_to_keep :].float() / 10, None

    @contextmanager
    def autocast() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            yield

    accelerator = SimpleNamespace(autocast=autocast, unwrap_model=lambda model: model, device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(gradient_checkpointing_kwargs=None), accelerator=accelerator, temperature=0.5
    )
    return Scorer(trainer, policy, trl_log_probs, processing, **changes), scored


def test_rows_are_scored_side_by_side_in_forwards_of_a_given_size() -> None:
    policy = model()
    policy.train()
    score, scored = scorer(policy)
    found = score(policy, ROWS, 2)
    assert scored == [(2, 6, 3, False), (1, 6, 3, False)]
    assert torch.equal(found, ROWS.input_ids[:, -3:].float() / 10)
    assert policy.training


def test_rows_without_padding_are_scored_one_by_one() -> None:
    policy = model()
    score, scored = scorer(policy, padded=False)
    found = score(policy, ROWS, 2)
    assert scored == [(1, 4, 3, False), (1, 4, 1, False), (1, 4, 2, False)]
    assert found.shape == (3, 3)
    assert found.tolist() == [pytest.approx(row) for row in ([0.1, 0.2, 0.3], [0.4, 0, 0], [0.1, 0.2, 0])]


def test_processed_scores_are_those_of_each_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits before a completion's token are those at the token before it, the last prompt token's first."""
    policy = Policy()
    processing = Processing(top_k=3)
    score, scored = scorer(policy, processing)
    for checked in (policy.eval(),):
        found = score._score_processed(checked, ROWS.select(slice(0, 1)).trimmed()[0], processing)
    assert scored == []
    assert policy.calls == [(1, 4, 4)]
    logits = torch.stack([place * torch.arange(16.0) / 8 for place in (1, 2, 3)])
    expected = processing.log_probs(logits, torch.tensor([5, 1, 2, 3]), 0.5)
    torch.testing.assert_close(found, expected[None])
    own = policy.forward
    monkeypatch.setattr(policy, "forward", lambda **given: own(**{**given, "logits_to_keep": 6}))
    row = ROWS.select(slice(1, 2)).trimmed()[0]
    found = score._score_processed(policy, row, processing)
    expected = processing.log_probs(3 * logits[:1], torch.tensor([6, 7, 8, 4]), 0.5)
    torch.testing.assert_close(found, expected[None], msg="a model may know no `logits_to_keep`")


def test_processed_rows_are_scored_one_by_one_and_padded_back() -> None:
    """Each row is scored as if it were alone. Autocast rounds its logits, which are then processed in float32."""
    policy, processing = model(), Processing(top_k=3, repetition_penalty=1.5)
    score, scored = scorer(policy, processing)
    found = score(policy, ROWS, 2)
    assert scored == []
    assert (found.shape, found.dtype) == ((3, 3), torch.float32)
    for row, (ids, length) in enumerate((([5, 1, 2, 3], 3), ([6, 7, 8, 4], 1), ([9, 9, 1, 2], 2))):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = policy(torch.tensor([ids])).logits[0, -length - 1 : -1].float()
        expected = processing.log_probs(logits, torch.tensor(ids), 0.5)
        torch.testing.assert_close(found[row, :length], expected, atol=2e-2, rtol=0)
        assert not found[row, length:].any()


@pytest.mark.parametrize("autocast", [True, False])
def test_a_policy_without_autocast_is_scored_in_float32(autocast: bool) -> None:
    policy = model().bfloat16()
    score, _ = scorer(policy, autocast=autocast)
    dtypes: list[Any] = []
    own = score.trl_log_probs

    def recorded(scored: Any, rows: Rows, compute_entropy: bool) -> Any:
        dtypes.append(next(scored.parameters()).dtype)
        return own(scored, rows, compute_entropy)

    score.trl_log_probs = recorded
    score.trainer.accelerator.native_amp = True
    score(policy, ROWS, 3)
    assert dtypes == [torch.bfloat16 if autocast else torch.float32]
    assert next(policy.parameters()).dtype == torch.bfloat16


# ---- adapters of earlier steps


def adapted(config: Any = None) -> Any:
    return get_peft_model(model(), config or LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def test_an_adapter_is_kept_for_two_steps() -> None:
    policy = adapted()
    adapters = Adapters(policy, sharded=False)
    tensors = [parameter for parameter in policy.parameters() if parameter.requires_grad]

    def fill(value: float) -> None:
        with torch.no_grad():
            for tensor in tensors:
                tensor.fill_(value)

    for step, value in ((3, 1.0), (4, 2.0), (4, 9.0), (7, 3.0)):
        fill(value)
        adapters.keep(step)
        assert adapters.has_earlier is (step > 3)
    assert list(adapters.kept) == [4, 7]
    assert [kept[0].unique().item() for kept in adapters.kept.values()] == [2.0, 3.0], "only the first call of a step"
    assert not any(tensor.requires_grad for kept in adapters.kept.values() for tensor in kept)
    fill(5.0)
    with suppress(RuntimeError), adapters.earlier():
        assert all((tensor == 2.0).all() for tensor in tensors)
        raise RuntimeError
    assert all((tensor == 5.0).all() for tensor in tensors), "training goes on from the same bits"
    for none in (Adapters(policy, sharded=True), Adapters(model(), sharded=False)):
        none.keep(0)
        none.keep(1)
        assert none.kept == {}
        assert not none.has_earlier


# ---- which hypotheses are computed


def named(
    policy: Any, *, precision: str = "no", bfloat16: bool = True, earlier: int = 0, **changes: Any
) -> dict[str, Any]:
    accelerator = SimpleNamespace(mixed_precision=precision, device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(model=policy, accelerator=accelerator)
    if "reference" in changes:
        trainer.ref_model = changes.pop("reference")
    adapters = Adapters(policy, sharded=False)
    for step in range(earlier):
        adapters.keep(step)
    return hypotheses(trainer, adapters, scorer(policy, **changes)[0], bfloat16)


def test_the_hypotheses_that_can_be_computed() -> None:
    full, lora = model(), adapted()
    ia3 = adapted(IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]))
    assert list(named(full)) == ["bfloat16", "unpadded"]
    assert list(named(full, reference=None)) == ["bfloat16", "unpadded"]
    assert list(named(full, reference=lora)) == ["reference", "bfloat16", "unpadded"]
    assert list(named(lora, earlier=1)) == ["off", "twice", "bfloat16", "unpadded"]
    assert list(named(lora, earlier=2, bfloat16=False)) == ["off", "twice", "earlier", "unpadded"]
    assert list(named(lora, reference=full)) == ["off", "twice", "bfloat16", "unpadded"]
    assert list(named(ia3)) == ["off", "bfloat16", "unpadded"]
    assert list(named(full, precision="bf16")) == ["bfloat16", "no autocast", "unpadded"]
    assert list(named(full, precision="bf16", autocast=False)) == ["bfloat16", "unpadded"]
    assert list(named(full, processing=Processing(top_k=2))) == ["bfloat16", "unprocessed"]
    assert list(named(full, padded=False)) == ["bfloat16"]
    assert list(named(model().bfloat16(), precision="bf16")) == ["unpadded"]


def test_each_hypothesis_runs_what_its_name_says() -> None:
    lora = adapted()
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_" in name:
                parameter.fill_(0.1)
    ids = torch.tensor([[5, 6, 7]])

    def logits(found: Any) -> torch.Tensor:
        with torch.no_grad(), found.context:
            return found.model(input_ids=ids).logits

    with torch.no_grad():
        plain, with_adapter = lora.get_base_model()(input_ids=ids).logits, lora(input_ids=ids).logits
    with torch.no_grad(), lora.disable_adapter():
        base = lora(input_ids=ids).logits
    found = named(lora, processing=Processing(top_k=2), precision="bf16", autocast=True)
    assert torch.equal(logits(found["off"]), base)
    twice = logits(found["twice"])
    assert not torch.allclose(twice, with_adapter)
    assert not torch.allclose(twice, base)
    doubled = copy.deepcopy(lora)
    for name, parameter in doubled.named_parameters():
        if "lora_B" in name:
            parameter.data *= 2
    torch.testing.assert_close(twice, doubled(input_ids=ids).logits)
    bfloat16 = logits(found["bfloat16"])
    assert torch.equal(lora(input_ids=ids).logits, with_adapter), "nothing changes outside of the contexts"
    assert 0 < (bfloat16.float() - with_adapter).abs().max() < 0.2
    assert torch.equal(plain, with_adapter)  # PEFT's layers are inside the base
    assert found["bfloat16"].scorer.autocast is True
    assert found["no autocast"].scorer.autocast is False
    assert found["unprocessed"].scorer.processing is None
    assert named(lora)["unpadded"].scorer.padded is False
    assert named(lora, autocast=False)["bfloat16"].scorer.autocast is True
    reference = model()
    assert named(model(), reference=reference)["reference"].model is reference
