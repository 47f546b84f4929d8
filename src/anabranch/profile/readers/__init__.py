"""Readers of the profiles that other projects have published.

    >>> read_profile("profiles/vgg16/graph.txt")                              # doctest: +SKIP

A file is recognised by what it holds, not by its name:

| reader | format | from |
|---|---|---|
| ``pipedream`` | ``graph.txt``: nodes and edges, a line each | PipeDream, DAPPLE |
| ``piper`` | JSON with ``TMPCs``, costs per degree of tensor parallelism | Piper |
| ``dnn_partitioning`` | JSON with ``fpgaLatency``, forward and backward nodes | msr-fiddle |

All draw an ``ImportedGraph``, measured at one size; times count as proportional to samples.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from anabranch.errors import FileFormatError
from anabranch.jsonfile import parse, read_text, shown
from anabranch.profile.profile import Profile
from anabranch.profile.readers import dnn_partitioning, pipedream, piper
from anabranch.profile.readers.imported_graph import MOST_SAMPLES

KNOWN = (
    "anabranch reads its own profiles, PipeDream's and DAPPLE's graph.txt, Piper's JSON, and the "
    "JSON of msr-fiddle/dnn-partitioning"
)


def read_profile(path: str | os.PathLike[str], samples: int | None = None) -> Profile:
    """Read a profile in the format of another project.

    Args:
        path: the file.
        samples: how many samples the profiled mini-batch had (for Piper: the micro-batch). By
            default what the file tells; where it tells nothing, the whole of it is one sample.

    Raises:
        FileFormatError: for anything but such a profile, naming file, line or key, and value.
        ValueError: if ``samples`` is not between 1 and 2**40.
    """
    if samples is not None and not 1 <= samples <= MOST_SAMPLES:
        raise ValueError(f"samples is {samples}; a mini-batch has between 1 and {MOST_SAMPLES}")
    path = Path(path)
    text = read_text(path)
    if not text.strip():
        raise FileFormatError(f"{path} is empty; {KNOWN}")
    if pipedream.looks_like(text):
        return pipedream.read(text, path, samples)
    if text.lstrip()[0] not in "{[":
        raise FileFormatError(f"{path} {_what(text)}; {KNOWN}")
    document = parse(text, str(path))
    if isinstance(document, dict):
        if piper.looks_like(document):
            return piper.read(document, path, samples)
        if dnn_partitioning.looks_like(document):
            return dnn_partitioning.read(document, path, samples)
    raise FileFormatError(f"{path} {_which(document)}; {KNOWN}")


def is_foreign(path: str | os.PathLike[str]) -> bool:
    """Whether a file is for ``read_profile``: anything but a JSON document with a key ``schema``;
    raises FileFormatError if there is no such file, or no text in it.
    """
    text = read_text(Path(path))
    if not text.lstrip().startswith("{"):
        return True
    return "schema" not in parse(text, os.fspath(path))


def _what(text: str) -> str:
    """What a text seems to be that is no profile."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    first = lines[0][0]
    is_plan = all(word.isascii() and word.isdigit() for line in lines for word in line)
    if is_plan and len(lines) <= 2 and len(first) < 10 and len(lines[0]) == int(first) + 1:
        return (
            f"is a plan of GraphPipe's runtime ({int(first)} operators and the stage of each), "
            "not a profile: it has no times to plan with"
        )
    return f"is no profile: it starts with {shown(text.strip().partition(chr(10))[0])}"


def _which(document: Any) -> str:
    """What a JSON document is that no reader knows."""
    if not isinstance(document, dict):
        return "is JSON, but no object"
    if "schema" in document:
        return f"has the schema {shown(document['schema'])}, so it is no file of another project"
    keys = ", ".join(shown(key) for key in list(document)[:6]) or "no keys"
    return f"is JSON with {keys}, which is no profile"
