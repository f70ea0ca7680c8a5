"""What all tests share."""

import pytest

from fedshard.testing import RankPool


@pytest.fixture(scope="session")
def ranks():
    """A pool of up to 8 ranks, started when the first test asks for it: `ranks.run(function, layout, *args)`."""
    with RankPool(8) as pool:
        yield pool
