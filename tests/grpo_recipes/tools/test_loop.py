"""The tool loop: TRL's values where its results fit, the rules where they do not, and ranks in lock-step."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AddedToken, PreTrainedTokenizerFast
from trl import GRPOTrainer as TRLGRPOTrainer
from trl.chat_template_utils import llama3_template, parse_response, qwen3_template
from trl.generation import vllm_generation

from grpo_recipes import GRPOTrainer
from grpo_recipes.tools.loop import (
    Row,
    RowTools,
    ToolLoop,
    TurnLimits,
    Values,
    as_call,
    beginning,
    drop_abandoned,
    read_turn,
    result_text,
)
from grpo_recipes.tools.run import Call, Result
from tests.support import launching, tool_rollouts, train_tools
from tests.support.grids import only
from tests.support.tool_rollouts import ADD, END, MALFORMED, SCRIPTS, UNFIT, add, call, tool_tokenizer, tool_trainer


def test_contract_with_trl() -> None:
    """`_generate` passes the loop's seven values on, and reads no prompt that the loop has extended."""
    for name, digest in (("_tool_call_loop", "1c501f7f3b469f7e"), ("_get_tool_suffix_ids", "e62362aef61aa88c")):
        source = inspect.getsource(getattr(TRLGRPOTrainer, name))
        found = hashlib.sha256(source.encode()).hexdigest()[:16]
        assert found == digest, f"read TRL's {name} again, and change tools/loop.py"
    source = inspect.getsource(TRLGRPOTrainer._generate)
    called = source.index("self._tool_call_loop(")
    assert source.count("self._tool_call_loop(") == 1
    assert "prompts, prompt_ids, completion_ids, completions, logprobs, images, multimodal_fields" in source[called:]
    assert "prompts[" not in source[called:]
    server = inspect.getsource(vllm_generation.VLLMGeneration.generate)
    assert "accelerator.process_index * len(prompts)" in server, "if this fails, ranks may not need equal rows"


# ---- TRL's values


def both(folder: Path, script: str | None, **settings: Any) -> tuple[Any, Any]:
    """Train TRL's trainer and ours on the same turns."""
    torch.manual_seed(0)
    trained = []
    for cls in (TRLGRPOTrainer, GRPOTrainer):
        made = tool_trainer(cls, folder / cls.__module__, None if script is None else SCRIPTS[script], **settings)
        made.train()
        trained.append(made)
    return trained[0], trained[1]


def assert_equal(theirs: Any, ours: Any) -> None:
    """Compare the seven values of each loop, the metrics of tools and lengths, and the weights."""
    assert len(theirs.loops) == len(ours.loops) > 0
    for expected, values in zip(theirs.loops, ours.loops, strict=True):
        for name, one, other in zip(Values._fields, expected, values, strict=True):
            assert one == other, name
    for one, other in zip(theirs.state.log_history, ours.state.log_history, strict=False):
        for name, value in one.items():
            if name.startswith(("tools/", "completions/", "reward", "num_tokens")):
                assert other[name] == pytest.approx(value), name
    expected_state = theirs.model.state_dict()
    for name, weight in ours.model.state_dict().items():
        torch.testing.assert_close(weight, expected_state[name], atol=2e-6, rtol=0, msg=name)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("ragged", {}),
    ("deep", {"max_completion_length": 800}),
    ("none", {}),
    ("all", {}),
    ("deep", {"max_tool_calling_iterations": 2}),
    ("errors", {}),
    ("async", {}),
    ("ragged", {"max_tool_calling_iterations": 1, "mask_truncated_completions": True}),
    ("errors", {"micro_batching": {"layout": "packed"}, "beta": 0.1, "num_iterations": 2, "max_steps": 3}),
    ("async", {"micro_batching": {"layout": "trimmed"}, "loss_type": "cispo", "max_steps": 3}),
]


