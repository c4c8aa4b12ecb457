"""Tools and environments of a recipe: imported, described by JSON schemas, and tried on the chat template.

TRL calls `get_json_schema` of transformers on each tool, renders calls and results by the chat template, and reads the
calls of a completion by the tokenizer's response template. Each of these may fail, some only after hours and without a
message. The functions here try all of them before a model is loaded.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema
from trl import chat_template_utils as trl_templates

from grpo_recipes.data.prompts import ENVIRONMENT, PromptTools
from grpo_recipes.process.faults import RunFault
from grpo_recipes.recipe.recipe import Recipe
from grpo_recipes.runs.weights import tokenizer_source
from grpo_recipes.tools.loop import suffix_ids
from grpo_rewards.errors import UserError, did_you_mean, one_line, shortened
from grpo_rewards.registry import BuiltReward, module_of_file

TOOLS, FACTORY = "tools", "environment_factory"
OWN_METHODS = ("reset", "get_reward")
"""Public methods of an environment that are no tools."""

ERROR_CHARS = 200
_EXAMPLES: Mapping[str, Any] = {"string": "a", "integer": 7, "number": 1.5, "boolean": True, "array": [], "object": {}}


@dataclass(frozen=True)
class Tool:
    """Function that the policy may call.

    Attributes:
        function: Function or method. A method of an environment is not bound to an instance.
        schema: JSON schema that the chat template describes.
    """

    function: Callable[..., Any]
    schema: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name under which the policy calls the tool."""
        return str(self.schema["function"]["name"])


@dataclass(frozen=True)
class Environment:
    """Environment of the rows that name it, or of all rows.

    Attributes:
        name: Value of the column `environment`, or None if all rows have this environment.
        path: Path of the factory in the recipe.
        factory: Class, or function that returns an instance.
        kind: Class of the instances, or None if a function of another package was not called.
        tools: Public methods, which the policy may call.
    """

    name: str | None
    path: str
    factory: Callable[[], Any]
    kind: type | None
    tools: tuple[Tool, ...]

    @property
    def scores(self) -> bool:
        """True if the environment has a reward of its own."""
        return inspect.isfunction(getattr(self.kind, "get_reward", None))


@dataclass(frozen=True)
class CheckedFactory:
    """Factory of environments whose `reset` raises `RunFault` if it fails, with the name of the environment.

    Attributes:
        path: Path of the factory in the recipe.
        factory: Class, or function that returns an instance.
    """

    path: str
    factory: Callable[[], Any]

    def __call__(self) -> Any:
        """Return a new instance."""
        instance = self.factory()
        with suppress(AttributeError, TypeError):  # an instance with slots keeps its own method
            instance.reset = partial(self._reset, instance.reset)
        return instance

    def _reset(self, reset: Callable[..., Any], **columns: Any) -> Any:
        place = f"{self.path}.reset"
        try:
            observation = reset(**columns)
        except (Exception, SystemExit) as error:  # the user's own method may raise any error
            raise RunFault(f"{place} raised {_described(error)}, for the row {_excerpt(columns)}") from error
        if fault := observation_fault(observation):
            raise RunFault(f"{place} {fault}, for the row {_excerpt(columns)}: return a text or None")
        return observation


def observation_fault(observation: object) -> str:
    """Return why what `reset` returned can't be added to a prompt, or ""."""
    if observation is None or isinstance(observation, str):
        return ""
    if not isinstance(observation, list):
        return f"returned the type {type(observation).__name__}"
    if not all(isinstance(block, Mapping) and "type" in block for block in observation):
        return "returned a list that does not consist of content blocks"
    return ""


def _excerpt(columns: Mapping[str, Any]) -> str:
    """Return the beginning of the question of a row, and of its other columns."""
    shown = dict(columns)
    if isinstance(prompt := shown.pop("prompt", None), list) and prompt:
        shown = {"prompt": prompt[-1].get("content"), **shown}
    return shortened(one_line(repr(shown)), ERROR_CHARS)


