"""Benchmarks run to their end, on sizes at which their figures mean nothing."""

from __future__ import annotations

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

from grpo_recipes.training import varlen
from grpo_recipes.training.packed_attention import GroupSpans, sdpa
from tests.support import varlen_kernel
from tests.support.exact_generation import exact_generation

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/step.py with a model of one layer and completions of a few tokens."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "step", raising=False)
    import step
    import workloads

    for module in (step, workloads):
        monkeypatch.setattr(module, "cap", lambda _: 6)
    draw = step.Batch.draw
    monkeypatch.setattr(step.Batch, "draw", lambda _, seed: draw("a", seed))  # (d) is 128 tokens long
    monkeypatch.setitem(step.QWEN2, "small", (32, 1, 4))
    return step


WITHOUT_TRL = ["attention", "micro_batch", "adamw_bf16", "decode_step"]
"""Sections of benchmarks/gpu.py that a GPU machine with torch and transformers alone can run in seconds."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/gpu.py."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    return gpu


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
def test_gpu_sections_run_without_trl_and_datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    file = tmp_path / "gpu.json"
    assert import_module("gpu").main(["--sections", *WITHOUT_TRL, "training", "--output", str(file)]) == 0
    found = json.loads(file.read_text())
    assert not found["machine"]["figures mean something"]
    assert found["sections"].pop("training")[0]["result"].startswith("not run: the package ")
    assert found["sections"].keys() == set(WITHOUT_TRL)
    for name, rows in found["sections"].items():
        assert any(row.get("result") == "ok" for row in rows), name
        unmeasured = {row["result"] for row in rows if row.get("result", "ok") != "ok"}
        assert unmeasured <= {"not run: varlen_attn takes 16 bits on a GPU", NO_PEFT}


NO_PEFT = "not run: import of peft halted; None in sys.modules"


@pytest.mark.parametrize("version", varlen_kernel.VERSIONS)
def test_attention_of_a_padded_row_and_of_the_varlen_kernel_is_the_formula(
    version: str, gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_attention

    bench = gpu.Bench("cpu", tiny=True, steps=2, policy=None, ends=float("inf"), row_seconds=60)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_kernel.VERSIONS[version])
    monkeypatch.setattr(varlen, "is_candidate", lambda query: True)
    for name in ("SDPA, padded rows", "varlen_attn, packed"):
        row = gpu_attention.measured(bench, "tiny", "a", name, torch.bfloat16)
        assert row["result"] == "ok"
        assert 0 < float(row["difference of output"]) < 0.02


def test_the_first_questions_to_a_gpu_are_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
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
def test_the_gpu_benchmark_runs_to_its_end_on_a_cpu(gpu: ModuleType, tmp_path: Path) -> None:
    """The benchmark's own comparisons pass here too, and each row that is not run says why."""
    file = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--output", str(file)]) == 0
    found = json.loads(file.read_text())["sections"]
    assert found.keys() == gpu.SECTIONS.keys()
    verdicts = {row["check"]: row["result"] for row in found["correctness"]}
    kernels = {check for check in verdicts if "varlen" in check}
    assert all(verdicts[check] == "not run: the packed row went through SDPA" for check in kernels)
    assert {verdicts[check] for check in verdicts.keys() - kernels} == {"ok"}
    assert found["reward_model"][0]["result"] == "ok"
    assert len(found["precision"]) >= 4
    timed = [row for name in ("training", "generation", "whole_step") for row in found[name] if "result" not in row]
    assert len(timed) == 4 + 1 + 1
    assert all(float(row["TRL ÷ ours"]) > 0 for row in timed)
    (said,) = found["pretrained"]
    assert said["result"].startswith("not run: `--policy FOLDER`")


