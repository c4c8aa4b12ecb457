"""Each file that a command reads, replaced by a harmful one: one error line, in bounded time and memory."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pandas as pd
import pytest
from peft import LoraConfig, get_peft_model
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer, Recipe, cli, evaluate_model, run_recipe, train
from grpo_recipes.process.faults import print_last_line
from grpo_recipes.runs.lock import LOCK
from grpo_rewards import reward_model
from grpo_rewards.errors import UserError
from tests.support import launching, short_runs, tiny
from tests.support.grids import only
from tests.support.stored import evaluation_files, run_files

SECONDS, BYTES = 20, 2 << 30
"""Limits of one combination of command, file and fault."""


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(12 << 30)


def _sparse_after_a_start(path: Path) -> None:
    """Write a valid beginning, an object or a header of 4 GB, and then zeros."""
    with path.open("wb") as file:
        file.write((4 << 30).to_bytes(8, "little") if path.suffix == ".safetensors" else b'{"log_history": [')
        file.truncate(12 << 30)


def _written(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content + b"\n" * bool(content)) and None


FAULTS: dict[str, Callable[[Path], None]] = {
    "a pipe": _pipe,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "12 GB of zeros": _sparse,
    "12 GB after a start": _sparse_after_a_start,
    "deep": _written(b"[" * 200_000 + b"]" * 200_000),
    "deep objects": _written(b'{"a":' * 200_000 + b"1" + b"}" * 200_000),
    "a number of 5,000 digits": _written(b'{"global_step": ' + b"1" * 5000 + b"}"),
    "a list": _written(b"[]"),
    "a number": _written(b"5"),
    "text": _written(b'"x"'),
    "null": _written(b"null"),
    "NaN": _written(b"NaN"),
    "an empty object": _written(b"{}"),
    "empty": _written(b""),
    "not UTF-8": _written(b'{"a": "\xff\xfe"}'),
    "UTF-16": _written('{"a": 1}'.encode("utf-16")),
    "a byte order mark": _written(b'\xef\xbb\xbf{"a": 1}'),
}


@dataclass(frozen=True)
class Scene:
    """Files that a command is called on, all of them intact."""

    folder: Path
    policy: Path
    adapter: Path
    rewarder: Path
    rows: Path
    run: Path
    """Finished run with one checkpoint."""
    foreign: Path
    """Run of TRL's own trainer, whose checkpoint has no manifest."""
    scripted: Path
    """Run of our trainer in a script, with one checkpoint."""
    stored: Path
    """Finished run to report on."""
    sharded: Path
    """Model whose weights are listed in an index."""

    def recipe(self, **changes: Any) -> Path:
        """Write a recipe of two steps on one process, and return its path."""
        values = {"per_device_train_batch_size": 8, "max_steps": 2, "save_steps": 2, "report_to": "none", **changes}
        output = Path(values.pop("output_dir", self.folder / "new"))
        return launching.write_recipe(self.folder / "mine.yaml", self.policy, self.rows, output, **values)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the files of a `Scene`, and return their folder."""
    folder = tmp_path_factory.mktemp("scene")
    scene = _scene(folder)
    launching.build_policy(scene.policy)
    launching.write_rows(scene.rows, 8)
    rows = pd.read_json(scene.rows, lines=True)
    rows.to_json(folder / "rows.json", orient="records")
    rows.to_csv(folder / "rows.csv", index=False)
    rows.to_parquet(folder / "rows.parquet")
    (folder / "prompt.txt").write_text("Answer with a number.\n")
    adapted = get_peft_model(short_runs.load(scene.policy), LoraConfig(r=2, target_modules="all-linear"))
    short_runs.moved(adapted).save_pretrained(scene.adapter)
    tiny.save_reward_model(scene.rewarder)
    assert train.main(["--config", str(scene.recipe(output_dir=scene.run))]) == 0
    like = {"learning_rate": 1e-3, "lr_scheduler_type": "linear", "per_device_train_batch_size": 8}
    arguments = short_runs.arguments(scene.foreign, save_strategy="steps", save_steps=1, **like)
    short_runs.trainer(TRLGRPOTrainer, short_runs.load(scene.policy), arguments).train()
    _drop_in(scene, None)
    for path, content in {**run_files("stored"), **evaluation_files("one"), **evaluation_files("two")}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    # It ends before the state, so that readers need both.
    lines = [{"step": 0, "max_steps": 40}, {"step": 30, "reward": 1.0}, {"step": 40, "ended": True}]
    (scene.stored / "_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.copytree(scene.policy, scene.sharded)
    short_runs.load(scene.policy).save_pretrained(scene.sharded, max_shard_size="20KB")
    (scene.sharded / "model.safetensors").unlink()
    return folder


def _scene(folder: Path) -> Scene:
    names = ("policy", "adapter", "rewarder", "rows.jsonl", "run", "foreign", "scripted", "stored", "sharded")
    return Scene(folder, *(folder / name for name in names))


Found = dict[Path, tuple[int, ...]]


def _found(folder: Path) -> Found:
    """Return the kind of each file and folder below a folder, and size and time of change (in ns) of the files."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        kind = stat.S_IFMT(status.st_mode)
        is_folder = stat.S_ISDIR(kind)
        found[path.relative_to(folder)] = (kind,) if is_folder else (kind, status.st_size, status.st_mtime_ns)
    return found


