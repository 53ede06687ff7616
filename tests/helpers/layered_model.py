"""plain_model with widths that differ between layers and inside of them; each group of heads is a model of its own."""

import torch

from tests.helpers.plain_model import Plain, slopes

BY_HEADS = ("qk_layernorm", "alibi_embed", "rotary_emb")
"""What a group of heads has for itself."""


class Layered(Plain):
    """heads: for each layer, (query heads, kv heads, width) of each of its groups. Of the settings, head_dim and
    num_kv_heads are not read."""

    def __init__(self, config, vocabulary, heads, seed=0):
        self.groups = heads
        super().__init__({**config, "head_dim": 1, "num_kv_heads": 1}, vocabulary, seed)

    def _layer(self, index):
        groups, whole, total = self.groups[index - 2], {}, self.n
        for self.n, self.m, self.d in groups:
            for (_, name), value in super()._layer(index):
                whole.setdefault(name, []).append(value)
        self.n = total
        for name, values in whole.items():
            if "query_key_value" in name:
                yield (index, name), torch.cat(values)
            elif name == "attention.dense.weight":
                yield (index, name), torch.cat(values, 1)
            elif len(groups) > 1 and any(part in name for part in BY_HEADS):
                for number, value in enumerate(values):
                    yield (index, name.replace("attention.", f"attention.groups.{number}.")), value
            else:
                yield (index, name), values[0]

    def logits(self, tokens, tp=1):
        self.layers_to_come = iter(self.groups)
        return super().logits(tokens, tp)

    def _attention(self, x, w, tp):
        """The sum of what the groups give, each through its own columns of the output projection."""
        groups, total = next(self.layers_to_come), self.n
        row = column = self.first = 0
        result = 0.0
        for number, (self.n, self.m, self.d) in enumerate(groups):
            width, rows = self.n * self.d, (self.n + 2 * self.m) * self.d
            own = {name.replace(f"attention.groups.{number}.", "attention."): value for name, value in w.items()}
            for name in ("weight", "bias"):
                own[f"attention.query_key_value.{name}"] = w[f"attention.query_key_value.{name}"][row : row + rows]
            own["attention.dense.weight"] = w["attention.dense.weight"][:, column : column + width]
            if number > 0:
                del own["attention.dense.bias"]
            if "attention.rpe.weight" in w:
                own["attention.rpe.weight"] = w["attention.rpe.weight"][:, self.first : self.first + self.n]
            result = result + super()._attention(x, own, tp)
            row, column, self.first = row + rows, column + width, self.first + self.n
        self.n = total
        return result

    def _position_bias(self, ahead, w):
        if self.c["pos_emb"] == "alibi":
            own = slopes(self.c["num_attention_heads"])[self.first : self.first + self.n]
            return own[:, None, None] * ahead.clamp(max=0)
        return super()._position_bias(ahead, w)
