"""`grpo-recipes merge`: the merged model computes what base and adapter compute, and loads like any other model."""

import copy
import json
import math
import re
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_recipes.checks import packages
from grpo_recipes.evaluation import merge
from grpo_recipes.evaluation.saved_model import SavedModel
from tests.support import tiny
from tests.support.errors import refused
from tests.support.quantized import needs_bitsandbytes, save_run, trained_policy
from tests.support.short_runs import log_probabilities, moved

TEXT = "3 + 4 = 7"
LORA = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM")
Runs = dict[torch.dtype, Path]
CARD = "---\nlibrary_name: peft\nbase_model: some/base\n---\n\n# the run\n"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_policy(tmp_path_factory.mktemp("merge") / "policy")


def run_with(folder: Path, policy: Path, config: PeftConfig, dtype: torch.dtype = torch.float32) -> Path:
    """Write the files of a run with an adapter: the trained adapter and a model card."""
    base = AutoModelForCausalLM.from_pretrained(policy, dtype=dtype)
    if dtype != torch.float32:
        base.save_pretrained(policy := folder.with_name("base"))
        tiny.byte_tokenizer().save_pretrained(policy)
        base = AutoModelForCausalLM.from_pretrained(policy, dtype=dtype)
    torch.manual_seed(0)
    adapted = get_peft_model(base, copy.deepcopy(config))
    (adapted if config.is_prompt_learning else moved(adapted)).save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.fixture(scope="module")
def runs(policy: Path) -> Runs:
    """Return a run with an adapter on a base of each dtype."""
    kinds = {torch.float32: "32", torch.bfloat16: "16"}
    return {dtype: run_with(policy.with_name(name), policy, LORA, dtype) for dtype, name in kinds.items()}


def test_the_merged_model_computes_what_base_and_adapter_compute(policy: Path, runs: Runs, tmp_path: Path) -> None:
    run = runs[torch.float32]
    report = merge.merge(run, tmp_path / "out" / "model")
    base = AutoModelForCausalLM.from_pretrained(policy).eval()
    row = torch.linspace(0, 257, 64).long()[None]
    alone, before = log_probabilities(base, TEXT), base(row).logits
    adapted = PeftModel.from_pretrained(base, run).eval()
    together, after = log_probabilities(adapted, TEXT), adapted(row).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert not hasattr(merged, "peft_config")
    torch.testing.assert_close(log_probabilities(merged, TEXT), together, atol=1e-5, rtol=0)
    assert (together - alone).abs().max() > 0.01, "the adapter does something"
    assert report.startswith(f"{tmp_path / 'out' / 'model'}: {run} ")
    assert f" {policy}, float32; " in report
    moves, changes = (float(number) for number in re.findall(r" to ([\d.e+-]+)", report))
    assert moves == pytest.approx((after - before).abs().max().item(), rel=0.06)
    assert changes < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    assert tokenizer(TEXT)["input_ids"] == AutoTokenizer.from_pretrained(policy)(TEXT)["input_ids"]
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert "library_name: transformers" in card
    assert card.startswith(CARD.replace("peft", "transformers"))


@needs_bitsandbytes
def test_a_base_in_4_bits_is_merged_as_the_adapter_knew_it(tmp_path: Path) -> None:
    """The merged model has 16 bits, and is ten times nearer to the policy than the adapter on the base as published."""
    checkpoint = save_run(tmp_path)
    report = merge.merge(checkpoint, tmp_path / "model")
    trained = log_probabilities(trained_policy(tmp_path), TEXT)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    other = log_probabilities(PeftModel.from_pretrained(published, checkpoint), TEXT)
    assert 10 * (log_probabilities(merged, TEXT) - trained).abs().mean() < (other - trained).abs().mean()
    assert "base, dequantized, bfloat16; " in report