@pytest.fixture(scope="module")
def intact(built: Path) -> tuple[Path, Found]:
    """Return a copy of the built files, and what it holds."""
    copy = built.with_name("copy")
    shutil.copytree(built, copy, symlinks=True)
    return copy, _found(copy)


@pytest.fixture
def scene(built: Path, intact: tuple[Path, Found]) -> Iterator[Scene]:
    """Yield the scene, and restore what has changed afterwards: to copy all files takes longer than most commands."""
    reward_model._load.cache_clear()
    yield _scene(built)
    copy, before = intact
    now = _found(built)
    changed = {path for path in now.keys() | before.keys() if now.get(path) != before.get(path)}
    for path in sorted(changed & now.keys(), reverse=True):  # files before their folders
        place = built / path
        if stat.S_ISDIR(now[path][0]):
            place.rmdir()
        else:
            place.unlink()
    for path in sorted(changed & before.keys()):
        if stat.S_ISDIR(before[path][0]):
            (built / path).mkdir()
        else:
            shutil.copy2(copy / path, built / path, follow_symlinks=False)


# Calls of the commands, each of which returns an exit code.


def _train(scene: Scene, **changes: Any) -> int:
    return train.main(["--config", str(scene.recipe(**changes))])


def _plan(scene: Scene, *options: str, **changes: Any) -> int:
    return cli.main(["plan", str(scene.recipe(**changes)), *options])


def _evaluate(scene: Scene, model: Path, *options: str) -> int:
    arguments = ["--path", str(scene.rows), "--prompt_format", "text", "--max_new_tokens", "2", "--limit", "1"]
    return cli.main(["evaluate", str(model), *arguments, "--output", str(scene.folder / "evaluated"), *options])


def _resume(scene: Scene, place: str) -> int:
    run = scene.foreign if place == "foreign" else scene.run
    where = {"newest": "true", "foreign": str(run / "checkpoint-1")}.get(place, str(run / "checkpoint-2"))
    return train.main(["--config", str(scene.recipe(output_dir=run)), "--resume_from_checkpoint", where])


def _api(call: Callable[[], Any]) -> int:
    """Return the exit code of a call of the API, and print its error as a command would."""
    try:
        call()
    except UserError as error:
        print_last_line(f"error: {error}", 2)
        return 2
    return 0


def _drop_in(scene: Scene, checkpoint: Path | None) -> None:
    args = short_runs.arguments(scene.scripted, max_steps=3 if checkpoint else 2, save_strategy="steps", save_steps=2)
    trainer = short_runs.trainer(GRPOTrainer, short_runs.load(scene.policy), args)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def _plan_rows(scene: Scene, name: str) -> int:
    dataset = {"name": "gsm8k", "path": str(scene.folder / name), "prompt_format": "text"}
    return _plan(scene, dataset=dataset)


MODEL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS = ("model.safetensors",)
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class Verb:
    """Call of a command, and the files that the command reads."""

    call: Callable[[Scene], int]
    files: Sequence[str]


def _in(folder: str, names: Sequence[str]) -> list[str]:
    return [f"{folder}/{name}" for name in names]


