"""Colours, type, number formats, ticks and SVG elements of all pictures, in light and dark.

A standalone picture carries rules for both colour schemes and paints its own background. Forward
blue and backward orange stay apart in common colour blindness and in grey.
"""

from __future__ import annotations

import html
import math
import re
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Pixels:
    """Sizes of pages and pictures, in pixels.

    Attributes:
        margin: space between a picture and its edge.
        small_type: type size in the boxes of stages.
        label, second_label: type sizes beside the rows of a timeline, of first and second lines.
        most_arrows, most_arrow_rows: most messages drawn as arrows, and most rows of such pictures.
        width: width of pictures: a page of 1280 without its margins.
        narrowest: width of pictures on a phone, where they scroll instead of shrinking further.
    """

    margin: float = 22.0
    small_type: float = 11.0
    label: float = 12.0
    second_label: float = 10.5
    most_arrows: int = 240
    most_arrow_rows: int = 16
    width: float = 1236.0
    narrowest: int = 760


PIXELS = Pixels()

FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'

_COLOURS = {
    "paper": ("#ffffff", "#11161d"),
    "ink": ("#1c2530", "#e6ecf3"),
    "muted": ("#566272", "#9aa7b7"),
    "rule": ("#dbe1e9", "#2a3441"),
    "lane": ("#e9eef4", "#1e2732"),
    "card": ("#f7f9fb", "#171e27"),
    "edge": ("#8794a5", "#77869a"),
    "forward": ("#2f6fd0", "#5c9cf5"),
    "forward-ink": ("#ffffff", "#04142c"),
    "backward": ("#f2a23a", "#eda644"),
    "backward-ink": ("#3a2000", "#2b1700"),
    "weight": ("#f4dc85", "#d8c672"),
    "weight-ink": ("#3d3000", "#2a2200"),
    "wire-forward": ("#7fa6e3", "#456fae"),
    "wire-backward": ("#e0a55a", "#94703a"),
    "sum": ("#2a8c78", "#4db8a0"),
    "update": ("#8a6bc4", "#a78be0"),
    "tail": ("#c9bfe3", "#4a4369"),
    "end": ("#b3261e", "#ff8a80"),
}
"""Name -> colour on a light background, on a dark one."""

LIGHT, DARK = ({name: pair[i] for name, pair in _COLOURS.items()} for i in (0, 1))

_RULES = """\
.ab text{{font-family:{font};fill:{ink}}}
.ab .paper{{fill:{paper}}}
.ab .muted{{fill:{muted}}}
.ab .lane{{fill:{lane}}}
.ab .tail{{fill:{tail}}}
.ab .sum{{fill:{sum}}}
.ab .update{{fill:{update}}}
.ab .card{{fill:{card};stroke:{rule}}}
.ab .rule{{stroke:{rule};fill:none}}
.ab .edge{{stroke:{edge};fill:none}}
.ab .tip{{fill:{edge}}}
.ab .end{{stroke:{end};fill:none}}
.ab .f{{fill:{forward}}}
.ab .b{{fill:{backward}}}
.ab .w{{fill:{weight}}}
.ab .p1{{fill-opacity:.6}}
.ab .p2{{fill-opacity:.36}}
.ab .p3{{fill-opacity:.22}}
.ab text.tf{{fill:{forward-ink}}}
.ab text.tb{{fill:{backward-ink}}}
.ab text.tw{{fill:{weight-ink}}}
.ab .wf{{stroke:{wire-forward};fill:none}}
.ab .wb{{stroke:{wire-backward};fill:none}}
.ab .hf{{fill:{wire-forward}}}
.ab .hb{{fill:{wire-backward}}}
.ab .line0{{stroke:{forward};fill:none}}
.ab .line1{{stroke:{backward};fill:none}}
.ab .line2{{stroke:{sum};fill:none}}
.ab .faint{{stroke-opacity:.35}}
.ab .bold{{font-weight:600}}
.ab .right{{text-anchor:end}}
.ab .num{{text-anchor:middle;font-variant-numeric:tabular-nums}}"""
"""Classes: f forward, b backward, w weight gradient; before them t for text, w wire, h its head;
p1 to p3 for boxes of the second and later stages of a device.
"""


