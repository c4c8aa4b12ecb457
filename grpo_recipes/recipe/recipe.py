"""What a recipe may say, and every check that needs no model.

A recipe is a YAML mapping: our own keys (`OUR_KEYS`) beside the keys of TRL's `GRPOConfig` and `ModelConfig`. The command
line overrides it, nested keys too: `--config quickstart --learning_rate 1e-5 --dataset.path train.jsonl`.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import os
import re
import tempfile
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from datasets import Dataset
from trl import GRPOConfig, ModelConfig, TrlParser, get_peft_config

from grpo_recipes.recipe import data, limits, memory, packages, reward_checks
from grpo_recipes.recipe.geometry import Geometry, GeometryError
from grpo_recipes.recipe.hints import did_you_mean
from grpo_recipes.recipe.losses import LOSS_TYPES
from grpo_recipes.recipe.reward_checks import GoldCheck, RewardCheckError
from grpo_recipes.runs.checkpoints import checkpoint_damage, has_state, is_complete, last_complete_checkpoint
from grpo_recipes.runs.files import EVALUATIONS, FAULT_FILES, RunError
from grpo_recipes.runs.record import RECORD, read_record
from grpo_recipes.training import offline
from grpo_recipes.training.micro_batches import MicroBatching
from grpo_recipes.training.reference import ReferencePolicyError, ReferenceSpec, check_refresh
from grpo_rewards import strict_yaml
from grpo_rewards.registry import BuiltReward, RewardSpecError, build_rewards

OUR_KEYS = ("dataset", "rewards", "reference", "kl", "micro_batching", "offline")

# How `beta` weighs the distance from the reference: TRL's estimate from sampled tokens, or the sum over the vocabulary.
KL_ESTIMATORS = ("sampled", "full")

# TRL checks these only after the model is loaded, or not before the first loss.
CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": tuple(LOSS_TYPES),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("server", "colocate"),
}

# Where a recipe differs from TRL's defaults when it says nothing: with dropout on, the policy differs from itself and the
# logged KL is not 0 at step 0; completions go to parquet files and are not printed.
DEFAULTS: dict[str, Any] = {"disable_dropout": True, "log_completions": True, "num_completions_to_print": 0}

# What must fit where a run is to write; a model takes far more, but its size is not known yet.
_PROBE_BYTES = 1 << 20

_UNSET = object()
_Result = TypeVar("_Result")


class RecipeError(ValueError):
    """A recipe cannot run as written; the message is one sentence that names the file, the key and the fix."""


@dataclass(frozen=True)
class Recipe:
    """A recipe whose keys and types are right; `check` answers whether it can run."""

    source: str
    dataset: data.DatasetSpec
    rewards: Sequence[str | Mapping[str, Any]]
    training: Mapping[str, Any]
    """Keys of `GRPOConfig` that the recipe sets, with our `DEFAULTS`."""
    model: Mapping[str, Any]
    """Keys of `ModelConfig` that the recipe sets."""
    reference: ReferenceSpec = field(default_factory=ReferenceSpec)
    micro_batching: MicroBatching = field(default_factory=MicroBatching)
    kl_estimator: str = "sampled"
    """One of `KL_ESTIMATORS`."""
    offline: offline.OfflineSpec | None = None
    """Recorded responses in place of generation, if any."""
    arguments: Sequence[str] = ()
    """The command line that it was read from."""

    @property
    def output_dir(self) -> Path:
        """The run's folder."""
        return Path(self.training["output_dir"])

    @property
    def resumes(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self.training.get("resume_from_checkpoint") not in (None, "false")

    def with_defaults(self) -> dict[str, Any]:
        """Every plain-valued key of `GRPOConfig`: the recipe's value or TRL's default."""
        return {**_defaults(GRPOConfig), **self.training}

    def geometry(self, num_processes: int) -> Geometry:
        """The batch geometry on `num_processes` ranks. Raises `RecipeError` where it does not divide."""
        whole_batch = self.offline is not None and self.offline.compares_whole_batch
        return self.blame(Geometry.from_config, self.with_defaults(), num_processes, compares_whole_batch=whole_batch)

    def build_rewards(self) -> list[BuiltReward]:
        """The rewards, built. Raises `RecipeError` for an unknown name or argument."""
        generations = self.with_defaults()["num_generations"]
        return self.blame(build_rewards, self.rewards, num_generations=generations)

    def load_dataset(self, *, evaluation: bool = False) -> Dataset:
        """The training or the held-out prompts. Raises `RecipeError`; `data.DatasetUnreachable` passes through."""
        return self.blame(data.load, self.dataset, evaluation=evaluation)

    def evaluates(self) -> bool:
        """Whether the run evaluates on held-out prompts while it trains."""
        return self.with_defaults()["eval_strategy"] != "no"

    def cautions(self) -> list[str]:
        """What is allowed and hardly meant, a sentence each."""
        return limits.cautions(self.with_defaults())

    def blame(self, function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
        """Call `function`; a user's error becomes a `RecipeError` that names this recipe's file first."""
        try:
            return function(*args, **kwargs)
        except data.DatasetUnreachable:
            raise
        except (
            GeometryError,
            RewardSpecError,
            ReferencePolicyError,
            data.DatasetError,
            offline.OfflineError,
            RewardCheckError,
            RecipeError,
        ) as error:
            raise RecipeError(f"{self.source}: {error}") from error

    def as_dict(self) -> dict[str, Any]:
        """The recipe as resolved (file and command line), ready to be written as YAML or JSON and run again."""
        spec = {key: value for key, value in asdict(self.dataset).items() if value is not None}
        ours = {
            "dataset": spec,
            "rewards": list(self.rewards),
            "reference": self.reference.as_dict(),
            "kl": {"estimator": self.kl_estimator},
            "micro_batching": asdict(self.micro_batching),
        }
        if self.offline is not None:
            ours["offline"] = asdict(self.offline)
        return {**self.model, **ours, **self.training}


@dataclass(frozen=True)
class Machine:
    """What a run is checked against: its number of processes, and whether they have GPUs with bfloat16."""

    num_processes: int
    bf16: bool

    @classmethod
    def here(cls) -> Machine:
        """This machine, in the layout that `accelerate launch` gave this process."""
        from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

        return cls(int(os.environ.get("WORLD_SIZE", "1")), is_torch_bf16_gpu_available() or is_torch_xla_available())

    @classmethod
    def described(cls, accelerate_config: Path) -> Machine:
        """The machine that an accelerate configuration file describes. Raises `RecipeError` if it is not one."""
        raw = _read_yaml(accelerate_config)
        if not isinstance(raw.get("num_processes"), int):
            raise RecipeError(f"{accelerate_config}: `num_processes` is missing: is this an accelerate configuration?")
        if raw["num_processes"] < 1:
            raise RecipeError(f"{accelerate_config}: `num_processes` is {raw['num_processes']}: set it to at least 1")
        return cls(raw["num_processes"], bf16=not raw.get("use_cpu", False))


@dataclass(frozen=True)
class Checked:
    """What the checks of a recipe leave for the run: nothing is computed twice."""

    geometry: Geometry
    rewards: list[BuiltReward]
    train_dataset: Dataset
    eval_dataset: Dataset | None
    golds: GoldCheck | None = None
    """The training rows whose gold no correctness reward can score, if there are any."""


def parse_recipe(args: Sequence[str], options: Sequence[str] = ()) -> Recipe:
    """Read a recipe from command-line arguments: `--config FILE [--key value ...]`.

    An unknown argument may be meant for one of `options`, the command's own (`--gpu-memory`).

    Raises `RecipeError` for an unreadable file, an unknown key (naming the nearest), or a value of the wrong type.
    """
    if not args:
        raise RecipeError("command line: name a recipe: `--config FILE`, or one that ships, as `--config quickstart`")
    path, overrides, rest = _split_arguments(args)
    source = str(path) if path else "command line"
    raw = _read_recipe(path) if path else {}
    for dotted, text in overrides:
        _set_nested(raw, dotted, text)
    _check_keys(raw, source)
    values = {key: _typed(key, value, source) for key, value in raw.items() if key not in OUR_KEYS}
    values |= _parse_with_trl(values, rest, options)
    _check_values(values, source)
    for key in ("model_name_or_path", "dataset", "rewards"):
        if not (values.get(key) or raw.get(key)):
            raise RecipeError(f"{source}: `{key}` is missing: add it to the recipe or pass `--{key}`")
    if values.get("reward_weights") is not None:
        raise RecipeError(
            f"{source}: `reward_weights` has no effect here: write `weight` inside each entry of `rewards`"
        )
    specs = raw["rewards"] if isinstance(raw["rewards"], list) else [raw["rewards"]]
    defaults = {**DEFAULTS, "output_dir": f"runs/{path.stem if path else 'grpo'}"}
    training = {**defaults, **{key: value for key, value in values.items() if key in _hints(GRPOConfig)}}
    model = {key: value for key, value in values.items() if key in _hints(ModelConfig)}
    dataset = _named(source, data.DatasetSpec.parse, raw["dataset"])
    reference = _named(source, ReferenceSpec.parse, raw.get("reference", "initial"))
    micro_batching = _named(source, MicroBatching.parse, raw.get("micro_batching", "auto"))
    kl_estimator = _kl_estimator(raw.get("kl", "sampled"), source)
    recorded = None if raw.get("offline") is None else _named(source, offline.OfflineSpec.parse, raw["offline"])
    recipe = Recipe(source, dataset, specs, training, model, reference, micro_batching, kl_estimator, recorded, args)
    if kl_estimator == "full" and recipe.with_defaults()["beta"] == 0.0:
        raise RecipeError(f"{source}: `kl.estimator: full` needs a reference policy: set `beta` above 0")
    return recipe


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as `Recipe.as_dict` gives it, with TRL's default for every plain-valued key that it leaves out."""
    return {**_defaults(ModelConfig), **_defaults(GRPOConfig), **values}


def check(recipe: Recipe, machine: Machine) -> Checked:
    """Every check that needs no model, cheapest first. Raises `RecipeError`, or `data.DatasetUnreachable`."""
    geometry = recipe.geometry(machine.num_processes)
    rewards = recipe.build_rewards()
    _check_rewards(recipe, geometry, rewards)
    check_reference(recipe)
    _check_offline(recipe, geometry)
    check_machine(recipe, machine)
    train_dataset = recipe.load_dataset()
    recipe.blame(geometry.check_dataset, len(train_dataset))
    recipe.blame(geometry.check_steps, recipe.with_defaults(), len(train_dataset))
    recipe.blame(geometry.check_saves, recipe.with_defaults(), len(train_dataset))
    if recipe.offline is not None:
        recipe.blame(offline.check_responses, train_dataset, recipe.offline, geometry.num_generations)
    eval_dataset = recipe.load_dataset(evaluation=True) if recipe.evaluates() else None
    for dataset in (train_dataset, eval_dataset):
        if dataset is not None:
            # With recorded responses, what they were paid is all that reaches a reward.
            columns = dataset.column_names if recipe.offline is None else [offline.REWARD_COLUMN]
            recipe.blame(reward_checks.check_columns, rewards, columns)
    golds = recipe.blame(reward_checks.check_golds, rewards, train_dataset)
    return Checked(geometry, rewards, train_dataset, eval_dataset, golds)


def check_machine(recipe: Recipe, machine: Machine) -> None:
    """Raise `RecipeError` if the recipe trains in bfloat16 on a machine that can't (TRL's default is `bf16: true`)."""
    config = recipe.with_defaults()
    bf16 = not config["fp16"] if config["bf16"] is None else config["bf16"]
    if bf16 and not config["use_cpu"] and not machine.bf16:
        raise RecipeError(
            f"{recipe.source}: `bf16` needs a GPU with bfloat16, and there is none here: set `bf16: false`, "
            "and `use_cpu: true` to train on the CPU"
        )


def check_packages(recipe: Recipe) -> None:
    """Raise `RecipeError` for a tracker or a vLLM that is not installed here, or a vLLM that TRL does not take."""
    for sentence in packages.missing(recipe.with_defaults()):
        raise RecipeError(f"{recipe.source}: {sentence}")


def model_shape(recipe: Recipe, model_config_file: str | None = None) -> memory.ModelShape:
    """The sizes of the policy with its adapter, from the model's configuration or the file given in its place.

    Raises `RecipeError` if `lora_target_modules` match nothing, `memory.MemoryUnknown` where there is no configuration.
    """
    arguments = model_config(recipe)
    model = model_config_file or str(arguments.model_name_or_path)
    try:
        return memory.load_shape(model, get_peft_config(arguments))
    except memory.NoTargetModules as error:
        raise RecipeError(f"{recipe.source}: `lora_target_modules`: {error}") from error


def check_adapter(recipe: Recipe) -> None:
    """Raise `RecipeError` if the adapter that the recipe asks for would adapt nothing, as far as that can be known here."""
    if recipe.model.get("use_peft") and recipe.model.get("lora_target_modules") not in (None, ["all-linear"]):
        with contextlib.suppress(memory.MemoryUnknown):  # no configuration: loading the model will say so
            model_shape(recipe)


def check_reference(recipe: Recipe) -> None:
    """Raise `RecipeError` for a reference that this policy can't have, as far as the files on this machine tell."""
    recipe.blame(check_refresh, recipe.reference, recipe.with_defaults())
    policy, reference = Path(recipe.model["model_name_or_path"]), recipe.reference
    if reference.adapter is not None and data.is_missing(reference.adapter):
        raise RecipeError(f"{recipe.source}: `reference.adapter` {reference.adapter}: there is no such folder")
    new_adapter = recipe.model.get("use_peft", False)
    if _holds_adapter(policy) and new_adapter:
        raise RecipeError(
            f"{recipe.source}: `use_peft` asks for a new adapter, and `model_name_or_path` {policy} is one already, which "
            "training continues: remove `use_peft` and the `lora_` keys"
        )
    if reference.name != "initial" and policy.is_dir() and not (new_adapter or _holds_adapter(policy)):
        raise RecipeError(
            f"{recipe.source}: `reference: {reference.adapter or reference.name}` needs a policy with an adapter, and this is "
            "full fine-tuning: set `use_peft: true`, or use `reference: initial`"
        )
    if (
        reference.adapter is not None
        and Path(reference.adapter).is_dir()
        and not _holds_adapter(Path(reference.adapter))
    ):
        raise RecipeError(
            f"{recipe.source}: `reference.adapter`: there is no adapter_config.json in {reference.adapter}"
        )


def _holds_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def check_output_dir(recipe: Recipe, machine: Machine) -> None:
    """Raise `RecipeError` if the run would overwrite an earlier one, can't write, or can't go on from its checkpoint."""
    folder = recipe.output_dir
    if recipe.resumes:
        resume_point(recipe, machine)
    elif folder.exists() and (not folder.is_dir() or _holds_a_run(folder)):
        raise RecipeError(
            f"{recipe.source}: `output_dir` {folder} already holds files: choose another folder with `--output_dir`, or set "
            "`resume_from_checkpoint: true` to go on with that run"
        )
    _check_writable(recipe)


def _holds_a_run(folder: Path) -> bool:
    """Whether there are files of a run: an evaluation of the policy before it, or a launch that never began, may lie there."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return any(file.parts[0] != EVALUATIONS and not fnmatch(file.name, FAULT_FILES) for file in files)


def _check_writable(recipe: Recipe) -> None:
    """Raise `RecipeError` unless a file can be written in the run's folder, or where that folder would be made."""
    folder = recipe.output_dir
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())  # some file systems notice only now that they are full
    except OSError as error:
        reason = "it is no folder" if not folder.is_dir() else error.strerror or str(error)
        raise RecipeError(
            f"{recipe.source}: `output_dir` {recipe.output_dir} can't be written ({folder}: {reason}): make room or choose "
            "another folder with `--output_dir`"
        ) from error


def resume_point(recipe: Recipe, machine: Machine) -> tuple[Path | None, list[Path]]:
    """The checkpoint to go on from, and newer ones that were cut off; None for a run that was stopped before its first.

    Raises `RecipeError` if the named checkpoint is not complete, or those of the run are of another number of processes.
    """
    value = str(recipe.training["resume_from_checkpoint"])
    if value != "true":
        if not is_complete(Path(value), machine.num_processes):
            raise RecipeError(_no_checkpoint(recipe, machine, value))
        return Path(value), []
    checkpoint, cut_off = last_complete_checkpoint(recipe.output_dir, machine.num_processes)
    if checkpoint is None and any(has_state(path) for path in cut_off):
        raise RecipeError(_no_checkpoint(recipe, machine, str(recipe.output_dir)))
    return checkpoint, cut_off


def check_checkpoint(recipe: Recipe, checkpoint: Path) -> None:
    """Raise `RecipeError` if files of the checkpoint to go on from are missing or cut off."""
    if damage := checkpoint_damage(checkpoint):
        raise RecipeError(
            f"{recipe.source}: `resume_from_checkpoint`: {damage}: remove the folder {checkpoint}, and "
            "`--resume_from_checkpoint true` goes on from the checkpoint before it, or from the beginning"
        )


def _no_checkpoint(recipe: Recipe, machine: Machine, place: str) -> str:
    return (
        f"{recipe.source}: `resume_from_checkpoint`: there is no complete checkpoint of {machine.num_processes} process(es) in "
        f"{place}: launch as many processes as before, or name another checkpoint"
    )


def grpo_config(recipe: Recipe) -> GRPOConfig:
    """TRL's training arguments, with `model_init_kwargs` as TRL's own command fills them.

    Under `accelerate launch` this joins the process group. Raises `RecipeError` for a combination that TRL refuses.
    """
    model = model_config(recipe)
    init = {"revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype}
    training = dict(recipe.training)
    if recipe.offline is not None and recipe.offline.compares_whole_batch:  # TRL's group is the generation batch
        training["num_generations"] = recipe.geometry(int(os.environ.get("WORLD_SIZE", "1"))).generation_batch_size
    extra = training.pop("model_init_kwargs", None) or {}
    if training.get("resume_from_checkpoint") == "false":
        training["resume_from_checkpoint"] = None
    try:
        return GRPOConfig(**training, model_init_kwargs={**init, **extra})
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{recipe.source}: {error}") from error


def dry_config(recipe: Recipe, machine: Machine) -> None:
    """Raise `RecipeError` for what `GRPOConfig` refuses, for another machine than this one: its batch on one process."""
    config = recipe.with_defaults()
    batches = {
        key: config[key] * machine.num_processes
        for key in ("per_device_train_batch_size", "per_device_eval_batch_size")
    }
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of TRL's own use of transformers
        grpo_config(replace(recipe, training={**recipe.training, **batches, "use_cpu": True}))


def model_config(recipe: Recipe) -> ModelConfig:
    """TRL's model arguments. Raises `RecipeError` for a combination that TRL refuses."""
    try:
        return ModelConfig(**recipe.model)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{recipe.source}: {error}") from error


def shipped(kind: str, name: str) -> Path | None:
    """The file `name` (with or without `.yaml`) that ships in `kind` (`recipes` or `accelerate_configs`), if there is one."""
    file = name if name.endswith(".yaml") else f"{name}.yaml"
    return next((folder / file for folder in _shipped_folders(kind) if (folder / file).is_file()), None)


def _shipped_folders(kind: str) -> list[Path]:
    """Where files ship: in an installed wheel, in a source checkout."""
    package = Path(__file__).parents[1]
    return [package / kind, package.parent / kind]


def shipped_names(kind: str) -> list[str]:
    """The names of all files that ship in `kind`."""
    return [file.stem for folder in _shipped_folders(kind) for file in sorted(folder.glob("*.yaml"))]


def find_file(kind: str, name: str) -> Path:
    """The file that `name` means: a path, or the bare name of a shipped one. Raises `RecipeError` if there is neither."""
    if Path(name).is_file():
        return Path(name)
    found = shipped(kind, name) if Path(name).name == name else None
    if found is None:
        if Path(name).is_dir():
            raise RecipeError(f"{name} is a folder: name a YAML file, or one that ships in {kind}/")
        hint = did_you_mean(name.removesuffix(".yaml"), shipped_names(kind), otherwise="")
        raise RecipeError(f"{name}: there is no such file, and none of that name ships in {kind}/{hint}")
    return found


class _Parser(TrlParser):
    """TRL's parser, with one sentence instead of two screens of usage."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"command line: {message}")


@cache
def _hints(config_class: type) -> dict[str, Any]:
    hints = typing.get_type_hints(config_class)
    return {field.name: hints[field.name] for field in fields(config_class) if field.init}


@cache
def _defaults(config_class: type) -> dict[str, Any]:
    return {field.name: field.default for field in fields(config_class) if field.init and field.default is not MISSING}


def _parser() -> TrlParser:
    """TRL's parser over its own dataclasses, reporting only what is given: no defaults, no abbreviations."""
    parser = _Parser((GRPOConfig, ModelConfig), prog="python -m grpo_recipes.train", allow_abbrev=False)
    known = [*_hints(GRPOConfig), *_hints(ModelConfig)]
    parser.set_defaults(**dict.fromkeys(known, _UNSET))
    return parser


def _split_arguments(args: Sequence[str]) -> tuple[Path | None, list[tuple[str, str]], list[str]]:
    """The recipe's path, the overrides of our and of nested keys, and the rest, which is TRL's."""
    path, overrides, rest = None, [], []
    pending = list(args)
    while pending:
        word = pending.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        key = re.sub(r"(?<=\w)-", "_", name)  # `--max-steps`, but not a number's sign
        ours = word.startswith("--") and (key == "config" or key.split(".")[0] in OUR_KEYS or "." in key)
        if not ours:
            rest.append(word)
            continue
        if not equals:
            if not pending or pending[0].startswith("--"):
                raise RecipeError(f"command line: `{word}` needs a value")
            text = pending.pop(0)
        if key == "config":
            path = find_file("recipes", text)
        else:
            overrides.append((key, text))
    return path, overrides, rest


def _read_recipe(path: Path) -> dict[str, Any]:
    """The keys in a recipe's file; of a `run.json`, the recipe of its newest launch, to be run again from its beginning."""
    if path.name != RECORD:
        return _read_yaml(path)
    try:
        record = read_record(path.parent)
    except RunError as error:
        raise RecipeError(str(error)) from error
    assert record is not None, "find_file has found it"
    return {key: value for key, value in record["recipe"].items() if key != "resume_from_checkpoint"}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = strict_yaml.load(path.read_text(encoding="utf-8"))
    except strict_yaml.DuplicateKey as error:
        raise RecipeError(f"{path}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: a recipe is a YAML mapping of `key: value` lines, not {type(raw).__name__}")
    return raw


def _set_nested(raw: dict[str, Any], dotted: str, text: str) -> None:
    """Set `a.b.0.c` in nested mappings and lists; a plain string on the way is the mapping's `name` (our shorthand).

    Raises `RecipeError` for a path that leads nowhere, or a key that `text` gives twice.
    """
    *parents, last = dotted.split(".")
    try:
        value = strict_yaml.load(text)
    except strict_yaml.DuplicateKey as error:
        raise RecipeError(f"command line: `--{dotted}`: {error}") from error
    except yaml.YAMLError:
        value = text
    node: Any = raw
    for depth, name in enumerate(parents):
        key = _entry(node, name, dotted, ".".join(parents[:depth]))
        if isinstance(node, dict):
            node.setdefault(key, {})
        if name == "micro_batching" and not isinstance(node[key], dict):  # `auto` or `off`, which a field replaces
            node[key] = {}
        if isinstance(node[key], str):
            node[key] = {"name": node[key]}
        node = node[key]
    node[_entry(node, last, dotted, ".".join(parents))] = value


def _entry(node: Any, name: str, dotted: str, place: str) -> str | int:
    """`name` as a key of the mapping `node`, or as the number of an entry of the list `node`. Raises `RecipeError`."""
    if isinstance(node, dict):
        return name
    if not isinstance(node, list):
        raise RecipeError(f"command line: `--{dotted}`: `{place}` is {node!r}, which has no keys: leave `.{name}` out")
    if not name.isdecimal() or int(name) >= len(node):
        has = f"its entries are numbered 0 to {len(node) - 1}" if node else "it has no entries"
        raise RecipeError(f"command line: `--{dotted}`: `{place}` is a list, and has no entry `{name}`: {has}")
    return int(name)


def _check_keys(raw: Mapping[str, Any], source: str) -> None:
    known = {*OUR_KEYS, *_hints(GRPOConfig), *_hints(ModelConfig)}
    for key in raw:
        if key not in known:
            raise RecipeError(f"{source}: unknown key `{key}`{_did_you_mean(str(key))}")


def _did_you_mean(word: str, options: Sequence[str] = ()) -> str:
    """The nearest key or option: ours, the model's and GRPO's before the hundred of transformers' trainer."""
    usual = [*OUR_KEYS, *_hints(ModelConfig), *inspect.get_annotations(GRPOConfig), *options]
    return did_you_mean(word, usual, _hints(GRPOConfig))


def _typed(key: str, value: Any, source: str) -> Any:
    hint = {**_hints(GRPOConfig), **_hints(ModelConfig)}[key]
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if isinstance(value, bool) and bool not in options and str in options:
        return _word(key, value)
    for convert in (_as_is, _converted):
        for option in options:
            try:
                return convert(value, option)
            except (TypeError, ValueError):
                continue
    raise RecipeError(f"{source}: `{key}` must be {_type_name(options)}, not {value!r}")


def _word(key: str, value: bool) -> str:
    """The word behind a boolean where text is asked for: YAML reads `no` as false, and `eval_strategy: no` is meant."""
    return "no" if key.endswith("_strategy") and not value else str(value).lower()


def _as_is(value: Any, option: Any) -> Any:
    """`value` if it is of type `option` already (an integer is a float, a boolean is no integer), or raise TypeError."""
    if option is typing.Any or (value is None and option in (None, type(None))):
        return value
    if option is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(option) is list:
        (element,) = typing.get_args(option)
        return [_converted(entry, element) for entry in _as_is(value, list)]
    kind = typing.get_origin(option) or option
    if kind is typing.Literal and value in typing.get_args(option):
        return value
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise TypeError


def _converted(value: Any, option: Any) -> Any:
    """`value` turned into `option` where YAML's own guess loses nothing ("5e-6", 8.0, a number as a name), or raise."""
    if option is str and isinstance(value, (int, float)):
        return str(value)
    if option is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if option in (int, float) and isinstance(value, str):
        return option(value)
    if option is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if typing.get_origin(option) is list and isinstance(value, (str, int, float)):
        return _as_is([value], option)
    return _as_is(value, option)


def _type_name(options: Sequence[Any]) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}
    kinds = [typing.get_origin(option) or option for option in options if option is not type(None)]
    return " or ".join(dict.fromkeys(names.get(kind, "a list" if kind is list else "text") for kind in kinds))


def _parse_with_trl(values: Mapping[str, Any], args: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """What TRL's parser makes of the recipe's values and the command line, the latter winning."""
    parser = _parser()
    parser.set_defaults_with_config(**values)
    namespace, unknown = parser.parse_known_args(list(args))
    if unknown:
        hint = _did_you_mean(unknown[0].partition("=")[0], ["--config", *options])
        if Path(unknown[0]).is_file() or shipped("recipes", unknown[0]):
            hint = f": did you mean `--config {unknown[0]}`?"
        raise RecipeError(f"command line: unknown argument `{unknown[0]}`{hint}")
    return {key: value for key, value in vars(namespace).items() if value is not _UNSET}


def _check_values(values: dict[str, Any], source: str) -> None:
    """Settle what types cannot: named choices, and numbers that are no numbers."""
    if "scale_rewards" in values:  # TRL accepts booleans here
        word = str(values["scale_rewards"]).lower()
        values["scale_rewards"] = {"true": "group", "false": "none"}.get(word, word)
    for key, choices in CHOICES.items():
        if key in values and values[key] not in choices:
            hint = did_you_mean(str(values[key]), choices, otherwise=f": choose one of {', '.join(choices)}")
            raise RecipeError(f"{source}: `{key}` can't be `{values[key]}`{hint}")
    values |= {key: value.value for key, value in values.items() if isinstance(value, enum.Enum)}
    _named(source, limits.check, values)


def _named(source: str, parse: Callable[[Any], _Result], raw: Any) -> _Result:
    try:
        return parse(raw)
    except ValueError as error:  # each of these says the key and the fix
        raise RecipeError(f"{source}: {error}") from error


def _kl_estimator(raw: Any, source: str) -> str:
    spec = {"estimator": raw} if isinstance(raw, str) else raw
    if not isinstance(spec, dict) or "estimator" not in spec:
        raise RecipeError(f"{source}: `kl` must be a mapping with `estimator`, not {raw!r}")
    for key in spec:
        if key != "estimator":
            raise RecipeError(f"{source}: unknown key `kl.{key}`{did_you_mean(str(key), ['estimator'])}")
    if spec["estimator"] not in KL_ESTIMATORS:
        raise RecipeError(
            f"{source}: `kl.estimator` can't be `{spec['estimator']}`: choose one of {', '.join(KL_ESTIMATORS)}"
        )
    return spec["estimator"]


def _check_offline(recipe: Recipe, geometry: Geometry) -> None:
    """Raise `RecipeError` for what recorded responses can't do."""
    if recipe.offline is None:
        if recipe.dataset.name == "scored":
            raise RecipeError(f"{recipe.source}: the dataset `scored` has recorded responses: add `offline: group`")
        return
    config = recipe.with_defaults()
    mistakes = {
        f"`offline` trains on recorded responses: set `dataset.name: scored`, not `{recipe.dataset.name}`": (
            recipe.dataset.name != "scored"
        ),
        "`use_vllm` generates, and `offline` trains on recorded responses: remove one of them": config["use_vllm"],
        "`eval_strategy` generates, and `offline` trains on recorded responses: remove it, and run `grpo-recipes evaluate` "
        "afterwards": recipe.evaluates(),
        "`offline.baseline: batch` takes one response a prompt: remove `num_generations`": (
            recipe.offline.compares_whole_batch and "num_generations" in recipe.training
        ),
        "`offline` draws the responses of a group together, and this layout splits groups over processes: make "
        f"per_device_train_batch_size × steps_per_generation ({geometry.completions_per_rank}) a multiple of num_generations "
        f"({geometry.num_generations})": geometry.splits_groups,
    }
    for sentence, is_made in mistakes.items():
        if is_made:
            raise RecipeError(f"{recipe.source}: {sentence}")


def _check_rewards(recipe: Recipe, geometry: Geometry, rewards: Sequence[BuiltReward]) -> None:
    recipe.blame(reward_checks.check_weights, rewards)
    for reward in rewards:
        if not reward.needs_whole_groups:
            continue
        if geometry.num_generations == 1:
            raise RecipeError(
                f"{recipe.source}: `rewards`: {reward.name} compares the completions of a group, and `offline.baseline: batch` "
                "has one of each prompt: remove it, or set `offline.baseline: group`"
            )
        if geometry.splits_groups:
            raise RecipeError(
                f"{recipe.source}: `rewards`: {reward.name} compares the completions of a group, and this layout splits groups "
                f"over processes: make per_device_train_batch_size × steps_per_generation "
                f"({geometry.completions_per_rank}) a multiple of num_generations ({geometry.num_generations})"
            )
