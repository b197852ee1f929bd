"""EAGLE-3 once more, from its formulas alone: the oracle for trainer, export and engine. Plain torch, no slipstream.

`w` is a state dict with the Hugging Face EAGLE-3 names, `c` any object with num_heads, num_kv_heads, head_dim,
rms_norm_eps, rope_theta, the switches norm_before_residual, norm_before_fc, fc_norm, norm_output, and optionally
rope_scaling (with max_position) and latent (sizes of MLA).
One conversation: tokens x [T], slots t = 0..T-2, steps k = 1..K; slot t at step k embeds x_{t+k}, stands at t + k - 1.
"""

import torch

from slipstream.tests.reference_heads import grouped, latent, rms


def fuse(w, c, features):
    """[T, n * ht] -> g [T, h]."""
    if c.norm_before_fc:
        features = rms(features, w["input_norm.weight"], c.rms_norm_eps)
    if c.fc_norm:
        n = sum(k.startswith("fc_norm.") for k in w)
        parts = [rms(p, w[f"fc_norm.{i}.weight"], c.rms_norm_eps) for i, p in enumerate(features.chunk(n, -1))]
        features = torch.cat(parts, -1)
    return features @ w["fc.weight"].T


def ttt_mask(rows, k):
    """[rows, k * rows]: causal over the keys of step 1, one diagonal for each later step."""
    row, key = torch.arange(rows)[:, None], torch.arange(rows)[None]
    return torch.cat([key <= row] + [key == row] * (k - 1), -1)


def layer(w, c, embedding, g, positions, keys, values):
    """One decoder layer at one step; appends this step's keys and values to the lists. Returns s [rows, h]."""
    m = {n.removeprefix("midlayer."): t for n, t in w.items() if n.startswith("midlayer.")}
    eps, heads = c.rms_norm_eps, latent if getattr(c, "latent", None) else grouped
    normed = rms(g, m["hidden_norm.weight"], eps)
    x = torch.cat((rms(embedding, m["input_layernorm.weight"], eps), normed), -1)  # [rows, 2h]
    q, k, v, scale = heads(m, c, x, positions)
    keys.append(k)
    values.append(v)
    scores = torch.einsum("qhd,khd->hqk", q, torch.cat(keys)) * scale
    scores = scores.masked_fill(~ttt_mask(len(g), len(keys)), float("-inf"))
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), torch.cat(values)).flatten(1)
    r = (normed if c.norm_before_residual else g) + mixed @ m["self_attn.o_proj.weight"].T
    y = rms(r, m["post_attention_layernorm.weight"], eps)
    gate, up = y @ m["mlp.gate_proj.weight"].T, y @ m["mlp.up_proj.weight"].T
    return r + (gate * gate.sigmoid() * up) @ m["mlp.down_proj.weight"].T


def step_logits(w, c, tokens, features, num_steps):
    """Draft logits of every slot, [K, T - 1, Vd]. Rows whose token lies past the end hold no meaning."""
    rows, out = len(tokens) - 1, []
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    tokens = torch.cat((tokens, tokens.new_zeros(num_steps)))
    g = fuse(w, c, features[:rows])
    for k in range(1, num_steps + 1):
        embedding = w["embed_tokens.weight"][tokens[k : k + rows]]
        s = layer(w, c, embedding, g, torch.arange(rows) + k - 1, keys, values)
        normed = rms(s, w["norm.weight"], c.rms_norm_eps)
        out.append(normed @ w["lm_head.weight"].T)
        g = normed if c.norm_output else s
    return torch.stack(out)


def supervised(loss_mask, num_steps):
    """[K, T - 1] bool: x_{t+1} .. x_{t+1+k} exist and are all the assistant's."""
    m, size = loss_mask.tolist(), len(loss_mask)
    rows = [[t + 1 + k < size and all(m[t + 1 : t + 2 + k]) for t in range(size - 1)] for k in range(1, num_steps + 1)]
    return torch.tensor(rows)


def losses(w, logits, mask, teacher, final_norm, head, eps):
    """Sums of the soft cross-entropy [K] and hits [K, T - 1]; teacher [T, ht] is the target's last state, pre-norm."""
    target = rms(teacher, final_norm, eps) @ head.T  # [T, V]
    ids = w["d2t"] + torch.arange(len(w["d2t"]))
    p = target.softmax(-1)[:, ids]
    p, greedy = p / p.sum(-1, keepdim=True), target.argmax(-1)
    sums, hits = [], torch.zeros_like(mask)
    for i, (z, on) in enumerate(zip(logits, mask, strict=True)):
        t = on.nonzero().squeeze(1)  # slots; the teacher of slot t at step k stands at t + k
        sums.append(-(p[t + i + 1] * z[t].log_softmax(-1)).sum())
        hits[i, t] = ids[z[t].argmax(-1)] == greedy[t + i + 1]
    return torch.stack(sums), hits


def total_loss(sums, counts, decay):
    """sum_k decay^(k-1) L_k / sum_k decay^(k-1), L_k the mean over the step's supervised slots."""
    weights = decay ** torch.arange(len(sums)).float()
    return (weights * sums / counts.clamp(min=1)).sum() / weights.sum()