STATE = ("trainer_state.json", "config.json", "model.safetensors", "rng_state.pth", "optimizer.pt", "scheduler.pt")
RUN = ("run.json", "evaluations/before/evaluation.json", "trainer_state.json", "_log.jsonl")
VERBS: dict[str, Verb] = {
    "diagnose": Verb(lambda scene: cli.main(["diagnose", str(scene.stored)]), _in("stored", RUN)),
    "report": Verb(lambda scene: cli.main(["report", str(scene.stored)]), _in("stored", RUN)),
    "compare": Verb(
        lambda scene: cli.main(["compare", str(scene.folder / "one"), str(scene.folder / "two")]),
        ["one/evaluation.json", "two/evaluation.json", "two/completions.parquet"],
    ),
    "plan": Verb(_plan, [*_in("policy", MODEL), "rows.jsonl"]),
    "plan --model_config": Verb(
        lambda scene: _plan(scene, "--model_config", str(scene.sharded / "config.json")), ["sharded/config.json"]
    ),
    "plan, a reward model": Verb(
        lambda scene: _plan(scene, rewards=[{"name": "reward_model", "kwargs": {"model": str(scene.rewarder)}}]),
        ["rewarder/config.json"],
    ),
    "plan, JSON": Verb(lambda scene: _plan_rows(scene, "rows.json"), ["rows.json"]),
    "plan, CSV": Verb(lambda scene: _plan_rows(scene, "rows.csv"), ["rows.csv"]),
    "plan, Parquet": Verb(lambda scene: _plan_rows(scene, "rows.parquet"), ["rows.parquet"]),
    "plan, a system prompt": Verb(
        lambda scene: _plan(scene, "--dataset.system_prompt", f"{{file: {scene.folder / 'prompt.txt'}}}"),
        ["prompt.txt"],
    ),
    "init": Verb(
        lambda scene: cli.main(
            ["init", str(scene.rows), "--model", str(scene.policy), "--output", str(scene.folder / "first.yaml")]
        ),
        [*_in("policy", MODEL), "rows.jsonl"],
    ),
    "train": Verb(_train, [*_in("policy", (*MODEL, *WEIGHTS)), "rows.jsonl"]),
    "train, shards": Verb(
        lambda scene: _train(scene, model_name_or_path=str(scene.sharded)),
        _in("sharded", ("model.safetensors.index.json", "model-00001-of-00002.safetensors")),
    ),
    "train, an adapter": Verb(
        lambda scene: _train(scene, model_name_or_path=str(scene.adapter)),
        [*_in("adapter", ADAPTER), *_in("policy", ("config.json", "tokenizer.json", *WEIGHTS))],
    ),
    "train, a reference": Verb(
        lambda scene: _train(scene, use_peft=True, beta=0.1, reference={"adapter": str(scene.adapter)}),
        _in("adapter", ADAPTER),
    ),
    "train, a reward model": Verb(
        lambda scene: _train(scene, rewards=[{"name": "reward_model", "kwargs": {"model": str(scene.rewarder)}}]),
        _in("rewarder", (*MODEL, *WEIGHTS)),
    ),
    "run_recipe": Verb(
        lambda scene: _api(lambda: run_recipe(Recipe.load(scene.recipe()))), _in("policy", (*MODEL, *WEIGHTS))
    ),
    "resume true": Verb(
        lambda scene: _resume(scene, "newest"), ["run/run.json", *_in("run/checkpoint-2", ("manifest.json", *STATE))]
    ),
    "resume, named": Verb(
        lambda scene: _resume(scene, "named"), ["run/run.json", *_in("run/checkpoint-2", ("manifest.json", *STATE))]
    ),
    "resume, TRL's": Verb(lambda scene: _resume(scene, "foreign"), _in("foreign/checkpoint-1", STATE)),
    "a script resumes": Verb(
        lambda scene: _api(lambda: _drop_in(scene, scene.scripted / "checkpoint-2")),
        _in("scripted/checkpoint-2", ("manifest.json", *STATE)),
    ),
    "evaluate": Verb(
        lambda scene: _evaluate(scene, scene.policy), [*_in("policy", (*MODEL, *WEIGHTS, "run.json")), "rows.jsonl"]
    ),
    "evaluate, an adapter": Verb(
        lambda scene: _evaluate(scene, scene.adapter), [*_in("adapter", ADAPTER), "policy/config.json"]
    ),
    "evaluate, shards": Verb(
        lambda scene: _evaluate(scene, scene.sharded), _in("sharded", ("model.safetensors.index.json",))
    ),
    "evaluate, again": Verb(
        lambda scene: _evaluate(scene, scene.policy), _in("evaluated", ("evaluation.json", "request.json"))
    ),
    "evaluate_model": Verb(
        lambda scene: _api(
            lambda: evaluate_model(
                scene.policy, path=str(scene.rows), prompt_format="text", limit=1, output=scene.folder / "evaluated"
            )
        ),
        _in("policy", (*MODEL, *WEIGHTS)),
    ),
    "merge": Verb(
        lambda scene: cli.main(["merge", str(scene.adapter), "--output", str(scene.folder / "merged")]),
        [*_in("adapter", (*ADAPTER, "README.md")), *_in("policy", (*MODEL, *WEIGHTS))],
    ),
    "chat": Verb(
        lambda scene: cli.main(["chat", str(scene.policy), "--prompt", "1", "--max_new_tokens", "2"]),
        _in("policy", (*MODEL, *WEIGHTS, "run.json")),
    ),
    "export": Verb(
        lambda scene: cli.main(["export", str(scene.policy), "--to", str(scene.folder / "exported")]),
        _in("policy", (*MODEL, *WEIGHTS, "run.json")),
    ),
    "export, an adapter": Verb(
        lambda scene: cli.main(["export", str(scene.adapter), "--to", str(scene.folder / "exported")]),
        [*_in("adapter", (*ADAPTER, "README.md", "LICENSE")), *_in("policy", (*MODEL, *WEIGHTS))],
    ),
}


