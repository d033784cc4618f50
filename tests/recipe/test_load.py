"""A legal recipe says what it says: overrides, defaults, what follows from it, the table that shows it; shipped recipes run
with every second of every rank in a span. Of a model on the hub a check fetches the config and the tokenizer, no weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pydantic
import pytest
from typer.testing import CliRunner

from megarl.cli import app
from megarl.planner.check import phase_table
from megarl.recipe import ENGINE_PHASES, RecipeError, load_recipe, recipe_yaml
from megarl.recipe.phases_section import role_of
from megarl.schedule import plan_phase
from tests.planner_cases import QWEN_7B, write_qwen
from tests.recipe.test_broken import BROKEN
from tests.recipe_cases import edited, fields_of, write
from tests.runs import megarl
from tests.span_sums import check_spans


def test_overrides_reach_their_field_and_only_that(folder: Path) -> None:
    file = write(folder, edited())
    plain = load_recipe(file)
    changed = load_recipe(
        file, ["run.steps=7", "actor.optimizer.lr=1e-5", "reward.1.weight=0.5", "algorithm.gae.discount=0.9", "run.steps=9"]
    )
    assert changed.run.steps == 9
    assert changed.actor.optimizer.lr == 1e-5
    assert changed.reward[1].weight == 0.5
    assert changed.algorithm.gae is not None and changed.algorithm.gae.discount == 0.9
    expected = plain.model_dump(mode="json")
    expected["run"]["steps"], expected["actor"]["optimizer"]["lr"] = 9, 1e-5
    expected["reward"][1]["weight"], expected["algorithm"]["gae"]["discount"] = 0.5, 0.9
    assert changed.model_dump(mode="json") == expected


def test_a_null_override_removes_a_section_and_a_dotted_one_makes_it(folder: Path) -> None:
    file = write(folder, edited())
    without = load_recipe(file, ["algorithm.kl=null", "phases.reference_logprob="])
    assert without.algorithm.kl is None
    again = load_recipe(write(folder, edited(("critic", None))), ["critic.optimizer.lr=3e-4"])
    assert again.critic is not None and again.critic.optimizer.lr == 3e-4


def test_a_loaded_recipe_is_frozen(folder: Path) -> None:
    recipe = load_recipe(write(folder, edited()))
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        recipe.run.steps = 5


def test_a_phase_runs_only_when_something_reads_it(folder: Path) -> None:
    ppo = load_recipe(write(folder, edited()))
    assert ppo.running_phases == (
        "rollout", "reward", "actor_logprob", "reference_logprob", "critic_value", "advantage", "critic_update",
        "actor_update",
        "weight_sync",
    )  # fmt: skip
    gone = [("critic", None), ("algorithm.gae", None), ("algorithm.value_loss", None), ("algorithm.advantage", "grpo"),
            ("phases.critic_value", None), ("phases.critic_update", None)]  # fmt: skip
    grpo = load_recipe(write(folder, edited(*gone)))
    assert grpo.running_phases == ("rollout", "reward", "actor_logprob", "reference_logprob", "advantage", "actor_update",
                                   "weight_sync")  # fmt: skip
    once = [*gone, ("phases.actor_update.mini_batch", 16), ("phases.actor_logprob", None)]
    assert "actor_logprob" not in load_recipe(write(folder, edited(*once))).running_phases
    # One update but two epochs, or a KL term in the reward: the log-probabilities before the update are needed again.
    twice = [*gone, ("phases.actor_update.mini_batch", 16), ("phases.actor_update.epochs", 2)]
    assert "actor_logprob" in load_recipe(write(folder, edited(*twice))).running_phases
    in_reward = [*gone, ("phases.actor_update.mini_batch", 16), ("algorithm.kl.place", "reward")]
    assert "actor_logprob" in load_recipe(write(folder, edited(*in_reward))).running_phases


def test_each_phase_has_the_schedule_of_its_own_section(folder: Path) -> None:
    """A different size in every section, and each comes back from its own phase (verl #1028, #7462)."""
    file = write(folder, edited())
    phases = [phase for phase in ENGINE_PHASES if phase not in ("reward_model", "teacher_logprob")]  # it has neither
    sizes = {phase: 101 + number for number, phase in enumerate(phases)}
    overrides = [f"phases.{phase}.micro_batch={{max_tokens: {size}}}" for phase, size in sizes.items()]
    recipe = load_recipe(file, overrides)
    assert {phase: recipe.schedule(phase).max_tokens for phase in phases} == sizes
    assert recipe.schedule("critic_update").mini_batch == 16
    assert recipe.schedule("actor_update").mini_batch == 8
    assert recipe.schedule("critic_value").mini_batch is None
    for phase in phases:
        changed = load_recipe(file, [*overrides, f"phases.{phase}.micro_batch={{sequences: 1}}"])
        different = [other for other in phases if changed.schedule(other) != recipe.schedule(other)]
        assert different == [phase]


def test_check_prints_the_phase_table(folder: Path) -> None:
    file = write(folder, edited())
    result = CliRunner().invoke(app, ["check", str(file)])
    assert result.exit_code == 0, result.output
    recipe = load_recipe(file)
    for row in phase_table(recipe):
        line = next(line for line in result.output.splitlines() if row.phase in line)
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        assert cells == [row.phase, row.role, row.layout, row.micro_batch, row.mini_batch, row.data_parallel, row.worst_case,
                         row.bubble_share]  # fmt: skip
    update = next(row for row in phase_table(recipe) if row.phase == "actor_update")
    # 8 sequences of 64 tokens under a cap of 64, over 2 data-parallel ranks
    assert (update.micro_batch, update.data_parallel, update.worst_case) == ("max_tokens 64", "2", "4")
    assert update.bubble_share == "20%"


def test_export_and_report_name_a_run_that_is_not_there(tmp_path: Path) -> None:
    for command in (["export", str(tmp_path / "none"), str(tmp_path / "out")], ["report", str(tmp_path / "none")]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert "no such directory" in result.output


def test_every_field_is_explained() -> None:
    unexplained = [f"{section.__name__}.{name}" for section, name, field in fields_of() if not field.description]
    assert unexplained == [], "no explanation stands under it"


def test_an_automatic_cap_becomes_a_number_that_the_resolved_recipe_shows(folder: Path) -> None:
    """None while nothing fits, then more memory, larger cap, up to the whole mini-batch; read back, the same recipe."""
    automatic = ("phases.actor_update.micro_batch", {"max_tokens": "auto"})

    def cap(memory_gib: float) -> int | None:
        device = ("device", {"memory_gib": memory_gib})
        try:
            recipe = load_recipe(write(folder, edited(automatic, device, ("rollout.replay", str(folder)))))
        except RecipeError as error:
            assert [violation.key for violation in error.violations] == ["phases.actor_update.micro_batch.max_tokens"]
            return None
        text = recipe_yaml(recipe)
        assert "max_tokens: auto" not in text
        file = folder / "resolved.yaml"
        file.write_text(text)
        assert load_recipe(file) == recipe
        return recipe.schedule("actor_update").max_tokens

    caps = [cap(1e-3 * 1.4**step) for step in range(13)]
    fitting = [max_tokens for max_tokens in caps if max_tokens is not None]
    longest = load_recipe(write(folder, edited())).max_sequence_tokens
    assert caps[0] is None and caps == [None] * (len(caps) - len(fitting)) + fitting
    assert fitting == sorted(fitting) and len(set(fitting)) >= 3
    assert longest <= fitting[0] and fitting[-1] == 8 * longest


COUNTS = ("counts that a virtual pipeline cannot run", "a cap that can need more micro-batches than a virtual pipeline has")


@pytest.mark.parametrize("name", COUNTS)
def test_the_nearest_count_is_one_that_the_virtual_pipeline_runs(name: str, folder: Path) -> None:
    file = write(folder, BROKEN[name][0])
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    recipe = load_recipe(file, [f"{violation.key}={violation.nearest}" for violation in caught.value.violations])
    for phase in (phase for phase in ENGINE_PHASES if recipe.runs(phase)):
        lengths = [recipe.max_sequence_tokens] * recipe.num_sequences
        layout = recipe.layout(role_of(phase))
        for mini_batch in plan_phase(recipe.schedule(phase), lengths, layout, seed=0).mini_batches:
            assert mini_batch.num_micro_batches % layout.micro_batch_step == 0


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "ranks"), [("quickstart", 2), ("ppo-tiny", 4)])
def test_spans_of_a_shipped_recipe_sum_to_wall_time(recipe, ranks, tmp_path):
    """Of the four ranks of PPO a smaller run is in `tests/trainer/test_run.py`."""
    changes = ["run.steps=3", "run.trace=spans", f"run.dir={tmp_path}", "trainer.precision=fp32"]
    megarl("train", str(ROOT / "recipes" / f"{recipe}.yaml"), *changes)
    check_spans(tmp_path / recipe, ranks)


