"""Damaged and truncated GGUF files: one line with what is wrong, and where."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import pytest

from bough.errors import UnsupportedModel
from bough.models.weights.gguf_header import TYPES, read_gguf, read_gguf_header, require_model_keys
from tests.models.tiny_gguf import split_gguf, write_gguf

WEIGHT = b"blk.0.attn_output.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file, gguf.GGMLQuantizationType.Q8_0)
    return file.read_bytes()


def refusal(tmp_path: Path, content: bytes) -> str:
    """What is said of a file with this content, without the file's path."""
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(UnsupportedModel) as caught:
        require_model_keys(file, read_gguf_header(file))
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(file), "FILE")


def type_at(whole: bytes) -> int:
    """Where the type of a weight with two axes is written; its offset follows."""
    return whole.index(WEIGHT) + len(WEIGHT) + 4 + 2 * 8


def test_a_whole_file_is_read_as_the_library_reads_it(tmp_path, whole):
    (tmp_path / "tiny.gguf").write_bytes(whole)
    library = gguf.GGUFReader(tmp_path / "tiny.gguf")

    header = read_gguf_header(tmp_path / "tiny.gguf")

    require_model_keys(tmp_path / "tiny.gguf", header)
    assert header.architecture == "llama"
    assert len(header.tensors) == len(library.tensors)
    assert header.num_parameters == sum(int(tensor.n_elements) for tensor in library.tensors)
    assert set(header.values) == {name for name in library.fields if not name.startswith("GGUF.")}


def test_a_file_of_another_kind_is_told_by_its_first_bytes(tmp_path, whole):
    assert refusal(tmp_path, b"") == "FILE is empty: it is not a GGUF file"
    assert refusal(tmp_path, b"XXXX" + whole[4:]) == "FILE is not a GGUF file: it begins with b'XXXX' instead of b'GGUF'"
    assert refusal(tmp_path, b"<!DOCTYPE html>").startswith("FILE is not a GGUF file: it begins with b'<!DO'")


def test_a_version_that_cannot_be_read_is_told(tmp_path, whole):
    assert "its version is 9," in refusal(tmp_path, whole[:4] + struct.pack("<I", 9) + whole[8:])
    assert "it is big-endian," in refusal(tmp_path, whole[:4] + struct.pack(">I", 3) + whole[8:])


def test_a_header_that_ends_early_is_told_with_the_key_and_the_byte(tmp_path, whole):
    assert refusal(tmp_path, whole[:10]) == (
        "FILE is truncated or damaged in its first bytes: 8 bytes are needed at byte 8, and the file has 10 bytes"
    )
    assert "in key 15 of 20 (tokenizer.ggml.tokens): " in refusal(tmp_path, whole[:2000])
    last = b"blk.1.ffn_norm.weight"
    at = whole.index(last) + len(last)
    assert f"({last.decode()}): 4 bytes are needed at byte {at:,}" in refusal(tmp_path, whole[: at + 2])


def test_every_length_of_a_truncated_file_is_one_line(tmp_path, whole):
    for length in (*range(300), *range(300, len(whole), 997), len(whole) - 1):
        assert refusal(tmp_path, whole[:length]).count("FILE") == 1


def test_more_weights_than_fit_the_file_are_told_with_both_numbers(tmp_path, whole):
    said = refusal(tmp_path, whole[:8] + struct.pack("<Q", 2**60) + whole[16:])

    assert f"it announces {2**60:,} weights, and " in said


def test_truncated_weights_are_told_with_the_first_that_is_cut_and_what_is_missing(tmp_path, whole):
    said = refusal(tmp_path, whole[:-40])

    assert said == (
        f"FILE is truncated: the weight blk.1.ffn_norm.weight ends at byte {len(whole):,}, "
        f"and the file has {len(whole) - 40:,} bytes; missing bytes: 40"
    )


def test_a_name_with_line_breaks_is_told_in_one_line(tmp_path, whole):
    content = whole.replace(WEIGHT, WEIGHT.replace(b"attn", b"\n\x1b[m"))
    at = type_at(whole)

    said = refusal(tmp_path, content[:at] + b"\xff\xff\x00\x00" + content[at + 4 :])

    assert said.startswith("the weight blk.0.\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[m_output.weight in FILE")


def test_a_type_that_is_not_known_is_told_with_the_weight(tmp_path, whole):
    at = type_at(whole)

    assert refusal(tmp_path, whole[:at] + struct.pack("<I", 77) + whole[at + 4 :]) == (
        f"the weight {WEIGHT.decode()} in FILE has the type 77, which cannot be read"
    )


def test_an_offset_beyond_the_file_is_told_with_the_weight(tmp_path, whole):
    at = type_at(whole) + 4

    said = refusal(tmp_path, whole[:at] + struct.pack("<Q", 10**9) + whole[at + 8 :])

    assert f"the weight {WEIGHT.decode()} ends at byte 1,000," in said


@pytest.mark.parametrize("key", ["general.architecture", "llama.block_count", "tokenizer.ggml.tokens"])
def test_a_missing_key_is_told_by_name(tmp_path, whole, key):
    said = refusal(tmp_path, whole.replace(key.encode(), key[:-1].encode() + b"~", 1))

    assert said == f"FILE lacks the key {key}, among its 20 keys"


def test_a_file_that_holds_an_adapter_is_told_as_such(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "lora.gguf", "llama")
    writer.add_type("adapter")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

    assert refusal(tmp_path, (tmp_path / "lora.gguf").read_bytes()) == "FILE holds no model: its general.type is 'adapter'"


