"""Runs and kernels that a GPU must show: `GRPO_TEST_DEVICE=cuda pytest -m gpu`.

Without one they run on a CPU or the pretend GPU, with stand-ins for the kernels.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers.utils.import_utils import enable_tf32
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.evaluation.engines import Transformers
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.generation.agreement import ATTENTION
from grpo_recipes.plan.memory import MemoryPlan, Sharding
from grpo_recipes.plan.model_shape import ModelShape
from grpo_recipes.recipe.specs import MicroBatching
from grpo_recipes.training import varlen
from grpo_recipes.training.adamw_bf16 import AdamWBF16, merge
from grpo_recipes.training.layout_facts import describe
from grpo_recipes.training.packed_attention import GroupSpans
from grpo_recipes.training.varlen import VarlenKernel
from grpo_rewards.reward_model import RewardModelScore
from tests.support import device, short_runs, tiny
from tests.support.grids import only
from tests.support.layouts import attention
from tests.support.recorded import Recording, largest_gap, make_trainer, model
from tests.support.short_runs import PROMPTS
from tests.support.tool_rollouts import ADD, CASES, add, tool_policy, tool_tokenizer, transcript_reward
from tests.support.varlen_kernel import install, torch_2_12

ON_GPU = device.NAME == "cuda"
only_on_gpu = pytest.mark.skipif(not ON_GPU, reason="measures a GPU")
pytestmark = pytest.mark.gpu


# ---- Kernels


SPANS = [((0, 40), [(40, 50), (50, 130), (130, 131)]), ((131, 131), [(131, 140)]), ((140, 141), [(141, 160)])]
"""Suffixes shorter and longer than their prefix, of one token, and an empty prefix."""


@pytest.mark.parametrize("group", only([7], [1, 2, 7]))
@pytest.mark.parametrize("size", only([64], [64, 80, 128, 256]))
def test_the_varlen_kernel_is_the_formula(size: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        install(monkeypatch, torch_2_12)
    generator = torch.Generator().manual_seed(0)
    place = "cuda" if ON_GPU else "cpu"
    states = [torch.randn(1, n, 160, size, generator=generator).to(place) for n in (2 * group, 2, 2)]
    exact = [tensor.clone().requires_grad_() for tensor in states]
    rounded = [tensor.bfloat16().requires_grad_() for tensor in states]
    said: list[str] = []
    output = VarlenKernel(said.append)(GroupSpans(SPANS), *rounded, None)
    assert output is not None, said
    expected = attention(SPANS, *exact)
    weights = torch.randn(expected.shape, generator=generator).to(place)
    found = [output, *torch.autograd.grad((output.float() * weights).sum(), rounded)]
    for mine, theirs in zip(found, [expected, *torch.autograd.grad((expected * weights).sum(), exact)], strict=True):
        gap = (mine.detach().float() - theirs.detach()).abs().max() / theirs.detach().abs().max()
        assert float(gap) < ATTENTION


def test_adamw_bf16_is_torchs_fused_adamw() -> None:
    """On a GPU with the largest weights of Qwen2.5-0.5B."""
    shapes = [(151936, 896), (4864, 896), (896,)] if ON_GPU else [(64, 32), (32,)]
    torch.manual_seed(0)
    start = [device.here((torch.randn(shape) * 0.02).bfloat16()) for shape in shapes]
    ours = [torch.nn.Parameter(weight.clone()) for weight in start]
    exact = [torch.nn.Parameter(weight.float()) for weight in start]
    optimizers = AdamWBF16(ours, lr=5e-6), torch.optim.AdamW(exact, lr=5e-6, fused=True)
    for _ in range(3):
        for weight, copy in zip(ours, exact, strict=True):
            weight.grad = torch.randn_like(weight)
            copy.grad = weight.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    for weight, copy in zip(ours, exact, strict=True):
        (found,) = merge([weight.detach()], [optimizers[0].state[weight]["low_bits"]])[1]
        # A compiler may contract a product and a sum into one rounding.
        torch.testing.assert_close(found, copy.detach(), rtol=1e-6 if ON_GPU else 0, atol=1e-9 if ON_GPU else 0)


# ---- Runs


def losses(trainer: Any) -> list[float]:
    """Train, and return the loss of each step."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def saved_policy(folder: Path) -> Any:
    policy = tiny.policy(vocab_size=258, num_hidden_layers=1)
    policy.save_pretrained(folder / "policy")
    policy.config._name_or_path = str(folder / "policy")
    return policy


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
REFRESH = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "evaluated, refreshed reference": (
        {**REFRESH, "eval_strategy": "steps", "eval_steps": 2},
        {
            "eval_dataset": PROMPTS.select(range(4)),
            "reference": {"name": "initial", "reset_optimizer_on_sync": True},
        },
    ),
    "full KL, informative prompts": ({"num_iterations": 2}, {"kl_estimator": "full", "sampling": "informative"}),
    "adapter, transformers' own generation": ({}, {"peft_config": LORA, "generation": "off"}),
}


