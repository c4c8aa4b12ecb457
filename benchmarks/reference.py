"""Memory of a reference policy: parameters held, and peak resident memory of a training step on the CPU.

    python benchmarks/reference.py [--hidden 768] [--layers 8]

Each row is a process of its own that takes one optimizer step (2 prompts × 4 completions × 8 tokens, float32, AdamW) on
a random Llama. Memory counts from after the imports. The column "reference" holds the parameters that `set_reference`
keeps beside policy and adapter. A second table counts the parameters at the size of the recipes' model, without
weights. Stock TRL 1.16 runs where it can.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROWS = {
    "full, beta 0": {"beta": 0.0},
    "full, beta 0.04, plain TRL": {"trl": True},
    "full, beta 0.04": {},
    "new LoRA, beta 0": {"lora": "new", "beta": 0.0},
    "new LoRA, beta 0.04, plain TRL": {"lora": "new", "trl": True},
    "new LoRA, beta 0.04": {"lora": "new"},
    "new LoRA, beta 0.04, refreshed": {"lora": "new", "sync_ref_model": True, "ref_model_sync_steps": 1},
    "continued LoRA, beta 0": {"lora": "continued", "beta": 0.0},
    "continued LoRA, beta 0.04": {"lora": "continued"},
}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--row")
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(ROWS[options.row], options.hidden, options.layers)))
        return
    names = ("torch", "transformers", "peft", "trl")
    print(f"{platform.machine()}, {', '.join(f'{name} {version(name)}' for name in names)}\n")
    print("| run | policy | trained | reference | reference / policy | peak, MB | over beta 0 |")
    print("|---|---|---|---|---|---|---|")
    without: dict[str, float] = {}
    for name in ROWS:
        print(line(name, row(name, options), without), flush=True)
    print("\nQwen2.5-1.5B, LoRA of rank 16 on every linear layer, counted:\n")
    counted_policy, counted_reference = count_qwen()
    print(f"policy {counted_policy:,}, frozen copy of the adapter {counted_reference:,}: ", end="")
    print(f"{counted_reference / counted_policy:.2%}; a reference model would be 100 %")


def row(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one row, from a process of its own."""
    sizes = ["--hidden", str(options.hidden), "--layers", str(options.layers)]
    done = subprocess.run([sys.executable, __file__, "--row", name, *sizes], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def line(name: str, seen: dict[str, float], without: dict[str, float]) -> str:
    """Return one line of the table. `without` collects the peaks at beta 0."""
    kind = name.partition(",")[0]
    without.setdefault(kind, seen["peak"])
    counts = f"{seen['policy']:,} | {seen['trained']:,} | {seen['reference']:,}"
    ratio = seen["reference"] / seen["policy"]
    return f"| {name} | {counts} | {ratio:.2%} | {seen['peak']:.0f} | {seen['peak'] / without[kind]:.2f}x |"


def measure(settings: dict[str, Any], hidden: int, layers: int) -> dict[str, float]:
    """Train one step and return the parameters and the peak memory in MB."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig
    from trl import GRPOTrainer as TRLGRPOTrainer

    from grpo_recipes import GRPOTrainer
    from grpo_recipes.quickstart import WarmStart, build_tokenizer, demonstrations
    from grpo_recipes.recipe.dataset import DatasetSpec

    settings = dict(settings)
    trainer_class = TRLGRPOTrainer if settings.pop("trl", False) else GRPOTrainer
    kind = settings.pop("lora", None)
    torch.manual_seed(0)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokenizer = build_tokenizer(demonstrations(WarmStart(demonstrations=500), DatasetSpec("arithmetic")), 512)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)  # stock TRL loads its reference from this folder
        model = LlamaForCausalLM.from_pretrained(folder)
        lora = LoraConfig(
            r=16, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=kind != "continued"
        )
        args = GRPOConfig(
            output_dir=str(Path(folder) / "run"),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=8,
            max_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **{"beta": 0.04, **settings},
        )
        trainer = trainer_class(
            model=get_peft_model(model, lora) if kind == "continued" else model,
            reward_funcs=lambda completions, **columns: [float(len(set(text))) for text in completions],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["1 + 1 =", "2 + 2 ="]}),
            processing_class=tokenizer,
            peft_config=lora if kind == "new" else None,
        )
        trainer.train()
    every = dict(trainer.model.named_parameters())
    held = sum(tensor.numel() for name, tensor in every.items() if ".ref." in name)
    if trainer.ref_model is not None:
        held = sum(tensor.numel() for tensor in trainer.ref_model.parameters())
    return {
        "policy": sum(tensor.numel() for name, tensor in every.items() if ".ref." not in name),
        "trained": sum(tensor.numel() for tensor in every.values() if tensor.requires_grad),
        "reference": held,
        "peak": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024,
    }


def count_qwen() -> tuple[int, int]:
    """Return the number of parameters of Qwen2.5-1.5B with a rank-16 adapter, and of the adapter."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    lora = LoraConfig(r=16, task_type="CAUSAL_LM", target_modules="all-linear")
    adapted = get_peft_model(model, lora, low_cpu_mem_usage=True)
    adapter = sum(tensor.numel() for tensor in adapted.parameters() if tensor.requires_grad)
    return sum(tensor.numel() for tensor in adapted.parameters()), adapter


if __name__ == "__main__":
    main()
