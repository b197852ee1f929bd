"""Training on a GPU: the CPU's losses and gradients, a run that learns and goes on exactly, bounded memory."""

import dataclasses

import pytest
import torch

from slipstream.engine.batch_capture import BatchCapture
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.runner import capture_states
from slipstream.engine.training.checkpoint import load_network
from slipstream.engine.training.data import Conversation, ConversationList, collate
from slipstream.engine.training.evaluate import Evaluator
from slipstream.engine.training.log import read_metrics
from slipstream.engine.training.loss import ttt_loss
from slipstream.engine.training.optimizer import MasterAdamW
from slipstream.engine.training.settings import TrainingSettings
from slipstream.engine.training.teacher import Teacher
from slipstream.engine.training.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")
STEPS, DECAY = 3, 0.7
SETTINGS = TrainingSettings(
    num_steps=3,
    epochs=6,
    max_seconds=None,
    learning_rate=1e-2,
    warmup_fraction=0.04,
    weight_decay=0.0,
    grad_clip_norm=1.0,
    batch_tokens=60,
    step_loss_decay=0.8,
    seed=0,
    checkpoint_every_seconds=30.0,
    dtype="bfloat16",
    device="cuda",
    hits_every_steps=2,
)


def teacher_on(device, draft_tools, network):
    """The same teacher for a network on whatever device."""
    plain = draft_tools.make_teacher(draft_tools.make_network())
    ids = network.to_target(torch.arange(network.config.draft_vocab_size, device=network.d2t.device))
    return Teacher(plain.final_norm.to(device), plain.head.to(device), plain.eps, ids)


def loss_and_gradients(draft_tools, device, dtype=torch.float32, **switches):
    network = draft_tools.make_network(**switches).to(device, dtype)
    network.embed_tokens.weight.requires_grad_(False)
    conversations = [
        dataclasses.replace(c, features=c.features.to(dtype), teacher=c.teacher.to(dtype))
        for c in draft_tools.make_conversations()
    ]
    batch = collate(conversations, STEPS).to(device)
    result = ttt_loss(network, batch, teacher_on(device, draft_tools, network), STEPS, DECAY, with_hits=True)
    result.total.backward()
    return result, {n: p.grad.float().cpu() for n, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", ["grouped", "latent"])
@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}], ids=["plain", "switched"])
def test_a_step_in_fp32_is_the_cpus(draft_tools, attention, switches):
    switches = switches | (draft_tools.LATENT if attention == "latent" else {})
    ours, gradients = loss_and_gradients(draft_tools, DEVICE, **switches)
    theirs, expected = loss_and_gradients(draft_tools, torch.device("cpu"), **switches)
    torch.testing.assert_close(ours.total.cpu(), theirs.total, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.steps.cpu(), theirs.steps, rtol=1e-5, atol=1e-6)
    assert ours.joint.tolist() == theirs.joint.tolist()
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_step_in_bfloat16_is_near_the_cpus_in_fp32(draft_tools):
    """Loss within 1 %, each gradient within 6 % of its norm: bf16 keeps 8 bits, and three steps add up."""
    ours, gradients = loss_and_gradients(draft_tools, DEVICE, torch.bfloat16)
    theirs, expected = loss_and_gradients(draft_tools, torch.device("cpu"))
    assert abs(float(ours.total) - float(theirs.total)) < 0.01 * float(theirs.total)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() < 0.06 * gradient.norm(), name


def make_trainer(draft_tools, out, settings=SETTINGS, **options):
    network = draft_tools.make_network(dtype=settings.torch_dtype).to(DEVICE)
    teacher = teacher_on(DEVICE, draft_tools, network)
    source = ConversationList(draft_tools.toy_conversations(12, dtype=settings.torch_dtype))
    return Trainer(network, teacher, source, settings, out, **options)


def test_the_loss_goes_down(draft_tools, tmp_path):
    settings = dataclasses.replace(SETTINGS, epochs=60)
    trainer = make_trainer(draft_tools, tmp_path, settings)
    trainer.run()
    losses = [row["loss"] for row in read_metrics(tmp_path)]
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]


