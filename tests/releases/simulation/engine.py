"""One release's scheduler and runner, put together as its engine core does, with two batches in flight.

Stand-ins are the device, the two models, the attention backend and the process groups; the rest is the release's.
"""

import contextlib
import inspect
import os
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from simulation.device import DEVICE, Gpu
from simulation.grammar import Grammar, manager, masking
from simulation.kernels import interpreting
from simulation.model import Builder, Draft, Seen, Target
from simulation.shape import BLOCK, DRAFT_LAYER, LAYERS, LONGEST, Shape, configuration, kv_cache, one_process
from simulation.wishes import PLAIN, Wishes


def make_scheduler(config: Any, shape: Shape) -> Any:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    init_none_hash(sha256)
    cache = kv_cache(shape)
    return AsyncScheduler(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=manager(config),
        block_size=max(group.kv_cache_spec.block_size for group in cache.kv_cache_groups),
        log_stats=False,
    )


def made_of(kind: Any, wanted: dict[str, Any], *given: Any) -> Any:
    """What the release's class or function makes of those wanted arguments that it knows."""
    known = inspect.signature(kind).parameters
    return kind(*given, **{name: value for name, value in wanted.items() if name in known})


@dataclass(slots=True)
class Step:
    """What was seen of one step.

    `device` is by name as the device found it: `logits_indices`, `discard`, those of the speculation's metadata.
    `sampled` is (rows, drafts + 1) or (rows, 1), -1 where rejected; `drafts` (rows, drafts) were proposed after it.
    `first`: no output was in flight. `host` is the runner's account of each request, and `places` has its row.
    """

    scheduled: dict[str, Any]
    rows: list[str] = field(default_factory=list)
    device: dict[str, Any] = field(default_factory=dict)
    calls: list[Seen] = field(default_factory=list)
    sampled: Any = None
    drafts: Any = None
    first: bool = False
    host: dict[str, Any] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)


