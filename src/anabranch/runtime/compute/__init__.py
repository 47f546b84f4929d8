"""One micro-batch of one stage, between two messages: compute, what it calls, and its options."""
