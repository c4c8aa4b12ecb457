"""The check of turns and the tool loop on a stand-in for the trainer: what they compare and what they say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from grpo_recipes.process.faults import NotThePolicy, RunFault
from grpo_recipes.tools.loop import RowTools
from grpo_recipes.tools.transcript import Fault
from grpo_recipes.training import tool_turns, turn_check
from grpo_recipes.training.tool_turns import ToolTurns, positions, tools_of_rows
from grpo_recipes.training.turn_check import TurnCheck
from grpo_rewards.errors import UserError


def check(*, enabled: bool = True, stop: Any = None, **changes: Any) -> TurnCheck:
    values: dict[str, Any] = {
        **{"tools": [print], "rollout_func": None, "model": nn.Linear(1, 1), "eos_token_ids": [2]},
        **{"args": SimpleNamespace(generation_kwargs=None), "state": SimpleNamespace(global_step=7)},
    }
    return TurnCheck(SimpleNamespace(**{**values, **changes}), stop, enabled)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the faults of the ranks before this one."""
    before: list[Any] = []
    monkeypatch.setattr(turn_check, "gather", lambda ours: [*before, ours])
    return before


def message(work: Any) -> str:
    with pytest.raises(NotThePolicy) as caught:
        work()
    return str(caught.value)


END = "; set `generation_check: false` to go on anyway"


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, True),
        ({"enabled": False}, False),
        ({"tools": []}, False),
        ({"tools": None}, False),
        ({"tools": None, "rollout_func": print}, True),
        ({"tools": None, "rollout_func": type("NoResponses", (list,), {"__call__": print})()}, True),
        ({"enabled": False, "rollout_func": print}, False),
    ],
    ids=str,
)
def test_turns_are_recorded_where_there_may_be_several(changes: dict[str, Any], needed: bool) -> None:
    found = check(**changes)
    assert found.is_needed is needed
    found.record([[1]], [[2]], None)  # before the first batch
    found.start([])
    assert (found._turns is not None) is needed
    found.record([[1]], [[2]], None)


def test_proven_rows_are_those_that_may_be_trained_on(monkeypatch: pytest.MonkeyPatch, ranks: list[Any]) -> None:
    found = check()
    fault: Any = None
    monkeypatch.setattr(TurnCheck, "_first_fault", lambda self, turns, *_: fault)
    output = ([[5, 6], [7]], [[1, 2], [3]], [[1, 0], [1]], [[], []], None, "more")
    found(output, [])
    assert found.batches == 0, "nothing was recorded"
    found.start([])
    found(output, [])
    assert found.batches == 1
    assert found._turns is None
    assert found._proven == {((5, 6), (1, 2)): {(1, 0)}, ((7,), (3,)): {(1,)}}
    found.start([])
    found(output, [])
    assert found.batches == 2
    evaluated = check()
    evaluated.trainer.model.eval()
    evaluated.start([])
    evaluated(output, [])
    assert (evaluated.batches, evaluated._proven) == (1, {})
    fault = Fault(1, 3, "a token was not sampled")
    what = "at step 7 does not consist of the turns that were sampled and their tool results: "
    found.start([])
    assert message(lambda: found(output, [])) == f"a completion {what}{fault}{END}"
    ranks.append(None)
    found.start([])
    assert message(lambda: found(output, [])) == f"a completion of rank 1 {what}{fault}{END}"
    ranks[:] = ["theirs"]
    fault = None
    found.start([])
    assert message(lambda: found(output, [])) == f"a completion of rank 0 {what}theirs{END}"
    ranks.clear()
    without_mask = (*output[:2], None, *output[3:])
    found.start([])
    assert "there is no mask of tool tokens" in message(lambda: found(without_mask, []))
    rollout = check(tools=[], rollout_func=print)
    rollout.start([])
    rollout(without_mask, [])
    assert rollout._proven == {}


