"""The command `grpo-rewards` as a user types it."""

import json
import re
import signal
import sys
import types
from datetime import date
from pathlib import Path

import pytest

from grpo_rewards import cli
from grpo_rewards.cli import main
from tests.support.word_problems import gsm8k_rows

RIGHT, WRONG = "<answer>18</answer>", "<answer>17</answer>"


def write(path, rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return str(path)


@pytest.fixture
def rows(tmp_path):
    return write(
        tmp_path / "rows.jsonl",
        [
            {"completion": RIGHT, "answer": "18"},
            {"completion": [{"role": "assistant", "content": WRONG}], "answer": "18", "prompt": "p"},
            {"completion": "\ud800", "answer": ""},
        ],
    )


def test_list_shows_every_reward_with_its_pay_table(capsys):
    assert main(["list"]) == 0
    output = capsys.readouterr().out
    for name in ("gsm8k_correctness", "math_correctness", "tag_structure", "tag_count", "tag_presence", "well_formed",
                 "group_length", "reward_model"):  # fmt: skip
        assert f"\n{name}\n" in "\n" + output
    assert "| pay |" in output
    assert "character for character | 2 (`pay_exact`)" in output


def test_score_summarises_and_writes_one_column_per_reward(rows, tmp_path, capsys):
    out = tmp_path / "scored.jsonl"
    spec = "{name: gsm8k_correctness, alias: strict, kwargs: {pay_exact: 3}}"
    assert main(["score", rows, "--reward", spec, "--reward", "tag_count", "--out", str(out)]) == 0
    scored = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["strict"] for row in scored] == [3.0, 0.0, None]
    assert [row["tag_count"] for row in scored] == [0.5, 0.5, 0.0]
    assert scored[0]["completion"] == RIGHT
    output = capsys.readouterr().out
    assert "strict: 3 rows, 1 unscorable" in output
    assert "mean 1.5000, standard deviation 1.5000" in output
    assert "worst: row 2, 0" in output
    assert "best: row 1, 3" in output
    assert output.endswith(f"\nwrote 3 rows to {out}\n")


def test_a_malformed_line_is_named_and_the_rest_is_scored(tmp_path, capsys):
    path = write(
        tmp_path / "rows.jsonl",
        [{"completion": RIGHT, "answer": "18"}, "{", "[]", "", {"completion": RIGHT}, {"completion": 3, "answer": "1"},
         {"answer": "18"}, {"completion": RIGHT, "answer": "18"}],
    )  # fmt: skip
    assert main(["score", path, "--reward", "gsm8k_correctness"]) == 1
    captured = capsys.readouterr()
    assert "gsm8k_correctness: 2 rows" in captured.out
    for message in ("row 2: not JSON", "row 3: a list", "row 5: no `answer`", "row 6: `completion` is neither",
                    "row 7: no `completion`"):  # fmt: skip
        assert message in captured.err


def test_the_given_gold_column_replaces_one_named_answer(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [{"completion": RIGHT, "answer": "a distractor", "solution": "#### 18"}])
    assert main(["score", path, "--reward", "gsm8k_correctness", "--gold-column", "solution"]) == 0
    assert "mean 2.0000" in capsys.readouterr().out


def test_a_format_reward_needs_no_gold(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [{"completion": RIGHT}])
    assert main(["score", path, "--reward", "tag_count"]) == 0
    assert main(["score", path, "--reward", "gsm8k_correctness"]) == 2
    assert "needs the dataset column `answer`" in capsys.readouterr().err


