"""Each problem, planted in the files of a healthy run, gets its own sentence and no other."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import cli, train
from grpo_recipes.data.prompts import SYSTEM_PROMPTS
from grpo_recipes.reports.diagnostics import CHECKS, Diagnosis, Finding, as_dict, as_table, describe, diagnose
from grpo_recipes.reports.diagnostics import FINE as FINE_RESULT
from grpo_recipes.reports.run import Run, Series
from grpo_recipes.runs.files import RunError
from grpo_rewards.terminal import rendered
from tests.support import short_runs
from tests.support.grids import only
from tests.support.synthetic import (
    HEALTHY,
    TOOL_METRICS,
    healthy_completions,
    ramp,
    tool_completions,
    write_run,
)
from tests.support.tiny import policy


def found_in(run: Run) -> list[Finding]:
    """Return the findings of the checks, at least one of which must have had data."""
    diagnosis = diagnose(run)
    assert diagnosis.checked
    return diagnosis.findings


def late(start: float, end: float):
    """Return a metric that changes in the second half of the run."""
    return lambda over: start + (end - start) * max(0.0, 2 * over - 1)


def early(start: float, end: float) -> Callable[[float], float]:
    """Return a metric that changes in the first third of the run."""
    return lambda over: start + (end - start) * min(1.0, 3 * over)


def zigzag(value: float, size: float) -> Callable[[float], float]:
    """Return a metric that stays and swings by `size` from step to step."""
    return lambda over: value + size * (-1) ** round(40 * over)


def strict(value: float, low: float, high: float) -> dict:
    share = {"value": value, "low": low, "high": high}
    return {"problems": 100, "strict": share, "lenient": share, "settings": {"samples": 1}}


def repeating() -> list[dict]:
    """Return completions in which two of three groups repeat a wrong one."""
    rows = healthy_completions()
    for place, row in enumerate(rows):
        if (place // 4) % 3:
            row.update(completion=[{"role": "assistant", "content": "the same"}], gsm8k_correctness=0.0)
    return rows


PROBLEMS = {
    "format_without_correctness": (
        {"metrics": {"rewards/gsm8k_correctness/mean": ramp(0.5, 0.5)}},
        r"`tag_presence` rises from 0\.3\d to 0\.6\d by step 40, while `gsm8k_correctness` goes from 0\.50 to 0\.50",
    ),
    "length_into_cap": (
        {"metrics": {"completions/mean_length": ramp(100, 250)}},
        r"from 1\d\d to 2\d\d tokens, into the cap of 256 .* from step 2\d|3\d",
    ),
    "length_without_gain": (
        {
            "metrics": {
                "completions/mean_length": ramp(60, 160),
                # Too noisy for a plateau in half of the run, and known well enough in all of it.
                **dict.fromkeys(("reward", "rewards/gsm8k_correctness/mean"), zigzag(1.0, 0.035)),
                "rewards/tag_presence/mean": ramp(0.5, 0.5),
            }
        },
        r"completions grow from [67]\d to 14\d tokens, by a quarter from step \d+, while the reward goes from "
        r"(1\.0|0\.9)\d to (1\.0|0\.9)\d: [34]\d% of the completion tokens are growth; pay for short answers",
    ),
    "truncated": (
        {"metrics": {"completions/clipped_ratio": late(0.05, 0.5)}},
        r"4\d% of the completions are cut off .* step 40.*: \d\d% of the run's tokens are in such completions; raise",
    ),
    "identical_completions": (
        {"completions": repeating()},
        r"\d+% of the groups that don't earn the best reward .* step 10",
    ),
    "entropy_collapse": (
        {"metrics": {"entropy": lambda over: 0.6 * 0.01**over}},
        r"from 0\.[345]\d\d to 0\.0\d\d nats .* from step [12]\d",
    ),
    "zero_variance": (
        {"metrics": {"frac_reward_zero_std": ramp(0.6, 0.8)}},
        r"7\d% of the groups .* step 1\b.* ignores (6|7)\d% of the run's tokens; .* \(`sampling: informative`\)",
    ),
    "kl_blow_up": ({"metrics": {"kl": late(0.05, 9.0)}}, r"reaches (8|9)\.\d nats per token, above 1 from step 2\d"),
    "dominant_reward": (
        {"metrics": {"rewards/tag_presence/std": ramp(9.0, 9.0)}},
        r"`tag_presence` carries 99% of the rewards' variance up to step 40",
    ),
    "overfitting": (
        {"metrics": {"eval_reward": ramp(1.5, 0.9)}},
        r"held-out reward falls .* best at step \d, and 9\d% of the run's tokens come after step \d; use a checkpoint",
    ),
    "no_answer_found": (
        {"metrics": {"rewards/gsm8k_correctness/parsed": ramp(0, 0)}},
        r"`gsm8k_correctness` has paid nothing up to step 40, on all of the run's tokens: no completion states an",
    ),
    "plateau": (
        {"metrics": dict.fromkeys(("reward", "rewards/gsm8k_correctness/mean"), early(0.5, 1.5))},
        r"the reward has not risen since step (9|1[0-3]), and goes from 1\.\d\d to 1\.\d\d in the second half of the "
        r"run: [67]\d% of the run's tokens come after step \d+; end the run there",
    ),
    "clipped_tokens": (
        {"metrics": {"clip_ratio/region_mean": late(0.02, 0.55), "passes/2/clip_share": late(0.04, 1.0)}},
        r"the loss clips 4\d% of the tokens at the end of the run, more than 20% first at step 2\d \(pass 1: 0%, "
        r"pass 2: [78]\d%\): 1\d% of the run's tokens have no gradient; the tokens are stale: lower `learning_rate`",
    ),
    "stale_tokens": (
        {"metrics": {"passes/2/effective_sample_size": ramp(0.95, 0.5)}},
        r"the effective sample size is 5\d% of the tokens in pass 2 at the end of the run \(pass 1: 100%, pass 2: "
        r"5\d%\).* below 80% first at step 1\d, which wastes 2\d% of the run's tokens; lower",
    ),
    "gradient_spikes": (
        {"metrics": {"grad_norm": lambda over: 20.0 if round(40 * over) in (11, 23, 24) else 0.4}},
        r"median of 0\.4, and 3 of 40 norms are spikes, the largest 20 at step \d\d: [78]% of the run's tokens are in",
    ),
    "lost_updates": (
        {"metrics": {"updates/changed": ramp(0.02, 0.016)}},
        r"a step changes 1\.7% of the trained weights up to step 40, where 4\.2% would change .* `dtype: float32`",
    ),
}


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


TOOL_PROBLEMS = {
    "tools_never_called": (
        with_tools({"tools/call_frequency": ramp(0, 0)}),
        "no completion calls a tool up to step 40: ask for calls",
    ),
    "calls_without_gain": (
        with_tools(
            {"reward": ramp(1, 1)},
            tool_completions(lambda step, member: 1, lambda step, member: 2.0 * (member == 0)),
        ),
        r"100% of the completions call a tool at the end of the run \(step 40\), while the reward goes from 1\.0\d to",
    ),
    "failing_tools": (
        with_tools({"tools/add/failures": ramp(0.1, 0.3)}),
        r"`add` fails in 2\d% of its calls up to step 40: it raises",
    ),
    "tool_limits_hit": (
        with_tools({"tools/rows_at_limit": late(0.1, 0.5)}),
        r"limits end \d\d% .* by step 40, and [34]\d% still call a tool after `max_tool_calling_iterations`",
    ),
    "reward_by_calls_alone": (
        paid_by_calls(lambda step, member: float(_more_and_more(step, member))),
        r"calls per completion go from 1\.5 to 3(\.\d)? by step 40, and the reward rises by \d\.\d+, but by 0\.00",
    ),
}
PROBLEMS |= TOOL_PROBLEMS


def test_every_check_has_a_planted_problem() -> None:
    assert {check.__name__ for check in CHECKS} == set(PROBLEMS)


def test_only_checks_that_had_data_call_a_run_healthy(tmp_path: Path) -> None:
    whole = diagnose(Run.read(write_run(tmp_path / "whole", {"eval_reward": ramp(0.8, 2.0)})))
    assert describe(whole) == "diagnosis: nothing looks wrong, 16 of 16 checks had data"
    part = diagnose(Run.read(write_run(tmp_path / "part", {"kl": None, "completions/clipped_ratio": None})))
    assert describe(part) == (
        "diagnosis: nothing looks wrong, 13 of 16 checks had data; `grpo-recipes diagnose` says why 3 had none"
    )
    assert part.unchecked == {
        "truncated": "`completions/clipped_ratio` was not logged",
        "kl_blow_up": "`kl` was not logged",
        "overfitting": "neither four evaluations during training nor one before and one after",
    }
    nothing = write_run(tmp_path / "nothing", dict.fromkeys(HEALTHY), completions=healthy_completions()[:1])
    diagnosis = diagnose(Run.read(nothing))
    assert (diagnosis.findings, diagnosis.checked) == ([], 0)
    assert set(diagnosis.unchecked) == set(PROBLEMS) - set(TOOL_PROBLEMS)
    assert describe(diagnosis) == (
        "diagnosis: nothing could be checked: the run has too few steps, or logged no metric that the checks read"
    )


@pytest.mark.parametrize(("checked", "applicable", "is_judged"), [(2, 14, False), (6, 13, False), (7, 14, True)])
def test_a_run_is_judged_if_half_of_the_checks_had_data(checked: int, applicable: int, is_judged: bool) -> None:
    names = [check.__name__ for check in CHECKS]
    fine, unchecked, others = names[:checked], names[checked:applicable], names[applicable:]
    found = Diagnosis([], *(dict.fromkeys(part, "reason") for part in (fine, unchecked, others)))
    head = f"nothing looks wrong, {checked} of" if is_judged else f"too short to judge, {checked} of"
    assert found.looks_fine is is_judged
    for line in (describe(found), rendered(as_table(found)).splitlines()[0]):
        assert line.startswith(f"diagnosis: {head} {applicable} checks had data")
    assert found.verdict == as_dict(found)["verdict"] == head.partition(",")[0]
    assert not replace(found, findings=[Finding("plateau", 1, "")] * 2).looks_fine
    assert describe(replace(found, findings=[Finding("plateau", 1, "flat")])).startswith("diagnosis: 1 problem, ")


def test_golds_that_were_counted_as_unscorable_are_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    record = json.loads((folder / "run.json").read_text())
    record["unscorable_golds"] = {"count": 23, "total": 40, "rows": ["a.csv, lines 2, 7", "b.jsonl, line 1"]}
    (folder / "run.json").write_text(json.dumps(record))
    (finding,) = found_in(Run.read(folder))
    assert finding.sentence.startswith(
        "23 of 40 golds can't be scored by a correctness reward (a.csv, lines 2, 7; b.jsonl, line 1; …)"
    )


# Fine figures of the healthy run, by hand from the curves of `synthetic.HEALTHY`: the first and the last of 4 quarters
# of a line from a to b have the means a + (b - a) / 8 and b - (b - a) / 8, and a step's share is step / 40.
FINE = {
    "format_without_correctness": r"`tag_presence` rises from 0\.3\d to 0\.6\d, and so does `gsm8k_correctness`",
    "length_into_cap": r"completions go from 10[56] to 13[56] tokens on average, where the cap is 256",
    "truncated": r"5% of the completions are cut off at the end of the run \(limit 25%\)",
    "identical_completions": r"0% of the groups that don't earn the best reward repeat one completion \(limit 50%\)",
    "entropy_collapse": r"entropy goes from 0\.5\d\d to 0\.3\d\d nats per token",
    "zero_variance": r"25% of the groups have no variance in their rewards \(limit 50%\)",
    "kl_blow_up": r"KL to the reference is at most 0\.0(79|8|81) nats per token \(limit 1\)",
    "dominant_reward": r"the largest part of the rewards' variance is 8\d%, that of `gsm8k_correctness`",
    "overfitting": r"the training reward rises .*, while the held-out reward goes from 0\.9\d to 1\.8\d",
    "no_answer_found": r"`gsm8k_correctness` finds an answer in 80% of the completions",
    "lost_updates": r"a step changes 4\.2% of the trained weights up to step 40, where 4\.[23]% would change if no",
    "length_without_gain": r"completions go from 10[56] to 13[56] tokens, and the reward rises from 0\.9\d to 2\.0\d",
    "plateau": r"in the second half of the run the reward rises from 1\.6\d to 2\.1\d",
    "clipped_tokens": r"the loss clips 1% of the tokens at the end of the run \(limit 20%\)",
    "stale_tokens": r"the effective sample size is 96% of the tokens in pass 2 at the end of the run \(limit 80%\)",
    "gradient_spikes": r"the gradient norm has a median of 0\.4 and is at most 0\.5\d* \(a spike has 4\)",
}


def test_a_check_that_finds_nothing_gives_the_figure(tmp_path: Path) -> None:
    diagnosis = diagnose(Run.read(write_run(tmp_path / "run", {"eval_reward": ramp(0.8, 2.0)})))
    assert set(diagnosis.fine) == set(FINE) == set(PROBLEMS) - set(TOOL_PROBLEMS)
    for name, says in FINE.items():
        assert re.match(says, diagnosis.fine[name]), diagnosis.fine[name]
        assert (FINE_RESULT, name, diagnosis.fine[name]) in diagnosis.rows()


def test_a_check_that_does_not_apply_is_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {key: None for key in HEALTHY if "tag_presence" in key or key in ("kl", "updates/expected")}
    judged = [{"name": "gsm8k_correctness", "source": "x", "weight": 1.0, "kind": "judge"}]
    metrics["rewards/gsm8k_correctness/parsed"] = None
    folder = write_run(tmp_path / "run", metrics, rewards=judged)
    record = json.loads((folder / "run.json").read_text())
    record["config"] |= {"beta": 0, "max_completion_length": None}
    (folder / "run.json").write_text(json.dumps(record))
    diagnosis = diagnose(Run.read(folder))
    assert diagnosis.not_applicable == {
        "format_without_correctness": "no reward judges the format alone",
        "length_into_cap": "`max_completion_length` is not set",
        "kl_blow_up": "`beta` is 0, so that no KL is computed",
        "dominant_reward": "no reward is beside one of another kind that it must not dominate",
        "no_answer_found": "no reward compares answers",
        "lost_updates": "`updates/expected` is logged only for optimizers with the moments of AdamW",
        **dict.fromkeys(TOOL_PROBLEMS, "the policy has no tools"),
    }
    assert list(diagnosis.unchecked) == ["overfitting"]
    assert diagnosis.coverage == "9 of 10 checks had data"
    assert cli.main(["diagnose", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match(r"\s*does not apply +kl_blow_up +`beta` is 0", line) for line in lines), lines


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("metric", HEALTHY)
def test_a_check_without_its_metric_is_reported_as_unchecked(tmp_path: Path, metric: str) -> None:
    """A check does not count as made if a metric that it reads is missing."""
    read_by = {
        "kl": "kl_blow_up",
        "entropy": "entropy_collapse",
        "frac_reward_zero_std": "zero_variance",
        "completions/clipped_ratio": "truncated",
        "clip_ratio/region_mean": "clipped_tokens",
        "grad_norm": "gradient_spikes",
        "rewards/tag_presence/mean": "format_without_correctness",
        "rewards/gsm8k_correctness/mean": "format_without_correctness",
        "rewards/tag_presence/std": "dominant_reward",
        "rewards/gsm8k_correctness/std": "dominant_reward",
        "rewards/gsm8k_correctness/parsed": "no_answer_found",
        "updates/changed": "lost_updates",
        "updates/expected": "lost_updates",
    }
    run = Run.read(
        write_run(tmp_path / "run", {metric: None, **({} if metric == "reward" else {"eval_reward": ramp(1, 2)})})
    )
    diagnosis = diagnose(run)
    left_out = set(diagnosis.unchecked) | set(diagnosis.not_applicable)
    left_out -= set(TOOL_PROBLEMS)
    reads_reward = {"overfitting", "length_without_gain", "plateau"}
    expected = {"reward": reads_reward, "completions/mean_length": {"length_into_cap", "length_without_gain"}}
    assert left_out == expected.get(metric, {read_by[metric]} if metric in read_by else set())


def test_a_reward_that_finds_no_answer_gets_a_hint_at_the_layout(tmp_path: Path) -> None:
    planted = {
        "rewards/gsm8k_correctness/mean": ramp(0, 0),
        "rewards/gsm8k_correctness/parsed": ramp(0, 0),
        "rewards/tag_presence/mean": ramp(0.4, 0.4),
    }
    folder = write_run(tmp_path / "run", planted)
    record = json.loads((folder / "run.json").read_text())

    def output(*rewards: Any) -> str:
        record["recipe"]["rewards"] = list(rewards)
        (folder / "run.json").write_text(json.dumps(record))
        (finding,) = (finding for finding in found_in(Run.read(folder)) if finding.check == "no_answer_found")
        return finding.sentence

    boxed = {"name": "gsm8k_correctness", "kwargs": {"extract": "boxed"}}
    wanted = (
        "no completion states an answer where `extract: boxed` looks; `extract: answer_tag` finds one in 32 of 32: ask"
    )
    assert wanted in output(boxed, "tag_presence")
    assert wanted in output("tag_presence", boxed)
    assert wanted in output({"name": "sum", "rewards": ["tag_presence", boxed]})
    assert wanted in output({"name": "grpo_rewards.math.correctness.gsm8k_correctness", "kwargs": {"extract": "boxed"}})
    assert "states an answer where it looks" in output({"name": "x.y", "alias": "gsm8k_correctness"})
    assert "where `extract: answer_tag` looks" in output("gsm8k_correctness")
    assert "states an answer where it looks" in output()


def test_a_healthy_run_has_no_findings(tmp_path: Path) -> None:
    for seed in range(8):
        assert found_in(Run.read(write_run(tmp_path / str(seed), {"eval_reward": ramp(0.8, 2.0)}, seed=seed))) == []


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_planted_problem_gets_its_sentence_and_no_other(tmp_path: Path, problem: str) -> None:
    planted, says = PROBLEMS[problem]
    (finding,) = found_in(Run.read(write_run(tmp_path / "run", **planted)))
    assert finding.check == problem
    assert re.search(says, finding.sentence), finding.sentence
    assert finding.step in range(1, 41)


@pytest.mark.parametrize("source", ["sum", "gate"])
def test_the_parts_of_a_sum_or_a_gate_are_checked_one_by_one(tmp_path: Path, source: str) -> None:
    metrics = {
        "rewards/total/mean": ramp(1, 1),
        "rewards/total/std": ramp(1, 1),
        "rewards/total/tag_count": ramp(0.1, 0.9),
        "rewards/total/math_correctness": ramp(0.5, 0.5),
        "rewards/gsm8k_correctness/mean": None,
        "rewards/tag_presence/mean": None,
    }
    parts = [{"name": "tag_count", "kind": "format"}, {"name": "math_correctness", "kind": "correctness"}]
    rewards = [{"name": "total", "source": source, "weight": 1.0, "kind": "other", "parts": parts}]
    (finding,) = found_in(Run.read(write_run(tmp_path / "run", metrics, rewards=rewards)))
    assert "`total/tag_count` rises" in finding.sentence
    assert "`total/math_correctness` goes from 0.50" in finding.sentence


WITHOUT_THE_HEALTHY_REWARDS = {
    f"rewards/{name}/{statistic}": None
    for name in ("gsm8k_correctness", "tag_presence")
    for statistic in ("mean", "std")
}


def paid_by(rewards: dict[str, str], **curves: Callable[[float], float]) -> dict[str, Any]:
    """Return arguments of `write_run` for a run with rewards (name: kind) whose means follow `curves`."""
    means = {f"rewards/{name}/mean": curves[name] for name in rewards}
    spreads = {f"rewards/{name}/std": ramp(0.4, 0.4) for name in rewards}
    return {
        "metrics": {**WITHOUT_THE_HEALTHY_REWARDS, **means, **spreads},
        "rewards": [{"name": name, "source": name, "weight": 1.0, "kind": kind} for name, kind in rewards.items()],
    }


def test_a_sum_with_a_reward_model_may_judge_correctness(tmp_path: Path) -> None:
    """The shipped recipe rlaif has such a sum."""
    sums = paid_by({"minimind": "other"}, minimind=ramp(0.5, 2.0))
    parts = {"tag_structure": ramp(0.1, 0.4), "tag_count": ramp(0.2, 0.8), "reward_model": ramp(-1.0, 1.0)}
    kinds = {"tag_structure": "format", "tag_count": "format", "reward_model": "judge"}
    sums["rewards"][0]["parts"] = [{"name": name, "kind": kind} for name, kind in kinds.items()]
    sums["metrics"].update({f"rewards/minimind/{name}": curve for name, curve in parts.items()})
    assert found_in(Run.read(write_run(tmp_path / "run", **sums))) == []


def test_a_correctness_reward_without_scores_is_no_finding(tmp_path: Path) -> None:
    assert found_in(Run.read(write_run(tmp_path / "run", {"rewards/gsm8k_correctness/mean": None}))) == []


def test_a_run_of_trl_alone_has_no_findings_from_missing_data(tmp_path: Path) -> None:
    """Such a run records neither kinds and weights of rewards nor the cap."""
    names = {"correctness_reward_func": "", "think_format_reward": ""}
    planted = paid_by(names, correctness_reward_func=ramp(0.2, 1.5), think_format_reward=ramp(0.3, 0.9))
    planted["metrics"]["rewards/think_format_reward/std"] = ramp(9.0, 9.0)
    planted["metrics"]["completions/mean_length"] = ramp(300, 600)
    folder = write_run(tmp_path / "run", **planted)
    (folder / "run.json").unlink()
    assert found_in(Run.read(folder)) == []


def test_a_flat_held_out_reward_is_found(tmp_path: Path) -> None:
    flat = {"eval_reward": ramp(0.9, 0.9)}
    (finding,) = found_in(Run.read(write_run(tmp_path / "run", flat)))
    assert finding.check == "overfitting"
    assert re.search(
        r"the held-out reward stays at 0\.9\d from step 1 on: 9[78]% of the run's tokens come after", finding.sentence
    )
    # A clear rise is not flat. Noise that could hide a rise as large as that of training shows nothing.
    slow = ramp(0.9, 1.2)
    for seed in range(3):
        assert found_in(Run.read(write_run(tmp_path / f"slow{seed}", {"eval_reward": slow}, seed=seed))) == []
        noise = random.Random(seed)
        noisy = {"eval_reward": lambda over, noise=noise: noise.gauss(1.5, 3)}
        assert "stays at" not in check(tmp_path / f"noisy{seed}", "overfitting", metrics=noisy, seed=seed)


def test_a_drift_is_distinguished_from_noise() -> None:
    """Independent noise has no trend. A drift of a few standard deviations has one."""
    generator = random.Random(0)
    trends = [Series(list(range(24)), [generator.gauss(1, 0.3) for _ in range(24)]).trend for _ in range(200)]
    assert sum(trend != 0 for trend in trends) <= 6
    drift = [
        Series(list(range(24)), [generator.gauss(1 + step / 12, 0.3) for step in range(24)]).trend for _ in range(200)
    ]
    assert drift.count(1) == 200


def test_four_points_of_noise_seldom_have_a_trend() -> None:
    """With three standard errors, as for long series, one in ten of such series would have one."""
    generator = random.Random(0)
    trends = [Series([1, 2, 3, 4], [generator.gauss(1, 0.3) for _ in range(4)]).trend for _ in range(1000)]
    assert sum(trend != 0 for trend in trends) < 60
    assert Series([1, 2, 3, 4], [0.5, 0.7, 0.9, 1.1]).trend == 1


def test_a_run_of_trl_alone_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"rewards/gsm8k_correctness/mean": ramp(0.5, 0.5)})
    (folder / "run.json").unlink()
    assert [finding.check for finding in found_in(Run.read(folder))] == ["format_without_correctness"]


def test_a_run_in_progress_is_read_from_its_checkpoint(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "checkpoint-40").mkdir()
    (folder / "trainer_state.json").rename(folder / "checkpoint-40" / "trainer_state.json")
    assert len(Run.read(folder).series("reward")) == 40


def saved_state(folder: Path, step: int) -> Path:
    """Write a `trainer_state.json` as the trainer saves it at a step."""
    folder.mkdir(parents=True, exist_ok=True)
    history = [{"step": number, "reward": 1.0} for number in range(1, step + 1)]
    state = folder / "trainer_state.json"
    state.write_text(json.dumps({"global_step": step, "log_history": history}))
    return state


def steps_read(folder: Path) -> int:
    return len(Run.read(folder).series("reward"))


def test_the_newest_state_is_used_and_named_if_it_is_damaged(tmp_path: Path) -> None:
    for step in (80, 9, 60):  # in the order neither of names nor of file times
        saved_state(tmp_path / f"checkpoint-{step}", step)
    assert steps_read(tmp_path) == 80
    saved_state(tmp_path, 40)  # left by an earlier launch
    assert steps_read(tmp_path) == 80
    saved_state(tmp_path, 100)
    assert steps_read(tmp_path) == 100
    (tmp_path / "trainer_state.json").unlink()
    for damage in ('{"global_step": 90, "log_hi', "", "null"):
        (tmp_path / "checkpoint-80" / "trainer_state.json").write_text(damage)
        with pytest.raises(RunError, match=r"checkpoint-80/trainer_state\.json: .*; restore or remove the file"):
            Run.read(tmp_path)
    (tmp_path / "checkpoint-80" / "trainer_state.json").unlink()
    assert steps_read(tmp_path) == 60
    (tmp_path / "trainer_state.json").write_text("{")
    with pytest.raises(RunError, match=r"trainer_state\.json: can't be read"):
        Run.read(tmp_path)


@pytest.mark.parametrize("damage", only([b"PAR1 cut off"], [b"", b"PAR1 cut off", None]))
def test_damaged_completions_are_named(
    tmp_path: Path, damage: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    file = folder / "completions" / "completions_00020.parquet"
    file.write_bytes(file.read_bytes()[:-20] if damage is None else damage)
    for command in ("diagnose", "report"):
        assert cli.main([command, str(folder)]) == 2
        output = capsys.readouterr().err
        assert output.startswith(f"error: {file}: can't be read as parquet")
        assert len(output.splitlines()) == 1


def test_a_file_whose_pages_are_damaged_is_named(tmp_path: Path) -> None:
    """The end of the file, with the positions of the pages, is intact."""
    file = write_run(tmp_path / "run") / "completions" / "completions_00020.parquet"
    content = file.read_bytes()
    file.write_bytes(content[:4] + b"\xff" * 200 + content[204:])
    with pytest.raises(RunError, match=f"{file.name}: can't be read as parquet"):
        found_in(Run.read(tmp_path / "run"))


def test_the_command_answers_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", str(write_run(tmp_path / "healthy"))]) == 0
    assert "nothing looks wrong" in capsys.readouterr().out
    assert cli.main(["diagnose", str(write_run(tmp_path / "ill", {"kl": ramp(2, 3)}))]) == 1
    assert "KL to the reference" in capsys.readouterr().out
    assert cli.main(["diagnose", str(tmp_path / "ill"), "--json"]) == 1
    output = json.loads(capsys.readouterr().out)
    assert [(finding["check"], finding["step"]) for finding in output["findings"]] == [("kl_blow_up", 1)]
    assert (output["checked"], output["checks"], list(output["unchecked"]), output["looks_fine"]) == (
        15,
        21,
        ["overfitting"],
        False,
    )
    assert cli.main(["diagnose", str(tmp_path)]) == 2
    assert "trainer_state.json" in capsys.readouterr().err
    with pytest.raises(RunError):
        Run.read(tmp_path / "missing")


@pytest.mark.slow
def test_reward_hacking_is_found_in_a_real_run(tmp_path: Path, gsm8k_file: Path, capsys) -> None:
    """A policy that is rewarded for tags alone, each of which is one token, learns to write tags."""
    from tokenizers import AddedToken
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer, set_seed

    from grpo_recipes.quickstart import CHAT_TEMPLATE

    set_seed(0)
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        [SYSTEM_PROMPTS["think"]] * 4, vocab_size=300, new_special_tokens=["<|im_end|>"], show_progress=False
    )
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in ("<think>", "</think>", "<answer>", "</answer>")])
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", CHAT_TEMPLATE
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    recipe = tmp_path / "hackable.yaml"
    recipe.write_text(
        json.dumps(
            {
                "model_name_or_path": str(tmp_path / "model"),
                "dataset": {"name": "gsm8k", "path": str(gsm8k_file), "system_prompt": "none"},
                "rewards": ["tag_presence"],
                "per_device_train_batch_size": 32,
                "max_completion_length": 24,
                "max_steps": 24,
                "learning_rate": 0.02,
                "lr_scheduler_type": "constant",
                "logging_steps": 1,
                "use_cpu": True,
                "bf16": False,
                "save_strategy": "no",
                "report_to": "none",
                "gradient_checkpointing": False,
                "output_dir": str(tmp_path / "run"),
            }
        )
    )
    assert train.main(["--config", str(recipe)]) == 0
    findings = {finding.check: finding.sentence for finding in found_in(Run.read(tmp_path / "run"))}
    assert "no reward pays a correct answer" in findings["format_without_correctness"]
    output = capsys.readouterr().out
    assert findings["format_without_correctness"] in output
    assert re.search(r"^diagnosis: \d problems?, \d+ of \d+ checks had data; .* says why \d had none$", output, re.M)


# ---- Tools

TOOLS_FINE = {
    "tools_never_called": r"a completion makes 1\.[12]\d* calls on average at the end of the run$",
    "calls_without_gain": r"50% of the completions call a tool at the end of the run \(limit 95%\)",
    "failing_tools": r"1\d% of the calls fail at the end of the run \(limit 50%\)",
    "tool_limits_hit": r"limits end [78]% of the completions at the end of the run \(limit 25%\)",
    "reward_by_calls_alone": r"`gsm8k_correctness` rises too, from 0\.6\d to 1\.[34]\d",
}


def test_checks_of_tools_that_find_nothing_give_the_figure(tmp_path: Path) -> None:
    diagnosis = diagnose(Run.read(write_run(tmp_path / "run", **with_tools())))
    assert diagnosis.findings == []
    for name, says in TOOLS_FINE.items():
        assert re.match(says, diagnosis.fine[name]), diagnosis.fine[name]


def test_checks_of_tools_need_their_metrics(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", {"rewards/gsm8k_correctness/mean": None}, completions=healthy_completions()[:1]
    )
    record = json.loads((folder / "run.json").read_text())
    record["recipe"]["tools"] = ["my_tools.add"]
    (folder / "run.json").write_text(json.dumps(record))
    unchecked = diagnose(Run.read(folder)).unchecked
    assert {name: unchecked[name] for name in TOOL_PROBLEMS} == {
        "tools_never_called": "`tools/call_frequency` was not logged",
        "calls_without_gain": "fewer than 8 scored completions were logged at the end of the run",
        "failing_tools": "`tools/failure_frequency` was not logged",
        "tool_limits_hit": "`tools/rows_at_limit` was not logged",
        "reward_by_calls_alone": "too few scored completions with calls were logged",
    }


def check(folder: Path, name: str, **run: Any) -> str:
    """Return the sentence of a check on a run, which begins with its result."""
    rows = diagnose(Run.read(write_run(folder, **run))).rows()
    return next(f"{result}: {text}" for result, checked, text in rows if checked == name)


def test_calls_that_all_completions_need_are_fine(tmp_path: Path) -> None:
    def sentence(name: str, calls: Callable[[int, int], int], pay: Callable[[int, int], float]) -> str:
        rows = tool_completions(calls, pay)
        return check(tmp_path / name, "calls_without_gain", **with_tools({"reward": ramp(1, 1)}, rows))

    always = sentence("always", lambda step, member: 1, lambda step, member: 2.0 if step > 20 else float(member % 2))
    assert re.match("fine: 100% .*, and nearly all earn the best reward", always), always
    learnt = sentence(
        "learnt", lambda step, member: int(step > 20), lambda step, member: (member % 3) * (1.0 if step > 20 else 0.1)
    )
    assert re.match(r"fine: 100% .* those with a call earn 0\.75 and those without 0\.0", learnt), learnt
    useless = sentence("useless", lambda step, member: int(step > 20), lambda step, member: float(member % 2))
    assert re.search("problem: .* those with a call earn 0.50 and those without 0.50: look", useless), useless


def test_rewards_that_rise_by_more_than_calls_are_fine(tmp_path: Path) -> None:
    def sentence(name: str, pay: Callable[[int, int], float]) -> str:
        return check(tmp_path / name, "reward_by_calls_alone", **paid_by_calls(pay))

    better = sentence("better", lambda step, member: _more_and_more(step, member) + step / 20)
    assert re.match(r"fine: .* at equal numbers of calls the reward rises by", better), better
    # The chance to win depends on the calls, but the outcome of one completion does not follow from them.
    lucky = sentence("lucky", lambda step, member: float((7 * step + 3 * member) % 5 < _more_and_more(step, member)))
    assert lucky.startswith("fine: "), lucky


def test_a_policy_that_learns_to_call_is_fine(tmp_path: Path) -> None:
    """Completions without a call are left out: to call the tool at all is what should pay."""
    rows = tool_completions(
        lambda step, member: int(member * 10 < step + 10), lambda step, member: float(member * 10 < step + 10)
    )
    run = paid_by_calls(lambda step, member: 0.0) | {
        "completions": [{**row, "Game": row["gsm8k_correctness"]} for row in rows]
    }
    found = check(tmp_path / "run", "reward_by_calls_alone", **run)
    assert found == "fine: calls per completion go from 1 to 1"


def test_logged_arguments_may_be_text_or_structs(tmp_path: Path) -> None:
    """TRL writes structs with the fields of all calls, and our trainer writes JSON text."""
    rows = tool_completions()
    for row in rows:
        for message in row["completion"]:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert check(tmp_path / "structs", "calls_without_gain", **with_tools({}, rows)) == check(
        tmp_path / "text", "calls_without_gain", **with_tools()
    )


def test_a_run_of_plain_trl_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = short_runs.arguments(
        tmp_path / "run", max_steps=6, save_steps=6, log_completions=True, save_strategy="steps", beta=0.0
    )
    short_runs.trainer(TRLGRPOTrainer, policy(), args).train()
    capsys.readouterr()
    assert cli.main(["diagnose", str(tmp_path / "run")]) in (0, 1)
    assert "no `run.json` holds the rewards' weights" in capsys.readouterr().out
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert re.search(r"\d+ \+ \d+ =", (tmp_path / "run" / "report" / "report.html").read_text()), "a prompt"
