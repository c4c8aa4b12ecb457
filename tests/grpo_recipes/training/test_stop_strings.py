"""Completions that end with a string: where they are cut, and what TRL counts as truncated, with both loops."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from trl import GRPOTrainer as TRLGRPOTrainer
from trl.trainer import grpo_trainer

from grpo_recipes.generation.stop_strings import Ends, StopStrings
from grpo_recipes.training.trl_patches import correct_counts
from tests.support import recorded
from tests.support.architectures import ENDS, trainer
from tests.support.errors import refused
from tests.support.tiny import byte_tokenizer
from tests.support.tiny import policy as tiny_policy
from tests.support.trainers import one_batch

STOP = ["b", "c", "q", "W", "zz", "=7"]


def ids(text: str) -> list[int]:
    return byte_tokenizer()(text)["input_ids"]


def stopping(folder: Path, *, pad_is_eos: bool = False, stop: Any = STOP, policy: Any = None, **more: Any) -> Any:
    """Return a trainer on bytes whose completions end with strings."""
    words: PreTrainedTokenizerFast = byte_tokenizer()
    if pad_is_eos:
        words.pad_token = words.eos_token
    kwargs = {"stop": stop, "suppress_tokens": [0, 1]}  # never sampled
    policy = tiny_policy() if policy is None else policy
    settings = {"max_steps": 1, "micro_batching": "off", **more}
    return trainer(folder, policy=policy, tokenizer=words, generation_kwargs=kwargs, **settings)


# ---- which rows end


def test_a_completion_ends_with_a_string() -> None:
    stop = StopStrings(STOP, byte_tokenizer())
    assert [text for text in ("b", "xzb", "z", "zz", "zzb7", "=", "=7") if stop.end(ids(text))] == [
        "b", "xzb", "zz", "=7"
    ]  # fmt: skip


def test_a_string_that_begins_in_the_prompt_ends_nothing() -> None:
    ends = Ends(StopStrings(STOP, byte_tokenizer()))
    prompt = ids("xz")
    assert ends(torch.tensor([[*prompt, *ids("z")]]), None).tolist() == [False]
    assert ends(torch.tensor([[*prompt, *ids("zz")]]), None).tolist() == [True]
    assert ends.cut([[*ids("zz"), 0, 0]]) == [ids("zz")]


def test_each_row_is_cut_at_its_first_stop_string() -> None:
    """The stock loop runs finished rows on, here to a second string. The third row has none."""
    ends = Ends(StopStrings(STOP, byte_tokenizer()))
    rows = [ids("bxc"), ids("xbx"), ids("xxx")]
    assert ends.cut(rows) == rows, "nothing was generated"
    found = [ends(torch.tensor([[7, 7, *row[:count]] for row in rows]), None).tolist() for count in (1, 2, 3)]
    assert found == [[True, False, False], [False, True, False], [True, False, False]]
    assert ends.cut(rows) == [rows[0][:1], rows[1][:2], rows[2]]
    for kwargs, strings in (
        ({"stop": "</a>"}, ("</a>",)),
        ({"stop": ["b"]}, ("b",)),
        ({"top_k": 3}, None),
        (None, None),
    ):
        assert getattr(StopStrings.of(kwargs, byte_tokenizer()), "strings", None) == strings


def test_a_tokenizer_whose_tokens_are_not_readable_is_refused() -> None:
    with refused("", "`generation_kwargs.stop`"):
        StopStrings(["t5"], recorded.tokenizer())


# ---- in the trainer


def first_end(tokens: list[int]) -> int | None:
    """Return the length at which a completion must have ended by its text, or None if it may go on."""
    for length in range(1, len(tokens) + 1):
        text = byte_tokenizer().decode(tokens[:length])
        if tokens[length - 1] in ENDS or any(text.endswith(stop) for stop in STOP):
            return length
    return None


def test_both_loops_stop_alike(tmp_path: Path) -> None:
    rows = []
    for mode in ("auto", "off"):
        run = stopping(tmp_path / mode, generation=mode, max_completion_length=12)
        torch.manual_seed(0)
        rows.append(run._generate_single_turn([ids("1 =")] * 30, None, {}, 30)[0])
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("generation", "pad_is_eos"), [("auto", False), pytest.param("off", True, marks=pytest.mark.slow)]
)
def test_metrics_and_mask_distinguish_stopped_from_truncated_rows(
    generation: str, pad_is_eos: bool, tmp_path: Path
) -> None:
    run = stopping(tmp_path, pad_is_eos=pad_is_eos, generation=generation, mask_truncated_completions=True)
    batch = one_batch(run, 4)
    rows = []
    for tokens, kept, learnt in zip(
        *(batch[name] for name in ("completion_ids", "completion_mask", "tool_mask")), strict=True
    ):
        rows.append((tokens[kept.bool()].tolist(), learnt[kept.bool()].tolist()))
    ends = [first_end(tokens) for tokens, _ in rows]
    assert all(end in (len(tokens), None) for (tokens, _), end in zip(rows, ends, strict=True)), "cut at the first one"
    assert all(len(tokens) == 24 for (tokens, _), end in zip(rows, ends, strict=True) if end is None)
    assert None in ends
    assert any(tokens[-1] not in ENDS for (tokens, _), end in zip(rows, ends, strict=True) if end is not None)
    for (tokens, learnt), end in zip(rows, ends, strict=True):
        assert learnt == [0 if end is None else 1] * len(tokens)
    first = {name: value for name, (value,) in run._metrics["train"].items()}
    ended = [len(tokens) for (tokens, _), end in zip(rows, ends, strict=True) if end is not None]
    assert first["completions/clipped_ratio"] == ends.count(None) / len(ends)
    assert first["completions/mean_terminated_length"] == pytest.approx(sum(ended) / len(ended))
    assert first["completions/min_terminated_length"] == min(ended)
    assert first["completions/max_terminated_length"] == max(ended)
    assert int(batch["num_items_in_batch"]) == sum(ended)


def test_the_metrics_are_of_all_ranks() -> None:
    """Two rows of this rank, one of them truncated, and two of another rank, gathered over the collective's device."""
    other = torch.tensor([[0, 5], [0, 9]])

    def gather(counts: torch.Tensor) -> torch.Tensor:
        assert counts.device == torch.device("cpu")
        return torch.cat([counts, other])

    names = ("clipped_ratio", "mean_terminated_length", "min_terminated_length", "max_terminated_length")
    metrics = {f"completions/{name}": [7.0, 0.0] for name in names}
    run = SimpleNamespace(
        eos_token_ids=[1], _tokenizer=SimpleNamespace(pad_token_id=0), model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device=torch.device("cpu"), gather=gather), _metrics={"train": metrics},
    )  # fmt: skip
    rows = [ids("axyz"), [*ids("ab"), 1]]
    output = correct_counts(run, ([], rows, None, "more"), StopStrings(["never"], byte_tokenizer()), True)
    assert output == ([], rows, [[0] * 4, [1] * 3], "more")
    assert [metrics[f"completions/{name}"] for name in names] == [
        [7.0, pytest.approx(value)] for value in (1 / 4, 17 / 3, 3, 9)
    ]
    other = torch.tensor([[1, 5], [0, 9]])
    run.model.training, run._metrics = False, {"eval": metrics}
    masks, stop = [[1, 1, 1, 1], [1, 0, 1]], StopStrings(["x"], byte_tokenizer())
    output = correct_counts(run, ([], rows, masks, "more"), stop, False)
    assert output[2] == [[1, 1, 1, 1], [1, 0, 1]], "results of tools are not counted"
    assert [metrics[f"completions/{name}"][-1] for name in names] == [0.5, 5.5, 2, 9]
    other = torch.tensor([[1, 5], [1, 9]])
    correct_counts(run, ([], rows[:1], None, "more"), stop, False)
    assert [metrics[f"completions/{name}"][-1] for name in names] == [1.0, 0.0, 0.0, 0.0], "all are truncated"


