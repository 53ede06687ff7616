"""Token data sets on disk and the batches made from them.

`build_train_valid_test_data_iterators` is fetched on first use: preparing data needs numpy only, and should not
wait for torch and DeepSpeed to load.
"""

__all__ = ["build_train_valid_test_data_iterators"]


def __getattr__(name):
    if name in __all__:
        from megatron.data import data_utils

        return getattr(data_utils, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
