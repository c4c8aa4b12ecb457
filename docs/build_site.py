"""Build the documentation as a site in build/site: python docs/build_site.py, from a checkout (`make docs`).

The pages are docs/*.md, those of `ELSEWHERE`, and those that are made from the code: the commands, the Python API and
the checks of a run, which are committed in docs/ and renewed here, and the errors, which only the site has. Each is
written to build/docs with its links turned to the other pages, or, where a link leads to another file of the
repository, to that file on the web; mkdocs then builds the site and fails on a link, an anchor or a page that is
missing.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import error_pages
import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCE_URL = "https://github.com/grpo-recipes/grpo-recipes/blob/main"

ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "recipes/README.md": "shipped-recipes.md",
    "rewards/README.md": "rewards-alone.md",
    **{
        f"benchmarks/results/{path.name}": f"results/{path.name}"
        for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    },
}
"""Pages of the repository that lie outside docs/, by the place that each has in the site."""

ASSETS = ("*.png", "*.svg", "*.js", "*.css")
HOW_TO = frozenset({"Start", "Train"})
"""Sections of the navigation whose pages the search ranks first."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]+)?(?=\))")


class MissingTarget(ValueError):
    """A link to a file that the repository does not have; the message names page and link."""


def main() -> int:
    """Renew the committed pages and build the site. Returns mkdocs' exit code."""
    for place, make in COMMITTED.items():
        (ROOT / "docs" / place).write_text(make(), encoding="utf-8")
    return build(pages(), ROOT)


