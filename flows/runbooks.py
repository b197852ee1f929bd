"""Which runbook an error is for: the one that it names, else that of its fault, else the one for any run that ended."""

from slipstream.engine.errors import SlipstreamError

ANY = "run-failed.md"
BY_FAULT = {
    **dict.fromkeys(("F1", "F4", "F14", "F16", "F20"), "wrong-flags.md"),
    **dict.fromkeys(("F2", "F3", "F5", "F6", "F7", "F8", "F9", "F10", "F11", "F12", "F19"), "accept-length-low.md"),
    **dict.fromkeys(("F13", "F18"), "slower-than-baseline.md"),
    "F15": "left-over-server.md",
    "F17": ANY,
}


def runbook_of(error: SlipstreamError) -> str:
    """File name under `runbooks/`."""
    return error.runbook or BY_FAULT.get(error.fault, ANY)
