"""What `quiet.libraries` keeps from the screen, and what it lets through."""

import warnings

import pytest
from transformers import TrainingArguments
from transformers.utils import logging

from grpo_recipes.runs import quiet


def bar(**options: object) -> None:
    for _ in logging.tqdm(range(2), **options):
        pass


def test_only_what_nobody_can_change_is_silenced(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with quiet.libraries():
            TrainingArguments(str(tmp_path), gradient_checkpointing=True, use_cpu=True)
            warnings.warn("`use_liger_kernel=True` is deprecated", FutureWarning, stacklevel=1)
            for title in ("Loading weights", "Writing model shards", "Fetching 3 files"):
                bar(desc=title)
            bar(desc="Downloading quietly", disable=True)
    assert [str(warning.message) for warning in shown] == ["`use_liger_kernel=True` is deprecated"]
    said = capsys.readouterr().err
    assert "Fetching 3 files" in said
    assert "eights" not in said
    assert "shards" not in said
    assert "quietly" not in said


def test_it_ends_with_its_block(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), quiet.libraries():
        raise KeyError
    bar(desc="Loading weights")
    assert "Loading weights" in capsys.readouterr().err