def test_interrupted_and_resumed_equals_uninterrupted(draft_tools, tmp_path):
    """On one machine the same seed gives the same bits, also over a kill; a checkpoint loads without a card."""
    whole = make_trainer(draft_tools, tmp_path / "whole")
    result = whole.run()
    cut = make_trainer(draft_tools, tmp_path / "cut")
    assert not cut.run(should_stop=lambda: cut.step >= 4).finished
    resumed = make_trainer(draft_tools, tmp_path / "cut")
    assert resumed.step == 4
    assert resumed.run().loss == result.loss
    for name, master in whole.optimizer.masters.items():
        assert torch.equal(master, resumed.optimizer.masters[name]), name
    network = load_network(tmp_path / "cut" / "checkpoint")
    assert network.fc.weight.device.type == "cpu"
    assert torch.equal(network.fc.weight, whole.network.fc.weight.cpu())


def test_evaluation_is_the_cpus(draft_tools):
    """Run lengths of fp32: equal, but where two logits are nearly equal."""
    found = []
    for device in (DEVICE, torch.device("cpu")):
        network = draft_tools.make_network(head_dim=16, intermediate_size=32).to(device)
        teacher = teacher_on(device, draft_tools, network)
        source = ConversationList(draft_tools.make_conversations())
        found.append(Evaluator(source, teacher, 4).run(network))
    ours, theirs = found
    pairs = [
        (a, b) for x, y in zip(ours.run_lengths, theirs.run_lengths, strict=True) for a, b in zip(x, y, strict=True)
    ]
    assert sum(a != b for a, b in pairs) <= 1
    assert ours.slots == theirs.slots


def test_memory_of_a_large_step_is_bounded(draft_tools):
    """4,096 tokens in two conversations, width 1,024, 16 heads, draft vocabulary 65,536, three steps, bf16.

    Logits of all steps in bf16 and fp32 with labels would take 10 GB, scores of all steps 2.4 GB.
    """
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 64,
        "vocab_size": 65_536,
        "draft_vocab_size": 65_536,
        "target_hidden_size": 1024,
        "max_position": 4096,
    }
    with DEVICE:
        network = Eagle3Network(draft_tools.make_config(**sizes), torch.bfloat16)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        network.embed_tokens.weight.requires_grad_(False)
        head = torch.randn(65_536, 1024, dtype=torch.bfloat16)
        teacher = Teacher(torch.ones(1024, dtype=torch.bfloat16), head, 1e-5, torch.arange(65_536))
    optimizer = MasterAdamW(network, 0.0, 1.0)
    conversations = []
    for length in (2048, 2000):
        states = torch.randn(length, 1024).to(torch.bfloat16)
        features = torch.cat([states] * 3, -1)
        ids = torch.randint(0, 65_536, (length,))
        conversations.append(Conversation(ids, torch.arange(length) >= 100, features, states[99:], 99))
    batch = collate(conversations, STEPS).to(DEVICE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ttt_loss(network, batch, teacher, STEPS, DECAY).total.backward()
    optimizer.step(1e-3)
    assert torch.cuda.max_memory_allocated() - before < 4 * 2**30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capture_in_batches_is_that_of_single_sequences(tiny, tmp_path, dtype):
    """Bit for bit on the GPU; near the CPU's."""
    directory = tiny.save_tiny(tmp_path, dtype=dtype)
    on_gpu, on_cpu = (tiny.load_target(directory, dtype, device) for device in ("cuda", "cpu"))
    sequences = [tiny.prompts(1, low=n, high=n)[0] for n in (70, 3, 41, 64, 20)]
    captured = BatchCapture(on_gpu, (0, 2, 4), max_rows=1024, longest=70)(sequences)
    for ids, (states, teacher) in zip(sequences, captured, strict=True):
        alone, last = capture_states(on_gpu, ids, (0, 2, 4), prefill_chunk_tokens=32)
        assert torch.equal(teacher, last.cpu())
        assert all(torch.equal(states[name], alone[name].cpu()) for name in alone)
        _, reference = capture_states(on_cpu, ids, (0, 2, 4))
        tolerance = 1e-4 if dtype == torch.float32 else 0.05
        assert (teacher.float() - reference.float()).norm() < tolerance * reference.float().norm()
