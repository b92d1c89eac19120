"""A stock engine in this process, and what docs/findings.md says of it: one line of JSON for the test that starts it.

    python tests/support/findings_engine.py pause TARGET DRAFT async

Of a device it asks as little as the finding does. So all but `late` also run with vLLM's CPU build.
"""

import argparse
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from command_line import found_by, python_path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DRAFTS = 3
TOKENS = 48
WINDOW = 32
BLOCK = 16
EVERY = 5
"""Steps between two disturbances."""
RESETS = 2
MOST_STEPS = 2000
BUSY = 400_000_000
"""Cycles that the device is kept busy for, a fifth of a second: longer than the host needs for a step."""


def found(
    finding: str, models: tuple[Path, Path], way: str, *, environment: Mapping[str, str] = os.environ, first: str = ""
) -> Any:
    """What this file prints of `finding`, in a process of its own with stock vLLM; `way` is `async` or `sync`.

    The process runs `first` before, as a control that breaks what it imports. RuntimeError: it printed nothing.
    """
    own = {"VLLM_ASYNC_SPEC": "off", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    own["PYTHONPATH"] = python_path(ROOT, HERE, inherited=environment)
    code = f"{first}\nfrom findings_engine import main; main()"
    command = [sys.executable, "-c", code, finding, *map(str, models), way]
    return found_by(repr(finding), command, {**environment, **own})


def sliding(models: Any, folder: Path) -> tuple[Path, Path]:
    """The demo's target with a window in all layers, and a drafter of the same sizes, so of one block manager."""
    from vllm_async_spec.demo.model import ModelShape, TinyLlama
    from vllm_async_spec.demo.train import TARGET, byte_tokenizer, save

    target, draft = folder / "target", folder / "draft"
    shutil.copytree(models.target, target)
    ignorant = TinyLlama(ModelShape(TARGET.hidden, TARGET.heads, layers=1, intermediate=TARGET.intermediate))
    ignorant.initialise(torch.Generator().manual_seed(0))
    save(ignorant, byte_tokenizer(), draft)
    for path in (target, draft):
        config = json.loads((path / "config.json").read_text())
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW}
        (path / "config.json").write_text(json.dumps(config))
    return target, draft


