"""Weight files as the libraries write them are accepted, a missing byte is refused, and identities differ."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file

from grpo_recipes.runs.checkpoints import description_damage
from grpo_recipes.runs.files import RunError
from grpo_recipes.runs.weights import (
    CHUNK,
    END_BYTES,
    adapter_config,
    check_finite_files,
    check_weight_file,
    check_weight_files,
    identify_weights,
    nonfinite_tensor,
    weight_files,
)
from grpo_recipes.training.prompt_sampler import MEMORY
from grpo_recipes.training.saving import LOGGED
from tests.support import short_runs, tiny
from tests.support.errors import refused


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
def test_saved_weights_are_complete_and_any_missing_byte_is_named(tmp_path: Path, save: object, count: int) -> None:
    folder = save(tmp_path / "model")  # type: ignore[operator]
    check_weight_files(folder)
    files = weight_files(folder)
    assert len(files) >= count
    assert files == sorted(set(files)), "a shard holds several tensors and is one file"
    for file in files:
        content = file.read_bytes()
        for kept in (0, 3, 8, 30, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:kept])
            with refused(file, by=RunError):
                check_weight_files(folder)
        file.unlink()
        with refused(folder, by=RunError):
            check_weight_files(folder)
        file.write_bytes(content)
    check_weight_files(folder)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_weights_are_identified_by_any_tensor_and_not_by_their_folder(tmp_path: Path, suffix: str) -> None:
    """The last tensor, beyond the first MiB, differs, as after training with a frozen embedding."""
    save = save_file if suffix == ".safetensors" else torch.save
    identities = set()
    for folder, trained in (("before", 0.0), ("after", 1.0), ("copy", 1.0)):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / f"model{suffix}"
        save({"a_embedding": torch.ones(END_BYTES), "b_layer": torch.full((9,), trained)}, file)
        identities.add((trained, identify_weights(file)))
    assert len(identities) == 2


def test_a_header_with_an_impossible_offset_is_refused(tmp_path: Path) -> None:
    """A read with a negative length would read the entire file."""
    file, good = tmp_path / "model.safetensors", {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    spans = ([-4, 0], [0], None, "ab", [0, 10**30], [0.0, 4.0], [True, 4], [4, 0], [-1, 4])
    for header in [{"w": {**good, "data_offsets": span}} for span in spans] + [{"a": good, "b": {**good}}]:
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
        for read in (check_weight_file, identify_weights):
            with refused(file, by=RunError):
                read(file)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    with refused(tmp_path, "model.safetensors", "model.safetensors.index.json", by=RunError):
        check_weight_files(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with refused(tmp_path, "adapter_model.safetensors", "adapter_model.bin", by=RunError):
        check_weight_files(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with refused(tmp_path / "adapter_model.bin", "git lfs pull", by=RunError):
        check_weight_files(tmp_path)


def test_a_file_of_an_old_torch_is_accepted(tmp_path: Path) -> None:
    """Files of the time before zip files do not say where they end."""
    torch.save({"layer": torch.ones(3)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    check_weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    with refused(tmp_path / "pytorch_model.bin", "7 bytes", by=RunError):
        check_weight_files(tmp_path)


def test_only_parts_of_the_weights_are_read_to_identify_them(tmp_path: Path) -> None:
    """To read all of the 64 GiB, which are a hole in the file, would take much longer."""
    file, size = tmp_path / "model.safetensors", 1 << 33
    entries = {f"w{n}": {"dtype": "U8", "shape": [size], "data_offsets": [n * size, (n + 1) * size]} for n in range(8)}
    header = json.dumps(entries).encode()
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(8 + len(header) + 8 * size)
    began = time.monotonic()
    identify_weights(file)
    assert time.monotonic() - began < 5


def test_an_index_names_files_in_its_folder(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    names = (1, "../model.safetensors", "/etc/passwd", "x\0", "n" * 256, "n/../../model", "")
    for content in (
        *({"weight_map": {"a": name}} for name in names),
        {"weight_map": ["a"]},
        {"weight_map": {}},
        {},
        [],
    ):
        index.write_text(json.dumps(content))
        with refused(index, by=RunError):
            weight_files(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "n" * 255, "b": "n" * 255}}))
    assert weight_files(tmp_path) == [tmp_path / ("n" * 255)]


def test_the_first_4_kib_of_each_tensor_are_a_part_of_the_identity(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    # Only a tensor that begins behind the first MiB shows what is read of it.
    save_file({"a": torch.zeros(2 << 20, dtype=torch.uint8), "b": torch.zeros(5000, dtype=torch.uint8)}, file)
    content = file.read_bytes()
    start = len(content) - 5000
    before = identify_weights(file)
    for place, counts in ((start, True), (start + 4095, True), (start + 4096, False), (len(content) - 1, False)):
        changed = bytearray(content)
        changed[place] = 1
        file.write_bytes(changed)
        assert (identify_weights(file) != before) is counts, place


@pytest.mark.parametrize("size", [5, END_BYTES, 3 * END_BYTES])
def test_the_size_and_both_ends_of_another_file_are_its_identity(tmp_path: Path, size: int) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(bytes(size))
    found = {identify_weights(file)}
    places = {0, min(size, END_BYTES) - 1, size - min(size, END_BYTES), size - 1}
    for place in places:
        content = bytearray(size)
        content[place] = 1
        file.write_bytes(content)
        found.add(identify_weights(file))
    assert len(found) == 1 + len(places)
    file.write_bytes(bytes(size + 1))
    assert identify_weights(file) not in found, "of zeros only, and one more"


def test_the_names_of_tensors_behind_the_first_bytes_are_a_part_of_the_identity(tmp_path: Path) -> None:
    found = set()
    for name in ("first", "other"):
        save_file({name: torch.ones(3)}, tmp_path / "model.safetensors", metadata={"long": "x" * END_BYTES})
        found.add(identify_weights(tmp_path / "model.safetensors"))
    assert len(found) == 2


def test_the_configuration_of_an_adapter_is_read_at_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def read(where: str, revision: str) -> None:
        asked.append((where, revision))
        raise OSError("it is not there")

    monkeypatch.setattr("peft.PeftConfig.from_pretrained", read)
    assert adapter_config("org/name", "v2") is None
    assert adapter_config(Path("org/name")) is None
    assert asked == [("org/name", "v2"), ("org/name", "main")]
    assert adapter_config(tmp_path) is None
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": None}))
    with refused(tmp_path / "adapter_config.json", "OSError: it is not there", by=RunError):
        adapter_config(tmp_path)
    assert asked[2:] == [(str(tmp_path), "main")]


def test_json_of_a_script_in_a_checkpoint_is_ignored(tmp_path: Path) -> None:
    for content in ("[1, 2]", "{"):
        (tmp_path / "scores.json").write_text(content)
        assert description_damage(tmp_path) is None
        for name in (LOGGED, MEMORY, "config.json", "adapter_config.json"):
            (tmp_path / name).write_text(content)
            found = description_damage(tmp_path)
            assert found is not None
            assert found.place == str(tmp_path / name)
            (tmp_path / name).unlink()


def test_the_first_tensor_that_is_not_finite_is_named(tmp_path: Path) -> None:
    """The value is behind the first of the values that are read together."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for value in (math.nan, math.inf, -math.inf, torch.finfo(dtype).max):
            tensors = {"a": torch.arange(9), "b": torch.randn(5).to(dtype), "c": torch.randn(CHUNK + 5).to(dtype)}
            tensors["c"][CHUNK + 3] = value
            save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
            expected = None if math.isfinite(value) else "c"
            assert nonfinite_tensor(tmp_path / "model.safetensors") == expected, (dtype, value)
    check_finite_files(tmp_path)
    tensors["b"][0] = math.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with refused(tmp_path / "model.safetensors", "in b", by=RunError):
        check_finite_files(tmp_path)
