"""The tensors of a checkpoint's files, and where a model wants them: all used, all filled, or an error that lists."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.layers import Linear, MergedColumnParallelLinear, VocabParallelEmbedding
from slipstream.engine.layers.experts import RoutedExperts
from slipstream.engine.model_config import read_model_json
from slipstream.engine.tensor_parallel import Shard


def parameter_shards(module: nn.Module) -> dict[str, Shard]:
    """Every parameter under its checkpoint name; the parts of a merged layer as views of its rows, under their own."""
    shards: dict[str, Shard] = {}
    for path, child in module.named_modules():
        if isinstance(child, Linear) and not hasattr(child, "weight"):
            continue  # an Int4Reader reads it
        if isinstance(child, MergedColumnParallelLinear):
            parent = path.rpartition(".")[0]
            own = {".".join(filter(None, (parent, part, "weight"))): s for part, s in child.shards().items()}
        elif isinstance(child, RoutedExperts) and child.gate_up is None:
            continue  # likewise
        elif isinstance(child, Linear | VocabParallelEmbedding | RoutedExperts):
            own = {".".join(filter(None, (path, name))): shard for name, shard in child.shards().items()}
        else:
            parameters = child.named_parameters(prefix=path, recurse=False)
            own = {name: Shard.whole(parameter.data) for name, parameter in parameters}
        shards |= own
    return shards


def tensor_files(directory: Path) -> dict[str, list[str]]:
    """File path -> tensor names in it. With an index, a shard that is missing or lacks a listed tensor is an error."""
    index = directory / "model.safetensors.index.json"
    listed: dict[str, list[str]] | None = None
    paths = [directory / "model.safetensors"]
    if index.is_file():
        listed = {}
        for name, file in _weight_map(index).items():
            listed.setdefault(str(directory / file), []).append(name)
        paths = [Path(path) for path in sorted(listed)]
    files: dict[str, list[str]] = {}
    for path in paths:
        if not path.is_file():
            raise SlipstreamError(
                f"{path} does not exist",
                expected="every file of the checkpoint",
                do="copy or download the model directory again",
            )
        try:
            with safe_open(path, framework="pt") as file:
                files[str(path)] = list(file.keys())
        except SafetensorError as error:
            raise SlipstreamError(
                f"{path} ({path.stat().st_size:,} bytes) cannot be read: {error}",
                expected="a whole safetensors file; a truncated copy looks like this",
                do="copy or download this file again",
            ) from error
        absent = sorted(set(listed[str(path)]) - set(files[str(path)])) if listed else []
        if absent:
            raise SlipstreamError(
                f"{path} lacks {len(absent)} tensors that {index.name} lists in it: {_some(absent)}",
                expected="shards and index of one checkpoint",
                do="copy or download the model directory again",
            )
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name. Raises SlipstreamError for an index that names no files, or one elsewhere.

    What it names lies in its own directory, or below. A file there may be a link to wherever its owner wants it, as all
    are in the cache of a hub: links are made on this machine, an index comes from elsewhere.
    """
    found = read_model_json(index).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise SlipstreamError(
            f"{index} holds no weight_map of tensor names and file names",
            expected="the index that came with the shards",
            do="copy or download the model directory again",
        )
    for name, file in found.items():
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise SlipstreamError(
                f"{index} says that {name} lies in {file!r}",
                expected="a file of this directory (a link there may lead anywhere)",
                do="do not trust this checkpoint: copy or download the model directory again",
            )
    return found


def check_finite(views: Mapping[str, torch.Tensor]) -> None:
    """Raises SlipstreamError that names the weights with a NaN or an infinity: every answer would come out of it.

    Args:
        views: checkpoint name -> the part that was loaded, all on one device, which is asked once.
    """
    if all_true(are_finite(views.values())):
        return
    counts = {name: int((~view.isfinite()).sum()) for name, view in views.items()}
    faults = [f"{name}: {count} numbers of {views[name].numel()}" for name, count in counts.items() if count]
    raise SlipstreamError(
        f"{len(faults)} weights are not finite:\n    " + _some(faults, "\n    "),
        expected="finite numbers (neither NaN nor infinite)",
        do="copy or download the model directory again; if it is the same then, the checkpoint was saved broken",
        fault="F8",
    )


def are_finite(views: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Of each view that holds floats, whether all are finite: [] bool, on its device, which nobody waits for.

    By the smallest and the largest, which a NaN both becomes: one pass, at the memory's speed, without memory of its
    own (a sum in fp32 of bf16 takes longer on a CPU than reading the file).
    """
    ends = [view.aminmax() for view in views if view.is_floating_point() and view.numel()]
    return [(end.min > -math.inf) & (end.max < math.inf) for end in ends]


def all_true(flags: Sequence[torch.Tensor]) -> bool:
    """Flags [] bool of one device, which is asked once."""
    return not flags or bool(torch.stack(list(flags)).all())


def load_tensors(
    files: Mapping[str, list[str]],
    shards: Mapping[str, Shard],
    *,
    alias: Mapping[str, str] | None = None,
    derived: re.Pattern[str] | None = None,
) -> None:
    """Copies this rank's part of every tensor of `files` into the view of its name, in place.

    Files are mapped into memory, so that only the pages of that part are read.

    Args:
        files: path -> names, from `tensor_files`.
        shards: checkpoint name -> what to fill with which part.
        alias: names that may repeat another tensor; the repeat must be equal.
        derived: names that follow from the config and are passed over.

    Raises SlipstreamError that lists what is missing, left over, misshaped, of a dtype that cannot be or not finite.
    """
    alias = alias or {}
    missing = set(shards)
    faults: list[str] = []
    repeats: list[tuple[str, torch.Tensor]] = []
    for path, names in files.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                if derived is not None and derived.fullmatch(name):
                    continue
                if name not in shards and name not in alias:
                    faults.append(f"not used: {name} {file.get_slice(name).get_shape()}")
                    continue
                tensor = file.get_tensor(name)
                shard = shards[alias.get(name, name)]
                missing.discard(name)
                if tensor.dtype not in shard.dtypes:
                    known = ", ".join(str(dtype) for dtype in shard.dtypes)
                    faults.append(f"dtype: {name} is {tensor.dtype}, expected {known}")
                elif tensor.shape != shard.shape:
                    faults.append(f"shape: {name} is {list(tensor.shape)}, the config says {list(shard.shape)}")
                elif name in alias:
                    repeats.append((name, shard.take(tensor)))
                else:
                    shard.view.copy_(shard.take(tensor))
    faults += [f"missing: {name} {list(shards[name].shape)}" for name in sorted(missing)]
    for name, tensor in repeats:
        if not faults and not torch.equal(tensor.to(shards[alias[name]].view.dtype), shards[alias[name]].view.cpu()):
            faults.append(f"{name} differs from {alias[name]}, to which the config ties it")
    if faults:
        raise differ(faults)
    check_finite({name: shard.view for name, shard in shards.items()})


def differ(faults: list[str]) -> SlipstreamError:
    """For tensors that are missing, left over or of another shape or dtype, a line each."""
    return SlipstreamError(
        f"the checkpoint and the model differ in {len(faults)} tensors:\n    " + _some(faults, "\n    "),
        expected="every tensor used, every parameter loaded",
        do="check that config.json belongs to these files",
        fault="F8",
    )


def _some(items: list[str], separator: str = ", ", limit: int = 20) -> str:
    more = f"{separator}... and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more
