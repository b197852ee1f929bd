"""From a launch line of SGLang to a deployment: typed values with their origin, and the YAML that says the same."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from slipstream.configs.load import DeploymentError, Loaded, Origin, Problem, known_fields, load_values
from slipstream.configs.yaml_source import parse_value
from slipstream.tasks.other_engines.launch_line import Trouble, Word, read_launch_line
from slipstream.tasks.other_engines.sglang_flags import REVISION, by_name, flag_of

RUNBOOK = "wrong-flags.md"
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# SGLang's words for a type -> ours. `auto` is what leaving the flag out means.
_DTYPES = {"half": "float16", "float16": "float16", "float": "float32", "float32": "float32", "bfloat16": "bfloat16"}
_YES, _NO = ("1", "true", "yes", "y"), ("0", "false", "no", "n")
Values = dict[str, tuple[Any, Origin]]


def import_line(
    line: str,
    engine_version: str | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """A launch line as a deployment.

    Args:
        line: the line, as given to a shell.
        engine_version: the release that is started with it; None where nobody knows.
        overrides, environ: as for `configs.load.load`; they count above the line.

    Raises: DeploymentError that lists every flag, variable and value that cannot be taken.
    """
    words = read_launch_line(line, _switches())
    problems = [_problem(trouble) for trouble in words.troubles]
    values: Values = {"server.engine": ("sglang", _origin("sglang.launch_server"))}
    if engine_version is not None:
        values["server.engine_version"] = (engine_version, _origin(f"--engine-version {engine_version}"))
    fields = dict(known_fields())
    for word in words.words:
        key = by_name()[word.name].key
        if key == REVISION.key:
            continue
        try:
            value = _value(word, fields[key])
        except ValueError as error:
            found = word.name if word.text is None else f"{word.name} {word.text}"
            problems.append(_problem(Trouble(word.name, f"{found}: not a value of {key}", str(error))))
        else:
            if value is not None:
                values[key] = (value, _origin(word.name))
    _source(values, next((word.text for word in words.words if word.name == REVISION.name), None), problems)
    try:
        return load_values(values, overrides, environ, problems)
    except DeploymentError as error:
        nccl = bool(problems) and all(problem.found.startswith("NCCL_") for problem in problems)
        raise DeploymentError(
            error.found,
            expected=error.expected,
            do="correct the line; `slipstream schema` describes every key that a flag may have",
            runbook=RUNBOOK,
            fault="F16" if nccl else "",
        ) from None


def _origin(name: str) -> Origin:
    return Origin("command", name)


def _problem(trouble: Trouble) -> Problem:
    return Problem(_origin(trouble.word), trouble.found, trouble.expected)


@cache
def _switches() -> frozenset[str]:
    """Flags of a yes-or-no key: they stand without a value."""
    fields = dict(known_fields())
    return frozenset(
        name
        for name, flag in by_name().items()
        if name.startswith("-") and flag.key in fields and bool in _types(fields[flag.key].annotation)
    )


def _types(annotation: Any) -> tuple[Any, ...]:
    """The types of a field, without None and what wraps them."""
    if get_origin(annotation) in (Union, UnionType):
        return tuple(inner for part in get_args(annotation) for inner in _types(part))
    if hasattr(annotation, "__metadata__"):
        return _types(annotation.__origin__)
    return () if annotation is NoneType else (annotation,)


def _value(word: Word, field: FieldInfo) -> Any:
    """The typed value of a word; None for one that means the same as leaving it out. Raises ValueError with words."""
    key, text = by_name()[word.name].key, word.text
    types = _types(field.annotation)
    if text is None:
        return True
    if key == "server.dtype":
        if text == "auto":
            return None
        if text not in _DTYPES:
            raise ValueError(f"one of auto, {', '.join(_DTYPES)}")
        return _DTYPES[text]
    if key == "target.source":
        return text
    if bool in types:
        if text.lower() in (*_YES, *_NO):
            return text.lower() in _YES
        raise ValueError("1 or 0")
    if Path in types:
        return text
    for kind, words in ((int, "a whole number"), (float, "a number")):
        if kind in types:
            try:
                return kind(text)
            except ValueError:
                if str not in types:
                    raise ValueError(words) from None
    choices = [str(choice) for kind in types if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices and text not in choices and text.upper() in choices:
        raise ValueError(f"{text.upper()}: releases before 0.5.13 take capital letters only")
    return text


def _source(values: Values, revision: str | None, problems: list[Problem]) -> None:
    """A target on a hub as hf://ORG/NAME@REVISION. A path is a path, as SGLang sees it: when it is there."""
    source, origin = values.get("target.source", ("", _origin("")))
    if revision is not None and not revision.strip():
        problems.append(_problem(Trouble(REVISION.name, f"{REVISION.name} is empty", "a revision, or no such flag")))
        return
    if source and _HUB.fullmatch(source) and not Path(source).is_dir():
        values["target.source"] = (f"hf://{source}@{revision or 'main'}", origin)
    elif revision is not None:
        expected = "a revision of ORG/NAME on a hub, or none: a directory has no revisions"
        problems.append(
            _problem(Trouble(REVISION.name, f"{REVISION.name} {revision} beside {source or 'no target'}", expected))
        )


# ---- as a file -------------------------------------------------------------------------------------------------------


def as_yaml(loaded: Loaded, line: str) -> str:
    """The deployment file that says what the line says: a comment of its meaning above every value."""
    parts = ["# What this launch line asks for, flag by flag:", "#"]
    shown = _printable(" ".join(re.split(r"[ \t\r\n]+", line.replace("\\\n", " ").strip())))
    parts += [f"#   {text}" for text in _wrap(shown, 112)]
    parts += ["#", "# `slipstream plan` shows what SGLang makes of it. A key that is not here is not on the line.", ""]
    section = ""
    for key, field in known_fields():
        if loaded.provenance[key].kind == "default":
            continue
        here, _, name = key.partition(".")
        if here != section:
            parts += [*([""] if section else []), f"{here}:"]
        section = here
        parts += [f"  # {text}" for text in _wrap(meaning(key, field), 114)]
        parts.append(f"  {name}: {_scalar(getattr(getattr(loaded.deployment, here), name))}")
    return "\n".join(parts) + "\n"


def meaning(key: str, field: FieldInfo) -> str:
    """`--flag: what it means. Under speculation: its effect.`"""
    flag, description = flag_of(key), field.description or ""
    if flag is None:
        return description
    effect = f" Under speculation: {flag.speculation}." if flag.speculation else ""
    return f"{flag.name}: {flag.meaning or description.removeprefix(f'{flag.name}: ')}{effect}"


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def _scalar(value: Any) -> str:
    """A value in YAML: plain where it reads back as itself, else in quotes."""
    if isinstance(value, bool) or not isinstance(value, str | Path):
        return str(value).lower() if isinstance(value, bool) else repr(value)
    text = str(value)
    try:
        plain = re.fullmatch(r"[\w/~.][\w/~.:@+=-]*", text) is not None and parse_value(text) == text
    except yaml.YAMLError:
        plain = False
    return text if plain else '"' + _printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _printable(text: str) -> str:
    """What a file of text cannot hold, or would fold (newlines, control characters, bytes of no encoding), escaped."""
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


def written_values(loaded: Loaded) -> Iterator[tuple[str, Any]]:
    """Every key that somebody wrote, with its value."""
    for key, origin in loaded.provenance.items():
        if origin.kind != "default":
            section, _, name = key.partition(".")
            yield key, getattr(getattr(loaded.deployment, section), name)
