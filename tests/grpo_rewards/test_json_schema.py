"""The reward for one JSON object that fits a schema: pay, traps, an independent oracle, and bounds."""

import asyncio
import json
import math
import pickle
import random
import re
import string
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_rewards import schema as schemas
from grpo_rewards.registry import RewardSpecError, build_rewards
from grpo_rewards.schema import JsonSchema
from grpo_rewards.strict import MAX_CHARS, MAX_DEPTH
from tests.support.growth import growth, growth_of_steps

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("re2")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0},
        "mail": {"type": "string", "format": "email"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANN = '{"name": "Ann", "age": 30}'


def score(text, schema=PERSON, **arguments):
    columns = {}
    (result,) = JsonSchema(schema=schema, **arguments)(completions=[text], log_extra=columns.__setitem__)
    return result, columns["verdict"][0]


def fenced(text, label="json"):
    return f"```{label}\n{text}\n```"


PARTS = {
    "last": {"required": ["c"], "properties": {"c": {"type": "integer"}, "a": {"minimum": 5}}},
    "first": {"$ref": "#/PLACE/last", "required": ["b"], "properties": {"b": {"type": "integer"}}},
}


@pytest.mark.parametrize("draft", ["draft-04", "draft-06", "draft-07", "2019-09", "2020-12"])
@pytest.mark.parametrize(
    ("found", "fit", "fit_last"),
    [
        # Keys whose values fit, of all that any schema on the way requires, and of those that the last one requires.
        ({"a": 7, "b": 1, "c": 1}, "abc", "c"),
        ({"a": 3, "b": 1, "c": 1}, "bc", "c"),  # too small for the last schema, and an integer as the root asks
        ({"a": "x", "b": 1, "c": 1}, "bc", "c"),  # no integer, and no number that could be too small
        ({"a": 7, "b": 1, "c": "x"}, "ab", ""),
        ({"a": 7, "c": 1}, "ac", "c"),
        ({"b": "x"}, "", ""),
    ],
)
def test_the_share_is_of_the_keys_that_the_root_and_what_it_refers_to_require(
    draft: str, found: dict, fit: str, fit_last: str
) -> None:
    """Drafts before 2019-09 ignore what stands beside a `$ref`, so that the last schema alone counts."""
    is_new = draft.startswith("20")
    uri = f"https://json-schema.org/draft/{draft}/schema" if is_new else f"http://json-schema.org/{draft}/schema#"
    place = "$defs" if is_new else "definitions"
    root = {"$schema": uri, "$ref": "#/PLACE/first", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    schema = json.loads(json.dumps({**root, "PLACE": PARTS}).replace("PLACE", place))
    fits = jsonschema.validators.validator_for(schema)(schema).is_valid(found)
    share = len(fit) / 3 if is_new else len(fit_last)
    result, verdict = score(json.dumps(found), schema)
    assert result == pytest.approx(1.0 if fits else 0.5 * share), verdict


@pytest.mark.parametrize("text", [f"<answer>{ANN}</answer>x</answer>", f"<answer>{ANN}</answer><answer>{ANN}</answer>"])
def test_a_second_tag_is_a_second_answer(text: str) -> None:
    assert score(text) == (0.0, "several answer blocks")


def test_a_required_key_without_a_schema_takes_any_value() -> None:
    schema = {"required": ["a", "c"], "properties": {"b": {"type": "integer"}}}
    assert score('{"a": [], "c": null, "b": "x"}', schema)[0] == 0.5
    assert score('{"a": [], "b": "x"}', schema)[0] == 0.25


def test_the_golds_values_in_an_object_that_does_not_fit_earn_a_part() -> None:
    reward = JsonSchema(schema=PERSON, gold_column="gold")
    gold, found = {"name": "Ann", "age": -3}, '{"age": -3, "name": "ann"}'
    assert reward(completions=[found, found.replace("ann", "Bob")], gold=[gold, gold]) == [0.5, 0.25]


REFERS_BACK = [
    *({keyword: [{}, {"$ref": "#"}]} for keyword in ("allOf", "anyOf", "oneOf")),
    *({keyword: {"$ref": "#"}} for keyword in ("not", "if", "then", "else")),
    {"dependentSchemas": {"a": {"$ref": "#"}}},
    {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": {"$ref": "#"}}},
    {"not": {"$ref": "#/own/a"}, "own": {"a": {"if": {"$ref": "#"}}}},
]


@pytest.mark.parametrize("schema", REFERS_BACK, ids=json.dumps)
def test_a_schema_that_applies_itself_to_the_same_value_is_refused(schema: dict) -> None:
    with pytest.raises(ValueError, match="a \\$ref that leads back to itself without reading on"):
        JsonSchema(schema=schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#/own/a", "own": {"a": {"pattern": "(?=a)"}}}, "(?=a)"),  # in a place where no draft has schemas
        ({"$ref": "#/own/a", "own": {"a": {"patternProperties": {"(?=a)": {}}}}}, "(?=a)"),
        ({"$schema": "https://json-schema.org/draft/2019-09/schema", "$recursiveRef": "#"}, "uses $recursiveRef"),
        ({"properties": {"a": {"$dynamicRef": "#"}}}, "uses $dynamicRef"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "must name one of the drafts"),
        ({"$defs": {"a": {"$id": "https://example.org/a"}}}, "an $id of its own"),
    ],
)
def test_a_construct_without_bounds_is_refused_wherever_a_reference_leads(schema: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        JsonSchema(schema=schema)


PAID = {
    "a fence": fenced(ANN),
    "a fence without a label": fenced(ANN, ""),
    "a fence of four": f"````json\n{ANN}\n````",
    "a fence in capitals": fenced(ANN, "JSON"),
    "prose around a fence": f"Here it is:\n\n{fenced(ANN)}\nAnything else?",
    "another language's fence beside it": f"{fenced('ls', 'sh')}\n{fenced(ANN)}",
    "a shorter fence inside a longer one": "<think>a</think>\n````\n```json\n```\n````\n" + fenced(ANN),
    "a fence of output, unmarked, beside it": f"{fenced('total 0', '')}\n{fenced(ANN)}",
    "before a thinking block that never closes": f"{fenced(ANN)}\n<think>\n{fenced('{}')}",
    "an indented fence": f"  ```json\n  {ANN}\n  ```",
    "a tag": f"<answer>{ANN}</answer>",
    "a fence in a tag": f"<answer>\n{fenced(ANN)}\n</answer>",
    "nothing but the object": f"\n{ANN}\n",
    "behind the thinking": f"<think>{{}} or {fenced('{}')}?</think>\n{ANN}",
    "in several lines": fenced(json.dumps(json.loads(ANN), indent=2)),
    "braces in a string": fenced('{"name": "}{", "age": 1}'),
    "brackets in a string": fenced('{"name": "\\"' + "[" * 40 + '", "age": 1}'),
    "zero, in full": fenced('{"name": "Ann", "age": -0.00e-400}'),
    "a fence in a string": '{"name": "```json\\n{}\\n```", "age": 1}',
    "escapes": fenced('{"name": "\\u0041\\"\\n", "age": 1}'),
    "an integral float, an integer to JSON Schema": fenced('{"name": "Ann", "age": 30.0}'),
}


@pytest.mark.parametrize("kind", PAID)
def test_an_object_that_fits_is_paid_in_full(kind):
    assert score(PAID[kind]) == (1.0, "fits")


@pytest.mark.parametrize(
    ("text", "pay", "verdict"),
    [
        (fenced(ANN), 1.0, "fits"),
        (
            fenced('{"name": "Ann", "age": -1}'),
            0.25,
            "does not fit (minimum at $.age), 1 of 2 required keys do, not age",
        ),
        (fenced('{"name": "Ann"}'), 0.25, "does not fit (required at $), 1 of 2 required keys do, not age"),
        (fenced('{"name": ["x"], "age": 1}'), 0.25, "does not fit (type at $.name), 1 of 2 required keys do, not name"),
        (
            fenced('{"name": "Ann", "age": 1, "x": 1}'),
            0.5,
            "does not fit (additionalProperties at $), 2 of 2 required keys do",
        ),
        (fenced("{}"), 0.0, "does not fit (required at $), 0 of 2 required keys do, not name, age"),
        (fenced(ANN) * 2, 0.0, "several fences"),
        ("", 0.0, "not JSON: Expecting value: line 1 column 1 (char 0)"),
        (fenced("[]"), 0.0, "not an object"),
    ],
)
def test_a_completion_earns_the_pay_of_the_table(text, pay, verdict):
    text = text.replace("``````", "```\n```")
    assert score(text) == (pay, verdict)


def test_the_pays_are_arguments():
    assert score(fenced(ANN), pay=3)[0] == 3.0
    assert score(fenced('{"name": "Ann"}'), pay=3, pay_partial=1)[0] == 0.5
    assert score(fenced('{"name": "Ann"}'), pay_partial=0)[0] == 0.0
    reward = JsonSchema(schema=PERSON, pay=3)
    assert (reward.highest_pay, reward.kind, reward.__name__) == (3.0, "correctness", "json_schema")


# Completions that a naive reward pays for.
TRAPS = {
    "two objects in two fences": fenced(ANN) + "\n" + fenced('{"name": "Bob", "age": 2}'),
    "the same object twice": fenced(ANN) + "\n" + fenced(ANN),
    "two objects in one fence": fenced(ANN + "\n" + ANN),
    "two answer blocks": f"<answer>{ANN}</answer><answer>{ANN}</answer>",
    "an object inside the thinking only": f"<think>{fenced(ANN)}</think>",
    "an object in a thinking block that never closes": f"<think>{fenced(ANN)}",
    "a fence that never closes": f"```json\n{ANN}",
    "a tag that never closes": f"<answer>{ANN}",
    "a closing tag before the opening one": f"</answer>{ANN}<answer>",
    "prose before a bare object": f"Here it is: {ANN}",
    "prose after a bare object": f"{ANN} is it",
    "prose inside the tag": f"<answer>I say {ANN}</answer>",
    "a comment": fenced('{"name": "Ann", "age": 30 /* about */}'),
    "a trailing comma": fenced('{"name": "Ann", "age": 30,}'),
    "single quotes": fenced("{'name': 'Ann', 'age': 30}"),
    "Python's True": fenced('{"name": "Ann", "age": True}'),
    "a key that occurs twice": fenced('{"name": "Ann", "age": -1, "age": 30}'),
    "NaN": fenced('{"name": "Ann", "age": NaN}'),
    "Infinity": fenced('{"name": "Ann", "age": Infinity}'),
    "a float beyond double precision": fenced('{"name": "Ann", "age": 1e999}'),
    "a float that is 0 to double precision": fenced('{"name": "Ann", "age": 1e-400}'),
    "an object before the fence": ANN + "\n" + fenced(ANN),
    "a number of 301 digits": fenced('{"name": "Ann", "age": ' + "9" * 301 + "}"),
    "a byte order mark": "\ufeff" + ANN,
    "a line break in a string": fenced('{"name": "An\nn", "age": 30}'),
    "a list around the object": fenced(f"[{ANN}]"),
    "a string that holds the object": fenced(json.dumps(ANN)),
    "a fence of YAML": fenced(ANN, "yaml"),
    "an object beside the fence in the tag": f"<answer>{fenced(ANN)}{ANN}</answer>",
    "the schema itself": fenced(json.dumps(PERSON)),
    "null": fenced("null"),
}


@pytest.mark.parametrize("kind", TRAPS)
def test_a_trap_earns_nothing(kind):
    assert score(TRAPS[kind])[0] == 0.0, score(TRAPS[kind])


# A schema, a value that fits it, and one that only seems to. Some validators and shortcuts get these wrong.
SUBTLE = {
    "true is not 1": ({"enum": [1]}, 1.0, True),
    "false is not 0": ({"const": 0}, 0, False),
    "a boolean is no integer": ({"type": "integer"}, 0, False),
    "decimal multiples": ({"multipleOf": 0.01}, 19.99, 19.995),
    "large multiples": ({"multipleOf": 0.01}, 10**299, 1e-300),
    "equal items": ({"uniqueItems": True}, [1, True, "1"], [1, 1.0]),
    "equal objects, keys in another order": (
        {"uniqueItems": True}, [{"a": 1}, {"a": 2}], [{"a": 1, "b": 2}, {"b": 2, "a": 1}]),
    "a pattern is a search": ({"pattern": "b+"}, "abc", "ac"),
    "a pattern's \\d is ASCII": ({"pattern": "^\\d+$"}, "12", "١٢"),
    "a pattern's $ is the end": ({"pattern": "^a$"}, "a", "a\n"),
    "an address": ({"format": "email"}, "a@b.org", "a@"),
    "a date": ({"format": "date"}, "2024-02-29", "2023-02-29"),
    "a date and time": ({"format": "date-time"}, "2024-02-29T23:59:60Z", "2024-02-29 25:00:00Z"),
    "a date and time without a zone": ({"format": "date-time"}, "2024-02-29T23:59:59+01:00", "2024-02-29T23:59:59"),
    "a UUID": ({"format": "uuid"}, "f81d4fae-7dec-11d0-a765-00a0c91e6bf6", "f81d4fae7dec11d0a76500a0c91e6bf6x"),
    "an IP address": ({"format": "ipv4"}, "127.0.0.1", "127.0.0.256"),
    "length in characters": ({"maxLength": 1}, "🙂", "ab"),
    "null is not missing": ({"type": "string"}, "", None),
    "one of two": ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, 4, 6),
    "not": ({"not": {"type": "string"}}, 4, "4"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SUBTLE)
def test_a_value_that_fits_and_one_that_only_seems_to(kind):
    part, good, bad = SUBTLE[kind]
    schema = {"properties": {"v": part}, "required": ["v"]}
    assert score(json.dumps({"v": good}), schema)[0] == 1.0
    assert score(json.dumps({"v": bad}), schema)[0] == 0.0


def test_patterns_of_keys_are_searched():
    schema = {"patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    assert score('{"x-a": 1, "b": "c"}', schema)[0] == 1.0
    assert score('{"x-a": "1"}', schema)[0] == 0.0
    assert score('{"b": 1}', schema)[0] == 0.0


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"$ref": "https://example.org/person"}, "nothing is ever fetched"),
        ({"properties": {"a": {"$ref": "other.json#/a"}}}, "nothing is ever fetched"),
        ({"$ref": "file:///etc/passwd"}, "nothing is ever fetched"),
        ({"$ref": "#"}, "back to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"not": {"$ref": "#/$defs/a"}}}},
         "back to itself"),
        ({"$ref": "#/$defs/missing"}, "leads nowhere"),
        ({"items": {"pattern": "(a)\\1"}}, "not one for RE2"),
        ({"patternProperties": {"(?=a)": {}}}, "not one for RE2"),
        ({"$dynamicRef": "#node"}, "not supported"),
        ({"unevaluatedProperties": False}, "not supported"),
        ({"properties": {"a": {"$id": "b"}}}, "not supported"),
        ({"$schema": "https://example.org/my-draft"}, r"\$schema"),
        ({"type": "strnig"}, "not valid"),
        ({"required": "name"}, "not valid"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        (3, "mapping or a string"),
        ("[" * 100 + "]" * 100, "nested deeper"),
    ],
)  # fmt: skip
def test_an_unusable_schema_is_refused_as_a_kwarg_and_none_in_a_column(schema, problem):
    with pytest.raises(RewardSpecError, match=f"reward `json_schema`: .*{problem}"):
        build_rewards([{"name": "json_schema", "kwargs": {"schema": schema}}])
    metrics = {}
    scores = JsonSchema()(completions=[ANN, ANN], schema=[schema, {}], log_metric=metrics.__setitem__)
    assert scores == [None, 1.0]
    assert metrics["rewards/json_schema/unscorable"] == 1.0


def test_a_recursive_schema_reads_trees():
    tree = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "required": ["v"],
                "properties": {
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
            }
        },
    }
    deep = {"v": 0, "next": None}
    for value in range(MAX_DEPTH - 2):
        deep = {"v": value, "next": deep}
    assert score(json.dumps(deep), tree)[0] == 1.0
    assert score('{"v": 1, "next": {"v": "2"}}', tree) == (
        0.5,
        "does not fit (anyOf at $.next), 1 of 1 required keys do",
    )
    for _ in range(2):
        deep = {"v": 1, "next": deep}
    assert score(json.dumps(deep), tree) == (0.0, f"not JSON: nested deeper than {MAX_DEPTH}")


