"""The reference policy of `set_reference`, compared with that of stock TRL 1.16.

Many tests first show an error of stock TRL. If that part of a test fails, TRL has fixed the error, and our code for it
can go.
"""

from contextlib import nullcontext
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
    VBLoRAConfig,
    VeraConfig,
    get_peft_model,
)
from transformers import TrainerCallback
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.training import reference as reference_module
from grpo_recipes.training.adapters import adapter_tensors
from grpo_recipes.training.reference import (
    REF,
    kl_to_reference,
    reference_in,
    set_reference,
    without_trl_reference,
)
from grpo_rewards.errors import UserError
from tests.support import tiny
from tests.support.grids import covering, only
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
    return tiny.save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def tied_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_policy(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", "target_modules": "all-linear", **changes})


def tensors(model: PeftModel, adapter: str) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in adapter_tensors(model, adapter).items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


ATTENTION = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
INCOMPLETE_IN_TRL: dict[str, PeftConfig] = {
    "LoRA on the embedding": lora(target_modules=["embed_tokens", "q_proj"]),
    "IA3": IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": LoHaConfig(r=4, **ATTENTION),
    "LoKr": LoKrConfig(r=4, **ATTENTION),
    "VeRA": VeraConfig(r=8, task_type="CAUSAL_LM", target_modules=["q_proj"]),
    "trainable tokens": lora(trainable_token_indices=[5, 6, 7, 20, 21]),
}
COMPLETE_IN_TRL: dict[str, PeftConfig] = {
    "LoRA": lora(),
    "DoRA": lora(use_dora=True),
    "rsLoRA": lora(use_rslora=True),
    "modules_to_save": lora(modules_to_save=["lm_head"]),
    "OFT": OFTConfig(r=0, oft_block_size=8, **ATTENTION),
}


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("kind", only(["LoRA on the embedding", "trainable tokens"], INCOMPLETE_IN_TRL))
def test_the_reference_copies_every_tensor_of_the_adapter(policy: Path, tmp_path: Path, kind: str) -> None:
    def model() -> PeftModel:
        return adapted(policy, INCOMPLETE_IN_TRL[kind], continued=True)

    assert logged_kl(trainer(TRLGRPOTrainer, model(), arguments(tmp_path)))[0] > SEEN
    ours = trainer(TRLGRPOTrainer, model(), arguments(tmp_path))
    set_reference(ours, "initial")
    assert kl_to_reference(ours, TEXTS) <= ZERO
    assert logged_kl(ours)[0] <= ZERO


def test_an_adapter_that_would_not_train_is_refused(policy: Path, tmp_path: Path) -> None:
    adapted(policy, lora(), continued=True).save_pretrained(tmp_path / "adapter")

    def model() -> PeftModel:
        return PeftModel.from_pretrained(load(policy), tmp_path / "adapter")

    plain = trainer(TRLGRPOTrainer, model(), arguments(tmp_path, max_steps=2))
    before = tensors(plain.model, "default")
    plain.train()
    assert equal(before, tensors(plain.model, "default"))
    for beta in (0.04, 0.0):
        with pytest.raises(UserError, match="the policy's adapter `default` would train.*is_trainable=True"):
            trainer(GRPOTrainer, model(), arguments(tmp_path, beta=beta))


def test_a_merged_model_that_would_not_train_is_refused(policy: Path, tmp_path: Path) -> None:
    merged = adapted(policy, lora(), continued=True).merge_and_unload()
    with pytest.raises(UserError, match=r"no parameter .* would train: .*requires_grad_\(True\)"):
        trainer(GRPOTrainer, merged, arguments(tmp_path))


def test_the_policy_adapter_may_have_any_name(policy: Path, tmp_path: Path) -> None:
    def model() -> PeftModel:
        return adapted(policy, lora(), continued=True, name="policy")

    with pytest.raises(KeyError):
        trainer(TRLGRPOTrainer, model(), arguments(tmp_path))
    ours = trainer(GRPOTrainer, model(), arguments(tmp_path, max_steps=2))
    before = tensors(ours.model, "policy")
    kls = logged_kl(ours)
    assert kls[0] <= ZERO < kls[1]
    assert equal(before, tensors(ours.model, REF))
    assert not equal(before, tensors(ours.model, "policy"))


@pytest.mark.parametrize("name", only(["sft"], [REF, "sft"]))
def test_an_adapter_of_the_users_is_the_reference(policy: Path, tmp_path: Path, name: str) -> None:
    def model() -> PeftModel:
        both = adapted(policy, lora(), continued=True)
        both.add_adapter(name, lora(r=2))
        both.set_adapter(name)
        moved(both, seed=3)
        both.set_adapter("default")
        return both

    if name == REF:
        with pytest.raises(ValueError, match="already exists"):
            trainer(TRLGRPOTrainer, model(), arguments(tmp_path))
        with pytest.raises(UserError, match="holds an adapter named `ref`"):
            trainer(GRPOTrainer, model(), arguments(tmp_path), reference="initial")
    ours = trainer(GRPOTrainer, model(), arguments(tmp_path), reference={"adapter": name})
    policy_model, reference_model = model(), model()
    reference_model.set_adapter(name)
    text = TEXTS[1]
    difference = log_probabilities(reference_model, text) - log_probabilities(policy_model, text)
    assert kl_to_reference(ours, [text]) == pytest.approx(
        float((difference.exp() - difference - 1).mean()), rel=1e-3, abs=1e-7
    )
    before = tensors(ours.model, REF)
    assert logged_kl(ours)[0] > SEEN
    assert equal(before, tensors(ours.model, REF))


def test_an_adapter_named_ref_is_the_default_reference(policy: Path, tmp_path: Path) -> None:
    model = adapted(policy, lora(), continued=True)
    model.add_adapter(REF, lora())
    ours = trainer(GRPOTrainer, model, arguments(tmp_path))
    assert ours.reference_sentence.startswith("the model's adapter `ref`")
    assert kl_to_reference(ours, TEXTS) > SEEN


@pytest.mark.slow
def test_a_restart_keeps_the_original_reference(policy: Path, tmp_path: Path) -> None:
    adapted(policy, lora(), continued=True).save_pretrained(tmp_path / "sft")
    args = arguments(tmp_path / "run", max_steps=4, save_strategy="steps", save_steps=2)

    def sft() -> PeftModel:
        return PeftModel.from_pretrained(load(policy), tmp_path / "sft", is_trainable=True)

    first = trainer(GRPOTrainer, sft(), args)
    original = tensors(first.model, REF)
    first.train()
    checkpoint = tmp_path / "run" / "checkpoint-2"

    resumed = trainer(GRPOTrainer, sft(), args)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert equal(original, tensors(resumed.model, REF))

    def restarted() -> PeftModel:
        return PeftModel.from_pretrained(load(policy), checkpoint, is_trainable=True)

    plain = trainer(TRLGRPOTrainer, restarted(), arguments(tmp_path / "plain"))
    assert not equal(original, tensors(plain.model, REF))
    kept = trainer(GRPOTrainer, restarted(), arguments(tmp_path / "kept"), reference={"adapter": checkpoint / REF})
    assert equal(original, tensors(kept.model, REF))


@pytest.mark.slow
def test_a_checkpoint_brings_no_reference_into_a_run_without_one(policy: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path / "run", max_steps=2, save_strategy="steps", save_steps=1)
    trainer(GRPOTrainer, adapted(policy, lora(), continued=True), args).train()
    resumed = trainer(GRPOTrainer, adapted(policy, lora(), continued=True), args, reference="base")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert REF not in resumed.model.peft_config


@pytest.mark.parametrize("initialisation", only(["pissa"], ["pissa", "olora", False]))
def test_the_reference_is_the_model_at_step_0_with_every_lora_initialization(
    policy: Path, tmp_path: Path, initialisation: str | bool
) -> None:
    config = lora(init_lora_weights=initialisation)
    assert logged_kl(trainer(TRLGRPOTrainer, load(policy), arguments(tmp_path), peft_config=config))[0] > SEEN
    assert logged_kl(trainer(GRPOTrainer, load(policy), arguments(tmp_path), peft_config=config))[0] <= ZERO


@pytest.mark.parametrize("initialisation", only(["pissa"], ["pissa", "olora"]))
def test_the_reference_does_not_change_the_policy(policy: Path, tmp_path: Path, initialisation: str) -> None:
    def model() -> PeftModel:
        return adapted(policy, lora(init_lora_weights=initialisation), continued=True)

    expected = log_probabilities(model(), TEXTS[0])
    plain = trainer(TRLGRPOTrainer, model(), arguments(tmp_path))
    assert not torch.allclose(log_probabilities(plain.model, TEXTS[0]), expected, atol=1e-2)
    with pytest.raises(UserError, match="without_trl_reference"):
        set_reference(plain, "initial")
    ours = trainer(GRPOTrainer, model(), arguments(tmp_path))
    assert torch.equal(log_probabilities(ours.model, TEXTS[0]), expected)
    assert logged_kl(ours)[0] <= ZERO


@pytest.mark.slow
def test_dropout_raises_a_warning(policy: Path, tmp_path: Path) -> None:
    def model() -> PeftModel:
        return adapted(policy, lora(lora_dropout=0.05), continued=True)

    args = arguments(tmp_path, disable_dropout=False)
    assert logged_kl(trainer(TRLGRPOTrainer, model(), args))[0] > SEEN
    with pytest.warns(UserWarning, match=r"`lora_dropout: 0` switches it off"):
        trainer(GRPOTrainer, model(), args).train()
    silent = trainer(GRPOTrainer, model(), arguments(tmp_path))
    assert logged_kl(silent)[0] <= ZERO


def test_disable_dropout_covers_attention_dropout(tmp_path: Path) -> None:
    folder = tiny.save_policy(tmp_path / "policy", attention_dropout=0.1)
    assert logged_kl(trainer(TRLGRPOTrainer, load(folder), arguments(tmp_path)))[0] > SEEN
    assert logged_kl(trainer(GRPOTrainer, load(folder), arguments(tmp_path)))[0] <= ZERO


def test_disable_dropout_works_without_a_reference(policy: Path, tmp_path: Path) -> None:
    folder = tiny.save_policy(tmp_path / "policy", attention_dropout=0.1)
    ours = trainer(GRPOTrainer, adapted(folder, lora(lora_dropout=0.1), continued=True), arguments(tmp_path, beta=0.0))
    ids = torch.tensor([[5, 6, 7, 8]])
    ours.model.train()
    assert torch.equal(ours.model(input_ids=ids).logits, ours.model(input_ids=ids).logits)


@pytest.mark.parametrize("source", ["initial", pytest.param("base", marks=pytest.mark.slow)])
def test_trainable_parameters_beside_the_adapter_are_refused(policy: Path, tmp_path: Path, source: str) -> None:
    """No adapter state undoes their training, so the reference would move with the policy."""

    def norms_too() -> PeftModel:
        model = adapted(policy, lora(), continued=source == "initial")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or "layernorm" in name)
        return model

    plain = trainer(TRLGRPOTrainer, norms_too(), arguments(tmp_path))
    with reference_in(plain) as reference:
        before = log_probabilities(reference, TEXTS[0])
    moved(plain.model)
    with reference_in(plain) as reference:
        assert not torch.allclose(log_probabilities(reference, TEXTS[0]), before, atol=1e-2)
    model = norms_too()
    with pytest.raises(UserError, match="4 parameters beside the adapter.*layernorm.*`modules_to_save`"):
        trainer(GRPOTrainer, model, arguments(tmp_path), reference=source)
    trainer(GRPOTrainer, model, arguments(tmp_path, beta=0.0))


