"""Manifests: what they list, how ranks share the work, and how damage is named. Checkpoints of other trainers."""

import json
import os
import platform
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import xxhash

from grpo_recipes.runs import checkpoints
from grpo_recipes.runs.checkpoints import (
    CHECKSUM,
    MANIFEST,
    Manifest,
    Rejected,
    checkpoint_damage,
    content_damage,
    is_complete,
    read_manifest,
    rejection,
    share,
    size_damage,
    steps_done,
    write_manifest,
)
from grpo_recipes.runs.files import RunError
from grpo_recipes.runs.resume import decide, set_aside
from tests.support.errors import refused

WHOLE = Manifest(step=3, num_processes=2, model_only=False, files={"a": {"bytes": 4, CHECKSUM: "0" * 16}})


def test_a_manifest_stays_readable(tmp_path: Path) -> None:
    """Checkpoints outlive versions: the text is exactly that of 0.1.0, with a checksum over the rest of the text."""
    text = """\
{
 "step": 3,
 "num_processes": 2,
 "model_only": false,
 "files": {
  "a": {
   "bytes": 4,
   "xxh3_128": "0000000000000000"
  }
 },
 "xxh3_128": "3d7ac07821029a414072e16494036b3d"
}
"""
    assert WHOLE.text() == text
    assert read_manifest(tmp_path) is None
    (tmp_path / MANIFEST).write_text(text)
    assert read_manifest(tmp_path) == WHOLE


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
def test_the_manifest_is_written_after_everything_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("of rank 0")
    flushed: list[tuple[str, bool]] = []

    def fsync(descriptor: int) -> None:
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), (tmp_path / MANIFEST).exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_manifest(tmp_path, WHOLE, each_node=False, writes=True)
    assert flushed == [(str(tmp_path / "a"), False), (str(tmp_path / MANIFEST), True), (str(tmp_path), True)]


@pytest.mark.parametrize("writes", [False, True])
def test_a_rank_waits_for_the_files_and_for_the_manifest_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    """Another rank writes its file late. Whoever removes older checkpoints next must find a manifest."""
    meetings: list[list[str]] = []

    def gather(value: object) -> list[object]:
        meetings.append(sorted(path.name for path in tmp_path.iterdir()))
        (tmp_path / "late").touch()
        return [value]

    monkeypatch.setattr(checkpoints, "gather", gather)
    write_manifest(tmp_path, WHOLE, each_node=False, writes=writes)
    assert meetings[0] == []
    assert meetings[-1] == (["late", MANIFEST] if writes else ["late"])
    assert len(meetings) == 4, "the number of meetings is the same on every rank"
    manifest = read_manifest(tmp_path)
    assert (list(manifest.files) if manifest else None) == (["late"] if writes else None)


@pytest.mark.parametrize("each_node", [False, True])
def test_ranks_share_the_work_on_each_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each_node: bool) -> None:
    """Four ranks are on two machines. If each machine has a disk, its second rank writes nothing."""
    here, barrier, given = threading.local(), threading.Barrier(4, timeout=10), [None] * 4

    def gather(value: object) -> list[object]:
        given[here.rank] = value
        barrier.wait()
        values = list(given)
        barrier.wait()
        return values

    monkeypatch.setattr(checkpoints, "gather", gather)
    monkeypatch.setattr(checkpoints, "rank", lambda: here.rank)
    monkeypatch.setattr(platform, "node", lambda: f"machine {here.rank // 2}")
    disks = [tmp_path / (f"disk {rank // 2}" if each_node else "disk") for rank in range(4)]
    for rank, disk in enumerate(disks):
        disk.mkdir(exist_ok=True)
        (disk / f"part-{rank}").write_text(f"of rank {rank}")

    def save(rank: int) -> None:
        here.rank = rank
        write_manifest(disks[rank], WHOLE, each_node=each_node, writes=rank in ((0, 2) if each_node else (0,)))

    def damage(rank: int) -> str | None:
        here.rank = rank
        manifest = read_manifest(disks[rank])
        assert manifest is not None
        assert size_damage(disks[rank], manifest) is None
        found = content_damage(disks[rank], manifest, each_node=each_node)
        return found and found.place

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(4)))
        for disk in set(disks):
            manifest = read_manifest(disk)
            assert manifest is not None
            there = {path.name: path.read_bytes() for path in disk.glob("part-*")}
            sums = {name: xxhash.xxh3_128(content).hexdigest() for name, content in there.items()}
            assert manifest.files == {name: {"bytes": 9, CHECKSUM: one} for name, one in sums.items()}
        assert list(pool.map(damage, range(4))) == [None] * 4
        for rank in range(4):
            (disks[rank] / f"part-{rank}").write_text(f"Of rank {rank}")
            found = list(pool.map(damage, range(4)))
            assert found == [str(disks[rank] / f"part-{rank}")] * 4, "every rank learns of it"
            (disks[rank] / f"part-{rank}").write_text(f"of rank {rank}")


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    for number, content in enumerate((b"", b"{", b"\xff\xfe", b"{}")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / MANIFEST).write_bytes(content)
        with refused(folder / MANIFEST, by=RunError):
            read_manifest(folder)
        found = rejection(folder, 2)
        assert found is not None
        assert found.damage.place == str(folder / MANIFEST)
        assert found.aside.name == f"{number}-damaged", "it was complete once"


