"""Images of requests: from the parts of a body to the patches that a vision tower reads, and into prompts.

Invariants: everything that an image costs is bounded before it is spent (their number, bytes, pixels); images are
decoded one at a time, in a thread of their own, and delay no text; API keys take turns, image by image, and a host
that is slow delays only requests of the key that named it; every error names the field as the client wrote it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from minisgl import images
from minisgl.config import ConfigError, ImageLimits
from minisgl.images import Bounds, ImageError, PreparedImage, Processor
from minisgl.images.fetch import Fetcher
from minisgl.images.sources import SCHEME
from minisgl.prompt_image import FIRST_VIRTUAL_ID, PromptImage
from minisgl.sampling_params import ParamError
from minisgl.server.core.api_keys import CALLER
from minisgl.server.core.bodies import SEEN, ChatMessage, TextPart
from minisgl.server.core.errors import ApiError, WrittenError, wrong
from minisgl.server.core.fields import Picture, Place
from minisgl.server.core.log import say
from minisgl.server.core.waiting import Turns
from minisgl.step import Int32Array
from minisgl.tokenizer.pictures import Images

KEPT_BYTES = 64 << 20  # of prepared images that the next turn of a conversation has again
MAX_KEPT = 4096  # prepared images, however small
MAX_PREPARED = 32  # images in the requests of one API key that are being prepared
MAX_DOWNLOADS = 4  # requests of one API key that download at once, one image at a time
DOWNLOADED_BYTES = 32 << 20  # of one request


@dataclass(frozen=True, slots=True)
class GivenImage:
    """Image as a body has it: the `value` at `place`, which should be a URL or base64, and its `detail`, within the
    value or `beside` it."""

    place: str
    value: Any
    detail: Any = None
    beside: bool = False


def images_of(messages: Iterable[ChatMessage]) -> list[GivenImage]:
    """Return the images of a conversation, in order."""
    return [
        _given(part, f"messages.{i}.content.{j}.image_url")
        for i, message in enumerate(messages)
        if message.role in SEEN
        for j, part in message.images()
    ]


def _given(part: Picture, place: str) -> GivenImage:
    given = part.model_extra or {}
    value, detail, beside = getattr(part, "image_url", None), getattr(part, "detail", None), True
    if isinstance(value, dict) and "url" in value:
        detail, beside = value.get("detail", detail), "detail" not in value
        value = value["url"]
    written = given.get("place")
    return GivenImage(str(written) if isinstance(written, Place) else place, value, detail, beside)


def leave_out_oldest(messages: Sequence[ChatMessage], most: int) -> tuple[str, ...]:
    """Replace the oldest images of a conversation beyond `most` by notes, and return their names for clients. Those of
    a last message of the user stay. They go in groups, so that the beginning of the prompt, and with it the cached
    pages, stays as it is for some turns."""
    shown = [(i, j, part) for i, one in enumerate(messages) if one.role in SEEN for j, part in one.images()]
    if len(shown) <= most:
        return ()
    last = next((one for one in reversed(messages) if one.role in SEEN), None)
    asked = len(last.images()) if last is not None and last.role == "user" else 0
    group = max(1, most // 4)
    oldest = shown[: min(-(-(len(shown) - most) // group) * group, len(shown) - asked)]
    for i, j, part in oldest:
        if isinstance(content := messages[i].content, list):
            content[j] = TextPart(type="text", text=part.note("the newest images"))
    return tuple(name_of(part) for _, _, part in oldest)


def name_of(part: Picture) -> str:
    """Return the name of an image's part for clients: its path by fields and its type, as `unserved` has it."""
    place = _given(part, "messages.content.image_url").place
    names = [name for name in place.split(".") if not name.isdigit()]
    return Place(".".join(names if place[-1].isdigit() else [*names[:-1], part.type]))


