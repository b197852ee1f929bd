"""What SGLang makes of the speculative flags: rows 1-3, 19-22, 25 and 26 of the silent changes, and section 1a.

Read in the sources of SGLang 0.5.9 to 0.5.23 (`server_args.py`, `arg_groups/speculative_hook.py`, `eagle_utils.py`).
"""

from collections.abc import Iterator

from slipstream.tasks.other_engines.effect import Effect, Rule
from slipstream.tasks.other_engines.launch_facts import (
    ADAPTIVE,
    ALGORITHM,
    CRASH,
    DRAFT,
    EAGLE3_LLAMA,
    EAGLE3_MLA,
    STEPS,
    TOPK,
    WIDTH,
    Launch,
    auto_choice,
    leave_out,
    pin,
)
from slipstream.tasks.other_engines.sglang_adaptive import adaptive, adaptive_works, topk_in_force

REJECTION, WINDOW = "sglang.speculative_use_rejection_sampling", "sglang.speculative_draft_window_tokens"


def _width(launch: Launch) -> Iterator[Effect]:
    """Row 1: a chain of K steps is verified with K + 1 rows, whatever was asked."""
    steps, width = launch.get(STEPS), launch.get(WIDTH)
    if not launch.eagle or adaptive_works(launch) or steps is None or launch.get(TOPK) != 1 or width == steps + 1:
        return
    asked = launch.say(STEPS, TOPK, WIDTH)
    effective = f"verify width {steps + 1}: with topk 1 it becomes num_steps + 1"
    if width is None:
        yield Effect("1", asked, effective, "a WARNING without numbers", (pin(WIDTH, steps + 1),), "warning")
        return
    yield Effect(
        "1",
        f"verify width {width} contradicts num_steps {steps} with topk 1 (width would be {steps + 1}): {asked}",
        effective,
        "one WARNING that prints neither the old nor the new number",
        (
            f"{leave_out(WIDTH)}: it is then {steps + 1}",
            f"{pin(WIDTH, steps + 1)}",
            f"{pin(STEPS, width - 1)} to keep the width {width}",
        ),
        fault="F1",
    )


def _steps_unset(launch: Launch) -> Iterator[Effect]:
    """Row 2: without steps, topk and tokens must be left out too, and all three are chosen."""
    if not launch.eagle or adaptive_works(launch) or launch.get(STEPS) is not None:
        return
    stated = [key for key in (TOPK, WIDTH) if launch.get(key) is not None]
    if stated:
        width = launch.get(WIDTH)
        yield Effect(
            "2",
            launch.say(STEPS, *stated),
            f"{CRASH}: topk and tokens may be stated only with the steps",
            "a bare AssertionError",
            (
                pin(STEPS, width - 1 if width is not None and width > 1 else "K"),
                f"leave {' and '.join(stated)} out, too: all three are then chosen by SGLang",
            ),
        )
        return
    yield Effect(
        "2",
        launch.say(STEPS, TOPK, WIDTH),
        f"chosen by SGLang: {_auto_words(launch)}",
        "nothing says so",
        _pin_auto(launch),
        "warning",
    )


def _auto_words(launch: Launch) -> str:
    chosen = auto_choice(launch)
    if chosen is None:
        return (
            "steps 5, topk 4, tokens 8 for a Llama or Grok target, 3, 1, 4 for any other; the target is not known here"
        )
    return "steps {}, topk {}, tokens {}".format(*chosen)


def _pin_auto(launch: Launch) -> tuple[str, ...]:
    steps, topk, tokens = auto_choice(launch) or (3, 1, 4)
    return (f"{pin(STEPS, steps)}, {pin(TOPK, topk)} and {pin(WIDTH, tokens)}",)


def _topk_unset(launch: Launch) -> Iterator[Effect]:
    """Row 3: steps without topk."""
    if launch.eagle and not adaptive_works(launch) and launch.get(STEPS) is not None and launch.get(TOPK) is None:
        yield Effect(
            "3",
            launch.say(STEPS, TOPK),
            f"{CRASH}: an unset topk is compared with a number",
            "TypeError: '>' not supported between 'NoneType' and 'int'",
            (pin(TOPK, 1),),
        )


