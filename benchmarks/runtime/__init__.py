"""Benchmark of the runtime beside ``torch.distributed.pipelining``."""
