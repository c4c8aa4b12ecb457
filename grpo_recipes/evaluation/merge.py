"""`grpo-recipes merge`: a run's adapter and its base as one model, checked against the two of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo_recipes.checks.model_sizes import check_model_sizes
from grpo_recipes.checks.tokenizer import load_after_trial
from grpo_recipes.runs.files import RunError
from grpo_recipes.runs.weights import adapter_config, check_descriptions, check_weight_files, tokenizer_source
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.files import UnreadableFile, read_text

PROBE_TOKENS = 64

# How far logits may move, as a share of the largest: rounding a merged weight to 16 bits is felt, a lost adapter far more.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
TOLERANCE_16_BIT = 5e-2


class MergeError(UserError):
    """An adapter that can't be merged; the message names the folder."""


def merge(folder: Path, output: Path) -> str:
    """Merge the adapter in `folder` into its base, in the base's dtype, and save the model, tokenizer and card in `output`.

    Returns what was done, with the largest change of a logit. Raises `MergeError`; then nothing is written.
    """
    config = adapter_config(folder) if folder.is_dir() else None
    if config is None:
        raise MergeError(f"{folder} holds no adapter (no adapter_config.json): a full model needs no merging")
    if config.is_prompt_learning:
        raise MergeError(f"{folder} holds an adapter of kind {config.peft_type.value}, whose tokens no weight can hold")
    if output.exists():
        raise MergeError(f"--output {output} exists: name a folder that does not")
    base_name, revision = str(config.base_model_name_or_path), config.revision or "main"
    source = tokenizer_source(str(folder))
    for part in (folder, Path(base_name)):
        if part.is_dir():
            _check_whole(part)
    check_model_sizes(base_name, revision, local_only=False)
    card = _card(folder)
    # A tokenizer made to do harm is refused before the base takes its memory.
    try:
        tokenizer = load_after_trial(source, lambda: AutoTokenizer.from_pretrained(source, trust_remote_code=False), ())
    except UserError:
        raise
    except Exception as error:  # the tokenizers library raises this very class
        if source == base_name:
            raise _no_base(folder, base_name, error) from error
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise MergeError(
            f"{source}: its tokenizer can't be loaded ({reason}): copy the tokenizer's files again"
        ) from error
    try:
        base = AutoModelForCausalLM.from_pretrained(base_name, revision=revision, dtype="auto", trust_remote_code=False)
    except Exception as error:  # transformers raises whatever the values of a stranger's files lead to
        raise _no_base(folder, base_name, error) from error
    merged, report = _merged(base, folder)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as parts:
        whole = Path(parts) / "model"
        merged.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        if card is not None:
            card.save(whole / "README.md")
        whole.rename(output)
    return f"{output}: {folder} merged into {config.base_model_name_or_path}, {report}"


def _no_base(folder: Path, base: str, error: Exception) -> MergeError:
    return MergeError(
        f"{folder}: its base {base} can't be loaded: set `base_model_name_or_path` in its adapter_config.json "
        f"({one_line(error) or type(error).__name__})"
    )


def _check_whole(folder: Path) -> None:
    """Raise one sentence if a file of a model or adapter is damaged: loading would name no file, or never end."""
    check_descriptions(folder)
    try:
        check_weight_files(folder)
    except RunError as error:
        raise MergeError(f"{error}: copy or download the folder again") from error


def _merged(base: PreTrainedModel, folder: Path) -> tuple[PreTrainedModel, str]:
    """The merged model, and how far its logits lie from those of the two. Raises `MergeError` if too far."""
    dtype, before = base.dtype, _logits(base)
    adapted = PeftModel.from_pretrained(base, str(folder))
    expected = _logits(adapted)
    try:
        merged = adapted.merge_and_unload(safe_merge=True)
    except (AttributeError, NotImplementedError, ValueError) as error:
        kind = adapted.active_peft_config.peft_type.value
        raise MergeError(f"{folder}: peft can't merge an adapter of kind {kind} ({error}): use it as it is") from error
    changed = (_logits(merged) - expected).abs().max().item()
    allowed = TOLERANCE.get(dtype, TOLERANCE_16_BIT) * expected.abs().max().item()
    name = str(dtype).removeprefix("torch.")
    if not changed <= allowed:
        raise MergeError(
            f"{folder}: merged in {name}, its logits change by up to {changed:.2g}, where {allowed:.2g} could be rounding: "
            "peft does not merge this adapter exactly, use it as it is"
        )
    moved = (expected - before).abs().max().item()
    return (
        merged,
        f"{name}; the adapter moves logits by up to {moved:.2g}, merging it changes them by up to {changed:.2g}",
    )


@torch.no_grad()
def _logits(model: PreTrainedModel | PeftModel) -> torch.Tensor:
    """The logits of a fixed row of tokens from all of the vocabulary, in float32: (tokens, vocabulary)."""
    model.eval()
    vocabulary = model.get_input_embeddings().num_embeddings
    row = torch.linspace(0, vocabulary - 1, min(PROBE_TOKENS, vocabulary)).long()
    return model(input_ids=row[None].to(model.device)).logits[0].float()


def _card(folder: Path) -> ModelCard | None:
    """Return the run's model card as that of the merged model, or None if the run has none. Raises `MergeError`."""
    file = folder / "README.md"
    try:
        card: Any = ModelCard(read_text(file))
        card.data.library_name = "transformers"
        card.text = f"{card.text.rstrip()}\n\nThe adapter is merged into its base here.\n"
    except FileNotFoundError:
        return None
    except UnreadableFile as error:
        raise MergeError(f"{error}; correct or remove the file") from error
    except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise MergeError(
            f"{file}: it can't be read as a model card ({one_line(error)}); correct or remove it"
        ) from error
    return card
