"""An engine on vLLM's CPU build samples with drafts: a line of JSON for each way of sampling.

python tests/engine/cpu_sampling.py plugin TARGET DRAFT
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from catalogue import ENGINES
from ranks import margins
from results import Mode
from scenario import environment, start

from vllm_async_spec.demo.train import PROMPTS

ONE_CHOICE: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.01},
    "top_p": {"temperature": 1.0, "top_p": 1e-6},
    "top_k": {"temperature": 1.0, "top_k": 1},
}
"""Sampling parameters that leave one token to choose, so that the tokens are those of greedy sampling. vLLM takes no
temperature below 0.01; there a token that is behind by 0.01 is drawn once in four times, and by 0.2 never."""

SEVERAL: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "top_p": 0.9}


def main() -> None:
    mode, target, draft = Mode(sys.argv[1]), *map(Path, sys.argv[2:])
    os.environ |= environment(mode)
    llm = start(ENGINES["usual"], mode, target, draft)
    from vllm import SamplingParams

    for name, options in {"greedy": {"temperature": 0.0, "logprobs": 2}, **ONE_CHOICE, "several": SEVERAL}.items():
        params = SamplingParams(max_tokens=32, ignore_eos=True, seed=0, **options)
        found: dict[str, Any] = {"sampled": name, "tokens": [], "failed": None}
        try:
            outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
            found["tokens"] = [list(done.outputs[0].token_ids) for done in outputs]
            if "logprobs" in options:
                found["margins"] = [margins(done.outputs[0].logprobs) for done in outputs]
        except Exception as error:  # the engine is dead, as a server would be
            found["failed"] = str(error)
        print("FOUND", json.dumps(found), flush=True)
        if found["failed"]:
            return


if __name__ == "__main__":
    main()
