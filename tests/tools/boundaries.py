"""Kill runs at the file boundaries of a save, resume them, and compare the result with the uninterrupted run.

`strace` enumerates the calls of a save that create, rename, flush or remove a file, in every library and thread. It
later kills the process as it enters one of these calls: the files before that call are written, and the later ones are
not. A patch in Python would not see what safetensors and torch write.

The ranks are forked from a server that has imported everything, with the environment that `accelerate launch` sets. A
launch then takes one or two seconds instead of twenty.
"""

import ctypes
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from grpo_recipes.runs.checkpoints import step_of
from grpo_recipes.runs.resume import decide, newest_checkpoint
from tests.support import forking, launching

STEPS = 15
ENUMERATED = 4  # the save whose calls are enumerated: there are older ones to remove
PROCESSES = {"cpu": 1, "ddp_cpu": 2, "zero3_cpu": 2}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"use_peft": True, "lora_r": 2, "lora_target_modules": "all-linear", "learning_rate": 1e-2},
}
RENAMES = ("rename", "renameat", "renameat2")
WRITING = ("openat", "mkdir", *RENAMES, "fsync", "unlink", "unlinkat")
TRACED_BY_ANYONE = (0x59616D61, -1)  # prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY): strace is not the parent
CALL = re.compile(r"(\d+) +(\w+)\((.*)")


@dataclass(frozen=True)
class Boundary:
    """The `nth` call of a process on a path. `{step}` in the path is the step of the save, `{before}` the last."""

    call: str
    path: str
    name: str
    """Name of the file in the table."""
    nth: int

    @property
    def kind(self) -> tuple[str, str]:
        """The call, and the kind of file."""
        return self.call, re.sub(r"\d+", "N", self.name)

    def at(self, output: Path, step: int) -> str:
        """Return the path at the save of a step."""
        return str(output / self.path.format(step=step, before=step - 1))

    def __str__(self) -> str:
        return f"{self.call} of {self.name}"


@dataclass(frozen=True)
class Kill:
    """A row of the table."""

    run: str
    step: int
    boundary: Boundary
    then: str

    def __str__(self) -> str:
        return f"{self.run}: saving step {self.step}, before {self.boundary}: {self.then}"


def why_not() -> str | None:
    """Return why no process can be killed at a file boundary on this machine, or None."""
    if sys.platform != "linux" or not shutil.which("strace"):
        return "strace is not installed"
    traced = subprocess.run(["strace", "-qq", "-e", "trace=none", "true"], capture_output=True, text=True)
    return None if traced.returncode == 0 else f"strace can't trace here ({traced.stderr.strip()[-80:]})"


def environments(layout: str, folder: Path) -> list[dict[str, str]]:
    """Return the environment of each rank of a layout."""
    folder.mkdir()
    launching.launch(layout, folder, module="tests.support.leave_environment")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES[layout])]