def style() -> str:
    """Return the style rules of all pictures, for light and dark."""
    light = _RULES.format(font=FONT, **LIGHT)
    dark = _RULES.format(font=FONT, **DARK)
    return f"{light}\n@media (prefers-color-scheme:dark){{\n{dark}\n}}"


@dataclass
class Drawing:
    """A picture under construction.

    Attributes:
        title: description for screen readers.
        body: SVG elements in painting order.
        attributes: further attributes of the svg element, escaped.
    """

    width: float
    height: float
    title: str
    body: list[str] = field(default_factory=list)
    attributes: str = ""

    def add(self, *pieces: str) -> None:
        """Add elements on top of the picture."""
        self.body.extend(pieces)

    def svg(self, *, standalone: bool = True) -> str:
        """Return the svg element; a standalone one includes style rules and background."""
        size = f'width="{num(self.width)}" height="{num(self.height)}"'
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="ab" {size} '
            f'viewBox="0 0 {num(self.width)} {num(self.height)}" role="img"{self.attributes}>',
            f"<title>{escape(self.title)}</title>",
        ]
        if standalone:
            head.append(f"<style>{html.escape(style(), quote=False)}</style>")
            head.append(rect("paper", 0, 0, self.width, self.height, radius=10))
        return "\n".join([*head, *self.body, "</svg>\n"])


def escape(value: object) -> str:
    """Escape text for elements and quoted attributes; characters not in XML 1.0 become U+FFFD."""
    return html.escape(_NOT_XML.sub("\ufffd", str(value)), quote=True)


_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def num(value: float) -> str:
    """Format a coordinate with two decimals at most."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def rect(
    css: str, x: float, y: float, width: float, height: float, *, radius: float = 0, extra: str = ""
) -> str:
    corner = f' rx="{num(radius)}"' if radius else ""
    place = f'x="{num(x)}" y="{num(y)}" width="{num(width)}" height="{num(height)}"'
    return f'<rect class="{css}" {place}{corner}{extra}/>'


def text(css: str, x: float, y: float, size: float, content: object) -> str:
    """Return an escaped line of text; its class decides if it starts, ends or is centred at x."""
    place = f'x="{num(x)}" y="{num(y)}" font-size="{num(size)}"'
    return f'<text class="{css}" {place}>{escape(content)}</text>'


def text_width(content: str, size: float) -> float:
    """Estimate the width of a line in the widest usual sans-serif font (DejaVu Sans)."""
    wide = sum(c in "mwMW@%" for c in content)
    slim = sum(c in "iljft.,:;|'!()[] " for c in content)
    return size * (0.635 * (len(content) - wide - slim) + 0.95 * wide + 0.39 * slim)


def shorten(content: str, size: float, width: float) -> str:
    """Replace the middle of a line that does not fit by dots, as both ends of a name matter."""
    if text_width(content, size) <= width:
        return content
    for keep in range(len(content) - 2, 1, -1):
        head = keep // 2
        short = f"{content[:head]}\u2026{content[len(content) - (keep - head) :]}"
        if text_width(short, size) <= width:
            return short
    return "\u2026"


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return about ``about`` round numbers (1, 2 or 5 times a power of ten) from low to high."""
    if not high > low:
        return [low]
    raw = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1.0, 2.0, 5.0, 10.0) if f * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def significant(value: float) -> str:
    """Format with three significant digits, commas for thousands and no exponent."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    rounded = f"{value:,.{min(digits, 12)}f}"
    return rounded.rstrip("0").rstrip(".") if "." in rounded else rounded
