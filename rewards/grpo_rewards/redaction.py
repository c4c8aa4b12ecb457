"""What looks like a secret, and its placeholder in everything that is written or shown.

One rule for every file and message of both packages: a value under a key that names one (`api_key`, `hub_token`,
`password`, `Authorization`), and text that has the shape of one, wherever it stands (`hf_...`, `Bearer ...`, the password in
a URL). A rule by names and shapes finds what is called a secret or looks like one; it can't find all: keep secrets in
environment variables, and give their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "<hidden>"

_KEY = re.compile(
    r"(^|_)(token|(api|access|private|secret|account|auth|ssh|encryption)_?key|secret|password|passwd|passphrase"
    r"|authorization|auth|credentials?|bearer|cookie)s?$"
)
# Names of tokens that are text, and counts of them.
_NO_SECRET = re.compile(
    r"(^|_)(eos|bos|pad|unk|sep|cls|mask|stop|start|begin|end|image|video|audio|special|additional|think|answer|new|prompt"
    r"|completion|input|output|max|min|num|per)_tokens?$|^tokens$"
)
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"
    r"|\b(sk|pk|rk)[-_][A-Za-z0-9_-]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bxox[abeoprs]-[\w-]{10,}"
    r"|\b(AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # a JSON web token
    r"|(?<=\bBearer )[\w.~+/=-]{6,}|(?<=\bBasic )[\w+/=-]{8,}"
    r"|(?<=://)[^\s/@]+(?=@)"  # user and password of a URL
)
# A shorter value found inside a text is as likely a word of it.
_SHORTEST = 6


def is_secret(key: object, value: Any) -> bool:
    """Whether a value under `key` is a secret, by the name of the key; not what only says whether there is one."""
    if value is None or isinstance(value, bool) or value in ("", HIDDEN) or not isinstance(key, str):
        return False
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).replace("-", "_").lower()
    return bool(_KEY.search(name)) and not _NO_SECRET.search(name)


def redacted(value: Any) -> Any:
    """`value`, mappings and lists all through, with `HIDDEN` for each secret in it. Nothing is changed in place."""
    if isinstance(value, Mapping):
        return {key: HIDDEN if is_secret(key, inner) else redacted(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(inner) for inner in value]
    return _SHAPES.sub(HIDDEN, value) if isinstance(value, str) else value


def redacted_arguments(words: Sequence[str]) -> list[str]:
    """A command line without secrets: of `--key value` and `--key=value`, and inside values that are YAML mappings."""
    kept: list[str] = []
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        before = option if equals else words[len(kept) - 1] if kept else ""
        is_value = bool(equals) or not word.startswith("--")
        name = before[2:].rpartition(".")[2] if before.startswith("--") else ""
        kept.append(option + equals + (_redacted_argument(name, value) if is_value else value))
    return kept


def _redacted_argument(name: str, text: str) -> str:
    import yaml

    if is_secret(name, text):
        return HIDDEN
    if not text.lstrip().startswith(("{", "[")):
        return redacted(text)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return redacted(text)
    hidden = redacted(value)
    shown = yaml.safe_dump(hidden, default_flow_style=True, sort_keys=False, width=2**20, allow_unicode=True)
    return text if hidden == value else shown.strip()


def hidden_places(value: Any, place: str = "") -> Iterator[str]:
    """The dotted places at which `value` holds the placeholder of a secret."""
    if isinstance(value, str) and HIDDEN in value:
        yield place
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, inner in items:
        yield from hidden_places(inner, f"{place}.{key}" if place else str(key))


def secret_values(value: Any) -> set[str]:
    """The secrets in `value` themselves, as text; those too short to be told from other words are left out."""
    found: set[str] = set()
    if isinstance(value, Mapping):
        for key, inner in value.items():
            found |= _texts(inner) if is_secret(key, inner) else secret_values(inner)
    elif isinstance(value, (list, tuple)):
        found = set().union(*map(secret_values, value))
    return {text for text in found if len(text) >= _SHORTEST}


def _texts(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    return set().union(*map(_texts, value)) if isinstance(value, (list, tuple)) else {str(value)}


def scrubbed(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` with the placeholder for each of `secrets` and for what has the shape of one."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return redacted(text)
