"""Saved models: the check of their files, tokenizers, dtypes, quantized bases, and loading."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

from grpo_recipes.checks.tokenizer import ChatTemplate
from grpo_recipes.evaluation import evaluate, saved_model, summary
from grpo_recipes.evaluation.saved_model import SavedModel
from grpo_recipes.evaluation.vllm_engine import needs_merging
from tests.support.errors import refused
from tests.support.quantized import needs_bitsandbytes, save_run, trained_policy
from tests.support.short_runs import log_probabilities
from tests.support.tiny import byte_tokenizer, chat_tokenizer, policy, save_policy

# ---- tokenizers


def test_a_tokenizer_pads_with_its_end_token_if_it_has_no_other(tmp_path: Path) -> None:
    for pad, end, expected in (("<pad>", "<eos>", "<pad>"), (None, "<eos>", "<eos>"), (None, None, None)):
        tokenizer = byte_tokenizer()
        tokenizer.pad_token, tokenizer.eos_token = pad, end
        tokenizer.save_pretrained(tmp_path)
        with nullcontext() if expected else refused(tmp_path, "pad_token", "eos_token"):
            assert SavedModel(str(tmp_path)).padding_tokenizer().pad_token == expected
    chat_tokenizer().save_pretrained(tmp_path)
    template = ChatTemplate(Path("chat_template.jinja"), "text", None)
    assert SavedModel(str(tmp_path)).padding_tokenizer(template).chat_template == "text"


# ---- models


def test_a_model_is_loaded_without_code_of_its_own_and_without_pickles(tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[dict[str, object]] = []

    def fails(name: str, **options: object) -> None:
        seen.append(options)
        raise OSError("no such\nfile")

    for loader in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM, peft.AutoPeftModelForCausalLM):
        monkeypatch.setattr(loader, "from_pretrained", fails)
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    for folder in (model, adapter):
        folder.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    for folder in (model, adapter):
        with refused(folder, "no such file"):
            SavedModel(str(folder)).load()
    with refused(model, "no such file"):
        SavedModel(str(model)).tokenizer()
    assert all(options["trust_remote_code"] is False for options in seen)
    assert [options.get("use_safetensors") for options in seen] == [True, True, None]


def test_a_model_keeps_the_dtype_of_its_files_and_has_finite_weights(tmp_path: Path) -> None:
    model = policy().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert SavedModel(str(tmp_path)).load().dtype == torch.bfloat16
    model.lm_head.weight.data[3, 4] = float("nan")
    model.save_pretrained(tmp_path)
    with refused(tmp_path, "1", "lm_head.weight"):
        SavedModel(str(tmp_path)).load()


def test_an_adapters_base_keeps_its_layout_in_4_bits(tmp_path: Path, monkeypatch: Any) -> None:
    model = torch.nn.Linear(2, 2)
    model.support_avx512bf16_for_cpu = True
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(peft.AutoPeftModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    assert not SavedModel(str(tmp_path)).load().support_avx512bf16_for_cpu


def test_folders_of_models_are_checked_before_they_are_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    with refused("runs/none"):
        SavedModel.checked("./runs/none")
    empty = tmp_path / "empty"
    empty.mkdir()
    with refused(empty):
        SavedModel.checked(str(empty))
    for step in (2, 10):
        (empty / f"checkpoint-{step}").mkdir()
    with refused(empty, empty / "checkpoint-10"):
        SavedModel.checked(str(empty))
    base, adapter = save_policy(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    save_file({"a": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    monkeypatch.chdir(tmp_path)

    def check(named: str | None) -> None:
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": named}))
        SavedModel.in_folder(adapter)

    for named in ("base", "owner/model", "", None):
        check(named)
    with refused(adapter, tmp_path / "gone", "`base_model_name_or_path`"):
        check(str(tmp_path / "gone"))
    (base / "model.safetensors").write_bytes(b"damaged")
    with refused("base/model.safetensors"):
        check("base")
    with refused(base / "model.safetensors"):
        SavedModel.checked(str(base))
    (adapter / "adapter_model.safetensors").write_bytes(b"damaged")
    with refused(adapter):
        check(None)


def test_a_model_without_published_settings_has_those_of_its_configuration(tmp_path: Path) -> None:
    folder, adapter = save_policy(tmp_path / "m", eos_token_id=7), tmp_path / "adapter"
    adapter.mkdir()
    config = {"base_model_name_or_path": str(folder), "peft_type": "LORA"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert SavedModel(str(adapter)).generation_config().eos_token_id == 9
    (folder / "generation_config.json").unlink()
    for name in (folder, adapter):
        assert SavedModel(str(name)).generation_config().eos_token_id == 7


def test_the_dtype_of_a_model_is_that_of_its_file_or_unknown(tmp_path: Path) -> None:
    folder = save_policy(tmp_path / "m")
    assert SavedModel(str(folder)).dtype == "float32"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: one for key, one in config.items() if "dtype" not in key}))
    assert SavedModel(str(folder)).dtype is None
    assert SavedModel(str(tmp_path)).dtype is None


@pytest.mark.parametrize("answers", [True, False])
def test_a_hub_that_does_not_answer_is_not_asked_for_a_dtype(monkeypatch: Any, answers: bool) -> None:
    """The dtype of a model of images and text is that of its text."""

    def read(name: str, **options: object) -> Any:
        assert options == {"local_files_only": not answers, "trust_remote_code": False}
        return SimpleNamespace(dtype=torch.float16, get_text_config=lambda: SimpleNamespace(dtype=torch.bfloat16))

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", read)
    monkeypatch.setattr(saved_model, "hub_answers", lambda: answers)
    assert SavedModel("org/model").dtype == "bfloat16"


# ---- quantized bases


@needs_bitsandbytes
def test_the_base_of_an_adapter_is_quantized_as_its_run_did(tmp_path: Path) -> None:
    def record(**recipe: Any) -> None:
        (tmp_path / "run.json").write_text(json.dumps({"recipe": {"model_name_or_path": "m", **recipe}}))

    record(load_in_8bit=True)
    assert SavedModel(str(tmp_path)).describe_quantization() == {}, "no adapter"
    (tmp_path / "adapter_config.json").write_text("{}")
    assert SavedModel(str(tmp_path)).describe_quantization() == {"quantization": "8 bits"}
    record(max_steps=3)
    assert SavedModel(str(tmp_path)).quantization is None
    for kind in ("nf4", "fp4"):
        record(load_in_4bit=True, bnb_4bit_quant_type=kind, use_bnb_nested_quant=True)
        (shown,) = SavedModel(str(tmp_path)).describe_quantization().values()
        assert shown.startswith("4 bits")
        assert kind in shown
        found = SavedModel(str(tmp_path)).quantization
        assert (found.load_in_4bit, found.bnb_4bit_use_double_quant) == (True, True)
    record(load_in_4bit=True, bnb_4bit_quant_type=7)
    with refused(tmp_path, "run.json"):
        SavedModel(str(tmp_path)).describe_quantization()


@pytest.mark.slow
@needs_bitsandbytes
def test_an_adapter_is_evaluated_on_the_base_in_4_bits_that_it_was_trained_on(tmp_path: Path) -> None:
    checkpoint = save_run(tmp_path)
    model = SavedModel(str(checkpoint)).load()
    text = "3 + 4 = 7"
    torch.testing.assert_close(log_probabilities(model, text), log_probabilities(trained_policy(tmp_path), text))
    assert needs_merging(SavedModel(str(checkpoint)))
    options = {"dataset": "arithmetic", "split": "test[:2]", "max_new_tokens": 2, "prompt_format": "text"}
    plain = evaluate.evaluate_model(tmp_path / "base", output=tmp_path / "a", **options)
    assert "quantization" not in plain["made_with"]
    evaluate.evaluate_model(checkpoint, output=tmp_path / "b", **options)
    made_with = json.loads((tmp_path / "b" / "evaluation.json").read_text())["made_with"]
    assert made_with["dtype"] == "bfloat16"
    assert "nf4" in made_with["quantization"]
    (warning,) = summary.compare(tmp_path / "a", tmp_path / "b")["warnings"]
    assert f"quantization not recorded and {made_with['quantization']}" in warning
