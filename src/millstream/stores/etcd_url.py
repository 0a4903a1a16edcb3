"""etcd URLs, and the part of them that is safe to show.

    etcd://USER:PASSWORD@HOST:PORT,HOST:PORT/PREFIX          port 2379 and the prefix "millstream" are the defaults
    etcds://HOST:PORT/PREFIX?ca=FILE&cert=FILE&key=FILE      TLS; without `ca`, the system's authorities are trusted
    etcd://HOST/PREFIX?compaction=off                        leaves the compaction of old revisions to etcd

The scheme decides about TLS, as with http and https. Every key of the store begins with `/PREFIX/`. An error never
quotes a part of the URL that may be a password.
"""

from __future__ import annotations

import os
import ssl
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

from millstream.core.errors import StartupError

PORT = 2379
PREFIX = "millstream"
_FORM = "write etcd://USER:PASSWORD@HOST:PORT,HOST:PORT/PREFIX, with special characters percent-encoded"
_TLS_OPTIONS = ("ca", "cert", "key")


class Endpoint(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class EtcdUrl(NamedTuple):
    endpoints: tuple[Endpoint, ...]
    prefix: str
    """The beginning of every key: `/PREFIX/`."""
    user: str
    password: str
    tls: bool
    ca: str
    cert: str
    key: str
    """Files; empty: none."""
    compacts: bool

    @property
    def location(self) -> str:
        """The URL without user, password and options."""
        scheme = "etcds" if self.tls else "etcd"
        return f"{scheme}://{','.join(map(str, self.endpoints))}{self.prefix.rstrip('/')}"


def understand(url: str) -> EtcdUrl:
    scheme, _, rest = url.partition(":")
    if not rest.startswith("//") or "#" in rest:
        raise StartupError(f"the etcd URL cannot be understood: {_FORM}")
    rest, has_options, query = rest[2:].partition("?")
    authority, _, path = rest.partition("/")
    user, password, hosts = _credentials(authority)
    options = _options(query) if has_options else {}
    tls = scheme == "etcds"
    if not tls and (given := [name for name in _TLS_OPTIONS if name in options]):
        raise StartupError(f"the option {given[0]} of the etcd URL is for TLS: write etcds:// instead of etcd://")
    if ("cert" in options) != ("key" in options):
        raise StartupError("the options cert and key of the etcd URL belong together: give both, or none")
    found = EtcdUrl(
        tuple(_endpoint(host) for host in hosts.split(",")),
        _prefix(path),
        user,
        password,
        tls,
        options.get("ca", ""),
        options.get("cert", ""),
        options.get("key", ""),
        options.get("compaction", "on") == "on",
    )
    tls_context(found)  # fails now if a file is missing
    return found


def tls_context(url: EtcdUrl) -> ssl.SSLContext | None:
    """What a plain connection with the URL's TLS options uses; None without TLS."""
    if not url.tls:
        return None
    for name, path in (("ca", url.ca), ("cert", url.cert), ("key", url.key)):
        try:
            if path:
                with open(path, "rb"):
                    pass
        except OSError as error:
            raise StartupError(
                f"the file {path} that {name} of the etcd URL names cannot be read: {os.strerror(error.errno or 0)}"
            ) from None
    try:
        context = ssl.create_default_context(cafile=url.ca or None)
        if url.cert:
            context.load_cert_chain(url.cert, url.key)
    except ssl.SSLError:
        raise StartupError(
            "the files that ca, cert or key of the etcd URL name are not certificates and a key in PEM format"
        ) from None
    context.set_alpn_protocols(["h2"])
    return context


def _credentials(authority: str) -> tuple[str, str, str]:
    """User, password and hosts."""
    credentials, at, hosts = authority.rpartition("@")
    user, colon, password = credentials.partition(":")
    if at and not (user and colon and password):
        raise StartupError(f"the etcd URL has no complete user and password: {_FORM}")
    return unquote(user), unquote(password), hosts


def _endpoint(text: str) -> Endpoint:
    host, bracket, rest = text.rpartition("]")
    if bracket:
        host, colon, port = host.removeprefix("["), rest[:1], rest[1:]
    else:
        host, colon, port = text.partition(":")
    if not host or (rest and bracket and colon != ":"):
        raise StartupError(f"the etcd URL names no host, or an empty one: {_FORM}")
    if not colon:
        return Endpoint(host, PORT)
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise StartupError(f"a port of the etcd URL is not a number from 1 to 65535: {_FORM}")
    return Endpoint(host, int(port))


def _prefix(path: str) -> str:
    name = unquote(path).strip("/") or PREFIX
    if not name.isprintable():
        raise StartupError("the prefix of the etcd URL has characters that cannot be printed")
    return f"/{name}/"


def _options(query: str) -> dict[str, str]:
    try:
        given = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True, strict_parsing=True)
    except ValueError:
        raise StartupError(f"the options of the etcd URL cannot be understood: {_FORM}") from None
    options: dict[str, str] = {}
    for name, value in given:
        if name not in (*_TLS_OPTIONS, "compaction"):
            raise StartupError(
                f"{name} is not an option of the etcd URL: use ca=FILE, cert=FILE, key=FILE or compaction=off"
            )
        if not value or name in options:
            raise StartupError(f"the option {name} of the etcd URL needs one value")
        options[name] = value
    if options.get("compaction", "on") not in ("on", "off"):
        raise StartupError("compaction in the etcd URL is on or off")
    return options
