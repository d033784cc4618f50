"""The verdicts of the watchdog: whether a run hangs and which rank is at fault, given the standings of all ranks."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.cluster.watchdog_judge import ENDED, GONE, STOPPED, Deadlines, OtherProcess, Standing, culprits, judge, overdue

DEADLINES = Deadlines(
    first_step_s=100.0, step_s=10.0, files_s=1000.0, engines_s=300.0, rewards_s=60.0, stacks_s=5.0, collective_s=20.0
)
RUN = Path("run")


def at(rank, span=None, silent_s=0.0, phase="actor_update", phases=7, **more):
    return Standing(rank=rank, step=2, phase=phase, span=span, phases=phases, silent_s=silent_s, **more)


@pytest.mark.parametrize(
    ("table", "hangs"),
    [
        ([at(0, "forward", 9), at(1, "wait_pipeline", 9)], False),
        ([at(0, "forward", 11), at(1, "wait_pipeline", 9)], True),
        ([at(0, "forward", 11, first=True), at(1, "wait_pipeline", 11, first=True)], False),
        ([at(0, "forward", 101, first=True), at(1, "wait_pipeline", 90, first=True)], True),
        # Ranks that wait for a rank within its deadline.
        ([at(0, "wait_engines", 200, "rollout"), at(1, "wait_ranks", 200, "rollout")], False),
        ([at(0, "wait_engines", 200, "rollout"), at(1, "wait_engines", 200, "rollout")], False),
        ([at(0, "wait_engines", 311, "rollout"), at(1, "wait_ranks", 311, "rollout")], True),
        ([at(0, "wait_rewards", 65, "reward"), at(1, "wait_rewards", 65, "reward")], False),
        ([at(0, "wait_rewards", 71, "reward"), at(1, "wait_rewards", 71, "reward")], True),
        ([at(0, "wait_engines", 20, "weight_sync"), at(1, "send", 11, "weight_sync")], True),
        ([at(0, None, 500, "start"), at(1, "wait_ranks", 500, "start")], False),
        ([at(0, None, 500, "checkpoint"), at(1, None, 1001, "checkpoint")], True),
        # All ranks wait: while one rank has moved recently, all may continue.
        ([at(0, "wait_ranks", 50), at(1, "wait_gradients", 9)], False),
        ([at(0, "wait_ranks", 50), at(1, "wait_gradients", 11)], True),
        ([at(0, None, 11, phase=None), at(1, "wait_ranks", 11)], True),
        ([at(0, "forward", 50, state=ENDED)], False),
        ([at(0, "wait_ranks", 1), at(1, "wait_ranks", 1, note="no answer of rollout engine 0")], True),
        ([at(0, "wait_pipeline", 11, state=STOPPED), at(1, "wait_ranks", 11)], True),
        ([], False),
    ],
)
def test_a_run_hangs_when_a_rank_that_waits_for_no_rank_is_silent_for_too_long(table, hangs):
    assert overdue(table, DEADLINES) is hangs


@pytest.mark.parametrize(
    ("table", "ranks"),
    [
        # A stopped or dead process is at fault in every place, also in a wait, and before ranks that compute.
        ([at(0, "forward", 11), at(1, "wait_ranks", 11, state=STOPPED)], [1]),
        ([at(0, "forward", 11), at(1, "wait_ranks", 11, state=STOPPED), at(2, "forward", state=GONE)], [2]),
        # Tensor ranks wait inside a span; their innermost calls tell which rank does not wait.
        ([at(0, "forward", 11, call="all_reduce", waits=True), at(1, "forward", 11, call="sleep")], [1]),
        ([at(0, "forward", 11, call="all_reduce", waits=True), at(1, "wait_pipeline", 11, call="recv", waits=True)], [0]),
        # Several ranks compute: the rank with fewer phases is at fault, else the longest silent rank comes first.
        ([at(0, "forward", 11, phases=8), at(1, "forward", 11, phases=7)], [1]),
        ([at(0, "forward", 11), at(1, "forward", 13)], [1, 0]),
        # All ranks wait: the rank that is behind is at fault.
        ([at(0, "wait_ranks", 20, phases=8), at(1, "wait_ranks", 11, phases=7)], [1]),
        ([at(0, "wait_ranks", 11), at(1, "wait_gradients", 20)], [1]),
        # Rank 0 waits for other processes than ranks, and all ranks wait for rank 0.
        ([at(0, "wait_engines", 400, "rollout"), at(1, "wait_engines", 400, "rollout")], []),
        ([at(0, "wait_engines", 400, "rollout", call="get", waits=True), at(1, "wait_ranks", 400, "rollout")], []),
        ([at(0, "wait_rewards", 400, "reward", call="sleep"), at(1, "wait_rewards", 400, "reward")], [0]),
        ([at(0, None, 11, phase=None), at(1, "wait_ranks", 11)], [0]),
        ([at(0, "forward", 99, state=ENDED), at(1, "forward", 11)], [1]),
    ],
)
def test_the_ranks_at_fault_do_not_wait_or_are_behind(table, ranks):
    assert [standing.rank for standing in culprits(table)] == ranks


SPANS = st.sampled_from(["wait_ranks", "wait_pipeline", "wait_gradients"])


@given(st.lists(SPANS, min_size=1, max_size=12), st.data())
def test_a_stuck_rank_among_waiting_ranks_is_named(spans, data):
    stuck = data.draw(st.integers(0, len(spans)))
    silent_s = data.draw(st.floats(10.5, 1e6))
    waiting = [at(rank + (rank >= stuck), span, data.draw(st.floats(0, 1e6)), phases=7) for rank, span in enumerate(spans)]
    table = sorted([*waiting, at(stuck, "forward", silent_s)], key=lambda standing: standing.rank)
    assert overdue(table, DEADLINES)
    verdict = judge(RUN, table, DEADLINES)
    assert verdict.rank == stuck
    assert verdict.lines[0].startswith(f"rank {stuck} did not arrive: step 2, in phase actor_update in forward")
    assert all(f"rank {rank.rank} {rank.silent_s:.1f} s in {rank.span}" in verdict.lines[-1] for rank in waiting)


def test_a_verdict_names_call_state_and_deadline():
    stopped = at(1, "backward", 12.34, state=STOPPED, place="pipeline stage 1 of 2")
    verdict = judge(RUN, [at(0, "wait_pipeline", 12.1, call="recv (p2p.py:3)", waits=True), stopped], DEADLINES)
    assert verdict.lines == (
        "rank 1 (pipeline stage 1 of 2) did not arrive: step 2, in phase actor_update in backward, silent for 12.3 s: its "
        "process is stopped (SIGSTOP); it may stand there for watchdog.step_s = 10 s",
        "others waited: rank 0 12.1 s in wait_pipeline at recv (p2p.py:3)",
    )


def test_silent_engines_are_named_with_the_calls_of_their_processes():
    table = [
        at(0, "wait_engines", 20, "rollout", note="rollout engine 0: 4 of 4 groups"),
        at(1, "wait_ranks", 20, "rollout"),
    ]
    others = [OtherProcess("engine-0", 7, "running"), OtherProcess("engine-0", 8, STOPPED)]
    verdict = judge(RUN, table, DEADLINES, others)
    assert verdict.rank is None
    assert verdict.lines[0] == "rank 0: rollout engine 0: 4 of 4 groups"
    assert verdict.lines[1].startswith("the rollout engines did not answer rank 0, step 2, in phase rollout")
    assert "may stand" not in verdict.lines[1], "the note names the deadline that has passed"
    assert verdict.lines[2] == "engine-0 (process 8) is stopped (SIGSTOP)"
    others = [OtherProcess("engine-0", 7, "running", "sleep (x.py:3)"), OtherProcess("engine-1", 8, "running")]
    assert judge(RUN, table, DEADLINES, others).lines[2] == "engine-0 (process 7) stands in sleep (x.py:3)"
    # If a rank is at fault, its engines only wait for it.
    table[1] = at(1, "send", 20, "rollout", state=STOPPED)
    assert not any("engine-0 (" in line for line in judge(RUN, table, DEADLINES, others).lines)


def test_waiting_ranks_prove_nothing_while_rank_0_is_unknown():
    waiting = [at(rank, "wait_engines", 1000, "rollout") for rank in (4, 5)]
    assert overdue(waiting, DEADLINES) and not overdue(waiting, DEADLINES, some_unknown=True)
    assert overdue([*waiting, at(6, "forward", 1000)], DEADLINES, some_unknown=True)


def test_a_second_hang_gets_another_folder(tmp_path):
    table = [at(0, "forward", 20, phase="rollout")]
    (tmp_path / "hang-2-rollout").mkdir()
    assert judge(tmp_path, table, DEADLINES).folder == tmp_path / "hang-2-rollout-2"
    assert judge(tmp_path, [at(0, None, 20, phase=None)], DEADLINES).folder == tmp_path / "hang-2-between_phases"
