"""One wait is taken away from interleaved generation, and delays show that the tokens go wrong.

    python tests/support/interleaving_controls.py CONTROL
Needs a CUDA device. Prints `right with every wait`, then `wrong without one` or `right without one`, or ends with a
CUDA error.
"""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tiny_models
import torch
import transformers
from generating import RowsStopAt

from vllm_async_spec import generation
from vllm_async_spec.generation import workspace
from vllm_async_spec.generation.decode import Decode
from vllm_async_spec.generation.flag_channel import CudaFlagChannel, FinishTracker
from vllm_async_spec.generation.slots import CudaSlots
from vllm_async_spec.patching import temporarily

VOCABULARY = 61
LONG = 2_000_000
"""Cycles of a delay: a millisecond, which is several steps of this model."""
STATIC = {"cache_implementation": "static", "disable_compile": True}
INTERLEAVED = {"custom_generate": generation.generate, "interleaved": True}
ENDS = [2, 5, 9, 11, 17]


def make_model() -> Any:
    """Float32, and logits far apart, so that kernels of other sizes don't choose other tokens."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        attn_implementation="sdpa",
    )
    made = transformers.LlamaForCausalLM(config).eval().to("cuda")
    made.generation_config = transformers.GenerationConfig(pad_token_id=0, bos_token_id=1)
    return made


def prompts(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    inputs = tiny_models.prompts(lengths, "left", seed, VOCABULARY)
    return {name: each.cuda() for name, each in inputs.items()}


def generate(model: Any, inputs: dict[str, Any], *, seed: int = 0, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    tokens = model.generate(**inputs, **kwargs)
    return tokens.cpu(), torch.cuda.get_rng_state()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    with temporarily() as changes:
        changes.set(owner, name, value)
        yield


@contextlib.contextmanager
def delayed(seed: int, *, steps: bool, flags: bool) -> Iterator[None]:
    """Keep the streams of steps, of flags, or both busy for a random while before each piece of work."""
    chance = random.Random(seed)

    def sleep() -> None:
        torch.cuda._sleep(chance.choice((1, LONG // 8, LONG)))

    launch, beside = Decode.launch, CudaFlagChannel.beside

    def late_launch(self: Decode, slot: int, length: int) -> Any:
        if steps:
            sleep()
        return launch(self, slot, length)

    @contextlib.contextmanager
    def late_beside(self: CudaFlagChannel) -> Iterator[None]:
        with beside(self):
            if flags:
                sleep()
            yield

    with replaced(Decode, "launch", late_launch), replaced(CudaFlagChannel, "beside", late_beside):
        yield


def nothing(*_: Any) -> None:
    """What is done in the place of a wait."""


def _deaf_to_slots() -> Any:
    """`wait_stream` of all streams but the caller's, which don't hear the slots'."""
    hear = torch.cuda.Stream.wait_stream

    def wait_stream(self: Any, other: Any) -> None:
        slots = {each.cuda_stream for each in CudaSlots(torch.device("cuda", 0)).streams}
        if other.cuda_stream not in slots or self == torch.cuda.default_stream():
            hear(self, other)

    return wait_stream


def _late_prompts() -> Any:
    begin = Decode.begin

    def late(self: Decode, *args: Any) -> None:
        settle = self.tail.settle

        def late_settle(*given: Any) -> None:
            torch.cuda._sleep(20 * LONG)  # not before: transformers 5 waits for a padded mask in the forward
            settle(*given)

        with replaced(self.tail, "settle", late_settle):
            begin(self, *args)

    return late


@dataclass(frozen=True)
class Control:
    taken: Callable[[], list[tuple[Any, str, Any]]]
    steps: bool = False
    flags: bool = False
    settings: dict[str, Any] = field(default_factory=lambda: {"eos_token_id": ENDS})


CONTROLS = {
    "a step for the step before": Control(lambda: [(CudaSlots, "_await_step", nothing)], steps=True),
    "a step for the reading of its flags": Control(lambda: [(CudaSlots, "_await_reading", nothing)], flags=True),
    "a tail for the criteria": Control(
        lambda: [(CudaSlots, "await_judgement", nothing)],
        flags=True,
        settings={"stopping_criteria": "rows", "eos_token_id": VOCABULARY},
    ),
    "the slots for the prompts": Control(lambda: [(CudaSlots, "begin", nothing), (Decode, "begin", _late_prompts())]),
    # The flags are behind the last step and the caller is behind them: only together do these not hold it back.
    "the caller for the slots": Control(
        lambda: [(CudaSlots, "end", nothing), (CudaFlagChannel, "join", nothing), (FinishTracker, "drain", nothing)],
        steps=True,
        settings={"max_new_tokens": 40, "eos_token_id": VOCABULARY},
    ),
    "the flags for their step": Control(lambda: [(torch.cuda.Stream, "wait_stream", _deaf_to_slots())], steps=True),
}


def main(name: str) -> int:
    control = CONTROLS[name]
    model = make_model()
    inputs = prompts([3, 1], 3)
    settings = {"max_new_tokens": 150, "do_sample": True, "temperature": 2.0, **control.settings}
    if settings.get("stopping_criteria") == "rows":
        settings["stopping_criteria"] = transformers.StoppingCriteriaList([RowsStopAt([9, 21], "cuda")])
    # Room for the tokens of two generations, should one go on where the other has ended.
    generate(model, inputs, **{**settings, "max_new_tokens": 600}, **INTERLEAVED)
    expected, _ = generate(model, inputs, **settings, **STATIC)
    if "max_new_tokens" not in control.settings and expected.shape[1] == 153:
        print("the rows don't stop before the end, so that nothing can be seen")
        return 2
    with contextlib.ExitStack() as stack:
        wrong = 0
        for round_ in range(2):
            for seed in range(8):
                # What the last generation has left would be right: the same tokens.
                workspace._kept[model].buffers.sequences.fill_(7)
                with delayed(seed, steps=control.steps, flags=control.flags):
                    tokens, _ = generate(model, inputs, **settings, **INTERLEAVED, max_in_flight=3)
                torch.cuda.synchronize()
                wrong += not torch.equal(expected, tokens)
            if round_ == 0:
                print("wrong with every wait" if wrong else "right with every wait", flush=True)
                for owner, attribute, value in control.taken():
                    stack.enter_context(replaced(owner, attribute, value))
                wrong = 0
    print("wrong without one" if wrong else "right without one", f"({wrong} of 8)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
