"""The tokens of an asynchronous engine with drafts, and the attention backends that it runs with, as a line of JSON.

python tests/engine/outside_backend.py TARGET DRAFT
"""

import json
import sys

PROMPTS = ["Once upon a time", "The little dog", "One day, a girl named Lily went to the park and", "She said"]


def main(target: str, draft: str) -> None:
    from vllm import LLM, SamplingParams

    drafting = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    llm = LLM(
        target, dtype="float32", max_model_len=256, max_num_seqs=4, enforce_eager=True, speculative_config=drafting
    )
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True))
    found = {
        "backends": sorted({group.backend.__name__ for groups in runner.attn_groups for group in groups}),
        "scheduler": type(core.scheduler).__name__,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
