"""config.yaml: defaults, schema and the rules that a schema cannot say. One line an error."""

import json
from collections.abc import Iterator
from pathlib import Path

import yaml
from jsonschema import Draft202012Validator

from reference.config import ModelConfig, short

Error = tuple[tuple, object, str]  # path of the field, its value, what is wrong with it


def check(config: dict, schema_file: str | Path, sources: list[str | Path], no_cuda: str | None = None) -> list[str]:
    """Fills `config`'s defaults in place and returns its errors, one line each; an empty list if there are none.

    `sources` are the files that `config` was merged from, the last one on top; an error names the file that
    set the field: `error: <file>: <field>: <value>: <reason>`. `no_cuda`: why this machine cannot run CUDA, if so.
    """
    schema = yaml.safe_load(Path(schema_file).read_text())
    errors = list(_schema_errors(config, schema))
    if not errors:
        _fill_defaults(config, schema, schema)
        errors = [*_model_errors(config), *_bundle_errors(config), *_decode_errors(config)]
        if config["device"] == "cuda" and no_cuda:
            errors.append((("device",), "cuda", no_cuda))
    loaded = [(_shown(source), yaml.safe_load(Path(source).read_text()) or {}) for source in sources]
    return [
        f"error: {_file_of(path, loaded)}: {_dotted(path)}: {_short(value)}: {reason}" for path, value, reason in errors
    ]


def _schema_errors(config: dict, schema: dict) -> Iterator[Error]:
    for error in Draft202012Validator(schema).iter_errors(config):
        path = tuple(error.absolute_path)
        if error.validator == "additionalProperties":
            known = error.schema["properties"]
            for key in sorted(set(error.instance) - set(known)):
                yield (*path, key), error.instance[key], f"unknown key; known: {', '.join(known)}"
        elif error.validator == "required":
            for key in (key for key in error.validator_value if key not in error.instance):
                yield (*path, key), None, "missing"
        else:
            yield path, error.instance, error.message.removeprefix(f"{error.instance!r} ")


def _fill_defaults(value: object, schema: dict, root: dict) -> None:
    """Sets what `schema` gives a default for and `value` lacks, all the way down."""
    schema = _resolve(schema, root)
    if isinstance(value, list):
        for item in value:
            _fill_defaults(item, schema.get("items", {}), root)
    elif isinstance(value, dict):
        properties = schema.get("properties", {})
        for key, inner in properties.items():
            inner = _resolve(inner, root)
            if "default" in inner:
                value.setdefault(key, json.loads(json.dumps(inner["default"])))
        others = schema.get("additionalProperties") or {}
        for key, item in value.items():
            _fill_defaults(item, properties.get(key, others), root)


def _resolve(schema: dict, root: dict) -> dict:
    if "$ref" not in schema:
        return schema
    return root["$defs"][schema["$ref"].removeprefix("#/$defs/")] | schema


def _model_errors(config: dict) -> Iterator[Error]:
    for name, model in config["models"].items():
        try:
            ModelConfig.from_dict(model)
        except ValueError as error:
            field, _, reason = str(error).split(": ", 2)
            yield ("models", name, *field.split(".")), model.get(field.split(".")[0]), reason


def _bundle_errors(config: dict) -> Iterator[Error]:
    for name, bundle in config["bundles"].items():
        path = ("bundles", name)
        if name in config["models"]:
            yield path, name, "a model has this name, and so its float32 bundle"
            continue
        if bundle["model"] not in config["models"]:
            yield (*path, "model"), bundle["model"], f"no such model; known: {', '.join(config['models'])}"
            continue
        if not bundle["quant"]:
            continue
        model, group = config["models"][bundle["model"]], bundle["quant"]["group_size"]
        for field, width in _quantised_widths(model):
            if width % group:
                reason = f"does not divide {field} = {width} of model {bundle['model']}"
                yield (*path, "quant", "group_size"), group, reason
        if not float_bundle(config, bundle["model"], bundle["dtype"]):
            reason = f"needs a {bundle['dtype']} bundle of model {bundle['model']} without quant to start from"
            yield (*path, "dtype"), bundle["dtype"], reason


def float_bundle(config: dict, model: str, dtype: str) -> str | None:
    """The unquantised bundle of `model` in `dtype`, which a quantised one is made from."""
    if dtype == "float32":
        return model
    wanted = {"model": model, "dtype": dtype, "quant": None}
    return next((name for name, bundle in config["bundles"].items() if bundle == wanted), None)


def _quantised_widths(model: dict) -> Iterator[tuple[str, int]]:
    """The input widths of the matrices that INT4 covers: dense MLP, routed and shared experts."""
    yield "hidden_size", model["hidden_size"]
    if model["first_k_dense_replace"] > 0:
        yield "intermediate_size", model["intermediate_size"]
    if model["first_k_dense_replace"] < model["num_hidden_layers"]:
        yield "moe_intermediate_size", model["moe_intermediate_size"]


def _decode_errors(config: dict) -> Iterator[Error]:
    decode, models = config["decode"], config["models"]
    names = [prompt["name"] for prompt in decode["prompts"]]
    for i, prompt in enumerate(decode["prompts"]):
        path = ("decode", "prompts", i)
        if names.index(prompt["name"]) != i:
            yield (*path, "name"), prompt["name"], "an earlier prompt has this name"
        if ("text" in prompt) == ("tokens" in prompt):
            yield path, prompt, "needs either text or tokens"
            continue
        field = "text" if "text" in prompt else "tokens"
        if field == "text" and any("\ud800" <= character <= "\udfff" for character in prompt["text"]):
            yield (*path, field), prompt[field], "no text: it holds half of a character"
            continue
        tokens = prompt["tokens"] if field == "tokens" else list(prompt["text"].encode())
        for model, fields in models.items():
            vocab, context = fields["vocab_size"], fields["max_position_embeddings"]
            if field == "text" and vocab < 256:
                yield (*path, field), prompt[field], f"text needs 256 tokens, model {model} has {vocab}"
            elif max(tokens) >= vocab:
                yield (*path, field), max(tokens), f"token outside the vocabulary of model {model}, {vocab}"
            if len(tokens) + decode["max_new_tokens"] > context:
                reason = f"and {decode['max_new_tokens']} new ones exceed the context of model {model}, {context}"
                yield (*path, field), f"{len(tokens)} tokens", reason
    for model, fields in models.items():
        for token in decode["stop_token_ids"]:
            if token >= fields["vocab_size"]:
                reason = f"token outside the vocabulary of model {model}, {fields['vocab_size']}"
                yield ("decode", "stop_token_ids"), token, reason


def _file_of(path: tuple, loaded: list[tuple[str, dict]]) -> str:
    """The topmost file that holds the field or, for a missing one, the map or list it belongs in."""
    for depth in range(len(path), -1, -1):
        for name, content in reversed(loaded):
            if _holds(content, path[:depth]):
                return name
    return "config"


def _holds(content: object, path: tuple) -> bool:
    for key in path:
        if isinstance(content, dict) and key in content:
            content = content[key]
        elif isinstance(content, list) and isinstance(key, int) and key < len(content):
            content = content[key]
        else:
            return False
    return True


def _shown(source: str | Path) -> str:
    """The path as a user in the current folder would write it."""
    path = Path(source).absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _dotted(path: tuple) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".") or "(all)"


def _short(value: object, limit: int = 60) -> str:
    return short(json.dumps(value, ensure_ascii=False), limit)
