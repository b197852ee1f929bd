"""Faults put into a built engine on purpose, to prove that parity finds them: a test hook, with diagnostics only.

Model, runner and proposer know nothing of it: their methods are wrapped from outside, and what they hand out is bent.
Served tokens stay right under every one of these faults, as in the incident.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slipstream.engine.capture import slot_name
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.injection import Injection
from slipstream.engine.layers import RowParallelLinear
from slipstream.engine.layers.linear import AddPartial
from slipstream.engine.models.decoder import Decoder
from slipstream.engine.models.target import TargetOutput
from slipstream.engine.proposer import DraftBatch, Proposal
from slipstream.kernels.stream import Stream

States = Mapping[str, torch.Tensor]


def inject(engine: Engine, injections: Sequence[Injection]) -> None:
    """Puts the faults into this rank's engine before its first step. Raises SlipstreamError for what it cannot have."""
    for injection in injections:
        if _hits(engine, injection):
            _inject(engine, injection)


def _hits(engine: Engine, injection: Injection) -> bool:
    """Whether the fault is for this rank.

    Where it bends what rank 0 captures and not all ranks alike, captured states are no longer compared between the
    ranks: that would end them, and what is to be shown is that parity finds the fault from rank 0's trace.
    """
    parallel = engine.target.parallel
    if injection.rank is not None and injection.rank >= parallel.size:
        raise _cannot(str(injection), f"there are {parallel.size} ranks", f"a rank of 0..{parallel.size - 1}")
    differs = injection.rank == 0 or (injection.rank is None and injection.kind == "partial")
    if differs and engine.agreement is not None:
        engine.agreement.compare_states = False
    return injection.rank in (None, parallel.rank)


def _inject(engine: Engine, injection: Injection) -> None:
    match injection.fault, injection.kind:
        case "F3", "order":
            _change_states(engine, _swap_names(engine))
        case "F3", "features":
            _permute_features(_proposer(engine, injection))
        case "F5", kind:
            _change_states(engine, _WrongPoint(engine, injection, kind))
        case "F6", kind:
            _StaleReplay(engine, injection, frozen=kind == "frozen")
        case "F19", "feedback":
            _feed_back_the_other_state(_proposer(engine, injection))
        case "F19", "rope":
            _StillRope(_proposer(engine, injection))
        case "F19", "draft-kv":
            _KeptDraftKV(_proposer(engine, injection), engine.runner.table.dummy_slot + 1)
        case _:
            raise AssertionError(f"{injection} was parsed, and nobody injects it")


# ---- captured states -------------------------------------------------------------------------------------------------


def _change_states(engine: Engine, change: Callable[[States], States]) -> None:
    """Hands out `change(states)` instead of the captured states, of every forward pass of the target."""
    target = engine.target
    assert isinstance(target, Decoder)
    original = target.forward

    def forward(*args: object, **kwargs: object) -> TargetOutput:
        out = original(*args, **kwargs)  # type: ignore[arg-type]
        return replace(out, states=change(out.states)) if out.states else out

    target.forward = forward  # type: ignore[method-assign]


def _swap_names(engine: Engine) -> Callable[[States], States]:
    """F3: the first two captured states change names."""
    names = [slot_name(slot) for slot in engine.runner.capture[:2]]
    if len(names) < 2:
        raise _cannot("F3", f"{len(names)} slots are captured", "two or more slots")
    first, second = names
    return lambda states: {**states, first: states[second], second: states[first]}


def _captured(engine: Engine, injection: Injection) -> tuple[int, ...]:
    """The slots that the fault is about: the one it names, or all that are captured."""
    captured = engine.runner.capture
    if injection.slot is None:
        return captured
    if injection.slot not in captured:
        raise _cannot(str(injection), f"slot {injection.slot} is not captured", f"one of the slots {list(captured)}")
    return (injection.slot,)


