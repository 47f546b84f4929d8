"""The pictures by name; each is one string that holds a whole SVG document, in light and dark."""

from __future__ import annotations

from anabranch.report.gantt import timeline_svg
from anabranch.report.stagegraph import stage_graph_svg

__all__ = ["stage_graph_svg", "timeline_svg"]
