"""What a report says of a run: its answers and findings for runs made by hand, pages of runs that are half there, and
pages in a real browser."""

import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from megarl.cli import app
from megarl.telemetry.progress import step_line
from megarl.telemetry.report import (
    PageSection,
    better,
    coded,
    compare,
    compare_page,
    differences,
    faster,
    page,
    report,
    run_page,
    show_curve,
)  # fmt: skip
from megarl.telemetry.report_charts import Chart, curves, evaluation, lanes, reward
from megarl.telemetry.report_findings import ADVICE, change, find, learning, time, totals
from megarl.telemetry.report_run import Run, read_run
from tests.report_cases import HOSTILE, RECIPE, make_run, metrics_of, sampled_row

# Metrics of every device, as a run with engines has them.
LISTED: dict = {"idle/device/engines_s": [1.0, 2.0]}


def run_of(lines: list[dict], name: str = "made", **others) -> Run:
    numbered = [{"step": step} | line for step, line in enumerate(lines, 1)]
    return Run(Path(name), name, numbered, RECIPE, **others)


def steady(steps: int = 12, **others) -> Run:
    return run_of([metrics_of(step, **others) for step in range(1, steps + 1)])


def test_a_healthy_run_has_nothing_to_change():
    assert find(steady()) == []
    assert change([]).verdict == "Nothing stands out"


@pytest.mark.parametrize(
    ("metric", "value", "says", "do"),
    [
        ("idle/engines_share", 0.3, "wait 30%", "more `rollout.engines`"),
        ("idle/pipeline_share", 0.2, "wait 20%", "more micro-batches"),
        ("schedule/actor_update/useful_share", 0.5, "50% of the slots of actor_update are padding", "`max_tokens`"),
        ("schedule/actor_update/imbalance", 2.0, "idle 50% of actor_update", "`max_tokens`"),
        ("rollout/truncated_share", 0.9, "90% of the completions", "larger `rollout.max_new_tokens`"),
        ("reward/num_masked", 3, "up to 3 rewards", "timeout_s"),
        ("actor/skipped_updates", 1, "up to 1 updates", "bf16"),
        ("finite/skipped_updates", 2, "up to 2 updates a step were left out", "learning rate"),
        ("actor/kl", 2.0, "2.00 nats", "coefficient"),
        ("mismatch/logprob_mean", 0.2, "disagree by 0.200", "`rollout.precision`"),
        ("staleness/0/logprob_mean", 0.2, "that the same weights sampled", "`rollout.precision`"),
        ("sync/attempts", 2, "took 2 attempts", "`weight_sync.retries`"),
        ("reward/deviation", 0.0, "the same reward", "prompts"),
    ],
)
def test_a_fault_is_found_alone_and_says_what_to_change(metric, value, says, do):
    lines = [metrics_of(step) | {metric: value, "time/weight_sync": 1.4} for step in range(1, 13)]
    (finding,) = [candidate for candidate in find(run_of(lines)) if candidate.metric != "time/weight_sync"]
    assert finding.metric == metric and says in finding.says and do in finding.do


def test_findings_come_worst_first():
    lines = [metrics_of(step) | {"idle/engines_share": 0.3, "idle/pipeline_share": 0.5} for step in range(1, 9)]
    lines[2]["rollout/truncated_share"] = None
    lines = [line | {"actor/skipped_updates": 1} for line in lines]
    findings = [finding.metric for finding in find(run_of(lines))]
    assert findings == ["rollout/truncated_share", "actor/skipped_updates", "idle/pipeline_share", "idle/engines_share"]


def test_a_metric_that_was_nan_is_named_with_its_step():
    lines = [metrics_of(step) for step in range(1, 9)]
    lines[4]["actor/loss"] = None
    (finding,) = find(run_of(lines))
    assert finding.kind == "fault" and finding.says == "actor/loss was NaN or infinite in 1 steps, first in step 5"


