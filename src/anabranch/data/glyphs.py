"""Glyphs and their names: 5,700 pictures with a text each, without a download.

matplotlib ships the font DejaVu Sans, and Python knows the Unicode name of every character::

    [picture of é]  LATIN SMALL LETTER E WITH ACUTE
    [picture of ⇒]  RIGHTWARDS DOUBLE ARROW

The task is to tell whether a name belongs to a picture, for which both are needed. Half of the
pairs are true; in the other half the name is that of another glyph, drawn anew every epoch. So
guessing is right half of the time. Whole glyphs are held out: neither their pictures nor their
names occur in training, only words and parts of them do.
"""

from __future__ import annotations

import importlib.util
import unicodedata
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from anabranch.errors import DataError

FONT = "mpl-data/fonts/ttf/DejaVuSans.ttf"


@dataclass(frozen=True, slots=True)
class GlyphSizes:
    """Sizes of pictures and names.

    Attributes:
        held_out_every: one glyph in this many is held out.
        side: points per side of a picture.
        points: size of the type: the largest at which nearly every glyph fits.
        baseline: share of the height above the baseline; accents and descenders both have room.
        words: words of a name that are read; the longest name has 11.
        pieces: pieces of a word that are read.
    """

    held_out_every: int = 8
    side: int = 32
    points: int = 24
    baseline: float = 0.72
    words: int = 12
    pieces: int = 24


SIZES = GlyphSizes()


@dataclass(frozen=True)
class Glyphs:
    """Pictures and names, one row per glyph.

    Attributes:
        images: [glyphs, 32, 32], 0 to 1.
        pieces: [glyphs, words, pieces], row numbers of an embedding table; 0 is padding.
        training: row numbers of glyphs for training; ``held_out`` of the others.
    """

    names: tuple[str, ...]
    images: torch.Tensor
    pieces: torch.Tensor
    training: torch.Tensor
    held_out: torch.Tensor


def load_glyphs(buckets: int = 4096) -> Glyphs:
    """Load the data set.

    Args:
        buckets: rows of the embedding table of ``pieces``.

    Raises:
        DataError: if matplotlib, which has the font, is not installed.
        ValueError: for fewer than two buckets.
    """
    if buckets < 2:
        raise ValueError(f"buckets={buckets}; at least 2 are needed, of which one is padding")
    matplotlib = importlib.util.find_spec("matplotlib")
    if matplotlib is None or matplotlib.origin is None:
        raise DataError(
            "matplotlib, whose font has the glyphs, is not installed: pip install matplotlib"
        )
    names, images = draw(Path(matplotlib.origin).parent / FONT)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))
    cut = len(names) // SIZES.held_out_every
    return Glyphs(
        names=tuple(names),
        images=torch.from_numpy(images).float() / 255,
        pieces=torch.tensor([name_pieces(name, buckets) for name in names]),
        training=order[cut:].sort().values,
        held_out=order[:cut].sort().values,
    )


@cache
def draw(path: Path) -> tuple[list[str], np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]]:
    """Draw named glyphs that are not blank: names, and pictures [glyphs, 32, 32] of 0 to 255."""
    from matplotlib.ft2font import FT2Font
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(str(path), SIZES.points, layout_engine=ImageFont.Layout.BASIC)
    names, images = [], []
    for code in sorted(FT2Font(str(path)).get_charmap()):
        name = unicodedata.name(chr(code), "")
        if not name:
            continue
        picture = Image.new("L", (SIZES.side, SIZES.side))
        place = (SIZES.side / 2, SIZES.side * SIZES.baseline)
        ImageDraw.Draw(picture).text(place, chr(code), fill=255, font=font, anchor="ms")
        pixels = np.asarray(picture)
        if pixels.any():
            names.append(name)
            images.append(pixels)
    return names, np.stack(images)


def name_pieces(name: str, buckets: int) -> list[tuple[int, ...]]:
    """Return the words of a name, each as the numbers of its pieces, padded with 0."""
    words = [word_pieces(word, buckets) for word in name.split()[: SIZES.words]]
    return words + [(0,) * SIZES.pieces] * (SIZES.words - len(words))


@cache
def word_pieces(word: str, buckets: int) -> tuple[int, ...]:
    """Return numbers for a word itself and for its runs of three, two and one characters."""
    bounded = f"<{word}>"
    runs = [bounded[i : i + n] for n in (3, 2, 1) for i in range(len(bounded) - n + 1)]
    distinct = dict.fromkeys([bounded, *(run for run in runs if run not in "<>")])
    # crc32 and not hash(), which differs from process to process.
    numbers = [1 + zlib.crc32(run.encode()) % (buckets - 1) for run in distinct][: SIZES.pieces]
    return (*numbers, *[0] * (SIZES.pieces - len(numbers)))


def true_and_false_pairs(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Pair every glyph (of at least two) with its own name and with another one, in random order.

    Returns:
        [2 * rows, 3]: row of the picture, row of the name, 1 if they belong together.
    """
    count = len(rows)
    shift = torch.randint(1, count, (count,), generator=generator)
    others = rows[(torch.arange(count) + shift) % count]
    own = torch.stack([rows, rows, torch.ones_like(rows)], 1)
    other = torch.stack([rows, others, torch.zeros_like(rows)], 1)
    return torch.cat([own, other])[torch.randperm(2 * count, generator=generator)]
