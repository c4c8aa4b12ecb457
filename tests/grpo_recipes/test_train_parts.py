"""Parts of `grpo_recipes.train` that decide, print or call, on a recipe without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_recipes import train
from grpo_recipes.process import faults
from grpo_recipes.recipe.recipe import Recipe, RecipeError, parse_recipe
from grpo_recipes.runs.identity import Source
from grpo_recipes.runs.lock import FolderLost
from grpo_rewards.errors import UserError


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return parse_recipe(["--config", "quickstart", "--model_name_or_path", "a-model", "--output_dir", str(tmp_path)])


def prepared_of(recipe: Any, **values: Any) -> train.Prepared:
    """Return a preparation of which only the recipe and `values` are set."""
    unset: dict[str, Any] = dict.fromkeys(train.Prepared.__dataclass_fields__)
    return train.Prepared(**{**unset, "recipe": recipe, "steps_before": 0, **values})


def raising(error: BaseException) -> Callable[..., Any]:
    def raises(*given: Any, **named: Any) -> None:
        raise error

    return raises


# The folder and the checkpoint


@pytest.mark.parametrize(
    ("error", "is_lost", "ends"),
    [
        (ValueError("no file"), True, "(ValueError): "),
        (ValueError("no file"), False, "no file"),
        (UserError("a mistake"), True, "a mistake"),
        (FolderLost("lost before"), True, "lost before"),
    ],
)
def test_an_error_in_a_lost_folder_names_the_loss(
    error: Exception, is_lost: bool, ends: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = SimpleNamespace(loss=lambda: "another launch took runs/a" if is_lost else None)
    opened, loaded = [], []

    @contextmanager
    def only_writer(folder: Path) -> Iterator[Any]:
        opened.append(folder)
        yield held

    monkeypatch.setattr(train, "only_writer", only_writer)
    monkeypatch.setattr(train, "load_reward_models", lambda recipe, checked: loaded.append(checked))

    def fails() -> None:
        with train.only_run(prepared_of(recipe, checked="checked")) as prepared:
            assert prepared.held is held
            raise error

    with pytest.raises(type(error) if ends == str(error) else FolderLost) as raised:
        fails()
    assert str(raised.value).endswith(ends) or "another launch took runs/a" in str(raised.value)
    assert (opened, loaded) == ([recipe.output_dir], ["checked"])


def test_a_checkpoint_is_confirmed_and_another_one_is_compared_too(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = prepared_of(recipe)
    assert train.confirm_checkpoint(new) is new
    first, before = Path("run/checkpoint-4"), Path("run/checkpoint-2")
    compared: list[Any] = []
    asked: list[Any] = []
    found = SimpleNamespace(newest=first, obstacle=lambda: None)

    def confirmed(point: Any, *, each_node: bool) -> Any:
        asked.append((point, each_node))
        return found

    monkeypatch.setattr(train.resume, "confirmed", confirmed)
    monkeypatch.setattr(train, "check_same_content", lambda recipe, *given: compared.append(given))
    monkeypatch.setattr(train, "steps_done", lambda checkpoint: int(checkpoint.name.partition("-")[2]))
    point = SimpleNamespace(newest=first)
    resumed = prepared_of(recipe, point=point, identity="identity")
    assert (train.confirm_checkpoint(resumed).steps_before, compared) == (4, [])
    assert asked == [(point, recipe.config.save_on_each_node)]
    found.newest = before
    again = train.confirm_checkpoint(resumed)
    assert (again.point, again.steps_before, compared) == (found, 2, [(before, "identity")])
    found.newest = None
    assert train.confirm_checkpoint(resumed).steps_before == 0
    assert len(compared) == 1, "nothing is left to compare"
    found.obstacle = lambda: "no checkpoint is left"
    with pytest.raises(RecipeError, match="quickstart.*: `resume_from_checkpoint`: no checkpoint is left"):
        train.confirm_checkpoint(resumed)


def test_a_run_is_over_from_its_last_step_on(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    geometry = SimpleNamespace(optimizer_steps=lambda config, prompts: 10 * prompts)
    checked = SimpleNamespace(geometry=geometry, train_dataset=[0] * 3)
    made = prepared_of(recipe, checked=checked, machine=SimpleNamespace(num_processes=2), steps_before=30)
    assert (made.steps, made.checkpoint, made.is_over) == (30, None, False)
    resumed = replace(made, point=SimpleNamespace(newest=Path("checkpoint-30")))
    assert [replace(resumed, steps_before=step).is_over for step in (29, 30, 31)] == [False, True, True]
    monkeypatch.setattr(train.resume, "newest_checkpoint", lambda *given: asked.append(given) or "checkpoint")
    assert made.last_checkpoint() == "checkpoint"
    assert asked == [(recipe.output_dir, 2)]


def test_a_changed_layout_or_recipe_is_not_resumed(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before: dict[str, Any] = {}
    monkeypatch.setattr(train.resume, "earlier_launch", lambda folder, checkpoint: before)
    assert train.earlier_launch(recipe, None) == {}
    assert capsys.readouterr().out == "", "nothing is resumed"
    assert train.earlier_launch(recipe, Path("checkpoint-3")) == {}
    assert capsys.readouterr().out.startswith("checkpoint-3 is of another trainer, without a manifest and a run.json: ")
    before["recipe"] = recipe.as_dict()
    assert train.earlier_launch(recipe, Path("checkpoint-3")) is before
    assert capsys.readouterr().out == "", "nothing has changed"
    longer = replace(recipe, training={**recipe.training, "max_steps": 7})
    assert train.earlier_launch(longer, Path("checkpoint-3")) is before
    assert capsys.readouterr().out.startswith("changed for the rest of the run: `max_steps` was ")
    other = replace(longer, training={**longer.training, "learning_rate": 0.5})
    with pytest.raises(RecipeError, match="`resume_from_checkpoint`: `learning_rate` was .* and is 0.5: launch as bef"):
        train.earlier_launch(other, Path("checkpoint-3"))
    monkeypatch.setattr(train.resume, "earlier_launch", raising(UserError("run.json is damaged")))
    with pytest.raises(RecipeError, match="quickstart.*: `resume_from_checkpoint`: run.json is damaged"):
        train.earlier_launch(recipe, Path("checkpoint-3"))


def test_content_is_compared_with_a_manifest_and_the_change_is_told(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest: list[Any] = [None]
    monkeypatch.setattr(train, "read_manifest", lambda checkpoint: manifest[0])
    monkeypatch.setattr(train, "compare", raising(UserError("the rows have changed")))
    train.check_same_content(recipe, Path("checkpoint-3"), None)  # another trainer's
    manifest[0] = {}
    with pytest.raises(RecipeError, match="`resume_from_checkpoint`: the rows have changed"):
        train.check_same_content(recipe, Path("checkpoint-3"), None)
    monkeypatch.setattr(train, "compare", lambda checkpoint, identity: f"{checkpoint} with another {identity}")
    train.check_same_content(recipe, Path("checkpoint-3"), "reward")
    assert capsys.readouterr().out == "checkpoint-3 with another reward\n"
    monkeypatch.setattr(train, "compare", lambda checkpoint, identity: None)
    train.check_same_content(recipe, Path("checkpoint-3"), None)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("resumes", [False, True])
def test_a_preparation_checks_what_a_resume_continues(
    resumes: bool, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    newest = Path("run/checkpoint-4")
    point = SimpleNamespace(newest=newest) if resumes else None
    geometry = SimpleNamespace(ends_generation=lambda step, prompts: (step, prompts))
    checked = SimpleNamespace(train_dataset=[0] * 5, geometry=geometry)
    args = SimpleNamespace(hub_token=None, run_name=None)
    change: list[str | None] = [None]
    monkeypatch.setattr(train.checks, "check_output_dir", lambda recipe: called.append("folder"))
    monkeypatch.setattr(train.checks, "check_packages", lambda recipe: called.append("packages"))
    monkeypatch.setattr(train.checks, "resume_point", lambda recipe, machine: point)
    monkeypatch.setattr(train.checks, "grpo_config", lambda recipe: args)
    monkeypatch.setattr(train, "earlier_launch", lambda recipe, checkpoint: called.append(checkpoint) or "before")
    monkeypatch.setattr(train, "build_inputs", lambda recipe, machine: (checked, "tokenizer", "rollout"))
    monkeypatch.setattr(train, "identity_of", lambda recipe, checked: "identity")
    monkeypatch.setattr(train, "order_of", lambda recipe, checked: "order")
    monkeypatch.setattr(train.resume, "layout_change", lambda *given: called.append(given) or change[0])
    monkeypatch.setattr(train, "check_same_content", lambda recipe, *given: called.append(given))
    monkeypatch.setattr(train, "StopOnSignal", lambda ends: ends)
    made = train.prepare(recipe, "machine")
    continued = [newest, ("before", "order"), (newest, "identity")]
    assert called == ["folder", "packages", *continued * resumes]
    assert (made.checked, made.tokenizer, made.rollout) == (checked, "tokenizer", "rollout")
    assert (made.identity, made.point, made.held) == ("identity", point, None)
    assert made.interruption(3) == (3, 5)
    assert args.run_name == recipe.output_dir.name, "trackers show a name"
    args.run_name = "mine"
    train.prepare(recipe, "machine")
    assert args.run_name == "mine"
    change[0] = "`world_size` was 1 and is 2"
    if resumes:
        with pytest.raises(
            RecipeError, match="`resume_from_checkpoint`: `world_size` was 1 and is 2: launch as before"
        ):
            train.prepare(recipe, "machine")


# Models and rows


def test_the_weights_of_every_folder_are_checked_before_a_model_is_loaded(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked: list[str] = []
    folders = {name: tmp_path / name for name in ("policy", "base", "kept", "judge")}
    for folder in folders.values():
        folder.mkdir()
    (folders["judge"] / "config.json").write_text("{}")
    config = SimpleNamespace(base_model_name_or_path=str(folders["base"]))
    monkeypatch.setattr(train.weights, "adapter_config", lambda name: config)
    monkeypatch.setattr(train.weights, "check_weight_files", lambda folder: checked.append(folder.name))
    own = replace(
        recipe,
        model={**recipe.model, "model_name_or_path": str(folders["policy"])},
        reference=replace(recipe.reference, name=None, adapter=str(folders["kept"])),
    )
    train.check_weights(own)
    assert checked == ["base", "policy", "kept"]
    checked.clear()
    train.check_weights(recipe)
    assert checked == [], "names of the hub are no folders"
    config.base_model_name_or_path = str(tmp_path / "gone")
    with pytest.raises(RecipeError, match=f"is an adapter, and its base {tmp_path}/gone is missing: set"):
        train.check_weights(own)
    config.base_model_name_or_path = "a/relative-name"
    train.check_weights(own)
    monkeypatch.setattr(train.weights, "check_weight_files", raising(UserError("x.safetensors is damaged")))
    with pytest.raises(
        RecipeError, match="`model_name_or_path`: x.safetensors is damaged: copy or save it again, or na"
    ):
        train.check_weights(own)

    def leaf(source: Path | None, line: str | None) -> Any:
        return SimpleNamespace(declared=SimpleNamespace(model_source=source and str(source), prepare=lambda: line))

    monkeypatch.setattr(train, "leaves", lambda rewards: rewards)
    folders["policy"].joinpath("note.txt").write_text("no configuration: another kind of model")
    unchecked = [leaf(None, None), leaf(folders["policy"], "loaded one"), leaf(None, "asked one")]
    train.load_reward_models(recipe, SimpleNamespace(rewards=unchecked))
    assert capsys.readouterr().out == "loaded one\nasked one\n"
    with pytest.raises(RecipeError, match="`rewards`: x.safetensors is damaged"):
        train.load_reward_models(recipe, SimpleNamespace(rewards=[leaf(folders["judge"], None)]))
    silent = SimpleNamespace(declared=SimpleNamespace(model_source=None, prepare=raising(ValueError("no answer"))))
    with pytest.raises(RecipeError, match="`rewards`: no answer"):
        train.load_reward_models(recipe, SimpleNamespace(rewards=[silent]))


def test_an_adapter_is_continued_and_never_stacked(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    config: list[Any] = [None]
    monkeypatch.setattr(train.weights, "adapter_config", lambda name, revision=None: config[0])
    monkeypatch.setattr(train, "load_adapter", lambda *given, **named: loaded.append((given, named)) or "an adapter")
    assert train.load_policy(recipe, None) == "a-model"
    config[0] = "its configuration"
    pinned = replace(recipe, model={**recipe.model, "model_revision": "abc"})
    assert train.load_policy(pinned, "args") == "an adapter"
    assert loaded == [(("a-model", "its configuration", "args", "model_name_or_path"), {"revision": "abc"})]
    monkeypatch.setattr(train, "get_quantization_config", lambda args: "4 bits")
    assert train.load_policy(recipe, "args") == "an adapter"
    assert loaded[1][1] == {"revision": "main", "quantization_config": "4 bits"}
    stacked = replace(recipe, model={**recipe.model, "use_peft": True})
    with pytest.raises(UserError, match="`use_peft` asks for a new adapter, and `model_name_or_path` is one"):
        train.load_policy(stacked, None)


@pytest.mark.parametrize(("overlong", "done"), [("drop", "dropped"), ("cut_left", "cut from the left")])
def test_prompts_over_the_limit_are_counted_in_both_tables(
    overlong: str, done: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes, asked = [], []

    def limited(rows: list[int], *rest: Any) -> tuple[list[int], int]:
        asked.append(rest)
        return rows[1:], 1

    monkeypatch.setattr(train.prompts, "limit_prompts", limited)
    recipe = replace(recipe, dataset=replace(recipe.dataset, max_prompt_tokens=9, overlong_prompts=overlong))
    geometry = SimpleNamespace(check_dataset=sizes.append)

    @train.dataclass(frozen=True)
    class Checked:
        train_dataset: list[int]
        eval_dataset: list[int] | None
        geometry: Any

    kept = train.limit_prompts(recipe, Checked([1, 2, 3], [4, 5], geometry), "tokenizer", "tools")
    assert (kept.train_dataset, kept.eval_dataset) == ([2, 3], [5])
    assert capsys.readouterr().out == f"1 of 3 prompts over 9 tokens were {done}\n"
    assert sizes == [2], "the rows that are left must fill a generation batch"
    assert asked == [(recipe.dataset, "tokenizer", recipe.config.chat_template_kwargs, "tools")] * 2
    assert train.limit_prompts(recipe, Checked([1, 2], None, geometry), None).eval_dataset is None


def test_an_identity_names_every_model_with_its_commit(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter: list[Any] = [None]
    monkeypatch.setattr(train, "hub_commit", lambda name, revision="main": f"{name}@{revision}")
    monkeypatch.setattr(train.weights, "adapter_config", lambda name, revision: adapter[0])
    monkeypatch.setattr(train, "reward_models", lambda rewards, commit: {"judge": commit("j", "2")})
    monkeypatch.setattr(train, "identify", lambda *given: given)
    checked = SimpleNamespace(rewards=["r"], train_dataset="rows", toolset=None)
    found = train.identity_of(recipe, checked)
    assert found == ("rows", ["r"], {"policy": Source("a-model", "a-model@main"), "judge": "j@2"}, {}, None)
    adapter[0] = SimpleNamespace(base_model_name_or_path="base", revision="7")
    checked.toolset = SimpleNamespace(sources={"tool": "code"})
    kept = replace(recipe, reference=replace(recipe.reference, name=None, adapter="ref"))
    _, _, sources, tools, _ = train.identity_of(kept, checked)
    assert sources == {
        "policy": Source("a-model", "a-model@main"), "base": Source("base", "base@7"),
        "reference": Source("ref", "ref@main"), "judge": "j@2",
    }  # fmt: skip
    assert tools == {"tool": "code"}


# The run


@pytest.fixture
def staged(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> tuple[train.Prepared, Any, list[Any]]:
    """Return a preparation, a trainer that has made a step, and what `run` calls, in order."""
    called: list[Any] = []
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(is_main_process=True),
        state=SimpleNamespace(global_step=1),
        checkpoints=SimpleNamespace(check_folder=lambda: called.append("check folder")),
        save_model=lambda folder, **named: called.append(("save", folder, named)),
    )
    for name in ("describe_run", "train"):
        monkeypatch.setattr(train, name, lambda *given, name=name: called.append(name))
    monkeypatch.setattr(train, "finish", lambda made, trainer, seconds: called.append(("finish", seconds)))
    monkeypatch.setattr(train.time, "monotonic", iter(range(0, 990, 7)).__next__)
    monkeypatch.setattr(train, "check_folder", lambda prepared: called.append("check"))
    monkeypatch.setattr(train, "build_trainer", lambda prepared: trainer)
    monkeypatch.setattr(train, "launch_entry", lambda prepared: "entry")
    monkeypatch.setattr(train, "add_launch", lambda folder, entry: called.append(("record", folder, entry)))
    monkeypatch.setattr(train.resume, "set_aside", lambda passed: called.append(("aside", passed)))
    monkeypatch.setattr(train, "_end_stopped_run", lambda prepared, trainer: 130)
    args = SimpleNamespace(should_save=True, output_dir="out")
    interruption = SimpleNamespace(stopped=False)
    geometry = SimpleNamespace(optimizer_steps=lambda config, prompts: 4)
    checked = SimpleNamespace(geometry=geometry, train_dataset=[])
    made = prepared_of(recipe, training_args=args, interruption=interruption, checked=checked)
    return made, trainer, called


def test_a_run_is_recorded_trained_saved_and_finished(staged: tuple, capsys: pytest.CaptureFixture[str]) -> None:
    made, trainer, called = staged
    (made.recipe.output_dir / "fault-rank0.json").write_text("{}")
    assert train.run(made) == 0
    folder = made.recipe.output_dir
    assert called == [
        "check", "describe_run", "check", ("record", folder, "entry"), "train", "check folder",
        ("save", "out", {"_internal_call": True}), "check folder", ("finish", 7),
    ]  # fmt: skip
    assert not (folder / "fault-rank0.json").exists(), "the message of an earlier attempt"
    called.clear()
    trainer.accelerator.is_main_process = False
    point = SimpleNamespace(newest=None, passed_over=["damaged"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "describe_resumption", lambda prepared, point: f"passed over {point.passed_over}")
        assert train.run(replace(made, point=point)) == 0
        assert called[:3] == ["check", ("aside", ["damaged"]), "describe_run"]
        assert ("record", folder, "entry") not in called, "one rank writes the record"
        made.training_args.should_save = False
        called.clear()
        assert train.run(replace(made, point=point)) == 0
        assert called[1] == "describe_run", "a rank that saves nothing moves nothing"
    assert capsys.readouterr().out == "passed over ['damaged']\n" * 2


def test_a_run_that_was_stopped_or_took_no_step_saves_no_model(staged: tuple) -> None:
    made, trainer, called = staged
    made.interruption.stopped = True
    assert train.run(made) == 130
    assert called[-1] == "train"
    made.interruption.stopped, trainer.state.global_step = False, 0
    with pytest.raises(faults.NothingTrained, match="no optimizer step was taken, of 4: the model is unchanged"):
        train.run(made)
    assert called[-1] == "train"
    over = replace(made, point=SimpleNamespace(newest=Path("checkpoint-4"), passed_over=[]), steps_before=4)
    trainer.state.global_step = 4
    assert train.run(over) == 0


def test_the_training_starts_from_its_checkpoint_and_a_finished_run_only_loads_it(
    staged: tuple, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    made, _, _ = staged
    calls: list[Any] = []
    trainer = SimpleNamespace(train=lambda **named: calls.append(named), callback_handler=SimpleNamespace(callbacks=[]))

    def loading_only(trainer: Any, steps: int) -> Any:
        calls.append(steps)
        return nullcontext()

    monkeypatch.setattr(train, "loading_only", loading_only)
    train.train(made, trainer)
    resumed = replace(made, point=SimpleNamespace(newest=Path("run/checkpoint-4")), steps_before=3)
    train.train(resumed, trainer)
    assert calls == [{"resume_from_checkpoint": None}, {"resume_from_checkpoint": "run/checkpoint-4"}]
    assert capsys.readouterr().out == ""
    train.train(replace(resumed, steps_before=4), trainer)
    assert calls[2:] == [4, {"resume_from_checkpoint": "run/checkpoint-4"}]
    end = "already finished: run/checkpoint-4 is the end of the run, and nothing remains to train\n"
    assert capsys.readouterr().out == end
    for error in (ValueError("x"), KeyboardInterrupt()):
        closed: list[bool] = []
        bar = SimpleNamespace(close=lambda closed=closed: closed.append(True))
        trainer.callback_handler.callbacks = [SimpleNamespace(training_bar=bar)]
        trainer.train = raising(error)
        with pytest.raises(type(error)):
            train.train(made, trainer)
        assert closed == [True], "a bar would be drawn again below the error"


def test_the_share_of_an_update_that_survives_is_measured_where_rounding_can_take_it(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = SimpleNamespace(updated="bfloat16", surviving=lambda sample: sample.tolist())
    asked: list[Any] = []

    def precision_of(recipe: Recipe, machine: Any, *, is_adapter: bool) -> Any:
        asked.append((machine, is_adapter))
        return precision

    monkeypatch.setattr(train.checks, "precision_of", precision_of)
    monkeypatch.setattr(train, "draw_sample", lambda parameters: torch.cat([p.detach() for p in parameters]))
    monkeypatch.setattr(train, "stored_values", lambda sample: 2 * sample)
    model = torch.nn.Module()
    model.register_parameter("weight", torch.nn.Parameter(torch.tensor([1.0, 3.0])))
    trainer, made = SimpleNamespace(model=model), prepared_of(recipe, machine="machine")
    assert train.measured_precision(made, trainer) == (precision, [2.0, 6.0])
    assert asked == [("machine", False)]
    monkeypatch.setenv("RANK", "1")
    assert train.measured_precision(made, trainer) == (precision, 1.0)
    monkeypatch.delenv("RANK")
    precision.updated = "float32"
    assert train.measured_precision(made, trainer) == (precision, 1.0)


def test_a_run_is_described_with_its_tools_and_notes(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warning: list[str | None] = ["updates are lost"]
    precision = SimpleNamespace(
        describe=lambda share: f"  precision       {share}",
        warning=lambda share: warning[0] and f"{warning[0]}: {share}",
    )
    geometry = SimpleNamespace(describe=lambda: "geometry", describe_epoch=lambda rows, length: f"{rows} of {length}")
    checked = SimpleNamespace(
        all_rewards=[], geometry=geometry, train_dataset=[0] * 5, golds=None, gold_notes=["a gold note"],
        prompt_notes=["a prompt note"],
        toolset=SimpleNamespace(describe=lambda most: f"tools, at most {most}"),
    )  # fmt: skip
    monkeypatch.setattr(train, "measured_precision", lambda prepared, trainer: (precision, 0.25))
    monkeypatch.setattr(train, "describe_rewards", lambda rewards: "none")
    monkeypatch.setattr(train, "cautions", lambda config, model: ["a caution"])
    model = torch.nn.Linear(1000, 2, bias=False)
    trainer = SimpleNamespace(model=model, get_num_trainable_parameters=lambda: 1234, reference_sentence="the base")
    config = recipe.config
    config.max_tool_calling_iterations = 3
    made = prepared_of(recipe, checked=checked)
    train.describe_run(made, trainer)
    lines = [
        f"{recipe.source}: 2,000 parameters, 1,234 trained, rewards none",
        "  tools           tools, at most 3",
        "  reference       the base",
        "  precision       0.25",
        "geometry",
        f"5 of {config.max_completion_length}",
        "  note            a caution",
        "  note            updates are lost: 0.25",
        "  note            a gold note",
        "  note            a prompt note",
    ]
    assert capsys.readouterr().out.splitlines() == lines
    checked.toolset, warning[0] = None, None
    checked.golds = SimpleNamespace(describe=lambda: "2 golds can't be read")
    train.describe_run(made, trainer)
    said = capsys.readouterr().out.splitlines()
    lines[7] = "  note            2 golds can't be read"
    assert said == [line for line in lines if "tools" not in line]


# The end of a launch


class Ended(Exception):
    """Error of a training."""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("the key hunter2 is wrong"), 2, "error: the key <hidden> is wrong"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C: the preparation"),
        (FolderLost("runs/a was taken"), 1, "error: runs/a was taken"),
        (Ended("x"), 1, "reported Ended"),
    ],
)
def test_a_launch_ends_by_the_kind_of_its_error(
    error: BaseException, code: int, said: str, recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    restored: list[bool] = []
    made = prepared_of(recipe, interruption=SimpleNamespace(restore_handlers=lambda: restored.append(True)))

    def report(prepared: train.Prepared, failure: Exception) -> int:
        train.say_error(f"reported {type(failure).__name__}", kind="x")
        return 1

    def interrupted(prepared: train.Prepared | None) -> int:
        return train._print_interruption("nothing" if prepared is None else "the preparation")

    monkeypatch.setattr(train, "prepare", lambda recipe, machine: made)
    monkeypatch.setattr(train, "only_run", lambda prepared: nullcontext(prepared))
    monkeypatch.setattr(train, "run", raising(error))
    monkeypatch.setattr(train, "known_secrets", lambda recipe: {"hunter2"})
    monkeypatch.setattr(train, "_report_failure", report)
    monkeypatch.setattr(train, "_end_interrupted_run", interrupted)
    assert train.main(["--config", "quickstart"]) == code
    assert said in capsys.readouterr().err
    assert restored == [True], "Ctrl-C works as before"
    monkeypatch.setattr(train, "prepare", raising(error))
    restored.clear()
    if isinstance(error, Ended):
        with pytest.raises(Ended):
            train.main(["--config", "quickstart"])
    else:
        assert train.main(["--config", "quickstart"]) == code
    assert restored == []


def test_a_recipe_run_from_a_script_raises_and_restores_ctrl_c(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[bool] = []
    made = prepared_of(recipe, interruption=SimpleNamespace(restore_handlers=lambda: restored.append(True)))
    monkeypatch.setattr(train, "prepare", lambda recipe, machine: made)
    monkeypatch.setattr(train, "only_run", lambda prepared: nullcontext(prepared))
    monkeypatch.setattr(train, "run", lambda prepared: 130 if prepared is made else 0)
    assert train.run_recipe(recipe) == 130
    monkeypatch.setattr(train, "run", raising(Ended("x")))
    with pytest.raises(Ended):
        train.run_recipe(recipe)
    assert restored == [True, True]


@pytest.mark.parametrize("began", [True, False])
def test_a_failure_names_the_checkpoint_that_a_resume_would_use(
    began: bool, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(faults, "report", lambda *given, **named: reported.append((given, named)))
    monkeypatch.setattr(train, "known_secrets", lambda recipe: {"hunter2"})
    monkeypatch.setattr(train.resume, "newest_checkpoint", lambda folder, processes: Path("checkpoint-9"))
    made = prepared_of(
        recipe, interruption=SimpleNamespace(began=began), point=SimpleNamespace(newest=Path("checkpoint-4")),
        machine=SimpleNamespace(num_processes=1),
    )  # fmt: skip
    error = Ended("x")
    assert train._report_failure(made, error) == 1
    checkpoint = Path("checkpoint-9" if began else "checkpoint-4")
    assert reported == [((error, recipe.output_dir, checkpoint), {"resumable": began, "secrets": {"hunter2"}})]


def test_the_entries_that_order_the_prompts_are_compared_on_a_resume(recipe: Recipe) -> None:
    checked = SimpleNamespace(geometry=SimpleNamespace(as_dict=lambda: {"ranks": 1}), train_dataset=[0] * 3)
    entry = train.order_of(recipe, checked)
    assert json.loads(json.dumps(entry)) == {
        "geometry": {"ranks": 1}, "train_prompts": 3, "seed": recipe.config.seed, "shuffle_dataset": True,
    }  # fmt: skip


def test_secrets_of_the_environment_are_known_and_its_folders_are_none(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a shell's folder, `OLDPWD`, looks like that of a password."""
    monkeypatch.setenv("MY_API_KEY", "hunter2-and-more")
    monkeypatch.setenv("OLDPWD", "/a/folder/of/the/user")
    monkeypatch.setenv("PWD", "/another/folder")
    known = train.known_secrets(recipe)
    assert "hunter2-and-more" in known
    assert not {"/a/folder/of/the/user", "/another/folder"} & known


def test_the_command_line_is_read_only_if_no_arguments_are_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train.sys, "argv", ["grpo_recipes.train", "--version"])
    assert train.main() == 0
    assert capsys.readouterr().out.startswith("grpo-recipes ")
    assert train.main([]) == 2
    assert capsys.readouterr().out == ""
