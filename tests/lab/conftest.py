"""What tests of the lab share."""

import shutil
import subprocess

import pytest

TRIAL = """\
mount -t tmpfs none /run
mount -t proc none /proc
ip netns add node
ip link add bridge type bridge
ip link add one type veth peer name other
tc qdisc add dev one root handle 1: htb
tc filter add dev one parent 1: protocol ip u32 match ip dst 198.18.0.0/24 flowid 1:2
"""


@pytest.fixture(scope="session")
def namespaces():
    """Skips the test where this system cannot emulate clusters, with the reason why; tried without fedshard."""
    if missing := [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]:
        pytest.skip(f"clusters cannot be emulated: no {', '.join(missing)}")
    options = ["--user", "--map-root-user", "--net", "--mount", "--pid", "--fork"]
    tried = subprocess.run(["unshare", *options, "sh", "-exc", TRIAL], capture_output=True, text=True, timeout=20)
    if tried.returncode:
        pytest.skip(f"clusters cannot be emulated: {tried.stderr}")
