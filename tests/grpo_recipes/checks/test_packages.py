"""Packages that a recipe needs and that may be missing: trackers and vLLM."""

from importlib import metadata
from types import SimpleNamespace

import pytest
from transformers.integrations import integration_utils
from trl import import_utils

from grpo_recipes.checks import packages


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
