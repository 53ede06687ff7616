"""Runs models in a checkout with its own attention and with Transformer Engine's, on the same weights. A program.

    python run_transformer_engine.py CHECKOUT CASES.pt OUT_FOLDER STORE_FILE        (one process per rank)

Each case (see `checkouts.case`) gives OUT_FOLDER/NAME.rankR.pt: {"native": results, "te": results}, the latter under
native names and in native rows.
"""

import os
import sys
import zlib

import run_model
import shims

NAMES = {"attention.query_key_value.": "attention.qkv.", "attention.dense.": "attention.proj."}


def main(checkout, cases_file, out, store_file):
    """Run all cases of the file."""
    _install_te()  # reads torch.cuda, so before it is another's
    shims.install()
    import torch

    cases = torch.load(cases_file, weights_only=False)
    shims.use_checkout(checkout)
    rank, _ = shims.start_ranks(store_file)
    run_model.load_layers = _put
    for case in cases:
        torch.save(_both(case), os.path.join(out, f"{case['name']}.rank{rank}.pt"))
    torch.distributed.barrier()
    os._exit(0)


def _install_te():
    """With this project's stand-in; then its package `tests` makes room for the checkout's."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from tests.helpers.te import install_te

    install_te()
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "megatron")]:
        del sys.modules[name]


def _both(case):
    native = run_model._guarded(dict(case, weights=_disturb, do=[*case["do"], "state"]))
    if "error" in native:
        return {"native": native, "te": {}}
    args = case["args"]
    order = _rows(args, args["model_parallel_size"])

    def put(name, parameter):
        values = native["state"][_native(name)]
        return values[order] if "attention.qkv." in name else values

    te = run_model._guarded(dict(case, args=dict(args, te_mha=True), weights=put))
    te["grads"] = {
        _native(name): values[order.argsort()] if "attention.qkv." in name else values
        for name, values in te.get("grads", {}).items()
    }
    return {"native": native, "te": te}


def _put(model, values):
    """Set all parameters to values(name, parameter)."""
    import torch

    with torch.no_grad():
        for name, parameter in run_model.named(model, "named_parameters").items():
            parameter.copy_(values(name, parameter))


def _disturb(name, parameter):
    """Biases that are not zero, and other weights on each rank where the ranks have parts."""
    import torch

    rank = int(os.environ["RANK"]) if getattr(parameter, "model_parallel", False) else 0
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{rank}".encode()))
    return parameter.detach() + 0.1 * torch.randn(parameter.shape, generator=generator)


def _native(name):
    for native, engine in NAMES.items():
        name = name.replace(engine, native)
    return name


def _rows(args, ranks):
    """For each row of a rank's qkv weight in Transformer Engine, the number of that row in GPT-NeoX's."""
    import torch

    heads, width = args["num_attention_heads"] // ranks, args["head_dim"]
    kv_heads = args.get("num_kv_heads", args["num_attention_heads"]) // ranks
    rows = torch.arange((heads + 2 * kv_heads) * width).view(-1, width)
    if kv_heads == heads:
        return rows.flatten()  # each head's q, k and v in both
    q, k, v = rows.split([heads, kv_heads, kv_heads])
    return torch.cat([q.view(kv_heads, -1, width), k[:, None], v[:, None]], dim=1).flatten()


if __name__ == "__main__":
    main(*sys.argv[1:])
