"""A reward for one JSON object that fits a JSON Schema: found in a fence or tag, read strictly, validated in bounds.

| the completion holds | pay |
|---|---|
| one JSON object, and it fits the schema | 1 (`pay`) |
| one JSON object that does not fit | 0.5 (`pay_partial`) times the share of required keys whose values fit |
| no object, several of them, or something that is not JSON | 0 |
| the schema of its row is missing or can't be used | None |

With `gold_column`, only an object with the values of its row's gold object earns the full pay.

jsonschema validates (the extra `grpo-rewards[json]`), but neither it nor jsonschema-rs bounds time or regular
expressions. Anything in it that could run for ever is replaced or rejected: patterns run on RE2 (the extra
`grpo-rewards[patterns]`), `uniqueItems` is linear, `multipleOf` is exact, references lead only into the schema itself,
and a validation ends after MAX_STEPS steps.

The alternative is the bare library in a forked child with limits of time and memory. It was measured and rejected.
jsonschema-rs in a child costs 84 microseconds per single call and 4.3 per completion in batches of 64; Python's
jsonschema in a child costs 24 and 11. This module costs 42 microseconds per completion, including finding the object in
the text. And a limit on wall-clock time makes the verdict depend on the machine, which a reward must not.

The file is not called json_schema.py because `grpo_rewards.json_schema` is the reward itself, which a submodule of that
name would hide.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import date
from fractions import Fraction
from functools import cache, lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any, ClassVar, NamedTuple

from grpo_rewards.completions import check_rows, completion_text, fenced_blocks, needed_column
from grpo_rewards.errors import UserError
from grpo_rewards.math.answers import MAX_GOLDS, accepted_golds
from grpo_rewards.reward import Kind, Scored, TaggedReward, check_choice, check_less, checked_number
from grpo_rewards.strict import PatternError, linear_search, parse_json
from grpo_rewards.strings import folded

MAX_STEPS = 200_000
"""Number of steps of the longest validation, about a second.

A keyword applied to a value is one step, and one more for each entry of either.
"""

MAX_SCHEMA_DEPTH = 64
"""Number of arrays and objects of a schema that may be open at once."""


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
            text = _json_text(self.schema)
            if text is None:
                raise ValueError(f"schema must be a mapping or a string of JSON, not {self.schema!r}")
            _compile(text)
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
        schema_text = _json_text(schema)
        compiled = _compiled(schema_text) if schema_text is not None else "no schema"
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
        except (_TooCostly, RecursionError):
            return "too costly to validate", 0.0

    def _validated(self, schema: CompiledSchema, found: dict[str, Any]) -> tuple[str, float]:
        _steps.set([MAX_STEPS])
        instance = _quiet(found)
        error = next(schema.validator.iter_errors(instance), None)
        if error is None:
            return "fits", self.pay
        required = schema.required
        bad = [key for key in required if key not in instance or not schema.value_fits(key, instance[key])]
        good = len(required) - len(bad)
        where = ""
        for part in error.absolute_path:
            where += f"[{part}]" if isinstance(part, int) else f".{part}"
        verdict = (
            f"does not fit ({error.validator or 'false'} at ${where[:80]}), {good} of {len(required)} required keys do"
        )
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
    """Return the gold objects that a row accepts: of a list, or the one value. Entries that are none are skipped."""
    entries = [value] if isinstance(value, Mapping) else accepted_golds(value)
    golds = []
    for entry in entries:
        if (gold := _gold_object(_json_text(entry))) is not None:
            golds.append(gold)
    return golds


@lru_cache(maxsize=4096)
def _gold_object(text: str | None) -> Mapping[str, Any] | None:
    """Return the values of a gold object in the form of `_comparable`, or None if the text is no JSON object."""
    try:
        gold = parse_json(text or "")
    except (ValueError, RecursionError):
        return None
    return _comparable(gold) if isinstance(gold, dict) else None


def _comparable(value: Any) -> Any:
    """Return a JSON value in a form that is equal for equal values: folded texts, no nulls, no numbers as booleans."""
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
        ValueError: there is no object, several, or something else; the message says which.
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


# --- Schemas: checked and compiled once ---


class CompiledSchema(NamedTuple):
    """A schema that passed the checks.

    Attributes:
        validator: validator of jsonschema, with bounded keywords.
        required: keys that the schema requires at the top level.
        properties: schemas of each key at the top level, all of which its value must fit.
    """

    validator: Any
    required: tuple[str, ...]
    properties: Mapping[str, Sequence[Any]]

    def value_fits(self, key: str, value: Any) -> bool:
        """Return True if a value fits the schemas of its key. A key without a schema takes any value."""
        for schema in self.properties.get(key, ()):
            if next(self.validator.evolve(schema=schema).iter_errors(value), None) is not None:
                return False
        return True


def _json_text(value: Any) -> str | None:
    """Return the JSON of a mapping, or a text as it is. Return None for anything else."""
    if isinstance(value, Mapping):
        try:
            return json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            return None
    return value if isinstance(value, str) and value.strip() else None


@lru_cache(maxsize=256)
def _compiled(text: str) -> CompiledSchema | str:
    """Return a schema ready to validate with, or the sentence that says why it can't be used.

    Raises:
        UserError: jsonschema or google-re2 is not installed.
    """
    try:
        return _compile(text)
    except _SchemaError as error:
        return str(error)


class _SchemaError(UserError):
    """A schema that can't be used."""