@dataclass(frozen=True)
class Toolset:
    """Tools and environments of a recipe.

    Attributes:
        tools: Tools of all rows.
        environments: Environments. Empty without `environment_factory`.
    """

    tools: tuple[Tool, ...] = ()
    environments: tuple[Environment, ...] = ()

    @property
    def functions(self) -> list[Callable[..., Any]] | None:
        """TRL's argument `tools`."""
        return [tool.function for tool in self.tools] or None

    @property
    def factory(self) -> Callable[[], Any] | dict[str, Callable[[], Any]] | None:
        """TRL's argument `environment_factory`."""
        if not self.environments:
            return None
        checked = {
            environment.name: CheckedFactory(environment.path, environment.factory) for environment in self.environments
        }
        return cast(Any, checked) if self.is_routed else checked[None]

    @property
    def is_routed(self) -> bool:
        """True if the column `environment` selects the environment of a row."""
        return any(environment.name is not None for environment in self.environments)

    @property
    def by_environment(self) -> dict[str | None, tuple[Tool, ...]]:
        """Tools of the rows of each environment, or of all rows under None."""
        if not self.environments:
            return {None: self.tools}
        return {environment.name: (*self.tools, *environment.tools) for environment in self.environments}

    @property
    def all_tools(self) -> list[Tool]:
        """Every tool once."""
        return [*self.tools, *(tool for environment in self.environments for tool in environment.tools)]

    @property
    def sources(self) -> dict[str, Callable[..., Any]]:
        """Code of tools and environments by its path or name, for the identity of a run."""
        code: dict[str, Callable[..., Any]] = {tool.name: tool.function for tool in self.tools}
        return code | {environment.path: environment.factory for environment in self.environments}

    def rewards(self) -> list[BuiltReward]:
        """Return the rewards that TRL adds for environments with `get_reward`: one per class, with the weight 1."""
        kinds = {one.kind: None for one in self.environments if one.scores}
        return [BuiltReward(cast(Any, kind).get_reward, 1.0, cast(type, kind).__name__) for kind in kinds]

    def describe(self, turns: int) -> str:
        """Return a clause on the tools and on how often they may be called."""
        parts = [tool.name for tool in self.tools]
        for environment in self.environments:
            methods = ", ".join(tool.name for tool in environment.tools) or "not built"
            prefix = "" if environment.name is None else f"{environment.name}: "
            parts.append(f"{prefix}{environment.path} ({methods})")
        return f"{', '.join(parts)}, in at most {turns} turn{'s' * (turns > 1)} of a completion"

    def in_prompts(self, chat_template: str | None = None) -> PromptTools:
        """Return the tools as the chat template describes them in prompts."""
        schemas = {name: [tool.schema for tool in tools] for name, tools in self.by_environment.items()}
        return PromptTools(schemas, chat_template)


@dataclass(frozen=True)
class TurnTokens:
    """Tokens that the turns of a completion take beside what the policy writes freely.

    Attributes:
        chat_template: Chat template with which TRL renders the turns, or None for the tokenizer's own.
        call: Number of tokens of the shortest turn with a call, its end token included.
        result: Number of tokens around one result, up to where the policy goes on.
    """

    chat_template: str | None
    call: int
    result: int

    def least(self, turns: int) -> int:
        """Return the smallest number of tokens of a completion with this many turns that call a tool."""
        return turns * (self.call + self.result)


# Functions and classes


def load_toolset(recipe: Recipe, *, call_factories: bool = True) -> Toolset | None:
    """Return the tools and environments of a recipe, or None if it has none.

    Args:
        recipe: Recipe to read.
        call_factories: True to make an instance of each environment, as TRL does. Otherwise environments are imported.

    Raises:
        UserError: A path can't be imported, or names no typed and documented function or environment.
    """
    if not recipe.uses_tools:
        return None
    return toolset_of(recipe.tools or [], recipe.environment_factory, call_factories=call_factories)


