"""The right answers of each verifier; a text or answer that a verifier cannot judge is refused."""

import re
import threading
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import megarl
from megarl.data.sample import Prompt
from megarl.recipe.reward_section import (
    COUNTS,
    OTHER_METRICS,
    FunctionRewardSection,
    HttpRewardSection,
    PatternRewardSection,
    SchemaRewardSection,
    VerifierSection,
    part_names,
    reward_rules,
)
from megarl.reward.fork_server import ZERO_CAUSES
from megarl.reward.verifiers import (
    MASK_CAUSES,
    READERS,
    VERIFIERS,
    TextScore,
    check_answer,
    load_function,
    load_terms,
    numbers,
    read_answer,
    reads_answers,
    score_terms,
)
from megarl.reward.workers import ENVIRONMENT, REASONS
from megarl.telemetry.metrics_file import KEY


def prompt(answer, row=None):
    return Prompt(5, np.zeros(1, dtype=np.int32), "the question", answer, row or {})


def spec(kind, weight=1.0, target=None):
    if kind == "function":
        return FunctionRewardSection(kind=kind, weight=weight, target=target)
    return VerifierSection(kind=kind, weight=weight)


def score(specs, text, prompt):
    """The reward of one text."""
    terms = load_terms(specs)
    parts, _ = score_terms(terms, text, prompt)
    return sum(term.weight * parts[term.name] for term in terms)


def generous(text, prompt):
    return len(text) + prompt.row["bonus"]


def not_a_number(text, prompt):
    return float("nan")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 + 4 = 7.", ["3", "4", "7"]),
        ("5-3 is 2", ["5", "3", "2"]),
        ("it is -3", ["-3"]),
        ("it is \u22123, or (+2)", ["-3", "2"]),
        ("1,234,567.50 or 1,2", ["1234567.50", "1", "2"]),
        ("no digits", []),
        ("x2=10%", ["2", "10"]),
        ("x = .5, not -.25", ["0.5", "-0.25"]),
        ("1-.5 and v.5 and 1.2.3", ["1", "0.5", "5", "1.2", "3"]),
        ("1e-05, 1.5e3, -2E+4 and 1,234.5e1.", ["0.00001", "1500", "-20000", "12345"]),
        ("3e, 2exp, 1e5x", ["3", "2", "1", "5"]),
        ("1e99999", ["1", "99999"]),  # a number that would fill memory is not read as a number
        ("+3, \u20134, \uff0d5", ["3", "-4", "-5"]),
    ],
)
def test_numbers_in_a_text(text, expected):
    assert numbers(text) == [Decimal(number) for number in expected]


@given(st.floats(allow_nan=False, allow_infinity=False) | st.decimals(-(10**9), 10**9, places=7))
def test_every_number_is_read_back_from_pythons_text(number):
    assert numbers(f"so {number}.") == [Decimal(str(number))]


@given(st.integers(-(10**12), 10**12), st.integers(0, 999))
def test_every_number_is_read_back_from_a_text_with_separators(whole, thousandths):
    assert numbers(f"so {whole:,}.{thousandths:03d}, surely") == [Decimal(f"{whole}.{thousandths:03d}")]


@pytest.mark.parametrize(
    ("kind", "text", "gold", "reward", "answer"),
    [
        ("exact", " 7 \n", "7", 1.0, "7"),
        ("exact", "7.", "7", 0.0, "7."),
        ("exact", " \n\t", "7", 0.0, None),
        ("last_number", "3 + 4 = 7.", "7", 1.0, "7"),
        ("last_number", "7, since 3 + 4", "7", 0.0, "4"),
        ("last_number", "seven", "7", 0.0, None),
        ("last_number", "", "7", 0.0, None),
        ("last_number", "it is 7.0", "7", 1.0, "7"),
        ("last_number", "it is .5", "5", 0.0, "0.5"),
        ("last_number", "it is 1.5e3", "1,500.0", 1.0, "1500"),
        ("last_number", "0.250", "0.25", 1.0, "0.25"),
        ("last_number", "it is \u22123", "-3", 1.0, "-3"),
        ("last_number", "-0", "0", 1.0, "0"),
        ("last_number", "9" * 40, "9" * 40, 1.0, "9" * 40),
        ("math_verify", r"So the answer is $\frac{2}{4}$.", "0.5", 1.0, "1/2"),
        ("math_verify", r"\boxed{0.5}", "1/2", 1.0, "1/2"),
        ("math_verify", r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1.0, "x**2 + 2*x + 1"),
        ("math_verify", r"\boxed{3}", r"\frac{1}{2}", 0.0, "3"),
        ("math_verify", "the answer is 1,000", "1000", 1.0, "1000"),
        ("math_verify", "07", "7", 1.0, "7"),
        ("math_verify", r"$1 + x$", "$x + 1$", 1.0, "x + 1"),
        ("math_verify", "no idea", "7", 0.0, None),
    ],
)
def test_the_reward_of_a_text_and_the_answer_that_it_votes_for(kind, text, gold, reward, answer):
    assert score([spec(kind)], text, prompt(gold)) == reward
    assert read_answer(load_terms([spec(kind)]), text) == answer


