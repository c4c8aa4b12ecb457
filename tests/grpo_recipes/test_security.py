"""Harmful runs, models and datasets do no harm, and no file of a run holds a secret.

Each test places a canary where harm would be done and runs the commands on it: a secret that a file must not hold, code
that would leave a file behind, an escape sequence, or a link out of a folder. `docs/security.md` lists what is trusted.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib import request

import pandas as pd
import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, ModelConfig

from grpo_recipes import GRPOTrainer, cli, train
from grpo_recipes.checks.checks import Machine, check
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_recipes.recipe.recipe import OUR_KEYS, find_file, parse_recipe, resolved, shipped_files
from grpo_recipes.recipe.specs import MicroBatching, ReferenceSpec, SamplingSpec
from grpo_recipes.reports.model_card import write_model_card
from grpo_recipes.runs.record import add_launch, describe_launch
from grpo_rewards import cli as rewards_cli
from grpo_rewards.redaction import HIDDEN, hidden_places, is_secret, redacted
from grpo_rewards.registry import REGISTERED, resolve
from grpo_rewards.terminal import visible, visible_lines
from tests.repo.test_architecture import modules
from tests.support import launching
from tests.support.synthetic import healthy_completions, ramp, write_run

COMMANDS = {"grpo-recipes": cli.main, "grpo-rewards": rewards_cli.main, "train": train.main}


def run_command(line: str, *, stdin: str = "") -> tuple[int, str]:
    """Return the exit code and the output of a command line."""
    program, *arguments = shlex.split(line)
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            code = COMMANDS[program](arguments)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
    output = printed.getvalue()
    assert "Traceback" not in output, output
    return code, output


def mostly_slow(cases: Sequence[Any], quick: Sequence[int]) -> list[Any]:
    """Return the cases as parameters, all of them slow except those at the places `quick`."""
    return [
        pytest.param(case, marks=() if place in quick else pytest.mark.slow, id=str(case))
        for place, case in enumerate(cases)
    ]


# Secrets

SECRETS = {
    "hub_token": "canary-of-the-hub",
    "token": "canary-of-the-model",
    "api_key": "canary-of-a-judge",
    "Authorization": "Bearer canary-of-a-header",
    "password": "canary-of-a-password",
    "shape": "hf_canarycanarycanarycanary",
    "url": "someone:canary-of-a-url",
}


def test_the_hub_token_is_the_only_hidden_key_of_trl() -> None:
    names = [name for owner in (GRPOConfig, ModelConfig) for name in owner.__dataclass_fields__]
    assert [name for name in names if is_secret(name, "x")] == ["hub_token"]


def secret_recipe(folder: Path, policy: Path, **changes: Any) -> Path:
    """Write a recipe with a secret in every possible place, and return its path. Its reward quotes them if it fails."""
    (folder / "keyed.py").write_text(
        "from dataclasses import dataclass, field\n"
        "@dataclass(frozen=True)\n"
        "class Keyed:\n"
        "    api_key: str = ''\n    headers: dict = field(default_factory=dict)\n"
        "    settings: dict = field(default_factory=dict)\n"
        "    base_url: str = ''\n    fails: bool = False\n    name: str = 'keyed'\n"
        "    @property\n    def __name__(self): return self.name\n"
        "    def __call__(self, prompts, completions, **columns):\n"
        "        if self.fails: raise RuntimeError(f'the service refuses {self.api_key} at {self.base_url}')\n"
        "        return [float(len(set(text))) for text in completions]\n"
    )
    kwargs = {
        "api_key": SECRETS["api_key"],
        "headers": {"Authorization": SECRETS["Authorization"], "x-trace": SECRETS["shape"]},
        "settings": {"password": SECRETS["password"]},
        "base_url": f"https://{SECRETS['url']}@host/v1",
        **changes.pop("kwargs", {}),
    }
    rows = launching.write_rows(folder / "rows.jsonl", 8)
    values = {
        "rewards": [{"name": "keyed.Keyed", "kwargs": kwargs}],
        "model_init_kwargs": {"token": SECRETS["token"]},
        "hub_token": SECRETS["hub_token"],
        "max_steps": 1,
        **changes,
    }
    return launching.write_recipe(folder / "mine.yaml", policy, rows, folder / "run", **values)


def canaries(folder: Path, secrets: Iterable[str] = SECRETS.values()) -> list[str]:
    """Return the files of a folder that contain one of `secrets`, with the secret. Archives are unpacked."""
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for path in list(contents):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                contents |= {path / name: archive.read(name) for name in archive.namelist()}
    values = [secret.removeprefix("Bearer ").encode() for secret in secrets]
    return [f"{path}: {value!r}" for path, content in contents.items() for value in values if value in content]


@pytest.fixture
def secrets_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "keyed", raising=False)
    monkeypatch.setenv("HF_TOKEN", "")
    return tmp_path


def test_a_record_and_a_card_hold_no_secret(secrets_path: Path) -> None:
    rewards = json.dumps([{"name": "keyed.Keyed", "kwargs": {"api_key": SECRETS["api_key"]}}])
    config = secret_recipe(secrets_path, secrets_path)
    for given in (
        ["--rewards", rewards],
        ["--hub_token=" + SECRETS["hub_token"]],
        ["--hub-token", SECRETS["hub_token"]],
        ["--rewards.0.kwargs.api_key", SECRETS["api_key"]],
        ["--model_init_kwargs.token", SECRETS["token"]],
    ):
        recipe = parse_recipe(["--config", str(config), *given])
        checked = check(recipe, Machine(1, bf16=False))
        entry = describe_launch(
            recipe.as_dict(), vars(recipe.config), checked.rewards, recipe.arguments, train_prompts=8, world_size=1
        )
        add_launch(secrets_path / "run", entry)
        write_model_card(secrets_path / "run")
        assert entry["recipe"]["hub_token"] == entry["recipe"]["rewards"][0]["kwargs"]["api_key"] == HIDDEN
    assert canaries(secrets_path / "run") == []


def test_a_report_on_a_record_of_another_program_holds_no_secret(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    record = json.loads((folder / "run.json").read_text())
    record["recipe"]["rewards"] = [{"name": "x.y", "kwargs": {"api_key": SECRETS["api_key"], "u": SECRETS["shape"]}}]
    (folder / "run.json").write_text(json.dumps(record))
    assert run_command(f"grpo-recipes report {folder}")[0] == 0
    assert canaries(folder / "report") == []


def test_a_placeholder_is_never_used_as_the_secret(secrets_path: Path) -> None:
    recipe = parse_recipe(["--config", str(secret_recipe(secrets_path, secrets_path))])
    add_launch(secrets_path / "run", describe_launch(recipe.as_dict(), {}, recipe.build_rewards(), []))
    again = f"--config {secrets_path}/run/run.json"
    code, output = run_command(f"grpo-recipes plan {secrets_path}/run/run.json")
    assert code == 2
    assert "`rewards.0.kwargs.api_key`" in output
    given = ["--rewards.0.kwargs", "{api_key: canary-again}"]
    rerun = parse_recipe([*again.split(), *given])
    assert rerun.rewards[0]["kwargs"] == {"api_key": "canary-again"}
    assert rerun.training.get("hub_token") is None
    assert rerun.training["model_init_kwargs"] == {}


# A secret for each TRL key that takes any text, and for values inside TRL's mappings.
CANARY = "pa/ss@word-{}-canary9"
TEXT_KEYS = (
    "run_name", "project", "trackio_space_id", "trackio_bucket_id", "hub_model_id", "hub_revision",
    "length_column_name",
    "vllm_server_base_url", "vllm_server_host", "vllm_structured_outputs_regex", "model_revision",
)  # fmt: skip
SHAPES = {
    "slash": "http://bob:{}@h",
    "bucket": "s3://KEY:{}@bucket",
    "google": "AIzaSyCanary{}",
    "hub": "hf_canarycanarycanary{}",
}


@pytest.mark.parametrize("way", mostly_slow(["ends", "resumes", "fails"], (0,)))
def test_no_secret_of_a_recipe_reaches_the_files_of_its_run(secrets_path: Path, way: str) -> None:
    """Each place has its own secret. None may appear in the output or in the files of the run and its trackers."""
    pytest.importorskip("tensorboard", reason="needs tensorboard, which the extra `dev` brings")
    texts = {key: f"http://bob:{CANARY.format(key)}@h" for key in TEXT_KEYS}
    inside = {name: shape.format(f"0canary0{name}0") for name, shape in SHAPES.items()}
    keyed = {key: f"plain-{key}-canary" for key in ("pwd", "pass", "api_key_2", "aws_secret_access_key")}
    secrets = [CANARY.format(key) for key in TEXT_KEYS] + [f"0canary0{name}0" for name in SHAPES] + list(keyed.values())
    policy, fails = launching.build_policy(secrets_path / "policy"), way == "fails"
    settings = {**inside, **keyed, f"http://bob:{CANARY.format('key')}@h": 1}
    config = secret_recipe(
        secrets_path,
        policy,
        kwargs={"settings": settings, "base_url": inside["slash"], "fails": fails},
        chat_template_kwargs={**inside, **keyed},
        report_to="tensorboard",
        **texts,
    )
    given = ["--config", str(config), "--rewards.0.kwargs.settings.pwd", keyed["pwd"]]
    given.append(f"--run_name={texts['run_name']}")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        assert train.main(given) == (1 if fails else 0), printed.getvalue()
    run = secrets_path / "run"
    if fails:
        assert (run / "fault-rank0.json").is_file()
    else:
        assert len(list(run.rglob("training_args.bin"))) == 2
        assert list(run.rglob("events.out.tfevents.*"))
    if way == "resumes":
        assert run_command(f"grpo-recipes report {run}")[0] in (0, 2)
        again = [*given, "--resume_from_checkpoint", "true", "--max_steps", "2"]
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            assert train.main(again) == 0, printed.getvalue()
    everything = [*secrets, CANARY.format("key"), *SECRETS.values()]
    assert canaries(run, everything) == []
    assert [secret for secret in everything if secret in printed.getvalue()] == []


def test_saved_arguments_are_those_of_trl_with_placeholders(tiny_model: Path, tmp_path: Path) -> None:
    """In a script, the arguments keep their values, and the saved file holds placeholders."""
    url = "http://bob:pa/ss@h:8000"
    sizes = {"per_device_train_batch_size": 2, "num_generations": 2}
    secrets = {"hub_token": "canary-of-the-hub", "vllm_server_base_url": url}
    args = GRPOConfig(str(tmp_path / "run"), use_cpu=True, bf16=False, report_to=[], **sizes, **secrets)
    rows = Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    trainer = GRPOTrainer(str(tiny_model), lambda completions, **columns: [0.0] * len(completions), args, rows)
    assert trainer.args is args
    assert isinstance(args, GRPOConfig)
    assert (args.vllm_server_base_url, args.hub_token) == (url, "canary-of-the-hub")
    trainer.save_model()
    file = tmp_path / "run" / "training_args.bin"
    saved = torch.load(file, weights_only=False)
    assert type(saved) is GRPOConfig
    assert (saved.vllm_server_base_url, saved.hub_token) == (f"http://{HIDDEN}@h:8000", HIDDEN)
    assert vars(saved).keys() == vars(args).keys()
    for name in set(GRPOConfig.__dataclass_fields__) - secrets.keys():
        assert getattr(saved, name) == getattr(args, name), name
    for shown in (args.to_dict(), args.to_sanitized_dict(), json.loads(args.to_json_string())):
        assert "canary" not in repr(shown)
        assert "pa/ss" not in repr(shown)
    assert canaries(tmp_path / "run", ["pa/ss", "canary"]) == []


def test_an_evaluation_holds_no_secret(tiny_model: Path, tmp_path: Path) -> None:
    """The request and the result are searched. The prompts, in a parquet file, are data."""
    url = f"http://{SECRETS['url']}@h"
    out = tmp_path / "out"
    more = f"--system_prompt {url} --limit 1 --max_new_tokens 1 --output {out}"
    code, output = run_command(f"grpo-recipes evaluate {tiny_model} --dataset arithmetic {more}")
    assert code == 0, output
    written = [path.read_text() for path in out.rglob("*.json")]
    assert "http://<hidden>@h" in "".join(written)
    assert not any(SECRETS["url"] in text for text in [output, *written])


@pytest.mark.parametrize("line", ["train --config {config}", "grpo-recipes plan {config} --build"])
def test_an_error_of_a_constructor_quotes_no_secret(secrets_path: Path, line: str) -> None:
    (secrets_path / "strict_keys.py").write_text(
        "class Strict:\n"
        "    def __init__(self, api_key, base_url):\n"
        "        raise ValueError(f'{api_key!r} is no key of {base_url}')\n"
        "    def __call__(self, prompts, completions, **columns): return []\n"
    )
    kwargs = {"api_key": SECRETS["api_key"], "base_url": f"https://{SECRETS['url']}@host"}
    rewards = [{"name": "strict_keys.Strict", "kwargs": kwargs}]
    config = secret_recipe(secrets_path, launching.build_policy(secrets_path / "policy"), rewards=rewards)
    code, output = run_command(line.format(config=config))
    assert (code, output.count(HIDDEN)) == (2, 2), output
    assert "is no key of https://" in output
    assert [secret for secret in SECRETS.values() if secret in output] == []


def test_a_shipped_recipe_holds_nothing_that_looks_like_a_secret() -> None:
    for name in shipped_files("recipes"):
        assert list(hidden_places(redacted(resolved(parse_recipe(["--config", name]).as_dict())))) == []
        text = find_file("recipes", name).read_text()
        assert redacted(text) == text


def test_no_key_of_ours_is_hidden() -> None:
    """Arguments of our rewards may only name the environment variable of a key."""
    specs = [DatasetSpec, MicroBatching, ReferenceSpec, SamplingSpec]
    nested = [field for spec in specs for field in getattr(spec, "__dataclass_fields__", ())]
    assert len(nested) > 20
    of_rewards = [name for reward in REGISTERED for name in inspect.signature(resolve(reward)).parameters]
    assert [key for key in (*OUR_KEYS, *nested, *of_rewards) if is_secret(key, "x")] == []


# Code in model folders


def leaves_canary(folder: Path) -> Path:
    """Build a model folder that names its own code in every way that transformers and peft know. Return the canary."""
    canary = folder.parent / "ran"
    code = f"open({str(canary)!r}, 'a').write(__file__)\nclass Evil: pass\n"
    kinds = ("Config", "Model", "ModelForCausalLM", "ModelForSequenceClassification")
    mapped = {f"Auto{kind}": "evil.Evil" for kind in kinds}
    folder.mkdir()
    for name in ("evil.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    config = {"model_type": "evil", "architectures": ["Evil"], "auto_map": mapped}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    state = {"log_history": [{"step": 1, "reward": 1.0}], "global_step": 1}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return canary


VERBS = [
    "grpo-recipes plan mine.yaml",
    "grpo-recipes plan mine.yaml --build",
    "grpo-recipes plan mine.yaml --model_config evil/config.json",
    "grpo-recipes evaluate evil --dataset arithmetic --limit 2",
    "grpo-recipes evaluate adapter --dataset arithmetic --limit 2",
    "grpo-recipes evaluate known --dataset arithmetic --limit 2 --max_new_tokens 2",
    "grpo-recipes diagnose evil",
    "grpo-recipes report evil",
    "grpo-recipes merge adapter --output merged",
    "grpo-recipes chat known --recipe mine.yaml --prompt 1 --max_new_tokens 2",
    "grpo-recipes chat evil --prompt 1",
    "grpo-recipes export adapter --to exported",
    "grpo-recipes export known --to exported",
    "grpo-recipes compare evil known",
    "grpo-recipes init rows.jsonl --output first.yaml --model evil",
    "grpo-recipes train mine.yaml",
    "grpo-recipes plan mine.yaml --resolved",
    "grpo-rewards list",
    "grpo-rewards score rows.jsonl --reward '{name: reward_model, kwargs: {model: evil}}'",
    "grpo-rewards check rows.jsonl --reward '{name: reward_model, kwargs: {model: evil}}'",
    "grpo-rewards convert-internlm2 evil out",
    "train --config mine.yaml",
]


@pytest.mark.parametrize("line", mostly_slow(VERBS, (0,)))
def test_no_command_runs_the_code_of_a_model_folder(
    line: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user answers yes to every question of a library."""
    monkeypatch.chdir(tmp_path)
    canary = leaves_canary(tmp_path / "evil")
    (tmp_path / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "evil"), "target_modules": ["q_proj"]}
    adapter["auto_mapping"] = {"base_model_class": "Evil", "parent_library": "evil.evil"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    # An architecture that transformers knows, with its own generation loop.
    known = shutil.copytree(tiny_model, tmp_path / "known")
    (known / "custom_generate").mkdir()
    (known / "custom_generate" / "generate.py").write_text(
        (tmp_path / "evil" / "evil.py").read_text() + "def generate(*a, **k): 1/0\n"
    )
    rows = launching.write_rows(tmp_path / "rows.jsonl", 8)
    with_completions = [{**json.loads(row), "completion": "7"} for row in rows.read_text().splitlines()]
    rows.write_text("".join(json.dumps(row) + "\n" for row in with_completions))
    launching.write_recipe(tmp_path / "mine.yaml", tmp_path / "evil", rows, tmp_path / "run")
    run_command(line, stdin="y\n" * 20)
    assert not canary.exists(), canary.read_text()


# Code named in a recipe or a record


@pytest.fixture
def evil_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a module whose class and factory leave a canary when they are called. Return the canary."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "strangers", raising=False)
    canary = tmp_path / "called"
    (tmp_path / "strangers.py").write_text(
        f"def leave(): open({str(canary)!r}, 'a').write('x')\n"
        "class Reward:\n"
        "    kind = 'correctness'\n"
        "    def __init__(self, level=1): leave()\n"
        "    def __call__(self, prompts, completions, **columns): return [1.0] * len(completions)\n"
        "def factory(level=1):\n    leave()\n    return reward\n"
        "def reward(prompts, completions, **columns): return [1.0] * len(completions)\n"
        "def command(command): leave()\n"
    )
    return canary


NAMED = [
    "strangers.Reward",
    {"name": "strangers.Reward", "kwargs": {"level": 2}},
    {"name": "strangers.factory", "kwargs": {}},
]


@pytest.mark.parametrize("spec", mostly_slow(NAMED, (1,)))
def test_a_plan_calls_factories_of_other_packages_only_with_build(
    evil_module: Path, tiny_model: Path, tmp_path: Path, spec: Any
) -> None:
    rows = launching.write_rows(tmp_path / "rows.jsonl", 8)
    own = {"name": "group_length", "kwargs": {"correctness": spec}}
    rewards = [{"name": "gate", "reward": own, "only_if": spec}]
    launching.write_recipe(tmp_path / "mine.yaml", tiny_model, rows, tmp_path / "run", rewards=rewards)
    code, output = run_command("grpo-recipes plan mine.yaml")
    assert code == 0
    assert not evil_module.exists()
    assert "`--build`" in output
    code, output = run_command("grpo-recipes plan mine.yaml --build")
    assert code == 0
    assert evil_module.exists()
    assert "`--build`" not in output


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("os.system", "`prompts`"),
        ("strangers.command", "`prompts`"),
        ({"name": "strangers.Reward", "kwargs": {"lvel": 2}}, "`level`"),
        ({"name": "strangers.factory", "kwargs": {"x": 2}}, "`x`"),
    ],
    ids=str,
)
def test_a_callable_that_is_no_reward_is_refused_before_it_is_called(
    evil_module: Path, tiny_model: Path, tmp_path: Path, spec: Any, says: str
) -> None:
    rows = launching.write_rows(tmp_path / "rows.jsonl", 8)
    launching.write_recipe(tmp_path / "mine.yaml", tiny_model, rows, tmp_path / "run", rewards=[spec])
    (tmp_path / "scored.jsonl").write_text('{"completion": "touch called"}\n')
    given = json.dumps(spec) if isinstance(spec, dict) else spec
    for line in ("grpo-recipes plan mine.yaml", f"grpo-rewards score scored.jsonl --reward {shlex.quote(given)}"):
        code, output = run_command(line)
        assert (code, output.count("\n")) == (2, 1), output
        assert says in output
    assert not evil_module.exists()


