"""Share of an update that survives rounding, compared with simulated runs, and the messages about it."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from grpo_recipes.checks.checks import (
    Machine,
    backend_of,
    check,
    check_early_stopping,
    check_machine,
    grpo_config,
    optimizer_name,
    precision_of,
)
from grpo_recipes.checks.precision import Precision, initial_weights
from grpo_recipes.cli import main
from grpo_recipes.plan.memory import GIB
from grpo_recipes.recipe.recipe import Recipe, RecipeError, parse_recipe
from tests.support import launching, qwen
from tests.support.errors import refused
from tests.support.recipes import read_recipe

GPU = Machine(1, bf16=True)


BF16 = {"dtype": "bfloat16"}
LORA = {**BF16, "use_peft": True}
QLORA = {**LORA, "load_in_4bit": True}


@pytest.fixture(autouse=True)
def nothing_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")  # where no hub answers


def recipe(folder: Path, **changes: object) -> Recipe:
    rate = {"per_device_train_batch_size": 16, "learning_rate": 5e-6, "output_dir": str(folder / "run")}
    return read_recipe(folder, **{**rate, **changes})


def precision(stored: str = "bfloat16", **changes: object) -> Precision:
    values = {"computed": "bfloat16", "optim": "adamw_torch_fused", "learning_rate": 5e-6, "beta1": 0.9, **changes}
    return Precision(stored, **values)  # type: ignore[arg-type]


def test_the_surviving_share_agrees_with_a_simulated_run() -> None:
    """`torch`'s AdamW on bfloat16 and on float32 weights, with gradients that are noise."""
    learning_rate = 5e-6
    torch.manual_seed(0)
    start = (0.02 * torch.randn(8000)).bfloat16()
    stored, exact = start.clone().requires_grad_(), start.float().requires_grad_()
    runs = [torch.optim.AdamW([weight], lr=learning_rate, weight_decay=0.0) for weight in (stored, exact)]
    for _ in range(300):
        noise = torch.randn(8000)
        stored.grad, exact.grad = noise.bfloat16(), noise
        for run in runs:
            run.step()
    true, rounded = (weight.detach().double() - start.double() for weight in (exact, stored))
    simulated = float(rounded @ true / (true @ true))
    share = precision(learning_rate=learning_rate).surviving(start.float().numpy())
    # The first step, whose update is as large as the learning rate, still has an effect after 300 steps.
    assert simulated / 2 < share < 2 * simulated
    assert share == pytest.approx(precision(learning_rate=learning_rate).surviving(initial_weights(0.02)), rel=0.3)


def test_float32_loses_nothing_and_an_unknown_optimizer_has_no_share() -> None:
    weights = initial_weights(0.02)
    assert precision("float32").surviving(weights) == pytest.approx(1, abs=1e-3)
    assert precision(optim="adamw_bf16").surviving(weights) == 1
    assert precision(deepspeed=True).surviving(weights) == 1
    assert precision(optim="adafactor").surviving(weights) is None
    assert precision(optim="adamw_torch", optim_args="x=1").surviving(weights) is None
    assert precision(learning_rate=0.0).surviving(weights) == 1
    assert precision().surviving(np.zeros(5)) == pytest.approx(1, abs=1e-3)  # as LoRA's B at the start
    assert precision(learning_rate=1e-12).surviving(np.array([1.0])) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_surviving_share_is_that_of_the_rounding_of_torch(dtype: torch.dtype) -> None:
    """Normal updates of a standard deviation of `ratio` spacings are added to one weight, and rounded by torch."""
    exact = torch.linspace(0, 1, 20_003, dtype=torch.float64)[1:-1]
    for weight, ratio in product((1.5, 1.75, 0.02, 3e-3, -0.75), (0.1, 0.3, 0.6, 2.0)):
        start = torch.tensor(weight, dtype=dtype)
        spacing = abs(float(torch.nextafter(start, torch.full_like(start, torch.inf)) - start))
        steps = ratio * spacing * torch.special.ndtri(exact)
        rounded = (start.double() + steps).to(dtype).double() - start.double()
        expected = float(rounded @ steps / (steps @ steps))
        made = precision(str(dtype).removeprefix("torch."), learning_rate=ratio * spacing, beta1=0.0)
        share = made.surviving(np.array([float(start)]))
        assert share == pytest.approx(expected, rel=0.05, abs=0.005), (weight, ratio)


