"""The reference policy of `set_reference`, and the KL to it."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    BOFTConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    PromptEncoderConfig,
    VBLoRAConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerCallback
from trl import GRPOTrainer as TRLGRPOTrainer
from trl.trainer.callbacks import SyncRefModelCallback

from grpo_recipes import GRPOTrainer
from grpo_recipes.recipe.specs import ReferenceSpec
from grpo_recipes.training import reference as reference_module
from grpo_recipes.training.adapters import adapter_tensors
from grpo_recipes.training.reference import (
    REF,
    WEIGHTS,
    ReferenceCallback,
    kl_to_reference,
    set_reference,
)
from tests.support import tiny
from tests.support.errors import refused
from tests.support.grids import only
from tests.support.recorded import model as small
from tests.support.short_runs import (
    TEXTS,
    adapted,
    arguments,
    load,
    log_probabilities,
    logged_kl,
    moved,
    partitioned,
    trainer,
)

ZERO = 1e-6
SEEN = 1e-5  # a KL above rounding: at least ten times `ZERO`


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_policy(tmp_path_factory.mktemp("policy"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def tied_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_policy(tmp_path_factory.mktemp("tied"), num_hidden_layers=1, tie_word_embeddings=True)


padded = partial(trainer, GRPOTrainer, micro_batching="off")  # no layout is verified


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", "target_modules": "all-linear", **changes})


def tensors(model: PeftModel, adapter: str) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in adapter_tensors(model, adapter).items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def k3(reference: Any, mine: Any, text: str) -> Any:
    """Return the KL of a text by the formula, to be compared with a number."""
    difference = log_probabilities(reference, text) - log_probabilities(mine, text)
    return pytest.approx(float((difference.exp() - difference - 1).mean()), rel=1e-3, abs=1e-7)


# ---- The KL is 0 at step 0, and grows


ATTENTION: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
EMBEDDING = {"target_modules": ["embed_tokens", "q_proj"]}
TOKENS = {"trainable_token_indices": [5, 6, 7]}
IA3 = IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
NEW_OR_CONTINUED: dict[str, PeftConfig] = {
    "LoRA": lora(),
    "LoRA on the embedding": lora(**EMBEDDING),
    "trainable tokens": lora(trainable_token_indices=[5, 6, 7, 20, 21]),
    "modules_to_save": lora(modules_to_save=["lm_head"]),
    "DoRA": lora(use_dora=True),
    "rsLoRA": lora(use_rslora=True),
    "IA3": IA3,
    "LoHa": LoHaConfig(r=4, **ATTENTION),
    "LoKr": LoKrConfig(r=4, **ATTENTION),
    "OFT": OFTConfig(r=0, oft_block_size=8, **ATTENTION),
    "VeRA": VeraConfig(r=8, task_type="CAUSAL_LM", target_modules=["q_proj"]),
}
CONTINUED: dict[str, PeftConfig] = {
    **NEW_OR_CONTINUED,
    "BOFT": BOFTConfig(boft_block_size=8, **ATTENTION),
    "VB-LoRA": VBLoRAConfig(num_vectors=8, vector_length=8, topk=2, r=4, **ATTENTION),
    "AdaLoRA": AdaLoraConfig(init_r=6, target_r=4, total_step=10, **ATTENTION),
    "olora": lora(init_lora_weights="olora"),
    "LoRA on the embedding, tied": lora(**EMBEDDING),
    "modules_to_save, tied": lora(modules_to_save=["embed_tokens"]),
    "trainable tokens, tied": lora(**TOKENS),
}
NEW: dict[str, PeftConfig] = {
    **NEW_OR_CONTINUED,
    "LoRA, normal factors": lora(init_lora_weights="gaussian"),
    "LoRA, orthogonal factors": lora(init_lora_weights="orthogonal"),
    "trainable tokens, tied": lora(**TOKENS),
}


def head_trained(folder: Path) -> PeftModel:
    """Return a policy with a trained head beside an untrained LoRA."""
    model = adapted(folder, lora(modules_to_save=["lm_head"]), continued=False)
    head = model.get_output_embeddings().modules_to_save["default"].weight
    with torch.no_grad():
        head += 0.1 * torch.randn(head.shape, generator=torch.Generator().manual_seed(0))
    return model


def in_4_bits(folder: Path) -> PeftModel:
    """Return a policy with an adapter on a base in 4 bits."""
    pytest.importorskip("bitsandbytes", reason="QLoRA needs bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization)
    torch.manual_seed(1)
    return moved(get_peft_model(base, lora()))


def on_bfloat16(folder: Path) -> PeftModel:
    """Return a policy with a float32 adapter on a bfloat16 base."""
    torch.manual_seed(1)
    return moved(get_peft_model(load(folder).to(torch.bfloat16), lora()))


def merged(folder: Path) -> Any:
    return adapted(folder, lora(), continued=True).merge_and_unload().requires_grad_(True)


INITIALIZED: dict[str, PeftConfig] = {
    f"initialized by {start}": lora(init_lora_weights=start) for start in ("pissa", "olora", False)
}
POLICIES: dict[str, Callable[[Path], Any]] = {
    **{f"new {kind}": partial(adapted, config=config, continued=False) for kind, config in NEW.items()},
    **{f"continued {kind}": partial(adapted, config=config, continued=True) for kind, config in CONTINUED.items()},
    **dict.fromkeys(INITIALIZED, load),
    "full, tied, bfloat16": lambda folder: load(folder, torch.bfloat16),
    "trained head": head_trained,
    "full, never on disk": lambda folder: tiny.policy(),
    "float32 head, temperature": lambda folder: tiny.policy().to(torch.bfloat16),
    "attention dropout": lambda folder: tiny.policy(attention_dropout=0.1),
    "merged": merged,
    "float32 adapter on bfloat16": on_bfloat16,
    "4 bits": in_4_bits,
}
QUICK = ("continued LoRA on the embedding", "float32 head, temperature")


@pytest.mark.parametrize("case", only(QUICK, POLICIES))
def test_the_kl_is_0_at_step_0_and_grows(policy: Path, tied_policy: Path, tmp_path: Path, case: str) -> None:
    head = {"cast_lm_head_to_fp32": True, "temperature": 0.7} if "head, temperature" in case else {}
    start = POLICIES[case](tied_policy if "tied" in case else policy)
    args = arguments(tmp_path, max_steps=2, max_completion_length=3, **head)
    ours = trainer(GRPOTrainer, start, args, peft_config=INITIALIZED.get(case))
    kls = logged_kl(ours)
    assert kls[0] <= ZERO
    assert kls[1] > kls[0]
    if case.startswith("continued"):
        set_reference(ours, "base")
        assert kl_to_reference(ours, TEXTS) > ZERO, "a continued adapter differs from its base"


# ---- Which reference


def test_the_policy_adapter_may_have_any_name(policy: Path, tmp_path: Path) -> None:
    model = adapted(policy, lora(lora_dropout=0.1), continued=True, name="policy")
    ours = padded(model, arguments(tmp_path, max_steps=2, max_completion_length=3))
    before = tensors(ours.model, "policy")
    kls = logged_kl(ours)
    assert kls[0] <= ZERO < kls[1]
    assert equal(before, tensors(ours.model, REF))
    assert not equal(before, tensors(ours.model, "policy"))
    trained = {id(parameter) for group in ours.optimizer.param_groups for parameter in group["params"]}
    assert trained == {id(tensor) for tensor in adapter_tensors(ours.model, "policy").values()}


@pytest.mark.parametrize("name", [REF, "sft"])
def test_an_adapter_of_the_users_is_the_reference(policy: Path, tmp_path: Path, name: str) -> None:
    def model() -> PeftModel:
        both = adapted(policy, lora(), continued=True)
        both.add_adapter(name, lora(r=2))
        both.set_adapter(name)
        moved(both, seed=3)
        both.set_adapter("default")
        return both

    source = {"adapter": name} if name != REF else None  # the default for an adapter named "ref"
    ours = padded(model(), arguments(tmp_path, max_completion_length=3), reference=source)
    assert f"`{name}`" in ours.reference_sentence
    reference_model = model()
    reference_model.set_adapter(name)
    assert kl_to_reference(ours, [TEXTS[1]]) == k3(reference_model, model(), TEXTS[1])
    if name != REF:
        before = tensors(ours.model, REF)
        assert logged_kl(ours)[0] > SEEN
        assert equal(before, tensors(ours.model, REF))


def test_the_base_and_an_adapter_folder_as_references(policy: Path, tmp_path: Path) -> None:
    adapted(policy, lora(r=2), continued=True).save_pretrained(tmp_path / "sft")

    def model(rank: int = 4) -> PeftModel:
        return adapted(policy, lora(r=rank), continued=True)

    for source, other in [("base", load(policy)), ({"adapter": tmp_path / "sft"}, model(2))]:
        ours = padded(model(), arguments(tmp_path), reference=source)
        kl = kl_to_reference(ours, [TEXTS[1]])
        assert kl == k3(other, model(), TEXTS[1])
        if source != "base":
            continue
        # Padding is excluded from the mean over tokens.
        sizes = [len(tiny.byte_tokenizer()(text)["input_ids"]) - 1 for text in TEXTS]
        both = kl_to_reference(ours, [TEXTS[0]]) * sizes[0] + kl * sizes[1]
        assert kl_to_reference(ours, TEXTS) == pytest.approx(both / sum(sizes), rel=1e-4)


@pytest.mark.slow
def test_a_restart_keeps_the_original_reference(policy: Path, tmp_path: Path) -> None:
    adapted(policy, lora(), continued=True).save_pretrained(tmp_path / "sft")
    args = arguments(tmp_path / "run", max_steps=4, save_strategy="steps", save_steps=2)

    def continuing(folder: Path) -> PeftModel:
        return PeftModel.from_pretrained(load(policy), folder, is_trainable=True)

    first = padded(continuing(tmp_path / "sft"), args)
    original = tensors(first.model, REF)
    first.train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    resumed = padded(continuing(tmp_path / "sft"), args)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert equal(original, tensors(resumed.model, REF))
    source = {"adapter": checkpoint / REF}
    kept = padded(continuing(checkpoint), arguments(tmp_path / "kept"), reference=source)
    assert equal(original, tensors(kept.model, REF))
    without = padded(continuing(tmp_path / "sft"), args, reference="base")
    without.train(resume_from_checkpoint=str(checkpoint))
    assert REF not in without.model.peft_config


def test_the_reference_does_not_change_the_policy(policy: Path, tmp_path: Path) -> None:
    """PiSSA subtracts the adapter from the base, and a second one would subtract again."""

    def model() -> PeftModel:
        return adapted(policy, lora(init_lora_weights="pissa"), continued=True)

    expected = log_probabilities(model(), TEXTS[0])
    plain = trainer(TRLGRPOTrainer, model(), arguments(tmp_path))
    assert not torch.allclose(log_probabilities(plain.model, TEXTS[0]), expected, atol=1e-2)
    with refused("init_lora_weights", "pissa", "without_trl_reference"):
        set_reference(plain, "initial")
    ours = padded(model(), arguments(tmp_path))
    assert torch.equal(log_probabilities(ours.model, TEXTS[0]), expected)
    assert kl_to_reference(ours, TEXTS) <= ZERO


def test_the_folder_of_an_adapter_is_a_model(policy: Path, tmp_path: Path) -> None:
    adapted(policy, lora(), continued=True).save_pretrained(tmp_path / "adapter")
    args = arguments(tmp_path, model_init_kwargs={"dtype": "float32"})
    ours = padded(str(tmp_path / "adapter"), args)
    expected = log_probabilities(adapted(policy, lora(), continued=True), TEXTS[0])
    torch.testing.assert_close(log_probabilities(ours.model, TEXTS[0]), expected)
    assert kl_to_reference(ours, TEXTS) <= ZERO
    assert any(parameter.requires_grad for parameter in ours.model.parameters())
    ours.save_model(str(tmp_path / "out"))
    again = PeftModel.from_pretrained(load(policy), tmp_path / "out")
    torch.testing.assert_close(log_probabilities(again, TEXTS[0]), expected)


def test_dropout_is_switched_off_without_a_reference(tmp_path: Path) -> None:
    folder = tiny.save_policy(tmp_path / "policy", attention_dropout=0.1)
    ours = padded(adapted(folder, lora(lora_dropout=0.1), continued=True), arguments(tmp_path, beta=0.0))
    ids = torch.tensor([[5, 6, 7, 8]])
    ours.model.train()
    assert torch.equal(ours.model(input_ids=ids).logits, ours.model(input_ids=ids).logits)


# ---- Stand-ins for TRL's trainer: what is copied, replaced and refused


class Trainer(SimpleNamespace):
    """Stand-in for TRL's trainer."""

    def __init__(self, policy: Any, **args: Any) -> None:
        values = {
            **{"beta": 0.1, "sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512},
            **{"disable_dropout": False, "save_strategy": "no", "cast_lm_head_to_fp32": False, "should_save": True},
        }
        plain = SimpleNamespace(
            prepare_model=lambda prepared, evaluation_mode: prepared,
            unwrap_model=lambda wrapped: wrapped,
            is_main_process=True,
        )
        super().__init__(
            model=policy, args=SimpleNamespace(**{**values, **args}), beta=0.0, ref_model="theirs", temperature=1.0,
            is_fsdp_enabled=False, is_deepspeed_enabled=False, accelerator=plain, callbacks=[],
        )  # fmt: skip

    def pop_callback(self, kind: type) -> Any:
        found = next((one for one in self.callbacks if isinstance(one, kind)), None)
        self.callbacks = [one for one in self.callbacks if one is not found]
        return found

    def remove_callback(self, kind: type) -> None:
        self.callbacks = [one for one in self.callbacks if not isinstance(one, kind)]

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)


