"""Arguments that several commands of the command line share."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The deployment file (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one value, such as training.epochs=2; repeatable."),
]
Workdir = Annotated[
    Path | None, typer.Option("--workdir", help="Directory of the stages' outputs; default: host.workdir of CONFIG.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, for programs.")]
EngineVersion = Annotated[
    str | None,
    typer.Option("--engine-version", metavar="VERSION", help="Release of the other engine, such as 0.5.14."),
]
Force = Annotated[bool, typer.Option("--force", help="Repeat what is already done.")]
