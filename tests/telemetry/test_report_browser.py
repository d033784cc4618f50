"""Reports in a real browser without a network: every plot is drawn, the console is silent, no script of a run runs."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from megarl.telemetry.report import compare, report
from tests.report_cases import make_run, metrics_of

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium; bash launch/setup.sh --tests installs Debian's")
SHARE = "schedule/actor_update/useful_share"
DESKTOP, PHONE = (1280, 1600), (500, 1600)


def look(page: Path, size: tuple[int, int], scratch: Path) -> tuple[str, list[str], np.ndarray]:
    """The DOM after all scripts ran, what the console said, and a picture [height, width, 3]."""
    from matplotlib.image import imread

    assert CHROMIUM is not None
    picture = scratch / f"{page.stem}-{size[0]}.png"
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--v=0",
         "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=30000", f"--user-data-dir={scratch / 'profile'}",
         f"--window-size={size[0]},{size[1]}", f"--screenshot={picture}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    message = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, message, imread(picture)[:, :, :3]


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("one", DESKTOP), ("two", PHONE), pytest.param("one", PHONE, marks=pytest.mark.nightly),
        pytest.param("two", DESKTOP, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_a_page_is_drawn_in_a_browser(tmp_path, kind, size):
    steps = [metrics_of(step) | {"sync/pack_s": step / 10, SHARE: 0.9 + step / 200} for step in range(1, 13)]
    a, b = (make_run(tmp_path / name, steps) for name in ("a", "b"))
    page = report(a) if kind == "one" else compare(a, b)
    dom, message, picture = look(page, size, tmp_path)
    assert message == []
    body = dom.split("<body", 1)[1]
    plots = re.findall(r'class="plot js-plotly-plot" id="([\w-]+)"', body)
    assert len(plots) >= (6 if kind == "one" else 4)
    assert re.match(rf'[^>]*data-drawn="{len(plots)}"', body)
    small = {"curve-schedule-reward_model-useful_share", "curve-sync-total_s"}
    assert {"reward", "ranks-time", "phase-times", *small} <= set(plots) or kind == "two"
    for plot in plots:  # each with something in it
        drawn = body.split(f'id="{plot}"', 1)[1].split('class="plot ', 1)[0]
        assert re.search(r'<path class="js-line"|<g class="point"><path d="M', drawn), plot
    assert "<h1>" in body and "<title>gone" not in dom  # what completions ask for was not done
    assert picture.shape[1] == size[0] and picture.std() > 0.05
    bands = np.array_split(picture, 8)
    assert sum(band.std() > 0.01 for band in bands) >= 7, "most of the page is blank"
