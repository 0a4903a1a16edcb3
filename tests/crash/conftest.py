"""Fixtures that several crash tests share."""

from tests.crash.store_directory import place as place
