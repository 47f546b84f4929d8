"""List schedules with split backwards against the shortest ones."""
