"""Gates: what a run must reach. Judged from recorded figures, so that a changed bound needs no new measurement."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.agreement_bound import allowed_differences

if TYPE_CHECKING:
    from slipstream.configs.serving import Gates

Status = Literal["pass", "fail", "off", "note"]
EXIT_CODE = 3
RUNBOOKS = {"F11": "accept-length-low.md", "F18": "slower-than-baseline.md"}


@dataclass(frozen=True)
class Gate:
    """One judgement.

    Args:
        name: what is judged.
        status: "off": no bound is set, or there is nothing to judge; "note": told, not judged.
        found, expected: figure and bound, as text.
        why: what it means; for a failure, what lost.
        fault: id of the incident's fault.
    """

    name: str
    status: Status
    found: str
    expected: str = ""
    why: str = ""
    fault: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


class GatesFailed(SlipstreamError):
    """A run that did everything and did not reach what it must."""

    exit_code = EXIT_CODE

    def __init__(self, failed: Sequence[Mapping[str, str]]) -> None:
        words = [f"{gate['name']}: {gate['found']}, expected {gate['expected']}. {gate['why']}" for gate in failed]
        fault = next((gate["fault"] for gate in failed if gate["fault"]), "")
        super().__init__(
            "the run failed its gates:\n" + "\n".join(f"  - {word}" for word in words),
            do="the report shows the figures; gates can be changed under `gates:` in the deployment",
            runbook=RUNBOOKS.get(fault, ""),
            fault=fault,
        )


def judge(
    gates: "Gates", resolved: Mapping[str, Any], parity: Mapping[str, Any] | None, bench: Mapping[str, Any]
) -> list[Gate]:
    """Every gate of a run.

    Args:
        gates: the bounds.
        resolved: figures of stage resolve.
        parity: parity.json, None where there is none.
        bench: benchmark.json.
    """
    return [
        _perplexity(gates, resolved),
        *_parity(gates, parity),
        _same_answers(bench),
        _prediction(gates, bench),
        _accept_length(gates, bench),
        _speed(gates, bench),
        *_transformers(bench),
    ]


def require(gates: Sequence[Mapping[str, str]]) -> None:
    """Raises GatesFailed when one of `gates` (as dicts, from the report's figures) failed."""
    failed = [gate for gate in gates if gate["status"] == "fail"]
    if failed:
        raise GatesFailed(failed)


def _bound(
    name: str, value: float | None, bound: float | None, *, low: bool, form: str, why: str = "", fault: str = ""
) -> Gate:
    """A figure against one bound: at least `bound` (low) or at most."""
    if value is None:
        return Gate(name, "off", "not measured", fault=fault)
    found = format(value, form)
    if bound is None:
        return Gate(name, "off", found, "no bound", fault=fault)
    good = value >= bound if low else value <= bound
    expected = f"{'at least' if low else 'at most'} {format(bound, form)}"
    return Gate(name, "pass" if good else "fail", found, expected, "" if good else why, fault)


def _perplexity(gates: "Gates", resolved: Mapping[str, Any]) -> Gate:
    why = "the target is not what it should be: weights, config or tokenizer"
    value = resolved.get("perplexity")
    return _bound("perplexity of the target", value, gates.max_perplexity, low=False, form=".2f", why=why)


def _parity(gates: "Gates", parity: Mapping[str, Any] | None) -> list[Gate]:
    """Parity ends a run by itself; here its figures stand beside the rest."""
    if parity is None:
        return [Gate("parity", "off", "not measured")]
    shares = [slot["share"] for slot in parity.get("slots", ())]
    logits = parity.get("logits", {})
    return [
        _bound(
            "parity: slots",
            max(shares, default=None),
            gates.max_slot_error,
            low=False,
            form=".2g",
            why="a captured state is not the one that its name says",
            fault="F5",
        ),
        _bound(
            "parity: tokens that differ from transformers",
            logits.get("share"),
            _allowed_share(gates.max_argmax_difference, logits),
            low=False,
            form=".3%",
            why="the target's logits are not those of transformers",
            fault="F7",
        ),
    ]


def _allowed_share(asked: float, logits: Mapping[str, Any]) -> float:
    """As parity's own bound: what was asked, or as often as transformers differs from itself."""
    positions, names = logits.get("positions", 0), ("self_differ", "reference_differ", "independent")
    if not positions or any(name not in logits for name in names):  # of a workdir before they were measured
        return asked
    return allowed_differences(asked, positions, *(logits[name] for name in names)) / positions


def _same_answers(bench: Mapping[str, Any]) -> Gate:
    """Speculation never changes the output, where the machine keeps a row's bits."""
    name, differing, prompts = "same answers with and without speculation", bench["differing_prompts"], bench["prompts"]
    found = f"{prompts - len(differing)} of {prompts}"
    if not bench["row_invariance"]["invariant"]:
        return Gate(name, "note", found, why=bench["row_invariance"]["promise"])
    if not differing:
        return Gate(name, "pass", found, "all")
    return Gate(name, "fail", found, "all", f"speculation changed the answers to {', '.join(differing)}")


def _prediction(gates: "Gates", bench: Mapping[str, Any]) -> Gate:
    name, comparison = "replayed against served accept length", bench["comparison"]
    if comparison is None:
        return Gate(name, "off", "nothing to compare", fault="F11")
    if not comparison["same_prompts"]:
        return Gate(
            name,
            "note",
            f"gap {comparison['relative_gap']:.1%}",
            why="replayed and served prompts are different ones, so the gap is no fault",
            fault="F11",
        )
    return _bound(
        name,
        comparison["relative_gap"],
        gates.max_tau_gap,
        low=False,
        form=".1%",
        why="what is served is not what was evaluated; parity says where they part",
        fault="F11",
    )


def _accept_length(gates: "Gates", bench: Mapping[str, Any]) -> Gate:
    counts = bench["acceptance"]
    why = f"acceptance lost: of {counts['rounds']} rounds, the ceiling is {counts['ceiling']}"
    return _bound("accept length", counts["accept_length"], gates.min_accept_length, low=True, form=".2f", why=why)


def _speed(gates: "Gates", bench: Mapping[str, Any]) -> Gate:
    """F18. Fails when the whole confidence interval lies below the bound; K = 0 passes as "speculation off"."""
    name, fault, ratio = "speed against no speculation", "F18", bench["speedup"]
    found = f"{ratio['ratio']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f}) at K = {bench['num_steps']}"
    if bench["served_num_steps"] == 0:
        return Gate(name, "off", f"speculation off; {found} when tried", why=bench["choice"]["why"], fault=fault)
    expected = f"at least {gates.min_speedup:.2f}x within the interval"
    lost = bench["losing_term"]
    if ratio["high"] < gates.min_speedup:
        why = f"The term that loses is {lost['why']}" if lost else "faster than no speculation, but not by that much"
        return Gate(name, "fail", found, expected, why, fault)
    why = ""
    if ratio["low"] < gates.min_speedup:
        why = "the interval holds the bound: not shown to be slower, and not shown to be faster"
    return Gate(name, "pass", found, expected, why, fault)


def _transformers(bench: Mapping[str, Any]) -> list[Gate]:
    told = bench["transformers"]
    if not told or told["ratio"] is None:
        return []
    why = "" if told["ratio"] >= 1 else "our plain decode is slower than it has to be"
    return [Gate("no speculation against transformers generate", "note", f"{told['ratio']:.2f}x", why=why)]
