"""Compiles every new text in a process of its own first, which may die of it.

A compiler can be led into work without end (the intersection of two dozen regular expressions) and into a recursion
that no stack holds (ten thousand rules, each in the next). In the engine the one would cost a core for good, the other
the engine. A child process loads the same compiler over the same ids and forks for each text a process with less time,
memory and stack than the engine has: what passes there passes here, in about the same time, and what dies there takes
nothing along. (Were the child itself to die, starting another would cost a core for a fifth of a second each time.)
"""

import contextlib
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal, NoReturn

import msgspec

from tokenspeed.grammar.llguidance_compiler import CompiledGrammar, LlguidanceCompiler
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.messages import Constraint, ConstraintError

CHECK_LIMIT_S = 5.0
START_LIMIT_S = 30.0
MEMORY_LIMIT = 2 << 30
"""Of the child's address space; its libraries take a quarter of a gigabyte of it."""
NICE = 10
"""Of the child: where every core is busy a costly check takes a tenth of one, not half, from those who generate. It is
of the engine's session, since Linux weighs sessions against each other before it looks at this."""
GRACE_S = 5.0
"""The child ends a check that takes too long; one that says nothing for so much longer is ended itself."""
STACK_BYTES = 1 << 20
"""Half of the least that the engine's threads have (2 MiB where the system's limit is "unlimited", else 8)."""

_LENGTH = struct.Struct("<I")
_COMMAND = (sys.executable, "-m", "tokenspeed.grammar.checker")
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Of the child, which forks: NumPy would start threads that it does not need."""


class _Answer(msgspec.Struct, frozen=True):
    """``error``: what is wrong with the constraint, "" where nothing is."""

    took: Literal["enough", "too long", "too much"]
    error: str = ""


_PASSED = _Answer("enough")
_TOO_LONG = _Answer("too long")
_TOO_MUCH = _Answer("too much")


class CheckerVocabulary(msgspec.Struct, frozen=True):
    """What a check needs of a vocabulary: its special tokens under their ids, and of the text only bytes."""

    size: int
    special: dict[int, bytes]
    ends: list[int]

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> "CheckerVocabulary":
        special = {token: vocabulary.tokens[token] for token in vocabulary.special}
        return cls(size=len(vocabulary.tokens), special=special, ends=list(vocabulary.ends))

    def vocabulary(self) -> Vocabulary:
        """Returns the vocabulary of special tokens and, behind the ids of the real one, bytes."""
        named = [self.special.get(token, b"") for token in range(self.size)]
        return Vocabulary(
            tokens=[*named, *(bytes((byte,)) for byte in range(256))],
            special=frozenset(self.special),
            ends=tuple(self.ends),
            encode=lambda text: [self.size + byte for byte in text.encode()],
        )


class CheckedCompiler:
    """Compiles what passed the check. A checker is started when none is idle, and kept; see LlguidanceCompiler."""

    def __init__(self, vocabulary: Vocabulary, limit_s: float = CHECK_LIMIT_S) -> None:
        self._compiler = LlguidanceCompiler(vocabulary)
        self._given = CheckerVocabulary.of(vocabulary)
        self._limit_s = limit_s
        self._idle: list[_Checker] = []

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Raises ConstraintError as LlguidanceCompiler does, and where the check takes too much."""
        checker = self._checker()
        try:
            checker.check(constraint, self._limit_s)
        finally:
            self._idle.append(checker)  # one that ended is left out when it is asked for
        return self._compiler.compile(constraint)

    def _checker(self) -> "_Checker":
        while True:
            try:
                checker = self._idle.pop()
            except IndexError:  # not asked before: another thread may take the last one in between
                return _Checker(self._given)
            if checker.is_alive:
                return checker

    def close(self) -> None:
        """Ends the checkers that are idle; the others end when their work does."""
        while self._idle:
            self._idle.pop().kill()


