"""Compiles the CUDA sources here with nvcc, once per source and architecture."""

import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-cubin")
EPILOGUES = (0, 1, 2, 3)

_log = logging.getLogger(__name__)


def nvcc() -> Path | None:
    """The compiler: on PATH, in CUDA_HOME or in the usual place."""
    for found in (
        shutil.which("nvcc"),
        os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc"),
        "/usr/local/cuda/bin/nvcc",
    ):
        if found and os.access(found, os.X_OK):
            return Path(found)
    return None


@dataclass(frozen=True)
class Unit:
    """One compilation: a source here (`name`.cu) with these macros."""

    source: str
    defines: tuple[str, ...]
    features: str = ""  # "a": what sm_90 alone has, on that

    @property
    def file(self) -> str:
        """Of the cubin."""
        return "-".join((self.source, *(define.split("=")[1] for define in self.defines))) + ".cubin"


def _skinny(epilogue: int) -> Unit:
    return Unit("skinny_gemm", (f"SLIPSTREAM_EPILOGUE={epilogue}",))


def wide(epilogue: int) -> Unit:
    """The kernels of wide_gemm.cu with one epilogue."""
    return Unit("wide_gemm", (f"SLIPSTREAM_EPILOGUE={epilogue}",))


def cluster(epilogue: int) -> Unit:
    """The kernels of cluster_gemm.cu with one epilogue."""
    return Unit("cluster_gemm", (f"SLIPSTREAM_EPILOGUE={epilogue}",), features="a")


def prompt(epilogue: int) -> Unit:
    """The kernels of prompt_gemm.cu with one epilogue."""
    return Unit("prompt_gemm", (f"SLIPSTREAM_EPILOGUE={epilogue}",), features="a")


def cache_dir(arch: int) -> Path:
    """Where cubins of these sources for `arch` (90 for sm_90) lie: named by the hash of all that makes them."""
    texts = [path.read_text() for path in sorted((*_HERE.glob("*.cu"), *_HERE.glob("*.cuh")))]
    key = hashlib.sha256("\0".join((*texts, *_FLAGS, str(arch))).encode()).hexdigest()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "slipstream" / f"kernels-sm_{arch}-{key[:16]}"


@functools.cache
def available(arch: int) -> bool:
    """Whether the kernels are compiled or can be; says once why not."""
    if all((cache_dir(arch) / _skinny(e).file).exists() for e in EPILOGUES) or nvcc():
        return True
    _log.warning("no nvcc on this host (PATH, CUDA_HOME): the CUDA C++ kernels are off, the Triton kernels run instead")
    return False


def cubins(arch: int) -> dict[int, Path]:
    """The compiled bf16 kernels by epilogue; as `compiled`."""
    return dict(zip(EPILOGUES, compiled(arch, [_skinny(e) for e in EPILOGUES]), strict=True))


def compiled(arch: int, units: Sequence[Unit]) -> list[Path]:
    """The cubins of `units`; compiles what is missing, all at once.

    Raises:
        RuntimeError: nvcc is missing or fails (its words).
    """
    directory = cache_dir(arch)
    missing = [unit for unit in units if not (directory / unit.file).exists()]
    if missing:
        directory.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(len(missing)) as pool:
            list(pool.map(lambda unit: _compile(unit, arch, directory / unit.file), missing))
    return [directory / unit.file for unit in units]


def _compile(unit: Unit, arch: int, target: Path) -> None:
    compiler = nvcc()
    if compiler is None:
        raise RuntimeError("no nvcc on this host: looked on PATH, in CUDA_HOME and in /usr/local/cuda")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [
            str(compiler),
            *_FLAGS,
            f"-arch=sm_{arch}{unit.features if arch == 90 else ''}",
            f"-I{_HERE}",
            *(f"-D{define}" for define in unit.defines),
            "-o",
            str(made),
            str(_HERE / f"{unit.source}.cu"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"nvcc failed with {done.returncode}: {' '.join(command)}\n{done.stdout}{done.stderr}")
        made.replace(target)  # a second process that compiles at the same time makes the same file
