"""A checkpoint's chat template: a conversation -> the text of a prompt."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.tokenizer import TextError, name_of, read_settings
from reference.config import short


class ChatTemplate:
    """A checkpoint's template, rendered in a sandbox: it sees the messages and nothing else."""

    def __init__(self, source: str, path: Path, names: Mapping[str, str]):
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Sandbox(ImmutableSandboxedEnvironment):
            intercepted_binops = frozenset({"*", "**"})  # with them a template could ask for endless memory

            def call_binop(self, context, operator, left, right):
                if operator == "*" and all(isinstance(x, int) and abs(x) < 1 << 31 for x in (left, right)):
                    return left * right
                raise TemplateError(f"{operator}: not allowed in a chat template")

        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = self._raise
        self._path, self._names = path, dict(names)
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise self._error(error) from None

    def render(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True, **more) -> str:
        """The prompt of a conversation: maps with `role` and `content`. Raises TextError."""
        try:
            return self._template.render(messages=[dict(m) for m in messages], tools=None, **self._names,
                                         add_generation_prompt=add_generation_prompt, **more)  # fmt: skip
        except Exception as error:  # whatever the template's own expressions raise
            raise self._error(error) from None

    def _error(self, error: Exception) -> TextError:
        return TextError(f"{self._path}: chat_template: {short(error)}: cannot be rendered")

    @staticmethod
    def _raise(message):
        raise ValueError(message)


def open_chat_template(folder: str | Path) -> ChatTemplate | None:
    """`chat_template.jinja`, or what tokenizer_config.json has; None without one."""
    folder = Path(folder)
    settings, path = read_settings(folder), folder / "chat_template.jinja"
    if path.is_file():
        source = path.read_text(encoding="utf-8", errors="replace")
    else:
        path, source = folder / "tokenizer_config.json", settings.get("chat_template")
        if isinstance(source, list):  # several by name
            named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
            source = named.get("default")
    if not isinstance(source, str):
        return None
    names = {name: name_of(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return ChatTemplate(source, path, {name: token for name, token in names.items() if token is not None})
