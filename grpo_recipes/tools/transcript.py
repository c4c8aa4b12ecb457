"""Proof that the tokens of a multi-turn completion are those that were sampled, and those of the chat template.

`Turns` records what the generator sampled in each context. `Proof` decomposes a completion by its tool mask and proves:

- A token with mask 1 is the token that was sampled at this place, given exactly the tokens before it.
- A token with mask 0 belongs to the template's rendering of the tool messages that stand at this place. They are
  rendered as the loop does, between the end of a turn and the next one, but anew and from the final messages. To
  render the whole conversation instead would not be a proof: templates drop the thinking of earlier turns, write calls
  in another way than the policy did, and fail on calls that a policy can write.
- A message of the assistant is what its tokens parse to.
- A prompt is the template's rendering of its messages and of the row's tools.
- The results of a turn are those of its calls, one for each, and no turn that was sampled is missing.
- A log-probability is the one that its token was sampled with, and 0 for each token with mask 0.

Token IDs are compared, never texts. Only a fault is described by its text.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from grpo_recipes.tools.loop import Ids, Message, Parse, Render, Row
from grpo_rewards.errors import shortened

TokenKey = tuple[int, ...]
RenderPrompt = Callable[[Sequence[Message], Sequence[Any]], Ids]
"""Function from the messages of a prompt and the row's tools to the token IDs of the prompt."""

SHOWN = 40
"""Number of characters of a text that an error quotes."""


