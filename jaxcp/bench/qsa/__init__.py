"""`jaxcp bench qsa`: a QSA layer on one GPU, part by part, beside its peers and its floors."""
