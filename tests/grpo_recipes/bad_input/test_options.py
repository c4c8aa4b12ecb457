"""Bad verbs and options, and the help of each command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bad_input import Case, check

# Options, verbs, help.
FRONT_DOOR: list[Case] = [
    Case("grpo-recipes --help", ("95 % intervals", "plan", "report"), code=0),
    Case("grpo-recipes --version", ("grpo-recipes 0.",), code=0),
    Case("grpo-recipes plan --help", ("--gpu_memory SIZE",), code=0),
    Case("grpo-recipes evaluate --help", ("--samples N",), code=0),
    Case("train --help", ("--rewards.0.weight", "GRPOConfig"), code=0),
    Case("train --version", ("grpo-recipes 0.",), code=0),
    Case("grpo-rewards --help", ("convert-internlm2",), code=0),
    Case("grpo-rewards --version", ("grpo-rewards 0.",), code=0),
    Case(
        "grpo-recipes",
        ("choose init, plan, preview, train, evaluate, compare, diagnose, report, merge, chat, export",),
    ),
    Case("grpo-recipes pln {recipe}", ("no command `pln`", "did you mean `plan`?")),
    Case("grpo-recipes plan", ("gsm8k-qwen2.5-1.5b-lora",), 0),
    Case("grpo-recipes plan quickstrt", ("no such file", "did you mean `quickstart`?")),
    Case("grpo-recipes plan nope/quickstart.yaml", ("nope/quickstart.yaml", "no such file")),
    Case("grpo-recipes plan .", ("is a folder",)),
    Case("grpo-recipes plan {recipe} {recipe}", ("unknown argument `recipe.yaml`",)),
    Case("grpo-recipes plan {recipe} --gpu-memry 24GB", ("did you mean `--gpu_memory`?",)),
    Case("grpo-recipes plan {recipe} --lora_rank 4", ("did you mean `lora_r`?",)),
    Case("grpo-recipes plan {recipe} --save_step 4", ("did you mean `save_steps`?",)),
    Case("grpo-recipes plan {recipe}", ("unknown key `optimizer_lr`",), changes={"optimizer_lr": 4}),
    Case("grpo-recipes plan {recipe} --num_processes 0", ("`num_processes` is 0: set a number of at least 1",)),
    Case("grpo-recipes plan {recipe} --num_processes -2", ("`num_processes` is -2",)),
    Case("grpo-recipes plan {recipe} --num_processes two", ("--num_processes", "'two'")),
    Case("grpo-recipes plan {recipe} --num_processes=1", ("on 1 process",), code=0),
    Case("grpo-recipes plan {recipe} --gpu_memory 0", ("--gpu_memory 0: write a size",)),
    Case("grpo-recipes plan {recipe} --gpu_memory 24GB", ("fits in",), code=0),
    Case("grpo-recipes plan {recipe} --accelerate_config dpp", ("did you mean `ddp`?",)),
    Case(
        "grpo-recipes plan {recipe} --accelerate_config a.yaml",
        ("a.yaml as an accelerate configuration: `num_processes` is 0",),
        files={"a.yaml": "num_processes: 0\n"},
    ),
    Case("grpo-recipes plan {recipe} --model_config nope.json", ("nope.json: there is no such file",)),
    Case("grpo-recipes plan {recipe} --model_name_or_path ./nope", ("./nope: there is no such folder (relative to ",)),
    Case("grpo-recipes plan {recipe} --dataset.path nope/rows.jsonl", ("nope/rows.jsonl",)),
    Case("grpo-recipes plan {recipe} --dataset.path ./rows", ("there is no file or folder ./rows",)),
    Case("grpo-recipes plan {recipe} --rewards gsm8k_corectness", ("did you mean `gsm8k_correctness`?",)),
    Case("grpo-recipes plan {recipe} --rewards xqzt", ("unknown reward `xqzt`: `grpo-rewards list` names all",)),
    Case(
        "grpo-recipes plan {recipe} --reference.adapter ./nope --beta 0.1",
        ("`reference.adapter` ./nope: there is no such folder",),
    ),
    Case("grpo-recipes plan {recipe} --json", ('"num_processes": 1',), code=0),
    Case("train", ("name a recipe", "`--config quickstart`")),
    Case("train quickstart", ("did you mean `--config quickstart`?",)),
    Case("train --config", ("`--config` needs a value",)),
    Case("train --confg {recipe}", ("did you mean `--config`?",)),
    Case("train --config quickstrt", ("did you mean `quickstart`?",)),
    Case(
        "train --config {recipe} --model_name_or_path ./nope", ("`model_name_or_path` ./nope: there is no such folder",)
    ),
    Case("train --config {recipe} --model_name_or_path runs/no/where", ("runs/no/where: there is no such folder",)),
    Case("grpo-recipes evaluate", ("required: model",)),
    Case("grpo-recipes evaluate ./nope", ("nope: the model can't be loaded: there is no such folder",)),
    Case("grpo-recipes evaluate {model} --sampels 8", ("did you mean `--samples`?",)),
    Case("grpo-recipes evaluate {model} --samples x", ("--samples", "'x'")),
    Case("grpo-recipes evaluate {model} --max_new_tokens 0 --dataset arithmetic", ("--max_new_tokens is 0",)),
    Case("grpo-recipes compare a", ("required: B",)),
    Case("grpo-recipes init", ("required: path",)),
    Case("grpo-recipes init nowhere.csv --output x.yaml", ("nowhere.csv",)),
    Case("grpo-recipes init t.csv --output x.yaml", ("only one row: name another",), files={"t.csv": "a,b\n1,2\n"}),
    Case(
        "grpo-recipes init t.csv --output x.yaml --model m",
        ("name one with `--question COLUMN`",),
        files={"t.csv": "a,b\n" + "1,2\n" * 20},
    ),
    Case("grpo-recipes train", ("required: recipe",)),
    Case("grpo-recipes train quickstrt", ("did you mean `quickstart`?",)),
    Case("grpo-recipes merge a", ("required: --output",)),
    Case("grpo-recipes merge nowhere --output b", ("nowhere: the model can't be loaded", "there is no such folder")),
    Case("grpo-recipes merge {model} --output b", ("holds no adapter", "needs no merging, use it as it is")),
    Case("grpo-recipes merge run --output b", ("its newest checkpoint is run/checkpoint-2; name that folder",), run={}),
    Case("grpo-recipes merge run --output file", ("--output file is a file",), files={"file": ""}),
    Case("grpo-recipes merge {model} --output file/b", ("--output file/b", "Not a directory"), files={"file": ""}),
    Case("grpo-recipes chat --help", ("--prompt TEXT", "Ctrl-C stops an answer"), code=0),
    Case("grpo-recipes chat", ("required: model",)),
    Case("grpo-recipes chat ./nope", ("nope: the model can't be loaded: there is no such folder",)),
    Case("grpo-recipes chat {model} --prmpt 1", ("did you mean `--prompt`?",)),
    Case("grpo-recipes chat {model} --prompt 1 --temperature -1", ("--temperature is -1", "0 for greedy decoding")),
    Case("grpo-recipes chat {model} --prompt 1 --max_new_tokens 0", ("--max_new_tokens is 0: set it to at least 1",)),
    Case("grpo-recipes chat {model} --prompt 1 --recipe quickstrt", ("did you mean `quickstart`?",)),
    Case("grpo-recipes export --help", ("--to FOLDER",), code=0),
    Case("grpo-recipes export {model}", ("required: --to",)),
    Case(
        "grpo-recipes export nope --to b",
        ("nope: the model can't be loaded: there is no such folder",),
    ),
    Case("grpo-recipes export {model} --to {model}", ("is not empty: name another folder",)),
    Case("grpo-recipes export {model} --to file", ("--to file is a file",), files={"file": ""}),
    Case("grpo-recipes export {model} --to file/b/c", ("--to file/b/c", "Not a directory"), files={"file": ""}),
    Case("grpo-recipes export {model} --to /proc/b", ("--to /proc/b can't be written", "name another folder")),
    Case(f"grpo-recipes export {{model}} --to {'x' * 300}", ("can't be written (File name too long)",)),
    Case("grpo-recipes export empty --to b", ("empty holds no model", "name the folder of a"), files={"empty/a": ""}),
    Case("grpo-recipes export run --to b", ("its newest checkpoint is run/checkpoint-2; name that folder",), run={}),
    Case("grpo-recipes diagnose", ("required: run",)),
    Case("grpo-recipes diagnose a b", ("unknown argument `b`",)),
    Case("grpo-recipes report nope", ("nope",)),
    Case("grpo-recipes report a --outptu b", ("did you mean `--output`?",)),
    Case("grpo-rewards", ("choose list, score, check, audit, convert-internlm2",)),
    Case("grpo-rewards scor", ("no command `scor`", "did you mean `score`?")),
]


@pytest.mark.parametrize("case", FRONT_DOOR, ids=lambda case: case.line[:90])
def test_bad_input_ends_with_one_message(
    case: Case, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, tmp_path, tiny_model, monkeypatch)
