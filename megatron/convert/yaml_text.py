"""Settings as the text of a YAML file."""

from typing import Any, Mapping

import yaml


def yaml_lines(settings: Mapping[str, Any]) -> str:
    """One setting a line; lists and tables within it."""
    lines = []
    for key, value in settings.items():
        if isinstance(value, (dict, list)):
            lines.append(f"{key}: {yaml.safe_dump(value, sort_keys=False, default_flow_style=True, width=10**6)}")
        else:
            lines.append(yaml.safe_dump({key: value}, default_flow_style=False, width=10**6))
    return "".join(lines)
