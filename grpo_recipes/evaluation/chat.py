"""`grpo-recipes chat`: a conversation with a trained model, prompted and sampled as its recipe did in training.

Each message becomes a prompt with the system prompt, the `prompt_template` and the chat template of the recipe. A model
that was trained on plain text sees one message at a time. An answer is printed while it is generated, with its control
characters escaped, because a model's text must not steer the terminal.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig, TextStreamer

from grpo_recipes.checks.tokenizer import CHARACTERS, ChatTemplate
from grpo_recipes.checks.tools import FACTORY, TOOLS
from grpo_recipes.data.load import load
from grpo_recipes.data.presets import Message, Turns, user_turn
from grpo_recipes.data.prompts import columns_of_prompt, phrased_text, prompt_of, rendered, system_text
from grpo_recipes.data.tables import listed
from grpo_recipes.evaluation.engines import (
    Transformers,
    chat_template_of,
    check_model,
    load_engine,
    load_tokenizer,
    sampling_options,
    seeded,
    template_kwargs_of,
    training_sampling,
)
from grpo_recipes.evaluation.evaluate import DEFAULT_NEW_TOKENS, recipe_of
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.evaluation.tools import RecipeTools, tools_of
from grpo_recipes.evaluation.tools import Turns as ToolTurns
from grpo_recipes.generation.groups import decoding
from grpo_recipes.generation.models import base_model
from grpo_recipes.generation.sampling_settings import PublishedSettings
from grpo_recipes.generation.stop_strings import Ends, StopStrings
from grpo_recipes.recipe.specs import DatasetSpec
from grpo_recipes.recipe.trl_keys import stop_strings
from grpo_recipes.tools.bounded import Call, Result, ToolRunner
from grpo_recipes.tools.loop import Ending, Ids, Row
from grpo_rewards.completions import completion_text
from grpo_rewards.errors import UserError, one_line, shortened
from grpo_rewards.terminal import say

TRIAL = "How are you?"
"""Message on which the tokenizer is tried before the first one of the user is known."""

RESULT_CHARS = 500
"""Largest number of characters of a result that are printed."""

UNANSWERED: Mapping[Ending, str] = {
    "iterations": "the last calls were not run: `max_tool_calling_iterations` turns have called tools",
    "no room": "the last calls were not run: no result would fit, and --max_new_tokens raises the limit",
    "full": "the results took all tokens that were left: --max_new_tokens raises the limit",
    "dropped": "the last results did not fit: --max_new_tokens raises the limit",
}
"""Sentences on an answer that ends in a call or in its result."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of `grpo-recipes chat`. None stands for the recipe's value."""

    model: str
    recipe: str | None = None
    prompt: str | None = None
    system_prompt: str | None = None
    prompt_format: str | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Prompting:
    """Way in which the messages of a conversation become a prompt.

    Attributes:
        system: System prompt, or None.
        is_text: True if a prompt is plain text, False if it is messages, and None if the tokenizer decides.
        dataset: Dataset of the recipe, whose prompts have one wording, or None.
        template_kwargs: TRL's `chat_template_kwargs`.
        chat_template: Chat template that replaces the model's, or None.
    """

    system: str | None = None
    is_text: bool | None = None
    dataset: DatasetSpec | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template: ChatTemplate | None = None

    def message(self, text: str) -> Message:
        """Return the user's message with a text, worded as the dataset words its rows."""
        return user_turn(text if self.dataset is None else phrased_text(self.dataset, text))[0]

    def prompt(self, turns: list[Message]) -> Turns:
        """Return the prompt of a conversation, after the system prompt."""
        return prompt_of(turns, self.system, bool(self.is_text))


class Streamer(TextStreamer):
    """Streamer of transformers that prints an answer through `say`, and keeps it."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.parts: list[str] = []
        """Texts that were printed."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a part of the answer, and a line feed after the last part."""
        self.parts.append(text)
        say(text, end="\n" if stream_end else "")


class ShownCalls:
    """Runner of calls that prints each call with its result."""

    def __init__(self, runner: ToolRunner) -> None:
        self.runner = runner

    def run(self, calls: Sequence[Sequence[Call]]) -> list[list[Result]]:
        """Run and print the calls of each row, and return the results of each row."""
        results = self.runner.run(calls)
        for row in results:
            for result in row:
                say(f"[{result.name}: {shortened(one_line(str(result.content)), RESULT_CHARS)}]")
        return results


