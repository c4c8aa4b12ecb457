"""Tools and environments of a recipe: imported, described by JSON schemas, and tried on the chat template.

TRL calls `get_json_schema` of transformers on each tool, renders calls and results by the chat template, and reads the
calls of a completion by the tokenizer's response template. The functions here try these before a model is loaded, on
functions and classes only: no tool is called, and no environment is made.
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema
from trl import chat_template_utils as trl_templates

from grpo_recipes.data.rendering import ENVIRONMENT, PromptTools
from grpo_recipes.recipe.recipe import Recipe
from grpo_recipes.runs.weights import tokenizer_source
from grpo_recipes.tools.transcript import alike
from grpo_rewards.errors import UserError, did_you_mean, one_line, shortened
from grpo_rewards.registry import BuiltReward, module_of_file

TOOLS, FACTORY = "tools", "environment_factory"
OWN_METHODS = ("reset", "get_reward")
"""Public methods of an environment that are not tools."""

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
        path: Path of the class in the recipe.
        kind: Class of the instances.
        tools: Public methods, which the policy may call.
    """

    name: str | None
    path: str
    kind: type
    tools: tuple[Tool, ...]

    @property
    def scores(self) -> bool:
        """True if the environment has a reward of its own."""
        return inspect.isfunction(getattr(self.kind, "get_reward", None))


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
        kinds = {environment.name: environment.kind for environment in self.environments}
        return cast(Any, kinds) if self.is_routed else kinds[None]

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
        return code | {environment.path: environment.kind for environment in self.environments}

    def rewards(self) -> list[BuiltReward]:
        """Return the rewards that TRL adds for environments with `get_reward`: one per class, with the weight 1."""
        kinds = {one.kind: None for one in self.environments if one.scores}
        return [BuiltReward(cast(Any, kind).get_reward, 1.0, kind.__name__) for kind in kinds]

    def describe(self, turns: int) -> str:
        """Return a clause on the tools and on how often they may be called."""
        parts = [tool.name for tool in self.tools]
        for environment in self.environments:
            methods = ", ".join(tool.name for tool in environment.tools)
            prefix = "" if environment.name is None else f"{environment.name}: "
            parts.append(f"{prefix}{environment.path} ({methods})")
        return f"{', '.join(parts)}, in at most {turns} turn{'s' * (turns > 1)} of a completion"

    def in_prompts(self, chat_template: str | None = None) -> PromptTools:
        """Return the tools as the chat template describes them in prompts."""
        schemas = {name: [tool.schema for tool in tools] for name, tools in self.by_environment.items()}
        return PromptTools(schemas, chat_template)


# Functions and classes


def load_toolset(recipe: Recipe) -> Toolset | None:
    """Return the tools and environments of a recipe, or None if it has none.

    Raises:
        UserError: A path can't be imported, or names no typed and documented function or environment.
    """
    return toolset_of(recipe.tools or [], recipe.environment_factory) if recipe.uses_tools else None


def toolset_of(paths: Sequence[str], factory: str | Mapping[str, Any] | None) -> Toolset:
    """Return the tools and environments of a recipe's values. Errors are those of `load_toolset`."""
    tools = tuple(_tool(path, _imported(path, TOOLS)) for path in paths)
    named: Mapping[Any, Any] = {None: factory} if isinstance(factory, str) else factory or {}
    environments = []
    for name, path in named.items():
        if not isinstance(path, str) or not (isinstance(factory, str) or isinstance(name, str)):
            fix = "map names to paths of classes, as in {game: my_envs.Game}"
            raise UserError(f"`{FACTORY}`", f"{path!r} is not the path of a class under a name", fix)
        environments.append(_environment(name, path))
    toolset = Toolset(tools, tuple(environments))
    for offered in toolset.by_environment.values():
        check_unique(tool.name for tool in offered)
    return toolset


def check_unique(names: Iterable[str]) -> None:
    """Raise `UserError` if two tools of a row have one name."""
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f"`{TOOLS}`", f"two are named `{name}`, so that a call can't tell them apart", "rename one")


def _imported(path: str, key: str) -> Any:
    """Return the object of a dotted path (`my_tools.calculator`) or of a place in a file (`tools.py:calculator`).

    Modules are found as those of rewards: in the working directory and among the installed packages.
    """
    module, colon, attribute = path.rpartition(":" if ":" in path else ".")
    if colon == ":":
        found = module_of_file(module, f"`{key}`: {path}")
    else:
        try:
            found = importlib.import_module(module)
        except (Exception, SystemExit) as error:  # the user's own module may raise any error
            problem = f"it can't be imported ({_described(error)})"
            raise UserError(f"`{key}`: {path}", problem, "write module and name, as in `my_tools.search`") from error
    if not hasattr(found, attribute):
        hint = did_you_mean(attribute, [name for name in vars(found) if not name.startswith("_")], "correct it")
        raise UserError(f"`{key}`: {path}", f"{module} has no `{attribute}`", hint)
    return getattr(found, attribute)


