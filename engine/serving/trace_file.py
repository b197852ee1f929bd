"""A traced request as one safetensors file, there and back: what travels from the server to parity.

token_ids       int64 [n + 1]        prompt and answer
state.slot_2 .. [n, h]               every captured slot by name
teacher         [n, h]               slot N before the final norm
target_argmax   int64 [n]
round_start, round_num_valid, round_accepted   int64 [rounds]
draft_tokens    int64 [rounds, K]    target ids
draft_logits    [rounds, K, Vd]      absent where the proposer has none
"""

import torch
from safetensors.torch import load, save

from slipstream.engine.trace import RequestTrace, RoundTrace

_STATES = "state."


def pack_trace(trace: RequestTrace) -> bytes:
    """The trace as the bytes of a safetensors file."""
    tensors = {
        "token_ids": torch.tensor(trace.token_ids, dtype=torch.int64),
        "teacher": trace.teacher,
        "target_argmax": trace.target_argmax,
        **{_STATES + name: state for name, state in trace.states.items()},
    }
    rounds = trace.rounds
    for field in ("start", "num_valid", "accepted"):
        tensors[f"round_{field}"] = torch.tensor([getattr(r, field) for r in rounds], dtype=torch.int64)
    if rounds:
        tensors["draft_tokens"] = torch.stack([r.draft_tokens for r in rounds])  # rounds x [K] -> [rounds, K]
        logits = [r.draft_logits for r in rounds if r.draft_logits is not None]
        if len(logits) == len(rounds):
            tensors["draft_logits"] = torch.stack(logits)  # rounds x [K, Vd] -> [rounds, K, Vd]
    return save({name: tensor.contiguous() for name, tensor in tensors.items()})


def unpack_trace(data: bytes) -> RequestTrace:
    """Inverse of `pack_trace`."""
    tensors = load(data)
    logits = tensors.get("draft_logits")
    fields = (tensors[f"round_{field}"].tolist() for field in ("start", "num_valid", "accepted"))
    rounds = [
        RoundTrace(start, tensors["draft_tokens"][i], None if logits is None else logits[i], num_valid, accepted)
        for i, (start, num_valid, accepted) in enumerate(zip(*fields, strict=True))
    ]
    states = {name.removeprefix(_STATES): t for name, t in tensors.items() if name.startswith(_STATES)}
    return RequestTrace(tensors["token_ids"].tolist(), states, tensors["teacher"], tensors["target_argmax"], rounds)
