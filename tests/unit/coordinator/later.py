"""Modules of others that take half a second and more to import, for tests that use them.

Each worker collects all tests, and runs the tests of a few files.
"""

import importlib


class Later:
    """A module that is imported when something of it is used."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("_"):  # pytest asks every name of a test file for such
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


anthropic = Later("anthropic")
openai = Later("openai")
transformers = Later("transformers")
