"""What the lines of an SGLang server say. Formats as printed by the releases 0.4.6 to 0.5.23.

    [2026-02-03 10:27:57 TP0] Decode batch, #running-req: 1, #token: 108, token usage: 0.00, accept len: 2.17,
        accept rate: 0.54, cuda graph: True, gen throughput (token/s): 178.86, #queue-req: 0

Up to 0.5.3 it is `Decode batch. `; releases print more or less between. The first line after a prefill is timed from
the last decode line on, idle time and prefill included: its speed is no decode speed.
"""

import re

from slipstream.tasks.explain_log.observed import LARGEST_WIDTH, Section, Settings, Speed

_NUMBER = r"(\d+(?:\.\d+)?)(?![\d.eE]|,\d)"  # the whole of it, or none: 1e5 and 1,60 are not 1
_DECODE = re.compile(r"Decode batch\b(?: \[\d+\])?")
_RUNNING = re.compile(r"#running-req: (\d+)(?![\d.eE]|,\d)")
_LENGTH = re.compile(rf"accept len: {_NUMBER}")
_RATE = re.compile(rf"accept rate: {_NUMBER}")
_SPEED = re.compile(rf"gen throughput \(token/s\): {_NUMBER}")
_RANK = re.compile(r"\b(DP\d+)\b")
_ARGUMENT = r"['\"]?\bspeculative_{}['\"]?\s*[=:]\s*['\"]?([\w.-]+)"
_FLAG = r"--speculative-{}[= ]\s*['\"]?([\w.-]+)"
_ADAPTED = re.compile(r"Adaptive spec params updated: steps (\d+) -> (\d+)")
ADJUSTED = "speculative_num_draft_tokens is adjusted to speculative_num_steps + 1"

_FIELDS = {"num_steps": "num_steps", "verify_width": "num_draft_tokens", "topk": "eagle_topk", "algorithm": "algorithm"}


def start_up(line: str) -> tuple[Settings, int | None, str | None]:
    """Settings in force from a `server_args=...` line, its log interval, and its version where one stands there."""
    found = settings_of(line, _ARGUMENT, "the start-up log (server_args)")
    found.adaptive = re.search(r"speculative_adaptive['\"]?\s*[=:]\s*True", line) is not None
    interval = re.search(r"decode_log_interval['\"]?\s*[=:]\s*(\d+)", line)
    version = re.search(r"['\"]?\b(?:sglang_)?version['\"]?\s*[=:]\s*['\"](\d[\w.+-]*)", line)
    return found, int(interval.group(1)) if interval else None, version.group(1) if version else None


def asked(line: str, where: str = "the launch command in the log") -> Settings | None:
    """Settings asked for on a command line; None when the line is no such command."""
    if "--speculative-" not in line or not re.search(r"sglang|launch_server", line):
        return None
    found = settings_of(line, _FLAG, where)
    return found if found.known or found.algorithm else None


def settings_of(text: str, form: str, where: str) -> Settings:
    """The speculative fields in a text. form: a pattern with {} for the field's name."""
    values: dict[str, str | None] = {}
    for name, theirs in _FIELDS.items():
        flag = theirs.replace("_", "-") if form is _FLAG else theirs
        match = re.search(form.format(flag), text)
        values[name] = match.group(1) if match and match.group(1) not in ("None", "null") else None
    return Settings(
        num_steps=_integer(values["num_steps"]),
        verify_width=_integer(values["verify_width"]),
        topk=_integer(values["topk"]),
        algorithm=values["algorithm"],
        where=where,
    )


class DecodeLines:
    """Reads the decode and prefill lines of one server, of one or more data-parallel ranks."""

    def __init__(self) -> None:
        self._prefilled: set[str] = {""}

    def read(self, line: str, section: Section) -> bool:
        """Adds one line to the section; whether it was a whole decode or prefill line."""
        rank = _rank(line)
        if "Prefill batch" in line:
            self._prefilled.add(rank)
            return True
        adapted = _ADAPTED.search(line)
        if adapted:
            section.adaptive_changes += 1
            return True
        if not _DECODE.search(line):
            return False
        running, speed = _RUNNING.search(line), _SPEED.search(line)
        if not running or not speed:
            return False  # torn
        # A server that decodes only gets its prefills from another one, and prints none.
        first = bool(self._prefilled & {rank, ""}) or "pre-allocated usage" in line
        self._prefilled -= {rank, ""}
        length = _LENGTH.search(line)
        if length is None and "accept len" in line:
            return False  # not a number
        requests, tokens = int(running.group(1)), float(speed.group(1))
        if length is None:
            section.plain_lines += 1
            if not first and requests and tokens > 0:
                section.plain_speeds.setdefault(requests, Speed()).add(1.0, requests, tokens)
            return True
        value = float(length.group(1))
        if value > LARGEST_WIDTH:
            raise ValueError(f"an accept length of {value}: the line is damaged")
        section.lengths.add(value, max(requests, 1))
        rate = _RATE.search(line)
        if rate:
            section.fit.add(value, float(rate.group(1)))
        if requests and tokens > 0:
            speeds = section.speeds_with_prefill if first else section.speeds
            speeds.setdefault(requests, Speed()).add(value, requests, tokens)
        return True


def _rank(line: str) -> str:
    found = _RANK.search(line[:120])
    return found.group(1) if found else "0"


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
