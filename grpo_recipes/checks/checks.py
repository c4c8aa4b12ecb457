"""Checks of a recipe that need no model: `check` makes them in order, the cheapest first."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from datasets import Dataset
from transformers.training_args import OptimizerNames
from trl import GRPOConfig

from grpo_recipes.checks import packages
from grpo_recipes.checks.geometry import Geometry, geometry_of
from grpo_recipes.checks.precision import Precision, quantises, uses_bf16
from grpo_recipes.checks.rewards import GoldCheck, check_columns, check_golds, check_weights, gold_notes
from grpo_recipes.checks.tools import Toolset, check_any_reward, check_rows, load_toolset
from grpo_recipes.data.hub import is_missing
from grpo_recipes.data.load import check_disjoint, check_responses, recipe_prompts
from grpo_recipes.process.faults import FAULT_FILES
from grpo_recipes.recipe.recipe import Recipe, model_config, naming, read_yaml
from grpo_recipes.recipe.specs import COUNT, RECORDED_REWARD, check_number, typed
from grpo_recipes.recipe.trl_keys import ADAMW_BF16
from grpo_recipes.runs.files import EVALUATIONS, TEXT, check_names, read_object
from grpo_recipes.runs.lock import LOCK
from grpo_recipes.runs.resume import Resume, decide
from grpo_recipes.runs.weights import adapter_config, check_descriptions, holds_adapter
from grpo_rewards.files import relative_to
from grpo_rewards.registry import BuiltReward

# Room that an output folder must have. A model takes far more, but its size is not known yet.
_PROBE_BYTES = 1 << 20

Backend = Literal["torch", "deepspeed", "fsdp"]
"""Library that holds the weights and the optimizer. torch holds all of them on each process."""

BACKENDS: Mapping[str, Backend] = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp"}
"""Libraries by accelerate's `distributed_type`, which is also the end of the variable that `accelerate launch` sets."""


@dataclass(frozen=True)
class Machine:
    """Machine that a recipe is checked for.

    Attributes:
        num_processes: Number of processes of the run.
        bf16: True if the processes have GPUs with bfloat16.
        backend: Library that splits a model over the processes.
    """

    num_processes: int
    bf16: bool
    backend: Backend = "torch"

    def __post_init__(self) -> None:
        check_number("num_processes", self.num_processes, COUNT)

    @classmethod
    def here(cls) -> Machine:
        """Return this machine, in the layout that `accelerate launch` gave this process."""
        from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

        bf16 = is_torch_bf16_gpu_available() or is_torch_xla_available()
        used = (BACKENDS[name] for name in BACKENDS if os.environ.get(f"ACCELERATE_USE_{name}") == "true")
        return cls(int(os.environ.get("WORLD_SIZE", "1")), bf16, next(used, "torch"))

    @classmethod
    def described(cls, accelerate_config: Path) -> Machine:
        """Return the machine that an accelerate configuration describes. Raise `RecipeError` if the file is not one."""
        raw = read_yaml(accelerate_config)
        backend = BACKENDS.get(raw.get("distributed_type", "NO"), "torch")
        with naming(f"{accelerate_config} as an accelerate configuration"):
            return cls(typed("num_processes", raw.get("num_processes"), int), not raw.get("use_cpu", False), backend)


@dataclass(frozen=True)
class Checked:
    """Objects that the checks have built, which the run uses too.

    Attributes:
        geometry: Batch geometry.
        rewards: Rewards with their weights.
        train_dataset: Rows with the column `prompt`.
        eval_dataset: Held-out rows, or None if the run evaluates nothing.
        golds: Training rows whose gold no correctness reward can score, or None if there are none.
        gold_notes: Sentences about golds that may mean something else than a reward reads.
        toolset: Tools and environments, or None without any.
        prompt_notes: Sentences about rewards that do not fit the rendered prompt, once there is a tokenizer.
    """

    geometry: Geometry
    rewards: list[BuiltReward]
    train_dataset: Dataset
    eval_dataset: Dataset | None
    golds: GoldCheck | None = None
    gold_notes: Sequence[str] = ()
    toolset: Toolset | None = None
    prompt_notes: Sequence[str] = ()

    @property
    def all_rewards(self) -> list[BuiltReward]:
        """Rewards of the recipe, then those of its environments, in the order in which TRL logs them."""
        return [*self.rewards, *(self.toolset.rewards() if self.toolset is not None else [])]


