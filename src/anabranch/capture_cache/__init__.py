"""Captured models, kept between commands, so that planning again does not capture again.

What is kept is what an estimate needs (``TracedModel``: the graph of operators and their kernels),
as JSON; a module that runs is captured every time. ``key`` says when a kept capture is that of the
model asked for, ``store`` has the files, ``captured`` joins the two.
"""
