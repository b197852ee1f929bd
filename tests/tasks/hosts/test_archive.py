"""The archive: the same modules as here, standard library only, for every Python that a host may have."""

import ast
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from slipstream.tasks.hosts.archive import MINIMUM_PYTHON, MODULES, build_archive
from slipstream.tasks.hosts.far_side import MODULE
from slipstream.tasks.hosts.host import Job


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "archive.pyz"
    path.write_bytes(build_archive().data)
    return path


def ask(python, archive, base, call, **arguments):
    request = {"nonce": "N", "base": str(base), "call": call, "arguments": arguments}
    done = subprocess.run(
        [python, "-I", "-S", str(archive), MODULE],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("N ")]
    assert lines, done.stderr
    return json.loads(lines[0][2:])


def pythons():
    """This Python, and of every version that a host may have one that is at hand."""
    names = [f"python3.{minor}" for minor in range(MINIMUM_PYTHON[1], 16)]
    roots = [*os.environ.get("PATH", "").split(os.pathsep), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]
    found = {name: shutil.which(name, path=os.pathsep.join(r for r in roots if "shims" not in r)) for name in names}
    return {sys.executable, *(path for path in found.values() if path)}


@pytest.mark.parametrize("python", sorted(pythons()))
def test_it_runs_a_job_without_site_packages(python, archive, tmp_path, ssh_tools):
    job = Job("job", ("sh", "-c", "echo done; exit 3"))
    spec = {"command": list(job.command), "directory": "", "owner": "x", "locks": ["gpus"], "secrets": {}, "env": {}}
    spec |= {"lock_folder": str(tmp_path / "locks"), "submission": job.submission, "name": job.name}
    started = ask(python, archive, tmp_path / "far", "start_job", **spec)["value"]
    assert started["state"] in ("running", "exited")
    ended = ssh_tools.wait_for(
        lambda: (
            (v := ask(python, archive, tmp_path / "far", "job_status", name="job")["value"])["state"] == "exited" and v
        )
    )
    assert ended["exit_code"] == 3
    assert Path(ended["log"]).read_text() == "done\n"
    done = ask(
        python,
        archive,
        tmp_path / "far",
        "run_command",
        command=["cat"],
        stdin="x",
        seconds=9,
        max_bytes=9,
        directory="",
    )
    assert done["value"]["stdout"] == "x"


def test_its_modules_are_all_that_they_import():
    for name in MODULES:
        tree = ast.parse(Path(find_spec(name).origin).read_text(), feature_version=MINIMUM_PYTHON)
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for imported in names:
                assert imported in MODULES or imported.split(".")[0] in sys.stdlib_module_names, (name, imported)


def test_the_same_modules_give_the_same_bytes():
    first = build_archive()
    build_archive.cache_clear()
    assert build_archive() == first
    assert len(first.data) < 64_000


def test_an_old_python_is_refused_in_words(archive, tmp_path):
    old = next(iter(sorted(Path.home().glob(".pyenv/versions/3.[89].*/bin/python"))), None)
    if old is None:
        pytest.skip("no older Python at hand")
    done = subprocess.run(
        [str(old), "-I", str(archive), MODULE], input="{}", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "is too old here" in done.stderr


def test_a_failure_that_nobody_foresaw_comes_back_whole(archive, tmp_path):
    told = ask(sys.executable, archive, tmp_path / "far", "job_status", nonsense=1)
    assert "TypeError" in told["broken"]
    assert ask(sys.executable, archive, tmp_path / "far", "no_such_call")["broken"]


def test_what_the_system_refuses_comes_back_in_words(archive, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "jobs").write_text("a file in the way")
    far = tmp_path / "far"
    told = ask(sys.executable, archive, far, "prepare_folder", folder="jobs/x", part="jobs/x/f.part")["error"]
    assert "prepare_folder" in told["found"]
    assert "host.directory" in told["do"]
