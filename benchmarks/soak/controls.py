"""Where breaking an engine on purpose means something; what each control does to it is in `soak.engine`."""

from __future__ import annotations

from benchmarks.arms import Arm
from vllm_async_spec.vllm_plugin.ledger import load_ledger

RUNNER_RELEASES = next(spec.releases for spec in load_ledger() if spec.name == "optimistic-runner")
"""Those whose runner the plugin changes; elsewhere no wait for exact counts is asked for."""

_RUNNER = f"the runner of {RUNNER_RELEASES[0]} to {RUNNER_RELEASES[-1]} on a GPU"
_PLANS = "what the plugin plans with FlashInfer"
BREAKS = {"lengths": _PLANS, "fence": _PLANS, "positions": _RUNNER, "exact": _RUNNER}
"""What of the plugin a control breaks. `short`, which is not here, breaks the builders of any engine."""

FEATURE_CONTROLS = ("positions", "exact")
SOAK_CONTROLS = ("lengths", "fence", "short", "positions")
"""Without `exact`: a soak's requests are greedy and nothing else, so none of them needs exact counts."""


def can_show(control: str, subject: Arm) -> bool:
    """Whether anything in a soak of this engine, with the plugin, is broken by one of `SOAK_CONTROLS`."""
    if control == "short":
        return True
    if control == "positions":
        return subject.release in RUNNER_RELEASES
    return bool(subject.engine.get("attention_config", {}).get("backend") == "FLASHINFER")
