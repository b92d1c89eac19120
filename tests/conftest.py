from __future__ import annotations

import os

from hypothesis import settings

# Fixed examples in CI, so that a red run is one that can be repeated.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=150)
settings.register_profile("default", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")
