"""Each fast way with a planted fault: the stock way's results, one sentence, and no second trial."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from grpo_recipes.evaluation.engines import Transformers, token_ids
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.generation.verified import FastWay
from grpo_recipes.training.packing import Layout
from tests.grpo_recipes.generation.test_kept_cache import multi_turn
from tests.support import architectures
from tests.support.layouts import RAGGED, flat, layout_of, one_by_one, scored, trainer_on
from tests.support.recorded import model
from tests.support.tiny import byte_tokenizer, policy
from tests.support.trainers import one_batch
from tests.support.varlen_kernel import install, torch_2_12

# ---- the idea


class NotSupported(RuntimeError):
    """Error by which a fast way refuses its input."""


def way(said: list[str]) -> FastWay:
    return FastWay(said.append, "stock: {}")


def failing(error: Exception) -> Callable[[], str]:
    def compare() -> str:
        raise error

    return compare


def test_a_doubt_is_logged_and_never_lifted() -> None:
    said: list[str] = []
    found = way(said)
    assert (found.doubt, found.is_verified) == (None, False)
    for doubt, verified in (("", True), ("by 0.3", False), ("", False)):
        assert found.check(lambda doubt=doubt: doubt) == doubt
        assert found.is_verified is verified
    assert (found.doubt, said) == ("by 0.3", ["stock: by 0.3"])
    found.skip("this once")
    assert (found.doubt, said[1:]) == ("by 0.3", ["stock: this once"])


def test_errors_of_a_fast_way_are_doubts_if_they_are_expected() -> None:
    for error, options, doubt in (
        (NotSupported("heads\nof 7"), {"refusals": (NotSupported,)}, "heads"),
        (NotSupported(), {"refusals": (NotSupported,)}, "NotSupported"),
        (KeyError("cache"), {"failures": (Exception,)}, "KeyError: 'cache'"),
        (NotSupported("heads"), {"refusals": (NotSupported,), "failures": (Exception,)}, "heads"),
    ):
        said: list[str] = []
        assert way(said).check(failing(error), **options) == doubt
        assert said == [f"stock: {doubt}"]
    for error in (KeyError("cache"), torch.OutOfMemoryError("CUDA out of memory")):
        said = []
        found = way(said)
        with pytest.raises(type(error)):
            found.check(failing(error), refusals=(RuntimeError,))
        assert (found.doubt, said) == (None, [])


def test_a_verified_way_may_refuse_later() -> None:
    said: list[str] = []
    found = way(said)
    found.check(lambda: "")
    assert found.use(lambda: 3, refusals=(NotSupported,)) == 3
    with pytest.raises(torch.OutOfMemoryError):
        found.use(failing(torch.OutOfMemoryError()), refusals=(RuntimeError,))
    assert found.is_verified
    assert found.use(failing(NotSupported("a size")), refusals=(RuntimeError,)) is None
    assert (found.doubt, said) == ("a size", ["stock: a size"])


# ---- its users


@dataclass
class Planted:
    """A fast way with a fault."""

    run: Callable[[], Any]
    """Function that computes results, in the fast way if it may."""
    stock: Any
    """Results of the stock way."""
    calls: list[int]
    """One entry for each call that only the fast way makes."""


def plant(module: nn.Module, is_fast: Callable[[Mapping[str, Any]], bool], **changes: Any) -> list[int]:
    """Change keyword arguments in those calls of a module that only the fast way makes. Return the list of them."""
    calls: list[int] = []

    def changed(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not is_fast(kwargs):
            return None
        calls.append(1)
        return args, {**kwargs, **{name: change(kwargs[name]) for name, change in changes.items()}}

    module.register_forward_pre_hook(changed, with_kwargs=True)
    return calls


def held(kwargs: Mapping[str, Any]) -> int:
    """Return the number of tokens in the cache that a call gets, or -1 without one."""
    cache = kwargs.get("past_key_values")
    return -1 if cache is None else cache.get_seq_length()


def attention_that_ignores_the_spans(folder: Path, patch: pytest.MonkeyPatch) -> Planted:
    llama = model(transformers.LlamaConfig).eval()
    stock = one_by_one(llama, flat(RAGGED))
    trainer = trainer_on(llama, folder)
    attention = llama.model.layers[0].self_attn
    calls = plant(attention, lambda kwargs: "group_spans" in kwargs, group_spans=lambda spans: None)
    return Planted(lambda: scored(trainer, flat(RAGGED)), stock, calls)


def wrong_states_behind_shared_prompts(folder: Path, patch: pytest.MonkeyPatch) -> Planted:
    llama = model(transformers.LlamaConfig).eval()
    stock = one_by_one(llama, flat(RAGGED))
    trainer = trainer_on(llama, folder, micro_batching={"layout": "shared"})
    attention = llama.model.layers[0].self_attn
    calls = plant(attention, lambda kwargs: held(kwargs) > 0, hidden_states=lambda states: 1.5 * states)
    return Planted(lambda: scored(trainer, flat(RAGGED)), stock, calls)


def wrong_kernel_of_packed_rows(folder: Path, patch: pytest.MonkeyPatch) -> Planted:
    calls: list[int] = []

    @functools.wraps(torch_2_12)
    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return 1.5 * torch_2_12(*args, **kwargs)

    install(patch, kernel)
    llama = model(transformers.LlamaConfig).eval()
    stock = one_by_one(llama, flat(RAGGED))
    trainer = trainer_on(llama, folder)

    def run() -> Any:
        found = scored(trainer, flat(RAGGED))
        assert layout_of(trainer) is Layout.PACKED
        return found

    return Planted(run, stock, calls)


def other_tokens(ids: Tensor) -> Tensor:
    return 4 + (ids + 1) % 30


GREEDY: dict[str, Any] = {"generation_kwargs": {"do_sample": False}, "micro_batching": "off", "generation_check": False}


def group_decoding_of_other_tokens(folder: Path, patch: pytest.MonkeyPatch) -> Planted:
    """Only group decoding runs fewer rows than the batch has."""
    runs = [architectures.trainer(folder / mode, generation=mode, **GREEDY) for mode in ("off", "auto")]
    stock, ours = (functools.partial(generated, run) for run in runs)
    expected = stock()

    def is_fast(kwargs: Mapping[str, Any]) -> bool:
        return held(kwargs) >= 0 and len(kwargs["input_ids"]) < len(expected)

    calls = plant(runs[1].model, is_fast, input_ids=other_tokens)
    return Planted(ours, expected, calls)


def reuse_of_wrong_keys(folder: Path, patch: pytest.MonkeyPatch) -> Planted:
    """Only a turn behind kept keys and values runs several columns behind others."""
    runs = [multi_turn(folder / mode, generation=mode, **GREEDY) for mode in ("off", "auto")]
    stock, ours = (functools.partial(generated, run) for run in runs)
    expected = stock()

    def is_fast(kwargs: Mapping[str, Any]) -> bool:
        return held(kwargs) > 0 and kwargs["input_ids"].shape[1] > 1

    calls = plant(runs[1].model, is_fast, input_ids=other_tokens)
    return Planted(ours, expected, calls)


def generated(run: Any) -> list[list[int]]:
    """Return the completions of one generation batch."""
    return one_batch(run)["completion_ids"].tolist()


def engine_of_other_tokens(folder: Path, patch: pytest.MonkeyPatch) -> Planted:
    tiny, settings = policy(), Settings(temperature=0.0, max_new_tokens=8, batch_size=12)
    tiny.generation_config.eos_token_id = list(range(1, 60))
    tokenizer = byte_tokenizer()
    prompts = token_ids([text for text in ("1 =", "33 + 4 =") for _ in range(6)], tokenizer, settings)
    stock = Transformers(tiny, tokenizer)
    stock.groups.doubt = "a test"
    expected = stock.generate(prompts, settings)
    calls = plant(tiny, lambda kwargs: held(kwargs) >= 0 and len(kwargs["input_ids"]) < 12, input_ids=other_tokens)
    return Planted(functools.partial(Transformers(tiny, tokenizer).generate, prompts, settings), expected, calls)


FAULTS: dict[Callable[[Path, pytest.MonkeyPatch], Planted], str] = {
    attention_that_ignores_the_spans: "not packed: ",
    wrong_states_behind_shared_prompts: "not shared: ",
    wrong_kernel_of_packed_rows: "varlen_attn",
    group_decoding_of_other_tokens: "own loop: ",
    reuse_of_wrong_keys: "between turns: ",
    engine_of_other_tokens: "own loop: ",
}
"""Faults of the users, and a part of the sentence that is logged."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_before_it_counts(
    fault: Callable[[Path, pytest.MonkeyPatch], Planted],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    planted = fault(tmp_path, monkeypatch)
    for is_tried in (True, False):
        planted.calls.clear()
        torch.testing.assert_close(planted.run(), planted.stock, atol=1e-5, rtol=0)
        assert bool(planted.calls) is is_tried
    (_,) = [message for message in caplog.messages if FAULTS[fault] in message]
