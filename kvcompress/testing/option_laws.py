"""Laws of a method's options: strict, named in errors, used, and the same after JSON."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvcompress.config import Option, from_json, options_of, to_json
from kvcompress.config.option import shown
from kvcompress.errors import CalibrationRequired, ConfigError
from kvcompress.testing.calibration import takes_calibration
from kvcompress.testing.data import tokens
from kvcompress.testing.law import UNHEEDED, Draw, LawError, law, require
from kvcompress.testing.subject import Bound, Subject, step_of

BAD_VALUES: tuple[Any, ...] = (
    None, True, "4", "no such word", 4.0, 3.5, float("nan"), float("inf"), 0, -1, 5, 7, 10**9, [],
    {}, (1, 2, 3),
)  # fmt: skip
"""What somebody once passed for a number of bits, a word or a switch."""

_TRIES = 25


class OptionLaws(Subject):
    """Laws of configuration."""

    def test_bad_values_are_refused(self) -> None:
        """At construction, naming option and value; never clamped, never met in a kernel."""
        for option in options_of(self.cls):
            for value in BAD_VALUES:
                self._check_value(option, value)

    def _check_value(self, option: Option, value: Any) -> None:
        try:
            method = self.build(**{option.name: value})
        except (ConfigError, TypeError) as error:
            require(
                option.name in str(error) and any(t in str(error) for t in _named(option, value)),
                f"{option.name}={value!r} is refused without naming both: {error}",
            )
            return
        except Exception as error:
            raise LawError(f"{option.name}={value!r} raises {error!r}") from error
        kept = getattr(method, option.name)
        same = type(kept) is type(value) and bool(kept == value)
        pair = isinstance(kept, tuple) and kept == (value, value) and type(kept[0]) is type(value)
        real = isinstance(kept, float) and type(value) is int and kept == value
        given = isinstance(kept, np.ndarray) and np.array_equal(kept, np.asarray(value))
        require(
            same or pair or real or given,
            f"{option.name}={value!r} is taken, as {kept!r}; legal is {option.legal}",
        )

    def test_arrays_of_wrong_shape_are_refused(self) -> None:
        """A codebook with the wrong number of rows was taken, and reported as if it were right."""
        self.needs_codec()
        arrays = [option for option in self.drawable_options() if not _simple(option)]
        if not arrays:
            pytest.skip("the method has no option that is an array")
        for option in arrays:
            for shape in ((3,), (1, 3), (3, 5, 7), (2, 1, 3, 5)):
                try:
                    self.build(**{option.name: np.ones(shape, np.float32)}).bind(
                        self.standard_layer
                    )
                except ConfigError as error:
                    named = option.name in str(error)
                    require(named, f"{option.name} of shape {shape} is refused namelessly: {error}")
                else:
                    raise LawError(f"{option.name} of shape {shape} is taken")

    def test_unknown_options_are_refused(self) -> None:
        """A misspelt option that is swallowed leaves the default in force."""
        name = next((option.name for option in options_of(self.cls)), "window")
        for wrong in (name + "s", "x" + name, "no_such_option"):
            try:
                self.build(**{wrong: 1})
            except (ConfigError, TypeError) as error:
                require(wrong in str(error), f"{wrong} is refused namelessly: {error}")
            else:
                raise LawError(f"the unknown option {wrong} is taken")

    def test_every_parameter_is_declared(self) -> None:
        """A parameter that is not declared as an option is neither checked, shown nor saved."""
        declared = {option.name for option in options_of(self.cls)} | {"calibration"}
        strange = sorted(set(inspect.signature(self.cls).parameters) - declared)
        require(not strange, f"{', '.join(strange)}: declare with a helper of kvcompress.config")

    @law()
    def test_json_gives_the_same_method(self, draw: Draw) -> None:
        """A configuration that a file cannot carry cannot be told from another."""
        options = self._draw_options(draw, {})
        method = self.build(**options, **self.draw_cache_options(draw))
        text = to_json(method)
        arrays = {
            option.name: getattr(method, option.name)
            for option in options_of(self.cls)
            if isinstance(getattr(method, option.name), np.ndarray)
        }
        again = from_json(self.cls, text, arrays)
        require(to_json(again) == text, f"JSON changes from {text} to {to_json(again)}")
        rebuilt = self.build(**{o.name: getattr(again, o.name) for o in options_of(self.cls)})
        require(rebuilt.fingerprint == method.fingerprint, f"{text} has two fingerprints")

    def test_every_option_counts(self) -> None:
        """An option that is checked, shown and never read."""
        self.needs_codec()
        if self.options:
            pytest.skip("fixed options may leave others without effect")
        simple = {option.name: option for option in self.drawable_options() if _simple(option)}
        waiting = set(simple)

        def try_beside(others: Mapping[str, Any], values: Mapping[str, Any]) -> None:
            for name in sorted(waiting):
                pair = [
                    {**others, name: values[name]},
                    {k: v for k, v in others.items() if k != name},
                ]
                try:
                    first, second = (_traces(self, options) for options in pair)
                except (ConfigError, CalibrationRequired):
                    continue
                if first != second:
                    waiting.remove(name)

        def beside_any(data: st.DataObject) -> None:
            others = self._draw_options(data.draw, {})
            try_beside(others, {name: data.draw(o.strategy()) for name, o in simple.items()})

        def beside_each_word(data: st.DataObject) -> None:
            values = {name: data.draw(o.strategy()) for name, o in simple.items()}
            for option in self.drawable_options():
                for word in _words(option):
                    try_beside({option.name: word}, values)
                    if takes_calibration(self.cls):
                        try_beside({option.name: word, "calibration": None}, values)

        for example, tries in ((beside_any, _TRIES), (beside_each_word, _TRIES // 5)):
            plain = settings(
                max_examples=tries,
                deadline=None,
                phases=[Phase.generate],
                derandomize=True,
                database=None,
                suppress_health_check=UNHEEDED,
            )
            if waiting:
                plain(given(st.data())(example))()
        require(
            not waiting,
            f"no value tried of {', '.join(sorted(waiting))} changes what is stored or attended",
        )

    def test_calibration_is_asked_for(self) -> None:
        """No silent random tables: a method that needs calibration says how to make one."""
        if not isinstance(self.method, str):
            pytest.skip("the method is given as a class, without its MethodInfo")
        from kvcompress.registry import get_method, method_info

        if not method_info(self.method).needs_calibration:
            pytest.skip(f"{self.method} needs no calibration")
        try:
            get_method(self.method, **self.options).bind(self.standard_layer)
        except CalibrationRequired as error:
            require(
                "kvcompress calibrate" in str(error) and self.method in str(error),
                f"the error does not say how to make a calibration: {error}",
            )
        else:
            raise LawError(f"{self.method} binds without the calibration it needs")


def _simple(option: Option) -> bool:
    """Whether the option is a number, a word or a switch."""
    return not isinstance(option.encode(np.zeros(1, np.float32)), Mapping)


def _named(option: Option, value: Any) -> list[str]:
    """What names a value in an error: itself, or its shape where an array is asked for."""
    listed = isinstance(value, tuple | list) and not _simple(option)
    return [shown(value), *([str(np.shape(value))] if listed else [])]


def _words(option: Option) -> tuple[Any, ...]:
    """The words and switches that are legal for an option, on which another may depend."""
    if isinstance(option.default, bool):
        return (not option.default,)
    return tuple(getattr(option, "words", ()))


def _traces(subject: Subject, options: Mapping[str, Any]) -> tuple[bytes, ...]:
    """What a short sequence leaves under these options: codes, and what attention gives."""
    bound: Bound = subject.standard(window=16, sinks=1, block=16, **options)
    came, cache = tokens(bound.layer, 130), subject.new_cache(bound)
    first, last = came.part(0, 128), came.part(128, 130)
    cache.update_and_fetch(first.keys, first.values)
    keys, values = cache.update_and_fetch(last.keys, last.values)
    out = step_of(keys).attend(last.queries, scale=0.125, mask="causal")
    header = repr(attrs.asdict(bound.codec.schema)).encode()
    return (header, *(np.array(mx.array(x)).tobytes() for x in (keys, values, out)))
