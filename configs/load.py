"""From a YAML file, the environment and `--set` to one Deployment, with the origin of every value.

By rising priority: default, file (or the launch line of another engine), environment (`SLIPSTREAM_SECTION__FIELD`),
`--set section.field=value`. An unknown key is an error in each of them, and so is a value of the wrong type: nothing is
ignored or converted.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from slipstream.configs.schema import ENV_DELIMITER, ENV_PREFIX, Deployment
from slipstream.configs.yaml_source import parse_value, read_entries
from slipstream.engine.errors import SlipstreamError

MAX_TOLD = 20  # problems of one deployment: of more, it is most likely no deployment
Kind = Literal["default", "file", "command", "environment", "--set"]


class DeploymentError(SlipstreamError):
    """A deployment that cannot be read: unknown keys, wrong types, no such file."""

    exit_code = 2


@dataclass(frozen=True)
class Origin:
    """Where a value came from. `str()` gives `default`, `FILE:LINE`, `--flag (command)`, `environment VARIABLE`
    or `--set KEY=VALUE`."""

    kind: Kind
    where: str = ""

    def __str__(self) -> str:
        if self.kind == "default":
            return "default"
        if self.kind == "command":
            return f"{self.where} (command)"
        return self.where if self.kind == "file" else f"{self.kind} {self.where}"


class Loaded(NamedTuple):
    """A deployment and, for each dotted key (`training.epochs`), where its value came from."""

    deployment: Deployment
    provenance: dict[str, Origin]


@dataclass(frozen=True)
class Problem:
    """One thing wrong with what was written: where, what was found, what was expected."""

    origin: Origin
    found: str
    expected: str


def load(path: str | Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Loaded:
    """Reads a deployment.

    Args:
        path: the YAML file.
        overrides: `section.field=value` each, as given to `--set`; a later one wins.
        environ: the environment; None is that of this process.

    Raises: DeploymentError that lists every unknown key (with the nearest known one) and every value of a wrong type
        (found, expected, where).
    """
    fields = dict(known_fields())
    problems: list[Problem] = []
    return _merge(_from_file(Path(path), fields, problems), overrides, environ, fields, problems)


def load_values(
    values: Mapping[str, tuple[Any, Origin]],
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    problems: Sequence["Problem"] = (),
) -> Loaded:
    """Reads a deployment whose values come from elsewhere than a file, as from a launch line.

    Args:
        values: dotted key -> (value, where it came from); they stand in the file's place.
        overrides, environ: as for `load`.
        problems: what was wrong where the values were read; told together with what is wrong with them.

    Raises: as `load` does.
    """
    return _merge(values, overrides, environ, dict(known_fields()), list(problems))


def _merge(
    first: "Mapping[str, tuple[Any, Origin]]",
    overrides: Sequence[str],
    environ: Mapping[str, str] | None,
    fields: Mapping[str, FieldInfo],
    problems: list[Problem],
) -> Loaded:
    """`first` below environment and `--set`, checked as a whole."""
    values: dict[str, Any] = {}
    provenance = {key: Origin("default") for key in fields}
    layers = (
        first,
        _from_environment(os.environ if environ is None else environ, fields, problems),
        _from_overrides(overrides, fields, problems),
    )
    for layer in layers:
        for key, (value, origin) in layer.items():
            values[key], provenance[key] = value, origin
            if isinstance(value, str) and "\0" in value:  # no path and no name of a program can hold it
                problems.append(Problem(origin, f"{key} = {value!r}", "a text without a NUL character"))
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, field = key.split(".")
        sections.setdefault(section, {})[field] = value
    told = {problem.origin for problem in problems}
    try:
        deployment = Deployment.model_validate(sections)
    except ValidationError as error:
        problems += [problem for problem in _type_problems(error, provenance) if problem.origin not in told]
    if problems:
        raise _error(problems)
    return Loaded(deployment, provenance)


def known_fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key of a deployment with its field, in the order of the schema."""
    for section, field in Deployment.model_fields.items():
        model = field.annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise TypeError(f"the schema's {section} is not a section")
        for name, info in model.model_fields.items():
            yield f"{section}.{name}", info


def environment_name(key: str) -> str:
    """The environment variable that sets a dotted key: training.epochs -> SLIPSTREAM_TRAINING__EPOCHS."""
    return ENV_PREFIX + key.replace(".", ENV_DELIMITER).upper()


def nearest(name: str, known: Sequence[str]) -> str:
    """The known dotted key that `name` most likely meant: the same field elsewhere, else the closest spelling."""
    field = name.rpartition(".")[2]
    same_field = [key for key in known if "." in name and key.rpartition(".")[2] == field]
    return max(same_field or known, key=lambda key: SequenceMatcher(None, name.lower(), key.lower()).ratio())


_Layer = dict[str, tuple[Any, Origin]]


