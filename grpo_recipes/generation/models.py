"""Properties of a model that decide how it may be run, and the contexts that it is compared in."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationMixin, PreTrainedModel, TrainingArguments

from grpo_recipes.process.ranks import gather
from grpo_rewards.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase, ProcessorMixin
    from trl import GRPOConfig, GRPOTrainer

    class CausalLM(PreTrainedModel, GenerationMixin):
        """Any model of transformers with a language-model head, with the members that `GenerationMixin` expects."""

        device: torch.device
        dtype: torch.dtype
        hf_device_map: dict[str, Any]

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Run the model."""

    class FilledConfig(GRPOConfig):
        """Configuration after its `__post_init__`, which parses JSON and fills these fields."""

        output_dir: str
        steps_per_generation: int
        generation_kwargs: dict[str, Any] | None
        gradient_checkpointing_kwargs: dict[str, Any] | None

    class TRLTrainer(GRPOTrainer):
        """TRL's trainer with the types that its attributes really have. transformers and TRL declare wider ones."""

        args: FilledConfig
        model: PreTrainedModel | PeftModel
        processing_class: PreTrainedTokenizerBase | ProcessorMixin
        train_dataset: Iterable[dict[str, Any]]
        max_completion_length: int
        num_generations: int
        num_generations_eval: int
        _buffered_inputs: list[dict[str, Any]]  # type: ignore[assignment]  # TRL declares only the None at the start


MIXES_TOKENS = {"LILY", "SHADOW"}
"""PEFT types of adapters whose effect on a token depends on the rest of the batch (Lily) or on a cache of their own
(Shadow)."""

CACHES = ("cache_params", "cache", "past_key_values")
"""Names under which models take their cache: the Mamba family, all models since transformers 5.24, others before."""

DTYPES_16BIT = (torch.bfloat16, torch.float16)


def cache_argument(module: nn.Module) -> str:
    """Return the name under which the `forward` of a model takes its cache."""
    takes = inspect.signature(module.forward).parameters
    return next((name for name in CACHES if name in takes), CACHES[-1])


def base_model(model: nn.Module) -> CausalLM:
    """Return the transformers model inside a PEFT model."""
    # The class is asked, because wrappers of distributed training pass on attributes of the model inside them. Only
    # models of PEFT have this method, and no module that generates or attends should need the package.
    if hasattr(type(model), "get_base_model"):
        model = cast("PeftModel", model).get_base_model()
    # PEFT declares `nn.Module`, and TRL trains nothing but models of transformers.
    return cast("CausalLM", model)


def lists_of_layers(backbone: nn.Module, length: int | None) -> list[tuple[nn.Module, str]]:
    """Return the module and the name of each list of `length` modules in a backbone."""
    found = []
    for module in backbone.modules():
        for name, child in module._modules.items():
            if isinstance(child, nn.ModuleList) and len(child) == length:
                found.append((module, name))
    return found


def is_float32(model: nn.Module) -> bool:
    """Return True if a model's weights are float32 or float64."""
    # The first parameter is one of the base: an adapter may be float32 on a 16-bit base.
    return next(model.parameters()).dtype in (torch.float32, torch.float64)


def computes_in_float32(model: nn.Module, device: torch.device) -> bool:
    """Return True if a model has float32 weights, and no products in TF32, which has the mantissa of float16."""
    if not is_float32(model):
        return False
    if device.type == "cpu":
        return True
    # transformers' `tf32` sets `fp32_precision`. From then on torch's older getter raises.
    if not _float32_settings():
        return torch.get_float32_matmul_precision() == "highest"
    backends: Any = torch.backends
    used = [backends.cuda.matmul]
    if any(isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for module in model.modules()):
        used.append(backends.cudnn.conv)
    return all(setting.fp32_precision in ("none", "ieee") for setting in used)


