"""docs/recipes.md agrees with the code."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from trl import GRPOConfig, ModelConfig

from docs import recipe_keys as documentation
from grpo_recipes.recipe.dataset import DatasetSpec, PassRateSpec, SourceSpec
from grpo_recipes.recipe.recipe import OUR_KEYS, Recipe, parse_recipe
from grpo_recipes.recipe.specs import (
    MicroBatching,
    OfflineSpec,
    ReferenceSpec,
    SamplingSpec,
    ToolLimits,
    hints,
    spec_of,
)
from grpo_recipes.recipe.trl_keys import DEFAULTS

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
SPECS = (DatasetSpec, SourceSpec, PassRateSpec, ReferenceSpec, MicroBatching, OfflineSpec, SamplingSpec, ToolLimits)


def test_the_page_is_up_to_date() -> None:
    made = "python -m docs.recipe_keys > docs/recipes.md"
    assert PAGE.read_text(encoding="utf-8") == documentation.page(), made


def test_every_spec_of_a_recipe_has_a_table() -> None:
    used = {spec for key in OUR_KEYS if (spec := spec_of(hints(Recipe)[key])) is not None}
    assert used | {SourceSpec, PassRateSpec} == set(SPECS)


@pytest.mark.parametrize("spec", SPECS)
def test_every_key_has_a_description(spec: type) -> None:
    meanings = documentation.attribute_docs(spec)
    for field in dataclasses.fields(spec):
        assert len(meanings[field.name].split()) > 2, field.name


def rows() -> dict[str, list[str]]:
    """Return the rows of the page's tables: key, then type, default and meaning."""
    cells = (
        re.split(r"(?<!\\) \| ", line.strip("| \n")) for line in PAGE.read_text().splitlines() if line.startswith("| `")
    )
    return {row[0].strip("`"): row[1:] for row in cells}


def test_printed_defaults_equal_those_of_a_minimal_recipe(tmp_path: Path) -> None:
    """Every printed default of TRL's keys, read as YAML, is the value in a minimal recipe."""
    file = tmp_path / "r.yaml"
    file.write_text("model_name_or_path: m\ndataset: arithmetic\nrewards: gsm8k_correctness\n")
    config, found = parse_recipe(["--config", str(file)]).config, rows()
    checked = 0
    for field in dataclasses.fields(GRPOConfig):
        if field.name not in found or not hasattr(config, field.name):
            continue
        default = found[field.name][1].strip("`")
        expected = getattr(config, field.name)
        if default == "–":
            assert expected is None, field.name
        elif not isinstance(expected, (dict, list)):
            assert str(yaml.safe_load(default)).lower() in (str(expected).lower(), default.lower()), field.name
        checked += 1
    assert checked > 50
    assert all(found[key][1] == f"`{str(value).lower()}`" for key, value in DEFAULTS.items() if key in found)


@pytest.mark.parametrize("config", [GRPOConfig, ModelConfig])
def test_the_page_has_every_key_that_trl_adds(config: type) -> None:
    assert {name for name in config.__annotations__ if not name.startswith("_")} <= set(rows())
