"""Lists of responses, scored or not, for programs and notebooks."""

from collections.abc import Mapping
from typing import Any

from proximo.metrics.report.tables import ShownRows
from proximo.records import Response, Scored


class Responses(ShownRows[Response]):
    """The responses of one call, grouped by prompt. A notebook shows them as a table."""

    def _fields(self, row: Response) -> Mapping[str, Any]:
        return _fields_of(row)


class Ranked(ShownRows[Scored]):
    """Scored responses, the best first for each prompt. A notebook shows them as a table."""

    def _fields(self, row: Scored) -> Mapping[str, Any]:
        return {**_fields_of(row.response), "score": row.score if row.valid else None}


def _fields_of(response: Response) -> dict[str, Any]:
    asked = response.prompt
    messages = "\n".join(str(message.get("content")) for message in asked.messages or ())
    return {
        "prompt": messages or asked.text or f"{len(asked.token_ids)} tokens",
        "response": response.text,
        "num_tokens": len(response.token_ids),
        "finish": response.finish.value,
    }