Q: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


def with_lora(**changes: Any) -> PeftModel:
    torch.manual_seed(0)
    return get_peft_model(small(), LoraConfig(**{**Q, **changes}))


def fill(policy: PeftModel, part: str, value: float) -> None:
    """Fill the adapter's tensors whose name holds `part`."""
    with torch.no_grad():
        for name, tensor in adapter_tensors(policy, "default").items():
            if part in name:
                tensor.fill_(value)


def test_a_copy_is_made_only_of_an_adapter_that_adds_something() -> None:
    for changes, part, adds in (
        ({}, "", False),
        ({}, "lora_A", False),  # the other factor is zero
        ({}, "lora_B", True),
        ({"target_modules": ["embed_tokens"]}, "", False),
        ({"target_modules": ["embed_tokens"]}, "lora_embedding_A", True),
        ({"target_modules": ["embed_tokens"]}, "lora_embedding_B", False),
        ({"modules_to_save": ["lm_head"]}, "", False),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save", True),
        ({"trainable_token_indices": [3, 5]}, "", False),
        ({"trainable_token_indices": [3, 5]}, "trainable_tokens_delta", True),
        ({"use_dora": True}, "", True),  # its magnitudes can't show it
    ):
        policy = with_lora(**changes)
        if part:
            fill(policy, part, 0.25)
        made: Any = Trainer(policy)
        set_reference(made, "initial")
        assert (changes, part, REF in policy.peft_config) == (changes, part, adds)
    refreshed: Any = Trainer(with_lora(), sync_ref_model=True)
    set_reference(refreshed, "initial")
    assert REF in refreshed.model.peft_config, "a reference that moves has tensors of its own"
    without: Any = Trainer(small(), beta=0.0)
    set_reference(without)
    assert without.callbacks == []


