"""Responses as a program or a notebook gets them: a list, scored or not."""

from proximo.metrics.notebook.html import table_html
from proximo.metrics.report.cells import samples_table
from proximo.records import Response, Scored


class Responses(list[Response]):
    """The responses of one call, grouped by prompt. A notebook shows them as a table."""

    def _repr_html_(self) -> str:
        return table_html(samples_table([_row(response) for response in self]))


class Ranked(list[Scored]):
    """Scored responses, the best first for each prompt. A notebook shows them as a table."""

    def _repr_html_(self) -> str:
        rows = [_row(each.response) | {"score": each.score if each.valid else None} for each in self]
        return table_html(samples_table(rows))


def _row(response: Response) -> dict[str, str | int | float | None]:
    asked = response.prompt
    messages = "\n".join(str(message.get("content")) for message in asked.messages or ())
    return {
        "prompt": messages or asked.text or f"{len(asked.token_ids)} tokens",
        "response": response.text,
        "num_tokens": len(response.token_ids),
        "finish": response.finish.value,
    }
