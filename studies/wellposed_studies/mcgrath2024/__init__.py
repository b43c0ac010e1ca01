"""McGrath (2024), "Orthogonal Projection Loss": penalties on key and query weights of an encoder with three tasks."""