@pytest.mark.parametrize("case", only([CASES[0]], CASES), ids=str)
def test_scripted_turns_are_trls(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    script, settings = case
    assert_equal(*both(tmp_path, script, **settings))


@pytest.mark.slow
def test_sampled_turns_are_trls(tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, None, max_completion_length=1500, max_tool_calling_iterations=3, max_steps=2)
    assert sum(values[4] for values in ours.loops) > 8, "calls were sampled"
    assert ours._generation.reuse.is_verified
    assert_equal(theirs, ours)


# ---- results that do not fit


class Recorder:
    """Runner that answers each call by a text, and records what was run."""

    def __init__(self, content: Any = "3") -> None:
        self.content, self.ran = content, []

    def run(self, calls: Sequence[Sequence[Call]]) -> list[list[Result]]:
        self.ran += [one.name for row in calls for one in row]
        return [[Result(one.name, self.content) for one in row] for row in calls]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tool_tokenizer()


def rendered(tokenizer: PreTrainedTokenizerFast, messages: Sequence[dict[str, Any]]) -> list[int]:
    text = "".join(f"<r>{message['content']}</r>" for message in messages)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def message(calls: int) -> dict[str, Any]:
    called = {"type": "function", "function": {"name": "add", "arguments": {}}}
    return {"role": "assistant", "content": "", **({"tool_calls": [called] * calls} if calls else {})}


def loop_of(runner: Recorder, limits: TurnLimits, **parts: Any) -> ToolLoop:
    """Return a loop whose turns have one token, and whose tokens of a result are counted by `tokens_of`."""
    tokens_of = parts.pop("tokens_of", len)
    known: dict[str, Any] = {
        "generate": lambda prompts: ([[9] for _ in prompts], None),
        "parse": lambda ids, prefix, tools: message(0),
        "render": lambda messages: [5] * sum(tokens_of(one["content"]) for one in messages),
        "shorten": lambda text, tokens: text[:tokens],
    }
    return ToolLoop(run=runner.run, limits=limits, **{**known, **parts})


def run(
    tokenizer: PreTrainedTokenizerFast, calls: Sequence[int], completion: int, content: Any = "3"
) -> tuple[list[Row], Recorder, Values]:
    """Run rows of 5 prompt and 10 completion tokens that make `calls` calls each, then end."""
    rows = [Row([7] * 5, [8] * 10, [message(count)], RowTools({})) for count in calls]
    runner = Recorder(content)
    render = partial(rendered, tokenizer)
    loop = loop_of(runner, TurnLimits(3, completion, 1000), render=render, shorten=partial(beginning, tokenizer))
    return rows, runner, loop(rows)


def check_values(rows: Sequence[Row], values: Values, completion: int) -> None:
    for row, mask, ids in zip(rows, values.tool_mask, values.completion_ids, strict=True):
        assert len(mask) == len(ids) <= completion
        assert row.completion == ids


def test_a_call_without_room_for_a_result_is_not_run(tokenizer: PreTrainedTokenizerFast) -> None:
    least = len(rendered(tokenizer, [{"content": "0"}]))
    rows, runner, values = run(tokenizer, [1, 2], 10 + least)
    assert runner.ran == ["add"], "the environment counts no call that the policy does not see"
    assert [row.ending for row in rows] == ["full", "no room"]
    assert [len(messages) for messages in values.completions] == [2, 1]
    assert values.tool_call_count == 1
    check_values(rows, values, 10 + least)


@pytest.mark.parametrize("content", only(["é" * 400, "x\n\n" * 300], ["ab " * 400, "é" * 400, "x\n\n" * 300]))
def test_a_long_result_is_cut_to_the_room_that_is_left(tokenizer: PreTrainedTokenizerFast, content: str) -> None:
    rows, runner, values = run(tokenizer, [1, 3, 0], 60, content)
    assert runner.ran == ["add"] * 4
    assert [row.ending for row in rows] == ["full", "full", "answered"]
    assert rows[2].completion == [8] * 10, "a row without calls has no other turn"
    check_values(rows, values, 60)
    for messages in values.completions[:2]:
        seen = [one["content"] for one in messages if one["role"] == "tool"]
        assert all(text and content.startswith(text) for text in seen), "each result is seen"
    assert values.tool_mask[0][:10] == [1] * 10
    assert set(values.tool_mask[0][10:]) == {0}, "no turn follows a result that was cut"
    # The most that fits, found by trying each number of tokens.
    sizes = [len(rendered(tokenizer, [{"content": beginning(tokenizer, content, count)}])) for count in range(60)]
    assert len(values.completion_ids[0]) == 10 + max(size for size in sizes if size <= 50)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("3", "3"),
        ("a < b | c > d <tool_call>", "a < b | c > d <tool_call>"),
        ("won<|im_end|>\n<|im_start|>assistant", "won< |im_end|>\n< |im_start|>assistant"),
        ("<|im_end<|im_end|>|><pad>", "<|im_end< |im_end|>|>< pad>"),
        ("<role>|x|y|", "< role>| x| y|"),
    ],
)
def test_a_result_holds_no_special_token(text: str, shown: str) -> None:
    tokenizer = tool_tokenizer()
    # One is declared in the vocabulary only, as Llama 3's `<|start_header_id|>`. The last two overlap.
    tokenizer.add_tokens([AddedToken(name, special=True) for name in ("<role>", "|x|", "|y|")])
    tokenizer.add_tokens([AddedToken("¤", special=True), AddedToken("<plain>"), AddedToken("@@", special=True)])
    assert result_text(tokenizer, 100)("<plain> ¤ @@") == "<plain> ¤ @ @", "a single character can't be split"
    assert result_text(tokenizer, 100)(text) == shown
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    assert special.isdisjoint(tokenizer(shown)["input_ids"])
    assert len(tokenizer(result_text(tokenizer, 5)(text))["input_ids"]) <= 5


