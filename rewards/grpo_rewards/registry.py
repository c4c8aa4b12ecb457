"""Reward specs: what a recipe or a command line may say, turned into callables with unique names.

A spec is a name (registered, or a dotted path), or one of the mappings

    {name: gsm8k_correctness, weight: 1.0, alias: strict, kwargs: {extract: hashes}}
    {name: sum, rewards: [spec, ...], weight: 1.0, alias: total}

A class is always instantiated, with `kwargs` or with nothing. A plain function is the reward itself, unless `kwargs` is
given (even `{}`): then it is a factory and is called with them first. A ready dataclass instance is the reward itself,
with `kwargs` replacing its fields. A registered name stands for its class.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

from grpo_rewards.format_tags import checked_number

ENTRY_POINT_GROUP = "grpo_rewards.rewards"

# Strings, so that asking for one reward imports neither the others nor, for `reward_model`, torch.
REGISTERED: Mapping[str, str] = {
    "gsm8k_correctness": "grpo_rewards.correctness:GSM8KCorrectness",
    "math_correctness": "grpo_rewards.correctness:MathCorrectness",
    "tag_structure": "grpo_rewards.format_tags:TagStructure",
    "tag_count": "grpo_rewards.format_tags:TagCount",
    "tag_presence": "grpo_rewards.format_tags:TagPresence",
    "well_formed": "grpo_rewards.format_tags:WellFormed",
    "group_length": "grpo_rewards.shaping:GroupLength",
    "reward_model": "grpo_rewards.reward_model:RewardModelScore",
    "json_schema": "grpo_rewards.schema:JsonSchema",
    "instructions": "grpo_rewards.ifeval:Instructions",
    "judge": "grpo_rewards.judge:JudgeScore",
}
_SPEC_KEYS = ("name", "weight", "alias", "kwargs")
_SUM_KEYS = ("name", "weight", "alias", "rewards")

Reward = Callable[..., Any]
Spec = str | Mapping[str, Any]


class RewardSpecError(ValueError):
    """A reward spec that can't be built: one sentence naming the reward, the key and the fix."""


@dataclass(frozen=True)
class BuiltReward:
    """A reward as a trainer takes it: `function.__name__ == name`, unique in its list; `weight` is finite."""

    function: Reward
    weight: float
    name: str


@dataclass(frozen=True)
class BoundReward:
    """A reward under another name, or with arguments that every call adds. Picklable if the reward is."""

    function: Reward
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def needs_whole_groups(self) -> bool:
        """Whether the reward compares the completions of a group."""
        return getattr(self.function, "needs_whole_groups", False)

    def __call__(self, *args: Any, **columns: Any) -> Any:
        """Call the reward with the bound arguments."""
        return self.function(*args, **{**columns, **self.arguments})


class AsyncBoundReward(BoundReward):
    """The same for a coroutine function, which trainers recognise by an `async def __call__`."""

    async def __call__(self, *args: Any, **columns: Any) -> Any:
        """Await the reward with the bound arguments."""
        return await super().__call__(*args, **columns)


def _log_under(log_extra: Callable[[str, list], None], prefix: str, column: str, values: list) -> None:
    log_extra(prefix + column, values)


