"""Models of known sizes with random weights, made on the device: what a step costs does not depend on the values."""

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from slipstream.engine.bench.random_deepseek import kimi_k25_rank, random_deepseek
from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.layers.linear import unallocated
from slipstream.engine.layers.quantized import Int4Reader, quantise
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.models.decoder import Decoder
from slipstream.engine.models.dense import DenseModel
from slipstream.engine.packed_weights import pack_for_device
from slipstream.engine.quantization import Quantization

_DRAFT_HEAD_DIM = 128  # of a draft with plain attention for a target that has latents


@dataclass(frozen=True)
class Size:
    """Dimensions of a target and of a draft for it.

    Args:
        int4_group: the target's layers have INT4 weights with a scale for so many input features; 0: bf16.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    rope_theta: float
    draft_vocab_size: int
    draft_intermediate_size: int
    int4_group: int = 0

    @property
    def weight_bytes(self) -> float:
        """Of one weight of a decoder layer's matrices."""
        return 0.5 + 2 / self.int4_group if self.int4_group else 2.0

    @property
    def layer_parameters(self) -> int:
        """Weights of a decoder layer's matrices."""
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.hidden_size
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def draft_step_parameters(self) -> int:
        """Weights that one draft step reads: its layer (2h wide in front) and its head."""
        h = self.hidden_size
        attention = (
            self.num_heads + 2 * self.num_kv_heads
        ) * self.head_dim * 2 * h + self.num_heads * self.head_dim * h
        return attention + 3 * h * self.draft_intermediate_size + self.draft_vocab_size * h

    def target_bytes(self, rows: int) -> float:
        """Bytes of weights that a pass of the target over so many rows reads: layers and head, whatever the rows."""
        return self.num_layers * self.layer_parameters * self.weight_bytes + self.vocab_size * self.hidden_size * 2

    def step_bytes(self, num_steps: int, batch: int = 1) -> float:
        """Bytes of weights that a round of K drafts reads once: the target, K draft steps and the draft's fc."""
        h = self.hidden_size
        draft = num_steps * self.draft_step_parameters * 2 + (3 * h * h * 2 if num_steps else 0)
        return self.target_bytes(batch * (num_steps + 1)) + draft

    def kv_bytes(self, context: int) -> int:
        """Bytes of keys and values that a step of one request reads at `context` tokens."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim * context

    def target_config(self, max_position: int = 8192) -> ModelConfig:
        return ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=1e-5,
            rope_theta=self.rope_theta,
            rope_scaling=None,
            max_position=max_position,
            tie_word_embeddings=self.tied,
            bos_token_id=0,
            eos_token_ids=(),
            dtype="bfloat16",
        )

    def draft_config(self, max_position: int = 8192) -> Eagle3Config:
        return Eagle3Config(
            hidden_size=self.hidden_size,
            intermediate_size=self.draft_intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            draft_vocab_size=self.draft_vocab_size,
            rms_norm_eps=1e-5,
            rope_theta=self.rope_theta,
            rope_scaling=None,
            max_position=max_position,
            slots=(2, self.num_layers // 2, self.num_layers - 3),
            target_hidden_size=self.hidden_size,
            target_num_layers=self.num_layers,
        )


@dataclass(frozen=True)
class LatentSize(Size):
    """A target with latent attention and routed experts, and a Llama-type draft. target: its config."""

    target: ModelConfig | None = None

    @classmethod
    def of(cls, name: str, target: ModelConfig) -> "LatentSize":
        assert target.quantization is not None
        c, group = target, target.quantization.group
        heads = (c.num_heads, c.num_kv_heads, _DRAFT_HEAD_DIM)
        shape = (c.vocab_size, c.hidden_size, c.intermediate_size, c.num_layers, *heads, False, c.rope_theta)
        return cls(name, *shape, c.vocab_size, c.intermediate_size, group, c)

    def target_config(self, max_position: int = 8192) -> ModelConfig:
        assert self.target is not None
        return replace(self.target, max_position=max_position)

    def distinct_experts(self, rows: int) -> float:
        """Of a layer, where so many rows choose apart from each other."""
        experts = self.target_config().experts
        assert experts is not None
        return experts.num * (1 - (1 - experts.per_token / experts.num) ** rows)

    def target_bytes(self, rows: int) -> float:
        c = self.target_config()
        assert c.latent is not None
        assert c.experts is not None
        h, e, a = c.hidden_size, c.experts, c.latent
        latents = h * (a.q_rank + a.cell)
        heads = c.num_heads * (a.q_rank * (a.nope_dim + a.rope_dim) + a.kv_rank * (a.nope_dim + a.value_dim))
        attention = latents + heads + c.num_heads * a.value_dim * h
        mixed = e.num * h + e.shared * 3 * h * e.width
        plain = c.num_layers * attention + (c.num_layers - e.first_dense) * mixed
        plain += e.first_dense * 3 * h * c.intermediate_size + c.vocab_size * h
        routed = (c.num_layers - e.first_dense) * self.distinct_experts(rows) * 3 * h * e.width
        return 2 * plain + self.weight_bytes * routed

    def kv_bytes(self, context: int) -> int:
        latent = self.target_config().latent
        assert latent is not None
        return 2 * self.num_layers * latent.cell * context


SMOLLM2_135M = Size("SmolLM2-135M", 49152, 576, 1536, 30, 9, 3, 64, True, 1e5, 32000, 1536)
LLAMA_8B = Size("Llama-3.1-8B", 128256, 4096, 14336, 32, 32, 8, 128, False, 5e5, 32000, 14336)
LLAMA_8B_INT4 = replace(LLAMA_8B, name="Llama-3.1-8B INT4", int4_group=128)
KIMI_RANK = LatentSize.of("Kimi-K2.5, one rank of TP=8, nothing exchanged", kimi_k25_rank())
SIZES = {"smollm2": SMOLLM2_135M, "llama8b": LLAMA_8B, "llama8b-int4": LLAMA_8B_INT4, "kimi-rank": KIMI_RANK}


def random_target(size: Size, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Decoder:
    """A target of these sizes, ready to serve; of a dense one all weights of deviation 0.02, norms 1, INT4 uniform."""
    if isinstance(size, LatentSize):
        return random_deepseek(size.target_config(), device, dtype, seed=seed)
    with torch.device(device), unallocated() if size.int4_group else nullcontext():
        model = DenseModel(size.target_config(), dtype)
    if size.int4_group:
        _quantise(model, size.int4_group, device, seed)
    _fill(model, seed)
    pack_for_device(model, device)
    return model.requires_grad_(False).eval()


def random_draft(size: Size, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Eagle3Network:
    """A draft for `random_target`; its vocabulary is spread over the target's."""
    with torch.device(device):
        network = Eagle3Network(size.draft_config(), dtype)
    _fill(network, seed)
    ids = torch.arange(size.draft_vocab_size, device=device)
    network.d2t.copy_(ids * size.vocab_size // size.draft_vocab_size - ids)
    pack_for_device(network, device)
    return network.requires_grad_(False).eval()


def _quantise(model: DenseModel, group: int, device: str, seed: int) -> None:
    """Random INT4 weights for every linear layer but the head, by the way that a checkpoint's take."""
    generator = torch.Generator(device).manual_seed(seed)
    readers = quantise(model, Quantization(group, ignore=("lm_head",)), device, lambda name: name)
    while readers:  # one after the other: each frees what it read
        reader = readers.pop()
        assert isinstance(reader, Int4Reader)
        reader.packed.random_(-(2**31), 2**31, generator=generator)
        reader.scale.uniform_(0.003, 0.0056, generator=generator)  # integers -8..7 have a deviation of 4.6
        for place, part in zip(reader.shapes, reader.parts, strict=True):
            place.copy_(torch.tensor(part.shape))
        reader.finish()


def _fill(module: nn.Module, seed: int) -> None:
    device = next(module.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in module.parameters():
        if parameter.dim() > 1:  # norms stay 1
            parameter.data.normal_(0.0, 0.02, generator=generator)
