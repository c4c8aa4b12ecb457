"""The reference policy: the policy that the KL term ties training to.

`set_reference(trainer, source)` serves TRL's own `GRPOTrainer` as well as ours. Call it once the trainer is built:

    with without_trl_reference(args):  # TRL builds no reference of its own
        trainer = GRPOTrainer(model=model, args=args, ...)
    set_reference(trainer, "initial")

| source | policy with an adapter | full fine-tuning |
|---|---|---|
| `initial` | a frozen copy of the adapter, or the adapter off if it adds nothing yet | a frozen copy of the model |
| `base` | the adapter switched off | refused: there is no adapter to switch off |
| `{adapter: x}` | the adapter in folder or hub repository x, or the loaded one named x | refused |

TRL 1.16 scores the reference with `trainer.ref_model` if there is one, else with the adapter named "ref" if the model
holds one, else with the adapter switched off (`GRPOTrainer._generate_and_score_completions`). This module sets up one
of these three. `sync_ref_model`, `ref_model_sync_steps` and `ref_model_mixup_alpha` refresh the reference, with LoRA
too. Delete that part (`_refresh` and its callers) once TRL refreshes adapters.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, PeftType
from peft.utils import AuxiliaryTrainingWrapper
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model, use_adapter

from grpo_recipes.generation.models import base_model, describe_dropout, dropout_rates, run_folder
from grpo_recipes.recipe.specs import ReferenceSpec
from grpo_recipes.runs.files import replacing
from grpo_recipes.runs.weights import adapter_config, adapter_kind
from grpo_recipes.training.adapters import adapter_tensors, gathered
from grpo_recipes.training.trl_patches import send_policy
from grpo_rewards.errors import UserError, one_line

if TYPE_CHECKING:
    from grpo_recipes.generation.models import TRLTrainer

REF = "ref"
"""Adapter name that TRL scores the reference with."""

WEIGHTS = "reference.safetensors"
"""File of a refreshed reference, in each checkpoint."""

# LoRA initializations that subtract the adapter from the base's weights. A second adapter would subtract again.
CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

# Part of the name of an adapter's tensor, and that part in the name of the base's tensor that it replaces.
_ORIGINALS = {"modules_to_save": "original_module", "trainable_tokens_delta": "trainable_tokens_original"}

Tensors = Mapping[str, torch.Tensor]
"""Tensors by name."""


@contextmanager
def without_trl_reference(args: GRPOConfig | None) -> Iterator[None]:
    """Keep TRL from making a reference for a trainer that is built inside the block. `set_reference` makes it later.

    TRL 1.16 reloads a full model from disk. It raises for an adapter that is not named "default", an adapter of the
    user's named "ref", a model that was never on disk, and `sync_ref_model` with an adapter.
    """
    if args is None:
        yield
        return
    # With `beta: 0` TRL makes no reference. It has no option that keeps `beta` and leaves out the reference alone.
    beta, sync = args.beta, args.sync_ref_model
    args.beta, args.sync_ref_model = 0.0, False
    try:
        yield
    finally:
        args.beta, args.sync_ref_model = beta, sync


def set_reference(trainer: GRPOTrainer, source: str | Mapping[str, Any] | ReferenceSpec | None = None) -> str:
    """Make `source` the reference policy of `trainer`, before it trains. A second call replaces the reference.

    Args:
        trainer: trainer of TRL or ours.
        source: value of the recipe key `reference`. None means the adapter named "ref" if the user's model came with
            one, else `initial`.

    Returns:
        A sentence that describes the reference.

    Raises:
        UserError: the policy cannot have this reference, an adapter would not train, or the refresh keys do not fit.
    """
    trainer = cast("TRLTrainer", trainer)
    model, args = trainer.model, trainer.args
    _forget_earlier(trainer)
    if source is None:
        source = {"adapter": REF} if REF in getattr(model, "peft_config", {}) else "initial"
    spec = ReferenceSpec.parse(source)
    spec.check_refresh(args)
    _check_trains(model)
    head = base_model(model).get_output_embeddings() if isinstance(model, PeftModel) else None
    if isinstance(head, AuxiliaryTrainingWrapper) and not hasattr(head, "bias"):
        # TRL's fused head reads the bias, which PEFT's wrapper of a tied head with trainable tokens lacks.
        head.bias = None  # type: ignore[assignment]  # torch declares no None among the attributes of a module
    # TRL sends a policy with an adapter to a vLLM server wrongly, with any reference or none: see `trl_patches`.
    send_policy(trainer)
    trainer.beta = args.beta  # 0 since the trainer was built inside `without_trl_reference`
    if args.beta == 0.0:
        sentence = "none: `beta` is 0"
    else:
        fsdp = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
        if fsdp is not None and fsdp.fsdp_version == 1 and args.sync_ref_model:
            # FSDP1 flattens parameters into one, so policy and reference cannot be paired tensor by tensor.
            fix = "set `fsdp_version: 2` in the accelerate configuration"
            raise UserError("`sync_ref_model`", "it needs FSDP2", fix)
        if isinstance(model, PeftModel):
            sentence = _adapter_reference(model, spec, keep_copy=args.sync_ref_model)
        else:
            sentence = _model_reference(trainer, spec)
        trainer.add_callback(ReferenceCallback(trainer, spec))
        if args.sync_ref_model:
            alpha = args.ref_model_mixup_alpha
            how = "replaced by the policy" if alpha == 1 else f"moved {alpha:g} of the way to the policy"
            sentence += f"; {how} every {args.ref_model_sync_steps} optimizer steps"
    if args.disable_dropout:
        # TRL's own `disable_dropout` misses a rate that is an attribute of another layer, as of attention.
        for _, module, name in list(dropout_rates(model)):
            setattr(module, name, 0.0)
    return sentence


@torch.no_grad()
def kl_to_reference(trainer: GRPOTrainer, texts: Sequence[str]) -> float:
    """Return KL(policy || reference) on `texts`, in nats per token, by the k3 estimator of TRL's loss (Schulman 2020).

    The policy is scored as TRL scores completions: in the model's current mode, at the trainer's temperature. The
    result is 0 right after `set_reference` with `initial` and without dropout. Under ZeRO-3 and FSDP2 this is a
    collective call: every rank calls it with equal texts.
    """
    trainer = cast("TRLTrainer", trainer)
    tokenizer: PreTrainedTokenizerBase = trainer._tokenizer
    batch = tokenizer(list(texts), return_tensors="pt", padding=True).to(trainer.accelerator.device)
    inputs = (batch["input_ids"], batch["attention_mask"], batch["input_ids"].shape[1] - 1)
    policy = trainer._get_per_token_logps_and_entropies(trainer.model, *inputs)[0]
    with reference_in(trainer) as model:
        reference = trainer._get_per_token_logps_and_entropies(model, *inputs)[0]
    mask = batch["attention_mask"][:, 1:] * batch["attention_mask"][:, :-1]
    # In float32, exp(d) - d - 1 loses every digit for |d| below 1e-4, and shows a distance where there is none.
    difference = (reference - policy).double()
    return float(((difference.exp() - difference - 1) * mask).sum() / mask.sum())


@contextmanager
def reference_in(trainer: TRLTrainer) -> Iterator[torch.nn.Module]:
    """Yield the model that scores the reference. A model shared with the policy has the reference's adapter active."""
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    # TRL's annotation leaves out models with an adapter.
    policy, kwargs = cast(PreTrainedModel, trainer.model), trainer.args.gradient_checkpointing_kwargs
    checkpointing = disable_gradient_checkpointing(policy, kwargs)
    with checkpointing, use_adapter(model, adapter_name=REF if REF in model.peft_config else None):
        yield trainer.model


