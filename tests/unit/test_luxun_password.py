"""The password that deletes topics: in Luxun's forms, hashed as we do it, or not set.

The values of `test_luxuns_forms…` are those of Luxun's own `AuthenticationTest`.
"""

from __future__ import annotations

import pytest

from millstream.core.errors import StartupError
from millstream.doors.luxun.password import Password, hash_password


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


async def test_without_a_password_everybody_is_admitted() -> None:
    for given in ("", "luxun", "x" * 5000):
        assert await Password("").admits(given)


@pytest.mark.parametrize(
    "setting",
    [
        "plain:luxun",
        " plain : luxun ",
        "md5: 3a8cb419bf0d34f5fa091ce416627f82",
        "md5:3A8CB419BF0D34F5FA091CE416627F82",
        "crc32: 1688323579",
        "crc32     :  1688323579  ",
    ],
)
async def test_luxuns_forms_admit_the_password_and_not_the_setting(setting: str) -> None:
    password = Password(setting)
    assert password.is_set and await password.admits("luxun")
    for wrong in ("", "hello", "Luxun", setting, setting.partition(":")[2].strip() + " "):
        assert not await password.admits(wrong)


async def test_a_plain_password_may_hold_colons() -> None:
    assert await Password("plain:a:b:c").admits("a:b:c")
    assert await Password("a b: c").admits("a b: c"), "no form has a space in its name"


@pytest.mark.parametrize(
    "setting",
    [
        "plain:",
        "plain: ",
        "md5:",
        "md5:luxun",
        "md5:3a8cb419bf0d34f5fa091ce416627f8",
        "crc32:64a1eb7b",
        "crc32:-1",
        "crc32:4294967296",
        "sha256:3a8cb419",
        "scrypt:16384",
        "MD5:3a8cb419bf0d34f5fa091ce416627f82",
        "hunter2:x",
    ],
)
async def test_a_form_that_does_not_exist_or_has_no_such_value_stops_the_start(setting: str) -> None:
    with pytest.raises(StartupError, match=r"luxun_password.*plain") as refused:
        Password(setting)
    assert "hunter2" not in str(refused.value), "it may be the password"


@pytest.mark.parametrize(
    "setting", ["scrypt$", "scrypt$a$b$c", "scrypt$3$00$" + "00" * 32, "scrypt$1099511627776$00$" + "00" * 32]
)
async def test_a_hash_that_cannot_be_checked_stops_the_start(setting: str) -> None:
    with pytest.raises(StartupError, match="hash-password"):
        Password(setting)
