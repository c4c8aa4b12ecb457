"""Figures that need a GPU: our kernels against the reference ones, and times and memory at the sizes of real training.

    PYTHONPATH=.:rewards python benchmarks/gpu.py              # every section, on one GPU, in under 8 minutes
    python benchmarks/gpu.py --sections micro_batch whole_step --minutes 4
    python benchmarks/gpu.py --policy runs/quickstart/policy-seed0       # with a model that is trained for 100 steps

Without a GPU everything runs on a CPU at tiny sizes, and the figures mean nothing. Needed are torch 2.10, transformers
5.23, numpy and psutil. The modules `gpu_trl` and, for LoRA, `gpu_torch` also need trl 1.16 and peft; what lacks a
package is skipped.

Models have random weights in the shapes of Qwen2.5-0.5B, 1.5B and 7B. Completions are those of benchmarks/step.py.
"TRL" is its padded layout, "TRL's default" has float32 weights, autocast and gradient checkpointing as well, and
"packed apart" is a packed row that shares no prompt. After each row, the JSON file (`--output`) holds every figure so
far, with the machine and the versions. A row whose kernel, package or time is missing has the result "not run" and the
reason. Times are wall time after the device has finished, medians without the first call or step. The exit code is 1 if
a comparison finds a difference, or a row fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_rows import Bench, Row, Section
from transformers.utils import logging as transformers_logging

SECTIONS = {
    "correctness": "gpu_trl",
    "micro_batch": "gpu_torch",
    "decode_step": "gpu_torch",
    "whole_step": "gpu_trl",
    "memory": "gpu_trl",
    "training": "gpu_trl",
    "adamw_bf16": "gpu_torch",
    "reward_model": "gpu_torch",
    "attention": "gpu_attention",
    "precision": "gpu_torch",
    "pretrained": "gpu_trl",
    "generation": "gpu_trl",
}
"""Module of each section, whose function has the section's name, in the order of a user's questions.

A section is imported when its turn comes.
"""


def installed(package: str) -> str:
    """Return a package's version, or "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def machine(bench: Bench) -> Row:
    """Return the machine and the versions of the measurement."""
    packages = ("torch", "transformers", "trl", "peft", "accelerate")
    return {
        "device": "cpu" if bench.device == "cpu" else torch.cuda.get_device_name(),
        "python": platform.python_version(),
        **{package: installed(package) for package in packages},
        "varlen_attn": find_spec("torch.nn.attention.varlen") is not None,
        "figures mean something": not bench.tiny,
    }


def measure(bench: Bench, sections: list[str], output: Path) -> dict[str, Any]:
    """Run the sections, print their rows, update the file after each, and return its contents."""
    found: dict[str, Any] = {"machine": machine(bench), "sections": {name: [] for name in sections}}
    print(json.dumps(found["machine"]), flush=True)
    for name, rows in found["sections"].items():
        try:
            section: Section = getattr(import_module(SECTIONS[name]), name)
        except ModuleNotFoundError as error:
            rows.append({"result": f"not run: the package {error.name} is not installed"})
            write(output, found)
            print(f"\n## {name}: {rows[0]['result']}", flush=True)
            continue
        print(f"\n## {name}: {(section.__doc__ or '').splitlines()[0]}", flush=True)
        started = time.monotonic()
        for measurement in section(bench):
            row = bench.result_of(measurement)
            rows.append(row)
            write(output, found)
            print("  ".join(f"{key}: {value}" for key, value in row.items()), flush=True)
        print(f"({time.monotonic() - started:.0f} s)", flush=True)
    return found


def write(output: Path, found: dict[str, Any]) -> None:
    """Write the figures so far."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def main(args: list[str] | None = None) -> int:
    """Run the sections of the command line and return 1 if a comparison or a row failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="sizes at which figures mean nothing, as on a CPU")
    parser.add_argument(
        "--steps", type=int, default=4, help="number of steps of each row of TRL; the first one warms up (default: 4)"
    )
    parser.add_argument(
        "--minutes", type=float, default=7.5, help="minutes after which no further row starts (default: 7.5)"
    )
    parser.add_argument("--row-seconds", type=float, default=60, help="most seconds of a row (default: 60)")
    parser.add_argument("--policy", type=Path, help="folder with a pretrained model")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu.json"))
    options = parser.parse_args(args)
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    tiny = options.tiny or options.device == "cpu"
    if options.device == "cpu":
        torch.set_num_threads(1)
        print("On a CPU the sizes are tiny: this shows that everything runs, and the figures mean nothing.")
    ends = time.monotonic() + 60 * options.minutes
    steps = 2 if tiny else options.steps
    bench = Bench(options.device, tiny, steps, options.policy, ends, options.row_seconds)
    found = measure(bench, options.sections, options.output)
    results = [row.get("result", "") for rows in found["sections"].values() for row in rows]
    print(f"\n{options.output} holds these figures")
    return int(any(result in ("WRONG", "FAILED") for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
