"""Plants the bugs of scheduler/tests/mutations.toml, one at a time, in a copy of the scheduler, and runs its C++ tests.

A test that fails, an assertion that stops it and a hang all count as caught. Prints a line a mutation and the score by
class of bug; fails where one survives that is not said to, does not compile, or no longer applies.
"""

import argparse
import shutil
import subprocess
import sys
import time
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCHEDULER = ROOT / "scheduler"
WORK = ROOT / "build" / "mutants"
# The quick ones first: a bug is credited to the first test that notices it.
TESTS = (
    "kv_cache_lifecycle",
    "transition_table",
    "scheduler_plan",
    "cache_groups",
    "retraction",
    "tiers",
    "peers",
    "explain",
    "picture",
    "images",
    "late_reports",
    "random_rounds",
    "exhaustive",
    "fuzz_events",
)
HANGS_AFTER_SECONDS = 240
DOES_NOT_COMPILE = "does not compile"


@dataclass(frozen=True)
class Mutation:
    name: str
    kind: str
    file: str
    old: str
    new: str
    survives: str


def read_mutations() -> list[Mutation]:
    """Every mutation of the list. Raises SystemExit naming those whose text is not in the source exactly once."""
    document = tomllib.loads((SCHEDULER / "tests" / "mutations.toml").read_text())
    mutations = [
        Mutation(each["name"], each["class"], each["file"], each["old"], each["new"], each.get("survives", ""))
        for each in document["mutation"]
    ]
    wrong = []
    for mutation in mutations:
        times = (SCHEDULER / mutation.file).read_text().count(mutation.old)
        if times != 1:
            wrong.append(f"{mutation.name}: its text is {times} times in scheduler/{mutation.file}, not once")
    names = [mutation.name for mutation in mutations]
    wrong += [f"{name}: the name is used twice" for name in sorted(set(names)) if names.count(name) > 1]
    if wrong:
        raise SystemExit("scheduler/tests/mutations.toml no longer fits the source:\n  " + "\n  ".join(wrong))
    return mutations


class Copy:
    """A copy of the scheduler that is built incrementally."""

    def __init__(self, jobs: int) -> None:
        self.source = WORK / "scheduler"
        self.build = WORK / "build"
        self.jobs = jobs
        shutil.rmtree(self.source, ignore_errors=True)
        for name in ("csrc", "tests", "CMakeLists.txt"):
            origin, target = SCHEDULER / name, self.source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # With fresh times: what an interrupted run built from a planted bug is older than this copy.
            if origin.is_dir():
                shutil.copytree(origin, target, copy_function=shutil.copy)
            else:
                shutil.copy(origin, target)
        configure = ["cmake", "-S", str(self.source), "-B", str(self.build), "-G", "Ninja"]
        subprocess.run([*configure, "-DTOKENSPEED_SCHEDULER_TESTS=ON"], check=True, stdout=subprocess.DEVNULL)

    def verdict(self) -> str:
        """How what is in the copy is caught, or an empty string where every test passes."""
        for test in TESTS:
            target = test if test == "fuzz_events" else f"test_{test}"
            build = ["ninja", "-C", str(self.build), f"-j{self.jobs}", target]
            if subprocess.run(build, capture_output=True, check=False).returncode != 0:
                return DOES_NOT_COMPILE
            command = [str(self.build / "tests" / "cpp" / target)]
            if test == "fuzz_events":
                kept = self.source / "tests" / "fuzz"
                command += [str(kept / "found"), str(kept / "seeds"), "--random", "6000"]
            try:
                done = subprocess.run(command, capture_output=True, check=False, timeout=HANGS_AFTER_SECONDS)
            except subprocess.TimeoutExpired:
                return f"{test} (hangs)"
            if done.returncode != 0:
                return test if done.returncode > 0 else f"{test} (aborts)"
        return ""

    def plant(self, mutation: Mutation) -> str:
        path = self.source / mutation.file
        sound = path.read_text()
        path.write_text(sound.replace(mutation.old, mutation.new))
        try:
            return self.verdict()
        finally:
            path.write_text(sound)


def report(mutations: list[Mutation], verdicts: dict[str, str]) -> None:
    """Prints, by class of bug, how many were caught and by what."""
    by_class: dict[str, list[Mutation]] = defaultdict(list)
    for mutation in mutations:
        by_class[mutation.kind].append(mutation)
    print("\n| class of bug | planted | caught | by |\n|---|---|---|---|")
    for kind, members in by_class.items():
        caught = [verdicts[mutation.name].split(" (")[0] for mutation in members if verdicts[mutation.name]]
        ways = ", ".join(f"{way} {caught.count(way)}" for way in dict.fromkeys(caught))
        print(f"| {kind} | {len(members)} | {len(caught)} | {ways} |")
    print(f"\ncaught {sum(1 for verdict in verdicts.values() if verdict)} of {len(mutations)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only see whether every mutation still applies")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="plant only these")
    parser.add_argument("--jobs", type=int, default=2, help="compilers side by side (2)")
    options = parser.parse_args()
    mutations = read_mutations()
    if options.check:
        print(f"{len(mutations)} mutations apply")
        return
    if options.only:
        unknown = set(options.only) - {mutation.name for mutation in mutations}
        if unknown:
            raise SystemExit(f"no such mutation: {', '.join(sorted(unknown))}")
        mutations = [mutation for mutation in mutations if mutation.name in options.only]
    copy = Copy(options.jobs)
    if verdict := copy.verdict():
        raise SystemExit(f"the sound scheduler fails already: {verdict}")
    verdicts: dict[str, str] = {}
    wrong = []
    for mutation in mutations:
        begun = time.monotonic()
        verdict = verdicts[mutation.name] = copy.plant(mutation)
        print(f"{mutation.name}: {verdict or 'SURVIVES'} ({time.monotonic() - begun:.0f} s)", flush=True)
        if not verdict and not mutation.survives:
            wrong.append(f"{mutation.name} survives")
        if verdict == DOES_NOT_COMPILE:
            wrong.append(f"{mutation.name} does not compile, so no test had to notice it")
        if verdict and mutation.survives:
            wrong.append(f"{mutation.name} is caught, though it is said to survive: {mutation.survives}")
    report(mutations, verdicts)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
