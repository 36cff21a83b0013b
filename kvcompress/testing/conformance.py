"""The whole suite of laws in one class."""

from __future__ import annotations

from kvcompress.testing.attention_laws import AttentionLaws
from kvcompress.testing.cache_laws import CacheLaws
from kvcompress.testing.codec_laws import CodecLaws
from kvcompress.testing.memory_laws import MemoryLaws
from kvcompress.testing.model_laws import ModelLaws
from kvcompress.testing.option_laws import OptionLaws
from kvcompress.testing.process_laws import ProcessLaws
from kvcompress.testing.quality_laws import QualityLaws
from kvcompress.testing.stage_laws import StageLaws


class MethodConformance(
    StageLaws,
    CodecLaws,
    QualityLaws,
    CacheLaws,
    AttentionLaws,
    MemoryLaws,
    OptionLaws,
    ProcessLaws,
    ModelLaws,
):
    """Everything that a compression method promises.

    Subclass it, name it ``Test...`` so that pytest finds it, and set ``method`` to the name under
    which yours is registered, or to its class.
    """
