"""A draft with latent attention (MLA) on tiny Kimi: served logits against transformers, tokens, training, parity."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

from slipstream.engine.capture import CapturePlan
from slipstream.engine.drafts.eagle3.checkpoint import load_draft, save_draft, to_tensors
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.drafts.eagle3.vocab import select_draft_vocab
from slipstream.engine.engine import Engine, EngineConfig
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.inject import inject
from slipstream.engine.injection import parse_injections
from slipstream.engine.loader import load_target
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.runner import capture_states
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.training.checkpoint import load_network
from slipstream.engine.training.data import Conversation, ConversationList
from slipstream.engine.training.init import TargetWeights, init_network
from slipstream.engine.training.log import read_metrics
from slipstream.engine.training.settings import TrainingSettings
from slipstream.engine.training.teacher import Teacher
from slipstream.engine.training.trainer import Trainer
from slipstream.tasks.parity_draft import SERVER, DraftFindings, compare_drafts, in_fp32

KIMI = Path(__file__).parents[3] / "checkpoints" / "kimi.py"
SLOTS, STEPS, TOKENS = (0, 2, 4), 3, 40
BOUND = 1e-4
SWITCHES = {
    "eagle3": {},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "norms": {"norm_before_fc": True, "norm_before_residual": True},
    "whole vocabulary": {"draft_vocab_size": 199},
}
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def made(load_test_module, tmp_path_factory):
    """A checkpoint."""
    return load_test_module(KIMI).synthesise(tmp_path_factory.mktemp("kimi"))


@pytest.fixture(scope="module")
def target(made):
    return load_target(made.directory, torch.float32)


@pytest.fixture(scope="module")
def prompts(tiny):
    """Past where YaRN begins to stretch positions."""
    return tiny.prompts(3, seed=6, low=18, high=48)


@pytest.fixture(scope="module")
def plain(target, prompts):
    """Answers at K = 0."""
    return Engine(target, config(0)).generate(prompts, GREEDY)


def config(num_steps: int) -> EngineConfig:
    sizes = {"max_running_requests": 3, "max_context_tokens": 128, "prefill_chunk_tokens": 16}
    return EngineConfig(num_steps=num_steps, **sizes)


class Reference:
    """One draft over transformers' attention, block and norms of DeepSeek-V3; no cache: all rows anew at each step."""

    def __init__(self, draft: Eagle3Network) -> None:
        c, self.config = draft.config, draft.config
        assert c.latent is not None
        shape = {
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_heads,
            "q_lora_rank": c.latent.q_rank,
            "kv_lora_rank": c.latent.kv_rank,
            "qk_nope_head_dim": c.latent.nope_dim,
            "qk_rope_head_dim": c.latent.rope_dim,
            "v_head_dim": c.latent.value_dim,
            "max_position_embeddings": c.max_position,
            "rope_parameters": {**c.rope_scaling, "rope_type": "yarn", "rope_theta": c.rope_theta},
        }
        own = DeepseekV3Config(**shape, hidden_act="silu")
        own._attn_implementation = "eager"
        self.rotary, self.attention = theirs.DeepseekV3RotaryEmbedding(own), theirs.DeepseekV3Attention(own, 0)
        for name in ("q_a_proj", "kv_a_proj_with_mqa"):  # of [embedding; feature]
            rows = getattr(self.attention, name).out_features
            setattr(self.attention, name, nn.Linear(2 * c.hidden_size, rows, bias=False))
        for norm in (self.attention.q_a_layernorm, self.attention.kv_a_layernorm):
            norm.variance_epsilon = c.rms_norm_eps  # as trainers and other engines have it in drafts
        self.mlp = theirs.DeepseekV3MLP(own)
        self.tensors = to_tensors(draft)
        for part, module in (("self_attn", self.attention), ("mlp", self.mlp)):
            prefix = f"midlayer.{part}."
            module.load_state_dict({n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)})

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        norm = theirs.DeepseekV3RMSNorm(x.shape[-1], self.config.rms_norm_eps)
        norm.weight.data.copy_(self.tensors[f"{name}.weight"])
        return norm(x)

    @torch.no_grad()
    def chain(self, tokens: list[int], features: torch.Tensor, num_steps: int) -> torch.Tensor:
        """Logits [K, Vd]. tokens: x_1 .. x_{t+1}, then the chain's own; features [t + 1, F]."""
        c, logits = self.config, []
        if c.norm_before_fc:
            features = self.norm(features, "input_norm")
        if c.fc_norm:
            parts = features.chunk(len(c.slots), -1)
            features = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        rows = features @ self.tensors["fc.weight"].T  # [t + 1, h]
        for _ in range(num_steps):
            embedded = self.tensors["embed_tokens.weight"][tokens[: len(rows)]]
            normed = self.norm(rows, "midlayer.hidden_norm")
            x = torch.cat((self.norm(embedded, "midlayer.input_layernorm"), normed), -1)[None]  # [1, rows, 2h]
            mask = torch.full((len(rows), len(rows)), float("-inf")).triu(1)[None, None]
            angles = self.rotary(x, torch.arange(len(rows))[None])
            mixed = self.attention(x, position_embeddings=angles, attention_mask=mask)[0][0]
            states = (normed if c.norm_before_residual else rows) + mixed
            states = states + self.mlp(self.norm(states, "midlayer.post_attention_layernorm"))
            last = self.norm(states[-1:], "norm")
            logits.append((last @ self.tensors["lm_head.weight"].T)[0])
            rows = torch.cat((rows, last if c.norm_output else states[-1:]))
        return torch.stack(logits)


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_served_draft_logits_are_those_of_transformers_and_tokens_do_not_change(tiny, target, prompts, plain, switches):
    """Of every round, in a batch, after every accepted count."""
    draft = tiny.tiny_draft(target, slots=SLOTS, latent=True, **switches)
    recordings = {str(i): a.prompt_ids + a.token_ids for i, a in enumerate(plain)}
    oracle = OracleProposer(STEPS, recordings, target.config.vocab_size, inner=Eagle3Proposer(draft, STEPS))
    engine = Engine(target, config(STEPS), oracle)
    answers = engine.generate(prompts, GREEDY, trace=True)
    assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
    assert min(engine.stats.acceptance[STEPS].histogram) > 0
    reference, worst, compared = Reference(draft), 0.0, 0
    for answer in answers:
        features = CapturePlan(draft.config.slots, target.config.num_layers).select(answer.trace.states)
        for r in answer.trace.rounds:
            if not r.num_valid:
                continue
            own = draft.to_target(r.draft_logits.max(-1).indices)  # what the draft itself would propose, and embeds
            chain = [*answer.trace.token_ids[1 : r.start], *own.tolist()]
            expected = reference.chain(chain, features[: r.start - 1], r.num_valid)
            worst = max(worst, float((r.draft_logits[: r.num_valid] - expected).abs().max()))
            compared += r.num_valid
    print(f"{compared} draft steps, worst error {worst:.1e}, logits up to {float(expected.abs().max()):.1f}")
    assert compared > 60
    assert worst <= BOUND
    assert expected.abs().max() > 1


