"""The documentation as a site: its links, the page of errors, what fails its build, and search from the file system."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from grpo_recipes import cli

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def load(name: str) -> ModuleType:
    """Import a module of docs/, which is no package."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "docs"))


build_site, error_pages = load("build_site"), load("error_pages")


def test_every_link_of_a_document_leads_somewhere() -> None:
    """And none leaves the site for a file that the site has."""
    pages = build_site.written_pages()
    assert {"index.md", "why.md", "faq.md", "tutorial.md", "results/step.md"} <= set(pages)
    assert f"]({build_site.SOURCE_URL}/recipes/quickstart.yaml)" in pages["tutorial.md"]
    assert "](../efficiency.md" not in pages["index.md"]
    assert "](results/step.md)" in pages["index.md"]
    for place, text in pages.items():
        for path, _ in build_site.LINK.findall(text):
            target = os.path.normpath(Path(place).parent / path)
            assert target in pages or (ROOT / "docs" / target).is_file(), f"{place}: {path}"


@pytest.mark.parametrize("page", build_site.COMMITTED)
def test_a_committed_page_is_current(page: str) -> None:
    """Versions of Python wrap the lines of `--help` differently."""
    committed = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert committed.split() == build_site.COMMITTED[page]().split(), f"renew docs/{page}: make docs"


# The page of errors


REFUSED = (
    "plan quickstart --num_generations 7",
    "plan quickstart --lerning_rate 1e-5",
    "plan quickstart --dataset.eval_share 2",
    "plan quickstart --dataset.name gsm9k",
    "plan quickstart --rewards [gsm8k_correctnes]",
    "plan quickstart --early_stopping_patience 0",
    "plan no-such-recipe",
    "report /no/such/run",
    "compare /no/a /no/b",
)


@pytest.mark.slow
def test_what_a_command_refuses_stands_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    refusals = error_pages.refusals()
    for command in REFUSED:
        with contextlib.suppress(SystemExit):
            assert cli.main(command.split()) == 2
        said = " ".join(capsys.readouterr().err.split())
        found = [one.sentence for one in refusals if one.pattern.search(said)]
        assert any(len(re.findall(r"[a-z]+", sentence)) >= 2 for sentence in found), said
    anchors = error_pages.anchors(refusals)
    page = error_pages.page("https://example.org")
    assert sorted(re.findall(r'<a id="([^"]+)"', page)) == sorted(set(anchors))


@pytest.mark.slow
def test_no_refusal_is_left_out() -> None:
    """An error whose sentence can't be read from the code hands on the words of another one."""
    trees = error_pages.parsed_modules()
    reader = error_pages.reader_of(trees)
    for tree in trees.values():
        list(reader.sentences(tree))
    others = [
        one
        for one in reader.unread
        if not re.search(r"[Ee]rror\((str\(error\)|text|error\.place|place, error\.problem).*\)$", one)
    ]
    assert not others, f"docs/error_pages.py finds no sentence in {others}"


# The site

CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def small_site(folder: Path, pages: dict[str, str], nav: str) -> int:
    folder.mkdir()
    (folder / "mkdocs.yml").write_text(f"{CONFIG.partition('nav:' + chr(10) + '  - Home')[0]}nav: [{nav}]\n")
    return build_site.build(pages, folder)


@pytest.mark.slow
def test_a_link_or_a_page_that_is_missing_fails_the_build(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs mkdocs-material, which the extra `docs` brings")
    right = {"index.md": "# A\n\n## B\n\n[b](#b)"}
    wrong = {
        "anchor": ({"index.md": "# A\n\n## B\n\n[b](#c)"}, "index.md"),
        "link": ({"index.md": "# A\n\n[b](b.md)"}, "index.md"),
        "not in nav": ({"index.md": "# A", "b.md": "# B"}, "index.md"),
        "only in nav": ({"index.md": "# A"}, "index.md, b.md"),
    }
    passing = [name for name, (pages, nav) in wrong.items() if small_site(tmp_path / name, pages, nav) == 0]
    assert small_site(tmp_path / "right", right, "index.md") == 0
    assert not passing


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the whole site on a machine where no proxy answers."""
    pytest.importorskip("material", reason="needs mkdocs-material, which the extra `docs` brings")
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    with pytest.MonkeyPatch.context() as environment:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            environment.setenv(name, "http://127.0.0.1:9")
        assert build_site.build(build_site.pages(), folder) == 0
    return folder / "build" / "site"


@pytest.mark.slow
def test_the_site_is_whole_and_asks_for_nothing(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="([^"]+)"', text)
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|icon|preconnect)"[^>]*href="([^"]+)"', text)
        assert not [address for address in loaded if "//" in address], page
    commands = (site / "commands.html").read_text(encoding="utf-8")
    recipes = ("init", "plan", "train", "evaluate", "compare", "diagnose", "report", "merge", "chat", "export")
    for command in (*recipes, "score", "check"):
        assert re.search(rf'id="grpo-re\w+-{command}"', commands), command
    python = (site / "python.html").read_text(encoding="utf-8")
    for name in ("grpotrainer", "recipe", "run_recipe", "evaluate_model", "gsm8k_correctness"):
        assert f'id="{name}"' in python, name


@pytest.mark.slow
def test_search_works_from_the_file_system(site: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("needs Chromium to search the site: apt-get install chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    address = f"file://{site}/results/step.html?q=ref_model_mixup_alpha"
    shown = subprocess.run([browser, *options, address], capture_output=True, text=True, timeout=120).stdout
    found = re.findall(r'class="md-search-result__item"><a href="([^"#?]+)', shown)
    assert f"file://{site}/references.html" in found