def check(recipe: Recipe, machine: Machine, *, call_factories: bool = True) -> Checked:
    """Make every check that needs no model, the cheapest first.

    Args:
        recipe: Recipe to check.
        machine: Machine that the recipe is to run on.
        call_factories: True to call the reward factories of other packages. Otherwise they are only imported.

    Raises:
        RecipeError: The recipe can't run as written.
        DatasetUnreachable: The dataset can't be loaded from the hub.
    """
    geometry = geometry_of(recipe, machine.num_processes)
    rewards = recipe.build_rewards(call_factories=call_factories)
    with recipe.naming_this_file():
        toolset = load_toolset(recipe)
        check_any_reward(toolset, rewards)
        if rewards:
            check_weights(rewards)
        _check_groups(recipe, geometry, rewards)
        check_reference(recipe)
        check_model_folders(recipe)
        _check_offline(recipe)
        check_early_stopping(recipe)
        check_machine(recipe, machine)
        batching = bool(recipe.config.use_transformers_continuous_batching)
        precision_of(recipe, machine).check(continuous_batching=batching)
        packages.check_vllm(recipe.config, machine.num_processes, recipe.model)
        # The dataset comes last, because it may have to be downloaded.
        trained = recipe_prompts(recipe)
        train_dataset, eval_dataset = trained.dataset, None
        geometry.check_dataset(len(train_dataset))
        geometry.check_saves(recipe.config, len(train_dataset))
        if recipe.offline is not None:
            check_responses(train_dataset, recipe.offline, geometry.num_generations)
        if recipe.evaluates:
            held_out = recipe_prompts(recipe, evaluation=True)
            check_disjoint(trained, held_out, recipe.dataset)
            eval_dataset = held_out.dataset
        check_rows(toolset, (train_dataset, eval_dataset))
        for dataset in (train_dataset, eval_dataset):
            if dataset is not None:
                # With recorded responses, a reward receives only the recorded scores.
                columns = dataset.column_names if recipe.offline is None else [RECORDED_REWARD]
                if toolset is not None and toolset.environments:
                    columns = [*columns, "environments"]
                check_columns(rewards, columns)
        golds = check_golds(rewards, train_dataset, trained.places)
        notes = gold_notes(rewards, train_dataset, trained.places)
    return Checked(geometry, rewards, train_dataset, eval_dataset, golds, notes, toolset)


def check_launch(recipe: Recipe, machine: Machine) -> None:
    """Raise `RecipeError` if `machine` can't train the recipe. These are all checks that precede the first process."""
    check_output_dir(recipe)
    check_model_exists(recipe)
    resume_point(recipe, machine)
    check_packages(recipe)
    dry_config(recipe, machine)
    check(recipe, machine)


def check_early_stopping(recipe: Recipe) -> None:
    """Raise `RecipeError` if early stopping has no evaluations to compare, or no metric to compare them by."""
    config, patience = recipe.config, recipe.early_stopping_patience
    if patience is None:
        return
    check_number("early_stopping_patience", patience, COUNT)
    if not (recipe.evaluates and config.load_best_model_at_end and config.metric_for_best_model):
        fix = "set `eval_strategy`, `load_best_model_at_end: true` and `metric_for_best_model: eval_reward`"
        raise recipe.error("`early_stopping_patience`", "it compares evaluations", fix)


def check_machine(recipe: Recipe, machine: Machine) -> None:
    """Raise `RecipeError` if the recipe trains in bfloat16 on a machine that can't (TRL's default is `bf16: true`)."""
    if uses_bf16(recipe.config) and not recipe.config.use_cpu and not machine.bf16:
        fix = "set `bf16: false`, and `use_cpu: true` to train on the CPU"
        raise recipe.error("`bf16`", "it needs a GPU with bfloat16, and there is none here", fix)


def backend_of(recipe: Recipe, machine: Machine) -> Backend:
    """Return the library that holds the weights: the recipe's, or the one that `accelerate launch` set up."""
    if recipe.config.deepspeed:
        return "deepspeed"
    return "fsdp" if recipe.config.fsdp else machine.backend


def optimizer_name(recipe: Recipe, machine: Machine) -> str:
    """Return the name of the optimizer: the recipe's, or TRL's default, or `adamw_bf16` for a quantized base.

    TRL casts an adapter on a quantized base to bfloat16, in which TRL's default optimizer would lose most of an update.
    """
    if "optim" not in recipe.training and quantises(recipe) and backend_of(recipe, machine) != "deepspeed":
        return ADAMW_BF16
    return str(getattr(recipe.config.optim, "value", recipe.config.optim))


def precision_of(recipe: Recipe, machine: Machine, *, is_adapter: bool | None = None) -> Precision:
    """Return the precision of the run.

    Args:
        recipe: Recipe of the run.
        machine: Machine of the run.
        is_adapter: True if an adapter is trained. If None, the recipe and the files on this machine decide, so that an
            adapter on the hub is not recognized.
    """
    if is_adapter is None:
        is_adapter = bool(recipe.model.get("use_peft")) or holds_adapter(Path(recipe.model["model_name_or_path"]))
    return Precision.of(recipe, optimizer_name(recipe, machine), backend_of(recipe, machine), is_adapter=is_adapter)