@pytest.mark.parametrize(
    ("stop", "learns"), [(["never written"], False), pytest.param(STOP, True, marks=pytest.mark.slow)]
)
def test_masked_rows_have_no_gradient(stop: list[str], learns: bool, tmp_path: Path) -> None:
    policy = tiny_policy()
    run = stopping(tmp_path, stop=stop, policy=policy, mask_truncated_completions=True, max_completion_length=8)
    run.eos_token_ids = run.generation_config.eos_token_id = [1]
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    run.train()
    (entry,) = [entry for entry in run.state.log_history if "reward" in entry]
    assert (entry["completions/clipped_ratio"] < 1) is learns
    assert any(not torch.equal(before[name], value) for name, value in policy.state_dict().items()) is learns


class ServedByAStub:
    """Stub of vLLM for TRL: one completion ends with a stop string that it got, the other stays open."""

    def __init__(self, generation_kwargs: dict[str, Any], **_: Any) -> None:
        self.stop = generation_kwargs["stop"]

    def sync_weights(self) -> None: ...

    def generate(self, prompts: list[list[int]], **_: Any) -> Any:
        texts = [f"x{self.stop[0]}" if row % 2 else "xy" for row in range(len(prompts))]
        completions = [ids(text) for text in texts]
        return prompts, completions, [[[0.0]] * len(tokens) for tokens in completions], None


def test_vllm_gets_the_stop_strings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", ServedByAStub)
    vllm = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False}
    run = stopping(tmp_path, mask_truncated_completions=True, **vllm)
    batch = one_batch(run)
    assert run._metrics["train"]["completions/clipped_ratio"] == [0.5]
    assert run._metrics["train"]["completions/mean_terminated_length"] == [2]
    assert batch["tool_mask"].sum(1).unique().tolist() == [0, 2]


def test_without_stop_strings_trl_masks_truncated_completions(tmp_path: Path) -> None:
    run = trainer(tmp_path, mask_truncated_completions=True)
    assert run.mask_truncated_completions is True
    assert run._stop is None


def test_contract_with_trl() -> None:
    """Return value and metrics of `_generate`, and the one place that reads the mask of truncated completions."""
    generate = inspect.getsource(TRLGRPOTrainer._generate)
    assert (
        "return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images"
        in generate
    )
    for name in ("clipped_ratio", "mean_terminated_length", "min_terminated_length", "max_terminated_length"):
        assert generate.count(f'"completions/{name}"') == 1
    assert "is_truncated = torch.tensor([ids[-1] not in eos_and_pad" in generate
    score = inspect.getsource(TRLGRPOTrainer._generate_and_score_completions)
    assert score.count("self.mask_truncated_completions") == 1
    assert "loss_mask = completion_mask if tool_mask is None else completion_mask * tool_mask" in score
