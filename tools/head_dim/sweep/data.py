"""The text that the runs of a study read, prepared once; and what tells it from another."""

import os
import re
import zlib
from typing import Any, Dict

from megatron.errors import DataError
from tools.datasets.corpora import Preparation, prepare_dataset
from tools.head_dim.sweep.study import Data, Study

TOKENIZER = "HFTokenizer"


def prepare(study: Study, out: str, data_dir: str) -> Dict[str, Any]:
    """Make the study's data unless it is there. Returns the settings that name it, paths relative to `out`, where the
    runs are started; none if the study's settings name data already.

    Raises ConfigError or DataError.
    """
    if study.data is None:
        return {}
    made = _preparation(study.data, data_dir)
    prepare_dataset(made)
    return {
        "data_path": os.path.relpath(made.data_path, out),
        "tokenizer_type": TOKENIZER,
        "vocab_file": os.path.relpath(made.tokenizer_file, out),
    }


def identity(settings: Dict[str, Any], out: str) -> Dict[str, Any]:
    """Of the files that a run's settings name: sizes, and a sum over the index, which has the length of every document.

    Raises DataError.
    """
    named = [settings.get(key) for key in ("data_path", "train_data_paths", "valid_data_paths")]
    prefixes = [path for value in named if value for path in (value if isinstance(value, list) else [value])]
    found = {}
    for prefix in prefixes:
        path = os.path.join(out, prefix)
        try:
            with open(f"{path}.idx", "rb") as index:
                found[prefix] = [os.path.getsize(f"{path}.bin"), zlib.crc32(index.read())]
        except OSError as error:
            raise DataError(f"data set {prefix}: {error.strerror}: {error.filename}") from None
    return found


def _preparation(data: Data, data_dir: str) -> Preparation:
    """Each kind of data has a folder of its own, so that studies can share `data_dir`."""
    kind = re.sub(r"[^A-Za-z0-9]+", "_", os.path.basename(data.source.split(",")[0]))
    sizes = f"{data.max_bytes or 'all'}_{data.vocab_size}"
    return Preparation(
        dataset=data.source,
        tokenizer_type=TOKENIZER,
        data_dir=os.path.join(data_dir, f"{kind}_{sizes}"),
        vocab_size=data.vocab_size,
        max_bytes=data.max_bytes,
    )
