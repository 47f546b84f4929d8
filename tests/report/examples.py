"""Plans and timelines that are small enough to check by eye, and a reader of the pictures."""

from xml.etree import ElementTree

from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from anabranch.schedule.schedule import Action
from anabranch.timeline import Span, Timeline

SVG = "{http://www.w3.org/2000/svg}"

# 0 (text) --+
#            +--> 2 (head)        one device each, two micro-batches of 2 samples
# 1 (image) -+
TWO_TOWERS = StageGraph(
    (
        Stage(("text.0", "text.1"), (0,), 2, in_flight=2),
        Stage(("image.0",), (1,), 2, in_flight=2),
        Stage(("head", "loss"), (2,), 2, in_flight=1),
    ),
    ((0, 2), (1, 2)),
    batch_size=4,
)

# ms        0   1   2   3   4   5   6   7   8
# device 0  F0  F1  .   .   B0  .   .   B1
# device 1  F0  F1  .   .   B0  .   .   B1
# device 2  .   F0  B0 B0   .   F1  B1
STEP = """\
0: 0F0 0-1 | 0F1 1-2 | 0B0 4-5 | 0B1 7-8
0: 0SF0>2@2[0:2] 1-1.1 | 0RB0<2@2[0:2] 3.9-4
1: 1F0 0-1 | 1F1 1-2 | 1B0 4-5 | 1B1 7-8
2: 2F0 1.1-2 | 2B0 2-4 | 2F1 5-6 | 2B1 6-7
2: 2RF0<0@0[0:2] 1-1.1 | 2SB0>0@0[0:2] 3.9-4
"""


def timeline(text: str, *, source: str = "predicted", step_ms: float = 8.5) -> Timeline:
    """A timeline from lines of ``device: action start-end | ...``, in milliseconds."""
    spans = []
    for line in text.strip().splitlines():
        device, _, rest = line.partition(":")
        for part in rest.split("|"):
            action, times = part.split()
            start, _, end = times.partition("-")
            span = Span(int(device), float(start) / 1e3, float(end) / 1e3, Action.parse(action))
            spans.append(span)
    devices = tuple(sorted({span.device for span in spans}))
    memory = dict.fromkeys(devices, ((0.0, 2**20), (1e-3, 3 * 2**20), (6e-3, 2**20)))
    ordered = sorted(spans, key=lambda span: (span.device, span.start))
    return Timeline(tuple(ordered), devices, source, step_ms / 1e3, memory)


def plan(graph: StageGraph = TWO_TOWERS, *, model: str = "two-branch") -> Plan:
    """A plan whose figures nobody would mistake for others."""
    predicted = Prediction(8e-3, 2e-3, 0.25, tuple(2**20 * (d + 1) for d in graph.devices))
    return Plan(
        graph, "1f1b", "graphpipe", model, "local:3", "measured, cpu", 0.01, 0.02, predicted
    )


def chain(stages: int) -> StageGraph:
    """Stages one behind the other."""
    built = tuple(Stage((f"op{s}",), (s,), 1, in_flight=1) for s in range(stages))
    return StageGraph(built, tuple((s, s + 1) for s in range(stages - 1)), batch_size=4)


def parse(svg: str) -> ElementTree.Element:
    """The root of a picture; raises where it is no XML."""
    return ElementTree.fromstring(svg)


def of_class(root: ElementTree.Element, tag: str, *css: str) -> list[ElementTree.Element]:
    """Elements of a kind that have one of these classes."""
    found = root.iter(f"{SVG}{tag}")
    return [e for e in found if set(css) & set((e.get("class") or "").split())]


def texts(root: ElementTree.Element) -> list[str]:
    """All that is written in a picture."""
    return ["".join(e.itertext()) for e in root.iter(f"{SVG}text")]
