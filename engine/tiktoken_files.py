"""Kimi's tokenizer from its files: `tiktoken.model` with the ranks, `tokenizer_config.json` with the marks.

These checkpoints come with a Python class of their own that reads the two files, and `transformers` would run it. Here
they are read as data, and no code of a checkpoint is run: the class is only looked at, to find that it cuts text the
way that is built in.
"""

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.model_config import read_model_json
from slipstream.engine.tiktoken_ranks import RANKS, pairs, read_ranks

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
CLASS = "TikTokenTokenizer"
CODE = "tokenization_kimi.py"

# How Kimi cuts text before it joins bytes: each match of one of these is joined by itself.
PATTERN = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
SPECIAL_TOKENS = 256  # ids behind the ranks; those without a name of their own are <|reserved_token_ID|>
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def is_kimi_form(directory: Path) -> bool:
    """Whether the directory's tokenizer is of this kind, by its files and the class that it names."""
    if not (directory / RANKS).is_file():
        return False
    return bool(read_model_json(directory / CONFIG).get("tokenizer_class") == CLASS)


def read_kimi_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """The tokenizer and its chat template.

    Marks that the files call special (`<|im_end|>`, say) are left out of decoded text where that is asked for; the
    others (those of tool calls and of thinking) never are. All of them are found in text that is encoded.

    Raises SlipstreamError for files that are damaged, that contradict each other, or whose class cuts text otherwise.
    """
    ranks = read_ranks(directory / RANKS)
    config = read_model_json(directory / CONFIG)
    _check_class(directory / CODE)
    letters = _letters()
    vocab = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = [("".join(letters[b] for b in left), "".join(letters[b] for b in right)) for left, right in pairs(ranks)]
    # A piece that is a token already stays one, whatever joining its bytes would give.
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=True))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(PATTERN)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    marks = _marks(directory / CONFIG, config, len(ranks))
    raw.add_tokens(marks)
    for number, mark in enumerate(marks):
        if raw.token_to_id(mark.content) != len(ranks) + number:
            raise _wrong(directory / CONFIG, f"{mark.content!r} is named twice", "a name of its own for every id")
    named = {name: _content(config[name]) for name in _NAMED if config.get(name) is not None}
    unknown = {name: value for name, value in named.items() if value not in {mark.content for mark in marks}}
    if unknown:
        raise _wrong(directory / CONFIG, f"{unknown} is no token", "names that added_tokens_decoder gives to ids")
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        additional_special_tokens=[mark.content for mark in marks if mark.special],
        chat_template=_template(directory, config),
        clean_up_tokenization_spaces=False,
        **named,
    )


def _marks(path: Path, config: Mapping[str, Any], first: int) -> list[AddedToken]:
    """The tokens behind the ranks, in the order of their ids; `first` is that of the first one."""
    given = config.get("added_tokens_decoder")
    if not isinstance(given, dict) or not all(isinstance(v, dict) and "content" in v for v in given.values()):
        raise _wrong(path, f"added_tokens_decoder is {str(given)[:60]}", "an object: id -> content, special, ...")
    ids = {int(key): value for key, value in given.items() if key.isdecimal()}
    outside = [key for key in given if not key.isdecimal() or not first <= int(key) < first + SPECIAL_TOKENS]
    if outside:
        raise _wrong(
            path,
            f"added_tokens_decoder names the id {outside[0]}",
            f"ids behind the {first} ranks, {first} to {first + SPECIAL_TOKENS - 1}",
        )
    special = {_content(config[name]) for name in _NAMED if config.get(name) is not None}
    special |= {_content(token) for token in config.get("additional_special_tokens") or ()}
    marks = []
    for token_id in range(first, first + SPECIAL_TOKENS):
        value = ids.get(token_id, {})
        content = value.get("content", f"<|reserved_token_{token_id}|>")
        is_special = bool(value.get("special", False)) or content in special
        marks.append(AddedToken(content, special=is_special, normalized=False))
    return marks


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template's text. It is rendered in the sandbox in which `transformers` renders every template."""
    if (directory / TEMPLATE).is_file():
        return (directory / TEMPLATE).read_text(encoding="utf-8")
    template = config.get("chat_template")
    return template if isinstance(template, str) else None


def _check_class(path: Path) -> None:
    """Looks at the checkpoint's own class, where there is one: another pattern would make other ids of a text."""
    if not path.is_file():
        return
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise _wrong(path, f"it cannot be read: {error}", "the Python file that came with the checkpoint") from None
    found = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in ("pat_str", "num_reserved_special_tokens")
    }
    pattern = _strings(found.get("pat_str"))
    if pattern[:1] == ["|"]:
        pattern = pattern[1:]  # the separator of "|".join([...])
    number = found.get("num_reserved_special_tokens")
    tokens = number.value if isinstance(number, ast.Constant) else None
    if "|".join(pattern) != "|".join(PATTERN) or tokens != SPECIAL_TOKENS:
        raise SlipstreamError(
            f"{path} cuts text by {'|'.join(pattern) or 'a pattern that does not stand in it'}, and keeps {tokens!r} "
            "special tokens",
            expected=f"{'|'.join(PATTERN)}, and {SPECIAL_TOKENS}, as Kimi-K2 and Kimi-K2.5: this is built in, and the "
            "file itself is never run",
            do="use the tokenizer files of a published Kimi-K2 or Kimi-K2.5; or convert this one to tokenizer.json "
            "where you trust its code, and put that in a directory without tiktoken.model",
            runbook="tokenizer-code.md",
        )


def _strings(node: ast.AST | None) -> list[str]:
    """The string constants of an expression, outer ones first."""
    found = [] if node is None else list(ast.walk(node))
    return [part.value for part in found if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def _letters() -> Sequence[str]:
    """Byte -> its letter in a byte-level vocabulary: itself where it prints, else one from U+0100."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in prints else chr(next(others)) for byte in range(256)]


def _content(token: Any) -> str:
    """The text of a token that is given alone or as an object."""
    return str(token["content"] if isinstance(token, Mapping) else token)


def _wrong(path: Path, found: str, expected: str) -> SlipstreamError:
    return SlipstreamError(
        f"{path}: {found}", expected=expected, do="copy the tokenizer's files of the checkpoint again"
    )