class ReferenceCallback(TrainerCallback):
    """Callback that keeps the reference in place: after a resume, at each refresh, and in each checkpoint."""

    def __init__(self, trainer: TRLTrainer, spec: ReferenceSpec) -> None:
        self.trainer = trainer
        self.spec = spec
        self.is_switched_off = isinstance(trainer.model, PeftModel) and REF not in trainer.model.peft_config

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Restore the reference as it was set or, in a resumed run, as the checkpoint holds it."""
        model = self.trainer.model
        if isinstance(model, PeftModel) and REF in model.peft_config:
            if self.is_switched_off:
                # transformers loads every adapter of a checkpoint, also the reference of the run that wrote it.
                model.delete_adapter(REF)
            else:
                _freeze(model)  # loading makes it trainable
        if state.global_step and self.trainer.args.sync_ref_model:
            # A callback gets only the step. `resume_from_checkpoint` may also be True or None, or name another run's
            # folder that was copied here.
            name, given = f"checkpoint-{state.global_step}", Path(str(args.resume_from_checkpoint))
            _restore(self.trainer, given if given.name == name else run_folder(args) / name)
        elif not state.global_step and self.trainer.beta and self.trainer.accelerator.is_main_process:
            clause = describe_dropout(self.trainer.model)  # with dropout, two passes of one policy differ
            if clause:
                warnings.warn(f"{clause}: with it the KL at step 0 is not 0", stacklevel=1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Refresh the reference every `ref_model_sync_steps` optimizer steps, as TRL does for a full model."""
        if not self.trainer.args.sync_ref_model or state.global_step % self.trainer.args.ref_model_sync_steps:
            return
        _refresh(self.trainer, self.trainer.args.ref_model_mixup_alpha)
        if self.spec.reset_optimizer_on_sync:
            optimizer = kwargs["optimizer"]
            # Only the state: a new optimizer would also restart the learning-rate schedule.
            optimizer.state.clear()
            for group in optimizer.param_groups:
                if "step" in group:  # DeepSpeed's FusedAdam counts here
                    group["step"] = 0

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Add a refreshed reference to the checkpoint. A reference that never changes is rebuilt from its source."""
        if self.trainer.args.sync_ref_model:
            _store(self.trainer, run_folder(args) / f"checkpoint-{state.global_step}")


def _forget_earlier(trainer: TRLTrainer) -> None:
    """Remove the reference that TRL or an earlier call made, but no adapter of the user's."""
    model = trainer.model
    earlier = trainer.pop_callback(ReferenceCallback)
    trainer.remove_callback(SyncRefModelCallback)
    if not isinstance(model, PeftModel) or REF not in model.peft_config:
        return
    if isinstance(earlier, ReferenceCallback):
        if earlier.spec.adapter != REF:
            model.delete_adapter(REF)
    elif trainer.beta:
        # With a `beta`, TRL raises for a model that comes with a "ref", so this one is TRL's own copy.
        for config in model.peft_config.values():
            if _changes_the_base(config):
                raise UserError(
                    f"`init_lora_weights={config.init_lora_weights!r}`",
                    "making its reference adapter, TRL factored the base a second time and changed the policy",
                    "build the trainer inside `with grpo_recipes.training.reference.without_trl_reference(args):`",
                )
        model.delete_adapter(REF)


