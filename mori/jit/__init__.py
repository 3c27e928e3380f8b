"""Compiles device code when a program first needs it, and keeps the result.

    from mori import jit
    cubin = jit.compile(jit.Spec("add", source=text, kernels=("add",), arch="sm_90"))

What the code is for is not known here. `spec` says what to compile, `compilers` by what, `cache` where results stay,
`build` puts these together. Needs neither torch nor a GPU. docs/jit.md is the user's view.
"""

from __future__ import annotations

from mori.jit.build import compile, forget
from mori.jit.errors import CacheWarning, CompilationDisabled, CompileError, CompilerNotFound, SourcesNotFound
from mori.jit.sources import source_root
from mori.jit.spec import Spec

__all__ = [
    "CacheWarning",
    "CompilationDisabled",
    "CompileError",
    "CompilerNotFound",
    "SourcesNotFound",
    "Spec",
    "compile",
    "forget",
    "source_root",
]
