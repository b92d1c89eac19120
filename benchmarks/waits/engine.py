"""The process of one engine of the cases: `python -m benchmarks.waits.engine SETUP`, as `benchmarks.engine`.

A case that vLLM refuses, or for which this environment lacks a package, is answered and leaves the engine running.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.audited import digest
from benchmarks.engine import BenchEngine, empty_prefix_cache
from benchmarks.features.engine import sampling_params
from benchmarks.features.files import write_adapter, write_tokenizer
from benchmarks.loads import Request
from benchmarks.shapes import find_shape
from benchmarks.timing import Driver, Timing, TimingError
from benchmarks.waits.cases import CASES, ENGINES, Case, CaseRequest, Package, requests_of
from vllm_async_spec.json_child import serve

_PLAIN = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}


class LacksError(RuntimeError):
    """The environment lacks something that the case needs; the message says what, and the remedy."""


class RefusedError(RuntimeError):
    """vLLM refuses a request; the message has its words."""


class CaseDriver(Driver):
    """Gives requests with their own parameters and LoRA adapters to a vLLM engine."""

    def __init__(self, llm: Any, adapters: dict[int, str]) -> None:
        """Drive `llm`, a `vllm.LLM`; `adapters` holds the directory of each adapter."""
        super().__init__(llm, None)
        self._adapters = adapters
        self._named: list[str] = []

    def add(self, name: str, request: Request) -> None:
        """Give the engine one request. Raises RefusedError, after which the engine has no requests."""
        assert isinstance(request, CaseRequest)
        self._named.append(name)
        try:
            self._llm.llm_engine.add_request(
                name,
                {"prompt_token_ids": list(request.prompt)},
                sampling_params(_PLAIN | dict(request.sampling), request.max_tokens),
                lora_request=self._lora(request.adapter),
            )
        except (ValueError, NotImplementedError) as error:
            self._drop_all()
            raise RefusedError(" ".join(str(error).split())) from error

    def _lora(self, adapter: int | None) -> Any:
        if adapter is None:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"noise-{adapter}", adapter + 1, self._adapters[adapter])

    def _drop_all(self) -> None:
        engine = self._llm.llm_engine
        engine.abort_request(self._named)
        while engine.has_unfinished_requests():
            engine.step()


class WaitsEngine(BenchEngine):
    """A vLLM engine, and the cases that it can be asked to time and to audit."""

    def __init__(self, setup: dict[str, Any]) -> None:
        """Start the engine of `setup`: that of `BenchEngine`, and `kind`, a key of `ENGINES`."""
        kind, arm = ENGINES[setup["kind"]], setup["arm"]
        _need(kind.package)
        self._shape: str = arm["shape"]
        folder, config = Path(setup["models"]), find_shape(self._shape).target
        self._lacks_tokenizer = importlib.util.find_spec("tokenizers") is None
        if not self._lacks_tokenizer:
            tokenizer = write_tokenizer(folder / f"tokenizer-{self._shape}", config["vocab_size"])
            arm["engine"] |= {"tokenizer": str(tokenizer), "skip_tokenizer_init": False}
        adapters = {
            number: str(write_adapter(folder / f"adapter-{self._shape}-{number}", config))
            for number in range(kind.adapters)
        }
        super().__init__(setup)
        self._case_driver = CaseDriver(self._llm, adapters)
        self._warm: set[str] = set()

    def describe(self) -> dict[str, Any]:
        """Facts of the running engine. Raises what `BenchEngine.describe` raises."""
        config = self._llm.llm_engine.vllm_config
        mode = config.compilation_config.mode
        return super().describe() | {
            "compilation": getattr(mode, "name", str(mode)),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        }

    def time_case(self, case: str, seconds: float) -> dict[str, Any]:
        """Serve a case once untimed, if it is new here, and then for at least `seconds`.

        Returns:
            `runs`, each with milliseconds a step, number of steps and acceptance length; or else `refused`, `lacks` or
            `failed` with the reason.
        """
        chosen = CASES[case]
        try:
            self._check(chosen)
            if case not in self._warm:
                self._run(chosen)
                self._warm.add(case)
            runs: list[Timing] = []
            end = time.perf_counter() + seconds
            while not runs or time.perf_counter() < end:
                runs.append(self._run(chosen))
        except LacksError as error:
            return {"lacks": str(error)}
        except RefusedError as error:
            return {"refused": str(error)}
        except TimingError as error:
            return {"failed": str(error)}
        return {"runs": [[run.step_ms, run.steps, run.acceptance_length] for run in runs]}

    def audit_case(self, case: str, steps: int) -> dict[str, Any]:
        """Where the host waits, and how the device spends its time, while a case that was timed is served."""
        chosen = CASES[case]
        running = chosen.load.running
        return digest(self._audited(lambda: self._run(chosen), steps=steps, name=case, running=running))

    def _run(self, case: Case) -> Timing:
        load, requests = requests_of(case, self._shape)
        empty_prefix_cache(self._llm)  # otherwise every prompt would be in the cache
        return self._case_driver.time(load, requests)

    def _check(self, case: Case) -> None:
        _need(case.package)
        if case.tokenizer and self._lacks_tokenizer:
            raise LacksError(
                "this environment has no package tokenizers, so the engine has no tokenizer; install it and run again"
            )


def _need(package: Package | None) -> None:
    if package is not None and importlib.util.find_spec(package.module) is None:
        raise LacksError(f"this environment has no package {package.distribution}; install it and run again")


def main() -> None:
    """Serve commands until the input ends."""
    serve(lambda: WaitsEngine(json.loads(sys.argv[1])), "describe", "time_case", "audit_case")


if __name__ == "__main__":
    main()