def _compile(text: str) -> CompiledSchema:
    try:
        from jsonschema import exceptions, validators
        from referencing import Registry
    except ImportError as error:
        raise UserError("json_schema", "it needs jsonschema", "pip install 'grpo-rewards[json]'") from error
    try:
        schema = parse_json(text, max_depth=MAX_SCHEMA_DEPTH)
    except ValueError as error:
        raise _SchemaError("the schema", f"it is not JSON ({error})", "correct it") from error
    if not isinstance(schema, dict):
        raise _SchemaError("the schema", "it is not a JSON object", "write one")
    dialect = schema.setdefault("$schema", validators.Draft202012Validator.META_SCHEMA["$schema"])
    draft = validators.validator_for(schema, default=None) if isinstance(dialect, str) else None
    if draft is None or draft is validators.Draft3Validator:
        fix = "name one of the drafts 4, 6, 7, 2019-09 and 2020-12"
        raise _SchemaError("the schema: `$schema`", f"it is {dialect!r}", fix)
    try:
        # Without a format checker: `format: regex` would run each pattern through Python's own `re`.
        draft.check_schema(schema, format_checker=None)
    except exceptions.SchemaError as error:
        raise _SchemaError("the schema", f"it is not valid ({error.message[:200]})", "correct it") from error
    except RecursionError as error:
        raise _SchemaError("the schema", "it is nested too deeply", "flatten it") from error
    targets = _check_constructs(schema)
    # A registry of its own: jsonschema's default would fetch from the network.
    validator = _bounded(draft)(schema, registry=Registry(), format_checker=_format_checker())
    required: dict[str, None] = {}
    properties: dict[str, list[Any]] = {}
    ignores_siblings = draft in (validators.Draft4Validator, validators.Draft6Validator, validators.Draft7Validator)
    part: Any = schema
    while isinstance(part, dict):  # the root, and what it refers to in its place
        if "$ref" not in part or not ignores_siblings:
            required |= dict.fromkeys(part.get("required", ()))
            for key, value in part.get("properties", {}).items():
                properties.setdefault(key, []).append(value)
        part = targets.get(id(part))
    return CompiledSchema(validator, tuple(required), properties)


