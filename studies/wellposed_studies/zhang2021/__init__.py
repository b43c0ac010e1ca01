"""Zhang et al. (2021), "On Orthogonality Constraints for Transformers": Tables 1 to 4 and Theorem 2.1."""
