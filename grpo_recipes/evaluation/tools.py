"""Tools and environments of a recipe in an evaluation: the turns of training's loop, with the evaluation's engine.

`tools/loop.py` and `tools/run.py` run the turns and the calls, as in training. Prompts, results and environments
are those of TRL's trainer (`_tokenize_prompts`, `_get_tool_suffix_ids`, `_generate_and_score_completions`).
"""

from __future__ import annotations

import inspect
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

from grpo_recipes.checks.tools import FACTORY, TOOLS, Toolset, check_rows, tool_methods, toolset_of, try_template
from grpo_recipes.data.rendering import ENVIRONMENT, rendered
from grpo_recipes.evaluation.accuracy import MeasuredReward
from grpo_recipes.evaluation.policy import Completions, ModelPolicy
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.recipe.specs import ToolLimits
from grpo_recipes.runs.completions import storable
from grpo_recipes.runs.identity import source_digest
from grpo_recipes.tools import examples, loop
from grpo_recipes.tools.loop import Ids, Message, Row, RowTools, ToolLoop, TurnLimits
from grpo_recipes.tools.metrics import last_calls
from grpo_recipes.tools.run import FailureWindow, ToolRunner
from grpo_rewards.completions import completion_text
from grpo_rewards.errors import UserError, one_line, shortened

ITERATIONS = "max_tool_calling_iterations"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecipeTools:
    """Tools and environments of a recipe, with their limits."""

    toolset: Toolset
    limits: ToolLimits
    iterations: int
    """TRL's `max_tool_calling_iterations`."""
    identity: Mapping[str, Any]
    """Facts by which an evaluation with these tools is recognised, for JSON."""


def tools_of(recipe: Mapping[str, Any], *, is_trusted: bool) -> RecipeTools | None:
    """Return the tools and environments of a recipe, or None if it has none.

    Args:
        recipe: Keys of the recipe, or of the record of its run.
        is_trusted: True if the user named the recipe. Of a stranger's run, only this package's own tools are imported.

    Raises:
        UserError: A value is invalid, or the tools are not trusted.
    """
    paths, factory = recipe.get(TOOLS) or [], recipe.get(FACTORY)
    if not (paths or factory):
        return None
    named = factory if isinstance(factory, Mapping) else {None: factory} if factory else {}
    for key, values in ((TOOLS, paths), (FACTORY, list(named.values()))):
        if not isinstance(values, list) or not all(isinstance(path, str) for path in values):
            fix = "name functions or classes by their paths"
            raise UserError(f"`{key}`", f"it is {shortened(repr(recipe[key]))}", fix)
        for path in values:
            module, _, name = path.rpartition(".")
            own = vars(examples).get(name) if module == examples.__name__ else None
            if not (is_trusted or getattr(own, "__module__", None) == examples.__name__):
                raise UserError(f"`{key}`", f"{path} is code that the run names", "give its recipe with --recipe")
    iterations = recipe.get(ITERATIONS)
    if not isinstance(iterations, int) or iterations < 1:
        raise UserError(f"`{ITERATIONS}`", f"it is {shortened(repr(iterations))}", "set it to at least 1")
    toolset = toolset_of(paths, factory)
    limits = ToolLimits.parse(recipe.get("tool_limits") or {})
    code = {name: source_digest(one) for name, one in toolset.sources.items()}
    identity = {
        TOOLS: paths,
        FACTORY: factory,
        "tool_limits": asdict(limits),
        ITERATIONS: iterations,
        "code": {name: digest for name, digest in code.items() if digest is not None},
    }
    return RecipeTools(toolset, limits, iterations, {key: value for key, value in identity.items() if value})