def toolset_of(
    paths: Sequence[str], factory: str | Mapping[str, Any] | None, *, call_factories: bool = True
) -> Toolset:
    """Return the tools and environments of a recipe's values. Arguments and errors are those of `load_toolset`."""
    tools = tuple(_tool(path, imported(path, TOOLS)) for path in paths)
    environments = []
    named: list[tuple[Any, Any]] = [(None, factory)] if isinstance(factory, str) else list((factory or {}).items())
    for name, path in named:
        if not isinstance(path, str) or not (isinstance(factory, str) or isinstance(name, str)):
            raise UserError(
                f"`{FACTORY}` must map names to paths of classes, as in {{game: my_envs.Game}}, not {path!r}"
            )
        environments.append(_environment(name, path, call_factories))
    toolset = Toolset(tools, tuple(environments))
    _check_names(toolset)
    return toolset


def imported(path: str, key: str) -> Any:
    """Return the object of a dotted path (`my_tools.calculator`) or of a place in a file (`tools.py:calculator`).

    Modules are found as those of rewards: in the working directory and among the installed packages.

    Raises:
        UserError: There is no such file, module or name, or importing it fails.
    """
    module, colon, attribute = path.rpartition(":")
    if colon:
        found = module_of_file(module, f"`{key}`: {path}")
    else:
        module, _, attribute = path.rpartition(".")
        if not module:
            raise UserError(f"`{key}`: {path!r} is no path: write module and name, as in `my_tools.{path or 'search'}`")
        try:
            found = importlib.import_module(module)
        except (Exception, SystemExit) as error:  # the user's own module may raise any error
            raise UserError(f"`{key}`: {path} can't be imported ({_described(error)}): correct it") from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            known = [one for one in getattr(found, "__dict__", ()) if not one.startswith("_")]
            raise UserError(f"`{key}`: {module} has no `{name}`{did_you_mean(name, known, otherwise=': correct it')}")
        found = getattr(found, name)
    return found


def _described(error: BaseException) -> str:
    text = shortened(one_line(error).rstrip("."), ERROR_CHARS)
    return text if isinstance(error, ImportError) and text else f"{type(error).__name__}: {text}"


