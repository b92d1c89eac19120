"""Builders that end the process, or ask it to end, in the middle of the suite."""

import os
import signal
from typing import Any, ClassVar

import compat_planted


class Ends(compat_planted.Clean):
    """Sends a signal to its own process in the batch with 256 requests, which is neither first nor last."""

    signal: ClassVar[int] = signal.SIGTERM

    def extra(self, metadata: Any) -> Any:
        if metadata.num_reqs == 256:
            os.kill(os.getpid(), self.signal)
        return super().extra(metadata)


class Interrupts(Ends):
    signal = signal.SIGINT


class HangsUp(Ends):
    signal = signal.SIGHUP


class Kills(Ends):
    signal = signal.SIGKILL
