"""Configuration: precedence, sources, and what is said about a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream.config import FIELDS, Address, Config, check_listeners, configure, doc, load, shown
from millstream.core.errors import StartupError


def with_door(door: str, address: str, allow_unauthenticated: bool = False) -> Config:
    settings: dict[str, Any] = {door: address, "allow_unauthenticated": allow_unauthenticated}
    return Config(**settings)


def write(directory: Path, text: str, name: str = "millstream.toml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def refusal(flags: dict[str, object], environ: dict[str, str], directory: Path) -> str:
    with pytest.raises(StartupError) as caught:
        load(flags, environ, directory)
    return str(caught.value)


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    write(tmp_path, 'kafka = "127.0.0.1:1"\nnode_id = 1\nflush = "os"\n')
    config, sources = load(
        {"kafka": "127.0.0.1:3", "http": None},
        {"MILLSTREAM_KAFKA": "127.0.0.1:2", "MILLSTREAM_NODE_ID": "2", "PATH": "/bin"},
        tmp_path,
    )
    assert (config.kafka, config.node_id, config.flush, config.http) == ("127.0.0.1:3", 2, "os", "127.0.0.1:8092")
    assert sources["kafka"] == "flag --kafka"
    assert sources["node_id"] == "environment MILLSTREAM_NODE_ID"
    assert sources["flush"] == f"file {tmp_path / 'millstream.toml'}"
    assert sources["http"] == "default"
    assert set(sources) == set(FIELDS)


def test_the_file_is_the_named_one_then_the_environments_then_the_local_one(tmp_path: Path) -> None:
    write(tmp_path, "node_id = 1")
    two, three = write(tmp_path, "node_id = 2", "two.toml"), write(tmp_path, "node_id = 3", "three.toml")
    assert load({}, {}, tmp_path)[0].node_id == 1
    assert load({}, {"MILLSTREAM_CONFIG": str(two)}, tmp_path)[0].node_id == 2
    assert load({"config": three}, {"MILLSTREAM_CONFIG": str(two)}, tmp_path)[0].node_id == 3


def test_a_named_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    assert "nowhere.toml cannot be read" in refusal({"config": "nowhere.toml"}, {}, tmp_path)


def test_data_is_short_for_a_file_store(tmp_path: Path) -> None:
    config, sources = load({"data": "here"}, {"MILLSTREAM_STORE": "memory:"}, tmp_path)
    assert config.store == "file:here" and sources["store"] == "flag --data"
    assert load({}, {"MILLSTREAM_DATA": "there"}, tmp_path)[0].store == "file:there"
    assert "--data and flag --store are different stores" in refusal({"data": "a", "store": "memory:"}, {}, tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("retenton_ms = 5", "retenton_ms is not a setting; did you mean retention_ms?"),
        ("zzz = 5", "`millstream config show` lists the settings"),
        ('node_id = "one"', "millstream.toml: node_id must be a whole number, not 'one'"),
        ("node_id = true", "node_id must be a whole number, not true"),
        ("kafka = 9092", "kafka must be a string, not 9092"),
        ("auto_create_topics = 1", "auto_create_topics must be true or false, not 1"),
        ("[kafka]\nport = 1", "kafka must be a string, not a table"),
        ("default_partitions = 0", "default_partitions must be at least 1, not 0"),
        ("segment_bytes = 2147483648", "segment_bytes must be at most 2147483647, not 2147483648"),
        ("retention_ms = 9223372036854775808", "retention_ms must be at most 9223372036854775807"),
        ('log_format = "xml"', "log_format must be one of auto, text, json, not 'xml'"),
        ('flush = "never"', "flush=never is not known"),
        ("node_id = ", "is not valid TOML"),
        pytest.param("node_id = " + "9" * 5000, "its numbers are too long or its tables too deep", id="a long number"),
        pytest.param("node_id = " + "[" * 5000, "its numbers are too long or its tables too deep", id="deep arrays"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_key(tmp_path: Path, text: str, sentence: str) -> None:
    write(tmp_path, text)
    assert sentence in refusal({}, {}, tmp_path)


def test_a_mistake_in_the_environment_is_named_with_its_variable(tmp_path: Path) -> None:
    assert "did you mean MILLSTREAM_KAFKA?" in refusal({}, {"MILLSTREAM_KAFKAS": "x"}, tmp_path)
    assert "MILLSTREAM_NODE_ID must be a whole number" in refusal({}, {"MILLSTREAM_NODE_ID": "x"}, tmp_path)
    assert "must be true or false" in refusal({}, {"MILLSTREAM_AUTO_CREATE_TOPICS": "maybe"}, tmp_path)
    load({}, {"MILLSTREAM_BROKER": "127.0.0.1:9092", "MILLSTREAM_DEBUG": "1"}, tmp_path)


def test_variables_of_a_record_are_no_settings(tmp_path: Path) -> None:
    """A command that `queue consume` runs may start a broker."""
    settings, _ = load({}, {"MILLSTREAM_RECORD_KEY": "k", "MILLSTREAM_RECORD_HEADER_X": "1"}, tmp_path)
    assert settings == Config()


def test_variables_of_a_service_of_the_same_name_are_no_settings(tmp_path: Path) -> None:
    """Kubernetes puts them into every container beside a service that is called millstream, or millstream-kafka."""
    environ = {
        "MILLSTREAM_SERVICE_HOST": "10.0.0.1",
        "MILLSTREAM_SERVICE_PORT": "9092",
        "MILLSTREAM_SERVICE_PORT_KAFKA": "9092",
        "MILLSTREAM_PORT": "tcp://10.0.0.1:9092",
        "MILLSTREAM_PORT_9092_TCP": "tcp://10.0.0.1:9092",
        "MILLSTREAM_PORT_9092_TCP_PROTO": "tcp",
        "MILLSTREAM_PORT_9092_TCP_PORT": "9092",
        "MILLSTREAM_PORT_9092_TCP_ADDR": "10.0.0.1",
        "MILLSTREAM_KAFKA_SERVICE_HOST": "10.0.0.2",
        "MILLSTREAM_KAFKA_PORT": "tcp://10.0.0.2:9092",
    }
    assert load({}, environ, tmp_path)[0] == Config()
    assert "MILLSTREAM_PORT is not a setting" in refusal({}, {"MILLSTREAM_PORT": "9092"}, tmp_path)


def test_a_number_or_an_address_that_no_client_could_use_stops_the_start(tmp_path: Path) -> None:
    assert load({"node_id": 2**31 - 1}, {}, tmp_path)[0].node_id == 2**31 - 1
    assert "--node-id must be at most 2147483647" in refusal({"node_id": 2**31}, {}, tmp_path)
    assert "has no port that clients could connect to" in refusal({"advertise": "broker.example:0"}, {}, tmp_path)


def test_a_program_that_misspells_a_setting_is_told_which_it_means() -> None:
    with pytest.raises(StartupError, match=r"default_partitons is not a setting; did you mean default_partitions\?"):
        configure(default_partitons=4)


def test_booleans_in_the_environment_are_words(tmp_path: Path) -> None:
    for text, value in (("true", True), ("ON", True), ("1", True), ("no", False), ("0", False)):
        assert load({}, {"MILLSTREAM_AUTO_CREATE_TOPICS": text}, tmp_path)[0].auto_create_topics is value


def test_every_field_has_a_sentence_and_numbers_carry_their_unit() -> None:
    for name, field in FIELDS.items():
        assert len(doc(name)) > 10
        if isinstance(field.default, int) and field.default > 1_000_000:
            assert "bytes" in name or "_ms" in name


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9092", ("127.0.0.1", 9092)),
        ("[::1]:0", ("::1", 0)),
        ("broker.example.org:65535", ("broker.example.org", 65535)),
    ],
)
def test_addresses_are_read_and_written_back(text: str, address: tuple[str, int]) -> None:
    assert Address.parse(text) == address
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["9092", ":9092", "host:", "host:x", "host:65536", "::1:9092", "host:-1", "host:²", ""]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match="HOST:PORT"):
        Address.parse(text)
    with pytest.raises(StartupError, match="kafka"):
        Config(kafka=text)


def test_http_can_be_turned_off() -> None:
    assert Config(http="off").http_address is None
    assert Config(http="").http_address is None
    assert Config().http_address == ("127.0.0.1", 8092)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.168.1.7", "broker.example.org"])
def test_a_listener_beyond_loopback_without_authentication_is_refused_until_told(host: str) -> None:
    for door in ("kafka", "http"):
        with pytest.raises(StartupError, match=rf"{door}=.*--allow-unauthenticated"):
            check_listeners(with_door(door, f"{host}:9092"))
        check_listeners(with_door(door, f"{host}:9092", allow_unauthenticated=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "[::1]", "localhost"])
def test_loopback_needs_no_permission(host: str) -> None:
    check_listeners(Config(kafka=f"{host}:0", http=f"{host}:0"))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("off", None),
        ("", None),
        ("127.0.0.1", ("127.0.0.1", 9876)),
        ("localhost", ("localhost", 9876)),
        ("[::1]", ("::1", 9876)),
        ("[::1]:7", ("::1", 7)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
    ],
)
def test_the_flowmq_door_has_its_protocols_port_where_none_is_named(text: str, address: tuple[str, int] | None) -> None:
    assert Config(flowmq=text).door_address("flowmq") == address
    assert Config().door_address("flowmq") is None


def test_a_flowmq_address_is_checked_as_the_others_are(tmp_path: Path) -> None:
    assert "flowmq: ::1 is not HOST:PORT" in refusal({"flowmq": "::1"}, {}, tmp_path)
    assert "flowmq: h:x is not HOST:PORT" in refusal({}, {"MILLSTREAM_FLOWMQ": "h:x"}, tmp_path)
    with pytest.raises(
        StartupError, match=r"flowmq=0\.0\.0\.0:9876 would accept unauthenticated clients from other machines"
    ):
        check_listeners(Config(flowmq="0.0.0.0"))


@pytest.mark.parametrize(
    "text",
    [
        "log.retention.hours = 24\nlog.retention.size = 1000000\n",
        '"log.retention.hours" = 24\n"log.retention.size" = 1000000\n',
    ],
)
def test_luxuns_names_for_retention_are_understood_in_the_file(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    config, sources = load({}, {}, tmp_path)
    assert (config.retention_ms, config.retention_bytes) == (24 * 3600 * 1000, 1_000_000)
    assert sources["retention_ms"] == f"file {tmp_path / 'millstream.toml'}"


def test_luxuns_names_for_retention_are_understood_in_the_environment(tmp_path: Path) -> None:
    write(tmp_path, "retention_ms = 5\n")
    environ = {"MILLSTREAM_LOG_RETENTION_HOURS": "2", "MILLSTREAM_LOG_RETENTION_SIZE": "-1"}
    config, sources = load({}, environ, tmp_path)
    assert (config.retention_ms, config.retention_bytes) == (2 * 3600 * 1000, -1)
    assert sources["retention_ms"] == "environment MILLSTREAM_LOG_RETENTION_HOURS"
    assert sources["retention_bytes"] == "environment MILLSTREAM_LOG_RETENTION_SIZE"
    assert load({}, {"MILLSTREAM_RETENTION_MS": "5"})[1]["retention_ms"] == "environment MILLSTREAM_RETENTION_MS"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("log.retention.hours = 1\nretention_ms = 5\n", "are the same setting"),
        ("log.retention.hours = 1.5\n", "whole number"),
        ("log.retention.size = -2\n", "whole number"),
        ("log.retention.minutes = 1\n", "not a setting"),
        ("log.segment.size = 1\n", "not a setting"),
    ],
)
def test_a_mistake_with_luxuns_names_stops_the_start(tmp_path: Path, text: str, sentence: str) -> None:
    write(tmp_path, text)
    assert sentence in refusal({}, {}, tmp_path)


def test_a_secret_is_not_shown() -> None:
    assert "hidden" not in repr(Config(luxun_password="hidden"))
    assert [shown("luxun_password", value) for value in ("hidden", "")] == ["(set)", ""]


@pytest.mark.parametrize("door", ["flume", "luxun"])
def test_the_other_doors_are_closed_unless_told_and_loopback_only_unless_told(door: str) -> None:
    assert Config().door_address(door) is None
    check_listeners(with_door(door, "127.0.0.1:1"))
    with pytest.raises(StartupError, match=door):
        check_listeners(with_door(door, "0.0.0.0:1"))
    with pytest.raises(StartupError, match=door):
        with_door(door, "nonsense")


COMETS = {
    "COMET_DATA_DIR": "/var/comet",
    "COMET_ADDR": ":6174",
    "COMET_ETCD": "etcd-1:2379,etcd-2:2379",
    "COMET_LOG_LEVEL": "WARN",
    "COMET_BROKER_ID": "broker-1",
    "COMET_ADVERTISE_ADDR": "broker-1:6174",
}


def test_comets_variables_are_settings(tmp_path: Path) -> None:
    config, sources = load({}, {**COMETS, "COMET_API_KEY": "of another program"}, tmp_path)
    assert (config.store, config.comet, config.log_level) == ("file:/var/comet", ":6174", "warning")
    assert config.meta == "etcd://etcd-1:2379,etcd-2:2379"
    assert (config.comet_broker_id, config.comet_advertise) == ("broker-1", "broker-1:6174")
    assert sources["store"] == "environment COMET_DATA_DIR" and sources["meta"] == "environment COMET_ETCD"
    assert load({}, {"COMET_ETCD": "etcd://a:1/prefix"}, tmp_path)[0].meta == "etcd://a:1/prefix"
    assert load({}, dict.fromkeys(COMETS, ""), tmp_path)[0] == Config(), "empty: not set, as in a compose file"
    assert load({"data": "here"}, COMETS, tmp_path)[0].store == "file:here"


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"COMET_LOG_LEVEL": "loud"}, "COMET_LOG_LEVEL must be one of"),
        ({"COMET_ADDR": "nonsense:x"}, "comet: nonsense:x is not HOST:PORT"),
        ({"COMET_ADVERTISE_ADDR": "nonsense:x"}, "comet_advertise: nonsense:x is not HOST:PORT"),
        ({"COMET_ADDR": ":1", "MILLSTREAM_COMET": ":2"}, "COMET_ADDR and MILLSTREAM_COMET are the same setting"),
        ({"COMET_DATA_DIR": "a", "MILLSTREAM_DATA": "b"}, "COMET_DATA_DIR and MILLSTREAM_DATA are the same setting"),
        (
            {"COMET_DATA_DIR": "a", "MILLSTREAM_STORE": "memory:"},
            "environment COMET_DATA_DIR and environment MILLSTREAM_",
        ),
    ],
)
def test_a_mistake_with_comets_variables_stops_the_start(
    tmp_path: Path, environ: dict[str, str], sentence: str
) -> None:
    assert sentence in refusal({}, environ, tmp_path)


def test_a_comet_address_without_a_host_is_loopback_unless_unauthenticated_clients_are_allowed() -> None:
    config = Config(comet=":6174")
    assert config.door_address("comet") == Address("127.0.0.1", 6174)
    check_listeners(config)
    with pytest.raises(StartupError, match=r"comet=0\.0\.0\.0:6174 would accept"):
        check_listeners(Config(comet="0.0.0.0:6174"))
    assert Config().door_address("comet") is None
    assert Config(comet=":6174", allow_unauthenticated=True).door_address("comet") == Address("0.0.0.0", 6174)
    assert Config(comet="127.0.0.1").door_address("comet") == Address("127.0.0.1", 6174)
