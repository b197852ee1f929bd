"""What a draft would win, from held-out conversations: the run length of accepted drafts at every slot."""

from dataclasses import dataclass

import torch

from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.training.data import (
    Batch,
    ConversationSource,
    collate,
    plan_batches,
    slot_counts,
    supervised_indices,
)
from slipstream.engine.training.loss import joint_hits
from slipstream.engine.training.teacher import Teacher
from slipstream.engine.training.unroll import unrolled_states


@dataclass(frozen=True)
class Evaluation:
    """Args:
    run_lengths: one list an answer, in the source's order. Entry i belongs to slot P - 1 + i, where P is the
        answer's first position: how many of the K drafts made there the target would accept, one after another.
        Its length n is the answer's tokens after the first; a round at entry i can use at most n - i drafts.
    joint_acceptance: [K] share of slots whose first k drafts all hit, over slots that have room for K. It averages
        over slots, so it does not predict serving: `engine.acceptance` replays `run_lengths` for that.
    slots: slots that `joint_acceptance` counts.
    greedy_share: share of answer tokens that are the teacher's greedy token. 1 for greedy answers, or the teacher's
        states do not belong to these tokens.
    outside_share: share of greedy tokens outside the draft vocabulary: drafts that cannot be right.
    """

    run_lengths: list[list[int]]
    joint_acceptance: list[float]
    slots: int
    greedy_share: float
    outside_share: float


class Evaluator:
    """Held-out conversations, collated once, with the target's greedy tokens.

    Args:
        source: conversations that neither training nor the choice of the draft vocabulary saw.
        teacher: as in training.
        num_steps: K, drafts at each slot.
        batch_tokens: most tokens of a batch, padding included.
    """

    def __init__(self, source: ConversationSource, teacher: Teacher, num_steps: int, batch_tokens: int = 1024) -> None:
        self.num_steps = num_steps
        indices, _ = supervised_indices(slot_counts(source, 1))
        plan = plan_batches(indices, source.lengths, batch_tokens, seed=0, epoch=0)
        self._batches: list[tuple[list[int], Batch, torch.Tensor]] = []
        for members in plan:
            batch = collate([source[i] for i in members], num_steps).to(teacher.head.device)
            self._batches.append((members, batch, teacher.argmax(batch.teacher)))

    @torch.no_grad()
    def run(self, network: Eagle3Network, num_steps: int | None = None) -> Evaluation:
        """Evaluate with the arithmetic of serving (no gradients: `kernels.linear` then keeps rows apart).

        Args:
            network: the draft.
            num_steps: drafts at each slot, fewer than this evaluator's K; None for K.
        """
        num_steps = min(num_steps or self.num_steps, self.num_steps)
        lengths: dict[int, list[list[int]]] = {}
        joint = [0] * num_steps
        complete = same = outside = total = 0
        device = network.d2t.device
        proposable = torch.zeros(network.config.vocab_size, dtype=torch.bool, device=device)
        proposable[network.to_target(torch.arange(network.config.draft_vocab_size, device=device))] = True
        for members, batch, greedy in self._batches:
            supervised = batch.supervised[:num_steps]  # [K, B, S]
            hits = torch.zeros_like(supervised)
            for index, state in enumerate(unrolled_states(network, batch, num_steps)):
                on = batch.supervised[index]
                draft = network.to_target(network.logits(state[on]).argmax(-1))  # [m]
                hits[index][on] = draft == greedy[batch.teacher_rows[index][on]]
            counts, slots = joint_hits(hits, supervised)
            joint, complete = [a + b for a, b in zip(joint, counts.tolist(), strict=True)], complete + slots
            first = batch.supervised[0]
            labels = greedy[batch.teacher_rows[0][first]]  # [m]
            following = batch.tokens.gather(1, batch.slots + 2 * first)[first]  # [m]: x_{t+2}
            same += int((labels == following).sum())
            outside += int((~proposable[labels]).sum())
            total += len(labels)
            run = hits.int().cumprod(0).sum(0)  # [K, B, S] -> [B, S]
            for b, conversation in enumerate(members):
                size = int(first[b].sum())
                lengths[conversation] = _by_answer(batch.slots[b, :size], run[b, :size])
        return Evaluation(
            run_lengths=[answer for index in sorted(lengths) for answer in lengths[index]],
            joint_acceptance=[count / max(complete, 1) for count in joint],
            slots=complete,
            greedy_share=same / max(total, 1),
            outside_share=outside / max(total, 1),
        )


def _by_answer(slots: torch.Tensor, run: torch.Tensor) -> list[list[int]]:
    """Cut run lengths [s] where the slots [s] are not consecutive: one list an answer."""
    cuts = ((slots[1:] - slots[:-1]) != 1).nonzero().squeeze(1) + 1
    return [part.tolist() for part in run.tensor_split(cuts.tolist())]
