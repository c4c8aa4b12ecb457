"""InternLM2 checkpoints with the scores and token ids of the published code, and the tests that run without torch."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

collect_ignore = [] if importlib.util.find_spec("torch") else ["test_internlm2.py", "test_reward_model.py"]


@pytest.fixture(scope="session")
def recorded_internlm2(internlm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return conversations with the published code's token ids, and its scores for each of the `checkpoints`."""
    spec = importlib.util.spec_from_file_location("make_tiny", internlm2_dir / "make_tiny.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    recorded = json.loads((internlm2_dir / "parity.json").read_text(encoding="utf-8"))
    for checkpoint in recorded["checkpoints"]:
        checkpoint["folder"] = tmp_path_factory.mktemp("recorded")
        maker.build(checkpoint["folder"], **checkpoint["arguments"])
    return recorded
