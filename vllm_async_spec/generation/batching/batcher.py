"""Continuous batching whose host plans and launches a step while the previous step runs.

`step` is the loop's body, synchronous and asynchronous. The modes differ only in how many steps may be launched before
a step's tokens are read. With none launched ahead, the loop is synchronous, and specifies the asynchronous loop.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import torch

from vllm_async_spec.generation.batching.attention_backends import choose_backend, default_page_size
from vllm_async_spec.generation.batching.config import BatcherConfig, config_of
from vllm_async_spec.generation.batching.decoding import Decoding, SingleTokens
from vllm_async_spec.generation.batching.drafting import DraftedTokens
from vllm_async_spec.generation.batching.driver import Driver, Work
from vllm_async_spec.generation.batching.intake import Intake, Prompt
from vllm_async_spec.generation.batching.model_check import (
    drafts_of,
    ends_of_sequence,
    layers_of,
    max_length_of,
    refuse_autocast,
    refuse_other_tokens,
)
from vllm_async_spec.generation.batching.owned_models import OwnedModels
from vllm_async_spec.generation.batching.paged_cache import cache_of
from vllm_async_spec.generation.batching.paged_model import PagedModel
from vllm_async_spec.generation.batching.pages import PageAllocator
from vllm_async_spec.generation.batching.request import BatcherError, Request, RequestError
from vllm_async_spec.generation.batching.runner import Runner
from vllm_async_spec.generation.batching.scheduler import Scheduler
from vllm_async_spec.generation.batching.step_slots import Sizes
from vllm_async_spec.generation.batching.steps_in_flight import StepsInFlight
from vllm_async_spec.generation.batching.streams import CudaStreams, OpenStreams, open_streams
from vllm_async_spec.generation.compiling import compiling_each

_RUNS = "step() already runs in {} thread; let one thread drive the batcher"


class ContinuousBatcher:
    """Generates many sequences at once, each of which joins and leaves on its own.

    Only the model's attention implementation changes, and `close` restores it. Until then only the batcher may call
    the model. Use the batcher in a `with` statement, or close it.

    Args:
        model: a causal language model of transformers, in evaluation mode, on one device.
        tokenizer: encodes prompts that are strings; needed only for these.
        config: the settings; required. The batcher's attribute `synchronous` may be changed while nothing runs.
        draft_model: a decoder with the same vocabulary, whose drafts the model verifies. Tokens stay the model's own,
            and are greedy. Until `close`, only the batcher may call it.
        open_streams: opens the streams of the steps; CUDA streams on a CUDA device by default.
        settings: deprecated; settings of `BatcherConfig`, in place of `config`.

    Raises:
        ModelError: the model can't be batched.
        AttentionChoiceError: the attention is unavailable for this model or machine.
        BatcherError: the KV cache does not fit into memory, or `torch.autocast` is on.
        ValueError: the model does not allow a setting; the message names it.
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
        config = config_of(tokenizer, config, settings)
        device: torch.device = model.device
        refuse_autocast(device)
        if config.cuda_graphs and device.type != "cuda":
            raise ValueError(
                f"cuda_graphs is True and the model is on {device.type}; leave out cuda_graphs, or move the model"
            )
        drafts = drafts_of(model, draft_model, config.draft_tokens)
        compile_with = config.compile_with
        models = [model] if draft_model is None else [model, draft_model]
        slots = config.steps_ahead + 1
        self._steps_ahead = config.steps_ahead
        self._ahead = 0 if config.synchronous else config.steps_ahead
        max_batch, max_length = config.max_batch, max_length_of(models, config.max_length)
        page_size = default_page_size(config.attention, device) if config.page_size is None else config.page_size
        # Drafts after the last token need places too. With drafts, a padding row is a sequence of two tokens.
        width = -(-(max_length + drafts + (drafts > 0)) // page_size)
        cached = max_batch * width if config.cache_tokens is None else -(-config.cache_tokens // page_size)
        sizes = Sizes(max_batch, config.max_prefills, config.max_prefill_tokens, width, drafts)

        owned = OwnedModels()
        # A batcher that is dropped without `close` gives its models back too.
        self._give_back = weakref.finalize(self, owned.give_back)
        self._give_back.atexit = False
        try:
            for each in models:
                owned.take(each)
            pages = PageAllocator(cached + 1)

            def paged(each: Any, query_tokens: int) -> PagedModel:
                layers = layers_of(each, max_length)
                backend = choose_backend(
                    config.attention,
                    layers.values(),
                    page_size=page_size,
                    slots=slots,
                    device=device,
                    query_tokens=query_tokens,
                )
                cache = cache_of(layers, pages.num_pages, page_size, device)
                return PagedModel.of(each, cache, backend, compile_with=compile_with)

            refuse_other_tokens(model)
            eos_token_ids = ends_of_sequence(model, config.eos_token_id)
            target = paged(model, 1 + drafts)
            self.attention = target.backend.name
            """Name of the adapter that was chosen."""
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
            self._give_back()
            raise
        self._device = device
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
        del runner, decoding, target
        self._commands: deque[Callable[[], None]] = deque()
        self._stepping = threading.RLock()  # only its owner can release it, so whoever was interrupted may try
        self._stepping_thread: int | None = None
        self._driver = Driver()
        self._closed: str | None = None
        """Why the batcher takes no more requests, so that a running step is the last; None while it is open."""
        self._reason = ""
        """The error message for requests that are left."""
        self._gives_model_back = False

    def submit(
        self, prompt: Prompt, *, max_new_tokens: int = 128, temperature: float = 0.0, seed: int | None = None
    ) -> Request:
        """Queue a request, from any thread; `step`, `run` or an event loop that called `start` serves it.

        Args:
            prompt: token ids, in a sequence or a tensor, or text where there is a tokenizer.
            max_new_tokens: maximum new tokens; an end of sequence may come first.
            temperature: 0 is greedy.
            seed: of sampling: the same seed repeats the tokens. None draws one from PyTorch's default CPU generator,
                so `torch.manual_seed` makes a run repeatable; `Request.seed` holds the seed used.

        Raises:
            RequestError: the request can never be served; nothing is queued.
            BatcherError: the batcher is closed, or `torch.autocast` is on.
        """
        if self._closed:
            raise BatcherError(self._closed)
        refuse_autocast(self._device)
        request = self._intake.request(prompt, max_new_tokens, temperature, seed)
        self._commands.append(functools.partial(self._scheduler.add, request))
        if self._closed:
            # Another thread has closed the batcher meanwhile, so no step reads commands any more.
            raise BatcherError(self._closed)
        self._driver.wake(self._work())
        return request

    def cancel(self, request: Request) -> None:
        """End a request, from any thread. The request gets no token after the next step has been planned.

        Raises:
            TypeError: this is no request.
            RequestError: it is another batcher's request.
        """
        if not isinstance(request, Request):
            raise TypeError(f"request is {request!r}; it must be a Request, which submit returns")
        if not self._intake.made(request):
            raise RequestError("the request is another batcher's; call cancel of the batcher that it was submitted to")
        self._commands.append(functools.partial(self._scheduler.cancel, request))

    @property
    def synchronous(self) -> bool:
        """Whether the batcher waits for each step before it plans the next step."""
        return self._ahead == 0

    @synchronous.setter
    def synchronous(self, value: bool) -> None:
        if self.busy:
            raise BatcherError("synchronous can't be changed while requests run; let run() finish them first")
        self._ahead = 0 if value else self._steps_ahead

    @property
    def busy(self) -> bool:
        """Whether `step` has anything left to do."""
        return self._closed is None and bool(self._commands or self._in_flight or self._scheduler.busy)

    @property
    def accepted(self) -> float:
        """Mean number of tokens that a decode step gives a sequence, over the results known so far.

        1 if no draft is accepted or there are none; `draft_tokens` + 1 if all are accepted.
        """
        return self._scheduler.given / self._scheduler.verified if self._scheduler.verified else 1.0

    @property
    def free_pages(self) -> int:
        """Number of pages of the cache that no request holds."""
        return self._scheduler.pages.free

    def step(self) -> bool:
        """Launch the next step, then read the tokens of the step launched `steps_ahead` steps before.

        Returns:
            Whether there is more to do.

        Raises:
            BatcherError: a `step` is already running, or `torch.autocast` is on.
        """
        refuse_autocast(self._device)
        return self._step(wait=False)

    def run(self) -> None:
        """Step until all requests are finished."""
        while self.busy:
            self.step()

    async def stream(
        self, prompt: Prompt, *, max_new_tokens: int = 128, temperature: float = 0.0, seed: int | None = None
    ) -> AsyncIterator[int]:
        """Submit a request and yield its tokens as they arrive; leaving the loop early cancels the request.

        Arguments as for `submit`.

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
        """Run steps in a thread beside the running event loop whenever there are requests, until the loop ends.

        Each event loop that iterates over requests may call this. One loop drives; when it ends, another takes over.

        Raises:
            BatcherError: the batcher is closed, or the last step of a stopped driver has not returned.
        """
        if self._closed:
            raise BatcherError(self._closed)
        self._driver.start(self._work())

    def close(self) -> None:
        """Cancel what is left, wait for steps in flight, and restore the model's attention; may be repeated.

        During a step, in a hook of the model or a signal handler, the call takes effect when the step has ended.
        """
        self._gives_model_back = True
        self._take_no_more("the batcher is closed; make another", "the batcher was closed")
        if not self._steps_here():
            try:
                self._stepping.acquire()
                self._stepping_thread = threading.get_ident()
            finally:
                self._leave_step()

    def __enter__(self) -> ContinuousBatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> Work:
        return Work(step=functools.partial(self._step, wait=True), busy=lambda: self.busy)

    def _step(self, *, wait: bool) -> bool:
        if self._closed is not None:
            return False
        if self._steps_here():
            raise BatcherError(_RUNS.format("this"))
        try:
            if not self._stepping.acquire(blocking=wait):
                raise BatcherError(_RUNS.format("another"))
            self._stepping_thread = threading.get_ident()
            self._advance_or_stop()
        finally:
            self._leave_step()
        return self.busy

    def _advance_or_stop(self) -> None:
        if self._closed is not None:
            return
        try:
            # Buffers made in inference mode can be written to only there, and a driver's thread begins outside.
            with torch.inference_mode():
                self._advance()
        except BaseException as error:
            what = f"the batcher stopped at {type(error).__name__}: {error}".removesuffix(": ")
            self._take_no_more(f"{what}; make another", what)
            raise

    def _steps_here(self) -> bool:
        return self._stepping_thread == threading.get_ident()

    def _leave_step(self) -> None:
        """Release the lock if this thread has it, also where an interrupt came just after the lock was taken."""
        try:
            if self._closed is not None and self._steps_here():
                self._end()
        finally:
            if self._steps_here():
                self._stepping_thread = None
            with contextlib.suppress(RuntimeError):
                self._stepping.release()

    def _advance(self) -> None:
        self._obey()
        step = self._scheduler.plan()
        if step is not None:
            self._in_flight.launch(step)
        if self._in_flight and (step is None or len(self._in_flight) > self._ahead):
            self._in_flight.collect()

    def _obey(self) -> None:
        # Only the commands queued by now: other threads may go on submitting.
        for _ in range(len(self._commands)):
            # Remove a command only after it has run: an interrupt in between would lose a request.
            try:
                self._commands[0]()
            except Exception:
                # A closed batcher drops the command.
                if self._closed is None:
                    raise
            self._commands.popleft()

    def _take_no_more(self, closed: str, reason: str) -> None:
        if self._closed is None:
            self._reason = reason
            self._closed = closed

    def _end(self) -> None:
        """End the remaining requests of a closed batcher; can be repeated after an interrupt."""
        with contextlib.ExitStack() as last:  # runs all, from the last to the first, whatever fails
            if self._gives_model_back and self._give_back.alive:
                last.callback(self._in_flight.release)
                last.callback(self._give_back)
                last.callback(self._streams.drain)
            last.callback(self._driver.end)
            last.callback(self._scheduler.fail_all, RequestError(self._reason))
            last.callback(self._in_flight.forget)
            self._obey()
