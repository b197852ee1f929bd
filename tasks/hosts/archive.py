"""The archive that a host runs: a few modules of ours that need only Python's standard library, in one zip file.

They are the same modules that run here, so that local and far hosts do the same. The archive is named by its content: a
host keeps each version that a running job still needs. Python runs a zip file as it is.
"""

import hashlib
import io
import zipfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

MODULES = (
    "slipstream.engine.errors",
    "slipstream.engine.files",
    "slipstream.tasks.hosts.commands",
    "slipstream.tasks.hosts.far_side",
    "slipstream.tasks.hosts.host_lock",
    "slipstream.tasks.hosts.jobs",
    "slipstream.tasks.hosts.keeper",
    "slipstream.tasks.hosts.machine_facts",
    "slipstream.tasks.hosts.make_environment",
    "slipstream.tasks.lock",
    "slipstream.tasks.manifest",
    "slipstream.tasks.nvml",
    "slipstream.tasks.os_errors",
    "slipstream.tasks.ports",
    "slipstream.tasks.proc_stat",
    "slipstream.tasks.process",
    "slipstream.tasks.shared_memory",
)
MINIMUM_PYTHON = (3, 10)
FOLDER = "archives"  # below Slipstream's directory on the host
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same content gives the same bytes
_MAIN = """\
import runpy, sys
if sys.version_info < {minimum!r}:
    sys.exit("slipstream: Python %s.%s is too old here" % sys.version_info[:2])
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Archive:
    """The archive's bytes, their SHA-256, and where it lies below Slipstream's directory on a host."""

    data: bytes
    sha256: str

    @property
    def path(self) -> str:
        return f"{FOLDER}/{self.sha256[:16]}.pyz"


@cache
def build_archive() -> Archive:
    """Packs the modules as they are installed here."""
    entries = {"__main__.py": _MAIN.format(minimum=MINIMUM_PYTHON).encode()}
    for name in MODULES:
        parts = name.split(".")
        for depth in range(1, len(parts)):
            entries["/".join([*parts[:depth], "__init__.py"])] = b""
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        entries["/".join(parts) + ".py"] = Path(spec.origin).read_bytes()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(entries):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), entries[name], zipfile.ZIP_DEFLATED)
    return Archive(made.getvalue(), hashlib.sha256(made.getvalue()).hexdigest())