class Engine:
    """vLLM's engine, stepped by hand.

    Attributes:
        core: The engine core, with scheduler and executor.
        tokens: What the requests were given so far, by their number.
    """

    def __init__(self, target: str, draft: str, *, asynchronous: bool, **options: Any) -> None:
        from vllm import LLM

        cuda = torch.cuda.is_available()
        drafting = {"method": "draft_model", "model": draft, "num_speculative_tokens": DRAFTS}
        self._llm = LLM(
            target,
            speculative_config=drafting,
            async_scheduling=asynchronous,
            dtype="float16" if cuda else "float32",
            max_model_len=256,
            enforce_eager=True,
            seed=0,
            # Else a request that comes again has other steps than before.
            enable_prefix_caching=False,
            # Told its cache's size, it does not mind what else the GPU's memory is used for.
            **({"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30} if cuda else {}),
            **options,
        )
        self._engine = self._llm.llm_engine
        self.core: Any = self._engine.engine_core.engine_core
        self.tokens: dict[int, list[int]] = {}
        scheduler = type(self.core.scheduler).__name__
        assert scheduler == ("AsyncScheduler" if asynchronous else "Scheduler"), scheduler

    @property
    def runner(self) -> Any:
        worker = self.core.model_executor.driver_worker
        return getattr(worker, "worker", worker).model_runner

    def step(self) -> None:
        for output in self._engine.step():
            self.tokens[int(output.request_id)] = list(output.outputs[0].token_ids)

    def serve(self, disturb: Callable[[], None] | None = None) -> list[list[int]]:
        """The demo's prompts, to the end; `disturb` is called every few steps.

        Returns:
            The tokens of each.

        Raises:
            RuntimeError: It does not come to an end.
        """
        from vllm import SamplingParams

        from vllm_async_spec.demo.train import PROMPTS

        self.tokens = {}
        wanted = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        for number, prompt in enumerate(PROMPTS):
            self._engine.add_request(str(number), prompt, wanted)
        steps = 0
        while self._engine.has_unfinished_requests():
            if steps == MOST_STEPS:
                raise RuntimeError(f"requests have not ended after {steps} steps")
            self.step()
            steps += 1
            if disturb is not None and steps % EVERY == 0:
                disturb()
        return [self.tokens[number] for number in range(len(PROMPTS))]


def pause(engine: Engine) -> dict[str, Any]:
    """The scheduler is paused, what is in flight comes, and it goes on: as `pause_generation(mode="keep")` does."""

    def disturb() -> None:
        engine.core.pause_scheduler(mode="keep", clear_cache=False)
        while engine.core.batch_queue:
            engine.step()
        engine.core.resume_scheduler()

    with _prompts_on_time(engine):
        with _first_positions(engine) as by_itself:
            undisturbed, again = engine.serve(), engine.serve()
        with _first_positions(engine) as steps:
            disturbed, failed = _until_it_fails(lambda: engine.serve(disturb))
    return {
        "undisturbed": undisturbed,
        "again": again,
        "disturbed": disturbed,
        "failed": failed,
        "steps": steps,
        "by_itself": len(by_itself),
    }


@contextmanager
def _first_positions(engine: Engine) -> Iterator[list[dict[str, int]]]:
    """Of each request with drafts in the step before and nothing in flight: three numbers.

    `sent` are the computed tokens that the runner was told, `given` is the position of its first token on the device,
    and `rejected` how many of those drafts were rejected.
    """
    steps: list[dict[str, int]] = []
    rejected: dict[str, int] = {}
    core, runner = engine.core, engine.runner
    prepare, update = runner._prepare_inputs, core.scheduler.update_from_output

    def update_from_output(scheduled: Any, output: Any) -> Any:
        known = core.scheduler.requests
        before = {name: known[name].num_computed_tokens for name in scheduled.num_scheduled_tokens if name in known}
        made = update(scheduled, output)
        rejected.clear()
        for name in scheduled.scheduled_spec_decode_tokens:
            if name in before and name in known:
                rejected[name] = before[name] - known[name].num_computed_tokens
        return made

    def prepare_inputs(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        made = prepare(scheduled, *args, **kwargs)
        if rejected and not core.batch_queue:
            # Here, and not after the step: a model that is given wrong positions may fail.
            positions = getattr(runner.positions, "gpu", runner.positions).tolist()
            cached = scheduled.scheduled_cached_reqs
            for name, sent in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if name in rejected:
                    start = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]])
                    steps.append({"sent": sent, "given": positions[start], "rejected": rejected[name]})
        return made

    runner._prepare_inputs, core.scheduler.update_from_output = prepare_inputs, update_from_output
    try:
        yield steps
    finally:
        runner._prepare_inputs, core.scheduler.update_from_output = prepare, update


