"""Transformers' continuous batching with packed rows, in a cache of bounded size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.training.packing import Layout
from grpo_recipes.training.trl_patches import continuous_batching
from tests.support.architectures import trainer

CB = {"use_transformers_continuous_batching": True}


@pytest.mark.slow
def test_continuous_batching_runs_beside_packed_rows_in_a_bounded_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path, max_steps=2, max_completion_length=8, **CB)
    seen: list[tuple[str, int, int]] = []
    generate = run.model.generate_batch

    def watched(prompts: Any, **how: Any) -> Any:
        sizes = how["continuous_batching_config"]
        seen.append((run.model.config._attn_implementation, sizes.num_blocks, sizes.max_batch_tokens))
        return generate(prompts, **how)

    monkeypatch.setattr(run.model, "generate_batch", watched, raising=False)
    run.train()
    assert list(run._log_probs._layouts.values()) == [Layout.PACKED]
    assert run.model.config._attn_implementation == "sdpa"
    assert seen == [("sdpa", 16, 512)] * 2, "one page of 256 tokens for each of 16 rows"


def test_a_cache_on_a_cpu_has_room_for_every_row_unless_the_user_sizes_it(tmp_path: Path) -> None:
    for given, prompts, sizes in (
        ({}, [[5] * 250, [5, 6]], (3, 512)),  # 258 tokens take two pages of 256
        ({}, [[5, 6]] * 1000, (1000, 1000)),
        ({"num_blocks": 7, "max_batch_tokens": 9}, [[5, 6]] * 12, (7, 9)),
    ):
        run = trainer(tmp_path, **CB, transformers_continuous_batching_config=given)
        config = run.continuous_batching_config
        before = (config.num_blocks, config.max_batch_tokens)
        with continuous_batching(config, run.model, prompts, 8):
            assert (config.num_blocks, config.max_batch_tokens) == sizes
        assert (config.num_blocks, config.max_batch_tokens) == before
