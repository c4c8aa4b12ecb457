"""Reward specs: what a recipe or a command line may say, turned into callables with unique names.

A spec is a name (registered, or a dotted path), or one of the mappings

    {name: gsm8k_correctness, weight: 1.0, alias: strict, kwargs: {extract: hashes}}
    {name: my_rewards.unit_tests, kind: correctness}
    {name: sum, rewards: [spec, ...], weight: 1.0, alias: total}
    {name: gate, reward: spec, only_if: spec, at_least: 1.0, weight: 1.0, alias: gated}

A class is always instantiated, with `kwargs` or with nothing. A plain function is the reward itself, unless `kwargs` is
given (even `{}`): then it is a factory and is called with them first. A ready dataclass instance is the reward itself,
with `kwargs` replacing its fields. A registered name stands for its class. `kind` says what a reward judges that does
not declare it itself.
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, get_args

from grpo_rewards.completions import check_rows
from grpo_rewards.errors import UserError, did_you_mean, one_line
from grpo_rewards.redaction import redacted, scrubbed, secret_values
from grpo_rewards.reward import BaseReward, FunctionReward, Kind, LogColumn, checked_number

ENTRY_POINT_GROUP = "grpo_rewards.rewards"

# Strings, so that asking for one reward imports neither the others nor, for `reward_model`, torch.
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
    "judge": "grpo_rewards.judge.JudgeScore",
}
# Kind and highest pay of the reward functions in `trl.rewards`, under their own names and those of their factories.
TRL_REWARDS: Mapping[str, tuple[Kind, float]] = {
    "accuracy_reward": ("correctness", 1.0),
    "reasoning_accuracy_reward": ("correctness", 1.0),
    "think_format_reward": ("format", 1.0),
    "get_soft_overlong_punishment": ("length", 0.0),
    "soft_overlong_punishment_reward": ("length", 0.0),
    "get_repetition_penalty_reward": ("other", 0.0),
    "repetition_penalty_reward": ("other", 0.0),
}
_SPEC_KEYS = ("name", "weight", "alias", "kind", "kwargs")
# What is made of other rewards, and its keys: not `kwargs`, since a part has its own.
_COMPOSED_KEYS: Mapping[str, tuple[str, ...]] = {
    "sum": ("name", "weight", "alias", "rewards"),
    "gate": ("name", "weight", "alias", "reward", "only_if", "at_least"),
}

Reward = Callable[..., Any]
Spec = str | Mapping[str, Any]


class RewardSpecError(UserError):
    """A reward spec that can't be built: one sentence naming the reward, the key and the fix."""


@dataclass(frozen=True)
class BuiltReward:
    """A reward as a trainer takes it: `function.__name__ == name`, unique in its list; `weight` is finite.

    `highest_pay` is the most that one completion can earn, before the weight; None where that is not known.
    """

    function: Reward
    weight: float
    name: str
    kind: Kind = "other"
    highest_pay: float | None = None

    @property
    def unbound(self) -> Reward:
        """Reward behind another name and bound arguments."""
        return _unbound(self.function)

    @property
    def declared(self) -> BaseReward:
        """Reward with its declarations: an instance of ours itself, a plain function behind the same interface."""
        return _declared(self.function)

    @property
    def needs_whole_groups(self) -> bool:
        """True if the reward compares the completions of a group."""
        return self.declared.needs_whole_groups


def _unbound(function: Reward) -> Reward:
    while isinstance(function, BoundReward):
        function = function.function
    return function


def _declared(function: Reward) -> BaseReward:
    reward = _unbound(function)
    return reward if isinstance(reward, BaseReward) else FunctionReward(function, reward)


def _declared_kind(function: Reward) -> Kind | None:
    declared = _declared(function)
    return declared.declared_kind if isinstance(declared, FunctionReward) else declared.kind


@dataclass(frozen=True)
class BoundReward:
    """A reward under another name, or with arguments that every call adds. Picklable if the reward is."""

    function: Reward
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **columns: Any) -> Any:
        """Call the reward with the bound arguments."""
        return self.function(*args, **{**columns, **self.arguments})


class AsyncBoundReward(BoundReward):
    """The same for a coroutine function, which trainers recognise by an `async def __call__`."""

    async def __call__(self, *args: Any, **columns: Any) -> Any:
        """Await the reward with the bound arguments."""
        return await super().__call__(*args, **columns)


def _log_under(log: Callable[[str, list], None], prefix: str, column: str, values: list) -> None:
    log(prefix + column, values)


