"""A canvas of cells for boxes and arrows: lines that meet join of themselves."""

from itertools import groupby, pairwise

from rich.text import Text

from tokenspeed_tui.render import text as t

NORTH, EAST, SOUTH, WEST = 1, 2, 4, 8
STROKES = " ╵╶╰╷│╭├╴╯─┴╮┤┬┼"
"""The character of a cell by the sides that its strokes reach."""
Point = tuple[int, int]


class Canvas:
    """``width`` × ``height`` cells, (0, 0) at the top left; what falls outside is left out.

    Cells are kept in four lists, row by row: the sides that strokes reach, a letter that hides them, the name of a
    style, and how it ranks where two strokes meet.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        self._sides = [0] * (width * height)
        self._letters = [""] * (width * height)
        self._styles = [""] * (width * height)
        self._ranks = [0] * (width * height)

    def sides(self, x: int, y: int) -> int:
        """The sides that the strokes of a cell reach; 0 outside, and where a letter stands."""
        if not (0 <= x < self.width and 0 <= y < self.height):
            return 0
        index = y * self.width + x
        return 0 if self._letters[index] else self._sides[index]

    def write(self, x: int, y: int, letters: str, style: str) -> None:
        """Writes letters of one cell each over whatever is there."""
        for column, letter in enumerate(letters, start=x):
            if 0 <= column < self.width and 0 <= y < self.height:
                index = y * self.width + column
                self._letters[index], self._styles[index] = letter, style

    def line(self, points: list[Point], style: str, rank: int = 0) -> None:
        """Draws along ``points``, each on one row or column with the one before; the ends reach no further."""
        for (x, y), (to_x, to_y) in pairwise(points):
            step_x, step_y = _sign(to_x - x), _sign(to_y - y)
            ahead, behind = _side(step_x, step_y), _side(-step_x, -step_y)
            self._stroke(x, y, ahead, style, rank)
            for _ in range(abs(to_x - x) + abs(to_y - y) - 1):
                x, y = x + step_x, y + step_y
                self._stroke(x, y, ahead | behind, style, rank)
            self._stroke(to_x, to_y, behind, style, rank)

    def box(self, x: int, y: int, width: int, height: int, style: str) -> None:
        """Draws a frame."""
        right, bottom = x + width - 1, y + height - 1
        self.line([(x, y), (right, y), (right, bottom), (x, bottom), (x, y)], style)

    def lines(self) -> list[Text]:
        """The rows as lines of text."""
        return [self._line(row * self.width) for row in range(self.height)]

    def _stroke(self, x: int, y: int, sides: int, style: str, rank: int) -> None:
        if not (0 <= x < self.width and 0 <= y < self.height):
            return
        index = y * self.width + x
        self._sides[index] |= sides
        if rank >= self._ranks[index]:
            self._styles[index], self._ranks[index] = style, rank

    def _line(self, first: int) -> Text:
        """One row; neighbours of one style are one part."""
        parts: list[tuple[str, str]] = []
        cells = range(first, first + self.width)
        for style, run in groupby(cells, key=self._styles.__getitem__):
            parts.append(("".join(self._letters[cell] or STROKES[self._sides[cell]] for cell in run), style))
        return t.line(*parts)


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)


def _side(step_x: int, step_y: int) -> int:
    if step_x:
        return EAST if step_x > 0 else WEST
    return SOUTH if step_y > 0 else NORTH
