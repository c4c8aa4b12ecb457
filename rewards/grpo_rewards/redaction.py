r"""Redaction of secrets, recognised by the names of keys and by the shapes of text, in everything written or shown.

One rule for every file and message of both packages. Two things count as a secret:

- a value under a key whose words name a secret: `api_key`, `hub_token`, `pwd`, `db_pass`, `api_key_2`, `Authorization`;
- text of a known shape, wherever it stands: the user information of a URL, the value of a query key such as
  `X-Amz-Signature`, a token with a known prefix (`hf_...`, `AIza...`), `Bearer ...`, a PEM block with a private key.

This is a list, not a proof: a secret with another name and another shape is not found. Keep secrets in environment
variables, and name the variables. Other text is unchanged, and redacting twice changes nothing more. The time is linear
in the length of the text, whatever it contains.
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

# Words of a key: `apiKey`, `X-Api-Key` and `API_KEY` all contain the words `api` and `key`.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_LONGEST_KEY = 200
_SECRETS = frozenset({
    "token", "secret", "password", "passwd", "pwd", "pass", "passphrase", "passcode", "authorization", "auth",
    "credential", "bearer", "cookie", "jwt", "apikey", "apitoken", "authtoken", "accesstoken", "hftoken", "hubtoken",
    "accesskey", "secretkey", "privatekey",
})  # fmt: skip
# Words before `key` that make it a secret. `key` alone is not one.
_KINDS_OF_KEY = frozenset({
    "api", "access", "private", "secret", "account", "auth", "ssh", "encryption", "signing", "master", "subscription",
    "deploy", "storage", "shared", "hmac",
})  # fmt: skip
# Words after the name of a secret that leave it a secret: `password_old`. A number does too: `api_key_2`.
_VARIANTS = frozenset({
    "old", "new", "prod", "production", "dev", "staging", "backup", "primary", "secondary", "value",
})  # fmt: skip
# Words before `token` that make it text of a model, or a number of tokens.
_TEXT_TOKENS = frozenset({
    "eos", "bos", "pad", "unk", "sep", "cls", "mask", "stop", "start", "begin", "end", "image", "video", "audio",
    "vision", "boi", "eoi", "special", "additional", "extra", "added", "bad", "suppress", "think", "thinking",
    "reasoning", "answer", "new", "prompt", "completion", "generated", "input", "output", "total", "cached", "text",
    "tool", "max", "min", "num", "per",
})  # fmt: skip
# Words before `pass` that make it a run through something: `forward_pass`.
_PASSES = frozenset({
    "forward", "backward", "first", "second", "third", "last", "single", "one", "two", "full", "multi", "per", "by",
})  # fmt: skip
# Keys that name a secret only in the query of a URL.
_QUERY_KEYS = frozenset({
    "sig", "signature", "key", "code", "credential", "hmac", "sas",
})  # fmt: skip

# Tokens: the prefix, which starts a word, and the pattern of the rest.
_TOKENS: Mapping[str, str] = {
    **dict.fromkeys(("hf_", "api_org_", "gsk_"), "[A-Za-z0-9]{16,}"),
    **dict.fromkeys(("sk-", "sk_", "pk-", "pk_", "rk-", "rk_"), "[A-Za-z0-9_-]{16,}"),
    **dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), "[A-Za-z0-9]{20,}"),
    "github_pat_": r"\w{20,}",
    "xox": r"[abceoprs]-[\w-]{10,}",
    "xapp-": r"[\w-]{10,}",
    **dict.fromkeys(("AKIA", "ASIA"), r"[0-9A-Z]{16}\b"),
    **dict.fromkeys(
        ("glpat-", "gldt-", "glrt-", "glsa_", "AIza", "ya29.", "GOCSPX-", "nvapi-", "tgp_v1_"), r"[\w-]{16,}"
    ),
    **dict.fromkeys(("xai-", "pplx-", "r8_", "rpa_"), "[A-Za-z0-9]{20,}"),
    "dapi": r"[0-9a-f]{32}\b",
    **dict.fromkeys(
        ("npm_", "dop_v1_", "shpat_", "dckr_pat_", "whsec_", "wandb_v1_", "pypi-", "hvs.", "lsv2_"), r"[\w-]{20,}"
    ),
    "SG.": r"[\w-]{16,64}\.[\w-]{16,}",
    # JSON web token. Its word includes hyphens, unlike the other words: tried at every `eyJ` inside such a word, the
    # pattern would take quadratic time.
    "eyJ": r"(?<![\w-]eyJ)[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
}
# Words that a secret follows.
_FOLLOWING: Mapping[str, str] = {
    "Bearer ": r"[\w.~+/=-]{6,}",
    "bearer ": r"(?=[\w.~+/=-]*\d)[\w.~+/=-]{16,}",
    "AccountKey=": r"[\w+/=-]{8,}",
    "SharedAccessKey=": r"[\w+/=-]{8,}",
}
# Patterns by the literal that they start with. The group is the secret. `re` finds a leading literal fast, so the
# condition that it starts a word comes behind it.
_SHAPES = [
    *((word, re.compile(rf"({re.escape(word)}(?<=\b{re.escape(word)}){rest})")) for word, rest in _TOKENS.items()),
    *((word, re.compile(rf"{re.escape(word)}(?<=\b{re.escape(word)})({rest})")) for word, rest in _FOLLOWING.items()),
]
_BASIC = re.compile(r"asic (?<=\b[Bb]asic )([A-Za-z0-9+/=]{8,})")

_PRIVATE_KEY = re.compile(r"-----? ?BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-----?")
_END = re.compile(r"-----? ?END [A-Z0-9 ]{0,60}-----?")
# Characters of a private key that is cut off: of the key and its headers, and line feeds as JSON writes them.
_KEY_TEXT = re.compile(r"[A-Za-z0-9+/=\s:,.()@<>\\-]*")

_WORD = re.compile(r"\S+")
_SCHEME_END = re.compile(r":(?:\\{0,4}/){2}")  # JSON may write `:\/\/`, with more backslashes if it is quoted again
_QUOTE = re.compile("[\"'<>`]")
_AUTHORITY_END = re.compile("[/?#\"'<>`\\\\]")
_PORT = re.compile(r"[0-9]{0,5}")
_QUERY = re.compile(r"([?&;#])([\w.%\[\]-]{1,100})=([^\s&;#\"'<>`\\]+)")
# Schemes in which a name before the `@` is part of an address: `abfss://container@account`.
_ADDRESSES = ("abfs", "abfss", "wasb", "wasbs")

_OPTION = re.compile(r"--\w")  # the character tells an option from a value that starts with `-----BEGIN`

# A shorter secret found inside a text is as likely an ordinary word of the text.
_SHORTEST = 6

Span = tuple[int, int]
"""Start (included) and end (excluded) of a part of a text."""


def is_secret(key: object, value: object) -> bool:
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
    if words[-3:] == ["access", "key", "id"]:
        return True
    before = words[-2] if len(words) > 1 else ""
    last = words[-1]
    if last in ("key", "keys"):
        return before in _KINDS_OF_KEY
    if last.endswith(("password", "passwd")):  # also `dbpassword`
        return True
    if last == "pass":
        return before not in _PASSES and not is_number
    singular = last.removesuffix("s")
    if singular == "token":
        return before not in _TEXT_TOKENS and words[0] not in ("max", "min", "num") and not is_number
    return singular in _SECRETS


def redacted(value: Any) -> Any:
    """Return a copy of `value` with `HIDDEN` in place of each secret, also inside nested mappings and lists.

    Keys that differ in a secret only become one key.
    """
    if isinstance(value, str):
        return _redacted_text(value)
    if isinstance(value, Mapping):
        return {redacted(key): HIDDEN if is_secret(key, inner) else redacted(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(inner) for inner in value]
    return value


def _redacted_text(text: str) -> str:
    """Return `text` with `HIDDEN` for each part that has the shape of a secret, or `text` itself if no part has."""
    spans = _secret_spans(text)
    if not spans:
        return text
    pieces, end = [], 0
    for first, last in spans:
        pieces += [text[end:first], HIDDEN]
        end = last
    return "".join([*pieces, text[end:]])


def _secret_spans(text: str) -> list[Span]:
    """Return the parts of a text that have the shape of a secret, in order, with overlapping parts merged."""
    merged: list[Span] = []
    for first, last in sorted(_spans(text)):
        if merged and first < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _spans(text: str) -> Iterator[Span]:
    # Most texts contain no secret. Looking for a literal first is many times faster than the patterns.
    if "BEGIN" in text:
        yield from _private_keys(text)
    for word, shape in _SHAPES:
        if word in text:
            yield from (match.span(1) for match in shape.finditer(text))
    for match in _BASIC.finditer(text):
        if _is_user_and_password(match.group(1)):
            yield match.span(1)
    if "@" in text and "/" in text:
        yield from _user_informations(text)
    if "=" in text:
        yield from _query_values(text)


def _private_keys(text: str) -> Iterator[Span]:
    """Yield the PEM blocks of private keys. A block without an end reaches as far as text that a key may contain."""
    place = 0
    has_end = True  # False once no end is left: searching again from every beginning would take quadratic time
    while (begin := _PRIVATE_KEY.search(text, place)) is not None:
        end = _END.search(text, begin.end()) if has_end else None
        has_end = end is not None
        last = end or _KEY_TEXT.match(text, begin.end())
        assert last is not None  # `_KEY_TEXT` matches the empty text too
        place = last.end()
        yield begin.start(), place


def _is_user_and_password(text: str) -> bool:
    """Return True if `text` is `user:password` in base64, as in HTTP's basic authentication."""
    try:
        return b":" in base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        return False


