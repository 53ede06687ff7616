"""Gives an existing GPT-NeoX checkout an explicit `head_dim`: `python -m tools.neox_patch PATH`."""