@pytest.mark.slow
def test_a_continued_adapter_with_replicated_layers(policy: Path, tmp_path: Path) -> None:
    """PEFT replicates the policy's layers again for each added adapter with `layer_replication`."""
    config = lora(layer_replication=[(0, 2), (1, 2)])
    adapted(policy, config, continued=True).save_pretrained(tmp_path / "adapter")

    def model() -> PeftModel:
        return PeftModel.from_pretrained(load(policy), tmp_path / "adapter", is_trainable=True)

    expected = log_probabilities(model(), TEXTS[0])
    plain = trainer(TRLGRPOTrainer, model(), arguments(tmp_path))
    assert not torch.allclose(log_probabilities(plain.model, TEXTS[0]), expected, atol=1e-2)
    ours = trainer(GRPOTrainer, model(), arguments(tmp_path))
    assert torch.equal(log_probabilities(ours.model, TEXTS[0]), expected)
    assert kl_to_reference(ours, TEXTS) <= ZERO
    moved(ours.model)
    with reference_in(ours) as reference:
        torch.testing.assert_close(log_probabilities(reference, TEXTS[0]), expected)
    with pytest.raises(UserError, match="`layer_replication: .*use `reference: initial`"):
        trainer(GRPOTrainer, model(), arguments(tmp_path), reference={"adapter": str(tmp_path / "adapter")})


