"""Draws the pictures of the documentation, by ``python docs/images/draw.py``.

Each picture is a function that places boxes, circles, arrows and texts. Colours follow the reader's
light or dark setting, background included, so that a picture is legible on any page.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent

STYLE = """
  .paper { fill: #ffffff; stroke: #cbd2d9; }
  .rule { stroke: #e4e7eb; }
  .full { fill: #dbeafe; stroke: #1d4ed8; }
  .part { fill: #fef3c7; stroke: #b45309; }
  .gone { fill: none; stroke: #9aa5b1; stroke-dasharray: 4 3; }
  .plain { fill: #f5f7fa; stroke: #7b8794; }
  .good { fill: #dcfce7; stroke: #15803d; }
  .bad { fill: #fee2e2; stroke: #b91c1c; }
  .line { stroke: #52606d; fill: none; }
  .tip { fill: #52606d; }
  text { fill: #1f2933; }
  .soft { fill: #52606d; }
  .warm { fill: #b45309; }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #1b1f27; stroke: #3e4c59; }
    .rule { stroke: #323f4b; }
    .full { fill: #1e3a5f; stroke: #7cb0ff; }
    .part { fill: #4a3410; stroke: #f0b429; }
    .gone { stroke: #7b8794; }
    .plain { fill: #2b3440; stroke: #9aa5b1; }
    .good { fill: #14402a; stroke: #57d38c; }
    .bad { fill: #4c1d1d; stroke: #f29b9b; }
    .line { stroke: #b8c2cc; }
    .tip { fill: #b8c2cc; }
    text { fill: #f0f4f8; }
    .soft { fill: #b8c2cc; }
    .warm { fill: #f0b429; }
  }"""


class Picture:
    """A picture that grows by what is put on it."""

    def __init__(self, title: str, height: int) -> None:
        self._title, self._height = title, height
        self._parts: list[str] = []

    def box(self, x: int, y: int, wide: int, high: int, kind: str, *lines: str) -> None:
        """A box with lines of text in its middle."""
        self._parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{wide}" height="{high}" rx="5"/>'
        )
        first = y + high / 2 + 5 - 8.5 * (len(lines) - 1)
        for n, line in enumerate(lines):
            self.text(
                x + wide / 2, first + 17 * n, line, anchor="middle", size=13 if n == 0 else 12
            )

    def circle(self, x: int, y: int, kind: str, text: str) -> None:
        """A state, by its number."""
        self._parts.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="24"/>')
        self.text(x, y + 5, text, anchor="middle", size=13)

    def text(
        self, x: float, y: float, text: str, kind: str = "", anchor: str = "start", size: int = 12
    ) -> None:
        """One line of text."""
        bold = ' font-weight="bold"' if kind == "bold" else ""
        self._parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}" '
            f'font-size="{size}"{bold}>{escape(text)}</text>'
        )

    def row(self, y: int, name: str, told: str) -> None:
        """The name of a row, and a word about it."""
        self.text(24, y, name, "bold", size=14)
        self.text(24, y + 19, told, "soft")

    def arrow(self, x: int, y: int, to_x: int, to_y: int, dashed: bool = False) -> None:
        """An arrow."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<line class="line" x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke-width="1.5"'
            f'{dash} marker-end="url(#tip)"/>'
        )

    def rule(self, y: int) -> None:
        """A line from side to side."""
        self._parts.append(f'<line class="rule" x1="20" y1="{y}" x2="880" y2="{y}"/>')

    def svg(self) -> str:
        """The file."""
        high = self._height
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {high}" width="900"'
                f' height="{high}" role="img" font-family="DejaVu Sans, Verdana, Arial, sans-serif"'
                ' stroke-width="1.5">',
                "<!-- drawn by docs/images/draw.py -->",
                f"<title>{escape(self._title)}</title>",
                f"<style>{STYLE}\n</style>",
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
                ' markerHeight="7" orient="auto"><path class="tip" d="M0 0 L8 4 L0 8 z"/>'
                "</marker></defs>",
                f'<rect class="paper" x="0.5" y="0.5" width="899" height="{high - 1}" rx="10"/>',
                *self._parts,
                "</svg>",
                "",
            ]
        )


def lineage() -> Picture:
    """Training, what a save writes, and a restore."""
    draw = Picture(
        "Training computes states; a save writes a base or a delta; a restore replays", 410
    )
    places = {0: 190, 1: 340, 2: 490, 3: 640, 21: 826}
    draw.row(58, "Training", "in memory")
    for step, x in places.items():
        draw.circle(x, 62, "full", str(step))
    for x, to in ((190, 340), (340, 490), (490, 640), (690, 826)):
        draw.arrow(x + 26, 62, to - 27, 62)
        draw.text((x + to) / 2, 52, "gradient", "warm", "middle")
        draw.text((x + to) / 2, 80, "update", "soft", "middle")
    draw.text(690, 67, "· · ·", "soft", "middle")
    draw.rule(124)
    draw.row(182, "On disk", "every step saved")
    for step, x in places.items():
        is_base = step in (0, 21)
        draw.arrow(x, 88, x, 143 if is_base else 171, dashed=True)
        if is_base:
            draw.box(x - 44, 144, 88, 86, "full", "base", "full state")
        else:
            draw.box(x - 40, 172, 80, 40, "part", "delta", "gradient")
    draw.rule(270)
    draw.row(322, "Restore", "of step 3")
    draw.box(146, 290, 88, 76, "full", "base", "is read")
    for x, step in ((340, 1), (490, 2), (640, 3)):
        draw.circle(x, 326, "full", str(step))
    for x, to in ((208, 340), (340, 490), (490, 640)):
        draw.arrow(x + 26, 326, to - 27, 326)
        draw.text((x + to) / 2, 316, "delta", "warm", "middle")
        draw.text((x + to) / 2, 344, "update", "soft", "middle")
    draw.arrow(666, 326, 717, 326)
    draw.box(718, 296, 152, 60, "good", "fingerprints", "compared, leaf by leaf")
    draw.text(450, 392, "A bit that differs is an error, never a wrong model.", "soft", "middle")
    return draw


def written() -> Picture:
    """What of a state is written by a base, and by a delta."""
    draw = Picture("Of 14 bytes a param a base writes all, a delta the gradient alone", 330)
    draw.row(50, "The state", "bytes a param, in")
    draw.text(24, 86, "mixed precision", "soft")
    left, scale = 190, 46
    parts = ((2, "params", "bfloat16: 2"), (4, "master weights", "float32: 4"))
    parts += ((8, "Adam's two moments", "float32: 8"),)
    x = left
    for size, name, told in parts:
        draw.box(x, 34, size * scale, 56, "full", name, told)
        x += size * scale
    draw.rule(112)
    draw.row(150, "A base", "all of it, once")
    draw.box(
        left, 134, 14 * scale, 44, "full", "14 bytes, each box by one of the devices that hold it"
    )
    draw.row(216, "A delta", "what the update took")
    draw.box(left, 200, 2 * scale, 44, "part", "gradient: 2")
    draw.box(
        left + 2 * scale, 200, 12 * scale, 44, "gone", "computed again by the update: not written"
    )
    draw.rule(262)
    draw.text(24, 292, "Not written twice:", "bold")
    draw.text(
        190, 292, "replicas · leaves with equal content · what did not change · zeros", "soft"
    )
    draw.text(
        190,
        312,
        "Always written: what no update computes, such as counters and batch statistics",
        "soft",
    )
    return draw


def checks() -> Picture:
    """The check when a delta is saved, and the comparison when it is restored."""
    draw = Picture(
        "A delta is replayed and compared when it is saved, and again when it is restored", 340
    )
    draw.row(62, "At a save", "before the commit")
    draw.box(190, 40, 120, 48, "full", "state", "on the devices")
    draw.box(380, 40, 150, 48, "plain", "fingerprints", "of every leaf")
    draw.box(190, 112, 120, 48, "full", "the shadow", "a copy on the host")
    draw.box(380, 112, 150, 48, "plain", "replayed", "with the gradient")
    draw.arrow(310, 64, 378, 64)
    draw.arrow(310, 136, 378, 136)
    draw.arrow(530, 64, 598, 92)
    draw.arrow(530, 136, 598, 106)
    draw.box(600, 76, 84, 48, "plain", "equal?")
    draw.arrow(684, 88, 738, 62)
    draw.arrow(684, 112, 738, 138)
    draw.box(740, 40, 134, 46, "good", "yes: committed")
    draw.box(740, 114, 134, 46, "part", "no: these leaves", "are stored whole")
    draw.rule(190)
    draw.row(240, "At a restore", "always")
    draw.box(190, 218, 120, 48, "full", "base and deltas", "from the disk")
    draw.box(380, 218, 150, 48, "plain", "replayed", "on your mesh")
    draw.box(600, 218, 84, 48, "plain", "equal?")
    draw.arrow(310, 242, 378, 242)
    draw.arrow(530, 242, 598, 242)
    draw.arrow(684, 232, 738, 224)
    draw.arrow(684, 254, 738, 276)
    draw.box(740, 204, 134, 40, "good", "yes: your state")
    draw.box(740, 258, 134, 46, "bad", "no: an error that", "names the leaf")
    draw.text(
        380,
        312,
        "The fingerprint does not depend on the mesh: the same leaf has the same one on any.",
        "soft",
        "middle",
    )
    return draw


def deferred() -> Picture:
    """Steps that are kept in memory, and the save that writes them."""
    draw = Picture(
        "Deferred steps are kept in memory; the next save writes all of them as one delta", 250
    )
    draw.row(62, "In memory", "record_step")
    for n, x in enumerate((200, 290, 380, 470)):
        draw.circle(x, 60, "part", str(21 + n))
    draw.circle(590, 60, "full", "25")
    draw.text(590, 104, "save", "soft", "middle")
    for x in (200, 290, 380):
        draw.arrow(x + 26, 60, x + 64, 60)
    draw.arrow(496, 60, 564, 60)
    draw.rule(124)
    draw.row(172, "On disk", "one save")
    draw.box(180, 150, 470, 50, "part", "step 25: a delta that holds 21, 22, 23, 24 and 25")
    draw.arrow(590, 110, 590, 148, dashed=True)
    draw.text(676, 168, "Each has its own number,", "soft")
    draw.text(676, 185, "check and fingerprints.", "soft")
    draw.text(
        450,
        230,
        "If the process ends before step 25 is saved, 21 to 24 are lost; 20 is saved.",
        "soft",
        "middle",
    )
    return draw


def retention() -> Picture:
    """Hard links, by which each step's directory is complete in itself."""
    draw = Picture("Each step's directory holds hard links to what it builds on", 300)
    draw.row(50, "Directories", "of three steps")
    rows = (
        ("10", ("base",)),
        ("11", ("base", "delta 11")),
        ("12", ("base", "delta 11", "delta 12")),
    )
    for n, (step, files) in enumerate(rows):
        x = 180 + 236 * n
        is_gone = step != "12"
        draw.box(x, 34, 212, 150, "gone" if is_gone else "plain")
        draw.text(x + 12, 56, f"step {step}" + (": deleted" if is_gone else ": kept"), "bold")
        for k, file in enumerate(files):
            kind = "gone" if is_gone else ("full" if file == "base" else "part")
            own = k == len(files) - 1
            draw.box(
                x + 12, 68 + 37 * k, 188, 31, kind, f"{file}: {'its own' if own else 'a hard link'}"
            )
    draw.rule(206)
    draw.text(
        450,
        236,
        "The files are on the disk once. Deleting 10 and 11 removes names: 12 stays whole.",
        "soft",
        "middle",
    )
    draw.text(
        450,
        256,
        "So steps 10 and 11 can still be had, from the directory of step 12.",
        "soft",
        "middle",
    )
    draw.text(
        450,
        276,
        "Without hard links (buckets): references to other steps, which KeepLineage keeps.",
        "soft",
        "middle",
    )
    return draw


def house(arrows: list[tuple[str, str]]) -> Picture:
    """Rooms of the code, each above those that it imports; for the site, from BUILD.md."""
    above: dict[str, set[str]] = {}
    for upper, lower in arrows:
        above.setdefault(lower, set()).add(upper)
        above.setdefault(upper, set())

    def floor(room: str) -> int:
        return max((1 + floor(each) for each in above[room]), default=0)

    floors: dict[int, list[str]] = {}
    for room in sorted(above):
        floors.setdefault(floor(room), []).append(room)
    draw = Picture("Rooms, each above those that it imports", 70 * len(floors) + 30)
    places = {
        room: (450 * (2 * n + 1) // len(rooms) + (55, -50, 5)[level % 3], 70 * level + 50)
        for level, rooms in floors.items()
        for n, room in enumerate(rooms)
    }
    for upper, lower in arrows:
        (x, y), (to_x, to_y) = places[upper], places[lower]
        draw.arrow(x, y + 15, to_x, to_y - 16)
    for room, (x, y) in places.items():
        draw.box(x - 52, y - 15, 104, 30, "full", room)
    return draw


PICTURES: tuple[Callable[[], Picture], ...] = (lineage, written, checks, deferred, retention)


if __name__ == "__main__":
    for picture in PICTURES:
        (HERE / f"{picture.__name__}.svg").write_text(picture().svg())
