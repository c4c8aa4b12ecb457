"""The command line `grpo-recipes COMMAND`, and its commands.

- `init` writes a first recipe for a table.
- `plan` prints what a recipe does on a machine, without loading a model.
- `preview` samples the untrained policy, and says what its rewards make of it.
- `train` checks a recipe and starts its processes.
- `evaluate` measures accuracy on held-out problems.
- `compare` compares two evaluations.
- `diagnose` prints what looks wrong in a run.
- `report` writes a page on one or more runs.
- `merge` merges an adapter into its base.
- `chat` answers prompts, as in training.
- `export` writes a folder for vLLM, transformers and llama.cpp.

Each command has a function that declares its options (`_add_plan`) and a function that runs it (`plan_recipe`). The
latter imports what the command needs, because torch and transformers take seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_recipes import __version__
from grpo_recipes.process.faults import RunFault, no_exit
from grpo_recipes.process.messages import fewer_library_messages
from grpo_recipes.process.signals import INTERRUPTED, NOTHING_DONE
from grpo_rewards.errors import UserError, did_you_mean
from grpo_rewards.startup import prepare_libraries
from grpo_rewards.terminal import CommandParser, lasting_output, say, say_error, show, visible_messages

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[CommandParser]

DESCRIPTION = "GRPO training from a recipe: plan it, run it, evaluate its policy, diagnose the run."
EPILOG = """`grpo-recipes COMMAND --help` describes a command,
and `python -m grpo_recipes.train --help` the keys of a recipe.
On several machines, start training with accelerate's own launcher on each machine:

  accelerate launch --config_file FILE -m grpo_recipes.train --config RECIPE
"""

TASKS = (
    "code", "numbers", "boxed", "multiple_choice", "classification", "extraction", "words", "text", "instructions",
    "judged",
)  # fmt: skip
"""Tasks of `init`: `plan.forms.TASKS`, whose import takes seconds."""

OVERRIDES = "Further --key value pairs override the recipe, as in training."

PRINTS_ONLY = ("plan", "preview", "compare", "diagnose", "chat")
"""Commands whose only result is what they print. They have failed if printing failed."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command in `args` (default: the command line).

    Returns:
        0, 1 if `diagnose` found something or a training failed, 2 if the command can't run as written, or 130 after
        Ctrl-C.
    """
    prepare_libraries()
    if "" not in sys.path:
        sys.path.insert(0, "")  # rewards of the user are importable from the working directory, as with `python -m`
    with lasting_output() as output:
        options = parse(sys.argv[1:] if args is None else args)
        code = run(options)
    return 2 if output.error is not None and options.command in PRINTS_ONLY else code


@cache
def _parser() -> tuple[CommandParser, Commands]:
    form = argparse.RawDescriptionHelpFormatter
    parser = CommandParser(prog="grpo-recipes", description=DESCRIPTION, epilog=EPILOG, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    first = (_add_init, _add_plan, _add_preview, _add_train)
    for add in (*first, _add_evaluate, _add_compare, _add_diagnose, _add_report, _add_merge, _add_chat, _add_export):
        add(commands)
    return parser, commands


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command, with its function as `function` and overrides of the recipe as `overrides`."""
    parser, commands = _parser()
    parser.check_command(arguments, commands.choices)
    options, rest = parser.parse_known_args(arguments)
    options.known = commands.choices[options.command].long_options
    options.overrides = rest
    if rest and options.command not in ("plan", "preview", "train"):
        hint = did_you_mean(rest[0].partition("=")[0], options.known, "`--help` lists all")
        parser.error(f"unknown argument `{rest[0]}`: {hint}")
    return options


def run(options: argparse.Namespace) -> int:
    """Run the function of a command, and print its error on one line. Returns the exit code."""
    try:
        with visible_messages(), no_exit():
            return options.function(options)
    except UserError as error:
        say_error(error)
        return 2
    except RunFault as error:
        say_error(error)
        return 1
    except KeyboardInterrupt:  # `train` and `evaluate` print a message of their own
        say("stopped by Ctrl-C", to_stderr=True)
        return INTERRUPTED


def _add(commands: Commands, name: str, function: Callable[..., int], purpose: str, epilog: str | None = None) -> Any:
    """Add a command with its function, and return the function that adds its arguments."""
    command = commands.add_parser(name, help=purpose, epilog=epilog)
    command.set_defaults(function=function)
    return command.add_argument


def _say_json(result: object) -> None:
    """Print a result as JSON, with a line for each entry."""
    say(json.dumps(result, indent=2))


def _print_result(options: argparse.Namespace, result: Any) -> int:
    """Print a plan or a preview for the terminal, or as JSON with `--json`. Return the exit code."""
    if options.json:
        _say_json(result.as_dict())
    else:
        show(*result.describe())
    return 0


