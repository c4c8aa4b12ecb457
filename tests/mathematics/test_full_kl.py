"""KL(policy || reference) over the full vocabulary: the term, every loss type, adapters, and memory."""

from __future__ import annotations

import gc
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from trl.kernels import chunked_divergence

from grpo_recipes.recipe.losses import LOSS_TYPES as LOSS_TABLE
from grpo_recipes.training.full_kl import FullKL, Projection, last_hidden_states, token_kl
from grpo_recipes.training.trainer import GRPOTrainer
from tests.mathematics import oracle
from tests.mathematics.conftest import ScenarioFactory, SummaryLines
from tests.mathematics.harness import (
    Scenario,
    compare,
    float64_divergence,
    float64_model,
    load_policy,
    make_trainer,
    trl_losses,
)
from tests.mathematics.oracle import LOSS_TYPES, Completion, Geometry, Objective
from tests.mathematics.test_loss_against_trl import check
from tests.support.grids import covering, only
from tests.support.recorded import model as tiny_policy

FULL = partial(GRPOTrainer, kl_estimator="full")


@pytest.fixture
def kernel_in_float64(in_float64: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run TRL's divergence kernel in float64 instead of float32, on tiles smaller than the problem."""
    monkeypatch.setattr(chunked_divergence, "TOKEN_CHUNK_SIZE", 5)
    monkeypatch.setattr(chunked_divergence, "VOCAB_CHUNK_SIZE", 7)
    with float64_divergence():
        yield


@pytest.mark.parametrize("temperature", [1.0, 0.8])
@pytest.mark.parametrize("bias", [False, True])
def test_the_term_equals_autograd_on_full_logits(
    temperature: float, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_divergence, "TOKEN_CHUNK_SIZE", 3)
    monkeypatch.setattr(chunked_divergence, "VOCAB_CHUNK_SIZE", 10)
    generator = torch.Generator().manual_seed(0)
    hidden, reference_hidden = torch.randn(2, 2, 6, 8, generator=generator)
    weight, reference_weight = 0.3 * torch.randn(2, 25, 8, generator=generator)
    biases = torch.randn(2, 25, generator=generator).unbind() if bias else (None, None)
    leaves = [tensor.requires_grad_() for tensor in (hidden.clone(), weight.clone())]
    leaves += [biases[0].clone().requires_grad_()] if bias else []
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    upstream = torch.rand(2, 6, generator=generator)

    ours = token_kl(
        Projection(leaves[0], leaves[1], leaves[2] if bias else None),
        Projection(reference_hidden, reference_weight, biases[1]),
        mask,
        temperature,
    )
    full_logits = leaves[0] @ leaves[1].T + (leaves[2] if bias else 0.0)
    reference = reference_hidden @ reference_weight.T + (biases[1] if bias else 0.0)
    expected = oracle.full_kl(full_logits, reference, temperature) * mask
    assert torch.allclose(ours, expected, rtol=0, atol=1e-6)
    for mine, theirs in zip(
        torch.autograd.grad((ours * upstream).sum(), leaves),
        torch.autograd.grad((expected * upstream).sum(), leaves),
        strict=True,
    ):
        assert (mine - theirs).abs().max() <= 1e-6 * max(1.0, theirs.abs().max().item())


def test_hidden_states_are_collected_inside_the_block_only() -> None:
    policy = tiny_policy()
    ids = torch.tensor([[5, 6, 7]])
    with last_hidden_states(policy) as states:
        for _ in range(2):
            policy(input_ids=ids)
    policy(input_ids=ids)
    assert [state.shape[:2] for state in states] == [(1, 3)] * 2
    assert not policy.base_model._forward_hooks


def test_no_counted_token_gives_a_zero_with_a_graph() -> None:
    hidden, weight = torch.randn(1, 3, 4, requires_grad=True), torch.randn(6, 4)
    kl = token_kl(Projection(hidden, weight, None), Projection(hidden.detach(), weight, None), torch.zeros(1, 3), 1.0)
    kl.sum().backward()
    assert kl.abs().max() == 0
    assert hidden.grad is not None


@cache
def with_full_kl(
    scenario: Scenario, step: int, temperature: float = 1.0
) -> Callable[[list[Completion]], list[Completion]]:
    """Return a function that adds to each row the KL of full logits, with its graph."""
    policy = scenario.rows(step)[0]
    reference = scenario.model(scenario.reference)

    @cache
    def kl(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Tensor:
        with float64_model():
            return oracle.completion_kl(policy, reference, prompt, tokens, temperature)

    return lambda rows: [replace(row, full_kl=kl(tuple(row.prompt), tuple(row.tokens))) for row in rows]


@pytest.mark.usefixtures("kernel_in_float64")
@pytest.mark.parametrize(
    ("loss_type", "geometry"), covering(LOSS_TYPES, [Geometry(2, 4, 1), Geometry(1, 1, 3)]), ids=str
)
def test_every_loss_type(
    loss_type: str, geometry: Geometry, scenario: ScenarioFactory, record_cell: Callable[..., None]
) -> None:
    case = scenario(geometry, 0.8)
    objective = Objective(loss_type, beta=0.3, temperature=0.8)
    step = len(case.steps) - 1
    found = compare(case, objective, [step], rows=with_full_kl(case, step, 0.8), trainer=FULL)
    check(found, torch.float64, objective)
    record_cell("full-vocabulary KL in float64", found)


@pytest.mark.usefixtures("kernel_in_float64")
def test_tool_tokens_have_no_kl(scenario: ScenarioFactory) -> None:
    case = scenario(Geometry(1, 1, 3), 0.8)

    def rows(batch: list[Completion]) -> list[Completion]:
        kept = [replace(row, counted=[t % 3 != 1 for t in range(len(row.tokens))]) for row in batch]
        return with_full_kl(case, 2, 0.8)(kept)

    def inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = torch.tensor([int(t % 3 != 1) for t in range(8)]).expand_as(batch["completion_ids"])
        return {**batch, "tool_mask": mask}

    objective = Objective("grpo", beta=0.3, temperature=0.8)
    check(compare(case, objective, [2], rows=rows, inputs=inputs, trainer=FULL), torch.float64, objective)


def test_the_unedited_kernel_in_float32(scenario: ScenarioFactory, record_cell: Callable[..., None]) -> None:
    case = scenario(Geometry(1, 1, 3), 1.0, torch.float32)
    objective = Objective("grpo", beta=0.3)
    found = compare(case, objective, [2], rows=with_full_kl(case, 2), trainer=FULL)
    check(found, torch.float32, objective)
    record_cell("full-vocabulary KL in float32", found)


def test_the_sampled_term_is_not_in_the_loss(scenario: ScenarioFactory) -> None:
    """TRL's bias correction multiplies its sampled term, so without that term it changes nothing."""
    case = scenario(Geometry(1, 1, 3), 1.0, torch.float32)
    losses = [
        trl_losses(
            case.trainer(Objective("grpo", beta=0.3, use_bias_correction_kl=correction), trainer=FULL), step.inputs
        )
        for step in case.steps[2:]
        for correction in (True, False)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("modules_to_save", [None, ["lm_head"]])
def test_the_kl_of_adapters_equals_that_of_full_logits(modules_to_save: list[str] | None, checkpoint: Path) -> None:
    """The reference is the model without the adapter, or the adapter's initial state."""
    trainer = make_trainer(
        checkpoint,
        torch.float32,
        trainer=FULL,
        peft_config=LoraConfig(r=4, target_modules="all-linear", modules_to_save=modules_to_save),
        beta=0.3,
        loss_type="grpo",
        steps_per_generation=1,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    torch.manual_seed(39)
    inputs = trainer._prepare_inputs([{"prompt": p} for p in ("1 2", "3 4 5") for _ in range(4)])
    adapter = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    for index, parameter in enumerate(adapter.values()):
        generator = torch.Generator().manual_seed(index)
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)

    (loss,) = trl_losses(trainer, [inputs])
    gradients = {name: parameter.grad.clone() for name, parameter in adapter.items()}
    (logged,) = trainer._metrics["train"]["kl/full"]
    trainer.model.zero_grad()
    trainer._full_kl, beta = None, trainer.beta
    trainer.beta = 5e-324
    plain = trainer.compute_loss(trainer.model, inputs)
    kl = full_logit_kl(trainer, inputs)
    mask = inputs["completion_mask"]
    expected = plain + beta * ((kl * mask).sum(1) / mask.sum(1)).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    assert logged == pytest.approx(((kl * mask).sum() / mask.sum()).item(), abs=1e-5)
    assert logged > 0.01
    for name, parameter in adapter.items():
        scale = parameter.grad.abs().max()
        assert (gradients[name] - parameter.grad).abs().max() <= 1e-5 * scale, name


def full_logit_kl(trainer: GRPOTrainer, inputs: dict[str, Tensor]) -> Tensor:
    """Return KL(policy || reference) at each completion token, (B, T), from full logits of the model and its base."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    length = inputs["completion_ids"].shape[1]
    policy = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]
    with torch.no_grad(), trainer.model.disable_adapter():
        reference = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]
    return oracle.full_kl(policy, reference, trainer.temperature)


def test_the_kl_is_zero_before_the_first_step(checkpoint: Path) -> None:
    for extra in ({}, {"peft_config": LoraConfig(r=4, target_modules="all-linear")}):
        trainer = make_trainer(
            checkpoint,
            torch.float32,
            trainer=partial(FULL, **extra),
            beta=0.3,
            max_steps=1,
            disable_dropout=True,
            logging_steps=1,
        )
        trainer.train()
        first = trainer.state.log_history[0]
        assert first["kl/full"] == pytest.approx(0.0, abs=1e-6)
        assert first["kl"] == pytest.approx(0.0, abs=1e-6)


def test_an_adapter_given_to_the_trainer_is_its_own_reference(checkpoint: Path) -> None:
    """TRL copies the adapter to one named "ref". The base model differs from both."""

    def trained_adapter(model: torch.nn.Module, **kwargs: Any) -> GRPOTrainer:
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        return FULL(model=get_peft_model(model, config), **kwargs)

    trainer = make_trainer(checkpoint, torch.float32, trainer=trained_adapter, beta=0.3, disable_dropout=True)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    torch.manual_seed(39)
    inputs = trainer._prepare_inputs([{"prompt": p} for p in ("1 2", "3 4 5") for _ in range(4)])
    trl_losses(trainer, [inputs])
    assert trainer._metrics["train"]["kl/full"] == pytest.approx([0.0], abs=1e-6)
    assert full_logit_kl(trainer, inputs).abs().max() > 1e-2
    for name, parameter in trainer.model.named_parameters():
        if ".default." in name:
            parameter.data *= 1.5
    trl_losses(trainer, [inputs])
    assert trainer._metrics["train"]["kl/full"][0] > 1e-3
    assert trainer.model.active_adapter == "default"


@pytest.mark.usefixtures("kernel_in_float64")
@pytest.mark.parametrize("loss_type", only(["dapo"], LOSS_TYPES))
def test_evaluation_is_not_divided_by_accumulation(loss_type: str, scenario: ScenarioFactory) -> None:
    case = scenario(Geometry(2, 4, 1), 0.8)
    objective = Objective(loss_type, beta=0.3, temperature=0.8)
    trainer = case.trainer(objective, trainer=FULL)
    trainer.model.load_state_dict(case.steps[1].policy)
    trainer.model.eval()
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, dict(case.steps[1].inputs[0]))
    rows = with_full_kl(case, 1, 0.8)(case.rows(1)[1][0])
    expected = oracle.micro_batch_loss(rows, objective, Geometry(), case.generation_tokens)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-10)
    assert "kl/full" in trainer._metrics["eval"]


def test_the_term_of_two_ranks_averages_to_that_of_one(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP averages gradients over ranks. `bnpo` is excluded, which divides by the tokens of each rank's micro-batch."""
    trainer = make_trainer(checkpoint, torch.float32, trainer=FULL, beta=0.3)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    kl, mask = torch.rand(4, 6), torch.tensor([[1] * 6, [1] * 2 + [0] * 4, [1] * 4 + [0] * 2, [0] * 6])
    inputs = {"num_items_in_batch": mask.sum()}

    def term(rows: slice) -> Tensor:
        return (kl[rows] * trainer._token_weights(inputs, mask[rows])).sum()

    for loss_type in set(LOSS_TYPES) - {"bnpo"}:
        trainer.loss_type = loss_type
        all_rows = term(slice(4))
        with monkeypatch.context() as patch:
            patch.setattr(type(trainer.accelerator), "num_processes", 2)
            halves = torch.stack([term(slice(2)), term(slice(2, 4))])
        assert halves.isfinite().all()
        assert halves.mean() == pytest.approx(all_rows.item(), rel=1e-6), loss_type


def test_the_logged_kl_is_over_the_tokens_of_all_ranks() -> None:
    """Two threads are the two ranks, with a replacement for accelerate's sum over ranks."""
    kls, masks = torch.rand(2, 2, 5), torch.tensor([[[1] * 5] * 2, [[1, 0, 0, 0, 0], [0] * 5]])
    kls = kls * masks
    barrier, parts = Barrier(2, timeout=20), [torch.empty(0)] * 2

    def log(rank: int) -> float:
        def reduce(part: Tensor) -> Tensor:
            parts[rank] = part
            barrier.wait()
            return parts[0] + parts[1]

        logged: dict[str, list[float]] = defaultdict(list)
        parted = SimpleNamespace(
            accelerator=SimpleNamespace(reduce=reduce), model=SimpleNamespace(training=True), _metrics={"train": logged}
        )
        GRPOTrainer._log_full_kl(parted, kls[rank], masks[rank])  # type: ignore[arg-type]
        return logged["kl/full"][0]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(log, range(2)))
    assert found == pytest.approx([float(kls.sum() / masks.sum())] * 2)


def test_a_row_without_a_counted_token_has_no_weight() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    for loss_type, some in itertools.product(LOSS_TYPES, (mask, mask[1:])):
        weights = LOSS_TABLE[loss_type].token_weights(some, 2, 3, torch.tensor(5.0))
        assert weights.isfinite().all()
        assert not weights[-1].any()


def test_a_model_that_transforms_its_logits_is_refused(checkpoint: Path) -> None:
    policy = load_policy(checkpoint, torch.float32)
    changes = {"final_logit_softcapping": 30.0, "logit_scale": 0.5, "output_multiplier": 2.0}
    for key, value in {**changes, "lm_head_multiplier": 0.1, "logits_scaling": 8.0}.items():  # the last of Granite
        setattr(policy.config, key, value)
        with pytest.raises(ValueError, match=f"`{key}`"):
            FullKL(policy, 1.0)
        setattr(policy.config, key, None if key == "final_logit_softcapping" else 1.0)
        FullKL(policy, 1.0)


def test_unsupported_trainers_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="`beta`"):
        make_trainer(checkpoint, torch.float32, trainer=FULL, beta=0.0)
    with pytest.raises(ValueError, match="exact"):
        make_trainer(checkpoint, torch.float32, trainer=partial(GRPOTrainer, kl_estimator="exact"), beta=0.1)


def peak_mebibytes(tokens: int, vocabulary: int, kl: Callable[[Projection, Projection, Tensor], Tensor]) -> float:
    """Return by how much the resident memory of the process rises during a forward and a backward, in MiB."""
    hidden, reference_hidden = torch.randn(2, 1, tokens, 16)
    weight, reference_weight = torch.randn(2, vocabulary, 16)
    policy = Projection(hidden.requires_grad_(), weight.requires_grad_(), None)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    kl(policy, Projection(reference_hidden, reference_weight, None), torch.ones(1, tokens)).sum().backward()
    return (status("VmHWM") - before) / 1024


def status(key: str) -> int:
    """Return a field of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_memory_does_not_grow_with_length_times_vocabulary(
    monkeypatch: pytest.MonkeyPatch, summary: SummaryLines
) -> None:
    monkeypatch.setattr(chunked_divergence, "TOKEN_CHUNK_SIZE", 128)
    monkeypatch.setattr(chunked_divergence, "VOCAB_CHUNK_SIZE", 4096)

    def chunked(policy: Projection, reference: Projection, mask: Tensor) -> Tensor:
        return token_kl(policy, reference, mask, 1.0)

    def full_logits(policy: Projection, reference: Projection, mask: Tensor) -> Tensor:
        return oracle.full_kl(policy.hidden @ policy.weight.T, reference.hidden @ reference.weight.T)

    sizes = ((256, 8192), (2048, 8192), (2048, 32768))
    peak_mebibytes(*sizes[0], chunked)  # the first call makes allocations of its own
    small, long, wide = (peak_mebibytes(*size, chunked) for size in sizes)
    with_logits = peak_mebibytes(*sizes[-1], full_logits)
    summary(
        f"full KL, peak MiB of forward and backward: 256 x 8192 {small:.0f}, 2048 x 8192 {long:.0f}, "
        f"2048 x 32768 {wide:.0f}; with full logits 2048 x 32768 {with_logits:.0f}"
    )
    one_tensor_of_logits = 2048 * 32768 * 4 / 2**20
    assert wide - small < one_tensor_of_logits / 8
    assert with_logits > 2 * one_tensor_of_logits
