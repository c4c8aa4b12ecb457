"""Multiple-choice questions of a dataset: the letters and texts of their choices, and the spellings that name one."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any

_MAX_EXTRA_CHARS = 1000
"""Number of characters by which an answer may be longer than the longest choice. A longer one names no choice."""

_LABEL = re.compile(r"[A-Za-z0-9]{1,3}")
_LABELLED = re.compile(r"\s*\(?([A-Za-z])(?:\)|[.:](?=\s))\s*(\S.*)", re.DOTALL)

_FOLDED = {**dict.fromkeys("−‐‑–—﹣―", "-"), **dict.fromkeys("‘’‚‛", "'"), **dict.fromkeys("“”„«»", '"'),
           "。": ". ", "、": ", ", "，": ", ", "：": ": ", "；": "; ", "！": "! ", "？": "? ", "।": ". ", "،": ", ",
           "؟": "? ", "\n": " ", "\t": " ", "\r": " "}  # fmt: skip
_LATEX_COMMAND = re.compile(
    r"\\(?:text\w*|math(?:rm|bf|it|sf|tt)|mbox|[bf]?boxed|fbox|underline|emph|operatorname)\s*\{([^{}]*)\}"
)
_LATEX_SPACE = re.compile(r"\\[()\[\],;:! ]|\\quad\b|\\left\b|\\right\b|(?<=[\w).}])~(?=\S)")
_PAIRED = (
    re.compile(r"(?<![\w*])(\*{1,3})(?=[^\s*])([^*]*)\1(?![\w*])"),
    re.compile(r"(?<!\w)(_{1,2})(?=[^\s_])([^_]*)\1(?!\w)"),
    re.compile(r"(`+)([^`]*)\1"),
    re.compile(r'(")([^"]*)"'),
    re.compile(r"(?<!\w)(')([^']*)'(?!\w)"),
    re.compile(r"(\${1,2})([^$]*)\1"),
)
# The mark that remains of "**Answer: B**" behind the claim. Between letters it is a power and stays.
_HALF_A_PAIR = re.compile(r"(?<![^\W_])(?:\*\*+|__+)|(?:\*\*+|__+)(?![^\W_])")
_AROUND_SYMBOL = re.compile(r"\s*([^\w\s])\s*")
ARTICLE = re.compile(r"(?:the|an?) (?=\S)")
_END_OF_WORDS = re.compile(r"(?<=[^\W\d_])!+\Z")  # a question mark is doubt


@lru_cache(maxsize=4096)
def _plain_character(character: str) -> str:
    """Return the ASCII form of a character that only looks different, such as a full-width letter or a dash.

    Circled and bold letters, spaces and quotes are folded too. Invisible characters vanish.
    """
    if character in _FOLDED:
        return _FOLDED[character]
    if character.isascii():
        return character
    category = unicodedata.category(character)
    if category == "Cf":
        return ""
    if category == "Zs":
        return " "
    if category == "Nd":
        return str(unicodedata.decimal(character))
    plain = unicodedata.normalize("NFKC", character)
    return plain if plain.isascii() and category[0] in "LPS" else character


def cleaned_text(text: str) -> str:
    """Return an answer or a choice's text without LaTeX, Markdown, quotes and runs of white space."""
    text = "".join(map(_plain_character, unicodedata.normalize("NFC", text)))
    if "\\" in text:
        while (inner := _LATEX_COMMAND.sub(r"\1", text)) != text:  # nested: \boxed{\textbf{(B)}}
            text = inner
        text = _LATEX_SPACE.sub(" ", text).replace("\\%", "%").replace("\\$", "$")
    for pair in _PAIRED:
        text = pair.sub(r"\2", text)
    return " ".join(_HALF_A_PAIR.sub("", text).split())


def key_of(cleaned: str) -> str:
    """Return a form that two spellings of one text share: no case, leading article, final period, spaces by symbols."""
    folded = cleaned.casefold()
    key = _END_OF_WORDS.sub("", folded[end_of(ARTICLE, folded) :].rstrip(" .,;:"))
    if key[:1] + key[-1:] in ("()", "[]") and not re.search(r"[()\[\],]", key[1:-1]):
        key = key[1:-1]
    return _AROUND_SYMBOL.sub(r"\1", key).strip() or folded


def end_of(pattern: re.Pattern[str], text: str) -> int:
    """Return where a match at the start of a text ends; 0 without one."""
    match = pattern.match(text)
    return match.end() if match else 0