def test_math_verify_works_outside_the_main_thread():
    scores = []
    thread = threading.Thread(target=lambda: scores.append(score([spec("math_verify")], "$1/2$", prompt("0.5"))))
    thread.start()
    thread.join(timeout=300)
    assert scores == [1.0]


def test_an_unusable_answer_is_named():
    terms = load_terms([spec("exact"), spec("last_number")])
    check_answer(terms, prompt("7"))
    with pytest.raises(ValueError, match=r"last_number: the answer of prompt 5 .*'the question'.* 'seven'"):
        check_answer(terms, prompt("seven"))
    with pytest.raises(ValueError, match=r"math_verify: the answer of prompt 5"):
        score([spec("math_verify")], "7", prompt("?"))


def test_terms_add_up_by_weight_and_keep_their_names():
    here = f"{__name__}:generous"
    specs = [spec("exact", 0.5), spec("function", 0.1, here), spec("exact", 2.0)]
    assert score(specs, "abc", prompt("abc", {"bonus": 7})) == pytest.approx(0.5 + 1.0 + 2.0)
    assert [term.name for term in load_terms(specs)] == ["exact", "generous", "exact_2"]


JUDGE = HttpRewardSection(kind="http", url="http://judge/")
KNOWN = st.sampled_from([*sorted(OTHER_METRICS), "exact", "exact_2", "exact_1_2", "http_num_late", "http_num", "judge"])
FUNCTIONS = st.from_regex("[aZ_][a_1ñ]*", fullmatch=True) | KNOWN
PARTS = st.lists(
    FUNCTIONS.map(lambda name: spec("function", target=f"m:{name}")) | st.sampled_from([spec("exact"), JUDGE]), max_size=6
)


@given(PARTS)
@example([spec("function", target="m:exact_2"), spec("exact"), spec("exact")])
@example([JUDGE, JUDGE, spec("function", target="m:http_1_num_late")])
def test_every_part_of_a_reward_has_its_own_metric_or_is_refused(parts):
    names = part_names(parts)
    assert len(set(names)) == len(names)
    recipe: Any = SimpleNamespace(reward=parts, environment="some")
    refused = {violation.key for violation in reward_rules(recipe)}
    accepted = [name for number, name in enumerate(names) if f"reward.{number}.target" not in refused]
    reasons = [(name, reason) for name, part in zip(names, parts, strict=True) for reason in REASONS.get(part.kind, ())]
    counts = {f"{name}_num_{reason}" for name, reason in reasons}
    assert all(KEY.fullmatch(f"reward/{name}") for name in accepted)
    assert not set(accepted) & (OTHER_METRICS | counts)


def test_all_metrics_that_belong_to_no_part_are_listed():
    code = "".join(file.read_text() for file in Path(megarl.__file__).parent.rglob("*.py"))
    causes = {f"num_zero_{cause}" for cause in ZERO_CAUSES} | {f"num_masked_{cause}" for cause in MASK_CAUSES}
    assert {*re.findall(r'"reward/(\w+)"', code), ENVIRONMENT} | causes == OTHER_METRICS
    assert set(COUNTS) == set(REASONS)


