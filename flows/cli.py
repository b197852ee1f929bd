"""The command line `slipstream`.

Exit codes: 0 done; 1 an error; 2 a deployment that cannot be read or contradicts itself, or a wrong command line;
3 a gate, the parity check or a fingerprint failed; 130 interrupted.

Only what a command needs is imported, inside the command: `--help` answers at once, and `serve` and `stage` work where
neither Prefect nor fabric is installed.
"""

import errno
import json
import os
import sys
import traceback
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

import slipstream.kernels  # noqa: F401  (first: it sets what torch reads when it is imported)
from slipstream.engine.errors import SlipstreamError
from slipstream.flows.arguments import AsJson, Config, EngineVersion, Force, Overrides, Workdir
from slipstream.flows.by_hand import run_each, run_stages, stop_replicas
from slipstream.flows.host_cli import doctor, host_app
from slipstream.flows.prefect_cli import abandon, require_prefect, roll, up

app = typer.Typer(
    name="slipstream",
    help="EAGLE-3 speculative decoding, from hidden states to a benchmarked server, with every hand-over checked.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(host_app, name="host")
app.command("doctor")(doctor)
app.command("up")(up)
app.command("abandon")(abandon)
app.command("roll")(roll)


@app.command()
def plan(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", help="The deployment file (YAML); none with --from-command.", show_default=False
        ),
    ] = None,
    overrides: Overrides = None,
    workdir: Workdir = None,
    as_json: AsJson = False,
    from_command: Annotated[
        str | None,
        typer.Option("--from-command", metavar="LINE", help="Plan this launch line of SGLang, in one argument."),
    ] = None,
    engine_version: EngineVersion = None,
) -> None:
    """Show what a run would do, what is derived, what is wrong and what it costs. Starts and writes nothing.

    With --from-command: what SGLang would make of a launch line. Ends with exit code 2 on any contradiction.
    """
    from slipstream.flows import plan as planning

    if (config is None) == (from_command is None):
        raise typer.BadParameter("give a deployment file or --from-command LINE, one of the two", param_hint="CONFIG")
    if from_command is not None:
        made = planning.plan_command(from_command, engine_version, overrides or (), workdir=workdir)
    else:
        assert config is not None
        version = () if engine_version is None else (f"server.engine_version={engine_version}",)
        made = planning.make_plan(config, (*(overrides or ()), *version), workdir=workdir)
    if as_json:
        print(json.dumps(planning.as_dict(made), indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        from slipstream.flows.plan_tables import show

        show(made, Console())
    if made.errors:
        raise typer.Exit(2)


@app.command("import")
def import_launch_line(
    line: Annotated[str, typer.Argument(metavar="LINE", help="A launch line of SGLang, in one argument.")],
    engine_version: EngineVersion = None,
) -> None:
    """Write a launch line of SGLang as a deployment file, with the meaning of every flag and variable.

    Ends with exit code 2, and writes nothing, when a word of it is not known.
    """
    from slipstream.tasks.other_engines.import_line import as_yaml, import_line

    print(as_yaml(import_line(line, engine_version, environ={}), line), end="")


@app.command()
def run(config: Config, overrides: Overrides = None) -> None:
    """Run the whole lifecycle: from a package to a benchmarked speculative server and back to a clean machine.

    Unchanged stages are skipped; a run that was killed is taken up where it stopped.
    """
    from rich.console import Console

    from slipstream.flows.plan import make_plan
    from slipstream.flows.plan_tables import show_findings
    from slipstream.tasks.checks import refuse, refuse_other_engine

    require_prefect("run")
    from slipstream.flows.run import run_lifecycle

    console = Console()
    made = make_plan(config, overrides or ())
    refuse_other_engine(made.loaded.deployment, "run")
    refuse(made.findings)
    show_findings(made, console)
    run_lifecycle(config, overrides or (), console)


@app.command()
def stage(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the stage, such as extract.")],
    config: Config,
    overrides: Overrides = None,
    workdir: Workdir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Progress as JSON lines, for programs.")] = False,
    force: Force = False,
) -> None:
    """Run one stage by hand. What it reads must be done; what is already done is skipped."""
    run_stages((name,), config, overrides, workdir, as_json=as_json, force=force)


@app.command()
def parity(
    config: Config,
    overrides: Overrides = None,
    workdir: Workdir = None,
    as_json: AsJson = False,
    force: Force = False,
    inject: Annotated[
        list[str] | None,
        typer.Option(
            "--inject",
            metavar="FAULT",
            help="Put a fault into parity's own server, such as F5:slot=0, to see it found; repeatable. An unknown one "
            "lists all.",
        ),
    ] = None,
) -> None:
    """Compare the served engine with transformers and with the independent reference of the draft.

    Fewer and shorter prompts: --set benchmark.num_prompts=4 --set benchmark.max_new_tokens=24.
    """
    if not inject:
        run_stages(("parity",), config, overrides, workdir, as_json=as_json, force=force)
        return
    from slipstream.engine.injection import parse_injections

    injections = parse_injections(inject)
    from slipstream.tasks.parity import injected_stage, refuse_failed

    (result,) = run_each((injected_stage(injections),), config, overrides, workdir, as_json=as_json, force=False)
    refuse_failed(result.figures)


@app.command()
def bench(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|engine|kernels",
            help="A deployment file, or the word engine or kernels.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    workdir: Workdir = None,
    as_json: AsJson = False,
    force: Force = False,
    sizes: Annotated[
        str | None, typer.Option(help="engine, kernels: sizes to time, such as smollm2,llama8b; default: all.")
    ] = None,
    rows: Annotated[Path | None, typer.Option(help="engine: record the figures in this JSON file.")] = None,
    parts: Annotated[bool, typer.Option("--parts", help="engine: profile the kernels of a round as well.")] = False,
) -> None:
    """Measure no speculation and speculation on the same prompts, interleaved. Needs a finished draft.

    `bench engine` times the engine on the card at hand instead, with models of known sizes and random weights, against
    goals and the card's read rate; `bench kernels` times each op alone.
    """
    if str(config) in ("engine", "kernels"):
        from slipstream.flows import bench_view

        bench_view.bench(str(config), sizes, rows, parts, " ".join(["slipstream", *sys.argv[1:]]))
        return
    if sizes or rows or parts:
        raise typer.BadParameter("only with `bench engine` or `bench kernels`", param_hint="--sizes, --rows, --parts")
    from slipstream.configs.load import load

    options = {"as_json": as_json, "force": force}
    after = load(config, overrides or ()).deployment.server.after
    run_stages(("cleanup",), config, overrides, workdir, **options)  # until its end nothing is ours to stop
    keep = False
    try:
        run_stages(("tune", "launch", "benchmark"), config, overrides, workdir, **options)
        keep = after == "keep"
    finally:
        if not keep:
            run_stages(("cleanup",), config, overrides, workdir, **options)


@app.command()
def report(config: Config, overrides: Overrides = None, workdir: Workdir = None, force: Force = False) -> None:
    """Write the report of the finished stages and print the path of its page."""
    results = run_stages(("report",), config, overrides, workdir, as_json=False, force=force)
    print(results[-1].dir / "report.html")


@app.command()
def clean(config: Config, overrides: Overrides = None, workdir: Workdir = None, as_json: AsJson = False) -> None:
    """Stop what a run of this deployment started and left, by its state files; nothing else is touched.

    What cannot be stopped keeps nothing else from it: it is named in the end, and the exit code is 1.
    """
    from slipstream.configs.load import load
    from slipstream.flows.prefect_server import stop_left_over
    from slipstream.tasks.cleanup import refuse_left
    from slipstream.tasks.lock import WorkdirInUse

    deployment = load(config, overrides or ()).deployment
    folder, left = deployment.host.workdir if workdir is None else workdir, []
    for end in (
        lambda: run_stages(("cleanup",), config, overrides, workdir, as_json=as_json, force=True),
        lambda: stop_replicas(deployment, folder, as_json=as_json),
        lambda: stop_left_over(folder),  # Prefect's own server, of a run that was killed
    ):
        try:
            end()
        except WorkdirInUse:
            raise
        except SlipstreamError as error:
            left.append(error)
    refuse_left(left)


@app.command("explain-log")
def explain_log(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Logs, metrics pages or JSON; .gz is read.")],
    baseline_tok_s: Annotated[
        float | None, typer.Option(help="Tokens/s of one stream without speculation, on the same machine.")
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option(help="Release of the engine, where the file does not say.")
    ] = None,
    accuracy: Annotated[
        float | None, typer.Option(help="The accuracy that the accept length was projected from.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain logs of SGLang, vLLM or Slipstream: accept length, round cost, break-even, and what is to blame."""
    from slipstream.flows import explain_log as explaining

    told = explaining.explain(files, baseline=baseline_tok_s, version=engine_version, accuracy=accuracy)
    if as_json:
        print(json.dumps(explaining.as_dict(*told), indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        explaining.show(*told, Console())


@app.command()
def schema(
    out: Annotated[Path | None, typer.Option("--out", help="Write to this file instead of standard output.")] = None,
) -> None:
    """Write the JSON schema of a deployment file, for editors and for reading."""
    from slipstream.configs.schema import Deployment

    made = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Deployment.model_json_schema()}
    text = json.dumps(made, indent=2, ensure_ascii=False)
    if out is None:
        print(text)
    else:
        try:
            out.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise SlipstreamError(
                f"the schema cannot be written to {out}: {error.strerror or error}",
                expected="a file in a directory that exists and can be written",
                do="correct --out, or make its directory",
            ) from None


@app.command()
def fingerprint(
    name: Annotated[str, typer.Argument(metavar="DIST", help="Name of the package, such as sglang.")] = "slipstream",
    python: Annotated[
        Path | None, typer.Option("--python", help="The Python that starts the engine; default: this one.")
    ] = None,
    site_packages: Annotated[
        Path | None, typer.Option("--site-packages", help="The directory of packages that the engine is in.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare every file of an installed engine with its wheel's record, and give one digest for all.

    Ends with exit code 3 when a file was changed, or when it is no release.
    """
    if python is not None and site_packages is not None:
        raise typer.BadParameter("give --python or --site-packages, one of the two", param_hint="--python")
    from slipstream.flows.fingerprint_view import show_fingerprint

    if not show_fingerprint(name, python, site_packages, as_json=as_json):
        raise typer.Exit(3)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def serve(context: typer.Context) -> None:
    """Serve a target, with or without a draft, over the OpenAI protocol (`slipstream serve --help` for options)."""
    from slipstream.engine.serving.main import main as serve_main

    raise typer.Exit(serve_main(context.args))


def show_error(error: SlipstreamError) -> None:
    """Prints an error that we expected, on standard error, for a person to act on, with its runbook."""
    from rich.console import Console
    from rich.text import Text

    from slipstream.flows.runbooks import runbook_of

    named = "" if error.runbook else f"\n  runbook: runbooks/{runbook_of(error)}"
    Console(stderr=True).print(Text.assemble(("error ", "bold red"), f"{error}{named}"), soft_wrap=True)


def _prepare_output() -> None:
    """What a terminal's encoding lacks is shown escaped; files and pipes are UTF-8, as programs and our loader read."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="backslashreplace")


def _drop_output() -> None:
    """What standard output does not take now, it would not take at exit either."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _of_the_machine(error: OSError) -> SlipstreamError:
    """What the machine refused and nobody expected, and where in our code it was asked."""
    frames = [(frame.f_globals.get("__name__", ""), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    ours = [f"{name}, line {line}" for name, line in frames if name.startswith("slipstream.") and name != __name__]
    asked = f" (asked by {ours[-1]})" if ours else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return SlipstreamError(
        f"{error}{asked}",
        expected="files, folders and an output that can be read and written",
        do="make room" if full else "correct the path, its owner or its rights, or name another",
        runbook="disk-full.md" if full else "",
    )


def main() -> None:
    """The console script."""
    _prepare_output()
    try:
        app()
        sys.stdout.flush()  # here a full disk is still told
    except SlipstreamError as error:
        show_error(error)
        sys.exit(getattr(error, "exit_code", 1))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        _drop_output()
        sys.exit(1)
    except OSError as error:
        show_error(_of_the_machine(error))
        _drop_output()
        sys.exit(1)


if __name__ == "__main__":
    main()
