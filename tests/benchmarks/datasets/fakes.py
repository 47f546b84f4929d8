"""Small stand-ins for the data sets that are downloaded, in the formats of the real files."""

import math

import numpy as np

from benchmarks.datasets import drugs, flights

GENES = 12


def flight_lines(days: int = 40, per_day: int = 12) -> list[str]:
    """A table of flights: those after 18:00 are late, the last of each day is cancelled."""
    lines = [",".join(flights.FLIGHT_COLUMNS)]
    for day in range(days):
        month, of_month = divmod(day, 28)
        for i in range(per_day):
            hour = 6 + i
            delay = "NA" if i == per_day - 1 else ("40" if i % 2 else "-3")
            date = f"2013-{month + 1:02}-{of_month + 1:02}"
            row = {
                "carrier": "UA" if i % 2 else "DL",
                "origin": "EWR",
                "dest": f"D{i % 5}",
                "tailnum": f"N{day % 7}{i}",
                "flight": str(100 + i),
                "year": "2013",
                "month": str(month + 1),
                "day": str(of_month + 1),
                "sched_dep_time": str(hour * 100 + 5),
                "sched_arr_time": str((hour + 3) * 100 + 5),
                "distance": "1000",
                "time_hour": f"{date}T{hour:02}:00:00Z",
                "arr_delay": delay,
            }
            lines.append(",".join(row[name] for name in flights.FLIGHT_COLUMNS))
    return lines


def weather_lines() -> list[str]:
    """Weather of one hour only; gusts were not measured."""
    header = ["origin", "time_hour", *flights.WEATHER]
    values = ["NA" if name == "wind_gust" else "7.5" for name in flights.WEATHER]
    return [",".join(header), ",".join(["EWR", "2013-01-01T07:00:00Z", *values])]


def fake_flights(seed: int = 0) -> flights.Flights:
    """What ``load_flights`` would make of these tables."""
    return flights.encode(
        flights.read_columns(flight_lines(), flights.FLIGHT_COLUMNS),
        flights.read_columns(weather_lines(), ("origin", "time_hour", *flights.WEATHER)),
        seed,
    )


def fake_responses(genes: int = GENES, bits: int = 64) -> drugs.Responses:
    """Sixteen cell lines and three drugs, each pair measured."""
    cells = [f"cell-{i}" for i in range(16)]
    formulas = {"aspirin": "CC(=O)OC1=CC=CC=C1C(=O)O", "urea": "C(=O)(N)N", "water": "O"}
    pairs = [
        (cell, drug, str(math.sin(i * 3 + j)))
        for i, cell in enumerate(cells)
        for j, drug in enumerate(formulas)
    ]
    table = {
        f"CELL{i}": [(i * (gene + 3)) % 5 % 2 for gene in range(GENES)] for i in range(len(cells))
    }
    return drugs.encode(pairs, table, table, formulas, genes=genes, bits=bits)


def fake_drawing(_: object) -> tuple[list[str], np.ndarray]:
    """Forty grey glyphs and their names."""
    names = [f"LATIN LETTER {number}" for number in range(40)]
    return names, np.stack([np.full((32, 32), 6 * i + 1, np.uint8) for i in range(40)])


def fake_data(monkeypatch) -> None:
    """The trainings use these instead of what they would download."""
    monkeypatch.setattr("benchmarks.datasets.flights.load_flights", fake_flights)
    monkeypatch.setattr("benchmarks.datasets.drugs.load_responses", fake_responses)
    monkeypatch.setattr("anabranch.data.glyphs.draw", fake_drawing)
