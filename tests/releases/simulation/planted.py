"""What becomes of the plugin's runner with a mistake in how it corrects the device, or in what it copies from."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vllm_async_spec.vllm_plugin.patches.optimistic_runner import OptimisticRunner

MISTAKES = {
    "no correction": "positions, lengths and slots of the device stay those that the host assumed",
    "rows by index": "a request is looked for in the row that it has now",
    "one group left": "the slots of the last KV cache group are not corrected",
    "shadow": "draft steps count in the pinned lengths, which the device may have yet to copy",
    "backup": "a pinned buffer is filled again while the device may have yet to copy it",
}


def faulty(plugins: Any, mistake: str) -> Any:
    """The class that is made of the plugin's class of a release, with one of `MISTAKES`."""

    class Faulty(plugins):  # type: ignore[misc]
        def _become_optimistic(self) -> None:
            super()._become_optimistic()
            if mistake == "backup":
                self._backup_tokens = SimpleNamespace(turn=lambda: None)

        def _correct(self, progress: Any, requests: Any, came_from: Any, *rest: Any) -> None:
            if mistake == "rows by index":
                came_from = {name: row for row, name in enumerate(requests) if name in came_from}
            super()._correct(progress, requests, came_from, *rest)

        def _step_inputs(self) -> Any:
            fresh = self._table is not self.input_batch.block_table
            made = super()._step_inputs()
            lost = {"no correction": len(made.paged), "one group left": 1}.get(mistake, 0)
            if fresh and lost:  # kept as it is made, for the kernel is given addresses
                kept = len(made.paged) - lost
                slots = [replace(each, slot_mapping=each.slot_mapping.clone()) for each in made.paged[kept:]]
                made = replace(made, paged=[*made.paged[:kept], *slots])
                if mistake == "no correction":
                    made = replace(made, positions=made.positions.clone(), seq_lens=made.seq_lens.clone())
                self._inputs = made
            return self._inputs

        def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
            above = OptimisticRunner if mistake == "shadow" else Faulty
            return super(above, self)._build_attention_metadata(*args, **kwargs)

    return Faulty
