"""The bounded reader: ordinary files only, no byte beyond the bound, and JSON that is counted before it is parsed."""

import json
import os
import pickle
import socket
import tracemalloc
from pathlib import Path

import pytest

from grpo_rewards import files
from grpo_rewards.files import (
    UnreadableFile,
    check_model_files,
    nesting_depth,
    open_ordinary,
    read_bytes,
    read_json,
    read_text,
)


def problem(path: Path, most: int = files.JSON_BYTES) -> str:
    with pytest.raises(UnreadableFile) as error:
        read_json(path, most)
    assert str(error.value) == f"{path}: {error.value.problem}"
    return error.value.problem


def test_an_error_can_be_pickled(tmp_path: Path) -> None:
    told = pickle.loads(pickle.dumps(UnreadableFile(f"{tmp_path}: it is empty", tmp_path)))
    assert (str(told), told.problem) == (f"{tmp_path}: it is empty", "it is empty")


def test_only_ordinary_files_are_opened_and_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "to the pipe").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(tmp_path)  # the name of a socket may have 107 bytes
        try:
            listening.bind("socket")
        finally:
            os.chdir(here)
        for name in ("pipe", "folder", "zeros", "to the pipe", "socket"):
            assert problem(tmp_path / name) == "it is no ordinary file", name
    (tmp_path / "loop").symlink_to("loop")
    assert "can't be opened" in problem(tmp_path / "loop")
    assert "can't be opened" in problem(tmp_path / ("n" * 300))
    assert "null byte" in problem(tmp_path / "nul\0")
    (tmp_path / "dangling").symlink_to("nothing")
    for name in ("dangling", "nothing"):
        with pytest.raises(FileNotFoundError):
            read_bytes(tmp_path / name)
    long = b"a\0b" * 500_000  # more than one chunk, and no JSON
    (tmp_path / "long").write_bytes(long)
    assert read_bytes(tmp_path / "long") == long
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link") == b"content"
    assert "can't be opened" in problem(tmp_path / "file" / "below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"{}")
    (tmp_path / "file").chmod(0)
    assert problem(tmp_path / "file") == "it can't be opened (Permission denied)"


def test_no_byte_beyond_the_bound_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(b"[1, 2]")
    assert read_json(file, 6) == [1, 2]
    assert problem(file, 5) == "it has 6 bytes, and at most 5 are read"
    with file.open("wb") as sparse:
        sparse.truncate(12 << 30)
    assert problem(file) == "it has 12,884,901,888 bytes, and at most 33,554,432 are read"
    # Zeros below the bound are not held in memory either: no JSON has a zero byte.
    os.truncate(file, 2 << 30)
    tracemalloc.start()
    assert problem(file, 1 << 31) == "can't be read as JSON (Expecting value: line 1 column 1 (char 0))"
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
    # A file that has grown since its size was checked.
    file.write_bytes(b"[1, 2, 3]")
    monkeypatch.setattr(files, "open_ordinary", lambda path, most: open_ordinary(path))
    assert problem(file, 5) == "it has 6 bytes, and at most 5 are read"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "can't be read as JSON (Expecting value"),
        (b"{", "can't be read as JSON (Expecting property name"),
        (b'"\xff"', "it is not UTF-8 text (byte 2)"),
        ('{"a": 1}'.encode("utf-16"), "it is not UTF-8 text (byte 1)"),
        (b"\xef\xbb\xbf{}", "can't be read as JSON (Unexpected UTF-8 BOM"),
        (b"1" * 5000, "can't be read as JSON (a number has more than 4300 digits)"),
        (b"[" * 200_000, "can't be read as JSON (its brackets are nested more than 100 deep)"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "can't be read as JSON (its brackets are nested more than 100 deep)"),
        (b"[" + b"[]," * 2_000_000 + b"1]", "can't be read as JSON (it has more than 2,000,000 arrays and objects)"),
    ],
)
def test_text_that_is_not_json_or_too_deep_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "file.json").write_bytes(content)
    assert problem(tmp_path / "file.json").startswith(says)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100 + b"]" * 100,
        json.dumps({"text": '[{"\\' * 500, "other": "]" * 500, "more": ['\\"[' * 200]}).encode(),
        '{"größe": ["é\\u2028[", "\\\\"], "a": NaN}'.encode(),
        b'{"a": 1, "a": [2]}',
    ],
)
def test_brackets_inside_strings_do_not_count(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file.json").write_bytes(content)
    assert repr(read_json(tmp_path / "file.json")) == repr(json.loads(content))
    assert read_text(tmp_path / "file.json") == content.decode()


def test_the_existing_files_of_a_model_are_checked(tmp_path: Path) -> None:
    check_model_files(tmp_path)
    for name, content in (("config.json", "{}"), ("vocab.json", "[]"), ("tokenizer.model", "x"), ("run.json", "[")):
        (tmp_path / name).write_text(content)
    check_model_files(tmp_path)
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"):
        (tmp_path / name).write_text("[]")
        with pytest.raises(UnreadableFile, match=rf"{name}: it is a list, not an object"):
            check_model_files(tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("merges.txt", "vocab.txt", "other.model", "qwen.tiktoken", "chat_template.jinja",
                 "additional_chat_templates/tool.jinja"):  # fmt: skip
        os.mkfifo(tmp_path / name)
        with pytest.raises(UnreadableFile, match=rf"{name}: it is no ordinary file"):
            check_model_files(tmp_path)
        (tmp_path / name).unlink()


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


@pytest.mark.parametrize(
    ("text", "depth"),
    [("1", 0), ('"[[["', 0), ("[]", 1), ('{"a": [1, {"b": 2}]}', 3), ("[[], [[]]]", 3), (r'["\"[["]', 1), ("", 0)],
)
def test_the_depth_of_a_json_text_is_that_of_its_open_brackets(text: str, depth: int) -> None:
    assert nesting_depth(text.encode()) == depth


SMALL = (
    "config", "generation_config", "tokenizer_config", "special_tokens_map", "added_tokens", "processor_config",
    "preprocessor_config", "chat_template",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "most"),
    [*((f"{name}.json", 1 << 25) for name in SMALL), ("tokenizer.json", 1 << 26), ("vocab.json", 1 << 26)],
)
def test_each_file_of_a_model_is_an_object_of_bounded_size(name: str, most: int, tmp_path: Path) -> None:
    (tmp_path / name).write_text('"text"')
    with pytest.raises(UnreadableFile, match=rf'{name}: it is "text", not an object'):
        check_model_files(tmp_path)
    (tmp_path / name).write_text(f'"{"x" * 100}"')
    with pytest.raises(UnreadableFile, match=rf'{name}: it is "{"x" * 39}, not an object$'):
        check_model_files(tmp_path)
    with (tmp_path / name).open("wb") as sparse:
        sparse.truncate(most + 1)
    with pytest.raises(UnreadableFile, match=f"it has {most + 1:,} bytes, and at most {most:,} are read"):
        check_model_files(tmp_path)


def test_other_files_of_a_tokenizer_have_a_bounded_size_and_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "merges.txt").symlink_to("nothing")
    with (tmp_path / "tokenizer.model").open("wb") as sparse:
        sparse.truncate(1 << 26)
        check_model_files(tmp_path)
        sparse.truncate((1 << 26) + 1)
    with pytest.raises(UnreadableFile, match=r"tokenizer.model: it has 67,108,865 bytes"):
        check_model_files(tmp_path)


def test_the_first_harmful_file_in_the_order_of_names_is_named(tmp_path: Path) -> None:
    for letter in "hgcdefba":
        os.mkfifo(tmp_path / f"{letter}.model")
    with pytest.raises(UnreadableFile, match=r"a\.model: it is no ordinary file"):
        check_model_files(tmp_path)


def test_arrays_and_objects_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_CONTAINERS", 3)
    (tmp_path / "file.json").write_text('[{}, {"a": "[]"}]')
    assert read_json(tmp_path / "file.json") == [{}, {"a": "[]"}]
    (tmp_path / "file.json").write_text('[{}, {"a": []}]')
    assert problem(tmp_path / "file.json") == "can't be read as JSON (it has more than 3 arrays and objects)"


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
