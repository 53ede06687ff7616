"""MixtralForCausalLM, refused by name."""

from typing import Any, Dict, List

from megatron.convert.families.base import Family, refuse


class Mixtral(Family):
    """Mixture of experts, which is not built: moe_num_experts is refused as well."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"

    def settings(self, config: Any) -> Dict[str, Any]:
        refuse([f"num_local_experts={config.num_local_experts}: mixture of experts is not built; import a dense model"])

    def refusals(self, neox_args) -> List[str]:
        return [f"num_local_experts: a {self.architecture} is a mixture of experts, which no model here is"]
