"""Devices that compute: what differs between their kinds, and what the runtime asks of one."""
