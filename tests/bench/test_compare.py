"""`minisgl bench compare`: the same prompts for each variant, in turns, and a reason for each that was not measured."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from minisgl.bench import compare, compare_variants
from minisgl.bench.compare_variants import Answer, Missing, Setup, Times
from minisgl.bench.server_process import Launch, ServerProcess
from minisgl.cli import bench
from minisgl.config import ConfigError

SMALL = ("--concurrency", "1", "2", "--input-len", "6", "--output-len", "4", "--prefill-len", "9", "--repeats", "2")

ECHO = ("--engine", "echo", "--num-pages", "256", "--max-seq-len", "512")

Asked = list[tuple[str, tuple[str, ...], int]]


class Fake:
    """Answers a token a second; `fails_at` counts what it was asked."""

    version = "fake 1"

    pid = None

    def __init__(self, name: str, asked: Asked, max_sequences: int | None = None, fails_at: int = -1) -> None:
        self.name, self.asked, self.max_sequences, self.fails_at = name, asked, max_sequences, fails_at

    def ask(self, prompts: Sequence[str], num_out: int) -> Times:
        if self.fails_at == len([one for one in self.asked if one[0] == self.name]):
            raise Missing("broke")
        self.asked.append((self.name, tuple(prompts), num_out))
        first = None if self.name == "whole" else tuple(0.5 for _ in prompts)
        return Times(float(num_out), first, 6 * len(prompts), num_out * len(prompts), (0.25,) if first else ())

    def answer(self, prompt: str, max_out: int) -> Answer:
        return Answer(prompt if self.name == "a" else prompt[: len(prompt) // 2] + "?", 6)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found: Asked = []
    variants = {
        "a": Fake("a", found),
        "whole": Fake("whole", found),
        "single": Fake("single", found, max_sequences=1),
        "breaks": Fake("breaks", found, fails_at=4),
    }

    @contextlib.contextmanager
    def make(name: str, setup: Setup) -> Iterator[Fake]:
        if name not in variants:
            raise Missing("is not here")
        yield variants[name]

    monkeypatch.setattr(compare, "VARIANTS", dict.fromkeys((*variants, "gone"), make))
    monkeypatch.setattr(compare_variants, "VARIANTS", dict.fromkeys((*variants, "gone"), make))
    return found


def test_variants_take_turns_on_the_same_prompts(
    asked: Asked, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = bench.main(["compare", "--json", *SMALL, "--variants", "a", "whole", "single", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert code == 0 and found["missing"] == {}
    variants = found["variants"]
    mid = {name: {n: found[0] for n, found in variants["a"][name].items()} for name in ("tok_s", "ttft_ms", "itl_ms")}
    assert mid["tok_s"] == pytest.approx({"1": 1.0, "2": 2.0}) and mid["itl_ms"] == pytest.approx({"1": 250, "2": 250})
    assert mid["ttft_ms"] == pytest.approx({"1": 500.0, "2": 500.0})
    assert variants["a"]["prefill_tok_s"][0] == pytest.approx(12) and variants["whole"]["prefill_tok_s"][0] < 7
    assert variants["whole"]["ttft_ms"] == {} and list(variants["single"]["tok_s"]) == ["1"]
    assert (
        found["against"]["ratio"]["whole"]["2"][0] == pytest.approx(1)
        and "2" not in found["against"]["ratio"]["single"]
    )
    assert found["agreement"]["variants"]["whole"]["same"] == 0 and variants["a"]["rss_mib"] is None
    assert len(variants["a"]["rounds"]["tok_s"]["1"]) == 2
    by_variant = {name: [(prompts, out) for one, prompts, out in asked if one == name] for name in variants}
    assert by_variant["a"] == by_variant["whole"] and set(by_variant["single"]) < set(by_variant["a"])
    texts = [text for prompts, _ in by_variant["a"] for text in prompts]
    assert len(texts) == len(set(texts)) == 3 * (1 + 2 + 1)
    order = [name for i, (name, _, _) in enumerate(asked) if not i or asked[i - 1][0] != name]
    assert order == ["a", "whole", "single", "whole", "a", "whole", "single"]  # there and back
    report = (tmp_path / "README.md").read_text()
    assert "| whole | 1.00 [1.00, 1.00] | 2.00 [2.00, 2.00] | 6.00 [6.00, 6.00] |" in report and "| whole |" in printed
    assert "| whole | 0 of 8 |" in report
    assert json.loads((tmp_path / "raw.json").read_text())["result"] == found


def test_failed_variants_are_listed_with_the_reason(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["compare", "--json", *SMALL, "--variants", "a", "gone", "breaks"]) == 1
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert found["missing"] == {"gone": "is not here", "breaks": "broke"} and list(found["variants"]) == ["a"]
    assert "| gone | is not here |" in printed


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--concurrency", "0"), "--concurrency"),
        (("--repeats", "0"), "--repeats"),
        (("--agreement-prompts", "-1"), "--agreement-prompts"),
        (("--url", "x"), "--url"),
        (("--url", "vllm=http://127.0.0.1:9"), "--url"),
        (("--python", "other=python3"), "--python"),
    ],
)
def test_flags_that_make_no_sense(flags: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        bench.main(["compare", *flags])


def test_real_variants_in_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A server of its own, one that is given, and transformers on the embedded model."""
    with ServerProcess(Launch(flags=ECHO)) as given:
        flags = ("--variants", "minisgl", "transformers", "--url", f"mine={given.url}/v1", "--dtype", "float32")
        flags = (*flags, "--agreement-prompts", "1")
        code = bench.main(["compare", "--json", *SMALL, "--repeats", "1", "--threads", "1", *flags, "--", *ECHO])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0 and list(found["variants"]) == ["minisgl", "transformers", "mine"] and found["missing"] == {}
    for name, one in found["variants"].items():
        assert set(one["tok_s"]) == {"1", "2"} and all(value > 0 for value, _, _ in one["tok_s"].values())
        assert one["prefill_tok_s"][0] > 0 and (one["ttft_ms"] == {}) == (name == "transformers")
        assert (one["rss_mib"] is None) == (name == "mine") and (one["cpu_s_per_1000"] == {}) == (name == "mine")
    agreed = found["agreement"]["variants"]
    assert agreed["mine"] == {"same": 1, "until_difference": [1.0], "same_num_in": True}
    assert agreed["transformers"]["same"] == 0  # an echo is no answer


