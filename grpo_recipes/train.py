"""Train a recipe with GRPO.

accelerate launch --config_file accelerate_configs/ddp.yaml -m grpo_recipes.train --config recipes/x.yaml [--key value ...]

The recipe is checked before any model is loaded. The run's folder (`output_dir`) then holds `run.json` (the recipe as
resolved, versions, geometry), `trainer_state.json`, `completions/*.parquet`, checkpoints, and the final model or adapter.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOConfig, get_peft_config, get_quantization_config
from trl.trainer.utils import create_model_from_path

from grpo_recipes import __version__, data, faults, restart
from grpo_recipes.diagnostics import describe, diagnose
from grpo_recipes.offline import RecordedRollout
from grpo_recipes.recipe import (
    Checked,
    Machine,
    Recipe,
    RecipeError,
    check,
    check_output_dir,
    grpo_config,
    model_config,
    parse_recipe,
    resume_point,
)
from grpo_recipes.reference import REF, adapter_config, tokenizer_source
from grpo_recipes.runs import Run, RunError
from grpo_recipes.trainer import GRPOTrainer

VERSIONED = ("trl", "transformers", "peft", "accelerate", "datasets", "torch")

# How long a rank that is not the first keeps its peace about an error that all ranks have: the launcher ends every rank
# once one has failed, and the first rank must get to say its sentence.
SILENCE_SECONDS = 30.0


def main(args: Sequence[str] | None = None) -> int:
    """Train the recipe that `args` (default: the command line) name.

    Returns 0, 2 if the recipe can't run as written, or 1 if the run failed; then the sentence that matters is printed last.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger("grpo_recipes").setLevel(logging.INFO)
    try:
        recipe = parse_recipe(sys.argv[1:] if args is None else args)
        machine = Machine.here()
        check_output_dir(recipe, machine)
        checked = check(recipe, machine)
        tokenizer = load_tokenizer(recipe)
        checked = limit_prompts(recipe, checked, tokenizer)
        rollout = build_rollout(recipe, checked, tokenizer)
        checkpoint, cut_off = resume_point(recipe, machine) if recipe.resumes else (None, [])
        if checkpoint is not None:
            check_same_order(recipe, checked)
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            faults.check_build_locks()
        training_args = grpo_config(recipe)
        load_reward_models(recipe, checked)
    except (RecipeError, data.DatasetUnreachable, faults.BuildLocked) as error:
        return _refuse(str(error))
    if recipe.resumes and training_args.process_index == 0:
        restart.set_aside(cut_off)
        _say(describe_resumption(recipe, checkpoint, cut_off))
    try:
        faults.forget(recipe.output_dir)
        recipe.blame(run, recipe, checked, tokenizer, training_args, rollout, checkpoint)
    except RecipeError as error:
        return _refuse(str(error))
    except Exception as error:  # whatever it is, the user gets a sentence, and every rank the same one
        last, _ = restart.last_complete_checkpoint(recipe.output_dir, machine.num_processes)
        faults.report(error, recipe.output_dir, last)
        return 1
    return 0


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The policy's tokenizer, padding on the left. Raises `RecipeError` if it can't be loaded or has no chat template."""
    name = tokenizer_source(recipe.model["model_name_or_path"])
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name,
            revision=recipe.model.get("model_revision", "main"),
            trust_remote_code=recipe.with_defaults()["trust_remote_code"],
            padding_side="left",
            truncation_side="left",
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(
            f"{recipe.source}: `model_name_or_path` {name}: no tokenizer could be loaded: {reason}"
        ) from error
    if recipe.dataset.prompt_format == "conversational" and tokenizer.chat_template is None:
        raise RecipeError(
            f"{recipe.source}: the tokenizer of {name} has no chat template: set `dataset.prompt_format: text`, or use a model "
            "that has one"
        )
    return tokenizer


def load_policy(recipe: Recipe, training_args: GRPOConfig) -> str | PeftModel:
    """What TRL's `model` argument gets: the model's name, or, if that is an adapter's, the adapter on its base, trainable.

    Raises `RecipeError` if the adapter's base can't be loaded, or if the recipe asks for a new adapter on top.
    """
    name, model_args = recipe.model["model_name_or_path"], model_config(recipe)
    config = adapter_config(name, model_args.model_revision)
    if config is None:
        return name
    if model_args.use_peft:
        raise RecipeError("`use_peft` asks for a new adapter, and `model_name_or_path` is one: remove `use_peft`")
    init = {
        **(training_args.model_init_kwargs or {}),
        "revision": config.revision or "main",
        "trust_remote_code": training_args.trust_remote_code,
    }
    if (quantization := get_quantization_config(model_args)) is not None:
        init["quantization_config"] = quantization
    if training_args.distributed_state.num_processes > 1:
        init["device_map"] = None
    training_args.model_init_kwargs = None  # used up here: TRL would warn that it ignores them
    try:
        base = create_model_from_path(config.base_model_name_or_path, **init)
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"`model_name_or_path` {name} is an adapter, and its base {config.base_model_name_or_path} can't be loaded: set "
            f"`base_model_name_or_path` in its adapter_config.json ({' '.join(str(error).split())})"
        ) from error
    # ZeRO-3 needs one dtype (huggingface/trl#6089), as TRL sees to for a new adapter.
    return PeftModel.from_pretrained(
        base,
        name,
        is_trainable=True,
        revision=model_args.model_revision,
        autocast_adapter_dtype=not is_deepspeed_zero3_enabled(),
    )


def limit_prompts(recipe: Recipe, checked: Checked, tokenizer: PreTrainedTokenizerBase) -> Checked:
    """Apply `dataset.max_prompt_tokens`, say how many prompts it touched, and check that enough are left."""
    train_dataset, touched = recipe.blame(data.limit_prompts, checked.train_dataset, recipe.dataset, tokenizer)
    if touched:
        done = "dropped" if recipe.dataset.overlong_prompts == "drop" else "cut from the left"
        _say(
            f"{touched} of {len(checked.train_dataset)} prompts over {recipe.dataset.max_prompt_tokens} tokens were {done}"
        )
    recipe.blame(checked.geometry.check_dataset, len(train_dataset))
    eval_dataset = checked.eval_dataset
    if eval_dataset is not None:
        eval_dataset, _ = recipe.blame(data.limit_prompts, eval_dataset, recipe.dataset, tokenizer)
    return Checked(checked.geometry, checked.rewards, train_dataset, eval_dataset)


def build_rollout(recipe: Recipe, checked: Checked, tokenizer: PreTrainedTokenizerBase) -> RecordedRollout | None:
    """The recorded responses that `offline` trains on in place of generated ones. Raises `RecipeError`."""
    if recipe.offline is None:
        return None
    limit = recipe.with_defaults()["max_completion_length"]
    return recipe.blame(RecordedRollout, checked.train_dataset, tokenizer, recipe.offline, limit)


def load_reward_models(recipe: Recipe, checked: Checked) -> None:
    """Load every reward model, and ask every judge for one score, before the policy is loaded; say how that went.

    Raises:
        RecipeError: one can't be loaded, or does not answer.
    """
    for reward in _single_rewards(reward.function for reward in checked.rewards):
        try:
            if hasattr(reward, "load"):
                _say(reward.load().summary())
            if hasattr(reward, "probe"):
                _say(reward.probe())
        except ValueError as error:
            raise RecipeError(f"{recipe.source}: `rewards`: {error}") from error


def _single_rewards(functions: Iterable[Any]) -> Iterator[Any]:
    """The rewards themselves, out of the registry's sums and renamings."""
    for function in functions:
        inner = [part.function for part in getattr(function, "parts", ())] or [getattr(function, "function", None)]
        yield from [function] if inner == [None] else _single_rewards(inner)


