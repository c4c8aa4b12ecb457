"""Which numbers a key may have, against the values that the libraries behind it take."""

import dataclasses
import math
from importlib import metadata
from types import SimpleNamespace

import pytest
from transformers.integrations import integration_utils
from trl import GRPOConfig, ModelConfig, import_utils

from grpo_recipes.checks import limits, packages

NUMBERS = {field.name: field.default for config in (GRPOConfig, ModelConfig) for field in dataclasses.fields(config)}


@pytest.mark.parametrize("key", limits.RANGES)
def test_every_range_is_of_a_key_that_exists_and_holds_its_default(key: str) -> None:
    assert key in NUMBERS
    limits.check({key: NUMBERS[key]})


@pytest.mark.parametrize(
    ("allowed", "inside", "outside", "words"),
    [
        (limits.POSITIVE, (1e-9, 5), (0, -1, math.nan, math.inf), "above 0"),
        (limits.NOT_NEGATIVE, (0, 5), (-1e-9, math.nan, math.inf), "of at least 0"),
        (limits.SHARE, (0.1, 1), (0, 1.1, math.nan), "above 0 and at most 1"),
        (limits.Range(0, 1, below=True), (0, 0.99), (1, -0.1), "of at least 0 and below 1"),
        (limits.Range(1, or_=-1), (1, 9, -1), (0, -2, math.inf), "of at least 1, or -1"),
    ],
)
def test_a_range_holds_what_its_words_say(allowed, inside, outside, words: str) -> None:
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in outside)
    assert str(allowed) == words


def test_a_number_without_a_range_is_finite() -> None:
    limits.check({"entropy_target": -3.0, "warmup_steps": None, "bf16": True})
    with pytest.raises(limits.UserError, match="`entropy_target` is nan: set a finite number"):
        limits.check({"entropy_target": math.nan})


@pytest.mark.parametrize(("rate", "is_warned_of"), [(1e-6, False), (1e-2, False), (0.0101, True)])
def test_a_high_learning_rate_is_warned_of(rate: float, is_warned_of: bool) -> None:
    assert bool(limits.cautions(SimpleNamespace(learning_rate=rate))) is is_warned_of


# Packages.


@pytest.mark.parametrize("tracker", integration_utils.INTEGRATION_TO_CALLBACK)
def test_every_tracker_of_transformers_is_asked_after(tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = packages.TRACKER_PACKAGES.get(tracker, tracker)
    for is_there in (True, False):
        monkeypatch.setattr(integration_utils, f"is_{package}_available", lambda is_there=is_there: is_there)
        said = packages.missing(SimpleNamespace(report_to=tracker, use_vllm=False))
        assert [f"`report_to: {tracker}` needs the package {package}" in sentence for sentence in said] == (
            [] if is_there else [True]
        )


@pytest.mark.parametrize("report_to", ["none", "all", ["none"], [], None])
def test_no_tracker_needs_no_package(report_to) -> None:
    assert packages.missing(SimpleNamespace(report_to=report_to, use_vllm=False)) == []


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (None, "needs vLLM, which is not installed here"),
        ("0.30.0", None),
        ("0.31.0+cu129", None),
        ("0.10.2", "from 0.22.0 to 0.31.0, and you have version 0.10.2 installed: install one of those"),
        ("0.32.0", "from 0.22.0 to 0.31.0, and you have version 0.32.0 installed: install one of those"),
    ],
)
def test_vllm_must_be_there_in_a_version_that_trl_takes(
    version: str | None, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `trl.import_utils` asks of the installation, answered here; the versions are TRL's own."""
    find_spec, version_of = import_utils.importlib.util.find_spec, metadata.version
    monkeypatch.setattr(
        import_utils.importlib.util, "find_spec", lambda name: version if name == "vllm" else find_spec(name)
    )
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "vllm" else version_of(name))
    monkeypatch.setitem(import_utils.PACKAGE_DISTRIBUTION_MAPPING, "vllm", ["vllm"])
    said = packages.missing(SimpleNamespace(report_to="none", use_vllm=True))
    assert len(said) == (says is not None)
    assert says is None or says in said[0]
