"""The pages of docs/: at most twelve, one question each; links lead somewhere, examples print what they show, and tables,
keys, commands and recipes are those of the code."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
import subprocess
import typing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from megarl.algorithm.estimate import ADVANTAGES
from megarl.cli import app
from megarl.data.sample import Prompt
from megarl.recipe import Recipe, load_recipe
from megarl.recipe.algorithm_section import Advantage, AlgorithmSection, KlSection, MismatchSection, PolicyLossSection
from megarl.recipe.data_section import DataSection
from megarl.recipe.evaluation_section import EvaluationSection
from megarl.recipe.load import kinds, sections_of
from megarl.recipe.phases_section import PHASES, ForwardPhaseSection, PhasesSection, UpdatePhaseSection
from megarl.recipe.weight_sync_section import WeightSyncSection
from megarl.recipe.yaml_text import parse_yaml
from megarl.reward.workers import REASONS
from megarl.rollout.evaluation import Evaluation
from megarl.telemetry import exit_status
from tests.recipe_cases import fields_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_there_are_at_most_twelve_pages_and_the_readme_is_short() -> None:
    assert len(PAGES) <= 12
    assert len(README.splitlines()) <= 150
    assert [name for name in TEXTS if f"docs/{name}" not in README] == []


@pytest.mark.parametrize("name", TEXTS)
def test_a_page_answers_one_question_and_has_an_example(name: str) -> None:
    title = TEXTS[name].splitlines()[0]
    assert title.startswith("# ") and title.endswith("?")
    assert "```" in TEXTS[name] or "`python benchmarks/" in TEXTS[name]


def test_links_lead_to_files_and_headings() -> None:
    wrong = []
    for folder, texts in ((ROOT, {"README.md": README}), (ROOT / "docs", TEXTS)):
        for name, text in texts.items():
            for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
                path, _, anchor = target.partition("#")
                if "://" in target:
                    continue
                file = folder / path if path else folder / name
                if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
                    wrong.append(f"{name}: {target}")
    assert wrong == []


def test_pages_that_the_tree_names_exist() -> None:
    listed = ["git", "grep", "-ohE", r"docs/[a-z_-]+\.(md|png)", "--", ".", ":!tests/project/test_docs.py"]
    named = set(subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.split())
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_the_makefile_names_test_files_that_exist() -> None:
    command = ["make", "--dry-run", "test-megatron-0.19"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    files = set(re.findall(r"tests/[\w/]+\.py", shown))
    assert len(files) > 14
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []


def test_the_architecture_names_every_room() -> None:
    rooms = {path.parent.name for path in (ROOT / "megarl").glob("*/__init__.py")}
    assert rooms == set(re.findall(r"^\| \d \| `(\w+)/` \|", TEXTS["architecture.md"], re.MULTILINE))


FOLDERS = "megarl|launch|tests|recipes|locks|benchmarks"


def test_pages_name_files_that_exist() -> None:
    text = "\n".join([README, *TEXTS.values()])
    files = set(re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w/.-]*\w\.\w+", text))
    assert len(files) > 120
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []


def commands_of(text: str) -> list[str]:
    """The shell commands of a page, which may go on behind a backslash."""
    return re.findall(r"^\$ ((?:.*\\\n)*.*)$", text, re.MULTILINE)


@functools.cache
def help_of(command: str) -> str:
    """What `megarl COMMAND --help` prints."""
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, f"megarl {command}"
    return result.output


@pytest.mark.parametrize("command", [command for text in (README, *TEXTS.values()) for command in commands_of(text)])
def test_commands_parse_and_have_their_options(command: str) -> None:
    plain = re.sub(r"\[key=value \.\.\.\]", "run.steps=3", command)
    subprocess.run(["bash", "-n", "-c", plain], check=True, timeout=300)
    for name, arguments in re.findall(r"\bmegarl (\w+)(.*)", plain):
        assert [option for option in re.findall(r" (--[\w-]+)", arguments) if option not in help_of(name)] == []


def test_the_page_on_weight_sync_has_every_key() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", TEXTS["weight-sync.md"], re.MULTILINE)) == set(WeightSyncSection.model_fields)


EXAMPLES = [
    pytest.param(name, code, shown, id=f"{name}-{number}")
    for name, text in TEXTS.items()
    for number, (code, shown) in enumerate(re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", text, re.DOTALL))
]


@pytest.mark.parametrize(("name", "code", "shown"), EXAMPLES)
def test_an_example_prints_what_its_page_shows(name: str, code: str, shown: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"docs/{name}", "exec"), {})
    assert printed.getvalue() == shown


PARTS_OF_RECIPES = [block for text in TEXTS.values() for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]


@pytest.mark.parametrize("block", PARTS_OF_RECIPES)
def test_a_part_of_a_recipe_is_legal(block: str) -> None:
    """But for what it leaves out, and three dots in place of a source."""
    source = "prompts: {kind: jsonl, path: rows.jsonl, prompt_field: question, answer_field: answer}"
    try:
        Recipe.model_validate(parse_yaml(block.replace("prompts: ...", source)))
    except ValidationError as error:
        assert [fault for fault in error.errors() if fault["type"] != "missing"] == []


ALGORITHMS = TEXTS["algorithms.md"]


def algorithm_rows(title: str) -> dict[str, str]:
    """Return the lines of the table below a heading, by the name in their first column."""
    (part,) = [part for part in ALGORITHMS.split("\n## ") if part.startswith(title)]
    lines = {name: line for line in part.splitlines() for name in re.findall(r"^\| `(\w+)` \|", line)}
    for line in lines.values():  # formula and source; a loss without keys has none to name
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[1] and cells[-1], line
    return lines


def test_every_advantage_has_a_row() -> None:
    assert set(algorithm_rows("Advantages")) == set(typing.get_args(Advantage)) == set(ADVANTAGES)


def test_every_policy_loss_has_a_row_with_its_keys() -> None:
    sections = {kinds(section)[0]: section for section in sections_of(PolicyLossSection)}
    losses = algorithm_rows("Policy losses")
    assert set(losses) == set(sections)
    for kind, section in sections.items():
        assert re.findall(r"`(\w+)`", losses[kind].split("|")[3]) == [key for key in section.model_fields if key != "kind"]


def test_every_key_is_named() -> None:
    spans = re.sub(r"```.*?```", "", ALGORITHMS, flags=re.DOTALL)
    named = {word for span in re.findall(r"`([^`]+)`", spans) for word in re.findall(r"\w+", span)}
    assert {key for _, key, _ in fields_of(AlgorithmSection)} - named - {"kind"} == set()


def test_the_user_functions_of_the_page_run() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", ALGORITHMS, re.DOTALL)
    names: dict[str, typing.Any] = {}
    exec(code, names)
    rewards, valid = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False])
    assert names["centred"](rewards, torch.zeros(3), valid).tolist() == [-0.5, 0.5, 7.5]
    old, new, ones = torch.tensor([-1.0, -1.0]), torch.tensor([-1.05, -2.0]), torch.ones(2)
    tokens = SimpleNamespace(logprobs=new, old_logprobs=old, advantages=2 * ones)
    loss, beyond = names["bounded"](tokens, 0.1)
    assert beyond.tolist() == [False, True] and loss.tolist() == pytest.approx([2.1, 0.0])


def test_every_other_choice_is_named() -> None:
    aggregations = typing.get_args(AlgorithmSection.model_fields["aggregation"].annotation)
    assert set(algorithm_rows("Aggregation")) == set(aggregations)
    for title, section in (("KL:", KlSection), ("The engine is not the trainer", MismatchSection)):
        (part,) = [part for part in ALGORITHMS.split("\n## ") if part.startswith(title)]
        words = {word for span in re.findall(r"`([^`]+)`", part) for word in re.findall(r"\w+", span)}
        for key, field in section.model_fields.items():
            choices = {choice for choice in typing.get_args(field.annotation) if isinstance(choice, str)}
            assert choices <= words, f"{title} {key}: {choices - words}"
    assert all(
        f"`algorithm.{key}`" in ALGORITHMS for key in ("kl", "overlong", "mismatch", "dynamic_sampling", "early_stop")
    )
    assert all(f"`{key}" in ALGORITHMS for key in ("critic.warmup_steps", "reference.refresh_every", "min_lr_share"))


CLUSTERS = TEXTS["clusters.md"]
COMMANDS = commands_of(CLUSTERS)
FILES = sorted((ROOT / "launch" / "slurm").glob("*.sbatch"))


def cluster_rows(title: str) -> dict[str, str]:
    """The first two columns of the table whose first column has this title."""
    (table,) = re.findall(rf"^\| {title} \|.*\n\| ---.*\n((?:\|.*\n)+)", CLUSTERS, re.MULTILINE)
    cells = [[cell.strip().strip("`") for cell in line.strip("| \n").split(" | ")] for line in table.splitlines()]
    return {row[0]: row[1] for row in cells}


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("megarl launch")])
def test_what_the_page_launches_is_printed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)[1:]
    # The model of the quickstart is large to make; that of the tests has as many heads as the recipe cuts.
    words.insert(2, f"model.path={ROOT / 'models' / 'tiny-qwen3'}")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "#SBATCH --nodes=2\n" in result.stdout, "the page says two nodes"


def launches() -> list[tuple[dict[str, str], Path, str, list[str]]]:
    """Of each command that starts a script with a recipe: its environment, the script, the recipe and the overrides."""
    starts = []
    for command in COMMANDS:
        words = shlex.split(command.replace("$PWD", str(ROOT)))
        environment = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        scripts = [index for index, word in enumerate(words) if word.startswith("launch/") and "RECIPE" not in words]
        starts += [(environment, ROOT / words[index], words[index + 1], words[index + 2 :]) for index in scripts]
    return starts


def test_scripts_are_there_and_take_the_recipe_and_the_variables() -> None:
    explained = (ROOT / "launch" / "node.sh").read_text() + (ROOT / "launch" / "slurm" / "colocated.sbatch").read_text()
    assert len(launches()) >= 6
    for environment, script, recipe, overrides in launches():
        assert script.is_file() and all(name in explained for name in environment)
        load_recipe(ROOT / recipe, [*overrides, f"model.path={ROOT / 'models' / 'tiny-qwen3'}"])


def test_the_table_of_settings_is_that_of_the_files() -> None:
    table = cluster_rows("setting")
    for file in FILES:
        assert set(re.findall(r'^: "\$\{(\w+):=', file.read_text(), re.MULTILINE)) == set(table)
        for name in ("RANKS_PER_NODE", "LOG_ROOT"):
            assert f"{{{name}:={table[name]}}}" in file.read_text()
    assert set(cluster_rows("file")) == {file.name for file in FILES}


def test_the_table_of_exit_statuses_is_that_of_the_code() -> None:
    assert {int(code) for code in cluster_rows("exit status")} == {*exit_status.NAMES, exit_status.BAD_INPUT}
    assert f"\nREQUEUE={exit_status.REQUEUE}\n" in (ROOT / "launch" / "slurm" / "job.sh").read_text()


def test_the_warning_comes_as_early_as_the_page_says() -> None:
    (option,) = set(re.findall(r"`(--signal=\S+)`", CLUSTERS))
    assert all(f"#SBATCH {option}\n" in file.read_text() for file in FILES)


DATA = TEXTS["data-and-rewards.md"]


def kinds_of(annotation):
    return {kind for section in sections_of(annotation) for kind in kinds(section)}


def test_the_tables_have_every_kind():
    rows = re.findall(r"^\| (`[^|]*`) \|", DATA, re.MULTILINE)
    shown = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    assert shown == kinds_of(DataSection.model_fields["prompts"].annotation) | kinds_of(
        Recipe.model_fields["reward"].annotation
    )


def test_every_reason_is_named():
    for reasons in REASONS.values():
        for reason in reasons:
            assert re.search(rf"`(reward/\w+_num)?_{reason}`", DATA), reason


READING = TEXTS["reading-a-run.md"]
BLOCKS = {
    key: section
    for block in re.findall(r"```yaml\n(.*?)```", READING, re.DOTALL)
    for key, section in yaml.safe_load(block).items()
}
# What stands for a part of a name, and the pattern of that part.
NAMES = {"<k>": r"\d+", "<n>": r"\d+", "<each>": r"\w+"}


def test_the_example_has_every_key_of_an_evaluation() -> None:
    assert set(BLOCKS["evaluation"]) == set(EvaluationSection.model_fields)


def test_the_table_has_every_metric_and_no_other() -> None:
    section = EvaluationSection.model_validate(BLOCKS["evaluation"])
    count = section.completions
    prompts = [Prompt(index, np.array([index], np.int32), "1+1", "2", {}) for index in range(2)]
    rewards = [np.arange(count, dtype=np.float32)] * 2
    answers: list[list[str | None]] = [["2"] * count] * 2
    counts: dict[str, float] = {f"evaluation/num_{name}": 0 for name in ("prompts", "left_out", "dropped", "bad_rows")}
    metrics = Evaluation(prompts, counts, rewards, answers, [1], [False]).metrics(section)
    rows = re.findall(r"^\| (`evaluation/[^|]*`) \|", READING, re.MULTILINE)
    named = {name.removeprefix("evaluation/") for row in rows for name in re.findall(r"`([^`]+)`", row)}
    patterns = {name: "evaluation/" + re.sub("<.>|<each>", lambda part: NAMES[part[0]], name) for name in named}
    matched = {name: {key for key in metrics if re.fullmatch(pattern, key)} for name, pattern in patterns.items()}
    assert all(matched.values()), matched
    assert set().union(*matched.values()) == set(metrics)


def test_every_phase_has_its_row_and_its_keys() -> None:
    rows = {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)(?:\.NAME)?` \|.*$", TEXTS["phases.md"], re.MULTILINE)}
    assert list(rows)[: len(PHASES)] == list(PHASES)
    for phase in PhasesSection.model_fields:
        assert f"`phases.{phase}" in rows[phase], phase
    for key in (*ForwardPhaseSection.model_fields, *UpdatePhaseSection.model_fields):
        assert f"`{key}" in TEXTS["phases.md"] or f".{key}`" in TEXTS["phases.md"], key
