"""The tokenizer and chat template that a GGUF file carries, as tokenizer.json and its companions."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.manifest import write_atomic, write_json

# Kinds of tokens in `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED = 3, 4


def _byte_level(*first: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([*first, rest]) if first else rest


# How text is cut before merging, by `tokenizer.ggml.pre`. An unknown name is refused: a wrong cut still round-trips,
# it only gives other ids than the model was trained on.
_PRE_TOKENIZERS = {
    "gpt-2": lambda: _byte_level(),
    "smollm": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True)),
}


def build_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """The tokenizer of GGUF metadata. Raises SlipstreamError for a kind that is not byte-level BPE as known here."""
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise SlipstreamError(
            f"the GGUF file has a tokenizer of the kind {kind!r}, pre-tokenizer {pre!r}",
            expected=f"'gpt2' (byte-level BPE) with one of {sorted(_PRE_TOKENIZERS)}",
            do="give target.source a Hugging Face directory of this model",
        )
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))  # type: ignore[arg-type]
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    types = meta.get("tokenizer.ggml.token_type", [])
    for token, kind_of in zip(tokens, types, strict=False):
        if kind_of in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, special=kind_of == _CONTROL, normalized=False)
            (tokenizer.add_special_tokens if kind_of == _CONTROL else tokenizer.add_tokens)([added])
    return tokenizer


def write_tokenizer(meta: dict[str, Any], out: Path, *, max_tokens: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, where the file has one, chat_template.jinja.

    Args:
        meta: GGUF metadata by key.
        out: an existing directory.
        max_tokens: the model's context, in tokens.
    """
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {short: meta.get(f"tokenizer.ggml.{key}_token_id") for short, key in names.items()}
    if meta.get("tokenizer.ggml.add_bos_token", False):
        raise SlipstreamError(
            "the GGUF file asks for a token before every text (tokenizer.ggml.add_bos_token)",
            expected="a tokenizer that adds nothing; the chat template writes all marks",
            do="give target.source a Hugging Face directory of this model",
        )
    write_atomic(out / "tokenizer.json", build_tokenizer(meta).to_str(pretty=False).encode())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        **{f"{short}_token": tokens[i] for short, i in ids.items() if i is not None},
    }
    write_json(out / "tokenizer_config.json", config)
    template = meta.get("tokenizer.chat_template")
    if template is not None:
        write_atomic(out / "chat_template.jinja", template.encode())
