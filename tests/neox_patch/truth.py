"""Two independent truths for what a patched checkout computes, and the weights that all of them share.

`Weights` draws a model's master tensors and writes them as GPT-NeoX's files (tests.helpers.plain_model); its `logits`
is a plain fp64 model. `transformers_model` is Llama, Mistral or Qwen3 with the same weights.
"""

import torch

from tests.helpers.plain_model import Plain


class Weights(Plain):
    """Plain, with norms over each head of queries and of keys (whose function it does not know)."""

    def __init__(self, config, vocabulary, seed=0):
        config = dict(config)
        self.per_head = config.get("qk_norm_type") == "per_head"
        if config.get("qk_norm_type") == "joint":
            config["use_qk_layernorm"] = True
        super().__init__(config, vocabulary, seed)

    def _layer(self, index):
        yield from super()._layer(index)
        if self.per_head:
            for name in ("q_layernorm", "k_layernorm"):
                yield from self._norm(index, f"attention.{name}", (self.d,))

    @property
    def has_function(self):
        """Whether `logits` computes this model."""
        return not self.per_head

    def joined(self, key, shares):
        """The master of the ranks' shares of a tensor (or gradient); a replicated one must be equal on all ranks."""
        _, name = key
        tp, shape = len(shares), self.weights[key].shape
        if tp == 1 or shares[0].shape == shape:
            for share in shares[1:]:
                torch.testing.assert_close(share, shares[0], atol=1e-6, rtol=1e-5, msg=f"{key} differs between ranks")
            return shares[0]
        dim = next(dim for dim in range(len(shape)) if shares[0].shape[dim] != shape[dim])
        if dim == 0 and "query_key_value" in name and self.m != self.n:
            sizes = [self.n * self.d // tp, self.m * self.d // tp, self.m * self.d // tp]
        elif "linear1" in name and self.gated:
            sizes = [shares[0].shape[0] // 2] * 2
        else:
            return torch.cat(shares, dim)
        blocks = zip(*(share.split(sizes) for share in shares), strict=True)
        return torch.cat([part for block in blocks for part in block])

    def in_transformers(self, tensors):
        """{(layer, our name): tensor} of a Llama-like model by transformers' names."""
        last = self.layers + 3
        result = {
            "model.embed_tokens.weight": tensors[0, "word_embeddings.weight"],
            "model.norm.weight": tensors[last, "norm.scale"],
            "lm_head.weight": tensors[last + 1, "final_linear.weight"],
        }
        for number in range(self.layers):
            layer = {name: tensor for (index, name), tensor in tensors.items() if index == number + 2}
            result.update({f"model.layers.{number}.{name}": tensor for name, tensor in self._theirs(layer).items()})
        return result

    def _theirs(self, ours):
        up, gate = ours["mlp.linear1.weight"].chunk(2)
        result = {"mlp.up_proj.weight": up, "mlp.gate_proj.weight": gate}
        names = {
            "mlp.down_proj.weight": "mlp.linear2.weight",
            "input_layernorm.weight": "input_layernorm.scale",
            "post_attention_layernorm.weight": "post_attention_layernorm.scale",
            "self_attn.o_proj.weight": "attention.dense.weight",
            "self_attn.o_proj.bias": "attention.dense.bias",
            "self_attn.q_norm.weight": "attention.q_layernorm.scale",
            "self_attn.k_norm.weight": "attention.k_layernorm.scale",
        }
        result.update({theirs: ours[name] for theirs, name in names.items() if name in ours})
        for kind in ("weight", "bias"):
            mixed = ours.get(f"attention.query_key_value.{kind}")
            if mixed is not None:
                parts = zip("qkv", self._split(mixed), strict=True)
                result.update({f"self_attn.{name}_proj.{kind}": part for name, part in parts})
        return result

    def _split(self, mixed):
        """Rows of q, k and v: head by head with as many key heads as query heads, else one block behind the other."""
        n, m, d = self.n, self.m, self.d
        if n == m:
            return [part.flatten(0, 1) for part in mixed.unflatten(0, (n, 3, d)).unbind(1)]
        return mixed.split([n * d, m * d, m * d])


def transformers_model(weights):
    """The model of transformers with these weights: Qwen3 with norms over heads, else Llama; Mistral where its config
    insists on hidden_size % heads == 0."""
    import transformers

    name = "Qwen3" if weights.per_head else "Llama" if weights.h % weights.n == 0 else "Mistral"
    c = weights.c
    more = {"Mistral": {"sliding_window": None}}.get(name, {"attention_bias": c["use_bias_in_attn_linear"]})
    config = getattr(transformers, f"{name}Config")(
        vocab_size=weights.vocabulary,
        hidden_size=weights.h,
        intermediate_size=weights.mlp_width(),
        num_hidden_layers=weights.layers,
        num_attention_heads=weights.n,
        num_key_value_heads=weights.m,
        head_dim=weights.d,
        rms_norm_eps=c["rms_norm_epsilon"],
        max_position_embeddings=c["max_position_embeddings"],
        rope_parameters={"rope_type": "default", "rope_theta": float(c["rotary_emb_base"])},
        tie_word_embeddings=False,
        pad_token_id=None,
        attn_implementation="eager",
        **more,
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    model.load_state_dict(weights.in_transformers(weights.weights), strict=True)
    if c["softmax_scale"]:
        for layer in model.model.layers:
            layer.self_attn.scaling = c["softmax_scale"]
    return model


def transformers_results(weights, ids, prompts, new_tokens):
    """Logits, loss, {(layer, our name): gradient} by transformers' names, greedy tokens."""
    model = transformers_model(weights)
    tokens, labels = ids[:, :-1], ids[:, 1:]
    logits = model(input_ids=tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    options = dict(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    generated = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        written = model.generate(given, attention_mask=torch.ones_like(given), **options)
        generated.append(written[0, len(prompt) :].tolist())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"logits": logits.detach(), "loss": loss.item(), "grads": gradients, "cached": generated}