def _described(error: BaseException) -> str:
    text = shortened(one_line(error).rstrip("."), ERROR_CHARS)
    return text if isinstance(error, ImportError) and text else f"{type(error).__name__}: {text}"


def _tool(path: str, function: Any, key: str = TOOLS) -> Tool:
    """Return a tool with its schema. Raise `UserError` unless the function is typed and documented."""
    place = f"`{key}`: {path}"
    if not inspect.isroutine(function):
        raise UserError(place, "it is not a function", f"name one, or name a class as `{FACTORY}`")
    wrapped = inspect.unwrap(function)
    is_late = inspect.iscoroutinefunction(wrapped) and not inspect.iscoroutinefunction(function)
    if is_late or inspect.isgeneratorfunction(wrapped) or inspect.isasyncgenfunction(wrapped):
        problem = (
            "it is a generator, or asynchronous behind a decorator that is not: the policy would not see its value"
        )
        raise UserError(place, problem, "return a value, and write the decorator's function with `async def` too")
    try:
        schema = get_json_schema(function)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise ValueError(f"a call can't name `{parameter}`")
    except Exception as error:  # type hints are code, which may raise any error
        reason = shortened(one_line(error).rstrip(".!"), ERROR_CHARS)
        fix = (
            "give each argument a type that JSON has, and describe the function, and each argument in a line under "
            "`Args:`, in the docstring"
        )
        raise UserError(place, f"it has no schema that a prompt could show ({reason})", fix) from error
    return Tool(function, schema)


def _environment(name: str | None, path: str) -> Environment:
    kind = _imported(path, FACTORY)
    reset = getattr(kind, "reset", None)
    if not inspect.isclass(kind) or not inspect.isfunction(reset) or inspect.iscoroutinefunction(reset):
        problem = "it is not a class with a method `reset`, which begins an episode"
        fix = "name a class, and add `def reset(self, **columns)` without `async`"
        raise UserError(f"`{FACTORY}`: {path}", problem, fix)
    tools = [_tool(f"{path}.{method}", getattr(kind, method), FACTORY) for method in tool_methods(kind)]
    return Environment(name, path, kind, tuple(tools))


def tool_methods(kind: type) -> list[str]:
    """Return the names of an environment's methods that are tools, as TRL selects them: functions of the class."""
    names = [name for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)]
    return [name for name in names if name not in OWN_METHODS and not name.startswith("_")]


def check_any_reward(toolset: Toolset | None, rewards: Sequence[BuiltReward]) -> None:
    """Raise `UserError` if there is no reward at all."""
    if not rewards and not (toolset is not None and toolset.rewards()):
        problem = "it is missing, and no environment has a method `get_reward`"
        raise UserError("`rewards`", problem, "add one or the other")


# Rows


def check_rows(toolset: Toolset | None, datasets: Iterable[Dataset | None]) -> None:
    """Raise `UserError` for rows with which no environment can begin, or for prompts without messages."""
    for dataset in datasets:
        if dataset is None:
            continue
        if ENVIRONMENT in dataset.column_names and (toolset is None or not toolset.is_routed):
            problem = f"it selects one of several environments, and the recipe has no mapping `{FACTORY}`"
            fix = f"write one, or rename the column with `columns: {{other_name: {ENVIRONMENT}}}`"
            raise UserError(f"`dataset`: column {ENVIRONMENT!r}", problem, fix)
        if toolset is None:
            continue
        if isinstance(dataset[0]["prompt"], str):
            key = FACTORY if toolset.environments else TOOLS
            problem = "it needs messages, to which calls and results are added, and the prompts are text"
            raise UserError(f"`{key}`", problem, "set `dataset.prompt_format: conversational`")
        _check_routing(toolset, dataset)
        _check_reset(toolset, dataset.column_names)


def _check_routing(toolset: Toolset, dataset: Dataset) -> None:
    if not toolset.is_routed:
        return
    known = [str(environment.name) for environment in toolset.environments]
    if ENVIRONMENT not in dataset.column_names:
        problem = f"it is a mapping, and the dataset has no column {ENVIRONMENT!r} with the environment of each row"
        raise UserError(f"`{FACTORY}`", problem, f"add it, or map one with `dataset.columns: {{{ENVIRONMENT}: ...}}`")
    for value in dataset.unique(ENVIRONMENT):
        if value not in known:
            nearest = did_you_mean(str(value), known, otherwise=f"choose from {', '.join(known)}")
            problem = f"it has {value!r}, which `{FACTORY}` does not name"
            raise UserError(f"`dataset`: column {ENVIRONMENT!r}", problem, nearest)


def _check_reset(toolset: Toolset, columns: Sequence[str]) -> None:
    """Raise `UserError` if `reset` can't take the columns of the dataset by name, as TRL passes them."""
    given = [column for column in columns if column != ENVIRONMENT]
    for environment in toolset.environments:
        try:
            inspect.signature(environment.kind.reset).bind(None, **dict.fromkeys(given))  # type: ignore[attr-defined]
        except TypeError as error:
            problem = f"it can't take the columns {', '.join(given)} by name ({error})"
            place = f"`{FACTORY}`: {environment.path}.reset"
            raise UserError(place, problem, "end its parameters in `**columns`") from error


