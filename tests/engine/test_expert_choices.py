"""Whom rows went to, recorded beside the captured states, and the same path taken on purpose."""

from pathlib import Path

import pytest
import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.expert_choices import choices_of, experts_name, following, record_choices, routers
from slipstream.engine.loader import load_target
from slipstream.engine.runner import capture_states
from slipstream.engine.sampling_params import SamplingParams

KIMI = Path(__file__).parents[1] / "checkpoints" / "kimi.py"
IDS = list(range(5, 40))


@pytest.fixture(scope="module")
def directory(load_test_module, tmp_path_factory):
    return load_test_module(KIMI).synthesise(tmp_path_factory.mktemp("kimi") / "model", num_hidden_layers=3).directory


@pytest.fixture
def target(directory):
    return load_target(directory, torch.bfloat16)


def test_a_trace_says_whom_every_row_went_to_and_without_recording_nothing(tiny, target):
    """Prompts of several lengths and rounds of several rows, each against the router's own rule on that row's input."""
    config, slots = EngineConfig(num_steps=2, max_context_tokens=64), (1, 2)
    inputs: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {layer: [] for layer in routers(target)}
    for layer, router in routers(target).items():
        router.register_forward_hook(lambda _r, _a, out, layer=layer: inputs[layer].append((out.x, out.choice.ids)))
    params, prompts = SamplingParams(max_tokens=9, ignore_eos=True), [IDS, IDS[:7]]

    def traces():
        draft = tiny.tiny_draft(target, slots=slots)
        engine = Engine(target, config, Eagle3Proposer(draft, 2), capture_slots=slots)
        return [completion.trace for completion in engine.generate(prompts, params, trace=True)]

    assert all(choices_of(trace.states) == {} for trace in traces())
    record_choices(target)
    for parts in inputs.values():
        parts.clear()
    for trace in traces():
        chosen = choices_of(trace.states)
        assert set(chosen) == {1, 2}
        rows = len(trace.token_ids) - 1
        for layer, ids in chosen.items():
            assert ids.shape == (rows, 8)
            assert ids.dtype == torch.int32
            every = torch.cat([ids for _, ids in inputs[layer]]).tolist()  # padding and rejected rows, too
            assert all(row in every for row in ids.tolist())
    target(torch.tensor([[3]]), torch.tensor([[0]]), target.allocate_kv(2, 16).view(torch.tensor([[1]])))  # no slots


def states_and_choices(target, choices):
    with following(target, choices):
        states, teacher = capture_states(target, IDS, (0, 1, 2), prefill_chunk_tokens=16)
    return torch.cat([*states.values(), teacher])


def test_the_own_path_followed_is_the_own_path_bit_for_bit(target):
    free = states_and_choices(target, {})
    seen: dict[int, list[torch.Tensor]] = {layer: [] for layer in routers(target)}
    handles = [
        router.register_forward_hook(lambda _r, _a, out, layer=layer: seen[layer].append(out.choice.ids))
        for layer, router in routers(target).items()
    ]
    states_and_choices(target, {})
    for handle in handles:
        handle.remove()
    own = {layer: torch.cat(parts) for layer, parts in seen.items()}
    assert torch.equal(states_and_choices(target, own), free)
    other = {layer: ids.clone() for layer, ids in own.items()}
    other[2][20, 7] = next(e for e in range(16) if e not in own[2][20].tolist())
    went = states_and_choices(target, other)
    wrong = (went != free).any(1).nonzero()[:, 0].tolist()
    assert wrong == [3 * len(IDS) + 20]  # slot 3, that row: layer 2 is the last one
    assert torch.equal(states_and_choices(target, {}), free)  # it is over
    with pytest.raises(ValueError, match="32 rows came to layer 1, and 30 choices"):
        states_and_choices(target, {layer: ids[:30] for layer, ids in own.items()})


def test_a_dense_target_has_no_choices(tiny, tmp_path):
    target = load_target(tiny.save_tiny(tmp_path), torch.float32)
    assert routers(target) == {}
    forward = target.forward
    record_choices(target)
    assert target.forward == forward
    assert experts_name(3) == "experts_3"