@device.slow_on_cpu
@pytest.mark.parametrize("name", RUNS)
def test_a_run(name: str, tmp_path: Path) -> None:
    given, more = RUNS[name]
    arguments = short_runs.arguments(tmp_path / "run", max_steps=2, **given)
    trainer: Any = short_runs.trainer(GRPOTrainer, saved_policy(tmp_path), arguments, **more)
    assert all(math.isfinite(loss) for loss in losses(trainer))
    assert trainer._generation.groups.is_verified == (more.get("generation") != "off")
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {device.TYPE}


@device.slow_on_cpu
def test_a_run_with_a_tool(tmp_path: Path) -> None:
    tokenizer = tool_tokenizer()
    sampled = {tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids([ADD])}
    suppressed = [token for token in range(len(tokenizer)) if token not in sampled]
    arguments = short_runs.arguments(
        tmp_path,
        beta=0.0,
        max_completion_length=160,
        max_tool_calling_iterations=2,
        generation_kwargs={"suppress_tokens": suppressed},
    )
    parts: dict[str, Any] = {"rows": CASES, "tokenizer": tokenizer, "rewards": transcript_reward, "tools": [add]}
    trainer = short_runs.trainer(GRPOTrainer, tool_policy(tokenizer, num_hidden_layers=1), arguments, **parts)
    assert all(math.isfinite(loss) for loss in losses(trainer))
    assert trainer.state.log_history[0]["tools/turns"] > 1


@pytest.fixture
def tf32() -> Iterator[dict[str, Any]]:
    """Return the arguments of a run with TF32, which transformers refuses without a GPU: then it is on before."""
    if not ON_GPU:
        enable_tf32(True)
    yield {"tf32": True} if ON_GPU else {}
    backends: Any = torch.backends
    settings = (backends, backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    for setting in settings if hasattr(backends, "fp32_precision") else ():
        setting.fp32_precision = "none"


@device.slow_on_cpu
def test_a_run_with_tf32(tf32: dict[str, Any], tmp_path: Path) -> None:
    policy = tiny.policy(vocab_size=258, num_hidden_layers=1).to(torch.bfloat16)
    trainer = short_runs.trainer(GRPOTrainer, policy, short_runs.arguments(tmp_path, beta=0.0, max_steps=2, **tf32))
    assert all(math.isfinite(loss) for loss in losses(trainer))


@only_on_gpu
def test_an_interrupted_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    def trainer() -> Any:
        arguments = short_runs.arguments(
            tmp_path / "run", beta=0.0, max_steps=4, save_strategy="steps", save_steps=2, learning_rate=1e-4
        )
        return short_runs.trainer(GRPOTrainer, tiny.policy(vocab_size=258, num_hidden_layers=1), arguments)

    whole = trainer()
    whole.train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    pairs = zip(resumed.model.parameters(), whole.model.parameters(), strict=True)
    # The backward pass of FlashAttention adds in an order that changes from run to run.
    worst = max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs)
    assert worst <= 1e-6


# ---- Against TRL

RAGGED = Recording.random(prompts=2, group=4, seed=3)


