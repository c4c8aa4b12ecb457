"""Redaction of secrets, recognised by the names of keys and by the shapes of text, in everything written or shown.

One rule for every file and message of both packages. Three things count as a secret:

- a value under a key that names a secret: `api_key`, `hub_token`, `db_password`, `Authorization`;
- the user information of a URL: `http://user:password@host`;
- a token with one of six prefixes: `hf_`, `sk-`, `ghp_`, `github_pat_`, `AKIA`, `AIza`.

This is a list, not a proof: a secret with another name and another shape is not found. Keep secrets in environment
variables, and name the variables. Other text is unchanged, and redacting twice changes nothing more. The time is linear
in the length of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus, unquote

HIDDEN = "<hidden>"

# Words of a key: `apiKey`, `X-Api-Key` and `API_KEY` all contain the words `api` and `key`.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_LONGEST_KEY = 200
_SECRETS = frozenset({
    "token", "secret", "password", "passwd", "pwd", "pass", "passphrase", "authorization", "auth", "credential",
    "cookie", "apikey",
})  # fmt: skip
# Words before `key` that make it a secret. `key` alone is not one.
_KINDS_OF_KEY = frozenset({
    "api", "access", "private", "secret", "account", "auth", "ssh", "encryption", "signing", "storage",
})  # fmt: skip
# Words before `token` that make it text of a model, or a number of tokens, and before `pass` a run through a model.
_HARMLESS = frozenset({
    "eos", "bos", "pad", "unk", "sep", "cls", "mask", "stop", "start", "begin", "end", "image", "video", "audio",
    "vision", "boi", "eoi", "special", "additional", "extra", "added", "bad", "suppress", "think", "thinking",
    "reasoning", "answer", "new", "prompt", "completion", "generated", "input", "output", "total", "cached", "text",
    "tool", "max", "min", "num", "per", "forward", "backward", "first", "second", "last",
})  # fmt: skip

_TOKEN = re.compile(r"\b(?:(?:hf_|sk-|ghp_)[\w-]{16,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}\b|AIza[\w-]{16,})", re.ASCII)
# Up to the last `@`, because a password may hold any character; without a password, up to the last one before the path.
_USER = re.compile(r"(?<=://)(?:[^\s/?#:@\"'<>`]{1,200}:[^\s\"'<>`]{1,200}|[^\s/?#\"'<>`]{1,400})(?=@)")

_OPTION = re.compile(r"--\w")  # the character separates an option from a value that starts with a hyphen

# A shorter secret found inside a text is as likely an ordinary word of the text.
_SHORTEST = 6


def is_secret(key: object, value: object) -> bool:
    """Return True if the words of `key` name a secret and `value` can be one: not a number, a yes or a no."""
    if not isinstance(key, str) or value is None or isinstance(value, bool) or value in ("", HIDDEN):
        return False
    words = [word.lower() for word in _WORDS.findall(key[-_LONGEST_KEY:])]
    while words and words[-1].isdecimal():  # `api_key_2`
        words.pop()
    if not words or words == ["tokens"]:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in ("key", "keys") or words[-3:] == ["access", "key", "id"]:
        return last == "id" or before in _KINDS_OF_KEY
    if last in ("token", "tokens", "pass"):
        is_count = isinstance(value, (int, float)) or words[0] in ("max", "min", "num")
        return before not in _HARMLESS and not is_count
    return last.removesuffix("s") in _SECRETS or last.endswith("password")


def redacted(value: Any) -> Any:
    """Return a copy of `value` with `HIDDEN` in place of each secret, also inside nested mappings and lists.

    Keys that differ in a secret only become one key.
    """
    if isinstance(value, str):
        return _TOKEN.sub(HIDDEN, _USER.sub(lambda user: HIDDEN if _is_secret_user(user) else user[0], value))
    if isinstance(value, Mapping):
        return {redacted(key): HIDDEN if is_secret(key, inner) else redacted(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(inner) for inner in value]
    return value


def _is_secret_user(user: re.Match[str]) -> bool:
    """Return True unless the user is a part of an address: `ssh://git@host`, `abfss://container@account`."""
    return ":" in user[0] or user.string.endswith(("http://", "https://"), 0, user.start())


def redacted_arguments(words: Sequence[str]) -> list[str]:
    """Return a command line without the secrets in `--key value`, in `--key=value` and in values that are YAML."""
    shown: list[str] = []
    option = ""  # the option whose value may follow
    for word in words:
        if _OPTION.match(word) is None:
            shown.append(_redacted_argument(option, word))
            option = ""
            continue
        option, equals, value = word.partition("=")
        shown.append(option + equals + _redacted_argument(option, value) if equals else word)
        option = "" if equals else word
    return shown


def _redacted_argument(option: str, text: str) -> str:
    """Return the value of an option (`""` for a value without one), without its secrets."""
    if is_secret(option.removeprefix("--").rpartition(".")[2], text):
        return HIDDEN
    if not text.lstrip().startswith(("{", "[")):
        return str(redacted(text))
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return str(redacted(text))
    hidden = redacted(value)
    if hidden == value:
        return text
    return yaml.safe_dump(hidden, default_flow_style=True, sort_keys=False, width=2**20, allow_unicode=True).strip()


def _leaves(value: Any, place: str = "", *, under_secret: bool = False) -> Iterator[tuple[str, str, bool]]:
    """Yield the dotted path and the text of each key and each value, and True for a value under a secret's key."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        yield place, str(value), under_secret
        return
    for key, inner in items:
        within = f"{place}.{key}" if place else str(key)
        if isinstance(key, str):
            yield within, key, False
        yield from _leaves(inner, within, under_secret=under_secret or is_secret(key, inner))


def hidden_places(value: Any) -> Iterator[str]:
    """Yield the dotted paths at which `value` contains the placeholder of a secret."""
    return (place for place, text, _ in _leaves(value) if HIDDEN in text)


def secret_values(value: Any) -> set[str]:
    """Return the secrets in `value` as text, by key and by shape, without those as short as other words."""
    found: set[str] = set()
    for _, text, is_whole in _leaves(value):
        if is_whole:
            found.add(text)
            continue
        users = [user[0] for user in _USER.finditer(text) if _is_secret_user(user)]
        for secret in (*users, *_TOKEN.findall(text)):
            # An error may quote the password of a URL without the user.
            found |= {secret, secret.partition(":")[2]}
    return {text for text in found if len(text) >= _SHORTEST}


def scrubbed(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text` with the placeholder for each of `secrets`, also where quoted, and for the shape of a secret."""
    spellings: set[str] = set()
    for secret in secrets:  # as errors and URLs write it
        spellings |= {secret, " ".join(secret.split()), repr(secret)[1:-1], json.dumps(secret)[1:-1]}
        spellings |= {quote(secret, safe=""), quote_plus(secret), unquote(secret)}
    # The longest first: a shorter one may be part of it.
    for spelling in sorted(spellings, key=len, reverse=True):
        if len(spelling) >= _SHORTEST:
            text = text.replace(spelling, HIDDEN)
    return str(redacted(text))
