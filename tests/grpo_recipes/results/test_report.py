"""The report as a reader opens it: in a browser, on a desktop and on a phone, with the network watched."""

from __future__ import annotations

import html
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from grpo_recipes import cli
from grpo_recipes.results.run import Run
from tests.grpo_recipes.synthetic import ramp, write_run

SHARE = {"value": 0.4, "low": 0.35, "high": 0.45}
BETTER = {"value": 0.8, "low": 0.75, "high": 0.84}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def evaluation(folder: Path, label: str, share: dict, right: list[bool]) -> None:
    summary = {"problems": len(right), "strict": share, "lenient": share, "settings": {"samples": 1}}
    path = folder / "evaluations" / label
    path.mkdir(parents=True)
    (path / "evaluation.json").write_text(json.dumps(summary))
    prompts = [json.dumps([{"role": "user", "content": f"held-out question {n}"}]) for n in range(len(right))]
    rows = {"problem": range(len(right)), "sample": 0, "prompt": prompts, "gold": "7", "answer": "7", "strict": right}
    rows["lenient"] = right
    rows["completion"] = [f"{label} says {n}" for n in range(len(right))]
    pd.DataFrame(rows).to_parquet(path / "completions.parquet")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "run-a", {"efficiency/tokens_saved": ramp(0.3, 0.4), "kl": ramp(2, 3)})
    evaluation(folder, "before", SHARE, [False, True, False, True])
    evaluation(folder, "after", BETTER, [True, True, True, False])
    return folder


class Page(html.parser.HTMLParser):
    """The elements of a page that load something, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[tuple[str, str]] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.tags.append(tag)
        self.loads += [(tag, value) for key, value in attributes if key in ("src", "href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


def report(*arguments: Path | str, code: int = 0) -> Page:
    assert cli.main(["report", *map(str, arguments)]) == code
    return Page((Path(arguments[0]) / "report" / "report.html").read_text(encoding="utf-8"))


def test_the_page_is_self_contained_and_says_what_happened(run_folder: Path) -> None:
    page = report(run_folder)
    assert all(value.startswith("data:image/png;base64,") for _, value in page.loads)
    assert not {"script", "link", "iframe"} & set(page.tags)
    for words in (
        "KL to the reference reaches 3",
        "0.400 [0.350, 0.450]",
        "2 of 4 problems gained, 1 lost",
        "after says 2",
        "held-out question 3",
        "max_completion_length: 256",
        "question 40.0",
    ):
        assert words in page.text, words
    # Model text is shown, never rendered.
    assert "<answer>0</answer> <b>40</b>" in page.text
    assert "b" not in page.tags
    pngs = {path.name for path in (run_folder / "report").glob("*.png")}
    wanted = {
        "reward-gsm8k-correctness",
        "kl-to-the-reference",
        "entropy",
        "completion-length",
        "clipped-tokens",
        "evaluation",
    }
    wanted |= {
        "groups-without-variance",
        "weights-that-a-step-changes",
        "learning-rate",
        "efficiency--tokens-saved",
        "truncated-completions",
    }
    assert {f"{name}.png" for name in wanted} <= pngs
    assert sum(tag == "img" for tag in page.tags) == len(pngs)


@pytest.mark.slow
def test_two_runs_share_their_pictures(run_folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "run-b", {"kl": None}, seed=1)
    alone = len(list(report(run_folder).loads))
    page = report(run_folder, other)
    assert len(page.loads) == alone
    assert "run-a and run-b" in page.text
    assert "run-b: nothing looks wrong" in page.text
    assert "run-b: 9 of 11 checks had data; not checked: kl_blow_up (`kl` was not logged)" in page.text


def test_a_bare_run_has_a_report(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "loss": 0.0, "reward": None}]}))
    assert "nothing could be checked" in report(folder, code=2).text
    assert cli.main(["report", str(tmp_path / "missing")]) == 2


def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("needs Chromium to open the report: apt-get install chromium")
    return found


def open_page(page: Path, profile: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    command += [
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={profile}",
    ]
    return subprocess.run([*command, *more, page.as_uri()], capture_output=True, text=True, timeout=240)


PROBE = """<script>addEventListener("load", () => {
  const images = [...document.images].map(i => [i.naturalWidth, i.naturalHeight, i.getBoundingClientRect().width]);
  const loaded = performance.getEntriesByType("resource").map(e => e.name).filter(n => !n.startsWith("data:"));
  document.body.innerHTML = "<pre id=probe>" + JSON.stringify(
    {images, loaded, page: document.documentElement.scrollWidth, window: innerWidth}) + "</pre>";
});</script></body>"""


def probed(text: str, tmp_path: Path, width: int) -> dict:
    """What a browser says of a page: the sizes of its images, what it asked the network for, and its width."""
    browser()
    page = tmp_path / "probed.html"
    page.write_text(text.replace("</body>", PROBE), encoding="utf-8")
    more = [f"--window-size={width},900", "--dump-dom", "--virtual-time-budget=5000"]
    done = open_page(page, tmp_path / "profile", *more)
    return json.loads(html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)[1]))


@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_shows_every_picture_and_loads_nothing(run_folder: Path, tmp_path: Path, width: int) -> None:
    """500 pixels is the narrowest window that headless Chromium opens; the layout has one column there, as on a phone."""
    report(run_folder)
    page = run_folder / "report" / "report.html"
    assert page.stat().st_size < 3_000_000
    seen = probed(page.read_text(encoding="utf-8"), tmp_path, width)
    assert len(seen["images"]) >= 12
    assert all(min(image) > 100 for image in seen["images"])
    assert seen["loaded"] == []
    assert seen["page"] <= seen["window"], "the page is wider than the window"


@pytest.mark.slow
def test_a_request_would_be_seen(tmp_path: Path) -> None:
    seen = probed('<html><body><img src="http://127.0.0.1:9/x.png"></body></html>', tmp_path, 500)
    assert seen["loaded"] == ["http://127.0.0.1:9/x.png"]


@pytest.mark.slow
def test_the_screenshot_is_not_blank(run_folder: Path, tmp_path: Path) -> None:
    import matplotlib.image

    browser()
    report(run_folder)
    shot = tmp_path / "shot.png"
    done = open_page(
        run_folder / "report" / "report.html", tmp_path / "profile", f"--screenshot={shot}", "--window-size=1000,3000"
    )
    assert shot.is_file(), done.stderr[-2000:]
    pixels = matplotlib.image.imread(shot)
    assert pixels.shape[:2] == (3000, 1000)
    inked = (pixels[:, :, :3] < 0.9).any(axis=2)
    assert 0.01 < inked.mean() < 0.5
    assert Run.read(run_folder).evaluations["after"]["strict"] == BETTER


@pytest.mark.slow
def test_dollars_in_a_name_are_no_formula(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in (r"a$\frac$b", "of $5 and $6")]
    for folder in folders:
        evaluation(folder, "before $_$", SHARE, [False, True])
        rows = [{"step": 10, "prompt": "one", "completion": "7", "gsm8k_correctness": 2.0}]
        pd.DataFrame(rows).to_parquet(folder / "completions" / "eval_completions_00010.parquet")
    assert r"a$\frac$b" in report(*folders).text
