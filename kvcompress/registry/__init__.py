"""Finding methods: what is installed, what of it works, and how to get it.

A distribution offers a method through an entry point in the group ``kvcompress.methods``. The
entry point's *name* is the method's name; its *value* is a light module with a
``kvcompress_register`` hook. Listing imports these light modules only; a method's own code is
imported when it is asked for.
"""

from __future__ import annotations

from kvcompress.registry.plugins import Registrar
from kvcompress.registry.registry import MethodStatus, Registry

__all__ = [
    "MethodStatus",
    "Registrar",
    "Registry",
    "get_method",
    "hooks",
    "list_methods",
    "method_class",
    "method_info",
    "refresh",
    "register",
    "unregister",
]

_default = Registry()

list_methods = _default.list_methods
get_method = _default.get_method
method_info = _default.method_info
method_class = _default.method_class
hooks = _default.hooks
register = _default.register
unregister = _default.unregister
refresh = _default.refresh
