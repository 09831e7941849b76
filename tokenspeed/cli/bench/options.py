"""What ``bench serve`` was asked for: refused where it does not go together, and turned into workload and loads."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from tokenspeed.cli.bench.endpoint import DEFAULT_TIMEOUT_S, Api
from tokenspeed.cli.bench.load import Arrivals, Load
from tokenspeed.cli.bench.mixture import MixtureWorkload
from tokenspeed.cli.bench.prompts import Lengths
from tokenspeed.cli.bench.workloads import (
    FileWorkload,
    RandomWorkload,
    SessionsWorkload,
    SharedPrefixWorkload,
    Workload,
)
from tokenspeed.cli.records import ServerError

WorkloadName = Literal["random", "shared-prefix", "sessions", "mixture", "file"]
AnyWorkload: TypeAlias = Workload | MixtureWorkload

_BELONGS: dict[str, tuple[WorkloadName, ...]] = {
    "input_len": ("random", "shared-prefix", "sessions", "mixture"),
    "prefix_len": ("shared-prefix", "sessions"),
    "groups": ("shared-prefix",),
    "sessions": ("sessions",),
    "turns": ("sessions",),
    "decoders": ("mixture",),
    "prompt_len": ("mixture",),
    "prompts": ("mixture",),
    "file": ("file",),
    "concurrency": ("random", "shared-prefix", "sessions", "file"),
    "rate": ("random", "shared-prefix", "sessions", "file"),
    "duration": ("random", "shared-prefix", "sessions", "file"),
    "goodput": ("random", "shared-prefix", "sessions", "file"),
    "requests": ("random", "shared-prefix", "file"),
}
"""Which workloads an option means something to; an option that means nothing is refused."""

_DEFAULT_PROMPT_LEN = 32768
_OPEN_SECONDS = 30
_FEWEST_REQUESTS = 16


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of the command; None: not given."""

    url: str | None = None
    model: str | None = None
    port: int | None = None
    key_file: str | None = None
    workload: WorkloadName = "random"
    api: Api | None = None
    input_len: str | None = None
    output_len: str | None = None
    prefix_len: int | None = None
    groups: int | None = None
    sessions: int | None = None
    turns: int | None = None
    decoders: int | None = None
    prompt_len: int | None = None
    prompts: int | None = None
    file: Path | None = None
    concurrency: str | None = None
    rate: str | None = None
    arrivals: Arrivals | None = None
    burst: int | None = None
    requests: int | None = None
    duration: float | None = None
    warmup: int = 2
    timeout: float = DEFAULT_TIMEOUT_S
    seed: int | None = None
    goodput: tuple[str, ...] = ()
    label: str | None = None
    devices: int = 1
    json: Path | None = None
    plot: Path | None = None
    dry_run: bool = False

    def check(self) -> None:
        """Raises ServerError for options that do not go together, by their names."""
        for field, workloads in _BELONGS.items():
            if getattr(self, field) and self.workload not in workloads:
                option = f"--{field.replace('_', '-')}"
                raise ServerError(
                    f"{option} means nothing to the workload {self.workload}: {', '.join(workloads)} only"
                )
        if self.concurrency is not None and self.rate is not None:
            raise ServerError("--concurrency and --rate exclude each other: closed loop or open loop")
        for given, option in ((self.arrivals, "--arrivals"), (self.burst, "--burst")):
            if given is not None and self.rate is None:
                raise ServerError(f"{option} needs --rate: in a closed loop requests wait for answers")
        if self.burst is not None and self.arrivals != "burst":
            raise ServerError("--burst needs --arrivals burst")
        if self.workload == "file" and self.file is None:
            raise ServerError("the workload file needs --file FILE.jsonl")
        for path, option in ((self.json, "--json"), (self.plot, "--plot")):
            if path is not None and not path.expanduser().absolute().parent.is_dir():
                raise ServerError(f"{option} {path}: there is no folder {path.expanduser().absolute().parent}")

    def loads(self) -> list[Load]:
        """One load for each level; raises ServerError."""
        if self.workload == "mixture":
            return []
        if self.rate is not None:
            arrivals, burst = self.arrivals or "poisson", self.burst or 8
            rates = [_number(text, "--rate", float) for text in self.rate.split(",")]
            return [Load(rate=rate, arrivals=arrivals, burst=burst, duration_s=self.duration) for rate in rates]
        levels = (self.concurrency or str(self.sessions or (4 if self.workload == "sessions" else 8))).split(",")
        return [Load(concurrency=int(_number(text, "--concurrency", int)), duration_s=self.duration) for text in levels]

    def count(self, load: Load, workload: Workload) -> int | None:
        """How many conversations a level has; None: as many as begin in its time."""
        if self.workload == "sessions":
            return self.sessions or (None if self.duration else load.concurrency or 4)
        if self.requests is not None or self.duration is not None:
            return self.requests
        if isinstance(workload, FileWorkload):
            return len(workload.entries)
        wanted = 4 * load.concurrency if load.concurrency is not None else round(_OPEN_SECONDS * (load.rate or 0))
        return max(_FEWEST_REQUESTS, wanted)

    def build(self, source: random.Random) -> AnyWorkload:
        """The workload; raises ServerError."""
        input_len = Lengths.parse(self.input_len or str(self._default_input()), "--input-len")
        output_len = Lengths.parse(self.output_len or str(self._default_output()), "--output-len")
        match self.workload:
            case "random":
                return RandomWorkload(input_len, output_len)
            case "shared-prefix":
                return SharedPrefixWorkload(self.prefix_len or 1024, self.groups or 4, input_len, output_len)
            case "sessions":
                return SessionsWorkload(self.turns or 10, self.prefix_len or 1024, input_len, output_len)
            case "file":
                assert self.file is not None
                return FileWorkload.read(self.file.expanduser(), output_len, source)
            case "mixture":
                decoders, prompts = self.decoders or 8, self.prompts or 1
                if input_len.low != input_len.high or output_len.low != output_len.high:
                    raise ServerError("the workload mixture takes no ranges of lengths")
                length = self.prompt_len or _DEFAULT_PROMPT_LEN
                return MixtureWorkload(decoders, length, prompts, input_len.low, output_len.low)

    def _default_input(self) -> int:
        return {"mixture": 32, "sessions": 256, "shared-prefix": 128}.get(self.workload, 512)

    def _default_output(self) -> int:
        return {"mixture": 2048, "sessions": 64}.get(self.workload, 128)


def _number(text: str, option: str, kind: type[int] | type[float]) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = kind(0)
    if not 0 < value < float("inf"):
        raise ServerError(f'{option} {text}: one number above 0, or several as in "1,8,32"')
    return value
