"""A reward for one JSON object that fits a JSON Schema: found in a fence or tag, read strictly, validated in bounds.

| the completion holds | pay |
|---|---|
| one JSON object, and it fits the schema | 1 (`pay`) |
| one JSON object that does not fit | 0.5 (`pay_partial`) times the share of required keys whose values fit |
| no object, several of them, or something that is not JSON | 0 |
| the schema of its row is missing or can't be used | None |

With `gold_column`, only an object with the values of its row's gold object earns the full pay.

`schema_validation` checks a schema, and validates with it in bounded time.

The file is not called json_schema.py because `grpo_rewards.json_schema` is the reward itself, which a submodule of that
name would hide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from grpo_rewards.completions import check_rows, completion_text, fenced_blocks, needed_column
from grpo_rewards.math.golds import MAX_GOLDS, accepted_golds
from grpo_rewards.reward import Kind, Scored, TaggedReward, check_choice, check_less, checked_number
from grpo_rewards.schema_validation import CompiledSchema, TooCostly, compile_schema, json_text, usable_schema
from grpo_rewards.strict import parse_json
from grpo_rewards.strings import folded


@dataclass(frozen=True, kw_only=True)
class JsonSchema(TaggedReward):
    """Correctness of one JSON object by a schema.

    | the completion holds | pay |
    |---|---|
    | one JSON object, and it fits the schema | 1 (`pay`) |
    | one JSON object that does not fit | 0.5 (`pay_partial`) times the share of required keys whose values fit |
    | no object, several of them, or something that is not JSON | 0 |
    | the schema of its row is missing or can't be used | None |

    The share is over the schema's own `required`, at the top level. A key whose value does not fit counts as missing.
    Without `required` there is no share, and an object that does not fit earns 0.

    With `gold_column`, values count too:

    | the completion holds | pay |
    |---|---|
    | one JSON object that fits and has the gold's values | 1 (`pay`) |
    | another JSON object | 0.5 (`pay_partial`) times the share of keys, of both objects, whose values are the gold's |
    | no object, several of them, or something that is not JSON | 0 |
    | the schema or the gold of its row is missing or can't be used | None |

    Texts are compared without case, runs of white space and the encoding of accents. Numbers are compared by value, and
    lists in their order. A key with null counts as a missing key, because Arrow fills missing keys with nulls.

    Args:
        schema: JSON Schema (draft 4, 6, 7, 2019-09 or 2020-12), as a mapping or as JSON; None to read it from a column.
        schema_column: name of the dataset column with one schema per row. JSON strings are safest, because Arrow fills
            the missing keys of mappings with nulls.
        gold_column: name of the dataset column with one gold object per row, as a string of JSON or a mapping, or a
            list of at most 64 of them, of which the best pay counts; None to compare no values.
        extract: place of the object outside the thinking. `answer_tag` is the only `<answer>` block, perhaps with a
            fence in it. `fence` is the only Markdown fence that is marked `json`, or unmarked and starts with `{`.
            `whole` is nothing else. `auto` is the first of these that the completion uses; text that starts with `{` is
            `whole`.
        pay: score for an object that fits.
        pay_partial: score for an object that has all required keys and does not fit; less than `pay`.
        tags: names of the reasoning tag and the answer tag.
        prefilled: name of the reasoning tag if the prompt already opens it.
        prefix: prefix of the logged column `verdict`, for runs in which two rewards log it.
        name: name of the reward in logs.

    Raises:
        ValueError: the schema can't be used, or a library that it needs is not installed.
    """

    kind: ClassVar[Kind] = "correctness"
    payments: ClassVar[tuple[str, ...]] = ("pay", "pay_partial")
    gold_forms: ClassVar[str] = (
        "a row holds a JSON Schema, best as a string of JSON, and with `gold_column` a JSON object, or at most "
        f"{MAX_GOLDS} of them"
    )

    schema: Mapping[str, Any] | str | None = None
    schema_column: str = "schema"
    gold_column: str | None = None
    extract: str = "auto"
    pay: float = 1.0
    pay_partial: float = 0.5
    prefix: str = ""
    name: str = "json_schema"

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_number(self.pay_partial, "pay_partial", 0.0, self.pay)
        check_less(self, "pay_partial", "pay")
        check_choice(self.extract, "extract", ("answer_tag", "fence", "whole", "auto"))
        if self.schema is not None:
            text = json_text(self.schema)
            if text is None:
                raise ValueError(f"schema must be a mapping or a string of JSON, not {self.schema!r}")
            compile_schema(text)
            # As a string, the reward stays hashable and can't change behind a caller's back.
            object.__setattr__(self, "schema", text)

    @property
    def columns_read(self) -> tuple[str, ...]:
        """Names of the dataset columns with the golds and the schemas. One schema may serve every row."""
        golds = () if self.gold_column is None else (self.gold_column,)
        return golds if self.schema is not None else (*golds, self.schema_column)

    def _scored(self, prompts: Any, completions: Sequence[Any], columns: Mapping[str, Any]) -> Scored:
        schemas = [self.schema] * len(completions) if self.schema is not None else columns.get(self.schema_column)
        if schemas is None:
            raise ValueError(
                f"reward `{self.name}` needs the kwarg schema or the dataset column `{self.schema_column}` (its kwarg "
                f"schema_column); the batch has {', '.join(columns) or 'none'}"
            )
        check_rows(self.name, **{"completions": completions, self.schema_column: schemas})
        golds: Sequence[Any] = [None] * len(completions)
        if self.gold_column is not None:
            golds = needed_column(self, "gold_column", columns, completions)
        judged = list(map(self._judge, map(completion_text, completions), schemas, golds))
        verdicts, scores = [verdict for verdict, _ in judged], [score for _, score in judged]
        rows = max(len(verdicts), 1)
        fitting = sum(verdict.startswith("fits") for verdict in verdicts)
        parsed = fitting + sum(verdict.startswith("does not fit") for verdict in verdicts)
        metrics = {"fits": fitting / rows, "parsed": parsed / rows}
        return Scored(scores, {"verdict": verdicts}, {**metrics, "unscorable": float(scores.count(None))})

    def _judge(self, completion: str, schema: Any, gold: Any) -> tuple[str, float | None]:
        schema_text = json_text(schema)
        compiled = usable_schema(schema_text) if schema_text is not None else "no schema"
        if isinstance(compiled, str):
            return compiled, None
        golds = [] if self.gold_column is None else _gold_objects(gold)
        if self.gold_column is not None and not golds:
            return "no gold", None
        text = self._outside_thinking(completion)
        try:
            found = find_object(text, self.extract, self.tags[1])
            verdict, score = self._validated(compiled, found)
            compared = [self._compared(verdict, found, wanted) for wanted in golds]
            return max(compared, key=lambda result: result[1]) if golds else (verdict, score)
        except ValueError as error:
            return str(error), 0.0
        except (TooCostly, RecursionError):
            return "too costly to validate", 0.0

    def _validated(self, schema: CompiledSchema, found: dict[str, Any]) -> tuple[str, float]:
        error, bad = schema.faults(found)
        if error is None:
            return "fits", self.pay
        required = schema.required
        good = len(required) - len(bad)
        where = ""
        for part in error.absolute_path:
            where += f"[{part}]" if isinstance(part, int) else f".{part}"
        place = f"{error.validator or 'false'} at ${where[:80]}"
        verdict = f"does not fit ({place}), {good} of {len(required)} required keys do"
        if bad:
            verdict += f", not {', '.join(bad)[:80]}"
        return verdict, self.pay_partial * (good / max(len(required), 1))

    def _compared(self, verdict: str, found: dict[str, Any], gold: Mapping[str, Any]) -> tuple[str, float]:
        """Return the verdict and the score of an object whose values are compared with those of the gold."""
        answer = _comparable(found)
        keys = [*gold, *(key for key in answer if key not in gold)]
        wrong = [key for key in keys if key not in answer or key not in gold or answer[key] != gold[key]]
        if not wrong:
            return verdict, self.pay if verdict == "fits" else self.pay_partial
        right = len(keys) - len(wrong)
        verdict += f", {right} of {len(keys)} values are right, not {', '.join(wrong)[:80]}"
        return verdict, self.pay_partial * (right / len(keys))


def _gold_objects(value: Any) -> list[Mapping[str, Any]]:
    """Return the gold objects that a row accepts: of a list, or the one value. Other entries are skipped."""
    entries = [value] if isinstance(value, Mapping) else accepted_golds(value)
    return [gold for entry in entries if (gold := _gold_object(json_text(entry))) is not None]


@lru_cache(maxsize=4096)
def _gold_object(text: str | None) -> Mapping[str, Any] | None:
    """Return the values of a gold object in the form of `_comparable`, or None if the text is not a JSON object."""
    try:
        gold = parse_json(text or "")
    except (ValueError, RecursionError):
        return None
    return _comparable(gold) if isinstance(gold, dict) else None


def _comparable(value: Any) -> Any:
    """Return a JSON value in a form that is equal for equal values: texts are folded, and null counts as missing."""
    if isinstance(value, dict):
        return {key: _comparable(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return list(map(_comparable, value))
    if isinstance(value, bool):
        return ("boolean", value)  # True == 1 in Python
    return folded(value) if isinstance(value, str) else value


# --- Where the object is ---


def find_object(text: str, layout: str, tag: str) -> dict[str, Any]:
    """Return the one JSON object of a completion.

    Args:
        text: completion without its thinking.
        layout: a value of `JsonSchema.extract`.
        tag: name of the answer tag.

    Raises:
        ValueError: there is no object, several, or something else. The message names it.
    """
    place = _place(text, layout, tag)
    try:
        value = parse_json(place)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _place(text: str, layout: str, tag: str) -> str:
    opening, closing = f"<{tag}>", f"</{tag}>"
    if layout == "answer_tag" or (layout == "auto" and opening in text):
        if text.count(opening) > 1 or text.count(closing) > 1:
            raise ValueError("several answer blocks")
        body, end, _ = text.partition(opening)[2].partition(closing)
        if not end:
            raise ValueError("no answer block")
        body = body.strip()
        return _only_fence(body) if body.startswith("```") and body.endswith("```") else body
    # Text that starts with a brace is an object, which may hold Markdown in a string.
    if layout == "fence" or (layout == "auto" and "```" in text and not text.lstrip().startswith("{")):
        return _only_fence(text)
    return text.strip()


def _only_fence(text: str) -> str:
    """Return the content of the only closed Markdown fence that is marked `json`, or unmarked and starts with `{`."""
    blocks = []
    for label, content in fenced_blocks(text):
        body = content.strip()
        if label == "json" or (not label and body.startswith("{")):
            blocks.append(body)
    if len(blocks) != 1:
        raise ValueError("several fences" if blocks else "no fence")
    return blocks[0]


json_schema = JsonSchema()