def test_a_file_of_another_size_is_named(tmp_path: Path) -> None:
    def found(size: int, expected: int) -> RunError | None:
        (tmp_path / "a").write_bytes(b"x" * size)
        return size_damage(tmp_path, Manifest(3, 2, False, {"a": {"bytes": expected, CHECKSUM: "0" * 16}}))

    assert found(4, 4) is found(0, 0) is None
    for size, expected, figures in ((0, 4, []), (3, 4, ["3", "4"]), (5, 4, ["5", "4"]), (5, 0, ["5", "0"])):
        error = found(size, expected)
        assert error is not None
        assert (error.place, re.findall(r"\d+", error.problem)) == (str(tmp_path / "a"), figures)
    (tmp_path / "a").unlink()
    assert str(size_damage(tmp_path, WHOLE)).startswith(str(tmp_path / "a"))


@pytest.mark.parametrize("readers", [1, 2, 3, 8])
def test_every_file_has_one_reader_on_each_disk(readers: int) -> None:
    """On two disks, each rank sees its own. On a shared disk, a rank may not yet see every file."""
    sizes = {f"shard-{number}": 1000 - number for number in range(20)}
    for disks in (["shared"] * readers, [f"node {rank % 2}" for rank in range(readers)]):
        listings = [(disk, sizes) for disk in disks]
        shares = [share(listings, rank) for rank in range(readers)]
        loads = [sum(map(sizes.get, names)) for names in shares]
        for disk in set(disks):
            mine = [load for where, load in zip(disks, loads, strict=True) if where == disk]
            assert max(mine) - min(mine) <= 1000, "the size of a file"
            read = [name for where, names in zip(disks, shares, strict=True) if where == disk for name in names]
            assert sorted(read) == sorted(sizes)
    one_large = {"large": 1000, **dict.fromkeys("abcdefgh", 100)}
    assert share([("shared", one_large)] * 2, 0) == ["large"]
    late = []
    for rank in range(readers):
        listed = {name: size for name, size in sizes.items() if rank == 0 or name[-1] == str(rank)}
        late.append(("shared", listed))
    shares = [share(late, rank) for rank in range(readers)]
    assert sorted(name for names in shares for name in names) == sorted(sizes)
    assert all(name in late[rank][1] for rank, names in enumerate(shares) for name in names)


def test_a_manifest_lists_every_file_and_notices_a_change_to_itself(tmp_path: Path) -> None:
    (tmp_path / "global_step3").mkdir()
    held = ("model.safetensors", "global_step3/zero_pp_rank_0.pt", ".metadata", f"global_step3/{MANIFEST}")
    for name in held:
        (tmp_path / name).write_bytes(name.encode())
    write_manifest(tmp_path, Manifest(3, 2, False, {}), each_node=False, writes=True)
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert (manifest.step, manifest.num_processes, manifest.model_only) == (3, 2, False)
    assert set(manifest.files) == set(held)
    text = (tmp_path / MANIFEST).read_bytes()
    for place in range(len(text)):
        (tmp_path / MANIFEST).write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        with refused(tmp_path / MANIFEST, by=RunError):
            read_manifest(tmp_path)


