"""Metrics and workloads that installed plugins add to a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import frozen

from kvcompress.compare.metrics import METRICS, Metric
from kvcompress.errors import BrokenPlugin

if TYPE_CHECKING:
    from kvcompress.compare.protocol import Protocol
    from kvcompress.compare.session import Session

T = TypeVar("T")


@frozen
class Workload:
    """A task of its own that gives one number a method.

    A plugin adds workloads by the hook ``kvcompress_workloads``, which returns them by name.

    Attributes:
        title: Heading of the column.
        run: Called with a session that has read nothing, the model's tokenizer and the protocol.
            Returns the number.
        help: One sentence for the legend.
    """

    title: str
    run: Callable[[Session, Any, Protocol], float]
    help: str


def added_metrics() -> dict[str, Metric]:
    """The metrics of all plugins by name.

    Raises:
        BrokenPlugin: One is no metric, or two have one name.
    """
    from kvcompress.registry import hooks

    return _gathered(hooks().kvcompress_metrics(), Metric, set(METRICS))


def added_workloads() -> dict[str, Workload]:
    """The workloads of all plugins by name.

    Raises:
        BrokenPlugin: One is no workload, or two have one name.
    """
    from kvcompress.registry import hooks

    return _gathered(hooks().kvcompress_workloads(), Workload, set(METRICS) | set(added_metrics()))


def _gathered(offers: Iterable[Mapping[str, Any]], kind: type[T], taken: set[str]) -> dict[str, T]:
    found: dict[str, T] = {}
    word = kind.__name__.lower()
    for offer in offers:
        for name, value in offer.items():
            if not isinstance(value, kind):
                raise BrokenPlugin(
                    f"{word} {name}: must be a kvcompress.compare.{kind.__name__} (got {value!r})"
                )
            if name in taken or name in found:
                raise BrokenPlugin(
                    f"{word} {name}: the name is taken; a plugin must choose another"
                )
            found[name] = value
    return found
