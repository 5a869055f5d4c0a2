"""Bundles that are none: one line each, which names file, field, value and reason."""

import json
import os
import re

import numpy as np
import pytest

from engine.bundle import BundleError, open_bundle
from engine.native import Engine
from tests.bad_input.conftest import with_config

NORM, GATE, EMBED = "model.norm.weight", "model.layers.0.mlp.gate_proj", "model.embed_tokens.weight"
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}


def entry(name, **fields):
    def change(file):
        file.entries[name] |= fields

    return change


def config(**fields):
    return lambda file: with_config(file, **fields)


def metadata(**fields):
    def change(file):
        file.metadata |= fields

    return change


def without(name):
    """Tensor and data."""

    def change(file):
        begin, end = file.entries.pop(name)["data_offsets"]
        file.data = file.data[:begin] + file.data[end:]
        for entry in file.entries.values():
            entry["data_offsets"] = [at - (end - begin) * (at >= end) for at in entry["data_offsets"]]

    return change


def rename(old, new):
    def change(file):
        file.entries[new] = file.entries.pop(old)

    return change


def values(name, pattern: bytes):
    """Writes `pattern` over the tensor's first bytes."""

    def change(file):
        begin, _ = file.entries[name]["data_offsets"]
        file.data = file.data[:begin] + pattern + file.data[begin + len(pattern) :]

    return change


def extra(name):
    def change(file):
        end = len(file.data)
        file.entries[name] = {"dtype": "F32", "shape": [2], "data_offsets": [end, end + 8]}
        file.data += bytes(8)

    return change


def trailer(file):
    file.trailer = bytes(4)


def twice(file):
    file.extra_header.append(f"{json.dumps(NORM)}: {json.dumps(file.entries[NORM])}")


def overlap(file):
    begin, end = file.entries[NORM]["data_offsets"]
    file.entries[NORM]["data_offsets"] = [begin - 128, end - 128]


