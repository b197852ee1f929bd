"""Makes a Python environment with Slipstream on the host it runs on, as a job there, out of the archive.

    base/environments/KEY/       the environment; ready.json in it says that it was verified
    base/environments/KEY.json   what it is to be made of

A folder without ready.json is what a failed attempt left, and is made anew.
"""

import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import read_json
from slipstream.tasks.manifest import write_json
from slipstream.tasks.process import NEUTRAL_DIRECTORY

ENVIRONMENTS = "environments"
READY = "ready.json"
MODULE = "slipstream.tasks.hosts.make_environment"
SUPPORTED = ((3, 11), (3, 12))


def make(spec_file: Path) -> dict[str, Any]:
    """Makes and verifies the environment of a specification. Raises SlipstreamError that says which step failed.

    The specification: `wheel`, `constraints` (file of name==version lines), `lock` (file of requirements with their
    hashes, the wheel's included; "" for none yet), `wheelhouse` (folder, or "" for the host's registry) and `self_test`
    (a module of the installed package).
    """
    spec = read_json(spec_file, expected="what the environment is to be made of", do="provision again")
    if not SUPPORTED[0] <= sys.version_info[:2] <= SUPPORTED[1]:
        raise SlipstreamError(
            f"{sys.executable} is Python {'.'.join(map(str, sys.version_info[:3]))}",
            expected="Python 3.11 or 3.12, which Slipstream runs on",
            do="install one on the host and name it in host.python",
        )
    folder = spec_file.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    _say(f"a new environment in {folder}")
    try:
        venv.EnvBuilder(with_pip=True, symlinks=True).create(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SlipstreamError(
            f"no environment can be made with {sys.executable}: {error}",
            expected="a Python with venv and ensurepip",
            do="install them on the host (Debian, Ubuntu: apt-get install python3-venv)",
        ) from error
    python = str(folder / "bin" / "python")
    pip = [python, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input"]
    source = ["--no-index", "--find-links", spec["wheelhouse"]] if spec["wheelhouse"] else []
    report = folder / "installed.json"
    install = [*pip, "install", "--progress-bar", "off", *source, "--report", str(report)]
    if spec["lock"]:
        what = ["--require-hashes", "--requirement", spec["lock"]]
        do = "look which file changed, and who changed it; where that is right, delete the lock file and lock anew"
    else:
        what = ["--constraint", spec["constraints"], spec["wheel"]]
        do = "add what is missing to the wheelhouse" if source else "provision from a wheelhouse: --wheelhouse DIR"
    _step([*install, *what], "the packages cannot be installed", do)
    _step([*pip, "check"], "the packages contradict each other", "make the wheelhouse anew, of one resolution")
    packages = _told([*pip, "freeze", "--all"], "the packages cannot be listed")
    tested = _told([python, "-P", "-m", spec["self_test"]], "the self-test failed")
    try:
        result = json.loads(tested.splitlines()[-1])
    except (ValueError, IndexError):
        raise _failed("the self-test said nothing", "look at the lines above") from None
    ready = {"python": python, "packages": packages.splitlines(), "self_test": result, "lock": _locked(report, spec)}
    write_json(folder / READY, ready)
    _say(f"ready: {json.dumps(result)}")
    return ready


def _locked(report: Path, spec: dict[str, Any]) -> list[str]:
    """What was installed beside the wheel itself, as requirements with the hashes of the very files."""
    told = json.loads(report.read_text(encoding="utf-8"))["install"]
    return sorted(
        f"{one['metadata']['name']}=={one['metadata']['version']} "
        f"--hash=sha256:{one['download_info']['archive_info']['hashes']['sha256']}"
        for one in told
        if not one["download_info"]["url"].endswith("/" + Path(spec["wheel"]).name)
    )


def _step(command: Sequence[str], failed: str, do: str) -> None:
    """Runs a step; its output goes to the job's log."""
    _say(" ".join(command))
    code = subprocess.run(command, cwd=NEUTRAL_DIRECTORY).returncode
    if code != 0:
        raise _failed(f"{failed} (exit code {code})", do)


def _told(command: Sequence[str], failed: str) -> str:
    """What a step says on standard output, which goes to the log as well."""
    _say(" ".join(command))
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=NEUTRAL_DIRECTORY, text=True)
    print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        raise _failed(f"{failed} (exit code {done.returncode})", "look at the lines above")
    return done.stdout


def _failed(found: str, do: str) -> SlipstreamError:
    return SlipstreamError(found, expected="an environment that works", do=do)


def _say(text: str) -> None:
    print(f"slipstream: {text}", flush=True)


if __name__ == "__main__":
    try:
        make(Path(sys.argv[1]))
    except SlipstreamError as error:
        _say(f"error: {error}")
        sys.exit(1)
