"""One arm's engine, in a process of its own: `python -m benchmarks.engine SETUP`, SETUP being JSON (see `child`).

It answers each line of JSON on its standard input with one on its standard output; all other output goes to standard
error. The engine core is in this process, and so is the worker of an engine of one rank. Whatever concerns the ranks
goes through `worker.BenchWorker`, wherever they are.
"""

import contextlib
import importlib
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import caches, mrope, older_gpu, runner_on_cpu
from benchmarks.audited import digest, host_time
from benchmarks.facts import EngineError, check_declared, check_release, choose_plugins, load_plugins
from benchmarks.features.cases import find_feature
from benchmarks.features.engine import serve_feature
from benchmarks.loads import Load, Request, make_requests
from benchmarks.options import EXTENSION, LOAD_FORMAT, model_options
from benchmarks.shapes import find_shape
from benchmarks.soak.engine import NEAR, Expected, expect, soak
from benchmarks.timing import Driver, Timing
from vllm_async_spec.audit.report import Report
from vllm_async_spec.json_child import serve

_SPARE_TOKENS = 32
"""Tokens by which drafts in flight may extend a request beyond its prompt and output."""
_AHEAD = 3
"""Steps after which no block of a finished request is in use."""


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
        choose_plugins(self._arm["plugin"])

        import torch
        import vllm
        from vllm.sampling_params import RequestOutputKind

        check_release(self._arm)
        load_plugins(self._arm)
        self._cuda = torch.cuda.is_available()
        older_gpu.choose()
        runner_on_cpu.choose()
        if not self._cuda and self._arm["plugin"] == "noop" and self._arm["engine"].get("async_scheduling"):
            from vllm_async_spec.vllm_plugin.patches.async_scheduling import open_cpu_gate

            open_cpu_gate()  # on a CPU stock vLLM turns asynchronous scheduling off again
        longest = max(load.longest for load in loads)
        options = {
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "seed": 0,
            "worker_extension_cls": EXTENSION,
            "max_model_len": longest + _SPARE_TOKENS,
            "max_num_seqs": max(load.running for load in loads),
        }
        self._caches = caches.state(self._arm, longest=longest)
        start = time.perf_counter()
        self._llm = vllm.LLM(**options | self._model_options(Path(setup["models"])) | self._arm["engine"])
        self._start_seconds = time.perf_counter() - start
        caches.mark(self._arm, longest=longest)

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
        ranks = [json.loads(facts) for facts in self._llm.collective_rpc("bench_facts")]
        facts: dict[str, Any] = ranks[0]
        core = self._llm.llm_engine.engine_core.engine_core
        facts |= {
            "async_scheduling": core.batch_queue is not None,
            "flashinfer": older_gpu.chosen(),
            "start_seconds": round(self._start_seconds, 1),
            "caches": self._caches,
        }
        for rank in ranks:
            check_declared(self._arm, rank)
        return facts

    def measure(self, load: str, seconds: float, repetitions: int) -> dict[str, Any]:
        """Run `load` once untimed, then at least `repetitions` times, and on until `seconds` are spent."""
        which, requests = self._loads[load]
        self._forget_prompts()
        self._driver.run(requests, which.running)
        timings: list[Timing] = []
        while len(timings) < repetitions or sum(timing.seconds for timing in timings) < seconds:
            self._forget_prompts()
            timings.append(self._driver.time(which, requests))
        return {
            "n": len(timings),
            "step_ms": statistics.median(timing.step_ms for timing in timings),
            "tokens_per_second": statistics.median(timing.tokens_per_second for timing in timings),
            "acceptance_length": statistics.fmean(timing.acceptance_length for timing in timings),
            "runs": [asdict(timing) for timing in timings],
        }

    def audit(self, load: str, steps: int, rank: int) -> dict[str, Any]:
        """Which phases take a rank's host time, and where it waits, while a load is served that was measured."""
        which, requests = self._loads[load]

        def run() -> Timing:
            self._forget_prompts()
            return self._driver.time(which, requests)

        report = self._audited(run, steps=steps, name=load, running=which.running, rank=rank)
        return digest(report) | host_time(report)

    def _audited(self, run: Callable[[], Timing], *, steps: int, name: str, running: int, rank: int = 0) -> Report:
        """The report on some steps of `run`, which serves a load called `name`, `running` requests at once."""
        from vllm_async_spec.audit.engine import Ran, audit_llm

        def work() -> Ran:
            timing = run()
            return Ran(timing.tokens, timing.seconds, timing.acceptance_length)

        return audit_llm(self._llm, work, steps=steps, name=name, requests=running, rank=rank)

    def _forget_prompts(self) -> None:
        """Empty the prefix cache, or the next run would find its prompts there. Raises EngineError if vLLM does not."""
        caching = self._llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
        if caching and not empty_prefix_cache(self._llm):
            raise EngineError("vLLM does not empty its prefix cache, so the next run would compute no prompt")

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
        self._llm.collective_rpc("bench_count_steps")
        self._break(control)
        with self._delays(seed, late=self._cuda) as delayed:
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
            "fallbacks": dict(sum(map(Counter, self._llm.collective_rpc("bench_fallbacks")), Counter())),
            "prepared": self._llm.collective_rpc("bench_steps")[0],
        }

    def feature(self, name: str, noted: bool, late: bool, control: str | None, adapter: str | None) -> dict[str, Any]:
        """Serve the case `name`, with random delays of the device if `late`; see `features.engine.serve_feature`."""
        self._break(control)
        with self._delays(seed=0, late=late):
            return serve_feature(self._llm, find_feature(name), noted=noted, adapter=adapter)

    def _break(self, control: str | None) -> None:
        """Break every rank on purpose, see `soak.engine.CONTROLS`; None: none."""
        if control is not None:
            self._llm.collective_rpc("bench_break", args=(control,))

    @contextlib.contextmanager
    def _delays(self, seed: int, *, late: bool) -> Iterator[Mapping[str, int]]:
        """Delay the device of every rank at random if `late`. Yields what has the number by place at the end."""
        counted: dict[str, int] = {}
        if not late:
            yield counted
            return
        self._llm.collective_rpc("bench_begin_delays", args=(seed,))
        yield counted  # an error ends this process, and may be that a rank died, so no rank is asked after one
        ranks = self._llm.collective_rpc("bench_end_delays")
        for rank, found in enumerate(ranks):
            where = f"rank {rank}: " if len(ranks) > 1 else ""
            counted.update({where + place: count for place, count in found.items()})

    def _model_options(self, folder: Path) -> dict[str, Any]:
        arm = self._arm
        options = model_options(arm, folder)
        if mrope.ARCHITECTURE in find_shape(arm["shape"]).target["architectures"]:
            mrope.register()
        if options["load_format"] == LOAD_FORMAT:
            importlib.import_module("benchmarks.loader")  # registers the format
        acceptance = arm["acceptance"]
        if acceptance and acceptance["means"] == "sampler" and "speculative_config" in options:
            options["speculative_config"] |= self._synthetic(acceptance["share"])
        return options

    def _synthetic(self, share: float) -> dict[str, Any]:
        """Options of vLLM's own synthetic rejection sampling, which takes an acceptance rate for each position."""
        from vllm.config import SpeculativeConfig

        if not self._cuda:
            raise EngineError("vLLM's CPU platform has no synthetic rejection sampling; set the acceptance by weights")
        if "synthetic_acceptance_rates" not in SpeculativeConfig.__dataclass_fields__:
            raise EngineError("this vLLM has no synthetic rejection sampling; set the acceptance by means of weights")
        rates = [share**position for position in range(1, self._arm["draft_tokens"] + 1)]
        return {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}


def empty_prefix_cache(llm: Any) -> bool:
    """Whether the prefix cache of `llm`, a `vllm.LLM` without requests, could be emptied."""
    for _ in range(_AHEAD):
        if llm.reset_prefix_cache():
            return True
        llm.llm_engine.step()  # a step scheduled ahead still holds blocks
    return False


def main() -> None:
    serve(lambda: BenchEngine(json.loads(sys.argv[1])), "describe", "measure", "audit", "expect", "soak", "feature")


if __name__ == "__main__":
    main()
