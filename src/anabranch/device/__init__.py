"""Devices that compute: what differs between their kinds, what the runtime asks of one; the host."""
