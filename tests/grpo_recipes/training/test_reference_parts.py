"""Parts of the reference: which adapters add nothing, refused policies, the refresh, and what the callback does."""

from __future__ import annotations

import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from trl.trainer.callbacks import SyncRefModelCallback

from grpo_recipes.generation.models import has_dropout
from grpo_recipes.recipe.specs import ReferenceSpec
from grpo_recipes.training import reference
from grpo_recipes.training.adapters import adapter_tensors
from grpo_recipes.training.reference import REF, ReferenceCallback, set_reference, without_trl_reference
from grpo_rewards.errors import UserError
from tests.support.recorded import model

ATTENTION: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


def adapted(**changes: Any) -> Any:
    torch.manual_seed(0)
    return get_peft_model(model(), LoraConfig(**{**ATTENTION, **changes}))


def fill(policy: Any, part: str, value: float) -> None:
    """Fill the adapter's tensors whose name holds `part`."""
    with torch.no_grad():
        for name, tensor in adapter_tensors(policy, "default").items():
            if part in name:
                tensor.fill_(value)


# ---- whether an adapter adds anything


@pytest.mark.parametrize(
    ("changes", "part", "adds"),
    [
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
    ],
)
def test_a_lora_adds_nothing_while_its_tensors_show_so(changes: dict[str, Any], part: str, adds: bool) -> None:
    policy = adapted(**changes)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), policy.disable_adapter():
        base = policy(input_ids=ids).logits
    if part:
        fill(policy, part, 0.25)
    assert reference._adds_nothing(policy, "default") is not adds
    with torch.no_grad():
        is_equal = torch.allclose(policy(input_ids=ids).logits, base, atol=1e-6)
    assert is_equal or adds


