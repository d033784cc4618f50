"""Sequences with a real engine: the trainer gives their tokens the log-probabilities that the engine gave, and a group's
prompt is computed once, on CPUs too, where vLLM's own blocks of the cache are longer than most prompts."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.data.sample import Completion, Sample
from megarl.models import FAMILIES
from megarl.models.layout import Layout
from megarl.rollout.gateway_messages import AnswerReader, read_chat
from megarl.rollout.session import Session
from tests.chat_templates import ADD
from tests.engine_cases import engine, planned, random_batch, start
from tests.in_process_engine import open_engine
from tests.ranks import run_ranks
from tests.rollout_cases import save_model
from tests.session_cases import LIMITS, renderer
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.agent
VOCAB, NEW_TOKENS = 300, 8
OTHERS = sorted(FAMILIES.keys() - {"qwen3"})


def talks(model: Path) -> list[tuple[np.ndarray, Completion]]:
    """Eight turns, of which one is a branch; runs in a process of its own."""
    from vllm import SamplingParams

    chat, llm = renderer("plain"), open_engine(model, max_model_len=512)
    end = int(chat.tokenizer.convert_tokens_to_ids("<|turn_end|>"))
    session, reader = Session(chat, LIMITS), AnswerReader(chat.tokenizer, [end])
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What?"}]
    for number in range(8):
        request = read_chat({"messages": messages, "tools": [ADD]}, 1.0, 1)
        turn = session.next_turn(request.messages or [], request.tools)
        given: Any = {"prompt_token_ids": turn.prompt_ids.tolist()}
        sampling = SamplingParams(max_tokens=NEW_TOKENS, seed=number, logprobs=0, stop_token_ids=[end], detokenize=False)
        (output,) = llm.generate([given], sampling, use_tqdm=False)[0].outputs
        logprobs = [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
        ids = np.array(output.token_ids, np.int32)
        sampled = Completion(ids, np.array(logprobs, np.float32), output.finish_reason, np.zeros(len(ids), np.int64))
        answer = reader.read(sampled, turn.prompt_ids, request)
        session.record(turn, answer.completion, answer.message)
        if number != 4:  # else the client asks again from the turn before
            messages = [*messages, answer.message, {"role": "user", "content": f"And {number}?"}]
    assert session.counts == {"begun": 1, "forked": 1}
    return [(segment.prompt_ids, segment.completion) for segment in session.segments]


def computes(directory: str, segments: list[tuple[np.ndarray, Completion]]) -> list[np.ndarray]:
    """The trainer's log-probabilities of the policy's own tokens."""
    place = start(Layout())
    actor = engine(directory, place, max_sequence_tokens=512)
    batch = random_batch(VOCAB, [(len(prompt), len(completion.token_ids)) for prompt, completion in segments])
    for number, (prompt, completion) in enumerate(segments):
        batch.samples[number] = Sample(number, prompt, completion)
    batch = replace(batch, own_lengths=np.array([int(completion.own.sum()) for _, completion in segments]))
    with actor.present(training=False):
        results, _ = actor.forward(batch, planned(batch, Layout(), sequences=1))
    return [results["logprobs"][number].numpy() for number in range(len(segments))]


@pytest.mark.parametrize("family", ["qwen3", *(pytest.param(family, marks=pytest.mark.nightly) for family in OTHERS)])
def test_trainer_and_engine_agree(engine_process: ProcessPoolExecutor, tmp_path: Path, family: str) -> None:
    model = save_model(tmp_path / "model", family.removesuffix("_text"), False, 0, vocab=VOCAB)
    segments = engine_process.submit(talks, model).result(300)
    assert sum(int(completion.own.sum()) for _, completion in segments) > 40
    (trainer_logprobs,) = run_ranks(computes, 1, str(model), segments)
    for (_, completion), logprobs in zip(segments, trainer_logprobs, strict=True):
        np.testing.assert_allclose(completion.logprobs[completion.own], logprobs, atol=1e-4)


def asks_for_a_group(model: Path) -> tuple[list[int], list[list[int]]]:
    """Tokens that each completion of a prompt found in the cache, and what was sampled."""
    from vllm import SamplingParams

    prompt: Any = {"prompt_token_ids": list(range(2, 47))}
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    outputs = open_engine(model, enable_prefix_caching=True).generate([prompt] * 4, sampling, use_tqdm=False)
    return [output.num_cached_tokens or 0 for output in outputs], [list(output.outputs[0].token_ids) for output in outputs]


def test_a_group_shares_a_prompt_that_is_shorter_than_vllms_blocks(
    engine_process: ProcessPoolExecutor, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path, "llama", head_dim=32)
    cached, sampled = engine_process.submit(asks_for_a_group, model).result(300)
    assert cached == [0, 32, 32, 32]
    assert sampled == [sampled[0]] * 4, "the first one computed all of its prompt"