def test_a_column_holds_schemas_as_strings_or_mappings():
    schemas = [json.dumps(PERSON), PERSON, None, ""]
    assert JsonSchema()(completions=[ANN] * 4, schema=schemas) == [1.0, 1.0, None, None]
    circular = {"type": "object"}
    circular["properties"] = circular
    assert JsonSchema()(completions=[ANN] * 2, schema=[circular, {"type": {"object"}}]) == [None, None]
    assert JsonSchema(schema_column="form")(completions=[ANN], form=[PERSON], schema=["no"]) == [1.0]
    with pytest.raises(ValueError, match="the kwarg schema or the dataset column `schema`"):
        JsonSchema()(completions=[ANN], answer=["x"])


def test_a_bad_argument_is_named():
    for arguments, message in (
        ({"pay_partial": 1}, "pay_partial must be less than pay"),
        ({"extract": "box"}, "extract must be one of"),
        ({"prefilled": "answer"}, "prefilled must be null or the first tag"),
    ):
        with pytest.raises(ValueError, match=message):
            JsonSchema(**arguments)
    assert score(f"thought</think>{ANN}", prefilled="think")[0] == 1.0
    assert score(ANN, prefilled="think")[0] == 0.0


# --- an independent generator, and jsonschema's own validator as the oracle

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "größe", "🙂", "x y", 'quo"te', "back\\slash"]


