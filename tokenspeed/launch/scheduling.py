"""Makes the scheduler that the configuration names, with a journal around it where one is asked for."""

from importlib.metadata import version
from pathlib import Path
from typing import cast

from tokenspeed.engine.journaled_scheduler import JournaledScheduler, begin_record
from tokenspeed.recipes.resolved import SchedulerSettings
from tokenspeed.telemetry.journal import JournalWriter
from tokenspeed_scheduler import Scheduler, SchedulerConfig
from tokenspeed_scheduler.reference import ReferenceScheduler

MADE_WITH = ("tokenspeed-appliance", "tokenspeed-appliance-scheduler")


def make_scheduler(implementation: str, config: SchedulerConfig) -> Scheduler:
    """The C++ scheduler ("native") or its plain Python twin ("reference"), which has the same members."""
    if implementation == "reference":
        return cast(Scheduler, ReferenceScheduler(config))
    return Scheduler(config)


def compose_scheduler(settings: SchedulerSettings, config: SchedulerConfig) -> Scheduler:
    """The scheduler of an engine that serves. Raises JournalError where the journal's file cannot be made."""
    scheduler = make_scheduler(settings.implementation, config)
    if not settings.journal:
        return scheduler
    made_with = {name: version(name) for name in MADE_WITH}
    writer = JournalWriter(Path(settings.journal), begin_record(settings.implementation, config, made_with))
    return cast(Scheduler, JournaledScheduler(scheduler, writer))
