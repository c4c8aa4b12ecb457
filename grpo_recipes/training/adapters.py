"""PEFT adapters of a policy: their tensors, also where ZeRO-3 partitions them, and their base models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOConfig
from trl.trainer.utils import create_model_from_path

from grpo_recipes.generation.loading import complete_weights
from grpo_recipes.generation.models import method_replaced
from grpo_recipes.runs.weights import ADAPTER_CONFIG, adapter_config
from grpo_rewards.errors import UserError, one_line


def adapter_tensors(model: PeftModel, adapter: str) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer of `adapter` by its name without the adapter's name.

    PEFT puts the adapter's name into the path of each tensor: as the last part (`lora_embedding_A.default`, IA3, VeRA)
    or before it (`lora_A.default.weight`, `modules_to_save.default.weight`).
    """
    tensors = {}
    # Not PEFT's `get_peft_model_state_dict`: its tensors are detached, without `requires_grad` and ZeRO-3's attributes.
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in chain(*named):
        before, found, after = f".{name}.".rpartition(f".{adapter}.")
        if found:
            tensors[f"{before}.{after}".strip(".")] = tensor
    return tensors


@contextmanager
def gathered(tensors: Sequence[torch.Tensor | None], *, write: bool = False) -> Iterator[None]:
    """Gather the tensors that ZeRO-3 has partitioned, on every rank. A collective call.

    Args:
        tensors: tensors, partitioned or not. None is skipped.
        write: True to keep what rank 0 writes into the tensors inside the block. Without it, writes are lost.
    """
    partitioned = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not partitioned:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0 if write else None):
        yield


def load_adapter(
    name: str, config: PeftConfig, args: GRPOConfig, key: str, *, revision: str | None = None, **init: Any
) -> PeftModel:
    """Load an adapter on the base model that it was trained on, trainable, and set `args.model_init_kwargs` to None.

    Args:
        name: folder or hub repository of the adapter.
        config: the adapter's configuration.
        args: arguments whose `model_init_kwargs` apply to the base.
        key: recipe key that names the adapter, for the error message.
        revision: revision of the adapter.
        **init: further arguments of the base.

    Raises:
        UserError: the base cannot be loaded, or the weights of base or adapter are incomplete.
    """
    # `GRPOConfig.__post_init__` has parsed JSON, and PEFT writes the base's name with each adapter.
    base_init = dict(cast("dict[str, Any] | None", args.model_init_kwargs) or {})
    base_name = cast(str, config.base_model_name_or_path)
    base_init.update(revision=config.revision or "main", trust_remote_code=args.trust_remote_code)
    base_init.update(init)
    if args.distributed_state.num_processes > 1:
        base_init["device_map"] = None  # "auto", TRL's default, would spread each rank's model over all GPUs
    args.model_init_kwargs = None  # TRL would warn that it ignores them
    try:
        with complete_weights():
            base = create_model_from_path(base_name, **base_init)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        problem = f"it is an adapter, and its base {base_name} can't be loaded ({one_line(error)})"
        fix = "set `base_model_name_or_path` in its adapter_config.json"
        raise UserError(f"`{key}` {name}", problem, fix) from error
    # PEFT would cast the adapter to float32, and ZeRO-3 needs one dtype (huggingface/trl#6089).
    autocast = not is_deepspeed_zero3_enabled()
    with complete_weights():
        return PeftModel.from_pretrained(
            base, name, is_trainable=True, revision=revision, autocast_adapter_dtype=autocast
        )


@contextmanager
def adapter_dtype_kept(model: nn.Module) -> Iterator[None]:
    """Keep the dtype of `model`'s adapter when weights are loaded into it inside this block."""
    if not isinstance(model, PeftModel):
        yield
        return
    # PEFT would cast it to float32. TRL casts the adapter of a quantized base to bfloat16 only when a trainer is built.
    load = partial(model.load_adapter, autocast_adapter_dtype=False)
    with method_replaced(model, "load_adapter", load):
        yield


def with_its_base(
    model: str | PreTrainedModel | PeftModel, args: GRPOConfig | None
) -> str | PreTrainedModel | PeftModel:
    """Return `model`, or the loaded model if `model` is an adapter's folder, which TRL would take for a model's."""
    if args is None or not isinstance(model, str) or not (Path(model) / ADAPTER_CONFIG).is_file():
        return model
    # A repository of the hub is left to TRL: looking for an adapter there would cost every run a request.
    config = adapter_config(model)
    return model if config is None else load_adapter(model, config, args, "model")


def adapter_state(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the adapters that act in a model now, none if they are switched off."""
    if not isinstance(model, PeftModel):
        return ()
    # `active_adapters` still lists the adapters inside `disable_adapter()`: only the layers know.
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            return () if module.disable_adapters else tuple(model.active_adapters)
    return tuple(model.active_adapters)
