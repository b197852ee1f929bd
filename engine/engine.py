"""The engine: takes requests, runs steps, hands out tokens. Speculation never changes what it hands out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from slipstream.engine.acceptance import AcceptanceCounts
from slipstream.engine.agreement import RankAgreement
from slipstream.engine.block_manager import BlockManager
from slipstream.engine.config import EngineConfig
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.models import TargetModel
from slipstream.engine.proposer import Proposer
from slipstream.engine.runner import PhaseSeconds, RoundResult, Runner
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.scheduler import Chunk, Scheduler
from slipstream.engine.sequence import Completion, Request, RequestOutput, TokenLogprob
from slipstream.engine.sequence import Sequence as Running
from slipstream.engine.stats import EngineStats
from slipstream.engine.trace import RoundTrace, TraceRecorder
from slipstream.kernels.sampling import SamplingBatch, token_logprobs

__all__ = ["Completion", "Engine", "EngineConfig", "Request", "RequestOutput"]


class Engine:
    """Continuous batching over one target.

    Args:
        target: a loaded target.
        config: sizes, K among them.
        proposer: makes the drafts of a round; None exactly at K = 0.
        capture_slots: slots that traces hold, beside those that the proposer reads.
        agreement: compares the ranks after every step, where there are several.

    Raises SlipstreamError when the parts do not fit together.
    """

    def __init__(
        self,
        target: TargetModel,
        config: EngineConfig | None = None,
        proposer: Proposer | None = None,
        capture_slots: tuple[int, ...] = (),
        agreement: RankAgreement | None = None,
    ) -> None:
        config = config or EngineConfig()
        _check_fit(target, config, proposer)
        self.target, self.config, self.agreement = target, config, agreement
        self.runner = Runner(target, config, proposer, capture_slots)
        blocks = BlockManager(config.total_blocks, config.block_size_tokens)
        self.scheduler = Scheduler(
            config.max_running_requests, blocks, config.prefill_chunk_tokens, lookahead=config.num_steps + 1
        )
        self.stats = EngineStats()
        self._sequences: dict[str, Running] = {}
        self._batch: tuple[list[Running], torch.Tensor, SamplingBatch] | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(self, request: Request) -> Request:
        """Queues a request. Returns it with its seed drawn. Raises SlipstreamError for one that could never run."""
        if request.request_id in self._sequences:
            raise SlipstreamError(f"request id {request.request_id!r} is in use", expected="an id of its own")
        request = replace(request, params=request.params.validate().with_seed())
        params, model = request.params, self.target.config
        num_prompt, context = len(request.prompt_ids), self.config.max_context_tokens
        if not request.prompt_ids or not all(0 <= i < model.vocab_size for i in request.prompt_ids):
            raise SlipstreamError(
                "a prompt token id is out of range" if request.prompt_ids else "the prompt is empty",
                expected=f"one or more ids in 0..{model.vocab_size - 1}",
                do="encode the prompt with the target's own tokenizer",
            )
        if num_prompt >= context:
            raise SlipstreamError(
                f"the prompt has {num_prompt} tokens",
                expected=f"at most {context - 1}: max_context_tokens is {context}, and a new token needs room",
                do="shorten the prompt, or raise server.max_context_tokens",
            )
        limit = min(num_prompt + params.max_tokens, context)
        self.scheduler.blocks.check_fits(limit + self.scheduler.lookahead)
        stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.eos_token_ids))
        sequence = Running(request, frozenset(stop_ids), limit, recorder=TraceRecorder() if request.trace else None)
        self._sequences[request.request_id] = sequence
        self.scheduler.waiting.append(sequence)
        return request

    def abort(self, request_id: str) -> bool:
        """Drops a request and frees what it holds. False when there is no such request (it may just have ended)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._release(sequence)
        return True

    def step(self) -> list[RequestOutput]:
        """Admits what fits, runs one prefill chunk and one round; what every request with news got."""
        began, before = time.perf_counter(), replace(self.runner.seconds)
        outputs = []
        for sequence in self.scheduler.admit():
            self.runner.table.occupy(sequence.slot, sequence.request.prompt_ids, sequence.limit, sequence.blocks)
        chunk = self.scheduler.next_chunk()
        if chunk is not None:
            outputs += self._prefill(chunk)
        if self.scheduler.running:
            outputs += self._round(list(self.scheduler.running))
        if self.agreement:
            self.agreement.check()
        self._count_step(time.perf_counter() - began, before)
        return outputs

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        progress: Callable[[int, int], None] | None = None,
        trace: bool = False,
    ) -> list[Completion]:
        """Answers every prompt; results in the order of the prompts.

        Args:
            prompts: token ids.
            params: one for all, or one a prompt.
            progress: called with (answers done, prompts) after every finished answer.
            trace: record every request.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        for i, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
            self.add_request(Request(str(i), list(prompt), p, trace=trace))
        answers: list[list[int]] = [[] for _ in prompts]
        done: dict[int, Completion] = {}
        while len(done) < len(prompts):
            for output in self.step():
                i = int(output.request_id)
                answers[i] += output.new_token_ids
                if output.finish_reason:
                    done[i] = Completion(list(prompts[i]), answers[i], output.finish_reason, output.trace)
                    if progress:
                        progress(len(done), len(prompts))
        return [done[i] for i in range(len(prompts))]

    def _prefill(self, chunk: Chunk) -> list[RequestOutput]:
        sequence, request = chunk.sequence, chunk.sequence.request
        sampling = SamplingBatch.from_params([request.params], [request.choice_index], self.config.device)
        result = self.runner.prefill(sequence.slot, chunk.start, chunk.end, sampling, request.request_id)
        self.stats.prompt_tokens += chunk.end - chunk.start
        if self.agreement:
            self.agreement.note_states(result.states)
            self.agreement.note_tokens(*[] if result.token is None else [result.token])
        if sequence.recorder:
            states = {name: state[0] for name, state in result.states.items()}
            sequence.recorder.add(states, result.last[0], self.target.logits(result.last[0]))
        self.scheduler.chunk_done(chunk)
        if result.token is None or result.logits is None:
            return []
        return [self._deliver(sequence, result.token[0].tolist(), result.logits[0])]

    def _round(self, sequences: list[Running]) -> list[RequestOutput]:
        if self._batch is None or self._batch[0] != sequences:  # parameters change only when the batch does
            requests = [s.request for s in sequences]
            sampling = SamplingBatch.from_params(
                [r.params for r in requests], [r.choice_index for r in requests], self.config.device
            )
            slots = torch.tensor([s.slot for s in sequences], device=self.config.device)
            self._batch = (sequences, slots, sampling)
        _, slots, sampling = self._batch
        result = self.runner.round(slots, sampling, [s.request.request_id for s in sequences])
        self.stats.rounds += 1
        if self.agreement:
            self.agreement.note_states(result.states)
            self.agreement.note_tokens(result.tokens, result.accepted, result.start)
            if result.proposal is not None:
                self.agreement.note_drafts(result.proposal.tokens)
        outputs = []
        facts = zip(sequences, result.tokens.tolist(), result.accepted.tolist(), result.num_valid.tolist(), strict=True)
        for b, (sequence, tokens, accepted, num_valid) in enumerate(facts):
            if sequence.recorder:
                _record(sequence.recorder, result, b, accepted)
            output = self._deliver(sequence, tokens[: accepted + 1], result.logits[b])
            counts = self.stats.acceptance.setdefault(self.config.num_steps, AcceptanceCounts(self.config.num_steps))
            counts.add(accepted, num_valid < self.config.num_steps, ends_request=output.finish_reason is not None)
            outputs.append(output)
        return outputs

    def _deliver(self, sequence: Running, tokens: list[int], logits: torch.Tensor) -> RequestOutput:
        """Hands over committed tokens (logits [rows, V] of the same rows first), cut at a stop token or the limit."""
        taken, finish_reason = sequence.append(tokens)
        self.stats.generated_tokens += len(taken)
        request, logprobs, trace = sequence.request, None, None
        if request.params.logprobs is not None:
            logprobs = _logprobs(logits[: len(taken)], taken, request.params.logprobs)
        if finish_reason:
            if sequence.recorder:
                trace = sequence.recorder.finish(request.prompt_ids + sequence.output_ids)
            self._release(sequence)
        return RequestOutput(request.request_id, taken, finish_reason, logprobs, trace)

    def _release(self, sequence: Running) -> None:
        if sequence.slot >= 0:
            self.runner.table.clear(sequence.slot)
        self.scheduler.finish(sequence)
        del self._sequences[sequence.request.request_id]

    def _count_step(self, seconds: float, before: PhaseSeconds) -> None:
        """Splits a step's wall time into its phases; the rest is sampling, commit and the host."""
        stats, now = self.stats, self.runner.seconds
        prefill, draft, verify = now.prefill - before.prefill, now.draft - before.draft, now.verify - before.verify
        stats.steps += 1
        stats.prefill_seconds += prefill
        stats.draft_seconds += draft
        stats.verify_seconds += verify
        stats.rest_seconds += seconds - prefill - draft - verify