def build(texts: Mapping[str, str], folder: Path) -> int:
    """Write pages (by their places) and pictures to build/docs in `folder`, and run mkdocs there.

    Returns mkdocs' exit code: not 0 for a link or an anchor that leads nowhere, and a page that `nav` does not have.
    """
    target = folder / "build" / "docs"
    shutil.rmtree(target, ignore_errors=True)
    files = {path.relative_to(ROOT / "docs"): path for pattern in ASSETS for path in (ROOT / "docs").rglob(pattern)}
    for place in [*texts, *files]:
        (target / place).parent.mkdir(parents=True, exist_ok=True)
    first = how_to_pages()
    for place, text in texts.items():
        boost = "---\nsearch: {boost: 4}\n---\n\n" if place in first else ""
        (target / place).write_text(boost + text, encoding="utf-8")
    for place, path in files.items():
        shutil.copy(path, target / place)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # not --quiet, which hides what --strict counts
    return subprocess.run(command, cwd=folder, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode


def how_to_pages() -> set[str]:
    """Return the pages of the sections `HOW_TO` in mkdocs.yml."""
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    found: set[str] = set()
    for section in navigation:
        for title, entries in section.items():
            if title in HOW_TO:
                found.update(place for entry in entries for place in entry.values())
    return found


def pages() -> dict[str, str]:
    """Every page of the site by its place: its Markdown, with links as the site has them."""
    return {**written_pages(), "errors.md": error_pages.page(SOURCE_URL)}


def written_pages() -> dict[str, str]:
    """Return the pages of the repository with their links as the site has them.

    Raises:
        MissingTarget: If a link leads nowhere.
    """
    pages_of_docs = [path.relative_to(ROOT / "docs").as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
    places = {f"docs/{page}": page for page in pages_of_docs} | ELSEWHERE
    return {place: relinked(source, places) for source, place in places.items()}


def relinked(source: str, places: Mapping[str, str]) -> str:
    """Return the text of the file `source` with its relative links as the site has them."""

    def target_of(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2] or ""
        target = PurePosixPath(os.path.normpath(PurePosixPath(source).parent / path)).as_posix()
        place = places.get(target)
        if place is None and not (ROOT / target).exists():
            raise MissingTarget(f"{source}: the link to {path} leads nowhere")
        if place is None and any(PurePosixPath(target).match(f"docs/**/{pattern}") for pattern in ASSETS):
            place = target.removeprefix("docs/")
        if place is not None:
            return os.path.relpath(place, PurePosixPath(places[source]).parent) + anchor
        return f"{SOURCE_URL}/{target}{anchor}"

    return LINK.sub(target_of, (ROOT / source).read_text(encoding="utf-8"))


# Pages made from the code

MADE_BY = "`make docs` writes this page, and a test compares it with the code."


def commands_page() -> str:
    """Return the page of commands: the output of `--help` of each."""
    from grpo_recipes import cli, train
    from grpo_rewards import cli as rewards_cli

    parts = [
        "# Commands\n\nThe `--help` of each command. `python -m grpo_recipes.train --help` lists a recipe's keys. "
        f"{MADE_BY}\n"
    ]
    for program, run in (("grpo-recipes", cli.main), ("grpo-rewards", rewards_cli.main)):
        whole = help_of(run, [])
        parts.append(f"\n## {program}\n\n```text\n{whole}```\n")
        for command in re.findall(r"^    ([a-z]+) ", whole, re.MULTILINE):
            parts.append(f"\n### {program} {command}\n\n```text\n{help_of(run, [command])}```\n")
    parts.append(f"\n## python -m grpo_recipes.train\n\n```text\n{help_of(train.main, [])}```\n")
    return "".join(parts)


def help_of(run: Callable[[list[str]], int], command: list[str]) -> str:
    """Return the output of a command's `--help`, 100 columns wide."""
    said = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            run([*command, "--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return said.getvalue()


PYTHON = {
    "grpo_recipes": ("GRPOTrainer", "Recipe", "run_recipe", "evaluate_model", "ToolError"),
    "grpo_recipes.training.reference": ("without_trl_reference", "set_reference", "kl_to_reference"),
    "grpo_recipes.evaluation.evaluate": ("Request",),
    "grpo_rewards": (),
}
"""The names that a script may import, by module; of a module without names those in its `__all__`."""


def python_page() -> str:
    """Signature and docstring of every public name."""
    head = "What a script may import. [Recipe keys](recipes.md) are those of `Recipe`'s YAML form."
    parts = [f"# Python\n\n{head} {MADE_BY}\n"]
    for name, names in PYTHON.items():
        module = importlib.import_module(name)
        parts.append(f"\n## {name}\n")
        for public in names or module.__all__:
            parts += [f"\n### {public}\n\n", *described(public, getattr(module, public))]
    return "".join(parts)


def described(name: str, thing: object) -> Iterator[str]:
    """Yield a public name in Markdown: its signature, its docstring, and the docstrings of a class's public methods."""
    owner = thing if inspect.isclass(thing) or inspect.isfunction(thing) else type(thing)
    is_error = inspect.isclass(thing) and issubclass(thing, Exception)
    yield f"```python\n{name}{'' if is_error else signature(owner)}\n```\n\n{docstring(thing)}\n"
    if inspect.isclass(thing):
        for method, function in vars(thing).items():
            function = getattr(function, "__func__", function)
            if not method.startswith("_") and inspect.isfunction(function) and "." not in method and function.__doc__:
                first = inspect.cleandoc(function.__doc__).partition("\n\n")[0]
                yield f"\n- `{name}.{method}`: {' '.join(first.split())}"
        yield "\n"


def checks_page() -> str:
    """Return the page of the checks that `diagnose` makes: the docstring of each."""
    from grpo_recipes.reports.diagnostics import CHECKS

    rows = [(check.__name__, " ".join((inspect.getdoc(check) or "").split())) for check in CHECKS]
    return (
        f"# What `diagnose` checks\n\nThe checks of `grpo-recipes diagnose`, in their order. {MADE_BY}\n\n"
        "| check | looks for |\n|---|---|\n"
        + "".join(f"| `{name}` | {text.removeprefix('Look for ')} |\n" for name, text in rows)
    )


def signature(thing: Callable[..., object]) -> str:
    """Return the parameters and the result of a function or class, one per line if one line is too long."""
    whole = inspect.signature(thing)
    parameters = [one for one in whole.parameters.values() if one.name not in ("self", "cls")]
    shown = [_parameter(one) for one in parameters]
    by_name = [one.kind is one.KEYWORD_ONLY for one in parameters]
    if any(by_name) and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        shown.insert(by_name.index(True), "*")
    returned = whole.return_annotation
    arrow = (
        ""
        if returned in (whole.empty, None, "None")
        else f" -> {returned if isinstance(returned, str) else returned.__name__}"
    )
    line = f"({', '.join(shown)}){arrow}"
    return line if len(line) <= 90 else "(\n    " + ",\n    ".join(shown) + f",\n){arrow}"


def _parameter(parameter: inspect.Parameter) -> str:
    """Return a parameter as a signature shows it, without the annotation of a recipe's key, which has its own page."""
    kind = "" if parameter.annotation is parameter.empty else inspect.formatannotation(parameter.annotation).strip("'")
    shown = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
    shown += f": {kind}" if kind and "Annotated" not in kind else ""
    if parameter.default is parameter.empty:
        return shown
    default = "…" if "<" in repr(parameter.default) else repr(parameter.default)
    return f"{shown} = {default}" if ":" in shown else f"{shown}={default}"


def docstring(thing: object) -> str:
    """Return a docstring as Markdown, with lists for `Args:` and the like."""
    text = inspect.getdoc(thing) or ""

    def as_list(section: re.Match[str]) -> str:
        entries = re.sub(r"^ {4}(\w+): ", r"- `\1`: ", section[2], flags=re.MULTILINE)
        return f"{section[1]}:\n\n{re.sub(r'^ {8}', '  ', entries, flags=re.MULTILINE)}"

    return re.sub(r"^(Args|Attributes|Returns|Raises):\n((?: {4}.*\n?|\n)+)", as_list, text, flags=re.MULTILINE)


COMMITTED: Mapping[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "python.md": python_page,
    "checks.md": checks_page,
}
"""The pages in docs/ that are made here."""


if __name__ == "__main__":
    sys.exit(main())
