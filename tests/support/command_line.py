"""The command `vllm-async-spec` in a process of its own, as where vLLM stays what it is imported as."""

import sys

COMMAND = [
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'vllm-async-spec'; from vllm_async_spec.cli import main; main()",
]
