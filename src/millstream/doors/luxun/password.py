"""The administrator's password: as it is, or hashed as `scrypt$COST$SALT$HASH` (hexadecimal).

Comparing takes the same time wherever the two differ. Checking a hash costs memory and tens of milliseconds on
purpose, so it runs in a thread, one at a time: guessing is slow and costs nobody else.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets

from millstream.errors import StartupError

PREFIX = "scrypt$"
COST = 1 << 14
COST_MAX = 1 << 18
BLOCK, LANES = 8, 1
SALT_BYTES = 16
GIVEN_BYTES_MAX = 1024


class Password:
    def __init__(self, setting: str) -> None:
        """Raises `StartupError` for a hash that cannot be one; an empty setting refuses everybody."""
        self.is_set = bool(setting)
        self._plain = b"" if setting.startswith(PREFIX) else setting.encode()
        self._hashed = _parse(setting) if setting.startswith(PREFIX) else None
        self._turn = asyncio.Lock()

    async def admits(self, given: str) -> bool:
        said = given.encode()
        if not self.is_set or len(said) > GIVEN_BYTES_MAX:
            return False
        if self._hashed is None:
            return hmac.compare_digest(hashlib.sha256(said).digest(), hashlib.sha256(self._plain).digest())
        cost, salt, wanted = self._hashed
        async with self._turn:
            loop = asyncio.get_running_loop()
            return hmac.compare_digest(await loop.run_in_executor(None, _scrypt, said, cost, salt), wanted)


def hash_password(password: str) -> str:
    """What to put into the setting instead of the password."""
    salt = secrets.token_bytes(SALT_BYTES)
    return f"{PREFIX}{COST}${salt.hex()}${_scrypt(password.encode(), COST, salt).hex()}"


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
            "luxun_password is no hash that can be checked: make one with `millstream doors luxun --hash-password`"
        ) from None