def test_a_second_reference_replaces_the_first_and_trls() -> None:
    policy = with_lora()
    made: Any = Trainer(policy)
    made.callbacks = [object.__new__(SyncRefModelCallback), "of the user"]
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    for value in (0.5, 0.75):
        fill(policy, "lora_B", value)
        set_reference(made, "initial")
        assert (adapter_tensors(policy, REF)[name] == value).all()
        assert [type(one) for one in made.callbacks] == [str, ReferenceCallback]
    set_reference(made, "base")
    assert REF not in policy.peft_config
    policy.add_adapter(REF, LoraConfig(**Q))
    made.callbacks, made.beta = [], 0.0
    for _ in range(2):
        set_reference(made, {"adapter": REF})  # an adapter of the user's is not removed
        assert REF in policy.peft_config
    made.callbacks, made.beta = [], 0.1  # the adapter named "ref" is TRL's own copy
    set_reference(made, "base")
    assert REF not in policy.peft_config


def test_a_reference_has_the_dtype_of_the_policy_s_adapter_and_no_dropout(tmp_path: Path) -> None:
    """The copy is not rounded. PEFT loads an adapter from a folder in float32."""
    policy = with_lora(lora_dropout=0.3)
    policy.save_pretrained(tmp_path)
    policy.bfloat16()
    for tensor in adapter_tensors(policy, "default").values():
        tensor.data = tensor.data.to(torch.float64).fill_(0.3)  # no bfloat16
    made: Any = Trainer(policy)
    for source in ("initial", {"adapter": str(tmp_path)}):
        set_reference(made, source)
        reference = adapter_tensors(policy, REF).values()
        assert {tensor.dtype for tensor in reference} == {torch.float64}
        assert all((tensor == 0.3).all() for tensor in reference) is (source == "initial")
        assert not any(tensor.requires_grad for tensor in reference)
        rates = {name: module.p for name, module in policy.named_modules() if isinstance(module, nn.Dropout)}
        assert {rate for name, rate in rates.items() if f".{REF}" in name} <= {0.0}
        assert {rate for name, rate in rates.items() if ".default" in name} == {0.3}


