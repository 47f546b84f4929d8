"""Text, numbers and colours of pictures."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.report.theme import (
    DARK,
    LIGHT,
    Drawing,
    escape,
    num,
    shorten,
    significant,
    text,
    text_width,
    ticks,
)


@given(st.text())
def test_any_text_can_be_written(content):
    """A model's author may call an operator anything; the picture stays well-formed."""
    drawing = Drawing(100, 100, content)
    drawing.add(text("", 0, 0, 12, content))
    root = ElementTree.fromstring(drawing.svg())
    assert len(root.findall("{http://www.w3.org/2000/svg}text")) == 1


def test_quotes_cannot_end_an_attribute():
    """All five characters with a meaning in XML."""
    assert escape("""<a & "b" 'c'>""") == "&lt;a &amp; &quot;b&quot; &#x27;c&#x27;&gt;"


def test_characters_that_xml_forbids_are_replaced():
    """A null or half a surrogate pair would make the whole file unreadable."""
    assert escape("a\0b\ud800c") == "a\ufffdb\ufffdc"


@pytest.mark.parametrize(
    ("value", "written"), [(0.0, "0"), (1.0, "1"), (1.255, "1.25"), (-0.001, "0"), (1e6, "1000000")]
)
def test_coordinates_have_two_decimals(value, written):
    """Hundredths of a pixel are enough, and short."""
    assert num(value) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0, "0"),
        (12.345, "12.3"),
        (1234.5, "1,234"),
        (0.001234, "0.00123"),
        (2.0, "2"),
        (999.6, "1,000"),
        (float("nan"), "nan"),
    ],
)
def test_figures_have_three_significant_digits(value, written):
    """And never an exponent."""
    assert significant(value) == written


@given(st.floats(1e-6, 1e9), st.integers(4, 20))
def test_ticks_are_round_and_about_as_many_as_asked(high, about):
    """From 0, equally far apart, none beyond the end; between half and twice as many."""
    marks = ticks(0.0, high, about)
    assert marks[0] == 0
    assert marks[-1] <= high * (1 + 1e-6)
    assert about / 2.6 <= len(marks) <= about + 2
    step = f"{marks[1]:.0e}"
    assert step[0] in "125"


def test_ticks_of_an_empty_range():
    """One mark rather than a division by zero."""
    assert ticks(3.0, 3.0, 5) == [3.0]


@given(st.text(min_size=1, max_size=80), st.floats(8, 14), st.floats(20, 300))
def test_a_shortened_name_fits(name, font, width):
    """Whatever was cut out of it."""
    short = shorten(name, font, width)
    assert text_width(short, font) <= width or short == "\u2026"
    assert short == name or "\u2026" in short


def test_both_ends_of_a_name_survive():
    """The tower stands at the front, the layer at the end."""
    short = shorten("text_model.encoder.layers.11", 11, 110)
    assert short.startswith("text")
    assert short.endswith("11")


def contrast(a: str, b: str) -> float:
    """Contrast of two colours, from 1 to 21 (WCAG 2, relative luminance)."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_text_can_be_read_on_what_it_stands_on(palette):
    """At least 4.5, which WCAG 2 asks for small text."""
    for ink, ground in (
        ("ink", "paper"),
        ("ink", "card"),
        ("muted", "paper"),
        ("muted", "card"),
        ("forward-ink", "forward"),
        ("backward-ink", "backward"),
        ("weight-ink", "weight"),
        ("paper", "ink"),  # the tooltip
    ):
        assert contrast(palette[ink], palette[ground]) >= 4.5, (ink, ground)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_boxes_stand_out_from_the_empty_row(palette):
    """Work is told from waiting by lightness too, for those who see no colours."""
    assert contrast(palette["forward"], palette["lane"]) >= 3
    assert contrast(palette["backward"], palette["lane"]) >= 1.7


def test_light_and_dark_style_the_same_things():
    """A colour that one scheme lacks would be black there."""
    assert LIGHT.keys() == DARK.keys()
    assert all(re.fullmatch("#[0-9a-f]{6}", c) for c in [*LIGHT.values(), *DARK.values()])


def test_a_standalone_picture_brings_both_schemes():
    """It may end up in a README, which has no style sheet."""
    svg = Drawing(10, 10, "empty").svg()
    assert "prefers-color-scheme:dark" in svg
    assert LIGHT["paper"] in svg
    assert DARK["paper"] in svg
    assert "<style>" not in Drawing(10, 10, "empty").svg(standalone=False)
