"""The state of an interrupted training, kept so that the next run goes on from it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn


class CheckpointError(OSError):
    """A checkpoint can't be read; the message names the file and the remedy."""


class Checkpoint:
    """One file that holds a training's state after a whole number of steps, or does not exist.

    A resumed training ends with the weights of one that was never interrupted, to the last bit on a CPU. The file is in
    a directory that exists, the optimizers are in a fixed order, and the generator is on the CPU.
    """

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        generator: torch.Generator,
    ) -> None:
        self._path = path
        self._model = model
        self._optimizers = optimizers
        self._generator = generator

    def save(self, steps: int) -> None:
        """Replace the file in one move by the state after `steps` steps.

        Raises:
            OSError: the directory can't be written.
        """
        state = {
            "steps": steps,
            "model": self._model.state_dict(),
            "optimizers": [each.state_dict() for each in self._optimizers],
            "generator": self._generator.get_state(),
        }
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=".unfinished-")
        fresh = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                torch.save(state, file)
            fresh.replace(self._path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise

    def restore(self) -> int:
        """Load the state, if there is one that can be read.

        Returns:
            The steps that it is after; 0 without one.

        Raises:
            CheckpointError: the file holds something else.
        """
        try:
            # Never code: `weights_only` reads tensors and plain data.
            state: dict[str, Any] = torch.load(self._path, map_location="cpu", weights_only=True)
            steps = int(state["steps"])
            self._model.load_state_dict(state["model"])
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self._generator.set_state(state["generator"])
        except FileNotFoundError:
            return 0
        except Exception as error:  # a damaged file makes the reader raise anything
            name = type(error).__name__
            raise CheckpointError(f"{self._path} is no checkpoint of this training ({name}); delete it") from error
        return steps