def test_a_group_is_scored_in_one_call(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [{"completion": RIGHT + " " * n, "answer": "18"} for n in (0, 1, 3, 2)])
    assert (
        main(["score", path, "--reward", "group_length", "--num-generations", "2", "--out", f"{tmp_path}/o.jsonl"]) == 0
    )
    scored = [json.loads(line)["group_length"] for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert scored == [0.5, -0.5, -0.5, 0.5]
    assert main(["score", path, "--reward", "group_length", "--num-generations", "3"]) == 2
    assert "whole number of groups of 3" in capsys.readouterr().err
    path = write(
        tmp_path / "rows.jsonl", [{"completion": RIGHT, "answer": "18"}, "{", {"completion": "", "answer": "1"}]
    )
    assert main(["score", path, "--reward", "group_length", "--num-generations", "2"]) == 2
    assert "row 2: not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score", "absent.jsonl", "--reward", "tag_count"], "absent.jsonl is not a file"),
        (["score", "{rows}", "--reward", "tag_cuont"], "did you mean `tag_count`"),
        (["score", "{rows}", "--reward", "{{name: tag_count"], "is not YAML"),
        (["score", "{rows}", "--reward", "tag_count", "--out", "scores.csv"], "name a .jsonl file"),
        (["score", "{rows}", "--reward", "tag_count", "--out", "{rows}"], "choose another name"),
        (
            ["score", "{rows}", "--reward", "{{name: tag_count, alias: answer}}", "--out", "o.jsonl"],
            "give that reward an",
        ),
        (
            ["score", "{rows}", "--reward", "tag_count", "--out", "no/such/o.jsonl"],
            "no/such/o.jsonl can't be written",
        ),
        (["score", "absent.jsonl", "--reward", "tag_count", "--out", "{rows}"], "absent.jsonl is not a file"),
        (["score", "{rows}", "--reward", "tag_count", "--out", "{folder}/o.jsonl"], "o.jsonl can't be written"),
        (
            ["score", "{rows}", "--reward", "tag_count", "--gold_column", "gold"],
            "rows.jsonl has no column `gold` (--gold_column): it has `completion`, `answer`\n",
        ),
        (["score", "{rows}", "--reward", "group_length", "--num_generations", "0"], "must be at least 1, not 0\n"),
        (["score", "{rows}", "--reward", "gsm8k_correctness", "--reward", "gsm8k_correctness"], "alias"),
        (["check", "{rows}", "--reward", "tag_count"], "needs a correctness reward"),
        (["check", "{rows}", "--gold-column", "gold"], "no `gold`"),
        (["audit", "{rows}", "--reward", "gsm8k_correctness", "--rows", "0"], "--rows must be at least 1, not 0\n"),
        (
            ["audit", "{rows}", "--reward", "gsm8k_correctness", "--layout", "answer"],
            "--layout 'answer' has no place for the answer: write {{answer}} where it belongs\n",
        ),
        (["audit", "{rows}", "--reward", "absent.yaml"], "--reward absent.yaml is not a file"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(rows, arguments, message, tmp_path, capsys):
    (tmp_path / "o.jsonl").mkdir()
    assert main([argument.format(rows=rows, folder=tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message.replace("{{", "{").replace("}}", "}") in error
    assert error.count("\n") == 1


def test_check_lists_golds_that_cannot_be_scored(tmp_path, capsys):
    golds = ["Steps.\n#### 65,960", "18", "\\frac{1}{2}", "", "She sold 24 clips in May and 48 in April."]
    path = write(tmp_path / "golds.jsonl", [{"answer": gold} for gold in golds])
    for extract in ("answer_tag", "hashes", "boxed", "a_line", "sentence", "auto"):
        reward = f"{{name: gsm8k_correctness, kwargs: {{extract: {extract}}}}}"
        assert main(["check", path, "--reward", reward]) == 1
        output = capsys.readouterr().out
        assert "5 golds, 3 earn full pay (2)" in output
        assert "2 can't be scored" in output
        assert "row 5: She sold" in output
    path = write(tmp_path / "good.jsonl", [{"solution": gold} for gold in golds[:3]])
    assert main(["check", path, "--gold-column", "solution"]) == 0


def test_check_passes_a_file_in_gsm8ks_schema(tmp_path):
    assert main(["check", write(tmp_path / "test.jsonl", gsm8k_rows(1319))]) == 0


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


@pytest.mark.parametrize("option", ["--gold_column", "--gold-column"])
def test_options_have_two_spellings(tmp_path, option):
    path = write(tmp_path / "rows.jsonl", [{"solution": "#### 18"}])
    assert main(["check", path, option, "solution"]) == 0
    assert main(["check", path, f"{option}=solution"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            "a command is missing: choose list, score, check, audit, convert-internlm2",
        ),
        (["scor"], "there is no command `scor`: did you mean `score`?"),
        (["train"], "there is no command `train`: choose list, score, check, audit, convert-internlm2"),
        (
            ["check", "rows.jsonl", "--gold_colum", "x"],
            "unknown argument `--gold_colum`: did you mean `--gold_column`?",
        ),
        (["score"], "the following arguments are required: file, --reward"),
    ],
)
def test_a_mistyped_command_is_one_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"


FORMED = "<think>\na\n</think>\n<answer>\n$18.00\n</answer>"
SHOUTED = "<answer>\x1b[31m17\x07\u202e\n</answer>"
FORMATS = {
    "tag_structure": "does not start with <think>\\n",
    "tag_count": "<think> 0 times, </think> 0 times",
    "tag_presence": "no <think>, no </think>",
    "well_formed": "does not start with <think>",
}


def explained(path, capsys, *specs, **options):
    """Return the lines of `score --explain`, by (row, reward)."""
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert main(["score", path, "--explain", *given, *(word for spec in specs for word in ("--reward", spec))]) == 0
    lines, row = {}, 0
    for line in capsys.readouterr().out.partition("\n\n")[0].splitlines():
        if line.startswith("row "):
            row = int(line[4:].partition(":")[0])
        else:
            name, _, reason = line[2:].partition(" ")
            lines[row, name] = reason
    return lines


def test_explain_prints_the_reason_for_each_score(tmp_path, capsys):
    rows = [{"completion": FORMED, "answer": "18"}, {"completion": SHOUTED, "answer": "18"}]
    path = write(tmp_path / "rows.jsonl", rows)
    gate = "{name: gate, reward: {name: gsm8k_correctness, weight: 2}, only_if: tag_count, at_least: 1}"
    lines = explained(
        path, capsys, "gsm8k_correctness", "repetition", "group_length", gate, *FORMATS, num_generations=2
    )
    assert lines[1, "gsm8k_correctness"] == "1.5: extracted `$18.00`, gold `18`, verdict `equal`"
    # Control characters are escaped.
    assert lines[2, "gsm8k_correctness"] == "0: extracted `\\x1b[31m17\\x07\\u202e`, gold `18`, verdict `wrong`"
    for name, fault in FORMATS.items():
        assert lines[1, name].endswith("reason `no fault`")
        assert lines[2, name].endswith(f"reason `{fault}`")
    assert lines[1, "repetition"] == "0: reason `0.0% of its 3-grams of words occurred before`"
    assert lines[1, "group_length"] == "-0.5: reason `right, length 44 in a group of 27 to 44`"
    assert lines[1, "gate"].startswith("3: gsm8k_correctness/extracted `$18.00`, ")
    assert lines[1, "gate"].endswith("reason `open: tag_count pays 1`")
    assert lines[2, "gate"].endswith("reason `closed: tag_count pays 0.5`")


def test_explain_without_a_reason_or_a_score(tmp_path, capsys, monkeypatch):
    module = types.ModuleType("own_rewards")

    def silent(prompts, completions, **columns):
        return [None] * (len(completions) - 1) + [1]

    def narrow(prompts, completions, answer):
        return [0.5] * len(completions)

    module.silent, module.narrow = silent, narrow
    monkeypatch.setitem(sys.modules, "own_rewards", module)
    path = write(tmp_path / "rows.jsonl", [{"completion": RIGHT, "answer": ""}, {"completion": RIGHT, "answer": "18"}])
    added = "{name: sum, rewards: [gsm8k_correctness, {name: tag_count, weight: 0.5}]}"
    lines = explained(path, capsys, "own_rewards.silent", "own_rewards.narrow", added)
    assert lines[1, "silent"] == "no score: it gives no reason"
    assert lines[1, "narrow"] == "0.5: it gives no reason"
    assert lines[1, "sum"].startswith("no score: ")
    assert lines[1, "sum"].endswith("reason `gsm8k_correctness has no score`")
    assert lines[2, "sum"].endswith("reason `1 * gsm8k_correctness + 0.5 * tag_count`")


def test_an_excerpt_contains_no_control_character(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [{"completion": SHOUTED, "answer": "18"}])
    assert main(["score", path, "--reward", "tag_count"]) == 0
    output = capsys.readouterr().out
    assert "worst: row 1, 0.5: <answer>\\x1b[31m17\\x07\\u202e </answer>" in output
    assert {character for character in output if not character.isprintable()} == {"\n"}


FILE = Path("rows.jsonl")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("list", {}),
        (
            "score rows.jsonl --reward r",
            {"file": FILE, "reward": ["r"], "gold_column": None, "num_generations": None, "out": None}
            | {"explain": False},
        ),
        (
            "score rows.jsonl --reward r --reward s --gold_column g --num_generations 4 --out rows.jsonl --explain",
            {"file": FILE, "reward": ["r", "s"], "gold_column": "g", "num_generations": 4, "out": FILE}
            | {"explain": True},
        ),
        ("check rows.jsonl", {"file": FILE, "reward": "gsm8k_correctness", "gold_column": None}),
        ("check rows.jsonl --reward r --gold_column g", {"file": FILE, "reward": "r", "gold_column": "g"}),
        (
            "audit rows.jsonl --reward r",
            {
                "file": FILE,
                "reward": ["r"],
                "gold_column": None,
                "right": None,
                "layout": None,
                "rows": 24,
                "seed": 0,
                "json": False,
            },
        ),
        (
            "audit rows.jsonl --reward r --gold_column g --right c --layout {answer} --rows 2 --seed 3 --json",
            {
                "file": FILE,
                "reward": ["r"],
                "gold_column": "g",
                "right": "c",
                "layout": "{answer}",
                "rows": 2,
                "seed": 3,
                "json": True,
            },
        ),
        ("convert-internlm2 a rows.jsonl", {"source": "a", "target": FILE, "allow_pickle": False}),
        ("convert-internlm2 a rows.jsonl --allow_pickle", {"source": "a", "target": FILE, "allow_pickle": True}),
    ],
    ids=lambda value: value[:14] if isinstance(value, str) else "",
)
def test_each_command_has_these_options_with_these_defaults(arguments, expected):
    found = vars(cli._options(arguments.split()))
    assert found.pop("run")
    assert found == expected


@pytest.mark.parametrize("command", ["", "list", "score", "check", "audit", "convert-internlm2"])
def test_the_help_explains_every_argument(command, capsys):
    with pytest.raises(SystemExit):
        cli._options([*command.split(), "--help"])
    usage, _, described = capsys.readouterr().out.partition("\n\n")
    entries = re.findall(r"^ {2,4}(\S.*?)(?:  +|\n +)(\S.*)$", described, flags=re.MULTILINE)
    assert len(entries) >= {"": 6, "score": 6, "audit": 6, "check": 3}.get(command, 1)
    for name, explanation in entries:
        assert len(explanation.split()) >= 2, name
    explained = {re.split("[ ,]", name)[0] for name, _ in entries}
    words = usage.split()[2 + bool(command) :]
    assert explained >= {word.strip("[]") for word in words if not word.strip("[]").isupper() and word != "..."}
    operands = {"": "COMMAND ...", "list": "", "score": "file", "convert-internlm2": "SRC DST"}.get(command, "dataset")
    assert " ".join(usage.split()).endswith(f" {operands}" if operands else "[-h]")
    # A value is called by its form, rather than by the name of its option once more.
    for option, value in re.findall(r"--(\w+) (\w+)", usage):
        assert value in {"SPEC", "NAME", "COLUMN", "G", "FILE", "TEXT", "N"}, option


@pytest.mark.parametrize(
    "arguments", ["score rows.jsonl", "audit rows.jsonl", "convert-internlm2 a", "score --reward r"]
)
def test_a_required_argument_is_asked_for(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        cli._options(arguments.split())
    assert left.value.code == 2
    assert "required" in capsys.readouterr().err


def length(prompts, completions, **columns):
    return [None if text == "?" else float(len(text)) for text in completions]


def test_a_summary_counts_each_value_or_eight_bins(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [{"completion": "x" * n} for n in range(10)])
    assert main(["score", path, "--reward", f"{__name__}.length"]) == 0
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()][1:] == [
        "length: 10 rows, 0 unscorable",
        "mean 4.5000, standard deviation 2.8723",
        "pay rows share",
        "0 … 1.12 2 20.0%", "1.12 … 2.25 1 10.0%", "2.25 … 3.38 1 10.0%", "3.38 … 4.5 1 10.0%",
        "4.5 … 5.62 1 10.0%", "5.62 … 6.75 1 10.0%", "6.75 … 7.88 1 10.0%", "7.88 … 9 2 20.0%",
        "worst: row 1, 0:", "worst: row 2, 1: x", "best: row 10, 9: xxxxxxxxx", "best: row 9, 8: xxxxxxxx",
    ]  # fmt: skip
    path = write(tmp_path / "rows.jsonl", [{"completion": "x" * n} for n in (0, 1, 2, 3, 4, 5, 6, 7, 7, 7)])
    assert main(["score", path, "--reward", f"{__name__}.length"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[4] == "0 1 10.0%"
    assert lines[11] == "7 3 30.0%"
    path = write(tmp_path / "rows.jsonl", [{"completion": "?"}, {"completion": "?"}])
    assert main(["score", path, "--reward", f"{__name__}.length"]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines() == ["", "length: 2 rows, 2 unscorable"]
    assert said.err.strip() == f"error: {path}: length could score none of 2 rows: it returned None for each"


def test_the_end_of_a_long_completion_is_shown(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [{"completion": "a" + "x" * 90}, {"completion": "y" * 90}])
    assert main(["score", path, "--reward", f"{__name__}.length"]) == 0
    said = "".join(capsys.readouterr().out.split())  # a terminal wraps the line
    assert f"row1,91:…{'x' * 90}" in said
    assert "x" * 91 not in said
    assert "…y" not in said


@pytest.mark.parametrize(("bad", "listed", "more"), [(20, 20, ""), (22, 20, "… and 2 more")])
def test_at_most_twenty_complaints_are_listed(tmp_path, capsys, bad, listed, more):
    path = write(tmp_path / "rows.jsonl", [{"completion": "x"}, *["{"] * bad])
    assert main(["score", path, "--reward", f"{__name__}.length"]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in lines if "not JSON" in line]) == listed
    assert lines[-1].endswith(more)
    assert len(lines) == listed + bool(more)


def fail(message):
    raise ValueError(message)


def broken(prompts, completions, **columns):
    return {
        "a": lambda: 1 / 0, "b": lambda: [1.0, "2"], "c": lambda: [1.0], "d": lambda: [1.0, float("nan")],
        "e": lambda: [[], 1.0], "f": lambda: [b"1", 1.0], "g": lambda: [1.0, "two"], "h": lambda: fail("odd\n  text."),
        "i": lambda: fail(""), "j": lambda: 1.0,
    }[completions[0]]()  # fmt: skip


HERE = f"({__file__}, line {fail.__code__.co_firstlineno + 1})"


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("a", "reward `broken` raised ZeroDivisionError: division by zero ("),
        ("b", "reward `broken` returned '2' for row 2: a score is a finite number, or None"),
        ("c", "reward `broken` returned 1 scores for 2 completions: it must return one for each"),
        ("d", "reward `broken` returned nan for row 2: a score is a finite number, or None"),
        ("e", "reward `broken` returned [] for row 1: a score is a finite number, or None"),
        ("f", "reward `broken` returned b'1' for row 1: a score is a finite number, or None"),
        ("g", "reward `broken` returned 'two' for row 2: a score is a finite number, or None"),
        ("h", f"reward `broken` raised ValueError: odd text {HERE}"),
        ("i", f"reward `broken` raised ValueError: (no message) {HERE}"),
        ("j", "reward `broken` returned a float, not a list of scores for 2 completions"),
    ],
)
def test_a_reward_that_fails_is_named_with_the_row(tmp_path, capsys, first, message):
    path = write(tmp_path / "rows.jsonl", [{"completion": first}, {"completion": "x"}])
    assert main(["score", path, "--reward", f"{__name__}.broken"]) == 2
    assert message in capsys.readouterr().err


def test_check_counts_the_golds_that_earn_less(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [{"answer": "18"}, {"answer": ""}, {"answer": None}, {"answer": "7"}])
    assert main(["check", path]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: 4 golds, 2 earn full pay (2)",
        "2 can't be scored:",
        "  row 2: ",
        "  row 3: None",
    ]
    path = write(tmp_path / "rows.jsonl", [{"answer": ""}])
    assert main(["check", path]) == 1
    assert capsys.readouterr().err.strip() == f"error: {path}: none of 1 golds in `answer` can be read"


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
    assert (
        main(["score", write(tmp_path / "r.jsonl", rows), "--reward", f"{__name__}.recorded", "--gold_column", "key"])
        == 0
    )
    assert (CALLS[0]["answer"], CALLS[0]["key"]) == (["7"], ["7"])


def test_a_file_without_a_readable_gold_is_named_with_its_first_row(tmp_path, capsys):
    gold = "She sold 24 clips in May and 48 in April, and then 24 in June again."
    path = write(tmp_path / "rows.jsonl", ["", {"completion": RIGHT, "key": gold, "answer": ""}])
    assert main(["score", path, "--reward", "gsm8k_correctness", "--gold_column", "key"]) == 1
    assert (
        f"could score none of 1 rows: no gold in `key` can be read (row 2: '…{gold[-60:]}')" in capsys.readouterr().err
    )
    spec = "{name: choice_correctness, kwargs: {gold_column: answer, choices_column: key}}"
    path = write(tmp_path / "rows.jsonl", [{"completion": RIGHT, "key": ["a"], "answer": ""}])
    assert main(["score", path, "--reward", spec]) == 1
    assert "no gold in `answer` can be read (row 1: '')" in capsys.readouterr().err


@pytest.mark.parametrize("has_solutions", [True, False])
def test_check_runs_the_solutions_of_rows_that_have_one(has_solutions, tmp_path, capsys, monkeypatch):
    from grpo_rewards.programs import UnitTests, Verdict

    def run(self, jobs):
        return {key: Verdict(1, 1) if "return" in key[0] else Verdict(0, 1, "fails") for key in jobs}

    monkeypatch.setattr(UnitTests, "_run", run)
    rows = [{"tests": ["assert f() == 1"], "solution": "def f(): return 1"}, {"tests": ["assert f() == 1"]},
            {"tests": ["assert f() == 1"], "solution": "def f(): 1"}, {"tests": ["assert f() == f()"]}]  # fmt: skip
    if not has_solutions:
        rows = [{"tests": row["tests"]} for row in rows]
    path = write(tmp_path / "rows.jsonl", rows)
    assert main(["check", path, "--reward", "unit_tests"]) == 1
    lines = capsys.readouterr().out.splitlines()
    if has_solutions:
        assert lines[0] == f"{path}: 4 golds, 1 earn full pay (1), 1 without a `solution` were only read"
        assert lines[1] == "1 can't be scored:"
        assert lines[2].startswith("  row 4: ")
        assert lines[3:] == ["1 earn less than full pay:", "  row 3: passes 0 of 1: fails"]
    else:
        assert lines[0] == f"{path}: 4 golds, 0 earn full pay (1), 3 without a `solution` were only read"


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (b"rewards: [", "is not YAML"),
        (b"rewards: tag_count", "has no list `rewards`"),
        (b"rewards: []", "has no list `rewards`"),
        (b"- tag_count", "has no list `rewards`"),
        (b"\xff", "it is not UTF-8 text"),
    ],
)
def test_a_recipe_without_rewards_is_named(recipe, message, tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(recipe)
    assert main(["audit", write(tmp_path / "rows.jsonl", [{"answer": "18"}]), "--reward", str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert message in error


def test_an_error_of_our_own_is_shown_without_its_place(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [{"completion": "x", "key": "7"}])
    assert main(["score", path, "--reward", "gsm8k_correctness"]) == 2
    assert capsys.readouterr().err == (
        "error: reward `gsm8k_correctness` needs the dataset column `answer` (its kwarg gold_column); the batch has "
        "key\n"
    )


async def awaited(prompts, completions, **columns):
    return (float(len(text)) for text in completions)


def pair(prompts, completions):
    return [1.0] * len(completions)


def test_a_reward_may_be_a_coroutine_and_return_any_sequence(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [{"completion": "ab"}, {"completion": "abcd"}])
    assert main(["score", path, "--reward", f"{__name__}.awaited"]) == 0
    assert "mean 3.0000" in capsys.readouterr().out
    assert main(["score", path, "--reward", f"{__name__}.pair"]) == 0
    path = write(tmp_path / "rows.jsonl", [{"completion": "ab", "key": "7"}])
    capsys.readouterr()
    assert main(["score", path, "--reward", f"{__name__}.pair"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: reward `pair` can't be called (got an unexpected keyword argument 'key'): a reward takes prompts"
    )


def test_a_column_with_the_name_of_a_reward_is_in_the_way_of_a_file_alone(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"completion": RIGHT, "tag_count": 3}])
    assert main(["score", path, "--reward", " {name: tag_count}"]) == 0
    assert main(["score", path, "--reward", "tag_count", "--out", str(tmp_path / "o.jsonl")]) == 2


def documented(prompts, completions, **columns):
    """Sum of things.

        indented

    Source: a paper

    Args:
        prompts: not shown.
        completions: not shown.

    Args:
        columns: not shown either.
    """


def undocumented(prompts, completions, **columns):
    return []


def test_the_list_ends_a_description_before_the_arguments(monkeypatch, capsys):
    monkeypatch.setattr(cli, "REGISTERED", [f"{__name__}.documented", f"{__name__}.undocumented", "absnt"])
    assert main(["list"]) == 0
    assert capsys.readouterr().out.split("\n\n")[:3] == [
        f"{__name__}.documented\n    Sum of things.",
        "        indented",
        f"{__name__}.undocumented\n    (not documented)",
    ]


def test_the_command_reads_the_words_behind_its_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grpo-rewards", "--version"])
    with pytest.raises(SystemExit, match="^0$"):
        main()
    assert capsys.readouterr().out.startswith("grpo-rewards ")


def test_output_that_cannot_be_written_fails_the_command(rows, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["score", rows, "--reward", "tag_count"]) == 2
    assert "standard output can't be written (No space left on device)" in capsys.readouterr().err


def test_a_conversion_passes_its_options_on_and_names_what_failed(tmp_path, monkeypatch, capsys):
    internlm2 = pytest.importorskip("grpo_rewards.internlm2")
    calls = []

    def convert(source, target, *, allow_pickle):
        calls.append((source, target, allow_pickle))
        if source == "full":
            raise OSError(28, "No space left on device")
        return target

    monkeypatch.setattr(internlm2, "convert", convert)
    assert main(["convert-internlm2", "a/b", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path}: ")
    assert main(["convert-internlm2", "full", str(tmp_path), "--allow_pickle"]) == 2
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"
    assert calls == [("a/b", tmp_path, False), ("full", tmp_path, True)]


def test_check_refers_a_reward_of_the_users_own_to_the_audit(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [{"answer": "9"}])
    assert main(["check", path, "--reward", f"{{name: {__name__}.length, kind: correctness}}"]) == 2
    assert "`grpo-rewards audit`" in capsys.readouterr().err


def test_rows_of_parquet_are_numbered_from_one(tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"completion": "aa"}, {"completion": "a"}]), path)
    assert main(["score", str(path), "--reward", f"{__name__}.length"]) == 0
    assert "worst: row 2, 1: a" in capsys.readouterr().out
    path.write_bytes(b"PAR1")
    assert main(["score", str(path), "--reward", f"{__name__}.length"]) == 2
    assert f"{path} is not a Parquet file, or is damaged (" in capsys.readouterr().err


