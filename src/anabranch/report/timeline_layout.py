"""Layout of a picture of timelines: height of rows, labels and axis.

The page's script has sizes of its own rows from the same table (``page_data``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from anabranch.plans.stages import StageGraph
from anabranch.report import lanes, names
from anabranch.report.theme import PIXELS, text_width
from anabranch.timeline import PathSegment, Timeline


class ShownTimeline(NamedTuple):
    """A timeline to draw.

    Attributes:
        title: its heading.
        graph: its stages.
        path: its critical path, the latest part first; empty where that is not known.
    """

    title: str
    timeline: Timeline
    graph: StageGraph
    path: Sequence[PathSegment] = ()


@dataclass(frozen=True)
class Panel:
    """A timeline, see ``ShownTimeline``, and its position in the picture.

    Attributes:
        rows, tops: rows from top to bottom, and the upper end of each.
        row_height: height of a row with all-reduces below the boxes.
        sum_height: height of the strip of all-reduces; 0 if none are known.
        has_arrows: messages are few enough to be drawn, as arrows between rows.
        heading: baseline of the heading.
        bottom: lower end of the last row.
    """

    title: str
    timeline: Timeline
    graph: StageGraph
    path: Sequence[PathSegment]
    rows: tuple[lanes.DeviceRow, ...]
    tops: tuple[float, ...]
    row_height: float
    sum_height: float
    has_arrows: bool
    heading: float
    bottom: float

    @property
    def box_height(self) -> float:
        return self.row_height - self.sum_height

    @property
    def label_size(self) -> float:
        return min(PIXELS.label, max(self.row_height - 1, 7.5))

    @property
    def has_second_lines(self) -> bool:
        """True where a second line of the label has room, in small type."""
        return self.row_height >= 30

    def operators(self, row: lanes.DeviceRow) -> str:
        """Return the operators of a row's stages in one line, for the second line of its label."""
        prefix = names.graph_prefix(self.graph)
        known = [s for s in row.stages if s < len(self.graph)]
        return "; ".join(names.operators(self.graph.stages[s], prefix) for s in known)


@dataclass(frozen=True)
class TimelineLayout:
    """All panels, from top to bottom, on their common axis.

    Attributes:
        left, right: x of time 0 and of ``horizon_s``, the longest step.
        axis: y of the axis.
        is_endless: the timelines show several mini-batches without a flush, not a step.
    """

    panels: tuple[Panel, ...]
    left: float
    right: float
    horizon_s: float
    axis: float
    width: float
    height: float
    is_endless: bool = False

    @property
    def counted(self) -> str:
        """Unit of the numbers in the boxes."""
        graphs = [panel.graph for panel in self.panels]
        whole = all(s.microbatch_size >= g.batch_size for g in graphs for s in g.stages)
        return "mini-batch" if self.is_endless and whole else "micro-batch"

    def x(self, seconds: float) -> float:
        return self.left + seconds * (self.right - self.left) / self.horizon_s


def arrange(shown: Sequence[ShownTimeline], *, is_endless: bool = False) -> TimelineLayout:
    """Compute the layout of a picture; see ``timeline_svg``."""
    width = 1200.0
    timelines = [one.timeline for one in shown]
    longest = max(len(timeline.devices) for timeline in timelines)
    top = 56.0
    panels = []
    for one in shown:
        panels.append(_panel(one, top, longest))
        top = panels[-1].bottom + 26
    left = PIXELS.margin + min(_label_width(panels), 0.3 * width) + 12
    horizon = max(max(t.step_s, t.makespan_s) for t in timelines) or 1e-9
    axis = panels[-1].bottom + 10
    right, height = width - PIXELS.margin - 6, axis + 44
    return TimelineLayout(tuple(panels), left, right, horizon, axis, width, height, is_endless)


def _panel(shown: ShownTimeline, top: float, longest: int) -> Panel:
    timeline, rows = shown.timeline, lanes.rows(shown.timeline, shown.graph)
    sizes = next(sizes for most, sizes in ROW_SIZES if longest <= most)
    height, strip, gap, branch_gap = sizes
    strip = strip if timeline.sums else 0.0
    few = sum(not span.action.kind.is_compute for span in timeline.spans) <= 2 * PIXELS.most_arrows
    heading = top + 14
    y = heading + 14
    tops = []
    for i, row in enumerate(rows):
        if i:
            y += branch_gap if row.branch != rows[i - 1].branch else gap
        tops.append(y)
        y += height + strip
    has_arrows = few and len(rows) <= PIXELS.most_arrow_rows
    return Panel(*shown, tuple(rows), tuple(tops), height + strip, strip, has_arrows, heading, y)


ROW_SIZES = (
    (8, (34.0, 7.0, 8.0, 18.0)),
    (16, (24.0, 6.0, 6.0, 13.0)),
    (32, (17.0, 5.0, 3.0, 9.0)),
    (64, (12.0, 4.0, 2.0, 6.0)),
    (128, (9.0, 3.0, 1.0, 4.0)),
    (10**9, (6.0, 2.0, 1.0, 3.0)),
)
"""(most rows, (height of a row, height of its all-reduces, gap between rows, gap between
branches)), in pixels."""


def _label_width(panels: Sequence[Panel]) -> float:
    widths = [100.0]
    for panel in panels:
        for row in panel.rows:
            widths.append(text_width(row.label, panel.label_size))
            if panel.has_second_lines:
                widths.append(text_width(panel.operators(row), PIXELS.second_label))
    return max(widths)
