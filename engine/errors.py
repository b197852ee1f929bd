"""Errors for people: what was found, what was expected, what to do, which runbook."""


class SlipstreamError(Exception):
    """An error with a remedy.

    Args:
        found: what was found.
        expected: what was expected.
        do: what to do about it.
        runbook: file name under `runbooks/`, where there is one.
        fault: id of the fault of the incident (F1..F20) that this check catches.
    """

    def __init__(self, found: str, *, expected: str = "", do: str = "", runbook: str = "", fault: str = "") -> None:
        self.found, self.expected, self.do, self.runbook, self.fault = found, expected, do, runbook, fault
        lines = [f"{fault + ': ' if fault else ''}{found}"]
        if expected:
            lines.append(f"  expected: {expected}")
        if do:
            lines.append(f"  do: {do}")
        if runbook:
            lines.append(f"  runbook: runbooks/{runbook}")
        super().__init__("\n".join(lines))