@dataclass(slots=True, eq=False)
class Seen:
    """Prepared images of one prompt. `template` goes to the chat template; `images` are set by `expand`."""

    prepared: Sequence[PreparedImage]
    marker_id: int
    template: Images
    images: tuple[PromptImage, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(one.num_tokens for one in self.prepared)

    def expand(self, ids: Int32Array, field: str) -> Int32Array:
        """Return a prompt's ids with the virtual ids of the images in place of the markers. Raises `ApiError` 400."""
        order = self.template.order
        if sorted(order) != [*range(len(self.prepared))]:
            raise wrong(field, f"the chat template shows {len(order)} of {len(self.prepared)} images")
        try:
            ids, self.images = images.expand(ids, self.marker_id, [self.prepared[i] for i in order])
        except ValueError as error:
            raise wrong(field, str(error)) from error
        return ids


def shown_ids(ids: Int32Array, marker_id: int) -> Int32Array:
    """Return a prompt's ids for clients: virtual ids are shown as the marker."""
    return np.where(ids >= FIRST_VIRTUAL_ID, np.int32(marker_id), ids)


class _Lane:
    """Bounds of the images of one API key: of its requests that download, and of the images that are being prepared."""

    def __init__(self) -> None:
        self.downloads = Turns(MAX_DOWNLOADS, what="requests with images to download")
        self.images = Turns(MAX_PREPARED, what="requests with images")
        self.threads = ThreadPoolExecutor(MAX_DOWNLOADS, "downloads")  # they start on first use


class Sight:
    """Prepares the images of all requests of a server."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._lanes = defaultdict[int, _Lane](_Lane)  # by API key
        self._turns = Turns(1, what="images")
        self._thread = ThreadPoolExecutor(1, "images")  # starts on first use
        self._processor: Processor | None = None
        self._fetcher = Fetcher(limits.image_hosts)
        self._kept: OrderedDict[bytes, PreparedImage] = OrderedDict()  # used by the thread only
        self._num_bytes = 0
        self._has_limited = False  # an image to --max-image-tokens; the first is logged

    async def see(self, given: Sequence[GivenImage], model_dir: str | None) -> Seen:
        """Prepare the images of one prompt. Raises `ApiError` 400."""
        limits = self._limits
        if len(given) > limits.max_images:
            reason = f"a request has at most {limits.max_images} images (--max-images)"
            raise _refused(given[limits.max_images], f"{reason}, this one has {len(given)}")
        run, key = asyncio.get_running_loop().run_in_executor, CALLER.get()
        if self._processor is None:
            self._processor = await run(self._thread, self._read, model_dir)
        processor, lane, prepared, files = self._processor, self._lanes[key], list[PreparedImage](), dict[int, bytes]()
        remote = [i for i, one in enumerate(given) if self._is_remote(one)]
        async with lane.downloads.turn() if remote else contextlib.nullcontext():
            for i in remote:
                bounds = Bounds(max_bytes=DOWNLOADED_BYTES, before=sum(map(len, files.values())))
                files[i] = await run(lane.threads, self._fetched, given[i], bounds)
            async with lane.images.turn(len(given)):
                for i, one in enumerate(given):
                    async with self._turns.turn(owner=key):
                        prepared.append(await run(self._thread, self._prepare, one, files.pop(i, None), processor))
        texts = [one.text for one in prepared]
        return Seen(prepared, processor.marker_id, Images(processor.family.marker, texts))

    def _read(self, model_dir: str | None) -> Processor:
        try:
            found = (
                None
                if model_dir is None
                else images.read_processor(Path(model_dir), max_tokens=self._limits.max_image_tokens)
            )
        except ConfigError as error:
            raise wrong("model", str(error), "unsupported_value") from error
        if found is None:
            raise wrong("model", "its folder describes no image processor that is known", "unsupported_value")
        return found

    def _is_remote(self, one: GivenImage) -> bool:
        """Return whether an image is to be downloaded; else the value itself has it. Raises `ApiError` 400."""
        value, detail = one.value, one.detail
        if not isinstance(value, str) or not value:
            files = ": there are no stored files" if isinstance(value, dict) else ""
            _refuse(one, f"must be a data URL or base64{files}")
        try:
            images.most_tokens(detail)
        except ImageError as error:
            place = one.place.rpartition(".")[0] if one.beside else one.place
            raise _refused(GivenImage(f"{place}.detail", detail), str(error)) from error
        scheme = SCHEME.match(value[:64])
        if scheme is None or scheme[1].lower() == "data":
            return False
        if scheme[1].lower() not in ("http", "https"):
            _refuse(one, f"{scheme[1].lower()}: is not read: send a data URL or base64")
        if not self._limits.image_hosts:
            _refuse(one, "URLs are not fetched: send a data URL, or start the server with --image-hosts")
        return True

    def _fetched(self, one: GivenImage, bounds: Bounds) -> bytes:
        """Return the bytes of a URL on another server. Raises `ApiError` 400."""
        try:
            return self._fetcher.fetch(one.value, bounds)
        except ImageError as error:
            raise _refused(one, str(error)) from error

    @property
    def _bounds(self) -> Bounds:
        return Bounds(max_pixels=self._limits.max_image_pixels)

    def _prepare(self, one: GivenImage, data: bytes | None, processor: Processor) -> PreparedImage:
        """Decode, resize and cut an image, unless it is kept. Raises `ApiError` 400."""
        max_tokens = images.most_tokens(one.detail)
        try:
            data = images.data_url(one.value, self._bounds) if data is None else data
            key = hashlib.blake2b(data, digest_size=32, key=str(max_tokens).encode()).digest()
            if (found := self._kept.get(key)) is None:
                found = self._kept[key] = processor.prepare(data, bounds=self._bounds, max_tokens=max_tokens)
                self._num_bytes += found.num_bytes
                if found.limited and max_tokens is None and not self._has_limited:
                    self._has_limited = True
                    limit = f"{found.num_tokens} tokens by --max-image-tokens {self._limits.max_image_tokens}"
                    say(f"images: one was made smaller, to {limit}; later ones are not logged")
        except ImageError as error:
            raise _refused(one, str(error)) from error
        self._kept.move_to_end(key)
        while self._num_bytes > KEPT_BYTES or len(self._kept) > MAX_KEPT:
            self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes
        return found


def _refuse(one: GivenImage, reason: str) -> NoReturn:
    raise _refused(one, reason)


def _refused(one: GivenImage, reason: str) -> ApiError:
    return WrittenError.of(ParamError(one.place, one.value, reason, "invalid_image"))