HOSTILE_SPECS = [
    {"name": "os.system", "kwargs": {"command": "touch called"}},
    {"name": "strangers.factory", "kwargs": {}},
    "strangers.Reward",
    {"name": "grpo_rewards.registry.build_rewards", "kwargs": {"specs": [{"name": "strangers.Reward"}]}},
    {"name": "grpo_rewards.registry.resolve", "kwargs": {"name": "strangers_on_import.x"}},
    {"name": "sum", "alias": "factory", "rewards": [{"name": "strangers.factory", "kwargs": {}}]},
    {"name": "trl.rewards.other_rewards.leave", "kwargs": {}},
    {"name": "group_length", "kwargs": {"correctness": {"name": "strangers.factory", "kwargs": {}}}},
]


@pytest.mark.parametrize("spec", mostly_slow(HOSTILE_SPECS, (7,)))
def test_code_named_in_a_record_is_not_called(evil_module: Path, tmp_path: Path, tiny_model: Path, spec: Any) -> None:
    """`diagnose`, `report` and `evaluate` read the rewards of a `run.json`, and build only our own."""
    (tmp_path / "strangers_on_import.py").write_text("from strangers import leave\nleave()\nx = 1\n")
    name = (spec if isinstance(spec, str) else spec.get("alias") or spec["name"]).rpartition(".")[2]
    metrics = {f"rewards/{name}/parsed": ramp(0, 0), "rewards/gsm8k_correctness/parsed": None}
    folder = write_run(tmp_path / "run", metrics)
    record = json.loads((folder / "run.json").read_text())
    record["recipe"] |= {"rewards": [spec], "dataset": {"name": "arithmetic", "size": 2}}
    (folder / "run.json").write_text(json.dumps(record))
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    for line in ("diagnose run", "report run", "evaluate run --limit 1 --max_new_tokens 1"):
        code, output = run_command(f"grpo-recipes {line}")
        assert code in (0, 1), output
    assert not evil_module.exists()