def test_a_slow_sync_names_its_longest_part():
    slow = {"time/weight_sync": 6.0, "time/actor_update": 1.0, "sync/pause_s": 5.0}
    run = run_of([metrics_of(step) | slow for step in range(1, 9)])
    (finding,) = find(run)
    assert "60% of a step, and pause is its longest part" in finding.says and "in_flight" in finding.do
    answer = time(run)
    assert answer.verdict == "60% in weight_sync"


@pytest.mark.parametrize(("ranks", "says"), [([1] * 8, "for rank 1"), ([0, 1, 2, 3] * 2, "each time another one")])
def test_a_straggler_is_one_rank_or_uneven_work(ranks, says):
    lines = [metrics_of(step) | {"idle/straggler_rank": rank, "idle/straggler_s": 2.0} for step, rank in enumerate(ranks, 1)]
    (finding,) = find(run_of(lines))
    assert says in finding.says and "stages" not in finding.do
    deep = RECIPE | {"actor": {"layout": {"pipeline": 2}}}
    (finding,) = find(replace(run_of(lines), recipe=deep))
    assert ("fewer layers for its pipeline stage" in finding.do) == (ranks[0] == ranks[1])


def test_starts_are_told():
    (finding,) = find(run_of([metrics_of(1)], starts=["started 2 times; the starts before ended so:", "  1 x failed: x"]))
    assert finding.kind == "fault" and "started 2 times" in finding.says


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ([0.1, 0.2, 0.3], "Too early"),
        ([0.1 + 0.05 * step for step in range(12)], "Yes"),
        ([0.9 - 0.05 * step for step in range(12)], "No: it gets worse"),
        ([0.5, 0.6, 0.4, 0.5, 0.6, 0.4] * 3, "Not so far"),
        ([0.5] * 12, "Not so far"),
        ([0.1] * 10 + [0.9] * 10 + [0.3] * 10, "It did, and fell back"),
    ],
)
def test_whether_a_run_learns(rewards, verdict):
    assert learning(run_of([{"reward/mean": reward} for reward in rewards]), []).verdict == verdict


def test_under_dynamic_sampling_the_reward_is_that_of_all_that_was_sampled(tmp_path):
    """The groups that are trained on have a mean of a half in every step: the policy learns all the same. In each place that
    shows a reward or judges by it."""
    rises = [0.1 + 0.05 * step for step in range(12)]
    run = run_of(
        [metrics_of(step) | {"reward/mean": 0.5, "reward/sampled_mean": mean} for step, mean in enumerate(rises, 1)]
    )
    flat = run_of([metrics_of(step) | {"reward/mean": 0.5} for step in range(1, 13)], "flat")
    assert learning(run, []).verdict == "Yes" and learning(flat, []).verdict == "Not so far"
    assert reward(run)[0].data[0]["y"] == pytest.approx(rises)
    assert better(run, flat, ("made", "flat")).says[0].startswith("After 12 steps: 0.62")  # the last two: 0.6 and 0.65
    shown = io.StringIO()
    directory = make_run(
        tmp_path / "run", [{key: value for key, value in line.items() if key != "step"} for line in run.steps]
    )
    show_curve(read_run(directory), Console(file=shown))
    assert "first 3 steps 0.150, last 3 steps 0.600" in shown.getvalue()
    assert "reward 0.650" in step_line(12, 12, run.steps[-1])


def test_the_time_answer_names_the_longest_phase_and_the_wait():
    answer = time(steady())
    assert answer.verdict == "60% in actor_update"
    assert answer.says[:2] == [
        "A step takes 10.0 s: actor_update 60%, rollout 20%, weight_sync 10%.",
        "Ranks wait 10% of their time, most of it for rollout engines (8%).",
    ]
    assert answer.says[2] == "100 tokens a second."
    fast = {"tokens/per_s": 90.0, "mfu/actor_update": 0.41}
    assert time(run_of([metrics_of(1) | fast])).says[2] == "90 tokens a second. MFU of actor_update: 41%."


def ahead(lines: list[dict]) -> Run:
    """A run that samples ahead of its trainer."""
    recipe = RECIPE | {"rollout": {"engines": 1, "max_staleness": 2}, "algorithm": {"mismatch": {"correction": "truncate"}}}
    return replace(run_of(lines), recipe=recipe)


