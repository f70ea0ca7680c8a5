"""What tests of the lab share."""

import pytest

from fedshard.core.errors import InputError
from fedshard.lab.namespaces import Namespaces


@pytest.fixture(scope="session")
def namespaces():
    """Skips the test where this system cannot emulate clusters, with the reason why."""
    link = "ip link add one type veth peer name other"
    limit = "tc qdisc add dev one root handle 1: htb"
    match = "tc filter add dev one parent 1: protocol ip u32 match ip dst 10.0.0.0/24 flowid 1:2"
    try:
        Namespaces(["ip link add bridge type bridge", "ip netns add node", link, limit, match]).close()
    except InputError as error:
        pytest.skip(str(error))
