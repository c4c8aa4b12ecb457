"""The command `grpo-rewards` as a user types it."""

import json
import math
import re
import sys
import types
from datetime import date

import pytest

from grpo_rewards import cli
from grpo_rewards.cli import main
from grpo_rewards.registry import REGISTERED

RIGHT, WRONG = "<answer>18</answer>", "<answer>17</answer>"


def write(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def rows(tmp_path):
    chat = {"completion": [{"role": "assistant", "content": WRONG}], "answer": "18", "prompt": "p"}
    unscorable = {"completion": "\ud800", "answer": ""}
    return write(tmp_path / "rows.jsonl", [{"completion": RIGHT, "answer": "18"}, chat, unscorable])


def printed(capsys):
    """Return the words that a command has printed, and its errors."""
    captured = capsys.readouterr()
    return [" ".join(line.split()) for line in captured.out.splitlines()], captured.err


def length(prompts, completions, **columns):
    return [None if text == "?" else float(len(text)) for text in completions]


def test_list_shows_every_reward_with_its_pay_table(capsys):
    assert main(["list"]) == 0
    output = capsys.readouterr().out
    assert all(f"\n{name}\n" in "\n" + output for name in REGISTERED)
    assert "2 (`pay_exact`)" in output
    assert "Args:" not in output
    assert "Source:" not in output


def test_score_summarises_and_writes_one_column_per_reward(rows, tmp_path, capsys):
    out = tmp_path / "scored.jsonl"
    spec = "{name: gsm8k_correctness, alias: strict, kwargs: {pay_exact: 3}}"
    assert main(["score", rows, "--reward", spec, "--reward", "tag_count", "--out", str(out)]) == 0
    scored = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["strict"] for row in scored] == [3.0, 0.0, None]
    assert [row["tag_count"] for row in scored] == [0.5, 0.5, 0.0]
    assert scored[0]["completion"] == RIGHT
    lines, _ = printed(capsys)
    assert "strict: 3 rows, 1 unscorable" in lines
    assert "mean 1.5000, standard deviation 1.5000" in lines
    assert f"worst: row 2, 0: {WRONG}" in lines
    assert f"best: row 1, 3: {RIGHT}" in lines


def test_a_summary_counts_each_value_or_eight_bins(tmp_path, capsys):
    for lengths, expected in (
        (range(10), ["0 … 1.12 2 20.0%", "1.12 … 2.25 1 10.0%", "7.88 … 9 2 20.0%", "worst: row 1, 0:",
                     "worst: row 2, 1: x", "best: row 10, 9: xxxxxxxxx", "best: row 9, 8: xxxxxxxx"]),
        ([0, 1, 2, 3, 4, 5, 6, 7, 7, 7], ["0 1 10.0%", "7 3 30.0%"]),
    ):  # fmt: skip
        path = write(tmp_path / "rows.jsonl", [{"completion": "x" * n} for n in lengths])
        assert main(["score", path, "--reward", f"{__name__}.length"]) == 0
        lines, _ = printed(capsys)
        assert [line for line in lines if line in expected] == expected
    path = write(tmp_path / "rows.jsonl", [{"completion": "?"}, {"completion": "?"}])
    assert main(["score", path, "--reward", f"{__name__}.length"]) == 1
    lines, error = printed(capsys)
    assert "length: 2 rows, 2 unscorable" in lines
    assert f"{path}: length" in error


def test_an_excerpt_contains_no_control_character(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [{"completion": SHOUTED, "answer": "18"}])
    assert main(["score", path, "--reward", "tag_count", "--reward", "gsm8k_correctness", "--explain"]) == 0
    output = capsys.readouterr().out
    assert "<answer>\\x1b[31m17\\x07\\u202e </answer>" in output
    assert {character for character in output if not character.isprintable()} == {"\n"}


