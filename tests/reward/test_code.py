"""Code in a sandbox: it scores by passed tests, hits limits that are named, and leaves nothing behind."""

import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megarl.cluster import doctor
from megarl.cluster.doctor import Severity
from megarl.data.sample import Prompt
from megarl.recipe import RecipeError, load_recipe
from megarl.recipe.reward_section import CodeRewardSection
from megarl.reward import sandbox, sandbox_keeper, verifiers
from megarl.reward.sandbox import Program, SandboxFault, SandboxLimits, run_programs
from megarl.reward.verifiers import code_of, code_verifier, programs_of
from tests.recipe_cases import edited, make_folder, write
from tests.reward.test_reward_attacks import processes_named
from tests.reward.test_workers import model, score_batch  # noqa: F401
from tests.sink_cases import wait_for

MIB = 1 << 20
LIMITS = SandboxLimits(wall_s=60.0, cpu_s=30, memory_bytes=256 * MIB, file_bytes=4 * MIB, processes=6, output_bytes=1 << 16)
# /tmp is the working directory, unless this environment lies below it.
PREFIXES = [Path(os.path.realpath(prefix)).parts for prefix in (sys.prefix, sys.base_prefix)]
BELOW_TMP = {parts[2] for parts in PREFIXES if parts[1] == "tmp"}
EMPTY = Program(
    f"import os; assert os.listdir('.') == ['program.py'] and set(os.listdir('/tmp')) == {BELOW_TMP or {'program.py'}}"
)
# Programs by their outcomes.
PROGRAMS = {
    "failed": ["assert 0", "def f(:", "import os; os._exit(0)", "import sys; sys.exit()"],
    # Many processes die: when the first ends, another has written half of its traceback.
    "processes": ["import sys, traceback\ntry: raise BlockingIOError(11, '')\nexcept OSError: traceback.print_exc()\n"
                  "sys.exit('Traceback (most recent call last):\\n  File \"x\", line 1\\n    ^^^^')"],
    "passed": [
        "1",
        "import threading, time\nfor i in range(4): threading.Thread(target=time.sleep, args=(0.1,)).start()",
        # An error that a program prints and survives is not a limit.
        "import sys\nfor number in (11, 12, 27, 28): print(f'OSError: [Errno {number}]', file=sys.stderr)",
        # Ordinary programs still work.
        "import asyncio\nasync def main():\n    child = await asyncio.create_subprocess_exec('true')\n"
        "    await child.wait()\nasyncio.run(main())",
        "import sqlite3, subprocess, tempfile\ndb = sqlite3.connect('x.db')\ndb.execute('create table t(a)')\ndb.commit()\n"
        "assert subprocess.run(['echo', '3'], capture_output=True).stdout == b'3\\n'\ntempfile.TemporaryFile()\n"
        "import multiprocessing as m\na, b = m.Pipe()\np = m.Process(target=b.send, args=(4,))\np.start()\n"
        "assert a.recv() == 4\np.join()",
        # Pages that forked processes share count once.
        "import os, time\nx = bytearray(100 << 20)\nx[::4096] = b'1' * len(x[::4096])\nfor i in range(3):\n"
        "    if os.fork() == 0: time.sleep(0.2); os._exit(0)\nfor i in range(3): os.wait()",
        "import os, sys\nfor path in ('/', '/usr', sys.prefix, sys.base_prefix, '/proc/..'):\n"
        "    assert os.statvfs(path).f_flag & os.ST_RDONLY and os.statvfs(path).f_flag & os.ST_NOSUID, path",
        f"assert not __import__('os').path.exists({__file__!r})",
        "import ctypes, os\nassert all(ctypes.CDLL(None).unshare(flag) < 0 for flag in (0x20000, 0x10000000, 0x40000000))",
        "import os; assert os.getuid() != 0 and 'MEGARL_SECRET' not in os.environ and len(os.listdir('/proc/self/fd')) < 7",
    ],
}  # fmt: skip
SQUARES = "def square(x):\n    return x * x\n"
ANSWER = json.dumps(["assert square(2) == 4", "assert square(3) == 9", "assert square(0.5) == 0.5"])


def prompt(answer):
    return Prompt(5, np.zeros(1, dtype=np.int32), "the question", answer, {})


def named(name):
    """Return code that names its process; forked children inherit the name."""
    return f"import ctypes, os, time; ctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\n"


def test_the_outcome_of_a_program_has_a_name_and_other_programs_are_unaffected(monkeypatch):
    monkeypatch.setenv("MEGARL_SECRET", "1")
    expected = {code: reason for reason, codes in PROGRAMS.items() for code in codes}
    programs = [program for code in expected for program in (Program(code), EMPTY)]
    reasons = run_programs(programs, SandboxLimits(**(vars(LIMITS) | {"cpu_s": 1, "wall_s": 300.0})))
    assert dict(zip(expected, reasons[::2], strict=True)) == expected
    assert set(reasons[1::2]) == {"passed"}


def test_wall_time_counts_for_all_programs_together():
    limits = SandboxLimits(**(vars(LIMITS) | {"wall_s": 1.0}))
    sleeping = Program("import time; time.sleep(99)")
    assert run_programs([sleeping, Program("1")], limits) == ["wall_time", "wall_time"]


