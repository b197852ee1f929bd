"""The training run of a draft."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.training.checkpoint import config_dict, load_checkpoint, save_checkpoint
from slipstream.engine.training.data import Batch, ConversationSource, plan_batches, slot_counts, supervised_indices
from slipstream.engine.training.evaluate import Evaluation, Evaluator
from slipstream.engine.training.log import MetricsLog
from slipstream.engine.training.loss import TttLoss, ttt_loss
from slipstream.engine.training.optimizer import MasterAdamW
from slipstream.engine.training.prefetch import BatchStream
from slipstream.engine.training.ranks import ALONE, Ranks, cut_batch
from slipstream.engine.training.settings import TrainingSettings
from slipstream.engine.training.teacher import Teacher


class Progress(Protocol):
    """Called after every step: `done` of `total` (shares of the run, 0..1) and the figures of the moment."""

    def __call__(self, done: float, total: float, **fields: Any) -> None: ...


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Args:
    finished: false when `should_stop` ended the run; it then goes on from the checkpoint.
    steps: optimiser steps done, earlier parts of the run included.
    seconds: training time, likewise.
    supervised_slots: slots with a loss at step 1, in all conversations.
    skipped_conversations: those without any.
    loss: of the last step, nats.
    evaluation: of the finished draft, where there is an evaluator.
    """

    finished: bool
    steps: int
    seconds: float
    supervised_slots: int
    skipped_conversations: int
    loss: float
    evaluation: Evaluation | None