def test_a_malformed_line_is_named_and_the_rest_is_scored(tmp_path, capsys):
    path = write(
        tmp_path / "rows.jsonl",
        [{"completion": RIGHT, "answer": "18"}, "{", "[]", "", {"completion": RIGHT}, {"completion": 3, "answer": "1"},
         {"answer": "18"}, {"completion": RIGHT, "answer": "18"}, "[" * 200_000],
    )  # fmt: skip
    assert main(["score", path, "--reward", "gsm8k_correctness"]) == 1
    lines, error = printed(capsys)
    assert "gsm8k_correctness: 2 rows, 0 unscorable" in lines
    assert re.findall(r"row (\d+)", error) == ["2", "3", "5", "6", "7", "9"]
    for bad, listed in ((20, 20), (22, 21)):  # the last line counts the others
        path = write(tmp_path / "rows.jsonl", [{"completion": "x"}, *["{"] * bad])
        assert main(["score", path, "--reward", f"{__name__}.length"]) == 1
        errors = printed(capsys)[1].strip().splitlines()
        assert len(errors) == listed
    assert " 2 " in errors[-1]


def test_a_format_reward_needs_no_gold(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [{"completion": RIGHT, "key": "7"}])
    assert main(["score", path, "--reward", "tag_count"]) == 0
    assert main(["score", path, "--reward", "gsm8k_correctness"]) == 2
    error = printed(capsys)[1]
    assert all(name in error for name in ("`gsm8k_correctness`", "`answer`", "key"))
    assert ".py" not in error


