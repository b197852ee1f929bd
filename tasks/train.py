"""Stage `train`: the draft, from stored states to a checkpoint and an honest prediction of its accept length.

Over several processes `run` starts them and tells what rank 0 tells, which runs the stage (`train`).

Writes checkpoint/ (the last one; a killed run goes on from it), metrics.jsonl, tensorboard/, plots/, evaluation.json:

    num_steps     drafts that were made at every held-out slot
    replayed      for K = 0..num_steps: accept length, A_k with counts, histogram (`engine.acceptance`)
    answers       run lengths of each held-out answer, from which any K up to num_steps can be replayed again
    outside_vocabulary, greedy_share, joint_acceptance_over_slots: see `describe_evaluation`
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.engine.acceptance import AcceptanceCounts, ConversationRuns, run_lengths_to_tau
from slipstream.engine.alignment import slot_mask
from slipstream.engine.capture import CapturePlan, slot_id
from slipstream.engine.chat import ChatTokenizer, mask_runs
from slipstream.engine.config import MAX_NUM_STEPS
from slipstream.engine.device import resolve_device
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.drafts.eagle3.tensor_checks import out_of_vocabulary_share
from slipstream.engine.drafts.eagle3.vocab import DraftVocab, count_tokens, select_draft_vocab
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.hidden_store import HiddenStateStore
from slipstream.engine.loader import load_target
from slipstream.engine.mask_check import check_slot_mask
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.store_manifest import StoreSpec
from slipstream.engine.teacher_check import TeacherReport, check_teacher
from slipstream.engine.training.data import slot_counts
from slipstream.engine.training.evaluate import Evaluation, Evaluator
from slipstream.engine.training.follow import lead
from slipstream.engine.training.init import TargetWeights, init_network
from slipstream.engine.training.log import plot_curves
from slipstream.engine.training.ranks import ALONE, Ranks
from slipstream.engine.training.settings import TrainingSettings
from slipstream.engine.training.store_source import StoreSource
from slipstream.engine.training.teacher import Teacher
from slipstream.engine.training.trainer import Trainer
from slipstream.tasks.coloured_sample import coloured_sample
from slipstream.tasks.conversations import CONVERSATIONS, ConversationRecord, read_conversations
from slipstream.tasks.derived import draft_config
from slipstream.tasks.extract import STORE, capture_plan, draft_plan, read_sample
from slipstream.tasks.facts import resolved_target
from slipstream.tasks.manifest import write_json
from slipstream.tasks.registry import get_stage
from slipstream.tasks.replayed import EVALUATION
from slipstream.tasks.stage import NOT_OF_THE_OUTPUT, StageContext
from slipstream.tasks.torchrun import processes_here
from slipstream.tasks.train_ranks import meeting_here, train_by_ranks
from slipstream.tasks.training_plots import plot_replayed

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

EVALUATED_STEPS = MAX_NUM_STEPS  # any K that the engine serves can be replayed


@dataclass(frozen=True)
class Inputs:
    """What training reads, checked.

    Args:
        plan: the draft's slots.
        store: hidden states, of this target, with these slots.
        records: id -> conversation, of all in the store.
        counts: split -> answered tokens by target id, [V] int64.
        vocab: the draft vocabulary, chosen on the train split.
        weights: of the target.
        teacher: what turns teacher states into the target's distribution.
        device: where training happens, and where weights and teacher are.
    """

    plan: CapturePlan
    store: HiddenStateStore
    records: dict[str, ConversationRecord]
    counts: dict[str, torch.Tensor]
    vocab: DraftVocab
    weights: TargetWeights
    teacher: Teacher
    device: torch.device

    def source(self, split: str) -> StoreSource:
        return StoreSource(self.store, self.store.conversation_ids(split), self.plan)


def run(context: StageContext, *, skip: Collection[str] = ()) -> dict[str, Any]:
    """Trains in this process, or in as many as `training.processes` asks for (`tasks/train_ranks.py`).

    Args and figures: as `train`.
    """
    training = context.config.training
    device, meeting = resolve_device(training.device), meeting_here()
    processes = processes_here(training.processes, device)
    if processes > 1 or meeting is not None:
        return train_by_ranks(context, processes, device, meeting, skip)
    return train(context, torch.device(device), skip=skip)


def train(
    context: StageContext,
    device: torch.device,
    ranks: Ranks = ALONE,
    holders: Sequence[Sequence[int]] | None = None,
    *,
    skip: Collection[str] = (),
) -> dict[str, Any]:
    """Checks what it reads (F2, F3, F17, F10, F7, in this order), trains, replays, plots. With several ranks: rank 0.

    Figures: slots, supervised_tokens and supervised_slots (train split), draft_vocab_size, outside_vocabulary, teacher,
    steps, seconds, loss, replayed (K -> accept length), joint_acceptance (A_k with counts, at training.num_steps),
    greedy_share, sample (a decoded conversation, rich markup).

    Args:
        context: of the stage.
        device: where this process trains.
        ranks: that train together.
        holders: the hosts that hold each training conversation; None: all.
        skip: faults whose checks are off (tests of the faults only).
    """
    config = context.config
    model_dir = resolved_target(context.workdir)
    model = ModelConfig.from_dir(model_dir)
    settings = TrainingSettings(**config.training.model_dump(exclude=set(NOT_OF_THE_OUTPUT["training"])))
    inputs = read_inputs(context, model_dir, model, device, skip)
    sample = check_masks(context, model_dir, inputs, skip)
    report = check_training_teacher(config, model_dir, inputs, skip)
    context.say(report.describe())

    network = Eagle3Network(draft_config(config, model, inputs.plan.slots), settings.torch_dtype).to(inputs.device)
    init_network(network, inputs.weights, inputs.vocab, config.draft.init, config.training.seed, inputs.source("train"))
    evaluator = Evaluator(inputs.source("holdout"), inputs.teacher, EVALUATED_STEPS, config.training.batch_tokens)
    source = inputs.source("train")
    supervised = slot_counts(source, settings.num_steps)
    lead(ranks, network, inputs.teacher, source, settings, supervised, holders)
    trainer = Trainer(
        network,
        inputs.teacher,
        source,
        settings,
        context.out,
        evaluator=evaluator,
        data_fingerprint=context.manifest("extract")["identity"],
        progress=context.progress,
        ranks=ranks,
        counts=supervised,
        holders=holders,
    )
    warn_of_idle_ranks(context, trainer)
    if trainer.step:
        context.say(f"goes on at step {trainer.step}, after {trainer.seconds:.0f} s of training")
    result = trainer.run()
    assert result.evaluation is not None  # run() without should_stop ends with one
    replayed, described = describe_evaluation(result.evaluation, inputs, settings.num_steps)
    write_json(context.out / EVALUATION, described)
    plots = context.out / "plots"
    plot_curves(context.out, plots)
    plot_replayed(replayed, plots)
    for counts in replayed[1 : settings.num_steps + 1]:
        joint = ", ".join(f"A_{j.step} {j.rate:.3f} ({j.hits}/{j.rounds})" for j in counts.joint)
        context.say(f"K = {counts.num_steps}: replayed accept length {counts.accept_length:.3f}; {joint}")
    warn_of_other_tokens(context, result.evaluation)
    return {
        "slots": list(inputs.plan.names),
        "train_conversations": len(inputs.store.conversation_ids("train")),
        "holdout_conversations": len(inputs.store.conversation_ids("holdout")),
        "supervised_tokens": inputs.store.num_supervised_tokens("train"),
        "supervised_slots": result.supervised_slots,
        "draft_vocab_size": network.config.draft_vocab_size,
        "outside_vocabulary": described["outside_vocabulary"],
        "teacher": report.to_dict(),
        "ranks": ranks.size,
        "steps": result.steps,
        "seconds": round(result.seconds, 1),
        "loss": result.loss,
        "replayed": {str(counts.num_steps): counts.accept_length for counts in replayed},
        "joint_acceptance": replayed[min(settings.num_steps, EVALUATED_STEPS)].to_dict()["joint"],
        "greedy_share": result.evaluation.greedy_share,
        "sample": sample,
    }


def read_inputs(
    context: StageContext, model_dir: Path, model: ModelConfig, device: torch.device, skip: Collection[str]
) -> Inputs:
    """Opens the store (F2, F3, F17: slots by name, target, tokenizer, template) and chooses the draft vocabulary."""
    config = context.config
    plan = capture_plan(config, model.num_layers)
    identity = TargetIdentity.from_dir(model_dir)
    dtype = getattr(torch, config.server.dtype)
    spec = StoreSpec.from_plan(plan, identity, model.hidden_size, dtype)
    store = HiddenStateStore(context.input("extract") / STORE, expect=spec, skip=skip)
    # The same as the configuration's, as the check above says; without it these are whatever was stored.
    stored = CapturePlan(tuple(slot_id(name) for name in store.spec.slots), model.num_layers)
    plan = draft_plan(config, stored)
    records = {r.id: r for r in read_conversations(context.input("regenerate") / CONVERSATIONS)}
    counts = {}
    for split in ("train", "holdout"):
        own = conversations_of(store, split, records)
        counts[split] = count_tokens([(torch.tensor(r.token_ids), r.mask) for r in own], model.vocab_size)
    vocab = select_draft_vocab(counts["train"], config.draft.draft_vocab_size or model.vocab_size)
    weights = TargetWeights.from_dir(model_dir, model.num_layers).to(device)
    teacher = Teacher(weights.final_norm, weights.head, model.rms_norm_eps, vocab.target_ids)
    return Inputs(plan, store, records, counts, vocab, weights, teacher, device)


def conversations_of(
    store: HiddenStateStore, split: str, records: Mapping[str, ConversationRecord]
) -> list[ConversationRecord]:
    """The conversations of a split of the store. Raises SlipstreamError when there is none, or one is unknown (F17)."""
    ids = store.conversation_ids(split)
    if not ids:
        raise SlipstreamError(
            f"the store has no conversation of the {split} split",
            expected="conversations to train on, and others to predict the accept length from",
            do="change data.holdout_fraction, or give more prompts",
        )
    unknown = [i for i in ids if i not in records]
    if unknown:
        raise SlipstreamError(
            f"the store has {len(unknown)} conversations that are not among those at hand: {unknown[:3]}",
            expected="the store of these conversations",
            do="run the extract stage again",
            fault="F17",
        )
    return [records[i] for i in ids]


def check_masks(context: StageContext, model_dir: Path, inputs: Inputs, skip: Collection[str]) -> str:
    """Tokens are those of the conversations, masks those of the template's answers, slots follow the labels (F17, F10).

    Returns a decoded conversation, its supervised tokens highlighted (rich markup), which is also shown.
    """
    tokenizer = ChatTokenizer(model_dir)
    shown: ConversationRecord | None = None
    for conversation_id in inputs.store.conversation_ids():
        record = inputs.records[conversation_id]
        states = inputs.store.read(conversation_id, token_ids=None if "F17" in skip else record.token_ids)
        if "F10" not in skip:
            spans = list(tokenizer.answer_spans(record.token_ids))
            for step in range(1, context.config.training.num_steps + 1):
                check_slot_mask(slot_mask(states.loss_mask, step), spans, step)
        if shown is None or len(record.token_ids) < len(shown.token_ids):
            shown = record
    assert shown is not None  # both splits hold one
    supervised = inputs.store.num_supervised_tokens("train")
    context.say(f"{supervised:,} of {inputs.store.num_tokens('train'):,} training tokens are supervised; {shown.id}:")
    sample = coloured_sample(tokenizer, shown.token_ids, shown.mask)
    context.say(sample, markup=True)
    return sample


def check_training_teacher(
    config: "Deployment", model_dir: Path, inputs: Inputs, skip: Collection[str]
) -> TeacherReport:
    """The very teacher that training asks gives the engine's own logits for the stored states (F7)."""
    target = load_target(model_dir, config.server.dtype, inputs.device)
    return check_teacher(target, read_sample(inputs.store, inputs.device), inputs.teacher.logits, skip=skip)