def run_rank(environment: Mapping[str, str], arguments: Sequence[str], log: Path, go: Any) -> None:
    """Run one rank in a process of its own, which waits until it may begin."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    ctypes.CDLL(None).prctl(*TRACED_BY_ANYONE, 0, 0, 0)
    go.wait()
    from grpo_recipes import train

    os._exit(train.main(arguments))  # a regular exit may abort in gloo's threads


class Launch:
    """The ranks of one launch under strace."""

    def __init__(self, ranks: Sequence[Mapping[str, str]], arguments: Sequence[str], folder: Path, *options: str):
        """Start the ranks with options of strace, and write their logs into `folder`."""
        folder.mkdir(exist_ok=True)
        self.log, self.trace = folder / "log.txt", folder / "trace.txt"
        for path in (self.log, self.trace):
            path.write_text("")
        server = forking.context()
        self.go = server.Event()  # kept: it goes with its last reference
        with socket.socket() as free:
            free.bind(("", 0))
            port = {"MASTER_PORT": str(free.getsockname()[1])}
        self.ranks: list[ForkServerProcess] = []
        for environment in ranks:
            process = server.Process(target=run_rank, args=({**environment, **port}, arguments, self.log, self.go))
            process.start()
            self.ranks.append(process)
        pids = [argument for process in self.ranks for argument in ("-p", str(process.pid))]
        command = ["strace", "-f", "-y", "-s", "4096", "-o", str(self.trace), *options, *pids]
        with (folder / "strace.txt").open("w+") as said:
            self.tracer = subprocess.Popen(command, stdout=said, stderr=said)
            while (folder / "strace.txt").read_text().count("attached") < len(ranks):
                assert self.tracer.poll() is None, (folder / "strace.txt").read_text()
                time.sleep(0.005)
        self.go.set()

    def was_killed(self) -> bool:
        """Return True if a rank was killed, after killing the others, and False if every rank has ended by itself."""
        while any(process.is_alive() for process in self.ranks):
            if any(process.exitcode == -9 for process in self.ranks):
                break
            if any(process.exitcode for process in self.ranks):
                time.sleep(2)  # the others say why
                break
            time.sleep(0.01)
        codes = [process.exitcode for process in self.ranks]
        for process in self.ranks:
            process.kill()
            process.join()
        self.tracer.terminate()  # it would wait for helpers that the ranks left behind
        self.tracer.wait(30)
        if -9 in codes:
            return True
        assert codes == [0] * len(codes), f"a run that can't go on: {codes}\n{self.log.read_text()[-8000:]}"
        return False


class Series:
    """An uninterrupted run and the same run with kills, both in one folder."""

    def __init__(self, layout: str, kind: str, ranks: Sequence[Mapping[str, str]], folder: Path):
        folder.mkdir()
        self.layout, self.kind, self.ranks, self.folder = layout, kind, ranks, folder
        self.output = folder / "killed"
        policy = launching.build_policy(folder / "policy")
        rows = launching.write_rows(folder / "rows.jsonl", 8)  # 2 steps an epoch
        changes = {
            "max_steps": STEPS,
            "per_device_train_batch_size": 16 // PROCESSES[layout],
            "save_total_limit": 1,
            "logging_steps": 2,
            "beta": 0.04,
            "sync_ref_model": True,
            "ref_model_sync_steps": 2,
            "ref_model_mixup_alpha": 0.5,
            "report_to": "none",
            **KINDS[kind],
        }
        self.alone, self.killed = (
            launching.write_recipe(folder / f"{name}.yaml", policy, rows, folder / name, **changes)
            for name in ("alone", "killed")
        )

    def boundaries(self) -> list[Boundary]:
        """Run without a kill, and enumerate the calls of one save."""
        options = ["-e", f"trace={','.join(WRITING)}"]
        launch = Launch(self.ranks, ["--config", str(self.alone)], self.folder / "traced", *options)
        assert not launch.was_killed()
        return enumerated(launch.trace.read_text().splitlines(), self.folder / "alone", ENUMERATED)

    def kill_at(self, boundary: Boundary) -> Kill | None:
        """Resume the run and kill it at a boundary of its next save. Returns None if the run ended first."""
        last = newest_checkpoint(self.output, len(self.ranks))
        step = max((step_of(last) if last else 0) + 1, 2 if "{before}" in boundary.path else 1)
        if step > STEPS:
            self.finish()
            shutil.rmtree(self.output)
            return self.kill_at(boundary)
        inject = f"inject={boundary.call}:signal=KILL:when={boundary.nth}"
        options = ["-P", boundary.at(self.output, step), "-e", f"trace={boundary.call}", "-e", inject]
        resume = ["--config", str(self.killed), "--resume_from_checkpoint", "true"]
        if not Launch(self.ranks, resume, self.folder / "last", *options).was_killed():
            launching.assert_same_run(self.folder / "alone", self.output)
            shutil.rmtree(self.output)
            return None
        point = decide(self.output, True, len(self.ranks))
        then = f"goes on from {point.newest.name}" if point.newest else "starts again"
        aside = "".join(f", {one.path.name} set aside" for one in point.passed_over)
        return Kill(f"{self.layout}, {self.kind}", step, boundary, then + aside)

    def finish(self) -> None:
        """Run to the end, and compare the result with the uninterrupted run."""
        resume = ["--config", str(self.killed), "--resume_from_checkpoint", "true"]
        launch = Launch(self.ranks, resume, self.folder / "last", "-e", "trace=none")
        assert not launch.was_killed()
        launching.assert_same_run(self.folder / "alone", self.output)


def enumerated(lines: Iterable[str], output: Path, step: int) -> list[Boundary]:
    """Return in order the calls that create, rename or flush a file of a checkpoint, or remove one of the previous one.

    Args:
        lines: output of strace.
        output: folder of the run.
        step: step of the checkpoint.
    """
    found: dict[Boundary, None] = {}
    counts: dict[tuple[str, str, str], int] = defaultdict(int)
    for line in lines:
        if not (match := CALL.match(line)):
            continue
        thread, call, rest = match.groups()
        named, opened = re.findall(r'"([^"]*)"', rest), re.findall(r"^\d+<([^>]*)>", rest)
        if call not in WRITING or (call == "openat" and "O_CREAT" not in rest):
            continue
        paths = opened if call == "fsync" else named[-1:]
        if not paths:
            continue
        removes = call == "unlinkat" and bool(opened)  # by its name in a folder
        path = opened[0] if removes else paths[0]
        counts[thread, call, path] += 1
        words = ("before", step - 1) if removes else ("step", step)
        relative = _templated(path, output, *words)
        if relative is None or ".tmp" in relative:  # safetensors' names are random: the rename that follows is not
            continue
        name = f"{paths[0]} of the checkpoint before" if removes else Path(relative.format(step="N")).name
        found[Boundary(call, relative, name, counts[thread, call, path])] = None
    return list(found)


def _templated(path: str, output: Path, word: str, step: int) -> str | None:
    """Return a path inside the checkpoint of a step with `{word}` in place of the step, or None for any other path."""
    if not re.match(rf"{re.escape(str(output))}/checkpoint-{step}\b", path):
        return None
    return re.sub(rf"(checkpoint-|global_step){step}\b", rf"\1{{{word}}}", str(Path(path).relative_to(output)))


def spread(boundaries: Sequence[Boundary], count: int, rng: random.Random) -> list[Boundary]:
    """Return `count` boundaries, with one of every kind before a second of any kind."""
    kinds: dict[tuple[str, str], list[Boundary]] = defaultdict(list)
    for boundary in rng.sample(boundaries, len(boundaries)):
        kinds[boundary.kind].append(boundary)
    rounds = max(map(len, kinds.values()))
    ordered = [group[turn % len(group)] for turn in range(rounds + count) for group in kinds.values()]
    return ordered[:count]


def kill_everywhere(layout: str, kills: int, rng: random.Random, folder: Path) -> tuple[list[Kill], dict[str, int]]:
    """Kill runs of a layout, half of them with full fine-tuning and half with LoRA.

    Returns:
        The kills, and the number of boundaries of each run.
    """
    folder.mkdir(exist_ok=True)
    ranks = environments(layout, folder / "environments")
    lines: list[Kill] = []
    counts: dict[str, int] = {}
    for place, kind in enumerate(KINDS):
        series = Series(layout, kind, ranks, folder / kind)
        boundaries = series.boundaries()
        counts[f"{layout}, {kind}"] = len(boundaries)
        mine: list[Kill] = []
        wanted = (kills + place) // len(KINDS)
        for boundary in spread(boundaries, 2 * wanted, rng):
            # None where the ranks raced for a call, as for making the folder, and the other one came first.
            if len(mine) < wanted and (line := series.kill_at(boundary)) is not None:
                mine.append(line)
                print(line, flush=True)
        assert len(mine) == wanted
        series.finish()
        lines += mine
    return lines, counts
