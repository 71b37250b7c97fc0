"""Imports SGLang's pools and disaggregation code on a machine without a GPU.

SGLang is imported, never changed. Packages whose ``__init__`` pulls in the whole of SGLang stand without it, and
modules that the pools name but do not use here (kernels, model configs, quantization libraries) are placeholders.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types

ABSENT = {
    "compressed_tensors",
    "cuda",
    "cutlass",
    "decord",
    "deep_gemm",
    "einops",
    "flash_attn",
    "flashinfer",
    "numba",
    "quack",
    "sgl_kernel",
    "soundfile",
    "tilelang",
    "torchao",
    "torchvision",
    "tvm_ffi",
    "xgrammar",
}
"""Third-party packages for which a placeholder does; one that is installed is used as it is."""

WITHOUT_INIT = (
    "sglang",
    "sglang.srt.configs",
    "sglang.srt.distributed",
    "sglang.srt.layers",
    "sglang.srt.layers.attention",
    "sglang.srt.layers.deep_gemm_wrapper",
    "sglang.srt.layers.quantization",
    "sglang.srt.model_executor",
)

PLACEHOLDERS = (
    "sglang.srt.configs.model_config",
    "sglang.srt.distributed.parallel_state",
    "sglang.srt.layers.dp_attention",
    "sglang.srt.layers.radix_attention",
    "sglang.srt.model_executor.forward_batch_info",
    "sglang.srt.server_args",
    "sglang.srt.utils.hf_transformers",
    "sglang.srt.utils.hf_transformers_utils",
)


class Anything:
    """Callable, subscriptable, usable as a base class and as a decorator."""

    def __init__(self, *args, **options):
        pass

    def __call__(self, *args, **options):
        return args[0] if len(args) == 1 and callable(args[0]) and not options else Anything()

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, key):
        return Anything()

    def __mro_entries__(self, bases):
        return (object,)

    def __or__(self, other):
        return self

    __ror__ = __or__

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False


class Placeholder(types.ModuleType):
    """A module that has every name."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = type(name, (Anything,), {}) if name[:1].isupper() else Anything()
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives placeholders for absent packages, once everything else has failed."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Placeholder(spec.name)

    def exec_module(self, module):
        pass


def install():
    """Make ``import sglang.srt...`` work in this process. Raises ``ImportError`` where there is no SGLang."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise ImportError("sglang is not installed")
    root = found.submodule_search_locations[0]
    for name in WITHOUT_INIT:
        module = Placeholder(name)
        module.__path__ = [os.path.join(root, *name.split(".")[1:])]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    sys.modules.update((name, Placeholder(name)) for name in PLACEHOLDERS)
    sys.meta_path.append(Finder())