WRONG = {
    # the file
    "other format": (metadata(format="KDTR 2"), "format: KDTR 2: not KDTR 1"),
    "another program's file": (lambda file: setattr(file, "metadata", {"format": "pt"}), "format: pt: not KDTR 1"),
    "no metadata": (lambda file: setattr(file, "metadata", None), "__metadata__: None: must be a map"),
    "data cut off": (lambda file: setattr(file, "data", file.data[:-1]), "lm_head.weight: bytes "),
    "bytes behind": (trailer, "size: "),
    "tensor twice": (twice, f"header: {NORM} stands there twice: "),
    # tensors
    "missing": (without(GATE + ".weight"), f"{GATE}.weight: missing: the config asks for this tensor"),
    "renamed": (rename(GATE + ".weight", GATE + ".wait"), f"{GATE}.weight: missing: the config asks for this tensor"),
    "extra": (extra("extra"), "extra: [2]: no tensor of this model"),
    "overlapping": (overlap, f"{NORM}: starts at byte "),
    "misshapen": (entry(NORM, shape=[4, 8]), f"{NORM}: [4, 8]: shape must be [32]"),
    "transposed": (entry(EMBED, shape=[32, 17]), f"{EMBED}: [32, 17]: shape must be [17, 32]"),
    "size against shape": (entry(NORM, shape=[33]), f"{NORM}: 128 bytes: F32 [33] needs 132"),
    "negative extent": (entry(NORM, shape=[-32]), f"{NORM}: "),
    "extent beyond 32 bits": (entry(NORM, shape=[2**32 + 32]), f"{NORM}: "),
    "extent of no number": (entry(NORM, shape=["32"]), f"{NORM}: "),
    "extent true": (entry(NORM, shape=[True]), f"{NORM}: "),
    "many dimensions": (entry(NORM, shape=[1] * 100), f"{NORM}: "),
    "no shape": (entry(NORM, shape=None), f"{NORM}: "),
    "offsets backwards": (entry(NORM, data_offsets=[128, 0]), f"{NORM}: bytes 128 to 0: "),
    "offsets past the end": (entry(NORM, data_offsets=[10**12, 10**12 + 128]), f"{NORM}: bytes 1000000000000 to "),
    "float64": (entry(NORM, dtype="F64", shape=[16]), f"{NORM}: "),
    "int32 for a norm": (entry(NORM, dtype="I32"), f"{NORM}: I32: dtype must be F32 or BF16"),
    "type of no name": (entry(NORM, dtype=["F32"]), f"{NORM}: "),
    "entry of no map": (lambda file: file.entries.update({NORM: 7}), f"{NORM}: 7: not a safetensors entry"),
    "NaN": (values(NORM, np.float32("nan").tobytes()), f"{NORM}: NaN or inf: weights and scales must be finite"),
    "inf": (values(NORM, np.float32("-inf").tobytes()), f"{NORM}: NaN or inf: "),
    "name with a line break": (extra("a\nb\x1b[31m"), r"a\nb\x1b[31m: [2]: no tensor of this model"),
    "name of half a character": (extra("\udc80"), r"\udc80: [2]: no tensor of this model"),
    "empty name": (extra(""), "'': [2]: no tensor of this model"),
    # its config
    "config no JSON": (metadata(config="{"), "config: Expecting property name"),
    "config no map": (metadata(config="[1]"), "config: list: "),
    "config deep": (metadata(config="[" * 100_000), "config: "),
    "config absent": (metadata(config=None), "config: None: missing from the metadata"),
    "field missing": (config(kv_lora_rank=None), "kv_lora_rank: missing: needed"),
    "field twice": (metadata(config='{"vocab_size": 17, "vocab_size": 18}'), "config: vocab_size stands there twice: "),
    "config against tensors": (config(hidden_size=64), f"{EMBED}: [17, 32]: shape must be [17, 64]"),
    "heads against tensors": (config(num_attention_heads=3), "model.layers.0.self_attn.q_b_proj.weight: [16, 8]: "),
    "more layers": (config(num_hidden_layers=3), "model.layers.2.input_layernorm.weight: missing: "),
    "fewer layers": (config(num_hidden_layers=1), "model.layers.1."),
    "more experts": (config(n_routed_experts=6), "model.layers.1.mlp.experts.4.gate_proj.weight: missing: "),
    "10^9 layers": (config(num_hidden_layers=10**9), "num_hidden_layers: 1000000000: must be at most 1048576"),
    "10^6 layers": (config(num_hidden_layers=10**6), "num_hidden_layers: 1000000: there are only "),
    "10^6 experts": (config(n_routed_experts=10**6), "n_routed_experts: 1000000: in 1 layers, but there are only "),
    "10^9 heads": (config(num_attention_heads=10**9), "num_attention_heads: 1000000000: must be at most 1048576"),
    "2^31": (config(hidden_size=2**31), "hidden_size: 2147483648: must be at most 1048576"),
    "2^64 and a bit": (config(vocab_size=2**64 + 17), "vocab_size: 18446744073709551633: must be at most 1048576"),
    "zero": (config(kv_lora_rank=0), "kv_lora_rank: 0: must be positive"),
    "negative": (config(v_head_dim=-4), "v_head_dim: -4: must be positive"),
    "fraction": (config(vocab_size=17.0), "vocab_size: 17.0: must be an integer"),
    "true": (config(num_hidden_layers=True), "num_hidden_layers: True: must be an integer"),
    "text": (config(hidden_size="32"), "hidden_size: 32: must be an integer"),
    "long text": (config(hidden_size="x" * 5000), "hidden_size: xxxx"),
    "inf in the config": (config(rope_theta=float("inf")), "rope_theta: inf: must be a finite number"),
    "beyond float32": (config(routed_scaling_factor=1e39), "routed_scaling_factor: 1e+39: must lie in 1e-30…1e+30"),
    "odd rope": (config(qk_rope_head_dim=3), "qk_rope_head_dim: 3: must be even"),
    "groups": (config(n_group=3), "n_group: 3: must divide n_routed_experts (4)"),
    "groups chosen": (config(topk_group=3), "topk_group: 3: exceeds n_group (2)"),
    "experts chosen": (config(num_experts_per_tok=3), "num_experts_per_tok: 3: exceeds the 2 experts of "),
    "rope type": (config(rope_scaling={"type": "linear", "factor": 2}), "rope_scaling.rope_type: linear: only "),
    "rope field": (config(rope_scaling=YARN | {"truncate": True}), "rope_scaling.truncate: True: not supported"),
    "rope factor": (config(rope_scaling=YARN | {"factor": 0}), "rope_scaling.factor: 0: must be positive"),
    "rope no map": (config(rope_scaling=[1]), "rope_scaling: [1]: must be a map"),
    "key heads": (config(num_key_value_heads=1), "num_key_value_heads: 1: must equal num_attention_heads (2)"),
    "activation": (config(hidden_act="gelu"), "hidden_act: gelu: only 'silu' is supported"),
    "tied": (config(tie_word_embeddings=True), "tie_word_embeddings: True: only False is supported"),
}


