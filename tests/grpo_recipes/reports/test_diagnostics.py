"""Each problem, planted in the files of a healthy run, is found, and no other."""

from __future__ import annotations

import json
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
from grpo_recipes.reports.run import Run
from grpo_recipes.runs.files import RunError
from grpo_rewards.terminal import rendered
from tests.support import short_runs
from tests.support.errors import refused
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


def repeating() -> list[dict]:
    """Return completions in which two of three groups repeat a wrong one."""
    rows = healthy_completions()
    for place, row in enumerate(rows):
        if (place // 4) % 3:
            row.update(completion=[{"role": "assistant", "content": "the same"}], gsm8k_correctness=0.0)
    return rows


PROBLEMS: dict[str, dict[str, Any]] = {
    "format_without_correctness": {"metrics": {"rewards/gsm8k_correctness/mean": ramp(0.5, 0.5)}},
    "length_into_cap": {"metrics": {"completions/mean_length": ramp(100, 250)}},
    "length_without_gain": {
        "metrics": {
            "completions/mean_length": ramp(60, 160),
            # Too noisy for a plateau in half of the run, and known well enough in all of it.
            **dict.fromkeys(("reward", "rewards/gsm8k_correctness/mean"), zigzag(1.0, 0.035)),
            "rewards/tag_presence/mean": ramp(0.5, 0.5),
        }
    },
    "truncated": {"metrics": {"completions/clipped_ratio": late(0.05, 0.5)}},
    "identical_completions": {"completions": repeating()},
    "entropy_collapse": {"metrics": {"entropy": lambda over: 0.6 * 0.01**over}},
    "zero_variance": {"metrics": {"frac_reward_zero_std": ramp(0.6, 0.8)}},
    "kl_blow_up": {"metrics": {"kl": late(0.05, 9.0)}},
    "dominant_reward": {"metrics": {"rewards/tag_presence/std": ramp(9.0, 9.0)}},
    "overfitting": {"metrics": {"eval_reward": ramp(1.5, 0.9)}},
    "no_answer_found": {"metrics": {"rewards/gsm8k_correctness/parsed": ramp(0, 0)}},
    "plateau": {"metrics": dict.fromkeys(("reward", "rewards/gsm8k_correctness/mean"), early(0.5, 1.5))},
    "clipped_tokens": {"metrics": {"clip_ratio/region_mean": late(0.02, 0.55), "passes/2/clip_share": late(0.04, 1.0)}},
    "stale_tokens": {"metrics": {"passes/2/effective_sample_size": ramp(0.95, 0.5)}},
    "gradient_spikes": {"metrics": {"grad_norm": lambda over: 20.0 if round(40 * over) in (11, 23, 24) else 0.4}},
    "lost_updates": {"metrics": {"updates/changed": ramp(0.02, 0.016)}},
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
    "tools_never_called": with_tools({"tools/call_frequency": ramp(0, 0)}),
    "calls_without_gain": with_tools(
        {"reward": ramp(1, 1)}, tool_completions(lambda step, member: 1, lambda step, member: 2.0 * (member == 0))
    ),
    "failing_tools": with_tools({"tools/add/failures": ramp(0.1, 0.3)}),
    "tool_limits_hit": with_tools({"tools/rows_at_limit": late(0.1, 0.5)}),
    "reward_by_calls_alone": paid_by_calls(lambda step, member: float(_more_and_more(step, member))),
}
PROBLEMS |= TOOL_PROBLEMS


# Fine figures of the healthy run, by hand from the curves of `synthetic.HEALTHY`: the first and the last of 4 quarters
# of a line from a to b have the means a + (b - a) / 8 and b - (b - a) / 8, and a step's share is step / 40.


def test_a_planted_problem_is_found_and_no_other(tmp_path: Path) -> None:
    """A check is also made on the healthy run, where it finds nothing and has data."""
    found = {}
    for problem, planted in PROBLEMS.items():
        findings = found_in(Run.read(write_run(tmp_path / problem, **planted)))
        found[problem] = [finding.check for finding in findings]
        assert all(finding.step in range(1, 41) and finding.sentence for finding in findings)
    assert found == {problem: [problem] for problem in PROBLEMS}
    assert set(PROBLEMS) == {check.__name__ for check in CHECKS}
    whole = diagnose(Run.read(write_run(tmp_path / "whole", {"eval_reward": ramp(0.8, 2.0)})))
    assert (set(whole.fine), whole.findings, whole.checked) == (set(PROBLEMS) - set(TOOL_PROBLEMS), [], 16)
    tools = diagnose(Run.read(write_run(tmp_path / "tools", **with_tools())))
    assert (set(TOOL_PROBLEMS) - set(tools.fine), tools.findings) == (set(), [])


def test_a_healthy_run_has_no_findings(tmp_path: Path) -> None:
    for seed in range(3):
        assert found_in(Run.read(write_run(tmp_path / str(seed), {"eval_reward": ramp(0.8, 2.0)}, seed=seed))) == []


READ_BY = {
    "kl": ["kl_blow_up"],
    "entropy": ["entropy_collapse"],
    "frac_reward_zero_std": ["zero_variance"],
    "completions/clipped_ratio": ["truncated"],
    "completions/mean_length": ["length_into_cap", "length_without_gain"],
    "clip_ratio/region_mean": ["clipped_tokens"],
    "grad_norm": ["gradient_spikes"],
    "reward": ["length_without_gain", "overfitting", "plateau"],
    "rewards/gsm8k_correctness/mean": ["format_without_correctness"],
    "rewards/tag_presence/std": ["dominant_reward"],
    "rewards/gsm8k_correctness/parsed": ["no_answer_found"],
    "updates/changed": ["lost_updates"],
}


def test_a_check_without_its_metric_is_reported_as_unchecked(tmp_path: Path) -> None:
    found = {}
    for place, metric in enumerate(READ_BY):
        metrics = {"eval_reward": ramp(1, 2), metric: None} if metric != "reward" else {metric: None}
        diagnosis = diagnose(Run.read(write_run(tmp_path / str(place), metrics)))
        found[metric] = sorted(diagnosis.unchecked)
        assert diagnosis.looks_fine
    assert found == READ_BY
    nothing = write_run(tmp_path / "nothing", dict.fromkeys(HEALTHY), completions=healthy_completions()[:1])
    diagnosis = diagnose(Run.read(nothing))
    assert (diagnosis.findings, diagnosis.checked, diagnosis.verdict) == ([], 0, "")
    assert set(diagnosis.unchecked) == set(PROBLEMS) - set(TOOL_PROBLEMS)


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
    assert set(diagnosis.not_applicable) == {*expected, "lost_updates", *TOOL_PROBLEMS}
    assert list(diagnosis.unchecked) == ["overfitting"]
    assert (diagnosis.checked, diagnosis.applicable) == (9, 10)


def test_a_reward_that_finds_no_answer_gets_a_hint_at_the_layout(tmp_path: Path) -> None:
    names = ("gsm8k_correctness/mean", "gsm8k_correctness/parsed")
    folder = write_run(tmp_path / "run", dict.fromkeys((f"rewards/{name}" for name in names), ramp(0, 0)))

    def hint(*rewards: Any) -> str:
        findings = found_in(edited(folder, recipe={"rewards": list(rewards)}))
        return next(finding.figures["where"] for finding in findings if finding.check == "no_answer_found")

    boxed = {"name": "gsm8k_correctness", "kwargs": {"extract": "boxed"}}
    by_path = {"name": "grpo_rewards.math.correctness.gsm8k_correctness", "kwargs": {"extract": "boxed"}}
    for rewards in ([boxed, "tag_presence"], [{"name": "sum", "rewards": ["tag_presence", boxed]}], [by_path]):
        assert "`extract: answer_tag` finds one in 32 of 32" in hint(*rewards)
    assert "`extract: answer_tag`" in hint("gsm8k_correctness")
    assert "`extract:" not in hint({"name": "x.y", "alias": "gsm8k_correctness"})


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
    assert (finding.figures["reward"], finding.figures["judge"]) == ("total/tag_count", "total/math_correctness")


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


def test_a_run_of_trl_alone_has_no_findings_from_missing_data(tmp_path: Path) -> None:
    """Such a run records neither kinds and weights of rewards nor the cap."""
    names = {"correctness_reward_func": "", "think_format_reward": ""}
    planted = paid_by(names, correctness_reward_func=ramp(0.2, 1.5), think_format_reward=ramp(0.3, 0.9))
    planted["metrics"]["rewards/think_format_reward/std"] = ramp(9.0, 9.0)
    planted["metrics"]["completions/mean_length"] = ramp(300, 600)
    folder = write_run(tmp_path / "run", **planted)
    (folder / "run.json").unlink()
    assert found_in(Run.read(folder)) == []


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
    findings = {finding.check: finding for finding in found_in(Run.read(tmp_path / "run"))}
    assert findings["format_without_correctness"].figures.get("judge") is None
    assert findings["format_without_correctness"].sentence in capsys.readouterr().out


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


def test_damaged_completions_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the last, the end of the file with the positions of the pages is intact."""
    folder = write_run(tmp_path / "run")
    file = folder / "completions" / "completions_00020.parquet"
    whole = file.read_bytes()
    for damage in (b"", b"PAR1 cut off", whole[:-20], whole[:4] + b"\xff" * 200 + whole[204:]):
        file.write_bytes(damage)
        with refused(file, by=RunError):
            found_in(Run.read(folder))
    assert cli.main(["report", str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {file}: ")


# ---- Tools


def test_logged_arguments_may_be_text_or_structs(tmp_path: Path) -> None:
    """TRL writes structs with the fields of all calls, and our trainer writes JSON text."""
    rows = tool_completions()
    for row in rows:
        for message in row["completion"]:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    text, structs = (
        diagnose(Run.read(write_run(tmp_path / f"{n}", **given)))
        for n, given in enumerate((with_tools(), with_tools({}, rows)))
    )
    assert text.fine["calls_without_gain"] == structs.fine["calls_without_gain"]


def test_a_run_of_plain_trl_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = short_runs.arguments(
        tmp_path / "run", max_steps=6, save_steps=6, log_completions=True, save_strategy="steps", beta=0.0
    )
    short_runs.trainer(TRLGRPOTrainer, policy(), args).train()
    diagnosis = diagnose(Run.read(tmp_path / "run"))
    assert "dominant_reward" in diagnosis.unchecked
    assert diagnosis.checked
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert re.search(r"\d+ \+ \d+ =", (tmp_path / "run" / "report" / "report.html").read_text()), "a prompt"
