"""A vLLM engine of every family that took a version equals one that loaded the same weights from disk, bit for bit.

The engines are in one process; `test_rollout_sync.py` has the same with Ray, an engine core and several workers.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.in_process_engine import Receiving, answers, close_engines, open_engine, open_receiver
from tests.rollout_cases import Publisher, save_model

pytestmark = [pytest.mark.sync, pytest.mark.slow]
# With their heads tied or not.
FAMILIES = [
    ("llama", False),
    ("qwen2", False),
    ("qwen3", True),
    ("qwen3_moe", False),
    ("mixtral", False),
    ("gemma3", True),
    ("deepseek_v3", False),
]


def takes_versions(old: Path, new: Path) -> None:
    """All on one engine, which loaded `old` when it started: `new` is read in place, and `old` again from buckets."""
    engine, other = open_receiver(old), open_engine(new)
    first, second = answers(engine), answers(other)
    assert first != second
    publisher, receiving = Publisher(new, in_place=True), Receiving(engine)
    figures = publisher.publish(1, new, receiving)
    assert figures["sync/received_bytes"] == figures["sync/bound_bytes"] > 0 and figures["sync/in_place"]
    assert answers(engine) == second, "not the engine that loaded from disk"
    publisher.in_place = False
    assert not publisher.publish(2, old, receiving)["sync/in_place"]
    assert answers(engine) == first, "a second sync did not bring the first weights back"
    publisher.close()
    close_engines()


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_synced_engine_equals_one_that_loaded_from_disk(
    engine_process: ProcessPoolExecutor, tmp_path: Path, family: str, tied: bool
) -> None:
    old, new = (save_model(tmp_path / name, family, tied, seed) for seed, name in enumerate(("old", "new")))
    engine_process.submit(takes_versions, old, new).result(timeout=300)
