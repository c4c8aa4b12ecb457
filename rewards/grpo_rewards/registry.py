"""Reward specs of recipes and command lines, built into callables with unique names.

A spec is a name (registered, or a dotted path), or one of the mappings

    {name: gsm8k_correctness, weight: 1.0, alias: strict, kwargs: {extract: hashes}}
    {name: my_rewards.unit_tests, kind: correctness, highest_pay: 1.0, passes_at: 1.0}
    {name: my_rewards.py:unit_tests}
    {name: sum, rewards: [spec, ...], weight: 1.0, alias: total}
    {name: gate, reward: spec, only_if: spec, at_least: 1.0, weight: 1.0, alias: gated}

A class is instantiated, with `kwargs` or without arguments. A plain function is the reward itself. With `kwargs` (even
`{}`) it is a factory, which is called with them. A dataclass instance is the reward itself, with `kwargs` replacing its
fields. A registered name stands for its class. `kind`, `highest_pay` and `passes_at` are declarations for a reward that
declares none: its kind, its largest score, and the smallest score of a completion that passes.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, get_args

from grpo_rewards.built import (
    BuiltReward,
    Reward,
    RewardSpecError,
    UnbuiltReward,
    declared_kind,
    is_async,
    with_arguments,
    with_declarations,
)
from grpo_rewards.composed import GateReward, SumReward
from grpo_rewards.errors import UserError, did_you_mean, one_line
from grpo_rewards.files import expanded
from grpo_rewards.redaction import redacted, scrubbed, secret_values
from grpo_rewards.reward import BaseReward, FunctionReward, Kind, callable_name, check_choice, checked_number

# Paths instead of classes, so that one reward is imported without the others, and without torch, which `reward_model`
# needs.
REGISTERED: Mapping[str, str] = {
    "gsm8k_correctness": "grpo_rewards.math.correctness.GSM8KCorrectness",
    "math_correctness": "grpo_rewards.math.correctness.MathCorrectness",
    "tag_structure": "grpo_rewards.format_tags.TagStructure",
    "tag_count": "grpo_rewards.format_tags.TagCount",
    "tag_presence": "grpo_rewards.format_tags.TagPresence",
    "well_formed": "grpo_rewards.format_tags.WellFormed",
    "group_length": "grpo_rewards.length.GroupLength",
    "reward_model": "grpo_rewards.reward_model.RewardModelScore",
    "choice_correctness": "grpo_rewards.choices.ChoiceCorrectness",
    "string_match": "grpo_rewards.strings.StringMatch",
    "repetition": "grpo_rewards.ngrams.Repetition",
    "json_schema": "grpo_rewards.schema.JsonSchema",
    "instructions": "grpo_rewards.ifeval.Instructions",
    "unit_tests": "grpo_rewards.programs.UnitTests",
    "judge": "grpo_rewards.judge.JudgeScore",
}
# Kind and largest score of the reward functions in `trl.rewards`, under their own names and those of their factories.
TRL_REWARDS: Mapping[str, tuple[Kind, float]] = {
    "accuracy_reward": ("correctness", 1.0),
    "reasoning_accuracy_reward": ("correctness", 1.0),
    "think_format_reward": ("format", 1.0),
    "get_soft_overlong_punishment": ("length", 0.0),
    "soft_overlong_punishment_reward": ("length", 0.0),
    "get_repetition_penalty_reward": ("other", 0.0),
    "repetition_penalty_reward": ("other", 0.0),
}
_SPEC_KEYS = ("name", "weight", "alias", "kind", "highest_pay", "passes_at", "kwargs")
# Keys of the rewards made of others. They have no `kwargs`: each part has its own.
_COMPOSED_KEYS: Mapping[str, tuple[str, ...]] = {
    "sum": ("name", "weight", "alias", "rewards"),
    "gate": ("name", "weight", "alias", "reward", "only_if", "at_least"),
}

RewardSpec = str | Mapping[str, Any]


def spec_parts(spec: Any) -> list[RewardSpec]:
    """Return the specs inside a spec: the parts of a `sum`, the reward and the condition of a `gate`, else none."""
    if not isinstance(spec, Mapping):
        return []
    return [*(spec.get("rewards") or []), *(spec[key] for key in ("reward", "only_if") if key in spec)]


def is_composed(spec: Any) -> bool:
    """Return True if a spec is a `sum` or a `gate` and names its parts."""
    return isinstance(spec, Mapping) and spec.get("name") in _COMPOSED_KEYS and bool(spec_parts(spec))


def fields_of_rewards(target: Any) -> tuple[str, ...]:
    """Return the names of the fields of one of our reward classes that may hold the spec of another reward."""
    is_ours = inspect.isclass(target) and issubclass(target, BaseReward)
    return target.reward_fields if is_ours or isinstance(target, BaseReward) else ()


def own_name(name: str) -> str | None:
    """Return the registered name of one of our rewards, without importing it, or None for any other reward.

    Args:
        name: registered name, path of the class, or path of the ready instance.
    """
    for registered, path in REGISTERED.items():
        module = path.rpartition(".")[0]
        if name in (registered, path, f"{module}.{registered}", f"grpo_rewards.{registered}"):
            return registered
    return None


def attribute_name(name: str) -> str:
    """Return the last part of a reward name: of a dotted path, or of a place in a file."""
    return re.split(r"[.:]", name)[-1]


def resolve(name: str) -> Any:
    """Return the object that a reward name stands for: a class, a ready reward or a function.

    A registered name stands for its class. A dotted path or a place in a file (`rewards.py:score`) stands for what it
    points at.

    Raises:
        RewardSpecError: no object has that name, or importing it failed.
    """
    module, colon, attribute = name.rpartition(":")
    if colon:
        imported = module_of_file(module, f"reward `{name}`")
    else:
        module, _, attribute = REGISTERED.get(name, name).rpartition(".")
        if not module:
            fix = did_you_mean(name, REGISTERED, "choose one that `grpo-rewards list` names")
            raise RewardSpecError(f"reward `{name}`", "there is none of that name", fix)
        imported = _import(module, name)
    try:
        return getattr(imported, attribute)
    except AttributeError as error:
        known = [known for known in vars(imported) if not known.startswith("_")]
        fix = did_you_mean(attribute, known, "correct the name")
        raise RewardSpecError(f"reward `{name}`", f"`{module}` has no `{attribute}`", fix) from error


def _import(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the user's own module may raise any error
        if name in REGISTERED and isinstance(error, ImportError):
            problem = f"it needs {missing_package(error)}"
            raise RewardSpecError(f"reward `{name}`", problem, "pip install 'grpo-rewards[models]'") from error
        problem = f"the module `{module}` can't be imported ({_described(error)})"
        raise RewardSpecError(f"reward `{name}`", problem, "correct the module or its name") from error


def module_of_file(file: str, place: str) -> Any:
    """Return the module of a Python file. A file with the same content is executed once in a process.

    Raises:
        RewardSpecError: the file can't be read or imported. The place of the error begins with `place`.
    """
    path = expanded(file)
    try:
        source = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        reason = getattr(error, "strerror", None) or error
        raise RewardSpecError(f"{place}: {file}", f"it can't be read ({reason})", "name a Python file") from error
    digest = hashlib.sha256(str(path.resolve()).encode() + b"\0" + source).hexdigest()[:16]
    module_name = f"{path.stem}_of_recipe_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    module = types.ModuleType(module_name)
    module.__file__ = str(path)
    sys.modules[module_name] = module  # `inspect` finds the source of a class by it
    try:
        # These bytes, not a compiled copy of earlier ones, and without the `__future__` imports of this file.
        exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    except BaseException as error:
        del sys.modules[module_name]
        if not isinstance(error, (Exception, SystemExit)):
            raise
        problem = f"it can't be imported ({_described(error)})"
        raise RewardSpecError(f"{place}: {file}", problem, "correct it") from error
    return module


def missing_package(error: ImportError) -> str | None:
    """Return the name of the package that an import lacks, or a phrase if the package has another version."""
    return error.name if isinstance(error, ModuleNotFoundError) else f"another version ({error})"


def _described(error: BaseException) -> str:
    """Return the text of an error on one line, with the name of its class if that is not to be expected."""
    text = one_line(error).rstrip(".")
    return text if isinstance(error, (ImportError, ValueError)) and text else f"{type(error).__name__}: {text}"


# --- Building ---


def build_rewards(
    specs: Sequence[RewardSpec], *, num_generations: int | None = None, call_factories: bool = True
) -> list[BuiltReward]:
    """Build the rewards of a recipe.

    Args:
        specs: names or mappings, as in this module's docstring.
        num_generations: completions per prompt. Every reward that has such a field or parameter gets it, unless
            `kwargs` sets it.
        call_factories: True to call classes and factories that are not ours. Otherwise their modules are imported, and
            an `UnbuiltReward` stands for each reward that they would make.

    Raises:
        RewardSpecError: an unknown name or key, an unknown or invalid kwarg, a reward that can't take `prompts` and
            `completions`, a weight that is not finite, or two rewards with one name.
    """
    return _Builder(num_generations, call_factories).build_all(specs)


@dataclass(frozen=True)
class _Builder:
    """Builder of rewards and of their parts, with the arguments of `build_rewards`."""

    num_generations: int | None
    call_factories: bool

    def build_all(self, specs: Sequence[RewardSpec]) -> list[BuiltReward]:
        if isinstance(specs, (str, Mapping)) or not isinstance(specs, Sequence):
            problem = f"it is {redacted(specs)!r}, not a list of specs"
            raise RewardSpecError("`rewards`", problem, "write `rewards: [gsm8k_correctness]`")
        built = [self.build(spec) for spec in specs]
        for name, count in Counter(reward.name for reward in built).items():
            if count > 1:
                raise RewardSpecError(f"reward `{name}`", f"{count} have this name", "give all but one an own alias")
        return _with_separate_columns(built)

    def build(self, spec: RewardSpec) -> BuiltReward:
        spec = {"name": spec} if isinstance(spec, str) else spec
        name = spec.get("name") if isinstance(spec, Mapping) else None
        if not isinstance(name, str) or not name:
            problem = f"{redacted(spec)!r} is neither a name nor a mapping with the key `name`"
            raise RewardSpecError("`rewards`", problem, "write one of the two")
        allowed = _COMPOSED_KEYS.get(name, _SPEC_KEYS)
        for key in spec:
            if key not in allowed:
                fix = did_you_mean(str(key), allowed, f"choose from {', '.join(allowed)}")
                raise RewardSpecError(f"reward `{name}`: `{key}`", "there is no such key", fix)
        weight = _checked(name, checked_number, spec.get("weight", 1.0), "weight")
        function: Reward
        if name == "sum":
            function = self.build_sum(spec)
        elif name == "gate":
            function = self.build_gate(spec)
        else:
            function = self.build_single(name, spec.get("kwargs"))
        alias = spec.get("alias") or callable_name(function)
        if not isinstance(alias, str):
            raise RewardSpecError(f"reward `{name}`: `alias`", f"it is {alias!r}, not a string", "write a name")
        if getattr(function, "__name__", None) != alias:
            if _has_field(function, "name"):
                function = replace(function, name=alias)  # type: ignore[type-var]
            else:
                function = with_arguments(function, {}, alias)
        built = with_declarations(function, weight)
        package, _, attribute = name.rpartition(".")
        if declared_kind(built) is None and package.startswith("trl.") and attribute in TRL_REWARDS:
            kind, highest_pay = TRL_REWARDS[attribute]
            built = replace(built, kind=kind, highest_pay=highest_pay)
        return _with_spec(built, name, spec)

    def build_sum(self, spec: Mapping[str, Any]) -> SumReward:
        parts = self.build_all(spec.get("rewards", ()))
        if not parts:
            raise RewardSpecError("reward `sum`: `rewards`", "there is no reward to add", "list at least one")
        _check_synchronous("sum", parts)
        return SumReward(tuple(parts))

    def build_gate(self, spec: Mapping[str, Any]) -> GateReward:
        for key in ("reward", "only_if"):
            if key not in spec:
                raise RewardSpecError(f"reward `gate`: `{key}`", "it is missing", "set it to a reward")
        condition, at_least = spec["only_if"], spec.get("at_least")
        if isinstance(condition, Mapping) and "weight" in condition:
            raise RewardSpecError("reward `gate`: `only_if`", "its weight has no effect", "set the gate's `at_least`")
        if at_least is not None:
            at_least = _checked("gate", checked_number, at_least, "at_least")
        parts = self.build_all([spec["reward"], condition])
        _check_synchronous("gate", parts)
        return GateReward(parts[0], replace(parts[1], weight=0.0), at_least)

    def build_single(self, name: str, kwargs: Any) -> Reward:
        if kwargs is not None and not isinstance(kwargs, Mapping):
            problem = f"it is {redacted(kwargs)!r}, not a mapping of arguments"
            raise RewardSpecError(f"reward `{name}`: `kwargs`", problem, "write `{argument: value}`")
        target = resolve(name)
        if inspect.isclass(target) or kwargs is not None:
            reward = self.instantiate(name, target, kwargs or {})
        else:
            reward = _with_group_size(target, self.num_generations)
        if not callable(reward):
            problem = f"it is a {type(reward).__name__}, which can't be called"
            raise RewardSpecError(f"reward `{name}`", problem, "name a function or a class")
        _check_call(name, reward)
        return reward

    def instantiate(self, name: str, target: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the reward that a class, a factory or a ready dataclass instance makes of `kwargs`."""
        is_instance = is_dataclass(target) and not inspect.isclass(target)
        make = partial(replace, target) if is_instance else target
        arguments = _checked_arguments(name, type(target) if is_instance else target, kwargs, self.num_generations)
        if own_name(name) is None and not self.call_factories:
            declared = FunctionReward(target, target)
            own = getattr(target, "name", None)
            own_or_callable = own if isinstance(own, str) and own else declared.name
            return UnbuiltReward(own_or_callable, declared.declared_kind, declared.needs_whole_groups)
        for key in fields_of_rewards(target):
            if isinstance(arguments.get(key), (str, Mapping)):
                arguments[key] = self.build_all([arguments[key]])[0].function
        return _checked(name, lambda: make(**arguments), kwargs=kwargs)