# Chat template


def check_template(recipe: Recipe, toolset: Toolset, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Try calls and results on the chat template, as TRL renders and reads them.

    The tokenizer's `response_template` is set if TRL knows its chat template, as TRL itself does.

    Returns:
        Chat template with which TRL renders the turns, or None for the tokenizer's own.

    Raises:
        RecipeError: The template renders no calls, changes earlier turns, or its calls can't be read back.
    """
    name = f"`model_name_or_path`: {tokenizer_source(recipe.model['model_name_or_path'])}"
    if recipe.chat_template_path is not None:
        name = f"`chat_template_path`: {recipe.chat_template_path}"
    with recipe.naming_this_file():
        return try_template(name, toolset, tokenizer, recipe.config.chat_template_kwargs)


def try_template(
    name: str, toolset: Toolset, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None
) -> str | None:
    """Try calls and results on the chat template of a model, as `check_template` does for that of a recipe.

    Args:
        name: Name of the model in messages.
        toolset: Tools to render.
        tokenizer: Tokenizer of the model. Its `response_template` is set if TRL knows its chat template.
        template_kwargs: TRL's `chat_template_kwargs`.

    Raises:
        UserError: The template renders no calls, changes earlier turns, or its calls can't be read back.
    """
    if not trl_templates.supports_tool_calling(tokenizer):
        fix = "use a model made for tools, or a template that renders them with `chat_template_path` (docs/tools.md)"
        raise UserError(name, "its chat template renders no tool calls and results", fix)
    if getattr(tokenizer, "response_template", None) is None and getattr(tokenizer, "response_schema", None) is None:
        try:
            trl_templates.add_response_schema(tokenizer)
        except ValueError as error:
            fix = "set `response_template` in its tokenizer_config.json (docs/tools.md)"
            raise UserError(name, "TRL does not know how its chat template writes a call", fix) from error
    try:
        preserves = trl_templates.is_chat_template_prefix_preserving(tokenizer)
        chat_template = None if preserves else trl_templates.get_training_chat_template(tokenizer)
    except Exception as error:  # TRL's ValueError, or any error of the template
        problem = (
            "its chat template writes earlier turns otherwise once a tool has answered, so that the policy would be "
            "trained on tokens that it never sampled"
        )
        raise UserError(name, problem, "use a model whose template keeps them") from error
    options = {"chat_template": chat_template, "tokenize": True, "return_dict": False, **(template_kwargs or {})}
    render = partial(tokenizer.apply_chat_template, **options)
    for tools in toolset.by_environment.values():
        for tool in tools:
            _read_back(name, tokenizer, render, tool, [dict(one.schema) for one in tools])
    return chat_template


def _read_back(
    name: str, tokenizer: PreTrainedTokenizerBase, render: Callable[..., Any], tool: Tool, schemas: list[Any]
) -> None:
    """Raise `UserError` unless TRL reads a call of `tool` back as it was."""
    user: dict[str, Any] = {"role": "user", "content": "a"}
    arguments = _example(tool)
    call = {"type": "function", "function": {"name": tool.name, "arguments": arguments}}
    try:
        prompt = render([user], tools=schemas, add_generation_prompt=True)
        whole = render([user, {"role": "assistant", "content": "", "tool_calls": [call]}], tools=schemas)
    except Exception as error:  # a template is a program, and may raise any class
        problem = f"its chat template fails on a call of `{tool.name}` ({_described(error)})"
        raise UserError(name, problem, "use another model") from error
    # A prompt may end in a part of the turn, such as `<think>`, which the template writes otherwise once it is over.
    completion = whole[alike(prompt, whole) :]
    if (end := tokenizer.eos_token_id) in completion:
        completion = completion[: len(completion) - completion[::-1].index(end)]
    message = trl_templates.parse_response(tokenizer, completion, prefix=prompt, tools=schemas)
    read = [one.get("function", one) for one in message.get("tool_calls") or []]
    if [(one.get("name"), one.get("arguments")) for one in read] != [(tool.name, arguments)]:
        written = shortened(repr(tokenizer.decode(completion)), ERROR_CHARS)
        problem = f"the call of `{tool.name}` that its chat template writes ({written}) is not read back as one"
        raise UserError(name, problem, "correct `response_template` in its tokenizer_config.json")


def _example(tool: Tool) -> dict[str, Any]:
    """Return short arguments that fit a tool's schema, those with a default left out."""
    parameters, arguments = tool.schema["function"]["parameters"], {}
    for name in parameters.get("required", []):
        schema = parameters["properties"][name]
        kind = schema.get("type", "string")
        example = _EXAMPLES.get(kind[0] if isinstance(kind, list) else kind, "a")
        arguments[name] = schema["enum"][0] if schema.get("enum") else example
    return arguments
