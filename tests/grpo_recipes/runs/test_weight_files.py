"""Weight files as the libraries write them pass, and no longer once a byte is gone."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from grpo_recipes.runs.weight_files import WeightFileError, check_weight_files, weight_files
from tests.grpo_recipes import tiny_policy


def whole(folder: Path) -> Path:
    return tiny_policy.save(folder)


def sharded(folder: Path) -> Path:
    tiny_policy.new_model().save_pretrained(folder, max_shard_size="20KB")
    return folder


def adapter(folder: Path) -> Path:
    base = tiny_policy.save(folder.parent / "base")
    tiny_policy.adapted(base, LoraConfig(target_modules=["q_proj"]), continued=False).save_pretrained(folder)
    return folder


def pickled(folder: Path) -> Path:
    folder.mkdir()
    torch.save(tiny_policy.new_model().state_dict(), folder / "pytorch_model.bin")
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
