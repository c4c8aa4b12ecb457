"""The turns of a generation batch whose completions call tools: call, append the results, generate, parse, repeat.

This is TRL's `_tool_call_loop` as a plain function. Training and evaluation call it with their own generator. Token IDs
are only ever appended: the prompt of a later turn is the row's prompt, its completion so far, and the template's
rendering of the results. The values are TRL's wherever TRL's results fit in `max_completion_length`. It differs where
they don't fit, where they hold special tokens, and with several ranks:

- TRL runs the calls first, and drops the results if they don't fit. The environment has then counted a call that the
  policy never saw. Here the calls of a turn run only if the template and one token of each result fit. Longer results
  are cut to the room that is left. Such a row ends behind its results, without another turn, so no token is ever
  sampled after a result that was cut for lack of room. Reserving room for the longest allowed result would be simpler,
  but would refuse most calls whose results are short.
- A result is text only: special tokens in it are written with a space (`result_text`).
- A call that can't be read gets a result (`read_turn`). TRL reads its whole turn as text, with all other calls.
- Before each generation all ranks agree on the largest number of rows. Ranks with fewer rows pad with a prompt of one
  token, whose completion is discarded. So every rank makes the same calls with the same number of rows: TRL's client of
  a vLLM server slices the completions of all ranks by `process_index * len(prompts)`, and the comparison of completions
  with the policy, ZeRO-3 and tensor parallelism are collectives.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template
from trl import chat_template_utils as trl_templates
from trl.chat_template_utils import parse_response

from grpo_recipes.tools import UNKNOWN
from grpo_recipes.tools.run import Call, Result

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALLS = "tool_calls"
UNREAD = ""
"""Name of the argument that holds the text of a malformed call."""

Ids = list[int]
Message = dict[str, Any]

Generate = Callable[[list[Ids]], tuple[list[Ids], list[list[float]] | None]]
"""Function from the token IDs of prompts to those of one completion each, and their log-probabilities or None."""
Parse = Callable[[Ids, Ids, Sequence[Any]], Message]
"""Function from the token IDs of a turn, those before it and the row's tools to the assistant's message."""
Render = Callable[[Sequence[Message]], Ids]
"""Function from the tool messages of a turn to the token IDs between the end of that turn and the next one."""
Shorten = Callable[[str, int], str]
"""Function from a text to its beginning of at most a number of tokens."""
RunCalls = Callable[[Sequence[Sequence[Call]]], list[list[Result]]]
"""Function from the calls of each row to the results of each row."""
Ending = Literal["answered", "iterations", "no room", "full"]


@dataclass(frozen=True)
class TurnLimits:
    """Limits on the turns of a row."""

    iterations: int
    """TRL's `max_tool_calling_iterations`: number of turns after which calls are no longer run."""
    completion: int
    """TRL's `max_completion_length`: number of tokens of all turns and tool results of a row."""
    positions: float
    """Number of tokens that the generator can read. A prompt must be shorter."""


@dataclass(frozen=True)
class RowTools:
    """Tools of a row."""

    functions: Mapping[str, Callable[..., Any]]
    """Functions by name."""
    schemas: Sequence[Any] = ()
    """Tools as `parse` takes them. It converts the arguments of a call to the types that they declare."""


@dataclass
class Row:
    """A completion that grows turn by turn."""

    prompt: Ids
    completion: Ids
    messages: list[Message]
    tools: RowTools
    log_probs: list[float] | None = None
    mask: list[int] = field(default_factory=list)
    """1 for each token of the policy, 0 for each token of a tool result and its template."""
    turns: list[list[Result]] = field(default_factory=list)
    """Results of each turn whose calls were run."""
    ending: Ending = "answered"
    """Reason why the row ended: "answered" if its last turn calls no tool, "iterations" if it has no turns left,
    "no room" if its last calls were not run because no result would fit, "full" if its results take all room that was
    left."""

    def __post_init__(self) -> None:
        if not self.mask:
            self.mask = [1] * len(self.completion)

    @property
    def calls(self) -> list[Call]:
        """Tool calls in the last message that have not been executed."""
        calls = self.messages[-1].get("tool_calls") if self.messages else None
        return [as_call(call, self.tools.functions) for call in calls or ()]

    def context(self) -> Ids:
        """Return the token IDs that the next turn is generated from."""
        return self.prompt + self.completion

    def room(self, limits: TurnLimits) -> float:
        """Return the number of tokens that the results of a turn may take."""
        positions = limits.positions - 1 - len(self.prompt)
        return min(limits.completion, positions) - len(self.completion)

    def append(self, ids: Ids, mask: int, log_probs: Sequence[float] | None) -> None:
        """Append the tokens of a turn with the mask 1, or those of its results with the mask 0."""
        self.completion = self.completion + ids  # a new list: a generator may keep those it was given
        self.mask += [mask] * len(ids)
        if self.log_probs is not None:
            if log_probs is None:
                raise ValueError("a `rollout_func` must return log-probabilities for every turn, or for none")
            self.log_probs = [*self.log_probs, *log_probs]