def test_a_group_is_scored_in_one_call(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [{"completion": RIGHT + " " * n, "answer": "18"} for n in (0, 1, 3, 2)])
    words = ["--reward", "group_length", "--num-generations"]
    assert main(["score", path, *words, "2", "--out", f"{tmp_path}/o.jsonl"]) == 0
    scored = [json.loads(line)["group_length"] for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert scored == [0.5, -0.5, -0.5, 0.5]
    assert main(["score", path, *words, "3"]) == 2
    assert "groups of 3" in printed(capsys)[1]
    rows = [{"completion": RIGHT, "answer": "18"}, "{", {"completion": "", "answer": "1"}]
    assert main(["score", write(tmp_path / "rows.jsonl", rows), *words, "2"]) == 2
    assert "row 2" in printed(capsys)[1]


WRONG_CALLS = [
    ("scor", "`score`"), ("train", "`train`"), ("", "audit"), ("score", "--reward"), ("score {rows}", "--reward"),
    ("audit {rows}", "--reward"), ("convert-internlm2 a", "DST"), ("score --reward r", "file"),
    ("check {rows} --gold_colum x", "`--gold_column`"), ("score {rows} --reward r --num_generations x", "x"),
]  # fmt: skip
BAD_CALLS = [
    ("score absent.jsonl --reward tag_count", "absent.jsonl"), ("score {rows} --reward tag_cuont", "`tag_count`"),
    ("score {rows} --reward {{name:tag_count", "{name:tag_count"),
    ("score {rows} --reward {{name:a,name:b}}", "name"), ("score {rows} --reward tag_count --out s.csv", "s.csv"),
    ("score {rows} --reward tag_count --out {rows}", "{rows}"),
    ("score {rows} --reward tag_count --out no/such/o.jsonl", "no/such/o.jsonl"),
    ("score absent.jsonl --reward tag_count --out {rows}", "absent.jsonl"),
    ("score {rows} --reward tag_count --out {folder}/o.jsonl", "o.jsonl"),
    ("score {rows} --reward tag_count --gold_column gold", "rows.jsonl: `gold`", "`completion`, `answer`"),
    ("score {rows} --reward group_length --num_generations 0", "--num_generations", "0"),
    ("score {rows} --reward gsm8k_correctness --reward gsm8k_correctness", "gsm8k_correctness", "2", "alias"),
    ("check {rows} --reward tag_count", "tag_count", "audit"), ("check {rows} --gold-column gold", "`gold`"),
    ("check {rows} --reward tests.grpo_rewards.test_cli.length", "length", "audit"),
    ("audit {rows} --reward gsm8k_correctness --rows 0", "--rows", "0"),
    ("audit {rows} --reward gsm8k_correctness --layout answer", "--layout", "{answer}"),
    ("audit {rows} --reward absent.yaml", "absent.yaml"), ("audit {rows} --reward {folder}/bad.yaml", "bad.yaml"),
    ("audit {rows} --reward {folder}/text.yaml", "text.yaml"), ("audit {rows} --reward {folder}/no.yaml", "no.yaml"),
    ("audit {rows} --reward {folder}/list.yaml", "list.yaml"),
    ("audit {rows} --reward {folder}/bytes.yaml", "bytes.yaml"),
]  # fmt: skip


def test_bad_usage_is_one_line_and_exit_code_2(rows, tmp_path, capsys):
    (tmp_path / "o.jsonl").mkdir()
    recipes = {
        "bad": b"rewards: [", "text": b"rewards: tag_count", "no": b"rewards: []", "list": b"- a", "bytes": b"\xff",
    }  # fmt: skip
    for name, content in recipes.items():
        (tmp_path / f"{name}.yaml").write_bytes(content)
    for line, *figures in WRONG_CALLS:
        with pytest.raises(SystemExit) as stopped:
            main(line.format(rows=rows).split())
        error = capsys.readouterr().err
        assert stopped.value.code == 2
        assert error.count("\n") == 1, line
        assert all(figure in error for figure in figures), error
    for line, *figures in BAD_CALLS:
        assert main(line.format(rows=rows, folder=tmp_path).split()) == 2, line
        error = capsys.readouterr().err
        assert error.count("\n") == 1, line
        assert all(figure.replace("{rows}", rows) in error for figure in figures), error


def test_check_lists_golds_that_cannot_be_scored(tmp_path, capsys):
    golds = ["Steps.\n#### 65,960", "18", "\\frac{1}{2}", "", "She sold 24 clips in May and 48 in April.", None]
    path = write(tmp_path / "golds.jsonl", [{"answer": gold} for gold in golds])
    for extract in ("answer_tag", "hashes", "boxed", "a_line", "sentence", "auto"):
        reward = f"{{name: gsm8k_correctness, kwargs: {{extract: {extract}}}}}"
        assert main(["check", path, "--reward", reward]) == 1
        first, second, *listed = printed(capsys)[0]
        assert re.findall(r"\d+", first.removeprefix(path)) == ["6", "3", "2"]  # golds, those paid in full, the pay
        assert second.startswith("3 ")
        assert [re.findall(r"row (\d)", line)[0] for line in listed] == ["4", "5", "6"]
    path = write(tmp_path / "good.jsonl", [{"solution": gold} for gold in golds[:3]])
    assert main(["check", path, "--gold-column", "solution"]) == 0
    capsys.readouterr()
    assert main(["check", write(tmp_path / "rows.jsonl", [{"answer": ""}])]) == 1
    assert "`answer`" in printed(capsys)[1]


@pytest.mark.skipif(sys.platform != "linux", reason="programs of a model run on Linux")
def test_check_runs_the_solutions_of_rows_that_have_one(tmp_path, capsys):
    right = {"tests": ["assert f() == 1"], "solution": "def f(): return 1"}
    rows = [right, {"tests": right["tests"]}, {**right, "solution": "def f(): 1"}, {"tests": ["assert f() == f()"]}]
    path = write(tmp_path / "rows.jsonl", rows)
    assert main(["check", path, "--reward", "unit_tests"]) == 1
    first, *lines = printed(capsys)[0]
    assert re.findall(r"\d+", first.removeprefix(path)) == ["4", "1", "1", "1"], "golds, full pay, the pay, untried"
    assert [re.findall(r"row (\d)", line) for line in lines] == [[], ["4"], [], ["3"]]
    path = write(tmp_path / "rows.jsonl", [{"tests": row["tests"]} for row in rows[:3]])
    assert main(["check", path, "--reward", "unit_tests"]) == 0


def test_check_reads_the_golds_of_any_correctness_reward(tmp_path, capsys):
    options = {"options": ["Paris", "London", "Rome"]}
    path = write(tmp_path / "choices.jsonl", [{**options, "key": key} for key in ("B", 0, "Rome", "Oslo")])
    reward = "{name: choice_correctness, kwargs: {choices_column: options, gold_column: key}}"
    gate = "{name: gate, only_if: well_formed, reward: " + reward + "}"
    for spec in (reward, gate, reward.replace("key}", "key, extract: whole}")):
        assert main(["check", path, "--reward", spec]) == 1
        output = capsys.readouterr().out
        assert "4 golds, 3 earn full pay (1)" in output
        assert "row 4: Oslo" in output
    path = write(tmp_path / "strings.jsonl", [{"answer": ["the Danube", "Donau"]}, {"answer": "Rhine"}])
    assert main(["check", path, "--reward", "string_match"]) == 0


def test_a_command_has_its_defaults(monkeypatch, capsys):
    assert vars(cli._options(["check", "f"]))["reward"] == "gsm8k_correctness"
    options = vars(cli._options(["audit", "f", "--reward", "r"]))
    assert [options[name] for name in ("rows", "seed", "json", "layout", "right", "gold_column")] == [
        24, 0, False, None, None, None,
    ]  # fmt: skip
    assert not vars(cli._options(["convert-internlm2", "a", "b"]))["allow_pickle"]
    monkeypatch.setattr(sys, "argv", ["grpo-rewards", "--version"])
    with pytest.raises(SystemExit, match="^0$"):
        main()
    assert capsys.readouterr().out.startswith("grpo-rewards ")


SHOUTED = "<answer>\x1b[31m17\x07\u202e\n</answer>"


CALLS = []


def recorded(prompts, completions, **columns):
    CALLS.append({"prompts": prompts, "completions": completions, **columns})
    return [1.0] * len(completions)


def test_a_reward_gets_the_columns_of_the_file_and_none_for_a_missing_value(tmp_path):
    rows = [{"completion": "a", "unit": "m", "prompts": "own"}, {"completion": "b", "key": "7"}]
    path = write(tmp_path / "rows.jsonl", rows)
    CALLS.clear()
    assert main(["score", path, "--reward", f"{__name__}.recorded"]) == 0
    (call,) = CALLS
    assert call == {"prompts": [None, None], "completions": ["a", "b"], "unit": ["m", None], "key": [None, "7"]}
    rows = [{"completion": "a", "key": "7", "answer": "no"}]
    CALLS.clear()
    path = write(tmp_path / "rows.jsonl", rows)
    assert main(["score", path, "--reward", f"{__name__}.recorded", "--gold_column", "key"]) == 0
    assert (CALLS[0]["answer"], CALLS[0]["key"]) == (["7"], ["7"])


def test_a_column_with_the_name_of_a_reward_is_in_the_way_of_a_file_alone(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"completion": RIGHT, "tag_count": 3}])
    assert main(["score", path, "--reward", " {name: tag_count}"]) == 0
    assert main(["score", path, "--reward", "tag_count", "--out", str(tmp_path / "o.jsonl")]) == 2