def describe_resumption(recipe: Recipe, checkpoint: Path | None, cut_off: Sequence[Path]) -> str:
    """Where a resumed run goes on from, and which checkpoints it leaves out."""
    names = ", ".join(path.name for path in cut_off)
    aside = f"{names} was cut off while it was being saved and is set aside: " if cut_off else ""
    if checkpoint is None:
        return f"{aside}{recipe.output_dir} has no checkpoint to go on from: starting at the beginning"
    return f"{aside}going on from {checkpoint}"


def check_same_order(recipe: Recipe, checked: Checked) -> None:
    """Raise `RecipeError` if the run to resume was laid out otherwise, so that its place in the data means nothing here."""
    file = recipe.output_dir / "run.json"
    if not file.is_file():
        return
    change = restart.layout_change(json.loads(file.read_text(encoding="utf-8")), data_order(recipe, checked))
    if change:
        raise RecipeError(
            f"{recipe.source}: `resume_from_checkpoint`: {change}: launch as before, or start another run from the "
            "checkpoint as its `model_name_or_path`"
        )


def data_order(recipe: Recipe, checked: Checked) -> dict[str, Any]:
    """What settles which prompts an optimiser step sees: part of `run.json`."""
    return {
        "geometry": checked.geometry.as_dict(),
        "train_prompts": len(checked.train_dataset),
        "train_prompts_sha256": prompts_digest(checked.train_dataset["prompt"]),
        "seed": recipe.with_defaults()["seed"],
        "shuffle_dataset": recipe.with_defaults()["shuffle_dataset"],
    }


