"""`grpo-recipes export`: a trained model or adapter as one folder that vLLM, transformers and llama.cpp read.

An adapter is merged into its base, and the merge is checked (`merge.py`). The folder holds safetensors, the tokenizer
with its chat template, the model card, licenses, and a generation config that samples and ends as the training did:
servers take both from there, while the base's own config may hold penalties and filters for another model.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from grpo_recipes.evaluation.engines import end_tokens
from grpo_recipes.evaluation.merge import check_output, merged_adapter, read_texts, write_model
from grpo_recipes.evaluation.saved_model import SavedModel
from grpo_recipes.evaluation.settings import training_sampling
from grpo_recipes.recipe.trl_keys import stop_strings

GGUF_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""Value of `--outtype` of llama.cpp's converter that keeps the weights as they are, by dtype."""


def export(source: Path, output: Path) -> list[str]:
    """Write a trained model, or an adapter merged into its base, into a folder that is empty or does not exist.

    Args:
        source: Folder of a run, one of its checkpoints, a model or an adapter.
        output: Folder to write. It is complete or not there at all.

    Returns:
        Lines on what was written, and the commands that serve it.

    Raises:
        UserError: The model can't be loaded or merged, or `output` can't be written.
    """
    check_output("--to", output, source, may_exist=True)
    saved = SavedModel.in_folder(source)
    recipe = saved.recipe()
    sampling, stop = training_sampling(recipe), stop_strings(recipe.get("generation_kwargs"))
    texts = read_texts(saved)
    if saved.is_adapter:
        model, tokenizer, origin = merged_adapter(saved)
    else:
        model, tokenizer, origin = saved.load(), saved.tokenizer(), f"a copy of {source}"
    dtype = str(model.dtype).removeprefix("torch.")
    model.generation_config = _serving_config(model.generation_config, sampling, tokenizer)
    write_model(output, model, tokenizer, texts)
    settings = ", ".join(f"{name} {value}" for name, value in sampling.items())
    lines = [f"{output}: {origin}", f"generation_config.json, with the sampling of the training: {settings}"]
    if stop:
        lines.append(f"completions ended at {', '.join(map(repr, stop))} in training: send `stop` with each request")
    return [*lines, "", *serving_commands(output, dtype)]


def serving_commands(output: Path, dtype: str) -> list[str]:
    """Return the command lines that serve a folder with vLLM and transformers, and convert it for llama.cpp."""
    folder, gguf = shlex.quote(str(output)), shlex.quote(f"{output}.gguf")
    # vLLM computes in bfloat16 by default if the weights are float32, which changes greedy completions.
    exact = " --dtype float32" if dtype == "float32" else ""
    return [
        f"vllm serve {folder}{exact}",
        f"transformers serve {folder}",
        f"python convert_hf_to_gguf.py {folder} --outfile {gguf} --outtype {GGUF_TYPES.get(dtype, 'auto')}",
    ]


def _serving_config(published: GenerationConfig, sampling: Mapping[str, float], tokenizer: Any) -> GenerationConfig:
    """Return the sampling of the training, with the tokens that begin, pad and end a completion there."""
    # transformers takes end tokens from here alone. Training stopped at the tokenizer's and at the published ones.
    ends = end_tokens(published, tokenizer)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    tokens = {"bos_token_id": published.bos_token_id, "eos_token_id": ends or None, "pad_token_id": pad}
    return GenerationConfig(do_sample=True, **sampling, **tokens)
