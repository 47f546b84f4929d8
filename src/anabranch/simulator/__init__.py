"""Prediction of a step: a schedule is compiled (``program``) and run on a clock (``step``).

``costs`` has the prices, ``stream`` training without a flush, ``steady`` long steps from short
ones, ``judge`` the choice among proposals, ``critical_path`` what a step waited for.
"""
