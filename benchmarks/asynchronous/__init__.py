"""Training without a flush beside synchronous schedules, and what weight prediction costs."""
