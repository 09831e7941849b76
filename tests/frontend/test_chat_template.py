"""Chat templates: as transformers renders them, and nothing that a template could break."""

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tokenspeed.frontend.chat_template import ChatTemplate, ChatTemplateError, read_template_setting
from tokenspeed.frontend.text_assets import TextAssets
from tokenspeed.frontend.tokenizer_bytes import CHAT_TEMPLATE

MESSAGES = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    {"role": "user", "content": "Hi {{ 7 * 7 }} 你好\n"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "  Bye  "},
]

LLAMA_STYLE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('Roles are system, user and assistant') }}
    {%- endif %}
    {%- if loop.index0 == 1 %}{% continue %}{% endif %}
    {{- '<|' + message['role'] + '|>' }}
    {%- generation %}
    {{- message['content'] | trim }}
    {%- endgeneration %}
    {{- eos_token }}
{%- endfor %}
{% if tools is none and not documents %}
    {{ messages | tojson }} {{ {'a': '<&>é'} | tojson(indent=2) }}
{% endif %}
{%- if add_generation_prompt %}<|assistant|>{% if thinking %}<think>{% endif %}{% endif %}"""


@pytest.mark.parametrize("source", [LLAMA_STYLE, CHAT_TEMPLATE])
@pytest.mark.parametrize("opens", [True, False])
def test_equals_transformers(source: str, opens: bool) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=opens, thinking=True, **tokens
    )
    template = ChatTemplate(source, **tokens)
    assert template.render(MESSAGES, add_generation_prompt=opens, variables={"thinking": True}) == expected[0]


def test_the_template_of_a_real_model(smollm2_text: TextAssets) -> None:
    template = ChatTemplate(smollm2_text.chat_template, "<|im_start|>", "<|im_end|>")
    text = template.render([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "transformers" not in text


def test_a_template_may_refuse() -> None:
    template = ChatTemplate(LLAMA_STYLE, "", "")
    with pytest.raises(ChatTemplateError, match="Roles are system, user and assistant"):
        template.render([{"role": "robot", "content": ""}])


def test_continue_final_message() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, "<|bos|>", "<|eos|>")
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "I think "}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nI think")
    with pytest.raises(ChatTemplateError, match="continue_final_message"):
        template.render([{"role": "user", "content": " "}], continue_final_message=True)


def test_variables_do_not_replace_what_is_fixed() -> None:
    template = ChatTemplate("{{ messages | length }}{{ bos_token }}{{ extra }}", "B", "E")
    assert template.render(MESSAGES, variables={"messages": [], "bos_token": "X", "extra": 1}) == "4B1"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ missing.attribute }}",
        "{{ 1 // 0 }}",
        "{% set ns = namespace(_x=1) %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}x",
    ],
)
def test_a_template_stays_in_its_sandbox(source: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    try:
        text = ChatTemplate(source, "", "").render(messages)
    except ChatTemplateError:
        text = ""
    assert text == "" and messages == [{"role": "user", "content": "x"}]


def test_what_is_set_in_a_generation_block_stays_there() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    expected, _ = render_jinja_template([MESSAGES], chat_template=source)
    assert ChatTemplate(source, "", "").render(MESSAGES) == expected[0] == "21"


def test_a_broken_template_is_named_with_its_line() -> None:
    with pytest.raises(ChatTemplateError, match="line 2"):
        ChatTemplate("fine\n{% if %}", "", "")


def test_the_date(tmp_path: Path) -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}", "", "").render(MESSAGES)
    assert text.isdigit() and int(text) >= 2024


def test_the_setting_is_a_file_or_the_template_itself(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}")
    assert read_template_setting(str(path)) == read_template_setting("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ChatTemplateError, match=r"--chat-template .*missing\.jinja"):
        read_template_setting(str(tmp_path / "missing.jinja"))
