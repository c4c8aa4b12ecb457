"""`grpo-recipes export`: a trained model or adapter as one folder that vLLM, transformers and llama.cpp read.

An adapter is merged into its base, and the merge is checked (`merge.py`). The folder holds safetensors, the tokenizer
with its chat template, the model card, licenses, and a generation config that samples and ends as the training did:
servers take both from there, while the base's own config may hold penalties and filters for another model.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from grpo_recipes.evaluation.engines import (
    check_model_folder,
    end_tokens,
    load_model,
    saved_tokenizer,
    training_sampling,
)
from grpo_recipes.evaluation.evaluate import recipe_of
from grpo_recipes.evaluation.merge import CARD, check_output, merged_adapter, write_model
from grpo_recipes.generation.sampling_settings import ignored_fields
from grpo_recipes.recipe.trl_keys import stop_strings
from grpo_recipes.runs.weights import ADAPTER_CONFIG
from grpo_rewards.errors import UserError, one_line, shortened
from grpo_rewards.files import UnreadableFile, read_text, relative_to

LICENSES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE")
"""Names of the files beside a model that are copied as they are."""

GGUF_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""Value of `--outtype` of llama.cpp's converter that keeps the weights as they are, by dtype."""


@dataclass(frozen=True)
class Exported:
    """Result of an export.

    Attributes:
        folder: Folder that was written.
        origin: Clause on where its weights come from.
        dtype: Dtype of its weights, such as `bfloat16`.
        sampling: Settings of the training in its generation config, by name.
        dropped: Published settings of the model that are not in its generation config, by name.
        stop: Strings that ended a completion in training, which no generation config holds.
    """

    folder: Path
    origin: str
    dtype: str
    sampling: Mapping[str, float]
    dropped: Mapping[str, Any]
    stop: tuple[str, ...]

    def describe(self) -> list[str]:
        """Return lines on what was written."""
        lines = [f"{self.folder}: {self.origin}"]
        lines.append(f"generation_config.json, with the sampling of the training: {_listed(self.sampling)}")
        if self.dropped:
            lines.append(f"not taken from the model's own generation_config.json: {_listed(self.dropped)}")
        if self.stop:
            stop = ", ".join(map(repr, self.stop))
            lines.append(f"completions ended at {stop} in training: send `stop` with each request")
        return lines

    def serving_commands(self) -> list[str]:
        """Return the command lines that serve the folder with vLLM and transformers, and convert it for llama.cpp."""
        folder = shlex.quote(str(self.folder))
        # vLLM computes in bfloat16 by default if the weights are float32, which changes greedy completions.
        exact = " --dtype float32" if self.dtype == "float32" else ""
        gguf = shlex.quote(f"{self.folder}.gguf")
        return [
            f"vllm serve {folder}{exact}",
            f"transformers serve {folder}",
            f"python convert_hf_to_gguf.py {folder} --outfile {gguf} --outtype {GGUF_TYPES.get(self.dtype, 'auto')}",
        ]


def export(source: Path, output: Path) -> Exported:
    """Write a trained model, or an adapter merged into its base, into a folder that is empty or does not exist.

    Args:
        source: Folder of a run, one of its checkpoints, a model or an adapter.
        output: Folder to write. It is complete or not there at all.

    Raises:
        UserError: The model can't be loaded or merged, or `output` can't be written.
    """
    if not source.is_dir():
        raise UserError(
            f"{source}: there is no such folder{relative_to(source)}: name a run, a checkpoint, a model or an adapter"
        )
    check_output("--to", output, source, may_exist=True)
    check_model_folder(source)
    recipe = recipe_of(str(source))
    sampling, stop = training_sampling(recipe), stop_strings(recipe.get("generation_kwargs"))
    texts = _texts(source)
    if (source / ADAPTER_CONFIG).is_file():
        merged = merged_adapter(source)
        model, tokenizer, origin = merged.model, merged.tokenizer, merged.report
        if merged.card is not None:
            texts[CARD] = merged.card
    else:
        tokenizer = saved_tokenizer(str(source))
        model = load_model(str(source))
        origin = f"a copy of {source}, {_dtype_of(model)}"
    published = model.generation_config
    model.generation_config = _serving_config(published, sampling, tokenizer)
    dropped = ignored_fields(published, model.generation_config)
    write_model(output, model, tokenizer, texts)
    return Exported(output, origin, _dtype_of(model), sampling, dropped, stop)


def _texts(source: Path) -> dict[str, str]:
    """Return the model card and the licenses of a folder, by name. Raises `UserError` if one can't be read."""
    texts = {}
    for name in (CARD, *LICENSES):
        try:
            texts[name] = read_text(source / name)
        except FileNotFoundError:
            continue
        except UnreadableFile as error:
            raise UserError(f"{error}; correct or remove the file") from error
    return texts


def _serving_config(published: GenerationConfig, sampling: Mapping[str, float], tokenizer: Any) -> GenerationConfig:
    """Return the sampling of the training, with the tokens that begin, pad and end a completion there."""
    # transformers takes end tokens from here alone. Training stopped at the tokenizer's and at the published ones.
    ends = end_tokens(published, tokenizer)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    tokens = {"bos_token_id": published.bos_token_id, "eos_token_id": ends or None, "pad_token_id": pad}
    return GenerationConfig(do_sample=True, **sampling, **tokens)


def _dtype_of(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {shortened(one_line(value), 60)}" for name, value in settings.items())
