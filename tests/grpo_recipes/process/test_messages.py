"""Log messages: ours once per subject, and those of the libraries that are hidden or shown."""

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

from grpo_recipes.process.messages import Announcer, fewer_library_messages, tied_weights
from tests.support import launching


def test_a_sentence_is_logged_once_per_key_and_announcer() -> None:
    logged: list[str] = []
    announcer, another = Announcer(logged.append), Announcer(logged.append)
    announcer.once("step 1", "filters")
    announcer.once("step 2", "filters")
    announcer.once("step 3", "dtype")
    another.once("step 4", "filters")
    for _ in range(2):
        another.once("step 5")
    assert logged == ["step 1", "step 3", "step 4", "step 5"]
    assert announcer.keys == {"filters", "dtype"}


@pytest.fixture(autouse=True)
def bars_are_enabled() -> None:
    """Undo what another test of the same process may have disabled."""
    logging.enable_progress_bar()


def draw_bar(**options: object) -> None:
    for _ in logging.tqdm(range(2), **options):
        pass


def test_only_messages_that_nobody_can_act_on_are_hidden(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with fewer_library_messages():
            TrainingArguments(str(tmp_path), gradient_checkpointing=True, use_cpu=True)
            warnings.warn("`use_liger_kernel=True` is deprecated", FutureWarning, stacklevel=1)
            for title in ("Loading weights", "Writing model shards", "Fetching 3 files"):
                draw_bar(desc=title)
            draw_bar(desc="Downloading quietly", disable=True)
    assert [str(warning.message) for warning in shown] == ["`use_liger_kernel=True` is deprecated"]
    printed = capsys.readouterr().err
    assert "Fetching 3 files" in printed
    assert "eights" not in printed
    assert "shards" not in printed
    assert "quietly" not in printed


def test_messages_are_shown_again_after_the_block(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), fewer_library_messages():
        raise KeyError
    draw_bar(desc="Loading weights")
    assert "Loading weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "tied", "warns"),
    [
        (["lm_head.weight"], True, False),
        (["lm_head.weight", "model.embed_tokens.weight"], True, True),
        (["lm_head.weight"], False, True),
    ],
)
def test_a_second_name_of_a_loaded_weight_is_not_reported_as_missing(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, missing: list[str], tied: bool, warns: bool
) -> None:
    """The warning is made by transformers itself, so a change of its wording fails here."""
    model = AutoModelForCausalLM.from_pretrained(launching.build_policy(tmp_path / "policy", tied=tied))
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    with tied_weights(model):
        trainer._issue_warnings_after_load(SimpleNamespace(missing_keys=missing, unexpected_keys=[]))
    assert ("missing keys" in caplog.text) is warns
    caplog.clear()
    trainer._issue_warnings_after_load(SimpleNamespace(missing_keys=missing, unexpected_keys=[]))
    assert "missing keys" in caplog.text


LOG = "from grpo_recipes.process.messages import log_progress; log_progress('step 1: 5 tokens computed')"


@pytest.mark.parametrize(
    ("setup", "lines"),
    [
        ("", ["step 1: 5 tokens computed"]),
        pytest.param("level=logging.WARNING", [], marks=pytest.mark.slow),  # it silences them
    ],
)
def test_a_line_of_progress_is_shown_in_a_script_with_and_without_logging(setup: str, lines: list[str]) -> None:
    script = f"import logging; logging.basicConfig({setup})\n{LOG}" if setup else LOG
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout + done.stderr).splitlines() == lines
