"""Names of models and datasets: which are paths, which the hub could have, and what is done if it does not answer."""

from __future__ import annotations

import ssl
import urllib.error
from email.message import Message
from pathlib import Path
from unittest.mock import Mock

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


@pytest.fixture
def urlopen(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Return the function that stands for requests to the hub."""
    function = Mock()
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "https://hub")
    monkeypatch.setattr("urllib.request.urlopen", function)
    return function


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
def test_the_hub_answers_with_any_status(error: Exception | None, answers: bool, urlopen: Mock) -> None:
    urlopen.side_effect = error
    assert hub.hub_answers() is answers
    (request,), options = urlopen.call_args
    assert (request.full_url, request.get_method(), options) == ("https://hub", "HEAD", {"timeout": 5})
    assert urlopen.return_value.close.called is (error is None)


@pytest.mark.parametrize(("is_offline", "answers"), [(False, True), (False, False), (True, True)])
def test_datasets_come_from_the_cache_while_the_hub_is_silent(
    is_offline: bool, answers: bool, urlopen: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", is_offline)
    urlopen.side_effect = None if answers else TimeoutError
    with pytest.raises(KeyError), hub.cache_only_if_hub_is_silent():  # noqa: PT012
        assert datasets.config.HF_HUB_OFFLINE is (is_offline or not answers)
        raise KeyError
    assert datasets.config.HF_HUB_OFFLINE is is_offline


@pytest.mark.parametrize("answers", [False, True])
def test_the_commit_is_that_of_the_first_configuration_there_is(
    answers: bool, urlopen: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, asked = {"adapter_config.json": "/cache/snapshots/abc/adapter_config.json"}, []

    def hf_hub_download(name: str, file: str, *, revision: str | None, local_files_only: bool) -> str:
        asked.append((name, file, revision, local_files_only))
        if file not in found:
            raise EntryNotFoundError("no file") if file == "config.json" else OSError("no disk")
        return found[file]

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    urlopen.side_effect = None if answers else TimeoutError
    assert hub.hub_commit("org/name", "v1") == "abc"
    assert asked == [("org/name", file, "v1", not answers) for file in ("config.json", "adapter_config.json")]
    found.clear()
    assert hub.hub_commit("org/name") is None
    assert asked[-1][2] is None
    found["config.json"] = "/cache/snapshots/def/config.json"
    assert hub.hub_commit("org/name") == "def"


def test_a_folder_has_no_commit(tmp_path: Path, urlopen: Mock) -> None:
    assert hub.hub_commit(str(tmp_path)) is None
    assert not urlopen.called
