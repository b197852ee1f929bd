"""What rank 0 of a training tells the others at the start, and their life after that.

The others need nothing but the hidden states of the conversations that they compute: no target, no configuration. What
the draft is, how it is trained and the target's head come from rank 0, weights and moments by the trainer itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from slipstream.engine.capture import CapturePlan
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.training.checkpoint import config_dict, config_of
from slipstream.engine.training.data import ConversationSource
from slipstream.engine.training.ranks import Ranks
from slipstream.engine.training.settings import TrainingSettings
from slipstream.engine.training.teacher import Teacher
from slipstream.engine.training.trainer import Trainer


@dataclass(frozen=True)
class Told:
    """Plain values of a training.

    Args:
        config, settings: of the draft and of the training.
        lengths: tokens of every conversation, to be compared with the source's.
        counts: `data.slot_counts` of them.
        holders: as the trainer's.
        frozen: names of the parameters that are not trained.
        head, norm: shape and dtype of the target's head and final norm; eps: of the norm.
    """

    config: dict[str, Any]
    settings: dict[str, Any]
    lengths: list[int]
    counts: torch.Tensor
    holders: Sequence[Sequence[int]] | None
    frozen: frozenset[str]
    head: tuple[tuple[int, ...], torch.dtype]
    norm: tuple[tuple[int, ...], torch.dtype]
    eps: float


def lead(
    ranks: Ranks,
    network: Eagle3Network,
    teacher: Teacher,
    source: ConversationSource,
    settings: TrainingSettings,
    counts: torch.Tensor,
    holders: Sequence[Sequence[int]] | None,
) -> None:
    """Tells the others what rank 0 makes its trainer of; it does so right after this."""
    if ranks.size == 1:
        return
    head, norm = teacher.head, teacher.final_norm
    told = Told(
        config_dict(network.config),
        asdict(settings),
        list(source.lengths),
        counts,
        holders,
        frozenset(name for name, parameter in network.named_parameters() if not parameter.requires_grad),
        (tuple(head.shape), head.dtype),
        (tuple(norm.shape), norm.dtype),
        teacher.eps,
    )
    ranks.shared(told)
    for tensor in (norm, head, network.d2t):
        ranks.broadcast_(tensor.contiguous())


def follow(ranks: Ranks, source_of: Callable[[CapturePlan], ConversationSource], device: torch.device) -> None:
    """The life of every rank but 0: takes part in the training that rank 0 leads, to its end.

    Args:
        ranks: this one and the others.
        source_of: the training conversations for the draft's slots; read are those that this rank's host holds.
        device: where this rank trains.

    Raises SlipstreamError when the conversations are not those of rank 0, and whatever training raises.
    """
    told: Told = ranks.shared(None)
    config, settings = config_of(told.config), TrainingSettings(**told.settings)
    source = source_of(CapturePlan(config.slots, config.target_num_layers))
    if list(source.lengths) != told.lengths:
        raise SlipstreamError(
            f"rank {ranks.rank} has {len(source.lengths)} conversations that are not those of rank 0 "
            f"({len(told.lengths)})",
            expected="one store on every host",
            do="run the train stage again: it brings each host its part of the store",
            fault="F17",
        )
    norm, head = (torch.empty(shape, dtype=dtype, device=device) for shape, dtype in (told.norm, told.head))
    network = Eagle3Network(config, settings.torch_dtype).to(device)
    for tensor in (norm, head, network.d2t):
        ranks.broadcast_(tensor)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name not in told.frozen)
    ids = network.to_target(torch.arange(config.draft_vocab_size, device=device))  # [Vd]
    teacher = Teacher(norm, head, told.eps, ids)
    Trainer(network, teacher, source, settings, None, ranks=ranks, counts=told.counts, holders=told.holders).run()
