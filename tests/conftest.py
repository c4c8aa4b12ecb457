"""Fixtures that every test folder shares."""

import os
from pathlib import Path

import pytest

# Tiny models gain nothing from threads, and lose a factor of ten to them where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def _shared(*parts: str) -> Path:
    path = SHARED_DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {path}, which lies beside a development checkout and is not part of the project")
    return path


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    """The folder with GSM8K's train.jsonl, test.jsonl and model_solutions_dev.jsonl."""
    return _shared("gsm8k")


@pytest.fixture(scope="session")
def internlm2_dir() -> Path:
    """The folder with InternLM2's tokenizer, configuration, checkpoint maker and recorded scores."""
    return _shared("internlm2")
