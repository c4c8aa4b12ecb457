"""Are all tokens of a completion with tool calls those that were sampled, or the template's? Planted faults."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

from grpo_recipes import GRPOTrainer
from grpo_recipes.process.faults import NotThePolicy
from grpo_recipes.tools.loop import Row, RowTools
from grpo_recipes.tools.run import Result
from grpo_recipes.tools.transcript import Fault, Proof, Transcript, Turns
from tests.support.grids import only
from tests.support.tool_rollouts import ADD, GROUP, REPEAT, TOOLS, next_turns, play, tool_trainer

THOUGHT = "<think>\nso\n</think>\n\n"
SCRIPT = [
    [[THOUGHT + ADD], [ADD, REPEAT], [ADD + ADD], []],
    [[ADD, THOUGHT + ADD], [REPEAT], [], [ADD]],
]
CASES = [{"prompt": [{"role": "user", "content": f"case {n}"}]} for n in range(2) for _ in range(GROUP)]

ANSWER = {"role": "assistant", "content": ""}
RESULT = {"role": "tool", "name": "add", "content": "3"}

Values = list[Any]
"""The first of TRL's seven values of a batch: mask, messages, tokens and log-probabilities, a list of rows each."""
MASK, MESSAGES, IDS, LOG_PROBS = range(4)
"""Places of these values."""
Planted = Callable[[Any, Values], None]
"""Function of a trainer and of the values of its batch, which it changes."""
Place = Callable[[int, int], int]
"""Function from the first token of a row's first result, and the first token behind it, to a token."""


