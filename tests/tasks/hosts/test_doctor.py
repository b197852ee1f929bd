"""What a host's facts mean for a deployment: each finding has a consequence, and only what stops it is an error."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.configs.nccl import Nccl
from slipstream.configs.schema import Deployment
from slipstream.engine.bench.all_reduce import time_all_reduce
from slipstream.engine.errors import SlipstreamError
from slipstream.flows import cli
from slipstream.tasks.hosts.doctor import judge
from slipstream.tasks.hosts.doctor_sums import judge_sums, rows_to_time, time_sums
from slipstream.tasks.hosts.host import Job

GB = 10**9


def card(index, **changes):
    peers = {str(other): "nvlink" for other in range(2) if other != index}
    plain = {
        "index": index,
        "name": "NVIDIA H200",
        "uuid": f"GPU-{index}",
        "capability": "9.0",
        "total_bytes": 150 * GB,
    }
    plain |= {"used_bytes": GB // 2, "users": [], "persistence": True, "uncorrected_ecc_errors": 0}
    return {**plain, "row_remap_pending": False, "row_remap_failed": False, "peers": peers, **changes}


def user(**changes):
    plain = {"pid": 77, "used_bytes": 40 * GB, "ours": False, "visible": True, "command": "python train.py"}
    return {**plain, "user": "ann", **changes}


def facts(*cards, **changes):
    gpus = {"driver": "580.65.06", "cuda": "13.0", "cards": list(cards)} if cards else None
    plain = {"python": "3.12.3", "cores": 64, "nvcc": "/usr/local/cuda/bin/nvcc", "gpus": gpus, "xids": []}
    plain |= {"memory": {"total_bytes": 900 * GB, "available_bytes": 800 * GB}, "skew_seconds": 0.0}
    plain |= {
        "disk": {"path": "/x", "total_bytes": 900 * GB, "free_bytes": 500 * GB},
        "limits": {"nofile": [65536, 65536]},
    }
    plain |= {"shared_memory": {"total_bytes": 64 * GB, "free_bytes": 64 * GB, "segments": []}, "locks": {"gpus": []}}
    return {**plain, "port": {"port": 8000, "free": True, "holders": [], "problem": ""}, **changes}


def deployment(ranks=1, device="auto"):
    return Deployment.model_validate({"server": {"tensor_parallel_size": ranks, "device": device, "port": 8000}})


def found(value, ranks=1, device="auto", severity=None):
    return [f for f in judge(value, deployment(ranks, device)) if f.severity != "ok" and severity in (None, f.severity)]


def test_a_good_host_has_nothing_but_good_news():
    assert found(facts(card(0), card(1)), ranks=2) == []
    everything = judge(facts(card(0), card(1)), deployment(2))
    assert {finding.check for finding in everything} >= {"gpus", "gpu users", "topology", "disk", "port", "clock"}
    assert all(finding.consequence for finding in everything)


def test_a_foreign_process_is_named_and_left_alone():
    (one,) = found(facts(card(0, users=[user()], used_bytes=41 * GB)))
    assert (one.check, one.severity, one.fault, one.runbook) == ("gpu users", "error", "F15", "left-over-server.md")
    for words in ("GPU 0", "process 77 of ann", "python train.py", "40.0 GB"):
        assert words in one.found
    assert "left alone" in one.consequence


def test_a_process_of_another_container_is_told_as_such():
    (one,) = found(facts(card(0, users=[user(visible=False)], used_bytes=41 * GB)))
    assert "process 77 of the host (not in our process table, 40.0 GB)" in one.found
    (one,) = found(facts(card(0, used_bytes=41 * GB)))
    assert (one.severity, one.fault) == ("error", "F15")
    assert "names nobody" in one.found


def test_our_own_job_is_no_trouble():
    (one,) = found(facts(card(0, users=[user(ours=True)], used_bytes=41 * GB)))
    assert one.severity == "note"


@pytest.mark.parametrize(
    ("value", "ranks", "check", "severity", "words"),
    [
        (facts(card(0)), 2, "gpus", "error", "needs 2 cards"),
        (facts(card(0), card(1, name="NVIDIA A100")), 2, "gpus", "warning", "slowest"),
        (facts(card(0, peers={"1": "pcie"}), card(1, peers={"0": "pcie"})), 2, "topology", "note", "PCIe"),
        (facts(card(0, peers={"1": "host"}), card(1, peers={"0": "host"})), 2, "topology", "warning", "host's memory"),
        (facts(card(0, uncorrected_ecc_errors=3)), 1, "ecc", "error", "may be wrong"),
        (facts(card(0, row_remap_pending=True)), 1, "ecc", "warning", "next reset"),
        (facts(card(0, row_remap_failed=True)), 1, "ecc", "error", "replaced"),
        (facts(card(0, persistence=False)), 1, "persistence", "note", "seconds longer"),
        (facts(card(0), xids=[{"device": "PCI:0000:01:00", "code": 79}]), 1, "xid", "warning", "hardware"),
        (facts(card(0), xids=None), 1, "xid", "note", "not seen"),
        (facts(card(0), nvcc=None), 1, "nvcc", "warning", "Triton"),
        (facts(python="3.10.2"), 1, "python", "warning", "not the stages"),
        (facts(disk={"path": "/x", "total_bytes": GB, "free_bytes": GB}), 1, "disk", "warning", "gigabytes"),
        (facts(skew_seconds=-40.0), 1, "clock", "warning", "cannot be compared"),
        (facts(limits={"nofile": [1024, 4096]}), 1, "limits", "warning", "runs out"),
        (facts(locks={"gpus": ["job server of ann (process 7, since x)"]}), 1, "locks", "note", "refused"),
    ],
)
def test_what_is_wrong_and_what_it_costs(value, ranks, check, severity, words):
    finding = next(f for f in found(value, ranks) if f.check == check)
    assert finding.severity == severity
    assert words in f"{finding.consequence} {finding.do}"


def test_no_gpu_stops_only_who_needs_one():
    assert found(facts(), device="auto", severity="error") == []
    (one,) = found(facts(), device="cuda", severity="error")
    assert one.check == "gpus"


def test_little_shared_memory_stops_several_ranks_only():
    small = {"total_bytes": 64 << 20, "free_bytes": 64 << 20, "segments": []}
    assert found(facts(shared_memory=small), severity="error") == []
    (one,) = found(facts(card(0), card(1), shared_memory=small), ranks=2, severity="error")
    assert "--shm-size" in one.do


def test_left_segments_are_named_and_mapped_ones_are_not():
    segments = [
        {"name": "nccl-abc", "bytes": GB, "mine": True, "mapped": False},
        {"name": "sgl_shm_x", "bytes": GB, "mine": False, "mapped": False},
        {"name": "nccl-used", "bytes": GB, "mine": True, "mapped": True},
    ]
    (one,) = found(facts(card(0), shared_memory={"total_bytes": 64 * GB, "free_bytes": 60 * GB, "segments": segments}))
    assert "nccl-abc, sgl_shm_x (another user's)" in one.found
    assert "nccl-used" not in one.found


# ---- on a real host --------------------------------------------------------------------------------------------------


def test_the_facts_of_a_real_host(any_host, ssh_tools, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        value = any_host.facts(address="127.0.0.1", port=port)
        assert value["port"]["free"] is False
        assert f"process {os.getpid()} of user" in value["port"]["holders"][0]
    assert value["skew_seconds"] == 0.0
    assert value["cores"] == len(os.sched_getaffinity(0))
    assert value["disk"]["total_bytes"] == shutil.disk_usage(tmp_path).total
    assert 0 < value["memory"]["available_bytes"] < value["memory"]["total_bytes"]
    (error,) = [f for f in judge(value, deployment()) if f.severity == "error" and f.check == "port"]
    assert (error.fault, error.check) == ("F15", "port")


def test_a_card_with_a_foreign_process_and_one_of_ours(host, tmp_path, monkeypatch):
    """A whole look at a stand-in for the driver's library: a job of ours on one card, somebody else on the other."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler here")
    library = tmp_path / "libfake.so"
    source = Path(__file__).parents[1] / "fake_nvml.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    status = host.start(Job("server", (sys.executable, "-c", "import time; time.sleep(600)")))
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        monkeypatch.setenv("FAKE_NVML_OURS", str(status.members[-1]))
        monkeypatch.setenv("FAKE_NVML_PID", str(stranger.pid))
        monkeypatch.setattr("slipstream.tasks.hosts.scripted.LIBRARY", str(library))
        value = host.facts(address="127.0.0.1", port=0)
        first, second = value["gpus"]["cards"]
        assert (first["users"][0]["ours"], second["users"][0]["ours"]) == (True, False)
        assert second["users"][0]["command"] == "sleep 600"
        errors = [f for f in judge(value, deployment()) if f.severity == "error"]
        assert {f.check for f in errors} == {"gpu users", "ecc"}
        assert f"process {stranger.pid} of" in next(f for f in errors if "GPU 1" in f.found).found
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_skewed_clock_is_measured(host, monkeypatch):
    import time

    now = time.time
    monkeypatch.setattr("slipstream.tasks.hosts.scripted.time.time", lambda: now() + 100)
    assert -101 < host.facts(address="127.0.0.1", port=0)["skew_seconds"] < -99