def tensors_16bit(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers that are bfloat16 or float16."""
    return [tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.dtype in DTYPES_16BIT]


def rotary_of_the_longest(config: Any) -> str | None:
    """Return the type of a rotary table that transformers chooses by the largest position of each forward, or None.

    TRL pads every pass over a generation batch to one width, so all passes get the same table. Shorter rows would get
    another one.
    """
    for table in _rotary_tables(config):
        kind = table.get("rope_type") or "default"
        if "dynamic" in kind or kind == "longrope":
            return kind
    return None


def scaled_by_position(config: Any) -> str | None:
    """Return the setting by which a model scales attention by a token's position, padding included, or None.

    Transformers has one name for it per family: Ministral 3 and Mistral 4, Llama 4, Inkling, and Beam, whose layers
    without a rotary table always do.
    """
    if any(table.get("llama_4_scaling_beta") for table in _rotary_tables(config)):
        return "llama_4_scaling_beta"
    if getattr(config, "model_type", None) == "beam" and None in _rotary_tables(config)[0].values():
        return "scalable softmax"
    for name in ("attn_temperature_tuning", "log_scaling_n_floor"):
        if getattr(config, name, None):
            return name
    return None


def kept_scores(config: Any) -> tuple[str, float]:
    """Return the setting of how many scores each token's attention keeps, and its value, infinity without one.

    In longer rows, padding decides between equal scores. Shorter ones keep all of them.
    """
    for name in ("index_topk", "keep_window_size"):
        number = getattr(config, name, None)
        if number:
            return name, number
    return "", math.inf


def _rotary_tables(config: Any) -> list[Mapping[str, Any]]:
    """Return the parameters of a model's rotary tables: one mapping, or one per layer type inside of it."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]


def dropout_rates(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (path, module, attribute) of each dropout rate above 0: of an `nn.Dropout`, or a number of another layer.

    Transformers' attention layers call the rate `attention_dropout` or, as OPT's, `dropout`.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            # By name: families spell the rate in many ways, and one that is missed makes two forwards differ without
            # error.
            if isinstance(value, float) and value > 0 and "drop" in f"{type(module).__name__}.{name}".lower():
                yield path, module, name


def has_dropout(model: nn.Module) -> bool:
    """Return True if a module drops activations in training."""
    return next(dropout_rates(model), None) is not None


def describe_dropout(model: nn.Module) -> str:
    """Return a clause with the setting that switches a model's dropout off, or "" if the model has none."""
    paths = [path for path, _, _ in dropout_rates(model)]
    if not paths:
        return ""
    is_adapters = all("lora_dropout" in path for path in paths)
    fix = "lora_dropout: 0" if is_adapters else "disable_dropout: true"
    return f"the model has dropout (`{fix}` switches it off)"


def unfit_adapter(policy: nn.Module) -> str:
    """Return why rows with a policy's adapter cannot share a prompt, or "" if they may."""
    adapter = getattr(policy, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        return "the adapter puts virtual tokens before the prompt"
    if getattr(adapter, "alora_invocation_tokens", None):
        return "the adapter acts from its invocation tokens to the end of a row (aLoRA)"
    return ""


def unfit(policy: nn.Module) -> str:
    """Return why a policy, as it is now, is not decoded in groups, or "" if nothing prevents it."""
    if reason := unfit_adapter(policy):
        return reason
    adapter = getattr(policy, "active_peft_config", None)
    if adapter is not None and adapter.peft_type.value in MIXES_TOKENS:
        return f"the adapter ({adapter.peft_type.value}) computes a token from more than those before it"
    if policy.training and (dropout := describe_dropout(base_model(policy))):
        return f"{dropout}, and completions of a prompt would share its mask"
    return ""


def keep_4bit_layout(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking a model's 4-bit weights in evaluation mode.

    On a CPU with AVX512-BF16, the first forward pass in evaluation mode repacks the weights for an operator that has no
    gradient (bitsandbytes 0.50.2). Training passes then use this operator too: a layer with a bias raises, and one
    without drops the gradient that goes through the base, without an error.

    Raises:
        UserError: The weights are repacked already.
    """
    for module in model.modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        cast("Any", module).support_avx512bf16_for_cpu = False
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            problem = "a forward pass in evaluation mode has repacked its 4-bit weights, which have no gradient now"
            raise UserError("the model", problem, "load it again, and train it first")


@contextmanager
def method_replaced(owner: object, name: str, replacement: object) -> Iterator[None]:
    """Replace a method of one object (a class too), and not of its class, inside this block."""
    own, stock = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, stock)
        else:
            delattr(owner, name)  # a bound method left on the object would be pickled and copied with it


@torch.no_grad()
def nonfinite_weights(model: nn.Module) -> list[str]:
    """Return the names of the parameters with a NaN or an infinity in the part that this rank holds."""
    names: list[str] = []
    largest: list[Tensor] = []
    for name, parameter in model.named_parameters():
        part = _part_of_rank(parameter)
        if part.is_floating_point() and part.numel() and not part.is_meta:
            values = part.float() if part.element_size() == 1 else part  # float8 has no norm
            names.append(name)
            # Propagates NaN, and is exact in every dtype: the largest absolute value is one of the values.
            largest.append(torch.linalg.vector_norm(values, ord=math.inf).float())
    if not names:
        return []
    finite = torch.stack([value.to(largest[0].device) for value in largest]).isfinite().tolist()
    return [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]


def describe_nonfinite(model: nn.Module) -> str:
    """Return a clause on the parameters that hold a NaN or an infinity on any rank, or "". Collective."""
    names = list(dict.fromkeys(name for found in gather(nonfinite_weights(model)) for name in found))
    return f"{len(names)} of its weights are not finite (such as {names[0]})" if names else ""


def _part_of_rank(parameter: Tensor) -> Tensor:
    """Return the values of a parameter that this rank holds: a part under ZeRO-3 and FSDP2, else all of them."""
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    if not hasattr(parameter, "ds_tensor"):
        return parameter
    part = parameter.ds_tensor
    # DeepSpeed does not initialize the end of the last rank's part, behind the last value of the parameter.
    first = part.numel() * torch.distributed.get_rank(parameter.ds_process_group)  # type: ignore[attr-defined]
    return part[: max(0, parameter.ds_numel - first)]  # type: ignore[attr-defined]


def run_folder(args: TrainingArguments) -> Path:
    """Return the folder of a run. Its name is None only before `TrainingArguments.__post_init__`."""
    assert args.output_dir is not None
    return Path(args.output_dir)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put the model into training or evaluation mode inside this block, and restore the mode of each module."""
    # `model.train()` at the end would also switch modules that the user has frozen in evaluation mode.
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before


@contextmanager
def eval_no_grad(model: nn.Module) -> Iterator[None]:
    """Run `model` inside this block without gradients and without dropout, and restore the modes afterwards."""
    with in_mode(model, training=False), torch.no_grad():
        yield


def _float32_settings() -> list[Any]:
    """Return the objects whose `fp32_precision` decides how torch multiplies and convolves in float32.

    Before torch 2.9 there are none.
    """
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):
        return []
    return [backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv]


@contextmanager
def full_float32_products() -> Iterator[None]:
    """Compute products and convolutions of float32 tensors in float32 inside this block."""
    settings = _float32_settings()
    if not settings:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
        return
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = "none"  # a setting that was inherited is inherited again
            if setting.fp32_precision != precision:
                setting.fp32_precision = precision


@contextmanager
def in_float32(model: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Run `model` inside this block with float32 copies of its 16-bit weights and without autocast.

    The copies are other parameters. If the data of the model's own parameters were swapped, torch would reset their
    gradient accumulators, as it does where a dtype changes. The hooks by which DistributedDataParallel averages
    gradients would go with them, and the ranks would train apart without an error.
    """
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    native = accelerator.native_amp
    # accelerate wraps the instance's `forward` in autocast and keeps the stock method beside it.
    autocast = vars(model).get("forward") if "_original_forward" in vars(model) else None
    try:
        _replace_by_float32(model, replaced)
        accelerator.native_amp = False
        if autocast is not None:
            vars(model)["forward"] = vars(model)["_original_forward"]
        # TF32 would round the factors of every product.
        with full_float32_products(), torch.autocast(accelerator.device.type, enabled=False):
            yield
    finally:
        if autocast is not None:
            vars(model)["forward"] = autocast
        accelerator.native_amp = native
        for tensors, name, tensor in replaced:
            tensors[name] = tensor


def _replace_by_float32(model: nn.Module, replaced: list[tuple[dict[str, Any], str, Tensor]]) -> None:
    """Replace 16-bit tensors by float32 copies, and append (module's dictionary, name, tensor) to `replaced`."""
    copies: dict[Tensor, Tensor] = {}
    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in stores:
            for name, tensor in tensors.items():
                if tensor is None or tensor.dtype not in DTYPES_16BIT:
                    continue
                # `replaced` grows before the copy: the caller restores it even if memory runs out halfway.
                replaced.append((tensors, name, tensor))
                if tensor not in copies:  # tied weights stay tied
                    copies[tensor] = tensor.detach().float()
                    if isinstance(tensor, nn.Parameter):
                        copies[tensor] = nn.Parameter(copies[tensor], requires_grad=tensor.requires_grad)
                tensors[name] = copies[tensor]
