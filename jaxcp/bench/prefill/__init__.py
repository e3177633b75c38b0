"""`jaxcp bench prefill`: a stack of QSA layers under context parallelism, one rank's share or all ranks."""
