"""JSON of a server: answers with `meta_info`, SGLang's /server_info, our own /slipstream/settings; one or many."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.engine.acceptance import AcceptanceCounts
from slipstream.tasks.explain_log.observed import Positions, RateFit, Section, Settings
from slipstream.tasks.explain_log.sglang_lines import asked
from slipstream.tasks.other_engines.metric_definitions import REQUEST_KEYS, RequestKeys

LARGEST = 64 << 20  # bytes of a single JSON text; JSON lines have no limit
FIRST_TOKEN = (
    "spec_accept_length of meta_info is completion_tokens / spec_verify_ct: it counts the first token, which prefill "
    "makes, so it is not used; accepted drafts / verifies is"
)


def sections(texts: Iterator[bytes]) -> list[Section]:
    """Sections of a file of JSON, or of JSON lines. [] when nothing in it is known."""
    requests = Section("sglang", "meta_info")
    found: list[Section] = []
    damaged: list[Mapping[str, Any]] = []
    for value in _values(texts):
        for item in _dicts(value):
            try:
                if "spec_verify_ct" in item:
                    _add_request(item, requests)
                elif "internal_states" in item:
                    found.append(_server_info(item))
                else:
                    found += _own(item)
            except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
                damaged.append(item)
    for section in (*found, requests) if damaged else ():
        section.note(f"{len(damaged)} entries whose values are of another kind are left out")
    return [*found, requests] if requests.has_figures or requests.refused else found


def _values(texts: Iterator[bytes]) -> Iterator[Any]:
    """Every JSON value: the whole text, or else each line that is one."""
    lines, size = [], 0
    for line in texts:
        lines.append(line)
        size += len(line)
        if size > LARGEST:
            break
    else:
        try:
            yield json.loads(b"\n".join(lines).decode("utf-8", "replace"))
            return
        except (ValueError, RecursionError):
            pass
    for line in (*lines, *texts):
        try:
            yield json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):  # a torn line
            continue


def _dicts(value: Any, depth: int = 6) -> Iterator[Mapping[str, Any]]:
    """The outermost dicts that hold figures, found to some depth."""
    if isinstance(value, dict):
        stats = value.get("stats")
        own = isinstance(stats, dict) and "acceptance" in stats
        if own or value.keys() & {"spec_verify_ct", "internal_states"}:
            yield value
        elif depth:
            for inner in value.values():
                yield from _dicts(inner, depth - 1)
    elif isinstance(value, list) and depth:
        for inner in value:
            yield from _dicts(inner, depth - 1)


def _add_request(info: Mapping[str, Any], section: Section) -> None:
    """One request's figures. Requests add up: all are counts."""
    verifies = _count(info["spec_verify_ct"])
    keys = next((keys for keys in REQUEST_KEYS if keys.accepted in info), None)
    keys = keys or next((keys for keys in REQUEST_KEYS if keys.histogram in info), None)
    if not verifies:
        return
    if keys is None:
        section.refuse(
            f"a request with the keys {', '.join(sorted(k for k in info if k.startswith('spec_')))}: none of them "
            "counts accepted drafts under a name that is known, so it is left out"
        )
        return
    if "spec_accept_length" in info:
        section.refuse(FIRST_TOKEN)
    histogram = [_count(n) for n in info.get(keys.histogram) or ()]
    accepted = None if info.get(keys.accepted) is None else _count(info[keys.accepted])
    proposed = _count(info.get(keys.proposed) or 0)
    _set_version(section, keys)
    counted = Positions.of_histogram(histogram)
    if histogram and sum(histogram) == verifies and accepted in (None, int(counted.accepted)):
        section.positions = section.positions or Positions()
        section.positions.add(counted.rounds, counted.hits)
        accepted = int(counted.accepted) if accepted is None else accepted
    elif histogram and sum(histogram) != verifies:
        section.refuse("a histogram whose sum is not spec_verify_ct: no A_k from it")
    elif histogram:
        section.refuse(f"a histogram that counts other accepted drafts than {keys.accepted}: no A_k from it")
    if accepted is None:
        return
    section.rounds = (section.rounds or 0.0) + verifies
    section.accepted = (section.accepted or 0.0) + float(accepted)
    _set_width(section, proposed, verifies)


def _set_version(section: Section, keys: RequestKeys) -> None:
    section.version_from = section.version_from or f"the names of its keys are those of {keys.releases}"
    section.note("the round that ends a request is counted; tokens after its end are not")


def _count(value: Any) -> int:
    """A count. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _optional_count(value: Any) -> int | None:
    return None if value is None else _count(value)


def _set_width(section: Section, proposed: int, verifies: int) -> None:
    if not proposed:
        return
    k = proposed / verifies
    if not k.is_integer() or (section.effective.known and section.effective.num_steps != int(k)):
        section.adaptive_changes += 1
    section.effective = Settings(int(k), int(k) + 1, where="proposed drafts / verifies of the requests")


def _server_info(info: Mapping[str, Any]) -> Section:
    section = Section("sglang", "/server_info")
    section.fit = RateFit()
    version = info.get("version")
    section.version, section.version_from = (str(version), "/server_info") if version else (None, "")
    section.effective = Settings(
        num_steps=_optional_count(info.get("speculative_num_steps")),
        verify_width=_optional_count(info.get("speculative_num_draft_tokens")),
        topk=_optional_count(info.get("speculative_eagle_topk")),
        algorithm=info.get("speculative_algorithm"),
        adaptive=bool(info.get("speculative_adaptive")),
        where="/server_info",
    )
    command = info.get("launch_command")
    section.asked = (asked(f"sglang {command}", "launch_command of /server_info") if command else None) or Settings()
    for state in info.get("internal_states") or ():
        length = float(state.get("avg_spec_accept_length") or 0.0)
        if 0 < length < math.inf:
            section.lengths.add(length)
            section.note("avg_spec_accept_length is the mean since the server started: warm-up and all traffic in one")
    return section


def _own(settings: Mapping[str, Any]) -> list[Section]:
    """Our own server's settings with its counters: one section for each K in force that counted rounds."""
    made = []
    for entry in settings["stats"]["acceptance"]:
        counts = AcceptanceCounts.from_dict(entry)
        if not counts.num_steps or not counts.rounds:
            continue
        k = counts.num_steps
        section = Section("slipstream", "/slipstream/settings", version_from="its own names")
        section.effective = Settings(k, k + 1, 1, where="the counters of this K")
        section.positions = Positions.of_histogram(counts.histogram)
        section.rounds, section.accepted = float(counts.rounds), float(counts.accepted)
        section.note(f"{counts.left_out} rounds that end a request or propose fewer than K are left out")
        made.append(section)
    return sorted(made, key=lambda s: s.rounds or 0.0)
