#!/usr/bin/env python3
"""Draws the pictures of this folder: each NAME.txt becomes NAME.svg. Standard library only; the same text gives the same bytes.

    docs/images/draw.py             writes every picture
    docs/images/draw.py --check     writes nothing; exits with 1 if a picture differs from its source

A source has one statement on each line; `#` begins a comment. Sizes are in pixels.

    size WIDTH HEIGHT                              first; a sequence computes its height
    group X Y WIDTH HEIGHT | title                 a dashed frame
    box NAME X Y WIDTH HEIGHT COLOUR | title | line ...
    arrow FROM TO [via X,Y | bend X,Y ...] [kv|dashed|both]
                                                   FROM and TO: X,Y or NAME.left|right|top|bottom, then +N or -N along
                                                   the side; `via` curves towards a point, `bend` turns a corner there
    text X Y start|middle|end | words              words in *asterisks* are bold
    life NAME X COLOUR | title | line              a lifeline of a sequence
    message FROM TO [kv|dashed] | words | note     one row of a sequence
    state NAME | words                             a box on one lifeline
    gap HEIGHT                                     empty space in a sequence
"""

import math
import re
import sys
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
COLOURS = {  # name: (fill, edge)
    "grey": ("#ffffff", "#475569"),
    "amber": ("#fef3c7", "#b45309"),
    "cyan": ("#cffafe", "#0e7490"),
    "purple": ("#f3e8ff", "#7e22ce"),
    "green": ("#dcfce7", "#15803d"),
}
INK, QUIET, LINE, KV = "#0f172a", "#475569", "#334155", "#b45309"
# The background is part of the picture, so it reads the same on a light and on a dark page.
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" \
font-family="ui-sans-serif, system-ui, 'DejaVu Sans', sans-serif" font-size="12.5">
  <rect width="{width}" height="{height}" fill="#f8fafc" rx="14"/>