@pytest.mark.parametrize(("is_found", "code"), [(False, 0), (True, 1)])
def test_an_audit_gets_what_the_command_line_says(is_found, code, tmp_path, monkeypatch, capsys):
    calls, printed = [], []
    result = types.SimpleNamespace(found=is_found)
    monkeypatch.setattr(
        "grpo_rewards.audit.audit.auditor_of",
        lambda *given, **named: calls.append((given, named)) or types.SimpleNamespace(audit=lambda: result),
    )
    monkeypatch.setattr(
        "grpo_rewards.audit.report.print_audit", lambda found, as_json: printed.append((found, as_json))
    )
    path = write(tmp_path / "rows.jsonl", ["", {"key": "7"}])
    recipe = tmp_path / "recipe.yml"
    recipe.write_text("rewards: [tag_count, {name: tag_presence}]  # é", encoding="utf-8")
    words = ["--reward", str(recipe), "--reward", "{name: well_formed}", "--layout", "A: {answer}", "--rows", "1"]
    assert main(["audit", path, *words, "--right", "c", "--seed", "5", "--gold_column", "key"]) == code
    assert main(["audit", path, "--reward", "tag_count", "--json"]) == code
    specs = ["tag_count", {"name": "tag_presence"}, {"name": "well_formed"}]
    named = {"gold_column": "key", "right": "c", "layout": "A: {answer}", "most": 1, "seed": 5}
    assert calls[0] == ((specs, [(2, {"key": "7"})], Path(path)), named)
    assert calls[1][1] == {"gold_column": None, "right": None, "layout": None, "most": 24, "seed": 0}
    assert printed == [(result, False), (result, True)]
    monkeypatch.setattr(
        "grpo_rewards.audit.audit.auditor_of", lambda *given, **named: signal.raise_signal(signal.SIGINT)
    )
    assert main(["audit", path, "--reward", "tag_count"]) == 130
    assert capsys.readouterr().err == "error: interrupted: nothing was written\n"


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


def test_a_line_nested_too_deep_is_one_complaint(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [{"completion": "a"}, "[" * 200_000])
    assert main(["score", path, "--reward", f"{__name__}.length"]) == 1
    assert f"error: {path}: row 2: not JSON (" in capsys.readouterr().err


def test_values_that_json_lacks_are_written_as_text(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    dated, out = tmp_path / "rows.parquet", tmp_path / "out.jsonl"
    parquet.write_table(pyarrow.Table.from_pylist([{"completion": "a", "day": date(2020, 1, 1)}]), dated)
    assert main(["score", str(dated), "--reward", f"{__name__}.length", "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == {"completion": "a", "day": "2020-01-01", "length": 1.0}
