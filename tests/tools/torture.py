"""Kill runs at each kind of file of a save and at random moments, resume them, and compare with an uninterrupted run.

    python -m tests.tools.torture --kills 60 --random-kills 20 --seed 0 --record benchmarks/results/torture.md

One line is printed per kill. The command fails if a prompt, completion, log entry or parameter differs from the
uninterrupted run, or if a run can't resume. The kills at files (`boundaries.py`) need strace, and are skipped without
it.
"""

import argparse
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from grpo_recipes.runs.record import versions
from grpo_recipes.runs.resume import decide, newest_checkpoint
from tests.support import launching
from tests.tools import boundaries
from tests.tools.boundaries import PROCESSES, STEPS


def torture(layout: str, kills: int, rng: random.Random, rows: Path, folder: Path, **more: Any) -> list[str]:
    """Kill a run several times, resume it each time, compare it with an uninterrupted run, and return a line per kill.

    With eight prompts, four per generation batch, an epoch has 2 steps and the run ends within the eighth epoch.

    Args:
        layout: accelerate configuration, a key of `PROCESSES`.
        kills: number of kills.
        rng: source of the moments of the kills.
        rows: file of the training rows.
        folder: folder for both runs.
        more: further keys of the recipe.
    """
    policy = launching.build_policy(folder / "policy")
    batch = 16 // PROCESSES[layout]
    changes = {"max_steps": STEPS, "per_device_train_batch_size": batch, "save_total_limit": 3, **more}
    alone = launching.write_recipe(folder / "alone.yaml", policy, rows, folder / "alone", **changes)
    launching.launch(layout, alone)
    killed = launching.write_recipe(folder / "killed.yaml", policy, rows, folder / "killed", **changes)
    lines: list[str] = []
    while len(lines) < kills:
        process = resume(layout, killed, folder / "killed")
        earliest = 5 if lines else 1  # past the second epoch, once a first kill could have come at any time
        line = kill_at(random_moment(folder / "killed", layout, earliest, rng), process)
        if line is None:  # the run ended first: another one
            launching.assert_same_run(folder / "alone", folder / "killed")
            shutil.rmtree(folder / "killed")
            continue
        point = decide(folder / "killed", True, PROCESSES[layout])
        last = point.newest.name if point.newest else "none"
        lines.append(f"{layout}: {line}; last complete: {last}; set aside: {len(point.passed_over)}")
        print(lines[-1], flush=True)
    said = launching.finish(resume(layout, killed, folder / "killed"))
    assert (folder / "killed" / "trainer_state.json").is_file(), said[-10_000:]
    launching.assert_same_run(folder / "alone", folder / "killed")
    return lines


def resume(layout: str, recipe: Path, output: Path) -> launching.Started:
    """Start the run from its newest complete checkpoint, or from the beginning if there is none yet."""
    if newest_checkpoint(output, PROCESSES[layout]):
        return launching.start(layout, recipe, "--resume_from_checkpoint", "true")
    shutil.rmtree(output, ignore_errors=True)
    return launching.start(layout, recipe)


def random_moment(
    output: Path, layout: str, earliest: int, rng: random.Random
) -> tuple[str, Callable[[], bool], float]:
    """Return a random moment during a step or a save: its name, its condition, and the seconds to wait after that."""
    last = newest_checkpoint(output, PROCESSES[layout])
    done = int(last.name.partition("-")[2]) if last else 0
    first = min(max(done + 1, earliest), STEPS)
    step = rng.randint(first, min(first + 2, STEPS))
    if rng.random() < 0.5:
        logged = output / "completions" / f"completions_{step:05d}.parquet"
        started = time.time()
        return f"training after step {step}", lambda: written_since(logged, started), rng.uniform(0, 0.3)
    folder = output / f"checkpoint-{step}"
    return f"saving step {step}", folder.is_dir, rng.uniform(0, 0.03)


def written_since(path: Path, started: float) -> bool:
    """Return True if a file has been written since a time."""
    return path.exists() and path.stat().st_mtime > started