def test_a_function_must_return_a_finite_number():
    terms = load_terms([spec("function", 1.0, f"{__name__}:not_a_number")])
    with pytest.raises(ValueError, match="not_a_number gave nan for prompt 5"):
        score_terms(terms, "", prompt("1"))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("math", "reward.target = 'math': AttributeError"),
        ("no_such_module:f", "reward.target = 'no_such_module:f': .* No module named 'no_such_module'"),
        ("math:no_such_function", "module 'math' has no attribute 'no_such_function'"),
        ("math:pi", "reward.target = 'math:pi': no function"),
    ],
)
def test_a_function_that_does_not_load_is_named(target, message):
    with pytest.raises(ValueError, match=message):
        load_function(target)


def test_joined_scores_keep_why_a_text_was_judged_once_more():
    joined = TextScore({}).combined(TextScore({"a": 1.0}, "crash: it died")).combined(TextScore({"b": 2.0}))
    assert joined == TextScore({"a": 1.0, "b": 2.0}, "crash: it died")


def test_every_kind_of_the_recipe_has_a_verifier_and_a_reader():
    kinds = get_args(VerifierSection.model_fields["kind"].annotation)
    assert VERIFIERS.keys() == READERS.keys() == set(kinds)


@pytest.mark.parametrize(
    ("pattern", "text", "worth"),
    [
        (r"<answer>.*</answer>", "so <answer>8</answer>.", 1.0),
        (r"<answer>.*</answer>", "so 8.", 0.0),
        (r"(?i)answer is (?P<answer>\w+)", "The answer is 7. No, the Answer is 8.", 1.0),
        (r"(?i)answer is (?P<answer>\w+)", "The answer is 8. No, the answer is 7.", 0.0),
        (r"= (?P<answer>\d+)?", "8 = ", 0.0),
    ],
)
def test_a_pattern_scores_by_a_match_or_by_the_answer_of_the_last_match(pattern, text, worth):
    terms = load_terms([PatternRewardSection(kind="pattern", pattern=pattern)])
    assert score_terms(terms, text, prompt(" 8 ")) == ({"pattern": worth}, {})


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ('{"city": "Paris", "people": 2}', 1.0),
        ('Here it is:\n```json\n{"city": "Paris", "people": 2}\n```\nDone.', 1.0),
        ('{"city": "Paris"}', 0.0),
        ('{"city": "Paris", "people": "2"}', 0.0),
        ('It is {"city": "Paris", "people": 2}', 0.0),
        ('```\n{"city": "Rome", "people": 1}\n```\n```\n{"city": "Rome", "people": 1}\n```', 0.0),
        ("", 0.0),
        ('{"city": "Paris", "people": 2, "area": NaN}', 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_a_json_document_scores_by_its_schema(text, worth):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
        "required": ["city", "people"],
    }
    terms = load_terms([SchemaRewardSection(kind="json_schema", json_schema=schema, weight=3.0)])
    assert score_terms(terms, text, prompt("")) == ({"json_schema": worth}, {})


def pattern(expression):
    return PatternRewardSection(kind="pattern", pattern=expression)


NAMED = pattern(r"answer: (?P<answer>[^.]*)?\.")


@pytest.mark.parametrize(
    ("part", "text", "answer"),
    [
        (NAMED, "answer: 8. No, answer:  a b .", "a b"),
        (NAMED, "answer: 8. No, answer: .", None),
        (NAMED, "8", None),
        (pattern("answer: .*"), "answer: 8", None),
        (FunctionRewardSection(kind="function", target=f"{__name__}:generous"), "8", None),
    ],
)
def test_only_a_pattern_with_an_answer_reads_answers(part, text, answer):
    assert read_answer(load_terms([part]), text) == answer


@given(st.text(alphabet="0017,.- ", max_size=12), st.text(alphabet="0017,.- ", max_size=12))
def test_two_texts_have_the_same_answer_if_their_last_numbers_are_equal(first, second):
    terms = load_terms([spec("last_number")])
    last = [numbers(text)[-1:] for text in (first, second)]
    assert (read_answer(terms, first) == read_answer(terms, second)) == (last[0] == last[1])


def test_the_first_part_that_reads_answers_reads_them():
    named, unnamed, number, function = NAMED, pattern("answer"), spec("last_number"), spec("function", 1.0, "math:sqrt")
    for parts, answer in (
        ([named, number], "x"),
        ([number, named], "8"),
        ([unnamed, function, number], "8"),
        ([unnamed, function], None),
    ):
        terms = load_terms(parts)
        assert reads_answers(terms) == (answer is not None) and read_answer(terms, "answer: x. 8") == answer
