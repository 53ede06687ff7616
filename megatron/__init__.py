"""A GPT-NeoX-compatible framework in which the width of an attention head is a free choice."""

__version__ = "0.1.0"
