"""`minisgl bench ab`: the order of its runs and the words of its verdict. The README's example runs all of it."""

from __future__ import annotations

import pytest

from minisgl import cli
from minisgl.bench.ab import Part, Turns, verdict
from minisgl.bench.stats import paired_difference


def test_turns_alternate_and_report_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, int]] = []

    def one(name: str, pair: int) -> dict[str, float]:
        asked.append((name, pair))
        return {"output_tok_s": 1000.0 * len(asked)}

    found = Turns("a part", ("a", "b"), 2).measure(one)
    assert asked == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert [[run["output_tok_s"] for run in runs] for runs in found.values()] == [[1000, 4000], [2000, 3000]]
    assert capsys.readouterr().err.splitlines()[1] == "bench ab: a part: pair 1 of 2: b: 2,000 tok/s"


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([10.0, 20.0], [13.0, 26.1], "b: 1.30 times the tok/s (95 % interval 1.27 to 1.33, 2 pairs)"),
        ([10.0, 20.0], [5.0, 10.0], "b: 0.50 times the tok/s (95 % interval 0.50 to 0.50, 2 pairs)"),
        (
            [10.0, 20.0],
            [11.0, 18.0],
            "b: no difference can be seen in tok/s (0.99 times, 95 % interval 0.28 to 3.56, 2",
        ),
        ([10.0], [20.0], "b: 2.00 times the tok/s; one pair has no interval"),
    ],
)
def test_verdict_of_an_interval_with_1_claims_no_difference(first: list[float], second: list[float], said: str) -> None:
    assert verdict("b", paired_difference(first, second)).startswith(said)


def test_part_of_three_schedulers_compares_each_with_the_first() -> None:
    names = ("python", "rust_parts", "rust_hotpath")
    runs = {
        name: [{"output_tok_s": 10.0 * speed + i, "step_p50_us": 7.0} for i in range(3)]
        for speed, name in enumerate(names, 1)
    }
    part = Part("a part", runs)
    assert [line.partition(":")[0] for line in part.verdicts()] == ["rust_parts", "rust_hotpath"]
    assert part.table().splitlines()[0] == "| scheduler | tok/s | step p50 us |"
    assert part.as_dict()["medians"]["rust_parts"] == {"output_tok_s": 21.0, "step_p50_us": 7.0}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--backends", "python", "python"], "--backends python python"),
        (["--pairs", "0"], "--pairs 0"),
        (["--backends", "python", "no-such"], "unknown scheduler 'no-such'"),
    ],
)
def test_flags_that_compare_nothing_are_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "ab", *flags]) == 2
    assert said in capsys.readouterr().err
