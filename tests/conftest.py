"""Settings for all tests."""

import os

from hypothesis import settings

# A deadline measures the machine, which may be busy, not the code. In CI the examples are the same
# each time, so a failure there is the change's; at home every run looks at new ones.
settings.register_profile("anabranch", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("anabranch")
