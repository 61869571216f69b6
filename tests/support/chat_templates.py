"""Small chat templates with the structure of public model families: turns, marks, tools, thinking, and what they refuse.

Each is written for these tests in a few lines. What matters is how a template reads messages: which keys, as text or as an object, and with
which functions of jinja.
"""

from __future__ import annotations

SAYS_TEXT = frozenset(("deepseek_v3", "deepseek_r1"))
"""Templates that join the arguments of a call with other text; the others write an object, or take no calls."""


def _turns(begin: str, end: str, answer: str, *, first: str = "", roles: str = "message['role']") -> str:
    """A turn after the other, each between two marks."""
    return (
        f"{first}{{% for message in messages %}}{{{{ '{begin}' + {roles} + '\\n' + message['content'] + '{end}\\n' }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{answer}' }}}}{{% endif %}}"
    )


_ALTERNATE = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}{% endfor %}"
)
_HERMES_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n<tools>' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}{% endif %}"
)
_HERMES_CALLS = (
    "{% for call in message.tool_calls %}{% set call = call.function or call %}"
    "{{ '\n<tool_call>\n{\"name\": \"' + call.name + '\", \"arguments\": ' }}{{ call.arguments | tojson }}{{ '}\n</tool_call>' }}"
    "{% endfor %}"
)
_DEEPSEEK_CALLS = (
    "{% for call in message['tool_calls'] %}{{ '<call>' + call['type'] + '<sep>' + call['function']['name'] + '\n```json\n' + "
    "call['function']['arguments'] + '\n```<end>' }}{% endfor %}"
)

