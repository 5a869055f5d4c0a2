"""The operators as torch.ops.kdtree.*: `load(folder)` registers them, then torch code calls each on its own tensors.

    from engine import torch_ops
    torch_ops.load("results/build")
    y = torch.ops.kdtree.rms_norm(x, weight, 1e-5)

Arguments are those of the numpy twins in reference/ops.py. Weights are packed once, by the …_prepare operators.
"""

from pathlib import Path

import torch

_loaded: set[str] = set()


def load(folder, backend: str = "cpu") -> None:
    """Registers the operators of `backend`, from `<folder>/<backend>/libkdtree_torch_<backend>.so`; once a process.

    The schemas stand in the CPU extension, which is therefore loaded with every backend. Raises OSError if a library
    is missing or was built for another torch.
    """
    for name in ("cpu", backend):
        if name not in _loaded:
            torch.ops.load_library(str(Path(folder).resolve() / name / f"libkdtree_torch_{name}.so"))
            _loaded.add(name)
            if name == "cpu":
                from engine.torch_ops import fakes  # noqa: F401  (needs the schemas)
