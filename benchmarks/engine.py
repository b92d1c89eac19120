"""One arm's engine, in a process of its own: `python -m benchmarks.engine SETUP`, SETUP being JSON (see `child`).

It answers each line of JSON on its standard input with one on its standard output; all other output goes to standard
error. The engine core and the worker are in this process, so that it can report what really runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks import mrope, older_gpu
from benchmarks.audited import digest
from benchmarks.features.cases import find_feature
from benchmarks.features.engine import serve_feature
from benchmarks.loads import Load, Request, make_requests
from benchmarks.shapes import Method, find_shape, write_models
from benchmarks.soak.engine import CONTROLS, NEAR, Expected, delays, expect, runner_of, soak
from benchmarks.timing import Driver, Timing
from vllm_async_spec.json_child import serve

_OURS = "async_spec"
_SPARE_TOKENS = 32
"""Tokens by which drafts in flight may extend a request beyond its prompt and output."""


class EngineError(RuntimeError):
    """The engine is not what the arm declares; the message says what to do."""


class BenchEngine:
    """A vLLM engine and the loads that it can be asked to run."""

    def __init__(self, setup: dict[str, Any]) -> None:
        """Start the engine of `setup`: an arm, loads, and the folder for its models."""
        self._arm: dict[str, Any] = setup["arm"]
        shape = find_shape(self._arm["shape"])
        loads = [Load(**load) for load in setup["loads"]]
        self._loads: dict[str, tuple[Load, list[Request]]] = {
            load.name: (load, make_requests(load, shape.target["vocab_size"])) for load in loads
        }
        _choose_plugins(self._arm["plugin"])

        import torch
        import vllm
        from vllm.sampling_params import RequestOutputKind

        if self._arm["release"] not in (None, vllm.__version__.partition("+")[0]):
            raise EngineError(f"this arm needs vLLM {self._arm['release']}, and its environment has {vllm.__version__}")
        self._cuda = torch.cuda.is_available()
        older_gpu.choose()
        if not self._cuda and self._arm["plugin"] == "noop" and self._arm["engine"].get("async_scheduling"):
            from vllm_async_spec.vllm_plugin.patches.async_scheduling import open_cpu_gate

            open_cpu_gate()  # on a CPU stock vLLM turns asynchronous scheduling off again
        options = {
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "seed": 0,
            "max_model_len": max(load.longest for load in loads) + _SPARE_TOKENS,
            "max_num_seqs": max(load.running for load in loads),
        }
        start = time.perf_counter()
        self._llm = vllm.LLM(**options | self._model_options(Path(setup["models"])) | self._arm["engine"])
        self._start_seconds = time.perf_counter() - start

        def sampling(max_tokens: int, **more: Any) -> Any:
            return vllm.SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                **more,
            )

        self._sampling = sampling
        self._driver = Driver(self._llm, sampling)

    def describe(self) -> dict[str, Any]:
        """Facts of the running engine.

        Raises:
            EngineError: the engine is not what the arm declares.
        """
        import torch
        import vllm

        core = self._llm.llm_engine.engine_core.engine_core
        runner = runner_of(self._llm)
        facts = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "plugin": _plugin_state(),
            "runner": "V2" if type(runner).__module__.startswith("vllm.v1.worker.gpu.") else "V1",
            "backends": sorted({group.backend.get_name() for groups in runner.attn_groups for group in groups}),
            "async_scheduling": core.batch_queue is not None,
            "flashinfer": older_gpu.chosen(),
            "graphs": getattr(self._llm.llm_engine.vllm_config.compilation_config.cudagraph_mode, "name", "NONE"),
            "start_seconds": round(self._start_seconds, 1),
            "hardware": _hardware(),
        }
        if self._arm["runner"] not in (None, facts["runner"]):
            raise EngineError(f"this arm needs runner {self._arm['runner']}, and runs on {facts['runner']}")
        wanted = {"stock": "not loaded", "noop": "off", "plugin": "on"}[self._arm["plugin"]]
        if facts["plugin"] != wanted:
            raise EngineError(f"the plugin must be {wanted!r} in this arm, and is {facts['plugin']!r}")
        return facts

    def measure(self, load: str, seconds: float, repetitions: int) -> dict[str, Any]:
        """Run `load` once untimed, then at least `repetitions` times, and on until `seconds` are spent."""
        which, requests = self._loads[load]
        self._driver.run(requests, which.running)
        timings: list[Timing] = []
        while len(timings) < repetitions or sum(timing.seconds for timing in timings) < seconds:
            timings.append(self._driver.time(which, requests))
        return {
            "n": len(timings),
            "step_ms": statistics.median(timing.step_ms for timing in timings),
            "tokens_per_second": statistics.median(timing.tokens_per_second for timing in timings),
            "acceptance_length": statistics.fmean(timing.acceptance_length for timing in timings),
            "runs": [asdict(timing) for timing in timings],
        }

    def audit(self, load: str, steps: int) -> dict[str, Any]:
        """Where the host waits, and how the device spends its time, under `load`."""
        from vllm_async_spec.audit.engine import Ran, audit_llm

        which, requests = self._loads[load]

        def work() -> Ran:
            timing = self._driver.time(which, requests)
            return Ran(timing.tokens, timing.seconds, timing.acceptance_length)

        return digest(audit_llm(self._llm, work, steps=steps, name=load, requests=which.running))

    def expect(self, load: str, file: str) -> dict[str, Any]:
        """Serve `load` and write its tokens, with those close behind, to `file`, for the soak of another engine."""
        _, requests = self._loads[load]
        said = expect(self._llm, requests, self._sampling)
        Path(file).write_text(json.dumps([asdict(each) for each in said]))
        return {"requests": len(said)}

    def soak(
        self, load: str, file: str, seconds: float, seed: int, control: str | None, near: float = NEAR
    ) -> dict[str, Any]:
        """Serve `load` for `seconds` under random arrivals and, on a GPU, delays; compare with the tokens in `file`."""
        which, requests = self._loads[load]
        expected = [Expected(**each) for each in json.loads(Path(file).read_text())]
        if control is not None:
            CONTROLS[control](self._llm)
        report = sys.modules.get("vllm_async_spec.sync_policy")
        with contextlib.ExitStack() as stack:
            delayed = stack.enter_context(delays(self._llm, seed)) if self._cuda else {}
            start = time.perf_counter()
            verdict = soak(
                self._llm,
                requests,
                expected,
                self._sampling,
                running=which.running,
                seconds=seconds,
                seed=seed,
                near=near,
            )
            spent = time.perf_counter() - start
        return asdict(verdict) | {
            "seconds": round(spent, 1),
            "delays": dict(delayed),
            "fallbacks": dict(report.sync_report().fallbacks) if report else {},
        }

    def feature(self, name: str, noted: bool, late: bool, control: str | None, adapter: str | None) -> dict[str, Any]:
        """Serve the case `name`, with random delays of the device if `late`; see `features.engine.serve_feature`."""
        if control is not None:
            CONTROLS[control](self._llm)
        with contextlib.ExitStack() as stack:
            if late:
                stack.enter_context(delays(self._llm, seed=0))
            return serve_feature(self._llm, find_feature(name), noted=noted, adapter=adapter)

    def _model_options(self, folder: Path) -> dict[str, Any]:
        """Options for the model, its drafter and their random weights."""
        arm = self._arm
        method = Method(arm["method"]) if arm["method"] else None
        models = write_models(find_shape(arm["shape"]), method, folder)
        if mrope.ARCHITECTURE in find_shape(arm["shape"]).target["architectures"]:
            mrope.register()
        options: dict[str, Any] = {"model": str(models.target), "load_format": "dummy"}
        acceptance = arm["acceptance"]
        if acceptance and acceptance["means"] != "sampler":
            if arm["engine"].get("tensor_parallel_size", 1) > 1:
                raise EngineError(
                    "weights are not arranged across tensor-parallel ranks; run with tensor_parallel_size=1, or set "
                    "the acceptance by means of the sampler"
                )
            from benchmarks.loader import LOAD_FORMAT

            options["load_format"] = LOAD_FORMAT
            draft_model = str(models.drafter) if method is Method.DRAFT_MODEL else None
            attentive = acceptance["means"] == "attentive"
            loading = {"share": acceptance["share"], "draft_model": draft_model, "attentive": attentive}
            options["model_loader_extra_config"] = loading
        if method is None:
            return options
        drafting: dict[str, Any] = {"method": method.value, "num_speculative_tokens": arm["draft_tokens"]}
        if models.drafter != models.target:
            drafting["model"] = str(models.drafter)
        if method in (Method.NGRAM, Method.NGRAM_GPU):
            drafting |= {"prompt_lookup_min": 2, "prompt_lookup_max": 3}
        if acceptance and acceptance["means"] == "sampler":
            drafting |= self._synthetic(acceptance["share"])
        return options | {"speculative_config": drafting}

    def _synthetic(self, share: float) -> dict[str, Any]:
        """Options of vLLM's own synthetic rejection sampling, which takes an acceptance rate for each position."""
        from vllm.config import SpeculativeConfig

        if not self._cuda:
            raise EngineError("vLLM's CPU platform has no synthetic rejection sampling; set the acceptance by weights")
        if "synthetic_acceptance_rates" not in SpeculativeConfig.__dataclass_fields__:
            raise EngineError("this vLLM has no synthetic rejection sampling; set the acceptance by means of weights")
        rates = [share**position for position in range(1, self._arm["draft_tokens"] + 1)]
        return {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}