def _check_trains(model: torch.nn.Module) -> None:
    """Raise if no parameter of the policy is trainable. TRL would train "ref" instead, without an error."""
    tensors: Iterable[torch.Tensor] = model.parameters()
    owner = "the policy"
    if isinstance(model, PeftModel):
        name = _policy_adapter(model)
        tensors, owner = adapter_tensors(model, name).values(), f"the policy's adapter `{name}`"
    if not any(tensor.requires_grad for tensor in tensors):
        fix = "load an adapter with `PeftModel.from_pretrained(model, folder, is_trainable=True)`, and call "
        fix += "`model.requires_grad_(True)` after `merge_and_unload`"
        raise UserError(owner, "no parameter of it would train", fix)


def _policy_adapter(model: PeftModel) -> str:
    active = model.active_adapters
    if len(active) != 1:
        raise UserError("the policy", f"it has {len(active)} active adapters ({', '.join(active)})", "activate one")
    return active[0]


def _adapter_reference(model: PeftModel, spec: ReferenceSpec, *, keep_copy: bool) -> str:
    """Set up the reference of a policy with an adapter, and return its description.

    Args:
        model: policy.
        spec: reference.
        keep_copy: True if the reference must have tensors of its own, because it will be refreshed.
    """
    policy = _policy_adapter(model)
    _check_policy_adapter(model, policy)
    if spec.adapter != REF and REF in model.peft_config:
        problem = f"it has an adapter named `{REF}`, TRL's name for the reference"
        raise UserError("the policy", problem, f"use it with `reference: {{adapter: {REF}}}`, or delete it")
    if spec.name == "base":
        return "the base model: the adapter switched off"
    # Switching off a new LoRA gives the initial policy without the memory of a copy.
    if spec.name == "initial" and not keep_copy and _adds_nothing(model, policy):
        return "the initial policy: the adapter adds nothing yet, so it is switched off"
    if spec.adapter is None:
        _copy_adapter(model, policy)
        sentence = f"the initial policy: a frozen copy of the adapter `{policy}`"
    elif spec.adapter in model.peft_config:
        if spec.adapter != REF:
            _copy_adapter(model, spec.adapter)
        sentence = f"the model's adapter `{spec.adapter}`"
    else:
        sentence = f"the adapter in {spec.adapter}, trained on {_load_reference(model, spec.adapter)}"
    _match_dtype(model, policy)
    _freeze(model)
    source, target = adapter_tensors(model, policy), adapter_tensors(model, REF)
    # Raised now, and not at the first refresh, which may be hours away.
    pairs = _paired(source, target) if keep_copy else _own(source, target)
    return f"{sentence} ({_count(tensor for _, tensor in pairs):,} parameters)"


