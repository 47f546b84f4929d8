"""Settings for all tests."""

from hypothesis import settings

# A deadline measures the machine, which may be busy, not the code.
settings.register_profile("anabranch", deadline=None)
settings.load_profile("anabranch")
