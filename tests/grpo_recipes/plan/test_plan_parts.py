"""Sentences, decisions and changes of a plan, each from values written by hand."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from trl import GRPOConfig

from grpo_recipes.checks.precision import Precision
from grpo_recipes.plan import memory
from grpo_recipes.plan import plan as plans
from grpo_recipes.plan.layers import NotMeasured
from grpo_recipes.plan.layout import ExpectedLayout, Records, as_json, recorded
from grpo_recipes.plan.memory import GIB, MemoryPlan, Sharding, as_dict, describe, memory_plan
from grpo_recipes.plan.plan import (
    Plan,
    Tokens,
    _checked_prompts,
    _in_layout,
    _keeps_groups_together,
    _larger_micro_batch,
    _memory,
    _model_is_made_elsewhere,
    _notes,
    _own_rewards,
    _padded_rows,
    _position_notes,
    _precision_notes,
    _reward_models,
    _reward_parameters,
    _row_notes,
    _unbuilt,
    resolved_yaml,
    shipped_recipes,
)
from grpo_recipes.plan.prompts import Lengths, PromptReport, ToolTokens
from grpo_recipes.recipe.recipe import find_file
from grpo_recipes.recipe.specs import DatasetSpec
from grpo_recipes.recipe.trl_keys import ignored_keys
from grpo_recipes.training.packing import Layout
from grpo_rewards.registry import UnbuiltReward
from grpo_rewards.terminal import Cell, Labelled, Table
from tests.grpo_recipes.plan.test_memory import TINY

# ---- Memory

UNKNOWN = replace(TINY, gpu_memory=None)
"""No change is known to fit, so the smallest micro-batch and the fewest machines are tried."""
ROWS = "per_device_train_batch_size: 1 with gradient_accumulation_steps: 32"
SERVER = "vllm_mode: server, on GPUs of its own"
OFFLOAD = "accelerate_configs/zero3_offload.yaml (slower)"
TWICE = "num_machines: 2, num_processes: 16"
FOUR_MACHINES = "num_machines: 4, num_processes: 16"
ALL_OFFLOADED = Sharding(8, 1, "zero3", True, True)


@pytest.mark.parametrize(
    ("run", "changes"),
    [
        (
            UNKNOWN,
            {
                ROWS: {"rows": 1},
                SERVER: {"vllm": "server"},
                "ds3_gather_for_generation: false (far slower)": {"gather_for_generation": False},
                TWICE: {"layout": Sharding(16, 2, "zero3")},
                OFFLOAD: {"layout": ALL_OFFLOADED},
            },
        ),
        (
            replace(UNKNOWN, gradient_checkpointing=False, vllm="colocate", layout=Sharding(8, 1)),
            {
                "gradient_checkpointing: true": {"gradient_checkpointing": True},
                ROWS: {"rows": 1},
                SERVER: {"vllm": "server"},
                "vllm_enable_sleep_mode: true": {"vllm_sleeps": True},
                "accelerate_configs/zero3.yaml": {"layout": Sharding(8, 1, "zero3")},
                OFFLOAD: {"layout": ALL_OFFLOADED},
            },
        ),
        (
            replace(UNKNOWN, vllm="server", gather_for_generation=False, accumulates=False),
            {
                ROWS: {"rows": 1, "accumulates": True},
                "use_vllm: false with ds3_gather_for_generation: false (far slower)": {"vllm": None},
                TWICE: {"layout": Sharding(16, 2, "zero3")},
                OFFLOAD: {"layout": ALL_OFFLOADED},
            },
        ),
        (
            replace(UNKNOWN, rows=1, vllm="colocate", vllm_sleeps=True, layout=Sharding(1, 1, "fsdp2")),
            {SERVER: {"vllm": "server"}, "num_machines: 2, num_processes: 2": {"layout": Sharding(2, 2, "fsdp2")}},
        ),
        (
            replace(UNKNOWN, rows=1, layout=replace(ALL_OFFLOADED, num_machines=2), gather_for_generation=False),
            {SERVER: {"vllm": "server"}, FOUR_MACHINES: {"layout": Sharding(16, 4, "zero3", True, True)}},
        ),
        (
            replace(UNKNOWN, rows=1, layout=Sharding()),
            {SERVER: {"vllm": "server"}, OFFLOAD: {"layout": Sharding(1, 1, "zero3", True, True)}},
        ),
    ],
    ids=["ZeRO-3", "DDP", "server", "FSDP2", "offloaded", "one GPU"],
)  # fmt: skip
def test_the_changes_that_are_tried(run: MemoryPlan, changes: dict[str, dict[str, Any]]) -> None:
    tried = memory._changes(run, accumulation=4)
    assert [text for text, _ in tried] == list(changes)
    for text, changed in tried:
        assert changed == replace(run, **changes[text]), text


def test_the_largest_micro_batch_that_fits_is_suggested() -> None:
    alone = {"generated_rows": 1, "gather_for_generation": False, "gradient_checkpointing": True}
    run = replace(UNKNOWN, rows=12, tokens=8_192, vllm="server", **alone)
    peaks = {rows: replace(run, rows=rows).peak() for rows in (6, 4, 3)}
    between = (peaks[4] + peaks[6]) / 2
    limited = replace(run, gpu_memory=(between + 1.5 * GIB) / 0.95)
    assert limited.usable() == pytest.approx(between)
    (first, *_) = memory.changes_that_fit(limited, accumulation=2)
    gib = f"{peaks[4] / 2**30:.1f} GiB"
    assert first == f"per_device_train_batch_size: 4 with gradient_accumulation_steps: 6: {gib}"


def test_a_run_fits_up_to_its_last_byte_and_vllm_needs_room_beyond_its_weights() -> None:
    run = replace(UNKNOWN, vllm=None)
    exact = run.peak()
    gpu_memory = (exact + 1.5 * GIB) / 0.95
    assert run.fits() is None
    assert replace(run, gpu_memory=gpu_memory * (1 + 1e-12)).fits()
    assert not replace(run, gpu_memory=gpu_memory * (1 - 1e-9)).fits()
    near = [replace(run, gpu_memory=gpu_memory + step * math.ulp(gpu_memory)) for step in range(-8, 9)]
    exactly = [one for one in near if one.usable() == exact]
    assert exactly
    assert all(one.fits() for one in exactly)
    colocated = replace(TINY, vllm="colocate", gpu_memory=80 * GIB, vllm_split=2)
    share = colocated.shape.parameters / (80 * GIB)  # two bytes of half the weights
    assert not replace(colocated, vllm_share=share).fits()
    assert replace(colocated, vllm_share=share * 1.0001).fits() == (colocated.peak() <= colocated.usable())
    assert replace(colocated, vllm=None).vllm_weights() == 0


def test_the_estimate_is_shown_with_its_verdict_and_the_changes() -> None:
    run = replace(TINY, vllm="colocate", vllm_share=0.1, gpu_memory=20 * GIB, layout=ALL_OFFLOADED)
    table, verdict, share, *changes = describe(run, 4)
    assert isinstance(table, Table)
    rows = {str(getattr(name, "text", name)): size for name, size in table.rows}
    parts = {name: f"{size / GIB:.1f} GiB" for name, size in run.parts().items() if size}
    host = {"host memory, each machine": f"{run.host() / GIB:.1f} GiB"}
    assert rows == {**parts, "peak": f"{run.peak() / GIB:.1f} GiB", **host}
    assert verdict == Cell("  does not fit in 17.5 GiB: a GPU of 20.0 GiB less context and fragmentation", "bad")
    assert share == (
        "  vLLM's share of 2.0 GiB can't hold its 13.0 GiB of weights: raise `vllm_gpu_memory_utilization` or "
        "`vllm_tensor_parallel_size`"
    )
    assert changes
    assert all(isinstance(part, Labelled) for part in changes)
    large = replace(run, vllm=None, gpu_memory=200 * GIB)
    assert describe(large, 4)[1:] == [
        Cell("  fits in 188.5 GiB: a GPU of 200.0 GiB less context and fragmentation", "good")
    ]
    (alone,) = describe(replace(large, gpu_memory=None, layout=Sharding()), 4)
    assert isinstance(alone, Table)
    assert alone.numbers == {1}
    assert [name for name, _ in alone.rows if isinstance(name, Cell) and name.style == "head"] == [Cell("peak", "head")]
    exact = replace(
        run, shape=replace(TINY.shape, parameters=2**32, trained=2**32), vllm_share=0.5, gpu_memory=16 * GIB
    )
    assert "  vLLM's share of 8.0 GiB can't hold its 8.0 GiB of weights: raise" in str(describe(exact, 4)[2])


def test_the_estimate_as_json() -> None:
    run = replace(TINY, vllm="colocate", gpu_memory=80.4 * GIB)
    found = as_dict(run)
    assert found["vllm_share"] == round(0.3 * 80.4 * GIB)
    assert found["kv_cache_kept_between_turns"] == 0
    assert found["peak"] == round(run.peak())
    assert found["usable"] == round(80.4 * GIB * 0.95 - 1.5 * GIB)
    assert (found["fits"], found["host"]) == (run.fits(), 0)
    assert found["layout"]["sharding"] == "zero3"
    assert found["shape"]["hidden"] == TINY.shape.hidden
    assert as_dict(UNKNOWN)["usable"] is None
    assert all(isinstance(found[name], int) for name in ("parameters", "activations", "reward_model"))


def test_sizes_in_json_are_the_nearest_integers() -> None:
    rounded_up = set()
    for extra in range(8):
        sizes = replace(TINY.shape, parameters=7_000_000_000 + extra, trained=7_000_000_000 + extra)
        run = replace(TINY, shape=sizes, layout=Sharding(7, 7, "zero3", True), gpu_memory=80 * GIB + extra)
        exact = {"parameters": run.parts()["parameters"], "peak": run.peak(), "host": run.host()}
        for name, size in {**exact, "usable": run.usable() or 0.0}.items():
            assert abs(as_dict(run)[name] - size) <= 0.5
            if size % 1 > 0.5:
                rounded_up.add(name)
    assert rounded_up == {"parameters", "peak", "host", "usable"}


def test_a_plan_takes_its_numbers_from_the_keys_of_the_recipe(tmp_path: Path) -> None:
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    args.ds3_gather_for_generation, args.gradient_checkpointing = False, False
    args.vllm_mode, args.vllm_gpu_memory_utilization = "colocate", 0.37
    args.vllm_tensor_parallel_size, args.vllm_enable_sleep_mode = 4, True
    layout = Sharding(8, 2, "zero3")

    def run(prompt_tokens: int | None = None, **changes: Any) -> MemoryPlan:
        return memory_plan(
            args, "bfloat16", TINY.shape, layout, prompt_tokens=prompt_tokens, steps_per_generation=2, **changes
        )

    assert run().vllm is None
    args.use_vllm = True
    found = run(gpu_memory=5.0, optim="sgd", quantised_bytes=0.5, full_kl=True, reward_parameters=9)
    assert (found.vllm, found.vllm_share, found.vllm_split, found.vllm_sleeps) == ("colocate", 0.37, 4, True)
    assert (found.gather_for_generation, found.gradient_checkpointing, found.layout) == (False, False, layout)
    assert (found.gpu_memory, found.optim, found.quantised_bytes, found.full_kl) == (5.0, "sgd", 0.5, True)
    assert (found.reward_parameters, found.shape, found.prompts, found.layers) == (9, TINY.shape, None, None)
    assert (found.prompt_tokens, found.tokens) == (512, 512 + args.max_completion_length)
    assert run(30).tokens == 30 + args.max_completion_length


# ---- Layout, tokens, notes


def test_tokens_name_padded_rows_and_an_optimizer_step_only_where_they_differ() -> None:
    assert Tokens(1_200, 1_200).describe(1) == "at most 1,200 in a micro-batch"
    assert Tokens(1_200, 4_000).describe(1) == "at most 1,200 in a micro-batch (4,000 in TRL's rows)"
    assert Tokens(1_200, 4_000).describe(2) == (
        "at most 1,200 in a micro-batch (4,000 in TRL's rows), 2,400 in an optimizer step of each process"
    )


def test_an_expected_layout_is_described() -> None:
    unknown = ExpectedLayout("new", None, "the layout of new is not recorded")
    assert unknown.describe() == (
        "unknown: the layout of new is not recorded; tokens and memory are those of TRL's rows"
    )
    assert unknown.notes() == []
    made = recorded().transformers
    assert unknown.as_dict() == {
        **{"name": None, "model_type": "new", "reason": "the layout of new is not recorded"},
        **{"recorded_with": made, "changes": {}},
    }
    changes = {"with `a: 0`": Layout.SHARED, "under ZeRO-3": Layout.TRIMMED}
    trimmed = ExpectedLayout("llama", Layout.TRIMMED, "a reason", changes)
    assert trimmed.describe().endswith("): a reason")
    assert ExpectedLayout("llama", Layout.TRIMMED, "").describe() == trimmed.describe().removesuffix(": a reason")
    assert trimmed.as_dict()["changes"] == {"with `a: 0`": "shared", "under ZeRO-3": "trimmed"}
    assert trimmed.as_dict()["name"] == "trimmed"
    first, second = trimmed.notes()
    other = "" if transformers.__version__ == made else f" (installed: {transformers.__version__})"
    assert first == (
        f"the layout is the one recorded for llama with transformers {made}{other}; the run verifies it before its "
        "first step, and a warning names the layout if it is another one"
    )
    assert second == "the layout would be shared with `a: 0`, trimmed under ZeRO-3"
    assert ExpectedLayout("llama", Layout.PADDED, "", {}).notes() == []


def test_recorded_layouts_are_written_with_the_most_preferred_first() -> None:
    text = as_json(Records("5.0", {"b": Layout.PACKED, "a": Layout.PACKED, "c": Layout.TRIMMED}))
    assert text.splitlines()[:4] == ["{", '  "transformers": "5.0",', '  "layouts": {', '    "packed": ["a", "b"],']
    content = json.loads(text)
    assert list(content["layouts"]) == [layout.name.lower() for layout in sorted(Layout, reverse=True)]
    assert (content["layouts"]["trimmed"], content["layouts"]["padded"]) == (["c"], [])


def geometry(**changes: Any) -> Any:
    values: dict[str, Any] = {
        **{"num_generations": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 4},
        **{"splits_groups": False, "completions_per_rank": 32},
    }
    return SimpleNamespace(**{**values, **changes})


def recipe(**changes: Any) -> Any:
    values: dict[str, Any] = {
        **{"loss_type": "dapo", "entropy_coef": 0.0, "use_adaptive_entropy": False, "top_entropy_quantile": 1.0},
        **{"steps_per_generation": None},
    }
    return SimpleNamespace(config=SimpleNamespace(**{**values, **changes}))


@pytest.mark.parametrize(
    ("changes", "batch", "together"),
    [
        ({}, {}, True),
        ({"loss_type": "unknown"}, {}, False),
        ({"entropy_coef": 0.01}, {}, False),
        ({"use_adaptive_entropy": True}, {}, False),
        ({"top_entropy_quantile": 0.8}, {}, False),
        ({}, {"splits_groups": True}, False),
        ({}, {"num_generations": 1}, False),
        ({}, {"num_generations": 2}, True),
        ({}, {"gradient_accumulation_steps": 6}, False),  # an optimizer step ends inside a generation batch
        ({}, {"gradient_accumulation_steps": 8}, True),
        ({}, {"gradient_accumulation_steps": 2}, False),
    ],
    ids=str,
)
def test_rows_move_between_micro_batches_where_no_statistic_of_one_needs_them(
    changes: dict[str, Any], batch: dict[str, Any], together: bool
) -> None:
    assert _keeps_groups_together(recipe(**changes), geometry(**batch)) is together


def test_the_estimate_is_of_the_rows_of_the_expected_layout() -> None:
    apart = {"splits_groups": True}
    assert _in_layout(recipe(), geometry(), TINY, None) is TINY
    trimmed = _in_layout(recipe(), geometry(), TINY, Layout.TRIMMED)
    assert trimmed == replace(TINY, rows_as=Layout.TRIMMED)
    assert _in_layout(recipe(), geometry(**apart), TINY, Layout.PACKED) is TINY
    for layout in (Layout.PACKED, Layout.SHARED):
        found = _in_layout(recipe(), geometry(), TINY, layout)
        assert (found.rows, found.prompts, found.rows_as, found.accumulates) == (8, 2, layout, True)
    for completions, prompts in ((32, 8), (20, 6), (17, 6), (4, 2)):  # at most one more than whole groups
        found = _in_layout(recipe(), geometry(**apart, completions_per_rank=completions), TINY, Layout.SHARED)
        assert found.prompts == prompts


def test_a_note_names_the_memory_of_padded_rows_where_it_is_more() -> None:
    packed = memory.sharing_prompts(replace(TINY, generated_rows=1, gather_for_generation=False), 1, 8, 1)
    padded = replace(packed, prompts=None, rows_as=Layout.PADDED).peak()
    assert padded > packed.peak()
    assert _padded_rows(packed) == [f"a run that warns of trimmed or padded rows needs up to {padded / 2**30:.1f} GiB"]
    assert _padded_rows(TINY) == _padded_rows("unknown") == _padded_rows(None) == []
    generation = replace(packed, generated_rows=10**6)
    assert _padded_rows(generation) == [], "the peak is in generation"


def test_a_note_names_the_largest_micro_batch_that_fits() -> None:
    alone = replace(TINY, generated_rows=1, gather_for_generation=False, tokens=8_192, gpu_memory=10_000 * GIB)
    run = memory.sharing_prompts(alone, 1, 4, 4)

    def note(fits: float, config: Any = None, batch: Any = None, layout: Layout | None = Layout.PACKED) -> list[str]:
        return _larger_micro_batch(config or recipe(), batch or geometry(), replace(run, gpu_memory=fits * GIB), layout)

    def peaks(factor: int) -> str:
        larger = memory.sharing_prompts(run, factor, 4, 4)
        padded = replace(larger, prompts=None, rows_as=Layout.PADDED)
        return (
            f"which makes fewer model calls for the same gradient: {larger.peak() / 2**30:.1f} GiB at the peak. A run "
            f"that warns of trimmed or padded rows needs up to {padded.peak() / 2**30:.1f} GiB"
        )

    begin = "packed rows also fit at `per_device_train_batch_size: "
    assert note(10_000) == [f"{begin}32` with `gradient_accumulation_steps: 1`, {peaks(4)}"]
    with_steps = note(10_000, recipe(steps_per_generation=4))
    assert with_steps == [f"{begin}32` with `gradient_accumulation_steps: 1` and `steps_per_generation: 1`, {peaks(4)}"]
    two = memory.sharing_prompts(run, 2, 4, 4).peak() / GIB
    assert note((two + 1.6) / 0.95) == [f"{begin}16` with `gradient_accumulation_steps: 2`, {peaks(2)}"]
    assert note((two + 1.4) / 0.95) == []
    assert note(1) == note(10_000, layout=Layout.TRIMMED) == note(10_000, layout=None) == []
    assert note(10_000, batch=geometry(splits_groups=True)) == []
    assert note(10_000, batch=geometry(steps_per_generation=1)) == []


def test_notes_on_rows_that_are_held_out_and_on_a_table_of_one_row() -> None:
    def notes(trained: int, held_out: int | None, share: float | None) -> list[str]:
        spec: Any = SimpleNamespace(dataset=SimpleNamespace(eval_share=share))
        checked: Any = SimpleNamespace(
            train_dataset=range(trained), eval_dataset=None if held_out is None else range(held_out)
        )
        return _row_notes(spec, checked)

    assert notes(2, None, None) == []
    assert notes(1, None, None) == [
        "the dataset has one row, so every group answers the same prompt: add rows to `dataset.path`"
    ]
    assert notes(5_000, 1_200, 0.2) == ["1,200 rows are held out for evaluation, and 5,000 are trained on"]
    assert notes(5_000, 0, None) == ["0 rows are held out for evaluation, and 5,000 are trained on"]
    assert notes(80, None, 0.2) == [
        "about 20% of the rows are held out, and no evaluation reads them: set `eval_strategy: steps`"
    ]


def test_a_note_names_positions_that_the_model_was_not_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_recipes.plan.plan.model_positions", lambda recipe: 2_048)
    run: Any = recipe(max_completion_length=1_024)
    assert _position_notes(run, 1_024) == []
    assert _position_notes(run, 1_025) == [
        "`max_completion_length` 1,024 after a prompt of 1,025 tokens needs 2,049 positions, and the model was made "
        "for 2,048 (`max_position_embeddings`): lower it"
    ]
    monkeypatch.setattr("grpo_recipes.plan.plan.model_positions", lambda recipe: None)
    assert _position_notes(run, 10**6) == []


def test_the_models_of_rewards_are_found_inside_sums_and_gates() -> None:
    model = {"name": "reward_model", "kwargs": {"model": "a/b"}}
    specs = ["tag_presence", {"name": "judge"}, {"name": "x", "kwargs": {"model": 3}}, model]
    assert list(_reward_models(specs)) == ["a/b"]
    inner = {"name": "reward_model", "kwargs": {"model": "c/d"}}
    gate = {"name": "gate", "reward": inner, "only_if": {"name": "sum", "rewards": [model, "length"]}}
    assert list(_reward_models([gate, {"name": "y", "kwargs": None}])) == ["c/d", "a/b"]


# ---- Prompts

SPEC = DatasetSpec.parse({"path": "x", "max_prompt_tokens": 70})


def test_the_lengths_of_prompts_are_summed_up() -> None:
    lengths = np.array([9, 70, 71, 90, 30])
    found = Lengths.of(lengths, 5, 70)
    assert (found.measured, found.rows, found.shortest, found.longest, found.over_limit) == (5, 5, 9, 90, 2)
    assert found.describe(SPEC) == (
        "9 to 90 tokens, median 70, 95 % at most 90; 2 over `max_prompt_tokens` 70 are dropped"
    )
    assert found.longest_trained(SPEC) is None, "a sample does not tell the longest prompt that remains"
    below = Lengths.of(lengths, 5, 90)
    assert below.longest_trained(SPEC) == 90
    assert below.describe(SPEC).endswith("95 % at most 90; 0 over `max_prompt_tokens` 70 are dropped")
    cut = DatasetSpec.parse({"path": "x", "max_prompt_tokens": 70, "overlong_prompts": "cut_left"})
    assert found.describe(cut).endswith("2 over `max_prompt_tokens` 70 are cut from the left")
    assert found.longest_trained(cut) == 70
    unlimited = Lengths.of(lengths, 1_500, None)
    assert unlimited.longest_trained(SPEC) == 90
    hundred = Lengths.of(np.arange(1, 101), 100, None)
    assert (hundred.shortest, hundred.median, hundred.percentile_95, hundred.longest) == (1, 51, 96, 100)
    assert unlimited.describe(DatasetSpec.parse({"path": "x"})).endswith(
        ", of a random sample of 5 of 1,500; `max_prompt_tokens` sets no limit"
    )


def test_the_tokens_of_tools_are_added_up() -> None:
    assert ToolTokens(schemas=1_500, call=20, result=7, turns=3, limit=300).describe(2_048) == (
        "schemas 1,500 tokens of each prompt; a turn takes at least 20 for its call and 7 around each result, which "
        "has at most 300; 3 such turns take 81 to 981 of `max_completion_length` 2,048"
    )


def test_a_report_on_prompts() -> None:
    lengths = Lengths.of(np.array([9]), 1, 70)
    report = PromptReport("a\nb", 9, lengths, None, ToolTokens(1, 2, 3, 4, 5))
    head, prompt = report.describe(SPEC)
    assert head == [
        f"  prompt lengths  {lengths.describe(SPEC)}",
        "  first prompt    9 tokens, exactly as the model sees it:",
    ]
    assert prompt == ["  | a", "  | b"]
    assert report.as_dict()["tools"] == {"schemas": 1, "call": 2, "result": 3, "turns": 4, "limit": 5}
    unknown = PromptReport("user: a", None, None, "no tokenizer")
    assert unknown.describe(SPEC)[0] == [
        "  prompt lengths  unknown: no tokenizer",
        "  first prompt    its messages, before the chat template:",
    ]
    assert unknown.as_dict() == {"text": "user: a", "tokens": None, "lengths": None, "unknown": "no tokenizer"}


# ---- A whole plan, from parts that are given


GIVEN_PRECISION = Precision("bfloat16", "bfloat16", "adamw_bf16", 1e-5, 0.9)


class GivenGeometry:
    """Geometry with short sentences."""

    def describe(self) -> str:
        return "  processes       one\n                  of them"

    def picture(self) -> str:
        return "picture"

    def describe_epoch(self, prompts: int, longest: int) -> str:
        return f"  epoch           {prompts} prompts of {longest}"

    def as_dict(self) -> dict[str, Any]:
        return {"rows": 8}

    def cells(self) -> list[str]:
        return ["cell"]

    def epoch(self, prompts: int, longest: int) -> dict[str, int]:
        return {"prompts": prompts, "longest": longest}


class GivenTools:
    """Tools with short sentences."""

    all_tools = (SimpleNamespace(name="add"),)

    def describe(self, turns: int) -> str:
        return f"{turns} turns"


SHOWN = PromptReport("text", 9, Lengths.of(np.array([9]), 1, 70), None, ToolTokens(1, 2, 3, 4, 5))


def planned(**changes: Any) -> Plan:
    config = SimpleNamespace(max_completion_length=64, max_tool_calling_iterations=3, gradient_accumulation_steps=2)
    given: Any = SimpleNamespace(config=config, source="r.yaml", dataset=SPEC)
    values: dict[str, Any] = {
        **{"recipe": given, "geometry": GivenGeometry(), "rewards": [], "prompts": 40, "layout": None, "tokens": None},
        **{"memory": None, "precision": GIVEN_PRECISION, "surviving": 0.5, "notes": ["a note"], "shown": None},
    }
    return Plan(**{**values, **changes})


def test_a_plan_with_unknown_parts_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "describe_rewards", lambda rewards: "none at all")
    precision = GIVEN_PRECISION.describe(0.5).partition("  ")[2].strip()
    head, rewards, stored, *rest = planned(prompts="no hub", memory="no file").describe()
    assert head == Cell("r.yaml", "head")
    assert rewards == Labelled("rewards", "none at all")
    assert isinstance(stored, Labelled)
    assert precision.endswith(stored.text)
    assert (
        rest[-9:]
        == [
            *(Labelled("processes", "one"), Labelled("", "of them"), "", "picture", ""),
            *(Labelled("epoch", "unknown: no hub"), "", Cell("  memory of one GPU", "head")),
            *(Labelled("memory", "unknown: no file"), Labelled("note", "a note")),
        ][-9:]
    )
    plain = planned().describe()
    assert Labelled("epoch", "40 prompts of 64") in plain
    assert Cell("  memory of one GPU", "head") not in plain


def test_a_plan_with_all_parts_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "describe_rewards", lambda rewards: "none at all")
    parts: dict[str, Any] = {"shown": SHOWN, "toolset": GivenTools(), "memory": TINY}
    parts |= {"layout": ExpectedLayout("llama", Layout.PADDED, ""), "tokens": Tokens(12, 12)}
    found = planned(**parts).describe()
    turns = ToolTokens(1, 2, 3, 4, 5).describe(64)
    for label, text in (
        *(("tools", "3 turns"), ("turns", turns), ("layout", "padded (TRL's rows)")),
        ("tokens", "at most 12 in a micro-batch, 24 in an optimizer step of each process"),
        ("first prompt", "9 tokens, exactly as the model sees it:"),
    ):
        assert Labelled(label, text) in found
    assert "  | text" in found
    assert [part for part in found if isinstance(part, Table)] == [describe(TINY, 2)[0]]
    for missing in ({"shown": None}, {"shown": replace(SHOWN, tools=None)}):
        labels = [part.label for part in planned(**{**parts, **missing}).describe() if isinstance(part, Labelled)]
        assert "tools" in labels
        assert "turns" not in labels
    for missing in ({"layout": None}, {"tokens": None}):
        labels = [part.label for part in planned(**{**parts, **missing}).describe() if isinstance(part, Labelled)]
        assert not {"layout", "tokens"} & {*labels}


def test_a_plan_as_json() -> None:
    parts: dict[str, Any] = {"shown": SHOWN, "toolset": GivenTools(), "memory": TINY}
    layout = ExpectedLayout("llama", Layout.PADDED, "")
    found = planned(**parts, layout=layout, tokens=Tokens(12, 20)).as_dict()
    assert found["recipe"] == "r.yaml"
    assert found["geometry"] == {"rows": 8, "cells": ["cell"]}
    assert (found["tools"], found["epoch"]) == (["add"], {"prompts": 40, "longest": 64})
    assert (found["prompts"], found["layout"]) == (SHOWN.as_dict(), layout.as_dict())
    assert (found["tokens"], found["memory"]) == ({"micro_batch": 12, "padded": 20}, as_dict(TINY))
    assert (found["precision"]["surviving"], found["precision"]["optim"]) == (0.5, "adamw_bf16")
    assert (found["unknown"], found["notes"]) == ([], ["a note"])
    unknown = planned(prompts="no hub", memory="no file").as_dict()
    assert unknown["unknown"] == ["no hub", "no file"]
    assert "tools" not in unknown
    assert {key for key, value in unknown.items() if value is None} == {
        *("epoch", "prompts", "layout", "tokens", "memory")
    }


def test_the_first_sentence_of_a_recipes_head_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "It trains a model " + "on many prompts " * 6
    heads = {
        "first": f"# {long}by Dr. GRPO.\n#  And more. Of it\n#\n# Other.\nkey: 1  #\n",
        "second": "# One\n# line\nkey: 1\n",
    }
    for name, text in heads.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(plans, "shipped_files", lambda kind: {name: tmp_path / name for name in heads})
    first, *lines = shipped_recipes().split("\n")
    assert first == "The shipped recipes; `grpo-recipes plan NAME` describes one of them."
    assert lines[:2] == ["", "  first"]
    wrapped = lines[2:-3]
    assert len(wrapped) == 2
    assert all(line.startswith("    ") and len(line) <= 100 for line in wrapped)
    assert " ".join(line.strip() for line in wrapped) == f"{long}by Dr. GRPO"
    assert lines[-3:] == ["", "  second", "    One line"]


def test_a_resolved_recipe_keeps_its_order_and_its_letters() -> None:
    text = resolved_yaml(["--config", "quickstart", "--output_dir", "läufe", "--loss_type", "grpo"], ["--json"])
    keys = [line.partition(":")[0] for line in text.splitlines() if line[0].isalpha()]
    assert keys != sorted(keys)
    assert "output_dir: läufe\n" in text
    ignored = set(ignored_keys("grpo"))
    assert ignored
    assert not ignored & {*keys}


@pytest.mark.parametrize(
    ("precision", "warns", "best", "recommends"),
    [
        ({}, False, "dtype: float32", True),
        ({}, False, "dtype: bfloat16 with optim: adamw_bf16", False),
        ({"stored": "float32"}, False, "dtype: float32", False),
        ({"optim": "adamw_torch"}, False, "dtype: float32", False),
        ({"optim": "adamw_torch"}, True, "dtype: float32", True),
        ({}, True, "dtype: bfloat16 with optim: adamw_bf16", True),
    ],
    ids=str,
)
def test_a_precision_is_recommended_where_updates_are_lost_or_memory_is_left(
    precision: dict[str, Any], warns: bool, best: str, recommends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "best_precision", lambda estimate: best)
    monkeypatch.setattr(Precision, "warning", lambda self, surviving: f"{surviving} survive" if warns else None)
    run, warning = replace(GIVEN_PRECISION, **precision), ["0.5 survive"] if warns else []
    recommended = [f"recommended, of what keeps every update: {best}"] if recommends else []
    assert _precision_notes(run, 0.5, TINY) == [*warning, *recommended]
    adapter = replace(TINY, shape=replace(TINY.shape, trained=1))
    for other in (adapter, "unknown", None):
        assert _precision_notes(run, 0.5, other) == warning


def test_each_divisor_of_the_micro_batches_is_tried() -> None:
    alone = replace(TINY, generated_rows=1, gather_for_generation=False, tokens=8_192)
    run = memory.sharing_prompts(alone, 1, 4, 6)
    five = memory.sharing_prompts(run, 5, 4, 6).peak() / GIB  # five micro-batches of six fit, and do not divide them
    fitting = replace(run, gpu_memory=(five + 1.6) / 0.95 * GIB)
    batch = geometry(gradient_accumulation_steps=6, steps_per_generation=6)
    (note,) = _larger_micro_batch(recipe(), batch, fitting, Layout.PACKED)
    assert note.startswith(
        "packed rows also fit at `per_device_train_batch_size: 24` with `gradient_accumulation_steps: 2`"
    )
    assert _larger_micro_batch(recipe(), batch, "unknown", Layout.PACKED) == []


def test_rewards_that_were_not_built_and_those_of_the_user_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "is_own", lambda leaf: leaf.name != "length")
    monkeypatch.setattr(plans, "leaves", lambda rewards: rewards)
    rewards: Any = [
        SimpleNamespace(name=name, unbound=UnbuiltReward(name) if name == "b" else print)
        for name in ("a", "b", "length")
    ]
    assert _unbuilt(rewards) == [
        "of another package, imported and not built: `b`; `--build` builds them, as training does"
    ]
    assert _unbuilt(rewards[:1]) == []
    given: Any = SimpleNamespace(source="r.yaml")
    assert _own_rewards(given, rewards) == [
        "rewards of your own: `a`, `b`; `grpo-rewards audit DATA --reward r.yaml` shows which wrong completions they "
        "pay"
    ]
    assert _own_rewards(given, rewards[2:]) == []


def test_the_parameters_of_reward_models_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"a/b": 5, "c/d": 7}

    def load_shape(model: str) -> Any:
        if model not in sizes:
            raise memory.MemoryUnknown(model)
        return SimpleNamespace(parameters=sizes[model])

    monkeypatch.setattr(memory, "load_shape", load_shape)
    specs = [{"name": "reward_model", "kwargs": {"model": model}} for model in ("a/b", "c/d", "e/f")]
    notes: list[str] = []
    given: Any = SimpleNamespace(rewards=specs)
    assert _reward_parameters(given, notes) == 12
    assert notes == ["the reward model e/f is not counted: its configuration can't be read here"]
    given.rewards = ["length"]
    assert _reward_parameters(given, notes) == 0


def test_notes_on_the_recipe_name_an_assumed_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "cautions", lambda config, model: [f"{config} {model}"])
    monkeypatch.setattr(plans.packages, "missing", lambda config: ["a package"])
    monkeypatch.setattr(plans.packages, "missing_quantization", lambda model: ["another"])

    def notes(longest: int | None) -> list[str]:
        given: Any = SimpleNamespace(config="c", model="m", dataset=SimpleNamespace(max_prompt_tokens=longest))
        return _notes(given)

    assert notes(70) == ["c m", "a package", "another"]
    assert notes(None)[3:] == ["prompts are taken to have 512 tokens: `dataset.max_prompt_tokens` sets a limit"]


@pytest.mark.parametrize(("lengths", "longest"), [(SHOWN.lengths, 9), (None, None)])
def test_what_is_known_of_golds_and_prompts_is_noted(
    lengths: Lengths | None, longest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(plans, "prompt_report", lambda *_: replace(SHOWN, lengths=lengths))
    monkeypatch.setattr(plans.packages, "check_vllm_lengths", lambda config, length: asked.append(length))
    monkeypatch.setattr(plans, "sampling_note", lambda recipe, geometry, rows: [f"{rows} rows"])
    monkeypatch.setattr(plans, "_row_notes", lambda *_: ["rows"])
    monkeypatch.setattr(plans, "_position_notes", lambda recipe, longest: [f"longest {longest}"])
    golds = SimpleNamespace(describe=lambda: "golds")
    monkeypatch.setattr(plans, "prefilled_notes", lambda rewards, prompt: [f"{rewards} of {prompt}"])
    checked: Any = SimpleNamespace(
        train_dataset=range(40), toolset=None, golds=golds, gold_notes=["g"], geometry=None, rewards="rewards"
    )
    tags = f"rewards of {SHOWN.text}"
    given: Any = SimpleNamespace(dataset=SPEC, naming_this_file=nullcontext, config=None)
    notes = ["before"]
    assert _checked_prompts(given, checked, notes) == replace(SHOWN, lengths=lengths)
    assert notes == ["before", "golds", "g", tags, "40 rows", "rows", f"longest {longest or 0}"]
    assert asked == ([] if longest is None else [longest])
    checked.golds = None
    _checked_prompts(given, checked, notes := [])
    assert notes == ["g", tags, "40 rows", "rows", f"longest {longest or 0}"]
    monkeypatch.setattr(plans, "prompt_report", lambda *_: replace(SHOWN, lengths=lengths, unknown="no tokenizer"))
    _checked_prompts(given, checked, notes := [])
    assert notes == ["g", "40 rows", "rows", f"longest {longest or 0}"]


ALONE = Sharding()


class Policies:
    """Stand-ins for what an estimate reads of a recipe and a model, which record what they were asked for."""

    def __init__(self, patch: pytest.MonkeyPatch, *, is_measured: bool = False) -> None:
        self.shape, self.model, self.quantised = TINY.shape, object(), None
        self.asked: dict[str, Any] = {}
        self.expected = ExpectedLayout("other", Layout.TRIMMED, "", {}, is_measured)
        self.without_dropout: list[Any] = []
        patch.setattr(plans, "model_config", lambda recipe: SimpleNamespace(dtype="bfloat16"))
        patch.setattr(plans, "optimizer_name", lambda recipe, machine: f"optimizer of {machine}")
        patch.setattr(plans, "disable_dropout_in_model", self.without_dropout.append)
        patch.setattr(plans, "expected_layout", self.expected_layout)
        patch.setattr(memory, "quantised_bytes", lambda arguments: self.quantised)
        patch.setattr(memory, "policy_model", self.policy_model)
        patch.setattr(memory, "memory_plan", self.memory_plan)

    def policy_model(self, recipe: Any, file: str) -> Any:
        self.asked["file"] = file
        return self.shape, self.model

    def memory_plan(self, config: Any, dtype: str, shape: Any, layout: Sharding, **keys: Any) -> MemoryPlan:
        self.asked |= {"config": config, "dtype": dtype, **keys}
        return replace(TINY, shape=shape, layout=layout)

    def expected_layout(self, recipe: Any, model: Any, sharding: str, tokens: int) -> ExpectedLayout:
        assert model is self.model
        self.asked |= {"sharding": sharding, "tokens": tokens}
        return self.expected

    def estimate(self, layout: Sharding = ALONE, **changes: Any) -> Any:
        config = SimpleNamespace(disable_dropout=False, use_cpu=changes.pop("use_cpu", False))
        config.disable_dropout = changes.pop("disable_dropout", False)
        values = {"tools": None, "environment_factory": None, "generation": "auto", "kl_estimator": "sampled"}
        dataset = SimpleNamespace(max_prompt_tokens=33)
        given: Any = SimpleNamespace(config=config, dataset=dataset, rewards=[], **{**values, **changes})
        machine: Any = "this machine"
        self.notes: list[str] = []
        return _memory(given, machine, geometry(steps_per_generation=3), layout, 5.0, "file", self.notes)


def test_an_estimate_is_made_from_the_keys_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    policies = Policies(monkeypatch)
    layout = Sharding(8, 1, "zero3")
    assert policies.estimate(layout) == (replace(TINY, layout=layout), policies.expected)
    config = policies.asked.pop("config")
    assert config.use_cpu is False
    assert policies.asked == {
        **{"file": "file", "dtype": "bfloat16", "prompt_tokens": 33, "steps_per_generation": 3},
        **{"reward_parameters": 0, "gpu_memory": 5.0, "optim": "optimizer of this machine", "quantised_bytes": None},
        **{"keeps_turns": False, "full_kl": False, "sharding": "zero3", "tokens": TINY.tokens},
    }
    for changes, keeps in (
        ({"tools": ["t"]}, True),
        ({"environment_factory": "e"}, True),
        ({"generation": "off"}, False),
    ):
        policies.estimate(**changes)
        assert policies.asked["keeps_turns"] is keeps
    policies.estimate(tools=["t"], generation="off", kl_estimator="full")
    assert (policies.asked["keeps_turns"], policies.asked["full_kl"]) == (False, True)
    assert policies.without_dropout == []
    policies.estimate(disable_dropout=True)
    assert policies.without_dropout == [policies.model]


def test_quantized_models_are_estimated_with_an_adapter_on_one_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    policies: Any = Policies(monkeypatch)
    policies.quantised = 0.5
    with pytest.raises(memory.MemoryUnknown, match="can only be trained with an adapter"):
        policies.estimate()
    for sharding in ("zero2", "zero3", "fsdp2"):
        with pytest.raises(memory.MemoryUnknown, match="only if each GPU holds the complete model"):
            policies.estimate(Sharding(8, 1, sharding))
    policies.shape = replace(TINY.shape, trained=1)
    policies.estimate()
    assert policies.asked["quantised_bytes"] == 0.5


def test_layers_are_measured_unless_they_are_llamas_or_the_run_is_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_measured, use_cpu in ((True, False), (True, True), (False, False)):
        policies = Policies(monkeypatch, is_measured=is_measured)
        monkeypatch.setattr(MemoryPlan, "peak", lambda self: 0.0)
        run, _ = policies.estimate(use_cpu=use_cpu)
        assert (run.layers is not None) is (is_measured and not use_cpu)
        assert run.layers is None or run.layers.model is policies.model
        assert policies.notes == []

    def fail(self: MemoryPlan) -> float:
        raise NotMeasured("no data")

    policies = Policies(monkeypatch, is_measured=True)
    monkeypatch.setattr(MemoryPlan, "peak", fail)
    assert policies.estimate() == (replace(TINY, layout=Sharding()), policies.expected)
    assert policies.notes == ["the layers of other are counted as if they were Llama's: no data"]


@pytest.mark.parametrize(
    ("name", "arguments", "elsewhere"),
    [
        ("quickstart.yaml", ["--config", "quickstart"], True),
        ("quickstart.yaml", ["--config", "quickstart", "--model_name_or_path", "a/b"], False),
        ("quickstart.yaml", ["--config", "quickstart", "--model_name_or_path=a/b"], False),
        ("mine.yaml", ["--config", "mine.yaml"], False),
    ],
)
def test_only_a_shipped_recipe_may_name_a_model_that_is_made_later(
    name: str, arguments: list[str], elsewhere: bool
) -> None:
    source = find_file("recipes", "quickstart").with_name(name)
    given: Any = SimpleNamespace(source=str(source), arguments=arguments)
    assert _model_is_made_elsewhere(given) is elsewhere
