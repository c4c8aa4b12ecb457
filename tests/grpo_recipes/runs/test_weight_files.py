"""Weight files as the libraries write them pass, and no longer once a byte is gone."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from grpo_recipes.runs.weight_files import WeightFileError, check_weight_files, weight_files
from tests import tiny
from tests.grpo_recipes import short_runs


def whole(folder: Path) -> Path:
    return tiny.save_policy(folder)


def sharded(folder: Path) -> Path:
    tiny.policy().save_pretrained(folder, max_shard_size="20KB")
    return folder


def adapter(folder: Path) -> Path:
    base = tiny.save_policy(folder.parent / "base")
    short_runs.adapted(base, LoraConfig(target_modules=["q_proj"]), continued=False).save_pretrained(folder)
    return folder


def pickled(folder: Path) -> Path:
    folder.mkdir()
    torch.save(tiny.policy().state_dict(), folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize(("save", "count"), [(whole, 1), (sharded, 2), (adapter, 1), (pickled, 1)])
def test_what_was_saved_is_whole_and_any_missing_byte_is_named(tmp_path: Path, save: object, count: int) -> None:
    folder = save(tmp_path / "model")  # type: ignore[operator]
    check_weight_files(folder)
    files = weight_files(folder)
    assert len(files) >= count
    for file in files:
        content = file.read_bytes()
        for kept in (0, 3, 8, 30, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:kept])
            with pytest.raises(WeightFileError) as error:
                check_weight_files(folder)
            assert str(error.value).startswith(f"{file} is ")
        file.unlink()
        with pytest.raises(WeightFileError, match="is missing"):
            check_weight_files(folder)
        file.write_bytes(content)
    check_weight_files(folder)
