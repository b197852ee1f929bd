"""A small tokenizer in exactly the files of Kimi-K2.5: ranks, marks, template, and the class that nobody must run."""

import base64
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

SPECIAL_TOKENS = 256
TEXT = (
    "The quick brown fox isn't here; it's they'll WE'RE running the runner's runs in 2024 and 12345678 times. "
    "def add(a, b):\n    return a + b\n\n\n  # comment\r\n中文English混合 你好世界 日本語のテキスト 한국어 "
    "Straße ÇA élan naïve "
    '<think>I think so</think> {"city": "Paris"} 北京市 Pascal e\u0301te\u0301 \u00a0\u3000x\t\ttabs ١٢٣٤ 🙂🙃👩‍👩‍👧'
)
# Ids behind the ranks, by their distance from the first, as in Kimi-K2.5; (name, special).
MARKS = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True),
    6: ("<|start_header_id|>", True),
    7: ("<|end_header_id|>", True),
    9: ("[EOT]", True),
    10: ("<|im_system|>", True),
    11: ("<|tool_calls_section_begin|>", False),
    12: ("<|tool_calls_section_end|>", False),
    13: ("<|tool_call_begin|>", False),
    14: ("<|tool_call_argument_begin|>", False),
    15: ("<|tool_call_end|>", False),
    17: ("<|im_middle|>", True),
    18: ("<|media_begin|>", False),
    19: ("<|media_content|>", False),
    20: ("<|media_end|>", False),
    21: ("<|media_pad|>", False),
    22: ("<think>", False),
    23: ("</think>", False),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}
TEMPLATE = (
    "{%- for m in messages -%}"
    "{%- if m['role'] == 'user' -%}<|im_user|>user<|im_middle|>"
    "{%- elif m['role'] == 'assistant' -%}<|im_assistant|>assistant<|im_middle|><think></think>"
    "{%- else -%}<|im_system|>{{ m['role'] }}<|im_middle|>{%- endif -%}"
    "{{ m['content'] }}<|im_end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|><think>{%- endif -%}"
)


def train_ranks(size: int, text: str = TEXT) -> list[bytes]:
    """Tokens by rank: the bytes, then the most frequent pair of the text, again and again, words kept apart."""
    tokens = [bytes([b]) for b in range(255, -1, -1)]  # not in the order of the bytes
    words = [[bytes([b]) for b in word.encode()] for word in text.replace(" ", "\0 ").split("\0")]
    while len(tokens) < size:
        counts: dict[bytes, int] = {}
        for word in words:
            for left, right in itertools.pairwise(word):
                counts[left + right] = counts.get(left + right, 0) + 1
        best = max(sorted(counts), key=lambda token: counts[token], default=None)
        if best is None or best in tokens:
            break
        tokens.append(best)
        words = [_join(word, best) for word in words]
    return tokens


def _join(word: Sequence[bytes], token: bytes) -> list[bytes]:
    out: list[bytes] = []
    for part in word:
        if out and out[-1] + part == token:
            out[-1] = token
        else:
            out.append(part)
    return out


def save_kimi_tokenizer(directory: Path, size: int = 600, code: str | None = None) -> list[bytes]:
    """Writes the tokenizer's files, and `code` as the checkpoint's class. Returns the tokens of the ranks.

    There are len(tokens) + 256 ids; the end of an answer (`<|im_end|>`) is the third behind the ranks.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokens = train_ranks(size)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (directory / "tiktoken.model").write_text("".join(lines))
    first = len(tokens)
    added = {
        str(first + at): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": special,
        }
        for at, (name, special) in MARKS.items()
    }
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": [
            "<|im_end|>",
            "<|im_user|>",
            "<|im_assistant|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "[EOT]",
            "<|im_system|>",
            "<|im_middle|>",
        ],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": first + 2, "max_length": 262144}))
    if code is not None:
        (directory / "tokenization_kimi.py").write_text(code)
    return tokens
