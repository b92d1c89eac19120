"""Who decided whether scheduling is asynchronous, and why.

vLLM's own configuration is asked: once as the engine is, then with one argument changed at a time. So the reason is the
one that decides in this release, and no rule of vLLM's is repeated here.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm_async_spec.vllm_plugin.ledger import State
from vllm_async_spec.vllm_plugin.state import active_plugin

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream_batch import EngineArgs
    from vllm_async_spec.vllm_plugin.upstream_config import VllmConfig

USER, PLUGIN, VLLM = "user", "vllm-async-spec", "vLLM"
KEPT = "_async_spec_kept"
"""Marks a SchedulerConfig whose asynchronous scheduling was kept on, also in the other processes."""
_NOTE = "_async_spec_decision"
"""The decision in a SchedulerConfig: plain values, so that a process without the plugin can unpickle them."""
_NOTHING = ", where the plugin decides nothing"
_UNDECIDED = f"without speculative decoding{_NOTHING}"
_CPU_PATCH = "async-scheduling-cpu"

Create = Callable[["EngineArgs"], "VllmConfig"]


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether scheduling is asynchronous, who decided it (`user`, `vllm-async-spec` or `vLLM`), why, and a remedy."""

    enabled: bool
    by: str
    why: str
    remedy: str | None = None
    """What would turn asynchronous scheduling on; None if it is on, or nothing would."""

    def __str__(self) -> str:
        return f"asynchronous scheduling is {'on' if self.enabled else 'off'}, decided by {self.by}: {self.why}"


@dataclass(frozen=True, slots=True)
class Stock:
    """Why the plugin leaves vLLM as stock."""

    why: str
    remedy: str | None
    """What makes the plugin act; None if nothing does."""


def note(config: VllmConfig, decision: Decision) -> None:
    """Note the decision in the configuration, for the engine's other processes."""
    setattr(config.scheduler_config, _NOTE, astuple(decision))


def noted(config: VllmConfig) -> Decision | None:
    """The decision noted in the configuration, or None."""
    found = getattr(config.scheduler_config, _NOTE, None)
    if found is None:
        return None
    decision, enabled = Decision(*found), is_on(config)
    return decision if decision.enabled is enabled else Decision(enabled, VLLM, "vLLM changed its configuration later")


def is_on(config: VllmConfig) -> bool:
    """Whether scheduling is asynchronous."""
    return bool(config.scheduler_config.async_scheduling)


def concluded(choice: bool | None, config: VllmConfig) -> Decision:
    """The decision, as far as the user's choice, if any, and the finished configuration tell."""
    enabled, method = is_on(config), getattr(config.speculative_config, "method", None)
    if choice is not None and enabled is choice:
        return Decision(enabled, USER, f"{_option(choice)} was given")
    if choice is not None:
        return Decision(
            enabled, VLLM, f"{_option(choice)} was given, and vLLM's platform turned asynchronous scheduling off"
        )
    if getattr(config.scheduler_config, KEPT, False):
        why = f"{accepts(method)}, and the plugin keeps vLLM's CPU platform from turning it off"
        return Decision(enabled, PLUGIN, why)
    default = f"vLLM's default is {'on' if enabled else 'off'}"
    if method is None:
        return Decision(enabled, VLLM, f"{default} {_UNDECIDED}")
    return Decision(enabled, VLLM, f"{default} with the method {method}")


def accepts(method: str | None) -> str:
    """The reason for asynchronous scheduling that vLLM would not have turned on."""
    return f"vLLM accepts asynchronous scheduling with the method {method}"


def explain(
    engine_args: EngineArgs, *, stock: Stock | None = None, said_no: bool = False
) -> tuple[VllmConfig, Decision]:
    """The configuration that vLLM makes of a server's arguments in this process, who decided its scheduling, and why.

    Args:
        engine_args: vLLM's `EngineArgs`. Not changed.
        stock: why the plugin leaves vLLM as stock, or None if it acts.
        said_no: whether the user gave `--no-async-scheduling`. Stock 0.12 and 0.13 do not tell it from no choice.

    Raises:
        Exception: vLLM refuses the arguments; the message is vLLM's.
    """
    ask = Inquiry(engine_args, _of_server)
    config = ask.config(engine_args.async_scheduling)
    choice = False if said_no else choice_of(engine_args)
    decision = noted(config) or concluded(choice, config)
    if decision.enabled:
        if stock is not None and decision.by == VLLM:
            decision = replace(decision, why=f"{stock.why}: {decision.why.removesuffix(_NOTHING)}")
        return config, decision
    if decision.by == USER:
        remedy = f"leave out {_option(False)}" if ask.turns_on(None) else None
        return config, replace(decision, remedy=remedy)
    return config, why_off(ask, config, stock, asked=choice is True)


