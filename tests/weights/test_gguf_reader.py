"""What the extension makes of GGUF files and of ggml's block formats, against gguf-py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from minisgl import _rust
from minisgl.config import ConfigError
from minisgl.weights.sources import find_smollm2
from tests.helpers.gguf import finish


def _expected(kind: str, data: npt.NDArray[np.uint8]) -> Any:
    if kind not in ("Q1_0", "Q2_0"):
        return gguf.dequantize(data, GGMLQuantizationType[kind])
    bits = 1 if kind == "Q1_0" else 2  # gguf-py has no decoder for these two
    codes = np.unpackbits(data[:, 2:], axis=1, bitorder="little").reshape(len(data), -1, bits) @ [1, 2][:bits]
    values = codes * 2.0 - 1.0 if bits == 1 else codes - 1.0
    return np.ascontiguousarray(data[:, :2]).view(np.float16).astype(np.float32) * values.astype(np.float32)


@pytest.mark.parametrize("kind", _rust.GGUF_TYPES)
def test_blocks_of_random_bytes_decode_as_in_gguf_py(kind: str) -> None:
    size = 18 if kind == "Q2_0" else gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    extreme = np.repeat(np.arange(256, dtype=np.uint8), size).reshape(256, size)
    data = np.concatenate([np.random.default_rng(14).integers(0, 256, (2000, size), np.uint8), extreme])
    with np.errstate(all="ignore"):  # scales are anything, infinite and NaN as well
        expected = _expected(kind, data).reshape(-1)
    found = np.frombuffer(_rust.decode_blocks(kind, data.tobytes()), "<f4")
    np.testing.assert_array_equal(found, expected)
    finite = np.isfinite(expected)
    assert finite.mean() > 0.8
    np.testing.assert_array_equal(found[finite].view(np.int32), expected[finite].view(np.int32))  # 0.0 is not -0.0


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("scale", [1e-6, 0.02, 300.0])
def test_numbers_become_blocks_as_in_gguf_py(kind: Any, scale: float) -> None:
    rng = np.random.default_rng(5)
    numbers = (rng.standard_normal((4000, 32)) * scale).astype(np.float32)
    numbers[0], numbers[1], numbers[2, 3:] = 0.0, 0.25, 0.0
    numbers[3] = np.linspace(-127, 127, 32) / 2  # halves between two steps
    expected = gguf.quantize(numbers, GGMLQuantizationType[kind]).tobytes()
    assert _rust.encode_blocks(kind, numbers.tobytes()) == expected


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e9])
def test_values_beyond_block_range_are_refused(kind: Any, bad: float) -> None:
    numbers = np.zeros(64, np.float32)
    numbers[40] = bad
    with pytest.raises(ValueError, match="not finite, or too large"):
        _rust.encode_blocks(kind, numbers.tobytes())


def test_unknown_or_incomplete_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="no decoder for Q9_9"):
        _rust.decode_blocks("Q9_9", b"")
    with pytest.raises(ValueError, match=r"17 bytes are not whole blocks of 18 \(Q4_0\)"):
        _rust.decode_blocks("Q4_0", bytes(17))


def _compare(file: Path) -> None:
    header, reader = _rust.gguf_header(file), GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header["metadata"] == fields
    assert list(header["tensors"]) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        kind, shape = header["tensors"][tensor.name]
        assert (kind, list(shape)) == (tensor.tensor_type.name, tensor.shape[::-1].tolist())
        start = int(tensor.data_offset)
        assert header["places"][tensor.name] == (file, start, start + int(tensor.n_bytes))
    assert header["head_bytes"] == reader.data_offset == _rust.gguf_head_bytes(file)


def test_a_header_with_values_of_every_type(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 1e-5)
    writer.add_float64("f64", 1e-5)
    writer.add_bool("true", True)
    writer.add_bool("false", False)
    writer.add_string("text", "naïve 日本語 🌊")
    writer.add_array("texts", ["a", "", "é"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("bools", [True, False])
    writer.add_array("floats", [0.5, 0.25])
    writer.add_custom_alignment(64)
    writer.add_tensor("matrix", np.ones((3, 5), np.float32))
    writer.add_tensor("cube", np.ones((2, 3, 5), np.float16))
    writer.add_tensor("line", np.ones(7, np.int32))
    _compare(finish(writer, tmp_path / "m.gguf"))


def test_the_header_of_the_embedded_model() -> None:
    try:
        file = find_smollm2()
    except ConfigError as error:
        pytest.skip(str(error))
    _compare(file)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(7))
    with pytest.raises(ValueError, match=r"m\.gguf: the file ends in the counts"):
        _rust.gguf_header(file)
    with pytest.raises(ValueError, match=r"none\.gguf: No such file"):
        _rust.gguf_header(tmp_path / "none.gguf")
