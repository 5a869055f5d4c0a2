"""The judge on fabricated evidence: sound evidence passes, each kind of fault fails and is named."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from engine.judge import rows_on_path
from engine.verify import judge_bundle
from reference.bundle import Bundle, read_safetensors, write_safetensors
from reference.decode import decode_ar
from reference.drafters import draft_script
from reference.model import Model, chain
from reference.weights import generate_bundle

MODEL = {
    "seed": 3,
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "intermediate_size": 32,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 64,
}
PROMPTS = {"short": [5], "long": [7, 3, 11, 2, 40, 9]}
NEW_TOKENS, BLOCK_SIZE, BUDGET = 10, 4, 6
DRAFTERS = ("oracle", "noisy", "adversarial")
OPERATORS = ["gemm", "rope"]


class Evidence:
    """A plan and its files in the current folder, as the reference itself would decode; edit, then judge."""

    def __init__(self):
        bundle = generate_bundle(MODEL, "float32")
        bundle.write(Path("bundle.safetensors"))
        goldens = {name: golden(bundle, prompt) for name, prompt in PROMPTS.items()}
        write(Path("golden.safetensors"), goldens, {"names": json.dumps(list(PROMPTS))})
        runs = {name: plain_run(bundle, np.array(prompt, np.int32)) for name, prompt in PROMPTS.items()}
        write_run("ar.safetensors", runs, {"mode": "ar"})
        for kind in DRAFTERS:
            trees = {name: tree_run(PROMPTS[name], run, kind) for name, run in runs.items()}
            settings = {"mode": "ddtree", "tree_budget": BUDGET, "drafter": drafter(kind)}
            write_run(f"{kind}.safetensors", trees, settings)
        for operator in OPERATORS:
            self.write_check(operator, [{"name": "a", "max_abs_error": 1e-6, "budget": 1e-5}])
        variant = {
            "backend": "cpu",
            "activations": "float32",
            "library": "lib.so",
            "bf16_golden": None,
            "ar": "ar.safetensors",
            "ddtree": {kind: f"{kind}.safetensors" for kind in DRAFTERS},
            "checks": [f"{operator}.json" for operator in OPERATORS],
            "operators": {"ar": OPERATORS, "ddtree": OPERATORS},
        }
        self.plan = {
            "bundle": "small",
            "bundle_file": "bundle.safetensors",
            "golden": "golden.safetensors",
            "float32_golden": None,
            "prompts": list(PROMPTS),
            "decode": {
                "max_new_tokens": NEW_TOKENS,
                "block_size": BLOCK_SIZE,
                "tree_budget": BUDGET,
                "stop_token_ids": [],
                "drafter": drafter("oracle"),
            },
            "verify": {"logit_floor": 1e-5, "noise_factor": 2.0},
            "variants": {"cpu": variant},
            "versions": {},
        }

    def write_check(self, operator: str, cases: list[dict]) -> None:
        content = {"operator": operator, "backend": "cpu", "cases": cases}
        Path(f"{operator}.json").write_text(json.dumps(content))

    def edit(self, file: str, tensor: str, change, rehash: bool = True) -> None:
        """Changes one tensor in place; a run's hashes follow unless `rehash` is off."""
        tensors, metadata = read_safetensors(Path(file))
        tensors = {name: x.copy() for name, x in tensors.items()}
        change(tensors[tensor])
        if rehash and "kdtree" in metadata:
            settings = json.loads(metadata["kdtree"])
            for stats in settings["prompts"]:
                stats |= hashes(*(tensors[f"{stats['name']}.{key}"] for key in ("logits", "kv", "rounds")))
            metadata["kdtree"] = json.dumps(settings)
        write_safetensors(Path(file), tensors, metadata)

    def judge(self, capsys) -> tuple[str, bool]:
        """(what was printed, whether there is a verdict)."""
        output = Path("verdict")
        findings = judge_bundle(self.plan, output)
        assert findings.none == output.exists()
        return capsys.readouterr().out, output.exists()


def golden(bundle: Bundle, prompt: list[int]) -> dict[str, np.ndarray]:
    output = decode_ar(Model(bundle, np.float64), prompt, NEW_TOKENS)
    return {
        "prompt": np.array(prompt, np.int32),
        "tokens": np.array(output.tokens, np.int32),
        "logits": np.stack(output.logits).astype(np.float32),
        "noise": np.array([1e-6]),
    }