def prompts_digest(prompts: Iterable[Any]) -> str:
    """The SHA-256 of prompts in their order, texts or messages."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(prompt).encode() + b"\n")
    return digest.hexdigest()


def run(
    recipe: Recipe,
    checked: Checked,
    tokenizer: PreTrainedTokenizerBase,
    training_args: GRPOConfig,
    rollout: RecordedRollout | None = None,
    checkpoint: Path | None = None,
) -> None:
    """Train, and leave the model or adapter, the tokenizer, a model card and the run's files in `output_dir`.

    Goes on from `checkpoint` if given. After SIGTERM it leaves a checkpoint instead and says so.
    """
    training_args.reward_weights = [reward.weight for reward in checked.rewards]
    model_args = model_config(recipe)
    trainer = GRPOTrainer(
        model=load_policy(recipe, training_args),
        reward_funcs=[faults.guarded(reward.function) for reward in checked.rewards],
        args=training_args,
        train_dataset=checked.train_dataset.select_columns(["prompt"]) if rollout else checked.train_dataset,
        eval_dataset=checked.eval_dataset,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        rollout_func=rollout,
        kl_estimator=recipe.kl_estimator,
        micro_batching=recipe.micro_batching,
        reference=recipe.reference,
    )
    _say(f"{recipe.source}: {_size(trainer)}, rewards {_reward_list(checked)}")
    _say(f"  reference       {describe_reference(recipe, trainer)}")
    _say(checked.geometry.describe())
    _say(checked.geometry.describe_epoch(len(checked.train_dataset)))
    if trainer.accelerator.is_main_process:
        write_run_file(recipe, checked, training_args)
    num_prompts = len(checked.train_dataset)
    interruption = restart.StopOnSigterm(lambda step: checked.geometry.ends_generation(step, num_prompts))
    trainer.add_callback(interruption)
    started = time.monotonic()
    steps = checked.geometry.optimizer_steps(recipe.with_defaults(), num_prompts)
    is_over = checkpoint is not None and restart.steps_done(checkpoint) >= steps
    if is_over:
        _say(f"{checkpoint} is the end of the run: nothing is left to train")
    try:
        with restart.loading_only(trainer, steps) if is_over else nullcontext():
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except Exception:
        faults.close_progress_bars(trainer.callback_handler.callbacks)
        raise
    if interruption.stopped:
        trainer.accelerator.wait_for_everyone()  # a rank that leaves may take its node, and the others' saves, with it
        rest = "`--resume_from_checkpoint true` goes on from there"
        if training_args.save_only_model:
            rest = "without its optimiser (`save_only_model`), so no run can go on from there"
        _say(
            f"stopped by SIGTERM after step {trainer.state.global_step} of {trainer.state.max_steps}, which is saved: {rest}"
        )
        trainer.end()
        return
    trainer.save_model(training_args.output_dir)
    trainer.save_state()
    trainer.create_model_card(dataset_name=recipe.dataset.path or recipe.dataset.name)
    _say(summary(trainer, time.monotonic() - started))
    if trainer.accelerator.is_main_process:
        _say(diagnosis(Path(training_args.output_dir)))
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=recipe.dataset.path)
    trainer.end()


def diagnosis(folder: Path) -> str:
    """What looks wrong in a finished run, or why that can't be told: the run is trained and saved in either case."""
    try:
        return describe(diagnose(Run.read(folder)))
    except RunError as error:
        return f"diagnosis: left out, {error}"