def _add_init(commands: Commands) -> None:
    option = _add(commands, "init", first_recipe, "write a first recipe for a table of problems")
    option("path", help="a CSV, JSON, JSONL or Parquet file, a glob of files, a saved folder, or a hub id")
    option("--model", help="model to train: a folder or a hub id (default: a Qwen2.5)")
    option("--output", metavar="FILE", type=Path, help="file of the recipe (default: the table's name, .yaml)")
    option("--task", choices=TASKS, help="what the answers are (default: by their form)")
    option("--question", metavar="COLUMN", help="column with the question, or with the text to work on")
    option("--answer", metavar="COLUMN", help="column with the answer, label, object or tests")
    option("--choices", metavar="COLUMN", help="column with the choices, or one column a choice, separated by commas")
    option("--decimal", choices=("point", "comma"), help="decimal mark of the answers, if it is ambiguous")


@fewer_library_messages()
def first_recipe(options: argparse.Namespace) -> int:
    """Write a first recipe for a table and check it. Raises `UserError` for a table that can't be used."""
    from grpo_recipes.checks.checks import Machine
    from grpo_recipes.plan import init

    file = options.output or init.default_output(options.path)
    wishes = init.Wishes(options.question, options.answer, options.choices, options.task, options.decimal)
    model = options.model or init.MODEL
    proposal = init.write_first_recipe(options.path, file, model, machine=Machine.here(), wishes=wishes)
    say("\n  ".join([f"wrote {file}", *proposal.notes]))
    say(f"next: grpo-recipes plan {file}, then grpo-recipes train {file}")
    return 0


def _add_plan(commands: Commands) -> None:
    option = _add(commands, "plan", plan_recipe, "check a recipe and print its batch geometry and memory", OVERRIDES)
    option("recipe", nargs="?", help="a YAML file, or the name of a shipped recipe (default: list the shipped recipes)")
    files = "accelerate configuration, or a shipped one (default: this machine)"
    option("--accelerate_config", metavar="FILE", help=files)
    option("--num_processes", metavar="N", type=int, help="number of processes (default: the file's, or 1)")
    option("--gpu_memory", metavar="SIZE", help="check whether the run fits on GPUs of this size, such as 80GB")
    option("--model_config", metavar="FILE", help="config.json of the model, if the hub can't be reached")
    option("--build", action="store_true", help="also build the rewards of other packages, as training does")
    option("--json", action="store_true", help="print the plan as JSON, with sizes in bytes")
    option("--resolved", action="store_true", help="print the recipe with TRL's defaults as YAML, instead of the plan")


@fewer_library_messages()
def plan_recipe(options: argparse.Namespace) -> int:
    """Print the plan of a recipe. Raises `UserError` if the recipe can't run as written."""
    from grpo_recipes.plan.plan import plan, resolved_yaml, shipped_recipes

    if options.recipe is None:
        say(shipped_recipes())
        return 0
    arguments = ["--config", options.recipe, *options.overrides]
    if options.resolved:
        say(resolved_yaml(arguments, options.known).rstrip())
        return 0
    names = ("accelerate_config", "num_processes", "gpu_memory", "build")
    given = {name: getattr(options, name) for name in names}
    planned = plan(arguments, model_config_file=options.model_config, options=options.known, **given)
    return _print_result(options, planned)


def _add_preview(commands: Commands) -> None:
    purpose = "sample the untrained policy: completions and their rewards"
    option = _add(commands, "preview", preview_recipe, purpose, f"{OVERRIDES} Nothing is trained or written.")
    option("recipe", help="a YAML file, or the name of a shipped recipe")
    option("--prompts", metavar="N", type=int, default=8, help="number of prompts (default: 8)")
    option("--json", action="store_true", help="print the preview as JSON, with every completion")


@fewer_library_messages()
def preview_recipe(options: argparse.Namespace) -> int:
    """Print a sample of a recipe's untrained policy.

    Raises:
        UserError: the recipe can't run as written.
        RunFault: the policy or a reward failed on the sample.
    """
    from grpo_recipes.run.preview import preview

    arguments = ["--config", options.recipe, *options.overrides]
    with redirect_stdout(sys.stderr):  # messages of the preparation
        found = preview(arguments, prompts=options.prompts, options=options.known)
    return _print_result(options, found)


def _add_train(commands: Commands) -> None:
    keys = "Further --key value pairs override the recipe; `python -m grpo_recipes.train --help` lists the keys."
    option = _add(commands, "train", train_recipe, "check a recipe, then train it", keys)
    option("recipe", help="a YAML file, or the name of a shipped recipe")
    files = "accelerate configuration, or a shipped one (default: one process, or one for each GPU)"
    option("--accelerate_config", metavar="FILE", help=files)
    option("--num_processes", metavar="N", type=int, help="number of processes (default: the file's)")


