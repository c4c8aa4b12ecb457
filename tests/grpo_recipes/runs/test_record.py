"""Each launch adds an entry to `run.json`, and none is lost."""

import subprocess
from pathlib import Path

import pytest

from grpo_recipes.runs.files import RunError
from grpo_recipes.runs.record import add_launch, describe_launch, git_revision, read_record, record_of_model
from grpo_rewards.registry import build_rewards
from tests.support.errors import refused


def test_launches_are_added_and_the_newest_is_at_the_top_level(tmp_path: Path) -> None:
    entries = [{"recipe": {"max_steps": steps}, "started": str(steps)} for steps in (1, 2, 3)]
    for count, entry in enumerate(entries, start=1):
        add_launch(tmp_path / "runs" / "run", entry)
        record = read_record(tmp_path / "runs" / "run")
        assert record is not None
        assert record == {**entry, "launches": entries[:count]}
    assert [path.name for path in (tmp_path / "runs" / "run").iterdir()] == ["run.json"]


def test_a_record_is_text_that_a_user_can_read(tmp_path: Path) -> None:
    add_launch(tmp_path, {"recipe": {"dataset": {"path": tmp_path / "größer"}}})
    text = (tmp_path / "run.json").read_text(encoding="utf-8")
    assert f'\n    "dataset": {{\n      "path": "{tmp_path}/größer"\n' in text
    assert text.endswith("}\n")


def test_the_record_of_a_model_is_beside_it_or_beside_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    assert record_of_model(tmp_path / "run" / "checkpoint-1") is None
    add_launch(tmp_path / "run", {"recipe": {"seed": 1}})
    for place in (tmp_path / "run", tmp_path / "run" / "checkpoint-1"):
        monkeypatch.chdir(place)
        for folder in (place, Path(".")):
            assert (record_of_model(folder) or {})["recipe"] == {"seed": 1}
    add_launch(tmp_path / "run" / "checkpoint-1", {"recipe": {"seed": 2}})
    assert (record_of_model(tmp_path / "run" / "checkpoint-1") or {})["recipe"] == {"seed": 2}


def test_a_record_that_cant_be_written_or_read_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_launch(tmp_path, {"recipe": {}})
    before = (tmp_path / "run.json").read_bytes()
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        write(path, content[:9])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            add_launch(tmp_path, {"recipe": {"seed": 2}})
    assert (tmp_path / "run.json").read_bytes() == before
    (tmp_path / "run.json").write_bytes(before[:9])
    with refused(tmp_path / "run.json", by=RunError):
        add_launch(tmp_path, {"recipe": {"seed": 2}})
    assert (tmp_path / "run.json").read_bytes() == before[:9]


def test_the_revision_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_revision() is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    assert git_revision() == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("2")
    assert git_revision() == git("rev-parse", "HEAD") + "-dirty"
    monkeypatch.setenv("PATH", "")
    assert git_revision() is None, "git is not installed"


def test_rewards_are_recorded_with_what_they_pay_for(tmp_path: Path) -> None:
    total = {"name": "sum", "alias": "total", "rewards": ["tag_count", {"name": "math_correctness", "weight": 2}]}
    specs = [total, {"name": "grpo_rewards.length.GroupLength", "weight": 0.5}, "trl.rewards.think_format_reward"]
    launch = describe_launch({"rewards": specs}, {}, build_rewards(specs), [])
    add_launch(tmp_path, launch)
    described = (read_record(tmp_path) or {})["rewards"]
    keys = ("name", "source", "weight", "kind", "highest_pay")
    assert [tuple(entry[key] for key in keys) for entry in [*described[0]["parts"], *described[1:]]] == [
        ("tag_count", "tag_count", 1.0, "format", 1.0),
        ("math_correctness", "math_correctness", 2.0, "correctness", 1.0),
        ("group_length", "grpo_rewards.length.GroupLength", 0.5, "length", 0.5),
        ("think_format_reward", "trl.rewards.think_format_reward", 1.0, "format", 1.0),
    ]
    assert described[0]["name"] == "total"
    named = {"grpo-recipes", "python", "trl", "transformers", "peft", "accelerate", "datasets", "torch"}
    assert named <= launch["versions"].keys()
