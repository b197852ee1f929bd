"""Weights packed for the CUDA C++ kernels: what is packed, that nothing is lost, and whole models through the kernels.

On the CPU the kernels' own source runs on the emulated GPU of tests/kernels/cuda_on_cpu; on a card, for real.
"""

import copy
import shutil
import time
from pathlib import Path

import pytest
import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.checkpoint import to_tensors
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.layers import Linear
from slipstream.engine.loader import load_target
from slipstream.engine.packed_weights import describe, pack_for_device, pack_weights
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.runner import capture_states
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.serving.engine_build import probe_model
from slipstream.engine.tensor_files import parameter_shards
from slipstream.kernels import dispatch, linear, linear_add, matrix_products, norm_gate_up, norm_linear, norm_qkv
from slipstream.kernels.cuda.pack import PackedWeight, RowOrder
from slipstream.kernels.matrix_products import MatrixProducts
from slipstream.kernels.weight import as_matrix

SIZES = {"num_hidden_layers": 2, "head_dim": 32}
CUDA = MatrixProducts("cuda", "of a test")
EMULATOR = Path(__file__).parents[1] / "kernels" / "cuda_on_cpu" / "emulator.py"
SLOTS = (0, 1, 2)


def plain(tiny, directory, **sizes):
    return tiny.tiny_target(directory, **{**SIZES, **sizes})


def packed_copy(model):
    made = copy.deepcopy(model)
    pack_weights(made)
    return made


def linears(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}


@pytest.fixture(scope="module")
def target(tiny, tmp_path_factory):
    return plain(tiny, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tiny, target):
    return tiny.tiny_draft(target, slots=SLOTS)


@pytest.fixture(scope="module")
def libraries(load_test_module, run_dir):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    module = load_test_module(EMULATOR)
    return module, module.compile_all(run_dir)


@pytest.fixture
def emulator(libraries, monkeypatch):
    """Packed weights go to the emulated GPU, everything else to the twins."""
    module, compiled = libraries
    made = module.Emulator(compiled)
    made.install(monkeypatch)
    run = made.run

    def checked(*arguments):
        run(*arguments)
        assert made.faults == 0

    monkeypatch.setattr(made, "run", checked)

    def products(weight, x, half=16):
        if not isinstance(weight, PackedWeight):
            return None
        from slipstream.kernels.cuda import products

        return products

    for op in (linear, linear_add, norm_gate_up, norm_linear, norm_qkv):
        monkeypatch.setattr(op, "cuda_products", products)
    return made


def test_every_weight_is_packed_in_the_order_of_its_op(target, draft):
    orders = {"qkv_proj": RowOrder.HEADS, "gate_up_proj": RowOrder.GATE_UP}
    for model in (target, draft):
        packed = packed_copy(model)
        for name, layer in linears(packed).items():
            if name == "midlayer.mlp.down_proj":  # 80 features: no multiple of 32
                assert isinstance(layer.weight, torch.nn.Parameter)
                continue
            assert layer.weight.order is orders.get(name.split(".")[-1], RowOrder.ROWS), name
            assert torch.equal(as_matrix(layer.weight), linears(model)[name].weight)
        assert not [name for name, _ in packed.named_parameters() if name.endswith("qkv_proj.weight")]


def test_a_tied_head_is_packed_beside_the_table(tiny, tmp_path, target):
    packed = packed_copy(target)
    assert torch.equal(as_matrix(packed.head_weight), target.head_weight)
    assert torch.equal(packed.embed_tokens.weight, target.embed_tokens.weight)
    told = describe(CUDA, packed)
    assert (told["packed_weights"], told["other_weights"]) == (4 * 2 + 1, 0)
    assert told["second_copy_bytes"] == 224 * 64 * 2  # 199 rows in tiles of 32
    untied = packed_copy(plain(tiny, tmp_path, tie_word_embeddings=False))
    assert isinstance(untied.lm_head.weight, PackedWeight)
    assert untied.head_weight is untied.lm_head.weight
    assert untied.packed_head is None
    assert describe(CUDA, untied, None)["second_copy_bytes"] == 0


def test_what_the_kernels_do_not_take_stays(tiny, tmp_path):
    fp32 = packed_copy(plain(tiny, tmp_path / "fp32", dtype=torch.float32))
    assert not any(isinstance(layer.weight, PackedWeight) for layer in linears(fp32).values())
    assert fp32.packed_head is None
    qwen = packed_copy(plain(tiny, tmp_path / "qwen3", family="qwen3"))
    odd = packed_copy(plain(tiny, tmp_path / "odd", intermediate_size=72, head_dim=48))
    for model, others in ((qwen, {"qkv_proj"}), (odd, {"qkv_proj", "down_proj"})):
        left = {name.split(".")[-1] for name, layer in linears(model).items() if isinstance(layer.weight, torch.Tensor)}
        assert left == others
        assert describe(CUDA, model)["other_weights"] == 2 * len(others)