def _check_constructs(root: dict[str, Any]) -> dict[int, Any]:
    """Raise `_SchemaError` if a schema may run for ever or leads outside itself.

    Returns:
        The target of each `$ref`, by the identity of the schema that holds it.
    """
    from referencing import Registry, Resource

    resource = Resource.from_contents(root)
    resolver = Registry().resolver_with_root(resource)
    in_place: dict[int, set[int]] = {}  # by identity: the schemas that a schema applies to the same value
    targets: dict[int, Any] = {}
    pending = [resource]
    while pending:
        resource = pending.pop()
        node = resource.contents
        if not isinstance(node, dict) or id(node) in in_place:
            continue
        if node is not root and resource.id() is not None:
            problem = "a second schema with an identity of its own is not supported"
            raise _SchemaError("the schema: `$id`", problem, "remove it")
        for keyword in ("$dynamicRef", "$recursiveRef", "unevaluatedItems", "unevaluatedProperties"):
            if keyword in node:
                raise _SchemaError(f"the schema: `{keyword}`", "it is not supported", "remove it")
        _check_patterns(node)
        in_place[id(node)] = set(map(id, _applied_in_place(node)))
        if "$ref" in node:
            target = targets[id(node)] = _target(node["$ref"], resolver)
            in_place[id(node)].add(id(target))
            pending.append(Resource.from_contents(target, default_specification=resource._specification))
        pending += resource.subresources()
    try:
        TopologicalSorter(in_place).prepare()
    except CycleError as error:
        problem = "it leads back to itself without reading on"
        raise _SchemaError("the schema: `$ref`", problem, "remove it") from error
    return targets


def _check_patterns(schema: Mapping[str, Any]) -> None:
    patterns = list(schema.get("patternProperties", ()))
    if "pattern" in schema:
        patterns.append(schema["pattern"])
    for pattern in patterns:
        try:
            linear_search(pattern)
        except PatternError as error:
            raise _SchemaError(f"the schema: {error.place}", error.problem, error.fix) from error


def _target(ref: str, resolver: Any) -> Any:
    from referencing.exceptions import Unresolvable

    if not ref.startswith("#"):
        problem = "it leads outside the schema, where nothing is ever fetched"
        raise _SchemaError(f"the schema: `$ref` {ref!r}", problem, "copy its target into the schema")
    try:
        return resolver.lookup(ref).contents
    except (Unresolvable, TypeError, ValueError) as error:
        raise _SchemaError(f"the schema: `$ref` {ref!r}", "it leads nowhere", "correct it") from error


def _applied_in_place(schema: Mapping[str, Any]) -> Iterator[Any]:
    for keyword in ("allOf", "anyOf", "oneOf"):
        yield from schema.get(keyword, ())
    for keyword in ("not", "if", "then", "else"):
        if keyword in schema:
            yield schema[keyword]
    for keyword in ("dependentSchemas", "dependencies"):
        yield from schema.get(keyword, {}).values()


# --- Validation: keywords of (validator, value of the keyword, instance, schema) that count their steps ---

_Keyword = Callable[[Any, Any, Any, Any], Any]
_steps: ContextVar[list[int]] = ContextVar("steps")
"""Number of steps left to the validation that runs in this context."""


class _TooCostly(Exception):
    """A validation of more than MAX_STEPS steps."""


def _spend(steps: int) -> None:
    left = _steps.get()
    left[0] -= steps
    if left[0] < 0:
        raise _TooCostly


