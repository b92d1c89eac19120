"""A module that a patch of the ledger targets, and the patch's entry."""

from vllm_async_spec.vllm_plugin.ledger import PatchSpec, Target
from vllm_async_spec.vllm_plugin.ledger.fingerprint import fingerprints

SOURCE = '''
import dataclasses
import functools

class Runner:
    """Runs."""

    def step(self, tokens: int = 1) -> int:
        """Documented."""
        # commented
        return tokens + 1

    @property
    def name(self):
        return f"runner {1}"
'''


def spec(module: str, qualname: str = "Runner.step", source: str = SOURCE, name: str = "double") -> PatchSpec:
    known = fingerprints(source, [qualname])
    target = Target(module, qualname, {"1.0": known.get(qualname, "gone")})
    return PatchSpec(name, "doubles", "why", "upstream", "never", (target,))