def a_value(rng, depth=0):
    """Return a schema and a value that fits it."""
    kind = rng.choice(
        ["string", "pattern", "integer", "number", "boolean", "enum", "null", "date"]
        + ["array", "object", "either"] * (depth < 3)
    )
    if kind == "string":
        text = rng.choice(WORDS)
        return {"type": "string", "minLength": 1, "maxLength": len(text)}, text
    if kind == "pattern":
        text = "".join(rng.choices(string.ascii_uppercase, k=3)) + str(rng.randrange(1000))
        return {"type": "string", "pattern": "^[A-Z]{3}[0-9]+$"}, text
    if kind == "integer":
        number = rng.randrange(-(10**6), 10**12)
        return {"type": "integer", "minimum": number - rng.randrange(3), "maximum": number}, number
    if kind == "number":
        cents = rng.randrange(10**7)
        return {"type": "number", "multipleOf": 0.01, "exclusiveMaximum": cents / 100 + 1}, cents / 100
    if kind == "boolean":
        return {"type": "boolean"}, rng.random() < 0.5
    if kind == "enum":
        values = rng.sample([*WORDS, 1, 2.5, True, None], 3)
        return {"enum": values}, rng.choice(values)
    if kind == "null":
        return {"type": ["null", "string"]}, None
    if kind == "date":
        return {
            "type": "string",
            "format": "date",
        }, f"{rng.randrange(1900, 2100)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
    if kind == "array":
        schema, value = a_value(rng, depth + 1)
        size = rng.randrange(4)
        return {"type": "array", "items": schema, "minItems": size, "maxItems": size}, [value] * size
    if kind == "either":
        schema, value = a_value(rng, depth + 1)
        return {"anyOf": [{"type": "array", "minItems": 99}, schema]}, value
    return an_object(rng, depth + 1)