class TooSlow(BaseException):
    """Error for a command that took longer than `SECONDS`."""


@contextmanager
def bounded(place: Path) -> Iterator[None]:
    """Limit the block to `SECONDS` and to `BYTES` beyond the memory of this process. `place` may be a pipe."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    def end_pipe() -> None:  # a library that waits for a writer in native code ignores the signal
        nonlocal waited
        waited = True
        with suppress(OSError):
            os.close(os.open(place, os.O_WRONLY | os.O_NONBLOCK))

    waited = False
    timer = threading.Timer(SECONDS, end_pipe)

    limits = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (taken + BYTES, limits[1]))
    signal.alarm(SECONDS)
    timer.start()
    try:
        yield
        assert not waited, f"{place} was waited for"
    finally:
        timer.cancel()
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, before)


def _is_harmless(file: str, fault: str) -> bool:
    """Return True if a command may succeed with a file that has this fault, so that no error need name the file."""
    name = Path(file).name
    if fault == "an empty object":  # every setting is its default
        return True
    if fault == "a byte order mark" and name.startswith("rows"):
        return True
    if name in ("README.md", "LICENSE", "prompt.txt"):
        return fault not in (
            "a pipe",
            "a folder",
            "a device",
            "12 GB of zeros",
            "12 GB after a start",
            "not UTF-8",
            "UTF-16",
        )
    # A run may have logged nothing, and a configuration other than the policy's may be missing.
    return (name, fault) in {("_log.jsonl", "empty"), ("config.json", "a folder")} and not file.startswith("policy")


# Files that show whether a checkpoint without a manifest is complete. The error names the checkpoint instead of the
# file.
WHOLENESS = ("foreign/checkpoint-1/trainer_state.json", "foreign/checkpoint-1/rng_state.pth")


def _cells() -> Iterator[Any]:
    """Yield each fault of each file for each command that reads it. One fault of every third file is quick."""
    number = 0
    for verb, entry in VERBS.items():
        for file in entry.files:
            for place, fault in enumerate(FAULTS):
                is_quick = number % 3 == 0 and place == 5 * number // 3 % len(FAULTS)
                yield pytest.param(verb, file, fault, marks=() if is_quick else pytest.mark.slow)
            number += 1


@pytest.mark.parametrize(("verb", "file", "fault"), _cells())
def test_a_harmful_file_ends_in_one_error_line(
    scene: Scene, verb: str, file: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = scene.folder / file
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    FAULTS[fault](place)
    with bounded(place):
        code = VERBS[verb].call(scene)
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err + printed.out
    last = printed.err.strip().splitlines()[-1] if printed.err.strip() else ""
    if _is_harmless(file, fault) and code != 2:
        assert code in (0, 1)
        return
    assert code == 2, f"{code}: {last}"
    assert last.startswith("error: "), last
    if not _is_harmless(file, fault):
        assert (place.parent.name if file in WHOLENESS else place.name) in last, last


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_harmful_lock_does_not_stop_a_run_from_being_read(
    scene: Scene, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = scene.stored / LOCK
    FAULTS[fault](place)
    with bounded(place):
        assert VERBS["diagnose"].call(scene) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("verb", only([*VERBS][::8], VERBS))
def test_the_intact_files_are_read(scene: Scene, verb: str) -> None:
    """Otherwise an error about something else would pass for one about the fault."""
    with bounded(scene.folder / "nothing"):
        assert VERBS[verb].call(scene) in ((0, 1) if verb == "diagnose" else (0,))
