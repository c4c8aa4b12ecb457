"""What a manifest that can't be read, or that another file differs from, is called."""

import os
import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from grpo_recipes.runs import checkpoints
from grpo_recipes.runs.checkpoints import (
    CHECKSUM,
    MANIFEST,
    Manifest,
    content_damage,
    read_manifest,
    size_damage,
    write_manifest,
)
from grpo_recipes.runs.files import RunError

WHOLE = Manifest(step=3, num_processes=2, model_only=False, files={"a": {"bytes": 4, CHECKSUM: "0" * 16}})


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    (tmp_path / MANIFEST).write_text(WHOLE.text())
    assert read_manifest(tmp_path) == WHOLE


def test_a_manifest_stays_readable(tmp_path: Path) -> None:
    """Checkpoints outlive versions: the very text that 0.1.0 writes, whose checksum is over the same without it."""
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
 "branch": [],
 "xxh3_128": "8bd7cfa8f28216bdc54ef79c33325c79"
}
"""
    assert WHOLE.text() == text


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
def test_a_manifest_stands_once_everything_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("of rank 0")
    flushed: list[tuple[str, bool]] = []

    def fsync(descriptor: int) -> None:
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), (tmp_path / MANIFEST).exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_manifest(tmp_path, WHOLE, each_node=False, writes=True)
    assert flushed == [(str(tmp_path / "a"), False), (str(tmp_path / MANIFEST), True), (str(tmp_path), True)]


@pytest.mark.parametrize("each_node", [False, True])
def test_ranks_share_the_work_on_each_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each_node: bool) -> None:
    """Four ranks on two machines; with a disk each, the second rank of a machine writes nothing."""
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
        return content_damage(disks[rank], manifest, each_node=each_node)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(4)))
        for disk in set(disks):
            manifest = read_manifest(disk)
            assert manifest is not None
            there = {path.name: path.read_bytes() for path in disk.glob("part-*")}
            assert manifest.files == {
                name: {"bytes": len(content), CHECKSUM: xxhash.xxh3_128(content).hexdigest()}
                for name, content in there.items()
            }
        assert list(pool.map(damage, range(4))) == [None] * 4
        for rank in range(4):
            (disks[rank] / f"part-{rank}").write_text(f"Of rank {rank}")
            said = f"{disks[rank] / f'part-{rank}'} is damaged: its checksum is not the manifest's"
            assert list(pool.map(damage, range(4))) == [said] * 4, "every rank learns of it"
            (disks[rank] / f"part-{rank}").write_text(f"of rank {rank}")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"{", "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (WHOLE.text().replace('"step": 3', '"step": 4').encode(), "its own checksum differs"),
        (b"{}", "its own checksum differs"),
        (None, "is damaged"),  # a folder of that name
    ],
)
def test_a_manifest_that_can_not_be_read_is_named(content: bytes | None, says: str, tmp_path: Path) -> None:
    if content is None:
        (tmp_path / MANIFEST).mkdir()
    else:
        (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(RunError) as error:
        read_manifest(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / MANIFEST} ")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("size", "expected", "says"),
    [
        (4, 4, None),
        (0, 0, None),
        (None, 4, "is missing"),
        (0, 4, "is empty"),
        (3, 4, "is cut off: it has 3 bytes, and the manifest lists 4"),
        (5, 4, "is damaged: it has 5 bytes, and the manifest lists 4"),
        (5, 0, "is damaged: it has 5 bytes, and the manifest lists 0"),
    ],
)
def test_a_file_of_another_size_is_named(size: int | None, expected: int, says: str | None, tmp_path: Path) -> None:
    if size is not None:
        (tmp_path / "a").write_bytes(b"x" * size)
    manifest = Manifest(3, 2, False, {"a": {"bytes": expected, CHECKSUM: "0" * 16}})
    assert size_damage(tmp_path, manifest) == (None if says is None else f"{tmp_path / 'a'} {says}")