def late(engine: Engine) -> dict[str, Any]:
    """The device is late when prompts come: the lengths that were sent, and those that it got."""
    runner, steps = engine.runner, list[tuple[list[int], torch.Tensor]]()
    engine.serve()  # compiles what it compiles, and takes the memory that it takes
    # From 0.19 on the device adds: the host sends computed tokens, and knows lengths that are exact for prompts.
    adds = isinstance(runner.seq_lens, torch.Tensor)
    on_device = runner.seq_lens if adds else runner.seq_lens.gpu
    got = torch.empty_like(on_device)
    prepare = runner._prepare_inputs

    def prepare_inputs(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        prompts = not scheduled.scheduled_spec_decode_tokens and not steps
        if prompts:
            torch.cuda._sleep(BUSY)
        made = prepare(scheduled, *args, **kwargs)
        if prompts:
            rows = runner.input_batch.num_reqs
            sent = runner.optimistic_seq_lens_cpu if adds else runner.seq_lens.cpu
            # On the stream, so it is what a kernel of the step reads there.
            steps.append((sent[:rows].tolist(), got[:rows].copy_(on_device[:rows])))
        return made

    runner._prepare_inputs = prepare_inputs
    engine.serve()
    torch.cuda.synchronize()
    ((sent, arrived),) = steps
    return {"sent": sent, "got": arrived.tolist()}


def window(engine: Engine) -> dict[str, Any]:
    """Keys that the first token of a step sees and that were freed when the step was scheduled.

    A step's exact start is known when all outputs before it are processed.
    """
    scheduler = engine.core.scheduler
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    (manager,) = [each for each in managers if hasattr(each, "sliding_window")]
    freed: dict[int, dict[str, int]] = {}
    missing: list[int] = []
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def noting(*args: Any, **kwargs: Any) -> Any:
        scheduled = schedule(*args, **kwargs)
        freed[id(scheduled)] = {
            name: sum(block.is_null for block in manager.req_to_blocks[name]) * manager.block_size
            for name in scheduled.num_scheduled_tokens
        }
        return scheduled

    def update_from_output(scheduled: Any, output: Any) -> Any:
        for name, gone in freed.pop(id(scheduled)).items():
            request = scheduler.requests.get(name)
            if request is not None and request.output_token_ids:
                unseen = max(0, request.num_tokens - manager.sliding_window)
                missing.append(max(0, gone - unseen))
        return update(scheduled, output)

    scheduler.schedule, scheduler.update_from_output = noting, update_from_output
    engine.serve()
    return {"missing": missing, "window": manager.sliding_window, "block": manager.block_size}


def reset(engine: Engine) -> dict[str, Any]:
    """The prefix cache is reset with all that runs preempted: the tokens, or how the engine failed."""
    in_flight: list[int] = []

    def disturb() -> None:
        running = engine.core.scheduler.running
        # More of them, and 0.26 drops all that it is given.
        if len(in_flight) < RESETS and running:
            in_flight.append(sum(each.num_output_placeholders for each in running))
            engine.core.reset_prefix_cache(reset_running_requests=True)

    with _prompts_on_time(engine):
        undisturbed, again = engine.serve(), engine.serve()
        disturbed, failed = _until_it_fails(lambda: engine.serve(disturb))
    told = {"undisturbed": undisturbed, "again": again, "disturbed": disturbed}
    return told | {"failed": failed, "in_flight": in_flight}


@contextmanager
def _prompts_on_time(engine: Engine) -> Iterator[None]:
    """The host waits for what it sends with prompts, which are not this finding's.

    Else drafting writes into it if the device is late, up to 0.29, as `late` shows, and tokens would change.
    """
    runner = engine.runner
    prepare = runner._prepare_inputs

    def prepare_inputs(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        made = prepare(scheduled, *args, **kwargs)
        if torch.cuda.is_available() and not scheduled.scheduled_spec_decode_tokens:
            torch.cuda.synchronize()
        return made

    runner._prepare_inputs = prepare_inputs
    try:
        yield
    finally:
        runner._prepare_inputs = prepare


def _until_it_fails(serve: Callable[[], list[list[int]]]) -> tuple[list[list[int]], str | None]:
    try:
        return serve(), None
    except Exception as error:
        *_, at = traceback.extract_tb(error.__traceback__)
        return [], f"{type(error).__name__} in {at.name}, {Path(at.filename).name}:{at.lineno}: {error}"


FINDINGS: dict[str, tuple[Callable[[Engine], dict[str, Any]], dict[str, Any]]] = {
    "pause": (pause, {}),
    "late": (late, {}),
    "window": (window, {"block_size": BLOCK}),
    "reset": (reset, {}),
}
"""By name: what shows it, and the options of its engine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("finding", choices=FINDINGS)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("way", choices=["async", "sync"])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        from vllm_async_spec.vllm_plugin.patches.async_scheduling import open_cpu_gate

        open_cpu_gate()
    show, options = FINDINGS[arguments.finding]
    engine = Engine(arguments.target, arguments.draft, asynchronous=arguments.way == "async", **options)
    print("FOUND", json.dumps(show(engine)), flush=True)


if __name__ == "__main__":
    main()
