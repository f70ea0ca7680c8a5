"""How hypothesis looks for counter-examples: the same ones in every run, however slow the machine."""

from hypothesis import settings

settings.register_profile("fedshard", deadline=None, derandomize=True)
settings.load_profile("fedshard")
