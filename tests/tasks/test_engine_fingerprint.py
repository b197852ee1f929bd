"""Fingerprint of an installed package, on packages that pip itself installed and recorded."""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.engine_fingerprint import SHOWN, fingerprint, search_path

FILES = {
    "sglang/__init__.py": "",
    "sglang/srt/models/llama.py": "layers_to_capture = [2, 16, 29]\n",
    "sglang/srt/kernels.so": "\x7fELF",
    "sglang/plain/notes.txt": "hello\n",  # a directory without __init__.py
}


def wheel(directory: Path, version: str = "0.5.14", name: str = "sglang") -> Path:
    """A wheel of FILES, with its RECORD."""
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = FILES | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{file},sha256={encoded('sha256', text)},{len(text)}" for file, text in files.items()]
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"}.items():
            archive.writestr(file, text)
    return path


def encoded(algorithm: str, text: str) -> str:
    """A digest as RECORD writes it."""
    return base64.urlsafe_b64encode(hashlib.new(algorithm, text.encode()).digest()).decode().rstrip("=")


def install(directory: Path, version: str = "0.5.14") -> Path:
    """A directory of packages with the wheel in it, by pip; as from an index, which leaves no direct_url.json."""
    site = directory / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*command, "--target", str(site), str(wheel(directory, version))], check=True)
    info = site / f"sglang-{version}.dist-info"
    (info / "direct_url.json").unlink()
    rows = (info / "RECORD").read_text().splitlines()
    assert [row for row in rows if "INSTALLER,sha256=" in row]  # pip's own
    (info / "RECORD").write_text("\n".join(row for row in rows if "direct_url" not in row) + "\n")
    return site


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("installed"))


@pytest.fixture
def site(installed: Path, tmp_path: Path) -> Path:
    """A copy of the installed directory, to be damaged."""
    return Path(shutil.copytree(installed, tmp_path / "site"))


