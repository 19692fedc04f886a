"""What all tests share."""

from hypothesis import settings

# The same examples each time, and none fails for the time that it takes: machines differ, and may be busy.
settings.register_profile("deterministic", deadline=None, derandomize=True)
settings.load_profile("deterministic")
