"""Chat templates in the manner of families that people use, each with its special tokens. Written for these tests."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from proximo.data.tokenizer_training import train_tokenizer

PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '\\n\\nHuman: ' + message['content'] }}"
    "{% else %}{{ '\\n\\nAssistant: ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)
"""A template in plain words for tokenizers that have none; needs an EOS token, which ends each assistant's turn."""
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set first = messages[0]['content'] + '\n\n' %}"
    "{%- set turns = messages[1:] %}{%- else %}{%- set first = '' %}{%- set turns = messages %}{%- endif %}"
    "{{- bos_token }}{%- for m in turns %}"
    "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('user and assistant must take turns, the user first') }}{%- endif %}"
    "{%- if m['role'] == 'user' %}{{- '[INST] ' + (first if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{%- else %}{{- ' ' + m['content'] | trim + eos_token }}{%- endif %}{%- endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('there is no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}\n{% if m['role'] == 'user' %}\n{{ '<|user|>\n' + m['content'] + eos_token }}\n"
    "{% elif m['role'] == 'system' %}\n{{ '<|system|>\n' + m['content'] + eos_token }}\n"
    "{% else %}\n{{ '<|assistant|>\n'  + m['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
PHI_3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}"
    "{% else %}{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
DEEPSEEK_THINKING = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{% set content = m['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|Assistant|>' + content + eos_token }}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
QWEN_3 = (
    "{%- set ns = namespace(last=messages | length - 1, found=false) %}"
    "{%- for m in messages[::-1] %}{%- if m.role == 'user' and not ns.found %}"
    "{%- set ns.found = true %}{%- set ns.last = messages | length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set said = m.content %}{%- set thought = '' %}"
    "{%- if '</think>' in said %}"
    "{%- set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set said = said.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{%- endif %}"
    "{{- said + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set rule = messages[0]['content'] %}"
    "{% else %}{% set turns = messages %}{% set rule = false %}{% endif %}{% for m in turns %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}"
    "{% if loop.first and rule %}{% set content = '<<SYS>>\n' + rule + '\n<</SYS>>\n\n' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
COMMAND_A = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|START_OF_TURN|><|CHATBOT|><|START_RESPONSE|>' + m['content'] + '<|END_RESPONSE|><|END_OF_TURN|>' }}"
    "{% else %}{{ '<|START_OF_TURN|><|' + m['role'] | upper + '|>' + m['content'] + '<|END_OF_TURN|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN|><|CHATBOT|>' }}{% endif %}"
)
GPT_OSS = (
    "{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- if m.thinking and loop.last %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{%- if loop.last and not add_generation_prompt %}{{- '<|return|>' }}{%- else %}{{- '<|end|>' }}{%- endif %}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
PHI_4 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
SMOLLM_3 = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template with its special tokens, and what is known of it."""

    template: str
    marks: tuple[str, ...] = ()
    """Special tokens beside BOS and EOS."""
    eos: str
    bos: str | None = None
    has_system: bool = True
    rewrites: bool = False
    """An answer reads otherwise once another question follows."""
    trims: bool = False
    """The white space around an answer is left out."""
    learned: str = "yes"
    """What is learned of the answer "yes" in its turn, without the EOS that is put behind it where no mark ends it."""

    def tokenizer(self, *texts: str) -> PreTrainedTokenizerBase:
        """Bytes and the special tokens, so that any text can be written, and the most frequent pieces of `texts`."""
        tokenizer = train_tokenizer(texts, vocab_size=400 if texts else 257)
        tokenizer.add_special_tokens({"eos_token": self.eos, "additional_special_tokens": list(self.marks)})
        tokenizer.bos_token = self.bos
        if self.bos is not None:
            tokenizer.add_special_tokens({"bos_token": self.bos})
        tokenizer.chat_template = self.template
        tokenizer.name_or_path = "family"
        return tokenizer


FAMILIES = {
    "chatml": Family(template=CHATML, marks=("<|im_start|>",), eos="<|im_end|>", learned="yes<|im_end|>"),
    "chatml in plain text": Family(template=CHATML, eos="</s>", learned="yes<|im_end|>"),
    "llama 3": Family(
        template=LLAMA_3,
        marks=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
        trims=True,
        learned="yes<|eot_id|>",
    ),
    "mistral": Family(template=MISTRAL, bos="<s>", eos="</s>", trims=True, learned=" yes</s>"),
    "gemma": Family(
        template=GEMMA,
        marks=("<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
        has_system=False,
        trims=True,
        learned="yes<end_of_turn>",
    ),
    "zephyr": Family(template=ZEPHYR, bos="<s>", eos="</s>", learned="yes</s>"),
    "phi 3": Family(
        template=PHI_3, marks=("<|user|>", "<|assistant|>", "<|end|>"), eos="<|endoftext|>", learned="yes<|end|>"
    ),
    "deepseek": Family(template=DEEPSEEK, bos="<|begin|>", eos="<|finish|>", learned=" yes<|finish|>"),
    "deepseek, thinking": Family(
        template=DEEPSEEK_THINKING,
        marks=("<|User|>", "<|Assistant|>"),
        bos="<|begin|>",
        eos="<|finish|>",
        rewrites=True,
        learned="yes<|finish|>",
    ),
    "qwen 3": Family(
        template=QWEN_3,
        marks=("<|im_start|>",),
        eos="<|im_end|>",
        rewrites=True,
        learned="<think>\n\n</think>\n\nyes<|im_end|>",
    ),
    "llama 2": Family(template=LLAMA_2, bos="<s>", eos="</s>", trims=True, learned=" yes </s>"),
    "command a": Family(
        template=COMMAND_A,
        marks=("<|START_OF_TURN|>", "<|CHATBOT|>", "<|USER|>", "<|SYSTEM|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        bos="<BOS>",
        eos="<|END_OF_TURN|>",
        learned="<|START_RESPONSE|>yes<|END_RESPONSE|><|END_OF_TURN|>",
    ),
    "gpt-oss": Family(
        template=GPT_OSS,
        marks=("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        eos="<|return|>",
        rewrites=True,
        learned="<|channel|>final<|message|>yes<|return|>",
    ),
    "phi 4 mini": Family(
        template=PHI_4, marks=("<|user|>", "<|assistant|>", "<|end|>"), eos="<|endoftext|>", learned="yes<|end|>"
    ),
    "smollm 3": Family(template=SMOLLM_3, marks=("<|im_start|>",), eos="<|im_end|>", learned="yes<|im_end|>"),
    "plain": Family(template=PLAIN_CHAT_TEMPLATE, eos="</s>", learned=" yes</s>"),
    "plain, no end": Family(template=PLAIN_CHAT_TEMPLATE.replace(" + eos_token", ""), eos="</s>", learned=" yes"),
}
