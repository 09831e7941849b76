"""Chooses the few inputs of a fuzzing corpus that cover most, from libFuzzer's merge control file, and copies them.

Usage: choose_seeds.py CONTROL-FILE FOLDER COUNT. Greedy: the next input is the one that adds most features.
"""

import shutil
import sys
from pathlib import Path


def read_control(path: Path) -> dict[Path, set[int]]:
    """The inputs of a merge control file and the features that each of them showed."""
    lines = path.read_text().splitlines()
    files = [Path(line) for line in lines[2 : 2 + int(lines[0])]]
    features: dict[Path, set[int]] = {}
    for line in lines[2 + len(files) :]:
        word, *numbers = line.split()
        if word == "FT":
            features[files[int(numbers[0])]] = {int(number) for number in numbers[1:]}
    return features


def choose(features: dict[Path, set[int]], count: int) -> list[Path]:
    """At most `count` inputs, those that add most first; ties go to the smaller, then to the name."""
    chosen: list[Path] = []
    seen: set[int] = set()
    while len(chosen) < count:
        rest = [path for path in features if path not in chosen and not features[path] <= seen]
        if not rest:
            break
        best = min(rest, key=lambda path: (-len(features[path] - seen), path.stat().st_size, path.name))
        chosen.append(best)
        seen |= features[best]
    return chosen


def main() -> None:
    control, folder, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    chosen = choose(read_control(control), count)
    copies = {path.name: path.read_bytes() for path in chosen}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in copies.items():
        (folder / name[:16]).write_bytes(content)
    print(f"{len(chosen)} seeds, {sum(map(len, copies.values()))} bytes")


if __name__ == "__main__":
    main()
