"""A hub that nothing answers for."""

import datasets
import pytest


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
