"""Problems that are planted in the files of a healthy run are found, and no others. Verdicts and exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import cli
from grpo_recipes.reports.diagnostics import CHECKS, Diagnosis, Finding, as_dict, as_table, describe, diagnose
from grpo_recipes.reports.run import Run
from grpo_recipes.runs.files import RunError
from grpo_rewards.terminal import rendered
from tests.support import short_runs
from tests.support.errors import refused
from tests.support.synthetic import HEALTHY, TOOL_METRICS, healthy_completions, ramp, tool_completions, write_run
from tests.support.tiny import policy


def found_in(run: Run) -> list[Finding]:
    """Return the findings of the checks, at least one of which must have had data."""
    diagnosis = diagnose(run)
    assert diagnosis.checked
    return diagnosis.findings


def repeating() -> list[dict]:
    """Return completions in which two of three groups repeat a wrong one."""
    rows = healthy_completions()
    for place, row in enumerate(rows):
        if (place // 4) % 3:
            row.update(completion=[{"role": "assistant", "content": "the same"}], gsm8k_correctness=0.0)
    return rows


PAID = {"rewards": [{"name": "Game", "source": "x", "weight": 1.0, "kind": "other"}]}
"""A run whose environment pays."""


def with_tools(
    metrics: dict[str, Any] | None = None, rows: list[dict[str, Any]] | None = None, **more: Any
) -> dict[str, Any]:
    """Return arguments of `write_run` for a healthy run with tools, in which `metrics` replace some."""
    rows = tool_completions() if rows is None else rows
    return {"metrics": {**TOOL_METRICS, **(metrics or {})}, "completions": rows, **more}


def paid_by_calls(pay: Callable[[int, int], float]) -> dict[str, Any]:
    """Return arguments of `write_run` for a run that makes more and more calls, whose environment pays `pay`."""
    curves = dict.fromkeys(key for key in HEALTHY if key.startswith("rewards/"))
    rows = tool_completions(_more_and_more, pay, "Game")
    return with_tools({**curves, "rewards/Game/mean": ramp(1, 3)}, rows, **PAID)


def _more_and_more(step: int, member: int) -> int:
    return 1 + member % 2 + step // 20


TOOL_CHECKS = {"tools_never_called", "calls_without_gain", "failing_tools", "tool_limits_hit", "reward_by_calls_alone"}
PROBLEMS: dict[str, dict[str, Any]] = {
    "kl_blow_up": {"metrics": {"kl": ramp(2, 9)}},
    "identical_completions": {"completions": repeating()},
    "calls_without_gain": with_tools({"reward": ramp(1, 1)}, tool_completions(lambda step, member: 1)),
    "failing_tools": with_tools({"tools/add/failures": ramp(0.1, 0.3)}),
    "reward_by_calls_alone": paid_by_calls(lambda step, member: float(_more_and_more(step, member))),
}


def test_a_planted_problem_is_found_and_no_other(tmp_path: Path) -> None:
    """A check is also made on the healthy run, where it finds nothing and has data."""
    found = {}
    for problem, planted in PROBLEMS.items():
        findings = found_in(Run.read(write_run(tmp_path / problem, **planted)))
        found[problem] = [finding.check for finding in findings]
        assert all(finding.step in range(1, 41) and finding.sentence for finding in findings)
    assert found == {problem: [problem] for problem in PROBLEMS}
    names = {check.__name__ for check in CHECKS}
    whole = diagnose(Run.read(write_run(tmp_path / "whole", {"eval_reward": ramp(0.8, 2.0)})))
    assert (set(whole.fine), whole.findings, whole.checked) == (names - TOOL_CHECKS, [], 16)
    tools = diagnose(Run.read(write_run(tmp_path / "tools", **with_tools())))
    assert (TOOL_CHECKS - set(tools.fine), tools.findings) == (set(), [])
    nothing = diagnose(Run.read(write_run(tmp_path / "nothing", dict.fromkeys(HEALTHY), completions=repeating()[:1])))
    assert (nothing.findings, nothing.checked, nothing.verdict) == ([], 0, "")
    assert set(nothing.unchecked) == names - TOOL_CHECKS


def test_a_run_is_judged_if_half_of_the_checks_had_data() -> None:
    names = [check.__name__ for check in CHECKS]
    for checked, applicable, is_judged in ((2, 14, False), (6, 13, False), (7, 14, True), (0, 0, False)):
        fine, unchecked, others = names[:checked], names[checked:applicable], names[applicable:]
        found = Diagnosis([], *(dict.fromkeys(part, "reason") for part in (fine, unchecked, others)))
        assert (found.looks_fine, found.checked, found.applicable) == (is_judged, checked, applicable)
        assert as_dict(found)["looks_fine"] is is_judged
        assert rendered(as_table(found)).splitlines()[0] == describe(found).partition(";")[0]
    problem = replace(found, findings=[Finding(1, None, {}, "flat", "plateau")] * 2)
    assert not problem.looks_fine
    assert "2" in problem.verdict
    assert describe(problem).splitlines()[1:] == ["  - flat"] * 2


def edited(folder: Path, **changes: Any) -> Run:
    """Return the run in a folder with other entries in its `run.json`."""
    record = json.loads((folder / "run.json").read_text())
    for key, value in changes.items():
        record[key] = {**record[key], **value} if key in record else value
    (folder / "run.json").write_text(json.dumps(record))
    return Run.read(folder)


def test_golds_that_were_counted_as_unscorable_are_found(tmp_path: Path) -> None:
    golds = {"count": 23, "total": 40, "rows": ["a.csv, lines 2, 7", "b.jsonl, line 1"]}
    (finding,) = found_in(edited(write_run(tmp_path / "run"), unscorable_golds=golds))
    assert (finding.check, finding.step) == ("unscorable_golds", 0)
    assert (finding.figures["count"], finding.figures["total"]) == (23, 40)
    assert finding.figures["rows"].startswith("a.csv, lines 2, 7; b.jsonl, line 1")


def test_a_check_that_does_not_apply_is_not_counted(tmp_path: Path) -> None:
    metrics = {key: None for key in HEALTHY if "tag_presence" in key or key in ("kl", "updates/expected")}
    judged = [{"name": "gsm8k_correctness", "source": "x", "weight": 1.0, "kind": "judge"}]
    metrics["rewards/gsm8k_correctness/parsed"] = None
    folder = write_run(tmp_path / "run", metrics, rewards=judged)
    diagnosis = diagnose(edited(folder, config={"beta": 0, "max_completion_length": None}))
    expected = {"format_without_correctness", "length_into_cap", "kl_blow_up", "dominant_reward", "no_answer_found"}
    assert set(diagnosis.not_applicable) == {*expected, "lost_updates", *TOOL_CHECKS}
    assert list(diagnosis.unchecked) == ["overfitting"]
    assert (diagnosis.checked, diagnosis.applicable) == (9, 10)


def test_a_reward_that_finds_no_answer_gets_a_hint_at_the_layout(tmp_path: Path) -> None:
    metrics = dict.fromkeys((f"rewards/gsm8k_correctness/{name}" for name in ("mean", "parsed")), ramp(0, 0))
    folder = write_run(tmp_path / "run", metrics, completions=healthy_completions()[:8])

    def hint(*rewards: Any) -> str:
        findings = found_in(edited(folder, recipe={"rewards": list(rewards)}))
        return next(finding.figures["where"] for finding in findings if finding.check == "no_answer_found")

    boxed = {"name": "gsm8k_correctness", "kwargs": {"extract": "boxed"}}
    by_path = {"name": "grpo_rewards.math.correctness.gsm8k_correctness", "kwargs": {"extract": "boxed"}}
    for rewards in ([boxed, "tag_presence"], [{"name": "sum", "rewards": ["tag_presence", boxed]}], [by_path]):
        assert "`extract: answer_tag` finds one in 8 of 8" in hint(*rewards)
    assert "`extract: answer_tag`" in hint("gsm8k_correctness")
    assert "`extract:" not in hint({"name": "x.y", "alias": "gsm8k_correctness"})


def test_the_command_answers_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", str(write_run(tmp_path / "healthy"))]) == 0
    assert cli.main(["diagnose", str(write_run(tmp_path / "ill", {"kl": ramp(2, 3)}))]) == 1
    assert "kl_blow_up" in capsys.readouterr().out
    assert cli.main(["diagnose", str(tmp_path / "ill"), "--json"]) == 1
    output = json.loads(capsys.readouterr().out)
    (finding,) = output["findings"]
    assert (finding["check"], finding["step"], finding["threshold"]) == ("kl_blow_up", 1, 1.0)
    assert finding["figures"]["highest"] == pytest.approx(3, abs=0.1)
    assert finding["figures"]["lost"] == pytest.approx(0.975, abs=0.001)
    assert (output["checked"], output["checks"], list(output["unchecked"])) == (15, 21, ["overfitting"])
    assert output["looks_fine"] is False
    assert cli.main(["diagnose", str(tmp_path)]) == 2
    with refused(tmp_path / "missing", by=RunError):
        Run.read(tmp_path / "missing")


def test_a_run_of_plain_trl_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"max_steps": 4, "save_steps": 4, "max_completion_length": 4, "log_completions": True, "beta": 0.0}
    args = short_runs.arguments(tmp_path / "run", save_strategy="steps", **options)
    short_runs.trainer(TRLGRPOTrainer, policy(), args).train()
    diagnosis = diagnose(Run.read(tmp_path / "run"))
    assert "dominant_reward" in diagnosis.unchecked
    assert diagnosis.checked
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert re.search(r"\d+ \+ \d+ =", (tmp_path / "run" / "report" / "report.html").read_text()), "a prompt"
