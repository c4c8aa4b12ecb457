"""`grpo-recipes merge`: an adapter and its base as one model, whose logits are compared with theirs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import PreTrainedModel

from grpo_recipes.evaluation.saved_model import SavedModel
from grpo_recipes.generation.loading import complete_weights
from grpo_recipes.generation.models import keep_4bit_layout
from grpo_recipes.runs import files
from grpo_recipes.runs.weights import adapter_kind
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.files import UnreadableFile, give_default_mode, read_text

PROBE_TOKENS = 64
CARD = "README.md"
LICENSES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE")
"""Names of the files in a model's folder that are copied as they are."""

# Largest change of a logit as a share of the largest logit. Rounding merged weights to 16 bits changes logits visibly,
# a lost adapter changes them far more.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
TOLERANCE_16_BIT = 5e-2


def merge(folder: Path, output: Path) -> str:
    """Merge an adapter into its base, in the base's dtype, and save model, tokenizer, card and licenses.

    A base that was quantized for training is quantized again, and the adapter is merged into its dequantized weights.
    The published weights differ from those by more than most adapters move a model.

    Args:
        folder: Folder of the adapter.
        output: Folder for the merged model, which must not exist.

    Returns:
        A sentence with the largest change of a logit.

    Raises:
        UserError: The adapter can't be merged. Nothing is written then.
    """
    check_output("--output", output, folder, may_exist=False)
    return f"{output}: {write_merged(SavedModel.in_folder(folder), output)}"


def write_merged(adapter: SavedModel, output: Path) -> str:
    """Write an adapter and its base as one model into a new folder, and return the report of `merged_adapter`.

    Raises:
        UserError: The adapter can't be merged. Nothing is written then.
    """
    texts = read_texts(adapter)
    model, tokenizer, report = merged_adapter(adapter)
    write_model(output, model, tokenizer, texts)
    return report


def merged_adapter(adapter: SavedModel) -> tuple[PreTrainedModel, Any, str]:
    """Return an adapter and its base as one model whose logits were compared with theirs, its tokenizer, and a report.

    Raises:
        UserError: The adapter can't be merged, or a file of its or of its base is damaged.
    """
    folder, config = adapter.folder, adapter.adapter
    if config is None:
        problem = "it holds no adapter (no adapter_config.json), and a full model needs no merging"
        raise UserError(folder, problem, "use it as it is")
    if config.is_prompt_learning:
        problem = f"it holds an adapter of kind {adapter_kind(config)}, whose tokens no weight can hold"
        raise UserError(folder, problem, "use it as it is")
    tokenizer = adapter.tokenizer()  # before the base takes its memory
    base_name = adapter.base_name
    base, expected, kind = adapter.load_base(), None, ""
    if getattr(base, "is_quantized", False):
        keep_4bit_layout(base)
        expected, kind = _logits(_adapted(base, folder)), ", dequantized"
        try:
            base = adapter.load_base().dequantize()
        except NotImplementedError as error:
            raise UserError(folder, f"its quantized base can't be dequantized ({error})", "use it as it is") from error
    model, report = _merged(base, folder, expected)
    return model, tokenizer, f"{folder} merged into {base_name}{kind}, {report}"


def _adapted(base: PreTrainedModel, folder: Path) -> PeftModel:
    with complete_weights():
        return PeftModel.from_pretrained(base, str(folder))


def check_output(option: str, output: Path, source: Path, *, may_exist: bool) -> None:
    """Raise an error unless a folder can be written at `output`.

    Args:
        option: Option that names the folder, for messages.
        output: Folder to write.
        source: Folder of the model to read. No link may lead out of it to `output`.
        may_exist: True if an empty folder may be there.

    Raises:
        UserError: Something else is at `output`, a file is above it, or the user may not write there.
        RunError: A link leads out of `source`.
    """
    try:
        if output.is_symlink() or (output.exists() and not output.is_dir()):
            raise UserError(f"{option} {output}", "it is a file or a link", "name a folder")
        if output.exists() and not (may_exist and not any(output.iterdir())):
            problem = f"it exists{' and is not empty' * may_exist}"
            raise UserError(f"{option} {output}", problem, "name another folder")
        above = next(folder for folder in output.absolute().parents if os.path.lexists(folder))
        with tempfile.TemporaryDirectory(dir=above):  # permissions do not tell of a file system that takes no folder
            pass
    except OSError as error:  # a file above it, a folder that can't be read or written, or a name that is too long
        problem = f"it can't be written ({error.strerror})"
        raise UserError(f"{option} {output}", problem, "name another folder") from error
    if output.absolute().is_relative_to(source.absolute()):
        files.inside(source, *output.absolute().relative_to(source.absolute()).parts)


def write_model(output: Path, model: Any, tokenizer: Any, texts: Mapping[str, str]) -> None:
    """Save a model, its tokenizer and some texts, by file name, into a new folder: all of them or nothing.

    Raises:
        UserError: The folder can't be written.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent) as parts:
            place = Path(parts) / "model"
            model.save_pretrained(place)
            tokenizer.save_pretrained(place)
            for name, text in texts.items():
                (place / name).write_text(text, encoding="utf-8")
            give_default_mode(place)
            place.rename(output)
    except (OSError, SafetensorError) as error:
        fix = "free space, or name another folder"
        raise UserError(output, f"it can't be written ({one_line(error)})", fix) from error


def read_texts(model: SavedModel) -> dict[str, str]:
    """Return the model card and the licenses in the folder of a model, by name. The card of an adapter is changed.

    Raises:
        UserError: A file can't be read.
    """
    texts = {}
    for name in (CARD, *LICENSES):
        try:
            texts[name] = read_text(model.folder / name)
        except FileNotFoundError:
            continue
        except UnreadableFile as error:
            raise UserError(model.folder / name, error.problem, "correct or remove the file") from error
    if CARD in texts and model.is_adapter:
        card = texts[CARD].replace("library_name: peft\n", "library_name: transformers\n", 1).rstrip()
        texts[CARD] = f"{card}\n\nThe adapter is merged into its base here.\n"
    return texts


def _merged(base: PreTrainedModel, folder: Path, expected: torch.Tensor | None) -> tuple[PreTrainedModel, str]:
    """Return the merged model, and a clause on how far its logits differ.

    Args:
        base: Base with ordinary weights.
        folder: Folder of the adapter.
        expected: Logits of the policy that was trained, or None if they are those of base and adapter.

    Raises:
        UserError: The logits differ too much.
    """
    dtype, before = base.dtype, _logits(base)
    adapted = _adapted(base, folder)
    if expected is None:
        expected = _logits(adapted)
    try:
        merged = adapted.merge_and_unload(safe_merge=True)
    except (AttributeError, NotImplementedError, ValueError) as error:
        kind = adapted.active_peft_config.peft_type.value
        raise UserError(folder, f"peft can't merge an adapter of kind {kind} ({error})", "use it as it is") from error
    changed = (_logits(merged) - expected).abs().max().item()
    allowed = TOLERANCE.get(dtype, TOLERANCE_16_BIT) * expected.abs().max().item()
    name = str(dtype).removeprefix("torch.")
    if not changed <= allowed:  # also if it is NaN
        problem = f"merged in {name}, its logits change by up to {changed:.2g}, where rounding allows {allowed:.2g}"
        raise UserError(folder, problem, "use it as it is, since peft does not merge it exactly")
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