@pytest.mark.parametrize(
    ("staleness", "trainer", "engines", "says"),
    [
        (0, 0.4, 0.5, "Engines and trainer take turns"),
        (2, 0.4, 0.95, "The trainer starves: the trainer waits 40% of its time"),
        (2, 0.02, 0.5, "The engines starve"),
        (2, 0.02, 0.95, "Neither engines nor trainer starve"),
    ],
)
def test_the_lanes_say_who_starves(staleness, trainer, engines, says):
    waits = {"idle/engines_share": trainer, "idle/share": trainer, "idle/engines/busy_share": engines}
    lines = [metrics_of(step) | waits for step in range(1, 9)]
    run = ahead(lines) if staleness else run_of(lines)
    (chart,) = lanes(run)
    assert chart.note.startswith(says) and any(sentence.startswith(says) for sentence in time(run).says) == (staleness > 0)
    assert chart.data[0]["y"] == ["trainer", "engines"]
    assert chart.data[0]["z"] == [[pytest.approx(100 * (1 - trainer))] * 8, [pytest.approx(100 * engines)] * 8]
    assert lanes(run_of([{"reward/mean": 0.5}])) == []


@pytest.mark.parametrize(
    ("share", "findings"),
    [(0.3, [("learning", "the weights of the correction leave 30% of the samples in effect")]), (0.9, [])],
)
def test_stale_tokens_whose_weights_leave_few_samples_are_a_warning(share, findings):
    """What the policy has learned between sampling and training adds to `mismatch/logprob_mean`, which is then no fault."""
    stale = {"mismatch/effective_sample_share": share, "mismatch/logprob_mean": 0.3, "staleness/0/logprob_mean": 0.01}
    lines = [metrics_of(step) | stale for step in range(1, 9)]
    assert [(finding.kind, finding.says) for finding in find(ahead(lines))] == findings


def advice_table() -> str:
    """The table of docs/reading-a-run.md without the idle shares, which have another table there."""
    rows = ["| metric | warns | what to do |", "| --- | --- | --- |"]
    for advice in ADVICE:
        if not advice.metric.startswith("idle/"):
            unit = {"useful_share": " padding", "imbalance": " lost to it"}.get(advice.metric.rsplit("/", 1)[-1], "")
            side = "below" if advice.below else "above"
            warns = f"{side} {format(advice.limit, advice.form)}{unit}" + (", in any step" if advice.any_step else "")
            rows.append(f"| `{advice.metric}` | {warns} | {advice.do} |")
    return "\n".join(rows)


def test_the_docs_say_what_the_report_says():
    page = (Path(__file__).parents[2] / "docs" / "reading-a-run.md").read_text()
    assert advice_table() in page
    lines = page.splitlines()
    idle = [advice for advice in ADVICE if advice.metric.startswith("idle/")]
    missing = [advice for advice in idle if not any(f"`{advice.metric}`" in line and advice.do in line for line in lines)]
    assert missing == []


def test_curves_of_two_runs_that_are_equal_are_both_drawn():
    run = steady()
    charts = curves(("A", run), ("B", run))
    assert charts and all([data["name"] for data in chart.data] == ["A", "B"] for chart in charts)


def test_two_runs_are_compared_after_equal_steps_samples_and_time():
    """The second has steps of half the time and the same rewards: better only by the clock."""
    half = {"time/step": 5.0, "time/actor_update": 1.0, "tokens/per_s": 200.0}
    a, b = steady(20), run_of([metrics_of(step) | half for step in range(1, 21)], "half")
    answer = better(a, b, ("made", "half"))
    assert answer.verdict == "half"
    assert answer.says[0].startswith("After 20 steps: ") and "within the noise" in answer.says[0]
    quick = faster(a, b, ("made", "half"))
    assert quick.verdict == "half, 2.00 ×" and "actor_update: 6.0 s against 1.0 s" in quick.says[1]
    assert faster(a, a, ("a", "b")).verdict == "Both alike"


