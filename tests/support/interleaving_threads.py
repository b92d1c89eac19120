"""One thread captures a step while another begins to generate with another model, with turns and without.

    python tests/support/interleaving_threads.py
Needs a CUDA device. Prints `right with turns`, then `wrong without turns` or `right without turns`, or ends with a
CUDA error.
"""

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from interleaving_controls import INTERLEAVED, STATIC, VOCABULARY, generate, make_model, prompts, replaced

from vllm_async_spec import generation
from vllm_async_spec.generation.decode import Decode
from vllm_async_spec.generation.slots import CudaSlots

SETTINGS = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": VOCABULARY}


def why_wrong(models: list[Any], inputs: list[Any], expected: list[torch.Tensor]) -> list[str]:
    """Let the second model's generation begin in the middle of the first one's capture; says what came out wrong."""
    capturing, launched = threading.Event(), threading.Event()
    forward, launch = Decode._logits, Decode.launch

    def held(self: Decode, slot: int, length: int | None) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() and not capturing.is_set():
            capturing.set()
            launched.wait(2)  # with turns in vain
        return forward(self, slot, length)

    def noted(self: Decode, slot: int, length: int) -> torch.Tensor | None:
        found = launch(self, slot, length)
        if self._model is models[1]:
            launched.set()
        return found

    def second() -> torch.Tensor:
        assert capturing.wait(60)
        try:
            return tokens(1)
        finally:
            launched.set()

    def tokens(index: int) -> torch.Tensor:
        made: torch.Tensor = models[index].generate(**inputs[index], **SETTINGS, **INTERLEAVED)
        return made.cpu()

    generation.release(models[0])  # so that it captures, and the other one does not
    wrong = []
    threads = ThreadPoolExecutor(2)  # not waited for, should one never end
    with replaced(Decode, "_logits", held), replaced(Decode, "launch", noted):
        found = [threads.submit(tokens, 0), threads.submit(second)]
        for index, each in enumerate(found):
            try:
                if not torch.equal(each.result(60), expected[index]):
                    wrong.append(f"other tokens of model {index}")
            except Exception as error:
                wrong.append(f"model {index}: {type(error).__name__}: {error}")
    assert capturing.is_set()
    return wrong


def main() -> None:
    models = [make_model(), make_model()]
    inputs = [prompts([3, 1, 4], 1), prompts([2, 5], 2)]
    expected = [generate(model, each, **SETTINGS, **STATIC)[0] for model, each in zip(models, inputs, strict=True)]
    for model, each in zip(models, inputs, strict=True):
        generate(model, each, **SETTINGS, **INTERLEAVED)
    torch.cuda.synchronize()
    wrong = why_wrong(models, inputs, expected)
    print(f"wrong with turns: {wrong}" if wrong else "right with turns", flush=True)
    with replaced(CudaSlots, "turn", contextlib.nullcontext):
        wrong = why_wrong(models, inputs, expected)
    print(f"wrong without turns: {wrong}" if wrong else "right without turns", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a broken context would not let the process end by itself
