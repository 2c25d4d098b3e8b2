"""Chat templates of several turns with tools and thoughts, in the manner of families. Written for these tests."""

from chat_families import FAMILIES, Family
from tool_templates import TOOL_FAMILIES

QWEN_3 = (
    "{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}{%- for t in tools %}{{- t | tojson + '\n' }}{%- endfor %}"
    "{{- 'as <tool_call></tool_call><|im_end|>\n' }}{%- endif %}"
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- set said = m.content %}{%- set thought = '' %}"
    "{%- if '</think>' in said %}"
    "{%- set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set said = said.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}{%- if loop.index0 > ns.last and thought %}"
    "{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}{{- said + '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}{%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
SMOLLM_2 = (
    "{%- for m in messages %}{%- if loop.first and m.role != 'system' %}"
    "{{- '<|im_start|>system\nYou are a small model that helps.<|im_end|>\n' }}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
MISTRAL = (
    "{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{- bos_token }}{%- set ns = namespace(turn=0) %}{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set ns.turn = ns.turn + 1 %}{%- endif %}"
    "{%- if m.role == 'user' %}{%- if tools and m == users[-1] %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson }}"
    "{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}{{- '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}{%- if m.tool_call_id | length != 9 %}{{- raise_exception('ids have 9 letters') }}"
    "{%- endif %}{{- '[TOOL_RESULTS] ' + {'content': m.content, 'call_id': m.tool_call_id} | tojson }}"
    "{{- '[/TOOL_RESULTS]' }}"
    "{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for c in m.tool_calls %}"
    "{{- c.function | tojson }}{{- ', ' if not loop.last }}{%- endfor %}{{- ']' + eos_token }}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"
)
GLM = (
    "{{- '[gMASK]<sop>' }}{%- for t in tools or [] %}{{- t | tojson + '\n<arg_key>' }}{%- endfor %}"
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|assistant|>' }}{%- set said = m.content %}"
    "{%- set thought = '' %}{%- if '</think>' in said %}"
    "{%- set thought = said.split('</think>')[0].split('<think>')[-1] %}"
    "{%- set said = said.split('</think>')[-1] %}{%- endif %}"
    "{%- if loop.index0 > ns.last and thought %}{{- '\n<think>' + thought.strip() + '</think>' }}"
    "{%- else %}{{- '\n<think></think>' }}{%- endif %}{{- '\n' + said.strip() }}"
    "{%- elif m.role == 'tool' %}{%- if loop.previtem.role != 'tool' %}{{- '<|observation|>' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- else %}{{- '<|' + m.role + '|>\n' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)

TURN_FAMILIES = {
    "smollm 2": Family(template=SMOLLM_2, marks=("<|im_start|>",), eos="<|im_end|>"),
    "qwen 3": Family(template=QWEN_3, marks=("<|im_start|>",), eos="<|im_end|>"),
    "llama 3": TOOL_FAMILIES["llama 3.1"],
    "mistral": Family(
        template=MISTRAL,
        marks=("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
        bos="<s>",
        eos="</s>",
    ),
    "gemma": FAMILIES["gemma"],
    "glm": Family(
        template=GLM, marks=("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"), eos="<|endoftext|>"
    ),
    "deepseek, thinking": FAMILIES["deepseek, thinking"],
}
