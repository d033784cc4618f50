"""Prompts from files and generators: accepted rows, refused rows, rendering, the order of a stream, and the records of a
step. Mixtures keep their shares, curricula keep their bounds, and both resume bit for bit from a saved state."""

import json
import pickle
import subprocess
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megarl.data.prompts import PromptStream
from megarl.data.sample import Completion, Sample
from megarl.data.sources import BadRows, load_rows
from megarl.data.tokenizer import Observations, load_tokenizer, prompt_tokenizer, render_questions, stop_token_ids
from megarl.recipe import load_recipe
from megarl.recipe.data_section import DataSection, FilePromptsSection, ReasoningGymPromptsSection
from megarl.telemetry.run_directory import RunDirectory

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|turn_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|turn_end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def byte_tokenizer(chat_template=CHAT, end="<|end|>", special=SPECIAL, merges=()):
    """Return a real fast tokenizer with a token per byte and per merge of two, an end token, and a chat template with other
    special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = chat_template
    return tokenizer


def jsonl(path, kind="jsonl"):
    return FilePromptsSection(kind=kind, path=str(path), prompt_field="prompt", answer_field="answer")


def gym(task="chain_sum", size=8, seed=None, **options):
    return ReasoningGymPromptsSection(kind="reasoning_gym", task=task, size=size, seed=seed, options=options)


def rows_of(source, seed, bad=None, **changes):
    return load_rows(source, seed, section(source, **changes), "data.prompts", bad or BadRows("stop"))


def section(prompts, **changes):
    return DataSection(**({"prompts": prompts, "max_prompt_tokens": 200, "chat_template": False} | changes))


@pytest.fixture
def sums(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} + 1 =", "answer": n + 1}) + "\n" for n in range(10)))
    return path


def test_jsonl_and_parquet_give_the_same_rows(tmp_path, sums):
    rows = rows_of(jsonl(sums), seed=0)
    assert [(row.question, row.answer) for row in rows[:2]] == [("0 + 1 =", "1"), ("1 + 1 =", "2")]
    table = pyarrow.Table.from_pylist([row.fields for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "sums.parquet")
    assert rows_of(jsonl(tmp_path / "sums.parquet", "parquet"), seed=0) == rows


def test_missing_empty_and_mistaken_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"data.prompts.path is '.*nowhere.jsonl', which is no file"):
        rows_of(jsonl(tmp_path / "nowhere.jsonl"), seed=0)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ValueError, match=r"data.prompts has no rows \(.*empty.jsonl\)"):
        rows_of(jsonl(empty), seed=0)
    with pytest.raises(ValueError, match=r"empty.jsonl: not a Parquet file"):
        rows_of(jsonl(empty, "parquet"), seed=0)


def test_generated_rows_follow_their_own_seed_or_the_runs_seed_in_every_process(monkeypatch):
    """Python draws the order of sets anew in each process, so a resumed run would get other rows than its checkpoint."""

    def rows(run_seed, hash_seed, seed=None):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        return rows_of(gym("ransom_note", size=3, seed=seed), run_seed)

    first = rows(1, "1")
    assert len(first) == 3 and first == rows(2, "2", seed=1) != rows(2, "2")


DATED = "{{ strftime_now('%d %B %Y') }}{% if thinking is defined and not thinking %} brief{% endif %}|" + CHAT


def test_a_chat_template_writes_the_day_of_a_runs_first_start(tmp_path):
    """A run that resumes after midnight, or in another time zone, has the same prompts."""
    byte_tokenizer(DATED).save_pretrained(tmp_path)
    run = RunDirectory(tmp_path / "run")
    recipe = load_recipe(Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml")
    run.prepare(recipe, None)
    first = run.first_start
    (run.path / "first_start.txt").write_text("2026-01-31T23:59:58\n")
    run.prepare(recipe, None)  # another start of the run
    assert abs((datetime.now() - first).total_seconds()) < 600 and run.first_start == datetime(2026, 1, 31, 23, 59, 58)
    tokenizer = prompt_tokenizer(str(tmp_path), {"thinking": False}, run.first_start)
    (ids,) = render_questions(tokenizer, ["1+1"], None, None, True)
    assert tokenizer.decode(ids) == "31 January 2026 brief|<|user|>1+1<|turn_end|><|assistant|>"
    data = section(jsonl("none"), chat_template=True)
    answer = Observations(tokenizer, data, 300).prompt([{"role": "user", "content": "1+1"}])
    assert answer.tolist() == ids, "an environment's own prompts are rendered in the same way"
    with pytest.raises(ValueError, match="data.template_options.thinkin = False: the model's chat template does not read"):
        prompt_tokenizer(str(tmp_path), {"thinkin": False}, first)


def test_a_lone_surrogate_from_an_environment_is_replaced():
    """A tokenizer refuses lone surrogates, and a policy can make its tool return them."""
    tokenizer = byte_tokenizer()
    seen = Observations(tokenizer, section(jsonl("none"), chat_template=True), 300)
    ids = seen.behind(-1, [{"role": "tool", "content": "a \ud83d b \U0001f600"}])
    assert "<|tool|>a \ufffd b \U0001f600<|turn_end|>" in tokenizer.decode(ids)


def test_a_refusal_of_reasoning_gym_names_the_recipe_key():
    with pytest.raises(ValueError, match=r"data.prompts.task is 'chain_sums'.*did you mean 'chain_sum'"):
        rows_of(gym("chain_sums"), seed=0)
    with pytest.raises(ValueError, match=r"data.prompts.options is .*refuses: min_terms must be positive"):
        rows_of(gym(min_terms=0), seed=0)


def test_templates_render_the_text_that_the_model_expects():
    tokenizer = byte_tokenizer()

    def text(*arguments):
        (ids,) = render_questions(tokenizer, ["1+1"], *arguments)
        return tokenizer.decode(ids)

    assert text(None, None, False) == "1+1"
    assert text("Be short.", r"Put {question} in \boxed{}", False) == "Be short.\n\nPut 1+1 in \\boxed{}"
    assert text(None, None, True) == "<|user|>1+1<|turn_end|><|assistant|>"
    assert text("S", "{question}=", True) == "<|system|>S<|turn_end|><|user|>1+1=<|turn_end|><|assistant|>"
    with pytest.raises(ValueError, match="data.chat_template is true"):
        render_questions(byte_tokenizer(chat_template=None), ["1+1"], None, None, True)


def refusing(role):
    """Return a template that refuses a role."""
    refusal = "{% for m in messages %}{% if m.role == 'ROLE' %}{{ raise_exception('no role') }}{% endif %}{% endfor %}"
    return refusal.replace("ROLE", role) + CHAT


def test_a_refusal_of_a_chat_template_names_the_recipe_keys(tmp_path, sums):
    tokenizer = byte_tokenizer(refusing("system"))
    chat = section(jsonl(sums), chat_template=True)
    assert PromptStream(chat, 0, tokenizer).num_rows == 10
    message = r"refuses these messages: no role; see data.prompt_format and data.chat_template"
    for changes in ({}, {"on_bad_row": "skip"}):  # no row is at fault
        with pytest.raises(
            ValueError, match=message + r", or leave data.system_prompt \('Be brief.'\) out: its role is system"
        ):
            PromptStream(chat.model_copy(update={"system_prompt": "Be brief.", **changes}), 0, tokenizer)
    with pytest.raises(ValueError, match=f"{message}$"):
        PromptStream(chat, 0, byte_tokenizer(refusing("user")))
    for needs_turns in (lambda other: stop_token_ids(str(tmp_path), other), lambda other: Observations(other, chat, 300)):
        with pytest.raises(ValueError, match=f"{message}$"):
            needs_turns(byte_tokenizer(refusing("assistant")))


def test_a_start_token_is_written_once_by_the_template_or_the_tokenizer():
    tokenizer = byte_tokenizer("<|system|>" + CHAT)
    start = tokenizer.convert_tokens_to_ids("<|system|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", start)]
    )
    for chat in (True, False):
        (ids,) = render_questions(tokenizer, ["1+1"], None, None, chat)
        assert ids[0] == start and ids.count(start) == 1
    tokenizer.bos_token = "<|system|>"
    (ids,) = render_questions(tokenizer, ["<|system|>1+1"], None, None, False)
    assert ids.count(start) == 1, "a text that is already rendered begins with the start token"


def test_stop_tokens_come_from_all_three_sources(tmp_path, caplog):
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    end, turn_end = tokenizer.convert_tokens_to_ids(["<|end|>", "<|turn_end|>"])
    assert stop_token_ids(str(tmp_path), load_tokenizer(str(tmp_path))) == tuple(sorted({end, turn_end}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert stop_token_ids(str(tmp_path), tokenizer) == tuple(sorted({7, 9, end, turn_end}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 5}))
    assert 5 not in stop_token_ids(str(tmp_path), tokenizer), "as in vLLM, config.json counts only without the other file"
    with caplog.at_level("WARNING"):
        assert stop_token_ids(str(tmp_path), tokenizer, num_tokens=9) == (7,), "vLLM refuses tokens without an embedding"
    assert "generation_config.json names the end token 9; left out" in caplog.text
    with pytest.raises(ValueError, match="names no end token but .*the embedding has 3 rows"):
        stop_token_ids(str(tmp_path), tokenizer, num_tokens=3)
    (tmp_path / "generation_config.json").unlink()
    assert stop_token_ids(str(tmp_path), tokenizer) == tuple(sorted({5, end, turn_end}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert stop_token_ids(str(tmp_path), tokenizer) == tuple(sorted({2, end, turn_end})), (
        "the default of Llama in transformers"
    )
    (tmp_path / "config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ValueError, match="config.json: eos_token_id = '</s>' must be a token id"):
        stop_token_ids(str(tmp_path), tokenizer)
    (tmp_path / "generation_config.json").unlink()
    nothing = byte_tokenizer(chat_template=None)
    nothing.eos_token = None
    with pytest.raises(ValueError, match="names no end token"):
        stop_token_ids(str(tmp_path), nothing)


def test_a_directory_without_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"model.path is '.*', from which no tokenizer loads"):
        load_tokenizer(str(tmp_path))


def as_tuples(prompts):
    return [(p.index, p.question, p.answer, p.token_ids.tolist()) for p in prompts]


@pytest.mark.parametrize(("key", "above"), [("data.prompts", "data"), ("warmup.sft.data.prompts", "warmup.sft.data")])
def test_prompts_over_the_limit_are_dropped_and_counted(tmp_path, caplog, key, above):
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * n, "answer": "1"}) + "\n" for n in (3, 9, 5, 12)))
    stream = PromptStream(section(jsonl(path), max_prompt_tokens=5), 0, byte_tokenizer(), key=key)
    assert (stream.num_rows, stream.num_dropped) == (2, 2)
    assert f"{key}: 2 of 4 rows left out, longer than {above}.max_prompt_tokens = 5" in caplog.text
    first = stream.take(1)[0]
    assert first.token_ids.dtype == np.int32 and len(first.token_ids) in (3, 5)
    with pytest.raises(ValueError, match=r"max_prompt_tokens is 2, but the shortest of the 4 rows of data.prompts has 3"):
        PromptStream(section(jsonl(path), max_prompt_tokens=2), 0, byte_tokenizer())


@pytest.mark.parametrize("on_bad_row", ["stop", "skip"])
def test_a_prompt_over_the_limit_ends_the_run_if_the_recipe_says_so(tmp_path, on_bad_row):
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * n, "answer": "1"}) + "\n" for n in (3, 9)))
    settings = {"max_prompt_tokens": 5, "on_long_prompt": "stop", "on_bad_row": on_bad_row}
    message = r"mixed.jsonl, line 2: field 'prompt': .*'xxxxxxxxx'.* has 9 tokens and data.max_prompt_tokens is 5; .*: skip"
    with pytest.raises(ValueError, match=message):
        PromptStream(section(jsonl(path), **settings), 0, byte_tokenizer())


def test_an_empty_prompt_is_a_bad_row(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in ("x", "")))
    with pytest.raises(ValueError, match=r"empty.jsonl, line 2: field 'prompt' is empty"):
        PromptStream(section(jsonl(path)), 0, byte_tokenizer())
    stream = PromptStream(section(jsonl(path), on_bad_row="skip"), 0, byte_tokenizer())
    assert (stream.num_rows, stream.num_dropped, stream.num_bad_rows) == (1, 0, 1)
    path.write_text(json.dumps({"prompt": "x", "answer": "1"}) + "\n")
    with pytest.raises(ValueError, match="empty.jsonl, line 1: field 'prompt': the prompt has no tokens"):
        PromptStream(section(jsonl(path), chat_template=True), 0, byte_tokenizer("{{ '' }}"))


@pytest.mark.parametrize("name", ["quickstart", "ppo-tiny", "lora-tiny"])
def test_a_shipped_recipe_has_prompts_that_fit(name, monkeypatch):
    """The recipe uses the model that the set-up makes."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    recipe = load_recipe(f"recipes/{name}.yaml")
    assert recipe.data.prompts.kind == "reasoning_gym"
    prompts = PromptStream(recipe.data, recipe.run.seed, load_tokenizer(recipe.model.path))
    assert prompts.num_dropped == 0 and len(list(prompts.every())) == recipe.data.prompts.size


