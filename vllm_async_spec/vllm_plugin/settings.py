"""The plugin's only settings: four environment variables."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from vllm_async_spec.sync_policy import SyncPolicy

MODE = "VLLM_ASYNC_SPEC"
SYNC = "VLLM_ASYNC_SPEC_SYNC"
AUDIT = "VLLM_ASYNC_SPEC_AUDIT"
RUNNER = "VLLM_ASYNC_SPEC_RUNNER"

_ChoiceT = TypeVar("_ChoiceT", bound=enum.Enum)


class SettingError(ValueError):
    """A setting has an unknown value; the message names this value and the valid ones."""


class Mode(str, enum.Enum):
    """What the plugin does about patches that it refuses."""

    AUTO = "auto"
    """Run stock vLLM's code for refused patches, and log one line."""
    STRICT = "strict"
    """End the start-up if any patch is refused."""
    OFF = "off"
    """Change nothing."""


class Audit(str, enum.Enum):
    """Whether the engine can be audited while it runs."""

    OFF = "0"
    """No, and no audit code is loaded."""
    ON = "1"
    """Yes, by `vllm-async-spec audit`, in every mode."""


class Runner(str, enum.Enum):
    """Which of vLLM's model runners an engine gets."""

    AUTO = "auto"
    """The one that vLLM chooses."""
    V1 = "v1"
    V2 = "v2"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of this process, and the origin of each: `environment` or `default`."""

    mode: Mode
    mode_from: str
    sync: SyncPolicy
    sync_from: str
    audit: Audit
    audit_from: str
    runner: Runner
    runner_from: str

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """The settings in `environment`.

        Raises:
            SettingError: a variable has an unknown value.
        """

        def origin(name: str) -> str:
            return "environment" if name in environment else "default"

        return cls(
            mode=_choice(environment, MODE, Mode.AUTO),
            mode_from=origin(MODE),
            sync=_choice(environment, SYNC, SyncPolicy.ALLOW),
            sync_from=origin(SYNC),
            audit=_choice(environment, AUDIT, Audit.OFF),
            audit_from=origin(AUDIT),
            runner=_choice(environment, RUNNER, Runner.AUTO),
            runner_from=origin(RUNNER),
        )


def left_out() -> bool:
    """Whether vLLM does not load the plugin, because `VLLM_PLUGINS` is set and does not name it."""
    named = os.environ.get("VLLM_PLUGINS")
    return named is not None and "async_spec" not in named.split(",")


def _choice(environment: Mapping[str, str], name: str, default: _ChoiceT) -> _ChoiceT:
    if name not in environment:
        return default
    try:
        return type(default)(environment[name])
    except ValueError:
        known = ", ".join(member.value for member in type(default))
        raise SettingError(f"{name} is {environment[name]!r}; it must be one of {known}") from None
