"""Less usual moves between host and device; `compat_planted` has the usual ones."""

from collections.abc import Callable
from typing import Any

import compat_planted as planted
import pytest
import torch
from compat_checked import checked

MIXED = "it fails: RuntimeError: Expected all tensors to be on the same device"


def read_after_as_tensor(lengths: torch.Tensor) -> None:
    torch.as_tensor(lengths, device="cpu")
    lengths.max().item()


@pytest.mark.parametrize(
    ("fault", "use"),
    [
        ("copy to host (as_tensor)", lambda lengths: torch.as_tensor(lengths, device="cpu")),
        ("copy to host (tensor)", lambda lengths: torch.tensor(data=lengths, device="cpu")),
        ("copy to host (to)", lambda lengths: lengths.type_as(torch.zeros(1))),
        ("read (item)", read_after_as_tensor),
        ("read (item)", lambda lengths: torch.tensor([lengths[0], lengths[1]])),
        ("read (item)", lambda lengths: lengths.new_tensor([1, 2]).max().item()),
        ("read (item)", lambda lengths: torch.zeros(2).fill_(lengths[0])),
        ("read (item)", lambda lengths: torch.allclose(lengths, lengths)),
        ("read (item)", lambda lengths: torch.nn.functional.one_hot(lengths.long())),
        ("read (repr)", lambda lengths: f"{lengths}"),
        (MIXED, lambda lengths: lengths - torch.ones(len(lengths))),
        (MIXED, lambda lengths: torch.cat([torch.zeros(1), lengths])),
    ],
)
def test_what_a_gpu_would_wait_for_or_refuse_is_found(fault: str, use: Callable[[torch.Tensor], Any]):
    class Uses(planted.Builder):
        def extra(self, metadata: Any) -> Any:
            use(metadata.seq_lens)

    assert fault in checked(Uses, "decode").explain()


def test_a_function_mapped_over_device_tensors_passes():
    """The memory of `vmap`'s tensors can't be asked for."""

    class Maps(planted.Builder):
        def extra(self, metadata: Any) -> Any:
            return {"next": torch.vmap(lambda each: each + 1)(metadata.seq_lens)}

    assert checked(Maps, "decode").explain() == checked(planted.Builder, "decode").explain()
