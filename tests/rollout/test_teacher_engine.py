"""A teacher that an engine serves: the log-probabilities of its model, also after its engine died."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray

from megarl.data.sample import Completion, Sample
from megarl.planner.placement import EnginePlace
from megarl.rollout import RolloutError
from megarl.rollout.pool import EnginePool
from megarl.rollout.taken import DataPayload
from tests.rollout_cases import VOCAB, huggingface_logprobs, recipe, save_model

NAME, RESTARTS = "elder", 1


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / NAME, "qwen3", False, seed=4)


@pytest.fixture
def pool(cluster: None, teacher: Path, tmp_path: Path) -> Iterator[EnginePool]:
    """The engine of the teacher alone: it starts with the rollout engines, of which there are none here."""
    student = save_model(tmp_path / "student", "llama", True, seed=1, layers=1)
    values = recipe(student, max_restarts=RESTARTS).model_dump()
    values["teachers"] = {NAME: {"path": str(teacher), "engine": {"max_tokens": 64}}}
    values["algorithm"]["distillation"] = {"place": "advantage"}
    pool = EnginePool(recipe(student).model_validate(values), str(student), (), 0, teachers=[EnginePlace(0, (0,))])
    pool.engines = []
    pool.start()
    yield pool
    pool.shutdown()


def samples() -> list[Sample]:
    """Sequences up to the longest that the recipe allows, some with tokens that the policy did not sample."""
    random, sequences = np.random.default_rng(0), []
    for number, (prompt, length) in enumerate([(16, 24), (3, 1), (9, 17), (1, 24), (12, 6)]):
        tokens = random.integers(0, VOCAB, prompt + length).astype(np.int32)
        own_mask = np.ones(length, bool) if number % 2 else random.random(length) < 0.6
        unread = np.zeros(length, np.float32), "stop", np.zeros(length, np.int64)
        sequences.append(Sample(number, tokens[:prompt], Completion(tokens[prompt:], *unread, own=own_mask)))
    return sequences


def test_an_engine_gives_what_the_teacher_computes_also_after_a_restart(pool: EnginePool, teacher: Path) -> None:
    every = samples()
    expected = huggingface_logprobs(teacher, dict(enumerate(every)), 1.0)
    chosen = [4, 0, 2, 1, 3]
    for restarts in range(1 + RESTARTS):
        scores = pool.judge(NAME, DataPayload(tuple(every)), chosen)
        for sample, logprobs in zip(chosen, scores, strict=True):
            assert logprobs == pytest.approx(expected[sample][every[sample].completion.own], abs=2e-5)
        engine = pool.teachers[NAME]
        assert engine.restarts == restarts
        ray.kill(engine._actor)
    with pytest.raises(
        RolloutError, match=rf"the engine of teachers.{NAME} died in phase teacher_logprob.{NAME} after 1 re"
    ):
        pool.judge(NAME, DataPayload(tuple(every)), chosen)