# The terminal

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x00\u202e\u2066\x9b31m\u2028\r\x08\u200b\ud800"
SHOWN = r"\x1b[2J\x1b]0;owned\x07\x00\u202e\u2066\x9b31m\u2028\r\x08\u200b\ud800"


def reports_as_vllm_does(completions: Sequence[str], **columns: Any) -> list[float]:
    """Report to the statistics server as vLLM's `usage_lib` does when an engine starts."""
    if os.environ.get("VLLM_NO_USAGE_STATS", "0") != "1":
        request.urlopen(request.Request(os.environ["VLLM_USAGE_STATS_SERVER"], b"{}"), timeout=5)
    return launching.variety(completions)


@contextlib.contextmanager
def recording_server() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a server that answers `{}` to every request, and the list of requested paths."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(b"{}")

        do_HEAD = do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("is_on", [False, True])
def test_a_training_sends_no_statistics_unless_the_user_switches_them_on(is_on: bool, tmp_path: Path) -> None:
    rows = launching.write_rows(tmp_path / "train.jsonl", 8)
    policy = launching.build_policy(tmp_path / "policy")
    changes = {"rewards": [f"{__name__}.reports_as_vllm_does"], "max_steps": 1}
    recipe = launching.write_recipe(tmp_path / "recipe.yaml", policy, rows, tmp_path / "run", **changes)
    switches = ("CI", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK")
    environment = {name: value for name, value in os.environ.items() if name not in switches}
    paths = f"{launching.ROOT}{os.pathsep}{launching.ROOT / 'rewards'}"
    environment |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home")}
    if is_on:
        environment |= {"HF_HUB_DISABLE_TELEMETRY": "0", "VLLM_NO_USAGE_STATS": "0"}
    with recording_server() as (url, asked):
        environment |= {"HF_ENDPOINT": url, "VLLM_USAGE_STATS_SERVER": f"{url}/vllm"}
        command = [sys.executable, "-m", "grpo_recipes.train", "--config", str(recipe)]
        done = subprocess.run(command, env=environment, cwd=launching.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = {"/api/telemetry/trl/other", "/api/agent-harnesses", "/vllm"} if is_on else set()
    assert set(asked) == expected


def test_control_characters_are_shown_as_escapes() -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible("one\ntwo\tthree") == r"one\ntwo\tthree"
    assert visible_lines("one\ntwo\x1b") == "one\ntwo\\x1b"
    for text in ("Überraschung", "空\u3000格", "नमस्ते", "می\u200cخواهم", "👩\u200d👩\u200d👧", "1\u00a0000 €"):
        assert visible(text) == text


@pytest.mark.slow
def test_only_the_terminal_module_prints() -> None:
    printing = {
        module
        for module, path in modules().items()
        if "print" in (source := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printing == {"grpo_rewards.terminal"}


def controls(output: str) -> list[str]:
    """Return the control characters in a command's output, without the carriage returns of progress bars."""
    bars = re.sub(r"\r(evaluating|scoring|checking)?[^\n\r]*(it/s|s/it|\?|%\||batch)[^\n\r]*", "", output)
    return sorted({character for character in bars if character != "\n" and visible(character) != character})


def hostile_run(folder: Path) -> Path:
    """Write a run with control characters in the texts of its record, metrics, completions and evaluations."""
    rewards = [
        {"name": f"format{HOSTILE}", "source": "x", "weight": 1.0, "kind": "format"},
        {"name": f"right{HOSTILE}", "source": "x", "weight": 1.0, "kind": "correctness"},
    ]
    metrics = {f"rewards/format{HOSTILE}/mean": ramp(0.1, 0.9), f"rewards/right{HOSTILE}/mean": ramp(0.5, 0.5)}
    metrics |= {f"rewards/format{HOSTILE}/std": ramp(0.9, 0.9), f"rewards/right{HOSTILE}/std": ramp(0.01, 0.01)}
    metrics |= {f"rewards/right{HOSTILE}/parsed": ramp(0, 0), f"efficiency/{HOSTILE}": ramp(0, 1)}
    text = HOSTILE.replace("\ud800", "")  # UTF-8 can't encode a lone surrogate
    hostile = {"completion": f"{text} 7", "prompt": text}
    completions = [{**row, **hostile} for row in healthy_completions()]
    write_run(folder, metrics, rewards=rewards, completions=completions)
    record = json.loads((folder / "run.json").read_text())
    spec = {"name": "gsm8k_correctness", "alias": f"right{HOSTILE}", "kwargs": {"extract": "boxed"}}
    record["recipe"] |= {"rewards": [spec], "model_name_or_path": HOSTILE, HOSTILE: HOSTILE}
    record |= {"started": HOSTILE, "versions": {"trl": HOSTILE}}
    (folder / "run.json").write_text(json.dumps(record))
    share = {"value": 0.4, "low": 0.3, "high": 0.5}
    evaluation = folder / "evaluations" / "before\x1b[2J\u202e"
    evaluation.mkdir(parents=True)
    strict = [{"name": HOSTILE}, {"name": "x", "extract": HOSTILE}]
    summary = {"problems": 2, "strict": share, "lenient": share, "settings": {"samples": 1, "strict": strict}}
    (evaluation / "evaluation.json").write_text(json.dumps(summary))
    return folder


def hostile_rows(path: Path) -> Path:
    row = {"completion": HOSTILE + " 7", "answer": HOSTILE + " 7", "question": HOSTILE, HOSTILE: 1}
    rows = [row, {HOSTILE: HOSTILE}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + f"{{{HOSTILE[:5]}\n")
    return path


HOSTILE_LINES = [
    "grpo-recipes diagnose run",
    "grpo-recipes report named\x1b[2J\u202e",
    "grpo-recipes diagnose damaged",
    "grpo-recipes plan mine.yaml --json",
    "grpo-recipes plan odd\x1b[2J.yaml",
    "grpo-recipes plan mine.yaml --lerning\x1b[2J 1",
    "grpo-recipes evaluate model --dataset arithmetic --limit 1",
    "grpo-recipes evaluate finished --dataset arithmetic --limit 1 --output finished/out",
    "grpo-recipes compare run run",
    "grpo-recipes init odd_columns.jsonl --output first.yaml",
    "grpo-recipes merge run --output merged",
    "grpo-recipes chat finished --prompt 1\x1b[2J --max_new_tokens 2",
    "grpo-recipes export finished --to exported\x1b[2J",
    "grpo-recipes plan odd_names.yaml --resolved",
    "grpo-recipes \x1b[2J",
    "grpo-rewards list",
    "grpo-rewards score rows.jsonl --reward gsm8k_correctness",
    "grpo-rewards score rows.jsonl --reward odd_reward.fails",
    "grpo-rewards check rows.jsonl",
    "grpo-rewards convert-internlm2 model out",
    "train --config mine.yaml",
]


@pytest.mark.parametrize("line", mostly_slow(HOSTILE_LINES, (0, 4, 16)))
def test_no_command_prints_a_control_character(line: str, tmp_path: Path, tiny_model: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    hostile_run(tmp_path / "run")
    hostile_rows(tmp_path / "rows.jsonl")
    hostile_run(tmp_path / "named\x1b[2J\u202e")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": HOSTILE}]}))
    model = tmp_path / "model"
    model.mkdir()
    named = {"model_type": HOSTILE, "architectures": [HOSTILE], "rope_scaling": {"rope_type": HOSTILE}}
    (model / "config.json").write_text(json.dumps(named))
    (model / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": HOSTILE}))
    (tmp_path / "odd_reward.py").write_text(
        "def reward(prompts, completions, **columns): return [1.0] * len(completions)\n"
        f"def fails(prompts, completions, **columns): raise ValueError({HOSTILE!r})\n"
    )
    odd = {f"question{HOSTILE}": HOSTILE, "question": HOSTILE, "answer": "7"}
    (tmp_path / "odd_columns.jsonl").write_text(json.dumps(odd).replace("\\ud800", "") + "\n")
    for name, policy in (("odd_names", Path(HOSTILE)), ("mine", model)):
        launching.write_recipe(tmp_path / f"{name}.yaml", policy, tmp_path / "rows.jsonl", tmp_path / "out")
    finished = shutil.copytree(tiny_model, tmp_path / "finished")
    (finished / "out").mkdir()
    share = {"value": 0.4, "low": 0.3, "high": 0.5}
    settings = {"samples": 1, "strict": [{"name": HOSTILE}]}
    summary = {"model": HOSTILE, "problems": 2, "strict": share, "lenient": share, "settings": settings}
    (finished / "out" / "evaluation.json").write_text(json.dumps(summary))
    _, output = run_command(line)
    assert controls(output) == [], output


# Links


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with one file, and check afterwards that neither has changed."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_text("as it was")
    yield folder
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"file": "as it was"}


@pytest.mark.parametrize(
    "link", mostly_slow([".report.html.part", "report.html", "completions.html", ".completions.html.part"], (0,))
)
def test_a_report_replaces_a_link_instead_of_following_it(tmp_path: Path, outside: Path, link: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "report").mkdir()
    (folder / "report" / link).symlink_to(outside / "file")
    assert run_command(f"grpo-recipes report {folder}")[0] == 0
    assert not any(path.is_symlink() for path in (folder / "report").iterdir())


@pytest.mark.slow
def test_a_report_is_not_written_through_a_linked_folder(tmp_path: Path, outside: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "report").symlink_to(outside)
    code, output = run_command(f"grpo-recipes report {folder}")
    assert (code, "link" in output) == (2, True)
    (folder / "report").unlink()
    (folder / "within").mkdir()
    (folder / "report").symlink_to("within")
    assert run_command(f"grpo-recipes report {folder}")[0] == 0


@pytest.mark.parametrize("name", ["evaluations", "evaluations/after", "evaluations/after/parts"])
def test_an_evaluation_is_not_written_through_a_linked_folder(
    tmp_path: Path, tiny_model: Path, outside: Path, name: str
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(outside)
    code, output = run_command(f"grpo-recipes evaluate {folder} --dataset arithmetic --limit 1 --max_new_tokens 1")
    assert (code, "link" in output) == (2, True), output


@pytest.mark.parametrize(
    "name", ["completions", "run.json", "trainer_state.json", "completions/completions_00001.parquet"]
)
@pytest.mark.parametrize("resumes", [False, True])
def test_a_run_is_not_written_through_a_link(
    tiny_model: Path, tmp_path: Path, outside: Path, name: str, resumes: bool
) -> None:
    rows = launching.write_rows(tmp_path / "rows.jsonl", 8)
    config = launching.write_recipe(tmp_path / "mine.yaml", tiny_model, rows, tmp_path / "run")
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).symlink_to(outside / "file" if "." in name else outside)
    resuming = " --resume_from_checkpoint true" if resumes else ""
    code, output = run_command(f"train --config {config}{resuming}")
    assert (code, "link" in output) == (2, True), output


def test_scores_replace_their_file_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text('{"completion": "7"}\n')
    out.write_text("as it was")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")))
        code, _ = run_command(f"grpo-rewards score {rows} --reward tag_count --out {out}")
    assert (code, out.read_text()) == (2, "as it was")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


@pytest.mark.slow
def test_completions_are_escaped_in_a_report(tmp_path: Path) -> None:
    """The tags of a completion are text. The browser test checks that no image is loaded."""
    rows = [{**row, "completion": "<script>alert(1)</script><img src=http://x>"} for row in healthy_completions()]
    folder = write_run(tmp_path / "run", completions=rows)
    assert run_command(f"grpo-recipes report {folder}")[0] == 0
    page = (folder / "report" / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert len(pd.read_parquet(next((folder / "completions").glob("*.parquet"))))
