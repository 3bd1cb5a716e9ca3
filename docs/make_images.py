"""Makes the pictures of the README from a real run.

    make images

runs `make demo` on a terminal of its own, reads what it prints as a terminal would, and draws the last screen
as `docs/images/demo.png`.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

from matplotlib.font_manager import FontProperties, findfont
from PIL import Image, ImageDraw, ImageFont

IMAGES = Path(__file__).parent / "images"

COLUMNS, LINES = 90, 60
FONT_PIXELS = 18
MARGIN = 24

_BACKGROUND, _FOREGROUND, _DIM = "#16181d", "#d8dee9", "#7b8494"
#: The colours that the program uses, by the number of their escape code.
_COLOURS = {31: "#e06c75", 32: "#98c379", 33: "#e5c07b", 34: "#61afef", 35: "#c678dd", 36: "#56b6c2"}

_TOKEN = re.compile(r"\x1b\[(?P<arguments>[0-9;?]*)(?P<command>[A-Za-z])|(?P<control>[\r\n])|(?P<text>[^\x1b\r\n]+)")


@dataclass(frozen=True)
class Style:
    """How a character looks."""

    bold: bool = False
    dim: bool = False
    colour: str | None = None

    def after(self, code: int) -> Style:
        """The style after one code of an escape sequence."""
        if code == 0:
            return Style()
        return Style(
            bold=self.bold or code == 1,
            dim=self.dim or code == 2,
            colour=_COLOURS.get(code, self.colour),
        )


class Screen:
    """What a terminal shows after some output: text, colours, and a cursor that moves up and erases."""

    def __init__(self) -> None:
        self.lines: list[list[tuple[str, Style]]] = [[]]
        self._row = self._column = 0
        self._style = Style()

    def feed(self, output: str) -> None:
        """Take output, escape sequences included."""
        for token in _TOKEN.finditer(output):
            if token["text"]:
                for character in token["text"]:
                    self._put(character)
            elif token["control"] == "\n":
                self._row += 1
                self._reach()
            elif token["control"] == "\r":
                self._column = 0
            else:
                self._obey(token["command"], token["arguments"])

    def _put(self, character: str) -> None:
        if self._column == COLUMNS:
            self._row, self._column = self._row + 1, 0
            self._reach()
        line = self.lines[self._row]
        line.extend([(" ", Style())] * (self._column + 1 - len(line)))
        line[self._column] = (character, self._style)
        self._column += 1

    def _obey(self, command: str, arguments: str) -> None:
        numbers = [int(part) for part in arguments.split(";") if part.isdigit()]
        if command == "m":
            for code in numbers or [0]:
                self._style = self._style.after(code)
        elif command == "A":
            self._row = max(0, self._row - (numbers or [1])[0])
        elif command == "K":
            keep = 0 if numbers == [2] else self._column
            del self.lines[self._row][keep:]

    def _reach(self) -> None:
        while len(self.lines) <= self._row:
            self.lines.append([])


def run_on_terminal(command: list[str]) -> str:
    """Run a command on a terminal of its own, and pass on and return what it prints.

    Raises:
        SystemExit: The command failed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        output += part
        os.write(sys.stdout.fileno(), part)
    if process.wait() != 0:
        raise SystemExit(f"{shlex.join(command)} ended with {process.returncode}; no picture was made")
    return output.decode("utf-8", errors="replace")


def draw(screen: Screen, path: Path) -> None:
    """Draw a screen in a grid of equal cells, as a terminal does."""
    fonts = {
        bold: ImageFont.truetype(
            findfont(FontProperties(family="DejaVu Sans Mono", weight="bold" if bold else "normal")), FONT_PIXELS
        )
        for bold in (False, True)
    }
    wide, high = round(fonts[False].getlength("M")), round(FONT_PIXELS * 1.4)
    lines = screen.lines
    while lines and not any(character.strip() for character, _ in lines[-1]):
        lines = lines[:-1]
    size = (2 * MARGIN + wide * max(map(len, lines)), 2 * MARGIN + high * len(lines))
    picture = Image.new("RGB", size, _BACKGROUND)
    pen = ImageDraw.Draw(picture)
    for row, line in enumerate(lines):
        for column, (character, style) in enumerate(line):
            colour = _DIM if style.dim else style.colour or _FOREGROUND
            place = (MARGIN + column * wide, MARGIN + row * high)
            pen.text(place, character, font=fonts[style.bold], fill=colour)
    picture.quantize(32).save(path, optimize=True)


def main() -> None:
    """Run and draw."""
    parser = argparse.ArgumentParser(description="Draw docs/images from a run.")
    parser.add_argument("title", help="what the picture shows as typed")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    output = run_on_terminal(options.command)
    screen = Screen()
    screen.feed(f"\x1b[1;32m$\x1b[0m {options.title}\r\n{output}")
    IMAGES.mkdir(exist_ok=True)
    draw(screen, IMAGES / "demo.png")


if __name__ == "__main__":
    main()
