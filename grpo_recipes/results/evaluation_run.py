"""What `grpo-recipes evaluate` does with its options: which problems, which settings, which policy, which folder."""

from __future__ import annotations

import argparse
import hashlib
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

from grpo_recipes.recipe.data import load
from grpo_recipes.recipe.hub import adapter_config, hub_answers, is_missing, tokenizer_source
from grpo_recipes.recipe.specs import DatasetSpec
from grpo_recipes.results import strict
from grpo_recipes.results.estimates import Estimate
from grpo_recipes.results.evaluate import (
    Complete,
    EvaluationError,
    Settings,
    evaluate_into,
    transformers_engine,
    vllm_engine,
)
from grpo_recipes.results.run import AFTER
from grpo_recipes.runs.files import ADAPTER, ANY_OBJECT, EVALUATIONS, RUN_RECORD, RunError, read_object
from grpo_recipes.runs.weight_files import WeightFileError, check_weight_files
from grpo_rewards.registry import RewardSpecError

DEFAULT_NEW_TOKENS = 512

# What a policy computes with. The files of an adapter hold its scale in their configuration.
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "adapter_config.json")

# Beside the weights. What loads them names no file when one of these is cut off.
_READ_WHOLE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def evaluate_model(options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate `options.model`, or go on with it, and return what `evaluation.json` holds.

    Raises:
        EvaluationError: it can't be made as asked, or has been interrupted (`EvaluationInterrupted`).
        RunError: a file of the model, or of its run, is damaged or missing.
        RecipeError, DatasetError: the recipe or the dataset can't be read.
    """
    if options.limit is not None and options.limit < 1:
        raise EvaluationError(f"--limit is {options.limit}: set it to at least 1, or leave it out for all problems")
    if is_missing(options.model):
        raise EvaluationError(f"{options.model}: the model can't be loaded: there is no such folder")
    if Path(options.model).is_dir():
        check_model_folder(Path(options.model))
    recipe = _recipe(options)
    spec = held_out_spec(recipe.get("dataset", {}), options)
    settings = _settings(recipe, spec, options)
    dataset = load(spec)
    if options.limit is not None:
        dataset = dataset.select(range(min(options.limit, len(dataset))))
    weights = weights_fingerprint(options.model)
    described = {
        "model": options.model,
        **({} if weights is None else {"weights": weights}),
        "engine": "vllm" if options.vllm else "transformers",
        "dataset": {key: value for key, value in vars(spec).items() if value is not None},
    }
    folder = options.output or _output(options.model, options.samples)
    try:
        return evaluate_into(folder, _Lazy(options), dataset, settings, described)
    except KeyboardInterrupt as error:
        raise EvaluationInterrupted(_what_is_saved(folder)) from error
    except (EvaluationError, RunError):
        raise
    except OSError as error:
        raise EvaluationError(
            f"{folder}: the result can't be written there ({error}): give another --output"
        ) from error
    except ValueError as error:
        raise EvaluationError(str(error)) from error


class EvaluationInterrupted(KeyboardInterrupt):
    """Ctrl-C in an evaluation; the message says what is saved and how to go on."""


def _what_is_saved(folder: Path) -> str:
    """How far an interrupted evaluation has come."""
    parts = len(list((folder / "parts").glob("[0-9]*.parquet")))
    if not parts:
        return "stopped by Ctrl-C: no batch was finished, so nothing is saved; the same command starts again"
    batches = "1 batch is" if parts == 1 else f"{parts} batches are"
    return f"stopped by Ctrl-C: {batches} saved in {folder / 'parts'}; the same command goes on from there"


def check_model_folder(folder: Path) -> None:
    """Raise one sentence, naming the file and the fix, if no model or adapter can be loaded from a local folder.

    Nothing is loaded: headers of weight files and the JSON beside them are read, of an adapter those of a local base too.

    Raises:
        EvaluationError: the folder holds no model, or a weight file is missing or damaged.
        RunError: a JSON file is damaged.
    """
    adapter = folder / "adapter_config.json"
    if not adapter.is_file() and not (folder / "config.json").is_file():
        raise EvaluationError(
            f"{folder} holds no model (no config.json, no adapter_config.json){_newest_checkpoint(folder)}"
        )
    restore = "copy or download the folder again"
    for name in _READ_WHOLE:
        if (folder / name).is_file():
            read_object(folder / name, ANY_OBJECT, restore)
    try:
        check_weight_files(folder)
    except WeightFileError as error:
        raise EvaluationError(f"{error}: {restore}, or name another checkpoint") from error
    if adapter.is_file() and (base := read_object(adapter, ADAPTER, restore)["base_model_name_or_path"]):
        if Path(base).is_dir():
            check_model_folder(Path(base))
        elif Path(base).is_absolute():
            raise EvaluationError(
                f"{folder} is an adapter, and its base {base} is missing: set "
                "`base_model_name_or_path` in its adapter_config.json"
            )


def _newest_checkpoint(folder: Path) -> str:
    """A hint for a run that has not finished: it has a model in its checkpoints alone."""
    steps = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    newest = max(steps, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    return f": its newest checkpoint is {newest}" if newest else ""


def weights_fingerprint(model: str) -> str | None:
    """What tells a model's weights from others that bear its name; None if it isn't known.

    Of a folder it is a hash of the weight files' names and content (and of an adapter's base). Content, because size and
    date would take a copied folder for another model. That costs one reading of files which are then read to be loaded:
    half a gigabyte to two a second for each core (a 70B model on 16 cores: about as long as its disk takes). Of a hub
    repository it is the revision that will be loaded.
    """
    folder = Path(model)
    if not folder.is_dir():
        return _hub_revision(model)
    files = sorted({file for pattern in _WEIGHT_FILES for file in folder.glob(pattern)})
    if not files:
        return None
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashlib lets go of the interpreter's lock
        digests = list(pool.map(_digest, files))
    lines = [f"{file.name} {digest}" for file, digest in zip(files, digests, strict=True)]
    if (folder / "adapter_config.json").is_file():
        config = adapter_config(folder)
        base = config.base_model_name_or_path if config is not None else None
        lines.append(f"base {weights_fingerprint(base) if base else None}")
    return "sha256 " + hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _hub_revision(name: str) -> str | None:
    """The commit of a hub repository that loading it takes: the newest if the hub answers, else the cache's."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    cached_only = not hub_answers()
    for file in ("config.json", "adapter_config.json"):
        try:
            return f"revision {Path(hf_hub_download(name, file, local_files_only=cached_only)).parent.name}"
        except (EntryNotFoundError, OSError, ValueError):  # loading it will say what is wrong with the name
            continue
    return None


