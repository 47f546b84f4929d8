"""Devices that compute: what differs between their kinds, what is asked of one; their host."""
