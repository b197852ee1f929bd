"""A file of any known kind -> its sections. Logs are streamed; a restart in a log begins a new section."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.explain_log import json_answers, sglang_lines, vllm_lines
from slipstream.tasks.explain_log.lines import LogFile
from slipstream.tasks.explain_log.observed import EngineName, Section, most_frequent
from slipstream.tasks.explain_log.pages import Page, finish
from slipstream.tasks.other_engines.metric_definitions import RUNBOOK

# What a line must hold to be looked at closer: one short search over its bytes, since logs have gigabytes.
_MARKS = re.compile(rb"batch|[sS]pec|_args=|ccept|throughput|vLLM API|LLM engine|sglang:|vllm:|slipstream_")
_ACCEPT = re.compile(r"accept(?:ance)?[ _](?:len|rate)|draft acceptance", re.IGNORECASE)
LOOKED_FOR = (
    '"Decode batch ... accept len" (SGLang), "SpecDecoding metrics" (vLLM), a metrics page with sglang:spec_*, '
    "vllm:spec_decode_* or slipstream_*, or JSON with meta_info or internal_states"
)
FIRST_LINES = 5
SHOWN_CHARS = 160


@dataclass(frozen=True)
class ReadFile:
    """section: the last start with figures. notes: about the file itself."""

    path: Path
    section: Section
    notes: tuple[str, ...]


def read_file(path: Path) -> ReadFile:
    """Reads one file. Raises SlipstreamError, with what was looked for and seen, when it holds no figures."""
    file = LogFile(path)
    lines = file.lines()
    first = list(islice(lines, FIRST_LINES))
    everything = chain(first, lines)
    reader = _LogReader()
    sections = json_answers.sections(everything) if looks_like_json(first) else reader.read(everything)
    if not sections and looks_like_json(first):
        sections = reader.read(file.lines())  # a log whose lines are wrapped in JSON, as containers keep them
    useful = [section for section in sections if section.has_figures]
    if not useful:
        raise _nothing_found(file, first, sections, reader.foreign)
    notes = [file.torn] if file.torn else []
    notes += [f"{reader.damaged} damaged lines are left out"] if reader.damaged else []
    notes += _starts(sections, useful)
    return ReadFile(path, useful[-1], tuple(notes))


def looks_like_json(first: list[bytes]) -> bool:
    """A log may begin with a bracket, too: "[2026-02-03 10:27:57 TP0] ..."."""
    start = b"".join(line.strip() for line in first)[:4096]
    return start[:1] == b"{" or re.match(rb"\[\s*[{\[]", start) is not None


class _LogReader:
    """Goes through the lines of a log or a page, and keeps one section for each start of a server."""

    def __init__(self) -> None:
        self.sections: list[Section] = []
        self.foreign: list[str] = []
        self.damaged = 0
        self._sglang, self._vllm = sglang_lines.DecodeLines(), vllm_lines.SpecLines()
        self._page: dict[str, Page] = {}

    def read(self, lines: Iterator[bytes]) -> list[Section]:
        for number, raw in enumerate(lines, start=1):
            if _MARKS.search(raw):
                try:
                    self._line(raw.decode("utf-8", "replace"), number)
                except (ValueError, OverflowError):
                    self.damaged += 1
        for engine, page in self._page.items():
            try:
                self.sections += finish(page, engine)
            except (ValueError, KeyError, OverflowError):
                self.damaged += 1
        return self.sections

    def _line(self, line: str, number: int) -> None:
        page = Page()
        engine = page.add(line)
        if engine:
            self._page.setdefault(engine, Page()).values.update(page.values)
        elif not (self._start(line, number) or self._figures(line, number)) and _ACCEPT.search(line):
            self.foreign += [line[:SHOWN_CHARS]] if len(self.foreign) < 3 else []

    def _start(self, line: str, number: int) -> bool:
        """Takes a line of a server's start."""
        if "server_args=" in line:
            settings, interval, version = sglang_lines.start_up(line)
            section = self._begin("sglang", number, again=lambda s: s.effective.known and s.effective != settings)
            section.effective = settings
            section.log_interval = interval or section.log_interval
            if version:
                section.version, section.version_from = version, "the start-up log"
            return True
        if sglang_lines.ADJUSTED in line:
            self._begin("sglang", number).width_adjusted = True
            return True
        command = sglang_lines.asked(line)
        if command:
            self._begin("sglang", number, again=lambda s: s.asked.known).asked = command
            return True
        version, (asked, in_force) = vllm_lines.version(line), vllm_lines.settings(line)
        if version or asked or in_force:
            section = self._begin("vllm", number)
            section.version, section.version_from = version or section.version, "the start-up log"
            section.asked, section.effective = asked or section.asked, in_force or section.effective
            return True
        return False

    def _figures(self, line: str, number: int) -> bool:
        """Takes a line with figures, of the server that started last."""
        sglang = any(mark in line for mark in ("Decode batch", "Prefill batch", "Adaptive spec"))
        engine: EngineName = "sglang" if sglang else "vllm"
        current = self.sections[-1] if self.sections else None
        section = current if current and current.engine == engine else Section(engine, "log", number)
        taken = self._sglang.read(line, section) if sglang else self._vllm.read(line, section)
        if taken and section is not current:
            self.sections.append(section)
        return taken

    def _begin(self, engine: EngineName, number: int, again: Callable[[Section], bool] | None = None) -> Section:
        """The section that a start-up line belongs to: a new one when the last has figures, or began the same way.

        again: whether the line repeats what the last section began with; None: it never does.
        """
        current = self.sections[-1] if self.sections else None
        if current and current.engine == engine and not _ran(current) and not (again and again(current)):
            return current
        self.sections.append(Section(engine, "log", number))
        self._sglang, self._vllm = sglang_lines.DecodeLines(), vllm_lines.SpecLines()
        return self.sections[-1]


