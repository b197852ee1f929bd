"""A rank's memory from shapes alone: against what loading allocates, in shipped files, and where it does not fit."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.configs.load import load
from slipstream.configs.nccl import NcclMeasured
from slipstream.engine.drafts.eagle3.checkpoint import load_draft, save_draft
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.loader import load_target
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.flows.plan import Plan, derived_values, make_plan, room
from slipstream.tasks import derived
from slipstream.tasks.draft_weights import held_parameters, rank_parameters
from slipstream.tasks.nvml import Gpu, Gpus
from slipstream.tasks.other_engines.nccl import measured_otherwise
from slipstream.tasks.rank_memory import GIB, RankMemory, rank_memory, rotary_bytes
from slipstream.tasks.registry import all_stages
from slipstream.tasks.target_weights import target_weights, weight_bytes

CONFIGS = Path(__file__).parents[2] / "configs"
H200, RTX, DEEPSEEK = "kimi-k2.5-8xh200", "kimi-k2.5-8xrtxpro6000", "deepseek-v3-8xh200"
MLA = "kimi-k2.5-mla-8xh200"
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def kimi(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_test_module(Path(__file__).parents[1] / "checkpoints" / "kimi.py")


def plan(name: str, *overrides: str, tmp_path: Path, skip: tuple[str, ...] = ()) -> Plan:
    return make_plan(CONFIGS / f"{name}.yaml", overrides, workdir=tmp_path, environ={}, stages=(), skip=skip)


def memory(found: Plan) -> RankMemory:
    made = rank_memory(found.facts)
    assert made is not None
    return made


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("form", ["Kimi, INT4", "DeepSeek, bf16"])
def test_weights_are_those_that_loading_allocates(kimi: ModuleType, tmp_path: Path, form: str, ranks: int) -> None:
    kimi.synthesise(tmp_path, int4=form.startswith("Kimi"), wrapper=form.startswith("Kimi"), vocab_size=200)
    config = ModelConfig.from_dir(tmp_path)
    parallel = TensorParallel(0, ranks, group=None if ranks == 1 else object())
    model = load_target(tmp_path, torch.bfloat16, parallel=parallel)
    table = next(buffer for name, buffer in model.named_buffers() if name == "rotary.table")
    kept = [t for name, t in model.named_parameters() if "kv_b_proj" not in name]  # a card keeps its halves alone
    tensors = {t.data_ptr(): t.nbytes for t in (*kept, *model.buffers()) if t is not table}
    for module in model.modules():
        stacks = getattr(module, "int4", None)
        for stack in () if stacks is None else (stacks.gate_up, stacks.down):
            tensors |= {t.data_ptr(): t.nbytes for t in vars(stack).values() if isinstance(t, torch.Tensor)}
    planned = sum(weight_bytes(weight, config, 2) for weight in target_weights(config, ranks))
    assert rotary_bytes(config, 2) == table.nbytes
    assert planned == pytest.approx(sum(tensors.values()), rel=0.01)


def test_parameters_are_those_of_the_checkpoint(kimi: ModuleType, tmp_path: Path) -> None:
    made = kimi.synthesise(tmp_path, int4=False, n_shared_experts=2, first_k_dense_replace=2)
    expected = sum(p.numel() for p in made.reference.parameters())
    expected += sum(b.numel() for name, b in made.reference.named_buffers() if name.endswith("correction_bias"))
    assert derived.target_parameters(ModelConfig.from_dir(tmp_path)) == expected


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("attention", ["grouped", "latent"])
def test_draft_parameters_are_those_of_its_network(tmp_path: Path, attention: str, ranks: int) -> None:
    facts = plan(H200, f"draft.attention={attention}", tmp_path=tmp_path).facts
    assert facts.target is not None
    assert facts.slots is not None
    config = derived.draft_config(facts.deployment, facts.target, facts.slots)
    parallel = TensorParallel(0, ranks, group=None if ranks == 1 else object())
    with torch.device("meta"):
        network = Eagle3Network(config, torch.bfloat16, parallel)
    assert rank_parameters(config, ranks) == sum(p.numel() for p in network.parameters())
    assert config.head_dim == 128 if attention == "grouped" else 192


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("latent", [False, True])
def test_a_loaded_draft_holds_what_the_plan_says(
    kimi: ModuleType, tiny: ModuleType, tmp_path: Path, latent: bool, ranks: int
) -> None:
    """Beside the target, whose embedding it shares."""
    kimi.synthesise(tmp_path / "target", vocab_size=200)
    target = load_target(tmp_path / "target", torch.bfloat16)
    draft = tiny.tiny_draft(
        target, slots=(0, 2, 4), latent=latent, num_heads=8, **({} if latent else {"num_kv_heads": 8})
    )
    record = DraftRecord(TargetIdentity.from_dir(tmp_path / "target"), Family.KIMI_K25, "0" * 64)
    save_draft(tmp_path / "draft", draft, record)
    parallel = TensorParallel(0, ranks, group=None if ranks == 1 else object())
    embedding = target.embed_tokens.weight[: 200 // ranks]
    network = load_draft(tmp_path / "draft", torch.bfloat16, target_embedding=embedding, parallel=parallel)
    network.prepare()
    known = {embedding.data_ptr(), network.rotary.table.data_ptr(), network.d2t.data_ptr()}
    tensors = {t.data_ptr(): t.nbytes for t in (*network.parameters(), *network.buffers())}
    held = sum(size for at, size in tensors.items() if at not in known)
    assert 2 * held_parameters(network.config, ranks) == held
    assert network.rotary.table.nbytes == 2 * 2 * network.config.max_position * network.config.rope_dim


@pytest.mark.parametrize(("name", "weights"), [(H200, 76.2), (MLA, 76.2), (RTX, 76.2), (DEEPSEEK, 52.1)])
def test_shipped_files_fit(tmp_path: Path, name: str, weights: float) -> None:
    found = plan(name, tmp_path=tmp_path)
    assert [str(error) for error in found.errors] == []
    made, gib = memory(found), found.loaded.deployment.host.gpu_memory_gib
    assert gib is not None
    assert made.total < gib * GIB * 0.95
    parts = {part.what: part.bytes for part in made.parts}
    assert (parts["routed experts"] + parts["other weights"]) / 1e9 == pytest.approx(weights, abs=0.1)
    rows = {row.name: row.value for row in derived_values(found)}
    assert rows["hidden states"] == "57,344 bytes a token"
    assert rows["a rank's memory"] == f"{made.total / 1e9:.2f} GB"
    assert made.total == sum(parts.values())


def test_kimi_by_hand(tmp_path: Path) -> None:
    """Figures worked out apart: 60 layers of 384 experts in 4.5 bits, and what every layer has beside them."""
    found = plan(H200, tmp_path=tmp_path)
    assert derived.target_parameters(found.facts.target) == pytest.approx(1.026e12, rel=0.002)  # "1T"
    parts = {part.what: part.bytes for part in memory(found).parts}
    assert parts["routed experts"] == 60 * 384 * 3 * 7168 * 2048 * 9 // 16 // 8
    layer = 7168 * (1536 + 576) + 8 * (192 * 1536 + 128 * 7168 + 256 * 512)
    mixed = 384 * 7168 + 3 * 7168 * 256
    others = 61 * layer + 60 * mixed + 3 * 7168 * 2304 + 2 * 20480 * 7168
    assert parts["other weights"] == pytest.approx(2 * others, rel=1e-3)
    tokens = 1 + 16 * -(-(32768 + 4) // 16)
    assert parts["KV cache"] == tokens * 16 * 61 * 576 * 2  # not divided by the ranks
    assert parts["draft's KV cache"] == tokens * 16 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("name", [H200, RTX])
def test_what_does_not_fit_says_so_and_what_to_change(tmp_path: Path, name: str) -> None:
    over = ("server.max_running_requests=64",)
    (error,) = plan(name, *over, tmp_path=tmp_path).errors
    assert error.check == "gpu-memory"
    assert "a rank needs" in error.found
    assert "KV cache" in error.found
    ways = [way.removeprefix("write ").split(" or")[0].replace(": ", "=") for way in error.ways[:2]]
    assert [way.split("=")[0] for way in ways] == ["server.max_context_tokens", "server.max_running_requests"]
    for way in ways:
        key, value = way.split("=")
        lower = () if "context" not in key else ("data.max_new_tokens=16", "benchmark.max_new_tokens=16")
        prompts = () if "context" not in key else ("data.max_prompt_tokens=64",)
        assert not [
            e for e in plan(name, *over, way, *lower, *prompts, tmp_path=tmp_path).errors if "memory" in e.check
        ]
        more = f"{key}={int(int(value) * 1.05) + 1}"
        assert [e for e in plan(name, *over, more, tmp_path=tmp_path).errors if e.check == "gpu-memory"]
    assert not plan(name, *over, tmp_path=tmp_path, skip=("gpu-memory",)).errors


def test_weights_alone_can_be_too_large(tmp_path: Path) -> None:
    (error,) = plan(H200, "host.gpu_memory_gib=70.0", tmp_path=tmp_path).errors
    assert "no room at all" in error.expected
    assert error.ways == ("write a larger server.tensor_parallel_size, or serve on GPUs with more memory",)


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("speculation.verify_width=16", "F1"),
        ("draft.max_context_tokens=2048", "F14"),
        ("nccl.proto=LL256", "F16"),
        ("server.tensor_parallel_size=5", "expert-groups"),
        ("capture.slots=[2, 30, 62]", "slots"),
    ],
)
def test_faults_of_the_incident_are_refused(tmp_path: Path, override: str, fault: str) -> None:
    found = [error.fault or error.check for error in plan(RTX, override, tmp_path=tmp_path).errors]
    assert fault in found


@pytest.mark.parametrize("name", [H200, MLA, RTX])
@pytest.mark.parametrize(("ids", "shift"), [({IDS: [1, 29, 57]}, "-1"), ({"eagle_config": {IDS: [3, 31, 59]}}, r"\+1")])
def test_layer_ids_of_another_convention_are_refused(
    tmp_path: Path, name: str, ids: dict[str, object], shift: str
) -> None:
    """F4, in a draft that lies there or is named; [2, 30, 58] means the slots of these files to both engines."""
    config = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 512, "max_position_embeddings": 262144}
    draft = tmp_path / "convert" / "draft"
    draft.mkdir(parents=True)
    for value, expected in (({"eagle_config": {IDS: [2, 30, 58]}}, []), (ids, ["F4"])):
        (draft / "config.json").write_text(json.dumps(config | value))
        elsewhere = {"tmp_path": tmp_path / "elsewhere"}
        for errors in (plan(name, tmp_path=tmp_path).errors, plan(name, f"draft.path={draft}", **elsewhere).errors):
            assert [error.fault for error in errors] == expected
            assert all(re.search(f"each off by {shift}", error.found) for error in errors)


def test_a_draft_of_latents_keeps_one_on_every_rank(tmp_path: Path) -> None:
    """In the shape of the published head, whose makers give it 1.8 billion parameters."""
    found = plan(MLA, tmp_path=tmp_path)
    parts = {part.what: part.bytes for part in memory(found).parts}
    tokens = 16 * (1 + 16 * -(-(32768 + 4) // 16))
    assert parts["draft's KV cache"] == tokens * 576 * 2
    assert found.facts.target is not None
    assert found.facts.slots is not None
    draft = derived.draft_config(found.facts.deployment, found.facts.target, found.facts.slots)
    assert derived.trained_parameters(draft) == pytest.approx(1.8e9, rel=0.03)
    told = {row.name: row.value for row in derived_values(found)}
    assert told["KV cache"] == "70272 bytes a token, draft 1152"


@pytest.mark.parametrize(
    ("override", "words"),
    [("draft.num_kv_heads=8", "no KV heads to count"), ("draft.norm_before_fc=true", "at most one kind of norm")],
)
def test_what_a_draft_of_latents_cannot_be(tmp_path: Path, override: str, words: str) -> None:
    (error,) = plan(MLA, "draft.fc_norm=true", override, tmp_path=tmp_path).errors
    assert words in error.expected


def test_nccl_values_are_told_as_unmeasured_and_reach_the_ranks(tmp_path: Path) -> None:
    found = plan(RTX, tmp_path=tmp_path)
    (warning,) = [f for f in found.findings if f.check == "nccl-tuned"]
    assert "NCCL" in warning.ways[0]
    assert "nccl.proto = LL" in warning.found
    assert "nccl.nthreads = 512" in warning.found
    assert not [f for f in plan(RTX, "speculation.num_steps=0", tmp_path=tmp_path).findings if f.check == "nccl-tuned"]
    assert found.loaded.deployment.nccl.variables == {
        "NCCL_PROTO": "LL",
        "NCCL_ALGO": "Ring",
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_MAX_NCHANNELS": "16",
        "NCCL_BUFFSIZE": "16777216",
        "NCCL_NTHREADS": "512",
    }


def test_stated_shapes_are_compared_with_the_target_once_it_is_there(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    other = tmp_path / "shapes"
    other.mkdir()
    config = json.loads((world.target / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config))
    world.write({"target": {"shapes": str(other)}})
    assert world.plan().errors == ()
    (other / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    (error,) = world.plan().errors
    assert error.check == "target-shapes"
    assert "hidden_size" in error.found
    (other / "config.json").unlink()
    with pytest.raises(Exception, match="holds no config"):
        world.plan()


def test_a_dense_target_is_counted_too(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"host": {"gpu_memory_gib": 80.0}, "speculation": {"num_steps": 2}})
    made = rank_memory(world.plan().facts)
    assert made is not None
    parts = {part.what: part.bytes for part in made.parts}
    assert parts["other weights"] == 2 * derived.target_parameters(world.plan().facts.target)
    assert load(world.file, (), {}).deployment.host.gpu_memory_gib == 80.0


def test_nccl_values_are_told_where_they_were_measured_for_something_else(tmp_path: Path) -> None:
    deployment = plan(RTX, tmp_path=tmp_path).loaded.deployment
    steps, ranks = deployment.speculation.num_steps, deployment.server.tensor_parallel_size
    noted = {"num_steps": steps, "ranks": ranks, "card": "RTX", "topology": "pcie"}

    def told(**changes: Any) -> list[str]:
        override = f"nccl.measured_for={json.dumps({**noted, **changes})}"
        findings = plan(RTX, override, tmp_path=tmp_path).findings
        return [finding.found for finding in findings if finding.check == "nccl-tuned"]

    assert told() == []
    (found,) = told(num_steps=7)
    assert f"were measured for K 7, not {steps}" in found
    (found,) = told(ranks=2)
    assert f"ranks 2, not {ranks}" in found

    def card(name: str, way: str) -> Gpu:
        return Gpu(0, name, "", "9.0", 1, 0, (), True, 0, False, False, {other: way for other in range(1, 3)})

    measured = NcclMeasured.model_validate(noted)
    here = Gpus("580", "13.0", tuple(card("RTX", "pcie") for _ in range(ranks)))
    assert measured_otherwise(measured, deployment, here) == []
    other = Gpus("580", "13.0", tuple(card("H200", "nvlink") for _ in range(ranks)))
    assert measured_otherwise(measured, deployment, other) == [("card RTX", "H200"), ("topology pcie", "nvlink")]


def test_stages_that_hold_the_whole_target_are_named_where_no_card_does(tmp_path: Path) -> None:
    """Extract knows no tensor parallelism: a plan must not look as if it ran where only eight cards hold the target."""
    stages = all_stages()

    def told(*overrides: str, skip: tuple[str, ...] = ()) -> list[str]:
        found = make_plan(CONFIGS / f"{H200}.yaml", overrides, workdir=tmp_path, environ={}, stages=stages, skip=skip)
        return [f.found for f in found.findings if f.check == "whole-target"]

    (one,) = told()
    assert "extract holds the whole target on one card, 594 GB of weights" in one
    assert "host.gpu_memory_gib = 139.8 is 150 GB" in one
    assert not told("host.gpu_memory_gib=600")
    assert not told("server.device=cpu", "host.gpu_memory_gib=null")
    assert not told(skip=("whole-target",))


def test_nobody_knows_the_seconds_of_a_card_or_the_room_of_a_far_host(tmp_path: Path) -> None:
    found = make_plan(CONFIGS / f"{H200}.yaml", workdir=tmp_path, environ={}, stages=all_stages())
    cost = found.costs
    assert {name for name in cost if cost[name].seconds is not None} == {"convert", "cleanup", "report"}
    assert 590e9 < cost["resolve"].disk_bytes < 600e9  # it is fetched
    assert cost["launch"].memory_bytes == cost["regenerate"].memory_bytes < 100e9  # weights go into the cards
    assert cost["parity"].memory_bytes > 6 * 1.02e12  # unpacked in fp32 and bf16
    disk, memory = room(found)
    assert (disk.what, disk.free) == ("disk of eight-h200", None)
    assert (memory.what, memory.free) == ("memory of eight-h200, largest stage", None)
