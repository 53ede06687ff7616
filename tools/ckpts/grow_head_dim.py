"""Write a checkpoint with wider attention heads that computes the same function.

    python tools/ckpts/grow_head_dim.py IN OUT --head-dim 128 [--zeros]
    python tools/ckpts/grow_head_dim.py IN OUT --head-dim "[[64, 8], [128, 4]]"

IN is a save folder (its `latest` is taken) or one global_step<N> folder, at any parallel sizes, which OUT keeps. Each
head gets its new dimensions at its end. The scale of the scores and the rotated dimensions stay those of the narrow
heads: OUT's configs/ have head_dim, softmax_scale and rotary_pct accordingly.

Keys and columns of the output projection are zero in the new dimensions, queries and values are random there, so that
training can use them; --zeros leaves nothing but zeros, to fill up a width for a kernel. Queries and keys that are
normed have zeros in any case; rmsnorm needs their weights and the norm's scale multiplied, which half precision rounds.

Layers may become different widths, or stay, as head_dim says it in a config; their scale and their number of rotated
dimensions must then have been the same, so that one softmax_scale and one rotary_pct can keep them.

Refused: layer norms on queries and keys, whose mean would change, and Transformer Engine's attention. The optimizer's
state is left out: go on with no_load_optim or finetune.
"""

import argparse
import os
import sys
from typing import Any, List, Optional, Sequence

import yaml

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported: no GPU is needed or used
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from megatron.checkpointing.adapters import refuse_adapters  # noqa: E402
from megatron.checkpointing.config_texts import with_settings  # noqa: E402
from megatron.checkpointing.grow import GrownReader, check_growth, grown_settings  # noqa: E402
from megatron.checkpointing.model_settings import checkpoint_folder, config_paths, inference_args  # noqa: E402
from megatron.checkpointing.reader import CheckpointReader  # noqa: E402
from megatron.checkpointing.reshard import write_resharded  # noqa: E402
from megatron.checkpointing.stamp import check_stamp  # noqa: E402
from megatron.errors import NeoXError  # noqa: E402
from megatron.neox_arguments.equal_widths import by_layer_text, one_or_each  # noqa: E402
from megatron.neox_arguments.loading import load_files  # noqa: E402
from tools.options import at_least  # noqa: E402

ADDED = "head_dim.yml"
"""In `configs/`: the changed settings that none of the model's own files names."""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the tool; returns the exit status."""
    options = parse(arguments)
    try:
        lines = grow(options)
    except (NeoXError, OSError) as error:
        print(f"grow_head_dim: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="IN", help="save folder, or a global_step<N> folder in it")
    parser.add_argument("out", metavar="OUT", help="new or empty folder")
    parser.add_argument(
        "--head-dim", type=_width, required=True, metavar="D", help="wider than the checkpoint's, or widths by layer"
    )
    parser.add_argument("--zeros", action="store_true", help="no random numbers: the new dimensions cannot be trained")
    parser.add_argument("--config", nargs="+", default=(), metavar="YML", help="by default those kept in IN")
    parser.add_argument("--iteration", type=at_least(0), help="by default the one `latest` names")
    return parser.parse_args(arguments)


def _width(text: str) -> Any:
    """As head_dim in a YAML file: a number, or a list or mapping of widths by layer."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if isinstance(value, (list, dict)):
        return value
    return at_least(1)(text)


def _widths(neox_args) -> str:
    return by_layer_text(one_or_each(neox_args, lambda geometry: geometry.head_dim))


def grow(options: argparse.Namespace) -> List[str]:
    """Write the new checkpoint; returns what there is to say. Raises CheckpointError, ConfigError, ConversionError."""
    reader = CheckpointReader(checkpoint_folder(options.source, options.iteration))
    refuse_adapters(reader)
    _, texts = load_files(options.config or config_paths(reader.folder))
    neox_args = inference_args(reader, options.config)
    check_stamp(neox_args, reader.folder)
    check_growth(neox_args, options.head_dim)
    settings = grown_settings(neox_args, options.head_dim)
    grown_args = inference_args(reader, options.config, changes=settings)
    print(f"{reader.folder}: head_dim {_widths(neox_args)} -> {_widths(grown_args)}")
    weights = GrownReader(reader, neox_args, grown_args, learnable=not options.zeros)
    texts = with_settings(texts, settings, ADDED)
    folder = write_resharded(weights, grown_args, options.out, reader.pipe_parallel_size, texts)
    listed = ", ".join(f"{name}: {value}" for name, value in settings.items())
    return [
        f"wrote {folder}",
        f"changed in the configs beside it, and to be changed in your own: {listed}",
        *_notices(neox_args, options),
        f"the optimizer's state is left out: go on with load: {options.out} and no_load_optim: true or finetune: true",
    ]


def _notices(neox_args, options: argparse.Namespace) -> List[str]:
    if options.zeros:
        return ["the new dimensions are all zero: training does not reach them"]
    if neox_args.layer_attention().qk_norm is not None:
        return ["queries and keys are normed: of their new dimensions, training reaches those of the values only"]
    return []


if __name__ == "__main__":
    sys.exit(main())
