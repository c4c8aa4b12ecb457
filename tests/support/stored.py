"""Files of a run, an evaluation and a model as text and bytes, by name, for tests that damage one of them."""

from __future__ import annotations

import io
import json
from typing import Any

import pandas as pd

from tests.support.synthetic import CONFIG, HEALTHY, RECIPE, REWARDS, STEPS, healthy_completions

Files = dict[str, str | bytes]

SHARE = {"value": 0.5, "low": 0.2, "high": 0.8}
EVALUATION: dict[str, Any] = {"problems": 2, "strict": SHARE, "lenient": SHARE, "settings": {"samples": 1}}
RECORD: dict[str, Any] = {"recipe": RECIPE, "config": CONFIG, "rewards": REWARDS, "versions": {"trl": "1.16.0"}}
HISTORY: list[dict[str, Any]] = [
    {"step": step, **{key: curve(step / len(STEPS)) for key, curve in HEALTHY.items()}} for step in STEPS
]
_HEADER = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
ONE_TENSOR = len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(4)
"""Contents of an undamaged safetensors file."""
EVALUATED: dict[str, Any] = {
    "problem": [0, 1],
    "sample": [0, 0],
    "prompt": ["1+1=", "2+2="],
    "gold": ["2", "4"],
    "completion": ["2", "5"],
    "answer": ["2", None],
    "strict": [True, False],
    "lenient": [True, False],
}


def parquet(columns: Any) -> bytes:
    """Return a table as the bytes of a parquet file."""
    content = io.BytesIO()
    pd.DataFrame(columns).to_parquet(content)
    return content.getvalue()


COMPLETIONS = parquet(healthy_completions())


def run_files(folder: str = "run", **replaced: Any) -> Files:
    """Return the files of a healthy run.

    `state`, `record`, `completions` and `evaluation` replace a file's content, or remove the file if None. `fault` adds
    the file with the cause of a failure.
    """
    contents = {"state": {"log_history": HISTORY, "global_step": 40}, "record": RECORD, "completions": COMPLETIONS}
    contents |= {"evaluation": EVALUATION, **replaced}
    names = {
        "state": "trainer_state.json",
        "record": "run.json",
        "completions": "completions/completions_00040.parquet",
        "evaluation": "evaluations/before/evaluation.json",
        "fault": "fault-rank0.json",
    }
    return {f"{folder}/{names[key]}": _content(value) for key, value in contents.items() if value is not None}


def evaluation_files(folder: str, summary: Any = EVALUATION, table: Any = EVALUATED) -> Files:
    """Return the files of a finished evaluation, without those that are None."""
    files = {"evaluation.json": summary, "completions.parquet": table}
    files["completions.parquet"] = parquet(table) if isinstance(table, dict) else table
    return {f"{folder}/{name}": _content(value) for name, value in files.items() if value is not None}


def model_files(replaced: dict[str, Any], folder: str = "m") -> Files:
    """Return the files of a model's folder without weights.

    `replaced` replaces or adds files by name, or removes them if None.
    """
    files = {"config.json": {"model_type": "qwen2"}, **replaced}
    return {f"{folder}/{name}": _content(value) for name, value in files.items() if value is not None}


def _content(value: Any) -> str | bytes:
    return value if isinstance(value, (str, bytes)) else json.dumps(value)
