"""Bad input of `grpo-rewards`, and of rewards in a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.bad_input import Case, check

# grpo-rewards.
SCORED = {"rows.jsonl": '{"completion": "<answer>18</answer>", "answer": "18"}\n' * 8}


UNSCORABLE = {"rows.jsonl": '{"completion": "<answer>18</answer>", "answer": ""}\n' * 3}


CHECKED = "grpo-rewards check rows.jsonl --reward "


INTERNLM2 = json.dumps(
    {
        "architectures": ["InternLM2ForRewardModel"],
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
)


def own(module: str, body: str) -> dict[str, str]:
    """Return the files of a reward of the user's own.

    Each row has its own module, because a module is imported once.
    """
    return {**SCORED, f"{module}.py": f"def reward({body}\n"}


REWARDS: list[Case] = [
    Case("train --config {recipe}", ("recipe.yaml: `rewards`: reward `judge`: http://127.0.0.1:9/v1 gives no score",),
         changes={"rewards": [{"name": "judge", "kwargs": {"base_url": "http://127.0.0.1:9/v1", "model": "m",
                                                           "attempts": 1}}]}),
    Case("train --config {recipe}", ("recipe.yaml: `rewards`: reward `judge`: http://127.0.0.1:9/v1 gives no score",),
         changes={"rewards": [{"name": "gate", "only_if": "well_formed", "reward":
                               {"name": "judge", "kwargs": {"base_url": "http://127.0.0.1:9/v1", "model": "m",
                                                            "attempts": 1}}}]}),
    Case("train --config {recipe}", ("recipe.yaml: `rewards`: judge needs the column `rubric`",),
         changes={"rewards": [{"name": "judge", "kwargs": {"base_url": "http://127.0.0.1:9/v1", "model": "m",
                                                           "template": "By {rubric}: {completion}"}}]}),
    Case("train --config {recipe}", ("recipe.yaml: `rewards`: instructions needs the column `instruction_id_list`",),
         changes={"rewards": ["instructions"]}),
    Case("train --config {recipe}", ("recipe.yaml: `rewards`: json_schema needs the column `schema`",),
         changes={"rewards": ["json_schema"]}),
    Case("grpo-rewards score rows.jsonl --reward gsm8k_correctness", ("8 rows, 0 unscorable", "mean 2.0000"), 0,
         SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_count --gold-column answer", ("8 rows",), 0, SCORED),
    Case("grpo-rewards score rows.jsonl --reward gsm8k_correctness --gold-column nope",
         ("rows.jsonl has no column `nope`", "--gold_column", "`completion`, `answer`"), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_count --gold-column nope", ("no column `nope`",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward gsm8k_correctness",
         ("`gsm8k_correctness` needs the dataset column `answer`",), files={"rows.jsonl": '{"completion": "18"}\n'}),
    Case("grpo-rewards score rows.jsonl --reward gsm8k_correctness",
         ("gsm8k_correctness could score none of 3 rows", "no gold in `answer`", "row 1"), 1, UNSCORABLE),
    Case("grpo-rewards score rows.jsonl --reward own_none.reward", ("reward could score none of 8 rows", "None"), 1,
         own("own_none", "completions, **columns): return [None] * len(completions)")),
    Case("grpo-rewards score rows.jsonl --reward own_count.reward", ("`reward` returned 11 scores for 8 completions",),
         files=own("own_count", "completions, **columns): return [0.0] * 11")),
    Case("grpo-rewards score rows.jsonl --reward own_raises.reward",
         ("`reward` raised ZeroDivisionError: division by zero", "own_raises.py, line 1"),
         files=own("own_raises", "completions, **columns): return [1 / 0 for _ in completions]")),
    Case("grpo-rewards score rows.jsonl --reward own_value.reward", ("`reward` raised ValueError: math domain error",),
         files=own("own_value", "completions, **columns): raise ValueError('math domain error')")),
    Case("grpo-rewards score rows.jsonl --reward own_nan.reward", ("`reward` returned nan for row 1", "finite number"),
         files=own("own_nan", "completions, **columns): return [float('nan')] * len(completions)")),
    Case("grpo-rewards score rows.jsonl --reward own_inf.reward", ("`reward` returned -inf for row 1",),
         files=own("own_inf", "completions, **columns): return [float('-inf')] * len(completions)")),
    Case("grpo-rewards score rows.jsonl --reward own_text.reward", ("`reward` returned '1' for row 1",),
         files=own("own_text", "completions, **columns): return ['1'] * len(completions)")),
    Case("grpo-rewards score rows.jsonl --reward own_scalar.reward", ("`reward` returned a float, not a list",),
         files=own("own_scalar", "completions, **columns): return 1.0")),
    Case("grpo-rewards score rows.jsonl --reward own_mapping.reward", ("`reward` returned a dict, not a list",),
         files=own("own_mapping", "completions, **columns): return {}")),
    Case("grpo-rewards score rows.jsonl --reward own_signature.reward",
         ("`own_signature.reward` can't take `prompts` and `completions` by name", "f(prompts=..., completions=..."),
         files=own("own_signature", "response): return [0.0]")),
    Case("grpo-rewards score rows.jsonl --reward own_closed.reward",
         ("`reward` can't be called", "unexpected keyword argument", "**columns"),
         files=own("own_closed", "prompts, completions): return [0.0]")),
    Case("grpo-rewards score rows.jsonl --reward own_import.reward",
         ("`own_import` can't be imported", "ZeroDivisionError"), files={**SCORED, "own_import.py": "1 / 0"}),
    Case("grpo-rewards score rows.jsonl --reward own_syntax.reward", ("`own_syntax` can't be imported", "SyntaxError"),
         files={**SCORED, "own_syntax.py": "def reward(:"}),
    Case("grpo-rewards score rows.jsonl --reward '{name: own_factory.reward, kwargs: {}}'",
         ("reward `own_factory.reward`: KeyError",), files=own("own_factory", "): return {}['x']")),
    Case("grpo-rewards score rows.jsonl --reward no_such_module.reward", ("can't be imported", "no_such_module"),
         files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward math.pi", ("`math.pi` is a float, which can't be called",),
         files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_cuont", ("unknown reward `tag_cuont`: did you mean `tag_count`?",),
         files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward zzz", ("unknown reward `zzz`: `grpo-rewards list`",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward ''", ("a reward is a name or a mapping",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward '{name: tag_count'", ("is not YAML",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward '{name: tag_count, kwarg: {}}'", ("did you mean `kwargs`?",),
         files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward '{name: gsm8k_correctness, kwargs: {extract: box}}'",
         ("extract must be one of", "'box'"), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward '{name: gsm8k_correctness, kwargs: {extarct: boxed}}'",
         ("unknown kwarg `extarct`: did you mean `extract`?",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward '{name: gsm8k_correctness, kwargs: {extract: boxed}}'",
         ("no completion states an answer where `extract: boxed` looks", "`extract: answer_tag` finds one in 8 of 8"),
         0,
         SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_count --num-generations 0", ("--num_generations", "at least 1"),
         files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward group_length --num-generations 3", ("whole number of groups of 3",),
         files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward group_length", ("needs num_generations",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_count --out scores.csv", ("name a .jsonl file",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_count --out rows.jsonl", ("is the file to score",), files=SCORED),
    Case("grpo-rewards score rows.jsonl --reward tag_count --out there.jsonl", ("there.jsonl can't be written",),
         files={**SCORED, "there.jsonl/file": ""}),
    Case("grpo-rewards score absent.jsonl --reward tag_count", ("absent.jsonl is not a file",)),
    Case("grpo-rewards score . --reward tag_count", (". is not a file",)),
    Case("grpo-rewards score rows.jsonl --reward tag_count", ("no row that can be used", "row 1: not JSON"),
         files={"rows.jsonl": b"\xff\xfe\x00junk\n"}),
    Case("grpo-rewards score rows.jsonl --reward tag_count", ("no row that can be used",), files={"rows.jsonl": ""}),
    Case("grpo-rewards score rows.jsonl --reward tag_count", ("row 1: a list, not an object",),
         files={"rows.jsonl": '[{"completion": "18"}]\n'}),
    Case("grpo-rewards score rows.jsonl --reward tag_count", ("row 1: no `completion`", "`text`"),
         files={"rows.jsonl": '{"text": "18"}\n'}),
    Case("grpo-rewards score rows.parquet --reward tag_count", ("rows.parquet is not a Parquet file",),
         files={"rows.parquet": b"PAR1 junk"}),
    Case("grpo-rewards check rows.jsonl", ("8 golds, 8 earn full pay",), 0, SCORED),
    Case("grpo-rewards check rows.jsonl", ("none of 3 golds in `answer` can be read",), 1, UNSCORABLE),
    Case("grpo-rewards check rows.jsonl --gold-column gold", ("no `gold`",), files=SCORED),
    Case(CHECKED + "tag_count", ("check needs a correctness reward",), files=SCORED),
    Case(CHECKED + "'{name: gsm8k_correctness, kwargs: {gold_column: x}}'", ("row 1: no `x`",),
         files=SCORED),
    Case("grpo-rewards convert-internlm2 absent out", ("'absent' is neither a folder nor a model",)),
    Case("grpo-rewards convert-internlm2 empty out", ("has no config.json",), files={"empty/file": ""}),
    Case("grpo-rewards convert-internlm2 odd out", ("config.json: can't be read as JSON",),
         files={"odd/config.json": "{"}),
    Case("grpo-rewards convert-internlm2 odd out", ("config.json: it is not a JSON object",),
         files={"odd/config.json": "[]"}),
    Case("grpo-rewards convert-internlm2 odd out", ("config.json lacks vocab_size",),
         files={"odd/config.json": '{"architectures": ["InternLM2ForRewardModel"]}'}),
    Case("grpo-rewards convert-internlm2 odd out", ("config.json has a value", "hidden_size"),
         files={"odd/config.json": INTERNLM2.replace("16", '"x"')}),
    Case("grpo-rewards convert-internlm2 odd out", ("config.json has a value", "float3"),
         files={"odd/config.json": INTERNLM2.replace("{", '{"dtype": "float3", ')}),
    Case("grpo-rewards convert-internlm2 odd out", ("no model.safetensors",), files={"odd/config.json": INTERNLM2}),
    Case("grpo-rewards convert-internlm2 odd out", ("odd has a tokenizer that can't be read",),
         files={"odd/config.json": INTERNLM2, "odd/model.safetensors": "", "odd/tokenizer.json": "{}"}),
    Case("grpo-rewards convert-internlm2 {model} out", ("not InternLM2ForRewardModel",)),
    Case("grpo-rewards convert-internlm2 {model} there", ("there exists already",), files={"there/file": ""}),
]  # fmt: skip


@pytest.mark.parametrize("case", REWARDS, ids=lambda case: case.line[:90])
def test_bad_input_ends_with_one_message(
    case: Case, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, tmp_path, tiny_model, monkeypatch)