def _from_file(path: Path, fields: Mapping[str, FieldInfo], problems: list[Problem]) -> _Layer:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DeploymentError(
            f"there is no deployment file {path}",
            expected="the path of a YAML file",
            do="check the path; configs/smollm2.yaml is the demo",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DeploymentError(
            f"{path} cannot be read: {error}",
            expected="a YAML file in UTF-8",
            do="name a file that you may read; in another encoding, save it as UTF-8",
        ) from None
    try:
        entries, form = read_entries(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise DeploymentError(
            f"{where}: {getattr(error, 'problem', None) or error}", expected="valid YAML", do="correct the file there"
        ) from None
    problems += [Problem(Origin("file", f"{path}:{line}"), words, "") for line, words in form]
    layer: _Layer = {}
    for keys, entry in entries.items():
        origin = Origin("file", f"{path}:{entry.line}")
        key = ".".join(keys)
        if len(keys) == 1 and keys[0] in Deployment.model_fields:
            if entry.value is not None:  # an empty section is one with nothing but defaults
                problems.append(Problem(origin, f"{key} = {entry.value!r}", f"a section: keys of {key}, one a line"))
        elif key not in fields:
            problems.append(_unknown(key, origin, list(fields)))
        else:
            layer[key] = (entry.value, origin)
    return layer


def _from_environment(environ: Mapping[str, str], fields: Mapping[str, FieldInfo], problems: list[Problem]) -> _Layer:
    names = {environment_name(key): key for key in fields}
    layer: _Layer = {}
    for name in sorted(n for n in environ if n.startswith(ENV_PREFIX)):
        origin = Origin("environment", name)
        if name in names:
            key = names[name]
            layer[key] = (_value(environ[name], fields[key], origin, problems), origin)
        else:
            guess = name.removeprefix(ENV_PREFIX).lower().replace(ENV_DELIMITER, ".")
            found = f"the environment variable {name} sets nothing that is known"
            problems.append(
                Problem(origin, found, f"the nearest known one is {environment_name(nearest(guess, list(fields)))}")
            )
    return layer


def _from_overrides(overrides: Sequence[str], fields: Mapping[str, FieldInfo], problems: list[Problem]) -> _Layer:
    layer: _Layer = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key, origin = key.strip(), Origin("--set", override)
        if not equals or not key:
            what = "value" if key else "key"
            problems.append(Problem(origin, f"--set {override} has no {what}", "--set section.field=value"))
        elif key in Deployment.model_fields:
            within = ", ".join(known.partition(".")[2] for known in fields if known.startswith(f"{key}."))
            problems.append(
                Problem(origin, f"{key} is a section, not a key", f"--set {key}.FIELD=value, FIELD one of {within}")
            )
        elif key not in fields:
            problems.append(_unknown(key, origin, list(fields)))
        else:
            layer[key] = (_value(text, fields[key], origin, problems), origin)
    return layer


def _value(text: str, field: FieldInfo, origin: Origin, problems: list[Problem]) -> Any:
    """The value of a text from the environment or the command line, read as in the file."""
    annotations = get_args(field.annotation) or (field.annotation,)
    if text not in ("null", "~") and set(annotations) <= {str, Path, type(None)}:
        return text  # a text stays a text, even where it looks like a number (a digest of digits)
    try:
        return parse_value(text)
    except yaml.YAMLError as error:
        problems.append(
            Problem(
                origin, f"{text!r} is not a YAML value: {getattr(error, 'problem', error)}", "a value as in the file"
            )
        )
        return None


def _unknown(key: str, origin: Origin, known: Sequence[str]) -> Problem:
    section, dot, _ = key.partition(".")
    sections = list(Deployment.model_fields)
    if not dot:
        # The name of a section, misspelt, or that of a key without its section.
        same = [name for name in known if name.partition(".")[2] == key]
        near = nearest(key, same or sections)
        return Problem(origin, f"{key} is not a known section", f"the nearest known one is {near}")
    near = f"the nearest known one is {nearest(key, known)}"
    if section not in sections:
        near += f", the nearest section {nearest(section, sections)}"
    return Problem(origin, f"{key} is not a known key", near)


def _type_problems(error: ValidationError, provenance: Mapping[str, Origin]) -> list[Problem]:
    """One problem for each wrong value; the branches of a union (`int | "auto"`) are joined."""
    grouped: dict[str, tuple[Any, list[str]]] = {}
    for detail in error.errors(include_url=False):
        key = ".".join(str(part) for part in detail["loc"][:2])
        words = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        if detail["type"] == "too_short":
            if detail["input"] != [] and detail["input"] != ():
                continue  # the entries that are told are all there were
            words = f"at least {detail['ctx']['min_length']} entry"
        grouped.setdefault(key, (detail["input"], []))[1].append(words)
    problems = []
    for key, (found, expected) in grouped.items():
        origin = provenance.get(key, Origin("default"))
        problems.append(Problem(origin, f"{key} = {found!r}", " or ".join(dict.fromkeys(expected))))
    return problems


def _error(problems: Sequence[Problem]) -> DeploymentError:
    do = "correct it where it stands; `slipstream schema` describes every key"
    if len(problems) == 1:
        only = problems[0]
        return DeploymentError(f"{only.origin}: {only.found}", expected=only.expected, do=do)
    lines = [f"{len(problems)} values cannot be used:"]
    for problem in problems[:MAX_TOLD]:
        lines.append(f"  {problem.origin}: {problem.found}")
        if problem.expected:
            lines.append(f"    expected: {problem.expected}")
    if len(problems) > MAX_TOLD:
        lines.append(f"  and {len(problems) - MAX_TOLD} more")
    return DeploymentError("\n".join(lines), do=do)
