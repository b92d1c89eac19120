"""`vllm-async-spec status`: the environment, the state of each patch, and the origin of each setting."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_async_spec._version import __version__
from vllm_async_spec.vllm_plugin import runner_choice
from vllm_async_spec.vllm_plugin.graph_limit import graph_limit
from vllm_async_spec.vllm_plugin.ledger import (
    Ledger,
    PatchError,
    PatchSpec,
    State,
    count_states,
    known_releases,
    read_ledger,
)
from vllm_async_spec.vllm_plugin.scheduling import Decision, Stock, explain, one_line
from vllm_async_spec.vllm_plugin.serve_arguments import ArgumentsError, read_arguments
from vllm_async_spec.vllm_plugin.settings import Mode, Settings, left_out
from vllm_async_spec.vllm_plugin.state import Plugin, active_plugin


class NoVllmError(RuntimeError):
    """vLLM is missing or can't be imported; the message says what to do."""


@dataclass(frozen=True, slots=True)
class PatchStatus:
    """One row of the table of patches."""

    name: str
    state: State
    detail: str
    summary: str


@dataclass(frozen=True, slots=True)
class Status:
    """The content of the status report; `--json` prints `to_dict`."""

    version: str
    vllm: str
    known: bool
    """Whether the ledger knows this release of vLLM."""
    newest_known: str
    torch: str
    device: str
    family: str
    runner: str
    runner_why: str | None
    """Who chose the runner, and why; None without engine arguments."""
    runner_refused: str | None
    """Why vLLM does not take the runner that the user asked the plugin for, or None."""
    alternative: str | None
    """How to try vLLM's V2 runner, where vLLM chose V1 and V2 supports the engine; else None."""
    backend: str | None
    """The attention backend, if engine arguments were given."""
    graph_limit: str | None
    """From how many requests on steps have no CUDA graph, and what to do; None if all have one, or there are none."""
    scheduling: str
    async_scheduling: bool | None
    """Whether scheduling would be asynchronous; None without engine arguments, as the next three."""
    decided_by: str | None
    """`user`, `vllm-async-spec` or `vLLM`."""
    reason: str | None
    remedy: str | None
    """What would turn asynchronous scheduling on; None if it is on, or nothing would."""
    settings: dict[str, dict[str, str]]
    failure: str | None
    """Why no patch is applied although the mode allows patches, or None."""
    loaded: bool
    """Whether vLLM would load the plugin: `VLLM_PLUGINS` may leave it out."""
    patches: tuple[PatchStatus, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many patches are in each state, as in the log, `/metrics` and the audit."""
        return count_states({patch.name: patch.state for patch in self.patches})

    @property
    def healthy(self) -> bool:
        """Whether vLLM loads the plugin, takes the runner asked for, and nothing was refused or left waiting."""
        settled = not any(patch.state in (State.REFUSED, State.WAITING) for patch in self.patches)
        return self.loaded and self.failure is None and self.runner_refused is None and settled

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"counts": self.counts, "healthy": self.healthy}


def read_status(arguments: Sequence[str] | None = None, progress: Callable[[str], None] = lambda stage: None) -> Status:
    """Load the plugin into this process, as vLLM would, and report its state.

    Args:
        arguments: of `vllm serve`, for the engine's part of the report; may be None.
        progress: called with what is being done.

    Raises:
        NoVllmError: vLLM is not installed or can't be imported.
        SettingError: an environment variable has an unknown value.
        StrictError: the mode is `strict` and a patch was refused.
        ArgumentsError: vLLM does not take the arguments.
    """
    Settings.read()
    vllm = _import_vllm(progress)
    from vllm_async_spec.vllm_plugin.plugin import load

    loaded = not left_out()
    # Asked before the plugin is loaded, where vLLM would not load the plugin.
    engine = None if loaded else _engine(arguments, _LEFT_OUT, progress)
    plugin = load(report=False)
    settings = plugin.settings
    if plugin.ledger is not None:
        progress("importing what the patches change")
        _import_targets(plugin.ledger)
    specs, unreadable = _entries()
    releases = known_releases(specs)
    summaries = {spec.name: spec.summary for spec in specs} | dict.fromkeys(unreadable, "")
    engine = engine or _engine(arguments, _stock(plugin), progress)
    decision = engine.decision
    return Status(
        version=__version__,
        vllm=vllm,
        known=vllm.partition("+")[0] in releases,
        newest_known=releases[-1] if releases else "none",
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        family=_family(),
        runner=engine.runner,
        runner_why=engine.runner_why,
        runner_refused=plugin.runner_refused,
        alternative=engine.alternative,
        backend=engine.backend,
        graph_limit=engine.graph_limit,
        scheduling=str(decision) if decision else "depends on the engine's arguments; give them as to `vllm serve`",
        async_scheduling=decision.enabled if decision else None,
        decided_by=decision.by if decision else None,
        reason=decision.why if decision else None,
        remedy=decision.remedy if decision else None,
        settings={
            "VLLM_ASYNC_SPEC": {"value": settings.mode.value, "from": settings.mode_from},
            "VLLM_ASYNC_SPEC_SYNC": {"value": settings.sync.value, "from": settings.sync_from},
            "VLLM_ASYNC_SPEC_AUDIT": {"value": settings.audit.value, "from": settings.audit_from},
            "VLLM_ASYNC_SPEC_RUNNER": {"value": settings.runner.value, "from": settings.runner_from},
        },
        failure=plugin.failure,
        loaded=loaded,
        patches=_patches(plugin.ledger, summaries, settings.mode),
    )


def _import_vllm(progress: Callable[[str], None]) -> str:
    if importlib.util.find_spec("vllm") is None:
        raise NoVllmError(
            "vLLM is not installed in this environment; run `pip install vllm`, or without a GPU follow the "
            "documentation's page on installing"
        )
    progress("importing vLLM")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM logs to stdout, between the lines of the report
    try:
        return str(importlib.import_module("vllm").__version__)
    except Exception as error:
        raise NoVllmError(f"vLLM is installed but can't be imported: {type(error).__name__}: {error}") from error


def _import_targets(ledger: Ledger) -> None:
    """Import every module that a patch targets, so that no patch stays waiting."""
    for outcome in ledger.outcomes.values():
        for module in outcome.modules:
            with contextlib.suppress(Exception):  # a module of another release, or with missing dependencies
                importlib.import_module(module)


def _entries() -> tuple[tuple[PatchSpec, ...], dict[str, str]]:
    try:
        return read_ledger()
    except PatchError:  # `load` has already reported it
        return (), {}


def _patches(ledger: Ledger | None, summaries: Mapping[str, str], mode: Mode) -> tuple[PatchStatus, ...]:
    outcomes = {} if ledger is None else ledger.outcomes
    found = []
    for name in sorted({*summaries, *outcomes}):
        if outcome := outcomes.get(name):
            found.append(PatchStatus(name, outcome.state, outcome.detail, outcome.spec.summary))
        else:
            why = "VLLM_ASYNC_SPEC_AUDIT=0" if name.startswith("audit-") else f"VLLM_ASYNC_SPEC={mode.value}"
            found.append(PatchStatus(name, State.OFF, why, summaries[name]))
    return tuple(found)


def _family() -> str:
    """Which of the three runner designs this vLLM has, judged by its source."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    worker = Path(spec.origin).parent / "v1" / "worker"
    v1, v2 = worker / "gpu_model_runner.py", worker / "gpu" / "model_runner.py"
    device = v1.is_file() and "def _compute_prev_positions" in v1.read_text(encoding="utf-8")
    return ("device positions" if device else "host positions") + (", with a V2 runner" if v2.is_file() else "")


@dataclass(frozen=True, slots=True)
class _Engine:
    """What an engine would use."""

    runner: str = "depends on the model"
    runner_why: str | None = None
    alternative: str | None = None
    backend: str | None = None
    graph_limit: str | None = None
    decision: Decision | None = None


def _engine(arguments: Sequence[str] | None, stock: Stock | None, progress: Callable[[str], None]) -> _Engine:
    """What an engine with these arguments would use.

    Raises:
        ArgumentsError: vLLM does not take the arguments.
    """
    if arguments is None:
        return _Engine()
    progress("asking vLLM for the engine's configuration")
    try:
        given = read_arguments(arguments)
        config, decision = explain(given.engine_args, stock=stock, said_no=given.said_no)
    except ArgumentsError:
        raise
    except Exception as error:
        raise ArgumentsError(one_line(error)) from error
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    name = getattr(backend, "name", None) or "vLLM's choice for this device"
    plugin = active_plugin()
    if plugin is not None:
        runner_choice.settle_inquiry(plugin)
    return _Engine(
        runner=runner_choice.runner_of(config),
        runner_why=runner_choice.why(config, plugin),
        alternative=runner_choice.alternative(config, plugin),
        backend=name,
        graph_limit=graph_limit(config),
        decision=decision,
    )


_LEFT_OUT = Stock("VLLM_PLUGINS leaves the plugin out, so vLLM runs as stock", "add async_spec to VLLM_PLUGINS")


def _stock(plugin: Plugin) -> Stock | None:
    """Why the loaded plugin leaves vLLM as stock, or None."""
    if plugin.settings.mode is Mode.OFF:
        return Stock("VLLM_ASYNC_SPEC is off, so vLLM runs as stock", "unset VLLM_ASYNC_SPEC")
    if plugin.failure is not None:
        return Stock("the plugin failed, so vLLM runs as stock", None)
    return None