def batch(*rows: tuple[list[int], list[int], list[int]]) -> dict[str, torch.Tensor]:
    """Return a micro-batch of (prompt, completion, mask of tool tokens), padded by one token on each side."""
    table: dict[str, list[list[int]]] = {name: [] for name in
             ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")}  # fmt: skip
    for prompt, ids, mask in rows:
        table["prompt_ids"].append([0, *prompt])
        table["prompt_mask"].append([0] + [1] * len(prompt))
        table["completion_ids"].append([*ids, 0])
        table["completion_mask"].append([1] * len(ids) + [0])
        table["tool_mask"].append([*mask, 1])
    return {name: torch.tensor(values) for name, values in table.items()}


def test_micro_batches_hold_the_rows_that_were_proven() -> None:
    proven = {((5, 6), (1, 2)): {(1, 0), (1, 1)}, ((7, 8), (3, 4)): {(1, 1)}}
    begin = "a completion at step 7 is trained on otherwise than it was generated: "

    def checked(*batches: Any, enabled: bool = True) -> None:
        found = check(enabled=enabled)
        found._proven = dict(proven)
        found.check_micro_batches(batches)
        assert found._proven == ({} if enabled else proven)

    fine = batch(([5, 6], [1, 2], [1, 0]), ([7, 8], [3, 4], [1, 1]))
    checked(fine, batch(([5, 6], [1, 2], [1, 1])), batch(([9, 9], [9, 9], [0, 0])))  # the last has no label
    other_tokens = batch(([5, 6], [1, 2], [1, 0]), ([7, 8], [3, 9], [1, 1]))
    assert message(lambda: checked(fine, other_tokens)) == (
        f"{begin}row 1 of micro-batch 1 has tokens that no completion of the generation batch has{END}"
    )
    other_mask = batch(([5, 6], [1, 2], [0, 1]))
    assert message(lambda: checked(other_mask, other_tokens)) == (
        f"{begin}row 0 of micro-batch 0 has another mask of tool tokens{END}"
    )
    fine.pop("tool_mask")
    assert message(lambda: checked(fine)) == f"{begin}micro-batch 0 has no mask of tool tokens{END}"
    checked(other_tokens, enabled=False)
    check().check_micro_batches([other_tokens])  # nothing was proven, as after a resume


def test_messages_are_proven_of_all_rows_at_first_and_then_of_some_with_results() -> None:
    found = check()
    rows: Any = [
        SimpleNamespace(number=number, messages=None if number == 3 else [{}] * (1 + number % 2))
        for number in range(64)
    ]
    assert found._rows_of_messages(rows) == set(range(64)) - {3}
    found.batches = 1
    odd = [number for number in range(64) if number % 2 and number != 3]
    assert found._rows_of_messages(rows) == set(odd[1::32])
    found.batches = 34
    assert found._rows_of_messages(rows) == set(odd[2::32])
    assert found._rows_of_messages([]) == set()
    found.all_messages = True
    assert found._rows_of_messages(rows) == set(range(64)) - {3}


@pytest.mark.parametrize("tools", [[], ["add"]])
def test_prompts_and_turns_are_rendered_and_parsed_as_trl_does_it(
    monkeypatch: pytest.MonkeyPatch, tools: list[str]
) -> None:
    monkeypatch.setattr(turn_check, "parse_response", lambda *given, **more: (given, more))
    monkeypatch.setattr(turn_check, "Proof", lambda **parts: parts)
    tokenizer = SimpleNamespace(decode=print, apply_chat_template=lambda *given, **more: (given, more))
    found = check(
        _tokenizer=tokenizer, chat_template="own", chat_template_kwargs={"thinks": False}, max_completion_length=9,
        _get_tool_suffix_ids=len,
    )  # fmt: skip
    assert found._parse([1], [2], tools) == ((tokenizer, [1]), {"prefix": [2], "tools": tools})
    (messages,), options = found._render_prompt([{"role": "user"}], tools)
    assert messages == [{"role": "user"}]
    assert options == {
        "tools": tools or None, "chat_template": "own", "add_generation_prompt": True, "tokenize": True,
        "return_dict": False, "thinks": False,
    }  # fmt: skip
    parts: Any = found._proof("turns")
    assert (parts["turns"], parts["longest"], parts["decode"], parts["render"]) == ("turns", 9, print, len)
    assert (parts["parse"], parts["render_prompt"], parts["ends"]) == (found._parse, found._render_prompt, found._ends)
    assert parts["in_order"] is True
    found.trainer.rollout_func = print
    other: Any = found._proof("turns")
    assert other["in_order"] is False, "a `rollout_func` may generate in any order"


@pytest.mark.parametrize("has_tools", [True, False])
def test_a_row_is_proven_with_all_that_is_known_about_it(monkeypatch: pytest.MonkeyPatch, has_tools: bool) -> None:
    monkeypatch.setattr(turn_check, "tools_of_rows", lambda trainer: [RowTools({}, [name]) for name in "abc"])
    unknown: set[int] = set()
    said: list[str] = []
    proven: list[Any] = []
    found = check(tools=[print] if has_tools else [], _is_vlm=False)
    found._announcer = turn_check.Announcer(said.append)
    monkeypatch.setattr(
        TurnCheck, "_proof", lambda self, turns: SimpleNamespace(covers=lambda row: row.number not in unknown)
    )
    monkeypatch.setattr(TurnCheck, "_fault_of", lambda self, rows, proof: proven.extend(rows) or "fault")
    found.start(["p", "q", "r"])
    given: Any = ("turns", [[1], [2], [3]], [[4], [5], [6]], [[1], [0], [1]], ["x", "y", "z"], [[0.1], [0.2], [0.3]])
    played: Any = ["k", "l", "m"]
    assert found._first_fault(*given, played) == "fault"
    assert [(row.number, row.mask) for row in proven] == [(0, [1]), (1, [0]), (2, [1])]
    about = [(row.messages, row.tools, row.prompt_messages, row.log_probs, row.played) for row in proven]
    if not has_tools:
        assert len(set(map(str, about))) == 1
        assert about[0][0] is None
        return
    assert about[1] == ("y", ["b"], "q", [0.2], "l")
    assert said == []
    proven.clear()
    unknown.add(1)
    found.trainer._is_vlm = True
    for _ in range(2):
        found._first_fault(*given[:-1], None, [])
    assert [row.number for row in proven] == [0, 2] * 2
    assert (proven[1].prompt_messages, proven[1].log_probs, proven[1].played) == (None, None, None)
    (sentence,) = said
    assert "some turns were not generated by the trainer's `_generate_single_turn`" in sentence


def test_a_turn_ends_with_an_end_token_or_a_stop_string_or_as_the_settings_say() -> None:
    stop = SimpleNamespace(end=lambda ids: ids[-1] == 9)
    assert [check()._ends(ids) for ids in ([1, 2], [2, 1], [], [9])] == [True, False, False, False]
    assert [check(stop=stop)._ends(ids) for ids in ([1, 9], [9, 1], [])] == [True, False, False]
    for key in ("max_new_tokens", "max_tokens", "max_length", "max_time", "stop_token_ids", "eos_token_id"):
        assert check(args=SimpleNamespace(generation_kwargs={key: 1}))._ends([1])
    assert not check(args=SimpleNamespace(generation_kwargs={"seed": 1}))._ends([1])


# ---- the tool loop's trainer


def server(context: int, mode: str = "server", **changes: Any) -> Any:
    info = {"model_config": {"max_model_len": context}}
    engine = SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=context)))
    vllm = SimpleNamespace(vllm_client=SimpleNamespace(get_server_info=lambda: info), llm=engine)
    values = {"use_vllm": True, "vllm_mode": mode, "vllm_generation": vllm, "max_completion_length": 100}
    return SimpleNamespace(**{**values, **changes})


