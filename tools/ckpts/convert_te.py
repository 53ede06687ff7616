"""Write a checkpoint's weights for a model with Transformer Engine's parts, or for one without them.

    python tools/ckpts/convert_te.py IN OUT --to te|native [--mha] [--layernorm-mlp] [--norms] [--linears]
    python tools/ckpts/convert_te.py IN OUT --to te --config model.yml local.yml

IN is a save folder (its `latest` is taken) or one global_step<N> folder. OUT gets global_step<N>/ and `latest`, with
the same parallel sizes. Every weight is moved, none is computed with, so the way there and back is exact.

  --mha            te_mha              attention.query_key_value, dense          <-> attention.qkv, proj
  --layernorm-mlp  te_layernorm_mlp    post_attention_layernorm, mlp.linear1, 2  <-> mlp.layer_norm_*, fc1_*, fc2_*
  --norms          te_layernorm, te_rmsnorm        x.weight or x.scale           <-> x.norm.weight
  --linears        te_columnparallel, te_rowparallel       the same weights in both: only the settings change

Without these: the parts in which the config given differs from the checkpoint, or all of them if none is given. The
optimizer's state is not converted, so the result is for inference and fine-tuning (no_load_optim or finetune).
"""

import argparse
import os
import sys
from typing import List, Optional, Sequence

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported: no GPU is needed or used
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a tokenizer that is not on this machine is not waited for
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from megatron.checkpointing import te_convert  # noqa: E402
from megatron.checkpointing.adapters import refuse_adapters  # noqa: E402
from megatron.checkpointing.config_texts import with_settings  # noqa: E402
from megatron.checkpointing.model_settings import checkpoint_folder, config_paths  # noqa: E402
from megatron.checkpointing.reader import CheckpointReader  # noqa: E402
from megatron.checkpointing.reshard import write_resharded  # noqa: E402
from megatron.checkpointing.stamp import check_stamp  # noqa: E402
from megatron.checkpointing.te_names import option  # noqa: E402
from megatron.errors import NeoXError  # noqa: E402
from megatron.neox_arguments.loading import load_files  # noqa: E402

ADDED = "transformer_engine.yml"
"""In `configs/`: the settings of Transformer Engine that none of the model's own files names."""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the tool; returns the exit status."""
    options = parse(arguments)
    try:
        lines = convert(options)
    except (NeoXError, OSError) as error:
        print(f"convert_te: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="IN", help="save folder, or a global_step<N> folder in it")
    parser.add_argument("out", metavar="OUT", help="new or empty folder")
    parser.add_argument("--to", choices=("te", "native"), required=True)
    for part in te_convert.CHOICES:
        parser.add_argument(option(part), dest="parts", action="append_const", const=part, help="see above")
    parser.add_argument(
        "--config", nargs="+", default=(), metavar="YML", help="of the model wanted; by default those kept in IN"
    )
    parser.add_argument("--iteration", type=int, help="by default the one `latest` names")
    return parser.parse_args(arguments)


def convert(options: argparse.Namespace) -> List[str]:
    """Write the new checkpoint; returns what there is to say. Raises CheckpointError, ConfigError, ConversionError."""
    reader = CheckpointReader(checkpoint_folder(options.source, options.iteration))
    refuse_adapters(reader)
    values, texts = load_files(options.config or config_paths(reader.folder))
    source, target = _forms(options, reader, values)
    neox_args = te_convert.model_args(reader, options.config, source)
    check_stamp(neox_args, reader.folder)
    target_args = te_convert.target_args(reader, options.config, target)
    changes = te_convert.config_changes(values, target)
    print(f"{reader.folder}: {te_convert.described(_differences(source, target))}")
    weights = te_convert.ConvertedReader(reader, neox_args, target)
    texts = with_settings(texts, changes, ADDED)
    folder = write_resharded(weights, target_args, options.out, reader.pipe_parallel_size, texts)
    return [f"wrote {folder}", *_notices(weights.left_out, changes, options.out)]


def _forms(options: argparse.Namespace, reader: CheckpointReader, values) -> tuple:
    """The settings before and after."""
    to_te = options.to == "te"
    source = te_convert.saved_settings(reader, values)
    if options.config and not options.parts:
        target = te_convert.wanted_settings(values)
    else:
        target = te_convert.with_parts(source, options.parts or te_convert.CHOICES, to_te)
    te_convert.check_target(source, target, to_te)
    return source, target


def _differences(source, target) -> dict:
    return {name: value for name, value in target.items() if value != source[name]}


def _notices(left_out: int, changes, out: str) -> List[str]:
    lines = []
    if left_out:
        lines.append(
            f"{left_out} _extra_state entries of Transformer Engine (FP8 scaling factors, empty without FP8) are left "
            "out: FP8 scaling starts afresh"
        )
    if changes:
        listed = te_convert.described(changes)
        lines.append(f"changed in the configs beside it, and to be changed in your own: {listed}")
    return [
        *lines,
        f"the optimizer's state is not converted: go on with load: {out} and no_load_optim: true or finetune: true",
    ]


if __name__ == "__main__":
    sys.exit(main())
