"""Parameters of checks that take less time than pytest takes for a test."""

import functools
import inspect
import itertools


def for_each(**axes):
    """Run a test's body once for each combination of these values, all in one test. What fails names its values."""

    def decorate(test):
        @functools.wraps(test)
        def run(**fixtures):
            for values in itertools.product(*axes.values()):
                given = dict(zip(axes, values, strict=True))
                try:
                    test(**fixtures, **given)
                except Exception as error:
                    error.add_note(f"with {given}")
                    raise

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in axes]
        run.__signature__ = signature.replace(parameters=others)
        return run

    return decorate
