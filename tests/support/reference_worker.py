"""One process of a distributed launch: a few steps with a refreshed reference. Rank 0 writes what it found.

accelerate launch --config_file accelerate_configs/zero3_cpu.yaml -m tests.support.reference_worker FOLDER CASE ...

FOLDER holds `policy` and `sft` (an adapter on the policy). A case is `full`, `new`, `continued`, `bf16` (continued, in
bfloat16) or `embedding`. `-resume` after a case runs it again from its checkpoint.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import TrainerCallback
from trl import GRPOConfig

from grpo_recipes import GRPOTrainer
from grpo_recipes.run.endings import leave
from grpo_recipes.training.adapters import adapter_tensors, gathered
from grpo_recipes.training.reference import REF
from tests.support.short_runs import arguments, load, moved, trainer

REFRESH, SAVE, STEPS = 2, 2, 3


class Memory(TrainerCallback):
    """Whole tensors of policy and reference, by optimizer step."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.seen: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen[state.global_step] = (whole(policy_tensors(self.trainer)), whole(reference_tensors(self.trainer)))


def policy_tensors(ours: GRPOTrainer) -> list[torch.Tensor]:
    model = ours.accelerator.unwrap_model(ours.model)
    return list(adapter_tensors(model, "default").values() if isinstance(model, PeftModel) else model.parameters())


def reference_tensors(ours: GRPOTrainer) -> list[torch.Tensor]:
    model = ours.accelerator.unwrap_model(ours.model)
    return list(adapter_tensors(model, REF).values() if isinstance(model, PeftModel) else ours.ref_model.parameters())


def whole(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    values = []
    for tensor in tensors:
        with gathered([tensor]):
            value = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            values.append(value.detach().clone())
    return values


def policy_of(case: str, folder: Path) -> Any:
    torch.manual_seed(1)
    base = load(folder / "policy", torch.bfloat16 if case == "bf16" else torch.float32)
    if case == "full":
        return base
    if case in ("continued", "bf16"):
        return PeftModel.from_pretrained(base, folder / "sft", is_trainable=True, autocast_adapter_dtype=False)
    targets = ["embed_tokens", "q_proj"] if case == "embedding" else "all-linear"
    model = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=targets))
    return moved(model) if case == "embedding" else model


def run(case: str, folder: Path) -> dict[str, Any]:
    kind, _, resume = case.partition("-")
    args: GRPOConfig = arguments(
        folder / kind,
        bf16=kind == "bf16",
        max_steps=STEPS,
        sync_ref_model=True,
        ref_model_sync_steps=REFRESH,
        ref_model_mixup_alpha=1.0,
        save_strategy="steps",
        save_steps=SAVE,
    )
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # accelerate offers FSDP to accelerators only; its code runs on gloo all the same.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    reference = {"name": "initial", "reset_optimizer_on_sync": True}
    ours = trainer(GRPOTrainer, policy_of(kind, folder), args, reference=reference)
    memory = Memory()
    memory.trainer = ours
    ours.add_callback(memory)
    ours.train(resume_from_checkpoint=str(folder / kind / f"checkpoint-{SAVE}") if resume else None)
    policy, held = memory.seen[STEPS]
    refreshed = memory.seen.get(REFRESH)
    return {
        "processes": ours.accelerator.num_processes,
        "partitioned": any(
            hasattr(tensor, "ds_id") or hasattr(tensor, "full_tensor") for tensor in policy_tensors(ours)
        ),
        "dtypes": sorted({str(tensor.dtype) for tensor in policy + held}),
        "kl": [entry["kl"] for entry in ours.state.log_history if "kl" in entry],
        "refreshed": refreshed is not None and all(map(torch.equal, *refreshed)),
        "policy": [tensor.double().sum().item() for tensor in policy],
        "reference": [tensor.double().sum().item() for tensor in held],
    }


def main() -> None:
    folder, *cases = sys.argv[1:]
    for case in cases:
        seen = run(case, Path(folder))
        if torch.distributed.get_rank() == 0:
            (Path(folder) / f"{case}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
    leave(0)
