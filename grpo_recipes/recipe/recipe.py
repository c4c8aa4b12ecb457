"""Recipes: their keys, reading them from a YAML file and the command line, and TRL's model arguments.

A recipe is a YAML mapping of our keys (`OUR_KEYS`) and of the keys of TRL's `GRPOConfig` and `ModelConfig`. The command
line overrides it, nested keys included: `--config quickstart --learning_rate 1e-5 --dataset.path train.jsonl`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NoReturn, get_origin, get_type_hints

import yaml
from transformers.hf_argparser import DataClassType
from trl import GRPOConfig, ModelConfig, TrlParser

from grpo_recipes.recipe import specs, trl_keys
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_recipes.recipe.specs import RecipeError, Spec, hints
from grpo_recipes.runs.files import RECORD
from grpo_recipes.runs.record import read_record
from grpo_rewards.errors import UserError, did_you_mean, one_line
from grpo_rewards.files import UnreadableFile, expanded, read_text, relative_to
from grpo_rewards.redaction import HIDDEN, hidden_places, redacted
from grpo_rewards.registry import BuiltReward, build_rewards
from grpo_rewards.strict import DuplicateKey, load_yaml

_UNSET = object()


@contextmanager
def naming(source: str, errors: tuple[type[Exception], ...] = (UserError,)) -> Iterator[None]:
    """Turn an error of the block into a `RecipeError` that names `source` first."""
    try:
        yield
    except RecipeError:
        raise
    except UserError as error:
        raise RecipeError(f"{source}: {error.place}", error.problem, error.fix) from error
    except errors as error:
        raise RecipeError(source, one_line(error).rstrip("."), "correct the recipe") from error


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Recipe with valid keys and types. `checks.check` decides whether it can run."""

    # Our keys, each with its text in `--help`.
    dataset: Annotated[
        DatasetSpec, "rows and their prompts: name, path, columns, split, eval_split, system_prompt, ..."
    ]
    rewards: Annotated[list[Any], "reward names, or mappings of name, weight, alias, kwargs; `grpo-rewards list`"]
    reference: Annotated[
        specs.ReferenceSpec, "reference policy of the KL term: initial, base, or {adapter: FOLDER}"
    ] = field(default_factory=specs.ReferenceSpec)
    kl_estimator: Annotated[
        specs.KLEstimator,
        "estimator of the KL term: TRL's on the sampled tokens (sampled), or the sum over the vocabulary (full)",
    ] = "sampled"
    micro_batching: Annotated[
        specs.MicroBatching,
        "layout of micro-batches: auto, off, or {layout: packed, shared, trimmed or padded, skip_zero_advantage: true}",
    ] = field(default_factory=specs.MicroBatching)
    generation: Annotated[
        specs.GenerationMode,
        "transformers' generation: the prompt of a group once where that is exact (auto), or as in TRL (off)",
    ] = "auto"
    sampling: Annotated[
        specs.SamplingSpec | None,
        "sampling of prompts: all, or zero-variance prompts less often (informative, {informative: unbiased})",
    ] = None
    generation_check: Annotated[
        bool, "true to compare completions with the policy, and to stop the run if another policy sampled them"
    ] = True
    advantages: Annotated[
        specs.AdvantageRule | None, "rule for advantages in place of TRL's: max_rl divides by the group's mean reward"
    ] = None
    early_stopping_patience: Annotated[
        int | None, "number of evaluations without improvement after which training stops (transformers' callback)"
    ] = None
    offline: Annotated[
        specs.OfflineSpec | None, "recorded, scored responses in place of generation: group or batch"
    ] = None
    chat_template_path: Annotated[
        str | None,
        "folder relative to the recipe, with a chat_template.jinja (for tools also a tokenizer_config.json with "
        "`response_template`) in place of the model's",
    ] = None
    tools: Annotated[
        list[str] | None, "functions that the policy may call: my_tools.calculator, or my_tools.py:calculator"
    ] = None
    environment_factory: Annotated[
        str | dict[str, Any] | None,
        "environment of each completion: a class, or {name: class} selected by the column `environment`",
    ] = None
    tool_limits: Annotated[
        specs.ToolLimits | None, "limits on each call of a tool: {seconds: 30, result_tokens: 512, failures: 0.5}"
    ] = None

    source: str
    """File of the recipe, as error messages name it."""
    training: Mapping[str, Any]
    """Keys of `GRPOConfig` that the recipe sets, and our defaults."""
    model: Mapping[str, Any]
    """Keys of `ModelConfig` that the recipe sets."""
    arguments: Sequence[str] = ()
    """Command line of the recipe."""

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> Recipe:
        """Read a recipe from its file or by its name, with overrides such as `**{"dataset.path": "train.jsonl"}`.

        Raises:
            RecipeError: the recipe is invalid, as in `parse_recipe`.
        """
        arguments = ["--config", str(path)]
        for key, value in overrides.items():
            arguments.append(f"--{key}={value if isinstance(value, str) else json.dumps(value)}")
        return parse_recipe(arguments)

    @cached_property
    def config(self) -> SimpleNamespace:
        """Every key of `GRPOConfig` that has a simple default: the recipe's value or TRL's default."""
        return SimpleNamespace(**{**_defaults(GRPOConfig), **self.training})

    @property
    def output_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.training["output_dir"])

    @property
    def resumes(self) -> bool:
        """True if the run resumes from a checkpoint."""
        return self.training.get("resume_from_checkpoint") not in (None, "false")

    @property
    def evaluates(self) -> bool:
        """True if the run evaluates on held-out prompts while it trains."""
        return self.config.eval_strategy != "no"

    @property
    def compares_whole_batch(self) -> bool:
        """True if recorded responses are compared with the generation batch, which has one response per prompt."""
        return self.offline is not None and self.offline.compares_whole_batch

    @property
    def uses_tools(self) -> bool:
        """True if the policy may call tools, those of an environment included."""
        return bool(self.tools or self.environment_factory)

    def build_rewards(self, *, call_factories: bool = True) -> list[BuiltReward]:
        """Return the rewards. Raise `RecipeError` for an invalid name or keyword argument.

        Args:
            call_factories: False to import the rewards of other packages without building them.
        """
        completions = self.config.num_generations
        with self.naming_this_file():
            return build_rewards(self.rewards, num_generations=completions, call_factories=call_factories)

    def naming_this_file(self, errors: tuple[type[Exception], ...] = (UserError,)) -> AbstractContextManager[None]:
        """Return a block that turns errors into a `RecipeError` that names this recipe's file first."""
        return naming(self.source, errors)

    def error(self, place: str, problem: str, fix: str) -> RecipeError:
        """Return an error about a place in this recipe. The message names the recipe's file first."""
        return RecipeError(f"{self.source}: {place}", problem, fix)

    def as_dict(self) -> dict[str, Any]:
        """Return the resolved recipe (file and command line), which can be written as YAML or JSON and run again."""
        written = {}
        for key in OUR_KEYS:
            if (value := getattr(self, key)) is not None:
                written[key] = value.as_dict() if isinstance(value, Spec) else value
        return {**self.model, **written, **self.training}


