"""The arms of the continuous batching benchmark, which `batching` times in turns and `tracing` records."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.batching_models import twin
from benchmarks.middle import OnStep, before_each

ARMS = ("synchronous", "synchronous again", "asynchronous", "transformers")
DRAFTED = ("drafts synchronous", "drafts asynchronous")
OURS = (*ARMS[:3], *DRAFTED)
_ASYNCHRONOUS = ("asynchronous", "drafts asynchronous")
_PAGE = 256

Arm = Callable[..., list[list[int]]]
"""Takes the number of new tokens, and optionally other prompts; returns the tokens of each request."""
Say = Callable[[str], None]
"""Takes a line of progress."""


class BatchingError(RuntimeError):
    """The arms don't generate the same tokens, or the settings can't be run."""


@dataclass(frozen=True, slots=True)
class Arms:
    runs: dict[str, Arm]
    attention: dict[str, str]
    batchers: dict[str, Any]
    """The `ContinuousBatcher` of each arm of ours."""

    def stepping(
        self, name: str, new_tokens: int, on_step: OnStep, *, others: list[list[int]] | None = None
    ) -> list[list[int]]:
        """Run one of our arms, on `others` as prompts if given, and call `on_step` as each step begins."""
        with before_each(self.batchers[name], "step", on_step):
            return self.runs[name](new_tokens, others)


def make_arms(
    stack: contextlib.ExitStack,
    model: Any,
    prompts: list[list[int]],
    *,
    batch: int,
    new_tokens: int,
    attention: str,
    names: list[str],
    drafter: Any = None,
    drafts: int = 0,
    compiled: bool = False,
    say: Say = lambda _: None,
) -> Arms:
    """The arms of these names, which `stack` closes; arms that draft need `drafter` and `drafts`."""
    from vllm_async_spec.generation import BatcherConfig, ContinuousBatcher

    made = Arms({}, {}, {})
    length = len(prompts[0]) + new_tokens
    if "transformers" in names:
        say("making transformers' manager")
        made.runs["transformers"], made.attention["transformers"] = _transformers(
            stack, model, prompts, batch, length, new_tokens
        )
    # If requests queue, an arm that learns later that a request ended batches other requests together. With one decode
    # size and one prompt a step, this changes no bit of any result.
    options: dict[str, Any] = {"max_prefills": 1, "decode_sizes": [batch]} if len(prompts) > batch else {}
    if compiled:
        options |= {"torch_compile": True, "decode_sizes": [batch]}

    def run(batcher: Any, synchronous: bool, tokens: int, others: list[list[int]] | None = None) -> list[list[int]]:
        batcher.synchronous = synchronous
        found = [batcher.submit(prompt, max_new_tokens=tokens) for prompt in others or prompts]
        batcher.run()
        return [request.result() for request in found]

    # Arms that draft first, because a model that a batcher holds can't have a twin.
    for ours in (DRAFTED, ARMS[:3]):
        wanted = [name for name in ours if name in names]
        if not wanted:
            continue
        say(f"making the batcher of {', '.join(wanted)}, which may capture graphs and compile kernels")
        drafted = ours is DRAFTED
        config = BatcherConfig(
            max_batch=batch,
            max_length=length,
            attention=attention,
            draft_tokens=drafts if drafted else None,
            **options,
        )
        batcher = stack.enter_context(
            ContinuousBatcher(
                twin(model) if drafted else model, config=config, draft_model=drafter if drafted else None
            )
        )
        for name in wanted:
            made.runs[name] = functools.partial(run, batcher, name not in _ASYNCHRONOUS)
            made.attention[name], made.batchers[name] = batcher.attention, batcher
    return Arms(
        {name: made.runs[name] for name in names}, {name: made.attention[name] for name in names}, made.batchers
    )


def _transformers(
    stack: contextlib.ExitStack, model: Any, prompts: list[list[int]], batch: int, length: int, new_tokens: int
) -> tuple[Arm, str]:
    import transformers

    try:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
    except ImportError as error:
        raise BatchingError(
            f"transformers {transformers.__version__} lacks the continuous batching of version 5; leave out that arm "
            "by naming the other arms in --arms"
        ) from error

    other = twin(model)
    asynchronous = model.device.type == "cuda"
    settings = transformers.GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=model.config.vocab_size, pad_token_id=0
    )
    page = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
    cache = ContinuousBatchingConfig(
        **{page: _PAGE},
        num_blocks=batch * -(-length // _PAGE) + batch,
        max_batch_tokens=max(2048, batch),
        max_requests_per_batch=batch,
        use_async_batching=asynchronous,
    )
    manager = stack.enter_context(
        other.continuous_batching_context_manager(generation_config=settings, continuous_batching_config=cache)
    )

    def run(tokens: int, others: list[list[int]] | None = None) -> list[list[int]]:
        order = manager.add_requests(inputs=others or prompts, max_new_tokens=tokens)
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