FILES = {"config.json": json.dumps(QWEN_7B).encode(), "tokenizer_config.json": b"{}", "model.safetensors": b"weights"}
COMMIT = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, someone/model, by the addresses that `huggingface_hub` asks for."""

    requested: list[str] = []

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path, content = self.path.split("?")[0], None
        if path.startswith("/api/models/someone/model"):
            listed = [{"rfilename": name} for name in FILES]
            content = json.dumps({"id": "someone/model", "sha": COMMIT, "siblings": listed}).encode()
            if "/tree/" in path:
                content = json.dumps(
                    [{"type": "file", "oid": "1", "size": len(FILES[n]), "path": n} for n in FILES]
                ).encode()
        elif path.startswith("/someone/model/resolve/"):
            name = path.rsplit("/", 1)[-1]
            self.requested.append(name)
            content = FILES.get(name)
        self.send_response(404 if content is None else 200)
        content = content or b""
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{len(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def check(folder: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "megarl.cli", "check", str(write_qwen(folder)), "model.path=someone/model"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_model_is_fetched_only_where_asked(folder: Path) -> None:
    with pytest.raises(RecipeError, match="hf download someone/model"):
        load_recipe(write(folder, edited()), ["model.path=someone/model"])


def test_the_config_is_fetched_and_the_weights_are_not(tmp_path: Path, hub: str) -> None:
    Hub.requested.clear()
    result = check(tmp_path, hub)
    assert result.returncode == 0, result.stderr
    assert "not checked: weights and tokenizer of model.path = someone/model" in result.stdout
    assert set(Hub.requested) == {"config.json", "tokenizer_config.json"}


def test_without_a_network_one_command_is_named(tmp_path: Path) -> None:
    result = check(tmp_path, "http://127.0.0.1:9")
    assert result.returncode == 2
    assert "model.path = 'someone/model'" in result.stderr and "hf download someone/model config.json" in result.stderr
