"""Captured decoding steps, replayed on a CPU: the tokens of group decoding, whatever is captured when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicLayer
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
)

from grpo_recipes.generation import captured
from grpo_recipes.generation.captured import READ_EVERY, CapturedBatch, CapturedTurn, Step, bucket_sizes
from grpo_recipes.generation.groups import Turn, decode_step, decoding
from grpo_recipes.generation.kv_cache import FullBuffer, HybridBuffer
from grpo_recipes.generation.sampling import BLOCK
from tests.support import device
from tests.support.architectures import ARCHITECTURES, SAMPLED, batch, config, tiny
from tests.support.grids import only
from tests.support.pretend_gpu import PretendGPU
from tests.support.recorded_graph import recorded_graph
from tests.tools.models import build

REAL_CAPTURE = captured.cuda_graph
SIZES_IN_USE = bucket_sizes(64)
"""Sizes without the limit of these tests."""


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace CUDA graphs by recorded ones without a GPU. Return the list of the rows of each captured step."""
    rows: list[int] = []

    def capture(step: Any, where: torch.device) -> Any:
        rows.append(len(step.__self__.generating))
        return (REAL_CAPTURE if device.NAME == "cuda" else recorded_graph)(step, where)

    monkeypatch.setattr(captured, "cuda_graph", capture)
    monkeypatch.setattr(captured, "SMALLEST", 2)
    # Gemma 3n makes a distribution, which checks numbers of the host: a capture allows it, a recorded one can't tell.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", False)
    return rows


def generated(policy: PreTrainedModel, turn: Turn, **how: Any) -> Tensor:
    torch.manual_seed(3)
    with decoding(policy, turn):
        return policy.generate(**batch(), generation_config=config(**how))


FILTERED = {"do_sample": True, "temperature": 0.7, "top_k": 10, "top_p": 0.9, "min_p": 0.02}
SETTINGS: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "sampled": SAMPLED, "filtered": FILTERED}


