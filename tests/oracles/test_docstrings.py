"""Every public function and class of the oracles says which section of the specification it belongs to."""

import importlib
import inspect
import pkgutil
import re

import cupyfa.oracles

SECTION = re.compile(r"0x0[0-9A-F]|0x1[01]")


def modules():
    found = pkgutil.walk_packages(cupyfa.oracles.__path__, "cupyfa.oracles.")
    return [cupyfa.oracles, *(importlib.import_module(module.name) for module in found)]


def public(module):
    """Functions and classes that a module exports and the oracles define, with their full names."""
    names = getattr(module, "__all__", None)  # without it: everything that does not start with an underscore
    for name in [name for name in vars(module) if name[0] != "_"] if names is None else names:
        value = getattr(module, name)
        home = getattr(value, "__module__", None) or ""
        if (inspect.isfunction(value) or inspect.isclass(value)) and home.startswith("cupyfa.oracles"):
            yield f"{home}.{value.__qualname__}", value


def without_section(values):
    """Return the names whose own docstring cites no section (`__doc__` is not inherited)."""
    return sorted({name for name, value in values if not SECTION.search(value.__doc__ or "")})


def test_every_module_is_walked():
    names = {module.__name__ for module in modules()}
    assert {"cupyfa.oracles.dense", "cupyfa.oracles.hopper.ring", "cupyfa.oracles.scheduling.clc"} <= names


def test_a_missing_section_is_found():
    def silent():
        """Return nothing."""

    class Cited:
        """Hold nothing (0x0B)."""

    class Derived(Cited):
        pass

    values = {"silent": silent, "Cited": Cited, "Derived": Derived}
    assert without_section(values.items()) == ["Derived", "silent"]


def test_every_public_name_cites_its_section():
    missing = without_section(pair for module in modules() for pair in public(module))
    assert not missing, "no section id in the docstring of " + ", ".join(missing)