def plain_run(bundle: Bundle, prompt: np.ndarray) -> dict[str, np.ndarray]:
    """The float32 reference, one block past the limit."""
    model, rows = Model(bundle, np.float32), NEW_TOKENS + BLOCK_SIZE
    tokens = np.array(decode_ar(Model(bundle, np.float64), prompt.tolist(), rows).tokens, np.int32)
    sequence = np.concatenate((prompt, tokens[:-1]))
    kv = model.empty_kv(len(sequence))
    logits = model.forward(sequence, kv, 0, chain(len(sequence)))[len(prompt) - 1 :]
    rounds = np.ones((rows, 2), np.int32)
    return {
        "tokens": tokens[:NEW_TOKENS],
        "logits": np.ascontiguousarray(logits),
        "kv": kv,
        "rounds": rounds,
        "overrun": tokens[NEW_TOKENS:],
    }


def tree_run(prompt: list[int], plain: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """What a sound engine commits: rows of the plain run, as many a round as the drafted tree holds."""
    script = np.concatenate((np.array(prompt, np.int32), plain["tokens"], plain["overrun"]))
    rounds = [(1, 1)]
    while (row := sum(accepted for _, accepted in rounds)) < NEW_TOKENS:
        prefix = len(prompt) - 1 + row
        logits = draft_script(
            **drafter(kind), script=script, prefix=prefix, levels=BLOCK_SIZE - 1, vocab=MODEL["vocab_size"]
        )
        rounds.append((BUDGET + 1, rows_on_path(logits, BUDGET, script[prefix + 1 :])))
    return {
        "tokens": plain["tokens"],
        "logits": plain["logits"][:row],
        "kv": np.ascontiguousarray(plain["kv"][:, : len(prompt) - 1 + row]),
        "rounds": np.array(rounds, np.int32),
    }


def drafter(kind: str) -> dict:
    return {"kind": kind, "p": 0.4, "seed": 1}


def write_run(file: str, runs: dict[str, dict], settings: dict) -> None:
    prompts = [
        {
            "name": name,
            "steps": len(run["rounds"]) - 1,
            "committed": int(run["rounds"][:, 1].sum()),
            "stop_reason": "length",
            **hashes(run["logits"], run["kv"], run["rounds"]),
        }
        for name, run in runs.items()
    ]
    made = {"backend": "cpu", "activations": "float32", "block_size": BLOCK_SIZE, "operators": OPERATORS}
    write(Path(file), runs, {"kdtree": json.dumps(made | settings | {"prompts": prompts})})


def hashes(logits: np.ndarray, kv: np.ndarray, rounds: np.ndarray) -> dict[str, list[str]]:
    ends = np.cumsum(rounds[:, 1])
    before = kv.shape[1] - ends[-1]
    spans = list(zip(ends - rounds[:, 1], ends, strict=True))
    return {
        "logits_sha256": [hashlib.sha256(logits[a:b].tobytes()).hexdigest() for a, b in spans],
        "kv_sha256": [hashlib.sha256(kv[:, before + a : before + b].tobytes()).hexdigest() for a, b in spans],
    }


def write(file: Path, prompts: dict[str, dict], metadata: dict) -> None:
    tensors = {f"{name}.{key}": x for name, prompt in prompts.items() for key, x in prompt.items()}
    write_safetensors(file, tensors, metadata)


@pytest.fixture
def evidence(tmp_path, monkeypatch) -> Evidence:
    monkeypatch.chdir(tmp_path)
    return Evidence()


def put(index, value):
    def change(array):
        array[index] = value

    return change


def add(index, value):
    def change(array):
        array[index] += value

    return change


def flip_lowest_bit(index):
    def change(array):
        array.view(np.uint32)[index] ^= 1

    return change


def test_sound_evidence_passes(evidence, capsys):
    text, passed = evidence.judge(capsys)
    assert passed, text
    first = Path("verdict").read_bytes()
    verdict = json.loads(first)
    assert verdict["bundle"] == "small" and verdict["verdict"] == "pass"
    cpu = verdict["backends"]["cpu"]
    assert (cpu["ar"]["tokens"], cpu["ar"]["exact"]) == (NEW_TOKENS, NEW_TOKENS)
    assert cpu["ar"]["max_abs_logit_diff"] <= cpu["ar"]["bound"] == 1e-5
    assert {key: cpu["ddtree"][key] for key in ("steps", "committed", "avg_accept", "block_size", "tree_budget")} == {
        "steps": 3,
        "committed": 13,
        "avg_accept": 4.0,
        "block_size": BLOCK_SIZE,
        "tree_budget": BUDGET,
    }
    assert all(cpu["ddtree"][key] is True for key in ("exact", "bitwise_logits", "bitwise_kv"))
    assert cpu["drafters"]["adversarial"]["avg_accept"] == 1 and set(cpu["drafters"]) == {"noisy", "adversarial"}
    assert [prompt["name"] for prompt in verdict["prompts"]] == list(PROMPTS)
    golden_hash = hashlib.sha256(Path("golden.safetensors").read_bytes()).hexdigest()
    assert verdict["inputs"]["golden.safetensors"] == golden_hash
    Path("verdict").unlink()
    evidence.judge(capsys)
    assert Path("verdict").read_bytes() == first


# name: (edits of (file, tensor, change), what the report must say)
FAULTS = {
    "a token of the plain run": (
        [("ar.safetensors", "long.tokens", add(3, 1))],
        "first divergence: cpu ar against golden: prompt long, step 3, row 3, layer head, tensor tokens: ",
    ),
    "a logit of the plain run": (
        [("ar.safetensors", "long.logits", add((2, 17), 1e-3))],
        "prompt long, step 2, row 2, layer 2, tensor logits[17]: ",
    ),
    "a NaN logit": (
        [("ar.safetensors", "short.logits", put((0, 1), np.nan))],
        "prompt short, step 0, row 0, layer 2, tensor logits[1]: nan against ",
    ),
    "a layer of the plain run": (
        [
            ("ar.safetensors", "long.kv", add((1, 6, 3), 1e-3)),
            ("ar.safetensors", "long.kv", add((2, 6, 0), 1e-3)),
            ("ar.safetensors", "long.logits", add((1, 0), 1e-3)),
        ],
        "step 1, row 1, layer 1, tensor kv[6, 3]: ",
    ),
    "one bit of a tree's logits": (
        [("noisy.safetensors", "short.logits", flip_lowest_bit((4, 9)))],
        "first divergence: cpu ddtree (noisy) against ar: prompt short, step ",
    ),
    "one bit of a tree's cache": (
        [("oracle.safetensors", "long.kv", flip_lowest_bit((2, 9, 5)))],
        "cpu ddtree (oracle) against ar: prompt long, step 1, row 4, layer 2, tensor kv[9, 5]: ",
    ),
    "the prompt's own cache": (
        [("oracle.safetensors", "long.kv", flip_lowest_bit((0, 1, 0)))],
        "prompt long, step 0, row -4, layer 0, tensor kv[1, 0]: ",
    ),
    "a token of a tree run": (
        [("adversarial.safetensors", "long.tokens", add(9, 1))],
        "cpu ddtree (adversarial) against ar: prompt long, step 9, row 9, layer head, tensor tokens: ",
    ),
}


@pytest.mark.parametrize(("edits", "report"), FAULTS.values(), ids=FAULTS)
def test_fault_in_a_run(evidence, capsys, edits, report):
    for edit in edits:
        evidence.edit(*edit)
    text, passed = evidence.judge(capsys)
    assert not passed
    lines = [line for line in text.splitlines() if line.startswith("first divergence: ")]
    assert len(lines) == 1 and report in lines[0], text
    assert "every operator passes its check" in text


def test_fault_leaves_a_case(evidence, capsys):
    """One prompt, cut at the diverging row."""
    evidence.edit("oracle.safetensors", "long.kv", flip_lowest_bit((2, 9, 5)))
    text, _ = evidence.judge(capsys)
    folder = Path("results/cases/small/long/1")
    assert f"python -m engine.verify --replay {folder}" in text
    case = json.loads((folder / "case.json").read_text())
    tensors, metadata = read_safetensors(folder / "golden.safetensors")
    assert case["prompts"] == json.loads(metadata["names"]) == ["long"]
    assert case["decode"]["max_new_tokens"] == len(tensors["long.tokens"]) == len(tensors["long.logits"]) == 5
    assert tensors["long.prompt"].tolist() == PROMPTS["long"]


def test_case_decodes_until_the_fault_shows(evidence, capsys):
    """The cache was wrong at the prompt's second row; the first logit that shows it is the fourth."""
    evidence.edit("ar.safetensors", "long.kv", add((1, 1, 0), 1e-3))
    evidence.edit("ar.safetensors", "long.logits", add((3, 0), 1e-3))
    text, _ = evidence.judge(capsys)
    assert "prompt long, step 0, row -4, layer 1, tensor kv[1, 0]: " in text
    case = json.loads(Path("results/cases/small/long/0/case.json").read_text())
    assert case["decode"]["max_new_tokens"] == 4


def test_zero_is_not_minus_zero(evidence, capsys):
    for file in ("ar.safetensors", "oracle.safetensors", "noisy.safetensors", "adversarial.safetensors"):
        evidence.edit(file, "short.kv", put((0, 0, 0), 0.0))
    assert evidence.judge(capsys)[1]
    Path("verdict").unlink()
    evidence.edit("noisy.safetensors", "short.kv", put((0, 0, 0), -0.0))
    text, passed = evidence.judge(capsys)
    assert not passed and "tensor kv[0, 0]: -0.0 against 0.0" in text


def test_overwritten_after_commit(evidence, capsys):
    """Both runs agree at their end, but not with what they had committed."""
    for file in ("ar.safetensors", "oracle.safetensors", "noisy.safetensors", "adversarial.safetensors"):
        evidence.edit(file, "short.kv", flip_lowest_bit((0, 3, 0)), rehash=False)
    text, passed = evidence.judge(capsys)
    assert not passed and "kv of step 3 changed after they were committed" in text


def test_accepting_less_than_the_tree_holds(evidence, capsys):
    """A verify call that is wrong in every row but the root commits right bytes, one row a round."""

    def one_row_a_round(rounds):
        return np.ones((int(rounds[:, 1].sum()), 2), np.int32)

    tensors, metadata = read_safetensors(Path("oracle.safetensors"))
    tensors = {name: one_row_a_round(x) if name.endswith("rounds") else x for name, x in tensors.items()}
    settings = json.loads(metadata["kdtree"])
    for stats in settings["prompts"]:
        stats |= hashes(*(tensors[f"{stats['name']}.{key}"] for key in ("logits", "kv", "rounds")))
        stats["steps"] = stats["committed"] - 1
    write_safetensors(Path("oracle.safetensors"), tensors, {"kdtree": json.dumps(settings)})
    text, passed = evidence.judge(capsys)
    assert not passed and "step 1 accepts 1 rows, not 4" in text and "bitwise_logits=False" not in text


def test_wrong_counts(evidence, capsys):
    tensors, metadata = read_safetensors(Path("oracle.safetensors"))
    settings = json.loads(metadata["kdtree"])
    settings["prompts"][0]["committed"] += 1
    write_safetensors(Path("oracle.safetensors"), tensors, {"kdtree": json.dumps(settings)})
    text, passed = evidence.judge(capsys)
    assert not passed and "are not its rounds'" in text


@pytest.mark.parametrize(
    ("cases", "report"),
    [
        (
            [{"name": "a", "max_abs_error": 0.25, "budget": 1e-5}, {"name": "b", "max_abs_error": 0, "budget": 0}],
            "operator rope (cpu): 1 of 2 cases over budget, first a: error 0.25, budget 1e-05",
        ),
        ([{"name": "a", "max_abs_error": "nan", "budget": 1e-5}], "first a: error nan, budget 1e-05"),
        ([{"name": "a", "max_abs_error": "inf", "budget": 1e-5, "message": "crashed"}], "budget 1e-05: crashed"),
        ([], "operator rope (cpu): no case was checked"),
    ],
)
def test_operator_over_budget(evidence, capsys, cases, report):
    """It is named first: the likely root of what follows."""
    evidence.write_check("rope", cases)
    evidence.edit("ar.safetensors", "long.logits", add((2, 17), 1e-3))
    text, passed = evidence.judge(capsys)
    assert not passed and report in text
    assert text.index("operator rope") < text.index("cpu ar, prompt long") < text.index("first divergence: ")
    assert "every operator passes" not in text


def change_settings(file: str, **changes) -> None:
    tensors, metadata = read_safetensors(Path(file))
    settings = json.loads(metadata["kdtree"]) | changes
    write_safetensors(Path(file), tensors, {"kdtree": json.dumps(settings)})


def test_unlisted_operator(evidence, capsys):
    change_settings("noisy.safetensors", operators=[*OPERATORS, "swiglu"])
    text, passed = evidence.judge(capsys)
    assert not passed and "noisy.safetensors: operators: swiglu: called, but not listed" in text


@pytest.mark.parametrize(
    "changes", [{"block_size": 5}, {"tree_budget": 7}, {"activations": "bfloat16"}, {"drafter": drafter("oracle")}]
)
def test_run_of_another_plan(evidence, capsys, changes):
    change_settings("noisy.safetensors", **changes)
    text, passed = evidence.judge(capsys)
    assert not passed and f"noisy.safetensors: {next(iter(changes))}: " in text


def test_quantised_golden_must_leave_the_float_one(evidence, capsys):
    evidence.plan["float32_golden"] = "golden.safetensors"
    text, passed = evidence.judge(capsys)
    assert not passed and "the quantised golden has the float32 golden's logits" in text
    Path("float32.safetensors").write_bytes(Path("golden.safetensors").read_bytes())
    evidence.edit("float32.safetensors", "long.tokens", add(4, 1))
    evidence.edit("float32.safetensors", "long.logits", add((1, 0), 1))
    evidence.plan["float32_golden"] = "float32.safetensors"
    assert evidence.judge(capsys)[1]
    assert json.loads(Path("verdict").read_text())["fp32_divergence"] == {"short": None, "long": 4}
