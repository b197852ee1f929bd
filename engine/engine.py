"""The engine: takes requests, runs steps, hands out tokens. Speculation never changes what it hands out."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from slipstream.engine.agreement import RankAgreement
from slipstream.engine.block_manager import BlockManager
from slipstream.engine.card_group import check_peers
from slipstream.engine.compile_count import COMPILES
from slipstream.engine.config import EngineConfig
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.fit import check_parts, token_limit
from slipstream.engine.in_flight import Flight, wait_for
from slipstream.engine.kv_room import room_for
from slipstream.engine.models import TargetModel
from slipstream.engine.proposer import Proposer
from slipstream.engine.round_graph import make_steps
from slipstream.engine.runner import PrefillResult, RoundResult, Runner
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.scheduler import Chunk, Scheduler
from slipstream.engine.sequence import Completion, Request, RequestOutput, SequenceStatus, TokenLogprob
from slipstream.engine.sequence import Sequence as Running
from slipstream.engine.stats import EngineStats
from slipstream.engine.step_choice import FixedSteps, PayingSteps, StepChoice, slowest
from slipstream.engine.trace import RoundTrace, TraceRecorder, on_host
from slipstream.kernels.round_ring import RoundRecord
from slipstream.kernels.sampling import token_logprobs

__all__ = ["Completion", "Engine", "EngineConfig", "Request", "RequestOutput"]


class Engine:
    """Continuous batching over one target.

    Args:
        target: a loaded target.
        config: sizes, K among them.
        proposer: makes the drafts of a round; None exactly at K = 0.
        capture_slots: slots that traces hold, beside those that the proposer reads.
        agreement: compares the ranks, where there are several.

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
        check_parts(target, config, proposer)
        self.target, self.config, self.agreement = target, config, agreement
        self.runner = Runner(target, config, proposer, capture_slots)
        self.steps = make_steps(self.runner)
        blocks = BlockManager(config.total_blocks, config.block_size_tokens)
        self.scheduler = Scheduler(
            config.max_running_requests,
            blocks,
            config.prefill_chunk_tokens,
            lookahead=config.num_steps + 1,
            buckets=config.prefill_buckets,
        )
        self.stats = EngineStats()
        self.choice: StepChoice = FixedSteps(config.num_steps)
        self.started = False
        self._sequences: dict[str, Running] = {}
        self._flights: deque[Flight] = deque()
        self._at_ready = (0, 0)  # captures and compiles
        self._left_slots: list[int] = []  # of requests that have ended, not cleared yet
        self._num_watched = 0  # admitted requests whose results are read from what the last launch left

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def start(self) -> None:
        """Warms up and captures, before the first request; the first step does it where nobody has."""
        if not self.started:
            with room_for("the buffers of the captured steps"):
                self.steps.prepare()
            if self.steps.round_ms:
                self.choice = PayingSteps(slowest(self.target.parallel, self.steps.round_ms))
            self.started = True
            self.mark_ready()

    def forget(self) -> None:
        """Counters begin anew, and what rounds have told of acceptance is forgotten: it was of no client's."""
        self.stats = EngineStats()
        self.choice.forget()

    def mark_ready(self) -> None:
        """From now on nothing is to be captured or compiled; what is all the same, is counted."""
        self._at_ready = (self.steps.captures, COMPILES.count)

    @property
    def captures_after_ready(self) -> int:
        return self.steps.captures - self._at_ready[0]

    @property
    def compiles_after_ready(self) -> int:
        """Of the process's Triton kernels: those of another engine count, too."""
        return COMPILES.count - self._at_ready[1]

    def add_request(self, request: Request) -> Request:
        """Queues a request. Returns it with its seed drawn. Raises SlipstreamError for one that could never run."""
        if request.request_id in self._sequences:
            raise SlipstreamError(f"request id {request.request_id!r} is in use", expected="an id of its own")
        request = replace(request, params=request.params.validate().with_seed())
        limit = token_limit(request, self.target.config, self.config)
        self.scheduler.blocks.check_fits(limit + self.scheduler.lookahead)
        params = request.params
        stop_ids = set(params.stop_token_ids) | set(() if params.ignore_eos else self.target.config.eos_token_ids)
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
        with self.steps.context():
            self._clear_left()
        return True

    def step(self) -> list[RequestOutput]:
        """Admits what fits, launches one batch of prefill chunks and one round; what every request with news got.

        The news are of the oldest launch that is out: with `rounds_in_flight` of 0 that is this step's own.
        """
        if not self.started:
            self.start()
        outputs: list[RequestOutput] = []
        with self.steps.context():
            if self.scheduler.waiting:
                self._admit()
            self._collect_until(self._depth, outputs)
            chunks = self.scheduler.next_chunks()
            if chunks:
                self._launch_chunks(chunks)
                self._collect_until(self._depth, outputs)
            ready = self._ready()
            if ready:
                self._launch_round(ready)
                self._collect_until(self._depth, outputs)
            elif not chunks and self._flights:
                self._collect(outputs)
            self._clear_left()
        self.stats.steps += 1
        if self.agreement:
            self.agreement.end_step(compare=self._waits_for_each or not self.scheduler.has_work)
        if not self.scheduler.has_work:
            self.stats.note_idle()
        return outputs

    def drain(self) -> None:
        """Waits for what is still out for requests that have ended: nothing runs on the device any more."""
        assert not self.has_work
        with self.steps.context():
            self._collect_until(0, [])

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
            self.add_request(Request(str(i), list(prompt), p, trace=trace, streamed=False))
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
        if not self.has_work:
            self.drain()
        return [done[i] for i in range(len(prompts))]

    @property
    def _depth(self) -> int:
        """Launches that may stay out. None, while somebody reads what the last one left beside its tokens."""
        return 0 if self._num_watched else self.config.in_flight

    @property
    def _waits_for_each(self) -> bool:
        """Whether what a launch left beside its tokens is still there when they are read."""
        return self._depth == 0

    def _admit(self) -> None:
        admitted = self.scheduler.admit()
        if admitted:
            self.runner.occupy(admitted)
            self._num_watched += sum(sequence.is_watched for sequence in admitted)

    def _ready(self) -> list[Running]:
        """Running requests that a round can give something: each launch that is out gives them a token or more."""
        return [s for s in self.scheduler.running if s.length + s.in_flight < s.limit]

    def _launch_chunks(self, chunks: list[Chunk]) -> None:
        began = time.perf_counter()
        result = self.steps.prefill(chunks)
        sequences = [chunk.sequence for chunk in chunks]
        self._flights.append(Flight(self.steps.launched - 1, sequences, result, began, chunks))
        for chunk in chunks:
            chunk.sequence.in_flight += chunk.is_last
            self.stats.prompt_tokens += chunk.rows
        self.scheduler.chunks_done(chunks)

    def _launch_round(self, sequences: list[Running]) -> None:
        began = time.perf_counter()
        traced = self._num_watched > 0 and any(sequence.recorder for sequence in sequences)
        num_steps = self.choice.choose(len(sequences), traced)
        result = self.steps.round([s.slot for s in sequences], num_steps)
        self._flights.append(Flight(self.steps.launched - 1, sequences, result, began, num_steps=num_steps))
        for sequence in sequences:
            sequence.in_flight += 1

    def _collect_until(self, depth: int, outputs: list[RequestOutput]) -> None:
        while len(self._flights) > depth:
            self._collect(outputs)

    def _collect(self, outputs: list[RequestOutput]) -> None:
        """Waits for the oldest launch, and hands out what it gave to the requests that have not ended meanwhile."""
        flight, began = self._flights.popleft(), time.perf_counter()
        record = wait_for(self.runner.ring, flight, self.runner.device, lambda: check_peers(self.target.parallel))
        self.stats.waited_seconds += time.perf_counter() - began
        if self.agreement and not self._waits_for_each:
            self.agreement.note_record(record)
        if isinstance(flight.result, PrefillResult):
            self._collect_chunks(flight, flight.result, record, outputs)
        else:
            self._collect_round(flight, flight.result, record, outputs)

    def _collect_chunks(
        self, flight: Flight, result: PrefillResult, record: RoundRecord, outputs: list[RequestOutput]
    ) -> None:
        if self.agreement and self._waits_for_each:
            self.agreement.note_states(result.states)
            last = [c for c, chunk in enumerate(flight.chunks) if chunk.is_last]
            self.agreement.note_tokens(*[result.token[c] for c in last])
        whole = self.target.vocabulary.whole(result.logits) if self._num_watched else None
        counted = False
        for c, (chunk, news) in enumerate(zip(flight.chunks, record.requests, strict=True)):
            sequence = chunk.sequence
            sequence.in_flight -= chunk.is_last
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if not counted:
                counted = True
                self.stats.add_chunk_time(record.stamps_ns[2], time.perf_counter() - flight.launched_at)
            if sequence.recorder:
                states = {name: state[c, : chunk.rows] for name, state in result.states.items()}
                # All rows of the launch: another number of them might need another kernel.
                with torch.inference_mode():
                    logits = self.target.logits(result.last[c])
                sequence.recorder.add(states, result.last[c, : chunk.rows], logits[: chunk.rows])
            if chunk.is_last:
                outputs.append(self._deliver(sequence, news.tokens, None if whole is None else whole[c]))

    def _collect_round(
        self, flight: Flight, result: RoundResult, record: RoundRecord, outputs: list[RequestOutput]
    ) -> None:
        if self.agreement and self._waits_for_each:
            self.agreement.note_states(result.states)
            self.agreement.note_tokens(result.tokens, result.accepted, result.start)
            if result.proposal is not None:
                self.agreement.note_drafts(result.proposal.tokens)
        if self._num_watched:
            result = self._whole(result)
        num_steps, counted = flight.num_steps, False
        counts = self.stats.counts(num_steps)
        for b, (sequence, news) in enumerate(zip(flight.sequences, record.requests, strict=True)):
            sequence.in_flight -= 1
            if sequence.status is SequenceStatus.FINISHED:
                continue  # it ended, or was dropped, after this was launched
            if not counted:
                counted = True
                self.stats.add_round(num_steps, record.stamps_ns)
            if sequence.recorder:
                _record(sequence.recorder, result, b, news.accepted)
            output = self._deliver(sequence, news.tokens, result.logits[b] if self._num_watched else None)
            counts.add(news.accepted, news.num_valid < num_steps, output.finish_reason is not None)
            self.choice.note(num_steps, news.num_valid, news.accepted)
            outputs.append(output)

    @torch.inference_mode()
    def _whole(self, result: RoundResult) -> RoundResult:
        """With all columns of the logits, for who reads them: ranks exchange them outside of the captured round."""
        proposal = result.proposal and result.proposal.whole()
        return replace(result, logits=self.target.vocabulary.whole(result.logits), proposal=proposal)

    def _deliver(self, sequence: Running, tokens: list[int], logits: torch.Tensor | None) -> RequestOutput:
        """Hands over committed tokens, cut at a stop token or the limit.

        logits: [rows, V] of the same rows first; None where nobody asked: the next launch may be overwriting them.
        """
        taken, finish_reason = sequence.append(tokens)
        self.stats.generated_tokens += len(taken)
        request = sequence.request
        output = RequestOutput(request.request_id, taken, finish_reason)
        if request.params.logprobs is not None:
            assert logits is not None
            output.logprobs = _logprobs(logits[: len(taken)], taken, request.params.logprobs)
        if finish_reason:
            if sequence.recorder:
                output.trace = sequence.recorder.finish(request.prompt_ids + sequence.output_ids)
            self._release(sequence)
        return output

    def _release(self, sequence: Running) -> None:
        if sequence.slot >= 0:
            self._num_watched -= sequence.is_watched
            self._left_slots.append(sequence.slot)
        self.scheduler.finish(sequence)
        del self._sequences[sequence.request.request_id]

    def _clear_left(self) -> None:
        """Clears the rows of requests that have ended: all of a step at once, before somebody else moves in."""
        if self._left_slots:
            self.runner.table.clear(self._left_slots)
            self._left_slots.clear()


def _record(recorder: TraceRecorder, result: RoundResult, b: int, accepted: int) -> None:
    """Keeps request `b` of a round: the rows that were committed, and what the draft proposed."""
    rows = accepted + 1
    states = {name: state[b, :rows] for name, state in result.states.items()}
    recorder.add(states, result.last[b, :rows], result.logits[b, :rows])
    if result.proposal is not None:
        steps = result.proposal.logits
        logits = None if steps is None else on_host(torch.stack([one[b] for one in steps]))  # K x [B, Vd] -> [K, Vd]
        tokens, valid = on_host(result.proposal.tokens[b]), int(result.num_valid[b])
        recorder.rounds.append(RoundTrace(int(result.start[b]), tokens, logits, valid, accepted))


def _logprobs(logits: torch.Tensor, tokens: list[int], top_n: int) -> list[TokenLogprob]:
    """logits [n, V] of the rows that chose `tokens` -> one entry a token."""
    found = token_logprobs(logits, torch.tensor(tokens, device=logits.device), top_n)
    rows = zip(tokens, found.chosen.tolist(), found.top_ids.tolist(), found.top.tolist(), strict=True)
    return [TokenLogprob(t, chosen, list(zip(ids, values, strict=True))) for t, chosen, ids, values in rows]