def test_a_runs_totals_count_every_start_and_end_with_where_the_time_went():
    lines = [metrics_of(step) | {"run/start_s": start_s} for step, start_s in enumerate((3.0, 5.0, None), 1)]
    first, *rest = totals(run_of([*lines, {"reward/mean": 1.0}]))  # a line without time/step does not count
    assert first == "3 steps in 30.0 s, and 8.0 s to start; 100 useful tokens a second, 360,000 an hour"
    assert rest == time(run_of([*lines, {"reward/mean": 1.0}])).says
    assert totals(run_of([{"reward/mean": 1.0}])) == []


def test_recipes_differ_by_dotted_key():
    other = json.loads(json.dumps(RECIPE))
    other["run"]["name"], other["rollout"]["engines"], other["actor"] = "other", 2, {"lr": 1}
    assert differences(RECIPE, other) == [("rollout.engines", 1, 2), ("actor.lr", "–", 1)]
    assert differences(RECIPE, RECIPE) == []
    text = compare_page(steady(), replace(steady(), recipe=other))
    assert "What did I change?" in text and "2 keys" in text and "<code>rollout.engines</code>" in text


def test_no_text_of_a_run_becomes_part_of_the_page_and_the_page_needs_no_network(tmp_path):
    html = run_page(read_run(make_run(tmp_path / "<b>bold", [metrics_of(1)])))
    local = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL).split('<script type="application/json"')[0]
    assert "<script" not in local and "<img" not in local and "<b>bold" not in html and "&lt;script&gt;" in local
    assert not re.search(r"""<[^>]*(src|href)\s*=|url\(|@import|https?:""", local) and "default-src 'none'" in local
    assert coded("a `b` <i>") == "a <code>b</code> &lt;i&gt;"
    chart = Chart("c", "t", [{"name": "</script><script>alert(1)</script>"}])
    html = page("t", "s", [], [PageSection("h", [chart])])
    assert html.count("</script>") == 3 and "alert(1)<" not in html


def test_samples_show_the_best_and_the_worst_of_the_last_step(tmp_path):
    run = read_run(make_run(tmp_path / "run", [metrics_of(1)]))
    assert len(run.samples) == 9  # and not the line that a kill has cut
    html = run_page(run)
    shown = re.findall(r"<summary>step 1, rollout \d of group 1: reward ([\d.]*)", html)
    assert shown == ["0.8", "0.7", "0.6", "0.2", "0.1", "0"]


CONVERSATION = """\
step 2, rollout 4 of group 1: reward 0.75 (environment 0.75), advantage -0.5
  segment 1 of 2: 4 prompt tokens, 9 after them, ended by stop
    prompt
      [bold]1+1=
    policy (3 tokens, weight version 3, reward 0.5)
      see
    observed (2 tokens)
      ok
    policy (3 tokens, weight version 3 to 5, reward 0.25)
      <b>
  segment 2 of 2: 4 prompt tokens, 9 after them, ended by length
    prompt
      [bold]1+1=
    policy (3 tokens, weight version 3, reward 0)
      [2]

"""


