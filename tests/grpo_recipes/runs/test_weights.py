"""Weight files as the libraries write them are accepted, a missing byte is refused, and identities differ."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file

from grpo_recipes.runs import weights
from grpo_recipes.runs.checkpoints import description_damage
from grpo_recipes.runs.files import RunError
from grpo_recipes.runs.weights import (
    END_BYTES,
    adapter_config,
    check_weight_file,
    check_weight_files,
    identify_weights,
    weight_files,
)
from grpo_recipes.training.prompt_sampler import MEMORY
from grpo_recipes.training.saving import LOGGED
from tests.support import short_runs, tiny


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
            with pytest.raises(RunError) as error:
                check_weight_files(folder)
            assert str(error.value).startswith(f"{file} is ")
        file.unlink()
        with pytest.raises(RunError, match="is missing"):
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


@pytest.mark.parametrize("offsets", [[4, 0], [-4, 0], [0], None, "ab"])
def test_a_header_with_an_impossible_offset_is_refused(offsets: object, tmp_path: Path) -> None:
    """A read with a negative length would read the entire file."""
    good = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"a": good, "b": {**good, "data_offsets": offsets}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    for read in (check_weight_file, identify_weights):
        with pytest.raises(RunError, match="is cut off or damaged"):
            read(file)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError) as error:
        check_weight_files(tmp_path)
    expected = "model.safetensors or model.safetensors.index.json"
    assert str(error.value) == f"{tmp_path} has no weights of a model: {expected} is missing"
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(RunError) as error:
        check_weight_files(tmp_path)
    expected = "adapter_model.safetensors or adapter_model.bin"
    assert str(error.value) == f"{tmp_path} has no weights of an adapter: {expected} is missing"


def test_a_file_of_an_old_torch_is_accepted(tmp_path: Path) -> None:
    """Files of the time before zip files do not say where they end."""
    torch.save({"layer": torch.ones(3)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    check_weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    with pytest.raises(RunError, match=r"pytorch_model.bin is cut off or damaged \(7 bytes\)"):
        check_weight_files(tmp_path)


def test_a_file_without_tensors_is_complete(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    check_weight_files(tmp_path)


def test_only_parts_of_the_weights_are_read_to_identify_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first MiB, the header, and 4 KiB of each tensor are read."""
    file = tmp_path / "model.safetensors"
    save_file({f"layer{n}": torch.ones(1 << 20) for n in range(8)}, file)
    read = []

    class Counting(type(file.open("rb"))):  # type: ignore[misc]
        def read(self, size: int = -1) -> bytes:
            read.append(len(content := super().read(size)))
            return content

    monkeypatch.setattr(weights, "open_ordinary", lambda path: Counting(path.open("rb", buffering=0)))
    identify_weights(file)
    header = file.stat().st_size - 8 * (4 << 20)
    assert sum(read) == (1 << 20) + header + 8 * (4 << 10)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"weight_map": {"a": 1}}, "`weight_map.a` is 1, not the name of a file in the same folder"),
        ({"weight_map": {"a": "../model.safetensors"}}, "not the name of a file in the same folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "not the name of a file in the same folder"),
        ({"weight_map": {"a": "x\0"}}, "not the name of a file in the same folder"),
        ({"weight_map": {"a": "n" * 300}}, "not the name of a file in the same folder"),
        ({"weight_map": {"a": "n" * 256}}, "not the name of a file in the same folder"),
        ({"weight_map": {"a": "n/../../model"}}, "not the name of a file in the same folder"),
        ({"weight_map": {"a": ""}}, "not the name of a file in the same folder"),
        ({"weight_map": ["a"]}, "`weight_map` is a list, not an object"),
        ({"weight_map": {}}, "it names no file of weights"),
        ({}, "it has no `weight_map`"),
        ([], "it is a list, not an object"),
    ],
)
def test_an_index_names_files_in_its_folder(tmp_path: Path, content: object, says: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(RunError) as error:
        weight_files(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'model.safetensors.index.json'} is damaged: ")
    assert says in str(error.value)


@pytest.mark.parametrize("span", [[0, 10**30], [0.0, 4.0], [True, 4], [4, 0], [-1, 4], [0], "04"])
def test_a_tensor_outside_of_its_file_is_refused(tmp_path: Path, span: object) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": span}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    for read in (check_weight_file, identify_weights):
        with pytest.raises(RunError, match="is cut off or damaged"):
            read(tmp_path / "model.safetensors")


def test_the_first_4_kib_of_each_tensor_are_a_part_of_the_identity(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2 << 20, dtype=torch.uint8), "b": torch.zeros(9, dtype=torch.uint8)}, file)
    content = file.read_bytes()
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
    for place in {0, min(size, END_BYTES) - 1, size - min(size, END_BYTES), size - 1}:
        content = bytearray(size)
        content[place] = 1
        file.write_bytes(content)
        found.add(identify_weights(file))
        content[place] = 0
    assert len(found) == 1 + len({0, min(size, END_BYTES) - 1, size - min(size, END_BYTES), size - 1})
    file.write_bytes(bytes(size + 1))
    assert identify_weights(file) not in found, "of zeros only, and one more"


def test_the_names_of_tensors_behind_the_first_bytes_are_a_part_of_the_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "END_BYTES", 16)
    found = set()
    for name in ("first", "other"):
        save_file({name: torch.ones(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
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
    with pytest.raises(
        RunError, match=r"peft can't read it \(OSError: it is not there\); copy or download the adapter"
    ):
        adapter_config(tmp_path)
    assert asked[2:] == [(str(tmp_path), "main")]


@pytest.mark.parametrize("content", ["[1, 2]", '"done"', "{"])
def test_json_of_a_script_in_a_checkpoint_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "scores.json").write_text(content)
    assert description_damage(tmp_path) is None
    for name in (LOGGED, MEMORY, "config.json", "adapter_config.json"):
        (tmp_path / name).write_text(content)
        assert f"{tmp_path / name}: " in str(description_damage(tmp_path))
        (tmp_path / name).unlink()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "largest"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_first_tensor_that_is_not_finite_is_named(
    dtype: torch.dtype, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "CHUNK", 4)
    tensors = {"a": torch.arange(9), "b": torch.randn(5).to(dtype), "c": torch.randn(11).to(dtype)}
    tensors["c"][9] = torch.finfo(dtype).max if value == "largest" else float(value)
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    expected = None if tensors["c"].isfinite().all() else "c"
    assert weights.nonfinite_tensor(tmp_path / "x.safetensors") == expected
