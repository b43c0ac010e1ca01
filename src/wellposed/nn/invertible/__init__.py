"""Maps with an inverse: residuals of a contraction, and couplings."""
