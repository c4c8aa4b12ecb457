"""Tools and environments of a recipe in an evaluation: the turns of training's loop, with the evaluation's engine.

`tools/loop.py` and `tools/run.py` run the turns and the calls, as in training. Prompts, results and environments
are those of TRL's trainer (`_tokenize_prompts`, `_get_tool_suffix_ids`, `_generate_and_score_completions`).
"""

from __future__ import annotations

import inspect
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from grpo_recipes.checks.tools import (
    FACTORY,
    TOOLS,
    Toolset,
    tool_methods,
    toolset_of,
    try_template,
)
from grpo_recipes.data.prompts import ENVIRONMENT, rendered
from grpo_recipes.evaluation.accuracy import MeasuredReward
from grpo_recipes.evaluation.engines import Engine
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.recipe.specs import ToolLimits
from grpo_recipes.runs.completions import storable
from grpo_recipes.runs.identity import source_digest
from grpo_recipes.tools import examples
from grpo_recipes.tools.loop import (
    Generate,
    Ids,
    Message,
    Row,
    RowTools,
    ToolLoop,
    TurnLimits,
    beginning,
    drop_abandoned,
    read_turn,
    result_text,
    suffix_ids,
)
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
            if not (is_trusted or _is_own(path)):
                problem = f"{path} is code that the run names"
                raise UserError(f"`{key}`", problem, "give its recipe with --recipe")
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


def _is_own(path: str) -> bool:
    """Return True if a path names a tool or an environment that this package defines."""
    module, _, name = path.rpartition(".")
    return module == examples.__name__ and getattr(vars(examples).get(name), "__module__", None) == module


class Turns:
    """Prompts, calls and results of a model, as the trainer renders, reads and runs them.

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
        self.tools, self.tokenizer = tools, tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.in_prompts = tools.toolset.in_prompts(self.chat_template)
        cut = result_text(tokenizer, tools.limits.result_tokens)
        self.runner = ToolRunner(tools.limits, cut)

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
        return read_turn(self.tokenizer, ids, prefix, list(schemas))

    def render(self, messages: Sequence[Message]) -> Ids:
        """Return the token IDs between the end of a turn with calls and the next turn."""
        return suffix_ids(self.tokenizer, messages, self.chat_template, self.template_kwargs)

    def loop(self, generate: Generate, completion: int, positions: float) -> ToolLoop:
        """Return the loop of training with a generator.

        Args:
            generate: Generator of a turn.
            completion: Number of tokens of all turns and results of a row.
            positions: Number of tokens that the generator can read.
        """
        return ToolLoop(
            generate=generate,
            parse=self.parse,
            render=self.render,
            shorten=partial(beginning, self.tokenizer),
            run=self.runner.run,
            limits=TurnLimits(self.tools.iterations, completion, positions),
        )


@dataclass
class Played:
    """Completions of a batch of rows, with their turns."""

    prompts: list[Any]
    """Prompts as the policy saw them, with the text that an environment's `reset` added."""
    rows: list[Row]
    environments: list[Any] = field(default_factory=list)
    """Environment of each row. Empty without environments."""

    @property
    def completions(self) -> list[list[Message]]:
        """Messages of each completion, as a reward gets them."""
        return [row.messages for row in self.rows]

    @property
    def texts(self) -> list[str]:
        """Last message of the policy in each completion."""
        return [encodable(completion_text(messages)) for messages in self.completions]

    def columns(self) -> dict[str, list[Any]]:
        """Return the columns of `completions.parquet` about turns."""
        calls = [sum(len(turn) for turn in row.turns) for row in self.rows]
        conversations = [[*prompt, *row.messages] for prompt, row in zip(self.prompts, self.rows, strict=True)]
        transcripts = [json.dumps(turns, ensure_ascii=False) for turns in storable(conversations)]
        return {"calls": calls, "transcript": transcripts}


