"""Words by which a method declares, in its ``MethodInfo``, which laws do not or do bind it."""

from __future__ import annotations

CAPABILITIES = {
    "plain": "Keeps the model's own caches: there is no codec, and ``make_cache`` is all.",
    "approximate-scores": "Scores against codes differ on purpose from those against decoded keys.",
    "unlike-heads": "Heads are coded by tables of their own, so permuting heads changes codes.",
    "scale-equivariant": "A sequence times a power of two decodes to the same times that power.",
}
