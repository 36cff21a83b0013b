"""What was read of mlx-lm's caches, and what sets an installed version apart from it, in words."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Members that mlx-lm calls on a cache, each with its parameters; ours have them all.
CACHE: dict[str, str] = {
    "empty": "",
    "from_state": "state",
    "is_trimmable": "",
    "keys_and_values": "",
    "make_mask": "*args, **kwargs",
    "merge": "caches",
    "nbytes": "",
    "offset": "",
    "size": "",
    "state": "",
    "trim": "n",
    "update_and_fetch": "keys, values",
}
BATCH: dict[str, str] = CACHE | {
    "extend": "other",
    "extract": "idx",
    "filter": "batch_indices",
    "finalize": "",
    "make_mask": "N, return_array, **kwargs",
    "prepare": "left_padding, lengths, right_padding",
}

# Members that ours do not have, and what has them do without.
UNWANTED: dict[str, str] = {
    "keys": "a model that takes the arrays keeps its plain cache",
    "step": "only KVCache's own arrays grow by it",
    "to_quantized": "--kv-bits would replace the cache",
    "values": "a model that takes the arrays keeps its plain cache",
}
UNWANTED_IN_A_BATCH: dict[str, str] = {
    name: why for name, why in UNWANTED.items() if name != "to_quantized"
} | {"left_padding": "no padding is stored"}


def differences(
    theirs: Any, ours: type, read: Mapping[str, str], unwanted: Mapping[str, str]
) -> list[str]:
    """One line for each way in which a cache of mlx-lm differs from what was read.

    Args:
        theirs: A fresh cache of mlx-lm.
        ours: The class of kvcompress that stands in for it.
        read: Its members and their parameters as they were read.
        unwanted: Members that ``ours`` must not have.
    """
    kind, name = type(theirs), type(theirs).__name__
    found = {member for member in dir(theirs) if not member.startswith("_")}
    lines = [
        f"{name} has a new member {member!r}: see what mlx-lm uses it for, then have "
        f"{ours.__name__} offer it and add it to what was read, or to what is unwanted"
        for member in sorted(found - read.keys() - unwanted.keys())
    ]
    lines += [
        f"{name} has no member {member!r} any more: see what mlx-lm uses in its place, then take "
        f"it out of what was read, and out of {ours.__name__} if nothing asks for it"
        for member in sorted((read.keys() | unwanted.keys()) - found)
    ]
    for member in sorted(found & read.keys()):
        now = parameters(kind, member)
        if now != read[member]:
            lines.append(
                f"{name}.{member} takes ({now}), where ({read[member]}) was read: "
                f"{ours.__name__}.{member} takes ({parameters(ours, member)})"
            )
    return lines


def parameters(kind: type, member: str) -> str:
    """A method's parameters but the first, as ``"keys, values"``; empty for what is no method."""
    found = inspect.getattr_static(kind, member, None)
    function = getattr(found, "__func__", found)
    if not inspect.isfunction(function):
        return ""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    named = [stars.get(p.kind, "") + n for n, p in inspect.signature(function).parameters.items()]
    return ", ".join(named if isinstance(found, staticmethod) else named[1:])


def misfits(path: Path) -> list[str]:
    """One line for each thing that a file takes from mlx-lm, or calls, and that does not fit."""
    text = path.read_text(encoding="utf-8")
    if "mlx_lm" not in text:
        return []
    tree = ast.parse(text)
    taken: dict[str, Any] = {}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(a.asname or a.name, a.name, "") for a in node.names if a.name == "mlx_lm"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mlx_lm":
            names = [(a.asname or a.name, str(node.module), a.name) for a in node.names]
        else:
            continue
        for name, module, member in names:
            found = _found(module, member)
            if found is None:
                lines.append(f"{path.name} takes {member} from {module}, which has it no more")
            taken[name] = found
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = taken.get(node.value.id)
            if inspect.ismodule(owner) and not hasattr(owner, node.attr):
                lines.append(f"{path.name} asks {owner.__name__} for {node.attr}, which it lacks")
        elif isinstance(node, ast.Call):
            function = _called(node, taken)
            misfit = "" if function is None else _misfit(function, node)
            if misfit:
                lines.append(f"{path.name}:{node.lineno} calls {ast.unparse(node.func)}: {misfit}")
    return lines


def _found(module: str, member: str) -> Any:
    try:
        owner = importlib.import_module(module)
    except ImportError:
        return None
    if not member or hasattr(owner, member):
        return getattr(owner, member) if member else owner
    try:
        return importlib.import_module(f"{module}.{member}")
    except ImportError:
        return None


def _called(call: ast.Call, taken: Mapping[str, Any]) -> Any:
    """The function of mlx-lm that is called, if it is one."""
    if isinstance(call.func, ast.Name):
        found = taken.get(call.func.id)
    elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        found = getattr(taken.get(call.func.value.id), call.func.attr, None)
    else:
        return None
    return found if inspect.isfunction(found) else None


def _misfit(function: Any, call: ast.Call) -> str:
    given = [arg for arg in call.args if not isinstance(arg, ast.Starred)]
    named = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    whole = len(given) == len(call.args) and len(named) == len(call.keywords)
    signature = inspect.signature(function)
    bind = signature.bind if whole else signature.bind_partial
    try:
        bind(*given, **named)
    except TypeError as error:
        return f"{error}; it takes {signature}"
    return ""
