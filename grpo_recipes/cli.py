"""The command line: `grpo-recipes init | plan | train | evaluate | compare | diagnose | report | merge`.

`init` writes a first recipe for a table; `plan` says what a recipe would do on a machine, without loading a model; `train`
checks it and launches it; `evaluate` measures accuracy on held-out problems, and `compare` holds two such measurements
against each other; `diagnose` says what looks wrong in a run; `report` makes one page of it; `merge` makes an adapter a
model of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_recipes import __version__
from grpo_recipes.process.messages import fewer_library_messages
from grpo_recipes.process.signals import INTERRUPTED, NOTHING_DONE
from grpo_rewards.errors import UserError, did_you_mean
from grpo_rewards.terminal import Parser, lasting_output, say, say_error, show, visible_messages

DESCRIPTION = "GRPO training from a recipe: plan it, run it, measure its policy, judge the run."
EPILOG = """`grpo-recipes COMMAND --help` says more, and `python -m grpo_recipes.train --help` what a recipe may say. On several
machines, start training with accelerate's own launcher on each:

  accelerate launch --config_file FILE -m grpo_recipes.train --config RECIPE
"""


# Commands that leave nothing but what they print: they have failed if that could not be written.
PRINTS_ONLY = ("plan", "compare", "diagnose")


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0, 1 if `diagnose` found something, or 2 if what was asked can't be done."""
    arguments = sys.argv[1:] if args is None else list(args)
    with lasting_output() as output:
        code = _main(arguments)
    return 2 if output.error is not None and _command(arguments) in PRINTS_ONLY else code


def _main(arguments: list[str]) -> int:
    if "" not in sys.path:
        sys.path.insert(0, "")  # a reward of the user's own is found from here, as with `python -m`
    parser = Parser(
        prog="grpo-recipes",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for add in (_add_init, _add_plan, _add_train, _add_evaluate, _add_compare, _add_diagnose, _add_report, _add_merge):
        add(commands)
    asked = _command(arguments)
    if asked is not None and asked not in commands.choices:
        otherwise = f": choose {_either(commands.choices)}"
        parser.error(f"there is no command `{asked}`{did_you_mean(asked, commands.choices, otherwise=otherwise)}")
    options, rest = parser.parse_known_args(arguments)
    if options.command is None:
        parser.error(f"name a command, {_either(commands.choices)}: `grpo-recipes --help` says what each does")
    known = commands.choices[options.command].long_options
    if rest and options.command not in ("plan", "train"):  # whose recipe they override
        parser.error(f"unknown argument `{rest[0]}`{did_you_mean(rest[0].partition('=')[0], known)}")
    try:
        with visible_messages():
            return _run(options, rest, known)
    except UserError as error:
        say_error(error)
        return 2
    except KeyboardInterrupt:  # `train` and `evaluate` have words of their own
        say("stopped by Ctrl-C", to_stderr=True)
        return INTERRUPTED


def _run(options: argparse.Namespace, rest: Sequence[str], known: Sequence[str]) -> int:
    """What the command does; `rest` overrides a recipe's keys."""
    match options.command:
        case "init":
            return first_recipe(options.path, options.output, options.model)
        case "plan":
            return plan_recipe(options, rest, known)
        case "train":
            return train_recipe(options, rest, known)
        case "evaluate":
            return evaluate_policy(options)
        case "compare":
            return compare_evaluations(options.first, options.second, as_json=options.json)
        case "report":
            return report_run([options.run, *options.others], options.output)
        case "merge":
            return merge_adapter(options.run, options.output)
        case _:
            return diagnose_run(options.run, as_json=options.json)


def _command(arguments: Sequence[str]) -> str | None:
    return next((word for word in arguments if not word.startswith("-")), None)


def _either(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


def _add_init(commands: Any) -> None:
    init = commands.add_parser("init", help="write a first recipe for a table of problems")
    init.add_argument("path", help="a CSV, JSON, JSONL or Parquet file, a glob of them, a saved folder, or a hub id")
    init.add_argument("--model", metavar="MODEL", help="the model to train: a folder or a hub id (default: a Qwen2.5)")
    init.add_argument(
        "--output", metavar="FILE", type=Path, help="the recipe's file (default: the table's name, .yaml)"
    )


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="check a recipe and print its batch geometry and memory",
        epilog="Further --key value pairs override the recipe, as in training.",
    )
    plan.add_argument(
        "recipe", nargs="?", help="a YAML file, or the name of a shipped recipe (without one: lists those)"
    )
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
    plan.add_argument("--build", action="store_true", help="also build rewards of other packages, as training does")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON, sizes in bytes")
    plan.add_argument(
        "--resolved", action="store_true", help="print the recipe, TRL's defaults included, as YAML instead"
    )


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="check a recipe, then train it",
        epilog="Further --key value pairs override the recipe; `python -m grpo_recipes.train --help` lists the keys.",
    )
    train.add_argument("recipe", help="a YAML file, or the name of a shipped recipe")
    train.add_argument(
        "--accelerate_config",
        metavar="FILE",
        help="how processes are laid out: an accelerate configuration, or the name of a shipped one (default: one process, "
        "or one for each GPU)",
    )
    train.add_argument("--num_processes", metavar="N", type=int, help="start this many processes (default: the file's)")


