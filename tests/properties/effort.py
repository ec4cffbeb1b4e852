"""How many examples the property tests draw: few and always the same, or PROPERTY_EFFORT times as many and new ones."""

import os

from hypothesis import HealthCheck, settings

EFFORT = int(os.environ.get("PROPERTY_EFFORT", "1"))


def few(examples: int) -> settings:
    """Settings of a test that must take about a second."""
    return settings(
        max_examples=examples * EFFORT,
        derandomize=EFFORT == 1,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
