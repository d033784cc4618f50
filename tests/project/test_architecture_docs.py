"""docs/architecture.md names files and rooms that exist, and all rooms."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_of_the_page_exists() -> None:
    files = set(re.findall(r"`((?:megarl|launch|tests)/[\w/]+\.\w+)`", PAGE))
    assert len(files) > 25
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []


def test_the_page_has_every_room() -> None:
    rooms = {path.parent.name for path in (ROOT / "megarl").glob("*/__init__.py")}
    assert rooms == set(re.findall(r"^\| \d \| `(\w+)/` \|", PAGE, re.M))