def held_out_spec(trained: dict[str, Any], options: argparse.Namespace) -> DatasetSpec:
    """The problems to evaluate on: the recipe's held-out rows, with the command line's keys in their place.

    With `--path` the recipe's `eval_path` and `eval_split` are left out: they are of the file that it trained on.

    Raises `EvaluationError` where only the rows trained on are known, or rows without a gold, and `data.DatasetError` for
    a wrong key.
    """
    given = {"path": options.path, "split": options.split}
    given |= {"prompt_style": options.prompt_style, "prompt_format": options.prompt_format}
    raw = dict(trained) if options.dataset in (None, trained.get("name")) else {"name": options.dataset}
    if raw.get("name") == "scored":
        raise EvaluationError(
            "the dataset scored holds recorded responses and no final answers to evaluate on: name problems that have them, "
            "as in `--dataset gsm8k --path PROBLEMS.jsonl --prompt_format text`"
        )
    held_out = {"path": raw.pop("eval_path", None), "split": raw.pop("eval_split", None)}
    if options.path is not None:
        held_out = dict.fromkeys(held_out)
    trained_path = raw.get("path")
    is_known = options.split or any(held_out.values()) or options.path not in (None, trained_path)
    if not is_known and trained_path is not None and _holds_one_split(trained_path):
        raise EvaluationError(
            f"the run trained on {trained_path}: name the held-out problems with --path, or a --split of it"
        )
    raw |= {"name": raw.get("name", "gsm8k"), "split": held_out["split"] or "test"}
    raw |= {"path": held_out["path"] or trained_path}
    raw |= {key: value for key, value in given.items() if value is not None}
    known = {field.name for field in fields(DatasetSpec)}
    return DatasetSpec.parse({key: value for key, value in raw.items() if key in known and value is not None})


def _holds_one_split(path: str) -> bool:
    """Whether rows lie here that answer to any split's name (`data._sliced`): a JSONL file, or one saved `Dataset`."""
    folder = Path(path).expanduser()
    return path.endswith(".jsonl") or (folder.is_dir() and not (folder / "dataset_dict.json").is_file())


def describe(summary: dict[str, Any]) -> str:
    """The shares of an evaluation, a line each."""
    rows = {"strict": summary["strict"], "lenient": summary["lenient"]}
    rows |= {f"pass@{k}": share for k, share in summary.get("pass_at", {}).items()}
    if "majority" in summary:
        rows["majority"] = summary["majority"]
    samples = summary["settings"]["samples"]
    head = f"{summary['problems']} problems, {samples} completion{'s' * (samples > 1)} each; 95 % intervals"
    lines = [f"  {name:10} {Estimate.from_dict(share)}" for name, share in rows.items()]
    return "\n".join([head, *lines, f"  strict: {strict.describe(summary['settings']['strict'])}"])


