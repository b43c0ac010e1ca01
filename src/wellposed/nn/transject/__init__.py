"""TransJect: attention through a spectrum, orthogonal maps, injective embeddings."""
