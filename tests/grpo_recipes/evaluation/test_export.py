"""`grpo-recipes export`: the folder computes, ends and samples as the run does, is complete, and stays where it is."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from grpo_recipes import cli
from grpo_recipes.evaluation.engines import load_engine
from grpo_recipes.evaluation.export import _serving_config, export, serving_commands
from grpo_recipes.evaluation.saved_model import SavedModel
from grpo_recipes.evaluation.settings import Settings
from tests.support import tiny
from tests.support.errors import refused
from tests.support.short_runs import moved

PROMPTS = ["1 + 1 =", "b", "a longer prompt"]
CONFIG = {"temperature": 0.7, "top_k": -1, "generation_kwargs": {"min_p": 0.1, "stop": ["</answer>"]}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run whose base publishes a penalty and an end token of its own."""
    folder = tiny.save_policy(tmp_path_factory.mktemp("export") / "run")
    published = {"repetition_penalty": 1.5, "top_k": 3, "do_sample": True, "eos_token_id": 60, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(published))
    (folder / "run.json").write_text(json.dumps({"recipe": {"dataset": {"name": "gsm8k"}}, "config": CONFIG}))
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# the run\n")
    (folder / "LICENSE").write_text("Apache-2.0\n")
    return folder


@pytest.fixture(scope="module")
def adapter(run: Path) -> Path:
    folder = run.with_name("adapter")
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    moved(get_peft_model(AutoModelForCausalLM.from_pretrained(run), config)).save_pretrained(folder)
    return folder


def evaluated(source: Path) -> list[str]:
    """Return the greedy completions of an evaluation."""
    model = SavedModel(str(source))
    return load_engine(model, model.padding_tokenizer())(PROMPTS, Settings(max_new_tokens=16, strict=None))


