"""Huang, Pérez, Ba, Volkovs (2020), "Improving Transformer Optimization": T-Fixup."""
