"""Attention of the unrolled training steps: causal over the keys of step 1, plus one own key for each later step.

At step k the draft of a round that starts at slot t has in its KV cache the target-made keys of slots 0..t and the keys
that it made itself at steps 2..k. So slot t's query sees, at step k:

    step-1 keys   0 .. t            (causal)
    own keys      k_2(t) .. k_k(t)  (one diagonal each)

No scores are kept for the backward pass: it makes them again from the log of each row's sum, some rows at a time, so
that memory grows with the conversation's length and not with its square. One definition for CPU and GPU.
"""

from collections.abc import Iterator
from typing import Any

import torch

# Scores held at a time, in fp32, two or three tensors of them: 4 MB each stay in a CPU's cache (and cutting rows also
# leaves out the keys behind them); a GPU wants few large calls, 128 MB each.
_SCORES_PER_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 25}


class TttAttention:
    """The attention context of one batch through all its steps. Call `attend` once a step, in order.

    Args:
        slots: [B, S] int64, the slot of each row of steps 2.. (step 1 runs over all slots 0..T-1).
        scale: multiplied onto q.k.
        scores_per_chunk: most scores held at a time; None: what suits the device.

    Keys and values stay in the graph, so gradients reach the steps that made them. Matrix products run in the dtype of
    q, k and v; the softmax and the sums over own keys in fp32.
    """

    def __init__(self, slots: torch.Tensor, scale: float, scores_per_chunk: int | None = None) -> None:
        self.slots, self.scale = slots, scale
        self._bound = scores_per_chunk or _SCORES_PER_CHUNK[slots.device.type]
        self.first: tuple[torch.Tensor, torch.Tensor] | None = None
        self.own: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [B, R, heads, d]; k [B, R, kv_heads, d], v [B, R, kv_heads, e]; R = T at step 1, S later
        -> [B, R, heads, e]."""
        batch, rows, heads, _ = q.shape
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, R, kv, d] -> [B, kv, R, d]
        slots: torch.Tensor | None = self.slots
        if self.first is None:
            self.first, slots = (k, v), None
        else:
            self.own.append((k, v))
        own_k = torch.stack([key for key, _ in self.own]) if self.own else k.new_empty(0, *k.shape)  # [n, B, kv, R, d]
        own_v = torch.stack([value for _, value in self.own]) if self.own else v.new_empty(0, *v.shape)
        # [B, R, heads, d] -> [B, kv, G, R, d]: the G query heads of one KV head beside each other
        q = q.transpose(1, 2).unflatten(1, (k.shape[1], -1)) * self.scale
        out = _Attention.apply(q, *self.first, own_k, own_v, slots, self._bound)
        return out.reshape(batch, heads, rows, -1).transpose(1, 2)  # [B, kv, G, R, e] -> [B, R, heads, e]


class _Attention(torch.autograd.Function):
    """Softmax over two kinds of keys. With n own keys a row, G query heads a KV head:

    q [B, kv, G, R, d] (scaled); first_k [B, kv, T, d], own_k [n, B, kv, R, d], and values likewise, of width e; slots
    [B, R], or None where row r stands at slot r. Output [B, kv, G, R, e]. For the backward pass it keeps these and the
    log-sum-exp of each row, [B, kv, G, R].
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        first_k: torch.Tensor,
        first_v: torch.Tensor,
        own_k: torch.Tensor,
        own_v: torch.Tensor,
        slots: torch.Tensor | None,
        bound: int,
    ) -> torch.Tensor:
        out, total = q.new_empty(*q.shape[:-1], first_v.shape[-1]), q.new_empty(q.shape[:-1], dtype=_wide(q))
        for rows in _chunks(q, first_k, bound):
            query = q[..., rows, :]
            scores, end = _first_scores(query, first_k, slots, rows)  # [B, kv, G, r, t]
            own = _own_dot(query, own_k[..., rows, :])  # [n, B, kv, G, r]
            top = torch.cat((scores.amax(-1)[None], own)).amax(0)  # [B, kv, G, r]
            weights, own = scores.sub_(top[..., None]).exp_(), (own - top).exp()
            norm = weights.sum(-1) + own.sum(0)  # [B, kv, G, r]
            mixed = _product(weights.to(q.dtype), first_v[..., :end, :]).to(norm.dtype)  # [B, kv, G, r, d]
            for weight, value in zip(own, own_v[..., rows, :], strict=True):
                mixed += weight[..., None] * value[:, :, None]  # [B, kv, r, d] -> [B, kv, 1, r, d]
            out[..., rows, :] = mixed / norm[..., None]
            total[..., rows] = top + norm.log()
        ctx.save_for_backward(q, first_k, first_v, own_k, own_v, slots, out, total)
        ctx.bound = bound
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = gradients
        q, first_k, first_v, own_k, own_v, slots, out, total = ctx.saved_tensors
        d_q = torch.empty_like(q)
        d_first_k, d_first_v = (torch.zeros_like(t, dtype=_wide(q)) for t in (first_k, first_v))
        d_own_k, d_own_v = torch.empty_like(own_k), torch.empty_like(own_v)
        for rows in _chunks(q, first_k, ctx.bound):
            query, d_out, log_sum = q[..., rows, :], grad[..., rows, :], total[..., rows]
            # With p the weights: d p = d_out . v, d score = p (d p - sum p d p), and sum p d p = d_out . out.
            mean = (d_out * out[..., rows, :]).sum(-1, dtype=_wide(q))  # [B, kv, G, r]
            scores, end = _first_scores(query, first_k, slots, rows)  # [B, kv, G, r, t]
            weights = scores.sub_(log_sum[..., None]).exp_()
            d_first_v[..., :end, :] += _transposed_product(weights.to(q.dtype), d_out)
            d_scores = _product(d_out, first_v[..., :end, :].transpose(-1, -2)).to(_wide(q))  # [B, kv, G, r, t]
            d_scores = d_scores.sub_(mean[..., None]).mul_(weights).to(q.dtype)
            d_first_k[..., :end, :] += _transposed_product(d_scores, query)
            d_query = _product(d_scores, first_k[..., :end, :]).to(_wide(q))  # [B, kv, G, r, d]
            keys, values = own_k[..., rows, :], own_v[..., rows, :]  # [n, B, kv, r, d]
            own = (_own_dot(query, keys) - log_sum).exp()  # [n, B, kv, G, r]
            d_own = own * (_own_dot(d_out, values) - mean)
            for index in range(len(own_k)):
                d_query += d_own[index, ..., None] * keys[index][:, :, None]
                d_own_k[index][..., rows, :] = (d_own[index, ..., None] * query).sum(2)  # over the group
                d_own_v[index][..., rows, :] = (own[index, ..., None] * d_out).sum(2)
            d_q[..., rows, :] = d_query
        return d_q, d_first_k.to(q.dtype), d_first_v.to(q.dtype), d_own_k, d_own_v, None, None


