"""A release's asynchronous scheduler with two batches in flight; tokens are the numbers of their places."""

import random
from collections import deque
from collections.abc import Collection
from typing import Any

from simulation.engine import made_of, make_scheduler
from simulation.model import WINDOW
from simulation.shape import BLOCK, Shape, configuration, one_process

PROMPTS = (3, 20, 41, 50)
TOKENS = 40


class Scheduled:
    """The scheduler's loop, as the engine core's. `missing`: keys of the window that had been freed."""

    def __init__(self, seed: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._random = random.Random(seed)
        shape = Shape(rows=len(PROMPTS), tokens=64, kept=0)
        with one_process():
            self.scheduler = make_scheduler(configuration(shape), shape)
        self.tokens: dict[str, list[int]] = {}
        self.missing: list[int] = []
        self._computed: dict[str, int] = {}
        self._queue: deque[tuple[Any, Any]] = deque()
        for length in PROMPTS:
            params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
            name = f"of {length}"
            wanted = {"request_id": name, "prompt_token_ids": list(range(length)), "sampling_params": params}
            self.tokens[name] = []
            self.scheduler.add_request(made_of(Request, wanted | {"pooling_params": None, "eos_token_id": None}))

    def serve(self, reset_at: Collection[int] = ()) -> None:
        """To the end; after these steps the prefix cache is reset, with all that runs preempted."""
        for step in range(1, 400):
            if not self.scheduler.has_requests() and not self._queue:
                return
            if self.scheduler.has_requests():
                scheduled = self.scheduler.schedule()
                self._queue.appendleft((scheduled, self._run(scheduled)))
            if len(self._queue) == 2 or not self.scheduler.has_requests():
                self._process(*self._queue.pop())
            if step in reset_at:
                self.scheduler.reset_prefix_cache(reset_running_requests=True)
        raise RuntimeError("the scheduler does not come to an end")

    def _run(self, scheduled: Any) -> dict[str, list[int]]:
        cached = scheduled.scheduled_cached_reqs
        for new in scheduled.scheduled_new_reqs:
            self._computed[new.req_id] = new.num_computed_tokens
        for name, sent in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self._computed[name] = sent
        sampled = {}
        for name, count in scheduled.num_scheduled_tokens.items():
            self._look_for_keys(name)
            drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            end = self._computed[name] + count - drafts
            accepted = self._random.randint(0, drafts)
            chunk = end < self.scheduler.requests[name].num_tokens
            sampled[name] = [] if chunk else list(range(end, end + accepted + 1))
            self._computed[name] = end + accepted
        return sampled

    def _look_for_keys(self, name: str) -> None:
        full, window = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        assert not any(block.is_null for block in full.req_to_blocks[name])
        freed = sum(block.is_null for block in window.req_to_blocks[name]) * BLOCK
        self.missing.append(max(0, freed - max(0, self._computed[name] - WINDOW + 1)))

    def _process(self, scheduled: Any, sampled: dict[str, list[int]]) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        output = {
            "req_ids": list(sampled),
            "req_id_to_index": {name: row for row, name in enumerate(sampled)},
            "sampled_token_ids": list(sampled.values()),
            "logprobs": None,
            "prompt_logprobs_dict": {},
            "pooler_output": [],
        }
        for made in self.scheduler.update_from_output(scheduled, made_of(ModelRunnerOutput, output)).values():
            for each in made.outputs:
                self.tokens[each.request_id] += each.new_token_ids

    @property
    def gaps(self) -> list[str]:
        return [
            name
            for name, tokens in self.tokens.items()
            if tokens != [int(name.split()[1]) + number for number in range(TOKENS)]
        ]
