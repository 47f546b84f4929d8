"""The table of devices, and that nothing else names one."""

from pathlib import Path

import pytest

import anabranch
from anabranch.device.kinds import ACCELERATORS, GPU, OWN_ERRORS, kind_of

SOURCE = Path(anabranch.__file__).parent


def test_one_file_names_the_usual_accelerator() -> None:
    """Whatever else named it would leave the others out."""
    naming = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if GPU in path.read_text(encoding="utf-8").lower()
    ]
    assert naming == ["device/kinds.py"]


def test_a_kind_is_found_with_an_index_and_without() -> None:
    """As users and torch write it; anything else is treated as the host is."""
    assert kind_of(f"{GPU}:3") is kind_of(GPU) is ACCELERATORS[GPU]
    assert kind_of("cpu") is kind_of("meta")


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_every_kind_has_its_own_errors(kind: str) -> None:
    """They are told apart from a lost connection by what torch says."""
    assert f"{kind} out of memory" in OWN_ERRORS
