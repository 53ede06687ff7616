"""Bytes of a training step on the fullest rank, under tensor and pipeline parallelism, ZeRO and checkpointing."""

from dataclasses import dataclass, replace
from typing import List, NamedTuple, Optional

from megatron.costs.activations import Batch, attention_bytes, kernels_of, layer_activations, norm_bytes
from megatron.costs.parameters import share
from megatron.costs.stages import FIRST_TRANSFORMER_LAYER, Stage, stage_parameters, stages
from megatron.costs.states import States, states
from megatron.mpu.fused_linear_cross_entropy import IN_CACHE


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest rank. The parts are the most that each takes; total is the most at one time, so less than
    their sum: gradients grow while activations go, and the optimizer steps after the backward pass.

    weights: in the model's precision, this rank's share. gradients: at the end of the backward pass.
    optimizer: master weights and what the optimizer keeps for each. activations: of all micro batches in flight, and
    of the layers that are being recomputed. logits: those of the last stage and the copies that the loss makes.
    other: buffers of collectives, weights that ZeRO 3 gathers, and what a layer's backward pass or the optimizer's
    step needs while it runs. Not in it: what the device itself and its libraries take, and fragmentation.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    other: int
    total: int


class _Kept(NamedTuple):
    """Activations of a stage. kept: of one micro batch until its backward pass; first: what of them is left at the
    first layer; recomputed: the largest group of layers that is computed again; workspace: of one layer's backward
    pass; late: the part of the parameters whose gradients come with or after those of the first layer or group."""

    kept: int
    first: int
    recomputed: int
    workspace: int
    late: float


def memory_per_rank(neox_args, *, world_size: Optional[int] = None, device: str = "cuda") -> MemoryEstimate:
    """The estimate for the fullest rank of a run on `world_size` devices (default: global_num_gpus).

    device: "cuda" or "cpu", whose attention kernels and norms keep different tensors.
    """
    every = (_stage_memory(neox_args, stage, world_size, device) for stage in stages(neox_args))
    return max(every, key=lambda estimate: estimate.total)


def memory_of_stage(neox_args, stage: int, *, world_size: Optional[int] = None, device: str = "cuda") -> MemoryEstimate:
    """As memory_per_rank, for the ranks of one pipeline stage."""
    return _stage_memory(neox_args, stages(neox_args)[stage], world_size, device)


