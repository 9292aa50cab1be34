"""Image files in a chat: which are read, how they are sent, and how long they stay attached."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from minisgl import cli
from minisgl.chat.client import ChatError
from minisgl.chat.pictures import PictureError, data_url, files_of
from minisgl.chat.session import Session
from minisgl.chat.terminal import PathAfterImage
from tests.chat.test_session import WHOLE, Scripted, ask
from tests.helpers import sight
from tests.helpers.server import Frontend, frontend


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (found := tmp_path / "a picture.png").write_bytes(sight.png())
    return found


def part(file: Path) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    ("begin", "kind"),
    [(b"\x89PNG\r\n", "png"), (b"\xff\xd8\xff\xe0", "jpeg"), (b"GIF89a", "gif"), (b"RIFFxxxx", "webp")],
)
def test_a_file_is_a_data_url_of_its_kind(tmp_path: Path, begin: bytes, kind: str) -> None:
    (tmp_path / "x.dat").write_bytes(begin)
    assert data_url(str(tmp_path / "x.dat")) == f"data:image/{kind};base64,{base64.b64encode(begin).decode()}"


def test_a_device_is_not_read() -> None:
    with pytest.raises(PictureError, match="is no regular file"):
        data_url("/dev/zero")


def test_what_is_no_picture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("words")
    for name, reason in (("x.txt", "must be a PNG"), ("y.png", "No such file"), (".", "Is a directory")):
        with pytest.raises(PictureError, match=rf"^{tmp_path}/?{name.strip('.')}: {reason}"):
            data_url(str(tmp_path / name))


def test_names_are_those_that_a_shell_or_a_file_manager_writes(file: Path) -> None:
    quoted = str(file).replace(" ", "\\ ")
    assert files_of(str(file)) == files_of(f"'{file}'") == files_of(quoted) == [str(file)]
    assert files_of(f"'{file}' ~/b.png") == [str(file), "~/b.png"]
    with pytest.raises(PictureError, match="quotation"):
        files_of("'open")


def test_an_image_goes_with_the_next_message_and_stays_in_the_conversation(file: Path) -> None:
    client = Scripted(*WHOLE)
    session = Session(client, "m", images=[data_url(str(file))])
    assert session.command(f"/image {file}") == "images for the next message: 2"
    ask(session, "one")
    ask(session, "two")
    question = {"role": "user", "content": [part(file), part(file), {"type": "text", "text": "one"}]}
    answer = {"role": "assistant", "content": "ab"}
    assert client.bodies[0]["messages"] == [question]
    assert client.bodies[1]["messages"] == [question, answer, {"role": "user", "content": "two"}]


def test_images_can_be_removed_and_a_bad_one_changes_nothing(file: Path) -> None:
    session = Session(Scripted(*WHOLE), "m")
    session.command(f"/image {file}")
    assert session.command("/image nowhere.png") == "nowhere.png: No such file or directory"
    assert len(session.images) == 1
    assert session.command("/image") == "no images are attached" and session.images == []


@pytest.mark.parametrize(("status", "left"), [(400, 0), (413, 0), (503, 1), (None, 1)])
def test_an_image_stays_attached_unless_the_server_refused_it(file: Path, status: int | None, left: int) -> None:
    session = Session(Scripted(error=ChatError("no", status)), "m", images=[data_url(str(file))])
    with pytest.raises(ChatError) as failed:
        ask(session, "one")
    assert len(session.images) == left and session.messages == []
    assert ("no longer attached" in str(failed.value)) is (left == 0)


def test_paths_are_completed_after_the_command_only(file: Path) -> None:
    def completed(text: str) -> list[str]:
        document = Document(text, len(text))
        return [
            one.text for one in PathAfterImage().get_completions(document, CompleteEvent(completion_requested=True))
        ]

    assert completed(f"/image {file.parent}/a") == [" picture.png"]
    assert completed(f"look {file.parent}/a") == completed(f"/image\n{file.parent}/a") == []


@pytest.fixture(scope="module")
def server(front_end: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with sight.seeing_frontend(tmp_path_factory.mktemp("seer"), front_end=front_end) as running:
        yield running


def chat(monkeypatch: pytest.MonkeyPatch, server: Frontend, typed: str, *flags: str) -> int:
    reading, writing = os.pipe()
    os.write(writing, typed.encode())
    os.close(writing)
    with open(reading) as lines:
        monkeypatch.setattr("sys.stdin", lines)
        return cli.main(["chat", "--base-url", server.url, *flags])


def test_a_server_is_asked_with_images_and_says_what_is_wrong(
    server: Frontend, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--image", str(file), "--image", str(file))
    assert chat(monkeypatch, server, f"say:seen\n/image '{file}'\nsay:again\n", *flags) == 0
    assert capsys.readouterr().out == "seen\nimages for the next message: 1\nagain\n"
    first, second = server.engine.requests("<user>")[-2:]
    assert [len(one.images) for one in (first, second)] == [2, 3]
    file.write_bytes(file.read_bytes()[:60])
    assert chat(monkeypatch, server, "say:seen\nsay:without\n", "--image", str(file)) == 1
    said, answered = capsys.readouterr().out.strip().split("]\n")
    assert said.startswith("[messages.0.content.0.image_url") and said.endswith("(images are no longer attached)")
    assert answered == "without"
    assert chat(monkeypatch, server, "", "--image", "nowhere.png") == 2
    assert capsys.readouterr().err == "minisgl chat: --image nowhere.png: No such file or directory\n"


def test_a_model_that_does_not_see_is_not_asked_without_the_images(
    front_end: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with frontend(front_end=front_end) as blind:
        file.write_bytes(sight.png())
        assert chat(monkeypatch, blind, "say:seen\nsay:text\n", "--image", str(file)) == 1
        refused = "[the model reads text only: it would answer without the images (images are no longer attached)]"
        assert capsys.readouterr().out == f"\n{refused}\ntext\n"
        blind.wait_until(lambda: blind.num_live == 0)