class Chat:
    """A conversation: its messages, and the model that answers them.

    Attributes:
        turns: Messages so far, without the system prompt.
        cut_at: Number of tokens at which the last answer was cut, or None if it ended by itself.
    """

    def __init__(
        self,
        engine: Transformers,
        prompting: Prompting,
        settings: Settings,
        sampling: Mapping[str, float],
        tools: ToolTurns | None = None,
    ) -> None:
        self.model, self.tokenizer, self.prompting = engine.model.eval(), engine.tokenizer, prompting
        self.settings, self.sampling, self.tools = settings, sampling, tools
        self.published = PublishedSettings(logger.warning)
        self.stop = StopStrings(settings.stop, self.tokenizer) if settings.stop else None
        self.turns: list[Message] = []
        self.cut_at: int | None = None

    def answer(self, text: str) -> str:
        """Print the answer to a message while it is generated, and return it.

        An answer that Ctrl-C stops stays in the conversation as far as it was printed. A message that is refused does
        not.

        Raises:
            UserError: The conversation leaves no room in the model's context, or the template fails on the message.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        turns = [*(() if self.prompting.is_text else self.turns), self.prompting.message(text)]
        if self.tools is not None:
            return self._answer_with_tools(turns, self.tools)
        inputs = self._inputs(self.prompting.prompt(turns))
        settings = replace(self.settings, max_new_tokens=self._room(inputs["input_ids"].shape[1]))
        streamer = Streamer(self.tokenizer)
        self.cut_at = None
        try:
            self._generate(inputs, settings, streamer)
        except KeyboardInterrupt:
            streamer.end()
            raise
        finally:
            self.turns = [*turns, {"role": "assistant", "content": "".join(streamer.parts)}]
        return self.turns[-1]["content"]

    def _answer_with_tools(self, turns: list[Message], tools: ToolTurns) -> str:
        """Print the turns of the answer, its calls and their results, and return the last turn.

        Of an answer that Ctrl-C stops, the turn that was printed last stays in the conversation.
        """
        prompt = tools.prompt_ids(self.prompting.prompt(turns))
        room = self._room(len(prompt))
        streamer = Streamer(self.tokenizer)
        messages: list[Message] = []
        row: Row | None = None

        def next_turn(contexts: list[Ids]) -> tuple[list[Ids], None]:
            nonlocal streamer
            streamer = Streamer(self.tokenizer)
            left = room if row is None else room - len(row.completion)
            ids = torch.tensor([contexts[0]], device=self.model.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            return [self._generate(inputs, replace(self.settings, max_new_tokens=left), streamer)], None

        self.cut_at = None
        try:
            ((first,), _) = next_turn([prompt])
            functions = [tool.function for tool in tools.tools.toolset.tools]
            row = tools.row(prompt, first, functions, None)
            tools.loop(next_turn, room, len(prompt) + room + 1, ShownCalls(tools.runner))([row])
            messages = row.messages
        except KeyboardInterrupt:
            streamer.end()
            raise
        finally:
            self.turns = [*turns, *(messages or [{"role": "assistant", "content": "".join(streamer.parts)}])]
        if row.ending != "answered":
            _note(UNANSWERED[row.ending])
        return completion_text(messages)

    def _inputs(self, prompt: Turns) -> Any:
        text = rendered(prompt, self.tokenizer, self.prompting.template_kwargs)
        encoded = self.tokenizer(text, add_special_tokens=bool(self.prompting.is_text), return_tensors="pt")
        return encoded.to(self.model.device)

    def _room(self, length: int) -> int:
        """Return the largest number of tokens of an answer to a prompt of `length` tokens."""
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if context is None:
            return self.settings.max_new_tokens
        if length >= context:
            is_later = self.turns and not self.prompting.is_text
            fix = "begin a new conversation with an empty line" if is_later else "write a shorter one"
            raise UserError(f"the prompt has {length:,} tokens, and the model's context has {context:,}: {fix}")
        return min(self.settings.max_new_tokens, context - length)

    @torch.no_grad()
    def _generate(self, inputs: Any, settings: Settings, streamer: Streamer) -> Ids:
        """Print a turn while it is generated, and return its token IDs."""
        options = sampling_options(self.model, self.tokenizer, settings)
        if settings.temperature > 0:
            options |= {**self.sampling, "temperature": settings.temperature}
        ends = [] if self.stop is None else [Ends(self.stop)]
        published = self.published.aside(self.model, GenerationConfig(**options))
        with published, decoding(base_model(self.model), None, ends):
            tokens = self.model.generate(**inputs, **options, streamer=streamer)
        completion = tokens[0, inputs["input_ids"].shape[1] :].tolist()
        has_ended = completion[-1] in options["eos_token_id"] or (self.stop is not None and self.stop.end(completion))
        if not has_ended:
            self.cut_at = len(completion)
        return completion


def chat(request: Request) -> None:
    """Answer the prompt of the request, or one line of standard input after another.

    Raises:
        UserError: The model can't be loaded, or an option, the recipe or the prompt is wrong.
        KeyboardInterrupt: Ctrl-C stopped the answer to the prompt of the request.
    """
    if request.prompt is not None:
        _check_text(request.prompt, "--prompt")
    check_model(request.model)
    recipe = recipe_of(request.model, request.recipe)
    tools = _tools(request, recipe)
    sampling = training_sampling(recipe)
    settings = _settings(request, recipe, sampling["temperature"])
    prompting = _prompting(request, recipe)
    if prompting.dataset is not None:
        _note_columns(prompting.dataset)
    tried = prompting.prompt([prompting.message((request.prompt or TRIAL)[:CHARACTERS])])
    turns = None if tools is None else _tool_turns(tools, request.model, prompting, tried)
    engine = load_engine(request.model, [tried], prompting.template_kwargs, prompting.chat_template)
    prompting = _with_format(prompting, engine.tokenizer, request.model)
    talk = Chat(engine, prompting, settings, sampling, turns)
    with seeded(engine.model, settings.seed):
        if request.prompt is None:
            _introduce(request.model, talk)
            converse(talk, _line)
        else:
            talk.answer(request.prompt)
            _note_cut(talk)


def _tools(request: Request, recipe: Mapping[str, Any]) -> RecipeTools | None:
    """Return the tools of the recipe. Raises `UserError` for environments, which begin with a row of a dataset."""
    if recipe.get(FACTORY):
        raise UserError(
            f"`{FACTORY}`: an environment begins with a row of a dataset, which a conversation has none of: use "
            "`grpo-recipes evaluate`, or name a recipe without environments"
        )
    return tools_of(recipe, is_trusted=request.recipe is not None)


def _tool_turns(tools: RecipeTools, model: str, prompting: Prompting, tried: Turns) -> ToolTurns:
    """Return the turns of a model with tools. Raises `UserError` if its prompts or its template have no tools."""
    if prompting.is_text:
        raise UserError(f"`{TOOLS}` needs messages, and the prompts are text: leave out --prompt_format text")
    schemas = [tool.schema for tool in tools.toolset.all_tools]
    kwargs = {**prompting.template_kwargs, "tools": schemas}
    tokenizer = load_tokenizer(model, [tried], kwargs, prompting.chat_template)
    return ToolTurns(tools, model, tokenizer, prompting.template_kwargs)


def converse(talk: Chat, ask: Callable[[], str]) -> None:
    """Answer one line after another until `ask` raises EOFError, or Ctrl-C is pressed twice in a row.

    An empty line begins a new conversation.
    """
    is_interrupted = False
    while True:
        try:
            text = ask()
            is_interrupted = False
            if text.strip():
                _check_text(text, "the message")
                talk.answer(text)
                _note_cut(talk)
            elif talk.turns and not talk.prompting.is_text:
                talk.turns = []
                _note("a new conversation")
        except EOFError:
            return
        except UserError as error:
            _note(str(error))
        except KeyboardInterrupt:
            if is_interrupted:
                return
            is_interrupted = True
            _note("Ctrl-C again, or Ctrl-D, leaves")


def _line() -> str:
    """Return the next line of standard input, with a prompt on a terminal. Raises EOFError at its end."""
    if sys.stdin is None:  # closed by the shell (`<&-`)
        raise EOFError
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        return input("> " if is_terminal else "")
    except (EOFError, KeyboardInterrupt):
        if is_terminal:
            say(to_stderr=True)  # the next line of the terminal begins after the prompt
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not {error.encoding}: write it in this encoding") from error


def _note(text: str) -> None:
    say(f"({text})", to_stderr=True)


def _note_cut(talk: Chat) -> None:
    if talk.cut_at is not None:
        _note(f"cut at {talk.cut_at} tokens: --max_new_tokens raises the limit")


def _introduce(model: str, talk: Chat) -> None:
    """Print what a line of the user means, how answers are sampled, and how to leave."""
    prompting, settings = talk.prompting, talk.settings
    if prompting.is_text:
        meaning = "each line is a plain-text prompt, as in training, and the model sees no earlier line"
    else:
        meaning = "each line continues the conversation, and an empty line begins a new one"
    system = "none" if prompting.system is None else shortened(one_line(prompting.system), 80)
    say(f"{model}: {meaning}", to_stderr=True)
    say(
        f"system prompt: {system}; temperature {settings.temperature:g}, at most {settings.max_new_tokens} tokens; "
        "Ctrl-C stops an answer, Ctrl-D leaves",
        to_stderr=True,
    )
    with suppress(ImportError):  # not everywhere, and only for the editing of lines
        import readline  # noqa: F401


def _note_columns(dataset: DatasetSpec) -> None:
    """Print a sentence if a message can't fill the columns that the recipe's prompts are made from."""
    columns = columns_of_prompt(dataset)
    if not columns or len(columns) == 1:
        return
    way = "in the words of `dataset.prompt_template`" if dataset.prompt_template else "as in training"
    _note(
        f"the recipe's prompts are made from the columns {listed(columns)}, and a message is one text, which is sent "
        f"as it is: write all of them into it, {way}"
    )


def _check_text(text: str, name: str) -> None:
    """Raise `UserError` if a text is empty, or was not UTF-8, which makes lone surrogates that tokenizers refuse."""
    if not text.strip():
        raise UserError(f"{name} is empty: write a message")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} is not UTF-8: write it in this encoding") from error


def _settings(request: Request, recipe: Mapping[str, Any], temperature: float) -> Settings:
    """Return the settings of sampling, at `temperature` by default. Raises `UserError` if one is out of range."""
    max_new_tokens = request.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = recipe.get("max_completion_length") or DEFAULT_NEW_TOKENS
    return Settings(
        temperature=temperature if request.temperature is None else request.temperature,
        max_new_tokens=max_new_tokens,
        seed=request.seed,
        strict=None,
        stop=stop_strings(recipe.get("generation_kwargs")),
    )


def _prompting(request: Request, recipe: Mapping[str, Any]) -> Prompting:
    """Return the recipe's way from a message to a prompt, changed by the options."""
    trained = dict(recipe.get("dataset") or {})
    raw = trained or {"path": "none"}  # a spec needs a path, which is not read here
    for name in ("system_prompt", "prompt_format"):
        if getattr(request, name) is not None:
            raw[name] = getattr(request, name)
    spec = DatasetSpec.parse(raw)
    is_text = None if spec.prompt_format is None else spec.prompt_format == "text"
    if is_text is None and trained:
        is_text = _has_text_prompts(spec)
    template = chat_template_of(recipe, is_named=request.recipe is not None)
    return Prompting(system_text(spec), is_text, spec, template_kwargs_of(recipe) or {}, template)


def _has_text_prompts(spec: DatasetSpec) -> bool:
    """Return True if the rows of a dataset without `prompt_format` have text as their prompts."""
    try:
        return isinstance(load(replace(spec, pass_rate=None, eval_share=None))[0]["prompt"], str)
    except UserError as error:
        raise UserError(
            f"the run's rows, which show the form of its prompts, can't be read ({str(error).rstrip('.')}): give "
            "--prompt_format conversational or text"
        ) from error


def _with_format(prompting: Prompting, tokenizer: Any, model: str) -> Prompting:
    """Return `prompting` with the form that fits the tokenizer. Raises `UserError` if messages need a chat template."""
    has_template = bool(tokenizer.chat_template)
    if prompting.is_text is None:
        return replace(prompting, is_text=not has_template)
    if not prompting.is_text and not has_template:
        raise UserError(f"{model}: its tokenizer has no chat template: give --prompt_format text")
    return prompting