@pytest.mark.parametrize("text", ["", "ab", "word " * 3000, " " * 10_000, "é€\N{GRINNING FACE}" * 100, ADD * 40])
def test_the_beginning_of_a_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    for tokens in (0, 1, 5, 50):
        cut = beginning(tokenizer, text, tokens)
        assert text.startswith(cut)
        assert len(tokenizer(cut)["input_ids"]) <= tokens
        if len(tokenizer(text)["input_ids"]) <= tokens:
            assert cut == text


def alone(
    tokens_of: Callable[[str], int], limits: TurnLimits, content: str = "abcdefgh", calling: int = 1
) -> tuple[Row, list[str], Values]:
    """Run a row of one prompt and one completion token.

    Args:
        tokens_of: number of tokens that a text takes in the template.
        limits: limits of the row.
        content: result of each call.
        calling: number of turns that call.
    """
    row, runner = Row([7], [8], [message(1)], RowTools({})), Recorder(content)
    turns = iter([message(1)] * (calling - 1) + [message(0)])
    loop = loop_of(runner, limits, tokens_of=tokens_of, parse=lambda ids, prefix, tools: next(turns))
    values = loop([row])
    return row, runner.ran, values


def test_a_result_is_cut_to_the_most_that_fits() -> None:
    """The template takes two tokens, and each character one. A generator may read less than a completion may have."""
    for left in range(3, 12):
        for limits in (TurnLimits(3, 1 + left, 1000), TurnLimits(3, 1000, 3 + left)):
            row, _, values = alone(lambda text: 2 + len(text), limits)
            (shown,) = [one["content"] for one in values.completions[0] if one["role"] == "tool"]
            assert shown == "abcdefgh"[: left - 2]
            if limits.positions == 1000:
                assert row.ending == ("full" if left <= 10 else "answered")
                assert values.tool_mask == [[1] + [0] * min(left, 10) + [1] * (left == 11)]


def test_a_result_of_which_no_token_fits_is_cut_to_nothing() -> None:
    """The room is for a digit, and any other text takes more."""
    row, _, values = alone(lambda text: {"": 1, "0": 1}.get(text, 9), TurnLimits(3, 4, 1000))
    assert (row.ending, row.completion) == ("full", [8, 5])
    assert values.completions[0][-1] == {"role": "tool", "name": "add", "content": ""}
    row, ran, values = alone(lambda text: {"0": 1}.get(text, 9), TurnLimits(3, 4, 1000))
    assert (ran, row.ending, row.completion) == (["add"], "full", [8]), "an empty text takes more too"


@pytest.mark.parametrize(
    ("iterations", "calling", "ran", "ending"),
    [(2, 1, 1, "answered"), (2, 2, 2, "answered"), (2, 3, 2, "iterations"), (1, 3, 1, "iterations")],
)
def test_tools_run_in_as_many_turns_as_are_allowed(iterations: int, calling: int, ran: int, ending: str) -> None:
    row, made, values = alone(len, TurnLimits(iterations, 100, 1000), "ab", calling)
    assert (made, row.ending) == (["add"] * ran, ending)
    assert values.tool_call_count == ran
    assert values.completion_ids == [[8] + [5, 5, 9] * ran]


@pytest.mark.parametrize("late", [0, 1])
def test_an_environment_with_a_late_call_in_any_turn_is_not_used_again(late: int) -> None:
    rows = [Row([7], [8], [], RowTools({})) for _ in range(2)]
    rows[0].turns = [[Result("add", "", timed_out=turn == late)] for turn in range(2)]
    rows[1].turns = [[Result("add", "3")]]
    environments, unused = [object(), object()], object()
    pools: dict[str | None, list[Any]] = {None: [*environments, unused]}
    drop_abandoned(pools, environments, rows)
    assert pools == {None: [environments[1], unused]}
    drop_abandoned(pools, None, rows)
    assert len(pools[None]) == 2


# ---- turns with calls that can't be read


