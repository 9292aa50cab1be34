"""API keys take turns, image by image, and a slow host delays only requests of the key that named it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.config import ImageLimits
from minisgl.images import Bounds
from minisgl.images.fetch import Fetcher
from minisgl.images.processors import Processor
from minisgl.server.core import sight
from minisgl.server.core.api_keys import CALLER
from minisgl.server.core.errors import ApiError
from minisgl.server.core.sight import MAX_DOWNLOADS, GivenImage, Seen, Sight
from tests.helpers.seconds import WAIT_S
from tests.helpers.sight import in_base64, png, seeing_folder

SLOW = "https://slow.example/a.png"
QUICK = "https://quick.example/a.png"


class Watched:
    """A sight whose decoding waits in `go_on`, if `holds`, and whose slow host answers after `answer`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sight = Sight(ImageLimits(image_hosts=("slow.example", "quick.example")))
        self.folder = str(seeing_folder(folder))
        self.order: list[bytes] = []
        self.fetched: list[str] = []
        self.holds = False
        self.go_on, self.answer = threading.Semaphore(0), threading.Event()
        prepare = Processor.prepare

        def prepared(processor: Processor, data: Any, **how: Any) -> Any:
            self.order.append(data)
            assert not self.holds or self.go_on.acquire(timeout=WAIT_S)
            return prepare(processor, data, **how)

        def fetch(fetcher: Fetcher, url: str, bounds: Bounds) -> bytes:
            self.fetched.append(url)
            assert url != SLOW or self.answer.wait(WAIT_S)
            bounds.check_bytes(len(DATA[0]))
            return DATA[0]

        monkeypatch.setattr(Processor, "prepare", prepared)
        monkeypatch.setattr(Fetcher, "fetch", fetch)

    def see(self, key: int, *values: str) -> asyncio.Task[Seen]:
        """Begin a request of an API key."""

        async def run() -> Seen:
            CALLER.set(key)
            return await self.sight.see([GivenImage(f"{i}", one) for i, one in enumerate(values)], self.folder)

        return asyncio.create_task(run())

    async def until(self, count: int, of: list[Any]) -> None:
        """Wait until the list has `count` entries."""
        async with asyncio.timeout(WAIT_S):
            while len(of) < count:
                await asyncio.sleep(0)


DATA = [png(16, 16, seed) for seed in range(6)]
INLINE = [in_base64(one) for one in DATA]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    found = Watched(tmp_path, monkeypatch)
    yield found
    found.holds = False
    found.go_on.release(len(DATA))
    found.answer.set()


async def test_keys_take_turns_image_by_image(watched: Watched) -> None:
    watched.holds = True
    many = [watched.see(1, *INLINE[:2]), *(watched.see(1, one) for one in INLINE[2:5])]
    await watched.until(1, watched.order)
    one = watched.see(2, INLINE[5])
    await asyncio.sleep(0)  # it is in line
    watched.go_on.release(len(DATA))
    await asyncio.gather(*many, one)
    assert watched.order.index(DATA[5]) <= 2, "at most one image is before it"


async def test_requests_of_one_key_take_turns_too(watched: Watched) -> None:
    watched.holds = True
    many = watched.see(1, *INLINE[:3])
    await watched.until(1, watched.order)
    one = watched.see(1, INLINE[5])
    await asyncio.sleep(0)
    watched.go_on.release(len(DATA))
    await asyncio.gather(many, one)
    assert watched.order.index(DATA[5]) == 1


async def test_a_slow_host_delays_downloads_of_its_own_key_only(watched: Watched) -> None:
    slow = [watched.see(1, SLOW, INLINE[1]) for _ in range(2 * MAX_DOWNLOADS)]
    await watched.until(MAX_DOWNLOADS, watched.fetched)
    await asyncio.wait_for(watched.see(2, QUICK), WAIT_S)
    await asyncio.wait_for(watched.see(2, INLINE[2]), WAIT_S)
    await asyncio.wait_for(watched.see(1, INLINE[3]), WAIT_S)
    waits = watched.see(1, QUICK)
    await asyncio.sleep(0)
    assert watched.fetched == [*[SLOW] * MAX_DOWNLOADS, QUICK] and not waits.done()
    watched.answer.set()
    await asyncio.gather(*slow, waits)
    assert len(watched.fetched) == 2 * MAX_DOWNLOADS + 2


async def test_the_bytes_of_all_downloads_of_a_request_are_bounded(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sight, "DOWNLOADED_BYTES", limit := 2 * len(DATA[0]))
    await watched.see(1, QUICK, QUICK)
    with pytest.raises(ApiError, match=rf"^2: the image has \d+ bytes, and those before it {limit}, more .* {limit}"):
        await watched.see(1, QUICK, QUICK, QUICK)
    await watched.see(1, QUICK)


async def test_images_that_are_kept_are_bounded_in_number(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sight, "MAX_KEPT", 2)
    for _ in range(2):
        await watched.see(1, *INLINE[:3])
    assert watched.order == [*DATA[:3]] * 2, "the first is no longer kept when it comes again"
    await watched.see(1, INLINE[2], INLINE[1])
    assert len(watched.order) == 6, "the last two are"


async def test_the_first_image_that_the_limit_makes_smaller_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, large = str(seeing_folder(tmp_path)), in_base64(png(64, 64))
    looks = Sight(ImageLimits(max_image_tokens=16))
    with caplog.at_level(logging.INFO, "minisgl.server"):
        await looks.see([GivenImage("0", in_base64(png(32, 32)))], folder)
        await Sight(ImageLimits()).see([GivenImage("0", in_base64(png(400, 400)), "low")], folder)
        assert not caplog.messages
        for data in (large, large, in_base64(png(72, 72))):
            await looks.see([GivenImage("0", data)], folder)
    [line] = caplog.messages
    assert line.startswith("images: one was made smaller, to 16 tokens by --max-image-tokens 16")


async def test_a_request_that_is_cancelled_gives_back_its_turns(watched: Watched) -> None:
    watched.holds = True
    tasks = [watched.see(1, *INLINE[:3]), watched.see(2, INLINE[3]), watched.see(1, SLOW)]
    await watched.until(1, watched.order)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    watched.holds = False
    watched.go_on.release(1)
    watched.answer.set()
    await asyncio.wait_for(watched.see(3, *INLINE), WAIT_S)
