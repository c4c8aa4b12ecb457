"""`grpo-recipes merge`: the merged model computes what base and adapter compute, and loads like any other model."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_recipes.checks import packages
from grpo_recipes.evaluation import merge
from grpo_rewards.errors import UserError
from tests.support import tiny
from tests.support.quantized import needs_bitsandbytes, save_run, trained_policy
from tests.support.short_runs import log_probabilities, moved

TEXT = "3 + 4 = 7"
LORA = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM")
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
    adapted = get_peft_model(base, config)
    (adapted if config.is_prompt_learning else moved(adapted)).save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    return folder


def test_the_merged_model_computes_what_base_and_adapter_compute(policy: Path, tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", policy, LORA)
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
    found = re.fullmatch(
        r"(.+): (.+) merged into (.+), float32; the adapter moves .* to (.+), merging .* to (.+)", report
    )
    assert found is not None
    assert found.groups()[:3] == (str(tmp_path / "out" / "model"), str(run), str(policy))
    assert float(found[4]) == pytest.approx((after - before).abs().max().item(), rel=0.06)
    assert float(found[5]) < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    assert tokenizer(TEXT)["input_ids"] == AutoTokenizer.from_pretrained(policy)(TEXT)["input_ids"]
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert "library_name: transformers" in card
    assert card.endswith("\n\n# the run\n\nThe adapter is merged into its base here.\n")


def test_the_merged_model_has_the_dtype_of_the_base(policy: Path, tmp_path: Path) -> None:
    merge.merge(run_with(tmp_path / "run", policy, LORA, torch.bfloat16), tmp_path / "model")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}


@pytest.mark.slow
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
    with pytest.raises(UserError, match=r"bitsandbytes, which is not installed here: .*grpo-recipes\[qlora\]"):
        merge.merge(checkpoint, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_merge_that_loses_the_adapter_is_refused(policy: Path, tmp_path: Path, monkeypatch) -> None:
    run = run_with(tmp_path / "run", policy, LORA)
    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda model, **_: model.unload(), raising=False)
    with pytest.raises(UserError, match="its logits change by up to"):
        merge.merge(run, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize(
    ("dtype", "error", "passes"),
    [
        (torch.float32, 5e-4, True),
        (torch.float32, -2e-3, False),
        (torch.float32, float("nan"), False),
        (torch.float64, 5e-7, True),
        (torch.float64, 2e-6, False),
        (torch.bfloat16, 2e-2, True),
        (torch.bfloat16, 7e-2, False),
    ],
    ids=str,
)
def test_a_merge_may_change_no_logit_by_more_than_rounding(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, error: float, passes: bool
) -> None:
    """A thousandth of the largest logit is allowed in float32. One logit of one token is wrong, as in a lost row."""
    run, logits = run_with(tmp_path / "run", policy, LORA, dtype), merge._logits
    largest: list[float] = []

    def merge_and_mark(model: PeftModel, **options: bool) -> torch.nn.Module:
        merged = model.base_model.merge_and_unload(**options)
        merged.was_merged = True
        return merged

    def damaged_logits(model: torch.nn.Module) -> torch.Tensor:
        found = logits(model)
        if getattr(model, "was_merged", False):
            found[3, 5] += error * largest[-1]
        largest.append(found.abs().max().item())
        return found

    monkeypatch.setattr(PeftModel, "merge_and_unload", merge_and_mark, raising=False)
    monkeypatch.setattr(merge, "_logits", damaged_logits)
    if passes:
        assert f", {str(dtype).removeprefix('torch.')}; " in merge.merge(run, tmp_path / "model")
        return
    with pytest.raises(UserError, match="its logits change by up to"):
        merge.merge(run, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("error", [AttributeError("no"), NotImplementedError("no"), ValueError("no")], ids=repr)
def test_an_adapter_that_peft_can_not_merge_is_named_with_its_kind(
    error: Exception, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(model: PeftModel, **options: bool) -> None:
        assert options == {"safe_merge": True}, "which refuses weights that are no numbers"
        raise error

    run = run_with(tmp_path / "run", policy, LORA)
    monkeypatch.setattr(PeftModel, "merge_and_unload", fails, raising=False)
    with pytest.raises(UserError, match=r"run: peft can't merge an adapter of kind LORA \(no\): use it as it is$"):
        merge.merge(run, tmp_path / "model")


def test_a_quantized_base_is_loaded_again_to_be_dequantized(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits that the merge is compared with are those of the adapter on the quantized base."""
    run = run_with(tmp_path / "run", policy, LORA)
    loaded: list[SimpleNamespace] = []
    kept: list[object] = []

    def load(name: str, **options: object) -> SimpleNamespace:
        assert options["quantization_config"] == f"that of {run}"
        number = len(loaded)
        loaded.append(SimpleNamespace(is_quantized=True, dequantize=lambda: f"base {number} with ordinary weights"))
        return loaded[-1]

    monkeypatch.setattr(merge, "trained_quantization", lambda folder: f"that of {folder}")
    monkeypatch.setattr(merge.AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(merge, "keep_4bit_layout", kept.append)
    monkeypatch.setattr(merge.PeftModel, "from_pretrained", lambda base, folder: ("adapted", base, folder))
    monkeypatch.setattr(merge, "_logits", lambda model: ("logits", *model))
    monkeypatch.setattr(merge, "_merged", lambda *given: (given, "report"))
    model, _, report = merge.merged_adapter(run)
    expected = ("logits", "adapted", loaded[0], str(run))
    assert model == ("base 1 with ordinary weights", run, expected)
    assert report == f"{run} merged into {policy}, dequantized, report"
    assert kept == [loaded[0]]


def test_models_that_cannot_be_merged_are_refused(policy: Path, tmp_path: Path) -> None:
    tokens = run_with(tmp_path / "tokens", policy, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(UserError, match="PROMPT_TUNING"):
        merge.merge(tokens, tmp_path / "model")
    run = run_with(tmp_path / "run", policy, LORA)
    with pytest.raises(UserError, match="exists"):
        merge.merge(run, policy)
    config = run / "adapter_config.json"
    config.write_text(config.read_text().replace(str(policy), "/nowhere/base"))
    with pytest.raises(UserError, match="its base /nowhere/base is missing: set `base_model_name_or_path`"):
        merge.merge(run, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_the_model_loads(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    places = [("file/model", "Not a directory"), ("file", "is a file"), ("link", "or a link")]
    for name, words in (*places, ("x" * 300, r"can't be written \(File name too long\)")):
        with pytest.raises(UserError, match=f"--output {tmp_path / name} .*{words}.*: name a"):
            merge.merge(policy, tmp_path / name)  # a full model, which would be refused otherwise


@pytest.mark.parametrize(("trained", "loaded"), [("abc", "abc"), (None, "main")])
def test_the_base_is_loaded_at_the_revision_of_the_training_and_runs_no_code(
    trained: str | None, loaded: str, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}

    def load(name: str, **arguments: object) -> None:
        given.update(arguments, name=name)
        raise OSError("no such model")

    run = run_with(tmp_path / "run", policy, LORA)
    config = json.loads((run / "adapter_config.json").read_text())
    (run / "adapter_config.json").write_text(json.dumps({**config, "revision": trained}))
    monkeypatch.setattr(merge.AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(UserError, match=r"its base .* can't be loaded: set .* in its adapter_config.json \(no such m"):
        merge.merged_adapter(run)
    assert given == {
        **{"name": str(policy), "revision": loaded, "dtype": "auto"},
        **{"quantization_config": None, "trust_remote_code": False},
    }


def test_logits_are_those_of_tokens_from_the_whole_vocabulary() -> None:
    class Recorder(torch.nn.Module):
        device = torch.device("cpu")

        def __init__(self, vocabulary: int) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(vocabulary, 1)

        def get_input_embeddings(self) -> torch.nn.Embedding:
            return self.embedding

        def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
            self.tokens = input_ids
            return SimpleNamespace(logits=input_ids[..., None].bfloat16())

    for vocabulary, tokens in ((5, [0, 1, 2, 3, 4]), (127, range(0, 128, 2))):
        model = Recorder(vocabulary)
        logits = merge._logits(model)  # type: ignore[arg-type]
        assert model.tokens.tolist() == [list(tokens)]
        assert (logits.shape, logits.dtype, model.training) == ((len(tokens), 1), torch.float32, False)


def test_what_holds_no_adapter_is_not_merged(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none: the model can't be loaded: there is no such folder"):
        merge.merge(tmp_path / "none", tmp_path / "out")
    with pytest.raises(UserError, match="holds no adapter .no adapter_config.json.: a full model needs no merging"):
        merge.merge(policy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error")])
def test_a_model_that_can_not_be_written_leaves_nothing(error: Exception, tmp_path: Path) -> None:
    def fails(place: Path) -> None:
        place.mkdir()
        raise error

    model = SimpleNamespace(save_pretrained=fails)
    with pytest.raises(UserError, match="out can't be written .*: free space, or name another folder$"):
        merge.write_model(tmp_path / "out", model, None, {})
    assert list(tmp_path.iterdir()) == []


def test_a_base_that_can_not_be_loaded_without_a_reason_is_named_with_the_kind_of_error(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(name: str, **options: object) -> None:
        raise RuntimeError

    run = run_with(tmp_path / "run", policy, LORA)
    monkeypatch.setattr(merge.AutoModelForCausalLM, "from_pretrained", fails)
    with pytest.raises(UserError, match=r"its base .* can't be loaded: .* \(RuntimeError\)$"):
        merge.merged_adapter(run)


def test_a_damaged_adapter_is_refused_before_its_base_is_loaded(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path / "run", policy, LORA)
    (run / "adapter_model.safetensors").write_bytes(b"damaged")
    monkeypatch.setattr(merge, "AutoModelForCausalLM", None)
    with pytest.raises(UserError, match=": copy or download the folder again, or name another checkpoint$"):
        merge.merge(run, tmp_path / "out")


def test_texts_are_written_in_utf_8_whatever_encoding_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda path, text, encoding="ascii": write(path, text, encoding))
    places: set[Path] = set()

    def save(place: Path) -> None:
        place.mkdir(exist_ok=True)
        places.add(place.parent.parent)

    saved = SimpleNamespace(save_pretrained=save)
    merge.write_model(tmp_path / "a" / "out", saved, saved, {"README.md": "déjà vu", "NOTICE": "©"})
    assert (tmp_path / "a" / "out" / "README.md").read_bytes() == "déjà vu".encode()
    assert (tmp_path / "a" / "out" / "NOTICE").read_bytes() == "©".encode()
    assert places == {tmp_path / "a"}, "no other file system, from which a folder can't be renamed"


@pytest.mark.parametrize(
    ("dtype", "merged", "passes"),
    [
        (torch.float32, [-7.994, 1.0], True),
        (torch.float32, [-8.012, 1.0], False),
        (torch.float32, [-8.0, 1.012], False),
        (torch.bfloat16, [-7.7, 1.0], True),
        (torch.float16, [-7.7, 1.0], True),
        (torch.bfloat16, [-7.5, 1.0], False),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_given", [False, True])
def test_a_merge_is_judged_by_the_largest_logit(
    is_given: bool,
    dtype: torch.dtype,
    merged: list[float],
    passes: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = torch.tensor([-8.0, 1.0])
    logits = {"base": torch.tensor([1.0, 0.5]), "adapted": expected, "merged": torch.tensor(merged)}
    if is_given:
        logits["adapted"] = expected + 100  # an adapter on the dequantized base, which decides nothing
    base = SimpleNamespace(dtype=dtype, name="base")
    adapted = SimpleNamespace(name="adapted", merge_and_unload=lambda safe_merge: SimpleNamespace(name="merged"))
    monkeypatch.setattr(merge, "_logits", lambda model: logits[model.name])
    monkeypatch.setattr(merge, "PeftModel", SimpleNamespace(from_pretrained=lambda *given: adapted))
    if not passes:
        with pytest.raises(UserError, match="its logits change by up to .*, where rounding could change them by "):
            merge._merged(base, tmp_path, expected if is_given else None)
        return
    model, report = merge._merged(base, tmp_path, expected if is_given else None)
    assert model.name == "merged"
    changed = f"{abs(merged[0] + 8):.2g}"
    named = str(dtype).removeprefix("torch.")
    assert report == f"{named}; the adapter moves logits by up to 9, merging it changes them by up to {changed}"


def test_a_merge_that_changes_nothing_is_exact_for_a_model_of_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = SimpleNamespace(merge_and_unload=lambda safe_merge: "merged")
    monkeypatch.setattr(merge, "_logits", lambda model: torch.zeros(2))
    monkeypatch.setattr(merge, "PeftModel", SimpleNamespace(from_pretrained=lambda *given: adapted))
    assert merge._merged(SimpleNamespace(dtype=torch.float32), tmp_path, None)[0] == "merged"