def describe_reference(recipe: Recipe, trainer: GRPOTrainer) -> str:
    """What the reference is, and which references a checkpoint offers that this run begins from."""
    kept = Path(recipe.model["model_name_or_path"]) / REF
    sentence = trainer.reference_sentence
    if trainer.beta and (kept / "adapter_config.json").is_file() and recipe.reference.adapter != str(kept):
        sentence += f"; {kept} holds that of the run that wrote it: `reference: {{adapter: {kept}}}` keeps it instead"
    return sentence


def write_run_file(recipe: Recipe, checked: Checked, training_args: GRPOConfig) -> None:
    """Write `run.json`: what ran, on what, with which versions."""
    record = {
        "recipe": recipe.as_dict(),
        "source": recipe.source,
        "rewards": [
            {"name": reward.name, "source": spec if isinstance(spec, str) else spec["name"], "weight": reward.weight}
            for spec, reward in zip(recipe.rewards, checked.rewards, strict=True)
        ],
        "world_size": training_args.world_size,
        **data_order(recipe, checked),
        "versions": versions(),
        "git_revision": git_revision(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    folder = Path(training_args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(
        json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8"
    )


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    return {
        "grpo-recipes": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in VERSIONED},
    }


def git_revision() -> str | None:
    """The commit of the working directory, with `-dirty` if it has changes; None outside a repository."""
    try:
        said = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return said.stdout.strip() or None


def summary(trainer: GRPOTrainer, seconds: float) -> str:
    """One paragraph on a finished run: steps, time, first and last logged reward, where the result lies."""
    rewards = [entry["reward"] for entry in trainer.state.log_history if entry.get("reward") is not None]
    change = f", reward {rewards[0]:.3f} -> {rewards[-1]:.3f}" if rewards else ""
    kind = "adapter" if hasattr(trainer.model, "peft_config") else "model"
    return f"{trainer.state.global_step} optimiser steps in {seconds:.0f} s{change}; the {kind} is in {trainer.args.output_dir}"


def _size(trainer: GRPOTrainer) -> str:
    parameters = list(trainer.model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return f"{total:,} parameters, {trained:,} trained"


def _reward_list(checked: Checked) -> str:
    return ", ".join(f"{reward.name} × {reward.weight:g}" for reward in checked.rewards)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say(text: str) -> None:
    if _is_first_rank():
        print(text, flush=True)


def _refuse(sentence: str) -> int:
    """Print why the recipe can't run, once per launch; a lone failure of another rank is printed after a while."""
    if not _is_first_rank():
        time.sleep(SILENCE_SECONDS)
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    return 2


def leave(code: int) -> None:
    """End this process with `code`: of several ranks, without the interpreter's teardown, in which gloo's threads may abort."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