def test_records_need_only_numpy():
    heavy = "{'torch', 'transformers', 'datasets', 'ray', 'pydantic'}"
    code = f"import sys, megarl.data.sample; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


def test_a_completion_has_one_log_probability_and_one_version_per_token():
    ids = np.arange(3, dtype=np.int32)
    with pytest.raises(ValueError, match="3 token ids but 2 logprobs"):
        Completion(ids, np.zeros(2, dtype=np.float32), "stop", np.zeros(3, dtype=np.int64))
    with pytest.raises(ValueError, match="3 token ids but 1 versions"):
        Completion(ids, np.zeros(3, dtype=np.float32), "stop", np.zeros(1, dtype=np.int64))
    completion = Completion(ids, np.zeros(3, dtype=np.float32), "stop", np.array([4, 5, 5]))
    assert (completion.first_version, completion.last_version) == (4, 5)
    assert Sample(0, np.arange(4, dtype=np.int32), completion).num_tokens == 7


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


@pytest.mark.parametrize("sizes", [[5], [2, 5]])
def test_each_part_has_its_own_epochs_with_every_row_once(files, sizes):
    parts = [(size, 1.0) for size in sizes]
    taken = stream(files, parts)
    prompts = taken.take(40)
    for part, size in enumerate(sizes):
        questions = [prompt.question for prompt in prompts if prompt.origin[0] == part]
        assert len(questions) == 40 // len(sizes)
        epochs = [tuple(questions[first : first + size]) for first in range(0, len(questions), size)]
        assert all(sorted(epoch) == [f"{size}:{row}" for row in range(size)] for epoch in epochs)
        assert len(set(epochs)) > 1, "every epoch has its own order"
    counts = {"data/part_0_epochs": 10, "data/part_1_epochs": 4} if len(sizes) > 1 else {"data/epochs": 8}
    assert counts.items() <= taken.metrics().items()
    assert as_tuples(stream(files, parts, seed=4).take(40)) != as_tuples(prompts)
    assert [prompt.index for prompt in prompts] == list(range(40))