def test_beta1_shrinks_an_update_of_noise() -> None:
    """A sum of noise with the weights (1 - b) b^k has the variance (1 - b)^2 / (1 - b^2), by the geometric series."""
    deviation = float(np.linalg.norm((1 - 0.9) * 0.9 ** np.arange(1000)))
    shares = [precision(learning_rate=rate, beta1=beta1) for rate, beta1 in ((1e-3, 0.9), (1e-3 * deviation, 0.0))]
    with_momentum, without = (share.surviving(initial_weights(0.02)) for share in shares)
    assert with_momentum == pytest.approx(without)


def test_the_dtypes_in_which_weights_are_stored_updated_and_computed(tmp_path: Path) -> None:
    cpu = {"bf16": False, "use_cpu": True}
    for changes, backend, dtypes in (
        ({}, "torch", "float32 float32 bfloat16"),
        (cpu, "torch", "float32 float32 float32"),
        ({"fp16": True}, "torch", "float32 float32 float16"),
        (BF16, "torch", "bfloat16 bfloat16 bfloat16"),
        ({**BF16, "optim": "adamw_bf16"}, "torch", "bfloat16 float32 bfloat16"),
        ({"dtype": "auto"}, "torch", "bfloat16 bfloat16 bfloat16"),
        (LORA, "torch", "float32 float32 bfloat16"),
        (QLORA, "torch", "bfloat16 float32 bfloat16"),
        ({**LORA, "load_in_8bit": True, "load_in_4bit": False}, "torch", "bfloat16 float32 bfloat16"),
        ({**QLORA, "optim": "adamw_torch_fused"}, "torch", "bfloat16 bfloat16 bfloat16"),
        ({}, "deepspeed", "bfloat16 float32 bfloat16"),
        ({**BF16, **cpu}, "deepspeed", "float32 float32 float32"),
        ({**QLORA, "fp16": True}, "deepspeed", "float16 float32 float16"),
        (BF16, "fsdp", "float32 float32 bfloat16"),
        ({**BF16, **cpu}, "fsdp", "bfloat16 bfloat16 bfloat16"),
    ):
        found = precision_of(recipe(tmp_path, **changes), Machine(1, True, backend))  # type: ignore[arg-type]
        assert f"{found.stored} {found.updated} {found.computed}" == dtypes, (changes, backend)


DEEPSPEED = Machine(2, True, "deepspeed")
CB = {"use_transformers_continuous_batching": True}
REFUSED: list[tuple[dict[str, object], Machine, str, str]] = [
    ({**BF16, "optim": "adamw_bf16"}, DEEPSPEED, "`optim: adamw_bf16`", "DeepSpeed"),
    ({**BF16, "optim": "adamw_bf16", "optim_args": "a=1"}, GPU, "`optim_args`", "'a=1'"),
    ({"dtype": "float16", "fp16": True}, GPU, "`dtype`", "`fp16: true`"),
    ({"dtype": "float16", "optim": "adamw_bf16"}, GPU, "`dtype`", "float16"),
    (CB, GPU, "`use_transformers_continuous_batching`", "`bf16: false`"),
    ({**CB, "fp16": True}, GPU, "`use_transformers_continuous_batching`", "`fp16: false`"),
    ({**CB, **BF16, "fp16": True}, GPU, "`use_transformers_continuous_batching`", "bfloat16 to float16"),
]


def test_a_precision_that_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    for changes, machine, place, figure in REFUSED:
        with refused(f"mine.yaml: {place}", figure, by=RecipeError):
            check(recipe(tmp_path, **changes), machine)


def test_a_precision_that_can_be_trained_passes(tmp_path: Path) -> None:
    for changes, machine in (
        ({**CB, **BF16, "optim": "adamw_bf16"}, GPU),
        ({**CB, "bf16": False, "use_cpu": True}, GPU),
        (CB, DEEPSPEED),
        ({"dtype": "float16", "fp16": True}, DEEPSPEED),
        (QLORA, DEEPSPEED),
        ({**BF16, "optim": "adamw_bf16"}, Machine(2, True, "fsdp")),
    ):
        check(recipe(tmp_path, **changes), machine)


