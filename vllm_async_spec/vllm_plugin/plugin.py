"""Loads the plugin: settles the patches of this process once, and logs a one-line summary."""

from __future__ import annotations

import importlib.util
import itertools
import os
import runpy
import sys
from pathlib import Path

from vllm_async_spec._version import __version__
from vllm_async_spec.sync_policy import set_sync_policy
from vllm_async_spec.vllm_plugin.ledger import Implementation, Ledger, Outcome, State, read_ledger
from vllm_async_spec.vllm_plugin.log import inform, is_main_process, logger
from vllm_async_spec.vllm_plugin.patches.implementations import IMPLEMENTATIONS
from vllm_async_spec.vllm_plugin.patches.prometheus_registry import publisher
from vllm_async_spec.vllm_plugin.runner_choice import leave_to_vllm, take
from vllm_async_spec.vllm_plugin.settings import MODE, Audit, Mode, SettingError, Settings
from vllm_async_spec.vllm_plugin.state import Plugin, activate, active_plugin
from vllm_async_spec.vllm_plugin.strict import StrictError, Strictness


def load(*, report: bool = True) -> Plugin:
    """Read the settings and settle every patch, now or as soon as its module is imported; `report` logs the result.

    A second call changes nothing, and a forked child is already loaded. In the mode `auto`, any other failure leaves
    stock vLLM.

    Raises:
        SettingError: an environment variable has a value that does not exist.
        StrictError: the mode is `strict` and a patch was refused.
    """
    plugin = active_plugin()
    if plugin is None:
        plugin = Plugin(Settings.read())
        activate(plugin)
        try:
            _install(plugin, report)
        except Exception as error:
            _run_stock(plugin, error)
    elif plugin.strictness is not None:
        plugin.strictness.insist()
    return plugin


def entry_point() -> None:
    """Call `load` for vLLM. A wrong setting ends vLLM's command line with one sentence and no traceback.

    Raises:
        SettingError: as in `load`, if vLLM is used as a library.
        StrictError: as in `load`.
    """
    try:
        load()
    except SettingError as error:
        if _is_vllms_command_line(Path(sys.argv[0])):
            raise SystemExit(f"vllm-async-spec: {error}") from None
        raise


def _install(plugin: Plugin, report: bool) -> None:
    settings = plugin.settings
    implementations = _allowed(settings)
    if not implementations:
        return
    set_sync_policy(settings.sync)
    _take_runner(plugin, report)
    specs, unreadable = read_ledger()
    plugin.strictness = strictness = Strictness() if settings.mode is Mode.STRICT else None

    def on_settled(outcome: Outcome) -> None:
        _publish()
        if outcome.state is State.REFUSED and strictness is not None:
            strictness.refuse(outcome.spec.name, outcome.detail)
        elif outcome.state is State.REFUSED and report:
            _report_refusal(outcome)

    plugin.ledger = ledger = Ledger(implementations, specs, on_settled, unreadable=unreadable, release=_release())
    if settings.mode is not Mode.OFF:
        publisher.start(ledger.outcomes)
    if settings.audit is Audit.ON:
        from vllm_async_spec.vllm_plugin.audit_agent.agent import hear_events_from_now_on

        hear_events_from_now_on()
    if strictness is not None:
        strictness.watch({name for outcome in ledger.outcomes.values() for name in outcome.modules})
    ledger.install()
    if report and settings.mode is not Mode.OFF:
        _report(settings)


def _take_runner(plugin: Plugin, report: bool) -> None:
    """Have vLLM take the runner that the user chose.

    Raises:
        StrictError: the mode is `strict`, and vLLM can't take it.
    """
    if plugin.settings.mode is Mode.OFF:
        return
    plugin.runner_refused = take(plugin)
    strict = plugin.settings.mode is Mode.STRICT
    if plugin.runner_refused is not None and (strict or (report and is_main_process())):
        leave_to_vllm(plugin.runner_refused, strict)


def _run_stock(plugin: Plugin, error: Exception) -> None:
    """Undo all patches and log why; in the mode `strict`, raise StrictError."""
    plugin.failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if plugin.settings.mode is Mode.STRICT:
        raise StrictError(f"the plugin failed: {plugin.failure}")
    logger.warning("vllm-async-spec: running stock vLLM in process %d: %s", os.getpid(), plugin.failure)
    if plugin.ledger is not None:
        plugin.ledger.refuse_all(f"the plugin failed: {plugin.failure}")


def _allowed(settings: Settings) -> dict[str, Implementation]:
    """The patches that the settings allow, by name."""
    patches = {} if settings.mode is Mode.OFF else IMPLEMENTATIONS
    if settings.audit is Audit.OFF:
        return patches
    # Import the agent only if audits are on, so that otherwise it costs nothing.
    from vllm_async_spec.vllm_plugin.audit_agent.agent import IMPLEMENTATIONS as AUDIT

    return patches | AUDIT


def _release() -> str | None:
    """The release of this process's vLLM, imported yet or not, without its local part; None if it has no version."""
    if "vllm" in sys.modules:
        version = getattr(sys.modules["vllm"], "__version__", None)
    else:
        found = importlib.util.find_spec("vllm")
        file = Path(found.origin).with_name("_version.py") if found and found.origin else None
        version = runpy.run_path(str(file)).get("__version__") if file and file.is_file() else None
    return version.partition("+")[0] if isinstance(version, str) else None


def _publish() -> None:
    try:
        publisher.publish()
    except Exception as error:  # must not fail the import of a vLLM module that settled a patch
        logger.debug("vllm-async-spec: the new state of a patch is not in /metrics: %s", error)


def _is_vllms_command_line(program: Path) -> bool:
    # The second condition is for `python -m vllm.entrypoints.cli.main` and the like.
    return program.name == "vllm" or ("vllm", "entrypoints") in itertools.pairwise(program.parts)


def _report(settings: Settings) -> None:
    """Log that the plugin is on. The counts of patches follow once an engine exists: see `engine_report`."""
    mode = f"{MODE}={settings.mode.value}"
    if is_main_process():
        inform("vllm-async-spec %s is on: %s; `vllm-async-spec status` lists the patches", __version__, mode)
    else:
        logger.debug("vllm-async-spec %s is on in process %d: %s", __version__, os.getpid(), mode)


def _report_refusal(outcome: Outcome) -> None:
    """Log a refusal once per server, from the first process that refuses."""
    if publisher.is_first(f"{outcome.spec.name}: {outcome.detail}"):
        logger.warning("vllm-async-spec: running stock vLLM for %s: %s", outcome.spec.name, outcome.detail)
