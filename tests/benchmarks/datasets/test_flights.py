"""Flights as tensors."""

import pytest
import torch

from benchmarks.datasets.flights import FLIGHT_COLUMNS, SPARSE, load_flights, read_columns
from tests.benchmarks.datasets.fakes import fake_flights, flight_lines


def test_half_of_the_flights_are_late():
    """Of 40 days x 11 flights that arrived, 5 a day are late; as many punctual ones are kept."""
    flights = fake_flights()
    assert len(flights.late) == 400
    assert flights.late.mean() == 0.5
    assert not torch.equal(fake_flights(seed=1).schedule, flights.schedule)


def test_nothing_that_is_known_only_afterwards_is_read():
    """Of the outcome, only what the label is made of."""
    outcome = {"dep_time", "dep_delay", "arr_time", "arr_delay", "air_time"}
    assert outcome & set(FLIGHT_COLUMNS) == {"arr_delay"}


def test_whole_days_are_held_out():
    """Days 8, 16, 24, 32 and 40 of the year: the 5 late flights of each, and punctual ones."""
    flights = fake_flights()
    assert flights.late[flights.held_out].sum() == 5 * 5
    assert not set(flights.training.tolist()) & set(flights.held_out.tolist())
    assert len(flights.training) + len(flights.held_out) == len(flights.late)


def test_values_that_training_days_lack_share_row_zero():
    """The tail number depends on the day modulo 7 and the flight; every one occurs in training."""
    flights = fake_flights()
    assert flights.tables == (3, 2, 6, 7 * 11 + 1, 12)
    for column, rows in zip(flights.sparse, flights.tables, strict=True):
        assert column.shape == (400, 1)
        assert column.min() >= 0
        assert column.max() == rows - 1


def test_features_are_standardised_and_finite():
    """A constant, and what was never measured, become 0."""
    flights = fake_flights()
    hour_of_day = flights.schedule[flights.training, -1]
    assert hour_of_day.mean().abs() < 1e-5
    assert (hour_of_day.std(correction=0) - 1).abs() < 1e-5
    assert flights.schedule.isfinite().all()
    assert (flights.weather == 0).all()


def test_columns_are_found_by_name():
    """The order of the file does not matter."""
    table = read_columns(["b,a", "1,2", "3,4"], ["a"])
    assert {name: column.tolist() for name, column in table.items()} == {"a": ["2", "4"]}
    with pytest.raises(ValueError, match="'c' is not in list"):
        read_columns(["b,a", "1,2"], ["c"])
    assert len(flight_lines()) == 1 + 40 * 12


def test_the_real_flights():
    """The figures of the published table. Asks the registry the first time."""
    flights = load_flights()
    assert dict(zip(SPARSE, flights.tables, strict=True))["carrier"] == 16 + 1
    assert len(flights.late) == 2 * 77_630
    assert 0.45 < flights.late[flights.held_out].mean() < 0.55
