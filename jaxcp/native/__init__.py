"""The C++/CUDA library: find compilers, build once, cache, load, register. Importing this builds nothing."""

from jaxcp.native.builder import ARCHITECTURES as ARCHITECTURES
from jaxcp.native.builder import build as build
from jaxcp.native.builder import cache_folder as cache_folder
from jaxcp.native.builder import source_folder as source_folder
from jaxcp.native.library import Library as Library
from jaxcp.native.registry import load as load
from jaxcp.native.registry import load_exchange as load_exchange
from jaxcp.native.workspace_library import WorkspaceLibrary as WorkspaceLibrary