@pytest.mark.slow
def test_a_wrong_gradient_fails_the_gpu_benchmark(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import gpu_trl

    gradient = gpu_trl.gradient

    def twice(*args: Any, packed: bool, **kwargs: Any) -> Any:
        return [(2 if packed else 1) * grad for grad in gradient(*args, packed=packed, **kwargs)]

    monkeypatch.setattr(gpu_trl, "gradient", twice)
    options = ["--device", "cpu", "--sections", "correctness", "--output", str(tmp_path / "gpu.json")]
    assert gpu.main(options) == 1


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads /proc")
def test_whole_steps_of_all_contestants(step: ModuleType) -> None:
    """Each is measured, and all of them end with the same parameters."""
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in step.whole_step("small", "a", 0.04, 2, 0)]
    names = ["TRL", "TRL, continuous batching", "from scratch", "ours, generation off", "ours"]
    assert [row[3] for row in rows] == names
    for row in rows:
        generation, *_, whole, ratio, memory = map(float, row[4:11])
        assert 0 < generation < whole
        assert ratio > 0
        assert memory >= 0
        gap, moved = (float(figure) for figure in row[11].split(" of "))
        assert gap < 1e-4 * moved


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_turns_with_tools_give_the_tokens_of_trl(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import tool_turns

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    with exact_generation():
        rows = [row.split("|")[3:-1] for row in tool_turns.rows(3, 60, sampled, 1, **sizes)]
    decoding, names, _, fewer, _, _, same = zip(*[[cell.strip() for cell in row] for row in rows], strict=True)
    assert names == ("TRL", "ours, nothing kept", "ours")
    assert set(decoding) == {"sampled" if sampled else "greedy"}
    assert set(same) == {"yes"}
    stock, grouped, kept = map(float, fewer)
    assert stock == 1 < grouped < kept
    assert kept > 2.5


@pytest.fixture
def coverage(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/interval_coverage.py."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import interval_coverage

    return interval_coverage


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [(50, 64, 0.02, 0.3), (20, 64, 0.02, 0.7), (5, 64, 0.5, 0.1), (400, 16, 0.5, 0.1), (20, 1, 0.02, 0.0, "better")],
)
def test_the_hardest_cells_are_covered(coverage: ModuleType, cell: tuple) -> None:
    """The standard error of 3,000 draws is 0.4 points."""
    assert coverage.measure(coverage.Cell(*cell), 3_000, np.random.default_rng(5)).coverage >= 0.93


@pytest.fixture
def golds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/golds.py."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import golds

    return golds


SOME_GOLDS = ["1", "15 (balls)", r"$\frac{1}{2}$", r"\{1,2,3\}", "x^2-1"]


def recorded_golds(golds: ModuleType, folder: Path, *options: str) -> dict[str, list[str]]:
    """Run benchmarks/golds.py on SOME_GOLDS, and return the cells after the reward's name for each reward."""
    rows = [json.dumps({"gold": gold}) for gold in SOME_GOLDS]
    (folder / "some.jsonl").write_text("\n".join(rows) + "\n")
    golds.main([str(folder), "--record", str(folder / "page.md"), *options])
    table = [line.split(" | ") for line in (folder / "page.md").read_text().splitlines() if line.startswith("| all")]
    return {reward: cells for _, _, reward, *cells in table}


def test_golds_are_paid_by_themselves_and_not_by_other_answers(golds: ModuleType, tmp_path: Path) -> None:
    found = recorded_golds(golds, tmp_path)
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
    golds: ModuleType, gold: str, respelled: str, reversed_items: str, toggled_sign: str, value: float | None
) -> None:
    import gold_answers

    assert gold_answers.respelled(gold) == respelled
    assert gold_answers.reversed_items(gold) == reversed_items
    assert gold_answers.toggled_sign(gold) == toggled_sign
    found = gold_answers.value(gold)
    assert found == (value if value is None else pytest.approx(value))
    changed = gold_answers.changed_digit(gold, random.Random(0))
    differing = [(old, new) for old, new in zip(gold, changed, strict=True) if old != new]
    assert len(differing) == any(character.isdigit() for character in gold)
