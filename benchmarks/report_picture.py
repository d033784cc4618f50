"""Makes docs/report.png, the README's picture of `megarl report`: the upper half of a real run's page, in a real browser.

    python benchmarks/report_picture.py               trains the quickstart for a few steps first (in fp32, 15 minutes)
    python benchmarks/report_picture.py --run DIR     takes a run that is there

Needs chromium (bash launch/setup.sh --tests). Nothing is measured here, so there is nothing to --check.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from megarl.telemetry import report_charts as charts
from megarl.telemetry.report import PageSection, page, subtitle
from megarl.telemetry.report_findings import answers, find
from megarl.telemetry.report_run import Run, read_run

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "report.png"
STEPS, WIDTH, HEIGHT = 12, 1240, 1290
LARGEST_BYTES = 200_000


def train() -> Path:
    """A run of the quickstart's recipe; its directory."""
    name = f"report-picture-{time.strftime('%Y%m%d-%H%M%S')}"
    keys = [f"run.name={name}", f"run.steps={STEPS}", "trainer.precision=fp32"]
    subprocess.run([sys.executable, "-m", "megarl.cli", "train", "recipes/quickstart.yaml", *keys], check=True, cwd=ROOT)
    return ROOT / "runs" / name


def excerpt(run: Run) -> str:
    """The page's answers and two of its charts."""
    sections = [
        PageSection("Is it learning?", charts.reward(run)),
        PageSection("Where the time goes", charts.ranks_time(run)),
    ]
    return page(run.name, subtitle(run), answers(run, find(run)), sections)


def photograph(html: str, to: Path) -> None:
    """As chromium shows it."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("no chromium: bash launch/setup.sh --tests installs Debian's")
    with tempfile.TemporaryDirectory() as scratch:
        file, shot = Path(scratch) / "page.html", Path(scratch) / "page.png"
        file.write_text(html, encoding="utf-8")
        subprocess.run(
            [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=30000",
             f"--user-data-dir={scratch}/profile", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}", file.as_uri()],
            check=True, capture_output=True, timeout=300,
        )  # fmt: skip
        Image.open(shot).convert("RGB").save(to, optimize=True)
    if to.stat().st_size > LARGEST_BYTES:
        raise SystemExit(f"{to} has {to.stat().st_size} bytes, more than {LARGEST_BYTES}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run directory; without one a run is made")
    run = parser.parse_args().run or train()
    photograph(excerpt(read_run(run)), PICTURE)
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size / 1000:.0f} kB, of {run}")


if __name__ == "__main__":
    main()