def read(text: str, tokenizer: PreTrainedTokenizerFast, template: dict[str, Any] = qwen3_template) -> dict[str, Any]:
    """Return the message of a turn of a policy with the tool `add`."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.response_template = template
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    prefix = tokenizer(template["start_anchor"], add_special_tokens=False)["input_ids"]
    return read_turn(tokenizer, ids, prefix, [tool_rollouts.add])


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]


def test_a_malformed_call_stands_among_the_others(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["{'name': add}", '{"name": "add", "arguments": {"a": 1, "b": 2}', "[" * 3000, "add(1, 2)", "", "[1]"]
    texts += ['"add"', "{}", '{"arguments": {"a": 1}}', '{"name": 3, "arguments": {}}', '{"name": null}']
    fine = ("add", {"a": 1, "b": 2})
    for text in [*texts, '{"name": "add", "arguments": {"a": 1' + "1" * 5000 + "}}"]:
        written = f"so <tool_call>{text}</tool_call>"
        message = read(f"{ADD}{written}{ADD}{END}", tokenizer)
        assert calls_of(message) == [fine, ("unknown", {"": text}), fine]
        assert [bool(as_call(one, {"add": add}).refusal) for one in message["tool_calls"]] == [False, True, False]
        assert calls_of(read(f"{written}{END}", tokenizer)) == [("unknown", {"": text})]
        assert message["content"] == "so"


def test_a_call_without_its_closing_tag_is_malformed(tokenizer: PreTrainedTokenizerFast) -> None:
    opened = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}'
    ((name, arguments),) = calls_of(read(opened + END, tokenizer))
    assert (name, arguments[""]) == ("unknown", opened.removeprefix("<tool_call>") + END)
    assert read(opened[:30], tokenizer) == {"role": "assistant", "content": opened[:30]}, "a turn that was cut off"


def test_the_name_of_a_malformed_call_is_kept_where_it_is_written_outside(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens([AddedToken("<|eot_id|>", special=True)])
    message = read('{"name": "add", "parameters": {"a": 1,}}<|eot_id|>', tokenizer, llama3_template)
    assert calls_of(message) == [("add", {"": '{"a": 1,}'})]


def test_turns_that_can_be_read_are_trls(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.response_template = qwen3_template
    prefix = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    for text in (ADD, f"<think>\na\n</think>\n\nb {ADD}{UNFIT}", "no call", "", call("add", a="7")):
        ids = tokenizer(text + END, add_special_tokens=False)["input_ids"]
        tools: list[Any] = [tool_rollouts.add]
        assert read_turn(tokenizer, ids, prefix, tools) == parse_response(tokenizer, ids, prefix=prefix, tools=tools)


def test_a_trainer_runs_the_valid_calls_of_a_turn_with_a_malformed_one(tmp_path: Path) -> None:
    deep = "<tool_call>" + "[" * 300 + "</tool_call>"
    made = tool_trainer(
        GRPOTrainer, tmp_path, [[[MALFORMED + ADD], [ADD, MALFORMED], [deep], [UNFIT]]] * 2, max_completion_length=700
    )
    logged = {name: value for name, (value,) in tool_rollouts.play(made).items()}
    shown = [[one["content"] for one in messages if one["role"] == "tool"] for messages in made.loops[0][1]]
    assert shown[0][1:] == ["3"]
    assert shown[1][:1] == ["3"]
    assert all("error" in text for text in (shown[0][0], shown[1][1], *shown[2], *shown[3]))
    assert logged["tools/mistakes"] == pytest.approx(4 / 6)
    assert logged["tools/unknown/calls"] == pytest.approx(3 / 4)
    assert logged["tools/add/failures"] == 0


# ---- ranks


def test_ranks_pad_to_the_largest_number_of_rows() -> None:
    asked: list[list[list[int]]] = []
    counts: list[int] = []

    def largest(count: int) -> int:
        counts.append(count)
        return [3, 2, 0][len(counts) - 1]

    def generate(prompts: list[list[int]]) -> tuple[list[list[int]], None]:
        asked.append(prompts)
        return [[9] * 4 for _ in prompts], None

    row = Row([7] * 5, [8] * 10, [message(1)], RowTools({}))
    limits, ranks = TurnLimits(8, 100, 1000), {"generate": generate, "largest": largest}
    values = loop_of(Recorder(), limits, padding=2, **ranks)([row])
    assert counts == [1, 0, 0], "asked before each generation, also without rows"
    assert [len(prompts) for prompts in asked] == [3, 2], "as many rows as the rank with most"
    assert asked[0][1:] == [[2], [2]]
    assert asked[1] == [[2], [2]]
    assert [ids[-4:] for ids in values.completion_ids] == [[9] * 4]
    asked.clear()
    counts.clear()
    loop_of(Recorder(), limits, **ranks)([Row([7] * 5, [8] * 10, [message(1)], RowTools({}))])
    assert asked[0][1:] == [[0], [0]], "every vocabulary has the token 0"


def launched(kind: str, folder: Path, *options: str, layout: str = "ddp_cpu", **env: str) -> list[dict[str, Any]]:
    """Run `tests.support.train_tools` on two ranks, and return what each recorded."""
    launching.launch_module(layout, "tests.support.train_tools", kind, str(folder), *options, **env)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ragged", pytest.param("one rank", marks=pytest.mark.nightly)])
def test_ragged_turns_on_two_ranks_train_as_trl(script: str, tmp_path: Path) -> None:
    """TRL's ranks do not need to agree on scripted turns, so that it can be compared."""
    theirs, ours = launched("trl", tmp_path / "trl", script), launched("ours", tmp_path / "ours", script)
    for expected, found in zip(theirs, ours, strict=True):
        assert expected["loops"] == found["loops"]
    counts = [found["rows"] for found in ours]
    assert counts[0] == counts[1], "both ranks generate for the same numbers of rows"
    masks = [mask for found in ours for mask in found["loops"][0][0]]
    share = 1 - sum(map(sum, masks)) / sum(map(len, masks))
    for found in ours:
        assert found["logged"]["tools/tokens_share"] == pytest.approx(share), "over both ranks"
        for name, value in theirs[0]["logged"].items():
            assert found["logged"][name] == pytest.approx(value), name
    expected_state, state = (launching.parameters(tmp_path / name) for name in ("trl", "ours"))
    for name, weight in state.items():
        torch.testing.assert_close(weight, expected_state[name], atol=1e-6, rtol=0, msg=name)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("layout", ["ddp_cpu", "zero3_cpu"])