def test_the_recipe_accepts_adamw_bf16_and_trl_receives_another_name(tmp_path: Path) -> None:
    """`GRPOConfig` does not know `adamw_bf16`."""
    mine = recipe(tmp_path, **BF16, optim="adamw_bf16", use_cpu=True, bf16=False)
    assert grpo_config(mine).optim == "adamw_torch"
    assert (mine.as_dict()["optim"], optimizer_name(mine, GPU)) == ("adamw_bf16", "adamw_bf16")
    other = parse_recipe(["--config", mine.source, "--optim", "adamw_torch_fused"])
    assert other.training["optim"] == "adamw_torch_fused"


def test_the_backend_is_read_from_a_configuration_the_environment_and_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "layout.yaml"
    for text, backend in (("DEEPSPEED", "deepspeed"), ("FSDP", "fsdp"), ("MULTI_GPU", "torch")):
        path.write_text(f"num_processes: 2\ndistributed_type: {text}\n")
        assert Machine.described(path).backend == backend
    assert Machine.here().backend == "torch"
    for switch, backend in (("ACCELERATE_USE_FSDP", "fsdp"), ("ACCELERATE_USE_DEEPSPEED", "deepspeed")):
        monkeypatch.setenv(switch, "true")
        assert Machine.here().backend == backend
    (tmp_path / "ds.json").write_text("{}")
    for keys, backend in (({"deepspeed": str(tmp_path / "ds.json")}, "deepspeed"), ({"fsdp": "full_shard"}, "fsdp")):
        for machine in (GPU, Machine(2, True, "fsdp")):
            assert backend_of(recipe(tmp_path, **keys), machine) == backend
    assert backend_of(recipe(tmp_path), DEEPSPEED) == "deepspeed"


def test_bfloat16_needs_a_gpu_that_has_it(tmp_path: Path) -> None:
    for keys in ({}, {"bf16": True}):  # TRL's default is bfloat16
        mine = recipe(tmp_path, **keys)
        check_machine(mine, GPU)
        with refused("`bf16`", "`use_cpu: true`", by=RecipeError):
            check_machine(mine, Machine(1, bf16=False))
    for keys in ({"bf16": False}, {"fp16": True}, {"use_cpu": True}, {"bf16": True, "use_cpu": True}):
        check_machine(recipe(tmp_path, **keys), Machine(1, bf16=False))


def test_the_default_optimizer_of_a_quantized_base_keeps_updates(tmp_path: Path) -> None:
    for keys, machine, name in (
        (QLORA, GPU, "adamw_bf16"),
        ({**LORA, "load_in_8bit": True}, GPU, "adamw_bf16"),
        ({**QLORA, "optim": "adamw_torch"}, GPU, "adamw_torch"),
        (QLORA, DEEPSPEED, "adamw_torch_fused"),
        (LORA, GPU, "adamw_torch_fused"),
    ):
        assert optimizer_name(recipe(tmp_path, **keys), machine) == name


def test_early_stopping_needs_evaluations_and_a_metric(tmp_path: Path) -> None:
    keys = {"eval_strategy": "steps", "load_best_model_at_end": True, "metric_for_best_model": "eval_reward"}
    check_early_stopping(recipe(tmp_path, early_stopping_patience=2, **keys))
    for missing in keys:
        others = {key: value for key, value in keys.items() if key != missing}
        with refused("`early_stopping_patience`", f"`{missing}", by=RecipeError):
            check_early_stopping(recipe(tmp_path, early_stopping_patience=2, **others))


def test_the_machine_of_a_process_is_the_whole_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert Machine.here().num_processes == 16
    path = tmp_path / "layout.yaml"
    for text, bf16 in (("", True), ("use_cpu: false\n", True), ("use_cpu: true\n", False)):
        path.write_text(f"num_processes: 2\n{text}")
        assert Machine.described(path) == Machine(2, bf16)