def test_a_frozen_copy_of_a_full_model_keeps_nothing_of_the_policy() -> None:
    policy = small(attention_dropout=0.1)
    first, *_ = policy.parameters()
    first.requires_grad_(False)  # some may be frozen
    policy.train()
    policy.forward = lambda *_: "the policy's"
    made: Any = Trainer(policy)
    count = sum(parameter.numel() for parameter in policy.parameters())
    assert f"{count:,} parameters" in set_reference(made, "initial")
    assert "the policy's" not in str(made.ref_model(input_ids=torch.tensor([[5, 6]])))
    assert (made.ref_model.training, policy.training) == (False, True)
    assert not any(parameter.requires_grad for parameter in made.ref_model.parameters())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    assert all(
        torch.equal(kept, start) for kept, start in zip(made.ref_model.parameters(), small().parameters(), strict=True)
    )


def test_policies_that_cannot_have_a_reference_are_refused() -> None:
    two = with_lora()
    two.add_adapter("more", LoraConfig(**Q))
    two.base_model.set_adapter(["default", "more"])
    named = get_peft_model(small(), LoraConfig(**Q), adapter_name=REF)
    beside = with_lora()
    beside.base_model.model.lm_head.weight.requires_grad_(True)
    holds = with_lora()
    holds.add_adapter(REF, LoraConfig(**Q))
    smaller = with_lora()
    smaller.add_adapter("sft", LoraConfig(**{**Q, "r": 1}))
    biased = get_peft_model(small(attention_bias=True), LoraConfig(**Q, bias="all"))
    encoder = PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, encoder_hidden_size=16)
    frozen = small().requires_grad_(False)
    untrainable = with_lora().requires_grad_(False)
    refresh = {"sync_ref_model": True}
    cases: list[tuple[Any, Any, dict[str, Any], str, list[str]]] = [
        (two, "initial", {}, "policy", ["2 active", "default, more"]),
        (named, {"adapter": REF}, {}, "policy's adapter", ["`ref`"]),
        (beside, "base", {}, "1 parameters beside the adapter `default`", ["lm_head.weight", "`modules_to_save`"]),
        (holds, "initial", {}, "policy", ["`ref`", "{adapter: ref}"]),
        (smaller, {"adapter": "sft"}, refresh, "`sync_ref_model`", []),
        (biased, "initial", refresh, "6 parameters beside the adapter", ["`bias: none`"]),
        (get_peft_model(small(), encoder), "initial", {}, "the adapter `default`", ["P_TUNING"]),
        (small(), "base", {}, "`reference: base`", ["initial"]),
        (small(), {"adapter": "a/b"}, {}, "`reference: {adapter: a/b}`", ["initial"]),
        (small(), "", {}, "", ["`reference.name`"]),
        (frozen, "initial", {"beta": 0.0}, "policy", ["requires_grad_(True)"]),
        (untrainable, "initial", {}, "adapter `default`", ["is_trainable=True"]),
    ]
    for policy, source, args, place, figures in cases:
        made: Any = Trainer(policy, **args)
        with refused(place, *figures):
            set_reference(made, source)
    unaffected: Any = Trainer(beside, beta=0.0)
    set_reference(unaffected, "initial")


