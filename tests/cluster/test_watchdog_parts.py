"""Parts of the watchdog: a rank's reports, the deadlines of a recipe, and the watching process."""

import re
import threading
import time
from contextlib import suppress

import pytest

from megarl.cluster import watched
from megarl.cluster.watchdog import _Rank
from megarl.cluster.watchdog_judge import Deadlines
from megarl.cluster.watchdog_network import WatcherSettings
from megarl.cluster.watched import Watch, WatcherProcess
from megarl.recipe import RecipeError, load_recipe
from megarl.rollout import EngineSilent
from megarl.telemetry import exit_status
from megarl.telemetry.clock import ClockPlace
from megarl.weight_sync.manifest import SyncError, SyncLate
from tests.recipe_cases import edited, make_folder, write
from tests.sink_cases import wait_for

DEADLINE_S = 60.0


@pytest.fixture
def watch():
    watch = Watch("word", 0, "", 0.1)
    yield watch
    watch.close()


@pytest.fixture
def recipe_with(tmp_path, monkeypatch):
    folder = make_folder(tmp_path, monkeypatch)

    def load(watchdog, **trainer):
        edits = [("watchdog", watchdog), *((f"trainer.{key}", value) for key, value in trainer.items())]
        return load_recipe(write(folder, edited(*edits)))

    return load


def test_deadlines_follow_from_the_deadline_of_a_collective(recipe_with):
    def deadlines(watchdog, **trainer):
        return Deadlines.of(recipe_with(watchdog, collective_timeout_s=600.0, **trainer), 7.0, 8.0)

    assert deadlines({}) == Deadlines(480.0, 300.0, 1800.0, 7.0, 8.0, 5.0, 600.0)
    assert deadlines({"first_step_s": 100.0, "files_s": 5.0}) == Deadlines(100.0, 100.0, 5.0, 7.0, 8.0, 5.0, 600.0)


@pytest.mark.parametrize(
    ("watchdog", "trainer", "key", "rule"),
    [
        ({"step_s": 600.0, "first_step_s": 500.0}, {}, "watchdog.step_s", "below trainer.collective_timeout_s = 600"),
        ({"first_step_s": 700.0}, {}, "watchdog.first_step_s", "below trainer.collective_timeout_s = 600"),
        ({"step_s": 490.0}, {}, "watchdog.step_s", "must not pass watchdog.first_step_s = 480"),
    ],
)
def test_a_deadline_that_another_deadline_makes_useless_is_refused(recipe_with, watchdog, trainer, key, rule):
    with pytest.raises(RecipeError) as refused:
        recipe_with(watchdog, **trainer)
    assert any(item.key == key and rule in item.rule for item in refused.value.violations), refused.value


def test_the_reason_of_a_hang_belongs_to_this_start(tmp_path):
    assert exit_status.hang_reason(tmp_path) is None
    exit_status.record_end(tmp_path, exit_status.HUNG, "rank 1 did not arrive", 1)
    assert exit_status.hang_reason(tmp_path) == "rank 1 did not arrive"
    assert exit_status.hang_reason(tmp_path, exit_status.ended_at(tmp_path)) is None, "the reason is from an earlier start"
    exit_status.record_end(tmp_path, exit_status.FAILED, "rank 1 was killed by SIGKILL", 1, "SIGKILL")
    assert exit_status.hang_reason(tmp_path) == "rank 1 did not arrive"


def test_a_watcher_that_ends_too_early_is_reported(capfd, watch):
    watch.begin(1)
    settings = WatcherSettings("run", 0, 1, (watch.handle,), Deadlines(*[1e6] * 7), "word")
    text = ""

    def says(pattern):
        nonlocal text
        text += capfd.readouterr().err
        return re.search(pattern, text)

    watcher = WatcherProcess(settings)
    watcher._process.kill()
    wait_for(lambda: says("watchdog: its process on node 0 was killed by SIGKILL: nobody watches"))
    watcher = WatcherProcess(settings)
    watcher.may_end = True
    watch._write(ended=True)
    wait_for(lambda: watcher._process.poll() == 0)


def place_of(error):
    return ClockPlace("actor_update", "wait_ranks")


@pytest.mark.parametrize(
    ("error", "noted"),
    [
        (RuntimeError("[unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"), True),
        (SyncLate("take: bucket 0 has nothing from trainer rank 1"), True),
        (EngineSilent("no answer of rollout engine 0"), True),
        (SyncError("wrong bytes"), False),
        (RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:3"), False),
    ],
)
def test_a_rank_reports_a_passed_deadline_to_the_watcher(watch, monkeypatch, error, noted):
    for name in ("END_S", "LOST_S"):
        monkeypatch.setattr(watched, name, 0.0)
    with pytest.raises(type(error)), watch.deadlines(place_of):
        raise error
    standing = _Rank(watch.handle).standing(0.0)
    assert standing.note == (str(error) if noted else "")
    assert not noted or (standing.phase, standing.span) == place_of(error)


def test_a_rank_that_lost_a_peer_waits_for_the_verdict_on_a_hang(watch, monkeypatch):
    monkeypatch.setattr(watched, "LOST_S", DEADLINE_S)
    monkeypatch.setattr(watched, "END_S", 0.0)
    begun, rank = time.monotonic(), _Rank(watch.handle)

    def leave():
        with suppress(RuntimeError), watch.deadlines(place_of):
            raise RuntimeError("Connection closed by peer")

    leaving = threading.Thread(target=leave)
    leaving.start()
    wait_for(lambda: rank.standing(0.0).phase == "actor_update")
    assert leaving.is_alive()
    watch._is_ending.set()  # as at the watcher's order, which would end this process
    leaving.join()
    assert time.monotonic() - begun < DEADLINE_S
