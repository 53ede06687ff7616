"""Start a script on all processes: python deepy.py SCRIPT CONFIG [CONFIG...]; see --help."""

from megatron.entry import run_main
from megatron.neox_arguments.launcher import launch

if __name__ == "__main__":
    run_main(launch)