def _check_policy_adapter(model: PeftModel, policy: str) -> None:
    """Raise if switching off or copying the policy's adapter would not restore the initial policy."""
    if policy == REF:
        raise UserError("the policy's adapter", f"it is named `{REF}`, TRL's name for the reference", "rename it")
    # Such parameters would move the reference together with the policy, and the KL would stay small for no reason.
    own = {id(tensor) for tensor in adapter_tensors(model, policy).values()}
    beside = [name for name, tensor in model.named_parameters() if tensor.requires_grad and id(tensor) not in own]
    if beside:
        place = f"{len(beside)} parameters beside the adapter `{policy}` ({beside[0]} is the first)"
        problem = "they would train, and switching the adapter off or copying it leaves them trained"
        fix = "set `bias: none`, name their modules in `modules_to_save`, freeze them, or set `beta: 0`"
        raise UserError(place, problem, fix)


def _adds_nothing(model: PeftModel, adapter: str) -> bool:
    """Return True if disabling `adapter` provably leaves the output unchanged, and False if its weights cannot show it.

    The weights of a LoRA can: one factor of each product is zero, and `modules_to_save` and trainable tokens equal the
    base's. Any other adapter is copied, which is correct as well and costs memory.
    """
    if model.peft_config[adapter].peft_type != PeftType.LORA:
        return False
    tensors = adapter_tensors(model, adapter)
    every = {**dict(model.named_parameters()), **tensors}
    return all(_is_neutral(name, tensor, every) for name, tensor in tensors.items())


def _is_neutral(name: str, tensor: torch.Tensor, every: Tensors) -> bool:
    """Return True if one tensor of a LoRA adapter leaves the model as it is. `every` holds all parameters by name."""
    parts = set(name.split("."))
    # LoRA adds B A. One factor is initialized to zero (B, or A of an embedding) and decides, the other one may be
    # anything.
    if parts & {"lora_B", "lora_embedding_A"}:
        with gathered([tensor]):
            return not tensor.any()
    if parts & {"lora_A", "lora_embedding_B", "trainable_tokens_original"}:
        return True
    for replacing_part, original in _ORIGINALS.items():
        if replacing_part in parts:
            base = every.get(name.replace(replacing_part, original))
            with gathered([tensor, base]):
                return base is not None and torch.equal(tensor, base)
    return False


def _copy_adapter(model: PeftModel, name: str) -> None:
    """Add "ref", a copy of every tensor of the adapter `name`."""
    config = copy.deepcopy(model.peft_config[name])
    config.inference_mode = True
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # "pissa" and others would change the base again; the weights are copied below
    if hasattr(config, "layer_replication"):
        config.layer_replication = None  # the base's layers are replicated already, and PEFT would replicate them again
    mismatch = ""
    try:
        model.add_adapter(REF, config)
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        mismatch = one_line(error)
    else:
        _match_dtype(model, name)  # before the copy, which would round to a narrower dtype
        source, target = adapter_tensors(model, name), adapter_tensors(model, REF)
        if source.keys() != target.keys():
            mismatch = f"{min(source.keys() ^ target.keys())} is in one of them only"
    if mismatch:
        problem = f"PEFT can't hold a second {adapter_kind(config)} adapter like it ({mismatch})"
        fix = "use `reference: base` if the adapter is new, or merge the adapter into the model"
        raise UserError(f"the adapter `{name}`", problem, fix)
    for original, duplicate in _paired(source, target):
        _blend(original, duplicate, 1.0)


