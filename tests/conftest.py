"""Fixtures that every test folder shares."""

import functools
import gc
import json
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

# Tiny models gain nothing from threads, and lose a factor of ten to them where cores are shared. And sums of floats
# depend on how many there are: no test may. Torch, which is imported later, reads this, and so do other processes.
os.environ["OMP_NUM_THREADS"] = "1"

# A script's `( … &)` starts its processes with SIGINT ignored. The processes that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The tables that tests make go with the tests, those of the processes that they start too.
_CACHE = tempfile.TemporaryDirectory(prefix="datasets-of-tests-")
os.environ["HF_DATASETS_CACHE"] = _CACHE.name

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def _shared(*parts: str) -> Path:
    path = SHARED_DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {path}, which lies beside a development checkout and is not part of the project")
    return path


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    """Return the folder with GSM8K's train.jsonl, test.jsonl and model_solutions_dev.jsonl."""
    return _shared("gsm8k")


@pytest.fixture(scope="session")
def internlm2_dir() -> Path:
    """Return the folder with InternLM2's tokenizer, configuration, checkpoint maker and recorded scores."""
    return _shared("internlm2")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the quickstart's untrained policy in a folder that transformers loads."""
    import torch

    from grpo_recipes.quickstart import WarmStart, build_policy, build_tokenizer, demonstrations
    from grpo_recipes.recipe.dataset import DatasetSpec

    torch.manual_seed(0)
    settings = WarmStart(demonstrations=500)
    tokenizer = build_tokenizer(demonstrations(settings, DatasetSpec("arithmetic")), settings.vocab_size)
    folder = tmp_path_factory.mktemp("tiny-model")
    build_policy(tokenizer, settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny policy whose chat template renders tools, calls and results."""
    from tests.support.tiny import save_tool_policy

    return save_tool_policy(tmp_path_factory.mktemp("tool-model"))


@pytest.fixture(scope="session")
def gsm8k_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty rows in GSM8K's schema."""
    path = tmp_path_factory.mktemp("gsm8k") / "train.jsonl"
    rows = (
        {"question": f"Ann has {n} figs and eats 1. How many are left?", "answer": f"{n}-1={n - 1}\n#### {n - 1}"}
        for n in range(1, 41)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark as slow all nightly tests, and the cases that `one_case_in` does not keep."""
    if item.get_closest_marker("nightly"):
        item.add_marker("slow")
    for share in item.iter_markers("one_case_in"):
        if not hasattr(item, "callspec"):
            raise pytest.UsageError(f"{item.nodeid} has no parameters: remove `one_case_in`")
        if sum(item.callspec.indices.values()) % share.args[0]:
            item.add_marker("slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of the CPU on another device."""
    from tests.support import device

    if device.NAME != "cpu":
        others = [item for item in items if item.get_closest_marker("gpu") is None]
        items[:] = [item for item in items if item.get_closest_marker("gpu") is not None]
        config.hook.pytest_deselected(items=others)


def pytest_configure(config: pytest.Config) -> None:
    """Remove the locks that a killed test run left on DeepSpeed's compiled extensions, before any worker starts."""
    if config.pluginmanager.hasplugin("cacheprovider") and not hasattr(config, "workerinput"):
        for lock in config.cache.mkdir("torch_extensions").glob("*/lock"):
            lock.unlink()


@pytest.fixture(scope="session")
def extensions(pytestconfig: pytest.Config) -> str:
    """Return a folder for DeepSpeed's compiled extensions that is kept between runs: the first use takes a minute."""
    return str(pytestconfig.cache.mkdir("torch_extensions"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what is imported with the tests out of garbage collections, and do none meanwhile."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _device_of_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test marked `gpu` on the device of the tests."""
    from tests.support import device

    on_device = request.node.get_closest_marker("gpu") is not None
    with device.device_of_tests() if on_device else nullcontext():
        yield


@pytest.fixture(autouse=True, scope="session")
def _cheaper_accelerate() -> Iterator[None]:
    """Skip two costs of accelerate that a tiny run notices.

    Accelerate reads DeepSpeed's metadata anew whenever it unwraps a model, some eight times a training step. Every
    `train()` ends in a full garbage collection. Python's automatic collections are enough for tiny models.
    """
    imports, memory = (sys.modules.get(f"accelerate.utils.{name}") for name in ("imports", "memory"))
    with pytest.MonkeyPatch.context() as patch:
        if imports is not None:
            patch.setattr(imports, "_is_package_available", functools.cache(imports._is_package_available))
        if memory is not None:
            patch.setattr(memory, "clear_device_cache", lambda garbage_collection=False: None)
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many cells were held against TRL, the worst differences met, and other figures measured.

    Tests record them as properties, which travel with their reports from the processes of `pytest -n`.
    """
    cells: dict[str, list[dict[str, Any]]] = {}
    for cell in _recorded(terminalreporter, "cell"):
        cells.setdefault(cell["title"], []).append(cell)
    for title, found in sorted(cells.items()):
        # A NaN must not hide: it counts as infinitely far.
        worst = {
            key: max(cell[key] if cell[key] == cell[key] else float("inf") for cell in found)
            for key in ("loss", "gradient", "metric")
        }
        terminalreporter.write_line(
            f"{title}: {len(found)} cells, worst difference: loss {worst['loss']:.1e}, "
            f"gradient {worst['gradient']:.1e}, metrics {worst['metric']:.1e}"
        )
    for line in sorted(_recorded(terminalreporter, "line")):
        terminalreporter.write_line(line)


def _recorded(terminalreporter: pytest.TerminalReporter, name: str) -> Iterator[Any]:
    """Yield the properties of this name that tests recorded, those of failed tests included."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            if report.when == "call":
                yield from (value for key, value in report.user_properties if key == name)