def test_what_reads_a_weight_reads_the_same(target, draft, tiny):
    """Shapes, shards by checkpoint name, the export, the probe of this machine, and the twins."""
    packed, packed_draft = packed_copy(target), packed_copy(draft)
    before, after = parameter_shards(target), parameter_shards(packed)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name].view, shard.view) for name, shard in before.items())
    assert all(a.equal(b) for a, b in zip(to_tensors(draft).values(), to_tensors(packed_draft).values(), strict=True))
    assert probe_model(packed, packed_draft).invariant == probe_model(target, draft).invariant
    ids = tiny.prompts(1, low=9, high=9)[0]
    (states, last), (expected, expected_last) = (capture_states(model, ids, SLOTS) for model in (packed, target))
    assert torch.equal(last, expected_last)
    assert all(torch.equal(states[name], expected[name]) for name in expected)
    assert torch.equal(packed.logits(last), target.logits(last))
    grown = last.clone().requires_grad_()
    packed.layers[0].self_attn.o_proj.partial(torch.cat([grown, grown], -1)).sum().backward()  # 4 heads of 32
    assert grown.grad is not None


def test_loading_packs_on_a_card_and_nowhere_else(tiny, tmp_path, target, monkeypatch):
    directory = tiny.save_tiny(tmp_path, **SIZES)
    assert load_target(directory, torch.bfloat16).packed_head is None
    monkeypatch.setattr("slipstream.engine.packed_weights.matrix_products", lambda device: CUDA)
    loaded = load_target(directory, torch.bfloat16)
    for name, layer in linears(loaded).items():
        assert isinstance(layer.weight, PackedWeight)
        assert torch.equal(as_matrix(layer.weight), linears(target)[name].weight)


def test_a_model_through_the_kernels_gives_the_twins_numbers(target, emulator, tiny):
    """A prompt of two groups of rows, whole and in chunks: the same bits, and the twins' but for roundings."""
    packed = packed_copy(target)
    ids = tiny.prompts(1, low=250, high=250)[0]
    states, last = capture_states(packed, ids, SLOTS, prefill_chunk_tokens=256)
    assert {name.split("_")[1] for name in emulator.names} == {"1", "2", "3"}  # all products but the head
    again, last_again = capture_states(packed, ids, SLOTS, prefill_chunk_tokens=100)
    assert torch.equal(last, last_again)
    assert all(torch.equal(states[name], again[name]) for name in states)
    expected, expected_last = capture_states(target, ids, SLOTS)
    for name in expected:
        near(states[name], expected[name])
    near(last, expected_last)
    near(packed.logits(last), target.logits(last))
    assert emulator.names[-1].startswith("skinny_0_1")


def near(found, expected):
    """A few bf16 roundings apart: a wrong row order or norm is off by its whole size."""
    assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 0.02


def test_tokens_through_the_kernels_do_not_depend_on_k_or_neighbours(target, draft, emulator, tiny):
    packed, packed_draft = packed_copy(target), packed_copy(draft)
    prompts, params = tiny.prompts(4, high=20), SamplingParams(max_tokens=7, ignore_eos=True)
    sizes = {"max_context_tokens": 64, "prefill_chunk_tokens": 16}
    alone = Engine(packed, EngineConfig(max_running_requests=1, **sizes)).generate(prompts, params)
    recordings = {str(i): a.prompt_ids + a.token_ids for i, a in enumerate(alone)}
    for num_steps, batch in ((0, 4), (1, 4), (3, 1), (3, 4)):
        proposer = Eagle3Proposer(packed_draft, num_steps) if num_steps else None
        if num_steps == 3:
            proposer = OracleProposer(3, recordings, 199, seed=1, inner=proposer)
        engine = Engine(packed, EngineConfig(num_steps=num_steps, max_running_requests=batch, **sizes), proposer)
        answers = engine.generate(prompts, params)
        assert [a.token_ids for a in answers] == [a.token_ids for a in alone], (num_steps, batch)


@pytest.fixture
def card(monkeypatch):
    """A card that is none, as `matrix_products` sees it; the list says what nvcc was asked for."""
    from slipstream.kernels.cuda import build, launch
    from slipstream.kernels.gpu import launch as gpu_launch

    asked = []
    matrix_products._load.cache_clear()
    matrix_products._load_int4.cache_clear()
    monkeypatch.setattr(matrix_products, "_int4_seconds", {})
    monkeypatch.delenv(matrix_products.VARIABLE, raising=False)
    monkeypatch.setattr(gpu_launch, "capability", lambda: 90)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(build, "available", lambda arch: True)
    monkeypatch.setattr(launch, "load", asked.append)
    yield asked
    matrix_products._load.cache_clear()
    matrix_products._load_int4.cache_clear()


