"""Recorded experts and each token's version survive the way from groups over a dump back to samples."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.data.sample import Sample
from megarl.rollout.groups import GroupResult
from megarl.rollout.replay import FilePayload, ReplayStream, check_dumps, dump_rollout
from megarl.rollout.stream import RolloutStream
from megarl.rollout.taken import DatasetStream
from tests.runs import batch_of


def _group(group: int, prompt: int, lengths: list[int], generator: np.random.Generator) -> GroupResult:
    tokens, members = sum(lengths), len(lengths)
    rows = members * (prompt - 1) + tokens
    return GroupResult(
        group=group, prompt_ids=np.arange(prompt, dtype=np.int32), token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.zeros(tokens, np.float32), lengths=np.array(lengths, dtype=np.int32), finish_reasons=("stop",) * members,
        versions=np.sort(generator.integers(group, group + 3, tokens)),
        routing=generator.integers(0, 8, (rows, 3, 2)).astype(np.uint8),
    )  # fmt: skip


def _recipe(dumps: Path, routed: bool) -> Any:
    return SimpleNamespace(
        rollout=SimpleNamespace(replay=str(dumps)),
        algorithm=SimpleNamespace(advantage="grpo"),
        actor=SimpleNamespace(router_replay=routed),
        environment=None,
    )


def _routing(sample: Sample) -> np.ndarray:
    assert sample.completion.routing is not None
    return sample.completion.routing


def test_a_dump_brings_every_sample_its_own_choices_and_versions(tmp_path):
    generator = np.random.default_rng(0)
    groups = [_group(4, 5, [3, 1], generator), _group(9, 1, [1, 7], generator)]
    samples = {2 * position + member: group.sample(member) for position, group in enumerate(groups) for member in range(2)}
    for sample in samples.values():
        assert len(_routing(sample)) == sample.num_tokens - 1
    whole = np.concatenate([_routing(samples[s]) for s in range(4)])
    assert np.array_equal(whole, np.concatenate([group.routing for group in groups if group.routing is not None]))
    batch = batch_of(groups)
    replayed = FilePayload(str(dump_rollout(tmp_path, 1, batch))).fetch([3, 0, 1, 2])
    for s, sample in samples.items():
        assert np.array_equal(_routing(replayed[s]), _routing(sample)), s
        assert _routing(replayed[s]).dtype == np.uint8
        assert np.array_equal(replayed[s].completion.versions, sample.completion.versions), s
    versions = [(batch.first_version[s], batch.last_version[s]) for s in range(4)]
    assert versions == [
        (sample.completion.versions[0], sample.completion.versions[-1]) for _, sample in sorted(samples.items())
    ]
    check_dumps(_recipe(tmp_path, routed=True))


def test_a_dump_without_choices_is_read_where_nobody_wants_them(tmp_path):
    group = _group(0, 4, [2, 2], np.random.default_rng(0))
    plain = GroupResult(**{**vars(group), "routing": None})
    file = dump_rollout(tmp_path, 1, batch_of([plain]))
    assert FilePayload(str(file)).fetch([1])[1].completion.routing is None
    check_dumps(_recipe(tmp_path, routed=False))
    with pytest.raises(ValueError, match="step-000001.npz does not say which experts.*actor.router_replay"):
        check_dumps(_recipe(tmp_path, routed=True))


def test_a_trainer_calls_the_same_members_of_every_stream():
    def face(stream: type) -> dict[str, list[str]]:
        members = inspect.getmembers(stream, inspect.isfunction)
        return {name: list(inspect.signature(member).parameters) for name, member in members if not name.startswith("_")}

    of_engines = face(RolloutStream)
    of_engines.pop("close")  # by whoever opened it
    assert face(ReplayStream) == face(DatasetStream) == of_engines
