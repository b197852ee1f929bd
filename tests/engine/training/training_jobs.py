"""What ranks run together in the tests of training over ranks: functions of (parallel, ...), results are pickled."""

import importlib.util
import time
from pathlib import Path

import torch

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.training.data import ConversationList, slot_counts
from slipstream.engine.training.evaluate import Evaluator
from slipstream.engine.training.follow import follow, lead
from slipstream.engine.training.ranks import Ranks
from slipstream.engine.training.trainer import Trainer

_SPEC = importlib.util.spec_from_file_location("draft_tools", Path(__file__).parents[1] / "draft_tools.py")
draft_tools = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(draft_tools)


class PartOf:
    """A source that lacks the states of some conversations, as a host that does not hold them."""

    def __init__(self, source, held):
        self._source, self._held, self.lengths = source, held, source.lengths

    def loss_mask(self, index):
        raise AssertionError("rank 0 tells what is supervised")

    def __getitem__(self, index):
        assert index in self._held, f"conversation {index} is not held here"
        return self._source[index]


def train(parallel, settings, out, conversations, options):
    return _train(parallel, settings, out, conversations, **options)


def _train(parallel, settings, out, conversations, *, nodes=None, holders=None, stop_at=None, harm=False, slow=False):
    """One training on the ranks of `parallel`. Returns what a rank has at its end.

    Args: nodes, holders: as of the trainer; stop_at: rank 0 stops after this step; harm: rank 1's weights are changed
    after the second step; slow: the clocks of all ranks but 0 stand still.
    """
    size, rank = parallel.size, parallel.rank
    nodes = nodes or (0,) * size
    ranks, source = Ranks(rank, size, nodes, parallel.group), ConversationList(conversations)
    found, real = [], Trainer._train_step
    evaluations, evaluate, clock = [], Evaluator.run, time.monotonic

    def step(self):
        figures = real(self)
        found.append(self)
        if harm and rank == 1 and self.step == 2:
            with torch.no_grad():
                next(iter(self.optimizer.masters.values())).flatten()[3] += 1e-6
        return figures

    def run(self, *args):
        evaluations.append(1)
        return evaluate(self, *args)

    Trainer._train_step, Evaluator.run = step, run
    if slow and rank:
        time.monotonic = lambda: 0.0
    try:
        if rank:
            held = (
                range(len(conversations))
                if holders is None
                else [i for i, hosts in enumerate(holders) if nodes[rank] in hosts]
            )
            follow(ranks, lambda plan: PartOf(source, set(held)), torch.device("cpu"))
            result = None
        else:
            network = draft_tools.make_network(dtype=settings.torch_dtype)
            teacher, counts = draft_tools.make_teacher(network), slot_counts(source, settings.num_steps)
            lead(ranks, network, teacher, source, settings, counts, holders)
            held_out = Evaluator(ConversationList(draft_tools.toy_conversations(3, 20)), teacher, settings.num_steps)
            options = {"ranks": ranks, "counts": counts, "holders": holders}
            trainer = Trainer(network, teacher, source, settings, Path(out), evaluator=held_out, **options)
            result = trainer.run(lambda: stop_at is not None and trainer.step >= stop_at)
    except SlipstreamError as error:
        return str(error)
    finally:
        Trainer._train_step, Evaluator.run, time.monotonic = real, evaluate, clock
    last = found[-1] if found else None
    return {
        "steps": last and last.step,
        "trained": len(found),
        "losses": result and result.loss,
        "masters": last and {name: master.detach().clone() for name, master in last.optimizer.masters.items()},
        "evaluations": len(evaluations),
        "evaluation": result and result.evaluation,
    }
