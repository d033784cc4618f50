"""Unusable rows end a run by name, or are left out and counted; the allowed content of fields and data sets."""

import gzip
import json
from decimal import Decimal
from functools import partial

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megarl.data.prompts import PromptStream
from megarl.data.sources import BadRows
from megarl.recipe.data_section import HuggingFacePromptsSection
from megarl.recipe.reward_section import CodeRewardSection, VerifierSection
from megarl.reward.verifiers import check_answer, load_terms
from tests.data.test_prompts import byte_tokenizer, jsonl, rows_of, section
from tests.recipe_cases import make_folder, refusals

CHAT = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "+1"}]
REFUSAL = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
STRICT = "{% for m in messages %}" + REFUSAL + "{{ m.content }};{% endfor %}"


def lines(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return jsonl(path)


def good(number, answer="1"):
    return {"prompt": f"q{number}", "answer": answer}


def test_bad_rows_are_left_out_and_counted_if_the_recipe_says_so(tmp_path, caplog):
    """Three good rows, and a row with each kind of fault."""
    bad = ['{"prompt": ', ["no fields"], {"prompt": "x"}, {"prompt": None, "answer": "1"}, {"prompt": "y", "answer": [1]}]
    source = lines(tmp_path, good(0), *bad, good(1), {"prompt": "judge", "answer": "seven"}, good(2))
    judge = partial(check_answer, load_terms([VerifierSection(kind="last_number")]))
    stream = PromptStream(section(source, on_bad_row="skip"), 0, byte_tokenizer(), 300, judge)
    assert {prompt.question for prompt in stream.take(3)} == {"q0", "q1", "q2"}
    assert stream.metrics() == {"data/num_rows": 3, "data/num_dropped": 0, "data/num_bad_rows": 6, "data/epochs": 1.0}
    assert "line 2: not JSON" in caplog.text and "(more are only counted)" in caplog.text
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "a", "answer": ', r"rows.jsonl, line 2: not JSON"),
        ("[3]", r"line 2: a row is an object"),
        ({"prompt": "a", "answer": None}, r"line 2: field 'answer' is None"),
        ({"prompt": " ", "answer": "b"}, r"line 2: field 'prompt' is empty"),
        ({"prompt": "x", "answers": "1"}, r"line 2: no field 'answer' .*prompts.answer_field.*did you mean 'answers'"),
        ({"prompt": {"a": 1}, "answer": "1"}, r"line 2: field 'prompt' is {'a': 1}; a text or a number"),
        ({"prompt": "x", "answer": ["y"]}, r"line 2: field 'answer' is \['y'\].*data.answer_format: json"),
        ({"prompt": "x", "answer": "seven"}, r"line 2: field 'answer': .* prompt 1 \('x'\) is 'seven'"),
        ({"prompt": "\u00fc", "answer": "1"}, r"line 2: field 'prompt': .* token 12\d, .* model .* knows tokens 0 to 99"),
    ],
)  # fmt: skip
def test_a_bad_row_ends_a_run_before_it_starts(tmp_path, row, message):
    judge = partial(check_answer, load_terms([VerifierSection(kind="last_number")]))
    source = lines(tmp_path, good(0), row)
    with pytest.raises(ValueError, match=message + ".*; or leave such rows out: data.on_bad_row: skip"):
        PromptStream(section(source), 0, byte_tokenizer(), 100, judge)
    assert PromptStream(section(source, on_bad_row="skip"), 0, byte_tokenizer(), 100, judge).num_bad_rows == 1


def test_data_with_only_bad_rows_is_refused_with_the_first_fault(tmp_path):
    with pytest.raises(ValueError, match="data.prompts has no rows .*all 2 that it had are left out, the first: .*line 1"):
        PromptStream(section(lines(tmp_path, "[]", "[]"), on_bad_row="skip"), 0, byte_tokenizer())
    with pytest.raises(ValueError, match="no rows that can be used: 1 are left out, the first: .*the prompt has token"):
        PromptStream(section(lines(tmp_path, good(0)), on_bad_row="skip"), 0, byte_tokenizer(), 3)


