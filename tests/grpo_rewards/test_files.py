"""The bounded reader: regular files only, up to a size, and one sentence about what is not JSON. Atomic writing."""

import os
from pathlib import Path

import pytest

from grpo_rewards import files
from grpo_rewards.files import MODEL_JSON, UnreadableFile, check_model_files, read_json, read_text
from tests.support.errors import refused


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "to the pipe").symlink_to("pipe")
    for name in ("pipe", "folder", "zeros", "to the pipe"):
        with refused(tmp_path / name, by=UnreadableFile):
            read_json(tmp_path / name)
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("loop", "n" * 300, "nul\0", "file/below"):
        with refused(tmp_path / name, by=UnreadableFile):
            read_json(tmp_path / name)
    if os.geteuid():  # root may read every file
        (tmp_path / "file").chmod(0)
        with refused(tmp_path / "file", "Permission denied", by=UnreadableFile):
            read_text(tmp_path / "file")
        (tmp_path / "file").chmod(0o600)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "nothing")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "link") == "content"


def test_a_file_above_the_largest_size_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(b"[1, 2]")
    assert read_json(file, 6) == [1, 2]
    with refused(file, 6, 5, by=UnreadableFile):
        read_json(file, 5)
    os.truncate(file, 12 << 30)
    with refused(file, "67,108,864", by=UnreadableFile):
        read_json(file)


def test_text_that_is_not_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    for content, *figures in (
        (b"",), (b"{",), (b'"\xff"', 2), (b"\xef\xbb\xbf{}",), (b"1" * 5000, 4300), (b"[" * 200_000,),
        (b'{"a":' * 200_000,),
    ):  # fmt: skip
        file.write_bytes(content)
        with refused(file, *figures, by=UnreadableFile):
            read_json(file)


def test_each_json_file_of_a_model_is_an_object(tmp_path: Path) -> None:
    for name in MODEL_JSON:
        check_model_files(tmp_path)
        (tmp_path / name).write_text("[]")
        with refused(tmp_path / name, by=UnreadableFile):
            check_model_files(tmp_path)
        (tmp_path / name).write_text("{}")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_files_of_libraries_get_the_mode_of_a_new_file(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        for name in ("a.safetensors", "b.json"):
            os.close(os.open(tmp_path / name, os.O_CREAT, 0o600))
        files.give_default_mode(tmp_path, "*.safetensors")
        with files.replacing(tmp_path / "c.safetensors") as part:
            part.unlink()
            os.close(os.open(part, os.O_CREAT, 0o600))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"a.safetensors": mode, "b.json": 0o600, "c.safetensors": mode}


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    file, elsewhere = tmp_path / "file", tmp_path / "elsewhere"
    files.write_atomically(file, "é")
    assert file.read_bytes() == "é".encode()
    files.write_atomically(file, b"\xff")
    (tmp_path / ".file.part").symlink_to(elsewhere)  # a trap by another user of the folder
    with pytest.raises(ZeroDivisionError), files.replacing(file) as part:
        part.write_text(f"half {1 / 0}")
    assert (file.read_bytes(), os.listdir(tmp_path)) == (b"\xff", ["file"])
    elsewhere.write_text("kept")
    (tmp_path / "link").symlink_to(elsewhere)
    files.write_atomically(tmp_path / "link", "new")
    assert (elsewhere.read_text(), (tmp_path / "link").read_text()) == ("kept", "new")
    assert not (tmp_path / "link").is_symlink()


def test_links_and_folders_keep_their_mode(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("")
    outside.chmod(0o600)
    folder = tmp_path / "model"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner").chmod(0o700)
    (folder / "link").symlink_to(outside)
    files.give_default_mode(folder)
    assert [path.stat().st_mode & 0o777 for path in (outside, folder / "inner")] == [0o600, 0o700]
    assert sorted(os.listdir(folder)) == ["inner", "link"], "the probe is gone"


def test_a_relative_path_is_named_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert files.relative_to("rows.jsonl") == f" (relative to {tmp_path})"
    assert files.relative_to("/rows.jsonl") == files.relative_to("~/rows.jsonl") == ""


def test_a_home_is_that_of_a_known_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.expanded("~/rows.csv") == files.expanded(Path("~/rows.csv")) == tmp_path / "rows.csv"
    assert files.expanded("~nobody-here/rows.csv") == Path("~nobody-here/rows.csv")
    assert files.expanded("a/~/rows.csv") == Path("a/~/rows.csv")
    assert files.relative_to("~/rows.csv") == ""
    assert files.relative_to("~nobody-here/rows.csv") == f" (relative to {Path.cwd()})"