def _counted(keyword: _Keyword) -> _Keyword:
    def apply(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        steps = 1
        for part in (value, instance):
            if isinstance(part, (dict, list)):
                steps += len(part)
        if isinstance(instance, str):
            steps += len(instance) // 100
        _spend(steps)
        return keyword(validator, value, instance, schema)

    return apply


@cache
def _bounded(draft: Any) -> Any:
    """Return a draft's validator with every keyword counted, and with linear versions of the keywords that are not."""
    from jsonschema.validators import extend

    keywords = {}
    for name, keyword in draft.VALIDATORS.items():
        keywords[name] = _counted(_LINEAR.get(name, keyword))
    return extend(draft, keywords)


def _complaint(message: str) -> Any:
    from jsonschema import ValidationError

    return ValidationError(message)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(instance, str) and not linear_search(pattern)(instance):
        yield _complaint("does not match its pattern")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    for pattern, subschema in patterns.items():
        matches = linear_search(pattern)
        for key, value in instance.items():
            _spend(1 + len(key) // 100)
            if matches(key):
                yield from validator.descend(value, subschema, path=key)


def _additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    known = schema.get("properties", {})
    patterns = list(map(linear_search, schema.get("patternProperties", ())))
    for key, value in instance.items():
        if key in known:
            continue
        _spend(len(patterns) * (1 + len(key) // 100))
        if any(matches(key) for matches in patterns):
            continue
        if allowed is False:
            yield _complaint("has a key too many")  # so that the verdict names this keyword; `descend` would not
        else:
            yield from validator.descend(value, allowed, path=key)


def _unique_items(validator: Any, unique: bool, instance: Any, schema: Any) -> Iterator[Any]:
    if not unique or not isinstance(instance, list):
        return
    # The texts of two values are equal if JSON Schema holds the values equal: 1 and 1.0, but not 1 and true.
    if len({json.dumps(_normal(item), sort_keys=True) for item in instance}) < len(instance):
        yield _complaint("has equal items")


def _multiple_of(validator: Any, divisor: Any, instance: Any, schema: Any) -> Iterator[Any]:
    # On the decimal numbers as written: in binary, 19.99 is not a multiple of 0.01.
    is_number = isinstance(instance, (int, float)) and not isinstance(instance, bool)
    if is_number and (Fraction(repr(instance)) / Fraction(repr(divisor))).denominator != 1:
        yield _complaint("is not a multiple")


_LINEAR: Mapping[str, _Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
    "multipleOf": _multiple_of,
}


def _normal(value: Any) -> Any:
    _spend(1)
    if isinstance(value, str):
        _spend(len(value) // 100)
    if isinstance(value, dict):
        return {key: _normal(part) for key, part in value.items()}
    if isinstance(value, list):
        return list(map(_normal, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


class _Quiet:
    """Mixin of values with a short repr.

    jsonschema quotes the value in every error, also in those that `anyOf` discards. For a long value that is quadratic.
    """

    def __repr__(self) -> str:
        return "…"


class _QuietDict(_Quiet, dict):
    """Object with a short repr."""


class _QuietList(_Quiet, list):
    """Array with a short repr."""


class _QuietStr(_Quiet, str):
    """String with a short repr."""


def _quiet(value: Any) -> Any:
    if isinstance(value, dict):
        return _QuietDict({key: _quiet(part) for key, part in value.items()})
    if isinstance(value, list):
        return _QuietList(map(_quiet, value))
    return _QuietStr(value) if isinstance(value, str) else value


# --- Formats, each checked in linear time. Any other format is an annotation, as in the specification. ---

_EMAIL = re.compile(r"[^@\s]+@[^@\s.]+(?:\.[^@\s.]+)+")
_HOUR, _MINUTE = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_TIME = re.compile(rf"{_HOUR}:{_MINUTE}:(?:{_MINUTE}|60)(?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR}:{_MINUTE})")  # 60: leap second


def _is_email(value: Any) -> bool:
    return not isinstance(value, str) or (len(value) <= 254 and _EMAIL.fullmatch(value) is not None)


def _is_time(value: Any) -> bool:
    return not isinstance(value, str) or _TIME.fullmatch(value) is not None


def _is_date_time(value: Any) -> bool:
    if not isinstance(value, str):
        return True
    date.fromisoformat(value[:10])
    return value[4:5] == value[7:8] == "-" and value[10:11] in ("T", "t", " ") and _is_time(value[11:])


@cache
def _format_checker() -> Any:
    from jsonschema import FormatChecker

    checker = FormatChecker(("date", "ipv4", "ipv6", "uuid"))
    for name, check in (("email", _is_email), ("time", _is_time), ("date-time", _is_date_time)):
        checker.checks(name, raises=ValueError)(check)
    return checker


json_schema = JsonSchema()