def test_token_ids_stay_unchanged(tmp_path):
    tokenizer = byte_tokenizer()
    (ids,) = tokenizer(["1+1"])["input_ids"]
    rows = [{"prompt": ids, "answer": "2"}, {"prompt": [1, "2"], "answer": "2"}, {"prompt": [True], "answer": "2"}]
    rows += [{"prompt": [], "answer": "2"}, {"prompt": [5, -1], "answer": "2"}, {"prompt": [5, 300], "answer": "2"}]
    settings = {"prompt_format": "token_ids", "chat_template": True, "on_bad_row": "skip"}
    stream = PromptStream(section(lines(tmp_path, *rows), **settings), 0, tokenizer, 300)
    assert (stream.num_rows, stream.num_bad_rows) == (1, 5)
    (prompt,) = stream.take(1)
    assert prompt.token_ids.tolist() == ids and prompt.token_ids.dtype == np.int32 and prompt.question == "1+1"


def test_messages_are_rendered_by_the_chat_template(tmp_path):
    rows = [{"prompt": CHAT, "answer": "3"}, {"prompt": [], "answer": "3"}, {"prompt": [{"role": "user"}], "answer": "3"}]
    rows.append({"prompt": [{"role": "tool", "content": "x"}], "answer": "3"})
    settings = {"prompt_format": "messages", "chat_template": True, "on_bad_row": "skip", "system_prompt": "S"}
    tokenizer = byte_tokenizer(STRICT)
    stream = PromptStream(section(lines(tmp_path, *rows), **settings), 0, tokenizer)
    assert (stream.num_rows, stream.num_bad_rows) == (1, 3)
    (prompt,) = stream.take(1)
    assert tokenizer.decode(prompt.token_ids) == "S;1+1;2;+1;" and prompt.question == "+1"
    with pytest.raises(ValueError, match="line 1: field 'prompt': .* chat template refuses these messages: no tools"):
        PromptStream(section(lines(tmp_path, rows[3]), **settings | {"on_bad_row": "stop"}), 0, tokenizer)


@pytest.mark.parametrize(
    ("chat", "system_prompt", "message"),
    [
        ([*CHAT, {"role": "assistant", "content": "3"}], None, "last message has the role 'assistant'.*remove it"),
        ([*CHAT, {"role": "model", "content": "3"}], None, "last message has the role 'model'"),
        ([{"role": "system", "content": "T"}, *CHAT], "S", r"system message, and data.system_prompt \('S'\) is another"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            None,
            "message 0 has the part .*image_url",
        ),
        ([CHAT[0], {"role": "user", "content": None}], None, "message 1 is .*needs a role and a content"),
    ],
)
def test_a_chat_that_is_not_a_prompt_is_a_bad_row(tmp_path, chat, system_prompt, message):
    """The policy would see the answer or two system messages, or miss a part of the question."""
    settings = {"prompt_format": "messages", "chat_template": True, "system_prompt": system_prompt}
    source = lines(tmp_path, {"prompt": chat, "answer": "3"}, {"prompt": CHAT, "answer": "3"})
    with pytest.raises(ValueError, match=f"line 1: field 'prompt': .*{message}.*on_bad_row: skip"):
        PromptStream(section(source, **settings), 0, byte_tokenizer(STRICT))
    stream = PromptStream(section(source, on_bad_row="skip", **settings), 0, byte_tokenizer(STRICT))
    assert (stream.num_rows, stream.num_bad_rows) == (1, 1)


def test_contents_may_be_parts_of_text_or_null_with_a_tool_call(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]
    # In a table every message has every field.
    chat = [call, {"role": "user", "content": parts, "tool_calls": None}]
    template = STRICT.replace(
        "{{ m.content }}", "{{ m.content }}{% if 'tool_calls' in m %}({{ m.tool_calls|length }}){% endif %}"
    )
    tokenizer = byte_tokenizer(template)
    source = lines(tmp_path, {"prompt": chat, "answer": "2"})
    (prompt,) = PromptStream(section(source, prompt_format="messages", chat_template=True), 0, tokenizer).take(1)
    assert tokenizer.decode(prompt.token_ids) == "(1);1+1;" and prompt.question == "1+1"


