"""Texts between ranks, and that nothing else is there for them."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist

import anabranch
from anabranch import launch
from anabranch.runtime.ranks import texts


@pytest.mark.dist
def test_texts_of_any_length_come_by_rank() -> None:
    """Of none, too, and of letters that are several bytes."""
    said = ["", "\u00e4 {}" * 1000, "b "]

    def rank() -> tuple[list[str], list[str]]:
        return texts.gather(said[dist.get_rank()]), texts.gather("")

    assert launch.run(rank, 3, timeout=60.0) == [(said, [""] * 3)] * 3


def test_nothing_that_travels_is_pickled() -> None:
    """torch's collectives for objects are, and are used nowhere."""
    folder = Path(anabranch.__file__).parent
    objects = re.compile(r"(gather|scatter|broadcast|send|recv)_object")
    assert not [path for path in folder.rglob("*.py") if objects.search(path.read_text("utf-8"))]
