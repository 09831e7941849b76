"""Stands for docker on PATH: keeps images and containers as files, and runs a small server as every container.

State lies in the folder FAKE_DOCKER: ``images`` and ``registry`` hold a reference a line, ``down`` means that there is
no daemon, ``broken`` that no container starts, ``calls`` gets every command line as JSON, and ``NAME.pid``,
``NAME.log`` and ``NAME.code`` belong to containers.
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

STATE = Path(os.environ.get("FAKE_DOCKER", "."))


def serve(port: int) -> int:
    """The container: ready at once, ends at SIGTERM or SIGINT, and says so."""
    if (STATE / "broken").exists():
        print("error: it cannot start", flush=True)
        return 2

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", port), Handler)

    def drain(*_: object) -> None:
        os.write(1, b"drained\n")
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
    os.write(1, b"  loading\nready: fake\n  curl\n  make top\n")
    server.serve_forever()
    return 0


def lines(name: str) -> list[str]:
    path = STATE / name
    return path.read_text().split() if path.exists() else []


def running(name: str) -> bool:
    path = STATE / f"{name}.pid"
    return path.exists() and not (STATE / f"{name}.code").exists()


def run(arguments: list[str]) -> int:
    name = arguments[arguments.index("--name") + 1]
    port = arguments[arguments.index("--publish") + 1].rpartition(":")[2]
    if (STATE / f"{name}.pid").exists():
        print(f"the name {name} is taken", file=sys.stderr)
        return 125
    if "--detach" not in arguments:
        (STATE / f"{name}.pid").write_text(str(os.getpid()))
        return serve(int(port))
    files = f"{STATE}/{name}"
    watch = f"{sys.executable} -I -S {__file__} serve {port} & echo $! > {files}.pid; wait $!; echo $? > {files}.code"
    with (STATE / f"{name}.log").open("w") as log:
        subprocess.Popen(["/bin/sh", "-c", watch], stdout=log, stderr=log, start_new_session=True)
    while not (STATE / f"{name}.pid").exists():
        time.sleep(0.01)
    print("0123456789ab")
    return 0


def inspect(arguments: list[str]) -> int:
    name, template = arguments[-1], arguments[2]
    if not (STATE / f"{name}.pid").exists():
        return 1
    code = STATE / f"{name}.code"
    print(str(running(name)).lower() if "Running" in template else code.read_text().strip() if code.exists() else "0")
    return 0


def stop(name: str) -> int:
    os.kill(int((STATE / f"{name}.pid").read_text()), signal.SIGTERM)
    while not (STATE / f"{name}.code").exists():
        time.sleep(0.01)
    return 0


def logs(arguments: list[str]) -> int:
    name = arguments[-1]
    shown = 0
    while True:
        ended = not running(name)
        text = (STATE / f"{name}.log").read_text()
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
        if ended or "--follow" not in arguments:
            return 0
        time.sleep(0.02)


def remove(name: str) -> int:
    if running(name):
        return 1
    for path in STATE.glob(f"{name}.*"):
        path.unlink()
    return 0


def main(arguments: list[str]) -> int:
    with (STATE / "calls").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    if arguments[0] == "info":
        if (STATE / "down").exists():
            print(json.dumps({"ServerErrors": ["Cannot connect to the Docker daemon"]}))
            return 1
        print(json.dumps({"ServerVersion": "29.1.0", "SecurityOptions": ["name=seccomp,profile=builtin"]}))
        return 0
    if (STATE / "down").exists():
        return 1
    if arguments[:2] == ["image", "inspect"]:
        return 0 if arguments[-1] in lines("images") else 1
    if arguments[:2] == ["manifest", "inspect"]:
        return 0 if arguments[-1] in lines("registry") else 1
    if arguments[:2] == ["container", "inspect"]:
        return inspect(arguments[1:])
    commands = {"run": lambda: run(arguments), "stop": lambda: stop(arguments[-1]), "rm": lambda: remove(arguments[-1])}
    if arguments[0] == "logs":
        return logs(arguments)
    return commands[arguments[0]]()


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[2])) if sys.argv[1] == "serve" else main(sys.argv[1:]))