def test_a_base_in_4_bits_without_bitsandbytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_run(tmp_path)
    monkeypatch.setattr(packages, "find_spec", lambda module: None)
    with refused(checkpoint, "`load_in_4bit`", "grpo-recipes[qlora]"):
        merge.merge(checkpoint, tmp_path / "model")
    assert not (tmp_path / "model").exists()


ERRORS = [
    (torch.float32, 5e-4, True),
    (torch.float32, -2e-3, False),
    (torch.float32, math.nan, False),
    (torch.bfloat16, 2e-2, True),
    (torch.bfloat16, 7e-2, False),
]


@pytest.mark.parametrize(("dtype", "error", "passes"), ERRORS, ids=str)
def test_a_merge_may_change_no_logit_by_more_than_rounding(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, error: float, passes: bool
) -> None:
    """A thousandth of the largest logit is allowed in float32. Scaled norms change logits by a known share."""
    run = runs[dtype]

    def merge_and_damage(model: PeftModel, **options: bool) -> torch.nn.Module:
        assert options == {"safe_merge": True}, "which refuses weights that are not finite"
        merged = model.base_model.merge_and_unload(**options)
        merged.model.norm.weight.data *= 1 + error
        return merged

    monkeypatch.setattr(PeftModel, "merge_and_unload", merge_and_damage, raising=False)
    with nullcontext() if passes else refused(run):
        assert f", {str(dtype).removeprefix('torch.')}; " in merge.merge(run, tmp_path / "model")
    assert (tmp_path / "model").exists() == passes
    if passes:
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
        assert {parameter.dtype for parameter in merged.parameters()} == {dtype}, "that of the base"


def test_a_merge_that_loses_the_adapter_or_fails_is_refused(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs[torch.float32]
    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda model, **_: model.unload(), raising=False)
    with refused(run):
        merge.merge(run, tmp_path / "model")
    monkeypatch.setattr(PeftModel, "merge_and_unload", Mock(side_effect=NotImplementedError("no")), raising=False)
    with refused(run, "LORA", "(no)"):
        merge.merge(run, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_models_that_cannot_be_merged_are_refused(policy: Path, tmp_path: Path) -> None:
    tokens = run_with(tmp_path / "tokens", policy, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with refused(tokens, "PROMPT_TUNING"):
        merge.merge(tokens, tmp_path / "model")
    with refused(tmp_path / "none"):
        merge.merge(tmp_path / "none", tmp_path / "model")
    with refused(policy, "adapter_config.json"):
        merge.merge(policy, tmp_path / "model")
    run = run_with(tmp_path / "run", policy, LORA)
    with refused(f"--output {policy}"):
        merge.merge(run, policy)
    config = run / "adapter_config.json"
    config.write_text(config.read_text().replace(str(policy), "/nowhere/base"))
    with refused(run, "/nowhere/base", "`base_model_name_or_path`"):
        merge.merge(run, tmp_path / "model")
    (run / "adapter_model.safetensors").write_bytes(b"damaged")
    with refused(run / "adapter_model.safetensors"):
        merge.merge(run, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_the_model_loads(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file/model", "file", "link", "x" * 300):
        with refused(f"--output {tmp_path / name}"):
            merge.merge(policy, tmp_path / name)  # a full model, which would be refused otherwise


def test_the_base_is_loaded_at_the_revision_of_the_training_and_runs_no_code(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}

    def load(name: str, **arguments: object) -> None:
        given.update(arguments, name=name)
        raise OSError("no such model")

    run = run_with(tmp_path / "run", policy, LORA)
    config = json.loads((run / "adapter_config.json").read_text())
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    for trained, loaded in (("abc", "abc"), (None, "main")):
        (run / "adapter_config.json").write_text(json.dumps({**config, "revision": trained}))
        with refused(run, policy, "no such model", "`base_model_name_or_path`"):
            merge.merged_adapter(SavedModel(str(run)))
        base = {"name": str(policy), "revision": loaded, "dtype": "auto"}
        assert given == {**base, "quantization_config": None, "trust_remote_code": False}