class Turns:
    """Turns of a generation batch: what was sampled in each context."""

    def __init__(self) -> None:
        self.first: list[tuple[TokenKey, TokenKey]] = []
        """Prompt and sampled tokens of each row of the first call."""
        self.sampled: dict[TokenKey, Counter[TokenKey]] = {}
        """Sampled tokens by their context, and how often they were sampled."""
        self.log_probs: dict[TokenKey, list[tuple[TokenKey, tuple[float, ...]]]] = {}
        """Sampled tokens and their log-probabilities by their context. Empty if the generator gives none."""

    def record(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """Record one call of the generator."""
        # Tuples, because a `rollout_func` may append a tool result to the very list that it was given.
        turns = [(tuple(prompt), tuple(ids)) for prompt, ids in zip(prompts, completions, strict=True)]
        self.first = self.first or turns
        for context, ids in turns:
            self.sampled.setdefault(context, Counter())[ids] += 1
        for (context, ids), values in zip(turns, log_probs or (), strict=log_probs is not None):
            self.log_probs.setdefault(context, []).append((ids, tuple(values)))

    def of(self, context: TokenKey) -> list[TokenKey]:
        """Return what was sampled in a context."""
        return list(self.sampled.get(context, ()))

    def continue_from(self, prompt: TokenKey) -> bool:
        """Return True if the generator was given a context that begins with a prompt and is longer."""
        return any(len(other) > len(prompt) and other[: len(prompt)] == prompt for other in self.sampled)


@dataclass(frozen=True)
class MaskSegment:
    """Neighbouring tokens of a completion with the same mask: `ids`, from the place `start` to before `stop`."""

    start: int
    stop: int
    is_sampled: bool
    ids: TokenKey


@dataclass
class Transcript:
    """A final row of a generation batch."""

    number: int
    """Place in the generation batch of this rank."""
    prompt: Sequence[int]
    completion: Sequence[int]
    mask: Sequence[int]
    messages: Sequence[Message] | None
    """Messages of the completion, or None if a `rollout_func` returned tokens only."""
    tools: Sequence[Any] = ()
    """Tools as `parse` takes them."""
    prompt_messages: Sequence[Message] | None = None
    """Messages of the prompt, or None if they are unknown."""
    log_probs: Sequence[float] | None = None
    """Log-probability of each token of the completion, or None if the generator gives none."""
    played: Row | None = None
    """Row of the project's own tool loop, or None if the turns are not of this loop."""

    def segments(self) -> list[MaskSegment]:
        """Return the segments of the completion, in order."""
        found, start = [], 0
        for is_sampled, tokens in groupby(self.mask, bool):
            stop = start + len(list(tokens))
            found.append(MaskSegment(start, stop, is_sampled, tuple(self.completion[start:stop])))
            start = stop
        return found

    def context(self, place: int) -> TokenKey:
        """Return the tokens before a place of the completion."""
        return (*self.prompt, *self.completion[:place])


@dataclass(frozen=True)
class Fault:
    """A token of a row that is not what was sampled or rendered."""

    row: int
    token: int
    what: str

    def __str__(self) -> str:
        return f"row {self.row}, token {self.token}: {self.what}"


@dataclass(frozen=True)
class Proof:
    """Proof of the rows of a generation batch.

    Args:
        turns: the turns that were sampled.
        longest: TRL's `max_completion_length`, at which the last turn of a row is cut.
        decode: function from token IDs to their text.
        parse: the parser of the loop.
        render: the renderer of the loop.
        render_prompt: the renderer of prompts.
        ends: function that returns True if a turn is complete.
        in_order: True if row n of the first call is row n of the batch, and each turn belongs to one row. A
            `rollout_func` may reorder its rows, cut a turn where it likes, and let rows share one.
    """

    turns: Turns
    longest: int
    decode: Callable[[Ids], str]
    parse: Parse
    render: Render
    render_prompt: RenderPrompt
    ends: Callable[[Ids], bool]
    in_order: bool = True

    def __call__(self, row: Transcript, with_messages: bool) -> Fault | None:
        """Return the first fault of a row, or None.

        Args:
            row: the row.
            with_messages: True to render and parse its messages too, which costs more than all else.
        """
        if len(row.mask) != len(row.completion):
            return Fault(row.number, 0, f"the mask has {len(row.mask)} values for {len(row.completion)} tokens")
        if odd := set(row.mask) - {0, 1}:
            return Fault(row.number, 0, f"the mask holds {min(odd)}, which is neither 0 nor 1")
        return next(self._faults(row, with_messages), None)

    def covers(self, row: Transcript) -> bool:
        """Return True if the turns of a row were recorded. Those of a `rollout_func` may come from elsewhere."""
        if self.in_order:
            return bool(self.turns.first)
        prompt = tuple(row.prompt)
        starts = [segment.start for segment in row.segments() if segment.is_sampled]
        if row.mask and row.mask[0] and prompt not in self.turns.sampled:
            return False
        return not any(starts) or self.turns.continue_from(prompt)

    def count(self, rows: Sequence[Transcript]) -> Fault | None:
        """Return the fault of a turn that stands in more rows than it was sampled for, or in fewer, or None."""
        if not self.in_order:
            return None
        used: dict[TokenKey, Counter[TokenKey]] = {}
        for row in rows:
            for segment in row.segments():
                if not segment.is_sampled:
                    continue
                context = row.context(segment.start)
                times = used.setdefault(context, Counter())
                times[segment.ids] += 1
                # A turn that was cut at the end of its row is another one here, which was never sampled as such.
                if 0 < self.turns.sampled[context][segment.ids] < times[segment.ids]:
                    return Fault(row.number, segment.start, "this turn was sampled for another row")
        for context, sampled in self.turns.sampled.items():
            # The prompts that pad a rank's rows continue no row.
            if sampled.total() > used.get(context, Counter()).total() and (fault := self._unused(context, rows)):
                return fault
        return None

    def _unused(self, context: TokenKey, rows: Sequence[Transcript]) -> Fault | None:
        """Return the fault of the row that ends before a context in which a turn was sampled, or None."""
        for row in rows:
            length = len(row.completion)
            whole = len(row.prompt) + length
            if length < self.longest and whole < len(context) and context[:whole] == row.context(length):
                return Fault(row.number, length, "the tool result and the turn that was sampled after it are missing")
        return None

    # ---- the prompt and the segments of a row

    def _faults(self, row: Transcript, with_messages: bool) -> Iterator[Fault]:
        """Yield the faults of a row, in the order of its tokens."""
        if with_messages and row.prompt_messages is not None:
            expected, ids = tuple(self.render_prompt(row.prompt_messages, row.tools)), tuple(row.prompt)
            if expected != ids:
                _, what = self._difference(expected, ids, "rendered")
                what = f"the prompt is not the template's rendering of its messages and tools: {what}"
                yield Fault(row.number, 0, what)
        segments = row.segments()
        # The messages by turn: those of the assistant, then those of the tools, and so on.
        groups = [list(group) for _, group in groupby(row.messages or (), lambda message: message["role"])]
        for place, segment in enumerate(segments):
            yield from self._sampled_faults(row, segment) if segment.is_sampled else ()
            if row.messages is not None:
                group = groups[place] if place < len(groups) else []
                yield from self._message_faults(row, segment, group, with_messages)
                if row.played is not None:
                    yield from self._result_faults(row.played, row.number, segment, place // 2, group)
            if self.in_order and self.turns.log_probs:
                yield from self._log_prob_faults(row, segment)
        if len(groups) > len(segments):
            role = groups[len(segments)][0]["role"]
            yield Fault(row.number, len(row.completion), f"a message of the role {role!r} has no tokens")
        if self.in_order:
            yield from self._end_faults(row, segments)

    def _end_faults(self, row: Transcript, segments: Sequence[MaskSegment]) -> Iterator[Fault]:
        """Yield the fault of a turn that a tool result follows though it has not ended, or of a turn that is lost."""
        for segment, _ in pairwise(segments):
            if segment.is_sampled and not self.ends(list(segment.ids)):
                yield Fault(row.number, segment.stop, "a tool result follows a turn without its end token")
        length = len(row.completion)
        is_open = bool(segments) and not segments[-1].is_sampled and length < self.longest
        if is_open and any(self.turns.of(row.context(length))):
            yield Fault(row.number, length, "the turn that was sampled after this tool result is missing")

    def _sampled_faults(self, row: Transcript, segment: MaskSegment) -> Iterator[Fault]:
        """Yield the fault of a segment that was not sampled in its context."""
        if self.in_order and segment.start == 0 and len(self.turns.first) > row.number:
            prompt, turn = self.turns.first[row.number]
            if prompt != tuple(row.prompt):
                yield Fault(row.number, 0, "the row has another prompt than was given to the generator")
                return
            choices = [turn]
        else:
            choices = self.turns.of(row.context(segment.start))
        ids = segment.ids
        is_cut = segment.stop == len(row.completion) == self.longest
        if not choices:
            yield self._unknown_context(row, segment.start)
        elif not self.in_order:
            yield from self._parts_of_turns(row, segment)
        elif ids not in choices and not (is_cut and any(choice[: len(ids)] == ids for choice in choices)):
            yield self._wrong_turn(row, segment.start, ids, choices)

    def _parts_of_turns(self, row: Transcript, segment: MaskSegment) -> Iterator[Fault]:
        """Yield the fault of a segment that is not one turn, or the beginning of one, after the other."""
        start = segment.start
        while start < segment.stop:
            choices = [choice for choice in self.turns.of(row.context(start)) if choice]
            if not choices:
                yield self._unknown_context(row, start)
                return
            ids = tuple(row.completion[start : segment.stop])
            fitting = [choice for choice in choices if alike(choice, ids) == min(len(choice), len(ids))]
            if not fitting:
                yield self._wrong_turn(row, start, ids, choices)
                return
            start += max(map(len, fitting))

    def _message_faults(
        self, row: Transcript, segment: MaskSegment, group: Sequence[Message], with_texts: bool
    ) -> Iterator[Fault]:
        """Yield the fault of a segment that is not what its messages say, or, without texts, has no messages."""
        role = "assistant" if segment.is_sampled else "tool"
        if not group or group[0]["role"] != role:
            kind = "sampled tokens" if segment.is_sampled else "tokens of tool results"
            yield Fault(row.number, segment.start, f"no message of the role {role!r} belongs to these {kind}")
        elif segment.is_sampled and len(group) > 1:
            yield Fault(row.number, segment.start, f"{len(group)} messages of the assistant belong to one turn")
        elif not with_texts:
            return
        elif segment.is_sampled:
            parsed = self.parse(list(segment.ids), list(row.context(segment.start)), row.tools)
            # By their text: a call may hold NaN, which differs from itself.
            if repr(parsed) != repr(group[0]):
                yield Fault(row.number, segment.start, "the assistant's message is not what these tokens parse to")
        else:
            expected = tuple(self.render(group))
            if expected != segment.ids:
                place, what = self._difference(expected, segment.ids, "rendered")
                what = f"the tool result is not the template's rendering of its messages: {what}"
                yield Fault(row.number, segment.start + place, what)

    def _result_faults(
        self, row: Row, number: int, segment: MaskSegment, turn: int, group: Sequence[Message]
    ) -> Iterator[Fault]:
        """Yield the fault of a turn whose calls have no results or others, or of messages that hold other results."""
        results = row.turns[turn] if turn < len(row.turns) else None
        is_last = turn == len(row.turns) - 1
        if not segment.is_sampled:
            # The last results may be cut to the room that is left.
            contents = slice(1 if is_last and row.ending == "full" else 2)
            shown = [(message.get("name"), message.get("content"))[contents] for message in group]
            if shown != [(result.name, result.content)[contents] for result in results or ()]:
                yield Fault(number, segment.start, "the messages of these results are not what the tools returned")
            return
        calls = group[0].get("tool_calls") or ()
        if results is None:
            if calls and row.ending == "answered":
                yield Fault(number, segment.stop, "the calls of this turn were not answered")
            return
        # By identity, because equal calls of two environments have different results.
        places = [id(call.get("function", call).get("arguments")) for call in calls]
        answered = [id(result.arguments) for result in results]
        if sorted(places) != sorted(answered):
            yield Fault(number, segment.stop, "the results after this turn are not those of its calls")
            return
        for is_async in (False, True):  # async tools run after the others, and refused calls are not run at all
            made = []
            for result in results:
                function = row.tools.functions.get(result.name)
                if result.made and inspect.iscoroutinefunction(function) == is_async:
                    made.append(places.index(id(result.arguments)))
            if made != sorted(made):
                yield Fault(number, segment.stop, "the results after this turn are in another order than its calls")

    def _log_prob_faults(self, row: Transcript, segment: MaskSegment) -> Iterator[Fault]:
        """Yield the fault of log-probabilities that are not those that the tokens were sampled with."""
        found = tuple((row.log_probs or ())[segment.start : segment.stop])
        if not segment.is_sampled:
            if any(found) or len(found) < segment.stop - segment.start:
                yield Fault(row.number, segment.start, "the log-probabilities of these tool results are not 0")
            return
        for sampled, log_probs in self.turns.log_probs.get(row.context(segment.start), ()):
            # The last turn of a row may be cut.
            if sampled[: len(segment.ids)] == segment.ids and log_probs[: len(segment.ids)] == found:
                return
        yield Fault(
            row.number, segment.start, "the log-probabilities are not those that these tokens were sampled with"
        )

    # ---- descriptions of faults

    def _unknown_context(self, row: Transcript, start: int) -> Fault:
        """Return the fault of sampled tokens, from `start` on, whose context the generator was never given."""
        context = row.context(start)
        what, token = "these tokens were not sampled: the generator was never given the tokens before them", start
        known = [other for other in self.turns.sampled if alike(other, context) >= len(row.prompt) > 0]
        if known and start:
            nearest = max(known, key=lambda other: (alike(other, context), -abs(len(other) - len(context))))
            place, difference = self._difference(nearest, context, "given to the generator")
            what += f" ({difference})"
            token = place - len(row.prompt)
        return Fault(row.number, token, what)

    def _wrong_turn(self, row: Transcript, start: int, ids: TokenKey, choices: Sequence[TokenKey]) -> Fault:
        """Return the fault of tokens that are none of what was sampled in their context."""
        if any(ids in sampled for sampled in self.turns.sampled.values()):
            return Fault(row.number, start, "these tokens were sampled for another row or turn")
        nearest = max(choices, key=lambda choice: alike(choice, ids))
        place, what = self._difference(nearest, ids, "sampled")
        return Fault(row.number, start + place, what)

    def _difference(self, expected: Sequence[int], ids: Sequence[int], done: str) -> tuple[int, str]:
        """Return the place of the first difference of `ids` from `expected`, and a description."""
        place = alike(expected, ids)
        if self.decode(list(expected)) == self.decode(list(ids)):
            return place, f"the same text was {done} as other tokens: it was tokenized again"
        behind = alike(expected[place:][::-1], ids[place:][::-1])
        missing, more = expected[place : len(expected) - behind], ids[place : len(ids) - behind]
        return place, f"{self._text(more)} stands where {self._text(missing)} was {done}"

    def _text(self, ids: Sequence[int]) -> str:
        return repr(shortened(self.decode(list(ids)), SHOWN))


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens at the beginning that are the same."""
    for place, (mine, others) in enumerate(zip(one, other, strict=False)):
        if mine != others:
            return place
    return min(len(one), len(other))
