"""Layout that a run is expected to get, compared with the one that a trainer chooses."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PretrainedConfig

from grpo_recipes.checks.checks import Machine, dry_config
from grpo_recipes.generation.models import kept_scores
from grpo_recipes.recipe.recipe import Recipe, parse_recipe
from grpo_recipes.training import layout_facts
from grpo_recipes.training.layout_facts import LayoutFacts, Records, describe, has_router_loss
from grpo_recipes.training.layout_rules import FSDP2, VERIFIED_UNDER_SHARDING, ZERO3, attention_window
from grpo_recipes.training.packing import Layout
from tests.grpo_recipes.training.test_packing import flat, layout_of, scored, trainer_on
from tests.support.recorded import Recording
from tests.tools.models import build

RAGGED = Recording.random(prompts=3, group=3, seed=3)
TYPES = ["llama", "qwen3_5_text", "gpt_oss", "mamba2", "mamba", "gpt2", "camembert", "ministral3", "recurrent_gemma"]
"""Model types with each layout. The first ones are compared in the quick tests."""

TOKENS = 40


def recipe(*changes: str) -> Recipe:
    return parse_recipe(["--config", "gsm8k-qwen2.5-1.5b-24gb", *changes])


@pytest.fixture(scope="module")
def policies() -> dict[str, nn.Module]:
    """Return a tiny model of some types."""
    return {kind: build(kind) for kind in ("llama", "qwen3_5_text", "gpt_oss", "mamba2", "gpt2", "qwen3_next")}


def expected(model: nn.Module, *changes: str, sharding: str = "none", tokens: int = TOKENS) -> LayoutFacts:
    run = recipe(*changes)
    config, full_kl = dry_config(run, Machine(1, bf16=True)), run.kl_estimator == "full"
    return describe(config, model, tokens, run.micro_batching, full_kl=full_kl, sharding=sharding)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "router"), [*((kind, "0") for kind in TYPES), ("gpt_oss", "0.1")])
def test_the_expected_layout_is_the_one_that_a_trainer_chooses(kind: str, router: str, tmp_path: Path) -> None:
    model, config = build(kind), {"router_aux_loss_coef": float(router)} if kind == "gpt_oss" else {}
    changes = ["--router_aux_loss_coef", router] if config else []
    found = expected(model, *changes)
    trainer = trainer_on(model, tmp_path, **config)
    assert has_router_loss(trainer.args, model) is trainer.aux_loss_enabled
    scored(trainer, flat(RAGGED))
    assert found.layout is layout_of(trainer)


def test_each_type_has_its_recorded_layout(policies: dict[str, nn.Module]) -> None:
    layouts = {kind: expected(model, "--router_aux_loss_coef", "0").layout for kind, model in policies.items()}
    assert layouts == {
        **{"llama": Layout.PACKED, "qwen3_5_text": Layout.SHARED, "gpt_oss": Layout.SHARED},
        **{"mamba2": Layout.SHARED, "gpt2": Layout.SHARED_PADDED, "qwen3_next": Layout.SHARED},
    }
    assert expected(policies["llama"]).reason == ""
    assert "linear_attention" in expected(policies["qwen3_5_text"]).reason


def test_a_router_loss_trims_rows_and_the_change_is_named(policies: dict[str, nn.Module]) -> None:
    found = expected(policies["gpt_oss"], "--router_aux_loss_coef", "0.01")
    assert found.layout is Layout.TRIMMED
    assert "router loss" in found.reason


def test_only_verified_types_share_prompts_where_weights_are_split(policies: dict[str, nn.Module]) -> None:
    assert {"qwen3_5_text", "mamba2"} < VERIFIED_UNDER_SHARDING
    assert expected(policies["qwen3_5_text"], sharding=ZERO3).layout is Layout.SHARED
    assert expected(policies["qwen3_next"], sharding=FSDP2).layout is Layout.TRIMMED
    for sharding in (FSDP2, ZERO3):
        assert expected(policies["mamba2"], sharding=sharding).layout is Layout.SHARED
    assert expected(policies["gpt2"], sharding=ZERO3).layout is Layout.PADDED
    assert expected(policies["llama"], sharding=ZERO3).layout is Layout.PACKED
    assert expected(policies["qwen3_next"], sharding="zero2").layout is Layout.SHARED


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        (["--neftune_noise_alpha", "5"], Layout.PADDED),
        (["--pad_to_multiple_of", "8"], Layout.PADDED),
        (["--torch_compile", "true"], Layout.TRIMMED),
        (["--torch_compile_backend", "inductor"], Layout.TRIMMED),
        (["--pad_to_multiple_of", "auto"], Layout.PACKED),
        (["--micro_batching.layout", "trimmed"], Layout.TRIMMED),
        (["--micro_batching", "off"], Layout.PADDED),
        (["--beta", "0.04", "--kl_estimator", "full"], Layout.PADDED),
    ],
)
def test_settings_rule_layouts_out(changes: list[str], layout: Layout, policies: dict[str, nn.Module]) -> None:
    assert expected(policies["llama"], *changes).layout is layout


def test_dropout_of_an_adapter_trims_rows_unless_the_run_ends_it(policies: dict[str, nn.Module]) -> None:
    adapter = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
    model = get_peft_model(copy.deepcopy(policies["llama"]), adapter)
    found = expected(model, "--disable_dropout", "false")
    assert found.layout is Layout.TRIMMED
    assert "dropout" in found.reason
    assert expected(model).layout is Layout.PACKED


def test_long_rows_leave_a_window_or_the_kept_scores(policies: dict[str, nn.Module]) -> None:
    model = copy.deepcopy(policies["llama"])
    model.config.sliding_window = 64
    assert attention_window(model.config) == 64
    assert expected(model, tokens=64).layout is Layout.PACKED
    assert expected(model, tokens=65).layout is Layout.SHARED
    assert expected(model, tokens=65, sharding=ZERO3).layout is Layout.TRIMMED
    model.config.index_topk = 70
    assert kept_scores(model.config)[1] == 70
    assert expected(model, tokens=70).layout is Layout.SHARED
    found = expected(model, tokens=71)
    assert found.layout is Layout.PADDED
    assert {"`index_topk`", "70", "71"} <= {*found.reason.split()}


def test_a_type_that_is_not_recorded_is_unknown(policies: dict[str, nn.Module]) -> None:
    model: Any = copy.deepcopy(policies["llama"])
    model.config.model_type = "other"
    found = expected(model)
    assert found.layout is None
    assert "other" in found.describe()


@pytest.mark.parametrize(
    ("record", "changes", "found", "reason"),
    [
        (Layout.PACKED, [], Layout.PACKED, ""),
        (Layout.SHARED, [], Layout.SHARED, "shared prompts"),
        (Layout.TRIMMED, [], Layout.TRIMMED, "shared prompts"),
        (Layout.TRIMMED, ["--micro_batching.layout", "trimmed"], Layout.TRIMMED, ""),
        (Layout.PADDED, [], Layout.PADDED, "padding"),
        (Layout.SHARED_PADDED, [], Layout.SHARED_PADDED, "padding"),
        (Layout.SHARED_PADDED, ["--micro_batching.layout", "shared"], Layout.SHARED_PADDED, "padding"),
        (Layout.SHARED_PADDED, ["--micro_batching.layout", "trimmed"], Layout.PADDED, "padding"),
        (Layout.SHARED_PADDED, ["--torch_compile", "true"], Layout.PADDED, "padding"),
    ],
)
def test_the_recorded_layout_limits_that_of_a_run(
    record: Layout, changes: list[str], found: Layout, reason: str, policies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_facts, "recorded", lambda: Records("5.0", {"llama": record}))
    run = expected(policies["llama"], *changes)
    assert run.layout is found
    assert reason in run.reason
    assert bool(run.reason) is bool(reason)


@pytest.mark.parametrize(
    ("text", "coefficient", "has_loss"),
    [
        ({"output_router_logits": False, "router_aux_loss_coef": 0.01}, None, True),
        ({"output_router_logits": False, "router_aux_loss_coef": 0.0}, None, False),
        ({"output_router_logits": False}, None, False),
        ({"output_router_logits": False, "router_aux_loss_coef": 0.01}, 0.0, False),
        ({"output_router_logits": False}, 1.0, True),
        ({"router_aux_loss_coef": 0.01}, 0.5, False),
    ],
    ids=str,
)
def test_a_router_loss_needs_a_router_and_a_coefficient(
    text: dict[str, Any], coefficient: float | None, has_loss: bool
) -> None:
    model: Any = nn.Identity()
    model.config = PretrainedConfig(**text)
    config = SimpleNamespace(router_aux_loss_coef=coefficient)
    assert has_router_loss(config, model) is has_loss
