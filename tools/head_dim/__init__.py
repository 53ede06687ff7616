"""Choose, check and cost a head_dim: `python -m tools.head_dim COMMAND`."""