class _Checker:
    """One child. One thread uses it at a time."""

    def __init__(self, vocabulary: CheckerVocabulary) -> None:
        self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # a terminal's Ctrl-C is not for it
            env={**os.environ, **_ONE_THREAD},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._write = _writer(self._process.stdin.fileno())
        self._output = self._process.stdout.fileno()
        try:
            self._write(msgspec.msgpack.encode(vocabulary))
            self._read(START_LIMIT_S)  # it says when it is there: its start counts for nobody
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            self.kill()
            raise ConstraintError(
                f"the process that checks constraints does not start ({' '.join(_COMMAND)})", "constraint_unavailable"
            ) from error

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended, by itself or because somebody had it end."""
        return self._process.poll() is None

    def check(self, constraint: Constraint, limit_s: float) -> None:
        """Raises ConstraintError where something is wrong, also where the check takes too long or dies."""
        answer = self._answer(constraint, limit_s)
        if answer.error:
            raise ConstraintError(answer.error)
        if answer.took == "too long":
            raise _too_costly(constraint, f"longer than {limit_s:g} s to compile")
        if answer.took == "too much":
            raise _too_costly(constraint, "more time, memory or depth of recursion than there is for it")

    def _answer(self, constraint: Constraint, limit_s: float) -> _Answer:
        try:
            self._write(msgspec.msgpack.encode((limit_s, constraint)))
            return msgspec.msgpack.decode(self._read(limit_s + GRACE_S), type=_Answer)
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            self.kill()
            return _TOO_LONG if isinstance(error, TimeoutError) else _TOO_MUCH

    def kill(self) -> None:
        """Ends the child and what it forked, and waits for the child."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _read(self, limit_s: float) -> bytes:
        until = time.monotonic() + limit_s
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, until))
        return self._exactly(length, until)

    def _exactly(self, size: int, until: float) -> bytes:
        data = b""
        while len(data) < size:
            if not select.select([self._output], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError
            piece = os.read(self._output, size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data


def _too_costly(constraint: Constraint, what: str) -> ConstraintError:
    return ConstraintError(f"the {constraint.kind} takes {what}", "constraint_too_costly")


# What runs in the child. It has one thread, so that it may fork.


def main() -> None:
    """Reads a vocabulary, then constraints; answers each with what is wrong. Ends when its input does."""
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    messages, write = _messages(sys.stdin.fileno()), _writer(sys.stdout.fileno())
    given = msgspec.msgpack.decode(next(messages), type=CheckerVocabulary)
    compiler = LlguidanceCompiler(given.vocabulary())
    write(b"")
    for message in messages:
        limit_s, constraint = msgspec.msgpack.decode(message, type=tuple[float, Constraint])
        write(msgspec.msgpack.encode(_check_apart(compiler, constraint, limit_s)))


def _check_apart(compiler: LlguidanceCompiler, constraint: Constraint, limit_s: float) -> _Answer:
    """The outcome of the check in a process of its own, which is ended where it takes too long."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        _check_and_exit(compiler, constraint, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        in_time = bool(select.select([answer], [], [], limit_s)[0])
        if not in_time:
            os.kill(process, signal.SIGKILL)
        text = answer.read()
    os.waitpid(process, 0)
    if not in_time:
        return _TOO_LONG
    return msgspec.msgpack.decode(text, type=_Answer) if text else _TOO_MUCH


def _check_and_exit(compiler: LlguidanceCompiler, constraint: Constraint, writing: int) -> NoReturn:
    _limit_time()
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_check, args=(compiler, constraint, writing))
    worker.start()
    worker.join()
    os._exit(0)


def _check(compiler: LlguidanceCompiler, constraint: Constraint, writing: int) -> None:
    answer = _PASSED
    try:
        compiler.compile(constraint)
    except ConstraintError as error:
        answer = _Answer("enough", str(error))
    os.write(writing, msgspec.msgpack.encode(answer))


def _limit_time() -> None:
    """Ends this process where a check takes too much, even if nobody is left to kill it."""
    limit_s = int(4 * CHECK_LIMIT_S) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))


def _messages(descriptor: int) -> Iterator[bytes]:
    with os.fdopen(descriptor, "rb", closefd=False) as stream:
        while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
            yield stream.read(_LENGTH.unpack(head)[0])


def _writer(descriptor: int) -> Callable[[bytes], None]:
    def write(message: bytes) -> None:
        data = memoryview(_LENGTH.pack(len(message)) + message)
        while data:
            data = data[os.write(descriptor, data) :]

    return write


if __name__ == "__main__":
    main()
