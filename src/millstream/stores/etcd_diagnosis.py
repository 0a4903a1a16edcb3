"""Why no etcd answers, for the error at start. gRPC reports every such failure as UNAVAILABLE.

Each endpoint is tried with plain sockets: does it accept, does it speak TLS, does it speak HTTP/2?
"""

from __future__ import annotations

import asyncio
import ssl

from millstream.stores.etcd_url import Endpoint, EtcdUrl, tls_context

SECONDS = 1.0
"""For one exchange; there are at most two for an endpoint."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The preface of an HTTP/2 connection and empty SETTINGS (RFC 9113, 3.4)."""
_FRAME_TYPE, _SETTINGS = 3, 4


async def diagnose(url: EtcdUrl) -> str:
    """One sentence for all endpoints."""
    found = await asyncio.gather(*(_look_at(endpoint, url) for endpoint in url.endpoints))
    return "; ".join(f"{endpoint} {text}" for endpoint, text in zip(url.endpoints, found, strict=True))


async def _look_at(endpoint: Endpoint, url: EtcdUrl) -> str:
    try:
        answer = await _greet(endpoint, tls_context(url))
    except ssl.SSLCertVerificationError as error:
        reason = error.verify_message.rstrip(".")
        return f"has a certificate that is not trusted ({reason}): name its authority with ?ca=FILE"
    except (ssl.SSLError, ConnectionResetError) as error:
        if not url.tls:
            answer = b""
        elif "CERTIFICATE_REQUIRED" in str(error) or "BAD_CERTIFICATE" in str(error):
            return "asks for a client certificate: name one with ?cert=FILE&key=FILE"
        else:
            return "does not speak TLS: write etcd:// instead of etcds://"
    except TimeoutError:
        return "does not answer: check the address, and that etcd runs there"
    except OSError as error:
        return f"cannot be reached ({error.strerror or error}): start etcd, or correct the address"
    if len(answer) > _FRAME_TYPE and answer[_FRAME_TYPE] == _SETTINGS:
        return "speaks HTTP/2 but does not answer as etcd: check that most members of its cluster are running"
    if not url.tls and await _speaks_tls(endpoint):
        return "speaks TLS: write etcds:// instead of etcd://"
    return "is not etcd: correct the address"


async def _greet(endpoint: Endpoint, context: ssl.SSLContext | None) -> bytes:
    """The first bytes of the server's answer to an HTTP/2 client; empty if it hangs up."""
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection(*endpoint, ssl=context)
        try:
            writer.write(_GREETING)
            return await reader.read(9)
        finally:
            writer.transport.abort()


async def _speaks_tls(endpoint: Endpoint) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        await _greet(endpoint, context)
    except ssl.SSLError as error:
        return "ALERT" in str(error)  # it wants a client certificate
    except (OSError, TimeoutError):
        return False
    return True
