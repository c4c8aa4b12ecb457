"""`grpo-recipes merge`: an adapter and its base as one model, whose logits are compared with theirs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo_recipes.checks.model_sizes import check_model_sizes
from grpo_recipes.checks.tokenizer import load_after_trial
from grpo_recipes.runs.files import RunError
from grpo_recipes.runs.weights import (
    adapter_config,
    adapter_kind,
    check_descriptions,
    check_weight_files,
    tokenizer_source,
)
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.files import UnreadableFile, read_text

PROBE_TOKENS = 64

# Largest change of a logit as a share of the largest logit. Rounding merged weights to 16 bits changes logits visibly,
# a lost adapter changes them far more.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
TOLERANCE_16_BIT = 5e-2


def merge(folder: Path, output: Path) -> str:
    """Merge an adapter into its base, in the base's dtype, and save model, tokenizer and card.

    Args:
        folder: Folder of the adapter.
        output: Folder for the merged model, which must not exist.

    Returns:
        A sentence with the largest change of a logit.

    Raises:
        UserError: The adapter can't be merged. Nothing is written then.
    """
    config = adapter_config(folder) if folder.is_dir() else None
    if config is None:
        raise UserError(f"{folder} holds no adapter (no adapter_config.json): a full model needs no merging")
    if config.is_prompt_learning:
        raise UserError(f"{folder} holds an adapter of kind {adapter_kind(config)}, whose tokens no weight can hold")
    if output.exists():
        raise UserError(f"--output {output} exists: name a folder that does not")
    base_name, revision = str(config.base_model_name_or_path), config.revision or "main"
    for part in (folder, Path(base_name)):
        if part.is_dir():
            _check_files(part)
    check_model_sizes(base_name, revision, local_only=False)
    card = _card(folder)
    tokenizer = _tokenizer(folder, base_name)  # before the base takes its memory
    try:
        base = AutoModelForCausalLM.from_pretrained(base_name, revision=revision, dtype="auto", trust_remote_code=False)
    except Exception as error:  # a stranger's files can make transformers raise anything
        raise _base_error(folder, base_name, error) from error
    merged, report = _merged(base, folder)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as parts:
        model = Path(parts) / "model"
        merged.save_pretrained(model)
        tokenizer.save_pretrained(model)
        if card is not None:
            card.save(model / "README.md")
        model.rename(output)
    return f"{output}: {folder} merged into {base_name}, {report}"


def _tokenizer(folder: Path, base_name: str) -> Any:
    source = tokenizer_source(str(folder))
    try:
        return load_after_trial(source, lambda: AutoTokenizer.from_pretrained(source, trust_remote_code=False), ())
    except UserError:
        raise
    except Exception as error:  # the tokenizers library raises this class itself
        if source == base_name:
            raise _base_error(folder, base_name, error) from error
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(
            f"{source}: its tokenizer can't be loaded ({reason}): copy the tokenizer's files again"
        ) from error


def _base_error(folder: Path, base: str, error: Exception) -> UserError:
    return UserError(
        f"{folder}: its base {base} can't be loaded: set `base_model_name_or_path` in its adapter_config.json "
        f"({one_line(error) or type(error).__name__})"
    )


def _check_files(folder: Path) -> None:
    """Raise `UserError` if a file of a model or adapter is damaged. Loading would name no file, or never end."""
    check_descriptions(folder)
    try:
        check_weight_files(folder)
    except RunError as error:
        raise UserError(f"{error}: copy or download the folder again") from error


def _merged(base: PreTrainedModel, folder: Path) -> tuple[PreTrainedModel, str]:
    """Return the merged model, and a clause on how far its logits differ.

    Raises `UserError` if they differ too much.
    """
    dtype, before = base.dtype, _logits(base)
    adapted = PeftModel.from_pretrained(base, str(folder))
    expected = _logits(adapted)
    try:
        merged = adapted.merge_and_unload(safe_merge=True)
    except (AttributeError, NotImplementedError, ValueError) as error:
        kind = adapted.active_peft_config.peft_type.value
        raise UserError(f"{folder}: peft can't merge an adapter of kind {kind} ({error}): use it as it is") from error
    changed = (_logits(merged) - expected).abs().max().item()
    allowed = TOLERANCE.get(dtype, TOLERANCE_16_BIT) * expected.abs().max().item()
    name = str(dtype).removeprefix("torch.")
    if not changed <= allowed:  # also if it is NaN
        raise UserError(
            f"{folder}: merged in {name}, its logits change by up to {changed:.2g}, where rounding could change them "
            f"by {allowed:.2g}: peft does not merge this adapter exactly, use it as it is"
        )
    moved = (expected - before).abs().max().item()
    report = f"{name}; the adapter moves logits by up to {moved:.2g}, merging it changes them by up to {changed:.2g}"
    return merged, report


@torch.no_grad()
def _logits(model: PreTrainedModel | PeftModel) -> torch.Tensor:
    """Return the logits of a fixed row of tokens from the whole vocabulary, float32 (tokens, vocabulary)."""
    model.eval()
    vocabulary = cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings
    row = torch.linspace(0, vocabulary - 1, min(PROBE_TOKENS, vocabulary)).long()
    return model(input_ids=row[None].to(model.device)).logits[0].float()


def _card(folder: Path) -> ModelCard | None:
    """Return the run's model card, changed for the merged model, or None. Raises `UserError` if it can't be read."""
    file = folder / "README.md"
    try:
        card: Any = ModelCard(read_text(file))
        card.data.library_name = "transformers"
        card.text = f"{card.text.rstrip()}\n\nThe adapter is merged into its base here.\n"
    except FileNotFoundError:
        return None
    except UnreadableFile as error:
        raise UserError(f"{error}; correct or remove the file") from error
    except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise UserError(
            f"{file}: it can't be read as a model card ({one_line(error)}); correct or remove it"
        ) from error
    return card
