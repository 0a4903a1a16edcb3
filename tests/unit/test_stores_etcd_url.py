"""etcd URLs: what they mean, and one sentence for each that is wrong, without its secrets."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from millstream.config import without_secrets
from millstream.core.errors import StartupError
from millstream.stores.etcd_url import Endpoint, tls_context, understand
from millstream.stores.url import open_meta
from millstream.testing.clock import VirtualClock

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "endpoints", "prefix"),
    [
        ("etcd://one", [("one", 2379)], "/millstream/"),
        ("etcd://one/", [("one", 2379)], "/millstream/"),
        ("etcd://one:1,two:2,10.0.0.3/a/b/", [("one", 1), ("two", 2), ("10.0.0.3", 2379)], "/a/b/"),
        ("etcd://[::1]:5,[::2]/x", [("::1", 5), ("::2", 2379)], "/x/"),
        ("etcds://one/caf%C3%A9?compaction=off", [("one", 2379)], "/café/"),
    ],
)
def test_names_endpoints_and_a_prefix(url: str, endpoints: list[tuple[str, int]], prefix: str) -> None:
    found = understand(url)
    assert found.endpoints == tuple(Endpoint(*each) for each in endpoints) and found.prefix == prefix
    assert found.tls == url.startswith("etcds:") and found.compacts == ("compaction" not in url)


def test_user_and_password_are_decoded_and_never_shown() -> None:
    url = "etcd://m%C3%A9:hunter%2F2@one,[::1]/app"
    found = understand(url)
    assert (found.user, found.password) == ("mé", "hunter/2")
    assert found.location == "etcd://one:2379,[::1]:2379/app"
    assert without_secrets(url) == "etcd://m%C3%A9:***@one,[::1]/app"


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("etcd:host", "cannot be understood"),
        ("etcd:/host", "cannot be understood"),
        ("etcd://host/x#hunter2", "cannot be understood"),
        ("etcd://", "names no host"),
        ("etcd:///prefix", "names no host"),
        ("etcd://one,,two", "names no host"),
        ("etcd://me:hunter2@/prefix", "names no host"),
        ("etcd://[::1]x:1", "names no host"),
        ("etcd://host:", "not a number from 1 to 65535"),
        ("etcd://host:0", "not a number from 1 to 65535"),
        ("etcd://host:70000", "not a number from 1 to 65535"),
        ("etcd://me@host:hunter2", "no complete user and password"),
        ("etcd://me@host", "no complete user and password"),
        ("etcd://:hunter2@host", "no complete user and password"),
        ("etcd://me:hunter2/x@host", "not a number from 1 to 65535"),
        ("etcd://host/a%0Ab", "cannot be printed"),
        ("etcd://host?hunter2", "options of the etcd URL cannot be understood"),
        ("etcd://host?tls=1", "tls is not an option of the etcd URL: use ca=FILE, "),
        ("etcd://host?ca=x", "write etcds:// instead of etcd://"),
        ("etcds://host?ca=", "the option ca of the etcd URL needs one value"),
        ("etcds://host?ca=a&ca=b", "the option ca of the etcd URL needs one value"),
        ("etcds://host?cert=x", "belong together"),
        ("etcds://host?ca=/no/such/file", "/no/such/file that ca of the etcd URL names cannot be read: No such file"),
        ("etcds://host?ca=/dev/null", "not certificates and a key in PEM format"),
        ("etcd://host?compaction=maybe", "compaction in the etcd URL is on or off"),
    ],
)
def test_a_wrong_one_is_one_sentence_without_secrets(url: str, sentence: str) -> None:
    with pytest.raises(StartupError) as caught:
        understand(url)
    text = str(caught.value)
    assert sentence in text and SECRET not in text and "\n" not in text


def test_tls_options_name_an_authority_and_a_client_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own = authority.issue_cert("client@example.org")
    own.private_key_pem.write_to_path(tmp_path / "key.pem")
    own.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    options = f"ca={tmp_path}/ca.pem&cert={tmp_path}/cert.pem&key={tmp_path}/key.pem"
    found = understand(f"etcds://host?{options}")
    context = tls_context(found)
    assert context is not None and context.verify_mode is ssl.CERT_REQUIRED and len(context.get_ca_certs()) == 1


def test_a_missing_library_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("millstream.stores.etcd")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(StartupError, match=r"pip install 'millstream\[etcd\]'"):
        open_meta("etcd://localhost", VirtualClock())


def test_a_broker_without_etcd_does_not_import_its_libraries() -> None:
    script = "import sys, millstream.server, millstream.stores.url; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