def _of_server(engine_args: EngineArgs) -> VllmConfig:
    from vllm.usage.usage_lib import UsageContext

    return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)


def choice_of(engine_args: EngineArgs) -> bool | None:
    """What the user chose, or None. Where vLLM's default is False, False counts as no choice."""
    choice: bool | None = engine_args.async_scheduling
    return None if choice is False and type(engine_args).async_scheduling is False else choice


def copied(engine_args: EngineArgs) -> EngineArgs:
    """A copy, also of `speculative_config`, because vLLM adds entries to it."""
    found = copy.copy(engine_args)
    found.speculative_config = copy.copy(engine_args.speculative_config)
    return found


class Inquiry:
    """Asks vLLM about one engine's `EngineArgs`, which stay unchanged, and about the same with one of them changed.

    `create` makes the configuration, with whatever patches this process has.
    """

    def __init__(self, engine_args: EngineArgs, create: Create) -> None:
        self.engine_args = copied(engine_args)
        self._create = create

    def config(self, choice: bool | None, **changes: object) -> VllmConfig:
        """The configuration with this choice and these changes, without a line in the log.

        Raises:
            Exception: vLLM refuses the arguments.
        """
        asked = copied(self.engine_args)
        asked.async_scheduling = choice
        for name, value in changes.items():
            setattr(asked, name, value)
        with _asking():
            return self._create(asked)

    def turns_on(self, choice: bool | None, **changes: object) -> bool:
        """Whether scheduling is asynchronous with this choice and these changes; False if vLLM refuses them."""
        try:
            return is_on(self.config(choice, **changes))
        except Exception:
            return False

    def refusal(self, **changes: object) -> str | None:
        """Why vLLM refuses asynchronous scheduling with these changes, or None if it accepts."""
        try:
            self.config(True, **changes)
        except Exception as error:
            return one_line(error)
        return None


def is_asking() -> bool:
    """Whether a configuration is being made only to learn from it."""
    return _ASKING.get()


def one_line(error: Exception) -> str:
    """The message of an exception on one line; for pydantic's, that of the first error."""
    errors = getattr(error, "errors", None)
    message = errors()[0]["msg"] if callable(errors) else str(error)
    return " ".join(str(message).removeprefix("Value error, ").split())


_ASKING = contextvars.ContextVar("asking", default=False)


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Keep what vLLM does meanwhile out of the log and of the environment, where its platforms set variables."""
    token, disabled, environment = _ASKING.set(True), logging.root.manager.disable, dict(os.environ)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        _ASKING.reset(token)
        # Only what differs: another thread must not find the environment empty.
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})


@dataclass(frozen=True, slots=True)
class _Cause:
    """One argument whose change removes vLLM's refusal."""

    what: str
    remedy: str
    changes: dict[str, object]
    is_method: bool = False
    """Whether the cause is the speculative method."""


def _causes(engine_args: EngineArgs, method: str | None) -> Iterator[_Cause]:
    """The arguments that may be the cause, and for each its change."""
    drafts: dict[str, Any] | None = engine_args.speculative_config
    if drafts is not None:
        padded = "disable_padded_drafter_batch"
        if drafts.get(padded):
            without = {name: value for name, value in drafts.items() if name != padded}
            yield _Cause(padded, f"leave out {padded}", {"speculative_config": without})
        how = "choose a speculative method that vLLM schedules asynchronously, such as eagle"
        yield _Cause(f"the method {method}", how, {"speculative_config": None}, is_method=True)
    executor = getattr(engine_args, "distributed_executor_backend", None)
    if executor not in (None, "mp"):
        name = executor if isinstance(executor, str) else executor.__name__
        option = "--distributed-executor-backend mp"
        yield _Cause(f"the executor {name}", f"give {option}", {"distributed_executor_backend": "mp"})
    if engine_args.pipeline_parallel_size > 1:
        option = "--pipeline-parallel-size"
        yield _Cause("pipeline parallelism", f"leave out {option}", {"pipeline_parallel_size": 1})
    if getattr(engine_args, "enable_dbo", False):
        yield _Cause("--enable-dbo", "leave out --enable-dbo", {"enable_dbo": False})