OUR_KEYS: Mapping[str, str] = {
    key: hint.__metadata__[0]
    for key, hint in get_type_hints(Recipe, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""Keys of this project with their texts in `--help`."""


def parse_recipe(args: Sequence[str], options: Sequence[str] = ()) -> Recipe:
    """Read a recipe from command-line arguments: `--config FILE [--key value ...]`.

    Args:
        args: arguments.
        options: options of the command itself (`--gpu_memory`), which a misspelt argument may mean.

    Raises:
        RecipeError: the file is not readable, a key is unknown, or a value is invalid. The message names the nearest
            key.
    """
    if not args:
        fix = "give `--config FILE`, or one that ships, as `--config quickstart`"
        raise RecipeError("command line", "it names no recipe", fix)
    path, overrides, rest = _split_arguments(args)
    raw = _read_recipe(path) if path else {}
    if path and isinstance(template := raw.get("chat_template_path"), str):
        # It ships with the recipe, so it is found wherever the recipe is used. The command line means its own folder.
        raw["chat_template_path"] = str(path.absolute().parent / expanded(template))
    for dotted, text in overrides:
        _set_nested(raw, dotted, text)
    raw.setdefault("output_dir", f"runs/{path.stem if path else 'grpo'}")
    source = str(path) if path else "command line"
    with naming(source):
        return _build(raw, _values_for_trl(raw, rest, options), source, args)


def _build(raw: dict[str, Any], values: Mapping[str, Any], source: str, args: Sequence[str]) -> Recipe:
    """Return the recipe of our keys in `raw` and of TRL's keys in `values`."""
    if raw.get("environment_factory"):  # an environment may score its completion itself
        raw["rewards"] = raw.get("rewards") or []
    for key in ("model_name_or_path", "dataset", "rewards"):
        is_optional = key == "rewards" and raw.get("environment_factory")
        if not (values.get(key) or raw.get(key) or is_optional):
            raise UserError(f"`{key}`", "it is missing", f"add it to the recipe or pass `--{key}`")
    if values.get("reward_weights") is not None:
        raise UserError("`reward_weights`", "it has no effect here", "write `weight` inside each entry of `rewards`")
    if not isinstance(raw["rewards"], list):
        raw["rewards"] = [raw["rewards"]]
    if (raw.get("tools") or raw.get("environment_factory")) and raw.get("tool_limits") is None:
        raw["tool_limits"] = {}
    training = {key: value for key, value in values.items() if key in hints(GRPOConfig)}
    recipe = Recipe(
        **{key: specs.typed(key, value, hints(Recipe)[key]) for key, value in raw.items() if key in OUR_KEYS},
        source=source,
        training={**trl_keys.DEFAULTS, **training},
        model={key: value for key, value in values.items() if key in hints(ModelConfig)},
        arguments=args,
    )
    if hidden := next(hidden_places(recipe.as_dict()), None):
        problem = "it is the placeholder of a secret, which no file keeps"
        raise UserError(f"`{hidden}`", problem, f"give it with `--{hidden}`")
    config = recipe.config
    trl_keys.check_generation(config)
    if recipe.sampling is not None:
        recipe.sampling.check(config)
    trl_keys.check_objective(recipe.training, config, sampled_kl=recipe.kl_estimator == "sampled")
    trl_keys.check_advantages(recipe.advantages, config)
    _check_tool_keys(recipe)
    if recipe.kl_estimator == "full":
        specs.check_number("beta", config.beta, specs.POSITIVE, ", and `kl_estimator: full` needs a reference policy")
    return recipe


def _check_tool_keys(recipe: Recipe) -> None:
    """Raise `UserError` for keys of tools that are missing, or have no effect."""
    config = recipe.config
    if not recipe.uses_tools:
        given = {"tool_limits": recipe.tool_limits, **vars(config)}
        for key in ("tool_limits", "max_tool_calling_iterations"):
            if given[key] is not None:
                raise UserError(f"`{key}`", "it has no effect without `tools` or `environment_factory`", "remove it")
        return
    trl_keys.check_tools(config, "tools" if recipe.tools else "environment_factory")
    if recipe.offline is not None:
        problem = "it trains on recorded responses, in which no tool is called"
        raise UserError("`offline`", problem, "remove it, or the tools")


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe from `Recipe.as_dict`, completed by TRL's simple defaults."""
    return {**_defaults(ModelConfig), **_defaults(GRPOConfig), **values}


def model_config(recipe: Recipe) -> ModelConfig:
    """Return TRL's model arguments. Raise `RecipeError` for a combination that TRL refuses."""
    with recipe.naming_this_file((TypeError, ValueError)):
        return ModelConfig(**recipe.model)


@cache
def _defaults(config_class: type) -> dict[str, Any]:
    return {field.name: field.default for field in fields(config_class) if field.init and field.default is not MISSING}


# Files


def shipped_files(kind: str) -> dict[str, Path]:
    """Return the files that ship in `kind` (`recipes` or `accelerate_configs`) by name. Names are unique."""
    package = Path(__file__).parents[1]
    files: dict[str, Path] = {}
    for folder in (package / kind, package.parent / kind):  # an installed wheel, then a source checkout
        for file in sorted(folder.rglob("*.yaml"), key=lambda file: (len(file.parts), file)):
            files.setdefault(file.stem, file)
    return files


def shipped(kind: str, name: str) -> Path | None:
    """Return the file `name` (with or without `.yaml`) that ships in `kind`, or None."""
    return shipped_files(kind).get(name.removesuffix(".yaml"))


def find_file(kind: str, name: str) -> Path:
    """Return the file of a path, or of the name of a shipped file. Raise `RecipeError` if there is neither."""
    path = Path(name)
    if path.is_file():
        return path
    found = shipped(kind, name) if path.name == name else None
    if found is not None:
        return found
    if path.is_dir():
        raise RecipeError(name, "it is a folder", f"name a YAML file, or one that ships in {kind}/")
    problem = f"there is no such file{relative_to(name)}, and none of that name ships in {kind}/"
    raise RecipeError(name, problem, did_you_mean(name.removesuffix(".yaml"), shipped_files(kind), "correct the path"))


def _read_recipe(path: Path) -> dict[str, Any]:
    """Return the keys in a recipe's file. A `run.json` gives the recipe of its newest launch, without the resume."""
    if path.name != RECORD:
        return read_yaml(path)
    record = read_record(path.parent)
    assert record is not None, "find_file has found it"
    recipe = {key: value for key, value in record["recipe"].items() if key != "resume_from_checkpoint"}
    # Tokens of the hub are hidden in run.json. The hub's client finds its own again, in HF_TOKEN or from its log-in.
    if recipe.get("hub_token") == HIDDEN:
        del recipe["hub_token"]
    init = recipe.get("model_init_kwargs")
    if isinstance(init, dict) and init.get("token") == HIDDEN:
        recipe["model_init_kwargs"] = {key: value for key, value in init.items() if key != "token"}
    return recipe


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raise `RecipeError` for any other content."""
    if path.suffix in (".csv", ".tsv", ".jsonl", ".parquet"):
        raise RecipeError(path, "it is a table, not a recipe", f"write one for it with `grpo-recipes init {path}`")
    try:
        raw = load_yaml(read_text(path))
    except DuplicateKey as error:
        raise RecipeError(f"{path}: {error.place}", error.problem, error.fix) from error
    except UnreadableFile as error:
        raise RecipeError(path, f"it is not YAML: {error.problem}", error.fix) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(path, f"it is not YAML: {one_line(error)}", "correct it") from error
    if not isinstance(raw, dict):
        raise RecipeError(path, f"a recipe is a YAML mapping, not {type(raw).__name__}", "write `key: value` lines")
    return raw


# The command line


class _RecipeParser(TrlParser):
    """TRL's parser with a short error message instead of two screens of usage."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError("command line", message, "correct the arguments")


@cache
def _parser() -> _RecipeParser:
    """Return the parser of TRL's keys. It is made once, because making it takes longer than reading a recipe."""
    classes = DataClassType(GRPOConfig), DataClassType(ModelConfig)
    return _RecipeParser(classes, prog="python -m grpo_recipes.train", allow_abbrev=False)


def _split_arguments(args: Sequence[str]) -> tuple[Path | None, list[tuple[str, str]], list[str]]:
    """Return the recipe's path, the overrides of our and of nested keys, and the arguments for TRL's parser."""
    path, overrides, rest = None, [], []
    pending = list(args)
    while pending:
        word = pending.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        key = re.sub(r"(?<=\w)-", "_", name)  # `--max-steps`, but not the sign of a number
        # `optim` is read here because TRL's parser refuses our own optimizer.
        is_ours = word.startswith("--") and (key in ("config", "optim") or "." in key or key in OUR_KEYS)
        if not is_ours:
            rest.append(word)
            continue
        if not equals:
            if not pending or pending[0].startswith("--"):
                raise RecipeError(f"command line: `{word}`", "it needs a value", "give one")
            text = pending.pop(0)
        if key == "config":
            path = find_file("recipes", text)
        else:
            overrides.append((key, text))
    return path, overrides, rest


def _set_nested(raw: dict[str, Any], dotted: str, text: str) -> None:
    """Set `a.b.0.c` in nested mappings and lists. A word on the way becomes the mapping that it stands for."""
    *parents, last = dotted.split(".")
    with naming(f"command line: `--{dotted}`"):
        try:
            value = load_yaml(text)
        except DuplicateKey:
            raise
        except yaml.YAMLError:
            value = text
        node: Any = raw
        for depth, name in enumerate(parents):
            key = _entry(node, name, ".".join(parents[:depth]))
            if isinstance(node, dict):
                node.setdefault(key, {})
            if isinstance(node[key], (str, bool)):
                spec = specs.spec_of(hints(Recipe)[name]) if depth == 0 and name in OUR_KEYS else None
                if spec is not None:
                    # A word such as `off` sets several fields. The field on the command line replaces all of them.
                    node[key] = {} if spec.WORDS else spec.expand(node[key])
                elif isinstance(node[key], str):
                    node[key] = {"name": node[key]}
            node = node[key]
        node[_entry(node, last, ".".join(parents))] = value


def _entry(node: Any, name: str, place: str) -> str | int:
    """Return `name` as a key of the mapping `node`, or as an index of the list `node`."""
    if isinstance(node, dict):
        return name
    if not isinstance(node, list):
        shown = redacted({place: node})[place]
        raise UserError(f"`{place}`", f"it is {shown!r}, which has no keys", f"leave `.{name}` out")
    if not name.isdecimal() or int(name) >= len(node):
        raise UserError(f"`{place}`", f"it is a list and has no entry `{name}`", f"give an index below {len(node)}")
    return int(name)


def _values_for_trl(raw: Mapping[str, Any], args: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """Return the values of TRL's keys from the recipe and the command line, without any default."""
    hints_of_trl = hints(GRPOConfig) | hints(ModelConfig)
    values = {}
    for key, value in raw.items():
        if key in hints_of_trl:
            values[key] = specs.typed(key, value, hints_of_trl[key])
        elif key not in OUR_KEYS:
            raise UserError(f"`{key}`", "unknown key", _nearest_key(str(key)))
    parser = _parser()
    parser.set_defaults(**dict.fromkeys(hints_of_trl, _UNSET))
    parser.set_defaults_with_config(**values)
    namespace, unknown = parser.parse_known_args(list(args))
    if unknown:
        hint = _nearest_key(unknown[0].partition("=")[0], ["--config", *options])
        if Path(unknown[0]).is_file() or shipped("recipes", unknown[0]):
            hint = f"did you mean `--config {unknown[0]}`?"
        raise RecipeError(f"command line: `{unknown[0]}`", "unknown argument", hint)
    parsed = {key: value for key, value in vars(namespace).items() if value is not _UNSET}
    return trl_keys.normalized({**values, **parsed})


def _nearest_key(word: str, options: Sequence[str] = ()) -> str:
    """Return a question with the key or option nearest to `word`.

    Equally near keys are tried in this order: ours, the model's, those that TRL adds to transformers' trainer.
    """
    known = [*OUR_KEYS, *hints(ModelConfig), *inspect.get_annotations(GRPOConfig), *options, *hints(GRPOConfig)]
    inner = word.lstrip("-")
    if inner in DatasetSpec.hints():
        return f"did you mean `dataset.{inner}`?"
    return did_you_mean(word, known, otherwise="remove it")
