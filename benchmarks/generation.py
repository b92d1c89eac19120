"""Tokens a second of transformers' `generate`, with and without the wait for its stop check, and of our decode loop.

    python -m benchmarks generation [--json FILE] [--model tiny|gpt2|medium] [--device cuda] [--batch N]
        [--new-tokens N] [--passes N] [--no-compile] [--arms A,B]

Arms take turns in one process, in the order ABC CBA, on a model with random weights:

- `synchronous`: transformers' loop, entered through `custom_generate`, with its own stopping criteria;
- `transformers`: `model.generate` unchanged. If transformers does not defer its stop check, this is the same loop, and
  the difference is the noise;
- `asynchronous`: `vllm_async_spec.generation.generate`, that loop with the stop check read late;
- `graphs`: our loop with one wait a step, a static cache, and steps captured as CUDA graphs;
- `interleaved`: the same with two slots, and no wait;
- `compiled` and `whole`: these two with the forward compiled by `torch.compile` as well;
- `ungraphed` and `ungraphed interleaved`: the same without CUDA graphs, so that the host launches the compiled kernels;
- `tuned compiled` and `tuned whole`: `compiled` and `whole` with each kernel tuned by Inductor, also for products of a
  matrix and one row. Compilation takes minutes, so these run only if `--arms` names them;
- `static`, `static synchronous` and `static asynchronous`: `transformers`, `synchronous` and `asynchronous` with a
  static cache, whose forward transformers compiles on a CUDA device, so that it is launched as CUDA graphs. On a CPU
  it compiles nothing, so only the cache differs. The last two take a step's inputs from the step before.

`--arms` selects arms; `synchronous` always runs, because the other arms' tokens are compared with its tokens.

The model can't produce the end-of-sequence id, so each arm checks for it at each token, and all generate equally many
tokens. If the arms' tokens differ, there is no ratio. The arms' kernels round differently, so the head is made of the
embeddings in another order: the next token is then never a near tie.
"""

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

from benchmarks.present import Grid
from benchmarks.statistics import by_turns, paired_ratio, ratio_in_words, refusal

VOCABULARY = 256
PROMPT = 16
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    "gpt2": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "medium": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
}
"""Llama shapes: a byte-level model as tiny as published measurements use, and those of GPT-2 and GPT-2 medium.

A Llama has three matrices in each MLP, so the last one has 400 M parameters.
"""

ARMS = ("synchronous", "transformers", "asynchronous", "graphs", "interleaved")
COMPILED = (
    "compiled",
    "whole",
    "ungraphed",
    "ungraphed interleaved",
    "static",
    "static synchronous",
    "static asynchronous",
)
"""Arms that need `torch.compile`."""
TUNED = ("tuned compiled", "tuned whole")
"""Arms that take minutes to compile."""
_TUNED = {"options": {"coordinate_descent_tuning": True}}

WITHOUT = {
    "asynchronous": ("synchronous",),
    "interleaved": ("graphs",),
    "whole": ("compiled",),
    "tuned whole": ("tuned compiled",),
    "ungraphed interleaved": ("ungraphed",),
    "static asynchronous": ("static synchronous", "static"),
}
"""For each arm, the arm that differs only by its wait; if a result lacks that arm, the next one is used."""

_MODEL_OF = {
    **dict.fromkeys(("compiled", "whole"), "whole"),
    **dict.fromkeys(("ungraphed", "ungraphed interleaved"), "ungraphed"),
    **dict.fromkeys(("static", "static synchronous", "static asynchronous"), "static"),
    **dict.fromkeys(TUNED, "tuned"),
}
"""The model of an arm; `interleaved` if not listed. A model keeps the state of its last generation, and transformers
keeps its compiled forward there. So each kind of step has its own model, with the same weights."""

_OURS = ("graphs", "interleaved", *(name for name, kind in _MODEL_OF.items() if kind != "static"))
COLUMNS = ("arm", "tokens/s", "synchronous = 1", "transformers = 1", "with the wait = 1")
Arm = Callable[[], torch.Tensor]


class GenerationError(RuntimeError):
    """The arms don't generate the same tokens, or the settings can't be run."""


def measure(
    *, size: str, device: str, batch: int, new_tokens: int, passes: int, arms: Sequence[str] = ARMS
) -> dict[str, Any]:
    """The result file; `arms` are some of `ARMS`, `COMPILED` and `TUNED`, and `synchronous` is always one.

    Raises:
        GenerationError: the size or an arm is unknown, there is no such device, or arms differ in their tokens.
    """
    import transformers

    from vllm_async_spec import generation

    if size not in SIZES:
        raise GenerationError(f"the model is {size!r}; it must be one of {', '.join(SIZES)}")
    every = (*ARMS, *COMPILED, *TUNED)
    if unknown := [name for name in arms if name not in every]:
        raise GenerationError(f"there is no arm {unknown[0]!r}; there are {', '.join(every)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise GenerationError(f"the device is {device!r}, and PyTorch finds no CUDA device; give --device cpu")
    chosen = [name for name in every if name == "synchronous" or name in arms]
    models = {kind: make_model(size, device) for kind in dict.fromkeys(map(_model_of, chosen))}
    made = make_arms(models, device, batch, new_tokens)
    runs = {name: made[name] for name in chosen}
    tokens = {name: run() for name, run in runs.items()}  # the first run of each, which also warms up
    for name, found in tokens.items():
        if not torch.equal(found, tokens["synchronous"]):
            raise GenerationError(
                f"{name} generates other tokens than the synchronous loop, so their speeds can't be compared"
            )
    generated = batch * (tokens["synchronous"].shape[1] - PROMPT)
    speeds = by_turns(
        runs, passes, lambda name: generated / _seconds(runs[name], device, expected=tokens["synchronous"])
    )
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "model": size,
        "batch": batch,
        "new_tokens": new_tokens,
        "tokens_per_second": speeds,
        # Of our loop's arms alone: transformers keeps its own memory.
        "memory": {
            kind: asdict(generation.memory_report(models[kind]))
            for kind in dict.fromkeys(_model_of(name) for name in chosen if name in _OURS)
        },
    }


