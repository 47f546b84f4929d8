"""Profiles that other projects have published, in any of their formats.

python -m benchmarks.planners.published bert32a100.json -o bert.json

A file is recognised by what it holds, not by its name:

| reader | format | from |
|---|---|---|
| ``anabranch.read_profile`` | ``graph.txt``: nodes and edges, a line each | PipeDream, DAPPLE |
| ``piper`` | JSON with ``TMPCs``, costs of layers | Piper |
| ``dnn_partitioning`` | JSON with ``fpgaLatency``, forward and backward nodes | msr-fiddle |
"""

from __future__ import annotations

from pathlib import Path

import anabranch
from anabranch.errors import FileFormatError
from anabranch.files.jsonfile import parse, read_text
from anabranch.profile.profile import Profile
from benchmarks.planners.published import dnn_partitioning, piper


def read_profile(path: Path, samples: int | None = None) -> Profile:
    """Read a profile in the format of another project.

    Args:
        path: the file.
        samples: how many samples the profiled mini-batch had (for Piper: the micro-batch). By
            default what the file tells; where it tells nothing, the whole of it is one sample.

    Raises:
        FileFormatError: for anything but such a profile, naming file, line or key, and value.
    """
    text = read_text(path)
    if text.lstrip()[:1] != "{":
        return anabranch.read_profile(path, samples)
    document = parse(text, str(path))
    for reader in (piper, dnn_partitioning):
        if reader.looks_like(document):
            return reader.read(document, path, samples)
    raise FileFormatError(f"{path} is JSON, but neither Piper's nor that of dnn-partitioning")
