"""``tokenspeed-kernel``: which kernels there are, why one wins, whether they are right, and how fast they are."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from tokenspeed_kernel.latency_table import TableError
from tokenspeed_kernel.platform import PlatformError
from tokenspeed_kernel.plugins.discovery import PATH_VARIABLE, PluginError, plugins_at
from tokenspeed_kernel.plugins.listing import describe_kernel, explain, list_kernels
from tokenspeed_kernel.plugins.loading import load_plugins, loaded_registry
from tokenspeed_kernel.plugins.measuring import add_measuring_options, add_tune_options, bench, run_tune
from tokenspeed_kernel.plugins.requests import UsageError, add_request_options
from tokenspeed_kernel.records import RecordError
from tokenspeed_kernel.registry import KernelRegistry
from tokenspeed_kernel.selection import OBJECTIVES, SelectionError
from tokenspeed_kernel.traits import TraitError

COMMANDS = "list, info NAME, explain OPERATION, verify, bench, tune, or --register PATH"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenspeed-kernel",
        description="Which kernels there are, why one wins, whether they are right, and how fast they are.",
        epilog="Exit status: 0 all right; 1 a plugin, a kernel, a choice or a file is at fault; 2 what was typed.",
    )
    parser.add_argument(
        "--register",
        metavar="PATH",
        action="append",
        default=[],
        help="add the kernel plugin in this folder or wheel; alone: check that it loads and say how to keep it",
    )
    commands = parser.add_subparsers(dest="command")
    listing = commands.add_parser("list", help="every kernel, by operation")
    listing.add_argument("operation", nargs="?", help="only this one, such as gemm.linear")
    info = commands.add_parser("info", help="everything about one kernel")
    info.add_argument("name", help="of a kernel, as list prints it")
    explaining = commands.add_parser("explain", help="every candidate for an operation, and why one wins")
    explaining.add_argument("operation", help="such as gemm.linear")
    add_request_options(explaining)
    explaining.add_argument("--override", metavar="TARGET", help="insist on a kernel or solution")
    explaining.add_argument("--objective", choices=sorted(OBJECTIVES), default="latency")
    verify = commands.add_parser(
        "verify",
        help="compare kernels with float64 and with what their tags promise",
        epilog="Further options are those of python -m tokenspeed_kernel.numerics, such as --write PATH.",
    )
    verify.add_argument("names", nargs="*", metavar="NAME", help="kernels or operations; left out: all")
    benching = commands.add_parser("bench", help="time every kernel that runs here, beside the reference")
    benching.add_argument("operations", nargs="*", metavar="OPERATION", help="only these")
    # Also after the command, where the parser's own default must not undo what stood before it.
    registering: dict[str, Any] = {"metavar": "PATH", "action": "append", "default": argparse.SUPPRESS}
    benching.add_argument("--register", **registering, help="add the kernel plugin in this folder or wheel")
    add_request_options(benching)
    add_measuring_options(benching)
    benching.add_argument("--json", action="store_true", help="print JSON")
    tuning = commands.add_parser("tune", help="time the verified kernels and keep the figures that selection goes by")
    tuning.add_argument("operations", nargs="*", metavar="OPERATION", help="only these")
    add_request_options(tuning)
    add_measuring_options(tuning)
    add_tune_options(tuning)
    return parser


def _keep(paths: Sequence[str]) -> str:
    """What ``--register`` alone prints: what the plugins bring, and the line that makes serving processes load
    them."""
    resolved = [os.path.realpath(os.path.expanduser(path)) for path in paths]
    brought = [kernel for kernel in loaded_registry().kernels() if kernel.origin in resolved]
    lines = [f"{kernel.spec.name}  {kernel.spec.operation}  ({kernel.origin})" for kernel in brought]
    lines.append("To serve with it, install it, or set for every process:")
    lines.append(f"  export {PATH_VARIABLE}={os.environ[PATH_VARIABLE]}")
    return "\n".join(lines)


def _verify(registry: KernelRegistry, names: Sequence[str], options: Sequence[str]) -> int:
    from tokenspeed_kernel.numerics.__main__ import main as numerics  # the cases take a while to import

    kernels = registry.kernels()
    members = {name: [k.spec.name for k in kernels if k.spec.operation == name] or [name] for name in names}
    return numerics([word for name in names for member in members[name] for word in ("--kernel", member)] + [*options])


def _register(paths: Sequence[str]) -> list[str]:
    """Puts the plugins at ``paths`` on the plugin path of this process; returns them resolved."""
    for path in paths:
        plugins_at(path)  # an error here names the path as it was typed
    known = list(filter(None, os.environ.get(PATH_VARIABLE, "").split(os.pathsep)))
    added = [os.path.realpath(os.path.expanduser(path)) for path in paths]
    if added:
        os.environ[PATH_VARIABLE] = os.pathsep.join(dict.fromkeys(known + added))
    return added


def _say(line: str) -> None:
    print(line, flush=True)


def _run(arguments: argparse.Namespace, options: Sequence[str]) -> tuple[str, int]:
    """What is left to print, and the exit status."""
    added = _register(arguments.register)
    load_plugins()
    registry = loaded_registry()
    match arguments.command:
        case "list":
            return list_kernels(registry, arguments.operation), 0
        case "info":
            return describe_kernel(registry, arguments.name), 0
        case "explain":
            return explain(registry, arguments), 0
        case "verify":
            return "", _verify(registry, arguments.names, options)
        case "bench":
            return "", bench(registry, arguments, _say)
        case "tune":
            return "", run_tune(registry, arguments, _say)
    if added:
        return _keep(arguments.register), 0
    raise UsageError(f"say what to do: {COMMANDS}; --help shows more")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 where a plugin, kernel, choice or file is at fault, 2 for what was typed."""
    parser = _parser()
    arguments, options = parser.parse_known_args(argv)
    if options and arguments.command != "verify":
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    try:
        text, status = _run(arguments, options)
    except UsageError as error:
        print(f"tokenspeed-kernel: {error}", file=sys.stderr)
        return 2
    except (PluginError, SelectionError, TraitError, PlatformError, RecordError, TableError) as error:
        print(f"tokenspeed-kernel: {error}", file=sys.stderr)
        return 1
    if text:
        print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
