r"""Recognise secrets by the names of keys and by the shapes of text, and replace them in everything written or shown.

One rule for every file and message of both packages. Two things count as a secret:

- a value under a key whose words name one: `api_key`, `hub_token`, `pwd`, `db_pass`, `api_key_2`, `Authorization`;
- text of a known shape, wherever it stands: the user information of a URL, the value of a query key such as
  `X-Amz-Signature`, a token by its prefix (`hf_...`, `AIza...`), `Bearer ...`, a PEM block with a private key.

This is a list, not a proof: a secret under another name and of another shape is not found. Keep secrets in environment
variables, and give their names. Text without any of these stays as it is, and a second pass changes nothing more. The
time grows linearly with the text, whatever it holds.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus, unquote

HIDDEN = "<hidden>"

# Keys, by their words. `apiKey`, `X-Api-Key` and `API_KEY` have the words `api` and `key`.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_LONGEST_KEY = 200
_SECRETS = frozenset({
    "token", "secret", "password", "passwd", "pwd", "pass", "passphrase", "passcode", "authorization", "auth",
    "credential", "bearer", "cookie", "jwt", "apikey", "apitoken", "authtoken", "accesstoken", "hftoken",
    "hubtoken", "accesskey", "secretkey", "privatekey",
})  # fmt: skip
_KINDS_OF_KEY = frozenset({
    "api", "access", "private", "secret", "account", "auth", "ssh", "encryption", "signing", "master",
    "subscription", "deploy", "storage", "shared", "hmac",
})  # fmt: skip
# Words behind the name of a secret that leave it one: `api_key_2`, `password_old`.
_VARIANTS = frozenset({
    "old", "new", "prod", "production", "dev", "staging", "backup", "primary", "secondary", "value",
})  # fmt: skip
# Tokens that are text of a model, and numbers of them.
_TEXT_TOKENS = frozenset({
    "eos", "bos", "pad", "unk", "sep", "cls", "mask", "stop", "start", "begin", "end", "image", "video", "audio",
    "vision", "boi", "eoi", "special", "additional", "extra", "added", "bad", "suppress", "think", "thinking",
    "reasoning", "answer", "new", "prompt", "completion", "generated", "input", "output", "total", "cached", "text",
    "tool", "max", "min", "num", "per",
})  # fmt: skip
# A pass that is a run through something: `forward_pass`.
_PASSES = frozenset({
    "forward", "backward", "first", "second", "third", "last", "single", "one", "two", "full", "multi", "per", "by",
})  # fmt: skip

# Keys in the query of a URL that name a secret there, besides those above.
_QUERY_KEYS = frozenset({
    "sig", "signature", "key", "code", "credential", "hmac", "sas",
})  # fmt: skip

# Tokens: how each begins, at the beginning of a word, and what follows.
_TOKENS: Mapping[str, str] = {
    "hf_": "[A-Za-z0-9]{16,}",
    "api_org_": "[A-Za-z0-9]{16,}",
    **dict.fromkeys(("sk-", "sk_", "pk-", "pk_", "rk-", "rk_"), "[A-Za-z0-9_-]{16,}"),
    **dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), "[A-Za-z0-9]{20,}"),
    "github_pat_": r"\w{20,}",
    **dict.fromkeys(("glpat-", "gldt-", "glrt-", "glsa_"), r"[\w-]{16,}"),
    "xox": r"[abceoprs]-[\w-]{10,}",
    "xapp-": r"[\w-]{10,}",
    **dict.fromkeys(("AKIA", "ASIA"), r"[0-9A-Z]{16}\b"),
    "AIza": r"[\w-]{16,}",
    "ya29.": r"[\w-]{16,}",
    "GOCSPX-": r"[\w-]{16,}",
    "gsk_": "[A-Za-z0-9]{16,}",
    "nvapi-": r"[\w-]{16,}",
    **dict.fromkeys(("xai-", "pplx-", "r8_", "rpa_"), "[A-Za-z0-9]{20,}"),
    "tgp_v1_": r"[\w-]{16,}",
    "dapi": r"[0-9a-f]{32}\b",
    **dict.fromkeys(("npm_", "dop_v1_", "shpat_", "dckr_pat_", "whsec_", "wandb_v1_", "pypi-", "hvs."), r"[\w-]{20,}"),
    "lsv2_": r"[\w-]{20,}",
    "SG.": r"[\w-]{16,64}\.[\w-]{16,}",
    # A JSON web token. It begins a word that includes hyphens: at each `eyJ` in such a word the time would be
    # quadratic.
    "eyJ": r"(?<![\w-]eyJ)[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
}
# Text in which the secret follows a word.
_FOLLOWING: Mapping[str, str] = {
    "Bearer ": r"[\w.~+/=-]{6,}",
    "bearer ": r"(?=[\w.~+/=-]*\d)[\w.~+/=-]{16,}",
    "AccountKey=": r"[\w+/=-]{8,}",
    "SharedAccessKey=": r"[\w+/=-]{8,}",
}
# Beginning with the literal, which `re` finds fast; the group is the secret.
_SHAPES = [
    *((word, re.compile(rf"({re.escape(word)}(?<=\b{re.escape(word)}){rest})")) for word, rest in _TOKENS.items()),
    *((word, re.compile(rf"{re.escape(word)}(?<=\b{re.escape(word)})({rest})")) for word, rest in _FOLLOWING.items()),
]
_BASIC = re.compile(r"asic (?<=\b[Bb]asic )([A-Za-z0-9+/=]{8,})")

_PRIVATE_KEY = re.compile(r"-----? ?BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-----?")
_END = re.compile(r"-----? ?END [A-Z0-9 ]{0,60}-----?")
# Characters that may follow where a key is cut off: the letters of the key and its headers, and line feeds as JSON
# writes them.
_KEY_TEXT = re.compile(r"[A-Za-z0-9+/=\s:,.()@<>\\-]*")

_WORD = re.compile(r"\S+")
_SCHEME_END = re.compile(r":(?:\\{0,4}/){2}")  # JSON may write `:\/\/`, and quoted again with more backslashes
_QUOTE = re.compile("[\"'<>`]")
_AUTHORITY_END = re.compile("[/?#\"'<>`\\\\]")
_PORT = re.compile(r"[0-9]{0,5}")
_QUERY = re.compile(r"([?&;#])([\w.%\[\]-]{1,100})=([^\s&;#\"'<>`\\]+)")
# Schemes in which a name before the `@` is part of an address: `abfss://container@account`.
_ADDRESSES = ("abfs", "abfss", "wasb", "wasbs")

_OPTION = re.compile(r"--\w")  # of a command line; a value may begin with `-----BEGIN`

# A shorter value found inside a text is as likely a word of the text.
_SHORTEST = 6


def is_secret(key: object, value: Any) -> bool:
    """Return True if the words of `key` say that `value` is a secret, rather than a number or a yes or no."""
    if not isinstance(key, str) or value is None or isinstance(value, bool) or value in ("", HIDDEN):
        return False
    words = [word.lower() for word in _WORDS.findall(key[-_LONGEST_KEY:])]
    while words and (words[-1].isdecimal() or words[-1] in _VARIANTS):
        words.pop()
    return _names_secret(words, is_number=isinstance(value, (int, float)))


def _names_secret(words: Sequence[str], *, is_number: bool) -> bool:
    if not words or words == ["tokens"]:
        return False
    before, last = (words[-2] if len(words) > 1 else ""), words[-1]
    if words[-3:] == ["access", "key", "id"]:
        return True
    if last in ("key", "keys"):
        return before in _KINDS_OF_KEY
    if last.endswith(("password", "passwd")):  # of `dbpassword` too
        return True
    if last == "pass":
        return before not in _PASSES and not is_number
    singular = last.removesuffix("s")
    if singular == "token":
        return before not in _TEXT_TOKENS and words[0] not in ("max", "min", "num") and not is_number
    return singular in _SECRETS


def redacted(value: Any) -> Any:
    """Return `value`, mappings and lists all through, with `HIDDEN` for each secret in it. Nothing is changed in place.

    Keys that differ in a secret alone become one.
    """
    if isinstance(value, Mapping):
        return {redacted(key): HIDDEN if is_secret(key, inner) else redacted(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(inner) for inner in value]
    return _redacted_text(value) if isinstance(value, str) else value


def _redacted_text(text: str) -> str:
    """Return `text` with `HIDDEN` for each part that has the shape of a secret; `text` itself if none has."""
    spans = _merged(_spans(text))
    if not spans:
        return text
    pieces, end = [], 0
    for first, last in spans:
        pieces += [text[end:first], HIDDEN]
        end = last
    return "".join([*pieces, text[end:]])


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield the parts of a text that have the shape of a secret, as its first character and the one behind its last."""
    if "BEGIN" in text:
        yield from _private_keys(text)
    for word, shape in _SHAPES:
        if word in text:
            yield from (found.span(1) for found in shape.finditer(text))
    for found in _BASIC.finditer(text):
        if _is_user_and_password(found.group(1)):
            yield found.span(1)
    if "@" in text and "/" in text:
        yield from _user_informations(text)
    if "=" in text:
        yield from _query_values(text)


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans in order, those that overlap as one."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _private_keys(text: str) -> Iterator[tuple[int, int]]:
    """Yield the PEM blocks of private keys. A block that is cut off reaches as far as text that a key may hold."""
    place = 0
    ends = True  # False once no end is left: searching again from every beginning would take quadratic time
    while (begin := _PRIVATE_KEY.search(text, place)) is not None:
        end = _END.search(text, begin.end()) if ends else None
        ends = end is not None
        rest = _KEY_TEXT.match(text, begin.end())
        place = end.end() if end is not None else rest.end() if rest is not None else begin.end()
        yield begin.start(), place