@pytest.mark.gpu
@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("setting", only(["sampled", "greedy"], list(SETTINGS)))
@pytest.mark.parametrize("architecture", only(["LlamaConfig", "Gemma3TextConfig", "GPT2Config"], list(ARCHITECTURES)))
def test_the_tokens_of_group_decoding(architecture: str, setting: str, graphs: list[int]) -> None:
    policy, turn = tiny(architecture), CapturedTurn(record_every=3, temperature=0.7)
    plain = Turn(record_every=3, temperature=0.7)
    expected = generated(policy, plain, **SETTINGS[setting])
    assert generated(policy, turn, **SETTINGS[setting]).tolist() == expected.tolist()
    assert turn.captured
    assert turn.not_captured == turn.declined == ""
    ends = ((expected[:, 11:] == 0).cumsum(1) == 0).sum(1)
    for row, length in enumerate(ends[::3]):
        torch.testing.assert_close(turn.log_probs[row, :length], plain.log_probs[row, :length], atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "model_type",
    only(
        ["qwen3_5_text"],
        ["qwen3_5_text", "gemma3n_text", "granitemoehybrid", "kimi_linear", "lfm2", "mamba2", "nemotron_h"],
    ),
)
def test_the_tokens_of_a_model_with_layers_of_several_kinds(model_type: str, graphs: list[int]) -> None:
    """Layers with states, with keys and values, and without anything of their own."""
    policy = device.here(build(model_type).eval())
    for how in SETTINGS.values():
        turn = CapturedTurn()
        expected = generated(policy, Turn(), **how)
        assert generated(policy, turn, **how).tolist() == expected.tolist()
        assert turn.captured
        assert turn.not_captured == turn.declined == ""
    assert len(set(graphs)) > 1, "rows leave"


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("read_every", [1, 5, 100])
@pytest.mark.parametrize("smallest", [1, 100])
def test_sampled_tokens_depend_on_no_size_and_no_interval(
    read_every: int, smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny("LlamaConfig")
    expected = generated(policy, Turn(), **SAMPLED)
    monkeypatch.setattr(captured, "READ_EVERY", read_every)
    monkeypatch.setattr(captured, "SMALLEST", smallest)
    assert generated(policy, CapturedTurn(), **SAMPLED).tolist() == expected.tolist()


def test_tokens_behind_the_last_end_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row ends before the longest completion, and between two questions of the host."""
    policy, early = tiny("LlamaConfig"), {**SAMPLED, "eos_token_id": list(range(1, 15))}
    expected = generated(policy, Turn(), **early)
    assert (expected.shape[1] - 12) % READ_EVERY
    assert expected.shape[1] < 11 + 24
    steps: list[int] = []
    advance = CapturedBatch.advance
    monkeypatch.setattr(CapturedBatch, "advance", lambda batch: (steps.append(batch.end), advance(batch)))
    turn = CapturedTurn(record_every=1)
    assert generated(policy, turn, **early).tolist() == expected.tolist()
    assert 0 <= len(steps) - (expected.shape[1] - 12) < READ_EVERY, "no steps after the last row has ended"
    assert turn.log_probs.shape[1] == expected.shape[1] - 11


def test_sampled_tokens_behind_a_block_of_random_numbers(graphs: list[int]) -> None:
    policy, long = tiny("LlamaConfig"), {**SAMPLED, "max_new_tokens": 2 * BLOCK + 5, "eos_token_id": 1}
    expected = generated(policy, Turn(), **long)
    assert expected.shape[1] > 11 + BLOCK
    assert generated(policy, CapturedTurn(), **long).tolist() == expected.tolist()


def test_rows_leave_in_a_few_sizes(graphs: list[int]) -> None:
    assert SIZES_IN_USE == [64, 48, 32, 16, 8]
    assert bucket_sizes(64) == [64, 48, 32, 16, 8, 4, 2]
    assert bucket_sizes(13) == [13, 9, 6, 3]
    assert bucket_sizes(2) == [2]
    assert bucket_sizes(1) == [1]
    generated(tiny("LlamaConfig"), CapturedTurn(), **SAMPLED)
    assert graphs == sorted(set(graphs), reverse=True)
    assert set(graphs) <= set(bucket_sizes(max(graphs)))
    assert len(graphs) > 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor may need the host"),
        ({"max_time": 60.0}, "MaxTimeCriteria may need the host"),
    ],
)
def test_what_is_not_captured(changes: dict[str, Any], reason: str, graphs: list[int]) -> None:
    turn = CapturedTurn()
    expected = generated(tiny("LlamaConfig"), Turn(), **SAMPLED, **changes)
    assert generated(tiny("LlamaConfig"), turn, **SAMPLED, **changes).tolist() == expected.tolist()
    assert turn.not_captured == reason
    assert not graphs


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"turn": {"together": True}}, "the weights are sharded by ZeRO-3"),
        ({"turn": {"same_stream": True}}, "random numbers are drawn for all rows and tokens"),
        ({"turn": {"comparison": []}}, "this batch compares what processors do on the host"),
        ({"turn": {"kept": []}}, "keys and values are kept between the turns of a tool loop"),
        ({"layers": [DummyLayer()]}, ""),
        ({"layers": [DummyLayer(), DynamicLayer()]}, "the model has layers without keys and values of their own"),
        (
            {"layers": [DummyLayer(), object.__new__(HybridBuffer)]},
            "the model has layers with recurrent states beside keys and values",
        ),
        ({"attention": "sdpa"}, ""),
        ({"attention": "flash_attention_2"}, "attention of the implementation flash_attention_2 takes no mask"),
        (
            {
                "processors": [RepetitionPenaltyLogitsProcessor(1.5), TopKLogitsWarper(2)],
                "criteria": [MaxTimeCriteria(1)],
            },
            "MaxTimeCriteria, RepetitionPenaltyLogitsProcessor may need the host",
        ),
        ({"criteria": [EosTokenCriteria(1), MaxLengthCriteria(9)], "processors": [TopKLogitsWarper(2)]}, ""),
    ],
)
def test_reasons_to_launch_each_kernel(changes: dict[str, Any], reason: str) -> None:
    """A comparison or cache that is empty so far counts too."""
    turn = {"together": False, "same_stream": False, "comparison": None, "kept": None, **changes.get("turn", {})}
    call = SimpleNamespace(
        turn=SimpleNamespace(**turn),
        processors=changes.get("processors", []),
        criteria=changes.get("criteria", []),
        cache=SimpleNamespace(layers=changes.get("layers", [])),
        model=SimpleNamespace(config=SimpleNamespace(_attn_implementation=changes.get("attention", "eager"))),
    )
    assert CapturedBatch.reason_not_to_capture(call) == reason  # type: ignore[arg-type]


@pytest.mark.parametrize("ends", [range(40), [1]], ids=["at once", "late"])
def test_rows_that_end_at_their_first_token_need_no_step(ends: Sequence[int]) -> None:
    policy, how = tiny("LlamaConfig"), {**SAMPLED, "eos_token_id": list(ends), "max_new_tokens": 21}
    expected = generated(policy, Turn(), **how)
    turn = CapturedTurn()
    assert generated(policy, turn, **how).tolist() == expected.tolist()
    assert turn.captured == (expected.shape[1] > 12)


@pytest.mark.parametrize(("lengths", "masked"), [((5, 5), False), ((3, 11), True)])
def test_a_step_reads_one_position_of_each_row_and_a_mask_only_beside_padding(
    lengths: tuple[int, ...], masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More positions would be cut by the model, and a mask of ones would slow its attention."""
    seen: list[tuple[bool, Any]] = []

    def step(model: Any, tokens: Tensor, **inputs: Any) -> Tensor:
        seen.append((inputs["attention_mask"] is not None, inputs["position_ids"].shape))
        return decode_step(model, tokens, **inputs)

    monkeypatch.setattr(captured, "decode_step", step)
    monkeypatch.setattr(captured, "SMALLEST", 100)
    torch.manual_seed(3)
    with decoding(policy := tiny("LlamaConfig"), CapturedTurn()):
        policy.generate(**batch(lengths), generation_config=config(eos_token_id=10_000))
    assert set(seen) == {(masked, (8, 1))}


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_runs_on_the_models_gpu_and_leaves_its_stream(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context is that of torch, on a pretend driver. If `capture_end` raises, it stays on its stream."""
    done: list[str] = []
    streams = ["stream of training"]

    @contextmanager
    def of(name: str) -> Iterator[None]:
        done.append(name)
        yield
        done.append(f"no longer {name}")

    class Graph:
        def capture_begin(self, capture_error_mode: str, **_: Any) -> None:
            done.append(f"begin {capture_error_mode} on {streams[-1]}")

        def capture_end(self) -> None:
            if fails:
                raise RuntimeError("operation failed due to a previous error during capture")
            done.append("end")

        def replay(self) -> None:
            done.append("replay")

    class Switched:
        def __init__(self, stream: str) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            streams.append(self.stream)

        def __exit__(self, *_: object) -> None:
            streams.pop()

    driver = {
        "CUDAGraph": Graph,
        "Stream": lambda: "its own stream",
        "stream": Switched,
        "device": lambda device: of(f"GPU {device.index}"),
        "current_stream": lambda: streams[-1],
        "set_stream": streams.append,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }
    for name, stand_in in driver.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)

    def step() -> None:
        done.append("step")
        if fails:
            raise ZeroDivisionError

    with nullcontext() if not fails else pytest.raises(RuntimeError, match="previous error") as error:
        REAL_CAPTURE(step, torch.device("cuda:1"))()
    assert done[:3] == ["GPU 1", "begin thread_local on its own stream", "step"]
    assert streams[-1] == "stream of training"
    if fails:
        assert isinstance(error.value.__context__, ZeroDivisionError)
    else:
        assert done[3:] == ["end", "no longer GPU 1", "replay"]


def test_layers_with_states_beside_keys_are_not_captured(graphs: list[int]) -> None:
    policy, turn = build("falcon_h1").eval(), CapturedTurn()
    assert generated(policy, turn).tolist() == generated(policy, Turn()).tolist()
    assert turn.not_captured == "the model has layers with recurrent states beside keys and values"
    assert not graphs


def test_keys_and_values_of_different_sizes_stand_in_columns_of_a_fixed_number() -> None:
    layer, keys, values = DynamicLayer(), torch.rand(2, 3, 4, 5), torch.rand(2, 3, 4, 7)
    layer.update(keys, values)
    buffer = FullBuffer(layer, torch.arange(2), 2)
    cache = SimpleNamespace(layers=[DummyLayer(), buffer])
    call: Any = SimpleNamespace(ids=torch.zeros(2, 12), first=1, end=6, cache=cache, buffers=[buffer])
    CapturedBatch.fix_cache(call)
    (fixed,) = call.fixed
    assert cache.layers[1] is fixed
    assert (fixed.keys.shape, fixed.values.shape) == ((2, 3, 11, 5), (2, 3, 11, 7))
    assert torch.equal(fixed.keys[:, :, :4], keys)
    assert torch.equal(fixed.values[:, :, :4], values)
    assert (int(fixed.cumulative_length), call.buffers) == (4, [])


@pytest.mark.gpu
def test_a_failed_capture_is_no_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts, done = [], []
    step = CapturedBatch.step
    monkeypatch.setattr(CapturedBatch, "step", lambda batch: (done.append(len(attempts)), step(batch)))

    def fail(step: Any, _: torch.device) -> Any:
        attempts.append(step)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(captured, "cuda_graph", fail)
    turn = CapturedTurn()
    expected = generated(tiny("LlamaConfig"), Turn(), **SAMPLED)
    assert generated(tiny("LlamaConfig"), turn, **SAMPLED).tolist() == expected.tolist()
    assert turn.not_captured == "the capture failed (operation not permitted when stream is capturing)"
    assert turn.failed
    assert not turn.captured
    assert len(attempts) == 1
    assert done[0] == 0, "a step runs as it is before any is captured, because the first loads libraries"


def test_the_next_call_draws_the_same_numbers_whatever_was_captured() -> None:
    """A call takes one number of the global generator, even if tokens behind the last end were computed."""
    left = []
    for turn in (Turn(), CapturedTurn()):
        generated(tiny("LlamaConfig"), turn, **SAMPLED)
        left.append(torch.rand(1).item())
    assert left[0] == left[1]


@pytest.mark.slow
def test_a_replayed_token_is_one_launch_and_the_host_waits_for_every_eighth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of the pretend GPU, per token of all rows: of group decoding, and of replayed steps."""
    policy = tiny("LlamaConfig")
    with PretendGPU() as gpu:
        monkeypatch.setattr(captured, "cuda_graph", lambda step, _: counted(gpu, recorded_graph(step)))
        policy.to("cuda")
        inputs = {name: value.to("cuda") for name, value in batch((5, 3)).items()}

        def counts(turn: Turn) -> list[float]:
            """Return launches, waits and copies to the device per token, without those of the first tokens."""
            found = []
            for tokens in (10, 26):
                gpu.reset()
                with decoding(policy, turn):
                    settings = config(max_new_tokens=tokens, eos_token_id=10_000)
                    policy.generate(**inputs, generation_config=settings)
                assert not turn.declined
                found.append([gpu.launches, gpu.synchronisations, gpu.uploads])
            return [(long - short) / 16 for short, long in zip(*found, strict=True)]

        plain, replayed = counts(Turn()), counts(CapturedTurn())
    assert plain[0] > 100  # two layers; a model of 28 launches over 1,000
    assert plain[1:] == [2, 0]
    assert replayed == [1, 1 / READ_EVERY, 0]


@pytest.mark.slow
def test_rows_leave_on_the_device_in_few_waits_and_copies(graphs: list[int]) -> None:
    policy = tiny("LlamaConfig")
    expected = generated(policy, CapturedTurn(record_every=3), **SAMPLED)
    sizes = graphs.copy()
    assert len(sizes) > 2
    graphs.clear()
    with PretendGPU() as gpu:
        policy.to("cuda")
        inputs = {name: value.to("cuda") for name, value in batch().items()}
        gpu.reset()
        torch.manual_seed(3)
        with decoding(policy, CapturedTurn(record_every=3)):
            tokens = policy.generate(**inputs, generation_config=config(**SAMPLED))
        assert gpu.synchronisations <= 25, gpu.sites  # 3 of them for 24 tokens, most before the first
        assert gpu.uploads <= 22
        assert tokens.tolist() == expected.tolist()
    assert graphs == sizes


def counted(gpu: PretendGPU, replay: Step) -> Step:
    """Return a replay that the pretend GPU counts as one launch."""

    def once() -> None:
        before = gpu.launches, gpu.synchronisations, gpu.uploads
        replay()
        assert (gpu.synchronisations, gpu.uploads) == before[1:], gpu.sites
        gpu.launches = before[0] + 1

    return once
