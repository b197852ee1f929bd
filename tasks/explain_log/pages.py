"""Metrics pages in the form of Prometheus: SGLang's, vLLM's and our own. Of several scrapes the last counts."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from slipstream.tasks.explain_log.observed import LARGEST_WIDTH, Positions, RateFit, Section, Settings, Speed

_SAMPLE = re.compile(r"^\s*((?:sglang|vllm|slipstream)[:_]\w+)(?:\{(.*)\})?\s+([-+.\deE]+|NaN)\b")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
EXACT_HALF_UNIT = 1e-4  # the page prints all digits


@dataclass
class Page:
    """(name, labels) -> value, of one page."""

    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    def add(self, line: str) -> str | None:
        """Takes one line; the engine whose it is, None when it is no sample."""
        found = _SAMPLE.match(line)
        if not found:
            return None
        name, labels, value = found.groups()
        if float(value) < 0 and ("spec_" in name or name.startswith("slipstream_")):
            raise ValueError(f"{name} {value}: no count, length or share is below 0")
        if math.isfinite(float(value)):
            self.values[name, tuple(sorted(_LABEL.findall(labels or "")))] = float(value)
        return re.split(r"[:_]", name, maxsplit=1)[0]

    def series(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        for (found, labels), value in self.values.items():
            if found == name and dict(labels).get("engine_type") != "draft":
                yield dict(labels), value

    def total(self, name: str) -> float | None:
        """A counter, summed over its labels; with or without the suffix that the client library adds."""
        values = [v for full in (f"{name}_total", name) for _, v in self.series(full)]
        return sum(values) if values else None

    def gauge(self, name: str, section: Section) -> float | None:
        """A gauge, as the mean over data-parallel ranks (tensor-parallel ranks repeat it)."""
        values = [v for labels, v in self.series(name) if labels.get("tp_rank", "0") == "0"]
        if len(set(values)) > 1:
            section.note(f"{name} differs between {len(values)} ranks: their plain mean is used")
        return sum(values) / len(values) if values else None


def finish(page: Page, engine: str) -> list[Section]:
    """Sections of a page that ended."""
    if engine == "sglang":
        return [_sglang(page)]
    if engine == "vllm":
        return [_vllm(page)]
    return _slipstream(page)


def _sglang(page: Page) -> Section:
    section = Section("sglang", "metrics page")
    section.fit = RateFit(EXACT_HALF_UNIT)
    length, rate = (page.gauge(f"sglang:spec_accept_{name}", section) for name in ("length", "rate"))
    steps, width = (page.gauge(f"sglang:spec_num_{name}", section) for name in ("steps", "draft_tokens"))
    tokens, running = (page.gauge(f"sglang:{name}", section) for name in ("gen_throughput", "num_running_reqs"))
    if steps or width:
        section.effective = Settings(_whole(steps), _whole(width), where="the gauges sglang:spec_num_*")
    if length:
        section.lengths.add(length)
        section.note("gauges hold the last log interval only; how many rounds are behind them is not on the page")
    if length and rate:
        section.fit.add(length, rate)
    elif rate:
        section.fit.pairs, section.fit.rate_sum = 1, rate
    if length and tokens and running and running.is_integer():
        section.speeds_with_prefill.setdefault(int(running), Speed()).add(length, int(running), tokens)
    elif length and tokens and running:
        section.note(
            f"{running:g} running, as a mean over ranks: no stream has that many beside it, so no speed is taken"
        )
    return section


def _vllm(page: Page) -> Section:
    section = Section("vllm", "metrics page")
    drafts, drafted, accepted = (
        page.total(f"vllm:spec_decode_num_{name}") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    hits: dict[int, float] = {}
    for full in ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "vllm:spec_decode_num_accepted_tokens_per_pos"):
        for labels, value in page.series(full):
            if 0 <= int(labels.get("position", LARGEST_WIDTH)) < LARGEST_WIDTH:
                hits[int(labels["position"])] = hits.get(int(labels["position"]), 0.0) + value
    section.rounds, section.accepted = drafts, accepted
    if drafts and hits:
        section.positions = Positions(drafts, [hits.get(k, 0.0) for k in range(max(hits) + 1)])
    if hits:
        k = max(hits) + 1
        section.effective = Settings(k, k + 1, 1, where="the positions counted on the page")
    elif drafts and drafted and (drafted / drafts).is_integer():
        k = int(drafted / drafts)
        section.effective = Settings(k, k + 1, 1, where="draft tokens / drafts on the page")
    if drafts and drafted and section.effective.num_steps and drafted < drafts * section.effective.num_steps:
        section.note(f"{drafted / drafts:.2f} drafts a round on average: some rounds proposed fewer than K")
    section.note("counters since the server started, warm-up included")
    return section


def _slipstream(page: Page) -> list[Section]:
    """One section for each K in force that counted rounds, the one with most rounds last."""
    sections = []
    for labels, rounds in page.series("slipstream_rounds_total"):
        k = int(labels["num_steps"])
        if not k or not rounds:
            continue
        mine = {"num_steps": labels["num_steps"]}
        hits = {
            int(label["position"]): value
            for label, value in page.series("slipstream_joint_accepted_rounds_total")
            if label["num_steps"] == mine["num_steps"]
        }
        section = Section("slipstream", "metrics page", version_from="its own names")
        section.effective = Settings(k, k + 1, 1, where="the label num_steps")
        section.positions = Positions(rounds, [hits.get(i, 0.0) for i in range(1, k + 1)])
        section.rounds, section.accepted = rounds, section.positions.accepted
        section.note("rounds that end a request or propose fewer than K are left out (counted apart on the page)")
        sections.append(section)
    return sorted(sections, key=lambda s: s.rounds or 0.0)


def _whole(value: float | None) -> int | None:
    return int(value) if value else None
