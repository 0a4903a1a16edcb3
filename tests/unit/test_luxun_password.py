"""The password that deletes topics: plain, hashed, or not set."""

from __future__ import annotations

import pytest

from millstream.doors.luxun.password import Password, hash_password
from millstream.errors import StartupError


async def test_a_plain_password_admits_exactly_itself() -> None:
    password = Password("secret ✓")
    assert await password.admits("secret ✓")
    for wrong in ("", "secret", "secret ✓ ", "SECRET ✓", "x" * 5000):
        assert not await password.admits(wrong)


async def test_a_hashed_password_admits_what_was_hashed_and_not_the_hash() -> None:
    hashed = hash_password("secret ✓")
    assert "secret" not in hashed and hash_password("secret ✓") != hashed, "salted"
    assert await Password(hashed).admits("secret ✓")
    assert not await Password(hashed).admits(hashed)
    assert not await Password(hashed).admits("secret")


async def test_without_a_password_nobody_is_admitted() -> None:
    assert not await Password("").admits("")


@pytest.mark.parametrize(
    "setting", ["scrypt$", "scrypt$a$b$c", "scrypt$3$00$" + "00" * 32, "scrypt$1099511627776$00$" + "00" * 32]
)
async def test_a_hash_that_cannot_be_checked_stops_the_start(setting: str) -> None:
    with pytest.raises(StartupError, match="hash-password"):
        Password(setting)
