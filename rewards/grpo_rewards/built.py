"""Rewards as a trainer takes them: a callable with a unique name, a weight, and what is declared about its scores."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_rewards.errors import UserError
from grpo_rewards.reward import BaseReward, FunctionReward, Kind, callable_name

Reward = Callable[..., Any]


class RewardSpecError(UserError):
    """Reward spec that can't be built. The place names the reward and the key."""


@dataclass(frozen=True)
class BuiltReward:
    """Reward as a trainer takes it, with `function.__name__ == name`, a unique name and a finite weight.

    `highest_pay` is the largest score of one completion, before the weight, or None if it is not known. `passes_at` is
    the smallest score of a completion that passes, or None if that is not known or the reward is one of this package,
    whose method `passed` decides.
    """

    function: Reward
    weight: float
    name: str
    kind: Kind = "other"
    highest_pay: float | None = None
    passes_at: float | None = None

    @property
    def unbound(self) -> Reward:
        """Reward without another name and bound arguments."""
        function = self.function
        while isinstance(function, BoundReward):
            function = function.function
        return function

    @property
    def declared(self) -> BaseReward:
        """Reward with the interface of the base class, also for a plain function."""
        reward = self.unbound
        return reward if isinstance(reward, BaseReward) else FunctionReward(self.function, reward)

    @property
    def needs_whole_groups(self) -> bool:
        """True if the reward compares the completions of a group."""
        return self.declared.needs_whole_groups

    @property
    def parts(self) -> tuple[BuiltReward, ...]:
        """Rewards that a sum or a gate is made of; empty for any other reward."""
        return self.declared.parts


@dataclass(frozen=True)
class BoundReward:
    """Reward under another name, or with arguments that every call adds. It is picklable if the reward is."""

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
    """Bound coroutine function. Trainers recognise it by its `async def __call__`."""

    async def __call__(self, *args: Any, **columns: Any) -> Any:
        """Await the reward with the bound arguments."""
        return await super().__call__(*args, **columns)


@dataclass(frozen=True)
class UnbuiltReward:
    """Placeholder for a reward of another package: imported, with checked arguments, but not built."""

    name: str
    kind: Kind | None = None
    needs_whole_groups: bool = False

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> Any:
        """Raise RewardSpecError, because the reward is not built yet."""
        raise RewardSpecError(f"reward `{self.name}`", "it was not built", "build it with `call_factories=True`")


def declared_kind(built: BuiltReward) -> Kind | None:
    """Return the kind that a reward declares; None for a function that declares none."""
    declared = built.declared
    return declared.declared_kind if isinstance(declared, FunctionReward) else declared.kind


def with_declarations(function: Reward, weight: float) -> BuiltReward:
    """Return a reward with its kind and largest score, as far as it declares them."""
    built = BuiltReward(function, weight, callable_name(function))
    if (kind := declared_kind(built)) is None:
        return built
    return replace(built, kind=kind, highest_pay=built.declared.highest_pay)


def with_arguments(reward: Reward, arguments: Mapping[str, Any], name: str | None = None) -> BoundReward:
    """Return a reward with arguments that every call adds, in place of the caller's, and perhaps another name."""
    bound = AsyncBoundReward if is_async(reward) else BoundReward
    return bound(reward, callable_name(reward) if name is None else name, arguments)


def is_async(reward: Reward) -> bool:
    """Return True if a call of a reward must be awaited."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
