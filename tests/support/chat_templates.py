"""Chat templates of our own that write conversations in the forms of seven model families, and a tokenizer.

The text is ours; the forms are the families': which tokens open and end a turn, what follows the end, how
tools are shown, how a tool's answer is written, what an earlier turn loses.
"""

from __future__ import annotations

import functools
from typing import Any

_CALL = (
    '{{ \'<tool_call>\\n{"name": "\' + c.function.name }}'
    "{{ '\", \"arguments\": ' + c.function.arguments|tojson + '}\\n</tool_call>' }}"
)

# A system message always; tools in it; answers of tools share one user turn.
QWEN2_5 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = 'Be of help.' %}{% set rest = messages %}{% endif %}"
    "{{ '<|im_start|>system\\n' + system }}{% if tools %}{{ '\\n\\n# Tools\\n' }}"
    "{% for tool in tools %}{{ '\\n' + tool|tojson }}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% for m in rest %}{% if m.role == 'tool' %}"
    "{% if loop.first or rest[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or rest[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '\\n' }}"
    + _CALL
    + "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# No default system message; the last assistant message gets an empty thought, earlier ones lose theirs.
QWEN3 = (
    "{% if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ '\\n' + tool|tojson }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{{ '<|im_start|>assistant\\n' }}{% if loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ said }}"
    "{% for c in m.tool_calls or [] %}{{ '\\n' }}" + _CALL + "{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Calls name the function and each parameter in tags; a turn follows an empty thought; a user must have asked.
QWEN3_5 = (
    "{% if not messages|selectattr('role', 'equalto', 'user')|list %}{{ raise_exception('no question') }}"
    "{% endif %}{% if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}"
    "{{ '\\n' + tool|tojson }}{% endfor %}"
    "{{ '\\n<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n' }}"
    "{{ '</function>\\n</tool_call>' }}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{% set content = m.content|trim %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}{% set said = content.split('</think>')[-1].lstrip('\\n') %}"
    "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + said }}"
    "{% for c in m.tool_calls or [] %}{{ '\\n\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
    "{% for key, value in c.function.arguments|items %}"
    "{{ '<parameter=' + key + '>\\n' + (value if value is string else value|tojson) + '\\n</parameter>\\n' }}"
    "{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)

# No token ends a turn but the next one's role; keys and values of a call have tags of their own.
GLM4_5 = (
    "{{ '[gMASK]<sop>' }}{% if tools %}{{ '<|system|>\\n# Tools\\n' }}{% for tool in tools %}"
    "{{ tool|tojson + '\\n' }}{% endfor %}"
    "{{ '<tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>' }}"
    "{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% elif m.role == 'assistant' %}{{ '<|assistant|>\\n<think></think>\\n' }}"
    "{{ m.content.split('</think>')[-1]|trim }}{% for c in m.tool_calls or [] %}"
    "{{ '\\n<tool_call>' + c.function.name }}{% for key, value in c.function.arguments|items %}"
    "{{ '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}"
    "{{ (value if value is string else value|tojson) + '</arg_value>' }}{% endfor %}"
    "{{ '\\n</tool_call>' }}{% endfor %}"
    "{% else %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n<think></think>\\n' }}{% endif %}"
)

# Headers; contents are trimmed; a tool answers in the role ipython; tools in the first user message.
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}"
    "{% for m in messages %}{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}"
    "{% if m.tool_calls %}{% if m.tool_calls|length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ m.tool_calls[0].function.arguments|tojson + '}' }}{% else %}"
    "{% if tools and m.role == 'user' and loop.index0 == 0 %}{{ 'Functions:\\n' }}"
    "{% for tool in tools %}{{ tool|tojson + '\\n\\n' }}{% endfor %}{% endif %}"
    "{{ m.content|trim }}{% endif %}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

# Any role by its name, a default system message, no tools.
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\\nBe of help.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Users and models alternate, there is no other role; contents are trimmed; a line end after each turn.
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + m.content|trim }}"
    "{{ '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)

TEMPLATES = {
    "qwen2.5": (QWEN2_5, ("<|im_end|>", "<|endoftext|>")),
    "qwen3": (QWEN3, ("<|im_end|>", "<|endoftext|>")),
    "qwen3.5": (QWEN3_5, ("<|im_end|>", "<|endoftext|>")),
    "glm4.5": (GLM4_5, ("<|observation|>", "<|user|>", "<|endoftext|>")),
    "llama3": (LLAMA3, ("<|eot_id|>", "<|eom_id|>")),
    "smollm2": (SMOLLM2, ("<|im_end|>",)),
    "gemma": (GEMMA, ("<end_of_turn>", "<eos>")),
}
"""By family: the template, and the tokens that end a turn."""

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
)
_OF_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


@functools.cache
def tokenizer(template: str) -> Any:
    """A byte-level BPE with a few merges, over line ends too, and every family's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("Ċ", "Ċ"), ("Ġ", "t"), ("1", "2"), ("e", "r"), ("<", "/")]
    tokens = dict.fromkeys([*alphabet, *(left + right for left, right in merges)])
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>",
        eos_token="<|im_end|>",
        additional_special_tokens=[*SPECIAL, *(_OF_GLM if _OF_GLM[0] in template else ())],
    )
    made.add_tokens(["<tool_call>", "</tool_call>"])
    made.chat_template = template
    return made