def _choose_plugins(plugin: str) -> None:
    """Choose the plugins that vLLM loads, and check that ours is installed if the arm needs it.

    Raises:
        EngineError: the plugin is not installed here.
    """
    names = _vllm_plugins()
    if plugin == "stock":
        os.environ["VLLM_PLUGINS"] = ",".join(sorted(names - {_OURS}))
    elif _OURS not in names:
        raise EngineError(f"vllm-async-spec is not installed for {sys.executable}; run `pip install --no-deps .`")


def _vllm_plugins() -> set[str]:
    entries = (entry for package in distributions() for entry in package.entry_points)
    return {entry.name for entry in entries if entry.group.startswith("vllm.")}


def _plugin_state() -> str:
    module = sys.modules.get("vllm_async_spec.vllm_plugin.state")
    plugin = module.active_plugin() if module else None
    if plugin is None:
        return "not loaded"
    return "off" if plugin.settings.mode.value == "off" else "on"


def _hardware() -> dict[str, Any]:
    import torch

    cpu = next(
        (line.partition(":")[2].strip() for line in _read("/proc/cpuinfo").splitlines() if "model name" in line),
        platform.processor() or platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    hardware: dict[str, Any] = {"device": "CPU", "cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory)}
    if torch.cuda.is_available():
        driver = _read("/proc/driver/nvidia/version").partition("Module")[2].split()
        hardware |= {
            "device": torch.cuda.get_device_name(),
            "driver": next((word for word in driver if word[:1].isdigit()), "unknown"),
            "cuda": torch.version.cuda,
        }
    return hardware


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).is_file() else ""


def main() -> None:
    """Serve commands until the input ends."""
    serve(lambda: BenchEngine(json.loads(sys.argv[1])), "describe", "measure", "audit", "expect", "soak", "feature")


if __name__ == "__main__":
    main()
