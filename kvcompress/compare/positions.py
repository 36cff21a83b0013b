"""How many tokens a model was made for."""

from __future__ import annotations

from typing import Any

from kvcompress.errors import ConfigError


def check_positions(model: Any, tokens: int, who: str, remedy: str) -> None:
    """Refuse what is longer than the model was made for, where the model says so.

    Args:
        model: An mlx-lm model.
        tokens: Positions that are wanted.
        who: Who wants them, for the error.
        remedy: What to do instead.

    Raises:
        ConfigError: The model has fewer.
    """
    args = getattr(model, "args", None)
    limit = getattr(args, "max_position_embeddings", None)
    if isinstance(limit, int) and tokens > limit:
        raise ConfigError(
            f"{who}: {tokens} tokens are more than the model's {limit} positions; {remedy}"
        )
