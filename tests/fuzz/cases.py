"""One fuzz case: its input from a seed, and what the loader and the engine make of it."""

import ctypes
import dataclasses
import functools
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml

from engine import config as engine_config
from engine.bundle import BundleError, OpenBundle, TensorView, open_bundle
from engine.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from engine.native import ACTIVATIONS, DRAFTERS, MODES, Drafter, Engine, EngineError
from tests.fuzz import models
from tests.fuzz.mutate import INTEGERS, mutate_bundle, mutate_folder, mutate_json, near

ROOT = Path(__file__).resolve().parents[2]
MOST_ROUNDS = 8  # of a decoding: a context of a million tokens is sound, but not to be waited for
REFUSAL = re.compile(r"[^:]+: .+: .+")  # <field>: <value>: <reason>
LONGEST = 1000
RUN = {"context": 20, "block_size": 4, "tree_budget": 6, "prefill_chunk": 3}


class Malformed(Exception):
    """A refusal that is not one printable line `<file>: <field>: <value>: <reason>`."""


class Fuzzer:
    """Runs cases with one library; `scratch` is a file or folder that it may overwrite."""

    def __init__(self, library: Path, scratch: Path, seed: int):
        self.library, self.scratch, self.seed = library, scratch, seed
        self.bases, self.folders = models.bases(), models.folders()
        self.set_threads = ctypes.CDLL(str(library.resolve())).omp_set_num_threads

    def kind_of(self, number: int) -> str:
        return KINDS[number % len(KINDS)]

    def run(self, number: int) -> str:
        """The outcome: `decoded`, `accepted`, or `refused by …`. Raises Malformed, or whatever escaped."""
        rng = random.Random(f"{self.seed}:{number}")
        self.set_threads(3 if rng.random() < 0.02 else 1)  # to start threads takes longer than all the rest
        try:
            return CASES[self.kind_of(number)](self, rng)
        except (BundleError, CheckpointError) as error:
            file, _, message = str(error).partition(": ")
            if not Path(file).is_relative_to(self.scratch):
                raise Malformed(str(error)) from None
            require_form(message)
            return "refused by the loader"
        except EngineError as error:
            require_form(str(error))
            return "refused by the engine"

    def open(self, data: bytes) -> OpenBundle:
        self._clear()
        self.scratch.write_bytes(data)
        return open_bundle(self.scratch)

    def open_folder(self, files: dict[str, bytes]) -> Checkpoint:
        self._clear()
        self.scratch.mkdir()
        for name, content in files.items():
            (self.scratch / name).write_bytes(content)
        return open_checkpoint(self.scratch)

    def _clear(self) -> None:
        """Removes, and does not overwrite: an earlier case's mapping keeps its own file."""
        if self.scratch.is_dir():
            shutil.rmtree(self.scratch)
        self.scratch.unlink(missing_ok=True)


def require_form(message: str) -> None:
    if not (message.isprintable() and REFUSAL.fullmatch(message) and len(message) <= LONGEST):
        raise Malformed(message)


# ---- the kinds of cases


def bundle(fuzzer: Fuzzer, rng: random.Random) -> str:
    """A mutated file."""
    return decode(fuzzer, rng, fuzzer.open(mutate_bundle(rng, rng.choice(fuzzer.bases))))


def checkpoint(fuzzer: Fuzzer, rng: random.Random) -> str:
    """A folder as released, with one of its files mutated."""
    return decode(fuzzer, rng, fuzzer.open_folder(mutate_folder(rng, rng.choice(fuzzer.folders))))


def model(fuzzer: Fuzzer, rng: random.Random) -> str:
    """A sound file of a random shape: must decode."""
    return decode(fuzzer, rng, fuzzer.open(models.any_model(rng).bytes()))


def unchecked(fuzzer: Fuzzer, rng: random.Random) -> str:
    """A model that no loader checked, as another caller of the C interface may pass it: the core refuses."""
    opened = fuzzer.open(rng.choice(fuzzer.bases).bytes())
    config, tensors, group = opened.config, dict(opened.tensors), opened.group_size
    how = rng.randrange(4)
    if how == 0:
        name = rng.choice(list(tensors))
        tensors[rng.choice(("x", name + "x", next(iter(tensors))))] = tensors.pop(name)
    elif how == 1:
        name = rng.choice(list(tensors))
        tensors[name] = Claimed(tensors[name], rng)
    elif how == 2:
        group = rng.choice(INTEGERS)
    else:
        fields = [field.name for field in dataclasses.fields(config) if field.name != "yarn"]
        name = rng.choice(fields)
        old = getattr(config, name)
        if isinstance(old, float):
            new = rng.choice((0.0, -1.0, float("inf"), float("nan"), 1e300, 1.0, 1e-300))
        elif old is not None:
            new = near(rng, old) if rng.random() < 0.4 else rng.choice(INTEGERS)
        else:
            new = rng.choice(INTEGERS)
        config = dataclasses.replace(config, **{name: new})
    return decode(fuzzer, rng, dataclasses.replace(opened, config=config, group_size=group, tensors=tensors))


