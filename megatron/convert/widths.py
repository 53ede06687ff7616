"""The numbers that the tables' shapes are written in."""

from dataclasses import dataclass
from typing import Dict, Tuple

from megatron.geometry import HeadGeometry, MLPGeometry


@dataclass(frozen=True)
class LayerWidths:
    """Of one transformer layer, or (any of them) of the parts outside the layers.

    vocabulary: rows of Hugging Face's tables. padded_vocabulary: rows of ours. positions: rows of a learned table.
    """

    geometry: HeadGeometry
    mlp: MLPGeometry
    vocabulary: int
    padded_vocabulary: int
    positions: int

    @classmethod
    def of_layer(cls, neox_args, vocabulary: int, layer_number: int = 0) -> "LayerWidths":
        """vocabulary: Hugging Face's; the rest is the arguments'."""
        return cls(
            neox_args.head_geometry(layer_number),
            neox_args.mlp_geometry(layer_number),
            vocabulary,
            neox_args.padded_vocab_size,
            neox_args.max_position_embeddings,
        )

    def shape(self, letters: str) -> Tuple[int, ...]:
        """A shape written in letters, e.g. "nd h": h hidden, nd query width, md key/value width, qkv all three, d
        head_dim, f one MLP branch, v Hugging Face's vocabulary, p positions, and plain numbers."""
        return tuple(self._letters[letter] if letter in self._letters else int(letter) for letter in letters.split())

    @property
    def _letters(self) -> Dict[str, int]:
        geometry = self.geometry
        return {
            "h": geometry.hidden_size,
            "nd": geometry.query_hidden_size,
            "md": geometry.kv_hidden_size,
            "qkv": geometry.qkv_hidden_size,
            "d": geometry.head_dim,
            "f": self.mlp.ffn_hidden_size,
            "v": self.vocabulary,
            "p": self.positions,
        }
