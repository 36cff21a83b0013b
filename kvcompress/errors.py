"""The kinds of error that kvcompress raises.

Every text names who complains, the field, the value it got, what is legal and, where one
exists, the next command to run.
"""

from __future__ import annotations


class KVCompressError(Exception):
    """Base of every error that kvcompress raises on purpose."""


class UnknownMethod(KVCompressError, LookupError):
    """No plugin offers a method of that name."""


class BrokenPlugin(KVCompressError):
    """A plugin was found but could not be imported or does not keep the contract."""


class PluginConflict(KVCompressError):
    """Two distributions offer a method of the same name; ``"distribution:name"`` chooses."""


class IncompatiblePlugin(KVCompressError):
    """A plugin was written for another version of the plugin API."""


class ConfigError(KVCompressError, ValueError):
    """An option, a shape or a combination of options is not legal."""


class CalibrationRequired(KVCompressError):
    """The method needs calibration and was given none."""


class CalibrationMismatch(KVCompressError):
    """A calibration was made for another model, layer, shape or configuration."""


class UnsupportedModel(KVCompressError):
    """The model, or one of its layers, cannot run with a compressed cache."""


class CacheFileError(KVCompressError):
    """A saved cache is truncated, foreign, of another format or does not fit the model."""


class DownloadError(KVCompressError):
    """The embedded model could not be fetched or did not match its pinned hash."""


class BatchError(KVCompressError, ValueError):
    """Caches of different methods, models or shapes were combined."""
