"""The loss of the unrolled steps, and how many drafts would have been accepted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.training.data import Batch
from slipstream.engine.training.teacher import Teacher
from slipstream.engine.training.unroll import unrolled_states

# Logits over the draft vocabulary that are held for the backward pass, of all steps together (about 14 bytes each: bf16
# and fp32 logits, the teacher's probabilities and their product). Beyond, they are made in parts, and made again there.
LOGITS_KEPT = 1 << 27
_PART = 8  # parts of that many


@dataclass(frozen=True)
class TttLoss:
    """Of one batch, or of one rank's part of it: what the parts' figures add up to is the whole's.

    Args:
        total: scalar fp32, sum_k w_k L_k / sum_k w_k, with gradient.
        steps: [K] fp32, L_k: mean soft cross-entropy in nats over the step's supervised slots (0 where there is none).
        counts: [K] int64 on the CPU, supervised slots of each step, of this part.
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
    network: Eagle3Network,
    batch: Batch,
    teacher: Teacher,
    num_steps: int,
    decay: float,
    *,
    with_hits: bool = False,
    logits_kept: int = LOGITS_KEPT,
    whole: Sequence[int] | None = None,
) -> TttLoss:
    """Loss of `num_steps` unrolled steps.

    Args:
        network: the draft; its gradients are recorded unless the caller forbids it.
        batch: collated for at least `num_steps` steps.
        teacher: gives the labels.
        decay: w_k = decay^(k-1).
        with_hits: also count joint hits, which costs one pass of the target's whole head. A greedy token outside the
            draft vocabulary can never be proposed and counts as a miss.
        logits_kept: bound of the draft's logits that are held for the backward pass.
        whole: [K] supervised slots of each step in the whole batch, where `batch` is a part of it: what the losses are
            means over.
    """
    head = _Head(network, teacher, batch, num_steps, logits_kept, with_drafts=with_hits)
    greedy = teacher.argmax(batch.teacher) if with_hits else None  # [M]
    losses, hits = [], []
    for index, state in enumerate(unrolled_states(network, batch, num_steps)):
        rows = batch.rows[index]  # [m]
        labels = batch.teacher_rows[index].flatten()[rows]  # [B, S] -> [m]
        loss, drafts = head.loss_and_drafts(state.flatten(0, 1)[rows], labels)  # [B, S, h] -> [m, h]
        losses.append(loss / max(len(rows) if whole is None else whole[index], 1))
        if greedy is not None and drafts is not None:
            hit = torch.zeros_like(batch.supervised[index])
            hit.view(-1)[rows] = network.to_target(drafts) == greedy[labels]
            hits.append(hit)
    steps = torch.stack(losses)  # [K]
    joint, complete = None, 0
    if greedy is not None:
        joint, complete = joint_hits(torch.stack(hits), batch.supervised[:num_steps])
    return TttLoss(
        total=(steps * step_weights(num_steps, decay).to(steps.device, non_blocking=True)).sum(),
        steps=steps.detach(),
        counts=torch.tensor([len(rows) for rows in batch.rows[:num_steps]]),
        joint=joint,
        complete=complete,
    )


class _Head:
    """Logits, labels and loss of rows, so many at a time that memory stays bounded."""

    def __init__(
        self, network: Eagle3Network, teacher: Teacher, batch: Batch, num_steps: int, kept: int, *, with_drafts: bool
    ) -> None:
        self.network, self.teacher, self.states, self.with_drafts = network, teacher, batch.teacher, with_drafts
        width = network.config.draft_vocab_size
        self.recompute = width * sum(len(rows) for rows in batch.rows[:num_steps]) > kept
        self.rows = max(1, kept // _PART // width)
        # One row serves several steps: where all labels fit, they are made once.
        self.probabilities = None if self.recompute else teacher.probabilities(batch.teacher)  # [M, Vd]

    def loss_and_drafts(self, state: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft states [m, h], teacher rows [m] -> (summed loss, fp32 scalar; likeliest draft ids [m] or None)."""
        if not self.recompute:
            return self._part(state, labels)
        parts = [
            checkpoint(self._part, *pair, use_reentrant=False, preserve_rng_state=False)
            for pair in zip(state.split(self.rows), labels.split(self.rows), strict=True)
        ]
        loss = torch.stack([loss for loss, _ in parts]).sum()
        return loss, torch.cat([drafts for _, drafts in parts]) if self.with_drafts else None

    def _part(self, state: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = self.network.logits(state)  # [m, h] -> [m, Vd]
        if self.probabilities is None:
            wanted = self.teacher.probabilities(self.states[labels])  # [m, ht] -> [m, Vd]
        else:
            wanted = self.probabilities[labels]
        drafts = logits.detach().argmax(-1) if self.with_drafts else None  # [m, Vd] -> [m]
        return soft_cross_entropy(logits, wanted).sum(), drafts
