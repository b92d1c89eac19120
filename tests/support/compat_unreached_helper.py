"""A module beside a builder's, for `compat_unreached`."""

from typing import Any


def longest_on_host(metadata: Any) -> Any:
    return metadata.seq_lens.max().item()  # told


def after_the_suite() -> int:
    return 1
