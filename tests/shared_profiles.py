"""Where public profiles lie that may not be part of this repository."""

import os
from pathlib import Path

import pytest

SHARED = Path(
    os.environ.get(
        "ANABRANCH_PROFILES", Path(__file__).resolve().parents[2] / "shared" / "profiles"
    )
)
"""The folder of public profiles; the environment variable ANABRANCH_PROFILES overrides it."""

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(),
    reason=f"the public profiles are not in {SHARED.name}; set ANABRANCH_PROFILES to their folder",
)