def test_tokens_with_the_draft_alone_and_one_latent_a_position(tiny, target, prompts, plain):
    for num_steps in (1, STEPS):
        draft = tiny.tiny_draft(target, slots=SLOTS, latent=True)
        engine = Engine(target, config(num_steps), Eagle3Proposer(draft, num_steps))
        assert [a.token_ids for a in engine.generate(prompts, GREEDY)] == [a.token_ids for a in plain]
        assert engine.scheduler.blocks.num_used == 0
        own, cells = engine.runner.proposer.cache, engine.runner.cache
        assert len(own.layers) == 1
        assert own.layers[0].shape == cells.layers[0].shape  # under the target's block numbers


def test_a_draft_in_the_published_form_is_the_same_draft(tiny, target, tmp_path):
    """As SGLang's and vLLM's loaders take it: `layers.0.`, the whole vocabulary, no map, no embedding, nested ids."""
    draft = tiny.tiny_draft(target, slots=(2, 3), latent=True, draft_vocab_size=199)
    save_draft(tmp_path, draft, DraftRecord(TargetIdentity("a" * 64, "b" * 64, "c" * 64), Family.KIMI_K25, "0" * 64))
    (tmp_path / "slipstream.json").unlink()
    value = json.loads((tmp_path / "config.json").read_text())
    del value["eagle_aux_hidden_state_layer_ids"]
    value["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 3], "use_aux_hidden_state": True}
    (tmp_path / "config.json").write_text(json.dumps(value | {"model_type": "kimi_k2"}))
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in to_tensors(draft).items()}
    left_out = ("embed_tokens.weight", "d2t", "t2d")
    save_file({n: t for n, t in tensors.items() if n not in left_out}, tmp_path / "model.safetensors")
    of_target = {"target_num_layers": target.config.num_layers, "family": Family.KIMI_K25}
    loaded = load_draft(tmp_path, torch.float32, target_embedding=target.embed_tokens.weight, **of_target)
    assert loaded.config == draft.config
    ours, theirs = draft.state_dict(), loaded.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# ---- trained, converted, served, compared ----------------------------------------------------------------------------

