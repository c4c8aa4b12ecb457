"""docs/recipes.md, every key of a recipe, from the dataclasses that read them: `python -m docs.recipe_keys`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, Literal

from trl import GRPOConfig, ModelConfig

from grpo_recipes.recipe.recipe import OUR_KEYS, Recipe
from grpo_recipes.recipe.specs import PassRateSpec, SourceSpec, Spec, hints, spec_of
from grpo_recipes.recipe.trl_keys import DEFAULTS, TRL_KEYS
from grpo_rewards.terminal import say

HEAD = """# The keys of a recipe

Made by `python -m docs.recipe_keys > docs/recipes.md`; a test holds it against the code.

A recipe is a YAML mapping: our few keys beside those of TRL's `GRPOConfig` and `ModelConfig`, with TRL's names and meanings. The
command line overrides it: `--learning_rate 1e-6`, inside a mapping with dots (`--dataset.path train.jsonl`), inside a list by
number (`--rewards.0.weight 2`). An unknown key is refused, with the nearest valid one. `grpo-recipes plan RECIPE --resolved`
prints a recipe with every default. A recipe names Python functions that will be called: it is code, like a Makefile.
[docs/data.md](data.md) has worked examples: boxed maths from a CSV, multiple choice, a task without golds.
"""

REWARDS = """
An entry is a name (`grpo-rewards list`), the dotted path of a function of your own, or a mapping of `name`, `weight` (1), `alias`
(what it is called in logs) and `kwargs` (what it is built with); [docs/rewards.md](rewards.md).
"""

TRL_HEAD = """
## Keys of TRL

Those that TRL adds to transformers' `TrainingArguments`, all of which may be given too:
[TRL's page](https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig),
[transformers'](https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments). Where a default
differs from TRL's, it is ours.

"""


def main() -> None:
    """Print the page."""
    say(page().removesuffix("\n"))


def page() -> str:
    """The whole page, as Markdown."""
    specs = {key: spec for key in OUR_KEYS if (spec := spec_of(hints(Recipe)[key])) is not None}
    sections = [HEAD, "\n## Our keys\n\n", _table(_our_rows())]
    for key, spec in specs.items():
        sections += [f"\n## `{key}`\n\n{_summary(spec)}\n\n", _table(_spec_rows(spec))]
        if key == "dataset":
            sections += _inside_dataset()
    sections += ["\n## `rewards`\n", REWARDS, TRL_HEAD]
    sections.append(_table(row for config in (ModelConfig, GRPOConfig) for row in _trl_rows(config)))
    return "".join(sections)


def _inside_dataset() -> list[str]:
    source = (
        "\n### A source of a mixture\n\nAn entry of `dataset.path` or `dataset.eval_path`, where that is a list.\n\n"
    )
    rate = f"\n### `dataset.pass_rate`\n\n{_summary(PassRateSpec)} [docs/sampling.md](sampling.md).\n\n"
    return [source, _table(_spec_rows(SourceSpec)), rate, _table(_spec_rows(PassRateSpec))]


def _our_rows() -> Iterable[tuple[str, str, str, str]]:
    fields = {field.name: field for field in dataclasses.fields(Recipe)}
    for key, meaning in OUR_KEYS.items():
        yield key, _type(hints(Recipe)[key]), _default(fields[key]), meaning


def _spec_rows(spec: type[Spec]) -> Iterable[tuple[str, str, str, str]]:
    meanings = attribute_docs(spec)
    for field in dataclasses.fields(spec):
        yield field.name, _type(spec.hints()[field.name]), _default(field), meanings.get(field.name, "")


def _trl_rows(config: type) -> Iterable[tuple[str, str, str, str]]:
    own = inspect.get_annotations(config)
    for field in dataclasses.fields(config):
        if field.name not in own or not field.init:
            continue
        choices = TRL_KEYS[field.name].choices if field.name in TRL_KEYS else ()
        kind = _either(map(_value, choices)) if choices else _type(hints(config)[field.name])
        default = _value(DEFAULTS[field.name]) if field.name in DEFAULTS else _default(field)
        meaning = re.split(r"(?<=[a-z)`])\.\s", str(field.metadata.get("help", "")))[0]
        yield field.name, kind, default, meaning


def attribute_docs(spec: type) -> dict[str, str]:
    """What a dataclass says of each field: in `Attributes:` of its docstring, or in the string under the field."""
    docs: dict[str, str] = {}
    section = inspect.cleandoc(spec.__doc__ or "").partition("Attributes:\n")[2]
    for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
        docs[name] = " ".join(text.split())
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(spec))).body
    assert isinstance(tree, ast.ClassDef)
    for field, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(following, ast.Expr):
            docs[field.target.id] = " ".join(str(ast.literal_eval(following.value)).split())
    return docs


def _summary(spec: type) -> str:
    return inspect.cleandoc(spec.__doc__ or "").partition("\n")[0]


def _table(rows: Iterable[tuple[str, str, str, str]]) -> str:
    lines = ["| key | type | default | |", "|---|---|---|---|"]
    lines += [f"| `{key}` | {kind} | {default} | {_cell(meaning)} |" for key, kind, default, meaning in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split()).rstrip(".")


def _type(hint: Any) -> str:
    """A type as a reader of YAML knows it."""
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", dict: "mapping", Any: "anything"}
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)
    words: list[str] = []
    for option in options:
        kind = typing.get_origin(option) or option
        if kind is Literal:
            words += [_value(word) for word in typing.get_args(option)]
        elif isinstance(kind, type) and issubclass(kind, Spec):
            words += [*map(_value, kind.WORDS), "mapping" if kind.WORDS else "text or mapping"]
        elif option is not type(None):
            words.append("list" if kind is list else names.get(kind, "text"))
    return _either(dict.fromkeys(words))


def _either(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return _value(field.default)
    return "" if field.default_factory is dataclasses.MISSING else _value(_written(field.default_factory()))


def _written(value: Any) -> Any:
    """A default as a recipe would write it."""
    if not isinstance(value, Spec):
        return value
    words: Mapping[str, Any] = value.WORDS
    changed = {key: entry for key, entry in value.as_dict().items() if entry != getattr(type(value), key, None)}
    return next((word for word, mapping in words.items() if type(value)(**mapping) == value), changed)


def _value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, dict):
        return "`{" + ", ".join(f"{key}: {entry}" for key, entry in value.items()) + "}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    main()
