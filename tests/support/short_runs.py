"""The tiny policy with adapters on it, and runs of a few steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM
from trl import GRPOConfig
from trl import GRPOTrainer as TRLGRPOTrainer

from tests.support import trainers
from tests.support.tiny import byte_tokenizer

PROMPTS = Dataset.from_dict({"prompt": [f"{i} + {i} =" for i in range(32)]})
TEXTS = ["3 + 3 = 6", "a longer text of another kind"]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype)


def adapted(folder: Path, config: PeftConfig, *, continued: bool, name: str = "default") -> PeftModel:
    """Load the policy in `folder` with a new adapter, or with a trained one, whose weights have all moved."""
    torch.manual_seed(1)
    model = get_peft_model(load(folder), config, adapter_name=name)
    return moved(model) if continued else model


def moved(model: PeftModel, seed: int = 2, scale: float = 0.05) -> PeftModel:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * scale
    return model


def arguments(folder: Path, **changes: Any) -> GRPOConfig:
    """Return TRL's arguments for one step whose update a test can see."""
    values: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 1,
        "beta": 0.04,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "disable_dropout": True,
    }
    return trainers.arguments(folder, **{**values, **changes})


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    """Any function of the text whose value differs inside a group."""
    return [float(sum(map(ord, completion)) % 97) for completion in completions]


def trainer(trainer_class: type[TRLGRPOTrainer], model: Any, args: GRPOConfig, **more: Any) -> TRLGRPOTrainer:
    """Build a trainer of `model` on the prompts of this file, unless `more` names other parts of it."""
    parts = {"rows": PROMPTS, "tokenizer": byte_tokenizer(), "rewards": reward, **more}
    return trainers.make_trainer(trainer_class, model, args, **parts)


def logged_kl(trained: TRLGRPOTrainer) -> list[float]:
    """Train; the KL that TRL logged at each step, that of step 0 first."""
    trained.train()
    return [entry["kl"] for entry in trained.state.log_history if "kl" in entry]


def log_probabilities(model: torch.nn.Module, text: str) -> torch.Tensor:
    """Return log p(token | earlier tokens) from an ordinary forward pass of the model."""
    model.eval()
    ids = byte_tokenizer()(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    return logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[0, :, 0]


@contextmanager
def partitioned(tensors: Sequence[torch.Tensor | None], *, write: bool = False) -> Iterator[None]:
    """Behave like `training.adapters.gathered` under ZeRO-3: writes to a gathered tensor are lost unless requested."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors if tensor is not None]
    yield
    if not write:
        for tensor, before in kept:
            tensor.data.copy_(before)
