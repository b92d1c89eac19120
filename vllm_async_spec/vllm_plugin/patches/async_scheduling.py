"""Turns asynchronous scheduling on for speculative decoding if vLLM accepts it and the user did not choose."""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.log import inform, logger
from vllm_async_spec.vllm_plugin.metrics.snapshot import Engine
from vllm_async_spec.vllm_plugin.patches.prometheus_registry import publisher
from vllm_async_spec.vllm_plugin.runner_choice import created
from vllm_async_spec.vllm_plugin.scheduling import (
    KEPT,
    PLUGIN,
    USER,
    VLLM,
    Decision,
    Inquiry,
    accepts,
    choice_of,
    concluded,
    copied,
    is_asking,
    is_on,
    note,
    one_line,
    why_off,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from vllm_async_spec.vllm_plugin.upstream_batch import EngineArgs
    from vllm_async_spec.vllm_plugin.upstream_config import VllmConfig


def decide(
    engine_args: EngineArgs, create: Callable[[EngineArgs], VllmConfig], *, stock: bool | None = None
) -> tuple[VllmConfig, Decision]:
    """Create the engine's configuration, with asynchronous scheduling if vLLM accepts it and the user did not choose.

    vLLM's own validation decides. If it refuses asynchronous scheduling, its message is the reason in the decision.

    Args:
        engine_args: vLLM's `EngineArgs`; `async_scheduling` is None if the user did not choose. Not changed.
        create: stock `create_engine_config`.
        stock: stock vLLM's `async_scheduling` if the user did not choose: None for its own rule, False in 0.12 and
            0.13.

    Returns:
        The configuration from `create`, and the decision.
    """
    choice: bool | None = engine_args.async_scheduling
    if choice is not None:
        return _checked(create(engine_args), choice, USER, f"--{'' if choice else 'no-'}async-scheduling was given")
    reason = None
    if engine_args.speculative_config is not None:
        try:
            config = create(_choosing(engine_args, True))
        except Exception as error:  # an error that is not about our choice comes again below
            reason = one_line(error)
        else:
            method = config.speculative_config.method
            return _checked(config, True, PLUGIN, accepts(method))
    config = create(_choosing(engine_args, stock))
    decision = concluded(None, config)
    return config, decision if reason is None else replace(decision, why=reason)


def _checked(config: VllmConfig, asked: bool, by: str, why: str) -> tuple[VllmConfig, Decision]:
    """The decision, corrected if vLLM did not follow it: the CPU platform silently disables async scheduling."""
    if is_on(config) is asked:
        return config, Decision(asked, by, why)
    return config, Decision(not asked, VLLM, f"{by} asked for the opposite, and vLLM's platform overruled it")


def _choosing(engine_args: EngineArgs, choice: bool | None) -> EngineArgs:
    chosen = copied(engine_args)
    chosen.async_scheduling = choice
    return chosen


_DECIDING = contextvars.ContextVar("deciding", default=False)
"""Whether the patch `async-scheduling-default` decides, and so announces the decision itself."""


def _apply_default(transaction: Transaction, module: ModuleType) -> None:
    cls = module.EngineArgs
    original, stock = cls.create_engine_config, cls.async_scheduling

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        def decided(asked: EngineArgs) -> tuple[VllmConfig, Decision]:
            return decide(asked, lambda chosen: original(chosen, *args, **kwargs), stock=stock)

        given = copied(self)
        token = _DECIDING.set(True)
        try:
            config, decision = decided(self)
            decision = _with_reason(decision, given, config, lambda asked: decided(asked)[0])
        finally:
            _DECIDING.reset(token)
        _announce(config, decision)
        return config

    transaction.set(cls, "create_engine_config", create_engine_config)


def _apply_decision(transaction: Transaction, module: ModuleType) -> None:
    cls = module.EngineArgs
    original = cls.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        given = copied(self)
        config = created(lambda: original(self, *args, **kwargs))
        if not _DECIDING.get():
            decision = concluded(choice_of(given), config)
            _announce(config, _with_reason(decision, given, config, lambda asked: original(asked, *args, **kwargs)))
        return config

    transaction.set(cls, "create_engine_config", create_engine_config)


def _with_reason(
    decision: Decision, given: EngineArgs, config: VllmConfig, create: Callable[[EngineArgs], VllmConfig]
) -> Decision:
    """The decision, with the reason if vLLM did not schedule speculative decoding asynchronously."""
    if decision.enabled or decision.by == USER or given.speculative_config is None or is_asking():
        return decision
    try:
        return why_off(Inquiry(given, create), config, asked=choice_of(given) is True)
    except Exception as error:  # must not end a server that stock vLLM starts
        logger.debug("vllm-async-spec: the reason for synchronous scheduling is unknown: %s", error)
        return decision


def _announce(config: VllmConfig, decision: Decision) -> None:
    """Note the decision in the configuration; log it once per server."""
    note(config, decision)
    if not is_asking():
        publisher.report(engine=Engine(decision.enabled, decision.by))
    if not is_asking() and publisher.is_first(str(decision)):
        inform("vllm-async-spec: %s", decision)


def _apply_unset(transaction: Transaction, module: ModuleType) -> None:
    """Make `async_scheduling` None if it was not given, on releases whose default is `False`."""
    for cls in (module.EngineArgs, module.AsyncEngineArgs):
        transaction.set(cls, "__init__", _none_unless_given(cls.__init__))
    original = module.EngineArgs.add_cli_args

    @functools.wraps(original)
    def add_cli_args(parser: ArgumentParser) -> ArgumentParser:
        parser = original(parser)
        parser.set_defaults(async_scheduling=None)
        return parser

    transaction.set(module.EngineArgs, "add_cli_args", staticmethod(add_cli_args))
    _unset_the_one_being_made(module.EngineArgs)


def _none_unless_given(original: Callable[..., None]) -> Callable[..., None]:
    names = list(inspect.signature(original).parameters)[1:]
    position = names.index("async_scheduling")

    @functools.wraps(original)
    def __init__(self: EngineArgs, *args: Any, **kwargs: Any) -> None:
        if len(args) <= position:
            kwargs.setdefault("async_scheduling", None)
        original(self, *args, **kwargs)

    return __init__


def _unset_the_one_being_made(cls: type[EngineArgs]) -> None:
    """Unset `async_scheduling` of the `EngineArgs` whose constructor is loading the plugins, and so is unpatched.

    If `vllm.LLM` makes the object, its frame has the user's keyword arguments. For any other caller, `False` counts as
    the user's choice.
    """
    frame = sys._getframe()
    while frame is not None:
        made = frame.f_locals.get("self")
        caller = frame.f_back
        if frame.f_code.co_name == "__init__" and isinstance(made, cls) and caller is not None:
            by_llm = caller.f_globals.get("__name__") == "vllm.entrypoints.llm" and "kwargs" in caller.f_locals
            if by_llm and "async_scheduling" not in caller.f_locals["kwargs"]:
                made.async_scheduling = None
            return
        frame = caller  # type: ignore[assignment]  # None ends the loop


def unneeded_off_cpu() -> str | None:
    """Why this process does not need a patch of vLLM's CPU platform, or None."""
    from vllm.platforms import current_platform

    return None if current_platform.is_cpu() else "the platform is not the CPU"


def open_cpu_gate() -> None:
    """Let stock vLLM schedule asynchronously on a CPU and change nothing else, as a baseline for comparisons."""
    import vllm.platforms.cpu

    _apply_cpu(Transaction(), vllm.platforms.cpu)


def _apply_cpu(transaction: Transaction, module: ModuleType) -> None:
    """Keep asynchronous scheduling on the CPU if vLLM accepted it with speculative decoding.

    The platform's hook runs again in the engine core and the workers. There the drafter's configuration is a copy
    without `speculative_config`, but with the same SchedulerConfig. So a mark on the SchedulerConfig is needed.
    """
    cls = module.CpuPlatform
    original = vars(cls)["check_and_update_config"].__func__

    @functools.wraps(original)
    def check_and_update_config(platform: type[object], vllm_config: VllmConfig) -> None:
        scheduler = vllm_config.scheduler_config
        wanted = scheduler.async_scheduling and vllm_config.speculative_config is not None
        original(platform, vllm_config)
        if wanted or getattr(scheduler, KEPT, False):
            scheduler.async_scheduling = True
            setattr(scheduler, KEPT, True)

    setattr(check_and_update_config, KEPT, True)
    transaction.set(cls, "check_and_update_config", classmethod(check_and_update_config))


IMPLEMENTATIONS = {
    "async-scheduling-cpu": Implementation(_apply_cpu, unneeded_off_cpu),
    # Before the default, which wraps this wrapper.
    "async-scheduling-decision": Implementation(_apply_decision),
    "async-scheduling-default": Implementation(_apply_default),
    "async-scheduling-unset": Implementation(_apply_unset),
}
