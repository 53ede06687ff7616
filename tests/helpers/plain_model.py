"""GPT-NeoX's model and checkpoint files once more, in plain torch and fp64, sharing no code with megatron.

Weights are a dictionary {(layer index, name): fp32 tensor} of the undivided model; a config is a dictionary of
GPT-NeoX's settings, with GPT-NeoX's defaults for those left out. One fused tensor is cut by the rules that GPT-NeoX's
files follow: see `rank_share`.
"""

import json
import math
import os
import random

import numpy as np
import torch
import torch.nn.functional as F

DEFAULTS = dict(
    norm="layernorm",
    pos_emb="learned",
    rotary_pct=1.0,
    rotary_emb_base=10000,
    no_weight_tying=False,
    gpt_j_residual=False,
    gpt_j_tied=False,
    activation="gelu",
    bias_gelu_fusion=False,
    use_bias_in_attn_linear=True,
    use_bias_in_mlp=True,
    use_qk_layernorm=False,
    num_kv_heads=None,
    head_dim=None,
    softmax_scale=None,
    sliding_window_width=None,
    rpe_num_buckets=32,
    rpe_max_distance=128,
    layernorm_epsilon=1e-5,
    rms_norm_epsilon=1e-8,
    rotary_save_freqs_buffer=False,
)
GATES = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu, "bilinear": lambda x: x, "glu": torch.sigmoid}