SETTINGS = TrainingSettings(
    num_steps=STEPS,
    epochs=16,
    max_seconds=None,
    learning_rate=1e-2,
    warmup_fraction=0.1,
    weight_decay=0.0,
    grad_clip_norm=1.0,
    batch_tokens=512,
    step_loss_decay=0.8,
    seed=0,
    checkpoint_every_seconds=60.0,
    dtype="float32",
    device="cpu",
    hits_every_steps=4,
)


@pytest.fixture(scope="module")
def trained(tiny, made, target, plain, tmp_path_factory):
    """(training metrics, converted draft's directory): from the target's own answers, `init: target`."""
    out, directory = tmp_path_factory.mktemp("training"), tmp_path_factory.mktemp("draft")
    weights = TargetWeights.from_dir(made.directory, target.config.num_layers)
    assert "self_attn.kv_b_proj.weight" in weights.last_layer
    assert not [name for name in weights.last_layer if "mlp.experts" in name]
    conversations = []
    for answer in plain:
        ids = answer.prompt_ids + answer.token_ids
        states, teacher = capture_states(target, ids, SLOTS)
        start = len(answer.prompt_ids) - 1
        features = CapturePlan(SLOTS, target.config.num_layers).select(states)
        mask = torch.arange(len(ids)) > start
        conversations.append(Conversation(torch.tensor(ids), mask, features, teacher[start:], start))
    source = ConversationList(conversations)
    counts = torch.bincount(torch.cat([c.token_ids for c in conversations]), minlength=target.config.vocab_size)
    vocab = select_draft_vocab(counts, 120)
    fresh = tiny.tiny_draft(target, slots=SLOTS, latent=True, draft_vocab_size=120, fc_norm=True, norm_output=True)
    network = Eagle3Network(fresh.config)
    init_network(network, weights, vocab, "target", seed=0, source=source)
    teacher = Teacher(weights.final_norm.float(), weights.head.float(), target.config.rms_norm_eps, vocab.target_ids)
    Trainer(network, teacher, source, SETTINGS, out).run()
    record = DraftRecord(TargetIdentity.from_dir(made.directory), Family.KIMI_K25, "0" * 64)
    save_draft(directory, load_network(out / "checkpoint"), record, served_tokens=128)
    return read_metrics(out), directory


def test_training_lowers_the_loss(trained):
    metrics, _ = trained
    losses = [row["loss"] for row in metrics if "loss" in row]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    assert losses[-1] < math.log(120) < losses[0]  # of a draft that knows nothing of its 120 tokens
    last = [row["step_loss"] for row in metrics if "step_loss" in row]
    assert all(end < begin for begin, end in zip(last[0], last[-1], strict=True))  # of each unrolled step


def served_findings(target, prompts, directory, *faults) -> tuple[DraftFindings, list[list[int]]]:
    """What parity says of the served draft, and the answers."""
    network = load_draft(directory, target_embedding=target.embed_tokens.weight).eval()
    engine = Engine(target, config(STEPS), Eagle3Proposer(network, STEPS), SLOTS)
    inject(engine, parse_injections(faults))
    answers = engine.generate(prompts, GREEDY, trace=True)
    export, findings = load_draft(directory), DraftFindings(STEPS)
    plan = CapturePlan(SLOTS, target.config.num_layers)
    for answer in answers:
        networks = {"export": in_fp32(export)}
        compare_drafts(findings, answer.trace, networks, export, plan.select(answer.trace.states))
    return findings, [a.token_ids for a in answers]


def test_a_trained_converted_and_served_draft_passes_parity(target, prompts, plain, trained):
    findings, tokens = served_findings(target, prompts, trained[1])
    assert tokens == [a.token_ids for a in plain]
    worst = [step.worst.error for step in findings.errors[SERVER]]
    rounds = [step.rounds for step in findings.errors[SERVER]]
    print(f"draft logits of {rounds} rounds, worst error {worst}")
    assert min(rounds) > 10
    assert max(worst) < 1e-3
    assert findings.verdict(SERVER) == findings.verdict("export") == ""


@pytest.mark.parametrize("kind", ["feedback", "rope", "draft-kv"])
def test_a_draft_that_is_served_wrongly_fails_parity_and_changes_no_token(target, prompts, plain, trained, kind):
    findings, tokens = served_findings(target, prompts, trained[1], f"F19:kind={kind}")
    assert tokens == [a.token_ids for a in plain]
    assert findings.fault == "F19"
    assert findings.wrong(SERVER)
