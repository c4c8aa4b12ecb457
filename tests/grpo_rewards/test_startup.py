"""Settings that a command makes before it imports a library."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STATE = "print(os.environ['HF_HUB_DISABLE_TELEMETRY'], os.environ['VLLM_NO_USAGE_STATS'])"
LARGE = ("huggingface_hub", "torch", "bitsandbytes", "jsonschema", "re2")
LIBRARIES = f"import grpo_rewards; grpo_rewards.json_schema; print([name for name in {LARGE} if name in sys.modules])"
COMMANDS = f"""
import os, sys
for package, given in (("grpo_recipes", {{}}), ("grpo_rewards", {{"HF_HUB_DISABLE_TELEMETRY": "0"}})):
    for name in ("HF_HUB_DISABLE_TELEMETRY", "VLLM_NO_USAGE_STATS"):
        os.environ.pop(name, None)
    os.environ.update(given)
    try:
        __import__(package + ".cli").cli.main(["--version"])
    except SystemExit:
        {STATE}
{LIBRARIES}
"""


def test_statistics_are_off_before_a_library_is_imported() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'rewards'}"}
    done = subprocess.run([sys.executable, "-c", COMMANDS], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1::2] == ["1 1", "0 1"]
    assert done.stdout.splitlines()[4] == "[]"
