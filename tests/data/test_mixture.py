"""Mixtures keep their shares, curricula their bounds, and both go on bit for bit from a saved state."""

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
    """Files of 1 to 5 rows, which name themselves."""
    folder = tmp_path_factory.mktemp("parts")
    for size in range(1, 6):
        rows = [{"q": f"{size}:{row}", "a": row} for row in range(size)]
        (folder / f"{size}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def stream(files, parts, seed=3, curriculum=None, shuffle=True):
    """Of (size of a file, weight) each."""
    given = [
        {"kind": "jsonl", "path": f"{files}/{size}.jsonl", "prompt_field": "q", "answer_field": "a", "weight": weight}
        for size, weight in parts
    ]
    prompts = {"kind": "mixture", "parts": given} if len(given) > 1 else given[0] | {"weight": None}
    data = {"prompts": prompts, "max_prompt_tokens": 9, "chat_template": False, "shuffle": shuffle}
    return PromptStream(DataSection.model_validate(data | {"curriculum": curriculum}), seed, TOKENIZER)


def learn(one, prompts):
    """A group of two for each prompt, whose pass rate is a function of the prompt and of the time."""
    rewards = [[(prompt.index + ord(prompt.question[0])) % 3 > 0, prompt.index % 2] for prompt in prompts]
    valid = [[prompt.index % 7 > 0] * 2 for prompt in prompts]
    one.learn(prompts, np.array(rewards, float).ravel(), np.array(valid).ravel())


PARTS = st.lists(st.tuples(st.integers(1, 5), st.floats(0.01, 100)), min_size=1, max_size=5)
CURRICULA = st.none() | st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(1, 5)).map(
    lambda one: {"low": min(one[:2]), "high": max(one[:2]), "revisit": one[2]}
)


@given(PARTS, CURRICULA, st.integers(0, 9), st.lists(st.integers(1, 9), min_size=2, max_size=8), st.data())
@settings(max_examples=40)
def test_a_stream_goes_on_from_a_saved_state_bit_for_bit(files, parts, curriculum, seed, steps, data):
    stop = data.draw(st.integers(1, len(steps) - 1))
    whole = stream(files, parts, seed, curriculum)
    for number in steps[:stop]:
        learn(whole, whole.take(number))
    saved = pickle.dumps(whole.state())
    resumed = stream(files, parts, seed, curriculum)
    resumed.restore(pickle.loads(saved))
    for number in steps[stop:]:
        ours, theirs = whole.take(number), resumed.take(number)
        assert as_tuples(ours) == as_tuples(theirs) and [one.origin for one in ours] == [one.origin for one in theirs]
        learn(whole, ours)
        learn(resumed, theirs)
    assert whole.state() == resumed.state() and whole.metrics() == resumed.metrics()
    assert pickle.dumps(pickle.loads(saved)) == saved, "a state is not changed by whoever restores it"


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0.01, 100)), min_size=2, max_size=5), st.integers(1, 300))
@settings(max_examples=40)
def test_every_prefix_of_a_mixture_keeps_the_shares(files, parts, number):
    taken = Counter(prompt.origin[0] for prompt in stream(files, parts).take(number))
    total = sum(weight for _, weight in parts)
    for part, (_, weight) in enumerate(parts):
        off = taken[part] - number * weight / total
        assert -(len(parts) - 1) - 1e-9 <= off < 1 + 1e-9, (part, off)


def test_each_part_has_epochs_of_its_own(files):
    mixed = stream(files, [(2, 1.0), (5, 1.0)])
    prompts = mixed.take(40)
    for part, size in ((0, 2), (1, 5)):
        own = [prompt.question for prompt in prompts if prompt.origin[0] == part]
        assert len(own) == 20
        epochs = [tuple(own[first : first + size]) for first in range(0, 20, size)]
        assert all(sorted(epoch) == [f"{size}:{row}" for row in range(size)] for epoch in epochs)
        assert len(set(epochs)) > 1, "every epoch has an order of its own"
    assert mixed.metrics()["data/part_0_epochs"] == 10 and mixed.metrics()["data/part_1_epochs"] == 4
    assert as_tuples(stream(files, [(2, 1.0), (5, 1.0)], seed=4).take(40)) != as_tuples(prompts)
    assert [prompt.index for prompt in prompts] == list(range(40))


def test_a_state_of_other_rows_is_refused(files):
    saved = stream(files, [(4, 1.0)]).state()
    with pytest.raises(ValueError, match="the 5 rows from .*5.jsonl, line 1 on are not the 4 that the checkpoint"):
        stream(files, [(5, 1.0)]).restore(saved)
    with pytest.raises(ValueError, match="the 4 rows .* are not the 4 that the checkpoint"):
        stream(files, [(4, 1.0)]).restore({"position": 0, "parts": [saved["parts"][0] | {"checksum": 1}]})


def test_a_row_out_of_bounds_is_passed_over_and_comes_back():
    one = Curriculum(CurriculumSection(low=0.25, high=0.75, pass_reward=0.5, revisit=2))
    turns = {}
    for row, rewards in ((0, [0.4, 0.1]), (1, [0.5, 0.0]), (2, [1.0, 2.0]), (3, [])):
        one.learn(row, np.array(rewards, np.float32))
        turns[row] = [one.passes_over(row) for _ in range(7)]
    out = [True, True, False, True, True, False, True]
    assert turns == {0: out, 1: [False] * 7, 2: out, 3: [False] * 7}
    assert one.rates == {0: 0.0, 1: 0.5, 2: 1.0} and one.num_in_bounds == 1
    one.learn(2, np.array([0.0, 1.0], np.float32))
    assert not one.passes_over(2)


def test_a_stream_takes_what_is_in_bounds_and_says_so(files):
    one = stream(files, [(5, 1.0)], curriculum={"low": 0.4, "high": 0.6, "revisit": 3}, shuffle=False)
    first = one.take(5)
    rates = {0: [0, 0], 1: [1, 0], 2: [1, 1], 3: [1, 0], 4: [0, 0]}
    valid = np.ones(10, bool)
    valid[8:] = False  # nothing is known of row 4
    one.learn(first, np.array([rates[prompt.origin[1]] for prompt in first], float).ravel(), valid)
    assert [prompt.origin[1] for prompt in one.take(9)] == [1, 3, 4] * 3
    assert [prompt.origin[1] for prompt in one.take(5)] == [0, 1, 2, 3, 4], "all come back"
    figures = one.metrics()
    assert figures["data/num_passed_over"] == 6 and figures["data/epochs"] == 5
    assert figures["data/num_with_pass_rate"] == 4 and figures["data/num_in_bounds"] == 2


def test_where_nothing_is_in_bounds_there_is_still_a_next_prompt(files):
    one = stream(files, [(3, 1.0)], curriculum={"low": 0.4, "high": 0.6, "revisit": 5})
    first = one.take(3)
    one.learn(first, np.zeros(6), np.ones(6, bool))
    assert {prompt.origin[1] for prompt in one.take(3)} == {0, 1, 2}
    assert one.metrics()["data/num_passed_over"] == 15
