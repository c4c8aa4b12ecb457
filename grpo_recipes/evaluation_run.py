"""What `grpo-recipes evaluate` does with its options: which problems, which settings, which policy, which folder."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from grpo_recipes.data import DatasetSpec, hub_answers, load
from grpo_recipes.estimates import Estimate
from grpo_recipes.evaluate import (
    Complete,
    EvaluationError,
    Settings,
    evaluate_into,
    transformers_engine,
    vllm_engine,
)
from grpo_recipes.runs import AFTER, EVALUATIONS
from grpo_rewards.registry import spec_parts

DEFAULT_NEW_TOKENS = 512

# What a policy computes with. The files of an adapter hold its scale in their configuration.
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "adapter_config.json")


def evaluate_model(options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate `options.model`, or go on with it, and return what `evaluation.json` holds.

    Raises `EvaluationError`, or what reading the recipe or the dataset raises.
    """
    if options.limit is not None and options.limit < 1:
        raise EvaluationError(f"--limit is {options.limit}: set it to at least 1, or leave it out for all problems")
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
    folder = options.output or _output(options.model)
    try:
        return evaluate_into(folder, _Lazy(options), dataset, settings, described)
    except EvaluationError:
        raise
    except ValueError as error:
        raise EvaluationError(str(error)) from error


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
        from grpo_recipes.reference import adapter_config

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
            "as in `--dataset gsm8k --path PROBLEMS.jsonl --prompt-format text`"
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
    return "\n".join([head, *(f"  {name:10} {Estimate(**share)}" for name, share in rows.items())])


def describe_comparison(result: dict[str, Any]) -> str:
    """Two evaluations side by side, their paired difference, and McNemar's test."""
    lines = [f"{result['problems']} problems, the same for both; 95 % intervals"]
    for name in ("strict", "lenient"):
        first, second, difference = (Estimate(**result[name][key]) for key in ("first", "second", "difference"))
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

    from grpo_recipes.reference import tokenizer_source

    adapter = Path(name) / "adapter_config.json"
    if use_vllm and adapter.is_file():
        raise EvaluationError(f"{name} is an adapter, and --vllm takes a full model: merge it, or leave --vllm out")
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_source(name))
        if use_vllm:
            return vllm_engine(name, tokenizer)
        auto = AutoPeftModelForCausalLM if adapter.is_file() else AutoModelForCausalLM
        model = auto.from_pretrained(name, dtype="auto", use_safetensors=True)
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{name}: the model can't be loaded: {' '.join(str(error).split())}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return transformers_engine(model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer)


def _recipe(options: argparse.Namespace) -> dict[str, Any]:
    """The recipe that an evaluation follows: the one named, or the one that the run, or the checkpoint's run, was made by."""
    if options.recipe is not None:
        from grpo_recipes.recipe import parse_recipe

        return parse_recipe(["--config", options.recipe]).as_dict()
    for folder in (Path(options.model), Path(options.model).parent):
        if (folder / "run.json").is_file():
            return json.loads((folder / "run.json").read_text(encoding="utf-8"))["recipe"]
    return {}


def _settings(recipe: dict[str, Any], spec: DatasetSpec, options: argparse.Namespace) -> Settings:
    temperature = options.temperature
    if temperature is None:
        temperature = 0.0 if options.samples == 1 else 1.0
    max_new_tokens = options.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = recipe.get("max_completion_length") or DEFAULT_NEW_TOKENS
    settings = Settings(
        samples=options.samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        batch_size=options.batch_size,
        seed=options.seed,
    )
    return replace(settings, tags=tuple(options.tags) if options.tags else _tags(recipe, spec))


def _tags(recipe: dict[str, Any], spec: DatasetSpec) -> tuple[str, str]:
    """The tags that the recipe's rewards look for, or those that the prompt asks for."""
    if tags := _reward_tags(recipe.get("rewards") or []):
        return tags
    return ("reasoning", "answer") if spec.prompt_style == "reasoning" else ("think", "answer")


def _reward_tags(rewards: list[Any]) -> tuple[str, str] | None:
    """The first tags that a reward is given, those inside a `sum` or a `gate` included."""
    for reward in rewards:
        if isinstance(reward, dict):
            if tags := (reward.get("kwargs") or {}).get("tags"):
                return tags[0], tags[1]
            if found := _reward_tags(spec_parts(reward)):
                return found
    return None


def _output(model: str) -> Path:
    if os.path.isdir(model):
        return Path(model) / EVALUATIONS / AFTER
    return Path("runs") / EVALUATIONS / model.replace("/", "--")
