"""Reads the arguments of `vllm serve` with vLLM's own parser."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream_batch import EngineArgs

_SERVERS = ("vllm.entrypoints.openai.cli_args", "vllm.entrypoints.launchers.cli_args")  # up to 0.28 or so, and later
_PARSERS = ("vllm.utils.argparse_utils", "vllm.utils")
_NO = "--no-async-scheduling"


class ArgumentsError(ValueError):
    """vLLM does not take the arguments; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class ServeArguments:
    """What a server was asked for."""

    engine_args: EngineArgs
    said_no: bool
    """Whether `--no-async-scheduling` is among the arguments."""


def read_arguments(given: Sequence[str]) -> ServeArguments:
    """The engine's part of the arguments of `vllm serve`, whose own parser reads them; the model may come first.

    Raises:
        ArgumentsError: an argument is unknown or has a wrong value, or there is no model.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    parser = _attribute(_PARSERS, "FlexibleArgumentParser")(prog="vllm serve")
    try:
        parser = _attribute(_SERVERS, "make_arg_parser")(parser)
    except ImportError:  # then without the front end's arguments
        parser = AsyncEngineArgs.add_cli_args(parser)
        parser.add_argument("model_tag", nargs="?")
    parser.set_defaults(model=None)
    parser.error = _refuse
    parsed: Any = parser.parse_args(list(given))
    parsed.model = getattr(parsed, "model_tag", None) or parsed.model
    if parsed.model is None:
        raise ArgumentsError("they name no model; give the model first, or with --model")
    said_no = any(argument.replace("_", "-") == _NO for argument in given)
    return ServeArguments(AsyncEngineArgs.from_cli_args(parsed), said_no)


def _refuse(message: str) -> NoReturn:
    raise ArgumentsError(" ".join(message.split()))


def _attribute(modules: Sequence[str], name: str) -> Any:
    """The attribute from the first of the modules that this release has.

    Raises:
        ImportError: no module has the attribute.
    """
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"none of {', '.join(modules)} has {name}")