@dataclass(frozen=True)
class UnbuiltReward:
    """A reward that somebody else's package would build: imported, its arguments checked, and not called."""

    name: str
    kind: Kind | None = None
    needs_whole_groups: bool = False

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> Any:
        """Refuse: there is nothing to call yet."""
        raise RewardSpecError(f"reward `{self.name}` was not built")


class ComposedReward(BaseReward):
    """A reward made of others: calls each part, logs it, and combines the scores of a row."""

    parts: tuple[BuiltReward, ...]

    @property
    def needs_whole_groups(self) -> bool:  # type: ignore[override]
        """True if any part compares the completions of a group."""
        return any(part.needs_whole_groups for part in self.parts)

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """Kind of what is paid, "other" for a mixture."""
        kinds = {part.kind for part in self.parts if part.weight != 0}
        return kinds.pop() if len(kinds) == 1 else "other"

    @property
    def highest_pay(self) -> float | None:
        """The most that a completion can earn; None where it is not known, as under a negative weight."""
        total = 0.0
        for part in self.parts:
            if part.weight == 0:
                continue
            if part.highest_pay is None or part.weight < 0:
                return None
            total += part.weight * part.highest_pay
        return total

    def __call__(
        self,
        prompts: Any = None,
        completions: Sequence[Any] = (),
        *,
        log_extra: LogColumn = None,
        log_metric: Callable[[str, float], None] | None = None,
        log_reason: LogColumn = None,
        **columns: Any,
    ) -> list[float | None]:
        """Score every completion by every part; `columns` and the logging callables reach each of them."""
        check_rows(self.name, completions=completions)
        columns.update(prompts=prompts, completions=completions)
        if log_metric is not None:
            columns["log_metric"] = log_metric
        scores = []
        for part in self.parts:
            for key, log in (("log_extra", log_extra), ("log_reason", log_reason)):
                if log is not None:
                    columns[key] = partial(_log_under, log, f"{self.name}/{part.name}/")
            scores.append(part.function(**columns))
            check_rows(part.name, completions=completions, scores=scores[-1])
        for part, column in zip(self.parts, scores, strict=True):
            label = f"{self.name}/{part.name}"
            scored = [score for score in column if score is not None]
            if log_extra is not None:
                log_extra(label, list(column))
            if log_metric is not None and scored:
                log_metric(f"rewards/{label}", sum(scored) / len(scored))
        if log_reason is not None:
            log_reason(f"{self.name}/reason", [self._reason(row) for row in zip(*scores, strict=True)])
        return [None if None in row else self._pay(row) for row in zip(*scores, strict=True)]

    def _pay(self, row: Sequence[float]) -> float:
        raise NotImplementedError

    def _reason(self, row: Sequence[float | None]) -> str:
        terms = (f"{part.weight:g} * {part.name}" for part in self.parts if part.weight != 0)
        unscored = [part.name for part, score in zip(self.parts, row, strict=True) if score is None]
        return f"{unscored[0]} has no score" if unscored else " + ".join(terms)


@dataclass(frozen=True)
class SumReward(ComposedReward):
    """The weighted sum of several rewards, as one.

    | row | pay |
    |---|---|
    | every part scores it | the sum of weight * part |
    | any part returns None | None |

    Each part is logged as a column `<name>/<part>` and as its mean over the rows that it scores.
    """

    parts: tuple[BuiltReward, ...]
    name: str = "sum"

    def _pay(self, row: Sequence[float]) -> float:
        return sum(part.weight * score for part, score in zip(self.parts, row, strict=True))


@dataclass(frozen=True)
class GateReward(ComposedReward):
    """A reward that pays only where another one does: a right answer earns nothing in the wrong format.

    | row | pay |
    |---|---|
    | `only_if` pays at least `at_least` (without that key: more than 0) | weight * reward |
    | `only_if` pays less | 0, or weight * reward where that is negative: a closed gate spares no penalty |
    | `only_if` or `reward` returns None, whether the gate is open or not | None |

    That a row is None whatever the gate says keeps a group together: a gold that can't be read would otherwise earn 0
    for the completions in the wrong format, and nothing at all for the others.

    Both parts are logged as columns `<name>/<part>` and as their means over the rows that they score. `only_if` has the
    weight 0: it is asked, and its score is not paid.
    """

    reward: BuiltReward
    only_if: BuiltReward
    at_least: float | None = None
    name: str = "gate"

    @property
    def parts(self) -> tuple[BuiltReward, ...]:  # type: ignore[override]
        """What is paid, and the condition."""
        return self.reward, self.only_if

    def _pay(self, row: Sequence[float]) -> float:
        score, condition = row
        paid = self.reward.weight * score
        return paid if self._opens(condition) else min(0.0, paid)

    def _opens(self, condition: float) -> bool:
        return condition > 0 if self.at_least is None else condition >= self.at_least

    def _reason(self, row: Sequence[float | None]) -> str:
        condition = row[1]
        if None in row or condition is None:
            return super()._reason(row)
        return f"{'open' if self._opens(condition) else 'closed'}: {self.only_if.name} pays {condition:g}"