@fewer_library_messages()
def train_recipe(options: argparse.Namespace) -> int:
    """Check a recipe for the processes that it will run on, train it on them, and return the exit code of the training.

    Raises:
        UserError: the recipe can't run as written. No process was started.
    """
    try:
        from grpo_recipes.checks.checks import Machine, check_launch
        from grpo_recipes.recipe.recipe import parse_recipe
        from grpo_recipes.run.launcher import choose_layout, launch
        from grpo_recipes.runs.resume import newest_checkpoint

        arguments = ["--config", options.recipe, *options.overrides]
        recipe = parse_recipe(arguments, options.known)
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


def _add_evaluate(commands: Commands) -> None:
    purpose = "accuracy on held-out problems, with 95 %% intervals; resumable"
    option = _add(commands, "evaluate", evaluate_policy, purpose)
    option("model", help="a model or adapter: a folder, a run, or a hub id")
    option("--recipe", help="recipe with the dataset, tags and lengths (default: the run's own)")
    option("--dataset", metavar="NAME", help="gsm8k (the default), rlaif or arithmetic")
    option("--path", nargs="+", default=[], help="one or more tables: each a file, a folder or a hub id")
    option("--split", help="default: the recipe's eval_split, or test if --path or no recipe is given")
    option("--system_prompt", metavar="TEXT", help="name of a system prompt, or its text")
    option("--prompt_format", metavar="FORMAT", help="conversational or text")
    option("--tags", nargs=2, metavar=("REASONING", "ANSWER"), help="the two tags of the requested format")
    option("--samples", metavar="N", type=int, default=1, help="completions per problem (default: 1)")
    option("--temperature", metavar="T", type=float, help="default: 0 (greedy) for one sample, or 1 for more")
    option("--max_new_tokens", metavar="N", type=int, help="default: the recipe's max_completion_length, or 512")
    option("--limit", metavar="N", type=int, help="evaluate the first N problems only")
    option("--batch_size", metavar="N", type=int, default=64, help="completions generated at once (default: 64)")
    option("--seed", metavar="N", type=int, default=0, help="random seed for sampling completions (default: 0)")
    option("--vllm", action="store_true", help="generate with vLLM, in the checkpoint's own dtype")
    option("--vllm_server_base_url", metavar="URL", help="address of a running vLLM server of the model")
    option("--vllm_tensor_parallel_size", metavar="N", type=int, help="number of GPUs that share the model")
    tokens = "tokens of prompt and completion (default: the model's)"
    option("--vllm_max_model_length", metavar="N", type=int, help=tokens)
    option("--vllm_gpu_memory_utilization", metavar="SHARE", type=float, help="share of each GPU (default: vLLM's)")
    folder = "folder for the results (default: MODEL/evaluations/after, with -TABLE and -N-samples added where needed)"
    option("--output", metavar="FOLDER", type=Path, help=folder)
    option("--json", action="store_true", help="print the contents of evaluation.json, by --path if there are several")


@fewer_library_messages()
def evaluate_policy(options: argparse.Namespace) -> int:
    """Evaluate a model and print the result. Raises `UserError` if the model can't be evaluated."""
    try:
        from grpo_recipes.evaluation import evaluate, summary

        own = ("command", "function", "known", "overrides", "path", "json")
        given = {key: value for key, value in vars(options).items() if key not in own}
        given["tags"] = tuple(options.tags) if options.tags else None
        requests = evaluate.Request(**given).on_each(options.path)
        found = {}
        for request in requests:
            result = evaluate.evaluate_request(request)
            found[str(request.path)] = result
            if not options.json:
                title = [f"{request.path}:"] if len(requests) > 1 else []
                show(*title, *summary.describe(result))
        if options.json:
            _say_json(found if len(requests) > 1 else result)
        return 0
    except KeyboardInterrupt as interrupted:
        # An interruption while modules are loaded or files are read has no message.
        say(str(interrupted) or "stopped by Ctrl-C: nothing was evaluated", to_stderr=True)
        return INTERRUPTED


def _add_compare(commands: Commands) -> None:
    purpose = "difference of two evaluations on the same problems, with its interval"
    option = _add(commands, "compare", compare_evaluations, purpose)
    option("first", metavar="A", type=Path, help="folder of a finished evaluation")
    option("second", metavar="B", type=Path, help="folder of another finished evaluation")
    option("--json", action="store_true", help="print the comparison as JSON")


def compare_evaluations(options: argparse.Namespace) -> int:
    """Print how two evaluations differ. Raises `UserError` if they can't be compared."""
    from grpo_recipes.evaluation import summary

    result = summary.compare(options.first, options.second)
    if options.json:
        _say_json(result)
    else:
        show(*summary.describe_comparison(result))
    return 0


