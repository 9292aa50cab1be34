"""Pictures in the chat: how they are attached, sent, shown and kept. The server is of a scripted engine that sees."""

from __future__ import annotations

import base64
import contextlib
import json
import shlex
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.browser import Tab
from tests.helpers.seconds import WAIT_S
from tests.helpers.server import Frontend, frontend
from tests.helpers.sight import seeing_frontend

pytestmark = pytest.mark.browser
STORED = """async count => {
    const { run } = await import('/web/js/pictures.js');
    const keys = () => run('readonly', store => store.getAllKeys());
    while ((await keys()).length !== count) await new Promise(requestAnimationFrame);
}"""
DROP = """([kind, type, name, text]) => {
    const given = new DataTransfer();
    given.items.add(new File([Uint8Array.from(atob(text), c => c.charCodeAt(0))], name, { type }));
    const about = { bubbles: true, cancelable: true };
    const event = kind === 'paste' ? new ClipboardEvent(kind, { ...about, clipboardData: given })
                                   : new DragEvent(kind, { ...about, dataTransfer: given });
    document.querySelector('#prompt').dispatchEvent(event); }"""


def png(width: int, height: int, colour: bytes = b"\xd0\x40\x20") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + colour * width) * height, 1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def file(name: str, data: bytes) -> dict[str, Any]:
    return {"name": name, "mimeType": "image/png", "buffer": data}


RED, BLUE = file("red.png", png(60, 40)), file("blue.png", png(30, 50, b"\x20\x40\xd0"))


def url(one: dict[str, Any]) -> str:
    return f"data:image/png;base64,{base64.b64encode(one['buffer']).decode()}"


