"""Draws what a command printed in a terminal as SVG, for the pages: once from a recording, or from a plain text.

script -qec "stty cols 100; proximo pipeline demo" recording
python docs/theme/terminal.py recording docs/pictures/progress.svg --at "step 14/21"
python docs/theme/terminal.py recording docs/pictures/end.svg
"""

import argparse
import io
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

REDRAWN = "\x1b[2K"
"""A progress display clears its lines before it draws them anew."""
COLUMNS = 100
DRAWING = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="Output of a terminal">
<style>{styles} .{unique_id}-matrix {{ font: {char_height}px Menlo, Consolas, "DejaVu Sans Mono", monospace;
line-height: {line_height}px; }}
.{unique_id}-title {{ font: 18px sans-serif; fill: #c5c8c6; }}</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""As rich draws it, without its fonts from elsewhere."""


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("recording", type=Path, help="What `script` wrote, or plain text")
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--at", help="Text of the progress display to draw; default: what was printed at its end")
    arguments.add_argument("--title", default="")
    given = arguments.parse_args()
    recorded = given.recording.read_text(encoding="utf-8").replace("\r\n", "\n")
    recorded = re.sub(r"\A\x1b?Script started[^\n]*\n|\n*Script done.*\Z", "", recorded, flags=re.DOTALL)
    text = ending(recorded) if given.at is None else display(recorded, given.at)
    given.out.write_text(drawn(text, title=given.title), encoding="utf-8")


def ending(recorded: str) -> str:
    """What stands after the last progress display."""
    return recorded.rpartition("\x1b[?25h")[2].strip("\n")


def display(recorded: str, marker: str) -> str:
    """The last drawing of the progress display that has the marker."""
    drawings = [part for part in recorded.split(REDRAWN) if marker in part]
    return drawings[-1].replace("\x1b[1A", "").strip("\n")


def drawn(text: str, *, title: str) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), legacy_windows=False)
    for line in text.split("\n"):
        console.print(Text.from_ansi(line))
    # A fixed id, so that the same text gives the same file.
    return console.export_svg(title=title, theme=MONOKAI, code_format=DRAWING, unique_id="terminal")


if __name__ == "__main__":
    main()
