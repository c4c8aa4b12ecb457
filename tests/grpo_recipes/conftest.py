"""A tiny policy on disk, and a GSM8K-shaped file to train it on."""

import json
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's policy, untrained, in a folder that transformers loads."""
    from grpo_recipes.quickstart import WarmStart, build_policy, build_tokenizer, demonstrations
    from grpo_recipes.recipe.specs import DatasetSpec

    torch.manual_seed(0)
    settings = WarmStart(demonstrations=500)
    tokenizer = build_tokenizer(demonstrations(settings, DatasetSpec("arithmetic")), settings.vocab_size)
    folder = tmp_path_factory.mktemp("tiny-model")
    build_policy(tokenizer, settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gsm8k_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty rows in GSM8K's schema."""
    path = tmp_path_factory.mktemp("gsm8k") / "train.jsonl"
    rows = (
        {"question": f"Ann has {n} figs and eats 1. How many are left?", "answer": f"{n}-1={n - 1}\n#### {n - 1}"}
        for n in range(1, 41)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
