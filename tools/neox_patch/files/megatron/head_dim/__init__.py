"""Attention heads of any width: `head_dim` need not be hidden_size / num_attention_heads."""