def describe_evaluation(
    evaluation: Evaluation, inputs: Inputs, trained_steps: int
) -> tuple[list[AcceptanceCounts], dict[str, Any]]:
    """(replayed counts for K = 0..EVALUATED_STEPS, the content of evaluation.json).

    outside_vocabulary: share of answered tokens without a draft id, by split; greedy: of the teacher's greedy tokens.
    greedy_share: share of held-out tokens that are the teacher's greedy token.
    joint_acceptance_over_slots: averaged over all slots. It does not predict serving; `replayed` does.
    """
    owners = answer_owners([inputs.records[i] for i in inputs.store.conversation_ids("holdout")])
    runs = [
        ConversationRuns(lengths, ended_by_limit=by_limit)
        for lengths, (_, by_limit) in zip(evaluation.run_lengths, owners, strict=True)
    ]
    replayed = [run_lengths_to_tau(runs, k, EVALUATED_STEPS) for k in range(EVALUATED_STEPS + 1)]
    outside = {split: out_of_vocabulary_share(counts, inputs.vocab.d2t) for split, counts in inputs.counts.items()}
    return replayed, {
        "num_steps": EVALUATED_STEPS,
        "trained_steps": trained_steps,
        "replayed": [counts.to_dict() for counts in replayed],
        "joint_acceptance_over_slots": evaluation.joint_acceptance,
        "slots": evaluation.slots,
        "greedy_share": evaluation.greedy_share,
        "outside_vocabulary": {**outside, "greedy": evaluation.outside_share},
        "answers": [
            {
                "conversation": record.id,
                "category": record.category,
                "ended_by_limit": run.ended_by_limit,
                "run_lengths": list(run.lengths),
            }
            for run, (record, _) in zip(runs, owners, strict=True)
        ],
    }


