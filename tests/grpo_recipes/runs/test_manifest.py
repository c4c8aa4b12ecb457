"""What a manifest that can't be read, or that another file differs from, is called."""

from pathlib import Path

import pytest

from grpo_recipes.runs.files import TEXT_OR_NULL
from grpo_recipes.runs.manifest import CHECKSUM, MANIFEST, CheckpointDamaged, Manifest, read_manifest, size_damage

WHOLE = Manifest(step=3, num_processes=2, model_only=False, files={"a": {"bytes": 4, CHECKSUM: "0" * 16}})


def test_a_text_may_be_left_out() -> None:
    assert [TEXT_OR_NULL.holds(value) for value in (None, "", "a", 1, [])] == [True, True, True, False, False]


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    (tmp_path / MANIFEST).write_text(WHOLE.text())
    assert read_manifest(tmp_path) == WHOLE


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"{", "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (WHOLE.text().replace('"step": 3', '"step": 4').encode(), "its own checksum differs"),
        (b"{}", "its own checksum differs"),
        (None, "is damaged"),  # a folder of that name
    ],
)
def test_a_manifest_that_can_not_be_read_is_named(content: bytes | None, says: str, tmp_path: Path) -> None:
    if content is None:
        (tmp_path / MANIFEST).mkdir()
    else:
        (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointDamaged) as error:
        read_manifest(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / MANIFEST} ")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("size", "expected", "says"),
    [
        (4, 4, None),
        (0, 0, None),
        (None, 4, "is missing"),
        (0, 4, "is empty"),
        (3, 4, "is cut off: it has 3 bytes, and the manifest tells of 4"),
        (5, 4, "is damaged: it has 5 bytes, and the manifest tells of 4"),
        (5, 0, "is damaged: it has 5 bytes, and the manifest tells of 0"),
    ],
)
def test_a_file_of_another_size_is_named(size: int | None, expected: int, says: str | None, tmp_path: Path) -> None:
    if size is not None:
        (tmp_path / "a").write_bytes(b"x" * size)
    manifest = Manifest(3, 2, False, {"a": {"bytes": expected, CHECKSUM: "0" * 16}})
    assert size_damage(tmp_path, manifest) == (None if says is None else f"{tmp_path / 'a'} {says}")
