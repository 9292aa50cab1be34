"""Downloads of images from web addresses, for a server whose operator lists the hosts (`--image-hosts`).

A client chooses the address, so the server must not become its way into a private network.

Invariants: a name is resolved once, and the connection goes to one of the addresses that were checked. No redirect is
followed, no proxy is used, nothing but one GET is sent. One deadline covers connection, TLS, head and body.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from minisgl.images.heads import Bounds, ImageError

_PORTS = {"http": 80, "https": 443}
_PLAIN = re.compile(r"[!#-\[\]_a-z~]{1,8192}", re.IGNORECASE)  # ASCII without quotes, \, ^, ` and braces
_HOST = re.compile(r"[a-z0-9.-]{1,253}")
_CHUNK = 1 << 16  # bytes
_GLOBAL = ipaddress.ip_network("2000::/3")
_SPECIAL = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16")))
"""Networks for protocols and tunnels (Teredo, 6to4), some of which Python's `is_global` takes for public ones."""
Address = tuple[str, int]


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public Internet: neither private nor of this machine, no multicast,
    and no IPv6 address that stands for an IPv4 address."""
    ip = ipaddress.ip_address(address)
    if any(ip in network for network in _SPECIAL) or (ip.version == 6 and ip not in _GLOBAL):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


def resolve(host: str, port: int) -> list[Address]:
    """Return the addresses of a host, each with the port. Raises `OSError`. The system limits how long it takes."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(str(address[0]), int(address[1])) for *_, address in found]


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Downloads images from the listed hosts. `timeout_s` limits each download as a whole. What follows is for tests:
    how names are resolved, which addresses are public, and the certificates that are trusted."""

    hosts: Collection[str]
    timeout_s: float = 10.0
    resolve: Callable[[str, int], list[Address]] = resolve
    is_public: Callable[[str], bool] = is_public
    tls: Callable[[], ssl.SSLContext] = ssl.create_default_context

    def fetch(self, url: str, bounds: Bounds | None = None) -> bytes:
        """Return the bytes behind a URL. Raises `ImageError` if its host is not listed, if one of the host's addresses
        is not public, if the answer is no complete 200 within the bounds, or is late. It blocks."""
        parts, host, port = self._checked(url)
        deadline = time.monotonic() + self.timeout_s
        try:
            addresses = self.resolve(host, port)
            if not addresses or not all(self.is_public(address) for address, _ in addresses):
                raise ImageError(f"image host {host}: its address is not a public one")
            with _connect(addresses, deadline) as plain:
                if parts.scheme == "http":
                    return _get(plain, host, parts, deadline, bounds or Bounds())
                plain.settimeout(_left(deadline))  # of the handshake
                with self.tls().wrap_socket(plain, server_hostname=host) as secure:
                    return _get(secure, host, parts, deadline, bounds or Bounds())
        except ImageError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = isinstance(error, TimeoutError)
            reason = f"no image within {self.timeout_s:g} s" if late else f"{type(error).__name__}: {error}"
            raise ImageError(f"image host {host}: {reason}") from error

    def _checked(self, url: str) -> tuple[SplitResult, str, int]:
        """Return a URL's parts, host and port. Raises `ImageError` if it may not be fetched."""
        try:
            parts = urlsplit(url) if _PLAIN.fullmatch(url) else None
            port = parts and (_PORTS.get(parts.scheme) if parts.port is None else parts.port)
        except ValueError:
            parts = port = None
        host = ((parts and parts.hostname) or "").lower()
        if parts is None or port is None or parts.scheme not in _PORTS or not _HOST.fullmatch(host):
            raise ImageError("the image URL is no valid http or https URL with a host name")
        if "@" in parts.netloc:
            raise ImageError("the image URL has credentials: remove them")
        if host not in map(str.lower, self.hosts):
            raise ImageError(f"image host {host}: it is not one that this server loads from (--image-hosts)")
        if port != _PORTS[parts.scheme]:
            raise ImageError(f"image host {host}: port {port} must be {_PORTS[parts.scheme]} for {parts.scheme}")
        return parts, host, port


class _Timed(io.RawIOBase):
    """A socket's bytes until a deadline: a peer that sends them one by one gains no time."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(_left(self._deadline))
        return self._connection.recv_into(buffer)

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return the file from which an HTTP response is read."""
        return io.BufferedReader(self, _CHUNK)


def _left(deadline: float) -> float:
    """Return the seconds until a deadline. Raises `TimeoutError` if there are none."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def _connect(addresses: list[Address], deadline: float) -> socket.socket:
    """Return a connection to the first of the addresses that accepts one. Raises `OSError`."""
    *others, last = addresses
    for address in others:
        try:
            return socket.create_connection(address, timeout=_left(deadline))
        except OSError:
            continue  # such as an IPv6 address, where there is no IPv6
    return socket.create_connection(last, timeout=_left(deadline))


def _get(connection: socket.socket, host: str, parts: SplitResult, deadline: float, bounds: Bounds) -> bytes:
    """Return the body of the answer to one GET. Raises `ImageError`, `OSError` or `HTTPException`."""
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nAccept: image/*\r\nAccept-Encoding: identity\r\nConnection: close"
    connection.settimeout(_left(deadline))
    connection.sendall(f"{head}\r\nUser-Agent: minisgl\r\n\r\n".encode("ascii"))
    response = http.client.HTTPResponse(_Timed(connection, deadline), method="GET")  # type: ignore[arg-type]
    response.begin()
    if response.status != 200 or response.getheader("Content-Encoding", "identity") != "identity":
        kind = "redirects are not followed" if 300 <= response.status < 400 else "it must be 200, not encoded"
        raise ImageError(f"image host {host}: it answers with status {response.status}: {kind}")
    bounds.check_bytes(response.length or 0)
    body = bytearray()
    while chunk := response.read(_CHUNK):
        body += chunk
        bounds.check_bytes(len(body))
    if response.length or not body:
        raise ImageError(f"image host {host}: the answer ends early, after {len(body)} bytes")
    return bytes(body)