def test_the_folder_of_an_adapter_is_a_model(policy: Path, tmp_path: Path) -> None:
    adapted(policy, lora(), continued=True).save_pretrained(tmp_path / "adapter")
    args = arguments(tmp_path, model_init_kwargs={"dtype": "float32"})
    with pytest.raises(ValueError, match="Unrecognized model"):
        trainer(TRLGRPOTrainer, str(tmp_path / "adapter"), args)
    ours = trainer(GRPOTrainer, str(tmp_path / "adapter"), args)
    expected = log_probabilities(adapted(policy, lora(), continued=True), TEXTS[0])
    torch.testing.assert_close(log_probabilities(ours.model, TEXTS[0]), expected)
    assert logged_kl(ours)[0] <= ZERO
    assert any(parameter.requires_grad for parameter in ours.model.parameters())


def test_the_reference_of_a_merged_model_is_that_model(policy: Path, tmp_path: Path) -> None:
    def merged() -> Any:
        return adapted(policy, lora(), continued=True).merge_and_unload().requires_grad_(True)

    assert logged_kl(trainer(TRLGRPOTrainer, merged(), arguments(tmp_path)))[0] > SEEN
    on_trl = trainer(TRLGRPOTrainer, merged(), arguments(tmp_path))
    set_reference(on_trl, "initial")
    assert logged_kl(on_trl)[0] <= ZERO


