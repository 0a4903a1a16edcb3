"""libpq's PostgreSQL URLs, parsed for asyncpg; and the part that is safe to show.

    postgresql://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=verify-full&sslrootcert=FILE
    postgresql://USER@/DATABASE?host=/var/run/postgresql        a Unix socket: its directory

asyncpg understands the TLS options, password files, services, several hosts and the PG... variables. It passes unknown
options to the server as settings, so options that only concern libpq's own sockets are removed here.
"""

from __future__ import annotations

import os
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from millstream.core.errors import StartupError

CONNECT_SECONDS = 10.0
SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_NOT_FOR_US = {
    "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout", "channel_binding",
    "gssencmode", "sslcompression", "sslsni", "fallback_application_name", "client_encoding",
}  # fmt: skip


class PostgresUrl(NamedTuple):
    dsn: str
    """With the secrets: for the driver only."""
    location: str
    """Without user and password."""
    connect_seconds: float
    """For each host."""
    hosts: tuple[str, ...]
    """One DSN per host, in order. If the hosts are unknown here (a service file), a single DSN."""


def understand(url: str) -> PostgresUrl:
    mistake = StartupError(
        "the PostgreSQL URL cannot be understood: write postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with special "
        "characters of the password percent-encoded"
    )
    try:
        parts = urlsplit(url)
        query = parts.query.replace("+", "%2B")  # a plus is literal in libpq; only web forms read it as a space
        options = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise mistake from None  # its text may hold a part of the password
    if parts.scheme not in ("postgresql", "postgres") or parts.fragment or not url.partition(":")[2].startswith("//"):
        raise mistake
    hosts = parts.netloc.rpartition("@")[2]
    for host in hosts.split(","):
        _, colon, port = host.rpartition("]")[2].rpartition(":")
        if colon and not port.isdigit():
            raise mistake
    seconds = CONNECT_SECONDS
    for name, value in options:
        if name == "connect_timeout":
            if not value.isdigit():
                raise StartupError("connect_timeout in the PostgreSQL URL must be a number of seconds")
            seconds = float(value) or CONNECT_SECONDS
        if name == "sslmode" and value not in SSL_MODES:
            raise StartupError(f"sslmode={value} in the PostgreSQL URL is not one of {', '.join(SSL_MODES)}")
    kept = [(name, value) for name, value in options if name not in _NOT_FOR_US and name != "connect_timeout"]
    where = dict(options)
    is_said = "target_session_attrs" in where or "PGTARGETSESSIONATTRS" in os.environ
    if "," in (hosts or where.get("host") or _from_environment(where)) and not is_said:
        kept.append(("target_session_attrs", "read-write"))  # the first host may be a replica
    dsn = urlunsplit(("postgresql", parts.netloc, parts.path, urlencode(kept), ""))
    place = hosts or where.get("host", "") or "localhost"
    if where.get("port") and not hosts:
        place += f":{where['port']}"
    location = f"postgresql://{place}/{parts.path.lstrip('/') or where.get('dbname', '')}"
    return PostgresUrl(dsn, location, seconds, _one_by_one(dsn))


def _from_environment(options: dict[str, str]) -> str:
    """The hosts of a URL that names none."""
    has_service = "service" in options or "PGSERVICE" in os.environ
    return "" if has_service else os.environ.get("PGHOST", "")


def _one_by_one(dsn: str) -> tuple[str, ...]:
    """asyncpg has one timeout for all hosts together: a silent host would use it up for the rest."""
    parts = urlsplit(dsn)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    user, at, named = parts.netloc.rpartition("@")
    hosts = (named or options.get("host") or _from_environment(options)).split(",")
    listed = "" if named else options.get("port")  # as in asyncpg
    ports = (listed or os.environ.get("PGPORT", "")).split(",")
    prefers = options.get("target_session_attrs", os.environ.get("PGTARGETSESSIONATTRS"))
    if len(hosts) == 1 or prefers == "prefer-standby" or len(ports) not in (1, len(hosts)):
        return (dsn,)
    found = []
    for index, host in enumerate(hosts):
        own = {**options} if named else {**options, "host": host}
        place = f"{user}{at}{host}" if named else parts.netloc
        if len(ports) > 1:  # without a port option, asyncpg would match all of PGPORT against one host
            _, colon, port = host.rpartition("]")[2].partition(":")
            own["host"] = unquote(host.removesuffix(colon + port)) if named else host
            own["port"] = ports[index] if listed or not port or host.startswith("/") else port
            place = user + at
        found.append(urlunsplit((parts.scheme, place, parts.path, urlencode(own), "")))
    return tuple(found)
