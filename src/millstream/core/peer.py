"""Identifies clients by address, for limits per client."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(1024)
def peer_of(host: str) -> str:
    """The identity of an address: an IPv4 address itself, or the /64 of an IPv6 address, which one host owns."""
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
