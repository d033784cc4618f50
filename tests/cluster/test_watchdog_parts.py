"""Parts of the watchdog: pages of beats, stacks of other processes, deadlines of a recipe, watchers of several nodes."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from typing import cast

import pytest

from megarl.cluster import watched
from megarl.cluster.agent_verdict import judge as judge_ends
from megarl.cluster.beats import Beats, BeatsReader
from megarl.cluster.watchdog_judge import Deadlines, OtherProcess, Standing, Verdict
from megarl.cluster.watchdog_limits import Limits
from megarl.cluster.watchdog_settings import ENDING, WatchedRank, WatcherSettings
from megarl.cluster.watched import MOST_WATCHERS, Watch, WatcherProcess
from megarl.cluster.watcher import Watcher
from megarl.cluster.watcher_wire import OtherWatchers
from megarl.recipe import RecipeError, load_recipe
from megarl.rollout.failure import EngineSilent
from megarl.telemetry import PhaseClock, starts
from megarl.telemetry.exit_status import FAILED, HUNG
from megarl.telemetry.stacks import MARK, busy_call, marked_processes, read_stacks, threads, watched_environment
from megarl.weight_sync.manifest import SyncError, SyncLate
from tests.recipe_cases import edited, make_folder, write

DEADLINE_S = 60.0
SLEEPER = """
import os, sys, threading, time
from megarl.telemetry.stacks import mark_from_environment
mark_from_environment()
def rest():
    threading.Event().wait()
threading.Thread(target=rest, daemon=True).start()
def nap():
    os.write(1, b"ready\\n")
    time.sleep(600)
if "fork" in sys.argv and not os.fork():
    def doze():
        nap()
    doze()
