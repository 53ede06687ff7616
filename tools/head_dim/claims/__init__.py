"""What an article on re-examining head dimension says about wide heads, tried on small models: seen here, or not?

    python -m tools.head_dim claims [--out DIR] [--jobs N] [--page DIR]
    python -m tools.head_dim claims --no-training --page docs

Each claim has a study (tools/head_dim/studies/claim_*.yml), a number that is measured on each seed's runs, and the
range in which the claim wants it, written down in tools/head_dim/claims/claims.py before any was known. Seen: the
95 % interval of the number over the seeds lies in the range; not seen: outside; else it is not decidable at this size.
Given again, the command goes on where it was. DIR of --page gets claims.json, claims.md and a picture for each claim;
with --no-training they are made of the claims.json that is there.
"""

from tools.head_dim.claims.command import arguments, run

__all__ = ["arguments", "run"]