class Values(NamedTuple):
    """The seven values of TRL's `_tool_call_loop`."""

    tool_mask: list[list[int]]
    completions: list[list[Message]]
    completion_ids: list[Ids]
    logprobs: list[list[float]] | None
    tool_call_count: int
    tool_failure_count: int
    tool_images: list[list[Any]]
    """Empty lists: policies that read images keep TRL's own loop."""


@dataclass(frozen=True)
class ToolLoop:
    """The functions and limits of a tool loop.

    Args:
        generate: generator of a turn.
        parse: parser of a turn.
        render: renderer of tool results.
        shorten: function that cuts a text to a number of tokens.
        run: runner of calls. It cuts each result to the limit of the recipe.
        limits: limits on the turns of a row.
        largest: function that returns the largest of all ranks' numbers. Collective. The default is for one rank.
        padding: token of the prompts that pad the rows of a rank.
    """

    generate: Generate
    parse: Parse
    render: Render
    shorten: Shorten
    run: RunCalls
    limits: TurnLimits
    largest: Callable[[int], int] = int
    padding: int = 0

    def __call__(self, rows: Sequence[Row]) -> Values:
        """Run tools and generate until no row calls one, and return TRL's values. Collective."""
        calling = [row for row in rows if row.calls]
        # Every rank goes through this loop equally often: it ends for all by the same number, or by the same limit.
        for _ in range(self.limits.iterations):
            continuing = self._answer(calling)
            count = self.largest(len(continuing))
            if count == 0:
                return values(rows)
            self._next_turn(continuing, count)
            calling = [row for row in continuing if row.calls]
        for row in calling:
            row.ending = "iterations"
        return values(rows)

    def _answer(self, rows: Sequence[Row]) -> list[Row]:
        """Run the calls of `rows`, append their results, and return the rows that have another turn.

        The calls of a row are run only if one token of each result fits.
        """
        running = []
        for row in rows:
            # A digit, because the line breaks around an empty result may merge into one token.
            least = [tool_message(call.name, "0") for call in row.calls]
            if len(self.render(least)) <= row.room(self.limits):
                running.append(row)
            else:
                row.ending = "no room"
        found = self.run([row.calls for row in running]) if running else []
        for row, results in zip(running, found, strict=True):
            self._append_results(row, results)
        return [row for row in running if row.ending == "answered"]

    def _append_results(self, row: Row, results: Sequence[Result]) -> None:
        """Append the results to a row, or end the row if they have to be cut or do not fit."""
        row.turns.append(list(results))
        messages = [tool_message(result.name, result.content) for result in results]
        ids = self.render(messages)
        room = int(row.room(self.limits))
        if len(ids) > room:
            row.ending = "full"
            # The tokens of a text depend on the template around it, so they can't be added up.
            fitting = bisect_right(
                range(room + 1), room, key=lambda tokens: len(self.render(self._cut(tokens, messages)))
            )
            messages = self._cut(max(0, fitting - 1), messages)
            ids = self.render(messages)
            if len(ids) > room:
                return  # the policy never sees these results
        elif len(row.completion) + len(ids) == self.limits.completion:
            row.ending = "full"  # TRL generates one more turn, and discards all of it
        row.messages.extend(messages)
        row.append(ids, 0, [0.0] * len(ids))

    def _cut(self, tokens: int, messages: Sequence[Message]) -> list[Message]:
        """Return the messages of results with texts of at most `tokens` tokens."""
        return [{**message, "content": self.shorten(message["content"], tokens)} for message in messages]

    def _next_turn(self, rows: Sequence[Row], count: int) -> None:
        """Generate the next turn of `rows`, with as many prompts as the rank with most rows. Collective."""
        contexts = [row.context() for row in rows]
        completions, log_probs = self.generate(contexts + [[self.padding] for _ in range(count - len(rows))])
        for number, row in enumerate(rows):  # the padding's completions are discarded
            left = self.limits.completion - len(row.completion)
            ids = list(completions[number])[:left]
            row.append(ids, 1, None if log_probs is None else log_probs[number][:left])
            if ids:
                row.messages.append(self.parse(ids, contexts[number], row.tools.schemas))


def values(rows: Sequence[Row]) -> Values:
    """Return TRL's values of rows that have ended."""
    results = [result for row in rows for turn in row.turns for result in turn]
    log_probs = [row.log_probs for row in rows if row.log_probs is not None]
    return Values(
        [row.mask for row in rows],
        [row.messages for row in rows],
        [row.completion for row in rows],
        log_probs if len(log_probs) == len(rows) else None,
        len(results),
        sum(bool(result.fault or result.mistake or not result.made) for result in results),
        [[] for _ in rows],
    )


def drop_abandoned(
    pools: Mapping[str | None, list[Any]], environments: Sequence[Any] | None, rows: Sequence[Row]
) -> None:
    """Take the environments with a call that passed its time limit out of their pools, which build new ones later.

    The call may still run, and would change the episode of the completion that gets the environment next.

    Args:
        pools: instances that later batches use again, by the name of the environment.
        environments: instance of each row, or None or empty without environments.
        rows: rows of the batch, which have ended.
    """
    abandoned = set()
    for environment, row in zip(environments or (), rows, strict=False):
        if any(result.timed_out for turn in row.turns for result in turn):
            abandoned.add(id(environment))  # a class may define equality
    for pool in pools.values():
        pool[:] = [instance for instance in pool if id(instance) not in abandoned]


