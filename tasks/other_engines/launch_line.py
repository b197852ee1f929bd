"""Reads a launch line of SGLang as its shell and its argument parser would: words, variables, flags. Starts nothing.

`--flag value` and `--flag=value`, `KEY=VALUE` and `env KEY=VALUE` before the program, backslash at a line's end,
quotes. Nothing is guessed: a word that is not understood is a problem that names it and the nearest known one.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePosixPath

from slipstream.tasks.other_engines.sglang_flags import REFUSED, by_name
from slipstream.tasks.other_engines.shell_words import ShellWord, shell_words

UNDERSTOOD = "[NAME=VALUE ...] python3 -m sglang.launch_server --FLAG VALUE ... (or `sglang serve`)"
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")  # a value, though it begins as a flag does
_OTHERS = {"vllm": "vLLM", "trtllm-serve": "TensorRT-LLM", "slipstream": "Slipstream", "llama-server": "llama.cpp"}


@dataclass(frozen=True)
class Word:
    """One flag or variable of the line. `text` is its value as it stands there; None where a flag has none. `shells`:
    why only a shell knows the value; "" where it stands there."""

    name: str
    text: str | None
    shells: str = ""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Trouble:
    """One thing that is wrong with the line: the word, what was found, what was expected."""

    word: str
    found: str
    expected: str


@dataclass(frozen=True)
class LaunchLine:
    """A line in words. Problems leave out what they are about; everything else is there."""

    words: tuple[Word, ...]
    troubles: tuple[Trouble, ...]


def read_launch_line(line: str, switches: frozenset[str]) -> LaunchLine:
    """Splits a line.

    Args:
        line: as given to a shell.
        switches: flags that take no value.
    """
    try:
        tokens = shell_words(line)
    except ValueError as error:
        return LaunchLine((), (Trouble("the line", f"{error} in the line", "quotes in pairs"),))
    words: list[Word] = []
    troubles: list[Trouble] = []
    rest = _before_program(tokens, words, troubles)
    arguments = _after_program(rest, troubles)
    if arguments is not None:
        _arguments(arguments, switches, words, troubles)
    known = []
    for word in words:
        trouble = _unknown(word)
        if trouble is None:
            known.append(word)
        else:
            troubles.append(trouble)
    troubles += _twice(known)
    return LaunchLine(tuple(known), tuple(troubles))


def _before_program(tokens: Sequence[ShellWord], words: list[Word], troubles: list[Trouble]) -> Sequence[ShellWord]:
    """Takes the variables before the program off the front. Those of a command of their own reach it by `export`."""
    exported, own = False, 0
    for number, token in enumerate(tokens):
        variable = None if token.operator else _VARIABLE.fullmatch(token.text)
        if variable:
            words.append(Word(variable[1], variable[2], token.shells))
        elif token.operator and token.text in ("\n", ";", "&&") and number:
            lost = [] if exported else words[own:]
            troubles += [Trouble(w.name, f"{w.name} is set, and not exported", f"export {w.name}=...") for w in lost]
            exported, own = False, len(words)
        elif token.text == "export" and not token.operator:
            exported = True
        elif token.operator or token.text not in ("env", "exec", "nohup"):
            return tokens[number:]
    return ()


def _after_program(words: Sequence[ShellWord], troubles: list[Trouble]) -> Sequence[ShellWord] | None:
    """The words after the program; None, with the trouble, where it is not SGLang's server."""
    tokens = [word.text for word in words]
    program = [PurePosixPath(token).name for token in tokens[:1]]
    if program == ["sglang"] and tokens[1:2] == ["serve"]:
        return words[2:]
    if program == ["sglang.launch_server"]:
        return words[1:]
    if program and _PYTHON.fullmatch(program[0]):
        for number, token in enumerate(tokens[1:], 1):
            if token == "-m" and tokens[number + 1 : number + 2] == ["sglang.launch_server"]:
                return words[number + 2 :]
            if not re.fullmatch(r"-[uPIEsOB]+", token):
                break
    text = " ".join(tokens[:3]) or "no program"
    other = next((name for key, name in _OTHERS.items() if any(key in token.lower() for token in tokens[:3])), None)
    found = f"`{text}` starts {other}, not SGLang" if other else f"`{text}` does not start SGLang's server"
    troubles.append(Trouble("the line", found, UNDERSTOOD))
    return None


def _arguments(
    tokens: Sequence[ShellWord], switches: frozenset[str], words: list[Word], troubles: list[Trouble]
) -> None:
    """Pairs flags with their values."""
    at = 0
    while at < len(tokens):
        found, at = tokens[at], at + 1
        token = found.text
        if found.operator:  # what follows belongs to the redirection or is another command
            if token == "\n":
                expected = "one line, or a backslash right before the newline, with no space after it"
                troubles.append(Trouble("the line", "a newline ends the command, and more follows it", expected))
            else:
                troubles.append(Trouble(token, f"`{token}` is the shell's", "the launch line alone"))
            return
        if not token.startswith("-") or token == "-":
            troubles.append(Trouble(token, f"`{token}` stands alone", "a flag before every value"))
            continue
        name, equals, text = token.partition("=")
        if name in switches:
            if equals:
                troubles.append(Trouble(name, f"{token}: {name} is a switch", f"{name} without a value"))
            else:
                words.append(Word(name, None))
        elif equals:
            words.append(Word(name, text, found.shells))
        elif name not in by_name() and name not in REFUSED:
            words.append(Word(name, None))  # unknown: whether the next word is its value is unknown, too
            if at < len(tokens) and _is_value(tokens[at]):
                at += 1
        elif at == len(tokens) or not _is_value(tokens[at]):
            troubles.append(Trouble(name, f"{name} has no value", f"{name} VALUE"))
        else:
            words.append(Word(name, tokens[at].text, tokens[at].shells))
            at += 1


def _is_value(word: ShellWord) -> bool:
    """Whether an argument parser takes a word as a value: one that begins as a flag does is none."""
    text = word.text
    looks_like_a_flag = text.startswith("-") and text != "-" and " " not in text and not _NEGATIVE.fullmatch(text)
    return not word.operator and not looks_like_a_flag


def _unknown(word: Word) -> Trouble | None:
    """Why a word cannot be taken; None when it can."""
    if word.name in REFUSED:
        return Trouble(word.name, f"{word.name} is refused", REFUSED[word.name])
    if word.name not in by_name():
        flag = word.name.startswith("-")
        kind = "flag" if flag else "variable"
        names = [name for name in by_name() if name.startswith("-") == flag]
        near = get_close_matches(word.name, names, 1, 0.0)[0]
        return Trouble(word.name, f"{word.name} is not a known {kind}", f"the nearest known one is {near}")
    if word.shells:
        return Trouble(word.name, f"{word.name} {word.text}: {word.shells}", "the value itself, in quotes if need be")
    return None


def _twice(words: Sequence[Word]) -> Iterator[Trouble]:
    """A key that is set twice, in whatever spelling: SGLang takes the last without a word."""
    first: dict[str, Word] = {}
    for word in words:
        key = by_name()[word.name].key
        if key in first:
            both = " and ".join(w.name if w.text is None else f"{w.name} {w.text}" for w in (first[key], word))
            yield Trouble(word.name, f"given twice: {both}", "one of them: SGLang takes the last without a word")
        first.setdefault(key, word)