def _tool(path: str, function: Any, key: str = TOOLS) -> Tool:
    """Return a tool with its schema. Raise `UserError` unless the function is typed and documented."""
    place = f"`{key}`: {path}"
    if inspect.isclass(function):
        raise UserError(f"{place} is a class: name it as `{FACTORY}`, or name a function")
    if not callable(function):
        raise UserError(f"{place} is of the type {type(function).__name__}, which can't be called: name a function")
    if not isinstance(getattr(function, "__name__", None), str):
        raise UserError(f"{place} has no `__name__`, by which the policy would call it: write a function with `def`")
    wrapped = inspect.unwrap(function)
    if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in (function, wrapped)):
        raise UserError(f"{place} is a generator, whose values the policy would not see: return a list or a text")
    if inspect.iscoroutinefunction(wrapped) and not inspect.iscoroutinefunction(function):
        raise UserError(
            f"{place} is asynchronous behind a decorator that is not, so that nothing waits for it: write the "
            "decorator's function with `async def`"
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
        schema = get_json_schema(function)
    except Exception as error:  # type hints are code, which may raise any error
        reason = shortened(one_line(error).rstrip(".!"), ERROR_CHARS)
        raise UserError(
            f"{place} has no schema that a prompt could show ({reason}): give each argument a type that JSON has, and "
            "describe the function, and each argument in a line under `Args:`, in the docstring"
        ) from error
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UserError(f"{place} takes `{parameter}`, which a call can't name: write each argument without * or /")
    if not schema["function"]["description"]:
        raise UserError(f"{place} has no description, by which the policy would know it: begin its docstring with one")
    return Tool(function, schema)


def _environment(name: str | None, path: str, call: bool) -> Environment:
    place = f"`{FACTORY}`: {path}"
    factory = imported(path, FACTORY)
    if not callable(factory):
        raise UserError(f"{place} is of the type {type(factory).__name__}, which makes no environments: name a class")
    kind = factory if inspect.isclass(factory) else None
    if call:
        try:
            kind = type(factory())
        except (Exception, SystemExit) as error:  # the user's own constructor may raise any error
            raise UserError(
                f"{place} makes no environment ({_described(error)}): TRL calls it without arguments"
            ) from error
    if kind is None:
        return Environment(name, path, factory, None, ())
    # As TRL looks for them: functions of the class, without properties and class methods.
    methods = dict(inspect.getmembers(kind, predicate=inspect.isfunction))
    if "reset" not in methods:
        raise UserError(f"{place} has no method `reset`, which begins an episode: add `def reset(self, **columns)`")
    if inspect.iscoroutinefunction(methods["reset"]):
        raise UserError(f"{place}: `reset` is asynchronous, and TRL does not wait for it: write it without `async`")
    tools = []
    for method_name, method in methods.items():
        if method_name not in OWN_METHODS and not method_name.startswith("_"):
            tools.append(_tool(f"{path}.{method_name}", method, FACTORY))
    return Environment(name, path, factory, kind, tuple(tools))


def _check_names(toolset: Toolset) -> None:
    """Raise `UserError` if an environment offers no tool, or two tools of a row have one name."""
    for name, tools in toolset.by_environment.items():
        known = all(one.kind is not None for one in toolset.environments if one.name == name)
        if not tools and known:
            path = next(one.path for one in toolset.environments if one.name == name)
            raise UserError(f"`{FACTORY}`: {path} has no public method that the policy could call: add one")
        check_unique(tool.name for tool in tools)


def check_unique(names: Iterable[str]) -> None:
    """Raise `UserError` if two tools of a row have one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UserError(f"two tools are named `{name}`, so that a call can't tell them apart: rename one")
        seen.add(name)


def check_rewards(toolset: Toolset | None, rewards: Sequence[BuiltReward]) -> None:
    """Raise `UserError` if there is no reward at all, or an environment's reward has the name of another one."""
    own = toolset.rewards() if toolset is not None else []
    names = {reward.name for reward in rewards}
    for reward in own:
        if reward.name in names:
            raise UserError(
                f"`{FACTORY}`: the reward of {reward.name} has the name of one in `rewards`: give that one an alias"
            )
    is_known = toolset is not None and all(one.kind is not None for one in toolset.environments)
    if not rewards and not own and is_known:
        raise UserError("`rewards` is missing, and no environment has a method `get_reward`: add one or the other")


# Rows


def check_rows(toolset: Toolset | None, datasets: Iterable[Dataset | None]) -> None:
    """Raise `UserError` for rows that the environments can't begin with, or prompts that hold no messages."""
    for dataset in datasets:
        if dataset is None:
            continue
        if ENVIRONMENT in dataset.column_names and (toolset is None or not toolset.is_routed):
            raise UserError(
                f"`dataset`: the column {ENVIRONMENT!r} selects one of several environments, and the recipe has no "
                f"mapping `{FACTORY}`: write one, or rename the column with `columns: {{other_name: {ENVIRONMENT}}}`"
            )
        if toolset is None:
            continue
        if isinstance(dataset[0]["prompt"], str):
            key = FACTORY if toolset.environments else TOOLS
            raise UserError(
                f"`{key}` needs messages, to which calls and results are added, and the prompts are text: set "
                "`dataset.prompt_format: conversational`"
            )
        _check_routing(toolset, dataset)
        _check_reset(toolset, dataset.column_names)


def _check_routing(toolset: Toolset, dataset: Dataset) -> None:
    if not toolset.is_routed:
        return
    known = [str(environment.name) for environment in toolset.environments]
    if ENVIRONMENT not in dataset.column_names:
        raise UserError(
            f"`{FACTORY}` is a mapping, and the dataset has no column {ENVIRONMENT!r} that names the environment of "
            f"each row: add it, or map one with `dataset.columns: {{{ENVIRONMENT}: ...}}`"
        )
    for value in dataset.unique(ENVIRONMENT):
        if value not in known:
            nearest = did_you_mean(str(value), known, otherwise=f": its names are {', '.join(known)}")
            raise UserError(
                f"`dataset`: the column {ENVIRONMENT!r} has {value!r}, which `{FACTORY}` does not name{nearest}"
            )


def _check_reset(toolset: Toolset, columns: Sequence[str]) -> None:
    """Raise `UserError` if `reset` can't take the columns of the dataset by name, as TRL passes them."""
    given = [column for column in columns if column != ENVIRONMENT]
    for environment in toolset.environments:
        if environment.kind is None:
            continue
        try:
            inspect.signature(environment.kind.reset).bind(None, **dict.fromkeys(given))  # type: ignore[attr-defined]
        except TypeError as error:
            raise UserError(
                f"`{FACTORY}`: {environment.path}.reset can't take the columns {', '.join(given)} by name ({error}): "
                "end its parameters in `**columns`"
            ) from error


# Chat template


def check_template(recipe: Recipe, toolset: Toolset, tokenizer: PreTrainedTokenizerBase) -> TurnTokens:
    """Try calls and results on the chat template, as TRL renders and reads them.

    The tokenizer's `response_template` is set if TRL knows its chat template, as TRL itself does.

    Raises:
        RecipeError: The template renders no calls, changes earlier turns, or its calls can't be read back, or the
            turns do not fit into a completion.
    """
    name = f"`model_name_or_path` {tokenizer_source(recipe.model['model_name_or_path'])}"
    if recipe.chat_template_path is not None:
        name = f"`chat_template_path` {recipe.chat_template_path}"
    with recipe.naming_this_file():
        tokens = try_template(name, toolset, tokenizer, recipe.config.chat_template_kwargs)
        _check_budget(recipe, tokens)
    return tokens


def try_template(
    name: str,
    toolset: Toolset,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any] | None = None,
) -> TurnTokens:
    """Try calls and results on the chat template of a model, as `check_template` does for that of a recipe.

    Args:
        name: Name of the model in messages.
        toolset: Tools to render.
        tokenizer: Tokenizer of the model. Its `response_template` is set if TRL knows its chat template.
        template_kwargs: TRL's `chat_template_kwargs`.

    Raises:
        UserError: The template renders no calls, changes earlier turns, or its calls can't be read back.
    """
    if not _renders_calls(tokenizer):
        raise UserError(
            f"{name}: its chat template renders no tool calls and results: use a model that was made for tools, or "
            "give a template that renders them with `chat_template_path` (docs/tools.md)"
        )
    if getattr(tokenizer, "response_template", None) is None and getattr(tokenizer, "response_schema", None) is None:
        try:
            trl_templates.add_response_schema(tokenizer)
        except ValueError as error:
            raise UserError(
                f"{name}: TRL does not know how its chat template writes a call: set `response_template` in its "
                "tokenizer_config.json (docs/tools.md)"
            ) from error
    chat_template = _training_template(name, tokenizer)
    template = _Template(tokenizer, chat_template, template_kwargs or {})
    shortest, result = [], []
    for tools in toolset.by_environment.values():
        for tool in tools:
            shortest.append(_read_back(name, template, tool, tools))
            result.append(_result_tokens(name, template, tool.name))
    return TurnTokens(chat_template, min(shortest, default=0), min(result, default=0))


