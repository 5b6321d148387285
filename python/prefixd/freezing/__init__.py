"""Early token freezing (Gao et al., Near-Oracle KV Selection via Pre-hoc Sparsity, section IV-C and appendix D):
what it takes from a prefill and from what is stored, and what it does to predictions."""
