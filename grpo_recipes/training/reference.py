"""The reference policy: which policy the KL term ties training to.

`set_reference(trainer, source)` serves TRL's own `GRPOTrainer` as well as ours; it is called once the trainer is built:

    with without_trl_reference(args):  # TRL builds no reference of its own
        trainer = GRPOTrainer(model=model, args=args, ...)
    set_reference(trainer, "initial")

| source | a policy with an adapter | full fine-tuning |
|---|---|---|
| `initial` | a frozen copy of the adapter; switched off where it adds nothing yet | a frozen copy of the model |
| `base` | the adapter switched off | refused: there is no adapter to switch off |
| `{adapter: x}` | the adapter in folder or hub repository x, or the loaded one named x | refused |

TRL scores the reference with `trainer.ref_model` if there is one, else with the adapter named "ref" if the model holds
one, else with the adapter switched off (`GRPOTrainer._generate_and_score_completions`, TRL 1.16). This module sets up one
of these three. `sync_ref_model`, `ref_model_sync_steps` and `ref_model_mixup_alpha` refresh the reference, with LoRA
too; delete that part (`_refresh` and its callers) once TRL does it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, PeftType
from peft.utils import AuxiliaryTrainingWrapper
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model, use_adapter

from grpo_recipes.recipe.specs import ReferenceSpec
from grpo_recipes.runs.files import replacing
from grpo_recipes.runs.weights import adapter_config
from grpo_recipes.training.trl_patches import send_policy
from grpo_recipes.training.zero3 import gathered
from grpo_rewards.errors import UserError, one_line

REF = "ref"  # the adapter name that TRL's scoring looks for
WEIGHTS = "reference.safetensors"  # a refreshed reference, in each checkpoint

# Initialisations of LoRA that subtract the adapter from the base's weights: adding a second such adapter subtracts again.
CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

# Parts of the names under which PEFT holds a tensor of the adapter and the base's tensor that it takes the place of.
_ORIGINALS = {"modules_to_save": "original_module", "trainable_tokens_delta": "trainable_tokens_original"}

Tensors = Mapping[str, torch.Tensor]
"""Tensors by name."""


class ReferencePolicyError(UserError):
    """The asked reference can't be had; the message is one sentence with the fix."""


@contextmanager
def without_trl_reference(args: GRPOConfig | None) -> Iterator[None]:
    """Build a trainer inside this block and TRL makes no reference; `set_reference` then makes it from `args`.

    Without it TRL 1.16 reloads a full model from disk, and refuses an adapter that is not named "default", an adapter of
    the user's named "ref", a model that was never on disk, and `sync_ref_model` with an adapter.
    """
    if args is None:
        yield
        return
    beta, sync = args.beta, args.sync_ref_model
    args.beta, args.sync_ref_model = 0.0, False
    try:
        yield
    finally:
        args.beta, args.sync_ref_model = beta, sync


def set_reference(trainer: GRPOTrainer, source: str | Mapping[str, Any] | ReferenceSpec | None = None) -> str:
    """Make `source` the reference policy of `trainer`, before it trains; return a sentence that says what it is.

    `source` is what the recipe key `reference` takes. None means the adapter named "ref" if the user's model came with
    one, else `initial`. Called again, it replaces the reference that it set before.

    Raises `ReferencePolicyError` for a source that this policy can't have, an adapter that would not train, and refresh
    keys that do not fit.
    """
    model, args = trainer.model, trainer.args
    _forget_earlier(trainer)
    if source is None:
        source = {"adapter": REF} if REF in getattr(model, "peft_config", {}) else "initial"
    spec = ReferenceSpec.parse(source)
    spec.check_refresh(args)
    _check_trains(model)
    if isinstance(model, PeftModel):
        _give_head_a_bias(model)
    send_policy(trainer)
    trainer.beta = args.beta
    if args.beta == 0.0:
        sentence = "none: `beta` is 0"
    else:
        _check_backend(trainer)
        if isinstance(model, PeftModel):
            sentence = _adapter_reference(model, spec, keep_copy=args.sync_ref_model)
        else:
            sentence = _model_reference(trainer, spec)
        trainer.add_callback(ReferenceCallback(trainer, spec, made_ref=spec.adapter != REF))
        sentence += _describe_refresh(args)
    if args.disable_dropout:
        _disable_dropout(model)
    return sentence + _describe_dropout(model, args)