def leaves(rewards: Iterable[BuiltReward], weight: float = 1.0) -> Iterator[BuiltReward]:
    """Yield the single rewards that `rewards` are made of, each with its weight in the total (times `weight`).

    A sum and a gate give their parts, `group_length` itself and the reward that tells it right from wrong. What is only
    asked and not paid, as the condition of a gate, has the weight 0.
    """
    for reward in rewards:
        reward = replace(reward, weight=weight * reward.weight)
        declared = reward.declared
        if isinstance(declared, ComposedReward):
            yield from leaves(declared.parts, reward.weight)
            continue
        yield reward
        yield from leaves(_built(asked, 0.0) for asked in declared.asks)


def build_rewards(
    specs: Sequence[Spec], *, num_generations: int | None = None, call_factories: bool = True
) -> list[BuiltReward]:
    """Build the rewards of a recipe.

    Args:
        specs: names or mappings, as in this module's docstring.
        num_generations: completions per prompt, handed to every reward that has such a field or parameter and was not
            given it in `kwargs`.
        call_factories: whether classes and factories that are not ours are called. If not, an `UnbuiltReward` stands
            for what they would make; their modules are imported in either case.

    Raises:
        RewardSpecError: an unknown name or key, an unknown or invalid kwarg, a reward that can't take `prompts` and
            `completions`, a weight that is not finite, or two rewards with one name.
    """
    if isinstance(specs, (str, Mapping)) or not isinstance(specs, Sequence):
        raise RewardSpecError(
            f"rewards must be a list of specs, not {redacted(specs)!r}: write `rewards: [gsm8k_correctness]`"
        )
    building = _Building(num_generations, call_factories)
    built = [_build(spec, building) for spec in specs]
    for name, count in Counter(reward.name for reward in built).items():
        if count > 1:
            raise RewardSpecError(f"{count} rewards are named `{name}`: give all but one an alias of its own")
    return _with_columns_apart(built)


@dataclass(frozen=True)
class _Building:
    """How `build_rewards` was asked to build, for the parts of a composed reward too."""

    num_generations: int | None
    call_factories: bool


def _with_columns_apart(built: list[BuiltReward]) -> list[BuiltReward]:
    """Prefix the logged columns where several rewards log some: TRL appends same-named columns to one another."""
    logging = [reward.name for reward in built if _has_field(reward.function, "prefix")]
    if len(logging) < 2:
        return built
    return [_with_prefix(reward) if reward.name in logging else reward for reward in built]


def _with_prefix(reward: BuiltReward) -> BuiltReward:
    function: Any = reward.function
    return replace(reward, function=replace(function, prefix=function.prefix or f"{reward.name}/"))


def spec_parts(spec: Any) -> list[Spec]:
    """Return the specs inside a spec: the parts of a `sum`, the reward and the condition of a `gate`, else none."""
    if not isinstance(spec, Mapping):
        return []
    return [*(spec.get("rewards") or []), *(spec[key] for key in ("reward", "only_if") if key in spec)]


def is_composed(spec: Any) -> bool:
    """Whether a spec is one of our rewards that are made of others, and names those."""
    return isinstance(spec, Mapping) and spec.get("name") in _COMPOSED_KEYS and bool(spec_parts(spec))


def fields_of_rewards(target: Any) -> tuple[str, ...]:
    """Return the names of the fields of one of our reward classes that may hold the spec of another reward."""
    is_ours = inspect.isclass(target) and issubclass(target, BaseReward)
    return target.reward_fields if is_ours or isinstance(target, BaseReward) else ()


def own_name(name: str) -> str | None:
    """The registered name of one of our rewards by any of its spellings, imported by none of them; None for another's."""
    return _OWN.get(name)


# A reward is known by its registered name, its class's path, and the paths of the ready instance of it.
_OWN: Mapping[str, str] = {
    spelling: name
    for name, path in REGISTERED.items()
    for spelling in (name, path, f"{path.rpartition('.')[0]}.{name}", f"grpo_rewards.{name}")
}


def registered_names() -> list[str]:
    """Return every name that a spec may use without a dotted path, ours and those of installed entry points."""
    return [*REGISTERED, *(name for name in _entry_points() if name not in REGISTERED)]


