"""GPU kernels of jaxcp, one file per kernel. They know shapes and dtypes, nothing of meshes."""
