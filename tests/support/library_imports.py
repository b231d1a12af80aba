"""What fork servers of `test_libraries_integration.py` import before they fork: once, and not in every rank anew."""

import contextlib
from importlib import import_module

import torch._dynamo  # noqa: F401 - what every optimizer imports

for _name in ("lightning.pytorch", "lightning.fabric", "transformers.trainer"):
    with contextlib.suppress(ImportError):  # the tests of what is not there are skipped
        import_module(_name)
