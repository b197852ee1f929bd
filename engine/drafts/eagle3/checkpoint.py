"""A draft as a directory: the plain Hugging Face EAGLE-3 form, there and back.

draft/
  config.json        see `hf_config`
  slipstream.json
  model.safetensors  fc, midlayer.*, norm, lm_head, embed_tokens, d2t (int64 offsets), t2d (bool); rope rows of latent
                   attention in pairs, as its target's
"""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.drafts.eagle3.hf_config import CONFIG, DraftRecord, read_config, write_configs
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.drafts.eagle3.tensor_checks import check_names_and_shapes, check_numbers, check_vocabulary
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import write_atomic
from slipstream.engine.layers.latent_attention import rope_in_halves, rope_in_pairs
from slipstream.engine.loader import known_forms
from slipstream.engine.packed_weights import pack_for_device
from slipstream.engine.tensor_files import parameter_shards
from slipstream.engine.tensor_parallel import Shard, TensorParallel

WEIGHTS = "model.safetensors"
# Other writers' names of the one layer, which both engines take for `midlayer`.
_LAYER_ALIAS = "layers.0."


def to_tensors(network: Eagle3Network, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The network's parameters by file name, d2t and t2d included.

    Args:
        network: a draft, whole on this rank.
        dtype: of the parameters in the file; None keeps theirs.

    Returns:
        name -> contiguous tensor on the CPU: parameters in `dtype`, d2t int64 [Vd], t2d bool [V].
    """
    if network.parallel.size != 1:
        raise ValueError(f"rank {network.parallel.rank} of {network.parallel.size} holds only a part of the draft")
    views = {name: shard.view for name, shard in parameter_shards(network).items()}
    tensors = {name: view.to("cpu", dtype or view.dtype) for name, view in views.items()}
    tensors |= _rope_rows(network.config, tensors, rope_in_pairs)
    d2t = network.d2t.to("cpu", torch.int64)
    t2d = torch.zeros(network.config.vocab_size, dtype=torch.bool)
    ids = d2t + torch.arange(len(d2t))
    t2d[ids[(ids >= 0) & (ids < len(t2d))]] = True  # ids outside are reported by the check of d2t
    return {n: t.contiguous() for n, t in tensors.items()} | {"d2t": d2t, "t2d": t2d}


def from_tensors(
    config: Eagle3Config,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    *,
    where: str,
    target_embedding: torch.Tensor | None = None,
    parallel: TensorParallel | None = None,
    skip: Collection[str] = (),
) -> Eagle3Network:
    """A network from tensors by file name.

    Args:
        config: of the draft.
        tensors: as `to_tensors` gives them; `layers.0.` is read as `midlayer.`.
        dtype: of the network's parameters.
        where: what is read, for errors.
        target_embedding: [V, h] (this rank's rows of it); taken where the tensors hold no `embed_tokens.weight`, and
            shared where they hold the same bits. The network is made on its device, without one on the CPU.
        parallel: the ranks that share the draft; this one keeps its own part.
        skip: faults whose checks are off.

    Raises SlipstreamError: F8 for names and shapes, F9 for the draft vocabulary.
    """
    tensors = {
        (f"midlayer.{name.removeprefix(_LAYER_ALIAS)}" if name.startswith(_LAYER_ALIAS) else name): tensor
        for name, tensor in tensors.items()
    }
    tensors |= _rope_rows(config, tensors, rope_in_halves)
    with torch.device(target_embedding.device if target_embedding is not None else "cpu"):
        network = Eagle3Network(config, dtype, parallel)
    shards = parameter_shards(network) | {"d2t": Shard.whole(network.d2t)}
    check_vocabulary(tensors, config.vocab_size, config.draft_vocab_size, where=where, skip=skip)
    needed = {name: shard.shape for name, shard in shards.items()} | {"t2d": torch.Size([config.vocab_size])}
    # A reduced vocabulary's lm_head and d2t belong to the check above; a whole one needs no map.
    optional = {"d2t", "t2d"} | ({"lm_head.weight"} if config.draft_vocab_size < config.vocab_size else set())
    if target_embedding is not None:
        optional.add("embed_tokens.weight")
    found = {name: tensor.shape for name, tensor in tensors.items()}
    check_names_and_shapes(found, needed, where=where, optional=optional, skip=skip)
    if "F8" not in skip:
        check_numbers(tensors, where)
    with torch.no_grad():
        for name, shard in shards.items():
            if name in tensors and tensors[name].shape == shard.shape:
                shard.view.copy_(shard.take(tensors[name]))
    if target_embedding is not None:
        shared = target_embedding.detach().to(dtype)
        if "embed_tokens.weight" not in tensors or torch.equal(network.embed_tokens.weight, shared):
            network.embed_tokens.weight = nn.Parameter(shared, requires_grad=False)
    return network


def _rope_rows(
    config: Eagle3Config,
    tensors: Mapping[str, torch.Tensor],
    order: Callable[[torch.Tensor, int, int], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Those that rope rows are in, with the rows in that order; what is misshaped is left for the check of shapes."""
    latent = config.latent
    if latent is None:
        return {}
    rows = {"q_b_proj": (config.num_heads, config.head_dim), "kv_a_proj_with_mqa": (1, latent.cell)}
    found = {}
    for part, (heads, size) in rows.items():
        tensor = tensors.get(name := f"midlayer.self_attn.{part}.weight")
        if tensor is not None and tensor.dim() == 2 and len(tensor) == heads * size:
            found[name] = order(tensor, heads, latent.rope_dim)
    return found


def save_draft(
    directory: Path,
    network: Eagle3Network,
    record: DraftRecord,
    *,
    dtype: torch.dtype | None = None,
    served_tokens: int = 0,
    skip: Collection[str] = (),
) -> None:
    """Writes a draft directory.

    Args:
        directory: made when it does not exist.
        network: the draft.
        record: where it comes from.
        dtype: of the parameters in the file; None keeps theirs.
        served_tokens: longest context that will be served, which the rope table must cover.
        skip: faults whose checks are off.

    Raises SlipstreamError: F9 for a damaged d2t, F14 for a rope table that is too short.
    """
    config = network.config
    if config.max_position < served_tokens and "F14" not in skip:
        raise SlipstreamError(
            f"the draft's positions end at {config.max_position}, the server's context at {served_tokens} tokens",
            expected="a draft context at least as long: vLLM reads beyond the rope table otherwise",
            do=f"set draft.max_context_tokens to {served_tokens} or more, or lower server.max_context_tokens",
            fault="F14",
        )
    tensors = to_tensors(network, dtype)
    # t2d was made from d2t just now and proves nothing about it.
    own = {name: tensors[name] for name in ("lm_head.weight", "d2t")}
    check_vocabulary(own, config.vocab_size, config.draft_vocab_size, where="the trained draft", skip=skip)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    write_configs(directory, config, record, str(tensors["fc.weight"].dtype).split(".")[-1])


def load_draft(
    directory: Path,
    dtype: torch.dtype | None = None,
    *,
    target_embedding: torch.Tensor | None = None,
    slots: tuple[int, ...] | None = None,
    target_num_layers: int | None = None,
    family: Family | None = None,
    parallel: TensorParallel | None = None,
    skip: Collection[str] = (),
) -> Eagle3Network:
    """Loads a draft directory, its own or one of the same form by another trainer.

    Args:
        directory: see the head of this file.
        dtype: of the parameters; None is that of the file.
        target_embedding: [V, h] (this rank's rows of it), for a draft that leaves its embedding to the target's or
            holds a copy of it. The draft is loaded to its device, without one to the CPU; on a card its weights are
            packed as the target's are.
        slots, target_num_layers, family: for a draft without slipstream.json; of the target, the latter two.
        parallel: the ranks that share the draft; this one keeps its own part.
        skip: faults whose checks are off.

    Raises SlipstreamError: F8, F9, F2 and F3 (config.json and slipstream.json disagree), a form that no layer has, or
    a file that is cut short.
    """
    config = read_config(directory, slots=slots, target_num_layers=target_num_layers, family=family, skip=skip)
    tensors = read_tensors(directory)
    if dtype is None:
        value = json.loads((directory / CONFIG).read_text())
        dtype = getattr(torch, value.get("dtype") or value.get("torch_dtype") or "float32")
    with known_forms(directory / CONFIG, "use another draft"):
        network = from_tensors(
            config,
            tensors,
            dtype,
            where=str(directory / WEIGHTS),
            target_embedding=target_embedding,
            parallel=parallel,
            skip=skip,
        )
    pack_for_device(network, network.d2t.device)
    return network


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a draft directory, by file name. Raises SlipstreamError for a missing or damaged file."""
    path = directory / WEIGHTS
    try:
        return load_file(path)
    except FileNotFoundError:
        raise SlipstreamError(f"{path} does not exist", expected="a draft directory", do="convert again") from None
    except SafetensorError as error:
        raise SlipstreamError(
            f"{path} ({path.stat().st_size:,} bytes) cannot be read: {error}",
            expected="a whole safetensors file; a truncated copy looks like this",
            do="copy it again, or convert again: `slipstream stage convert CONFIG`",
        ) from error
