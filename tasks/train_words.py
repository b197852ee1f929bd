"""What the ranks of a training and torchrun say, line by line: handed on to a listener, or kept for an error."""

import json
import signal
from collections.abc import Mapping
from typing import Any

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.proc_stat import process_start_time
from slipstream.tasks.reporting import Reporter

LOST_OTHERS = "lost the ranks of another host while it trained"
EXIT_PEER_LOST = 4  # of a rank that ended because another one did
LAST_LINES = 30
STAGE = "train"


class Heard:
    """Lines of one host's ranks.

    Args:
        reporter: told what rank 0 tells.
        where: the host, for errors; "" is this one.

    Attributes:
        figures: of the stage, once it has ended well.
        ranks: what each rank said of itself at its start: pid, size (ranks in all).
        other: the last lines that are no message.
    """

    def __init__(self, reporter: Reporter, where: str = "") -> None:
        self._reporter, self._where = reporter, where
        self.figures: dict[str, Any] | None = None
        self.ranks: dict[int, dict[str, Any]] = {}
        self.other: list[str] = []
        self._failed: dict[str, Any] | None = None
        self._ended: list[dict[str, Any]] = []

    def line(self, text: str) -> bool:
        """Takes a line. Returns whether it was a message."""
        try:
            event = json.loads(text)
            kind = event.pop("event")
        except (ValueError, KeyError, AttributeError, TypeError):
            self.other = [*self.other, text.rstrip("\n")][-LAST_LINES:]
            return False
        event.pop("stage", None)
        if kind == "progress":
            self._reporter.progress(STAGE, event.pop("done"), event.pop("total"), event)
        elif kind == "say":
            self._reporter.say(STAGE, event["text"], markup=event["markup"])
        elif kind == "warn":
            self._reporter.warn(STAGE, event["text"])
        elif kind == "rank":
            self.ranks[event["rank"]] = {**event, "start_time": process_start_time(event["pid"])}
        elif kind == "result":
            self.figures = event["figures"]
        elif kind == "rank_failed":
            self._failed = self._failed or event
        elif kind == "rank_ended":
            self._ended.append(event)
        return True

    @property
    def culprit(self) -> bool:
        """Whether a rank here ended by itself, and not because another one had."""
        return self._failed is not None or bool(self._own)

    @property
    def _own(self) -> list[dict[str, Any]]:
        """Ranks that ended by themselves; those last that torchrun may have ended for another's sake."""
        found = [ended for ended in self._ended if ended["exit_code"] != EXIT_PEER_LOST]
        return sorted(found, key=lambda ended: bool(ended["exit_code"] == -signal.SIGTERM))

    def error(self) -> SlipstreamError:
        """Why the training ended: what a rank or torchrun's own start raised, the rank that died, or that lost it."""
        if self._failed is not None:
            return self._raised(self._failed)
        for ended in self._own:
            code = ended["exit_code"]
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return self._of_rank(ended["rank"], f"{how} while it trained")
        if self._ended:
            return self._of_rank(self._ended[0]["rank"], LOST_OTHERS)
        last = "\n".join(self.other[-15:]) or "none"
        return SlipstreamError(
            f"torchrun ended without a word{self._where}; its last lines:\n{last}",
            expected="the ranks' result",
            do="give the same command again: it goes on from the last checkpoint",
            runbook="run-failed.md",
        )

    def _raised(self, failed: Mapping[str, Any]) -> SlipstreamError:
        words, rank = failed["error"], failed["rank"]
        if isinstance(words, str):
            return self._of_rank(rank, f"failed: {words}")
        found = words["found"]  # of rank 0 it is the stage's own error, of none that of torchrun's start
        named = f"{self._name(rank)}: {found}" if rank else f"{found}{self._where if rank is None else ''}"
        return SlipstreamError(**{**words, "found": named})

    def _of_rank(self, rank: int, how: str) -> SlipstreamError:
        return SlipstreamError(
            f"{self._name(rank)} {how}",
            expected="all ranks alive: each computes a part of every batch",
            do="see its last words above; SIGKILL that nobody sent is the kernel short of memory. The same command "
            "goes on from the last checkpoint",
            runbook="run-failed.md",
        )

    def _name(self, rank: int) -> str:
        known = self.ranks.get(rank)
        return f"training rank {rank}" + (
            f" of {known['size']} (pid {known['pid']}){self._where}" if known else self._where
        )