def test_the_tokens_that_a_generator_can_read() -> None:
    assert positions(server(1000)) == 901, "each turn asks for `max_completion_length` tokens"
    assert positions(server(1000, "colocate")) == 1000
    for config, read in (
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": None}, float("inf")),
        ({}, float("inf")),
    ):
        local = server(1000, use_vllm=False, model=SimpleNamespace(config=SimpleNamespace(**config)))
        assert positions(local) == read


def turns(trainer: Any) -> tuple[ToolTurns, list[str]]:
    found = object.__new__(ToolTurns)
    said: list[str] = []
    found.trainer, found._announcer = trainer, tool_turns.Announcer(said.append)
    return found, said


def test_a_server_whose_context_is_too_small_for_all_turns_is_announced_once() -> None:
    found, said = turns(server(1000))
    found._warn_of_short_context(50, 151)
    assert said == []
    found._warn_of_short_context(50, 150)
    found._warn_of_short_context(60, 150)
    assert said == [
        "the vLLM server's context is too small for all turns of a prompt of 50 tokens, and completions that call "
        "tools may end early: start the server with a `--max-model-len` of at least the prompt and twice "
        "`max_completion_length`, 250"
    ]
    local, said = turns(server(1000, "colocate"))
    local._warn_of_short_context(50, 1)
    assert said == []