@pytest.fixture(scope="module")
def server(front_end: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    folder = tmp_path_factory.mktemp("seer")
    with seeing_frontend(folder, front_end=front_end, max_seq_len=1 << 14) as running:
        yield running
        running.wait_until(lambda: running.num_live == 0)


class Chat(Tab):
    """A tab that records the requests for answers: `bodies`."""

    bodies: list[Any]

    def start(self) -> None:
        self.bodies = []
        self.page.on("request", lambda one: one.method == "POST" and self.bodies.append(one.post_data_json))
        self.open()

    def attach(self, *files: dict[str, Any]) -> None:
        before = self.page.locator(".attached img").count()
        self.page.set_input_files("input[type=file]", list(files))
        self.thumbnails(before + len(files))

    def thumbnails(self, count: int) -> None:
        self.page.wait_for_function("n => document.querySelectorAll('.attached img').length === n", arg=count)

    def told(self, text: str) -> None:
        self.page.wait_for_selector(f".notice:has-text({json.dumps(text)})")

    def answers(self, count: int) -> None:
        self.page.wait_for_function("n => document.querySelectorAll('.markdown p').length === n", arg=count)
        self.answered()

    def sent(self, message: int = 0) -> list[str]:
        """Return what the parts of a message of the last request have: URLs and texts."""
        content = self.bodies[-1]["messages"][message]["content"]
        return [one["image_url"]["url"] if one["type"] == "image_url" else one["text"] for one in content]


@contextlib.contextmanager
def opened(chromium: Any, server: Frontend, **options: Any) -> Iterator[Chat]:
    found = Chat(chromium, server.url, **options)
    found.context.set_default_timeout(1000 * WAIT_S)
    try:
        found.start()
        yield found
    finally:
        found.context.close()


@pytest.fixture
def chat(chromium: Any, server: Frontend) -> Iterator[Chat]:
    with opened(chromium, server) as found:
        yield found
        found.check()


def test_pictures_are_attached_removed_sent_and_kept(chat: Chat, server: Frontend) -> None:
    page = chat.page
    chat.attach(RED)
    chat.attach(BLUE, RED)
    page.click("[aria-label='Remove: red.png'] >> nth=0")
    chat.thumbnails(2)
    chat.ask("which colours?")
    chat.answers(1)
    assert chat.sent() == [url(BLUE), url(RED), "which colours?"]
    images = server.engine.requests("which colours?")[-1].images
    assert len(images) == 2
    assert f"({sum(one.num_tokens for one in images)} of pictures), 0 cached" in page.inner_text(".figures")
    shown = "all => all.map(one => [one.alt, one.src, one.naturalWidth])"
    both = [["blue.png", url(BLUE), 30], ["red.png", url(RED), 60]]
    assert page.eval_on_selector_all(".message.user img", shown) == both
    chat.thumbnails(0)
    page.reload()
    page.wait_for_selector(".message.user img")
    assert page.eval_on_selector_all(".message.user img", shown) == both
    chat.ask("and now?")
    chat.answers(2)
    assert chat.sent() == [url(BLUE), url(RED), "which colours?"]
    assert chat.bodies[-1]["messages"][2]["content"] == "and now?"
    assert "base64" not in page.evaluate("JSON.stringify(localStorage)")


def test_a_picture_alone_is_a_message_and_stays_when_that_is_edited_and_answered_again(chat: Chat) -> None:
    page = chat.page
    chat.attach(RED)
    page.press("#prompt", "Enter")
    chat.answers(1)
    assert chat.sent() == [url(RED)] and page.query_selector(".message.user .plain") is None
    page.click(".again")
    page.wait_for_function("() => document.querySelectorAll('.markdown p').length === 1")
    chat.answered()
    assert len(chat.bodies) == 2 and chat.sent() == [url(RED)]
    page.click("[aria-label='Edit this message']")
    assert page.is_visible(".message.user img")
    page.fill("[aria-label='Edit your message']", "look")
    page.press("[aria-label='Edit your message']", "Enter")
    page.wait_for_selector(".message.user .plain:has-text('look')")
    chat.answers(1)
    assert chat.sent() == [url(RED), "look"]


def test_a_message_waits_for_its_picture(chat: Chat) -> None:
    chat.page.fill("#prompt", "this?")
    enter = "new KeyboardEvent('keydown', { key: 'Enter', bubbles: true, cancelable: true })"
    at_once = f"given => {{ ({DROP})(given); document.querySelector('#prompt').dispatchEvent({enter}); }}"
    chat.page.evaluate(at_once, ["drop", "image/png", "red.png", base64.b64encode(RED["buffer"]).decode()])
    chat.answers(1)
    assert chat.sent() == [url(RED), "this?"]


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_pictures_come_by_drop_and_paste(chat: Chat, kind: str) -> None:
    for name, data in (("red.png", RED["buffer"]), ("text.png", b"no picture")):
        chat.page.evaluate(DROP, [kind, "image/png", name, base64.b64encode(data).decode()])
    chat.told("text.png: this browser cannot read it as a picture")
    chat.ask("this?")
    chat.answers(1)
    assert chat.sent() == [url(RED), "this?"]


def test_large_pictures_are_made_small(chat: Chat) -> None:
    """Both keep their form; the one that stays large as PNG, noise, is a JPEG."""
    code = """async ([width, height, noisy]) => {
        const m = await import('/web/js/pictures.js');
        const canvas = new OffscreenCanvas(width, height), context = canvas.getContext('2d');
        const next = x => (x * 48271) % 2147483647;
        const pixels = context.createImageData(width, height);
        if (noisy) for (let i = 0, x = 1; i < pixels.data.length; i++) pixels.data[i] = (x = next(x)) & 255;
        context.putImageData(pixels, 0, 0);
        const one = await m.read(new File([await canvas.convertToBlob()], 'a.png', { type: 'image/png' }));
        const image = m.view(one);
        await image.decode();
        return [image.naturalWidth, image.naturalHeight, image.src.slice(5, 15), image.src.length]; }"""
    *found, length = chat.page.evaluate(code, [4096, 1024, False])
    assert found == [2048, 512, "image/png;"]
    *found, length = chat.page.evaluate(code, [1500, 1200, True])
    assert found == [1500, 1200, "image/jpeg"] and length < 3_000_000


def test_pictures_go_with_their_conversation(chat: Chat) -> None:
    page = chat.page
    chat.attach(RED)
    chat.ask("look")
    chat.answers(1)
    page.evaluate(STORED, 1)
    page.click("[aria-label='Delete: look']")
    page.evaluate(STORED, 0)


def test_a_picture_that_the_browser_lost_is_named_in_its_place(chat: Chat) -> None:
    message = {"role": "user", "text": "look", "pictures": [{"id": "gone", "name": "gone.png"}]}
    stored = {"id": "x", "title": "t", "changed": 1, "settings": {}, "messages": [message]}
    chat.page.evaluate("one => localStorage.setItem('minisgl.conversation.x', JSON.stringify(one))", stored)
    chat.page.reload()
    assert "gone.png" in chat.page.inner_text(".message .pictures")
    chat.ask("and?")
    chat.answers(1)
    assert chat.bodies[-1]["messages"][0]["content"] == "look"


def test_a_model_that_does_not_see_gets_no_pictures(chromium: Any) -> None:
    with frontend(front_end="python") as blind, opened(chromium, blind) as chat:
        assert not chat.page.is_visible("#attach")
        chat.page.evaluate(DROP, ["drop", "image/png", "red.png", base64.b64encode(RED["buffer"]).decode()])
        chat.told("does not see pictures")
        chat.thumbnails(0)
        chat.check()


def test_a_request_with_a_picture_can_be_copied_for_a_shell(chat: Chat) -> None:
    chat.attach(file("large.png", png(700, 700) + b"\0" * 100_000))
    chat.ask("it's")
    chat.answers(1)
    chat.page.click("[aria-label='Copy the request for curl']")
    chat.page.wait_for_selector(".notice")
    line, _, rest = chat.page.evaluate("navigator.clipboard.readText()").partition(" <<'EOF'\n")
    assert shlex.split(line)[-2:] == ["-d", "@-"]
    assert json.loads(rest.removesuffix("\nEOF\n"))["messages"] == chat.bodies[-1]["messages"]


def test_a_phone_has_room_and_keys_reach_all(chromium: Any, server: Frontend) -> None:
    with opened(chromium, server, viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True) as chat:
        chat.attach(*[file(f"{i}.png", png(2000, 300)) for i in range(9)])
        page = chat.page
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth") and page.is_visible("#send")
        page.focus("[aria-label='Remove: 0.png']")
        page.keyboard.press("Enter")
        chat.thumbnails(8)
        chat.ask("wide")
        chat.answers(1)
        within = "all => all.every(one => one.getBoundingClientRect().left >= 0)"
        assert page.eval_on_selector_all(".message.user img", within)
        assert page.eval_on_selector(".log", "log => log.scrollWidth <= log.clientWidth")
        chosen = "one => one.addEventListener('click', event => { event.preventDefault(); one.title = 'chosen'; })"
        page.eval_on_selector("input[type=file]", chosen)
        page.focus("#attach")
        page.keyboard.press("Enter")
        assert page.get_attribute("input[type=file]", "title") == "chosen"
        chat.check()
