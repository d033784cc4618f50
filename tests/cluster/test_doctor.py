"""`megarl doctor` against planted faults: each is named with its value and a way out."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cluster.doctor import (
    CheckResult,
    DoctorOptions,
    NodeReport,
    Severity,
    check_machine,
    check_network,
    check_node,
    check_packages,
    check_precision,
    check_slurm,
    compare_nodes,
)
from tests.ports import unused_port

NOON = 1_800_000_000.0
VERSIONS = {"megarl": "0.1.0", "torch": "2.13.0"}


def finding_of(findings: Iterator[CheckResult] | list[CheckResult], check: str) -> CheckResult:
    (finding,) = [finding for finding in findings if finding.check == check]
    return finding


def assert_fails(findings: Iterator[CheckResult] | list[CheckResult], check: str, *texts: str) -> None:
    finding = finding_of(findings, check)
    assert finding.severity == Severity.FAIL and finding.fix
    assert all(text in f"{finding.message} {finding.fix}" for text in texts), finding


def doctor(*arguments: str, path: Path | None = None, before: str = "") -> tuple[int, list[CheckResult]]:
    """Run the command with packages of `path` before all other packages; return exit status and findings."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(path or ""), os.environ.get("PYTHONPATH")])),
    }
    command = f"{before}{sys.executable} -m megarl.cli doctor --json {' '.join(arguments)}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.startswith("["), done.stderr
    return done.returncode, [CheckResult(**row) for row in json.loads(done.stdout)]


def test_a_node_without_faults_is_fit() -> None:
    code, findings = doctor("recipes/quickstart.yaml", "--master", f"127.0.0.1:{unused_port()}")
    assert code == 0 and not [finding for finding in findings if finding.severity == Severity.FAIL]
    assert {"packages", "torch build", "shared memory", "open files", "model", "precision"} <= {
        finding.check for finding in findings
    }


def test_a_node_with_unfit_packages_few_open_files_and_ports_in_use(tmp_path: Path) -> None:
    """A torch for CUDA without a GPU, a torchvision for another torch, and another Ray."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("from typing import Optional\ncuda: Optional[str] = '12.8'\n")
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    (tmp_path / "ray-1.0.dist-info").mkdir()
    (tmp_path / "ray-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 1.0\n")
    with socket.create_server(("127.0.0.1", 0)) as torchrun, socket.create_server(("127.0.0.1", 0)) as head:
        ports = {"torchrun": torchrun.getsockname()[1], "Ray": head.getsockname()[1]}
        options = ["--master", f"127.0.0.1:{ports['torchrun']}", "--ray-port", str(ports["Ray"])]
        code, findings = doctor(*options, path=tmp_path, before="ulimit -n 512; ")
    assert code == 1
    assert_fails(findings, "torch build", "CUDA 12.8", "CPU build")
    assert_fails(findings, "torchvision", "nms does not exist", "pip uninstall torchvision")
    ray = finding_of(findings, "package ray")
    assert ray.severity == Severity.WARN and ray.message == "1.0" and "==2.60.0" in ray.fix
    assert_fails(findings, "open files", "512", "ulimit -n 65536")
    for program, port in ports.items():
        assert_fails(findings, f"port {port}", f"for {program}", "already in use", "ss -ltnp")


@pytest.mark.parametrize(("flags", "precision", "slow"), [
    ("fpu avx2 fma", "bf16", True), ("fpu avx2 fma", "fp32", False), ("avx2 avx512_bf16", "bf16", False),
    ("avx2 amx_bf16 amx_tile", "bf16", False), ("fp asimd bf16 i8mm", "bf16", False), ("fp asimd", "bf16", True),
])  # fmt: skip
def test_a_precision_that_the_cpu_must_emulate(flags: str, precision: str, slow: bool, tmp_path: Path) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n")
    result = check_precision(precision, facts)
    assert result.severity == (Severity.WARN if slow else Severity.OK)
    assert not slow or "trainer.precision = bf16" in result.message and "trainer.precision=fp32" in result.fix


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["nowhere-to-be-found==1.0"])
    assert_fails([next(check_packages())], "package nowhere-to-be-found", "not installed", "==1.0")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small tmpfs")
def test_small_and_full_shared_memory(tmp_path: Path) -> None:
    small = tmp_path / "shm"
    small.mkdir()
    for options, texts in (("size=64m", ["of 64 MiB", "--shm-size"]), ("size=1100m", ["remove what dead programs left"])):
        mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(small)], capture_output=True, text=True)
        if mount.returncode:
            pytest.skip(f"this container may not mount: {mount.stderr.strip()}")
        try:
            with open(small / "megarl-left", "wb") as left:
                os.posix_fallocate(left.fileno(), 0, (200 << 20) if "1100m" in options else 1)
            assert_fails(check_machine(tmp_path, small), "shared memory", *texts)
        finally:
            subprocess.run(["umount", str(small)], check=True)


def test_missing_shared_memory_and_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    findings = list(check_machine(tmp_path / "file" / "runs", tmp_path / "absent"))
    assert_fails(findings, "shared memory", "absent does not exist", "mount -t tmpfs")
    assert_fails(findings, "run directory", "file is a file")
    assert_fails(check_machine(Path("/proc/runs")), "run directory", "/proc takes no file")


def test_a_missing_interface() -> None:
    assert_fails(check_network({}, {"GLOO_SOCKET_IFNAME": "ib7"}), "GLOO_SOCKET_IFNAME", "ib7", "lo", "export")
    findings = list(check_network({}, {"NCCL_SOCKET_IFNAME": "l", "GLOO_SOCKET_IFNAME": "lo"}))
    assert {finding_of(findings, f"{name}_SOCKET_IFNAME").severity for name in ("NCCL", "GLOO")} == {Severity.OK}


def test_a_host_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-node.invalid")
    assert_fails(check_network({}), "host name", "no-such-node.invalid", "/etc/hosts")


def test_a_silent_controller_of_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert list(check_slurm({})) == []
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Slurmctld(primary) at node0 is DOWN'\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert_fails(check_slurm({"SLURM_JOB_ID": "1"}), "slurm controller", "node0 is DOWN", "slurmctld")


def test_a_model_that_this_node_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("megarl.cluster.doctor.check_packages", list)  # its imports take seconds
    options = DoctorOptions(run_dir=tmp_path, model=str(tmp_path / "model"))
    assert_fails(check_node(options), "model", "no config.json", "copy it to each")


def compare(
    reports: list[NodeReport],
    num_nodes: int,
    timeout_s: float,
    ahead_s: dict[int, float] | None = None,
    run_dirs: dict[int, Path] | None = None,
) -> list[list[CheckResult]]:
    """Return the findings of each node. The clocks stand still, `ahead_s` ahead, so that a slow answer on a busy machine
    does not count as a clock difference."""
    master, findings = ("127.0.0.1", unused_port()), {}

    def run(report: NodeReport) -> None:
        ahead, run_dir = (ahead_s or {}).get(report.rank, 0.0), (run_dirs or {}).get(report.rank)
        findings[report.rank] = compare_nodes(report, num_nodes, master, timeout_s, run_dir, lambda: NOON + ahead)

    threads = [threading.Thread(target=run, args=(report,)) for report in reports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    return [findings[report.rank] for report in reports]


A, B, C = (NodeReport(rank, "abc"[rank], VERSIONS) for rank in range(3))


def test_nodes_that_agree_get_the_same_findings() -> None:
    first, second = compare([A, B], 2, 60.0)
    assert first == second and {finding.severity for finding in first} == {Severity.OK}


def test_a_different_version_or_time_or_a_fault_of_one_node_fails_all_nodes() -> None:
    """A node that continued would wait for the other nodes."""
    other = replace(B, versions={**VERSIONS, "torch": "2.12.0"}, failures=["shared memory: full"])
    for findings in compare([A, other, C], 3, 60.0, {2: -90.0}):
        assert_fails(findings, "same torch", "a has 2.13.0", "b 2.12.0", "container image")
        assert_fails(findings, "same time", "c is -90.0 s from a", "chrony")
        assert_fails(findings, "node 1", "b: shared memory: full")


def test_a_run_directory_that_not_all_nodes_share(tmp_path: Path) -> None:
    """Two nodes share a file system; the third has a local directory."""
    for name in ("shared", "local"):
        (tmp_path / name).mkdir()
    # The run directories do not exist yet: the doctor uses the directory above.
    run_dirs = {0: tmp_path / "shared" / "runs", 1: tmp_path / "shared" / "runs", 2: tmp_path / "local" / "runs"}
    for findings in compare([A, B, C], 3, 20.0, run_dirs=run_dirs):
        assert_fails(findings, "shared run directory", f"{run_dirs[0]} what node 2 (c) writes", "run.dir")
        assert "node 1" not in finding_of(findings, "shared run directory").message
    for findings in compare([A, B], 2, 20.0, run_dirs=run_dirs):
        assert finding_of(findings, "shared run directory").severity == Severity.OK
    run_dirs[0].mkdir()
    for findings in compare([A, B], 2, 20.0, run_dirs=run_dirs):
        assert finding_of(findings, "shared run directory").severity == Severity.OK
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["local", "runs", "shared"], "a file was left"
    for findings in compare([A, B], 2, 20.0, run_dirs=dict.fromkeys(range(2), Path("/proc/runs"))):
        assert "shared run directory" not in [finding.check for finding in findings], "check_machine reports it"


def test_a_node_whose_report_stalls_is_sent_away_and_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.cluster.doctor.REQUEST_TIMEOUT_S", 0.2)
    master, findings = ("127.0.0.1", unused_port()), []
    first = threading.Thread(target=lambda: findings.extend(compare_nodes(A, 2, master, 60.0)))
    first.start()
    while True:
        try:
            stalled = socket.create_connection(master, 60.0)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)  # node 0 does not listen yet
    with stalled:
        stalled.sendall(b'{"rank": 1')
        assert stalled.recv(1) == b"\n" and stalled.recv(1) == b"", "node 0 closes the connection"
        others = compare_nodes(B, 2, master, 60.0)
    first.join(60.0)
    assert others == findings and {finding.severity for finding in findings} == {Severity.OK}


def test_node_0_reports_that_its_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        findings = compare_nodes(A, 2, ("127.0.0.1", port), 5.0)
    assert_fails(findings, "node 0", f"port {port}: Address already in use", "MASTER_PORT")


def test_missing_nodes_are_named_on_the_other_nodes() -> None:
    for findings in compare([A, C], 4, 4.0):
        assert_fails(findings, "nodes", "1, 3 of 4 did not come within 4 s")
    (findings,) = compare([B], 2, 1.0)
    assert_fails(findings, "node 0", "node 1 does not reach 127.0.0.1:", "refused", "firewall")
