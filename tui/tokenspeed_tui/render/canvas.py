"""A canvas of cells for boxes and arrows: lines that meet join of themselves."""

from itertools import pairwise
from typing import NamedTuple

from rich.text import Text

from tokenspeed_tui.render import text as t

NORTH, EAST, SOUTH, WEST = 1, 2, 4, 8
STROKES = " ╵╶╰╷│╭├╴╯─┴╮┤┬┼"
"""The character of a cell by the sides that its strokes reach."""
Point = tuple[int, int]


class Cell(NamedTuple):
    """One cell: the sides its strokes reach, a letter that hides them, a style, and how it ranks where two meet."""

    sides: int = 0
    letter: str = ""
    style: str = ""
    rank: int = 0


class Canvas:
    """``width`` × ``height`` cells, (0, 0) at the top left; what falls outside is left out."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        self._rows = [[Cell()] * width for _ in range(height)]

    def sides(self, x: int, y: int) -> int:
        """The sides that the strokes of a cell reach; 0 outside, and where a letter stands."""
        if not (0 <= x < self.width and 0 <= y < self.height) or self._rows[y][x].letter:
            return 0
        return self._rows[y][x].sides

    def write(self, x: int, y: int, letters: str, style: str, rank: int = 9) -> None:
        """Writes letters of one cell each over whatever is there."""
        for offset, letter in enumerate(letters):
            self._put(x + offset, y, Cell(letter=letter, style=style, rank=rank))

    def line(self, points: list[Point], style: str, rank: int = 0) -> None:
        """Draws along ``points``, each on one row or column with the one before; the ends reach no further."""
        for (x, y), (to_x, to_y) in pairwise(points):
            step_x, step_y = _sign(to_x - x), _sign(to_y - y)
            ahead, behind = _side(step_x, step_y), _side(-step_x, -step_y)
            while (x, y) != (to_x, to_y):
                self._add(x, y, ahead, style, rank)
                x, y = x + step_x, y + step_y
                self._add(x, y, behind, style, rank)

    def box(self, x: int, y: int, width: int, height: int, style: str) -> None:
        """Draws a frame."""
        right, bottom = x + width - 1, y + height - 1
        self.line([(x, y), (right, y), (right, bottom), (x, bottom), (x, y)], style)

    def lines(self) -> list[Text]:
        """The rows as lines of text."""
        return [_line(row) for row in self._rows]

    def _add(self, x: int, y: int, side: int, style: str, rank: int) -> None:
        if 0 <= x < self.width and 0 <= y < self.height:
            cell = self._rows[y][x]
            stronger = rank >= cell.rank
            self._rows[y][x] = Cell(
                cell.sides | side,
                cell.letter,
                style if stronger and not cell.letter else cell.style,
                max(rank, cell.rank),
            )

    def _put(self, x: int, y: int, cell: Cell) -> None:
        if 0 <= x < self.width and 0 <= y < self.height:
            self._rows[y][x] = cell._replace(sides=self._rows[y][x].sides)


def _line(row: list[Cell]) -> Text:
    """One row; neighbours of one style are one part."""
    parts: list[tuple[str, str]] = []
    for cell in row:
        letter = cell.letter or STROKES[cell.sides]
        if parts and parts[-1][1] == cell.style:
            parts[-1] = (parts[-1][0] + letter, cell.style)
        else:
            parts.append((letter, cell.style))
    return t.line(*parts)


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)


def _side(step_x: int, step_y: int) -> int:
    if step_x:
        return EAST if step_x > 0 else WEST
    return SOUTH if step_y > 0 else NORTH