HALF = '{"prompt": %s, "answer": %s, "more": %s}'


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (HALF % (r'"a \ud83d"', '"1"', "[]"), "field 'prompt' has half of a character"),
        (HALF % ('"a"', r'"\udc00"', "[]"), "field 'answer' has half of a character"),
        (HALF % ('"a"', '"1"', r'[{"content": "\ud83d"}]'), "field 'more.0.content' has half of a character"),
        (r'{"prompt": "a", "answer": "1", "\udc00": 1}', r"field '\\udc00' has half of a character"),
        (HALF % ('"a"', "NaN", "[]"), "field 'answer' is nan; a text or a number"),
        (HALF % ('"a"', "1e999", "[]"), "field 'answer' is inf; a text or a number"),
        (HALF % ('"a"', '"1"', "[" * 5000 + "]" * 5000), "not JSON: maximum recursion depth"),
    ],
)
def test_values_that_only_json_accepts_are_bad_rows(tmp_path, row, message):
    """The error names the line, because a traceback does not help among a hundred thousand rows."""
    source = lines(tmp_path, good(0), row, r'{"prompt": "whole \ud83d\ude00 \u0000", "answer": "1"}')
    with pytest.raises(ValueError, match=f"rows.jsonl, line 2: {message}"):
        PromptStream(section(source), 0, byte_tokenizer())
    stream = PromptStream(section(source, on_bad_row="skip"), 0, byte_tokenizer())
    assert (stream.num_rows, stream.num_bad_rows) == (2, 1)


