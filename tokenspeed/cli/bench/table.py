"""The report of ``bench serve`` for a person: one line a load, then the times, the turns or the phases."""

from collections.abc import Sequence

from tokenspeed.cli.bench.report import MixtureLevel, ServeReport
from tokenspeed.cli.bench.statistics import METRICS, Figures, Summary

_NAMES = {"ttft": "first token", "tpot": "each token", "itl": "between", "e2e": "whole"}


def render(report: ServeReport) -> list[str]:
    """The lines."""
    lines = [
        f"{report.endpoint.model} at {report.endpoint.url}",
        f"{report.described}; {report.api}, prompts as {report.prompts}, seed {report.seed}",
    ]
    if report.levels:
        summaries = [level.summary for level in report.levels]
        lines += ["", *_throughputs(summaries), "", *_times(summaries)]
        for summary in summaries:
            if summary.turns:
                lines += ["", *_turns(summary, several=len(summaries) > 1)]
        lines += _remarks(summaries)
        for level in report.levels:
            tiers = level.tiers
            if tiers is not None and tiers.device + tiers.host + tiers.storage:
                found = f"{tiers.device:,} on the device, {tiers.host:,} in host memory, {tiers.storage:,} in storage"
                lines.append(f"cached at {level.summary.load}: of {tiers.looked_up:,} prompt tokens {found}")
    if report.mixture is not None:
        lines += ["", *_mixture(report.mixture)]
    lines += [f"note: {note}" for note in report.notes]
    if report.interrupted:
        lines.append("interrupted: this is what was measured until then")
    return lines


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines: the first column to the left, the others to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _throughputs(summaries: Sequence[Summary]) -> list[str]:
    head = ["load", "done", "failed", "s", "req/s", "in tok/s", "out tok/s", "tok/s each", "peak", "cached", "client"]
    good = any(summary.goodput for summary in summaries)
    rows = [[*head, "goodput", "good req/s"] if good else head]
    for summary in summaries:
        row = [
            summary.load,
            str(summary.completed),
            str(summary.requests - summary.completed),
            f"{summary.seconds:.1f}",
            f"{summary.requests_per_s:.2f}",
            "?" if summary.input_tokens_per_s is None else f"{summary.input_tokens_per_s:,.1f}",
            f"{summary.output_tokens_per_s:,.1f}",
            f"{summary.tokens_per_s_per_user:,.1f}",
            str(summary.peak_concurrency),
            "?" if summary.cached_share is None else f"{summary.cached_share:.0%}",
            f"{summary.client_cpu:.0%}",
        ]
        if good:
            goodput = summary.goodput
            row += [f"{goodput.share:.0%}", f"{goodput.requests_per_s:.2f}"] if goodput else ["", ""]
        rows.append(row)
    return columns(rows)


def _figures(figures: Figures) -> list[str]:
    if not figures.count:
        return ["-"] * 6
    return [_ms(value) for value in (figures.mean, figures.p50, figures.p90, figures.p95, figures.p99, figures.max)]


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _times(summaries: Sequence[Summary]) -> list[str]:
    rows = [["load", "ms", "mean", "p50", "p90", "p95", "p99", "max"]]
    for summary in summaries:
        by_name = {name: getattr(summary, f"{name}_ms") for name in METRICS}
        if summary.rate is not None:
            by_name["late"] = summary.lateness_ms
        for name, figures in by_name.items():
            rows.append([summary.load if name == "ttft" else "", _NAMES.get(name, "client late"), *_figures(figures)])
    return columns(rows)


def _turns(summary: Summary, *, several: bool) -> list[str]:
    rows = [["turn", "done", "prompt", "cached", "first token ms p50", "p90", "p99", "each token ms p50"]]
    for turn in summary.turns:
        rows.append(
            [
                str(turn.turn + 1),
                str(turn.requests),
                "?" if turn.prompt_tokens is None else f"{turn.prompt_tokens:,.0f}",
                "?" if turn.cached is None else f"{turn.cached:.0%}",
                *(_ms(value) for value in (turn.ttft_ms.p50, turn.ttft_ms.p90, turn.ttft_ms.p99)),
                _ms(turn.tpot_ms.p50),
            ]
        )
    return [*([f"turns, {summary.load}"] if several else []), *columns(rows)]


def _mixture(level: MixtureLevel) -> list[str]:
    lines = []
    for answer in level.outcome.prompts:
        if answer.ok:
            tokens = "?" if answer.prompt_tokens is None else f"{answer.prompt_tokens:,}"
            rate = f", {answer.prompt_tokens / answer.first_token_s:,.1f} tok/s" if answer.prompt_tokens else ""
            lines.append(f"prompt of {tokens} tokens: first token after {answer.first_token_s:.2f} s{rate}")
    rows = [["streams", "s", "tok/s", "between ms mean", "p50", "p90", "p95", "p99", "max"]]
    for phase in level.phases:
        rows.append([phase.phase, f"{phase.seconds:.2f}", f"{phase.tokens_per_s:,.1f}", *_figures(phase.itl_ms)])
    lines += columns(rows)
    for answer in (*level.outcome.prompts, *level.outcome.streams):
        if answer.error:
            lines.append(f"failed: {answer.error}: {answer.detail}")
    return lines


def _remarks(summaries: Sequence[Summary]) -> list[str]:
    lines = []
    for summary in summaries:
        for kind, count in summary.errors.items():
            lines.append(f"failed at {summary.load}: {count} x {kind}: {summary.error_details[kind]}")
        if summary.cut_off:
            lines.append(f"cut off at {summary.load}: {summary.cut_off} open requests, which count nowhere")
        if summary.short:
            lines.append(f"at {summary.load} {summary.short} answers ended before the length that was asked for")
        if summary.client_limited:
            lines.append(f"the client was the limit at {summary.load}: {summary.client_limited}")
        if 0 < summary.chunks < 0.9 * summary.output_tokens:
            share = f"{summary.output_tokens / summary.chunks:.1f} tokens a chunk"
            lines.append(f"at {summary.load} the server sends {share}: the times between are those of chunks")
    return lines
