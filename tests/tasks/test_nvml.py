"""The driver's library by its C interface, through a stand-in with that interface; and none at all."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.tasks import gpu_memory
from slipstream.tasks.gpu_memory import GpuMemory
from slipstream.tasks.nvml import read_gpus


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    made = tmp_path_factory.mktemp("nvml") / "libfake.so"
    source = Path(__file__).parent / "fake_nvml.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return str(made)


@pytest.fixture
def users(monkeypatch):
    monkeypatch.setenv("FAKE_NVML_OURS", str(os.getpid()))
    monkeypatch.setenv("FAKE_NVML_PID", "4000000")


def test_no_driver_is_none():
    assert read_gpus("libno-such-library.so.1") is None


def test_a_driver_that_does_not_answer_is_none(library, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_FAIL", "1")
    assert read_gpus(library) is None


def test_everything_that_it_tells(library, users):
    found = read_gpus(library)
    assert (found.driver, found.cuda) == ("580.65.06", "13.0")
    first, second = found.cards
    assert (first.index, first.name, first.uuid, first.capability) == (0, "NVIDIA H200", "GPU-0", "9.0")
    assert (first.total_bytes, first.used_bytes) == (150 * 10**9, 60 * 10**9)
    assert first.users[0].pid == os.getpid()
    assert first.users[0].used_bytes == 59 * 10**9
    assert len(first.users) == 20  # more than the first question had room for
    assert first.users[1].used_bytes is None  # the driver may not tell
    assert (first.uncorrected_ecc_errors, first.row_remap_pending, first.row_remap_failed) == (0, False, False)
    assert (second.uncorrected_ecc_errors, second.row_remap_pending) == (3, True)
    assert first.persistence is True
    assert first.peers == {1: "nvlink"}
    assert second.peers == {0: "nvlink"}


def test_memory_for_the_clean_up_comes_from_there(library, users, monkeypatch):
    monkeypatch.setattr(gpu_memory, "read_gpus", lambda: read_gpus(library))
    first, second = gpu_memory.read_gpu_memory()
    assert first.used_bytes == 60 * 10**9
    assert first.pids[0] == os.getpid()
    assert second == GpuMemory(1, 60 * 10**9, (4000000, *range(4000001, 4000020)))
    monkeypatch.setattr(gpu_memory, "read_gpus", lambda: None)
    assert gpu_memory.read_gpu_memory() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_real_driver_knows_this_process():
    held = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    before = set(sys.modules)  # torch brings pynvml itself where it is installed
    found = read_gpus()
    assert found is not None
    (card,) = (one for one in found.cards if str(torch.cuda.get_device_properties(0).uuid) in one.uuid)
    assert card.name == torch.cuda.get_device_name(0)
    assert card.capability == ".".join(map(str, torch.cuda.get_device_capability(0)))
    assert held.numel() <= card.used_bytes <= card.total_bytes
    assert abs(card.total_bytes - torch.cuda.get_device_properties(0).total_memory) < 0.1 * card.total_bytes
    assert card.users  # in a container its pid is the host's, not ours
    assert set(card.peers) == {other.index for other in found.cards} - {card.index}
    assert not {name for name in set(sys.modules) - before if "nvml" in name}
