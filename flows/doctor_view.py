"""`slipstream doctor`: a host looked at, as a table for people or as JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.configs.load import load
from slipstream.configs.schema import Deployment
from slipstream.tasks.hosts.doctor import HostFinding, judge
from slipstream.tasks.hosts.doctor_sums import judge_sums, time_sums
from slipstream.tasks.hosts.open_host import each_deployment, open_host

COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


Examined = tuple[str, dict[str, Any], list[HostFinding]]


def examine(config: Path | None, overrides: Sequence[str], ranks: int = 0) -> list[Examined]:
    """(Name of a host of the deployment, its facts, what they mean), for each. Raises SlipstreamError, as they do.

    config: None is a deployment of default values, on this machine. ranks: sums over so many are timed; 0: none are.
    """
    deployment = Deployment() if config is None else load(config, overrides).deployment
    if ranks:
        server = deployment.server.model_copy(update={"tensor_parallel_size": ranks})
        deployment = deployment.model_copy(update={"server": server})
    return [_examine(one, ranks) for one in each_deployment(deployment)]


def _examine(deployment: Deployment, ranks: int) -> Examined:
    host = open_host(deployment)
    try:
        facts = host.facts(address=deployment.server.host, port=deployment.server.port)
        findings = judge(facts, deployment)
        if ranks:
            facts["all_reduce"] = time_sums(host, facts, deployment, ranks)
            findings += judge_sums(facts["all_reduce"])
        return host.name, facts, findings
    finally:
        host.close()


def show_doctor(
    config: Path | None, overrides: Sequence[str], *, as_json: bool, ranks: int = 0, console: Console | None = None
) -> bool:
    """Prints what was found. Returns whether the deployment can use its hosts: no finding is an error.

    As JSON one host is an object, several are a list of them.
    """
    examined = examine(config, overrides, ranks)
    if as_json:
        told = [
            {"host": name, "facts": facts, "findings": [asdict(finding) for finding in findings]}
            for name, facts, findings in examined
        ]
        print(json.dumps(told if len(told) > 1 else told[0], indent=2, ensure_ascii=False))
    else:
        for name, facts, findings in examined:
            _table(name, facts, findings, console or Console())
    return not any(finding.severity == "error" for _, _, findings in examined for finding in findings)


def _table(name: str, facts: dict[str, Any], findings: Sequence[HostFinding], console: Console) -> None:
    table = Table(title=f"{name}: {facts['host']}, Linux {facts['kernel']} {facts['machine']}", title_justify="left")
    for column in ("", "looked at", "found", "consequence", "do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        fault = f"{finding.fault}: " if finding.fault else ""
        runbook = f" (runbooks/{finding.runbook})" if finding.runbook else ""
        table.add_row(
            Text(finding.severity, style=COLOURS[finding.severity]),
            finding.check,
            Text(fault + finding.found),
            Text(finding.consequence),
            Text(finding.do + runbook),
        )
    console.print(table)
