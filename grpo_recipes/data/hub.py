"""What a name of a model means: a folder or a name on the Hugging Face Hub, whether the hub answers, and adapters."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
from huggingface_hub.utils import HFValidationError, validate_repo_id

_TIMEOUT_SECONDS = 5
_FILE_ENDINGS = (".json", ".jsonl", ".parquet", ".csv")


@contextmanager
def cache_only_if_hub_is_silent() -> Iterator[None]:
    """Let `datasets` look in its cache only when the hub does not answer; it would retry for half a minute."""
    offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = offline or not hub_answers()
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def is_missing(name: str) -> bool:
    """Whether `name` is a path, to which nothing is there: it begins or ends like one, or can't be a name of the hub."""
    if Path(name).expanduser().exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return Path(name).suffix in _FILE_ENDINGS


def hub_answers() -> bool:
    """Whether the Hugging Face Hub can be reached from here; takes at most `_TIMEOUT_SECONDS`."""
    request = urllib.request.Request(datasets.config.HF_ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        # The hub's own client brings its certificates; whether they match is its business.
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False
    return True


def hub_commit(name: str, revision: str | None = None) -> str | None:
    """Return the commit of a hub repository that loading it takes: the newest if the hub answers, else the cache's.

    None if `name` is a folder, or no configuration of a model or an adapter can be found under it.
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
