"""What TRL leaves between the policy and vLLM: weights that are the policy's, and the recipe's seed.

TRL 1.16 merges the adapter, hands out views of the parameters one by one, and unmerges after the last
(`VLLMGeneration._iter_named_params`). A vLLM server's weights are packed 1 GiB at a time, so the last pack, of a small model
the only one, is read after that: the server generates with the base. docs/upstream/trl-lora-server-weights.md
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import PartialState
from peft import PeftModel
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer


@contextmanager
def sampling_by_seed(args: GRPOConfig | None) -> Iterator[None]:
    """Build a trainer inside this block and `args.seed` decides what a colocated vLLM samples.

    The engine draws from this process's random state, which it seeds when it is built, and TRL hands it the rank: every run
    would sample with the same noise. Ranks that share an engine (tensor parallel) must draw alike, the others not.
    """
    yield
    if args is not None and args.use_vllm and args.vllm_mode == "colocate":
        set_seed(args.seed + PartialState().process_index // args.vllm_tensor_parallel_size)


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
