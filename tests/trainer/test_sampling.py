"""Dynamic sampling in whole runs: groups without a signal are replaced, each sequence is scored once, and a resume goes on
at the exact prompt."""

import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megarl.data.sample import Prompt
from megarl.data.tokenizer import load_tokenizer
from megarl.reward.verifiers import TextScore
from megarl.rollout.engine import GroupRequest
from megarl.rollout.groups import GroupResult
from megarl.rollout.stream import RolloutStream
from megarl.telemetry.disk import read_lines
from tests.ranks import run_ranks
from tests.rewards import rarely
from tests.runs import copy_until, metrics_of, tiny_recipe, tiny_run, train_on_ranks
from tests.scripted_stream import ScriptedPool, ScriptedScorer

STEPS, PROMPTS, SIZE, MAX_ROUNDS = 3, 4, 2, 3
SALT = 40  # of draws by which one step needs one round, one needs two, and one three and fillers
CHANGES: dict[str, Any] = {
    "algorithm__group_size": SIZE, "phases__rollout": {"prompts": PROMPTS}, "phases__reward": {"sequences": 3},
    "phases__actor_update": {"mini_batch": PROMPTS * SIZE, "micro_batch": {"max_tokens": 64}},
    "reward": [{"kind": "function", "target": "tests.rewards:rarely"}], "run__checkpoint_every": 1,
    "telemetry__samples_per_step": PROMPTS * SIZE,
}  # fmt: skip


def draw(step: int, prompt: int, member: int) -> np.ndarray:
    generator = np.random.default_rng([SALT, step, prompt, member])
    return generator.integers(2, 97, generator.integers(1, 13)).astype(np.int32)


def complete(request: GroupRequest, step: int) -> GroupResult:
    """In the place of an engine: the completions of a prompt are a function of the step, the prompt and the member."""
    drawn = [draw(step, request.group, member) for member in range(SIZE)]
    tokens = np.concatenate(drawn)
    logprobs, versions = np.full(len(tokens), -4.0, np.float32), np.zeros(len(tokens), np.int64)
    lengths, reasons = np.array([len(completion) for completion in drawn], np.int32), ("stop",) * SIZE
    return GroupResult(request.group, request.prompt_ids, tokens, logprobs, lengths, reasons, versions)


def train_sampling(recipe: str, resume: bool, answers_late: int) -> int:
    """A run with scripted engines, which answer in an order drawn from `answers_late`, and no Ray; the sequences that were
    scored."""
    from megarl import build
    from megarl.recipe import load_recipe
    from megarl.recipe.algorithm_section import DynamicSamplingSection
    from megarl.telemetry.run_directory import Resume

    loaded = load_recipe(recipe)
    sampling = {"dynamic_sampling": DynamicSamplingSection(max_rounds=MAX_ROUNDS)}
    loaded = loaded.model_copy(update={"algorithm": loaded.algorithm.model_copy(update=sampling)})
    tokenizer = load_tokenizer(loaded.model.path)

    def score(prompt: Prompt, member: int, tokens: GroupResult) -> TextScore:
        ids = tokens.sample(member).completion.token_ids.tolist()
        return TextScore({"rarely": rarely(tokenizer.decode(ids, skip_special_tokens=True), prompt)})

    scorer, order = ScriptedScorer(score), random.Random(answers_late)
    streams: list[RolloutStream] = []

    def open_stream(recipe: Any, prompts: Any, rewards: Any) -> RolloutStream:
        """In the place of a replay, which stands for engines in the recipe."""
        scripted: Any = ScriptedPool.of(
            2, complete=lambda request, _: complete(request, streams[0]._step), delay=lambda _: 0.001 * order.randrange(9)
        )
        scripted.max_concurrent = 64
        streams.append(RolloutStream(recipe, scripted, recipe.run.seed, prompts, rewards))
        return streams[0]

    with (
        mock.patch.object(build, "check_dumps", lambda _: None),
        mock.patch.object(build, "ReplayStream", open_stream),
        mock.patch("megarl.reward.workers.Scorer", lambda *_: scorer),
    ):
        build.train(loaded, Resume.of(resume, False))
    for stream in streams:
        stream.close()
    return scorer.num_scored


