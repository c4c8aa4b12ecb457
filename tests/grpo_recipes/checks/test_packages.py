"""Packages that a recipe needs: trackers, vLLM and builds of DeepSpeed's extensions."""

import json
import sys
import warnings
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments
from transformers.integrations import integration_utils
from transformers.training_args import OptimizerNames
from trl import import_utils

from grpo_recipes.checks import packages
from grpo_recipes.data.rendering import PromptTools
from grpo_rewards.errors import UserError
from tests.support import tiny
from tests.support.errors import refused


def places(config: SimpleNamespace) -> list[str]:
    return [error.place for error in packages.missing(config)]


def test_every_missing_tracker_of_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the tracker `azure_ml`, transformers has the function `is_azureml_available`."""
    needed = {"use_vllm": False, "optim": "sgd"}
    for tracker in integration_utils.INTEGRATION_TO_CALLBACK:
        package = packages.TRACKER_PACKAGES.get(tracker, tracker)
        config = SimpleNamespace(report_to=["none", tracker], **needed)
        for is_there in (True, False):
            monkeypatch.setattr(integration_utils, f"is_{package}_available", lambda is_there=is_there: is_there)
            assert places(config) == ([] if is_there else [f"`report_to: {tracker}`"])
    (error,) = packages.missing(SimpleNamespace(report_to=["tensorbord", "all"], **needed))
    assert (error.place, "`tensorboard`" in error.fix) == ("`report_to`", True)
    for report_to in ("none", "all", ["none"], [], None):
        assert places(SimpleNamespace(report_to=report_to, **needed)) == []


@pytest.mark.parametrize(
    ("version", "figures"),
    [
        (None, ["grpo-recipes[vllm]"]),
        ("0.30.0", None),
        ("0.31.0+cu129", None),
        ("0.10.2", ["0.22.0", "0.31.0", "0.10.2"]),
        ("0.32.0", ["0.22.0", "0.31.0", "0.32.0"]),
    ],
)
def test_vllm_must_be_installed_in_a_version_that_trl_supports(
    version: str | None, figures: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installation that `trl.import_utils` sees is simulated. The supported versions are TRL's own."""
    find_spec, version_of = import_utils.importlib.util.find_spec, metadata.version
    monkeypatch.setattr(
        import_utils.importlib.util, "find_spec", lambda name: version if name == "vllm" else find_spec(name)
    )
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "vllm" else version_of(name))
    monkeypatch.setitem(import_utils.PACKAGE_DISTRIBUTION_MAPPING, "vllm", ["vllm"])
    with warnings.catch_warnings():  # each recipe is told, though Python would show the same warning once
        warnings.simplefilter("ignore")
        for _ in range(2):
            output = packages.missing(SimpleNamespace(report_to="none", use_vllm=True, optim="sgd"))
            assert [error.place for error in output] == ["`use_vllm`"] * (figures is not None)
            assert all(figure in str(output[0]) for figure in figures or ())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name.value, marks=() if name.value in ("adamw_8bit", "lomo", "sgd") else pytest.mark.slow)
        for name in OptimizerNames
    ],
)
def test_the_package_of_an_optimizer_is_the_one_that_transformers_imports(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any other package, transformers builds the optimizers that are said to need none."""
    absent = {module for module, _ in packages.OPTIMIZER_PACKAGES.values()}
    imported = {module for module in sys.modules if module.partition(".")[0] in absent}
    for module in absent | imported:
        monkeypatch.setitem(sys.modules, module, None)
    missing = packages.missing_optimizer(SimpleNamespace(optim=name))
    arguments = TrainingArguments(output_dir="none", optim=name, optim_target_modules=["0"], use_cpu=True)
    network = torch.nn.Sequential(torch.nn.Linear(2, 2))
    if name in ("adamw_torch_xla", "adamw_torch_npu_fused"):  # optimizers of another device
        assert missing == []
        return
    try:
        optimizer_class, _ = Trainer.get_optimizer_cls_and_kwargs(arguments, network)
    except (ImportError, ValueError, RuntimeError):
        assert missing, "transformers needs a package"
    else:
        assert missing == []
        assert issubclass(optimizer_class, torch.optim.Optimizer)


def test_a_quantized_base_needs_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for key in ("load_in_4bit", "load_in_8bit"):
        (error,) = packages.missing_quantization({key: True})
        assert (error.place, "bitsandbytes" in error.problem) == (f"`{key}`", True)
    assert packages.missing_quantization({"load_in_4bit": False, "dtype": "bfloat16"}) == []
    module = ModuleType("bitsandbytes")
    module.__spec__ = ModuleSpec("bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", module)
    assert packages.missing_quantization({"load_in_4bit": True}) == []


VLLM = {"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2, "vllm_max_model_length": 100}


def test_engines_must_be_shared_evenly() -> None:
    model = {"model_name_or_path": "nowhere"}
    config = SimpleNamespace(**VLLM)
    packages.check_vllm(config, 4, model)
    with refused("`vllm_tensor_parallel_size`", "2", "3"):
        packages.check_vllm(config, 3, model)
    packages.check_vllm(SimpleNamespace(**{**VLLM, "vllm_mode": "server"}), 3, model)
    packages.check_vllm(SimpleNamespace(**{**VLLM, "use_vllm": False}), 3, model)
    packages.check_vllm(config, 4, {**model, "load_in_4bit": True})
    with refused("`load_in_8bit`"):
        packages.check_vllm(config, 4, {**model, "load_in_8bit": True})


def test_a_prompt_and_its_completion_must_fit_into_the_context_of_vllm() -> None:
    fields = {**VLLM, "max_completion_length": 40}
    packages.check_vllm_lengths(SimpleNamespace(**fields), 60)
    with refused("`vllm_max_model_length`", 100, 61, 40, 101, "`dataset.max_prompt_tokens`"):
        packages.check_vllm_lengths(SimpleNamespace(**fields), 61)
    for change in ({"vllm_mode": "server"}, {"use_vllm": False}, {"vllm_max_model_length": None}):
        packages.check_vllm_lengths(SimpleNamespace(**{**fields, **change}), 61)


def test_an_adapter_that_can_be_merged_may_be_served(tmp_path: Path) -> None:
    config, model = SimpleNamespace(**VLLM), {"model_name_or_path": str(tmp_path)}
    file, content = tmp_path / "adapter_config.json", {"base_model_name_or_path": "base"}
    file.write_text(json.dumps({**content, "peft_type": "LORA"}))
    packages.check_vllm(config, 4, model)
    file.write_text(json.dumps({**content, "peft_type": "PROMPT_TUNING"}))
    with refused(f"`model_name_or_path`: {tmp_path}", "PROMPT_TUNING", "`use_vllm: false`"):
        packages.check_vllm(config, 4, model)


def test_prompts_are_measured_as_the_model_sees_them() -> None:
    """Messages go through the chat template with its arguments and the tools."""
    template = tiny.CHATML + "{{ 'x' * (more or 0) }}{% if tools %}{{ 'y' * 7 }}{% endif %}"
    tokenizer = tiny.chat_tokenizer(template)

    def table(*lengths: int) -> Dataset:
        return Dataset.from_dict({"prompt": [[{"role": "user", "content": "a" * length}] for length in lengths]})

    def fits(limit: int, *tables: Dataset | None, more: int = 0, tools: PromptTools | None = None, **keys: str) -> bool:
        values = {**VLLM, "vllm_max_model_length": limit, "max_completion_length": 40, **keys}
        given = {"more": more} if more else None
        try:
            packages.check_vllm_prompts(SimpleNamespace(**values, chat_template_kwargs=given), tables, tokenizer, tools)
        except UserError:
            return False
        return True

    needed = 1 + len("user\n") + 1 + 1 + len("assistant\n") + 9 + 40
    tools = PromptTools({None: [{"name": "a tool"}]})
    for tables in ((table(3, 9, 5),), (table(9), None, table(2)), (None, table(2), table(9))):
        for more, keys in ((0, {}), (5, {"more": 5}), (7, {"tools": tools})):
            assert fits(needed + more, *tables, **keys)
            assert not fits(needed + more - 1, *tables, **keys)
        assert fits(needed - 1, *tables, vllm_mode="server")
    assert not fits(0, table(1)), "a limit of 0 is one too"
    assert fits(40, None)