def _load_reference(model: PeftModel, where: str) -> str | None:
    """Add the adapter in folder or hub repository `where` as "ref", and return the base that it was trained on."""
    config = adapter_config(where)
    if config is None:
        raise UserError(f"`reference.adapter`: {where}", "there is no adapter in it", "name an adapter's folder")
    replicated = getattr(config, "layer_replication", None)
    for key, changes in (("init_lora_weights", _changes_the_base(config)), ("layer_replication", replicated)):
        if changes:
            problem = f"`{key}: {getattr(config, key)}` changes the base, and PEFT would change the policy's with it"
            fix = "use `reference: initial`, or convert it to plain LoRA (`path_initial_model_for_weight_conversion` "
            raise UserError(f"`reference.adapter`: {where}", problem, f"{fix}of PEFT's `save_pretrained`)")
    training = model.training
    mismatch = ""
    try:
        result = model.load_adapter(where, REF)
        # A tensor without a counterpart is only listed by PEFT, and the reference would keep random numbers in its
        # place.
        for key in (*result.missing_keys, *result.unexpected_keys):
            mismatch = mismatch or f"tensor {key} has no counterpart"
    except (KeyError, OSError, RuntimeError, ValueError) as error:
        mismatch = one_line(error)
    model.train(training)  # PEFT has put the model into eval mode
    if mismatch:
        problem, fix = f"it does not fit this policy ({mismatch})", "name an adapter of the policy's base model"
        raise UserError(f"`reference.adapter`: {where}", problem, fix)
    return config.base_model_name_or_path


def _changes_the_base(config: PeftConfig) -> TypeGuard[LoraConfig]:
    """Return True for a LoRA whose initialization has changed the weights of the base."""
    return str(getattr(config, "init_lora_weights", "")).lower().startswith(CHANGES_THE_BASE)


def _match_dtype(model: PeftModel, adapter: str) -> None:
    """Give "ref" the dtypes of `adapter`, so that equal weights give equal log-probabilities."""
    like = adapter_tensors(model, adapter)
    for name, tensor in adapter_tensors(model, REF).items():
        # ZeRO-3 has one dtype for all parameters, and `tensor.data` is only a placeholder where it has partitioned one.
        if name in like and not hasattr(tensor, "ds_id"):
            tensor.data = tensor.data.to(like[name].dtype)


def _freeze(model: PeftModel) -> None:
    """Make "ref" untrainable, which keeps it out of the optimizer, and switch off its dropout."""
    for tensor in adapter_tensors(model, REF).values():
        tensor.requires_grad_(False)
    for name, module in model.named_modules():
        if f".{REF}." in f".{name}.":
            disable_dropout_in_model(module)


def _model_reference(trainer: TRLTrainer, spec: ReferenceSpec) -> str:
    """Set up the reference of full fine-tuning, and return its description."""
    if spec.name != "initial":
        value = "base" if spec.adapter is None else f"{{adapter: {spec.adapter}}}"
        problem = "it needs a policy with an adapter, and this is full fine-tuning"
        raise UserError(f"`reference: {value}`", problem, "use `reference: initial`")
    assert not isinstance(trainer.model, PeftModel)
    trainer.ref_model = None  # frees the copy that TRL loaded, before there is a second one
    reference = _frozen_copy(trainer.model)
    args, accelerator = trainer.args, trainer.accelerator
    add_fused_lm_head(reference, temperature=trainer.temperature, cast_lm_head_to_fp32=args.cast_lm_head_to_fp32)
    if trainer.is_deepspeed_enabled:
        trainer.ref_model = prepare_deepspeed(reference, accelerator)
    elif trainer.is_fsdp_enabled:
        trainer.ref_model = cast(PreTrainedModel, prepare_fsdp(reference, accelerator))  # or FSDP1's wrapper of it
    else:
        trainer.ref_model = accelerator.prepare_model(reference, evaluation_mode=True)
    return f"the initial policy: a frozen copy of the model ({_count(reference.parameters()):,} parameters)"


def _frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `model` as it is in memory, in eval mode, without gradients, and partitioned as `model` is."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        # A deep copy would hold only this rank's part. A newly built model is partitioned by ZeRO-3 as the
        # policy is.
        config = copy.deepcopy(model.config)
        attention = config._attn_implementation
        with torch.random.fork_rng():  # random initial weights must not change what the policy samples
            reference = type(model)._from_config(config, dtype=model.dtype, attn_implementation=attention)
        sources, targets = (chain(either.parameters(), either.buffers()) for either in (model, reference))
        for source, target in zip(sources, targets, strict=True):
            _blend(source, target, 1.0)
    else:
        reference = copy.deepcopy(model)
        # Copied from memory: TRL reloads the files, which a merged model or a model made in memory does not match.
        # TRL replaces these methods by closures over the policy, and a copy would go on calling the policy.
        for module in (reference, reference.get_output_embeddings()):
            module.__dict__.pop("forward", None)
    disable_dropout_in_model(reference)
    return reference.requires_grad_(False).eval()


