"""The mark of a roll on one of its hosts: what served there when it began, until the roll ends well.

    <workdir>/before-roll/last-good/  as <workdir>/last-good was, by hard links; empty where nothing was launched

Every host has it before the first server is touched. A roll is begun, and ended or taken back, on all hosts together
(tasks/hosts/replicas.py); while the mark is there, stage restore goes back to it, and another roll keeps it.
"""

import shutil
from pathlib import Path

from slipstream.tasks.last_good import FOLDER, LastGood, link_or_copy, read_last_good

BEFORE = "before-roll"


def begin_roll(workdir: Path) -> None:
    """Notes what serves now; what an interrupted roll noted stays. Appears in one step."""
    mark, part = workdir / BEFORE, workdir / f"{BEFORE}.partial"
    if mark.is_dir():
        return
    shutil.rmtree(part, ignore_errors=True)
    if (workdir / FOLDER).is_dir():
        shutil.copytree(workdir / FOLDER, part / FOLDER, copy_function=link_or_copy)
    else:
        (part / FOLDER).mkdir(parents=True)
    part.rename(mark)


def in_roll(workdir: Path) -> bool:
    """Whether a roll has begun here that has not ended."""
    return (workdir / BEFORE).is_dir()


def before_roll(workdir: Path) -> LastGood | None:
    """The last good server when the roll began; None where there was none. Raises as `read_last_good`."""
    return read_last_good(workdir / BEFORE)


def back_before_roll(workdir: Path) -> None:
    """Makes what served before the roll what shall serve, and ends the roll. Who dies in between may do it again."""
    noted = workdir / BEFORE / FOLDER
    if noted.is_dir():
        shutil.rmtree(workdir / FOLDER, ignore_errors=True)
        noted.rename(workdir / FOLDER)
    end_roll(workdir)


def end_roll(workdir: Path) -> None:
    """Nothing goes back to what was before."""
    shutil.rmtree(workdir / BEFORE, ignore_errors=True)
