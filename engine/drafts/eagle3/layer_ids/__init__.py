"""Layer ids of other engines and trainers for our slots. One table (`table.py`); every translation goes through it.

A canonical slot k is the residual stream after k decoder layers. Others number the same states differently, and SGLang
differently by version and by family of the target: one list of ids means different states (F4).
"""

from slipstream.engine.drafts.eagle3.layer_ids.conventions import CONVENTIONS, Convention
from slipstream.engine.drafts.eagle3.layer_ids.families import Family, Runner, default_runner, family_of
from slipstream.engine.drafts.eagle3.layer_ids.reading import Capture, Reading, reading, who_can
from slipstream.engine.drafts.eagle3.layer_ids.table import Outcome
from slipstream.engine.engine_versions import Engine

# The releases for which convert writes ids, and whose reading a draft's config.json is held against.
KNOWN_VERSIONS = {Engine.VLLM: "0.24.0", Engine.SGLANG: "0.5.14"}

__all__ = [
    "CONVENTIONS",
    "KNOWN_VERSIONS",
    "Capture",
    "Convention",
    "Engine",
    "Family",
    "Outcome",
    "Reading",
    "Runner",
    "default_runner",
    "family_of",
    "reading",
    "who_can",
]
