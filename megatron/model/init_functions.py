"""Initial weights. Every method is called as init_method(tensor, generator=None), fills the whole (unsharded) tensor
in place and returns it.

L is num_layers, h hidden_size, sigma init_method_std.
"""

import math
from typing import Callable, Optional, Tuple

import torch

InitMethod = Callable[..., torch.Tensor]


def normal(std: float) -> InitMethod:
    """N(0, std^2)."""

    def init_method(tensor: torch.Tensor, generator: Optional[torch.Generator] = None) -> torch.Tensor:
        return torch.nn.init.normal_(tensor, mean=0.0, std=std, generator=generator)

    return init_method


def xavier_uniform(tensor: torch.Tensor, generator: Optional[torch.Generator] = None) -> torch.Tensor:
    """U(-a, a) with a = sqrt(6 / (rows + columns)) (Glorot and Bengio 2010, eq. 16)."""
    return torch.nn.init.xavier_uniform_(tensor, generator=generator)


def xavier_normal(tensor: torch.Tensor, generator: Optional[torch.Generator] = None) -> torch.Tensor:
    """N(0, 2 / (rows + columns)) (Glorot and Bengio 2010, eq. 12)."""
    return torch.nn.init.xavier_normal_(tensor, generator=generator)


def orthogonal(gain: float) -> InitMethod:
    """gain times a random matrix with orthonormal rows or columns, whichever are fewer (Saxe et al. 2013)."""

    def init_method(tensor: torch.Tensor, generator: Optional[torch.Generator] = None) -> torch.Tensor:
        return torch.nn.init.orthogonal_(tensor, gain=gain, generator=generator)

    return init_method


def init_method_named(name: str, neox_args) -> InitMethod:
    """The method that a config calls `name`:

    normal: N(0, sigma^2).
    scaled_normal: standard deviation sigma / sqrt(2 L), for the two residual branches of each layer (Radford et al.
        2019, GPT-2, section 2.3).
    single_residual_scaled_normal: sigma / sqrt(L), for layers of one residual branch.
    small_init: sqrt(2 / (5 h)) (Nguyen and Salazar 2019, "Transformers without Tears").
    wang_init: 2 / (L sqrt(h)) (Wang and Komatsuzaki 2021, GPT-J).
    orthogonal: gain sqrt(2); scaled_orthogonal: gain sqrt(2 / L).
    xavier_uniform, xavier_normal.

    h stays hidden_size where the input is as wide as all heads together, as in GPT-NeoX.
    """
    sigma, layers, hidden = neox_args.init_method_std, neox_args.num_layers, neox_args.hidden_size
    methods = {
        "normal": normal(sigma),
        "scaled_normal": normal(sigma / math.sqrt(2 * layers)),
        "single_residual_scaled_normal": normal(sigma / math.sqrt(layers)),
        "small_init": normal(math.sqrt(2 / (5 * hidden))),
        "wang_init": normal(2 / (layers * math.sqrt(hidden))),
        "orthogonal": orthogonal(math.sqrt(2)),
        "scaled_orthogonal": orthogonal(math.sqrt(2 / layers)),
        "xavier_uniform": xavier_uniform,
        "xavier_normal": xavier_normal,
    }
    return methods[name]


def get_init_methods(neox_args) -> Tuple[InitMethod, InitMethod]:
    """(init_method, output_layer_init_method); the second is for linear2 and the attention's output projection."""
    return (
        init_method_named(neox_args.init_method, neox_args),
        init_method_named(neox_args.output_layer_init_method, neox_args),
    )