@pytest.mark.parametrize(
    ("start", "changes"),
    [
        *[(name, True) for name in ("pissa", "PiSSA", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga")],
        *[(start, False) for start in (True, False, "gaussian", "orthogonal", "eva", None)],
    ],
)
def test_a_start_that_changes_the_base_is_known_by_its_name(start: Any, changes: bool) -> None:
    config: Any = SimpleNamespace(init_lora_weights=start)
    assert reference._changes_the_base(config) is changes
    other: Any = SimpleNamespace()
    assert not reference._changes_the_base(other)


# ---- references of a policy with an adapter


def described(policy: Any, source: Any, *, keep_copy: bool = False) -> str:
    return reference._adapter_reference(policy, ReferenceSpec.parse(source), keep_copy=keep_copy)


@pytest.mark.parametrize(
    ("missing", "unexpected", "says"),
    [(["a", "b"], ["c"], "tensor a has no counterpart"), ([], ["c", "d"], "tensor c has no counterpart")],
)
def test_the_first_tensor_without_a_counterpart_is_named(
    missing: list[str], unexpected: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT only lists such tensors, and leaves random numbers in their places."""
    config = SimpleNamespace(base_model_name_or_path="base")
    monkeypatch.setattr(reference, "adapter_config", lambda where: config)
    result = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
    policy: Any = nn.Module()
    policy.load_adapter = lambda where, name: policy.eval() and result
    with pytest.raises(UserError, match=rf"`reference.adapter`: there does not fit this policy: {says}$"):
        reference._load_reference(policy, "there")
    assert policy.training
    result.missing_keys = result.unexpected_keys = []
    assert reference._load_reference(policy, "there") == "base"


def test_a_policy_that_cannot_have_a_reference_is_refused() -> None:
    def message(policy: Any, source: Any = "initial", **how: Any) -> str:
        with pytest.raises(UserError) as caught:
            described(policy, source, **how)
        return str(caught.value)

    two = adapted()
    two.add_adapter("more", LoraConfig(**ATTENTION))
    two.base_model.set_adapter(["default", "more"])
    assert message(two) == "the policy has 2 active adapters (default, more): activate one"
    named = get_peft_model(model(), LoraConfig(**ATTENTION), adapter_name=REF)
    assert message(named) == "the policy's adapter is named `ref`, TRL's name for the reference: rename it"
    beside = adapted()
    beside.base_model.model.lm_head.weight.requires_grad_(True)
    assert message(beside) == (
        "1 parameters beside the adapter `default` would train (base_model.model.lm_head.weight is the first), which "
        "switching it off or copying it leaves trained: set `bias: none`, name their modules in `modules_to_save`, "
        "freeze them, or set `beta: 0`"
    )
    holds = adapted()
    holds.add_adapter(REF, LoraConfig(**ATTENTION))
    assert message(holds) == (
        "the model holds an adapter named `ref`, TRL's name for the reference: use it with `reference: {adapter: "
        "ref}`, or delete it"
    )
    smaller = adapted()
    smaller.add_adapter("sft", LoraConfig(**{**ATTENTION, "r": 1}))
    assert message(smaller, {"adapter": "sft"}, keep_copy=True) == (
        "the reference has other tensors than the policy, so `sync_ref_model` can't refresh it: use an adapter of the "
        "same configuration, or remove `sync_ref_model`"
    )


def test_a_copy_must_have_every_tensor_of_its_original(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_one(policy: Any, name: str) -> dict[str, torch.Tensor]:
        found = adapter_tensors(policy, name)
        return dict(list(found.items())[1:]) if name == REF else found

    policy = adapted()
    first = min(adapter_tensors(policy, "default"))
    monkeypatch.setattr(reference, "adapter_tensors", without_one)
    with pytest.raises(UserError, match=rf"\({first} is in one of them only\)"):
        described(policy, "initial", keep_copy=True)


def test_a_reference_has_the_dtype_of_the_policy_s_adapter_and_no_dropout() -> None:
    policy = adapted(lora_dropout=0.3)
    fill(policy, "lora_", 0.3)  # 0.3 is not a bfloat16
    policy.bfloat16()
    for tensor in adapter_tensors(policy, "default").values():
        tensor.data = tensor.data.to(torch.float64)
        tensor.data.fill_(0.3)
    described(policy, "initial")
    for tensor in adapter_tensors(policy, REF).values():
        assert tensor.dtype == torch.float64
        assert (tensor == 0.3).all(), "the copy is not rounded"
    rates = {name: module.p for name, module in policy.named_modules() if isinstance(module, nn.Dropout)}
    assert {rate for name, rate in rates.items() if f".{REF}" in name} <= {0.0}
    assert {rate for name, rate in rates.items() if ".default" in name} == {0.3}


# ---- the arithmetic of a refresh


@pytest.mark.parametrize(
    ("before", "policy", "alpha", "after"),
    [
        ([1.0, 2.0], [3.0, -2.0], 0.25, [1.5, 1.0]),
        ([1.0, 2.0], [3.0, -2.0], 1.0, [3.0, -2.0]),
        ([float("inf"), float("nan")], [3.0, -2.0], 1.0, [3.0, -2.0]),
        ([1, 2], [3, 5], 0.25, [3, 5]),  # a count has no share of the way
    ],
)
def test_a_tensor_moves_to_the_policys_and_a_copy_is_exact(
    before: list[Any], policy: list[Any], alpha: float, after: list[Any]
) -> None:
    source, target = torch.tensor(policy), torch.tensor(before)
    reference._blend(source, target, alpha)
    assert target.tolist() == after
    assert source.tolist() == policy


def test_a_stored_reference_of_other_tensors_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = {"a": torch.zeros(2), "b": torch.zeros(2)}
    monkeypatch.setattr(reference, "_reference_tensors", lambda trainer: own)
    trainer: Any = SimpleNamespace()
    with pytest.raises(UserError, match="so that run's refreshed reference is lost"):
        reference._restore(trainer, tmp_path)
    for names in ("a", "abc", "bc"):
        save_file({name: torch.ones(2) for name in names}, tmp_path / reference.WEIGHTS)
        with pytest.raises(UserError, match="is of another model: resume with the recipe that wrote it"):
            reference._restore(trainer, tmp_path)
        assert not any(tensor.any() for tensor in own.values())
    save_file({name: torch.ones(2) for name in "ab"}, tmp_path / reference.WEIGHTS)
    reference._restore(trainer, tmp_path)
    assert all(tensor.all() for tensor in own.values())


def test_the_checkpoint_of_a_resume_is_that_of_its_step(tmp_path: Path) -> None:
    state: Any = SimpleNamespace(global_step=3)
    own, other = tmp_path / "checkpoint-3", Path("elsewhere") / "checkpoint-3"
    for given, found in ((True, own), (None, own), ("elsewhere/checkpoint-4", own), (str(other), other)):
        args: Any = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=given)
        assert reference._resumed_checkpoint(args, state) == found


# ---- setting a reference


class Trainer(SimpleNamespace):
    """Stand-in for TRL's trainer."""

    def __init__(self, policy: Any, **args: Any) -> None:
        values = {
            **{"beta": 0.1, "sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512},
            **{"disable_dropout": False, "save_strategy": "no", "cast_lm_head_to_fp32": False},
        }
        plain = SimpleNamespace(prepare_model=lambda prepared, evaluation_mode: prepared)
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


def test_some_parameters_may_be_frozen_and_not_all() -> None:
    policy = model()
    first, *rest = policy.parameters()
    first.requires_grad_(False)
    reference._check_trains(policy)
    for parameter in rest:
        parameter.requires_grad_(False)
    with pytest.raises(UserError, match="no parameter of the policy would train"):
        reference._check_trains(policy)


def test_an_empty_source_is_refused() -> None:
    trainer: Any = Trainer(model())
    with pytest.raises(UserError, match="`reference.name` can't be ``: choose initial or base"):
        set_reference(trainer, "")


def test_trls_own_refresh_is_removed() -> None:
    """It would move the reference beside ours."""
    trainer: Any = Trainer(model())
    trainer.callbacks = [object.__new__(SyncRefModelCallback), "of the user"]
    set_reference(trainer, "initial")
    assert [type(one) for one in trainer.callbacks] == [str, ReferenceCallback]


@pytest.mark.parametrize("backend", ["plain", "deepspeed", "fsdp"])
def test_a_full_reference_is_prepared_as_the_policy_is(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[Any] = []
    monkeypatch.setattr(reference, "add_fused_lm_head", lambda given, **options: heads.append((given, options)))
    for name in ("deepspeed", "fsdp"):
        monkeypatch.setattr(
            reference, f"prepare_{name}", lambda *given, name=name: SimpleNamespace(by=name, given=given)
        )
    policy = model()
    policy.model.layers[0].extra = nn.Dropout(0.25)
    trainer: Any = Trainer(policy, cast_lm_head_to_fp32=True)
    trainer.temperature = 0.7
    trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled = backend == "deepspeed", backend == "fsdp"
    trainer.accelerator.prepare_model = lambda *given, evaluation_mode: SimpleNamespace(
        by="plain" if evaluation_mode else "training", given=(*given, trainer.accelerator)
    )
    copied = reference._frozen_copy

    def freed(given: Any) -> Any:
        assert trainer.ref_model is None, "TRL's copy would be a third model in memory"
        return copied(given)

    monkeypatch.setattr(reference, "_frozen_copy", freed)
    reference._model_reference(trainer, ReferenceSpec.parse("initial"))
    given, accelerator = trainer.ref_model.given
    assert (trainer.ref_model.by, accelerator) == (backend, trainer.accelerator)
    assert heads == [(given, {"temperature": 0.7, "cast_lm_head_to_fp32": True})]
    assert (has_dropout(given), has_dropout(policy)) == (False, True)


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the trainers whose policy is sent to vLLM rightly."""
    found: list[Any] = []
    monkeypatch.setattr(reference, "send_policy", found.append)
    monkeypatch.setattr(reference, "add_fused_lm_head", lambda *_, **__: None)
    return found


@pytest.mark.parametrize(
    "error", [AttributeError, KeyError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError]
)
def test_an_adapter_that_peft_refuses_is_a_mistake_of_the_user(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT has no error of its own: each kind of adapter raises what happens to fail."""

    def refuses(*_: Any) -> None:
        raise error("no")

    if error is not OSError:  # a copy reads no file
        policy = adapted()
        monkeypatch.setattr(policy, "add_adapter", refuses)
        with pytest.raises(UserError, match=r"PEFT can't hold a second LORA adapter like `default` \('?no'?\): use"):
            described(policy, "initial", keep_copy=True)
    if error in (KeyError, OSError, RuntimeError, ValueError):
        config = SimpleNamespace(base_model_name_or_path="base")
        monkeypatch.setattr(reference, "adapter_config", lambda where: config)
        loading: Any = nn.Module()
        loading.load_adapter = refuses
        with pytest.raises(UserError, match=r"`reference.adapter`: there does not fit this policy: '?no'?$"):
            reference._load_reference(loading, "there")


def test_a_second_reference_replaces_the_first(sent: list[Any]) -> None:
    policy = adapted()
    fill(policy, "lora_B", 0.5)
    trainer: Any = Trainer(policy)
    set_reference(trainer, "initial")
    first = adapter_tensors(policy, REF)["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    fill(policy, "lora_B", 0.75)
    set_reference(trainer, "initial")
    second = adapter_tensors(policy, REF)["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    assert (first == 0.5).all()
    assert (second == 0.75).all()
    assert len(trainer.callbacks) == 1
    set_reference(trainer, "base")
    assert REF not in policy.peft_config
    policy.add_adapter(REF, LoraConfig(**ATTENTION))
    trainer.callbacks, trainer.beta = [], 0.0
    set_reference(trainer, {"adapter": REF})
    set_reference(trainer, {"adapter": REF})  # an adapter of the user's is not removed
    assert REF in policy.peft_config
    trainer.callbacks, trainer.beta = [], 0.1  # the adapter named "ref" is TRL's own copy
    set_reference(trainer, "base")
    assert REF not in policy.peft_config


def test_a_frozen_copy_of_a_full_model_keeps_nothing_of_the_policy() -> None:
    policy = model(attention_dropout=0.1)
    policy.train()
    policy.forward = lambda *_: "the policy's"
    trainer: Any = Trainer(policy)
    sentence = set_reference(trainer, "initial")
    count = sum(parameter.numel() for parameter in policy.parameters())
    assert sentence == f"the initial policy: a frozen copy of the model ({count:,} parameters)"
    copied = trainer.ref_model
    assert "forward" not in vars(copied)
    assert not copied.training
    assert policy.training
    assert not any(parameter.requires_grad for parameter in copied.parameters())
    assert all(parameter.requires_grad for parameter in policy.parameters())
    for source, named in (("base", "base"), ({"adapter": "a/b"}, "{adapter: a/b}")):
        with pytest.raises(UserError, match=f"^`reference: {named}` needs a policy with an adapter, and this is full"):
            set_reference(trainer, source)


def test_trl_makes_no_reference_inside_the_block() -> None:
    args: Any = SimpleNamespace(beta=0.3, sync_ref_model=True)
    with suppress(RuntimeError), without_trl_reference(args):
        assert (args.beta, args.sync_ref_model) == (0.0, False)
        raise RuntimeError
    assert (args.beta, args.sync_ref_model) == (0.3, True)
    with without_trl_reference(None):
        pass


# ---- the callback


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(reference, "_refresh", lambda trainer, alpha: found.append(("refresh", alpha)))
    monkeypatch.setattr(reference, "_restore", lambda trainer, path: found.append(("restore", str(path))))
    monkeypatch.setattr(reference, "_store", lambda trainer, path: found.append(("store", str(path))))
    monkeypatch.setattr(reference, "_warn_of_dropout", lambda trainer: found.append("dropout"))
    return found


@pytest.mark.parametrize("resets", [True, False])
def test_a_refresh_may_reset_the_optimizer_s_state(resets: bool, events: list[Any]) -> None:
    trainer: Any = Trainer(model(), sync_ref_model=True, ref_model_sync_steps=2)
    spec = ReferenceSpec.parse({"name": "initial", "reset_optimizer_on_sync": resets})
    groups = [{"lr": 0.1, "step": 7}, {"lr": 0.2}]
    optimizer = SimpleNamespace(state={"weight": 1}, param_groups=groups)
    callback = ReferenceCallback(trainer, spec)
    args: Any = SimpleNamespace()
    state: Any = SimpleNamespace()
    state.global_step = 3
    callback.on_step_end(args, state, optimizer=optimizer)
    assert optimizer.state
    state.global_step = 4
    callback.on_step_end(args, state, optimizer=optimizer)
    assert bool(optimizer.state) is not resets
    assert groups == [{"lr": 0.1, "step": 0 if resets else 7}, {"lr": 0.2}]


@pytest.mark.parametrize("had_one", [True, False])
def test_a_checkpoint_s_reference_is_frozen_or_removed_again(had_one: bool, events: list[Any]) -> None:
    """Loading a checkpoint loads every adapter in it and makes it trainable."""
    policy = adapted()
    if had_one:
        policy.add_adapter(REF, LoraConfig(**ATTENTION))
    callback = ReferenceCallback(Trainer(policy), ReferenceSpec.parse("initial"))  # type: ignore[arg-type]
    if not had_one:
        policy.add_adapter(REF, LoraConfig(**ATTENTION))
    for tensor in adapter_tensors(policy, REF).values():
        tensor.requires_grad_(True)
    callback.on_train_begin(SimpleNamespace(), SimpleNamespace(global_step=1))  # type: ignore[arg-type]
    assert (REF in policy.peft_config) is had_one
    assert not any(tensor.requires_grad for tensor in adapter_tensors(policy, REF).values())
    assert any(tensor.requires_grad for tensor in adapter_tensors(policy, "default").values())


# ---- dropout


def test_dropout_is_announced_by_one_rank() -> None:
    trainer: Any = SimpleNamespace(
        model=model(attention_dropout=0.1), beta=0.1, accelerator=SimpleNamespace(is_main_process=True)
    )
    with pytest.warns(UserWarning, match="`disable_dropout: true` switches it off"):
        reference._warn_of_dropout(trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.accelerator.is_main_process = False
        reference._warn_of_dropout(trainer)


# ---- the file of a refreshed reference


@pytest.mark.parametrize("saves", [True, False])
def test_only_a_rank_that_saves_writes_the_reference(saves: bool, tmp_path: Path) -> None:
    policy = model()
    unwrap = SimpleNamespace(unwrap_model=lambda wrapped: wrapped)
    trainer: Any = SimpleNamespace(
        model=None, ref_model=policy, accelerator=unwrap, args=SimpleNamespace(should_save=saves)
    )
    reference._store(trainer, tmp_path)
    file = tmp_path / "reference.safetensors"
    assert file.is_file() is saves
    if not saves:
        with pytest.raises(UserError, match=r"has no reference.safetensors, so that run's refreshed reference is lost"):
            reference._restore(trainer, tmp_path)
        return
    stored = load_file(file)
    assert {name: tensor.shape for name, tensor in stored.items()} == {
        name: parameter.shape for name, parameter in policy.named_parameters()
    }
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    reference._restore(trainer, tmp_path)
    assert all(torch.equal(parameter, stored[name]) for name, parameter in policy.named_parameters())
    stored.pop("lm_head.weight")
    save_file(stored, file)
    with pytest.raises(UserError, match=r"reference.safetensors is of another model: resume with the recipe"):
        reference._restore(trainer, tmp_path)


def test_tensors_of_several_names_and_of_any_order_in_memory_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As VeRA's layers share projections. safetensors refuses both."""
    shared, plain = torch.rand(2, 3), torch.rand(2, 3)
    tensors = {"a": shared, "b": shared, "c": torch.rand(3, 2).T, "d": plain}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    monkeypatch.setattr(reference, "_reference_tensors", lambda trainer: tensors)
    trainer: Any = SimpleNamespace(args=SimpleNamespace(should_save=True))
    reference._store(trainer, tmp_path)
    for tensor in tensors.values():
        tensor.zero_()
    reference._restore(trainer, tmp_path)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    del tensors["d"]
    with pytest.raises(UserError, match="is of another model"):
        reference._restore(trainer, tmp_path)


def test_tensors_that_zero3_partitions_are_written_back_where_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[tuple[list[torch.Tensor], bool]] = []

    @contextmanager
    def gather(tensors: Any, *, write: bool = False) -> Any:
        gathered.append((tensors, write))
        yield

    own, other = torch.ones(2), torch.zeros(2)
    monkeypatch.setattr(reference, "gathered", gather)
    monkeypatch.setattr(reference, "_reference_tensors", lambda trainer: {"own": own})
    trainer: Any = SimpleNamespace(args=SimpleNamespace(should_save=True))
    reference._store(trainer, tmp_path)
    reference._restore(trainer, tmp_path)
    reference._blend(other, own, 0.5)
    assert [(len(tensors), write) for tensors, write in gathered] == [(1, False), (1, True), (2, True)]


def test_the_scored_reference_is_the_one_that_trl_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []

    @contextmanager
    def use(policy: Any, adapter_name: Any) -> Any:
        used.append(adapter_name)
        yield

    monkeypatch.setattr(reference, "use_adapter", use)
    policy = adapted()
    accelerator = SimpleNamespace(unwrap_model=lambda wrapped: wrapped)
    args = SimpleNamespace(gradient_checkpointing_kwargs=None)
    trainer: Any = SimpleNamespace(ref_model="own", model=policy, accelerator=accelerator, args=args)
    with reference.reference_in(trainer) as scored:
        assert scored == "own"
    trainer.ref_model = None
    with reference.reference_in(trainer) as scored:
        assert scored is policy
    policy.add_adapter(REF, LoraConfig(**ATTENTION))
    with reference.reference_in(trainer) as scored:
        assert isinstance(scored, PeftModel)
    assert used == [None, REF]