def _tree(launch: Launch) -> Iterator[Effect]:
    """Section 1a: a tree needs a width, and no more of it than it has candidates. SGLang does not check this."""
    steps, topk, width = launch.get(STEPS), launch.get(TOPK), launch.get(WIDTH)
    if not launch.eagle or steps is None or topk is None or topk == 1 or adaptive_works(launch):
        return
    pool = topk + (steps - 1) * topk**2
    if steps == 1:
        yield Effect(
            "1a",
            launch.say(STEPS, TOPK),
            "a tree of one step: no branch of it can ever be followed by a second draft",
            "nothing says so",
            (pin(TOPK, 1), pin(STEPS, 2)),
        )
    if width is None:
        yield Effect(
            "1a",
            launch.say(STEPS, TOPK, WIDTH),
            "a tree without a width: nothing chooses it",
            "an error while the server starts",
            (pin(WIDTH, min(pool, 2 * steps) + 1),),
        )
    elif width - 1 > pool:
        yield Effect(
            "1a",
            launch.say(STEPS, TOPK, WIDTH),
            f"{width - 1} drafts out of a tree of topk + (steps - 1) x topk^2 = {pool} candidates, unchecked",
            "the first request breaks",
            (pin(WIDTH, pool + 1), "more steps or a larger topk"),
        )


def _steps_zero(launch: Launch) -> Iterator[Effect]:
    if launch.eagle and launch.get(STEPS) == 0 and not launch.on(ADAPTIVE):
        yield Effect(
            "1a",
            launch.say(STEPS, ALGORITHM),
            "a draft that is loaded and proposes nothing",
            "accept length 1.00",
            (f"{leave_out(ALGORITHM)} and the other speculative flags", pin(STEPS, 3)),
        )


def _no_target(launch: Launch) -> Iterator[Effect]:
    """The one flag that has no default. Our own, a demo's, is not what SGLang would serve."""
    if launch.get("target.source") is None:
        yield Effect(
            "1a",
            launch.say("target.source"),
            f"{CRASH}: it has no target of its own",
            "error: the following arguments are required: --model-path",
            (pin("target.source", "DIRECTORY"),),
        )


def _no_algorithm(launch: Launch) -> Iterator[Effect]:
    """Section 1a: speculative flags without an algorithm do nothing."""
    stated = [key for key in (STEPS, TOPK, WIDTH, DRAFT, ADAPTIVE) if launch.get(key) not in (None, False)]
    if launch.get(ALGORITHM) is None and stated:
        yield Effect(
            "1a",
            launch.say(ALGORITHM, *stated),
            "no speculation: without an algorithm the other speculative flags do nothing",
            "no accept length in the log",
            (pin(ALGORITHM, "EAGLE3"), f"leave {', '.join(stated)} out"),
        )


def _no_draft(launch: Launch) -> Iterator[Effect]:
    """Rows 19 and 20."""
    if not launch.eagle:
        return
    deepseek = launch.target is not None and launch.target.architecture.startswith("DeepseekV3")
    if launch.get(DRAFT) is not None:
        if deepseek:
            yield Effect(
                "20", launch.say(DRAFT), "as asked", "a harmless WARNING: MTP does not require a draft path", (), "note"
            )
        return
    kind, unknown = launch.algorithm, launch.target is None
    own = "its own MTP layer drafts" if kind == "EAGLE" else "the target is loaded twice"
    if deepseek and kind != "STANDALONE":
        what = f"the target's path becomes the draft's: {own}"
    elif unknown and kind != "STANDALONE":
        what = f"for a DeepSeek-V3 target (Kimi-K2, too) its path becomes the draft's: {own}; for others {CRASH}"
    else:
        what = f"{CRASH}: no draft"
    mtp = kind == "EAGLE" and (deepseek or unknown)
    ways = (pin(DRAFT, launch.get("target.source") if mtp and deepseek else "DIRECTORY"),)
    said = launch.say(ALGORITHM, DRAFT)
    yield Effect("19", said, what, "nothing says so", ways, "warning" if mtp else "error")


