"""vLLM's own benchmark client in a process that stays: `python -m benchmarks.serving.client`.

`vllm bench serve` needs ten seconds for its imports, more than most loads last. So this process imports vLLM's client
once, and runs it for each line of JSON on its standard input, with the arguments that the command line would have had.
"""

import asyncio
import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_async_spec.json_child import serve

PERCENTILES = (50, 90, 99)
LATENCIES = ("ttft", "tpot", "itl")
_RATES = ("request_throughput", "request_goodput", "output_throughput")
_HEX = 6
"""Hexadecimal digits that stand for the tokens of a request: two of 500 requests that differ are told apart."""


class ClientError(RuntimeError):
    """vLLM's client measured nothing usable; the message says why."""


class Client:
    def __init__(self) -> None:
        from vllm.benchmarks import serve as module

        self._module: Any = module
        if importlib.util.find_spec("pandas") is None:
            datasets: Any = importlib.import_module("vllm.benchmarks.datasets")
            datasets = sys.modules.get("vllm.benchmarks.datasets.datasets", datasets)
            datasets.pd = SimpleNamespace(read_json=_Rows)

    def measure(self, arguments: list[str]) -> dict[str, Any]:
        """Run the client with these arguments and return `digest` of its result, or `error` with the reason."""
        try:
            parsed = parse(self._module, arguments)
            return digest(asyncio.run(self._module.main_async(parsed)))
        except ClientError as error:  # the process stays for the next load
            return {"error": str(error)}


class _Rows:
    """Lines of JSON, with what vLLM's client uses of a pandas DataFrame, where there is no pandas."""

    def __init__(self, path_or_buf: str, lines: bool) -> None:
        assert lines
        self._rows = [json.loads(line) for line in Path(path_or_buf).read_text().splitlines()]
        self.columns = list(self._rows[0])

    def iterrows(self) -> Iterator[tuple[int, SimpleNamespace]]:
        """Each row with its number; a row has `to_dict`."""
        for number, row in enumerate(self._rows):
            yield number, SimpleNamespace(to_dict=lambda row=row: row)


def parse(module: Any, arguments: Sequence[str]) -> Any:
    """Parse the arguments after `vllm bench serve` with the client of any release, its `vllm.benchmarks.serve`.

    Raises:
        ClientError: this release's client does not take them.
    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    module.add_cli_args(parser)
    try:
        return parser.parse_args(list(arguments))
    except SystemExit:
        raise ClientError("vLLM's client refuses the arguments of the plan; the log says which") from None


def digest(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a result keeps of what vLLM's client returns: latencies in ms, rates a second, and tokens as hashes.

    Raises:
        ClientError: no request was completed, or the result lacks a figure.
    """
    errors = [error for error in found.get("errors", []) if error]
    if not found.get("completed"):
        raise ClientError(f"no request was completed: {_last_line(errors)}")
    try:
        kept: dict[str, Any] = {
            "completed": found["completed"],
            "failed": found.get("failed", len(errors)),
            "seconds": found["duration"],
            "output_tokens": found["total_output_tokens"],
            **{name: found[name] for name in _RATES},
            **{
                latency: {f"p{share}": found[f"p{share}_{latency}_ms"] for share in PERCENTILES}
                for latency in LATENCIES
            },
        }
    except KeyError as error:
        raise ClientError(f"the result of vLLM's client has no {error}; it is of another release") from None
    if accepted := found.get("spec_decode_acceptance_length"):
        kept["acceptance_length"] = accepted
    if kept["failed"]:
        kept["why"] = _last_line(errors)
    hashes = [hashlib.sha256(text.encode()).hexdigest()[:_HEX] for text in found.get("generated_texts", [])]
    return kept | {"texts": "".join(hashes)}


def requests_of(texts: str) -> list[str]:
    """The hashes of each request's tokens, from `texts` of a digest."""
    return [texts[place : place + _HEX] for place in range(0, len(texts), _HEX)]


def _last_line(errors: Sequence[str]) -> str:
    """The last line of the first error, which is a traceback."""
    return next((error.strip().splitlines()[-1] for error in errors), "the client names no error")


if __name__ == "__main__":
    serve(Client, "measure")