def test_a_state_of_other_rows_is_refused(files):
    saved = stream(files, [(4, 1.0)]).state()
    with pytest.raises(ValueError, match="the 5 rows from .*5.jsonl, line 1 on are not the 4 that the checkpoint"):
        stream(files, [(5, 1.0)]).restore(saved)
    with pytest.raises(ValueError, match="the 4 rows .* are not the 4 that the checkpoint"):
        stream(files, [(4, 1.0)]).restore({"position": 0, "parts": [saved["parts"][0] | {"checksum": 1}]})


def test_a_stream_takes_rows_in_the_bounds_and_counts_skips(files):
    curriculum = {"low": 0.5, "high": 0.6, "revisit": 3, "pass_reward": 0.9}
    prompts = stream(files, [(5, 1.0)], curriculum=curriculum, shuffle=False)
    first = prompts.take(5)
    rewards = {0: [0.8, 0], 1: [0.9, 0], 2: [0.9, 1], 3: [2, 0.1], 4: [0, 0]}
    valid = np.ones(10, bool)
    valid[8:] = False  # the rate of row 4 stays unknown
    prompts.learn(first, np.array([rewards[prompt.origin[1]] for prompt in first], np.float32).ravel(), valid)
    assert [prompt.origin[1] for prompt in prompts.take(9)] == [1, 3, 4] * 3
    assert [prompt.origin[1] for prompt in prompts.take(5)] == [0, 1, 2, 3, 4], "all rows come back"
    metrics = prompts.metrics()
    assert metrics["data/num_passed_over"] == 6 and metrics["data/epochs"] == 5
    assert metrics["data/num_with_pass_rate"] == 4 and metrics["data/num_in_bounds"] == 2
    prompts.learn(first[:1], np.array([0, 1], np.float32), np.ones(2, bool))
    assert [prompt.origin[1] for prompt in prompts.take(8)] == [0, 1, 3, 4] * 2, "a row whose rate changes is back"


def test_a_stream_without_rows_in_the_bounds_still_has_a_next_prompt(files):
    prompts = stream(files, [(3, 1.0)], curriculum={"low": 0.4, "high": 0.6, "revisit": 5})
    prompts.learn(prompts.take(3), np.zeros(6), np.ones(6, bool))
    assert {prompt.origin[1] for prompt in prompts.take(3)} == {0, 1, 2}
    assert prompts.metrics()["data/num_passed_over"] == 15
