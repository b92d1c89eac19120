"""The states of a random generator over the last steps, so that draws of steps that don't count can be undone."""

from __future__ import annotations

from collections import deque

import torch


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of the device's default generator, uint8, on the host."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_generator_state(state: torch.Tensor, device: torch.device) -> None:
    """Put the device's default generator into a state that `generator_state` returned."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class RngHistory:
    """Remembers the state of a device's default generator after each of the last `steps` steps.

    Reading the state of a CUDA generator does not wait: seed and offset are kept on the host.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self._device = device
        self._states: deque[tuple[int, torch.Tensor]] = deque(maxlen=steps)

    def mark(self, length: int) -> None:
        """Remember the present state as that after the step that made the sequences `length` tokens long."""
        self._states.append((length, generator_state(self._device)))

    def rewind(self, length: int) -> None:
        """Put the generator back to where it was after that step.

        Raises:
            KeyError: the step is further back than was to be remembered.
        """
        set_generator_state(dict(self._states)[length], self._device)
