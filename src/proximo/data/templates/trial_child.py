"""Renders a question with one chat template, within limits: `limits.py` starts it as a program.

It imports jinja2 alone, which takes a tenth of the time of transformers. Its answer is its exit status: 0 if the
rendering ended, with a text or with an error; 3 if the memory was not enough. Beyond the time the kernel ends it.
"""

import json
import re
import resource
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

NO_MEMORY = 3
MARKS = (("generation", "if true"), ("endgeneration", "endif"))
"""The marks of transformers around the assistant's text, and statements that leave the text as it is."""


def main(cpu_seconds: int, memory_bytes: int) -> int:
    """Render the question of standard input."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # some systems have no limit of the address space
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    template, tokens = json.load(sys.stdin)
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value)
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    for mark, neutral in MARKS:
        template = re.sub(rf"{{%([-+]?)\s*{mark}\s*([-+]?)%}}", rf"{{%\1 {neutral} \2%}}", template)
    asked = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": True}
    try:
        environment.from_string(template).render(tools=None, documents=None, **tokens, **asked)
    except MemoryError:
        return NO_MEMORY
    except Exception:  # any error of a template is an end
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
