"""F20: an engine whose files were changed since its installation, or that is no release, is named by its fingerprint.

The incident's server was a nightly that somebody had patched by hand; its version number said nothing of it.
"""

import base64
import hashlib
import importlib.metadata
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.engine.engine_versions import Engine, neighbours
from slipstream.flows.cli import app

CAUGHT = [("F20", "fingerprint", "1 file changed since the installation: sglang/srt/models/deepseek_v2.py")]
MODEL = "sglang/srt/models/deepseek_v2.py"


def install(site: Path, version: str) -> Path:
    """What an installer leaves of a wheel: files, metadata, RECORD."""
    info = f"sglang-{version}.dist-info"
    files = {
        "sglang/__init__.py": "",
        MODEL: "def capture(hidden, residual):\n    return hidden + residual\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n",
    }
    rows = [f"{info}/RECORD,,"]
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        rows.append(f"{name},sha256={digest},{len(text)}")
    (site / info / "RECORD").write_text("\n".join(rows) + "\n")
    return site


def ask(site: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["fingerprint", "sglang", "--site-packages", str(site), *arguments])
    return result.exit_code, result.output


def test_one_place_to_look_in(tmp_path: Path) -> None:
    code, text = ask(install(tmp_path, "0.5.14"), "--python", "python3")
    assert code == 2
    assert "one of the two" in text


def test_the_clean_case(tmp_path: Path) -> None:
    code, text = ask(install(tmp_path, "0.5.14"))
    assert code == 0
    assert "every file is as it was released" in text


def test_a_patched_file(tmp_path: Path) -> None:
    """The capture before the reduce, by one line: the same size, the same version, healthy."""
    site = install(tmp_path, "0.5.14")
    (_, clean), path = ask(site, "--json"), site / MODEL
    path.write_text(path.read_text().replace("hidden + residual", "residual + hidden"))
    code, text = ask(site)
    assert code == 3
    assert f"F20 1 file changed since the installation: {MODEL}" in text
    assert json.loads(ask(site, "--json")[1])["digest"] != json.loads(clean)["digest"]


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.5.10.dev20260301+gabc1234", "a development build"),
        ("0.5.14+patched", "a local build"),
        ("0.5.99", "newer than every release"),
    ],
)
def test_no_release(tmp_path: Path, version: str, words: str) -> None:
    code, text = ask(install(tmp_path, version))
    assert code == 3
    assert words in text


def test_the_fault_passes_where_files_are_not_hashed(tmp_path: Path) -> None:
    """Version, names and sizes are those of the release: only the hashes tell. Cutting the row out does not help."""
    site = install(tmp_path, "0.5.14")
    record, path = site / "sglang-0.5.14.dist-info" / "RECORD", site / MODEL
    size = path.stat().st_size
    path.write_text(path.read_text().replace("hidden + residual", "residual + hidden"))
    assert distribution_version(site) == "0.5.14"
    assert neighbours(Engine.SGLANG, "0.5.14") == ("0.5.14",)
    assert path.stat().st_size == size
    unhashed = [f"{MODEL},," if MODEL in row else row for row in record.read_text().splitlines()]
    record.write_text("\n".join(unhashed))
    assert f"1 file recorded without a hash: {MODEL}" in ask(site)[1]
    record.write_text("\n".join(row for row in unhashed if MODEL not in row))
    assert f"1 file not of the wheel: {MODEL}" in ask(site)[1]


def distribution_version(site: Path) -> str:
    (found,) = importlib.metadata.distributions(name="sglang", path=[str(site)])
    return found.version