def _data_parallel(launch: Launch) -> Iterator[Effect]:
    """Row 21."""
    key = "sglang.enable_dp_attention"
    if launch.algorithm in ("STANDALONE", "NGRAM") and launch.on(key):
        yield Effect(
            "21", launch.say(ALGORITHM, key), f"{CRASH}: {launch.algorithm} has no DP attention", "ValueError",
            (leave_out(key), pin(ALGORITHM, "EAGLE3")),
        )  # fmt: skip


def _algorithm_of_the_draft(launch: Launch) -> Iterator[Effect]:
    """Row 22, and the class that a draft's config selects."""
    if launch.algorithm not in ("EAGLE", "EAGLE3") or launch.get(DRAFT) is None:
        return
    eagle3 = launch.algorithm == "EAGLE3"
    if launch.draft is None:
        if not eagle3:
            yield Effect(
                "22",
                launch.say(ALGORITHM, DRAFT),
                "if this is an EAGLE-3 draft: no capture, `fc` skipped, the target's head on it: accept length 1.00",
                "nothing says so",
                (pin(ALGORITHM, "EAGLE3"), "run plan where the draft's config.json is"),
                "warning",
            )
        return
    name = launch.draft.architecture
    where = f"{launch.draft.path / 'config.json'}: architectures [{name}]"
    if not eagle3 and name in (EAGLE3_LLAMA, EAGLE3_MLA):
        yield Effect(
            "22",
            f"{launch.say(ALGORITHM, DRAFT)}, {where}",
            "no capture, `fc` skipped, the target's head on the draft: accept length 1.00",
            "nothing says so",
            (pin(ALGORITHM, "EAGLE3"),),
        )
    elif eagle3 and name not in (EAGLE3_LLAMA, EAGLE3_MLA):
        yield Effect(
            "2a",
            f"{launch.say(ALGORITHM, DRAFT)}, {where}",
            "another class than SGLang's EAGLE-3 is built: its tensors do not fit or are dropped",
            "an error, or accept length 1.00",
            (f"write architectures: [{EAGLE3_LLAMA}] in the draft's config.json, if it is one (convert does)",),
        )
    elif eagle3 and name == EAGLE3_MLA and launch.before("0.5.12"):
        yield Effect(
            "2a",
            f"{launch.say(DRAFT)}, {where}",
            f"{CRASH}: SGLang {launch.version} has no such class",
            "an error",
            ("serve it with 0.5.12.post1 or later",),
        )


def _rejection(launch: Launch) -> Iterator[Effect]:
    """Row 25."""
    block = "sglang.speculative_use_block_verification"
    key = REJECTION if launch.on(REJECTION) else block
    if not launch.on(key):
        return
    if launch.algorithm not in ("EAGLE", "EAGLE3"):
        yield Effect("25", launch.say(key, ALGORITHM), CRASH, "an error", (leave_out(key), pin(ALGORITHM, "EAGLE3")))
        return
    if topk_in_force(launch) not in (None, 1):
        yield Effect("25", launch.say(key, TOPK), f"{CRASH}: chains only", "ValueError", (leave_out(key), pin(TOPK, 1)))
    for name in ("sglang.speculative_accept_threshold_single", "sglang.speculative_accept_threshold_acc"):
        if launch.get(name) not in (None, 1.0):
            yield Effect(
                "25", launch.say(key, name), f"{CRASH}: it knows no thresholds", "ValueError",
                (leave_out(name), leave_out(key)),
            )  # fmt: skip
    draft, target = launch.draft, launch.target
    sizes = None if draft is None or target is None else (draft.draft_vocab_size or draft.vocab_size, target.vocab_size)
    if sizes is None or None in sizes:
        yield Effect(
            "25",
            launch.say(key),
            f"if the draft has a vocabulary of its own, {CRASH} after the weights are loaded",
            "an error, late",
            (leave_out(key), "run plan where target and draft are"),
            "warning",
        )
    elif sizes[0] != sizes[1]:
        yield Effect(
            "25",
            f"{launch.say(key, DRAFT)}: draft vocabulary {sizes[0]}, target's {sizes[1]}",
            f"{CRASH} after the weights are loaded: it needs the target's whole vocabulary",
            "ValueError, late",
            (leave_out(key), "a draft with the target's vocabulary"),
        )


