"""The fingerprint of an installed engine, as a person or a program reads it."""

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from slipstream.tasks.checks_machine import human_bytes
from slipstream.tasks.engine_fingerprint import Fingerprint, fingerprint, search_path


def show_fingerprint(name: str, python: Path | None, site_packages: Path | None, *, as_json: bool) -> bool:
    """Hashes and prints. Returns whether nothing speaks against it. Args: as for the command `fingerprint`."""
    search = None
    if site_packages is not None:
        search = [str(site_packages)]
    elif python is not None:
        search = search_path(python)
    with Progress(console=Console(stderr=True), transient=True, disable=as_json) as bar:
        task = bar.add_task(f"hashing {name}", total=None)
        found = fingerprint(name, search, lambda done, total: bar.update(task, completed=done, total=total))
    if as_json:
        print(json.dumps({**asdict(found), "problems": found.problems}, indent=2, default=str))
    else:
        _print(found)
    return not found.problems


def _print(found: Fingerprint) -> None:
    console = Console(highlight=False)
    console.print(Text(f"{found.name} {found.version} in {found.location}"), soft_wrap=True)
    console.print(
        f"  {found.files:,} files, {human_bytes(found.size_bytes)}; fingerprint {found.digest}", soft_wrap=True
    )
    if found.source:
        console.print(Text(f"  from {found.source}"), soft_wrap=True)
    for problem in found.problems:
        console.print(Text.assemble(("  F20 ", "bold red"), problem), soft_wrap=True)
    if not found.problems:
        console.print(Text("  every file is as it was released", "green"))
