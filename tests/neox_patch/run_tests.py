"""Collects all tests of a checkout of GPT-NeoX on the CPU, runs some, and writes what came of each.

    python run_tests.py CHECKOUT OUT.json FILES_TO_RUN...

OUT.json: {"collected": names, "outcomes": {name: passed, failed or skipped}, "errors": {file: text}}.
"""

import json
import os
import sys

import shims


class Recorder:
    """A plugin of pytest."""

    def __init__(self):
        self.found = {"collected": [], "outcomes": {}, "errors": {}}

    def pytest_collection_finish(self, session):
        self.found["collected"] = sorted(item.nodeid for item in session.items)

    def pytest_collectreport(self, report):
        if report.failed:
            self.found["errors"][report.nodeid] = report.longreprtext[-2000:]

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.found["outcomes"][report.nodeid] = report.outcome
        if report.failed:
            self.found["errors"][report.nodeid] = report.longreprtext[-2000:]


def main(checkout, out, *files):
    """Collect all, run `files`."""
    shims.install()
    shims.use_checkout(checkout)
    import pytest

    os.chdir(checkout)
    recorder = Recorder()
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    pytest.main([*options, *files], plugins=[recorder])
    pytest.main([*options, "--collect-only", "tests"], plugins=[recorder])
    with open(out, "w") as file:
        json.dump(recorder.found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
