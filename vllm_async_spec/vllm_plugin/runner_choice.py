"""Which of vLLM's two model runners an engine has: V1 or V2, who chose it, and whether V2 is an alternative.

vLLM reads its own variable in each of its processes, and the plugin sets this variable where the user asked for a
runner. Processes started later inherit the variable. vLLM's configuration says what V2 does not support; no rule of
vLLM's is repeated here.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_async_spec.vllm_plugin.log import logger
from vllm_async_spec.vllm_plugin.scheduling import is_asking, one_line
from vllm_async_spec.vllm_plugin.settings import MODE, RUNNER, Mode, Runner
from vllm_async_spec.vllm_plugin.state import Plugin, active_plugin
from vllm_async_spec.vllm_plugin.strict import StrictError

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream_config import VllmConfig

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""VLLM's own: 0 is V1, 1 is V2. Unset, vLLM chooses; up to 0.20 always V1."""
_VALUES = {Runner.V1: "0", Runner.V2: "1"}
_MODULES = {Runner.V1: "v1/worker/gpu_model_runner.py", Runner.V2: "v1/worker/gpu/model_runner.py"}
_ALTERNATIVE = "vLLM's V2 runner supports this engine too; to try V2, set"


def take(plugin: Plugin, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Have vLLM take the runner that the user asked the plugin for.

    Returns:
        Why that can't be, with the remedy, or None. Then the environment is as it was.
    """
    choice = plugin.settings.runner
    if choice is Runner.AUTO:
        return None
    asked, wanted, given = f"{RUNNER} is {choice.value!r}", _VALUES[choice], environment.get(VARIABLE)
    if not _exists(choice):
        return f"{asked}, but this vLLM has no {choice.value.upper()} runner; unset {RUNNER}"
    if given is None:
        environment[VARIABLE] = wanted
        plugin.chose_runner = True
    elif given != wanted:
        return f"{asked}, but {VARIABLE} is {given!r}; unset one of the two"
    return None


def _exists(choice: Runner) -> bool:
    """Whether this vLLM has the runner; True where there is no vLLM to look at."""
    found = importlib.util.find_spec("vllm")
    return found is None or found.origin is None or (Path(found.origin).parent / _MODULES[choice]).is_file()


def leave_to_vllm(why: str, strict: bool) -> None:
    """Go on with the runner that vLLM chooses, and say so; in the mode `strict`, end the start-up.

    Raises:
        StrictError: the mode is `strict`.
    """
    if strict:
        raise StrictError(f"{why}, or set {MODE}=auto to leave the runner to vLLM")
    logger.warning("vllm-async-spec: vLLM chooses the runner: %s", why)


def created(create: Callable[[], VllmConfig]) -> VllmConfig:
    """The configuration that `create` makes; where vLLM refuses the runner asked for, with vLLM's own choice.

    Raises:
        StrictError: vLLM refuses the runner, and the mode is `strict`.
        Exception: vLLM refuses the arguments with any runner.
    """
    plugin = active_plugin()
    if plugin is None or not plugin.chose_runner:
        return create()
    try:
        return create()
    except Exception as error:
        wanted = os.environ.pop(VARIABLE, None)
        try:
            config = create()
        except Exception:
            config = None
        if wanted is not None and (config is None or plugin.settings.mode is Mode.STRICT):
            os.environ[VARIABLE] = wanted
        if config is None:
            raise
        choice = plugin.settings.runner.value
        reason = one_line(error).rstrip(".")
        why = f"{RUNNER} is {choice!r}, but vLLM refuses it for this engine ({reason}); unset {RUNNER}"
        plugin.runner_refused = why
        if plugin.settings.mode is Mode.STRICT or not is_asking():
            leave_to_vllm(why, plugin.settings.mode is Mode.STRICT)
            # Without this the engine's other processes, which inherit it, would take the other runner.
            os.environ[RUNNER] = Runner.AUTO.value
            plugin.chose_runner = False
        return config


def settle_inquiry(plugin: Plugin) -> None:
    """Leave the runner to vLLM in this process if vLLM has refused the chosen one to an inquiry."""
    if plugin.chose_runner and plugin.runner_refused is not None:
        os.environ.pop(VARIABLE, None)
        plugin.chose_runner = False


def runner_of(config: VllmConfig) -> str:
    """`V1` or `V2`: what an engine with this configuration has. Up to 0.20 only the variable decides."""
    decided = getattr(config, "use_v2_model_runner", None)
    if decided is None:
        decided = importlib.import_module("vllm.envs").VLLM_USE_V2_MODEL_RUNNER
    return "V2" if decided else "V1"


def why(config: VllmConfig, plugin: Plugin | None) -> str:
    """Who chose the engine's runner, and why."""
    given, runner = os.environ.get(VARIABLE), runner_of(config)
    if plugin is not None and plugin.chose_runner and given is not None:
        return f"{RUNNER} is {plugin.settings.runner.value}"
    if given is not None:
        return f"{VARIABLE} is {given}"
    if not hasattr(config, "use_v2_model_runner"):
        return "vLLM's default in this release"
    default: Callable[[], bool] = getattr(config, "_is_default_v2_model_runner_model", lambda: True)
    if runner == "V1" and not default():
        return "vLLM's default for this model"
    unsupported = _unsupported(config)
    if runner == "V1" and unsupported:
        return f"vLLM's V2 runner does not support {', '.join(unsupported)}"
    return "vLLM's default for this engine"


def alternative(config: VllmConfig, plugin: Plugin | None) -> str | None:
    """How to try vLLM's V2 runner, where vLLM chose V1 and names nothing that V2 does not support; else None.

    Also None for a hybrid with drafts where V2 may give a prompt no state, which `prompt-ends` mends in V1 only.
    """
    if runner_of(config) == "V2" or os.environ.get(VARIABLE) is not None or _unsupported(config) != []:
        return None
    if config.speculative_config is not None and config.model_config.is_hybrid and _decodes_by_shape():
        return None
    acts = plugin is not None and plugin.settings.mode is not Mode.OFF
    return f"{_ALTERNATIVE} {f'{RUNNER}=v2' if acts else f'{VARIABLE}=1'}"


def _decodes_by_shape() -> bool:
    """Whether V2 takes a step for decoding by its shape alone, as up to 0.27."""
    return "get_uniform_decode_token_count" not in _source(_MODULES[Runner.V2])


def _source(file: str) -> str:
    """A file of the installed vLLM, which is not imported."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / file).read_text(encoding="utf-8")


def _unsupported(config: VllmConfig) -> list[str] | None:
    """What V2 does not support of this engine, in vLLM's words; None if the release can't tell, as up to 0.19."""
    if not _exists(Runner.V2):
        return None
    features: Callable[[], list[str]] | None = getattr(config, "_get_v2_model_runner_unsupported_features", None)
    validate: Callable[[], Any] | None = getattr(config, "_validate_v2_model_runner", None)
    if features is not None:
        lacking = [] if importlib.import_module("vllm.triton_utils").HAS_TRITON else ["an environment without Triton"]
        return [*lacking, *features()]
    if validate is None:
        return None
    try:
        validate()
    except ValueError as error:  # 0.20 has the list only in this message
        return [one_line(error).rpartition(": ")[2]]
    return []