def an_object(rng, depth=0):
    keys = rng.sample(WORDS, rng.randrange(1, 6))
    parts = {key: a_value(rng, depth) for key in keys}
    required = rng.sample(keys, rng.randrange(1, len(keys) + 1))
    kept = [key for key in keys if key in required or rng.random() < 0.5]
    rng.shuffle(kept)
    schema = {
        "type": "object",
        "properties": {key: schema for key, (schema, _) in parts.items()},
        "required": required,
        "additionalProperties": False,
    }
    return schema, {key: parts[key][1] for key in kept}


def written(rng, value):
    text = json.dumps(value, indent=rng.choice([None, 2, "\t"]), ensure_ascii=rng.random() < 0.5)
    layout = rng.choice(
        ["{}", "```json\n{}\n```", "```\n{}\n```", "Sure!\n\n```json\n{}\n```\nDone.", "<answer>\n{}\n</answer>"]
    )
    thinking = rng.choice(["", "<think>\nLet me see: {}\n</think>\n"])
    return thinking + layout.replace("{}", text)


def mutated(rng, value):
    value = dict(value)
    key = rng.choice([*value, "extra"])
    if rng.random() < 0.4 and key in value:
        del value[key]
    else:
        value[key] = rng.choice([[], {}, "zzzzzzzzzzzzzzzz", -(10**9), None, 0.001, True])
    return value


# jsonschema alone takes 10 ms for a schema and its value, so the quick part has few rows.
few_and_many = pytest.mark.parametrize("rows", [60, pytest.param(600, marks=pytest.mark.slow)])


@few_and_many
def test_right_answers_are_accepted_and_wrong_ones_as_the_oracle_says(rows):
    rng = random.Random(5)
    right = wrong = 0
    for _ in range(rows):
        schema, value = an_object(rng)
        right += score(written(rng, value), schema)[0] == 1.0
        other = mutated(rng, value)
        # The oracle reads decimals as binary floats. Without that keyword the two must agree.
        plain = json.loads(json.dumps(schema).replace('"multipleOf": 0.01, ', ""))
        checker = jsonschema.FormatChecker(("date",))
        fits = jsonschema.Draft202012Validator(plain, format_checker=checker).is_valid(other)
        paid = score(written(rng, other), plain)[0]
        assert (paid == 1.0) == fits, (plain, other)
        wrong += not fits
    assert right == rows
    assert wrong > rows / 3


@few_and_many
def test_partial_pay_agrees_with_the_oracle_key_by_key(rows):
    rng = random.Random(6)
    seen = set()
    for _ in range(rows):
        schema, value = an_object(rng)
        schema = json.loads(json.dumps(schema).replace('"multipleOf": 0.01, ', ""))
        other = mutated(rng, mutated(rng, value))
        if score(json.dumps(other), schema)[0] == 1.0:
            continue
        checker = jsonschema.FormatChecker(("date",))
        good = [
            key in other
            and jsonschema.Draft202012Validator(schema["properties"][key], format_checker=checker).is_valid(other[key])
            for key in schema["required"]
        ]
        expected = 0.5 * sum(good) / len(good)
        assert score(json.dumps(other), schema)[0] == pytest.approx(expected)
        seen.add(expected)
    assert len(seen) > 5


# --- any text


REWARDS = [
    JsonSchema(schema=PERSON),
    JsonSchema(schema=PERSON, extract="whole"),
    JsonSchema(schema=PERSON, extract="fence"),
    JsonSchema(schema={"uniqueItems": True, "properties": {"a": {"pattern": "(a|a)*$", "multipleOf": 0.1}},
                       "additionalProperties": {"$ref": "#"}}),
]  # fmt: skip
PIECES = r"""
    <think> </think> <answer> </answer> ``` ```json { } [ ] " : , \ \" \u0041 \ud800
    "name": "age": "a": 1 -0 1e9 1E400 NaN true null "Ann" ,
"""
SOUP = st.lists(st.sampled_from([*PIECES.split(), "\n", " ", "\x00", "\ud800", "🙂"]), max_size=30).map("".join)
TEXTS = st.one_of(
    SOUP, st.text(st.characters()), SOUP.map(fenced), SOUP.map('{{"name": "{}", "age": 1}}'.format),
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
                 lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)
    .map(lambda value: json.dumps({"a": value, "name": value})),
)  # fmt: skip


def check_any_text(text):
    for reward in REWARDS:
        (first,) = reward(completions=[text])
        assert 0.0 <= first <= reward.highest_pay
        assert math.isfinite(first)
        assert reward(completions=[[{"role": "assistant", "content": text}]]) == [first]


test_any_text = settings(max_examples=100, deadline=None)(given(TEXTS)(check_any_text))
test_any_text_at_length = pytest.mark.nightly(
    pytest.mark.timeout(1800)(settings(max_examples=20_000, deadline=None)(given(TEXTS)(check_any_text)))
)

