"""Tiny random drafts and conversations."""

import math

import torch

from slipstream.engine.deepseek_config import Latent
from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.drafts.eagle3.vocab import select_draft_vocab
from slipstream.engine.training.data import Conversation
from slipstream.engine.training.teacher import Teacher

VOCAB, HIDDEN, SLOTS, LAYERS = 50, 16, (1, 2, 4), 6
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "rope_scaling": None,
    "max_position": 64,
    "vocab_size": VOCAB,
    "draft_vocab_size": 30,
    "target_hidden_size": HIDDEN,
    "slots": SLOTS,
    "target_num_layers": LAYERS,
}


# Of a draft with latent attention; YaRN's positions are stretched from 16 on.
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT = {
    "num_kv_heads": 4,
    "head_dim": 12,
    "rope_scaling": YARN,
    "latent": Latent(10, 12, 8, 4, 6, 12**-0.5 * (0.1 * math.log(8.0) + 1) ** 2),
}


def make_config(**changes: object) -> Eagle3Config:
    return Eagle3Config(**{**SIZES, **changes})


def make_network(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object) -> Eagle3Network:
    """Random weights, norm weights from [0.5, 2], and a random draft vocabulary; the embedding is frozen."""
    network = Eagle3Network(make_config(**changes), dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.empty(parameter.shape).uniform_(0.5, 2.0, generator=generator))
            else:
                std = 1.0 if parameter is network.embed_tokens.weight else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
    network.embed_tokens.weight.requires_grad_(False)
    counts = torch.randint(0, 9, (VOCAB,), generator=generator)
    network.d2t.copy_(select_draft_vocab(counts, network.config.draft_vocab_size).d2t)
    return network


def make_teacher(network: Eagle3Network, seed: int = 7) -> Teacher:
    generator = torch.Generator().manual_seed(seed)
    norm = torch.empty(HIDDEN).uniform_(0.5, 2.0, generator=generator)
    head = torch.empty(VOCAB, HIDDEN).normal_(0.0, 0.5, generator=generator)
    ids = network.to_target(torch.arange(network.config.draft_vocab_size))
    return Teacher(norm, head, 1e-5, ids)


def make_conversation(seed: int, length: int, answers: list[tuple[int, int]], teacher_start: int = 0) -> Conversation:
    """Random tokens and states; `answers` are the [start, end) positions of the assistant's tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(length, dtype=torch.bool)
    for start, end in answers:
        mask[start:end] = True
    return Conversation(
        token_ids=torch.randint(0, VOCAB, (length,), generator=generator),
        loss_mask=mask,
        features=torch.randn(length, len(SLOTS) * HIDDEN, generator=generator),
        teacher=torch.randn(length, HIDDEN, generator=generator)[teacher_start:],
        teacher_start=teacher_start,
    )


def make_conversations() -> list[Conversation]:
    """Of unlike lengths: one answer, two answers, one cut short, one whose teacher states start late."""
    return [
        make_conversation(1, 12, [(4, 12)]),
        make_conversation(2, 15, [(3, 7), (10, 15)]),
        make_conversation(3, 9, [(6, 8)]),
        make_conversation(4, 17, [(8, 17)], teacher_start=8),
    ]


def toy_conversations(count: int, length: int = 14, dtype: torch.dtype = torch.float32) -> list[Conversation]:
    """Greedy conversations of a target whose last state depends on the last token alone: the draft can learn it all.

    Args:
        count: how many.
        length: tokens of each.
        dtype: of the states.
    """
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(11))
    following = make_teacher(make_network()).argmax(table)  # [V]
    out = []
    for index in range(count):
        ids = [index % VOCAB]
        while len(ids) < length:
            ids.append(int(following[ids[-1]]) if len(ids) % 5 else (7 * len(ids) + index) % VOCAB)
        token_ids = torch.tensor(ids)
        states = table[token_ids].to(dtype)
        out.append(
            Conversation(token_ids, torch.arange(length) >= 3, torch.cat([states] * len(SLOTS), -1), states[2:], 2)
        )
    return out


def hf_tensors(network: Eagle3Network, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Parameters (or their gradients) under the Hugging Face EAGLE-3 names; frozen ones have no gradient."""
    out = {}
    for name, parameter in network.named_parameters():
        if gradients and not parameter.requires_grad:
            continue
        tensor = parameter.grad if gradients else parameter.detach()
        module = network.get_submodule(name.rpartition(".")[0])
        if hasattr(module, "parts"):
            stem = name.removesuffix("weight").rstrip(".").rpartition(".")[0]
            for part, rows in module.part_slices().items():
                out[f"{stem}.{part}.weight"] = tensor[rows].clone()
        else:
            out[name] = tensor.clone()
    if network.config.latent is not None:
        _rope_rows_in_pairs(network.config, out)
    return out if gradients else {**out, "d2t": network.d2t.clone()}


def _rope_rows_in_pairs(config: Eagle3Config, tensors: dict[str, torch.Tensor]) -> None:
    """Row by row: the network rotates (i, i + rope / 2) of a rope part, files (2 i, 2 i + 1)."""
    assert config.latent is not None
    rope = config.latent.rope_dim
    for part, heads in (("q_b_proj", config.num_heads), ("kv_a_proj_with_mqa", 1)):
        rows = tensors[f"midlayer.self_attn.{part}.weight"]
        own, size = rows.clone(), len(rows) // heads
        for head in range(heads):
            start = head * size + size - rope
            for i in range(rope // 2):
                rows[start + 2 * i], rows[start + 2 * i + 1] = own[start + i], own[start + rope // 2 + i]
