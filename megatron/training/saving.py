"""When to write a checkpoint."""


def is_save_iter(neox_args, iteration: int) -> bool:
    """Whether extra_save_iters, or checkpoint_factor, asks for a checkpoint after this many steps.

    checkpoint_scale linear: every multiple of checkpoint_factor; log: the whole parts of its powers.
    """
    if iteration in (neox_args.extra_save_iters or ()):
        return True
    factor = neox_args.checkpoint_factor
    if not factor or iteration <= 0:
        return False
    if neox_args.checkpoint_scale == "linear":
        return iteration % int(factor) == 0
    power = 1.0
    while int(power) < iteration:
        power *= factor
    return int(power) == iteration