def _refresh(trainer: TRLTrainer, alpha: float) -> None:
    """Set reference <- (1 - alpha) reference + alpha policy, tensor by tensor, as TRL's `SyncRefModelCallback` does."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    policy = dict(model.named_parameters())
    if isinstance(model, PeftModel):
        policy = adapter_tensors(model, _policy_adapter(model))
    for source, target in _paired(policy, _reference_tensors(trainer)):
        _blend(source, target, alpha)


def _paired(source: Tensors, target: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the pairs of `_own`, or raise if the two groups differ in names or shapes."""
    shapes, others = ({name: _shape(tensor) for name, tensor in group.items()} for group in (source, target))
    if shapes != others:
        fix = "use an adapter of the same configuration, or remove `sync_ref_model`"
        raise UserError("`sync_ref_model`", "the reference has other tensors than the policy", fix)
    return _own(source, target)


def _own(source: Tensors, target: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (counterpart in `source`, tensor) for each tensor that `target` holds and `source` does not.

    Adapters of one model can share tensors, as VeRA's share their projections. One tensor can have several names in
    `target`, and is returned once.
    """
    shared = {id(tensor) for tensor in source.values()}  # by identity: `==` of tensors compares values
    pairs = {}
    for name, tensor in target.items():
        if id(tensor) not in shared:
            pairs[id(tensor)] = (source.get(name, tensor), tensor)
    return list(pairs.values())


def _shape(tensor: torch.Tensor) -> torch.Size:
    """Return the shape before partitioning. ZeRO-3 leaves a partitioned tensor itself empty."""
    return getattr(tensor, "ds_shape", tensor.shape)


def _count(tensors: Iterable[torch.Tensor]) -> int:
    return sum(_shape(tensor).numel() for tensor in tensors)


@torch.no_grad()
def _blend(source: torch.Tensor, target: torch.Tensor, alpha: float) -> None:
    """Set target <- (1 - alpha) target + alpha source. Copy at alpha 1 and for a tensor that is not floating-point."""
    with gathered([source, target], write=True):
        if alpha == 1.0 or not target.is_floating_point():
            target.copy_(source)  # exact: 0 * target is NaN where the target is infinite
        else:
            target.mul_(1.0 - alpha).add_(source, alpha=alpha)


def _reference_tensors(trainer: TRLTrainer) -> dict[str, torch.Tensor]:
    # Unwrapped, because the wrappers of DDP and DeepSpeed put a prefix before every name.
    model = trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(model, PeftModel):
        return adapter_tensors(model, REF)
    return dict(trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters())


def _store(trainer: TRLTrainer, checkpoint: Path) -> None:
    """Write the full reference into `checkpoint` from rank 0. A collective call where tensors are partitioned."""
    tensors = {}
    for name, tensor in _reference_tensors(trainer).items():
        with gathered([tensor]):
            value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if trainer.args.should_save:
                # A copy: tensors that layers share, such as VeRA's, can't be saved as they are by safetensors.
                tensors[name] = value.detach().to("cpu", copy=True).contiguous()
    if trainer.args.should_save:
        with replacing(checkpoint / WEIGHTS) as part:
            save_file(tensors, part)


@torch.no_grad()
def _restore(trainer: TRLTrainer, checkpoint: Path) -> None:
    """Read the reference that `_store` wrote."""
    if not (checkpoint / WEIGHTS).is_file():
        fix = "resume from an earlier one, or name this one in the arguments' `resume_from_checkpoint` if it lies "
        raise UserError(checkpoint, f"it has no {WEIGHTS}, and the refreshed reference is lost", f"{fix}elsewhere")
    stored = load_file(checkpoint / WEIGHTS)
    tensors = _reference_tensors(trainer)
    # Names are compared because a partial copy would raise no error, and leave some tensors of the initial policy.
    if stored.keys() != tensors.keys():
        raise UserError(checkpoint / WEIGHTS, "it is of another model", "resume with the recipe that wrote it")
    for name, tensor in tensors.items():
        value = stored[name].to(tensor.device)
        with gathered([tensor], write=True):
            if isinstance(tensor, DTensor):
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
            tensor.copy_(value)
