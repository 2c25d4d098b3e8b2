"""Chat templates that write tools, in the manner of families that people use. Written for these tests."""

from chat_families import Family

LLAMA_3_1 = (
    "{{ bos_token }}{% for m in messages %}{% if loop.first and tools %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}"
    "{{ '<|eot_id|>' }}{% endif %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}{% set call = m.tool_calls[0].function %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{ call.arguments | tojson + '}<|eot_id|>' }}{% elif m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}{% else %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL_3 = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson }}"
    "{{ '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}{{ ', ' if not loop.last }}"
    "{% endfor %}{{ ']' + eos_token }}{% elif m.role == 'tool' %}"
    "{{ '[TOOL_RESULTS] ' + {'content': m.content, 'call_id': m.tool_call_id} | tojson + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
DEEPSEEK_V3 = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t.function.name + ': ' + t.function | tojson + '\n' }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% elif m.role == 'assistant' and m.content is none %}{{ '<|Assistant|><|calls|>' }}{% for c in m.tool_calls %}"
    "{{ c.type + '<|sep|>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}{% endfor %}"
    "{{ '<|end_of_calls|>' + eos_token }}{% elif m.role == 'tool' %}{{ '<|output|>' + m.content + '<|/output|>' }}"
    "{% else %}{{ '<|Assistant|>' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
)

TOOL_FAMILIES = {
    "llama 3.1": Family(
        template=LLAMA_3_1,
        marks=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
    ),
    "mistral 3": Family(
        template=MISTRAL_3,
        marks=("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
        bos="<s>",
        eos="</s>",
    ),
    "deepseek 3": Family(
        template=DEEPSEEK_V3,
        marks=("<|User|>", "<|Assistant|>", "<|calls|>", "<|sep|>", "<|end_of_calls|>", "<|output|>", "<|/output|>"),
        bos="<|begin|>",
        eos="<|finish|>",
    ),
}