@torch.no_grad()
def kl_to_reference(trainer: GRPOTrainer, texts: Sequence[str]) -> float:
    """KL(policy || reference) on `texts`, in nats per token, by the k3 estimator of TRL's loss (Schulman 2020).

    Scored as TRL scores completions: the model's current mode, the trainer's temperature. 0 right after `set_reference`
    with `initial`, dropout off. A collective call under ZeRO-3 and FSDP2: every rank calls it with equal texts.
    """
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    batch = tokenizer(list(texts), return_tensors="pt", padding=True).to(trainer.accelerator.device)
    inputs = (batch["input_ids"], batch["attention_mask"], batch["input_ids"].shape[1] - 1)
    policy = trainer._get_per_token_logps_and_entropies(trainer.model, *inputs)[0]
    with reference_in(trainer) as model:
        reference = trainer._get_per_token_logps_and_entropies(model, *inputs)[0]
    mask = batch["attention_mask"][:, 1:] * batch["attention_mask"][:, :-1]
    difference = (reference - policy).double()
    return float(((difference.exp() - difference - 1) * mask).sum() / mask.sum())


class ReferenceCallback(TrainerCallback):
    """Keeps the reference in place while `trainer` trains: after a resume, at each refresh, in each checkpoint."""

    def __init__(self, trainer: GRPOTrainer, spec: ReferenceSpec, *, made_ref: bool) -> None:
        self.trainer = trainer
        self.spec = spec
        self.made_ref = made_ref
        self.switched_off = isinstance(trainer.model, PeftModel) and REF not in trainer.model.peft_config

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the reference as it was set or, in a resumed run, as its checkpoint holds it."""
        model = self.trainer.model
        if isinstance(model, PeftModel) and REF in model.peft_config:
            if self.switched_off:  # a checkpoint can bring one in: it holds every adapter of the run that wrote it
                model.delete_adapter(REF)
            else:
                _freeze(model)
        if state.global_step and args.sync_ref_model:
            _restore(self.trainer, _checkpoint(args, state))
        elif not state.global_step:
            _warn_of_dropout(self.trainer)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refresh the reference every `ref_model_sync_steps` optimiser steps, at the steps where TRL refreshes it."""
        if not args.sync_ref_model or state.global_step % args.ref_model_sync_steps:
            return
        _refresh(self.trainer, args.ref_model_mixup_alpha)
        if self.spec.reset_optimizer_on_sync:
            _reset(kwargs["optimizer"])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add a refreshed reference to the checkpoint; one that never changes is rebuilt from its source."""
        if args.sync_ref_model:
            _store(self.trainer, Path(args.output_dir) / f"checkpoint-{state.global_step}")


def adapter_tensors(model: PeftModel, adapter: str) -> dict[str, torch.Tensor]:
    """Every parameter and buffer that belongs to `adapter`, under its name with the adapter's taken out.

    PEFT puts an adapter's name into the path of each tensor it owns, as the last part (`lora_embedding_A.default`, IA3,
    VeRA) or before it (`lora_A.default.weight`, `modules_to_save.default.weight`).
    """
    tensors = {}
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in chain(*named):
        before, found, after = f".{name}.".rpartition(f".{adapter}.")
        if found:
            tensors[f"{before}.{after}".strip(".")] = tensor
    return tensors


def _forget_earlier(trainer: GRPOTrainer) -> None:
    """Remove the reference that TRL or an earlier call made, but no adapter of the user's."""
    model = trainer.model
    ours = trainer.pop_callback(ReferenceCallback)
    trainer.remove_callback(SyncRefModelCallback)
    if not isinstance(model, PeftModel) or REF not in model.peft_config:
        return
    if ours is None and trainer.beta:
        # TRL's own copy, because with a `beta` it refuses a model that comes with a "ref".
        _check_base_is_whole(model)
    elif ours is None or not ours.made_ref:
        return  # the user's adapter
    model.delete_adapter(REF)


def _check_trains(model: torch.nn.Module) -> None:
    """Refuse a policy without a trainable parameter: TRL would take those of "ref" for its own and raise no error."""
    if not isinstance(model, PeftModel):
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ReferencePolicyError(
                "no parameter of the model would train: after `merge_and_unload`, call `model.requires_grad_(True)`"
            )
        return
    name = _policy_adapter(model)
    if not any(tensor.requires_grad for tensor in adapter_tensors(model, name).values()):
        raise ReferencePolicyError(
            f"no parameter of the policy's adapter `{name}` would train: load it with "
            "`PeftModel.from_pretrained(model, folder, is_trainable=True)`"
        )


