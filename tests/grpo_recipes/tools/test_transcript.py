"""Are all tokens of a completion with tool calls those that were sampled, or the template's? Planted faults."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from grpo_recipes import GRPOTrainer
from grpo_recipes.process.faults import NotThePolicy
from tests.support import tool_rollouts
from tests.support.tool_rollouts import ADD, GROUP, REPEAT

THOUGHT = "<think>\nso\n</think>\n\n"
SCRIPT = [
    [[THOUGHT + ADD], [ADD, REPEAT], [ADD + ADD], []],
    [[ADD, THOUGHT + ADD], [REPEAT], [], [ADD]],
]
CASES = [{"prompt": [{"role": "user", "content": f"case {n}"}]} for n in range(2) for _ in range(GROUP)]

Values = list[Any]
"""Mask, messages and tokens of the rows of a batch, the first of TRL's seven values."""


class ScriptedGeneration:
    """Generator that writes the script, in place of a trainer's `Generation`."""

    def __init__(self, trainer: Any) -> None:
        self.tokenizer = trainer._tokenizer

    def one_batch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __call__(self, turn: Any, prompts: Sequence[Sequence[int]], *rest: Any) -> tuple[list[list[int]], None, None]:
        return tool_rollouts.next_turns(SCRIPT, self.tokenizer, prompts), None, None


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Build a trainer whose generator writes the script, below the method that records turns."""
    made = tool_rollouts.tool_trainer(GRPOTrainer, tmp_path_factory.mktemp("run"))
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


def generate(trainer: Any) -> None:
    """Generate and check one batch."""
    trainer._generate_and_score_completions(copy.deepcopy(CASES))


def planted(trainer: Any, fault: Callable[[Any, Values], None]) -> None:
    """Let a fault change what the tool loop returns."""
    loop = trainer._tool_call_loop

    def faulty(*args: Any) -> Any:
        values = list(loop(*args))
        fault(trainer, values)
        return tuple(values)

    trainer._tool_call_loop = faulty


def end_of_turn(mask: Sequence[int]) -> int:
    """Return the number of tokens of the first turn."""
    return list(mask).index(0)


def replaced(values: Values, row: int, start: int, stop: int, ids: Sequence[int]) -> None:
    """Replace tokens of a row by others with the same mask."""
    mask, _, completions, *_ = values
    mask[row] = mask[row][:start] + [mask[row][start]] * len(ids) + mask[row][stop:]
    completions[row] = completions[row][:start] + list(ids) + completions[row][stop:]


def shifted_right(trainer: Any, values: Values) -> None:
    values[0][1] = [1, *values[0][1][:-1]]


def shifted_left(trainer: Any, values: Values) -> None:
    values[0] = [[*mask[1:], 1] for mask in values[0]]


def longer_mask(trainer: Any, values: Values) -> None:
    values[0][2] = [*values[0][2], 1]


def tokenized_again(trainer: Any, values: Values) -> None:
    # Byte by byte: other tokens of the same text.
    end = end_of_turn(values[0][0]) - 2
    text = trainer._tokenizer.decode(values[2][0][:end])
    ids = [token for letter in text for token in trainer._tokenizer(letter, add_special_tokens=False)["input_ids"]]
    replaced(values, 0, 0, end, ids)


def without_thinking(trainer: Any, values: Values) -> None:
    end = end_of_turn(values[0][0])
    text = trainer._tokenizer.decode(values[2][0][:end])
    kept = trainer._tokenizer(re.sub(r"<think>.*</think>\n\n", "", text, flags=re.S), add_special_tokens=False)
    replaced(values, 0, 0, end, kept["input_ids"])


def swapped_tokens(trainer: Any, values: Values) -> None:
    for column in (0, 2):
        values[column][0], values[column][4] = values[column][4], values[column][0]


def swapped_rows(trainer: Any, values: Values) -> None:
    for column in (0, 1, 2):
        values[column][1], values[column][5] = values[column][5], values[column][1]


def swapped_messages(trainer: Any, values: Values) -> None:
    values[1][0], values[1][3] = values[1][3], values[1][0]


def without_end(trainer: Any, values: Values) -> None:
    end = end_of_turn(values[0][3 + GROUP])
    replaced(values, 3 + GROUP, end - 1, end, [])


def without_last_end(trainer: Any, values: Values) -> None:
    values[0][3].pop()
    values[2][3].pop()


def cut_result(trainer: Any, values: Values) -> None:
    start = end_of_turn(values[0][1])
    replaced(values, 1, start + 8, start + 9, [])


def cut_message(trainer: Any, values: Values) -> None:
    values[1][1][1]["content"] = ""


def other_result(trainer: Any, values: Values) -> None:
    values[1][2][1]["content"] = "4"


def lost_turn(trainer: Any, values: Values) -> None:
    last = len(values[0][5]) - values[0][5][::-1].index(0)
    values[0][5], values[2][5] = values[0][5][:last], values[2][5][:last]
    values[1][5].pop()


def repeated_row(trainer: Any, values: Values) -> None:
    for column in (0, 1, 2):
        values[column][0] = copy.deepcopy(values[column][1])


def lost_mask(trainer: Any, values: Values) -> None:
    values[0][5] = [1] * len(values[0][5])


def masked_row(trainer: Any, values: Values) -> None:
    values[0][5] = [0] * len(values[0][5])


def masked_turn(trainer: Any, values: Values) -> None:
    last = len(values[0][5]) - values[0][5][::-1].index(0)
    values[0][5][last:] = [0] * len(values[0][5][last:])


def lost_result(trainer: Any, values: Values) -> None:
    start = end_of_turn(values[0][2])
    stop = values[0][2].index(1, start)
    replaced(values, 2, start, stop, [])
    del values[1][2][1:3]


def one_token_more(trainer: Any, values: Values) -> None:
    values[0][6].append(0)
    values[2][6].append(5)


FAULTS: dict[Callable[[Any, Values], None], str] = {
    shifted_right: "row 1, token .*: the tool mask is shifted by one token to the right",
    shifted_left: "row 0, token .*: the tool mask is shifted by one token to the left",
    longer_mask: "row 2, .*: the mask has .* values for",
    tokenized_again: "row 0, token .*: the same text was sampled as other tokens: it was tokenized again",
    without_thinking: r"row 0, token .*: \d+ tokens that were sampled here are missing: '.*think>.*'",
    swapped_tokens: "row 0, token 0: these tokens were sampled for row 4",
    swapped_rows: "row 1, token 0: these tokens were sampled for row 5",
    swapped_messages: "row 0, token 0: the assistant's message is not what these tokens parse to",
    without_end: "row 7, token .*: the end token that was sampled here is missing",
    without_last_end: "row 3, token .*: the end token that was sampled here is missing",
    cut_result: "row 1, token .*: the tool result is not the template's rendering of its messages: 1 token that was",
    cut_message: r"row 1, token .*: the tool result is not the template's rendering of its messages: ",
    other_result: "row 2, token .*: the tool result is not the template's rendering of its messages: '3",
    lost_turn: "row 5, token .*: the turn that was sampled after this tool result is missing",
    lost_mask: r"row 5, token .*: \d+ tokens were not sampled: ",
    masked_row: "row 5, token 0: no message of the role 'tool' belongs to these tokens of tool results",
    masked_turn: "row 5, token .*: the tool result is not the template's rendering .* were not rendered",
    lost_result: r"row 2, token .*: \d+ tokens were not sampled: ",
    one_token_more: "row 6, token .*: no message of the role 'tool' belongs to these tokens of tool results",
    repeated_row: "row 0, token 0: these tokens were sampled for row 1",
}


@pytest.mark.parametrize("own_loop", [True, False], ids=["our loop", "TRL's loop"])
def test_true_turns_pass(own_loop: bool, scripted: Any) -> None:
    scripted._tool_turns.are_trls = lambda fields: not own_loop
    generate(scripted)
    assert scripted.loops[-1][4] == 9


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_named(fault: Callable[[Any, Values], None], scripted: Any) -> None:
    planted(scripted, fault)
    with pytest.raises(NotThePolicy, match=FAULTS[fault]) as caught:
        generate(scripted)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("set `generation_check: false` to go on anyway")


@pytest.mark.parametrize("fault", [shifted_right, without_end, masked_row, masked_turn, one_token_more, lost_turn])
def test_later_batches_prove_the_tokens_of_all_rows(fault: Callable[[Any, Values], None], scripted: Any) -> None:
    """After the first batches the messages of few rows are rendered and parsed."""
    scripted._turn_check.all_messages = False
    batches, scripted._turn_check.batches = scripted._turn_check.batches, 5
    try:
        generate(scripted)
        planted(scripted, fault)
        with pytest.raises(NotThePolicy, match="row"):
            generate(scripted)
    finally:
        scripted._turn_check.all_messages, scripted._turn_check.batches = True, batches


def faulty_contexts(trainer: Any, change: Callable[[str], str]) -> None:
    """Let the generator of later turns read other tokens than the row holds."""
    generate = trainer._tool_turns._generate

    def changed(prompts: list[list[int]]) -> Any:
        texts = [change(trainer._tokenizer.decode(prompt)) for prompt in prompts]
        return generate([trainer._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])

    trainer._tool_turns._generate = changed


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda text: text.replace(THOUGHT, ""), "tokens were not given to the generator: '<think>"),
        (lambda text: text.replace("<|im_end|>\n<|im_start|>user\n<tool", "\n<|im_start|>user\n<tool"), "im_end"),
        (lambda text: text.replace("3\n</tool_response>", "\n</tool_response>"), "not given to the generator: '3"),
    ],
    ids=["thinking", "end token", "result"],
)
def test_another_context_is_named(change: Callable[[str], str], named: str, scripted: Any) -> None:
    faulty_contexts(scripted, change)
    with pytest.raises(NotThePolicy, match=f"the generator was never given the tokens before them .*{named}"):
        generate(scripted)


Rollout = dict[str, list[list[int]]]


def rollout(trainer: Any, prompts: list[Any], change: Callable[[Rollout], None], own: bool = True) -> dict[str, Any]:
    """Return two turns of each prompt with an answer of an environment between them, as a `rollout_func` does.

    Args:
        trainer: the trainer.
        prompts: the prompts.
        change: function that changes what is returned.
        own: True to generate by the trainer's `_generate_single_turn`.
    """

    def sample(contexts: list[list[int]]) -> list[list[int]]:
        if own:
            return trainer._generate_single_turn(contexts, None, {}, 1)[0]
        return tool_rollouts.next_turns(SCRIPT, trainer._tokenizer, contexts)

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
    made = tool_rollouts.tool_trainer(GRPOTrainer, tmp_path_factory.mktemp("rollouts"), tools=None)
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
    ("change", "named"),
    [
        (lambda output: None, ""),
        (reorder, ""),
        (shift_rollout, "row 0, token .*: the tool mask is shifted by one token to the right"),
        (change_token, "row 3, token 2: .* stands where .* was sampled"),
        (change_answer, "row 2, token .*: these tokens were not sampled: .* stands where .* was given"),
    ],
    ids=["none", "reordered", "mask", "token", "answer"],
)
def test_turns_of_a_rollout_function(change: Callable[[Rollout], None], named: str, without_tools: Any) -> None:
    without_tools.rollout_func = lambda prompts, trainer: rollout(trainer, prompts, change)
    if not named:
        return generate(without_tools)
    with pytest.raises(NotThePolicy, match=named):
        generate(without_tools)


def test_turns_from_elsewhere_are_announced_once(without_tools: Any, caplog: pytest.LogCaptureFixture) -> None:
    without_tools.rollout_func = lambda prompts, trainer: rollout(trainer, prompts, shift_rollout, own=False)
    with caplog.at_level("WARNING"):
        generate(without_tools)
        generate(without_tools)
    found = [record.message for record in caplog.records if "not checked" in record.message]
    assert len(found) == 1
    assert "some turns were not generated by the trainer's `_generate_single_turn`" in found[0]


def test_nothing_is_checked_without_the_generation_check(scripted: Any) -> None:
    planted(scripted, shifted_left)
    scripted._turn_check.enabled = False
    try:
        generate(scripted)
    finally:
        scripted._turn_check.enabled = True


def test_turns_that_end_with_a_stop_string_pass(tmp_path: Any) -> None:
    tokenizer = tool_rollouts.tool_tokenizer()
    kwargs = {**tool_rollouts.only_calls(tokenizer), "stop": ["</tool_call>"]}
    settings = {"generation_kwargs": kwargs, "max_completion_length": 120, "mask_truncated_completions": True}
    made = tool_rollouts.tool_trainer(GRPOTrainer, tmp_path, tokenizer=tokenizer, **settings)
    made.model.train()
    torch.manual_seed(0)
    generate(made)
    assert made.loops[-1][4] > 0


def test_sampled_turns_pass(trainer: Any) -> None:
    torch.manual_seed(0)
    generate(trainer)
    assert trainer.loops[-1][4] > 0
