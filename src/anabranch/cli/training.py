"""The verbs that run a model: verify, train, report, demo, models."""

from __future__ import annotations

VERBS = ()