def _give_head_a_bias(model: PeftModel) -> None:
    """Let TRL's fused head read `lm_head.bias`: PEFT's wrapper of a tied head with trainable tokens lacks it."""
    head = model.get_base_model().get_output_embeddings()
    if isinstance(head, AuxiliaryTrainingWrapper) and not hasattr(head, "bias"):
        head.bias = None


def _check_base_is_whole(model: PeftModel) -> None:
    """Refuse a policy whose base TRL has changed by adding a "ref" with an initialisation that subtracts from the base."""
    for config in model.peft_config.values():
        if _changes_the_base(config):
            raise ReferencePolicyError(
                f"`init_lora_weights={config.init_lora_weights!r}`: making its own reference adapter, TRL factored the base's "
                "weights a second time and changed the policy: build the trainer inside "
                "`with grpo_recipes.training.reference.without_trl_reference(args):`"
            )


def _check_backend(trainer: GRPOTrainer) -> None:
    fsdp = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    if fsdp is not None and fsdp.fsdp_version == 1 and trainer.args.sync_ref_model:
        raise ReferencePolicyError(
            "`sync_ref_model` needs FSDP2: set `fsdp_version: 2` in the accelerate configuration"
        )


def _policy_adapter(model: PeftModel) -> str:
    active = model.active_adapters
    if len(active) != 1:
        raise ReferencePolicyError(f"the policy has {len(active)} active adapters ({', '.join(active)}): activate one")
    return active[0]


def _adapter_reference(model: PeftModel, spec: ReferenceSpec, *, keep_copy: bool) -> str:
    policy = _policy_adapter(model)
    _check_policy_adapter(model, policy)
    if spec.adapter != REF and REF in model.peft_config:
        raise ReferencePolicyError(
            f"the model holds an adapter named `{REF}`, TRL's name for the reference: use it with `reference: "
            f"{{adapter: {REF}}}`, or delete it"
        )
    if spec.name == "base":
        return "the base model: the adapter switched off"
    if spec.name == "initial" and not keep_copy and _adds_nothing(model, policy):
        return "the initial policy: the adapter adds nothing yet, so it is switched off"
    sentence = _add_reference(model, policy, spec)
    _match_dtype(model, policy)
    _freeze(model)
    pairing = _paired if keep_copy else _own  # raises now, not at the first refresh, if the adapters do not correspond
    added = pairing(adapter_tensors(model, policy), adapter_tensors(model, REF))
    return f"{sentence} ({_count(target for _, target in added):,} parameters)"


def _check_policy_adapter(model: PeftModel, policy: str) -> None:
    if policy == REF:
        raise ReferencePolicyError(f"the policy's adapter is named `{REF}`, TRL's name for the reference: rename it")
    bias = getattr(model.peft_config[policy], "bias", "none")
    if bias != "none":
        raise ReferencePolicyError(
            f"the adapter trains the base's biases (`bias: {bias}`), which switching it off or copying it leaves trained: "
            "set `bias: none`, or `beta: 0`"
        )
    own = {id(tensor) for tensor in adapter_tensors(model, policy).values()}
    beside = [name for name, tensor in model.named_parameters() if tensor.requires_grad and id(tensor) not in own]
    if beside:
        raise ReferencePolicyError(
            f"{len(beside)} parameters beside the adapter `{policy}` would train ({beside[0]} is the first), which switching "
            "it off or copying it leaves trained: name their modules in the adapter's `modules_to_save`, freeze them, or set "
            "`beta: 0`"
        )


def _add_reference(model: PeftModel, policy: str, spec: ReferenceSpec) -> str:
    """Put the reference that `spec` names into the adapter "ref"; return what it is."""
    if spec.adapter is None:
        _copy_adapter(model, policy)
        return f"the initial policy: a frozen copy of the adapter `{policy}`"
    if spec.adapter not in model.peft_config:
        return f"the adapter in {spec.adapter}, trained on {_load_adapter(model, spec.adapter)}"
    if spec.adapter != REF:
        _copy_adapter(model, spec.adapter)
    return f"the model's adapter `{spec.adapter}`"


def _adds_nothing(model: PeftModel, adapter: str) -> bool:
    """Whether switching `adapter` off changes nothing at all; False where its weights can't tell.

    They can for LoRA (one factor of each product is zero), `modules_to_save` and trainable tokens (equal to the base's).
    Any other adapter is copied, which is right as well.
    """
    if model.peft_config[adapter].peft_type != PeftType.LORA:
        return False
    tensors = adapter_tensors(model, adapter)
    every = {**dict(model.named_parameters()), **tensors}
    return all(_is_neutral(name, tensor, every) for name, tensor in tensors.items())


