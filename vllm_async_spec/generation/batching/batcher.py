"""Continuous batching whose host plans and launches a step while the one before runs.

`step` is the loop's body, synchronous and asynchronous: what differs is only how many steps may be launched before the
tokens of one are read. With none it is the plain loop, and the specification of the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from vllm_async_spec.generation.batching.decoding import Decoding, SingleTokens
from vllm_async_spec.generation.batching.drafting import DraftedTokens
from vllm_async_spec.generation.batching.kernels import choose_kernels, default_page_size
from vllm_async_spec.generation.batching.lanes import CudaLanes, OpenLanes, open_lanes
from vllm_async_spec.generation.batching.model_check import (
    check_draft_model,
    end_of_sequence,
    layers_of,
    positions_of,
    take_over,
)
from vllm_async_spec.generation.batching.paged_cache import LayerShape, PagedCache
from vllm_async_spec.generation.batching.paged_model import PagedModel
from vllm_async_spec.generation.batching.pages import PageAllocator
from vllm_async_spec.generation.batching.request import Request, RequestError
from vllm_async_spec.generation.batching.runner import Launched, OpenStep, Runner
from vllm_async_spec.generation.batching.scheduler import Row, Scheduler, Step
from vllm_async_spec.generation.batching.step_slots import COUNT, STOPS, TOKEN, Sizes
from vllm_async_spec.generation.compiling import Compile, compile_arguments, compiling_each
from vllm_async_spec.sync_policy import ReadKind, host_read

_COLDEST = 0.01
_DEFAULT_LENGTH = 2048
_DEFAULT_DRAFTS = 4


class BatcherError(RuntimeError):
    """The batcher can't go on, or was called in a way that can't be; the message says why."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: Step
    launched: Launched