def test_a_model_that_was_never_on_disk_has_a_reference(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="''"):
        trainer(TRLGRPOTrainer, tiny.policy(), arguments(tmp_path))
    args = arguments(tmp_path, max_steps=3)
    with without_trl_reference(args):
        on_trl = trainer(TRLGRPOTrainer, tiny.policy(), args)
    assert args.beta == 0.04
    set_reference(on_trl, "initial")
    kls = logged_kl(on_trl)
    assert kls[0] <= ZERO < SEEN < kls[2]
    frozen = dict(on_trl.ref_model.named_parameters())
    assert all(torch.equal(frozen[name], tensor) for name, tensor in tiny.policy().named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("continued", [False, True])
def test_trainable_tokens_on_a_tied_head(tied_policy: Path, tmp_path: Path, continued: bool) -> None:
    def model() -> PeftModel:
        return adapted(tied_policy, lora(trainable_token_indices=[5, 6, 7]), continued=continued)

    with pytest.raises(AttributeError, match="bias"):
        trainer(TRLGRPOTrainer, model(), arguments(tmp_path)).train()
    ours = trainer(GRPOTrainer, model(), arguments(tmp_path, max_steps=2))
    kls = logged_kl(ours)
    assert kls[0] <= ZERO < kls[1]


# Adapter configuration, and True for a continued adapter.
TABLE: dict[str, tuple[PeftConfig, bool]] = {
    **{f"new {kind}": (config, False) for kind, config in {**COMPLETE_IN_TRL, **INCOMPLETE_IN_TRL}.items()},
    **{f"continued {kind}": (config, True) for kind, config in COMPLETE_IN_TRL.items()},
    "continued BOFT": (BOFTConfig(boft_block_size=8, **ATTENTION), True),
    "continued VB-LoRA": (VBLoRAConfig(num_vectors=8, vector_length=8, topk=2, r=4, **ATTENTION), True),
    "continued AdaLoRA": (AdaLoraConfig(init_r=6, target_r=4, total_step=10, **ATTENTION), True),
    "LoRA, normal factors": (lora(init_lora_weights="gaussian"), False),
    "LoRA, orthogonal factors": (lora(init_lora_weights="orthogonal"), False),
}


# A new and a continued LoRA, and a method of each other kind: a trained head, other initial factors, no LoRA.
QUICK = ("new LoRA", "continued LoRA", "continued modules_to_save", "LoRA, normal factors", "continued OFT")


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("case", only(QUICK, TABLE))
def test_the_kl_is_0_at_step_0(policy: Path, tmp_path: Path, case: str) -> None:
    config, continued = TABLE[case]
    ours = trainer(GRPOTrainer, adapted(policy, config, continued=continued), arguments(tmp_path, max_steps=2))
    kls = logged_kl(ours)
    assert kls[0] <= ZERO
    # The zero is no accident: the KL grows as the policy moves, and a continued adapter differs from its base.
    assert kls[1] > kls[0]
    if continued:
        set_reference(ours, "base")
        assert kl_to_reference(ours, TEXTS) > ZERO


def test_a_trained_head_beside_an_untrained_lora_is_part_of_the_initial_policy(policy: Path, tmp_path: Path) -> None:
    model = adapted(policy, lora(modules_to_save=["lm_head"]), continued=False)
    head = model.get_output_embeddings().modules_to_save["default"].weight
    with torch.no_grad():
        head += 0.1 * torch.randn(head.shape, generator=torch.Generator().manual_seed(0))
    kls = logged_kl(trainer(GRPOTrainer, model, arguments(tmp_path, max_steps=2)))
    assert kls[0] <= ZERO < kls[1]


@pytest.mark.parametrize(
    ("changes", "dtype"), covering([{}, {"tie_word_embeddings": True}], [torch.float32, torch.bfloat16]), ids=str
)
def test_the_kl_is_0_at_step_0_of_full_fine_tuning(tmp_path: Path, changes: dict, dtype: torch.dtype) -> None:
    ours = trainer(GRPOTrainer, tiny.policy(**changes).to(dtype), arguments(tmp_path, max_steps=2))
    kls = logged_kl(ours)
    assert kls[0] <= ZERO < kls[1]


def test_the_kl_is_0_at_step_0_with_a_float32_head(tmp_path: Path) -> None:
    model = tiny.policy().to(torch.bfloat16)
    ours = trainer(GRPOTrainer, model, arguments(tmp_path, max_steps=2, cast_lm_head_to_fp32=True))
    kls = logged_kl(ours)
    assert kls[0] <= ZERO < kls[1]


@pytest.mark.parametrize("case", only(["trainable tokens"], ["embedding LoRA", "modules_to_save", "trainable tokens"]))
def test_the_kl_is_0_at_step_0_with_tied_embeddings(tied_policy: Path, tmp_path: Path, case: str) -> None:
    configs = {
        "embedding LoRA": lora(target_modules=["embed_tokens", "q_proj"]),
        "modules_to_save": lora(modules_to_save=["embed_tokens"]),
        "trainable tokens": lora(trainable_token_indices=[5, 6, 7]),
    }
    ours = trainer(GRPOTrainer, adapted(tied_policy, configs[case], continued=True), arguments(tmp_path))
    assert logged_kl(ours)[0] <= ZERO


def test_the_kl_is_0_at_step_0_of_a_bf16_base_with_an_fp32_adapter(policy: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = moved(get_peft_model(load(policy).to(torch.bfloat16), lora()))
    ours = trainer(GRPOTrainer, model, arguments(tmp_path))
    held = [adapter_tensors(ours.model, name).values() for name in ("default", REF)]
    assert [tensor.dtype for tensor in held[0]] == [tensor.dtype for tensor in held[1]]
    assert logged_kl(ours)[0] <= ZERO


def test_the_kl_is_0_at_step_0_with_a_4_bit_base(policy: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="QLoRA needs bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(policy, quantization_config=quantization)
    torch.manual_seed(1)
    assert logged_kl(trainer(GRPOTrainer, moved(get_peft_model(base, lora())), arguments(tmp_path)))[0] <= ZERO


@pytest.mark.parametrize("kind", ["full", "LoRA", "modules_to_save"])
def test_no_copy_is_made_where_none_is_needed(policy: Path, tmp_path: Path, kind: str) -> None:
    model = load(policy) if kind == "full" else adapted(policy, COMPLETE_IN_TRL[kind], continued=False)
    ours = trainer(GRPOTrainer, model, arguments(tmp_path, beta=0.0 if kind == "full" else 0.04))
    assert ours.ref_model is None
    assert REF not in getattr(ours.model, "peft_config", {})


def test_the_base_and_an_adapter_folder_as_references(policy: Path, tmp_path: Path) -> None:
    adapted(policy, lora(r=2), continued=True).save_pretrained(tmp_path / "sft")

    def ours(reference: Any) -> GRPOTrainer:
        model = adapted(policy, lora(), continued=True)
        return trainer(GRPOTrainer, model, arguments(tmp_path), reference=reference)

    text = TEXTS[1]
    mine = log_probabilities(adapted(policy, lora(), continued=True), text)
    for reference, other in [
        ("base", load(policy)),
        ({"adapter": tmp_path / "sft"}, adapted(policy, lora(r=2), continued=True)),
    ]:
        difference = log_probabilities(other, text) - mine
        expected = float((difference.exp() - difference - 1).mean())
        assert kl_to_reference(ours(reference), [text]) == pytest.approx(expected, rel=1e-3, abs=1e-7)


def test_impossible_references_raise_one_line(policy: Path, tmp_path: Path) -> None:
    def message(model: Any, reference: Any, **changes: Any) -> str:
        with pytest.raises(UserError) as caught:
            trainer(GRPOTrainer, model, arguments(tmp_path, **changes), reference=reference)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    adapted(policy, lora(init_lora_weights="pissa"), continued=True).save_pretrained(tmp_path / "pissa")
    replication = lora(layer_replication=[(0, 2), (1, 2)])
    adapted(policy, replication, continued=True).save_pretrained(tmp_path / "replicated")
    adapted(policy, lora(target_modules=["q_proj"]), continued=True).save_pretrained(tmp_path / "q")
    hidden = tiny.save_policy(tmp_path / "wide", hidden_size=64)
    adapted(hidden, lora(), continued=True).save_pretrained(tmp_path / "wide-adapter")

    def new() -> PeftModel:
        return adapted(policy, lora(), continued=False)

    assert "`reference: base` needs a policy with an adapter, and this is full" in message(load(policy), "base")
    assert f"`reference: {{adapter: {tmp_path / 'q'}}}` needs" in message(load(policy), {"adapter": tmp_path / "q"})
    assert "did you mean `initial`" in message(new(), "inital")
    assert "did you mean `adapter`" in message(new(), {"adaptor": "x"})
    assert "keep one" in message(new(), {"name": "base", "adapter": "x"})
    assert "no adapter in" in message(new(), {"adapter": tmp_path / "nothing"})
    changes = "which changes the base's weights"
    assert f"pissa has `init_lora_weights: pissa`, {changes}" in message(new(), {"adapter": tmp_path / "pissa"})
    replicated = message(new(), {"adapter": tmp_path / "replicated"})
    assert f"replicated has `layer_replication: [[0, 2], [1, 2]]`, {changes}" in replicated
    assert "does not fit this policy" in message(new(), {"adapter": tmp_path / "wide-adapter"})
    biased = tiny.save_policy(tmp_path / "biased", attention_bias=True)
    assert "set `bias: none`" in message(adapted(biased, lora(bias="all"), continued=False), "initial")
    refresh = {"sync_ref_model": True, "ref_model_sync_steps": 2}
    assert "can't be refreshed" in message(new(), "base", **refresh)
    assert "`beta` is 0.0, which needs no reference" in message(new(), "initial", beta=0.0, **refresh)
    assert "other tensors than the policy" in message(new(), {"adapter": tmp_path / "q"}, **refresh)
    assert "above 0 and at most 1" in message(new(), "initial", **refresh, ref_model_mixup_alpha=1.5)
    assert "gives `reference.reset_optimizer_on_sync` no effect" in message(new(), {"reset_optimizer_on_sync": True})


class Snapshots(TrainerCallback):
    """Callback that records the policy and the size of the optimizer's state after each optimizer step."""

    def __init__(self, read: Any) -> None:
        self.read = read
        self.policies: dict[int, dict[str, torch.Tensor]] = {}
        self.optimizer_state: dict[int, int] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.policies[state.global_step] = self.read()
        self.optimizer_state[state.global_step] = len(kwargs["optimizer"].state)


def policy_tensors(ours: TRLGRPOTrainer) -> dict[str, torch.Tensor]:
    if isinstance(ours.model, PeftModel):
        return tensors(ours.model, "default")
    return {name: tensor.detach().clone() for name, tensor in ours.model.named_parameters()}


def reference_tensors(ours: TRLGRPOTrainer) -> dict[str, torch.Tensor]:
    if isinstance(ours.model, PeftModel):
        return tensors(ours.model, REF)
    return {name: tensor.detach().clone() for name, tensor in ours.ref_model.named_parameters()}


REFRESHED = {
    "new LoRA": lambda folder: adapted(folder, lora(), continued=False),
    "continued LoRA": lambda folder: adapted(folder, lora(), continued=True),
    "embedding LoRA": lambda folder: adapted(folder, INCOMPLETE_IN_TRL["LoRA on the embedding"], continued=True),
    "DoRA": lambda folder: adapted(folder, lora(use_dora=True, modules_to_save=["lm_head"]), continued=True),
    "VeRA": lambda folder: adapted(folder, INCOMPLETE_IN_TRL["VeRA"], continued=True),
    "full": load,
}


def test_stock_trl_cannot_refresh_a_lora_reference(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError):
        trainer(TRLGRPOTrainer, REFRESHED["new LoRA"](policy), arguments(tmp_path, sync_ref_model=True))


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("kind", only(["new LoRA", "full"], REFRESHED))
def test_the_kl_is_0_after_a_hard_refresh_and_grows(policy: Path, tmp_path: Path, kind: str) -> None:
    args = arguments(tmp_path, max_steps=5, sync_ref_model=True, ref_model_sync_steps=3, ref_model_mixup_alpha=1.0)
    ours = trainer(GRPOTrainer, REFRESHED[kind](policy), args)
    snapshots = Snapshots(lambda: policy_tensors(ours))
    ours.add_callback(snapshots)
    kls = logged_kl(ours)
    assert max(kls[0], kls[3]) <= ZERO < min(kls[2], kls[4])
    assert equal(snapshots.policies[3], reference_tensors(ours))
    assert snapshots.optimizer_state[3] > 0


@pytest.mark.parametrize("kind", only(["full"], ["new LoRA", "DoRA", "full"]))
def test_the_moving_average_equals_its_closed_form(policy: Path, tmp_path: Path, kind: str) -> None:
    alpha = 0.6
    args = arguments(tmp_path, max_steps=7, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=alpha)
    ours = trainer(GRPOTrainer, REFRESHED[kind](policy), args)
    snapshots = Snapshots(lambda: policy_tensors(ours))
    ours.add_callback(snapshots)
    start = reference_tensors(ours)
    ours.train()
    for name, tensor in reference_tensors(ours).items():
        expected = (1 - alpha) ** 3 * start[name].double()
        for age, step in enumerate((6, 4, 2)):
            expected += alpha * (1 - alpha) ** age * snapshots.policies[step][name].double()
        assert torch.allclose(tensor.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_a_refresh_can_reset_the_optimizer(policy: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=3, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=1.0)
    model = REFRESHED["new LoRA"](policy)
    ours = trainer(GRPOTrainer, model, args, reference={"name": "initial", "reset_optimizer_on_sync": True})
    snapshots = Snapshots(lambda: policy_tensors(ours))
    ours.add_callback(snapshots)
    ours.train()
    assert snapshots.optimizer_state[1] > 0
    assert snapshots.optimizer_state[2] == 0
    assert {int(state["step"]) for state in ours.optimizer.state.values()} == {1}


class Killed(Exception):
    pass


class KillAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Killed


@pytest.mark.slow
@pytest.mark.parametrize("kind", only(["full"], ["new LoRA", "embedding LoRA", "full"]))
@pytest.mark.parametrize("alpha", only([0.6], [1.0, 0.6]))
def test_a_run_killed_between_refreshes_resumes_to_equal_bits(
    policy: Path, tmp_path: Path, kind: str, alpha: float
) -> None:
    def run(name: str) -> TRLGRPOTrainer:
        args = arguments(
            tmp_path / name,
            max_steps=7,
            sync_ref_model=True,
            ref_model_sync_steps=3,
            ref_model_mixup_alpha=alpha,
            save_strategy="steps",
            save_steps=4,
        )
        reference = {"name": "initial", "reset_optimizer_on_sync": alpha == 1.0}
        return trainer(GRPOTrainer, REFRESHED[kind](policy), args, reference=reference)

    uninterrupted = run("uninterrupted")
    uninterrupted.train()
    killed = run("killed")
    killed.add_callback(KillAt(5))
    with pytest.raises(Killed):
        killed.train()
    resumed = run("killed")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 7
    assert equal(policy_tensors(uninterrupted), policy_tensors(resumed))
    assert equal(reference_tensors(uninterrupted), reference_tensors(resumed))


def test_a_checkpoint_without_its_reference_is_refused(policy: Path, tmp_path: Path) -> None:
    args = arguments(
        tmp_path, max_steps=3, sync_ref_model=True, ref_model_sync_steps=1, save_strategy="steps", save_steps=2
    )
    trainer(GRPOTrainer, load(policy), args).train()
    (tmp_path / "checkpoint-2" / "reference.safetensors").unlink()
    for manifest in tmp_path.glob("checkpoint-*/manifest.json"):  # TRL's trainer writes none
        manifest.unlink()
    with pytest.raises(UserError, match="reference is lost: resume from an earlier checkpoint"):
        trainer(GRPOTrainer, load(policy), args).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


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


def test_the_reference_adapter_gets_no_gradient(policy: Path, tmp_path: Path) -> None:
    ours = trainer(GRPOTrainer, adapted(policy, lora(lora_dropout=0.1), continued=True), arguments(tmp_path))
    ours.train()
    trained = {id(parameter) for group in ours.optimizer.param_groups for parameter in group["params"]}
    assert not trained & {id(tensor) for tensor in adapter_tensors(ours.model, REF).values()}
    assert trained == {id(tensor) for tensor in adapter_tensors(ours.model, "default").values()}


def test_an_adapter_folder_saved_by_a_run_loads_in_peft(policy: Path, tmp_path: Path) -> None:
    ours = trainer(GRPOTrainer, adapted(policy, lora(), continued=True), arguments(tmp_path))
    ours.save_model(str(tmp_path / "out"))
    again = PeftModel.from_pretrained(load(policy), tmp_path / "out")
    expected = log_probabilities(adapted(policy, lora(), continued=True), TEXTS[0])
    assert torch.equal(log_probabilities(again, TEXTS[0]), expected)


def test_a_reference_whose_layers_share_tensors_is_stored_completely(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are partitioned as by ZeRO-3, where a write into a gathered tensor is lost unless requested."""
    monkeypatch.setattr(reference_module, "gathered", partitioned)
    args = arguments(tmp_path, sync_ref_model=True, ref_model_sync_steps=1)
    ours = trainer(GRPOTrainer, REFRESHED["VeRA"](policy), args)
    before = reference_tensors(ours)
    reference_module._store(ours, tmp_path)
    for tensor in adapter_tensors(ours.model, REF).values():
        tensor.data.zero_()
    reference_module._restore(ours, tmp_path)
    assert equal(before, reference_tensors(ours))
    moved(ours.model)
    reference_module._refresh(ours, 1.0)
    assert equal(policy_tensors(ours), reference_tensors(ours))
    assert not equal(before, reference_tensors(ours))


@pytest.mark.parametrize(("version", "sync", "refused"), [(1, True, True), (1, False, False), (2, True, False)])
def test_a_refresh_needs_fsdp2(version: int, sync: bool, refused: bool) -> None:
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version))
    on_fsdp: Any = SimpleNamespace(
        is_fsdp_enabled=True, accelerator=SimpleNamespace(state=state), args=SimpleNamespace(sync_ref_model=sync)
    )
    with pytest.raises(UserError, match="`sync_ref_model` needs FSDP2") if refused else nullcontext():
        reference_module._check_backend(on_fsdp)


def test_tokenizer_and_model_agree() -> None:
    assert len(tiny.byte_tokenizer()) == tiny.policy().config.vocab_size
