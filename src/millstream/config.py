"""The broker's configuration: one frozen dataclass, filled from four places.

    flags  >  environment MILLSTREAM_<FIELD>  >  TOML file  >  defaults

`--config` names the file, else `MILLSTREAM_CONFIG`, else it is `./millstream.toml` if that exists. It is flat: one key
per field, with the field's name.

Rules
-----
1. An unknown name stops the start, and the error suggests the closest known one: a misspelt `retention_ms` must not
   silently keep data for a week.
2. Every value is checked here, once, and is valid from then on. Text (environment, flags) is converted. A file has its
   own types; the error for a wrong type names file and key.
3. `data` is no field: it is short for `store = "file:DIR"`, in all three places.
4. The file and the environment accept Luxun's names for two settings, which are no fields either:
   `log.retention.hours` is `retention_ms`, `log.retention.size` is `retention_bytes`.
5. The environment accepts Comet's six variables (`COMET`), as `millstream comet` accepts its flags. An empty one counts
   as not set. Other variables that begin with COMET_ belong to other programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import ipaddress
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from millstream.core.errors import StartupError
from millstream.log.config import FlushPolicy

PREFIX = "MILLSTREAM_"
DEFAULT_FILE = "millstream.toml"
NOT_FIELDS = frozenset({"CONFIG", "BROKER", "DEBUG", "PURE"})
"""Variables with our prefix for the command line or the choice of a kernel, not for the broker."""
RECORD_PREFIX = "MILLSTREAM_RECORD_"
"""Variables that `queue consume` sets for its commands; such a command may start a broker."""
_SERVICE = re.compile(
    r"MILLSTREAM_(?:[A-Z0-9_]+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT_[0-9]+_(?:TCP|UDP|SCTP)(?:_[A-Z]+)?)"
)
_SERVICE_PORT = re.compile(r"MILLSTREAM_(?:[A-Z0-9_]+_)?PORT")
_SERVICE_URL = re.compile(r"(?:tcp|udp|sctp)://")
"""Variables that Kubernetes and container links set in every container beside a service whose name begins with
`millstream`: MILLSTREAM_SERVICE_HOST, MILLSTREAM_PORT=tcp://10.0.0.1:9092, MILLSTREAM_PORT_9092_TCP_ADDR.
"""
INT_MAX, LONG_MAX = (1 << 31) - 1, (1 << 63) - 1
"""Kafka's protocol has 32 bits for node ids and sizes, and 64 for times and the bytes of a partition."""

