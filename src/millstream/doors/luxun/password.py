"""The administrator's password, in the forms of Luxun's configuration (its `Authentication.build`) and as scrypt.

    setting                   admits
    (empty)                   every client, as in Luxun
    plain:PASSWORD            the password
    md5:HASH                  a password with this MD5 hash (32 hexadecimal digits)
    crc32:NUMBER              a password with this CRC-32 (decimal): two billion guesses find one
    scrypt$COST$SALT$HASH     the password given to `millstream doors luxun --hash-password` (RFC 7914)
    PASSWORD                  the password, if it does not begin with a name and a colon

Spaces around a form and its value are ignored, as in Luxun. An invalid setting stops the start: taken for a password it
would refuse every administrator.

The comparison takes constant time. A scrypt check costs memory and tens of milliseconds on purpose. It runs in a
thread, one at a time: guessing is slow and delays no other client.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import zlib
from collections.abc import Callable

from millstream.core.errors import StartupError

PREFIX = "scrypt$"
COST = 1 << 14
COST_MAX = 1 << 18
BLOCK, LANES = 8, 1
SALT_BYTES = 16
GIVEN_BYTES_MAX = 1024


_FORM = re.compile(r"\s*([A-Za-z][A-Za-z0-9._-]*)\s*:(.*)", re.DOTALL)


class Password:
    def __init__(self, setting: str) -> None:
        """Raises `StartupError` for a setting that no password could satisfy."""
        self.is_set = bool(setting)
        self._scrypt = _parse(setting) if setting.startswith(PREFIX) else None
        self._digest, self._wanted = _form("" if self._scrypt is not None else setting)
        self._turn = asyncio.Lock()

    async def admits(self, given: str) -> bool:
        if not self.is_set:
            return True
        said = given.encode()
        if len(said) > GIVEN_BYTES_MAX:
            return False
        if self._scrypt is None:
            return hmac.compare_digest(self._digest(said), self._wanted)
        cost, salt, wanted = self._scrypt
        async with self._turn:
            loop = asyncio.get_running_loop()
            return hmac.compare_digest(await loop.run_in_executor(None, _scrypt, said, cost, salt), wanted)


def hash_password(password: str) -> str:
    """The value of the setting that replaces the password."""
    salt = secrets.token_bytes(SALT_BYTES)
    return f"{PREFIX}{COST}${salt.hex()}${_scrypt(password.encode(), COST, salt).hex()}"


def _sha256(password: bytes) -> bytes:
    return hashlib.sha256(password).digest()


def _md5(password: bytes) -> bytes:
    return hashlib.md5(password, usedforsecurity=False).digest()


def _crc32(password: bytes) -> bytes:
    return zlib.crc32(password).to_bytes(4, "big")


def _form(setting: str) -> tuple[Callable[[bytes], bytes], bytes]:
    """The digest function for a given password, and the digest it must have."""
    named = _FORM.fullmatch(setting)
    if named is None:
        return _sha256, _sha256(setting.encode())
    form, value = named[1], named[2].strip()
    if form == "plain" and value:
        return _sha256, _sha256(value.encode())
    if form == "md5" and re.fullmatch(r"[0-9A-Fa-f]{32}", value):
        return _md5, bytes.fromhex(value)
    if form == "crc32" and re.fullmatch(r"[0-9]{1,10}", value) and int(value) < 1 << 32:
        return _crc32, int(value).to_bytes(4, "big")
    if form in ("plain", "md5", "crc32"):
        raise StartupError(
            f"luxun_password: the value after {form}: is not valid; the forms are plain:PASSWORD, md5:HASH (32 "
            "hexadecimal digits) and crc32:NUMBER (decimal, below 2^32)"
        )
    # The name may be part of a secret, so it is not shown.
    raise StartupError(
        "luxun_password has an unknown form before its colon; use plain:, md5: or crc32:. If all of it is the "
        "password, write plain: before it"
    )


def _scrypt(password: bytes, cost: int, salt: bytes) -> bytes:
    return hashlib.scrypt(password, salt=salt, n=cost, r=BLOCK, p=LANES, maxmem=256 * BLOCK * cost, dklen=32)


def _parse(setting: str) -> tuple[int, bytes, bytes]:
    try:
        _, cost, salt, wanted = setting.split("$")
        number = int(cost)
        if not 2 <= number <= COST_MAX or number & (number - 1) or len(bytes.fromhex(wanted)) != 32:
            raise ValueError
        return number, bytes.fromhex(salt), bytes.fromhex(wanted)
    except ValueError:
        raise StartupError(
            "luxun_password is not a valid hash: make one with `millstream doors luxun --hash-password`"
        ) from None
