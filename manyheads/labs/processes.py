"""Runs several labs at a time, each in a process of its own, so that none can change or end another."""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Protocol

from manyheads.errors import ManyheadsError, one_line
from manyheads.labs.lab import Lab, Size, run_lab
from manyheads.labs.results import LabError, Outcome

FORK = multiprocessing.get_context("fork")  # a child has the labs of a --parts file without reading it again
MESSAGE_SECONDS = 0.2  # between messages about progress
SLOW_IMPORT = "torch._dynamo"  # seconds, when a model is built; imported once here and not in every process


class OnLab(Protocol):
    """What a caller sees while labs run: how many ended, which run now, and how far these are."""

    def __call__(self, ended: int, running: Sequence[str]) -> None: ...


@dataclasses.dataclass
class Job:
    """A lab that runs, and how far it is."""

    index: int
    lab: Lab
    process: ForkProcess
    messages: Connection
    progress: str = ""

    def __str__(self) -> str:
        return f"{self.lab.id} {self.progress}".strip()


def run_labs(labs: Sequence[Lab], *, size: Size, seed: int, jobs: int, on_lab: OnLab) -> list[Outcome]:
    """The outcome of each lab, in their order. The numbers do not depend on `jobs`."""
    import_module(SLOW_IMPORT)
    outcomes = dict[int, Outcome]()
    # the longest first, so that none is left alone at the end
    waiting = sorted(range(len(labs)), key=lambda index: labs[index].seconds[size == "full"])
    with ending_processes() as running:
        while waiting or running:
            while waiting and len(running) < jobs:
                index = waiting.pop()
                running.append(start(index, labs[index], size, seed))
            on_lab(len(outcomes), [str(job) for job in running])
            ready = wait([job.messages for job in running], timeout=1.0)
            for job in [job for job in running if job.messages in ready]:
                outcome = receive(job)
                if outcome is not None:
                    outcomes[job.index] = outcome
                    running.remove(job)
    return [outcomes[index] for index in range(len(labs))]


@contextmanager
def ending_processes() -> Iterator[list[Job]]:
    """A list of jobs, whose processes end with the block, however it ends."""
    jobs = list[Job]()
    try:
        yield jobs
    finally:
        for job in jobs:
            job.process.kill()
        for job in jobs:
            job.process.join()


def start(index: int, lab: Lab, size: Size, seed: int) -> Job:
    messages, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run_and_send, args=(sender, lab, size, seed), daemon=True)
    process.start()
    sender.close()  # so that the end of the process is the end of its messages
    return Job(index, lab, process, messages)


def run_and_send(sender: Connection, lab: Lab, size: Size, seed: int) -> None:
    """In a process: sends progress as texts, and then what it found or the error that it raised."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    last = 0.0

    def send_progress(name: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > MESSAGE_SECONDS:
            last = time.monotonic()
            sender.send(f"{done:,}/{total:,}")

    try:
        run = run_lab(lab, size=size, seed=seed, progress=send_progress)
        sender.send(dataclasses.replace(run, lab=lab.id))  # type: ignore[arg-type]
    except Exception as error:
        sender.send(LabError(lab.id, describe_error(error)))  # type: ignore[arg-type]


def describe_error(error: Exception) -> str:
    return str(error) if isinstance(error, ManyheadsError) else one_line(f"{type(error).__name__}: {error}")


def receive(job: Job) -> Outcome | None:
    """The outcome of a job, or None if it is still running."""
    try:
        message: str | Outcome = job.messages.recv()
    except EOFError:
        job.process.join()
        return LabError(job.lab, f"its process ended with exit status {job.process.exitcode}")
    if isinstance(message, str):
        job.progress = message
        return None
    job.process.join()
    return dataclasses.replace(message, lab=job.lab)
