"""After a weight sync a real vLLM engine equals one that loaded the same weights from disk.

Of every family: `weight_sync/test_families.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from megarl.data.sample import Completion, Sample
from megarl.models.layout import RolloutLayout
from megarl.rollout import EngineDirty, RolloutError
from megarl.rollout.pool import EnginePool
from megarl.weight_sync.canary import canary_sequences
from megarl.weight_sync.manifest import SyncError
from tests.rollout.conftest import TORCHRUN, Engines
from tests.rollout_cases import (
    STOP,
    VOCAB,
    Publisher,
    corrupt,
    distance,
    generate,
    huggingface_logprobs,
    prompts,
    recipe,
    same,
    samples,
    save_model,
)

pytestmark = [pytest.mark.sync, pytest.mark.slow]


def assert_scores(model: Path, pool: EnginePool, layout: RolloutLayout) -> None:
    """Every data-parallel rank gives the log-probabilities of transformers, also the second time."""
    sequences = canary_sequences(VOCAB, 3, 30)
    completions = [Completion(ids[1:], np.zeros(29, np.float32), "length", np.zeros(29, np.int64)) for ids in sequences]
    drawn = {number: Sample(0, sequences[number][:1], completion) for number, completion in enumerate(completions)}
    expected = np.stack([*huggingface_logprobs(model, drawn, 1.0).values()])
    first, second = (pool.score(sequences)[0] for _ in range(2))
    assert first.shape == (layout.data, *expected.shape) and np.array_equal(first, second)
    assert np.abs(first - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("family", "tied", "layers", "layout"),
    [
        pytest.param("qwen3_moe", True, 2, RolloutLayout(2), marks=pytest.mark.nightly),
        ("llama", True, 3, RolloutLayout(pipeline=2)),
        pytest.param("deepseek_v3", False, 2, RolloutLayout(2, 2, expert_parallel=True), marks=pytest.mark.nightly),
        pytest.param("mixtral", False, 2, RolloutLayout(data=2, expert_parallel=True), marks=pytest.mark.nightly),
    ],
)
def test_each_worker_takes_its_shards(
    cluster: None, tmp_path: Path, family: str, tied: bool, layers: int, layout: RolloutLayout
) -> None:
    """By parts and, where experts are not sharded, by whole tensors; an engine of which one worker took wrong bytes takes
    all of it again."""
    old, new = (save_model(tmp_path / name, family, tied, seed, layers) for seed, name in enumerate(("old", "new")))
    publisher, whole = (Publisher(new, layout, mode=mode) for mode in ("reshard", "checkpoint"))
    pool = EnginePool(recipe(old, **asdict(layout)), str(old), STOP, seed=3)
    pool.start()
    assert pool.engines[0].process is not None
    shared_files = [Path(file) for file in pool.engines[0].process.shared_files]
    try:
        before = samples(pool, 1)
        assert distance(old, before) < 1e-4
        metrics = publisher.publish(1, new, pool)
        assert metrics["sync/received_bytes"] == metrics["sync/bound_bytes"] > 0
        after = samples(pool, 1)
        assert distance(new, after) < 1e-4
        assert_scores(new, pool, layout)
        assert same(after, samples(pool, 1)), "scoring in between changed the completions"
        publisher.close()  # an engine has one trainer at a time
        sent = (publisher if layout.expert_parallel else whole).publish(2, old, pool)
        assert layout.expert_parallel or sent["sync/received_bytes"] > metrics["sync/received_bytes"]
        assert same(before, samples(pool, 1)), "the first weights did not come back"
        whole.close()
        corrupt(publisher, times=1)
        assert publisher.publish(3, new, pool)["sync/attempts"] == 2
        assert same(after, samples(pool, 1)), "parts after whole tensors differ from parts alone"
        assert shared_files and all(file.exists() for file in shared_files)
    finally:
        pool.shutdown()
        publisher.close()
        whole.close()
    assert not [file for file in shared_files if file.exists()]


@pytest.fixture(scope="module")
def running(engines: Engines) -> Iterator[tuple[EnginePool, Publisher, Path, Path]]:
    """Two engines with version 1, a publisher, and the models of version 1 and of the next."""
    publisher, pool = Publisher(engines.new, engines=2), engines.pool(0, 1)
    publisher.publish(1, engines.new, pool)
    yield pool, publisher, engines.new, engines.old
    publisher.close()


Running = tuple[EnginePool, Publisher, Path, Path]


def test_two_engines_share_the_groups_and_seeds_alone_decide_what_they_sample(running: Running) -> None:
    """The seeds depend on step, prompt and member; the answers are in the order of the samples."""
    pool, _, new, _ = running
    batch = generate(pool, prompts(), 7)
    drawn = batch.payload.fetch(range(16))
    assert distance(new, drawn) < 1e-4
    assert batch.groups.tolist() == np.repeat([0, 1, 2, 3], 4).tolist()
    for s, sample in drawn.items():
        assert np.array_equal(sample.prompt_ids, prompts()[s // 4].token_ids) and sample.group == s // 4
        assert batch.completion_lengths[s] == len(sample.completion.token_ids)
        assert batch.prompt_lengths[s] == len(sample.prompt_ids)
    assert batch.executed.prompts == 4 and batch.executed.group_size == 4 and batch.executed.max_concurrent == 7
    assert set(batch.first_version) == set(batch.last_version)
    tokens = {tuple(sample.completion.token_ids) for sample in drawn.values()}
    assert len(tokens) == 16, "members of a group drew the same completion"
    assert same(drawn, samples(pool, 7)) and not same(drawn, samples(pool, 8))
    # A stop token stays in the completion, with its log-probability.
    completions = [sample.completion for sample in drawn.values()]
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        assert not set(completion.token_ids[:-1].tolist()) & set(STOP)
        assert (int(completion.token_ids[-1]) in STOP) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 24


def test_wrong_prompts_never_reach_the_engine(running: Running) -> None:
    pool = running[0]
    good = prompts(1)[0]
    for ids, rule in [
        ([131], "vocabulary"),
        ([-1], "vocabulary"),
        ([], "max_prompt_tokens"),
        ([2] * 17, "max_prompt_tokens"),
    ]:
        wrong = type(good)(9, np.array(ids, dtype=np.int32), "", "", {})
        with pytest.raises(ValueError, match=rf"prompt 9 .*{rule}"):
            generate(pool, [good, wrong], 1)
    assert len(generate(pool, [good], 1)) == 4


def test_torchrun_variables_do_not_reach_the_engines(running: Running) -> None:
    import psutil

    for engine in running[0].engines:
        assert engine.process is not None
        for pid, _ in engine.process.pids:
            names = psutil.Process(pid).environ().keys()
            assert not TORCHRUN.keys() & names


def test_a_corrupt_sync_silences_the_engine_until_a_good_one(running: Running) -> None:
    pool, publisher, new, _ = running
    corrupt(publisher, times=4)
    with pytest.raises(SyncError, match=r"rollout engine \d, phase weight_sync: .*wrong bytes in piece 0"):
        publisher.publish(3, new, pool)
    with pytest.raises(RolloutError, match=r"rollout engine \d refuses phase rollout: .*version 3"):
        generate(pool, prompts(), 1)
    with pytest.raises(EngineDirty, match="version 3"):
        pool.score(canary_sequences(VOCAB, 1, 8))
    publisher.publish(4, new, pool)
    batch = generate(pool, prompts(), 1)
    assert set(batch.first_version) == set(batch.last_version) == {4}
    assert distance(new, batch.payload.fetch(range(16))) < 1e-4
