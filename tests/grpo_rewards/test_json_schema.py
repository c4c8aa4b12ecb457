"""The reward for one JSON object that fits a schema: pay, traps, an independent oracle, and bounds."""

import itertools
import json
import math
import pickle
import random
import string
from pathlib import Path

import pytest

from grpo_rewards.built import RewardSpecError
from grpo_rewards.registry import build_rewards
from grpo_rewards.schema import JsonSchema
from grpo_rewards.schema_validation import MAX_STEPS
from grpo_rewards.strict import MAX_CHARS, MAX_DEPTH
from tests.support.errors import refused
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


REFERS_BACK = [
    *({keyword: [{}, {"$ref": "#"}]} for keyword in ("allOf", "anyOf", "oneOf")),
    *({keyword: {"$ref": "#"}} for keyword in ("not", "if", "then", "else")),
    {"dependentSchemas": {"a": {"$ref": "#"}}},
    {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": {"$ref": "#"}}},
    {"not": {"$ref": "#/own/a"}, "own": {"a": {"if": {"$ref": "#"}}}},
]


PAID = {
    "a fence": fenced(ANN), "a fence without a label": fenced(ANN, ""), "a fence of four": f"````json\n{ANN}\n````",
    "a fence in capitals": fenced(ANN, "JSON"), "prose around a fence": f"Here it is:\n\n{fenced(ANN)}\nAnything else?",
    "another language's fence beside it": f"{fenced('ls', 'sh')}\n{fenced(ANN)}",
    "a shorter fence inside a longer one": "<think>a</think>\n````\n```json\n```\n````\n" + fenced(ANN),
    "a fence of output, unmarked, beside it": f"{fenced('total 0', '')}\n{fenced(ANN)}",
    "before a thinking block that never closes": f"{fenced(ANN)}\n<think>\n{fenced('{}')}",
    "an indented fence": f"  ```json\n  {ANN}\n  ```", "a tag": f"<answer>{ANN}</answer>",
    "a fence in a tag": f"<answer>\n{fenced(ANN)}\n</answer>", "nothing but the object": f"\n{ANN}\n",
    "behind the thinking": f"<think>{{}} or {fenced('{}')}?</think>\n{ANN}",
    "in several lines": fenced(json.dumps(json.loads(ANN), indent=2)),
    "braces in a string": fenced('{"name": "}{", "age": 1}'),
    "brackets in a string": fenced('{"name": "\\"' + "[" * 40 + '", "age": 1}'),
    "zero, in full": fenced('{"name": "Ann", "age": -0.00e-400}'),
    "a fence in a string": '{"name": "```json\\n{}\\n```", "age": 1}',
    "escapes": fenced('{"name": "\\u0041\\"\\n", "age": 1}'),
    "an integral float, an integer to JSON Schema": fenced('{"name": "Ann", "age": 30.0}'),
}  # fmt: skip


def test_the_pays_are_arguments():
    assert score(fenced(ANN), pay=3)[0] == 3.0
    assert score(fenced('{"name": "Ann"}'), pay=3, pay_partial=1)[0] == 0.5
    assert score(fenced('{"name": "Ann"}'), pay_partial=0)[0] == 0.0
    reward = JsonSchema(schema=PERSON, pay=3)
    assert (reward.highest_pay, reward.kind, reward.__name__) == (3.0, "correctness", "json_schema")
    assert pickle.loads(pickle.dumps(reward)) == reward
    assert hash(reward) == hash(JsonSchema(schema=dict(PERSON), pay=3))


# Completions that a naive reward pays for.
TRAPS = {
    "two objects in two fences": fenced(ANN) + "\n" + fenced('{"name": "Bob", "age": 2}'),
    "the same object twice": fenced(ANN) + "\n" + fenced(ANN), "two objects in one fence": fenced(ANN + "\n" + ANN),
    "two answer blocks": f"<answer>{ANN}</answer><answer>{ANN}</answer>",
    "an object inside the thinking only": f"<think>{fenced(ANN)}</think>",
    "an object in a thinking block that never closes": f"<think>{fenced(ANN)}",
    "a fence that never closes": f"```json\n{ANN}", "a tag that never closes": f"<answer>{ANN}",
    "a closing tag before the opening one": f"</answer>{ANN}<answer>",
    "prose before a bare object": f"Here it is: {ANN}", "prose after a bare object": f"{ANN} is it",
    "prose inside the tag": f"<answer>I say {ANN}</answer>",
    "a comment": fenced('{"name": "Ann", "age": 30 /* about */}'),
    "a trailing comma": fenced('{"name": "Ann", "age": 30,}'), "single quotes": fenced("{'name': 'Ann', 'age': 30}"),
    "Python's True": fenced('{"name": "Ann", "age": True}'),
    "a double key": fenced('{"name": "Ann", "age": -1, "age": 30}'), "NaN": fenced('{"name": "Ann", "age": NaN}'),
    "Infinity": fenced('{"name": "Ann", "age": Infinity}'),
    "a float beyond double precision": fenced('{"name": "Ann", "age": 1e999}'),
    "a float that is 0 to double precision": fenced('{"name": "Ann", "age": 1e-400}'),
    "an object before the fence": ANN + "\n" + fenced(ANN),
    "a number of 301 digits": fenced('{"name": "Ann", "age": ' + "9" * 301 + "}"), "BOM": "\ufeff" + ANN,
    "a line break in a string": fenced('{"name": "An\nn", "age": 30}'), "a list around the object": fenced(f"[{ANN}]"),
    "a string that holds the object": fenced(json.dumps(ANN)), "a fence of YAML": fenced(ANN, "yaml"),
    "an object beside the fence in the tag": f"<answer>{fenced(ANN)}{ANN}</answer>",
    "the schema itself": fenced(json.dumps(PERSON)), "null": fenced("null"),
}  # fmt: skip


# A schema, a value that fits it, and one that only seems to. Some validators and shortcuts get these wrong.
SUBTLE = {
    "true is not 1": ({"enum": [1]}, 1.0, True),
    "false is not 0": ({"const": 0}, 0, False),
    "false as an integer": ({"type": "integer"}, 0, False),
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


def test_a_recursive_schema_reads_trees():
    branch = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    node = {"type": "object", "required": ["v"], "properties": {"v": {"type": "integer"}, "next": branch}}
    tree = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    deep = {"v": 0, "next": None}
    for value in range(MAX_DEPTH - 2):
        deep = {"v": value, "next": deep}
    assert score(json.dumps(deep), tree)[0] == 1.0
    assert score('{"v": 1, "next": {"v": "2"}}', tree)[0] == 0.5
    for _ in range(2):
        deep = {"v": 1, "next": deep}
    assert score(json.dumps(deep), tree)[0] == 0.0


def test_a_column_holds_schemas_as_strings_or_mappings():
    schemas = [json.dumps(PERSON), PERSON, None, ""]
    assert JsonSchema()(completions=[ANN] * 4, schema=schemas) == [1.0, 1.0, None, None]
    circular = {"type": "object"}
    circular["properties"] = circular
    assert JsonSchema()(completions=[ANN] * 2, schema=[circular, {"type": {"object"}}]) == [None, None]
    assert JsonSchema(schema_column="form")(completions=[ANN], form=[PERSON], schema=["no"]) == [1.0]
    with pytest.raises(ValueError, match="`schema`.*answer"):
        JsonSchema()(completions=[ANN], answer=["x"])
    assert JsonSchema(schema={})(completions=['{"a": 1}', "[1]"]) == [1.0, 0.0]
    assert (JsonSchema(schema_column="s").columns_read, JsonSchema(schema={}).columns_read) == (("s",), ())


# --- an independent generator, and jsonschema's own validator as the oracle

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "größe", "🙂", "x y", 'quo"te', "back\\slash"]


def a_value(rng, depth=0):
    """Return a schema and a value that fits it."""
    text, number, cents = rng.choice(WORDS), rng.randrange(-(10**6), 10**12), rng.randrange(10**7)
    values = rng.sample([*WORDS, 1, 2.5, True, None], 3)
    code = "".join(rng.choices(string.ascii_uppercase, k=3)) + str(rng.randrange(1000))
    day = f"{rng.randrange(1900, 2100)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
    cases = [
        ({"type": "string", "minLength": 1, "maxLength": len(text)}, text),
        ({"type": "string", "pattern": "^[A-Z]{3}[0-9]+$"}, code), ({"type": "string", "format": "date"}, day),
        ({"type": "integer", "minimum": number - rng.randrange(3), "maximum": number}, number),
        ({"type": "number", "multipleOf": 0.01, "exclusiveMaximum": cents / 100 + 1}, cents / 100),
        ({"type": "boolean"}, rng.random() < 0.5), ({"enum": values}, rng.choice(values)),
        ({"type": ["null", "string"]}, None),
    ]  # fmt: skip
    if depth < 3 and rng.random() < 0.3:
        schema, value = a_value(rng, depth + 1)
        size = rng.randrange(4)
        cases = [
            ({"type": "array", "items": schema, "minItems": size, "maxItems": size}, [value] * size),
            ({"anyOf": [{"type": "array", "minItems": 99}, schema]}, value), an_object(rng, depth + 1),
        ]  # fmt: skip
    return rng.choice(cases)


def an_object(rng, depth=0):
    keys = rng.sample(WORDS, rng.randrange(1, 6))
    parts = {key: a_value(rng, depth) for key in keys}
    required = rng.sample(keys, rng.randrange(1, len(keys) + 1))
    kept = [key for key in keys if key in required or rng.random() < 0.5]
    rng.shuffle(kept)
    properties = {key: schema for key, (schema, _) in parts.items()}
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
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


TWICE = {
    "$ref": "#/$defs/n",
    "$defs": {
        "n": {"anyOf": [{"properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["b"]},
                        {"properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["c"]}]},
    },
}  # fmt: skip
# A schema, and a text of about that many characters.
ADVERSARIAL = {
    "opening braces in a fence": (PERSON, lambda n: fenced('{"a":' * (n // 5))),
    "fences": (PERSON, lambda n: "```json\n" * (n // 8)),
    "keys": (PERSON, lambda n: "{" + ",".join(f'"k{i}":1' for i in range(n // 9)) + "}"),
    "items that can't be sorted": (
        {"properties": {"a": {"uniqueItems": True}}},
        lambda n: json.dumps({"a": [{"b": i} if i % 2 else str(i) for i in range(n // 10)]}),
    ),
    "a pattern that backtracks": (
        {"properties": {"a": {"pattern": "^(a+)+$"}}}, lambda n: json.dumps({"a": "a" * n + "!"})),
    "a large value, quoted in errors": (
        {"properties": {"a": {"anyOf": [{"type": "integer"}] * 50}}}, lambda n: json.dumps({"a": ["b" * n]})),
}  # fmt: skip


# --- Values against a gold ---

GOLD = {"name": "Ann", "age": 30, "mail": None}


def score_against(text, gold, schema=PERSON):
    (result,) = JsonSchema(schema=schema, gold_column="answer")(completions=[text], answer=[gold])
    return result


def test_nested_values_are_compared_in_order_and_booleans_are_no_numbers():
    gold = {"tags": ["a", {"on": True, "off": None}]}
    assert score_against('{"tags": ["A", {"on": true}]}', gold, {}) == 1.0
    for other in ('{"tags": [{"on": true}, "a"]}', '{"tags": ["a", {"on": 1}]}', '{"tags": ["a"]}'):
        assert score_against(other, gold, {}) == 0.0


def test_the_metrics_are_shares_of_the_batch():
    schema = {"type": "object", "required": ["name"]}
    metrics = {}
    completions = ['{"name": "Ann"}', '{"name": 3}', '{"age": 3}', "no JSON", '{"name": 1}']
    JsonSchema()(completions=completions, schema=[schema] * 4 + [7], log_metric=metrics.__setitem__)
    assert metrics == {
        "rewards/json_schema/fits": 2 / 5, "rewards/json_schema/parsed": 3 / 5, "rewards/json_schema/unscorable": 1.0,
    }  # fmt: skip


# --- Tables of what is paid


def test_an_object_that_fits_is_paid_in_full_and_a_trap_nothing():
    assert {kind: score(text) for kind, text in PAID.items() if score(text) != (1.0, "fits")} == {}
    assert {kind: score(text) for kind, text in TRAPS.items() if score(text)[0] != 0.0} == {}
    assert len(PAID) + len(TRAPS) > 50


def test_an_object_that_does_not_fit_earns_the_share_of_its_required_keys():
    for text, pay in (
        ('{"name": "Ann", "age": -1}', 0.25),
        ('{"name": "Ann"}', 0.25), ('{"name": ["x"], "age": 1}', 0.25), ('{"name": "Ann", "age": 1, "x": 1}', 0.5),
        ("{}", 0.0), ("[]", 0.0),
    ):  # fmt: skip
        assert score(fenced(text))[0] == pay, text
    schema = {"required": ["a", "c"], "properties": {"b": {"type": "integer"}}}
    assert score('{"a": [], "c": null, "b": "x"}', schema)[0] == 0.5, "a key without a schema takes any value"
    assert score('{"a": [], "b": "x"}', schema)[0] == 0.25


def test_the_share_is_of_the_keys_that_the_root_and_what_it_refers_to_require():
    """Drafts before 2019-09 ignore what stands beside a `$ref`, so that the last schema alone counts."""
    # Keys whose values fit, of all that any schema on the way requires, and of those that the last one requires.
    rows = (
        ({"a": 7, "b": 1, "c": 1}, "abc", "c"), ({"a": 3, "b": 1, "c": 1}, "bc", "c"),
        ({"a": "x", "b": 1, "c": 1}, "bc", "c"), ({"a": 7, "b": 1, "c": "x"}, "ab", ""), ({"a": 7, "c": 1}, "ac", "c"),
        ({"b": "x"}, "", ""),
    )  # fmt: skip
    for draft in ("draft-04", "draft-06", "draft-07", "2019-09", "2020-12"):
        is_new = draft.startswith("20")
        uri = f"https://json-schema.org/draft/{draft}/schema" if is_new else f"http://json-schema.org/{draft}/schema#"
        root = {"$schema": uri, "$ref": "#/PLACE/first", "required": ["a"], "properties": {"a": {"type": "integer"}}}
        text = json.dumps({**root, "PLACE": PARTS}).replace("PLACE", "$defs" if is_new else "definitions")
        schema = json.loads(text)
        for found, fit, fit_last in rows:
            fits = jsonschema.validators.validator_for(schema)(schema).is_valid(found)
            share = len(fit) / 3 if is_new else len(fit_last)
            assert score(json.dumps(found), schema)[0] == (1.0 if fits else pytest.approx(0.5 * share)), (draft, found)


def test_a_value_that_fits_and_one_that_only_seems_to():
    wrong = []
    for kind, (part, good, bad) in SUBTLE.items():
        schema = {"properties": {"v": part}, "required": ["v"]}
        if [score(json.dumps({"v": value}), schema)[0] for value in (good, bad)] != [1.0, 0.0]:
            wrong.append(kind)
    assert wrong == []


MORE = [
    ({"format": "email"}, "a@b", False), ({"format": "email"}, "a b@c.d", False), ({"format": "email"}, 3, True),
    ({"format": "email"}, "a" * 250 + "@b.c", True), ({"format": "email"}, "a" * 251 + "@b.c", False),
    ({"format": "time"}, "23:59:60Z", True), ({"format": "time"}, "24:00:00Z", False),
    ({"format": "time"}, "12:60:00Z", False), ({"format": "time"}, "12:00:00", False),
    ({"format": "time"}, "12:00:00.5+01:30", True), ({"format": "time"}, "12:00:00z", True),
    ({"format": "date-time"}, "2024-02-28x12:00:00Z", False), ({"format": "date-time"}, "20240228T12:00:00Z", False),
    ({"format": "date-time"}, "2024-02-29", False), ({"format": "date"}, "2024-02-30", False),
    ({"format": "ipv6"}, "::1", True), ({"format": "ipv6"}, "1.2.3.4", False), ({"format": "color"}, "any", True),
    ({"multipleOf": 2}, True, True), ({"uniqueItems": False}, [1, 1], True), ({"uniqueItems": True}, "aa", True),
    ({"patternProperties": {"^a": {"type": "string"}}}, {"ab": 1, "b": 1}, False),
    ({"patternProperties": {"^a": {"type": "string"}}}, {"ab": "x", "b": 1}, True),
    ({"properties": {"a": {}}, "additionalProperties": False}, {"a": 1, "b": 1}, False),
    ({"patternProperties": {"^b": {}}, "additionalProperties": False}, {"b1": 1}, True),
    ({"additionalProperties": {"type": "string"}}, {"a": 1}, False),
    ({"additionalProperties": {"type": "string"}}, {"a": "1"}, True), ({"pattern": "a"}, 3, True),
    ({"pattern": "^\\pL+$"}, "né", True),  # RE2's, which Python's `re` lacks
]  # fmt: skip


def test_formats_and_the_keywords_of_our_own():
    wrong = []
    for part, value, fits in MORE:
        scores = JsonSchema()(completions=[json.dumps({"x": value})], schema=[{"properties": {"x": part}}])
        if scores != [float(fits)]:
            wrong.append((part, value))
    assert wrong == []


def test_a_verdict_names_the_keyword_and_the_place_in_a_few_words():
    for part, value, where in (
        ({"patternProperties": {"^a": {"type": "string"}}}, {"ab": 1}, "type at $.x.ab"),
        ({"additionalProperties": {"type": "string"}}, {"ab": 1}, "type at $.x.ab"),
        ({"additionalProperties": False}, {"ab": 1}, "additionalProperties at $.x"),
        ({"items": {"minimum": 3}}, [5, 1], "minimum at $.x[1]"),
        ({"uniqueItems": True}, [1, 1], "uniqueItems at $.x"),
    ):
        assert where in score(json.dumps({"x": value}), {"properties": {"x": part}})[1]
    assert len(score("{}", {"required": [f"key{n:02}" for n in range(99)]})[1]) < 200
    assert len(score(json.dumps({"k" * 999: 1}), {"additionalProperties": {"type": "string"}})[1]) < 200
    assert "1 of 2" in score('{"name": "Ann"}')[1]


def test_each_layout_has_one_place_for_the_object():
    rows = (
        ("answer_tag", '<answer>{"a": 1}</answer>', {"a": 1}), ("answer_tag", '{"a": 1}', None),
        ("answer_tag", '<answer>{"a": 1}', None), ("answer_tag", '{"a": 1}</answer>', None),
        ("answer_tag", "<answer>{}</answer></answer>", None), ("answer_tag", "<answer>{}<answer></answer>", None),
        ("answer_tag", '<answer>\n```json\n{"a": 1}\n```\n</answer>', {"a": 1}),
        ("answer_tag", "<answer>so ```json\n{}\n```</answer>", None),
        ("fence", '{"a": 1}', None), ("fence", "<answer>{}</answer>", None),
        ("fence", '{"a": 2}\n```json\n{"a": 1}\n```', {"a": 1}), ("fence", '```\n\n  {"a": 1}\n```', {"a": 1}),
        ("fence", "```sh\n{}\n```\n```\n[1]\n```", None), ("fence", "```json\n[1]\n```\n```\n{}\n```", None),
        ("whole", '\u00a0{"a": "<answer>"}\x0b', {"a": "<answer>"}), ("whole", "```json\n{}\n```", None),
        ("whole", "<answer>{}</answer>", None), ("auto", "[]", None), ("auto", "", None),
        ("auto", ' {"a": "```json\\n[]\\n```"} ', {"a": "```json\n[]\n```"}),
        ("auto", '[1]\n```json\n{"a": 1}\n``` <answer>{"a": 2}</answer>', {"a": 2}),
    )  # fmt: skip
    for layout, text, found in rows:
        pay = score(text, {"const": found}, extract=layout)[0]
        assert pay == float(found is not None), (layout, text)


# --- Schemas and arguments that are refused

REFUSED = [
    ({"$ref": "https://example.org/person"}, "https://example.org/person"), ({"$ref": "file:///etc/passwd"}, "$ref"),
    ({"properties": {"a": {"$ref": "other.json#/a"}}}, "other.json#/a"), ({"$ref": "#"}, "$ref"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"not": {"$ref": "#/$defs/a"}}}},
     "$ref"),
    ({"$ref": "#/$defs/missing"}, "#/$defs/missing"), ({"$ref": "#/required/x", "required": ["a"]}, "#/required/x"),
    ({"items": {"pattern": "(a)\\1"}}, "pattern"), ({"patternProperties": {"(?=a)": {}}}, "(?=a)"),
    ({"$ref": "#/own/a", "own": {"a": {"pattern": "(?=a)"}}}, "(?=a)"),  # in a place where no draft has schemas
    ({"$dynamicRef": "#node"}, "$dynamicRef"), ({"unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"items": {"unevaluatedItems": False}}, "unevaluatedItems"), ({"properties": {"a": {"$id": "b"}}}, "$id"),
    ({"$schema": "https://json-schema.org/draft/2019-09/schema", "$recursiveRef": "#"}, "$recursiveRef"),
    ({"$schema": "https://example.org/my-draft"}, "$schema"), ({"$schema": 7}, "$schema"),
    ({"$schema": "http://json-schema.org/draft-03/schema#"}, "$schema"), ({"type": "strnig"}, "strnig"),
    ({"required": "name"}, "name"), ("{", "schema"), ("[]", "schema"), (3, "schema"), ("[" * 100 + "]" * 100, "64"),
    ('{"not":' * 64 + "{}" + "}" * 64, "64"), ("", "schema"), ({"enum": [{1, 2}]}, "schema"),
    *((schema, "$ref") for schema in REFERS_BACK),
]  # fmt: skip


def test_an_unusable_schema_is_refused_as_a_kwarg_and_none_in_a_column():
    for schema, figure in REFUSED:
        with refused("reward `json_schema`", figure, by=RewardSpecError):
            build_rewards([{"name": "json_schema", "kwargs": {"schema": schema}}])
        metrics = {}
        scores = JsonSchema()(completions=[ANN, ANN], schema=[schema, {}], log_metric=metrics.__setitem__)
        assert scores == [None, 1.0], schema
        assert metrics["rewards/json_schema/unscorable"] == 1.0
    JsonSchema(schema='{"not":' * 63 + "{}" + "}" * 63)  # as deep as a schema may be
    inner = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object"}}}
    assert score("{}", {"$id": "https://example.org/a", **inner})[0] == 1.0, "the root may have an identifier"


def test_a_bad_argument_is_named():
    for arguments, key in (
        ({"pay_partial": 1}, "pay_partial"), ({"pay_partial": -0.1}, "pay_partial"), ({"extract": "box"}, "extract"),
        ({"prefilled": "answer"}, "prefilled"), ({"schema": " "}, "schema"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=key):
            JsonSchema(**arguments)
    assert score(f"thought</think>{ANN}", prefilled="think")[0] == 1.0
    assert score(ANN, prefilled="think")[0] == 0.0


# --- An oracle, and bounds


def test_pay_agrees_with_the_oracle():
    """Compare pay in full, for what fits, and partial pay, key by key, with jsonschema's own validator."""
    rows = 20  # jsonschema alone takes 10 ms for a schema and its value
    rng = random.Random(5)
    checker = jsonschema.FormatChecker(("date",))
    fit, shares = 0, set()
    for _ in range(rows):
        schema, value = an_object(rng)
        assert score(written(rng, value), schema)[0] == 1.0
        # The oracle reads decimals as binary floats. Without that keyword the two must agree.
        plain = json.loads(json.dumps(schema).replace('"multipleOf": 0.01, ', ""))
        other = mutated(rng, mutated(rng, value) if rng.random() < 0.5 else value)
        good = []
        for key in plain["required"]:
            part = jsonschema.Draft202012Validator(plain["properties"][key], format_checker=checker)
            good.append(key in other and part.is_valid(other[key]))
        fits = jsonschema.Draft202012Validator(plain, format_checker=checker).is_valid(other)
        expected = 1.0 if fits else 0.5 * sum(good) / len(good)
        assert score(written(rng, other), plain)[0] == pytest.approx(expected), (plain, other)
        fit += fits
        shares.add(expected)
    assert fit < rows * 2 / 3
    assert len(shares) > 5


@pytest.mark.parametrize("kind", ADVERSARIAL)
def test_the_cost_of_an_adversarial_text_is_linear_or_flat(kind):
    """Compare the growth of the steps and of the time: 4 is linear, 16 quadratic."""
    schema, make = ADVERSARIAL[kind]
    reward = JsonSchema(schema=schema)
    call = lambda text: reward(completions=[text])  # noqa: E731
    assert max(growth_of_steps(call, make, 2_000), growth(call, make, 5_000)) < 9


def test_a_validation_ends_at_the_number_of_steps_of_the_documentation():
    page = Path(__file__).resolve().parents[2].joinpath("docs/rewards.md").read_text(encoding="utf-8")
    assert f"{MAX_STEPS:,} steps" in page
    # Each item is compared with 1,000 values, and a step is a value.
    schema = {"properties": {"a": {"items": {"enum": [*range(1000)]}}}}
    few, many = MAX_STEPS // 1000 - 10, MAX_STEPS // 1000 + 10
    assert [score(json.dumps({"a": [7] * n}), schema)[0] for n in (few, many)] == [1.0, 0.0]
    for long in ({"uniqueItems": True}, {"patternProperties": {"^a": {}}}):
        assert score(json.dumps({"x": ["a" * 99_000]}), {"properties": {"x": long}})[0] == 1.0
    assert "does not fit" in score('{"a":' * 4 + '{"b":1,"c":1}' + "}" * 4, TWICE)[1]
    assert score('{"x": "' + "y" * MAX_CHARS + '"}', {})[0] == 0.0


# --- Golds


def test_full_pay_needs_the_values_of_the_gold():
    rows = (
        (ANN, 1.0), ('{"age": 30.0, "name": " ann"}', 1.0), ('{"name": "Bob", "age": 30}', 0.25),
        ('{"name": "Ann"}', 0.25), ('{"name": "Ann", "age": 30, "mail": "a@b.c"}', 0.5 * 2 / 3),
        ('{"name": "Ann", "age": 30, "guess": 1}', 0.5 * 2 / 3), ('{"name": "Ann", "age": true}', 0.25), ("{}", 0.0),
        (f"{ANN} or {ANN}", 0.0),
    )  # fmt: skip
    for (text, expected), gold in itertools.product(rows, (GOLD, json.dumps(GOLD))):
        assert score_against(text, gold) == pytest.approx(expected), text
    for gold in (None, "", "[1]", "{", 7, {"day": math.nan}):
        assert score_against(ANN, gold) is None, gold
    assert score_against('{"name": "Ann", "age": -1}', {"name": "Ann", "age": -1}) == 0.5, "it does not fit the schema"
    for value in (0, "", [], {}, 0.0):  # a value that is zero or empty is a value
        gold = {"outer": {"inner": value}}
        others = ({}, {"inner": None}, {"inner": [1]})
        paid = [score_against(json.dumps({"outer": other}), gold, {}) for other in (gold["outer"], *others)]
        assert paid == [1.0, 0.0, 0.0, 0.0]


def test_the_best_of_several_gold_objects_counts():
    for golds, expected in (
        ([{"name": "Bo", "age": 4}, json.dumps(GOLD)], 1.0),
        ([{"name": "Bo", "age": 4}, {"name": "Ann", "age": 31}], 0.25),
        ([None, "no JSON", GOLD], 1.0), ([{"text": "x"}], 0.0), ([], None), ([None, 7], None), ([GOLD] * 65, None),
    ):  # fmt: skip
        assert score_against(ANN, golds) == expected, golds
    assert JsonSchema(schema=PERSON, gold_column="answer").columns_read == ("answer",)
    assert JsonSchema(gold_column="answer").columns_read == ("answer", "schema")
    with pytest.raises(ValueError, match="`answer`"):
        JsonSchema(schema=PERSON, gold_column="answer")(completions=[ANN])