class _WrongPoint:
    """F5: one slot taken at another point of the stream: before the sum over ranks, unadded, or after a norm."""

    def __init__(self, engine: Engine, injection: Injection, kind: str) -> None:
        assert isinstance(engine.target, Decoder)
        (self.slot,) = _captured(engine, injection)
        self.target, self.kind = engine.target, kind
        self.seen: dict[str, torch.Tensor] = {}
        if kind == "partial" and self.target.parallel.size == 1:
            raise _cannot(
                str(injection), "one rank's partial sum is the whole sum", "two or more ranks, or another kind"
            )
        if kind == "no-residual" and not self.slot:
            raise _cannot(
                str(injection), "slot 0 is the embedding, which is added to nothing", "kind=partial or normed"
            )
        reduce = self.target.embed_tokens.reduce
        if self.slot:
            last_add = self._layer(self.slot - 1).mlp.last_add
            last_add.register_forward_hook(self._keep_last_add)
            reduce = last_add.reduce
        reduce.register_forward_hook(self._keep_partial)

    def _layer(self, index: int) -> Any:
        return self.target.layers[index]

    def _keep_last_add(
        self, layer: RowParallelLinear | AddPartial, args: tuple[torch.Tensor, Stream], _out: Stream
    ) -> None:
        x, stream = args
        self.seen["residual"] = stream.rows
        if self.target.parallel.size == 1:  # else the reduce has been seen
            self.seen["block"] = layer.partial(x)

    def _keep_partial(self, _module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        self.seen["partial"] = args[0].clone()  # the sum may be made in place
        self.seen["block"] = out

    def __call__(self, states: States) -> States:
        name = slot_name(self.slot)
        match self.kind:
            case "no-residual":
                wrong = self.seen["block"]
            case "normed":
                last = self.slot == len(self.target.layers)
                norm = self.target.norm if last else self._layer(self.slot).input_layernorm
                wrong = norm(states[name])
            case _:
                wrong = self.seen["partial"] + self.seen["residual"] if self.slot else self.seen["partial"]
        return {**states, name: wrong.view(states[name].shape)}  # [M, h] -> [B, R, h]


class _StaleReplay:
    """F6: a round hands out what an earlier round of the same shape captured, as a buffer outside a CUDA graph would.

    Prefill stays right. frozen: it is always the first round's (with graphs: the warm-up's); else the last one's. The
    kept state is changed in place, so that a captured round does the same.
    """

    def __init__(self, engine: Engine, injection: Injection, *, frozen: bool) -> None:
        self.names = [slot_name(slot) for slot in _captured(engine, injection)]
        self.frozen, self.in_round = frozen, False
        self.kept: dict[tuple[str, torch.Size], torch.Tensor] = {}
        _change_states(engine, self._states)
        runner, original = engine.runner, engine.runner.round

        def round_(*args: object, **kwargs: object) -> object:
            self.in_round = True
            try:
                return original(*args, **kwargs)  # type: ignore[arg-type]
            finally:
                self.in_round = False

        runner.round = round_  # type: ignore[method-assign,assignment]

    def _states(self, states: States) -> States:
        if not self.in_round:
            return states
        bent = dict(states)
        for name in self.names:
            key = (name, states[name].shape)
            kept = self.kept.setdefault(key, states[name].clone())
            bent[name] = kept.clone()
            if not self.frozen:
                kept.copy_(states[name])
        return bent


# ---- the draft -------------------------------------------------------------------------------------------------------


def _proposer(engine: Engine, injection: Injection) -> Eagle3Proposer:
    proposer = engine.runner.proposer
    if not isinstance(proposer, Eagle3Proposer):
        raise _cannot(str(injection), "there is no draft at K = 0", "num_steps of 1 or more")
    return proposer


def _permute_features(proposer: Eagle3Proposer) -> None:
    """F3: the draft reads its features with the first two slots exchanged; what traces hold is right."""
    absorb, propose, count = proposer.absorb, proposer.propose, len(proposer.slots)
    if count < 2:
        raise _cannot("F3:kind=features", f"the draft reads {count} slot", "two or more slots")

    def permuted(batch: DraftBatch) -> DraftBatch:
        first, second, *others = batch.features.chunk(count, dim=-1)  # [B, R, n * h] -> n x [B, R, h]
        return replace(batch, features=torch.cat((second, first, *others), dim=-1))

    proposer.absorb = lambda batch: absorb(permuted(batch))  # type: ignore[method-assign]
    proposer.propose = lambda batch: propose(permuted(batch))  # type: ignore[method-assign]


def _feed_back_the_other_state(proposer: Eagle3Proposer) -> None:
    """F19: the normed state is fed back where the draft was trained on the one before the norm, or the other way."""
    network = proposer.network
    normed = network.config.norm_output
    network.feedback = lambda state: state if normed else network.norm(state)  # type: ignore[method-assign]


class _StillRope:
    """F19: from step 2 on, rope positions stay at the first step's; the cells of the cache move on."""

    def __init__(self, proposer: Eagle3Proposer) -> None:
        self.first: torch.Tensor | None = None  # [B, 1], slot that the round drafts from; None before its first step
        propose, forward, network = proposer.propose, proposer.network.forward, proposer.network

        def wrong_forward(
            token_ids: torch.Tensor,
            g: torch.Tensor,
            positions: torch.Tensor,
            attend: object,
            angles: tuple[torch.Tensor, torch.Tensor] | None = None,
        ) -> torch.Tensor:
            if self.first is not None:
                positions = torch.where(positions >= 0, self.first, positions)
            elif self.drafting:
                self.first = positions.max(dim=1, keepdim=True).values  # [B, R] -> [B, 1]
            return forward(token_ids, g, positions, attend)  # type: ignore[arg-type]  # its angles are looked up

        def wrong_propose(batch: DraftBatch) -> Proposal:
            self.first, self.drafting = None, True
            try:
                return propose(batch)
            finally:
                self.first, self.drafting = None, False

        self.drafting = False
        network.forward = wrong_forward  # type: ignore[method-assign]
        proposer.propose = wrong_propose  # type: ignore[method-assign]


class _KeptDraftKV:
    """F19: cells that a chain wrote for its own drafts are kept, not made again from the target's states.

    Right in a request's first round, where no chain has run before; wrong in every later one. Rows whose cell is to
    stay write to the dummy block instead.
    """

    def __init__(self, proposer: Eagle3Proposer, num_slots: int) -> None:
        # [S + 1, 2] int64 by slot: first and last cell that its last chain wrote
        self.chains = torch.tensor([[0, -1]], device=proposer.target_ids.device).repeat(num_slots, 1)
        propose, begin = proposer.propose, proposer.begin

        def wrong_propose(batch: DraftBatch) -> Proposal:
            assert batch.write_index is not None
            keep = self._mark(batch).flatten()  # [B, R] -> [B * R]
            index = batch.write_index.clone()  # [B * R + K * B]
            index[: len(keep)] = torch.where(keep, 0, index[: len(keep)])
            return propose(replace(batch, write_index=index))

        def forgetful_begin(slot: int, request_id: str) -> None:
            self.chains[slot, 0], self.chains[slot, 1] = 0, -1
            begin(slot, request_id)

        proposer.begin = forgetful_begin  # type: ignore[method-assign]
        proposer.propose = wrong_propose  # type: ignore[method-assign]

    def _mark(self, batch: DraftBatch) -> torch.Tensor:
        """Rows [B, R] whose cells are kept; notes which ones this round's chain will write."""
        assert batch.num_valid is not None
        assert batch.chain_positions is not None
        first, last = self.chains[batch.slots].split(1, dim=1)  # [B, 2] -> 2 x [B, 1]
        keep = (batch.positions >= first) & (batch.positions <= last)  # [B, R]
        slot = batch.positions.max(dim=1).values  # [B]
        end = slot + batch.num_valid.clamp(max=len(batch.chain_positions)) - 1
        self.chains[batch.slots] = torch.stack((slot + 1, end), dim=1)  # 2 x [B] -> [B, 2]
        return keep


def _cannot(injection: str, found: str, expected: str) -> SlipstreamError:
    return SlipstreamError(
        f"{injection} cannot be injected: {found}",
        expected=expected,
        do="correct --inject, or the settings of the server",
    )
