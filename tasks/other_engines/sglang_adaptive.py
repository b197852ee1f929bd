"""What SGLang makes of adaptive steps: rows 23 and 24 of the silent changes.

Read in `speculative/adaptive_spec_params.py` of SGLang 0.5.11 to 0.5.23.
"""

from collections.abc import Iterator

from slipstream.tasks.other_engines.effect import Effect
from slipstream.tasks.other_engines.launch_facts import (
    ADAPTIVE,
    ALGORITHM,
    CRASH,
    STEPS,
    TOPK,
    WIDTH,
    Launch,
    auto_choice,
    leave_out,
    pin,
)


def _adaptive_problem(launch: Launch) -> tuple[str, ...]:
    """Keys that keep adaptive steps off; empty when nothing does."""
    if launch.algorithm not in ("EAGLE", "EAGLE3"):
        return (ALGORITHM,)
    topk = topk_in_force(launch) if launch.before("0.5.14") else launch.get(TOPK)  # then it is chosen before this
    found = [TOPK] if topk not in (None, 1) else []
    if launch.before("0.5.12") and not launch.on("sglang.disable_overlap_schedule"):
        found.append("sglang.disable_overlap_schedule")  # only the old worker knew adaptive steps
    switches = ("enable_dp_attention", "enable_two_batch_overlap", "enable_pdmux", "enable_multi_layer_eagle")
    return tuple(found + [f"sglang.{name}" for name in switches if launch.on(f"sglang.{name}")])


def adaptive_works(launch: Launch) -> bool:
    """Whether adaptive steps decide steps, topk and tokens. Before 0.5.14 they are chosen as without them."""
    return launch.on(ADAPTIVE) and not launch.before("0.5.14") and not _adaptive_problem(launch)


def topk_in_force(launch: Launch) -> int | None:
    """topk as asked, or as chosen where neither steps nor topk nor tokens were; None while it is not known."""
    topk = launch.get(TOPK)
    if topk is not None or launch.get(STEPS) is not None or launch.get(WIDTH) is not None:
        return None if topk is None else int(topk)
    chosen = (0, 1, 0) if adaptive_works(launch) else auto_choice(launch)
    return None if chosen is None else chosen[1]


def _candidates(launch: Launch) -> tuple[int, ...]:
    """The built-in steps that adaptive goes between, over all batch sizes."""
    if launch.before("0.5.14"):
        return (1, 3, 7)
    return (0, 1, 3, 7) if launch.before("0.5.23") else (0, 1, 3, 5, 7)


def adaptive(launch: Launch) -> Iterator[Effect]:
    """Rows 23 and 24."""
    if not launch.on(ADAPTIVE) or launch.before("0.5.11"):
        return
    problem = _adaptive_problem(launch)
    if problem:
        yield Effect(
            "23",
            launch.say(ADAPTIVE, *problem),
            "adaptive is switched off, the steps are static",
            "WARNING",
            (leave_out(ADAPTIVE), f"change {' and '.join(problem)}"),
        )
        return
    steps, candidates = launch.get(STEPS), _candidates(launch)
    own = launch.get("sglang.speculative_adaptive_config") is not None
    if steps is not None and not own and steps not in candidates and not launch.before("0.5.13"):
        width = "" if launch.get(WIDTH) is None else f" and {leave_out(WIDTH)}"
        near = [k for k in candidates if abs(k - steps) == min(abs(c - steps) for c in candidates)]
        yield Effect(
            "24",
            launch.say(ADAPTIVE, STEPS),
            f"{CRASH}: the built-in candidates are {list(candidates)}",
            "ValueError",
            (
                *(pin(STEPS, k) + width for k in near),
                pin("sglang.speculative_adaptive_config", "FILE") + " with your candidates",
            ),
        )
    if adaptive_works(launch):
        yield from _adaptive_choices(launch, None if own else candidates[len(candidates) // 2])


def _adaptive_choices(launch: Launch, middle: int | None) -> Iterator[Effect]:
    """Row 24: what adaptive steps choose for what was left out. `middle` is None for a config file of one's own."""
    steps, width = launch.get(STEPS), launch.get(WIDTH)
    if steps is None:
        first = "the middle candidate" + ("" if middle is None else f", {middle}")
        yield Effect(
            "24",
            launch.say(ADAPTIVE, STEPS),
            f"steps start at {first}",
            "nothing says so",
            (pin(STEPS, "K" if middle is None else middle),),
            "warning",
        )
    if launch.get(TOPK) is None:
        yield Effect("24", launch.say(ADAPTIVE, TOPK), "topk 1", "nothing says so", (pin(TOPK, 1),), "warning")
    first_steps = middle if steps is None else steps
    if width is None:
        tokens = "steps + 1" if first_steps is None else first_steps + 1
        said, ways = launch.say(ADAPTIVE, WIDTH), (pin(WIDTH, "K + 1" if first_steps is None else tokens),)
        yield Effect("24", said, f"verify width {tokens}, changing with the steps", "nothing says so", ways, "warning")
    elif first_steps is None or width != first_steps + 1:
        yield Effect(
            "24",
            launch.say(ADAPTIVE, STEPS, WIDTH),
            f"verify width {'steps + 1' if first_steps is None else first_steps + 1}, and it changes with the steps",
            "nothing says so",
            (leave_out(WIDTH),),
            fault="F1",
        )
