"""Hugging Face checkpoints in and out.

families/   what each model type is: its config, both ways, and one table of weights, read in both directions
rules, operations   the table's lines, and the invertible operations in them
"""