def of_a_step(cls: type[TRLGRPOTrainer], folder: Path, **config: Any) -> dict[str, Tensor]:
    """Return the gradients of one optimizer step of a model with heads of 64 dimensions, in float32."""
    policy = model(num_hidden_layers=1, hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    trainer: Any = make_trainer(cls, RAGGED, policy, folder / cls.__module__, per_device_train_batch_size=8, **config)
    trainer.model.train()
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer.current_gradient_accumulation_steps = 1
    trainer.training_step(trainer.model, RAGGED.rows(), None)
    return {name: parameter.grad.float() for name, parameter in trainer.model.named_parameters()}


def test_a_step_in_bfloat16_with_checkpointing_is_as_exact_as_trls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast, the varlen kernel where there is one, and layers that run again in the backward pass."""
    exact = of_a_step(TRLGRPOTrainer, tmp_path / "exact")
    options = {"bf16": True, "gradient_checkpointing": True}
    stock = largest_gap([of_a_step(TRLGRPOTrainer, tmp_path / "stock", **options)], [exact])
    calls: list[int] = []
    kernel = varlen.varlen_attn
    monkeypatch.setattr(
        varlen, "varlen_attn", wraps(kernel)(lambda *args, **more: calls.append(1) or kernel(*args, **more))
    )
    ours = largest_gap([of_a_step(GRPOTrainer, tmp_path / "ours", **options)], [exact])
    assert ours <= 2 * stock
    assert bool(calls) or not ON_GPU


@only_on_gpu
def test_the_host_waits_no_more_often_than_in_trl(tmp_path: Path) -> None:
    def waits(cls: type[TRLGRPOTrainer]) -> int:
        """Return the waits of the second micro-batch of the second generation batch."""
        options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        trainer: Any = make_trainer(cls, RAGGED, model(), tmp_path / cls.__module__, **options)
        trainer.current_gradient_accumulation_steps = 2
        for _ in range(3):
            trainer.training_step(trainer.model, RAGGED.rows(), None)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer.training_step(trainer.model, RAGGED.rows(), None)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return len(caught)

    assert waits(GRPOTrainer) <= waits(TRLGRPOTrainer)


@only_on_gpu
@pytest.mark.parametrize("cls", [TRLGRPOTrainer, GRPOTrainer])
def test_the_peak_of_a_micro_batch_is_at_most_the_planned_one(cls: type[TRLGRPOTrainer], tmp_path: Path) -> None:
    """Gradients and activations of 8 rows of 160 + 256 tokens."""
    random = torch.Generator().manual_seed(0)

    def tokens(size: int) -> list[int]:
        return torch.randint(2, 40, (size,), generator=random).tolist()

    sizes = [256, *torch.randint(20, 256, (7,), generator=random).tolist()]
    recording = Recording([tokens(160)], [[tokens(size) for size in sizes]], [[float(n) for n in range(8)]])
    wide = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 8, "max_position_embeddings": 1024}
    policy = model(num_attention_heads=14, num_key_value_heads=2, vocab_size=32000, **wide).bfloat16()
    options = {"per_device_train_batch_size": 8, "max_completion_length": 256}
    trainer: Any = make_trainer(cls, recording, policy, tmp_path, **options)
    trainer.current_gradient_accumulation_steps = 1
    for _ in range(2):
        before, _ = device.allocated()
        trainer.training_step(trainer.model, recording.rows(), None)
        trainer.model.zero_grad()
        _, peak = device.allocated()
    shape, built = ModelShape.built(trainer.model.config)
    facts = describe(trainer.args, built, 160 + 256, MicroBatching())
    plan = MemoryPlan(shape, facts, Sharding(), trainer.args, 8, 1, prompt_tokens=160, dtype_bytes=2)
    parts = plan.parts()
    assert peak - before <= parts["gradients"] + parts["activations"]


# ---- Evaluation and reward models


def test_an_evaluation_answers_as_on_a_cpu() -> None:
    policy, tokenizer = tiny.policy(num_hidden_layers=1), tiny.byte_tokenizer()
    prompts, settings = ["2 + 2 =", "1 =", "a longer prompt"], Settings(max_new_tokens=8, batch_size=2)
    expected = Transformers(policy, tokenizer)(prompts, settings)
    engine = Transformers(device.here(policy), tokenizer)
    assert engine(prompts, settings) == expected
    assert engine.groups.doubt == ""


def test_a_reward_model_scores_as_on_a_cpu(tmp_path: Path) -> None:
    tiny.save_reward_model(tmp_path)
    rows: dict[str, Any] = {"prompts": ["What is 2 + 2?"] * 3 + ["Hi."] * 2, "completions": ["4", "five", "", "a", "b"]}
    expected = RewardModelScore(str(tmp_path), device="cpu")(**rows)
    got = RewardModelScore(str(tmp_path), device=device.TYPE)(**rows)
    assert got == pytest.approx(expected, abs=device.tolerance(1e-5))