@pytest.mark.parametrize(("change", "expected"), WRONG.values(), ids=WRONG)
def test_wrong(float_file, write, change, expected):
    file = float_file.copy()
    check(write(change(file) or file), expected)


INT4 = {
    "8 bits": (metadata(quant='{"bits": 8, "group_size": 32}'), "quant: {'bits': 8, 'group_size': 32}: only 4 bits"),
    "group of 33": (metadata(quant='{"bits": 4, "group_size": 33}'), "quant: {'bits': 4, 'group_size': 33}: only "),
    "group of 32.0": (metadata(quant='{"bits": 4, "group_size": 32.0}'), "quant: {'bits': 4, 'group_size': 32.0}: "),
    "unknown field": (metadata(quant='{"bits": 4, "group_size": 32, "zero_point": true}'), "quant: {'bits': 4, "),
    "group against columns": (
        metadata(quant='{"bits": 4, "group_size": 64}'),
        f"{GATE}.weight: 32: columns must be a multiple of the group size 64",
    ),
    "no quant": (metadata(quant="null"), f"{GATE}.weight: INT4: not one of the matrices that may be INT4 here"),
    "scales missing": (rename(GATE + ".sc", GATE + ".scale"), f"{GATE}.sc: missing: "),
    "codes as floats": (entry(GATE + ".qw", dtype="F32"), f"{GATE}.qw: F32: dtype must be I32"),
    "codes misshapen": (entry(GATE + ".qw", shape=[4, 32]), f"{GATE}.qw: [4, 32]: shape must be [32, 4]"),
    "NaN scale": (values(GATE + ".sc", b"\xc0\x7f"), f"{GATE}.sc: NaN or inf: "),
    "inf in bf16": (values(NORM, b"\x80\xff"), f"{NORM}: NaN or inf: "),
}


@pytest.mark.parametrize(("change", "expected"), INT4.values(), ids=INT4)
def test_wrong_int4(int4_file, write, change, expected):
    file = int4_file.copy()
    check(write(change(file) or file), expected)


FOREIGN = {
    "empty": (b"", "size: 0: too short"),
    "7 bytes": (b"1234567", "size: 7: too short"),
    "text": (b"models:\n  tiny:\n    seed: 1\n", "header length: "),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(100), "header length: "),
    "zip": (b"PK\x03\x04" + bytes(100), "header length: "),
    "zeros": (bytes(4096), "header: "),
    "header of a list": ((2).to_bytes(8, "little") + b"[]", "header: list: "),
    "header of no text": ((2).to_bytes(8, "little") + b"\xff\xfe", "header: "),
    "header longer than the file": ((2**63).to_bytes(8, "little") + b"{}", "header length: 9223372036854775808: "),
}


@pytest.mark.parametrize(("content", "expected"), FOREIGN.values(), ids=FOREIGN)
def test_foreign(write, content, expected):
    check(write(content), expected)


def test_truncated_anywhere(float_file, write):
    data = float_file.bytes()
    for length in range(0, len(data), len(data) // 97):
        check(write(data[:length]), "")


def test_shortened_once_open(float_file, write, library_path):
    """Its pages are gone: to touch one would end the process."""
    path = write(float_file.bytes())
    bundle, size = open_bundle(path), os.path.getsize(path)
    os.truncate(path, size // 2)
    message = f"{path}: size: {size // 2}: {size} bytes when it was opened: shortened since"
    with pytest.raises(BundleError, match=f"^{re.escape(message)}$"):
        Engine(library_path, bundle, context=64)


def test_no_such_file(tmp_path):
    check(str(tmp_path / "none.safetensors"), "file: No such file or directory: cannot be read")


def test_folder_and_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for ever
    check(str(tmp_path / "pipe"), "file: pipe: not a regular file")
    check(str(tmp_path), f"file: {tmp_path.name}: not a regular file")


def test_odd_addresses(float_file, write):
    """Whitespace in the header is allowed and puts tensors at odd addresses; the engine gets aligned ones."""
    file = float_file.copy()
    sound = open_bundle(write(file))
    for padding in (1, 2, 3, 5):
        file.header_padding = padding
        odd = open_bundle(write(file, f"{padding}.safetensors"))
        for name, tensor in odd.tensors.items():
            assert tensor.array.flags.aligned
            np.testing.assert_array_equal(tensor.array, sound.tensors[name].array)


def check(path: str, expected: str) -> None:
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {expected}")
    assert message.isprintable() and message.count(": ") >= 3 and len(message) < 400 + len(path)
