"""Time and memory of `grpo-recipes diagnose` and `report` on a run of many steps, written here without training.

    python benchmarks/large_run.py [--steps 100000]
    python benchmarks/large_run.py --train 2000

The second command trains a model of a few hundred parameters instead, logs and saves often, and prints the figures that
may grow with the number of steps: resident memory, open files, files in the folder, and the time of a save.

The log of the first command holds the 45 metrics of a real run at every step. Every tenth step has a file of eight
completions. Each command runs in a process of its own, whose peak of resident memory is read at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

METRICS = [
    *("reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "loss", "grad_norm", "learning_rate", "epoch"),
    *("rewards/gsm8k_correctness/mean", "rewards/gsm8k_correctness/std", "rewards/gsm8k_correctness/parsed"),
    *("rewards/gsm8k_correctness/symbolic", "rewards/gsm8k_correctness/timeouts"),
    *("rewards/tag_presence/mean", "rewards/tag_presence/std", "step_time", "num_tokens"),
    *(f"completions/{kind}_{side}" for kind in ("mean", "min", "max") for side in ("length", "terminated_length")),
    *("completions/clipped_ratio", "cispo_clip_ratio", "sampling/importance_sampling_ratio/mean"),
    *(f"clip_ratio/{side}" for side in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")),
    *(f"efficiency/{name}" for name in ("tokens_saved", "rows_skipped", "padding", "prompt_share", "packed_rows")),
    *(f"profiling/Time taken: GRPOTrainer.{name}" for name in ("generate", "score", "loss", "forward", "sync", "log")),
]
REWARDS = [
    {"name": "gsm8k_correctness", "source": "gsm8k_correctness", "weight": 1.0, "kind": "correctness"},
    {"name": "tag_presence", "source": "tag_presence", "weight": 1.0, "kind": "format"},
]
ROWS = 8  # completions of one prompt
STEPS_PER_FILE = 10


def write_run(folder: Path, steps: int) -> Path:
    """Write a run of `steps` logged steps, with completions of 1,000 characters."""
    draw = random.Random(0)
    (folder / "completions").mkdir(parents=True)
    with (folder / "trainer_state.json").open("w") as file, (folder / "_log.jsonl").open("w") as live:
        file.write(f'{{\n  "global_step": {steps},\n  "log_history": [\n')
        live.write(json.dumps({"step": 0, "max_steps": steps}) + "\n")
        for step in range(1, steps + 1):
            entry = {"step": step, **{name: draw.gauss(1 + step / steps, 0.1) for name in METRICS}}
            file.write(json.dumps(entry, indent=2) + (",\n" if step < steps else "\n"))
            live.write(json.dumps(entry) + "\n")
        file.write("  ]\n}\n")
        live.write(json.dumps({"step": steps, "ended": True}) + "\n")
    record = {
        "recipe": {"rewards": ["gsm8k_correctness", "tag_presence"]},
        "config": {"beta": 0.04},
        "rewards": REWARDS,
    }
    (folder / "run.json").write_text(json.dumps(record))
    for step in range(STEPS_PER_FILE, steps + 1, STEPS_PER_FILE):
        question = f"question {step} " + "words " * 40
        table = {
            "step": [step] * ROWS,
            "prompt": [[{"role": "user", "content": question}]] * ROWS,
            "completion": [[{"role": "assistant", "content": draw.randbytes(500).hex()}] for _ in range(ROWS)],
            "gsm8k_correctness": [float(draw.random() < 0.5) for _ in range(ROWS)],
            "tag_presence": [draw.random() for _ in range(ROWS)],
            "advantage": [0.0] * ROWS,
        }
        pd.DataFrame(table).to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")
    return folder


# The peak since this program began. The rusage of a process also counts the program that it ran before.
MEASURED = """
import re, resource, sys
from pathlib import Path
from grpo_recipes.cli import main
code = main(sys.argv[1:])
status = Path("/proc/self/status")
peak = re.search(r"VmHWM:\\s+(\\d+)", status.read_text()) if status.exists() else None
usage = resource.getrusage(resource.RUSAGE_SELF)
kilobytes = int(peak[1]) if peak else usage.ru_maxrss / 1024
print(usage.ru_utime + usage.ru_stime, kilobytes / 1024, file=sys.stderr)
sys.exit(code)
"""


def measure(*arguments: str) -> tuple[float, float, float]:
    """Return the seconds, CPU seconds and peak resident MB of a command in a process of its own."""
    started = time.perf_counter()
    command = [sys.executable, "-c", MEASURED, *arguments]
    process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if process.returncode not in (0, 1):
        raise RuntimeError(process.stderr)
    cpu, megabytes = map(float, process.stderr.splitlines()[-1].split())
    return time.perf_counter() - started, cpu, megabytes


SAVES_PER_ROW = 10
"""Number of saves in one row of the table of a training run."""


def train(folder: Path, steps: int, save_steps: int) -> None:
    """Train a tiny model, and print a row of figures after every `SAVES_PER_ROW` saves."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
    from trl import GRPOConfig

    from grpo_recipes import GRPOTrainer
    from grpo_recipes.run.live_line import LiveLog
    from grpo_recipes.runs.files import LIVE

    words = [f"w{number}" for number in range(64)]
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w1", padding_side="left")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes))
    args = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=4,
        max_steps=steps + 1,  # the row is printed when the next step begins
        logging_steps=1,
        log_completions=True,
        num_completions_to_print=0,
        save_steps=save_steps,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
    )

    def distinct(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    prompts = Dataset.from_dict({"prompt": [f"{one} {other}" for one in words[2:10] for other in words[2:10]]})
    trainer = GRPOTrainer(model, distinct, args, prompts, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(LiveLog(folder / LIVE))
    trainer.add_callback(_between_steps(folder, save_steps))
    trainer.train()


def _between_steps(folder: Path, save_steps: int) -> Any:
    """Return a callback that measures the time between two steps and prints the table."""
    import pyarrow as pa
    from transformers import TrainerCallback

    logs: list[float] = []
    saves: list[float] = []
    ended = 0.0

    class BetweenSteps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            nonlocal ended
            ended = time.perf_counter()

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            step = state.global_step
            if not step:
                return
            (saves if step % save_steps == 0 else logs).append(1000 * (time.perf_counter() - ended))
            if step % (SAVES_PER_ROW * save_steps):
                return
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
            tables = len(os.listdir(folder / "completions"))
            saved = (folder / f"checkpoint-{step}" / "trainer_state.json").stat().st_size / 1e6
            print(
                f"| {step:,} | {resident:.0f} | {pa.total_allocated_bytes() / 1e6:.1f} | "
                f"{len(os.listdir('/proc/self/fd'))} | {tables:,} | "
                f"{saved:.2f} | {statistics.median(logs):.0f} | "
                f"{statistics.median(saves):.0f} | {max(saves):.0f} |",
                flush=True,
            )
            logs.clear()
            saves.clear()

    print(
        "| step | resident, MB | held by pyarrow, MB | open files | files of completions | "
        "trainer_state.json, MB | "
        "log, ms | save, ms | longest save, ms |\n|---|---|---|---|---|---|---|---|---|"
    )
    return BetweenSteps()


def main() -> None:
    """Print a table of both commands at a quarter of the size and at the full size, or of a training run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--train", type=int, metavar="STEPS", help="number of steps to train instead")
    parser.add_argument(
        "--save_steps", type=int, default=25, help="steps between two saves of the training run (default: 25)"
    )
    options = parser.parse_args()
    names = ("trl", "transformers", "pyarrow") if options.train else ("pandas", "pyarrow")
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, ",
        end="",
    )
    print(", ".join(f"{name} {version(name)}" for name in names) + "\n")
    if options.train:
        with tempfile.TemporaryDirectory() as folder:
            train(Path(folder), options.train, options.save_steps)
        return
    print("| command | steps | files of completions | seconds | CPU s | peak memory, MB |\n|---|---|---|---|---|---|")
    for share in (4, 1):
        steps = options.steps // share
        with tempfile.TemporaryDirectory() as folder:
            run = str(write_run(Path(folder) / "run", steps))
            for command in ("diagnose", "report"):
                seconds, cpu, peak = measure(command, run)
                print(
                    f"| {command} | {steps:,} | {steps // STEPS_PER_FILE:,} | {seconds:.1f} | {cpu:.1f} | {peak:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