def checkpoint(folder: Path, step: int, processes: int) -> Path:
    """Write the last files of a checkpoint as transformers does."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    names = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]
    for name in names:
        torch.save({"cpu": torch.get_rng_state()}, path / name)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path


@pytest.mark.parametrize("processes", [1, 3])
def test_a_checkpoint_without_its_last_bytes_is_not_resumed(tmp_path: Path, processes: int) -> None:
    """Steps are compared as numbers, and folders with other names are ignored."""
    for step in (8, 9, 10):
        (checkpoint(tmp_path, step, processes) / "global_step").mkdir()  # weights that are not looked into
    (tmp_path / "checkpoint-best").mkdir()
    point = decide(tmp_path, True, processes)
    assert (point.newest, list(point.rejected)) == (tmp_path / "checkpoint-10", [])
    for file in sorted(path for path in (tmp_path / "checkpoint-10").iterdir() if path.is_file()):
        whole = file.read_bytes()
        for kept in (0, 1, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:kept])
            point = decide(tmp_path, True, processes)
            assert point.newest == tmp_path / "checkpoint-9", (file.name, kept)
            assert [(one.path.name, one.cut_off) for one in point.passed_over] == [("checkpoint-10", True)]
        file.unlink()
        assert not is_complete(tmp_path / "checkpoint-10", processes)
        file.write_bytes(whole)
    assert is_complete(tmp_path / "checkpoint-10", processes)


def test_a_step_that_was_cut_off_twice_is_set_aside_twice(tmp_path: Path) -> None:
    for _ in range(2):
        set_aside([Rejected(checkpoint(tmp_path, 3, 1), RunError("checkpoint-3", "cut off", "none"), cut_off=True)])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3-incomplete"]


def test_the_log_of_a_long_run_is_read(tmp_path: Path) -> None:
    """Other JSON files may have 32 MiB at most."""
    folder = checkpoint(tmp_path, 3, 1)
    (folder / "trainer_state.json").write_text(json.dumps({"log": "x" * (33 << 20), "global_step": 3}))
    assert steps_done(folder) == 3


def named(folder: Path) -> str | None:
    """Return the file that is damaged in a checkpoint of another trainer."""
    found = checkpoint_damage(folder)
    return None if found is None else found.place


def test_damage_to_a_checkpoint_of_another_trainer_is_named(tmp_path: Path, tiny_model: Path) -> None:
    """A checkpoint as transformers writes it, each of its files cut off, emptied or removed in turn."""
    folder = checkpoint(tmp_path, 4, 1)
    (folder / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes())
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({"state": torch.zeros(9)}, folder / name)
    assert checkpoint_damage(folder) is None
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
        whole = (folder / name).read_bytes()
        for kept in (0, 5, len(whole) // 2, len(whole) - 1):
            (folder / name).write_bytes(whole[:kept])
            assert named(folder) == str(folder / name), (name, kept)
        (folder / name).unlink()
        assert str(named(folder)).startswith(str(folder))
        (folder / name).write_bytes(whole)
    for name in ("scaler.pt", "custom_0.pth", "value_head.bin", "value_head.safetensors"):
        (folder / name).write_bytes(b"")
        assert named(folder) == str(folder / name)
        (folder / name).unlink()
    (folder / "training_args.bin").write_bytes(b"")  # a resume reads none
    assert checkpoint_damage(folder) is None
    assert rejection(folder, 1) is None
    (folder / "config.json").write_text("[1]")
    found = rejection(folder, 1)
    assert found is not None
    assert (found.damage.place, found.cut_off) == (str(folder / "config.json"), False)
    (folder / "config.json").unlink()
    (folder / "scheduler.pt").unlink()
    for name in ("global_step4", "pytorch_model_fsdp_0"):  # DeepSpeed's own, and FSDP's
        (folder / name).mkdir()
        assert checkpoint_damage(folder) is None
        (folder / name).rmdir()
        assert named(folder) == str(folder / "scheduler.pt")
    obstacle = decide(tmp_path, True, 1).obstacle()
    assert obstacle is not None
    assert (obstacle.place, str(folder) in obstacle.fix) == (str(folder / "scheduler.pt"), True)


def test_a_description_that_can_not_be_read_is_damage_of_a_complete_checkpoint_too(tmp_path: Path) -> None:
    """It was damaged before the manifest listed it, so that sizes and checksums agree."""
    folder = checkpoint(tmp_path, 4, 1)
    (folder / "generation_config.json").write_text("[1]")
    write_manifest(folder, Manifest(4, 1, False, {}), each_node=False, writes=True)
    found = rejection(folder, 1)
    assert found is not None
    assert str(folder / "generation_config.json") in found.reason