def _renders_calls(tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        return trl_templates.supports_tool_calling(tokenizer)
    except Exception:  # a template is a program, and may raise any class
        return False


def _training_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the chat template that TRL uses in place of the tokenizer's, or None. Raise `UserError` without one."""
    try:
        if trl_templates.is_chat_template_prefix_preserving(tokenizer):
            return None
        return trl_templates.get_training_chat_template(tokenizer)
    except Exception as error:  # TRL's ValueError, or any error of the template
        raise UserError(
            f"{name}: its chat template writes earlier turns otherwise once a tool has answered, so that the policy "
            "would be trained on tokens that it never sampled: use a model whose template keeps them"
        ) from error


@dataclass(frozen=True)
class _Template:
    """Chat template with the arguments of a recipe."""

    tokenizer: PreTrainedTokenizerBase
    text: str | None
    kwargs: Mapping[str, Any]

    def ids(self, messages: Sequence[Mapping[str, Any]], *, is_prompt: bool, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the token IDs of messages."""
        tokens = self.tokenizer.apply_chat_template(
            cast(Any, list(messages)),
            tools=cast(Any, [tool.schema for tool in tools] or None),
            chat_template=self.text,
            add_generation_prompt=is_prompt,
            tokenize=True,
            return_dict=False,
            **self.kwargs,
        )
        return cast("list[int]", tokens)

    def up_to_end(self, ids: list[int]) -> list[int]:
        """Return the IDs up to the last end token, as a completion has them. Without one, return all."""
        end = self.tokenizer.eos_token_id
        return ids[: len(ids) - ids[::-1].index(end)] if end in ids else ids


def _read_back(name: str, template: _Template, tool: Tool, tools: Sequence[Tool]) -> int:
    """Return the number of tokens of a call of `tool`. Raise `UserError` unless TRL reads the call back as it was."""
    user: dict[str, Any] = {"role": "user", "content": "a"}
    arguments = _example(tool)
    call = {"type": "function", "function": {"name": tool.name, "arguments": arguments}}
    try:
        prompt = template.ids([user], is_prompt=True, tools=tools)
        turns = [user, {"role": "assistant", "content": "", "tool_calls": [call]}]
        full = template.ids(turns, is_prompt=False, tools=tools)
    except Exception as error:  # a template is a program, and may raise any class
        raise UserError(
            f"{name}: its chat template fails on a call of `{tool.name}` ({_described(error)}): use another model"
        ) from error
    # A prompt may end in a part of the turn, such as `<think>`, which the template writes otherwise once it is over.
    common = 0
    while common < min(len(prompt), len(full)) and prompt[common] == full[common]:
        common += 1
    completion = template.up_to_end(full[common:])
    schemas = [dict(one.schema) for one in tools]
    message = trl_templates.parse_response(template.tokenizer, completion, prefix=prompt, tools=cast(Any, schemas))
    read = [one.get("function", one) for one in message.get("tool_calls") or []]
    if [(one.get("name"), one.get("arguments")) for one in read] != [(tool.name, arguments)]:
        written = shortened(repr(template.tokenizer.decode(completion)), ERROR_CHARS)
        raise UserError(
            f"{name}: the call of `{tool.name}` that its chat template writes ({written}) is not read back as one: "
            "correct `response_template` in its tokenizer_config.json"
        )
    return len(completion)


def _example(tool: Tool) -> dict[str, Any]:
    """Return short arguments that fit a tool's schema, those with a default left out."""
    parameters = tool.schema["function"]["parameters"]
    return {name: _value(parameters["properties"][name]) for name in parameters.get("required", [])}


def _value(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    return _EXAMPLES.get(kind[0] if isinstance(kind, list) else kind, "a")


def _result_tokens(name: str, template: _Template, tool: str) -> int:
    """Return the number of tokens around an empty result."""
    result = {"role": "tool", "name": tool, "content": ""}
    try:
        return len(suffix_ids(template.tokenizer, [result], template.text, template.kwargs))
    except Exception as error:  # a template is a program, and may raise any class
        raise UserError(
            f"{name}: its chat template fails on the result of `{tool}` ({_described(error)}): remove "
            "`chat_template_kwargs`, or use another model"
        ) from error


def _check_budget(recipe: Recipe, tokens: TurnTokens) -> None:
    config = recipe.config
    turns, room = config.max_tool_calling_iterations, config.max_completion_length
    if tokens.least(turns) < room:
        return
    fitting = (room - 1) // tokens.least(1)
    lower = f"lower it to {fitting}, or " if fitting else ""
    raise UserError(
        f"`max_tool_calling_iterations` {turns} takes at least {tokens.least(turns):,} tokens ({tokens.call} for a "
        f"call and {tokens.result} around its result), and `max_completion_length` is {room:,}: {lower}raise "
        f"`max_completion_length` above {tokens.least(turns):,}"
    )
