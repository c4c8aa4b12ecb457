"""Benchmarks run to their end, on sizes at which their figures mean nothing."""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from grpo_recipes.training.packed_attention import GroupSpans, sdpa
from tests.support.exact_generation import exact_generation

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def gpu() -> ModuleType:
    """benchmarks/gpu.py."""
    return import_module("gpu")


WITHOUT_TRL = ["attention", "micro_batch", "adamw_bf16", "decode_step"]
"""Sections of benchmarks/gpu.py that a GPU machine with torch and transformers alone can run in seconds."""


@pytest.fixture
def without_trl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget our modules, and let no module import trl, datasets, peft and accelerate."""

    def ours() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0].partition("_")[0] in ("grpo", "gpu", "unshared")]

    for name in ours():  # a module that has imported these packages would not miss them
        monkeypatch.delitem(sys.modules, name)
    for package in ("trl", "datasets", "peft", "accelerate"):
        monkeypatch.setitem(sys.modules, package, None)
    yield
    for name in ours():
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.usefixtures("without_trl")
def test_gpu_sections_run_without_trl_and_datasets(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    assert import_module("gpu").main(["--sections", *WITHOUT_TRL, "training", "--output", str(file)]) == 0
    found = json.loads(file.read_text())
    assert not found["machine"]["figures mean something"]
    assert found["sections"].pop("training")[0]["result"].startswith("not run: the package ")
    assert found["sections"].keys() == set(WITHOUT_TRL)
    for name, rows in found["sections"].items():
        results = [row.get("result", "ok") for row in rows]
        assert "ok" in results, name
        assert all(result == "ok" or result.startswith("not run: ") for result in results)


@pytest.mark.slow
def test_the_first_questions_to_a_gpu_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    probe = import_module("gpu_probe")
    probe.main(["--device", "cpu"])
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [next(iter(answer)) for answer in answers] == [question.__name__ for question in probe.QUESTIONS]
    assert not any("FAILED" in answer[next(iter(answer))] for answer in answers)


@pytest.mark.slow
def test_the_gpu_benchmark_names_a_wrong_kernel(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import gpu_attention

    def without_the_prefix(spans: GroupSpans, *inputs: Any) -> torch.Tensor:
        prefix, suffixes = spans.groups[0]
        return sdpa(GroupSpans([((0, 0), [span]) for span in (prefix, *suffixes)]), *inputs)

    monkeypatch.setattr(gpu_attention, "sdpa", without_the_prefix)
    file = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--sections", "attention", "--output", str(file)]) == 1
    results = {row["kernel"]: row["result"] for row in json.loads(file.read_text())["sections"]["attention"]}
    assert results["SDPA, packed"] == "WRONG"
    assert results["SDPA, padded rows"] == "ok"


@pytest.mark.slow
def test_a_row_that_takes_too_long_or_fails_does_not_end_the_gpu_benchmark(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import gpu_attention
    from gpu_rows import Measurement, Row

    def endless() -> Row:
        while True:
            try:
                time.sleep(60)
            except Exception:
                continue  # as a library might

    def rows(bench: Any) -> Iterator[Measurement]:
        """Yield a row that does not end, one that fails, and one that is measured."""
        yield Measurement({"row": "endless"}, endless)
        yield Measurement({"row": "failing"}, lambda: {"never": 1 / 0})
        yield Measurement({"row": "last"}, lambda: {"figure": 1})

    monkeypatch.setattr(gpu_attention, "attention", rows)
    file = tmp_path / "gpu.json"
    options = ["--device", "cpu", "--sections", "attention", "--row-seconds", "0.1", "--output", str(file)]
    assert gpu.main(options) == 1
    first, second, last = json.loads(file.read_text())["sections"]["attention"]
    assert first == {"row": "endless", "result": "not run: a row may take 0.1 s"}
    assert second["result"] == "FAILED"
    assert "ZeroDivisionError" in second["traceback"]
    assert last["figure"] == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads /proc")
@pytest.mark.parametrize(
    "sections",
    [
        ["correctness", "whole_step", "precision", "pretrained"],
        pytest.param(["reward_model", "memory", "training", "generation"], marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def test_sections_that_compare_with_trl_run_on_a_cpu(sections: list[str], gpu: ModuleType, tmp_path: Path) -> None:
    """The benchmark's own comparisons pass here too, and each row that is not run says why."""
    file = tmp_path / "gpu.json"
    options = ["--device", "cpu", "--steps", "2", "--output", str(file), "--sections", *sections]
    assert gpu.main(options) == 0
    found = json.loads(file.read_text())["sections"]
    assert list(found) == sections
    for row in itertools.chain(*found.values()):
        result = row.get("result", "ok")
        needs_gpu = "varlen" in row.get("check", "")
        assert result == "ok" or (result.startswith("not run: ") and ("check" not in row or needs_gpu)), row
        assert float(row.get("TRL ÷ ours", 1)) > 0


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads /proc")
def test_whole_steps_of_all_contestants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is measured, and all of them end with the same parameters."""
    monkeypatch.delitem(sys.modules, "step", raising=False)
    step = import_module("step")
    for module in (step, import_module("workloads")):
        monkeypatch.setattr(module, "cap", lambda _: 6)
    draw = step.Batch.draw
    monkeypatch.setattr(step.Batch, "draw", lambda _, seed: draw("a", seed))  # (d) is 128 tokens long
    monkeypatch.setitem(step.QWEN2, "small", (32, 1, 4))
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in step.whole_step("small", "a", 0.04, 2, 0)]
    assert len(rows) == 5
    for row in rows:
        generation, *_, whole, _, _ = map(float, row[4:11])
        assert 0 < generation < whole
        gap, moved = (float(figure) for figure in row[11].split(" of "))
        assert gap < 1e-4 * moved


@pytest.mark.slow
def test_turns_with_tools_give_the_tokens_of_trl() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    with exact_generation():
        rows = [row.split("|")[3:-1] for row in import_module("tool_turns").rows(2, 60, True, 1, **sizes)]
    _, names, _, fewer, _, _, same = zip(*[[cell.strip() for cell in row] for row in rows], strict=True)
    assert names == ("TRL", "ours, nothing kept", "ours")
    assert set(same) == {"yes"}
    stock, grouped, kept = map(float, fewer)
    assert stock == 1 < grouped < kept


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        (50, 64, 0.02, 0.3),
        (20, 64, 0.02, 0.7),
        (5, 64, 0.5, 0.1),
        pytest.param((400, 16, 0.5, 0.1), marks=pytest.mark.nightly),
        (20, 1, 0.02, 0.0, "better"),
    ],
)
def test_the_hardest_cells_are_covered(cell: tuple) -> None:
    """The standard error of 1,000 draws is 0.7 points."""
    coverage = import_module("interval_coverage")
    assert coverage.measure(coverage.Cell(*cell), 1_000, np.random.default_rng(5)).coverage >= 0.93


SOME_GOLDS = ["1", "15 (balls)", r"$\frac{1}{2}$", r"\{1,2,3\}", "x^2-1"]


@pytest.mark.slow
def test_golds_are_paid_by_themselves_and_not_by_other_answers(tmp_path: Path) -> None:
    golds = import_module("golds")
    (tmp_path / "some.jsonl").write_text("".join(json.dumps({"gold": gold}) + "\n" for gold in SOME_GOLDS))
    golds.main([str(tmp_path), "--record", str(tmp_path / "page.md")])
    lines = (tmp_path / "page.md").read_text().splitlines()
    found = {
        reward: cells for _, _, reward, *cells in (line.split(" | ") for line in lines if line.startswith("| all"))
    }
    assert found.keys() == golds.REWARDS.keys()
    for unscorable, *right, _, another, digit, sign, timeouts, _ in found.values():
        assert [unscorable, *right, timeouts] == ["0", "5/5", "3/3", "1/1", "0"]
        assert [another, digit, sign] == ["0 (0)/5"] * 3
    assert found["math_correctness"][4].endswith(" (0)/40")


@pytest.mark.parametrize(
    ("gold", "respelled", "reversed_items", "toggled_sign", "value"),
    [
        ("58,500", "58,500", "58,500", "-58,500", 58_500),
        ("-1,2", "- 1 , 2", "2, -1", "1,2", None),
        (r"x-\frac{1}{2}", r"x - \dfrac{1}{2}", r"x-\frac{1}{2}", r"x-\frac{-1}{2}", None),
        ("c_{1}x-4", "c_{1}x - 4", "c_{1}x-4", "c_{1}x+4", None),
        (r"\{(1,2),3\}", r"\{(1 , 2) , 3\}", r"\{3, (1,2)\}", r"\{(-1,2),3\}", None),
        (r"\{x \mid x>1, x<3\}", r"\{x \mid x > 1 , x < 3\}", r"\{x \mid x>1, x<3\}", r"\{x \mid x>-1, x<3\}", None),
        (r"t, t \geq 0", r"t , t \geq 0", r"t, t \geq 0", r"t, t \geq 0", None),
        ("1.5e-3", "1.5e-3", "1.5e-3", "-1.5e-3", 0.0015),
        ("right-angled", "right-angled", "right-angled", "right-angled", None),
        (r"\pm 2", r"\pm 2", r"\pm 2", r"\pm 2", None),
        ("x=6 (apples)", "x=6 (apples)", "x=6 (apples)", "x=-6 (apples)", 6),
        ("52_8", "52_8", "52_8", "-52_8", None),
    ],
)
def test_mutations_of_a_gold(
    gold: str, respelled: str, reversed_items: str, toggled_sign: str, value: float | None
) -> None:
    gold_answers = import_module("gold_answers")
    assert gold_answers.respelled(gold) == respelled
    assert gold_answers.reversed_items(gold) == reversed_items
    assert gold_answers.toggled_sign(gold) == toggled_sign
    found = gold_answers.value(gold)
    assert found == (value if value is None else pytest.approx(value))
    changed = gold_answers.changed_digit(gold, random.Random(0))
    differing = [(old, new) for old, new in zip(gold, changed, strict=True) if old != new]
    assert len(differing) == any(character.isdigit() for character in gold)


def test_the_cure_goes_where_float32_goes_and_plain_bfloat16_does_not() -> None:
    benchmark = import_module("precision")
    optimizers = benchmark.contestants()
    weights = [0.02 * torch.randn(2000, generator=torch.Generator().manual_seed(0)), torch.ones(100)]
    results = benchmark.run([weight.bfloat16() for weight in weights], 100, optimizers)
    ours, plain = results["adamw_bf16 (ours)"], results["torch AdamW on bfloat16"]
    assert 0.99 < ours.projection < 1.01
    assert ours.error < 0.03
    assert ours.second_moment == pytest.approx(1, abs=1e-6)
    assert plain.projection < 0.2
    assert plain.second_moment > 1.03  # in bfloat16 it can't decay as it should
    floor = results["float32, its last weights rounded to bfloat16"]
    assert ours.stored_error == pytest.approx(floor.stored_error, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("number", [0, 1], ids=["padded", "varlen"])
def test_operations_of_a_micro_batch_are_those_of_the_formula(number: int, checkpointing: bool) -> None:
    """Each weight takes 2 operations per token in the forward pass, 4 in the backward, and 2 where it is repeated."""
    roofline = import_module("roofline")
    if number == 1 and not roofline.takes_grouped_heads():
        pytest.skip(f"torch {torch.__version__} has no varlen_attn for grouped heads, which torch 2.12 brought")
    lengths, size = roofline.Lengths.draw("mean 300"), roofline.SIZES["0.5B"]
    hidden, inner, heads = size["hidden_size"], size["intermediate_size"], size["num_attention_heads"]
    width = hidden // heads
    keys = 2 * size["num_key_value_heads"] * width
    weights = hidden * (2 * hidden + keys + 3 * inner)
    labels = lengths.completions[0].sum()
    if number == 0:
        columns = lengths.prompts.max() + lengths.completions.max()
        tokens, pairs = 8 * columns, 8 * columns**2
    else:
        before = lengths.prompts[0] - 1
        tokens = before + labels
        pairs = sum(range(1, before + 1))
        for length in lengths.completions[0]:
            pairs += sum(range(before + 1, before + length + 1))
    layers, products, attentions = 2, 3 * weights, 3.5
    if checkpointing:  # the second forward pass of a layer ends before its last product, whose result nothing needs
        products += weights - inner * hidden
        attentions += 1
    expected = layers * (2 * tokens * products + 4 * pairs * hidden * attentions)
    expected += 8 * labels * hidden * size["vocab_size"]  # the head runs again in the backward pass
    model = roofline.model_of("0.5B", layers, lora=False, checkpointing=checkpointing)
    _, kernels = roofline.kernels_of(model, lengths, 0, roofline.LAYOUTS[number], checkpointing)
    assert sum(kernel.flops for kernel in kernels) == pytest.approx(expected, rel=1e-4)