def describe_comparison(result: dict[str, Any]) -> str:
    """Two evaluations side by side, their paired difference, and McNemar's test."""
    lines = [f"{result['problems']} problems, the same for both; 95 % intervals"]
    for name in ("strict", "lenient"):
        first, second, difference = (Estimate.from_dict(result[name][key]) for key in ("first", "second", "difference"))
        lines.append(f"  {name:8} A {first}   B {second}   B - A {difference}")
    test = result["mcnemar"]
    lines.append(
        f"  McNemar: A alone right on {test['only_first']}, B alone on {test['only_second']}; exact p = {test['p']:.3g}"
    )
    return "\n".join(lines)


class _Lazy:
    """An engine that loads its model when the first batch is asked for: a finished evaluation needs none."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._engine: Complete | None = None

    def __call__(self, prompts: list[Any], settings: Settings) -> list[str]:
        if self._engine is None:
            self._engine = _engine(self._options.model, self._options.vllm)
        return self._engine(prompts, settings)


def _engine(name: str, use_vllm: bool) -> Complete:
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter = Path(name) / "adapter_config.json"
    if use_vllm and adapter.is_file():
        raise EvaluationError(f"{name} is an adapter, and --vllm takes a full model: merge it, or leave --vllm out")
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_source(name))
        if use_vllm:
            return vllm_engine(name, tokenizer)
        if adapter.is_file():
            with warnings.catch_warnings():
                # PEFT fills what is missing with a new adapter's values, and only warns.
                warnings.filterwarnings("error", message="Found missing adapter keys")
                model = AutoPeftModelForCausalLM.from_pretrained(name, dtype="auto", use_safetensors=True)
            missing = []
        else:
            model, loading = AutoModelForCausalLM.from_pretrained(
                name, dtype="auto", use_safetensors=True, output_loading_info=True
            )
            missing = sorted(loading["missing_keys"])
    except (OSError, ValueError, RuntimeError, UserWarning) as error:
        raise EvaluationError(f"{name}: the model can't be loaded: {' '.join(str(error).split())}") from error
    if missing:  # transformers fills them with random numbers, and goes on
        raise EvaluationError(
            f"{name}: its weights lack {len(missing)} of the model's tensors (such as {missing[0]}): copy or download it again"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return transformers_engine(model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer)


def _recipe(options: argparse.Namespace) -> dict[str, Any]:
    """The recipe that an evaluation follows: the one named, or the one that the run, or the checkpoint's run, was made by."""
    if options.recipe is not None:
        from grpo_recipes.recipe.recipe import parse_recipe

        return parse_recipe(["--config", options.recipe]).as_dict()
    for folder in (Path(options.model), Path(options.model).parent):
        if (folder / "run.json").is_file():
            return read_object(folder / "run.json", RUN_RECORD)["recipe"]
    return {}


def _settings(recipe: dict[str, Any], spec: DatasetSpec, options: argparse.Namespace) -> Settings:
    temperature = options.temperature
    if temperature is None:
        temperature = 0.0 if options.samples == 1 else 1.0
    max_new_tokens = options.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = recipe.get("max_completion_length") or DEFAULT_NEW_TOKENS
    tags = tuple(options.tags) if options.tags else _tags(recipe, spec)
    return Settings(
        tags=tags,
        samples=options.samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        batch_size=options.batch_size,
        seed=options.seed,
        strict=_asked(recipe, tags, override_tags=bool(options.tags)),
    )


def _asked(recipe: dict[str, Any], tags: tuple[str, str], *, override_tags: bool) -> tuple[strict.Asked, ...]:
    """What strict asks for: what the recipe's rewards do."""
    try:
        return strict.asked_by(recipe.get("rewards") or [], tags, override_tags=override_tags)
    except RewardSpecError as error:
        raise EvaluationError(f"the recipe's `rewards`: {str(error).rstrip('.')}") from error
    except ValueError as error:
        raise EvaluationError(f"--tags: {error}") from error


def _tags(recipe: dict[str, Any], spec: DatasetSpec) -> tuple[str, str]:
    """The tags that the recipe's rewards look for, or those that the prompt asks for."""
    if tags := _reward_tags(recipe.get("rewards") or []):
        return tags
    return ("reasoning", "answer") if spec.prompt_style == "reasoning" else ("think", "answer")


def _reward_tags(rewards: list[Any]) -> tuple[str, str] | None:
    """The first tags that a reward is given, those inside a `sum` included."""
    for reward in rewards:
        if isinstance(reward, dict):
            if tags := (reward.get("kwargs") or {}).get("tags"):
                return tags[0], tags[1]
            if found := _reward_tags(reward.get("rewards") or []):
                return found
    return None


def _output(model: str, samples: int) -> Path:
    """Where an evaluation goes by default: one of several samples a problem takes no other's place."""
    several = f"-{samples}-samples" if samples > 1 else ""
    if os.path.isdir(model):
        return Path(model) / EVALUATIONS / f"{AFTER}{several}"
    return Path("runs") / EVALUATIONS / f"{model.replace('/', '--')}{several}"
