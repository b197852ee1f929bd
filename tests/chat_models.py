"""Small tokenizers with chat templates of several families, and tiny GGUF files and wheels made from known weights."""

import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MARKS = ("<end>", "<|im_start|>", "<|im_end|>", "<start>", "<stop>", "[Q]", "[/Q]", "</s>")
EOS = ("<|im_end|>", "<stop>", "</s>")
MERGES = (("a", "n"), ("an", "d"), ("Ġ", "t"), ("e", "r"), ("h", "e"), ("Ġt", "he"), ("Ġ", "Ġ"))

# Ways to frame an answer: a mark and a role; marks around the role; the question closed and the answer ended.
TEMPLATES = {
    "roles": "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe kind<|im_end|>"
    "\n{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "headers": "{% for m in messages %}<start>{{ m['role'] }}<end>\n\n{{ m['content'] }}<stop>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant<end>\n\n{% endif %}",
    "questions": "{% for m in messages %}{% if m['role'] == 'user' %}[Q] {{ m['content'] }} [/Q]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}",
    # The prompt for an answer opens a thought; history holds the answers without their thoughts.
    "thoughts": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'].split('THINK')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nTHINK{% endif %}",
}
# Marks that this tokenizer does not know: they come out as ordinary text, and no answer is framed.
FOREIGN_TEMPLATE = (
    "{% for m in messages %}<|head|>{{ m['role'] }}<|eoh|>{{ m['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|eoh|>{% endif %}"
)


def vocabulary() -> list[str]:
    """Marks, single bytes, and the merges: in all fewer than 300 ids."""
    return [*MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(m) for m in MERGES)]


def save_tokenizer(directory: Path, template: str | None = TEMPLATES["roles"], eos: str = "<|im_end|>") -> int:
    """Writes a byte-level BPE tokenizer, and the chat template when there is one. Returns the number of ids."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = {token: i for i, token in enumerate(vocabulary())}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=eos, additional_special_tokens=list(MARKS))
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return len(vocab)


def save_chat_target(directory: Path, tiny: ModuleType, seed: int = 0, template: str = TEMPLATES["roles"]) -> Path:
    """A tiny random target that can chat (tests/engine/tiny.py makes its weights)."""
    size = save_tokenizer(directory, template)
    return tiny.save_tiny(directory, seed, vocab_size=size, eos_token_id=MARKS.index("<|im_end|>"), bos_token_id=None)


# ---- GGUF

SIZES = {"hidden": 64, "ffn": 96, "layers": 2, "heads": 4, "kv_heads": 2}
_QUANTISED = {
    "attn_q": gguf.GGMLQuantizationType.Q4_1,
    "attn_k": gguf.GGMLQuantizationType.Q8_0,
    "attn_v": gguf.GGMLQuantizationType.Q5_1,
    "attn_output": gguf.GGMLQuantizationType.Q4_0,
    "ffn_gate": gguf.GGMLQuantizationType.F16,
    "ffn_up": gguf.GGMLQuantizationType.BF16,
    "ffn_down": gguf.GGMLQuantizationType.F32,
}
_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def llama_row(row: int, head_dim: int) -> int:
    """Where llama keeps Hugging Face's row of a q or k projection: rotary pairs side by side, not half a head apart."""
    head, inside = divmod(row, head_dim)
    half, pair = divmod(inside, head_dim // 2)
    return head * head_dim + 2 * pair + half


def write_gguf(
    path: Path,
    seed: int = 0,
    tied: bool = True,
    meta: Mapping[str, object] | None = None,
    without: tuple[str, ...] = (),
    extra: tuple[str, ...] = (),
) -> dict[str, torch.Tensor]:
    """Writes a tiny quantised llama.

    Args:
        meta: metadata that is written in addition.
        without, extra: tensor names to leave out, and to invent.

    Returns: what a correct import must give, under Hugging Face's names, in fp32.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn, heads, kv = SIZES["hidden"], SIZES["ffn"], SIZES["heads"], SIZES["kv_heads"]
    head_dim = hidden // heads
    shapes = {
        "attn_q": (hidden, hidden),
        "attn_k": (kv * head_dim, hidden),
        "attn_v": (kv * head_dim, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
    }
    tokens = vocabulary()
    meta = dict(meta or {})
    writer = gguf.GGUFWriter(path, str(meta.pop("general.architecture", "llama")))
    expected: dict[str, torch.Tensor] = {}

    def add(name: str, hf_name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> None:
        if name in without:
            return
        values = torch.randn(shape, generator=generator).numpy()
        stored = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        read = torch.from_numpy(np.array(gguf.quants.dequantize(stored, kind), dtype=np.float32))
        if ".attn_q." in name or ".attn_k." in name:
            read = read[[llama_row(row, head_dim) for row in range(shape[0])]]
        expected[hf_name] = read

    add("token_embd.weight", "model.embed_tokens.weight", (len(tokens), hidden), gguf.GGMLQuantizationType.Q8_0)
    add("output_norm.weight", "model.norm.weight", (hidden,), gguf.GGMLQuantizationType.F32)
    if not tied:
        add("output.weight", "lm_head.weight", (len(tokens), hidden), gguf.GGMLQuantizationType.Q8_0)
    for layer in range(SIZES["layers"]):
        for part, shape in shapes.items():
            kind = _QUANTISED.get(part, gguf.GGMLQuantizationType.F32)
            add(f"blk.{layer}.{part}.weight", f"model.layers.{layer}.{_NAMES[part]}.weight", shape, kind)
    for name in extra:
        writer.add_tensor(name, np.zeros(32, dtype=np.float32))

    writer.add_block_count(SIZES["layers"])
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model(str(meta.pop("tokenizer.ggml.model", "gpt2")))
    writer.add_tokenizer_pre(str(meta.pop("tokenizer.ggml.pre", "smollm")))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in MARKS else 1 for token in tokens])
    writer.add_token_merges([" ".join(m) for m in MERGES])
    writer.add_eos_token_id(MARKS.index("<|im_end|>"))
    writer.add_chat_template(TEMPLATES["roles"])
    for key, value in meta.items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, int(str(value)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def write_wheel(folder: Path, files: Mapping[str, bytes], name: str = "tiny_model", version: str = "1.0") -> str:
    """Writes a wheel that pip takes for one, holding `files`. Returns its sha256."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_prompts(path: Path, prompts: Mapping[str, list[str]]) -> Path:
    """Prompt id -> turns, as JSON lines."""
    lines = [json.dumps({"id": key, "category": "test", "turns": turns}) for key, turns in prompts.items()]
    path.write_text("\n".join(lines) + "\n")
    return path