def _stage_memory(neox_args, stage: Stage, world_size: Optional[int], device: str) -> MemoryEstimate:
    pipeline = max(1, neox_args.pipe_parallel_size)
    replicas = max(1, (world_size or neox_args.global_num_gpus) // (pipeline * neox_args.model_parallel_size))
    parameters, batch = stage_parameters(neox_args, stage), Batch.of(neox_args, device)
    held = states(neox_args, parameters, replicas)
    micro_batches = neox_args.gradient_accumulation_steps or 1
    in_flight = min(pipeline - stage.number, micro_batches)
    activations = _activations(neox_args, stage, batch)
    logits = _logit_bytes(neox_args, batch) if stage.has_head else 0
    # DeepSpeed's pipeline holds on to the outputs of its two buffers.
    outputs = _outputs(neox_args, batch) if stage.has_head and neox_args.is_pipe_parallel else 0
    busy = max(
        _peak(held, activations, logits, in_flight, micro_batches) + (outputs if micro_batches > 1 else 0),
        held.gradients + held.step + outputs * min(2, micro_batches),
    )
    return MemoryEstimate(
        weights=held.weights,
        gradients=held.gradients,
        optimizer=held.optimizer,
        activations=in_flight * activations.kept + activations.recomputed,
        logits=logits,
        other=held.buffers + held.gathered + max(held.step, activations.workspace) + 2 * outputs,
        total=held.weights + held.optimizer + held.buffers + held.gathered + busy,
    )


def _peak(held: States, activations: _Kept, logits: int, in_flight: int, micro_batches: int) -> int:
    """The most of what comes and goes: at the loss, in the backward pass of the last and of the first layer (or group
    of layers that is checkpointed), after it, and in the optimizer's step."""
    before = held.gradients if micro_batches > 1 else held.standing
    others = (in_flight - 1) * activations.kept
    layer = activations.recomputed + activations.workspace
    early = max(before, held.standing + int((held.gradients - held.standing) * (1 - activations.late)))
    return max(
        before + others + activations.kept + max(logits, layer),
        early + others + activations.first + layer,
        held.gradients + max(others, held.step),
    )


def _activations(neox_args, stage: Stage, batch: Batch) -> _Kept:
    c, hidden = batch.number_bytes, neox_args.hidden_size
    stream = c * batch.stream_tokens * hidden
    each = {number: sum(layer_activations(neox_args, number, batch).values()) for number in stage.layers}
    checkpointed = _segments(neox_args, stage)
    inside = {number for segment in checkpointed for number in segment}
    boundary = stream
    if neox_args.partition_activations:
        boundary = 0 if neox_args.checkpoint_in_cpu else stream // batch.ranks
    kept = boundary * len(checkpointed) + sum(size for number, size in each.items() if number not in inside)
    if stage.has_embedding:
        kept += 8 * batch.tokens
        kept += batch.mask_bytes * batch.stream_tokens * hidden if neox_args.hidden_dropout > 0 else 0
    if stage.has_norm:
        kept += norm_bytes(neox_args, batch.stream_tokens, hidden, batch)
    if stage.has_head:  # its input: a tied one keeps the whole sequence
        whole = not neox_args.no_weight_tying
        kept += c * (batch.tokens if whole else batch.stream_tokens) * hidden
    else:
        kept += stream  # sent on, and kept for the gradient to come back to
    recomputed = max((sum(each[number] for number in segment) for segment in checkpointed), default=0)
    workspace = max((_workspace(neox_args, number, batch) for number in stage.layers), default=0)
    first = boundary if checkpointed else next(iter(each.values()), 0)
    return _Kept(kept, first, recomputed, workspace, _late_share(neox_args, stage, checkpointed))


def _late_share(neox_args, stage: Stage, checkpointed: List[List[int]]) -> float:
    """See _Kept.late."""
    numbers = checkpointed[0] if checkpointed else stage.layers[:1]
    beginning = replace(stage, end=max(stage.first, FIRST_TRANSFORMER_LAYER + max(numbers, default=-1) + 1))
    late, every = (
        sum(shape.numel for shape in stage_parameters(neox_args, part) if shape.trains) for part in (beginning, stage)
    )
    return late / every if every else 0.0


def _segments(neox_args, stage: Stage) -> List[List[int]]:
    """The groups of transformer layers that are checkpointed as one: without a pipeline each checkpoint_num_layers.

    DeepSpeed's pipeline counts from the beginning of the stage, whatever is there, and keeps the activations of a
    group in which anything else is than transformer layers.
    """
    if not neox_args.checkpoint_activations:
        return []
    interval = neox_args.checkpoint_num_layers
    if not neox_args.is_pipe_parallel:
        return [list(stage.layers[start : start + interval]) for start in range(0, len(stage.layers), interval)]
    groups = [range(start, min(start + interval, stage.end)) for start in range(stage.first, stage.end, interval)]
    numbers = [[index - FIRST_TRANSFORMER_LAYER for index in group] for group in groups]
    return [group for group in numbers if all(number in stage.layers for number in group)]


def _workspace(neox_args, number: int, batch: Batch) -> int:
    """Gradients that exist at one time in a layer's backward pass, less the activations that it has freed by then."""
    c, mlp = batch.number_bytes, neox_args.mlp_geometry(number).shard(batch.ranks)
    qkv = neox_args.head_geometry(number).shard(batch.ranks).qkv_hidden_size
    parts = layer_activations(neox_args, number, batch)
    freed = parts["mlp"] + parts["norms"] // 2 + attention_bytes(neox_args, number, batch)["context"]
    stream = 2 * c * batch.tokens * neox_args.hidden_size
    branches = c * batch.tokens * (mlp.linear1_width + mlp.ffn_hidden_size)
    explicit = [
        group.num_attention_heads
        for kernel, group in kernels_of(neox_args, number, batch)
        if kernel in ("global", "explicit")
    ]
    heads = 2 * c * batch.tokens * qkv
    scores = (8 if c == 4 else 6) * batch.texts * max(explicit, default=0) * batch.length**2
    return stream + max(branches, heads + scores - freed)


def _logit_bytes(neox_args, batch: Batch) -> int:
    """Logits [T, v / p], what a soft cap keeps, and the copies in the backward pass of the loss: the logits in fp32,
    the softmax, its product with the weights, and that in the model's precision. See megatron/mpu/cross_entropy.py."""
    if neox_args.fused_loss_chunk is not None:
        return fused_loss_bytes(neox_args, batch)
    c = batch.number_bytes
    copies = 2 * c if neox_args.fp16_lm_cross_entropy else (8 if c == 4 else 14)
    cap = 0 if neox_args.final_logit_softcap is None else c
    return _logits(neox_args, batch) // c * (c + cap + copies)


def fused_loss_bytes(neox_args, batch: Batch) -> int:
    """The most that FusedLinearCrossEntropy has at one time, without its input. In the forward pass: a chunk's logits
    [n, v / p], with a soft cap their slope, the fp32 softmax (on the CPU of some rows at a time) or a part of the
    weight's gradient, and the sums of the gradients, which remain. In the backward pass these and what is made of them.
    """
    c, columns = batch.number_bytes, share(neox_args.padded_vocab_size, batch.ranks)
    size = min(neox_args.fused_loss_chunk, batch.tokens)
    several = size < batch.tokens
    weight = columns * neox_args.hidden_size
    sums = c * batch.tokens * neox_args.hidden_size + (4 if several else c) * weight
    chunk, capped = c * size * columns, neox_args.final_logit_softcap is not None
    rows = max(1, IN_CACHE // columns) if batch.device == "cpu" else size
    softmax = (4 if c == 4 else 8) * min(rows, size) * columns
    product = c * min(weight, 2 * IN_CACHE) if several and c < 4 else 0
    forward = chunk * (2 if capped else 1) + max(softmax, product)
    return sums + max(forward, c * (batch.tokens * neox_args.hidden_size + weight))


def _outputs(neox_args, batch: Batch) -> int:
    """What the pipeline's last stage gives to the loss."""
    if neox_args.fused_loss_chunk is not None:
        return batch.number_bytes * batch.tokens * neox_args.hidden_size
    return _logits(neox_args, batch)


def _logits(neox_args, batch: Batch) -> int:
    return batch.number_bytes * batch.tokens * share(neox_args.padded_vocab_size, batch.ranks)
