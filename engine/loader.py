"""Loads a target from safetensors: every tensor consumed, every parameter loaded, or an error that lists the rest."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.layers import Linear, MergedColumnParallelLinear, VocabParallelEmbedding
from slipstream.engine.layers.linear import unallocated
from slipstream.engine.layers.quantized import quantise
from slipstream.engine.model_config import ModelConfig, read_model_json
from slipstream.engine.models.dense import DenseModel
from slipstream.engine.packed_weights import pack_for_device
from slipstream.engine.tensor_parallel import Shard, TensorParallel

_MODELS = dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"), DenseModel)
# Old checkpoints store the rope frequencies, which follow from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def load_target(
    directory: str | Path,
    dtype: torch.dtype | str,
    device: torch.device | str = "cpu",
    parallel: TensorParallel | None = None,
) -> DenseModel:
    """Loads the target of a Hugging Face directory (one safetensors file, or several and an index).

    Args:
        directory: of the target.
        dtype: of the parameters.
        device: where they go. On a card, weights are packed for the kernels that will read them (packed_weights.py).
        parallel: the ranks that share the target; this one reads its own part.

    Raises SlipstreamError for an unknown architecture, a truncated or unreadable file, and for any tensor that is
    missing, left over, or of another shape than the config says.
    """
    directory = Path(directory)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    config = ModelConfig.from_dir(directory)
    if config.architecture not in _MODELS:
        raise SlipstreamError(
            f"{directory / 'config.json'} names the architecture {config.architecture}",
            expected=f"one of {', '.join(_MODELS)}",
            do="use a target of a known architecture",
        )
    int4 = config.quantization
    with (
        known_forms(directory / "config.json", "use another target"),
        torch.device(device),
        unallocated() if int4 else nullcontext(),
    ):
        model = _MODELS[config.architecture](config, dtype, parallel)
    readers = quantise(model, int4, device, _checkpoint_name) if int4 else []
    shards = {_checkpoint_name(name): shard for name, shard in parameter_shards(model).items()}
    for reader in readers:
        shards |= reader.shards()
    load_tensors(tensor_files(directory), shards, alias=_tied_head(config), derived=_DERIVED)
    while readers:  # one after the other: each frees what it read
        readers.pop().finish()
    pack_for_device(model, device)
    return model.requires_grad_(False).eval()


@contextmanager
def known_forms(config: Path, do: str) -> Iterator[None]:
    """While layers are made as `config` says: where one has no such form, a SlipstreamError that names the file."""
    try:
        yield
    except ValueError as error:
        raise SlipstreamError(f"{config}: {error}", expected="what the layers know", do=do) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise SlipstreamError(
            f"{config} asks for layers that this machine has no memory for: {error}",
            expected="sizes of a model that fits",
            do=f"look at its sizes; {do}",
        ) from error


def _checkpoint_name(name: str) -> str:
    return name if name.partition(".")[0] == "lm_head" else f"model.{name}"


def _tied_head(config: ModelConfig) -> Mapping[str, str]:
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}


def parameter_shards(module: nn.Module) -> dict[str, Shard]:
    """Every parameter under its checkpoint name; the parts of a merged layer as views of its rows, under their own."""
    shards: dict[str, Shard] = {}
    for path, child in module.named_modules():
        if isinstance(child, Linear) and not hasattr(child, "weight"):
            continue  # an Int4Reader reads it
        if isinstance(child, MergedColumnParallelLinear):
            parent = path.rpartition(".")[0]
            own = {".".join(filter(None, (parent, part, "weight"))): s for part, s in child.shards().items()}
        elif isinstance(child, Linear | VocabParallelEmbedding):
            own = {f"{path}.{name}": shard for name, shard in child.shards().items()}
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
        for name, file in read_model_json(index)["weight_map"].items():
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

    Raises SlipstreamError that lists what is missing, left over, misshaped or of a dtype that cannot be.
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
        raise SlipstreamError(
            f"the checkpoint and the model differ in {len(faults)} tensors:\n    " + _some(faults, "\n    "),
            expected="every tensor used, every parameter loaded",
            do="check that config.json belongs to these files",
            fault="F8",
        )


def _some(items: list[str], separator: str = ", ", limit: int = 20) -> str:
    more = f"{separator}... and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more