def test_a_table_row_with_a_text_that_is_not_utf_8_is_a_bad_row(tmp_path):
    """Arrow accepts such bytes, and its error does not name the row."""
    texts = pyarrow.array([b"good", b"half \xed\xa0\xbd"], pyarrow.binary()).view(pyarrow.string())
    table = pyarrow.table({"prompt": texts, "answer": ["1", "2"]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    for source in (jsonl(tmp_path / "rows.parquet", "parquet"), hugging_face(tmp_path / "saved")):
        with pytest.raises(ValueError, match="row 1: a text is not UTF-8"):
            rows_of(source, seed=0)
        assert [row.question for row in rows_of(source, seed=0, bad=BadRows("skip"))] == ["good"]


def test_no_digit_of_a_decimal_is_lost_also_in_a_field_of_an_object(tmp_path):
    """Otherwise a correct answer of the policy would score 0."""
    numbers = ["12345678901234567890123456789012.345600", "98765432109876543210987654321098.000000"]
    numbers += ["0.500000", "1000.000000", "0.000000"]
    texts = ["12345678901234567890123456789012.3456", "98765432109876543210987654321098", "0.5", "1000", "0"]
    rows = [{"prompt": "x", "reward_model": {"ground_truth": Decimal(text), "all": [Decimal(text)]}} for text in numbers]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")

    def answers(field, **changes):
        source = jsonl(tmp_path / "rows.parquet", "parquet").model_copy(update={"answer_field": f"reward_model.{field}"})
        return [row.answer for row in rows_of(source, seed=0, **changes)]

    assert answers("ground_truth") == texts
    assert answers("all", answer_format="json") == [f'["{texts[0]}"]', f"[{texts[1]}]", "[0.5]", "[1000.0]", "[0.0]"]
    with pytest.raises(ValueError, match="row 0: no field 'reward_model.ground_trut' .*did you mean 'ground_truth'"):
        answers("ground_trut")


def test_a_file_may_be_lines_or_an_array_in_gzip_or_utf_16(tmp_path):
    rows = [good(number) | {"more": "\u00fc\u2028"} for number in range(3)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    array = json.dumps(rows, indent=1)
    forms = [text.encode(), gzip.compress(text.encode()), text.encode("utf-16"), b"\xef\xbb\xbf" + text.encode()]
    forms += [array.encode(), b"\xef\xbb\xbf" + array.encode(), gzip.compress(array.encode()), array.encode("utf-16")]
    blank = " \n\t\r\n" * 3000 + " "
    forms += [(blank + whole).encode(form) for whole in (array, text) for form in ("utf-8", "utf-8-sig", "utf-16")]
    path = tmp_path / "rows.jsonl"
    for content in forms:
        path.write_bytes(content)
        assert [row.fields for row in rows_of(jsonl(path), seed=0)] == rows
    path.write_bytes(gzip.compress(text.encode())[:-20])
    with pytest.raises(ValueError, match="rows.jsonl: cannot be read to its end"):
        rows_of(jsonl(path), seed=0)


def test_an_answer_may_be_a_list_of_tests(tmp_path):
    tests = ["assert f(1) == 2", "assert f(2) == 3"]
    source = lines(tmp_path, good(0, tests), good(1, "assert f(0) == 1"), good(2, [3]))
    judge = partial(check_answer, load_terms([CodeRewardSection(kind="code")]))
    stream = PromptStream(section(source, answer_format="json", on_bad_row="skip"), 0, byte_tokenizer(), None, judge)
    assert {json.dumps(tests), "assert f(0) == 1"} == {prompt.answer for prompt in stream.every()}
    assert stream.num_bad_rows == 1


def hugging_face(path, **changes):
    given = {"kind": "huggingface", "path": str(path), "prompt_field": "prompt", "answer_field": "answer"}
    return HuggingFacePromptsSection(**given | changes)


def test_a_data_set_from_disk_or_from_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    whole = datasets.Dataset.from_list([good(number, number) for number in range(3)])
    whole.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": whole, "test": whole.select([2])}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "files").mkdir()
    whole.to_json(str(tmp_path / "files" / "train.jsonl"))
    for name in ("one", "splits", "files"):
        rows = rows_of(hugging_face(tmp_path / name), seed=0)
        assert [(row.question, row.answer) for row in rows] == [("q0", "0"), ("q1", "1"), ("q2", "2")], name
    assert [row.question for row in rows_of(hugging_face(tmp_path / "splits", split="test"), seed=0)] == ["q2"]
    assert len(rows_of(hugging_face(tmp_path / "files", split="train[:2]"), seed=0)) == 2
    with pytest.raises(ValueError, match=r"no split 'dev', it has \['test', 'train'\] \(data.prompts.split\)"):
        rows_of(hugging_face(tmp_path / "splits", split="dev"), seed=0)
    with pytest.raises(ValueError, match="splits, test row 0: no field 'question' .*prompt_field"):
        rows_of(hugging_face(tmp_path / "splits", split="test", prompt_field="question"), seed=0)


def test_a_missing_data_set_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="data.prompts.path is '.*empty', from which no data set loads"):
        rows_of(hugging_face(tmp_path / "empty"), seed=0)


PART = {"kind": "jsonl", "path": "qa.jsonl", "prompt_field": "q", "answer_field": "a"}
GYM = {"kind": "reasoning_gym", "task": "chain_sum", "size": 4}


@pytest.mark.parametrize(
    ("data", "key", "message"),
    [
        ({"prompts": PART | {"weight": 2.0}}, "data.prompts.weight", "there is one source"),
        ({"prompts": {"kind": "mixture", "parts": []}}, "data.prompts.parts", "at least 1 item"),
        ({"prompts": {"kind": "mixture", "parts": [PART, PART | {"path": "qa.json"}]}}, "data.prompts.parts.1.path", "not"),
        ({"prompts": {"kind": "mixture", "parts": [PART, GYM | {"task": "chain"}]}}, "data.prompts.parts.1.task", "task"),
        ({"prompts": {"kind": "mixture", "parts": [PART, GYM | {"weight": 0.0}]}}, "data.prompts.parts.1.weight", "than 0"),
        ({"prompts": {"kind": "mixture", "parts": [PART, {"kind": "json"}]}}, "data.prompts.parts.1.kind", "huggingface"),
        ({"prompts": {"kind": "huggingface", "path": "./gone", "prompt_field": "q", "answer_field": "a"}},
         "data.prompts.path", "does not exist"),
        ({"prompts": GYM, "prompt_format": "messages"}, "data.prompt_format", "makes texts"),
        ({"prompts": PART, "prompt_format": "messages", "chat_template": False}, "data.prompt_format", "chat_template"),
        ({"prompts": PART, "prompt_format": "token_ids", "system_prompt": "S"}, "data.system_prompt", "is complete"),
        ({"prompts": PART, "prompt_format": "token_ids", "prompt_template": "{question}"}, "data.prompt_template", "text"),
        ({"prompts": PART | {"answer_field": "q"}}, "data.prompts.answer_field", "the prompt is the answer"),
        ({"prompts": PART, "template_options": {"tokenize": True}}, "data.template_options", "megarl sets tokenize itself"),
        ({"prompts": PART, "template_options": {"x": 1}, "chat_template": False}, "data.template_options", "no chat"),
        ({"prompts": GYM, "curriculum": {"low": 0.9, "high": 0.1}}, "data.curriculum.high", "0.9"),
    ],
)  # fmt: skip
def test_a_wrong_source_is_a_violation(tmp_path, monkeypatch, data, key, message):
    make_folder(tmp_path, monkeypatch)
    refused = refusals(("data", {"max_prompt_tokens": 32} | data))
    assert refused.keys() == {key} and message in refused[key]


def test_a_curriculum_needs_a_verifier(tmp_path, monkeypatch):
    make_folder(tmp_path, monkeypatch)
    refused = refusals(("data.curriculum", {"low": 0.1, "high": 0.9}), ("reward", [{"kind": "model"}]))
    assert "a pass rate is read from rewards" in refused["data.curriculum"]