def test_a_refresh_needs_fsdp2() -> None:
    for version, sync in ((1, False), (2, True), (1, True)):
        made: Any = Trainer(with_lora(), sync_ref_model=sync)
        made.is_fsdp_enabled = True
        made.accelerator.state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version))
        with refused("`sync_ref_model`", "fsdp_version: 2") if (version, sync) == (1, True) else nullcontext():
            set_reference(made, "initial")


def test_adapters_that_cannot_be_the_reference_are_refused(tmp_path: Path) -> None:
    policy = with_lora()
    with_lora().save_pretrained(tmp_path / "good")
    start = load_file(tmp_path / "good" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "good" / "adapter_config.json").read_text())
    name = min(start)

    def folder(kind: str, weights: dict[str, torch.Tensor] = start, **changes: Any) -> Path:
        (tmp_path / kind).mkdir()
        save_file(weights, tmp_path / kind / "adapter_model.safetensors")
        (tmp_path / kind / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        return tmp_path / kind

    names = ["pissa_niter_4", "OLoRA", "corda", "lora_ga"]
    cases = [
        (tmp_path / "nothing", []),
        (folder("missing", {key: value for key, value in start.items() if key != name}), [name.split(".")[-3]]),
        (folder("more", {**start, name.replace("q_proj", "k_proj"): start[name].clone()}), ["k_proj"]),
        (folder("wide", {**start, name: torch.zeros(2, 64)}), ["64"]),
        (folder("replicated", layer_replication=[[0, 2], [1, 2]]), ["layer_replication", "[0, 2]"]),
        *[(folder(f"begun {kind}", init_lora_weights=kind), ["init_lora_weights", kind]) for kind in names],
    ]
    for where, figures in cases:
        made: Any = Trainer(policy)
        with refused(f"`reference.adapter`: {where}", *figures):
            set_reference(made, {"adapter": str(where)})
        assert policy.training
        if REF in policy.peft_config:
            policy.delete_adapter(REF)
    made = Trainer(policy)
    set_reference(made, {"adapter": str(tmp_path / "good")})
    assert equal(tensors(policy, REF), {key: start[key.replace(f".{REF}", "")] for key in tensors(policy, REF)})


# ---- The refresh


def policy_tensors(ours: TRLGRPOTrainer) -> dict[str, torch.Tensor]:
    if isinstance(ours.model, PeftModel):
        return tensors(ours.model, "default")
    return {name: tensor.detach().clone() for name, tensor in ours.model.named_parameters()}


def reference_tensors(ours: TRLGRPOTrainer) -> dict[str, torch.Tensor]:
    if isinstance(ours.model, PeftModel):
        return tensors(ours.model, REF)
    return {name: tensor.detach().clone() for name, tensor in ours.ref_model.named_parameters()}


REFRESHED: dict[str, Callable[[Path], Any]] = {
    "new LoRA": POLICIES["new LoRA"],
    "embedding LoRA": POLICIES["continued LoRA on the embedding"],
    "DoRA": lambda folder: adapted(folder, lora(use_dora=True, modules_to_save=["lm_head"]), continued=True),
    "VeRA": POLICIES["continued VeRA"],
    "full": load,
}


@pytest.mark.parametrize("kind", only(["new LoRA"], REFRESHED))
def test_the_kl_is_0_after_a_hard_refresh_and_grows(policy: Path, tmp_path: Path, kind: str) -> None:
    refresh = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}
    ours = padded(REFRESHED[kind](policy), arguments(tmp_path, max_steps=4, **refresh))
    kls = logged_kl(ours)
    assert max(kls[0], kls[2]) <= ZERO < min(kls[1], kls[3])
    assert equal(policy_tensors(ours), reference_tensors(ours))


