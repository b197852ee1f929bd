"""A request, its state on the host while it runs, and what it gives back."""

from dataclasses import dataclass, field
from enum import Enum, auto

from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.trace import RequestTrace, TraceRecorder


@dataclass(frozen=True)
class Request:
    """One prompt to answer.

    Args:
        request_id: unique among the requests in the engine.
        prompt_ids: token ids, at least one.
        params: how tokens are chosen and when to stop.
        choice_index: which of several answers to one prompt this is; enters the noise beside the seed.
        trace: record states, draft logits and accepted counts (slow and large; for parity).
        streamed: somebody may read tokens as they come, so prompts of others shall not hold them up for long.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    choice_index: int = 0
    trace: bool = False
    streamed: bool = True


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one chosen token, and of the most likely ones, from the raw logits."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)  # one a request and round: not frozen, which costs three times as much to make
class RequestOutput:
    """What one step gave one request.

    Args:
        new_token_ids: committed in this step, a stop token included.
        finish_reason: "stop" (an end or stop token), "length" (max_tokens or the context's end), or None: goes on.
        logprobs: one a new token where the request asked, else None.
        trace: of the whole request, with its last output, where it asked.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None
    trace: RequestTrace | None = None


@dataclass(frozen=True)
class Completion:
    """A finished answer, as `Engine.generate` returns it."""

    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    trace: RequestTrace | None = None


class SequenceStatus(Enum):
    WAITING = auto()
    PREFILLING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True)  # two requests are never the same one, whatever they hold
class Sequence:
    """Host state of a request. `slot` is its row in the request table, `blocks` its KV blocks, both while admitted.

    `limit` is the most tokens, prompt included, that it may have: max_tokens or the context's end. `in_flight` counts
    the launches that are out and will give it a token or more. `length` counts committed tokens, prompt included.
    """

    request: Request
    stop_ids: frozenset[int]
    limit: int
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    output_ids: list[int] = field(default_factory=list)
    recorder: TraceRecorder | None = None
    in_flight: int = 0
    num_prompt: int = field(init=False)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = self.length = len(self.request.prompt_ids)

    @property
    def is_watched(self) -> bool:
        """More is read of its rounds than the tokens."""
        return self.recorder is not None or self.request.params.logprobs is not None

    def append(self, token_ids: list[int]) -> tuple[list[int], str | None]:
        """Takes the tokens of a round up to the first stop token or the limit: (taken, finish reason or None).

        A stop token within the limit wins over the limit; what lies behind either is dropped.
        """
        taken, reason = token_ids[: self.limit - self.length], None
        if not self.stop_ids.isdisjoint(taken):
            first = next(i for i, token in enumerate(taken) if token in self.stop_ids)
            taken, reason = taken[: first + 1], "stop"
        self.output_ids += taken
        self.length += len(taken)
        if reason is None and self.length >= self.limit:
            reason = "length"
        return taken, reason
