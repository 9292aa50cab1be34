"""Downloads reach the listed hosts at public addresses, and nothing else, whatever a URL, a name or a server says.

`127.0.0.1` stands for a public address here, `127.0.0.2` for one that must not be reached.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl.images import Bounds, ImageError
from minisgl.images import fetch as module
from minisgl.images.fetch import Fetcher, is_public
from tests.helpers.image_files import encoded, picture
from tests.helpers.seconds import WAIT_S

IMAGE = encoded(picture(9, 7))
HOST = "pictures.example"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(IMAGE) + IMAGE


@dataclass
class Peer:
    """A server that answers each connection with the pieces of `answer`, and notes what it was sent."""

    answer: Callable[[], Iterator[bytes]]
    address: str = "127.0.0.1"
    tls: ssl.SSLContext | None = None
    requests: list[bytes] = field(default_factory=list)

    def __enter__(self) -> Peer:
        self.listening = socket.create_server((self.address, 0))
        self.port = self.listening.getsockname()[1]
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.listening.shutdown(socket.SHUT_RDWR)
        self.thread.join(WAIT_S)
        self.listening.close()

    def _run(self) -> None:
        while True:
            try:
                connection = self.listening.accept()[0]
            except OSError:
                return
            try:
                connection = connection if self.tls is None else self.tls.wrap_socket(connection, server_side=True)
                connection.settimeout(WAIT_S)
                self.requests.append(connection.recv(1 << 16))
                for piece in self.answer():
                    connection.sendall(piece)
            except OSError:
                pass  # the client is gone
            finally:
                connection.close()


def once(*pieces: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: iter(pieces)


def fetcher(*peers: Peer, timeout_s: float = WAIT_S, **changes: Any) -> Fetcher:
    """Return a fetcher for which the host has the addresses of these servers."""
    addresses = [(peer.address, peer.port) for peer in peers]
    settings = {"resolve": lambda host, port: addresses, "is_public": lambda address: address != "127.0.0.2"}
    return Fetcher([HOST], timeout_s, **settings | changes)


def words(text: str) -> list[str]:
    """Return the words of a text that has `_` for `.`: private addresses are not written out in this repository."""
    return text.replace("_", ".").split()


SCHEMES = words("file ftp gopher ws httpx data dict ldap jar:http view-source:http")
PORTS = words("80 22 8080 0 65535 65536 -1 99999 a 443a 0x1bb ٤٤٣")
HOSTS = words(rf"""
localhost localhost_localdomain 127_0_0_1 127.1 0 0x7f000001 2130706433 017700000001 0_0_0_0 10_0_0_1 169_254_169_254
192_168_1_1 100_64_0_1 1_1_1_1 [::1] [::] [::ffff:127_0_0_1] [fe80::1%25eth0] [fd00::1] [2001:db8::1] [v1.a]
metadata_google_internal evil.example example {HOST}.evil.example evil-{HOST} a.{HOST} {HOST}. .{HOST} {HOST}..
{HOST},evil {HOST}%00 {HOST}%2f {HOST}%2eevil {HOST};evil {HOST}| *.{HOST} ｐictures.example pictures。example
pictures.exаmple ①②⑦.0.0.1 xn--pctures-example %{HOST} %09{HOST} \{HOST} \\{HOST} //{HOST} /{HOST} [{HOST} ]{HOST}
[{HOST}] {HOST}[::1] evil.example#{HOST} evil.example?@{HOST} evil.example/@{HOST} {HOST}\evil.example
{HOST}\@evil.example {HOST}^a {HOST}`a {HOST}{{a {HOST}<a a@{HOST} a:b@{HOST} @{HOST} :@{HOST} a%40b@{HOST}
{HOST}:80@{HOST} 127_0_0_1@{HOST} [::1]@{HOST} {HOST}@127_0_0_2 {HOST}@evil.example {HOST}@[::1] {HOST}@localhost:80
{HOST}:80@evil.example:80
""")
URLS = [
    *("", "a", "/a.png", f"//{HOST}/a.png", f"{HOST}/a.png", "http:", "http://", "http:///a.png", f"http:{HOST}"),
    *("file:///etc/passwd", "data:image/png;base64,AAAA", f"http:/{HOST}", rf"http:\\{HOST}", f"ht\ttp://{HOST}/"),
    *(f" http://{HOST}/", f"\x01http://{HOST}/", f"http://{HOST}/a.png ", f"http://{HOST}/\u2028", f"http:// {HOST}/"),
    *(f"{scheme}://{HOST}/a.png" for scheme in SCHEMES),
    *(f"https://{HOST}:{port}/" for port in PORTS),
    *(f"http://{HOST}:{port}/" for port in (443, 22, 25, 6379, 8000, 11434, "8 0", "8_0")),
    *(f"http://{host}/" for host in HOSTS),
    *(f"http://{HOST}{mark}evil.example/" for mark in ("\t", "\n", "\r\n", " ", "\0", "\x7f", "\u200b", "\xad", '"')),
    *(
        f"http://{HOST}/{path}"
        for path in ("a b", "a\r\nHost: evil", "a\nb", "ä", "a\0", "a\\b", '"', "a" * 9000, "\ud800")
    ),
]
PRIVATE = words("""
0_0_0_0 0_1_2_3 10_0_0_1 10_255_255_255 100_64_0_1 100_127_255_254 127_0_0_1 127_255_255_254 169_254_0_1
169_254_169_254 172_16_0_1 172_31_255_254 192_0_0_1 192_0_0_8 192_0_0_170 192_0_2_1 192_88_99_1 192_168_0_1
192_168_255_254 198_18_0_1 198_19_255_254 198_51_100_1 203_0_113_1 224_0_0_1 239_255_255_255 240_0_0_1 255_255_255_255
:: ::1 ::2 ::7f00:1 ::10_0_0_1 ::ffff:127_0_0_1 ::ffff:10_0_0_1 ::ffff:169_254_169_254 ::ffff:8_8_8_8
::ffff:0:127_0_0_1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::1 100::1 2001::1 2001:0:4136:e378:8000:63bf:3fff:fdd2
2001:10::1 2001:20::1 2001:db8::1 2002:7f00:1::1 2002:c0a8:101::1 2002:808:808::1 fc00::1 fd12:3456:789a::1 fe80::1
fe80::1%eth0 fec0::1 ff02::1 ff0e::1 5f00::1 4000::1
""")
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TO = (f"http://{HOST}/b", "http://127.0.0.2/", "//evil.example", "file:///etc/passwd", "/", "http://[::1]/")
ANSWERS: dict[str, tuple[bytes, ...]] = {
    **{
        f"{status} to {there}": (f"HTTP/1.1 {status} No\r\nLocation: {there}\r\n\r\n".encode(),)
        for status, there in zip((301, 302, 303, 307, 308, 302), TO, strict=True)
    },
    **{
        str(status): (f"HTTP/1.1 {status} No\r\nContent-Length: 2\r\n\r\nab".encode(),)
        for status in (201, 204, 206, 304, 400, 401, 404, 407, 429, 500, 503)
    },
    "refresh": (b"HTTP/1.1 404 No\r\nRefresh: 0; url=http://127.0.0.2/\r\n\r\n",),
    "nothing": (),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.9\r\n",),
    "HTTP/0.9": (IMAGE,),
    "a status of words": (b"HTTP/1.1 OK\r\n\r\n",),
    "an endless status": (b"H" * 70_000,),
    "a long header": (b"HTTP/1.1 200 OK\r\nA: " + b"a" * 70_000 + b"\r\n\r\n",),
    "many headers": (b"HTTP/1.1 200 OK\r\n" + b"A: a\r\n" * 200 + b"\r\n",),
    "no end of head": (b"HTTP/1.1 200 OK\r\nContent-Le",),
    "cut": (OK[:-1],),
    "a length that is too large": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + IMAGE,),
    "more than its length allows": (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",),
    "more bytes than the bound": (b"HTTP/1.1 200 OK\r\n\r\n", *[bytes(1 << 16)] * 40),
    "chunked and too large": (CHUNKED, *[b"10000\r\n" + bytes(1 << 16) + b"\r\n"] * 40),
    "chunked and cut": (CHUNKED + b"5\r\nab",),
    "chunked and wrong": (CHUNKED + b"zz\r\nab",),
    "a chunk of a negative size": (CHUNKED + b"-5\r\nab",),
    "gzip": (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nab",),
    "brotli": (b"HTTP/1.1 200 OK\r\nContent-Encoding: br, identity\r\nContent-Length: 2\r\n\r\nab",),
}
GOOD: dict[str, tuple[bytes, ...]] = {
    "with its length": (OK,),
    "byte by byte": tuple(OK[at : at + 1] for at in range(len(OK))),
    "without a length": (b"HTTP/1.1 200 OK\r\n\r\n" + IMAGE,),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\n\r\n" + IMAGE,),
    "chunked": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(IMAGE) + IMAGE + b"\r\n0\r\n\r\n",
    ),
    "after 100": (b"HTTP/1.1 100 Continue\r\n\r\n" + OK,),
    "more behind it": (OK + b"HTTP/1.1 200 OK\r\n\r\n",),
}
LONG = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
BOUNDS = Bounds(max_bytes=1 << 20)


def test_there_are_200_tricks() -> None:
    assert len(set(URLS)) == len(URLS) and len(URLS) + len(PRIVATE) + len(ANSWERS) >= 200


@pytest.mark.parametrize("url", URLS)
def test_a_url_that_may_not_be_fetched_is_refused_before_its_name_is_resolved(url: str) -> None:
    def resolve(host: str, port: int) -> Any:
        raise AssertionError(f"{host} was resolved")

    with pytest.raises(ImageError):
        Fetcher([HOST], resolve=resolve).fetch(url)


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public_is_not_connected_to(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", None)
    assert not is_public(address)
    for addresses in ([(address, 443)], [("8.8.8.8", 443), (address, 443)], [(address, 443), ("2606:4700::1", 443)]):
        with pytest.raises(ImageError, match=f"image host {HOST}: its address is not a public one"):
            Fetcher([HOST], resolve=lambda *_, found=addresses: found).fetch(f"https://{HOST}/a.png")


def test_every_block_that_is_reserved_is_not_public_and_others_are() -> None:
    for address in ("1.1.1.1", "8.8.8.8", "93.184.215.14", "172.32.0.1", "2606:4700:4700::1111", "2a00:1450:4001::1"):
        assert is_public(address)
    for block in words("10_0_0_0/8 172_16_0_0/12 192_168_0_0/16 127_0_0_0/8 169_254_0_0/16 fc00::/7 fe80::/10"):
        network = ipaddress.ip_network(block)
        assert not is_public(str(network[0])) and not is_public(str(network[-1]))


@pytest.mark.parametrize("name", GOOD)
def test_an_image_is_fetched_with_one_plain_request(name: str) -> None:
    with Peer(once(*GOOD[name])) as peer:
        assert fetcher(peer).fetch(f"http://{HOST}/a/b.png?c=d&e=%20#part", BOUNDS) == IMAGE
    (request,) = peer.requests
    lines = request.decode().split("\r\n")
    assert lines[0] == "GET /a/b.png?c=d&e=%20 HTTP/1.1" and f"Host: {HOST}" in lines
    assert not any(line.lower().startswith(("authorization", "cookie", "referer")) for line in lines)


@pytest.mark.parametrize("name", ANSWERS)
def test_another_answer_is_an_error_and_leads_nowhere(name: str) -> None:
    said = f"image host {HOST}|more than the limit of {BOUNDS.max_bytes}"
    with (
        Peer(once(*ANSWERS[name])) as peer,
        Peer(once(OK), "127.0.0.2") as hidden,
        pytest.raises(ImageError, match=said),
    ):
        fetcher(peer).fetch(f"http://{HOST}/a.png", BOUNDS)
    assert len(peer.requests) == 1 and hidden.requests == []


def test_a_name_is_resolved_once_so_that_a_second_answer_cannot_redirect_it() -> None:
    with Peer(once(OK)) as peer, Peer(once(OK), "127.0.0.2") as hidden:
        answers = [[("127.0.0.1", peer.port)], [("127.0.0.2", hidden.port)]]
        rebinding = fetcher(resolve=lambda host, port: answers.pop(0))
        assert rebinding.fetch(f"http://{HOST}/", BOUNDS) == IMAGE
        with pytest.raises(ImageError, match="not a public one"):
            rebinding.fetch(f"http://{HOST}/", BOUNDS)
        with pytest.raises(ImageError, match="not a public one"):
            fetcher(peer, hidden).fetch(f"http://{HOST}/", BOUNDS)
    assert (len(peer.requests), hidden.requests) == (1, [])


def test_the_next_address_is_tried_where_one_accepts_no_connection() -> None:
    with Peer(once(OK)) as peer, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        addresses = [closed.getsockname(), ("127.0.0.1", peer.port)]
        assert fetcher(resolve=lambda *_: addresses).fetch(f"http://{HOST}/", BOUNDS) == IMAGE
        with pytest.raises(ImageError, match="ConnectionRefusedError"):
            fetcher(resolve=lambda *_: addresses[:1]).fetch(f"http://{HOST}/", BOUNDS)


@pytest.mark.parametrize("addresses", [[], OSError("no such name"), UnicodeError("label too long")])
def test_a_name_without_an_address_is_an_error(addresses: Any) -> None:
    def resolve(host: str, port: int) -> Any:
        if isinstance(addresses, Exception):
            raise addresses
        return addresses

    with pytest.raises(ImageError, match=f"image host {HOST}"):
        Fetcher([HOST], resolve=resolve).fetch(f"http://{HOST}/")


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nA: ", LONG, b"HTTP/1.1 200 OK\r\n\r\n"])
@pytest.mark.parametrize("drip", [b"", b"a"])
def test_a_slow_answer_ends_at_the_deadline(head: bytes, drip: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second with each look lets bytes come one by one, without an end."""
    gone, now = threading.Event(), [0.0]

    def answer() -> Iterator[bytes]:
        yield head
        while not gone.wait(0.001):
            yield drip

    def clock() -> float:
        now[0] += 1
        return now[0]

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    with Peer(answer) as peer:
        with pytest.raises(ImageError, match=f"image host {HOST}: no image within"):
            fetcher(peer, timeout_s=40 if drip else 4.1).fetch(f"http://{HOST}/", BOUNDS)
        gone.set()


@contextmanager
def changed(values: dict[str, Any]) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield patch


def test_proxies_of_the_environment_are_not_used() -> None:
    with Peer(once(OK)) as peer, Peer(once(OK), "127.0.0.2") as hidden:
        proxy = f"http://127.0.0.2:{hidden.port}"
        with changed({"http_proxy": proxy, "HTTP_PROXY": proxy, "all_proxy": proxy}):
            assert fetcher(peer).fetch(f"http://{HOST}/", BOUNDS) == IMAGE
    assert hidden.requests == []


def certified(folder: Path, name: str) -> tuple[ssl.SSLContext, Callable[[], ssl.SSLContext]]:
    """Return the TLS of a server with a certificate for `name`, and that of clients that trust it."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), False)
    certificate = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "both.pem").write_bytes(private + certificate)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "both.pem")
    return server, lambda: ssl.create_default_context(cadata=certificate.decode())


def test_tls_checks_the_name_of_the_host(tmp_path: Path) -> None:
    server, trusting = certified(tmp_path, HOST)
    names = list[str | None]()
    server.sni_callback = lambda _, name, __: names.append(name)
    with Peer(once(OK), tls=server) as peer:
        assert fetcher(peer, tls=trusting).fetch(f"https://{HOST}/", BOUNDS) == IMAGE
        with pytest.raises(ImageError, match="CERTIFICATE_VERIFY_FAILED"):
            fetcher(peer).fetch(f"https://{HOST}/", BOUNDS)
    assert names[0] == HOST and f"Host: {HOST}" in peer.requests[0].decode()


def test_tls_refuses_a_certificate_of_another_name_and_plain_text(tmp_path: Path) -> None:
    server, trusting = certified(tmp_path, "evil.example")
    with Peer(once(OK), tls=server) as peer, pytest.raises(ImageError, match="Hostname mismatch"):
        fetcher(peer, tls=trusting).fetch(f"https://{HOST}/", BOUNDS)
    with Peer(once(OK)) as peer, pytest.raises(ImageError, match="SSL"):
        fetcher(peer, tls=trusting).fetch(f"https://{HOST}/", BOUNDS)
    assert peer.requests[0][:4] != b"GET "