def _is_user_and_password(text: str) -> bool:
    """Return True if `text` is what HTTP's basic authentication sends: `user:password` in base64."""
    try:
        return b":" in base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        return False


def _user_informations(text: str) -> Iterator[tuple[int, int]]:
    """Yield the user information of each URL: everything up to the last `@`, as a password may hold any character.

    A URL ends at white space. Without a `:` in its first part, as in `https://host/@name`, an `@` further on is part of
    the path.
    """
    for found in _WORD.finditer(text):
        last_at = text.rfind("@", found.start(), found.end())
        place = found.start()
        quote_at, at_before_quote = -1, -1  # the next quotation mark, and the last `@` before it
        while place <= last_at and (scheme := _SCHEME_END.search(text, place, found.end())) is not None:
            start = place = scheme.end()
            if quote_at < start:
                quoted = _QUOTE.search(text, start, found.end())
                quote_at = quoted.start() if quoted is not None else found.end()
                at_before_quote = text.rfind("@", start, quote_at)
            ending = _AUTHORITY_END.search(text, start, found.end())
            authority = text[start : ending.start() if ending is not None else found.end()]
            end = _end_of_user(authority, start, at_before_quote, last_at)
            if end > start and not _is_address(text, scheme.start(), text[start:end]):
                yield start, end
                place = end


