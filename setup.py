"""Package metadata. `pip install -e .` makes `megatron` and `tools` importable from anywhere."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
OPTIONAL = ("dev", "eval", "patch", "te", "tokenizers", "tensorboard", "wandb")


def requirements(name):
    """The lines of one requirements file, with the files it names by -r taken in."""
    wanted = []
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("-r "):
            wanted += requirements(line[3:].strip())
        elif line:
            wanted.append(line)
    return wanted


setup(
    name="neox-head-dim",
    version=re.search(r'__version__ = "(.+)"', (ROOT / "megatron" / "__init__.py").read_text()).group(1),
    description="A GPT-NeoX-compatible training framework with an explicit attention head_dim",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megatron*", "tools*"]),
    package_data={"tools.neox_patch": ["files/**"], "tools.head_dim": ["data/*.json", "studies/*.yml", "claims/*.yml"]},
    install_requires=requirements("requirements.txt"),
    extras_require={name: requirements(f"requirements-{name}.txt") for name in OPTIONAL},
)