def as_call(call: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Call:
    """Return a call of a message, which has the key "function" as in TRL's form, or only what TRL has under it."""
    function = call.get("function", call)
    name, arguments = function["name"], function.get("arguments")
    is_read = isinstance(arguments, Mapping) and arguments.keys() != {UNREAD}
    refusal = "" if is_read else "The call can't be read as a name and an object of arguments."
    return Call(name, arguments, functions.get(name), refusal)


def read_turn(tokenizer: Any, ids: Ids, prefix: Ids | None = None, tools: list[Any] | None = None) -> Message:
    """Return the message of a turn as TRL's `parse_response` does, and keep the calls that can't be read.

    TRL reads a turn with malformed JSON as text, so that none of its calls gets a result. Here a malformed call has the
    text of the call as its only argument. A turn that was cut off within a call is read as text.
    """
    message: Message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    with suppress(RecursionError, KeyError):  # JSON that is nested deeply, or a template whose parts are missing
        message = parse_response(tokenizer, ids, prefix=prefix, tools=tools)
    template = getattr(tokenizer, "response_template", None)
    # The last token is special if it is an end token.
    is_cut = not ids or tokenizer.decode(ids[-1:], skip_special_tokens=True) != ""
    if message.get("tool_calls") or template is None or prefix is None or is_cut:
        return message
    parser = _TurnParser(load_response_template(template), prefix=tokenizer.decode(prefix), tools=tools)
    with suppress(ValueError):  # a field that is no call can't be read
        parser.feed(tokenizer.decode(ids))
        found, _ = parser.finalize()
        if found.get(CALLS):
            return {**found, "content": found.get("content", "").removesuffix(tokenizer.eos_token)}
    return message


class _TurnParser(ResponseParser):
    """transformers' parser of a turn, which keeps the text of a call that it can't read."""

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        field, text, name = self._current, self._body, self._captures.get("name", UNKNOWN)
        before = list(self._output.get(CALLS, ()))
        try:
            super()._close_current(events)
            if field == CALLS:
                trl_templates._validate_tool_calls(self._output.get(CALLS, [])[len(before) :])
            return
        except (ValueError, TypeError, KeyError, RecursionError):
            if field != CALLS:
                raise
            self._reset_to_implicit()
        # A mapping, because rewards look arguments up by their names.
        malformed = {"type": "function", "function": {"name": name, "arguments": {UNREAD: text}}}
        self._output[CALLS] = [*before, malformed]


def tool_message(name: str, content: Any) -> Message:
    """Return the message of a result."""
    return {"role": "tool", "name": name, "content": content}


def suffix_ids(
    tokenizer: Any, messages: Sequence[Message], chat_template: str | None, template_kwargs: Mapping[str, Any]
) -> Ids:
    """Return the token IDs between the end of a turn with calls and the next turn, as TRL's trainer does.

    Raises:
        ValueError: the template writes the turn otherwise once a tool has answered.
    """
    from trl import GRPOTrainer  # takes seconds

    trainer: Any = SimpleNamespace(
        _is_vlm=False,
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=chat_template,
        chat_template_kwargs=template_kwargs,
    )
    return GRPOTrainer._get_tool_suffix_ids(trainer, messages)


def result_text(tokenizer: PreTrainedTokenizerBase, tokens: int) -> Callable[[str], str]:
    """Return the function that turns what a tool returned into the text of a result.

    It cuts the text to `tokens` tokens, and writes a space into each special token, such as `< |im_end|>`. Otherwise a
    result could end its own message and write messages of other roles.
    """
    names = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    # A space can't split a single character, and such a token can't look like the end of a message.
    names = {name for name in names.union(tokenizer.all_special_tokens) if len(name) > 1}
    pattern = "|".join(map(re.escape, sorted(names))) or "(?!)"
    # The first character only is consumed, because the end of one name may be the beginning of another.
    first_characters = re.compile(f"(?={pattern})(.)", re.DOTALL)
    return lambda text: beginning(tokenizer, first_characters.sub(r"\1 ", text), tokens)


def beginning(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int) -> str:
    """Return the beginning of `text` of at most `tokens` tokens, or `text` if it is not longer."""
    ids = _tokenized(tokenizer, text)
    if len(ids) <= tokens:
        return text
    # The decoded tokens may be encoded by other tokens, and by more of them.
    for count in range(tokens, 0, -1):
        # transformers declares a list of texts too, which it returns for a list of rows. Half of a character decodes to
        # the replacement character.
        decoded = cast(str, tokenizer.decode(ids[:count], clean_up_tokenization_spaces=False))
        cut = decoded.rstrip("\N{REPLACEMENT CHARACTER}")
        if len(_tokenized(tokenizer, cut)) <= tokens:
            return cut
    return ""


def _tokenized(tokenizer: PreTrainedTokenizerBase, text: str) -> Ids:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