def greedy(folder: Path) -> list[str]:
    """Return the greedy completions that transformers generates from the folder's own files, without any setting."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=16)
        found.append(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return found


@pytest.mark.parametrize("kind", ["adapter", pytest.param("run", marks=pytest.mark.slow)])
def test_the_folder_gives_the_greedy_tokens_of_the_run(kind: str, tmp_path: Path, request: Any) -> None:
    source = request.getfixturevalue(kind)
    expected = evaluated(source)
    assert len(set(map(len, expected))) > 1, "some end at an end token"
    export(source, tmp_path / "out")
    assert greedy(tmp_path / "out") == expected
    if kind == "run":
        assert greedy(source) != expected, "by the published settings"
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_generation_config_samples_and_ends_as_training_did(run: Path, tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["export", str(run), "--to", str(tmp_path / "out")]) == 0
    config = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (config.do_sample, config.temperature, config.top_k, config.top_p) == (True, 0.7, 0, 1.0)
    assert (config.min_p, config.repetition_penalty) == (0.1, 1.0)
    assert config.eos_token_id == [1, 60]
    assert "'</answer>'" in capsys.readouterr().out


def test_template_card_and_license_are_in_the_folder(run: Path, tmp_path: Path) -> None:
    source = tmp_path / "run"
    shutil.copytree(run, source)
    tiny.chat_tokenizer().save_pretrained(source)
    for name in ("LICENSE.md", "LICENSE.txt", "NOTICE"):
        (source / name).write_text(f"text of {name}")
    export(source, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == tiny.CHATML
    for name in ("README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE"):
        assert (tmp_path / "out" / name).read_text() == (source / name).read_text()


@pytest.mark.parametrize("error", [OSError(28, "full"), SafetensorError("full"), KeyboardInterrupt()], ids=repr)
def test_an_export_that_fails_leaves_nothing(
    error: BaseException, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    save = PreTrainedModel.save_pretrained

    def fails(model: Any, place: Path, **options: Any) -> None:
        save(model, place, **options)
        raise error

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fails)
    (tmp_path / "out").mkdir()
    code = 130 if isinstance(error, KeyboardInterrupt) else 2
    assert cli.main(["export", str(run), "--to", str(tmp_path / "out")]) == code
    output = capsys.readouterr().err
    assert "Traceback" not in output
    assert ("full" in output) == (code == 2)
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


def test_the_commands_that_serve_the_folder() -> None:
    vllm, transformers, llama_cpp = map(shlex.split, serving_commands(Path("my model"), "float32"))
    assert vllm == ["vllm", "serve", "my model", "--dtype", "float32"]
    assert transformers == ["transformers", "serve", "my model"]
    assert llama_cpp[:3] == ["python", "convert_hf_to_gguf.py", "my model"]
    assert llama_cpp[3:] == ["--outfile", "my model.gguf", "--outtype", "f32"]
    for dtype, kind in (("float16", "f16"), ("float64", "auto")):
        first, *_, last = serving_commands(Path("a"), dtype)
        assert first == "vllm serve a"
        assert last.endswith(f"--outtype {kind}")
    serve = pytest.importorskip("transformers.cli.serve", reason="needs typer, which transformers' command brings")
    assert next(iter(list(inspect.signature(serve.Serve).parameters))) == "force_model", "its first argument"


def test_16_bit_weights_keep_their_dtype(tmp_path: Path) -> None:
    source = tmp_path / "run"
    tiny.policy().to(torch.bfloat16).save_pretrained(source)
    tiny.byte_tokenizer().save_pretrained(source)
    commands = export(source, tmp_path / "out")[-3:]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16
    assert "--dtype" not in commands[0]
    assert commands[2].endswith("--outtype bf16")


def test_an_empty_folder_is_filled_and_others_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    export(run, tmp_path / "empty")
    (tmp_path / "file").write_text("")
    for name in ("empty", "file"):
        with refused(f"--to {tmp_path / name}"):
            export(run, tmp_path / name)


def test_no_link_is_followed(run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    source = tmp_path / "run"
    shutil.copytree(run, source)
    (source / "linked").symlink_to(outside)
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    for target in (source / "linked", source / "linked" / "out", tmp_path / "dangling"):
        with refused(target):
            export(source, target)
    assert os.listdir(outside) == []
    assert not (tmp_path / "elsewhere").exists()


def test_other_users_can_read_the_folder_as_the_umask_lets_them(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    (tmp_path / "new").write_text("")
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "new").stat().st_mode}


@pytest.mark.parametrize("kind", ["run", pytest.param("adapter", marks=pytest.mark.slow)])
def test_a_checkpoint_is_exported_with_the_sampling_of_its_run(kind: str, tmp_path: Path, request: Any) -> None:
    source = request.getfixturevalue(kind)
    checkpoint = tmp_path / "trained" / "checkpoint-2"
    shutil.copytree(source, checkpoint, ignore=shutil.ignore_patterns("run.json"))
    (checkpoint / "optimizer.pt").write_bytes(b"state")
    record = {"recipe": {"dataset": {"name": "gsm8k"}}, "config": CONFIG}
    (checkpoint.parent / "run.json").write_text(json.dumps(record))
    export(checkpoint, tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.7
    assert greedy(tmp_path / "out") == evaluated(source)
    assert not (tmp_path / "out" / "optimizer.pt").exists()


def test_the_card_of_a_merged_adapter_says_so(adapter: Path, tmp_path: Path) -> None:
    source = shutil.copytree(adapter, tmp_path / "source")
    (source / "README.md").write_text("---\nlibrary_name: peft\n---\n\n# the run\n")
    (source / "NOTICE").write_text("a notice")
    exported = export(source, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n---\n\n# the run\n")
    assert (tmp_path / "out" / "NOTICE").read_text() == "a notice"
    assert exported[0].startswith(f"{tmp_path / 'out'}: {source} merged into ")
    (source / "README.md").unlink()
    export(source, tmp_path / "other")
    assert not (tmp_path / "other" / "README.md").exists(), "the base's card is not the run's"


def test_a_source_that_is_no_model_is_refused(run: Path, tmp_path: Path) -> None:
    with refused(tmp_path / "none"):
        export(tmp_path / "none", tmp_path / "out")
    source = shutil.copytree(run, tmp_path / "source")
    (source / "model.safetensors").write_bytes(b"damaged")
    with refused(source / "model.safetensors"):
        export(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("published", "end", "pad", "expected"),
    [
        ({"bos_token_id": 3, "eos_token_id": 60, "pad_token_id": 9}, 1, 0, (3, [1, 60], 0)),
        ({"eos_token_id": None}, 1, None, (None, [1], 1)),
    ],
)
def test_a_server_begins_ends_and_pads_as_the_training_did(
    published: dict[str, Any], end: int | None, pad: int | None, expected: tuple[Any, ...]
) -> None:
    tokenizer = SimpleNamespace(eos_token_id=end, pad_token_id=pad)
    config = _serving_config(GenerationConfig(**published), {"temperature": 0.5, "min_p": 0.1}, tokenizer)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == expected
    assert (config.do_sample, config.temperature, config.min_p) == (True, 0.5, 0.1)