def _wide(x: torch.Tensor) -> torch.dtype:
    """In which sums are made: fp32, or the dtype of `x` where that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def _chunks(q: torch.Tensor, first_k: torch.Tensor, bound: int) -> Iterator[slice]:
    """Slices of the rows of q [B, kv, G, R, d], each with at most `bound` scores over the T step-1 keys."""
    rows = q.shape[3]
    size = max(1, bound // (q[..., 0, 0].numel() * first_k.shape[2]))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _first_scores(
    q: torch.Tensor, first_k: torch.Tensor, slots: torch.Tensor | None, rows: slice
) -> tuple[torch.Tensor, int]:
    """Scores of `rows` over the first t step-1 keys, all that one of them may see.

    q [B, kv, G, r, d] of these rows, first_k [B, kv, T, d], slots as above, of all rows
    -> (wide [B, kv, G, r, t], -inf behind the row's slot; t).
    """
    if slots is None:
        end, own = rows.stop, torch.arange(rows.start, rows.stop, device=q.device)[None]  # [1, r]
    else:
        end, own = first_k.shape[2], slots[:, rows]  # [B, r]
    later = torch.arange(end, device=q.device) > own[..., None]  # [B or 1, r, t]
    scores = _product(q, first_k[..., :end, :].transpose(-1, -2)).to(_wide(q))  # [B, kv, G, r, t]
    return scores.masked_fill_(later[:, None, None], float("-inf")), end


def _own_dot(x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """x [B, kv, G, r, d], own [n, B, kv, r, d] -> wide [n, B, kv, G, r]: each row with its own n vectors."""
    dots = [(x * vector[:, :, None]).sum(-1, dtype=_wide(x)) for vector in own]
    return torch.stack(dots) if dots else x.new_empty(0, *x.shape[:-1], dtype=_wide(x))


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x [B, kv, G, r, m], y [B, kv, m, p] -> [B, kv, G, r, p]; the G heads as more rows of one product."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def _transposed_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x [B, kv, G, r, m], y [B, kv, G, r, p] -> wide [B, kv, m, p], summed over group and rows."""
    return (x.flatten(2, 3).transpose(-1, -2) @ y.flatten(2, 3)).to(_wide(x))
