"""convert_hf_to_neox.py with the options of GPT-NeoX's converter for Llama; any model type that is known works.

python tools/ckpts/convert_hf_llama_to_neox.py --model MODEL --model_path OUT [--tp N] [--pp P]
"""

import argparse
import os
import sys
from typing import Optional, Sequence

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tools.ckpts import convert_hf_to_neox  # noqa: E402


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the tool; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="MODEL", help="a model folder, or a name on the hub")
    parser.add_argument("--model_path", required=True, metavar="OUT", help="new or empty folder")
    convert_hf_to_neox.add_layout(parser)
    options = parser.parse_args(arguments)
    layout = dict(model_parallel_size=options.tp, pipe_parallel_size=options.pp)
    return convert_hf_to_neox.run(options.model, options.model_path, **layout)


if __name__ == "__main__":
    sys.exit(main())
