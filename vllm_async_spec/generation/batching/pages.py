"""Tracks by number which pages of the KV cache are free; `PagedCache` holds the tensors."""

from __future__ import annotations

from collections.abc import Sequence

NULL_PAGE = 0
"""The page that padding rows write and read; never handed out."""


class PageAllocator:
    """Hands out pages 1 to `num_pages - 1`; page 0 is `NULL_PAGE`.

    Raises:
        ValueError: there are fewer than 2 pages in all.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; it must be at least 2, one of which is for padding")
        self.num_pages = num_pages
        # Taken from the end, so the lowest first.
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._taken: set[int] = set()

    @property
    def capacity(self) -> int:
        """Pages that all requests together can hold."""
        return self.num_pages - 1

    @property
    def free(self) -> int:
        """Pages that are not handed out."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Take `count` pages; None if fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._taken.update(pages)
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Free pages that `take` returned.

        Raises:
            ValueError: a page is not taken.
        """
        for page in pages:
            if page not in self._taken:
                raise ValueError(f"page {page} is given back, and no request holds that page")
            self._taken.remove(page)
        self._free.extend(reversed(pages))
