"""The night: checks too long for `.ci/run`, in parts that leave a row each, and the page that joins the rows.

    .ci/nightly                     # every part in turn; a part that fails does not stop the others
    .ci/nightly torture adapters    # two parts
    .ci/nightly --list              # the names of the parts
    .ci/nightly --join              # write benchmarks/results/nightly.md from benchmarks/results/nightly/*.json

A part is one command. It makes the environment that it needs, so that it runs from a fresh clone. This file imports the
standard library only, because a fresh clone has no environment yet.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "results" / "nightly.md"
ROWS = ROOT / "benchmarks" / "results" / "nightly"

LIMIT = 150 * 60
"""Seconds after which a part is stopped, with its processes, and counts as failed."""

LONGEST = 300
"""Characters of a printed line that a row keeps."""

TOOL = "make install && .venv/bin/python -m tests.tools."


@dataclass(frozen=True)
class Part:
    """One part of the night."""

    checked: str
    """Sentence on the claim that the part checks."""
    command: str
    """Command of bash in the root of the checkout."""
    python: str = ".venv/bin/python"
    """Interpreter whose package versions the row states, or empty if it runs outside this system."""
    page: str = ""
    """Page that the command writes, relative to PAGE, or empty."""


PARTS: Mapping[str, Part] = {
    "test-nightly": Part("The largest grids and fuzzing pass, and the tutorial runs.", "make test-nightly"),
    "vllm": Part("Training and evaluation work with vLLM itself on a CPU.", "make test-vllm", ".venv-vllm/bin/python"),
    "torture": Part("A run killed at any moment resumes to the same bits.", "make torture", page="torture.md"),
    "models": Part(
        "Every model type has TRL's gradient and the tokens of transformers.",
        TOOL + "models --record docs/model-layouts.md",
        page="../../docs/model-layouts.md",
    ),
    "adapters": Part(
        "Every adapter has TRL's gradient and the right reference.",
        TOOL + "adapters --record docs/adapter-layouts.md",
        page="../../docs/adapter-layouts.md",
    ),
    "oldest": Part(
        "The quick tests pass on the oldest versions allowed.", "make test-oldest", "build/oldest/bin/python"
    ),
    "next-trl": Part(
        "The tests of the seams pass on the newest trl and transformers.", "make next-trl", "build/next/bin/python"
    ),
    "debian": Part("The quick tests pass on Debian's Python 3.13.", "make test-debian", python=""),
}
"""Parts in the order in which they run, by name."""


@dataclass(frozen=True)
class Row:
    """Result of one run of a part: the file benchmarks/results/nightly/PART.json."""

    part: str
    checked: str
    command: str
    commit: str
    """Commit of the checkout, with `-dirty` if tracked files outside the results differ from it."""
    started: str
    """Start in UTC, such as 2026-11-24T03:00:00Z."""
    seconds: int
    cpu_seconds: int
    """Processor time of the command and of the processes that it waited for."""
    exit_code: int
    result: str
    """Last summary of pytest, and the last line that the command printed, without those of make and of warnings."""
    failed: list[str] = field(default_factory=list)
    """Lines on failed tests, as pytest's summary has them."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the packages that the result depends on. Empty if they are not known."""


def run(name: str, part: Part) -> Row:
    """Run a part, print its output, write its row and return the row. A part that is interrupted leaves no row."""
    started, begin, before = datetime.now(timezone.utc), time.monotonic(), _cpu_seconds()
    commit = _commit()
    print(f"== {name}: {part.command}", flush=True)
    code, lines = _output(part.command)
    seconds = time.monotonic() - begin
    said = [line[:LONGEST].strip("= ") for line in _without_warnings(lines) if line.strip()]
    summaries = [line for line in said if re.search(r"\d (passed|failed|error|skipped).* in [\d.]+s", line)]
    result = "; ".join(dict.fromkeys([*summaries[-1:], *said[-1:]])) or "no output"
    row = Row(
        part=name,
        checked=part.checked,
        command=part.command,
        commit=commit,
        started=f"{started:%Y-%m-%dT%H:%M:%SZ}",
        seconds=round(seconds),
        cpu_seconds=round(_cpu_seconds() - before),
        exit_code=code,
        result=f"stopped after {LIMIT / 60:.0f} minutes: {result}" if seconds >= LIMIT else result,
        failed=[line[:LONGEST] for line in lines if line.startswith(("FAILED ", "ERROR "))],
        versions=_versions(ROOT / part.python),
    )
    ROWS.mkdir(parents=True, exist_ok=True)
    unfinished = ROWS / f"{name}.unfinished"
    unfinished.write_text(json.dumps(asdict(row), indent=1) + "\n", encoding="utf-8")
    unfinished.replace(ROWS / f"{name}.json")
    return row