"""
ROW = 34


def words(x, y, anchor, text, colour=INK, size=None, bold=False):
    spans = []
    for idx, part in enumerate(text.split("*")):
        if part:
            spans.append(f'<tspan font-weight="700">{escape(part)}</tspan>' if idx % 2 else escape(part))
    style = (f' font-size="{size}"' if size else "") + (' font-weight="700"' if bold else "")
    return f'  <text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}"{style}>{"".join(spans)}</text>\n'


class Picture:
    def __init__(self):
        self.width = self.height = 0
        self.boxes, self.lives = {}, {}
        self.under, self.body = "", ""
        self.y = 0.0

    def box(self, name, x, y, width, height, colour, title, *lines):
        self.boxes[name] = (x, y, width, height)
        fill, edge = COLOURS[colour]
        self.body += f'  <rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="9" fill="{fill}" stroke="{edge}" stroke-width="1.5"/>\n'
        first = y + height / 2 + 5 - 8.5 * len(lines)
        self.body += words(x + width / 2, first, "middle", title, size=14.5, bold=True)
        for idx, line in enumerate(lines):
            self.body += words(x + width / 2, first + 18 + 17 * idx, "middle", line, QUIET)

    def point(self, place):
        at = re.fullmatch(r"(-?[\d.]+),(-?[\d.]+)", place)
        if at:
            return float(at[1]), float(at[2])
        name, side, shift = re.fullmatch(r"([\w-]+)\.(\w+)([+-][\d.]+)?", place).groups()
        x, y, width, height = self.boxes[name]
        shift = float(shift or 0)
        return {
            "left": (x, y + height / 2 + shift),
            "right": (x + width, y + height / 2 + shift),
            "top": (x + width / 2 + shift, y),
            "bottom": (x + width / 2 + shift, y + height),
        }[side]

    def head(self, tip, before, kv):
        """The head of an arrow as a shape of its own: renderers disagree about markers on curves. Returns where the line ends."""
        length, half = (18, 9) if kv else (9, 4.5)
        (x, y), (bx, by) = tip, before
        distance = math.hypot(x - bx, y - by)
        dx, dy = (x - bx) / distance, (y - by) / distance
        x0, y0 = x - dx * length, y - dy * length
        corners = [(x, y), (x0 - dy * half, y0 + dx * half), (x0 + dy * half, y0 - dx * half)]
        shape = " ".join(f"{cx:.1f},{cy:.1f}" for cx, cy in corners)
        self.body += f'  <polygon points="{shape}" fill="{KV if kv else LINE}"/>\n'
        return x0, y0

    def arrow(self, start, end, via=None, bends=(), kinds=()):
        kv = "kv" in kinds
        corners = [via] if via else list(bends)
        end = self.head(end, corners[-1] if corners else start, kv)
        if "both" in kinds:
            start = self.head(start, corners[0] if corners else end, kv)
        path = f"M{start[0]:.1f} {start[1]:.1f}"
        path += "".join(f"{'Q' if via else 'L'}{x:.1f} {y:.1f} " for x, y in corners)
        path += f"{'' if via else 'L'}{end[0]:.1f} {end[1]:.1f}"
        style = f'stroke="{KV}" stroke-width="5"' if kv else f'stroke="{LINE}" stroke-width="1.5"'
        style += ' stroke-dasharray="5 4"' if "dashed" in kinds else ""
        self.body += f'  <path d="{path}" fill="none" {style}/>\n'

    def statement(self, line):
        head, *texts = [part.strip() for part in line.split("|")]
        verb, *args = head.split()
        if verb == "size":
            self.width, self.height = map(int, args)
        elif verb == "group":
            x, y, width, height = map(float, args)
            self.body += f'  <rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="12" fill="#eef2f7" stroke="#94a3b8" stroke-dasharray="5 4"/>\n'
            self.body += words(x + 12, y + 18, "start", texts[0], QUIET)
        elif verb == "box":
            self.box(args[0], *map(float, args[1:5]), args[5], *texts)
        elif verb == "arrow":
            via = self.point(args[args.index("via") + 1]) if "via" in args else None
            bends = [self.point(place) for word, place in zip(args, args[1:]) if word == "bend"]
            self.arrow(self.point(args[0]), self.point(args[1]), via, bends, args[2:])
        elif verb == "text":
            self.body += words(float(args[0]), float(args[1]), args[2], texts[0])
        elif verb == "life":
            name, x, colour = args[0], float(args[1]), args[2]
            self.lives[name] = x
            self.box(name, x - 85, 18, 170, 50, colour, *texts)
            self.y = 74.0
        elif verb == "message":
            x1, x2 = self.lives[args[0]], self.lives[args[1]]
            self.y += ROW
            inset = 3 if x2 > x1 else -3
            self.arrow((x1 + inset, self.y), (x2 - inset, self.y), kinds=args[2:])
            self.body += words((x1 + x2) / 2, self.y - (9 if "kv" in args else 6), "middle", texts[0])
            if len(texts) > 1:
                self.y += 15
                self.body += words((x1 + x2) / 2, self.y, "middle", texts[1], QUIET, 11.5)
        elif verb == "state":
            x = self.lives[args[0]]
            self.y += ROW
            width = 7.2 * len(texts[0]) + 20
            self.body += f'  <rect x="{x - width / 2:g}" y="{self.y - 15:g}" width="{width:g}" height="24" rx="6" fill="#ffffff" stroke="#94a3b8"/>\n'
            self.body += words(x, self.y + 1.5, "middle", texts[0])
        elif verb == "gap":
            self.y += float(args[0])
        else:
            raise ValueError(f"unknown statement: {line}")

    def svg(self):
        if self.lives:
            self.height = int(self.y + 24)
            for x in self.lives.values():
                self.under += f'  <path d="M{x:g} 68V{self.height - 12}" stroke="#94a3b8" stroke-width="1.5"/>\n'
        return HEAD.format(width=self.width, height=self.height) + self.under + self.body + "</svg>\n"


def draw(source):
    picture = Picture()
    for number, line in enumerate(source.read_text().splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                picture.statement(line)
            except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
                raise SystemExit(f"{source.name}:{number}: {line}: {error}")
    return picture.svg()


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        raise SystemExit(__doc__)
    stale = []
    for source in sorted(FOLDER.glob("*.txt")):
        target, svg = source.with_suffix(".svg"), draw(source)
        if not target.exists() or target.read_text() != svg:
            stale.append(target.name)
            if not check:
                target.write_text(svg)
    if check and stale:
        raise SystemExit(f"differs from its source: {', '.join(stale)}; run docs/images/draw.py")


if __name__ == "__main__":
    main()
