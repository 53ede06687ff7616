"""What attention heads do: figures of their scores, their circuits and their gradients, layer by layer."""