def test_as_released(site: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = fingerprint("sglang", [str(site)], lambda done, total: seen.append((done, total)))
    assert found.problems == ()
    assert (found.name, found.version, found.location) == ("sglang", "0.5.14", site)
    assert found.source == ""
    assert found.files >= len(FILES)
    assert seen[-1] == (found.size_bytes, found.size_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_digest_is_that_of_the_files(installed: Path, site: Path) -> None:
    """The same wherever they lie, whoever installed them; another one for every other bit."""
    released = fingerprint("sglang", [str(installed)]).digest
    info = site / "sglang-0.5.14.dist-info"
    (info / "INSTALLER").write_text("another")
    assert fingerprint("sglang", [str(site)]).digest == released
    path = site / "sglang/srt/models/llama.py"
    path.write_text(path.read_text().replace("29", "30"))
    changed = fingerprint("sglang", [str(site)]).digest
    assert changed != released
    path.write_text(FILES["sglang/srt/models/llama.py"])
    assert fingerprint("sglang", [str(site)]).digest == released
    path.rename(path.with_name("llama2.py"))
    assert len({fingerprint("sglang", [str(site)]).digest, changed, released}) == 3
    path.with_name("llama2.py").rename(path)
    metadata = info / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.5.14", "0.5.15.post1"))
    assert fingerprint("sglang", [str(site)]).digest != released  # the version is part of it


def test_one_byte(site: Path) -> None:
    """The incident's server: patched by hand, of the same size, with the version of a release."""
    path = site / "sglang/srt/models/llama.py"
    path.write_text(path.read_text().replace("29", "30"))
    found = fingerprint("sglang", [str(site)])
    assert found.changed == ("sglang/srt/models/llama.py",)
    assert found.problems == ("1 file changed since the installation: sglang/srt/models/llama.py",)


def test_a_file_gone(site: Path) -> None:
    (site / "sglang/srt/kernels.so").unlink()
    found = fingerprint("sglang", [str(site)])
    assert (found.missing, found.changed, found.extra) == (("sglang/srt/kernels.so",), (), ())


def test_a_file_too_many(site: Path) -> None:
    for name in ("sglang/srt/patch.py", "sglang/plain/hook.so", "sglang/plain/log.txt", "elsewhere.py"):
        (site / name).write_text("x")
    (site / "sglang/__pycache__").mkdir(exist_ok=True)
    (site / "sglang/__pycache__/__init__.cpython-311.pyc").write_text("x")
    found = fingerprint("sglang", [str(site)])
    assert found.extra == ("sglang/plain/hook.so", "sglang/srt/patch.py")  # code, in its own packages
    assert (found.missing, found.changed) == ((), ())


def test_rows_without_a_hash(site: Path) -> None:
    record = site / "sglang-0.5.14.dist-info" / "RECORD"
    lines = record.read_text().splitlines()
    record.write_text("\n".join("sglang/srt/models/llama.py,," if "llama.py," in line else line for line in lines))
    (problem,) = fingerprint("sglang", [str(site)]).problems
    assert problem == "1 file recorded without a hash: sglang/srt/models/llama.py"
    before = fingerprint("sglang", [str(site)]).digest
    (site / "sglang/srt/models/llama.py").write_text("x")
    assert fingerprint("sglang", [str(site)]).digest != before  # the digest has it all the same


def test_many_files_are_counted(site: Path) -> None:
    for number in range(SHOWN + 5):
        (site / "sglang" / f"extra_{number:02}.py").write_text("x")
    (problem,) = fingerprint("sglang", [str(site)]).problems
    assert problem.startswith(f"{SHOWN + 5} files not of the wheel: sglang/extra_00.py, ")
    assert problem.endswith("and 5 more")


@pytest.mark.parametrize(
    ("told", "source", "doubt"),
    [
        ({"url": "file:///src/sglang", "dir_info": {"editable": True}}, "editable: file:///src/sglang", "editable"),
        ({"url": "file:///src/sglang", "dir_info": {}}, "built from file:///src/sglang", "built from the directory"),
        (
            {"url": "https://example.org/sglang", "vcs_info": {"vcs": "git", "commit_id": "9f2c1d4"}},
            "git https://example.org/sglang at 9f2c1d4",
            "not that of a release",
        ),
        ({"url": "file:///w/sglang.whl", "archive_info": {}}, "the file file:///w/sglang.whl", ""),
        ([1], "unknown", "damaged"),
        ({"url": 1}, "unknown", "damaged"),
        ({"url": None}, "unknown", "damaged"),
        ({"url": "x", "dir_info": "editable"}, "unknown", "damaged"),
        ({"url": "x", "dir_info": None}, "unknown", "damaged"),
        ({"url": "x", "vcs_info": []}, "unknown", "damaged"),
    ],
)
def test_where_it_came_from(site: Path, told: object, source: str, doubt: str) -> None:
    (site / "sglang-0.5.14.dist-info" / "direct_url.json").write_text(json.dumps(told))
    found = fingerprint("sglang", [str(site)])
    assert found.source == source
    assert len(found.problems) == bool(doubt)
    assert doubt in "".join(found.problems)


def test_another_algorithm(site: Path) -> None:
    record = site / "sglang-0.5.14.dist-info" / "RECORD"
    digest = encoded("sha512", FILES["sglang/srt/kernels.so"])
    lines = record.read_text().splitlines()
    record.write_text("\n".join(f"sglang/srt/kernels.so,sha512={digest},4" if ".so" in x else x for x in lines))
    assert fingerprint("sglang", [str(site)]).problems == ()
    (site / "sglang/srt/kernels.so").write_text("\x7fELG")
    assert fingerprint("sglang", [str(site)]).changed == ("sglang/srt/kernels.so",)


def test_not_installed_and_without_a_record(site: Path) -> None:
    with pytest.raises(SlipstreamError, match="vllm is not installed in") as caught:
        fingerprint("vllm", [str(site)])
    assert caught.value.fault == "F20"
    (site / "sglang-0.5.14.dist-info" / "RECORD").unlink()
    with pytest.raises(SlipstreamError, match="has no RECORD"):
        fingerprint("sglang", [str(site)])


def test_another_python(tmp_path: Path) -> None:
    assert any(path.endswith("site-packages") for path in search_path(Path(sys.executable)))
    with pytest.raises(SlipstreamError, match="does not run as a Python"):
        search_path(tmp_path / "python3")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (b"", "has no hash"),
        (b"sglang/__init__.py,,\n", "has no hash"),
        (b"sglang/__init__.py,sha256=abc\n", "is no row of path, hash and size"),
        (b'"sglang/__init__.py,sha256=abc,4\n', "is damaged: unexpected end of data"),
        (b"sglang/__init__.py,foo=abc,4\n", "is no row of path, hash and size"),
        (b"sglang/__init__.py,abc,4\n", "is no row of path, hash and size"),
        (b"sglang/__init__.py,shake_128=abc,4\n", "is no row of path, hash and size"),
        (b"\xff\xfe\0,sha256=abc,4\n", "is damaged"),
        (b'"' + b"x" * 200_000 + b'",sha256=abc,4\n', "is damaged"),
    ],
)
def test_a_record_that_checks_nothing_is_never_passed(site: Path, record: bytes, words: str) -> None:
    """A row that is skipped would be a file that nobody looks at, and an empty RECORD a clean engine."""
    (site / "sglang-0.5.14.dist-info" / "RECORD").write_bytes(record)
    with pytest.raises(SlipstreamError, match=words) as caught:
        fingerprint("sglang", [str(site)])
    assert caught.value.fault == "F20"


def test_a_recorded_name_that_no_file_can_have(site: Path) -> None:
    record = site / "sglang-0.5.14.dist-info" / "RECORD"
    record.write_text(record.read_text() + "sglang/" + "x" * 300 + ".py,sha256=abc,4\n")
    (missing,) = fingerprint("sglang", [str(site)]).missing
    assert missing == "sglang/" + "x" * 300 + ".py"


@pytest.mark.parametrize("metadata", [b"", b"Name: sglang\n", b"Version: 0.5.14\n", b"\xff\xfe\0"])
def test_damaged_metadata(site: Path, metadata: bytes) -> None:
    (site / "sglang-0.5.14.dist-info" / "METADATA").write_bytes(metadata)
    with pytest.raises(SlipstreamError, match=r"METADATA of sglang in .* is damaged"):
        fingerprint("sglang", [str(site)])


def test_no_name_is_not_any_package(site: Path) -> None:
    with pytest.raises(SlipstreamError, match="a package without a name is not installed"):
        fingerprint("", [str(site)])


def test_two_records_in_one_directory(site: Path) -> None:
    """An upgrade that broke off: which of the two runs is in no record."""
    shutil.copytree(site / "sglang-0.5.14.dist-info", site / "sglang-0.5.9.dist-info")
    metadata = site / "sglang-0.5.9.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.5.14", "0.5.9"))
    problems = fingerprint("sglang", [str(site)]).problems
    assert any("one was installed over another" in problem for problem in problems)
