"""The recipe key `reference`, through the entry point that users launch."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_recipes import train
from grpo_recipes.recipe.recipe import parse_recipe
from grpo_recipes.recipe.specs import ReferenceSpec

SMALL = [
    *("--use_cpu=true", "--bf16=false", "--dtype=float32", "--gradient_checkpointing=false"),
    *("--max_completion_length=8", "--per_device_train_batch_size=8", "--logging_steps=1", "--max_grad_norm=1.0"),
    *("--learning_rate=1e-2", "--lr_scheduler_type=constant"),
]
# No answer of a tiny untrained policy is correct. A reward for digits makes it move.
REWARD = ["--rewards", "tests.grpo_recipes.training.test_reference_recipes.digits"]


def digits(prompts: list, completions: list, **columns: object) -> list[float]:
    return [float(sum(map(ord, str(completion))) % 13) for completion in completions]


def run(recipe: str, output: Path, gsm8k_file: Path, *more: str) -> list[float]:
    """Train, and return the KL logged at each step."""
    args = ["--config", recipe, f"--output_dir={output}", f"--dataset.path={gsm8k_file}", *SMALL, *REWARD, *more]
    assert train.main(args) == 0
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry["kl"] for entry in history if "kl" in entry]


@pytest.fixture(scope="module")
def lora_run(tiny_model: Path, gsm8k_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of the LoRA recipe."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    more = [f"--model_name_or_path={tiny_model}", "--max_steps=2"]
    kl = run("gsm8k-qwen2.5-1.5b-lora", folder, gsm8k_file, *more)
    assert kl[0] <= 1e-6
    return folder


@pytest.mark.slow
def test_a_recipe_may_name_an_adapter_folder_as_its_model(
    lora_run: Path, gsm8k_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "continued"
    more = [f"--model_name_or_path={lora_run}", "--max_steps=3", "--save_steps=2"]
    kl = run("gsm8k-qwen2.5-1.5b-lora-continue", output, gsm8k_file, *more)
    assert kl[0] <= 1e-6 < kl[2]
    assert "frozen copy of the adapter" in capsys.readouterr().out
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (lora_run, output))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    kept = load_file(output / "ref" / "adapter_model.safetensors")
    assert all(torch.equal(before[name], kept[name]) for name in before)
    AutoTokenizer.from_pretrained(output)

    # A new run from a checkpoint's adapter can keep the first run's reference.
    checkpoint = output / "checkpoint-2"
    more = [f"--model_name_or_path={checkpoint}", "--max_steps=1"]
    assert run("gsm8k-qwen2.5-1.5b-lora-continue", tmp_path / "moved", gsm8k_file, *more)[0] <= 1e-6
    more.append(f"--reference={{adapter: {checkpoint / 'ref'}}}")
    assert run("gsm8k-qwen2.5-1.5b-lora-continue", tmp_path / "kept", gsm8k_file, *more)[0] > 1e-6
    assert f"the adapter in {checkpoint / 'ref'}" in capsys.readouterr().out


@pytest.mark.slow
def test_the_outer_loop_of_grpo_from_scratch(tiny_model: Path, gsm8k_file: Path, tmp_path: Path) -> None:
    more = [f"--model_name_or_path={tiny_model}", "--max_steps=5", "--ref_model_sync_steps=3", "--save_steps=4"]
    kl = run("gsm8k-qwen2.5-1.5b-iterative", tmp_path / "run", gsm8k_file, *more)
    assert max(kl[0], kl[3]) <= 1e-6 < min(kl[2], kl[4])
    assert (tmp_path / "run" / "checkpoint-4" / "reference.safetensors").is_file()


@pytest.mark.slow
def test_an_adapter_without_its_tokenizer(lora_run: Path, tiny_model: Path, gsm8k_file: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), lora_run)
    model.save_pretrained(bare)
    more = [f"--model_name_or_path={bare}", "--max_steps=1"]
    assert run("gsm8k-qwen2.5-1.5b-lora-continue", tmp_path / "out", gsm8k_file, *more)[0] <= 1e-6


def parsed(*args: str) -> ReferenceSpec:
    return parse_recipe(["--config", "gsm8k-qwen2.5-1.5b-lora", *args]).reference


def test_the_values_that_a_recipe_may_have() -> None:
    assert parsed() == ReferenceSpec("initial")
    assert parsed("--reference", "base") == ReferenceSpec("base")
    assert parsed("--reference.adapter", "org/sft") == ReferenceSpec(None, "org/sft")
    spec = parsed("--reference", "initial", "--reference.reset_optimizer_on_sync", "true")
    assert spec == ReferenceSpec("initial", None, True)
    recipe = parse_recipe(["--config", "gsm8k-qwen2.5-1.5b-iterative"])
    assert recipe.reference.reset_optimizer_on_sync
    assert ReferenceSpec.parse(recipe.as_dict()["reference"]) == recipe.reference
