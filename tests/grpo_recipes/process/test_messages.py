"""What `quiet.libraries` keeps from the screen, and what it lets through."""

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

from grpo_recipes import train
from grpo_recipes.process import messages as quiet
from tests.support import launching


def bar(**options: object) -> None:
    for _ in logging.tqdm(range(2), **options):
        pass


def test_only_what_nobody_can_change_is_silenced(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with quiet.libraries():
            TrainingArguments(str(tmp_path), gradient_checkpointing=True, use_cpu=True)
            warnings.warn("`use_liger_kernel=True` is deprecated", FutureWarning, stacklevel=1)
            for title in ("Loading weights", "Writing model shards", "Fetching 3 files"):
                bar(desc=title)
            bar(desc="Downloading quietly", disable=True)
    assert [str(warning.message) for warning in shown] == ["`use_liger_kernel=True` is deprecated"]
    said = capsys.readouterr().err
    assert "Fetching 3 files" in said
    assert "eights" not in said
    assert "shards" not in said
    assert "quietly" not in said


def test_it_ends_with_its_block(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), quiet.libraries():
        raise KeyError
    bar(desc="Loading weights")
    assert "Loading weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "warns"),
    [(["lm_head.weight"], False), (["model.embed_tokens.weight"], False), (["lm_head.weight", "model.norm.weight"], True),
     (["lm_head.weight", "model.embed_tokens.weight"], True), (["elsewhere"], True)],
)  # fmt: skip
def test_a_second_name_of_a_loaded_weight_is_not_missing(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, missing: list[str], warns: bool
) -> None:
    """transformers' own message, so that another wording of it fails here."""
    model = AutoModelForCausalLM.from_pretrained(launching.build_policy(tmp_path / "policy"))
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    with quiet.tied_weights(model):
        trainer._issue_warnings_after_load(SimpleNamespace(missing_keys=missing, unexpected_keys=[]))
    assert ("missing keys" in caplog.text) is warns
    caplog.clear()
    trainer._issue_warnings_after_load(SimpleNamespace(missing_keys=missing, unexpected_keys=[]))
    assert "missing keys" in caplog.text


def test_an_untied_weight_is_missed(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(launching.build_policy(tmp_path / "policy", tied=False))
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    with quiet.tied_weights(model):
        trainer._issue_warnings_after_load(SimpleNamespace(missing_keys=["lm_head.weight"], unexpected_keys=[]))
    assert "missing keys" in caplog.text


def test_a_resume_of_a_tied_model_misses_nothing(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    changes = {"max_steps": 1, "report_to": "none"}
    config = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, tmp_path / "run", **changes)
    assert train.main(["--config", str(config)]) == 0
    assert train.main(["--config", str(config), "--resume_from_checkpoint", "true", "--max_steps", "2"]) == 0
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    assert "missing keys" not in caplog.text
