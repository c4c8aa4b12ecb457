"""The command line: `grpo-recipes plan | evaluate | diagnose | report`.

`plan` says what a recipe would do on a machine, without loading a model; `evaluate` measures accuracy on held-out problems;
`diagnose` says what looks wrong in a run; `report` makes one page of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from grpo_recipes import __version__
from grpo_recipes.runs import quiet
from grpo_rewards.command_line import Parser
from grpo_rewards.errors import UserError, did_you_mean

DESCRIPTION = "What surrounds a GRPO training: plan it, measure its policy, judge the run."
EPILOG = """`grpo-recipes COMMAND --help` says more. Training itself:

  accelerate launch --config_file FILE -m grpo_recipes.train --config RECIPE
  python -m grpo_recipes.train --help
"""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0, 1 if `diagnose` found something, or 2 if what was asked can't be done."""
    arguments = sys.argv[1:] if args is None else list(args)
    parser = Parser(
        prog="grpo-recipes",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for add in (_add_plan, _add_evaluate, _add_diagnose, _add_report):
        add(commands)
    asked = next((word for word in arguments if not word.startswith("-")), None)
    if asked is not None and asked not in commands.choices:
        otherwise = f": choose {_either(commands.choices)}"
        parser.error(f"there is no command `{asked}`{did_you_mean(asked, commands.choices, otherwise=otherwise)}")
    options, rest = parser.parse_known_args(arguments)
    if options.command is None:
        parser.error(f"name a command, {_either(commands.choices)}: `grpo-recipes --help` says what each does")
    known = commands.choices[options.command].long_options
    if rest and options.command != "plan":  # whose recipe they override
        parser.error(f"unknown argument `{rest[0]}`{did_you_mean(rest[0].partition('=')[0], known)}")
    try:
        if options.command == "plan":
            return plan_recipe(options, rest, known)
        if options.command == "evaluate":
            return evaluate_policy(options)
        if options.command == "report":
            return report_run(options.run, options.other, options.output)
        return diagnose_run(options.run)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _either(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="check a recipe and print its batch geometry and memory",
        epilog="Further --key value pairs override the recipe, as in training.",
    )
    plan.add_argument("recipe", help="a YAML file, or the name of a shipped recipe")
    plan.add_argument(
        "--accelerate_config",
        metavar="FILE",
        help="plan for the machine that this file, or the shipped one of this name, describes (default: this machine)",
    )
    plan.add_argument(
        "--num_processes", metavar="N", type=int, help="plan for this many processes (default: the file's, else 1)"
    )
    plan.add_argument(
        "--gpu_memory", metavar="SIZE", help="say whether it fits on such GPUs, as 80GB; if not, what to change"
    )
    plan.add_argument("--model_config", metavar="FILE", help="the model's config.json, where the hub can't be reached")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON, sizes in bytes")


def _add_diagnose(commands: Any) -> None:
    diagnose = commands.add_parser("diagnose", help="say what looks wrong in a run (exit code 1 if anything does)")
    diagnose.add_argument("run", type=Path, help="the `output_dir` of a run, finished or under way")


def _add_report(commands: Any) -> None:
    report = commands.add_parser("report", help="one page on a run: pictures, completions, findings, the recipe")
    report.add_argument("run", type=Path, help="the `output_dir` of a run")
    report.add_argument("other", type=Path, nargs="?", help="a second run, drawn into the same pictures")
    report.add_argument(
        "--output", metavar="FOLDER", type=Path, help="folder for report.html and the PNGs (default: RUN/report)"
    )


def plan_recipe(options: argparse.Namespace, overrides: Sequence[str], known: Sequence[str] = ()) -> int:
    """Print what a recipe comes to. Returns 0; raises `UserError` if it can't run as written.

    `known` are the command's own options, one of which an unknown override may mean.
    """
    from grpo_recipes.recipe.plan import plan

    planned = plan(
        ["--config", options.recipe, *overrides],
        accelerate_config=options.accelerate_config,
        num_processes=options.num_processes,
        gpu_memory=options.gpu_memory,
        model_config_file=options.model_config,
        options=known,
    )
    print(json.dumps(planned.as_dict(), indent=2, ensure_ascii=False) if options.json else planned.describe())
    return 0


def _add_evaluate(commands: Any) -> None:
    evaluate = commands.add_parser("evaluate", help="accuracy on held-out problems, with 95 %% intervals; resumable")
    evaluate.add_argument("model", nargs="?", help="a model or adapter: a folder, a run, or a hub id")
    evaluate.add_argument("--compare", nargs=2, metavar=("A", "B"), type=Path, help="two finished evaluations' folders")
    evaluate.add_argument(
        "--recipe", metavar="RECIPE", help="take dataset, tags and lengths from this recipe (default: the run's own)"
    )
    evaluate.add_argument("--dataset", metavar="NAME", help="gsm8k (the default), rlaif or arithmetic")
    evaluate.add_argument("--path", help="a hub id, a save_to_disk folder or a .jsonl file")
    evaluate.add_argument(
        "--split", metavar="SPLIT", help="default: the recipe's eval_split, unless --path is given; else test"
    )
    evaluate.add_argument("--system_prompt", metavar="TEXT", help="a system prompt: its name, or the text")
    evaluate.add_argument("--prompt_format", metavar="FORMAT", help="conversational or text")
    evaluate.add_argument("--tags", nargs=2, metavar=("REASONING", "ANSWER"), help="the two tags of the asked format")
    evaluate.add_argument("--samples", metavar="N", type=int, default=1, help="completions a problem (default 1)")
    evaluate.add_argument("--temperature", metavar="T", type=float, help="default: 0 (greedy) for one sample, else 1")
    evaluate.add_argument(
        "--max_new_tokens", metavar="N", type=int, help="default: the recipe's max_completion_length, else 512"
    )
    evaluate.add_argument("--limit", metavar="N", type=int, help="only the first so many problems")
    evaluate.add_argument("--batch_size", metavar="N", type=int, default=64, help="completions at once (default 64)")
    evaluate.add_argument("--seed", metavar="N", type=int, default=0, help="of the sampling (default 0)")
    evaluate.add_argument("--vllm", action="store_true", help="generate with vLLM (a full model, not an adapter)")
    evaluate.add_argument(
        "--output",
        metavar="FOLDER",
        type=Path,
        help="folder for the result (default: MODEL/evaluations/after, and after-N-samples with --samples N)",
    )


@quiet.libraries()
def evaluate_policy(options: argparse.Namespace) -> int:
    """Evaluate a model, or compare two evaluations, and print the result.

    Returns 0, or 130 after Ctrl-C; raises `UserError` for what can't be evaluated.
    """
    try:
        from grpo_recipes.results import evaluate

        if options.compare:
            print(evaluate.describe_comparison(evaluate.compare(*options.compare)))
        elif options.model:
            print(evaluate.describe(evaluate.evaluate_model(options)))
        else:
            raise UserError("nothing to evaluate: name a model, or two finished evaluations after --compare")
        return 0
    except KeyboardInterrupt as interrupted:
        # Without words of its own it came while modules were loaded or files read.
        print(str(interrupted) or "stopped by Ctrl-C: nothing was evaluated", file=sys.stderr)
        return 130


def report_run(folder: Path, other: Path | None, output: Path | None) -> int:
    """Write the report of a run, or of two. Returns 0, or 2 if a run holds nothing to check; raises `UserError`."""
    from grpo_recipes.results.diagnostics import diagnose
    from grpo_recipes.results.report import write_report
    from grpo_recipes.results.run import Run

    runs = [Run.read(path) for path in (folder, other) if path is not None]
    try:
        print(write_report(runs, output or folder / "report"))
    except OSError as error:
        raise UserError(f"the report can't be written ({error}): give another --output") from error
    for run in runs:
        if not (diagnosis := diagnose(run)).checked:
            raise UserError(f"{run.folder}: {diagnosis.coverage}")
    return 0


def diagnose_run(folder: Path) -> int:
    """Print what looks wrong in a run, and which checks had data.

    Returns 0 if nothing does, 1 if something does; raises `UserError` if the run can't be read or no check had data.
    """
    from grpo_recipes.results.diagnostics import describe, diagnose
    from grpo_recipes.results.run import Run

    diagnosis = diagnose(Run.read(folder))
    if diagnosis.findings or diagnosis.checked:
        print(describe(diagnosis))
    if not diagnosis.checked:
        raise UserError(f"{folder}: {diagnosis.coverage}")
    return 1 if diagnosis.findings else 0


if __name__ == "__main__":
    sys.exit(main())
