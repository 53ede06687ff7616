"""NVIDIA Transformer Engine behind the interfaces of our own layers; the only package that imports it."""