def test_the_choice_of_kernels_is_made_once_and_told(card, monkeypatch):
    choose = matrix_products.matrix_products
    assert choose("cpu").kernels == "torch"
    assert (choose("cuda").kernels, choose("cuda:0").kernels, card) == ("cuda", "cuda", [0])
    monkeypatch.setenv(matrix_products.VARIABLE, "triton")
    assert choose("cuda") == MatrixProducts("triton", "SLIPSTREAM_MATRIX=triton")
    monkeypatch.setenv(matrix_products.VARIABLE, "cublas")
    with pytest.raises(ValueError, match="expected one of auto, cuda, triton"):
        choose("cuda")


@pytest.mark.parametrize("why", ["old card", "no nvcc", "nvcc fails"])
def test_without_the_kernels_triton_runs_and_the_reason_is_told(card, monkeypatch, caplog, why):
    from slipstream.engine.errors import SlipstreamError
    from slipstream.kernels.cuda import build, launch
    from slipstream.kernels.gpu import launch as gpu_launch

    def fail(device):
        raise RuntimeError("nvcc failed with 1")

    words = {"old card": "sm_75", "no nvcc": "no nvcc", "nvcc fails": "nvcc failed with 1"}[why]
    if why == "old card":
        monkeypatch.setattr(gpu_launch, "capability", lambda: 75)
    elif why == "no nvcc":
        monkeypatch.setattr(build, "available", lambda arch: False)
    else:
        monkeypatch.setattr(launch, "load", fail)
    for _ in range(2):
        found = matrix_products.matrix_products("cuda")
        assert found.kernels == "triton"
        assert words in found.reason
    assert caplog.text.count("the Triton kernels run instead") == (why != "no nvcc")  # build.available says that one
    monkeypatch.setenv(matrix_products.VARIABLE, "cuda")
    with pytest.raises(SlipstreamError, match=words):
        pack_for_device(torch.nn.Module(), "cuda")


def test_int4_weights_run_in_cuda_where_the_kernels_take_them(card, monkeypatch, caplog):
    from slipstream.engine.errors import SlipstreamError
    from slipstream.kernels.cuda import int4_launch, products
    from slipstream.kernels.int4 import arrange, pack

    def model():
        made = torch.nn.ModuleList(Linear(width, 64) for width in (128, 96, 256))
        for layer in made:
            width = layer.weight.shape[1]
            del layer.weight
            words = pack(torch.zeros(64, width, dtype=torch.int8))
            layer.weight = arrange(words, torch.ones(64, width // 32).bfloat16(), 32)
        return made

    def load(device, groups):
        time.sleep(0.05)
        card.append(groups)

    monkeypatch.setattr(int4_launch, "load", load)
    ours = model()
    told = describe(pack_for_device(ours, "cuda"), ours)
    assert card == [0, (32,)]
    assert [layer.weight.cuda for layer in ours] == [True, False, True]
    assert (told["packed_weights"], told["other_weights"]) == (2, 1)
    # What a start tells, after its models have come, has the seconds of theirs.
    assert describe(matrix_products.matrix_products("cuda"), ours)["compile_seconds"] >= 0.05
    x = torch.zeros(2, 128).bfloat16()
    monkeypatch.setattr(dispatch, "on_gpu", lambda x: True)
    assert dispatch.cuda_products(ours[0].weight, x, 32) is products
    for weight, rows, half in ((ours[0].weight, x, 16), (ours[0].weight, x.float(), 32), (ours[1].weight, x, 32)):
        assert dispatch.cuda_products(weight, rows, half) is None

    def fail(device, groups):
        raise RuntimeError("nvcc failed with 1")

    monkeypatch.setattr(int4_launch, "load", fail)
    matrix_products._load_int4.cache_clear()
    for _ in range(2):
        theirs = model()
        pack_for_device(theirs, "cuda")
        assert not any(layer.weight.cuda for layer in theirs)
    assert caplog.text.count("the Triton kernel runs instead") == 1
    monkeypatch.setenv(matrix_products.VARIABLE, "cuda")
    with pytest.raises(SlipstreamError, match="nvcc failed with 1"):
        pack_for_device(model(), "cuda")


def test_a_packed_weight_goes_to_cuda_and_a_plain_one_to_triton(monkeypatch):
    from slipstream.kernels.cuda import products
    from slipstream.kernels.cuda.pack import pack

    weight = torch.zeros(32, 64).bfloat16()
    packed, x = pack(weight), torch.zeros(2, 64).bfloat16()
    for gpu in (False, True):
        monkeypatch.setattr(dispatch, "on_gpu", lambda x, gpu=gpu: gpu)
        assert dispatch.cuda_products(packed, x) is (products if gpu else None)
        assert dispatch.cuda_products(weight, x) is None
        assert dispatch.triton_product(weight, x) is gpu
        assert not dispatch.triton_product(packed, x)
        assert not dispatch.triton_product(weight[:0], x)
