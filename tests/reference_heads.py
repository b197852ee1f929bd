"""Queries, keys and values of the reference: grouped heads (Llama) and latent ones (MLA). Plain torch, no slipstream.

`m` holds the layer's tensors by their Hugging Face names, rope rows of MLA in neighbouring pairs as those have them.
"""

import math

import torch


def rms(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def angles(c, positions, d):
    """cos and sin [rows, 1, d / 2]; scaled frequencies are those of transformers."""
    frequencies, factor = 1 / c.rope_theta ** (torch.arange(0, d, 2).float() / d), 1.0
    if scaling := dict(getattr(c, "rope_scaling", None) or {}):
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        kind = scaling["rope_type"] = scaling.pop("type", None) or scaling["rope_type"]
        shape = {"head_dim": d, "hidden_size": d, "num_attention_heads": 1, "max_position_embeddings": c.max_position}
        config = LlamaConfig(**shape, rope_parameters={**scaling, "rope_theta": c.rope_theta})
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    angle = positions[:, None, None].float() * frequencies
    return angle.cos() * factor, angle.sin() * factor


def turned(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


def grouped(m, c, x, positions):
    """x [rows, 2h] -> q, k, v [rows, heads, d] and the scale of q.k; rotated are (i, i + d / 2)."""
    d, group = c.head_dim, c.num_heads // c.num_kv_heads
    q, k, v = ((x @ m[f"self_attn.{n}_proj.weight"].T).view(len(x), -1, d) for n in "qkv")
    q, k = (torch.cat(turned(*t.chunk(2, -1), *angles(c, positions, d)), -1) for t in (q, k))
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), d**-0.5


def latent(m, c, x, positions):
    """The same by latents: q and k [rows, heads, nope + rope], v [rows, heads, v]; rotated are (2 i, 2 i + 1)."""
    a, eps, rows = c.latent, c.rms_norm_eps, len(x)

    def w(name):
        return m[f"self_attn.{name}.weight"]

    def rope(t):
        cos, sin = angles(c, positions, a.rope_dim)
        return torch.stack(turned(t[..., ::2], t[..., 1::2], cos, sin), -1).flatten(-2)

    q = rms(x @ w("q_a_proj").T, w("q_a_layernorm"), eps) @ w("q_b_proj").T
    q_nope, q_rope = q.view(rows, c.num_heads, -1).split((a.nope_dim, a.rope_dim), -1)
    low, k_rope = (x @ w("kv_a_proj_with_mqa").T).split((a.kv_rank, a.rope_dim), -1)
    up = (rms(low, w("kv_a_layernorm"), eps) @ w("kv_b_proj").T).view(rows, c.num_heads, -1)
    k_nope, v = up.split((a.nope_dim, a.value_dim), -1)
    k = torch.cat((k_nope, rope(k_rope[:, None]).expand(-1, c.num_heads, -1)), -1)
    scale, scaling = (a.nope_dim + a.rope_dim) ** -0.5, getattr(c, "rope_scaling", None) or {}
    if weight := scaling.get("mscale_all_dim"):
        scale *= (0.1 * weight * math.log(scaling["factor"]) + 1) ** 2
    return torch.cat((q_nope, rope(q_rope)), -1), k, v, scale
