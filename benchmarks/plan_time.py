"""Host time of a step's metadata with FlashInfer, for a batch in which every request has drafts to verify.

    python -m benchmarks plan-time [--json FILE] [--rounds N]

It needs vLLM with FlashInfer and a GPU. vLLM's builder and the plugin's take turns, with the heads of an 8b and without
a model. The device is idle, so nothing waits: the result is a step's cost on the host, without stock vLLM's waits.
"""

import dataclasses
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from rich.table import Table

from benchmarks.kernels import HEAD_SIZE, HEADS, KV_HEADS, PAGE
from benchmarks.machine import MachineError
from benchmarks.present import Grid
from benchmarks.statistics import by_turns, summary
from benchmarks.timing import microseconds_on_an_idle_device
from vllm_async_spec.compat.backend_builders import Way, flashinfer_builder
from vllm_async_spec.compat.builder_inputs import AbsentError, BuilderInputs
from vllm_async_spec.compat.builders import common_metadata, llama_config, ngram_drafts
from vllm_async_spec.patching import temporarily
from vllm_async_spec.vllm_plugin.patches.flashinfer_builder import IMPLEMENTATIONS

REQUESTS = (1, 8, 32, 128)
DRAFTS, LONGEST = 3, 4096
_SHORT, _LONG = 300, 900  # tokens; a plan for one length does not serve the other
_IN_EACH_STEP = "plugin, planned in each step"

Step = Callable[[], Any]


class _Heads(BuilderInputs):
    """Builder inputs with the heads of an 8b."""

    def vllm_config(self, **engine_args: Any) -> Any:
        wanted = {"block_size": PAGE, "speculative_config": ngram_drafts(DRAFTS), "max_num_seqs": max(REQUESTS)}
        heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE}
        return llama_config(wanted | engine_args, **heads, max_model_len=LONGEST)

    def arguments(self, **engine_args: Any) -> Any:
        spec, *others = super().arguments(**engine_args)
        return (dataclasses.replace(spec, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE), *others)


def measure(rounds: int) -> dict[str, Any]:
    """The result file: microseconds a step, by requests and kind of builder, over `rounds` rounds.

    Raises:
        MachineError: there is no CUDA device, or vLLM or FlashInfer is not there.
    """
    if not torch.cuda.is_available():
        raise MachineError("PyTorch finds no CUDA device; run this on a machine with a GPU")
    try:
        import vllm

        module = importlib.import_module("vllm.v1.attention.backends.flashinfer")
    except ImportError as error:
        raise MachineError(f"vLLM's FlashInfer backend can't be imported here ({error}); install vllm") from error
    device, found = torch.device("cuda"), {}
    builders = builders_of(module, device)
    for requests in REQUESTS:
        steps = steps_of(builders, device, requests)
        for step in steps.values():
            microseconds_on_an_idle_device(step)  # warm-up: compilation and first allocations
        times = by_turns(steps, rounds, lambda name, steps=steps: microseconds_on_an_idle_device(steps[name]))  # type: ignore[misc]
        found[str(requests)] = {name: summary(values) for name, values in times.items()}
    return {"vllm": vllm.__version__, "device": torch.cuda.get_device_name(), "requests": found}


def builders_of(module: Any, device: torch.device) -> dict[str, Any]:
    """Builders by kind; `module` is vLLM's FlashInfer backend."""
    stock = module.FlashInferMetadataBuilder
    with temporarily() as transaction:
        IMPLEMENTATIONS["flashinfer-builder"].apply(transaction, module)
        ours = module.FlashInferBackend.get_builder_cls()

    def builder(cls: Any, way: Way) -> Any:
        return flashinfer_builder(cls, _Heads(device), way)

    found = {
        "stock, planned": builder(stock, Way.NATIVE),
        _IN_EACH_STEP: builder(ours, Way.NATIVE),
        "plugin": builder(ours, Way.NATIVE),
    }
    try:
        xqa = builder(stock, Way.XQA)
    except AbsentError:
        return found
    # Up to vLLM 0.29 XQA decodes single tokens only.
    return found | ({"stock, XQA": xqa} if xqa.reorder_batch_threshold > 1 else {})


def steps_of(builders: Mapping[str, Any], device: torch.device, requests: int) -> dict[str, Step]:
    """Metadata builds for this many requests, by kind of builder."""
    short, long = (_drafts(requests, length, device) for length in (_SHORT, _LONG))
    batches = {_IN_EACH_STEP: [short, long]}
    return {name: _step(builder, itertools.cycle(batches.get(name, [short]))) for name, builder in builders.items()}


def table(found: dict[str, Any]) -> Table:
    title = f"µs of the host a step: vLLM {found['vllm']}, {found['device']}"
    return Grid(columns(found), list(rows(found))).table(title)


def columns(found: dict[str, Any]) -> tuple[str, ...]:
    return ("builder, by requests", *found["requests"])


def rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """One for each kind of builder, in the order of `columns`."""
    by_requests = list(found["requests"].values())
    for name in by_requests[0]:
        each = (times[name] for times in by_requests)
        yield (name, *(f"{row['median']:,.0f} ({row['least']:,.0f}-{row['most']:,.0f})" for row in each))


def _drafts(requests: int, length: int, device: torch.device) -> Any:
    """The metadata of a step, as a runner gives it with asynchronous scheduling."""
    made = common_metadata([1 + DRAFTS] * requests, [length] * requests)
    table = torch.ones(requests, LONGEST // PAGE, dtype=torch.int32)
    on_device = {name: getattr(made, name).to(device) for name in ("query_start_loc", "seq_lens", "slot_mapping")}
    return dataclasses.replace(made, block_table_tensor=table.to(device), **on_device)


def _step(builder: Any, batches: Iterator[Any]) -> Step:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(builder.vllm_config):  # the first build reads the KV cache's layout from it
        builder.build(0, next(batches))
    return lambda: builder.build(0, next(batches))