def _user_informations(text: str) -> Iterator[Span]:
    """Yield the user information of each URL.

    The user information is everything up to the last `@`, because a password may contain any character. A URL ends at
    white space. If its first part has no `:`, as in `https://host/@name`, a later `@` is in the path.
    """
    for word in _WORD.finditer(text):
        last_at = text.rfind("@", word.start(), word.end())
        place = word.start()
        quote_at, at_before_quote = -1, -1  # the next quotation mark, and the last `@` before it
        while place <= last_at and (scheme := _SCHEME_END.search(text, place, word.end())) is not None:
            start = place = scheme.end()
            if quote_at < start:
                quoted = _QUOTE.search(text, start, word.end())
                quote_at = quoted.start() if quoted else word.end()
                at_before_quote = text.rfind("@", start, quote_at)
            ending = _AUTHORITY_END.search(text, start, word.end())
            authority = text[start : ending.start() if ending else word.end()]
            end = _end_of_user(authority, start, at_before_quote, last_at)
            if end > start and not _is_address(text, scheme.start(), text[start:end]):
                yield start, end
                place = end


def _end_of_user(authority: str, start: int, at_before_quote: int, last_at: int) -> int:
    """Return the place of the `@` that ends a URL's user information, or `start` if it has none.

    Args:
        authority: text of the URL from `start` to the first `/`, `?`, `#` or quotation mark.
        start: place behind `://`.
        at_before_quote: place of the last `@` before a quotation mark, which ends a URL in most texts.
        last_at: place of the last `@` before white space.
    """
    name, colon, rest = authority.partition(":")
    if colon and at_before_quote >= start:
        return at_before_quote
    if colon and last_at >= start and name and not _PORT.fullmatch(rest):
        return last_at  # the password contains a quotation mark
    return max(start, start + authority.rfind("@"))