TWICE = {
    "$ref": "#/$defs/n",
    "$defs": {
        "n": {"anyOf": [{"properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["b"]},
                        {"properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["c"]}]},
    },
}  # fmt: skip
# A schema, and a text of about that many characters.
ADVERSARIAL = {
    "opening brackets": (PERSON, lambda n: "[" * n),
    "opening braces in a fence": (PERSON, lambda n: fenced('{"a":' * (n // 5))),
    "nested objects": (PERSON, lambda n: '{"a":' * (n // 6) + "1" + "}" * (n // 6)),
    "quotes": (PERSON, lambda n: '"' * n),
    "escapes": (PERSON, lambda n: '"' + "\\" * n),
    "fences": (PERSON, lambda n: "```json\n" * (n // 8)),
    "backticks": (PERSON, lambda n: "`" * n),
    "closed fences": (PERSON, lambda n: "```json\n{}\n```\n" * (n // 15)),
    "openings": (PERSON, lambda n: "<answer>" * (n // 8)),
    "thoughts": (PERSON, lambda n: "<think>" * (n // 7)),
    "digits": (PERSON, lambda n: '{"age": ' + "9" * n + "}"),
    "keys": (PERSON, lambda n: "{" + ",".join(f'"k{i}":1' for i in range(n // 9)) + "}"),
    "the same key": (PERSON, lambda n: "{" + ",".join(['"k":1'] * (n // 6)) + "}"),
    "many items, all different": (
        {"properties": {"a": {"uniqueItems": True}}},
        lambda n: json.dumps({"a": [[i, {"b": i}] for i in range(n // 20)]}),
    ),
    "items that can't be sorted": (
        {"properties": {"a": {"uniqueItems": True}}},
        lambda n: json.dumps({"a": [{"b": i} if i % 2 else str(i) for i in range(n // 10)]}),
    ),
    "a pattern that backtracks": (
        {"properties": {"a": {"pattern": "^(a+)+$"}}}, lambda n: json.dumps({"a": "a" * n + "!"})),
    "a pattern of keys that backtracks": (
        {"patternProperties": {"^(a|a)*$": {}}, "additionalProperties": False},
        lambda n: json.dumps({"a" * n + "!": 1})),
    "an error for each of two branches": (
        {"properties": {"a": {"anyOf": [{"items": {"type": "string"}}, {"items": {"type": "boolean"}}]}}},
        lambda n: json.dumps({"a": [0] * (n // 3)})),
    "a large value, quoted in errors": (
        {"properties": {"a": {"anyOf": [{"type": "integer"}] * 50}}}, lambda n: json.dumps({"a": ["b" * n]})),
    "an address": ({"properties": {"a": {"format": "email"}}}, lambda n: json.dumps({"a": "a@" + "a." * (n // 2)})),
    "an IPv6 address": ({"properties": {"a": {"format": "ipv6"}}}, lambda n: json.dumps({"a": "1:" * (n // 2)})),
    "twice as much at each level": (TWICE, lambda n: '{"a":' * 30 + '{"x": "' + "y" * n + '"}' + "}" * 30),
}  # fmt: skip


# These take seconds each, and their times are not comparable beside other processes: nightly.
COSTLY = {"twice as much at each level", "an error for each of two branches"}


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.nightly) if kind in COSTLY else kind for kind in ADVERSARIAL]
)
def test_the_cost_of_an_adversarial_text_is_linear_or_flat(kind):
    schema, make = ADVERSARIAL[kind]
    reward = JsonSchema(schema=schema)
    call = lambda text: reward(completions=[text])  # noqa: E731
    assert growth_of_steps(call, make, 5_000) < 9  # 4 is linear, 16 quadratic
    assert growth(call, make, 20_000) < 9


@pytest.mark.slow
def test_a_validation_that_doubles_with_each_level_ends():
    assert score('{"a":' * 30 + "1" + "}" * 30, TWICE) == (0.0, "too costly to validate")
    assert score('{"a":' * 4 + '{"b":1,"c":1}' + "}" * 4, TWICE)[1].startswith("does not fit")
    assert score('{"x": "' + "y" * MAX_CHARS + '"}', {})[1].startswith("not JSON: longer than")


def test_errors_about_a_large_value_do_not_cost_more():
    # Each of some 500 errors would otherwise quote the whole value.
    reward = JsonSchema(schema=TWICE)
    assert growth(lambda n: reward(completions=['{"a":' * 7 + '{"x": "' + "y" * n + '"}' + "}" * 7]), int, 24_000) < 1.6


def test_scores_are_the_same_in_threads_processes_and_coroutines():
    reward = JsonSchema(schema=PERSON)
    assert pickle.loads(pickle.dumps(reward)) == reward
    assert hash(reward) == hash(JsonSchema(schema=dict(PERSON)))
    texts = [*PAID.values(), *TRAPS.values(), *(make(3000) for _, make in ADVERSARIAL.values())]
    expected = reward(completions=texts)

    async def in_a_coroutine():
        return reward(completions=texts)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: reward(completions=texts), range(4))) == [expected] * 4
    with ProcessPoolExecutor(2) as pool:
        assert pool.submit(reward, None, texts).result() == expected
    assert asyncio.run(in_a_coroutine()) == expected


def test_nothing_is_imported_before_it_is_needed():
    import subprocess
    import sys

    code = (
        "import sys, grpo_rewards; assert 'grpo_rewards.schema' not in sys.modules;"
        "grpo_rewards.json_schema; assert grpo_rewards.json_schema.__name__ == 'json_schema';"
        "assert not {'jsonschema', 're2', 'referencing'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- Values against a gold ---

GOLD = {"name": "Ann", "age": 30, "mail": None}


def score_against(text, gold, schema=PERSON):
    (result,) = JsonSchema(schema=schema, gold_column="answer")(completions=[text], answer=[gold])
    return result


@pytest.mark.parametrize("gold", [GOLD, json.dumps(GOLD)], ids=["mapping", "text"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ANN, 1.0),
        ('{"age": 30.0, "name": " ann"}', 1.0),
        ('{"name": "Bob", "age": 30}', 0.25),
        ('{"name": "Ann"}', 0.25),
        ('{"name": "Ann", "age": 30, "mail": "a@b.c"}', 0.5 * 2 / 3),
        ('{"name": "Ann", "age": 30, "guess": 1}', 0.5 * 2 / 3),
        ('{"name": "Ann", "age": true}', 0.25),
        ("{}", 0.0),
        (f"{ANN} or {ANN}", 0.0),
    ],
)
def test_full_pay_needs_the_values_of_the_gold(text, expected, gold):
    assert score_against(text, gold) == pytest.approx(expected)


@pytest.mark.parametrize("gold", [None, "", "[1]", "{", 7, {"day": math.nan}])
def test_a_gold_that_is_no_object_is_not_scored(gold):
    assert score_against(ANN, gold) is None


def test_nested_values_are_compared_in_order_and_booleans_are_no_numbers():
    gold = {"tags": ["a", {"on": True, "off": None}]}
    assert score_against('{"tags": ["A", {"on": true}]}', gold, {}) == 1.0
    for other in ('{"tags": [{"on": true}, "a"]}', '{"tags": ["a", {"on": 1}]}', '{"tags": ["a"]}'):
        assert score_against(other, gold, {}) == 0.0


@pytest.mark.parametrize("value", [0, "", [], {}, 0.0])
def test_a_value_that_is_zero_or_empty_is_a_value(value):
    gold = {"outer": {"inner": value}}
    assert score_against(json.dumps(gold), gold, {}) == 1.0
    for other in ({}, {"inner": None}, {"inner": [1]}):
        assert score_against(json.dumps({"outer": other}), gold, {}) == 0.0


@pytest.mark.parametrize(
    ("golds", "expected"),
    [
        ([{"name": "Bo", "age": 4}, json.dumps(GOLD)], 1.0),
        ([{"name": "Bo", "age": 4}, {"name": "Ann", "age": 31}], 0.25),  # one of two values of the second
        ([None, "no JSON", GOLD], 1.0),
        ([{"text": "x"}], 0.0),
        ([], None),
        ([None, 7], None),
        ([GOLD] * 65, None),
    ],
)
def test_the_best_of_several_gold_objects_counts(golds, expected):
    assert score_against(ANN, golds) == expected


def test_the_column_of_golds_is_declared_and_needed():
    assert JsonSchema(schema=PERSON, gold_column="answer").columns_read == ("answer",)
    assert JsonSchema(gold_column="answer").columns_read == ("answer", "schema")
    with pytest.raises(ValueError, match="needs the dataset column `answer`"):
        JsonSchema(schema=PERSON, gold_column="answer")(completions=[ANN])


def test_the_metrics_are_shares_of_the_batch():
    schema = {"type": "object", "required": ["name"]}
    metrics = {}
    completions = ['{"name": "Ann"}', '{"name": 3}', '{"age": 3}', "no JSON", '{"name": 1}']
    JsonSchema()(completions=completions, schema=[schema] * 4 + [7], log_metric=metrics.__setitem__)
    assert metrics == {
        "rewards/json_schema/fits": 2 / 5, "rewards/json_schema/parsed": 3 / 5, "rewards/json_schema/unscorable": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "instance", "steps"),
    [(1, 2, 1), ([1, 2], 3, 3), ({"a": 1}, [1, 2, 3], 5), ({}, "x" * 99, 1), ([1], "x" * 250, 4), (1, {"a": 1}, 2)],
)
def test_a_keyword_costs_steps_by_the_size_of_what_it_compares(value, instance, steps):
    token = schemas._steps.set([steps])
    try:
        called = schemas._counted(lambda *given: given)(None, value, instance, {})
        assert called == (None, value, instance, {})
        assert schemas._steps.get() == [0]
        with pytest.raises(schemas._TooCostly):
            schemas._counted(lambda *given: given)(None, value, instance, {})
    finally:
        schemas._steps.reset(token)


@pytest.mark.parametrize(
    ("name", "text", "fits"),
    [
        ("email", "a@b.c", True), ("email", "a@b", False), ("email", "a b@c.d", False), ("email", "a@b.c.d", True),
        ("email", "a" * 250 + "@b.c", True), ("email", "a" * 251 + "@b.c", False), ("time", "23:59:60Z", True),
        ("time", "24:00:00Z", False), ("time", "12:60:00Z", False), ("time", "12:00:00", False),
        ("time", "12:00:00.5+01:30", True), ("date-time", "2024-02-29T12:00:00Z", True),
        ("date-time", "2023-02-29T12:00:00Z", False), ("date-time", "2024-02-28 12:00:00z", True),
        ("date-time", "2024-02-28x12:00:00Z", False), ("date-time", "20240228T12:00:00Z", False),
        ("date", "2024-02-30", False), ("ipv4", "1.2.3.256", False), ("ipv6", "::1", True), ("uuid", "x", False),
        ("color", "anything", True), ("ipv6", "1.2.3.4", False), ("ipv4", "::1", False), ("ipv4", "1.2.3.4", True),
        ("email", "a@b.c d", False), ("email", "a@b.c\n", False), ("time", "12:00:00Z ", False), ("time", 3, True),
        ("email", 3, True), ("date-time", 3, True), ("date", "2024-02-29", True), ("time", "12:00:00z", True),
        ("date-time", "2024-02-29", False), ("date-time", "2024-02-29T24:00:00Z", False), ("ipv6", ":::", False),
        ("uuid", "f81d4fae-7dec-11d0-a765-00a0c91e6bf6", True), ("time", "23:60:00Z", False),
    ],
)  # fmt: skip
def test_the_formats_of_strings(name, text, fits):
    schemas._format_checker.cache_clear()
    schemas._compiled.cache_clear()
    scores = JsonSchema()(completions=[json.dumps({"x": text})], schema=[{"properties": {"x": {"format": name}}}])
    assert scores == [float(fits)]


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        ({"multipleOf": 0.01}, 19.99, True), ({"multipleOf": 0.01}, 19.995, False), ({"multipleOf": 2}, True, True),
        ({"uniqueItems": True}, [1, 1.0], False), ({"uniqueItems": True}, [1, True], True),
        ({"uniqueItems": True}, [{"a": 1, "b": 2}, {"b": 2, "a": 1}], False), ({"uniqueItems": False}, [1, 1], True),
        ({"uniqueItems": True}, "aa", True), ({"uniqueItems": True}, 7, True), ({"uniqueItems": True}, {}, True),
        ({"uniqueItems": True}, [1.5, 1.5], False), ({"uniqueItems": True}, ["1", 1], True),
        ({"patternProperties": {"^a": {"type": "string"}}}, {"ab": 1, "b": 1}, False),
        ({"patternProperties": {"^a": {"type": "string"}}}, {"ab": "x", "b": 1}, True),
        ({"properties": {"a": {}}, "additionalProperties": False}, {"a": 1}, True),
        ({"properties": {"a": {}}, "additionalProperties": False}, {"a": 1, "b": 1}, False),
        ({"patternProperties": {"^b": {}}, "additionalProperties": False}, {"b1": 1}, True),
        ({"additionalProperties": {"type": "string"}}, {"a": 1}, False),
        ({"additionalProperties": {"type": "string"}}, {"a": "1"}, True), ({"pattern": "^a+$"}, "aab", False),
        ({"pattern": "a"}, "bab", True), ({"pattern": "a"}, 3, True),
    ],
)  # fmt: skip
def test_the_keywords_that_are_checked_in_linear_time(schema, value, fits):
    scores = JsonSchema()(completions=[json.dumps({"x": value})], schema=[{"properties": {"x": schema}}])
    assert scores == [float(fits)]


@pytest.mark.parametrize(
    ("schema", "value", "where"),
    [
        ({"patternProperties": {"^a": {"type": "string"}}}, {"ab": 1}, "type at $.x.ab"),
        ({"additionalProperties": {"type": "string"}}, {"ab": 1}, "type at $.x.ab"),
        ({"additionalProperties": False}, {"ab": 1}, "additionalProperties at $.x"),
        ({"items": {"minimum": 3}}, [5, 1], "minimum at $.x[1]"),
        ({"uniqueItems": True}, [1, 1], "uniqueItems at $.x"),
        (False, 1, "false at $"),
    ],
)
def test_a_verdict_names_the_keyword_and_the_place(schema, value, where):
    logged = {}
    completion = json.dumps({"x": value})
    JsonSchema()(completions=[completion], schema=[{"properties": {"x": schema}}], log_extra=logged.__setitem__)
    assert logged["verdict"] == [f"does not fit ({where}), 0 of 0 required keys do"]


EMPTY = "not JSON: Expecting value: line 1 column 1 (char 0)"


@pytest.mark.parametrize(
    ("layout", "text", "found"),
    [
        ("answer_tag", '<answer>{"a": 1}</answer>', {"a": 1}),
        ("answer_tag", '{"a": 1}', "no answer block"),
        ("answer_tag", '<answer>{"a": 1}', "no answer block"),
        ("answer_tag", '{"a": 1}</answer>', "no answer block"),
        ("answer_tag", "<answer>{}</answer></answer>", "several answer blocks"),
        ("answer_tag", "<answer>{}<answer></answer>", "several answer blocks"),
        ("answer_tag", '<answer>\n```json\n{"a": 1}\n```\n</answer>', {"a": 1}),
        ("answer_tag", "<answer>```json\n{}\n``` and</answer>", EMPTY),
        ("answer_tag", "<answer>so ```json\n{}\n```</answer>", EMPTY),
        ("fence", '{"a": 1}', "no fence"),
        ("fence", "<answer>{}</answer>", "no fence"),
        ("fence", '{"a": 2}\n```json\n{"a": 1}\n```', {"a": 1}),
        ("fence", '```\n\n  {"a": 1}\n```', {"a": 1}),
        ("fence", "```sh\n{}\n```\n```\n[1]\n```", "no fence"),
        ("fence", "```json\n[1]\n```\n```\n{}\n```", "several fences"),
        ("whole", '\u00a0{"a": "<answer>"}\x0b', {"a": "<answer>"}),
        ("whole", '{"a": "```"}', {"a": "```"}),
        ("whole", "```json\n{}\n```", EMPTY),
        ("whole", "<answer>{}</answer>", EMPTY),
        ("auto", ' {"a": "```json\\n[]\\n```"} ', {"a": "```json\n[]\n```"}),
        ("auto", '[1]\n```json\n{"a": 1}\n``` <answer>{"a": 2}</answer>', {"a": 2}),
        ("auto", "[]", "not an object"),
        ("auto", "", EMPTY),
    ],
)
def test_each_layout_has_one_place_for_the_object(layout: str, text: str, found: object) -> None:
    if isinstance(found, dict):
        assert schemas.find_object(text, layout, "answer") == found
        return
    with pytest.raises(ValueError, match=f"^{re.escape(str(found))}$"):
        schemas.find_object(text, layout, "answer")


@pytest.mark.parametrize("layout", ["answer_tag", "fence", "whole", "auto"])
def test_every_layout_is_a_choice_and_reads_its_own(layout: str) -> None:
    texts = {"answer_tag": f"<answer>{ANN}</answer>", "fence": fenced(ANN), "whole": ANN, "auto": ANN}
    assert score(texts[layout], extract=layout) == (1.0, "fits")


def test_arguments_that_do_not_fit_are_named() -> None:
    for arguments, message in (
        ({"pay_partial": -0.1}, "pay_partial must be a finite number from 0 to 1, not -0.1"),
        ({"pay_partial": 1.0}, "pay_partial must be less than pay, 1, not 1"),
        ({"schema": ""}, "schema must be a mapping or a string of JSON, not ''"),
        ({"schema": " "}, "schema must be a mapping or a string of JSON, not ' '"),
        ({"schema": {"enum": [{1, 2}]}}, "schema must be a mapping or a string of JSON, not {'enum': [{1, 2}]}"),
        ({"schema": {}, "extract": "box"}, "extract must be one of answer_tag, fence, whole, auto, not 'box'"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            JsonSchema(**arguments)
    circle: dict = {}
    circle["properties"] = circle
    with pytest.raises(ValueError, match="schema must be a mapping or a string of JSON"):
        JsonSchema(schema=circle)
    reward = JsonSchema(schema={"type": "object"})
    assert (reward.schema, reward.columns_read) == ('{"type": "object"}', ())
    assert (JsonSchema().columns_read, JsonSchema(schema_column="s").columns_read) == (("schema",), ("s",))


def test_an_empty_schema_takes_any_object_and_needs_no_column() -> None:
    assert JsonSchema(schema={})(completions=['{"a": 1}', "[1]"]) == [1.0, 0.0]


def test_a_verdict_names_what_its_row_lacks() -> None:
    logged: dict = {}
    JsonSchema(gold_column="gold")(
        completions=[ANN] * 4,
        schema=[None, " ", "[]", PERSON],
        gold=[ANN, ANN, ANN, "no"],
        log_extra=logged.__setitem__,
    )
    assert logged["verdict"] == ["no schema", "no schema", "the schema is not a JSON object", "no gold"]


def test_a_verdict_on_values_counts_those_that_are_right() -> None:
    logged: dict = {}
    gold = {"name": "Ann", "age": 30, "mail": "a@b.c"}
    completions = ['{"name": "Bo", "age": 31, "x": 1}', json.dumps(gold), '{"name": "Ann", "age": -1, "mail": "a@b.c"}']
    scores = JsonSchema(schema=PERSON, gold_column="gold")(
        completions=completions, gold=[{}, gold, json.dumps(gold)], log_extra=logged.__setitem__
    )
    assert scores == [0.0, 1.0, pytest.approx(0.5 * 2 / 3)]
    assert logged["verdict"][0].endswith(", 0 of 3 values are right, not name, age, x")
    assert logged["verdict"][1] == "fits"
    assert logged["verdict"][2].endswith("not age, 2 of 3 values are right, not age")
    # An object with the gold's values that does not fit the schema earns the smaller pay.
    assert score_against('{"name": "Ann", "age": -1}', {"name": "Ann", "age": -1}) == 0.5
    assert score_against('{"on": true}', {"on": False}, {}) == 0.0
    assert score_against('{"on": false}', {"on": False}, {}) == 1.0
    assert score_against("{}", {}, {}) == 1.0


def test_long_places_and_lists_of_keys_are_cut_in_a_verdict() -> None:
    keys = [f"key{n:02}" for n in range(20)]
    _, verdict = score("{}", {"required": keys})
    listed = ", ".join(keys)
    assert verdict == f"does not fit (required at $), 0 of 20 required keys do, not {listed[:80]}"
    deep = {"properties": {"k" * 90: {"type": "string"}}}
    assert score(json.dumps({"k" * 90: 1}), deep)[1] == f"does not fit (type at $.{'k' * 79}), 0 of 0 required keys do"
    _, verdict = score("{}", {}, gold_column=None)
    assert verdict == "fits"


@pytest.mark.parametrize("keyword", ["$dynamicRef", "$recursiveRef", "unevaluatedItems", "unevaluatedProperties"])
def test_a_keyword_that_is_not_supported_is_named(keyword: str) -> None:
    value = "#" if keyword.endswith("Ref") else False
    with pytest.raises(ValueError, match=f"^the schema uses {re.escape(keyword)}, which is not supported$"):
        JsonSchema(schema={"items": {keyword: value}})


def test_the_root_alone_may_have_an_identifier() -> None:
    inner = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object"}}}
    assert score("{}", {"$id": "https://example.org/a", **inner})[0] == 1.0
    with pytest.raises(ValueError, match=r"holds a second schema with an \$id of its own"):
        JsonSchema(schema={"properties": {"a": {"$id": "https://example.org/b"}}})


@pytest.mark.parametrize("keyword", ["not", "if", "then", "else", "allOf", "anyOf", "oneOf", "dependentSchemas"])
def test_a_circle_through_any_keyword_of_the_same_value_is_refused(keyword: str) -> None:
    back = {"$ref": "#/$defs/a"}
    value = [back] if keyword.endswith("Of") else {"x": back} if keyword == "dependentSchemas" else back
    schema = {"$defs": {"a": {keyword: value}}, "properties": {"b": {"$ref": "#/$defs/a"}}}
    with pytest.raises(ValueError, match=r"has a \$ref that leads back to itself without reading on$"):
        JsonSchema(schema=schema)
    reading_on = {"$defs": {"a": {"properties": {"x": back}}}, "$ref": "#/$defs/a"}
    assert score('{"x": {"x": {}}}', reading_on)[0] == 1.0


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$schema": 7}, "must name one of the drafts 4, 6, 7, 2019-09 and 2020-12, not 7"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "must name one of the drafts 4, 6, 7"),
        ({"$ref": "#/properties/x"}, r"the schema's \$ref '#/properties/x' leads nowhere"),
        ({"$ref": "#/required/x", "required": ["a"]}, r"leads nowhere"),
        ({"$ref": "a.json"}, r"the schema's \$ref 'a.json' leads outside the schema, where nothing is ever fetched"),
    ],
)
def test_a_schema_that_cannot_be_used_is_described(schema: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JsonSchema(schema=schema)


def test_a_schema_may_be_nested_to_a_depth_of_64() -> None:
    for depth, fits in ((64, True), (65, False)):
        text = '{"not":' * (depth - 1) + "{}" + "}" * (depth - 1)
        if fits:
            JsonSchema(schema=text)
        else:
            with pytest.raises(ValueError, match="the schema is not JSON: nested deeper than 64"):
                JsonSchema(schema=text)


def steps_of(schema: dict, value: object) -> int:
    """Return the number of steps that the validation of a value takes."""
    token = schemas._steps.set([schemas.MAX_STEPS])
    try:
        next(schemas._compiled(json.dumps(schema)).validator.iter_errors(schemas._quiet(value)), None)
        return schemas.MAX_STEPS - schemas._steps.get()[0]
    finally:
        schemas._steps.reset(token)


def test_the_longest_validation_is_that_of_the_documentation() -> None:
    page = Path(__file__).resolve().parents[2].joinpath("docs/rewards.md").read_text(encoding="utf-8")
    (most,) = re.findall(r"A validation of more than ([\d,]+) steps", page)
    steps = int(most.replace(",", ""))
    schema = {"properties": {"a": {"enum": list(range(10))}}, "required": ["a"]}
    spent = steps_of(schema, {"a": 3})
    token = schemas._steps.set([steps])
    try:
        JsonSchema(schema=schema)._validated(schemas._compiled(json.dumps(schema)), {"a": 3})
        assert schemas._steps.get() == [steps - spent]
    finally:
        schemas._steps.reset(token)


def test_keywords_that_read_long_texts_cost_a_step_for_each_hundred_characters() -> None:
    base = steps_of({"patternProperties": {"^a": True}}, {})  # the keyword itself, and `$schema`
    key = "a" * 250
    assert steps_of({"patternProperties": {"^a": True}}, {"b": 1}) == base + 1 + 1  # one entry more, one key compared
    assert steps_of({"patternProperties": {"^b": True}}, {key: 1}) == base + 1 + 3
    others = {"patternProperties": {"^b": True, "^c": True}, "additionalProperties": True}
    extra = steps_of(others, {"d": 1}) - steps_of(others, {})
    # One entry more for each of the two keywords, one step for each pattern of each, and none for `true`.
    assert extra == 2 + 2 + 2
    assert steps_of(others, {"d" * 100: 1}) - steps_of(others, {"d" * 99: 1}) == 2 + 2
    items = {"uniqueItems": True}
    assert steps_of(items, [1, 2]) - steps_of(items, []) == 2 + 2
    assert steps_of(items, ["x" * 200]) - steps_of(items, ["x"]) == 2
    assert steps_of(items, [{"a": 1}]) - steps_of(items, [1]) == 1


def test_patterns_are_those_of_re2_alone() -> None:
    r"""Python's `re`, which has no `\pL`, reads no pattern: some take it exponential time."""
    schema = {"properties": {"a": {"pattern": "^\\pL+$"}, "b": {"format": "regex"}}}
    assert JsonSchema(schema=schema)(completions=['{"a": "né", "b": "("}', '{"a": "n3"}']) == [1.0, 0.0]