def test_rewards_of_the_working_folder_are_found_where_python_does_not_look_there(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl", [{"completion": "a"}])
    (tmp_path / "own_of_the_folder.py").write_text("def one(prompts, completions, **columns):\n    return [1.0]\n")
    monkeypatch.chdir(tmp_path)
    elsewhere = [place for place in sys.path if place]
    monkeypatch.setattr(sys, "path", list(elsewhere))
    try:
        for _ in range(2):
            assert main(["score", path, "--reward", "own_of_the_folder.one"]) == 0
    finally:
        sys.modules.pop("own_of_the_folder", None)
    assert sys.path == ["", *elsewhere], "once"


def test_a_parquet_file_is_scored_from_row_1_and_dates_are_written_as_text(tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    path, out = tmp_path / "rows.parquet", tmp_path / "out.jsonl"
    rows = [{"completion": "aa", "day": date(2020, 1, 1)}, {"completion": "a", "day": date(2020, 1, 1)}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert main(["score", str(path), "--reward", f"{__name__}.length", "--out", str(out)]) == 0
    assert "worst: row 2, 1: a" in printed(capsys)[0]
    assert json.loads(out.read_text().splitlines()[1]) == {"completion": "a", "day": "2020-01-01", "length": 1.0}
    path.write_bytes(b"PAR1")
    assert main(["score", str(path), "--reward", f"{__name__}.length"]) == 2
    assert str(path) in printed(capsys)[1]


def wrongly(scores):
    def own(prompts, completions, **columns):
        return scores

    return own


def odd(prompts, completions, **columns):
    raise ValueError("odd\n  text.")


def divides(prompts, completions, **columns):
    return [1 / 0]


async def awaited(prompts, completions, **columns):
    return (float(len(text)) for text in completions)


def pair(prompts, completions):
    return [1.0] * len(completions)


def test_a_reward_that_fails_is_named_with_the_row(tmp_path, capsys, monkeypatch):
    module = types.ModuleType("own_rewards")
    monkeypatch.setitem(sys.modules, "own_rewards", module)
    path = write(tmp_path / "rows.jsonl", [{"completion": "ab", "key": "7"}, {"completion": "abcd"}])
    for reward, *figures in (
        (divides, "ZeroDivisionError: division by zero", f"{__file__}, line {divides.__code__.co_firstlineno + 1}"),
        (odd, "ValueError: odd text", f"{__file__}, line {odd.__code__.co_firstlineno + 1}"),
        (pair, "key", "**columns"),
        (wrongly([1.0, "2"]), "'2'", "row 2"), (wrongly([1.0]), "1", "2"), (wrongly([1.0, math.nan]), "nan", "row 2"),
        (wrongly([[], 1.0]), "[]", "row 1"), (wrongly([b"1", 1.0]), "b'1'", "row 1"), (wrongly(1.0), "float", "2"),
    ):  # fmt: skip
        module.own = reward
        assert main(["score", path, "--reward", "own_rewards.own"]) == 2
        error = printed(capsys)[1]
        assert reward.__name__ in error
        assert all(figure in error for figure in figures), error
    module.own = awaited
    assert main(["score", path, "--reward", "own_rewards.own"]) == 0
    assert "mean 3.0000, standard deviation 1.0000" in printed(capsys)[0]


def test_explain_prints_the_reason_for_each_score(tmp_path, capsys):
    formed = "<think>\na\n</think>\n<answer>\n$18.00\n</answer>"
    rows = [{"completion": formed, "answer": "18"}, {"completion": SHOUTED, "answer": ""}]
    path = write(tmp_path / "rows.jsonl", rows)
    gate = "{name: gate, reward: {name: gsm8k_correctness, weight: 2}, only_if: tag_count, at_least: 1}"
    rewards = ["gsm8k_correctness", "group_length", gate, "tag_presence", f"{__name__}.length"]
    words = [word for reward in rewards for word in ("--reward", reward)]
    assert main(["score", path, "--explain", "--num_generations", "2", *words]) == 0
    lines = printed(capsys)[0]
    first, second = lines[: len(rewards) + 1], lines[len(rewards) + 1 : 2 * len(rewards) + 2]
    assert (first[0][:6], second[0][:6]) == ("row 1:", "row 2:")
    assert first[1].startswith("gsm8k_correctness 1.5: ")
    assert all(part in first[1] for part in ("`$18.00`", "`18`", "`equal`"))
    assert re.findall(r"\d+", first[2]) == ["0", "5", "44", "27", "44"]
    assert first[3].startswith("gate 3: gsm8k_correctness/extracted `$18.00`")
    assert [line.split(": ")[0] for line in second[1:]] == [
        "gsm8k_correctness no score", "group_length no score", "gate no score", "tag_presence 0.4", "length 27",
    ]  # fmt: skip
    assert "<think>" in second[4]


def test_a_file_without_a_readable_gold_is_named_with_its_first_row(tmp_path, capsys):
    gold = "She sold 24 clips in May and 48 in April, and then 24 in June again."
    path = write(tmp_path / "rows.jsonl", ["", {"completion": RIGHT, "key": gold, "answer": ""}])
    assert main(["score", path, "--reward", "gsm8k_correctness", "--gold_column", "key"]) == 1
    error = printed(capsys)[1]
    assert all(figure in error for figure in ("`key`", "row 2", f"'…{gold[-60:]}'"))
    spec = "{name: choice_correctness, kwargs: {gold_column: answer, choices_column: key}}"
    path = write(tmp_path / "rows.jsonl", [{"completion": RIGHT, "key": ["a"], "answer": ""}])
    assert main(["score", path, "--reward", spec]) == 1
    error = printed(capsys)[1]
    assert all(figure in error for figure in ("`answer`", "row 1"))


def interrupting(prompts, completions, answer=(), **columns):
    raise KeyboardInterrupt


def test_an_audit_that_is_interrupted_ends_with_130(rows, capsys):
    assert main(["audit", rows, "--reward", f"{__name__}.interrupting"]) == 130
    assert printed(capsys)[1].count("\n") == 1