def _is_address(text: str, colon: int, user: str) -> bool:
    """Return True if `user`, before an `@`, names no person: `ssh://git@host`, `abfss://container@account`."""
    scheme = re.split("[^A-Za-z]", text[max(0, colon - 10) : colon])[-1]
    return user == "git" or (scheme.lower() in _ADDRESSES and ":" not in user)


def _query_values(text: str) -> Iterator[Span]:
    """Yield the values of keys such as `sig` and `access_token` behind `?`, `&`, `;` or `#`."""
    for match in _QUERY.finditer(text):
        words = [word.lower() for word in _WORDS.findall(unquote(match.group(2)))]
        while len(words) > 1 and words[-1].isdecimal():
            words.pop()
        is_query_key = bool(words) and words[-1] in _QUERY_KEYS and match.group(1) != ";"
        if is_query_key or _names_secret(words, is_number=False):
            yield match.span(3)


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
        return _redacted_text(text)
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return _redacted_text(text)
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
    """Return the secrets in `value` as text, by key and by shape, without those too short to tell from other words."""
    found: set[str] = set()
    for _, text, is_whole in _leaves(value):
        if is_whole:
            found.add(text)
            continue
        for first, last in _secret_spans(text):
            # An error may quote the password of a URL without the user.
            found |= {text[first:last], text[first:last].partition(":")[2]}
    return {text for text in found if len(text) >= _SHORTEST}


def scrubbed(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text` with the placeholder for each of `secrets`, also where quoted, and for the shape of a secret."""
    spellings: set[str] = set()
    for secret in secrets:
        spellings.update(_spellings(secret))
    # The longest first: a shorter one may be part of it.
    for spelling in sorted(spellings, key=len, reverse=True):
        if len(spelling) >= _SHORTEST:
            text = text.replace(spelling, HIDDEN)
    return _redacted_text(text)


def _spellings(secret: str) -> Iterator[str]:
    """Yield a secret as errors and URLs write it."""
    yield secret
    yield " ".join(secret.split())
    yield repr(secret)[1:-1]
    yield json.dumps(secret)[1:-1]
    yield from (quote(secret, safe=""), quote_plus(secret), unquote(secret))
