"""Chat templates that use what published ones use, conversations for them, and a tokenizer with their special tokens."""

from __future__ import annotations

import json
from dataclasses import replace

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import manyheads
from manyheads import Checkpoint
from manyheads.convert.hf import native_metadata

TEMPLATES = {
    "turns": """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|start|>system\\nBe of use.<|end|>\\n' }}
{%- endif %}
{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}""",
    "system in the first message": """{% if messages[0]['role'] == 'system' %}
{% set rest = messages[1:] %}{% set system = '<<SYS>>\\n' ~ messages[0]['content'].strip() ~ '\\n<</SYS>>\\n\\n' %}
{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}
{% for message in rest %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('user and assistant must alternate') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'] | trim + ' [/INST]' }}
{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}
{% endfor %}""",
    "headers": """{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages if message.role == 'system' %}{% set ns.system = ns.system ~ message.content | trim %}{% endfor %}
{{- '<|start|>system<|end|>\\n\\nYear ' ~ strftime_now('%Y') ~ '\\n' ~ ns.system ~ eos_token }}
{%- for message in messages if message.role != 'system' %}
    {{- '<|start|>' ~ message.role ~ '<|end|>\\n\\n' }}
    {{- message.content | trim ~ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}""",
    "renamed roles": """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{% for message in messages %}{% set role = 'model' if message.role == 'assistant' else message.role %}
<|start|>{{ role }}
{{ message.content | trim }}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|start|>model
{% endif %}""",
    "the last is different": """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if loop.last and messages[0].role == 'system' %}
            {{- '[INST] ' + messages[0].content + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message.content + '[/INST]' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}""",
    "blocks": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% else %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "json": """{% if tools is none and documents is none and not (other is defined) %}{{ messages | tojson(indent=2) }}{% endif %}
{{ messages[-1] | tojson }}{{ {'é': [1, true, none, 'ü<']} | tojson(sort_keys=true) }}""",
    "macros": """{% macro turn(role, text='') -%}
<|start|>{{ role }}:{{ caller() if caller else text }}<|end|>
{%- endmacro %}
{% for message in messages %}
{% if message.role == 'assistant' %}
{{ turn(message.role, text=message.content) }}{% generation %}
{{- message.content }}{% endgeneration %}
{% else %}{% call turn(message.role) %}{{ message.content }}{% endcall %}{% endif %}
{% endfor %}""",
    "loop controls": """{% for message in messages %}
{% if message.role == 'system' %}{% continue %}{% endif %}
{% if loop.index > 4 %}{% break %}{% endif %}
{{ loop.index0 }} of {{ loop.length }} after {{ loop.previtem.role if loop.previtem else 'nothing' }}: {{ message.content }}
{% else %}empty{% endfor %}""",
    "filters": """{% set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join(' ') %}
{{ system | default('no system', true) | upper }}|{{ messages | length }}|{{ messages[-1].content[:4] | replace('e', 'E') }}
{%- for role, group in messages | groupby('role') %}|{{ role }}={{ group | map(attribute='content') | list | first | title }}{% endfor %}
{{ messages[::-1] | map(attribute='role') | unique | sort | join(',') }}{{ '%s-%d' % ('a', 3) }}{{ '{:>5}'.format('b') }}""",
    "values": """{% set kinds = dict(user='U', assistant='A') %}{% set ns = namespace(list=[], open=false) %}
{% for message in messages %}{% set ns.list = ns.list + [kinds.get(message.role, '?')] %}
{% if message.content is string and 'e' in message.content and message is mapping %}{% set ns.open = not ns.open %}{% endif %}
{% endfor %}{{ ns.list | join('') ~ ns.open }}
{% for key, value in messages[0].items() %}{{ key }}={{ value.split(' ')[-1].rstrip('.') }};{% endfor %}
{{ range(3) | list }}{{ missing }}{{ (messages | last).content.startswith('And') }}""",
}  # fmt: skip


def message(role, content):
    return {"role": role, "content": content}


ASKED = [message("user", "Where is the sea?")]
ANSWERED = [*ASKED, message("assistant", " By the shore. \n"), message("user", "And the\n\n  tide? ")]
CONVERSATIONS = [
    ASKED,
    ANSWERED,
    [message("system", " Answer in one line. "), *ANSWERED],
    [*ANSWERED, message("assistant", "Ünder <b>&</b> {{ 'a' }} {% endfor %} 海"), message("user", "")],
    [message("user", "twice"), message("user", "the same role")],
]
SPECIAL = ["<pad>", "<s>", "</s>", "<|start|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
WORDS = ["[UNK]", *SPECIAL, "system", "user", "assistant", *(f"word{i}" for i in range(40))]


def byte_tokenizer():
    symbols = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(symbols | {"er": 256, "th": 257}, [("e", "r"), ("t", "h")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return tokenizer


def word_tokenizer():
    """Whole words, so that a generated text has the same tokens when it is read again."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return tokenizer


WORD_TEMPLATE = "{% for message in messages %}<|start|>{{ message.role }} {{ message.content }}<|end|>{% endfor %}<|start|>assistant "


def chat_checkpoint(model, tokenizer, template=WORD_TEMPLATE, **config):
    """A checkpoint in memory with a chat template."""
    files = {
        "chat_template.jinja": template.encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}).encode(),
    }
    metadata = native_metadata(model)
    metadata = replace(metadata, extra_files=files, config=metadata.config | config)
    return Checkpoint(model, tokenizer, metadata)


def spec_with(spec, tokenizer):
    from manyheads.spec import to_tree

    untied = {"head": {"kind": "untied"}, "init": {"kind": "normal", "std": 1.0}}  # a tied head repeats its input
    return manyheads.read_model(to_tree(spec) | untied | {"vocab": tokenizer.get_vocab_size()})
