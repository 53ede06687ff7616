"""Runs the converters of a GPT-NeoX checkout on the CPU. A program; `converters.run_jobs` calls it.

    python run_converters.py CHECKOUT JOBS.json RESULTS.json

JOBS.json is a list of {"script": name in tools/ckpts, "arguments": [...]}, run in turn in this process; RESULTS.json
has for each null, or {"error": class name, "message", "traceback"}.
"""

import json
import os
import runpy
import sys
import traceback

import shims


def main(checkout, jobs_file, results_file):
    """Run all jobs of the file."""
    import torch._dynamo  # noqa: F401 - transformers' models need it, and it must see torch as it is

    shims.install()
    with open(jobs_file) as file:
        jobs = json.load(file)
    shims.use_checkout(checkout)
    results = [_run(os.path.join(checkout, "tools/ckpts", job["script"]), job["arguments"]) for job in jobs]
    with open(results_file, "w") as file:
        json.dump(results, file)


def _run(script, arguments):
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
        return None
    except (Exception, SystemExit) as error:
        return {"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}


if __name__ == "__main__":
    main(*sys.argv[1:])
