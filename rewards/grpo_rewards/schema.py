"""One JSON object that fits a JSON Schema: found in a fence or a tag, read strictly, validated within bounds.

jsonschema does the validating (the extra `grpo-rewards[json]`). What could take for ever there is replaced or refused:
patterns run on RE2 (the extra `grpo-rewards[patterns]`), `uniqueItems` is linear and `multipleOf` exact, references lead
nowhere but into the schema itself, and a validation that takes more than MAX_STEPS steps ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import date
from fractions import Fraction
from functools import cache, lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any, ClassVar, NamedTuple

from grpo_rewards.completions import check_rows, completion_text, outside_thinking
from grpo_rewards.errors import UserError
from grpo_rewards.reward import BaseReward, Kind, LogColumn, TaggedReward, checked_number
from grpo_rewards.strict import PatternError, linear_search, parse_json

LAYOUTS = ("answer_tag", "fence", "whole", "auto")
# A step is a keyword applied to a value, and one more for each entry of either: about a second in all.
MAX_STEPS = 200_000
MAX_SCHEMA_DEPTH = 64

_DRAFTS = "4, 6, 7, 2019-09 and 2020-12"
_REFUSED = ("$dynamicRef", "$recursiveRef", "unevaluatedItems", "unevaluatedProperties")
_FENCE = re.compile(r" {0,3}(`{3,})[ \t]*([^\s`]*)[^`]*\Z")


@dataclass(frozen=True, kw_only=True)
class JsonSchema(TaggedReward):
    """One JSON object that fits a schema.

    | the completion holds | pay |
    |---|---|
    | one JSON object, and it fits the schema | 1 (`pay`) |
    | one JSON object that does not fit | 0.5 (`pay_partial`) times the share of required keys whose values fit |
    | no object, several of them, or something that is not JSON | 0 |
    | the schema of its row is missing or can't be used | None |

    The share is over the schema's own `required`, at the top level. A key that is there with a value that does not fit
    counts as missing; a schema without `required` has no share, so that what does not fit earns 0.

    Args:
        schema: a JSON Schema (draft 4, 6, 7, 2019-09 or 2020-12), as a mapping or as JSON; or None, for a dataset
            column with one per row.
        schema_column: that column. JSON strings are safest: Arrow fills the missing keys of mappings with nulls.
        extract: where the object stands outside the thinking: `answer_tag` (the only `<answer>` block, perhaps with a
            fence in it), `fence` (the only Markdown fence that is marked `json`, or unmarked and starts with `{`),
            `whole` (nothing else), or `auto`: the first of these that the completion uses; what starts with `{` is whole.
        pay_partial: less than `pay`.
        tags: the reasoning and the answer tag.
        prefilled: the reasoning tag, if the prompt already opens it.
        prefix: put before the logged column `verdict`, where two rewards log it.
        name: the reward's name in logs.

    Raises:
        ValueError: the schema can't be used, or a library that it needs is not installed.
    """

    kind: ClassVar[Kind] = "correctness"
    gold_forms: ClassVar[str] = "a row holds a JSON Schema, best as a string of JSON"

    schema: Mapping[str, Any] | str | None = None
    schema_column: str = "schema"
    extract: str = "auto"
    pay: float = 1.0
    pay_partial: float = 0.5
    name: str = "json_schema"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("pay", "pay_partial"):
            object.__setattr__(self, key, checked_number(getattr(self, key), key))
        if not 0 <= self.pay_partial < self.pay:
            raise ValueError(f"pay_partial must be from 0 to less than pay, {self.pay!r}, not {self.pay_partial!r}")
        if self.extract not in LAYOUTS:
            raise ValueError(f"extract must be one of {', '.join(LAYOUTS)}, not {self.extract!r}")
        if self.schema is not None:
            text = _schema_text(self.schema)
            if text is None:
                raise ValueError(f"schema must be a mapping or a string of JSON, not {self.schema!r}")
            compile_schema(text)
            # As a string, the reward stays hashable and can't change behind a caller's back.
            object.__setattr__(self, "schema", text)

    @property
    def highest_pay(self) -> float:
        """The most that a completion can earn."""
        return self.pay

    @property
    def columns_read(self) -> tuple[str, ...]:
        """The dataset columns that the reward needs: none where one schema serves every row."""
        return () if self.schema is not None else (self.schema_column,)

    def with_unit_pay(self) -> BaseReward | None:
        """Return this reward paying 1 or 0, without its name and prefix, or None if no completion earns anything."""
        return (
            replace(self, pay=1.0, pay_partial=0.0, prefix="", name=type(self).name) if self.highest_pay > 0 else None
        )

    def __call__(
        self,
        prompts: Any = None,
        completions: Sequence[Any] = (),
        *,
        log_extra: LogColumn = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Score each completion against `schema`, or against the schema in its row of `columns[schema_column]`.

        Raises:
            ValueError: there is neither, or the column is not a list with one entry per completion.
        """
        check_rows(self.name, completions=completions)
        schemas = [self.schema] * len(completions) if self.schema is not None else columns.get(self.schema_column)
        if schemas is None:
            raise ValueError(
                f"reward `{self.name}` needs the kwarg schema or the dataset column `{self.schema_column}` (its kwarg "
                f"schema_column); the batch has {', '.join(columns) or 'none'}"
            )
        check_rows(self.name, **{"completions": completions, self.schema_column: schemas})
        judged = [self._judge(completion_text(row), schema) for row, schema in zip(completions, schemas, strict=True)]
        verdicts = [verdict for verdict, _ in judged]
        self.log_column(log_extra, "verdict", verdicts)
        if log_metric is not None and verdicts:
            rows = len(verdicts)
            log_metric(f"rewards/{self.name}/fits", verdicts.count("fits") / rows)
            log_metric(
                f"rewards/{self.name}/parsed", sum(v.startswith(("fits", "does not fit")) for v in verdicts) / rows
            )
            log_metric(f"rewards/{self.name}/unscorable", float(sum(score is None for _, score in judged)))
        return [score for _, score in judged]

    def _judge(self, completion: str, schema: Any) -> tuple[str, float | None]:
        schema_text = _schema_text(schema)
        compiled = _compiled_or_problem(schema_text) if schema_text is not None else "no schema"
        if isinstance(compiled, str):
            return compiled, None
        text = outside_thinking(completion, self.tags[0], self.prefilled is not None)
        try:
            return self._validated(compiled, find_object(text, self.extract, self.tags[1]))
        except ValueError as error:
            return str(error), 0.0
        except (TooCostly, RecursionError):
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
        share = good / len(required) if required else 0.0
        where = "".join(f"[{part!r}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)[:80]
        keys = f"{good} of {len(required)} required keys do" + (f", not {', '.join(bad)[:80]}" if bad else "")
        return f"does not fit ({error.validator or 'false'} at ${where}), {keys}", self.pay_partial * share


def find_object(text: str, layout: str, tag: str) -> dict[str, Any]:
    """Return the one JSON object of a completion, thinking already removed.

    Args:
        text: the completion.
        layout: one of LAYOUTS.
        tag: the answer tag.

    Raises:
        ValueError: there is no object, more than one, or something else; the message says which.
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
        return _only(_fenced(body)) if body.startswith("```") and body.endswith("```") else body
    # An object may hold Markdown in a string.
    if layout == "fence" or (layout == "auto" and "```" in text and not text.lstrip().startswith("{")):
        return _only(_fenced(text))
    return text.strip()


def _only(blocks: Sequence[str]) -> str:
    if len(blocks) != 1:
        raise ValueError("several fences" if blocks else "no fence")
    return blocks[0]


def _fenced(text: str) -> list[str]:
    """The contents of the closed Markdown fences that are marked `json`, or unmarked and start with `{`."""
    blocks: list[str] = []
    marker, label, start = "", "", 0
    position = 0
    for line in text.split("\n"):
        end = position + len(line)
        fence = _FENCE.match(line)
        if fence and not marker:
            marker, label, start = fence[1], fence[2].lower(), end + 1
        elif fence and not fence[2] and len(fence[1]) >= len(marker):
            body = text[start:position].strip()
            if label == "json" or (not label and body.startswith("{")):
                blocks.append(body)
            marker = ""
        position = end + 1
    return blocks


class CompiledSchema(NamedTuple):
    """A schema that passed the checks: its validator, and the keys that it requires at the top level."""

    validator: Any
    required: tuple[str, ...]
    properties: Mapping[str, Any]

    def value_fits(self, key: str, value: Any) -> bool:
        """Whether a value fits what the schema says of its key; a key of which it says nothing takes any."""
        return key not in self.properties or _fits(self.validator.evolve(schema=self.properties[key]), value)


class TooCostly(Exception):
    """A validation took more than MAX_STEPS."""


def _schema_text(schema: Any) -> str | None:
    if isinstance(schema, Mapping):
        try:
            return json.dumps(schema)
        except (TypeError, ValueError, RecursionError):
            return None
    return schema if isinstance(schema, str) and schema.strip() else None


@lru_cache(maxsize=256)
def _compiled_or_problem(text: str) -> CompiledSchema | str:
    try:
        return compile_schema(text)
    except SchemaError as error:
        return str(error)


class SchemaError(UserError):
    """A schema that can't be used: one sentence that says why."""


def compile_schema(text: str) -> CompiledSchema:
    """Return a schema, given as JSON, ready to validate with.

    Raises:
        SchemaError: it is no schema of a known draft, refers outside itself, loops without reading on, has a pattern
            that RE2 does not take, or uses a keyword that is not supported.
        UserError: jsonschema is not installed.
    """
    try:
        from jsonschema import exceptions, validators
        from referencing import Registry
    except ImportError as error:
        raise UserError("json_schema needs jsonschema: pip install 'grpo-rewards[json]'") from error
    try:
        schema = parse_json(text, max_depth=MAX_SCHEMA_DEPTH)
    except ValueError as error:
        raise SchemaError(f"the schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise SchemaError("the schema is not a JSON object")
    dialect = schema.setdefault("$schema", validators.Draft202012Validator.META_SCHEMA["$schema"])
    known = validators.validator_for(schema, default=None) if isinstance(dialect, str) else None
    if known is None or known is validators.Draft3Validator:
        raise SchemaError(f"the schema's $schema must name one of the drafts {_DRAFTS}, not {dialect!r}")
    try:
        # Without a format checker: `format: regex` would run each pattern through Python's own `re`.
        known.check_schema(schema, format_checker=None)
    except exceptions.SchemaError as error:
        raise SchemaError(f"the schema is not valid: {error.message[:200]}") from error
    except RecursionError as error:
        raise SchemaError("the schema is nested too deeply") from error
    required, properties = _check_constructs(schema)
    # A registry of its own, without what jsonschema's default would fetch from the network.
    validator = _bounded(known)(schema, registry=Registry(), format_checker=_format_checker())
    return CompiledSchema(validator, required, properties)


def _check_constructs(root: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Refuse what could run for ever or leave the schema; return the root's required keys and properties."""
    from referencing import Registry, Resource

    resource = Resource.from_contents(root)
    resolver = Registry().resolver_with_root(resource)
    in_place: dict[int, set[int]] = {}  # by identity: which schemas a schema applies to the same value
    targets: dict[int, Any] = {}
    pending = [resource]
    while pending:
        resource = pending.pop()
        node = resource.contents
        if not isinstance(node, dict) or id(node) in in_place:
            continue
        if node is not root and resource.id() is not None:
            raise SchemaError("the schema holds a second schema with an $id of its own, which is not supported")
        for keyword in _REFUSED:
            if keyword in node:
                raise SchemaError(f"the schema uses {keyword}, which is not supported")
        _check_patterns(node)
        applied = list(_applied_in_place(node))
        if "$ref" in node:
            targets[id(node)] = _target(node["$ref"], resolver)
            applied.append(targets[id(node)])
            pending.append(Resource.from_contents(targets[id(node)], default_specification=resource._specification))
        in_place[id(node)] = {id(schema) for schema in applied}
        pending += resource.subresources()
    try:
        TopologicalSorter(in_place).prepare()
    except CycleError as error:
        raise SchemaError("the schema has a $ref that leads back to itself without reading on") from error
    required: dict[str, None] = {}
    properties: dict[str, Any] = {}
    part: Any = root
    while isinstance(part, dict):
        required |= dict.fromkeys(part.get("required", ()))
        properties = {**part.get("properties", {}), **properties}
        part = targets.get(id(part))
    return tuple(required), properties


def _check_patterns(schema: Mapping[str, Any]) -> None:
    patterns = [schema["pattern"]] if "pattern" in schema else []
    for pattern in [*patterns, *schema.get("patternProperties", ())]:
        try:
            linear_search(pattern)
        except PatternError as error:
            raise SchemaError(str(error)) from error


def _target(ref: str, resolver: Any) -> Any:
    from referencing.exceptions import Unresolvable

    if not ref.startswith("#"):
        raise SchemaError(f"the schema's $ref {ref!r} leads outside the schema, where nothing is ever fetched")
    try:
        return resolver.lookup(ref).contents
    except (Unresolvable, TypeError, ValueError) as error:
        raise SchemaError(f"the schema's $ref {ref!r} leads nowhere") from error


def _applied_in_place(schema: Mapping[str, Any]) -> Iterator[Any]:
    for keyword in ("allOf", "anyOf", "oneOf"):
        yield from schema.get(keyword, ())
    for keyword in ("not", "if", "then", "else"):
        if keyword in schema:
            yield schema[keyword]
    for keyword in ("dependentSchemas", "dependencies"):
        yield from schema.get(keyword, {}).values()


# Steps left to the validation that runs in this context.
_steps: ContextVar[list[int]] = ContextVar("steps")
_Keyword = Callable[[Any, Any, Any, Any], Any]


def _spend(steps: int) -> None:
    left = _steps.get()
    left[0] -= steps
    if left[0] < 0:
        raise TooCostly


def _counted(keyword: _Keyword) -> _Keyword:
    def apply(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        _spend(1 + sum(len(part) for part in (value, instance) if isinstance(part, (dict, list))))
        if isinstance(instance, str):
            _spend(len(instance) // 100)
        return keyword(validator, value, instance, schema)

    return apply


@cache
def _bounded(validator: Any) -> Any:
    """Return a draft's validator with every keyword counted, and linear keywords in the place of those that are not."""
    from jsonschema.validators import extend

    keywords = {**validator.VALIDATORS, **{name: word for name, word in _OURS.items() if name in validator.VALIDATORS}}
    return extend(validator, {name: _counted(keyword) for name, keyword in keywords.items()})


def _fits(validator: Any, instance: Any) -> bool:
    return next(validator.iter_errors(instance), None) is None


def _complaint(message: str) -> Any:
    from jsonschema import ValidationError

    return ValidationError(message)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(instance, str) and not linear_search(pattern)(instance):
        yield _complaint("does not match its pattern")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    for pattern, subschema in patterns.items() if isinstance(instance, dict) else ():
        matches = linear_search(pattern)
        for key, value in instance.items():
            _spend(1 + len(key) // 100)
            if matches(key):
                yield from validator.descend(value, subschema, path=key)


def _additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    patterns = [linear_search(pattern) for pattern in schema.get("patternProperties", ())]
    for key in instance.keys() - schema.get("properties", {}).keys():
        _spend(len(patterns) * (1 + len(key) // 100))
        if any(matches(key) for matches in patterns):
            continue
        if allowed is False:
            yield _complaint("has a key too many")  # named, where `descend` would only say False
        else:
            yield from validator.descend(instance[key], allowed, path=key)


def _unique_items(validator: Any, unique: bool, instance: Any, schema: Any) -> Iterator[Any]:
    if unique and isinstance(instance, list) and len(set(map(_canonical, instance))) < len(instance):
        yield _complaint("has equal items")


def _multiple_of(validator: Any, divisor: Any, instance: Any, schema: Any) -> Iterator[Any]:
    # On the decimal numbers that were written: in binary, 19.99 is no multiple of 0.01.
    number = isinstance(instance, (int, float)) and not isinstance(instance, bool)
    if number and (Fraction(repr(instance)) / Fraction(repr(divisor))).denominator != 1:
        yield _complaint("is not a multiple")


_OURS: Mapping[str, _Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
    "multipleOf": _multiple_of,
}


def _canonical(value: Any) -> str:
    """Return a string that two JSON values share exactly if JSON Schema holds them equal: 1 and 1.0, not 1 and true."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    _spend(1 + (len(value) // 100 if isinstance(value, str) else 0))
    if isinstance(value, dict):
        return {key: _normal(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_normal(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


# jsonschema quotes the value in every error, also in those that `anyOf` discards: at length, that is quadratic.
class _QuietDict(dict):
    def __repr__(self) -> str:
        return "{…}"


class _QuietList(list):
    def __repr__(self) -> str:
        return "[…]"


class _QuietStr(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return '"…"'


def _quiet(value: Any) -> Any:
    if isinstance(value, dict):
        return _QuietDict({key: _quiet(part) for key, part in value.items()})
    if isinstance(value, list):
        return _QuietList(map(_quiet, value))
    return _QuietStr(value) if isinstance(value, str) else value


_EMAIL = re.compile(r"[^@\s]+@[^@\s.]+(?:\.[^@\s.]+)+")
_TIME = re.compile(r"([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.[0-9]+)?(?:[Zz]|[+-]([0-9]{2}):([0-9]{2}))")
_TIME_LIMITS = (23, 59, 60, 23, 59)  # 60: a leap second


def _is_email(value: Any) -> bool:
    return not isinstance(value, str) or (len(value) <= 254 and _EMAIL.fullmatch(value) is not None)


def _is_time(value: Any) -> bool:
    if not isinstance(value, str):
        return True
    match = _TIME.fullmatch(value)
    return match is not None and all(
        int(part or 0) <= limit for part, limit in zip(match.groups(), _TIME_LIMITS, strict=True)
    )


def _is_date_time(value: Any) -> bool:
    if not isinstance(value, str):
        return True
    date.fromisoformat(value[:10])
    return value[4:5] == value[7:8] == "-" and value[10:11] in ("T", "t", " ") and _is_time(value[11:])


@cache
def _format_checker() -> Any:
    """The formats that are checked, each in linear time; any other one is an annotation, as in the specification."""
    from jsonschema import FormatChecker

    checker = FormatChecker(("date", "ipv4", "ipv6", "uuid"))
    for name, check in (("email", _is_email), ("time", _is_time), ("date-time", _is_date_time)):
        checker.checks(name, raises=ValueError)(check)
    return checker


json_schema = JsonSchema()