def _record(recorder: TraceRecorder, result: RoundResult, b: int, accepted: int) -> None:
    """Keeps request `b` of a round: the rows that were committed, and what the draft proposed."""
    rows = accepted + 1
    states = {name: state[b, :rows] for name, state in result.states.items()}
    recorder.add(states, result.last[b, :rows], result.logits[b, :rows])
    if result.proposal is not None:
        logits = None if result.proposal.logits is None else result.proposal.logits[b].clone()
        tokens, valid = result.proposal.tokens[b].clone(), int(result.num_valid[b])
        recorder.rounds.append(RoundTrace(int(result.start[b]), tokens, logits, valid, accepted))


def _logprobs(logits: torch.Tensor, tokens: list[int], top_n: int) -> list[TokenLogprob]:
    """logits [n, V] of the rows that chose `tokens` -> one entry a token."""
    found = token_logprobs(logits, torch.tensor(tokens, device=logits.device), top_n)
    rows = zip(tokens, found.chosen.tolist(), found.top_ids.tolist(), found.top.tolist(), strict=True)
    return [TokenLogprob(t, chosen, list(zip(ids, values, strict=True))) for t, chosen, ids, values in rows]


def _check_fit(target: TargetModel, config: EngineConfig, proposer: Proposer | None) -> None:
    """Target, sizes and proposer belong together, or SlipstreamError says what does not."""
    have = proposer.num_steps if proposer else 0
    if have != config.num_steps:
        raise SlipstreamError(
            f"num_steps = {config.num_steps}, and {'a proposer of ' + str(have) if proposer else 'no proposer'}",
            expected="the same K in both; no proposer at K = 0",
            do="make the proposer with the engine's num_steps",
        )
    bounds = {"target": target.config.max_position, "draft": proposer.max_position if proposer else None}
    for name, bound in bounds.items():
        if bound is not None and bound < config.max_context_tokens:
            raise SlipstreamError(
                f"the {name} follows a context of {bound} tokens; the engine is to serve {config.max_context_tokens}",
                expected=f"max_context_tokens <= {bound}",
                do="lower server.max_context_tokens"
                + (", or raise draft.max_context_tokens" if name == "draft" else ""),
                fault="F14" if name == "draft" else "",
            )