def test_on_the_command_line(tmp_path):
    config = tmp_path / "d.yaml"
    config.write_text(f"host: {{workdir: {tmp_path / 'work'}}}\n")
    table = CliRunner().invoke(cli.app, ["doctor", str(config)], env={"COLUMNS": "200"})
    assert table.exit_code == 0, table.exception
    assert "everything runs on the CPU" in table.output or "cards" in table.output
    with socket.create_server(("127.0.0.1", 0)) as server:
        override = f"server.port={server.getsockname()[1]}"
        told = CliRunner().invoke(cli.app, ["doctor", str(config), "--json", "--set", override])
    assert told.exit_code == 3
    value = json.loads(told.output)
    assert [f["check"] for f in value["findings"] if f["severity"] == "error"] == ["port"]
    assert value["host"] == "this machine"


# ---- sums over ranks -------------------------------------------------------------------------------------------------


def timed(**changes):
    plain = {"ranks": 2, "card": "NVIDIA H200", "library": "nccl", "carrier": "peer memory", "rows": [1, 2, 3, 4]}
    plain |= {"hidden": 4096, "own_us": [6.0, 6.5, 7.0, 7.5], "default_us": [12.0, 12.0, 13.0, 14.0], "nccl": {}}
    return {**plain, "configured_us": None, "num_steps": 3, "topology": "nvlink", "hidden_known": True, **changes}