@pytest.mark.slow
def test_a_refresh_is_the_same_in_trls_trainer_and_ours(policy: Path, tmp_path: Path) -> None:
    """On TRL's class, TRL's own callback must not refresh a second time."""
    args = arguments(tmp_path, max_steps=4, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5)
    runs = []
    # The comparison is to the last bit, so ours runs TRL's micro-batches and generation.
    for trainer_class, more in ((TRLGRPOTrainer, {}), (GRPOTrainer, {"micro_batching": "off", "generation": "off"})):
        run = trainer(trainer_class, load(policy), args, **more)
        if trainer_class is TRLGRPOTrainer:
            set_reference(run, "initial")
        run.train()
        runs.append(run)
    assert equal(reference_tensors(runs[0]), reference_tensors(runs[1]))


class KillAt(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "alpha"), [("embedding LoRA", 1.0), ("full", 0.6)])
def test_a_run_killed_between_refreshes_resumes_to_equal_bits(
    policy: Path, tmp_path: Path, kind: str, alpha: float
) -> None:
    def run(name: str) -> TRLGRPOTrainer:
        refresh = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": alpha}
        args = arguments(tmp_path / name, max_steps=5, save_strategy="steps", save_steps=3, **refresh)
        reference = {"name": "initial", "reset_optimizer_on_sync": alpha == 1.0}
        return padded(REFRESHED[kind](policy), args, reference=reference)

    uninterrupted = run("uninterrupted")
    uninterrupted.train()
    killed = run("killed")
    killed.add_callback(KillAt())
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed = run("killed")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 5
    assert equal(policy_tensors(uninterrupted), policy_tensors(resumed))
    assert equal(reference_tensors(uninterrupted), reference_tensors(resumed))