def _model_of(arm: str) -> str:
    return _MODEL_OF.get(arm, "interleaved")


def table(found: dict[str, Any]) -> Table:
    """The same for the terminal: medians, and ratios with their intervals."""
    title = (
        f"transformers {found['transformers']}, {found['device']}, {found['model']}, batch {found['batch']}, "
        f"{found['new_tokens']} new tokens"
    )
    return Grid(COLUMNS, list(rows(found))).table(title)


def rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """One for each arm, in the order of `COLUMNS`."""
    speeds = found["tokens_per_second"]
    for name, values in speeds.items():
        others = ["synchronous", "transformers", next((each for each in WITHOUT.get(name, ()) if each in speeds), None)]
        against = [other if other != name and name != "synchronous" else None for other in others]
        ratios = ("-" if other not in speeds else ratio_in_words(speeds[other], values) for other in against)
        yield (name, f"{statistics.median(values):.1f}", *ratios)


def notes(found: dict[str, Any]) -> list[str]:
    speeds = found["tokens_per_second"]
    said = []
    if {"static", "static asynchronous"} <= set(speeds):
        ratio = ratio_in_words(speeds["static"], speeds["static asynchronous"])
        said.append(f"against `static`, transformers' own loop with a static cache, `static asynchronous` is {ratio}")
    if found["device"] == "cpu":
        said.append("a CPU shows no gain: host and device are the same, and no arm has streams or graphs")
    if "transformers" not in speeds:
        said.append("the noise is unknown, because `transformers` is not among the arms")
    elif reason := refusal(paired_ratio(speeds["synchronous"], speeds["transformers"])):
        said.append(f"with `transformers` as the noop arm, because its stop check is not deferred: {reason}")
    return said


def make_model(size: str, device: str) -> Any:
    """A Llama with random weights whose last token fixes the next one, by a margin that no rounding reaches."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, **SIZES[size])
    model = transformers.LlamaForCausalLM(config).eval()
    follows = (5 * torch.arange(VOCABULARY) + 3) % VOCABULARY  # one cycle through all of them
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
        model.lm_head.weight[follows] = model.get_input_embeddings().weight
    return model.to(device, torch.bfloat16) if device.startswith("cuda") else model


def make_arms(models: dict[str, Any], device: str, batch: int, new_tokens: int) -> dict[str, Arm]:
    """The arms of these models by name; `models` has `interleaved`, and others of `_MODEL_OF` where they are wanted."""
    from vllm_async_spec import generation

    prompt = torch.randint(VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(0)).to(device)
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": VOCABULARY, "pad_token_id": 0}

    def run(kind: str = "interleaved", **way: Any) -> torch.Tensor:
        with warnings.catch_warnings():
            # `notes` says this once for the whole result.
            warnings.simplefilter("ignore", generation.SynchronousGenerationWarning)
            tokens: torch.Tensor = models[kind].generate(
                prompt, attention_mask=torch.ones_like(prompt), **settings, **way
            )
        return tokens

    def ours(**way: Any) -> Arm:
        return lambda: run(custom_generate=generation.generate, **way)

    arms = {
        "synchronous": ours(open_channel=_no_channel),
        "transformers": run,
        "asynchronous": ours(),
        "graphs": ours(interleaved=False),
        "interleaved": ours(interleaved=True),
    }
    if "whole" in models:
        arms["compiled"] = ours(kind="whole", interleaved=False, torch_compile=True)
        arms["whole"] = ours(kind="whole", interleaved=True, torch_compile=True)
    if "ungraphed" in models:
        arms["ungraphed"] = ours(kind="ungraphed", interleaved=False, torch_compile=True, cuda_graphs=False)
        arms["ungraphed interleaved"] = ours(kind="ungraphed", interleaved=True, torch_compile=True, cuda_graphs=False)
    if "tuned" in models:
        arms["tuned compiled"] = ours(kind="tuned", interleaved=False, torch_compile=_TUNED)
        arms["tuned whole"] = ours(kind="tuned", interleaved=True, torch_compile=_TUNED)
    if "static" in models:
        static = {"kind": "static", "cache_implementation": "static"}
        arms["static"] = functools.partial(run, **static)
        arms["static synchronous"] = ours(**static, open_channel=_no_channel)
        arms["static asynchronous"] = ours(**static)
    return arms


def _no_channel(*_: Any) -> None:
    """No side stream for the stop flags, so the loop waits for them."""


def _seconds(arm: Arm, device: str, expected: torch.Tensor) -> float:
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    found = arm()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    if not torch.equal(found, expected):
        raise GenerationError("a timed run generated other tokens than the first run, so speeds can't be compared")
    return seconds