def why_off(ask: Inquiry, config: VllmConfig, stock: Stock | None = None, *, asked: bool = False) -> Decision:
    """Why vLLM turned asynchronous scheduling off; `asked`: whether the user gave `--async-scheduling`."""
    causes = list(_causes(ask.engine_args, getattr(config.speculative_config, "method", None)))
    why = ask.refusal()
    if why is None and ask.turns_on(True):
        return _left_off(ask, config, causes, stock)
    cause = None if why is None else _cause_of(ask, causes)
    everything = {name: value for each in causes for name, value in each.changes.items()}
    kept = _platform_keeps() and ask.engine_args.speculative_config is not None
    if why is None or (not kept and ask.refusal(**everything) is None and not ask.turns_on(True, **everything)):
        return _platform(ask, cause, stock, asked=asked)
    named = f" with {cause.what}" if cause else ""
    sentence = f"vLLM refuses asynchronous scheduling{named}: {why}"
    remedy = None if cause is None else cause.remedy
    # The plugin turns another method on; any other change may leave vLLM's default, which may be off.
    by_default = cause is None or (cause.is_method and stock is None) or ask.turns_on(None, **cause.changes)
    if cause is not None and not by_default and ask.turns_on(True, **cause.changes):
        remedy = f"{remedy} and give {_option(True)}"
    return Decision(False, VLLM, f"{stock.why}: {sentence}" if stock else sentence, remedy)


def _cause_of(ask: Inquiry, causes: list[_Cause]) -> _Cause | None:
    """The argument for which vLLM refuses asynchronous scheduling, or None if no single one is the cause."""
    accepted = [each for each in causes if ask.refusal(**each.changes) is None]
    if len(accepted) < 2:
        return next(iter(accepted), None)
    # After some changes vLLM only turns asynchronous scheduling off before it comes to the refusal.
    return next((each for each in accepted if ask.turns_on(True, **each.changes)), accepted[0])


def _left_off(ask: Inquiry, config: VllmConfig, causes: list[_Cause], stock: Stock | None) -> Decision:
    """VLLM accepts asynchronous scheduling, and its default leaves it off."""
    if _pools(ask, config):
        what = "with pooling models"
    elif cause := next((each for each in causes if ask.turns_on(None, **each.changes)), None):
        what = f"with {cause.what}"
    else:
        what = "unless the user asks for it"
    why = f"vLLM's default is off {what}"
    return Decision(False, VLLM, f"{stock.why}: {why}" if stock else why, f"give {_option(True)}")


def _pools(ask: Inquiry, config: VllmConfig) -> bool:
    """Whether the default is off because the model is a pooling model."""
    if getattr(config.model_config, "runner_type", None) != "pooling":
        return False
    try:
        return is_on(ask.config(None, runner="generate"))
    except Exception:  # the model can't generate, so only the release's general default can be another cause
        return type(ask.engine_args).async_scheduling is not False


def _platform(ask: Inquiry, cause: _Cause | None, stock: Stock | None, *, asked: bool) -> Decision:
    """VLLM's platform turns asynchronous scheduling off, whatever the arguments."""
    from vllm.platforms import current_platform

    name = "CPU" if current_platform.is_cpu() else type(current_platform).__name__.removesuffix("Platform")
    why = f"vLLM's {name} platform turns asynchronous scheduling off"
    if asked:
        why += f", although {_option(True)} was given"
    speculative = ask.engine_args.speculative_config is not None
    steps = [] if speculative else ["add --speculative-config"]
    if cause is not None:
        steps.append(cause.remedy)
    if stock is not None:
        helps = stock.remedy is not None and _cpu_patch_is_for_this_release() and current_platform.is_cpu()
        remedy = " and ".join([str(stock.remedy), *steps]) if helps else None
        return Decision(False, VLLM, f"{stock.why}: {why}", remedy)
    if _platform_keeps():
        why += ", and the plugin keeps it on there only with speculative decoding"
        return Decision(False, VLLM, why, " and ".join(steps))
    plugin = active_plugin()
    outcome = None if plugin is None or plugin.ledger is None else plugin.ledger.outcomes.get(_CPU_PATCH)
    if outcome is not None and current_platform.is_cpu():
        refused = outcome.state is State.REFUSED
        why += f"; the patch {_CPU_PATCH} is {'refused' if refused else 'not for this release'}: {outcome.detail}"
    return Decision(False, VLLM, why)


def _platform_keeps() -> bool:
    """Whether the plugin keeps vLLM's CPU platform from turning asynchronous scheduling off."""
    from vllm.platforms import current_platform

    return getattr(current_platform.check_and_update_config, KEPT, False)


def _cpu_patch_is_for_this_release() -> bool:
    import vllm

    from vllm_async_spec.vllm_plugin.ledger import find_patch

    return not find_patch(_CPU_PATCH).is_for_others(vllm.__version__.partition("+")[0])


def _option(choice: bool) -> str:
    return "--async-scheduling" if choice else "--no-async-scheduling"
