"""A small data set, prepared once by the project's own program."""

import pytest

from tests.e2e.programs import MODEL, ROOT, succeed, write_config


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    """A folder with data/pydocs and model.yml."""
    folder = tmp_path_factory.mktemp("workplace")
    sizes = ("--max-bytes", 400_000, "--vocab-size", 500)
    succeed(folder, ROOT / "prepare_data.py", "pydocs", "-d", "data", *sizes)
    write_config(folder, "model.yml", **MODEL)
    return folder
