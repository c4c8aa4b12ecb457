"""Keys and values kept between turns: the same tokens, fewer of them through the model, and faults that are found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_recipes.generation.groups import Turn, decoding
from grpo_recipes.generation.kept_cache import KeptCache, Prefix
from grpo_recipes.process.faults import NotThePolicy
from tests.support import device
from tests.support.architectures import ARCHITECTURES, ENDS, adapter, batch, config, tiny, trainer
from tests.support.exact_generation import exact_generation
from tests.support.grids import only

Rows = list[list[int]]

LARGEST = "sampling/sampling_logp_difference/max"
UNKEPT = {"MistralConfig", "Gemma2Config", "Gemma3TextConfig", "BloomConfig"}
"""Architectures with sliding windows, and one whose `forward` takes no positions."""


def everything(limit: int = 10**9) -> KeptCache:
    return KeptCache(lambda prompt, completion: True, limit)


def prompts(lengths: tuple[int, ...] = (3, 11, 1, 7)) -> Rows:
    """Four copies of prompts of these lengths."""
    inputs = batch(lengths)
    pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def until_end(tokens: list[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in ENDS:
            return tokens[: index + 1]
    return tokens


def generated(policy: PreTrainedModel, rows: Rows, turn: Turn | None, **how: Any) -> Rows:
    width = max(map(len, rows))
    inputs = {
        "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }
    inputs = device.here(inputs)
    torch.manual_seed(len(rows))
    with exact_generation(), decoding(policy, turn):
        tokens = policy.generate(**inputs, generation_config=config(**{"max_new_tokens": 8, **how}))
    return [until_end(row) for row in tokens[:, width:].tolist()]


def result(row: int, turn: int) -> list[int]:
    """Tokens of a tool's result, whose lengths differ."""
    return [4 + (7 * row + turn) % 30] * (1 + (3 * row + turn) % 5)


def ragged(contexts: Rows, completions: Rows, turn: int) -> Rows:
    """Return the prompts of the next turn. A fifth of the rows leaves, so that the others change their numbers."""
    rows = enumerate(zip(contexts, completions, strict=True))
    return [context + text + result(row, turn) for row, (context, text) in rows if (row + turn) % 5]


def conversation(
    policy: PreTrainedModel,
    kept: KeptCache | None,
    rows: Rows,
    following: Callable[[Rows, Rows, int], Rows] = ragged,
    turns: int = 3,
    **how: Any,
) -> tuple[list[Rows], list[Turn]]:
    """Return the completions of each turn, by transformers' own loop without a cache, and what each turn did."""
    found, done = [], []
    for number in range(turns):
        turn = Turn(kept=kept)
        completions = generated(policy, rows, None if kept is None else turn, **how)
        found.append(completions)
        done.append(turn)
        rows = following(rows, completions, number)
    return found, done