nap()
"""


def test_another_process_reads_where_a_clock_stands():
    beats = Beats()
    reader = BeatsReader(os.getpid(), beats.file)
    clock = PhaseClock(beat=beats.beat)
    beats.begin(4, first=False)
    assert (reader.read().step, reader.read().first, reader.read().phase, reader.read().phases) == (4, False, None, 0)
    with clock.phase("actor_update"):
        assert (reader.read().phase, reader.read().span, reader.read().beats) == ("actor_update", None, 1)
        with clock.span("forward"):
            assert (reader.read().phase, reader.read().span) == ("actor_update", "forward")
        before = reader.read()
        assert (before.span, before.beats, before.phases) == (None, 3, 1)
    with pytest.raises(RuntimeError), clock.phase("weight_sync"), clock.span("send"):
        raise RuntimeError
    assert (reader.read().phase, reader.read().phases) == (None, 2)
    assert reader.read().since >= before.since
    beats.note("no answer of rollout engine 0 " * 200)
    assert reader.read().note.startswith("no answer of rollout engine 0")
    beats.end()
    beats.close()
    assert reader.read().ended, "what a process wrote last stays readable"


@pytest.fixture
def sleeper():
    environment = os.environ | {MARK: f"{os.getpid():x}/engine-0"}
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_marked_process_is_found_and_says_where_each_thread_is(sleeper):
    found = marked_processes(f"{os.getpid():x}")
    assert {pid: name for pid, (name, _) in found.items()} == {sleeper.pid: "engine-0"}
    text = ""

    def rests():
        nonlocal text
        (text,) = read_stacks({sleeper.pid: found[sleeper.pid][1]}, DEADLINE_S).values()
        frames = threads(text)
        return len(frames) == 2 and bool(frames[0]) and frames[0][0].waits

    _poll(rests)  # on a busy machine its thread may not have come so far
    resting, main = threads(text)
    assert resting[0].file.endswith("threading.py") and resting[0].waits
    assert main[0].function == "nap" and not main[0].waits
    busy = busy_call(text)
    assert busy is not None and busy.function == "nap"


def test_a_stopped_process_says_nothing_and_an_unmarked_one_is_not_harmed(sleeper):
    number = marked_processes(f"{os.getpid():x}")[sleeper.pid][1]
    deaf = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    sleeper.send_signal(signal.SIGSTOP)
    assert read_stacks({sleeper.pid: number, deaf.pid: 0}, 0.5) == {}
    deaf.communicate(b"\n")
    assert deaf.returncode == 0


def test_a_forked_process_is_one_more_with_a_stack_of_its_own():
    environment = os.environ | {MARK: f"{os.getpid():x}f/engine-0"}
    command = [sys.executable, "-c", SLEEPER, "fork"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        found = marked_processes(f"{os.getpid():x}f")
        texts = read_stacks({pid: number for pid, (_, number) in found.items()}, DEADLINE_S)
        assert len(texts) == 2
        assert {pid for pid, text in texts.items() if "in doze" in text} == texts.keys() - {process.pid}
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_child_has_its_name_from_the_environment_of_a_watched_run():
    assert watched_environment("engine-1", {MARK: "ab12/child of rank 0"}) == {MARK: "ab12/engine-1"}
    assert watched_environment("engine-1", {}) == {}


@pytest.fixture
def recipe_with(tmp_path, monkeypatch):
    folder = make_folder(tmp_path, monkeypatch)

    def load(watchdog, **trainer):
        edits = [("watchdog", watchdog), *((f"trainer.{key}", value) for key, value in trainer.items())]
        return load_recipe(write(folder, edited(*edits)))

    return load


def test_deadlines_follow_from_that_of_a_collective(recipe_with):
    assert Limits.of(recipe_with({}, collective_timeout_s=600.0)) == Limits(480.0, 300.0, 1800.0, 5.0)
    given = Limits.of(recipe_with({"first_step_s": 100.0, "files_s": 5.0}, collective_timeout_s=600.0))
    assert given == Limits(100.0, 100.0, 5.0, 5.0)


@pytest.mark.parametrize(
    ("watchdog", "trainer", "key", "rule"),
    [
        ({"step_s": 600.0, "first_step_s": 500.0}, {}, "watchdog.step_s", "below trainer.collective_timeout_s = 600"),
        ({"first_step_s": 700.0}, {}, "watchdog.first_step_s", "below trainer.collective_timeout_s = 600"),
        ({"step_s": 490.0}, {}, "watchdog.step_s", "must not pass watchdog.first_step_s = 480"),
    ],
)
def test_a_deadline_that_another_one_makes_useless_is_refused(recipe_with, watchdog, trainer, key, rule):
    with pytest.raises(RecipeError) as refused:
        recipe_with(watchdog, **trainer)
    assert any(one.key == key and rule in one.rule for one in refused.value.violations), refused.value


def test_the_agent_says_that_a_run_hung_whatever_signal_ended_its_ranks():
    assert judge_ends({0: HUNG, 1: -9}, (), (), True).status == HUNG
    assert judge_ends({0: -9}, (), (), True, "rank 0 did not arrive").sentence == "rank 0 did not arrive"
    assert judge_ends({0: -9}, (), (), True).status == FAILED


def test_what_is_said_of_a_hang_is_that_of_this_start(tmp_path):
    assert starts.said_of_hang(tmp_path) is None
    starts.record_end(tmp_path, starts.HUNG, "rank 1 did not arrive", 1)
    assert starts.said_of_hang(tmp_path) == "rank 1 did not arrive"
    assert starts.said_of_hang(tmp_path, starts.ended_at(tmp_path)) is None, "it was there before this start"
    starts.record_end(tmp_path, starts.FAILED, "rank 1 was killed by SIGKILL", 1, "SIGKILL")
    assert starts.said_of_hang(tmp_path) == "rank 1 did not arrive"


def _poll(condition):
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_watcher_that_ends_too_early_is_said_with_its_last_words_and_replaced(capfd):
    beats = Beats()
    beats.begin(1, False)
    ear, mouth = os.pipe()
    long = Deadlines(1e6, 1e6, 1e6, 1e6, 1e6)
    ranks = (WatchedRank(0, "", os.getpid(), beats.file, mouth),)
    settings = WatcherSettings("run", 0, ranks, replace(long, step_s=cast(float, "soon")), 5.0, "word")
    said = ""

    def times(pattern):
        nonlocal said
        said += capfd.readouterr().err
        return len(re.findall(pattern, said))

    early = r"watchdog: its process \d+ on node 0 "
    WatcherProcess(settings)
    _poll(lambda: times("nobody watches the ranks of this node from here on"))
    assert times(early + r"ended with exit status 1, with the words: Traceback") == MOST_WATCHERS
    assert times("another one takes its place") == MOST_WATCHERS - 1
    assert "ValueError: Unknown format code 'g' for object of type 'str'" in said

    watcher = WatcherProcess(replace(settings, deadlines=long))
    watcher._process.kill()
    _poll(lambda: times(early + "was killed by SIGKILL; another one takes its place"))
    watcher.may_end()
    beats.end()
    watcher.wait()
    beats.close()
    for file in (ear, mouth):
        os.close(file)


@pytest.fixture
def watch():
    watch = Watch("word", 0, 0.1)
    yield watch
    watch.close()


def place_of(error):
    return "actor_update", "wait_ranks"


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
def test_a_rank_that_has_passed_a_deadline_tells_the_watcher_which(watch, monkeypatch, error, noted):
    for name in ("END_S", "LOST_S"):
        monkeypatch.setattr(watched, name, 0.0)
    reader = BeatsReader(os.getpid(), watch.beats.file)
    with pytest.raises(type(error)), watch.deadlines(place_of):
        raise error
    beat = reader.read()
    assert beat.note == (str(error) if noted else "")
    assert not noted or (beat.phase, beat.span) == place_of(error)


def test_a_rank_that_has_lost_a_peer_waits_to_be_told_of_a_hang_until_a_rank_has_ended(watch, monkeypatch):
    monkeypatch.setattr(watched, "LOST_S", DEADLINE_S)
    begun, reader = time.monotonic(), BeatsReader(os.getpid(), watch.beats.file)

    def leave():
        with suppress(RuntimeError), watch.deadlines(place_of):
            raise RuntimeError("Connection closed by peer")

    leaving = threading.Thread(target=leave)
    leaving.start()
    _poll(lambda: reader.read().phase == "actor_update")
    assert leaving.is_alive()
    os.write(watch.mouth, ENDING)
    leaving.join()
    assert time.monotonic() - begun < DEADLINE_S


def test_watchers_of_other_nodes_tell_node_0_and_obey_it():
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    deadlines = Deadlines(1.0, 1.0, 1.0, 1.0, 1.0)
    ranks = (WatchedRank(0, "", 1, 2, 3),)
    settings = WatcherSettings("run", 0, ranks, deadlines, 5.0, "word", None, server.detach(), num_nodes=2)
    assert WatcherSettings.load(settings.dump()) == settings
    first = OtherWatchers(settings)
    stranger = OtherWatchers(replace(settings, node=1, master=address, listener=None, token="other"))
    stranger.tell([Standing(9)])
    second = OtherWatchers(replace(settings, node=1, master=address, listener=None))
    assert first.judges and not second.judges
    second.tell([Standing(1, silent_s=3.0)])
    _poll(lambda: first.tables())
    (known,) = first.tables()
    assert replace(known, silent_s=3.0) == Standing(1, silent_s=3.0)
    _poll(lambda: first.tables()[0].silent_s > known.silent_s > 3.0)  # a watcher that says nothing more has not moved
    first.order({"do": "dump"})
    assert second.wait_for_orders(DEADLINE_S) == [{"do": "dump"}]
    threading.Timer(0.1, second.say_dumped, ([Standing(1, call="nap")], [OtherProcess("engine-0", 7, "running")])).start()
    assert first.dumped(DEADLINE_S) == ([Standing(1, call="nap")], [OtherProcess("engine-0", 7, "running")])
    _poll(lambda: stranger.judges)  # it was sent away
    assert stranger.is_alone and not first.is_alone and not second.is_alone
    another = OtherWatchers(replace(settings, listener=socket.create_server(("127.0.0.1", 0)).detach(), replaces=True))
    assert another.is_alone, "the others have lost the one that it is in place of, and judge over their own ranks"


def test_a_node_without_ranks_gives_its_stacks_and_ends_what_it_holds_when_node_0_says_so(sleeper, tmp_path):
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    long = Deadlines(1e6, 1e6, 1e6, 1e6, 1e6)
    settings = WatcherSettings(str(tmp_path), 0, (), long, DEADLINE_S, f"{os.getpid():x}", None, server.detach())
    first = OtherWatchers(settings)
    follower = Watcher(replace(settings, node=3, master=address, listener=None))
    watching = threading.Thread(target=follower.watch, daemon=True)
    watching.start()
    _poll(lambda: 3 in first._followers)
    assert first.tables() == [] and watching.is_alive(), "a node without ranks is never late"
    first.order({"do": "dump"})
    _, (found,) = first.dumped(DEADLINE_S)
    assert (found.name, found.pid, found.state) == ("engine-0", sleeper.pid, "running") and "nap" in str(found.call)
    verdict = Verdict(2, "rollout", None, ("engine-0 hangs",))
    first.order({"do": "end", "folder": str(tmp_path / "hang"), "verdict": asdict(verdict)})
    watching.join(DEADLINE_S)
    assert not watching.is_alive() and marked_processes(f"{os.getpid():x}") == {}
    assert [file.name for file in (tmp_path / "hang").iterdir()] == [f"engine-0-{sleeper.pid}.txt"]
    assert "in nap" in (tmp_path / "hang" / f"engine-0-{sleeper.pid}.txt").read_text()


def test_a_watcher_of_a_node_without_ranks_ends_with_node_0s(sleeper):
    server = socket.create_server(("127.0.0.1", 0))
    long = Deadlines(1e6, 1e6, 1e6, 1e6, 1e6)
    follower = Watcher(WatcherSettings("run", 3, (), long, 5.0, f"{os.getpid():x}", server.getsockname()))
    connection, _ = server.accept()
    watching = threading.Thread(target=follower.watch, daemon=True)
    watching.start()
    connection.close()
    watching.join(DEADLINE_S)
    assert not watching.is_alive() and sleeper.poll() is None, "it harms nobody"
    server.close()