def _checked(name: str, check: Callable[..., Any], *args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return `check(*args)`. Raise its error as one of the reward `name`, without the secrets in `kwargs`."""
    try:
        return check(*args)
    except (Exception, SystemExit) as error:  # the user's own constructor may raise any error
        parts = ("", _described(error), "correct its spec")
        if isinstance(error, UserError):
            parts = (error.place, error.problem, error.fix)
        place, problem, fix = (scrubbed(one_line(part), secret_values(kwargs)) for part in parts)
        raise RewardSpecError(f"reward `{name}`{place and f': {place}'}", problem, fix) from error


def _with_spec(built: BuiltReward, name: str, spec: Mapping[str, Any]) -> BuiltReward:
    """Return a reward with the declarations of its spec."""
    # Each of our rewards knows which completions pass, also those for which no smallest score exists.
    declared = {"kind": declared_kind(built), "highest_pay": built.highest_pay, "passes_at": own_name(name)}
    for key, value in declared.items():
        if key in spec and value is not None:
            raise RewardSpecError(f"reward `{name}`: `{key}`", "the reward declares it", "remove it from the spec")
    if "kind" in spec:
        _checked(name, check_choice, spec["kind"], "kind", get_args(Kind))
        built = replace(built, kind=spec["kind"])
    if "highest_pay" in spec:
        built = replace(built, highest_pay=_checked(name, checked_number, spec["highest_pay"], "highest_pay"))
    if "passes_at" not in spec:
        is_judge = built.kind == "correctness" and own_name(name) is None and not built.parts
        return replace(built, passes_at=built.highest_pay) if is_judge else built
    most = math.inf if built.highest_pay is None else built.highest_pay
    return replace(built, passes_at=_checked(name, checked_number, spec["passes_at"], "passes_at", -math.inf, most))


def _with_separate_columns(built: list[BuiltReward]) -> list[BuiltReward]:
    """Prefix the logged columns if several rewards log some: TRL appends columns of one name to one another."""
    if sum(_has_field(reward.function, "prefix") for reward in built) < 2:
        return built
    separate = []
    for reward in built:
        function: Any = reward.function
        if _has_field(function, "prefix"):
            reward = replace(reward, function=replace(function, prefix=function.prefix or f"{reward.name}/"))
        separate.append(reward)
    return separate


def _check_synchronous(name: str, parts: Iterable[BuiltReward]) -> None:
    for part in parts:
        if is_async(part.function):
            fix = f"list it beside the {name}, not in it"
            raise RewardSpecError(f"reward `{name}`: `{part.name}`", "it is asynchronous", fix)


def _check_call(name: str, reward: Reward) -> None:
    """Raise RewardSpecError if `reward` can't be called with the arguments that trainers pass to a reward."""
    signature = _signature(reward)
    try:
        if signature is not None:
            signature.bind_partial(prompts=[], completions=[])
    except TypeError as error:
        problem = f"it can't take `prompts` and `completions` by name ({error})"
        fix = "write it as `f(prompts=..., completions=..., **columns)`"
        raise RewardSpecError(f"reward `{name}`", problem, fix) from error


def _checked_arguments(
    name: str, target: Any, kwargs: Mapping[str, Any], num_generations: int | None
) -> dict[str, Any]:
    """Return `kwargs`, with `num_generations` if `target` takes it. Raise RewardSpecError for a wrong argument."""
    arguments = dict(kwargs)
    signature = _signature(target)
    if signature is None:
        return arguments
    parameters = signature.parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    for key in arguments:
        if key not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
            fix = did_you_mean(str(key), parameters, f"choose from {', '.join(parameters) or 'none'}")
            raise RewardSpecError(f"reward `{name}`: `{key}`", "there is no such kwarg", fix)
    if num_generations is not None and "num_generations" in parameters:
        arguments.setdefault("num_generations", num_generations)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise RewardSpecError(f"reward `{name}`: `kwargs`", str(error), "correct them") from error
    return arguments


def _signature(target: Any) -> inspect.Signature | None:
    """Return a signature, or None for what is not callable, and for a builtin without a signature."""
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


def _with_group_size(reward: Reward, num_generations: int | None) -> Reward:
    if num_generations is None:
        return reward
    if _has_field(reward, "num_generations"):
        return replace(reward, num_generations=num_generations)  # type: ignore[type-var]
    if callable(reward) and "num_generations" in inspect.signature(reward).parameters:
        return with_arguments(reward, {"num_generations": num_generations})
    return reward


def _has_field(reward: Any, name: str) -> bool:
    return is_dataclass(reward) and not isinstance(reward, type) and any(item.name == name for item in fields(reward))
