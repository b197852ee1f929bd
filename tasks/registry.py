"""The stages in their order. Modules are imported when asked for: naming the stages must not load torch."""

from importlib import import_module

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.stage import Stage

NAMES = (
    "resolve",
    "regenerate",
    "extract",
    "train",
    "convert",
    "parity",
    "cleanup",
    "tune",
    "launch",
    "benchmark",
    "report",
)


def get_stage(name: str) -> Stage:
    """The stage of that name. Raises SlipstreamError for an unknown name."""
    if name not in NAMES:
        raise SlipstreamError(f"there is no stage {name!r}", expected=f"one of {', '.join(NAMES)}")
    return import_module(f"slipstream.tasks.{name}").STAGE


def all_stages() -> tuple[Stage, ...]:
    """Every stage, in the order in which they run."""
    return tuple(get_stage(name) for name in NAMES)
