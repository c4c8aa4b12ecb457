"""JSON Schemas that are checked and compiled once, and that validate a value in bounded time.

jsonschema validates (the extra `grpo-rewards[json]`), but neither it nor jsonschema-rs bounds time or regular
expressions. Anything in it that could run for ever is replaced or rejected: patterns run on RE2 (the extra
`grpo-rewards[patterns]`), `uniqueItems` is linear, `multipleOf` is exact, references lead only into the schema itself,
and a validation ends after MAX_STEPS steps.

The alternative is the bare library in a forked child with limits of time and memory. It was measured and rejected.
jsonschema-rs in a child costs 84 microseconds per single call and 4.3 per completion in batches of 64; Python's
jsonschema in a child costs 24 and 11. This module costs 42 microseconds per completion, including finding the object in
the text. And a limit on wall-clock time makes the verdict depend on the machine, which a reward must not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import date
from fractions import Fraction
from functools import cache, lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from grpo_rewards.errors import UserError
from grpo_rewards.strict import PatternError, linear_search, parse_json

MAX_STEPS = 200_000
"""Number of steps of the longest validation, about a second.

A keyword applied to a value is one step, and one more for each entry of either.
"""

MAX_SCHEMA_DEPTH = 64
"""Number of arrays and objects of a schema that may be open at once."""


class CompiledSchema(NamedTuple):
    """Schema that passed the checks.

    Attributes:
        validator: validator of jsonschema, with bounded keywords.
        required: keys that the schema requires at the top level.
        properties: schemas of each key at the top level, all of which its value must fit.
    """

    validator: Any
    required: tuple[str, ...]
    properties: Mapping[str, Sequence[Any]]

    def faults(self, found: dict[str, Any]) -> tuple[Any, list[str]]:
        """Return the first error of an object and the required keys without a fitting value, or None and no keys.

        Raises:
            TooCostly: the validation takes more than MAX_STEPS steps.
        """
        _steps.set([MAX_STEPS])
        instance = _quiet(found)
        error = next(self.validator.iter_errors(instance), None)
        if error is None:
            return None, []
        return error, [key for key in self.required if key not in instance or not self._value_fits(key, instance[key])]

    def _value_fits(self, key: str, value: Any) -> bool:
        """Return True if a value fits the schemas of its key. A key without a schema takes any value."""
        validators = [self.validator.evolve(schema=schema) for schema in self.properties.get(key, ())]
        return all(next(validator.iter_errors(value), None) is None for validator in validators)


def json_text(value: Any) -> str | None:
    """Return the JSON of a mapping, or a text as it is. Return None for anything else."""
    if isinstance(value, Mapping):
        try:
            return json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            return None
    return value if isinstance(value, str) and value.strip() else None


@lru_cache(maxsize=256)
def usable_schema(text: str) -> CompiledSchema | str:
    """Return a schema ready to validate with, or a sentence on why it can't be used.

    Raises:
        UserError: jsonschema or google-re2 is not installed.
    """
    try:
        return compile_schema(text)
    except _SchemaError as error:
        return str(error)


class _SchemaError(UserError):
    """Schema that can't be used."""


def compile_schema(text: str) -> CompiledSchema:
    """Return a schema ready to validate with. Raise UserError if it can't be used, or jsonschema is not installed."""
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
    own = [schema["pattern"]] if "pattern" in schema else []
    for pattern in [*schema.get("patternProperties", ()), *own]:
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


class TooCostly(Exception):
    """Validation of more than MAX_STEPS steps."""


def _spend(steps: int) -> None:
    left = _steps.get()
    left[0] -= steps
    if left[0] < 0:
        raise TooCostly


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

    return extend(draft, {name: _counted(_LINEAR.get(name, check)) for name, check in draft.VALIDATORS.items()})


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