def test_the_context_must_hold_the_longest_prompt_and_all_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(tool_turns, "ToolLoop", lambda **parts: made.append(parts) or (lambda rows: rows))
    monkeypatch.setattr(tool_turns, "tools_of_rows", lambda trainer: ["own"] * 3)
    monkeypatch.setattr(tool_turns, "positions", lambda trainer: 150)
    found, said = turns(
        server(
            1000, max_tool_calling_iterations=4, environment_factories=None, accelerator=SimpleNamespace(device="cpu"),
            _tokenizer=SimpleNamespace(pad_token_id=0), _get_tool_suffix_ids=print,
        )
    )  # fmt: skip
    found._positions, found.runner, found._finish = None, print, lambda: None
    prompts = [[1] * length for length in (40, 50, 30)]
    rows: Any = found(prompts, [[1], [2], [3]], [[], [], []], [[0.1], [0.2], [0.3]])
    assert len(said) == 1
    assert "a prompt of 50 tokens" in said[0]
    assert [(row.prompt, row.log_probs) for row in rows] == list(zip(prompts, ([0.1], [0.2], [0.3]), strict=True))
    assert found.rows == rows
    (parts,) = made
    assert (parts["render"], parts["runner"], parts["padding"], parts["largest"](7)) == (print, found, 0, 7)
    assert {"generate", "parse", "shorten"} <= parts.keys()
    assert (parts["limits"].iterations, parts["limits"].completion, parts["limits"].positions) == (4, 100, 150)
    assert [row.log_probs for row in found(prompts, [[1]] * 3, [[]] * 3, None)] == [None] * 3


@pytest.mark.parametrize("processes", [1, 2])
def test_prompts_with_images_are_left_to_trls_loop(processes: int) -> None:
    accelerator = SimpleNamespace(num_processes=processes)
    text, said = turns(SimpleNamespace(_is_vlm=False, accelerator=accelerator))
    assert not text.are_trls({})
    for found, fields in (
        (text, {"images": 1}),
        (turns(SimpleNamespace(_is_vlm=True, accelerator=accelerator))[0], {}),
    ):
        if processes > 1:
            with pytest.raises(UserError, match="need one process, because ranks with different numbers of turns"):
                found.are_trls(fields)
        else:
            assert found.are_trls(fields)
            assert found.are_trls(fields)
    assert len(said) == (processes == 1)


def test_each_row_has_the_tools_of_its_environment() -> None:
    def one() -> None: ...

    def other() -> None: ...

    trainer: Any = SimpleNamespace(
        _sync_tool_dicts=[{"a": one}, {"a": one, "b": one}], _async_tool_dicts=[{"b": other}, {"b": other}],
        tools=[one], environment_factories=None,
    )  # fmt: skip
    assert tools_of_rows(trainer) == [
        RowTools({"b": other, "a": one}, [one]), RowTools({"b": one, "a": one}, [one]),
    ]  # fmt: skip
    trainer.environment_factories, trainer._env_tools = {}, {"x": ["of x"], "y": ["of y"]}
    trainer._batch_environments = ["y", "x"]
    assert [row.schemas for row in tools_of_rows(trainer)] == [["of y"], ["of x"]]


