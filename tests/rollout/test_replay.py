"""A replay answers with what was dumped, recorded experts and the version of each token among it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.data.sample import Prompt, Sample
from megarl.rollout.groups import COLUMNS, GroupResult
from megarl.rollout.replay import FilePayload, check_dumps, dump_rollout, read_rollout
from tests.rollout_cases import same
from tests.runs import batch_of


def _group(group: int, prompt: int, lengths: list[int], generator: np.random.Generator) -> GroupResult:
    tokens, members = sum(lengths), len(lengths)
    rows = members * (prompt - 1) + tokens
    return GroupResult(
        group=group, prompt_ids=np.arange(prompt, dtype=np.int32), token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=generator.random(tokens).astype(np.float32), lengths=np.array(lengths, dtype=np.int32),
        finish_reasons=("stop",) * members, versions=np.sort(generator.integers(group, group + 3, tokens)),
        routing=generator.integers(0, 8, (rows, 3, 2)).astype(np.uint8),
    )  # fmt: skip


def _recipe(dumps: Path, routed: bool) -> Any:
    return SimpleNamespace(
        rollout=SimpleNamespace(replay=str(dumps)),
        algorithm=SimpleNamespace(advantage="grpo", group_size=2),
        phases=SimpleNamespace(rollout=SimpleNamespace(max_concurrent=64)),
        actor=SimpleNamespace(router_replay=routed),
        environment=None,
    )


def _routing(sample: Sample) -> np.ndarray:
    assert sample.completion.routing is not None
    return sample.completion.routing


def test_a_replay_brings_every_sample_its_own_tokens_experts_and_versions(tmp_path):
    generator = np.random.default_rng(0)
    groups = [_group(4, 5, [3, 1], generator), _group(9, 1, [1, 7], generator)]
    samples = {2 * position + member: group.sample(member) for position, group in enumerate(groups) for member in range(2)}
    for sample in samples.values():
        assert len(_routing(sample)) == sample.num_tokens - 1
    whole = np.concatenate([_routing(samples[s]) for s in range(4)])
    assert np.array_equal(whole, np.concatenate([group.routing for group in groups if group.routing is not None]))
    batch, recipe = batch_of(groups), _recipe(tmp_path, routed=True)
    dump_rollout(tmp_path, 4, batch)
    check_dumps(recipe)
    prompts = [Prompt(group.group, group.prompt_ids, "", "", {}) for group in groups]
    again = read_rollout(recipe, prompts, 4)
    for column in (*COLUMNS, "finish_reasons"):
        assert np.array_equal(getattr(again, column), getattr(batch, column)), column
    replayed = again.payload.fetch([3, 0, 1, 2])
    assert same(replayed, samples)
    for s, sample in samples.items():
        assert replayed[s].group == sample.group and np.array_equal(replayed[s].prompt_ids, sample.prompt_ids), s
        assert np.array_equal(_routing(replayed[s]), _routing(sample)), s
        assert _routing(replayed[s]).dtype == np.uint8
        versions = sample.completion.versions
        assert np.array_equal(replayed[s].completion.versions, versions), s
        assert (batch.first_version[s], batch.last_version[s]) == (versions[0], versions[-1])
    with pytest.raises(ValueError, match=r"rollout\.replay.*step-000005"):
        read_rollout(recipe, prompts, 5)
    with pytest.raises(ValueError, match="prompt 0 is not the prompt of this step"):
        read_rollout(recipe, prompts[::-1], 4)


def test_a_dump_without_choices_is_read_where_nobody_wants_them(tmp_path):
    group = _group(0, 4, [2, 2], np.random.default_rng(0))
    plain = GroupResult(**{**vars(group), "routing": None})
    file = dump_rollout(tmp_path, 1, batch_of([plain]))
    assert FilePayload(str(file)).fetch([1])[1].completion.routing is None
    check_dumps(_recipe(tmp_path, routed=False))
    with pytest.raises(ValueError, match="step-000001.npz does not say which experts.*actor.router_replay"):
        check_dumps(_recipe(tmp_path, routed=True))
