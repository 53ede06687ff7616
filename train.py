"""Train a model: python deepy.py train.py CONFIG [CONFIG ...]"""

from megatron.entry import run_main


def main():
    from megatron.neox_arguments import NeoXArgs
    from megatron.training import pretrain

    neox_args = NeoXArgs.consume_neox_args()
    neox_args.configure_distributed_args()
    neox_args.build_tokenizer()
    pretrain(neox_args)


if __name__ == "__main__":
    run_main(main, computes=True)