def _add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare", help="two evaluations on the same problems: the difference, with its interval"
    )
    compare.add_argument("first", metavar="A", type=Path, help="the folder of a finished evaluation")
    compare.add_argument("second", metavar="B", type=Path, help="the folder of another")
    compare.add_argument("--json", action="store_true", help="print the comparison as JSON")


def _add_merge(commands: Any) -> None:
    merge = commands.add_parser("merge", help="make a run's adapter and its base one model")
    merge.add_argument("run", type=Path, help="a run with an adapter, or one of its checkpoints")
    merge.add_argument("--output", metavar="FOLDER", type=Path, required=True, help="folder for the model")


def _add_diagnose(commands: Any) -> None:
    diagnose = commands.add_parser("diagnose", help="say what looks wrong in a run (exit code 1 if anything does)")
    diagnose.add_argument("run", type=Path, help="the `output_dir` of a run, finished or under way")
    diagnose.add_argument("--json", action="store_true", help="print the diagnosis as JSON")


def _add_report(commands: Any) -> None:
    report = commands.add_parser("report", help="one page on a run: pictures, completions, findings, the recipe")
    report.add_argument("run", type=Path, help="the `output_dir` of a run, finished or under way")
    report.add_argument("others", metavar="run", type=Path, nargs="*", help="more runs, drawn into the same pictures")
    report.add_argument(
        "--output", metavar="FOLDER", type=Path, help="folder for report.html and the SVGs (default: RUN/report)"
    )


@fewer_library_messages()
def first_recipe(path: str, output: Path | None, model: str | None) -> int:
    """Write a first recipe for a table and check it. Returns 0; raises `UserError` for a table that can't be used."""
    from grpo_recipes.checks.checks import Machine, check
    from grpo_recipes.plan import init as first
    from grpo_recipes.recipe.recipe import parse_recipe

    file, machine = output or first.default_output(path), Machine.here()
    guess = first.write_first_recipe(path, file, model or first.MODEL, has_gpu=machine.bf16)
    say(f"wrote {file}: {guess.describe()}")
    check(parse_recipe(["--config", str(file)]), machine)
    say(f"next: grpo-recipes plan {file}, then grpo-recipes train {file}")
    return 0


def plan_recipe(options: argparse.Namespace, overrides: Sequence[str], known: Sequence[str] = ()) -> int:
    """Print what a recipe comes to. Returns 0; raises `UserError` if it can't run as written.

    `known` are the command's own options, one of which an unknown override may mean.
    """
    from grpo_recipes.plan.plan import plan, resolved_yaml, shipped_recipes

    if options.recipe is None:
        say(shipped_recipes())
        return 0
    if options.resolved:
        say(resolved_yaml(["--config", options.recipe, *overrides], known).rstrip())
        return 0
    planned = plan(
        ["--config", options.recipe, *overrides],
        accelerate_config=options.accelerate_config,
        num_processes=options.num_processes,
        gpu_memory=options.gpu_memory,
        model_config_file=options.model_config,
        build=options.build,
        options=known,
    )
    if options.json:
        say(json.dumps(planned.as_dict(), indent=2))
    else:
        show(*planned.describe())
    return 0


@fewer_library_messages()
def train_recipe(options: argparse.Namespace, overrides: Sequence[str], known: Sequence[str]) -> int:
    """Check a recipe for the processes that it will run on, train it on them, and return the exit code of the training.

    Raises:
        UserError: The recipe can't run as written. No process was started.
    """
    try:
        from grpo_recipes.checks.checks import Machine, check_launch, choose_layout
        from grpo_recipes.process.launcher import launch
        from grpo_recipes.recipe.recipe import parse_recipe
        from grpo_recipes.runs.resume import newest_checkpoint

        arguments = ["--config", options.recipe, *overrides]
        recipe = parse_recipe(arguments, known)
        layout = choose_layout(options.accelerate_config, options.num_processes, use_cpu=recipe.config.use_cpu)
        processes = layout.num_processes
        check_launch(recipe, replace(Machine.here(), num_processes=processes))

        def resume_hint() -> str:
            checkpoint = newest_checkpoint(recipe.output_dir, processes)
            way = f"goes on from {checkpoint.name}" if checkpoint else "starts again: no checkpoint had been saved"
            return f"`--resume_from_checkpoint true` {way}"

        say(f"{processes} process{'es' * (processes > 1)}, laid out by {layout.config}")
        return launch(layout, arguments, resume_hint)
    except KeyboardInterrupt:
        say(f"stopped by Ctrl-C: {NOTHING_DONE}", to_stderr=True)
        return INTERRUPTED