class Rollouts:
    """Completions with tools and environments, in the turns of training's loop.

    Args:
        tools: Tools of the recipe.
        load: Function that returns the turns of the model. It is called for the first batch, before `engine`.
        engine: Function that returns the engine.
    """

    def __init__(self, tools: RecipeTools, load: Callable[[], Turns], engine: Callable[[], Engine]) -> None:
        self.tools, self._load, self._engine = tools, load, engine
        self._turns: Turns | None = None
        self._failures = FailureWindow(tools.limits.failures)
        self._pool: dict[str | None, list[Any]] = {}

    def play(self, rows: Sequence[Mapping[str, Any]], settings: Settings) -> Played:
        """Return a completion of each row of the dataset, in order.

        Raises:
            UserError: An environment's `reset` fails on a row, or too many calls of tools fail.
        """
        if self._turns is None:
            self._turns = self._load()
        turns, engine = self._turns, self._engine()
        environments = list(self.environments(rows))
        prompts = [row["prompt"] for row in rows]
        for number, environment in enumerate(environments):
            prompts[number] = self._observed(environment, rows[number])
        names = [self._name(row) for row in rows]
        ids = [turns.prompt_ids(prompt, name) for prompt, name in zip(prompts, names, strict=True)]
        first = engine.generate(ids, settings)
        played = Played(prompts, [], environments)
        for number, completion in enumerate(first):
            functions = [tool.function for tool in self.tools.toolset.tools]
            if environments:
                environment = environments[number]
                functions += [getattr(environment, method) for method in tool_methods(type(environment))]
            played.rows.append(turns.row(ids[number], completion, functions, names[number]))
        later = _LaterTurns(played.rows, engine, settings)
        turns.loop(later, settings.max_new_tokens, engine.positions)(played.rows)
        drop_abandoned(self._pool, environments, played.rows)
        self._check_failures(played.rows)
        return played

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

    def trial_columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns that a reward gets beside those of the dataset, for a row on which it is tried.

        Raises:
            UserError: The environment's `reset` fails on the row.
        """
        for environment in self.environments([row]):
            self._observed(environment, row)
            return {"environments": environment}
        return {}

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
        is_routed = self.tools.toolset.is_routed
        given = {key: value for key, value in row.items() if not (is_routed and key == ENVIRONMENT)}
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

    def _check_failures(self, rows: Sequence[Row]) -> None:
        self._failures.add([last_calls(rows)])
        for sentence in self._failures.without_success():
            logger.warning(sentence)
        if reason := self._failures.reason_to_stop():
            raise UserError(f"`{TOOLS}`", reason, "the same command continues afterwards")


class _LaterTurns:
    """Generator of the turns after the first, each as long as its row has room.

    Args:
        rows: All rows of the loop.
        engine: Engine of the evaluation.
        settings: Settings of the first turn.
    """

    def __init__(self, rows: Sequence[Row], engine: Engine, settings: Settings) -> None:
        self.rows, self.engine, self.settings = rows, engine, settings
        self._turn = 0

    def __call__(self, prompts: list[Ids]) -> tuple[list[Ids], None]:
        """Return the next turn of the rows that end in a result."""
        self._turn += 1
        # With the first turn's seed, a turn would draw the same random numbers again.
        settings = replace(self.settings, seed=self.settings.seed + (self._turn << 40))
        running = [row for row in self.rows if row.ending == "answered" and row.mask[-1] == 0]
        room = []
        for row, prompt in zip(running, prompts, strict=True):
            left = settings.max_new_tokens - len(row.completion)
            room.append(int(min(left, self.engine.positions - len(prompt))))
        return self.engine.generate(prompts, settings, room), None


def encodable(text: str) -> str:
    """Return a text whose lone surrogates, which no file can hold, are written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _scores_of(kind: Any, environments: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return the reward of each environment of a class, and None for the others."""
    return [one.get_reward() if type(one) is kind else None for one in environments]


async def _awaited_scores_of(kind: Any, environments: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return what `_scores_of` returns, for a class whose `get_reward` is asynchronous."""
    return [await one.get_reward() if type(one) is kind else None for one in environments]
