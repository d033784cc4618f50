"""docs/results.md says what the benchmarks have measured, and its parts are made of their files alone."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from benchmarks import distillation, gateway, held_out, learning, results, stream
from benchmarks.end_to_end_figures import targets, too_few
from benchmarks.results import DOCS, PAGE, RESULTS, page, rewards_are


def learned(*seeds: int) -> dict[str, object]:
    run = {"algorithm": "GRPO", "rewards": [0.05, 0.9], "learned": 0.95, "goal_at": 2}
    runs = [run | {"seed": seed, "seconds": 100.0 + seed} for seed in seeds]
    return {"commit": "0123456789abcdef", "device": "x86_64, 2 cores", "runs": runs}


def measured() -> dict[str, Any]:
    """All files: the page has a part of each."""
    return {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in results.MAKERS}


def test_the_page_is_what_was_measured() -> None:
    file = RESULTS / "gpu.json"
    assert PAGE.read_text() == page(measured(), json.loads(file.read_text()) if file.is_file() else None)
    assert all((DOCS / f"{name}.png").is_file() for name in ("learning", "held_out"))


def test_what_was_measured_reaches_the_targets_with_all_that_they_ask_for() -> None:
    found = measured()
    synced = found.pop("weight_sync")["rows"]
    of_sync = [target for row in synced for target in row["targets"].values()]
    assert len({(row["model"], row["case"]) for row in synced}) == 4
    assert len(of_sync) == 10 and all(reached for *_, reached in of_sync), of_sync
    assert gateway.missed(found["gateway"], gateway.Sizes(**found["gateway"]["config"])) == []
    faster, apart = found["sft"]["targets"]
    assert median(found["sft"]["ratios"]) >= faster
    assert all(abs(one["megarl"] - one["trl"]) <= apart * one["error"] for one in found["sft"]["curve"])
    costs = [one for one in found["distillation"].values() if isinstance(one, dict) and "of_phase" in one]
    assert len(costs) == 3 and all(one["of_phase"] <= distillation.TIME for one in costs)
    assert all(one["extra_bytes"] <= distillation.MEMORY * found["distillation"]["logits_bytes"] for one in costs)
    # Missed so far, and marked on the page: targets 1, by 0.005, and 3 (two Ray calls a group take 1 ms of rank 0's loop).
    assert {text.partition(":")[0] for text in stream.missed(found["stream"]["cells"])} <= {"1", "3"}
    runs = {name: one["runs"] for name, one in found.items() if "runs" in one}
    seeds = {(one["algorithm"], one["seed"]) for one in runs["learning"]}
    assert {(name, seed) for name in learning.ALGORITHMS for seed in (1, 2, 3)} <= seeds
    assert all(map(learning.holds, runs["learning"]))
    assert {one["algorithm"] for one in runs["held_out"]} == set(held_out.ALGORITHMS)
    assert all(held_out.rise(one) >= held_out.TARGET for one in runs["held_out"])
    assert too_few(runs["end_to_end"]) == []
    of_sides = targets(runs["end_to_end"])
    assert len(of_sides) == 5 and all(reached for *_, reached in of_sides.values()), of_sides


def test_a_target_that_is_missed_says_so_on_the_page() -> None:
    found = measured()["weight_sync"]
    name, (_, limit, _) = next(iter(found["rows"][0]["targets"].items()))
    found["rows"][0]["targets"][name] = [0.123, limit, False]
    assert f": {name} 0.123 (target {limit}, missed)" in page({"weight_sync": found})


def test_a_part_says_the_options_that_it_was_measured_with() -> None:
    found = measured()
    found["end_to_end"] |= {"config": found["end_to_end"]["config"] | {"steps": 7}}
    found["end_to_end"]["runs"] = [one for one in found["end_to_end"]["runs"] if one["seed"] in (2, 3)]
    assert "`python benchmarks/end_to_end.py --steps 7 --first-seed 2 --seeds 2 --check`" in page(found)
    assert "`python benchmarks/learning.py --seeds 1,3 --check`" in page({"learning": learned(1, 3)})
    assert "`python benchmarks/held_out.py --steps 24 --seeds 1 --check`" in page(found)


def test_a_part_comes_from_its_file() -> None:
    text = page({"learning": learned(1, 3)})
    assert "| GRPO | 0.05 | 0.95, 0.95 | 2, 2 | 102 |" in text
    assert "on x86_64, 2 cores, at 0123456789." in text and results.HELD_OUT not in text and results.END_TO_END not in text


def test_how_far_chance_takes_rewards_apart_is_said() -> None:
    """Two seeds of 5 steps with 10 completions each: one step counts, and half of 20 are right; sqrt(2 x 0.25 / 20)."""
    config = {"steps": 5, "prompts": 2, "group_size": 5}
    runs = [{"side": "megarl", "steps": [{"reward": 0.0}] * 4 + [{"reward": last}]} for last in (0.4, 0.6)]
    said = rewards_are({"config": config, "runs": [*runs, {"side": "trl-hf", "steps": [{"reward": 1.0}] * 5}]})
    assert "over the last step of 5, 20 completions a side" in said and "about 0.16," in said
