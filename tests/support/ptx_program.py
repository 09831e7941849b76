"""A kernel's PTX as ptx_machine reads it."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    """One line: guard (register, negated), opcode with its suffixes, operands."""

    guard: tuple[str, bool] | None
    opcode: str
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    text: str

    @property
    def is_straight(self) -> bool:
        """Whether all lanes that come to it do it, and go on to the next."""
        return self.guard is None and self.parts[0] not in ("bra", "ret")


class Program:
    """A kernel's instructions, where its labels stand, and its parameters' names."""

    def __init__(self, ptx: str) -> None:
        body = ptx[ptx.index(".visible .entry") :]
        declared = re.findall(r"\.param\s+(?:\.align \d+ )?\.\w(\d+) (\w+)(?:\[(\d+)\])?", body[: body.index("{")])
        self.parameters = [name for _, name, _ in declared]
        self.parameter_bytes = [int(count or 1) * int(bits) // 8 for bits, _, count in declared]
        text = re.sub(r"//[^\n]*", "", body[body.index("{") :])
        text = re.sub(r"\.(reg|pragma)[^;]*;", "", text)
        self.waits_for_grid = "griddepcontrol.wait" in text
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        scope, scopes = "", 0
        # Labels of an inline block are its own: each gets the block's number.
        for token in re.finditer(r"([$\w]+):(?!:)|(@?!?[%\w.:]+[^;{}]*(?:\{[^}]*\}[^;{}]*)*;)|([{}])", text):
            label, line, brace = token.groups()
            if brace == "{":
                scopes += 1
                scope = f"@{scopes}"
            elif brace == "}":
                scope = ""
            elif label:
                self.labels[label + ("" if label.startswith("$") else scope)] = len(self.instructions)
            else:
                self.instructions.append(self._parse(" ".join(line.split()), scope))

    def _parse(self, line: str, scope: str) -> Instruction:
        guard = None
        if line.startswith("@"):
            name, line = line[1:].split(" ", 1)
            guard = (name.removeprefix("!"), name.startswith("!"))
        opcode, _, rest = line.rstrip(";").strip().partition(" ")
        operands = tuple(
            piece.strip()
            for piece in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{}\[\]][^,{}\[\]]*", rest)
            if piece.strip()
        )
        if opcode.startswith("bra"):
            operands = tuple(name if name.startswith("$") else name + scope for name in operands)
        return Instruction(guard, opcode, tuple(opcode.split(".")), operands, line)
