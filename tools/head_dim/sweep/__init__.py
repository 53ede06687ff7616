"""Train the same small model at several head_dims, or with any other settings, and compare: loss, speed, memory, heads.

    python -m tools.head_dim sweep STUDY.yml [--out DIR] [--jobs N]

STUDY.yml says what is trained, with which seeds, and what is made equal; tools/head_dim/sweep/study.py shows its keys
and tools/head_dim/studies/ has studies that ship. Each run goes through deepy.py and train.py, on the CPU unless
DS_ACCELERATOR=cuda is in the environment. Given again, the command goes on where it was: runs that are done are kept,
half-done ones continue from their checkpoint. DIR gets results.json, report.html and the pictures. Exit status 1 if a
run failed.
"""

from tools.head_dim.sweep.command import arguments, run

__all__ = ["arguments", "run"]
