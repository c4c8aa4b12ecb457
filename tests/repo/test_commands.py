"""The commands of the documents: each is parsed by its own program, and each complete `plan` runs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from grpo_recipes import cli
from grpo_recipes.recipe.recipe import find_file, parse_recipe, shipped
from grpo_rewards import cli as rewards_cli
from grpo_rewards.errors import UserError
from tests.support.grids import only

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("*.md", "docs/**/*.md", "re*/*.md", "benchmarks/results/*.md", "notebooks/*.ipynb")
DOCUMENTS = {
    str(path.relative_to(ROOT)): path
    for pattern in (*PATTERNS, "recipes/**/*.yaml", "accelerate_configs/*")
    for path in sorted(ROOT.glob(pattern))
    if path.name != "CHANGELOG.md"
}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
REFUSED = ("--lerning_rate 1e-5", "--dataset.size 4", "--num_generations 7")
"""Ends of the commands that pages show because `plan` refuses them."""


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines that may be commands: of blocks, of comments in YAML, and the text between backquotes."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join(line for cell in json.loads(text)["cells"] for line in notebook_lines(cell))
    elif path.suffix == ".sbatch":
        text = f"```bash\n{text}\n```"
    elif path.suffix == ".yaml":
        text = "\n".join(re.findall(r"(?:^|\s)# ?(.*)", text))
    prose = []
    block = None
    for line in re.sub(r" *\\\n\s*", " ", text).splitlines():
        if line.startswith("```"):
            block = line.removeprefix("```") if block is None else None
        elif block in ("bash", "console") or (block is None and line.startswith("  ")):
            yield line.strip().removeprefix("$ ")
        elif block is None:
            prose.append(line)
    yield from (" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", "\n".join(prose)))


def notebook_lines(cell: dict) -> Iterator[str]:
    for line in "".join(cell["source"]).splitlines():
        yield line if cell["cell_type"] == "markdown" else f"    {line.strip().removeprefix('!')}"


def commands(path: Path) -> list[list[str]]:
    """Return the words of each command of one of the `PROGRAMS` in a document, each command once."""
    found: dict[str, list[str]] = {}
    pending = list(lines_of(path))
    while pending:
        lexer = shlex.shlex(pending.pop(0), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # an apostrophe in other text
            continue
        command: list[str] = []
        for word in [*words, ";"]:
            if not set(word) <= set("();<>|&"):
                command.append(word)
                continue
            while command and re.fullmatch(r"\w+=\S*|nohup|exec", command[0]):
                del command[0]
            if command and command[0] == "srun":
                pending.append(command[-1])  # the script of `bash -c`
            if len(command) > 1 and command[0] in PROGRAMS:
                found[shlex.join(command)] = command
            command = []
    return list(found.values())


# Parsers of each program


def check_ours(words: Sequence[str]) -> None:
    options = cli.parse(words)
    if options.command in ("plan", "preview", "train"):
        check_recipe(options.recipe, *options.overrides)
    if config := getattr(options, "accelerate_config", None):
        find_file("accelerate_configs", config)


@cache
def check_recipe(recipe: str | None, *overrides: str) -> None:
    """Parse overrides of a shipped recipe, or of the quickstart's in place of one of the reader's own."""
    is_shipped = recipe is not None and shipped("recipes", recipe) is not None
    parse_recipe(["--config", recipe if recipe and is_shipped else "quickstart", *overrides])


launch_parser = cache(launch_command_parser)


def check_accelerate(words: Sequence[str]) -> None:
    if len(words) == 1:  # the name of the command
        return
    options = launch_parser().parse_args(words[1:])
    assert options.config_file is None or (ROOT / options.config_file).is_file(), options.config_file
    if options.training_script == "grpo_recipes.train":
        check_python(["-m", options.training_script, *options.training_script_args])


def check_make(words: Sequence[str]) -> None:
    for word in words:
        name, is_variable, _ = word.partition("=")
        assert re.search(rf"^{name} \?=" if is_variable else rf"^{name}:", MAKEFILE, re.MULTILINE), word


def check_python(words: Sequence[str]) -> None:
    """Look up a script, and its options in its text."""
    if words[:2] == ["-m", "grpo_recipes.train"]:
        if words[2:] not in ([], ["--help"]):
            assert words[2] == "--config"
            check_recipe(*words[3:])
        return
    if words[:2] == ["-m", "pytest"]:
        check_paths(words[2:])
        return
    script, *arguments = words[1:] if words[0] == "-m" else words
    if script.startswith("runs/"):  # a script that DeepSpeed writes
        return
    text = (ROOT / (f"{script.replace('.', '/')}.py" if words[0] == "-m" else script)).read_text(encoding="utf-8")
    for option in arguments:
        assert not option.startswith("-") or f'"{option}"' in text, option


def check_paths(words: Sequence[str]) -> None:
    assert [word for word in words if word.startswith("tests/") and not (ROOT / word).exists()] == []


PROGRAMS: Mapping[str, Callable[[Sequence[str]], object]] = {
    "grpo-recipes": check_ours,
    "grpo-rewards": rewards_cli._options,
    "accelerate": check_accelerate,
    "make": check_make,
    "python": check_python,
    "pytest": check_paths,
}


def test_a_command_is_one_of_its_program(capsys: pytest.CaptureFixture[str]) -> None:
    """A word in capitals, a variable or a name in braces is a value of the reader's choice, and a number here."""
    wrong = []
    typed = {shlex.join(words): document for document in DOCUMENTS for words in commands(DOCUMENTS[document])}
    for command, document in typed.items():
        program, *words = shlex.split(command)
        values = ["1" if re.fullmatch(r"[A-Z]+|\{[A-Z]+\}|\$\w+", word) else word for word in words]
        if program in ("grpo-recipes", "grpo-rewards") and len(words) == 1:  # the name of a command
            values.append("--help")
        if command.endswith(REFUSED):
            continue
        try:
            PROGRAMS[program](values)
        except (UserError, AssertionError, OSError) as error:
            wrong.append(f"{document}: {command}: {error}")
        except SystemExit as end:
            if end.code != 0:
                wrong.append(f"{document}: {command}: {capsys.readouterr().err.strip()}")
    assert not wrong, "\n".join(wrong)


PLANS = sorted(
    {
        shlex.join(words[1:])
        for path in DOCUMENTS.values()
        for words in commands(path)
        if words[:2] == ["grpo-recipes", "plan"] and words[2:] and (shipped("recipes", words[2]) is not None)
    }
)


@pytest.mark.parametrize("command", only(["plan gspo"], PLANS))
def test_a_complete_plan_runs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It refuses the recipe where the page says so."""
    assert cli.main(shlex.split(command)) == (2 if command.endswith(REFUSED) else 0)
    assert "Traceback" not in capsys.readouterr().err
