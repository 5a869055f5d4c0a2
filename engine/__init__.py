"""kdtree-engine. `engine.Engine` and its companions are loaded when they are first named: the ladder's stages import
this package for parts that must not depend on them."""

import importlib

_API = ("Conversation", "Engine", "Generation", "Piece", "Progress", "Stats", "Stream")


def __getattr__(name: str):
    if name in _API:
        return getattr(importlib.import_module(f"{__name__}.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
