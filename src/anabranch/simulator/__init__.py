"""Prediction of a step: a schedule is compiled (``program``) and run on a clock (``step``).

What a device does is a list of messages and units (``messages``), beside which gradients are summed
(``all_reduces``, ``sums``). ``costs`` has the prices, ``records`` what the clock of ``events`` and
``engine`` reads, ``stream`` training without a flush, ``judge`` the choice among proposals,
``critical_path`` what a step waited for.
"""
