"""The plan as tables for people."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.flows.plan import Plan, derived_values, meanings, room, values
from slipstream.flows.tables import plain_table
from slipstream.tasks.checks_machine import human_bytes
from slipstream.tasks.estimates import Cost
from slipstream.tasks.other_engines.sglang_effects import ROW_CHECKS


def show(plan: Plan, console: Console) -> None:
    """Prints the whole plan: values, derived values, stages, room, and at the end what is wrong."""
    if plan.other_engine:
        wide = console.width >= WIDE
        tables = [_launch_values(plan, wide), _derived(plan), _effects(plan, wide)]
    else:
        tables = [_values(plan), _derived(plan), _stages(plan), _room(plan)]
    for table in tables:
        console.print(table)
        console.print()
    show_findings(plan, console)


def show_findings(plan: Plan, console: Console) -> None:
    """Prints warnings and contradictions, each with the ways to agree; no warning again that is a row of effects."""
    for finding in sorted(plan.findings, key=lambda f: f.severity == "error"):
        if plan.other_engine and finding.severity == "warning" and finding.check in ROW_CHECKS:
            continue
        colour, title = ("red", "contradiction") if finding.severity == "error" else ("yellow", "warning")
        console.print(Text.assemble((f"{title} ", f"bold {colour}"), str(finding)), soft_wrap=True)
    if plan.errors:
        number = len(plan.errors)
        console.print(Text(f"{number} contradiction{'s' if number > 1 else ''}: nothing would be run", "bold red"))
    if plan.other_engine:
        words = f"Slipstream plans and checks a launch of {plan.other_engine}, it does not launch it"
        console.print(words if plan.errors else Text.assemble(("no contradiction", "bold green"), f"; {words}"))
    elif not plan.errors:
        runs = ", ".join(plan.needed) or "nothing"
        console.print(Text.assemble(("no contradiction", "bold green"), f"; a run would do: {runs}"), soft_wrap=True)


def seconds_words(cost: Cost | None) -> str:
    """`12 s` as measured in an earlier run, `~2 min` as estimated, `unknown`."""
    if cost is None or cost.seconds is None:
        return "unknown"
    seconds = cost.seconds
    words = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    if seconds >= 7200:
        words = f"{seconds / 3600:.1f} h"
    return words if cost.measured else f"~{words}"


def _values(plan: Plan) -> Table:
    table = plain_table("Values", "key", "value", "from")
    section = ""
    for value in values(plan):
        if value.key.startswith(("sglang.", "nccl.")) and value.origin == "default":
            continue  # nothing of another engine's was written: nothing to know
        here = value.key.split(".")[0]
        if section not in ("", here):
            table.add_section()
        section = here
        text = _shown(value.value)
        table.add_row(
            value.key, Text(text, overflow="fold"), Text(value.origin, "dim" if value.origin == "default" else "")
        )
    return table


def _shown(value: object) -> str:
    return "null" if value is None else str(list(value) if isinstance(value, tuple) else value)


WIDE = 140  # columns from which five columns of words can be read side by side


def _launch_values(plan: Plan, wide: bool) -> Table:
    """What is on the launch line of another engine; a key that nobody wrote is not on it."""
    title = f"Asked of {plan.other_engine} (a key that is not here is not on its launch line)"
    columns, meaning = ["key", "value", "from"], meanings(plan)
    table = plain_table(title, *columns, *(["meaning"] if wide else []))
    for value in values(plan):
        if value.key in meaning:
            cells: list[str | Text] = [
                value.key,
                Text(_shown(value.value), overflow="fold"),
                Text(value.origin, overflow="fold"),
            ]
            table.add_row(*cells, *([Text(meaning[value.key], "dim")] if wide else []))
    if not wide:
        table.caption = f"`slipstream import`, --json and a terminal of {WIDE} columns tell what each means"
        table.caption_justify = "left"
    return table


_COLOURS = {"error": "red", "warning": "yellow", "note": ""}


def _effects(plan: Plan, wide: bool) -> Table:
    """Asked and effective: side by side where there is room, else one below the other."""
    version = plan.loaded.deployment.server.engine_version or "of an unknown version"
    columns = ("row", "asked", "effective", "visible", "so that nothing changes")
    title = f"What {plan.other_engine} {version} makes of it (red: changed or broken, yellow: chosen or uncertain)"
    table = plain_table(title, *(columns if wide else ("row", "", "")))
    for effect in plan.effects:
        colour = _COLOURS[effect.severity]
        only = f"in {effect.where}: " if effect.where else ""
        words = (effect.asked, only + effect.effective, effect.visible, "; or ".join(effect.ways))
        cells = [Text(text, colour if n == 1 else "", overflow="fold") for n, text in enumerate(words)]
        if wide:
            table.add_row(Text(effect.row, colour), *cells)
        else:
            for number, (name, cell) in enumerate(zip(columns[1:], cells, strict=True)):
                table.add_row(
                    Text("" if number else effect.row, colour),
                    Text("write" if name == columns[-1] else name, "dim"),
                    cell,
                )
        table.add_section()
    return table


def _derived(plan: Plan) -> Table:
    table = plain_table("Derived", "what", "value", "how")
    for row in derived_values(plan):
        table.add_row(row.name, Text(row.value, overflow="fold"), Text(row.how, "dim"))
    return table


def _stages(plan: Plan) -> Table:
    columns = ("stage", "state", "why", "time", "~ disk", "~ memory")
    table = plain_table("Stages (~ is a rough estimate, other times are those of the last run)", *columns)
    for status in plan.statuses:
        cost = plan.costs.get(status.name)
        needed = status.state == "needed"
        why = f"{status.why}; resumes where it stopped" if needed and status.resumable else status.why
        table.add_row(
            status.name,
            Text(status.state, "bold" if needed else "green"),
            Text(why, overflow="fold"),
            seconds_words(cost) if needed else "-",
            _bytes(cost.disk_bytes if cost else None) if needed else "-",
            _bytes(cost.memory_bytes if cost else None) if needed else "-",
        )
    seconds = [plan.costs[name].seconds for name in plan.needed if name in plan.costs]
    known = [one for one in seconds if one is not None]
    if seconds:
        table.add_section()
        total = Cost(sum(known) if len(known) == len(seconds) else None, 0, 0)
        table.add_row("together", "", "", seconds_words(total), "", "")
    return table


def _room(plan: Plan) -> Table:
    table = plain_table("Room", "what", "needed (estimate)", "free")
    for row in room(plan):
        needed = "unknown until resolve" if row.needed is None else human_bytes(row.needed)
        short = row.needed is not None and row.free is not None and row.needed > row.free
        free = "not looked at" if row.free is None else human_bytes(row.free)
        table.add_row(row.what, needed, Text(free, "red" if short else ""))
    return table


def _bytes(number: int | None) -> str:
    return "unknown" if number is None else human_bytes(number)