class Claimed(TensorView):
    """A tensor of which another shape or type is claimed. The data are never shorter than any claim that fits."""

    def __init__(self, true: TensorView, rng: random.Random):
        shape = list(true.shape)
        if rng.random() < 0.6:
            shape[rng.randrange(len(shape))] = rng.choice(INTEGERS) % 2**40
        dtype = rng.choice([true.dtype, "BF16"] if true.dtype == "BF16" else ["F32", "BF16", "I32"])
        super().__init__(dtype, true.array)
        object.__setattr__(self, "claimed", tuple(shape))

    @property
    def shape(self):
        return self.claimed


def arguments(fuzzer: Fuzzer, rng: random.Random) -> str:
    """A sound model, and unsound options or requests."""
    options: dict = dict(RUN)
    for _ in range(rng.choice((0, 0, 1, 2))):
        name = rng.choice(list(options))
        options[name] = near(rng, options[name]) if rng.random() < 0.5 else rng.choice(INTEGERS)
    drafter = Drafter(rng.choice(list(DRAFTERS)), 0.5, rng.randrange(-(2**63), 2**63))
    if rng.random() < 0.2:
        drafter = Drafter(drafter.kind, rng.choice((-0.1, 1.1, float("nan"), float("inf"))), rng.choice(INTEGERS))
    opened = fuzzer.open(rng.choice(fuzzer.bases).bytes())
    vocab = opened.config.vocab_size

    def tokens(most, unsound=0.05):
        made = [rng.randrange(vocab) for _ in range(rng.randint(0, most))]
        if made and rng.random() < unsound:
            made[rng.randrange(len(made))] = rng.choice((vocab, -1, *INTEGERS))
        return made

    options["activations"] = rng.choice(list(ACTIVATIONS))
    with Engine(fuzzer.library, opened, drafter=drafter, **options) as engine:
        outcomes = [request(engine, rng, tokens) for _ in range(3)]
    return "decoded" if "decoded" in outcomes else "refused by the engine"


def request(engine: Engine, rng: random.Random, tokens) -> str:
    """One decoding; the engine lives on after a refused one."""
    mode = rng.choice(list(MODES))
    try:
        generate(
            engine,
            tokens(rng.choice((3, 15, 15, 25))),
            mode=mode,
            max_new_tokens=mostly(rng, (1, 2, 3, 7, 2**31 - 1)),
            stop_token_ids=tokens(rng.choice((0, 0, 2, 2, 1024, 2000))),
            script=tokens(rng.choice((0, 12, 30, 300)), unsound=0.3),
            overrun=mostly(rng, (0, 0, 1, 4) if mode == "ar" else (0,)),
            kept=mostly(rng, (0, 0, 0, 0, 1)),
            record=rng.random() < 0.5,
        )
        engine.read_kv(rng.choice((0, 1, 5, 1000)))
    except EngineError as error:
        require_form(str(error))
        return "a request refused"
    return "decoded"


def mostly(rng: random.Random, sound: tuple[int, ...]) -> int:
    return rng.choice(INTEGERS) if rng.random() < 0.05 else rng.choice(sound)


def config(fuzzer: Fuzzer, rng: random.Random) -> str:
    """A mutated config.yaml, as snakemake hands it over."""
    made = mutate_json(rng, repository_config())
    for _ in range(rng.choice((0, 0, 1, 2))):
        made = mutate_json(rng, made)
    if not isinstance(made, dict):
        return "no map: snakemake refuses it"
    lines = engine_config.check(made, ROOT / "config.schema.yaml", [ROOT / "config.yaml"])
    for line in lines:
        file, _, message = line.removeprefix("error: ").partition(": ")
        if not line.startswith("error: ") or not file.endswith("config.yaml"):
            raise Malformed(line)
        require_form(message)
    return "refused by the loader" if lines else "accepted"


@functools.cache
def repository_config() -> dict:
    return yaml.safe_load((ROOT / "config.yaml").read_text())


CASES: dict[str, Callable[[Fuzzer, random.Random], str]] = {
    "bundle": bundle, "checkpoint": checkpoint, "model": model, "unchecked": unchecked, "arguments": arguments,
    "config": config,
}  # fmt: skip
KINDS = (*["bundle", "bundle", "bundle", "checkpoint", "unchecked", "arguments", "model"] * 8, "config")


def decode(fuzzer: Fuzzer, rng: random.Random, opened) -> str:
    """A few tokens, plainly and with a tree, in one type of activations."""
    activations = rng.choice(list(ACTIVATIONS))
    with Engine(fuzzer.library, opened, activations=activations, drafter=Drafter("noisy", 0.5, 1), **RUN) as engine:
        prompt = [1, 0, 1, 1, 0]
        plain = generate(engine, prompt, mode="ar", max_new_tokens=5, overrun=2)
        tree = generate(engine, prompt, mode="ddtree", max_new_tokens=5, script=prompt + plain.tokens)
        if tree.tokens != plain.tokens:
            raise AssertionError(f"tree decoding says {tree.tokens}, plain decoding {plain.tokens}")
    return "decoded"


def generate(engine: Engine, prompt: list[int], **options):
    rounds = []

    def enough(round_):
        rounds.append(round_)
        return len(rounds) >= MOST_ROUNDS

    return engine.generate(prompt, on_round=enough, **options)
