"""Repairs between the policy and vLLM that TRL leaves open: the policy's weights, the recipe's seed, a model's
settings.

TRL 1.16 merges the adapter, hands out views of the parameters one by one, and unmerges after the last
(`VLLMGeneration._iter_named_params`). A vLLM server's weights are packed 1 GiB at a time, so the last pack, of a small model
the only one, is read after that: the server generates with the base. docs/upstream/trl-lora-server-weights.md
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import PartialState
from peft import PeftModel
from transformers import GenerationConfig, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from grpo_recipes.generation.generation_config import PublishedSettings
from grpo_rewards.errors import UserError

NOT_SENT_BY_TRL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0}
"""Sampling settings of vLLM that TRL leaves to the engine, and their neutral values."""


@contextmanager
def sampling_by_seed(args: GRPOConfig | None) -> Iterator[None]:
    """Build a trainer inside this block and `args.seed` decides what a colocated vLLM samples.

    The engine draws from this process's random state, which it seeds when it is built, and TRL hands it the rank: every run
    would sample with the same noise. Ranks that share an engine (tensor parallel) must draw alike, the others not.
    """
    yield
    if args is not None and args.use_vllm and args.vllm_mode == "colocate":
        set_seed(args.seed + PartialState().process_index // args.vllm_tensor_parallel_size)


@contextmanager
def neutral_engine() -> Iterator[None]:
    """Build a trainer inside this block and a colocated vLLM does not read the model's generation_config.json.

    TRL builds the engine as `vllm_generation.LLM`, which exists where vLLM is installed.
    """
    engine = getattr(vllm_generation, "LLM", None)
    if engine is None:
        yield
        return
    vllm_generation.LLM = partial(engine, generation_config="vllm")
    try:
        yield
    finally:
        vllm_generation.LLM = engine


def send_settings(trainer: Any, published: PublishedSettings) -> None:
    """Let vLLM get every sampling setting explicitly, and announce which ones of the model it does not follow.

    An engine or server takes what a request leaves out from the model's generation_config.json. With
    `generation_config="vllm"` it takes nothing, also not the model's end tokens beyond the tokenizer's own.

    Raises:
        UserError: a server cuts every completion at the model's `max_new_tokens`, whatever a request asks for.
    """
    vllm, config = trainer.vllm_generation, trainer.model.generation_config
    asked = GenerationConfig(
        do_sample=True,
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        repetition_penalty=trainer.repetition_penalty,
        max_new_tokens=trainer.max_completion_length,
    )
    published.announce_ignored(config, asked)
    _refuse_cut(trainer, config.max_new_tokens)
    given = dict(trainer.args.generation_kwargs or {})
    if not given.get("ignore_eos"):
        own = given.get("stop_token_ids") or []
        given["stop_token_ids"] = sorted({*own, *trainer.eos_token_ids})
    vllm.generation_kwargs = {**NOT_SENT_BY_TRL, **given}


def _refuse_cut(trainer: Any, published: int | None) -> None:
    """Raise `UserError` if a server limits completions to fewer tokens than the trainer asks for."""
    if trainer.args.vllm_mode != "server" or not trainer.accelerator.is_main_process:
        return
    if published is None or published >= trainer.max_completion_length:
        return
    server = trainer.vllm_generation.vllm_client.get_server_info()
    if server["model_config"].get("generation_config") != "vllm":
        raise UserError(
            f"the vLLM server cuts every completion at {published} tokens, the `max_new_tokens` of the model's "
            f"generation_config.json, and `max_completion_length` is {trainer.max_completion_length}: start the server with "
            "`--generation-config vllm`"
        )


def send_policy(trainer: GRPOTrainer) -> None:
    """Let vLLM get copies of the merged weights of the active adapter, and no tensor that it has no name for.

    TRL skips what carries the tuner's prefix (`lora_`) and strips `modules_to_save.default.`. The other adapters' copies of
    `modules_to_save`, the policy's under another name, and trainable tokens would reach vLLM under names that it does not know.
    Called again, it changes nothing. Without vLLM, and without an adapter, there is nothing to do.
    """
    model, vllm = trainer.model, getattr(trainer, "vllm_generation", None)
    if vllm is None or not isinstance(model, PeftModel) or hasattr(vllm, "_named_params_of_trl"):
        return
    vllm._named_params_of_trl = vllm._iter_named_params

    def merged() -> Iterator[tuple[str, torch.Tensor]]:
        for sent, tensor in vllm._named_params_of_trl():
            name = _name_in_model(sent, model.active_adapter)
            if name is not None:
                yield name, tensor.clone()  # it is read when the adapter is no longer merged

    vllm._iter_named_params = merged


def _name_in_model(sent: str, adapter: str) -> str | None:
    """The name of a tensor in the model without adapters; None for one that is part of an adapter."""
    if "trainable_tokens_" in sent:
        return None
    name = sent.replace(f"modules_to_save.{adapter}.", "").replace(".token_adapter", "")
    return None if "modules_to_save." in name else name
