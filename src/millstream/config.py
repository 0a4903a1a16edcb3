"""The broker's configuration: one frozen dataclass, filled from four places.

    flags  >  environment MILLSTREAM_<FIELD>  >  TOML file  >  defaults

The file is the one named by `--config`, else by `MILLSTREAM_CONFIG`, else `./millstream.toml` if it is there. It is
flat: a key per field, under the field's own name.

Rules
-----
1. A name that is not known stops the start, with the closest known one in the sentence: a misspelt `retention_ms` must
   not silently keep data for a week.
2. Every value is checked here, once, and is right from then on. Text (environment, flags) is converted; a file has
   types of its own, and a wrong one is named with file and key.
3. `data` is no field: it is the short way to say `store = "file:DIR"`, in all three places.
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

from millstream.errors import StartupError
from millstream.log.config import FlushPolicy

PREFIX = "MILLSTREAM_"
DEFAULT_FILE = "millstream.toml"
NOT_FIELDS = frozenset({"CONFIG", "BROKER", "DEBUG"})
"""Variables with our prefix that are for the command line and not for the broker."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DAY_MS = 24 * 3600 * 1000
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _setting(default: Any, doc: str, *, low: int | None = None, choices: tuple[str, ...] = ()) -> Any:
    return dataclasses.field(default=default, metadata={"doc": doc, "low": low, "choices": choices})


class Address(NamedTuple):
    """Where to listen, or what to tell clients. Port 0 means: a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
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
    kafka: str = _setting("127.0.0.1:9092", "HOST:PORT on which Kafka clients connect; port 0 takes a free one")
    http: str = _setting("127.0.0.1:8092", 'HOST:PORT of /metrics, /healthz and /readyz; "off" closes this door')
    advertise: str = _setting("", "HOST:PORT that clients are told to connect to; empty: the address they came to")
    node_id: int = _setting(1, "this broker's number in the cluster; brokers that share a store need different", low=0)
    lease_ms: int = _setting(
        6_000, "how long after its last sign of life a broker that shares its store counts as gone", low=100
    )
    flush: str = _setting(
        "always", "when an append is synced: always (before the answer), os, every=N, every=Tms or every=N,Tms"
    )
    log_level: str = _setting("info", "least level that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = _setting(
        "auto", "text, json, or auto: text on a terminal, JSON otherwise", choices=("auto", "text", "json")
    )
    allow_unauthenticated: bool = _setting(False, "listen beyond loopback although nobody has to authenticate")
    auto_create_topics: bool = _setting(True, "create a topic when a client first asks for it")
    default_partitions: int = _setting(1, "partitions of a topic whose creator names no number", low=1)
    connections_max: int = _setting(10_000, "connections at a time on the Kafka door; more are closed at once", low=1)
    frame_bytes_max: int = _setting(100 * MIB, "largest request; a larger one costs its connection", low=KIB)
    message_bytes_max: int = _setting(1_048_588, "largest record batch (a topic's max.message.bytes)", low=KIB)
    inflight_bytes_max: int = _setting(
        256 * MIB, "requests and answers in memory, over all connections; at the limit nothing more is read", low=MIB
    )
    partition_unsynced_bytes_max: int = _setting(
        64 * MIB, "bytes of one partition that may wait for a sync; at the limit its producers wait", low=KIB
    )
    partitions_max: int = _setting(20_000, "partitions over all topics", low=1)
    session_timeout_min_ms: int = _setting(1000, "shortest session timeout that a group member may ask for", low=1)
    session_timeout_max_ms: int = _setting(1_800_000, "longest session timeout that a member may ask for", low=1)
    initial_rebalance_delay_ms: int = _setting(0, "how long an empty group waits for more members to join", low=0)
    offsets_retention_ms: int = _setting(7 * DAY_MS, "how long the offsets of an empty group are kept", low=1)
    housekeeping_interval_ms: int = _setting(30_000, "time between two rounds of retention and compaction", low=1)
    segment_bytes: int = _setting(GIB, "default of segment.bytes: size at which a log starts a new file", low=KIB)
    segment_ms: int = _setting(DAY_MS, "default of segment.ms: age at which a log starts a new file", low=1)
    retention_ms: int = _setting(7 * DAY_MS, "default of retention.ms: age at which records go; -1 keeps them", low=-1)
    retention_bytes: int = _setting(-1, "default of retention.bytes, per partition; -1 sets no limit", low=-1)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name), field.name)
        _check_address("kafka", self.kafka)
        if self.http not in ("", "off"):
            _check_address("http", self.http)
        if self.advertise:
            _check_address("advertise", self.advertise)
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
        """None: the door stays closed."""
        return None if self.http in ("", "off") else Address.parse(self.http)

    @property
    def advertised_address(self) -> Address | None:
        return Address.parse(self.advertise) if self.advertise else None

    @property
    def flush_policy(self) -> FlushPolicy:
        return FlushPolicy.parse(self.flush)


FIELDS: dict[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(Config)}


_PASSWORD = re.compile(r"(://[^:@/?#]*):.*@", re.DOTALL)
_PASSWORD_OPTION = re.compile(r"([?&](?:ssl)?password=)[^&]*", re.IGNORECASE)


def without_secrets(url: str) -> str:
    """A store's URL as it may be shown. Where a password was not encoded as it should be, rather more is left out."""
    return _PASSWORD_OPTION.sub(r"\1***", _PASSWORD.sub(r"\1:***@", url))


