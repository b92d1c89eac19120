"""The states of a random generator over the last steps, so that draws of steps that don't count can be undone."""

from __future__ import annotations

from collections import deque

import torch


class GeneratorTrail:
    """Remembers the state of a device's default generator after each of the last `steps` steps.

    Reading the state of a CUDA generator does not wait: seed and offset are kept on the host.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self._device = device
        self._states: deque[tuple[int, torch.Tensor]] = deque(maxlen=steps)

    def mark(self, length: int) -> None:
        """Remember the present state as that after the step that made the sequences `length` tokens long."""
        self._states.append((length, self._state()))

    def rewind(self, length: int) -> None:
        """Put the generator back to where it was after that step.

        Raises:
            KeyError: the step is further back than was to be remembered.
        """
        state = dict(self._states)[length]
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)

    def _state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()