def test_a_variant_that_breaks_is_stopped_before_the_others_go_on(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What hangs computes on, and would be measured with the others."""
    begin = compare.start

    @contextlib.contextmanager
    def told(name: str, setup: Setup) -> Iterator[compare_variants.Variant]:
        with begin(name, setup) as variant:
            yield variant
        asked.append((f"{name} is stopped", (), 0))

    monkeypatch.setattr(compare, "start", told)
    assert bench.main(["compare", "--json", *SMALL, "--arms", "a", "breaks"]) == 1
    names = [name for name, _, _ in asked]
    assert "a" in names[names.index("breaks is stopped") :] and names[-1] == "a is stopped"


def test_a_key_in_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The server that is started wants it, and its dtype is asked for."""
    monkeypatch.setenv("MINISGL_API_KEY", "secret")
    assert bench.main(["compare", "--json", *SMALL, "--repeats", "1", "--variants", "minisgl", "--", *ECHO]) == 0
    assert list(json.loads(capsys.readouterr().out.splitlines()[-1])["variants"]) == ["minisgl"]
    assert bench.main(["compare", "--json", *SMALL, "--variants", "minisgl", "--", *ECHO, "--api-key", "other"]) == 1
    assert "401" in json.loads(capsys.readouterr().out.splitlines()[-1])["missing"]["minisgl"]


@pytest.mark.slow
def test_every_variant_that_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["compare", "--json", *SMALL, "--concurrency", "1", "--repeats", "1", "--agreement-prompts", "1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"minisgl", "transformers", "transformers-stream"} <= set(found["variants"])
    assert set(found["variants"]) | set(found["missing"]) == set(compare.VARIANTS)
    assert all("is not installed" in reason for reason in found["missing"].values())