def answer_owners(records: Sequence[ConversationRecord]) -> list[tuple[ConversationRecord, bool]]:
    """For each answer with a supervised slot, in order: its conversation, and whether a length limit ended it.

    Only the last answer of a conversation can have been cut: the ones before were closed for the next turn.
    """
    owners = []
    for record in records:
        cut = record.finish_reason == "length"
        last = len(record.token_ids) - 2  # behind the last slot of an answer that reaches the end of the conversation
        runs = mask_runs(slot_mask(record.mask, 1))
        owners += [(record, cut and stop == last) for _, stop, on in runs if on]
    return owners


def warn_of_idle_ranks(context: StageContext, trainer: Trainer) -> None:
    """A batch is cut by conversations: with fewer of them than ranks some have nothing to do."""
    size, each = trainer.ranks.size, sum(map(len, trainer.plan)) / len(trainer.plan)
    if each < size:
        context.warn(
            f"a batch holds {each:.1f} conversations on average, fewer than the {size} ranks that share it: raise "
            "training.batch_tokens, or train with fewer processes"
        )


def warn_of_other_tokens(context: StageContext, evaluation: Evaluation) -> None:
    """Greedy answers consist of greedy tokens, near-ties apart; held-out ones are made at the first temperature."""
    greedy = context.manifest("regenerate")["config"]["data"]["temperatures"][0] == 0
    if greedy and evaluation.greedy_share < 0.98:
        context.warn(
            f"only {evaluation.greedy_share:.1%} of the held-out tokens are the teacher's greedy token, although the "
            "answers are greedy: were they made by another target?"
        )


STAGE = get_stage("train")