def _end_of_user(authority: str, start: int, at_before_quote: int, last_at: int) -> int:
    """Return the place of the `@` that ends a URL's user information, or `start` if it has none.

    Args:
        authority: the URL from `start` to the first `/`, `?`, `#` or quotation mark.
        start: the place behind `://`.
        at_before_quote: the place of the last `@` before a quotation mark, which ends a URL in most texts.
        last_at: the place of the last `@` before white space.
    """
    name, colon, rest = authority.partition(":")
    if colon and at_before_quote >= start:
        return at_before_quote
    if colon and last_at >= start and name and not _PORT.fullmatch(rest):
        return last_at  # the password holds a quotation mark
    return max(start, start + authority.rfind("@"))


def _is_address(text: str, colon: int, user: str) -> bool:
    """Return True if `user`, before an `@`, names no person: `ssh://git@host`, `abfss://container@account`."""
    scheme = re.search(r"[A-Za-z]*\Z", text[max(0, colon - 10) : colon])
    is_container = scheme is not None and scheme.group().lower() in _ADDRESSES
    return user == "git" or (is_container and ":" not in user)


def _query_values(text: str) -> Iterator[tuple[int, int]]:
    """Yield the values of keys such as `sig` and `access_token` behind `?`, `&`, `;` or `#`."""
    for found in _QUERY.finditer(text):
        words = [word.lower() for word in _WORDS.findall(unquote(found.group(2)))]
        while len(words) > 1 and words[-1].isdecimal():
            words.pop()
        is_key = bool(words) and words[-1] in _QUERY_KEYS and found.group(1) != ";"
        if is_key or _names_secret(words, is_number=False):
            yield found.span(3)


