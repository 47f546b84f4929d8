"""Prediction of a step: a schedule is compiled (``program``) and run on a clock (``step``).

A device executes a list of messages and units of compute (``messages``); gradients are summed
beside it (``all_reduces``, ``sums``). ``costs`` has the prices, ``records`` the tables that the
clock of ``events`` and ``engine`` reads, ``stream`` training without a flush, ``judge`` the choice
among proposals, ``critical_path`` what a step waited for.
"""
