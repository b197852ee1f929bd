"""Run lengths on held-out conversations equal the reference's hits, answer by answer."""

import pytest
import torch

from slipstream.engine.acceptance import run_lengths_to_tau
from slipstream.engine.training.data import ConversationList
from slipstream.engine.training.evaluate import Evaluator
from slipstream.engine.training.loss import joint_hits

NUM_STEPS = 4


def reference_run_lengths(reference, draft_tools, network, teacher, conversation, answers):
    weights = draft_tools.hf_tensors(network)
    logits = reference.step_logits(weights, network.config, conversation.token_ids, conversation.features, NUM_STEPS)
    mask = reference.supervised(conversation.loss_mask, NUM_STEPS)
    states = torch.zeros(len(conversation.token_ids), draft_tools.HIDDEN)
    states[conversation.teacher_start :] = conversation.teacher
    _, hits = reference.losses(weights, logits, mask, states, teacher.final_norm, teacher.head, teacher.eps)
    runs = hits.int().cumprod(0).sum(0)
    return [runs[start - 1 : end - 2].tolist() for start, end in answers]


@pytest.fixture
def easy_teacher(draft_tools):
    """A network and a teacher whose greedy tokens are few, so that hits and runs do occur."""
    network = draft_tools.make_network()
    teacher = draft_tools.make_teacher(network)
    keep = network.to_target(torch.arange(0, network.config.draft_vocab_size, 10))
    with torch.no_grad():
        teacher.head[[i for i in range(draft_tools.VOCAB) if i not in keep.tolist()]] *= 0.02
        network.lm_head.weight[[i for i in range(network.config.draft_vocab_size) if i % 10]] *= 0.02
    return network, teacher


def test_run_lengths(reference, draft_tools, easy_teacher):
    network, teacher = easy_teacher
    answers = [[(4, 40)], [(3, 17), (20, 35)], [(6, 8)], [(8, 50)]]
    sizes = (40, 35, 9, 50)
    source = [draft_tools.make_conversation(i, *pair) for i, pair in enumerate(zip(sizes, answers, strict=True))]
    evaluation = Evaluator(ConversationList(source), teacher, NUM_STEPS, batch_tokens=90).run(network)
    expected = [
        runs
        for c, spans in zip(source, answers, strict=True)
        for runs in reference_run_lengths(reference, draft_tools, network, teacher, c, spans)
        if runs
    ]
    assert evaluation.run_lengths == expected
    assert {0, 1, 2} <= {length for runs in expected for length in runs}
    full = [length for runs in expected for i, length in enumerate(runs) if len(runs) - i >= NUM_STEPS]
    assert evaluation.slots == len(full)
    for k in range(1, NUM_STEPS + 1):
        share = sum(length >= k for length in full) / len(full)
        assert evaluation.joint_acceptance[k - 1] == pytest.approx(share)
    assert 1 < run_lengths_to_tau(evaluation.run_lengths, NUM_STEPS).accept_length < NUM_STEPS + 1
    shorter = Evaluator(ConversationList(source), teacher, NUM_STEPS).run(network, 2)
    assert shorter.run_lengths == [[min(length, 2) for length in runs] for runs in expected]


def test_greedy_tokens_outside_the_draft_vocabulary_are_misses(draft_tools, easy_teacher):
    network, teacher = easy_teacher
    inside = network.to_target(torch.arange(network.config.draft_vocab_size))
    outside = [i for i in range(draft_tools.VOCAB) if i not in inside.tolist()]
    source = ConversationList([draft_tools.make_conversation(1, 40, [(4, 40)])])
    assert Evaluator(source, teacher, 2).run(network).outside_share < 0.2
    teacher.head[inside] *= 0  # every greedy token is one that the draft cannot propose
    teacher.head[outside] = torch.randn(len(outside), draft_tools.HIDDEN)
    evaluation = Evaluator(source, teacher, 2).run(network)
    assert evaluation.outside_share > 0.9
    assert evaluation.joint_acceptance[0] <= 1 - evaluation.outside_share


def test_greedy_share_tells_foreign_states(draft_tools, easy_teacher):
    network, teacher = easy_teacher
    c = draft_tools.make_conversation(1, 40, [(4, 40)])
    c.token_ids[1:] = teacher.argmax(c.teacher[:-1])  # x_{p+1} is greedy after the state at p
    assert Evaluator(ConversationList([c]), teacher, 2).run(network).greedy_share == 1.0
    c.token_ids[:] = c.token_ids.flip(0)
    assert Evaluator(ConversationList([c]), teacher, 2).run(network).greedy_share < 0.9


def test_joint_hits_are_prefixes_not_products():
    hits = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [1, 0, 1, 1]]).bool()
    counts, slots = joint_hits(hits, torch.ones(3, 4).bool())
    assert (counts.tolist(), slots) == ([2, 1, 1], 4)
    supervised = torch.ones(3, 4).bool()
    supervised[2, 0] = False  # slot 0 has no room for three drafts
    counts, slots = joint_hits(hits, supervised)
    assert (counts.tolist(), slots) == ([1, 0, 0], 3)
