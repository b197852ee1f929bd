"""Words of a line, held against those that a shell itself makes of it."""

import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.tasks.other_engines.shell_words import shell_words

LINES = [
    "a b  c\td",
    "a='b c' \"d e\" f\\ g",
    "a''b \"\" '' \"'\" '\"'",
    'x "a\\"b\\\\c\\d" y',
    "x '$HOME' \"\\$HOME\" \\$HOME $ a$",
    "a\\\nb",
    "a \\\n  --b c",
    '"a\nb" c',
    '\'{"a": 1, "b": [2]}\' {a} a~b a=~',
    "a#b '#c' \\# é\u00e9 😀 '\u00a0'",
    "'*' '?' \\* '`' \\`",
]


@pytest.mark.parametrize("line", LINES)
def test_as_a_shell_splits(line: str) -> None:
    done = subprocess.run(["sh", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    words = shell_words(line)
    assert [word.text for word in words] == done.stdout.decode().split("\0")[:-1]
    assert not any(word.shells or word.operator for word in words)


@given(st.lists(st.text(st.characters(exclude_characters="\r\0", exclude_categories=["Cs"]), max_size=8), max_size=5))
def test_what_is_quoted_comes_back(texts: list[str]) -> None:
    words = shell_words(shlex.join(texts))
    assert [word.text for word in words] == texts
    assert not any(word.shells or word.operator for word in words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a; b", ["a", ";", "b"]),
        ("a;b&&c||d|e&", ["a", ";", "b", "&&", "c", "||", "d", "|", "e", "&"]),
        ("a >x 2>&1 b>c 3<d", ["a", ">", "x", "2>&1", "b", ">", "c", "3<", "d"]),
        ("a\nb", ["a", "\n", "b"]),
        ("a \\ \n b", ["a", " ", "\n", "b"]),  # a space after the backslash: the command ends
        ("a # b", ["a", "#", "b"]),
        ("\n a\r\n", ["a"]),
    ],
)
def test_what_joins_and_ends_commands(line: str, words: list[str]) -> None:
    found = shell_words(line)
    assert [word.text for word in found] == words
    operators = [word for word in words if not word.isalpha() and word != " "]
    assert [word.text for word in found if word.operator] == operators


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("$HOME/x", "a variable"),
        ('"$HOME/x"', "a variable"),
        ("${X}", "a variable"),
        ("$(pwd)", "a command's output"),
        ("`pwd`", "a command's output"),
        ('"`pwd`"', "a command's output"),
        ("$'a'", "a variable of the shell"),
        ("~/x", "home directory"),
        ("/m/*", "names of files"),
        ('{"a":1,"b":2}', "braces"),
        ("a\u00a0b", "U+00A0"),
        ("\ufeffa", "U+FEFF"),
        ("a\rb", "U+000D"),
        ("a\x1bb", "U+001B"),
    ],
)
def test_what_only_a_shell_knows_is_named(word: str, why: str) -> None:
    (found,) = shell_words(word)
    assert why in found.shells


@pytest.mark.parametrize("line", ["'a", 'a "b', "a\\", "'", '"\\"'])
def test_quotes_that_do_not_end(line: str) -> None:
    with pytest.raises(ValueError, match=r"no (closing quotation|escaped character)"):
        shell_words(line)