def _output(command: str) -> tuple[int, list[str]]:
    """Run a command for at most LIMIT seconds, passing on what it prints. Return its exit code and its lines.

    `timeout` puts the command into a process group, which also receives the signal of Ctrl-C from here.
    """
    limited = ["timeout", "--signal=INT", "--kill-after=60", str(LIMIT), "bash", "-c", command]
    printed = b""
    with subprocess.Popen(limited, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0) as process:
        assert process.stdout is not None
        try:
            while some := process.stdout.read(65536):  # not by line: pytest's dots are seen as they come
                printed += some
                print(some.decode(errors="replace"), end="", flush=True)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.communicate()  # wait for its end, and read on: its last lines could fill the pipe
            raise
    return process.returncode, printed.decode(errors="replace").splitlines()


def _without_warnings(lines: Sequence[str]) -> list[str]:
    """Return the lines without those of make and of Python's warnings, which take two: the second is the source."""
    kept, is_warning = [], False
    for line in lines:
        was_warning, is_warning = is_warning, re.search(r"\.py:\d+: \w*Warning: ", line) is not None
        if not (is_warning or (was_warning and line.startswith(" ")) or line.startswith("make")):
            kept.append(line)
    return kept


def _cpu_seconds() -> float:
    """Return the processor time of all processes that have been waited for so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _commit() -> str:
    """Return the commit as `Row.commit` has it."""
    head = ["git", "rev-parse", "HEAD"]
    changed = ["git", "status", "--porcelain", "--untracked-files=no", ".", ":!benchmarks/results", ":!docs"]
    commit, changes = (
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
        for command in (head, changed)
    )
    return f"{commit}-dirty" if changes else commit


def _versions(python: Path) -> dict[str, str]:
    """Return the package versions of an environment, or nothing if its interpreter or the project is missing."""
    source = "import json; from grpo_recipes.runs.record import versions; print(json.dumps(versions()))"
    if not python.is_file():
        return {}
    done = subprocess.run([python, "-c", source], cwd=ROOT, capture_output=True, text=True)
    return {} if done.returncode else json.loads(done.stdout.splitlines()[-1])


def rows() -> list[Row]:
    """Return the rows in the order of PARTS, without the parts that have none."""
    files = [ROWS / f"{name}.json" for name in PARTS]
    return [Row(**json.loads(file.read_text(encoding="utf-8"))) for file in files if file.exists()]


def page(found: Sequence[Row]) -> str:
    """Return benchmarks/results/nightly.md."""
    by_name = {row.part: row for row in found}
    never = [name for name in PARTS if name not in by_name]
    lines = [
        "# The night",
        "",
        "Made by `.ci/nightly --join` from the files in `benchmarks/results/nightly`. `.ci/nightly PART` runs a part",
        "from a fresh clone and writes its file. A part is stopped after 150 minutes. Its time includes making its",
        "environment if the clone has none yet. CPU minutes are those of the processes that the command waited for: a",
        "part of one process (models, adapters) that took much longer ran on a busy machine. A",
        "[pretrained model](real_model.md) is not part of the night.",
        "",
        f"Parts that have never run: {', '.join(never) or 'none'}.",
        "",
        "| part | checked | started (UTC) | commit | command | minutes | CPU minutes | result |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, part in PARTS.items():
        cells = (name, *_cells(part, by_name.get(name)))
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    for row in found:
        if row.failed:
            lines += ["", f"## Failed tests of {row.part}", "", *(f"- {_code(line)}" for line in row.failed)]
    lines += ["", "## Versions", ""]
    for row in found:
        versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
        lines.append(f"- {row.part}: {versions or 'not known'}")
    return "\n".join(lines) + "\n"


def _cells(part: Part, row: Row | None) -> tuple[str, ...]:
    """Return the cells of a part on the page, after its name."""
    if row is None:
        return part.checked, "never", "", _code(part.command), "", "", ""
    result = _code(row.result) if row.exit_code == 0 else f"**failed** (exit code {row.exit_code}): {_code(row.result)}"
    if part.page:
        result += f" ([table]({part.page}))"
    commit = row.commit[:10] + "-dirty" * row.commit.endswith("-dirty")
    minutes = f"{row.seconds / 60:.1f}", f"{row.cpu_seconds / 60:.1f}"
    return row.checked, row.started, commit, _code(row.command), *minutes, result


def _code(text: str) -> str:
    """Return a text as code in Markdown, on one line."""
    return "`" + " ".join(text.replace("`", "'").split()) + "`"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named parts, list them, or join their rows. Return 1 if a part failed, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="names of parts (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    parser.add_argument("--join", action="store_true", help="write the page from the rows")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.parts if name not in PARTS]:
        parser.error(f"no part is called {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    if asked.list:
        print("\n".join(PARTS))
        return 0
    if asked.join:
        PAGE.write_text(page(rows()), encoding="utf-8")
        return 0
    # A shell starts background jobs with Ctrl-C ignored, and tests of Ctrl-C would inherit that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    failed = []
    for name in asked.parts or PARTS:
        try:
            row = run(name, PARTS[name])
        except KeyboardInterrupt:
            print(f"interrupted in {name}, which leaves no row", file=sys.stderr)
            return 130
        print(f"== {name}: exit code {row.exit_code} after {row.seconds} s: {row.result}", flush=True)
        failed += [name] * (row.exit_code != 0)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
