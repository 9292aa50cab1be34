"""Checks of a request's headers against web pages of other origins (CORS, DNS rebinding).

Invariants: a web page in a browser must not misuse a server that listens on the same machine: a page of another origin
gets a response only if its origin is allowed, and may embed nothing of the server (403); a body type that a page could
send without a preflight is refused (415); a server on loopback refuses host names that a foreign DNS server may point
at it (403).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping

from starlette.responses import Response

from minisgl.config import ServerConfig
from minisgl.server.core.errors import FILES, ApiError, is_ollama

ANY = "*"
FORM = "multipart/form-data"  # type of file uploads
UNASKED = (FORM, "application/x-www-form-urlencoded", "text/plain")  # types that a page may send without a preflight
SEVERAL = b"several hosts"  # stands for repeated Host headers; never a valid name
PREFLIGHT_AGE_S = 600
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:/@\s]+))(?::\d*)?")
_METHODS = ("GET", "HEAD", "POST", "DELETE")
EXPOSED = b"X-Request-Id, Retry-After, X-Minisgl-Cached-Tokens, X-Minisgl-Ignored, X-Minisgl-Max-Tokens"
"""Response headers that pages of other origins may read."""
HARMLESS = [(b"x-content-type-options", b"nosniff"), (b"cross-origin-resource-policy", b"same-origin")]
"""Headers of every response, so that a foreign page cannot embed it as another type of content."""
_USUAL_PORTS = {"http": ":80", "https": ":443"}
Headers = Mapping[bytes, bytes]
Pairs = list[tuple[bytes, bytes]]


class Callers:
    """Host and origin policy of a server. `host`: the address that it listens on; `allowed_hosts`: further names of the
    server. Origins are `scheme://host[:port]`."""

    def __init__(self, host: str, allowed_hosts: Iterable[str] = (), cors_origins: Iterable[str] = ()) -> None:
        allowed = {_name(one) or one.lower() for one in allowed_hosts}
        self._checks_host = ANY not in allowed and (bool(allowed) or binds_loopback(host))
        self._hosts = allowed | {"localhost", "127.0.0.1", "::1", host.lower()}
        self._origins = {_without_usual_port(one.lower()) for one in cors_origins}

    @classmethod
    def of(cls, config: ServerConfig) -> Callers:
        return cls(config.host, config.allowed_hosts, config.cors_origins)

    @property
    def hosts(self) -> list[str] | None:
        """Names allowed in the Host header in addition to loopback names, sorted; `None`: any name is allowed."""
        return sorted(self._hosts) if self._checks_host else None

    def refusal(self, method: str, version: str, headers: Headers, path: str = "") -> ApiError | None:
        """Return the error for a request whose headers are not allowed, or `None` if they are."""
        host = headers.get(b"host")
        if host is None and version == "1.1":
            return ApiError(400, "Host: missing: HTTP/1.1 requires it", code="invalid_http")
        if host == SEVERAL:
            return ApiError(400, "Host: given more than once", code="invalid_http")
        if self._checks_host and host is not None and not self._is_own_host(_name(host.decode("latin-1"))):
            return ApiError(
                403,
                f"Host: {host.decode('latin-1') or 'empty'}: not a name of this server: "
                "use its address or localhost, or start it with --allowed-host NAME",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin")
        if origin is not None and not self._is_allowed_origin(shown := origin.decode("latin-1"), host):
            return ApiError(
                403,
                f"Origin: {shown}: web pages of this origin may not use the server: start it with --cors-origin ORIGIN",
                code="origin_not_allowed",
            )
        if origin is None and _is_foreign_subresource(headers):
            return ApiError(
                403,
                "Sec-Fetch-Site: cross-site: pages of other sites may link to this server, but not embed its content",
                code="origin_not_allowed",
            )
        return _bad_type(headers, path) if method == "POST" else None

    def preflight(self, method: str, headers: Headers) -> Response | None:
        """Return the response to a CORS preflight whose origin passed `refusal`; `None` for any other request."""
        method_given = headers.get(b"access-control-request-method")
        if method != "OPTIONS" or method_given is None or b"origin" not in headers:
            return None
        wanted = method_given.decode("latin-1")
        if wanted not in _METHODS:
            message = f"Access-Control-Request-Method: {wanted}: must be one of {', '.join(_METHODS)}"
            return ApiError(403, message, code="method_not_allowed").response()
        response_headers = {
            "access-control-allow-methods": ", ".join(_METHODS),
            "access-control-max-age": str(PREFLIGHT_AGE_S),
        }
        if names := headers.get(b"access-control-request-headers"):
            response_headers["access-control-allow-headers"] = names.decode("latin-1")
        return Response(status_code=204, headers=response_headers)

    def cors_headers(self, headers: Headers) -> Pairs:
        """Return the CORS headers that every response to this request has, so that an allowed page may read it."""
        if not self._origins:
            return []
        origin = headers.get(b"origin")
        if ANY in self._origins:
            allowed: Pairs = [(b"access-control-allow-origin", b"*")]
        elif origin is not None and _without_usual_port(origin.decode("latin-1").lower()) in self._origins:
            allowed = [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
        else:
            return [(b"vary", b"Origin")]
        return [*allowed, (b"access-control-expose-headers", EXPOSED)]

    def _is_own_host(self, name: str) -> bool:
        return name in self._hosts or _is_loopback(name)

    def _is_allowed_origin(self, origin: str, host: bytes | None) -> bool:
        plain = _without_usual_port(origin.lower())
        if ANY in self._origins or plain in self._origins:
            return True
        if host is None:
            return False
        scheme = plain.partition("://")[0]  # the origin's: a TLS proxy hides it from this server
        return plain == _without_usual_port(f"{scheme}://{host.decode('latin-1').lower()}")


def _is_foreign_subresource(headers: Headers) -> bool:
    """Return true for a cross-site subresource (image, script, frame) that a browser fetches without an `Origin`
    header, and not for a link that the user follows."""
    goes_there = headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest") == b"document"
    return headers.get(b"sec-fetch-site") == b"cross-site" and not goes_there


def no_upgrade(headers: Headers) -> ApiError | None:
    """Return the error 426 for a request that wants to upgrade to WebSocket, on which Codex falls back to HTTP at once;
    `None` for any other request (an offer of HTTP/2 is ignored)."""
    if b"websocket" not in headers.get(b"upgrade", b"").lower():
        return None
    error = ApiError(426, "Upgrade: websocket: not supported: send the request with POST", code="upgrade_refused")
    error.headers |= {"upgrade": "HTTP/1.1", "connection": "Upgrade"}
    return error


def _bad_type(headers: Headers, path: str) -> ApiError | None:
    given = headers.get(b"content-type", b"").decode("latin-1")
    kind = given.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return None
    is_browser = any(name == b"origin" or name.startswith(b"sec-fetch-") for name in headers)
    if not is_browser and (not kind or is_ollama(path)):
        return None  # Ollama's docs use `curl -d`, which sends a form's type; browsers have other headers
    if is_ollama(path) and kind and kind not in UNASKED:
        return None  # such as LiteLLM's application/octet-stream
    if kind == FORM and path == FILES and (not is_browser or b"origin" in headers):
        return None  # the origin was checked; browsers send it with every foreign form
    return ApiError(
        415,
        f"Content-Type: {given or 'missing'}: must be application/json (curl: -H 'Content-Type: application/json')",
        code="unsupported_media_type",
    )


def _name(host: str) -> str:
    """Return the host name of a `Host` header, lower case and without the port; empty if the header is not valid."""
    match = _HOST.fullmatch(host)
    return "" if match is None else (match[1] or match[2]).rstrip(".").lower()


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def binds_loopback(host: str) -> bool:
    """Return true if all addresses of `host` are loopback addresses; the machine's hosts file counts."""
    if _is_loopback(host.lower()):
        return True
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except OSError:
        return False  # nothing listens there
    return bool(addresses) and all(_is_loopback(str(one[4][0])) for one in addresses)


def _without_usual_port(origin: str) -> str:
    """Return an origin without the default port of its scheme, as browsers write it."""
    scheme, _, _ = origin.partition("://")
    return origin.removesuffix(_USUAL_PORTS.get(scheme, ":"))
