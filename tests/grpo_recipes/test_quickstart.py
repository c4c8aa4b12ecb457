"""Parts of the quickstart. `make quickstart` is the end-to-end test."""

import json
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_recipes import cli, quickstart
from grpo_recipes.data.load import load
from grpo_recipes.quickstart import WarmStart, build_policy, build_tokenizer, demonstrations, warm_start
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_recipes.recipe.recipe import parse_recipe
from grpo_recipes.run import train
from grpo_rewards import gsm8k_correctness, well_formed
from grpo_rewards.math.answers import extract_answer

PROMPTS = DatasetSpec("arithmetic", system_prompt="think")
SMALL = WarmStart(demonstrations=300)


@pytest.fixture(scope="module")
def conversations():
    return demonstrations(SMALL, PROMPTS)


@pytest.fixture(scope="module")
def tokenizer(conversations):
    return build_tokenizer(conversations, SMALL.vocab_size)


def test_every_demonstration_is_right_and_the_shares_are_as_set(conversations):
    golds = load(DatasetSpec("arithmetic", system_prompt="think", size=SMALL.demonstrations))["answer"]
    completions = [conversation["completion"][0]["content"] for conversation in conversations]
    tagged = well_formed(completions=completions)
    assert gsm8k_correctness(completions=completions, answer=golds) == [2.0 * is_tagged for is_tagged in tagged]
    stated = [extract_answer(completion, "auto") for completion in completions]
    for completion, answer, gold in zip(completions, stated, golds, strict=True):
        assert answer == gold or (answer is None and completion.endswith(f"={gold}"))
    shares = [sum(tagged) / len(tagged), (len(stated) - stated.count(None) - sum(tagged)) / len(tagged)]
    assert shares == pytest.approx(SMALL.shares[:2], abs=0.1)


@pytest.mark.slow
def test_no_held_out_problem_is_demonstrated():
    asked = {message["content"] for c in demonstrations(WarmStart(), PROMPTS) for message in c["prompt"]}
    held_out = load(DatasetSpec("arithmetic", split="test", size=quickstart.HELD_OUT_PROBLEMS, system_prompt="none"))
    assert not asked & {prompt[0]["content"] for prompt in held_out["prompt"]}


def test_the_policy_has_the_size_that_is_promised(conversations, tokenizer):
    policy = build_policy(tokenizer, WarmStart())
    assert 350_000 < policy.num_parameters() < 450_000, "0.4 million"
    ends = tokenizer.convert_ids_to_tokens([policy.config.eos_token_id, policy.config.pad_token_id])
    assert ends == ["<|im_end|>", "<|endoftext|>"]
    # The usual 0.02 suits wide models. 1 / sqrt(96) is 0.102.
    assert policy.get_input_embeddings().weight.std().item() == pytest.approx(0.12, rel=0.05)
    texts = [tokenizer.apply_chat_template(c["prompt"] + c["completion"], tokenize=False) for c in conversations]
    longest = max(len(ids) for ids in tokenizer(texts)["input_ids"])
    assert longest <= policy.config.max_position_embeddings <= 256


def test_a_warm_start_replaces_an_earlier_or_interrupted_one(monkeypatch, tmp_path, capsys):
    (tmp_path / "policy" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "policy" / "model.safetensors").write_bytes(b"half")
    tuned = []
    monkeypatch.setattr(quickstart, "fine_tune", lambda *args: tuned.append(args))
    warm_start(SMALL, PROMPTS, tmp_path / "policy")
    ((_, _, conversations, settings, folder),) = tuned
    assert (len(conversations), settings, folder) == (SMALL.demonstrations, SMALL, tmp_path / "policy")
    parameters = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").num_parameters()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    said = capsys.readouterr().out
    assert f"{parameters:,} parameters" in said
    assert f"{len(tokenizer)} tokens" in said
    assert tokenizer.eos_token == "<|im_end|>"
    assert not (tmp_path / "policy" / "checkpoint-1").exists()


def test_an_earlier_run_is_replaced_and_the_options_have_defaults(staged, monkeypatch, tmp_path, capsys):
    (tmp_path / "grpo-seed0").mkdir()
    (tmp_path / "grpo-seed0" / "old").write_text("an earlier run")
    assert quickstart.main(["--output_dir", str(tmp_path)]) == 0
    assert not (tmp_path / "grpo-seed0" / "old").exists()
    commands = [line for line in capsys.readouterr().out.splitlines() if f" {tmp_path}/grpo-seed0" in line][-2:]
    assert [command.split()[-2] for command in commands] == ["report", "diagnose"]
    defaults = quickstart._parse_arguments([])
    assert (defaults.seed, defaults.output_dir) == (0, Path("runs/quickstart"))


