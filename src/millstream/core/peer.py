"""Clients as the broker tells them apart when it shares out what there is: by address."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(1024)
def peer_of(host: str) -> str:
    """What an address counts as: an IPv4 address as itself, an IPv6 address as its /64, all of which one host has."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address) if address.is_loopback else str(ipaddress.ip_network((address, 64), strict=False))


@lru_cache(1024)
def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(peer_of(host)).is_loopback
    except ValueError:
        return False