def kill_at(moment: tuple[str, Callable[[], bool], float], process: launching.Started) -> str | None:
    """Send SIGKILL to all processes of a run. Return a line on the kill, or None if the run ended first."""
    what, condition, delay = moment
    reached = launching.wait_for(condition, process)
    time.sleep(delay)
    if not reached or process.poll() is not None:
        said = launching.finish(process)
        assert process.returncode == 0, said[-10_000:]
        return None
    launching.kill_tree(process.pid)
    launching.finish(process)
    return f"killed while {what} + {delay * 1000:.0f} ms"


def main() -> int:
    """Spread the kills over one process, two processes, and two processes under ZeRO-3."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="number of kills at the file boundaries of saves")
    parser.add_argument("--random-kills", type=int, default=20, help="number of kills at random moments")
    parser.add_argument("--layouts", nargs="+", choices=PROCESSES, default=list(PROCESSES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="write the result to this file")
    options = parser.parse_args()
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(launching.ROOT / ".pytest_cache" / "d" / "torch_extensions"))
    at_files: list[boundaries.Kill] = []
    counts: dict[str, int] = {}
    at_random: list[str] = []
    started, reason = time.time(), boundaries.why_not()
    with tempfile.TemporaryDirectory() as temporary:
        if reason is None and options.kills:

            def at_files_of(layout: str) -> tuple[list[boundaries.Kill], dict[str, int]]:
                share = (options.kills + options.layouts.index(layout)) // len(options.layouts)
                rng = random.Random(f"{options.seed} {layout}")
                return boundaries.kill_everywhere(layout, share, rng, Path(temporary) / f"{layout}-files")

            # The layouts may run at once: the moments of these kills do not depend on the time.
            with ThreadPoolExecutor(len(options.layouts)) as pool:
                for lines, found in pool.map(at_files_of, options.layouts):
                    at_files += lines
                    counts.update(found)
        rng = random.Random(options.seed)
        rows = launching.write_rows(Path(temporary) / "rows.jsonl", 8)
        for place, layout in enumerate(options.layouts):
            if share := (options.random_kills + place) // len(options.layouts):
                folder = Path(temporary) / layout
                folder.mkdir()
                at_random += torture(layout, share, rng, rows, folder)
    kinds = (
        f"{len(at_files)} kills at file boundaries of a save, {len(at_random)} at random moments (seed {options.seed})"
    )
    verdict = (
        f"{kinds}: no run that can't go on; parameters bit-equal to the uninterrupted runs, same prompts, "
        f"completions and log entries at every step; {time.time() - started:.0f} s"
    )
    if reason is not None:
        print(f"no kills at file boundaries: {reason}")
    print(verdict)
    if options.record:
        options.record.write_text(report(verdict, reason, counts, at_files, at_random), encoding="utf-8")
    return 0


def report(
    verdict: str, reason: str | None, counts: dict[str, int], at_files: list[boundaries.Kill], at_random: list[str]
) -> str:
    """Return the result in Markdown."""
    machine = f"{platform.machine()}, {torch.get_num_threads()} thread(s) a process"
    stated = ", ".join(f"{name} {version}" for name, version in versions().items())
    text = ["# `make torture`", "", f"{verdict}.", "", f"{machine}; {stated}.", ""]
    text += [
        f"Runs of {STEPS} steps past epoch 7, a save after each, `save_total_limit: 1` and `sync_ref_model` where "
        "kills are at file boundaries. A kill is SIGKILL to a process as it enters the call, and to the others then.",
        "",
    ]
    if reason is not None:
        text += [f"No kills at file boundaries: {reason}.", ""]
    if counts:
        text += ["| run | calls in a save that create, rename, flush or remove a file |", "|---|---|"]
        text += [f"| {series} | {count} |" for series, count in counts.items()]
        text += ["", "| run | killed while saving step | before | then |", "|---|---|---|---|"]
        text += [f"| {kill.run} | {kill.step} | {kill.boundary} | {kill.then} |" for kill in at_files]
        text += [""]
    text += [f"- {line}" for line in at_random]
    return "\n".join(text).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
