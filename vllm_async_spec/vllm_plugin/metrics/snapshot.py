"""Counters and patch states of one process, in the form that the server's processes exchange."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field

from vllm_async_spec.sync_policy import CallSite, SyncReport
from vllm_async_spec.vllm_plugin.ledger import Outcome, State

_TELLING = (State.WAITING, State.NOT_NEEDED, State.APPLIED, State.REFUSED)
"""States by precedence, lowest first: a server's patch is refused if any process refused it, and so on."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine runs with."""

    asynchronous: bool
    """Whether its scheduling is asynchronous."""
    decided_by: str
    """Who decided that: `user`, `vllm-async-spec`, `vLLM` or `unknown`."""
    runner: str = "unknown"
    """`V1` or `V2`; unknown to the front end."""
    backend: str = "unknown"
    """Its attention backends, separated by commas; unknown to the front end."""


@dataclass(slots=True)
class Snapshot:
    """Counters of one process or the sum over several, since each started."""

    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Host waits by cause and kind."""
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    """Seconds of these waits."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Batches that waited because a request needs exact host counts, by reason."""
    patches: dict[str, State] = field(default_factory=dict)
    """State of each patch."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why each refused patch was refused."""
    foreseen: dict[str, tuple[State, str]] = field(default_factory=dict)
    """The state of each patch whose module an engine did not import by its start, if a later import settles it."""
    engines: list[Engine] = field(default_factory=list)
    """What the engines run with. A front end's entry counts only if no worker has one."""

    @classmethod
    def of(cls, report: SyncReport, outcomes: Mapping[str, Outcome]) -> Snapshot:
        """The snapshot of this process."""
        snapshot = cls(
            fallbacks=Counter(report.fallbacks),
            patches={name: outcome.state for name, outcome in outcomes.items()},
            refused={name: outcome.detail for name, outcome in outcomes.items() if outcome.state is State.REFUSED},
        )
        for entry in report.sites:
            cause = f"{entry.what} at {_importable(entry.site)}"
            snapshot.add_wait(cause, entry.kind.value, entry.count, entry.seconds)
        return snapshot

    @classmethod
    def together(cls, snapshots: Iterable[Snapshot]) -> Snapshot:
        """Sum of the counters, and each patch's state of highest precedence."""
        total = cls()
        for snapshot in snapshots:
            for (cause, kind), count in snapshot.waits.items():
                total.add_wait(cause, kind, count, snapshot.seconds[cause, kind])
            total.fallbacks.update(snapshot.fallbacks)
            for name, state in snapshot.patches.items():
                total.patches[name] = max(state, total.patches.get(name, state), key=_TELLING.index)
            total.refused |= snapshot.refused
            total.foreseen |= snapshot.foreseen
            total.engines += [engine for engine in snapshot.engines if engine not in total.engines]
        for name, (state, why) in total.foreseen.items():
            if total.patches.get(name) is State.WAITING:
                total.patches[name] = state
                total.refused |= {name: why} if state is State.REFUSED else {}
        known = [engine for engine in total.engines if engine.runner != "unknown"]
        total.engines = known or total.engines[-1:]
        return total

    def to_json(self) -> str:
        """JSON text for `from_json`."""
        waits = [[cause, kind, count, self.seconds[cause, kind]] for (cause, kind), count in self.waits.items()]
        plain = {
            "waits": waits,
            "fallbacks": self.fallbacks,
            "patches": self.patches,
            "refused": self.refused,
            "foreseen": self.foreseen,
            "engines": [astuple(engine) for engine in self.engines],
        }
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """The snapshot from a text by `to_json`."""
        data = json.loads(text)
        snapshot = cls(
            fallbacks=Counter(data["fallbacks"]),
            patches={name: State(state) for name, state in data["patches"].items()},
            refused=data["refused"],
            foreseen={name: (State(state), why) for name, (state, why) in data["foreseen"].items()},
            engines=[Engine(*values) for values in data["engines"]],
        )
        for wait in data["waits"]:
            snapshot.add_wait(*wait)
        return snapshot

    def add_wait(self, cause: str, kind: str, count: int, seconds: float) -> None:
        """Add `count` waits that took `seconds` in total."""
        self.waits[cause, kind] += count
        self.seconds[cause, kind] = self.seconds.get((cause, kind), 0.0) + seconds


def _importable(site: CallSite) -> str:
    """The call site, with its file relative to `sys.path`, the same in every installation."""
    roots = [root + os.sep for root in sys.path if root and site.file.startswith(root + os.sep)]
    file = site.file.removeprefix(max(roots, key=len)) if roots else os.path.basename(site.file)
    return f"{file}:{site.line} {site.function}"