def check_packages(recipe: Recipe) -> None:
    """Raise `RecipeError` if a package that the recipe needs is not installed, or TRL does not support this vLLM."""
    with recipe.naming_this_file():
        for error in [*packages.missing(recipe.config), *packages.missing_quantization(recipe.model)]:
            raise error


def check_model_exists(recipe: Recipe) -> None:
    """Raise `RecipeError` if the policy is a folder that does not exist or holds no model, or is a file."""
    name = str(recipe.model["model_name_or_path"])
    folder, place = Path(name), f"`model_name_or_path`: {name}"
    if folder.exists() and not holds_adapter(folder) and not (folder / "config.json").exists():
        problem = "it holds no model (no config.json, no adapter_config.json)"
        raise recipe.error(place, problem, "name the folder of a model")
    if is_missing(name):
        raise recipe.error(place, f"there is no such folder{relative_to(name)}", "correct the path")


def model_positions(recipe: Recipe) -> int | None:
    """Return the largest number of positions of the policy or its base, or None if no file on this machine names it."""
    name, revision = str(recipe.model["model_name_or_path"]), recipe.model.get("model_revision", "main")
    if holds_adapter(Path(name)) and (adapter := adapter_config(name)) is not None:
        name, revision = str(adapter.base_model_name_or_path), adapter.revision or "main"
    from transformers import AutoConfig  # takes seconds

    try:
        config = AutoConfig.from_pretrained(name, revision=revision, local_files_only=True, trust_remote_code=False)
    except Exception:  # loading the model reports what is wrong
        return None
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_reference(recipe: Recipe) -> None:
    """Raise `RecipeError` for a reference that this policy can't have, as far as the files on this machine show."""
    with recipe.naming_this_file():
        recipe.reference.check_refresh(recipe.config)
    policy, reference = Path(recipe.model["model_name_or_path"]), recipe.reference
    adapter = Path(reference.adapter or "")
    if reference.adapter and (is_missing(reference.adapter) or (adapter.is_dir() and not holds_adapter(adapter))):
        problem = f"there is no such folder with an adapter_config.json{relative_to(reference.adapter)}"
        raise recipe.error(f"`reference.adapter`: {reference.adapter}", problem, "correct it")
    new_adapter = recipe.model.get("use_peft", False)
    if holds_adapter(policy) and new_adapter:
        already = f"`model_name_or_path` {policy} is one already, which training continues"
        raise recipe.error("`use_peft`", f"it asks for a new adapter, and {already}", "remove it and the `lora_` keys")
    # Only a local folder shows whether it is an adapter. For a hub model, loading the policy decides.
    if reference.name != "initial" and policy.is_dir() and not (new_adapter or holds_adapter(policy)):
        needing = reference.adapter or reference.name
        problem = f"`{needing}` needs a policy with an adapter, and this is full fine-tuning"
        raise recipe.error("`reference`", problem, "set `use_peft: true`, or use `reference: initial`")


def check_model_folders(recipe: Recipe) -> None:
    """Raise `RecipeError` if a JSON file of the policy, its base or its reference is damaged."""
    name, reference = recipe.model["model_name_or_path"], recipe.reference.adapter
    for key, folder in (("model_name_or_path", name), ("reference.adapter", reference)):
        if folder is None or not Path(folder).is_dir():
            continue
        with naming(f"{recipe.source}: `{key}`"):
            check_descriptions(Path(folder))
            adapter = adapter_config(folder)
            model = Path(folder if adapter is None else str(adapter.base_model_name_or_path))
            if adapter is not None and model.is_dir():
                check_descriptions(model)
            with suppress(FileNotFoundError):
                read_object(model / "config.json", {"model_type": TEXT}, "copy or download the model again")


def check_output_dir(recipe: Recipe) -> None:
    """Raise `RecipeError` if the run would overwrite an earlier run, or can't write into its folder."""
    folder = recipe.output_dir
    with recipe.naming_this_file():
        check_names(folder)
    # A new run would mix its completions and logs with those of the earlier run.
    if folder.exists() and not folder.is_dir():
        raise recipe.error(f"`output_dir`: {folder}", "it is a file", "choose a folder with `--output_dir`")
    if not recipe.resumes and _holds_a_run(folder):
        fix = "choose another one with `--output_dir`, or set `resume_from_checkpoint: true` to go on with that run"
        raise recipe.error(f"`output_dir`: {folder}", "it already holds files", fix)
    _check_writable(recipe)


def _holds_a_run(folder: Path) -> bool:
    """Return True if a folder holds files of a run.

    Evaluations of the policy before training, and the files of a launch that failed before its first step, do not
    count.
    """
    for path in folder.rglob("*"):
        file = path.relative_to(folder)
        is_from_before = file.parts[0] == EVALUATIONS or fnmatch(file.name, FAULT_FILES) or LOCK in file.name
        if path.is_file() and not is_from_before:
            return True
    return False


