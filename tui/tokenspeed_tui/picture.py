"""The picture: everything the screen shows, immutable, folded from observation to observation."""

from collections.abc import Mapping

import msgspec

from tokenspeed_tui.configuration import ConfigurationView, read_configuration
from tokenspeed_tui.detail import DetailView, read_detail
from tokenspeed_tui.events import AWAY, BACK, Events, with_own, with_told
from tokenspeed_tui.history import History
from tokenspeed_tui.observation import Observation, Probe
from tokenspeed_tui.rates import Headroom, Rates, compute_rates, headroom, restarted
from tokenspeed_tui.view import ServerView, SnapshotView, clean, read_server

WINDOW_S = 2.0
"""Rates are taken over about so many seconds: long enough not to flicker, short enough to be "now"."""


class Stay(msgspec.Struct, frozen=True):
    """A state in which a request was seen, and the snapshot's time when it was first seen there."""

    state: str
    since: float


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """What is known at one moment.

    Attributes:
        url: of the server.
        polls: observations so far; 0 is the skeleton that is painted before any network.
        live, ready, progress: the probes of the latest observation.
        error: why the latest observation brought no state; "" where it did.
        server: the latest state that came, kept while the server is away: it is shown with its age.
        seen: the observer's clock when ``server`` came.
        samples: distinct snapshots of the last WINDOW_S seconds, the oldest first.
        rates: between the first and the last of the samples.
        history: the last quarter of an hour, for sparklines.
        events: the log, the newest last.
        timelines: by handle, the states in which each live request was seen.
        configuration: what the server runs with, as it last said it; None before it did.
        configuration_error: why it does not say it; "" where it did, or was not asked.
        detail: of the request that is watched, as it was last told; None before, and where none is watched.
        detail_error: why it is not told.
    """

    url: str
    polls: int = 0
    live: Probe = Probe()
    ready: Probe = Probe()
    progress: Probe = Probe()
    error: str = ""
    server: ServerView | None = None
    seen: float | None = None
    samples: tuple[SnapshotView, ...] = ()
    rates: Rates = Rates()
    history: History = History()
    events: Events = ()
    timelines: Mapping[int, tuple[Stay, ...]] = {}
    configuration: ConfigurationView | None = None
    configuration_error: str = ""
    detail: DetailView | None = None
    detail_error: str = ""

    @property
    def snapshot(self) -> SnapshotView | None:
        """The engine's latest snapshot, however old."""
        return self.server.snapshot if self.server is not None else None

    @property
    def room(self) -> Headroom:
        """The head-room of the latest snapshot; by the engine's own rule where it tells it, else an estimate."""
        if self.server is None or self.server.snapshot is None:
            return Headroom()
        told = self.server.snapshot.headroom
        if told is None:
            return headroom(self.server.snapshot, self.server.max_model_len)
        return Headroom(
            tokens=told.tokens, typical_tokens=told.typical_tokens, requests=told.requests, largest=told.largest
        )

    def data_age(self, now: float) -> float | None:
        """Seconds since the shown snapshot was taken (or, before the first one, since the state came)."""
        if self.server is None or self.seen is None:
            return None
        return max(0.0, now - self.seen) + max(0.0, self.server.age_s or 0.0)

    def is_stale(self, now: float, interval: float) -> bool:
        """Whether the data is older than three polls; an idle engine sends one a second, which is not stale."""
        age = self.data_age(now)
        return age is not None and age > 3 * max(interval, 1.0)


def advance(picture: Picture, observation: Observation) -> Picture:
    """The picture after one more observation."""
    probed = msgspec.structs.replace(
        picture,
        url=observation.url,
        polls=picture.polls + 1,
        live=observation.live,
        ready=observation.ready,
        progress=observation.progress,
        error=clean(observation.error),
        events=_with_presence(picture, observation),
    )
    probed = _with_configuration(probed, observation)
    if observation.state is None:
        return probed
    probed = msgspec.structs.replace(
        probed,
        detail=read_detail(observation.detail) if observation.detail is not None else None,
        detail_error=clean(observation.detail_error),
    )
    server = read_server(observation.state)
    seen = msgspec.structs.replace(probed, server=server, seen=observation.time)
    if server.snapshot is None or server.snapshot.time is None:
        return msgspec.structs.replace(seen, samples=(), rates=Rates(), timelines={})
    return _with_snapshot(seen, server.snapshot, server.snapshot.time)


def _with_presence(picture: Picture, observation: Observation) -> Events:
    """The log, with an entry where the server went away or came back."""
    if bool(picture.error) == bool(observation.error) or (picture.polls == 0 and not observation.error):
        return picture.events
    if observation.error:
        return with_own(picture.events, AWAY, observation.time, clean(observation.error))
    return with_own(picture.events, BACK, observation.time, "the server answers again")


def _with_configuration(picture: Picture, observation: Observation) -> Picture:
    """The configuration that came replaces the last one; a server that gives none has none that could be shown."""
    if observation.configuration is not None:
        configuration = read_configuration(observation.configuration)
        return msgspec.structs.replace(picture, configuration=configuration, configuration_error="")
    if observation.configuration_error:
        error = clean(observation.configuration_error)
        return msgspec.structs.replace(picture, configuration=None, configuration_error=error)
    return picture


def _with_snapshot(picture: Picture, snapshot: SnapshotView, time: float) -> Picture:
    samples = picture.samples
    if samples and samples[-1].time == time:
        return picture
    if samples and restarted(samples[-1], snapshot):
        picture = msgspec.structs.replace(picture, history=History(), timelines={})
        samples = ()
    kept = _window((*samples, snapshot), time)
    return msgspec.structs.replace(
        picture,
        samples=kept,
        rates=compute_rates(kept[0], snapshot),
        history=picture.history.with_snapshot(snapshot, time),
        events=with_told(picture.events, snapshot.events),
        timelines=_timelines(picture.timelines, snapshot, time),
    )


def _window(samples: tuple[SnapshotView, ...], now: float) -> tuple[SnapshotView, ...]:
    """The samples from the last one that is at least WINDOW_S old; always two where there are two."""
    first = 0
    while first + 2 < len(samples) and (samples[first + 1].time or 0.0) <= now - WINDOW_S:
        first += 1
    return samples[first:]


def _timelines(
    known: Mapping[int, tuple[Stay, ...]], snapshot: SnapshotView, time: float
) -> Mapping[int, tuple[Stay, ...]]:
    """The timelines of the requests that are alive in the snapshot."""
    timelines: dict[int, tuple[Stay, ...]] = {}
    for request in snapshot.requests:
        if request.handle is None or request.state is None:
            continue
        stays = known.get(request.handle, ())
        if not stays or stays[-1].state != request.state:
            stays = (*stays, Stay(request.state, time))
        timelines[request.handle] = stays
    return timelines
