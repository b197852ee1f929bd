"""The stages at a glance, in their order: what each reads, and which settings and outside files decide its output.

They are declared here, apart from the code that runs them, so that `slipstream plan` can tell what is done and what is
needed within a second, without torch. A stage's module (`slipstream.tasks.NAME`) holds its `run`, and is loaded when it
runs. Whoever changes what a stage writes raises its version here.
"""

import sys
from collections.abc import Callable
from difflib import SequenceMatcher
from importlib import import_module
from typing import TYPE_CHECKING, Any

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.facts import HOLDOUT, prompts_path
from slipstream.tasks.machine import machine_inputs
from slipstream.tasks.manifest import sha256_files
from slipstream.tasks.stage import Stage, StageContext
from slipstream.tasks.target_sources import local_files

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment


class UnknownStage(SlipstreamError):
    """A stage that does not exist: a wrong command line."""

    exit_code = 2


# What the sizes and costs of a served round depend on.
_SERVED = (
    "server.dtype",
    "server.device",
    "server.max_context_tokens",
    "server.block_size_tokens",
    "server.prefill_chunk_tokens",
    "server.tensor_parallel_size",
)
_HELD_OUT = ("data.prompts", "data.holdout_fraction", "data.seed")


def _run(name: str) -> Callable[[StageContext], dict[str, Any]]:
    def run(context: StageContext) -> dict[str, Any]:
        module = import_module(f"slipstream.tasks.{name}")
        torch, threads = sys.modules.get("torch"), context.config.host.threads
        if torch is not None and threads is not None:  # a stage that computes has loaded torch by now
            torch.set_num_threads(threads)
        return module.run(context)

    return run


def _data_prompts(deployment: "Deployment") -> dict[str, str]:
    return sha256_files([prompts_path(deployment.data.prompts)])


def _benchmark_prompts(deployment: "Deployment") -> dict[str, str]:
    name = deployment.benchmark.prompts
    return sha256_files([prompts_path(deployment.data.prompts if name == HOLDOUT else name)])


def _benchmark_prompts_and_machine(deployment: "Deployment") -> dict[str, str]:
    return {**_benchmark_prompts(deployment), **machine_inputs(deployment)}


STAGES = (
    Stage(
        name="resolve",
        version=1,
        needs=(),
        # The gate is not here: it decides whether the run goes on, not what is written, and the report judges the
        # recorded figure again. A changed bound must not make everything downstream anew.
        config_sections=("target",),
        run=_run("resolve"),
        external=local_files,
    ),
    Stage(
        name="regenerate",
        version=1,
        needs=("resolve",),
        config_sections=("data", "server.dtype", "server.device", "server.max_context_tokens"),
        run=_run("regenerate"),
        external=_data_prompts,
    ),
    Stage(
        name="extract",
        version=1,
        needs=("resolve", "regenerate"),
        config_sections=("capture", "server.dtype", "server.device"),
        run=_run("extract"),
    ),
    Stage(
        name="train",
        version=1,
        needs=("resolve", "regenerate", "extract"),
        config_sections=("capture", "draft", "training", "server.dtype", "server.max_context_tokens"),
        run=_run("train"),
    ),
    Stage(
        name="convert",
        version=1,
        needs=("resolve", "regenerate", "train"),
        config_sections=("server.dtype", "server.max_context_tokens"),
        run=_run("convert"),
    ),
    Stage(
        name="parity",
        version=1,
        needs=("resolve", "regenerate", "train", "convert"),
        config_sections=(
            "capture",
            "draft.slots",
            "speculation",
            "server",
            "benchmark",
            "gates",
            "data.max_new_tokens",
        ),
        run=_run("parity"),
        external=_benchmark_prompts,
    ),
    Stage(
        name="cleanup",
        version=1,
        needs=(),
        config_sections=("server.host", "server.port"),
        run=_run("cleanup"),
        cached=False,
        needs_room=False,  # what it stops may be what fills the disk
    ),
    Stage(
        name="tune",
        version=1,
        needs=("resolve", "train", "convert"),
        config_sections=(
            "speculation",
            *_SERVED,
            "host.threads",
            "benchmark.prompts",
            "benchmark.num_prompts",
            "benchmark.concurrency",
            "benchmark.seed",
            *_HELD_OUT,
        ),
        run=_run("tune"),
        external=_benchmark_prompts_and_machine,
    ),
    Stage(
        name="launch",
        version=1,
        needs=("resolve", "convert", "tune"),
        config_sections=("server", "speculation", "capture", "draft.slots", "host.threads"),
        run=_run("launch"),
        cached=False,
    ),
    Stage(
        name="benchmark",
        version=1,
        needs=("resolve", "train", "convert", "tune", "launch"),
        config_sections=(
            "benchmark",
            "server.max_running_requests",
            "server.choose_steps",
            *_SERVED,
            "host.threads",
            *_HELD_OUT,
        ),
        run=_run("benchmark"),
        external=_benchmark_prompts_and_machine,
    ),
    Stage(
        name="report",
        version=1,
        needs=("resolve", "regenerate", "extract", "train", "convert", "parity", "tune", "launch", "benchmark"),
        config_sections=("gates", "target.source"),
        run=_run("report"),
    ),
)
# Not of the lifecycle: run on demand, by flows that have to take a launch back, and before a replica is replaced.
RESTORE = Stage(
    name="restore",
    version=1,
    needs=(),
    config_sections=("server.host", "server.port"),
    run=_run("restore"),
    cached=False,
)
DRAIN = Stage(
    name="drain",
    version=1,
    needs=(),
    config_sections=("roll",),
    run=_run("drain"),
    cached=False,
)
NAMES = tuple(stage.name for stage in STAGES)
_BY_NAME = {stage.name: stage for stage in STAGES}


def get_stage(name: str) -> Stage:
    """The stage of that name. Raises UnknownStage, which names the nearest one."""
    if name in (RESTORE.name, DRAIN.name):
        return RESTORE if name == RESTORE.name else DRAIN
    if name not in NAMES:
        near = max(
            (*NAMES, RESTORE.name, DRAIN.name), key=lambda known: SequenceMatcher(None, name.lower(), known).ratio()
        )
        raise UnknownStage(
            f"there is no stage {name!r}",
            expected=f"one of {', '.join(NAMES)}, {RESTORE.name} or {DRAIN.name}",
            do=f"the nearest one is {near}: `slipstream stage {near} CONFIG`",
        )
    return _BY_NAME[name]


def is_registered(stage: Stage) -> bool:
    """Whether a host that is only told its name runs this very stage."""
    return stage in STAGES or stage in (RESTORE, DRAIN)


def all_stages() -> tuple[Stage, ...]:
    """Every stage of the lifecycle, in the order in which they run."""
    return STAGES
