"""Chat templates: from either place, in a sandbox."""

import json

import pytest

pytest.importorskip("jinja2")

from engine.chat_template import open_chat_template
from engine.tokenizer import TextError
from tests.text import folders

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hé"}]
RENDERED = "<|im_system|>Be brief.<|im_end|><|im_user|>hé<|im_end|>"


def template(tmp_path, source):
    (tmp_path / "chat_template.jinja").write_text(source)
    return open_chat_template(tmp_path)


def settings(tmp_path, **content):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    return open_chat_template(tmp_path)


def test_rendering(tmp_path):
    chat = template(tmp_path, folders.CHAT)
    assert chat.render(MESSAGES) == RENDERED + "<|im_assistant|>"
    assert chat.render(MESSAGES, add_generation_prompt=False) == RENDERED


def test_places(tmp_path):
    assert open_chat_template(tmp_path) is None
    assert settings(tmp_path, bos_token="[BOS]") is None
    assert settings(tmp_path, chat_template="{{ bos_token }}!", bos_token={"content": "[BOS]"}).render([]) == "[BOS]!"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert settings(tmp_path, chat_template=named).render([]) == "yes"
    assert template(tmp_path, "file").render([]) == "file"


def test_what_templates_use(tmp_path):
    source = "{% for m in messages %}{% if loop.index0 * 2 == 2 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
    assert template(tmp_path, source).render(MESSAGES) == json.dumps(MESSAGES[0])
    assert template(tmp_path, "{% if thinking %}on{% endif %}").render([], thinking=True) == "on"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10 ** 10000000 }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% for %}",
        "{{ raise_exception('no\nsystem role') }}",
    ],
)
def test_what_a_template_may_not(source, tmp_path):
    with pytest.raises(TextError, match="chat_template") as raised:
        template(tmp_path, source).render(MESSAGES)
    assert "\n" not in str(raised.value)


def test_messages_are_not_changed(tmp_path):
    template(tmp_path, "{% set ns = namespace(m=messages) %}{% set messages = [] %}x").render(MESSAGES)
    assert len(MESSAGES) == 2