def _add_evaluate(commands: Any) -> None:
    evaluate = commands.add_parser("evaluate", help="accuracy on held-out problems, with 95 %% intervals; resumable")
    evaluate.add_argument("model", help="a model or adapter: a folder, a run, or a hub id")
    evaluate.add_argument(
        "--recipe", metavar="RECIPE", help="take dataset, tags and lengths from this recipe (default: the run's own)"
    )
    evaluate.add_argument("--dataset", metavar="NAME", help="gsm8k (the default), rlaif or arithmetic")
    evaluate.add_argument(
        "--path",
        nargs="+",
        default=[],
        help="a table: a file, a folder or a hub id; of several, each has a folder of its own",
    )
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
    evaluate.add_argument("--vllm", action="store_true", help="generate with vLLM, in the checkpoint's own dtype")
    evaluate.add_argument("--vllm_server_base_url", metavar="URL", help="a running vLLM server of the model")
    evaluate.add_argument("--vllm_tensor_parallel_size", metavar="N", type=int, help="GPUs that share the model")
    evaluate.add_argument(
        "--vllm_max_model_length", metavar="N", type=int, help="tokens of prompt and completion (default: the model's)"
    )
    evaluate.add_argument(
        "--vllm_gpu_memory_utilization", metavar="SHARE", type=float, help="of each GPU's memory (default: vLLM's)"
    )
    evaluate.add_argument(
        "--output",
        metavar="FOLDER",
        type=Path,
        help="folder for the result, or for those of several tables (default: MODEL/evaluations/after, with -TABLE added for "
        "each of several tables, and -N-samples with --samples N)",
    )
    evaluate.add_argument("--json", action="store_true", help="print what evaluation.json holds; of several, by --path")


@fewer_library_messages()
def evaluate_policy(options: argparse.Namespace) -> int:
    """Evaluate a model and print the result.

    Returns 0, or 130 after Ctrl-C; raises `UserError` for what can't be evaluated.
    """
    try:
        from grpo_recipes.evaluation import estimates, evaluate

        given = {key: value for key, value in vars(options).items() if key not in ("command", "path", "json")}
        given["tags"] = tuple(options.tags) if options.tags else None
        requests = evaluate.Request(**given).on_each(options.path)
        found = {}
        for request in requests:
            result = evaluate.evaluate_request(request)
            found[str(request.path)] = result
            if not options.json:
                show(*([f"{request.path}:"] if len(requests) > 1 else []), *estimates.describe(result))
        if options.json:
            say(json.dumps(found if len(requests) > 1 else result, indent=2))
        return 0
    except KeyboardInterrupt as interrupted:
        # Without words of its own it came while modules were loaded or files read.
        say(str(interrupted) or "stopped by Ctrl-C: nothing was evaluated", to_stderr=True)
        return 130


def compare_evaluations(first: Path, second: Path, *, as_json: bool = False) -> int:
    """Print how two evaluations differ. Returns 0; raises `UserError` if they can't be compared."""
    from grpo_recipes.evaluation import estimates, evaluate

    result = evaluate.compare(first, second)
    if as_json:
        say(json.dumps(result, indent=2))
    else:
        show(*estimates.describe_comparison(result))
    return 0


@fewer_library_messages()
def merge_adapter(folder: Path, output: Path) -> int:
    """Write a run's adapter and its base as one model. Returns 0; raises `UserError` where that is not possible."""
    from grpo_recipes.evaluation.merge import merge

    say(merge(folder, output))
    return 0


def report_run(folders: Sequence[Path], output: Path | None) -> int:
    """Write the report of one or more runs. Returns 0, or 2 if a run holds nothing to check; raises `UserError`."""
    from grpo_recipes.reports.diagnostics import diagnose
    from grpo_recipes.reports.report import write_report
    from grpo_recipes.reports.run import Run
    from grpo_recipes.runs.files import inside

    runs = [Run.read(path) for path in folders]
    try:
        say(write_report(runs, output or inside(folders[0], "report")))
    except OSError as error:
        raise UserError(f"the report can't be written ({error}): give another --output") from error
    for run in runs:
        if not (diagnosis := diagnose(run)).checked:
            raise UserError(f"{run.folder}: {diagnosis.coverage}")
    return 0


def diagnose_run(folder: Path, *, as_json: bool = False) -> int:
    """Print what looks wrong in a run, and which checks had data.

    Returns 0 if nothing does, 1 if something does; raises `UserError` if the run can't be read or no check had data.
    """
    from grpo_recipes.reports.diagnostics import as_dict, as_table, diagnose
    from grpo_recipes.reports.run import Run

    diagnosis = diagnose(Run.read(folder))
    if as_json:
        say(json.dumps(as_dict(diagnosis), indent=2))
    elif diagnosis.findings or diagnosis.checked:
        show(*as_table(diagnosis))
    if not diagnosis.checked:
        raise UserError(f"{folder}: {diagnosis.coverage}")
    return 1 if diagnosis.findings else 0


if __name__ == "__main__":
    sys.exit(main())
