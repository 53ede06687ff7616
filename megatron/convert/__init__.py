"""Hugging Face checkpoints in and out.

families/   what each model type is: its config, both ways, and one table of weights, read in both directions
rules, operations   the table's lines, and the invertible operations in them
importing, exporting   the two directions, tensor by tensor; choose: which family can hold a model
hf_source, hf_writer   their folders, read and written one tensor at a time
neox_source   our checkpoints as whole parameters; they are written by megatron.checkpointing.reshard
leftovers, precision   what must stop a conversion before anything is written
side_files, exported_tokenizer, older_config   what a folder holds beside the weights
"""