def _ran(section: Section) -> bool:
    return section.has_figures or section.plain_lines > 0


def _starts(sections: list[Section], useful: list[Section]) -> list[str]:
    """What a reader must know of several starts in one file."""
    if len(sections) == 1:
        return []
    last = useful[-1]
    notes = [
        f"{len(sections)} starts in the file; the one from line {last.line} on is explained: the last with figures"
    ]
    if sections[-1] is not last:
        notes.append(f"the start at line {sections[-1].line}, after it, printed no figures of speculation")
    return notes


def _nothing_found(file: LogFile, first: list[bytes], sections: list[Section], foreign: list[str]) -> SlipstreamError:
    """The error for a file without a figure that can be used; each of its kinds."""
    refused = [words for section in sections for words in section.refused]
    if foreign or refused:
        shown = foreign or refused
        return SlipstreamError(
            f"{file.path} prints an acceptance whose definition is not known here:\n" + _quoted(shown),
            expected=LOOKED_FOR,
            do="give a log, page or answers of one of these engines: a rate is converted by a documented formula or not"
            " at all",
            runbook=RUNBOOK,
            fault="F12",
        )
    plain = [section for section in sections if section.plain_lines]
    if plain:
        return _without_speculation(file, plain[-1])
    seen = [line.decode("utf-8", "replace")[:SHOWN_CHARS] for line in first]
    told = f" {file.torn}." if file.torn else ""
    started = " A server started in it, and printed no figure." if sections else ""
    return SlipstreamError(
        f"{file.path} holds no figures of speculation.{started}{told} Its first lines:\n" + _quoted(seen),
        expected=LOOKED_FOR,
        do="give the server's own log (SGLang prints a line every 40 decode steps, vLLM every 10 s, both only while "
        "requests run), or `curl` its /metrics into a file",
        runbook=RUNBOOK,
    )


def _without_speculation(file: LogFile, section: Section) -> SlipstreamError:
    common = most_frequent(section.plain_speeds)
    speed, use = "", "serve with a draft, and give that log"
    if common:
        running, measured = common
        speed = f" at {measured.tokens_per_second:.1f} tok/s a stream with {running} running"
        use = f"it can be the baseline of another log: --baseline-tok-s {measured.tokens_per_second:.1f}"
    algorithm = section.effective.algorithm
    return SlipstreamError(
        f"{file.path} is the log of a server without speculation: {section.plain_lines} decode lines{speed}, none with "
        f"an accept len (algorithm in force: {algorithm or 'none'})",
        expected="lines of a server that speculates",
        do=use,
        runbook=RUNBOOK,
    )


def _quoted(lines: list[str]) -> str:
    """Lines for a terminal: a file that is no text may hold what it would obey."""
    return "\n".join(f"    | {''.join(c if c.isprintable() else '.' for c in line)}" for line in lines)