TEMPLATES: dict[str, str] = {
    "llama_2": (
        "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
        "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
        + _ALTERNATE
        + "{% for message in messages %}{% if message.role == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') "
        "+ message.content.strip() + ' [/INST]' }}{% else %}{{ ' ' + message.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama_3": _turns("<|head|>", "<|eot|>", "<|head|>assistant\\n\\n", first="{{ bos_token }}", roles="message['role'] + '<|tail|>'"),
    "llama_3_1": (
        "{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
        "{{- 'Today: ' + date_string + '\n' }}{%- if tools is not none %}{%- for t in tools %}"
        "{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}"
        "{%- for message in messages %}{%- if 'tool_calls' in message %}{%- if message.tool_calls | length != 1 %}"
        "{{- raise_exception('one call at a time') }}{%- endif %}{%- set call = message.tool_calls[0].function %}"
        "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{- call.arguments | tojson }}{{- '}<|eot|>' }}"
        "{%- elif message.role in ['tool', 'ipython'] %}{{- '<|ipython|>' }}"
        "{%- if message.content is mapping or message.content is iterable %}"
        "{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}{{- '<|eot|>' }}"
        "{%- else %}{{- '<|' + message.role + '|>' + message.content | trim + '<|eot|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
    ),
    "mistral_v1": (
        "{{ bos_token }}" + _ALTERNATE + "{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    "mistral_v3": (
        "{{- bos_token }}{%- for message in messages %}{%- if message.role == 'user' %}{%- if tools is not none and loop.last %}"
        "{{- '[TOOLS] [' }}{%- for tool in tools %}{{- tool.function | tojson }}{{- ', ' if not loop.last else ']' }}{%- endfor %}"
        "{%- endif %}"
        "{{- '[INST] ' + message.content + '[/INST]' }}{%- elif message.tool_calls is defined and message.tool_calls is not none %}"
        "{{- '[CALLS] [' }}{%- for call in message.tool_calls %}{%- set out = call.function | tojson %}{{- out[:-1] }}"
        "{%- if call.id is undefined or call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}"
        "{{- ', \"id\": \"' + call.id + '\"}' }}{%- endfor %}{{- ']' + eos_token }}{%- elif message.role == 'tool' %}"
        "{{- '[RESULT] ' + message.content | string + '[/RESULT]' }}{%- else %}{{- ' ' + message.content | trim + eos_token }}{%- endif %}"
        "{%- endfor %}"
    ),
    "mistral_tekken": (
        "{{- bos_token }}{%- for message in messages %}{%- if message['role'] == 'system' %}{{- '[SYS]' + message['content'] + '[/SYS]' }}"
        "{%- elif message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}{%- elif message['role'] == 'assistant' %}"
        "{{- message['content'] + eos_token }}{%- else %}{{- raise_exception('only user, system and assistant') }}{%- endif %}{%- endfor %}"
    ),
    "qwen_2": _turns("<|im_start|>", "<|im_end|>", "<|im_start|>assistant\\n"),
    "qwen_2_5": (
        _HERMES_TOOLS
        + "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}{%- if message.content %}{{- message.content }}"
        "{%- endif %}"
        + _HERMES_CALLS
        + "{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
    "qwen_3": (
        _HERMES_TOOLS + "{%- for message in messages %}{%- set thought = '' %}{%- if message.reasoning_content is string %}"
        "{%- set thought = message.reasoning_content %}{%- elif '</think>' in message.content %}"
        "{%- set thought = message.content.split('</think>')[0].split('<think>')[-1] %}{%- endif %}"
        "{{- '<|im_start|>' + message.role + '\n' }}"
        "{%- if thought %}{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{%- endif %}{{- message.content }}"
        "{%- for call in message.tool_calls %}{%- if call.function %}{%- set call = call.function %}{%- endif %}"
        "{{- '<tool_call>' + call.name }}{%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}"
        "{%- endif %}{{- '</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}"
        "{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}"
        "{%- endif %}{%- endif %}"
    ),
    "qwen_3_coder": (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content }}"
        "{%- for call in message.tool_calls or [] %}"
        "{{- '<function=' + call.function.name + '>' }}{%- for name, value in call.function.arguments | items %}"
        "{{- '<parameter=' + name + '>' }}"
        "{{- value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string }}"
        "{{- '</parameter>' }}{%- endfor %}{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}"
    ),
    "gemma_1": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + _ALTERNATE
        + "{% for message in messages %}{{ '<turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' "
        "+ message['content'] | trim + '<end>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
    ),
    "gemma_2": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% set role = {'assistant': 'model'}.get(message['role'], message['role']) %}"
        "{{ '<turn>' ~ role ~ '\n' ~ message['content'].strip() "
        "~ '<end>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
    ),
    "gemma_3": (
        "{{ bos_token }}{%- if messages[0]['role'] == 'system' %}{%- if messages[0]['content'] is string %}"
        "{%- set first = messages[0]['content'] "
        "+ '\n\n' %}{%- else %}{%- set first = messages[0]['content'][0]['text'] + '\n\n' %}{%- endif %}"
        "{%- set loop_messages = messages[1:] %}"
        "{%- else %}{%- set first = '' %}{%- set loop_messages = messages %}{%- endif %}{%- for message in loop_messages %}"
        "{{ '<turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' + (first if loop.first else '') }}"
        "{%- if message['content'] is string %}{{ message['content'] | trim }}{%- elif message['content'] is iterable %}"
        "{%- for item in message['content'] %}{{ item['text'] | trim }}{%- endfor %}{%- else %}"
        "{{ raise_exception('bad content') }}{%- endif %}"
        "{{ '<end>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<turn>model\n' }}{%- endif %}"
    ),
    "phi_3": _turns("<|", "<|end|>", "<|assistant|>\\n", roles="message['role'] + '|>'"),
    "phi_4": (
        "{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>' }}"
        "{% elif message['role'] == 'assistant' %}{{ '<|im_start|>assistant<|im_sep|>' }}{% generation %}"
        "{{ message['content'] + '<|im_end|>' }}"
        "{% endgeneration %}{% else %}{{ '<|im_start|>' ~ message['role'] ~ '<|im_sep|>' ~ message['content'] ~ '<|im_end|>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
    ),
    "deepseek_v2": (
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}"
        "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}"
        "{% elif message['role'] == 'system' %}"
        "{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
    "deepseek_v3": (
        "{% set ns = namespace(system='', outputs=false) %}{% for message in messages %}{% if message['role'] == 'system' %}"
        "{% set ns.system = ns.system + message['content'] %}{% endif %}{% endfor %}"
        "{{ bos_token + ns.system }}{% for message in messages %}"
        "{% if message['role'] == 'user' %}{{ '<User>' + message['content'] }}"
        "{% elif message['role'] == 'assistant' and message['tool_calls'] %}"
        "{{ '<Assistant>' }}" + _DEEPSEEK_CALLS + "{{ eos_token }}{% elif message['role'] == 'assistant' %}"
        "{{ '<Assistant>' + message['content'] + eos_token }}{% elif message['role'] == 'tool' %}"
        "{{ '<output>' + message['content'] + '</output>' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<Assistant>' }}{% endif %}"
    ),
    "deepseek_r1": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' and 'tool_calls' in message %}"
        + _DEEPSEEK_CALLS
        + "{% else %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}"
        "{% endif %}{{ '<' + message['role'] + '>' + content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant><think>\n' }}{% endif %}"
    ),
    "chatml": (
        "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor -%}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
    ),
    "zephyr": _turns("<|", "</s>", "<|assistant|>\\n", roles="message['role'] + '|>'"),
    "vicuna": (
        "{% for message in messages %}{% if message.role == 'system' %}{{ message.content + '\n\n' }}{% elif message.role == 'user' %}"
        "{{ 'USER: ' + message.content + ' ' }}{% else %}{{ 'ASSISTANT: ' + message.content + '</s>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "alpaca": (
        "{% set heads = {'system': '', 'user': '### Instruction:\n', 'assistant': '### Response:\n'} %}{% for message in messages %}"
        "{{ heads[message['role']] ~ message['content'] ~ '\n\n' }}{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
    ),
    "command_r": (
        "{{ bos_token }}{% macro turn(role, text) %}{{ '<|START|>' + role + text + '<|END|>' }}{% endmacro %}{% for message in messages %}"
        "{% if message['role'] == 'system' %}{{ turn('<|SYS|>', message['content'].strip()) }}{% elif message['role'] == 'user' %}"
        "{{ turn('<|USER|>', message['content'].strip()) }}{% elif message['tool_calls'] %}"
        "Action: ```json\n[{% for call in message['tool_calls'] %}"
        '{"tool_name": "{{ call["function"]["name"] }}", "parameters": {{ call["function"]["arguments"] | tojson }}}'
        '{{ "," if not loop.last }}'
        "{% endfor %}]```{% else %}{{ turn('<|BOT|>', message['content'].strip()) }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START|><|BOT|>' }}{% endif %}"
    ),
    "granite_3": (
        "{%- if tools %}{{- '<|role|>tools<|/role|>' }}{%- for tool in tools %}{{- tool | tojson(indent=2) }}{%- endfor %}"
        "{{- '<|eot|>' }}{%- endif %}"
        "{%- for message in messages %}{%- if message.role == 'assistant' and message.tool_calls %}"
        "{{- '<|role|>assistant<|/role|><|tool_call|>' + message.tool_calls | map(attribute='function') | list | tojson + '<|eot|>' "
        "}}{%- else %}"
        "{{- '<|role|>' + message.role + '<|/role|>' + message.content + '<|eot|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|role|>assistant' }}{%- if controls %}{{- ' ' + controls | tojson }}{%- endif %}"
        "{{- '<|/role|>' }}{%- endif %}"
    ),
    "olmo": (
        "{{ eos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}"
        "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' }}"
        "{{ message['content'] + (eos_token + '\n' if not loop.last else eos_token) }}"
        "{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
    ),
    "smollm_2": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}"
        "{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "smollm_3": (
        "{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}"
        "{{- '<|im_start|>system\n## Metadata\n' -}}"
        "{{- 'Mode: ' + ('/think' if enable_thinking else '/no_think') + '\n<|im_end|>\n' -}}{%- for message in messages -%}"
        "{%- set content = message.content if message.content is string else '' -%}{%- if message.role == 'assistant' -%}{% generation %}"
        "{{- '<|im_start|>assistant\n' + content.lstrip('\n') + '<|im_end|>\n' -}}{% endgeneration %}{%- else -%}"
        "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
    ),
    "falcon": (
        "{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}{{ message['role'].title() + ': ' + message['content'] }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '\nAssistant:' }}{% endif %}"
    ),
    "internlm_2": _turns("<|im_start|>", "<|im_end|>", "<|im_start|>assistant\\n", first="{{ bos_token }}"),
    "glm_4": (
        "[gMASK]<sop>{%- if tools is defined and tools -%}<|system|>\n{%- for tool in tools -%}{{ tool.function.name }}: "
        "{{ tool.function | tojson(ensure_ascii=False) }}\n{%- endfor -%}{%- endif -%}{%- for message in messages -%}"
        "{%- if message.tool_calls -%}{%- for call in message.tool_calls -%}<|assistant|>{{ call.function.name }}\n"
        "{{ call.function.arguments | tojson(ensure_ascii=False) }}{%- endfor -%}{%- elif message.role == 'tool' -%}<|observation|>\n"
        "{{ message.content }}{%- else -%}<|{{ message.role }}|>\n{{ message.content }}{%- endif -%}{%- endfor -%}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "nemotron": (
        "{%- set think = namespace(on=true) %}{%- for m in messages %}{%- if m.role == 'system' and '/no_think' in m.content %}"
        "{%- set think.on = false %}{%- endif %}{%- endfor %}{%- for m in messages %}{{- '<SPECIAL>' + m.role | capitalize + '\n' "
        "+ m.content.replace('/no_think', '') | trim + '\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<SPECIAL>Assistant\n' }}"
        "{{- '<think>\n' if think.on else '<think></think>' }}{%- endif %}"
    ),
    "hermes": (
        _HERMES_TOOLS + "{{- bos_token }}{%- for message in messages %}{%- if message.role == 'tool' %}"
        "{{- '<|im_start|>tool\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}{%- else %}"
        "{{- '<|im_start|>' + message.role }}{%- if message.content %}{{- '\n' + message.content }}{%- endif %}"
        + _HERMES_CALLS
        + "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
}
