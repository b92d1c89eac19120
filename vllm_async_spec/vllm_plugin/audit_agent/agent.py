"""The audit agent in each process of vLLM with `VLLM_ASYNC_SPEC_AUDIT=1`.

Until an audit starts, the agent only wraps three functions that no step calls. `EngineCore.collective_rpc` and a method
of the workers receive requests. `serve_http` adds the HTTP route to each server, however started. Requests and answers
are JSON. A failed audit answers `{"error": ...}` and never ends the engine.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from vllm_async_spec.audit.cpu_waits import AuditedCpuEvent, CpuWaits
from vllm_async_spec.audit.cuda_waits import hear_events
from vllm_async_spec.audit.engine import RPC
from vllm_async_spec.audit.folder import check_folder
from vllm_async_spec.audit.recording import How, Order, Recorder, UnderWay
from vllm_async_spec.audit.spans import Watch
from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.audit_agent import phases
from vllm_async_spec.vllm_plugin.audit_agent.facts import worker_facts
from vllm_async_spec.vllm_plugin.ledger import Implementation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm_async_spec.vllm_plugin.upstream import EngineCore, HttpApp, ModelRunner, SchedulerOutput, WorkerWrapper
    from vllm_async_spec.vllm_plugin.upstream_config import MaybeNone


class Agent:
    """The agent of this process, which may hold the engine core, a worker, or both."""

    def __init__(self) -> None:
        self._recorder = Recorder(self._watch_all)
        self._core: EngineCore | None = None
        self._runner: ModelRunner | MaybeNone = None
        self._changes = Transaction()

    def core(self, core: EngineCore, call: Callable[..., list[str]], request: str, timeout: float | None) -> list[str]:
        """Answer for vLLM's `EngineCore`, and pass the request on to its workers by the original `collective_rpc`.

        The request is JSON; see `_do`. The workers must answer within `timeout` seconds, if given.
        """
        self._core = core
        workers: list[str] = call(core, RPC, timeout, (request,), None)
        # The core does not start what a worker refuses.
        refused = any("error" in json.loads(answer) for answer in workers)
        return [json.dumps({"role": "core"}) if refused else self._answer("core", request), *workers]

    def worker(self, wrapper: WorkerWrapper, request: str) -> str:
        """Answer for a worker, given vLLM's `WorkerWrapperBase`."""
        if wrapper.worker.rank != json.loads(request).get("rank", 0):
            return json.dumps({"role": "worker", "rank": wrapper.worker.rank})
        self._runner = wrapper.worker.model_runner
        return self._answer("worker", request)

    def _answer(self, role: str, request: str) -> str:
        try:
            process = {"pid": os.getpid(), "started_by": type(multiprocessing.current_process()).__name__}
            return json.dumps({"role": role, **process, **self._do(role, **json.loads(request))})
        except UnderWay as error:
            return json.dumps({"role": role, "error": str(error)})
        except Exception as error:
            return json.dumps({"role": role, "error": f"{type(error).__name__}: {' '.join(str(error).split())}"})

    def _do(self, role: str, do: str, **options: Any) -> dict[str, object]:
        recorder = self._recorder
        # A core and a worker in one process share the recorder, and the worker has answered before.
        apart = role == "core" and self._runner is None
        if do == "describe":
            return {} if role == "core" else {"facts": worker_facts(self._runner)}
        if do == "arm":
            folder = str(check_folder(options["folder"]))
            order = Order(How(options["how"]), options["skip"], options["steps"], folder)
            if role == "worker":
                recorder.arm(order)
                self._hear_steps()
            elif apart and order.how is How.FULL:
                recorder.arm(order)
                recorder.start_phases()
            return {}
        if do in ("save", "cancel"):
            if (role == "core" and not apart) or recorder.order is None:
                return {}
            if do == "cancel" and recorder.order.folder != options["folder"]:
                return {}  # another audit's recording
            self._changes.roll_back()
            if do == "cancel":
                recorder.cancel()
                return {}
            return {
                "recorded": recorder.recorded,
                "files": recorder.save(f"{role}-{os.getpid()}-{recorder.order.how.value}"),
            }
        raise ValueError(f"an audit agent was asked to {do!r}; it can describe, arm, save and cancel")

    def _hear_steps(self) -> None:
        cls, recorder = type(self._runner), self._recorder
        owner = next(base for base in cls.__mro__ if "execute_model" in vars(base))
        execute_model = vars(owner)["execute_model"]

        @functools.wraps(execute_model)
        def heard(runner: object, scheduler_output: SchedulerOutput, *args: object, **kwargs: object) -> object:
            # A step without tokens runs no model.
            if scheduler_output.total_num_scheduled_tokens:
                recorder.on_step()
            return execute_model(runner, scheduler_output, *args, **kwargs)

        self._changes.roll_back()
        self._changes.set(owner, "execute_model", heard)

    def _watch_all(self, watch: Watch, cpu: CpuWaits | None) -> None:
        if self._core is not None:
            phases.watch_engine_core(watch, self._core)
        if self._runner is not None:
            phases.watch_runner(watch, self._runner, cpu)


AGENT = Agent()


def hear_events_from_now_on() -> None:
    """Make `torch.Event` create events whose waits can be recorded, on a GPU and on a CPU."""
    if torch.version.cuda is not None:
        hear_events()
    else:
        torch.Event = AuditedCpuEvent  # type: ignore[assignment, misc]


def _engine_core(transaction: Transaction, module: ModuleType) -> None:
    collective_rpc = module.EngineCore.collective_rpc

    @functools.wraps(collective_rpc)
    def audited(
        self: EngineCore,
        method: object,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if method == RPC:
            return AGENT.core(self, collective_rpc, args[0], timeout)
        return collective_rpc(self, method, timeout, args, kwargs)

    transaction.set(module.EngineCore, "collective_rpc", audited)


def _worker(transaction: Transaction, module: ModuleType) -> None:
    transaction.set(module.WorkerWrapperBase, RPC, lambda wrapper, request: AGENT.worker(wrapper, request))


def _route(transaction: Transaction, module: ModuleType) -> None:
    serve_http = module.serve_http

    @functools.wraps(serve_http)
    async def with_route(app: HttpApp, *args: object, **kwargs: object) -> object:
        from vllm_async_spec.vllm_plugin.audit_agent.route import open_door

        async with open_door(app):
            return await serve_http(app, *args, **kwargs)

    transaction.set_function(module, "serve_http", with_route)


IMPLEMENTATIONS = {
    "audit-engine-core": Implementation(_engine_core),
    "audit-worker": Implementation(_worker),
    "audit-route": Implementation(_route),
}
