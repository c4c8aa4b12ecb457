"""The command line: `grpo-recipes plan | evaluate | diagnose | report`.

`plan` says what a recipe would do on a machine, without loading a model; `evaluate` measures accuracy on held-out problems;
`diagnose` says what looks wrong in a run; `report` makes one page of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0, 1 if `diagnose` found something, or 2 if what was asked can't be done."""
    # No abbreviations: `plan x --model m` must override the recipe, or be refused, and not set `--model-config`.
    parser = argparse.ArgumentParser(prog="grpo-recipes", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan",
        help="check a recipe and print its batch geometry and memory",
        epilog="Further --key value pairs override the recipe.",
        allow_abbrev=False,
    )
    plan.add_argument("recipe", help="a YAML file, or the name of a shipped recipe")
    plan.add_argument(
        "--accelerate-config", help="plan for the machine that this file describes (default: this machine)"
    )
    plan.add_argument("--num-processes", type=int, help="plan for this many processes (default: the file's, else 1)")
    plan.add_argument(
        "--gpu-memory", metavar="SIZE", help="say whether it fits on such GPUs, as 80GB; if not, what to change"
    )
    plan.add_argument("--model-config", metavar="FILE", help="the model's config.json, where the hub can't be reached")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON, sizes in bytes")
    _add_evaluate(commands)
    diagnose = commands.add_parser(
        "diagnose", help="say what looks wrong in a run (exit code 1 if anything does)", allow_abbrev=False
    )
    diagnose.add_argument("run", type=Path, help="the `output_dir` of a run, finished or under way")
    report = commands.add_parser(
        "report", help="one page on a run: pictures, completions, findings, the recipe", allow_abbrev=False
    )
    report.add_argument("run", type=Path, help="the `output_dir` of a run")
    report.add_argument("other", type=Path, nargs="?", help="a second run, drawn into the same pictures")
    report.add_argument("--output", type=Path, help="folder for report.html and the PNGs (default: RUN/report)")
    options, rest = parser.parse_known_args(args)
    if options.command == "plan":
        return plan_recipe(options, rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "evaluate":
        return evaluate_policy(options)
    if options.command == "report":
        return report_run(options.run, options.other, options.output)
    return diagnose_run(options.run)


def plan_recipe(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print what a recipe comes to and whether it can run. Returns 0, or 2 with one sentence on stderr."""
    from grpo_recipes.plan import plan, print_plan
    from grpo_recipes.recipe import RecipeError

    try:
        planned = plan(
            ["--config", options.recipe, *overrides],
            accelerate_config=options.accelerate_config,
            num_processes=options.num_processes,
            gpu_memory=options.gpu_memory,
            model_config_file=options.model_config,
        )
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_plan(planned, as_json=options.json)
    return 0


def _add_evaluate(commands: Any) -> None:
    evaluate = commands.add_parser(
        "evaluate", help="accuracy on held-out problems, with 95 % intervals; resumable", allow_abbrev=False
    )
    evaluate.add_argument("model", nargs="?", help="a model or adapter: a folder, a run, or a hub id")
    evaluate.add_argument("--compare", nargs=2, metavar=("A", "B"), type=Path, help="two finished evaluations' folders")
    evaluate.add_argument("--recipe", help="take dataset, tags and lengths from this recipe (default: the run's own)")
    evaluate.add_argument("--dataset", help="gsm8k (the default), rlaif or arithmetic")
    evaluate.add_argument("--path", help="a hub id, a save_to_disk folder or a .jsonl file")
    evaluate.add_argument("--split", help="default: the recipe's eval_split, unless --path is given; else test")
    evaluate.add_argument("--prompt-style", help="a system prompt by name")
    evaluate.add_argument("--prompt-format", help="conversational or text")
    evaluate.add_argument("--tags", nargs=2, metavar=("REASONING", "ANSWER"), help="the two tags of the asked format")
    evaluate.add_argument("--samples", type=int, default=1, help="completions a problem (default 1)")
    evaluate.add_argument("--temperature", type=float, help="default: 0 (greedy) for one sample, else 1")
    evaluate.add_argument("--max-new-tokens", type=int, help="default: the recipe's max_completion_length, else 512")
    evaluate.add_argument("--limit", type=int, help="only the first so many problems")
    evaluate.add_argument("--batch-size", type=int, default=64, help="completions at once (default 64)")
    evaluate.add_argument("--seed", type=int, default=0)
    evaluate.add_argument("--vllm", action="store_true", help="generate with vLLM (a full model, not an adapter)")
    evaluate.add_argument("--output", type=Path, help="folder for the result (default: MODEL/evaluations/after)")


def evaluate_policy(options: argparse.Namespace) -> int:
    """Evaluate a model, or compare two evaluations, and print the result.

    Returns 0, 2 with one sentence on stderr, or 130 after Ctrl-C.
    """
    try:
        return _evaluate_policy(options)
    except KeyboardInterrupt as interrupted:
        # Without words of its own it came while modules were loaded or files read.
        print(str(interrupted) or "stopped by Ctrl-C: nothing was evaluated", file=sys.stderr)
        return 130


def _evaluate_policy(options: argparse.Namespace) -> int:
    from grpo_recipes import evaluation_run
    from grpo_recipes.data import DatasetError
    from grpo_recipes.evaluate import EvaluationError, compare
    from grpo_recipes.recipe import RecipeError
    from grpo_recipes.result_files import RunError

    try:
        if options.compare:
            print(evaluation_run.describe_comparison(compare(*options.compare)))
        elif options.model:
            print(evaluation_run.describe(evaluation_run.evaluate_model(options)))
        else:
            raise EvaluationError("nothing to evaluate: name a model, or two finished evaluations after --compare")
    except (EvaluationError, RunError, RecipeError, DatasetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def report_run(folder: Path, other: Path | None, output: Path | None) -> int:
    """Write the report of a run, or of two. Returns 0, or 2 if a run can't be read or holds nothing to check."""
    from grpo_recipes.diagnostics import diagnose
    from grpo_recipes.report import write_report
    from grpo_recipes.runs import Run, RunError

    try:
        runs = [Run.read(path) for path in (folder, other) if path is not None]
        page = write_report(runs, output or folder / "report")
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: the report can't be written ({error}): give another --output", file=sys.stderr)
        return 2
    print(page)
    for run in runs:
        if not (diagnosis := diagnose(run)).checked:
            print(f"error: {run.folder}: {diagnosis.coverage}", file=sys.stderr)
            return 2
    return 0


def diagnose_run(folder: Path) -> int:
    """Print what looks wrong in a run, and which checks had data.

    Returns 0 if nothing does, 1 if something does, 2 if the run can't be read or no check had data.
    """
    from grpo_recipes.diagnostics import describe, diagnose
    from grpo_recipes.runs import Run, RunError

    try:
        diagnosis = diagnose(Run.read(folder))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if diagnosis.findings or diagnosis.checked:
        print(describe(diagnosis))
    if not diagnosis.checked:
        print(f"error: {folder}: {diagnosis.coverage}", file=sys.stderr)
        return 2
    return 1 if diagnosis.findings else 0


if __name__ == "__main__":
    sys.exit(main())