def expected(folder: Path) -> list[dict[str, Any]]:
    """Each step's groups with their rewards, and the rounds that it took, in plain Python."""
    tokenizer, position, steps = load_tokenizer(str(folder / "model")), 0, []
    for step in range(1, STEPS + 1):
        groups: list[tuple[int, list[float]]] = []
        rounds = 0
        while rounds < MAX_ROUNDS and sum(len(set(rewards)) > 1 for _, rewards in groups) < PROMPTS:
            for prompt in range(position, position + PROMPTS):
                texts = [
                    tokenizer.decode(draw(step, prompt, member).tolist(), skip_special_tokens=True) for member in range(SIZE)
                ]
                groups.append((prompt, [rarely(text, None) for text in texts]))  # type: ignore[arg-type]
            position, rounds = position + PROMPTS, rounds + 1
        with_signal = [group for group in groups if len(set(group[1])) > 1]
        without = [group for group in groups if len(set(group[1])) == 1]
        chosen = sorted((with_signal + without)[:PROMPTS])
        steps.append({"groups": chosen, "rounds": rounds, "filled": max(0, PROMPTS - len(with_signal))})
    return steps


def test_a_step_takes_prompts_until_its_groups_differ_and_a_resume_goes_on_at_the_exact_prompt(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    changes = CHANGES | {"rollout__replay": str(tmp_path)}
    scored = run_ranks(train_sampling, 2, str(tiny_recipe(tmp_path, "whole", False, 2, 1, 1, STEPS, **changes)), False, 1)
    copy_until(tmp_path, "whole", 1, "cut")
    run_ranks(train_sampling, 2, str(tiny_recipe(tmp_path, "cut", False, 2, 1, 1, STEPS, **changes)), True, 2)
    whole, wanted = metrics_of(tmp_path, "whole"), expected(tmp_path)
    assert metrics_of(tmp_path, "cut") == whole
    assert scored == [PROMPTS * SIZE * sum(step["rounds"] for step in wanted), 0], "each sequence once, on rank 0"
    for line, step in zip(whole, wanted, strict=True):
        assert (line["rollout/rounds"], line["rollout/filler_groups"]) == (step["rounds"], step["filled"])
        assert line["rollout/extra_prompts"] == PROMPTS * (step["rounds"] - 1)
        rows = read_lines(tmp_path / "runs" / "whole" / "samples" / f"step-{line['step']:06d}.jsonl")
        assert [row["group"] for row in rows] == [prompt for prompt, _ in step["groups"] for _ in range(SIZE)]
        assert [row["reward"] for row in rows] == [reward for _, rewards in step["groups"] for reward in rewards]
        for row in rows:
            prompt, member = row["group"], row["sample"] % SIZE
            assert row["completion_tokens"] == len(draw(line["step"], prompt, member)), "tokens belong to their rewards"
        assert line["schedule/actor_update/sequences"] <= PROMPTS * SIZE and line["actor/grad_norm"] > 0
    assert [(step["rounds"], step["filled"]) for step in wanted] == [(3, 1), (1, 0), (2, 0)], "all that can happen"


@pytest.mark.nightly
@pytest.mark.sync
def test_engines_complete_each_prompt_greedily_beside_and_a_replay_of_both_gives_the_same_numbers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tiny_run(tmp_path)
    changes: dict[str, Any] = {
        "algorithm__advantage": "remax",
        "algorithm__group_size": 1,
        "phases__actor_update": {"mini_batch": PROMPTS, "micro_batch": {"max_tokens": 64}},
    }
    live = changes | {"run__dump_rollouts": True}
    train_on_ranks(tiny_recipe(tmp_path, "live", False, 1, 1, 1, 2, **live))
    rollouts = tmp_path / "runs" / "live" / "rollouts"
    with np.load(rollouts / "greedy" / "step-000001.npz") as dump:
        columns = {name: dump[name] for name in dump.files}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert len(columns["groups"]) == PROMPTS
    prompts = np.split(columns["prompt_ids"], np.cumsum(columns["prompt_lengths"])[:-1])
    completions = np.split(columns["token_ids"], np.cumsum(columns["completion_lengths"])[:-1])
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = torch.tensor(np.concatenate([prompt, completion])[None].astype(np.int64))
        with torch.no_grad():
            likeliest = model(tokens).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert likeliest.tolist() == completion.tolist()
    train_on_ranks(tiny_recipe(tmp_path, "again", False, 1, 1, 1, 2, **changes, rollout__replay=str(rollouts)))
    for line, again in zip(metrics_of(tmp_path, "live"), metrics_of(tmp_path, "again"), strict=True):
        assert line["rollout/greedy_tokens"] > 0 and line["mismatch/logprob_max"] <= 1e-4
        without = line.keys() - again.keys()
        assert {key.split("/")[0] for key in without} <= {"rollout", "sync"}, without
        assert again == {key: value for key, value in line.items() if key in again}