def test_sampled_turns_on_two_ranks_are_checked(layout: str, tmp_path: Path, extensions: str) -> None:
    """Group decoding with keys and values of earlier turns, and the comparison of completions with the policy."""
    found = launched("sampled", tmp_path, layout=layout, TORCH_EXTENSIONS_DIR=extensions)
    assert found[0]["rows"] == found[1]["rows"]
    assert found[0]["loops"] != found[1]["loops"]
    for one in found:
        assert one["unfit"] == ""
        assert one["compared"] > 2
        assert one["kept"]
        assert max(one["differences"]) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ragged", pytest.param("one rank", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_vllms_completions_reach_the_ranks_that_asked(mode: str, script: str, tmp_path: Path) -> None:
    """TRL 1.16 slices the completions of all ranks by the number of a rank's own prompts."""
    for rank, found in enumerate(launched(mode, tmp_path, script)):
        for values in found["loops"]:
            for member, messages in enumerate(values[1]):
                turns = [one["content"] for one in messages if one["role"] == "assistant"]
                tags = [content.split("]")[0] for content in turns]
                assert tags == [f"[{rank}.{member}.{turn}" for turn in range(len(turns))]
                assert len(turns) == len(SCRIPTS[script][rank][member]) + 1


@pytest.mark.parametrize("spare", only([150], [400, 150]))
def test_rows_end_before_a_server_refuses_their_next_turn(
    spare: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL asks for `max_completion_length` tokens in every turn, and vLLM refuses what may not fit into its context."""
    for name in ("is_vllm_available", "VLLMClient", "LLM", "SamplingParams"):
        monkeypatch.setattr(vllm_generation, name, None, raising=False)  # restored after the test
    made = train_tools.make("server", str(tmp_path), SCRIPTS["deep"])
    prompt = made._tokenize_prompts([made.train_dataset[0]["prompt"]])[0][0]
    client = made.vllm_generation.vllm_client
    client.context = len(prompt) + made.max_completion_length + spare
    tool_rollouts.play(made, cases=1)
    (values, *_) = made.loops
    turns = [sum(one["role"] == "assistant" for one in messages) for messages in values[1]]
    scripted = [len(calls) + 1 for calls in SCRIPTS["deep"][0]]
    is_short = spare < made.max_completion_length
    assert (turns == scripted) != is_short
    assert turns[0] == scripted[0], "the shortest row fits"
    assert ("`--max-model-len`" in caplog.text) == is_short


@pytest.mark.slow
def test_ranks_may_take_different_numbers_of_turns_in_a_rollout_function(tmp_path: Path) -> None:
    found = launched("rollout", tmp_path)
    assert [one["calls"] for one in found] == [1, 3]
    assert "rollout_func" in found[0]["unfit"]