@dataclass(frozen=True)
class Choices:
    """Choices of one question, built by `read_choices`.

    Attributes:
        labels: letters (or numbers) of the choices, as written.
        texts: texts of the choices; () if only the letters are known.
        by_label: labels by their case-folded form.
        by_text: labels by the cleaned text; None for a text that two choices have.
        by_key: labels by the key of the text; None for a key that two choices have.
        keys: (key, label) pairs of the unique keys, longest key first.
        head: pattern of a label at the start of an answer.
        mention: pattern of a label anywhere in a text.
        max_chars: number of characters of the longest answer that is read.
    """

    labels: tuple[str, ...]
    texts: tuple[str, ...]
    by_label: Mapping[str, str]
    by_text: Mapping[str, str | None]
    by_key: Mapping[str, str | None]
    keys: Sequence[tuple[str, str]]
    head: re.Pattern[str]
    mention: re.Pattern[str]
    max_chars: int

    def named_by_label(self, cleaned: str) -> str | None:
        """Return the label that a cleaned text consists of, perhaps in brackets or before a mark, or None."""
        # "A!" is a letter, "!A" its negation.
        return self.by_label.get(cleaned.casefold().lstrip("()[]{}<>.,:; ").rstrip("()[]{}<>.,:;! "))

    def named_by_text(self, cleaned: str) -> str | None:
        """Return the label of the one choice whose text a cleaned text is, or None."""
        if cleaned in self.by_text:
            return self.by_text[cleaned]
        return self.by_key.get(key_of(cleaned))

    def named_exactly(self, cleaned: str) -> str | None:
        """Return the choice that a cleaned text names by its letter or its text and nothing else."""
        return self.named_by_label(cleaned) or self.named_by_text(cleaned)


@lru_cache(maxsize=1024)
def _choices(labels: tuple[str, ...], texts: tuple[str, ...]) -> Choices | None:
    by_label = {label.casefold(): label for label in labels}
    if len(by_label) < len(labels):
        return None
    by_text: dict[str, str | None] = {}
    by_key: dict[str, str | None] = {}
    for label, text in zip(labels, texts, strict=False):
        cleaned = cleaned_text(text)
        # A question among the choices may be named without its mark.
        for table, entry in ((by_text, cleaned), (by_key, key_of(cleaned.rstrip("?")))):
            # A text that looks like a letter ("A" among the letters of a word) is always read as the letter.
            if entry and entry.casefold() not in by_label:
                table[entry] = None if entry in table else label
    keys = [(key, label) for key, label in by_key.items() if label]
    keys.sort(key=lambda pair: len(pair[0]), reverse=True)
    either = "|".join(map(re.escape, labels))
    head = re.compile(
        rf"""(?P<word>(?:the\ )?(?:option|choice|answer|letter|alternative|statement)\ )?
        (?P<open>[(\[{{<]*)\ ?(?P<label>{either})
        (?P<close>(?:\ ?[)\]}}>.:,;!]|\ -)*) (?: (?=\s|\Z) | (?<=[)\]:.])(?=[^\W\d]) | (?<=[)\]])(?=[-\d]) )""",
        re.VERBOSE | re.IGNORECASE,
    )
    mention = re.compile(rf"(?<![\w'-])([(\[]?)({either})([)\]]?)(?![\w'-])(?=(\ [a-z]+)?)", re.IGNORECASE)
    max_chars = max(map(len, texts), default=0) + _MAX_EXTRA_CHARS
    return Choices(labels, texts, by_label, by_text, by_key, keys, head, mention, max_chars)


_LETTERS_ALONE = tuple(string.ascii_uppercase)


def read_choices(value: Any) -> Choices | None:
    """Return the choices of a row, or None if they can't be read.

    Args:
        value: list of texts, with the letters A, B, C, ... unless the texts bring their own ("B) Paris", "A) Rome"); or
            a mapping from letters to texts, in which None stands for no choice; or ARC's mapping
            `{"text": [...], "label": [...]}`; or None for letters alone. A letter may be a number.
    """
    if value is None:
        return _choices(_LETTERS_ALONE, ())
    pairs = _label_and_text(value)
    for label, text in pairs:
        if not isinstance(label, str) or not _LABEL.fullmatch(label) or not isinstance(text, (str, Real)):
            return None
    labels = tuple(label for label, _ in pairs)
    texts = tuple(str(text) for _, text in pairs)
    return _choices(labels, texts) if pairs else None


def _label_and_text(value: Any) -> Sequence[tuple[Any, ...]]:
    value = listed(value)
    if isinstance(value, Mapping):
        if set(value) == {"text", "label"}:
            texts, labels = listed(value["text"]), listed(value["label"])
            same = isinstance(texts, Sequence) and isinstance(labels, Sequence) and len(texts) == len(labels)
            return list(zip(labels, texts, strict=True)) if same else []
        return [(label, text) for label, text in value.items() if text is not None]
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > len(_LETTERS_ALONE):
        return []
    labelled = [match.groups() for text in value if isinstance(text, str) and (match := _LABELLED.match(text))]
    # Exactly the first letters, so that names with initials ("I. Newton", "M. Curie") stay names.
    if sorted(label.upper() for label, _ in labelled) == list(_LETTERS_ALONE[: len(value)]):
        return labelled
    return list(zip(_LETTERS_ALONE, value, strict=False))


def listed(value: Any) -> Any:
    """Return the list of an array of numpy or pyarrow, and any other value as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
