"""Loads a target from safetensors: every tensor consumed, every parameter loaded, or an error that lists the rest."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from slipstream.engine.deepseek_config import DEEPSEEK_ARCHITECTURES
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.expert_kernels import prepare_expert_kernels
from slipstream.engine.layers.linear import unallocated
from slipstream.engine.layers.quantized import check_scales, quantise
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.models.decoder import Decoder
from slipstream.engine.models.deepseek import DeepseekModel
from slipstream.engine.models.dense import DenseModel
from slipstream.engine.packed_weights import pack_for_device
from slipstream.engine.streamed_load import CheckpointNames, load_streamed
from slipstream.engine.tensor_files import load_tensors, parameter_shards, tensor_files
from slipstream.engine.tensor_parallel import TensorParallel

_MODELS: Mapping[str, type[Decoder]] = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"), DenseModel),
    **dict.fromkeys(DEEPSEEK_ARCHITECTURES, DeepseekModel),
}
# Old checkpoints store the rope frequencies, which follow from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def load_target(
    directory: str | Path,
    dtype: torch.dtype | str,
    device: torch.device | str = "cpu",
    parallel: TensorParallel | None = None,
    progress: Callable[[str], None] = lambda _what: None,
) -> Decoder:
    """Loads the target of a Hugging Face directory (one safetensors file, or several and an index).

    Args:
        directory: of the target.
        dtype: of the parameters.
        device: where they go. On a card, weights are packed for the kernels that will read them (packed_weights.py).
        parallel: the ranks that share the target; this one reads its own part.
        progress: told how far this rank is, where the target is read layer by layer (streamed_load.py).

    Raises SlipstreamError for an unknown architecture or one whose kernels cannot be had on this card
    (expert_kernels.py), a truncated or unreadable file, and for any tensor that is missing, left over, or of another
    shape than the config says.
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
    names, files = CheckpointNames.of(config), tensor_files(directory)
    _check_counts(directory / "config.json", config, names, files)
    prepare_expert_kernels(config, dtype, device)
    int4, streamed = config.quantization, config.experts is not None
    with (
        known_forms(directory / "config.json", "use another target"),
        torch.device(device),
        unallocated() if int4 or streamed else nullcontext(),
    ):
        model = _MODELS[config.architecture](config, dtype, parallel)
    if isinstance(model, DeepseekModel):
        load_streamed(model, files, names, int4, device, progress)
    else:
        readers = quantise(model, int4, device, names.name) if int4 else []
        shards = {names.name(name): shard for name, shard in parameter_shards(model).items()}
        for reader in readers:
            shards |= reader.shards()
        load_tensors(files, shards, alias=_tied_head(config), derived=_DERIVED)
        check_scales(readers)
        while readers:  # one after the other: each frees what it read
            readers.pop().finish()
    pack_for_device(model, device)
    return model.requires_grad_(False).eval()


def _check_counts(path: Path, config: ModelConfig, names: CheckpointNames, files: Mapping[str, list[str]]) -> None:
    """Raises SlipstreamError where `config` (of `path`) has more layers or experts than the files.

    Before they are made: even without memory for its weights, each costs time and memory.
    """
    numbered = re.compile(rf"{re.escape(names.prefix)}model\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?")
    found = [match for held in files.values() for name in held if (match := numbered.match(name))]
    layers = max((int(match[1]) + 1 for match in found), default=0)
    experts = max((int(match[2]) + 1 for match in found if match[2]), default=0)
    asked = {"num_hidden_layers": (config.num_layers, layers)}
    if config.experts is not None:
        asked["n_routed_experts"] = config.experts.num, experts
    for key, (told, held) in asked.items():
        if told > held:
            raise SlipstreamError(
                f"{path} says {key} = {told}, the files have tensors of {held}",
                expected="every tensor used, every parameter loaded",
                do="check that config.json belongs to these files, or copy the model directory again",
                fault="F8",
            )


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


def _tied_head(config: ModelConfig) -> Mapping[str, str]:
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