def _is_neutral(name: str, tensor: torch.Tensor, every: Tensors) -> bool:
    """Whether one tensor of a LoRA adapter leaves the model as it is; `every` holds all parameters by name."""
    parts = name.split(".")
    # LoRA adds B A, and begins with B zero (of an embedding, A): the other factor is then free. The third is a copy.
    if {"lora_A", "lora_embedding_B", "trainable_tokens_original"} & set(parts):
        return True
    if {"lora_B", "lora_embedding_A"} & set(parts):
        with gathered([tensor]):
            return not tensor.any()
    for kept, original in _ORIGINALS.items():
        if kept in parts:
            base = every.get(name.replace(kept, original))
            with gathered([tensor, base]):
                return base is not None and torch.equal(tensor, base)
    return False


def _copy_adapter(model: PeftModel, name: str) -> None:
    """Add "ref", a frozen copy of the adapter `name` down to its last tensor."""
    config = copy.deepcopy(model.peft_config[name])
    config.inference_mode = True
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # the weights are copied in; "pissa" and its like would change the base again
    if hasattr(config, "layer_replication"):
        config.layer_replication = None  # the base's layers are replicated already: PEFT would do it again

    def impossible(reason: str) -> ReferencePolicyError:
        return ReferencePolicyError(
            f"PEFT can't hold a second {config.peft_type.value} adapter like `{name}` ({reason}): use `reference: base` if the "
            "adapter is new, or merge the adapter into the model"
        )

    try:
        model.add_adapter(REF, config)
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise impossible(one_line(error)) from error
    _match_dtype(model, name)  # first: a copy into a narrower type would round
    policy, reference = adapter_tensors(model, name), adapter_tensors(model, REF)
    if policy.keys() != reference.keys():
        raise impossible(f"{min(policy.keys() ^ reference.keys())} is in one of them only")
    for source, target in _paired(policy, reference):
        _blend(source, target, 1.0)


def _load_adapter(model: PeftModel, where: str) -> str | None:
    """Add the adapter in folder or hub repository `where` as "ref"; return the base that it was trained on."""

    def misfit(reason: str) -> ReferencePolicyError:
        return ReferencePolicyError(f"`reference.adapter`: {where} does not fit this policy: {reason}")

    config = adapter_config(where)
    if config is None:
        raise ReferencePolicyError(f"`reference.adapter`: there is no adapter in {where}")
    if _changes_the_base(config):
        raise ReferencePolicyError(
            f"`reference.adapter`: {where} was initialised with {config.init_lora_weights!r}, which changes the base's "
            "weights: convert it to plain LoRA first (`path_initial_model_for_weight_conversion` of PEFT's `save_pretrained`)"
        )
    if getattr(config, "layer_replication", None):
        raise ReferencePolicyError(
            f"`reference.adapter`: {where} has `layer_replication`, and PEFT would replicate the policy's layers with it: use "
            "`reference: initial` or `base`"
        )
    training = model.training
    try:
        result = model.load_adapter(where, REF)
    except (KeyError, OSError, RuntimeError, ValueError) as error:
        raise misfit(one_line(error)) from error
    model.train(training)  # PEFT has put the whole model into eval mode
    if result.missing_keys or result.unexpected_keys:
        key = [*result.missing_keys, *result.unexpected_keys][0]
        raise misfit(f"tensor {key} has no counterpart")
    return config.base_model_name_or_path


def _changes_the_base(config: PeftConfig) -> bool:
    return str(getattr(config, "init_lora_weights", "")).lower().startswith(CHANGES_THE_BASE)


def _match_dtype(model: PeftModel, adapter: str) -> None:
    """Give "ref" the dtypes of `adapter`, so that equal weights give equal log-probabilities."""
    like = adapter_tensors(model, adapter)
    for name, tensor in adapter_tensors(model, REF).items():
        if name in like and not hasattr(tensor, "ds_id"):
            tensor.data = tensor.data.to(like[name].dtype)


def _freeze(model: PeftModel) -> None:
    """Keep "ref" out of the optimiser, and switch its dropout off, so that its scores do not vary."""
    for tensor in adapter_tensors(model, REF).values():
        tensor.requires_grad_(False)
    for name, module in model.named_modules():
        if f".{REF}." in f".{name}.":
            disable_dropout_in_model(module)


