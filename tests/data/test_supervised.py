"""Which tokens a supervised run trains: the assistant's turns by the model's own template, and no others."""

import json
import re
from functools import partial

import numpy as np
import pytest

from megarl.data.prompts import PromptStream, not_trained_on
from megarl.data.supervised import answer_of
from megarl.recipe.data_section import DataSection
from tests.data import test_prompts

HEAD = "{% for m in messages %}"
CHATML = HEAD + (
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\n' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = "{{ '<|begin|>' }}" + HEAD + (
    "{{ '<|start|>' + m.role + '<|end|>\n\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content | trim + '<|eot|>' }}{% endgeneration %}{% else %}{{ m.content | trim + '<|eot|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)  # fmt: skip
GEMMA = "{{ '<|begin|>' }}" + HEAD + (
    "{% if m.role == 'assistant' %}{{ '<|start|>model\n' }}{% generation %}{{ m.content | trim + '<|eot|>\n' }}"
    "{% endgeneration %}{% else %}{{ '<|start|>' + m.role + '\n' + m.content | trim + '<|eot|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>model\n' }}{% endif %}"
)  # fmt: skip
PHI = HEAD + (
    "{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>\n' }}"
    "{% if loop.last %}{{ eos_token }}{% endif %}{% endgeneration %}{% else %}{{ m.content + '<|end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
MISTRAL = "{{ '<|begin|>' }}" + HEAD + (
    "{% if m.role == 'assistant' %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)  # fmt: skip
# Shows a thought in the last turn only, as Qwen3 does.
THINKING = HEAD + (
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "gemma": GEMMA, "phi": PHI, "mistral": MISTRAL, "thinking": THINKING}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|begin|>", "<|start|>", "<|end|>", "<|eot|>", "<|assistant|>", "<|user|>")
SYSTEM = [{"role": "system", "content": "Be brief."}]
SHORT = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4"}]
ASIDE = "\nIt is\n\nsix, née 6 \U0001f600."
LONG = [*SHORT, {"role": "user", "content": "  And 3+3? "}, {"role": "assistant", "content": ASIDE}]


# Over newlines and words, so that tokens can lie across the bounds of a turn.
MERGES = [("Ċ", "Ċ"), ("i", "s"), ("Ġ", "i"), ("a", "n")]
byte_tokenizer = partial(test_prompts.byte_tokenizer, end="</s>", special=SPECIAL, merges=MERGES)


def examples(tmp_path, tokenizer, rows, **data):
    """The sequences of some rows, by the stream that a run has."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "jsonl", "path": str(file), "prompt_field": "messages"} | data.pop("source", {})
    section = {"prompts": source, "prompt_format": "messages", "max_prompt_tokens": 1, "max_tokens": 999, "shuffle": False}
    stream = PromptStream(DataSection.model_validate(section | data), 1, tokenizer)
    return [prompt.examples for prompt in stream.take(stream.num_rows)], stream


@pytest.mark.parametrize("chat", [SHORT, LONG, SYSTEM + SHORT, SYSTEM + LONG], ids=["one", "two", "system", "system two"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_are_those_of_templates_that_mark_their_answers(tmp_path, name, chat):
    """The reference renders a template with marks and reads the mask off them; megarl renders it without any marks."""
    expected = byte_tokenizer(TEMPLATES[name]).apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    plain = byte_tokenizer(re.sub(r"{% (end)?generation %}", "", TEMPLATES[name]))
    (((example,),), _) = examples(tmp_path, plain, [{"messages": chat}])
    assert example.token_ids.tolist() == expected["input_ids"]
    assert example.trained.tolist() == [bool(mark) for mark in expected["assistant_masks"]]
    assert example.trained.any() and not example.trained.all()


def test_a_sample_has_all_tokens_and_its_own_are_the_trained_ones(tmp_path):
    (((example,),), _) = examples(tmp_path, byte_tokenizer(CHATML), [{"messages": LONG}])
    sample = example.sample(7)
    assert np.array_equal(np.concatenate([sample.prompt_ids, sample.completion.token_ids]), example.token_ids)
    assert np.array_equal(sample.completion.own, example.trained[len(sample.prompt_ids) :])
    assert sample.completion.own[0] and not example.trained[: len(sample.prompt_ids)].any()


def test_texts_are_trained_whole_and_completions_without_their_prompt(tmp_path):
    tokenizer = byte_tokenizer(None)
    rows = [{"question": "2+2=", "answer": "4 is"}, {"question": "1+1=", "answer": 2}]
    plain = {"prompt_format": "text", "chat_template": False}
    (whole, _), _ = examples(tmp_path, tokenizer, rows, source={"prompt_field": "question"}, **plain)
    assert tokenizer.decode(whole[0].token_ids) == "2+2=</s>" and whole[0].trained.all()
    assert len(whole[0].sample(0).prompt_ids) == 1, "nothing predicts the first token"
    fields = {"prompt_field": "question", "answer_field": "answer"}
    (first, second), _ = examples(tmp_path, tokenizer, rows, source=fields, system_prompt=None, **plain)
    assert tokenizer.decode(first[0].token_ids[first[0].trained]) == "4 is</s>"
    assert tokenizer.decode(second[0].token_ids[~second[0].trained]) == "1+1="


def test_a_question_with_an_answer_is_a_chat(tmp_path):
    tokenizer = byte_tokenizer(CHATML)
    fields = {"prompt_field": "question", "answer_field": "answer"}
    rows = [{"question": "2+2?", "answer": 4}]
    data = {"prompt_format": "text", "system_prompt": "Be brief.", "prompt_template": "Say {question}"}
    (((example,),), _) = examples(tmp_path, tokenizer, rows, source=fields, **data)
    chat = [*SYSTEM, {"role": "user", "content": "Say 2+2?"}, {"role": "assistant", "content": "4"}]
    assert tokenizer.decode(example.token_ids) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert tokenizer.decode(example.token_ids[example.trained]) == "4<|im_end|>\n"


@pytest.mark.parametrize("whole", [True, False], ids=["whole chats", "prompt and answers"])
def test_of_a_pair_only_what_differs_is_trained(tmp_path, whole):
    tokenizer = byte_tokenizer(CHATML)
    rows: list[dict]
    chosen, rejected = ([{"role": "assistant", "content": word}] for word in ("six", "7"))
    if whole:
        rows = [{"chosen": LONG[:3] + chosen, "rejected": LONG[:3] + rejected}]
        fields = {"prompt_field": "chosen", "rejected_field": "rejected"}
    else:
        rows = [{"messages": LONG[:3], "chosen": "six", "rejected": rejected}]
        fields = {"answer_field": "chosen", "rejected_field": "rejected"}
    ((pair,), _) = examples(tmp_path, tokenizer, rows, source=fields)
    assert [tokenizer.decode(each.token_ids[each.trained]) for each in pair] == ["six<|im_end|>\n", "7<|im_end|>\n"]
    prompts = [each.sample(0).prompt_ids for each in pair]
    assert np.array_equal(*prompts), "what phases.*.share_prompts runs once"


def test_rows_that_are_too_long_or_train_nothing_are_left_out_and_named(tmp_path):
    rows = [{"messages": SHORT}, {"messages": LONG}, {"messages": SHORT[:1]}]
    sequences, stream = examples(tmp_path, byte_tokenizer(CHATML), rows, max_tokens=80, on_bad_row="skip")
    assert len(sequences) == 1 and (stream.num_dropped, stream.num_bad_rows) == (1, 1)
    with pytest.raises(ValueError, match=r"rows.jsonl, line 3: field 'messages': no token is trained.*on_bad_row: skip"):
        examples(tmp_path, byte_tokenizer(CHATML), rows)
    with pytest.raises(ValueError, match=r"data.max_tokens is 80.*on_long_prompt: skip"):
        examples(tmp_path, byte_tokenizer(CHATML), rows[:2], max_tokens=80, on_long_prompt="stop")


def test_tool_calls_that_a_template_rewrites_later_are_refused(tmp_path):
    calls = THINKING.replace("{{ m.content +", "{{ m.content + (m.tool_calls | string if m.tool_calls else '') +")
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    chat = [SHORT[0], call, {"role": "user", "content": "4"}, SHORT[1]]
    with pytest.raises(ValueError, match="message 1: .* writes this turn differently once other messages follow"):
        examples(tmp_path, byte_tokenizer(calls), [{"messages": chat}])
    (((example,),), _) = examples(tmp_path, byte_tokenizer(calls), [{"messages": chat[:2]}])
    assert "add" in byte_tokenizer(calls).decode(example.token_ids[example.trained])


@pytest.mark.parametrize("chat", [True, False])
def test_a_prompt_whose_answer_is_trained_is_not_held_out(tmp_path, chat):
    """From rows of whole sequences, beside those of the prompts that rollouts answer."""
    tokenizer, streams = byte_tokenizer(CHATML), []
    for name, questions, limits in [
        ("held_out", "abc", {"max_prompt_tokens": 400}),
        ("prompts", "ax", {"max_prompt_tokens": 400}),
        ("rows", "cy", {"max_prompt_tokens": 1, "max_tokens": 400}),
    ]:
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"q": question, "a": "1"}) + "\n" for question in questions))
        source = {"kind": "jsonl", "path": str(file), "prompt_field": "q", "answer_field": "a"}
        data = DataSection.model_validate({"prompts": source, "chat_template": chat, **limits})
        streams.append(PromptStream(data, 1, tokenizer))
    assert [prompt.question for prompt in not_trained_on(*streams)] == ["b"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_is_what_the_policy_would_sample_for_the_prompt(tmp_path, name):
    """After the prompt that engines get, up to the end of the turn; longer answers are bad rows."""
    tokenizer = byte_tokenizer(TEMPLATES[name])
    stops = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|eot|>", "<|end|>", "</s>"])
    file = tmp_path / "rows.jsonl"
    answers = ["4", "four", "it is four"]
    file.write_text("".join(json.dumps({"q": LONG[:3], "a": answer}) + "\n" for answer in answers))
    source = {"kind": "jsonl", "path": str(file), "prompt_field": "q", "answer_field": "a"}
    data = DataSection.model_validate(
        {"prompts": source, "prompt_format": "messages", "max_prompt_tokens": 200, "shuffle": False, "on_bad_row": "skip"}
    )
    given = {"data": data, "tokenizer": tokenizer, "stop_token_ids": stops}
    prompts = PromptStream(data, 0, tokenizer, answer=partial(answer_of, max_new_tokens=40, **given)).take(3)
    for prompt, answer in zip(prompts, answers, strict=True):
        sample = prompt.examples[0].sample(prompt.index)
        ids = sample.completion.token_ids.tolist()
        assert ids[-1] in stops and not set(ids[:-1]) & set(stops) and sample.completion.own.all()
        assert tokenizer.decode(ids[:-1]).removeprefix("<think>\n\n</think>\n\n").strip() == answer
        assert np.array_equal(sample.prompt_ids, prompt.token_ids)
    shorter = PromptStream(data, 0, tokenizer, answer=partial(answer_of, max_new_tokens=len(ids) - 1, **given))
    assert (shorter.num_rows, shorter.num_bad_rows) == (2, 1)
    stopped = data.model_copy(update={"on_bad_row": "stop"})
    with pytest.raises(ValueError, match=r"line 3: field 'a' has \d+ tokens .* rollout.max_new_tokens = \d+"):
        PromptStream(stopped, 0, tokenizer, answer=partial(answer_of, max_new_tokens=len(ids) - 1, **given))
