"""Laws that only another process can try."""

from __future__ import annotations

from kvcompress.testing.child import Survey, survey, survey_tokens, try_head_dim
from kvcompress.testing.law import require, require_resemblance, require_same_decoding
from kvcompress.testing.strategies import HEAD_DIMS
from kvcompress.testing.subject import Subject

_surveys: dict[type, Survey] = {}


class ProcessLaws(Subject):
    """Laws of head sizes and of bytes that are the same everywhere."""

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Head sizes to try; few where each needs a fit."""
        return HEAD_DIMS[::3] if self.is_calibrated() else HEAD_DIMS

    def _survey(self) -> Survey:
        self.needs_codec()
        cls = type(self)
        if cls not in _surveys:
            _surveys[cls] = survey(self, self.head_dims)
        return _surveys[cls]

    def test_head_sizes_bind_or_are_refused(self) -> None:
        """A transform that MLX cannot do corrupts the heap; a wrong group fails in a kernel.

        Each size works, or is refused when the layer is bound, by an error that names it.
        """
        found = self._survey()
        require(not found.died_at, f"head_dim {found.died_at} ended the process: {found.words}")
        for dim, outcome in found.outcomes.items():
            if outcome.refused:
                named = str(dim) in outcome.refused
                require(named, f"head_dim {dim} is refused without its name: {outcome.refused}")
                continue
            _, came = survey_tokens(self, dim)
            require_resemblance(outcome.keys, came.keys, f"keys of head_dim {dim}")
            require_resemblance(outcome.values, came.values, f"values of head_dim {dim}")
        works = any(not outcome.refused for outcome in found.outcomes.values())
        require(works, "no head size works")

    def test_other_processes_code_alike(self) -> None:
        """A hash seed or the order of imports may not reach the codes: files outlive processes."""
        for dim, theirs in self._survey().outcomes.items():
            ours = try_head_dim(self, dim)
            refused = (ours.refused, theirs.refused)
            require(refused[0] == refused[1], f"head_dim {dim} is refused as {refused}")
            if ours.refused:
                continue
            _, came = survey_tokens(self, dim)
            what = f"head_dim {dim}, here and in another process"
            require_same_decoding(ours.keys, theirs.keys, came.keys, what)
            require_same_decoding(ours.values, theirs.values, came.values, what)
