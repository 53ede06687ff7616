"""Transformer Engine for tests on the CPU: where its wheel is, and how a process gets it.

The wheel lies outside of site-packages, because libraries that look for Transformer Engine would take it for an
installed one. Tests of it say `pytestmark = requires_te` and call `install_te()`; so does each rank of a distributed
test.
"""

import sys
import warnings
from pathlib import Path

import pytest

VERSION = "1.12"
WHEEL = Path(sys.prefix) / f"transformer-engine-{VERSION}"

requires_te = pytest.mark.skipif(
    not (WHEEL / "transformer_engine").is_dir(),
    reason=f"Transformer Engine {VERSION} is not in {WHEEL}; `make setup` puts it there",
)


def install_te():
    """Make `import transformer_engine` work in this process: TE's real Python over tests.helpers.te_kernels."""
    from tests.helpers import te_standin

    sys.path.insert(0, str(WHEEL))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about what TE 1.12 uses
            te_standin.install()
    finally:
        sys.path.remove(str(WHEEL))  # to the rest of the process it is imported, not installed