def redacted_arguments(words: Sequence[str]) -> list[str]:
    """Return a command line without secrets: of `--key value` and `--key=value`, and inside values that are YAML
    mappings."""
    kept: list[str] = []
    for word in words:
        is_option = _OPTION.match(word) is not None
        option, equals, value = word.partition("=") if is_option else ("", "", word)
        before = option if equals else words[len(kept) - 1] if kept else ""
        is_value = bool(equals) or not is_option
        name = before[2:].rpartition(".")[2] if _OPTION.match(before) else ""
        kept.append(option + equals + (_redacted_argument(name, value) if is_value else value))
    return kept


def _redacted_argument(name: str, text: str) -> str:
    import yaml

    if is_secret(name, text):
        return HIDDEN
    if not text.lstrip().startswith(("{", "[")):
        return _redacted_text(text)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return _redacted_text(text)
    hidden = redacted(value)
    shown = yaml.safe_dump(hidden, default_flow_style=True, sort_keys=False, width=2**20, allow_unicode=True)
    return text if hidden == value else shown.strip()


def hidden_places(value: Any, place: str = "") -> Iterator[str]:
    """Yield the dotted places at which `value` holds the placeholder of a secret."""
    if isinstance(value, str) and HIDDEN in value:
        yield place
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, inner in items:
        within = f"{place}.{key}" if place else str(key)
        if isinstance(key, str) and HIDDEN in key:
            yield within
        yield from hidden_places(inner, within)


def secret_values(value: Any) -> set[str]:
    """Return the secrets in `value` as text, by key and by shape, without those too short to be told from other words."""
    return {text for text in _secrets(value) if len(text) >= _SHORTEST}


def _secrets(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        found = (_texts(inner) if is_secret(key, inner) else _secrets(inner) for key, inner in value.items())
        return set().union(*found, *map(_secrets, value))
    if isinstance(value, (list, tuple)):
        return set().union(*map(_secrets, value))
    if not isinstance(value, str):
        return set()
    parts = {value[first:last] for first, last in _merged(_spans(value))}
    # An error may quote the password of a URL without the user.
    return parts | {part.partition(":")[2] for part in parts}


def _texts(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    return set().union(*map(_texts, value)) if isinstance(value, (list, tuple)) else {str(value)}


def scrubbed(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text` with the placeholder for each of `secrets`, as it is or quoted, and for what has the shape of one."""
    spellings = {spelling for secret in secrets for spelling in _spellings(secret) if len(spelling) >= _SHORTEST}
    for spelling in sorted(spellings, key=len, reverse=True):
        text = text.replace(spelling, HIDDEN)
    return _redacted_text(text)


def _spellings(secret: str) -> Iterator[str]:
    """Yield a secret as errors and URLs write it."""
    yield secret
    yield " ".join(secret.split())
    yield repr(secret)[1:-1]
    yield json.dumps(secret)[1:-1]
    yield from (quote(secret, safe=""), quote_plus(secret), unquote(secret))
