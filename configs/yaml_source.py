"""Reads YAML by the 1.2 core rules and remembers on which line every key stands.

PyYAML's own rules are those of YAML 1.1, in which `1e-4` is a text, `010` is eight, `no` is false and a key given twice
silently counts once. None of these is what the writer of a deployment meant.
"""

import re
from typing import Any

import yaml

_TOO_DEEP = "lists or mappings within each other, too deep to read"


class CoreLoader(yaml.SafeLoader):
    """SafeLoader with the scalars of the YAML 1.2 core schema."""


# The class attribute is shared with SafeLoader: give this loader its own, with the core rules only.
CoreLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    CoreLoader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


def _whole_number(loader: CoreLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    for prefix, base in (("0o", 8), ("0x", 16)):
        if text.startswith(prefix):
            return int(text[2:], base)
    try:
        return int(text, 10)
    except ValueError:  # Python reads no more than 4,300 digits
        words = f"a whole number of {len(text):,} digits"
        raise yaml.constructor.ConstructorError(None, None, words, node.start_mark) from None


CoreLoader.add_constructor("tag:yaml.org,2002:int", _whole_number)


class Entry:
    """A value of the file and the line (1-based) of its key."""

    def __init__(self, value: Any, line: int) -> None:
        self.value, self.line = value, line


def parse_value(text: str) -> Any:
    """The value that `text` would have in a deployment file. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, Loader=CoreLoader)  # a subclass of SafeLoader
    except RecursionError:
        raise yaml.YAMLError(_TOO_DEEP) from None


def read_entries(text: str) -> tuple[dict[tuple[str, ...], Entry], list[tuple[int, str]]]:
    """Every `section: key: value` of a deployment file.

    Args: text: content of the file.
    Returns: path of keys -> entry (one key where a section is not a mapping, else two), and the problems that only the
        file's form shows, as (line, words).
    Raises: yaml.YAMLError where the text is not YAML.
    """
    loader = CoreLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return {}, []
        if not isinstance(root, yaml.MappingNode):
            return {}, [(1, "a deployment is a mapping of sections, such as `target:` and `training:`")]
        entries: dict[tuple[str, ...], Entry] = {}
        problems: list[tuple[int, str]] = []
        for key, value in _pairs(root, (), problems):
            if not isinstance(value, yaml.MappingNode):
                entries[(key.value,)] = Entry(loader.construct_object(value, deep=True), key.start_mark.line + 1)
                continue
            for field, scalar in _pairs(value, (key.value,), problems):
                built = loader.construct_object(scalar, deep=True)
                entries[(key.value, field.value)] = Entry(built, field.start_mark.line + 1)
        return entries, problems
    except RecursionError:
        raise yaml.YAMLError(_TOO_DEEP) from None
    finally:
        loader.dispose()


def _pairs(
    node: yaml.MappingNode, above: tuple[str, ...], problems: list[tuple[int, str]]
) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """The (key, value) nodes of a mapping; a key that is no text or stands twice becomes a problem."""
    seen: dict[str, int] = {}
    pairs = []
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            problems.append((line, "a key must be a word"))
            continue
        name = ".".join((*above, key.value))
        if key.value in seen:
            problems.append((line, f"{name} stands twice (first on line {seen[key.value]}); keep one"))
            continue
        seen[key.value] = line
        pairs.append((key, value))
    return pairs