def _add_diagnose(commands: Commands) -> None:
    option = _add(commands, "diagnose", diagnose_run, "print what looks wrong in a run (exit code 1 if anything does)")
    option("run", type=Path, help="`output_dir` of a run, finished or under way")
    option("--json", action="store_true", help="print the diagnosis as JSON")


def diagnose_run(options: argparse.Namespace) -> int:
    """Print what looks wrong in a run, and which checks had data. Returns 1 if anything looks wrong.

    Raises:
        UserError: the run can't be read, or no check had data.
    """
    from grpo_recipes.reports.diagnostics import as_dict, as_table, diagnose
    from grpo_recipes.reports.run import Run

    diagnosis = diagnose(Run.read(options.run))
    if options.json:
        _say_json(as_dict(diagnosis))
    elif diagnosis.findings or diagnosis.checked:
        show(*as_table(diagnosis))
    if not diagnosis.checked:
        raise UserError(options.run, diagnosis.coverage, "name a run with more steps")
    return 1 if diagnosis.findings else 0


def _add_report(commands: Commands) -> None:
    purpose = "page on one or more runs: charts, completions, findings, the recipe"
    option = _add(commands, "report", report_runs, purpose)
    option("run", type=Path, help="`output_dir` of a run, finished or under way")
    option("others", metavar="run", type=Path, nargs="*", help="more runs, drawn into the same charts")
    folder = "folder for the pages and evaluation.svg (default: RUN/report)"
    option("--output", metavar="FOLDER", type=Path, help=folder)


def report_runs(options: argparse.Namespace) -> int:
    """Write the report of one or more runs.

    Raises:
        UserError: The report can't be written, or no check of a run had data.
    """
    from grpo_recipes.reports.diagnostics import diagnose
    from grpo_recipes.reports.report import write_report
    from grpo_recipes.reports.run import Run
    from grpo_recipes.runs.files import inside

    runs = [Run.read(path) for path in (options.run, *options.others)]
    try:
        say(write_report(runs, options.output or inside(options.run, "report")))
    except OSError as error:
        raise UserError("the report", f"it can't be written ({error})", "give another --output") from error
    for run in runs:
        diagnosis = diagnose(run)
        if not diagnosis.checked:
            raise UserError(run.folder, diagnosis.coverage, "name a run with more steps")
    return 0


def _add_merge(commands: Commands) -> None:
    option = _add(commands, "merge", merge_adapter, "merge a run's adapter into its base, as one model")
    option("run", type=Path, help="a run with an adapter, or one of its checkpoints")
    option("--output", metavar="FOLDER", type=Path, required=True, help="folder for the merged model")


@fewer_library_messages()
def merge_adapter(options: argparse.Namespace) -> int:
    """Write a run's adapter and its base as one model. Raises `UserError` if they can't be merged."""
    from grpo_recipes.evaluation.merge import merge

    say(merge(options.run, options.output))
    return 0


def _add_chat(commands: Commands) -> None:
    purpose = "talk to a trained model, prompted and sampled as in training"
    keys = "Each line of standard input is a message. Ctrl-C stops an answer, Ctrl-D leaves."
    option = _add(commands, "chat", chat_with_model, purpose, keys)
    option("model", help="a model or adapter: a folder, a run, or a hub id")
    option("--recipe", help="recipe with system prompt, template and length (default: the run's)")
    option("--prompt", metavar="TEXT", help="answer this message and end")
    option("--temperature", metavar="T", type=float, help="0 for greedy decoding (default: the recipe's, or 1)")
    option("--max_new_tokens", metavar="N", type=int, help="default: the recipe's max_completion_length, or 512")
    option("--seed", metavar="N", type=int, default=0, help="random seed for sampling answers (default: 0)")


@fewer_library_messages()
def chat_with_model(options: argparse.Namespace) -> int:
    """Answer a prompt, or the lines of standard input. Raises `UserError` if the model or an option is wrong."""
    from grpo_recipes.evaluation.chat import chat

    names = ("model", "recipe", "prompt", "temperature", "max_new_tokens", "seed")
    chat(**{name: getattr(options, name) for name in names})
    return 0


def _add_export(commands: Commands) -> None:
    purpose = "write a model for vLLM, transformers and llama.cpp, adapter merged"
    option = _add(commands, "export", export_model, purpose)
    option("run", type=Path, help="a run, one of its checkpoints, or the folder of a model or adapter")
    option("--to", metavar="FOLDER", type=Path, required=True, help="folder to write, which is new or empty")


@fewer_library_messages()
def export_model(options: argparse.Namespace) -> int:
    """Write a model as other programs read it, and print how. Raises `UserError` if it can't be written."""
    from grpo_recipes.evaluation.export import export

    say("\n".join(export(options.run, options.to)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
