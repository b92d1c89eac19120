"""Which controls, deliberate breakages, can show in which engine; `soak.engine` implements them."""

from benchmarks.arms import Arm
from benchmarks.shapes import find_shape
from vllm_async_spec.vllm_plugin.ledger import find_patch

RUNNER_RELEASES = find_patch("optimistic-runner").releases
"""Releases whose runner the plugin changes; only these wait for exact counts."""

_RUNNER = f"the runner of {RUNNER_RELEASES[0]} to {RUNNER_RELEASES[-1]} on a GPU"
_PLANS = "the plugin's plans for FlashInfer"
_CARRIED = find_patch("carried-inputs").releases
_CARRYING = f"the V1 runner of {_CARRIED[0]} to {_CARRIED[-1]}"
BREAKS = {
    "lengths": _PLANS,
    "fence": _PLANS,
    "positions": _RUNNER,
    "exact": _RUNNER,
    "carried": f"inputs that {_CARRYING} keeps on the device",
    "moved": f"rows that {_CARRYING} gathers from their old places",
    "kept": "kept metadata of linear attention, in the V1 runner",
}
"""The part of the plugin that each control breaks."""

LAST_RANK, STATES = "short-last-rank", "states"
BREAKS_ANY = {
    "short": "the builders",
    LAST_RANK: "the builders of one of several ranks",
    STATES: "the states of linear attention",
}
"""What controls break that break any engine, stock too."""
FEATURE_CONTROLS = {"positions": RUNNER_RELEASES, "exact": RUNNER_RELEASES, "carried": _CARRIED, "moved": _CARRIED}
"""Those of cases of features, and in which releases' V1 runner they break anything."""
CPU_CONTROLS = ("carried", "moved")
"""Those of `FEATURE_CONTROLS` that break an engine on a CPU too, which `runner_on_cpu` changes as on a GPU."""
SOAK_CONTROLS = ("lengths", "fence", "short", LAST_RANK, STATES, "positions", "carried", "moved", "kept")
"""Without `exact`: a soak's requests are plain greedy, so none needs exact counts."""


def can_show(control: str, subject: Arm) -> bool:
    """Whether `control`, one of `SOAK_CONTROLS`, breaks anything in a soak of this engine with the plugin."""
    if control == "short":
        return True
    if control == LAST_RANK:
        return subject.gpus > 1
    if control == STATES:
        return find_shape(subject.shape).has_linear_attention
    if control == "kept":
        return find_shape(subject.shape).has_linear_attention and subject.runner != "V2"
    if control in FEATURE_CONTROLS:
        return subject.runner == "V1" and subject.release in FEATURE_CONTROLS[control]
    return bool(subject.engine.get("attention_config", {}).get("backend") == "FLASHINFER")