class Engine:
    """The engine core's loop over one scheduler and one runner; `late` delays its device."""

    def __init__(self, runner_class: Any, shape: Shape, late: random.Random | None = None) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher

        self.gpu = Gpu(late)
        self.shape = shape
        self.steps: list[Step] = []
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.logprobs: dict[str, list[int]] = {}
        self.resets = self.deferred = 0
        self.queue: deque[tuple[Any, Any]] = deque()
        with self._active():
            self.config = configuration(shape)
            self.scheduler = make_scheduler(self.config, shape)
            self.hasher = get_request_block_hasher(BLOCK, sha256) if shape.prefix_caching else None
            self._make_runner(runner_class)

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        from vllm import _custom_ops

        in_torch = mock.patch.object(
            _custom_ops, "apply_repetition_penalties_cuda", _custom_ops.apply_repetition_penalties_torch
        )
        with (
            one_process(),
            mock.patch.dict(os.environ, VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_USE_V2_MODEL_RUNNER="0"),
            torch.inference_mode(),
            self.gpu.active(),
            interpreting(self.gpu),
            in_torch,
            masking(self.gpu),
        ):
            yield

    def _make_runner(self, runner_class: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.v1.worker.utils import AttentionGroup

        with set_current_vllm_config(self.config):
            runner = runner_class(self.config, DEVICE)
        self.runner = runner
        if self.shape.axes:
            for owner in (runner, runner.drafter):
                owner.uses_mrope = True
            runner.mrope_positions = runner._make_buffer(3, self.shape.tokens + 1, dtype=torch.int64)
            runner.drafter.mrope_positions = torch.zeros(3, self.shape.tokens + 1, dtype=torch.int64, device=DEVICE)
        if self.shape.long_drafter:
            runner.effective_drafter_max_model_len = 2 * LONGEST
        groups = kv_cache(self.shape)
        runner.model = self._target()
        runner.kv_cache_config = groups
        backend = SimpleNamespace(forward_includes_kv_cache_update=True, get_name=lambda: "FLASH_ATTN")
        runner.attn_groups = [
            [
                AttentionGroup(
                    backend,
                    list(group.layer_names),
                    group.kv_cache_spec,
                    number,
                    metadata_builders=[self._builder(group.kv_cache_spec)],
                )
            ]
            for number, group in enumerate(groups.kv_cache_groups)
        ]
        sizes = {"kernel_block_sizes": [group.kv_cache_spec.block_size for group in groups.kv_cache_groups]}
        made_of(runner.may_reinitialize_input_batch, sizes, groups)
        self._make_drafter(runner.drafter, backend, groups.kv_cache_groups[0].kv_cache_spec)
        prepare, update = runner._prepare_inputs, runner._update_states

        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            made = prepare(*args, **kwargs)
            self._prepared(*made[:2])
            return made

        def update_states(*args: Any, **kwargs: Any) -> Any:
            made = update(*args, **kwargs)
            self._updated()
            return made

        runner._prepare_inputs, runner._update_states = prepare_inputs, update_states

    def _target(self) -> Any:
        return Target(self.gpu, self.shape.blocks * BLOCK, BLOCK, LAYERS, self._saw)

    def _draft(self) -> Any:
        return Draft(self.gpu, self.shape.blocks * BLOCK, BLOCK, [DRAFT_LAYER], self._saw)

    def _builder(self, spec: Any) -> Any:
        """The metadata builder of a KV cache group."""
        return Builder()

    def _make_drafter(self, drafter: Any, backend: Any, spec: Any) -> None:
        """What `load_model` and `initialize_attn_backend` do to it; releases have different ones of these names."""
        from vllm.v1.worker.utils import AttentionGroup

        drafter.model = self._draft()
        builder = Builder()
        builder.kv_cache_spec = spec
        drafter.attn_metadata_builder = builder
        drafter.attn_layer_names = [DRAFT_LAYER]
        drafter._draft_attn_layer_names = {DRAFT_LAYER}
        drafter.draft_attn_groups = [AttentionGroup(backend, [DRAFT_LAYER], spec, 0, metadata_builders=[builder])]
        drafter.kv_cache_gid = 0
        drafter.block_size = BLOCK

    def _saw(self, seen: Seen) -> None:
        self.steps[-1].calls.append(seen)

    def _updated(self) -> None:
        batch, step = self.runner.input_batch, self.steps[-1]
        step.rows, step.places = list(batch.req_ids), dict(batch.req_id_to_index)
        step.host = {
            req_id: {
                "num_computed_tokens": self.runner.requests[req_id].num_computed_tokens,
                "num_computed_tokens_cpu": int(batch.num_computed_tokens_cpu[row]),
                "output_token_ids": list(self.runner.requests[req_id].output_token_ids),
                "num_tokens_no_spec": int(batch.num_tokens_no_spec[row]),
                "token_ids_cpu": batch.token_ids_cpu[row].copy(),
                "num_prompt_tokens": int(batch.num_prompt_tokens[row]),
                "block_ids": [list(ids) for ids in self.runner.requests[req_id].block_ids],
            }
            for row, req_id in enumerate(batch.req_ids)
        }

    def _prepared(self, logits_indices: Any, metadata: Any) -> None:
        rows = self.runner.input_batch.num_reqs
        device = {"logits_indices": logits_indices, "discard": self.runner.discard_request_mask.gpu[:rows]}
        if metadata is not None:
            fields = vars(metadata)
            device |= {name: value for name, value in fields.items() if isinstance(value, (torch.Tensor, list))}
        self.steps[-1].device = self.gpu.snapshot(device)

    def add(self, name: str, prompt: list[int], count: int, stop: int, wishes: Wishes = PLAIN) -> None:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.v1.request import Request

        params = SamplingParams(
            temperature=0.0, max_tokens=count, stop_token_ids=[stop], ignore_eos=True, **wishes.parameters()
        )
        if wishes.grammar:
            params.structured_outputs = StructuredOutputsParams(regex="any, for the grammar is given")
        params.update_from_generation_config({}, None)
        params._bad_words_token_ids = [list(word) for word in wishes.bad_words] or None
        wanted = {
            "request_id": name,
            "prompt_token_ids": prompt,
            "sampling_params": params,
            "pooling_params": None,
            "eos_token_id": None,
            "block_hasher": self.hasher,
        }
        self.outputs[name] = []
        request = made_of(Request, wanted)
        if wishes.grammar:
            request.structured_output_request.grammar = Grammar(wishes)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        if name in self.scheduler.requests:
            self.finished[name] = "abort"
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def plan(self, *, drafts: int, tokens: int) -> None:
        if hasattr(self.scheduler, "dynamic_sd_lookup"):
            # From 0.24 the drafter makes no more than are planned; fewer come from a table by batch size.
            fewer = [drafts] * (self.shape.rows + 1)
            self.scheduler.dynamic_sd_lookup = None if drafts == self.shape.drafts else fewer
        elif hasattr(self.scheduler, "_spec_token_placeholders"):
            self.scheduler._spec_token_placeholders = [-1] * drafts
        else:
            self.scheduler.num_spec_tokens = drafts
        self.scheduler.max_num_scheduled_tokens = tokens

    @property
    def busy(self) -> bool:
        return self.scheduler.has_requests() or bool(self.queue)

    def step(self, *, drained: bool = False, quiet: bool = False) -> None:
        """As `EngineCore.step_with_batch_queue`.

        `drained`: all output comes before another step is scheduled, as while the device is faster than the host; with
        `quiet` not if the step has drafts.
        """
        with self._active():
            if self.scheduler.has_requests():
                scheduled = self.scheduler.schedule()
                self.steps.append(Step(self._facts(scheduled), first=not self.queue))
                output = self.runner.execute_model(scheduled)
                deferred = bool(scheduled.total_num_scheduled_tokens and scheduled.pending_structured_output_tokens)
                if deferred:
                    # A grammar has to see the tokens and drafts of the step before.
                    self.deferred += 1
                    self._process_oldest()
                    self.scheduler.update_draft_token_ids_in_output(self.runner.take_draft_token_ids(), scheduled)
                if scheduled.total_num_scheduled_tokens:
                    output = self.runner.sample_tokens(self.scheduler.get_grammar_bitmask(scheduled))
                    self.steps[-1].sampled = self.gpu.snapshot(output._sampled_token_ids)
                    self.steps[-1].drafts = self.gpu.snapshot(self.runner._draft_token_ids)
                self.queue.appendleft((output, scheduled))
                if drained and not (quiet and scheduled.scheduled_spec_decode_tokens):
                    self.drain()
                    return
                if deferred or (scheduled.total_num_scheduled_tokens and len(self.queue) < 2):
                    return
            elif not self.queue:
                return
            self._process_oldest()

    def _process_oldest(self) -> None:
        output, scheduled = self.queue.pop()
        if hasattr(output, "get_output"):
            output = output.get_output()
        for made in self.scheduler.update_from_output(scheduled, output).values():
            for each in made.outputs:
                self.outputs[each.request_id] += each.new_token_ids
                if each.new_logprobs is not None:
                    tokens = np.asarray(each.new_logprobs.logprob_token_ids)[:, 0]
                    self.logprobs.setdefault(each.request_id, []).extend(tokens.tolist())
                if each.finish_reason is not None:
                    self.finished[each.request_id] = str(each.finish_reason)

    def drain(self) -> None:
        while self.queue:
            self._process_oldest()

    def reset_prefix_cache(self, *, carefully: bool = True) -> None:
        """Preempt all that runs, and forget all blocks.

        `carefully`: only where the scheduler counts right, with one token of each request in flight and no drafts.
        """
        running = self.scheduler.running
        if carefully and not (len(self.queue) == 1 and all(each.num_output_placeholders == 1 for each in running)):
            return
        self.resets += 1
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def _facts(self, scheduled: Any) -> dict[str, Any]:
        cached, manager = scheduled.scheduled_cached_reqs, self.scheduler.kv_cache_manager
        return {
            "tokens": dict(scheduled.num_scheduled_tokens),
            "drafts": {name: len(tokens) for name, tokens in scheduled.scheduled_spec_decode_tokens.items()},
            "computed": {each.req_id: each.num_computed_tokens for each in scheduled.scheduled_new_reqs}
            | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True)),
            "outputs": dict(zip(cached.req_ids, cached.num_output_tokens, strict=True)),
            "resumed": sorted(cached.resumed_req_ids),
            "finished": sorted(scheduled.finished_req_ids),
            "blocks": {
                name: [list(ids) for ids in manager.get_block_ids(name)] for name in scheduled.num_scheduled_tokens
            },
        }