def test_ctrl_c_between_the_phases_prints_one_line(monkeypatch, tmp_path, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart, "demonstrations", interrupt)
    assert quickstart.main(["--output_dir", str(tmp_path)]) == 130
    assert capsys.readouterr().err.startswith("stopped by Ctrl-C: ")


def share(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.05, "high": value + 0.05}


STRICT = {"first": share(0.25), "second": share(0.875), "difference": share(0.625)}
COMPARED = {"problems": 400, "warnings": [], "strict": STRICT, "lenient": STRICT}


@pytest.fixture
def staged(monkeypatch):
    """Replace the slow phases. Returns the arguments of training, and a list with its exit code, to set."""
    asked, status, evaluated = [], [0], []
    monkeypatch.setattr(quickstart, "warm_start", lambda settings, prompts, folder: folder.mkdir(parents=True))
    monkeypatch.setattr(quickstart, "evaluate", lambda model, output, recipe: evaluated.append(output))
    monkeypatch.setattr(quickstart, "compare", lambda *folders: COMPARED if list(folders) == evaluated else {})
    monkeypatch.setattr(train, "main", lambda arguments: asked.append(arguments) or status[0])
    return asked, status


def test_the_result_is_a_file_and_a_table(staged, tmp_path, capsys):
    asked, _ = staged
    assert quickstart.main(["--seed", "2", "--output_dir", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "evaluation.json").read_text())
    assert written.pop("seconds") >= 0
    assert written == COMPARED
    said = capsys.readouterr().out
    assert "strict   0.250 [0.200, 0.300]  0.875 [0.825, 0.925]  0.625 [0.575, 0.675]" in said
    for figure in ("20,000", "40%", "400", f"{tmp_path}/evaluation.json"):
        assert figure in said
    recipe = parse_recipe(asked[0])
    assert recipe.training["seed"] == 2
    assert recipe.model["model_name_or_path"] == str(tmp_path / "policy-seed2")
    assert recipe.output_dir == tmp_path / "grpo-seed2"


def test_training_that_could_not_run_is_not_reported_as_a_result(staged, tmp_path):
    staged[1][0] = 2
    assert quickstart.main(["--output_dir", str(tmp_path)]) == 2
    assert not (tmp_path / "evaluation.json").exists()


@pytest.mark.slow
def test_it_runs_from_end_to_end(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(quickstart, "WarmStart", partial(WarmStart, demonstrations=64))
    monkeypatch.setattr(quickstart, "HELD_OUT_PROBLEMS", 8)
    main = train.main
    shortened = ["--max_steps", "2", "--max_completion_length", "8"]
    monkeypatch.setattr(train, "main", lambda arguments: main(arguments + shortened))
    assert quickstart.main(["--output_dir", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "evaluation.json").read_text())
    for label, side in (("before", "first"), ("after", "second")):
        completions = pd.read_parquet(tmp_path / "grpo-seed0" / "evaluations" / label / "completions.parquet")
        assert len(completions) == written["problems"] == 8
        assert completions["strict"].mean() == written["strict"][side]["value"]
        assert completions["lenient"].mean() == written["lenient"][side]["value"]
    capsys.readouterr()
    assert cli.main(["report", str(tmp_path / "grpo-seed0")]) == 0
    assert (tmp_path / "grpo-seed0" / "report" / "evaluation.svg").is_file()


def test_the_commands_of_the_phases_are_the_users_own(monkeypatch, tmp_path, capsys):
    """Evaluation and training run by the commands that the quickstart prints."""
    called, status = [], [0]
    monkeypatch.setattr(cli, "main", lambda arguments: called.append(arguments) or status[0])
    recipe = parse_recipe(["--config", "quickstart"])
    quickstart.evaluate(tmp_path / "model", tmp_path / "out", recipe)
    options = cli.parse(called[0])
    assert (options.model, options.output, options.recipe) == (str(tmp_path / "model"), tmp_path / "out", "quickstart")
    assert (options.limit, options.temperature, options.batch_size) == (400, recipe.config.temperature, 200)
    assert capsys.readouterr().out == f"grpo-recipes {' '.join(called[0])}\n"
    status[0] = 2
    with pytest.raises(SystemExit) as left:
        quickstart.evaluate(tmp_path / "model", tmp_path / "out", recipe)
    assert left.value.code == 2
