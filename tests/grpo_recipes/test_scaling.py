"""One run on several layouts: ZeRO-3 on two processes, and generation by a server."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support import launching
from tests.support.tiny import save_reward_model

# The whole model or an adapter; TRL's KL or the one over the vocabulary; packed or trimmed; a rule or a reward model.
KINDS = ["model-untied", "lora-tied", "judged-full-kl-tied", "full-kl-untied", "trimmed-tied"]
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear", "learning_rate": 1e-2}


def history(output: Path) -> list[dict[str, float]]:
    """Return the log entries of each step."""
    entries = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in entries if "reward" in entry]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, extensions: str) -> Any:
    """Make runs of 5 steps on arithmetic word problems, one per kind and layout, each only once."""
    folder = tmp_path_factory.mktemp("layouts")
    dataset = {"name": "arithmetic", "split": "train[:40]", "prompt_format": "text"}

    def run(layout: str, kind: str) -> Path:
        output = folder / f"{layout}-{kind}"
        tied = not kind.endswith("untied")
        if not output.exists():
            policy = folder / ("tied" if tied else "untied")
            if not policy.exists():
                launching.build_policy(policy, tied=tied)
            changes = {"dataset": dataset, "max_steps": 5, "save_steps": 2, "beta": 0.04}
            if "lora" in kind:
                changes |= LORA
            if "full-kl" in kind:
                changes |= {"kl_estimator": "full", "beta": 1.0}
            if "trimmed" in kind:
                changes["micro_batching"] = {"layout": "trimmed"}
            if "judged" in kind:
                model = folder / "judge"
                if not model.exists():
                    save_reward_model(model)
                changes["rewards"] = [{"name": "reward_model", "kwargs": {"model": str(model), "device": "cpu"}}]
            changes |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}
            recipe = launching.write_recipe(folder / f"{output.name}.yaml", policy, None, output, **changes)
            module = "tests.support.train_counting_shards"
            launching.launch(layout, recipe, module=module, TORCH_EXTENSIONS_DIR=extensions)
        return output

    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_zero3_trains_what_data_parallel_trains(runs: Any, kind: str) -> None:
    """Loss, gradient norm and every parameter agree over five steps."""
    zero3, ddp = runs("zero3_cpu", kind), runs("ddp_cpu", kind)
    for output in (zero3, ddp):
        assert json.loads((output / "run.json").read_text())["world_size"] == 2
    one, other = (launching.completions(output) for output in (zero3, ddp))
    assert one["completion"].tolist() == other["completion"].tolist()
    steps = list(zip(history(zero3), history(ddp), strict=True))
    assert len(steps) == 5
    keys = {"loss", "reward", "kl", "grad_norm", *(["kl/full"] if "full-kl" in kind else [])}
    for left, right in steps:
        assert {key: left[key] for key in keys} == pytest.approx({key: right[key] for key in keys}, abs=1e-5, rel=1e-4)
        for key in ("loss", "reward"):
            assert left[key] == pytest.approx(right[key], abs=1e-5, rel=0)
    assert any(abs(entry["kl"]) > 1e-5 for entry, _ in steps)  # the policy has moved
    expected, actual = launching.parameters(ddp), launching.parameters(zero3)
    assert expected.keys() <= actual.keys() <= {*expected, "lm_head.weight"}  # a tied head may be written twice
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_each_rank_holds_its_share_and_its_checkpoint_loads_as_an_ordinary_model(runs: Any) -> None:
    """Three ways out of ZeRO-3 agree: the 16-bit (here float32) file, DeepSpeed's conversion, and transformers."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    output = runs("zero3_cpu", "model-untied")
    total = sum(value.numel() for value in launching.parameters(output).values())
    for rank in range(2):
        held = json.loads((output / f"elements-rank{rank}.json").read_text())
        assert held == pytest.approx(total / 2, rel=0.01)  # a tensor of odd size is padded
    checkpoint = output / "checkpoint-4"
    plain = load_file(checkpoint / "model.safetensors")
    converted = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    assert plain.keys() == loaded.keys()
    for name, value in plain.items():
        assert torch.equal(value, converted[name]), name
        assert torch.equal(value, loaded[name]), name


@pytest.mark.slow
def test_a_zero3_run_resumes_before_checkpoints_that_are_cut_off_or_damaged(
    runs: Any, tmp_path: Path, extensions: str
) -> None:
    whole = runs("zero3_cpu", "lora-tied")
    stopped = whole.parent / "stopped"
    shutil.copytree(whole, stopped)
    (stopped / "checkpoint-4" / "manifest.json").unlink()
    (shard,) = (stopped / "checkpoint-5").glob("global_step5/*rank_1_*optim_states.pt")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    (stopped / "adapter_model.safetensors").unlink()
    recipe = whole.parent / f"{whole.name}.yaml"
    more = ["--output_dir", str(stopped), "--resume_from_checkpoint", "true"]
    said = launching.launch("zero3_cpu", recipe, *more, TORCH_EXTENSIONS_DIR=extensions)
    assert f"resuming from {stopped / 'checkpoint-2'}" in said
    for name in ("checkpoint-4-incomplete", "checkpoint-5-damaged"):
        assert (stopped / name).is_dir()
    launching.assert_same_run(whole, stopped)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp_cpu", "zero3_cpu"])
def test_a_server_receives_each_prompt_once_and_each_rank_its_own_slice(
    tmp_path: Path, extensions: str, layout: str
) -> None:
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    changes = {
        **{"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False},
        **{"generation_check": False, "max_completion_length": 16},  # the stub samples from nothing
        **{"rewards": ["tests.support.launching.continues_its_prompt"], "max_steps": 2, "save_strategy": "no"},
    }
    recipe = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, tmp_path / "run", **changes)
    env = {"STUB_LOG": str(tmp_path / "log.jsonl"), "TORCH_EXTENSIONS_DIR": extensions}
    launching.launch(layout, recipe, module="tests.support.train_with_stub_server", **env)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["rank"] for entry in log if "rank" in entry] == ["0"]
    asked = [entry for entry in log if "prompts" in entry]
    assert len(asked) == 2
    for entry in asked:  # 16 rows on two ranks are 4 prompts × 4 completions
        assert entry["n"] == 4
        assert len(entry["prompts"]) == len({tuple(prompt) for prompt in entry["prompts"]}) == 4
    assert [entry["reward"] for entry in history(tmp_path / "run")] == [1.0, 1.0]
    # Whole weights go over, before each generation.
    first, second = [entry["weights"] for entry in log if "weights" in entry]
    saved = launching.parameters(policy)
    assert set(first) >= set(saved)
    for name, value in saved.items():
        assert first[name] == pytest.approx(float(value.double().sum()), abs=1e-4), name
    assert first.keys() == second.keys()
