"""The pages of docs/: at most twelve, one question each; links lead somewhere, examples print what they show."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from pathlib import Path

import pytest

from megarl.recipe.weight_sync_section import WeightSyncSection

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_there_are_at_most_twelve_pages_and_the_readme_is_short() -> None:
    assert len(PAGES) <= 12
    assert len(README.splitlines()) <= 150
    assert [name for name in TEXTS if f"docs/{name}" not in README] == []


@pytest.mark.parametrize("name", TEXTS)
def test_a_page_answers_one_question_and_has_an_example(name: str) -> None:
    title = TEXTS[name].splitlines()[0]
    assert title.startswith("# ") and title.endswith("?")
    assert "```" in TEXTS[name] or "`python benchmarks/" in TEXTS[name]


def test_links_lead_to_files_and_headings() -> None:
    wrong = []
    for folder, texts in ((ROOT, {"README.md": README}), (ROOT / "docs", TEXTS)):
        for name, text in texts.items():
            for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
                path, _, anchor = target.partition("#")
                if "://" in target:
                    continue
                file = folder / path if path else folder / name
                if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
                    wrong.append(f"{name}: {target}")
    assert wrong == []


def test_pages_that_the_tree_names_exist() -> None:
    listed = ["git", "grep", "-ohE", r"docs/[a-z_-]+\.(md|png)", "--", ".", ":!tests/project/test_docs.py"]
    named = set(subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.split())
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_the_makefile_names_test_files_that_exist() -> None:
    command = ["make", "--dry-run", "test-megatron-0.19"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    files = set(re.findall(r"tests/[\w/]+\.py", shown))
    assert len(files) > 15
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []


def test_the_architecture_names_files_that_exist_and_every_room() -> None:
    page = TEXTS["architecture.md"]
    files = set(re.findall(r"`((?:megarl|launch|tests)/[\w/]+\.\w+)`", page))
    assert len(files) > 25
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []
    rooms = {path.parent.name for path in (ROOT / "megarl").glob("*/__init__.py")}
    assert rooms == set(re.findall(r"^\| \d \| `(\w+)/` \|", page, re.MULTILINE))


def test_the_page_on_weight_sync_has_every_key() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", TEXTS["weight-sync.md"], re.MULTILINE)) == set(WeightSyncSection.model_fields)


EXAMPLES = [
    pytest.param(name, code, shown, id=f"{name}-{number}")
    for name, text in TEXTS.items()
    for number, (code, shown) in enumerate(re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", text, re.DOTALL))
]


@pytest.mark.parametrize(("name", "code", "shown"), EXAMPLES)
def test_an_example_prints_what_its_page_shows(name: str, code: str, shown: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"docs/{name}", "exec"), {})
    assert printed.getvalue() == shown
