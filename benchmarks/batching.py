"""Tokens a second of continuous batching: steps waited for and not, and transformers' own.

    python -m benchmarks batching [--json FILE] [--model 8b] [--batch N] [--new-tokens N] [--passes N]

Four arms take turns in one process, in the order ABCD DCBA, on one set of random weights:

- `synchronous`: `ContinuousBatcher`, which waits for each step before it plans the next;
- `synchronous again`: the same; what the two differ by is the noise;
- `asynchronous`: the same batcher, its cache and its CUDA graphs included, which does not wait;
- `transformers`: `ContinuousBatchingManager` of transformers, with asynchronous batching where that runs on the device.

The end-of-sequence id is one that the model can't produce, so that each arm looks for it and generates as many tokens.
Tokens of the first three are compared, and there is no result where one differs. transformers attends by other
kernels, so its tokens are compared and the share that is equal is told: of random weights in bfloat16, few are.

Where there is a GPU, each arm runs once more, shorter, under CUPTI alone: the share of the time in which a kernel or a
copy ran, between the first and the last.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.shapes import SHAPES
from benchmarks.statistics import by_turns, paired_ratio, ratio_in_words, refusal

MODELS = ("tiny", "1b", "8b")
ARMS = ("synchronous", "synchronous again", "asynchronous", "transformers")
_OURS = ARMS[:3]
_PAGE = 256
_BUSY_TOKENS = 256

Arm = Callable[[int], list[list[int]]]
"""From new tokens to those of each request."""


class BatchingError(RuntimeError):
    """The arms don't generate the same tokens, or what was asked for can't be run."""


def measure(
    *,
    size: str,
    device: str,
    batch: int,
    requests: int,
    prompt: int,
    new_tokens: int,
    passes: int,
    attention: str,
    arms: list[str],
) -> dict[str, Any]:
    """The result file.

    Raises:
        BatchingError: the model or an arm is unknown, there is no such device, or ours differ in their tokens.
    """
    import transformers

    if size not in MODELS:
        raise BatchingError(f"the model is {size!r}; it must be one of {', '.join(MODELS)}")
    if unknown := [name for name in arms if name not in ARMS]:
        raise BatchingError(f"the arms have {unknown[0]!r}; they must be of {', '.join(ARMS)}")
    on_gpu = device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        raise BatchingError(f"the device is {device!r}, and PyTorch finds no CUDA device; give --device cpu")
    model = _model(size, device)
    prompts = torch.randint(model.config.vocab_size, (requests, prompt), generator=_generator()).tolist()
    with contextlib.ExitStack() as stack:
        runs, described = _arms(stack, model, prompts, batch, new_tokens, attention, arms)
        tokens = {name: run(new_tokens) for name, run in runs.items()}  # the first run of each, which also warms up
        agreement = {name: _agreement(tokens[arms[0]], found) for name, found in tokens.items()}
        for name in arms:
            if name in _OURS and arms[0] in _OURS and agreement[name] < 1:
                where = _first_difference(tokens[arms[0]], tokens[name])
                raise BatchingError(
                    f"{name} generates other tokens than {arms[0]}, from token {where} of a request on, so no ratio "
                    "means anything"
                )
        generated = sum(len(each) for each in tokens[arms[0]])

        def turn(name: str) -> float:
            start = time.perf_counter()
            found = runs[name](new_tokens)  # returns when the host has all tokens, so nothing is left to wait for
            seconds = time.perf_counter() - start
            if name in _OURS and found != tokens[name]:
                raise BatchingError(
                    f"a timed run of {name} gave other tokens than its first, so no ratio means anything"
                )
            return generated / seconds

        speeds = by_turns(arms, passes, turn)
        shorter = min(new_tokens, _BUSY_TOKENS)
        busy = {name: _busy(functools.partial(run, shorter)) for name, run in runs.items()} if on_gpu else {}
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else device,
        "model": size,
        "batch": batch,
        "requests": requests,
        "prompt": prompt,
        "new_tokens": new_tokens,
        "attention": described,
        "tokens_per_second": speeds,
        "equal_tokens": agreement,
        "gpu_busy": busy,
    }


def table(found: Mapping[str, Any]) -> Table:
    """The same for the terminal: medians, spread, and ratios with their intervals."""
    title = (
        f"transformers {found['transformers']}, {found['device']}, {found['model']}, {found['requests']} requests, "
        f"batch {found['batch']}, {found['prompt']} prompt and {found['new_tokens']} new tokens"
    )
    speeds = found["tokens_per_second"]
    references = [name for name in ("synchronous", "transformers") if name in speeds]
    shown = Table(
        "arm", "tokens/s", "spread", *(f"{name} = 1" for name in references), "equal tokens", "GPU busy", title=title
    )
    for name, values in speeds.items():
        ratios = ["-" if name == other else ratio_in_words(speeds[other], values) for other in references]
        busy = found["gpu_busy"].get(name)
        shown.add_row(
            name,
            f"{statistics.median(values):.1f}",
            f"{min(values):.1f}-{max(values):.1f}",
            *ratios,
            f"{found['equal_tokens'][name]:.1%}",
            "-" if busy is None else f"{busy:.1%}",
        )
    return shown


def notes(found: Mapping[str, Any]) -> list[str]:
    """What has to be known beside the table."""
    speeds = found["tokens_per_second"]
    said = [f"attention: {', '.join(f'{name} {used}' for name, used in found['attention'].items())}"]
    if found["device"] == "cpu":
        said.append("nothing can be won on a CPU: no device is ahead or behind")
    if "synchronous again" in speeds and "synchronous" in speeds:
        reason = refusal(paired_ratio(speeds["synchronous"], speeds["synchronous again"]))
        if reason:
            said.append(f"with `synchronous again` for the sham arm: {reason}")
    return said


def _model(size: str, device: str) -> Any:
    import transformers

    config = transformers.LlamaConfig(**{k: v for k, v in SHAPES[size].target.items() if k != "torch_dtype"})
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config = transformers.GenerationConfig(eos_token_id=config.vocab_size, pad_token_id=0)
    return model


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _arms(
    stack: contextlib.ExitStack,
    model: Any,
    prompts: list[list[int]],
    batch: int,
    new_tokens: int,
    attention: str,
    names: list[str],
) -> tuple[dict[str, Arm], dict[str, str]]:
    """The arms, and the attention of each."""
    from vllm_async_spec.generation import ContinuousBatcher

    runs: dict[str, Arm] = {}
    described: dict[str, str] = {}
    length = len(prompts[0]) + new_tokens
    if "transformers" in names:
        runs["transformers"], described["transformers"] = _transformers(
            stack, model, prompts, batch, length, new_tokens
        )
    if any(name in _OURS for name in names):
        # Where requests queue, those that share a step are not the same when it is learned later that one has ended.
        # With one decode size, and one prompt a step, that changes no bit of any.
        apart: dict[str, Any] = {"max_prefills": 1, "decode_sizes": [batch]} if len(prompts) > batch else {}
        batcher = stack.enter_context(
            ContinuousBatcher(
                model,
                max_batch=batch,
                max_length=length,
                attention=attention,
                **apart,
            )
        )

        def run(synchronous: bool, tokens: int) -> list[list[int]]:
            batcher.synchronous = synchronous
            found = [batcher.submit(prompt, max_new_tokens=tokens) for prompt in prompts]
            batcher.run()
            return [request.result() for request in found]

        for name in _OURS:
            runs[name] = functools.partial(run, name != "asynchronous")
            described[name] = batcher.attention
    return {name: runs[name] for name in names}, {name: described[name] for name in names}


def _transformers(
    stack: contextlib.ExitStack, model: Any, prompts: list[list[int]], batch: int, length: int, new_tokens: int
) -> tuple[Arm, str]:
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    # A model of its own, whose attention is its own, on the same weights.
    shared = {id(each): each for each in itertools.chain(model.parameters(), model.buffers())}
    other = copy.deepcopy(model, shared)
    asynchronous = model.device.type == "cuda"
    settings = transformers.GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=model.config.vocab_size, pad_token_id=0
    )
    cache = ContinuousBatchingConfig(
        page_size=_PAGE,
        num_blocks=batch * -(-length // _PAGE) + batch,
        max_batch_tokens=max(2048, batch),
        max_requests_per_batch=batch,
        use_async_batching=asynchronous,
    )
    manager = stack.enter_context(
        other.continuous_batching_context_manager(generation_config=settings, continuous_batching_config=cache)
    )

    def run(tokens: int) -> list[list[int]]:
        order = manager.add_requests(inputs=prompts, max_new_tokens=tokens)
        found: dict[str, list[int]] = {}
        while len(found) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise BatchingError(f"transformers failed a request: {result.error}")
                found[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise BatchingError("the thread of transformers' continuous batching ended unexpectedly")
        return [found[name] for name in order]

    way = "asynchronous" if asynchronous else "synchronous"
    return run, f"{other.config._attn_implementation} ({way})"


def _busy(arm: Callable[[], object]) -> float:
    """The share of the device's time in which anything ran, between the first of it and the last."""
    from vllm_async_spec.audit.device_time import gaps_between
    from vllm_async_spec.audit.device_trace import read_trace

    torch.cuda.synchronize()
    with _trace() as path:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            arm()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        trace = read_trace(path)
    start, end = int(trace.start[0]), int(trace.end.max())
    idle = sum(stop - begin for begin, stop, _ in gaps_between(trace, start, end))
    return 1 - idle / (end - start)


@contextlib.contextmanager
def _trace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "trace.json"


def _agreement(expected: list[list[int]], found: list[list[int]]) -> float:
    pairs = [(a, b) for one, other in zip(expected, found, strict=True) for a, b in itertools.zip_longest(one, other)]
    return [a == b for a, b in pairs].count(True) / len(pairs)


def _first_difference(expected: list[list[int]], found: list[list[int]]) -> int:
    rows = zip(expected, found, strict=True)
    return min(index for a, b in rows for index, (x, y) in enumerate(itertools.zip_longest(a, b)) if x != y)