class ContinuousBatcher:
    """Generates many sequences at once, each joining and leaving when it does.

    The model is unchanged but for its attention implementation, which `close` puts back; until then only the batcher
    may call it. Use it with `with`, or close it.

    Args:
        model: a causal language model of transformers, in evaluation mode, on one device.
        tokenizer: encodes prompts that are strings; needed for those only.
        max_batch: sequences that run at once.
        draft_model: another decoder of the same vocabulary, whose drafts the model verifies. The tokens are those
            without it, and greedy. It belongs to the batcher as the model does.
        draft_tokens: drafts of each sequence and step; 4 if None and there is a draft model.
        max_length: tokens of a sequence, prompt and generated; 2048, or as many positions as the models have, if None.
        page_size: tokens in a page of the KV cache; what suits the attention kernels if None.
        cache_tokens: tokens that the cache holds in all; enough for `max_batch` sequences of `max_length` if None.
        max_prefill_tokens: prompt tokens in a step; a longer prompt takes several.
        max_prefills: prompts in a step. With 1, and one decode size, what else is in the batch changes no bit of a
            sequence's logits where a kernel's rows are independent of each other, as they are in those used here.
        attention: `auto`, `FLASH_ATTN`, `FLASHINFER_TRTLLM` or `TORCH_REFERENCE`.
        eos_token_id: tokens that end a sequence; those of the model's generation configuration if None.
        decode_sizes: numbers of sequences that decodes are padded to; powers of two and `max_batch` if None.
        cuda_graphs: whether decodes are captured, one graph for each size and slot; on a CUDA device if None.
        torch_compile: whether the forward of decodes is compiled, for each size once, when the batcher is made; a name
            chooses the backend, a dict has arguments of `torch.compile`. Its kernels round in their own way.
        steps_ahead: steps launched before the tokens of one are read, at least 1; more than 1 learns later, and
            seldom wins.
        synchronous: wait for each step before the next is planned, as the specification of what must come out. An
            attribute of this name may be changed while nothing runs.
        open_lanes: where work is launched; streams on a CUDA device by default.

    Raises:
        ModelError: the model can't be batched.
        AttentionChoiceError: the attention can't be had for this model here.
        BatcherError: the KV cache does not fit into memory.
        ValueError: another argument can't be; the message names it.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_batch: int,
        draft_model: Any = None,
        draft_tokens: int | None = None,
        max_length: int | None = None,
        page_size: int | None = None,
        cache_tokens: int | None = None,
        max_prefill_tokens: int = 2048,
        max_prefills: int = 8,
        attention: str = "auto",
        eos_token_id: int | Sequence[int] | None = None,
        decode_sizes: Sequence[int] | None = None,
        cuda_graphs: bool | None = None,
        torch_compile: Compile = False,
        steps_ahead: int = 1,
        synchronous: bool = False,
        open_lanes: OpenLanes = open_lanes,
    ) -> None:
        for name, value in {
            "max_batch": max_batch,
            "draft_tokens": 1 if draft_tokens is None else draft_tokens,
            "max_length": 1 if max_length is None else max_length,
            "page_size": 1 if page_size is None else page_size,
            "cache_tokens": 1 if cache_tokens is None else cache_tokens,
            "max_prefill_tokens": max_prefill_tokens,
            "max_prefills": max_prefills,
            "steps_ahead": steps_ahead,
        }.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        device: torch.device = model.device
        if cuda_graphs and device.type != "cuda":
            raise ValueError(f"cuda_graphs is True and the model is on {device.type}; leave it out, or move the model")
        if draft_model is not None:
            check_draft_model(draft_model, model)
            drafts = _DEFAULT_DRAFTS if draft_tokens is None else draft_tokens
        elif draft_tokens is not None:
            raise ValueError(f"draft_tokens is {draft_tokens} and there is no draft_model; give one, or leave it out")
        else:
            drafts = 0
        compile_with = compile_arguments(torch_compile)
        models = [model] if draft_model is None else [model, draft_model]
        self._tokenizer = tokenizer
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._device = device
        self._steps_ahead = steps_ahead
        self._ahead = 0 if synchronous else steps_ahead
        self._drafts = drafts
        max_length = _max_length(max_length, models)
        page_size = default_page_size(attention, device) if page_size is None else page_size
        # The drafts behind the last token have places too; and with them padding is a sequence of two tokens.
        width = -(-(max_length + drafts + (drafts > 0)) // page_size)
        cached = max_batch * width if cache_tokens is None else -(-cache_tokens // page_size)
        sizes = Sizes(max_batch, max_prefills, max_prefill_tokens, width, drafts)

        self._attention_before: list[tuple[Any, str]] = []
        try:
            for each in models:
                self._attention_before.append((each, take_over(each)))
            pages = PageAllocator(cached + 1)

            def paged(each: Any, query_tokens: int) -> PagedModel:
                layers = layers_of(each)
                kernels = choose_kernels(
                    attention,
                    layers.values(),
                    page_size=page_size,
                    slots=steps_ahead + 1,
                    device=device,
                    query_tokens=query_tokens,
                )
                cache = _cache(layers, pages.num_pages, page_size, device)
                return PagedModel.of(each, cache, kernels, compile_with=compile_with)

            eos_token_ids = _eos_token_ids(eos_token_id, model)
            target = paged(model, 1 + drafts)
            self.attention = target.kernels.name
            """The adapter that was chosen."""
            decoding: Decoding
            if draft_model is None:
                decoding = SingleTokens(target, max_batch, eos_token_ids, device)
            else:
                decoding = DraftedTokens(
                    target,
                    paged(draft_model, 2),
                    drafts=drafts,
                    batch=max_batch,
                    max_length=max_length,
                    eos_token_ids=eos_token_ids,
                    device=device,
                )
            self._lanes = open_lanes(device, steps_ahead + 1)
            with compiling_each(f"the forward of {type(model).__name__}", compile_with):
                self._runner = Runner(
                    target,
                    decoding=decoding,
                    lanes=self._lanes,
                    sizes=sizes,
                    slots=steps_ahead + 1,
                    decode_sizes=_decode_sizes(decode_sizes, max_batch),
                    longest=max_length + drafts,
                    cuda_graphs=isinstance(self._lanes, CudaLanes) if cuda_graphs is None else cuda_graphs,
                )
        except BaseException:
            self._give_attention_back()
            raise
        self._scheduler = Scheduler(
            pages,
            page_size=page_size,
            max_batch=max_batch,
            max_length=max_length,
            max_prefill_tokens=max_prefill_tokens,
            max_prefills=max_prefills,
            drafts=drafts,
        )
        self._in_flight: deque[_InFlight] = deque()
        self._spare: OpenStep | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._stepping = threading.Lock()
        self._driver: asyncio.Task[None] | None = None
        self._driven = False
        self._closed: str | None = None

    def submit(
        self,
        prompt: str | Sequence[int] | torch.Tensor,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Request:
        """Queue a request; from any thread. It is served by `step`, `run` or iteration over it.

        Args:
            prompt: token ids, in a sequence or a tensor, or text where there is a tokenizer.
            max_new_tokens: after which it ends, if no end of sequence comes before.
            temperature: 0 is greedy.
            seed: of sampling.

        Raises:
            RequestError: it can never be served; nothing is queued.
            BatcherError: the batcher is closed.
        """
        if self._closed:
            raise BatcherError(self._closed)
        request = Request(self._encoded(prompt), max_new_tokens, float(temperature), seed)
        if temperature != 0 and not temperature >= _COLDEST:
            raise RequestError(f"temperature is {temperature}; it must be 0, which is greedy, or at least {_COLDEST}")
        if temperature != 0 and self._drafts:
            raise RequestError(
                f"temperature is {temperature}, and with a draft model tokens are greedy; leave it 0, or make the "
                "batcher without draft_model"
            )
        if not -(1 << 63) <= seed < 1 << 63:
            raise RequestError(f"seed is {seed}; it must fit into 64 bits")
        self._scheduler.check(request)
        for token in (min(request.prompt), max(request.prompt)):
            if not 0 <= token < self._vocabulary:
                raise RequestError(
                    f"the prompt has token {token}; the model's vocabulary is 0 to {self._vocabulary - 1}"
                )
        self._commands.append(lambda: self._scheduler.add(request))
        if self._closed:
            # By another thread, in the meantime: nobody looks at commands any more.
            raise BatcherError(self._closed)
        return request

    def cancel(self, request: Request) -> None:
        """End a request, from any thread: no token is given for it after the next step has been planned."""
        self._commands.append(lambda: self._scheduler.cancel(request))

    @property
    def synchronous(self) -> bool:
        """Whether each step is waited for before the next is planned."""
        return self._ahead == 0

    @synchronous.setter
    def synchronous(self, value: bool) -> None:
        if self.busy:
            raise BatcherError("synchronous can't be changed while requests run; let run() finish them first")
        self._ahead = 0 if value else self._steps_ahead

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do for `step`."""
        return bool(self._commands or self._in_flight or self._scheduler.busy)

    @property
    def accepted(self) -> float:
        """Tokens that a step gave a sequence that it decoded, on average of what the host knows of so far.

        1 where no draft is accepted, or there are none; `draft_tokens` + 1 where all are.
        """
        return self._scheduler.given / self._scheduler.verified if self._scheduler.verified else 1.0

    @property
    def free_pages(self) -> int:
        """Pages of the cache that no request has."""
        return self._scheduler.pages.free

    def step(self) -> bool:
        """Launch the next step, then read the tokens of the one launched `steps_ahead` steps before.

        Returns:
            Whether there is more to do.

        Raises:
            BatcherError: another thread is in `step`.
        """
        if not self._stepping.acquire(blocking=False):
            raise BatcherError("step() runs in another thread; let one thread drive the batcher")
        try:
            while self._commands:
                self._commands.popleft()()
            step = self._scheduler.plan()
            if step is not None:
                self._launch(step)
            if self._in_flight and (step is None or len(self._in_flight) > self._ahead):
                self._collect()
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self._stepping.release()
        return self.busy

    def run(self) -> None:
        """Step until all requests are finished."""
        while self.busy:
            self.step()

    async def stream(
        self,
        prompt: str | Sequence[int] | torch.Tensor,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> AsyncIterator[int]:
        """Submit a request and give its tokens as they arrive; leaving the loop early cancels it.

        Steps run in a thread beside the event loop, which all streams of a batcher share.

        Raises:
            RequestError: the request can't be served, or could not be finished.
        """
        request = self.submit(prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        self.start()
        try:
            async for token in request:
                yield token
        finally:
            if not request.finished:
                self.cancel(request)

    def start(self) -> None:
        """Let steps run in a thread beside the running event loop, until nothing is left to do or the loop ends."""
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    def close(self) -> None:
        """Cancel what is left, wait for the steps in flight, and give the model its attention back; twice is once."""
        with self._stepping:
            if self._closed is None:
                self._stop("the batcher is closed; make another", "the batcher was closed")
        if self._attention_before:
            self._lanes.drain()
            self._give_attention_back()

    def __enter__(self) -> ContinuousBatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        self._driven = True
        try:
            # What is submitted after a run, and before this task is done, is seen here: nothing is awaited in between.
            while self.busy:
                await loop.run_in_executor(None, self._run_while_driven)
        except Exception:
            # All requests have been told why the batcher stopped; anything else nobody knows of yet.
            if self._closed is None:
                raise
        finally:
            self._driven = False

    def _run_while_driven(self) -> None:
        while self.busy and self._driven:
            self.step()

    def _launch(self, step: Step) -> None:
        with _on(self._device):
            opened = self._spare or self._runner.open()
            opened.fill(step.decodes, step.prefills)
            decodes = self._tried(opened.decode, step.decodes)
            prefills = self._tried(opened.prefill, step.prefills)
            if decodes or prefills:
                self._spare = None
                self._in_flight.append(_InFlight(Step(decodes, prefills), opened.close()))
            else:
                # The next turn's slot may be that of a step in flight.
                self._spare = opened

    def _tried(self, launch: Callable[[Sequence[Row]], None], rows: list[Row]) -> list[Row]:
        """The rows that were launched: all, or, where memory does not suffice, none, and one request less next time."""
        if not rows:
            return rows
        try:
            launch(rows)
        except torch.OutOfMemoryError as error:
            # What was launched of it reads the step's buffers still; no hurry now.
            self._lanes.drain()
            last = rows[-1].job
            self._scheduler.undo(rows)
            message = f"the device's memory does not suffice for this request beside {len(rows) - 1} others: {error}"
            self._scheduler.fail(last, RequestError(message))
            return []
        return rows

    def _collect(self) -> None:
        step, launched = self._in_flight[0].step, self._in_flight[0].launched
        if not launched.arrival.query():
            with host_read("tokens of a step", launched.results.nbytes, ReadKind.EVENT):
                launched.arrival.synchronize()
        self._in_flight.popleft()
        rows: list[list[int]] = launched.results.tolist()
        batch = self._runner.batch
        found = [*rows[: len(step.decodes)], *rows[batch : batch + len(step.prefills)]]
        self._scheduler.learn(step.rows, [(row[TOKEN : TOKEN + row[COUNT]], bool(row[STOPS])) for row in found])

    def _give_up(self, error: BaseException) -> None:
        what = f"{type(error).__name__}: {error}"
        self._stop(f"the batcher stopped at {what}; make another", f"the batcher stopped at {what}")

    def _stop(self, closed: str, reason: str) -> None:
        self._closed = closed
        while self._commands:
            self._commands.popleft()()
        self._in_flight.clear()
        self._scheduler.fail_all(RequestError(reason))

    def _give_attention_back(self) -> None:
        while self._attention_before:
            model, attention = self._attention_before.pop()
            model.set_attn_implementation(attention)

    def _encoded(self, prompt: str | Sequence[int] | torch.Tensor) -> tuple[int, ...]:
        if isinstance(prompt, torch.Tensor):
            return tuple(prompt.flatten().tolist())
        if not isinstance(prompt, str):
            return tuple(int(token) for token in prompt)
        if self._tokenizer is None:
            raise RequestError(
                "the prompt is text, and the batcher has no tokenizer; give token ids, or make it with one"
            )
        return tuple(self._tokenizer(prompt)["input_ids"])


def _cache(layers: Mapping[int, LayerShape], num_pages: int, page_size: int, device: torch.device) -> PagedCache:
    try:
        with torch.inference_mode():
            return PagedCache(layers, num_pages=num_pages, page_size=page_size, device=device)
    except torch.OutOfMemoryError as error:
        raise BatcherError(
            f"a KV cache of {num_pages * page_size} tokens does not fit into the device's memory; give smaller "
            f"cache_tokens, max_length or max_batch: {error}"
        ) from error


def _max_length(given: int | None, models: Sequence[Any]) -> int:
    known = [positions for each in models if (positions := positions_of(each)) is not None]
    most = min(known, default=None)
    if given is None:
        return _DEFAULT_LENGTH if most is None else min(_DEFAULT_LENGTH, most)
    if most is not None and given > most:
        fewest = next(each for each in models if positions_of(each) == most)
        whose = "the model" if fewest is models[0] else "the draft model"
        raise ValueError(f"max_length is {given} and {whose} has {most} positions; give at most that")
    return given


def _decode_sizes(given: Sequence[int] | None, max_batch: int) -> list[int]:
    if given is None:
        return [*(1 << power for power in range(max_batch.bit_length()) if 1 << power < max_batch), max_batch]
    sizes = sorted(set(given))
    if not sizes or sizes[0] < 1 or sizes[-1] != max_batch:
        raise ValueError(f"decode_sizes is {list(given)}; it must be positive, and the largest max_batch, {max_batch}")
    return sizes


def _eos_token_ids(given: int | Sequence[int] | None, model: Any) -> list[int]:
    if given is None:
        return end_of_sequence(model)
    return [given] if isinstance(given, int) else list(given)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make the device current in this thread, which may not be the one that made the batcher."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
