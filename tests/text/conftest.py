"""Property tests draw the same examples every time and have no deadline: neither chance nor load fails them."""

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")
