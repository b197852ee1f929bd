"""A linear warm start: the draft as the best linear step on the target's states, solved in closed form.

A draft that is trained for minutes spends most of them on finding what a linear map knows already. So the map is solved
for, and written into the network's weights; training starts from there. With u_t the teacher state at position t,
scaled to unit mean square, and n(.) the unit RMS norm:

    fc       g = A a_t                          A: least squares of u_t on the features a_t
    layer    s = g + W [n(e_{t+1}); n(g)]       W: least squares of u_{t+1} - g

W has to pass through attention, the only way by which the embedding enters: its rank is cut to the width of the values
(kv_heads x head_dim; the best cut for these data), v = U^T W and o = U in the first query head of each KV head. Those
heads attend to their own row: their q and k are one and the same vector, which the rotary embedding turns by position,
so that the score falls off with the distance. The MLP starts at zero output. Later steps feed s back as g, for both
stand for a teacher state. Of a draft with latent attention only `fc` is solved for.
"""

import torch

from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.layers import Attention
from slipstream.engine.training.data import ConversationSource

# Added to the diagonal of the normal equations, as a share of their mean diagonal.
_RIDGE = 1e-3
# Rows used at most: more change little and cost time (2 x rows x width^2 operations).
_MAX_ROWS = 32768
# Rotary pairs (the fastest ones) that carry the own-row score, and the score's lead over the row before, in nats.
_PAIRS = 6
_LEAD = 6.0


@torch.no_grad()
def warm_start(network: Eagle3Network, source: ConversationSource) -> float:
    """Write the linear step into `network`, whose head and final norm are the target's already.

    Args:
        network: initialised; fc, the attention and the layer's norms are overwritten, the MLP's output is set to zero.
        source: training conversations.

    Returns:
        Share of the variance of u_{t+1} that the linear step explains (0..1).

    Raises SlipstreamError when no answer is long enough. The draft's width must be the target's, as its embedding is.
    """
    config, layer = network.config, network.midlayer
    features, embeddings, now, following = _gather(network, source)
    layer.hidden_norm.weight.fill_(1.0)
    layer.input_layernorm.weight.fill_(1.0)
    _write_fc(network, features, now)
    g = network.fuse(features.to(network.fc.weight.dtype)).float()  # [R, h]
    inputs = torch.cat((_unit(embeddings), _unit(g)), -1)  # [R, 2h]
    residual = _unit(g) if config.norm_before_residual else g
    weights = _solve(inputs, following - residual)  # [2h, h]
    rank = min(config.num_kv_heads * config.head_dim, config.hidden_size)
    basis = _main_directions(inputs @ weights, rank)  # [h, r]
    _write_values(network, weights @ basis, basis)
    _attend_to_own_row(network, _solve(inputs, torch.ones_like(inputs[:, :1])).squeeze(1))
    layer.mlp.down_proj.weight.zero_()
    error = (residual + inputs @ weights @ basis @ basis.T - following).square().sum()
    return float(1 - error / (following - following.mean(0)).square().sum())


@torch.no_grad()
def fit_fc(network: Eagle3Network, source: ConversationSource) -> None:
    """The first half alone: `fc`, for a layer that the second does not fit. Args and errors: as `warm_start`."""
    features, _, now, _ = _gather(network, source)
    _write_fc(network, features, now)


def _write_fc(network: Eagle3Network, features: torch.Tensor, now: torch.Tensor) -> None:
    """g = A a_t. features [R, n * ht], now [R, h]: u_t."""
    # What is fed back stands for the same thing as g, so fc is fitted to the fed-back form of u_t.
    fused = _solve(_fc_inputs(network, features), network.feedback(now.to(network.fc.weight.dtype)).float())
    network.fc.weight.copy_(fused.T)  # [n * ht, h] -> [h, n * ht]