def _window(launch: Launch) -> Iterator[Effect]:
    """Row 26, and the MLA draft that ignores the window."""
    if launch.get(WINDOW) is None:
        return
    if launch.algorithm not in (*(() if launch.before("0.5.23") else ("EAGLE",)), "EAGLE3", "DFLASH"):
        yield Effect("26", launch.say(WINDOW, ALGORITHM), "no effect", "WARNING", (leave_out(WINDOW),))
    elif launch.draft is not None and launch.draft.architecture == EAGLE3_MLA:
        yield Effect(
            "26", launch.say(WINDOW, DRAFT), "no effect: an MLA draft ignores it", "nothing", (leave_out(WINDOW),)
        )
    elif launch.draft is None and launch.algorithm == "EAGLE3":
        yield Effect(
            "26",
            launch.say(WINDOW),
            "no effect if the draft is an MLA draft, or has a window of its own",
            "nothing, or a WARNING",
            (leave_out(WINDOW), "run plan where the draft's config.json is"),
            "warning",
        )


def _lossy(launch: Launch) -> Iterator[Effect]:
    """Section 1a: flags that are obeyed, and are not what one may think."""
    for key in ("sglang.speculative_accept_threshold_single", "sglang.speculative_accept_threshold_acc"):
        value = launch.get(key)
        if value is not None and value < 1.0:
            yield Effect(
                "1a",
                launch.say(key),
                "speculation changes the answers: drafts are accepted that the target would not have chosen",
                "nothing says so; it can be changed while serving, too",
                (pin(key, 1.0), leave_out(key)),
                "warning",
            )
    key = "sglang.speculative_token_map"
    if launch.algorithm == "EAGLE3" and launch.get(key) is not None:
        yield Effect("1a", launch.say(key, ALGORITHM), "no effect: ignored for EAGLE3", "WARNING", (leave_out(key),))
    key = "sglang.speculative_draft_load_format"
    if launch.get(key) == "dummy":
        yield Effect("1a", launch.say(key), "a draft of random weights", "accept length 1.00", (leave_out(key),))
    key = "sglang.speculative_draft_model_revision"
    path = launch.get(DRAFT)
    if path is not None and not path.is_absolute() and not path.is_dir() and launch.get(key) is None:
        yield Effect(
            "1a",
            launch.say(DRAFT, key),
            "if this names a draft on a hub: revision `main`, whatever that is on the day",
            "nothing says so",
            (pin(key, "REVISION"), "write the path of a directory"),
            "warning",
        )
    source = str(launch.get("target.source") or "")
    if source.startswith("hf://") and source.endswith("@main"):
        yield Effect(
            "1a",
            launch.say("target.source"),
            "revision `main`, whatever that is on the day",
            "nothing says so",
            ("write target.source: hf://ORG/NAME@COMMIT (--revision COMMIT)",),
            "warning",
        )
    if launch.get("sglang.simulate_acc_len") is not None:
        key = "sglang.simulate_acc_len"
        yield Effect("1a", launch.say(key), "acceptance is made up", "nothing says so", (leave_out(key),))


SPECULATION_RULES: tuple[Rule, ...] = (
    _no_target,
    _no_algorithm,
    _width,
    _steps_unset,
    _topk_unset,
    _steps_zero,
    _tree,
    _no_draft,
    _data_parallel,
    _algorithm_of_the_draft,
    adaptive,
    _rejection,
    _window,
    _lossy,
)