def _check_writable(recipe: Recipe) -> None:
    """Raise `RecipeError` unless a file can be written in the run's folder, or in its first existing parent."""
    folder = recipe.output_dir
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())  # some file systems notice only here that they are full
    except OSError as error:
        reason = "it is not a folder" if not folder.is_dir() else error.strerror or str(error)
        place, fix = f"`output_dir`: {recipe.output_dir}", "make room or choose another folder with `--output_dir`"
        raise recipe.error(place, f"it can't be written ({folder}: {reason})", fix) from error


def resume_point(recipe: Recipe, machine: Machine) -> Resume | None:
    """Return where the run resumes, judged by the names and sizes of files, or None if the recipe does not resume.

    Raises:
        RecipeError: The named checkpoint is incomplete, or the run has checkpoints of which none can be resumed.
    """
    if not recipe.resumes:
        return None
    place = str(recipe.training["resume_from_checkpoint"])
    with naming(f"{recipe.source}: `resume_from_checkpoint`"):
        point = decide(recipe.output_dir, True if place == "true" else place, machine.num_processes)
        if (reason := point.obstacle()) is not None:
            raise reason
    return point


def grpo_config(recipe: Recipe) -> GRPOConfig:
    """Return TRL's training arguments, with `model_init_kwargs` filled in as TRL's own command does.

    Under `accelerate launch` this joins the process group.

    Raises:
        RecipeError: TRL refuses the combination of keys.
    """
    model = model_config(recipe)
    init = {"revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype}
    training = dict(recipe.training)
    if recipe.compares_whole_batch:  # TRL compares the completions of one group, so the group is the generation batch
        training["num_generations"] = geometry_of(recipe, int(os.environ.get("WORLD_SIZE", "1"))).generation_batch_size
    extra = training.pop("model_init_kwargs", None) or {}
    if training.get("resume_from_checkpoint") == "false":
        training["resume_from_checkpoint"] = None
    if training.get("optim") == ADAMW_BF16:  # transformers does not know the name; the trainer receives the class
        training["optim"] = OptimizerNames.ADAMW_TORCH.value
    with recipe.naming_this_file((TypeError, ValueError)):
        return GRPOConfig(**training, model_init_kwargs={**init, **extra})


def dry_config(recipe: Recipe, machine: Machine) -> GRPOConfig:
    """Return TRL's training arguments on a CPU for a run on `machine`, or raise `RecipeError` if TRL refuses them.

    `GRPOConfig` counts the processes of this machine, so the batch of all processes is given to one.
    """
    training = {**recipe.training, "use_cpu": True}
    for key in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        training[key] = getattr(recipe.config, key) * machine.num_processes
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # about TRL's own use of transformers
        return grpo_config(replace(recipe, training=training))


def _check_offline(recipe: Recipe) -> None:
    """Raise `RecipeError` for keys that do not go with recorded responses."""
    if (recipe.offline is None) == (recipe.dataset.name == "scored"):
        problem = "`scored` reads recorded responses, and `offline: group` trains on them"
        raise recipe.error("`dataset.name`", problem, "set both, or neither")
    if recipe.offline is None:
        return
    generating = {"sampling": recipe.sampling, "use_vllm": recipe.config.use_vllm, "eval_strategy": recipe.evaluates}
    for key, generates in generating.items():
        if generates:
            fix = "remove it, and run `grpo-recipes evaluate` afterwards" if key == "eval_strategy" else "remove it"
            raise recipe.error(f"`{key}`", "it generates completions, and `offline` trains on recorded responses", fix)
    if recipe.compares_whole_batch and "num_generations" in recipe.training:
        raise recipe.error("`num_generations`", "`offline.baseline: batch` takes one response a prompt", "remove it")


def _check_groups(recipe: Recipe, geometry: Geometry, rewards: Sequence[BuiltReward]) -> None:
    """Raise `RecipeError` if a whole group is needed where a prompt has one completion, or is split over processes."""
    comparing = [f"`rewards`: {reward.name}" for reward in rewards if reward.needs_whole_groups]
    compares = "it compares the completions of a group"
    if comparing and geometry.num_generations == 1:
        problem = f"{compares}, and `offline.baseline: batch` has one of each prompt"
        raise recipe.error(comparing[0], problem, "remove it, or set `offline.baseline: group`")
    if recipe.offline is not None:
        comparing.append("`offline`")
    if comparing and geometry.splits_groups:
        fix = (
            f"make per_device_train_batch_size × steps_per_generation ({geometry.completions_per_rank}) a multiple of "
            f"num_generations ({geometry.num_generations})"
        )
        raise recipe.error(comparing[0], f"{compares}, and this layout splits groups over processes", fix)
