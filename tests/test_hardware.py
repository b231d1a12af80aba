"""What a node finds out about its machine."""

from __future__ import annotations

import ipaddress
import socket

import psutil
import pytest

from flytekitplugins.daskpytorch.node.hardware import interface_of


def test_each_address_of_this_machine_leads_to_its_interface() -> None:
    addresses = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    assert addresses
    assert {address: interface_of(address.split("%")[0]) for address in addresses} == addresses


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_every_loopback_address_is_one_of_lo(address: str) -> None:
    """Of which the system lists the first alone."""
    assert interface_of(address) == "lo"


def test_an_address_of_another_machine_is_one_of_none() -> None:
    here = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    elsewhere = next(str(host) for host in ipaddress.ip_network("192.0.2.0/24").hosts() if str(host) not in here)
    assert interface_of(elsewhere) is None