# ---- The callback


def refreshed(policy: Any, reference: Any, **args: Any) -> tuple[Any, ReferenceCallback]:
    """Return a trainer with a refreshed reference of full fine-tuning, and its callback."""
    made: Any = Trainer(policy, sync_ref_model=True, ref_model_sync_steps=2, **args)
    made.ref_model = reference
    spec = {"name": "initial", "reset_optimizer_on_sync": args.get("ref_model_mixup_alpha") == 1.0}
    return made, ReferenceCallback(made, ReferenceSpec.parse(spec))


def at(step: int) -> Any:
    return SimpleNamespace(global_step=step)


def test_a_refresh_may_reset_the_optimizer_s_state() -> None:
    for alpha, resets in ((1.0, True), (0.25, False)):
        policy, start = small(), small(seed=1)
        _, callback = refreshed(policy, reference := copy.deepcopy(start), ref_model_mixup_alpha=alpha)
        groups = [{"lr": 0.1, "step": 7}, {"lr": 0.2}]
        optimizer = SimpleNamespace(state={"weight": 1}, param_groups=groups)
        args: Any = SimpleNamespace()
        callback.on_step_end(args, at(3), optimizer=optimizer)
        assert optimizer.state
        assert all(torch.equal(*pair) for pair in zip(reference.parameters(), start.parameters(), strict=True))
        callback.on_step_end(args, at(4), optimizer=optimizer)
        assert bool(optimizer.state) is not resets
        assert groups == [{"lr": 0.1, "step": 0 if resets else 7}, {"lr": 0.2}]
        for mine, before, now in zip(policy.parameters(), start.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(now.data, (1 - alpha) * before.data + alpha * mine.data)


@pytest.mark.parametrize("had_one", [True, False])
def test_a_checkpoint_s_reference_is_frozen_or_removed_again(had_one: bool) -> None:
    """Loading a checkpoint loads every adapter in it and makes it trainable."""
    policy = with_lora()
    if had_one:
        policy.add_adapter(REF, LoraConfig(**Q))
    made: Any = Trainer(policy)
    callback = ReferenceCallback(made, ReferenceSpec.parse("initial"))
    if not had_one:
        policy.add_adapter(REF, LoraConfig(**Q))
    for tensor in adapter_tensors(policy, REF).values():
        tensor.requires_grad_(True)
    callback.on_train_begin(SimpleNamespace(), at(1))  # type: ignore[arg-type]
    assert (REF in policy.peft_config) is had_one
    assert not any(tensor.requires_grad for tensor in adapter_tensors(policy, REF).values())
    assert any(tensor.requires_grad for tensor in adapter_tensors(policy, "default").values())


def test_dropout_is_announced_by_one_rank() -> None:
    made: Any = Trainer(small(attention_dropout=0.1))
    made.beta = 0.1
    callback = ReferenceCallback(made, ReferenceSpec.parse("initial"))
    args: Any = SimpleNamespace()
    with pytest.warns(UserWarning, match="disable_dropout"):
        callback.on_train_begin(args, at(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.accelerator.is_main_process = False
        callback.on_train_begin(args, at(0))


def test_a_refreshed_reference_is_stored_and_restored(tmp_path: Path) -> None:
    made, callback = refreshed(small(), reference := small(seed=1))
    args: Any = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=None)
    own, other = tmp_path / "checkpoint-4", tmp_path / "kept" / "checkpoint-4"
    own.mkdir()
    made.args.should_save = False
    callback.on_save(args, at(4))
    with refused(own, WEIGHTS):
        callback.on_train_begin(args, at(4))
    made.args.should_save = True
    callback.on_save(args, at(4))
    shutil.copytree(own, other)
    start = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}

    def resumed(given: Any) -> bool:
        """Return True if a resume restores what was stored."""
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.add_(1.0)
        args.resume_from_checkpoint = given
        callback.on_train_begin(args, at(4))
        return all(torch.equal(parameter, start[name]) for name, parameter in reference.named_parameters())

    for given in (None, True, str(tmp_path / "kept" / "checkpoint-3"), str(other)):
        assert resumed(given)
    stored = load_file(own / WEIGHTS)
    save_file({name: value + 1 for name, value in stored.items()}, own / WEIGHTS)
    assert resumed(str(other))
    assert not resumed(None)
    for names in (list(stored)[1:], [*stored, "more"]):
        save_file({name: stored.get(name, torch.zeros(1)) for name in names}, own / WEIGHTS)
        with refused(own / WEIGHTS):
            resumed(None)


def test_a_reference_whose_layers_share_tensors_is_stored_completely(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are partitioned as by ZeRO-3, where a write into a gathered tensor is lost unless requested."""
    monkeypatch.setattr(reference_module, "gathered", partitioned)
    args = arguments(tmp_path, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0)
    ours = padded(REFRESHED["VeRA"](policy), args)
    callback = ours.pop_callback(ReferenceCallback)
    before = reference_tensors(ours)
    (tmp_path / "checkpoint-1").mkdir()
    callback.on_save(args, at(1))
    for tensor in adapter_tensors(ours.model, REF).values():
        tensor.data.zero_()
    callback.on_train_begin(args, at(1))
    assert equal(before, reference_tensors(ours))
    moved(ours.model)
    callback.on_step_end(args, at(1), optimizer=None)
    assert equal(policy_tensors(ours), reference_tensors(ours))
    assert not equal(before, reference_tensors(ours))
