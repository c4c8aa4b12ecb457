"""An adapter by its name: loaded on the base that it was trained on, to be trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOConfig
from trl.trainer.utils import create_model_from_path

from grpo_recipes.runs.weights import ADAPTER_CONFIG, adapter_config
from grpo_rewards.errors import UserError


def load_adapter(name: str, config: PeftConfig, args: GRPOConfig, key: str, **init: Any) -> PeftModel:
    """The adapter `name`, which has this configuration, on its base, trainable. Uses up the arguments' `model_init_kwargs`.

    Raises `UserError`, naming the `key` that asks for it, if the base can't be loaded.
    """
    revision = init.pop("adapter_revision", None)
    init = {
        **(args.model_init_kwargs or {}),
        "revision": config.revision or "main",
        "trust_remote_code": args.trust_remote_code,
        **init,
    }
    if args.distributed_state.num_processes > 1:
        init["device_map"] = None
    args.model_init_kwargs = None  # used up here: TRL would warn that it ignores them
    try:
        base = create_model_from_path(config.base_model_name_or_path, **init)
    except (OSError, ValueError) as error:
        raise UserError(
            f"`{key}` {name} is an adapter, and its base {config.base_model_name_or_path} can't be loaded: set "
            f"`base_model_name_or_path` in its adapter_config.json ({' '.join(str(error).split())})"
        ) from error
    # ZeRO-3 needs one dtype (huggingface/trl#6089), as TRL sees to for a new adapter.
    dtype = not is_deepspeed_zero3_enabled()
    return PeftModel.from_pretrained(base, name, is_trainable=True, revision=revision, autocast_adapter_dtype=dtype)


def with_its_base(model: Any, args: GRPOConfig | None) -> Any:
    """What TRL's `model` argument takes: `model`, unless that is an adapter's folder, which TRL takes for a model's."""
    if args is None or not isinstance(model, str) or not (Path(model) / ADAPTER_CONFIG).is_file():
        return model
    config = adapter_config(model)
    return model if config is None else load_adapter(model, config, args, "model")
