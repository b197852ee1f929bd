"""Splits a line into words as a POSIX shell does. What only a shell could put in is named, never taken as it stands.

A line that is read more kindly than a shell reads it would be another launch than the one that runs: a newline without
its backslash ends the command, and `x;` is not a name.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

_EXPANDED = r"\$\([^)]*\)?|`[^`]*`?|\$(?=['\"])|\$[A-Za-z0-9_{@*?!$-]"
_PIECE = re.compile(
    r"(?P<blank>[ \t]+)"
    r"|(?P<joined>\\\n)"
    r"|'(?P<single>[^']*)'"
    r'|"(?P<double>(?:\\.|[^"\\])*)"'
    r"|\\(?P<escaped>.)"
    r"|(?P<operator>\n|(?:(?<!\S)[0-9]+)?(?:>>?|<)(?:&[0-9]*)?|&>|&&?|\|\|?|[;()]|(?<!\S)\#)"
    rf"|(?P<expanded>{_EXPANDED})"
    r"|(?P<home>(?<!\S)~)"
    r"|(?P<pattern>[*?])"
    r"|(?P<braces>\{(?=[^}\n]*(?:,|\.\.)))"
    r"|(?P<plain>.)",
    re.DOTALL,
)
_NOT_AS_IT_STANDS = {
    "expanded": "a variable of the shell, or a command's output",
    "home": "~ is the shell's word for a home directory",
    "pattern": "a pattern, which the shell replaces by names of files",
    "braces": "braces, which the shell takes apart",
}


@dataclass(frozen=True)
class ShellWord:
    """One word. shells: why only a shell knows what it is; "" for one that is what it says. operator: `;`, `>` and the
    like, a newline, `#`."""

    text: str
    shells: str = ""
    operator: bool = False


def shell_words(line: str) -> list[ShellWord]:
    """The words of a line. Raises ValueError, with words, for a quote that does not end."""
    return list(_words(line.replace("\r\n", "\n").strip(" \t\n")))


def _words(line: str) -> Iterator[ShellWord]:
    text: str | None = None  # of the word that has begun
    shells = ""
    for piece in _PIECE.finditer(line):
        kind = str(piece.lastgroup)
        if kind in ("blank", "operator"):
            if text is not None:
                yield ShellWord(text, shells)
            text, shells = None, ""
            if kind == "operator":
                yield ShellWord(piece[0], operator=True)
        elif kind != "joined":
            added, why = _meaning(kind, piece[kind])
            text, shells = (text or "") + added, shells or why
    if text is not None:
        yield ShellWord(text, shells)


def _meaning(kind: str, value: str) -> tuple[str, str]:
    """(what a piece adds to its word, why only a shell knows it)."""
    if kind == "double":
        bare = re.sub(r"\\.", "", value, flags=re.DOTALL)
        why = _NOT_AS_IT_STANDS["expanded"] if re.search(_EXPANDED, bare) else ""
        return re.sub(r'\\(?:\n|(["\\$`]))', lambda found: found[1] or "", value), why
    if kind != "plain":
        return value, _NOT_AS_IT_STANDS.get(kind, "")
    if value in "'\"":
        raise ValueError("no closing quotation")
    if value == "\\":
        raise ValueError("no escaped character")
    if value.isspace() or unicodedata.category(value) in ("Cc", "Cf", "Cs"):
        return value, f"it holds U+{ord(value):04X}, which is no space to a shell and cannot be seen"
    return value, ""