def test_sums_over_two_ranks_are_timed_on_the_command_line(tmp_path):
    config = tmp_path / "d.yaml"
    config.write_text(f"host: {{workdir: {tmp_path / 'work'}}}\nspeculation: {{num_steps: 2}}\nnccl: {{algo: Ring}}\n")
    told = CliRunner().invoke(cli.app, ["doctor", str(config), "--ranks", "2", "--set", "server.device=cpu", "--json"])
    assert told.exit_code == 0, told.output
    value = json.loads(told.output)
    sums = value["facts"]["all_reduce"]
    assert (sums["ranks"], sums["rows"], sums["library"], sums["carrier"]) == (2, [1, 2, 3], "gloo", "gloo")
    assert all(len(sums[key]) == 3 and min(sums[key]) > 0 for key in ("own_us", "default_us", "configured_us"))
    said = {f["check"]: f["consequence"] for f in value["findings"]}
    assert "gloo stands in" in said["all-reduce"]
    assert "gloo does not read them" in said["nccl values"]


def test_a_rank_that_ends_badly_is_told_with_its_words():
    with pytest.raises(SlipstreamError, match=r"ended with \[.*1.*\]") as error:
        time_all_reduce(2, (1,), 64, {}, device="cuda")
    assert "2 ranks, and torch sees" in error.value.found


@pytest.mark.parametrize(
    ("value", "check", "severity", "words"),
    [
        (timed(), "all-reduce", "ok", "NCCL's values do not act on them"),
        (timed(carrier="NCCL"), "all-reduce", "warning", "do not reach each other's memory"),
        (timed(nccl={"NCCL_ALGO": "Ring"}, configured_us=[12.0, 15.0, 13.0, 14.0]), "nccl values", "warning", "2 rows"),
        (timed(nccl={"NCCL_ALGO": "Ring"}, configured_us=[11.0, 12.0, 13.0, 14.5]), "nccl values", "ok", "no slower"),
    ],
)
def test_what_timed_sums_mean(value, check, severity, words):
    finding = next(f for f in judge_sums(value) if f.check == check)
    assert (finding.severity, words in finding.consequence) == (severity, True)
    if check == "nccl values" and severity == "ok":
        noted = json.loads(finding.do.partition("nccl.measured_for: ")[2])
        assert Nccl(algo="Ring", measured_for=noted).variables == {"NCCL_ALGO": "Ring"}


def test_rows_of_every_round_and_no_sums_beside_somebody_else():
    assert rows_to_time(0) == [1]
    assert rows_to_time(7) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rows_to_time(15) == [1, 2, 4, 8, 16]
    busy = facts(card(0), card(1, users=[user()]))
    with pytest.raises(SlipstreamError, match="somebody is on GPU 1"):
        time_sums(None, busy, deployment(2), 2)
