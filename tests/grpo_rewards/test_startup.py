"""Settings that a command makes before it imports a library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STATE = "import os, sys; print(os.environ['HF_HUB_DISABLE_TELEMETRY'], os.environ['VLLM_NO_USAGE_STATS'])"
LARGE = ("huggingface_hub", "torch", "bitsandbytes", "jsonschema", "re2")
LIBRARIES = f"import grpo_rewards; grpo_rewards.json_schema; print([name for name in {LARGE} if name in sys.modules])"


@pytest.mark.parametrize(
    ("package", "given", "kept"),
    [("grpo_recipes", {}, "1 1"), ("grpo_rewards", {"HF_HUB_DISABLE_TELEMETRY": "0"}, "0 1")],
)
def test_statistics_are_off_before_a_library_is_imported(package: str, given: dict[str, str], kept: str) -> None:
    program = f"from {package}.cli import main\ntry:\n    main(['--version'])\nfinally:\n    {STATE}; {LIBRARIES}"
    names = ("HF_HUB_DISABLE_TELEMETRY", "VLLM_NO_USAGE_STATS")
    others = {name: value for name, value in os.environ.items() if name not in names}
    environment = {**others, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'rewards'}", **given}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == [kept, "[]"]
