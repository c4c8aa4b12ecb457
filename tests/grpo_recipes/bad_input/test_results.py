"""Bad input of `evaluate`, `compare`, `diagnose`, `report` and `merge`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import stored
from tests.support.bad_input import Case, check

# Runs and evaluations that can't be read, or hold nothing to check.
CUT_STATE = json.dumps({"log_history": stored.HISTORY})[:500]


EVALUATE_M = "grpo-recipes evaluate m --dataset arithmetic --limit 2 --output e"


TWO_EVALUATIONS = {**stored.evaluation_files("a"), **stored.evaluation_files("b")}


BOXED = {"settings": {"samples": 1, "strict": [{"name": "gsm8k_correctness", "extract": "boxed"}]}}


RESULTS: list[Case] = [
    # Input that must stay allowed.
    Case("grpo-recipes diagnose run", ("nothing looks wrong", "15 of 16 checks had data"), 0, stored.run_files()),
    Case("grpo-recipes report run", ("report.html",), 0, stored.run_files()),
    Case("grpo-recipes report run other", ("report.html",), 0, {**stored.run_files(), **stored.run_files("other")}),
    Case(
        "grpo-recipes diagnose run",
        ("nothing looks wrong", "13 of 16 checks had data", "no `run.json` holds `max_completion_length`"),
        0,
        stored.run_files(record=None),
    ),
    Case(
        "grpo-recipes diagnose run",
        ("nothing looks wrong", "fewer than four groups of completions"),
        0,
        stored.run_files(completions=None),
    ),
    Case(
        "grpo-recipes diagnose run",
        ("nothing looks wrong",),
        0,
        stored.run_files(record={**stored.RECORD, "launches": [stored.RECORD], "later": 1}),
    ),
    Case("grpo-recipes diagnose run", ("nothing looks wrong",), 0, stored.run_files(evaluation=None)),
    Case(
        "grpo-recipes diagnose run",
        ("kl_blow_up", "`kl` was not logged"),
        0,
        stored.run_files(state={"log_history": [{**entry, "kl": None} for entry in stored.HISTORY]}),
    ),
    Case(
        "grpo-recipes diagnose run",
        ("run/trainer_state.json", "can't be read as JSON"),
        2,
        {
            **stored.run_files(state=CUT_STATE),
            "run/checkpoint-40/trainer_state.json": json.dumps({"log_history": stored.HISTORY}),
        },
    ),
    Case("grpo-recipes compare a b", ("2 problems", "exact p = 1"), 0, TWO_EVALUATIONS),
    # Nothing to check.
    Case(
        "grpo-recipes diagnose run",
        ("run", "nothing could be checked"),
        2,
        stored.run_files(state={"log_history": []}, completions=None),
    ),
    Case(
        "grpo-recipes report run",
        ("run", "nothing could be checked"),
        2,
        stored.run_files(state={"log_history": []}, completions=None),
    ),
    Case(
        "grpo-recipes report run other",
        ("other", "nothing could be checked"),
        2,
        {**stored.run_files(), **stored.run_files("other", state={"log_history": []}, completions=None)},
    ),
    Case(
        "grpo-recipes diagnose run",
        ("nothing could be checked",),
        2,
        stored.run_files(
            state={"log_history": [{"step": 0, "train_runtime": 0.1, "train_loss": 0.0}]}, completions=None
        ),
    ),
    Case(
        "grpo-recipes diagnose run",
        ("nothing could be checked",),
        2,
        stored.run_files(
            state={"log_history": [{"step": 1, "loss": 0.0, "reward": None}]}, completions=None, record=None
        ),
    ),
    # A run's files.
    Case("grpo-recipes diagnose nowhere", ("nowhere", "no such folder")),
    Case("grpo-recipes report nowhere", ("nowhere", "no such folder")),
    Case("grpo-recipes diagnose recipe.yaml", ("recipe.yaml", "no such folder")),
    Case("grpo-recipes diagnose run", ("no `trainer_state.json`",), 2, stored.run_files(state=None)),
    *(
        Case(f"grpo-recipes {verb} run", ("run/trainer_state.json", *words), 2, stored.run_files(state=state))
        for state, words in (
            ("", ("can't be read as JSON",)),
            (CUT_STATE, ("can't be read as JSON",)),
            (b"\xff\xfe\x00", ("it is not UTF-8 text",)),
            ("[" * 100_000, ("can't be read as JSON",)),
            ("{}", ("it has no `log_history`",)),
            ("[]", ("it is a list, not an object",)),
            ("null", ("it is null, not an object",)),
            ('"state"', ('it is "state", not an object',)),
            ({"log_history": {}}, ("`log_history` is an object, not a list",)),
            ({"log_history": [1]}, ("`log_history[0]` is 1, not an object",)),
            ({"log_history": [{"reward": 1.0}]}, ("`log_history[0]` has no `step`",)),
            ({"log_history": [{"step": "1"}]}, ('`log_history[0].step` is "1", not an integer',)),
            ({"log_history": [{"step": True}]}, ("`log_history[0].step` is true, not an integer",)),
            ({"log_history": [], "global_step": "x"}, ('`global_step` is "x", not an integer',)),
        )
        for verb in ("diagnose", "report")
    ),
    *(
        Case(f"grpo-recipes {verb} run", ("run/run.json", *words), 2, stored.run_files(record=record))
        for record, words in (
            ("", ("can't be read as JSON",)),
            ('{"recipe": {"model', ("can't be read as JSON",)),
            ("{}", ("it has no `recipe`",)),
            ("[]", ("it is a list",)),
            ({"recipe": "quickstart"}, ('`recipe` is "quickstart", not an object',)),
            (
                {"recipe": {}, "config": {"max_completion_length": "long"}},
                ("`config.max_completion_length`", "integer"),
            ),
            ({"recipe": {}, "rewards": {}}, ("`rewards` is an object, not a list",)),
            ({"recipe": {}, "rewards": ["tag_count"]}, ('`rewards[0]` is "tag_count", not an object',)),
            ({"recipe": {}, "rewards": [{"name": "x"}]}, ("`rewards[0]` has no `source`",)),
            (
                {"recipe": {}, "rewards": [{"name": "x", "source": "x", "weight": "2"}]},
                ('`rewards[0].weight` is "2", not a number',),
            ),
            ({"recipe": {}, "versions": []}, ("`versions` is a list, not an object",)),
        )
        for verb in ("diagnose", "report")
    ),
    *(
        Case("grpo-recipes diagnose run", ("completions_00040.parquet", *words), 2, stored.run_files(completions=table))
        for table, words in (
            (b"", ("can't be read as parquet",)),
            (b"junk" * 100, ("can't be read as parquet",)),
            (stored.COMPLETIONS[:-50], ("can't be read as parquet",)),
            (stored.parquet({"text": ["a"]}), ("no column `step`", "its columns: text")),
            (
                stored.parquet({"step": ["one"], "prompt": ["p"], "completion": ["c"]}),
                ("column `step` does not hold integers",),
            ),
            (
                stored.parquet({"step": [1], "prompt": [3], "completion": ["c"]}),
                ("column `prompt` does not hold texts or lists of messages",),
            ),
            (
                stored.parquet({"step": [1], "prompt": ["p"], "completion": [["c"]]}),
                ("column `completion` does not hold texts or lists of messages",),
            ),
            (
                stored.parquet({"step": [1], "prompt": ["p"], "completion": ["c"], "tag_presence": ["much"]}),
                ("column `tag_presence` does not hold numbers",),
            ),
        )
    ),
    *(
        Case(
            "grpo-recipes report run",
            ("run/evaluations/before/evaluation.json", *words),
            2,
            stored.run_files(evaluation=summary),
        )
        for summary, words in (
            ("", ("can't be read as JSON",)),
            ("{}", ("it has no `problems`",)),
            ("[]", ("it is a list",)),
            ({**stored.EVALUATION, "strict": 0.5}, ("`strict` is 0.5, not a share",)),
            ({**stored.EVALUATION, "strict": {"value": 0.5}}, ("`strict` is an object, not a share",)),
            ({**stored.EVALUATION, "lenient": {"value": 0.5, "low": 0.6, "high": 0.4}}, ("not a share",)),
            ({**stored.EVALUATION, "pass_at": [0.5]}, ("`pass_at` is a list, not an object",)),
            ({**stored.EVALUATION, "pass_at": {"2": "all"}}, ('`pass_at.2` is "all", not a share',)),
        )
    ),
    Case(
        "grpo-recipes report run",
        ("after/completions.parquet", "no column `problem`"),
        2,
        {
            **stored.run_files(),
            **stored.evaluation_files("run/evaluations/before"),
            **stored.evaluation_files("run/evaluations/after", table={"a": [1]}),
        },
    ),
    Case("grpo-recipes report run --output recipe.yaml", ("can't be written", "--output"), 2, stored.run_files()),
    # Evaluations that are compared.
    Case("grpo-recipes compare a nowhere", ("nowhere: there is no such folder", "correct"), 2, TWO_EVALUATIONS),
    Case(
        "grpo-recipes compare a run",
        ("run is a run: name one of its evaluations, such as run/evaluations/after",),
        2,
        {**stored.run_files(evaluation=None), **TWO_EVALUATIONS, **stored.evaluation_files("run/evaluations/after")},
    ),
    Case(
        "grpo-recipes compare a run",
        ("run is a run that has not been evaluated: run `grpo-recipes evaluate run` first",),
        2,
        {**stored.run_files(evaluation=None), **TWO_EVALUATIONS},
    ),
    Case(
        "grpo-recipes compare a empty",
        ("empty has no finished evaluation: run `grpo-recipes evaluate` with it as --output",),
        2,
        {**TWO_EVALUATIONS, "empty/note.txt": ""},
    ),
    *(
        Case(
            "grpo-recipes compare a b",
            words,
            2,
            {**stored.evaluation_files("a"), **stored.evaluation_files("b", **damaged)},
        )
        for damaged, words in (
            ({"summary": ""}, ("b/evaluation.json", "can't be read as JSON")),
            ({"summary": "{}"}, ("b/evaluation.json", "it has no `problems`")),
            ({"summary": "[]"}, ("b/evaluation.json", "it is a list")),
            ({"summary": {**stored.EVALUATION, "settings": []}}, ("b/evaluation.json", "`settings` is a list")),
            ({"summary": {**stored.EVALUATION, **BOXED}}, ("strict", "evaluate both with the same --recipe")),
            ({"table": None}, ("b/completions.parquet", "can't be read")),
            ({"table": b"junk"}, ("b/completions.parquet", "can't be read as parquet")),
            ({"table": {"a": [1]}}, ("b/completions.parquet", "no column `problem`", "its columns: a")),
            (
                {"table": {**stored.EVALUATED, "strict": ["yes", "no"]}},
                ("b/completions.parquet", "column `strict` does not hold true or false"),
            ),
            (
                {"table": {**stored.EVALUATED, "problem": ["p", "q"]}},
                ("b/completions.parquet", "column `problem` does not hold integers"),
            ),
            (
                {"table": stored.parquet({name: [] for name in stored.EVALUATED})},
                ("b/completions.parquet",),
            ),
            ({"table": {**stored.EVALUATED, "prompt": ["3+3=", "2+2="]}}, ("not on the same problems",)),
        )
    ),
    # Models that can't be evaluated.
    *(
        Case(EVALUATE_M, words, 2, stored.model_files(replaced))
        for replaced, words in (
            ({"config.json": None, "notes.txt": ""}, ("m holds no model",)),
            (
                {"config.json": None, "checkpoint-8/x": "", "checkpoint-16/x": ""},
                ("holds no model", "m/checkpoint-16"),
            ),
            ({}, ("model.safetensors.index.json is missing", "copy or download the folder again")),
            ({"pytorch_model.bin": b"x"}, ("m/pytorch_model.bin is cut off or damaged",)),
            ({"model.safetensors": b""}, ("m/model.safetensors is empty",)),
            ({"model.safetensors": b"\x10\0\0\0\0\0\0\0{"}, ("m/model.safetensors", "cut off")),
            (
                {"model.safetensors": "version https://git-lfs.github.com/spec/v1"},
                ("m/model.safetensors", "git lfs pull"),
            ),
            ({"model.safetensors": stored.ONE_TENSOR[:-1]}, ("m/model.safetensors", "cut off")),
            ({"config.json": '{"model'}, ("m/config.json", "can't be read as JSON")),
            ({"config.json": "[]"}, ("m/config.json", "it is a list")),
            ({"tokenizer.json": '{"version"', "model.safetensors": b""}, ("m/tokenizer.json", "can't be read")),
            ({"model.safetensors.index.json": "{}"}, ("model.safetensors.index.json is damaged",)),
            (
                {"model.safetensors.index.json": {"weight_map": {"w": "model-00002-of-00002.safetensors"}}},
                ("m/model-00002-of-00002.safetensors is missing",),
            ),
            (
                {"config.json": None, "adapter_config.json": {"base_model_name_or_path": "org/base"}},
                ("adapter_model.safetensors or adapter_model.bin is missing",),
            ),
            (
                {"config.json": None, "adapter_config.json": "{", "adapter_model.safetensors": b""},
                ("m/adapter_config.json: can't be read as JSON",),
            ),
            (
                {"config.json": None, "adapter_config.json": "{", "adapter_model.bin": b"\x80"},
                ("m/adapter_config.json", "can't be read as JSON"),
            ),
            (
                {
                    "config.json": None,
                    "adapter_config.json": {"base_model_name_or_path": "/no/such/base"},
                    "adapter_model.bin": b"\x80",
                },
                ("its base /no/such/base is missing",),
            ),
        )
    ),
    # The options of an evaluation, and the folder it writes to.
    Case("grpo-recipes evaluate {model} --dataset arithmetic --tags a a", ("--tags", "two different tag names")),
    Case("grpo-recipes evaluate {model} --dataset arithmetic --tags '<a>' b", ("--tags", "two different tag names")),
    Case("grpo-recipes evaluate {model} --dataset arithmetic --samples 0", ("--samples is 0",)),
    Case("grpo-recipes evaluate {model} --dataset arithmetic --output recipe.yaml", ("recipe.yaml", "--output")),
    Case(
        "grpo-recipes evaluate {model} --dataset arithmetic --output e",
        ("e holds files that are no evaluation",),
        2,
        {"e/notes.txt": ""},
    ),
    *(
        Case(
            "grpo-recipes evaluate {model} --dataset arithmetic --limit 2 --output e",
            (f"e/{name}", *words),
            2,
            {f"e/{name}": content},
        )
        for name, content, words in (
            ("evaluation.json", "", ("can't be read as JSON",)),
            ("evaluation.json", "{}", ("it has no `problems`",)),
            ("evaluation.json", "[]", ("it is a list",)),
            ("request.json", "", ("can't be read as JSON", "remove the folder")),
            ("request.json", "[]", ("it is a list", "remove the folder")),
        )
    ),
    Case(
        "grpo-recipes evaluate {model} --dataset arithmetic --limit 2 --output e",
        ("e holds another evaluation", "it does not record"),
        2,
        {"e/request.json": "{}"},
    ),
    *(
        Case(
            "grpo-recipes evaluate run --output e",
            ("run/run.json", *words),
            2,
            {"run/config.json": "{}", "run/model.safetensors": stored.ONE_TENSOR, "run/run.json": record},
        )
        for record, words in (
            ("", ("can't be read as JSON",)),
            ("{}", ("it has no `recipe`",)),
            ('{"recipe": []}', ("`recipe` is a list",)),
            ('{"recipe": {"dataset": "gsm8k"}}', ("`recipe.dataset`", "not an object")),
            ('{"recipe": {"rewards": "gsm8k_correctness"}}', ("`recipe.rewards`", "not a list")),
        )
    ),
    Case(
        "grpo-recipes evaluate run --output e",
        ("`rewards`", "extract"),
        2,
        {
            "run/config.json": "{}",
            "run/model.safetensors": stored.ONE_TENSOR,
            "run/run.json": json.dumps(
                {
                    "recipe": {
                        "dataset": {"name": "arithmetic"},
                        "rewards": [{"name": "gsm8k_correctness", "kwargs": {"extract": "box"}}],
                    }
                }
            ),
        },
    ),
]


@pytest.mark.parametrize("case", RESULTS, ids=lambda case: case.line[:90])
def test_bad_input_ends_with_one_message(
    case: Case, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, tmp_path, tiny_model, monkeypatch)
