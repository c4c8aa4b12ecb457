"""Names of models and datasets: which are paths, which the hub could have, and what is done if it does not answer."""

from __future__ import annotations

import ssl
import urllib.error
from email.message import Message
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError

from grpo_recipes.data import hub
from grpo_recipes.data.hub import is_missing


def test_a_misspelt_run_beside_other_runs_is_no_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder, file in [("runs/prices", "run.json"), ("Qwen/Qwen3-4B", "config.json"), ("prices", "run.json")]:
        Path(folder).mkdir(parents=True)
        (Path(folder) / file).write_text("{}")
    for name in ("runs/price", "~/runs/price", "a.json", "a.jsonl", "a.parquet", "a.csv.zst", "no/such/folder", "a b"):
        assert is_missing(name), name
    for name in ("runs/prices", "~/runs/prices", "Qwen/Qwen2.5-1.5B-Instruct", "gpt2"):
        assert not is_missing(name), name


REFUSED = urllib.error.HTTPError("https://hub", 403, "Forbidden", Message(), None)


@pytest.mark.parametrize(
    ("error", "answers"),
    [
        (None, True),
        (REFUSED, True),
        (urllib.error.URLError(ssl.SSLError("no certificate")), True),
        (urllib.error.URLError(ConnectionRefusedError("refused")), False),
        (TimeoutError("timed out"), False),
    ],
)
def test_the_hub_answers_with_any_status(
    error: Exception | None, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Response:
        def close(self) -> None:
            asked.append("closed")

    def urlopen(request: Any, timeout: float) -> Response:
        asked.append((request.full_url, request.get_method(), timeout))
        if error is not None:
            raise error
        return Response()

    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "https://hub")
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    assert hub.hub_answers() is answers
    assert asked == [("https://hub", "HEAD", 5), *(["closed"] if error is None else [])]


class Response:
    def close(self) -> None:
        pass


def let_the_hub_answer(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(*given: Any, **options: Any) -> Response:
        if not answers:
            raise TimeoutError
        return Response()

    monkeypatch.setattr("urllib.request.urlopen", urlopen)


@pytest.mark.parametrize(("is_offline", "answers"), [(False, True), (False, False), (True, True)])
def test_datasets_come_from_the_cache_while_the_hub_is_silent(
    is_offline: bool, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", is_offline)
    let_the_hub_answer(answers, monkeypatch)
    with pytest.raises(KeyError), hub.cache_only_if_hub_is_silent():  # noqa: PT012
        assert datasets.config.HF_HUB_OFFLINE is (is_offline or not answers)
        raise KeyError
    assert datasets.config.HF_HUB_OFFLINE is is_offline


@pytest.mark.parametrize("answers", [False, True])
def test_the_commit_is_that_of_the_first_configuration_there_is(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = {"adapter_config.json": "/cache/snapshots/abc/adapter_config.json"}, []

    def hf_hub_download(name: str, file: str, *, revision: str | None, local_files_only: bool) -> str:
        asked.append((name, file, revision, local_files_only))
        if file not in found:
            raise EntryNotFoundError("no file") if file == "config.json" else OSError("no disk")
        return found[file]

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    let_the_hub_answer(answers, monkeypatch)
    assert hub.hub_commit("org/name", "v1") == "abc"
    assert asked == [("org/name", file, "v1", not answers) for file in ("config.json", "adapter_config.json")]
    found.clear()
    assert hub.hub_commit("org/name") is None
    assert asked[-1][2] is None
    found["config.json"] = "/cache/snapshots/def/config.json"
    assert hub.hub_commit("org/name") == "def"


def test_a_folder_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *given, **options: pytest.fail("the hub was asked"))
    assert hub.hub_commit(str(tmp_path)) is None
