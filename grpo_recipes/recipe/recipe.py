"""What a recipe may say: its keys, how it is read from a YAML file and the command line, and TRL's arguments from it.

A recipe is a YAML mapping: our own keys (`OUR_KEYS`) beside the keys of TRL's `GRPOConfig` and `ModelConfig`. The command
line overrides it, nested keys too: `--config quickstart --learning_rate 1e-5 --dataset.path train.jsonl`.
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
from trl import GRPOConfig, ModelConfig, TrlParser

from grpo_recipes.recipe import specs, trl_keys
from grpo_recipes.recipe.specs import (
    AdvantageRule,
    DatasetSpec,
    GenerationMode,
    KLEstimator,
    MicroBatching,
    OfflineSpec,
    RecipeError,
    ReferenceSpec,
    SamplingSpec,
    Spec,
    hints,
)
from grpo_recipes.runs.files import RECORD
from grpo_recipes.runs.record import read_record
from grpo_rewards.errors import UserError, did_you_mean
from grpo_rewards.files import UnreadableFile, read_text
from grpo_rewards.redaction import HIDDEN, hidden_places, redacted
from grpo_rewards.registry import BuiltReward, build_rewards
from grpo_rewards.strict import DuplicateKey, load_yaml

_UNSET = object()


@contextmanager
def naming(source: str, errors: tuple[type[Exception], ...] = (UserError,)) -> Iterator[None]:
    """Inside this block an error of these becomes a `RecipeError` that names `source` first."""
    try:
        yield
    except RecipeError:
        raise
    except errors as error:
        raise RecipeError(f"{source}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe whose keys and types are right; `checks.check` answers whether it can run."""

    # Our keys; each with what `--help` says of it.
    dataset: Annotated[
        DatasetSpec,
        "which rows, and how they become prompts: name, path, columns, split, eval_split, system_prompt, ...",
    ]
    rewards: Annotated[
        list[Any], "what is paid: names, or mappings of name, weight, alias, kwargs; `grpo-rewards list`"
    ]
    reference: Annotated[ReferenceSpec, "what the KL term ties the policy to: initial, base, or {adapter: FOLDER}"] = (
        field(default_factory=ReferenceSpec)
    )
    kl_estimator: Annotated[
        KLEstimator,
        "how that KL is measured: on the sampled tokens, as TRL does (sampled), or over the vocabulary (full)",
    ] = "sampled"
    micro_batching: Annotated[
        MicroBatching,
        "layout of the training passes: auto, off, or {layout: packed, trimmed or padded, skip_zero_advantage: true}",
    ] = field(default_factory=MicroBatching)
    generation: Annotated[
        GenerationMode, "whether transformers generates each prompt of a group once, where that is exact: auto, off"
    ] = "auto"
    sampling: Annotated[
        SamplingSpec | None,
        "which prompts are generated: all, or fewer of those without variance (informative, {informative: unbiased})",
    ] = None
    generation_check: Annotated[
        bool, "whether completions are compared with the policy, and the run stops where another one sampled them"
    ] = True
    advantages: Annotated[
        AdvantageRule | None, "rule for advantages in place of TRL's: max_rl divides by the group's mean reward"
    ] = None
    early_stopping_patience: Annotated[
        int | None,
        "how many evaluations in a row may be no better than the best before training stops (transformers' callback)",
    ] = None
    offline: Annotated[OfflineSpec | None, "recorded, scored responses in place of generation: group or batch"] = None

    source: str
    """The file, as error messages name it."""
    training: Mapping[str, Any]
    """Keys of `GRPOConfig` that the recipe sets, with our `DEFAULTS`."""
    model: Mapping[str, Any]
    """Keys of `ModelConfig` that the recipe sets."""
    arguments: Sequence[str] = ()
    """The command line that it was read from."""

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> Recipe:
        """Read a recipe's file, or the shipped one of this name, with keys that replace its own (`**{"dataset.path": ...}`).

        Raises `RecipeError` for what `parse_recipe` refuses.
        """
        given = {key: value if isinstance(value, str) else json.dumps(value) for key, value in overrides.items()}
        return parse_recipe(["--config", str(path), *(f"--{key}={text}" for key, text in given.items())])

    @cached_property
    def config(self) -> SimpleNamespace:
        """Every plain-valued key of `GRPOConfig`: the recipe's value or TRL's default."""
        return SimpleNamespace(**{**_defaults(GRPOConfig), **self.training})

    @property
    def output_dir(self) -> Path:
        """The run's folder."""
        return Path(self.training["output_dir"])

    @property
    def resumes(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self.training.get("resume_from_checkpoint") not in (None, "false")

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates on held-out prompts while it trains."""
        return self.config.eval_strategy != "no"

    @property
    def compares_whole_batch(self) -> bool:
        """Whether recorded responses are compared with the whole generation batch, one response a prompt."""
        return self.offline is not None and self.offline.compares_whole_batch

    def build_rewards(self, *, call_factories: bool = True) -> list[BuiltReward]:
        """The rewards, those of other packages built only if `call_factories`. Raises `RecipeError` for a wrong name or kwarg."""
        with self.naming_this_file():
            generations = self.config.num_generations
            return build_rewards(self.rewards, num_generations=generations, call_factories=call_factories)

    def naming_this_file(self, errors: tuple[type[Exception], ...] = (UserError,)) -> AbstractContextManager[None]:
        """A block in which an error of these becomes a `RecipeError` that names this recipe's file first."""
        return naming(self.source, errors)

    def error(self, sentence: str) -> RecipeError:
        """The error to raise about this recipe, its file named first."""
        return RecipeError(f"{self.source}: {sentence}")

    def as_dict(self) -> dict[str, Any]:
        """The recipe as resolved (file and command line), ready to be written as YAML or JSON and run again."""
        ours = {key: value for key in OUR_KEYS if (value := getattr(self, key)) is not None}
        written = {key: value.as_dict() if isinstance(value, Spec) else value for key, value in ours.items()}
        return {**self.model, **written, **self.training}


OUR_KEYS: Mapping[str, str] = {
    key: hint.__metadata__[0]
    for key, hint in get_type_hints(Recipe, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""Our keys, with what `--help` says of each."""


def parse_recipe(args: Sequence[str], options: Sequence[str] = ()) -> Recipe:
    """Read a recipe from command-line arguments: `--config FILE [--key value ...]`.

    An unknown argument may be meant for one of `options`, the command's own (`--gpu_memory`).

    Raises `RecipeError` for an unreadable file, an unknown key (naming the nearest), or a value of the wrong type.
    """
    if not args:
        raise RecipeError("command line: name a recipe: `--config FILE`, or one that ships, as `--config quickstart`")
    path, overrides, rest = _split_arguments(args)
    source = str(path) if path else "command line"
    raw = _read_recipe(path) if path else {}
    for dotted, text in overrides:
        _set_nested(raw, dotted, text)
    raw.setdefault("output_dir", f"runs/{path.stem if path else 'grpo'}")
    with naming(source):
        return _build(raw, _values_for_trl(raw, rest, options), source, args)


def _build(raw: dict[str, Any], values: Mapping[str, Any], source: str, args: Sequence[str]) -> Recipe:
    """The recipe of our keys in `raw` and of the `values` of TRL's. Raises `UserError`."""
    for key in ("model_name_or_path", "dataset", "rewards"):
        if not (values.get(key) or raw.get(key)):
            raise UserError(f"`{key}` is missing: add it to the recipe or pass `--{key}`")
    if values.get("reward_weights") is not None:
        raise UserError("`reward_weights` has no effect here: write `weight` inside each entry of `rewards`")
    if not isinstance(raw["rewards"], list):
        raw["rewards"] = [raw["rewards"]]
    ours = {key: specs.typed(key, value, hints(Recipe)[key]) for key, value in raw.items() if key in OUR_KEYS}
    recipe = Recipe(
        **ours,
        source=source,
        training={**trl_keys.DEFAULTS, **{key: value for key, value in values.items() if key in hints(GRPOConfig)}},
        model={key: value for key, value in values.items() if key in hints(ModelConfig)},
        arguments=args,
    )
    if hidden := next(hidden_places(recipe.as_dict()), None):
        raise UserError(
            f"`{hidden}` is the placeholder of a secret, which no file keeps: give it again with `--{hidden}`"
        )
    trl_keys.check_generation(recipe.config)
    if recipe.sampling is not None:
        recipe.sampling.check(recipe.config)
    trl_keys.check_objective(recipe.training, recipe.config, sampled_kl=recipe.kl_estimator == "sampled")
    trl_keys.check_advantages(recipe.advantages, recipe.config)
    if recipe.kl_estimator == "full" and recipe.config.beta == 0.0:
        raise UserError("`kl_estimator: full` needs a reference policy: set `beta` above 0")
    return recipe


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as `Recipe.as_dict` gives it, with TRL's default for every plain-valued key that it leaves out."""
    return {**_defaults(ModelConfig), **_defaults(GRPOConfig), **values}


def model_config(recipe: Recipe) -> ModelConfig:
    """TRL's model arguments. Raises `RecipeError` for a combination that TRL refuses."""
    with recipe.naming_this_file((TypeError, ValueError)):
        return ModelConfig(**recipe.model)


def shipped(kind: str, name: str) -> Path | None:
    """The file `name` (with or without `.yaml`) that ships in `kind` (`recipes` or `accelerate_configs`), if there is one."""
    wanted = name.removesuffix(".yaml")
    return next((file for file in _shipped_files(kind) if file.stem == wanted), None)


def _shipped_folders(kind: str) -> list[Path]:
    """Where files ship: in an installed wheel, in a source checkout."""
    package = Path(__file__).parents[1]
    return [package / kind, package.parent / kind]


def _shipped_files(kind: str) -> list[Path]:
    """All files that ship in `kind`; no two have one name, in whichever folder below it they lie."""
    found = (folder.rglob("*.yaml") for folder in _shipped_folders(kind))
    return [file for files in found for file in sorted(files, key=lambda file: (len(file.parts), file))]


def shipped_names(kind: str) -> list[str]:
    """The names of all files that ship in `kind`."""
    return [file.stem for file in _shipped_files(kind)]


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
def _defaults(config_class: type) -> dict[str, Any]:
    return {field.name: field.default for field in fields(config_class) if field.init and field.default is not MISSING}


def _split_arguments(args: Sequence[str]) -> tuple[Path | None, list[tuple[str, str]], list[str]]:
    """The recipe's path, the overrides of our and of nested keys, and the rest, which is TRL's."""
    path, overrides, rest = None, [], []
    pending = list(args)
    while pending:
        word = pending.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        key = re.sub(r"(?<=\w)-", "_", name)  # `--max-steps`, but not a number's sign
        # `optim` may be a name that TRL's parser does not know.
        ours = word.startswith("--") and (key in ("config", "optim") or key.split(".")[0] in OUR_KEYS or "." in key)
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
        return read_yaml(path)
    record = read_record(path.parent)
    assert record is not None, "find_file has found it"
    recipe = {key: value for key, value in record["recipe"].items() if key != "resume_from_checkpoint"}
    # The hub's client finds its own token again, in HF_TOKEN or from its log-in.
    if recipe.get("hub_token") == HIDDEN:
        del recipe["hub_token"]
    if isinstance(init := recipe.get("model_init_kwargs"), dict):
        recipe["model_init_kwargs"] = {key: value for key, value in init.items() if (key, value) != ("token", HIDDEN)}
    return recipe


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `RecipeError` for anything else."""
    try:
        raw = load_yaml(read_text(path))
    except DuplicateKey as error:
        raise RecipeError(f"{path}: {error}") from error
    except UnreadableFile as error:
        raise RecipeError(f"{path}: not YAML: {error.problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: a recipe is a YAML mapping of `key: value` lines, not {type(raw).__name__}")
    return raw


def _set_nested(raw: dict[str, Any], dotted: str, text: str) -> None:
    """Set `a.b.0.c` in nested mappings and lists; a plain value on the way becomes the mapping that it stands for.

    Raises `RecipeError` for a path that leads nowhere, or a key that `text` gives twice.
    """
    *parents, last = dotted.split(".")
    try:
        value = load_yaml(text)
    except DuplicateKey as error:
        raise RecipeError(f"command line: `--{dotted}`: {error}") from error
    except yaml.YAMLError:
        value = text
    node: Any = raw
    for depth, name in enumerate(parents):
        key = _entry(node, name, dotted, ".".join(parents[:depth]))
        if isinstance(node, dict):
            node.setdefault(key, {})
        if isinstance(node[key], (str, bool)):
            node[key] = _expanded(node[key], name if depth == 0 else "")
        node = node[key]
    node[_entry(node, last, dotted, ".".join(parents))] = value


def _expanded(value: str | bool, key: str) -> Any:
    """The mapping that a plain value stands for, as the value of `key` or as an entry of `rewards`.

    A word that stands for several settings (`auto`, `off`) is replaced by the field that is set.
    """
    spec = specs.spec_of(hints(Recipe)[key]) if key in OUR_KEYS else None
    if spec is not None and spec.WORDS:
        return {}  # of `sampling: informative` too, whose fields have the word's settings for defaults
    if spec is not None:
        return spec.expand(value)
    return {"name": value} if isinstance(value, str) else value


def _entry(node: Any, name: str, dotted: str, place: str) -> str | int:
    """`name` as a key of the mapping `node`, or as the number of an entry of the list `node`. Raises `RecipeError`."""
    if isinstance(node, dict):
        return name
    if not isinstance(node, list):
        raise RecipeError(
            f"command line: `--{dotted}`: `{place}` is {redacted({place: node})[place]!r}, which has no keys: leave `.{name}` out"
        )
    if not name.isdecimal() or int(name) >= len(node):
        has = f"its entries are numbered 0 to {len(node) - 1}" if node else "it has no entries"
        raise RecipeError(f"command line: `--{dotted}`: `{place}` is a list, and has no entry `{name}`: {has}")
    return int(name)


def _values_for_trl(raw: Mapping[str, Any], args: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """The keys of TRL's that the recipe or the command line gives, their values checked. Raises `UserError`."""
    theirs = hints(GRPOConfig) | hints(ModelConfig)
    for key in raw:
        if key not in OUR_KEYS and key not in theirs:
            raise UserError(f"unknown key `{key}`{_nearest_key(str(key))}")
    values = {key: specs.typed(key, value, theirs[key]) for key, value in raw.items() if key not in OUR_KEYS}
    values |= _parse_with_trl(values, args, options)
    return trl_keys.normalized(values)


def _nearest_key(word: str, options: Sequence[str] = ()) -> str:
    """The nearest key or option; of equals, ours, the model's and GRPO's before those of transformers' trainer."""
    known = [*OUR_KEYS, *hints(ModelConfig), *inspect.get_annotations(GRPOConfig), *options, *hints(GRPOConfig)]
    return did_you_mean(word, known, otherwise=": remove it")


def _parse_with_trl(values: Mapping[str, Any], args: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """What TRL's parser makes of the recipe's values and the command line, the latter winning, without any default."""
    parser = _Parser((GRPOConfig, ModelConfig), prog="python -m grpo_recipes.train", allow_abbrev=False)
    parser.set_defaults(**dict.fromkeys(hints(GRPOConfig) | hints(ModelConfig), _UNSET))
    parser.set_defaults_with_config(**values)
    namespace, unknown = parser.parse_known_args(list(args))
    if unknown:
        hint = _nearest_key(unknown[0].partition("=")[0], ["--config", *options])
        if Path(unknown[0]).is_file() or shipped("recipes", unknown[0]):
            hint = f": did you mean `--config {unknown[0]}`?"
        raise RecipeError(f"command line: unknown argument `{unknown[0]}`{hint}")
    return {key: value for key, value in vars(namespace).items() if value is not _UNSET}