def test_a_sandbox_dies_with_the_process_that_started_it():
    name = secrets.token_hex(5)
    endless = named(name) + "os.fork()\nwhile True: time.sleep(9)"
    code = f"from megarl.reward.sandbox import *\nrun_programs([Program({endless!r})], {LIMITS!r})"
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(lambda: len(processes_named(name)) == 2)
    finally:
        parent.kill()
        parent.wait(60)
    wait_for(lambda: not processes_named(name))


def test_a_faulty_sandbox_is_an_error_and_not_a_score(tmp_path, monkeypatch):
    keeper = tmp_path / "keeper.py"
    judge = code_verifier(CodeRewardSection(kind="code"))
    monkeypatch.setattr(sandbox, "KEEPER", keeper)
    torn = 'print(\'{"fault": "torn"}\')'
    for text, message in (("import sys; sys.exit('broken')", "exit status 1: broken"), (torn, "torn")):
        keeper.write_text(text)
        with pytest.raises(SandboxFault, match=message):
            judge(SQUARES, prompt(ANSWER))


def test_output_is_compared_without_blanks_at_line_ends():
    double = "print('  a '); print(int(input()) * 2)\n\n"
    programs = [Program(double, "4\n", "  a\n8"), Program(double, "4\n", "a\n8\n"), Program(double, "x", "")]
    assert run_programs(programs, LIMITS) == ["passed", "failed", "failed"]


def test_the_last_block_is_the_code():
    assert code_of("no block") == "no block"
    assert code_of("a\n```\nx = 1\n```\nb\n```python\ny = 2\nz = 3\n```\n```") == "y = 2\nz = 3\n"
    assert code_of("```json\n{}\n```\n  ```Py\nx\n  ```") == "x\n"
    assert code_of("```python3.11\nx\n```\nprints\n```\nx 1\n```") == "x\n"
    assert code_of("```python\ncut off") == "```python\ncut off"


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("assert f(1) == 2", 1),
        ('["assert f(1)", "check(f)"]', 2),
        ('[{"input": "1", "output": "2"}]', 1),
        ('{"inputs": ["1", "2"], "outputs": ["2", "3"]}', 2),
        ("3", 0),
        ("[]", 0),
        ("f =", 0),
        ("x = 1", 0),
        ('["assert 1", 3]', 0),
        ('{"inputs": ["1"], "outputs": []}', 0),
        ('{"input": 1, "output": "2"}', 0),
    ],
)
def test_the_forms_of_tests_in_an_answer(answer, number):
    if number:
        assert len(programs_of("", prompt(answer))) == number
    else:
        with pytest.raises(ValueError, match="answer of prompt 5 .* holds no tests"):
            programs_of("", prompt(answer))


def test_credit_is_a_share_or_needs_all_tests():
    for credit, worth in (("all", 0.0), ("share", 2 / 3)):
        judge = code_verifier(CodeRewardSection.model_validate({"kind": "code", "credit": credit, "timeout_s": 60.0}))
        assert judge(f"So:\n```python\n{SQUARES}```", prompt(ANSWER)) == (worth, "failed")
    assert judge(SQUARES, prompt("assert square(3) == 9")) == (1.0, "passed")


def test_limits_score_zero_and_are_counted(model):  # noqa: F811
    section = CodeRewardSection(kind="code", timeout_s=30.0, cpu_s=1, weight=2.0)
    texts = [SQUARES, "def square(x):\n    while True: pass", "def square(x): return x", SQUARES]
    result = score_batch(model, [section], texts, [prompt("assert square(3) == 9")] * 2, sequences=4, timeout_s=120.0)
    assert result.rewards.tolist() == [2, 0, 0, 2] and result.valid.all()
    metrics = result.metrics()
    counted = {key: count for key, count in metrics.items() if key.startswith("reward/code_num_") and count}
    assert counted == {"reward/code_num_passed": 2, "reward/code_num_cpu_time": 1, "reward/code_num_failed": 1}
    assert metrics["reward/code"] == 0.5 and metrics["reward/code_num_memory"] == 0


@pytest.mark.parametrize(("cpu_s", "limit"), [(0.8, "cpu_time"), (0.1, "")])
def test_a_killed_program_hit_its_cpu_limit_even_if_its_seconds_are_below_it(cpu_s, limit):
    assert sandbox_keeper._limit_hit(-signal.SIGKILL, b"", cpu_s, {"cpu_s": 1}) == limit


def test_without_a_sandbox_no_code_runs(monkeypatch):
    assert doctor.check_sandbox().severity == Severity.OK
    for module in (verifiers, doctor):
        monkeypatch.setattr(module, "refusal", lambda: "unshare: not permitted; code runs in namespaces")
    with pytest.raises(ValueError, match="reward kind code: this machine has no sandbox: unshare"):
        code_verifier(CodeRewardSection(kind="code"))
    finding = doctor.check_sandbox()
    assert finding.severity == Severity.FAIL and finding.message == "unshare: not permitted" and "namespaces" in finding.fix


def test_a_task_has_time_for_code_that_loops(tmp_path, monkeypatch):
    make_folder(tmp_path, monkeypatch)
    part = {"kind": "code", "timeout_s": 4.0}
    broken = edited(("reward", [part]), ("phases.reward", {"sequences": 13}))
    with pytest.raises(RecipeError, match=r"phases.reward.timeout_s = 60.0: 13 sequences .* nearest: 65"):
        load_recipe(write(tmp_path, broken))
    recipe = load_recipe(write(tmp_path, edited(("reward", [part]), ("phases.reward", {"sequences": 12}))))
    assert recipe.verifiers[0].kind == "code"