def planned(folder: Path, name: str, size: str, *more: str) -> list[str]:
    config, rows = qwen.write_config(folder, size), launching.write_rows(folder / "rows.jsonl", 640)
    given = ["plan", name, "--model_config", str(config), "--dataset.path", str(rows), "--dataset.split", "train"]
    return [*given, "--gpu_memory", "24GB", "--accelerate_config", "single_gpu", *more]


@pytest.mark.slow
def test_the_precision_of_the_original_runs_is_an_override_that_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name, size, more, share in (
        ("gsm8k-qwen2.5-1.5b-24gb", "1.5B", [], "3%"),
        ("gsm8k-qwen2-0.5b-full-kl", "0.5B", ["--dtype", "bfloat16"], "6%"),
    ):
        assert main(planned(tmp_path, name, size, *more)) == 0
        output = " ".join(capsys.readouterr().out.split())
        assert output.count(f"{share} of an update") == 2
        assert "adamw_torch_fused" in output
        assert "`optim: adamw_bf16`" in output


@pytest.mark.slow
def test_4_bit_keeps_updates_unless_the_recipe_names_the_optimizer_of_trl(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    asked = planned(tmp_path, "gsm8k-qwen2.5-1.5b-lora", "1.5B", "--load_in_4bit", "true", "--json")
    seen = []
    for more in ([], ["--optim", "adamw_torch_fused"]):
        assert main([*asked, *more]) == 0
        seen.append(json.loads(capsys.readouterr().out))
    kept, lost = (run["precision"] for run in seen)
    expected = {"stored": "bfloat16", "updated": "float32", "optim": "adamw_bf16", "surviving": 1}
    assert {key: kept[key] for key in expected} == expected
    assert lost["updated"] == "bfloat16"
    assert lost["surviving"] < 0.5
    (warning,) = [note for note in seen[1]["notes"] if "survives the rounding" in note]
    assert "dtype: float32" not in warning  # TRL casts the adapter for any `dtype`
    memory, shape = seen[0]["memory"], seen[0]["memory"]["shape"]
    assert memory["fits"]
    # 10 bytes of state per weight of the adapter, instead of 2 moments of 2 bytes.
    assert memory["optimizer"] - seen[1]["memory"]["optimizer"] == 6 * shape["trained"]
    # `bitsandbytes`' NF4 of Qwen2.5-1.5B: 1.31 billion linear weights at 0.5625 bytes, the rest in 16 bits.
    frozen = shape["parameters"] - shape["trained"]
    linear = 28 * (1536 * (1536 + 256 + 256) + 1536 * 1536 + 3 * 1536 * 8960)
    assert shape["quantisable"] == linear
    expected_bytes = 0.5625 * linear + 2 * (frozen - linear) + 2 * shape["trained"]
    assert memory["parameters"] == pytest.approx(expected_bytes)
    assert expected_bytes < 1.3 * GIB


def test_every_plain_adamw_of_transformers_is_known() -> None:
    for optim in ("torch", "torch_fused", "torch_xla", "torch_npu_fused", "apex_fused"):
        share = precision(optim=f"adamw_{optim}").surviving(initial_weights(0.02))
        assert share is not None
        assert 0 < share < 0.1


def test_a_share_below_one_half_is_warned_of() -> None:
    assert precision().warning(0.5) is precision().warning(None) is None
    for share, figure in ((0.494, "49%"), (0.0, "0%")):
        assert figure in str(precision().warning(share))
        assert figure in precision().describe(share)
    for made, share in ((precision(), None), (precision(optim="adamw_bf16"), 1.0)):
        assert "%" not in made.describe(share)


def test_an_adapter_is_trained_in_its_own_precision(tmp_path: Path) -> None:
    """A base in few bits without an adapter keeps the dtype of the recipe."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    mine = recipe(tmp_path, **BF16, model_name_or_path=str(tmp_path / "adapter"))
    assert precision_of(mine, GPU).stored == "float32"
    for keys, stored in ((BF16, "bfloat16"), (QLORA, "bfloat16"), ({**QLORA, "dtype": "float32"}, "float32")):
        assert precision_of(recipe(tmp_path, **keys), GPU, is_adapter=False).stored == stored