class Trainer:
    """Trains a draft from stored conversations.

    Args:
        network: initialised, in `settings.torch_dtype`; trained in place. Parameters without `requires_grad` stay.
        teacher: the target's final norm and head.
        source: training conversations.
        settings: how.
        out: directory for `checkpoint/`, `metrics.jsonl` and `tensorboard/`; a run that was cut goes on from
            there. None on every rank but 0.
        evaluator: held-out conversations; evaluated `evaluations` times, evenly spread, the last time at the end.
        data_fingerprint: identifies the conversations; a checkpoint made from others is refused.
        progress: called after every step.
        ranks: that each compute a part of every batch. The others make their trainer by `follow.follow`, and need
            neither evaluator nor progress: rank 0 alone evaluates and writes.
        counts: [n, K], `slot_counts` of the source, where it is known already.
        holders: the hosts that hold each conversation (`ranks.cut_batch`); None: every host holds all.

    Settings, seed, number of steps and of ranks give the same bits again on the same machine and software, also over a
    kill; on a GPU as far as its matrix library does (the rest sums in a fixed order, or adds zeros only). Another
    device, or number of ranks, rounds otherwise, and a run that its seconds end depends on rank 0's clock. A checkpoint
    goes on with any number of ranks.

    Raises SlipstreamError when no slot is supervised (F10), when the features do not fit the draft, or when the
    checkpoint in `out` belongs to another run.
    """

    def __init__(
        self,
        network: Eagle3Network,
        teacher: Teacher,
        source: ConversationSource,
        settings: TrainingSettings,
        out: Path | None,
        *,
        evaluator: Evaluator | None = None,
        evaluations: int = 3,
        data_fingerprint: str = "",
        progress: Progress | None = None,
        ranks: Ranks = ALONE,
        counts: torch.Tensor | None = None,
        holders: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.network, self.teacher, self.source, self.settings, self.out = network, teacher, source, settings, out
        self.evaluator, self.evaluations, self.progress = evaluator, evaluations, progress
        self.ranks, self._holders = ranks, holders
        self._counts = slot_counts(source, settings.num_steps) if counts is None else counts
        self.indices, self.supervised = supervised_indices(self._counts)
        if ranks.leads:
            self._check_features()
        self._identity = {
            "config": config_dict(network.config),
            "settings": dataclasses.asdict(settings),
            "data": data_fingerprint or f"{len(source.lengths)} conversations, {sum(source.lengths)} tokens",
        }
        self.plan = [
            batch
            for epoch in range(settings.epochs)
            for batch in plan_batches(self.indices, source.lengths, settings.batch_tokens, settings.seed, epoch)
        ]
        self.optimizer = MasterAdamW(network, settings.weight_decay, settings.grad_clip_norm)
        self.step, self.seconds, self.evaluated, self.loss = 0, 0.0, 0, float("nan")
        self._batches: Iterator[Batch | None] = iter(())
        if out is not None:
            self._restore(out / "checkpoint")
        self._begin_alike()

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> TrainingResult:
        """Train to the end of the run, or until `should_stop()` (asked after every step) says so.

        A checkpoint is written at least every `checkpoint_every_seconds`, and at the end either way.
        """
        started = time.monotonic() - self.seconds
        saved, stopped, due = time.monotonic(), False, False
        device = self.network.fc.weight.device
        rest = (self._own_part(members) for members in self.plan[self.step :])
        evaluation = None
        with (
            nullcontext() if self.out is None else MetricsLog(self.out, self.step) as log,
            BatchStream(self.source, rest, self.settings.num_steps, device) as batches,
        ):
            self._batches = iter(batches)
            while self._fraction() < 1 and not stopped:
                figures = self._train_step()
                if log is not None:
                    self.seconds = time.monotonic() - started
                    self._evaluate_if_due(figures)
                    self.seconds = time.monotonic() - started
                    log.write(self.step, {**figures, "seconds": self.seconds})
                    if self.progress:
                        done = min(self._fraction(), 1.0)
                        self.progress(done, 1.0, step=self.step, loss=self.loss, **_brief(figures))
                    stopped = should_stop()
                    due = time.monotonic() - saved > self.settings.checkpoint_every_seconds
                # The clock and whoever stops the run are rank 0's: all ranks end after the same step.
                self.seconds, stop, save = self.ranks.told((self.seconds, stopped, due))
                stopped, due = bool(stop), bool(save)
                if due:
                    self._save()
                    saved = time.monotonic()
            self._save()
            if self._fraction() >= 1 and self.evaluator and log is not None:
                evaluation = self.evaluator.run(self.network)
                log.write(self.step, {"heldout_joint_acceptance": evaluation.joint_acceptance})
        return TrainingResult(
            finished=self._fraction() >= 1,
            steps=self.step,
            seconds=self.seconds,
            supervised_slots=self.supervised,
            skipped_conversations=len(self.source.lengths) - len(self.indices),
            loss=self.loss,
            evaluation=evaluation,
        )

    def _train_step(self) -> dict[str, Any]:
        """One optimiser step on the plan's next batch. Returns its figures."""
        settings, num_steps = self.settings, self.settings.num_steps
        rate = settings.rate_at(self._fraction(ahead=0.5))
        whole = self._counts[self.plan[self.step]].sum(0).tolist()  # [n, K] -> [K]
        batch = next(self._batches)
        with_hits = self.step % settings.hits_every_steps == 0
        result = None
        if batch is not None:
            result = ttt_loss(
                self.network, batch, self.teacher, num_steps, settings.step_loss_decay, with_hits=with_hits, whole=whole
            )
            result.total.backward()
        norm = self.optimizer.step(rate, self.ranks.sum_)
        gradient_norm, own = _numbers(result, norm, num_steps)
        sums = self.ranks.summed(own)
        self.loss, steps, (*joint, complete) = sums[0], sums[1 : 1 + num_steps], sums[1 + num_steps :]
        if not math.isfinite(self.loss):
            raise SlipstreamError(
                f"the loss is {self.loss} at step {self.step + 1}",
                expected="a finite loss",
                do="lower training.learning_rate and delete the stage's partial directory",
            )
        self.step += 1
        figures: dict[str, Any] = {
            "loss": self.loss,
            "step_loss": steps,
            "supervised_slots": whole,
            "gradient_norm": gradient_norm,
            "learning_rate": rate,
        }
        if complete:
            figures["joint_acceptance"] = [count / complete for count in joint]
        return figures

    def _own_part(self, members: Sequence[int]) -> Sequence[int]:
        """What of a batch this rank computes."""
        if self.ranks.size == 1:
            return members
        return cut_batch(members, self.source.lengths, self._holders, self.ranks.nodes)[self.ranks.rank]

    def _fraction(self, ahead: float = 0.0) -> float:
        """Share of the run that is done: by steps or by seconds, whichever is further on."""
        by_steps = (self.step + ahead) / len(self.plan)
        limit = self.settings.max_seconds
        return by_steps if limit is None else max(by_steps, self.seconds / limit)

    def _evaluate_if_due(self, figures: dict[str, Any]) -> None:
        """Evaluate where the run passes the next of its evenly spread marks; the last mark is left to the end."""
        due = (self.evaluated + 1) / self.evaluations
        if self.evaluator and due <= self._fraction() < 1:
            self.evaluated += 1
            evaluation = self.evaluator.run(self.network, self.settings.num_steps)
            figures["heldout_joint_acceptance"] = evaluation.joint_acceptance

    def _check_features(self) -> None:
        width = self.source[self.indices[0]].features.shape[-1]
        config = self.network.config
        if width != config.feature_size:
            raise SlipstreamError(
                f"features are {width} wide",
                expected=f"{config.feature_size}: slots {config.slots}, {config.target_hidden_size} each",
                do="extract the draft's slots",
                fault="F2",
            )

    def _begin_alike(self) -> None:
        """Every rank begins with rank 0's weights, moments and place in the run."""
        ranks = self.ranks
        if ranks.size == 1:
            return
        numbers = ranks.told((self.step, self.seconds, self.evaluated, self.loss))
        self.step, self.seconds, self.evaluated, self.loss = int(numbers[0]), numbers[1], int(numbers[2]), numbers[3]
        for tensor in self.optimizer.tensors(moments=self.step > 0):
            ranks.broadcast_(tensor)
        self.optimizer.write_back()
        for tensor in self._frozen().values():
            ranks.broadcast_(tensor)

    def _frozen(self) -> dict[str, torch.Tensor]:
        """What of the network is not trained, by name."""
        state = self.network.state_dict().items()
        return {name: tensor.detach() for name, tensor in state if name not in self.optimizer.masters}

    def _check_alike(self) -> None:
        """Raises SlipstreamError when the ranks' weights are not the same bits."""
        sums = [tensor.view(torch.int32).sum() for tensor in self.optimizer.tensors(moments=False)]  # in int64: exact
        checks = [int(check) for check in self.ranks.gathered(torch.stack(sums).sum()[None].cpu())]
        other = [rank for rank, check in enumerate(checks) if check != checks[0]]
        if other:
            raise SlipstreamError(
                f"after step {self.step} the weights of ranks {other} are not those of rank 0",
                expected="the same bits on every rank: each adds the same gradients in the same order",
                do="the last checkpoint is whole: train on from there, on other cards if it comes again",
                runbook="run-failed.md",
            )

    def _save(self) -> None:
        """Writes the checkpoint, where this is rank 0, once all ranks have shown the same weights."""
        self._check_alike()
        if self.out is None:
            return
        state = {
            **self._identity,
            "step": self.step,
            "seconds": self.seconds,
            "evaluated": self.evaluated,
            "loss": self.loss,
            "random_state": torch.get_rng_state(),
            "optimizer": self.optimizer.state_dict(),
            "frozen": self._frozen(),
        }
        save_checkpoint(self.out / "checkpoint", state)

    def _restore(self, directory: Path) -> None:
        state = load_checkpoint(directory)
        if state is None:
            return
        changed = [k for k, v in self._identity.items() if state[k] != v]
        if changed:
            raise SlipstreamError(
                f"the checkpoint in {directory} was made with another {' and '.join(changed)}: "
                + "; ".join(f"{k} {state[k]}, now {self._identity[k]}" for k in changed),
                expected="the run that it belongs to",
                do="delete the directory to train anew, or go back to its settings",
                fault="F17",
            )
        self.optimizer.load_state_dict(state["optimizer"])
        self.network.load_state_dict(state["frozen"], strict=False)
        self.step, self.seconds, self.evaluated = state["step"], state["seconds"], state["evaluated"]
        self.loss = state["loss"]
        torch.set_rng_state(state["random_state"])


def _numbers(result: TttLoss | None, norm: torch.Tensor, num_steps: int) -> tuple[float, list[float]]:
    """(the gradient's norm, the loss, those of the K steps, K joint hits and of how many): here the host waits for the
    device, once a step. A bad step has spoilt the weights in memory, not on disk."""
    if result is None:  # a rank without a part of this batch
        return float(norm), [0.0] * (2 * num_steps + 2)
    gradient_norm, *losses = torch.stack((norm, result.total.detach(), *result.steps)).tolist()
    hits = [0] * (num_steps + 1) if result.joint is None else [*result.joint.tolist(), result.complete]
    return gradient_norm, [*losses, *hits]


def _brief(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures that a progress line has room for."""
    names = ("learning_rate", "supervised_slots", "joint_acceptance", "heldout_joint_acceptance")
    return {n: figures[n] for n in names if n in figures}
