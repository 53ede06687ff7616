"""`python -m tools.neox_patch`; see command.py."""

import importlib.util
import sys

if importlib.util.find_spec("libcst") is None:
    print("neox_patch: libcst is not installed: pip install -r requirements/requirements-patch.txt", file=sys.stderr)
    sys.exit(2)

from tools.neox_patch.command import main  # noqa: E402

sys.exit(main())
