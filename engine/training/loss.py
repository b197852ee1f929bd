"""The loss of the unrolled steps, and how many drafts would have been accepted."""

from dataclasses import dataclass

import torch

from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.training.data import Batch
from slipstream.engine.training.teacher import Teacher
from slipstream.engine.training.unroll import unrolled_states


@dataclass(frozen=True)
class TttLoss:
    """Of one batch.

    Args:
        total: scalar fp32, sum_k w_k L_k / sum_k w_k, with gradient.
        steps: [K] fp32, L_k: mean soft cross-entropy in nats over the step's supervised slots (0 where there is none).
        counts: [K] int64, supervised slots of each step.
        joint: [K] int64, slots whose drafts 1..k are all the target's greedy tokens; None when not asked for.
        complete: slots supervised at every step: the denominator of `joint`.
    """

    total: torch.Tensor
    steps: torch.Tensor
    counts: torch.Tensor
    joint: torch.Tensor | None
    complete: int


def soft_cross_entropy(logits: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """-sum_v p(v) log softmax(logits)(v), in fp32. Args: both [M, Vd]. Returns [M]."""
    logits = logits.float()
    return logits.logsumexp(-1) - (probabilities * logits).sum(-1)


def step_weights(num_steps: int, decay: float) -> torch.Tensor:
    """[K] fp32: decay^(k-1), divided by their sum, so that the loss's scale does not depend on K."""
    weights = decay ** torch.arange(num_steps).float()
    return weights / weights.sum()


def joint_hits(hits: torch.Tensor, supervised: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Slots whose first k drafts all hit.

    Args:
        hits: [K, ...] bool.
        supervised: [K, ...] bool; slots that end before step K are left out.

    Returns:
        ([K] int64 counts, number of slots counted). Joint acceptance A_k is their quotient.
    """
    complete = supervised.all(0)
    run = hits.int().cumprod(0).bool() & complete
    return run.flatten(1).sum(1), int(complete.sum())


def ttt_loss(
    network: Eagle3Network, batch: Batch, teacher: Teacher, num_steps: int, decay: float, *, with_hits: bool = False
) -> TttLoss:
    """Loss of `num_steps` unrolled steps.

    Args:
        network: the draft; its gradients are recorded unless the caller forbids it.
        batch: collated for at least `num_steps` steps.
        teacher: gives the labels.
        decay: w_k = decay^(k-1).
        with_hits: also count joint hits, which costs one pass of the target's whole head. A greedy token outside the
            draft vocabulary can never be proposed and counts as a miss.
    """
    labels = teacher.probabilities(batch.teacher)  # [M, Vd]
    greedy = teacher.argmax(batch.teacher) if with_hits else None  # [M]
    losses, hits = [], []
    for index, state in enumerate(unrolled_states(network, batch, num_steps)):
        on = batch.supervised[index]  # [B, S]
        rows = batch.teacher_rows[index][on]  # [m]
        logits = network.logits(state[on])  # [B, S, h] -> [m, h] -> [m, Vd]
        loss = soft_cross_entropy(logits, labels[rows])  # [m]
        losses.append(loss.sum() / max(len(rows), 1))
        if greedy is not None:
            hit = torch.zeros_like(on)
            hit[on] = network.to_target(logits.detach().argmax(-1)) == greedy[rows]
            hits.append(hit)
    steps = torch.stack(losses)  # [K]
    joint, complete = None, 0
    if greedy is not None:
        joint, complete = joint_hits(torch.stack(hits), batch.supervised[:num_steps])
    return TttLoss(
        total=(steps * step_weights(num_steps, decay).to(steps.device)).sum(),
        steps=steps.detach(),
        counts=batch.supervised[:num_steps].flatten(1).sum(1),
        joint=joint,
        complete=complete,
    )
