"""Page with all completions of a run, filtered and searched in a browser, from a file and without a server."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.reports import completions_page, report
from grpo_recipes.reports.report import write_report
from grpo_recipes.reports.run import Run
from tests.support.browser import CONTRAST, OUTSIDE, Browser, Tab
from tests.support.synthetic import healthy_completions, tool_completions, write_run

EVIL = "</script><script>document.title = 1</script><img src=x onerror=document.title=1>\x1b[2J\u202e"


def judged() -> list[dict[str, Any]]:
    """Return the healthy completions with golds and verdicts."""
    rows = healthy_completions()
    for row in rows:
        row |= {"gold": "0", "verdict": "exact" if row["gsm8k_correctness"] else "wrong"}
    return rows


def written(folder: Path, **replaced: Any) -> Path:
    """Write a run and its report, and return the page with the completions."""
    run = write_run(folder / "run", **replaced)
    write_report([Run.read(run)], run / "report")
    return run / "report" / "completions.html"


def data(page: Path) -> tuple[dict[str, Any], list[str], list[list[Any]]]:
    """Return the names, prompts and completions that a page holds."""
    packed = re.search('id="data">([A-Za-z0-9+/=]*)</script>', page.read_text(encoding="utf-8"))
    assert packed is not None
    names, *items = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return names, [one for one in items if isinstance(one, str)], [one for one in items if isinstance(one, list)]


def test_the_page_holds_every_completion(tmp_path: Path) -> None:
    page = written(tmp_path, completions=judged())
    names, prompts, rows = data(page)
    assert names == {"rewards": ["gsm8k_correctness", "tag_presence"]}
    assert prompts == [f"question {step}.{prompt}" for step in (10, 20, 30, 40) for prompt in range(2)]
    assert len(rows) == 32
    # Step, prompt, text, gold, verdict, advantage, total, rewards.
    assert rows[0] == [10, 0, "<answer>0</answer> <b>10</b>", "0", "exact", 1.5, 2.8, 2.0, 0.8]
    assert rows[-1] == [40, 7, "<answer>3</answer> <b>40</b>", "0", "wrong", -0.5, 0.8, 0.0, 0.8]
    report = (page.parent / "report.html").read_text()
    assert '<a href="completions.html">' in report
    assert "4 of 4" in report


def test_a_page_that_would_be_too_large_keeps_some_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A step has 8 completions of 28 characters, each after a prompt of 13.
    monkeypatch.setattr(completions_page, "LIMIT", 2 * 8 * (28 + 13))
    page = written(tmp_path, completions=judged())
    _, _, rows = data(page)
    assert sorted({row[0] for row in rows}) == [20, 40]
    assert "2 of 4" in page.read_text()


def test_a_run_without_completions_has_no_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for path in (run / "completions").iterdir():
        path.unlink()
    write_report([Run.read(run)], run / "report")
    assert not (run / "report" / "completions.html").exists()
    assert "completions.html" not in (run / "report" / "report.html").read_text()


def test_each_of_several_runs_has_a_page(tmp_path: Path) -> None:
    runs = [Run.read(write_run(tmp_path / name, completions=judged())) for name in ("a", "b")]
    report = write_report(runs, tmp_path / "report")
    assert re.findall(r'href="(completions[^"]*)"', report.read_text()) == ["completions.html", "completions-2.html"]
    assert "Completions of the run <strong>b</strong>" in (tmp_path / "report" / "completions-2.html").read_text()


def evil(place: int) -> dict[str, Any]:
    row = judged()[place]
    texts = dict.fromkeys(("prompt", "completion", "gold", "verdict"), f"{EVIL}{place}")
    return {**row, **texts, EVIL: 1.0}


def evil_page(folder: Path) -> Path:
    rewards = [{"name": EVIL, "source": "x", "weight": 1.0, "kind": "other"}]
    return written(folder, completions=[evil(place) for place in range(32)], rewards=rewards)


def test_no_text_of_a_run_is_in_the_page_but_as_data(tmp_path: Path) -> None:
    page = evil_page(tmp_path)
    text = page.read_text()
    assert "document.title" not in text
    assert "default-src 'none'; style-src 'sha256-" in html.unescape(text)
    names, prompts, rows = data(page)
    for shown in (names["rewards"][0], prompts[0], *rows[0][2:5]):
        assert shown.startswith("</script><script>document.title")
        assert shown.isprintable()


def test_a_transcript_is_a_list_of_its_parts(tmp_path: Path) -> None:
    rows = tool_completions(lambda step, member: member % 2)
    for row in rows[1::2]:
        row["completion"][1] |= {"name": EVIL, "content": EVIL + "r" * 5000}
    _, _, shown = data(written(tmp_path, completions=rows))
    assert shown[0][2] == "<answer>0</answer> <b>10</b>", "a plain answer stays a text"
    kinds, labels, texts = zip(*shown[1][2], strict=True)
    assert kinds == ("text", "call", "result", "text")
    assert labels[:2] == ("Turn 1", "Turn 1 calls add")
    assert texts[:2] == ("I add.", '{"a": 1, "b": 0}')
    assert all(part.isprintable() for part in labels)
    assert texts[3] == "<answer>1</answer> <b>10</b>"


# In a browser


# Resolves once the page has shown what it read, or the reason why it can't.
READ = """new Promise(resolve => {
  const count = document.getElementById("count");
  const ask = () => count.textContent.startsWith("Reading") ? setTimeout(ask, 20) : resolve(count.textContent);
  ask();
})"""
SHOWN = "[...document.querySelectorAll('.card')].map(card => card.querySelector('.completion').textContent)"


def filtered(tab: Tab, **values: str) -> list[str]:
    """Set some filters and clear the others, and return the texts of the completions that are shown."""
    for name in ("search", "verdict", "reward", "reward-from", "reward-to", "step-from", "step-to", "order"):
        standard = {"reward": "6", "order": "step"}.get(name, "")
        value = values.get(name.replace("-", "_"), standard)
        tab.evaluate(f"document.getElementById('{name}').value = {json.dumps(value)}; 0")
    tab.evaluate("filter(); 0")
    return tab.evaluate(SHOWN)


@pytest.mark.slow
def test_completions_are_filtered_and_searched(tmp_path: Path, browser: Browser) -> None:
    page = written(tmp_path, completions=judged())
    tab = browser.open(page)
    assert tab.evaluate(READ) == "32 of 32 completions, 1 to 24 shown"
    assert tab.requests == [page.as_uri()], "nothing is loaded"
    assert len(filtered(tab)) == 24
    right = [f"<answer>0</answer> <b>{step}</b>" for step in (10, 10, 20, 20, 30, 30, 40, 40)]
    assert filtered(tab, verdict="exact") == right
    assert filtered(tab, reward="7", reward_from="1") == right, "gsm8k_correctness"
    wrong = [f"<answer>{member}</answer> <b>40</b>" for member in (1, 2, 3)] * 2
    assert filtered(tab, reward_to="1", step_from="40", step_to="40") == wrong
    assert filtered(tab, search="ANSWER>2", step_to="10") == ["<answer>2</answer> <b>10</b>"] * 2
    assert len(filtered(tab, search="question 30.1")) == 4
    assert filtered(tab, order="highest")[:8] == right
    assert filtered(tab, order="lowest")[0] == "<answer>1</answer> <b>10</b>"
    assert filtered(tab, search="nothing like it") == []
    filtered(tab)
    tab.evaluate("document.getElementById('next').click()")
    assert tab.evaluate("document.getElementById('count').textContent") == "32 of 32 completions, 25 to 32 shown"


@pytest.mark.slow
def test_texts_of_a_run_do_not_run_in_the_browser(tmp_path: Path, browser: Browser) -> None:
    page = evil_page(tmp_path)
    tab = browser.open(page)
    assert tab.evaluate(READ).startswith("32 of 32 completions")
    assert tab.evaluate("document.title") == "Completions of run"
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert "onerror=document.title" in tab.evaluate(SHOWN)[0]
    script = "const s = document.createElement('script'); s.textContent = 'document.title = 2'; document.body.append(s)"
    assert tab.evaluate(f"{{ {script} }} document.title") == "Completions of run", "the policy allows one script"
    assert tab.requests == [page.as_uri()]
    rows = tool_completions()
    rows[1]["completion"][1] |= {"content": EVIL}
    tab = browser.open(written(tmp_path / "tools", completions=rows))
    tab.evaluate(READ)
    parts = "[...document.querySelectorAll('.card')[1].querySelectorAll('.said')].map(part => part.className)"
    assert tab.evaluate(parts) == ["said text", "said call", "said result", "said text"]
    assert tab.evaluate("document.querySelectorAll('.card img').length") == 0
    assert len(filtered(tab, search='"b": 1', step_to="20")) == 4, "the second call of two"
    assert filtered(tab, order="longest")[0] == "I add."


@pytest.mark.slow
def test_the_page_fits_its_screen_and_can_be_read(tmp_path: Path, browser: Browser) -> None:
    rows = [{**row, "completion": "<think>" + "w" * 900 + "</think>\n" + "word " * 900} for row in judged()]
    page = written(tmp_path, completions=rows)
    for width, is_dark in ((390, True), (1280, False)):
        tab = browser.open(page, width=width, dark=is_dark)
        tab.evaluate(READ)
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert tab.evaluate(OUTSIDE) == []
        ratio, text = tab.evaluate(CONTRAST)
        assert ratio >= 4.5, text


def alone(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write the page with these completions without its report."""
    run = Run.read(write_run(folder / "run", completions=rows))
    completions_page.write_completions_page(run, folder, "page.html", report.environment(), "")
    return folder / "page.html"


def test_a_prompt_is_written_once_before_the_first_of_its_completions(tmp_path: Path) -> None:
    rows = judged()
    for row in rows:
        row["prompt"] = [{"role": "user", "content": "the same" if row["step"] != 20 else "another"}]
    _, prompts, shown = data(alone(tmp_path, rows))
    assert prompts == ["the same", "another"]
    assert [row[1] for row in shown] == [0] * 8 + [1] * 8 + [0] * 16


def test_a_reward_that_no_completion_has_is_not_on_the_page(tmp_path: Path) -> None:
    rows = [{key: value for key, value in row.items() if key != "tag_presence"} for row in judged()]
    rows[0] |= {"advantage": float("nan"), "gold": None}
    names, _, shown = data(alone(tmp_path, rows))
    assert names["rewards"] == ["gsm8k_correctness"]
    assert shown[0][3:] == ["", "exact", None, 2.0, 2.0]