def _model_reference(trainer: GRPOTrainer, spec: ReferenceSpec) -> str:
    if spec.name != "initial":
        asked = "base" if spec.adapter is None else f"{{adapter: {spec.adapter}}}"
        raise ReferencePolicyError(
            f"`reference: {asked}` needs a policy with an adapter, and this is full fine-tuning: use `reference: initial`"
        )
    trainer.ref_model = None  # frees the copy that TRL loaded
    reference = _frozen_copy(trainer.model)
    args, accelerator = trainer.args, trainer.accelerator
    add_fused_lm_head(reference, temperature=trainer.temperature, cast_lm_head_to_fp32=args.cast_lm_head_to_fp32)
    if trainer.is_deepspeed_enabled:
        trainer.ref_model = prepare_deepspeed(reference, accelerator)
    elif trainer.is_fsdp_enabled:
        trainer.ref_model = prepare_fsdp(reference, accelerator)
    else:
        trainer.ref_model = accelerator.prepare_model(reference, evaluation_mode=True)
    return f"the initial policy: a frozen copy of the model ({_count(reference.parameters()):,} parameters)"


def _frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` as it is in memory, in eval mode, without gradients; partitioned as `model` is under ZeRO-3."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        config = copy.deepcopy(model.config)
        attention = config._attn_implementation
        with torch.random.fork_rng():  # what is drawn here must not change what the policy samples
            reference = type(model)._from_config(config, dtype=model.dtype, attn_implementation=attention)
        # Built anew, the copy is partitioned as the policy is; a deep copy would hold no more than this rank's part.
        sources, targets = (chain(either.parameters(), either.buffers()) for either in (model, reference))
        for source, target in zip(sources, targets, strict=True):
            _blend(source, target, 1.0)
    else:
        reference = copy.deepcopy(model)
        # TRL replaces these methods by closures over the policy, which a copy would go on calling.
        for module in (reference, reference.get_output_embeddings()):
            module.__dict__.pop("forward", None)
    disable_dropout_in_model(reference)
    return reference.requires_grad_(False).eval()


def _disable_dropout(model: torch.nn.Module) -> None:
    """Finish what `disable_dropout` begins: TRL's pass misses attention dropout, which is an attribute and no module."""
    disable_dropout_in_model(model)
    for module in model.modules():
        if _attention_dropout(module):
            vars(module)["attention_dropout"] = 0.0


def _dropout(model: torch.nn.Module) -> dict[str, float]:
    """The dropout probabilities above 0 in `model`, by the last part of a name that has it."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            found["lora_dropout" if "lora_dropout" in name else name.rpartition(".")[2]] = module.p
        elif probability := _attention_dropout(module):
            found["attention_dropout"] = probability
    return found


def _attention_dropout(module: torch.nn.Module) -> float:
    probability = getattr(module, "attention_dropout", 0.0)
    return probability if isinstance(probability, float) else 0.0


def _warn_of_dropout(trainer: GRPOTrainer) -> None:
    """Warn, with the KL that it causes on the first prompt, if dropout is on: the policy then differs from itself."""
    active = _dropout(trainer.model)
    if not active or not trainer.beta:
        return
    prompt = next(iter(trainer.train_dataset))["prompt"]
    text = prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
    trainer.model.train()
    device = trainer.accelerator.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        kl = kl_to_reference(trainer, [text])
    if trainer.accelerator.is_main_process:
        names = ", ".join(f"{name} {probability:g}" for name, probability in active.items())
        warnings.warn(
            f"dropout is on ({names}): the policy differs from itself, and the KL at step 0 is {kl:.2g} on the first prompt "
            "instead of 0: set `disable_dropout: true`",
            stacklevel=2,
        )


@contextmanager
def reference_in(trainer: GRPOTrainer) -> Iterator[torch.nn.Module]:
    """The model that scores the reference; where policy and reference share one, with the reference's adapter active."""
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    checkpointing = disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs)
    with checkpointing, use_adapter(model, adapter_name=REF if REF in model.peft_config else None):
        yield trainer.model


def _refresh(trainer: GRPOTrainer, alpha: float) -> None:
    """reference <- (1 - alpha) reference + alpha policy, tensor by tensor (TRL's `SyncRefModelCallback`)."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    is_adapter = isinstance(model, PeftModel)
    policy = adapter_tensors(model, _policy_adapter(model)) if is_adapter else dict(model.named_parameters())
    for source, target in _paired(policy, _reference_tensors(trainer)):
        _blend(source, target, alpha)


def _paired(source: Tensors, target: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As `_own`. Raises `ReferencePolicyError` unless both hold the same names and shapes."""
    shapes, others = ({name: _shape(tensor) for name, tensor in group.items()} for group in (source, target))
    if shapes != others:
        raise ReferencePolicyError(
            "the reference has other tensors than the policy, so `sync_ref_model` can't refresh it: use an adapter of "
            "the same configuration, or remove `sync_ref_model`"
        )
    return _own(source, target)


def _own(source: Tensors, target: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(counterpart in `source`, tensor) for each tensor of `target`, once, without those that both share (VeRA's)."""
    shared = {id(tensor) for tensor in source.values()}
    own = {name: tensor for name, tensor in target.items() if id(tensor) not in shared}
    return list({id(tensor): (source.get(name, tensor), tensor) for name, tensor in own.items()}.values())


def _shape(tensor: torch.Tensor) -> torch.Size:
    """The whole shape; ZeRO-3 leaves a partitioned tensor itself empty."""
    return getattr(tensor, "ds_shape", tensor.shape)


@torch.no_grad()
def _blend(source: torch.Tensor, target: torch.Tensor, alpha: float) -> None:
    """target <- (1 - alpha) target + alpha source; an exact copy at alpha 1 and of a tensor that is not floating-point."""
    with gathered([source, target], write=True):
        if alpha == 1.0 or not target.is_floating_point():
            target.copy_(source)
        else:
            target.mul_(1.0 - alpha).add_(source, alpha=alpha)


def _reset(optimizer: torch.optim.Optimizer) -> None:
    """Forget the optimiser's moments and step counts; the learning rate and its schedule go on."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        if "step" in group:  # DeepSpeed's FusedAdam counts here
            group["step"] = 0


def _reference_tensors(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(model, PeftModel):
        return adapter_tensors(model, REF)
    return dict(trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters())


def _store(trainer: GRPOTrainer, checkpoint: Path) -> None:
    """Write the whole reference into `checkpoint` from rank 0; a collective call where it is partitioned."""
    whole = {}
    for name, tensor in _reference_tensors(trainer).items():
        with gathered([tensor]):
            value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if trainer.args.should_save:
                whole[name] = value.detach().to("cpu", copy=True).contiguous()
    if trainer.args.should_save:
        with replacing(checkpoint / WEIGHTS) as part:
            save_file(whole, part)


@torch.no_grad()
def _restore(trainer: GRPOTrainer, checkpoint: Path) -> None:
    """Read the reference that `_store` wrote."""
    if not (checkpoint / WEIGHTS).is_file():
        raise ReferencePolicyError(
            f"{checkpoint} has no {WEIGHTS}, so that run's refreshed reference is lost: resume from an earlier checkpoint, or "
            "name this one in the arguments' `resume_from_checkpoint` if it lies elsewhere"
        )
    stored = load_file(checkpoint / WEIGHTS)
    tensors = _reference_tensors(trainer)
    if stored.keys() != tensors.keys():
        raise ReferencePolicyError(f"{checkpoint / WEIGHTS} is of another model: resume with the recipe that wrote it")
    for name, tensor in tensors.items():
        value = stored[name].to(tensor.device)
        with gathered([tensor], write=True):
            if isinstance(tensor, DTensor):
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
            tensor.copy_(value)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """The checkpoint that a resumed run started from, which transformers does not tell its callbacks."""
    name = f"checkpoint-{state.global_step}"
    asked = Path(str(args.resume_from_checkpoint))
    return asked if asked.name == name else Path(args.output_dir) / name


def _describe_refresh(args: GRPOConfig) -> str:
    if not args.sync_ref_model:
        return ""
    alpha = args.ref_model_mixup_alpha
    how = "replaced by the policy" if alpha == 1 else f"moved {alpha:g} of the way to the policy"
    return f"; {how} every {args.ref_model_sync_steps} optimiser steps"


def _describe_dropout(model: torch.nn.Module, args: GRPOConfig) -> str:
    """Say once that an adapter's dropout is off as well: TRL's command line sets `lora_dropout` to 0.05 by default."""
    configs = getattr(model, "peft_config", {}).values()
    asked = max((getattr(config, "lora_dropout", 0.0) for config in configs), default=0.0)
    covers = args.disable_dropout and asked
    return f"; `disable_dropout` covers the adapter's `lora_dropout` of {asked:g}" if covers else ""


def _count(tensors: Iterable[torch.Tensor]) -> int:
    return sum(_shape(tensor).numel() for tensor in tensors)