def test_a_rollout_is_shown_as_a_conversation_in_the_terminal_and_in_the_report(tmp_path):
    run = make_run(tmp_path / "run", [metrics_of(1), metrics_of(2)])
    assert CliRunner().invoke(app, ["samples", str(run), "--step", "7"]).output.startswith("error: --step = 7: steps 2 to 2")
    masked: dict[str, Any] = {"valid": False, "reward": None, "reason": "no service", "turn_rewards": []}
    rows = [
        sampled_row(4, ["see", "ok", "<b>"]),
        sampled_row(4, ["[2]"], finish_reason="length"),
        sampled_row(5, [HOSTILE], **masked),
    ]
    (run / "samples" / "step-000002.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = CliRunner().invoke(app, ["samples", str(run), "--rollout", "4"]).output
    assert shown == CONVERSATION
    everything = CliRunner().invoke(app, ["samples", str(run)]).output
    assert shown in everything and "rollout 5 of group 1: masked: no service" in everything
    html = run_page(read_run(run))
    assert "rollout 4 of group 1: reward 0.75" in html and "&lt;b&gt;" in html and HOSTILE not in html
    other = CliRunner().invoke(app, ["samples", str(run), "--rollout", "1"])
    assert other.exit_code and other.output == "error: --rollout = 1: the step kept 4, 5\n"
    empty = CliRunner().invoke(app, ["samples", str(tmp_path)])
    assert empty.exit_code and "telemetry.samples_per_step" in empty.output


@pytest.mark.parametrize(
    "lines", [[{"reward/mean": 0.5}], [metrics_of(1) | LISTED], [metrics_of(n) | {"reward/mean": None} for n in (1, 2)]]
)
def test_a_page_of_what_little_there_is(tmp_path, lines):
    """One step, no recipe, no samples; no metric but the reward, or the reward always NaN."""
    run = make_run(tmp_path / "run", lines, recipe=None, sampled=False)
    html = run_page(read_run(run))
    assert "Too early" in html
    compare(run, run, tmp_path / "both.html", Console(file=io.StringIO()))


def test_a_run_that_has_made_no_step_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2 and "has no step yet" in result.output
    (tmp_path / "metrics.jsonl").unlink()
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2 and "metrics.jsonl is no file" in result.output
    result = CliRunner().invoke(app, ["report", str(tmp_path), str(tmp_path / "none")])
    assert result.exit_code == 2 and "OTHER_DIR" in result.output


def test_what_a_run_is_worth_on_held_out_prompts_begins_before_its_first_step(tmp_path):
    directory = make_run(tmp_path / "run", [metrics_of(step) for step in range(1, 5)])
    assert evaluation(read_run(directory)) == []
    lines = [
        {"step": step, "evaluation/mean": mean, "evaluation/mean_error": error, "evaluation/num_prompts": 9}
        for step, mean, error in ((0, 0.1, 0.05), (4, 0.6, None))
    ]
    (directory / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (chart,) = evaluation(read_run(directory))
    (curve,) = chart.data
    assert (curve["name"], curve["x"], curve["y"]) == ("mean", [0, 4], [0.1, 0.6])
    assert curve["error_y"]["array"] == [0.05, 0.0]
    assert "Held-out prompts" in run_page(read_run(directory))


def test_a_report_shows_the_curve_and_writes_a_page_unless_plotly_is_missing(tmp_path, monkeypatch):
    lines = [{"reward/mean": 0.1 * step, "time/step": 2.0, "time/rollout": 0.5} for step in range(1, 9)]
    run = make_run(tmp_path / "run", lines, sampled=False)
    output = io.StringIO()
    path = report(run, console=Console(file=output, width=100))
    text = output.getvalue()
    assert "first 3 steps 0.200, last 3 steps 0.700, change +0.500" in text and "█" in text
    assert "8 steps in 16.0 s" in text and "rollout 25%" in text
    assert path == run / "report.html" and path.is_file()
    path.unlink()
    monkeypatch.setitem(sys.modules, "plotly", None)
    shown = io.StringIO()
    with pytest.raises(ValueError, match="plotly, which is not installed"):
        report(run, console=Console(file=shown))
    assert "█" in shown.getvalue() and not path.exists()


def test_a_report_says_how_weights_travel_and_why(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [metrics_of(1) | {"sync/mapped": 1.0}])
    assert "Transport:" not in run_page(read_run(run)), "a run of engines that are replayed"
    (run / "weight_sync.txt").write_text("mapped, because trainer ranks and engines share one host")
    assert "Transport: mapped, because trainer ranks and engines share one host." in run_page(read_run(run))
    fallen_back = replace(read_run(run), steps=[metrics_of(1) | {"step": 1, "sync/mapped": 0.0}])
    assert "Transport: group, because shared memory was too small" in run_page(fallen_back)


CHROMIUM = shutil.which("chromium")
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


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium; bash launch/setup.sh --tests installs Debian's")
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("one", DESKTOP), ("two", PHONE), pytest.param("one", PHONE, marks=pytest.mark.nightly),
        pytest.param("two", DESKTOP, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_a_page_is_drawn_in_a_browser(tmp_path, kind, size):
    """Without a network: every plot is drawn, the console is silent, no script of a run runs."""
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
