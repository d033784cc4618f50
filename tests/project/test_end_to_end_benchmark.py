"""What `benchmarks/end_to_end.py` makes of its runs: the parts of a step, parts of a measurement put together, targets."""

import json

import pytest

from benchmarks.end_to_end_figures import MEGARL, PARTS, megarl_steps, merged, summary, targets

LINE = {
    "step": 2, "time/step": 20.0, "time/rollout": 6.0, "time/reward": 0.1, "time/plan": 0.1, "time/reference_logprob": 4.0,
    "time/advantage": 0.1, "time/actor_update": 9.0, "time/weight_sync": 0.6, "time/metrics": 0.05, "sync/repack_s": 0.4,
    "idle/engines/busy_share": 0.29, "reward/mean": 0.5, "tokens/prompt": 2880, "tokens/completion": 1520,
}  # fmt: skip
# Name, depth, start and microseconds; a span stands before what it is inside of.
EVENTS = [
    ["data", 1, 0, 10_000], ["wait_engines", 1, 0, 5_900_000], ["rollout", 0, 0, 6_000_000],
    ["forward", 2, 0, 3_800_000], ["pipeline", 1, 0, 3_900_000], ["reference_logprob", 0, 0, 4_000_000],
    ["forward", 2, 0, 3_000_000], ["backward", 2, 0, 5_000_000], ["pipeline", 1, 0, 8_100_000],
    ["optimizer", 1, 0, 500_000], ["actor_update", 0, 0, 9_000_000],
]  # fmt: skip


def run(side, seed=1, seconds=10.0, reward=0.5, tokens=4000, steps=4, overhead=0.1):
    step = {"seconds": seconds, "reward": reward, "prompt_tokens": 3 * tokens // 4, "completion_tokens": tokens // 4,
            "cpu_seconds": 2 * seconds, **dict.fromkeys(PARTS, seconds / 5)}  # fmt: skip
    if side == MEGARL:
        step["overhead"] = {"reward": overhead}
    first = step | {"seconds": 100 * seconds, "cpu_seconds": None}
    return {"side": side, "seed": seed, "start_s": 1.0, "peak_bytes": seed * 10**9, "steps": [first, *[step] * (steps - 1)]}


def test_a_step_s_parts_and_overhead_sum_to_it(tmp_path):
    (tmp_path / "trace").mkdir()
    (tmp_path / "metrics.jsonl").write_text(json.dumps(LINE) + "\n")
    trace = [{"rank": 0, "host": "a"}, {"rank": 0, "part": "start", "events": EVENTS}, {"step": 2, "events": EVENTS}]
    (tmp_path / "trace" / "rank-00000.jsonl").write_text("".join(json.dumps(one) + "\n" for one in trace))
    (step,) = megarl_steps(tmp_path)
    assert {part: round(step[part], 6) for part in PARTS} == {
        "generation": 5.8, "logprobs": 4.0, "update": 9.0, "sync": 0.6, "rest": 0.6
    }  # fmt: skip
    assert {name: round(spent, 6) for name, spent in step["overhead"].items()} == {
        "rollout": 0.2, "weight_sync": 0.2, "reference_logprob": 0.2, "actor_update": 0.5, "reward": 0.1, "plan": 0.1,
        "advantage": 0.1, "metrics": 0.05, "between phases": 0.05,
    }  # fmt: skip
    # The engine, the model's passes, the optimizer and the repack are all that is left.
    assert step["seconds"] - sum(step["overhead"].values()) == pytest.approx(5.8 + 3.8 + 3.0 + 5.0 + 0.5 + 0.4)


def test_the_first_step_warms_up():
    found = summary([run(MEGARL, 1), run(MEGARL, 2, seconds=20.0), run("trl-hf")], MEGARL)
    assert found is not None
    assert (found["seeds"], found["seconds"], found["tokens_per_s"]) == ([1, 2], 15.0, 4000 / 15)
    assert (found["cpu_seconds"], found["peak_bytes"]) == (30.0, 2 * 10**9)
    assert found["overhead_share"] == pytest.approx(0.1 / 15)


def test_targets_of_the_sides_that_ran():
    own = run(MEGARL)
    found = targets([own, run("trl-hf", seconds=25.0), run("trl-vllm", seconds=24.9, reward=0.56)])
    assert [name for name, (*_, reached) in found.items() if not reached] == [
        "tokens a second / trl-vllm",
        "reward - trl-vllm",
    ]
    assert found["tokens a second / trl-hf"][0] == pytest.approx(2.5)
    assert found["reward - trl-vllm"][0] == pytest.approx(-0.06)
    assert targets([run(MEGARL, overhead=0.5)]) == {"overhead share": (0.05, 0.05, False)}
    assert targets([run("trl-hf")]) == {}


def test_parts_are_merged_only_if_made_alike():
    parts = [{"commit": "a", "device": "d", "config": {"steps": 4}, "runs": [run(side)]} for side in (MEGARL, "trl-hf")]
    assert [one["side"] for one in merged(parts)] == [MEGARL, "trl-hf"]
    with pytest.raises(ValueError, match="two files"):
        merged([parts[0], parts[0]])
    with pytest.raises(ValueError, match="config"):
        merged([parts[0], parts[1] | {"config": {"steps": 5}}])