def _gather(network: Eagle3Network, source: ConversationSource) -> tuple[torch.Tensor, ...]:
    """Rows of slots t that have teacher states at t and t + 1, at most _MAX_ROWS.

    Returns:
        (features [R, n * ht], e_{t+1} [R, h], u_t [R, h], u_{t+1} [R, h]), the last three fp32.
    """
    table = network.embed_tokens.weight
    parts: list[tuple[torch.Tensor, ...]] = []
    for index in range(len(source.lengths)):
        conversation = source[index]
        start, end = conversation.teacher_start, len(conversation.token_ids) - 1  # slots start .. end - 1
        if end > start:
            states = _unit(conversation.teacher.to(table.device).float())  # [T - start, ht]
            embeddings = table[conversation.token_ids[start + 1 : end + 1].to(table.device)].float()
            parts.append((conversation.features[start:end].to(table.device), embeddings, states[:-1], states[1:]))
        if sum(len(part[0]) for part in parts) >= _MAX_ROWS:
            break
    if not parts:
        raise SlipstreamError(
            "no conversation has two teacher states in a row",
            expected="answers of two tokens or more for draft.init = target",
            do="set draft.init to random, or lengthen the answers",
        )
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _fc_inputs(network: Eagle3Network, features: torch.Tensor) -> torch.Tensor:
    """What fc's weight is multiplied with: the features after the norms that stand before it, fp32 [R, n * ht]."""
    features = features.to(network.fc.weight.dtype)
    return network.normed_features(features).float()


def _solve(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """argmin_W |x W - y|^2 + ridge |W|^2, the columns of x brought to one scale. [R, m], [R, h] -> [m, h]."""
    scale = x.square().mean(0).sqrt().clamp(min=1e-6)  # [m]
    x = x / scale
    gram = x.T @ x  # [m, m]
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    return torch.linalg.solve(gram, x.T @ y) / scale[:, None]


def _main_directions(outputs: torch.Tensor, rank: int) -> torch.Tensor:
    """[R, h] -> [h, rank] orthonormal: the directions that hold most of the outputs' square."""
    _, vectors = torch.linalg.eigh(outputs.T @ outputs)  # ascending
    return vectors[:, -rank:]


def _write_values(network: Eagle3Network, values: torch.Tensor, basis: torch.Tensor) -> None:
    """Write v = values^T [r, 2h] and, in the first query head of each KV head, o = basis [h, r]. Other o are zero."""
    config, attention = network.config, network.midlayer.self_attn
    size, group = config.head_dim, config.num_heads // config.num_kv_heads
    assert isinstance(attention, Attention)
    qkv, output = attention.qkv_proj.weight, attention.o_proj.weight
    qkv[attention.qkv_proj.part_slices()["v_proj"]][: values.shape[1]] = values.T.to(qkv.dtype)
    output.zero_()
    for head in range(config.num_kv_heads):
        own = basis[:, head * size : (head + 1) * size]  # [h, d]; fewer columns where the rank ends
        start = head * group * size
        output[:, start : start + own.shape[1]] = own.to(output.dtype)


def _attend_to_own_row(network: Eagle3Network, one: torch.Tensor) -> None:
    """Point the first query head of each KV head at its own row; the others ignore the dimensions used for it.

    Args:
        one: [2h], a projection that is near 1 on every row: it stands in for the bias that q and k do not have.
    """
    attention = network.midlayer.self_attn
    assert isinstance(attention, Attention)
    config, qkv = network.config, attention.qkv_proj
    size, group = config.head_dim, config.num_heads // config.num_kv_heads
    pairs = min(_PAIRS, size // 2)
    theta = config.rope_theta ** (-torch.arange(pairs).float() / (size / 2))
    gain = float((_LEAD * size**0.5 / (1 - theta.cos()).sum()).sqrt())
    rows = [i for pair in range(pairs) for i in (pair, pair + size // 2)]  # both halves of each rotary pair
    pointer = (gain * one).to(qkv.weight.dtype)  # [2h]
    parts = qkv.part_slices()
    q = qkv.weight[parts["q_proj"]].unflatten(0, (config.num_kv_heads, group, size))  # [kv, G, d, 2h]
    k = qkv.weight[parts["k_proj"]].unflatten(0, (config.num_kv_heads, size))  # [kv, d, 2h]
    q[:, :, rows] = 0
    q[:, 0] = 0
    q[:, 0, :pairs] = pointer
    k[:, rows] = 0
    k[:, :pairs] = pointer


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Rows scaled to unit mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
