"""Runs with files that no trainer writes: every command that reads them prints an error sentence or a result."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from grpo_recipes import cli
from grpo_recipes.reports import run as runs
from grpo_recipes.reports.run import read_log
from grpo_recipes.runs import files
from tests.support.stored import EVALUATED, EVALUATION, HISTORY, RECORD, run_files
from tests.support.synthetic import CONFIG, REWARDS, healthy_completions, write_run

LONG, LARGE = "r" * 300, 1e308
DEEP = '{"log_history": ' + "[" * 100_000 + "]" * 100_000 + "}"


def state(*entries: Any, **more: Any) -> dict[str, Any]:
    return {"log_history": list(entries), "global_step": 40, **more}


def completions(**columns: Any) -> bytes:
    table = pd.DataFrame(healthy_completions()).drop(columns=[key for key, value in columns.items() if value is None])
    sink = pa.BufferOutputStream()
    table = table.assign(**{key: value for key, value in columns.items() if value is not None})
    parquet.write_table(pa.Table.from_pandas(table), sink)
    return sink.getvalue().to_pybytes()


def renamed(name: str, **more: Any) -> dict[str, Any]:
    """Return the files of a healthy run whose correctness reward has another name."""

    def changed(value: Any) -> Any:
        return json.loads(json.dumps(value).replace("gsm8k_correctness", json.dumps(name)[1:-1]))

    table = [
        {key.replace("gsm8k_correctness", name): value for key, value in row.items()} for row in healthy_completions()
    ]
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(table), sink)
    rewards = changed(REWARDS)
    return {"state": state(*changed(HISTORY)), "record": {**RECORD, "rewards": rewards, **more},
            "completions": sink.getvalue().to_pybytes()}  # fmt: skip


def large(value: float) -> dict[str, Any]:
    """Return the files of a run whose numbers are all `value`, with alternating sign."""
    entries = [
        {key: number if key == "step" else value * (-1) ** entry["step"] for key, number in entry.items()}
        for entry in HISTORY
    ]
    rewards = [{**reward, "weight": value} for reward in REWARDS]
    config = {**CONFIG, "beta": value}
    return {"state": state(*entries), "record": {**RECORD, "rewards": rewards, "config": config},
            "completions": completions(gsm8k_correctness=value)}  # fmt: skip


def without(value: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: inner for name, inner in value.items() if name != key}


# Contents of a run's files, exit code of `diagnose` and `report`, and a part of the error message.
RUNS: dict[str, tuple[dict[str, Any], int, str]] = {
    "entries without a step": ({"state": state({"reward": 1.0})}, 2, "`log_history[0]` has no `step`"),
    "a step that is text": (
        {"state": state(HISTORY[0], {"step": "two"})},
        2, '[1].step` is "two", not an integer from 0',
    ),
    "a step of 400 digits": ({"state": state({"step": 10**400, "reward": 1.0})}, 2, "not an integer from 0"),
    "a negative step": ({"state": state({"step": -1, "reward": 1.0})}, 2, "not an integer from 0"),
    "an entry that is a number": ({"state": state(7)}, 2, "`log_history[0]` is 7, not an object"),
    "a log that is text": ({"state": state() | {"log_history": "all"}}, 2, '`log_history` is "all", not a list'),
    "no log": ({"state": {"global_step": 3}}, 2, "it has no `log_history`"),
    "a state that is a list": ({"state": [1, 2]}, 2, "it is a list, not an object"),
    "a state cut off in a number": ({"state": '{"log_history": [{"step": 1'}, 2, "can't be read as JSON"),
    "deep JSON": ({"state": DEEP}, 2, "can't be read as JSON"),
    "deep JSON in the record": ({"record": DEEP}, 2, "run.json: can't be read as JSON"),
    "a record of numbers": ({"record": {"recipe": 3}}, 2, "`recipe` is 3, not an object"),
    "a reward without a source": ({"record": {**RECORD, "rewards": [{"name": "x"}]}}, 2, "has no `source`"),
    "a recipe of odd values": ({"record": {**RECORD, "recipe": {"rewards": [3, None, [], {"name": {}}]}}}, 0, ""),
    "rewards that are no list": ({"record": {**RECORD, "recipe": {"rewards": {"name": "x"}}}}, 2, "not a list"),
    "a gate without parts": (
        {"record": {**RECORD, "recipe": {"rewards": [{"name": "gate", "reward": 3, "rewards": 4}]}}},
        0, "",
    ),
    "an evaluation without settings": ({"evaluation": without(EVALUATION, "settings")}, 2, "has no `settings`"),
    "an evaluation of text": ({"evaluation": {**EVALUATION, "strict": "half"}}, 2, "not a share"),
    "shares outside 0 to 1": (
        {"evaluation": {**EVALUATION, "strict": {"value": LARGE, "low": 0, "high": LARGE}}},
        2, "a share",
    ),
    "an odd pass_at": ({"evaluation": {**EVALUATION, "pass_at": [1]}}, 2, "`pass_at` is a list, not an object"),
    "completions without prompts": ({"completions": completions(prompt=None)}, 2, "it has no column `prompt`"),
    "completions without steps": ({"completions": completions(step=None)}, 2, "it has no column `step`"),
    "completions that are numbers": ({"completions": completions(completion=3)}, 2, "texts or lists of messages"),
    "messages without content": (
        {"completions": completions(completion=[[{"x": 1}]] * 32, prompt=[[{"y": 2}]] * 32)},
        0, "",
    ),
    "a reward that is text": ({"completions": completions(gsm8k_correctness="much")}, 2, "does not hold numbers"),
    "completions without rows": ({"completions": completions()[:0] or b"PAR1"}, 2, "can't be read as parquet"),
    "a reward name of 300 characters": (renamed(LONG), 0, ""),
    "a reward named as a path": (renamed("../../evil.x"), 0, ""),
    "a reward without letters": (renamed("/"), 0, ""),
    "numbers of 1e308": (large(LARGE), 1, ""),
    "numbers of 1e-320": (large(1e-320), 0, ""),
    "an infinite weight": (large(float("inf")), 1, ""),
    "golds of odd rows": (
        {"record": {**RECORD, "unscorable_golds": {"count": 3, "total": 4, "rows": [{}, None]}}},
        1, "",
    ),
    "a fault without a time": ({"fault": {"sentence": "no"}}, 2, "has no `time`"),
    "a fault of a completion that is a number": (
        {"fault": {"sentence": "no", "time": 1, "row": {"reward": "x", "row": 0, "prompt": "", "completion": 7}}},
        2, "`row` has no `step`",
    ),
    "passes that are text": (
        {"record": {**RECORD, "config": {"num_iterations": "2"}}},
        2, '`config.num_iterations` is "2", not an integer',
    ),
    "passes of odd numbers": (
        {"state": state(*({**entry, f"passes/{'9' * 5000}/clip_share": 1, "passes//x": 1} for entry in HISTORY))},
        0, "",
    ),
    "a part whose highest pay is text": (
        {"record": {**RECORD, "rewards": [{**REWARDS[0], "parts": [{"name": "x", "highest_pay": "2"}]}]}},
        2, "highest_pay",
    ),
    "a cap that is text": ({"record": {**RECORD, "config": {"max_completion_length": "256"}}}, 2, "not an integer"),
}  # fmt: skip


# A report takes a second, so the quick tests have only some of each exit code.
REPORTED = ("a reward named as a path", "numbers of 1e308", "completions without prompts", "an evaluation of text")
VERBS = [
    pytest.param(name, verb, marks=pytest.mark.slow if verb == "report" and name not in REPORTED else ())
    for name in RUNS
    for verb in ("diagnose", "report")
]


@pytest.mark.parametrize(("name", "verb"), VERBS)
def test_a_malformed_run_gets_a_sentence(
    name: str, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents, code, says = RUNS[name]
    for path, content in run_files("run", **contents).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    expected = {code} if code == 2 else {0, 1} if verb == "diagnose" else {0}
    assert cli.main([verb, str(tmp_path / "run")]) in expected
    output = capsys.readouterr().err
    assert "Traceback" not in output
    if code == 2:
        assert output.startswith("error: ")
        assert says in output
        assert len(output.splitlines()) == 1
        assert len(output) < 600
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # `../../evil.x` leads nowhere else
    pictures = list((tmp_path / "run").glob("report/*.svg"))
    assert all(len(path.name) <= 120 for path in pictures)


def test_charts_with_equal_file_names_are_all_kept(tmp_path: Path) -> None:
    entries = [
        {
            "step": step,
            "kl": 0.1,
            "rewards/a b/mean": 1.0 * step,
            "rewards/a-b/mean": 2.0 * step,
            "rewards/A/b/mean": 3.0 * step,
        }
        for step in (1, 2)
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps(state(*entries)))
    assert cli.main(["report", str(tmp_path)]) == 0
    pictures = sorted(path.name for path in (tmp_path / "report").glob("*.svg"))
    assert pictures == ["reward-a-b-2.svg", "reward-a-b-3.svg", "reward-a-b.svg"]


# Small tables that decode to gigabytes


def repeated(rows: int, size: int, nested: bool) -> pa.Table:
    """Return a table that stores a text once and repeats it in every row."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * size]))
    columns = {"step": pa.array([1] * rows), "prompt": text, "completion": text}
    if nested:
        messages = pa.StructArray.from_arrays([text, text], ["role", "content"])
        columns["completion"] = pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), messages)
    return pa.table(columns)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("rows", "size", "nested"),
    [
        (2000, 1_000_000, True),
        (20_000, 600, False),
        pytest.param(2000, 1_000_000, False, marks=pytest.mark.slow),
        pytest.param(20_000, 600, True, marks=pytest.mark.slow),
    ],
)
def test_a_table_that_decodes_to_gigabytes_is_refused(
    tmp_path: Path,
    rows: int,
    size: int,
    nested: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One batch is too large, or many batches are too large together."""
    if size < 1000:
        monkeypatch.setattr(files, "FILE_BYTES", 10_000_000)
    folder = write_run(tmp_path / "run", completions=healthy_completions())
    bomb = folder / "completions" / "completions_00041.parquet"
    parquet.write_table(repeated(rows, size, nested), bomb, compression="zstd")
    assert bomb.stat().st_size < 1_000_000
    before = pa.default_memory_pool().max_memory()
    for verb in ("diagnose", "report"):
        assert cli.main([verb, str(folder)]) == 2
        output = capsys.readouterr().err
        assert f"{bomb}: it decodes to more than" in output
    assert pa.default_memory_pool().max_memory() - before < files.FILE_BYTES


def test_a_page_that_is_a_gigabyte_of_zeros_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    zeros = pa.table({"step": pa.repeat(1, 11_000_000)})
    parquet.write_table(zeros, path, compression="zstd")
    with pytest.raises(files.RunError, match="decodes to more"):
        list(files.read_batches(path, {"step": files.INTEGERS}))


@pytest.mark.parametrize("nested", [False, True])
def test_a_table_is_read_as_pandas_reads_it(tmp_path: Path, nested: bool) -> None:
    rows = [{**row, "x": None} for row in healthy_completions() * 50]
    table = pd.DataFrame(rows if nested else EVALUATED)
    table.iloc[::3].to_parquet(tmp_path / "table.parquet", row_group_size=7)  # an index with gaps
    columns = dict.fromkeys(table.columns, files.ANYTHING)
    read = files.read_table(tmp_path / "table.parquet", columns)
    expected = pd.read_parquet(tmp_path / "table.parquet")
    assert len(read) == len(expected) > files.BATCH_ROWS * nested // 4
    for name in columns:
        assert list(map(str, read[name])) == list(map(str, expected[name])), name


# The log


def live(folder: Path, *lines: dict[str, Any]) -> Path:
    """Write a `_log.jsonl`."""
    (folder / files.LIVE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("layout", [{}, {"indent": 2}, {"indent": 2, "sort_keys": True}, {"separators": (",", ":")}])
@pytest.mark.parametrize("is_live", [False, True])
def test_a_log_holds_the_numbers_of_its_entries(tmp_path: Path, is_live: bool, layout: dict[str, Any]) -> None:
    nested = {"deep": [{"log_history": [1, "]"]}, '\\" {[,'], "é\u2028": None, "n": -1.5e-7}
    entries = [
        {"step": 1, "a": 1.25, "text": 'x"]}', **nested},
        {"step": 20, "a": 3, "b": True},
        {"step": 3, "a": float("inf")},
    ]
    if is_live:
        live(tmp_path, {"step": 0, "max_steps": 7}, *entries)
    else:
        content = {"epoch": 0.5, "global_step": 20, **nested, "log_history": entries, "max_steps": 7}
        (tmp_path / "trainer_state.json").write_text(json.dumps(content, **layout))
    log = read_log(tmp_path)
    assert {key: (list(steps), list(values)) for key, (steps, values) in log.metrics.items()} == {
        "step": ([1, 20, 3], [1, 20, 3]), "a": ([1, 20], [1.25, 3]), "text": ([], []), "deep": ([], []),
        "é\u2028": ([], []), "n": ([1], [-1.5e-7]), "b": ([], [])}  # fmt: skip
    assert (log.last_step, log.max_steps) == (20, 7)


@pytest.mark.parametrize("layout", [{}, {"indent": 2, "sort_keys": True}])
def test_a_state_that_is_cut_off_is_refused(tmp_path: Path, layout: dict[str, Any]) -> None:
    text = json.dumps({"global_step": 40, "log_history": HISTORY[:3], "max_steps": 7}, **layout)
    for cut in range(1, len(text), 37):
        (tmp_path / "trainer_state.json").write_text(text[:cut])
        with pytest.raises(files.RunError, match="can't be read as JSON"):
            read_log(tmp_path)


@pytest.mark.slow
def test_a_live_log_is_not_kept_as_objects(tmp_path: Path) -> None:
    """Numbers take 16 bytes each, and one line is read at a time. The file itself is far larger than both."""
    import tracemalloc

    entries = [{"step": step, **{f"metric/{number}": step / 3 for number in range(40)}} for step in range(3000)]
    live(tmp_path, *entries)
    size = (tmp_path / files.LIVE).stat().st_size
    del entries
    tracemalloc.start()
    log = read_log(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(log.metrics["metric/7"][1]) == 3000
    assert peak < size
    assert peak < 41 * 3000 * 16 * 1.25 + (4 << 20)


class Stopped(Exception):
    """Raised by a caller that has no more time."""


@pytest.mark.parametrize("is_live", [False, True])
def test_reading_can_be_stopped_at_an_entry(tmp_path: Path, is_live: bool) -> None:
    if is_live:
        live(tmp_path, *HISTORY)
    else:
        (tmp_path / "trainer_state.json").write_text(json.dumps(state(*HISTORY)))
    calls = []

    def tick() -> None:
        calls.append(1)
        if len(calls) == 4:
            raise Stopped

    with pytest.raises(Stopped):
        read_log(tmp_path, tick)
    assert len(calls) == 4


@pytest.mark.parametrize("is_live", [False, True])
def test_a_log_of_many_names_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_live: bool) -> None:
    """Each name has a column, which takes many times the size of an entry."""
    monkeypatch.setattr(runs, "MAX_METRICS", 50)
    for entries in ([{"step": n, f"m{n}": 1.0} for n in range(60)], [{"step": 1, **{f"m{n}": 1.0 for n in range(60)}}]):
        if is_live:
            live(tmp_path, *entries)
        else:
            (tmp_path / "trainer_state.json").write_text(json.dumps(state(*entries)))
        with pytest.raises(files.RunError, match="its entries have more than 50 names"):
            read_log(tmp_path)


def test_a_log_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "STATE_BYTES", 1000)
    (tmp_path / "trainer_state.json").write_text(json.dumps(state({"step": 1, "text": "x" * 5000})))
    with pytest.raises(files.RunError, match=r"trainer_state.json: it has 5,\d+ bytes, and at most 1,000 are read"):
        read_log(tmp_path)
    monkeypatch.setattr(runs, "LINE_BYTES", 1000)
    (tmp_path / "_log.jsonl").write_text('{"step": 1, "text": "' + "x" * 5000)
    with pytest.raises(files.RunError, match="line 1 has more than 1,000 bytes"):
        read_log(tmp_path)
    monkeypatch.setattr(runs, "LOG_BYTES", 1000)
    with pytest.raises(files.RunError, match=r"_log.jsonl: it has 5,\d+ bytes, and at most 1,000 are read"):
        read_log(tmp_path)


def test_the_limits_of_a_log_are_256_mebibytes_2_gibibytes_8_mebibytes_a_line_and_20_000_names(tmp_path: Path) -> None:
    """Files without contents take no room on the disk."""
    for name, limit in (("trainer_state.json", 1 << 28), ("_log.jsonl", 1 << 31)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(limit + 1)
        with pytest.raises(files.RunError) as error:
            read_log(tmp_path)
        fix = "restore or remove the file"
        assert str(error.value) == (
            f"{tmp_path / name}: it has {limit + 1:,} bytes, and at most {limit:,} are read; {fix}"
        )
        (tmp_path / name).unlink()
    (tmp_path / "_log.jsonl").write_bytes(b'{"step": 1}\n' + bytes(1 << 23))
    with pytest.raises(files.RunError) as error:
        read_log(tmp_path)
    assert str(error.value) == f"{tmp_path / '_log.jsonl'}: line 2 has more than {1 << 23:,} bytes; {fix}"
    (tmp_path / "_log.jsonl").write_bytes(b'{"step": 1}\n' + bytes((1 << 23) - 1))
    assert read_log(tmp_path).last_step == 1, "a last line without an end is skipped"
    names = {f"m{number}": None for number in range(19_999)}
    live(tmp_path, {"step": 1, **names}, {"step": 2, **names})
    assert len(read_log(tmp_path).metrics) == 20_000
    live(tmp_path, {"step": 1, **names}, {"step": 2, "another": None})
    assert len(read_log(tmp_path).metrics) == 20_001
    live(tmp_path, {"step": 1, **names}, {"step": 2, "another": None}, {"step": 3})
    with pytest.raises(files.RunError, match="its entries have more than 20,000 names; restore"):
        read_log(tmp_path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"reward": 1.0}', "`line 2` has no `step`"),
        (b"[" * 100_000, "line 2 can't be read as JSON ("),
        (b"{", "line 2 can't be read as JSON (Expecting property name"),
    ],
)
def test_a_damaged_line_of_a_log_is_named(tmp_path: Path, line: bytes, problem: str) -> None:
    (tmp_path / "_log.jsonl").write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(files.RunError) as error:
        read_log(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / '_log.jsonl'}: {problem}")
    assert str(error.value).endswith("; restore or remove the file")


def test_letters_that_are_no_utf_8_do_not_hide_the_numbers_of_a_line(tmp_path: Path) -> None:
    (tmp_path / "_log.jsonl").write_bytes(b'{"step": 3, "note": "\xff", "a": 0.5}\n')
    log = read_log(tmp_path)
    assert list(log.metrics["a"][1]) == [0.5]
    assert (log.last_step, log.max_steps, log.began, log.has_ended) == (3, 0, None, False)


def test_an_empty_log_is_that_of_a_run_that_is_over_unless_it_is_known_to_go_on(tmp_path: Path) -> None:
    live(tmp_path)
    with pytest.raises(files.RunError, match="the run logged nothing$"):
        read_log(tmp_path)
    with pytest.raises(files.RunError, match="the run has logged nothing yet: ask again after its first step$"):
        read_log(tmp_path, is_running=True)


@pytest.mark.parametrize("name", ["_log.jsonl", "trainer_state.json"])
def test_a_disk_that_fails_and_a_folder_in_place_of_a_log_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(files.RunError) as error:
        read_log(tmp_path)
    assert str(error.value) == f"{tmp_path / name}: it is no ordinary file; restore or remove the file"

    class Failing(BytesIO):
        def read(self, *_: Any) -> bytes:
            raise OSError(5, "Input/output error")

        readline = read

    def opened(path: Path, most: int) -> BytesIO:
        if path.name != name:
            raise FileNotFoundError
        return Failing()

    monkeypatch.setattr(runs, "open_ordinary", opened)
    place = "line 1 can't be read as JSON .*" if name == "_log.jsonl" else ""
    with pytest.raises(files.RunError, match=f"{place}Input/output error.*; restore or remove the file"):
        read_log(tmp_path)


def test_the_step_of_a_state_is_read_from_its_head(tmp_path: Path) -> None:
    """A launch that saved nothing is newer than a state if it reached the same step."""
    entries = [{"step": 1, "a": 1.0, "global_step": 3}, {"step": 9, "a": 2.0, "global_step": 3, "log_history": 1}]

    def last(saved: dict[str, Any], logged: int, **began: int) -> float:
        (tmp_path / "trainer_state.json").write_text(json.dumps(saved))
        beginning: list[dict[str, Any]] = [{"max_steps": 40, **began}] if began else []
        live(tmp_path, *beginning, {"step": logged, "a": 3.0})
        return read_log(tmp_path).metrics["a"][1][-1]

    assert last({"global_step": 10, "log_history": entries}, 10) == 3.0
    assert last({"global_step": 10, "log_history": entries}, 9) == 2.0
    # Without a step in the head, that of the last entry counts.
    assert last({"log_history": entries, "global_step": 10}, 9) == 3.0
    assert last({"log_history": entries, "global_step": 10}, 8) == 2.0
    # A state that was saved before a launch began is its beginning, and a later one is from another launch.
    assert last({"global_step": 10, "log_history": entries}, 9, step=10) == 2.0
    assert last({"global_step": 10, "log_history": entries}, 9, step=9) == 3.0
    assert last({"global_step": 10, "log_history": entries}, 9, step=0) == 3.0