@dataclass(frozen=True)
class SumReward:
    """The weighted sum of several rewards, as one.

    | row | pay |
    |---|---|
    | every part scores it | the sum of weight * part |
    | any part returns None | None |

    Each part is logged as a column `<name>/<part>` and as its mean over the rows that it scores.
    """

    parts: tuple[BuiltReward, ...]
    name: str = "sum"

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def needs_whole_groups(self) -> bool:
        """Whether any part compares the completions of a group."""
        return any(getattr(part.function, "needs_whole_groups", False) for part in self.parts)

    def __call__(
        self,
        prompts: Any = None,
        completions: Sequence[Any] = (),
        *,
        log_extra: Callable[[str, list], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Score every completion by every part; `columns` and the logging callables reach each of them."""
        if log_metric is not None:
            columns["log_metric"] = log_metric
        scores = []
        for part in self.parts:
            if log_extra is not None:
                columns["log_extra"] = partial(_log_under, log_extra, f"{self.name}/{part.name}/")
            scores.append(part.function(prompts=prompts, completions=completions, **columns))
        for part, column in zip(self.parts, scores, strict=True):
            label = f"{self.name}/{part.name}"
            scored = [score for score in column if score is not None]
            if log_extra is not None:
                log_extra(label, list(column))
            if log_metric is not None and scored:
                log_metric(f"rewards/{label}", sum(scored) / len(scored))
        return [self._total(row) for row in zip(*scores, strict=True)]

    def _total(self, row: Sequence[float | None]) -> float | None:
        total = 0.0
        for part, score in zip(self.parts, row, strict=True):
            if score is None:
                return None
            total += part.weight * score
        return total


def build_rewards(specs: Sequence[Spec], *, num_generations: int | None = None) -> list[BuiltReward]:
    """Build the rewards of a recipe.

    Args:
        specs: names or mappings, as in this module's docstring.
        num_generations: completions per prompt, handed to every reward that has such a field or parameter and was not
            given it in `kwargs`.

    Raises:
        RewardSpecError: an unknown name or key, an unknown or invalid kwarg, a weight that is not finite, or two
            rewards with one name.
    """
    if isinstance(specs, (str, Mapping)) or not isinstance(specs, Sequence):
        raise RewardSpecError(f"rewards must be a list of specs, not {specs!r}: write `rewards: [gsm8k_correctness]`.")
    built = [_build(spec, num_generations) for spec in specs]
    for name, count in Counter(reward.name for reward in built).items():
        if count > 1:
            raise RewardSpecError(f"{count} rewards are named {name!r}: give all but one an alias of its own.")
    return _with_columns_apart(built)


def _with_columns_apart(built: list[BuiltReward]) -> list[BuiltReward]:
    """Prefix the logged columns where several rewards log some: TRL appends same-named columns to one another."""
    logging = [reward.name for reward in built if _has_field(reward.function, "prefix")]
    if len(logging) < 2:
        return built
    return [_with_prefix(reward) if reward.name in logging else reward for reward in built]


def _with_prefix(reward: BuiltReward) -> BuiltReward:
    function: Any = reward.function
    return replace(reward, function=replace(function, prefix=function.prefix or f"{reward.name}/"))


def registered_names() -> list[str]:
    """Return every name that a spec may use without a dotted path, ours and those of installed entry points."""
    return [*REGISTERED, *(name for name in _entry_points() if name not in REGISTERED)]


def resolve(name: str) -> Any:
    """Return what a reward name stands for: a class, a ready reward or a function.

    A registered name gives its class; an entry point or a dotted path whatever it points at.

    Raises:
        RewardSpecError: nothing has that name, or importing it failed.
    """
    if name in REGISTERED:
        module, _, attribute = REGISTERED[name].partition(":")
        return getattr(_import(module, name), attribute)
    if name in (points := _entry_points()):
        try:
            return points[name].load()
        except (ImportError, AttributeError) as error:
            raise RewardSpecError(f"reward {name!r}: its entry point can't be loaded ({error}).") from error
    module, _, attribute = name.rpartition(".")
    if not module:
        raise RewardSpecError(f"unknown reward {name!r}{_nearest(name, registered_names())}.")
    try:
        return getattr(_import(module, name), attribute)
    except AttributeError as error:
        hint = _nearest(attribute, _public(module))
        raise RewardSpecError(f"unknown reward {name!r}: {module!r} has no {attribute!r}{hint}.") from error


def _public(module: str) -> list[str]:
    return [name for name in vars(importlib.import_module(module)) if not name.startswith("_")]


def _import(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RewardSpecError(f"reward {name!r}: the module {module!r} can't be imported ({error}).") from error


def _entry_points() -> dict[str, Any]:
    from importlib.metadata import entry_points  # a third of this package's import time, and rarely needed

    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _nearest(word: str, candidates: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(candidates), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _build(spec: Spec, num_generations: int | None) -> BuiltReward:
    spec = {"name": spec} if isinstance(spec, str) else spec
    name = spec.get("name") if isinstance(spec, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RewardSpecError(f"a reward is a name or a mapping with the key 'name', not {spec!r}.")
    _check_keys(name, spec)
    weight = _checked(name, checked_number, spec.get("weight", 1.0), "weight")
    function = (
        _build_sum(spec, num_generations) if name == "sum" else _instantiate(name, spec.get("kwargs"), num_generations)
    )
    alias = spec.get("alias") or _callable_name(function)
    if not isinstance(alias, str):
        raise RewardSpecError(f"reward {name!r}: alias must be a string, not {alias!r}.")
    return BuiltReward(_named(function, alias), weight, alias)


def _check_keys(name: str, spec: Mapping[str, Any]) -> None:
    allowed = _SUM_KEYS if name == "sum" else _SPEC_KEYS
    for key in spec:
        if key not in allowed:
            hint = _nearest(str(key), allowed) or f": its keys are {', '.join(allowed)}"
            raise RewardSpecError(f"reward {name!r}: unknown key {key!r}{hint}.")


def _checked(name: str, check: Callable[..., Any], *args: Any) -> Any:
    try:
        return check(*args)
    except (TypeError, ValueError) as error:
        raise RewardSpecError(f"reward {name!r}: {error}.") from error


def _build_sum(spec: Mapping[str, Any], num_generations: int | None) -> SumReward:
    parts = build_rewards(spec.get("rewards", ()), num_generations=num_generations)
    if not parts:
        raise RewardSpecError("reward 'sum': the key 'rewards' must list at least one reward to add.")
    for part in parts:
        if _is_async(part.function):
            raise RewardSpecError(f"reward 'sum': {part.name!r} is asynchronous; list it beside the sum, not in it.")
    return SumReward(tuple(parts))


def _instantiate(name: str, kwargs: Any, num_generations: int | None) -> Reward:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise RewardSpecError(f"reward {name!r}: kwargs must be a mapping of arguments, not {kwargs!r}.")
    target = resolve(name)
    if inspect.isclass(target) or kwargs is not None:
        arguments = dict(kwargs or {})
        ready = is_dataclass(target) and not inspect.isclass(target)
        _check_arguments(name, type(target) if ready else target, arguments, num_generations)
        reward = _checked(name, lambda: replace(target, **arguments) if ready else target(**arguments))
    else:
        reward = target if num_generations is None else _with_group_size(target, num_generations)
    if not callable(reward):
        raise RewardSpecError(f"reward {name!r} is a {type(reward).__name__}, which can't be called as a reward.")
    return reward


def _check_arguments(name: str, target: Any, arguments: dict[str, Any], num_generations: int | None) -> None:
    """Refuse what `target` does not take, and add `num_generations` where it takes that."""
    if not callable(target):
        return
    parameters = inspect.signature(target).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in arguments:
        if key not in parameters and not open_ended:
            hint = _nearest(str(key), parameters) or f": it takes {', '.join(parameters) or 'none'}"
            raise RewardSpecError(f"reward {name!r}: unknown kwarg {key!r}{hint}.")
    if num_generations is not None and "num_generations" in parameters:
        arguments.setdefault("num_generations", num_generations)
    missing = [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and key not in arguments
    ]
    if missing:
        raise RewardSpecError(f"reward {name!r}: kwargs must give {', '.join(map(repr, missing))}.")


def _with_group_size(reward: Reward, num_generations: int) -> Reward:
    if _has_field(reward, "num_generations"):
        return replace(reward, num_generations=num_generations)  # type: ignore[type-var]
    if callable(reward) and "num_generations" in inspect.signature(reward).parameters:
        return _bound(reward, _callable_name(reward), {"num_generations": num_generations})
    return reward


def _named(reward: Reward, name: str) -> Reward:
    if getattr(reward, "__name__", None) == name:
        return reward
    if _has_field(reward, "name"):
        return replace(reward, name=name)  # type: ignore[type-var]
    return _bound(reward, name, {})


def _has_field(reward: Any, name: str) -> bool:
    return is_dataclass(reward) and not isinstance(reward, type) and any(item.name == name for item in fields(reward))


def _bound(reward: Reward, name: str, arguments: Mapping[str, Any]) -> BoundReward:
    return (AsyncBoundReward if _is_async(reward) else BoundReward)(reward, name, arguments)


def _is_async(reward: Reward) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


def _callable_name(reward: Reward) -> str:
    """Return the name that TRL gives a callable (`trl.trainer.utils.get_callable_name`)."""
    while hasattr(reward, "func"):
        reward = reward.func
    return getattr(reward, "__name__", type(reward).__name__)
