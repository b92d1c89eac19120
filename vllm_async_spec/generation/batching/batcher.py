"""Continuous batching whose host plans and launches a step while the one before runs.

`step` is the loop's body, synchronous and asynchronous: what differs is only how many steps may be launched before the
tokens of one are read. With none it is the plain loop, and the specification of the other.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import torch

from vllm_async_spec.generation.batching.attention_backends import choose_backend, default_page_size
from vllm_async_spec.generation.batching.config import BatcherConfig
from vllm_async_spec.generation.batching.decoding import Decoding, SingleTokens
from vllm_async_spec.generation.batching.drafting import DraftedTokens
from vllm_async_spec.generation.batching.driver import Driver, Work
from vllm_async_spec.generation.batching.intake import Intake, Prompt
from vllm_async_spec.generation.batching.model_check import (
    drafts_of,
    ends_of_sequence,
    layers_of,
    max_length_of,
    take_over,
)
from vllm_async_spec.generation.batching.paged_cache import LayerShape, PagedCache
from vllm_async_spec.generation.batching.paged_model import PagedModel
from vllm_async_spec.generation.batching.pages import PageAllocator
from vllm_async_spec.generation.batching.request import BatcherError, Request, RequestError
from vllm_async_spec.generation.batching.runner import Runner
from vllm_async_spec.generation.batching.scheduler import Scheduler
from vllm_async_spec.generation.batching.step_slots import Sizes
from vllm_async_spec.generation.batching.steps_in_flight import StepsInFlight
from vllm_async_spec.generation.batching.streams import CudaStreams, OpenStreams, open_streams
from vllm_async_spec.generation.compiling import compiling_each


class ContinuousBatcher:
    """Generates many sequences at once, each joining and leaving when it does.

    The model is unchanged but for its attention implementation, which `close` puts back; until then only the batcher
    may call it. Use it with `with`, or close it.

    Args:
        model: a causal language model of transformers, in evaluation mode, on one device.
        tokenizer: encodes prompts that are strings; needed for those only.
        config: the settings; required. An attribute `synchronous` may be changed while nothing runs.
        draft_model: another decoder of the same vocabulary, whose drafts the model verifies. The tokens are those
            without it, and greedy. It belongs to the batcher as the model does.
        open_streams: where work is launched; streams on a CUDA device by default.
        settings: deprecated; those of `BatcherConfig`, in place of `config`.

    Raises:
        ModelError: the model can't be batched.
        AttentionChoiceError: the attention can't be had for this model here.
        BatcherError: the KV cache does not fit into memory.
        ValueError: a setting can't be for this model; the message names it.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: BatcherConfig | None = None,
        *,
        draft_model: Any = None,
        open_streams: OpenStreams = open_streams,
        **settings: Any,
    ) -> None:
        config = _config_of(config, settings)
        device: torch.device = model.device
        if config.cuda_graphs and device.type != "cuda":
            raise ValueError(f"cuda_graphs is True and the model is on {device.type}; leave it out, or move the model")
        drafts = drafts_of(model, draft_model, config.draft_tokens)
        compile_with = config.compile_with
        models = [model] if draft_model is None else [model, draft_model]
        slots = config.steps_ahead + 1
        self._steps_ahead = config.steps_ahead
        self._ahead = 0 if config.synchronous else config.steps_ahead
        max_batch, max_length = config.max_batch, max_length_of(models, config.max_length)
        page_size = default_page_size(config.attention, device) if config.page_size is None else config.page_size
        # The drafts behind the last token have places too; and with them padding is a sequence of two tokens.
        width = -(-(max_length + drafts + (drafts > 0)) // page_size)
        cached = max_batch * width if config.cache_tokens is None else -(-config.cache_tokens // page_size)
        sizes = Sizes(max_batch, config.max_prefills, config.max_prefill_tokens, width, drafts)

        self._attention_before: list[tuple[Any, str]] = []
        try:
            for each in models:
                self._attention_before.append((each, take_over(each)))
            pages = PageAllocator(cached + 1)

            def paged(each: Any, query_tokens: int) -> PagedModel:
                layers = layers_of(each)
                backend = choose_backend(
                    config.attention,
                    layers.values(),
                    page_size=page_size,
                    slots=slots,
                    device=device,
                    query_tokens=query_tokens,
                )
                cache = _cache(layers, pages.num_pages, page_size, device)
                return PagedModel.of(each, cache, backend, compile_with=compile_with)

            eos_token_ids = ends_of_sequence(model, config.eos_token_id)
            target = paged(model, 1 + drafts)
            self.attention = target.backend.name
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
            self._streams = open_streams(device, slots)
            captures = isinstance(self._streams, CudaStreams) if config.cuda_graphs is None else config.cuda_graphs
            with compiling_each(f"the forward of {type(model).__name__}", compile_with):
                runner = Runner(
                    target,
                    decoding=decoding,
                    streams=self._streams,
                    sizes=sizes,
                    slots=slots,
                    decode_sizes=config.padded_sizes,
                    longest=max_length + drafts,
                    cuda_graphs=captures,
                )
        except BaseException:
            self._give_attention_back()
            raise
        self._scheduler = Scheduler(
            pages,
            page_size=page_size,
            max_batch=max_batch,
            max_length=max_length,
            max_prefill_tokens=config.max_prefill_tokens,
            max_prefills=config.max_prefills,
            drafts=drafts,
        )
        vocabulary = model.get_input_embeddings().num_embeddings
        self._intake = Intake(tokenizer, vocabulary, samples=not drafts, check=self._scheduler.check)
        self._in_flight = StepsInFlight(self._scheduler, runner, self._streams, device)
        self._commands: deque[Callable[[], None]] = deque()
        self._stepping = threading.Lock()
        self._stepping_thread: int | None = None
        self._driver = Driver()
        self._closed: str | None = None
        """Why no request is taken any more; the step that runs is the last."""
        self._reason = ""
        """What those that are left are told."""
        self._gives_model_back = False

    def submit(self, prompt: Prompt, *, max_new_tokens: int = 128, temperature: float = 0.0, seed: int = 0) -> Request:
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
        request = self._intake.request(prompt, max_new_tokens, temperature, seed)
        self._commands.append(functools.partial(self._scheduler.add, request))
        if self._closed:
            # By another thread, in the meantime: nobody looks at commands any more.
            raise BatcherError(self._closed)
        return request

    def cancel(self, request: Request) -> None:
        """End a request, from any thread: no token is given for it after the next step has been planned."""
        self._commands.append(functools.partial(self._scheduler.cancel, request))

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
        return self._closed is None and bool(self._commands or self._in_flight or self._scheduler.busy)

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
        return self._step(wait=False)

    def run(self) -> None:
        """Step until all requests are finished."""
        while self.busy:
            self.step()

    async def stream(
        self, prompt: Prompt, *, max_new_tokens: int = 128, temperature: float = 0.0, seed: int = 0
    ) -> AsyncIterator[int]:
        """Submit a request and give its tokens as they arrive; leaving the loop early cancels it.

        Steps run in a thread beside the event loop, which all streams of a batcher share.

        Raises:
            RequestError: the request can't be served, or could not be finished.
        """
        request = self.submit(prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        try:
            self._driver.follow(self._work())
            async for token in request:
                yield token
        finally:
            if not request.finished:
                self.cancel(request)

    def start(self) -> None:
        """Let steps run in a thread beside the running event loop, until nothing is left to do or the loop ends.

        Each event loop that iterates over requests may call this. One drives; when it ends, another takes over.

        Raises:
            BatcherError: a driver was stopped, and its last step has not returned.
        """
        self._driver.start(self._work())

    def close(self) -> None:
        """Cancel what is left, wait for the steps in flight, and give the model its attention back; twice is once.

        Called inside a step, by a hook of the model or a signal's handler, it takes effect when the step has ended.
        """
        self._gives_model_back = True
        self._take_no_more("the batcher is closed; make another", "the batcher was closed")
        if not self._steps_here():
            self._stepping.acquire()
            self._stepping_thread = threading.get_ident()
            self._leave_step()

    def __enter__(self) -> ContinuousBatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> Work:
        return Work(step=functools.partial(self._step, wait=True), busy=lambda: self.busy)

    def _step(self, *, wait: bool) -> bool:
        if self._closed is not None or not self._stepping.acquire(blocking=wait):
            if self._closed is None:
                where = "in this one already" if self._steps_here() else "in another thread"
                raise BatcherError(f"step() runs {where}; let one thread drive the batcher")
            return False
        self._stepping_thread = threading.get_ident()
        try:
            if self._closed is None:
                self._advance()
        except BaseException as error:
            what = f"the batcher stopped at {type(error).__name__}: {error}".removesuffix(": ")
            self._take_no_more(f"{what}; make another", what)
            raise
        finally:
            self._leave_step()
        return self.busy

    def _steps_here(self) -> bool:
        return self._stepping_thread == threading.get_ident()

    def _leave_step(self) -> None:
        try:
            if self._closed is not None:
                self._end()
        finally:
            self._stepping_thread = None
            self._stepping.release()

    def _advance(self) -> None:
        self._obey()
        step = self._scheduler.plan()
        if step is not None:
            self._in_flight.launch(step)
        if self._in_flight and (step is None or len(self._in_flight) > self._ahead):
            self._in_flight.collect()

    def _obey(self) -> None:
        # No more than there are now: others may go on submitting.
        for _ in range(len(self._commands)):
            # Taken off when it is done: an interrupt in between would lose a request.
            self._commands[0]()
            self._commands.popleft()

    def _take_no_more(self, closed: str, reason: str) -> None:
        if self._closed is None:
            self._reason = reason
            self._closed = closed

    def _end(self) -> None:
        """End what is left of a batcher that takes no more; again, where an interrupt has ended this half-way."""
        self._obey()
        self._in_flight.forget()
        self._scheduler.fail_all(RequestError(self._reason))
        if self._gives_model_back and self._attention_before:
            try:
                self._streams.drain()
            finally:
                self._give_attention_back()

    def _give_attention_back(self) -> None:
        while self._attention_before:
            model, attention = self._attention_before[-1]
            model.set_attn_implementation(attention)
            self._attention_before.pop()


def _config_of(config: BatcherConfig | None, settings: dict[str, Any]) -> BatcherConfig:
    """The config, also of a caller who gives the settings one by one."""
    if config is not None:
        if settings:
            raise TypeError(f"a config and {', '.join(settings)} were given; put all settings into the BatcherConfig")
        return config
    if not settings:
        raise TypeError("ContinuousBatcher needs a config, such as BatcherConfig(max_batch=8)")
    warnings.warn(
        f"keyword arguments of ContinuousBatcher work in this release only: give {', '.join(settings)} in a config, "
        "as in ContinuousBatcher(model, tokenizer, BatcherConfig(max_batch=8))",
        DeprecationWarning,
        stacklevel=3,
    )
    return BatcherConfig(**settings)


def _cache(layers: Mapping[int, LayerShape], num_pages: int, page_size: int, device: torch.device) -> PagedCache:
    try:
        with torch.inference_mode():
            return PagedCache(layers, num_pages=num_pages, page_size=page_size, device=device)
    except torch.OutOfMemoryError as error:
        raise BatcherError(
            f"a KV cache of {num_pages * page_size} tokens does not fit into the device's memory; give smaller "
            f"cache_tokens, max_length or max_batch: {error}"
        ) from error