def doc(name: str) -> str:
    """The sentence about one field, for `config show` and the documentation."""
    return str(FIELDS[name].metadata["doc"])


def load(
    flags: Mapping[str, object], environ: Mapping[str, str], directory: Path | None = None
) -> tuple[Config, dict[str, str]]:
    """The effective configuration, and for each field where its value came from.

    A flag that is None was not given. `config` among the flags names the file; `directory` is where `millstream.toml`
    is looked for (the current one).
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
    take(_read_environment(environ), lambda name: f"environment {PREFIX}{name.upper()}")
    take(_read_flags(given), lambda name: f"flag {_flag(name)}")
    return Config(**values), sources  # type: ignore[arg-type]  # every value was checked against its field


def check_listeners(config: Config) -> None:
    """Refuses to listen beyond this machine while anybody who can connect may read and write everything."""
    if config.allow_unauthenticated:
        return
    for door, address in (("kafka", config.kafka_address), ("http", config.http_address)):
        if address is not None and not address.loopback:
            raise StartupError(
                f"{door}={address} can be reached from other machines and nobody has to authenticate there: listen on "
                f"127.0.0.1:{address.port}, or accept that with --allow-unauthenticated"
            )


def _read_file(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise StartupError(f"{path} cannot be read ({error.strerror}); name another file with --config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is not valid TOML: {error}") from None
    for name, value in table.items():
        field = FIELDS.get(name)
        if field is not None:
            _check(field, value, f"{path}: {name}")
        elif name != "data":
            raise StartupError(f"{path}: {name} is not a setting{_closest(name, FIELDS)}")
        elif not isinstance(value, str):
            raise StartupError(f"{path}: data must be a string, not {_toml_type(value)}")
    return table


def _read_environment(environ: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable[len(PREFIX) :] in NOT_FIELDS:
            continue
        name = variable[len(PREFIX) :].lower()
        if variable != variable.upper() or (name not in FIELDS and name != "data"):
            known = [PREFIX + other.upper() for other in FIELDS]
            raise StartupError(f"the environment variable {variable} is not a setting{_closest(variable, known)}")
        values[name] = text if name == "data" else _convert(FIELDS[name], text, f"the environment variable {variable}")
    return values


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
            raise StartupError(
                f"{source('data')} and {source('store')} contradict: data DIR is store file:DIR, keep one"
            )
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
        with contextlib.suppress(ValueError):  # _check says it better
            value = int(text)
    _check(field, value, where)
    return value


def _check(field: dataclasses.Field[Any], value: object, where: str) -> None:
    wanted = type(field.default)
    if type(value) is not wanted:
        name = {bool: "true or false", int: "a whole number", str: "a string"}[wanted]
        raise StartupError(f"{where} must be {name}, not {_toml_type(value)}")
    low, choices = field.metadata["low"], field.metadata["choices"]
    if isinstance(value, int) and low is not None and value < low:
        raise StartupError(f"{where} must be at least {low}, not {value}")
    if choices and value not in choices:
        raise StartupError(f"{where} must be one of {', '.join(choices)}, not {value!r}")


def _check_address(name: str, text: str) -> None:
    try:
        Address.parse(text)
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
    return f"; did you mean {close[0]}?" if close else "; `millstream config show` lists what there is"