class ScriptedGeneration:
    """Generator that writes the script, in place of a trainer's `Generation`."""

    def __init__(self, trainer: Any, *, ends: bool = True) -> None:
        self.tokenizer, self.ends = trainer._tokenizer, ends

    def one_batch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __call__(
        self, turn: Any, prompts: Sequence[Sequence[int]], *rest: Any
    ) -> tuple[list[list[int]], list[list[float]], None]:
        turns = next_turns(SCRIPT, self.tokenizer, prompts)
        turns = turns if self.ends else [ids[:-1] for ids in turns]
        # No two tokens of a batch have the same.
        log_probs = [[-0.01 - row - place / 1000 for place in range(len(ids))] for row, ids in enumerate(turns)]
        return turns, log_probs, None


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Build a trainer whose generator writes the script, below the method that records turns."""
    made = tool_trainer(GRPOTrainer, tmp_path_factory.mktemp("run"), micro_batching="auto")
    made._turn_check.all_messages = True
    made.model.train()
    return made


@pytest.fixture
def scripted(trainer: Any) -> Iterator[Any]:
    """Return the trainer, and undo afterwards what a test has replaced."""
    before = dict(vars(trainer))
    turns = dict(vars(trainer._tool_turns))
    trainer._generation = ScriptedGeneration(trainer)
    yield trainer
    for owner, values in ((trainer, before), (trainer._tool_turns, turns)):
        vars(owner).clear()
        vars(owner).update(values)


def place_named(trainer: Any, fault: Planted = lambda trainer, values: None) -> str:
    """Return the place of the fault that stops the next batch, or "" if none does.

    Args:
        trainer: the trainer.
        fault: change of what the tool loop returns.
    """
    loop = trainer._tool_call_loop

    def faulty(*args: Any) -> Any:
        values = list(loop(*args))
        fault(trainer, values)
        return tuple(values)

    trainer._tool_call_loop = faulty
    try:
        play(trainer)
    except NotThePolicy as error:
        found = re.search(r"row \d+, token \d+", str(error))
        return found[0] if found else str(error)
    finally:
        trainer._tool_call_loop = loop
    return ""


def end_of_turn(mask: Sequence[int]) -> int:
    """Return the number of tokens of the first turn."""
    return list(mask).index(0)


def places_of_result(mask: Sequence[int]) -> tuple[int, int]:
    """Return the first token of the first result, and the first one behind it."""
    start = end_of_turn(mask)
    return start, list(mask).index(1, start)


def replaced(values: Values, row: int, start: int, stop: int, ids: Sequence[int]) -> None:
    """Replace tokens of a row by others with the same mask."""
    mask, _, completions, *_ = values
    mask[row] = mask[row][:start] + [mask[row][start]] * len(ids) + mask[row][stop:]
    completions[row] = completions[row][:start] + list(ids) + completions[row][stop:]


def changed(value: int, row: int | None, change: Callable[[Any], Any]) -> Planted:
    """Return the fault that changes a value of a row, or of all rows."""

    def fault(trainer: Any, values: Values) -> None:
        if row is None:
            values[value] = change(values[value])
        else:
            values[value][row] = change(values[value][row])

    return fault


def swapped(places: Sequence[int], one: int, other: int) -> Planted:
    """Return the fault that swaps values of two rows."""

    def fault(trainer: Any, values: Values) -> None:
        for place in places:
            values[place][one], values[place][other] = values[place][other], values[place][one]

    return fault


def changed_message(row: int, place: int, **changes: Any) -> Planted:
    def fault(trainer: Any, values: Values) -> None:
        values[MESSAGES][row][place].update(changes)

    return fault


def changed_token(value: int, place: Place, number: float) -> Planted:
    """Return the fault of another mask or log-probability of a token of row 1."""

    def fault(trainer: Any, values: Values) -> None:
        values[value][1][place(*places_of_result(values[MASK][1]))] = number

    return fault


def cut(stop: Place, messages: int | None = None) -> Planted:
    """Return the fault that drops tokens at the end of row 1, and messages after the first ones."""

    def fault(trainer: Any, values: Values) -> None:
        length = stop(*places_of_result(values[MASK][1]))
        for value in (MASK, IDS, LOG_PROBS):
            values[value][1] = values[value][1][:length]
        del values[MESSAGES][1][messages or len(values[MESSAGES][1]) :]

    return fault


def other_result(content: str) -> Planted:
    """Return the fault of another first result of row 1, in its message and in its tokens."""

    def fault(trainer: Any, values: Values) -> None:
        message = values[MESSAGES][1][1]
        message["content"] = content
        replaced(values, 1, *places_of_result(values[MASK][1]), trainer._get_tool_suffix_ids([message]))

    return fault


def end_twice(trainer: Any, values: Values) -> None:
    replaced(values, 3, len(values[IDS][3]) - 1, len(values[IDS][3]), [trainer._tokenizer.eos_token_id] * 2)


def padding_inside(trainer: Any, values: Values) -> None:
    replaced(values, 1, 4, 4, [trainer._tokenizer.pad_token_id] * 2)


def tokenized_again(trainer: Any, values: Values) -> None:
    # Byte by byte: other tokens of the same text.
    end = end_of_turn(values[MASK][0]) - 2
    text = trainer._tokenizer.decode(values[IDS][0][:end])
    ids = [token for letter in text for token in trainer._tokenizer(letter, add_special_tokens=False)["input_ids"]]
    replaced(values, 0, 0, end, ids)


def without_thinking(trainer: Any, values: Values) -> None:
    end = end_of_turn(values[MASK][0])
    text = trainer._tokenizer.decode(values[IDS][0][:end])
    kept = trainer._tokenizer(re.sub(r"<think>.*</think>\n\n", "", text, flags=re.S), add_special_tokens=False)
    replaced(values, 0, 0, end, kept["input_ids"])


def without_end(trainer: Any, values: Values) -> None:
    end = end_of_turn(values[MASK][3 + GROUP])
    replaced(values, 3 + GROUP, end - 1, end, [])


def without_last_end(trainer: Any, values: Values) -> None:
    values[MASK][3].pop()
    values[IDS][3].pop()


def cut_result(trainer: Any, values: Values) -> None:
    start = end_of_turn(values[MASK][1])
    replaced(values, 1, start + 8, start + 9, [])


def last_turn(mask: Sequence[int]) -> int:
    return len(mask) - mask[::-1].index(0)


def lost_turn(trainer: Any, values: Values) -> None:
    last = last_turn(values[MASK][5])
    values[MASK][5], values[IDS][5] = values[MASK][5][:last], values[IDS][5][:last]
    values[MESSAGES][5].pop()


def masked_turn(trainer: Any, values: Values) -> None:
    last = last_turn(values[MASK][5])
    values[MASK][5][last:] = [0] * len(values[MASK][5][last:])


def mask_of_another_row(trainer: Any, values: Values) -> None:
    values[MASK][2] = values[MASK][1][: len(values[MASK][2])]


def generation_prompt_twice(trainer: Any, values: Values) -> None:
    stop = places_of_result(values[MASK][1])[1]
    added = trainer._tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    values[MASK][1][stop:stop] = [0] * len(added)
    values[IDS][1][stop:stop] = added


def other_arguments(trainer: Any, values: Values) -> None:
    values[MESSAGES][1][0]["tool_calls"][0]["function"]["arguments"]["a"] = 7


def without_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message for message in messages if message["role"] != "tool"]


def turn_twice(trainer: Any, values: Values) -> None:
    turn = values[IDS][1][places_of_result(values[MASK][1])[1] :]
    values[MASK][1] = values[MASK][1] + [1] * len(turn)
    values[IDS][1] = values[IDS][1] + turn


def turns_in_another_order(trainer: Any, values: Values) -> None:
    start, stop = places_of_result(values[MASK][2])
    for value in (MASK, IDS):
        row = values[value][2]
        values[value][2] = row[stop:] + row[start:stop] + row[:start]


def reversed_rows(trainer: Any, values: Values) -> None:
    for rows in values[:4]:
        rows.reverse()


def log_probs_of_sampled_tokens_only(trainer: Any, values: Values) -> None:
    row = zip(values[LOG_PROBS][1], values[MASK][1], strict=True)
    values[LOG_PROBS][1] = [value for value, mask in row if mask]


def repeated_row(trainer: Any, values: Values) -> None:
    for rows in values[:3]:
        rows[0] = copy.deepcopy(rows[1])


def lost_result(trainer: Any, values: Values) -> None:
    replaced(values, 2, *places_of_result(values[MASK][2]), [])
    del values[MESSAGES][2][1:3]


def one_token_more(trainer: Any, values: Values) -> None:
    values[MASK][6].append(0)
    values[IDS][6].append(5)


FAULTS: dict[str, tuple[Planted, str]] = {
    "shifted right": (changed(MASK, 1, lambda mask: [1, *mask[:-1]]), "row 1, token "),
    "shifted left": (changed(MASK, None, lambda masks: [[*mask[1:], 1] for mask in masks]), "row 0, token "),
    "longer mask": (changed(MASK, 2, lambda mask: [*mask, 1]), "row 2, token 0"),
    "tokenized again": (tokenized_again, "row 0, token "),
    "without thinking": (without_thinking, "row 0, token "),
    "swapped tokens": (swapped([MASK, IDS], 0, 4), "row 0, token 0"),
    "swapped rows": (swapped([MASK, MESSAGES, IDS], 1, 5), "row 1, token 0"),
    "swapped messages": (swapped([MESSAGES], 0, 3), "row 0, token 0"),
    "without end": (without_end, "row 7, token "),
    "without last end": (without_last_end, "row 3, token "),
    "cut result": (cut_result, "row 1, token "),
    "cut message": (changed_message(1, 1, content=""), "row 1, token "),
    "other result in the message": (changed_message(2, 1, content="4"), "row 2, token "),
    "lost turn": (lost_turn, "row 5, token "),
    "lost mask": (changed(MASK, 5, lambda mask: [1] * len(mask)), "row 5, token "),
    "masked row": (changed(MASK, 5, lambda mask: [0] * len(mask)), "row 5, token 0"),
    "masked turn": (masked_turn, "row 5, token "),
    "lost result": (lost_result, "row 2, token "),
    "one token more": (one_token_more, "row 6, token "),
    "repeated row": (repeated_row, "row 0, token 0"),
    "lost masks": (changed(MASK, None, lambda masks: None), "row 0, token 0"),
    "inverted mask": (changed(MASK, 1, lambda mask: [1 - one for one in mask]), "row 1, token 0"),
    "doubled mask": (changed(MASK, 1, lambda mask: [2 * one for one in mask]), "row 1, token 0"),
    "mask of another row": (mask_of_another_row, "row 2, token "),
    "unmasked end of a result": (changed_token(MASK, lambda start, stop: stop - 1, 1), "row 1, token "),
    "masked start of a turn": (changed_token(MASK, lambda start, stop: stop, 0), "row 1, token "),
    "masked token": (changed_token(MASK, lambda start, stop: 3, 0), "row 1, token 3"),
    "generation prompt twice": (generation_prompt_twice, "row 1, token "),
    "spaced result": (other_result(" 3"), "row 1, token "),
    "result of the next turn": (other_result("ab " * 9), "row 1, token "),
    "result of a user": (changed_message(1, 1, role="user"), "row 1, token "),
    "result of another tool": (changed_message(1, 1, name="repeat"), "row 1, token "),
    "other arguments": (other_arguments, "row 1, token 0"),
    "lost messages": (changed(MESSAGES, 1, without_results), "row 1, token 0"),
    "message more": (changed(MESSAGES, 3, lambda messages: [*messages, ANSWER]), "row 3, token 0"),
    "result more": (changed(MESSAGES, 3, lambda messages: [*messages, RESULT]), "row 3, token "),
    "end twice": (end_twice, "row 3, token "),
    "padding inside": (padding_inside, "row 1, token 4"),
    "cut row": (cut(lambda start, stop: -5), "row 1, token "),
    "cut in a result": (cut(lambda start, stop: start + 4), "row 1, token "),
    "first turn only": (cut(lambda start, stop: start, messages=1), "row 1, token "),
    "turn twice": (turn_twice, "row 1, token "),
    "turns in another order": (turns_in_another_order, "row 2, token 0"),
    "reversed rows": (reversed_rows, "row 0, token 0"),
    "shifted log-probabilities": (changed(LOG_PROBS, 1, lambda values: [0.0, *values[:-1]]), "row 1, token 0"),
    "swapped values": (swapped([LOG_PROBS], 3, 6), "row 3, token 0"),  # both have one turn
    "log-probabilities of sampled tokens only": (log_probs_of_sampled_tokens_only, "row 1, token "),
    "log-probability of a result": (changed_token(LOG_PROBS, lambda start, stop: start, -1.0), "row 1, token "),
    "NaN": (changed_token(LOG_PROBS, lambda start, stop: 0, math.nan), "row 1, token 0"),
    "lost log-probabilities": (changed(LOG_PROBS, None, lambda rows: None), "row 0, token 0"),
}
"""Faults, and the place that is named for each, without the token where the tokenizer decides on it."""
NEEDS_MESSAGES = {"cut message", "other result in the message", "swapped messages", "other arguments"}
"""Faults that are found only where the messages of the row are rendered and parsed."""
QUICK = (
    "shifted left",
    "tokenized again",
    "swapped rows",
    "other result in the message",
    "lost turn",
    "swapped values",
)


@pytest.mark.parametrize("own_loop", [True, False], ids=["our loop", "TRL's loop"])
def test_true_turns_pass(own_loop: bool, scripted: Any) -> None:
    scripted._tool_turns.are_trls = lambda fields: not own_loop
    play(scripted)
    assert scripted.loops[-1][4] == 9


def test_a_planted_fault_is_named(scripted: Any) -> None:
    """In later batches too, when the messages of few rows are rendered and parsed."""
    for name in QUICK:
        fault, place = FAULTS[name]
        assert place_named(scripted, fault).startswith(place), name
    scripted._turn_check.enabled = False
    assert place_named(scripted, FAULTS["shifted left"][0]) == "", "the check is switched off"
    scripted._turn_check.enabled = True


@pytest.mark.slow
def test_every_planted_fault_is_named_in_the_first_batches_and_later(scripted: Any) -> None:
    check, unnamed = scripted._turn_check, []
    for check.all_messages in (True, False):
        check.batches = 5
        for name, (fault, place) in FAULTS.items():
            if check.all_messages or name not in NEEDS_MESSAGES:
                found = place_named(scripted, fault)
                if not found.startswith(place):
                    unnamed.append((name, check.all_messages, found))
    check.all_messages = True
    assert not unnamed


def test_a_turn_ends_with_an_end_token_or_as_the_settings_say(scripted: Any) -> None:
    scripted._generation = ScriptedGeneration(scripted, ends=False)
    assert place_named(scripted).startswith("row 0, token ")
    for key in ("max_new_tokens", "stop_token_ids", "seed"):
        scripted.args.generation_kwargs = {key: 1}
        assert bool(place_named(scripted)) is (key == "seed")
    scripted.args.generation_kwargs = None


def test_another_context_is_named(scripted: Any) -> None:
    """The generator of later turns reads other tokens than the row holds."""
    turns, words = scripted._tool_turns, scripted._tokenizer
    generate_next = turns._generate
    for old, new in (
        (THOUGHT, ""),
        ("<|im_end|>\n<|im_start|>user\n<tool", "\n<|im_start|>user\n<tool"),
        ("3\n</tool_response>", "\n</tool_response>"),
    ):

        def changed_contexts(prompts: list[list[int]], old: str = old, new: str = new) -> Any:
            texts = [words.decode(prompt).replace(old, new) for prompt in prompts]
            return generate_next([words(text, add_special_tokens=False)["input_ids"] for text in texts])

        turns._generate = changed_contexts
        assert place_named(scripted).startswith("row "), old


Prompts = Callable[[Any, Callable[[Any], Any], list[Any]], Any]
"""Function of a trainer, its `_tokenize_prompts` and the prompts."""


def with_another_trainer(**attributes: Any) -> Prompts:
    """Let the prompts be rendered by a trainer with other attributes."""

    def tokenize(trainer: Any, real: Callable[[Any], Any], prompts: list[Any]) -> Any:
        other = copy.copy(trainer)
        vars(other).update(attributes)
        return GRPOTrainer._tokenize_prompts(other, prompts)

    return tokenize


def with_ids(change: Callable[[list[int]], list[int]]) -> Prompts:
    """Let the tokens of the prompts be changed."""

    def tokenize(trainer: Any, real: Callable[[Any], Any], prompts: list[Any]) -> Any:
        ids, *rest = real(prompts)
        return [change(row) for row in ids], *rest

    return tokenize


PROMPT_FAULTS: dict[str, Prompts] = {
    "tools": with_another_trainer(tools=[]),
    "a tool": with_another_trainer(tools=TOOLS[:-1]),
    "thinking": with_another_trainer(chat_template_kwargs={"enable_thinking": False}),
    "row": lambda trainer, real, prompts: real(prompts[GROUP:] + prompts[:GROUP]),
    "system": lambda trainer, real, prompts: real([prompt[1:] for prompt in prompts]),
    "generation prompt": with_ids(lambda ids: ids[:-3]),
    "twice": with_ids(lambda ids: ids + ids[-3:]),
    "beginning": with_ids(lambda ids: ids[20:]),
    "token": with_ids(lambda ids: [1, *ids]),
}


@pytest.mark.parametrize("fault", only(["a tool", "thinking", "token"], PROMPT_FAULTS))
def test_another_prompt_is_named(fault: str, scripted: Any) -> None:
    real = scripted._tokenize_prompts
    scripted._tokenize_prompts = lambda prompts: PROMPT_FAULTS[fault](scripted, real, prompts)
    cases = [{"prompt": [{"role": "system", "content": "Be brief."}, *case["prompt"]]} for case in CASES]
    with pytest.raises(NotThePolicy, match="row 0, token 0.*prompt"):
        scripted._generate_and_score_completions(copy.deepcopy(cases))


def test_results_of_other_calls_are_named(scripted: Any) -> None:
    runner = scripted._tool_turns.runner
    run = runner.run
    for row, fault in (
        (0, lambda found: found[1:] + found[:1]),  # results of other rows
        (2, lambda found: [results[:1] for results in found]),
        (0, lambda found: [results * 2 for results in found]),
        (2, lambda found: [results[::-1] for results in found]),
    ):
        runner.run = lambda calls, fault=fault: fault(run(calls))
        assert place_named(scripted).startswith(f"row {row}, token ")
    del runner.run


def one_token_changed(batch: dict[str, Any]) -> None:
    batch["completion_ids"][2, 3] += 1


def one_mask_changed(batch: dict[str, Any]) -> None:
    batch["tool_mask"][1, 3] = 0


def row_without_a_label(batch: dict[str, Any]) -> None:
    batch["tool_mask"][2] = 0
    one_token_changed(batch)


ROW_FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no mask": lambda batch: batch.pop("tool_mask"),
    "ones": lambda batch: batch["tool_mask"].fill_(1),
    "shifted": lambda batch: batch.update(tool_mask=batch["tool_mask"].roll(1, 1)),
    "masks of other rows": lambda batch: batch.update(tool_mask=batch["tool_mask"].flip(0)),
    "mask": one_mask_changed,
    "token": one_token_changed,
    "truncated": lambda batch: batch["completion_mask"][:, -3:].fill_(0),
    "prompts": lambda batch: batch.update(prompt_ids=batch["prompt_ids"].flip(0)),
    "beginning of prompts": lambda batch: batch["prompt_mask"][:, :9].fill_(0),
}


@pytest.mark.parametrize("fault", [*only(["no mask", "mask", "token"], ROW_FAULTS), "nothing"])
def test_a_fault_in_the_rows_of_training_is_named(fault: str, scripted: Any) -> None:
    """A row whose loss has no token may hold any."""
    regroup = scripted._regroup

    def faulty(padded: list[dict[str, Any]]) -> None:
        ROW_FAULTS.get(fault, row_without_a_label)(padded[0])
        regroup(padded)

    scripted._regroup, scripted._buffered_inputs = faulty, None
    with nullcontext() if fault == "nothing" else pytest.raises(NotThePolicy, match="micro-batch 0"):
        scripted._prepare_inputs(copy.deepcopy(CASES))


# Rows whose tokens are letters, with a call of one letter, a result in brackets and "." as the end of a turn


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def proof(turns: dict[str, list[str]], longest: int = 30, **settings: Any) -> Proof:
    """Return the proof of rows of letters whose turns were sampled in these contexts, those of a prompt "p" first."""
    recorded = Turns()
    for context, sampled in turns.items():
        recorded.record([ids_of(context)] * len(sampled), [ids_of(text) for text in sampled])

    def text(ids: Any) -> str:
        return "".join(map(chr, ids))

    return Proof(
        recorded,
        longest,
        decode=text,
        parse=lambda ids, prefix, tools: {"role": "assistant", "content": text(ids)},
        render=lambda messages: [*ids_of("".join(f"<{message['content']}>" for message in messages))],
        render_prompt=lambda messages, tools: [*ids_of(messages[0]["content"])],
        ends=lambda ids: ids[-1:] == [ord(".")],
        **settings,
    )


def lettered(completion: str, prompt: str = "p", number: int = 0, messages: Any = None) -> Transcript:
    """Return a row. The letters of a result are not sampled."""
    mask = [1 - (completion.count("<", 0, n + 1) > completion.count(">", 0, n)) for n in range(len(completion))]
    return Transcript(number, list(ids_of(prompt)), list(ids_of(completion)), mask, messages)


TWO_TURNS = {"p": ["ab."], "pab.<3>": ["cd.", "xyz."]}


ONE_TURN: dict[str, list[str]] = {"p": ["ab."]}
ROWS: list[tuple[dict[str, list[str]], int, str, int | None]] = [
    (TWO_TURNS, 30, "ab.<3>cd.", None), (TWO_TURNS, 30, "ab.<3>xyz.", None), (TWO_TURNS, 8, "ab.<3>cd", None),
    (TWO_TURNS, 6, "ab.<3>", None), (TWO_TURNS, 2, "ab", None), (TWO_TURNS, 9, "ab.<3>cd", 8),
    (TWO_TURNS, 8, "ab.<3>cX", 7), (TWO_TURNS, 30, "ab.<3>cX.", 7), (TWO_TURNS, 30, "ab.<3>cdd.", 8),
    (TWO_TURNS, 30, "ab.<3>ab.", 6),  # a token of another turn
    (TWO_TURNS, 30, "ab.<3>", 6),  # the turn after the result is lost
    (TWO_TURNS, 30, "ab.<4>cd.", 4),  # the generator read another result
    ({"p": ["ab"], "pab<3>": ["c."]}, 30, "ab<3>c.", 2),  # a turn without its end
    ({"p": ["ab."], "pab.<3>": [""]}, 30, "ab.<3>", None),
    (ONE_TURN, 30, "ab.<3>", None),  # the generator was not asked for another turn
    ({"p": [""]}, 30, "", None),
    ({"p": ["a.", "b."]}, 30, "b.", 0),  # a token of another row
    ({"p": ["ab.", "q."], "pab.<3>": ["cd."]}, 30, "ab.<3>q.", 6),
    ({"q": ["ab."]}, 30, "ab.", 0),  # a token of another prompt
    ({"q": ["x."], "p": ["ab."]}, 30, "ab.", 0),
]  # fmt: skip


def token_of(fault: Fault | None) -> int | None:
    """Return the token that a fault of the only row names."""
    if fault is None:
        return None
    assert fault.row == 0
    return fault.token


def test_the_tokens_of_a_row_are_those_that_were_sampled() -> None:
    for turns, longest, completion, token in ROWS:
        assert token_of(proof(turns, longest)(lettered(completion), with_messages=False)) == token, completion


def test_a_turn_stands_in_as_many_rows_as_it_was_sampled_for() -> None:
    checked = proof({"p": ["ab.", "ab."], "pab.<3>": ["cd.", "xyz."]})
    first, second = lettered("ab.<3>cd."), lettered("ab.<3>xyz.", number=1)
    assert checked.count([first, second]) is None
    for other, token in (("ab.<3>cd.", 6), ("ab.", 3)):  # the first row's turn, and no later turn
        fault = checked.count([first, lettered(other, number=1)])
        assert fault is not None
        assert (fault.row, fault.token) == (1, token)


def numbers(text: str) -> list[float]:
    """Return a number for each letter, and 0 for 0."""
    return [-float(ord(letter) - ord("0")) for letter in text]


def test_log_probabilities_are_those_of_the_sampled_tokens() -> None:
    turns = Turns()
    turns.record([ids_of("p")], [ids_of("ab.")], [numbers("abc")])
    turns.record([ids_of("pab.<3>")] * 2, [ids_of("cd."), ids_of("xyz.")], [numbers("def"), numbers("uvwx")])
    for completion, values, token in (
        ("ab.<3>cd.", "abc000def", None),
        ("ab.<3>cd.", "abc000deX", 6),
        ("ab.<3>cd.", "abc000uvw", 6),  # those of the other turn
        ("ab.<3>xyz.", "abc000uvwx", None),
        ("ab.<3>cd", "abc000de", None),  # cut
        ("ab.<3>", "abc000", None),
        ("ab.<3>", "abc00", 3),
        ("ab.<3>", "abc00X", 3),
        ("ab.<3>", "abX000", 0),
    ):
        row = replace(lettered(completion), log_probs=numbers(values))
        found = replace(proof({}, len(completion)), turns=copy.deepcopy(turns))(row, with_messages=False)
        assert token_of(found) == token, (completion, values)


COVERED: list[tuple[dict[str, list[str]], str, bool]] = [
    (ONE_TURN, "ab.", True), (ONE_TURN, "ab.<3>", True), (ONE_TURN, "ab.<3>cd.", False),
    ({"p": ["ab."], "pab.<3>": ["cd."]}, "ab.<3>cd.", True), ({"p": ["ab."], "qab.<3>": ["cd."]}, "ab.<3>cd.", False),
    ({"q": ["ab."]}, "ab.", False), ({"q": ["ab."]}, "ab.<3>", False), ({"q": ["a"]}, "a<3>", False),
    ({"q": ["ab."]}, "<3>", True), ({"q": ["ab."]}, "", True), ({"pp": ["cd."]}, "<3>cd.", True),
]  # fmt: skip


def test_a_row_is_checked_if_its_turns_were_recorded() -> None:
    for turns, completion, is_covered in COVERED:
        assert proof(turns, in_order=False).covers(lettered(completion)) == is_covered
        assert proof(turns).covers(lettered(completion)), "a trainer's own turns are always recorded"
        assert not proof({}).covers(lettered(completion))


def add(a: int) -> int:
    return a


async def add_later(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("returned", "ending", "shown", "token"),
    [
        (["3", "4"], "answered", ["3", "4"], None),
        (["3", "4"], "answered", ["3", "5"], 9),
        (["3", "4"], "answered", ["5", "4"], 3),
        (["3", "44"], "full", ["3", "4"], None),  # cut to the room that was left
        (["33", "4"], "full", ["3", "4"], 3),
        (["3"], "answered", ["3", "4"], 9),
        (["3"], "no room", ["3"], None),
        (["3"], "no room", ["3", "4"], 9),
        (["3"], "iterations", ["3"], None),
        (["3"], "answered", ["3"], 9),  # the last calls have no answer
    ],
)
def test_the_results_of_a_row_are_what_its_tools_returned(
    returned: list[str], ending: Any, shown: list[str], token: int | None
) -> None:
    """A row of two turns with a call each, of which the second may have no result."""
    arguments: list[dict[str, int]] = [{"a": 1}, {"a": 1}]
    turns = [[Result("add", text, arguments=given)] for text, given in zip(returned, arguments, strict=False)]
    row = Row([], [], [], RowTools({"add": add}), turns=turns, ending=ending)
    messages: list[dict[str, Any]] = []
    for number, given in enumerate(arguments):
        messages.append({"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": given}}]})
        messages += [{"role": "tool", "name": "add", "content": text} for text in shown[number : number + 1]]
    completion = "ab.<3>cd.<4>" if len(shown) == 2 else "ab.<3>cd."
    found = proof(TWO_TURNS)(replace(lettered(completion, messages=messages), played=row), with_messages=False)
    assert token_of(found) == token


@pytest.mark.parametrize(
    ("order", "refused", "token"),
    [
        ([0, 2, 1], (), None),  # async tools run after the others
        ([0, 1, 2], (), None),
        ([2, 0, 1], (), 3),
        ([2, 0, 1], (2,), None),  # a refused call was not run
        ([0, 1, 1], (), 3),
        ([0, 1], (), 3),
    ],
)
def test_results_stand_in_the_order_in_which_calls_run(
    order: list[int], refused: tuple[int, ...], token: int | None
) -> None:
    """A turn calls a sync tool, an async one and the sync one again, with equal arguments."""
    names, arguments = ["add", "add_later", "add"], [{"a": 1}, {"a": 1}, {"a": 1}]
    results = [Result(names[call], "3", made=call not in refused, arguments=arguments[call]) for call in order]
    calls = [{"name": name, "arguments": given} for name, given in zip(names, arguments, strict=True)]
    row = Row([], [], [], RowTools({"add": add, "add_later": add_later}), turns=[results])
    messages = [{"role": "assistant", "tool_calls": calls}]
    messages += [{"role": "tool", "name": result.name, "content": "3"} for result in results]
    found = proof(TWO_TURNS, 6)(replace(lettered("ab.<3>", messages=messages), played=row), with_messages=False)
    assert token_of(found) == token


def test_a_rollout_function_may_join_and_cut_its_turns() -> None:
    turns = {"p": ["ab."], "pab.": ["cd."], "pab.c<3>": ["xyz."]}
    for completion, token in (("ab.cd.", None), ("ab", None), ("ab.c<3>x", None), ("ab.X", 3), ("aX", 1)):
        assert token_of(proof(turns, in_order=False)(lettered(completion), with_messages=False)) == token, completion


Rollout = dict[str, list[list[int]]]


def rollout(trainer: Any, prompts: list[Any], change: Callable[[Rollout], None]) -> dict[str, Any]:
    """Return two turns of each prompt with an answer of an environment between them, as a `rollout_func` does."""

    def sample(contexts: list[list[int]]) -> list[list[int]]:
        return trainer._generate_single_turn(contexts, None, {}, 1)[0]

    def tokenized(text: str) -> list[int]:
        return trainer._tokenizer(text, add_special_tokens=False)["input_ids"]

    prompt_ids = [tokenized(prompt[0]["content"]) for prompt in prompts]
    completions = [ids[:-1] for ids in sample(prompt_ids)]  # a rollout may drop the end of a turn
    mask = [[1] * len(ids) for ids in completions]
    for ids, values in zip(completions, mask, strict=True):
        answer = tokenized("<env>12</env>")
        ids += answer
        values += [0] * len(answer)
    contexts = [prompt + ids for prompt, ids in zip(prompt_ids, completions, strict=True)]
    for ids, values, turn in zip(completions, mask, sample(contexts), strict=True):
        ids += turn
        values += [1] * len(turn)
    output = {"prompt_ids": prompt_ids, "completion_ids": completions, "env_mask": mask}
    change(output)
    return {**output, "logprobs": None}


@pytest.fixture(scope="module")
def without_tools(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Build a trainer without tools whose generator writes the script."""
    made = tool_trainer(GRPOTrainer, tmp_path_factory.mktemp("rollouts"), tools=None)
    made._generation = ScriptedGeneration(made)
    made.model.train()
    return made


def shift_rollout(output: Rollout) -> None:
    output["env_mask"] = [[1, *mask[:-1]] for mask in output["env_mask"]]


def change_token(output: Rollout) -> None:
    output["completion_ids"][3][2] += 1


def change_answer(output: Rollout) -> None:
    first = output["env_mask"][2].index(0)
    output["completion_ids"][2][first + 6] += 1


def reorder(output: Rollout) -> None:
    for rows in output.values():
        rows.reverse()


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda output: None, ""),
        (reorder, ""),
        (shift_rollout, "row 0, token "),
        (change_token, "row 3, token 2"),
        (change_answer, "row 2, token "),
    ],
    ids=["none", "reordered", "mask", "token", "answer"],
)
def test_turns_of_a_rollout_function(change: Callable[[Rollout], None], place: str, without_tools: Any) -> None:
    without_tools.rollout_func = lambda prompts, trainer: rollout(trainer, prompts, change)
    found = place_named(without_tools)
    assert found.startswith(place) if place else found == ""
