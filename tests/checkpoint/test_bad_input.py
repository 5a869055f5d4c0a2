"""What is wrong with a folder is said in one line that names file and tensor; nothing in a folder is executed."""

import json
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from engine.checkpoint import CheckpointError, open_checkpoint
from engine.native import Engine
from reference.bundle import read_safetensors, write_safetensors
from tests.checkpoint import release

INDEX = "model.safetensors.index.json"
EXPERT = release.PREFIX + "model.layers.2.mlp.experts.5.gate_proj"
Q_A = release.PREFIX + "model.layers.1.self_attn.q_a_proj.weight"


def index(folder) -> dict:
    return json.loads((folder / INDEX).read_text())


def edit_json(folder, file, edit) -> None:
    content = json.loads((folder / file).read_text())
    edit(content)
    (folder / file).write_text(json.dumps(content))


def shard_of(folder, name) -> Path:
    return folder / index(folder)["weight_map"][name]


def edit_shard(folder, name, edit) -> None:
    """Rewrites the shard of tensor `name` after edit(its tensors)."""
    path = shard_of(folder, name)
    tensors = read_safetensors(path)[0]
    edit(tensors)
    write_safetensors(path, tensors, {"format": "pt"})


def set_tensor(folder, name, change) -> None:
    edit_shard(folder, name, lambda tensors: tensors.update({name: change(tensors[name])}))


def place(folder, name, file) -> None:
    edit_json(folder, INDEX, lambda content: content["weight_map"].update({name: file}))


def drop_tensor(folder, name) -> None:
    edit_shard(folder, name, lambda tensors: tensors.pop(name))
    edit_json(folder, INDEX, lambda content: content["weight_map"].pop(name))


def set_text(folder, **fields) -> None:
    edit_json(folder, "config.json", lambda config: config["text_config"].update(fields))


def set_quantization(folder, **fields) -> None:
    edit_json(folder, "config.json", lambda config: config["text_config"]["quantization_config"].update(fields))


def set_group(folder, **fields) -> None:
    def edit(config):
        config["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"].update(fields)

    edit_json(folder, "config.json", edit)


def second_group(folder) -> None:
    def edit(config):
        groups = config["text_config"]["quantization_config"]["config_groups"]
        groups["group_1"] = json.loads(json.dumps(groups["group_0"]))
        groups["group_1"]["weights"]["group_size"] = 64

    edit_json(folder, "config.json", edit)


def truncate(path: Path, n_bytes: int) -> None:
    os.truncate(path, path.stat().st_size - n_bytes)