@pytest.mark.parametrize("architecture", ["bert", "nomic-bert-moe", "gemma-embedding"])
def test_an_encoder_is_refused_by_its_architecture(tmp_path, architecture):
    write_gguf(tmp_path / "encoder.gguf", gguf.GGMLQuantizationType.F32, architecture=architecture)

    told = refusal(tmp_path, (tmp_path / "encoder.gguf").read_bytes())

    assert told.startswith(f"FILE holds an encoder of the architecture {architecture!r}: encoders run from folders")


def pack_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def make_header(num_weights: int, num_keys: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_weights, num_keys) + rest


def test_a_weight_with_more_axes_than_any_has_is_told_before_they_are_read(tmp_path):
    axes = struct.pack("<I", 200_000) + struct.pack("<Q", 2**63) * 200_000
    assert refusal(tmp_path, make_header(1, 0, pack_text("w") + axes + bytes(64))) == (
        "FILE is damaged in the description of weight 1 of 1 (w): it has 200,000 axes, and a weight has at most 4"
    )


def test_arrays_in_arrays_are_followed_a_few_steps_and_no_further(tmp_path):
    def nest(depth: int) -> bytes:
        arrays = struct.pack("<IQ", 9, 1) * (depth - 1) + struct.pack("<IQI", 4, 1, 7)
        return make_header(0, 1, pack_text("k") + struct.pack("<I", 9) + arrays)

    (tmp_path / "nested.gguf").write_bytes(nest(4))
    assert read_gguf_header(tmp_path / "nested.gguf").values == {"k": [[[[7]]]]}
    for depth in (5, 100_000):
        assert "key 1 of 1 (k) has arrays in more than 4 others, at byte " in refusal(tmp_path, nest(depth))


@pytest.mark.parametrize(("kind", "what"), [(8, "texts"), (9, "arrays")])
def test_an_array_that_cannot_fit_the_file_is_told_with_both_numbers(tmp_path, kind, what):
    array = struct.pack("<IIQ", 9, kind, 2**62) + bytes(1000)
    assert refusal(tmp_path, make_header(0, 1, pack_text("k") + array)) == (
        f"FILE is damaged or truncated in key 1 of 1 (k): it announces {2**62:,} {what}, and 1,000 bytes follow"
    )


def test_types_are_those_of_the_package_gguf():
    known = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: TYPES[kind] for kind in known} == known  # its older versions know fewer types


def test_values_are_those_that_the_library_reads(tmp_path, whole):
    (tmp_path / "tiny.gguf").write_bytes(whole)
    library = gguf.GGUFReader(tmp_path / "tiny.gguf")

    header = read_gguf_header(tmp_path / "tiny.gguf")

    assert header.values == {name: each.contents() for name, each in library.fields.items() if not name.startswith("GGUF.")}
    assert [(each.name, each.shape[::-1], each.type, each.offset, each.num_bytes) for each in header.tensors] == [
        (each.name, tuple(each.shape.tolist()), each.tensor_type.name, int(each.data_offset), int(each.n_bytes))
        for each in library.tensors
    ]


@pytest.mark.parametrize(("alignment", "said"), [(0, "its general.alignment is 0"), (48, "its general.alignment is 48")])
def test_an_alignment_that_is_no_power_of_two_is_told(tmp_path, alignment, said):
    rest = pack_text("general.alignment") + struct.pack("<II", 4, alignment)

    assert said in refusal(tmp_path, make_header(0, 1, rest))


def test_a_key_that_is_there_twice_is_told(tmp_path):
    rest = 2 * (pack_text("k") + struct.pack("<II", 4, 7))

    assert refusal(tmp_path, make_header(0, 2, rest)) == "FILE is damaged: it has the key k twice"


NAMES = [f"tiny-{number:05}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.mark.parametrize("given", [0, 1, 2])
def test_all_parts_of_a_split_model_are_found_by_any_of_them(tmp_path, given):
    files = split_gguf(tmp_path, NAMES)

    model = read_gguf(files[given])

    assert model.files == tuple(files)
    assert model.header.architecture == "llama"
    whole = read_gguf_header(tmp_path / "whole.gguf")
    assert {each.name for each in model.header.tensors} == {each.name for each in whole.tensors}
    assert {each.file for each in model.header.tensors} == {0, 1, 2}


def test_a_missing_part_is_told_with_the_numbers(tmp_path):
    files = split_gguf(tmp_path, NAMES)
    files[1].unlink()

    with pytest.raises(UnsupportedModel, match=rf"in 3 files, and 1 of them are not in .*: the first .* is {NAMES[1]}"):
        read_gguf(files[2])


def test_parts_in_another_order_and_parts_of_another_model_are_told(tmp_path):
    files = split_gguf(tmp_path, NAMES)
    content = files[1].read_bytes()
    files[1].write_bytes(files[2].read_bytes())

    with pytest.raises(UnsupportedModel, match=r"says that it is part 3 of 3, and by its name it is part 2 of 3"):
        read_gguf(files[0])
    files[1].write_bytes(content)
    files[2].rename(tmp_path / "other.gguf")
    with pytest.raises(
        UnsupportedModel, match=r"other\.gguf says that it is part 3 of 3, and by its name it is part 1 of 1"
    ):
        read_gguf(tmp_path / "other.gguf")
