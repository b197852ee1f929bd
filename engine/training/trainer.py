"""The training run of a draft."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.training.checkpoint import config_dict, load_checkpoint, save_checkpoint
from slipstream.engine.training.data import Batch, ConversationSource, plan_batches, supervised_indices
from slipstream.engine.training.evaluate import Evaluation, Evaluator
from slipstream.engine.training.log import MetricsLog
from slipstream.engine.training.loss import TttLoss, ttt_loss
from slipstream.engine.training.optimizer import MasterAdamW
from slipstream.engine.training.prefetch import BatchStream
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
        out: directory for `checkpoint/`, `metrics.jsonl` and `tensorboard/`; a run that was cut goes on from there.
        evaluator: held-out conversations; evaluated `evaluations` times, evenly spread, the last time at the end.
        data_fingerprint: identifies the conversations; a checkpoint made from others is refused.
        progress: called after every step.

    Settings, seed and number of steps give the same bits again on the same machine and software, also over a kill; on a
    GPU as far as its matrix library does (the rest sums in a fixed order, or adds zeros only). Another device rounds
    otherwise, and a run that its seconds end depends on the clock.

    Raises SlipstreamError when no slot is supervised (F10), when the features do not fit the draft, or when the
    checkpoint in `out` belongs to another run.
    """

    def __init__(
        self,
        network: Eagle3Network,
        teacher: Teacher,
        source: ConversationSource,
        settings: TrainingSettings,
        out: Path,
        *,
        evaluator: Evaluator | None = None,
        evaluations: int = 3,
        data_fingerprint: str = "",
        progress: Progress | None = None,
    ) -> None:
        self.network, self.teacher, self.source, self.settings, self.out = network, teacher, source, settings, out
        self.evaluator, self.evaluations, self.progress = evaluator, evaluations, progress
        self.indices, self.supervised = supervised_indices(source)
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
        self._batches: Iterator[Batch] = iter(())
        self._restore()

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> TrainingResult:
        """Train to the end of the run, or until `should_stop()` (asked after every step) says so.

        A checkpoint is written at least every `checkpoint_every_seconds`, and at the end either way.
        """
        started = time.monotonic() - self.seconds
        saved, stopped = time.monotonic(), False
        device = self.network.fc.weight.device
        rest = self.plan[self.step :]
        with (
            MetricsLog(self.out, self.step) as log,
            BatchStream(self.source, rest, self.settings.num_steps, device) as batches,
        ):
            self._batches = iter(batches)
            while self._fraction() < 1 and not stopped:
                figures = self._train_step()
                self.seconds = time.monotonic() - started
                self._evaluate_if_due(figures)
                self.seconds = time.monotonic() - started
                log.write(self.step, {**figures, "seconds": self.seconds})
                if self.progress:
                    self.progress(min(self._fraction(), 1.0), 1.0, step=self.step, loss=self.loss, **_brief(figures))
                stopped = should_stop()
                if time.monotonic() - saved > self.settings.checkpoint_every_seconds:
                    self._save()
                    saved = time.monotonic()
            self._save()
            evaluation = None
            if self._fraction() >= 1 and self.evaluator:
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
        settings = self.settings
        rate = settings.rate_at(self._fraction(ahead=0.5))
        batch = next(self._batches)
        with_hits = self.step % settings.hits_every_steps == 0
        result = ttt_loss(
            self.network, batch, self.teacher, settings.num_steps, settings.step_loss_decay, with_hits=with_hits
        )
        result.total.backward()
        norm = self.optimizer.step(rate)
        # The one place where the host waits for the device; a bad step has spoilt the weights in memory, not on disk.
        self.loss, gradient_norm, *steps = torch.stack((result.total.detach(), norm, *result.steps)).tolist()
        if not math.isfinite(self.loss):
            raise SlipstreamError(
                f"the loss is {self.loss} at step {self.step + 1}",
                expected="a finite loss",
                do="lower training.learning_rate and delete the stage's partial directory",
            )
        self.step += 1
        return _figures(result, self.loss, steps, gradient_norm, rate)

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

    def _save(self) -> None:
        trained = self.optimizer.masters
        frozen = {n: t.detach() for n, t in self.network.state_dict().items() if n not in trained}
        state = {
            **self._identity,
            "step": self.step,
            "seconds": self.seconds,
            "evaluated": self.evaluated,
            "loss": self.loss,
            "random_state": torch.get_rng_state(),
            "optimizer": self.optimizer.state_dict(),
            "frozen": frozen,
        }
        save_checkpoint(self.out / "checkpoint", state)

    def _restore(self) -> None:
        state = load_checkpoint(self.out / "checkpoint")
        if state is None:
            return
        changed = [k for k, v in self._identity.items() if state[k] != v]
        if changed:
            raise SlipstreamError(
                f"the checkpoint in {self.out / 'checkpoint'} was made with another {' and '.join(changed)}: "
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


def _figures(result: TttLoss, loss: float, steps: list[float], norm: float, rate: float) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "loss": loss,
        "step_loss": steps,
        "supervised_slots": result.counts.tolist(),
        "gradient_norm": norm,
        "learning_rate": rate,
    }
    if result.joint is not None and result.complete:
        figures["joint_acceptance"] = (result.joint / result.complete).tolist()
    return figures


def _brief(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures that a progress line has room for."""
    names = ("learning_rate", "supervised_slots", "joint_acceptance", "heldout_joint_acceptance")
    return {n: figures[n] for n in names if n in figures}