class TurnFormat:
    """Prompts, turns and results of a model as the trainer renders and reads them.

    Args:
        tools: Tools of the recipe.
        name: Name of the model.
        tokenizer: Tokenizer of the model. Its `response_template` is set if TRL knows its chat template.
        template_kwargs: TRL's `chat_template_kwargs`.

    Raises:
        UserError: The chat template does not support tools.
    """

    def __init__(
        self, tools: RecipeTools, name: str, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.chat_template = try_template(name, tools.toolset, tokenizer, template_kwargs)
        self.tokenizer, self.template_kwargs = tokenizer, dict(template_kwargs or {})
        self.in_prompts = tools.toolset.in_prompts(self.chat_template)

    def prompt_ids(self, prompt: Any, environment: str | None = None) -> Ids:
        """Return the token IDs of a prompt with the tools of an environment, or with those of all rows."""
        given = {**self.template_kwargs, **self.in_prompts.template_kwargs(environment)}
        return self.tokenizer(rendered(prompt, self.tokenizer, given), add_special_tokens=False)["input_ids"]

    def row(self, prompt: Ids, completion: Ids, functions: Sequence[Callable[..., Any]], name: str | None) -> Row:
        """Return the row of a first turn, with the tools of an environment, or with those of all rows."""
        schemas = self.in_prompts.template_kwargs(name)["tools"] or []
        tools = RowTools({function.__name__: function for function in functions}, schemas)
        return Row(prompt, completion, [self.parse(completion, prompt, schemas)], tools)

    def parse(self, ids: Ids, prefix: Ids, schemas: Sequence[Any]) -> Message:
        """Return the message of a turn."""
        return loop.read_turn(self.tokenizer, ids, prefix, list(schemas))

    def render(self, messages: Sequence[Message]) -> Ids:
        """Return the token IDs between the end of a turn with calls and the next turn."""
        return loop.suffix_ids(self.tokenizer, messages, self.chat_template, self.template_kwargs)


@dataclass(eq=False, kw_only=True)
class ToolPolicy(ModelPolicy):
    """Policy whose completions have the tools and environments of a recipe, in the turns of training's loop.

    Attributes:
        tools: Tools of the recipe.
    """

    tools: RecipeTools

    def __post_init__(self) -> None:
        self._failures = FailureWindow(self.tools.limits.failures)
        self._pool: dict[str | None, list[Any]] = {}

    @cached_property
    def format(self) -> TurnFormat:
        """Format of the model's turns."""
        return TurnFormat(self.tools, self.model.name, self.tokenizer, self.template_kwargs)

    @cached_property
    def runner(self) -> ToolRunner:
        """Runner of the calls."""
        return ToolRunner(self.tools.limits, loop.result_text(self.tokenizer, self.tools.limits.result_tokens))

    def complete(self, rows: Sequence[Mapping[str, Any]], settings: Settings) -> Completions:
        """Return a completion of each row of the dataset, in order.

        Raises:
            UserError: An environment's `reset` fails on a row, or too many calls of tools fail.
        """
        form, engine = self.format, self.engine
        environments = list(self.environments(rows))
        prompts = [row["prompt"] for row in rows]
        for number, environment in enumerate(environments):
            prompts[number] = self._observed(environment, rows[number])
        names = [self._name(row) for row in rows]
        ids = [form.prompt_ids(prompt, name) for prompt, name in zip(prompts, names, strict=True)]
        dialogs: list[Row] = []
        for number, completion in enumerate(engine.generate(ids, settings)):
            functions = [tool.function for tool in self.tools.toolset.tools]
            if environments:
                environment = environments[number]
                functions += [getattr(environment, method) for method in tool_methods(type(environment))]
            dialogs.append(form.row(ids[number], completion, functions, names[number]))
        play = ToolLoop(
            generate=partial(self._later_turn, dialogs, settings, itertools.count(1)),
            parse=form.parse,
            render=form.render,
            shorten=partial(loop.beginning, self.tokenizer),
            run=self.runner.run,
            limits=TurnLimits(self.tools.iterations, settings.max_new_tokens, engine.positions),
        )
        play(dialogs)
        loop.drop_abandoned(self._pool, environments, dialogs)
        self._failures.add([last_calls(dialogs)])
        for sentence in self._failures.without_success():
            logger.warning(sentence)
        if reason := self._failures.reason_to_stop():
            raise UserError(f"`{TOOLS}`", reason, "the same command continues afterwards")
        return _completions(prompts, dialogs, environments)

    def environments(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
        """Yield an environment for each row, or nothing if the recipe has none. Instances are used again, as in TRL."""
        taken: Counter[str | None] = Counter()
        kinds = {one.name: one.kind for one in self.tools.toolset.environments}
        for row in rows if kinds else ():
            name = self._name(row)
            pool = self._pool.setdefault(name, [])
            if taken[name] == len(pool):
                pool.append(kinds[name]())
            yield pool[taken[name]]
            taken[name] += 1

    def trial_row(self) -> dict[str, Any]:
        """Return the columns of a row on which a reward is tried, with the row's environment.

        Raises:
            UserError: The rows do not fit the tools, or the environment's `reset` fails on the row.
        """
        check_rows(self.tools.toolset, [self.dataset])
        row = self.dataset[0]
        for environment in self.environments([row]):
            self._observed(environment, row)
            row["environments"] = environment
        return row

    def rewards(self) -> list[MeasuredReward]:
        """Return the rewards of the environments, one for each class, as in TRL."""
        found: dict[type, MeasuredReward] = {}
        for one in self.tools.toolset.environments:
            if one.scores:
                is_async = inspect.iscoroutinefunction(getattr(one.kind, "get_reward", None))
                scores = partial(_awaited_scores_of if is_async else _scores_of, one.kind)
                spec = {"name": one.path, "alias": one.kind.__name__}
                found.setdefault(one.kind, MeasuredReward(one.kind.__name__, scores, None, spec))
        return list(found.values())

    def _name(self, row: Mapping[str, Any]) -> str | None:
        return row[ENVIRONMENT] if self.tools.toolset.is_routed else None

    def _observed(self, environment: Any, row: Mapping[str, Any]) -> Any:
        """Begin an episode with a row, and return the row's prompt with the text that `reset` returned."""
        given = {key: value for key, value in row.items() if key != ENVIRONMENT or not self.tools.toolset.is_routed}
        place = f"`{FACTORY}`: `reset` of {type(environment).__name__}"
        try:
            observation = environment.reset(**given)
        except (Exception, SystemExit) as error:  # the user's own method may raise any error
            reason = one_line(f"{type(error).__name__}: {error}")
            raise UserError(place, f"it fails on a held-out row ({reason})", "correct it") from error
        if not isinstance(observation, str | None):
            problem = f"it returned the type {type(observation).__name__} on a held-out row"
            raise UserError(place, problem, "return a text or None")
        *before, last = row["prompt"]
        return [*before, {**last, "content": last["content"] + observation}] if observation else row["prompt"]

    def _later_turn(
        self, dialogs: Sequence[Row], settings: Settings, numbers: Iterator[int], prompts: list[Ids]
    ) -> tuple[list[Ids], None]:
        """Return the next turn of the dialogs that end in a result, each as long as it has room.

        Args:
            dialogs: All dialogs of the loop.
            settings: Settings of the first turn.
            numbers: Numbers of the later turns.
            prompts: Token IDs that the next turns are generated from.
        """
        # With the first turn's seed, a turn would draw the same random numbers again.
        seed = settings.seed + (next(numbers) << 40)
        running = [row for row in dialogs if row.ending == "answered" and row.mask[-1] == 0]
        room = []
        for row, prompt in zip(running, prompts, strict=True):
            room.append(int(min(settings.max_new_tokens - len(row.completion), self.engine.positions - len(prompt))))
        return self.engine.generate(prompts, replace(settings, seed=seed), room), None


def _completions(prompts: Sequence[Any], dialogs: Sequence[Row], environments: Sequence[Any]) -> Completions:
    """Return finished dialogs as completions, with the columns of `completions.parquet` about turns."""
    given = [row.messages for row in dialogs]
    # No file can hold a lone surrogate.
    texts = [completion_text(messages).encode("utf-8", "backslashreplace").decode() for messages in given]
    conversations = [[*prompt, *messages] for prompt, messages in zip(prompts, given, strict=True)]
    columns: dict[str, list[Any]] = {
        "calls": [sum(len(turn) for turn in row.turns) for row in dialogs],
        "transcript": [json.dumps(turns, ensure_ascii=False) for turns in storable(conversations)],
    }
    return Completions(prompts, given, texts, environments, columns, dialogs)


def _scores_of(kind: Any, environments: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return the reward of each environment of a class, and None for the others."""
    return [one.get_reward() if type(one) is kind else None for one in environments]


async def _awaited_scores_of(kind: Any, environments: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return what `_scores_of` returns, for a class whose `get_reward` is asynchronous."""
    return [await one.get_reward() if type(one) is kind else None for one in environments]
