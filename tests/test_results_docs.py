"""docs/results.md says what the benchmarks have measured, and its parts are made of their files alone."""

from __future__ import annotations

import json

from benchmarks import results
from benchmarks.results import DOCS, PAGE, RESULTS, page, rewards_are


def learned(*seeds: int) -> dict[str, object]:
    run = {"algorithm": "GRPO", "rewards": [0.05, 0.9], "learned": 0.95, "goal_at": 2}
    runs = [run | {"seed": seed, "seconds": 100.0 + seed} for seed in seeds]
    return {"commit": "0123456789abcdef", "device": "x86_64, 2 cores", "runs": runs}


def test_the_page_is_what_was_measured() -> None:
    files = {name: RESULTS / f"{name}.json" for name in ("learning", "held_out", "end_to_end")}
    found = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    assert PAGE.read_text() == page(found)
    assert all((DOCS / f"{name}.png").is_file() for name in ("learning", "held_out") if name in found)


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