def test_the_loop_has_the_generator_parser_template_and_tools_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are those of the batch, and the calls that were abandoned are dropped before the metrics."""
    did: list[Any] = []
    made: list[Any] = []
    monkeypatch.setattr(tool_turns, "ToolLoop", lambda **parts: made.append(parts) or (lambda rows: ("values", rows)))
    monkeypatch.setattr(tool_turns, "tools_of_rows", lambda trainer: ["own", "other"])
    monkeypatch.setattr(tool_turns, "drop_abandoned", lambda *given: did.append(given))
    monkeypatch.setattr(tool_turns, "beginning", lambda *given: ("beginning", given))
    monkeypatch.setattr(tool_turns, "largest_of_ranks", lambda value, device: (value, device))
    monkeypatch.setattr(tool_turns, "parse_response", lambda *given, **more: (given, more))
    tokenizer = SimpleNamespace(pad_token_id=3)
    trainer = server(
        1000, max_tool_calling_iterations=4, environment_factories=None, accelerator=SimpleNamespace(device="device"),
        _tokenizer=tokenizer, _get_tool_suffix_ids=print, _environment_pool="pool", environments="environments",
        _generate_single_turn=lambda *given, num_generations: (given, num_generations),
    )  # fmt: skip
    found: Any
    found, said = turns(trainer)
    found._positions, found.runner, found._finish = None, "runner", lambda: did.append("finished")
    values = found([[1] * 40, [1]], [[2], [3]], [["m"], ["n"]], None)
    assert values == ("values", found.rows)
    assert [(row.tools, row.log_probs) for row in found.rows] == [("own", None), ("other", None)]
    (parts,) = made
    assert parts["generate"](["p"]) == ((["p"], None, {}), 1)
    assert parts["parse"]([5], [6], ("t",)) == ((tokenizer, [5]), {"prefix": [6], "tools": ["t"]})
    assert parts["shorten"](7) == ("beginning", (tokenizer, 7))
    assert parts["largest"](8) == (8, "device")
    assert (parts["render"], parts["runner"], parts["padding"]) == (print, found, 3)
    limits = parts["limits"]
    assert (limits.iterations, limits.completion, limits.positions) == (4, 100, 901)
    assert (did, said) == (["finished"], [])
    trainer.environment_factories = {}
    found([[1], [1]], [[2], [3]], [[], []], [[0.1], [0.2]])
    assert did == ["finished", ("pool", "environments", found.rows), "finished"]
    assert [row.log_probs for row in found.rows] == [[0.1], [0.2]]


@pytest.mark.parametrize("training", [True, False])
def test_the_metrics_of_all_ranks_are_logged_and_failures_stop_the_run(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_turns, "gather", lambda ours: [ours, ("their counts", "their calls")])
    monkeypatch.setattr(tool_turns.Counts, "of", lambda rows: f"counts of {len(rows)}")
    monkeypatch.setattr(tool_turns, "metrics", lambda counts: {"tools/x": len(counts), "tools/y": counts[1]})
    monkeypatch.setattr(tool_turns.FailureWindow, "of_rank", lambda results: results)
    logged: Any = {"train": {"tools/x": [], "tools/y": []}, "eval": {"tools/x": [], "tools/y": []}}
    found: Any = turns(SimpleNamespace(model=nn.Linear(1, 1).train(training), _metrics=logged))[0]
    found.rows = [SimpleNamespace(turns=[["a", "b"], ["c"]]), SimpleNamespace(turns=[["d"]])]
    added: list[Any] = []
    reason = ""
    found._failures = SimpleNamespace(add=added.append, reason_to_stop=lambda: reason)
    found._finish()
    assert added == [[["a", "b", "c", "d"], "their calls"]]
    name, other = ("train", "eval") if training else ("eval", "train")
    assert logged[name] == {"tools/x": [2], "tools/y": ["their counts"]}
    assert logged[other] == {"tools/x": [], "tools/y": []}
    reason = "too many calls failed"
    with pytest.raises(RunFault, match="too many calls failed"):
        found._finish()
