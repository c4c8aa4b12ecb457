"""Names of models and datasets: paths on this machine, or repositories on the Hugging Face Hub."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
from huggingface_hub.utils import HFValidationError, validate_repo_id

from grpo_recipes.runs.files import RECORD
from grpo_rewards.files import expanded

_TIMEOUT_SECONDS = 5
_FILE_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".gz", ".zst")


@contextmanager
def cache_only_if_hub_is_silent() -> Iterator[None]:
    """Restrict `datasets` to its cache inside the block if the hub does not answer.

    Without the restriction `datasets` retries for half a minute.
    """
    offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = offline or not hub_answers()
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def is_missing(name: str) -> bool:
    """Return True if `name` is a path that does not exist. A name that the hub could have is not a path."""
    if expanded(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    if Path(name).suffix in _FILE_SUFFIXES:
        return True
    # `runs/x` could be a name on the hub. Beside other runs, it is the misspelt name of a run.
    parent = expanded(name).parent
    return parent != Path() and any(parent.glob(f"*/{RECORD}"))


def hub_answers() -> bool:
    """Return True if the Hugging Face Hub is reachable. Takes at most `_TIMEOUT_SECONDS`."""
    request = urllib.request.Request(datasets.config.HF_ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        # The hub's own client brings its own certificates, so a failure of ours says nothing about the hub.
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False
    return True


def hub_commit(name: str, revision: str | None = None) -> str | None:
    """Return the commit that loading a model takes: the newest one, or the cached one if the hub does not answer.

    Returns:
        The commit, or None if `name` is a folder, or has no configuration of a model or an adapter.
    """
    if Path(name).exists():
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    cached_only = not hub_answers()
    for file in ("config.json", "adapter_config.json"):
        try:
            return Path(hf_hub_download(name, file, revision=revision, local_files_only=cached_only)).parent.name
        except (EntryNotFoundError, OSError, ValueError):  # loading the model reports what is wrong with the name
            continue
    return None
