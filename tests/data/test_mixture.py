"""Mixtures keep their shares, curricula keep their bounds, and both resume bit for bit from a saved state."""

import json
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.prompts import Curriculum, PromptStream
from megarl.recipe.data_section import CurriculumSection, DataSection
from tests.data.test_prompts import as_tuples, byte_tokenizer

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of 1 to 5 rows; each row names its file and number."""
    folder = tmp_path_factory.mktemp("parts")
    for size in range(1, 6):
        rows = [{"q": f"{size}:{row}", "a": row} for row in range(size)]
        (folder / f"{size}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def stream(files, parts, seed=3, curriculum=None, shuffle=True):
    """Return a stream over parts of (size of the file, weight)."""
    given = [
        {"kind": "jsonl", "path": f"{files}/{size}.jsonl", "prompt_field": "q", "answer_field": "a", "weight": weight}
        for size, weight in parts
    ]
    prompts = {"kind": "mixture", "parts": given} if len(given) > 1 else given[0] | {"weight": None}
    data = {"prompts": prompts, "max_prompt_tokens": 9, "chat_template": False, "shuffle": shuffle}
    return PromptStream(DataSection.model_validate(data | {"curriculum": curriculum}), seed, TOKENIZER)


def learn(prompt_stream, prompts):
    """Give the stream a group of two for each prompt; the pass rate depends on the prompt and its position."""
    rewards = [[(prompt.index + ord(prompt.question[0])) % 3 > 0, prompt.index % 2] for prompt in prompts]
    valid = [[prompt.index % 7 > 0] * 2 for prompt in prompts]
    prompt_stream.learn(prompts, np.array(rewards, float).ravel(), np.array(valid).ravel())


PARTS = st.lists(st.tuples(st.integers(1, 5), st.floats(0.01, 100)), min_size=1, max_size=5)
CURRICULA = st.none() | st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(1, 5)).map(
    lambda drawn: {"low": min(drawn[:2]), "high": max(drawn[:2]), "revisit": drawn[2]}
)


@given(PARTS, CURRICULA, st.integers(0, 9), st.lists(st.integers(1, 9), min_size=2, max_size=8), st.data())
@settings(max_examples=40)
def test_a_stream_resumes_bit_for_bit_from_a_saved_state(files, parts, curriculum, seed, steps, data):
    stop = data.draw(st.integers(1, len(steps) - 1))
    whole = stream(files, parts, seed, curriculum)
    for number in steps[:stop]:
        learn(whole, whole.take(number))
    saved = pickle.dumps(whole.state())
    resumed = stream(files, parts, seed, curriculum)
    resumed.restore(pickle.loads(saved))
    for number in steps[stop:]:
        ours, theirs = whole.take(number), resumed.take(number)
        assert as_tuples(ours) == as_tuples(theirs)
        assert [prompt.origin for prompt in ours] == [prompt.origin for prompt in theirs]
        learn(whole, ours)
        learn(resumed, theirs)
    assert whole.state() == resumed.state() and whole.metrics() == resumed.metrics()
    assert pickle.dumps(pickle.loads(saved)) == saved, "restoring a state does not change it"


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0.01, 100)), min_size=2, max_size=5), st.integers(1, 300))
@settings(max_examples=40)
def test_every_prefix_of_a_mixture_keeps_the_shares(files, parts, number):
    taken = Counter(prompt.origin[0] for prompt in stream(files, parts).take(number))
    total = sum(weight for _, weight in parts)
    for part, (_, weight) in enumerate(parts):
        off = taken[part] - number * weight / total
        assert -(len(parts) - 1) - 1e-9 <= off < 1 + 1e-9, (part, off)


def test_each_part_has_its_own_epochs(files):
    mixed = stream(files, [(2, 1.0), (5, 1.0)])
    prompts = mixed.take(40)
    for part, size in ((0, 2), (1, 5)):
        questions = [prompt.question for prompt in prompts if prompt.origin[0] == part]
        assert len(questions) == 20
        epochs = [tuple(questions[first : first + size]) for first in range(0, 20, size)]
        assert all(sorted(epoch) == [f"{size}:{row}" for row in range(size)] for epoch in epochs)
        assert len(set(epochs)) > 1, "every epoch has its own order"
    assert mixed.metrics()["data/part_0_epochs"] == 10 and mixed.metrics()["data/part_1_epochs"] == 4
    assert as_tuples(stream(files, [(2, 1.0), (5, 1.0)], seed=4).take(40)) != as_tuples(prompts)
    assert [prompt.index for prompt in prompts] == list(range(40))


def test_a_state_of_other_rows_is_refused(files):
    saved = stream(files, [(4, 1.0)]).state()
    with pytest.raises(ValueError, match="the 5 rows from .*5.jsonl, line 1 on are not the 4 that the checkpoint"):
        stream(files, [(5, 1.0)]).restore(saved)
    with pytest.raises(ValueError, match="the 4 rows .* are not the 4 that the checkpoint"):
        stream(files, [(4, 1.0)]).restore({"position": 0, "parts": [saved["parts"][0] | {"checksum": 1}]})


def test_a_row_outside_the_bounds_is_skipped_and_comes_back():
    curriculum = Curriculum(CurriculumSection(low=0.25, high=0.75, pass_reward=0.5, revisit=2))
    turns = {}
    for row, rewards in ((0, [0.4, 0.1]), (1, [0.5, 0.0]), (2, [1.0, 2.0]), (3, [])):
        curriculum.learn(row, np.array(rewards, np.float32))
        turns[row] = [curriculum.skips(row) for _ in range(7)]
    out = [True, True, False, True, True, False, True]
    assert turns == {0: out, 1: [False] * 7, 2: out, 3: [False] * 7}
    assert curriculum.rates == {0: 0.0, 1: 0.5, 2: 1.0} and curriculum.num_in_bounds == 1
    curriculum.learn(2, np.array([0.0, 1.0], np.float32))
    assert not curriculum.skips(2)


def test_a_stream_takes_rows_in_the_bounds_and_counts_skips(files):
    prompts = stream(files, [(5, 1.0)], curriculum={"low": 0.4, "high": 0.6, "revisit": 3}, shuffle=False)
    first = prompts.take(5)
    rates = {0: [0, 0], 1: [1, 0], 2: [1, 1], 3: [1, 0], 4: [0, 0]}
    valid = np.ones(10, bool)
    valid[8:] = False  # the rate of row 4 stays unknown
    prompts.learn(first, np.array([rates[prompt.origin[1]] for prompt in first], float).ravel(), valid)
    assert [prompt.origin[1] for prompt in prompts.take(9)] == [1, 3, 4] * 3
    assert [prompt.origin[1] for prompt in prompts.take(5)] == [0, 1, 2, 3, 4], "all rows come back"
    metrics = prompts.metrics()
    assert metrics["data/num_passed_over"] == 6 and metrics["data/epochs"] == 5
    assert metrics["data/num_with_pass_rate"] == 4 and metrics["data/num_in_bounds"] == 2


def test_a_stream_without_rows_in_the_bounds_still_has_a_next_prompt(files):
    prompts = stream(files, [(3, 1.0)], curriculum={"low": 0.4, "high": 0.6, "revisit": 5})
    prompts.learn(prompts.take(3), np.zeros(6), np.ones(6, bool))
    assert {prompt.origin[1] for prompt in prompts.take(3)} == {0, 1, 2}
    assert prompts.metrics()["data/num_passed_over"] == 15
