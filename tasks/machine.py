"""What a measurement depends on beside the deployment: the machine."""

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment


def describe_machine() -> dict[str, str | int]:
    """Processor, usable cores, system. Figures measured on one machine say nothing of another."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
    }


def machine_inputs(_: "Deployment") -> dict[str, str]:
    """The machine as an `external` input, so that a measurement is repeated on another one."""
    return {name: str(value) for name, value in describe_machine().items()}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