@contextmanager
def forwards(policy: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """Collect the shapes of the tokens that run through a model."""
    seen: list[tuple[int, int]] = []
    handle = policy.register_forward_pre_hook(
        lambda _, args, given: seen.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    yield seen
    handle.remove()


# ---- the same tokens


@pytest.mark.gpu
@pytest.mark.parametrize(
    "architecture",
    only(
        ["Qwen3Config", "MistralConfig", "GPT2Config"],
        ARCHITECTURES,
        ["Qwen3MoeConfig", "Gemma3TextConfig", "OPTConfig"],
    ),
)
def test_the_same_tokens(architecture: str) -> None:
    """Turns with results of uneven lengths, after which rows leave."""
    policy = tiny(architecture)
    for do_sample in (True, False)[: 1 + (architecture == "GPT2Config")]:
        expected, _ = conversation(policy, None, prompts(), do_sample=do_sample)
        found, turns = conversation(policy, everything(), prompts(), do_sample=do_sample)
        assert found == expected
        assert [bool(turn.not_kept) for turn in turns] == [architecture in UNKEPT] * 3
        assert [turn.reused for turn in turns] == [False, *[architecture not in UNKEPT] * 2]


def one_long_result(contexts: Rows, completions: Rows, turn: int) -> Rows:
    following = ragged(contexts, completions, turn)
    following[3] += [9] * 40
    return following


def shortened(contexts: Rows, completions: Rows, turn: int) -> Rows:
    """Return prompts without the last tokens of some completions: they are not what is kept."""
    cut = [text[:-2] if row % 2 else text for row, text in enumerate(completions)]
    return ragged(contexts, cut, turn)


def padded(contexts: Rows, completions: Rows, turn: int) -> Rows:
    """Return prompts with one-token prompts behind, by which a rank gets as many rows as the others."""
    return [*ragged(contexts, completions, turn), [0], [0]]


def branched(contexts: Rows, completions: Rows, turn: int) -> Rows:
    """Return prompts of which pairs begin with one row of the turn before, or are equal to one."""
    following = [contexts[row] + completions[row] + result(row, turn + half) for row in range(4) for half in range(2)]
    return [*following, contexts[0] + completions[0], contexts[0] + completions[0][:-1]]


@pytest.mark.parametrize(
    ("following", "lengths", "count"),
    [(one_long_result, (3, 11, 1, 7), 2), (shortened, (5, 5), 2), (padded, (5, 5), 2), (branched, (3, 11, 1, 7), 3)],
)
def test_the_same_tokens_of_other_turns(following: Callable[..., Rows], lengths: tuple[int, ...], count: int) -> None:
    policy, rows = tiny("LlamaConfig"), prompts(lengths)
    expected, _ = conversation(policy, None, rows, following, count)
    found, turns = conversation(policy, everything(), rows, following, count)
    assert found == expected
    assert all(turn.reused for turn in turns[1:])


def test_calls_for_some_rows_at_a_time() -> None:
    """A `rollout_func` may generate for one prompt after the other. What the others left is kept meanwhile."""
    policy, kept = tiny("LlamaConfig"), everything()
    halves = [prompts((3, 11)), prompts((1, 7))]
    expected = [conversation(policy, None, rows, turns=2)[0] for rows in halves]
    first = [generated(policy, rows, Turn(kept=kept)) for rows in halves]
    for rows, completions, (before, after) in zip(halves, first, expected, strict=True):
        turn = Turn(kept=kept)
        assert completions == before
        assert generated(policy, ragged(rows, completions, 0), turn) == after
        assert turn.reused


# ---- less work


def test_a_later_turn_runs_its_new_tokens_only() -> None:
    policy, rows, kept = tiny("LlamaConfig"), prompts(), everything()
    heads: list[int] = []
    policy.lm_head.register_forward_pre_hook(lambda _, args: heads.append(args[0].shape[1]))
    completions = generated(policy, rows, Turn(kept=kept))
    following = ragged(rows, completions, 0)
    with forwards(policy) as seen:
        generated(policy, following, Turn(kept=kept))
    assert seen[0] == (len(following), 6)  # results of at most five tokens, and the end of the turn before
    assert set(heads) == {1}, "the head runs on one token of a prompt"


@pytest.mark.parametrize("together", [False, True])
def test_one_long_result_does_not_make_the_others_run_again(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless ranks share their forwards under ZeRO-3: another rank may have no long result."""
    policy, rows, kept = tiny("LlamaConfig"), prompts(), everything()
    if together:
        monkeypatch.setattr(policy, "_has_unfinished_sequences", lambda finished, *_, **__: not finished)
    following = one_long_result(rows, generated(policy, rows, Turn(kept=kept, together=together)), 0)
    with forwards(policy) as seen:
        completions = generated(policy, following, Turn(kept=kept, together=together))
    prefills = [shape for shape in seen if shape[1] > 1]
    assert prefills == ([(len(following), 44)] if together else [(len(following) - 1, 6), (1, 44)])
    assert completions == generated(policy, following, None)


# ---- what is kept


def test_rows_that_can_not_go_on_are_not_kept() -> None:
    policy, seen = tiny("LlamaConfig"), []

    def ends_with_two(prompt: list[int], completion: list[int]) -> bool:
        seen.append((prompt, completion))
        return completion[-1] == 2

    kept, rows = KeptCache(ends_with_two, 10**9), prompts()
    completions = generated(policy, rows, Turn(kept=kept))
    assert sorted(seen) == sorted(zip(rows, completions, strict=True))
    going = [row + text for row, text in zip(rows, completions, strict=True) if text[-1] == 2]
    assert 0 < len(going) < 16
    assert len(kept.take(dict(enumerate(going)))) == len(going)
    assert kept.size == 0
    assert not kept.holds_start_of(row + text for row, text in zip(rows, completions, strict=True))


def test_what_is_kept_is_bounded() -> None:
    policy, rows, row_size = tiny("LlamaConfig"), prompts(), 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size
    expected = conversation(policy, None, rows, turns=2)[0]
    for limit, is_reused in ((100 * row_size, True), (row_size - 1, False)):
        kept = everything(limit)
        first, turn = Turn(kept=kept), Turn(kept=kept)
        completions = generated(policy, rows, first)
        assert 0.5 * is_reused * limit <= kept.size <= limit
        assert [completions, generated(policy, ragged(rows, completions, 0), turn)] == expected
        assert turn.reused == is_reused


def test_the_last_rows_are_kept_where_not_all_fit() -> None:
    layers = [(torch.ones(1, 2, 1), torch.ones(1, 2, 1))]
    kept = everything(limit=32)
    for row in range(3):
        kept.keep([row, 7], layers)
    assert [kept.holds_start_of([[row, 7, 7]]) for row in range(3)] == [False, True, True]
    assert kept.size == 32


def test_a_row_is_kept_once_and_as_a_copy() -> None:
    keys = torch.ones(1, 2, 1)
    kept = everything(limit=16)  # exactly one row
    for _ in range(2):
        kept.keep([5, 7], [(keys, keys)])
    assert kept.size == 16
    kept.keep([5, 7, 9], [(torch.ones(1, 3, 1), torch.ones(1, 2, 1))])
    assert kept.holds_start_of([[1], [5, 7]]), "a larger row makes no room for itself"
    keys.zero_()
    (prefix,) = kept.take({3: [5, 7, 8]}).values()
    assert prefix.layers[0][0].all()


def test_the_longest_kept_beginning_is_taken_and_the_last_token_runs() -> None:
    kept = everything()
    for length in (2, 4, 3):
        kept.keep([5, 6, 7, 8][:length], [(torch.full((1, length, 1), length),) * 2])
    found = kept.take({0: [5, 6, 7, 8, 9], 1: [5, 6, 7], 2: [6, 7], 4: [5, 6, 9, 9]})
    lengths = {number: (prefix.tokens, prefix.layers[0][0].shape[1]) for number, prefix in found.items()}
    assert lengths == {0: (4, 4), 1: (2, 3), 4: (2, 2)}
    assert kept.size == 0


# ---- training


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """Return the sentences that generation has logged."""
    caplog.set_level(logging.WARNING)
    name = "grpo_recipes.training.generation"
    return lambda: [record.getMessage().removeprefix("[RANK 0] ") for record in caplog.records if record.name == name]


def rollout(texts: list[str], run: Any) -> dict[str, Any]:
    """Return completions of three turns, each with another number of rows."""
    rows = [run.processing_class(text)["input_ids"] for text in texts]
    contexts, masks = list(rows), [[] for _ in rows]
    going = list(range(len(rows)))
    for turn in range(3):
        completions, _ = run._generate_single_turn([contexts[row] for row in going], None, {}, run.num_generations)
        for row, completion in zip(going, completions, strict=True):
            contexts[row] = contexts[row] + completion
            masks[row] += [1] * len(completion)
        going = [row for row in going if (row + turn) % 4]
        for row in going if turn < 2 else ():
            contexts[row] = contexts[row] + result(row, turn)
            masks[row] += [0] * len(result(row, turn))
    completions = [context[len(row) :] for row, context in zip(rows, contexts, strict=True)]
    return {"prompt_ids": rows, "completion_ids": completions, "logprobs": None, "env_mask": masks}


def multi_turn(folder: Path, **settings: Any) -> Any:
    run = trainer(folder, **settings)
    run.rollout_func = rollout
    return run


def plant_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all prompts the keys and values of one row."""
    stock = KeptCache.take

    def take(self: KeptCache, prompts: Any) -> dict[int, Prefix]:
        found = stock(self, prompts)
        longest = max(found.values(), key=lambda prefix: prefix.tokens, default=None)
        return {row: Prefix(prefix.tokens, longest.layers) for row, prefix in found.items() if longest is not None}

    monkeypatch.setattr(KeptCache, "take", take)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"peft_config": adapter(), "beta": 0.04}], ids=["full", "lora"])
