"""PipeDream's ``graph.txt``, and DAPPLE's profiles, which have the same format.

A line is a node, an indented line (a tab, two spaces, or a space and a tab) an edge, in any order:

    node1 -- Input -- forward_compute_time=18.0, backward_compute_time=0.0, ...
    node2 -- Conv2d(3, 64) -- forward_compute_time=2.3, backward_compute_time=4.1,
             activation_size=[411041792.0; 256.0], parameter_size=7168.0          (one line)
            node1 -- node2

Times are milliseconds and sizes bytes, for one mini-batch on one unnamed GPU. Decided here:

- ``Input`` nodes, whose time is the loading of data, are part of the batch, as in PipeDream's
  optimizer. So is a first node that costs nothing at all.
- An activation size ``[a; b]`` is of several outputs; every edge carries the sum, as in PipeDream.
- The output of every module is kept for the backward, unless it overwrites its input or is a view
  (``ReLU(inplace)``, ``View``, ``__getitem__``). Tensors that a module saves inside are in no
  column: for modules as large as the layers of DAPPLE's BERT, memory is a lower bound.
- ``stage_id``, which PipeDream's optimizer appends, is a plan and no measurement: ignored.
- The samples of the mini-batch come from the first of these: the caller; DAPPLE's ``pbs-N`` in the
  file name; the size of ``Input`` as images of 3 x 224 x 224 (or 3 x 299 x 299) in fp32; the output
  of an ``Embedding`` of known width, as tokens. Else it is one sample, and the profile says so.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

from anabranch.errors import FileFormatError
from anabranch.files.imported_graph import Edge, ImportedGraph, ImportedNode, sources
from anabranch.files.jsonfile import LIMITS, FilePath, read_text, shown
from anabranch.profile.profile import Profile

KNOWN = "anabranch reads its own profiles, and PipeDream's and DAPPLE's graph.txt"
COLUMNS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
IMAGES = (3 * 224 * 224 * 4, 3 * 299 * 299 * 4)
"""Bytes of one image: ImageNet's usual size, then Inception-v3's."""

_KEY = re.compile(r"\w{1,100}", re.ASCII)
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_ALIAS = re.compile(r"\w+\(.*\binplace(?!=False)|View\b|__getitem__\b")


def is_foreign(path: FilePath) -> bool:
    """Return True if a file is for ``read_profile``: anything but JSON.

    Raises:
        FileFormatError: if there is no such file, or it is no text.
    """
    return not read_text(Path(path)).lstrip().startswith("{")


def read_profile(path: FilePath, samples: int | None = None) -> Profile:
    """Read a profile in the format of PipeDream and DAPPLE, recognised by its content.

    Args:
        path: the file.
        samples: samples of the profiled mini-batch; by default as the file tells, or if it does not
            tell, one for the whole mini-batch.

    Raises:
        FileFormatError: for anything but such a profile, naming file, line and value.
        ValueError: if ``samples`` is not between 1 and ``LIMITS.samples``.
    """
    if samples is not None and not 1 <= samples <= LIMITS.samples:
        raise ValueError(f"samples is {samples}; a mini-batch has between 1 and {LIMITS.samples}")
    path = Path(path)
    text = read_text(path)
    if " -- " not in text.lstrip().partition("\n")[0]:
        raise FileFormatError(f"{path} {_what(text)}; {KNOWN}")
    nodes, edges = _parse(text, str(path))
    if not nodes:
        raise FileFormatError(f"{path} has edges, but no line about a node")
    size, unit = (samples, "") if samples else _mini_batch(nodes, path)
    if size > LIMITS.samples:
        raise FileFormatError(
            f"{path} is for {size} samples; more than {LIMITS.samples} is a mistake"
        )
    nbytes = {node.key: node.output_bytes for node in nodes}
    first = sources(nbytes, edges)
    return ImportedGraph(
        file=str(path),
        name=path.parent.name if path.name == "graph.txt" else path.stem,
        nodes=[replace(node, data=node.key in first and _may_be_data(node)) for node in nodes],
        edges=[replace(edge, nbytes=nbytes.get(edge.producer, 0.0)) for edge in edges],
        samples=size,
        device=f"a GPU that PipeDream's format does not name{unit}",
    ).profile()


def _may_be_data(node: ImportedNode) -> bool:
    is_free = not (node.forward_s or node.backward_s or node.parameters)
    return is_free or node.label.lower().startswith("input")


def _what(text: str) -> str:
    """Describe a text that is no profile."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if not lines:
        return "is empty"
    first = lines[0][0]
    is_plan = all(word.isascii() and word.isdigit() for line in lines for word in line)
    if is_plan and len(lines) <= 2 and len(first) < 10 and len(lines[0]) == int(first) + 1:
        return (
            f"is a plan of GraphPipe's runtime ({int(first)} operators and the stage of each), "
            "not a profile: it has no times to plan with"
        )
    return f"is no profile: it starts with {shown(text.strip().partition(chr(10))[0])}"