class Plain:
    """A model's numbers and its weights."""

    def __init__(self, config, vocabulary, seed=0):
        self.c = {**DEFAULTS, **config}
        self.vocabulary = vocabulary
        self.layers = self.c["num_layers"]
        self.h, self.n = self.c["hidden_size"], self.c["num_attention_heads"]
        self.m = self.c["num_kv_heads"] or self.n
        self.d = self.c["head_dim"] or self.h // self.n
        self.gated = self.c["activation"] in GATES
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = self._draw()

    # Weights

    def _normal(self, *shape, std=0.1, mean=0.0):
        return torch.randn(*shape, generator=self.generator) * std + mean

    def _norm(self, index, prefix, shape):
        if self.c["norm"] == "layernorm":
            names = {"weight": 1.0, "bias": 0.0}
        else:
            names = {"scale": 1.0} if self.c["norm"] == "rmsnorm" else {"g": 3.0}
        for name, mean in names.items():
            size = (1,) if name == "g" else shape
            yield (index, f"{prefix}.{name}"), self._normal(*size, std=0.2, mean=mean)

    def _linear(self, index, prefix, rows, columns, bias):
        yield (index, f"{prefix}.weight"), self._normal(rows, columns, std=1.2 * columns**-0.5)
        if bias:
            yield (index, f"{prefix}.bias"), self._normal(rows, std=0.3)

    def _draw(self):
        c, h = self.c, self.h
        weights = {(0, "word_embeddings.weight"): self._normal(self.vocabulary, h, std=0.5)}
        if c["pos_emb"] == "learned":
            weights[0, "position_embeddings.weight"] = self._normal(c["max_position_embeddings"], h, std=0.5)
        if c["pos_emb"] == "sinusoidal":
            weights[0, "position_embeddings.inv_freq"] = 10000 ** -(torch.arange(0, h, 2).float() / h)
        rpe = self._normal(c["rpe_num_buckets"], self.n, std=0.3)
        for index in range(2, 2 + self.layers):
            weights.update(self._layer(index))
            if c["pos_emb"] == "rpe":
                weights[index, "attention.rpe.weight"] = rpe
        weights.update(self._norm(self.layers + 3, "norm", (h,)))
        if c["no_weight_tying"]:
            weights.update(self._linear(self.layers + 4, "final_linear", self.vocabulary, h, False))
        return weights

    def _layer(self, index):
        c, q = self.c, self.n * self.d
        yield from self._norm(index, "input_layernorm", (self.h,))
        yield from self._norm(index, "post_attention_layernorm", (self.h,))
        bias = c["use_bias_in_attn_linear"]
        yield from self._linear(index, "attention.query_key_value", q + 2 * self.m * self.d, self.h, bias)
        yield from self._linear(index, "attention.dense", self.h, q, bias)
        if c["use_qk_layernorm"]:
            yield from self._norm(index, "attention.qk_layernorm", (self.n, self.d))
        if c["pos_emb"] == "alibi":
            yield (index, "attention.alibi_embed.slopes"), slopes(self.n).float()
        if c["rotary_save_freqs_buffer"]:
            yield (index, "attention.rotary_emb.inv_freq"), self.inverse_frequencies().float()
        width = self.mlp_width()
        yield from self._linear(index, "mlp.linear1", width * (1 + self.gated), self.h, c["use_bias_in_mlp"])
        yield from self._linear(index, "mlp.linear2", self.h, width, c["use_bias_in_mlp"])

    def mlp_width(self):
        """One branch: facts of GPT-NeoX, where the two roundings agree."""
        c = self.c
        if c.get("ffn_hidden_size"):
            return c["ffn_hidden_size"]
        whole, multiple = c.get("intermediate_size") or 4 * self.h, c.get("mlp_multiple_of", 1)
        if not self.gated:
            assert whole % (2 * multiple) == 0
            return whole
        both = math.ceil(int(whole * 2 / 3) / (2 * multiple)) * 2 * multiple
        return both // 2

    def inverse_frequencies(self):
        ndims = int(self.d * self.c["rotary_pct"])
        return self.c["rotary_emb_base"] ** -(torch.arange(0, ndims, 2).double() / ndims)

    # Function

    def logits(self, tokens, tp=1):
        """int64 [b, s] -> fp64 [b, s, v]. tp matters to qk_layernorm alone: it averages over the heads of a rank."""
        w = {key: value.double() for key, value in self.weights.items()}
        length = tokens.shape[1]
        x = w[0, "word_embeddings.weight"][tokens]
        if self.c["pos_emb"] == "learned":
            x = x + w[0, "position_embeddings.weight"][:length]
        if self.c["pos_emb"] == "sinusoidal":
            angles = torch.arange(length).double()[:, None] * w[0, "position_embeddings.inv_freq"]
            x = x + torch.cat([angles.sin(), angles.cos()], -1)
        for index in range(2, 2 + self.layers):
            x = self._block(x, {name: value for (at, name), value in w.items() if at == index}, tp)
        x = self._apply_norm(x, {name: value for (at, name), value in w.items() if at == self.layers + 3}, "norm")
        head = (
            w[self.layers + 4, "final_linear.weight"] if self.c["no_weight_tying"] else w[0, "word_embeddings.weight"]
        )
        return x @ head.T

    def _block(self, x, w, tp):
        normed = self._apply_norm(x, w, "input_layernorm")
        attention = self._attention(normed, w, tp)
        if not self.c["gpt_j_residual"]:
            x = x + attention
            return x + self._mlp(self._apply_norm(x, w, "post_attention_layernorm"), w)
        if not self.c["gpt_j_tied"]:
            normed = self._apply_norm(x, w, "post_attention_layernorm")
        return x + attention + self._mlp(normed, w)

    def _apply_norm(self, x, w, prefix, dims=1):
        over = tuple(range(-dims, 0))
        if self.c["norm"] == "layernorm":
            centred = x - x.mean(over, keepdim=True)
            scaled = centred / (centred.square().mean(over, keepdim=True) + self.c["layernorm_epsilon"]).sqrt()
            return scaled * w[f"{prefix}.weight"] + w[f"{prefix}.bias"]
        if self.c["norm"] == "rmsnorm":
            scaled = x / (x.square().mean(-1, keepdim=True) + self.c["rms_norm_epsilon"]).sqrt()
            return scaled * w[f"{prefix}.scale"]
        return x / x.norm(dim=-1, keepdim=True) * w[f"{prefix}.g"]

    def _attention(self, x, w, tp):
        n, m, d, c = self.n, self.m, self.d, self.c
        b, s, _ = x.shape
        mixed = self._affine(x, w, "attention.query_key_value")
        if m == n:
            q, k, v = mixed.view(b, s, n, 3, d).unbind(3)
        else:
            q, k, v = mixed.split([n * d, m * d, m * d], -1)
            q, k, v = q.view(b, s, n, d), k.view(b, s, m, d), v.view(b, s, m, d)
            k, v = k.repeat_interleave(n // m, 2), v.repeat_interleave(n // m, 2)
        if c["use_qk_layernorm"]:
            q, k = (self._qk_norm(each, w, tp) for each in (q, k))
        if c["pos_emb"] == "rotary":
            q, k = self._rotate(q), self._rotate(k)
        scores = torch.einsum("bsnd,btnd->bnst", q, k) * (c["softmax_scale"] or d**-0.5)
        ahead = torch.arange(s)[None, :] - torch.arange(s)[:, None]  # [s, t]: key minus query
        scores = scores + self._position_bias(ahead, w)
        hidden = ahead > 0
        if c["sliding_window_width"]:
            hidden = hidden | (ahead < -c["sliding_window_width"])  # so many beside the query itself
        context = torch.einsum("bnst,btnd->bsnd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        return self._affine(context.reshape(b, s, n * d), w, "attention.dense")

    def _qk_norm(self, x, w, tp):
        """Each rank has its own norm, over its heads together (layernorm) or each head apart (rmsnorm)."""
        shares = []
        for rank, heads in enumerate(x.chunk(tp, 2)):
            rows = slice(rank * self.n // tp, (rank + 1) * self.n // tp)
            own = {name: value[rows] for name, value in w.items() if "qk_layernorm" in name}
            shares.append(self._apply_norm(heads, own, "attention.qk_layernorm", dims=2))
        return torch.cat(shares, 2)

    def _rotate(self, x):
        frequencies = self.inverse_frequencies()
        angles = torch.arange(x.shape[1]).double()[:, None] * frequencies
        cos, sin = (torch.cat([part, part], -1)[:, None, :] for part in (angles.cos(), angles.sin()))
        half = len(frequencies)
        turned, rest = x[..., : 2 * half], x[..., 2 * half :]
        swapped = torch.cat([-turned[..., half:], turned[..., :half]], -1)
        return torch.cat([turned * cos + swapped * sin, rest], -1)

    def _position_bias(self, ahead, w):
        """[n, s, t] or 0."""
        if self.c["pos_emb"] == "alibi":
            return slopes(self.n)[:, None, None] * ahead.clamp(max=0)
        if self.c["pos_emb"] == "rpe":
            table = w["attention.rpe.weight"][self._buckets((-ahead).clamp(min=0))]  # [s, t, n]
            return table.permute(2, 0, 1) * self.d**0.5
        return 0.0

    def _buckets(self, distance):
        exact = self.c["rpe_num_buckets"] // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.c["rpe_max_distance"] / exact)
        far = (exact + (ratio * (self.c["rpe_num_buckets"] - exact)).long()).clamp(max=self.c["rpe_num_buckets"] - 1)
        return torch.where(distance < exact, distance, far)

    def _mlp(self, x, w):
        inner = self._affine(x, w, "mlp.linear1")
        if self.gated:
            up, gate = inner.chunk(2, -1)
            inner = up * GATES[self.c["activation"]](gate)
        elif self.c["activation"] == "relu":
            inner = F.relu(inner)
        else:
            inner = F.gelu(inner, approximate="tanh" if self.c["bias_gelu_fusion"] else "none")
        return self._affine(inner, w, "mlp.linear2")

    def _affine(self, x, w, prefix):
        return x @ w[f"{prefix}.weight"].T + w.get(f"{prefix}.bias", 0.0)

    # Files

    def rank_share(self, key, rank, tp):
        """What tensor-parallel rank `rank` of `tp` keeps of a tensor."""
        _, name = key
        whole = self.weights[key]
        if name.endswith(("dense.bias", "linear2.bias")) and self.c["gpt_j_residual"]:
            apart = 0.7 * torch.arange(whole.numel()).sin()  # the ranks' copies are added up
            return whole / tp + apart * (rank - (tp - 1) / 2)
        if name.endswith(("dense.weight", "linear2.weight")):
            return whole.chunk(tp, 1)[rank].clone()
        if "query_key_value" in name and self.m != self.n:
            blocks = whole.split([self.n * self.d, self.m * self.d, self.m * self.d])
        elif "linear1" in name and self.gated:
            blocks = whole.chunk(2)
        elif "rpe" in name:
            return whole.chunk(tp, 1)[rank].clone()
        elif any(part in name for part in ("query_key_value", "linear", "word_emb", "qk_layernorm", "slopes")):
            if name.endswith(("linear2.bias", "layernorm.g")):
                return whole.clone()
            blocks = [whole]
        else:
            return whole.clone()
        return torch.cat([block.chunk(tp)[rank] for block in blocks])

    def save(self, folder, tp=1, sequential=False, written_config=None, dtype=torch.float32):
        """Write `folder`/global_step7 as GPT-NeoX does, and `latest`; returns the step's folder."""
        step = os.path.join(folder, "global_step7")
        os.makedirs(os.path.join(step, "configs"))
        for rank in range(tp):
            shares = {key: self.rank_share(key, rank, tp).to(dtype) for key in self.weights}
            module = {f"sequential.{index}.{name}": value for (index, name), value in shares.items()}
            state = {**self._rank_state(tp), "module": module if sequential else None}
            torch.save(state, os.path.join(step, f"mp_rank_{rank:02d}_model_states.pt"))
            for index in () if sequential else {index for index, _ in shares}:
                layer = {name: value for (at, name), value in shares.items() if at == index}
                torch.save(layer, os.path.join(step, f"layer_{index:02d}-model_{rank:02d}-model_states.pt"))
        with open(os.path.join(step, "configs", "model.yml"), "w") as file:
            json.dump(written_config or self.c, file)  # JSON is YAML
        with open(os.path.join(folder, "latest"), "w") as file:
            file.write("global_step7")
        return step

    def _rank_state(self, tp):
        names = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
        return {
            "iteration": 7,
            "mp_world_size": tp,
            "optimizer": None,
            "args": {
                **{name: self.c[name] for name in names},
                "make_vocab_size_divisible_by": 128,
                "padded_vocab_size": self.vocabulary,
                "tokenizer_type": "HFTokenizer",
                "model_parallel_size": tp,
            },
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
        }


def slopes(heads):
    """Press et al. 2022: powers of 2^(-8/heads); between powers of two every other slope of the next one is used."""
    if heads & (heads - 1) == 0:
        return torch.tensor([2 ** (-8 * (i + 1) / heads) for i in range(heads)], dtype=torch.float64)
    below = 2 ** (heads.bit_length() - 1)
    return torch.cat([slopes(below), slopes(2 * below)[::2][: heads - below]])
