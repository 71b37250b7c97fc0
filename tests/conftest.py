"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# How fast a machine is, is nothing that a test may fail for.
settings.register_profile("kvbaton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvbaton")
