"""Cost of the checksums in a checkpoint's manifest, beside writing and flushing the files.

    python benchmarks/checkpoint.py                    # 1 GiB in the temporary folder
    python benchmarks/checkpoint.py --gib 8 --folder /mnt/run

The checksum reads a file that has just been written, from memory, as a save does. A resume also reads the file from its
disk. Times are CPU time of one process, with SHA-256 for comparison. Rounds alternate, and each figure is the median of
its rounds.
"""

import argparse
import hashlib
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

from grpo_recipes.runs.checkpoints import checksum

BLOCK = os.urandom(1 << 26)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        file = Path(folder) / "model.safetensors"
        blocks = max(1, round(options.gib * (1 << 30) / len(BLOCK)))
        actions: dict[str, Callable[[], object]] = {
            "write and flush": lambda: write(file, blocks),
            "checksum (XXH3, 128 bits)": lambda: checksum(file),
            "SHA-256": lambda: sha256(file),
        }
        for _ in range(options.rounds):
            for name, action in actions.items():
                times.setdefault(name, []).append(timed(action))
    size = blocks * len(BLOCK) / 1e9
    print(f"{size:.2f} GB; {platform.machine()}, Python {platform.python_version()}, xxhash {xxhash.VERSION}\n")
    print("| | GB/s of CPU time | GB/s of wall time | seconds for 16 GB |")
    print("|---|---|---|---|")
    for name, measured in times.items():
        cpu, wall = (statistics.median(column) for column in zip(*measured, strict=True))
        print(f"| {name} | {size / cpu:.2f} | {size / wall:.2f} | {16 * wall / size:.1f} |")


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Return the CPU and wall seconds of a call."""
    cpu, wall = time.process_time(), time.perf_counter()
    action()
    return time.process_time() - cpu, time.perf_counter() - wall


def write(file: Path, blocks: int) -> None:
    """Write a file of random bytes and flush it to the disk."""
    with file.open("wb") as opened:
        for _ in range(blocks):
            opened.write(BLOCK)
        opened.flush()
        os.fsync(opened.fileno())


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


if __name__ == "__main__":
    main()
