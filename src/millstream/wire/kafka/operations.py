"""Authorized operations (KIP-430): one bit per AclOperation that the client may do."""

from __future__ import annotations

NOT_ASKED = -(1 << 31)
"""The client did not ask, or the resource does not exist."""
