"""vLLM engines take groups at any time, and continue what was cut: in the same engine, or in another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.data.sample import Completion, Sample
from megarl.recipe.device_section import CPU_BLOCK
from megarl.rollout import RolloutError
from megarl.rollout.engine import GroupRequest
from megarl.rollout.groups import GroupResult
from megarl.rollout.handle import EngineHandle
from megarl.rollout.pool import EnginePool
from tests.rollout.conftest import Engines
from tests.rollout_cases import VOCAB, Publisher, huggingface_logprobs, recipe, save_model

pytestmark = [pytest.mark.sync, pytest.mark.slow]

VERSION = 50  # of the weights `engines.old`, which all engines here have
PROMPT_TOKENS = 20
NEW_TOKENS = 220  # long enough that a slow machine cuts in the middle
TRIES = 5000  # on a busy machine many cuts come before the first token
BLOCK_BYTES = CPU_BLOCK * 2 * 2 * 2 * 32 * 4  # of the cache: keys and values of 2 layers with 2 heads of 32 float32


class Client:
    """Calls one engine as rank 0 does, under positions that nothing else uses."""

    positions = itertools.count(1000)

    def __init__(self, engine: EngineHandle) -> None:
        self._engine = engine

    def call(self, method: str, *arguments: Any) -> Any:
        return self._engine.get(self._engine.call(method, *arguments), "rollout")

    def request(self, members: int = 2, **more: Any) -> GroupRequest:
        position = next(self.positions)
        ids = np.random.default_rng(position).integers(0, VOCAB, PROMPT_TOKENS).astype(np.int32)
        return GroupRequest(position, position, ids, tuple((position, member) for member in range(members)), **more)

    def take(self, requests: Sequence[GroupRequest]) -> list[GroupResult]:
        calls = [self._engine.call("result", request.position)[1] for request in requests]
        return [self._engine.get(call, "rollout") for call in calls]

    def sample(self, *requests: GroupRequest) -> list[GroupResult]:
        self.call("submit", requests)
        return self.take(requests)

    def cut_in_the_middle(self, request: GroupRequest) -> tuple[Completion, ...]:
        """Submit a group and cut it until all its members have tokens; it goes on. On a busy machine a member may end before
        that: then the group ends, its report is dropped, and it begins anew."""
        self.call("submit", [request])
        for _ in range(TRIES):
            partials = self.call("cut", [request.position])[request.position]
            if any(partial.finish_reason for partial in partials):
                self.take([request])
                self.call("report")
                self.call("submit", [request])
            elif all(len(partial) for partial in partials):
                return partials
        raise AssertionError(f"no group with all members in the middle after {TRIES} cuts")


@pytest.fixture(scope="module")
def clients(engines: Engines) -> Iterator[tuple[Client, Client]]:
    pool = engines.pool(0, 1, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, stops=())
    publisher = Publisher(engines.old, engines=2)
    publisher.publish(VERSION, engines.old, pool)
    yield Client(pool.engines[0]), Client(pool.engines[1])
    publisher.close()


def samples(*groups: GroupResult) -> dict[int, Sample]:
    members = [group.sample(member) for group in groups for member in range(len(group.lengths))]
    return dict(enumerate(members))


def assert_sampled(model: Path, *groups: GroupResult) -> None:
    """Every completion is whole, and has the log-probabilities of transformers."""
    all_samples = samples(*groups)
    expected = huggingface_logprobs(model, all_samples, 1.0)
    for s, sample in all_samples.items():
        assert len(sample.completion.token_ids) == NEW_TOKENS and sample.completion.finish_reason == "length"
        np.testing.assert_allclose(sample.completion.logprobs, expected[s], atol=1e-4)


def assert_same(first: GroupResult, second: GroupResult) -> None:
    for name in ("token_ids", "logprobs", "versions", "lengths"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name


def test_groups_that_come_while_others_run_drop_nothing(engines: Engines, clients: tuple[Client, Client]) -> None:
    client, _ = clients
    requests = [client.request(members=3) for _ in range(6)]
    client.call("submit", requests[:3])
    for request in requests[3:]:
        client.call("submit", [request])
        client.call("cut", [requests[0].position])
    assert_sampled(engines.old, *client.take(requests))


def test_a_batch_on_an_idle_engine_repeats_bit_for_bit(clients: tuple[Client, Client]) -> None:
    client, other = clients
    batch = [client.request(members=3) for _ in range(4)]
    first = client.sample(*batch)
    client.cut_in_the_middle(late := client.request())
    client.take([late])
    for again in (client, other):
        for before, after in zip(first, again.sample(*batch), strict=True):
            assert_same(before, after)


def test_a_greedy_completion_that_was_cut_equals_the_uninterrupted_one(clients: tuple[Client, Client]) -> None:
    """Continued by the engine that was cut, and by another."""
    client, other = clients
    request = client.request(members=1, temperature=0.0)
    [whole] = client.sample(request)
    [partial] = client.cut_in_the_middle(request)
    assert 0 < len(partial) < NEW_TOKENS
    [here] = client.take([request])
    [there] = other.sample(replace(request, partials=(partial,)))
    for continued in (here, there):
        assert np.array_equal(continued.token_ids, whole.token_ids)
        assert np.array_equal(continued.versions, np.full(NEW_TOKENS, VERSION))
        np.testing.assert_allclose(continued.logprobs, whole.logprobs, atol=1e-4)


def test_what_was_sampled_is_kept_and_what_follows_draws_anew(engines: Engines, clients: tuple[Client, Client]) -> None:
    client, _ = clients
    request = client.request()
    [whole] = client.sample(request)
    done, other = (whole.sample(member).completion for member in range(2))
    finished = Completion(done.token_ids, done.logprobs, "length", done.versions)
    begun = Completion(other.token_ids[:10], other.logprobs[:10], "", np.full(10, 7))
    [continued] = client.sample(replace(request, partials=(finished, begun)))
    assert_sampled(engines.old, continued)
    for name in ("token_ids", "logprobs", "versions"):
        assert np.array_equal(getattr(continued.sample(0).completion, name), getattr(done, name)), name
    after = continued.sample(1).completion
    assert np.array_equal(after.token_ids[:10], begun.token_ids) and np.array_equal(after.logprobs[:10], begun.logprobs)
    assert after.versions.tolist() == [7] * 10 + [VERSION] * (NEW_TOKENS - 10)
    # The same prompt and tokens, as a prompt: the seed's first random numbers come here, and not in the continued group.
    prompt = np.concatenate([request.prompt_ids, begun.token_ids])
    seeds = request.seeds[1:]
    [fresh] = client.sample(replace(client.request(), prompt_ids=prompt, seeds=seeds, max_new_tokens=90))
    assert not np.array_equal(fresh.token_ids, after.token_ids[10:])


def test_a_replaced_group_is_forgotten_and_others_go_on(engines: Engines, clients: tuple[Client, Client]) -> None:
    client, _ = clients
    lasting, replaced, finished = (client.request() for _ in range(3))
    client.sample(client.request())
    client.call("submit", [finished])
    client.call("submit", [lasting, replaced])
    waiting = client._engine.call("result", replaced.position)[0]
    client.call("submit", [again := replace(replaced, prompt_ids=finished.prompt_ids)])
    with pytest.raises(RolloutError, match=f"no group at position {replaced.position}"):
        client._engine.get(waiting, "rollout")
    first, second = client.take([lasting, again])
    assert_sampled(engines.old, first)
    assert_sampled(engines.old, second)
    assert np.array_equal(second.prompt_ids, finished.prompt_ids)
    client.take([finished])
    assert client.call("cut") == {}


def test_recorded_experts_of_a_cut_completion_cover_the_whole_sequence(cluster: None, tmp_path: Path) -> None:
    """They are those of transformers, whether a completion was cut, had finished when its group was cut, or was preempted,
    as the cache has blocks for two of three completions. What nobody takes is not kept."""
    model = save_model(tmp_path, "qwen3_moe", True, 0)
    edits = ("data.max_prompt_tokens", PROMPT_TOKENS), ("actor.router_replay", True)
    routing_recipe = recipe(model, *edits, max_new_tokens=40, kv_cache_bytes=5 * BLOCK_BYTES)
    pool = EnginePool(routing_recipe, str(model), (), seed=3)
    pool.start()
    try:
        client = Client(pool.engines[0])
        [preempted] = client.sample(client.request(members=3))
        report = client.call("report")
        assert report.num_preempted > 0 and client.call("report").num_preempted == 0
        request = client.request(members=3)
        client.cut_in_the_middle(request)
        [first] = client.take([request])
        whole = [first.sample(member).completion for member in range(3)]
        finished = Completion(whole[0].token_ids, whole[0].logprobs, "length", whole[0].versions, whole[0].routing)
        begun = [Completion(done.token_ids[:9], done.logprobs[:9], "", done.versions[:9]) for done in whole[1:]]
        [second] = client.sample(replace(request, partials=(finished, *begun)))
        assert sum(request.tokens for request in client.call("report").requests) == 3 * 40 + 2 * 31
        for sample in samples(preempted, first, second).values():
            assert np.array_equal(sorted_experts(sample.completion.routing), huggingface_experts(model, sample))
        client.cut_in_the_middle(cut := client.request(members=1))
        client.take([cut])
        client.call("score", [np.arange(5, dtype=np.int32)])
        for name in ("canary-1", *(f"{cut.position}-0-{attempt}" for attempt in range(1, 5))):
            with pytest.raises(Exception, match=name):
                client.call("_every_worker", "megarl_take_routing", [name], [])
    finally:
        pool.shutdown()


def sorted_experts(routing: np.ndarray | None) -> np.ndarray:
    assert routing is not None
    return np.sort(routing[:, 0], axis=-1)


def huggingface_experts(path: Path, sample: Sample) -> np.ndarray:
    """The two experts of each token but the last, sorted, in the only layer with experts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion.token_ids]).astype(np.int64))
    with torch.no_grad():
        [logits] = model(ids[None], output_router_logits=True).router_logits
    return logits[:-1].topk(2).indices.sort(-1).values.numpy()