HOUR_MS = 3600 * 1000
ALIASES = {"log.retention.hours": ("retention_ms", HOUR_MS), "log.retention.size": ("retention_bytes", 1)}
"""Luxun's names: the field of each, and its unit in that field."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DAY_MS = 24 * HOUR_MS
COMET = {
    "DATA_DIR": "data",
    "ADDR": "comet",
    "ETCD": "meta",
    "LOG_LEVEL": "log_level",
    "BROKER_ID": "comet_broker_id",
    "ADVERTISE_ADDR": "comet_advertise",
}
"""Comet's variables without their prefix, which are also its flags: the setting of each."""
COMET_PREFIX = "COMET_"
DOOR_PORTS: dict[str, int | None] = {"flowmq": 9876, "flume": None, "luxun": None, "comet": 6174}
"""Doors that stay closed without an address, with the default port of their protocol. Flume's and Luxun's is Kafka's,
which is taken.
"""
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _setting(
    default: Any,
    doc: str,
    *,
    low: int | None = None,
    high: int | None = None,
    choices: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    metadata = {"doc": doc, "low": low, "high": high, "choices": choices, "secret": secret}
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


class Address(NamedTuple):
    """An address to listen on, or to advertise. Port 0: any free port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, default_port: int | None = None) -> Address:
        """With a default port, the port is optional."""
        if default_port is not None and (text.endswith("]") or ":" not in text):
            text = f"{text}:{default_port}"
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise StartupError(f"{text} is not HOST:PORT: write an IPv6 address in brackets, as in [::1]:9092")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise StartupError(f"{text} is not HOST:PORT, as in 127.0.0.1:9092 (port 0 takes a free one)")
        return cls(host, int(port))

    @property
    def loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Config:
    store: str = _setting(
        "file:millstream-data",
        "where logs and metadata live: file:DIR, sqlite:FILE, postgresql://… or memory:; `data = DIR` is short for "
        "file:DIR",
    )
    meta: str = _setting(
        "", "where metadata live if not with the logs, for logs in file:DIR: sqlite:FILE, postgresql://… or etcd://…"
    )
    kafka: str = _setting("127.0.0.1:9092", "HOST:PORT on which Kafka clients connect; port 0 takes a free one")
    http: str = _setting(
        "127.0.0.1:8092", 'HOST:PORT of /metrics, /healthz, /readyz and /queues; "off" closes this door'
    )
    http_hosts: str = _setting(
        "", "more host names, comma-separated, that requests for these pages may send as Host; * allows all"
    )
    flowmq: str = _setting("off", 'HOST:PORT on which FlowMQ clients connect (HOST alone: port 9876), or "off"')
    flume: str = _setting("off", 'HOST:PORT on which Flume clients connect, or "off"')
    luxun: str = _setting("off", 'HOST:PORT on which Luxun clients (Thrift) connect, or "off"')
    comet: str = _setting(
        "off",
        'HOST:PORT on which Comet clients (gRPC) connect (HOST alone: port 6174), or "off"; :PORT is 127.0.0.1:PORT, '
        "with allow_unauthenticated 0.0.0.0:PORT",
    )
    comet_broker_id: str = _setting(
        "", "id of this broker for Comet clients; empty: the last one that was set, or the node id"
    )
    comet_advertise: str = _setting(
        "",
        "HOST:PORT that Comet clients are given, or :PORT for the host that they know; empty: the host of advertise "
        "with the door's port, or the door's address",
    )
    advertise: str = _setting(
        "", "HOST:PORT that the broker advertises to clients; empty: the address they connected to"
    )
    node_id: int = _setting(1, "this broker's node id; each broker of a store needs its own", low=0, high=INT_MAX)
    lease_ms: int = _setting(
        6_000, "time without a heartbeat after which the brokers of a store remove another one", low=100
    )
    flush: str = _setting(
        "always", "when an append is synced: always (before the answer), os, every=N, every=Tms or every=N,Tms"
    )
    log_level: str = _setting("info", "minimum level that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = _setting(
        "auto", "text, json, or auto: text on a terminal, JSON otherwise", choices=("auto", "text", "json")
    )
    allow_unauthenticated: bool = _setting(False, "accept unauthenticated clients from other machines")
    auto_create_topics: bool = _setting(True, "create a topic when a client first asks for it")
    default_partitions: int = _setting(1, "partitions of a topic that is created without a number", low=1)
    flume_partitions: int = _setting(3, "partitions of a topic that a Flume client's first record creates", low=1)
    luxun_password: str = _setting(
        "",
        "password for deleteTopic: plain:PASSWORD, md5:HASH, crc32:NUMBER, or a hash from `millstream doors luxun "
        "--hash-password`; empty: every Luxun client may delete topics",
        secret=True,
    )
    connections_max: int = _setting(
        10_000, "limit of connections per door; above it the peer with most loses its longest idle one", low=1
    )
    connections_per_peer_max: int = _setting(
        0,
        "limit of connections per door and address (IPv6: /64); 0: half of connections_max, all of it for loopback",
        low=0,
    )
    frame_bytes_max: int = _setting(100 * MIB, "largest request; a larger one ends its connection", low=KIB)
    message_bytes_max: int = _setting(
        1_048_588, "largest record batch (a topic's max.message.bytes)", low=KIB, high=INT_MAX
    )
    flowmq_unacknowledged_max: int = _setting(100, "limit of unacknowledged messages per FlowMQ subscriber", low=1)
    inflight_bytes_max: int = _setting(
        256 * MIB, "limit of requests and answers in memory; at the limit the broker stops reading", low=MIB
    )
    partition_unsynced_bytes_max: int = _setting(
        64 * MIB, "limit of unsynced bytes per partition; at the limit its producers wait", low=KIB
    )
    partitions_max: int = _setting(20_000, "limit of partitions, over all topics", low=1)
    groups_max: int = _setting(10_000, "limit of groups, queues included", low=1)
    groups_per_peer_max: int = _setting(
        0, "limit of groups that one address may create; 0: half of groups_max, all of it for loopback", low=0
    )
    session_timeout_min_ms: int = _setting(1000, "shortest session timeout that a group member may ask for", low=1)
    session_timeout_max_ms: int = _setting(1_800_000, "longest session timeout that a member may ask for", low=1)
    initial_rebalance_delay_ms: int = _setting(0, "how long an empty group waits for more members to join", low=0)
    group_consumer_migration_policy: str = _setting(
        "bidirectional",
        "which changes of protocol, classic or consumer, a group with members may make",
        choices=("bidirectional", "upgrade", "downgrade", "disabled"),
    )
    offsets_retention_ms: int = _setting(7 * DAY_MS, "how long the offsets of an empty group are kept", low=1)
    housekeeping_interval_ms: int = _setting(30_000, "interval between rounds of retention and compaction", low=1)
    scrub_bytes_per_second: int = _setting(
        MIB, "rate at which the scrub verifies stored batches, in one round a day; 0 turns it off", low=0
    )
    loop_watch_ms: int = _setting(
        100, "interval of the check for a blocked event loop; each check wakes the process", low=10
    )
    segment_bytes: int = _setting(
        GIB, "default of segment.bytes: size at which a log starts a new file", low=KIB, high=INT_MAX
    )
    segment_ms: int = _setting(
        DAY_MS, "default of segment.ms: age at which a log starts a new file", low=1, high=LONG_MAX
    )
    retention_ms: int = _setting(
        7 * DAY_MS, "default of retention.ms: age at which records are deleted; -1 keeps them", low=-1, high=LONG_MAX
    )
    retention_bytes: int = _setting(
        -1, "default of retention.bytes, per partition; -1 sets no limit", low=-1, high=LONG_MAX
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name), field.name)
        _check_address("kafka", self.kafka)
        if self.http not in ("", "off"):
            _check_address("http", self.http)
        for door, port in DOOR_PORTS.items():
            if getattr(self, door) not in ("", "off"):
                _check_address(door, self._address_of(door), port)
        if self.comet_advertise:
            _check_address("comet_advertise", _with_host(self.comet_advertise, "localhost"), DOOR_PORTS["comet"])
        if self.advertise:
            _check_address("advertise", self.advertise)
            if not Address.parse(self.advertise).port:
                raise StartupError(f"advertise: {self.advertise} has no port that clients could connect to; name it")
        FlushPolicy.parse(self.flush)
        if self.store == "file:" or not self.store:
            raise StartupError("store names no directory: use file:DIR, sqlite:FILE, postgresql://… or memory:")
        if self.store == "sqlite:":
            raise StartupError("store names no file: use sqlite:FILE")
        if self.session_timeout_min_ms > self.session_timeout_max_ms:
            raise StartupError("session_timeout_min_ms is larger than session_timeout_max_ms; exchange them")

    @property
    def kafka_address(self) -> Address:
        return Address.parse(self.kafka)

    @property
    def http_address(self) -> Address | None:
        """None: the door is closed."""
        return None if self.http in ("", "off") else Address.parse(self.http)

    def door_address(self, door: str) -> Address | None:
        """Of a door in `DOOR_PORTS`; None: it is closed."""
        text = self._address_of(door)
        return None if text in ("", "off") else Address.parse(text, DOOR_PORTS[door])

    def _address_of(self, door: str) -> str:
        """Comet's own form of an address has no host."""
        text: str = getattr(self, door)
        return _with_host(text, "0.0.0.0" if self.allow_unauthenticated else "127.0.0.1") if door == "comet" else text

    @property
    def advertised_address(self) -> Address | None:
        return Address.parse(self.advertise) if self.advertise else None


FIELDS: dict[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(Config)}


def shown(name: str, value: object) -> object:
    """A value safe to print: for a secret, only whether it is set."""
    return "(set)" if FIELDS[name].metadata["secret"] and value else value


_PASSWORD = re.compile(r"(://[^:@/?#]*):.*@", re.DOTALL)
_PASSWORD_OPTION = re.compile(r"((?:^|[?&\s])(?:ssl)?password\s*=)[^&]*", re.IGNORECASE)
"""In a URL, or in libpq's key=value form, which a user may try here."""


def without_secrets(url: str) -> str:
    """A store's URL, safe to show. If a password is not percent-encoded, more than the password is masked."""
    return _PASSWORD_OPTION.sub(r"\1***", _PASSWORD.sub(r"\1:***@", url))


def configure(**settings: Any) -> Config:
    """A configuration from keyword arguments: as `Config`, but an unknown setting is a `StartupError`."""
    for name in settings:
        if name not in FIELDS:
            raise StartupError(f"{name} is not a setting{_closest(name, FIELDS)}")
    return Config(**settings)


def doc(name: str) -> str:
    """The description of one field, for `config show` and the documentation."""
    return str(FIELDS[name].metadata["doc"])


def load(
    flags: Mapping[str, object], environ: Mapping[str, str], directory: Path | None = None
) -> tuple[Config, dict[str, str]]:
    """The effective configuration, and the source of each field's value.

    A flag that is None was not given. The flag `config` names the file; `directory` (default: the current one) is
    searched for `millstream.toml`.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    file = given.pop("config", None) or environ.get(PREFIX + "CONFIG") or None
    values: dict[str, object] = {}
    sources = dict.fromkeys(FIELDS, "default")

    def take(layer: Mapping[str, object], source: Callable[[str], str]) -> None:
        for name, value in _expand_data(layer, source).items():
            values[name] = value
            sources[name] = source("data" if name == "store" and "data" in layer else name)

    path, must_exist = (Path(str(file)), True) if file else ((directory or Path()) / DEFAULT_FILE, False)
    if must_exist or path.is_file():
        take(_read_file(path), lambda name: f"file {path}")
    take(_read_environment(environ), lambda name: f"environment {_variable(name, environ)}")
    take(_read_flags(given), lambda name: f"flag {_flag(name)}")
    return Config(**values), sources  # type: ignore[arg-type]  # every value was checked against its field


def check_listeners(config: Config) -> None:
    """Refuses to listen beyond this machine, because any client may read and write everything."""
    if config.allow_unauthenticated:
        return
    others = [(door, config.door_address(door)) for door in DOOR_PORTS]
    for door, address in (("kafka", config.kafka_address), ("http", config.http_address), *others):
        if address is not None and not address.loopback:
            raise StartupError(
                f"{door}={address} would accept unauthenticated clients from other machines: listen on "
                f"127.0.0.1:{address.port}, or allow it with --allow-unauthenticated"
            )


def _read_file(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise StartupError(f"{path} cannot be read ({error.strerror}); name another file with --config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is not valid TOML: {error}") from None
    except (ValueError, RecursionError):
        raise StartupError(f"{path} cannot be read: its numbers are too long or its tables too deep") from None
    table = _take_aliases(table, f"{path}: ")
    for name, value in table.items():
        field = FIELDS.get(name)
        if field is not None:
            _check(field, value, f"{path}: {name}")
        elif name != "data":
            raise StartupError(f"{path}: {name} is not a setting{_closest(name, FIELDS)}")
        elif not isinstance(value, str):
            raise StartupError(f"{path}: data must be a string, not {_toml_type(value)}")
    return table


def _take_aliases(table: Mapping[str, object], where: str) -> dict[str, object]:
    """Renames aliases to our settings. TOML reads a dotted name as nested tables."""
    values = dict(table)
    log = values.get("log")
    retention = log.get("retention") if isinstance(log, dict) and set(log) == {"retention"} else None
    if isinstance(retention, dict):
        del values["log"]
        values.update({f"log.retention.{name}": value for name, value in retention.items()})
    for alias, (name, unit) in ALIASES.items():
        if alias not in values:
            continue
        value = values.pop(alias)
        if name in values:
            raise StartupError(f"{where}{alias} and {name} are the same setting: keep one")
        if type(value) is not int or value < -1:
            raise StartupError(f"{where}{alias} must be a whole number, or -1 for no limit, not {_toml_type(value)}")
        values[name] = value * unit if value >= 0 else value
    return values


def _read_environment(environ: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    aliases = {PREFIX + alias.replace(".", "_").upper(): alias for alias in ALIASES}
    comet = {name: environ.get(COMET_PREFIX + name) for name in COMET}
    values.update(comet_settings(comet, lambda name: f"the environment variable {COMET_PREFIX}{name}"))
    for variable, text in sorted(environ.items()):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in NOT_FIELDS or variable.startswith(RECORD_PREFIX) or _is_service(variable, text):
            continue
        if variable in aliases:
            with contextlib.suppress(ValueError):  # _take_aliases reports it
                text = int(text)  # type: ignore[assignment]
            values[aliases[variable]] = text
            continue
        name = name.lower()
        if variable != variable.upper() or (name not in FIELDS and name != "data"):
            known = [PREFIX + other.upper() for other in FIELDS]
            raise StartupError(f"the environment variable {variable} is not a setting{_closest(variable, known)}")
        if name in values:
            raise StartupError(f"{_comet_variable(name)} and {variable} are the same setting: keep one")
        values[name] = text if name == "data" else _convert(FIELDS[name], text, f"the environment variable {variable}")
    return _take_aliases(values, "the environment: ")


def comet_settings(given: Mapping[str, str | None], source: Callable[[str], str]) -> dict[str, object]:
    """Our settings for Comet's, by the names of `COMET`; `source` names one of these for an error."""
    values: dict[str, object] = {}
    for name, text in given.items():
        if not text:
            continue
        setting = COMET[name]
        if name == "ETCD":
            text = text if text.startswith("etcd://") else f"etcd://{text}"
        elif name == "LOG_LEVEL":
            text = {"warn": "warning"}.get(text.lower(), text.lower())
        values[setting] = text if setting == "data" else _convert(FIELDS[setting], text, source(name))
    return values


def _comet_variable(setting: str) -> str:
    return COMET_PREFIX + next(name for name, each in COMET.items() if each == setting)


def _with_host(text: str, host: str) -> str:
    return host + text if text.startswith(":") else text


def _is_service(variable: str, text: str) -> bool:
    """A *_PORT variable is one only with a URL: MILLSTREAM_PORT=9092 is a mistake, and stops the start."""
    if _SERVICE.fullmatch(variable):
        return True
    return _SERVICE_PORT.fullmatch(variable) is not None and _SERVICE_URL.match(text) is not None


def _variable(name: str, environ: Mapping[str, str]) -> str:
    """The variable that set a setting: its own, or that of an alias."""
    others = [PREFIX + alias.replace(".", "_").upper() for alias, (field, _) in ALIASES.items() if field == name]
    others += [
        COMET_PREFIX + each for each, field in COMET.items() if field == name and environ.get(COMET_PREFIX + each)
    ]
    return next((other for other in others if other in environ), PREFIX + name.upper())


def _read_flags(flags: Mapping[str, object]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, value in flags.items():
        flag = _flag(name)
        if name not in FIELDS and name != "data":
            raise StartupError(f"{flag} is not a setting{_closest(name, FIELDS)}")
        if isinstance(value, str) and name != "data":
            value = _convert(FIELDS[name], value, flag)
        elif name != "data":
            _check(FIELDS[name], value, flag)
        values[name] = value
    return values


def _expand_data(layer: Mapping[str, object], source: Callable[[str], str]) -> dict[str, object]:
    values = dict(layer)
    if "data" in values:
        if "store" in values:
            raise StartupError(f"{source('data')} and {source('store')} are different stores: keep one")
        if not values["data"]:
            raise StartupError(f"{source('data')} names no directory; name one, or leave it out")
        values["store"] = f"file:{values.pop('data')}"
    return values


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _convert(field: dataclasses.Field[Any], text: str, where: str) -> object:
    value: object = text
    if isinstance(field.default, bool):
        value = BOOLEANS.get(text.strip().lower(), text)
    elif isinstance(field.default, int):
        with contextlib.suppress(ValueError):  # _check reports it
            value = int(text)
    _check(field, value, where)
    return value


def _check(field: dataclasses.Field[Any], value: object, where: str) -> None:
    wanted = type(field.default)
    if type(value) is not wanted:
        name = {bool: "true or false", int: "a whole number", str: "a string"}[wanted]
        raise StartupError(f"{where} must be {name}, not {_toml_type(value)}")
    low, high, choices = field.metadata["low"], field.metadata["high"], field.metadata["choices"]
    if isinstance(value, int) and low is not None and value < low:
        raise StartupError(f"{where} must be at least {low}, not {value}")
    if isinstance(value, int) and high is not None and value > high:
        raise StartupError(f"{where} must be at most {high}, not {value}")
    if choices and value not in choices:
        raise StartupError(f"{where} must be one of {', '.join(choices)}, not {value!r}")


def _check_address(name: str, text: str, default_port: int | None = None) -> None:
    try:
        Address.parse(text, default_port)
    except StartupError as error:
        raise StartupError(f"{name}: {error}") from None


def _toml_type(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "an array"
    return repr(value)


def _closest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "; `millstream config show` lists the settings"