def _mini_batch(nodes: list[ImportedNode], path: Path) -> tuple[int, str]:
    """Return the samples of the profiled mini-batch, and a remark on them."""
    named = re.search(r"(?<![a-z])pbs-0*([1-9][0-9]{0,12})(?![0-9])", path.name)
    if named:
        return int(named[1]), ""
    for node in nodes:
        if node.label == "Input" and images(node.output_bytes):
            return images(node.output_bytes), ""
    for node in nodes:
        width = re.match(r"Embedding\([0-9]+, ([1-9][0-9]{0,6})\b", node.label)
        if width and _divides(4 * int(width[1]), node.output_bytes):
            return int(node.output_bytes) // (4 * int(width[1])), ", a sample is a token"
    return 1, ", a sample is the whole mini-batch (the file does not tell how many it has)"


def images(nbytes: float) -> int:
    """Return the number of images of a usual size in ``nbytes``; 0 if it is no whole number."""
    return next((int(nbytes) // image for image in IMAGES if _divides(image, nbytes)), 0)


def _divides(part: int, whole: float) -> bool:
    return whole > 0 and whole == int(whole) and int(whole) % part == 0


def _parse(text: str, file: str) -> tuple[list[ImportedNode], list[Edge]]:
    """Return the nodes and edges of a text; bytes of edges are still missing."""
    nodes, edges = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where, place = f"{file}: line {number}", f"line {number}"
        parts = [part.strip() for part in line.strip().split(" -- ")]
        if line[0] in " \t":
            edges.append(_edge(parts, where, place))
        else:
            nodes.append(_node(parts, where, place))
    return nodes, edges


def _edge(parts: list[str], where: str, place: str) -> Edge:
    if len(parts) != 2 or not all(_KEY.fullmatch(part) for part in parts):
        raise FileFormatError(
            f"{where} is {shown(' -- '.join(parts))}; an indented line is an edge such as "
            "node1 -- node2"
        )
    return Edge(parts[0], parts[1], 0.0, place)


def _node(parts: list[str], where: str, place: str) -> ImportedNode:
    if len(parts) > 3 and re.fullmatch(r"stage_id=[0-9]+", parts[-1]):
        parts = parts[:-1]
    if len(parts) < 3 or not _KEY.fullmatch(parts[0]):
        raise FileFormatError(
            f"{where} is {shown(' -- '.join(parts))}; a node is written as "
            f"node1 -- description -- {'=0, '.join(COLUMNS)}=0, and an edge is indented"
        )
    label = " -- ".join(parts[1:-1])
    forward_ms, backward_ms, output, parameters = _columns(parts[-1], where)
    return ImportedNode(
        key=parts[0],
        label=label,
        where=place,
        forward_s=forward_ms / 1000,
        backward_s=backward_ms / 1000,
        kept_bytes=0.0 if _ALIAS.match(label) else output,
        output_bytes=output,
        parameters=(("", parameters),) if parameters else (),
        kind=re.sub(r"\W+", " ", label.partition("(")[0].strip())[:40].strip(),
    )


def _columns(text: str, where: str) -> list[float]:
    columns: dict[str, str] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in COLUMNS or not equals:
            raise FileFormatError(
                f"{where} has {shown(item.strip())}; the columns are {', '.join(COLUMNS)}"
            )
        if name in columns:
            raise FileFormatError(f"{where} has column {name} twice")
        columns[name] = value
    for name in COLUMNS:
        if name not in columns:
            raise FileFormatError(f"{where} lacks column {name}")
    return [sum(_numbers(name, columns[name], where)) for name in COLUMNS]


def _numbers(name: str, text: str, where: str) -> list[float]:
    """Parse one number, or the list of an activation size."""
    items = [text]
    if name == "activation_size" and text.startswith("[") and text.endswith("]"):
        items = [item.strip() for item in text[1:-1].split(";")]
    is_time = name.endswith("_time")
    most, unit = (LIMITS.seconds * 1000, "milliseconds") if is_time else (LIMITS.size, "bytes")
    numbers = [float(item) if _NUMBER.fullmatch(item) else math.nan for item in items]
    for item, number in zip(items, numbers, strict=True):
        if not 0 <= number <= most:
            raise FileFormatError(
                f"{where}: {name} is {shown(item)}; it should be a number of {unit} from 0 to "
                f"{most:g}"
            )
    return numbers
