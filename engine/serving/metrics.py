"""Prometheus metrics: what the front sees of requests, and what the engine counts of rounds.

Counts of rounds carry K in force as the label `num_steps`, since figures of different K are compared by A_k only.
"""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp beside every series says nothing here

SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
GAP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "slipstream_requests", "Requests by how they ended.", ["endpoint", "finish_reason"], **options
        )
        self.prompt_tokens = Counter("slipstream_prompt_tokens", "Prompt tokens of accepted requests.", **options)
        self.generated_tokens = Counter("slipstream_generated_tokens", "Tokens sent to clients.", **options)
        self.first_token = Histogram(
            "slipstream_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            buckets=SECONDS_BUCKETS,
            **options,
        )
        self.chunk_gap = Histogram(
            "slipstream_inter_chunk_seconds",
            "Between two rounds' tokens of one request (a chunk holds one to K + 1 tokens).",
            buckets=GAP_BUCKETS,
            **options,
        )
        self.request_seconds = Histogram(
            "slipstream_request_seconds",
            "From a request's arrival to its last token.",
            buckets=SECONDS_BUCKETS,
            **options,
        )
        self._engine = _EngineCollector()
        self.registry.register(self._engine)

    def text(self, stats: dict[str, Any]) -> bytes:
        """The page for Prometheus. stats: the engine's counters (engine_build.engine_stats); {} while it loads."""
        return self._engine.render(self.registry, stats)


class _EngineCollector:
    """Turns one snapshot of the engine's counters into metrics."""

    def __init__(self) -> None:
        self._lock, self._stats = threading.Lock(), dict[str, Any]()

    def render(self, registry: CollectorRegistry, stats: dict[str, Any]) -> bytes:
        with self._lock:
            self._stats = stats
            return generate_latest(registry)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        if not stats:
            return
        yield GaugeMetricFamily("slipstream_requests_running", "Requests being decoded.", stats["running"])
        yield GaugeMetricFamily("slipstream_requests_waiting", "Requests waiting for a place.", stats["waiting"])
        yield GaugeMetricFamily("slipstream_blocks_free", "Free blocks of the KV cache.", stats["free_blocks"])
        yield GaugeMetricFamily("slipstream_blocks", "Blocks of the KV cache.", stats["total_blocks"])
        yield CounterMetricFamily("slipstream_engine_steps", "Steps of the engine.", stats["steps"])
        rounds = CounterMetricFamily(
            "slipstream_engine_rounds",
            "Rounds of the engine, each for all requests of its batch, by the K that ran.",
            labels=["num_steps"],
        )
        for entry in stats["rounds_by_num_steps"]:
            rounds.add_metric([str(entry["num_steps"])], entry["rounds"])
        yield rounds
        yield CounterMetricFamily(
            "slipstream_captures_after_ready", "Graphs captured after ready: none.", stats["captures_after_ready"]
        )
        yield CounterMetricFamily(
            "slipstream_compiles_after_ready", "Kernels compiled after ready: none.", stats["compiles_after_ready"]
        )
        seconds = CounterMetricFamily("slipstream_engine_seconds", "Time spent, by part of a step.", labels=["part"])
        for part, value in stats["seconds"].items():
            seconds.add_metric([part], value)
        yield seconds
        yield from _acceptance(stats["acceptance"])


def _acceptance(by_num_steps: list[dict[str, Any]]) -> Iterator[Metric]:
    """Counts of rounds for each K in force."""
    rounds = CounterMetricFamily(
        "slipstream_rounds", "Counted rounds: K proposed, request went on.", labels=["num_steps"]
    )
    left_out = CounterMetricFamily(
        "slipstream_rounds_left_out",
        "Rounds not counted: `ended` a request, or `clamped` to fewer than K drafts.",
        labels=["num_steps", "reason"],
    )
    drafted = CounterMetricFamily("slipstream_draft_tokens", "Tokens proposed in counted rounds.", labels=["num_steps"])
    accepted = CounterMetricFamily("slipstream_accepted_tokens", "Proposed tokens accepted.", labels=["num_steps"])
    joint = CounterMetricFamily(
        "slipstream_joint_accepted_rounds",
        "Counted rounds whose first `position` drafts were all accepted; over rounds this is A_k.",
        labels=["num_steps", "position"],
    )
    length = GaugeMetricFamily(
        "slipstream_accept_length", "1 + sum of A_k: tokens a round, bonus included.", labels=["num_steps"]
    )
    for counts in by_num_steps:
        label = [str(counts["num_steps"])]
        hits = [step["hits"] for step in counts["joint"]]
        rounds.add_metric(label, counts["rounds"])
        drafted.add_metric(label, counts["rounds"] * counts["num_steps"])
        accepted.add_metric(label, sum(hits))
        for reason, number in counts["rounds_left_out"].items():
            left_out.add_metric([*label, reason], number)
        for position, number in enumerate(hits, start=1):
            joint.add_metric([*label, str(position)], number)
        if counts["accept_length"] is not None:
            length.add_metric(label, counts["accept_length"])
    yield from (rounds, left_out, drafted, accepted, joint, length)
