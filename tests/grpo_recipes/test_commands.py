"""Each command: what it asks of the project for the options given, what it prints, and its exit code."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_recipes import preview
from grpo_recipes.checks import checks
from grpo_recipes.cli import main
from grpo_recipes.evaluation import chat, comparison, estimates, evaluate, export, merge
from grpo_recipes.plan import plan
from grpo_recipes.process import launcher
from grpo_recipes.process.faults import RunFault
from grpo_recipes.recipe.recipe import shipped_files
from grpo_recipes.reports import diagnostics, report, run
from grpo_recipes.runs import resume


def printed(capsys: pytest.CaptureFixture[str], arguments: str, code: int = 0) -> str:
    """Return what a command prints to standard output."""
    assert main(arguments.split()) == code
    return capsys.readouterr().out


@pytest.mark.parametrize(("count", "said"), [(1, "1 process, laid out by "), (2, "2 processes, laid out by ")])
def test_train_checks_a_recipe_for_its_processes_and_launches_them(
    count: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked, launched, asked = [], [], []
    saved = [Path("runs/mine/checkpoint-4"), None]
    monkeypatch.setattr(resume, "newest_checkpoint", lambda *given: asked.append(given) or saved[len(asked) - 1])
    monkeypatch.setattr(checks, "check_launch", lambda recipe, machine: checked.append(machine.num_processes))
    monkeypatch.setattr(launcher, "launch", lambda *given: launched.append(given) or 7)
    arguments = ["train", "quickstart", "--num_processes", str(count), "--accelerate_config", "ddp_cpu"]
    assert main([*arguments, "--output_dir", "runs/mine"]) == 7
    ((layout, passed_on, resume_hint),) = launched
    assert checked == [layout.num_processes] == [count]
    assert passed_on == ["--config", "quickstart", "--output_dir", "runs/mine"]
    assert capsys.readouterr().out == f"{said}{layout.config}\n"
    assert layout.config.stem == "ddp_cpu"

    assert resume_hint() == "`--resume_from_checkpoint true` goes on from checkpoint-4"
    assert resume_hint() == "`--resume_from_checkpoint true` starts again: no checkpoint had been saved"
    assert asked[0] == (Path("runs/mine"), count)


def test_ctrl_c_before_a_launch_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "check_launch", interrupted)
    assert main(["train", "quickstart"]) == 130
    said = capsys.readouterr()
    line = "stopped by Ctrl-C: nothing was trained or saved, and the same command starts again\n"
    assert (said.out, said.err) == ("", line)


def test_evaluate_prints_a_result_or_one_below_the_name_of_each_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests: list[evaluate.Request] = []

    def evaluated(request: evaluate.Request) -> dict[str, Any]:
        requests.append(request)
        return {"table": request.path}

    monkeypatch.setattr(evaluate, "evaluate_request", evaluated)
    monkeypatch.setattr(estimates, "describe", lambda result: [f"result of {result['table']}"])
    one, two = "evaluate m --samples 4 --tags a b --path x.csv", "evaluate m --samples 4 --path x.csv y.csv"
    assert printed(capsys, one) == "result of x.csv\n"
    expected = evaluate.Request(model="m", samples=4, tags=("a", "b"), path="x.csv")
    assert requests == [expected]
    assert json.loads(printed(capsys, f"{one} --json")) == {"table": "x.csv"}
    assert printed(capsys, two) == "x.csv:\nresult of x.csv\ny.csv:\nresult of y.csv\n"
    assert [request.path for request in requests[2:]] == ["x.csv", "y.csv"]
    assert {request.tags for request in requests[2:]} == {None}
    assert json.loads(printed(capsys, f"{two} --json")) == {"x.csv": {"table": "x.csv"}, "y.csv": {"table": "y.csv"}}


@pytest.mark.parametrize(
    ("message", "said"),
    [("stopped by Ctrl-C after 3 of 9", None), ("", "stopped by Ctrl-C: nothing was evaluated")],
)
def test_ctrl_c_in_an_evaluation_tells_what_is_kept(
    message: str, said: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(request: object) -> None:
        raise KeyboardInterrupt(*[message] * bool(message))

    monkeypatch.setattr(evaluate, "evaluate_request", interrupted)
    assert main(["evaluate", "m"]) == 130
    assert capsys.readouterr() == ("", f"{said or message}\n")


def test_compare_prints_the_difference_of_the_second_to_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison, "compare", lambda first, second: {"from": str(first), "to": str(second)})
    monkeypatch.setattr(estimates, "describe_comparison", lambda result: [f"from {result['from']} to {result['to']}"])
    assert printed(capsys, "compare a b") == "from a to b\n"
    assert json.loads(printed(capsys, "compare a b --json")) == {"from": "a", "to": "b"}


def test_plan_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []
    planned = SimpleNamespace(describe=lambda: ["the plan"], as_dict=lambda: {"a": 1})
    monkeypatch.setattr(plan, "plan", lambda *given, **named: asked.append((given, named)) or planned)
    options = "--accelerate_config ddp --num_processes 2 --gpu_memory 80GB --model_config c.json"
    assert printed(capsys, f"plan mine.yaml {options} --beta 0.1") == "the plan\n"
    ((given, named),) = asked
    assert given == (["--config", "mine.yaml", "--beta", "0.1"],)
    assert "--gpu_memory" in named.pop("options"), "an unknown argument may be a misspelt option"
    assert named == {
        "accelerate_config": "ddp", "num_processes": 2, "gpu_memory": "80GB", "model_config_file": "c.json",
        "build": False,
    }  # fmt: skip
    assert printed(capsys, "plan mine.yaml --build --json") == '{\n  "a": 1\n}\n'
    assert asked[1][1]["build"] is True
    assert set(shipped_files("recipes")) <= set(printed(capsys, "plan").split())


def test_preview_prints_its_result_only_and_fails_with_the_policy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def sampled(*given: Any, **named: Any) -> Any:
        print("a message of a library")
        asked.append((given, named))
        return SimpleNamespace(describe=lambda: ["the sample"], as_dict=lambda: {"a": 1})

    monkeypatch.setattr(preview, "preview", sampled)
    assert printed(capsys, "preview mine.yaml --prompts 3 --seed 7 --beta 0.1") == "the sample\n"
    ((given, named),) = asked
    assert given == (["--config", "mine.yaml", "--seed", "7", "--beta", "0.1"],)
    assert "--prompts" in named.pop("options"), "an unknown argument may be a misspelt option"
    assert named == {"prompts": 3}
    assert printed(capsys, "preview mine.yaml --json") == '{\n  "a": 1\n}\n'

    def fails(*given: Any, **named: Any) -> Any:
        raise RunFault("reward `r` raised")

    monkeypatch.setattr(preview, "preview", fails)
    assert main(["preview", "mine.yaml"]) == 1
    assert capsys.readouterr() == ("", "error: reward `r` raised\n")


@pytest.mark.parametrize(
    ("findings", "checked", "code", "said"),
    [
        (["looks wrong"], ["reward"], 1, "the table\n"),
        ([], ["reward"], 0, "the table\n"),
        (["looks wrong"], [], 2, "the table\n"),
        ([], [], 2, ""),
    ],
)
def test_diagnose_fails_for_findings_and_for_a_run_that_no_check_can_read(
    findings: list[str], checked: list[str], code: int, said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found = SimpleNamespace(findings=findings, checked=checked, coverage="no check had data")
    monkeypatch.setattr(run.Run, "read", lambda path: path)
    monkeypatch.setattr(diagnostics, "diagnose", lambda folder: found)
    monkeypatch.setattr(diagnostics, "as_table", lambda diagnosis: ["the table"])
    monkeypatch.setattr(diagnostics, "as_dict", lambda diagnosis: {"findings": findings})
    assert main(["diagnose", "runs/a"]) == code
    assert capsys.readouterr() == (said, "" if checked else "error: runs/a: no check had data\n")
    assert json.loads(printed(capsys, "diagnose runs/a --json", code)) == {"findings": findings}


def test_report_writes_beside_the_first_run_or_where_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run.Run, "read", lambda path: SimpleNamespace(folder=path))
    monkeypatch.setattr(report, "write_report", lambda runs, folder: f"{[str(one.folder) for one in runs]} in {folder}")
    checked = {"runs/a": ["reward"], "runs/b": ["reward"]}
    diagnosis = SimpleNamespace(coverage="no check had data")
    monkeypatch.setattr(
        diagnostics, "diagnose", lambda one: SimpleNamespace(**vars(diagnosis), checked=checked[str(one.folder)])
    )
    assert printed(capsys, "report runs/a") == "['runs/a'] in runs/a/report\n"
    assert printed(capsys, "report runs/a runs/b --output x") == "['runs/a', 'runs/b'] in x\n"
    checked["runs/b"] = []
    assert main(["report", "runs/a", "runs/b"]) == 2
    assert capsys.readouterr().err == "error: runs/b: no check had data\n"

    def full(*given: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(report, "write_report", full)
    assert main(["report", "runs/a"]) == 2
    assert capsys.readouterr().err == "error: the report can't be written (no room): give another --output\n"


def test_merge_chat_and_export_pass_their_options_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(merge, "merge", lambda source, output: f"{source} merged in {output}")
    assert printed(capsys, "merge runs/a --output b") == "runs/a merged in b\n"
    asked: list[Any] = []
    monkeypatch.setattr(
        export, "export", lambda source, output: asked.append((source, output)) or ["files", "vllm serve"]
    )
    assert printed(capsys, "export runs/a --to b") == "files\nvllm serve\n"
    assert asked == [(Path("runs/a"), Path("b"))]
    monkeypatch.setattr(chat, "chat", lambda **options: asked.append(options))
    assert printed(capsys, "chat m --prompt hello --temperature 0.5 --seed 3") == ""
    assert asked[1] == {
        "model": "m", "recipe": None, "prompt": "hello", "temperature": 0.5, "max_new_tokens": None, "seed": 3
    }  # fmt: skip


def test_the_working_directory_is_importable_and_the_command_line_is_read_only_if_nothing_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "argv", ["grpo-recipes", "plan"])
    assert "quickstart" in printed(capsys, "plan")
    assert main() == 0
    assert (sys.path[0], sys.path.count("")) == ("", 1)
    with pytest.raises(SystemExit):
        main([])
    assert "choose init, plan, " in capsys.readouterr().err
    assert main(["plan", ""]) == 2, "an empty name is not the list of recipes"
