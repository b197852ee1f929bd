"""Slipstream on a host: an environment keyed by what it is made of, offline, verified, made once."""

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.hosts.follow import run_job
from slipstream.tasks.hosts.host import Job
from slipstream.tasks.hosts.provision import build_wheel, installed_versions, provision

SELF_TEST = "import json, tinydep\nprint('some words')\nprint(json.dumps({'answer': tinydep.ANSWER}))\n"


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str], *requires: str) -> Path:
    """A wheel by hand: a zip file with a record of its files."""
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {need}\n" for need in requires)
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {path: hashlib.sha256(text.encode()).digest() for path, text in files.items()}
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},{len(files[path].encode())}\n"
        for path, digest in digests.items()
    )
    folder.mkdir(exist_ok=True)
    made = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return made


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """(stand-in for Slipstream's wheel, wheelhouse with what it needs); no registry can be reached."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("PIP_RETRIES", "0")
    house = tmp_path / "house"
    make_wheel(house, "tinydep", "1.0", {"tinydep.py": "ANSWER = 42\n"})
    make_wheel(house, "tinydep", "2.0", {"tinydep.py": "ANSWER = 43\n"})
    files = {"slipstream_stand_in/__init__.py": "", "slipstream_stand_in/self_test.py": SELF_TEST}
    return make_wheel(tmp_path / "own", "slipstream", "0.1.0", files, "tinydep"), house


def make(host, wheels, **options):
    wheel, house = wheels
    options = {"constraints": "tinydep==1.0\n", "wheelhouse": house, "python": sys.executable, **options}
    return provision(host, wheel, self_test="slipstream_stand_in.self_test", **options)


def test_an_environment_is_made_offline_verified_and_found_again(any_host, wheels, tmp_path):
    said = []
    made = make(any_host, wheels, say=said.append)
    assert made.self_test == {"answer": 42}  # the pinned version, not the newest
    assert not made.was_there
    assert {"tinydep==1.0"} <= set(made.packages)
    assert any("sending tinydep-1.0" in line for line in said)
    assert any("ready:" in line for line in said)
    assert made.python == str(tmp_path / "far" / "environments" / made.key / "bin" / "python")
    ran = any_host.run((made.python, "-P", "-m", "slipstream_stand_in.self_test"))
    assert ran.exit_code == 0
    again = make(any_host, wheels, say=lambda line: pytest.fail(line))
    assert again == replace(made, was_there=True)


def test_the_second_host_gets_the_very_files_that_the_lock_names(host, wheels, tmp_path):
    from slipstream.tasks.hosts.local import LocalHost

    lock, said = tmp_path / "slipstream.lock", []
    first = make(host, wheels, lock=lock, say=said.append)
    _, house = wheels
    sha256 = hashlib.sha256((house / "tinydep-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    assert first.lock == (f"tinydep==1.0 --hash=sha256:{sha256}",)
    assert lock.read_text().splitlines()[1:] == list(first.lock)
    assert any("locked 1 packages" in line for line in said)
    lock.unlink()
    assert make(host, wheels, lock=lock).was_there
    assert lock.read_text().splitlines()[1:] == list(first.lock)
    second = LocalHost(tmp_path / "second")
    made = make(second, wheels, lock=lock)
    assert made.lock == first.lock
    assert made.self_test == {"answer": 42}
    # the same version, other bytes: without the lock nobody would know
    make_wheel(house, "tinydep", "1.0", {"tinydep.py": "ANSWER = 666\n"})
    assert make(LocalHost(tmp_path / "third"), wheels).self_test == {"answer": 666}
    with pytest.raises(
        SlipstreamError, match=r"(?s)DO NOT MATCH THE HASHES.*the packages cannot be installed"
    ) as error:
        make(LocalHost(tmp_path / "fourth"), wheels, lock=lock)
    assert "delete the lock file" in str(error.value)


def test_a_lock_of_other_versions_is_refused(host, wheels, tmp_path):
    lock = tmp_path / "slipstream.lock"
    make(host, wheels, lock=lock)
    with pytest.raises(SlipstreamError, match="locks other versions than those installed here") as error:
        make(host, wheels, lock=lock, constraints="tinydep==2.0\n")
    assert error.value.runbook == "first-deployment.md"


def test_what_it_is_made_of_changes_its_key(host, wheels):
    first = make(host, wheels)
    second = make(host, wheels, constraints="tinydep==2.0\n")
    assert second.key != first.key
    assert (first.self_test, second.self_test) == ({"answer": 42}, {"answer": 43})
    assert host.run((first.python, "-c", "import tinydep; print(tinydep.ANSWER)")).stdout == "42\n"  # as it was


def test_a_wheelhouse_that_lacks_something_says_so_and_can_be_completed(host, wheels, tmp_path):
    _, house = wheels
    missing = house / "tinydep-1.0-py3-none-any.whl"
    aside = missing.rename(tmp_path / missing.name)
    with pytest.raises(SlipstreamError, match="the packages cannot be installed") as error:
        make(host, wheels)
    assert "tinydep==1.0" in str(error.value)
    assert "wheelhouse" in str(error.value)
    assert error.value.runbook == "first-deployment.md"
    # the same question again finds the failed job, and asks once more instead of returning its failure for ever
    with pytest.raises(SlipstreamError, match="the packages cannot be installed"):
        make(host, wheels)
    aside.rename(missing)
    assert make(host, wheels).self_test == {"answer": 42}


def test_an_environment_whose_self_test_fails_is_no_environment(host, wheels, tmp_path):
    _, house = wheels
    broken = {"slipstream_stand_in/__init__.py": "", "slipstream_stand_in/self_test.py": "raise SystemExit(3)"}
    wheel = make_wheel(tmp_path / "broken", "slipstream", "0.1.0", broken, "tinydep")
    with pytest.raises(SlipstreamError, match=r"the self-test failed \(exit code 3\)"):
        make(host, (wheel, house))
    assert not list((tmp_path / "far" / "environments").glob("*/ready.json"))


def test_an_empty_wheelhouse_is_named(host, wheels, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SlipstreamError, match="there is no wheel in"):
        make(host, wheels, wheelhouse=tmp_path / "empty")


def test_versions_are_those_of_here_without_local_labels():
    lines = dict(line.split("==") for line in installed_versions("transformers").splitlines())
    assert lines["safetensors"] == version("safetensors")
    assert "transformers" not in lines
    assert not any("+" in value for value in lines.values())
    (torch,) = [line for line in installed_versions("accelerate").splitlines() if line.startswith("torch==")]
    assert torch == f"torch=={version('torch').split('+')[0]}"


def test_the_wheel_of_this_checkout_holds_what_a_host_runs(tmp_path):
    if (
        not (Path(__file__).parents[3] / "pyproject.toml").is_file()
        or "site-packages" in build_wheel.__code__.co_filename
    ):
        pytest.skip("installed from a wheel")
    try:
        wheel = build_wheel(tmp_path)
    except SlipstreamError as error:
        if "setuptools" in str(error):
            pytest.skip("no registry to fetch the build's tools from")
        raise
    (tmp_path / "again").mkdir()
    assert build_wheel(tmp_path / "again").read_bytes() == wheel.read_bytes()  # the same sources, the same key
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("kernels/self_test.py", "flows/cli.py", "tasks/hosts/archive.py", "configs/prompts.jsonl"):
        assert f"slipstream/{name}" in names


def test_the_real_self_test_passes_here():
    done = subprocess.run([sys.executable, "-P", "-m", "slipstream.kernels.self_test"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["error"] < 2**-6


def test_a_job_is_followed_to_its_end_line_by_line(any_host):
    code = "import time\nfor i in range(5): print('line', i, flush=True); time.sleep(0.1)\nprint('no newline', end='')"
    said = []
    status = run_job(any_host, Job("told", (sys.executable, "-c", code)), said.append)
    assert (status.state, status.exit_code) == ("exited", 0)
    assert said == [*(f"line {i}" for i in range(5)), "no newline"]
    later = []
    assert run_job(any_host, Job("told", (sys.executable, "-c", code)), later.append).attached
    assert later == said
