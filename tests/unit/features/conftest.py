"""`pytest tests/unit/features --hypothesis-profile=soak` draws many more tables and chains, others each time."""

from hypothesis import settings

settings.register_profile("soak", max_examples=2000, deadline=None, derandomize=False)
