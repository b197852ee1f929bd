"""The draft's first weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.drafts.eagle3.vocab import DraftVocab
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.layers import Attention
from slipstream.engine.layers.latent_attention import LatentAttention, rope_in_halves
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.streamed_load import CheckpointNames
from slipstream.engine.tensor_files import tensor_files
from slipstream.engine.training.data import ConversationSource
from slipstream.engine.training.least_squares import fit_fc, warm_start

METHODS = ("target", "random")


@dataclass(frozen=True)
class TargetWeights:
    """What training needs of the target.

    Args:
        embedding: [V, h].
        final_norm: [h].
        head: [V, h] (the embedding, where the two are tied).
        last_layer: the last decoder layer, by its names in a Hugging Face checkpoint without the layer's prefix
            ("self_attn.q_proj.weight", ...). May be empty; "target" init then starts the layer at random.
    """

    embedding: torch.Tensor
    final_norm: torch.Tensor
    head: torch.Tensor
    last_layer: Mapping[str, torch.Tensor]

    def to(self, device: torch.device) -> "TargetWeights":
        """The same weights on another device (a head that is the embedding stays one tensor with it)."""
        embedding = self.embedding.to(device)
        head = embedding if self.head is self.embedding else self.head.to(device)
        layer = {name: tensor.to(device) for name, tensor in self.last_layer.items()}
        return TargetWeights(embedding, self.final_norm.to(device), head, layer)

    @classmethod
    def from_dir(cls, directory: Path, num_layers: int) -> "TargetWeights":
        """Read them from a Hugging Face directory of safetensors. Routed experts are left out: no draft has them."""
        spelled = CheckpointNames.of(ModelConfig.from_dir(directory)).name
        prefix = spelled(f"layers.{num_layers - 1}.")
        wanted = (spelled("embed_tokens.weight"), spelled("norm.weight"), spelled("lm_head.weight"))

        def read(name: str) -> bool:
            return name in wanted or (name.startswith(prefix) and not name.startswith(f"{prefix}mlp.experts."))

        tensors: dict[str, torch.Tensor] = {}
        for path, names in tensor_files(directory).items():
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in filter(read, names)}
        missing = [n for n in wanted[:2] if n not in tensors]
        if missing:
            raise SlipstreamError(
                f"the target in {directory} has no {', '.join(missing)}",
                expected="a Hugging Face checkpoint of a known architecture",
                do="check the resolve stage's output",
            )
        return cls(
            embedding=tensors[wanted[0]],
            final_norm=tensors[wanted[1]],
            head=tensors.get(wanted[2], tensors[wanted[0]]),
            last_layer={k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)},
        )


@torch.no_grad()
def init_network(
    network: Eagle3Network,
    target: TargetWeights,
    vocab: DraftVocab,
    method: str,
    seed: int,
    source: ConversationSource | None = None,
) -> float | None:
    """Fill every parameter. The embedding is the target's, and frozen, whatever the method.

    Args:
        network, target: on one device. Drawn weights are the same on any.
        method: "random": linear layers as torch draws them, norms 1. "target": the head's rows of the draft
            vocabulary, the final norm and what fits of the last decoder layer come from the target; then `fc` and the
            attention are solved for on `source` (`least_squares`; latent attention is not linear, and stays).
        seed: of the drawn weights.
        source: training conversations. Without them "target" lets `fc` pass its last slot on, so that the draft starts
            as the target's own last layer reading the last feature, which is a worse start.

    Returns:
        The share of the next teacher state's variance that the warm start explains, None where there was none.

    Raises SlipstreamError when the embedding's shape is not the draft's, or the method is not known.
    """
    config = network.config
    if method not in METHODS:
        raise SlipstreamError(f"draft.init is {method!r}", expected=" or ".join(METHODS), do="change draft.init")
    if target.embedding.shape != network.embed_tokens.weight.shape:
        raise SlipstreamError(
            f"the target's embedding is {list(target.embedding.shape)}",
            expected=f"{list(network.embed_tokens.weight.shape)}: the draft shares it",
            do="make the draft's hidden_size and vocab_size the target's",
        )
    dtype = network.fc.weight.dtype
    network.embed_tokens.weight = nn.Parameter(target.embedding.to(dtype), requires_grad=False)
    network.d2t.copy_(vocab.d2t)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if name.endswith("norm.weight") or "fc_norm" in name:
            parameter.fill_(1.0)
        elif name != "embed_tokens.weight":
            bound = parameter.shape[-1] ** -0.5  # torch's own rule for linear layers
            parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
    if method == "random":
        return None
    network.lm_head.weight.copy_(target.head[vocab.target_ids])
    network.norm.weight.copy_(target.final_norm)
    width = config.target_hidden_size
    if width == config.hidden_size:
        network.fc.weight.mul_(_FC_NOISE)
        network.fc.weight[:, -width:] += torch.eye(width, dtype=dtype, device=network.fc.weight.device)
    _copy_last_layer(network, target.last_layer)
    if source is None:
        return None
    if isinstance(network.midlayer.self_attn, LatentAttention):
        fit_fc(network, source)
        return None
    return warm_start(network, source)


# Share of torch's own scale kept on `fc` and on the embedding's half of q, k, v under "target" init.
_FC_NOISE = 0.1
_EMBEDDING_NOISE = 0.1
_LATENT_PARTS = tuple(
    f"self_attn.{part}.weight" for part in ("q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj")
)


def _copy_last_layer(network: Eagle3Network, layer: Mapping[str, torch.Tensor]) -> None:
    """Copy what fits of the target's last layer; a part whose shape differs keeps its random start."""
    own, hidden = network.midlayer, network.config.hidden_size
    parameters = dict(own.named_parameters())
    if "input_layernorm.weight" in layer:
        _copy_if_same(own.hidden_norm.weight, layer["input_layernorm.weight"])
    for name in ("post_attention_layernorm.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight", *_LATENT_PARTS):
        if name in layer and name in parameters:
            _copy_if_same(parameters[name], layer[name])
    for rows, part in own.mlp.gate_up_proj.part_slices().items():
        if f"mlp.{rows}.weight" in layer:
            _copy_if_same(own.mlp.gate_up_proj.weight[part], layer[f"mlp.{rows}.weight"])
    attention = own.self_attn
    merged = attention.qkv_proj if isinstance(attention, Attention) else attention.qkv_a_proj
    for rows, part in merged.part_slices().items():
        source = layer.get(f"self_attn.{rows}.weight")
        # columns are [embedding; feature]: the target's layer read the feature's half
        if source is not None and source.shape == merged.weight[part, hidden:].shape:
            merged.weight[part, :hidden] *= _EMBEDDING_NOISE
            merged.weight[part, hidden:] = source.to(merged.weight.dtype)
    if isinstance(attention, LatentAttention):  # copied rows are in pairs, and drawn ones in no order
        rope = attention.latent.rope_dim
        keys = merged.weight[merged.part_slices()["kv_a_proj_with_mqa"]]
        keys.copy_(rope_in_halves(keys, 1, rope))
        queries = attention.q_b_proj.weight
        queries.copy_(rope_in_halves(queries, attention.heads.q, rope))


def _copy_if_same(parameter: torch.Tensor, source: torch.Tensor) -> None:
    if parameter.shape == source.shape:
        parameter.copy_(source)
