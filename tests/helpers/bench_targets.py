"""Work for tests of tools/bench/workers.py. Imports nothing that takes time."""

import os


def adding(given):
    """A worker: a running sum. Prints, as libraries do."""
    total = [0]

    def step():
        total[0] += given["by"]
        print("not an answer")
        return {"total": total[0], "variable": os.environ.get("BENCH_TEST")}

    return step


def growing(given):
    """A worker: takes memory for the time of every second step."""
    number = [0]

    def step():
        number[0] += 1
        return {"taken": len(b"x" * (given["bytes"] if number[0] % 2 else 1))}

    return step


def failing(given):
    """A worker: fails when it is built, or else in its step."""
    if given["at"] == "start":
        raise ValueError("no such shape")

    def step():
        raise ValueError("out of luck")

    return step
