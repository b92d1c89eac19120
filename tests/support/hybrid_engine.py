"""A small hybrid whose prompts end in a chunk as long as a step of decoding: one line of JSON for the test.

    python tests/support/hybrid_engine.py eager
    python tests/support/hybrid_engine.py graphs

On a CPU, which has no CUDA graphs, `graphs` gives linear attention what they read: the tensors of the builder itself
wherever vLLM takes a step for decoding.
"""

import importlib
import json
import random
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from command_line import found_by, python_path
from linear_graphs import captured, noting, writes_as_for_graphs

from benchmarks.options import LOAD_FORMAT, model_options
from benchmarks.soak.soaks import SOAKS
from vllm_async_spec.patching import Transaction, temporarily

HERE = Path(__file__).parent
CHUNK, STEP, TOKENS = 32, 4, 24
"""Tokens of a prompt that a step takes; of a request with its drafts in a step of decoding; of an answer."""
PROMPTS = {STEP: True, CHUNK + STEP: True, CHUNK: False, 9: False, CHUNK + STEP + 1: False}
"""Lengths of prompts, and whether their last chunk is as long as a step of decoding."""


def found(way: str, environment: Mapping[str, str]) -> dict[int, list[int]]:
    """The answers to `PROMPTS` by their length. RuntimeError: the process printed none."""
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    own["PYTHONPATH"] = python_path(HERE.parents[1], HERE, inherited=environment)
    answered = found_by(way, [sys.executable, __file__, way], {**environment, **own})
    return {int(length): tokens for length, tokens in answered.items()}


def answers(llm: Any) -> dict[int, list[int]]:
    """One request at a time, so that nothing but its length decides its steps."""
    from vllm import SamplingParams

    source, vocabulary = random.Random(0), llm.llm_engine.model_config.get_vocab_size()
    wanted = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    answered = {}
    for length in PROMPTS:
        prompt = {"prompt_token_ids": [source.randrange(vocabulary) for _ in range(length)]}
        (output,) = llm.generate([prompt], [wanted], use_tqdm=False)
        answered[length] = list(output.outputs[0].token_ids)
    return answered


def replay(runner: Any, changes: Transaction) -> None:
    """Let each step that vLLM takes for decoding read the builder's own tensors, as a CUDA graph does."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    dispatcher, build = runner.cudagraph_dispatcher, GDNAttentionMetadataBuilder.build
    decodes: list[bool] = []

    def built(self: Any, common_prefix_len: int, batch: Any, *args: Any, **kwargs: Any) -> Any:
        made = build(self, common_prefix_len, batch, *args, **kwargs)
        return captured(self, made, batch.num_reqs) if decodes[-1] else made

    for group in (group for groups in runner.attn_groups for group in groups):
        builder = group.get_metadata_builder(0)
        if isinstance(builder, GDNAttentionMetadataBuilder):
            writes_as_for_graphs(builder)
    changes.set(dispatcher, "dispatch", noting(dispatcher.dispatch, decodes))
    changes.set(GDNAttentionMetadataBuilder, "build", built)


def main() -> None:
    (way,) = sys.argv[1:]
    cuda = torch.cuda.is_available()
    if not cuda:
        from vllm_async_spec.vllm_plugin.patches.async_scheduling import open_cpu_gate

        open_cpu_gate()
    arm = json.loads(json.dumps(asdict(SOAKS["0.26.0-V1-FLASH_ATTN-hybrid" if cuda else "tiny-hybrid"].subject)))
    assert arm["draft_tokens"] + 1 == STEP
    with tempfile.TemporaryDirectory() as folder:
        options = model_options(arm, Path(folder)) | arm["engine"] | {"enforce_eager": not cuda or way == "eager"}
        if options["load_format"] == LOAD_FORMAT:
            importlib.import_module("benchmarks.loader")  # registers the format
        from vllm import LLM

        llm = LLM(
            skip_tokenizer_init=True,
            seed=0,
            max_model_len=256,
            max_num_seqs=4,
            **options | {"max_num_batched_tokens": CHUNK, "enable_prefix_caching": False},
        )
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        runner = getattr(worker, "worker", worker).model_runner
        with temporarily() if way == "graphs" and not cuda else nullcontext() as changes:
            if changes is not None:
                replay(runner, changes)
            print("FOUND", json.dumps(answers(llm)), flush=True)


if __name__ == "__main__":
    main()