def with_header(path: Path, edit) -> None:
    """Rewrites only the header; edit(header) may return another text."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = edit(header)
    text = (text if isinstance(text, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def not_finite(array):
    array = array.copy()
    array.reshape(-1)[7] = 0x7FC0 if array.dtype == np.uint16 else np.nan
    return array


def duplicate(folder) -> None:
    """The same tensor under its other spelling, in another shard."""
    spare = release.PREFIX + "lm_head.weight"
    name, copy = Q_A, Q_A.removeprefix(release.PREFIX)
    value = read_safetensors(shard_of(folder, name))[0][name]
    edit_shard(folder, spare, lambda tensors: tensors.update({copy: value}))
    place(folder, copy, shard_of(folder, spare).name)


CASES = {
    "missing shard": (
        lambda f: (f / release.shard_names()[3]).unlink(),
        r"model-00004-of-000012.safetensors: .*: missing: the index",
    ),
    "truncated shard": (
        lambda f: truncate(shard_of(f, Q_A), 5000),
        r"model-000.*safetensors: language_model\.\S+: bytes .*truncated",
    ),
    "empty shard": (
        lambda f: truncate(shard_of(f, Q_A), shard_of(f, Q_A).stat().st_size),
        r"model-000.*: size: 0|cannot be read",
    ),
    "index names what the shard lacks": (
        lambda f: edit_shard(f, Q_A, lambda tensors: tensors.pop(Q_A)),
        r"model-000.*safetensors: \S+layers\.1\.self_attn\.q_a_proj\.weight: missing: .*index.json places",
    ),
    "shard holds what the index lacks": (
        lambda f: edit_json(f, INDEX, lambda c: c["weight_map"].pop(Q_A)),
        r"model-000.*safetensors: \S+q_a_proj\.weight: None: .*index.json does not place",
    ),
    "tensor nowhere": (lambda f: drop_tensor(f, Q_A), r"model: model\.layers\.1\.self_attn\.q_a_proj\.weight: missing"),
    "codes without scales": (
        lambda f: drop_tensor(f, EXPERT + ".weight_scale"),
        r"experts\.5\.gate_proj\.weight_scale: missing",
    ),
    "scales without codes": (
        lambda f: drop_tensor(f, EXPERT + ".weight_packed"),
        r"experts\.5\.gate_proj\.weight_packed: missing",
    ),
    "weight_shape against the codes": (
        lambda f: set_tensor(f, EXPERT + ".weight_shape", lambda x: x[::-1] * 2),
        r"model-000.*safetensors: \S+experts\.5\.gate_proj\.weight_shape: \[128, 128\]: the packed tensor has",
    ),
    "weight_shape of another kind": (
        lambda f: set_tensor(f, EXPERT + ".weight_shape", lambda x: x.astype(np.float32)),
        r"gate_proj\.weight_shape: F32 \[2\]: must be two I32 or I64",
    ),
    "weight_shape of three": (
        lambda f: set_tensor(f, EXPERT + ".weight_shape", lambda x: np.array([64, 64, 1], np.int32)),
        r"gate_proj\.weight_shape: I32 \[3\]: must be two I32 or I64",
    ),
    "infinite scale": (
        lambda f: set_tensor(f, EXPERT + ".weight_scale", lambda x: np.full_like(x, 0xFF80)),
        r"gate_proj\.weight_scale: NaN or inf",
    ),
    "codes of another shape": (
        lambda f: set_tensor(f, EXPERT + ".weight_packed", lambda x: x[:32]),
        r"model-000.*safetensors: \S+gate_proj\.weight_packed: \[32, 8\]: shape must be \[64, 8\]",
    ),
    "scales too short": (
        lambda f: set_tensor(f, EXPERT + ".weight_scale", lambda x: x[:, :1].copy()),
        r"gate_proj\.weight_scale: \[64, 1\]: shape must be \[64, 2\]",
    ),
    "NaN scale": (
        lambda f: set_tensor(f, EXPERT + ".weight_scale", not_finite),
        r"gate_proj\.weight_scale: NaN or inf",
    ),
    "NaN weight": (lambda f: set_tensor(f, Q_A, not_finite), r"q_a_proj\.weight: NaN or inf"),
    "weight of another dtype": (
        lambda f: set_tensor(f, Q_A, lambda x: x.astype(np.int64)),
        r"q_a_proj\.weight: I64: dtype must be F32 or BF16",
    ),
    "unknown tensor": (
        lambda f: (
            edit_shard(f, Q_A, lambda t: t.update({"model.layers.0.extra.weight": t[Q_A]})),
            place(f, "model.layers.0.extra.weight", shard_of(f, Q_A).name),
        ),
        r"model-000.*safetensors: model\.layers\.0\.extra\.weight: .*no tensor of this model",
    ),
    "duplicate tensor": (duplicate, r"model-000.*q_a_proj\.weight: model-000.*: this tensor stands there too"),
    "duplicate key in a header": (
        lambda f: with_header(shard_of(f, Q_A), lambda h: json.dumps(h)[:-1] + f', "{Q_A}": {json.dumps(h[Q_A])}}}'),
        r"model-000.*safetensors: header: .*q_a_proj\.weight stands there twice",
    ),
    "overlapping tensors": (
        lambda f: with_header(
            shard_of(f, EXPERT + ".weight_packed"),
            lambda h: h[EXPERT + ".weight_packed"].update(data_offsets=[0, 2048]),
        ),
        r"model-000.*safetensors: \S+: starts at byte",
    ),
    "header claims petabytes": (
        lambda f: with_header(shard_of(f, Q_A), lambda h: h[Q_A].update(shape=[1 << 40, 1 << 20])),
        r"model-000.*safetensors: \S+q_a_proj\.weight: .* bytes: BF16",
    ),
    "header length claims petabytes": (
        lambda f: shard_of(f, Q_A).write_bytes((1 << 50).to_bytes(8, "little") + b"{}"),
        r"model-000.*safetensors: header length: 1125899906842624: longer than the file",
    ),
    "header is no JSON": (
        lambda f: with_header(shard_of(f, Q_A), lambda h: "[" * 100_000),
        r"model-000.*safetensors: header: .*no JSON",
    ),
    "config key out of range": (lambda f: set_text(f, num_hidden_layers=-1), r"config\.json: num_hidden_layers: -1: "),
    "more experts than there are": (
        lambda f: set_text(f, n_routed_experts=1 << 20),
        r"n_routed_experts: 1048576: .*only \d+ tensors",
    ),
    "config key missing": (
        lambda f: edit_json(f, "config.json", lambda c: c["text_config"].pop("kv_lora_rank")),
        r"config\.json: kv_lora_rank: missing",
    ),
    "unknown rope type": (
        lambda f: set_text(f, rope_scaling={"type": "longrope", "factor": 2}),
        r"config\.json: rope_scaling\.rope_type: longrope: only default and yarn",
    ),
    "unknown model type": (
        lambda f: set_text(f, model_type="llama"),
        r"config\.json: model_type: llama: not one of deepseek_v3",
    ),
    "other activation": (lambda f: set_text(f, hidden_act="gelu"), r"config\.json: hidden_act: gelu: "),
    "unknown quant method": (
        lambda f: set_quantization(f, quant_method="gptq"),
        r"quantization_config\.quant_method: gptq: only compressed",
    ),
    "FP8 blocks": (
        lambda f: set_quantization(f, quant_method="fp8"),
        r"quant_method: fp8: FP8 blocks are not supported",
    ),
    "unknown quant format": (
        lambda f: set_quantization(f, format="marlin-24"),
        r"quantization_config\.format: marlin-24: only pack-quantized",
    ),
    "eight bits": (lambda f: set_group(f, num_bits=8), r"group_0\.weights\.num_bits: 8: only 4 is supported"),
    "asymmetric": (lambda f: set_group(f, symmetric=False), r"group_0\.weights\.symmetric: False: only true"),
    "other group size": (
        lambda f: set_group(f, group_size=48),
        r"group_0\.weights\.group_size: 48: must be 32, 64, 128",
    ),
    "wrong group size": (lambda f: set_group(f, group_size=64), r"weight_scale: \[64, 2\]: shape must be \[64, 1\]"),
    "mixed group sizes": (
        second_group,
        r"quantization_config\.config_groups: .*64.*: all groups must have one group_size",
    ),
    "packed without a description": (
        lambda f: edit_json(f, "config.json", lambda c: c["text_config"].pop("quantization_config")),
        r"gate_proj\.weight: INT4: not one of the matrices that may be INT4",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json: file: config\.json: missing"),
    "config is a list": (
        lambda f: (f / "config.json").write_text("[]"),
        r"config\.json: file: list: must be a JSON object",
    ),
    "config is no JSON": (lambda f: (f / "config.json").write_bytes(b"\x80\x04."), r"config\.json: file: .*no JSON"),
    "path traversal": (
        lambda f: place(f, Q_A, "../../../etc/passwd.safetensors"),
        r"index\.json: \S+q_a_proj\.weight: .*must be the plain",
    ),
    "absolute path": (lambda f: place(f, Q_A, "/etc/x.safetensors"), r"index\.json: .*must be the plain name"),
    "hidden file": (lambda f: place(f, Q_A, "..safetensors"), r"index\.json: .*must be the plain name"),
    "index names a pickle": (lambda f: place(f, Q_A, "pytorch_model.bin"), r"index\.json: .*must be the plain name"),
    "only a pickle": (
        lambda f: (
            [p.unlink() for p in (*f.glob("*.safetensors"), f / INDEX)],
            (f / "pytorch_model.bin").write_bytes(b"\x80\x04."),
        ),
        r"model: model\.safetensors: missing: .*only safetensors are read",
    ),
    "a pipe": (
        lambda f: (shard_of(f, Q_A).unlink(), os.mkfifo(shard_of(f, Q_A))),
        r"model-000.*: file: .*: not a regular file",
    ),
}


def read_all(folder) -> None:
    for tensor in open_checkpoint(folder).tensors.values():
        tensor.load()


@pytest.mark.parametrize("name", CASES)
def test_one_line_names_the_fault(name, folder):
    damage, message = CASES[name]
    damage(folder)
    with pytest.raises(CheckpointError) as raised:
        read_all(folder)
    text = str(raised.value)
    assert text.startswith(str(folder)) and "\n" not in text and len(text) < 600
    assert re.search(message, text), text


def test_the_copy_is_sound_before_it_is_damaged(folder):
    read_all(folder)


def test_nothing_in_the_folder_is_executed(folder):
    """Code where a careless loader would run it: modules named in the config, a pickle under a shard's name."""
    mark = folder / "executed"
    code = f"open({str(mark)!r}, 'w')\n"

    class Bomb:
        def __reduce__(self):
            return exec, (code,)

    for file in ("modeling_kimi_k25.py", "configuration_kimi_k25.py", "tokenization_kimi.py", "conftest.py"):
        (folder / file).write_text(code)
    edit_json(folder, "config.json", lambda c: c.update(auto_map={"AutoConfig": "configuration_kimi_k25.Config"}))
    read_all(folder)
    shard_of(folder, Q_A).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="header length"):
        read_all(folder)
    assert not mark.exists()


def test_a_bad_value_stops_the_engine_with_its_name(folder, library_path):
    set_tensor(folder, EXPERT + ".weight_scale", not_finite)
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight_scale: NaN or inf"):
        Engine(library_path, open_checkpoint(folder), context=32)


def test_command_line_says_it_in_one_line(folder):
    truncate(shard_of(folder, Q_A), 100)
    command = [sys.executable, "-m", "engine", "generate", "--checkpoint", folder, "--prompt-tokens", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {shard_of(folder, Q_A)}: ") and done.stderr.count("\n") == 1


def test_huge_claims_cost_nothing(folder):
    """Sizes from a config are not believed before the files bear them out."""
    set_text(folder, num_hidden_layers=1 << 20, n_routed_experts=1 << 20)
    begin = time.perf_counter()
    with pytest.raises(CheckpointError):
        open_checkpoint(folder)
    assert time.perf_counter() - begin < 5
