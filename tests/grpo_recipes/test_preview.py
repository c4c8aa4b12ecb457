"""`grpo-recipes preview` as a user types it, on the quickstart's recipe and its untrained policy."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from trl.trainer.utils import RepeatSampler

from grpo_recipes import GRPOTrainer, preview, train
from grpo_recipes.checks.checks import Machine
from grpo_recipes.checks.geometry import Geometry
from grpo_recipes.cli import main
from grpo_recipes.data.load import load
from grpo_recipes.process.faults import RunFault
from grpo_recipes.recipe.recipe import parse_recipe
from grpo_recipes.recipe.specs import SamplingSpec
from grpo_rewards import gsm8k_correctness, well_formed
from grpo_rewards.errors import UserError
from tests.support import launching, tiny
from tests.support.tool_rollouts import call

SHORT = ["--max_completion_length", "8"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, which a preview must leave empty."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def previewed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return the preview that `--json` prints, which must be all that it prints to standard output."""
    assert main(["preview", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def sampled(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the preview of two prompts with the recipe's own seed, which several tests compare theirs with."""
    printed = io.StringIO()
    with contextlib.chdir(tmp_path_factory.mktemp("sampled")), contextlib.redirect_stdout(printed):
        model = ["--model_name_or_path", str(tiny_model)]
        assert main(["preview", "quickstart", *model, "--prompts", "2", *SHORT, "--json"]) == 0
    return json.loads(printed.getvalue())


def test_prompts_and_scores_are_those_of_the_recipe(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, empty_folder: Path
) -> None:
    found = previewed(capsys, "quickstart", "--model_name_or_path", str(tiny_model), "--prompts", "3", *SHORT)
    spec = parse_recipe(["--config", "quickstart"]).dataset
    rows = load(spec)
    order = list(RepeatSampler(rows, mini_repeat_count=8, batch_size=8, shuffle=True, seed=0))[: 3 * 8 : 8]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert len(found["groups"]) == 3
    for index, group in zip(order, found["groups"], strict=True):
        prompt = rows[index]["prompt"]
        assert group["prompt"] == tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        assert group["tokens"] == len(tokenizer(group["prompt"])["input_ids"])
        texts = [one["text"] for one in group["completions"]]
        golds = [rows[index]["answer"]] * len(texts)
        pay = {
            "gsm8k_correctness": gsm8k_correctness(completions=texts, answer=golds),
            "well_formed": well_formed(completions=texts),
        }
        assert len(texts) == 8
        for place, one in enumerate(group["completions"]):
            assert one["pay"] == {name: scores[place] for name, scores in pay.items()}
            assert one["total"] == sum(one["pay"].values())
            assert one["said"]["gsm8k_correctness"]["gold"] == golds[0]
            assert 1 <= one["tokens"] <= 8
            assert one["cut"] or one["tokens"] < 8 or one["text"] == ""
    assert list(empty_folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("stop", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_completions_are_those_of_the_first_training_step(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path, stop: bool
) -> None:
    arguments = ["--model_name_or_path", str(tiny_model), *SHORT, "--temperature", "0.7", "--top_k", "9"]
    arguments += ["--per_device_train_batch_size", "16", "--rewards", f"{__name__}.letters"]
    if stop:
        arguments += ["--generation_kwargs.stop", "[a]"]
    found = previewed(capsys, "quickstart", *arguments, "--prompts", "2")
    run = ["--max_steps", "1", "--logging_steps", "1", "--log_completions", "true", "--output_dir", str(tmp_path)]
    assert train.main(["--config", "quickstart", *arguments, *run]) == 0
    trained = launching.completions(tmp_path)
    sampled = [one for group in found["groups"] for one in group["completions"]]
    assert [one["text"] for one in sampled] == [turns[0]["content"] for turns in trained["completion"]]
    assert [one["total"] for one in sampled] == pytest.approx(list(trained["letters"]))
    (logged,) = [entry for entry in launching.log_history(tmp_path) if "frac_reward_zero_std" in entry]
    assert sum(one["cut"] for one in sampled) / 16 == pytest.approx(logged["completions/clipped_ratio"])
    assert found["mean_length"] == pytest.approx(logged["completions/mean_length"])
    assert found["zero_variance"]["value"] == pytest.approx(logged["frac_reward_zero_std"])


def test_the_terminal_shows_prompts_scores_and_what_follows(
    capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    assert main(["preview", "quickstart", "--model_name_or_path", str(tiny_model), "--prompts", "1", *SHORT]) == 0
    said = capsys.readouterr().out
    assert "exactly as the model sees it" in said
    assert "  | <|im_start|>user\n" in said
    assert "well_formed 0: reason `does not start with <think>`" in said
    assert "1 of 1 groups" in said
    assert "what follows" in said
    assert "no completion has the format of `well_formed`" in " ".join(said.split())
    assert all(letter.isprintable() or letter == "\n" for letter in said.replace("�", ""))


def test_plan_preview_and_train_name_prefilled_for_a_chat_template_that_opens_the_thinking(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    with (model / "chat_template.jinja").open("a", encoding="utf-8") as file:
        file.write("{% if add_generation_prompt and enable_thinking is not false %}{{ '<think>\\n' }}{% endif %}")
    arguments = ["quickstart", "--model_name_or_path", str(model)]
    note = (
        "`rewards`: the prompt ends in `<think>`, so completions start inside the thinking, and an unfinished thought "
        "may be paid: set `prefilled: think` in the `kwargs` of gsm8k_correctness and well_formed"
    )
    assert main(["plan", *arguments]) == 0
    assert f"note {note}" in " ".join(capsys.readouterr().out.split())
    assert previewed(capsys, *arguments, "--prompts", "1", *SHORT)["findings"].count(note) == 1
    checked, _, _ = train.build_inputs(parse_recipe(["--config", *arguments]), Machine.here())
    assert checked.prompt_notes == [note]
    assert main(["plan", *arguments, "--chat_template_kwargs.enable_thinking", "false"]) == 0
    assert "prefilled" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_limit_of_the_dataset_is_announced_beside_the_json(
    capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    limit = ["--dataset.max_prompt_tokens", "90", "--dataset.size", "200"]
    found = previewed(capsys, "quickstart", "--model_name_or_path", str(tiny_model), "--prompts", "8", *limit, *SHORT)
    assert max(group["tokens"] for group in found["groups"]) <= 90


@pytest.mark.slow
def test_another_seed_gives_other_prompts_and_the_same_seed_the_same(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, sampled: dict[str, Any]
) -> None:
    arguments = ["quickstart", "--model_name_or_path", str(tiny_model), "--prompts", "2", *SHORT]
    again, other = (previewed(capsys, *arguments, "--seed", seed) for seed in ("0", "1"))
    assert sampled["groups"] == again["groups"]
    assert sampled["groups"] != other["groups"]


def test_a_reward_that_raises_ends_in_one_line(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    arguments = ["--model_name_or_path", str(tiny_model), "--rewards", f"{__name__}.raises", *SHORT]
    assert main(["preview", "quickstart", "--prompts", "1", *arguments]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: reward `raises` raised ZeroDivisionError: no such luck")


def letters(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(set(turns[-1]["content"]))) for turns in completions]


def raises(completions: list[Any], **columns: Any) -> list[float]:
    raise ZeroDivisionError("no such luck")


async def slow_variety(completions: list[Any], **columns: Any) -> list[float | None]:
    """Pay nothing for the first completion of a batch, as a reward that can't score it."""
    return [None, *map(float, range(1, len(completions)))]


@pytest.mark.slow
def test_a_reward_may_be_a_coroutine_and_score_nothing(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    arguments = ["--model_name_or_path", str(tiny_model), "--rewards", f"{__name__}.slow_variety", *SHORT]
    found = previewed(capsys, "quickstart", "--prompts", "1", *arguments)
    paid = [one["pay"]["slow_variety"] for one in found["groups"][0]["completions"]]
    assert paid == [None, *map(float, range(1, 8))]
    assert found["rewards"]["slow_variety"]["unscored"] == 1
    assert found["groups"][0]["completions"][0]["total"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["quickstart", "--prompts", "0"], "--prompts is 0: set it to at least 1"),
        (["quickstart", "--lerning_rate", "1"], "did you mean `learning_rate`"),
        (["quickstart"], "runs/quickstart/policy-seed0: there is no such folder (relative to "),
        (["offline-scored-gpt2"], "`offline` trains on recorded responses"),
        (["quickstart", "--num_generations", "7"], "must be a multiple of `num_generations`"),
    ],
)
def test_what_training_refuses_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert main(["preview", *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_ctrl_c_ends_in_one_line(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch, empty_folder: Path
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    loaded: list[Any] = []
    monkeypatch.setattr(train, "load_reward_models", lambda recipe, checked: loaded.append(checked.rewards))
    monkeypatch.setattr("grpo_recipes.training.trainer.GRPOTrainer._generate", interrupt)
    assert main(["preview", "quickstart", "--model_name_or_path", str(tiny_model), *SHORT]) == 130
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "stopped by Ctrl-C\n")
    assert len(loaded) == 1, "the models of rewards are loaded before the policy"
    assert list(empty_folder.iterdir()) == []


@pytest.mark.slow
def test_an_adapter_on_a_base_is_sampled(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, sampled: dict[str, Any]
) -> None:
    """A new adapter changes nothing, so its completions are those of the base."""
    arguments = ["quickstart", "--model_name_or_path", str(tiny_model), "--prompts", "2", *SHORT]
    adapted = previewed(capsys, *arguments, "--use_peft", "true", "--lora_target_modules", ".*q_proj", "--beta", "0.1")
    texts = [[one["text"] for group in found["groups"] for one in group["completions"]] for found in (sampled, adapted)]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_more_prompts_than_a_generation_batch_holds_are_sampled_in_several(
    capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    """A generation batch has 4 prompts in micro-batches of half a group. The prompts are those of one large batch."""
    model = ["quickstart", "--model_name_or_path", str(tiny_model), *SHORT]
    small = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "8"]
    found = previewed(capsys, *model, *small, "--prompts", "6", "--gradient_checkpointing", "true", "--beta", "0.1")
    at_once = previewed(capsys, *model, "--prompts", "6")
    assert [group["prompt"] for group in found["groups"]] == [group["prompt"] for group in at_once["groups"]]
    assert found["cost"]["completions"] == 32
    assert found["cost"]["step"].keys() == {"generation", "scoring", "training"}
    assert min(found["cost"]["step"].values()) > 0


@pytest.mark.slow
def test_a_gradient_that_does_not_fit_leaves_the_sample(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("grpo_recipes.training.trainer.GRPOTrainer.compute_loss", fails)
    found = previewed(capsys, "quickstart", "--model_name_or_path", str(tiny_model), "--prompts", "2", *SHORT)
    assert len(found["groups"]) == 2
    assert found["cost"]["training"] is None
    assert any("`per_device_train_batch_size`" in sentence for sentence in found["findings"])


def test_a_generation_that_does_not_fit_ends_in_one_line(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("grpo_recipes.training.trainer.GRPOTrainer._generate_single_turn", fails)
    assert main(["preview", "quickstart", "--model_name_or_path", str(tiny_model), *SHORT]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "(CUDA out of memory): lower `per_device_train_batch_size`" in last


@pytest.mark.slow
def test_no_update_is_made(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *args, **kwargs: steps.append(args))
    arguments = ["quickstart", "--model_name_or_path", str(tiny_model), "--learning_rate", "1.0", *SHORT]
    previewed(capsys, *arguments, "--per_device_train_batch_size", "8", "--prompts", "2")
    assert steps == []


def calls_once(text: str) -> str:
    """Repeat a text.

    Args:
        text: Text.
    """
    return f"{text}\x1b[31m {text}"


def test_a_completion_with_tools_is_shown_as_turns(
    capsys: pytest.CaptureFixture[str], tool_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last message alone would hide calls and results. A result must not steer the terminal."""
    called = call("calls_once", text="so")
    ids = tiny.chat_tokenizer()(f"{called}<|im_end|>")["input_ids"]
    monkeypatch.setattr(
        GRPOTrainer,
        "_generate_single_turn",
        lambda self, prompts, *rest, **more: ([ids if n % 2 else [65, 257] for n in range(len(prompts))], None),
    )
    arguments = ["calculator", "--model_name_or_path", str(tool_model), "--tools", f"[{__name__}.calls_once]"]
    arguments += ["--prompts", "1", "--bf16", "false", "--num_generations", "2", "--max_completion_length", "400"]
    arguments += ["--max_tool_calling_iterations", "1", "--generation_check", "false"]
    (group,) = previewed(capsys, *arguments)["groups"]
    plain, turns = (one.get("turns") for one in group["completions"])
    assert plain is None
    assert [turn["kind"] for turn in turns] == ["call", "result", "text"]
    assert main(["preview", *arguments]) == 0
    said = capsys.readouterr().out
    assert "Turn 1 calls calls_once" in said
    assert "Result of calls_once, not trained on" in said
    assert "\x1b" not in said


# Parts of a preview, without a policy


def test_the_sampling_recipe_has_one_process_and_one_batch_more_than_is_needed(tmp_path: Path) -> None:
    recipe = parse_recipe(["--config", "quickstart", "--num_generations", "6", "--per_device_train_batch_size", "8"])
    keys = dict.fromkeys(REMOVED, "given")
    recipe = replace(recipe, training={**recipe.training, **keys, "learning_rate": 0.5}, sampling=SamplingSpec())
    sampling = preview.sampling_recipe(recipe, together=2, batches=3, folder=tmp_path)
    assert sampling.sampling is None, "prompts are drawn in the order of an epoch"
    training = sampling.training
    # 12 rows in micro-batches of at most 8: of 6. Three batches and one more, of two micro-batches each.
    assert training["per_device_train_batch_size"] == 6
    assert (training["steps_per_generation"], training["gradient_accumulation_steps"]) == (2, 8)
    assert training["output_dir"] == str(tmp_path)
    assert training["learning_rate"] == 0.5
    assert not set(REMOVED) & set(training)
    assert (training["max_steps"], training["num_iterations"], training["report_to"]) == (1, 1, "none")
    for key in ("eval_strategy", "save_strategy", "logging_strategy"):
        assert training[key] == "no"
    assert training["log_completions"] is False
    assert training["disable_tqdm"] is True


REMOVED = ("deepspeed", "fsdp", "fsdp_config", "generation_batch_size", "resume_from_checkpoint", "push_to_hub",
           "log_completions_hub_repo", "load_best_model_at_end", "eval_on_start")  # fmt: skip
"""Keys of several processes, of evaluations, and of what a run writes, which a preview must not do."""


def watch(needed: int) -> tuple[preview.Watch, list[Any]]:
    asked: list[Any] = []
    trainer = SimpleNamespace(
        _generate=lambda prompts: asked.append(prompts) or "generated",
        _calculate_rewards=None,
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )
    return preview.Watch(trainer, [], needed, []), asked


@pytest.mark.parametrize(
    ("needed", "totals", "goes_on"),
    [
        (1, [], True),
        (1, [9.9], True),
        (1, [10.0], False),
        (1, [1.0, 1.0], False),
        (2, [1.0], True),
        (2, [1.0] * 2, False),
    ],
)
def test_a_single_short_batch_is_timed_again(needed: int, totals: list[float], goes_on: bool) -> None:
    """The first batch also loads kernels, which would be counted as training."""
    made, asked = watch(needed)
    made.batches = [preview.Batch([], 0.0, 0.0, total) for total in totals]
    if goes_on:
        assert made.generate(["p"]) == "generated"
        assert asked == [["p"]]
    else:
        with pytest.raises(preview.Sampled):
            made.generate(["p"])
        assert asked == []
    assert [batch.total for batch in made.batches] == totals, "the times of earlier batches stay"


def test_the_next_generation_ends_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = watch(2)
    made.batches = [preview.Batch([], 3.0, 1.0)]
    made._started = 100.0
    monkeypatch.setattr(preview.time, "monotonic", lambda: 107.0)
    made.generate(["p"])
    assert made.batches[0].total == 7.0


def test_the_inputs_are_checked_for_the_processes_that_training_would_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[Any] = []
    recipe = parse_recipe(["--config", "quickstart"])
    monkeypatch.setattr(preview, "choose_layout", lambda *given, use_cpu: SimpleNamespace(num_processes=3))
    for name in ("check_packages", "dry_config", "check_model_exists"):
        monkeypatch.setattr(preview.checks, name, lambda recipe, *rest, name=name: called.append((name, *rest)))
    monkeypatch.setattr(preview, "geometry_of", lambda recipe, processes: called.append(("geometry", processes)))
    monkeypatch.setattr(train, "build_inputs", lambda recipe, machine: ("checked", "tokenizer", "recorded"))
    monkeypatch.setattr(train, "load_reward_models", lambda recipe, checked: called.append(("rewards", checked)))
    checked, tokenizer, machine = preview.checked_inputs(recipe)
    assert (checked, tokenizer, machine.num_processes) == ("checked", "tokenizer", 3)
    assert called == [
        ("check_packages",), ("geometry", 3), ("dry_config", machine), ("check_model_exists",), ("rewards", "checked"),
    ]  # fmt: skip


def test_the_gradient_ends_the_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = watch(1)
    times = iter([100.0, 103.0, 108.0])
    monkeypatch.setattr(preview.time, "monotonic", lambda: next(times))
    made.generate(["p"])
    assert made._generation == 3.0
    made.batches.append(preview.Batch([], 3.0, 1.0))
    with pytest.raises(preview.Sampled):
        made.on_pre_optimizer_step()
    assert made.batches[0].total == 8.0


@pytest.mark.parametrize(
    ("scores", "total"),
    [({"a": 1.0, "b": 2.0}, 2.0), ({"a": 1.0, "b": None}, 1.0), ({"a": None, "b": 2.0}, 1.0), ({"a": None}, None)],
)
def test_a_total_leaves_out_what_gives_no_score(scores: dict[str, float | None], total: float | None) -> None:
    assert preview._total(scores, {"a": 1.0, "b": 0.5}) == total
    assert preview._score(float("nan")) is None
    assert preview._score(0.0) == 0.0


@pytest.mark.parametrize(
    ("vllm", "batching", "verified", "name"),
    [
        (True, False, True, "vLLM"),
        (False, True, True, "transformers' continuous batching"),
        (False, False, True, "group decoding"),
        (False, False, False, "transformers' generate"),
    ],
)
def test_the_generator_is_named(vllm: bool, batching: bool, verified: bool, name: str) -> None:
    generation = SimpleNamespace(is_verified=verified)
    trainer = SimpleNamespace(use_vllm=vllm, use_transformers_continuous_batching=batching, _generation=generation)
    assert preview.generator_name(trainer) == name


def test_the_cost_of_a_step_is_that_of_the_last_batch() -> None:
    recipe = parse_recipe(["--config", "quickstart"])
    geometry = Geometry.from_config(recipe.config, 1)
    checked = SimpleNamespace(geometry=geometry, train_dataset=[0] * 80)
    group = SimpleNamespace(completions=[SimpleNamespace(tokens=3), SimpleNamespace(tokens=5)])
    batch = preview.Batch([group, group], generation=2.0, scoring=0.5, total=6.0)
    cost = preview.cost_of(recipe, checked, "CPU", batch)
    assert (cost.completions, cost.tokens, cost.generation, cost.scoring, cost.training) == (4, 16, 2.0, 0.5, 3.5)
    assert (cost.device, cost.steps) == ("CPU", geometry.optimizer_steps(recipe.config, 80))
    batch.total = None
    assert preview.cost_of(recipe, checked, "CPU", batch).training is None


@pytest.fixture
def staged_parts(monkeypatch: pytest.MonkeyPatch) -> tuple[SimpleNamespace, list[Any]]:
    """Replace all that needs a policy: a process holds 16 completions of a generation, in groups of 4.

    Returns the checked recipe, and what `preview` asks for.
    """
    asked: list[Any] = []
    checked = Checked(SimpleNamespace(completions_per_rank=16, num_generations=4), [], [], "held out")
    args = SimpleNamespace(n_gpu=4)

    class Watched:
        def __init__(self, trainer: Any, listeners: list[Any], batches: int, rewards: list[Any]) -> None:
            asked.append((trainer, batches))
            self.batches = [
                preview.Batch([f"group {batch}.{n}" for n in range(4)], 1.0, 1.0) for batch in range(batches)
            ]

        def run(self) -> None:
            asked.append("run")

    def bare_trainer(recipe: Any, machine: Any, args: Any, checked: Any, tokenizer: Any) -> str:
        asked.append((recipe, args._n_gpu, checked.eval_dataset))
        return "trainer"

    monkeypatch.setattr(preview, "checked_inputs", lambda recipe: (checked, "tokenizer", "machine"))
    monkeypatch.setattr(preview, "sampling_recipe", lambda recipe, together, batches, folder: (together, batches))
    monkeypatch.setattr(preview.checks, "grpo_config", lambda recipe: args)
    monkeypatch.setattr(train, "leave_token_to_environment", lambda args: args)
    monkeypatch.setattr(train, "bare_trainer", bare_trainer)
    monkeypatch.setattr(train, "hardware", lambda args: "a CPU")
    monkeypatch.setattr(preview, "Watch", Watched)
    monkeypatch.setattr(preview, "generator_name", lambda trainer: f"generator of {trainer}")
    monkeypatch.setattr(preview, "cost_of", lambda recipe, checked, device, batch: (device, batch.groups[0]))
    return checked, asked


@dataclass(frozen=True)
class Checked:
    geometry: SimpleNamespace
    rewards: list[Any]
    all_rewards: list[Any]
    eval_dataset: str | None


@pytest.mark.parametrize(
    ("prompts", "held", "together", "batches"),
    [(6, 18, 4, 2), (8, 16, 4, 2), (9, 16, 4, 3), (2, 16, 2, 1), (2, 2, 1, 2)],
)
def test_prompts_are_sampled_in_batches_that_a_process_holds(
    prompts: int, held: int, together: int, batches: int, staged_parts: tuple[SimpleNamespace, list[Any]]
) -> None:
    checked, asked = staged_parts
    checked.geometry.completions_per_rank = held
    arguments = ["--config", "quickstart", "--model_name_or_path", "m", "--temperature", "0.7"]
    found = preview.preview(arguments, prompts=prompts)
    assert asked == [((together, batches), 1, None), ("trainer", batches), "run"]
    every = [f"group {batch}.{n}" for batch in range(batches) for n in range(4)]
    assert found.groups == every[:prompts]
    assert found.cost == ("a CPU", f"group {batches - 1}.0"), "the last batch is nearest to training"
    assert (found.model, found.generator, found.temperature) == ("m", "generator of trainer", 0.7)
    assert found.max_completion_length == parse_recipe(arguments).config.max_completion_length
    assert found.by_reward is False
    each = preview.preview([*arguments, "--multi_objective_aggregation", "normalize_then_sum"], prompts=1)
    assert each.by_reward is True


def test_an_error_of_the_sampling_is_one_line_without_secrets(
    staged_parts: tuple[SimpleNamespace, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train, "known_secrets", lambda recipe: {"hunter2"})
    errors = [
        (
            ValueError("no\nroom for hunter2"),
            RunFault,
            r"quickstart.*: the policy can't be sampled \(ValueError: no room for <h",
        ),
        (
            torch.OutOfMemoryError("x" * 200),
            RunFault,
            r"quickstart.*: one device has too little memory .* \(x{117}\.\.\.\): lower",
        ),
        (RunFault("as it is"), RunFault, r"^as it is$"),
        (UserError("as it is"), UserError, r"^as it is$"),
    ]
    for error, kind, says in errors:

        def fails(*given: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(train, "bare_trainer", fails)
        with pytest.raises(kind, match=says):
            preview.preview(["--config", "quickstart"], prompts=1)
        printed = capsys.readouterr().err
        assert ("Traceback" in printed) == (type(error) is ValueError)
        assert "hunter2" not in printed


def test_the_sample_holds_what_every_reward_logged_and_the_time_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment's reward has no listener. Two groups of two completions, of prompts of 3 tokens."""
    begun: list[int] = []
    listener = SimpleNamespace(
        reward=SimpleNamespace(name="own"), rows=[{"gold": n} for n in range(4)], begin=begun.append
    )
    nan = float("nan")
    trainer = SimpleNamespace(
        _generate=lambda prompts: ([[1, 2, 3], [1, 2, 3], [4, 5, 6], [4, 5, 6]],),
        _calculate_rewards=lambda *given: torch.tensor([[1.0, nan], [0.5, 2.0], [nan, nan], [0.0, 0.0]]),
        _tokenizer=SimpleNamespace(decode=lambda ids: f"prompt of {ids}"), num_generations=2, _stop=None,
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )  # fmt: skip
    monkeypatch.setattr(preview, "are_truncated", lambda trainer, ids, stop: [len(one) > 1 for one in ids])
    rewards = [SimpleNamespace(name="own", weight=2.0), SimpleNamespace(name="Game", weight=0.5)]
    made = preview.Watch(trainer, [listener], 1, rewards)
    times = iter([100.0, 102.0, 103.0, 107.0])
    monkeypatch.setattr(preview.time, "monotonic", lambda: next(times))
    made.generate(["p"] * 4)
    scores = made.score([], ["p"] * 4, ["a", "b", "c", "d"], [[7], [7, 8], [7], [7]])
    assert scores.shape == (4, 2)
    assert begun == [4]
    (batch,) = made.batches
    assert (batch.generation, batch.scoring, batch.total) == (2.0, 4.0, None)
    assert [(group.prompt, group.tokens) for group in batch.groups] == [
        ("prompt of [1, 2, 3]", 3),
        ("prompt of [4, 5, 6]", 3),
    ]
    completions = [one for group in batch.groups for one in group.completions]
    assert [one.text for one in completions] == ["a", "b", "c", "d"]
    assert [one.is_cut for one in completions] == [False, True, False, False]
    assert batch.lengths == [1, 2, 1, 1]
    assert [one.total for one in completions] == [2.0, 2.0, None, 0.0]
    assert completions[0].scores == {"own": 1.0, "Game": None}
    assert [one.logged for one in completions] == [{"own": {"gold": n}, "Game": {}} for n in range(4)]


def test_a_policy_that_does_not_fit_after_the_first_batch_leaves_its_sample() -> None:
    made, _ = watch(1)

    def run_out() -> None:
        raise torch.OutOfMemoryError("x")

    added: list[Any] = []
    trainer: Any = made.trainer
    trainer.add_callback, trainer.train = added.append, run_out
    with pytest.raises(torch.OutOfMemoryError):
        made.run()
    made.batches.append(preview.Batch([], 0.0, 0.0))
    made.run()
    assert added == [made, made]


def test_a_seed_of_0_replaces_that_of_the_recipe(
    staged_parts: tuple[SimpleNamespace, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "cost_of", lambda recipe, *rest: recipe.config.seed)
    arguments = ["--config", "quickstart", "--seed", "5"]
    seeds = [preview.preview(arguments, prompts=1, seed=seed).cost for seed in (None, 0, 7)]
    assert seeds == [5, 0, 7]