def resolve(name: str) -> Any:
    """Return what a reward name stands for: a class, a ready reward or a function.

    A registered name gives its class; an entry point or a dotted path whatever it points at.

    Raises:
        RewardSpecError: nothing has that name, or importing it failed.
    """
    if name not in REGISTERED and name in (points := _entry_points()):
        try:
            return points[name].load()
        except Exception as error:  # whatever a package of someone else's does
            raise RewardSpecError(f"reward `{name}`: its entry point can't be loaded ({_said(error)})") from error
    module, _, attribute = REGISTERED.get(name, name).rpartition(".")
    if not module:
        raise RewardSpecError(f"unknown reward `{name}`{did_you_mean(name, registered_names())}")
    imported = _import(module, name)
    try:
        return getattr(imported, attribute)
    except AttributeError as error:
        hint = did_you_mean(attribute, [known for known in vars(imported) if not known.startswith("_")])
        raise RewardSpecError(f"unknown reward `{name}`: `{module}` has no `{attribute}`{hint}") from error


def _import(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a module of the user's own may fail in any way
        if name in REGISTERED and isinstance(error, ImportError):
            lacking = error.name if isinstance(error, ModuleNotFoundError) else f"another version ({error})"
            raise RewardSpecError(f"reward `{name}` needs {lacking}: pip install 'grpo-rewards[models]'") from error
        raise RewardSpecError(f"reward `{name}`: the module `{module}` can't be imported ({_said(error)})") from error


def _said(error: Exception) -> str:
    """Return what an error says, on one line, with its kind unless that is to be expected."""
    text = one_line(error).rstrip(".")
    return text if isinstance(error, (ImportError, ValueError)) and text else f"{type(error).__name__}: {text}"


def _entry_points() -> dict[str, Any]:
    from importlib.metadata import entry_points  # a third of this package's import time, and rarely needed

    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _build(spec: Spec, building: _Building) -> BuiltReward:
    spec = {"name": spec} if isinstance(spec, str) else spec
    name = spec.get("name") if isinstance(spec, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RewardSpecError(f"a reward is a name or a mapping with the key `name`, not {redacted(spec)!r}")
    _check_keys(name, spec)
    weight = _checked(name, checked_number, spec.get("weight", 1.0), "weight")
    function: Reward
    if name == "sum":
        function = _build_sum(spec, building)
    elif name == "gate":
        function = _build_gate(spec, building)
    else:
        function = _instantiate(name, spec.get("kwargs"), building)
        _check_call(name, function)
    alias = spec.get("alias") or _callable_name(function)
    if not isinstance(alias, str):
        raise RewardSpecError(f"reward `{name}`: alias must be a string, not {alias!r}")
    built = _built(_named(function, alias), weight, name)
    return replace(built, kind=_kind(name, spec["kind"], function)) if "kind" in spec else built


def _built(function: Any, weight: float, spec_name: str = "") -> BuiltReward:
    """A reward with what it declares; what declares nothing may be one of TRL's."""
    built = BuiltReward(function, weight, _callable_name(function))
    if (kind := _declared_kind(function)) is not None:
        return replace(built, kind=kind, highest_pay=built.declared.highest_pay)
    package, _, attribute = spec_name.rpartition(".")
    if package.startswith("trl.") and attribute in TRL_REWARDS:
        kind, highest = TRL_REWARDS[attribute]
        return replace(built, kind=kind, highest_pay=highest)
    return built


def _kind(name: str, kind: Any, function: Any) -> Kind:
    if (declared := _declared_kind(function)) is not None:
        raise RewardSpecError(f"reward `{name}`: `kind` is {declared} and can't be set: remove it")
    if kind not in get_args(Kind):
        raise RewardSpecError(f"reward `{name}`: `kind` must be one of {', '.join(get_args(Kind))}, not {kind!r}")
    return kind


def _check_keys(name: str, spec: Mapping[str, Any]) -> None:
    allowed = _COMPOSED_KEYS.get(name, _SPEC_KEYS)
    for key in spec:
        if key not in allowed:
            hint = did_you_mean(str(key), allowed, f": its keys are {', '.join(allowed)}")
            raise RewardSpecError(f"reward `{name}`: unknown key `{key}`{hint}")


def _checked(name: str, check: Callable[..., Any], *args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return what `check` returns. Raise its error as one of the reward `name`, without the secrets in `kwargs`."""
    try:
        return check(*args)
    except Exception as error:  # a constructor of the user's own may fail in any way
        raise RewardSpecError(f"reward `{name}`: {scrubbed(_said(error), secret_values(kwargs))}") from error


def _build_sum(spec: Mapping[str, Any], building: _Building) -> SumReward:
    parts = build_rewards(spec.get("rewards", ()), **vars(building))
    if not parts:
        raise RewardSpecError("reward `sum`: the key `rewards` must list at least one reward to add")
    _refuse_parts("sum", parts)
    return SumReward(tuple(parts))


def _build_gate(spec: Mapping[str, Any], building: _Building) -> GateReward:
    for key, meaning in (("reward", "what is paid"), ("only_if", "the reward that must pay first")):
        if key not in spec:
            raise RewardSpecError(f"reward `gate`: the key `{key}` is missing: give it a reward, {meaning}")
    condition = spec["only_if"]
    if isinstance(condition, Mapping) and "weight" in condition:
        raise RewardSpecError("reward `gate`: the weight of `only_if` has no effect: set the gate's `at_least` instead")
    at_least = spec.get("at_least")
    if at_least is not None:
        at_least = _checked("gate", checked_number, at_least, "at_least")
    parts = build_rewards([spec["reward"], condition], **vars(building))
    _refuse_parts("gate", parts)
    return GateReward(parts[0], replace(parts[1], weight=0.0), at_least)


def _refuse_parts(name: str, parts: Iterable[BuiltReward]) -> None:
    for part in parts:
        if _is_async(part.function):
            raise RewardSpecError(
                f"reward `{name}`: `{part.name}` is asynchronous; list it beside the {name}, not in it"
            )


def _instantiate(name: str, kwargs: Any, building: _Building) -> Reward:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise RewardSpecError(f"reward `{name}`: kwargs must be a mapping of arguments, not {redacted(kwargs)!r}")
    target, num_generations = resolve(name), building.num_generations
    if inspect.isclass(target) or kwargs is not None:
        arguments = dict(kwargs or {})
        ready = is_dataclass(target) and not inspect.isclass(target)
        _check_arguments(name, type(target) if ready else target, arguments, num_generations)
        if own_name(name) is None and not building.call_factories:
            return _unbuilt(name, target)
        for key in fields_of_rewards(target):
            if isinstance(arguments.get(key), (str, Mapping)):  # a reward of its own, built as the others are
                arguments[key] = build_rewards([arguments[key]], **vars(building))[0].function
        reward = _checked(name, lambda: replace(target, **arguments) if ready else target(**arguments), kwargs=kwargs)
    else:
        reward = target if num_generations is None else _with_group_size(target, num_generations)
    if not callable(reward):
        raise RewardSpecError(f"reward `{name}` is a {type(reward).__name__}, which can't be called as a reward")
    return reward


def _unbuilt(name: str, target: Any) -> UnbuiltReward:
    """What stands for the reward that a class or a factory would make, as far as the class itself tells."""
    if inspect.isclass(target):
        call = next((vars(base)["__call__"] for base in target.__mro__ if "__call__" in vars(base)), None)
        if call is None:
            raise RewardSpecError(
                f"reward `{name}` is a class without `__call__`, so that it can't be called as a reward"
            )
        _check_call(name, partial(call, None))
    own = getattr(target, "name", None)
    kind = getattr(target, "kind", None)
    whole_groups = getattr(target, "needs_whole_groups", False) is True
    return UnbuiltReward(
        own if isinstance(own, str) and own else _callable_name(target),
        kind if kind in get_args(Kind) else None,
        whole_groups,
    )


def _check_call(name: str, reward: Reward) -> None:
    """Refuse what can't be called as trainers call a reward: a mistake is found, what the reward does is not judged."""
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # a builtin that does not tell
        return
    try:
        signature.bind_partial(prompts=[], completions=[])
    except TypeError as error:
        raise RewardSpecError(
            f"reward `{name}` can't take `prompts` and `completions` by name ({error}): a reward is called as "
            "`f(prompts=..., completions=..., **columns)`"
        ) from error


def _check_arguments(name: str, target: Any, arguments: dict[str, Any], num_generations: int | None) -> None:
    """Refuse what `target` does not take, and add `num_generations` where it takes that."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # not callable, or a builtin that does not tell
        return
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in arguments:
        if key not in parameters and not open_ended:
            hint = did_you_mean(str(key), parameters, f": it takes {', '.join(parameters) or 'none'}")
            raise RewardSpecError(f"reward `{name}`: unknown kwarg `{key}`{hint}")
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
        raise RewardSpecError(f"reward `{name}`: kwargs must give {', '.join(missing)}")


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
