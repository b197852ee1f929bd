"""A full disk, for real: a small tmpfs as the workdir."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks import manifest as mf
from slipstream.tasks.stage import Stage, StageContext, run_stage

SIZE_MIB = 4


class NoDeployment:
    def model_dump(self, mode: str) -> dict[str, Any]:
        return {}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mount.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # a failed torch.save keeps its file open


def write_bytes(path: Path, mib: int) -> None:
    path.write_bytes(b"x" * (mib << 20))


def write_safetensors(path: Path, mib: int) -> None:
    save_file({"x": torch.zeros(mib << 20, dtype=torch.uint8)}, str(path))


def write_torch(path: Path, mib: int) -> None:
    torch.save({"x": torch.zeros(mib << 20, dtype=torch.uint8)}, path)


@pytest.mark.parametrize("write", [write_bytes, write_safetensors, write_torch])
def test_stage_on_a_full_disk_says_so_keeps_its_work_and_resumes(small_disk: Path, write: Any) -> None:
    resumed: list[bool] = []

    def body(context: StageContext) -> dict[str, Any]:
        resumed.append(context.resumed)
        for part in range(2):
            file = context.out / f"part{part}"
            if not file.exists():
                temporary = context.out / "writing"
                write(temporary, 1)
                temporary.rename(file)
        return {}

    run_stage(Stage("before", 1, (), (), lambda context: {"kept": True}), NoDeployment(), small_disk)  # type: ignore[arg-type]
    filler = small_disk / "somebody-else"
    write_bytes(filler, SIZE_MIB - 2)
    stage = Stage("big", 1, ("before",), (), body)
    with pytest.raises(SlipstreamError, match="is full") as error:
        run_stage(stage, NoDeployment(), small_disk)  # type: ignore[arg-type]
    assert "free space" in str(error.value)
    assert "big" in str(error.value)
    assert mf.read_json(small_disk / "before" / mf.MANIFEST)["figures"] == {"kept": True}

    filler.unlink()
    assert run_stage(stage, NoDeployment(), small_disk).status == "done"  # type: ignore[arg-type]
    assert resumed == [False, True]
