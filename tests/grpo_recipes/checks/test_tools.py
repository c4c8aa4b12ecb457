"""Tools and environments are refused with one sentence before a model is loaded, or described as TRL describes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from datasets import Dataset
from transformers.utils import get_json_schema
from trl import chat_template_utils as trl_templates

from grpo_recipes import train
from grpo_recipes.checks.tools import (
    Tool,
    Toolset,
    check_any_reward,
    check_rows,
    check_template,
    load_toolset,
    toolset_of,
    try_template,
)
from grpo_recipes.recipe.recipe import Recipe, RecipeError, parse_recipe
from grpo_recipes.tools.examples import calculator
from grpo_rewards.registry import build_rewards
from tests.support.bad_input import ROWS_JSONL, Case
from tests.support.bad_input import check as check_case
from tests.support.errors import refused
from tests.support.tiny import chat_tokenizer

DOC = '''
    """Do something.

    Args:
        a: The first.
        b: The second.
    """
'''


def documented(head: str, body: str = "return a") -> str:
    """Return the text of a function that describes the arguments that it has."""
    described = [
        line for line in DOC.splitlines() if line.strip()[:2] not in ("a:", "b:") or f"{line.strip()[0]}:" in head
    ]
    return "\n".join([f"{head}:", *described[1:], f"    {body}", "", ""])


TOOLS_PY = "import dataclasses, functools\n" + "".join(
    [
        documented("def add(a: int, b: int = 1) -> int", "return a + b"),
        documented("def untyped(a) -> int").replace("    Args:\n", "    Args:\n        a: The first.\n"),
        'def undescribed(a: int) -> int: "Count."\n',
        documented("def variadic(**values: int) -> int").replace("Args:", "Args:\n        values: Numbers."),
        documented("def by_position(a: int, /) -> int"),
        "@dataclasses.dataclass\nclass Point:\n    x: int\n",
        documented("def record(a: Point) -> int"),
        "def logged(function): return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))\n",
        documented("@logged\nasync def behind(a: int) -> int"),
        documented("def ticks(a: int)", "yield a"),
        documented("async def ticks_later(a: int)", "yield a"),
        "def by_game(completions, environments, **columns): return [0.0 for _ in environments]\n",
        "nameless = functools.partial(add, b=2)\nnumber = 3\nclass Other: pass\n",
    ]
)


def methods(*texts: str) -> str:
    return "".join(text.replace("\n", "\n    ").join(["    ", "\n"]) for text in texts)


LOOK = documented("def look(self, a: str) -> str")
ENVS_PY = "from my_tools import logged\n" + "".join(
    [
        "class Game:\n" + methods("def reset(self, **columns): pass", LOOK, "def get_reward(self): return 1.0"),
        "    def _peek(self): return 'no tool'\n",
        "class Plain(Game): get_reward = None\n",
        "class NoReset:\n" + methods(LOOK),
        "class AsyncReset(Game):\n    async def reset(self, **columns): pass\n",
        "class Asynchronous(Game):\n" + methods(f"async {LOOK}", "look = logged(look)"),
        "class Untyped(Game):\n" + methods(LOOK.replace("a: str)", "a)")),
        "class OneColumn(Game):\n    def reset(self, answer): pass\n",
        "class Adds(Game):\n" + methods(documented("def add(self, a: int) -> int")),
        "class WithOtherMembers(Game):\n    size, shown = 3, property(lambda self: 1 / 0)\n",
        methods(
            "@staticmethod",
            documented("def roll(b: int) -> int", "return b"),
            "@classmethod",
            "def made(cls): return cls()",
        ),
        "def made(): return Game()\nnumber = 3\n",
    ]
)

FILES: Mapping[str, str] = {
    "my_tools.py": TOOLS_PY,
    "my_envs.py": ENVS_PY,
    "broken.py": "import nothing_of_this_name\n",
}
FINE: Mapping[str, Any] = {"max_tool_calling_iterations": 2, "max_completion_length": 900}


def with_environment(*names: str) -> str:
    rows = ROWS_JSONL.splitlines()
    return "".join(
        json.dumps({**json.loads(row), "environment": names[n % len(names)]}) + "\n" for n, row in enumerate(rows)
    )


# Paths, the key and the path in the place of the error, and a figure.
BAD_TOOLS: list[tuple[list[str], str, str]] = [
    (["add"], "add", "ValueError"),
    (["my_tool.add"], "my_tool.add", "'my_tool'"),
    (["my_tools.add", "my_tools.ad"], "my_tools.ad", "`add`"),
    (["broken.x"], "broken.x", "'nothing_of_this_name'"),
    (["broken.py:x"], "broken.py:x: broken.py", ""),
    (["my_tools.py:ad"], "my_tools.py:ad", "`add`"),
    (["my_tools._secret"], "my_tools._secret", "`_secret`"),
    *(
        ([f"my_tools.{name}"], f"my_tools.{name}", figure)
        for name, figure in (
            *(("untyped", "schema"), ("record", "schema"), ("undescribed", "schema")),
            *(("variadic", "`**values: int`"), ("by_position", "`a: int`"), ("behind", "asynchronous")),
            *(("ticks", "generator"), ("ticks_later", "generator"), ("nameless", "function"), ("number", "function")),
            ("Other", "`environment_factory`"),
        )
    ),
    (["builtins.max"], "builtins.max", "schema"),
]
BAD_ENVIRONMENTS: list[tuple[Any, str, str]] = [
    *((f"my_envs.{name}", f": my_envs.{name}", "`reset`") for name in ("NoReset", "AsyncReset", "made", "number")),
    ("my_envs.Untyped", ": my_envs.Untyped.look", "schema"),
    ("my_envs.Asynchronous", ": my_envs.Asynchronous.look", "asynchronous"),
    ({"game": 3}, "", "3"),
    ({3: "my_envs.Game"}, "", "'my_envs.Game'"),
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the modules of tools and environments into the working directory."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("my_tools", "my_envs", "broken"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


@pytest.mark.usefixtures("files")
def test_bad_tools_and_environments_are_named() -> None:
    for paths, path, figure in BAD_TOOLS:
        with refused(f"`tools`: {path}", figure):
            toolset_of(paths, None)
    for factory, path, figure in BAD_ENVIRONMENTS:
        with refused(f"`environment_factory`{path}", figure):
            toolset_of([], factory)
    for factory in (None, "my_envs.Adds"):
        with refused("`tools`", "`add`"):
            toolset_of(["my_tools.add", "my_tools.py:add"][: 1 if factory else 2], factory)


def rows(**columns: Any) -> Dataset:
    turns = [[{"role": "user", "content": "a"}]] * 2
    return Dataset.from_dict({"prompt": turns, "answer": ["1", "2"], **columns})


@pytest.mark.usefixtures("files")
def test_rows_must_fit_the_tools_and_environments() -> None:
    tools, game = toolset_of(["my_tools.add"], None), toolset_of([], "my_envs.Game")
    routed = toolset_of([], {"game": "my_envs.Game"})
    text = rows(prompt=["a", "b"])
    for toolset, table, place, figure in (
        (tools, text, "`tools`", "`dataset.prompt_format: conversational`"),
        (game, text, "`environment_factory`", "`dataset.prompt_format: conversational`"),
        (routed, rows(), "`environment_factory`", "'environment'"),
        (routed, rows(environment=["game", "gaem"]), "'environment'", "`game`"),
        (routed, rows(environment=["game", "xyz"]), "'environment'", "'xyz'"),
        (None, rows(environment=["game", "game"]), "'environment'", "`environment_factory`"),
        (game, rows(environment=["game", "game"]), "'environment'", "`environment_factory`"),
        (toolset_of([], "my_envs.OneColumn"), rows(), "my_envs.OneColumn.reset", "prompt, answer"),
    ):
        with refused(place, figure):
            check_rows(toolset, (None, table))
    check_rows(routed, (rows(environment=["game", "game"]), None))
    check_rows(tools, (rows(),))
    check_rows(None, (text,))


@pytest.mark.usefixtures("files")
def test_something_must_pay() -> None:
    check_any_reward(toolset_of([], "my_envs.Game"), [])
    check_any_reward(None, build_rewards(["tag_count"]))
    for toolset in (None, toolset_of([], "my_envs.Plain"), toolset_of(["my_tools.add"], None)):
        with refused("`rewards`", "`get_reward`"):
            check_any_reward(toolset, [])


PLANNED: dict[str, tuple[dict[str, str], dict[str, Any], tuple[str, ...]]] = {
    "tools": ({}, {"tools": ["my_tools.py:add"]}, ("tools  ", "add,", '"name": "add"')),
    "environments": (
        {"train.jsonl": with_environment("game", "sum")},
        {
            "environment_factory": {"game": "my_envs.Game", "sum": "my_envs.Adds"},
            "rewards": ["my_tools.by_game"],
        },
        ("game: my_envs.Game (look), sum: my_envs.Adds (add, look)", "by_game × 1", "Game × 1"),
    ),
}


@pytest.mark.parametrize("kind", PLANNED)
def test_a_plan_names_the_tools(kind: str, tmp_path: Path, tool_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, keys, words = PLANNED[kind]
    line = "grpo-recipes plan {recipe} --model_name_or_path {model} --build"
    check_case(Case(line, words, 0, {**FILES, **files}, {**FINE, **keys}), tmp_path, tool_model, monkeypatch)


def recipe_with(model: Path, *arguments: str) -> Recipe:
    given = [f"--model_name_or_path={model}", "--dataset=products", "--dataset.size=8", "--rewards=math_correctness"]
    given += ["--tools=[grpo_recipes.tools.examples.calculator]", "--max_tool_calling_iterations=2"]
    given += ["--max_completion_length=900", "--use_cpu=true", "--bf16=false", "--num_generations=4"]
    return parse_recipe([*given, *arguments])


@pytest.mark.slow
def test_every_template_that_trl_reads_passes(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, "--max_completion_length=4000")
    toolset = load_toolset(recipe)
    assert toolset is not None
    names = []
    for file in sorted((Path(trl_templates.__file__).parent / "chat_templates").glob("*.jinja")):
        tokenizer = chat_tokenizer(file.read_text())
        try:
            trl_templates.add_response_schema(tokenizer)
        except ValueError:  # TRL can't read calls of this template
            continue
        if trl_templates.supports_tool_calling(tokenizer):
            names.append(file.stem)
            chat_template = check_template(recipe, toolset, chat_tokenizer(file.read_text()))
            assert (chat_template is not None) == (file.stem == "qwen3"), file.stem
    assert len(names) > 15


def test_a_template_that_can_not_be_used_is_refused(tmp_path: Path) -> None:
    qwen = trl_templates.qwen2_5_chat_template
    recipe = recipe_with(tmp_path)
    toolset = load_toolset(recipe)
    assert toolset is not None

    changed = qwen.replace("<tool_call>", "<call>")
    assert changed != qwen
    mismatched = chat_tokenizer(changed)
    mismatched.response_template = trl_templates.qwen3_template
    forgetful = chat_tokenizer("{% if messages[-1].role == 'tool' %}short {% endif %}" + qwen)
    forgetful.response_template = trl_templates.qwen3_template
    for tokenizer, figure in (
        (chat_tokenizer(changed), "`response_template`"),
        (mismatched, "`calculator`"),
        (forgetful, "earlier"),
        (chat_tokenizer(), "`chat_template_path`"),
    ):
        with refused(f"`model_name_or_path`: {tmp_path}", figure, by=RecipeError):
            check_template(recipe, toolset, tokenizer)


def test_a_fault_of_an_environment_ends_the_run_with_its_name(
    tool_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scores = 'class Scores(GuessNumber):\n    def get_reward(self):\n        return float("nan")\n'
    Path("my_envs.py").write_text(f"from grpo_recipes.tools.examples import GuessNumber\n\n\n{scores}")
    given = [f"--model_name_or_path={tool_model}", "--output_dir=run", "--environment_factory=my_envs.py:Scores"]
    given += ["--max_tool_calling_iterations=1", "--max_completion_length=8", "--use_cpu=true", "--bf16=false"]
    given += ["--num_generations=4", "--per_device_train_batch_size=4", "--gradient_accumulation_steps=1"]
    given += ["--dtype=float32", "--report_to=none", "--max_steps=1", "--dataset.size=8"]
    Path("recipe.yaml").write_text("dataset: {name: secret_number}\n")
    assert train.main(["--config", "recipe.yaml", *given]) == 1
    last = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert all(figure in last for figure in ("`Scores`", "nan", "row 0"))


@pytest.mark.usefixtures("files")
def test_only_functions_of_a_class_are_tools() -> None:
    """TRL lists the functions of a class. A static method takes no instance."""
    toolset = toolset_of([], "my_envs.WithOtherMembers")
    assert {tool.name: list(tool.schema["function"]["parameters"]["properties"]) for tool in toolset.all_tools} == {
        "look": ["a"],
        "roll": ["b"],
    }
    assert [environment.scores for environment in toolset.environments] == [True]
    assert not toolset_of([], "my_envs.Plain").environments[0].scores


# Calls in the chat template


def many(
    flag: bool, count: int, share: float, kind: Literal["x", "longer"], items: list[int], either: int | str,
    table: dict, more: str = "left out",
) -> str:  # fmt: skip
    """Do it.

    Args:
        flag: A
        count: B
        share: C
        kind: D
        items: E
        either: F
        table: G
        more: H
    """
    return ""


def template_of(name: str) -> str:
    return (Path(trl_templates.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def toolset_with(*functions: Callable[..., Any]) -> Toolset:
    return Toolset(tuple(Tool(function, get_json_schema(function)) for function in functions))


def test_calls_of_several_styles_are_read_back() -> None:
    """GLM's arguments get their types from the tools, LFM2's are Python, and TRL trains Qwen3 on another template."""
    for name in ("qwen3", "glm4moe", "lfm2_2_5"):
        chat_template = try_template("m", toolset_with(many), chat_tokenizer(template_of(name)), None)
        assert (chat_template is not None) is (name == "qwen3")


def test_a_template_that_fails_on_a_call_or_on_the_arguments_of_the_recipe_is_refused(tmp_path: Path) -> None:
    condition = "strict or (messages[-1].tool_calls and tools and hasty)"
    template = template_of("qwen2_5") + "{% if " + condition + " %}{{ raise_exception('not here') }}{% endif %}"
    tokenizer = chat_tokenizer(template)
    tokenizer.response_template = trl_templates.qwen3_template
    toolset = toolset_with(calculator)
    check_template(recipe_with(tmp_path), toolset, tokenizer)
    for key in ("strict", "hasty"):
        mine = recipe_with(tmp_path, f"--chat_template_kwargs.{key}=true")
        with refused(f"`model_name_or_path`: {tmp_path}", "`calculator`", "not here", by=RecipeError):
            check_template(mine, toolset, tokenizer)