def test_the_run_of_transformers_own_loop(changes: dict[str, Any], tmp_path: Path, said: Any) -> None:
    changes = {"learning_rate": 0.1, "max_steps": 2, **changes}
    ours = multi_turn(tmp_path / "auto", **changes)
    ours.train()
    assert said() == []
    assert ours._generation.reuse.is_verified
    stock = multi_turn(tmp_path / "off", generation="off", **changes)
    stock.train()
    assert list(ours._logs["completion"]) == list(stock._logs["completion"])
    for mine, other in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_nothing_is_kept_when_the_weights_change(tmp_path: Path, said: Any) -> None:
    """Each generation batch has a cache of its own, which is empty at its first turn."""
    run = multi_turn(tmp_path, max_steps=2, max_completion_length=6)
    prefills: list[tuple[int, int]] = []
    run.model.register_forward_pre_hook(
        lambda _, args, given: prefills.append((run.state.global_step, given["input_ids"].shape[1])), with_kwargs=True
    )
    run.train()
    widest = [max(width for at, width in prefills if at == step) for step in (0, 1)]
    assert min(widest) >= 9, "the first turn of each batch runs whole prompts"
    assert run._generation._kept is None
    assert run._generation.reuse.is_verified
    assert said() == []


@pytest.mark.slow
def test_a_later_fault_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = multi_turn(tmp_path)
    original = run._generate_and_score_completions

    def with_a_fault(inputs: Any) -> Any:
        if run.state.global_step == 1:
            plant_fault(monkeypatch)
        return original(inputs)

    run._generate_and_score_completions = with_a_fault
    with pytest.raises(NotThePolicy, match=r"at step [12] "):
        run.train()
    assert run._generation.reuse.is_verified
